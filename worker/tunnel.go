// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/tenantd/tenantd/konnectivity/agent"
	"github.com/tenantd/tenantd/worker/api"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/hosts"
	"github.com/tenantd/tenantd/worker/kubelet"
)

const (
	// joinInterval is how soon the tunnel is up after the node has joined.
	joinInterval = 2 * time.Second

	// nodeInterval is how long a change of the node's addresses goes unnoticed.
	nodeInterval = time.Minute

	// nodeTimeout bounds the question after them.
	nodeTimeout = 5 * time.Second

	// drainInterval is how often a process that drains looks for streams.
	drainInterval = 100 * time.Millisecond
)

// tunnel runs the agent once the node has joined, and anew when the node's name or
// addresses change.
type tunnel struct {
	// Constant after construction.
	file     *config.Config
	roots    *x509.CertPool
	identity *kubelet.Identity
	client   *api.Client
	list     *hosts.List
	log      *slog.Logger

	mu      sync.Mutex // guards what follows
	agent   *agent.Agent
	problem string // why there is no agent
}

// TunnelStatus is the state of the tunnel.
type TunnelStatus struct {
	Node    string         `json:"node,omitempty"`
	Problem string         `json:"problem,omitempty"` // why there is no agent
	Servers []TunnelServer `json:"servers"`
}

// TunnelServer is the state of the tunnel to one server.
type TunnelServer struct {
	Server    string `json:"server"`
	Connected bool   `json:"connected"`
	Streams   int    `json:"streams"` // open connections
	Error     string `json:"error,omitempty"`
}

func (t *tunnel) status() TunnelStatus {
	t.mu.Lock()
	running, s := t.agent, TunnelStatus{Problem: t.problem, Servers: []TunnelServer{}}
	t.mu.Unlock()
	s.Node, _ = t.node()
	if running != nil {
		for _, one := range running.Status() {
			s.Servers = append(s.Servers, TunnelServer{one.Server, one.Connected, one.Streams, one.Error})
		}
	}
	return s
}

// connected counts the servers that the tunnel reaches.
func (s TunnelStatus) connected() int {
	n := 0
	for _, server := range s.Servers {
		if server.Connected {
			n++
		}
	}
	return n
}

// idle waits until no connection is open through the tunnel, or ctx is done.
func (t *tunnel) idle(ctx context.Context) {
	tick := time.NewTicker(drainInterval)
	defer tick.Stop()
	for t.status().streams() > 0 {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// streams counts the connections through the tunnel.
func (s TunnelStatus) streams() int {
	n := 0
	for _, server := range s.Servers {
		n += server.Streams
	}
	return n
}

func (t *tunnel) node() (string, error) {
	if t.file.Node != "" {
		return t.file.Node, nil
	}
	return t.identity.Name()
}

// whoami is what an agent says of its node.
type whoami struct {
	node, serverName string
	addresses        []netip.Addr
}

func (a whoami) equal(b whoami) bool {
	return a.node == b.node && a.serverName == b.serverName && slices.Equal(a.addresses, b.addresses)
}

// run keeps the agent until ctx is done.
func (t *tunnel) run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	var (
		stop = func() {}
		is   whoami
	)
	defer func() { stop() }()
	for {
		wait := nodeInterval
		who, err := t.who(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			if wait = joinInterval; is.node == "" { // an agent that runs goes on
				t.waiting(err)
			}
		case !who.equal(is):
			stop()
			running.Wait()
			is = who
			agentCtx, cancel := context.WithCancel(ctx)
			stop = cancel
			if err := t.start(agentCtx, who, &running); err != nil {
				t.waiting(err)
				is = whoami{}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func (t *tunnel) who(ctx context.Context) (whoami, error) {
	node, err := t.node()
	if err != nil {
		return whoami{}, err
	}
	certificate, err := t.identity.Certificate()
	if err != nil {
		return whoami{}, err
	}
	if kubelet.Expired(certificate, time.Now()) {
		return whoami{}, fmt.Errorf("the certificate of node %q expired on %s: join again, see tenant-proxy check", node, certificate.Leaf.NotAfter.Format(time.DateOnly))
	}
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	addresses, err := t.client.NodeAddresses(ctx, node)
	if err != nil {
		return whoami{}, err
	}
	if len(addresses) == 0 {
		return whoami{}, fmt.Errorf("node %q has no address yet", node)
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	name := t.file.Hostname
	for _, other := range []string{t.list.KonnectivityHostname(), t.file.KonnectivityHostname} {
		if other != "" {
			name = other
		}
	}
	return whoami{node, name, addresses}, nil
}

// waiting notes why there is no agent yet, once per reason.
func (t *tunnel) waiting(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.problem != err.Error() {
		t.problem = err.Error()
		t.log.Info("the tunnel does not start yet", "reason", err)
	}
}

func (t *tunnel) start(ctx context.Context, who whoami, running *sync.WaitGroup) error {
	a, err := agent.New(agent.Config{
		Node:        who.node,
		Addresses:   who.addresses,
		ServerName:  who.serverName,
		Servers:     t.servers,
		RootCAs:     func() (*x509.CertPool, error) { return t.roots, nil },
		Certificate: t.identity.Certificate,
		Logger:      t.log,
	})
	if err != nil {
		return err
	}
	t.mu.Lock()
	t.agent, t.problem = a, ""
	t.mu.Unlock()
	t.log.Info("the tunnel starts", "node", who.node, "addresses", who.addresses, "name", who.serverName)
	running.Go(func() {
		if err := a.Run(ctx); err != nil && ctx.Err() == nil {
			t.log.Error("the tunnel ended", "error", err)
		}
	})
	return nil
}

func (t *tunnel) servers() []string {
	addresses := t.list.Hosts()
	all := make([]string, len(addresses))
	for i, a := range addresses {
		all[i] = a.String()
	}
	return all
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// ALPN is the protocol by which the router on the tenant's port knows agents.
const ALPN = "konnectivity"

const (
	// DefaultRefresh is how often the list of servers and the certificate are
	// looked at. A look costs a file of a few kilobytes.
	DefaultRefresh = 5 * time.Second

	// minBackoff and maxBackoff bound the pause between attempts. The longest one
	// is what a cluster waits for exec and logs after its host came back.
	minBackoff = 100 * time.Millisecond
	maxBackoff = 2 * time.Second

	// maxWays is how many tunnels lead to one server. Hosts that do not serve the
	// tenant forward to one that does: each host more would be a tunnel more to the
	// same server. With one way left of three, exec and logs still work at once.
	maxWays = 3

	// DefaultSpare is how often a host that is not among them is asked again: a new
	// replica there goes without this node for that long. Each time costs both ends a
	// handshake.
	DefaultSpare = 30 * time.Second
)

// errSpare ends a tunnel to a server that there are enough tunnels to.
var errSpare = errors.New("other hosts lead to the same server")

// Config configures an [Agent].
type Config struct {
	// Node is the node's name, which the certificate must have too. Required.
	Node string

	// Addresses are the node's own, as in its Node object: where dials to them
	// arrive here and at no other node.
	Addresses []netip.Addr

	// Servers returns the servers as host:port. There is one tunnel to each, but for
	// those that turn out to be the same as three others; the list may change at any
	// time. A tunnel to one that is gone from it finishes what is open for 30 s.
	// Required.
	Servers func() []string

	// ServerName is the tenant's hostname: SNI, and the name that a server must
	// prove. Required.
	ServerName string

	// RootCAs and Certificate return the cluster's authority and the kubelet's
	// client certificate. They are called for each connection, Certificate every
	// Refresh besides. Required.
	RootCAs     func() (*x509.CertPool, error)
	Certificate func() (*tls.Certificate, error)

	// DialContext reaches a server; nil means net.Dialer's.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)

	// Allow says which targets may be dialed, by their address after resolution;
	// nil means [DefaultAllow].
	Allow func(netip.AddrPort) bool

	// Refresh is how often Servers and Certificate are looked at. Zero or less
	// means DefaultRefresh.
	Refresh time.Duration

	// Spare is how often one of Servers is tried again that was the same as others.
	// Zero or less means DefaultSpare.
	Spare time.Duration

	// Logger; nil discards.
	Logger *slog.Logger
}

// Validate returns every fault at once.
func (c Config) Validate() error {
	var faults []error
	for _, required := range []struct {
		name    string
		missing bool
	}{
		{"Node", c.Node == ""},
		{"ServerName", c.ServerName == ""},
		{"Servers", c.Servers == nil},
		{"RootCAs", c.RootCAs == nil},
		{"Certificate", c.Certificate == nil},
	} {
		if required.missing {
			faults = append(faults, fmt.Errorf("%s is not set", required.name))
		}
	}
	return errors.Join(faults...)
}

// Agent is a node's end of the tunnel. All its methods are safe for concurrent
// use.
type Agent struct {
	// Constant after construction.
	config      Config
	log         *slog.Logger
	identifiers string

	mu    sync.Mutex // guards what follows
	slots map[string]*slot
}

// slot is the place of one server's tunnel.
type slot struct {
	server  string
	retired chan struct{} // closed when the server is no longer listed

	// The agent's mu guards what follows.
	tunnel *tunnel // nil while there is none
	err    error   // why not, or why not a newer one
}

// New returns an agent that does nothing yet.
func New(config Config) (*Agent, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("configure tunnel agent: %w", err)
	}
	if config.DialContext == nil {
		config.DialContext = new(net.Dialer).DialContext
	}
	if config.Allow == nil {
		config.Allow = DefaultAllow
	}
	if config.Refresh <= 0 {
		config.Refresh = DefaultRefresh
	}
	if config.Spare <= 0 {
		config.Spare = DefaultSpare
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	own := url.Values{"host": {config.Node}}
	for _, ip := range config.Addresses {
		kind := "ipv6"
		if ip = ip.Unmap(); ip.Is4() {
			kind = "ipv4"
		}
		own.Add(kind, ip.String())
	}
	return &Agent{config: config, log: config.Logger, identifiers: own.Encode(), slots: make(map[string]*slot)}, nil
}

// Run keeps a tunnel to each server until ctx ends; it gives up on none. When it
// returns, always nil, no tunnel and no goroutine is left. It may be called once.
func (a *Agent) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	tick := time.NewTicker(a.config.Refresh)
	defer tick.Stop()
	for {
		for _, s := range a.relist() {
			running.Go(func() { a.keep(ctx, s) })
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// relist retires what is no longer listed and returns slots for what is newly so.
func (a *Agent) relist() (added []*slot) {
	servers := a.config.Servers()
	a.mu.Lock()
	defer a.mu.Unlock()
	for server, s := range a.slots {
		if !slices.Contains(servers, server) {
			delete(a.slots, server)
			close(s.retired)
		}
	}
	for _, server := range servers {
		if a.slots[server] == nil {
			s := &slot{server: server, retired: make(chan struct{})}
			a.slots[server] = s
			added = append(added, s)
		}
	}
	return added
}

// keep keeps a tunnel to one server until ctx ends or the server is no longer
// listed. A renewed certificate makes a new tunnel, which takes over the dials;
// the old one ends with its last connection.
func (a *Agent) keep(ctx context.Context, s *slot) {
	var (
		current *tunnel
		old     sync.WaitGroup
		backoff = minBackoff
	)
	defer old.Wait()
	for {
		wait := a.config.Refresh
		if current == nil || a.renewed(current) {
			next, err := a.connect(ctx, s.server)
			if err == nil && !a.admit(s, next) {
				// The server may have sent it a dial.
				old.Go(func() { next.drain(ctx, errSpare) })
				err = errSpare
			}
			switch {
			case errors.Is(err, errSpare):
				wait, backoff = jitter(a.config.Spare), minBackoff
			case err != nil:
				wait, backoff = jitter(backoff), min(2*backoff, maxBackoff)
			default:
				if replaced := current; replaced != nil {
					old.Go(func() { replaced.drain(ctx, errRenewed) })
				}
				current = next
			}
			a.note(ctx, s, current, err)
		}
		var lost <-chan struct{}
		if current != nil {
			lost = current.done
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
			continue
		case <-lost:
			timer.Stop()
			a.note(ctx, s, nil, context.Cause(current.ctx))
			if time.Since(current.since) > maxBackoff {
				backoff = minBackoff
			}
			current = nil
			sleep(ctx, s.retired, jitter(backoff))
			backoff = min(2*backoff, maxBackoff)
		case <-ctx.Done():
		case <-s.retired:
		}
		timer.Stop()
		if s.ended(ctx) {
			break
		}
	}
	if current != nil {
		ctx, cancel := context.WithTimeout(ctx, drainTime)
		defer cancel()
		current.drain(ctx, errDrained)
	}
}

// ended says whether the slot has no further use for a tunnel.
func (s *slot) ended(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return true
	case <-s.retired:
		return true
	default:
		return false
	}
}

func sleep(ctx context.Context, stop <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-stop:
	case <-ctx.Done():
	}
}

// renewed says whether there is another certificate than the tunnel's.
func (a *Agent) renewed(t *tunnel) bool {
	cert, err := a.config.Certificate()
	return err == nil && cert != nil && !t.uses(cert)
}

// admit makes t the slot's tunnel, unless others lead to the same server. It takes its
// place at once: other slots' tunnels come at the same moment.
func (a *Agent) admit(s *slot, t *tunnel) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	ways := 0
	for _, other := range a.slots {
		if other != s && other.tunnel != nil && other.tunnel.serverID == t.serverID {
			ways++
		}
	}
	if ways >= maxWays {
		return false
	}
	s.tunnel = t
	return true
}

// note keeps and logs what became of a slot, but not the same twice.
func (a *Agent) note(ctx context.Context, s *slot, t *tunnel, err error) {
	a.mu.Lock()
	was, wasErr := s.tunnel, s.err
	s.tunnel, s.err = t, err
	a.mu.Unlock()
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, errSpare):
		a.log.Debug("tunnel not open", "server", s.server, "reason", err)
	case err == nil:
		a.log.Info("tunnel open", "server", s.server, "server_id", t.serverID)
	case was != t || wasErr == nil || wasErr.Error() != err.Error():
		a.log.Warn("tunnel not open", "server", s.server, "error", err)
	}
}

// Tunnel is the state of the tunnel to one server.
type Tunnel struct {
	Server    string
	Connected bool
	ServerID  string    // the same for two ways to one server
	Since     time.Time // when it connected
	Streams   int       // open connections
	Error     string    // why it is not connected
}

// Status returns the state of all tunnels, by server.
func (a *Agent) Status() []Tunnel {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := make([]Tunnel, 0, len(a.slots))
	for server, s := range a.slots {
		state := Tunnel{Server: server}
		if t := s.tunnel; t != nil {
			state.Connected, state.ServerID, state.Since, state.Streams = true, t.serverID, t.since, int(t.open.Load())
		} else if s.err != nil {
			state.Error = s.err.Error()
		}
		all = append(all, state)
	}
	slices.SortFunc(all, func(a, b Tunnel) int { return strings.Compare(a.Server, b.Server) })
	return all
}

// Connected returns the servers to which a tunnel is open.
func (a *Agent) Connected() []string {
	var servers []string
	for _, t := range a.Status() {
		if t.Connected {
			servers = append(servers, t.Server)
		}
	}
	return servers
}

// jitter returns between half of d and d, so that a thousand agents do not come
// back at one moment.
func jitter(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

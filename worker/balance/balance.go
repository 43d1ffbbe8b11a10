// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/tenantd/tenantd/worker/api"
	"github.com/tenantd/tenantd/worker/carrier"
	"github.com/tenantd/tenantd/worker/relay"
)

const (
	// DefaultInterval finds a dead host before client-go does, whose own pings need
	// 45 s. It costs a host one small request on an open connection.
	DefaultInterval = 3 * time.Second

	// DefaultTimeout is ten times what a loaded API server takes to say it is ready.
	DefaultTimeout = 2 * time.Second

	// DefaultDialTimeout leaves time for two more hosts in the patience of a client.
	DefaultDialTimeout = 3 * time.Second
)

const (
	// failuresUntilOut forgives one lost answer.
	failuresUntilOut = 2

	// again is the pause before a failure is confirmed.
	again = 500 * time.Millisecond

	// probesPerConnection bounds how long a host whose port is dead can look well
	// by a connection that it accepted before.
	probesPerConnection = 5
)

// Config describes a pool.
type Config struct {
	// Hostname is the tenant's, and RootCAs verify its API server. Required.
	Hostname string
	RootCAs  *x509.CertPool
	// Carriers are the ways to a host, the preferred one first. Required.
	Carriers []*carrier.Carrier
	// Interval is the time between two probes of a host, Timeout that for its answer
	// and DialTimeout that to connect to one host. Zero means the default.
	Interval, Timeout, DialTimeout time.Duration
	// Logger gets changes of state. Nil discards.
	Logger *slog.Logger
}

// Pool is the set of hosts. Its methods are safe for concurrent use.
type Pool struct {
	cfg     Config // constant after construction
	log     *slog.Logger
	ctx     context.Context
	stop    context.CancelFunc
	probing sync.WaitGroup

	mu    sync.Mutex // guards what follows and the hosts' fields that say so
	hosts map[netip.AddrPort]*host
}

// host is one of them.
type host struct {
	address netip.AddrPort
	ways    []way
	stop    context.CancelFunc
	kick    chan struct{} // asks for a probe at once

	// Guarded by Pool.mu.
	healthy  bool
	failures int // in a row
	err      error
	way      int // the index of the way that is used
	conns    map[*tracked]struct{}
}

// way is a carrier to one host, and what asks by it.
type way struct {
	carrier *carrier.Carrier
	client  *api.Client
}

// Host is the state of a host.
type Host struct {
	Address     netip.AddrPort `json:"address"`
	Healthy     bool           `json:"healthy"`
	Carrier     carrier.Kind   `json:"carrier"`
	Connections int            `json:"connections"`
	Error       string         `json:"error,omitempty"` // of the last probe
}

// New makes a pool without hosts.
func New(cfg Config) *Pool {
	cfg.Interval = cmp.Or(cfg.Interval, DefaultInterval)
	cfg.Timeout = cmp.Or(cfg.Timeout, DefaultTimeout)
	cfg.DialTimeout = cmp.Or(cfg.DialTimeout, DefaultDialTimeout)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	ctx, stop := context.WithCancel(context.Background())
	return &Pool{cfg: cfg, log: cfg.Logger, ctx: ctx, stop: stop, hosts: map[netip.AddrPort]*host{}}
}

// SetHosts replaces the set. Connections to a host that is not in it any more go
// on until one of their ends closes them.
func (p *Pool) SetHosts(addresses []netip.AddrPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for address, h := range p.hosts {
		if !slices.Contains(addresses, address) {
			h.stop()
			delete(p.hosts, address)
		}
	}
	for _, address := range addresses {
		if p.hosts[address] != nil || p.ctx.Err() != nil {
			continue
		}
		ctx, stop := context.WithCancel(p.ctx)
		h := &host{address: address, stop: stop, kick: make(chan struct{}, 1), conns: map[*tracked]struct{}{}}
		for _, c := range p.cfg.Carriers {
			h.ways = append(h.ways, way{c, api.New(api.Config{
				Hostname: p.cfg.Hostname,
				RootCAs:  p.cfg.RootCAs,
				Dial:     func(ctx context.Context) (net.Conn, error) { return c.Dial(ctx, address, nil, nil) },
			})})
		}
		p.hosts[address] = h
		p.probing.Go(func() { p.watch(ctx, h) })
	}
}

// Close ends the probes and closes all connections of the hosts in the set.
func (p *Pool) Close() {
	p.stop()
	p.mu.Lock()
	all := p.connections(func(*host) bool { return true })
	p.mu.Unlock()
	closeAll(all)
	p.probing.Wait()
}

// Healthy tells whether there is a healthy host.
func (p *Pool) Healthy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.healthy() > 0
}

// healthy counts. p.mu must be held.
func (p *Pool) healthy() int {
	n := 0
	for _, h := range p.hosts {
		if h.healthy {
			n++
		}
	}
	return n
}

// Hosts returns the state of all hosts, in the order of their addresses.
func (p *Pool) Hosts() []Host {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]Host, 0, len(p.hosts))
	for _, h := range p.hosts {
		state := Host{Address: h.address, Healthy: h.healthy, Carrier: h.ways[h.way].carrier.Kind(), Connections: len(h.conns)}
		if h.err != nil {
			state.Error = h.err.Error()
		}
		all = append(all, state)
	}
	slices.SortFunc(all, func(a, b Host) int { return a.Address.Compare(b.Address) })
	return all
}

// Dial connects a client, whose addresses may be nil, to a host: to the healthy one
// with the fewest connections, or to the next if that fails. The error has every
// host's.
func (p *Pool) Dial(ctx context.Context, remote, local net.Addr) (relay.Conn, error) {
	candidates := p.candidates()
	if len(candidates) == 0 {
		return nil, errors.New("no host is known yet")
	}
	var faults []error
	for _, h := range candidates {
		conn, err := p.dialHost(ctx, h, remote, local)
		if err == nil {
			return conn, nil
		}
		faults = append(faults, err)
		if ctx.Err() != nil {
			break
		}
		select {
		case h.kick <- struct{}{}:
		default:
		}
	}
	return nil, fmt.Errorf("reach a host: %w", errors.Join(faults...))
}

// candidates returns the hosts in the order in which they are to be tried.
func (p *Pool) candidates() []*host {
	p.mu.Lock()
	defer p.mu.Unlock()
	type rated struct {
		*host
		out, load int
	}
	var all []rated
	for _, h := range p.hosts {
		r := rated{host: h, load: len(h.conns)}
		if !h.healthy {
			r.out = 1
		}
		all = append(all, r)
	}
	// Equals in any order, or all workers would begin with one host.
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	slices.SortStableFunc(all, func(a, b rated) int { return cmp.Or(a.out-b.out, a.load-b.load) })
	hosts := make([]*host, len(all))
	for i, r := range all {
		hosts[i] = r.host
	}
	return hosts
}

func (p *Pool) dialHost(ctx context.Context, h *host, remote, local net.Addr) (relay.Conn, error) {
	p.mu.Lock()
	way := h.ways[h.way]
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, p.cfg.DialTimeout)
	defer cancel()
	conn, err := way.carrier.Dial(ctx, h.address, remote, local)
	if err != nil {
		return nil, err
	}
	t := &tracked{Conn: conn, pool: p, host: h}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		conn.Close()
		return nil, net.ErrClosed
	}
	h.conns[t] = struct{}{}
	return t, nil
}

// tracked is a connection that its host knows of.
type tracked struct {
	relay.Conn
	pool *Pool
	host *host
}

// Close implements net.Conn.
func (t *tracked) Close() error {
	t.pool.mu.Lock()
	delete(t.host.conns, t)
	t.pool.mu.Unlock()
	return t.Conn.Close()
}

// connections returns those of some hosts. p.mu must be held.
func (p *Pool) connections(of func(*host) bool) []*tracked {
	var all []*tracked
	for _, h := range p.hosts {
		if of(h) {
			for t := range h.conns {
				all = append(all, t)
			}
		}
	}
	return all
}

func closeAll(all []*tracked) {
	for _, t := range all {
		t.Close()
	}
}

// watch probes a host until ctx is done.
func (p *Pool) watch(ctx context.Context, h *host) {
	defer func() {
		for _, w := range h.ways {
			w.client.Close()
		}
	}()
	for round := 1; ; round++ {
		if round%probesPerConnection == 0 {
			for _, w := range h.ways {
				w.client.Refresh()
			}
		}
		wait := p.cfg.Interval
		if !p.probe(ctx, h) {
			wait = min(again, p.cfg.Interval)
		}
		// Not all workers at the same moment.
		wait += rand.N(wait / 5)
		select {
		case <-ctx.Done():
			return
		case <-h.kick:
		case <-time.After(wait):
		}
	}
}

// probe asks the host once, and by its other ways too once it is out. It is false
// when the failure is to be confirmed soon.
func (p *Pool) probe(ctx context.Context, h *host) (settled bool) {
	p.mu.Lock()
	used := h.way
	p.mu.Unlock()
	err := p.ask(ctx, h.ways[used].client)
	if ctx.Err() != nil {
		return true
	}
	if settled = p.note(h, used, err); err == nil || !settled {
		return settled
	}
	for other := range h.ways {
		if other != used && p.ask(ctx, h.ways[other].client) == nil {
			return p.note(h, other, nil)
		}
	}
	return true
}

func (p *Pool) ask(ctx context.Context, client *api.Client) error {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Timeout)
	defer cancel()
	_, err := client.Ready(ctx)
	return err
}

// note takes the outcome of a probe down and closes what has to be closed. It is
// false while a failure has to be confirmed.
func (p *Pool) note(h *host, way int, err error) (settled bool) {
	p.mu.Lock()
	h.err = err
	before := h.healthy
	if err == nil {
		h.healthy, h.failures, h.way = true, 0, way
	} else if h.failures++; h.failures >= failuresUntilOut {
		h.healthy = false
	}
	first := err != nil && h.failures == failuresUntilOut
	settled = err == nil || h.failures >= failuresUntilOut
	var doomed []*tracked
	if p.healthy() > 0 {
		doomed = p.connections(func(h *host) bool { return !h.healthy && h.failures >= failuresUntilOut })
	}
	kind := h.ways[h.way].carrier.Kind()
	p.mu.Unlock()
	switch {
	case err == nil && !before:
		p.log.Info("host is healthy", "host", h.address, "carrier", kind)
	case first:
		p.log.Warn("host is not healthy", "host", h.address, "carrier", kind, "error", err)
	}
	if len(doomed) > 0 {
		p.log.Info("closing the connections of hosts that are not healthy", "connections", len(doomed))
	}
	closeAll(doomed)
	return settled
}

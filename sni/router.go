// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// DefaultHelloTimeout is long enough for a hello whose last segment was lost
	// twice (retransmitted after 1 s and 3 s), and too short to make holding
	// connections open worth an attacker's while.
	DefaultHelloTimeout = 5 * time.Second

	// DefaultHandshakeTimeout is what is left of a TLS handshake for a distant client
	// and a busy host, and what Go's own servers are content with.
	DefaultHandshakeTimeout = 10 * time.Second

	// DefaultMaxPending bounds unauthenticated memory, those who shake hands
	// included: 18 MiB of clients that say nothing, 115 MiB of handshakes begun,
	// 400 MiB if every one of them sent all that it may.
	DefaultMaxPending = 4096

	// DefaultMaxPendingPerSource lets a rack of workers behind one address
	// reconnect at once, and leaves an attacker 3 % of DefaultMaxPending.
	DefaultMaxPendingPerSource = 128

	// DefaultSourceShare, in percent, keeps one stranger from shutting a tenant's
	// users out, and leaves a thousand workers behind one address room within
	// DefaultMaxConns.
	DefaultSourceShare = 50
)

const (
	// lingerTime and lingerBytes bound the wait for a refused client to read
	// its answer and leave: a round trip to anywhere, and any hello's rest.
	lingerTime  = 500 * time.Millisecond
	lingerBytes = 64 << 10

	// Accepting again at once after EMFILE would spin until a descriptor is
	// free; waiting longer than a second would be felt after one is.
	minBackoff = 5 * time.Millisecond
	maxBackoff = time.Second
)

// Config configures a Router. The zero value works.
type Config struct {
	// HelloTimeout bounds the time from accept to a complete ClientHello, PROXY
	// headers before it included. Zero or less means DefaultHelloTimeout.
	HelloTimeout time.Duration

	// HandshakeTimeout bounds the time from [Listener.Accept] until the connection's
	// owner says that the client has finished its handshake. Zero or less means
	// DefaultHandshakeTimeout.
	HandshakeTimeout time.Duration

	// MaxPending bounds the connections that have not finished their handshake yet,
	// of all listeners together; those that wait in a backlog are bounded by that.
	// Zero or less means DefaultMaxPending.
	MaxPending int

	// MaxPendingPerSource bounds them per IPv4 address or IPv6 /64. Sources
	// without an IP address, and trusted proxies that have not said yet whose
	// connection it is, are bounded by MaxPending only. Zero or less means
	// DefaultMaxPendingPerSource.
	MaxPendingPerSource int

	// SourceShare, in percent, is how much of a listener's MaxConns the connections
	// of one source may have, established ones included. Sources are those of
	// MaxPendingPerSource. The router cannot tell who is authenticated, so workers
	// behind one address are counted like a stranger's connections: with a listener
	// that is for them alone, MaxConns must be larger than their need by as much, or
	// the share 100, which is no bound. Zero or less means DefaultSourceShare.
	SourceShare int

	// TrustedProxies are the addresses of load balancers that put a PROXY header
	// (version 2) before what they forward. Its source is then the client's
	// address, for MaxPendingPerSource and RemoteAddr, so whoever connects from here
	// can pass for anyone. IPv4 peers match IPv4 prefixes. None by default.
	TrustedProxies []netip.Prefix

	// MaxForwarded bounds the connections that are forwarded to other hosts, of all
	// names together. Zero or less means DefaultMaxForwarded.
	MaxForwarded int

	// MaxForwardedPerName bounds them per name, and so what the clients of a tenant
	// that another host has can take of this one. Of both bounds a single source
	// gets SourceShare. Zero or less means DefaultMaxForwardedPerName.
	MaxForwardedPerName int

	// ForwardFrom is the local address that other hosts are dialled from, which they
	// must know as a member's ([Router.SetMembers]), and of their addresses' family.
	// Not valid, it is the kernel's choice.
	ForwardFrom netip.Addr

	// ForwardGrace is how long [Router.Close] waits for forwarded connections to end.
	// Zero or less means DefaultForwardGrace.
	ForwardGrace time.Duration

	// Asked, if set, is called with the canonical name that a connection waits for,
	// because it is expected ([Remote].Expected) or because its listener's owner has
	// not begun to accept, and whose connection it is, if that is valid: once each
	// half second while it is held, and once when it joins a backlog. It must not
	// block.
	Asked func(name string, source netip.Addr)

	// Logger gets changes of state; at debug level also refusals, and who a
	// connection is from by its PROXY header. Nil discards.
	Logger *slog.Logger
}

// Router accepts connections and hands each to the listener that has its name
// and, where listeners share the name, its protocol; or, without a listener,
// forwards it to another host that has the name.
// All methods are safe for concurrent use.
type Router struct {
	// Constant after construction.
	helloTimeout     time.Duration
	handshakeTimeout time.Duration
	sourceShare      int // percent
	halfClosedTime   time.Duration
	forwardGrace     time.Duration
	dial             func(ctx context.Context, network, address string) (net.Conn, error)
	trustedProxies   []netip.Prefix
	asked            func(name string, source netip.Addr)
	log              *slog.Logger
	metrics          *metrics
	gate             *gate
	remotes          *remotes
	forwards         *forwards
	done             context.Context // ends with Close
	stop             context.CancelFunc

	buffers buffers
	relays  relays
	news    atomic.Pointer[chan struct{}] // closed and replaced when names or remotes change

	// mu guards what follows. It is taken before a Listener's mu and after the
	// forwards', never the other way round.
	mu        sync.RWMutex
	closed    bool
	names     sites
	retired   sites                  // of listeners that get what other hosts forward alone
	listeners map[*Listener]struct{} // open, or closed with open connections
}

// New returns a Router with no names. It starts nothing.
func New(cfg Config) *Router {
	if cfg.HelloTimeout <= 0 {
		cfg.HelloTimeout = DefaultHelloTimeout
	}
	if cfg.HandshakeTimeout <= 0 {
		cfg.HandshakeTimeout = DefaultHandshakeTimeout
	}
	if cfg.SourceShare <= 0 {
		cfg.SourceShare = DefaultSourceShare
	}
	if cfg.MaxPending <= 0 {
		cfg.MaxPending = DefaultMaxPending
	}
	if cfg.MaxPendingPerSource <= 0 {
		cfg.MaxPendingPerSource = DefaultMaxPendingPerSource
	}
	if cfg.MaxForwarded <= 0 {
		cfg.MaxForwarded = DefaultMaxForwarded
	}
	if cfg.MaxForwardedPerName <= 0 {
		cfg.MaxForwardedPerName = DefaultMaxForwardedPerName
	}
	if cfg.ForwardGrace <= 0 {
		cfg.ForwardGrace = DefaultForwardGrace
	}
	if cfg.Asked == nil {
		cfg.Asked = func(string, netip.Addr) {}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	done, stop := context.WithCancel(context.Background())
	r := &Router{
		helloTimeout:     cfg.HelloTimeout,
		handshakeTimeout: cfg.HandshakeTimeout,
		sourceShare:      min(cfg.SourceShare, 100),
		halfClosedTime:   halfClosedTime,
		forwardGrace:     cfg.ForwardGrace,
		dial:             forwardDialer(cfg.ForwardFrom),
		trustedProxies:   slices.Clone(cfg.TrustedProxies),
		asked:            cfg.Asked,
		log:              cfg.Logger,
		metrics:          newMetrics(),
		gate:             newGate(cfg.MaxPending, cfg.MaxPendingPerSource),
		remotes:          newRemotes(),
		forwards:         newForwards(cfg),
		done:             done,
		stop:             stop,
		names:            make(sites),
		retired:          make(sites),
		listeners:        make(map[*Listener]struct{}),
	}
	news := make(chan struct{})
	r.news.Store(&news)
	return r
}

// Serve accepts from ln until ctx is done or the Router is closed, and then
// returns nil. It owns ln and closes it. Connections accepted before ctx was
// done go on to be routed; Close ends those too. Lack of descriptors and other
// passing errors are waited out. The only error is that someone else closed ln.
//
// It may be called for several listeners at once. Connections other than
// *net.TCPConn are served too, without what only TCP has.
func (r *Router) Serve(ctx context.Context, ln net.Listener) error {
	defer ln.Close()
	if !r.gate.begin() {
		return nil
	}
	defer r.gate.running.Done()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.done, cancel)()
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })() // unblocks Accept

	r.log.Info("accepting connections", "address", ln.Addr().String())
	defer r.log.Info("no longer accepting connections", "address", ln.Addr().String())
	backoff := minBackoff
	for {
		c, err := ln.Accept()
		switch {
		case err == nil:
			backoff = minBackoff
			r.admit(c)
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept on %s, which only its router may close: %w", ln.Addr(), err)
		default:
			r.log.Warn("cannot accept for now", "address", ln.Addr().String(), "retry", backoff, "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(backoff):
			}
			backoff = min(2*backoff, maxBackoff)
		}
	}
}

// Close stops the router: (1) every Serve closes its listener, (2) pending
// connections are closed, (3) it waits for both, at most about half a second
// for answers on their way, (4) it waits for forwarded connections to end, which
// have no other owner, and closes them after [Config].ForwardGrace. Connections
// that were handed over, and Listeners, are left to their owners: a tenant's server
// may still be draining, and an API server whose Accept fails unasked panics.
// Repeating it does nothing, and it never fails.
func (r *Router) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.stop()
	r.gate.close()
	r.forwards.close(r.forwardGrace)
	r.relays.close()
	return nil
}

// admit starts the pending phase of a connection, if it may have one.
func (r *Router) admit(c net.Conn) {
	r.metrics.accepted.Inc()
	source, from := r.origin(c)
	if why := r.gate.enter(c, source); why != accepted {
		r.refused(&arrival{conn: c}, why, "")
		_ = c.Close()
		return
	}
	go func() {
		if f := r.route(c, source, from); f != nil {
			f.run()
		}
	}()
}

// route is the pending phase of a connection until a listener has it or another
// host, in which case it is returned, to be run.
func (r *Router) route(c net.Conn, source netip.Addr, from trust) *forward {
	defer r.gate.running.Done()
	start := time.Now()
	a := arrival{conn: c, source: source, trust: from, buffer: r.buffers.get()}
	if !from.proxy {
		a.peer = sourceOf(peerOf(c))
	}
	deadline := start.Add(r.helloTimeout)
	to, why := r.peek(&a, deadline)
	if why == accepted {
		r.metrics.hello.Observe(time.Since(start).Seconds())
		var f *forward
		if f, why = r.dispatch(&a, to, deadline); why == accepted {
			if a.claim.IsValid() && r.log.Enabled(r.done, slog.LevelDebug) {
				r.log.Debug("connection proxied", "remote", c.RemoteAddr(), "name", to.name, a.claimed())
			}
			return f
		}
	}
	a.buffer.free(&r.buffers)
	r.refused(&a, why, to.name)
	answer := why.answer()
	if a.byHeader {
		answer = nil
	}
	part(c, answer, deadline)
	r.gate.claim(c)
	r.gate.leave(a.source)
	return nil
}

// dispatch hands the connection to a listener or forwards it. Unless it was
// accepted, it stays the caller's.
func (r *Router) dispatch(a *arrival, to target, deadline time.Time) (*forward, reason) {
	l, addresses, why := r.find(a, to, deadline)
	switch {
	case l != nil:
		return nil, r.handOff(a, to, l)
	case len(addresses) > 0:
		return r.forward(a, to, addresses, deadline)
	default:
		return nil, why
	}
}

func (r *Router) refused(a *arrival, why reason, name string) {
	r.metrics.refused(why)
	r.log.Debug("connection refused", "reason", string(why), "remote", a.conn.RemoteAddr(), "name", name, a.claimed())
}

// part closes a connection so that the client sees the answer, if there is one.
func part(c net.Conn, answer []byte, deadline time.Time) {
	defer c.Close()
	if answer == nil {
		return
	}
	if soon := time.Now().Add(lingerTime); soon.Before(deadline) {
		deadline = soon
	}
	if c.SetDeadline(deadline) != nil {
		return
	}
	if _, err := c.Write(answer); err != nil {
		return
	}
	if closeWrite(c) == nil {
		_, _ = io.CopyN(io.Discard, c, lingerBytes)
	}
}

// peek reads into the buffer until the target is known.
func (r *Router) peek(a *arrival, deadline time.Time) (target, reason) {
	if err := a.conn.SetDeadline(deadline); err != nil {
		return target{}, r.readFailure(err)
	}
	for a.buffer.grow(&r.buffers) {
		have := len(a.buffer.bytes)
		n, err := a.conn.Read(a.buffer.bytes[have:cap(a.buffer.bytes)])
		a.buffer.bytes = a.buffer.bytes[:have+n]
		if n > 0 {
			to, verdict := a.scan()
			if why := r.attribute(a); why != accepted {
				return target{}, why
			}
			if verdict != incomplete {
				return to, verdict
			}
		}
		if err != nil {
			return target{}, r.readFailure(err)
		}
	}
	return target{}, tooLarge
}

// attribute counts what a trusted proxy or a member brought by its client, as soon
// as that is known, and what a member began itself by its own address.
func (r *Router) attribute(a *arrival) reason {
	if a.source.IsValid() {
		return accepted
	}
	var source netip.Addr
	switch {
	case a.client != nil:
		source = sourceOf(a.client.AddrPort().Addr().Unmap())
	case a.trust == (trust{}):
		source = a.peer
	}
	if !source.IsValid() {
		return accepted
	}
	why := r.gate.attribute(source)
	if why == accepted {
		a.source = source
	}
	return why
}

func (r *Router) readFailure(err error) reason {
	switch {
	case r.done.Err() != nil:
		return shutdown
	case errors.Is(err, os.ErrDeadlineExceeded):
		return timeout
	default:
		return eof
	}
}

// handOff gives the connection to l, or to the listener that its target leads to
// when l closes meanwhile. Once it is accepted, connection and buffer belong to the listener, and its place in the gate
// is free: how long it waits is not the client's doing.
func (r *Router) handOff(a *arrival, to target, l *Listener) (why reason) {
	if !r.gate.claim(a.conn) {
		return shutdown
	}
	if err := a.conn.SetDeadline(time.Time{}); err != nil {
		return r.readFailure(err)
	}
	keepAlive(a.conn)
	for ; l != nil; l, why = r.lookupFor(a, to) {
		why, closed := l.deliver(&conn{
			Conn: a.conn, listener: l, source: a.source, client: a.client,
			peeked: a.buffer, rest: a.buffer.bytes,
		})
		if !closed {
			if why == accepted && !l.accepting.Load() {
				r.asked(to.name, a.source)
			}
			return why
		}
	}
	return why
}

// keepAliveConfig makes the kernel notice within a minute that a worker or its
// network is gone; a dead kubelet's watches would hold its places until then.
func keepAliveConfig() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 3}
}

func keepAlive(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		// A failure means that the peer is gone, which the first read tells too.
		_ = tcp.SetKeepAliveConfig(keepAliveConfig())
	}
}

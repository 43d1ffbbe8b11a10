// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"
)

const (
	// DefaultMaxForwarded bounds the connections that are forwarded, as
	// DefaultMaxConns does a tenant's. Each costs two descriptors and two goroutines,
	// and those that are moving much at the moment two more for each pipe.
	DefaultMaxForwarded = 10000

	// DefaultMaxForwardedPerName leaves half of DefaultMaxForwarded to the tenants
	// beside the largest one.
	DefaultMaxForwardedPerName = DefaultMaxForwarded / 2

	// DefaultForwardGrace lets what is being answered end, and does not keep a host
	// from stopping for watches, which end never.
	DefaultForwardGrace = time.Second
)

const (
	// dialTimeout is a lost SYN (sent again after a second) short of patience: the
	// next host answers sooner. The last one has no next, and gets all the time
	// that is left.
	dialTimeout = time.Second

	// halfClosedTime is what a client has left to say and leave once its tenant has
	// ended its side. net/http's servers give it half a second. Without a bound a
	// client that the other host has refused would hold its place here for ever.
	halfClosedTime = 10 * time.Second
)

// forwards counts, bounds and ends the connections that are forwarded.
type forwards struct {
	// Constant after construction.
	limit, perName int
	share          int // percent that one source may have of either

	running sync.WaitGroup

	mu    sync.Mutex // guards what follows
	all   quota
	names map[string]*quota
	open  map[*forward]struct{}
}

// quota counts connections, in all and by source where that is valid.
type quota struct {
	open    int
	sources map[netip.Addr]int
}

// full says whether there is no room for one more, of all or of the source.
func (q *quota) full(source netip.Addr, limit, percent int) (all, ofSource bool) {
	const whole = 100
	return q.open >= limit, q.sources[source] >= (limit*percent+whole-1)/whole // never for a source that is not valid
}

func (q *quota) add(source netip.Addr, n int) {
	q.open += n
	if !source.IsValid() {
		return
	}
	if q.sources == nil {
		q.sources = make(map[netip.Addr]int)
	}
	if q.sources[source] += n; q.sources[source] == 0 {
		delete(q.sources, source)
	}
}

// enter takes a place for a connection that is about to be forwarded, or says why
// it may not. Each place is given back with leave.
func (s *forwards) enter(name string, source netip.Addr) reason {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.names[name]
	if q == nil {
		q = new(quota)
	}
	all, most := s.all.full(source, s.limit, s.share)
	ofName, mostOfName := q.full(source, s.perName, s.share)
	switch {
	case all:
		return tooManyForwarded
	case ofName:
		return forwardedOfName
	case most || mostOfName:
		return forwardedOfSource
	}
	s.names[name] = q
	q.add(source, 1)
	s.all.add(source, 1)
	return accepted
}

func (s *forwards) leave(name string, source netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all.add(source, -1)
	q := s.names[name]
	if q.add(source, -1); q.open == 0 {
		delete(s.names, name)
	}
}

// begin makes f known to close and end. It is not called after close.
func (s *forwards) begin(f *forward) {
	s.running.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[f] = struct{}{}
}

func (s *forwards) done(f *forward) {
	s.mu.Lock()
	delete(s.open, f)
	s.mu.Unlock()
	s.running.Done()
}

// end ends those that which says, and returns how many were not ending yet.
func (s *forwards) end(how outcome, which func(*forward) bool) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for f := range s.open {
		if which(f) && f.end(how) {
			n++
		}
	}
	return n
}

// close waits until all have ended, and ends those that have not within grace.
func (s *forwards) close(grace time.Duration) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.running.Wait()
	}()
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		s.end(outcomeShutdown, func(*forward) bool { return true })
		<-ended
	}
}

// count returns how many are open.
func (s *forwards) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open)
}

// EndForwards closes the connections that are forwarded to a host, and returns how
// many there were. Address is one of [Remote].Addresses, spelled as there. It is
// for a host that is known to be dead: a network that has swallowed it does not
// tell, and clients would wait for it until the kernel gives up, a minute when they
// say nothing and up to a quarter of an hour when they do.
func (r *Router) EndForwards(address string) int {
	return r.forwards.end(outcomeEnded, func(f *forward) bool { return f.address == address })
}

// Recall closes the connections that are forwarded to other hosts and would go to a
// listener here if they came now, and returns how many there were. It is for
// clients that come back at once and are to be here: tunnel agents, which each of a
// tenant's API servers needs its own connections of.
func (r *Router) Recall(to *Listener) int {
	return r.forwards.end(outcomeEnded, func(f *forward) bool {
		l, _ := r.lookup(f.target)
		return l == to
	})
}

// outcome says how a forwarded connection ended. Its text is a label.
type outcome string

const (
	outcomeClosed   outcome = "closed"   // by both ends, in order
	outcomeBroken   outcome = "broken"   // reset, or the peer is gone
	outcomeEnded    outcome = "ended"    // by EndForwards or Recall
	outcomeShutdown outcome = "shutdown" // by Close
)

func outcomes() []outcome {
	return []outcome{outcomeClosed, outcomeBroken, outcomeEnded, outcomeShutdown}
}

// forward is a connection that another host's port has, and this one passes on.
type forward struct {
	router  *Router
	target  target // its own copy
	address string
	source  netip.Addr // what it is counted by, if valid

	client, remote net.Conn
	how            atomic.Value // outcome, the first one counts
	clientEnded    atomic.Bool  // in order, and remote has been told
}

// forward dials a host that has the target's name and sends it what the client
// has sent. From then on the connection is no longer pending, and run is to be
// called. Before that, connection and buffer stay the caller's.
func (r *Router) forward(a *arrival, to target, addresses []string, deadline time.Time) (*forward, reason) {
	if why := r.forwards.enter(to.name, a.source); why != accepted {
		return nil, why
	}
	to.protocols = slices.Clone(to.protocols) // they lie in the buffer
	f := &forward{router: r, target: to, source: a.source, client: a.conn}
	why := f.begin(a, addresses, deadline)
	if why != accepted {
		if f.remote != nil {
			_ = f.remote.Close()
		}
		r.forwards.leave(to.name, a.source)
		return nil, why
	}
	r.forwards.begin(f)
	r.gate.leave(a.source)
	a.buffer.free(&r.buffers)
	return f, accepted
}

func (f *forward) begin(a *arrival, addresses []string, deadline time.Time) reason {
	r := f.router
	header, err := forwardHeader(a, f.target.name)
	if err != nil { // an address that is none
		r.log.Debug("cannot say whose connection it is", "remote", a.conn.RemoteAddr(), "error", err)
		return unreachable
	}
	if err := f.dial(addresses, deadline); err != nil {
		if r.done.Err() != nil {
			return shutdown
		}
		r.log.Debug("no host that has the name takes its connection", "name", f.target.name, "addresses", addresses, "error", err)
		return unreachable
	}
	_ = f.remote.SetDeadline(deadline) // if it fails, so does the write
	if _, err := f.remote.Write(append(header, a.buffer.bytes...)); err != nil {
		r.log.Debug("cannot forward a connection", "name", f.target.name, "address", f.address, "error", err)
		return unreachable
	}
	if !r.gate.claim(a.conn) {
		return shutdown
	}
	if err := errors.Join(f.remote.SetDeadline(time.Time{}), a.conn.SetDeadline(time.Time{})); err != nil {
		return r.readFailure(err)
	}
	keepAlive(a.conn)
	return accepted
}

// dial connects to the first address that can be reached.
func (f *forward) dial(addresses []string, deadline time.Time) error {
	ctx, cancel := context.WithDeadline(f.router.done, deadline)
	defer cancel()
	var failures error
	for i, address := range addresses {
		attempt, done := ctx, context.CancelFunc(func() {})
		if i < len(addresses)-1 {
			attempt, done = context.WithTimeout(ctx, dialTimeout)
		}
		c, err := f.router.dial(attempt, "tcp", address)
		done()
		if err == nil {
			f.remote, f.address = c, address
			return nil
		}
		failures = errors.Join(failures, err)
		if ctx.Err() != nil {
			break
		}
	}
	return failures
}

// forwardHeader says to another host whose connection it gets, and from whom.
func forwardHeader(a *arrival, name string) ([]byte, error) {
	from, here := tcpAddr(a.conn.RemoteAddr()), tcpAddr(a.conn.LocalAddr())
	if a.client != nil {
		from = a.client
	}
	h := proxyproto.HeaderProxyFromAddrs(2, from, here)
	if here.IP.To4() == nil { // both must be of one family
		h.TransportProtocol = proxyproto.TCPv6
	}
	tlvs := []proxyproto.TLV{{Type: forwardedType, Value: []byte(forwardedValue)}}
	if a.byHeader { // the bytes behind it do not say
		tlvs = append(tlvs, proxyproto.TLV{Type: proxyproto.PP2_TYPE_AUTHORITY, Value: []byte(name)})
	}
	if err := h.SetTLVs(tlvs); err != nil {
		return nil, fmt.Errorf("extend the PROXY header: %w", err)
	}
	raw, err := h.Format()
	if err != nil {
		return nil, fmt.Errorf("write a PROXY header for %s: %w", from, err)
	}
	return raw, nil
}

// tcpAddr returns the address or, for one that is not of TCP, such as a unix
// socket's, that of nobody.
func tcpAddr(addr net.Addr) *net.TCPAddr {
	if tcp, ok := addr.(*net.TCPAddr); ok {
		return tcp
	}
	return &net.TCPAddr{IP: net.IPv4zero}
}

// run passes bytes on in both directions until both have ended, and then closes
// the connection.
func (f *forward) run() {
	var sent int64
	var sending sync.WaitGroup
	sending.Go(func() { sent = f.pass(f.remote, f.client) })
	received := f.pass(f.client, f.remote)
	sending.Wait()

	_ = f.client.Close()
	_ = f.remote.Close()
	f.how.CompareAndSwap(nil, outcomeClosed)
	r, how := f.router, f.how.Load().(outcome)
	r.metrics.forwarded.WithLabelValues(string(how)).Inc()
	r.metrics.forwardedBytes.WithLabelValues("to_host").Add(float64(sent))
	r.metrics.forwardedBytes.WithLabelValues("to_client").Add(float64(received))
	r.log.Debug("forwarded connection ended", "outcome", string(how), "name", f.target.name, "address", f.address)
	r.forwards.leave(f.target.name, f.source)
	r.forwards.done(f)
}

// pass copies one direction until its end, which it passes on too. Both ends are
// what the kernel gave us, not wrapped, so that it moves the bytes by itself.
func (f *forward) pass(to, from net.Conn) int64 {
	n, err := f.router.relays.copy(to, from)
	switch {
	case err == nil && from == f.remote && f.clientEnded.Load(): // what is left is to close both
	case err == nil && from == f.client:
		_ = closeWrite(to)
		f.clientEnded.Store(true)
	case err == nil:
		_ = closeWrite(to)
		late := time.Now().Add(f.router.halfClosedTime)
		_ = f.client.SetReadDeadline(late)
		_ = f.remote.SetWriteDeadline(late)
	case errors.Is(err, os.ErrDeadlineExceeded): // ours, after the other direction's end
		_ = closeWrite(to)
	default:
		// Which end failed is not known. If it is the one that was written to, it may
		// have said why before, in an alert that the other direction still carries.
		f.how.CompareAndSwap(nil, outcomeBroken)
		soon := time.Now().Add(lingerTime)
		_ = f.client.SetDeadline(soon)
		_ = f.remote.SetDeadline(soon)
	}
	return n
}

// end closes the connection, whatever it is doing; false when it was about to end.
func (f *forward) end(how outcome) bool {
	first := f.how.CompareAndSwap(nil, how)
	_ = f.client.Close()
	_ = f.remote.Close()
	return first
}

// forwardDialer returns what dials other hosts.
func forwardDialer(from netip.Addr) func(ctx context.Context, network, address string) (net.Conn, error) {
	d := &net.Dialer{KeepAliveConfig: keepAliveConfig()}
	if !from.IsValid() {
		return d.DialContext
	}
	local := netip.AddrPortFrom(from, 0)
	d.LocalAddr = net.TCPAddrFromAddrPort(local)
	d.Control = portByConnect
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		to, err := netip.ParseAddrPort(address)
		if err != nil { // a host name
			return d.DialContext(ctx, network, address)
		}
		c, err := d.DialTCP(ctx, network, local, to) // on a small stack, which lives as long as the connection
		if err != nil {
			return nil, err
		}
		return c, nil
	}
}

// portByConnect has the kernel choose the local port when it knows the other end, so
// that it may be one that a connection to another host has. Without it all hosts
// share one range of ports, in which those of the last minute's connections count.
func portByConnect(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		// A kernel that does not know this chooses at once, as without it.
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	})
}

// newForwards returns the bounds that a configuration sets.
func newForwards(cfg Config) *forwards {
	return &forwards{
		limit: cfg.MaxForwarded, perName: cfg.MaxForwardedPerName, share: min(cfg.SourceShare, 100),
		names: make(map[string]*quota), open: make(map[*forward]struct{}),
	}
}

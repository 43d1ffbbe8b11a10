// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"golang.org/x/crypto/cryptobyte"
)

const (
	// DefaultMaxConns bounds one tenant's connections. A kubelet holds about
	// five, so this is room for 2,000 workers, and at roughly 50 KiB each of
	// TLS and HTTP/2 state it keeps one tenant under half a gigabyte.
	DefaultMaxConns = 10000

	// DefaultBacklog is what may wait while a tenant starts or is busy: as long
	// as the kernel's own queue used to be, for the same purpose.
	DefaultBacklog = 128
)

// ErrNameTaken is what a [NameTakenError] wraps.
var ErrNameTaken = errors.New("name is already registered")

// NameTakenError says which name could not be registered, and who has it.
type NameTakenError struct {
	Name   string // canonical
	Tenant string // the holder

	// Protocol is the one that another listener of the same tenant has under the
	// name. It is empty when that one has no Protocols, or the tenant is another.
	Protocol string
}

func (e *NameTakenError) Error() string {
	what := fmt.Sprintf("name %q", e.Name)
	if e.Protocol != "" {
		what += fmt.Sprintf(" with protocol %q", e.Protocol)
	}
	return fmt.Sprintf("%s is already registered by tenant %q: close that listener or take the name from it first", what, e.Tenant)
}

// Unwrap returns ErrNameTaken.
func (e *NameTakenError) Unwrap() error { return ErrNameTaken }

// ListenConfig describes a listener.
type ListenConfig struct {
	// Tenant labels metrics and logs. Several listeners may share it. Required.
	Tenant string

	// Names are the DNS names whose connections the listener gets, compared in
	// lower case and without a final dot. None is valid: it gets nothing until
	// SetNames.
	Names []string

	// Protocols are application protocols (ALPN, RFC 7301), compared byte by byte.
	// A listener that has some gets those connections of its names whose client
	// offers one of them; of several that are registered, the first that the client
	// offers decides. A listener without gets all other connections. So listeners
	// of one tenant may share a name as long as no two have the same protocol, and
	// at most one has none.
	//
	// The router only reads the offer. Answering it is up to whoever ends TLS.
	Protocols []string

	// MaxConns bounds the connections open at the same time, those that wait to
	// be accepted included. A single source gets [Config].SourceShare of them.
	// Zero or less means DefaultMaxConns.
	MaxConns int

	// Backlog bounds the connections handed over and not yet accepted. Zero or
	// less means DefaultBacklog.
	Backlog int

	// Addr is what Addr returns; nil means 127.0.0.1:443. It is bound by
	// nobody: kube-apiserver insists on a TCP address.
	Addr *net.TCPAddr
}

// anyProtocol stands in a site for the connections that offer none of its
// protocols. It cannot be one itself.
const anyProtocol = ""

// site is what is registered under one name: the listener of each protocol. All
// are of one tenant, so that a name never leads to two.
type site map[string]*Listener

// lookup returns the listener for what a target offers, or nil.
func (s site) lookup(to target) *Listener {
	var protocol cryptobyte.String
	for offered := to.protocols; offered.ReadUint8LengthPrefixed(&protocol); {
		if l := s[string(protocol)]; l != nil {
			return l
		}
	}
	return s[anyProtocol]
}

// sites are the sites by canonical name.
type sites map[string]site

// add has names lead to l.
func (s sites) add(l *Listener, names []string) {
	for _, name := range names {
		if s[name] == nil {
			s[name] = make(site, len(l.protocols))
		}
		for _, protocol := range l.protocols {
			s[name][protocol] = l
		}
	}
}

// free takes l out of the sites of names.
func (s sites) free(l *Listener, names []string) {
	for _, name := range names {
		at := s[name]
		for _, protocol := range l.protocols {
			if at[protocol] == l {
				delete(at, protocol)
			}
		}
		if len(at) == 0 {
			delete(s, name)
		}
	}
}

// Listener gets the connections of its names. It is a net.Listener; all its
// methods are safe for concurrent use.
type Listener struct {
	// Constant after construction.
	router    *Router
	buffers   *buffers
	tenant    string
	protocols []string // what it has in the site of each of its names
	addr      *net.TCPAddr
	queue     chan *conn  // sent to under mu, closed by Close
	accepting atomic.Bool // its owner has called Accept

	names   []string // guarded by router.mu, canonical
	retired []string // the same: what Retire took away

	mu      sync.Mutex // guards what follows
	closed  bool       // set under router.mu and mu: holding one is enough to read it
	max     int
	open    int
	sources map[netip.Addr]int // open ones by source, where that is valid
}

// Listen registers a listener for names. Connections queue from then on, even
// before the first Accept. When a name belongs to another listener with a common
// protocol, or to another tenant, none is registered and the error is a
// [*NameTakenError].
func (r *Router) Listen(cfg ListenConfig) (*Listener, error) {
	if cfg.Tenant == "" || !utf8.ValidString(cfg.Tenant) { // it labels metrics
		return nil, fmt.Errorf("listen: %q is no tenant: set ListenConfig.Tenant to its name", cfg.Tenant)
	}
	protocols := slices.Compact(slices.Sorted(slices.Values(cfg.Protocols)))
	for _, protocol := range protocols {
		const longest = 255 // RFC 7301 section 3.1
		if protocol == anyProtocol || len(protocol) > longest {
			return nil, fmt.Errorf("listen for tenant %q: %q is no protocol: use 1 to %d bytes, or set no ListenConfig.Protocols", cfg.Tenant, protocol, longest)
		}
	}
	if len(protocols) == 0 {
		protocols = []string{anyProtocol}
	}
	if cfg.Backlog <= 0 {
		cfg.Backlog = DefaultBacklog
	}
	if cfg.Addr == nil {
		cfg.Addr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 443}
	}
	l := &Listener{
		router:    r,
		buffers:   &r.buffers,
		tenant:    cfg.Tenant,
		protocols: protocols,
		addr:      cfg.Addr,
		queue:     make(chan *conn, cfg.Backlog),
		sources:   make(map[netip.Addr]int),
	}
	l.SetMaxConns(cfg.MaxConns)
	if err := r.register(l, cfg.Names); err != nil {
		return nil, fmt.Errorf("listen for tenant %q: %w", cfg.Tenant, err)
	}
	r.log.Info("routing", "tenant", l.tenant, "names", cfg.Names, "protocols", cfg.Protocols)
	return l, nil
}

// Accept waits for a connection. After Close its error is net.ErrClosed;
// closing the Router does not end it.
//
// The connection's Close gives its place in MaxConns back, so it must be
// called. No deadline is set on it, but it is closed at the end of
// [Config].HandshakeTimeout unless its owner says before that the client has
// finished its handshake: by setting a deadline to the zero time, as net/http and
// gRPC do then, or by calling its method Established().
func (l *Listener) Accept() (net.Conn, error) {
	l.accepting.Store(true)
	for c := range l.queue {
		if c.begin() {
			return c, nil
		}
	}
	return nil, net.ErrClosed
}

// Addr returns the configured address, always a *net.TCPAddr.
func (l *Listener) Addr() net.Addr { return l.addr }

// SetNames replaces the names. Either all of them are registered or, when one is
// taken ([*NameTakenError], as with [Router.Listen]), is not valid, or l is
// closed (net.ErrClosed), nothing changes. Connections handed over before stay.
func (l *Listener) SetNames(names []string) error {
	if err := l.router.register(l, names); err != nil {
		return fmt.Errorf("set names of tenant %q: %w", l.tenant, err)
	}
	l.router.log.Info("routing", "tenant", l.tenant, "names", names)
	return nil
}

// Retire takes the names away, as SetNames without any does, but for connections that
// another host forwards. That host may have decided before it heard where else the name
// leads, and from here a forwarded connection goes nowhere. So an owner that is about to
// Close goes on to Accept until those who forward have heard. Repeating it does nothing.
func (l *Listener) Retire() {
	if !l.router.retire(l) {
		return
	}
	l.router.log.Info("routing what is forwarded alone", "tenant", l.tenant)
}

// SetMaxConns changes the bound on open connections; zero or less means
// DefaultMaxConns. Connections already open stay when it falls below them.
func (l *Listener) SetMaxConns(n int) {
	if n <= 0 {
		n = DefaultMaxConns
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.max = n
}

// Open returns how many connections are open: handed over and not closed.
func (l *Listener) Open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open
}

// Close frees the names, closes the connections that nobody accepted and ends
// Accept. Accepted connections stay open and counted. It never fails, and
// repeating it does nothing.
func (l *Listener) Close() error {
	if !l.router.unregister(l) {
		return nil
	}
	for c := range l.queue {
		l.router.metrics.refused(shutdown)
		_ = c.Close() // nothing was written, so nothing can be lost
	}
	l.router.log.Info("routing ended", "tenant", l.tenant)
	return nil
}

// deliver queues c, or says why not. closed means that l is, and the name is to
// be looked up again.
func (l *Listener) deliver(c *conn) (why reason, closed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return unknownName, true
	case l.open >= l.max:
		return connections, false
	case l.sources[c.source] >= l.share(): // never for a source that is not valid
		return connectionsOfSource, false
	case len(l.queue) == cap(l.queue):
		return backlog, false
	}
	l.open++
	if c.source.IsValid() {
		l.sources[c.source]++
	}
	l.router.gate.leave(c.source)
	l.queue <- c // has room: it is sent to under mu only
	return accepted, false
}

// share is how many connections one source may have. mu must be held.
func (l *Listener) share() int {
	const all = 100
	return (l.max*l.router.sourceShare + all - 1) / all
}

// release gives back the place of one delivered connection.
func (l *Listener) release(source netip.Addr) {
	l.mu.Lock()
	l.open--
	if source.IsValid() {
		if l.sources[source]--; l.sources[source] == 0 {
			delete(l.sources, source)
		}
	}
	gone := l.closed && l.open == 0
	l.mu.Unlock()
	if gone {
		l.router.forget(l)
	}
}

// register gives l exactly these names.
func (r *Router) register(l *Listener, names []string) error {
	wanted := make([]string, 0, len(names))
	for _, name := range names {
		key, why := canonical(name)
		if why != accepted {
			return fmt.Errorf("name %q is no DNS name: use letters, digits, hyphens and dots, no address and no wildcard", name)
		}
		if !slices.Contains(wanted, key) {
			wanted = append(wanted, key)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || l.closed {
		return net.ErrClosed
	}
	for _, name := range wanted {
		for protocol, holder := range r.names[name] {
			switch {
			case holder == l:
			case holder.tenant != l.tenant:
				return &NameTakenError{Name: name, Tenant: holder.tenant}
			case slices.Contains(l.protocols, protocol):
				return &NameTakenError{Name: name, Tenant: holder.tenant, Protocol: protocol}
			}
		}
	}
	r.names.free(l, l.names)
	r.names.add(l, wanted)
	l.names = wanted
	r.listeners[l] = struct{}{}
	r.announce()
	return nil
}

// retire moves l's names to those for forwarded connections; false if it has none.
func (r *Router) retire(l *Listener) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(l.names) == 0 {
		return false
	}
	r.names.free(l, l.names)
	r.retired.free(l, l.retired)
	for _, name := range l.names {
		for _, holder := range r.retired[name] {
			if holder.tenant != l.tenant { // it had the name before
				delete(r.retired, name)
				break
			}
		}
	}
	r.retired.add(l, l.names)
	l.names, l.retired = nil, l.names
	r.announce()
	return true
}

// unregister closes l's queue and frees its names; false when that was done.
func (r *Router) unregister(l *Listener) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.closed = true
	close(l.queue)
	r.names.free(l, l.names)
	r.retired.free(l, l.retired)
	if l.open == 0 {
		delete(r.listeners, l)
	}
	return true
}

// forget ends the metrics of a closed listener whose last connection is gone.
func (r *Router) forget(l *Listener) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.listeners, l)
}

// lookup returns the listener that a target leads to, or nil and why there is
// none.
func (r *Router) lookup(to target) (*Listener, reason) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	s, ok := r.names[to.name]
	if !ok {
		return nil, unknownName
	}
	if l := s.lookup(to); l != nil {
		return l, accepted
	}
	return nil, noProtocol
}

// lookupFor is lookup for an arrival: what is forwarded may also go to a listener that
// has retired.
func (r *Router) lookupFor(a *arrival, to target) (*Listener, reason) {
	l, why := r.lookup(to)
	if l == nil && a.forwarded {
		r.mu.RLock()
		defer r.mu.RUnlock()
		if l = r.retired[to.name].lookup(to); l != nil {
			return l, accepted
		}
	}
	return l, why
}

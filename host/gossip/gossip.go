// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	// DefaultListen is memberlist's usual port on all addresses.
	DefaultListen = ":7946"

	// KeySize is that of AES-256, in bytes.
	KeySize = 32

	// reclaimAfter is how long a host must be dead until another address may have its
	// name: longer than any pause that it comes back from by itself.
	reclaimAfter = 10 * time.Second

	// rejoinInterval bounds how much longer than the network a partition lasts, but for
	// a connection's first packet and its answer.
	rejoinInterval = time.Second
	maxRejoins     = 8 // that begin at a time

	// pushPullInterval bounds how long what gossip lost is lost.
	pushPullInterval = 10 * time.Second

	// retransmits, by the logarithm of the number of hosts, is how often a host sends
	// on what it heard. At memberlist's 4 one change in a thousand misses one of five
	// hosts until the next push/pull; at 8 it is one in a million.
	retransmits = 8

	// maxSends bounds connections that are being made to others.
	maxSends = 64

	// timeout is for one exchange with another host.
	timeout = 5 * time.Second
)

// Config configures Start. Name, Installation and Key must be set.
type Config struct {
	// Name is this host's, a DNS name. No two living hosts may have the same.
	Name string

	// Installation is a text of at most 255 bytes that all hosts of an installation
	// share, and no other installation has. It is sent in the clear.
	Installation string

	// Key seals everything that is sent, for all hosts the same KeySize bytes.
	Key []byte

	// Listen is the IP:port for TCP and UDP. An empty IP means all addresses; port 0 a
	// free one. Empty means DefaultListen.
	Listen string

	// Advertise is the IP:port at which other hosts reach this one. Without a port it
	// is Listen's. Empty means Listen, which must then have an IP.
	Advertise string

	// Record is what this host says of itself at first.
	Record Record

	// Changed is called after hosts have come, gone or said something new, by one
	// goroutine and once for all that happened since it was last called, perhaps before
	// Start has returned. It must not block, nor call Leave or Close. May be nil.
	Changed func()

	// Logger gets who comes and goes, and what is dropped. Nil discards.
	Logger *slog.Logger

	// For tests. Zero means as documented.
	rejoin, pushPull, reclaim time.Duration
	now                       func() time.Time
	cut                       func(to string) bool
}

// validate returns every fault, and the addresses.
func (c *Config) validate() (listen, advertise netip.AddrPort, err error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if !isDNSName(c.Name) {
		fault("host's name %q is not a DNS name", c.Name)
	}
	if c.Installation == "" || len(c.Installation) > memberlist.LabelMaxSize {
		fault("installation must have 1 to %d bytes, has %d", memberlist.LabelMaxSize, len(c.Installation))
	}
	if len(c.Key) != KeySize {
		fault("key must have %d bytes, has %d", KeySize, len(c.Key))
	}
	if c.Listen == "" {
		c.Listen = DefaultListen
	}
	address := c.Listen
	if strings.HasPrefix(address, ":") {
		address = "[::]" + address
	}
	listen, err = netip.ParseAddrPort(address)
	if err != nil {
		fault("listen address %q is not IP:port", c.Listen)
	}
	if listen.Addr().Zone() != "" {
		// memberlist would take it for no address, and listen on all.
		fault("listen address %q has a zone: choose an address that other hosts can use", c.Listen)
	}
	switch {
	case c.Advertise == "" && listen.Addr().IsUnspecified():
		fault("advertise address is missing: %q does not tell other hosts where this one is", c.Listen)
	case c.Advertise == "":
		advertise = listen
	default:
		advertise, err = netip.ParseAddrPort(c.Advertise)
		if err != nil {
			ip, e := netip.ParseAddr(c.Advertise)
			advertise, err = netip.AddrPortFrom(ip, 0), e
		}
		if err != nil || advertise.Addr().IsUnspecified() {
			fault("advertise address %q is not an IP address with or without a port", c.Advertise)
		}
	}
	return listen, advertise, errors.Join(faults...)
}

// ErrNameTaken means that another host of the installation has this one's name.
var ErrNameTaken = errors.New("another host has this name")

// Gossip is this host among the others. All methods are safe for concurrent use.
type Gossip struct {
	// Constant after Start.
	cfg     Config
	log     *slog.Logger
	report  *report
	view    *view
	list    *memberlist.Memberlist
	address string // advertised
	queue   *memberlist.TransmitLimitedQueue
	ctx     context.Context // ends with Close
	stop    context.CancelFunc

	ready chan struct{} // closed when list is set; memberlist calls before that
	wake  chan struct{} // something is to be fetched
	dirty chan struct{} // Changed is due
	slots chan struct{} // of sends

	joining     atomic.Int32           // exchanges that Join began
	established atomic.Bool            // others know this host
	leaving     atomic.Bool            // Leave was called
	refusal     atomic.Pointer[string] // who has our name

	mu     sync.Mutex // guards what follows, and is held by Leave and Close
	closed bool

	startMu sync.Mutex // guards adding to running against its end
	ended   bool
	running sync.WaitGroup
}

// Start opens the address and makes this host one of an installation of which it is
// the only one so far. Join finds the others. The caller closes it.
func Start(cfg Config) (*Gossip, error) {
	listenAt, advertise, err := cfg.validate()
	if err != nil {
		return nil, fmt.Errorf("configure gossip: %w", err)
	}
	body, err := cfg.Record.encode()
	if err != nil {
		return nil, fmt.Errorf("configure gossip: host's record: %w", err)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.rejoin <= 0 {
		cfg.rejoin = rejoinInterval
	}
	if cfg.reclaim <= 0 {
		cfg.reclaim = reclaimAfter
	}
	if cfg.pushPull <= 0 {
		cfg.pushPull = pushPullInterval
	}
	if cfg.now == nil {
		cfg.now = time.Now
	}

	r := newReport(cfg.Logger)
	t, err := listen(listenAt, r)
	// The kernel picks a free port for TCP, and UDP may have it in use.
	for try := 0; err != nil && listenAt.Port() == 0 && try < 10; try++ {
		t, err = listen(listenAt, r)
	}
	if err != nil {
		return nil, fmt.Errorf("open the gossip address %s: %w%s", cfg.Listen, err, portRemedy(err))
	}
	t.cut = cfg.cut
	port := t.GetAutoBindPort()
	if advertise.Port() != 0 {
		port = int(advertise.Port())
	}
	address := netip.AddrPortFrom(advertise.Addr().Unmap(), uint16(port)).String()

	g := &Gossip{
		cfg:     cfg,
		log:     cfg.Logger,
		report:  r,
		address: address,
		ready:   make(chan struct{}),
		wake:    make(chan struct{}, 1),
		dirty:   make(chan struct{}, 1),
		slots:   make(chan struct{}, maxSends),
	}
	g.ctx, g.stop = context.WithCancel(context.Background())
	g.view = newView(cfg.Name, address, version{Epoch: cfg.now().UnixNano()})
	g.view.update(cfg.Record, body)
	g.queue = &memberlist.TransmitLimitedQueue{
		RetransmitMult: retransmits,
		NumNodes:       func() int { return g.view.count()[Alive] },
	}

	c := memberlist.DefaultLANConfig()
	c.Name = cfg.Name
	c.Label = cfg.Installation
	c.SecretKey = cfg.Key
	c.Transport = t
	c.BindAddr, c.BindPort = listenAt.Addr().String(), t.GetAutoBindPort()
	c.AdvertiseAddr, c.AdvertisePort = advertise.Addr().Unmap().String(), port
	c.Delegate, c.Events, c.Conflict, c.Alive = delegate{g}, delegate{g}, delegate{g}, delegate{g}
	c.Logger = r.memberlistLogger()
	c.DeadNodeReclaimTime = cfg.reclaim
	c.TCPTimeout = timeout
	// Detection as the package's documentation says. A shorter ProbeTimeout would only
	// start the indirect probes earlier: the verdict is at the end of ProbeInterval.
	c.ProbeInterval, c.ProbeTimeout = 500*time.Millisecond, 200*time.Millisecond
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = 3, 4
	c.GossipInterval, c.GossipNodes, c.RetransmitMult = 100*time.Millisecond, 4, retransmits
	// Digests and states are some 30 KiB for a hundred hosts.
	c.PushPullInterval = cfg.pushPull
	// Packets here are small, and LZW costs more than it saves.
	c.EnableCompression = false
	g.list, err = memberlist.Create(c)
	if err != nil {
		g.stop()
		return nil, fmt.Errorf("start gossip: %w", errors.Join(err, t.Shutdown()))
	}
	close(g.ready)
	g.run(g.fetch)
	g.run(g.rejoin)
	g.run(g.notify)
	g.log.Info("gossip is open", "name", cfg.Name, "address", address)
	return g, nil
}

// portRemedy says what to do about an address that cannot be opened.
func portRemedy(err error) string {
	text := err.Error() // memberlist wraps nothing
	switch {
	case strings.Contains(text, syscall.EADDRINUSE.Error()):
		return "; something else listens there, for TCP or for UDP: stop it or choose another address"
	case strings.Contains(text, syscall.EADDRNOTAVAIL.Error()):
		return "; this machine does not have the address: correct it or bring the interface up"
	}
	return ""
}

// Address is the IP:port that other hosts know this one by.
func (g *Gossip) Address() string { return g.address }

// Hosts returns all hosts that are known, this one included, in order of name. Those
// that died or left remain until Forget.
func (g *Gossip) Hosts() []Host { return g.view.hosts() }

// Update says something new of this host. It returns an error if others would
// refuse the record, and then the former stays. A record is not copied: it must not
// be modified afterwards. Everyone gets the whole record, so load alone is worth an
// update every few seconds at most.
func (g *Gossip) Update(r Record) error {
	body, err := r.encode()
	if err != nil {
		return fmt.Errorf("update the host's record: %w", err)
	}
	if d, changed := g.view.update(r, body); changed {
		g.spread(d)
	}
	return nil
}

// Forget drops a host that died or left: it is neither listed nor looked for any
// more. If it is alive after all, it comes back by itself.
func (g *Gossip) Forget(name string) { g.view.forget(name) }

// Join asks peers, each host:port, for all hosts, and tells them of this one. It
// returns how many answered, this host itself not counted, and an error if none did,
// of those that there are; then the caller tries again. After an error that is
// ErrNameTaken this host takes part no more, and the caller closes it.
func (g *Gossip) Join(ctx context.Context, peers []string) (int, error) {
	addresses, err := resolve(ctx, peers)
	var faults []error
	if err != nil {
		faults = append(faults, err)
	}
	type answer struct {
		address string
		err     error
	}
	answers := make(chan answer, len(addresses))
	asked := 0
	for _, address := range addresses {
		if address == g.address {
			continue
		}
		// Not one of the bounded sends: the caller chose how many there are.
		if !g.run(func() {
			g.joining.Add(1)
			defer g.joining.Add(-1)
			_, err := g.list.Join([]string{address})
			answers <- answer{address, err}
		}) {
			return 0, g.closedBy()
		}
		asked++
	}
	n := 0
	for range asked {
		select {
		case a := <-answers:
			if a.err != nil {
				faults = append(faults, fmt.Errorf("join %s: %w%s", a.address, a.err, joinRemedy(a.err)))
			} else {
				n++
			}
		case <-ctx.Done():
			return n, fmt.Errorf("join the other hosts: %w", context.Cause(ctx))
		}
	}
	if g.refusal.Load() != nil {
		// Without a farewell: that would be one in the other's name.
		g.Close()
		return 0, g.closedBy()
	}
	if n > 0 {
		g.established.Store(true)
		return n, nil
	}
	return 0, errors.Join(faults...)
}

// closedBy says why nothing can be done any more.
func (g *Gossip) closedBy() error {
	if other := g.refusal.Load(); other != nil {
		return fmt.Errorf("join as %q: %w, at %s; choose another name, or if that host is gone for good start again %s after it was last there",
			g.cfg.Name, ErrNameTaken, *other, 2*reclaimAfter)
	}
	return errClosed
}

// joinRemedy explains what memberlist says of a peer that does not take us.
func joinRemedy(err error) string {
	switch text := err.Error(); {
	case strings.Contains(text, "No installed keys"):
		return "; it has another key: both must have the installation's"
	case strings.HasSuffix(strings.TrimSpace(text), "EOF"), strings.Contains(text, syscall.ECONNRESET.Error()):
		return "; it hung up: it is of another installation, or too busy"
	}
	return ""
}

// resolve returns the addresses of peers: memberlist would ask name servers in ways
// of its own.
func resolve(ctx context.Context, peers []string) (addresses []string, err error) {
	var faults []error
	for _, peer := range peers {
		host, port, err := net.SplitHostPort(peer)
		if err != nil {
			faults = append(faults, fmt.Errorf("peer %q is not host:port", peer))
			continue
		}
		ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		if err != nil {
			faults = append(faults, fmt.Errorf("look up peer %q: %w", peer, err))
			continue
		}
		for _, ip := range ips {
			addresses = append(addresses, net.JoinHostPort(ip.Unmap().String(), port))
		}
	}
	return addresses, errors.Join(faults...)
}

// Leave tells the others that this host goes, so that they see it Left at once, and
// waits until some of them were told. It still answers; the caller closes it next.
func (g *Gossip) Leave(ctx context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.leaving.Swap(true) {
		return nil
	}
	d := g.view.leave()
	g.spread(d)
	// The digest must be there before memberlist's own farewell, or it would look like
	// a death until it is. What is lost now comes with gossip.
	told := make(chan struct{}, MaxHosts)
	waiting := 0
	for _, p := range g.view.living() {
		if g.send(p, message{From: g.cfg.Name, Digests: []digest{d}}, func() { told <- struct{}{} }) {
			waiting++
		}
	}
	for range waiting {
		select {
		case <-told:
		case <-ctx.Done():
			return fmt.Errorf("leave the other hosts: %w", context.Cause(ctx))
		}
	}
	within := timeout
	if deadline, ok := ctx.Deadline(); ok {
		within = max(min(within, time.Until(deadline)), time.Millisecond)
	}
	if err := g.list.Leave(within); err != nil {
		return fmt.Errorf("leave the other hosts: %w", err)
	}
	return nil
}

// Close ends everything. To the others a host that is closed without Leave is one
// that died.
func (g *Gossip) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	// 1. Nothing new begins.
	g.startMu.Lock()
	g.ended = true
	g.startMu.Unlock()
	g.stop()
	// 2. Its connections end, which ends what waits for them.
	err := g.list.Shutdown()
	// 3. All that we started has returned, Changed included.
	g.running.Wait()
	return err
}

// run starts f, unless Close was called.
func (g *Gossip) run(f func()) bool {
	g.startMu.Lock()
	defer g.startMu.Unlock()
	if g.ended {
		return false
	}
	g.running.Go(f)
	return true
}

// signal wakes whoever waits for the channel, once for any number of signals.
func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// notify calls Changed.
func (g *Gossip) notify() {
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.dirty:
			if g.cfg.Changed != nil {
				g.cfg.Changed()
			}
		}
	}
}

// fetch asks for records that others were heard to have.
func (g *Gossip) fetch() {
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.wake:
		case <-again.C:
		}
		requests, wait := g.view.due(time.Now())
		for _, r := range requests {
			g.send(r.to, message{From: g.cfg.Name, Want: r.names}, nil)
		}
		again.Stop()
		if wait > 0 {
			again.Reset(wait)
		}
	}
}

// rejoin looks for hosts that died: memberlist forgets them after half a minute,
// and after a partition each side is dead to the other. Attempts do not wait for each
// other: one that began before the network was well again would hold up the one that
// finds it well.
func (g *Gossip) rejoin() {
	tick := time.NewTicker(g.cfg.rejoin)
	defer tick.Stop()
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-tick.C:
		}
		if g.leaving.Load() {
			return
		}
		for _, p := range g.view.lost(maxRejoins) {
			g.run(func() {
				if _, err := g.list.Join([]string{p.name + "/" + p.address}); err != nil {
					g.log.Debug("a host that was lost is still away", "host", p.name, "error", err)
				}
			})
		}
	}
}

// spread gossips what this host has.
func (g *Gossip) spread(d digest) {
	g.queue.QueueBroadcast(broadcast{d.Name, message{From: g.cfg.Name, Digests: []digest{d}}.encode()})
}

// send sends a message over TCP, in time, and calls done when that has come to an
// end. It returns false if it does not: when more is to be sent than can be, which
// the other side makes good by asking again.
func (g *Gossip) send(to peer, m message, done func()) bool {
	select {
	case g.slots <- struct{}{}:
	default:
		g.report.drop(busy, "dropped a message to a host", "host", to.name)
		return false
	}
	started := g.run(func() {
		defer func() {
			<-g.slots
			if done != nil {
				done()
			}
		}()
		select {
		case <-g.ready:
		case <-g.ctx.Done():
			return
		}
		at, err := netip.ParseAddrPort(to.address)
		if err == nil {
			err = g.list.SendReliable(&memberlist.Node{Name: to.name, Addr: at.Addr().AsSlice(), Port: at.Port()}, m.encode())
		}
		if err != nil && g.ctx.Err() == nil {
			g.log.Debug("sent nothing to a host", "host", to.name, "error", err)
		}
	})
	if !started {
		<-g.slots
	}
	return started
}

// receive takes a message from another host.
func (g *Gossip) receive(data []byte) {
	m, err := decodeMessage(data)
	if err != nil {
		why := malformed
		if errors.Is(err, errTooLarge) {
			why = tooLarge
		}
		g.report.drop(why, "dropped a message from a host", "error", err)
		return
	}
	for _, d := range m.Digests {
		o := g.view.heard(d, m.From)
		if o.conflict {
			g.report.drop(conflict, "dropped what is said of a host by another of its name", "host", d.Name, "address", d.Address)
		}
		if o.spread != nil {
			g.spread(*o.spread)
		}
		if o.fetch {
			signal(g.wake)
		}
		if o.changed {
			signal(g.dirty)
		}
	}
	if len(m.Want) > 0 {
		if to, found, ok := g.view.envelopes(m.Want, m.From); ok {
			for _, e := range found {
				g.send(to, message{From: g.cfg.Name, Record: &e}, nil)
			}
		}
	}
	if m.Record != nil {
		g.store(*m.Record, m.From)
	}
}

// store takes a record from another host, which may be not its own.
func (g *Gossip) store(e envelope, from string) {
	news, clash := g.view.wanted(e.digest)
	if clash {
		g.report.drop(conflict, "dropped the record of another host of that name", "host", e.Name, "address", e.Address)
	}
	if !news {
		return
	}
	record, err := decodeRecord(e.Body)
	if err != nil {
		why := malformed
		if errors.Is(err, errTooLarge) {
			why = tooLarge
		}
		g.view.unwanted(e.Name)
		g.report.drop(why, "dropped the record of a host", "host", e.Name, "from", from, "error", err)
		return
	}
	d, stored, err := g.view.store(e.digest, record, e.Body)
	if err != nil {
		g.report.drop(tooMany, "dropped the record of a host", "host", e.Name, "error", err)
	}
	if stored {
		g.spread(d)
		signal(g.dirty)
	}
}

// broadcast is a digest that is gossiped until enough hosts were told, or a newer
// one of the same host replaces it.
type broadcast struct {
	name string
	data []byte
}

func (b broadcast) Invalidates(memberlist.Broadcast) bool { return false } // Name decides
func (b broadcast) Message() []byte                       { return b.data }
func (b broadcast) Finished()                             {}
func (b broadcast) Name() string                          { return b.name }

// delegate is what memberlist calls. NotifyJoin, NotifyLeave, NotifyUpdate,
// NotifyAlive and NotifyConflict are called with memberlist's lock held, so that
// nothing here may call memberlist.
type delegate struct{ g *Gossip }

// metaVersion is the first byte of what memberlist carries for a host; its epoch
// follows, and whatever a newer version adds.
const metaVersion = 1

// NodeMeta implements memberlist.Delegate.
func (d delegate) NodeMeta(int) []byte {
	v := d.g.view
	v.mu.Lock()
	defer v.mu.Unlock()
	return binary.BigEndian.AppendUint64([]byte{metaVersion}, uint64(v.peers[v.self].epoch))
}

func epochOf(meta []byte) (int64, error) {
	if len(meta) < 9 || meta[0] < metaVersion {
		return 0, fmt.Errorf("its %d bytes of metadata are none of ours", len(meta))
	}
	epoch := binary.BigEndian.Uint64(meta[1:])
	if epoch == 0 || epoch > maxEpoch {
		return 0, fmt.Errorf("epoch %d is impossible", epoch)
	}
	return int64(epoch), nil
}

// NotifyMsg implements memberlist.Delegate.
func (d delegate) NotifyMsg(data []byte) { d.g.receive(data) }

// GetBroadcasts implements memberlist.Delegate.
func (d delegate) GetBroadcasts(overhead, limit int) [][]byte {
	return d.g.queue.GetBroadcasts(overhead, limit)
}

// LocalState implements memberlist.Delegate.
func (d delegate) LocalState(bool) []byte {
	return message{From: d.g.cfg.Name, Digests: d.g.view.digests()}.encode()
}

// MergeRemoteState implements memberlist.Delegate.
func (d delegate) MergeRemoteState(data []byte, _ bool) { d.g.receive(data) }

// NotifyAlive implements memberlist.AliveDelegate.
func (d delegate) NotifyAlive(n *memberlist.Node) error {
	if !isDNSName(n.Name) {
		return fmt.Errorf("host's name %q is not a DNS name", clip(n.Name))
	}
	if n.Port == 0 || len(n.Addr) != net.IPv4len && len(n.Addr) != net.IPv6len {
		return errors.New("it has no address")
	}
	if _, err := epochOf(n.Meta); err != nil {
		return err
	}
	if !d.g.view.admits(n.Name) {
		return errTooMany
	}
	return nil
}

// NotifyJoin implements memberlist.EventDelegate.
func (d delegate) NotifyJoin(n *memberlist.Node) {
	if n.Name == d.g.cfg.Name {
		return
	}
	if d.g.joining.Load() == 0 {
		d.g.established.Store(true)
	}
	d.g.log.Info("host is alive", "host", n.Name, "address", n.Address())
	d.alive(n)
}

// NotifyUpdate implements memberlist.EventDelegate. It is for a host that was started
// again before anybody missed it.
func (d delegate) NotifyUpdate(n *memberlist.Node) {
	if n.Name != d.g.cfg.Name {
		d.alive(n)
	}
}

func (d delegate) alive(n *memberlist.Node) {
	epoch, err := epochOf(n.Meta)
	if err != nil {
		return // NotifyAlive has refused it
	}
	if to, ahead := d.g.view.joined(n.Name, n.Address(), epoch); ahead {
		d.g.send(to, message{From: d.g.cfg.Name, Digests: []digest{to.digest()}}, nil)
	}
	signal(d.g.wake)
	signal(d.g.dirty)
}

// NotifyLeave implements memberlist.EventDelegate, for hosts that left and that died.
func (d delegate) NotifyLeave(n *memberlist.Node) {
	if n.Name == d.g.cfg.Name {
		return
	}
	d.g.view.departed(n.Name)
	d.g.log.Info("host is gone", "host", n.Name, "address", n.Address())
	signal(d.g.dirty)
}

// NotifyConflict implements memberlist.ConflictDelegate. Memberlist keeps whom it
// knows, so the later host need only know that it is the later: it is the one that
// meets its own name when it asks to join, and that nobody knows yet.
func (d delegate) NotifyConflict(existing, other *memberlist.Node) {
	g := d.g
	if existing.Name != g.cfg.Name {
		return // reported from memberlist's log
	}
	if g.joining.Load() > 0 && !g.established.Load() {
		address := other.Address()
		g.refusal.CompareAndSwap(nil, &address)
		return
	}
	g.report.drop(conflict, "another host says it has this one's name; stop it or give it another", "host", other.Name, "address", other.Address())
}

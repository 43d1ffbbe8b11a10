// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/host/gossip"
	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/sni"
	"github.com/tenantd/tenantd/storage"
)

const (
	// hostsPrefix is where etcd has where hosts are reached.
	hostsPrefix = "/tenantd/hosts/"
	// peersPKI is where it has the authority of the hosts' own certificates.
	peersPKI = "/tenantd/pki/"
	// tellInterval is how often a host says anew how it is.
	tellInterval = 5 * time.Second
	// loadWindow is what its load is averaged over.
	loadWindow = time.Minute
)

// Files of a host among others, in the data directory.
const (
	peerCertFile   = "peer.crt"
	peerKeyFile    = "peer.key"
	peerCAFile     = "peer-ca.crt"
	gossipKeyFile  = "gossip.key"
	membersFile    = "members.json" // storage.PeerConfig.Initial of a host that joined
	joinedFile     = "joined.json"  // see joined; gone when its content is in the other files
	sealingKeyFile = "sealing.key"
)

// hostEntry is where a host is reached, as etcd has it.
type hostEntry struct {
	Name    string `json:"name"`
	Address string `json:"address"` // of the one port
	Peer    string `json:"peer"`    // of its etcd
	Gossip  string `json:"gossip"`
	// Member is what etcd calls it: the name that its data directory was made with.
	// Empty until the host has started.
	Member string `json:"member,omitempty"`
}

// clash says what of e another host has already; nothing if that is all e's.
func (e hostEntry) clash(other hostEntry) string {
	if other.Name == e.Name {
		if other == e {
			return "" // it tries again
		}
		return fmt.Sprintf("there is a host %q already, at %s", other.Name, other.Address)
	}
	for what, same := range map[string]bool{"address": other.Address == e.Address, "peer address": other.Peer == e.Peer, "gossip address": other.Gossip == e.Gossip} {
		if same {
			return fmt.Sprintf("host %q has the same %s", other.Name, what)
		}
	}
	return ""
}

// hosts is this host among others. Its methods are safe for concurrent use.
type hosts struct {
	host      *Host
	authority *pki.Authority // of the hosts' own certificates
	gossipKey []byte
	gossip    *gossip.Gossip
	leads     *leads

	poked    chan struct{}            // wakes the placement
	leading  atomic.Bool              // this host does the placement
	draining atomic.Bool              // this host stops
	listed   atomic.Pointer[[]string] // the one ports of all hosts, as etcd has them; nil at first

	mu      sync.Mutex   // guards what follows, and that what is told last is the latest
	hosts   []string     // what tenants were told last
	members []netip.Addr // what the router was
}

// grouped says whether this host can be one of several.
func (h *Host) grouped() bool { return h.cfg.Peer.Enabled() && h.cfg.Gossip.Enabled() }

// peerConfig is what the store needs to be one of several; nil if this host is alone.
func (h *Host) peerConfig() (*storage.PeerConfig, error) {
	if !h.grouped() {
		return nil, nil
	}
	initial := map[string]string{}
	raw, err := os.ReadFile(h.dir.file(membersFile))
	if err == nil {
		err = json.Unmarshal(raw, &initial)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read %s: %w", h.dir.file(membersFile), err)
	}
	return &storage.PeerConfig{
		Listen: h.cfg.Peer.Listen, Advertise: h.cfg.Peer.Advertise, Initial: initial,
		CertFile: h.dir.file(peerCertFile), KeyFile: h.dir.file(peerKeyFile), CAFile: h.dir.file(peerCAFile),
	}, nil
}

// openStore opens the store, of which this host may be one member of several.
func (h *Host) openStore(ctx context.Context) error {
	cfg := storage.Config{
		Dir:          h.dir.file(storeDir),
		SocketDir:    h.dir.file(socketDir),
		Name:         h.name,
		BackendQuota: h.cfg.Limits.BackendQuota.Value(),
		TenantQuota:  h.cfg.Limits.TenantStorage.Value(),
		Logger:       h.log.With("component", "storage"),
	}
	peers, err := h.peerConfig()
	if err != nil {
		return err
	}
	_, err = os.Stat(h.dir.file(peerCertFile))
	if peers != nil && errors.Is(err, fs.ErrNotExist) {
		// The certificate comes from an authority in the store, which is this host's alone
		// as yet.
		if err := h.firstPeerCertificate(ctx, cfg); err != nil {
			return err
		}
	}
	cfg.Peers = peers
	h.store, err = storage.Open(ctx, cfg)
	return err
}

// firstPeerCertificate makes the files that a store with peers opens with.
func (h *Host) firstPeerCertificate(ctx context.Context, cfg storage.Config) (err error) {
	if h.store, err = storage.Open(ctx, cfg); err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, h.store.Close())
		h.store = nil
	}()
	authority, err := h.openPeersAuthority(ctx)
	if err != nil {
		return err
	}
	defer authority.Close()
	return h.keepPeerCertificate(ctx, authority)
}

func (h *Host) openPeersAuthority(ctx context.Context) (*pki.Authority, error) {
	return pki.Open(ctx, pki.AuthorityConfig{
		Tenant:  "hosts",
		Storage: pki.NewStorage(h.store.Client(), peersPKI, h.sealer),
		Cache:   h.cache,
		Logger:  h.log,
	})
}

// keepPeerCertificate writes this host's certificate to its files, now and whenever
// it is renewed.
func (h *Host) keepPeerCertificate(ctx context.Context, authority *pki.Authority) error {
	profile, err := peerProfile(h.entry())
	if err != nil {
		return err
	}
	leaf, err := authority.Leaf(ctx, profile)
	if err != nil {
		return err
	}
	write := func() error {
		cert, key := leaf.PEM()
		return errors.Join(
			writeFile(h.dir.file(peerCAFile), authority.CA(), 0o600),
			writeFile(h.dir.file(peerKeyFile), key, 0o600),
			writeFile(h.dir.file(peerCertFile), cert, 0o600),
		)
	}
	leaf.OnChange(func() { // ends with the authority
		if err := write(); err != nil {
			h.log.Error("a renewed certificate for other hosts is not in use", "error", explain(err))
		}
	})
	if err := write(); err != nil {
		return fmt.Errorf("write the certificate for other hosts: %w", explain(err))
	}
	return nil
}

// entry is where this host is reached.
func (h *Host) entry() hostEntry {
	e := hostEntry{Name: h.name, Address: h.ownAddress(), Peer: h.cfg.Peer.Advertise, Gossip: h.cfg.Gossip.Advertise}
	if h.store != nil {
		e.Member = h.store.Name()
	}
	return e
}

// ownAddress is where others reach this host's one port; empty if nobody can say.
func (h *Host) ownAddress() string {
	if own := h.addresses(); len(own) > 0 {
		return own[0]
	}
	return ""
}

// openHosts makes this host one of several, as others see it from now on.
func (h *Host) openHosts(ctx context.Context) (_ *hosts, err error) {
	s := &hosts{host: h, poked: make(chan struct{}, 1)}
	if h.ownAddress() == "" {
		return nil, errors.New("no address at which other hosts reach this one is known: set --advertise-address")
	}
	if s.authority, err = h.openPeersAuthority(ctx); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.authority.Close()
		}
	}()
	if err := h.keepPeerCertificate(ctx, s.authority); err != nil {
		return nil, err
	}
	if s.gossipKey, err = pki.LoadOrCreateKey(h.dir.file(gossipKeyFile)); err != nil {
		return nil, err
	}
	if err := s.register(ctx, h.entry()); err != nil {
		return nil, err
	}
	s.leads = newLeads(h.store.Client(), h.name, h.log)
	// Two hosts that place tenants write one after the other, or not at all.
	s.leads.gone = func(what, name string) bool { return what == placementLead && s.isGone(name) }
	s.gossip, err = gossip.Start(gossip.Config{
		Name: h.name, Installation: h.dir.id.ID, Key: s.gossipKey,
		Listen: h.cfg.Gossip.Listen, Advertise: h.cfg.Gossip.Advertise,
		Record: s.record(), Changed: s.hear, Logger: h.log.With("component", "gossip"),
	})
	return s, err
}

// register says in etcd where a host is reached.
func (s *hosts) register(ctx context.Context, e hostEntry) error {
	raw, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if _, err := s.host.store.Client().Put(ctx, hostsPrefix+e.Name, string(raw)); err != nil {
		return fmt.Errorf("say where host %q is: %w", e.Name, err)
	}
	return nil
}

// entries are all hosts that are or were there, by name.
func (s *hosts) entries(ctx context.Context) ([]hostEntry, error) {
	resp, err := s.host.store.Client().Get(ctx, hostsPrefix, clientv3.WithPrefix())
	if err != nil {
		return nil, fmt.Errorf("read where hosts are: %w", err)
	}
	var all []hostEntry
	for _, kv := range resp.Kvs {
		var e hostEntry
		if err := json.Unmarshal(kv.Value, &e); err != nil {
			return nil, fmt.Errorf("read where hosts are: %s: %w", kv.Key, err)
		}
		all = append(all, e)
	}
	return all, nil
}

// addresses are the one ports of the hosts, this one's first: of all that are listed,
// and of those that are heard of before they are. Who is not there at the moment is
// among them: workers find that out sooner than a list can tell, and know the host
// when it is back.
func (s *hosts) addresses() []string {
	var others []string
	if listed := s.listed.Load(); listed != nil {
		others = slices.Clone(*listed)
	}
	for _, other := range s.gossip.Hosts() {
		if other.State == gossip.Alive && other.Record.Address != "" {
			others = append(others, other.Record.Address)
		}
	}
	own := s.host.ownAddress()
	others = slices.DeleteFunc(others, func(address string) bool { return address == own })
	slices.Sort(others)
	return append([]string{own}, slices.Compact(others)...)
}

// list takes down which hosts etcd has.
func (s *hosts) list(all []hostEntry) {
	var addresses []string
	for _, e := range all {
		addresses = append(addresses, e.Address)
	}
	if before := s.listed.Load(); before == nil || !slices.Equal(*before, addresses) {
		s.listed.Store(&addresses)
		s.tellRoutes()
		if err := s.host.listInAdminKubeconfig(); err != nil {
			s.host.log.Error("tenantctl does not know all hosts", "error", err)
		}
	}
}

// run keeps this host one of several until ctx is done.
func (s *hosts) run(ctx context.Context) {
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() { s.leads.run(ctx) })
	parts.Go(func() { s.lead(ctx) })
	parts.Go(func() { s.find(ctx) })
	tick := time.NewTicker(tellInterval)
	defer tick.Stop()
	for ready := s.host.ready; ; {
		s.tell()
		s.checkQuorum()
		s.host.reportHost(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ready:
			ready = nil
		case <-tick.C:
		}
	}
}

// noQuorum is what a host says that cannot write.
const noQuorum = "too few hosts are alive, or reach each other: nothing can be written. Bring others back, or see `tenantd snapshot restore --help` if they are gone for good"

// checkQuorum has the host be ready while there is somebody to write for it.
func (s *hosts) checkQuorum() {
	there := s.host.store.HasQuorum()
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	switch {
	case !there && s.host.problem == "":
		s.host.problem = noQuorum
		s.host.log.Error(noQuorum)
	case there && s.host.problem == noQuorum:
		s.host.problem = ""
		s.host.log.Info("enough hosts are alive again")
	}
}

// close leaves the others, who hear of it at once.
func (s *hosts) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	if err := s.gossip.Leave(ctx); err != nil {
		s.host.log.Warn("other hosts were not told that this one stops", "error", err)
	}
	if err := s.gossip.Close(); err != nil {
		s.host.log.Warn("gossip did not close in order", "error", err)
	}
	s.authority.Close()
}

// find looks for hosts that etcd has and the gossip has not.
func (s *hosts) find(ctx context.Context) {
	for {
		known := map[string]bool{}
		for _, other := range s.gossip.Hosts() {
			known[other.Name] = true
		}
		var missing []string
		all, err := s.entries(ctx)
		if err == nil {
			s.list(all)
		}
		for _, e := range all {
			if !known[e.Name] {
				missing = append(missing, e.Gossip)
			}
		}
		if len(missing) > 0 {
			_, err = s.gossip.Join(ctx, missing)
		}
		if err != nil && ctx.Err() == nil {
			s.host.log.Debug("not all hosts are found", "error", err)
		}
		for _, other := range s.gossip.Hosts() {
			// Removed, and not heard of any more.
			if err == nil && other.State != gossip.Alive && !slices.ContainsFunc(all, func(e hostEntry) bool { return e.Name == other.Name }) {
				s.gossip.Forget(other.Name)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(2 * time.Second):
		}
	}
}

// record is what this host says of itself.
func (s *hosts) record() gossip.Record {
	h := s.host
	r := gossip.Record{
		Address: h.ownAddress(), PeerAddress: h.cfg.Peer.Advertise, Version: h.version, Role: string(h.role()),
		Load: h.load.measure(),
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r.Draining = s.draining.Load()
	for _, run := range h.runners {
		select {
		case <-run.listening:
			r.Tenants = append(r.Tenants, gossip.Tenant{UID: run.uid, Names: namesOf(&run.spec), Ready: run.serves()})
		default:
		}
	}
	slices.SortFunc(r.Tenants, func(a, b gossip.Tenant) int { return cmp.Compare(a.UID, b.UID) })
	return r
}

// tell tells the others how this host is.
func (s *hosts) tell() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.gossip.Update(s.record()); err != nil {
		s.host.log.Error("other hosts are not told how this one is", "error", err)
	}
}

// hear makes use of what others say.
func (s *hosts) hear() {
	if s.gossip == nil {
		return // at the start
	}
	s.tellRoutes()
	s.poke()
}

// poke has the placement thought over.
func (s *hosts) poke() {
	select {
	case s.poked <- struct{}{}:
	default:
	}
}

// routes are where connections for names of other hosts' tenants go, who may forward
// connections to this host, and who is gone.
func (s *hosts) routes() (names map[string]sni.Remote, members []netip.Addr, gone []string) {
	names = map[string]sni.Remote{}
	for _, other := range s.gossip.Hosts() {
		address, err := netip.ParseAddrPort(other.Record.Address)
		if err != nil || other.Name == s.host.name {
			continue
		}
		if other.State != gossip.Left {
			members = append(members, address.Addr())
		}
		if other.State != gossip.Alive {
			gone = append(gone, other.Record.Address)
			continue
		}
		for _, t := range other.Record.Tenants {
			for _, name := range t.Names {
				r := names[name]
				if t.Ready { // before those that are still starting
					r.Addresses = slices.Insert(r.Addresses, 0, other.Record.Address)
				} else {
					r.Addresses = append(r.Addresses, other.Record.Address)
				}
				names[name] = r
			}
		}
	}
	return names, members, gone
}

// isGone reports whether a host is known and does not live; of nobody it says so.
func (s *hosts) isGone(name string) bool {
	if name == "" {
		return true
	}
	i := slices.IndexFunc(s.gossip.Hosts(), func(other gossip.Host) bool { return other.Name == name })
	return i >= 0 && s.gossip.Hosts()[i].State != gossip.Alive
}

// drainPatience bounds the time that tenants have to go to other hosts when this one
// stops.
const drainPatience = 30 * time.Second

// drain has this host's tenants go to others, if there are any that take them, and
// returns when they are gone.
func (s *hosts) drain() {
	s.draining.Store(true)
	s.tell()
	others := func() bool {
		return slices.ContainsFunc(s.gossip.Hosts(), func(other gossip.Host) bool {
			return other.Name != s.host.name && other.State == gossip.Alive && !other.Record.Draining
		})
	}
	if len(s.host.running()) == 0 || !others() {
		return
	}
	s.host.log.Info("tenants go to other hosts", "atMost", drainPatience)
	for end := time.Now().Add(drainPatience); len(s.host.running()) > 0; time.Sleep(50 * time.Millisecond) {
		if !others() || time.Now().After(end) {
			s.host.log.Warn("tenants are still here, and stop with this host", "tenants", len(s.host.running()))
			return
		}
	}
}

// elsewhere reports whether a tenant answers on another host.
func (s *hosts) elsewhere(uid string) bool {
	for _, other := range s.gossip.Hosts() {
		if other.Name != s.host.name && other.State == gossip.Alive && slices.ContainsFunc(other.Record.Tenants, func(t gossip.Tenant) bool { return t.UID == uid && t.Ready }) {
			return true
		}
	}
	return false
}

// newsPatience bounds the wait for news that the one who places has had already.
const newsPatience = 2 * time.Second

// awaitElsewhere waits until this host, too, has heard that a tenant answers on another
// one, where it is to send the clients of its own.
func (s *hosts) awaitElsewhere(ctx context.Context, uid string) {
	ctx, cancel := context.WithTimeout(ctx, newsPatience)
	defer cancel()
	for !s.elsewhere(uid) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// tellRoutes has the router, and the tenants here, know what the gossip knows.
func (s *hosts) tellRoutes() {
	s.mu.Lock()
	defer s.mu.Unlock()
	names, members, gone := s.routes()
	slices.SortFunc(members, netip.Addr.Compare)
	if members = slices.Compact(members); !slices.Equal(members, s.members) {
		s.members = members
		s.host.router.SetMembers(members)
	}
	// Who asks for one of these while its host is being replaced waits for a moment.
	for _, name := range s.host.tenantNames() {
		if _, ok := names[name]; !ok {
			names[name] = sni.Remote{Expected: true}
		}
	}
	s.host.router.SetRemotes(names)
	for _, address := range gone {
		// Their clients would wait for a long time to find out.
		s.host.router.EndForwards(address)
	}
	if all := s.addresses(); !slices.Equal(all, s.hosts) {
		s.hosts = all
		for _, run := range s.host.running() {
			run.setHosts(all)
		}
	}
}

// role is what this host is to the installation's etcd.
func (h *Host) role() v1alpha1.HostRole {
	if h.store.Voting() {
		return v1alpha1.HostVoter
	}
	return v1alpha1.HostLearner
}

// loadMeter measures what this process and machine use.
type loadMeter struct {
	mu   sync.Mutex // guards what follows
	when time.Time
	cpu  time.Duration
	mean float64 // cores, averaged over loadWindow
}

// measure returns the load since it was last called, averaged.
func (m *loadMeter) measure() gossip.Load {
	m.mu.Lock()
	defer m.mu.Unlock()
	var usage unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &usage) // it fails for bad arguments alone
	cpu := time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	now := time.Now()
	if elapsed := now.Sub(m.when); !m.when.IsZero() && elapsed > 0 {
		cores := float64(cpu-m.cpu) / float64(elapsed)
		weight := min(float64(elapsed)/float64(loadWindow), 1)
		m.mean += (cores - m.mean) * weight
	}
	m.when, m.cpu = now, cpu
	used, total := machineMemory()
	return gossip.Load{CPU: int64(m.mean * 1000), Cores: int64(processors()), MemoryUsed: used, MemoryTotal: total}
}

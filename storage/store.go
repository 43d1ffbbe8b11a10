// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

const (
	// watchProgress is how often an idle watch hears of the current revision, from which it can be resumed. An API
	// server whose consistent read waits for that asks for it.
	watchProgress = 30 * time.Second
	// requestBytes leaves room for what updates may add to the largest object, and for a request's keys.
	requestBytes = MaxObjectBytes + MaxObjectBytes/updateSlack + 64<<10
	// logEntries of etcd's log stay in memory for followers that lag. Each may be as large as a request.
	logEntries = 500
	// logBeforeSnapshot is the log replayed at start at most.
	logBeforeSnapshot = 5000
	// firstWait and waitAgain are when a log line says what Open is waiting for.
	firstWait = 2 * time.Second
	waitAgain = 10 * time.Second
	// joinAgain is the pause before the members to join are asked again.
	joinAgain = time.Second
	// publishPatience is how long a member that joins and has all the data may wait for its first write.
	publishPatience = 300 * time.Millisecond
	// closePatience is how long Close waits for an etcd that may have lost a goroutine.
	closePatience = 30 * time.Second
	// failedPatience is the same for an etcd that has failed.
	failedPatience = 3 * time.Second
	// wipePage is the number of keys deleted by one request, so that others' writes fit in between.
	wipePage = 1000
)

// Store is a running etcd and what is known about the tenants in it. All methods are safe for concurrent use; none
// but Close, Err and Collector may be called after Close.
type Store struct {
	// constant after Open
	cfg      Config
	log      *slog.Logger
	endpoint string
	tempDir  string // made for the socket; empty if none was
	lock     *os.File
	etcd     *embed.Etcd
	etcdLog  *zap.Logger
	client   *clientv3.Client
	pool     []*clientv3.Client
	peers    *http.Client // nil where there are none
	ledger   *ledger
	space    space
	gate     gate
	quorum   *quorum
	terminal lastWords
	serving  atomic.Bool // clients are answered
	heard    atomic.Bool // a leader was heard of, see listen
	failed   atomic.Bool // after monitor has seen the terminal error
	err      chan error
	wakeup   chan struct{}

	next    atomic.Uint64
	stop    context.CancelFunc // ends upkeep
	upkeep  sync.WaitGroup     // maintenance, the ledger and the monitor
	defrags sync.Mutex         // held by the one that has the gate shut

	compactions, defragmentations atomic.Int64

	quiet    atomic.Bool // etcd is being stopped: what it complains of is our doing
	closing  chan struct{}
	closed   sync.Once
	closeErr error
}

// Usage is what one tenant stores.
type Usage struct {
	Live    int64 // bytes of current keys and values
	History int64 // bytes of earlier versions that are not compacted away yet
	Keys    int64 // number of current keys
	Quota   int64 // bound of Live, in bytes
	// Objects is the number of keys below registry/: what its users stored, and a few of the API server's own.
	Objects int64
	// CRDs are the CustomResourceDefinitions among them, CRDBytes their keys and values.
	CRDs, CRDBytes int64
	// Full is whether Live has reached Quota, or a write that was refused within the last RefusalMemory would be
	// refused again: a tenant whose objects are large is full before its last byte is used.
	Full bool
}

// RefusalMemory is how long a refused write keeps a tenant full. It may never come again, and smaller ones may fit.
const RefusalMemory = 5 * time.Minute

// Open starts etcd on cfg.Dir and returns when it serves and every tenant's storage is counted. The only member there
// is drops all history, for whoever watched it is gone. Errors say what is wrong with the directory and what to do.
// Giving up by ctx leaves the directory locked until etcd, which cannot be interrupted, has started and been stopped.
//
// With Peers, Open waits until this member hears from a leader: as long as ctx allows, saying every 10 s for whom.
// A member that was added by [Store.AddLearner] opens as a learner, which serves its clients like any other. One that
// was removed fails with [ErrRemoved].
func Open(ctx context.Context, cfg Config) (*Store, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("open storage: %w", err)
	}
	s := &Store{
		cfg:      cfg,
		log:      cfg.Logger,
		ledger:   newLedger(cfg.TenantQuota),
		space:    space{quota: cfg.BackendQuota},
		terminal: newLastWords(),
		err:      make(chan error, 1),
		wakeup:   make(chan struct{}, 1),
		quorum:   &quorum{},
		closing:  make(chan struct{}),
	}
	s.heard.Store(true)
	if err := s.open(ctx); err != nil {
		return nil, fmt.Errorf("open storage in %s: %w", cfg.Dir, withRemedy(err))
	}
	return s, nil
}

func (s *Store) open(ctx context.Context) (err error) {
	if err := privateDir(s.cfg.Dir); err != nil {
		return err
	}
	if s.lock, err = lockDir(s.cfg.Dir); err != nil {
		return err
	}
	var socket string
	release := func() {
		if s.tempDir != "" {
			os.RemoveAll(s.tempDir)
		}
		s.lock.Close()
	}
	peers := s.cfg.Peers
	if s.cfg.forceAlone {
		peers = &PeerConfig{}
	}
	before, err := inspect(s.cfg.Dir, peers)
	if err == nil && before.unborn {
		s.log.Warn("etcd's first start was interrupted before it stored anything, starting again", "dir", s.cfg.Dir)
		err = os.RemoveAll(filepath.Join(s.cfg.Dir, "member"))
	}
	if err == nil {
		err = s.adopt(before)
	}
	if err == nil {
		err = checkSpace(s.cfg.Dir)
	}
	if err != nil {
		release()
		return err
	}
	if socket, s.tempDir, err = socketPath(s.cfg); err != nil {
		release()
		return err
	}
	s.endpoint = "unix://" + socket
	s.etcdLog = newEtcdLogger(s.log, s.terminal, &s.quiet)
	config, err := s.etcdConfig(socket)
	if err != nil {
		release()
		return err
	}
	if s.cfg.forceAlone {
		before.members = nil // nobody is waited for
	}
	waiting := newWaiting(s, before.members)
	defer waiting.stop()

	result := make(chan error, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended) // also if etcd's last words end this goroutine
		result <- s.start(ctx, config)
	}()
start:
	for {
		select {
		case err = <-result:
			break start
		case err = <-s.terminal:
			// etcd's goroutine is gone and its files stay open until the process ends.
			release()
			return err
		case <-waiting.due:
			waiting.say()
		case <-ctx.Done():
			go func() {
				<-ended
				if s.etcd != nil {
					s.stopEtcd()
				}
				release()
			}()
			return fmt.Errorf("start etcd: %w", context.Cause(ctx))
		}
	}
	if err != nil {
		release()
		return fmt.Errorf("start etcd: %w", err)
	}
	defer func() {
		if err != nil {
			s.closeErr = errors.Join(s.closeClients(), s.closeEtcd())
			release()
		}
	}()

	unheard := s.unheard()
ready:
	for {
		select {
		case <-s.etcd.Server.ReadyNotify():
			break ready
		case <-unheard:
			if unheard = time.After(publishPatience); s.caughtUp() {
				unheard = nil
				if err := s.startAgain(ctx, config); err != nil {
					return err
				}
			}
		case err := <-s.terminal:
			return err
		case err := <-s.etcd.Err():
			return fmt.Errorf("start etcd: %w", s.whyStopped(err))
		case <-s.etcd.Server.StopNotify():
			return fmt.Errorf("start etcd: %w", s.whyStopped(nil))
		case <-waiting.due:
			waiting.say()
		case <-ctx.Done():
			return fmt.Errorf("etcd is not ready: %w", context.Cause(ctx))
		}
	}
	if err := joinIsOver(s.cfg.Dir); err != nil {
		return err
	}
	if err := s.settleAddress(ctx); err != nil {
		return err
	}
	if s.cfg.Peers != nil {
		if s.peers, err = s.cfg.Peers.peerClient(); err != nil {
			return err
		}
		s.quorum = newQuorum(func() bool { return s.Lag().LeaderKnown })
	}
	s.space.attach(s.sizes, func() { s.etcd.Server.Backend().ForceCommit() })
	for range s.cfg.Connections + 1 {
		// The client logs what it also returns: every refusal, for one.
		c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.endpoint}, Logger: zap.NewNop()})
		if err != nil {
			return fmt.Errorf("connect to %s: %w", s.endpoint, err)
		}
		s.pool = append(s.pool, c)
	}
	s.client, s.pool = s.pool[0], s.pool[1:]
	s.serving.Store(true)
	if s.cfg.Peers != nil {
		if err := s.hasCome(ctx); err != nil {
			return err
		}
	}

	running, stop := context.WithCancel(context.Background())
	s.stop = stop
	kv := s.etcd.Server.KV()
	follow, err := s.ledger.start(running, kv)
	if err != nil {
		stop()
		return fmt.Errorf("count tenants' storage: %w", err)
	}
	s.upkeep.Go(func() {
		if err := follow(); err != nil {
			s.terminal.say(err)
		}
	})
	if s.alone() {
		// Nobody has to wait until what is gone is gone from the file as well, unless its space is needed at once.
		size, _ := s.sizes()
		if err := s.compactTo(ctx, kv.Rev(), size >= percent(s.cfg.BackendQuota, tightPercent)); err != nil {
			stop()
			s.upkeep.Wait()
			return err
		}
	}
	s.upkeep.Go(func() { s.maintain(running) })
	s.upkeep.Go(s.monitor)
	if s.cfg.Peers != nil {
		s.upkeep.Go(func() { s.quorum.follow(running) })
		s.upkeep.Go(func() { s.listen(running) })
		s.upkeep.Go(func() { s.yield(running) })
	}
	s.log.Info("storage is open", "dir", s.cfg.Dir, "endpoint", s.endpoint, "revision", kv.Rev(),
		"member", s.cfg.Name, "members", len(s.etcd.Server.Cluster().Members()), "voting", s.Voting())
	return nil
}

// adopt lets what the directory says win over the configuration, and notes there what cluster is about to be joined.
func (s *Store) adopt(before found) error {
	if before.name != "" && before.name != s.cfg.Name {
		s.log.Info("the storage directory keeps the name it was made with", "name", before.name, "configured", s.cfg.Name)
		s.cfg.Name = before.name
	}
	if before.log && !before.unborn {
		return nil
	}
	if s.cfg.Peers.joins() {
		if err := writeJoining(s.cfg.Dir, s.cfg.Peers.Initial); err != nil {
			return fmt.Errorf("note which cluster to join: %w", err)
		}
		return nil
	}
	if before.joining == nil {
		return nil
	}
	if s.cfg.Peers == nil {
		return errors.New("it was made to join a cluster: say how to reach the others, or remove it")
	}
	peers := *s.cfg.Peers
	peers.Initial = before.joining
	if faults := peers.validate(s.cfg.Name); len(faults) > 0 {
		return fmt.Errorf("it was made to join a cluster, and what it was told does not fit any more: "+
			"remove it and join again: %w", errors.Join(faults...))
	}
	s.cfg.Peers = &peers
	return nil
}

// start runs etcd. A new member asks the others about their cluster first, for as long as it takes.
func (s *Store) start(ctx context.Context, config *embed.Config) error {
	for {
		var err error
		s.etcd, err = embed.StartEtcd(config)
		if err == nil || !s.cfg.Peers.joins() || !strings.Contains(err.Error(), "cannot fetch cluster info from peer urls") {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(joinAgain):
		}
	}
}

// unheard says when to look whether a new member waits for an answer that does not come, see startAgain.
func (s *Store) unheard() <-chan time.Time {
	if !s.cfg.Peers.joins() {
		return nil
	}
	return time.After(publishPatience)
}

// caughtUp says whether this member has all that it has heard of.
func (s *Store) caughtUp() bool {
	lag := s.Lag()
	snapshot := lag.Applied == 0 && s.etcd.Server.KV().Rev() > 1 // of which etcd takes no note as applied
	return lag.LeaderKnown && lag.Committed > 0 && (snapshot || lag.Applied >= lag.Committed)
}

// startAgain starts an etcd anew that is not ready. The first thing that a new member writes is its name. Where it gets
// the data as a snapshot, that write is in it, or is lost as its peers are replaced by those in the snapshot; either
// way etcd never hears what became of it, waits for 7 s, and serves nobody until then. The second time there is no
// snapshot to get.
func (s *Store) startAgain(ctx context.Context, config *embed.Config) error {
	result := make(chan error, 1)
	go func() { // which etcd's last words may end
		s.stopEtcd()
		s.etcd = nil
		s.quiet.Store(false)
		result <- s.start(ctx, config)
	}()
	var err error
	select {
	case err = <-result:
	case err = <-s.terminal:
	}
	if err != nil {
		return fmt.Errorf("start etcd with what it got from the others: %w", err)
	}
	return nil
}

// waiting says from time to time what keeps Open.
type waiting struct {
	store   *Store
	others  []string
	since   time.Time
	due     <-chan time.Time
	rewound *time.Timer
}

func newWaiting(s *Store, members []membership.Member) *waiting {
	w := &waiting{store: s, since: time.Now(), rewound: time.NewTimer(firstWait)}
	w.due = w.rewound.C
	for i := range members {
		if m := &members[i]; m.Name != s.cfg.Name {
			w.others = append(w.others, m.Name+" at "+peerAddress(m))
		}
	}
	if p := s.cfg.Peers; len(members) == 0 && p.joins() {
		for _, name := range slices.Sorted(maps.Keys(p.Initial)) {
			if name != s.cfg.Name {
				w.others = append(w.others, name+" at "+p.Initial[name])
			}
		}
	}
	return w
}

func (w *waiting) say() {
	w.rewound.Reset(waitAgain)
	if len(w.others) == 0 {
		return
	}
	w.store.log.Warn("storage waits for other hosts: most of the members must be up; if they are gone for good, make a snapshot of this one and restore that", "for", time.Since(w.since).Round(time.Second),
		"others", w.others)
}

func (w *waiting) stop() { w.rewound.Stop() }

// whyStopped is why etcd stopped serving, where it said err or nothing. Where there was no fatal or panic log line, a
// server with peers stops for one reason: they will have nothing to do with it any more.
func (s *Store) whyStopped(err error) error {
	select {
	case fatal := <-s.terminal:
		return fatal
	default:
	}
	select {
	case <-s.etcd.Server.StoppingNotify():
		if s.cfg.Peers != nil {
			return ErrRemoved
		}
	default:
	}
	if err == nil {
		err = errors.New("etcd stopped")
	}
	return err
}

func (s *Store) etcdConfig(socket string) (*embed.Config, error) {
	cfg := embed.NewConfig()
	cfg.Name = s.cfg.Name
	cfg.Dir = s.cfg.Dir
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(s.etcdLog)
	cfg.UnsafeNoFsync = s.cfg.UnsafeNoFsync
	cfg.ForceNewCluster = s.cfg.forceAlone
	cfg.QuotaBackendBytes = s.cfg.BackendQuota
	cfg.MaxRequestBytes = requestBytes
	cfg.BackendFreelistType = "map" // the array's cost grows with the square of what compaction frees
	cfg.SnapshotCount = logBeforeSnapshot
	cfg.SnapshotCatchUpEntries = logEntries
	cfg.WatchProgressNotifyInterval = watchProgress
	cfg.EnableGRPCGateway = false

	client := url.URL{Scheme: "unix", Path: socket}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	// Used once, for a new directory: no two installations are the same cluster by accident.
	cfg.InitialClusterToken = rand.Text()

	cfg.GRPCAdditionalServerOptions = []grpc.ServerOption{
		grpc.UnaryInterceptor(s.first), grpc.StreamInterceptor(s.firstStream), // before etcd's, which are chained
		grpc.ChainUnaryInterceptor(s.intercept),
	}
	if err := s.cfg.Peers.configure(cfg); err != nil {
		return nil, err
	}
	return cfg, nil
}

func (s *Store) sizes() (size, inUse int64) {
	backend := s.etcd.Server.Backend()
	return backend.Size(), backend.SizeInUse()
}

// monitor turns the first end of anything into the terminal error.
func (s *Store) monitor() {
	var err error
	select {
	case <-s.closing:
		return
	case err = <-s.terminal:
	case err = <-s.etcd.Err():
		err = s.whyStopped(err)
	case <-s.etcd.Server.StopNotify():
		err = s.whyStopped(nil)
	}
	select {
	case <-s.closing:
		return
	default:
	}
	if errors.Is(err, ErrRemoved) {
		err = fmt.Errorf("storage failed: %w", err)
	} else {
		err = fmt.Errorf("storage failed, restart the process: %w", withRemedy(err))
	}
	s.failed.Store(true)
	s.log.Error("storage failed", "error", err)
	s.err <- err
}

// Client is the host's own client, for keys outside of tenants. The store closes it.
func (s *Store) Client() *clientv3.Client { return s.client }

// Conn returns the next client of the pool. It is shared; the store closes it.
func (s *Store) Conn() *clientv3.Client {
	return s.pool[(s.next.Add(1)-1)%uint64(len(s.pool))]
}

// Endpoint is the address clients dial, "unix:///…", as --etcd-servers takes it. Whoever can open the socket can read
// and write everything, so the directory is private to this user.
func (s *Store) Endpoint() string { return s.endpoint }

// Err delivers the error that ended etcd, if one did; the store must then be closed and the process restarted. Close
// closes the channel.
func (s *Store) Err() <-chan error { return s.err }

// Failed says whether Err has an error to deliver, or has delivered it: nothing can be read or written any more.
func (s *Store) Failed() bool { return s.failed.Load() }

// Prefix is where a tenant's keys are: "/tenants/<uid>/". It fails for a uid that cannot be part of a key.
func (s *Store) Prefix(tenantUID string) (string, error) {
	if err := validTenant(tenantUID); err != nil {
		return "", err
	}
	return tenantsPrefix + tenantUID + "/", nil
}

// SetLimits bounds what a tenant stores. Limits are not stored: set them when a tenant is loaded. A tenant above its
// new limits keeps what it has, may delete and may update what it does not make larger.
func (s *Store) SetLimits(tenantUID string, limits Limits) { s.ledger.setLimits(tenantUID, limits) }

// Bytes is what a tenant has below a directory of its registry, such as "/pods/" or "/apps.example.com/things/default":
// bytes of keys and values, and the number of keys. It takes the same time for any number of keys, and does not wait
// for the bookkeeping. Directories are known down to the namespaces of a resource; of others it says 0.
func (s *Store) Bytes(tenantUID, directory string) (bytes, keys int64) {
	d := s.ledger.below(tenantUID, directory)
	return d.bytes, d.keys
}

// Vacant has filled called once when a directory as for [Store.Bytes] gets its first key, whoever writes it, and says
// at which revision there was none; it is not ok, and calls nothing, if there is one. filled must be quick and must
// not call the Store. The caller calls forget when it no longer waits; filled may be called until that returns.
func (s *Store) Vacant(tenantUID, directory string, filled func()) (revision int64, forget func(), ok bool) {
	return s.ledger.vacant(tenantUID, directory, filled)
}

// Usage is what a tenant stores, with every write that was acknowledged before the call. It waits for the bookkeeping,
// microseconds normally and as long as a defragmentation at worst.
func (s *Store) Usage(tenantUID string) Usage {
	// Without a context, the wait ends only by catching up or by closing; either way the books are the answer.
	_ = s.ledger.waitAcked(context.Background())
	defer s.ledger.mu.Unlock()
	return s.ledger.usage(tenantUID)
}

// Tenants returns, sorted, the uids that own at least one key.
func (s *Store) Tenants(ctx context.Context) ([]string, error) {
	err := s.ledger.waitAcked(ctx)
	defer s.ledger.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("list tenants in storage: %w", err)
	}
	var uids []string
	for uid, a := range s.ledger.tenants {
		if len(a.sizes) > 0 {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids, nil
}

// Wipe deletes every key of a tenant, makes sure that none is left and forgets the tenant's accounting and limits. It
// may be repeated. Leases the tenant took go when they expire. Stop the tenant's API servers first: Wipe fails if
// keys keep coming.
func (s *Store) Wipe(ctx context.Context, tenantUID string) error {
	prefix, err := s.Prefix(tenantUID)
	if err != nil {
		return fmt.Errorf("wipe a tenant's storage: %w", err)
	}
	if err := s.wipe(ctx, prefix); err != nil {
		return fmt.Errorf("wipe storage of tenant %s: %w", tenantUID, err)
	}
	s.ledger.close(tenantUID)
	return nil
}

func (s *Store) wipe(ctx context.Context, prefix string) error {
	end := clientv3.GetPrefixRangeEnd(prefix)
	for range 3 {
		for from := prefix; ; {
			page, err := s.client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithKeysOnly(), clientv3.WithLimit(wipePage))
			if err != nil {
				return err
			}
			if len(page.Kvs) == 0 {
				break
			}
			after := string(page.Kvs[len(page.Kvs)-1].Key) + "\x00"
			if _, err := s.client.Delete(ctx, from, clientv3.WithRange(after)); err != nil {
				return err
			}
			from = after
		}
		left, err := s.client.Get(ctx, prefix, clientv3.WithRange(end), clientv3.WithCountOnly())
		if err != nil {
			return err
		}
		if left.Count == 0 {
			err := s.ledger.wait(ctx, left.Header.Revision)
			s.ledger.mu.Unlock()
			return err
		}
	}
	return errors.New("keys keep being written: stop the tenant's API servers first")
}

// Close stops everything, in this order: leading, if this member does; maintenance and bookkeeping; the clients, which ends their watches; etcd;
// the socket's directory and the lock. Other users of the endpoint, API servers above all, must be stopped before:
// one told to stop together with its etcd may never return. Close may be repeated.
func (s *Store) Close() error {
	s.closed.Do(func() {
		close(s.closing)
		s.handOver(context.Background())
		s.stop()
		// A goroutine of etcd that failed may have taken a lock with it.
		if !s.within(s.upkeep.Wait) {
			s.closeErr = errors.New("close storage: its bookkeeping did not stop: end the process")
		}
		s.closeErr = errors.Join(s.closeErr, s.closeClients(), s.closeEtcd())
		if s.tempDir != "" {
			s.closeErr = errors.Join(s.closeErr, os.RemoveAll(s.tempDir))
		}
		s.closeErr = errors.Join(s.closeErr, s.lock.Close())
		close(s.err)
		s.log.Info("storage is closed", "dir", s.cfg.Dir)
	})
	return s.closeErr
}

func (s *Store) closeClients() error {
	var errs []error
	for _, c := range append(s.pool, s.client) {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close clients: %w", err)
	}
	return nil
}

func (s *Store) closeEtcd() error {
	if !s.within(s.stopEtcd) {
		return errors.New("close etcd: it did not stop: end the process")
	}
	select {
	case err := <-s.terminal:
		return fmt.Errorf("close etcd: %w", err)
	default:
		return nil
	}
}

// within runs f on a goroutine of its own, which etcd's last words may end, and
// reports whether it ended in time. What has failed is not waited for as long as
// what has work to finish.
func (s *Store) within(f func()) bool {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f()
	}()
	limit := closePatience
	if s.failed.Load() {
		limit = failedPatience
	}
	patience := time.NewTimer(limit)
	defer patience.Stop()
	select {
	case <-ended:
		return true
	case <-patience.C:
		return false
	}
}

func (s *Store) stopEtcd() {
	if s.etcd == nil {
		return
	}
	s.quiet.Store(true)
	select {
	case <-s.etcd.Server.ReadyNotify():
	default:
		s.etcd.Server.Stop() // or its Close waits for a listener that waits for readiness
	}
	s.etcd.Close()
}

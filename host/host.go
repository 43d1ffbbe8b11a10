// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"
	"github.com/coreos/go-systemd/v22/daemon"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/sni"
	"github.com/tenantd/tenantd/storage"
	"github.com/tenantd/tenantd/tenant"
)

// resumePatience bounds the wait for tenants' certificate authorities, which are
// read before a tenant's name is known to the router.
const resumePatience = 10 * time.Second

// Errors of the socket layer that have a remedy.
var (
	errAddrInUse    error = unix.EADDRINUSE
	errAddrNotAvail error = unix.EADDRNOTAVAIL
	errAccess       error = unix.EACCES
)

// Config configures a Host.
type Config struct {
	// HostConfiguration is what operators set. Fields that are not set get their defaults.
	v1alpha1.HostConfiguration
	// Version is the release of tenantd, which other hosts are told.
	Version string
	// Logger receives all that the daemon and its components say. Nil discards.
	Logger *slog.Logger
}

// Host is one machine's daemon. Its methods are safe for concurrent use.
type Host struct {
	// Constant after New.
	cfg     v1alpha1.HostConfiguration
	name    string
	version string // of tenantd
	domain  string // that the data directory must have; empty if that says which
	log     *slog.Logger
	systemd *notifier

	// Set by Run, one after the other, before what uses them starts.
	dir        *dataDir
	listener   net.Listener
	store      *storage.Store
	router     *sni.Router
	sealer     *pki.Sealer
	cache      *certmagic.Cache
	platform   *tenant.Platform
	hosts      *hosts // nil if this host runs alone
	sealingKey []byte

	route func()        // starts to route connections; later calls do nothing
	ready chan struct{} // closed when the host is ready
	load  loadMeter
	admin adminKubeconfig
	began time.Time

	trials    trials
	dormantMu sync.Mutex // has the router told of dormant tenants one after the other

	mu        sync.Mutex // guards what follows
	runners   map[string]*runner
	byName    map[string]*runner  // the same, by the names that clients use
	resumed   bool                // what is asleep has been read
	names     map[string][]string // of all tenants wherever they are, by tenant
	plane     *tenant.ControlPlane
	objects   client.Client  // of plane's Tenants and Hosts, which it reads as they were last seen; nil until they have been
	authority *pki.Authority // the system plane's
	problem   string         // why the host is not ready
	stopping  bool
	baseline  int64 // bytes the process used before the first tenant
}

// New checks the configuration and makes a Host that starts with Run.
func New(cfg Config) (*Host, error) {
	if err := cfg.HostConfiguration.Validate(); err != nil {
		return nil, fmt.Errorf("check the configuration: %w", err)
	}
	domain := cfg.Domain
	cfg.HostConfiguration.SetDefaults()
	if _, err := os.Stat(filepath.Join(cfg.DataDir, peerCertFile)); err == nil {
		cfg.SetPeerDefaults() // it is one of several already
	}
	if domain == "" && cfg.Join.Server == "" {
		domain = cfg.Domain
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	name, err := hostName(cfg.Name)
	if err != nil {
		return nil, err
	}
	return &Host{
		cfg: cfg.HostConfiguration, name: name, version: cmp.Or(cfg.Version, "unknown"), log: cfg.Logger, systemd: newNotifier(cfg.Logger),
		domain: domain, names: map[string][]string{},
		ready: make(chan struct{}), runners: map[string]*runner{}, byName: map[string]*runner{}, problem: "starting",
	}, nil
}

// sealingKeyFile is where the key is, or is to be.
func (h *Host) sealingKeyFile(d *dataDir) string {
	return cmp.Or(h.cfg.SealingKeyFile, d.file(sealingKeyFile))
}

// Ready is closed when the system plane answers and the port is open.
func (h *Host) Ready() <-chan struct{} { return h.ready }

// Run runs the host until ctx is done, and then stops it: requests in flight are
// answered, nothing that was acknowledged is lost. It returns nil after ctx is
// done, otherwise why the host could not start or go on. It is called once.
func (h *Host) Run(ctx context.Context) (err error) {
	h.began = time.Now()
	h.log.Info("starting", "host", h.name, "dataDir", h.cfg.DataDir, "listen", h.cfg.Listen, "domain", h.cfg.Domain)
	h.systemd.say("STATUS=Starting")
	// First of all: with it, gRPC's connections to etcd log where upstream does.
	if err := tenant.PrepareProcess(h.log); err != nil {
		return err
	}

	// 1. The ports, before anything is written: a port in use leaves nothing behind.
	if h.listener, err = listen(h.cfg.Listen, h.log); err != nil {
		return fmt.Errorf("open the port %s: %w", h.cfg.Listen, err)
	}
	defer h.listener.Close()
	health, err := h.serveHealth()
	if err != nil {
		return err
	}
	defer health.close()

	// 2. The data directory, which this process then has to itself.
	if h.dir, err = openDataDir(h.cfg.DataDir, h.domain, h.joiner(ctx)); err != nil {
		return err
	}
	defer h.dir.close()
	h.cfg.Domain = h.dir.id.Domain // a host that joined was told
	if err := os.Remove(h.dir.file(joinedFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove what is left of the join: %w", explain(err))
	}

	// 3. Storage and the key that seals what is secret in it.
	keyFile := h.sealingKeyFile(h.dir)
	if err := h.dir.checkKey(keyFile); err != nil {
		return err
	}
	key, err := pki.LoadOrCreateKey(keyFile)
	if err != nil {
		return explain(err)
	}
	h.sealingKey = key
	if h.sealer, err = pki.NewSealer(key); err != nil {
		return err
	}
	if h.dir.holds(keyFile) {
		h.log.Info("the sealing key is in the data directory: a copy with it opens every private key, one without it none; keep it elsewhere with --sealing-key-file", "file", keyFile)
	} else {
		h.log.Info("private keys are sealed; a backup of the data directory is of no use without this key", "file", keyFile)
	}
	h.cache = pki.NewCache()
	defer h.cache.Stop()
	if err := h.openStore(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	// 9. Storage closes after all that uses it.
	defer func() {
		switch e := h.store.Close(); {
		case e != nil && err == nil:
			err = e
		case e != nil: // err says why already
			h.log.Warn("storage did not close in order", "error", e)
		}
	}()
	if err := h.dir.claim(ctx, h.store.Client()); err != nil {
		return err
	}
	h.store.SetLimits(systemUID, storage.Limits{Bytes: h.cfg.Limits.BackendQuota.Value() / 10, Objects: 1_000_000})
	health.register(h.store.Collector())

	// 4. The router. It begins when it knows the tenants' names (see resume);
	// until then connections wait in the kernel.
	h.router = sni.New(sni.Config{
		MaxPending:          h.cfg.Limits.MaxPending,
		MaxPendingPerSource: h.cfg.Limits.MaxPendingPerSource,
		TrustedProxies:      prefixes(h.cfg.TrustedProxies),
		ForwardFrom:         h.forwardFrom(),
		Asked:               h.asked,
		Logger:              h.log.With("component", "router"),
	})
	health.register(h.router.Collector())
	routing := make(chan error, 1)
	h.route = sync.OnceFunc(func() {
		go func() { routing <- h.router.Serve(context.WithoutCancel(ctx), h.listener) }()
	})
	defer h.router.Close()

	// 5. The control planes' common ground.
	if h.platform, err = tenant.NewPlatform(tenant.PlatformConfig{Storage: h.store, Logger: h.log}); err != nil {
		return err
	}
	ctrl.SetLogger(tenant.UpstreamLogger(h.log.With("component", "reconciler")))
	health.register(h)
	// 5a. The other hosts, before any tenant may run here.
	if h.grouped() {
		if h.hosts, err = h.openHosts(ctx); err != nil {
			return err
		}
		health.register(h.hosts.gossip.Collector())
		// 8. They hear that this host stops when its tenants have.
		defer h.hosts.close()
	}

	// 6. The system plane, and with it the tenants.
	// Their context outlives ctx: the reconciler and the system plane stop last.
	work, stopWork := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stopWork(nil)
	var parts sync.WaitGroup
	parts.Go(func() { h.keepSystemPlane(work, stopWork) })
	parts.Go(func() { h.systemd.watchdog(work, h.checkStore) })
	parts.Go(func() { h.reportStatus(work) })
	parts.Go(func() { h.keepAuditShort(work) })
	if h.hosts != nil {
		parts.Go(func() { h.hosts.run(work) })
	}

	var failure error
	select {
	case <-ctx.Done():
	case <-work.Done():
		failure = context.Cause(work)
	case err := <-h.store.Err():
		failure = fmt.Errorf("storage ended: %w", err)
	case err := <-routing:
		failure = fmt.Errorf("router ended: %w", err)
	}
	// 7. Stop: tenants go to other hosts; then new connections (with a socket from systemd they wait for the
	// next start), then the tenants, then the system plane.
	h.log.Info("stopping")
	h.systemd.say(daemon.SdNotifyStopping + "\nSTATUS=Stopping: tenants finish their requests")
	h.setProblem("stopping")
	if h.hosts != nil && failure == nil {
		h.hosts.drain()
	}
	h.router.Close()
	h.stopTenants()
	stopWork(nil)
	parts.Wait()
	h.log.Info("stopped", "ran", time.Since(h.began).Round(time.Second))
	return failure
}

// keepSystemPlane runs the system plane, again and again if it fails, until ctx
// is done and the tenants have stopped. A first failure that no repetition would
// mend ends the host.
func (h *Host) keepSystemPlane(ctx context.Context, fail context.CancelCauseFunc) {
	authority, err := h.openAuthority(ctx, v1alpha1.ReservedTenantName, systemUID)
	if err != nil {
		fail(err)
		return
	}
	defer authority.Close()
	h.mu.Lock()
	h.authority = authority
	h.mu.Unlock()
	if err := h.writeAdminKubeconfig(ctx, authority); err != nil {
		fail(err)
		return
	}
	for pause := minRestart; ; pause = min(2*pause, maxRestart) {
		err := h.runSystemPlane(ctx, authority)
		if ctx.Err() != nil {
			return
		}
		h.log.Error("system plane failed; tenants go on, but changes to them wait", "error", err, "retryIn", pause)
		h.setProblem(fmt.Sprintf("the system plane failed: %v", err))
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// runSystemPlane runs the system plane and the reconciling of tenants until
// either fails or ctx is done.
func (h *Host) runSystemPlane(ctx context.Context, authority *pki.Authority) error {
	plane, err := h.newSystemPlane(ctx, authority)
	if err != nil {
		return err
	}
	planeCtx, stopPlane := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- plane.Run(planeCtx) }()
	h.mu.Lock()
	h.plane = plane
	h.mu.Unlock()
	// The plane outlives the reconciler, which writes its last words to it.
	defer func() {
		stopPlane()
		if err := <-ended; err != nil {
			h.log.Warn("system plane stopped with an error", "error", err)
		}
	}()
	select {
	case <-ctx.Done():
		return nil
	case err := <-ended:
		ended <- nil
		return err
	case <-plane.Serves(): // on a host that starts again all is there but what upstream sees to once more
	}
	if err := installCRDs(ctx, plane.RESTConfig(), h.log); err != nil {
		return err
	}
	h.mu.Lock()
	if h.baseline == 0 {
		h.baseline = memoryInUse()
	}
	h.mu.Unlock()
	mgr, r, err := h.newManager(plane.RESTConfig())
	if err != nil {
		return err
	}
	startTenants := h.platform.HoldStarts()
	defer startTenants()
	if err := h.resume(ctx, r); err != nil {
		return err
	}
	h.route()
	time.AfterFunc(askPatience, startTenants)
	mgrCtx, stopManager := context.WithCancel(ctx)
	defer stopManager()
	managed := make(chan error, 1)
	go func() { managed <- mgr.Start(mgrCtx) }()
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		stopManager()
		return errors.Join(<-managed, errors.New("the list of tenants could not be read"))
	}
	h.setObjects(mgr.GetClient())
	defer h.setObjects(nil)
	for ready := plane.Ready(); ; {
		select {
		case <-ready:
			ready = nil
			h.becomeReady()
		case err := <-ended:
			ended <- nil
			stopManager()
			return errors.Join(err, <-managed)
		case err := <-managed:
			return err
		}
	}
}

func (h *Host) setObjects(c client.Client) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.objects = c
}

// askPatience is how long the first tenants to start wait for those that come before
// them: those for which connections have waited since the port was opened.
const askPatience = 50 * time.Millisecond

// resume starts the tenants that were here when the last run of this host ended,
// and returns when the router knows their names: a client that waited for the
// host is not to be told that its tenant is unknown. It takes back what the last
// run said of them first: nobody shall read Ready before it is so again.
func (h *Host) resume(ctx context.Context, r *reconciler) error {
	tenants, err := h.listTenants(ctx)
	if err != nil {
		return fmt.Errorf("read tenants: %w", err)
	}
	var here []*v1alpha1.Tenant
	for i := range tenants {
		t := &tenants[i]
		h.mu.Lock()
		already := h.runners[t.Name] != nil // it is the system plane alone that started again
		h.mu.Unlock()
		h.learnNames(t)
		if !already && t.DeletionTimestamp.IsZero() && slices.Contains(t.Status.Placement, h.name) {
			here = append(here, t)
		}
	}
	if err := unsayReady(ctx, r.client, here); err != nil {
		return err
	}
	var runs []*runner
	for _, t := range here {
		if run := r.start(t); run != nil {
			runs = append(runs, run)
		}
	}
	h.mu.Lock()
	h.resumed = true
	h.mu.Unlock()
	h.tellDormant()
	patience := time.After(resumePatience)
	for _, run := range runs {
		select {
		case <-run.listening:
		case <-patience:
			h.log.Warn("routing begins before all tenants are known", "tenant", run.name)
			return nil
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// unsayReady has the tenants that run on this host alone Starting where they say Ready.
func unsayReady(ctx context.Context, c client.Client, tenants []*v1alpha1.Tenant) error {
	const message = "The host has started; the control plane is waiting for its turn."
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(8)
	for _, t := range tenants {
		if t.Status.Phase != v1alpha1.TenantReady || len(t.Status.Placement) > 1 {
			continue
		}
		all.Go(func() error {
			before := t.DeepCopy()
			t.Status.Phase = v1alpha1.TenantStarting
			for _, condition := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionControlPlaneAvailable} {
				setCondition(t, &t.Status, condition, metav1.ConditionFalse, v1alpha1.ReasonStarting, message)
			}
			if err := ignoreStale(writeStatus(ctx, c, t, before)); err != nil {
				return fmt.Errorf("write status of tenant %q: %w", t.Name, err)
			}
			return nil
		})
	}
	return all.Wait()
}

func (h *Host) newManager(cfg *rest.Config) (ctrl.Manager, *reconciler, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, nil, err
	}
	cfg = rest.CopyConfig(cfg)
	cfg.ContentType = "" // custom resources have no protobuf form
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: scheme,
		// The API server's discovery may lag behind the CRD for a moment, and its
		// first answer would be kept for long.
		MapperProvider:         func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return objectMapper(), nil },
		Metrics:                server.Options{BindAddress: "0"},
		HealthProbeBindAddress: "0",
	})
	if err != nil {
		return nil, nil, fmt.Errorf("make reconciler: %w", err)
	}
	r := &reconciler{host: h, client: mgr.GetClient(), changed: make(chan event.TypedGenericEvent[*v1alpha1.Tenant], 1024)}
	if err := r.register(mgr); err != nil {
		return nil, nil, fmt.Errorf("make reconciler: %w", err)
	}
	return mgr, r, nil
}

// objectMapper knows the system plane's resources.
func objectMapper() meta.RESTMapper {
	mapper := meta.NewDefaultRESTMapper([]schema.GroupVersion{v1alpha1.GroupVersion})
	for _, kind := range []string{"Tenant", "Host"} {
		mapper.Add(v1alpha1.GroupVersion.WithKind(kind), meta.RESTScopeRoot)
	}
	return mapper
}

// becomeReady tells everyone who waits, once.
func (h *Host) becomeReady() {
	h.setProblem("")
	select {
	case <-h.ready:
		return
	default:
	}
	close(h.ready)
	h.log.Info("ready", "after", time.Since(h.began).Round(time.Millisecond), "address", h.listener.Addr().String(), "systemPlane", systemName(h.cfg.Domain))
	h.systemd.say(daemon.SdNotifyReady)
}

func (h *Host) setProblem(problem string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.problem != "stopping" {
		h.problem = problem
	}
}

// stopTenants stops all control planes at the same time and lets no new one start.
func (h *Host) stopTenants() {
	h.mu.Lock()
	h.stopping = true
	var stopping sync.WaitGroup
	for _, r := range h.runners {
		stopping.Go(r.stop)
	}
	h.mu.Unlock()
	stopping.Wait()
}

// openAuthority opens the PKI of a tenant or of the system plane.
func (h *Host) openAuthority(ctx context.Context, name, uid string) (*pki.Authority, error) {
	prefix, err := h.store.Prefix(uid)
	if err != nil {
		return nil, err
	}
	return pki.Open(ctx, pki.AuthorityConfig{
		Tenant:  name,
		Storage: pki.NewStorage(h.store.Client(), prefix+"pki/", h.sealer),
		Cache:   h.cache,
		Logger:  h.log,
	})
}

// issuer finds what credentials need of a tenant.
func (h *Host) issuer(ctx context.Context, name string) (issuer, error) {
	h.mu.Lock()
	run := h.runners[name]
	h.mu.Unlock()
	if run == nil {
		c, err := h.tenantClient()
		if err != nil {
			return issuer{}, err
		}
		t := &v1alpha1.Tenant{}
		if err := c.Get(ctx, client.ObjectKey{Name: name}, t); err != nil {
			return issuer{}, err
		}
		if h.hosts != nil {
			return h.distantIssuer(ctx, t)
		}
		return issuer{}, apierrors.NewServiceUnavailable(fmt.Sprintf("tenant %q has not been started yet; try again in a moment", name))
	}
	if i, asleep, err := run.sleeper(ctx); asleep {
		return i, err
	}
	i := run.issuer()
	if i.authority == nil {
		return i, apierrors.NewServiceUnavailable(fmt.Sprintf("the certificate authority of tenant %q does not exist yet; try again in a moment", name))
	}
	return i, nil
}

// listTenants reads all Tenants from the system plane, not from a cache.
func (h *Host) listTenants(ctx context.Context) ([]v1alpha1.Tenant, error) {
	c, err := h.tenantClient()
	if err != nil {
		return nil, err
	}
	list := &v1alpha1.TenantList{}
	if err := c.List(ctx, list); err != nil {
		return nil, err
	}
	return list.Items, nil
}

// tenantsNamed reads the Tenants that are served under a name, not from a cache. The
// API server looks for them, which costs little where a list of all is long.
func (h *Host) tenantsNamed(ctx context.Context, name string) (all []v1alpha1.Tenant, err error) {
	c, err := h.tenantClient()
	if err != nil {
		return nil, err
	}
	for _, field := range []string{"spec.hostname", "spec.konnectivityHostname"} {
		list := &v1alpha1.TenantList{}
		if err := c.List(ctx, list, client.MatchingFields{field: name}); err != nil {
			return nil, err
		}
		all = append(all, list.Items...)
	}
	return all, nil
}

// port is the port that clients use.
func (h *Host) port() int {
	if _, port, err := net.SplitHostPort(h.cfg.AdvertiseAddress); err == nil {
		if n, err := strconv.Atoi(port); err == nil {
			return n
		}
	}
	if a, ok := h.listener.Addr().(*net.TCPAddr); ok {
		return a.Port
	}
	return 443
}

// advertised is the configured address of this host, or empty.
func (h *Host) advertised() string {
	if host, _, err := net.SplitHostPort(h.cfg.AdvertiseAddress); err == nil {
		return host
	}
	return strings.Trim(h.cfg.AdvertiseAddress, "[]")
}

// addresses are the IP:port at which workers find the hosts: what is advertised, or
// the address of this machine's default route. None means that they are to look up
// their tenant's name.
func (h *Host) addresses() []string {
	host := h.advertised()
	if host == "" {
		if ip := h.listener.Addr().(*net.TCPAddr).IP; !ip.IsUnspecified() {
			host = ip.String()
		} else if ip, err := utilnet.ChooseHostInterface(); err == nil {
			host = ip.String()
		}
	}
	if net.ParseIP(host) == nil {
		return nil
	}
	return []string{net.JoinHostPort(host, strconv.Itoa(h.port()))}
}

// learnNames remembers the names of a tenant, wherever it runs.
func (h *Host) learnNames(t *v1alpha1.Tenant) {
	if h.hosts == nil {
		return
	}
	names := namesOf(&t.Spec)
	h.mu.Lock()
	known := slices.Equal(h.names[t.Name], names)
	h.names[t.Name] = names
	h.mu.Unlock()
	if !known {
		h.hosts.hear()
	}
}

// forgetNames forgets those of a tenant that is gone.
func (h *Host) forgetNames(tenant string) {
	if h.hosts == nil {
		return
	}
	h.mu.Lock()
	delete(h.names, tenant)
	h.mu.Unlock()
	h.hosts.hear()
}

// tenantNames are the names of all tenants.
func (h *Host) tenantNames() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []string
	for _, names := range h.names {
		all = append(all, names...)
	}
	return all
}

// running are the tenants that are here.
func (h *Host) running() []*runner {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Collect(maps.Values(h.runners))
}

// tell has other hosts hear of what changed here.
func (h *Host) tell() {
	if h.hosts != nil {
		h.hosts.tell()
	}
}

// distantIssuer is what credentials need of a tenant that runs on another host. The
// caller releases it.
func (h *Host) distantIssuer(ctx context.Context, t *v1alpha1.Tenant) (issuer, error) {
	authority, err := h.openAuthority(ctx, t.Name, string(t.UID))
	if err != nil {
		return issuer{}, err
	}
	i := issuer{spec: t.Spec, authority: authority, release: func() { authority.Close() }}
	switch t.Status.Phase {
	case v1alpha1.TenantReady, v1alpha1.TenantMoving, v1alpha1.TenantAsleep: // which wakes
	default:
		return i, nil
	}
	cert, key, _, err := authority.IssueClient(ctx, "tenantd:"+h.name, []string{user.SystemPrivilegedGroup}, pki.MinClientTTL)
	if err != nil {
		return i, err
	}
	// By way of this host's own port, which knows where the tenant is.
	i.client = &rest.Config{Host: "https://" + h.ownAddress(), TLSClientConfig: rest.TLSClientConfig{
		ServerName: t.Spec.Hostname, CAData: authority.CA(), CertData: cert, KeyData: key,
	}}
	return i, nil
}

// allAddresses are the IP:port of all hosts that live.
func (h *Host) allAddresses() []string {
	if h.hosts == nil {
		return h.addresses()
	}
	return h.hosts.addresses()
}

// instance tells this host's part of a tenant from those of others.
func (h *Host) instance() string {
	if h.hosts == nil {
		return ""
	}
	return h.name
}

// forwardFrom is the address that other hosts know this one by.
func (h *Host) forwardFrom() netip.Addr {
	if !h.grouped() {
		return netip.Addr{}
	}
	ip, _ := netip.ParseAddr(h.advertised()) // without one the kernel chooses
	return ip
}

// prefixes are networks that have been validated.
func prefixes(networks []string) []netip.Prefix {
	all := make([]netip.Prefix, len(networks))
	for i, n := range networks {
		all[i] = netip.MustParsePrefix(n)
	}
	return all
}

// checkStore says whether the store answers.
func (h *Host) checkStore(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	// What this host's own member has: a restart would not bring the others back.
	if _, err := h.store.Client().Get(ctx, installationKey, clientv3.WithSerializable()); err != nil {
		return fmt.Errorf("the store does not answer: %w", err)
	}
	return nil
}

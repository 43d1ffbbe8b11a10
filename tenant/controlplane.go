// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	netutils "k8s.io/utils/net"

	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/tenant/cluster"
	"github.com/tenantd/tenantd/tenant/limit"
)

const (
	// DefaultStartTimeout is how long a control plane may take to become ready.
	// It is long: on a machine that starts a hundred of them each waits for
	// processor, and a start that is given up is work lost.
	DefaultStartTimeout = 5 * time.Minute
	// unreadyLimit is how long a control plane that was ready may be unready
	// before Run gives it up. A store that is slow for a while must not make all
	// control planes restart, which would make it slower.
	unreadyLimit = 5 * time.Minute
	// checkInterval is the time between checks of a ready control plane.
	checkInterval = 15 * time.Second
	// openPatience is how long clients wait at most for an API server that is starting:
	// with what it does not know yet it would refuse them what they may do. Longer, and
	// a tenant could not mend what keeps its API server from getting ready.
	openPatience = 15 * time.Second
	// turnPatience is how long a start keeps its turn at most: one that does not get
	// ready must not hold up others.
	turnPatience = 5 * time.Second
	// apiServerShutdown bounds the wait for requests in flight at a stop.
	apiServerShutdown = 30 * time.Second
)

// Config configures a ControlPlane.
type Config struct {
	// Platform is what the control planes of this process share. Required.
	Platform *Platform
	// Name is the tenant's name, for logs. Required.
	Name string
	// UID is the tenant's identity in storage, which a later tenant of the same
	// name does not share. Required.
	UID string
	// Hostname is the name that clients use. Required.
	Hostname string
	// Port is the port that clients use, for URLs that the API server tells. Zero
	// means 443.
	Port int
	// ServiceCIDR, PodCIDR and DNSDomain are the cluster's network. Empty means the
	// defaults of package cluster.
	ServiceCIDR, PodCIDR, DNSDomain string
	// WorkerVIP is the address under which pods reach the API server on their
	// own node. Nil means 172.20.0.1.
	WorkerVIP net.IP
	// CertSANs are further names and addresses for the serving certificate.
	CertSANs []string
	// APIOnly leaves out controllers and scheduler.
	APIOnly bool
	// Instance tells this control plane from others of the same tenant on other
	// hosts, whose certificates have other addresses in them. Empty if there are none.
	Instance string
	// Lead, if set, is called when the API server answers, and returns when controllers
	// and scheduler may run here: when they run nowhere else. To take that back, end
	// the context of Run.
	Lead func(ctx context.Context) error
	// StillLeads, if set, is asked before controllers and scheduler write: it returns when
	// they certainly run nowhere else at this moment, and otherwise fails after a while.
	StillLeads func(ctx context.Context) error
	// Authority issues the certificates. It stays the caller's. Required.
	Authority *pki.Authority
	// Listener yields the clients' connections. Run closes it. Required.
	Listener net.Listener
	// Tunnel yields the connections of tunnel agents: those that offer TunnelProtocol
	// under Hostname, and all under a hostname of its own if there is one. Run closes
	// the listeners. Without any, the control plane connects to nothing in its cluster.
	Tunnel []net.Listener
	// Carrier yields the connections that offer CarrierProtocol; nil if there are
	// none. Run closes it.
	Carrier net.Listener
	// Hosts are the IP:port at which workers find the hosts of this tenant.
	Hosts []string
	// Replicas is how many control planes the tenant has, this one included, as
	// upstream's agents are told. Nil means one. It must be safe for concurrent use.
	Replicas func() int
	// KonnectivityHostname is the tunnel's own name; empty if it has none.
	KonnectivityHostname string
	// CoreDNS and KubeProxy are the addons that the cluster begins with; see
	// SetAddons.
	CoreDNS, KubeProxy cluster.Addon
	// Limits are what clients may use of the API server to begin with; see SetLimits.
	Limits limit.Config
	// Admission, if set, wraps the admission of the API server.
	Admission func(admission.Interface) admission.Interface
	// Handlers are served below their path prefixes, behind the API server's
	// authentication and authorization.
	Handlers map[string]http.Handler
	// Audit says where the audit log is. The zero value means none.
	Audit AuditConfig
	// StartTimeout: zero means DefaultStartTimeout.
	StartTimeout time.Duration
	// Logger receives this control plane's lines, with its name attached. Nil discards.
	Logger *slog.Logger
}

func (c *Config) complete() error {
	var missing []string
	for name, absent := range map[string]bool{
		"Platform": c.Platform == nil, "Name": c.Name == "", "UID": c.UID == "", "Hostname": c.Hostname == "",
		"Authority": c.Authority == nil, "Listener": c.Listener == nil,
	} {
		if absent {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("configuration lacks %s", strings.Join(missing, ", "))
	}
	c.ServiceCIDR = cmp.Or(c.ServiceCIDR, cluster.DefaultServiceCIDR)
	c.PodCIDR = cmp.Or(c.PodCIDR, cluster.DefaultPodCIDR)
	c.DNSDomain = cmp.Or(c.DNSDomain, cluster.DefaultDNSDomain)
	c.Port = cmp.Or(c.Port, cluster.DefaultPort)
	c.StartTimeout = cmp.Or(c.StartTimeout, DefaultStartTimeout)
	if c.WorkerVIP == nil {
		c.WorkerVIP = cluster.DefaultWorkerVIP()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// ControlPlane is one run of one tenant's control plane. It is used once: a
// restart is a new ControlPlane. Its methods are safe for concurrent use.
type ControlPlane struct {
	cfg      Config
	log      *slog.Logger
	serves   chan struct{} // closed when the API server answers
	ready    chan struct{}
	progress atomic.Pointer[string]
	requests requests
	activity activity
	start    turn      // to be assembled
	audit    *auditLog // nil if there is none
	limiter  *limit.Limiter

	serving *pki.Leaf // set by Run before the API server is put together
	client  atomic.Pointer[rest.Config]
	tunnel  atomic.Pointer[tunnel]

	mu       sync.Mutex // guards what follows
	memFiles map[string]*memFile
	unwatch  []func() // ends the renewal of memFiles
	work     []*part
	cluster  *cluster.Cluster // nil until it runs
}

// New makes a control plane that runs when Run is called. It takes ownership of
// the listener only then.
func New(cfg Config) (*ControlPlane, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("create control plane %q: %w", cfg.Name, err)
	}
	cp := &ControlPlane{
		cfg:      cfg,
		log:      cfg.Logger.With("tenant", cfg.Name),
		serves:   make(chan struct{}),
		ready:    make(chan struct{}),
		memFiles: map[string]*memFile{},
		requests: newRequests(cfg.Name),
		audit:    newAuditLog(cfg.Audit, cfg.Name, cfg.Logger.With("tenant", cfg.Name)),
		limiter:  limit.New(cfg.Name, cfg.Limits, cfg.Platform.gate),
	}
	cp.report("waiting for its turn to start")
	return cp, nil
}

// Ready is closed when the API server, the controllers and the scheduler are up
// and the default service account exists, so that pods can be created.
func (cp *ControlPlane) Ready() <-chan struct{} { return cp.ready }

// Serves is closed when the API server answers, which may be long before Ready if
// another host has the lead.
func (cp *ControlPlane) Serves() <-chan struct{} { return cp.serves }

// Retire has clients go elsewhere one by one, while all of the control plane still
// works: each answer is the last on its connection. Requests that go on are not
// touched. Where new connections lead is the caller's matter.
func (cp *ControlPlane) Retire() { cp.requests.retired.Store(true) }

// Hurry has the control plane be put together before those that nobody waits for.
func (cp *ControlPlane) Hurry() { cp.cfg.Platform.starts.hurry(&cp.start) }

// SetLimits changes what clients may use of the API server. Requests that run
// already run on.
func (cp *ControlPlane) SetLimits(cfg limit.Config) { cp.limiter.SetConfig(cfg) }

// Progress says in a few words what the control plane is doing or waiting for.
func (cp *ControlPlane) Progress() string { return *cp.progress.Load() }

// letGo drops what leads to the API server's storage, since a control plane that has
// ended may be kept for what it says of itself.
func (cp *ControlPlane) letGo() {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	cp.cluster = nil
}

func (cp *ControlPlane) report(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	cp.progress.Store(&s)
}

// RESTConfig is a client configuration of unlimited rights that works without
// the network while Run runs. It is nil until the API server has been put
// together, and must be copied before it is changed.
func (cp *ControlPlane) RESTConfig() *rest.Config { return cp.client.Load() }

// ServingExpiry is when the serving certificate expires; zero before there is one.
func (cp *ControlPlane) ServingExpiry() time.Time {
	if cp.client.Load() == nil {
		return time.Time{}
	}
	return cp.serving.Expiry()
}

// Run runs the control plane until ctx is done and all of it has stopped:
// requests in flight are answered first, watches are told to end. It returns nil
// after ctx is done, otherwise the reason why the control plane could not start
// or go on.
func (cp *ControlPlane) Run(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("run control plane %q: %w", cp.cfg.Name, err)
		}
	}()
	defer cp.audit.Close()
	defer cp.closeMemFiles()
	defer cp.cfg.Listener.Close()
	defer cp.closeWorkers()
	defer cp.letGo()
	ctx = klog.NewContext(ctx, UpstreamLogger(cp.log))
	ctx = pprof.WithLabels(ctx, pprof.Labels(tenantLabel, cp.cfg.Name))
	pprof.SetGoroutineLabels(ctx)
	defer pprof.SetGoroutineLabels(context.Background())

	began := time.Now()
	// The parts outlive ctx, so that they can be stopped in order.
	life := context.WithoutCancel(ctx)
	storageCtx, closeStorage := context.WithCancel(life)
	defer closeStorage()
	// Until it is ready, so that of many the first are soon, instead of all at the end.
	release, err := cp.cfg.Platform.starts.acquire(ctx, &cp.start)
	if err != nil {
		return nil // ctx is done
	}
	defer release()
	defer time.AfterFunc(turnPatience, release).Stop()
	server, err := cp.assemble(ctx, storageCtx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer server.close()

	// 5. The tunnel, which requests in flight may need to the end.
	stopTunnel := func() {}
	defer func() { stopTunnel() }()
	// 1. The API server, on which the rest depends.
	serverCtx, stopServer := context.WithCancel(life)
	defer stopServer()
	api := newPart("API server", func(func()) error { return server.run(serverCtx) })
	opening := time.AfterFunc(openPatience, server.listener.open)
	defer opening.Stop()
	// 4. It stops last.
	defer func() {
		cp.report("stopping: requests in flight")
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			cp.awaitHooks(server)
			stopServer()
			<-api.ended
		}()
		select {
		case <-stopped:
			if err == nil && ctx.Err() == nil {
				err = api.err
			}
		case <-time.After(apiServerShutdown):
			cp.log.Error("API server did not stop in time; what is left of it stays until the process ends")
		}
	}()
	startCtx, cancelStart := context.WithTimeoutCause(ctx, cp.cfg.StartTimeout, fmt.Errorf("not ready after %s", cp.cfg.StartTimeout))
	defer cancelStart()
	// 2. Controllers and scheduler, as soon as the API server can serve them: that
	// is before users' roles are all written, which takes upstream a second.
	if err := cp.awaitReadyz(startCtx, server, api, rolesHook, prioritiesHook); err != nil {
		return cp.startError(ctx, startCtx, err)
	}
	cp.open(ctx, server)
	stopTunnel = cp.serveTunnel(server.tunnel, server.listener)
	close(cp.serves)
	if cp.cfg.Lead != nil {
		cancelStart()
		release() // another host may have it for ever
		if err := cp.awaitLead(ctx, api); err != nil || ctx.Err() != nil {
			return err
		}
		startCtx, cancelStart = context.WithTimeoutCause(ctx, cp.cfg.StartTimeout, fmt.Errorf("not ready %s after it took the lead", cp.cfg.StartTimeout))
		defer cancelStart()
	}
	workCtx, stopWork := context.WithCancel(life)
	work := cp.startWork(workCtx, server)
	// 3. They stop before the API server.
	defer func() {
		cp.report("stopping: controllers and scheduler")
		// What has been built and never run is never cleaned up by upstream.
		settled, cancel := context.WithTimeout(life, settleTimeout)
		defer cancel()
		for _, part := range work {
			select {
			case <-part.started:
			case <-part.ended:
			case <-settled.Done():
			}
		}
		stopWork()
		for _, part := range work {
			select {
			case <-part.ended:
				if part.err != nil {
					cp.log.Warn("part of the control plane stopped with an error", "part", part.name, "error", part.err)
				}
			case <-time.After(2 * controllerShutdown):
				cp.log.Error("part of the control plane did not stop in time", "part", part.name)
			}
		}
	}()
	if err := cp.awaitWork(startCtx, server, api, work); err != nil {
		return cp.startError(ctx, startCtx, err)
	}
	if err := cp.awaitReadyz(startCtx, server, api); err != nil {
		return cp.startError(ctx, startCtx, err)
	}
	cancelStart()
	release()
	cp.report("running")
	cp.log.Info("control plane is ready", "after", time.Since(began).Round(time.Millisecond))
	close(cp.ready)
	return cp.watch(ctx, server, api, work)
}

// open lets clients in: at once, or when a new cluster has what each cluster has.
func (cp *ControlPlane) open(ctx context.Context, s *apiServer) {
	if !cp.cfg.APIOnly {
		_, err := s.client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			go func() { // openPatience ends it as well
				for sleep(ctx, 20*time.Millisecond) {
					select {
					case <-s.listener.opened:
						return
					case <-s.listener.closed:
						return
					default:
					}
					if _, err := s.client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{}); err == nil {
						s.listener.open()
					}
				}
			}()
			return
		}
	}
	s.listener.open()
}

// awaitLead returns nil when controllers and scheduler may run, or ctx is done.
func (cp *ControlPlane) awaitLead(ctx context.Context, api *part) error {
	cp.report("serving; controllers and scheduler run on another host")
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lead := make(chan error, 1)
	go func() { lead <- cp.cfg.Lead(ctx) }()
	select {
	case err := <-lead:
		if err == nil || ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("take the lead: %w", err)
	case <-api.ended:
		return api.endedError()
	case <-ctx.Done():
		return nil
	}
}

// startError tells a start that was cut short, which is no error, from one that failed.
func (cp *ControlPlane) startError(ctx, startCtx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	if startCtx.Err() != nil {
		return fmt.Errorf("%w: %s", context.Cause(startCtx), cp.Progress())
	}
	return err
}

// assemble issues the certificates and puts the API server together.
func (cp *ControlPlane) assemble(ctx, storageCtx context.Context) (*apiServer, error) {
	cp.report("issuing certificates")
	profile, err := cp.servingProfile()
	if err != nil {
		return nil, err
	}
	if cp.serving, err = cp.cfg.Authority.Leaf(ctx, profile); err != nil {
		return nil, fmt.Errorf("issue serving certificate: %w", err)
	}
	cp.report("assembling API server")
	server, err := cp.newAPIServer(storageCtx, cp.cfg.Listener)
	if err != nil {
		return nil, err
	}
	cp.client.Store(server.loopback)
	cp.tunnel.Store(server.tunnel)
	return server, nil
}

// servingProfile has all names under which clients in and out of the cluster
// reach the API server.
func (cp *ControlPlane) servingProfile() (pki.Profile, error) {
	name := "kube-apiserver"
	if cp.cfg.Instance != "" {
		name += "." + cp.cfg.Instance
	}
	p := pki.Profile{
		Name:       name,
		Usage:      pki.Serving,
		CommonName: "kube-apiserver",
		DNSNames: []string{
			cp.cfg.Hostname, "localhost",
			"kubernetes", "kubernetes.default", loopbackServerName, loopbackServerName + "." + cp.cfg.DNSDomain,
		},
		IPs: []net.IP{cp.cfg.WorkerVIP, net.IPv4(127, 0, 0, 1)},
	}
	_, services, err := netutils.ParseCIDRSloppy(cp.cfg.ServiceCIDR)
	if err != nil {
		return p, fmt.Errorf("service CIDR: %w", err)
	}
	first, err := netutils.GetIndexedIP(services, 1)
	if err != nil {
		return p, fmt.Errorf("service CIDR: %w", err)
	}
	p.IPs = append(p.IPs, first)
	for _, san := range cp.cfg.CertSANs {
		if ip := netutils.ParseIPSloppy(san); ip != nil {
			p.IPs = append(p.IPs, ip)
		} else {
			p.DNSNames = append(p.DNSNames, san)
		}
	}
	return p, nil
}

// The parts that work on the API server.
const (
	partControllers = "controllers"
	partScheduler   = "scheduler"
	partCluster     = "cluster"
)

// startWork starts what works on the API server.
func (cp *ControlPlane) startWork(ctx context.Context, s *apiServer) []*part {
	parts := []*part{newPart("upstream", func(started func()) error { return cp.awaitExit(ctx, started) })}
	if cp.cfg.APIOnly {
		return parts
	}
	for name, run := range map[string]func(context.Context, *apiServer, func()) error{
		partControllers: cp.runControllers,
		partScheduler:   cp.runScheduler,
		partCluster:     cp.runCluster,
	} {
		parts = append(parts, newPart(name, func(started func()) error { return run(ctx, s, started) }))
	}
	cp.mu.Lock()
	defer cp.mu.Unlock()
	cp.work = parts
	return parts
}

// partRuns says what is wrong with a part, or nil while it runs.
func (cp *ControlPlane) partRuns(name string) error {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	for _, p := range cp.work {
		if p.name != name {
			continue
		}
		select {
		case <-p.ended:
			return p.endedError()
		default:
		}
		select {
		case <-p.started:
			return nil
		default:
			return errors.New("starting")
		}
	}
	return errors.New("not started yet")
}

// The checks of upstream's post-start hooks that write objects for users.
const (
	rolesHook      = "poststarthook/rbac/bootstrap-roles"
	prioritiesHook = "poststarthook/scheduling/bootstrap-system-priority-classes"
)

// awaitReadyz waits until the API server says that it is ready, but for the
// checks in except.
func (cp *ControlPlane) awaitReadyz(ctx context.Context, s *apiServer, api *part, except ...string) error {
	for {
		err := readyz(ctx, s.client)
		var failing failingChecks
		if errors.As(err, &failing) && !slices.ContainsFunc(failing, func(c string) bool { return !slices.Contains(except, c) }) {
			err = nil
		}
		if err == nil {
			return nil
		}
		cp.report("waiting for API server: %v", err)
		select {
		case <-api.ended:
			return api.endedError()
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// awaitWork waits until everything runs and the default service account exists.
func (cp *ControlPlane) awaitWork(ctx context.Context, s *apiServer, api *part, work []*part) error {
	for _, p := range work {
		cp.report("waiting for %s", p.name)
		select {
		case <-p.started:
		case <-p.ended:
			return p.endedError()
		case <-api.ended:
			return api.endedError()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if cp.cfg.APIOnly {
		return nil
	}
	cp.report("waiting for the default service account")
	for {
		_, err := s.client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		if err == nil {
			return nil
		}
		if !apierrors.IsNotFound(err) && ctx.Err() == nil {
			cp.report("waiting for the default service account: %v", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-api.ended:
			return api.endedError()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// watch returns when the control plane is to stop, or cannot go on.
func (cp *ControlPlane) watch(ctx context.Context, s *apiServer, api *part, work []*part) error {
	ended := make(chan *part, len(work))
	for _, p := range work {
		go func() {
			<-p.ended
			ended <- p
		}()
	}
	tick := time.NewTicker(checkInterval)
	defer tick.Stop()
	lastReady := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-api.ended:
			return api.endedError()
		case p := <-ended:
			return p.endedError()
		case <-tick.C:
		}
		cp.cfg.Platform.forgetMetrics()
		err := readyz(ctx, s.client)
		if err == nil {
			lastReady = time.Now()
			cp.report("running")
			continue
		}
		cp.report("API server is not ready: %v", err)
		if !cp.cfg.Platform.storage.HasQuorum() {
			lastReady = time.Now() // what it can answer, it answers; started again it could answer nothing
		}
		if ctx.Err() == nil && time.Since(lastReady) > unreadyLimit {
			return fmt.Errorf("API server has not been ready for %s: %w", unreadyLimit, err)
		}
	}
}

// readyz asks the API server whether it is ready, and for what it waits if not.
func readyz(ctx context.Context, client kubernetes.Interface) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	body, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").Param("verbose", "").DoRaw(ctx)
	if err == nil {
		return nil
	}
	var failing failingChecks
	for line := range strings.Lines(string(body)) {
		if name, ok := strings.CutPrefix(line, "[-]"); ok {
			name, _, _ = strings.Cut(name, " ")
			failing = append(failing, name)
		}
	}
	if len(failing) > 0 {
		return failing
	}
	return err
}

// failingChecks are the checks for which an API server is not ready.
type failingChecks []string

func (f failingChecks) Error() string { return strings.Join(f, ", ") }

// settleTimeout is how long a part that is in the middle of its start is given to
// complete it before it is stopped.
const settleTimeout = 15 * time.Second

// awaitHooks waits until the API server's post-start hooks have finished, or for
// so long that they hardly will. Stopped in the middle of them, upstream leaves
// goroutines that wait for ever and hold on to the whole server, and if it has
// not seen its CRDs it calls for the end of the process. Without storage none of them
// finishes, and the process ends.
func (cp *ControlPlane) awaitHooks(s *apiServer) {
	ctx, cancel := context.WithTimeout(context.Background(), settleTimeout)
	defer cancel()
	for !cp.cfg.Platform.storage.Failed() {
		err := readyz(ctx, s.client)
		var failing failingChecks
		if err == nil || errors.As(err, &failing) && !slices.ContainsFunc(failing, func(c string) bool {
			return strings.HasPrefix(c, "poststarthook/") || c == "autoregister-completion"
		}) {
			return
		}
		if !sleep(ctx, 20*time.Millisecond) {
			return
		}
	}
}

// memFile makes a file that exists in memory until Run returns, and returns its path.
func (cp *ControlPlane) memFile(name string, content []byte) (string, error) {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if f, ok := cp.memFiles[name]; ok {
		return f.Path(), f.Set(content)
	}
	f, err := newMemFile(name, content)
	if err != nil {
		return "", err
	}
	cp.memFiles[name] = f
	return f.Path(), nil
}

// leafFiles issues a certificate and returns the paths of its files, which follow
// its renewal.
func (cp *ControlPlane) leafFiles(ctx context.Context, p pki.Profile) (cert, key string, err error) {
	leaf, err := cp.cfg.Authority.Leaf(ctx, p)
	if err != nil {
		return "", "", fmt.Errorf("issue certificate %q: %w", p.Name, err)
	}
	certPEM, keyPEM := leaf.PEM()
	if cert, err = cp.memFile(p.Name+".crt", certPEM); err != nil {
		return "", "", err
	}
	if key, err = cp.memFile(p.Name+".key", keyPEM); err != nil {
		return "", "", err
	}
	unwatch := leaf.OnChange(func() {
		certPEM, keyPEM := leaf.PEM()
		if err := errors.Join(cp.rewriteMemFile(p.Name+".key", keyPEM), cp.rewriteMemFile(p.Name+".crt", certPEM)); err != nil {
			cp.log.Error("a renewed certificate is not in use", "certificate", p.Name, "error", err)
		}
	})
	cp.mu.Lock()
	defer cp.mu.Unlock()
	cp.unwatch = append(cp.unwatch, unwatch)
	return cert, key, nil
}

// rewriteMemFile changes a file if it is still there.
func (cp *ControlPlane) rewriteMemFile(name string, content []byte) error {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if f, ok := cp.memFiles[name]; ok {
		return f.Set(content)
	}
	return nil
}

func (cp *ControlPlane) closeMemFiles() {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	for _, unwatch := range cp.unwatch {
		unwatch()
	}
	for name, f := range cp.memFiles {
		f.Close()
		delete(cp.memFiles, name)
	}
}

// leafProvider is a leaf as upstream's servers take it: they ask again after
// each change and use the new certificate for new handshakes.
type leafProvider struct{ leaf *pki.Leaf }

// Name implements dynamiccertificates.CertKeyContentProvider.
func (leafProvider) Name() string { return "serving" }

// CurrentCertKeyContent implements dynamiccertificates.CertKeyContentProvider.
func (p leafProvider) CurrentCertKeyContent() (cert, key []byte) { return p.leaf.PEM() }

// AddListener implements dynamiccertificates.CertKeyContentProvider.
func (p leafProvider) AddListener(l dynamiccertificates.Listener) { p.leaf.OnChange(l.Enqueue) }

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	certificateslisters "k8s.io/client-go/listers/certificates/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
)

const (
	// DefaultPort is the one port that a host serves everything on.
	DefaultPort = 443
	// DefaultWorkerPort is not 443: a listener there would keep every listener on
	// 0.0.0.0:443 from a worker, such as an ingress controller's.
	DefaultWorkerPort = 6443
	// DefaultServiceCIDR and DefaultPodCIDR are the ranges that most documentation
	// and network plugins assume; the first is smaller than kubeadm's, which would
	// overlap with more networks than anybody has Services for.
	DefaultServiceCIDR = "10.96.0.0/16"
	DefaultPodCIDR     = "10.244.0.0/16"
	// DefaultDNSDomain is what images have compiled in.
	DefaultDNSDomain = "cluster.local"
)

// DefaultWorkerVIP is the address of the API server on every worker: endpoints
// may be neither loopback nor link-local, and Docker's and kubeadm's own ranges are
// elsewhere.
func DefaultWorkerVIP() net.IP { return net.IPv4(172, 20, 0, 1) }

// Config configures a Cluster.
type Config struct {
	// Client has unlimited rights and no rate limit. Required.
	Client kubernetes.Interface
	// Informers are those of the API server and its controllers, so that
	// nothing is kept twice. They are started, and stopped, by the caller, after
	// New. Required.
	Informers informers.SharedInformerFactory
	// Hostname and Port are where clients and joining machines reach the API
	// server. Hostname is required; port 0 means DefaultPort.
	Hostname string
	Port     int
	// ServiceCIDR, PodCIDR and DNSDomain are the cluster's network. Empty means the
	// defaults.
	ServiceCIDR, PodCIDR, DNSDomain string
	// WorkerVIP and WorkerPort are where pods reach the API server on their own
	// node. Nil and 0 mean DefaultWorkerVIP and DefaultWorkerPort.
	WorkerVIP  net.IP
	WorkerPort int
	// CA verifies the API server, in PEM. Required.
	CA []byte
	// CertSANs are the further names and addresses in the API server's certificate.
	// No kubelet gets one for them.
	CertSANs []string
	// Hosts are the IP:port of the hosts that serve the tenant; see SetHosts.
	Hosts []string
	// KonnectivityHostname is a second name for the tunnel; empty if there is none.
	KonnectivityHostname string
	// CoreDNS and KubeProxy; see SetAddons.
	CoreDNS, KubeProxy Addon
	// Version is the API server's, such as v1.37.1. Required.
	Version string
	// Logger: nil discards.
	Logger *slog.Logger
}

// Addon says whether a cluster has an addon, and which.
type Addon struct {
	Enabled bool
	// Image, if not empty, is used in place of kubeadm's.
	Image string
}

func (c *Config) complete() error {
	var errs []error
	for name, absent := range map[string]bool{
		"Client": c.Client == nil, "Informers": c.Informers == nil, "Hostname": c.Hostname == "", "CA": len(c.CA) == 0, "Version": c.Version == "",
	} {
		if absent {
			errs = append(errs, fmt.Errorf("configuration lacks %s", name))
		}
	}
	if c.Version != "" {
		if _, err := version.ParseSemantic(c.Version); err != nil {
			errs = append(errs, fmt.Errorf("version: %w", err))
		}
	}
	setDefault(&c.ServiceCIDR, DefaultServiceCIDR)
	setDefault(&c.PodCIDR, DefaultPodCIDR)
	setDefault(&c.DNSDomain, DefaultDNSDomain)
	setDefault(&c.Port, DefaultPort)
	setDefault(&c.WorkerPort, DefaultWorkerPort)
	if c.WorkerVIP == nil {
		c.WorkerVIP = DefaultWorkerVIP()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return errors.Join(errs...)
}

func setDefault[T comparable](v *T, value T) {
	var zero T
	if *v == zero {
		*v = value
	}
}

// Cluster keeps one tenant's cluster. Its methods are safe for concurrent use.
type Cluster struct {
	cfg   Config
	log   *slog.Logger
	tasks *tasks

	// What the informers know, by resource; Run waits until they know all.
	stores   map[string]cache.Store
	requests certificateslisters.CertificateSigningRequestLister
	nodes    corelisters.NodeLister
	synced   []cache.DoneChecker
	unlisten []func() error

	needed   map[string]bool // resources and keys of what joining needs
	reserved reserved

	written map[string]string // the marker as apply, which alone uses this, last wrote it

	mu                 sync.Mutex // guards what follows
	hosts              []string
	coreDNS, kubeProxy Addon
	examine            map[string]struct{} // certificate requests to look at
	awaited            map[string]bool     // tasks that have not succeeded yet
	ready              func()              // called when none is awaited
}

// The names of tasks.
const (
	taskObjects      = "objects"
	taskEndpoints    = "endpoints"
	taskHosts        = "hosts"
	taskCertificates = "certificates"
)

// New makes a Cluster that does its work when Run is called. It adds event
// handlers to the informers, which Run removes when it returns.
func New(cfg Config) (*Cluster, error) {
	c, err := newCluster(cfg)
	if err != nil {
		return nil, fmt.Errorf("create cluster %q: %w", cfg.Hostname, err)
	}
	return c, nil
}

func newCluster(cfg Config) (*Cluster, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	c := &Cluster{
		cfg: cfg, log: cfg.Logger, hosts: normalized(cfg.Hosts), coreDNS: cfg.CoreDNS, kubeProxy: cfg.KubeProxy,
		stores: map[string]cache.Store{}, needed: map[string]bool{}, examine: map[string]struct{}{}, awaited: map[string]bool{},
	}
	c.tasks = newTasks(c.run, c.failed)
	var err error
	if c.reserved, err = newReserved(&c.cfg); err != nil {
		return nil, err
	}
	// What cannot be rendered fails here and not in the middle of a run.
	bundles, err := c.bundles()
	if err != nil {
		return nil, err
	}
	for _, b := range bundles {
		for _, o := range b.objects {
			if b.restored {
				c.needed[c.describe(o)] = true
			}
		}
	}
	return c, errors.Join(c.watchObjects(), c.watchCertificates())
}

// watchObjects has what is lost or changed restored.
func (c *Cluster) watchObjects() error {
	core, rbac := c.cfg.Informers.Core().V1(), c.cfg.Informers.Rbac().V1()
	var errs []error
	for resource, informer := range map[string]cache.SharedIndexInformer{
		"configmaps":          core.ConfigMaps().Informer(),
		"endpoints":           core.Endpoints().Informer(),
		"endpointslices":      c.cfg.Informers.Discovery().V1().EndpointSlices().Informer(),
		"clusterroles":        rbac.ClusterRoles().Informer(),
		"clusterrolebindings": rbac.ClusterRoleBindings().Informer(),
		"roles":               rbac.Roles().Informer(),
		"rolebindings":        rbac.RoleBindings().Informer(),
	} {
		c.stores[resource] = informer.GetStore()
		changed := func(obj any, deleted bool) {
			key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj)
			if err != nil {
				return // not an object: client-go never passes one
			}
			switch name := resource + " " + key; {
			case name == "configmaps "+metav1.NamespacePublic+"/"+hostsName:
				c.tasks.mark(taskHosts)
			case name == "endpoints "+metav1.NamespaceDefault+"/"+serviceName, name == "endpointslices "+metav1.NamespaceDefault+"/"+serviceName:
				c.tasks.mark(taskEndpoints)
			case deleted && c.needed[name]:
				c.tasks.mark(taskObjects)
			}
		}
		errs = append(errs, c.listen(informer, cache.ResourceEventHandlerFuncs{
			UpdateFunc: func(_, obj any) { changed(obj, false) },
			DeleteFunc: func(obj any) { changed(obj, true) },
		}))
	}
	return errors.Join(errs...)
}

// listen adds a handler to an informer for as long as Run runs.
func (c *Cluster) listen(informer cache.SharedIndexInformer, handler cache.ResourceEventHandler) error {
	registration, err := informer.AddEventHandler(handler)
	if err != nil {
		return fmt.Errorf("listen to changes: %w", err)
	}
	c.synced = append(c.synced, registration.HasSyncedChecker())
	c.unlisten = append(c.unlisten, func() error { return informer.RemoveEventHandler(registration) })
	return nil
}

// Run brings everything about and keeps it until ctx is done; then it returns
// nil, with all of its work ended and everything left as it is. ready is called
// once, when workers can join. What fails is tried again for as long as it takes:
// a tenant can forbid writes to its own cluster, and no other reason would go
// away by giving up. Run is called once.
func (c *Cluster) Run(ctx context.Context, ready func()) error {
	defer func() {
		for _, unlisten := range c.unlisten {
			if err := unlisten(); err != nil {
				c.log.Debug("informer has no such handler", "error", err)
			}
		}
	}()
	for _, s := range c.synced {
		select {
		case <-s.Done():
		case <-ctx.Done():
			return nil
		}
	}
	began := time.Now()
	c.mu.Lock()
	c.ready = func() {
		c.log.Info("workers can join", "after", time.Since(began).Round(time.Millisecond))
		ready()
	}
	for _, name := range []string{taskObjects, taskEndpoints, taskHosts} {
		c.awaited[name] = true
		c.tasks.mark(name)
	}
	c.mu.Unlock()
	c.tasks.start(ctx)
	return nil
}

// SetHosts says which hosts serve the tenant: IP:port each, in any order. None is
// taken for not knowing: workers without a host could not learn of a new one.
func (c *Cluster) SetHosts(hosts []string) {
	c.mu.Lock()
	c.hosts = normalized(hosts)
	c.mu.Unlock()
	c.tasks.mark(taskHosts)
}

// SetAddons says which addons the cluster has. Disabling one removes what was
// applied; enabling it again applies it anew, without users' edits.
func (c *Cluster) SetAddons(coreDNS, kubeProxy Addon) {
	c.mu.Lock()
	c.coreDNS, c.kubeProxy = coreDNS, kubeProxy
	c.mu.Unlock()
	c.tasks.mark(taskObjects)
}

// run is what the tasks do.
func (c *Cluster) run(ctx context.Context, task string) error {
	work := map[string]func(context.Context) error{
		taskObjects: c.apply, taskEndpoints: c.keepEndpoints, taskHosts: c.tellHosts, taskCertificates: c.examineCertificates,
	}
	if err := work[task](ctx); err != nil {
		return err
	}
	c.stood(task)
	return nil
}

// stood calls ready after the last of the tasks that it waits for.
func (c *Cluster) stood(task string) {
	c.mu.Lock()
	last := c.awaited[task] && len(c.awaited) == 1
	delete(c.awaited, task)
	c.mu.Unlock()
	if last {
		c.ready()
	}
}

// failed reports what keeps failing; what heals by itself at once is nobody's
// business.
func (c *Cluster) failed(task string, err error, retry time.Duration) {
	level := slog.LevelDebug
	if retry >= time.Second {
		level = slog.LevelWarn
	}
	c.log.Log(context.Background(), level, "cannot bring about what workers need; trying again", "what", task, "in", retry, "error", err)
}

// tellHosts keeps the list from which workers learn of hosts.
func (c *Cluster) tellHosts(ctx context.Context) error {
	c.mu.Lock()
	hosts := c.hosts
	c.mu.Unlock()
	if len(hosts) == 0 {
		return nil
	}
	list := configMap(metav1.NamespacePublic, hostsName, map[string]string{
		hostsKey: strings.Join(hosts, "\n") + "\n", konnectivityKey: c.cfg.KonnectivityHostname,
	})
	return c.write(ctx, c.cached(list), list)
}

// normalized makes equal lists of hosts equal byte for byte.
func normalized(hosts []string) []string {
	hosts = slices.Clone(hosts)
	slices.Sort(hosts)
	return slices.Compact(hosts)
}

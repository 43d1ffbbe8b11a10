// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/sni"
	"github.com/tenantd/tenantd/storage"
	"github.com/tenantd/tenantd/tenant"
	"github.com/tenantd/tenantd/tenant/cluster"
)

const version = "v1.37.1"

// hostname is one that every machine resolves to where the tests' port is.
const hostname = "localhost"

// plane is a control plane.
type plane struct {
	t         *testing.T
	cp        *tenant.ControlPlane
	authority *pki.Authority
	port      int
	log       *slog.Logger
	admin     *kubernetes.Clientset // goes the control plane's own way
}

// startAPI starts an API server alone, for a test to make a cluster of it.
func startAPI(t *testing.T) *plane {
	t.Helper()
	return startPlane(t, func(c *tenant.Config) { c.APIOnly = true })
}

// startCluster starts all of a control plane, which makes a cluster of itself.
func startCluster(t *testing.T) *plane {
	t.Helper()
	return startPlane(t, func(c *tenant.Config) {
		c.CoreDNS.Enabled, c.KubeProxy.Enabled = true, true
		c.WorkerVIP = net.IPv4(172, 20, 9, 9)
		c.CertSANs = []string{"api.test", "192.0.2.7"}
	})
}

func startPlane(t *testing.T, change func(*tenant.Config)) *plane {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	dir, err := os.MkdirTemp("", "cluster") // short: etcd's socket is in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := tenant.PrepareProcess(nil); err != nil {
		t.Fatal(err)
	}
	store, err := storage.Open(t.Context(), storage.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	router := sni.New(sni.Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serving := make(chan error, 1)
	go func() { serving <- router.Serve(context.Background(), ln) }()
	t.Cleanup(func() {
		router.Close()
		<-serving
	})
	platform, err := tenant.NewPlatform(tenant.PlatformConfig{Storage: store})
	if err != nil {
		t.Fatal(err)
	}
	sealer, err := pki.NewSealer(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	prefix, err := store.Prefix("acme")
	if err != nil {
		t.Fatal(err)
	}
	authority, err := pki.Open(t.Context(), pki.AuthorityConfig{Tenant: "acme", Storage: pki.NewStorage(store.Client(), prefix+"pki/", sealer)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { authority.Close() })
	listener, err := router.Listen(sni.ListenConfig{Tenant: "acme", Names: []string{hostname}})
	if err != nil {
		t.Fatal(err)
	}
	port := ln.Addr().(*net.TCPAddr).Port
	config := tenant.Config{Platform: platform, Name: "acme", UID: "acme", Hostname: hostname, Port: port, Authority: authority, Listener: listener, Logger: log}
	change(&config)
	cp, err := tenant.New(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- cp.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-cp.Ready():
	case err := <-done:
		done <- err
		t.Fatalf("control plane ended before it was ready: %v", err)
	}
	admin, err := kubernetes.NewForConfig(cp.RESTConfig())
	if err != nil {
		t.Fatal(err)
	}
	return &plane{t: t, cp: cp, authority: authority, port: port, log: log, admin: admin}
}

// requests are the requests of a cluster that were not watches.
type requests struct {
	next http.RoundTripper

	mu    sync.Mutex // guards what follows
	lines []string
}

func (r *requests) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := r.next.RoundTrip(req)
	// The informers', which are the control plane's own in production.
	if req.Method != http.MethodGet || !strings.Contains(req.URL.RawQuery, "limit=") && !strings.Contains(req.URL.RawQuery, "watch=") {
		code := 0
		if resp != nil {
			code = resp.StatusCode
		}
		r.mu.Lock()
		r.lines = append(r.lines, fmt.Sprintf("%s %s %d", req.Method, req.URL.Path, code))
		r.mu.Unlock()
	}
	return resp, err
}

func (r *requests) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.lines...)
}

// running is a cluster on a plane.
type running struct {
	*cluster.Cluster
	requests *requests
	took     time.Duration
	stop     func()
}

func (p *plane) config() cluster.Config {
	return cluster.Config{
		Hostname: hostname, Port: p.port, CA: p.authority.CA(), Version: version, Hosts: []string{"192.0.2.2:443", "192.0.2.1:443"},
		CoreDNS: cluster.Addon{Enabled: true}, KubeProxy: cluster.Addon{Enabled: true}, Logger: p.log,
	}
}

// start starts a cluster and waits until workers can join.
func (p *plane) start(cfg cluster.Config) *running {
	p.t.Helper()
	rc := rest.CopyConfig(p.cp.RESTConfig())
	r := &running{requests: &requests{next: rc.Transport}}
	rc.Transport = r.requests
	var err error
	if cfg.Client, err = kubernetes.NewForConfig(rc); err != nil {
		p.t.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(cfg.Client, 0)
	cfg.Informers = factory
	if r.Cluster, err = cluster.New(cfg); err != nil {
		p.t.Fatal(err)
	}
	watches, stopWatches := context.WithCancel(context.Background())
	factory.Start(watches.Done())
	factory.WaitForCacheSync(watches.Done()) // in production the API server is ready only then
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	began := time.Now()
	go func() { done <- r.Run(ctx, func() { close(ready) }) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			p.t.Error(err)
		}
		stopWatches()
		factory.Shutdown()
	})
	p.t.Cleanup(r.stop)
	<-ready
	r.took = time.Since(began)
	return r
}

// eventually waits until check returns nil; the test ends with what it
// returned last if it never does.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	var err error
	for range 600 {
		if err = check(); err == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatal(err)
}

// as is a client of the public port: a user with a client certificate, a
// bearer's if token is set, or anonymous.
func (p *plane) as(user, group, token string) *kubernetes.Clientset {
	p.t.Helper()
	cfg := &rest.Config{
		Host:            fmt.Sprintf("https://%s:%d", hostname, p.port),
		TLSClientConfig: rest.TLSClientConfig{CAData: p.authority.CA()}, BearerToken: token,
	}
	if user != "" {
		cert, key, _, err := p.authority.IssueClient(p.t.Context(), user, []string{group}, time.Hour)
		if err != nil {
			p.t.Fatal(err)
		}
		cfg.CertData, cfg.KeyData = cert, key
	}
	transport, err := rest.HTTPClientFor(cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(transport.CloseIdleConnections)
	client, err := kubernetes.NewForConfigAndClient(cfg, transport)
	if err != nil {
		p.t.Fatal(err)
	}
	return client
}

// token makes a bootstrap token as tenantctl join-command does, and waits until the API
// server, which watches for them, knows it.
func (p *plane) token() string {
	p.t.Helper()
	id, secret := pki.BootstrapToken()
	_, err := p.admin.CoreV1().Secrets("kube-system").Create(p.t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id}, Type: "bootstrap.kubernetes.io/token",
		StringData: map[string]string{
			"token-id": id, "token-secret": secret, "usage-bootstrap-authentication": "true", "usage-bootstrap-signing": "true",
			"auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token",
		},
	}, metav1.CreateOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	token := id + "." + secret
	client := p.as("", "", token)
	for range 500 {
		_, err = client.AuthenticationV1().SelfSubjectReviews().Create(p.t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if !apierrors.IsUnauthorized(err) {
			return token
		}
		time.Sleep(10 * time.Millisecond)
	}
	p.t.Fatal("the API server does not come to know a bootstrap token: ", err)
	return ""
}

// A first start brings all about with one request for each object; a restart asks
// for nothing and changes nothing.
func TestWrittenOnce(t *testing.T) {
	p := startAPI(t)
	first := p.start(p.config())
	t.Logf("first start: %d requests, %s", len(first.requests.all()), first.took)
	for _, line := range first.requests.all() {
		if !strings.HasPrefix(line, "POST ") || !strings.HasSuffix(line, " 201") {
			t.Errorf("more than the creation of an object: %s", line)
		}
	}
	first.stop()

	again := p.start(p.config())
	t.Logf("restart: %s", again.took)
	if all := again.requests.all(); len(all) > 0 {
		t.Errorf("a restart asks for\n%s", strings.Join(all, "\n"))
	}
	// In another order they are the same hosts.
	again.SetHosts([]string{"192.0.2.1:443", "192.0.2.2:443", "192.0.2.1:443"})
	again.SetHosts(nil)
	again.stop()
	if all := again.requests.all(); len(all) > 0 {
		t.Errorf("the same hosts are written again:\n%s", strings.Join(all, "\n"))
	}
}

// Run ends with all of its goroutines. Those of the API server beside it come and go.
func TestStopLeavesNothing(t *testing.T) {
	p := startAPI(t)
	ours := func() string {
		var stacks bytes.Buffer
		if err := pprof.Lookup("goroutine").WriteTo(&stacks, 2); err != nil {
			t.Fatal(err)
		}
		for stack := range strings.SplitSeq(stacks.String(), "\n\n") {
			if strings.Contains(stack, "tenantd/tenant/cluster.") {
				return stack
			}
		}
		return ""
	}
	r := p.start(p.config())
	if ours() == "" {
		t.Fatal("no goroutine is found while it runs")
	}
	r.SetHosts([]string{"192.0.2.9:443"})
	r.stop()
	for range 500 {
		if ours() == "" {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("left behind:\n%s", ours())
}

// What joining needs comes back when it is deleted, while it runs and after.
func TestComesBack(t *testing.T) {
	p := startAPI(t)
	r := p.start(p.config())
	ctx := t.Context()
	core, rbac := p.admin.CoreV1(), p.admin.RbacV1()
	gone := map[string]struct {
		remove func() error
		get    func() error
	}{
		"cluster-info": {
			func() error {
				return core.ConfigMaps("kube-public").Delete(ctx, "cluster-info", metav1.DeleteOptions{})
			},
			func() error {
				_, err := core.ConfigMaps("kube-public").Get(ctx, "cluster-info", metav1.GetOptions{})
				return err
			},
		},
		"list of hosts": {
			func() error {
				return core.ConfigMaps("kube-public").Delete(ctx, "tenantd-hosts", metav1.DeleteOptions{})
			},
			func() error {
				_, err := core.ConfigMaps("kube-public").Get(ctx, "tenantd-hosts", metav1.GetOptions{})
				return err
			},
		},
		"role": {
			func() error {
				return rbac.Roles("kube-system").Delete(ctx, "kubeadm:kubelet-config", metav1.DeleteOptions{})
			},
			func() error {
				_, err := rbac.Roles("kube-system").Get(ctx, "kubeadm:kubelet-config", metav1.GetOptions{})
				return err
			},
		},
		"cluster role": {
			func() error { return rbac.ClusterRoles().Delete(ctx, "kubeadm:get-nodes", metav1.DeleteOptions{}) },
			func() error {
				_, err := rbac.ClusterRoles().Get(ctx, "kubeadm:get-nodes", metav1.GetOptions{})
				return err
			},
		},
		"endpoints": {
			func() error { return core.Endpoints("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{}) },
			func() error {
				_, err := core.Endpoints("default").Get(ctx, "kubernetes", metav1.GetOptions{})
				return err
			},
		},
		"endpoint slice": {
			func() error {
				return p.admin.DiscoveryV1().EndpointSlices("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{})
			},
			func() error {
				_, err := p.admin.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
				return err
			},
		},
	}
	for name, g := range gone {
		if err := g.remove(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, g := range gone {
		eventually(t, g.get)
	}
	r.stop()
	for name, g := range gone {
		if err := g.get(); err != nil {
			t.Errorf("%s went with the end: %v", name, err)
		}
		if err := g.remove(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	p.start(p.config())
	for name, g := range gone {
		if err := g.get(); err != nil {
			t.Errorf("%s after a restart: %v", name, err)
		}
	}
}

// The kubernetes Service leads to the address on the worker whatever others write,
// and nothing is written while it does.
func TestEndpoints(t *testing.T) {
	p := startCluster(t)
	ctx := t.Context()
	check := func() error {
		e, err := p.admin.CoreV1().Endpoints("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(e.Subsets) != 1 || len(e.Subsets[0].Addresses) != 1 || e.Subsets[0].Addresses[0].IP != "172.20.9.9" || e.Subsets[0].Addresses[0].NodeName != nil ||
			len(e.Subsets[0].Ports) != 1 || e.Subsets[0].Ports[0].Port != 6443 || e.Subsets[0].Ports[0].Name != "https" || e.Labels["endpointslice.kubernetes.io/skip-mirror"] != "true" {
			return fmt.Errorf("endpoints: %v %v", e.Labels, e.Subsets)
		}
		slices, err := p.admin.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=kubernetes"})
		if err != nil {
			return err
		}
		if len(slices.Items) != 1 {
			return fmt.Errorf("%d endpoint slices", len(slices.Items))
		}
		s := slices.Items[0]
		if len(s.Endpoints) != 1 || s.Endpoints[0].Addresses[0] != "172.20.9.9" || !*s.Endpoints[0].Conditions.Ready || s.Endpoints[0].NodeName != nil || *s.Ports[0].Port != 6443 {
			return fmt.Errorf("endpoint slice: %v %v", s.Endpoints, s.Ports)
		}
		return nil
	}
	if err := check(); err != nil {
		t.Fatal(err)
	}
	e, err := p.admin.CoreV1().Endpoints("default").Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	e.Subsets[0].Addresses[0].IP = "192.0.2.66"
	e.Labels = nil
	if _, err := p.admin.CoreV1().Endpoints("default").Update(ctx, e, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	s, err := p.admin.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	notReady := false
	s.Endpoints[0].Conditions.Ready = &notReady
	if _, err := p.admin.DiscoveryV1().EndpointSlices("default").Update(ctx, s, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, check)
}

// What users edit survives a restart, and a new content as far as it is theirs.
func TestEditsSurvive(t *testing.T) {
	p := startAPI(t)
	p.start(p.config()).stop()
	ctx := t.Context()
	core := p.admin.CoreV1()
	edit := func(namespace, name string, f func(*corev1.ConfigMap)) {
		t.Helper()
		cm, err := core.ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		f(cm)
		if _, err := core.ConfigMaps(namespace).Update(ctx, cm, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	replace := func(key, old, new string) func(*corev1.ConfigMap) {
		return func(cm *corev1.ConfigMap) {
			if !strings.Contains(cm.Data[key], old) {
				t.Fatalf("%s has no %q:\n%s", cm.Name, old, cm.Data[key])
			}
			cm.Data[key] = strings.Replace(cm.Data[key], old, new, 1)
		}
	}
	edit("kube-system", "kube-proxy", replace("config.conf", "mode: iptables", "mode: nftables"))
	edit("kube-system", "coredns", replace("Corefile", "loadbalance", "loadbalance\n    log"))
	edit("kube-system", "kubelet-config", replace("kubelet", "rotateCertificates: true", "rotateCertificates: true\nmaxPods: 42"))
	edit("kube-system", "kubeadm-config", replace("ClusterConfiguration", "registry.k8s.io", "registry.test"))
	edit("kube-public", "cluster-info", func(cm *corev1.ConfigMap) { cm.Data["jws-kubeconfig-abcdef"] = "signature" })
	binding, err := p.admin.RbacV1().RoleBindings("kube-public").Get(ctx, "kubeadm:bootstrap-signer-clusterinfo", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	binding.Subjects = nil
	if _, err := p.admin.RbacV1().RoleBindings("kube-public").Update(ctx, binding, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	// Made anew by a user with another role, which cannot be updated in place.
	if err := p.admin.RbacV1().ClusterRoleBindings().Delete(ctx, "kubeadm:cluster-admins", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err = p.admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "kubeadm:cluster-admins"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	apps := p.admin.AppsV1()
	if err := apps.Deployments("kube-system").Delete(ctx, "coredns", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}

	has := func(when, name, key, want string) {
		t.Helper()
		namespace := "kube-system"
		if name == "cluster-info" {
			namespace = "kube-public"
		}
		cm, err := core.ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(cm.Data[key], want) {
			t.Errorf("%s %s lacks %q:\n%s", when, name, want, cm.Data[key])
		}
	}
	edits := func(when string) {
		t.Helper()
		has(when, "kube-proxy", "config.conf", "mode: nftables")
		has(when, "coredns", "Corefile", "log")
		has(when, "kubelet-config", "kubelet", "maxPods: 42")
		has(when, "kubeadm-config", "ClusterConfiguration", "imageRepository: registry.test")
		has(when, "cluster-info", "jws-kubeconfig-abcdef", "signature")
	}
	p.start(p.config()).stop()
	edits("after a restart")
	if _, err := apps.Deployments("kube-system").Get(ctx, "coredns", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a deleted addon came back with a restart: %v", err)
	}
	if binding, err = p.admin.RbacV1().RoleBindings("kube-public").Get(ctx, binding.Name, metav1.GetOptions{}); err != nil || len(binding.Subjects) > 0 {
		t.Errorf("a right that was taken away came back with a restart: %v %v", binding.Subjects, err)
	}

	cfg := p.config()
	cfg.Version = "v1.37.2"
	p.start(cfg).stop()
	edits("after an upgrade")
	has("after an upgrade", "kubeadm-config", "ClusterConfiguration", "kubernetesVersion: v1.37.2")
	if binding, err = p.admin.RbacV1().RoleBindings("kube-public").Get(ctx, binding.Name, metav1.GetOptions{}); err != nil || len(binding.Subjects) > 0 {
		t.Errorf("a right that was taken away came back with an upgrade: %v %v", binding.Subjects, err)
	}
	ds, err := apps.DaemonSets("kube-system").Get(ctx, "kube-proxy", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if image := ds.Spec.Template.Spec.Containers[0].Image; image != "registry.k8s.io/kube-proxy:v1.37.2" {
		t.Errorf("after an upgrade kube-proxy is %s", image)
	}

	// Everything is written anew; what cannot be does not keep it from becoming ready.
	if err := core.ConfigMaps("kube-system").Delete(ctx, "tenantd-cluster", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	p.start(cfg).stop()
	edits("without the marker")
	if admins, err := p.admin.RbacV1().ClusterRoleBindings().Get(ctx, "kubeadm:cluster-admins", metav1.GetOptions{}); err != nil || admins.RoleRef.Name != "view" {
		t.Errorf("the user's own binding is %v: %v", admins.RoleRef, err)
	}
}

// Disabling an addon removes what was applied and nothing of users'; enabling
// applies it again.
func TestAddons(t *testing.T) {
	p := startAPI(t)
	cfg := p.config()
	cfg.KubeProxy.Image = "registry.test/proxy:1"
	r := p.start(cfg)
	ctx := t.Context()
	apps := p.admin.AppsV1()
	image := func(want string) func() error {
		return func() error {
			ds, err := apps.DaemonSets("kube-system").Get(ctx, "kube-proxy", metav1.GetOptions{})
			if err != nil {
				return err
			}
			if got := ds.Spec.Template.Spec.Containers[0].Image; got != want {
				return fmt.Errorf("image is %s, want %s", got, want)
			}
			return nil
		}
	}
	if err := image("registry.test/proxy:1")(); err != nil {
		t.Error(err)
	}
	// A user replaces our Corefile by one that is not ours.
	if err := p.admin.CoreV1().ConfigMaps("kube-system").Delete(ctx, "coredns", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.admin.CoreV1().ConfigMaps("kube-system").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "coredns"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}

	r.SetAddons(cluster.Addon{}, cluster.Addon{Enabled: true, Image: "registry.test/proxy:2"})
	eventually(t, image("registry.test/proxy:2"))
	eventually(t, func() error {
		for what, get := range map[string]func() error{
			"Deployment": func() error {
				_, err := apps.Deployments("kube-system").Get(ctx, "coredns", metav1.GetOptions{})
				return err
			},
			"Service": func() error {
				_, err := p.admin.CoreV1().Services("kube-system").Get(ctx, "kube-dns", metav1.GetOptions{})
				return err
			},
			"role": func() error {
				_, err := p.admin.RbacV1().ClusterRoles().Get(ctx, "system:coredns", metav1.GetOptions{})
				return err
			},
		} {
			if err := get(); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%s of a disabled CoreDNS: %v", what, err)
			}
		}
		return nil
	})
	// The last of many words counts.
	for range 5 {
		r.SetAddons(cluster.Addon{}, cluster.Addon{})
		time.Sleep(20 * time.Millisecond) // long enough to be acted upon most of the time
		r.SetAddons(cluster.Addon{Enabled: true}, cluster.Addon{Enabled: true})
		time.Sleep(20 * time.Millisecond)
	}
	eventually(t, image("registry.k8s.io/kube-proxy:"+version))
	eventually(t, func() error {
		_, err := apps.Deployments("kube-system").Get(ctx, "coredns", metav1.GetOptions{})
		return err
	})
	eventually(t, func() error {
		cm, err := p.admin.CoreV1().ConfigMaps("kube-system").Get(ctx, "kubeadm-config", metav1.GetOptions{})
		if err == nil && strings.Contains(cm.Data["ClusterConfiguration"], "disabled: true") {
			err = fmt.Errorf("kubeadm-config has a disabled addon:\n%s", cm.Data["ClusterConfiguration"])
		}
		return err
	})
	users, err := p.admin.CoreV1().ConfigMaps("kube-system").Get(ctx, "coredns", metav1.GetOptions{})
	if err != nil || len(users.Data) > 0 {
		t.Errorf("the user's own Corefile is %v: %v", users.Data, err)
	}
}

// Who may read what before and after a machine has joined.
func TestReaders(t *testing.T) {
	p := startAPI(t)
	p.start(p.config())
	for who, tt := range map[string]struct {
		client  *kubernetes.Clientset
		allowed map[string]bool
	}{
		"anonymous": {p.as("", "", ""), map[string]bool{"kube-public/cluster-info": true}},
		"joining": {p.as("", "", p.token()), map[string]bool{
			"kube-system/kubeadm-config": true, "kube-system/kubelet-config": true, "kube-system/kube-proxy": true,
		}},
		"node": {p.as("system:node:w1", "system:nodes", ""), map[string]bool{
			"kube-system/kubeadm-config": true, "kube-system/kubelet-config": true, "kube-public/tenantd-hosts": true,
		}},
	} {
		for _, name := range []string{"kube-public/cluster-info", "kube-public/tenantd-hosts", "kube-system/kubeadm-config", "kube-system/kubelet-config", "kube-system/kube-proxy", "kube-system/tenantd-cluster"} {
			namespace, cm, _ := strings.Cut(name, "/")
			_, err := tt.client.CoreV1().ConfigMaps(namespace).Get(t.Context(), cm, metav1.GetOptions{})
			if tt.allowed[name] && err != nil || !tt.allowed[name] && !apierrors.IsForbidden(err) {
				t.Errorf("%s reads %s: %v", who, name, err)
			}
		}
	}
	hosts, err := p.as("system:node:w1", "system:nodes", "").CoreV1().ConfigMaps("kube-public").Get(t.Context(), "tenantd-hosts", metav1.GetOptions{})
	if err != nil || hosts.Data["hosts"] != "192.0.2.1:443\n192.0.2.2:443\n" {
		t.Errorf("hosts are %q: %v", hosts.Data, err)
	}
}

// The stock kubeadm, as far as it goes on a machine without a kubelet.
func TestStockKubeadm(t *testing.T) {
	p := startCluster(t)
	kubeadm := buildKubeadm(t)
	cert, key, _, err := p.authority.IssueClient(t.Context(), "admin", []string{"system:masters"}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig, err := pki.Kubeconfig(pki.KubeconfigParams{
		Cluster: "acme", User: "admin", Server: fmt.Sprintf("https://%s:%d", hostname, p.port), CA: p.authority.CA(), Cert: cert, Key: key,
	})
	if err != nil {
		t.Fatal(err)
	}
	admin := filepath.Join(t.TempDir(), "admin.conf")
	if err := os.WriteFile(admin, kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) string {
		t.Helper()
		var stderr bytes.Buffer
		cmd := exec.CommandContext(t.Context(), kubeadm, args...)
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("kubeadm %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr.Bytes())
		}
		return string(out)
	}
	join := run("token", "create", "--kubeconfig", admin, "--print-join-command")
	fields := strings.Fields(join)
	if len(fields) != 7 || fields[2] != fmt.Sprintf("%s:%d", hostname, p.port) || fields[6] != pki.CAHash(p.authority.CA()) {
		t.Fatalf("the join command is %q", join)
	}
	if id, _, _ := strings.Cut(fields[4], "."); !strings.Contains(run("token", "list", "--kubeconfig", admin), id) {
		t.Error("kubeadm token list does not list the token")
	}
	run("config", "images", "list", "--kubeconfig", admin, "--kubernetes-version", version)

	// Reads cluster-info and verifies its signature, then with the token what the
	// cluster's configuration is.
	out := run(append(append([]string{"join", "phase", "preflight"}, fields[2:]...),
		"--ignore-preflight-errors=all", "--node-name=w1", "--cri-socket=unix:///nowhere.sock", "-v=5")...)
	if !strings.Contains(out, "kubeadm-config") {
		t.Errorf("kubeadm join did not read the cluster's configuration:\n%s", out)
	}
}

// buildKubeadm builds the stock kubeadm of the version that is linked here, with
// the stamps without which it refuses to work.
func buildKubeadm(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "kubeadm")
	var stamps []string
	for _, p := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		stamps = append(stamps, "-X", p+".gitVersion="+version, "-X", p+".gitMajor=1", "-X", p+".gitMinor=37", "-X", p+".gitTreeState=clean")
	}
	out, err := exec.CommandContext(t.Context(), "go", "build", "-ldflags", strings.Join(append([]string{"-s", "-w"}, stamps...), " "), "-o", bin, "k8s.io/kubernetes/cmd/kubeadm").CombinedOutput()
	if err != nil {
		t.Fatalf("build kubeadm: %v\n%s", err, out)
	}
	return bin
}

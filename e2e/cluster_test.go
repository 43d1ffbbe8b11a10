// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// kubernetesVersion is the release that is linked in.
const kubernetesVersion = "v1.37.1"

// TestCluster shows that a tenant is a cluster like any other: with upstream's
// kubectl and client-go, against one host with two tenants.
func TestCluster(t *testing.T) {
	h := startHost(t)
	one := h.cluster("one", "--service-cidr", "10.11.0.0/16", "--pod-cidr", "10.12.0.0/16")
	two := h.cluster("two")
	kubelet := startKubelet(t, h, one, "worker-1")
	for _, test := range []struct {
		name string
		run  func(*testing.T, *cluster)
	}{
		{"Version", testVersion},
		{"Node", testNode},
		{"Namespaces", testNamespaces},
		{"Deployments", testDeployments},
		{"GarbageCollection", testGarbageCollection},
		{"Jobs", testJobs},
		{"Services", testServices},
		{"Volumes", testVolumes},
		{"Limits", testLimits},
		{"RBAC", testRBAC},
		{"ServiceAccounts", testServiceAccounts},
		{"CertificateRequests", testCertificateRequests},
		{"CustomResources", testCustomResources},
		{"AdmissionPolicies", testAdmissionPolicies},
		{"Patches", testPatches},
		{"ServerSideApply", testServerSideApply},
		{"ApplyDiffAndPrune", testApplyDiffAndPrune},
		{"Watches", testWatches},
		{"Wait", testWait},
		{"Documents", testDocuments},
		{"EventsAndLeases", testEventsAndLeases},
		{"ProcessIsNotServed", testProcessIsNotServed},
		{"ComponentStatuses", testComponentStatuses},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, one.within(t)) })
	}
	t.Run("Scheduling", func(t *testing.T) { testScheduling(t, h.of(t), one.within(t)) })
	t.Run("NothingIsDialled", func(t *testing.T) { testNothingIsDialled(t, one.within(t), kubelet) })
	t.Run("Isolation", func(t *testing.T) { testIsolation(t, h.of(t), one.within(t), two.within(t)) })
	t.Run("NoPanics", func(t *testing.T) {
		for line := range strings.Lines(h.log.String()) {
			if strings.Contains(line, "panic") {
				t.Errorf("the host's log has: %s", line)
			}
		}
	})
}

// cluster is a tenant with its administrator's credentials.
type cluster struct {
	kubernetes.Interface
	t          testing.TB
	host       *host
	name       string
	kubeconfig string
}

// cluster adds a tenant.
func (h *host) cluster(name string, args ...string) *cluster {
	h.t.Helper()
	kubeconfig := h.add(name, args...)
	return &cluster{Interface: client(h.t, kubeconfig), t: h.t, host: h, name: name, kubeconfig: kubeconfig}
}

// within is the cluster, for use in a subtest.
func (c *cluster) within(t testing.TB) *cluster {
	n := *c
	n.t = t
	n.host = c.host.of(t)
	return &n
}

// as is the cluster with the credentials of a user.
func (c *cluster) as(user string, groups ...string) *cluster {
	c.t.Helper()
	args := []string{"--user", user}
	for _, g := range groups {
		args = append(args, "--group", g)
	}
	n := *c
	n.kubeconfig = c.host.kubeconfig(c.name, args...)
	n.Interface = client(c.t, n.kubeconfig)
	return &n
}

// kubectl runs kubectl, which must succeed, and returns what it printed.
func (c *cluster) kubectl(args ...string) string {
	c.t.Helper()
	return mustKubectl(c.t, c.kubeconfig, "", args...)
}

// feed is kubectl with standard input.
func (c *cluster) feed(stdin string, args ...string) string {
	c.t.Helper()
	return mustKubectl(c.t, c.kubeconfig, stdin, args...)
}

// refuse runs kubectl, which must fail and say each of want.
func (c *cluster) refuse(stdin string, want []string, args ...string) {
	c.t.Helper()
	r := kubectl(c.t, c.kubeconfig, stdin, args...)
	if r.code == 0 {
		c.t.Fatalf("kubectl %s succeeded:\n%s", strings.Join(args, " "), r.stdout)
	}
	for _, w := range want {
		if !strings.Contains(r.stderr, w) {
			c.t.Errorf("kubectl %s failed with\n%swhich does not say %q", strings.Join(args, " "), r.stderr, w)
		}
	}
}

// namespace makes a namespace in which pods can be created.
func (c *cluster) namespace() string {
	c.t.Helper()
	ns, err := c.CoreV1().Namespaces().Create(c.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}}, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	eventually(c.t, "namespace "+ns.Name+" has a service account", func() error {
		_, err := c.CoreV1().ServiceAccounts(ns.Name).Get(c.t.Context(), "default", metav1.GetOptions{})
		return err
	})
	return ns.Name
}

// manifest reads a file of testdata, with replacements.
func manifest(t testing.TB, name string, replace ...string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.NewReplacer(replace...).Replace(string(raw))
}

// pod is a pod of one container that nobody will run.
func pod(name string, labels map[string]string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "registry.k8s.io/pause:3.10"}}},
	}
}

// bearer is a client that has nothing but a token.
func (c *cluster) bearer(token string) kubernetes.Interface {
	c.t.Helper()
	cfg := rest.AnonymousClientConfig(restConfig(c.t, c.kubeconfig))
	cfg.BearerToken = token
	return clientFor(c.t, cfg)
}

// clientFor makes a client.
func clientFor(t testing.TB, cfg *rest.Config) kubernetes.Interface {
	t.Helper()
	c, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// whoami asks the API server whom it takes a client for.
func whoami(t testing.TB, c kubernetes.Interface) *authenticationv1.SelfSubjectReview {
	t.Helper()
	review, err := c.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return review
}

// pretend adds headers to all requests.
func pretend(cfg *rest.Config, headers map[string]string) {
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			r = r.Clone(r.Context())
			for name, value := range headers {
				r.Header.Set(name, value)
			}
			return next.RoundTrip(r)
		})
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// newCertificateRequest makes a key and a request for a certificate, both PEM.
func newCertificateRequest(t testing.TB, user, group string) (request, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: user, Organization: []string{group}}}
	request, err = x509.CreateCertificateRequest(rand.Reader, template, private)
	if err != nil {
		t.Fatal(err)
	}
	key, err = x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})
}

// eviction asks for the eviction of a pod.
func eviction(namespace, name string) *policyv1.Eviction {
	return &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
}

// contains fails the test if text lacks one of want.
func contains(t testing.TB, what, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%s lacks %q:\n%s", what, w, text)
		}
	}
}

// kubelet is what the rest of a cluster sees of a worker: a node that is ready,
// whose pods run, end and go as they are told to. It has a kubelet's rights.
type kubelet struct {
	*trap
	kubernetes.Interface
	name string
}

// startKubelet has a worker join and stay until the test ends.
func startKubelet(t *testing.T, h *host, c *cluster, name string) *kubelet {
	t.Helper()
	k := &kubelet{trap: newTrap(t), name: name}
	k.Interface = client(t, h.kubeconfig(c.name, "--user", "system:node:"+name, "--group", "system:nodes"))
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	if err := k.register(ctx); err != nil {
		t.Fatalf("register node %s: %v", name, err)
	}
	running.Go(func() { k.renewLease(ctx) })
	running.Go(func() { k.runPods(ctx) })
	return k
}

// register creates the node. Its address is the host's, with a port on which
// nobody of this cluster must ever be seen.
func (k *kubelet) register(ctx context.Context) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: k.name, Labels: map[string]string{corev1.LabelHostname: k.name}}}
	node, err := k.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	now := metav1.Now()
	room := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"), corev1.ResourcePods: resource.MustParse("110"),
	}
	node.Status = corev1.NodeStatus{
		Capacity: room, Allocatable: room,
		Addresses:       []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}},
		DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: int32(k.port())}},
		Conditions: []corev1.NodeCondition{{
			Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", LastHeartbeatTime: now, LastTransitionTime: now,
		}},
	}
	// The rest of the object may have changed since.
	patch, err := json.Marshal(map[string]any{"status": node.Status})
	if err != nil {
		return err
	}
	_, err = k.CoreV1().Nodes().PatchStatus(ctx, k.name, patch)
	return err
}

// renewLease is the heartbeat, without which the node would be taken for dead.
func (k *kubelet) renewLease(ctx context.Context) {
	leases := k.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	for ctx.Err() == nil {
		now, seconds := metav1.NowMicro(), int32(40)
		lease := &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: k.name},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &k.name, LeaseDurationSeconds: &seconds, RenewTime: &now},
		}
		if _, err := leases.Create(ctx, lease, metav1.CreateOptions{}); apierrors.IsAlreadyExists(err) {
			if old, err := leases.Get(ctx, k.name, metav1.GetOptions{}); err == nil {
				old.Spec.RenewTime = &now
				leases.Update(ctx, old, metav1.UpdateOptions{}) // again in a moment if not now
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(5 * time.Second):
		}
	}
}

// runPods does with this node's pods what a kubelet would.
func (k *kubelet) runPods(ctx context.Context) {
	for ctx.Err() == nil {
		w, err := k.CoreV1().Pods("").Watch(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + k.name})
		if err != nil {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			continue
		}
		for event := range w.ResultChan() {
			if pod, ok := event.Object.(*corev1.Pod); ok && event.Type != watch.Deleted {
				k.sync(ctx, pod)
			}
		}
	}
}

// sync does the next step of a pod's life. If it fails, an update has made it
// pointless and an event follows.
func (k *kubelet) sync(ctx context.Context, p *corev1.Pod) {
	pods := k.CoreV1().Pods(p.Namespace)
	switch {
	case p.DeletionTimestamp != nil:
		pods.Delete(ctx, p.Name, *metav1.NewDeleteOptions(0))
	case p.Status.Phase == corev1.PodPending:
		now := metav1.Now()
		p.Status.StartTime = &now
		p.Status.Phase = corev1.PodRunning
		p.Status.PodIP = "10.12.200.1"
		p.Status.PodIPs = []corev1.PodIP{{IP: p.Status.PodIP}}
		for _, c := range []corev1.PodConditionType{corev1.PodReady, corev1.ContainersReady, corev1.PodInitialized} {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: c, Status: corev1.ConditionTrue, LastTransitionTime: now})
		}
		if p.Spec.RestartPolicy != corev1.RestartPolicyAlways {
			p.Status.Phase = corev1.PodSucceeded
		}
		pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
	}
}

// trap is a listener on the host that no tenant has any business with.
type trap struct {
	ln     net.Listener
	caught atomic.Pointer[string]
}

// newTrap sets a trap on a free port.
func newTrap(t testing.TB) *trap {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return setTrap(t, ln)
}

func setTrap(t testing.TB, ln net.Listener) *trap {
	tr := &trap{ln: ln}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }))
	server.Listener.Close()
	server.Listener = ln
	server.Config.ConnState = func(c net.Conn, _ http.ConnState) {
		from := c.RemoteAddr().String()
		tr.caught.CompareAndSwap(nil, &from)
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	return tr
}

func (tr *trap) port() int { return tr.ln.Addr().(*net.TCPAddr).Port }

// check fails the test if anyone was caught.
func (tr *trap) check(t testing.TB) {
	t.Helper()
	if from := tr.caught.Load(); from != nil {
		t.Errorf("somebody (%s) dialled %s on the host for the tenant", *from, tr.ln.Addr())
	}
}

func testVersion(t *testing.T, c *cluster) {
	var v struct {
		ClientVersion, ServerVersion struct{ GitVersion, Major, Minor string }
	}
	if err := json.Unmarshal([]byte(c.kubectl("version", "-o", "json")), &v); err != nil {
		t.Fatal(err)
	}
	if v.ServerVersion.GitVersion != kubernetesVersion || v.ServerVersion != v.ClientVersion {
		t.Errorf("server is %+v, client %+v; both should be %s", v.ServerVersion, v.ClientVersion, kubernetesVersion)
	}
}

// testNode shows what controllers do for a node that registers.
func testNode(t *testing.T, c *cluster) {
	c.kubectl("wait", "--for=condition=Ready", "node/worker-1", "--timeout", patience.String())
	eventually(t, "the node is in use", func() error {
		node, err := c.CoreV1().Nodes().Get(t.Context(), "worker-1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(node.Spec.Taints) > 0 {
			return fmt.Errorf("it has the taints %v", node.Spec.Taints)
		}
		cidr, err := netip.ParsePrefix(node.Spec.PodCIDR)
		if err != nil {
			return err
		}
		if pods := netip.MustParsePrefix("10.12.0.0/16"); !pods.Contains(cidr.Addr()) || cidr.Bits() != 24 {
			return fmt.Errorf("its pod CIDR is %s, not a /24 of %s", cidr, pods)
		}
		return nil
	})
	// The Node authorizer: a node sees itself and nothing that is not its own.
	ns := c.namespace()
	c.kubectl("-n", ns, "create", "secret", "generic", "sealed")
	node := c.as("system:node:worker-1", "system:nodes")
	node.kubectl("get", "node", "worker-1")
	node.refuse("", []string{"Forbidden", "no relationship found"}, "-n", ns, "get", "secret", "sealed")
	node.refuse("", []string{"Forbidden"}, "label", "node", "worker-1", "node-restriction.kubernetes.io/x=y")
}

func testNamespaces(t *testing.T, c *cluster) {
	c.kubectl("create", "namespace", "passing")
	c.kubectl("-n", "passing", "create", "configmap", "a")
	c.kubectl("-n", "passing", "create", "-f", filepath.Join("testdata", "workloads.yaml"))
	c.kubectl("-n", "passing", "rollout", "status", "statefulset/db", "--timeout", patience.String())
	c.kubectl("delete", "namespace", "passing", "--wait", "--timeout", patience.String())
	c.refuse("", []string{"NotFound"}, "get", "namespace", "passing")
	// A namespace of the same name begins empty.
	c.kubectl("create", "namespace", "passing")
	if out := c.kubectl("-n", "passing", "get", "pods,statefulsets", "-o", "name"); out != "" {
		t.Errorf("the new namespace has %s", out)
	}
}

func testDeployments(t *testing.T, c *cluster) {
	ns := c.namespace()
	on := func(args ...string) string { t.Helper(); return c.kubectl(append([]string{"-n", ns}, args...)...) }
	status := func() { t.Helper(); on("rollout", "status", "deployment/web", "--timeout", patience.String()) }
	images := func() string {
		t.Helper()
		return on("get", "pods", "-l", "app=web", "--field-selector", "status.phase=Running", "-o", `jsonpath={range .items[*]}{.spec.containers[0].image} {.spec.nodeName}{"\n"}{end}`)
	}
	on("create", "deployment", "web", "--image", "registry.k8s.io/pause:3.9", "--replicas", "2")
	status()
	if got, want := images(), strings.Repeat("registry.k8s.io/pause:3.9 worker-1\n", 2); got != want {
		t.Errorf("the pods are\n%sand should be\n%s", got, want)
	}
	on("set", "image", "deployment/web", "pause=registry.k8s.io/pause:3.10")
	status()
	eventually(t, "only pods of the new revision are left", func() error {
		if got, want := images(), strings.Repeat("registry.k8s.io/pause:3.10 worker-1\n", 2); got != want {
			return fmt.Errorf("the pods are\n%s", got)
		}
		return nil
	})
	if got := on("get", "replicasets", "-o", `jsonpath={range .items[*]}{.metadata.annotations.deployment\.kubernetes\.io/revision}={.spec.replicas} {end}`); got != "1=0 2=2 " && got != "2=2 1=0 " {
		t.Errorf("the revisions and their replicas are %q", got)
	}
	contains(t, "rollout history", on("rollout", "history", "deployment/web"), "1 ", "2 ")
	on("rollout", "undo", "deployment/web")
	status()
	on("scale", "deployment/web", "--replicas", "3")
	on("wait", "--for=jsonpath={.status.availableReplicas}=3", "deployment/web", "--timeout", patience.String())
	on("rollout", "restart", "deployment/web")
	status()
	on("delete", "deployment", "web", "--wait")
	on("wait", "--for=delete", "pods", "-l", "app=web", "--timeout", patience.String())

	// Others that make pods.
	on("create", "-f", filepath.Join("testdata", "workloads.yaml"))
	on("rollout", "status", "statefulset/db", "--timeout", patience.String())
	on("rollout", "status", "daemonset/agent", "--timeout", patience.String())
	if got := on("get", "pods", "-l", "app=db", "-o", "name", "--sort-by", ".metadata.name"); got != "pod/db-0\npod/db-1\n" {
		t.Errorf("the StatefulSet's pods are\n%s", got)
	}
}

// testScheduling shows that a scheduler decides, not chance.
func testScheduling(t *testing.T, h *host, c *cluster) {
	ns := c.namespace()
	create := func(p *corev1.Pod) {
		t.Helper()
		if _, err := c.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	place := func(name string) string {
		t.Helper()
		c.kubectl("-n", ns, "wait", "--for=condition=PodScheduled", "pod/"+name, "--timeout", patience.String())
		return c.kubectl("-n", ns, "get", "pod", name, "-o", "jsonpath={.spec.nodeName}")
	}
	create(pod("first", nil))
	if node := place("first"); node != "worker-1" {
		t.Errorf("the pod is on %q", node)
	}
	large := pod("large", nil)
	large.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64")}
	create(large)
	c.kubectl("cordon", "worker-1")
	create(pod("second", nil))
	for name, reason := range map[string]string{"large": "Insufficient cpu", "second": "were unschedulable"} {
		c.kubectl("-n", ns, "wait", `--for=jsonpath={.status.conditions[?(@.type=="PodScheduled")].reason}=Unschedulable`, "pod/"+name, "--timeout", patience.String())
		eventually(t, "an event tells of pod "+name, func() error {
			events := c.kubectl("-n", ns, "get", "events", "--field-selector", "reason=FailedScheduling,involvedObject.name="+name, "-o", "jsonpath={.items[*].message}")
			if !strings.Contains(events, reason) {
				return fmt.Errorf("events: %q", events)
			}
			return nil
		})
	}
	startKubelet(t, h, c, "worker-2")
	if node := place("second"); node != "worker-2" {
		t.Errorf("the pod is on %q although only worker-2 takes pods", node)
	}
	third := pod("third", nil)
	third.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "worker-1"}
	create(third)
	c.kubectl("uncordon", "worker-1")
	if node := place("third"); node != "worker-1" {
		t.Errorf("the pod is on %q against its selector", node)
	}
	if node := c.kubectl("-n", ns, "get", "pod", "large", "-o", "jsonpath={.spec.nodeName}"); node != "" {
		t.Errorf("a pod larger than any node is on %q", node)
	}
	// Draining works by eviction; a disruption budget holds it up.
	c.kubectl("-n", ns, "create", "poddisruptionbudget", "keep", "--selector", "keep=yes", "--min-available", "1")
	create(pod("kept", map[string]string{"keep": "yes"}))
	place("kept")
	c.kubectl("-n", ns, "wait", "--for=condition=Ready", "pod/kept", "--timeout", patience.String())
	c.kubectl("-n", ns, "wait", "--for=jsonpath={.status.currentHealthy}=1", "poddisruptionbudget/keep", "--timeout", patience.String())
	err := c.PolicyV1().Evictions(ns).Evict(t.Context(), eviction(ns, "kept"))
	if !apierrors.IsTooManyRequests(err) {
		t.Errorf("the eviction of a pod under a disruption budget ends with: %v", err)
	}
	c.kubectl("-n", ns, "delete", "poddisruptionbudget", "keep")
	if err := c.PolicyV1().Evictions(ns).Evict(t.Context(), eviction(ns, "kept")); err != nil {
		t.Errorf("evict: %v", err)
	}
}

func testGarbageCollection(t *testing.T, c *cluster) {
	ns := c.namespace()
	maps := c.CoreV1().ConfigMaps(ns)
	family := func(name string) {
		t.Helper()
		owner, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		block := true
		_, err = maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name + "-child", OwnerReferences: []metav1.OwnerReference{{
			APIVersion: "v1", Kind: "ConfigMap", Name: name, UID: owner.UID, BlockOwnerDeletion: &block,
		}}}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	gone := func(name string) {
		t.Helper()
		c.kubectl("-n", ns, "wait", "--for=delete", "configmap/"+name, "--timeout", patience.String())
	}
	family("background")
	c.kubectl("-n", ns, "delete", "configmap", "background", "--cascade=background")
	gone("background-child")

	family("foreground")
	child, err := maps.Get(t.Context(), "foreground-child", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	child.Finalizers = []string{"e2e.example.com/hold"}
	if _, err := maps.Update(t.Context(), child, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.kubectl("-n", ns, "delete", "configmap", "foreground", "--cascade=foreground", "--wait=false")
	c.kubectl("-n", ns, "wait", "--for=jsonpath={.metadata.deletionTimestamp}", "configmap/foreground-child", "--timeout", patience.String())
	if _, err := maps.Get(t.Context(), "foreground", metav1.GetOptions{}); err != nil {
		t.Errorf("the owner went before what it owns: %v", err)
	}
	if _, err := maps.Patch(t.Context(), "foreground-child", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	gone("foreground-child")
	gone("foreground")

	family("orphan")
	c.kubectl("-n", ns, "delete", "configmap", "orphan", "--cascade=orphan")
	gone("orphan")
	// Once nobody owns it any more, the collector has no reason to take it.
	orphan, err := maps.Get(t.Context(), "orphan-child", metav1.GetOptions{})
	if err != nil || len(orphan.OwnerReferences) > 0 {
		t.Errorf("the orphan: %v, %+v", err, orphan.OwnerReferences)
	}
}

func testJobs(t *testing.T, c *cluster) {
	ns := c.namespace()
	c.kubectl("-n", ns, "create", "job", "once", "--image", "registry.k8s.io/pause:3.10")
	c.kubectl("-n", ns, "wait", "--for=condition=Complete", "job/once", "--timeout", patience.String())

	// An hour was missed, so a job is due at once.
	c.kubectl("-n", ns, "create", "cronjob", "hourly", "--image", "registry.k8s.io/pause:3.10", "--schedule", "0 * * * *")
	last := time.Now().Add(-90 * time.Minute).UTC().Format(time.RFC3339)
	c.kubectl("-n", ns, "patch", "cronjob", "hourly", "--subresource", "status", "--type", "merge", "-p", `{"status":{"lastScheduleTime":"`+last+`"}}`)
	eventually(t, "the CronJob has made a job", func() error {
		jobs, err := c.BatchV1().Jobs(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, j := range jobs.Items {
			if o := metav1.GetControllerOf(&j); o != nil && o.Kind == "CronJob" && o.Name == "hourly" && j.Status.Succeeded == 1 {
				return nil
			}
		}
		return fmt.Errorf("there are %d jobs", len(jobs.Items))
	})
}

func testServices(t *testing.T, c *cluster) {
	cidr := netip.MustParsePrefix("10.11.0.0/16")
	if ip := c.kubectl("get", "service", "kubernetes", "-o", "jsonpath={.spec.clusterIP}"); ip != "10.11.0.1" {
		t.Errorf("the service kubernetes is at %s, not at the first address of %s", ip, cidr)
	}
	c.kubectl("wait", "--for=condition=Ready", "servicecidr/kubernetes", "--timeout", patience.String())
	if got := c.kubectl("get", "servicecidr", "kubernetes", "-o", "jsonpath={.spec.cidrs[*]} {.metadata.finalizers[*]}"); got != cidr.String()+" networking.k8s.io/service-cidr-finalizer" {
		t.Errorf("the controller made of the service CIDR: %s", got)
	}
	ns := c.namespace()
	c.kubectl("-n", ns, "create", "deployment", "web", "--image", "registry.k8s.io/pause:3.10", "--port", "8080")
	c.kubectl("-n", ns, "expose", "deployment", "web", "--port", "80", "--target-port", "8080")
	ip, err := netip.ParseAddr(c.kubectl("-n", ns, "get", "service", "web", "-o", "jsonpath={.spec.clusterIP}"))
	if err != nil || !cidr.Contains(ip) {
		t.Errorf("the service is at %s (%v), outside %s", ip, err, cidr)
	}
	eventually(t, "the service has an endpoint", func() error {
		const format = "jsonpath={.items[*].endpoints[*].addresses[*]}:{.items[*].ports[*].port} {.items[*].endpoints[*].nodeName}"
		if got := c.kubectl("-n", ns, "get", "endpointslices", "-l", "kubernetes.io/service-name=web", "-o", format); got != "10.12.200.1:8080 worker-1" {
			return fmt.Errorf("the EndpointSlice has %q", got)
		}
		return nil
	})
	// An address is given once, and back.
	c.refuse("", []string{"already allocated"}, "-n", ns, "create", "service", "clusterip", "twin", "--tcp", "80", "--clusterip", ip.String())
	c.refuse("", []string{"does not match the current range"}, "-n", ns, "create", "service", "clusterip", "stray", "--tcp", "80", "--clusterip", "10.96.0.9")
	c.kubectl("-n", ns, "delete", "service", "web")
	c.kubectl("-n", ns, "create", "service", "clusterip", "heir", "--tcp", "80", "--clusterip", ip.String())
	c.kubectl("-n", ns, "create", "service", "nodeport", "outside", "--tcp", "80", "--node-port", "30080")
}

// testVolumes binds a claim to a static volume. The volume's directory exists
// on the host, and upstream's controllers would delete it with the claim.
func testVolumes(t *testing.T, c *cluster) {
	ns := c.namespace()
	dir, err := os.MkdirTemp("/tmp", "e2e-volume") // the only place where upstream deletes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c.feed(manifest(t, "volume.yaml", "DIRECTORY", dir, "NAMESPACE", ns), "create", "-f", "-")
	c.kubectl("-n", ns, "wait", "--for=jsonpath={.status.phase}=Bound", "pvc/data", "pv/disk", "--timeout", patience.String())
	if got := c.kubectl("get", "pv", "disk", "-o", "jsonpath={.spec.claimRef.namespace}/{.spec.claimRef.name}"); got != ns+"/data" {
		t.Errorf("the volume is bound to %s", got)
	}
	c.kubectl("-n", ns, "delete", "pvc", "data")
	eventually(t, "the volume is no longer in use", func() error {
		volume, err := c.CoreV1().PersistentVolumes().Get(t.Context(), "disk", metav1.GetOptions{})
		if err == nil && volume.Status.Phase != corev1.VolumeFailed {
			return fmt.Errorf("it is %s", volume.Status.Phase)
		}
		return nil
	})
	if _, err := os.Stat(dir); err != nil {
		t.Errorf("a directory of the host was deleted for a tenant: %v", err)
	}
}

func testLimits(t *testing.T, c *cluster) {
	ns := c.namespace()
	c.feed(manifest(t, "limits.yaml"), "-n", ns, "create", "-f", "-")
	c.kubectl("-n", ns, "wait", "--for=jsonpath={.status.hard.pods}=1", "resourcequota/few", "--timeout", patience.String())
	pods := c.CoreV1().Pods(ns)
	first, err := pods.Create(t.Context(), pod("first", nil), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if r := first.Spec.Containers[0].Resources; r.Requests.Cpu().String() != "100m" || r.Limits.Cpu().String() != "200m" {
		t.Errorf("the limit range gave the pod %+v", r)
	}
	greedy := pod("greedy", nil)
	greedy.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2")}
	if _, err := pods.Create(t.Context(), greedy, metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "maximum cpu usage per Container is 1") {
		t.Errorf("a pod over the limit range: %v", err)
	}
	if _, err := pods.Create(t.Context(), pod("second", nil), metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: few") {
		t.Errorf("a pod over the quota: %v", err)
	}
	c.kubectl("-n", ns, "create", "secret", "generic", "one")
	c.refuse("", []string{"exceeded quota: few"}, "-n", ns, "create", "secret", "generic", "two")
	c.kubectl("-n", ns, "delete", "secret", "one")
	eventually(t, "the quota notices what was deleted", func() error {
		if r := kubectl(t, c.kubeconfig, "", "-n", ns, "create", "secret", "generic", "two"); r.code != 0 {
			return errors.New(r.stderr)
		}
		return nil
	})
}

func testRBAC(t *testing.T, c *cluster) {
	ns := c.namespace()
	jane := c.as("jane", "devs", "testers")
	const whoami = "jsonpath={.status.userInfo.username} {.status.userInfo.groups[*]}"
	if got := jane.kubectl("auth", "whoami", "-o", whoami); got != "jane devs testers system:authenticated" {
		t.Errorf("jane is %q", got)
	}
	may := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(kubectl(t, jane.kubeconfig, "", append([]string{"-n", ns, "auth", "can-i"}, args...)...).stdout)
	}
	if got := may("create", "pods"); got != "no" {
		t.Errorf("jane may create pods before she was given a role: %s", got)
	}
	jane.refuse("", []string{`pods is forbidden: User "jane" cannot list resource "pods"`}, "-n", ns, "get", "pods")
	c.kubectl("-n", ns, "create", "rolebinding", "devs", "--clusterrole", "edit", "--group", "devs")
	eventually(t, "the role binding works", func() error {
		if got := may("create", "deployments.apps"); got != "yes" {
			return fmt.Errorf("can-i says %q", got)
		}
		return nil
	})
	jane.kubectl("-n", ns, "create", "configmap", "mine")
	if got := may("create", "rolebindings.rbac.authorization.k8s.io"); got != "no" {
		t.Errorf("the role edit lets jane bind roles: %s", got)
	}
	jane.refuse("", []string{"forbidden"}, "-n", "default", "get", "configmaps")
	jane.refuse("", []string{"cannot list resource"}, "get", "secrets", "-A")
	// Nobody gives away more than they have.
	c.kubectl("-n", ns, "create", "role", "binder", "--verb", "create,get", "--resource", "roles.rbac.authorization.k8s.io")
	c.kubectl("-n", ns, "create", "rolebinding", "binder", "--role", "binder", "--user", "jane")
	eventually(t, "jane may write roles", func() error {
		if got := may("create", "roles.rbac.authorization.k8s.io"); got != "yes" {
			return fmt.Errorf("can-i says %q", got)
		}
		return nil
	})
	jane.refuse("", []string{"attempting to grant RBAC permissions not currently held"}, "-n", ns, "create", "role", "more", "--verb", "escalate", "--resource", "roles")
	// Impersonation is a right too.
	c.kubectl("-n", ns, "--as", "john", "--as-group", "devs", "get", "configmap", "mine")
	jane.refuse("", []string{"cannot impersonate"}, "--as", "kubernetes-admin", "get", "nodes")
}

func testServiceAccounts(t *testing.T, c *cluster) {
	ns := c.namespace()
	c.kubectl("-n", ns, "create", "serviceaccount", "robot")
	c.kubectl("-n", ns, "create", "rolebinding", "robot", "--clusterrole", "view", "--serviceaccount", ns+":robot")
	token := strings.TrimSpace(c.kubectl("-n", ns, "create", "token", "robot"))
	robot := c.bearer(token)
	if got := whoami(t, robot); got.Status.UserInfo.Username != "system:serviceaccount:"+ns+":robot" || !slices.Contains(got.Status.UserInfo.Groups, "system:serviceaccounts:"+ns) {
		t.Errorf("the token's user is %+v", got.Status.UserInfo)
	}
	eventually(t, "the service account has its role", func() error {
		_, err := robot.CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{})
		return err
	})
	if _, err := robot.CoreV1().Secrets(ns).List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("the role view lets a service account read secrets: %v", err)
	}
	// Tokens can be checked by others, by what the issuer publishes.
	var issuer struct {
		Issuer  string
		JWKSURI string `json:"jwks_uri"`
	}
	if err := json.Unmarshal([]byte(c.kubectl("get", "--raw", "/.well-known/openid-configuration")), &issuer); err != nil {
		t.Fatal(err)
	}
	if keys := fmt.Sprintf("https://%s.%s:%d/openid/v1/jwks", c.name, domain, c.host.portNumber()); issuer.Issuer != "https://kubernetes.default.svc.cluster.local" || issuer.JWKSURI != keys {
		t.Errorf("the issuer is %+v, its keys should be at %s", issuer, keys)
	}
	contains(t, "the issuer's keys", c.kubectl("get", "--raw", "/openid/v1/jwks"), `"kty"`, `"kid"`)
	// A token for others is not for the API server.
	other := strings.TrimSpace(c.kubectl("-n", ns, "create", "token", "robot", "--audience", "vault"))
	if _, err := c.bearer(other).CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("a token for another audience: %v", err)
	}
	// A token that is kept in a secret is filled in by a controller.
	c.feed(`{"apiVersion":"v1","kind":"Secret","type":"kubernetes.io/service-account-token","metadata":{"name":"kept","annotations":{"kubernetes.io/service-account.name":"robot"}}}`,
		"-n", ns, "create", "-f", "-")
	c.kubectl("-n", ns, "wait", "--for=jsonpath={.data.token}", "secret/kept", "--timeout", patience.String())
	kept, err := c.CoreV1().Secrets(ns).Get(t.Context(), "kept", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := whoami(t, c.bearer(string(kept.Data["token"]))); got.Status.UserInfo.Username != "system:serviceaccount:"+ns+":robot" {
		t.Errorf("the kept token's user is %+v", got.Status.UserInfo)
	}
	// With the account its tokens end.
	c.kubectl("-n", ns, "delete", "serviceaccount", "robot")
	eventually(t, "the token of a deleted service account is refused", func() error {
		if _, err := robot.CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("it ends with: %v", err)
		}
		return nil
	})
}

func testCertificateRequests(t *testing.T, c *cluster) {
	request := func(name, group string) (*certificatesv1.CertificateSigningRequest, []byte) {
		der, key := newCertificateRequest(t, name, group)
		return &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				Request: der, SignerName: certificatesv1.KubeAPIServerClientSignerName, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
			},
		}, key
	}
	requests := c.CertificatesV1().CertificateSigningRequests()
	ada, key := request("ada", "engineers")
	if _, err := requests.Create(t.Context(), ada, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.kubectl("certificate", "approve", "ada")
	c.kubectl("wait", "--for=jsonpath={.status.certificate}", "csr/ada", "--timeout", patience.String())
	csr, err := requests.Get(t.Context(), "ada", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := rest.AnonymousClientConfig(restConfig(t, c.kubeconfig))
	cfg.CertData, cfg.KeyData = csr.Status.Certificate, key
	if got := whoami(t, clientFor(t, cfg)).Status.UserInfo; got.Username != "ada" || !slices.Contains(got.Groups, "engineers") {
		t.Errorf("the certificate's user is %+v", got)
	}

	// Nobody becomes an administrator so.
	eve, _ := request("eve", "system:masters")
	if _, err := requests.Create(t.Context(), eve, metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "system:masters") {
		t.Errorf("a request for an administrator's certificate: %v", err)
	}
}

func testCustomResources(t *testing.T, c *cluster) {
	ns := c.namespace()
	c.feed(manifest(t, "widgets.yaml"), "create", "-f", "-")
	c.kubectl("wait", "--for=condition=Established", "crd/widgets.e2e.example.com", "--timeout", patience.String())
	create := func(name, spec string) result {
		return kubectl(t, c.kubeconfig, `{"apiVersion":"e2e.example.com/v1","kind":"Widget","metadata":{"name":"`+name+`"},"spec":`+spec+`}`,
			"-n", ns, "create", "-f", "-")
	}
	for name, bad := range map[string]struct{ spec, want string }{
		"missing":     {`{}`, "spec.most: Required value"},
		"type":        {`{"most":"many"}`, `spec.most: Invalid value: "string"`},
		"maximum":     {`{"most":101}`, "should be less than or equal to 100"},
		"enumeration": {`{"most":1,"colour":"green"}`, `spec.colour: Unsupported value: "green"`},
		"rule":        {`{"most":1,"least":2}`, "least must not be more than most"},
		"unknown":     {`{"most":1,"taste":"sour"}`, `unknown field "spec.taste"`},
		"twice":       {`{"most":1,"parts":[{"name":"a"},{"name":"a"}]}`, "Duplicate value"},
	} {
		if r := create(name, bad.spec); r.code == 0 || !strings.Contains(r.stderr, bad.want) {
			t.Errorf("%s: %s ends with code %d and %q, which should have %q", name, bad.spec, r.code, r.stderr, bad.want)
		}
	}
	if r := create("good", `{"most":5,"serial":"x","parts":[{"name":"wheel","weight":1}]}`); r.code != 0 {
		t.Fatal(r.stderr)
	}
	on := func(args ...string) string { t.Helper(); return c.kubectl(append([]string{"-n", ns}, args...)...) }
	if got := on("get", "widget", "good", "-o", "jsonpath={.spec.colour} {.spec.replicas} {.spec.least}"); got != "blue 1 0" {
		t.Errorf("the defaults are %q", got)
	}
	// Status is a world of its own.
	on("patch", "wg", "good", "--type", "merge", "-p", `{"status":{"phase":"Ignored"},"spec":{"most":6}}`)
	on("patch", "wg", "good", "--subresource", "status", "--type", "merge", "-p", `{"status":{"phase":"Running"},"spec":{"most":7}}`)
	if got := on("get", "wg", "good", "-o", "jsonpath={.spec.most} {.status.phase} {.metadata.generation}"); got != "6 Running 2" {
		t.Errorf("after patches of spec and status: %q", got)
	}
	on("scale", "widget/good", "--replicas", "4")
	if got := strings.Fields(on("get", "widgets", "-o", "wide")); !slices.Equal(got[:4], []string{"NAME", "COLOUR", "PHASE", "LEAST"}) || !slices.Equal(got[4:8], []string{"good", "blue", "Running", "0"}) {
		t.Errorf("the columns are %q", got)
	}
	c.refuse("", []string{"serial cannot change"}, "-n", ns, "patch", "wg", "good", "--type", "merge", "-p", `{"spec":{"serial":"y"}}`)
	// Versions, categories, selectable fields.
	if got := on("get", "widgets.v1beta1.e2e.example.com", "good", "-o", "jsonpath={.apiVersion} {.spec.replicas}"); got != "e2e.example.com/v1beta1 4" {
		t.Errorf("as v1beta1: %q", got)
	}
	contains(t, "kubectl get all", on("get", "all", "-o", "name"), "widget.e2e.example.com/good")
	if got := on("get", "widgets", "--field-selector", "spec.colour=red", "-o", "name"); got != "" {
		t.Errorf("red widgets: %q", got)
	}
	contains(t, "kubectl explain", on("explain", "widget.spec.colour"), "colour is what it is painted with.", "ENUM:")
	contains(t, "kubectl explain", on("explain", "deployment.spec.strategy.rollingUpdate", "--recursive"), "GROUP:      apps", "maxSurge")
	contains(t, "kubectl api-resources", c.kubectl("api-resources", "--api-group", "e2e.example.com"), "widgets", "wg")
	// Custom resources have owners and namespaces like all others.
	c.kubectl("delete", "namespace", ns, "--wait", "--timeout", patience.String())
	c.kubectl("delete", "crd", "widgets.e2e.example.com", "--wait", "--timeout", patience.String())
	eventually(t, "the API without its definition is gone", func() error {
		if r := kubectl(t, c.kubeconfig, "", "get", "--raw", "/apis/e2e.example.com/v1"); r.code == 0 {
			return errors.New("it is still served")
		}
		return nil
	})
}

func testAdmissionPolicies(t *testing.T, c *cluster) {
	ns := c.namespace()
	c.feed(manifest(t, "admission.yaml"), "create", "-f", "-")
	defer kubectl(t, c.kubeconfig, manifest(t, "admission.yaml"), "delete", "-f", "-")
	c.kubectl("-n", ns, "create", "configmap", "least-replicas", "--from-literal", "least=2")
	c.kubectl("label", "namespace", ns, "policy=on")
	small := []string{"-n", ns, "create", "deployment", "small", "--image", "registry.k8s.io/pause:3.10", "--replicas", "1"}
	eventually(t, "the policies are enforced", func() error {
		r := kubectl(t, c.kubeconfig, "", append(small, "--dry-run=server")...)
		if !strings.Contains(r.stderr, "at least 2 replicas, please") {
			return fmt.Errorf("a small deployment: %d %s", r.code, r.stderr)
		}
		if got := kubectl(t, c.kubeconfig, "", "-n", ns, "create", "configmap", "seen", "--dry-run=server", "-o", "jsonpath={.metadata.labels.marked}"); got.stdout != "yes" {
			return fmt.Errorf("the label of a configmap is %q; %s", got.stdout, got.stderr)
		}
		return nil
	})
	c.refuse("", []string{"ValidatingAdmissionPolicy 'least-replicas'", "at least 2 replicas, please"}, small...)
	c.kubectl("-n", ns, "create", "deployment", "large", "--image", "registry.k8s.io/pause:3.10", "--replicas", "2")
	other := c.namespace()
	c.kubectl("-n", other, "create", "deployment", "small", "--image", "registry.k8s.io/pause:3.10", "--replicas", "1")
}

func testPatches(t *testing.T, c *cluster) {
	ns := c.namespace()
	c.kubectl("-n", ns, "create", "deployment", "web", "--image", "registry.k8s.io/pause:3.10", "--replicas", "0")
	for _, p := range []struct{ kind, patch, format, want string }{
		{"strategic", `{"spec":{"template":{"spec":{"containers":[{"name":"side","image":"side:1"}]}}}}`, "{.spec.template.spec.containers[*].name}", "side pause"},
		{"json", `[{"op":"test","path":"/spec/template/spec/containers/0/name","value":"side"},{"op":"remove","path":"/spec/template/spec/containers/0"}]`, "{.spec.template.spec.containers[*].name}", "pause"},
		{"merge", `{"spec":{"template":{"spec":{"containers":[{"name":"only","image":"only:1"}]}}}}`, "{.spec.template.spec.containers[*].name}", "only"},
	} {
		c.kubectl("-n", ns, "patch", "deployment", "web", "--type", p.kind, "-p", p.patch)
		if got := c.kubectl("-n", ns, "get", "deployment", "web", "-o", "jsonpath="+p.format); got != p.want {
			t.Errorf("after a %s patch: %q, want %q", p.kind, got, p.want)
		}
	}
	c.refuse("", []string{"rejected our request"}, "-n", ns, "patch", "deployment", "web", "--type", "json", "-p", `[{"op":"test","path":"/metadata/name","value":"other"}]`)
	c.refuse("", []string{"field is immutable"}, "-n", ns, "patch", "deployment", "web", "--type", "merge", "-p", `{"spec":{"selector":{"matchLabels":{"a":"b"}}}}`)
}

func testServerSideApply(t *testing.T, c *cluster) {
	ns := c.namespace()
	apply := func(manager, colour string, args ...string) result {
		return kubectl(t, c.kubeconfig, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"paint"},"data":{"colour":"`+colour+`","`+manager+`":"was here"}}`,
			append([]string{"-n", ns, "apply", "--server-side", "--field-manager", manager, "-f", "-"}, args...)...)
	}
	if r := apply("ann", "blue"); r.code != 0 {
		t.Fatal(r.stderr)
	}
	if r := apply("bob", "red"); r.code == 0 || !strings.Contains(r.stderr, `conflict with "ann": .data.colour`) {
		t.Errorf("a second manager's value: %d %s", r.code, r.stderr)
	}
	if r := apply("bob", "blue"); r.code != 0 {
		t.Errorf("a value that both want: %s", r.stderr)
	}
	if r := apply("bob", "red", "--force-conflicts"); r.code != 0 {
		t.Errorf("a forced value: %s", r.stderr)
	}
	if got := c.kubectl("-n", ns, "get", "configmap", "paint", "-o", "jsonpath={.data.colour} {.data.ann} {.data.bob}"); got != "red was here was here" {
		t.Errorf("the data is %q", got)
	}
	// What a manager no longer mentions, and nobody else wants, goes.
	c.feed(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"paint"}}`, "-n", ns, "apply", "--server-side", "--field-manager", "bob", "-f", "-")
	if got := c.kubectl("-n", ns, "get", "configmap", "paint", "-o", "jsonpath={.data}"); got != `{"ann":"was here"}` {
		t.Errorf("after one manager let go: %s", got)
	}
}

func testApplyDiffAndPrune(t *testing.T, c *cluster) {
	ns := c.namespace()
	object := func(name, value string) string {
		return `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"` + name + `","labels":{"set":"ours"}},"data":{"key":"` + value + `"}}` + "\n"
	}
	c.feed(object("a", "1")+object("b", "1"), "-n", ns, "apply", "-f", "-")
	if r := kubectl(t, c.kubeconfig, object("a", "1"), "-n", ns, "diff", "-f", "-"); r.code != 0 {
		t.Errorf("a diff of nothing: %d %s%s", r.code, r.stdout, r.stderr)
	}
	if r := kubectl(t, c.kubeconfig, object("a", "2"), "-n", ns, "diff", "-f", "-"); r.code != 1 || !strings.Contains(r.stdout, `-  key: "1"`) || !strings.Contains(r.stdout, `+  key: "2"`) {
		t.Errorf("a diff: %d %s%s", r.code, r.stdout, r.stderr)
	}
	c.feed(object("a", "2"), "-n", ns, "apply", "--prune", "-l", "set=ours", "--prune-allowlist", "core/v1/ConfigMap", "-f", "-")
	if got := c.kubectl("-n", ns, "get", "configmaps", "-l", "set=ours", "-o", "jsonpath={.items[*].metadata.name}={.items[*].data.key}"); got != "a=2" {
		t.Errorf("after the prune: %q", got)
	}
}

// testWatches shows that a watch from a list's version sees all that happens
// after it, that bookmarks come, and what versions mean.
func testWatches(t *testing.T, c *cluster) {
	ns := c.namespace()
	maps := c.CoreV1().ConfigMaps(ns)
	create := func(name string) *corev1.ConfigMap {
		t.Helper()
		m, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"watched": "yes"}}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	selected := metav1.ListOptions{LabelSelector: "watched=yes"}
	create("before")
	list, err := maps.List(t.Context(), selected)
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("list: %d items, %v", len(list.Items), err)
	}
	made := create("made")
	made.Data = map[string]string{"a": "b"}
	if _, err := maps.Update(t.Context(), made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := maps.Update(t.Context(), made, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("an update of an old version: %v", err)
	}
	if err := maps.Delete(t.Context(), "made", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	opts := selected
	opts.ResourceVersion = list.ResourceVersion
	events := watchFor(t, c, ns, opts)
	for i, want := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted} {
		e := next(t, events)
		if m, ok := e.Object.(*corev1.ConfigMap); e.Type != want || !ok || m.Name != "made" {
			t.Fatalf("event %d is %s of %+v, want %s of made", i, e.Type, e.Object, want)
		}
	}
	// An object that a selector no longer selects is gone for the watcher.
	c.kubectl("-n", ns, "label", "configmap", "before", "watched-")
	if e := next(t, events); e.Type != watch.Deleted {
		t.Errorf("an object that is no longer selected: %s", e.Type)
	}

	// The list as a stream: what there is, a bookmark that says so, what follows.
	create("streamed")
	yes := true
	opts = selected
	opts.AllowWatchBookmarks, opts.SendInitialEvents, opts.ResourceVersionMatch = true, &yes, metav1.ResourceVersionMatchNotOlderThan
	events = watchFor(t, c, ns, opts)
	if e := next(t, events); e.Type != watch.Added || e.Object.(*corev1.ConfigMap).Name != "streamed" {
		t.Errorf("the stream begins with %s of %v", e.Type, e.Object)
	}
	if e := next(t, events); e.Type != watch.Bookmark || e.Object.(*corev1.ConfigMap).Annotations[metav1.InitialEventsAnnotationKey] != "true" {
		t.Errorf("the stream's list ends with %s of %v", e.Type, e.Object)
	}
	create("later")
	if e := next(t, events); e.Type != watch.Added || e.Object.(*corev1.ConfigMap).Name != "later" {
		t.Errorf("after its list the stream has %s of %v", e.Type, e.Object)
	}

	// Pages are of one moment, whatever happens between them.
	opts = selected
	opts.Limit = 1
	page, err := maps.List(t.Context(), opts)
	if err != nil || len(page.Items) != 1 || page.Continue == "" {
		t.Fatalf("first page: %v, %+v", err, page)
	}
	create("zzz")
	opts.Continue = page.Continue
	rest, err := maps.List(t.Context(), opts)
	if err != nil || len(rest.Items) != 1 || rest.Continue != "" || rest.ResourceVersion != page.ResourceVersion {
		t.Errorf("second page: %v, %+v", err, rest)
	}
	exact, err := maps.List(t.Context(), metav1.ListOptions{LabelSelector: "watched=yes", ResourceVersion: page.ResourceVersion, ResourceVersionMatch: metav1.ResourceVersionMatchExact})
	if err != nil || len(exact.Items) != 2 {
		t.Errorf("a list of the past has %d items, want 2; %v", len(exact.Items), err)
	}
	err = c.CoreV1().RESTClient().Get().Namespace(ns).Resource("configmaps").Param("resourceVersion", "9999999999").MaxRetries(0).Do(t.Context()).Error()
	if !apierrors.IsTimeout(err) || !apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) {
		t.Errorf("a list of the future: %v", err)
	}
}

// watchFor watches configmaps until the test ends.
func watchFor(t testing.TB, c *cluster, namespace string, opts metav1.ListOptions) <-chan watch.Event {
	t.Helper()
	w, err := c.CoreV1().ConfigMaps(namespace).Watch(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
	return w.ResultChan()
}

// next is the next event.
func next(t testing.TB, events <-chan watch.Event) watch.Event {
	t.Helper()
	select {
	case e, ok := <-events:
		if !ok {
			t.Fatal("the watch ended")
		}
		return e
	case <-time.After(patience):
		t.Fatalf("no event in %s", patience)
	}
	panic("unreachable")
}

func testWait(t *testing.T, c *cluster) {
	ns := c.namespace()
	waited := make(chan result, 1)
	go func() {
		waited <- kubectl(t, c.kubeconfig, "", "-n", ns, "wait", "--for=create", "configmap/late", "--timeout", patience.String())
	}()
	c.kubectl("-n", ns, "create", "configmap", "late", "--from-literal", "is=here")
	if r := <-waited; r.code != 0 {
		t.Errorf("wait for creation: %s", r.stderr)
	}
	c.kubectl("-n", ns, "wait", "--for=jsonpath={.data.is}=here", "configmap/late", "--timeout", patience.String())
	c.refuse("", []string{"timed out waiting"}, "-n", ns, "wait", "--for=jsonpath={.data.is}=gone", "configmap/late", "--timeout", "1s")
	go func() {
		waited <- kubectl(t, c.kubeconfig, "", "-n", ns, "wait", "--for=delete", "configmap/late", "--timeout", patience.String())
	}()
	c.kubectl("-n", ns, "delete", "configmap", "late")
	if r := <-waited; r.code != 0 {
		t.Errorf("wait for deletion: %s", r.stderr)
	}
}

func testDocuments(t *testing.T, c *cluster) {
	var v2 struct {
		Swagger string
		Info    struct{ Title string }
		Paths   map[string]any
	}
	if err := json.Unmarshal([]byte(c.kubectl("get", "--raw", "/openapi/v2")), &v2); err != nil {
		t.Fatal(err)
	}
	if v2.Swagger != "2.0" || v2.Info.Title != "Kubernetes" || v2.Paths["/apis/apps/v1/namespaces/{namespace}/deployments"] == nil {
		t.Errorf("/openapi/v2 is %+v with %d paths", v2.Info, len(v2.Paths))
	}
	var v3 struct {
		Paths map[string]struct{ ServerRelativeURL string }
	}
	if err := json.Unmarshal([]byte(c.kubectl("get", "--raw", "/openapi/v3")), &v3); err != nil {
		t.Fatal(err)
	}
	apps := v3.Paths["apis/apps/v1"].ServerRelativeURL
	if apps == "" {
		t.Fatalf("/openapi/v3 has no apps/v1: %+v", v3)
	}
	contains(t, apps, c.kubectl("get", "--raw", apps), `"openapi":"3.0.0"`, "io.k8s.api.apps.v1.Deployment")
	contains(t, "/", c.kubectl("get", "--raw", "/"), "/apis/apps/v1", "/openapi/v3")
	for _, check := range []string{"/livez", "/readyz", "/healthz"} {
		if got := c.kubectl("get", "--raw", check); got != "ok" {
			t.Errorf("%s: %s", check, got)
		}
	}
}

func testEventsAndLeases(t *testing.T, c *cluster) {
	ns := c.namespace()
	c.kubectl("-n", ns, "create", "deployment", "web", "--image", "registry.k8s.io/pause:3.10")
	for _, reason := range []string{"ScalingReplicaSet", "SuccessfulCreate", "Scheduled"} {
		eventually(t, "there is an event "+reason, func() error {
			if c.kubectl("-n", ns, "get", "events", "--field-selector", "reason="+reason, "-o", "name") == "" {
				return errors.New(c.kubectl("-n", ns, "get", "events"))
			}
			return nil
		})
	}
	contains(t, "kubectl events", c.kubectl("-n", ns, "events", "--for", "deployment/web"), "ScalingReplicaSet")
	contains(t, "kubectl describe", c.kubectl("-n", ns, "describe", "deployment", "web"), "ScalingReplicaSet", "Replicas:")
	contains(t, "kubectl describe", c.kubectl("describe", "node", "worker-1"), "RegisteredNode", "HolderIdentity:  worker-1")
	// No identity of the host is to be seen among the leases.
	if got := c.kubectl("-n", "kube-system", "get", "leases", "-o", "name"); got != "" {
		t.Errorf("kube-system has leases that were not made by the tenant: %s", got)
	}
	lease, err := c.CoordinationV1().Leases(ns).Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "leader"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	me, stale := "me", lease.DeepCopy()
	lease.Spec.HolderIdentity = &me
	if _, err := c.CoordinationV1().Leases(ns).Update(t.Context(), lease, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.CoordinationV1().Leases(ns).Update(t.Context(), stale, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("a second holder of a lease: %v", err)
	}
}

// testProcessIsNotServed shows that a tenant's administrator sees nothing of
// the process that all tenants share.
func testProcessIsNotServed(t *testing.T, c *cluster) {
	for _, path := range []string{
		"/metrics", "/metrics/slis", "/metrics/cadvisor", "/logs", "/logs/", "/logs/syslog", "/debug/pprof", "/debug/pprof/", "/debug/pprof/heap",
		"/debug/pprof/cmdline", "/debug/flags/v", "/configz", "/flagz",
	} {
		_, err := c.CoreV1().RESTClient().Get().AbsPath(path).DoRaw(t.Context())
		if !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
			t.Errorf("GET %s: %v", path, err)
		}
	}
	index := c.kubectl("get", "--raw", "/")
	for _, path := range []string{`"/metrics`, `"/debug`, `"/logs`} {
		if strings.Contains(index, path) {
			t.Errorf("the index names %s", path)
		}
	}
}

// testComponentStatuses shows that a tenant cannot have ports of the host asked
// by way of the old resource that asks the controllers' own.
func testComponentStatuses(t *testing.T, c *cluster) {
	var traps []*trap
	for _, port := range []string{"10257", "10259"} {
		// A control plane of this machine's own may have the port: the answer
		// below would then tell of it.
		if ln, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			traps = append(traps, setTrap(t, ln))
		}
	}
	list, err := c.CoreV1().ComponentStatuses().List(t.Context(), metav1.ListOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Errorf("list: %v", err)
	}
	for _, status := range list.Items {
		for _, condition := range status.Conditions {
			if strings.Contains(condition.Message+condition.Error, "127.0.0.1") {
				t.Errorf("%s tells of the host: %+v", status.Name, condition)
			}
			// What runs in the process is asked there.
			if condition.Status != corev1.ConditionTrue {
				t.Errorf("%s is not well: %+v", status.Name, condition)
			}
		}
	}
	for _, tr := range traps {
		tr.check(t)
	}
}

// testNothingIsDialled shows that whatever a tenant writes, the host opens no
// connection for it: what goes into a cluster goes through its tunnel, and while
// there is none says so at once.
func testNothingIsDialled(t *testing.T, c *cluster, kubelet *kubelet) {
	const tunnel = "no tunnel agent of this cluster is connected"
	ns := c.namespace()
	port := strconv.Itoa(kubelet.port())
	objects := manifest(t, "dialling.yaml", "PORT", port)
	c.feed(objects, "create", "-f", "-")
	defer kubectl(t, c.kubeconfig, objects, "delete", "--wait=false", "-f", "-")

	for _, by := range []string{"url", "service"} {
		object := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"asks","labels":{"ask":"` + by + `"}}}`
		eventually(t, "the webhook by "+by+" is asked", func() error {
			r := kubectl(t, c.kubeconfig, object, "-n", ns, "create", "--dry-run=server", "-f", "-")
			if r.code == 0 {
				return errors.New("created all the same")
			}
			contains(t, "the answer", r.stderr, "failed calling webhook", by+".dialling.example.com", tunnel)
			return nil
		})
	}

	c.kubectl("wait", "--for=condition=Established", "crd/calls.crd.dialling.example.com", "--timeout", patience.String())
	c.feed(`{"apiVersion":"crd.dialling.example.com/v1","kind":"Call","metadata":{"name":"one"}}`, "create", "-f", "-")
	c.refuse("", []string{"conversion webhook", tunnel}, "get", "calls.v2.crd.dialling.example.com", "one")

	c.kubectl("wait", "--for=condition=Available=False", "apiservice/v1.dialling.example.com", "--timeout", patience.String())
	if got := c.kubectl("get", "apiservice", "v1.dialling.example.com", "-o", "jsonpath={.status.conditions[*].message}"); !strings.Contains(got, tunnel) {
		t.Errorf("the APIService says %q", got)
	}
	c.refuse("", nil, "get", "--raw", "/apis/dialling.example.com/v1")

	c.feed(manifest(t, "pinned.yaml"), "-n", ns, "create", "-f", "-")
	c.kubectl("-n", ns, "wait", "--for=condition=Ready", "pod/pinned", "--timeout", patience.String())
	for _, into := range []struct {
		want string
		args []string
	}{
		{tunnel, []string{"logs", "pinned"}},
		{tunnel, []string{"exec", "pinned", "--", "true"}},
		{tunnel, []string{"attach", "pinned"}},
		{tunnel, []string{"get", "--raw", "/api/v1/namespaces/" + ns + "/pods/https:pinned:" + port + "/proxy/"}},
		{"address not allowed", []string{"get", "--raw", "/api/v1/nodes/worker-1/proxy/metrics"}},
		{"address not allowed", []string{"get", "--raw", "/api/v1/nodes/https:worker-1:" + port + "/proxy/"}},
	} {
		c.refuse("", []string{into.want}, append([]string{"-n", ns}, into.args...)...)
	}
	// The address of a pod is for its kubelet to say; a tenant's administrator can too.
	c.kubectl("-n", ns, "patch", "pod", "pinned", "--subresource", "status", "--type", "merge", "-p", `{"status":{"podIP":"127.0.0.1","podIPs":[{"ip":"127.0.0.1"}]}}`)
	c.refuse("", nil, "get", "--raw", "/api/v1/namespaces/"+ns+"/pods/https:pinned:"+port+"/proxy/")
	c.refuse("", nil, "get", "--raw", "/api/v1/namespaces/default/services/https:outside:"+port+"/proxy/")
	kubelet.check(t)
}

// testIsolation shows that what one tenant has is worth nothing at another, and
// nothing at the system plane.
func testIsolation(t *testing.T, h *host, one, two *cluster) {
	system := &cluster{t: t, host: h, name: "system", kubeconfig: h.adminKubeconfig()}
	at := map[string]*rest.Config{}
	for _, c := range []*cluster{one, two, system} {
		at[c.name] = rest.AnonymousClientConfig(restConfig(t, c.kubeconfig))
	}
	admin := restConfig(t, one.kubeconfig)
	token := strings.TrimSpace(one.kubectl("-n", "default", "create", "token", "default"))
	if got := whoami(t, one.bearer(token)); got.Status.UserInfo.Username != "system:serviceaccount:default:default" {
		t.Fatalf("the token's user is %+v", got.Status.UserInfo)
	}
	// Both of these would be believed from an aggregator's own certificate.
	headers := map[string]string{"X-Remote-User": "kubernetes-admin", "X-Remote-Group": "system:masters", "X-Remote-Uid": "1"}
	frontProxy := restConfig(t, one.host.kubeconfig("one", "--user", "front-proxy-client"))
	loopback := "system:apiserver"

	for _, place := range []*cluster{two, system} {
		for name, alter := range map[string]func(*rest.Config){
			"administrator's certificate":             func(c *rest.Config) { c.CertData, c.KeyData = admin.CertData, admin.KeyData },
			"administrator's certificate and headers": func(c *rest.Config) { c.CertData, c.KeyData = admin.CertData, admin.KeyData; pretend(c, headers) },
			"front-proxy's name and headers": func(c *rest.Config) {
				c.CertData, c.KeyData = frontProxy.CertData, frontProxy.KeyData
				pretend(c, headers)
			},
			"service account's token": func(c *rest.Config) { c.BearerToken = token },
			"invented token":          func(c *rest.Config) { c.BearerToken = loopback },
		} {
			cfg := rest.CopyConfig(at[place.name])
			alter(cfg)
			_, err := clientFor(t, cfg).CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
			if !apierrors.IsUnauthorized(err) {
				t.Errorf("the %s of one at %s: %v; want 401", name, place.name, err)
			}
		}
	}
	// Headers without a certificate are nobody's; with a user's, that user's.
	for _, c := range []*cluster{one, two, system} {
		cfg := rest.CopyConfig(at[c.name])
		pretend(cfg, headers)
		if _, err := clientFor(t, cfg).CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "system:anonymous") {
			t.Errorf("headers without a certificate at %s: %v", c.name, err)
		}
	}
	pretend(frontProxy, headers)
	if got := whoami(t, clientFor(t, frontProxy)).Status.UserInfo; got.Username != "front-proxy-client" || slices.Contains(got.Groups, "system:masters") {
		t.Errorf("a user of the front proxy's name became %+v", got)
	}
	// The name in TLS decides, not the one in the request.
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, admin.Host+"/api/v1/namespaces/default/configmaps", nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Host = "two." + domain
	httpClient, err := rest.HTTPClientFor(admin)
	if err != nil {
		t.Fatal(err)
	}
	one.kubectl("-n", "default", "create", "configmap", "of-one")
	two.kubectl("-n", "default", "create", "configmap", "of-two")
	response, err := httpClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil || !strings.Contains(string(body), "of-one") || strings.Contains(string(body), "of-two") {
		t.Errorf("one's connection with two's name in the request gets: %s %v", body, err)
	}
	if got := two.kubectl("get", "configmaps", "-A", "-o", "name"); strings.Contains(got, "of-one") || !strings.Contains(got, "of-two") {
		t.Errorf("two sees %s", got)
	}
	if got := two.kubectl("get", "nodes", "-o", "name"); got != "" {
		t.Errorf("two sees the nodes of one: %s", got)
	}
	two.refuse("", []string{`doesn't have a resource type "tenants"`}, "get", "tenants")
	// Each has a certificate for its own name alone.
	for name, cfg := range at {
		conn, err := tls.Dial("tcp", h.listen, &tls.Config{ServerName: cfg.ServerName, InsecureSkipVerify: true}) // looked at below
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		leaf := conn.ConnectionState().PeerCertificates[0]
		for _, other := range at {
			if err := leaf.VerifyHostname(other.ServerName); (err == nil) != (other == cfg) {
				t.Errorf("the certificate of %s for %s: %v", name, other.ServerName, err)
			}
		}
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/tenantd/tenantd/e2e/proc"
)

// gates are the feature gates that tenantd sets, for a stock API server to have
// the same API.
const gates = "APIServerIdentity=false,UnknownVersionInteroperabilityProxy=false,ComponentStatusz=false,ComponentFlagz=false,DetectCacheInconsistency=false"

// TestConformity compares what a tenant says of its API, and what is in it from
// the start, with a stock kube-apiserver of the same version.
func TestConformity(t *testing.T) {
	stock := startStock(t)
	h := startHost(t)
	// Addons are pods and Services like any user's, and left out.
	file := filepath.Join(t.TempDir(), "tenant.yaml")
	writeFile(t, file, "apiVersion: tenantd.io/v1alpha1\nkind: Tenant\nmetadata: {name: one}\nspec: {addons: {coreDNS: {enabled: false}, kubeProxy: {enabled: false}}}\n")
	h.mustTenantctl("add", "-f", file, "--timeout", patience.String())
	tenant := restConfig(t, h.kubeconfig("one"))
	c := &comparison{t: t, tenant: tenant, stock: stock}

	t.Run("Documents", func(t *testing.T) { c.within(t).documents() })
	t.Run("Objects", func(t *testing.T) { c.within(t).objects() })
	crd := manifest(t, "widgets.yaml")
	for name, cfg := range map[string]*rest.Config{"tenant": tenant, "stock": stock} {
		kubeconfig := writeKubeconfig(t, cfg)
		mustKubectl(t, kubeconfig, crd, "create", "-f", "-")
		mustKubectl(t, kubeconfig, "", "wait", "--for=condition=Established", "crd/widgets.e2e.example.com", "--timeout", patience.String())
		eventually(t, "the documents of "+name+" have the CRD", func() error {
			for _, path := range []string{"/openapi/v2", "/openapi/v3", "/apis"} {
				raw, err := get(t, cfg, path, "application/json")
				if err != nil {
					return err
				}
				if !bytes.Contains(raw, []byte("e2e.example.com")) {
					return fmt.Errorf("%s has not", path)
				}
			}
			return nil
		})
	}
	t.Run("DocumentsWithCRD", func(t *testing.T) { c.within(t).documents() })
}

// startStock starts a kube-apiserver with an etcd of its own and returns its
// administrator's configuration.
func startStock(t *testing.T) *rest.Config {
	t.Helper()
	dir, err := os.MkdirTemp("", "stock") // a unix socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	etcd := embed.NewConfig()
	etcd.Dir = filepath.Join(dir, "etcd")
	etcd.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop()) // it takes being closed for an error
	etcd.ListenClientUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(dir, "client.sock")}}
	etcd.AdvertiseClientUrls = etcd.ListenClientUrls
	etcd.ListenPeerUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(dir, "peer.sock")}}
	etcd.AdvertisePeerUrls = etcd.ListenPeerUrls
	etcd.InitialCluster = etcd.Name + "=unix://" + filepath.Join(dir, "peer.sock")
	store, err := embed.StartEtcd(etcd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	select {
	case <-store.Server.ReadyNotify():
	case <-time.After(patience):
		t.Fatal("etcd does not start")
	}

	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	file := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	keyFile := file("sa.key", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	host, port, err := net.SplitHostPort(proc.FreeAddress(t))
	if err != nil {
		t.Fatal(err)
	}
	log := &proc.Log{}
	cmd := exec.Command(bin(t, "kube-apiserver"),
		"--etcd-servers=unix://"+filepath.Join(dir, "client.sock"),
		"--bind-address="+host, "--secure-port="+port, "--cert-dir="+filepath.Join(dir, "certs"),
		"--advertise-address=172.20.0.1", "--endpoint-reconciler-type=none",
		"--token-auth-file="+file("tokens", []byte("administrator,admin,1,system:masters\n")),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--enable-bootstrap-token-auth",
		"--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file="+keyFile, "--service-account-signing-key-file="+keyFile,
		"--feature-gates="+gates,
	)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		cmd.Wait()
		close(exited)
	}()
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-exited:
		case <-time.After(patience):
			cmd.Process.Kill()
			<-exited
		}
	})
	cfg := &rest.Config{Host: "https://" + net.JoinHostPort(host, port), BearerToken: "administrator", QPS: -1}
	eventually(t, "kube-apiserver is ready", func() error {
		select {
		case <-exited:
			t.Fatalf("kube-apiserver ended:\n%s", log.Tail(20))
		default:
		}
		ca, err := os.ReadFile(filepath.Join(dir, "certs", "apiserver.crt"))
		if err != nil {
			return err
		}
		cfg.CAData = ca
		_, err = get(t, cfg, "/readyz", "")
		return err
	})
	return cfg
}

// writeKubeconfig writes a configuration for kubectl.
func writeKubeconfig(t testing.TB, cfg *rest.Config) string {
	t.Helper()
	config := map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "it",
		"clusters": []any{map[string]any{"name": "it", "cluster": map[string]any{
			"server": cfg.Host, "tls-server-name": cfg.ServerName, "certificate-authority-data": cfg.CAData,
		}}},
		"users": []any{map[string]any{"name": "it", "user": map[string]any{
			"token": cfg.BearerToken, "client-certificate-data": cfg.CertData, "client-key-data": cfg.KeyData,
		}}},
		"contexts": []any{map[string]any{"name": "it", "context": map[string]any{"cluster": "it", "user": "it"}}},
	}
	raw, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// get fetches a document.
func get(t testing.TB, cfg *rest.Config, path, accept string) ([]byte, error) {
	t.Helper()
	c, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c.RESTClient().Get().RequestURI(path).SetHeader("Accept", accept).DoRaw(t.Context())
}

// comparison compares two API servers.
type comparison struct {
	t             testing.TB
	tenant, stock *rest.Config
}

func (c *comparison) within(t testing.TB) *comparison {
	n := *c
	n.t = t
	return &n
}

// both fetches a document of both.
func (c *comparison) both(path, accept string) (tenant, stock []byte) {
	c.t.Helper()
	for cfg, into := range map[*rest.Config]*[]byte{c.tenant: &tenant, c.stock: &stock} {
		raw, err := get(c.t, cfg, path, accept)
		if err != nil {
			c.t.Fatalf("GET %s of %s: %v", path, cfg.Host, err)
		}
		*into = raw
	}
	return tenant, stock
}

// same compares two JSON documents and reports the first differences.
func (c *comparison) same(what string, tenant, stock []byte) {
	c.t.Helper()
	if bytes.Equal(tenant, stock) {
		return
	}
	var a, b any
	for raw, into := range map[*[]byte]*any{&tenant: &a, &stock: &b} {
		if err := json.Unmarshal(*raw, into); err != nil {
			c.t.Fatalf("%s: %v", what, err)
		}
	}
	differences := compare("", a, b)
	if len(differences) == 0 {
		return // in the order of keys
	}
	c.t.Errorf("%s differs in %d places:\n%s", what, len(differences), strings.Join(differences[:min(10, len(differences))], "\n"))
}

// compare lists where two decoded JSON documents differ.
func compare(path string, tenant, stock any) []string {
	var differences []string
	switch a := tenant.(type) {
	case map[string]any:
		b, ok := stock.(map[string]any)
		if !ok {
			break
		}
		for _, key := range slices.Sorted(maps.Keys(a)) {
			if _, ok := b[key]; !ok {
				differences = append(differences, fmt.Sprintf("%s/%s: only the tenant has it: %.200s", path, key, fmt.Sprint(a[key])))
				continue
			}
			differences = append(differences, compare(path+"/"+key, a[key], b[key])...)
		}
		for _, key := range slices.Sorted(maps.Keys(b)) {
			if _, ok := a[key]; !ok {
				differences = append(differences, fmt.Sprintf("%s/%s: the tenant lacks it: %.200s", path, key, fmt.Sprint(b[key])))
			}
		}
		return differences
	case []any:
		b, ok := stock.([]any)
		if !ok || len(a) != len(b) {
			break
		}
		for i := range a {
			differences = append(differences, compare(fmt.Sprintf("%s[%d]", path, i), a[i], b[i])...)
		}
		return differences
	default:
		if tenant == stock {
			return nil
		}
	}
	return []string{fmt.Sprintf("%s: the tenant has %.200s, stock %.200s", path, fmt.Sprint(tenant), fmt.Sprint(stock))}
}

// documents compares everything by which clients learn what there is.
func (c *comparison) documents() {
	const aggregated = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	const unaggregated = "application/json"
	for _, path := range []string{"/api", "/apis"} {
		tenant, stock := c.both(path, aggregated)
		c.same("aggregated "+path, tenant, stock)
	}
	// The programs may be of different builds, and the address of a server is its own.
	for path, field := range map[string]string{"/version": "buildDate", "/api": "serverAddressByClientCIDRs"} {
		tenant, stock := c.both(path, unaggregated)
		c.same(path, without(c.t, tenant, field), without(c.t, stock, field))
	}
	tenant, stock := c.both("/apis", unaggregated)
	c.same("/apis", tenant, stock)
	var groups metav1.APIGroupList
	if err := json.Unmarshal(stock, &groups); err != nil {
		c.t.Fatal(err)
	}
	paths := []string{"/api/v1"}
	for _, g := range groups.Groups {
		paths = append(paths, "/apis/"+g.Name)
		for _, v := range g.Versions {
			paths = append(paths, "/apis/"+v.GroupVersion)
		}
	}
	if len(paths) < 40 {
		c.t.Errorf("stock has %d groups and versions only: %q", len(paths), paths)
	}
	for _, path := range paths {
		tenant, stock := c.both(path, unaggregated)
		c.same(path, tenant, stock)
	}

	tenant, stock = c.both("/openapi/v2", unaggregated)
	c.same("/openapi/v2", tenant, stock)
	// The index has a hash of each document in its URL.
	tenant, stock = c.both("/openapi/v3", unaggregated)
	c.same("/openapi/v3", tenant, stock)
	var index struct {
		Paths map[string]struct{ ServerRelativeURL string }
	}
	if err := json.Unmarshal(stock, &index); err != nil {
		c.t.Fatal(err)
	}
	if len(index.Paths) < 40 {
		c.t.Errorf("stock has %d documents only", len(index.Paths))
	}
	for path := range index.Paths {
		tenant, stock := c.both("/openapi/v3/"+path, unaggregated)
		c.same("/openapi/v3/"+path, tenant, stock)
	}
}

// without removes a field from a JSON object.
func without(t testing.TB, raw []byte, field string) []byte {
	t.Helper()
	var object map[string]any
	if err := json.Unmarshal(raw, &object); err != nil {
		t.Fatal(err)
	}
	if _, ok := object[field]; !ok {
		t.Fatalf("there is no %s in %s", field, raw)
	}
	delete(object, field)
	raw, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// otherObjects are the resources whose objects are not compared.
var otherObjects = map[schema.GroupResource]string{
	{Resource: "componentstatuses"}:                                 "asks the machine",
	{Resource: "configmaps"}:                                        "controllers put the authority into each namespace; the rest is certificates",
	{Resource: "serviceaccounts"}:                                   "made by a controller",
	{Resource: "events"}:                                            "of what happens",
	{Group: "certificates.k8s.io", Resource: "clustertrustbundles"}: "made by a controller",
	{Group: "events.k8s.io", Resource: "events"}:                    "of what happens",
}

// ofJoining are the objects, by namespace and name, that a cluster has beyond what
// its API server makes: those of `kubeadm init`, and where workers find the hosts.
var ofJoining = map[string][]string{
	"endpoints":      {"default/kubernetes"},
	"endpointslices": {"default/kubernetes"},
	"roles": {
		"kube-public/kubeadm:bootstrap-signer-clusterinfo", "kube-public/tenantd-hosts",
		"kube-system/kubeadm:kubelet-config", "kube-system/kubeadm:nodes-kubeadm-config",
	},
	"rolebindings": {
		"kube-public/kubeadm:bootstrap-signer-clusterinfo", "kube-public/tenantd-hosts",
		"kube-system/kubeadm:kubelet-config", "kube-system/kubeadm:nodes-kubeadm-config",
	},
	"clusterroles": {"/kubeadm:get-nodes"},
	"clusterrolebindings": {
		"/kubeadm:apiserver-kubelet-client", "/kubeadm:cluster-admins", "/kubeadm:get-nodes", "/kubeadm:kubelet-bootstrap",
		"/kubeadm:node-autoapprove-bootstrap", "/kubeadm:node-autoapprove-certificate-rotation",
	},
}

// objects compares what an API server has in it from the start.
func (c *comparison) objects() {
	lists, err := discovery.NewDiscoveryClientForConfigOrDie(c.stock).ServerPreferredResources()
	if err != nil {
		c.t.Fatal(err)
	}
	compared := 0
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			c.t.Fatal(err)
		}
		for _, r := range list.APIResources {
			if !slices.Contains(r.Verbs, "list") || otherObjects[schema.GroupResource{Group: gv.Group, Resource: r.Name}] != "" {
				continue
			}
			gvr := gv.WithResource(r.Name)
			// Controllers of the API server write some of them after it is ready.
			var tenant, stock map[string]any
			eventuallySame(func() bool {
				tenant, stock = listed(c.t, c.tenant, gvr), listed(c.t, c.stock, gvr)
				for _, name := range ofJoining[r.Name] {
					delete(tenant, name)
				}
				return len(compare("", tenant, stock)) == 0
			})
			if differences := compare(gvr.String(), tenant, stock); len(differences) > 0 {
				c.t.Errorf("objects differ:\n%s", strings.Join(differences, "\n"))
			}
			compared += len(stock)
		}
	}
	if compared < 150 {
		c.t.Errorf("there are %d objects only to compare", compared)
	}
}

// eventuallySame gives two servers time to say the same.
func eventuallySame(same func() bool) {
	for range 50 {
		if same() {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// listed is all objects of a resource by name, without what is never the same
// twice: identity, times, versions, and who wrote a field when.
func listed(t testing.TB, cfg *rest.Config, gvr schema.GroupVersionResource) map[string]any {
	t.Helper()
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	list, err := client.Resource(gvr).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatalf("list %s of %s: %v", gvr, cfg.Host, err)
	}
	objects := map[string]any{}
	for _, o := range list.Items {
		for _, field := range []string{"uid", "resourceVersion", "creationTimestamp", "managedFields", "generation"} {
			unstructured.RemoveNestedField(o.Object, "metadata", field)
		}
		if conditions, ok, _ := unstructured.NestedSlice(o.Object, "status", "conditions"); ok {
			for _, c := range conditions {
				delete(c.(map[string]any), "lastTransitionTime")
			}
			unstructured.SetNestedSlice(o.Object, conditions, "status", "conditions")
		}
		switch {
		case gvr.Resource == "servicecidrs": // a controller takes care of it
			unstructured.RemoveNestedField(o.Object, "metadata", "finalizers")
			unstructured.RemoveNestedField(o.Object, "status")
		case gvr.Resource == "services": // the port is each server's own
			ports, _, _ := unstructured.NestedSlice(o.Object, "spec", "ports")
			for _, p := range ports {
				delete(p.(map[string]any), "targetPort")
			}
			unstructured.SetNestedSlice(o.Object, ports, "spec", "ports")
		}
		// A controller writes the sum of other roles into such a role.
		if _, ok := o.Object["aggregationRule"]; ok {
			delete(o.Object, "rules")
		}
		objects[o.GetNamespace()+"/"+o.GetName()] = o.Object
	}
	return objects
}

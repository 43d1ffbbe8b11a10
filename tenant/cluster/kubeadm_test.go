// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	"k8s.io/kubernetes/cmd/kubeadm/app/constants"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/addons/dns"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/addons/proxy"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/bootstraptoken/clusterinfo"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/bootstraptoken/node"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/kubeconfig"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/kubelet"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/uploadconfig"
)

// recorder answers as an empty API server does and keeps what is created.
type recorder struct {
	t       *testing.T
	created map[string]object
	name    func(object) string
}

func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	code, body := http.StatusNotFound, []byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
	switch {
	case req.Method == http.MethodPost:
		code = http.StatusCreated
		body, _ = io.ReadAll(req.Body)
		decoded, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
		if err != nil {
			r.t.Errorf("kubeadm creates something unreadable: %v", err)
			break
		}
		r.created[r.name(decoded.(object))] = decoded.(object)
	case strings.HasSuffix(req.URL.Path, "/deployments"):
		code, body = http.StatusOK, []byte(`{"kind":"DeploymentList","apiVersion":"apps/v1","items":[]}`)
	}
	return &http.Response{
		StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(body)), Request: req,
	}, nil
}

func testCluster(t *testing.T) *Cluster {
	t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "https://unused.test"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(Config{
		Client: client, Informers: informers.NewSharedInformerFactory(client, 0), Hostname: "acme.k8s.test", CA: []byte("a CA\n"), Version: "v1.37.1",
		CoreDNS: Addon{Enabled: true}, KubeProxy: Addon{Enabled: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Every object that kubeadm init creates after the control plane is up is created
// here too, and is the same; those that are only ours are named.
func TestObjectsAreKubeadms(t *testing.T) {
	// kubeadm hands the proxy settings of the machine that it runs on to kube-proxy.
	for _, v := range []string{"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"} {
		t.Setenv(v, "")
		t.Setenv(strings.ToLower(v), "")
	}
	c := testCluster(t)
	cc, err := c.cfg.clusterConfiguration(c.coreDNS, c.kubeProxy)
	if err != nil {
		t.Fatal(err)
	}
	// It repeats what fails for a minute, each of its writes.
	timeouts := kubeadm.GetActiveTimeouts().DeepCopy()
	t.Cleanup(func() { kubeadm.SetActiveTimeouts(timeouts) })
	brief := timeouts.DeepCopy()
	brief.KubernetesAPICall = &metav1.Duration{Duration: time.Nanosecond}
	kubeadm.SetActiveTimeouts(brief)

	theirs := &recorder{t: t, created: map[string]object{}, name: c.describe}
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "https://recorder.test", Transport: theirs, ContentConfig: rest.ContentConfig{ContentType: "application/json"}})
	if err != nil {
		t.Fatal(err)
	}
	admin := &clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"k": {Server: "https://acme.k8s.test:443", CertificateAuthorityData: c.cfg.CA}},
		Contexts:       map[string]*clientcmdapi.Context{"k": {Cluster: "k"}},
		CurrentContext: "k",
	}
	for name, err := range map[string]error{
		"get nodes":         node.AllowBootstrapTokensToGetNodes(client),
		"post requests":     node.AllowBootstrapTokensToPostCSRs(client),
		"approve first":     node.AutoApproveNodeBootstrapTokens(client),
		"approve rotation":  node.AutoApproveNodeCertificateRotation(client),
		"kubelet API":       node.AllowAPIServerToAccessKubeletAPI(client),
		"cluster-info":      clusterinfo.CreateBootstrapConfigMapIfNotExists(client, admin),
		"cluster-info RBAC": clusterinfo.CreateClusterInfoRBACRules(client),
		"kubeadm-config":    uploadconfig.UploadConfiguration(&kubeadm.InitConfiguration{ClusterConfiguration: *cc}, client),
		"kubelet-config":    kubelet.CreateConfigMap(cc, client),
		"CoreDNS":           dns.EnsureDNSAddon(cc, client, "", io.Discard, false),
		"kube-proxy":        proxy.EnsureProxyAddon(cc, c.cfg.apiEndpoint(), client, "", io.Discard, false),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := kubeconfig.EnsureAdminClusterRoleBindingImpl(t.Context(), client, client, time.Millisecond, time.Second); err != nil {
		t.Error(err)
	}

	bundles, err := c.bundles()
	if err != nil {
		t.Fatal(err)
	}
	ours := map[string]object{}
	for _, b := range bundles {
		for _, o := range b.objects {
			ours[c.describe(o)] = o
		}
	}
	for name, want := range theirs.created {
		got, ok := ours[name]
		if !ok {
			t.Errorf("%s is missing", name)
			continue
		}
		delete(ours, name)
		if got, want := canonical(t, got), canonical(t, want); got != want {
			t.Errorf("%s differs from kubeadm's:\n%s\nkubeadm's:\n%s", name, got, want)
		}
	}
	for name := range ours {
		if name != "roles kube-public/tenantd-hosts" && name != "rolebindings kube-public/tenantd-hosts" {
			t.Errorf("%s is not kubeadm's", name)
		}
	}
}

// canonical is o without what differs on purpose.
func canonical(t *testing.T, o object) string {
	t.Helper()
	o = o.DeepCopyObject().(object)
	labels := o.GetLabels()
	delete(labels, managedBy)
	if len(labels) == 0 {
		labels = nil
	}
	o.SetLabels(labels)
	o.SetResourceVersion("")
	o.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	var subjects []rbacv1.Subject
	switch o := o.(type) {
	case *rbacv1.RoleBinding:
		subjects = o.Subjects
	case *rbacv1.ClusterRoleBinding:
		subjects = o.Subjects
	}
	for i := range subjects {
		subjects[i].APIGroup = ""
	}
	out, err := json.MarshalIndent(o, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// The kubelets' configuration has no field that kubelets and kubeadm two minors
// older do not know: such a field would appear here with a new Kubernetes.
func TestKubeletConfigIsKnownToOlderKubelets(t *testing.T) {
	c := testCluster(t)
	cc, err := c.cfg.clusterConfiguration(c.coreDNS, c.kubeProxy)
	if err != nil {
		t.Fatal(err)
	}
	objects, err := c.cfg.joinObjects(cc)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		if c.describe(o) != "configmaps kube-system/"+constants.KubeletBaseConfigurationConfigMap {
			continue
		}
		golden := filepath.Join("testdata", "kubelet-config.json")
		got := canonical(t, o) + "\n"
		if os.Getenv("UPDATE_GOLDEN") != "" {
			if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("kubelet-config is\n%swant\n%sCheck new fields against kubelets two minors older, then run with UPDATE_GOLDEN=1.", got, want)
		}
	}
}

// What kubeadm wrote is replaced by what a newer one would; what users have edited stays.
func TestKubeadmConfigKeepsEdits(t *testing.T) {
	const head = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\n"
	for name, tt := range map[string]struct{ have, want, merged []string }{
		"new version":       {[]string{"kubernetesVersion: v1.36.3"}, []string{"kubernetesVersion: v1.37.1"}, []string{"kubernetesVersion: v1.37.1"}},
		"user's repository": {[]string{"imageRepository: r.test", "kubernetesVersion: v1.36.3"}, []string{"kubernetesVersion: v1.37.1", "imageRepository: registry.k8s.io"}, []string{"imageRepository: r.test", "kubernetesVersion: v1.37.1"}},
		"unreadable":        {[]string{"{"}, []string{"kubernetesVersion: v1.37.1"}, []string{"kubernetesVersion: v1.37.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := mergeKubeadmConfig(head+strings.Join(tt.have, "\n"), head+strings.Join(tt.want, "\n"))
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range tt.merged {
				if !strings.Contains(got, line) {
					t.Errorf("merged configuration lacks %q:\n%s", line, got)
				}
			}
		})
	}
}

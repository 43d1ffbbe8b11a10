// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/e2e/proc"
)

// TestTenantctl runs what users type: tenantctl, and kubectl on the system plane.
func TestTenantctl(t *testing.T) {
	h := startHost(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T, *host)
	}{
		{"Empty", testEmpty},
		{"Add", testAdd},
		{"AddFile", testAddFile},
		{"Mistakes", testMistakes},
		{"List", testList},
		{"Get", testGet},
		{"Kubeconfig", testKubeconfig},
		{"MergeKubeconfig", testMergeKubeconfig},
		{"JoinCommand", testJoinCommand},
		{"Completion", testCompletion},
		{"Kubectl", testKubectl},
		{"CredentialsAreGuarded", testCredentialsAreGuarded},
		{"Remove", testRemove},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, h.of(t)) })
	}
}

// fails runs tenantctl, which must end with a code and one line that says each
// of want.
func (h *host) fails(code int, want []string, args ...string) {
	h.t.Helper()
	r := h.tenantctl(args...)
	if r.code != code || r.stdout != "" || strings.Count(r.stderr, "\n") != 1 {
		h.t.Errorf("tenantctl %s: code %d, want %d, and one line\n%s%s", strings.Join(args, " "), r.code, code, r.stdout, r.stderr)
	}
	contains(h.t, "tenantctl "+strings.Join(args, " "), r.stderr, want...)
}

// columns are the words of the lines of a table.
func columns(table string) [][]string {
	var rows [][]string
	for line := range strings.Lines(table) {
		rows = append(rows, strings.Fields(line))
	}
	return rows
}

// read reads a Tenant from the system plane.
func (h *host) read(name string) *v1alpha1.Tenant {
	h.t.Helper()
	tenant := &v1alpha1.Tenant{}
	if err := json.Unmarshal([]byte(h.mustTenantctl("get", name, "-o", "json")), tenant); err != nil {
		h.t.Fatal(err)
	}
	return tenant
}

func testEmpty(t *testing.T, h *host) {
	r := h.tenantctl("list")
	if r.code != 0 || r.stdout != "" || !strings.Contains(r.stderr, "tenantctl add NAME") {
		t.Errorf("a list of nothing: %+v", r)
	}
	var list v1alpha1.TenantList
	if err := json.Unmarshal([]byte(h.mustTenantctl("list", "-o", "json")), &list); err != nil || list.Kind != "TenantList" || len(list.Items) != 0 {
		t.Errorf("a list of nothing in JSON: %+v, %v", list, err)
	}
	h.fails(3, []string{`"nobody" does not exist`, "tenantctl list"}, "get", "nobody")
	h.fails(3, []string{`"nobody" does not exist`}, "kubeconfig", "nobody")
	h.fails(3, []string{`"nobody" does not exist`}, "join-command", "nobody")
	h.fails(3, []string{`"nobody" does not exist`}, "remove", "nobody", "--yes")
}

func testAdd(t *testing.T, h *host) {
	r := h.tenantctl("add", "acme", "--timeout", patience.String())
	if want := fmt.Sprintf("tenant acme is ready at https://acme.%s:%d\n", domain, h.portNumber()); r.code != 0 || r.stdout != want {
		t.Fatalf("code %d, %q, want %q\n%s", r.code, r.stdout, want, r.stderr)
	}
	// Not on a terminal: a line for each change, none twice, the last one good.
	lines := strings.Split(strings.TrimSpace(r.stderr), "\n")
	for i, line := range lines {
		if !strings.HasPrefix(line, "acme: ") || strings.ContainsAny(line, "\r\x1b") {
			t.Errorf("progress line %q", line)
		}
		if strings.Contains(line, "Starting: Starting") {
			t.Errorf("progress line says it twice: %q", line)
		}
		if i > 0 && line == lines[i-1] {
			t.Errorf("progress line twice: %q", line)
		}
	}
	if len(lines) < 2 || lines[len(lines)-1] != "acme: Ready" {
		t.Errorf("progress ends with %q", lines)
	}
	h.fails(1, []string{`"acme" exists already`, "tenantctl get acme"}, "add", "acme")

	r = h.tenantctl("add", "quick", "--wait=false", "--hostname", "quick.example.org", "--konnectivity-hostname", "tunnel.example.org",
		"--pod-cidr", "10.1.0.0/16", "--service-cidr", "10.2.0.0/20", "--cert-san", "192.0.2.1", "--cert-san", "*.example.net", "--replicas", "2")
	if r.code != 0 || r.stdout != "tenant quick added\n" || r.stderr != "" {
		t.Fatalf("add --wait=false: %+v", r)
	}
	spec := h.read("quick").Spec
	if spec.Hostname != "quick.example.org" || spec.KonnectivityHostname != "tunnel.example.org" || spec.Network.PodCIDR != "10.1.0.0/16" ||
		spec.Network.ServiceCIDR != "10.2.0.0/20" || !slices.Equal(spec.CertSANs, []string{"192.0.2.1", "*.example.net"}) || spec.Replicas != 2 {
		t.Errorf("the flags made %+v", spec)
	}
	mustKubectl(t, h.adminKubeconfig(), "", "wait", "--for=condition=Ready", "tenant/quick", "--timeout", patience.String())
	// What was asked for is in the certificate, and both names lead there.
	for _, name := range []string{"quick.example.org", "tunnel.example.org"} {
		p := &port{host: h}
		conn, err := p.handshake(p.insecure(name))
		if err != nil {
			t.Errorf("name %s: %v", name, err)
			continue
		}
		for _, name := range []string{name, "192.0.2.1", "any.example.net"} {
			if err := conn.ConnectionState().PeerCertificates[0].VerifyHostname(name); err != nil {
				t.Error(err)
			}
		}
	}
	if c := meta.FindStatusCondition(h.read("quick").Status.Conditions, v1alpha1.ConditionPlaced); c == nil || c.Status != metav1.ConditionFalse || c.Reason != v1alpha1.ReasonTooFewHosts {
		t.Errorf("two replicas on one host: %+v", c)
	}
	h.mustTenantctl("remove", "quick", "--yes")
}

func testAddFile(t *testing.T, h *host) {
	const file = "apiVersion: tenantd.io/v1alpha1\nkind: Tenant\nmetadata: {name: filed, labels: {team: blue}}\nspec:\n  network: {serviceCIDR: 10.9.0.0/24}\n  limits: {storage: 64Mi}\n"
	path := filepath.Join(t.TempDir(), "tenant.yaml")
	write := func(content string) {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(file)
	// A flag wins over the file.
	h.mustTenantctl("add", "-f", path, "--service-cidr", "10.8.0.0/24", "--wait=false")
	filed := h.read("filed")
	if filed.Spec.Network.ServiceCIDR != "10.8.0.0/24" || filed.Spec.Limits.Storage.String() != "64Mi" || filed.Labels["team"] != "blue" {
		t.Errorf("the file made %+v", filed)
	}
	// What get prints, add reads.
	out := strings.ReplaceAll(h.mustTenantctl("get", "filed", "-o", "yaml"), "filed", "copied")
	if r := execute(t, out, h.system(), "tenantctl", "add", "-f", "-", "--wait=false"); r.code != 0 {
		t.Errorf("add what was got: %s", r.stderr)
	}
	write(strings.Replace(file, "serviceCIDR", "serviceCidr", 1))
	h.fails(2, []string{path, "serviceCidr"}, "add", "-f", path)
	write(file)
	h.fails(2, []string{`"filed"`, `"other"`}, "add", "other", "-f", path)
	for _, name := range []string{"filed", "copied"} {
		h.mustTenantctl("remove", name, "--yes")
	}
}

// testMistakes shows that each mistake is one line with the field and the remedy,
// and leaves nothing behind.
func testMistakes(t *testing.T, h *host) {
	for _, test := range []struct {
		code int
		want string
		args []string
	}{
		{2, "name the tenant", []string{"add"}},
		{2, "metadata.name: must be a DNS label", []string{"add", "Acme"}},
		{2, "metadata.name: must be a DNS label", []string{"add", strings.Repeat("a", 41)}},
		{2, "metadata.name: must be a DNS label", []string{"add", "a.b"}},
		{2, "'system' is reserved", []string{"add", "system"}},
		{2, `is the name of tenant "acme" already`, []string{"add", "bad", "--hostname", "acme." + domain}},
		{2, "is the name of the system plane already", []string{"add", "bad", "--hostname", "system." + domain}},
		{2, `is the name of tenant "acme" already`, []string{"add", "bad", "--konnectivity-hostname", "acme." + domain}},
		{2, "spec.hostname", []string{"add", "bad", "--hostname", "Not_A_Name"}},
		{2, "spec.hostname", []string{"add", "bad", "--hostname", "192.0.2.1"}},
		{2, "spec.network.podCIDR", []string{"add", "bad", "--pod-cidr", "10.0.0.0/40"}},
		{2, "spec.network.podCIDR", []string{"add", "bad", "--pod-cidr", "10.0.0.1/16"}},
		{2, "spec.network.serviceCIDR", []string{"add", "bad", "--service-cidr", "10.244.1.0/24"}},
		{2, "spec.network.serviceCIDR", []string{"add", "bad", "--service-cidr", "fd00::/112"}},
		{2, "spec.certSANs", []string{"add", "bad", "--cert-san", "no name"}},
		{2, "spec.replicas", []string{"add", "bad", "--replicas", "0"}},
		{2, "--timeout", []string{"add", "bad", "--timeout", "0s"}},
		{2, "unknown flag", []string{"add", "bad", "--colour", "red"}},
		{2, "unknown command", []string{"ad", "bad"}},
		{2, "no-such-file", []string{"add", "-f", "no-such-file"}},
		{2, "", []string{"kubeconfig", "acme", "--ttl", "1s"}},
		{2, "", []string{"kubeconfig", "acme", "--group", "devs"}},
		{2, "", []string{"kubeconfig", "acme", "--server", "http://192.0.2.1"}},
		{2, "--yes", []string{"remove", "acme"}},
		{2, "must be table, wide, json, yaml, name", []string{"list", "-o", "xml"}},
		{1, "no kubeconfig of the system plane at /does/not/exist", []string{"list", "--kubeconfig", "/does/not/exist"}},
	} {
		h.fails(test.code, []string{test.want}, test.args...)
	}
	if got := h.mustTenantctl("list", "-o", "name"); got != "tenant.tenantd.io/acme\n" {
		t.Errorf("after all mistakes there are %s", got)
	}
	// Credentials without rights.
	weak := filepath.Join(t.TempDir(), "weak.kubeconfig")
	raw := strings.ReplaceAll(h.mustTenantctl("kubeconfig", "acme"), "acme."+domain, "system."+domain)
	if err := os.WriteFile(weak, []byte(raw), 0o600); err != nil {
		t.Fatal(err)
	}
	h.fails(1, []string{"not the system plane that the kubeconfig is for", "admin.kubeconfig"}, "list", "--kubeconfig", weak)
	// A host that is not there.
	raw = strings.ReplaceAll(raw, h.listen, proc.FreeAddress(t))
	if err := os.WriteFile(weak, []byte(raw), 0o600); err != nil {
		t.Fatal(err)
	}
	h.fails(1, []string{"cannot reach the system plane", "is tenantd running"}, "list", "--kubeconfig", weak)
}

func testList(t *testing.T, h *host) {
	version := kubernetesVersion
	for format, want := range map[string][][]string{
		"table": {{"NAME", "HOSTNAME", "PHASE", "HOST", "VERSION", "AGE"}, {"acme", "acme." + domain, "Ready", "host-a", version}},
		"wide": {{"NAME", "HOSTNAME", "PHASE", "HOST", "VERSION", "AGE", "REPLICAS", "NODES", "STORAGE", "MEMORY"},
			{"acme", "acme." + domain, "Ready", "host-a", version}},
	} {
		got := columns(h.mustTenantctl("list", "-o", format))
		if len(got) != 2 || !slices.Equal(got[0], want[0]) || len(got[1]) != len(want[0]) || !slices.Equal(got[1][:5], want[1]) {
			t.Errorf("list -o %s: %q", format, got)
			continue
		}
		if format == "wide" && (got[1][6] != "1" || got[1][7] != "0" || !strings.HasSuffix(got[1][8], "Mi") || !strings.HasSuffix(got[1][9], "Mi")) {
			t.Errorf("list -o wide: %q", got[1])
		}
	}
	if a, b := h.mustTenantctl("list"), h.mustTenantctl("list", "-o", "table"); !slices.Equal(columns(a)[0], columns(b)[0]) {
		t.Errorf("list without a format:\n%s", a)
	}
	if got := h.mustTenantctl("list", "-o", "name"); got != "tenant.tenantd.io/acme\n" {
		t.Errorf("list -o name: %q", got)
	}
	for format, read := range map[string]func([]byte, any) error{
		"json": json.Unmarshal,
		"yaml": func(raw []byte, into any) error { return yaml.UnmarshalStrict(raw, into) },
	} {
		var list v1alpha1.TenantList
		if err := read([]byte(h.mustTenantctl("list", "-o", format)), &list); err != nil {
			t.Errorf("list -o %s: %v", format, err)
			continue
		}
		if list.APIVersion != "tenantd.io/v1alpha1" || list.Kind != "TenantList" || len(list.Items) != 1 || list.Items[0].Kind != "Tenant" || list.Items[0].Name != "acme" {
			t.Errorf("list -o %s: %+v", format, list)
		}
	}
	// kubectl shows the same.
	for _, format := range []string{"", "wide"} {
		ours, theirs := columns(h.mustTenantctl("list", "-o", max(format, "table"))), columns(mustKubectl(t, h.adminKubeconfig(), "", "get", "tenants", "-o", format))
		if len(theirs) != 2 || !slices.Equal(ours[0], theirs[0]) || !slices.Equal(ours[1][:5], theirs[1][:5]) {
			t.Errorf("tenantctl lists\n%q\nkubectl\n%q", ours, theirs)
		}
	}
}

func testGet(t *testing.T, h *host) {
	table := columns(h.mustTenantctl("get", "acme"))
	if len(table) < 9 || table[1][0] != "acme" || len(table[2]) != 0 || !slices.Equal(table[3], []string{"CONDITION", "STATUS", "SINCE", "REASON", "MESSAGE"}) {
		t.Fatalf("get: %q", table)
	}
	tenant := h.read("acme")
	for _, name := range []string{
		v1alpha1.ConditionReady, v1alpha1.ConditionPlaced, v1alpha1.ConditionCertificatesIssued, v1alpha1.ConditionControlPlaneAvailable, v1alpha1.ConditionStorageWithinQuota,
	} {
		c := meta.FindStatusCondition(tenant.Status.Conditions, name)
		if c == nil || c.Status != metav1.ConditionTrue || c.Reason != v1alpha1.ReasonAsExpected || c.ObservedGeneration != tenant.Generation || !strings.HasSuffix(c.Message, ".") {
			t.Errorf("condition %s: %+v", name, c)
		}
		if !slices.ContainsFunc(table[4:], func(row []string) bool { return row[0] == name && row[1] == "True" }) {
			t.Errorf("get does not show condition %s: %q", name, table)
		}
	}
	s := tenant.Status
	if want := fmt.Sprintf("acme.%s:%d", domain, h.portNumber()); s.Endpoint != want || s.Phase != v1alpha1.TenantReady || s.Version != kubernetesVersion || !slices.Equal(s.Placement, []string{"host-a"}) {
		t.Errorf("the status is %+v", s)
	}
	if s.Nodes == nil || *s.Nodes != 0 || s.Storage == nil || s.Storage.Value() <= 0 || s.Memory == nil || s.Memory.Value() <= 0 {
		t.Errorf("the status has nodes %v, storage %v, memory %v", s.Nodes, s.Storage, s.Memory)
	}
	if got := h.mustTenantctl("get", "acme", "-o", "name"); got != "tenant.tenantd.io/acme\n" {
		t.Errorf("get -o name: %q", got)
	}
	var read v1alpha1.Tenant
	if err := yaml.UnmarshalStrict([]byte(h.mustTenantctl("get", "acme", "-o", "yaml")), &read); err != nil || read.Kind != "Tenant" || read.Spec.Hostname != "acme."+domain {
		t.Errorf("get -o yaml: %v, %+v", err, read)
	}
	if got := columns(h.mustTenantctl("get", "acme", "-o", "wide")); len(got[0]) != 10 || len(got[1]) != 10 {
		t.Errorf("get -o wide: %q", got[:2])
	}
}

// certificateOf is the client certificate in a kubeconfig's current context.
func certificateOf(t testing.TB, kubeconfig string) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(restConfig(t, kubeconfig).CertData)
	if block == nil {
		t.Fatalf("%s has no client certificate", kubeconfig)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func testKubeconfig(t *testing.T, h *host) {
	for _, test := range []struct {
		user   string
		groups []string
		hours  int
		args   []string
	}{
		{"kubernetes-admin", []string{"system:masters"}, 365 * 24, nil},
		{"jane", []string{}, 24, []string{"--user", "jane"}},
		{"jane", []string{"devs", "ops"}, 8, []string{"--user", "jane", "--group", "devs", "--group", "ops", "--ttl", "8h"}},
	} {
		file := h.kubeconfig("acme", test.args...)
		info, err := os.Stat(file)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("the file has mode %v, %v", info.Mode(), err)
		}
		cert := certificateOf(t, file)
		groups := slices.Sorted(slices.Values(cert.Subject.Organization))
		if cert.Subject.CommonName != test.user || !slices.Equal(groups, test.groups) {
			t.Errorf("%v: the certificate is of %s", test.args, cert.Subject)
		}
		// From a little before now, for clocks that differ.
		if life := cert.NotAfter.Sub(cert.NotBefore); life < time.Duration(test.hours)*time.Hour || life > time.Duration(test.hours)*time.Hour+time.Hour {
			t.Errorf("%v: it is valid for %s, want %d hours", test.args, life, test.hours)
		}
		if got := whoami(t, client(t, file)).Status.UserInfo; got.Username != test.user {
			t.Errorf("%v: the tenant sees %+v", test.args, got)
		}
	}
	// Without --output it is printed, and nothing else.
	if _, err := clientcmd.Load([]byte(h.mustTenantctl("kubeconfig", "acme"))); err != nil {
		t.Errorf("what is printed is no kubeconfig: %v", err)
	}
	cfg := restConfig(t, h.kubeconfig("acme", "--server", "https://192.0.2.1:6443"))
	if cfg.Host != "https://192.0.2.1:6443" || cfg.ServerName != "acme."+domain {
		t.Errorf("--server makes %s for %s", cfg.Host, cfg.ServerName)
	}
}

func testMergeKubeconfig(t *testing.T, h *host) {
	file := filepath.Join(t.TempDir(), "config")
	const mine = "apiVersion: v1\nkind: Config\ncurrent-context: mine\nclusters: [{name: mine, cluster: {server: 'https://mine.example.com'}}]\n" +
		"users: [{name: me, user: {token: secret}}]\ncontexts: [{name: mine, context: {cluster: mine, user: me}}]\n"
	if err := os.WriteFile(file, []byte(mine), 0o600); err != nil {
		t.Fatal(err)
	}
	env := append(h.system(), "KUBECONFIG="+file)
	merge := func(args ...string) result {
		t.Helper()
		return execute(t, "", env, "tenantctl", append([]string{"kubeconfig", "acme", "--merge"}, args...)...)
	}
	for range 2 { // again: it is the same cluster
		if r := merge(); r.code != 0 || r.stdout != "" || !strings.Contains(r.stderr, file) {
			t.Fatalf("merge: %+v", r)
		}
	}
	merged, err := clientcmd.LoadFromFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if merged.Clusters["mine"] == nil || merged.AuthInfos["me"].Token != "secret" || merged.Contexts["mine"] == nil || len(merged.Contexts) != 2 || merged.CurrentContext == "mine" {
		t.Errorf("merged: %+v", merged)
	}
	if r := execute(t, "", env, "kubectl", "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}"); r.stdout != "kubernetes-admin" {
		t.Errorf("kubectl with what was merged: %+v", r)
	}
	if r := merge("--user", "jane"); r.code != 0 {
		t.Errorf("merge another user: %s", r.stderr)
	}
	if r := execute(t, "", env, "kubectl", "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}"); r.stdout != "jane" {
		t.Errorf("kubectl with another user merged: %+v", r)
	}
	// A cluster of the same name that is another one.
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(mine, "name: mine", "name: acme")), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := merge(); r.code != 1 || !strings.Contains(r.stderr, "--force") {
		t.Errorf("merge over another cluster: %+v", r)
	}
	if r := merge("--force"); r.code != 0 {
		t.Errorf("merge --force: %+v", r)
	}
}

func testJoinCommand(t *testing.T, h *host) {
	line := h.mustTenantctl("join-command", "acme", "--ttl", "2h")
	form := regexp.MustCompile(`^kubeadm join (\S+) --token ([a-z0-9]{6})\.([a-z0-9]{16}) --discovery-token-ca-cert-hash sha256:([0-9a-f]{64})\n$`)
	m := form.FindStringSubmatch(line)
	if m == nil {
		t.Fatalf("the line is %q", line)
	}
	if want := fmt.Sprintf("acme.%s:%d", domain, h.portNumber()); m[1] != want {
		t.Errorf("workers are sent to %s, not %s", m[1], want)
	}
	admin := restConfig(t, h.kubeconfig("acme"))
	block, _ := pem.Decode(admin.CAData)
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(ca.RawSubjectPublicKeyInfo); hex.EncodeToString(sum[:]) != m[4] {
		t.Errorf("the hash %s is not that of the authority's public key", m[4])
	}
	acme := clientFor(t, admin)
	secret, err := acme.CoreV1().Secrets("kube-system").Get(t.Context(), "bootstrap-token-"+m[2], metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if secret.Type != "bootstrap.kubernetes.io/token" {
		t.Errorf("the secret is of type %s", secret.Type)
	}
	for field, want := range map[string]string{
		"token-id": m[2], "token-secret": m[3], "usage-bootstrap-authentication": "true", "usage-bootstrap-signing": "true",
		"auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token",
	} {
		if got := string(secret.Data[field]); got != want {
			t.Errorf("the secret's %s is %q, want %q", field, got, want)
		}
	}
	if at, err := time.Parse(time.RFC3339, string(secret.Data["expiration"])); err != nil || at.Before(time.Now()) || at.After(time.Now().Add(2*time.Hour)) {
		t.Errorf("the token expires at %s (%v)", secret.Data["expiration"], err)
	}
	// The API server knows the token.
	cfg := rest.AnonymousClientConfig(admin)
	cfg.BearerToken = m[2] + "." + m[3]
	if got := whoami(t, clientFor(t, cfg)).Status.UserInfo; got.Username != "system:bootstrap:"+m[2] || !slices.Contains(got.Groups, "system:bootstrappers:kubeadm:default-node-token") {
		t.Errorf("the token's user is %+v", got)
	}
	if again := h.mustTenantctl("join-command", "acme"); again == line {
		t.Error("a second token is the same")
	}
}

func testCompletion(t *testing.T, h *host) {
	for _, command := range []string{"get", "remove", "kubeconfig", "join-command"} {
		if got := h.mustTenantctl("__complete", command, ""); !strings.HasPrefix(got, "acme\tacme."+domain+"\n") {
			t.Errorf("%s <TAB> gives %q", command, got)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		contains(t, "completion "+shell, h.mustTenantctl("completion", shell), "tenantctl")
	}
	contains(t, "-o <TAB>", h.mustTenantctl("__complete", "list", "-o", ""), "table\n", "wide\n", "json\n", "yaml\n", "name\n")
}

// testKubectl does with kubectl what tenantctl does.
func testKubectl(t *testing.T, h *host) {
	system := &cluster{t: t, host: h, name: "system", kubeconfig: h.adminKubeconfig()}
	contains(t, "kubectl explain", system.kubectl("explain", "tenant.spec"), "Every field has a default", "hostname\t<string>", "replicas\t<integer>", "network\t<Object>")
	contains(t, "kubectl explain", system.kubectl("explain", "tenants.status.conditions"), "lastTransitionTime")
	contains(t, "kubectl api-resources", system.kubectl("api-resources", "--api-group", "tenantd.io"), "tenants", "tn", "Tenant")

	object := func(spec string) string {
		return `{"apiVersion":"tenantd.io/v1alpha1","kind":"Tenant","metadata":{"name":"applied"},"spec":` + spec + `}`
	}
	system.feed(object(`{"limits":{"storage":"32Mi"}}`), "apply", "-f", "-")
	system.kubectl("wait", "--for=condition=Ready", "tenant/applied", "--timeout", patience.String())
	if got := system.kubectl("get", "tn", "applied", "-o", "jsonpath={.spec.hostname} {.spec.network.serviceCIDR} {.spec.limits.connections}"); got != "applied."+domain+" 10.96.0.0/16 10000" {
		t.Errorf("the defaults are %q", got)
	}
	system.feed(object(`{"limits":{"storage":"48Mi"}}`), "apply", "-f", "-")
	system.feed(object(`{"limits":{"storage":"48Mi"}}`), "apply", "--server-side", "--force-conflicts", "-f", "-")
	if got := system.kubectl("get", "tn", "applied", "-o", "jsonpath={.spec.limits.storage}"); got != "48Mi" {
		t.Errorf("after another apply the limit is %q", got)
	}
	system.refuse(object(`{"network":{"serviceCIDR":"10.97.0.0/16"}}`), []string{"spec.network.serviceCIDR", "is immutable"}, "apply", "-f", "-")
	system.refuse(object(`{"colour":"red"}`), []string{`unknown field "spec.colour"`}, "apply", "-f", "-")
	system.refuse("", []string{"acme", "already"}, "patch", "tenant", "applied", "--type", "merge", "-p", `{"spec":{"hostname":"acme.`+domain+`"}}`)
	// Status is the host's to write, and kept true.
	system.kubectl("patch", "tenant", "applied", "--subresource", "status", "--type", "merge", "-p", `{"status":{"phase":"Failed"}}`)
	system.kubectl("wait", "--for=jsonpath={.status.phase}=Ready", "tenant/applied", "--timeout", patience.String())

	// A new name takes effect, and the old one ends.
	kubeconfig := h.kubeconfig("applied")
	system.kubectl("patch", "tenant", "applied", "--type", "merge", "-p", `{"spec":{"hostname":"renamed.`+domain+`"}}`)
	eventually(t, "the tenant has its new name", func() error {
		if r := kubectl(t, kubeconfig, "", "get", "--raw", "/version", "--tls-server-name", "renamed."+domain); r.code != 0 {
			return fmt.Errorf("%s", r.stderr)
		}
		return nil
	})
	if r := kubectl(t, kubeconfig, "", "get", "--raw", "/version"); r.code == 0 || !strings.Contains(r.stderr, "unrecognized name") {
		t.Errorf("under the old name: %+v", r)
	}
	system.kubectl("wait", "--for=condition=Ready", "tenant/applied", "--timeout", patience.String())
	system.kubectl("delete", "tenant", "applied", "--wait", "--timeout", patience.String())
	system.refuse("", []string{"NotFound"}, "get", "tenant", "applied")
	if _, err := (&port{host: h}).handshake((&port{host: h}).insecure("renamed." + domain)); err == nil || !strings.Contains(err.Error(), "unrecognized name") {
		t.Errorf("a removed tenant's name: %v", err)
	}
}

// testCredentialsAreGuarded shows that RBAC in the system plane decides who gets
// credentials of tenants.
func testCredentialsAreGuarded(t *testing.T, h *host) {
	system := &cluster{t: t, host: h, name: "system", kubeconfig: h.adminKubeconfig()}
	system.kubectl("create", "serviceaccount", "helper", "-n", "default")
	// There is no controller here that would give it a token of its own accord.
	token := strings.TrimSpace(system.kubectl("create", "token", "helper", "-n", "default"))
	cfg := rest.AnonymousClientConfig(restConfig(t, system.kubeconfig))
	cfg.BearerToken = token
	helper := []string{"TENANTCTL_KUBECONFIG=" + writeKubeconfig(t, cfg)}
	run := func(args ...string) result { return execute(t, "", helper, "tenantctl", args...) }
	system.kubectl("create", "clusterrole", "readers", "--verb", "get,list", "--resource", "tenants.tenantd.io")
	system.kubectl("create", "clusterrolebinding", "readers", "--clusterrole", "readers", "--serviceaccount", "default:helper")
	eventually(t, "the helper may list", func() error {
		if r := run("list"); r.code != 0 {
			return fmt.Errorf("%s", r.stderr)
		}
		return nil
	})
	for _, args := range [][]string{{"kubeconfig", "acme"}, {"join-command", "acme"}, {"remove", "acme", "--yes"}, {"add", "more"}} {
		if r := run(args...); r.code != 1 || !strings.Contains(r.stderr, "forbidden") || r.stdout != "" {
			t.Errorf("without a right, tenantctl %q: %+v", args, r)
		}
	}
	system.feed(`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRole","metadata":{"name":"joiners"},"rules":[
		{"apiGroups":["credentials.tenantd.io"],"resources":["tenants/jointoken"],"verbs":["create"]}]}`, "create", "-f", "-")
	system.kubectl("create", "clusterrolebinding", "joiners", "--clusterrole", "joiners", "--serviceaccount", "default:helper")
	eventually(t, "the helper may have join tokens", func() error {
		if r := run("join-command", "acme"); r.code != 0 {
			return fmt.Errorf("%s", r.stderr)
		}
		return nil
	})
	if r := run("kubeconfig", "acme"); r.code != 1 {
		t.Errorf("the right to join tokens gives kubeconfigs too: %+v", r)
	}
}

func testRemove(t *testing.T, h *host) {
	h.add("doomed")
	h.fails(2, []string{"--yes"}, "remove", "doomed")
	h.read("doomed")
	r := h.tenantctl("remove", "doomed", "--yes", "--timeout", patience.String())
	if r.code != 0 || r.stdout != "tenant doomed removed\n" {
		t.Fatalf("remove: %+v", r)
	}
	h.fails(3, []string{"does not exist"}, "get", "doomed")
	// A successor of the name has nothing of it, not even its authority.
	kubeconfig := h.add("doomed")
	if got := mustKubectl(t, kubeconfig, "", "get", "namespaces", "-o", "name"); strings.Count(got, "\n") != 4 {
		t.Errorf("the successor has the namespaces %s", got)
	}
	if r := h.tenantctl("remove", "doomed", "--yes", "--wait=false"); r.code != 0 || r.stdout != "tenant doomed is being removed\n" {
		t.Errorf("remove --wait=false: %+v", r)
	}
	mustKubectl(t, h.adminKubeconfig(), "", "wait", "--for=delete", "tenant/doomed", "--timeout", patience.String())
}

// system is the environment in which tenantctl finds the system plane.
func (h *host) system() []string { return []string{"TENANTCTL_KUBECONFIG=" + h.adminKubeconfig()} }

// portNumber is the number of the one port.
func (h *host) portNumber() int {
	h.t.Helper()
	_, number, _ := strings.Cut(h.listen, ":")
	n, err := strconv.Atoi(number)
	if err != nil {
		h.t.Fatal(err)
	}
	return n
}

// TestDemo runs what `make demo` does, types what it says, and ends it.
func TestDemo(t *testing.T) {
	d := startDemo(t)
	d.await("== Ctrl-C stops the host")
	said := d.output.String()
	for _, want := range []string{"tenant alpha is ready", "tenant beta is ready", "\nalpha\n", "\nbeta\n", "Server Version: " + kubernetesVersion} {
		if !strings.Contains(said, want) {
			t.Errorf("the demo does not say %q:\n%s", want, said)
		}
	}
	// What it says to type works, as it stands, in a shell in that directory.
	_, typed, _ := strings.Cut(said, "type:\n")
	typed, _, _ = strings.Cut(typed, "\n  http://")
	commands := 0
	for line := range strings.Lines(typed) {
		if strings.HasPrefix(line, "  ") {
			commands++
		}
	}
	if commands < 6 {
		t.Errorf("the demo says to type %d commands only:\n%s", commands, typed)
	}
	shell := exec.CommandContext(t.Context(), "sh", "-eux", "-c", strings.ReplaceAll(typed, "remove beta", "remove beta --yes"))
	shell.Dir = ".."
	if out, err := shell.CombinedOutput(); err != nil || !strings.Contains(string(out), "tenant gamma is ready") || !strings.Contains(string(out), "tenant beta removed") {
		t.Errorf("what the demo says to type: %v\n%s", err, out)
	}
	// A second one in the same place leaves it alone.
	second := exec.CommandContext(t.Context(), "sh", "e2e/demo.sh")
	second.Dir, second.Env = "..", d.cmd.Env
	if out, err := second.CombinedOutput(); err == nil || !strings.Contains(string(out), "exists already") {
		t.Errorf("a second demo: %v\n%s", err, out)
	}
	d.interrupt()
}

// TestDemoInterruptedEarly ends the demo before its host is ready.
func TestDemoInterruptedEarly(t *testing.T) {
	d := startDemo(t)
	d.await("== Starting a host")
	eventually(t, "there is a host", func() error {
		_, err := d.host()
		return err
	})
	d.interrupt()
}

// demo is the demo's script as an ordinary process.
type demo struct {
	t      *testing.T
	dir    string
	cmd    *proc.Process
	output *proc.Log
}

func startDemo(t *testing.T) *demo {
	t.Helper()
	for _, name := range []string{"tenantd", "tenantctl", "kubectl"} {
		bin(t, name)
	}
	parent, err := os.MkdirTemp("", "demo")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(parent) })
	d := &demo{t: t, dir: filepath.Join(parent, "d"), output: &proc.Log{}}
	cmd := exec.Command("sh", "e2e/demo.sh")
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "DEMO_DIR="+d.dir, "DEMO_LISTEN="+proc.FreeAddress(t), "DEMO_HEALTH="+proc.FreeAddress(t))
	cmd.Stdout, cmd.Stderr = d.output, d.output
	cmd.WaitDelay = time.Minute // the host has none of its pipes
	d.cmd = proc.Start(t, cmd)
	t.Cleanup(func() {
		d.cmd.Process.Signal(syscall.SIGTERM)
		<-d.cmd.Exited
		if t.Failed() {
			t.Logf("the demo:\n%s", d.output.Tail(60))
		}
	})
	return d
}

// await waits until the demo says something.
func (d *demo) await(text string) {
	d.t.Helper()
	eventually(d.t, "the demo says "+text, func() error {
		if d.cmd.Ended() {
			d.t.Fatalf("the demo ended: %s\n%s", d.cmd.ProcessState, d.output)
		}
		if !strings.Contains(d.output.String(), text) {
			return io.EOF
		}
		return nil
	})
}

// host is the process id of the demo's host, which its lock has.
func (d *demo) host() (int, error) {
	lock, err := os.ReadFile(filepath.Join(d.dir, "data", "lock"))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(lock)))
}

// interrupt presses Ctrl-C, after which nothing of the demo may be left.
func (d *demo) interrupt() {
	d.t.Helper()
	host, err := d.host()
	if err != nil {
		d.t.Fatal(err)
	}
	if err := d.cmd.Process.Signal(os.Interrupt); err != nil {
		d.t.Fatal(err)
	}
	if !d.cmd.EndsWithin(patience) {
		d.t.Fatalf("the demo goes on after Ctrl-C:\n%s", d.output)
	}
	if code := d.cmd.ProcessState.ExitCode(); code != 0 {
		d.t.Errorf("the demo exits with %d:\n%s", code, d.output)
	}
	if !strings.HasSuffix(d.output.String(), "== Cleaned up: "+d.dir+" is gone\n") {
		d.t.Errorf("the demo's last words are:\n%s", d.output.Tail(3))
	}
	if _, err := os.Stat(d.dir); !os.IsNotExist(err) {
		d.t.Errorf("the demo's directory is left: %v", err)
	}
	if err := syscall.Kill(host, 0); err != syscall.ESRCH {
		d.t.Errorf("the demo's host goes on: %v", err)
	}
}

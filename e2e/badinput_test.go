// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/e2e/proc"
)

// TestBadStart starts hosts that must not start. Each says why in one line and
// leaves everything as it was.
func TestBadStart(t *testing.T) {
	t.Parallel()
	// A real installation with something to lose, and one to mix it up with.
	h := startHost(t)
	kubeconfig := h.add("acme")
	put(t, client(t, kubeconfig), "keepsake", "acme")
	t.Run("data directory in use", func(t *testing.T) {
		second := h.of(t)
		second.listen, second.health = proc.FreeAddress(t), proc.FreeAddress(t)
		second.mustNotStart(1, nil, h.dir, "in use by another tenantd", fmt.Sprint("process ", h.cmd.Process.Pid), "--data-dir")
		if err := holds(client(t, kubeconfig), map[string]string{"keepsake": "acme"}); err != nil {
			t.Errorf("the host that has the directory: %v", err)
		}
	})
	t.Run("port in use by another host", func(t *testing.T) {
		second := newHost(t)
		second.listen = h.listen
		second.mustNotStart(1, nil, h.listen, "address already in use", "choose another address")
	})
	h.stop()
	other := startHost(t)
	other.stop()

	for _, test := range []struct {
		name    string
		prepare func(t *testing.T, h *host)
		attr    *syscall.SysProcAttr
		code    int // 0 means 1
		want    []string
	}{
		{name: "port in use", prepare: func(t *testing.T, h *host) { occupy(t, h.listen) },
			want: []string{h.listen, "address already in use", "choose another address"}},
		{name: "health port in use", prepare: func(t *testing.T, h *host) { occupy(t, h.health) },
			want: []string{h.health, "address already in use", "choose another address"}},
		{name: "address of another machine", prepare: with("--listen", "192.0.2.1:8443"),
			want: []string{"192.0.2.1:8443", "this machine has no such address"}},
		{name: "address that is none", prepare: with("--listen", "8443"), code: 2,
			want: []string{"listen", `"8443"`, "[HOST]:PORT"}},
		{name: "flag that is none", prepare: with("--listne", ":8443"), code: 2,
			want: []string{"--listne", "tenantd run --help"}},
		{name: "argument too many", prepare: with("now"), code: 2,
			want: []string{`"now"`, "tenantd run --help"}},
		{name: "domain of another installation", prepare: with("--domain", "other.test"),
			want: []string{h.dir, `"` + domain + `"`, "--domain " + domain}},
		{name: "domain that is none", prepare: with("--domain", "not_a_domain"), code: 2,
			want: []string{"domain", `"not_a_domain"`, "DNS name"}},
		{name: "data directory of something else", prepare: func(t *testing.T, h *host) {
			h.dir = t.TempDir()
			writeFile(t, filepath.Join(h.dir, "precious.db"), "precious")
		}, want: []string{"precious.db", "--data-dir"}},
		{name: "data directory is a file", prepare: func(t *testing.T, h *host) {
			h.dir = filepath.Join(t.TempDir(), "file")
			writeFile(t, h.dir, "precious")
		}, want: []string{"not a directory", "--data-dir"}},
		{name: "data directory may not be written", prepare: func(t *testing.T, h *host) {
			h.dir = filepath.Join(t.TempDir(), "sealed")
			if err := os.Mkdir(h.dir, 0o500); err != nil {
				t.Fatal(err)
			}
		}, attr: unprivileged(), want: []string{"permission denied", "--data-dir"}},
		{name: "newer format", prepare: rewrite("installation.json", func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"format": 1`), []byte(`"format": 1000`), 1)
		}), want: []string{h.dir, "newer tenantd", "format 1000", "start it with that version"}},
		{name: "damaged installation.json", prepare: rewrite("installation.json", func(b []byte) []byte { return b[:len(b)/2] }),
			want: []string{"installation.json", "damaged", "backup"}},
		{name: "store of another installation", prepare: func(t *testing.T, h *host) {
			swap(t, h.file("etcd"), other.file("etcd"))
		}, want: []string{h.dir, "restore both from one backup"}},
		{name: "other installation's sealing key", prepare: func(t *testing.T, h *host) {
			swap(t, h.file("sealing.key"), other.file("sealing.key"))
		}, want: []string{"put back the sealing key"}},
		{name: "lost sealing key", prepare: func(t *testing.T, h *host) {
			swap(t, h.file("sealing.key"), filepath.Join(t.TempDir(), "kept"))
		}, want: []string{h.file("sealing.key"), "put it back from a backup"}},
		{name: "short sealing key", prepare: rewrite("sealing.key", func(b []byte) []byte { return b[:16] }),
			want: []string{h.file("sealing.key"), "16 bytes", "exactly 32", "backup"}},
		{name: "sealing key for all to read", prepare: func(t *testing.T, h *host) { chmod(t, h.file("sealing.key"), 0o644) },
			want: []string{h.file("sealing.key"), "chmod 0600"}},
		{name: "sealing key may not be read", prepare: func(t *testing.T, h *host) { chmod(t, h.file("sealing.key"), 0) },
			attr: unprivileged(), want: []string{h.file("sealing.key"), "permission denied"}},
		{name: "sealing key is a directory", prepare: func(t *testing.T, h *host) { h.args = []string{"--sealing-key-file", t.TempDir()} },
			want: []string{"sealing key", "not a regular file"}},
		{name: "configuration that is not there", prepare: with("--config", "/nowhere/config.yaml"),
			want: []string{"/nowhere/config.yaml", "no such file"}},
		{name: "configuration with an unknown field", prepare: configured("limits:\n  maxPendnig: 5\n"),
			want: []string{"config.yaml:4: limits.maxPendnig: unknown field", "maxPending"}},
		{name: "configuration with a bad value", prepare: configured("logLevel: info\nhealthListen: nowhere\n"),
			want: []string{"config.yaml:4: healthListen", `"nowhere"`, "[HOST]:PORT"}},
		{name: "configuration with a value of a wrong type", prepare: configured("limits: {maxPending: many}\n"),
			want: []string{"config.yaml:3: limits.maxPending", `"many"`, "whole number"}},
		{name: "configuration of another kind", prepare: func(t *testing.T, h *host) {
			file := filepath.Join(t.TempDir(), "config.yaml")
			writeFile(t, file, "apiVersion: tenantd.io/v1alpha1\nkind: Tenant\n")
			h.args = []string{"--config", file}
		}, want: []string{"config.yaml:2: kind", `"Tenant"`, "HostConfiguration"}},
		{name: "configuration that is not YAML", prepare: configured("limits: [\n"),
			want: []string{"config.yaml:", "not YAML"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := h.of(t)
			test.prepare(t, h)
			h.mustNotStart(max(test.code, 1), test.attr, test.want...)
		})
	}

	h.start()
	h.awaitReady()
	eventually(t, "the installation works as before", func() error {
		return holds(client(t, kubeconfig), map[string]string{"keepsake": "acme"})
	})
}

// TestFullDisk lets the disk run full at several moments of the first start, and
// while the host runs.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	inMountNamespace(t, func(mount func(dir, option string)) {
		h := newHost(t)
		disk := filepath.Dir(h.dir)
		// One directory all the time: what a start leaves must not stop the next.
		for _, size := range []string{"4k", "8k", "16k", "32k", "64k", "256k", "4m", "40m"} {
			mount(disk, "size="+size)
			h.mustEnd(1, nil, "no space left on device", "free space")
		}
		mount(disk, "size=400m")
		h.start()
		h.awaitReady()
		c := client(t, h.add("acme"))

		ballast := filepath.Join(disk, "ballast")
		fill(t, ballast)
		acknowledged := map[string]string{}
		for i := 0; ; i++ {
			name, value := fmt.Sprintf("write-%d", i), strings.Repeat("x", 100<<10)
			if _, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), configMap(name, value), metav1.CreateOptions{}); err != nil {
				break
			}
			acknowledged[name] = value
		}
		if code := h.wait(); code != 1 {
			t.Errorf("on a full disk the host exited with %d, want 1", code)
		}
		checkLastWords(t, h.log.String(), "no space left on device", "free space")
		h.mustEnd(1, nil, "no space left on device", "free space")

		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		h.start()
		h.awaitReady()
		eventually(t, "what was acknowledged is back", func() error { return holds(c, acknowledged) })
		t.Logf("%d writes were acknowledged on the full disk", len(acknowledged))
	})
}

// TestReadOnlyDisk starts hosts on a file system that cannot be written.
func TestReadOnlyDisk(t *testing.T) {
	t.Parallel()
	inMountNamespace(t, func(mount func(dir, option string)) {
		h := newHost(t)
		disk := filepath.Dir(h.dir)
		mount(disk, "ro")
		h.mustNotStart(1, nil, "read-only file system", "--data-dir")
		mount(disk, "rw")
		h.start()
		h.awaitReady()
		h.stop()
		mount(disk, "ro")
		h.mustNotStart(1, nil, "read-only file system", "--data-dir")
		mount(disk, "rw")
		h.start()
		h.awaitReady()
	})
}

// TestBadTenants asks for what must be refused, of a host with one tenant.
func TestBadTenants(t *testing.T) {
	t.Parallel()
	h := startHost(t)
	kubeconfig := h.add("acme")
	before := h.mustTenant("acme")
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		writeFile(t, path, content)
		return path
	}
	tenant := "apiVersion: tenantd.io/v1alpha1\nkind: Tenant\n"
	long := strings.Repeat("l", 41)
	kubeconfigFor := func(name string, change func(*clientcmdapi.Cluster, *clientcmdapi.AuthInfo)) string {
		config, err := clientcmd.LoadFromFile(h.adminKubeconfig())
		if err != nil {
			t.Fatal(err)
		}
		entry := config.Contexts[config.CurrentContext]
		change(config.Clusters[entry.Cluster], config.AuthInfos[entry.AuthInfo])
		path := filepath.Join(dir, name)
		if err := clientcmd.WriteToFile(*config, path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	powerless := kubeconfigFor("powerless", func(_ *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) { user.Impersonate = "nobody" })
	nowhere := kubeconfigFor("nowhere", func(c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) { c.Server = "https://" + proc.FreeAddress(t) })
	misdirected := kubeconfigFor("misdirected", func(c *clientcmdapi.Cluster, _ *clientcmdapi.AuthInfo) { c.TLSServerName = "acme." + domain })
	noRights := []string{`"nobody"`, "forbidden", "administrator"}

	for _, test := range []struct {
		name string
		args []string
		code int
		want []string
	}{
		{"name taken", []string{"add", "acme"}, 1, []string{`"acme"`, "exists already", "tenantctl get acme"}},
		{"hostname taken", []string{"add", "beta", "--hostname", "acme." + domain}, 2, []string{"spec.hostname", "acme." + domain, `tenant "acme"`, "choose another"}},
		{"hostname of the system plane", []string{"add", "beta", "--hostname", "system." + domain}, 2, []string{"spec.hostname", "the system plane"}},
		{"second hostname taken", []string{"add", "beta", "--konnectivity-hostname", "acme." + domain}, 2, []string{"spec.konnectivityHostname", `tenant "acme"`}},
		{"hostname that is none", []string{"add", "beta", "--hostname", "under_score"}, 2, []string{"spec.hostname", "under_score", "DNS name"}},
		{"hostname that is an address", []string{"add", "beta", "--hostname", "192.0.2.1"}, 2, []string{"spec.hostname", "not an IP address"}},
		{"name with capitals", []string{"add", "Acme"}, 2, []string{"metadata.name", "Acme", "lower"}},
		{"name with a dot", []string{"add", "ac.me"}, 2, []string{"metadata.name", "DNS label"}},
		{"name too long", []string{"add", long}, 2, []string{"metadata.name", "at most 40"}},
		{"name reserved", []string{"add", "system"}, 2, []string{"metadata.name", "reserved", "choose another"}},
		{"networks that overlap", []string{"add", "beta", "--pod-cidr", "10.96.0.0/16", "--service-cidr", "10.96.0.0/20"}, 2, []string{"spec.network.serviceCIDR", "overlap", "podCIDR"}},
		{"network that is none", []string{"add", "beta", "--pod-cidr", "10.0.0.0/33"}, 2, []string{"spec.network.podCIDR", "CIDR notation"}},
		{"network with host bits", []string{"add", "beta", "--service-cidr", "10.96.0.1/16"}, 2, []string{"spec.network.serviceCIDR", "no host bits"}},
		{"networks of two families", []string{"add", "beta", "--service-cidr", "fd00::/112"}, 2, []string{"spec.network.serviceCIDR", "IP family"}},
		{"replicas beyond reason", []string{"add", "beta", "--replicas", "100"}, 2, []string{"spec.replicas", "5"}},
		{"file with an unknown field", []string{"add", "-f", file("unknown.yaml", tenant+"metadata: {name: beta}\nspec:\n  hostnmae: x\n")}, 2, []string{"unknown.yaml:5: spec.hostnmae: unknown field", "hostname"}},
		{"file with a wrong type", []string{"add", "-f", file("type.yaml", tenant+"metadata: {name: beta}\nspec: {replicas: two}\n")}, 2, []string{"type.yaml:4: spec.replicas", "whole number"}},
		{"file with two objects", []string{"add", "-f", file("two.yaml", tenant+"metadata: {name: beta}\n---\n"+tenant)}, 2, []string{"two.yaml:", "more than one"}},
		{"file of another kind", []string{"add", "-f", file("kind.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: beta}\n")}, 2, []string{"kind.yaml:2: kind", "Tenant"}},
		{"file without a name", []string{"add", "-f", file("nameless.yaml", tenant)}, 2, []string{"nameless.yaml", "metadata.name"}},
		{"file with another name", []string{"add", "gamma", "-f", file("beta.yaml", tenant+"metadata: {name: beta}\n")}, 2, []string{`"beta"`, `"gamma"`}},
		{"file that is not there", []string{"add", "-f", "/nowhere/tenant.yaml"}, 2, []string{"/nowhere/tenant.yaml", "no such file"}},
		{"quota that is none", []string{"add", "-f", file("quota.yaml", tenant+"metadata: {name: beta}\nspec: {limits: {storage: -1}}\n")}, 2, []string{"spec.limits.storage", "positive"}},

		{"no command that exists", []string{"frobnicate"}, 2, []string{"frobnicate", "--help"}},
		{"no flag that exists", []string{"list", "--frobnicate"}, 2, []string{"--frobnicate", "--help"}},
		{"no tenant named", []string{"add"}, 2, []string{"name the tenant", "--help"}},
		{"no time to wait", []string{"add", "beta", "--timeout", "0s"}, 2, []string{"--timeout", "--wait=false"}},
		{"nobody to confirm", []string{"remove", "acme"}, 2, []string{"--yes"}},
		{"credentials that are too short-lived", []string{"kubeconfig", "acme", "--ttl", "1s"}, 2, []string{"--ttl", "must be"}},
		{"output of no known form", []string{"list", "-o", "xml"}, 2, []string{"xml", "json"}},

		{"get of nobody", []string{"get", "nobody"}, 3, []string{`"nobody"`, "does not exist", "tenantctl list"}},
		{"remove of nobody", []string{"remove", "nobody", "--yes"}, 3, []string{`"nobody"`, "does not exist"}},
		{"kubeconfig of nobody", []string{"kubeconfig", "nobody", "--output", filepath.Join(dir, "nobody.kubeconfig")}, 3, []string{`"nobody"`, "does not exist"}},
		{"join command of nobody", []string{"join-command", "nobody"}, 3, []string{`"nobody"`, "does not exist"}},

		{"list without rights", []string{"list", "--kubeconfig", powerless}, 1, noRights},
		{"get without rights", []string{"get", "acme", "--kubeconfig", powerless}, 1, noRights},
		{"add without rights", []string{"add", "beta", "--kubeconfig", powerless}, 1, noRights},
		{"remove without rights", []string{"remove", "acme", "--yes", "--kubeconfig", powerless}, 1, noRights},
		{"kubeconfig without rights", []string{"kubeconfig", "acme", "--kubeconfig", powerless}, 1, noRights},
		{"join command without rights", []string{"join-command", "acme", "--kubeconfig", powerless}, 1, noRights},
		{"tenant's administrator at the system plane", []string{"list", "--kubeconfig", kubeconfig}, 1, []string{"tenantd's system plane"}},
		{"credentials of the system plane at a tenant", []string{"list", "--kubeconfig", misdirected}, 1, []string{"is not the system plane", "admin.kubeconfig"}},
		{"server that is not there", []string{"list", "--kubeconfig", nowhere}, 1, []string{"cannot reach the system plane", "connection refused", "systemctl status tenantd"}},
		{"kubeconfig that is not there", []string{"list", "--kubeconfig", "/nowhere/kubeconfig"}, 1, []string{"/nowhere/kubeconfig", "TENANTCTL_KUBECONFIG"}},
		{"kubeconfig that is none", []string{"list", "--kubeconfig", file("none", "{")}, 1, []string{filepath.Join(dir, "none"), "admin.kubeconfig"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			checkRefusal(t, h.tenantctl(test.args...), "tenantctl: ", test.code, test.want...)
		})
	}

	for _, test := range []struct {
		name, stdin string
		args        []string
		want        []string
	}{
		{"immutable field", "", []string{"patch", "tenant", "acme", "--type", "merge", "--patch", `{"spec":{"network":{"podCIDR":"10.1.0.0/16"}}}`},
			[]string{"spec.network.podCIDR", "immutable", "create another tenant"}},
		{"unknown field", tenant + "metadata: {name: beta}\nspec: {hostnmae: x}\n", []string{"apply", "-f", "-"}, []string{"spec.hostnmae", "unknown field"}},
		{"change to a hostname that is taken", "", []string{"patch", "tenant", "acme", "--type", "merge", "--patch", `{"spec":{"hostname":"system.` + domain + `"}}`},
			[]string{"spec.hostname", "the system plane"}},
	} {
		t.Run("kubectl/"+test.name, func(t *testing.T) {
			r := kubectl(t, h.adminKubeconfig(), test.stdin, test.args...)
			if r.code != 1 {
				t.Errorf("exit code %d, want 1", r.code)
			}
			for _, want := range test.want {
				if !strings.Contains(r.stderr, want) {
					t.Errorf("stderr lacks %q: %s", want, r.stderr)
				}
			}
		})
	}

	t.Run("nothing half done", func(t *testing.T) {
		if have := slices.Collect(maps.Keys(h.of(t).tenantsCalled(""))); !slices.Equal(have, []string{"acme"}) {
			t.Errorf("the tenants are %q, want acme alone", have)
		}
		if after := h.of(t).mustTenant("acme"); after.UID != before.UID || after.Generation != before.Generation || after.DeletionTimestamp != nil {
			t.Errorf("acme was changed: %+v", after)
		}
		if _, err := os.Stat(filepath.Join(dir, "nobody.kubeconfig")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a kubeconfig was written for nobody: %v", err)
		}
	})

	t.Run("one hostname for many at once", func(t *testing.T) {
		h := h.of(t)
		var adding sync.WaitGroup
		var mu sync.Mutex // guards results
		results := map[string]result{}
		for i := range 6 {
			adding.Go(func() {
				name := fmt.Sprintf("rival-%d", i)
				r := h.tenantctl("add", name, "--hostname", "wanted.example.com", "--wait=false")
				mu.Lock()
				defer mu.Unlock()
				results[name] = r
			})
		}
		adding.Wait()
		var winners []string
		for name, r := range results {
			if r.code == 0 {
				winners = append(winners, name)
				continue
			}
			checkRefusal(t, r, "tenantctl: ", 2, "spec.hostname", "wanted.example.com", "choose another")
		}
		if len(winners) != 1 {
			t.Fatalf("%d tenants got the one hostname: %q", len(winners), winners)
		}
		h.mustTenantctl("remove", winners[0], "--yes")
	})

	t.Run("timeouts", func(t *testing.T) {
		h := h.of(t)
		checkRefusal(t, h.tenantctl("add", "slow", "--timeout", "1ms"), "tenantctl: ", 4, `"slow"`, "not ready after 1ms", "tenantctl get slow", "tenantctl remove slow")
		// It said that the tenant goes on starting.
		h.awaitTenant("slow")
		checkRefusal(t, h.tenantctl("remove", "slow", "--yes", "--timeout", "1ms"), "tenantctl: ", 4, `"slow"`, "not gone after 1ms", "tenantctl get slow")
		eventually(t, "the removal goes on", func() error {
			if r := h.tenantctl("get", "slow"); r.code != 3 {
				return fmt.Errorf("exit code %d: %s", r.code, r.stderr)
			}
			return nil
		})
	})
}

// checkRefusal checks that a command said what is wrong in one line, which begins
// with prefix, and nothing else but its progress.
func checkRefusal(t testing.TB, r result, prefix string, code int, want ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit code %d, want %d", r.code, code)
	}
	if r.stdout != "" {
		t.Errorf("stdout has %q, want nothing", r.stdout)
	}
	var said []string
	for line := range strings.Lines(r.stderr) {
		phase, _, _ := strings.Cut(line[strings.Index(line, ": ")+1:], ":")
		switch {
		case strings.HasPrefix(line, prefix):
			said = append(said, line)
		case !slices.Contains([]v1alpha1.TenantPhase{v1alpha1.TenantPending, v1alpha1.TenantStarting, v1alpha1.TenantReady, v1alpha1.TenantDeleting}, v1alpha1.TenantPhase(strings.TrimSpace(phase))):
			t.Errorf("stderr has a line that is neither progress nor the reason: %s", line)
		}
	}
	if len(said) != 1 {
		t.Fatalf("stderr has %d lines that say what is wrong, want one:\n%s", len(said), r.stderr)
	}
	for _, want := range want {
		if !strings.Contains(said[0], want) {
			t.Errorf("stderr lacks %q: %s", want, said[0])
		}
	}
}

// mustNotStart runs a host that must end by itself, say why and leave its
// directory as it was.
func (h *host) mustNotStart(code int, attr *syscall.SysProcAttr, want ...string) {
	h.t.Helper()
	before := h.contents()
	h.mustEnd(code, attr, want...)
	after := h.contents()
	for name := range after {
		if _, ok := before[name]; !ok {
			h.t.Errorf("the start that failed left %s behind", name)
		}
	}
	for name, content := range before {
		if after[name] != content {
			h.t.Errorf("the start that failed changed %s", name)
		}
	}
}

// mustEnd runs a host that must end by itself and say why.
func (h *host) mustEnd(code int, attr *syscall.SysProcAttr, want ...string) {
	h.t.Helper()
	var stdout, stderr proc.Log
	cmd := h.command()
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = &stdout, &stderr, attr
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	late := time.AfterFunc(patience, func() { cmd.Process.Kill() })
	defer late.Stop()
	cmd.Wait() // the exit code is looked at below
	if got := cmd.ProcessState.ExitCode(); got != code {
		h.t.Errorf("exit code %d, want %d:\n%s", got, code, stderr.Tail(20))
	}
	if stdout.String() != "" {
		h.t.Errorf("stdout has %q, want nothing", stdout.String())
	}
	checkLastWords(h.t, stderr.String(), want...)
}

// checkLastWords checks that a daemon said in one line why it ended, after
// nothing but its log.
func checkLastWords(t testing.TB, stderr string, want ...string) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(stderr, "\n"), "\n")
	last := lines[len(lines)-1]
	for _, line := range lines[:len(lines)-1] {
		if !strings.HasPrefix(line, "time=") {
			t.Errorf("stderr has a line that is neither log nor the reason:\n%s", stderr)
			break
		}
	}
	if !strings.HasPrefix(last, "tenantd: ") {
		t.Errorf("stderr does not end with a line that says what is wrong:\n%s", stderr)
	}
	for _, want := range want {
		if !strings.Contains(last, want) {
			t.Errorf("stderr lacks %q: %s", want, last)
		}
	}
}

// contents are the files that make the data directory an installation. A lock is
// not, nor a log, and the store is looked at when the host runs again.
func (h *host) contents() map[string]string {
	h.t.Helper()
	files := map[string]string{}
	entries, err := os.ReadDir(h.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		h.t.Fatal(err)
	}
	for _, entry := range entries {
		switch entry.Name() {
		case "lock", "etcd", "run", "audit":
			continue
		}
		content, err := os.ReadFile(filepath.Join(h.dir, entry.Name()))
		if err != nil && !errors.Is(err, fs.ErrPermission) {
			h.t.Fatal(err)
		}
		files[entry.Name()] = string(content)
	}
	return files
}

// file is the path of a file in the data directory.
func (h *host) file(name string) string { return filepath.Join(h.dir, name) }

// with adds arguments.
func with(args ...string) func(*testing.T, *host) {
	return func(_ *testing.T, h *host) { h.args = args }
}

// configured adds a configuration file whose third line is the first of fields.
func configured(fields string) func(*testing.T, *host) {
	return func(t *testing.T, h *host) {
		file := filepath.Join(t.TempDir(), "config.yaml")
		writeFile(t, file, "apiVersion: tenantd.io/v1alpha1\nkind: HostConfiguration\n"+fields)
		h.args = []string{"--config", file}
	}
}

// rewrite changes a file in the data directory for the time of a test.
func rewrite(name string, change func([]byte) []byte) func(*testing.T, *host) {
	return func(t *testing.T, h *host) {
		was, err := os.ReadFile(h.file(name))
		if err != nil {
			t.Fatal(err)
		}
		now := change(bytes.Clone(was))
		if bytes.Equal(was, now) {
			t.Fatalf("%s stays as it is: %s", name, was)
		}
		writeFile(t, h.file(name), string(now))
		t.Cleanup(func() { writeFile(t, h.file(name), string(was)) })
	}
}

// swap exchanges two files or directories for the time of a test. The second may
// be missing.
func swap(t *testing.T, a, b string) {
	t.Helper()
	exchange := func() {
		aside := a + ".aside"
		rename := func(from, to string) {
			if err := os.Rename(from, to); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
		}
		rename(a, aside)
		rename(b, a)
		rename(aside, b)
	}
	exchange()
	t.Cleanup(exchange)
}

// chmod changes a mode for the time of a test.
func chmod(t *testing.T, path string, mode fs.FileMode) {
	t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Chmod(path, 0o600) })
}

// occupy has an address taken for the time of a test.
func occupy(t *testing.T, address string) {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
}

// unprivileged is how a process starts that is bound by the modes of files, which
// root's are not: in a user namespace where this user has an ordinary number.
func unprivileged() *syscall.SysProcAttr {
	if os.Geteuid() != 0 {
		return nil
	}
	return &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 1000, HostID: 0, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 1000, HostID: 0, Size: 1}},
	}
}

// mountVariable tells the test binary that it runs in a mount namespace of its own.
const mountVariable = "TENANTD_E2E_MOUNT_NAMESPACE"

// inMountNamespace runs the calling test again, in a process that may mount, and
// there test. Its mount makes a directory a file system in memory, and later
// changes that; the option is a size=, ro or rw.
func inMountNamespace(t *testing.T, test func(mount func(dir, option string))) {
	t.Helper()
	if os.Getenv(mountVariable) == "" {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(self, "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), mountVariable+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		if os.Geteuid() != 0 {
			cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
			cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
		}
		out, err := cmd.CombinedOutput()
		switch ended := (*exec.ExitError)(nil); {
		case errors.As(err, &ended):
			t.Errorf("in a mount namespace:\n%s", out)
		case err != nil:
			t.Fatalf("cannot make a mount namespace: %v; run the tests as root, or allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)", err)
		}
		return
	}
	if err := syscall.Mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""); err != nil {
		t.Fatalf("cannot have mounts of its own: %v", err)
	}
	mounted := map[string]bool{}
	test(func(dir, option string) {
		t.Helper()
		var flags uintptr
		var data string
		switch option {
		case "rw":
		case "ro":
			flags = syscall.MS_RDONLY
		default:
			data = option
		}
		if mounted[dir] {
			flags |= syscall.MS_REMOUNT
		}
		if err := syscall.Mount("tmpfs", dir, "tmpfs", flags, data); err != nil {
			t.Fatalf("mount %s %s: %v", dir, option, err)
		}
		if !mounted[dir] {
			t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
		}
		mounted[dir] = true
	})
}

// fill writes a file until the disk is full.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 1<<20); ; {
		_, err := f.Write(block)
		switch {
		case err == nil:
		case !errors.Is(err, syscall.ENOSPC):
			t.Fatal(err)
		case len(block) == 1:
			return
		default:
			block = block[:len(block)/2]
		}
	}
}

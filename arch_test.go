// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenantd

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// module is the prefix of our own packages.
const module = "github.com/tenantd/tenantd/"

// imports returns all that a package needs, directly and indirectly.
func imports(t *testing.T, pkg string) []string {
	t.Helper()
	out, err := exec.Command("go", "list", "-deps", pkg).Output()
	if err != nil {
		t.Fatalf("list what %s imports: %v", pkg, err)
	}
	return strings.Fields(string(out))
}

// Which of our packages a package may import. docs/architecture.md has the reasons
// in its table of rooms.
func TestDependenciesPointDown(t *testing.T) {
	for pkg, allowed := range map[string][]string{
		"api/v1alpha1":       {},
		"sni":                {},
		"pki":                {},
		"storage":            {},
		"systemd":            {},
		"konnectivity":       {"konnectivity/internal/"},
		"konnectivity/agent": {"konnectivity/internal/"},
		"tenant/cluster":     {},
		"tenant/limit":       {},
		"tenant/queues":      {},
		"tenant":             {"konnectivity", "konnectivity/internal/", "pki", "storage", "tenant/cluster", "tenant/limit", "tenant/queues"},
		"host":               {"api/v1alpha1", "host/", "konnectivity", "konnectivity/internal/", "pki", "sni", "storage", "tenant", "tenant/"},
		"host/gossip":        {},
		"host/heap":          {},
		"host/placement":     {},
		"worker":             {"worker/", "konnectivity/agent", "konnectivity/internal/"},
		"worker/bundle":      {"worker/config", "systemd"},
		"e2e/proc":           {},
		"cmd/tenantd":        {"api/v1alpha1", "host", "host/", "konnectivity", "konnectivity/internal/", "pki", "sni", "storage", "tenant", "tenant/"},
		"cmd/tenantctl":      {"api/v1alpha1", "worker/bundle", "worker/config", "systemd"},
		"cmd/tenant-proxy":   {"worker", "worker/", "konnectivity/agent", "konnectivity/internal/", "systemd"},
	} {
		t.Run(pkg, func(t *testing.T) {
			for _, dep := range imports(t, "./"+pkg) {
				own, ok := strings.CutPrefix(dep, module)
				// A folder with a slash behind it stands for all packages below it.
				permits := func(rule string) bool {
					return rule == own || strings.HasSuffix(rule, "/") && strings.HasPrefix(own, rule)
				}
				if ok && own != pkg && !slices.ContainsFunc(allowed, permits) {
					t.Errorf("%s imports %s, which it must not", pkg, own)
				}
			}
		})
	}
}

// What a package must not link, and why.
func TestForbiddenImports(t *testing.T) {
	for _, rule := range []struct{ pkg, forbidden, reason string }{
		{"cmd/tenantctl", "k8s.io/kubernetes/", "it is a small client that people copy around"},
		{"cmd/tenantctl", "k8s.io/apiserver/", "it is a small client that people copy around"},
		{"cmd/tenantctl", "go.etcd.io/", "it talks to the system plane alone"},
		{"cmd/tenantctl", "github.com/caddyserver/", "the host issues the certificates"},
		{"cmd/tenant-proxy", "k8s.io/", "it is on every worker, and a Kubernetes client would be the larger part of it"},
		{"cmd/tenant-proxy", "sigs.k8s.io/controller-runtime", "it is on every worker, and a Kubernetes client would be the larger part of it"},
		{"cmd/tenant-proxy", "go.etcd.io/", "state is the hosts' matter"},
		{"cmd/tenant-proxy", "github.com/caddyserver/", "no worker issues certificates"},
		{"konnectivity", "k8s.io/kubernetes/", "its tests must not wait for upstream to compile"},
		{"konnectivity", "k8s.io/apiserver/", "its tests must not wait for upstream to compile"},
		{"sni", "k8s.io/", "the port knows bytes and names, not Kubernetes"},
		{"storage", "k8s.io/kubernetes/", "its tests must not wait for upstream to compile"},
		{"tenant/limit", "k8s.io/kubernetes/", "its tests must not wait for upstream to compile"},
		{"host/gossip", "k8s.io/kubernetes/", "its tests must not wait for upstream to compile"},
		{"host/gossip", "k8s.io/apiserver/", "its tests must not wait for upstream to compile"},
		{"host/gossip", "go.etcd.io/", "it carries rumours, and nothing of it is agreed upon"},
		{"host/placement", "k8s.io/", "it decides by what it is given, and does no I/O"},
		{"pki", "k8s.io/kubernetes/", "its tests must not wait for upstream to compile"},
		{"pki", "k8s.io/apiserver/", "its tests must not wait for upstream to compile"},
		{"e2e/proc", "k8s.io/", "it runs programs, whatever they are"},
		{"api/v1alpha1", "k8s.io/kubernetes/", "other programs import the types"},
		{"api/v1alpha1", "sigs.k8s.io/controller-runtime", "other programs import the types"},
	} {
		for _, dep := range imports(t, "./"+rule.pkg) {
			if strings.HasPrefix(dep+"/", rule.forbidden) {
				t.Errorf("%s links %s: %s", rule.pkg, dep, rule.reason)
			}
		}
	}
}

// What people copy to laptops, into images and onto workers needs no C library.
func TestStaticPrograms(t *testing.T) {
	for _, pkg := range []string{"cmd/tenantctl", "cmd/tenant-proxy"} {
		list := exec.Command("go", "list", "-deps", "-f", "{{.ImportPath}} {{.Standard}} {{len .CgoFiles}}", "./"+pkg)
		list.Env = append(os.Environ(), "CGO_ENABLED=1")
		out, err := list.Output()
		if err != nil {
			t.Fatalf("list what %s imports: %v", pkg, err)
		}
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		if len(lines) < 100 {
			t.Fatalf("go list knows only %d packages of %s", len(lines), pkg)
		}
		for _, line := range lines {
			fields := strings.Fields(line)
			if fields[1] == "false" && fields[2] != "0" {
				t.Errorf("%s links %s, which needs cgo", pkg, fields[0])
			}
		}
	}
}

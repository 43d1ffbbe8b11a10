// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package install_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tenantd/tenantd/systemd"
	"github.com/tenantd/tenantd/worker/bundle"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/install"
	"github.com/tenantd/tenantd/worker/kubelet"
)

const settings = "apiVersion: tenantd.io/v1alpha1\nkind: WorkerConfiguration\nhostname: acme.test\nhosts: [\"192.0.2.10:443\"]\n"

func put(t *testing.T, path, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// unpacked is the directory of a bundle.
func unpacked(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	put(t, filepath.Join(dir, bundle.Binary), "program")
	put(t, filepath.Join(dir, bundle.Config), settings)
	put(t, filepath.Join(dir, bundle.Authority), "CA")
	put(t, filepath.Join(dir, bundle.Unit), systemd.TenantProxy())
	return dir
}

// tree lists the files below a directory.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			all = append(all, strings.TrimPrefix(path, dir))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestInstallAndUninstall(t *testing.T) {
	root, from := t.TempDir(), unpacked(t)
	var calls []string
	o := install.Options{From: from, Root: root, Prefix: "/opt/tenantd", Systemctl: func(_ context.Context, args ...string) error {
		calls = append(calls, strings.Join(args, " "))
		return nil
	}}
	do := func() {
		t.Helper()
		calls = nil
		if next, err := install.Install(t.Context(), o); err != nil || next != "" {
			t.Fatal(next, err)
		}
		if want := []string{"daemon-reload", "enable tenant-proxy.service", "reload-or-restart tenant-proxy.service"}; !slices.Equal(calls, want) {
			t.Errorf("systemctl %q, want %q", calls, want)
		}
	}
	do()
	want := []string{"/etc/systemd/system/tenant-proxy.service", "/etc/tenant-proxy/ca.crt", "/etc/tenant-proxy/config.yaml", "/opt/tenantd/bin/tenant-proxy"}
	if got := tree(t, root); !slices.Equal(got, want) {
		t.Errorf("installed %q, want %q", got, want)
	}
	if unit := read(t, filepath.Join(root, want[0])); !strings.Contains(unit, "ExecStart=/opt/tenantd/bin/tenant-proxy run --config /etc/tenant-proxy/config.yaml\n") || strings.Contains(unit, systemd.Bindir) {
		t.Errorf("unit:\n%s", unit)
	}
	if info, err := os.Stat(filepath.Join(root, want[3])); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("program: %v, %v", info.Mode(), err)
	}

	do() // again
	if got := tree(t, root); !slices.Equal(got, want) {
		t.Errorf("installed twice: %q, want %q", got, want)
	}
	old := read(t, filepath.Join(root, want[2]))
	put(t, filepath.Join(from, bundle.Config), settings+"carrier: auto\n")
	do() // with another configuration
	if got := read(t, filepath.Join(root, want[2])+".old"); got != old {
		t.Errorf("the old configuration: %q", got)
	}

	// What belongs to others stays.
	put(t, filepath.Join(root, "var/lib/tenant-proxy/hosts.json"), "{}")
	put(t, filepath.Join(root, "var/lib/tenant-proxy/precious"), "")
	put(t, filepath.Join(root, "opt/tenantd/bin/other"), "")
	calls = nil
	for range 2 {
		if err := install.Uninstall(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := tree(t, root), []string{"/opt/tenantd/bin/other", "/var/lib/tenant-proxy/precious"}; !slices.Equal(got, want) {
		t.Errorf("left behind %q, want %q", got, want)
	}
	if want := []string{"disable --now tenant-proxy.service", "daemon-reload", "daemon-reload"}; !slices.Equal(calls, want) {
		t.Errorf("systemctl %q, want %q", calls, want)
	}
}

func TestWithoutSystemd(t *testing.T) {
	root := t.TempDir()
	next, err := install.Install(t.Context(), install.Options{From: unpacked(t), Root: root})
	if err != nil || !strings.Contains(next, "/usr/local/bin/tenant-proxy run --config /etc/tenant-proxy/config.yaml") {
		t.Errorf("%q, %v", next, err)
	}
}

// TestBadBundle expects that nothing changes.
func TestBadBundle(t *testing.T) {
	for name, test := range map[string]struct {
		spoil func(dir string)
		want  string
	}{
		"no unit":           {func(dir string) { os.Remove(filepath.Join(dir, bundle.Unit)) }, "unpack the whole archive"},
		"bad configuration": {func(dir string) { put(t, filepath.Join(dir, bundle.Config), settings+"carier: tls\n") }, "config.yaml:5: carier"},
	} {
		root, from := t.TempDir(), unpacked(t)
		test.spoil(from)
		if _, err := install.Install(t.Context(), install.Options{From: from, Root: root}); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", name, err, test.want)
		}
		if got := tree(t, root); len(got) != 0 {
			t.Errorf("%s: installed %q", name, got)
		}
	}
}

func TestStartFails(t *testing.T) {
	o := install.Options{From: unpacked(t), Root: t.TempDir(), Systemctl: func(context.Context, ...string) error { return errors.New("no") }}
	if _, err := install.Install(t.Context(), o); err == nil || !strings.Contains(err.Error(), "journalctl -u tenant-proxy") {
		t.Error(err)
	}
}

// TestUninstallAdopted expects a refusal while the kubelet depends on it.
func TestUninstallAdopted(t *testing.T) {
	root := t.TempDir()
	o := install.Options{From: unpacked(t), Root: root}
	if _, err := install.Install(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(root, config.DefaultKubeletKubeconfig)
	before := "contexts: [{name: c, context: {cluster: k, user: n}}]\ncurrent-context: c\nclusters: [{name: k, cluster: {server: \"https://acme.test:443\"}}]\n"
	put(t, conf, before)
	if _, err := kubelet.Adopt(conf, "https://172.20.0.1:6443", "acme.test"); err != nil {
		t.Fatal(err)
	}
	installed := tree(t, root)
	if err := install.Uninstall(t.Context(), o); err == nil || !strings.Contains(err.Error(), "--revert") {
		t.Errorf("%v; want the remedy", err)
	}
	if got := tree(t, root); !slices.Equal(got, installed) {
		t.Errorf("something was removed: %q", got)
	}
	if _, err := kubelet.Revert(conf); err != nil {
		t.Fatal(err)
	}
	if err := install.Uninstall(t.Context(), o); err != nil {
		t.Error(err)
	}
	if !bytes.Equal([]byte(read(t, conf)), []byte(before)) {
		t.Error("the kubeconfig is another")
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// snapshot runs a command of `tenantd snapshot` on the host's data directory.
func (h *host) snapshot(args ...string) result {
	h.t.Helper()
	return execute(h.t, "", nil, "tenantd", append([]string{"snapshot"}, append(args, "--data-dir", h.dir)...)...)
}

// saveSnapshot saves a snapshot of the host and returns its file, and what was said of it.
func (h *host) saveSnapshot() (file, said string) {
	h.t.Helper()
	file = filepath.Join(h.t.TempDir(), "snapshot")
	r := h.snapshot("save", file)
	if r.code != 0 {
		h.t.Fatalf("no snapshot is saved: %s", r.stderr)
	}
	info, err := os.Stat(file)
	if err != nil {
		h.t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		h.t.Errorf("the snapshot's mode is %v", info.Mode())
	}
	return file, r.stdout
}

// wipe takes the data directory away but for the sealing key, and returns that.
func (h *host) wipe() (key []byte) {
	h.t.Helper()
	key, err := os.ReadFile(filepath.Join(h.dir, "sealing.key"))
	if err == nil {
		err = os.RemoveAll(h.dir)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	return key
}

// putFile writes a file for its owner alone.
func putFile(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, content, 0o600)); err != nil {
		t.Fatal(err)
	}
}

// TestSnapshot loses a host with two tenants and has another serve them from a snapshot, for the same kubeconfigs.
func TestSnapshot(t *testing.T) {
	h := startHost(t)
	kubeconfigs := map[string]string{"acme": h.add("acme"), "globex": h.add("globex")}
	for tenant, kubeconfig := range kubeconfigs {
		mustKubectl(t, kubeconfig, "", "create", "configmap", "before", "--from-literal=of="+tenant)
		mustKubectl(t, kubeconfig, "", "create", "secret", "generic", "before", "--from-literal=of="+tenant)
	}
	file, said := h.saveSnapshot()
	if !strings.Contains(said, "the running host") || !strings.Contains(said, "sha256") {
		t.Errorf("of the snapshot it says %q", said)
	}
	mustKubectl(t, kubeconfigs["acme"], "", "create", "configmap", "later")
	if r := h.snapshot("restore", file); r.code == 0 || !strings.Contains(r.stderr, "in use by another tenantd") {
		t.Errorf("restored into the directory of a host that runs: %+v", r)
	}
	h.signal(syscall.SIGKILL)
	h.wait()
	if r := h.snapshot("restore", file); r.code == 0 || !strings.Contains(r.stderr, "choose an empty directory") {
		t.Errorf("restored over an installation: %+v", r)
	}
	key := h.wipe()

	sealing := filepath.Join(h.dir, "sealing.key")
	if r := h.snapshot("restore", file); r.code == 0 || !strings.Contains(r.stderr, "there is no sealing key "+sealing) {
		t.Errorf("restored without a sealing key: %+v", r)
	}
	other := make([]byte, len(key))
	rand.Read(other)
	putFile(t, sealing, other)
	if r := h.snapshot("restore", file); r.code == 0 || !strings.Contains(r.stderr, "is not the one of this snapshot") {
		t.Errorf("restored with another sealing key: %+v", r)
	}
	putFile(t, sealing, key)
	if r := h.snapshot("restore", file, "--domain", "other.test"); r.code == 0 || !strings.Contains(r.stderr, `it is of the domain "k8s.test"`) {
		t.Errorf("restored for another domain: %+v", r)
	}
	cut := filepath.Join(t.TempDir(), "cut")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	putFile(t, cut, data[:len(data)/2])
	if r := h.snapshot("restore", cut); r.code == 0 {
		t.Errorf("restored half a snapshot: %+v", r)
	}
	// Nothing of that was too much.
	r := h.snapshot("restore", file, "--name", "host-z")
	if r.code != 0 || !strings.Contains(r.stdout, `domain k8s.test, with 2 tenants as host "host-z"`) {
		t.Fatalf("restore: %+v", r)
	}
	h.args = []string{"--name", "host-z"}
	h.start()
	h.awaitReady()
	for tenant, kubeconfig := range kubeconfigs {
		eventually(t, tenant+" answers", func() error {
			if r := kubectl(t, kubeconfig, "", "get", "configmap", "before", "-o", "jsonpath={.data.of}"); r.stdout != tenant {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
		if got := mustKubectl(t, kubeconfig, "", "get", "secret", "before", "-o", "go-template={{.data.of|base64decode}}"); got != tenant {
			t.Errorf("the secret of %s has %q", tenant, got)
		}
		if r := kubectl(t, kubeconfig, "", "get", "configmap", "later"); !strings.Contains(r.stderr, "NotFound") {
			t.Errorf("what was written after the snapshot: %+v", r)
		}
		mustKubectl(t, kubeconfig, "", "create", "deployment", "after", "--image=none.test/none")
		eventually(t, tenant+"'s controllers run", func() error {
			if got := mustKubectl(t, kubeconfig, "", "get", "pods", "-o", "name"); !strings.HasPrefix(got, "pod/after-") {
				return fmt.Errorf("its pods are %q", got)
			}
			return nil
		})
	}
	eventually(t, "the tenants are Ready where they are now", func() error {
		got := mustKubectl(t, h.adminKubeconfig(), "", "get", "tenants", "-o", "jsonpath={range .items[*]}{.status.phase}{.status.placement}{end}")
		if got != `Ready["host-z"]Ready["host-z"]` {
			return errors.New(got)
		}
		return nil
	})
	if got := mustKubectl(t, h.adminKubeconfig(), "", "get", "hosts", "-o", "name"); strings.TrimSpace(got) != "host.tenantd.io/host-z" {
		t.Errorf("the hosts are %q", got)
	}
	h.add("initech")
}

// TestMajorityLost has two of three hosts die for good. The last one says what to do, and that has the tenant back with
// all that was acknowledged while there were two, even where the host was killed too, and lets a host join.
func TestMajorityLost(t *testing.T) {
	a := newMember(t, "host-a", "127.0.0.12")
	a.start()
	a.awaitReady()
	kubeconfig := a.add("acme")
	b := newMember(t, "host-b", "127.0.0.13", "--join", a.listen, "--join-token-file", a.token())
	b.start()
	b.awaitReady()
	c := newMember(t, "host-c", "127.0.0.14", "--join", a.listen, "--join-token-file", a.token())
	c.start()
	c.awaitReady()
	eventually(t, "three hosts vote", func() error {
		if got := mustKubectl(t, a.adminKubeconfig(), "", "get", "hosts", "-o", "jsonpath={.items[*].status.role}"); got != "voter voter voter" {
			return errors.New(got)
		}
		return nil
	})
	c.signal(syscall.SIGKILL)
	c.wait()
	// From here on the two that are left must both have what is acknowledged.
	eventually(t, "two hosts go on", func() error {
		if r := kubectl(t, kubeconfig, "", "create", "configmap", "last"); r.code != 0 {
			return errors.New(r.stderr)
		}
		return nil
	})
	b.signal(syscall.SIGKILL)
	a.signal(syscall.SIGKILL)
	b.wait()
	a.wait()
	b.wipe()

	a.start()
	eventually(t, "the host says what to do", func() error {
		if !strings.Contains(a.log.String(), "if they are gone for good, make a snapshot") {
			return errors.New(a.log.Tail(3))
		}
		return nil
	})
	if r := a.snapshot("save", filepath.Join(t.TempDir(), "snapshot")); r.code == 0 || !strings.Contains(r.stderr, "stop it and try again") {
		t.Errorf("saved a snapshot of a host that neither serves nor is stopped: %+v", r)
	}
	a.signal(syscall.SIGKILL)
	a.wait()
	file, said := a.saveSnapshot()
	if !strings.Contains(said, "which does not run") {
		t.Errorf("of the snapshot it says %q", said)
	}
	key := a.wipe()
	putFile(t, filepath.Join(a.dir, "sealing.key"), key)
	if r := a.snapshot("restore", file, "--name", "host-a"); r.code != 0 {
		t.Fatalf("restore: %+v", r)
	}
	a.start()
	a.awaitReady()
	eventually(t, "acme has what was acknowledged last", func() error {
		if r := kubectl(t, kubeconfig, "", "get", "configmap", "last"); r.code != 0 {
			return errors.New(r.stderr)
		}
		return nil
	})
	a.awaitHosts("host-a")

	d := newMember(t, "host-b", "127.0.0.13", "--join", a.listen, "--join-token-file", a.token())
	d.start()
	d.awaitReady()
	a.awaitHosts("host-a", "host-b")
	mustKubectl(t, kubeconfig, "", append(d.at("acme"), "create", "configmap", "after")...)
}

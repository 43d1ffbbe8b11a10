// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tenantd/tenantd/worker/kubelet"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
)

var tomorrow = time.Now().Add(24 * time.Hour)

func put(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestRotation reads a kubeconfig whose certificate is in a file that is replaced
// as the kubelet does it: by moving a link.
func TestRotation(t *testing.T) {
	tenant := fakehost.NewTenant("acme.test")
	dir := t.TempDir()
	conf := filepath.Join(dir, "kubelet.conf")
	identity := kubelet.NewIdentity(conf)
	if _, err := identity.Name(); !kubelet.IsAbsent(err) || !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("before the node has joined: %v", err)
	}

	issue := func(file string, until time.Time) {
		certificate, key := tenant.Node("w1", until)
		put(t, filepath.Join(dir, file), append(certificate, key...))
		link := filepath.Join(dir, "link")
		if err := errors.Join(os.Symlink(file, link), os.Rename(link, filepath.Join(dir, "current.pem"))); err != nil {
			t.Fatal(err)
		}
	}
	issue("first.pem", tomorrow)
	put(t, conf, []byte(`
current-context: c
contexts: [{name: other, context: {user: nobody}}, {name: c, context: {cluster: k, user: n}}]
users: [{name: nobody, user: {}}, {name: n, user: {client-certificate: current.pem, client-key: current.pem}}]
`))
	if name, err := identity.Name(); err != nil || name != "w1" {
		t.Fatalf("name %q, %v", name, err)
	}
	first, err := identity.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := identity.Certificate(); err != nil || again != first {
		t.Errorf("an unchanged certificate was read again: %v", err)
	}
	issue("second.pem", tomorrow.Add(time.Hour))
	second, err := identity.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(first.Certificate[0], second.Certificate[0]) {
		t.Error("the rotated certificate was not read")
	}
	if err := os.Remove(conf); err != nil {
		t.Fatal(err)
	}
	if _, err := identity.Certificate(); !kubelet.IsAbsent(err) {
		t.Errorf("after kubeadm reset: %v", err)
	}
}

// TestPresent goes to a server that wants a certificate if there is one, with some
// that it would refuse.
func TestPresent(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	host, err := tenant.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	for name, test := range map[string]struct{ kubeconfig, want string }{
		"valid":             {tenant.Kubeconfig("w1", tomorrow), "system:node:w1"},
		"expired":           {tenant.Kubeconfig("w1", time.Now().Add(-time.Minute)), "anonymous"},
		"another cluster's": {fakehost.NewTenant(hostname).Kubeconfig("w1", tomorrow), "anonymous"},
		"none":              {"", "anonymous"},
	} {
		path := filepath.Join(t.TempDir(), "kubelet.conf")
		put(t, path, []byte(test.kubeconfig))
		transport := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
			ServerName: hostname, RootCAs: tenant.Roots, GetClientCertificate: kubelet.NewIdentity(path).Present(tenant.Roots),
		}}
		response, err := (&http.Client{Transport: transport}).Get("https://" + host.Address.String() + "/whoami")
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || !strings.HasPrefix(string(body), test.want+" at ") {
			t.Errorf("%s: %q, %v; want %s", name, body, err, test.want)
		}
	}
}

func TestBadKubeconfigs(t *testing.T) {
	tenant := fakehost.NewTenant("acme.test")
	good := tenant.Kubeconfig("w1", tomorrow)
	for name, test := range map[string]struct{ file, want string }{
		"not YAML":               {"{", "is no kubeconfig"},
		"no context":             {strings.Replace(good, "current-context: \"system", "current-context: \"other", 1), "has no user for its current context"},
		"token":                  {strings.NewReplacer("client-certificate-data", "token", "client-key-data", "x").Replace(good), "has no client certificate"},
		"damaged":                {strings.Replace(good, "client-key-data: ", "client-key-data: AAAA", 1), "read the node's certificate"},
		"certificate of no node": {tenant.Kubeconfig("", tomorrow), "not of a node"},
	} {
		path := filepath.Join(t.TempDir(), "kubelet.conf")
		put(t, path, []byte(test.file))
		if _, err := kubelet.NewIdentity(path).Name(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q in it", name, err, test.want)
		}
	}
}

const (
	server   = "https://172.20.0.1:6443"
	hostname = "acme.test"
)

func TestAdoptAndRevert(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	dir := t.TempDir()
	path := filepath.Join(dir, "kubelet.conf")
	before := []byte("# by kubeadm\n" + tenant.Kubeconfig("w1", tomorrow))
	put(t, path, before)

	steps := []struct {
		name    string
		do      func() (bool, error)
		changed bool
		adopted bool
	}{
		{"revert what was not adopted", func() (bool, error) { return kubelet.Revert(path) }, false, false},
		{"adopt", func() (bool, error) { return kubelet.Adopt(path, server, hostname) }, true, true},
		{"adopt again", func() (bool, error) { return kubelet.Adopt(path, server, hostname) }, false, true},
		{"adopt to another address", func() (bool, error) { return kubelet.Adopt(path, "https://172.21.0.1:6443", hostname) }, true, true},
		{"revert", func() (bool, error) { return kubelet.Revert(path) }, true, false},
		{"revert again", func() (bool, error) { return kubelet.Revert(path) }, false, false},
	}
	for _, step := range steps {
		changed, err := step.do()
		if err != nil || changed != step.changed || kubelet.Adopted(path) != step.adopted {
			t.Fatalf("%s: changed %t, adopted %t, %v", step.name, changed, kubelet.Adopted(path), err)
		}
		now := read(t, path)
		if !step.adopted && !bytes.Equal(now, before) {
			t.Errorf("%s: the kubeconfig is not what it was:\n%s", step.name, now)
		}
		if step.name == "adopt" {
			if want := "server: " + server; !bytes.Contains(now, []byte(want)) || !bytes.Contains(now, []byte("tls-server-name: "+hostname)) {
				t.Errorf("adopted:\n%s", now)
			}
			if name, err := kubelet.NewIdentity(path).Name(); err != nil || name != "w1" {
				t.Errorf("the adopted kubeconfig has node %q, %v", name, err)
			}
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v, %v", step.name, info.Mode(), err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// TestRejoin adopts, joins the node anew, and expects neither command to bring the
// old cluster back.
func TestRejoin(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubelet.conf")
	put(t, path, []byte(fakehost.NewTenant(hostname).Kubeconfig("old", tomorrow)))
	adopt := func() {
		t.Helper()
		if changed, err := kubelet.Adopt(path, server, hostname); err != nil || !changed {
			t.Fatal(changed, err)
		}
	}
	adopt()
	joined := []byte(fakehost.NewTenant(hostname).Kubeconfig("new", tomorrow))
	put(t, path, joined)
	if changed, err := kubelet.Revert(path); err != nil || changed || !bytes.Equal(read(t, path), joined) {
		t.Fatalf("revert after a new join: changed %t, %v", changed, err)
	}
	put(t, path+".before-tenant-proxy", []byte("stale"))
	adopt()
	if changed, err := kubelet.Revert(path); err != nil || !changed || !bytes.Equal(read(t, path), joined) {
		t.Errorf("revert: changed %t, %v:\n%s", changed, err, read(t, path))
	}
}

func TestAdoptErrors(t *testing.T) {
	dir := t.TempDir()
	for file, want := range map[string]string{"": "run kubeadm join first", "clusters: []": "in contexts", "[": "is no kubeconfig"} {
		path := filepath.Join(dir, "conf")
		os.Remove(path)
		if file != "" {
			put(t, path, []byte(file))
		}
		if changed, err := kubelet.Adopt(path, server, hostname); changed || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: changed %t, %v; want %q in it", file, changed, err, want)
		}
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

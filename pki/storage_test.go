// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/certmagic"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func TestStorageKeepsCertmagicsContract(t *testing.T) {
	s, ctx := newStorage(t), t.Context()
	for key, value := range map[string]string{
		"a/b/one.crt": "1", "a/b/two.key": "22", "a/c/three.json": "333", "ab/four.key": "", "top.key": "55555",
	} {
		if err := s.Store(ctx, key, []byte("overwritten")); err != nil {
			t.Fatal(err)
		}
		if err := s.Store(ctx, key, []byte(value)); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Load(ctx, key); err != nil || string(got) != value {
			t.Fatalf("load %s: %q, %v; want %q", key, got, err, value)
		}
		want := certmagic.KeyInfo{Key: key, Size: int64(len(value)), IsTerminal: true}
		if got, err := s.Stat(ctx, key); err != nil || got != want {
			t.Fatalf("stat %s: %+v, %v; want %+v", key, got, err, want)
		}
	}
	if got, err := s.Stat(ctx, "a/b"); err != nil || got != (certmagic.KeyInfo{Key: "a/b"}) {
		t.Errorf("stat of a directory: %+v, %v", got, err)
	}

	for key, want := range map[string]bool{
		"a": true, "a/b": true, "a/b/one.crt": true, "top.key": true,
		"to": false, "a/b/one": false, "a/b/one.crt/x": false, "b": false,
	} {
		if got := s.Exists(ctx, key); got != want {
			t.Errorf("exists %s: %v, want %v", key, got, want)
		}
	}

	for _, tt := range []struct {
		dir       string
		recursive bool
		want      []string // nil: fs.ErrNotExist
	}{
		{"", false, []string{"a", "ab", "top.key"}},
		{"a", false, []string{"a/b", "a/c"}}, // not ab: a prefix is of components
		{"a", true, []string{"a/b", "a/b/one.crt", "a/b/two.key", "a/c", "a/c/three.json"}},
		{"a/b", false, []string{"a/b/one.crt", "a/b/two.key"}},
		{"top.key", false, []string{}},
		{"no", false, nil},
		{"no", true, nil},
	} {
		got, err := s.List(ctx, tt.dir, tt.recursive)
		if tt.want == nil {
			if !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("list %q: %q, %v; want fs.ErrNotExist", tt.dir, got, err)
			}
		} else if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("list %q, recursive %v: %q, %v; want %q", tt.dir, tt.recursive, got, err, tt.want)
		}
	}
	if got, err := newStorageAt(t, "empty").List(ctx, "", true); err != nil || len(got) != 0 {
		t.Errorf("list an empty storage: %q, %v", got, err)
	}

	for _, key := range []string{"no", "a/b"} { // a directory has no value
		if _, err := s.Load(ctx, key); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("load %s: %v, want fs.ErrNotExist", key, err)
		}
	}
	if _, err := s.Stat(ctx, "no"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat no: %v, want fs.ErrNotExist", err)
	}

	for _, key := range []string{"no", "a", "a", "top.key"} { // twice: absent is no error
		if err := s.Delete(ctx, key); err != nil {
			t.Errorf("delete %s: %v", key, err)
		}
	}
	if got, err := s.List(ctx, "", true); err != nil || !slices.Equal(got, []string{"ab", "ab/four.key"}) {
		t.Errorf("after deletion: %q, %v", got, err)
	}
}

func TestStorageIsItsPrefixOnly(t *testing.T) {
	a, b, ctx := newStorageAt(t, "a"), newStorageAt(t, "a/b"), t.Context()
	if err := a.Store(ctx, "x.key", []byte("a's")); err != nil {
		t.Fatal(err)
	}
	if b.Exists(ctx, "x.key") {
		t.Error("one storage sees the other's file")
	}
	if err := b.Delete(ctx, "x.key"); err != nil {
		t.Fatal(err)
	}
	if !a.Exists(ctx, "x.key") {
		t.Error("one storage deletes the other's file")
	}
}

// A tenant's blob must not open in another tenant, nor under another name.
func TestStorageRefusesSwappedValues(t *testing.T) {
	a, b, ctx := newStorageAt(t, "a"), newStorageAt(t, "b"), t.Context()
	if err := a.Store(ctx, "ca.key", []byte("a's")); err != nil {
		t.Fatal(err)
	}
	resp, err := a.client.Get(ctx, a.fileKey("ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{b.fileKey("ca.key"), a.fileKey("sa.key")} {
		if _, err := a.client.Put(ctx, at, string(resp.Kvs[0].Value)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Load(ctx, "ca.key"); err == nil {
		t.Error("another tenant's key opens")
	}
	if _, err := a.Load(ctx, "sa.key"); err == nil {
		t.Error("another key's value opens")
	}
}

func TestResealMovesEverythingToTheNewKey(t *testing.T) {
	s, ctx := newStorage(t), t.Context()
	files := map[string]string{"ca.key": "private", "ca.crt": "public", "d/e.json": "meta"}
	for key, value := range files {
		if err := s.Store(ctx, key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	rotating := NewStorage(s.client, s.prefix, newSealer(t, 2, 1))
	for _, want := range []int{2, 0} {
		if n, err := rotating.Reseal(ctx); err != nil || n != want {
			t.Fatalf("resealed %d, %v; want %d", n, err, want)
		}
	}
	after := NewStorage(s.client, s.prefix, newSealer(t, 2))
	for key, want := range files {
		if got, err := after.Load(ctx, key); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v; want %q", key, got, err, want)
		}
	}
	if _, err := s.Reseal(ctx); err == nil || !strings.Contains(err.Error(), "put back the sealing key file") {
		t.Errorf("reseal without the key: %v", err)
	}
}

func TestNoPrivateKeyInEtcd(t *testing.T) {
	s, ctx := newStorage(t), t.Context()
	a := open(t, AuthorityConfig{Storage: s})
	l := leaf(t, a, serving("kube-apiserver", "acme.example.com"))
	leaf(t, a, Profile{Name: "front-proxy-client", Usage: Client, CommonName: "front-proxy-client", FrontProxy: true})
	_, leafKey := l.PEM()
	_, caKey := a.CAKeyPair()

	dump, err := s.client.Get(ctx, s.prefix, clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	var certificates int
	for _, kv := range dump.Kvs {
		if bytes.Contains(kv.Value, []byte("BEGIN CERTIFICATE")) {
			certificates++
		}
		for _, private := range [][]byte{[]byte("PRIVATE KEY"), leafKey[40:80], caKey[40:80]} {
			if bytes.Contains(kv.Value, private) {
				t.Errorf("%s holds private key bytes", kv.Key)
			}
		}
	}
	if certificates != 4 {
		t.Errorf("found %d certificates, want 4: is this the right place to look?", certificates)
	}
}

func newStorageAt(t *testing.T, name string) *Storage {
	t.Helper()
	return NewStorage(newClient(t), prefix(t)+"/"+name, newSealer(t, 1))
}

func serving(name string, dnsNames ...string) Profile {
	return Profile{Name: name, Usage: Serving, DNSNames: dnsNames}
}

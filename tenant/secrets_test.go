// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"bytes"
	"context"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Secrets are encrypted in etcd under a key of the tenant's own. What cannot be
// decrypted fails alone, and the control plane starts with it.
func TestSecretsAtRest(t *testing.T) {
	const plain = "correct-horse-battery-staple"
	b := newBench(t)
	a, c := b.start("a"), b.start("c")
	admin, other := b.admin(a, "a"), b.admin(c, "c")
	secret := func(name string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}, StringData: map[string]string{"password": plain}}
	}
	for _, s := range []struct {
		client kubernetes.Interface
		name   string
	}{{admin, "one"}, {admin, "moved"}, {other, "one"}} {
		if _, err := s.client.CoreV1().Secrets("default").Create(t.Context(), secret(s.name), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	etcd := b.store.Client()
	key := func(tenant, name string) string { return "/tenants/" + tenant + "/registry/secrets/default/" + name }
	stored := func(key string) []byte {
		t.Helper()
		resp, err := etcd.Get(t.Context(), key)
		if err != nil || len(resp.Kvs) != 1 {
			t.Fatalf("read %s: %v, %v", key, resp, err)
		}
		return resp.Kvs[0].Value
	}
	put := func(key string, value []byte) {
		t.Helper()
		if _, err := etcd.Put(t.Context(), key, string(value)); err != nil {
			t.Fatal(err)
		}
	}

	everything, err := etcd.Get(t.Context(), "/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range everything.Kvs {
		for _, needle := range []string{plain, "PRIVATE KEY"} {
			if bytes.Contains(kv.Value, []byte(needle)) {
				t.Errorf("%s has %q in plain", kv.Key, needle)
			}
		}
	}
	if !bytes.HasPrefix(stored(key("a", "one")), []byte("k8s:enc:tenantd:v1:")) {
		t.Errorf("stored as %q", stored(key("a", "one"))[:40])
	}

	// From before there was encryption: it is read, and encrypted when written.
	put(key("a", "old"), []byte(`{"apiVersion":"v1","kind":"Secret","metadata":{"name":"old","namespace":"default","uid":"1f3d4f5e-0000-4000-8000-000000000001"},"type":"Opaque","data":{"password":"b2xk"}}`))
	old, err := admin.CoreV1().Secrets("default").Get(t.Context(), "old", metav1.GetOptions{})
	if err != nil || string(old.Data["password"]) != "old" {
		t.Fatalf("a Secret stored in plain is %v, %v", old, err)
	}
	if _, err := admin.CoreV1().Secrets("default").Update(t.Context(), old, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := stored(key("a", "old")); !bytes.HasPrefix(got, []byte("k8s:enc:tenantd:v1:")) {
		t.Errorf("after an update without a change it is still stored as %q", got)
	}

	// A value that was copied to another name, or to another tenant, does not open.
	copied := stored(key("a", "one"))
	put(key("a", "moved"), copied)
	put(key("c", "one"), copied)
	altered := bytes.Clone(copied)
	altered[len(altered)-1] ^= 1
	put(key("a", "altered"), altered)
	unreadable := func(client kubernetes.Interface, name string) {
		t.Helper()
		got, err := client.CoreV1().Secrets("default").Get(t.Context(), name, metav1.GetOptions{})
		if err == nil {
			t.Fatalf("%s was read: it has %q", name, got.Data)
		}
		if !strings.Contains(err.Error(), "restore it from a backup or delete it") {
			t.Errorf("reading %s failed with %v", name, err)
		}
		_, err = client.CoreV1().Secrets("default").Update(t.Context(), secret(name), metav1.UpdateOptions{})
		if err == nil {
			t.Errorf("%s was written over", name)
		}
	}
	check := func(admin, other kubernetes.Interface) {
		t.Helper()
		unreadable(admin, "moved")
		unreadable(admin, "altered")
		unreadable(other, "one")
		if got, err := admin.CoreV1().Secrets("default").Get(t.Context(), "one", metav1.GetOptions{}); err != nil || string(got.Data["password"]) != plain {
			t.Errorf("a Secret beside it is %v, %v", got, err)
		}
		list, err := admin.CoreV1().Secrets("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list.Items {
			switch s.Name {
			case "moved", "altered":
				if s.Type != "tenantd.io/unreadable" || len(s.Data) != 0 {
					t.Errorf("%s is listed as %v with %q", s.Name, s.Type, s.Data)
				}
			case "one", "old":
				if len(s.Data) == 0 {
					t.Errorf("%s is listed without data", s.Name)
				}
			}
		}
	}
	check(admin, other)

	// Nor does it keep the control plane from starting.
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	a = b.start("a")
	admin = b.admin(a, "a")
	check(admin, other)
	ignore := true
	for _, name := range []string{"moved", "altered"} {
		err := admin.CoreV1().Secrets("default").Delete(t.Context(), name, metav1.DeleteOptions{IgnoreStoreReadErrorWithClusterBreakingPotential: &ignore})
		if err != nil {
			t.Errorf("delete %s: %v", name, err)
		}
		if _, err := admin.CoreV1().Secrets("default").Get(t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s after its deletion: %v", name, err)
		}
	}

	// The key goes with the tenant.
	if got := stored("/tenants/c/pki/files/secrets.key"); bytes.Contains(got, c.authority.SecretsKey()) {
		t.Error("the key itself lies in etcd in plain")
	}
	if bytes.Equal(a.authority.SecretsKey(), c.authority.SecretsKey()) {
		t.Error("two tenants have one key")
	}
	if err := c.stop(); err != nil {
		t.Fatal(err)
	}
	if err := b.store.Wipe(context.Background(), "c"); err != nil {
		t.Fatal(err)
	}
	if resp, err := etcd.Get(t.Context(), "/tenants/c/", clientv3.WithPrefix()); err != nil || len(resp.Kvs) != 0 {
		t.Errorf("after the wipe there are %v, %v", resp, err)
	}
}

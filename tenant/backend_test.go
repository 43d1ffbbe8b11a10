// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/tenantd/tenantd/storage"
	"github.com/tenantd/tenantd/tenant"
)

func configMap(name string, size int) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"size": fmt.Sprint(size)}},
		BinaryData: map[string][]byte{"x": bytes.Repeat([]byte("x"), size)},
	}
}

// post creates an object without a client that might try again. It returns an empty
// status where that worked.
func post(t *testing.T, cfg *rest.Config, path string, object any) (http.Header, *metav1.Status) {
	t.Helper()
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	body, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Post(cfg.Host+path, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	status := new(metav1.Status)
	if resp.StatusCode == http.StatusCreated {
		return resp.Header, status
	}
	if err := json.Unmarshal(answer, status); err != nil {
		t.Fatalf("%v in %s", err, answer)
	}
	return resp.Header, status
}

// A write beyond a limit is answered 429 with the limit's field, and with nothing that has a client repeat it.
func TestLimitsAreNamed(t *testing.T) {
	b := newBench(t)
	r := b.start("a")
	cfg, admin := b.client(r, "a"), b.admin(r, "a")
	// What the control plane makes for its workers comes a little after it is ready.
	for {
		_, err := admin.CoreV1().Services("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
		if err == nil {
			_, err = admin.DiscoveryV1().EndpointSlices("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
		}
		if err == nil {
			break
		}
		if !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	const configMaps = "/api/v1/namespaces/default/configmaps"
	crd := map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": "things.example.com"},
		"spec": map[string]any{
			"group": "example.com", "scope": "Cluster", "names": map[string]any{"plural": "things", "kind": "Thing"},
			"versions": []any{map[string]any{"name": "v1", "served": true, "storage": true, "schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}}}},
		},
	}
	large := map[string]any{ // of a kind whose size upstream does not look at
		"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": map[string]any{"name": "x"},
		"revision": 1, "data": map[string]any{"x": strings.Repeat("x", storage.MaxObjectBytes)},
	}
	const crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	for _, tc := range []struct {
		field  string
		limits storage.Limits
		path   string
		object any
		reason metav1.StatusReason
	}{
		{"spec.limits.storage", storage.Limits{Bytes: 1}, configMaps, configMap("x", 1), tenant.ReasonStorageQuotaExceeded},
		{"spec.limits.objects", storage.Limits{Objects: 1}, configMaps, configMap("x", 1), tenant.ReasonLimitExceeded},
		{"spec.limits.objectSize", storage.Limits{ObjectBytes: 16 << 10}, configMaps, configMap("x", 17<<10), tenant.ReasonLimitExceeded},
		{"spec.limits.objectSize", storage.Limits{}, "/apis/apps/v1/namespaces/default/controllerrevisions", large, tenant.ReasonLimitExceeded},
		{"spec.limits.customResourceDefinitions", storage.Limits{CRDs: -1}, crds, crd, tenant.ReasonLimitExceeded},
		{"spec.limits.customResourceDefinitionStorage", storage.Limits{CRDBytes: -1}, crds, crd, tenant.ReasonLimitExceeded},
	} {
		b.store.SetLimits("a", tc.limits)
		header, status := post(t, cfg, tc.path, tc.object)
		if status.Code != http.StatusTooManyRequests || status.Reason != tc.reason || !strings.Contains(status.Message, tc.field) ||
			status.Details == nil || len(status.Details.Causes) != 1 || status.Details.Causes[0].Field != tc.field {
			t.Errorf("%s: %+v", tc.field, status)
		}
		if again := header.Get("Retry-After"); again != "" {
			t.Errorf("%s: to be repeated after %s", tc.field, again)
		}
	}
	b.store.SetLimits("a", storage.Limits{})
	if _, status := post(t, cfg, crds, crd); status.Code != 0 {
		t.Errorf("with the limits gone: %+v", status)
	}

	// A tenant that is full in every way starts again, and its objects can be read, updated and deleted.
	for i := range 3 {
		if _, err := admin.CoreV1().ConfigMaps("default").Create(t.Context(), configMap(fmt.Sprint("old-", i), 100), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	full := storage.Limits{Bytes: 1, Objects: 1, ObjectBytes: 16 << 10, CRDs: -1, CRDBytes: -1}
	b.store.SetLimits("a", full)
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	r = b.start("a")
	admin = b.admin(r, "a")
	maps := admin.CoreV1().ConfigMaps("default")
	old, err := maps.Get(t.Context(), "old-0", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	old.BinaryData["x"] = []byte("y")
	old.Finalizers = []string{"example.com/wait"}
	if _, err := maps.Update(t.Context(), old, metav1.UpdateOptions{}); err != nil {
		t.Error("update:", err)
	}
	for i := range 3 {
		if err := maps.Delete(t.Context(), fmt.Sprint("old-", i), metav1.DeleteOptions{}); err != nil {
			t.Error("delete:", err)
		}
	}
	if old, err = maps.Get(t.Context(), "old-0", metav1.GetOptions{}); err != nil || old.DeletionTimestamp == nil {
		t.Fatalf("marked for deletion: %+v, %v", old, err)
	}
	old.Finalizers = nil
	if _, err = maps.Update(t.Context(), old, metav1.UpdateOptions{}); err != nil {
		t.Error("update without the finalizer:", err)
	}
	if _, err = maps.Get(t.Context(), "old-0", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Error("is not gone:", err)
	}
	if _, err = maps.Create(t.Context(), configMap("new", 1), metav1.CreateOptions{}); !apierrors.IsTooManyRequests(err) {
		t.Error("create:", err)
	}
}

// What lists take in memory together is bounded, and what takes little is not held up.
func TestListsAreCharged(t *testing.T) {
	b := newBench(t)
	r := b.start("a")
	admin := b.admin(r, "a")
	const each, count = 1000 << 10, 45 // one list fits into the 64 MiB that there are, two do not
	for i := range count {
		if _, err := admin.CoreV1().ConfigMaps("default").Create(t.Context(), configMap(fmt.Sprint("large-", i), each), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	small, err := admin.CoreV1().ConfigMaps("kube-public").Create(t.Context(), configMap("small", 1), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	// A list whose answer is not read is held in memory.
	cfg := b.client(r, "a")
	cfg.DisableCompression = true
	slow, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.clients = append(b.clients, slow)
	held, err := slow.Get(cfg.Host + "/api/v1/namespaces/default/configmaps")
	if err != nil {
		t.Fatal(err)
	}
	defer held.Body.Close()
	if held.StatusCode != http.StatusOK {
		t.Fatalf("a list alone: %s", held.Status)
	}

	list := func(namespace string, opts metav1.ListOptions) (int, error) {
		got := new(corev1.ConfigMapList)
		// Without a second attempt: these refusals say to wait.
		result := admin.CoreV1().RESTClient().Get().Namespace(namespace).Resource("configmaps").MaxRetries(0).
			VersionedParams(&opts, scheme.ParameterCodec).Do(t.Context())
		err := result.Into(got)
		return len(got.Items), err
	}
	for _, tc := range []struct {
		name      string
		namespace string
		opts      metav1.ListOptions
		refused   bool
		items     int
	}{
		{"all", "", metav1.ListOptions{}, true, 0},
		{"the namespace", "default", metav1.ListOptions{}, true, 0},
		{"from the cache", "default", metav1.ListOptions{ResourceVersion: "0"}, true, 0},
		{"a limit that the cache ignores", "default", metav1.ListOptions{ResourceVersion: "0", Limit: 1}, true, 0},
		{"selected, all of them", "default", metav1.ListOptions{LabelSelector: fmt.Sprint("size=", each)}, true, 0},
		{"selected at a revision", "default", metav1.ListOptions{
			LabelSelector: "size=1", ResourceVersion: small.ResourceVersion, ResourceVersionMatch: metav1.ResourceVersionMatchExact}, true, 0},
		{"a page", "default", metav1.ListOptions{Limit: 2}, false, 2},
		{"one by name", "default", metav1.ListOptions{FieldSelector: "metadata.name=large-1"}, false, 1},
		{"another namespace", "kube-public", metav1.ListOptions{}, false, -1},
		{"selected, few", "", metav1.ListOptions{LabelSelector: "size=1"}, false, 1},
	} {
		items, err := list(tc.namespace, tc.opts)
		switch {
		case apierrors.IsTooManyRequests(err) != tc.refused, err != nil && !tc.refused:
			t.Errorf("%s: %d items, %v", tc.name, items, err)
		case tc.items >= 0 && items != tc.items:
			t.Errorf("%s: %d items, want %d", tc.name, items, tc.items)
		}
	}
	var read int64
	if read, err = io.Copy(io.Discard, held.Body); err != nil || read < each*count {
		t.Errorf("the list that was held ended after %d bytes: %v", read, err)
	}
	if _, err := admin.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Error("all, when nothing is held any more:", err)
	}
}

// Clients that watch and read nothing hold no objects of their own, of events either.
func TestSlowWatchesShareObjects(t *testing.T) {
	b := newBench(t)
	r := b.start("a")
	admin := b.admin(r, "a")
	const each, count, watches = 1 << 20, 40, 20
	for i := range count {
		if _, err := admin.CoreV1().Events("default").Create(t.Context(), &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprint("large-", i)},
			InvolvedObject: corev1.ObjectReference{Namespace: "default"},
			Message:        strings.Repeat("x", each),
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	cfg := b.client(r, "a")
	cfg.NextProtos, cfg.DisableCompression = []string{"http/1.1"}, true
	slow, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.clients = append(b.clients, slow)
	for range watches {
		watch, err := slow.Get(cfg.Host + "/api/v1/namespaces/default/events?watch=1&resourceVersion=0")
		if err != nil {
			t.Fatal(err)
		}
		defer watch.Body.Close()
		if watch.StatusCode != http.StatusOK {
			t.Fatal(watch.Status)
		}
	}
	for range 10 { // what is to be held is held after a while
		time.Sleep(200 * time.Millisecond)
		if grown := heap() - before; grown > watches*each*count/4 {
			t.Fatalf("%d watches that nobody reads hold %d MiB", watches, grown>>20)
		}
	}
}

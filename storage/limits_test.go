// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
)

const crdDir = "apiextensions.k8s.io/customresourcedefinitions/"

// create and update write as an API server does.
func create(t *testing.T, s *Store, key string, size int) error {
	t.Helper()
	_, err := s.Conn().Txn(t.Context()).If(clientv3.Compare(clientv3.ModRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, strings.Repeat("x", size))).Else(clientv3.OpGet(key)).Commit()
	return err
}

func update(t *testing.T, s *Store, key string, size int) error {
	t.Helper()
	_, err := s.Conn().Txn(t.Context()).If(clientv3.Compare(clientv3.ModRevision(key), ">", 0)).
		Then(clientv3.OpPut(key, strings.Repeat("y", size))).Else(clientv3.OpGet(key)).Commit()
	return err
}

func remove(t *testing.T, s *Store, key string) {
	t.Helper()
	if _, err := s.Conn().Txn(t.Context()).Then(clientv3.OpDelete(key)).Commit(); err != nil {
		t.Errorf("delete %s: %v", key, err)
	}
}

// expect checks that a write was refused by that limit or, where cause is empty, was not refused.
func expect(t *testing.T, what string, err error, cause Cause) {
	t.Helper()
	switch q, refused := IsQuota(err); {
	case err != nil && !refused:
		t.Errorf("%s: %v", what, err)
	case q.Cause != cause:
		t.Errorf("%s: refused by %q, want %q (%v)", what, q.Cause, cause, err)
	case refused && q.Used <= q.Limit && cause != CauseHistory:
		t.Errorf("%s: refused %d of %d", what, q.Used, q.Limit)
	}
}

// Each limit refuses what grows beyond it, and nothing else.
func TestLimits(t *testing.T) {
	for _, tc := range []struct {
		name   string
		limits Limits
		cause  Cause
		dir    string // where the objects are
		size   int    // of each of 10, of which 8 fit
	}{
		{"objects", Limits{Objects: 8}, CauseObjects, "pods/default/", 100},
		{"storage", Limits{Bytes: 8 * 1100}, CauseStorage, "pods/default/", 1000},
		{"CRDs", Limits{CRDs: 8}, CauseCRDs, crdDir, 100},
		{"storage of CRDs", Limits{CRDBytes: 8 * 1100}, CauseCRDStorage, crdDir, 1000},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := open(t, nil)
			s.SetLimits("a", tc.limits)
			name := func(i int) string { return key(t, s, "a", tc.dir+fmt.Sprint(i)) }
			for i := range 10 {
				want := tc.cause
				if i < 8 {
					want = ""
				}
				expect(t, fmt.Sprint("object ", i), create(t, s, name(i), tc.size), want)
			}
			expect(t, "an update that keeps the size", update(t, s, name(0), tc.size), "")
			expect(t, "an update that shrinks", update(t, s, name(0), tc.size-10), "")
			expect(t, "an update that grows a little", update(t, s, name(0), tc.size+10), "")
			expect(t, "another tenant", create(t, s, key(t, s, "b", tc.dir+"x"), tc.size), "")
			if tc.cause == CauseCRDs || tc.cause == CauseCRDStorage {
				expect(t, "another kind", create(t, s, key(t, s, "a", "pods/default/p"), tc.size), "")
			}
			remove(t, s, name(3))
			expect(t, "a new object after a deletion", create(t, s, name(8), tc.size), "")
			expect(t, "one more", create(t, s, name(9), tc.size), tc.cause)

			u := s.Usage("a")
			live, keys := counted(t, s, "a")
			if u.Live != live || u.Keys != keys || u.Objects != keys {
				t.Errorf("usage is %+v, there are %d bytes in %d keys", u, live, keys)
			}
			if strings.HasPrefix(tc.dir, crdDir) && u.CRDs != 8 || !strings.HasPrefix(tc.dir, crdDir) && u.CRDs+u.CRDBytes != 0 {
				t.Errorf("usage is %+v", u)
			}
			s.SetLimits("a", Limits{})
			expect(t, "raised", create(t, s, name(9), tc.size), "")
		})
	}
}

func TestNoCRDsAtAll(t *testing.T) {
	s := open(t, nil)
	old := key(t, s, "a", crdDir+"old")
	expect(t, "by default", create(t, s, old, 300<<10), "")
	s.SetLimits("a", Limits{CRDs: -1, CRDBytes: -1})
	expect(t, "another", create(t, s, key(t, s, "a", crdDir+"new"), 10), CauseCRDs)
	expect(t, "marking one for deletion", update(t, s, old, 300<<10+500), "")
	remove(t, s, old)
	expect(t, "again", create(t, s, old, 10), CauseCRDs)
	expect(t, "a pod", create(t, s, key(t, s, "a", "pods/default/p"), 10), "")
}

// The largest object is refused by us, not by etcd, and what may be stored can be marked for deletion.
func TestObjectSize(t *testing.T) {
	const slack = MaxObjectBytes / updateSlack
	s := open(t, nil)
	long := strings.Repeat("n", 253)
	largest := key(t, s, "a", "configmaps/"+long+"/"+long)
	expect(t, "larger than the largest", create(t, s, largest, MaxObjectBytes+1), CauseObjectSize)
	expect(t, "the largest", create(t, s, largest, MaxObjectBytes), "")
	expect(t, "grown beyond", update(t, s, largest, MaxObjectBytes+slack+1), CauseObjectSize)
	expect(t, "grown for its deletion", update(t, s, largest, MaxObjectBytes+slack), "")
	expect(t, "shrunk", update(t, s, largest, MaxObjectBytes+10), "")

	s.SetLimits("a", Limits{ObjectBytes: 10 * MaxObjectBytes})
	expect(t, "a limit above the largest", create(t, s, largest+"2", MaxObjectBytes+1), CauseObjectSize)

	s.SetLimits("a", Limits{ObjectBytes: 16 << 10})
	expect(t, "above a lowered limit, kept", update(t, s, largest, MaxObjectBytes), "")
	expect(t, "marked for deletion", update(t, s, largest, MaxObjectBytes+200), "")
	expect(t, "above a lowered limit, grown", update(t, s, largest, MaxObjectBytes+5000), CauseObjectSize)
	small := key(t, s, "a", "configmaps/default/small")
	expect(t, "a new one", create(t, s, small, 16<<10+1), CauseObjectSize)
	expect(t, "a new one that fits", create(t, s, small, 16<<10), "")
	for range 5 { // in steps, too, it does not get far
		expect(t, "a sixteenth more", update(t, s, small, 17<<10), "")
		expect(t, "and more", update(t, s, small, 17<<10+1), CauseObjectSize)
	}
	remove(t, s, largest)
}

// Creators that race cannot pass a limit together.
func TestLimitsHoldUnderConcurrency(t *testing.T) {
	const limit = 50
	s := open(t, nil)
	s.SetLimits("a", Limits{Objects: 2 * limit, CRDs: limit})
	var creators sync.WaitGroup
	for w := range 16 {
		creators.Go(func() {
			for i := range 20 {
				for dir, cause := range map[string]Cause{crdDir: CauseCRDs, "pods/default/": CauseObjects} {
					err := create(t, s, key(t, s, "a", fmt.Sprint(dir, w, "-", i)), 10)
					if q, ok := IsQuota(err); err != nil && (!ok || q.Cause != cause && q.Cause != CauseObjects) {
						t.Error(err)
					}
				}
			}
		})
	}
	creators.Wait()
	if u := s.Usage("a"); u.Objects != 2*limit || u.CRDs > limit {
		t.Errorf("%+v", u)
	}
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	a := s.ledger.tenants["a"]
	a.settle(s.ledger.rev)
	if a.reserved != (amounts{}) {
		t.Errorf("%v stay reserved", a.reserved)
	}
}

// Above a lowered limit, updates may add a little in all, so that objects can be marked for deletion, but cannot make
// the tenant larger for good.
func TestLoweredLimit(t *testing.T) {
	const object, count = 10 << 10, 40
	s := open(t, nil)
	name := func(i int) string { return key(t, s, "a", fmt.Sprint("configmaps/default/", i)) }
	for i := range count {
		expect(t, "filling", create(t, s, name(i), object), "")
	}
	s.SetLimits("a", Limits{Bytes: 160 << 10, Objects: 5})
	expect(t, "a new object", create(t, s, name(count), 1), CauseStorage)
	for i := range count {
		expect(t, "an update that keeps the size", update(t, s, name(i), object), "")
	}
	had := s.Usage("a").Live
	if err := s.Compact(t.Context()); err != nil { // or so much rewriting is refused
		t.Fatal(err)
	}
	for i := range count {
		expect(t, "marked for deletion", update(t, s, name(i), object+200), "")
	}
	if err := s.Compact(t.Context()); err != nil {
		t.Fatal(err)
	}
	size, err := object+200, error(nil)
	for ; err == nil; size += 5000 {
		s.SetLimits("a", Limits{Bytes: 160 << 10, Objects: 5}) // as on every look at the Tenant
		err = update(t, s, name(0), size)
	}
	expect(t, "grown step by step", err, CauseStorage)
	if grown := s.Usage("a").Live - had; grown > 160<<10/updateSlack+leastSlack {
		t.Errorf("grew by %d", grown)
	}
	for i := range count - 20 {
		remove(t, s, name(i))
	}
	s.Usage("a")
	expect(t, "growing back to what it was", update(t, s, name(count-1), 15*object), CauseStorage)
	expect(t, "a new object", create(t, s, name(0), 1), CauseStorage)
}

// What is at every limit still starts: the API server's bookkeeping and the host's certificates are written, and reads
// and deletes are answered.
func TestFullTenantRestarts(t *testing.T) {
	dir := t.TempDir()
	full := Limits{Bytes: 64 << 10, Objects: 20, ObjectBytes: 16 << 10, CRDs: 1, CRDBytes: 1000}
	config := func(c *Config) { c.Dir = dir }
	s := open(t, config)
	s.SetLimits("a", full)
	prefix := tenantsPrefix + "a/"
	expect(t, "a CRD", create(t, s, prefix+crdPrefix+"c", 500), "")
	var err error
	for i := 0; err == nil; i++ {
		err = create(t, s, key(t, s, "a", fmt.Sprint("pods/default/", i)), 10<<10)
	}
	expect(t, "filling the bytes", err, CauseStorage)
	for i, err := 0, error(nil); err == nil; i++ {
		err = create(t, s, key(t, s, "a", fmt.Sprint("leases/default/", i)), 10)
	}
	if u := s.Usage("a"); u.Objects != 20 || u.CRDs != 1 {
		t.Fatalf("%+v", u)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = open(t, config)
	s.SetLimits("a", full)
	if u := s.Usage("a"); u.Objects != 20 || u.CRDs != 1 {
		t.Errorf("after a restart: %+v", u)
	}
	for _, own := range []string{
		"registry/ranges/serviceips", "registry/ranges/servicenodeports", "registry/masterleases/10.0.0.1",
		"registry/peerserverleases/x", "pki/certificates/new/new.crt", "pki/sealed/key",
	} {
		for range 2 {
			mustPut(t, s, prefix+own, 20<<10)
		}
	}
	lease, err := s.Client().Grant(t.Context(), 3600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Conn().Put(t.Context(), key(t, s, "a", "events/default/e"), "x", clientv3.WithLease(lease.ID))
	expect(t, "an event", err, CauseStorage)
	if err := s.Compact(t.Context()); err != nil { // or so much rewriting is refused
		t.Fatal(err)
	}
	expect(t, "a pod's status", update(t, s, key(t, s, "a", "pods/default/0"), 10<<10), "")
	expect(t, "a lease's renewal", update(t, s, key(t, s, "a", "leases/default/0"), 10), "")
	if got, err := s.Conn().Get(t.Context(), key(t, s, "a", ""), clientv3.WithPrefix()); err != nil || got.Count < 20 {
		t.Errorf("read %v, %v", got, err)
	}
	for i := range 7 {
		remove(t, s, key(t, s, "a", fmt.Sprint("pods/default/", i)))
	}
	remove(t, s, prefix+crdPrefix+"c")
	u := s.Usage("a")
	if live, keys := counted(t, s, "a"); u.Live != live || u.Keys != keys || u.CRDs != 0 {
		t.Errorf("%+v, there are %d bytes in %d keys", u, live, keys)
	}
	if err := s.Wipe(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

// books are what the ledger says of a tenant's registry, put together from a list of its keys instead.
func books(t *testing.T, s *Store, tenant string) (live amounts, dirs map[string]directory) {
	t.Helper()
	prefix := tenantsPrefix + tenant + "/"
	all, err := s.Client().Get(t.Context(), prefix, clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	dirs = make(map[string]directory)
	for _, item := range all.Kvs {
		size := int64(len(item.Key) + len(item.Value))
		live[bytesUsed] += size
		path, ok := strings.CutPrefix(string(item.Key), prefix+"registry/")
		if !ok {
			continue
		}
		live[objects]++
		if strings.HasPrefix(path, crdDir) {
			live[crds]++
			live[crdBytes] += size
		}
		parts := strings.Split(path, "/")
		for i := 1; i < len(parts) && i <= 3; i++ {
			dir := "registry/" + strings.Join(parts[:i], "/") + "/"
			dirs[dir] = directory{dirs[dir].keys + 1, dirs[dir].bytes + size}
		}
	}
	return live, dirs
}

func checkBooks(t *testing.T, s *Store, tenant string) {
	t.Helper()
	wantLive, wantDirs := books(t, s, tenant)
	s.Usage(tenant) // wait for the ledger
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	a := s.ledger.tenants[tenant]
	if a == nil {
		a = newAccount()
	}
	dirs := make(map[string]directory)
	for name, d := range a.dirs {
		dirs[name] = *d
	}
	if a.live != wantLive || !maps.Equal(dirs, wantDirs) {
		t.Errorf("tenant %s: the books say %v %v, a list says %v %v", tenant, a.live, dirs, wantLive, wantDirs)
	}
}

func TestBytes(t *testing.T) {
	s := open(t, nil)
	sizes := map[string]int{
		"pods/one/a": 100, "pods/one/b": 200, "pods/two/a": 400, "podtemplates/one/a": 1,
		"services/specs/one/a": 7, "services/endpoints/one/a": 8,
		"example.com/things/one/a": 1000, "example.com/things/one/b": 2000, "example.com/things/two/a": 3000, "example.com/others/a": 5000,
		"minions/a": 50,
	}
	for name, size := range sizes {
		mustPut(t, s, key(t, s, "a", name), size)
	}
	for range 3 {
		mustPut(t, s, key(t, s, "a", "pods/one/b"), 300)
	}
	remove(t, s, key(t, s, "a", "example.com/things/one/b"))
	s.Usage("a")
	each := len(key(t, s, "a", ""))
	for dir, names := range map[string][]string{
		"/pods":                          {"pods/one/a", "pods/one/b", "pods/two/a"},
		"/pods/":                         {"pods/one/a", "pods/one/b", "pods/two/a"},
		"pods/one":                       {"pods/one/a", "pods/one/b"},
		"/services/specs":                {"services/specs/one/a"},
		"/example.com/things":            {"example.com/things/one/a", "example.com/things/two/a"},
		"/example.com/things/two":        {"example.com/things/two/a"},
		"/minions":                       {"minions/a"},
		"/nothing":                       nil,
		"":                               nil,
		"/example.com/things/one/b":      nil,
		"/example.com/things/one/b/c/d/": nil,
	} {
		sizes["pods/one/b"] = 300
		var want int64
		for _, name := range names {
			want += int64(each + len(name) + sizes[name])
		}
		if bytes, keys := s.Bytes("a", dir); bytes != want || keys != int64(len(names)) {
			t.Errorf("below %q are %d bytes in %d keys, want %d in %d", dir, bytes, keys, want, len(names))
		}
	}
	if bytes, keys := s.Bytes("nobody", "/pods"); bytes != 0 || keys != 0 {
		t.Error(bytes, keys)
	}
	checkBooks(t, s, "a")
	if err := s.Wipe(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if bytes, keys := s.Bytes("a", "/pods"); bytes != 0 || keys != 0 {
		t.Error(bytes, keys)
	}
}

// What a tenant's registry holds need not be objects: the store never looks into it.
func TestPoison(t *testing.T) {
	dir := t.TempDir()
	config := func(c *Config) {
		c.Dir = dir
		c.MinHistory, c.CompactInterval = 20*time.Millisecond, 40*time.Millisecond
	}
	s := open(t, config)
	nested := strings.Repeat(`{"a":`, 250_000) + "1" + strings.Repeat("}", 250_000)
	values := map[string]string{
		"empty":          "",
		"garbage":        "\x00\xff\xfe garbage \x80",
		"protobuf":       "k8s\x00\n\x0c\n\x02v1\x12\x06Secret\x12\xff\xff\xff\xff\x0f",
		"wrong kind":     `{"kind":"Pod","apiVersion":"v1","metadata":{"name":42}}`,
		"nested":         nested,
		"refusal":        QuotaError{Tenant: "b", Cause: CauseStorage, Used: 2, Limit: 1}.Error(),
		"largest":        strings.Repeat("\xff", MaxObjectBytes),
		"another's name": tenantsPrefix + "b/" + registryPrefix + "pods/x",
	}
	names := []string{
		"registry/", "registry//", "registry///////////////", "registry", "", "/", "//", "..", "registry/../../b/registry/pods/x",
		"registry/pods", "registry/pods/", "registry/pods/default/\x00", "registry/pods/default/\xff\xff", "registry/\xff/\x00/\n/",
		crdPrefix, crdPrefix + "/", strings.TrimSuffix(crdPrefix, "/"), "registry/ranges/serviceips", "registry/ranges", "pki", "health",
		"registry/" + strings.Repeat("d/", 10_000), "registry/secrets/" + strings.Repeat("n", 100_000),
	}
	put := func(key, value string) {
		t.Helper()
		if _, err := s.Conn().Put(t.Context(), key, value); err != nil {
			t.Errorf("put %.100q: %v", key, err)
		}
	}
	for what, value := range values {
		for _, kind := range []string{"secrets/default/", "namespaces/", "clusterroles/", crdDir, "apiregistration.k8s.io/apiservices/"} {
			put(key(t, s, "a", kind+what), value)
		}
	}
	for _, name := range names {
		for _, value := range []string{"", "x", values["garbage"]} {
			put(tenantsPrefix+"a/"+name, value)
		}
	}
	for _, host := range []string{tenantsPrefix, tenantsPrefix + "/", tenantsPrefix + "//registry/pods/x", tenantsPrefix + "a", tenantsPrefix + "\xff"} {
		put(host, values["garbage"])
	}
	put(key(t, s, "b", "pods/default/fine"), "fine")

	check := func() {
		t.Helper()
		checkBooks(t, s, "a")
		checkBooks(t, s, "b")
		if uids, err := s.Tenants(t.Context()); err != nil || fmt.Sprint(uids) != "[a b]" {
			t.Errorf("tenants are %q, %v", uids, err)
		}
		if _, err := s.Status(t.Context()); err != nil {
			t.Error(err)
		}
	}
	check()
	if err := errors.Join(s.Compact(t.Context()), s.Defragment(t.Context()), s.Close()); err != nil {
		t.Fatal(err)
	}
	s = open(t, config)
	check()
	if got, err := s.Conn().Get(t.Context(), key(t, s, "a", "secrets/default/nested")); err != nil || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != nested {
		t.Error("what is stored comes back changed:", err)
	}
	if err := s.Wipe(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, keys := counted(t, s, "a"); keys != 0 {
		t.Errorf("%d keys are left", keys)
	}
	checkBooks(t, s, "b")
	if u := s.Usage("b"); u.Keys != 1 {
		t.Errorf("the neighbour has %+v", u)
	}
}

// largestPage notes how much is read at once.
type largestPage struct {
	mvcc.WatchableKV
	keys int
}

func (kv *largestPage) Range(ctx context.Context, key, end []byte, opts mvcc.RangeOptions) (*mvcc.RangeResult, error) {
	page, err := kv.WatchableKV.Range(ctx, key, end, opts)
	if err == nil {
		kv.keys = max(kv.keys, len(page.KVs))
	}
	return page, err
}

// A count at start reads little at a time, whatever the tenants' objects are like: small ones first, or large ones.
func TestScanReadsLargeObjectsAFewAtATime(t *testing.T) {
	s := open(t, nil)
	for i := range 200 {
		mustPut(t, s, key(t, s, "a", fmt.Sprintf("configmaps/small/%03d", i)), 1)
	}
	for i := range 40 {
		mustPut(t, s, key(t, s, "a", fmt.Sprintf("configmaps/tall/%03d", i)), 256<<10)
	}
	l := newLedger(DefaultTenantQuota)
	watched := &largestPage{WatchableKV: s.etcd.Server.KV()}
	ctx, cancel := context.WithCancel(t.Context())
	follow, err := l.start(ctx, watched)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := follow(); err != nil {
		t.Error(err)
	}
	if live, keys := counted(t, s, "a"); l.usage("a").Live != live || l.usage("a").Keys != keys {
		t.Errorf("%+v, there are %d bytes in %d keys", l.usage("a"), live, keys)
	}
	if watched.keys > 32 {
		t.Errorf("a page had %d keys", watched.keys)
	}
}

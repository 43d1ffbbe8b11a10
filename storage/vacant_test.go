// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
)

// Whoever waits for the first key of a directory is told of it, and of no other's.
func TestVacant(t *testing.T) {
	l := newLedger(0)
	put := func(key string, rev int64) {
		l.record([]*mvccpb.Event{{Type: mvccpb.Event_PUT, Kv: &mvccpb.KeyValue{Key: []byte(key), ModRevision: rev}}})
	}
	put("/tenants/a/registry/pods/default/one", 7)
	told := map[string]int{}
	wait := func(tenant, dir string) (rev int64, forget func()) {
		t.Helper()
		rev, forget, ok := l.vacant(tenant, dir, func() { told[tenant+dir]++ })
		if !ok {
			t.Fatalf("%s of %s has keys", dir, tenant)
		}
		return rev, forget
	}
	if _, _, ok := l.vacant("a", "/pods", func() { t.Error("told of what there was") }); ok {
		t.Error("a directory with a key is vacant")
	}
	if rev, _ := wait("a", "/jobs"); rev != 7 {
		t.Errorf("vacant at revision %d, want 7", rev)
	}
	wait("a", "/jobs")
	wait("b", "/jobs/")
	_, forget := wait("a", "/apps.example.com/things")
	forget()

	put("/tenants/a/registry/jobsets/default/one", 8)
	put("/tenants/b/registry/pods/default/one", 9)
	put("/tenants/a/registry/apps.example.com/things/one", 10)
	if len(told) > 0 {
		t.Fatalf("told %v before there was a job", told)
	}
	put("/tenants/a/registry/jobs/default/one", 11)
	put("/tenants/a/registry/jobs/default/two", 12)
	if told["a/jobs"] != 2 || len(told) != 1 {
		t.Errorf("told %v, want each of the two who waited for a's jobs once", told)
	}
	if len(l.vacancies) != 1 {
		t.Errorf("%d directories are waited for, want b's jobs alone", len(l.vacancies))
	}
}

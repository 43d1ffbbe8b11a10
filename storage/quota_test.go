// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestQuotaBoundsGrowthOnly(t *testing.T) {
	const quota, object = 64 << 10, 1 << 10
	s := open(t, func(c *Config) { c.TenantQuota = quota })
	c, ctx, value := s.Conn(), t.Context(), strings.Repeat("x", object)
	prefix := key(t, s, "full", "")

	var refusal error
	last := ""
	for i := 0; refusal == nil; i++ {
		last = prefix + fmt.Sprint(i)
		_, refusal = c.Put(ctx, last, value)
	}
	if u := s.Usage("full"); u.Live > quota || u.Live < quota-2*object || u.Quota != quota || !u.Full {
		t.Errorf("refused at %+v", u)
	}
	if status.Code(refusal) != codes.ResourceExhausted {
		t.Errorf("refused with %v", status.Code(refusal))
	}
	if q, ok := IsQuota(refusal); !ok || q.Tenant != "full" || q.Cause != CauseStorage || q.Limit != quota || q.Used <= quota {
		t.Errorf("refusal reads as %+v %v", q, ok)
	}
	if !strings.Contains(refusal.Error(), "delete objects or raise spec.limits.storage") {
		t.Errorf("no remedy in %q", refusal)
	}

	first, big, room := prefix+"0", strings.Repeat("x", quota/updateSlack+leastSlack+4*object), strings.Repeat("x", object+100)
	for _, tc := range []struct {
		name    string
		ops     func(context.Context) error
		refused bool
	}{
		{"read", run(c.Get(ctx, first)), false},
		{"read transaction", commit(c, nil, clientv3.OpGet(first)), false},
		{"an update that keeps the size", commit(c, nil, clientv3.OpPut(first, value)), false},
		{"an update that shrinks", commit(c, nil, clientv3.OpPut(first, value[:object-200])), false},
		{"create", commit(c, nil, clientv3.OpPut(last, value)), true},
		{"create as an API server does", commit(c, []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(last), "=", 0)},
			clientv3.OpPut(last, value)), true},
		{"create nested", commit(c, nil, clientv3.OpTxn(nil, []clientv3.Op{
			clientv3.OpTxn(nil, nil, []clientv3.Op{clientv3.OpPut(last, value)})}, nil)), true},
		{"create beside a delete", commit(c, nil, clientv3.OpDelete(first), clientv3.OpPut(last, value)), true},
		{"an update that grows a little", commit(c, nil, clientv3.OpPut(first, room)), false},
		{"an update that grows much", commit(c, nil, clientv3.OpPut(first, big)), true},
		{"another tenant", commit(c, nil, clientv3.OpPut(key(t, s, "other", "k"), value)), false},
		{"the host", commit(c, nil, clientv3.OpPut("/host", big)), false},
		{"two tenants, one full", commit(c, nil, clientv3.OpPut(key(t, s, "other", "l"), value), clientv3.OpPut(last, value)), true},
		{"delete transaction", commit(c, nil, clientv3.OpDelete(first), clientv3.OpDelete(prefix+"1")), false},
		{"delete", func(ctx context.Context) error { _, err := c.Delete(ctx, prefix+"2"); return err }, false},
		{"create after deletes", commit(c, nil, clientv3.OpPut(last, value)), false},
		{"compaction", func(ctx context.Context) error { return s.Compact(ctx) }, false},
	} {
		err := tc.ops(ctx)
		if _, refused := IsQuota(err); refused != tc.refused || err != nil && !refused {
			t.Errorf("%s: %v", tc.name, err)
		}
	}

	if _, err := c.Delete(ctx, prefix+"3"); err != nil {
		t.Fatal(err)
	}
	if u := s.Usage("full"); u.Full && u.Live+int64(len(big)) <= quota {
		t.Errorf("with room again it says %+v", u)
	}
	for range 3 {
		mustPut(t, s, prefix+"more"+fmt.Sprint(s.Usage("full").Keys), 100)
	}
	s.SetLimits("full", Limits{Bytes: 10 * quota})
	mustPut(t, s, prefix+"raised", quota)
	s.SetLimits("full", Limits{})
	if _, err := c.Put(ctx, prefix+"lowered", value); !isQuota(err) {
		t.Errorf("above a lowered quota: %v", err)
	}
}

func run[T any](_ T, err error) func(context.Context) error {
	return func(context.Context) error { return err }
}

func commit(c *clientv3.Client, cmps []clientv3.Cmp, ops ...clientv3.Op) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := c.Txn(ctx).If(cmps...).Then(ops...).Commit()
		return err
	}
}

func isQuota(err error) bool { _, ok := IsQuota(err); return ok }

// Writers that race cannot pass the quota together, and nothing stays reserved after them.
func TestQuotaHoldsUnderConcurrency(t *testing.T) {
	const quota = 128 << 10
	s := open(t, func(c *Config) { c.TenantQuota = quota })
	var refused atomic.Int64
	var writers sync.WaitGroup
	for w := range 16 {
		writers.Go(func() {
			for i := range 40 {
				_, err := s.Conn().Put(t.Context(), fmt.Sprintf("%sbusy/%s%d/%d", tenantsPrefix, registryPrefix, w, i), strings.Repeat("x", 1000))
				if isQuota(err) {
					refused.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	live, _ := counted(t, s, "busy")
	if live > quota || live < quota-2000 || refused.Load() == 0 {
		t.Errorf("%d of %d bytes live, %d refused", live, quota, refused.Load())
	}
	s.Usage("busy")
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	a := s.ledger.tenants["busy"]
	a.settle(s.ledger.rev)
	if a.reserved != (amounts{}) || len(a.pending) != 0 {
		t.Errorf("%v stay reserved", a.reserved)
	}
}

func TestQuotaCountsWhatARestartFinds(t *testing.T) {
	dir := t.TempDir()
	s := open(t, func(c *Config) { c.Dir = dir })
	mustPut(t, s, key(t, s, "a", "k"), 5000)
	s.Close()
	s = open(t, func(c *Config) { c.Dir = dir; c.TenantQuota = 5000 })
	if _, err := s.Conn().Put(t.Context(), key(t, s, "a", "l"), "x"); !isQuota(err) {
		t.Error(err)
	}
}

func TestIsQuota(t *testing.T) {
	for _, q := range []QuotaError{
		{"0c7e-9a", CauseStorage, 268_435_999, 256 << 20},
		{"0c7e-9a", CauseHistory, 1 << 40, 512 << 20},
		{"a", CauseBackend, 7 << 30, 6 << 30},
		{"a", CauseStorage, 300, 100},
		{"a", CauseObjects, 50_001, 50_000},
		{"a", CauseObjectSize, 2 << 20, MaxObjectBytes},
		{"a", CauseCRDs, 1, 0},
		{"a", CauseCRDStorage, 17 << 20, 16 << 20},
	} {
		for how, err := range map[string]error{
			"itself":  q,
			"wrapped": fmt.Errorf("create pod: %w", q),
			"status":  q.GRPCStatus().Err(),
			"text":    fmt.Errorf("Internal error: %v (in %s)", q.GRPCStatus().Err(), "etcd3"),
		} {
			if got, ok := IsQuota(err); !ok || got != q {
				t.Errorf("%s: %+v %v, want %+v", how, got, ok, q)
			}
		}
		if field := q.Field(); field != "" && q.Cause != CauseHistory && !strings.Contains(q.Error(), field) {
			t.Errorf("%q does not name %s", q, field)
		}
		if !errors.Is(q, ErrQuota) {
			t.Error("is not ErrQuota")
		}
	}
	for _, err := range []error{nil, errors.New("x"), ErrQuota, status.Error(codes.ResourceExhausted, "grpc: message too large")} {
		if q, ok := IsQuota(err); ok {
			t.Errorf("%v reads as %+v", err, q)
		}
	}
}

// Rewriting one object does not fill the shared file: history is refused only while it cannot be compacted.
func TestHistoryIsBounded(t *testing.T) {
	const quota, object = 512 << 10, 64 << 10
	t.Run("compacted early", func(t *testing.T) {
		s := open(t, func(c *Config) {
			c.TenantQuota, c.CompactInterval, c.MinHistory = quota, time.Hour, 20*time.Millisecond
		})
		for range 100 {
			eventually(t, "a rewrite is let through", func() bool {
				_, err := s.Conn().Put(t.Context(), key(t, s, "a", "k"), strings.Repeat("x", object))
				if q, ok := IsQuota(err); ok && q.Cause == CauseHistory {
					return false
				}
				if err != nil {
					t.Fatal(err)
				}
				return true
			})
			if u := s.Usage("a"); u.History > 2*quota+object+1024 || u.Keys != 1 {
				t.Fatalf("usage is %+v", u)
			}
		}
		if s.CompactRevision() <= 1 {
			t.Error("nothing was compacted")
		}
	})
	t.Run("refused", func(t *testing.T) {
		s := open(t, func(c *Config) { c.TenantQuota, c.CompactInterval, c.MinHistory = quota, time.Hour, time.Hour })
		var err error
		for err == nil {
			_, err = s.Conn().Put(t.Context(), key(t, s, "a", "k"), strings.Repeat("x", object))
		}
		if q, ok := IsQuota(err); !ok || q.Cause != CauseHistory || q.Limit != 2*quota {
			t.Error(err)
		}
		mustPut(t, s, key(t, s, "b", "k"), object)
		if err := s.Compact(t.Context()); err != nil {
			t.Fatal(err)
		}
		if u := s.Usage("a"); u.History != 0 {
			t.Errorf("after a compaction: %+v", u)
		}
		mustPut(t, s, key(t, s, "a", "k"), object)
		if u := s.Usage("a"); u.History != int64(object+len("/tenants/a/registry/k")) {
			t.Errorf("after one rewrite: %+v", u)
		}
	})
}

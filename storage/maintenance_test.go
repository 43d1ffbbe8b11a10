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
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// still is a configuration under which nothing happens by itself.
func still(c *Config) { c.CompactInterval, c.MinHistory = 24*time.Hour, 24*time.Hour }

func (s *Store) mustRound(t *testing.T, u *upkeep, now time.Time) {
	t.Helper()
	if err := s.round(t.Context(), u, now); err != nil {
		t.Fatal(err)
	}
}

// The revision of one interval ago is compacted, so a watcher may always be that late.
func TestCompactionKeepsOneInterval(t *testing.T) {
	s := open(t, still)
	start := time.Now()
	u := newUpkeep(s.cfg, start)
	u.CompactInterval, u.MinHistory = 5*time.Minute, 10*time.Second
	for minute, want := range []int64{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 6, 6, 6, 6, 6, 11} {
		s.mustRound(t, u, start.Add(time.Duration(minute)*time.Minute))
		if got := s.CompactRevision(); got != want {
			t.Errorf("after %d minutes compacted to %d, want %d", minute, got, want)
		}
		mustPut(t, s, "/host", 10) // revision minute+2
		s.Usage("")
	}
}

func TestDefragmentationWhenWorthwhile(t *testing.T) {
	s := open(t, still)
	fill := func() {
		for i := range 64 {
			mustPut(t, s, fmt.Sprint("/host/", i), 64<<10)
		}
		if _, err := s.Client().Delete(t.Context(), "/host/", clientv3.WithPrefix()); err != nil {
			t.Fatal(err)
		}
		if err := s.Compact(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "pages are free", func() bool {
			mustPut(t, s, "/poke", 1) // what a commit freed counts as free from the next commit on
			size, inUse := s.sizes()
			return size > 4<<20 && inUse < size/2
		})
	}
	now := time.Now()
	u := newUpkeep(s.cfg, now)
	for _, tc := range []struct {
		name         string
		after        time.Duration
		min, max     int64
		defragmented int64
	}{
		{"too small", time.Hour, 1 << 40, 1 << 40, 0},
		{"too much to copy", time.Hour, 1, 1, 0},
		{"worthwhile", time.Hour, 1, 1 << 40, 1},
		{"just done", time.Second, 1, 1 << 40, 1},
		{"long ago", 2 * time.Hour, 1, 1 << 40, 2},
	} {
		fill()
		now = now.Add(tc.after)
		u.DefragMinBytes, u.DefragMaxBytes = tc.min, tc.max
		s.mustRound(t, u, now)
		if got := s.defragmentations.Load(); got != tc.defragmented {
			t.Errorf("%s: %d defragmentations, want %d", tc.name, got, tc.defragmented)
		}
	}
}

// Writers and readers see a defragmentation as a delay.
func TestDefragmentationFailsNobody(t *testing.T) {
	s := open(t, still)
	for i := range 300 {
		mustPut(t, s, fmt.Sprint("/host/", i%100), 64<<10)
	}
	if err := s.Compact(t.Context()); err != nil {
		t.Fatal(err)
	}
	before, _ := s.sizes()
	var done atomic.Bool
	var users sync.WaitGroup
	var writes, during atomic.Int64
	for w := range 4 {
		users.Go(func() {
			for i := 0; !done.Load(); i++ {
				name := fmt.Sprintf("%sa/%d/%d", tenantsPrefix, w, i%10)
				if _, err := s.Conn().Put(t.Context(), name, "value"); err != nil {
					t.Error(err)
				}
				if got, err := s.Conn().Get(t.Context(), name); err != nil || got.Count != 1 {
					t.Error(got, err)
				}
				writes.Add(1)
			}
		})
	}
	eventually(t, "writers write", func() bool { return writes.Load() > 20 })
	for range 3 {
		at := writes.Load()
		if err := s.Defragment(t.Context()); err != nil {
			t.Error(err)
		}
		during.Add(writes.Load() - at)
	}
	at := writes.Load()
	eventually(t, "writers go on", func() bool { return writes.Load() > at+20 })
	done.Store(true)
	users.Wait()
	if after, _ := s.sizes(); after >= before {
		t.Errorf("the file was %d bytes and is %d", before, after)
	}
	live, keys := counted(t, s, "a")
	if u := s.Usage("a"); u.Live != live || u.Keys != keys {
		t.Errorf("usage is %+v, there are %d bytes in %d keys", u, live, keys)
	}
}

// A nearly full backend refuses tenants but not the host, never reaches etcd's alarm, and recovers when they delete.
func TestFullBackendRefusesTenantsFirst(t *testing.T) {
	s := open(t, func(c *Config) {
		c.BackendQuota, c.TenantQuota = 32<<20, 1<<30
		c.MinHistory, c.CompactInterval = 50*time.Millisecond, time.Hour
	})
	var full atomic.Bool
	var writers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			for i := 0; !full.Load(); i++ {
				_, err := s.Conn().Put(t.Context(), fmt.Sprintf("%sgreedy/%s%d/%d", tenantsPrefix, registryPrefix, w, i), strings.Repeat("x", 32<<10))
				if q, ok := IsQuota(err); ok && q.Cause == CauseBackend && q.Tenant == "greedy" {
					full.Store(true)
				} else if err != nil {
					t.Error(err)
					full.Store(true)
				}
			}
		})
	}
	writers.Wait()
	mustPut(t, s, "/host/tenant-to-delete", 32<<10)
	status, err := s.Status(t.Context())
	if err != nil || status.NoSpace || status.InUse < percent(status.Quota, tightPercent) {
		t.Errorf("%+v %v", status, err)
	}
	if err := s.Wipe(t.Context(), "greedy"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "space returns", func() bool {
		_, err := s.Conn().Put(t.Context(), key(t, s, "modest", "k"), strings.Repeat("x", 32<<10))
		return err == nil
	})
	if status, err := s.Status(t.Context()); err != nil || status.NoSpace {
		t.Errorf("%+v %v", status, err)
	}
}

// Should etcd's alarm be raised all the same, it is cleared as soon as there is space.
func TestNoSpaceIsRecovered(t *testing.T) {
	s := open(t, func(c *Config) {
		c.BackendQuota = 16 << 20
		c.MinHistory, c.CompactInterval = 50*time.Millisecond, time.Hour
	})
	var err error
	for i := 0; err == nil; i++ { // nothing holds back the host
		_, err = s.Client().Put(t.Context(), fmt.Sprint("/host/", i), strings.Repeat("x", 512<<10))
	}
	if !errors.Is(err, rpctypes.ErrNoSpace) {
		t.Fatal(err)
	}
	if _, err := s.Client().Delete(t.Context(), "/host/", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the alarm is cleared", func() bool {
		_, err := s.Client().Put(t.Context(), "/host/again", "x")
		return err == nil
	})
	if status, err := s.Status(t.Context()); err != nil || status.NoSpace {
		t.Errorf("%+v %v", status, err)
	}
}

// etcd's fatal log lines end the store, not the process.
func TestFatalIsAnError(t *testing.T) {
	for name, fatal := range map[string]func(*zap.Logger){
		"fatal": func(l *zap.Logger) {
			l.Fatal("failed to save entries", zap.Error(syscall.ENOSPC), zap.Int("entries", 3))
		},
		"panic": func(l *zap.Logger) {
			l.Panic("failed to save entries", zap.Error(syscall.ENOSPC), zap.Int("entries", 3))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := Open(t.Context(), Config{Dir: t.TempDir(), UnsafeNoFsync: true})
			if err != nil {
				t.Fatal(err)
			}
			go fatal(s.etcdLog)
			err = <-s.Err()
			if !errors.Is(err, syscall.ENOSPC) {
				t.Error(err)
			}
			for _, want := range []string{"restart the process", "failed to save entries entries=3", "free space"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q lacks %q", err, want)
				}
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if _, open := <-s.Err(); open {
				t.Error("two errors")
			}
		})
	}
}

func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g gate
		ctx := t.Context()
		if err := g.enter(ctx); err != nil {
			t.Fatal(err)
		}
		shut, entered := false, 0
		go func() {
			if err := g.close(ctx); err != nil {
				t.Error(err)
			}
			shut = true
		}()
		synctest.Wait()
		for range 3 {
			go func() {
				if err := g.enter(ctx); err != nil {
					t.Error(err)
				}
				entered++
				g.leave()
			}()
			synctest.Wait()
		}
		if shut || entered != 0 {
			t.Fatalf("shut %v with one inside, %d entered", shut, entered)
		}
		impatient, cancel := context.WithCancelCause(ctx)
		cancel(errors.New("no time"))
		if err := g.enter(impatient); err == nil || err.Error() != "no time" {
			t.Error(err)
		}
		g.leave()
		synctest.Wait()
		if !shut || entered != 0 {
			t.Fatalf("shut %v with none inside, %d entered", shut, entered)
		}
		g.open()
		synctest.Wait()
		if entered != 3 {
			t.Errorf("%d entered the open gate", entered)
		}

		if err := g.enter(ctx); err != nil {
			t.Fatal(err)
		}
		if err := g.close(impatient); err == nil {
			t.Error("closed with one inside")
		}
		if err := g.enter(ctx); err != nil {
			t.Error("an abandoned close keeps the gate shut:", err)
		}
		g.leave()
		g.leave()
		if g.inside != 0 {
			t.Error(g.inside)
		}
	})
}

// BenchmarkDefragment measures the pause: one operation is a defragmentation of 200 MiB of live data.
func BenchmarkDefragment(b *testing.B) {
	s, err := Open(b.Context(), Config{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	for i := range 200 << 20 / (4 << 10) / 100 {
		ops := make([]clientv3.Op, 100)
		for j := range ops {
			ops[j] = clientv3.OpPut(fmt.Sprint("/host/", i, "/", j), strings.Repeat("x", 4<<10))
		}
		if _, err := s.Client().Txn(b.Context()).Then(ops...).Commit(); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(200 << 20)
	for b.Loop() {
		if err := s.Defragment(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPut measures what a put costs with and without the ledger in its way.
func BenchmarkPut(b *testing.B) {
	s, err := Open(b.Context(), Config{Dir: b.TempDir(), UnsafeNoFsync: true})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	value := strings.Repeat("x", 2<<10)
	for name, prefix := range map[string]string{"tenant": tenantsPrefix + "a/" + registryPrefix + "pods/default/", "host": "/host/"} {
		b.Run(name, func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				if _, err := s.Client().Put(b.Context(), prefix+fmt.Sprint(i%1000), value); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

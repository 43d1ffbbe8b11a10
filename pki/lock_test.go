// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

func TestLockIsHeldByOne(t *testing.T) {
	ctx := t.Context()
	// Two hosts, each with several goroutines.
	hosts := []*Storage{newStorage(t), newStorage(t)}
	var mu sync.Mutex
	var inside, entered int
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			s := hosts[i%len(hosts)]
			if err := s.Lock(ctx, "issue"); err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			inside++
			entered++
			if inside != 1 {
				t.Errorf("%d hold the lock", inside)
			}
			mu.Unlock()
			mu.Lock()
			inside--
			mu.Unlock()
			if err := s.Unlock(ctx, "issue"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if entered != 8 {
		t.Errorf("%d got the lock, want 8", entered)
	}
	if err := hosts[0].Unlock(ctx, "issue"); err == nil {
		t.Error("a lock that is not held can be unlocked")
	}
}

func TestLocksDoNotGetInEachOthersWay(t *testing.T) {
	s, ctx := newStorage(t), t.Context()
	for _, name := range []string{"a/b", "a", "b"} {
		if err := s.Lock(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a", "a/b", "b"} {
		if err := s.Unlock(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLockOfDeadHolderExpires(t *testing.T) {
	holder := newClient(t)
	dying := NewStorage(holder, prefix(t), newSealer(t, 1))
	dying.lockTTL = time.Second
	if err := dying.Lock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
	holder.Close() // as a killed process: nothing keeps the lease alive or revokes it
	s := NewStorage(newClient(t), prefix(t), newSealer(t, 1))
	if err := s.Lock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
	if err := s.Unlock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
}

// etcd did not hear of the release; the lease must then run out.
func TestLockExpiresWhenItsReleaseIsLost(t *testing.T) {
	s := newStorage(t)
	s.lockTTL = time.Second
	if err := s.Lock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Unlock(gone, "issue"); err == nil {
		t.Fatal("released although etcd was not asked")
	}
	if err := s.Lock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
	if err := s.Unlock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
}

func TestLockHonoursContext(t *testing.T) {
	s := newStorage(t)
	if err := s.Lock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan error)
	go func() { waited <- s.Lock(ctx, "issue") }()
	cancel()
	if err := <-waited; !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want context.Canceled", err)
	}
	// The one that gave up has left the queue.
	if err := s.Unlock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
	if err := s.Lock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
	if err := s.Unlock(t.Context(), "issue"); err != nil {
		t.Fatal(err)
	}
}

func TestFenceKeepsOutAnOvertakenHolder(t *testing.T) {
	s, ctx := newStorage(t), t.Context()
	paused, successor := &fence{Storage: s}, &fence{Storage: s}
	if err := paused.Lock(ctx, "issue"); err != nil {
		t.Fatal(err)
	}
	if err := paused.Store(ctx, "a.crt", []byte("old")); err != nil {
		t.Fatal(err)
	}
	// Its lease runs out while it stands still.
	if _, err := s.client.Revoke(ctx, paused.lock.session.Lease()); err != nil {
		t.Fatal(err)
	}
	if err := successor.Lock(ctx, "issue"); err != nil {
		t.Fatal(err)
	}
	if err := successor.Store(ctx, "a.crt", []byte("new")); err != nil {
		t.Fatal(err)
	}
	if err := paused.Store(ctx, "a.crt", []byte("old")); !errors.Is(err, errLockLost) {
		t.Errorf("store: %v, want errLockLost", err)
	}
	if err := paused.Delete(ctx, "a.crt"); !errors.Is(err, errLockLost) {
		t.Errorf("delete: %v, want errLockLost", err)
	}
	if err := paused.Unlock(ctx, "issue"); err != nil {
		t.Errorf("unlock of a lost lock: %v", err)
	}
	if got, err := s.Load(ctx, "a.crt"); err != nil || string(got) != "new" {
		t.Errorf("got %q, %v; want the successor's", got, err)
	}
	if err := successor.Unlock(ctx, "issue"); err != nil {
		t.Error(err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

// DefaultLockTTL is how long a lock outlives a holder that is gone: long enough
// for an etcd election and a garbage-collection pause, short enough that a
// killed process delays an issuance by less than a client's patience.
const DefaultLockTTL = 15 * time.Second

var errLockLost = errors.New("the lock that guards this write was lost to another host; it is retried at the next check")

// lock is one held lock: a key that lives as long as its lease is kept alive.
type lock struct {
	session *concurrency.Session
	mutex   *concurrency.Mutex
}

// held is the condition that the lock has not been lost; it fences a write.
func (l *lock) held() clientv3.Cmp { return l.mutex.IsOwner() }

// Lock acquires the lock name, which another process or goroutine may hold. It
// is a lease: a holder that stalls for longer than the TTL may lose it without
// noticing, so what it protects must tolerate that. Our own issuing does, by
// fencing its writes with the lock's revision.
func (s *Storage) Lock(ctx context.Context, name string) error {
	l, err := s.acquire(ctx, name)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[name] = append(s.held[name], l)
	return nil
}

// Unlock releases the lock name. A lock whose lease has run out is released.
func (s *Storage) Unlock(ctx context.Context, name string) error {
	s.mu.Lock()
	locks := s.held[name]
	if len(locks) == 0 {
		s.mu.Unlock()
		return fmt.Errorf("unlock %q: not locked by this storage", name)
	}
	// There are several only if one was lost and taken again in this process;
	// the oldest is then the lost one, and letting that go harms nobody.
	if len(locks) == 1 {
		delete(s.held, name)
	} else {
		s.held[name] = locks[1:]
	}
	s.mu.Unlock()
	return s.release(ctx, name, locks[0])
}

func (s *Storage) acquire(ctx context.Context, name string) (*lock, error) {
	// The lease is granted here because a session would do it without ctx.
	lease, err := s.client.Grant(ctx, max(1, int64(s.lockTTL/time.Second)))
	if err != nil {
		return nil, fmt.Errorf("lock %q: %w", name, err)
	}
	session, err := concurrency.NewSession(s.client, concurrency.WithLease(lease.ID))
	if err != nil {
		return nil, fmt.Errorf("lock %q: %w", name, err)
	}
	// Escaped, or the waiters for "a/b" would stand in the queue for "a".
	l := &lock{session: session, mutex: concurrency.NewMutex(session, s.lockKey(url.PathEscape(name)))}
	if err := l.mutex.Lock(ctx); err != nil {
		err = fmt.Errorf("lock %q: %w", name, err)
		return nil, errors.Join(err, s.release(context.WithoutCancel(ctx), name, l))
	}
	return l, nil
}

func (s *Storage) release(ctx context.Context, name string, l *lock) error {
	l.session.Orphan()
	// After its TTL the lease is gone whether or not etcd heard us.
	ctx, cancel := context.WithTimeout(ctx, s.lockTTL)
	defer cancel()
	_, err := s.client.Revoke(ctx, l.session.Lease())
	if err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return fmt.Errorf("unlock %q: %w", name, err)
	}
	return nil
}

// fence is a Storage for one operation under one lock. Between Lock and Unlock
// its writes land only while the lock is still held, so a host that was paused
// and overtaken cannot undo its successor's work. It is not safe for concurrent
// use.
type fence struct {
	*Storage
	lock *lock
}

func (f *fence) Lock(ctx context.Context, name string) (err error) {
	f.lock, err = f.acquire(ctx, name)
	return err
}

func (f *fence) Unlock(ctx context.Context, name string) error {
	l := f.lock
	f.lock = nil
	return f.release(ctx, name, l)
}

func (f *fence) Store(ctx context.Context, key string, value []byte) error {
	return f.store(ctx, key, value, f.guards()...)
}

func (f *fence) Delete(ctx context.Context, key string) error {
	return f.delete(ctx, key, f.guards()...)
}

func (f *fence) guards() []clientv3.Cmp {
	if f.lock == nil {
		return nil
	}
	return []clientv3.Cmp{f.lock.held()}
}

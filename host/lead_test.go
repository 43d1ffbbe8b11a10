// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenantd/tenantd/storage"
)

// patience is far more than anything here takes.
const patience = time.Minute

func openStore(t *testing.T) *storage.Store {
	t.Helper()
	s, err := storage.Open(t.Context(), storage.Config{Dir: t.TempDir(), UnsafeNoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// leadsOf are the leads of a host that lives until the test ends or stop is called.
func leadsOf(t *testing.T, client *clientv3.Client, name string) (l *leads, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l = newLeads(client, name, slog.New(slog.DiscardHandler))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.run(ctx)
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(stop)
	return l, stop
}

// acquired acquires a lead in a goroutine of its own.
func acquired(t *testing.T, l *leads, what string) <-chan *lead {
	got := make(chan *lead, 1)
	go func() {
		if lead, err := l.acquire(t.Context(), what); err == nil {
			got <- lead
		}
	}()
	return got
}

func await[T any](t *testing.T, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		t.Fatalf("waited %s in vain for %s", patience, what)
	}
	return v
}

func holder(t *testing.T, client *clientv3.Client, what string) string {
	t.Helper()
	resp, err := client.Get(t.Context(), leadsPrefix+what)
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Kvs) == 0 {
		return ""
	}
	return string(resp.Kvs[0].Value)
}

func TestOneHostHasALead(t *testing.T) {
	client := openStore(t).Client()
	a, _ := leadsOf(t, client, "a")
	b, stopB := leadsOf(t, client, "b")

	first := await(t, "a's lead", acquired(t, a, "x"))
	second := acquired(t, b, "x")
	other := await(t, "b's lead of something else", acquired(t, b, "y"))
	select {
	case <-second:
		t.Fatal("two hosts have one lead")
	default:
	}
	if got := holder(t, client, "x"); got != "a" {
		t.Errorf("etcd says that %q has the lead", got)
	}
	a.release(first)
	await(t, "the lead that a gave up", second)
	if got := holder(t, client, "x"); got != "b" {
		t.Errorf("etcd says that %q has the lead", got)
	}

	// A host that stops gives up what it has, without anybody's waiting for the lease.
	third := acquired(t, a, "y")
	stopB()
	await(t, "the lead of a host that stopped", third)
	select {
	case <-other.lost:
		t.Error("a host that stops has lost nothing")
	default:
	}
}

// A host whose lease ran out has its leads again, unless another took them.
func TestLeaseRunsOut(t *testing.T) {
	client := openStore(t).Client()
	a, _ := leadsOf(t, client, "a")
	kept := await(t, "a lead", acquired(t, a, "kept"))
	taken := await(t, "a lead", acquired(t, a, "taken"))
	given := await(t, "a lead", acquired(t, a, "given back"))

	a.mu.Lock()
	lease := a.lease
	a.mu.Unlock()
	// In the moment in which the lease ends another takes one, and has had one.
	for _, key := range []string{leadsPrefix + "taken", takenPrefix + "taken", takenPrefix + "given back"} {
		if _, err := client.Put(t.Context(), key, "b"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.Revoke(t.Context(), lease.id); err != nil {
		t.Fatal(err)
	}
	await(t, "word that the lead was taken", taken.lost)
	await(t, "word that the lead was taken, and given back", given.lost)
	for deadline := time.Now().Add(patience); holder(t, client, "kept") != "a"; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%q has the lead that nobody took", holder(t, client, "kept"))
		}
	}
	select {
	case <-kept.lost:
		t.Error("a lead was lost that nobody took")
	default:
	}
	if got := holder(t, client, "taken"); got != "b" {
		t.Errorf("%q has the lead that b took", got)
	}
	if got := holder(t, client, "given back"); got != "" {
		t.Errorf("%q has the lead that b gave back, without having acquired it", got)
	}
}

// A process that was killed finds its leads where it left them.
func TestLeadOfAnEarlierProcess(t *testing.T) {
	client := openStore(t).Client()
	if _, err := client.Put(t.Context(), leadsPrefix+"x", "a"); err != nil {
		t.Fatal(err)
	}
	a, stop := leadsOf(t, client, "a")
	await(t, "its own lead", acquired(t, a, "x"))
	stop()
	if got := holder(t, client, "x"); got != "" {
		t.Errorf("%q still has the lead of a host that stopped", got)
	}
}

func TestAcquireEnds(t *testing.T) {
	client := openStore(t).Client()
	a, _ := leadsOf(t, client, "a")
	await(t, "a lead", acquired(t, a, "x"))
	b, _ := leadsOf(t, client, "b")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := b.acquire(ctx, "x")
		ended <- err
	}()
	cancel()
	if err := await(t, "the end", ended); !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that was called off ended with %v", err)
	}
	if got := holder(t, client, "x"); got != "a" {
		t.Errorf("%q has the lead", got)
	}
}

// A host that was frozen does nothing in the name of its leads before it knows whether they
// are still its own.
func TestNotSureAfterAPause(t *testing.T) {
	l, x := newLeads(nil, "a", slog.New(slog.DiscardHandler)), &lead{what: "x", lost: make(chan struct{})}
	l.lease = &lease{}
	l.lease.renewed(time.Now())
	if err := l.sure(t.Context(), x); err != nil {
		t.Error(err)
	}
	l.lease.renewed(time.Now().Add(-leadTTL * time.Second)) // as it looks when the process goes on
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.sure(ctx, x); !errors.Is(err, context.Canceled) {
		t.Errorf("sure at once: %v", err)
	}
	if err := l.sure(t.Context(), x); err == nil || errors.Is(err, errLost) {
		t.Errorf("sure though nobody says whose it is: %v", err)
	}
	time.AfterFunc(10*time.Millisecond, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.lease.renewed(time.Now())
	})
	if err := l.sure(t.Context(), x); err != nil {
		t.Errorf("not sure after the lease was renewed: %v", err)
	}
	close(x.lost)
	if err := l.sure(t.Context(), x); !errors.Is(err, errLost) {
		t.Errorf("sure of what another has: %v", err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// A host without a vote serves its clients as the others do, through what may happen to those.
func TestWithoutAVote(t *testing.T) {
	t.Parallel()
	h, a, _, _ := three(t)
	d := h.copying(a, "d", nil)
	const all = "a voter, b voter, c voter, d learner"
	if got := summary(t, d); got != all {
		t.Fatal(got)
	}
	c := d.Client()
	events := c.Watch(clientv3.WithRequireLeader(t.Context()), "/host/k")
	await := func(value string) {
		t.Helper()
		for {
			next, open := <-events
			if err := next.Err(); !open || err != nil {
				t.Fatalf("the watch ended before %q: %v", value, err)
			}
			for _, e := range next.Events {
				if string(e.Kv.Value) == value {
					return
				}
			}
		}
	}
	// What one writes the other reads at once, in both directions.
	for i := range 20 {
		value := fmt.Sprint(i)
		writer, reader := a, d
		if i%2 == 1 {
			writer, reader = d, a
		}
		if _, err := writer.Client().Put(t.Context(), "/host/k", value); err != nil {
			t.Fatal(err)
		}
		if got := reads(t, reader, "/host/k"); got != value {
			t.Fatalf("%s reads %q, and %s wrote %s", reader.Name(), got, writer.Name(), value)
		}
		await(value)
	}
	serves := func() {
		t.Helper()
		lease, err := c.Grant(t.Context(), 60)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.KeepAliveOnce(t.Context(), lease.ID); err != nil {
			t.Error(err)
		}
		if got, err := c.TimeToLive(t.Context(), lease.ID); err != nil || got.TTL <= 0 {
			t.Error(got, err)
		}
		txn, err := c.Txn(t.Context()).If(clientv3.Compare(clientv3.CreateRevision("/host/leased"), "=", 0)).
			Then(clientv3.OpPut("/host/leased", "x", clientv3.WithLease(lease.ID))).Commit()
		if err != nil || !txn.Succeeded {
			t.Error(txn, err)
		}
		if _, err := c.Revoke(t.Context(), lease.ID); err != nil {
			t.Error(err)
		}
		if got := reads(t, a, "/host/leased"); got != "" {
			t.Error("a lease was ended, and left", got)
		}
		if _, err := c.MemberList(t.Context()); err != nil {
			t.Error(err)
		}
		if err := d.Compact(t.Context()); err != nil {
			t.Error(err)
		}
		if err := d.Defragment(t.Context()); err != nil {
			t.Error(err)
		}
	}
	serves()
	h.copying(d, "e", nil)
	if err := d.RemoveMember(t.Context(), "e"); err != nil {
		t.Error(err)
	}
	h.removed("e")

	// Another leads.
	name, _ := h.leader()
	h.shut(name)
	writes(t, d, "/host/k", "under another")
	await("under another")
	h.reopen(name)
	a = h.stores["a"]

	// Nobody does.
	before := reads(t, d, "/host/k")
	h.shut("b")
	h.shut("c")
	eventually(t, "the loss is noticed", func() bool { return !d.HasQuorum() })
	if _, err := c.Put(t.Context(), "/host/k", "refused"); !IsNoQuorum(err) || IsUndecided(err) {
		t.Error("a write without a quorum:", err)
	}
	if _, err := c.Get(t.Context(), "/host/k"); !IsNoQuorum(err) {
		t.Error("a read without a quorum:", err)
	}
	if got, err := c.Get(t.Context(), "/host/k", clientv3.WithSerializable()); err != nil || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != before {
		t.Errorf("a serializable read says %v, %v", got, err)
	}
	for next := range events {
		if err := next.Err(); err != nil && !errors.Is(err, rpctypes.ErrNoLeader) {
			t.Error("a watch that requires a leader ended with", err)
		}
	}
	h.reopen("b")
	eventually(t, "the quorum is back", d.HasQuorum)
	writes(t, d, "/host/k", "after")
	h.reopen("c")

	// It starts again, and gets a vote while it is used.
	h.shut("d")
	d = h.reopen("d")
	if got := summary(t, d); got != all {
		t.Error(got)
	}
	c = d.Client()
	serves()
	events = c.Watch(clientv3.WithRequireLeader(t.Context()), "/host/k")
	h.promote(d, "d") // by whom does not matter
	h.awaitVote(d)
	writes(t, d, "/host/k", "by a voter")
	await("by a voter")
	serves()
}

// One voter with a copy elsewhere needs nobody else.
func TestOneVoterAndACopy(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	b := h.copying(a, "b", nil)
	writes(t, b, "/host/k", "x")
	h.shut("b")
	writes(t, a, "/host/k", "y")
	b = h.reopen("b")
	if got := reads(t, b, "/host/k"); got != "y" {
		t.Errorf("b reads %q", got)
	}
	if err := b.RemoveMember(t.Context(), "a"); !errors.Is(err, ErrUnsafe) {
		t.Error("the only vote was removed:", err)
	}
	h.promote(b, "b")
	h.awaitVote(b)
	if err := b.RemoveMember(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	h.removed("a")
	writes(t, b, "/host/k", "alone")
	if got := summary(t, b); got != "b voter" {
		t.Error(got)
	}
}

// Hosts join one after the other, and there may be many.
func TestManyWithoutAVote(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	const many = 6
	for i := range many {
		cfg := h.config(fmt.Sprint("copy-", i))
		h.add(a, cfg.Name, &cfg)
		if _, err := a.AddLearner(t.Context(), "early", newAddress()); !errors.Is(err, ErrJoining) || !strings.Contains(err.Error(), cfg.Name) {
			t.Error("another is added meanwhile:", err)
		}
		h.open(cfg.Name, cfg)
	}
	for name, s := range h.stores {
		writes(t, s, "/host/by-"+name, "x")
	}
	if got := summary(t, a); strings.Count(got, "learner") != many {
		t.Error(got)
	}
	if left, err := a.Client().Get(t.Context(), joiningPrefix, clientv3.WithPrefix()); err != nil || left.Count > 0 {
		t.Error("joining leaves behind", left, err)
	}
}

// What a tenant may store holds where it writes through a host without a vote.
func TestQuotaWithoutAVote(t *testing.T) {
	t.Parallel()
	const quota, object = 64 << 10, 1 << 10
	h := newHosts(t)
	small := func(c *Config) { c.TenantQuota = quota }
	cfg := h.config("a")
	small(&cfg)
	a := h.open("a", cfg)
	b := h.copying(a, "b", small)
	var refused error
	for i := 0; refused == nil; i++ {
		s := []*Store{a, b}[i%2]
		if refused = create(t, s, key(t, s, "t", fmt.Sprint("pods/default/", i)), object); i > 2*quota/object {
			t.Fatal("never refused")
		}
	}
	expect(t, "the first beyond", refused, CauseStorage)
	expect(t, "one more", create(t, b, key(t, b, "t", "pods/default/more"), object), CauseStorage)
	checkBooks(t, b, "t")
	if u := b.Usage("t"); u.Live > quota || u.Live < quota-2*object {
		t.Errorf("it has %+v", u)
	}
	if err := b.Wipe(t.Context(), "t"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "both know it is gone", func() bool { return a.Usage("t").Keys == 0 })
}

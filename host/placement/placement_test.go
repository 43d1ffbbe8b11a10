// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
)

const gib = 1 << 30

func up(name string) Host { return Host{Name: name, Alive: true, Capacity: 4 * gib} }

func down(name string) Host { return Host{Name: name, Capacity: 4 * gib} }

func draining(name string) Host {
	return Host{Name: name, Alive: true, Draining: true, Capacity: 4 * gib}
}

func TestPlace(t *testing.T) {
	for _, test := range []struct {
		name   string
		hosts  []Host
		tenant Tenant
		want   []string // hosts
		reason string
	}{
		{"new", []Host{up("a")}, Tenant{}, []string{"a"}, "a has the most room: 0 tenants, 0 MiB of 4 GiB"},
		{"larger host", []Host{up("a"), {Name: "b", Alive: true, Capacity: 8 * gib}}, Tenant{}, []string{"b"}, "b has the most room: 0 tenants, 0 MiB of 8 GiB"},
		{"sticky", []Host{up("a"), up("b")}, Tenant{Current: []string{"a"}}, []string{"a"}, "stays on a"},
		{"sticky replicas", []Host{up("a"), up("b"), up("c")}, Tenant{Replicas: 2, Current: []string{"c", "a"}}, []string{"c", "a"}, "stays on c and a"},
		{"pinned elsewhere", []Host{up("a"), up("b")}, Tenant{Current: []string{"a"}, Pinned: []string{"b"}}, []string{"b"}, "pinned to b"},
		{"pin moves the controllers", []Host{up("a"), up("b")}, Tenant{Replicas: 2, Current: []string{"a", "b"}, Pinned: []string{"b"}}, []string{"b", "a"}, "pinned to b; stays on a"},
		{"pin takes the last replica's place", []Host{up("a"), up("b"), up("c")}, Tenant{Replicas: 2, Current: []string{"a", "b"}, Pinned: []string{"c"}}, []string{"c", "a"}, "pinned to c; stays on a"},
		{"two pins, one replica", []Host{up("a"), up("b")}, Tenant{Pinned: []string{"b", "a"}}, []string{"b"}, "pinned to b"},
		{"pinned twice", []Host{up("a"), up("b")}, Tenant{Replicas: 2, Pinned: []string{"b", "b"}}, []string{"b", "a"}, "pinned to b; a has the most room: 0 tenants, 0 MiB of 4 GiB"},
		{"pin is down", []Host{up("a"), down("b")}, Tenant{Current: []string{"a"}, Pinned: []string{"b"}}, []string{"a"}, "it is pinned to b, which is down; stays on a"},
		{"pin is draining", []Host{up("a"), draining("b")}, Tenant{Current: []string{"b"}, Pinned: []string{"b"}}, []string{"a"},
			"it is pinned to b, which is draining; b is draining; a has the most room: 0 tenants, 0 MiB of 4 GiB"},
		{"pin is unknown", []Host{up("a")}, Tenant{Pinned: []string{"x"}}, []string{"a"},
			"it is pinned to x, which is not a host of this installation; a has the most room: 0 tenants, 0 MiB of 4 GiB"},
		{"host died", []Host{down("a"), up("b")}, Tenant{Current: []string{"a"}}, []string{"b"}, "a is down; b has the most room: 0 tenants, 0 MiB of 4 GiB"},
		{"controllers' host died", []Host{down("a"), up("b"), up("c")}, Tenant{Replicas: 2, Current: []string{"a", "b"}}, []string{"b", "c"},
			"a is down; stays on b; c has the most room: 0 tenants, 0 MiB of 4 GiB"},
		{"drained", []Host{draining("a"), up("b")}, Tenant{Current: []string{"a"}}, []string{"b"}, "a is draining; b has the most room: 0 tenants, 0 MiB of 4 GiB"},
		{"drained, nowhere to go", []Host{draining("a"), down("b")}, Tenant{Current: []string{"a"}}, []string{"a"}, "a is draining; it stays on a, because no other host can take it"},
		{"one drained, one dead", []Host{down("a"), draining("b")}, Tenant{Replicas: 2, Current: []string{"a", "b"}}, []string{"b"},
			"a is down; b is draining; it stays on b, because no other host can take it"},
		{"all dead", []Host{down("a"), draining("b")}, Tenant{Current: []string{"a"}}, []string{"a"}, "a is down; it stays on a, because no other host can take it"},
		{"no host", nil, Tenant{}, nil, "no host can take it: none is alive and not draining"},
		{"new, all draining", []Host{draining("a")}, Tenant{}, nil, "no host can take it: none is alive and not draining"},
		{"fewer hosts than replicas", []Host{up("a")}, Tenant{Replicas: 3}, []string{"a"},
			"a has the most room: 0 tenants, 0 MiB of 4 GiB; 1 of 3 replicas, because no other host can take one"},
		{"scaled down", []Host{up("a"), up("b")}, Tenant{Replicas: 1, Current: []string{"b", "a"}}, []string{"b"},
			"a is left: 1 of 2 replicas are wanted; stays on b"},
		{"too heavy", []Host{up("a")}, Tenant{Weight: 5 * gib}, []string{"a"}, "no host has room, and a lacks the least: 0 tenants, 0 MiB of 4 GiB"},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.tenant.UID = "u"
			got := Place(test.hosts, []Tenant{test.tenant})
			if len(got) != 1 || got[0].UID != "u" {
				t.Fatalf("got %+v, want one decision", got)
			}
			d := got[0]
			if !slices.Equal(d.Hosts, test.want) || d.Reason != test.reason {
				t.Errorf("got %q because %q\nwant %q because %q", d.Hosts, d.Reason, test.want, test.reason)
			}
			if want := !slices.Equal(d.Hosts, test.tenant.Current); d.Changed != want {
				t.Errorf("changed: %t, want %t", d.Changed, want)
			}
		})
	}
}

// What stays counts, also when it is behind what moves in the order of UIDs.
func TestReasonCountsWhatIsThere(t *testing.T) {
	got := Place([]Host{up("a"), up("b")}, []Tenant{
		{UID: "1", Weight: gib},
		{UID: "2", Weight: 256 << 20, Current: []string{"b"}},
		{UID: "3", Weight: 2 * gib, Current: []string{"a"}},
	})
	if want := "b has the most room: 1 tenant, 256 MiB of 4 GiB"; got[0].Reason != want {
		t.Errorf("got %q, want %q", got[0].Reason, want)
	}
}

func TestReplicasPreferOtherZones(t *testing.T) {
	hosts := []Host{up("a"), up("b"), up("c")}
	hosts[0].Zone, hosts[1].Zone, hosts[2].Zone = "x", "x", "y"
	hosts[2].Capacity = gib // the most loaded of the three, by far
	for i := range 20 {
		d := Place(hosts, []Tenant{{UID: fmt.Sprint(i), Replicas: 2}})[0]
		if !slices.Contains(d.Hosts, "c") {
			t.Errorf("tenant %d: both replicas are in zone x: %q", i, d.Hosts)
		}
	}
	full := Place(hosts, []Tenant{{UID: "u", Replicas: 2, Weight: 2 * gib}})[0]
	if slices.Contains(full.Hosts, "c") {
		t.Errorf("got %q: c has no room for it", full.Hosts)
	}
}

// world is an input of Place with everything that can be in one.
func world(r *rand.Rand) ([]Host, []Tenant) {
	var hosts []Host
	for i := range r.IntN(8) {
		hosts = append(hosts, Host{
			Name:     fmt.Sprintf("host-%d", i),
			Alive:    r.IntN(4) > 0,
			Draining: r.IntN(4) == 0,
			Capacity: int64(r.IntN(5)) * gib,
			Zone:     []string{"", "x", "y"}[r.IntN(3)],
		})
	}
	names := func() []string {
		var names []string
		for _, i := range r.Perm(9)[:r.IntN(4)] {
			names = append(names, fmt.Sprintf("host-%d", i))
		}
		return names
	}
	var tenants []Tenant
	for i := range r.IntN(30) {
		tenant := Tenant{
			UID:      fmt.Sprintf("uid-%d", i),
			Name:     fmt.Sprintf("tenant-%d", i),
			Replicas: r.IntN(4),
			Current:  names(),
			Weight:   int64(r.IntN(3)) * 200 << 20,
		}
		if r.IntN(4) == 0 {
			tenant.Pinned = names()
		}
		tenants = append(tenants, tenant)
	}
	return hosts, tenants
}

// worlds calls check with many inputs, the same in each run.
func worlds(t *testing.T, check func(t *testing.T, r *rand.Rand, hosts []Host, tenants []Tenant)) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 1))
		hosts, tenants := world(r)
		check(t, r, hosts, tenants)
		if t.Failed() {
			t.Fatalf("with seed %d:\n%+v\n%+v", seed, hosts, tenants)
		}
	}
}

func TestOrderDoesNotMatter(t *testing.T) {
	worlds(t, func(t *testing.T, r *rand.Rand, hosts []Host, tenants []Tenant) {
		want := Place(hosts, tenants)
		h, n := slices.Clone(hosts), slices.Clone(tenants)
		r.Shuffle(len(h), func(i, j int) { h[i], h[j] = h[j], h[i] })
		r.Shuffle(len(n), func(i, j int) { n[i], n[j] = n[j], n[i] })
		if got := Place(h, n); !reflect.DeepEqual(got, want) {
			t.Errorf("in another order:\n%+v\nwant\n%+v", got, want)
		}
	})
}

func TestPlaceChangesNoArgument(t *testing.T) {
	worlds(t, func(t *testing.T, r *rand.Rand, hosts []Host, tenants []Tenant) {
		before := fmt.Sprintf("%+v %+v", hosts, tenants)
		Place(hosts, tenants)
		if after := fmt.Sprintf("%+v %+v", hosts, tenants); after != before {
			t.Errorf("%s\nbecame\n%s", before, after)
		}
	})
}

// What always holds, whatever the input.
func TestInvariants(t *testing.T) {
	worlds(t, func(t *testing.T, r *rand.Rand, hosts []Host, tenants []Tenant) {
		known, free := map[string]Host{}, 0
		for _, h := range hosts {
			known[h.Name] = h
			if h.Alive && !h.Draining {
				free++
			}
		}
		takes := func(name string) bool { return known[name].Alive && !known[name].Draining }
		decisions := map[string]Decision{}
		for _, d := range Place(hosts, tenants) {
			decisions[d.UID] = d
		}
		for _, n := range tenants {
			d, ok := decisions[n.UID]
			if !ok {
				t.Errorf("no decision for %s", n.UID)
			}
			replicas := max(n.Replicas, 1)
			if free > 0 && len(d.Hosts) != min(replicas, free) {
				t.Errorf("%s is on %q, with %d replicas and %d hosts", n.UID, d.Hosts, replicas, free)
			}
			if sorted := slices.Sorted(slices.Values(d.Hosts)); len(slices.Compact(sorted)) != len(d.Hosts) {
				t.Errorf("%s is twice on a host: %q", n.UID, d.Hosts)
			}
			for _, h := range d.Hosts {
				if free > 0 && !takes(h) {
					t.Errorf("%s is on %s although a host is free", n.UID, h)
				}
				if free == 0 && !slices.Contains(n.Current, h) {
					t.Errorf("%s is new on %s, which takes nothing", n.UID, h)
				}
			}
			pins := slices.DeleteFunc(slices.Clone(n.Pinned), func(h string) bool { return !takes(h) })
			pins = pins[:min(len(pins), replicas)]
			if free > 0 && !slices.Equal(d.Hosts[:len(pins)], pins) {
				t.Errorf("%s is on %q, pinned to %q", n.UID, d.Hosts, pins)
			}
			// Stays: current hosts are left only for pins or for being too many.
			stays := slices.DeleteFunc(slices.Clone(n.Current), func(h string) bool { return !takes(h) || slices.Contains(pins, h) })
			stays = stays[:min(len(stays), replicas-len(pins))]
			if free > 0 && !slices.Equal(d.Hosts[len(pins):len(pins)+len(stays)], stays) {
				t.Errorf("%s is on %q, was on %q and could have stayed on %q", n.UID, d.Hosts, n.Current, stays)
			}
			if d.Reason == "" || strings.Contains(d.Reason, "%!") {
				t.Errorf("%s: reason %q", n.UID, d.Reason)
			}
		}
	})
}

// Deciding again about what was decided changes nothing.
func TestDecisionsAreStable(t *testing.T) {
	worlds(t, func(t *testing.T, r *rand.Rand, hosts []Host, tenants []Tenant) {
		tenants = follow(tenants, Place(hosts, tenants))
		for _, d := range Place(hosts, tenants) {
			if d.Changed {
				t.Errorf("%s moves to %q: %s", d.UID, d.Hosts, d.Reason)
			}
		}
	})
}

// follow returns the tenants as the decisions have them.
func follow(tenants []Tenant, decisions []Decision) []Tenant {
	on := map[string][]string{}
	for _, d := range decisions {
		on[d.UID] = d.Hosts
	}
	tenants = slices.Clone(tenants)
	for i := range tenants {
		tenants[i].Current = on[tenants[i].UID]
	}
	return tenants
}

// fresh returns n hosts of two sizes and m tenants of several, that are nowhere.
func fresh(r *rand.Rand, n, m int) ([]Host, []Tenant) {
	var hosts []Host
	for i := range n {
		hosts = append(hosts, Host{Name: fmt.Sprintf("host-%d", i), Alive: true, Capacity: int64(1+i%2) * 64 * gib})
	}
	var tenants []Tenant
	for i := range m {
		tenants = append(tenants, Tenant{UID: fmt.Sprintf("%x-%d", r.Uint64(), i), Weight: int64(100+r.IntN(400)) << 20, Replicas: 1 + i%3})
	}
	return hosts, tenants
}

// No host is fuller than another by more than what one tenant adds to the emptier,
// because it would have gone there. With replicas, which may not share a host, there
// is no such bound.
func TestFreshTenantsAreBalanced(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 2))
		hosts, tenants := fresh(r, 3+r.IntN(5), 50+r.IntN(100))
		for i := range tenants {
			tenants[i].Replicas = 1
		}
		load, heaviest := map[string]float64{}, 0.0
		weight := map[string]float64{}
		for _, n := range tenants {
			weight[n.UID] = float64(n.Weight)
			heaviest = max(heaviest, float64(n.Weight))
		}
		for _, d := range Place(hosts, tenants) {
			for _, h := range d.Hosts {
				load[h] += weight[d.UID]
			}
		}
		least, most := 1e300, 0.0
		for _, h := range hosts {
			share := load[h.Name] / float64(h.Capacity)
			least, most = min(least, share), max(most, share)
		}
		if bound := heaviest / (64 * gib); most-least > bound {
			t.Errorf("seed %d: loads are between %.4f and %.4f, further apart than %.4f", seed, least, most, bound)
		}
	}
}

// Equal tenants on equal hosts: the counts differ by at most one.
func TestEqualTenantsAreShared(t *testing.T) {
	var hosts []Host
	for i := range 7 {
		hosts = append(hosts, up(fmt.Sprintf("host-%d", i)))
	}
	var tenants []Tenant
	for i := range 100 {
		tenants = append(tenants, Tenant{UID: fmt.Sprint(i)})
	}
	count := map[string]int{}
	for _, d := range Place(hosts, tenants) {
		count[d.Hosts[0]]++
	}
	for name, n := range count {
		if n < 100/7 || n > 100/7+1 {
			t.Errorf("%s has %d tenants of 100", name, n)
		}
	}
}

// When a host dies only its tenants move, and they move to all that are left.
func TestHostDeathMovesOnlyItsTenants(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 3))
		hosts, tenants := fresh(r, 5, 200)
		tenants = follow(tenants, Place(hosts, tenants))
		dead := r.IntN(len(hosts))
		hosts[dead].Alive = false
		was := map[string][]string{}
		for _, n := range tenants {
			was[n.UID] = n.Current
		}
		heirs := map[string]bool{}
		for _, d := range Place(hosts, tenants) {
			before := was[d.UID]
			if hit := slices.Contains(before, hosts[dead].Name); d.Changed != hit {
				t.Errorf("seed %d: %s was on %q, is on %q", seed, d.UID, before, d.Hosts)
			}
			for _, h := range d.Hosts {
				if !slices.Contains(before, h) {
					heirs[h] = true
				}
			}
		}
		if len(heirs) != len(hosts)-1 {
			t.Errorf("seed %d: only %d hosts inherited", seed, len(heirs))
		}
	}
}

func BenchmarkPlace(b *testing.B) {
	hosts, tenants := fresh(rand.New(rand.NewPCG(1, 4)), 100, 10_000)
	b.Run("fresh", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			Place(hosts, tenants)
		}
	})
	settled := follow(tenants, Place(hosts, tenants))
	b.Run("settled", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			Place(hosts, settled)
		}
	})
	lost := slices.Clone(hosts)
	lost[0].Alive = false
	b.Run("one host lost", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			Place(lost, settled)
		}
	})
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"math/bits"
	"slices"
	"strings"
)

const (
	// DefaultCapacity is counted for a host that does not say what it has: the
	// smallest machine that tenantd is meant for.
	DefaultCapacity int64 = 4 << 30

	// DefaultWeight is counted for a tenant of which nothing is known yet: about
	// what a control plane without objects takes.
	DefaultWeight int64 = 64 << 20
)

// Host is a machine that can run tenants.
type Host struct {
	Name     string
	Alive    bool
	Draining bool // gets nothing, and loses what can be elsewhere

	// Capacity is the memory in bytes that tenants may use. Zero or less means
	// DefaultCapacity.
	Capacity int64

	// Zone names what fails together with this host. Replicas of a tenant are spread
	// over zones where there are several. May be empty, which is a zone as well.
	Zone string
}

// Tenant is a control plane that needs hosts.
type Tenant struct {
	UID  string // unique among the tenants of one call
	Name string

	// Replicas is how many hosts are to run it. Zero or less means 1.
	Replicas int

	// Current are the hosts that it is on, the one with its controllers first.
	Current []string

	// Pinned are the hosts that somebody wants it on, the one with its controllers
	// first. Of more than Replicas the first are taken.
	Pinned []string

	// Weight is the memory in bytes that it takes on each of its hosts. Zero or less
	// means DefaultWeight.
	Weight int64
}

// Decision is where a tenant belongs.
type Decision struct {
	UID string

	// Hosts are distinct, the one with the controllers first. Empty if the tenant is
	// nowhere and no host can take it.
	Hosts []string

	// Reason is a sentence for people, without a full stop. It explains this
	// decision: for a tenant that stays, it does not repeat why it came.
	Reason string

	// Changed says that Hosts are not the tenant's Current ones, or in another order.
	Changed bool
}

// room is a host and what this call has put on it so far.
type room struct {
	Host
	load    int64 // bytes
	tenants int
}

// Place decides for each tenant which hosts run it. The decisions are in order of
// UID. Of hosts with one name all but one are ignored. Neither argument is changed.
func Place(hosts []Host, tenants []Tenant) []Decision {
	p := newPlan(hosts)
	todo := make([]*pending, 0, len(tenants))
	for _, t := range tenants {
		t.Replicas = max(t.Replicas, 1)
		if t.Weight <= 0 {
			t.Weight = DefaultWeight
		}
		todo = append(todo, &pending{Tenant: t})
	}
	slices.SortFunc(todo, func(a, b *pending) int {
		return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.Name, b.Name))
	})

	// All that stays is counted before anything is placed: otherwise the first to
	// move would find hosts empty that are not.
	for _, t := range todo {
		p.keep(t)
	}
	homeless := slices.DeleteFunc(slices.Clone(todo), func(t *pending) bool { return len(t.on) == t.Replicas })
	slices.SortStableFunc(homeless, func(a, b *pending) int { return cmp.Compare(b.Weight, a.Weight) })
	for _, t := range homeless {
		p.find(t)
	}

	decisions := make([]Decision, len(todo))
	for i, t := range todo {
		decisions[i] = t.decision()
	}
	return decisions
}

// plan is the state of one call.
type plan struct {
	rooms map[string]*room // every host
	free  []*room          // those that take tenants, in order of name
}

func newPlan(hosts []Host) *plan {
	hosts = slices.Clone(hosts)
	slices.SortFunc(hosts, func(a, b Host) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), order(a.Alive, b.Alive), order(a.Draining, b.Draining),
			cmp.Compare(a.Capacity, b.Capacity), cmp.Compare(a.Zone, b.Zone))
	})
	p := &plan{rooms: make(map[string]*room, len(hosts))}
	for _, h := range hosts {
		if p.rooms[h.Name] != nil {
			continue
		}
		if h.Capacity <= 0 {
			h.Capacity = DefaultCapacity
		}
		r := &room{Host: h}
		p.rooms[h.Name] = r
		if r.takes() {
			p.free = append(p.free, r)
		}
	}
	return p
}

// order puts false before true.
func order(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	default:
		return 1
	}
}

func (r *room) takes() bool { return r != nil && r.Alive && !r.Draining }

// why says what keeps a host from taking tenants. r may be nil.
func (r *room) why() string {
	switch {
	case r == nil:
		return "is not a host of this installation"
	case !r.Alive:
		return "is down"
	default:
		return "is draining"
	}
}

func (r *room) put(t *pending) {
	t.on = append(t.on, r.Name)
	r.load = add(r.load, t.Weight)
	r.tenants++
}

// pending is a tenant whose decision is being made.
type pending struct {
	Tenant
	on      []string
	reasons []string
}

func (t *pending) because(format string, args ...any) {
	t.reasons = append(t.reasons, fmt.Sprintf(format, args...))
}

// keep gives the tenant the hosts that it is pinned to and those that it is on.
func (p *plan) keep(t *pending) {
	pinned, stays := 0, 0
	for _, name := range t.Pinned {
		r := p.rooms[name]
		switch {
		case !r.takes():
			t.because("it is pinned to %s, which %s", name, r.why())
		case len(t.on) < t.Replicas && !slices.Contains(t.on, name):
			r.put(t)
			pinned++
		}
	}
	if pinned > 0 {
		t.because("pinned to %s", list(t.on))
	}
	for _, name := range t.Current {
		r := p.rooms[name]
		switch {
		case slices.Contains(t.on, name):
		case !r.takes():
			t.because("%s %s", name, r.why())
		case len(t.on) < t.Replicas:
			r.put(t)
			stays++
		case pinned == 0:
			t.because("%s is left: %d of %d replicas are wanted", name, t.Replicas, len(t.Current))
		}
	}
	if stays > 0 {
		t.because("stays on %s", list(t.on[pinned:]))
	}
}

// find gives the tenant hosts for the replicas it still misses.
func (p *plan) find(t *pending) {
	for len(t.on) < t.Replicas {
		best := p.best(t)
		if best == nil {
			break
		}
		switch {
		case add(best.load, t.Weight) > best.Capacity:
			t.because("no host has room, and %s lacks the least: %s", best.Name, best.usage())
		default:
			t.because("%s has the most room: %s", best.Name, best.usage())
		}
		best.put(t)
	}
	switch {
	case len(t.on) > 0 && len(t.on) < t.Replicas:
		t.because("%d of %d replicas, because no other host can take one", len(t.on), t.Replicas)
	case len(t.on) == 0:
		p.stay(t)
	}
}

// stay leaves a tenant for which there is no host where it is.
func (p *plan) stay(t *pending) {
	for _, name := range t.Current {
		if r := p.rooms[name]; r != nil && r.Alive && len(t.on) < t.Replicas && !slices.Contains(t.on, name) {
			r.put(t)
		}
	}
	if len(t.on) == 0 {
		for _, name := range t.Current {
			if !slices.Contains(t.on, name) {
				t.on = append(t.on, name)
			}
		}
	}
	if len(t.on) == 0 {
		t.because("no host can take it: none is alive and not draining")
	} else {
		t.because("it stays on %s, because no other host can take it", list(t.on))
	}
}

// best returns the host for the tenant's next replica, or nil if all have one.
func (p *plan) best(t *pending) *room {
	var zones []string
	for _, name := range t.on {
		zones = append(zones, p.rooms[name].Zone)
	}
	var best *room
	for _, r := range p.free {
		if !slices.Contains(t.on, r.Name) && (best == nil || t.prefers(r, best, zones)) {
			best = r
		}
	}
	return best
}

// prefers reports whether a is the better host of the two for the tenant.
func (t *pending) prefers(a, b *room, zones []string) bool {
	la, lb := add(a.load, t.Weight), add(b.load, t.Weight)
	c := cmp.Or(
		order(la > a.Capacity, lb > b.Capacity),
		order(slices.Contains(zones, a.Zone), slices.Contains(zones, b.Zone)),
		compare(la, a.Capacity, lb, b.Capacity))
	if c == 0 {
		c = cmp.Compare(rendezvous(t.UID, b.Name), rendezvous(t.UID, a.Name))
	}
	return c < 0 || c == 0 && a.Name < b.Name
}

// compare compares the fractions a/b and c/d of positive numbers, exactly, so that
// no two machines round differently.
func compare(a, b, c, d int64) int {
	hi1, lo1 := bits.Mul64(uint64(a), uint64(d))
	hi2, lo2 := bits.Mul64(uint64(c), uint64(b))
	return cmp.Or(cmp.Compare(hi1, hi2), cmp.Compare(lo1, lo2))
}

// add adds positive numbers and stops at the largest.
func add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

func rendezvous(tenant, host string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(tenant))
	h.Write([]byte{0})
	h.Write([]byte(host))
	// FNV's high bits hardly depend on the last bytes, and hosts differ in these.
	x := h.Sum64()
	x ^= x >> 32
	x *= 0x9e3779b97f4a7c15
	return x ^ x>>29
}

func (t *pending) decision() Decision {
	return Decision{
		UID:     t.UID,
		Hosts:   t.on,
		Reason:  strings.Join(t.reasons, "; "),
		Changed: !slices.Equal(t.on, t.Current),
	}
}

func (r *room) usage() string {
	noun := "tenants"
	if r.tenants == 1 {
		noun = "tenant"
	}
	return fmt.Sprintf("%d %s, %s of %s", r.tenants, noun, size(r.load), size(r.Capacity))
}

// list writes names for people.
func list(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " and " + names[last]
}

// size writes bytes for people, without a fraction where there is none.
func size(n int64) string {
	switch {
	case n >= 10<<30 || n >= 1<<30 && n%(1<<30) == 0:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	default:
		return fmt.Sprintf("%d MiB", n>>20)
	}
}

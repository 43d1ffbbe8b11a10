// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package limit

import (
	"container/list"
	"context"
	"runtime"
	"sync"
	"time"
)

const (
	// activeFor is how long after a request its tenant counts as active.
	activeFor = time.Second
	// slice is how long a request keeps its turn while others of its tenant wait:
	// longer than one that only needs the processor takes. One that waits for
	// something without saying so must not hold up its tenant.
	slice = 100 * time.Millisecond
	// nestedPatience bounds the wait of requests by the control plane's own
	// components, and of those that had their turn before. Others may wait for them
	// that hold a turn, or a lock.
	nestedPatience = 20 * time.Millisecond
	// piece is for how long a request writes its answer before it rests, as others of
	// its tenant do between two requests. A step of a neighbour's request that meets a
	// list of some megabytes waits for this at most, and not for all of the list.
	piece = time.Millisecond
	// rest is how long a tenant that goes on and on leaves a place empty for each
	// unit of time that it had it. What a request costs outside of its turn, in the
	// garbage collector, etcd and the kernel, is about as much again; and a list of
	// some megabytes has one of two processors for 10 ms, during which each step of a
	// neighbour's request may have to wait, so they must not meet often.
	rest = 3
	// allowance is how much rest may be put off: that for half a second of turns. A
	// user's commands are not what others wait for.
	allowance = 2 * time.Second
)

// Gate shares the processors out among the control planes of a process. While
// others are active, one of them works on so many ordinary requests at once as
// would fill half of the processors, for a quarter of the time if it goes on and on,
// and the rest of its requests wait in order.
// Alone it is not held back. It is safe for concurrent use; nil holds back nobody.
type Gate struct {
	width int
	spare spareProcs

	mu sync.Mutex // guards what follows, and all flows
	// The two flows that clients have asked something of last.
	recent [2]arrival
}

type arrival struct {
	flow *flow
	at   time.Time
}

// NewGate makes a gate that is width requests wide for each tenant; zero means half
// of the processors.
func NewGate(width int) *Gate {
	if width <= 0 {
		width = max(1, runtime.NumCPU()/2)
	}
	return &Gate{width: width}
}

// flow is one control plane's requests.
type flow struct {
	gate    *Gate
	running list.List // of *turn; the one with the oldest turn in front
	waiting list.List // of *turn
	// owed is what its places are to be empty in all, at the time of settled.
	owed    time.Duration
	settled time.Time
	lowered int         // requests that have threads of the lowest priority
	lapse   *time.Timer // while any wait; it goes off at due
	due     time.Time
}

func (g *Gate) flow() *flow {
	if g == nil {
		return nil
	}
	return &flow{gate: g}
}

// seen notes that a client asked f something.
func (g *Gate) seen(f *flow, now time.Time) {
	if g.recent[0].flow != f {
		g.recent[0], g.recent[1] = arrival{flow: f}, g.recent[0]
	}
	g.recent[0].at = now
}

// contended reports whether other tenants are active.
func (g *Gate) contended(f *flow, now time.Time) bool {
	for _, a := range g.recent {
		if a.flow != nil && a.flow != f && now.Sub(a.at) < activeFor {
			return true
		}
	}
	return false
}

// turn is one request's place. The gate's mu guards it, but for flow.
type turn struct {
	flow    *flow // nil without a gate
	own     bool  // by the control plane's own components
	element *list.Element
	ready   chan struct{} // while it waits: closed when its turn has come
	since   time.Time
	outside int           // how many Outside calls have not come back
	waits   int           // how many Waits calls have not
	waiting time.Time     // since when, if any
	waited  time.Duration // before, in this turn
	over    bool
}

// begin waits for the turn of a request; false if ctx was done before it came.
func (t *turn) begin(ctx context.Context, own bool) bool {
	f := t.flow
	if f == nil {
		return true
	}
	now := time.Now()
	f.gate.mu.Lock()
	t.own = own
	if own {
		return t.enter(ctx, now, nestedPatience, false)
	}
	f.gate.seen(f, now)
	return t.enter(ctx, now, 0, false)
}

// yield is called in the middle of a long answer: the request rests as its tenant
// does between two short ones, without others of its tenant before it. ctx is its.
func (t *turn) yield(ctx context.Context) {
	if t.flow == nil {
		return
	}
	now := time.Now()
	t.flow.gate.mu.Lock()
	if t.element == nil || t.ready != nil || now.Sub(t.since) < piece {
		t.flow.gate.mu.Unlock()
		return
	}
	t.flow.stop(t, now)
	t.enter(ctx, now, nestedPatience, true)
}

// enter waits for patience, or without an end if that is zero; after patience it
// takes a turn that is not its. One that has begun goes before those that have not.
// It is called with mu and returns without.
func (t *turn) enter(ctx context.Context, now time.Time, patience time.Duration, begun bool) bool {
	f, g := t.flow, t.flow.gate
	if t.element != nil { // another goroutine of the request came back first
		g.mu.Unlock()
		return true
	}
	f.expire(now)
	if (t.own || begun || f.waiting.Len() == 0) && f.mayRun(now, t.own) {
		f.run(t, now)
		g.mu.Unlock()
		return true
	}
	ready := make(chan struct{})
	t.ready = ready
	if begun {
		t.element = f.waiting.PushFront(t)
	} else {
		t.element = f.waiting.PushBack(t)
	}
	f.arm(now)
	g.mu.Unlock()

	var late <-chan time.Time
	if patience > 0 {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		late = timer.C
	}
	patient := true
	select {
	case <-ready:
		return true
	case <-ctx.Done():
	case <-late:
		patient = false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if t.ready != ready { // it came in this moment
		return true
	}
	f.waiting.Remove(t.element)
	t.element, t.ready = nil, nil
	if !patient {
		f.run(t, time.Now())
	}
	return !patient
}

// end gives the turn back for good.
func (t *turn) end() {
	if t.flow == nil {
		return
	}
	t.flow.gate.mu.Lock()
	defer t.flow.gate.mu.Unlock()
	t.over = true
	t.leave()
}

// leave gives the turn back, or stops to wait for it. Its caller has mu.
func (t *turn) leave() {
	f := t.flow
	switch {
	case t.element == nil:
	case t.ready != nil:
		f.waiting.Remove(t.element)
		close(t.ready)
		t.element, t.ready = nil, nil
	default:
		now := time.Now()
		f.stop(t, now)
		f.admit(now)
		f.arm(now)
	}
}

// mayRun reports whether one more of f's requests may run. The control plane's own
// neither rest nor have others do so: a start is hundreds of them.
func (f *flow) mayRun(now time.Time, own bool) bool {
	return !f.gate.contended(f, now) || f.running.Len() < f.gate.width && (own || f.rested(now))
}

// rested reports whether f owes no more rest than may be put off.
func (f *flow) rested(now time.Time) bool { return f.owes(now) <= allowance }

// owes returns how much rest f owes.
func (f *flow) owes(now time.Time) time.Duration {
	f.owed -= time.Duration(f.gate.width) * min(f.owed, now.Sub(f.settled))
	f.owed = max(0, f.owed)
	f.settled = now
	return f.owed
}

func (f *flow) run(t *turn, now time.Time) {
	t.since, t.waiting, t.waited = now, now, 0
	t.element = f.running.PushBack(t)
}

// stop ends the turn of t, which is running.
func (f *flow) stop(t *turn, now time.Time) {
	f.running.Remove(t.element)
	t.element = nil
	if t.own {
		return
	}
	f.owes(now)
	// What was used while nobody else was there is not held against it for long.
	f.owed = min(f.owed+(1+rest)*t.took(now), allowance+(1+rest)*slice)
}

// took returns for how long t has had its turn without waiting for etcd.
func (t *turn) took(now time.Time) time.Duration {
	took := now.Sub(t.since) - t.waited
	if t.waits > 0 {
		took -= now.Sub(t.waiting)
	}
	return max(0, took)
}

// admit gives those that wait as many turns as there are.
func (f *flow) admit(now time.Time) {
	for front := f.waiting.Front(); front != nil; front = f.waiting.Front() {
		t := front.Value.(*turn)
		if !f.mayRun(now, t.own) {
			return
		}
		f.waiting.Remove(front)
		f.run(t, now)
		close(t.ready)
		t.ready = nil
	}
}

// expire takes the turns of requests that have had them for too long.
func (f *flow) expire(now time.Time) {
	for front := f.running.Front(); front != nil; front = f.running.Front() {
		t := front.Value.(*turn)
		if now.Sub(t.since) < slice {
			return
		}
		f.stop(t, now)
	}
}

// arm sees to it that turns expire, and that rest ends, while requests wait.
func (f *flow) arm(now time.Time) {
	if f.waiting.Len() == 0 {
		return
	}
	var due time.Time
	switch front := f.running.Front(); {
	case f.running.Len() < f.gate.width: // it rests
		due = now.Add((f.owed-allowance)/time.Duration(f.gate.width) + 1)
	default:
		due = front.Value.(*turn).since.Add(slice)
	}
	switch {
	case f.lapse == nil:
		f.lapse = time.AfterFunc(due.Sub(now), f.lapsed)
	case due.Before(f.due):
		f.lapse.Reset(due.Sub(now))
	default:
		return
	}
	f.due = due
}

// lapsed is when a turn may have expired, or a rest have ended.
func (f *flow) lapsed() {
	f.gate.mu.Lock()
	defer f.gate.mu.Unlock()
	now := time.Now()
	f.lapse = nil
	f.expire(now)
	f.admit(now)
	f.arm(now)
}

// turnOf returns the turn of the request whose context ctx is; nil if it takes none.
func turnOf(ctx context.Context) *turn {
	r := ticketOf(ctx)
	if r == nil || r.turn.flow == nil || r.watch {
		return nil
	}
	return &r.turn
}

// Outside says that the request whose context ctx is waits for something that needs
// no processor of this process, such as a webhook: another request of its tenant may
// run meanwhile. The returned function, which is to be called when the wait is over,
// waits for a turn, but not for long. Both may be called by several goroutines of a
// request at once.
func Outside(ctx context.Context) (back func()) {
	t := turnOf(ctx)
	if t == nil {
		return func() {}
	}
	g := t.flow.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if t.outside++; t.outside == 1 {
		t.leave()
	}
	return sync.OnceFunc(func() {
		g.mu.Lock()
		if t.outside--; t.outside > 0 || t.over {
			g.mu.Unlock()
			return
		}
		t.enter(ctx, time.Now(), nestedPatience, false)
	})
}

// Waits says that the request whose context ctx waits for etcd. It keeps its turn,
// but owes no rest for the time until the returned function is called: slow disks
// are not a tenant's doing. Both may be called by several goroutines of a request
// at once.
func Waits(ctx context.Context) (back func()) {
	t := turnOf(ctx)
	if t == nil {
		return func() {}
	}
	g := t.flow.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if t.waits++; t.waits == 1 {
		t.waiting = time.Now()
	}
	return sync.OnceFunc(func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if t.waits--; t.waits == 0 {
			t.waited += time.Since(t.waiting)
		}
	})
}

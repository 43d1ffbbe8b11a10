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
)

// Gate shares the processors out among the control planes of a process. While
// others are active, one of them works on so many ordinary requests at once as
// would fill half of the processors, and the rest of its requests wait in order.
// Alone it is not held back. It is safe for concurrent use; nil holds back nobody.
type Gate struct {
	width int

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
	lapse   *time.Timer
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
	element *list.Element
	ready   chan struct{} // while it waits: closed when its turn has come
	since   time.Time
	outside int // how many Outside calls have not come back
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
	if own {
		return t.enter(ctx, now, nestedPatience)
	}
	f.gate.seen(f, now)
	return t.enter(ctx, now, 0)
}

// enter waits for patience, or without an end if that is zero; after patience it
// takes a turn that is not its. It is called with mu and returns without.
func (t *turn) enter(ctx context.Context, now time.Time, patience time.Duration) bool {
	f, g := t.flow, t.flow.gate
	if t.element != nil { // another goroutine of the request came back first
		g.mu.Unlock()
		return true
	}
	f.expire(now)
	if f.waiting.Len() == 0 && f.mayRun(now) {
		f.run(t, now)
		g.mu.Unlock()
		return true
	}
	ready := make(chan struct{})
	t.ready = ready
	t.element = f.waiting.PushBack(t)
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
		f.running.Remove(t.element)
		t.element = nil
		f.admit(time.Now())
	}
}

// mayRun reports whether one more of f's requests may run.
func (f *flow) mayRun(now time.Time) bool {
	return f.running.Len() < f.gate.width || !f.gate.contended(f, now)
}

func (f *flow) run(t *turn, now time.Time) {
	t.since = now
	t.element = f.running.PushBack(t)
}

// admit gives those that wait as many turns as there are.
func (f *flow) admit(now time.Time) {
	for front := f.waiting.Front(); front != nil && f.mayRun(now); front = f.waiting.Front() {
		t := front.Value.(*turn)
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
		f.running.Remove(front)
		t.element = nil
	}
}

// arm sees to it that turns expire while requests wait.
func (f *flow) arm(now time.Time) {
	front := f.running.Front()
	if f.lapse != nil || f.waiting.Len() == 0 || front == nil {
		return
	}
	f.lapse = time.AfterFunc(max(0, slice-now.Sub(front.Value.(*turn).since)), func() {
		f.gate.mu.Lock()
		defer f.gate.mu.Unlock()
		now := time.Now()
		f.lapse = nil
		f.expire(now)
		f.admit(now)
		f.arm(now)
	})
}

// Outside says that the request whose context ctx is waits for something that needs
// no processor of this process, such as a webhook: another request of its tenant may
// run meanwhile. The returned function, which is to be called when the wait is over,
// waits for a turn, but not for long. Both may be called by several goroutines of a
// request at once.
func Outside(ctx context.Context) (back func()) {
	r := ticketOf(ctx)
	if r == nil || r.turn.flow == nil || r.watch {
		return func() {}
	}
	t, g := &r.turn, r.turn.flow.gate
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
		t.enter(ctx, time.Now(), nestedPatience)
	})
}

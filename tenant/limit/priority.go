// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package limit

import (
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// lowest is the priority of threads that wait for all others: nice 19.
	lowest = 19
	// spareFor is for how long Go has its spare Ps after the last request that was
	// lowered. To change their number stops the process for a moment.
	spareFor = 10 * time.Second
)

// lowerable is how many requests of a tenant have a thread of their own at once: those
// that have their turn, and some that had it. One whose client does not read keeps
// its thread, and Go ends a process that has 10,000.
func (g *Gate) lowerable() int { return g.width + 3 }

// lower has the kernel prefer everything else to the calling goroutine until that ends,
// if t is of a tenant that goes on and on among others. A turn that rests makes room
// between two pieces of work; this makes it within one. The returned function is to be
// called when the request is over.
//
// The goroutine keeps its thread and has to end with the request, for with it the
// thread ends: only a privileged process may raise a priority again.
func (t *turn) lower() (over func()) {
	f := t.flow
	if f == nil || t.own || !f.lowers() {
		return func() {}
	}
	f.gate.spare.hold(f.gate.lowerable())
	runtime.LockOSThread()
	if tid := unix.Gettid(); tid == unix.Getpid() || unix.Setpriority(unix.PRIO_PROCESS, tid, lowest) != nil {
		// The first thread cannot end, and its priority is what ps shows of the process.
		runtime.UnlockOSThread()
	}
	return func() {
		f.gate.mu.Lock()
		defer f.gate.mu.Unlock()
		f.lowered--
	}
}

// lowers reports whether one more request of f is to be lowered, and counts it.
func (f *flow) lowers() bool {
	f.gate.mu.Lock()
	defer f.gate.mu.Unlock()
	now := time.Now()
	if f.lowered >= f.gate.lowerable() || !f.gate.contended(f, now) || f.owes(now) <= allowance/2 {
		return false
	}
	f.lowered++
	return true
}

// spareProcs are Ps that Go has while requests are lowered. Such a request keeps its P
// while the kernel lets its thread wait, so without them too few are left for the
// others. At other times more Ps than processors cost: with twice as many the slowest
// hundredth of a busy tenant's writes takes half as long again.
type spareProcs struct {
	mu    sync.Mutex // guards what follows, and the number of Ps
	n     int        // how many there are
	until time.Time
	lapse *time.Timer // while there are any
}

// hold sees to it that there are n spare Ps for the next while, if there are none.
func (s *spareProcs) hold(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.until = time.Now().Add(spareFor)
	if s.n == 0 {
		s.n = n
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + n)
		s.lapse = time.AfterFunc(spareFor, s.lapsed)
	}
}

// lapsed is when the while may be over.
func (s *spareProcs) lapsed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if left := time.Until(s.until); left > 0 {
		s.lapse.Reset(left)
		return
	}
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) - s.n)
	s.n = 0
}

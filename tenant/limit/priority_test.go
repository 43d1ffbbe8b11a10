// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package limit

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/filters"
)

// usual is the niceness of threads that nothing has lowered: the tests may have been
// started with another than 0.
var usual int

// Only the main goroutine runs in the first thread, as in tenantd.
func init() {
	runtime.LockOSThread()
	if p, err := unix.Getpriority(unix.PRIO_PROCESS, 0); err == nil {
		usual = 20 - p
	}
}

// niceness of the thread that runs the calling goroutine.
func niceness(t *testing.T) int {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p, err := unix.Getpriority(unix.PRIO_PROCESS, unix.Gettid())
	if err != nil {
		t.Fatal(err)
	}
	return 20 - p // as the system call, unlike the C library, has it
}

// works returns the niceness with which the work on a request of p is done.
func (p party) works(t *testing.T, own bool) (nice int) {
	r, _ := p.enter(t.Context(), own)
	defer r.turn.end()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer r.turn.lower()()
		nice = niceness(t)
	}()
	<-done
	return nice
}

// While others are active, the kernel prefers them to one that goes on and on.
func TestWhoGoesOnIsLowered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(1)
		a, b := party{g.flow()}, party{g.flow()}
		nothing := func(context.Context) {}
		a.use(t.Context(), time.Second, time.Millisecond, nothing)
		if nice := a.works(t, false); nice != usual {
			t.Errorf("niceness %d alone", nice)
		}
		time.Sleep(allowance) // and owes nothing more
		b.works(t, false)
		if nice := a.works(t, false); nice != usual {
			t.Errorf("niceness %d of one that did little", nice)
		}
		procs := runtime.GOMAXPROCS(0)
		a.use(t.Context(), activeFor/2, time.Millisecond, nothing)
		for range 20 {
			if nice := a.works(t, false); nice != lowest {
				t.Errorf("niceness %d of one that goes on and on", nice)
			}
		}
		if nice := a.works(t, true); nice != usual {
			t.Errorf("niceness %d of a request by a component of its own", nice)
		}
		if nice := b.works(t, false); nice != usual {
			t.Errorf("niceness %d of a neighbour", nice)
		}
		if a.flow.lowered != 0 {
			t.Errorf("counts %d that are over", a.flow.lowered)
		}
		if n := runtime.GOMAXPROCS(0); n != procs+g.lowerable() {
			t.Errorf("%d Ps, where there had been %d", n, procs)
		}
		// They stay as long as there are such requests.
		for range 3 {
			time.Sleep(spareFor / 2)
			g.spare.hold(g.lowerable())
		}
		if n := runtime.GOMAXPROCS(0); n != procs+g.lowerable() {
			t.Errorf("%d Ps a while later, where there had been %d", n, procs)
		}
		time.Sleep(spareFor)
		synctest.Wait()
		if n := runtime.GOMAXPROCS(0); n != procs {
			t.Errorf("%d Ps afterwards, where there had been %d", n, procs)
		}
		// Nobody else meets a thread that was lowered.
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				if nice := niceness(t); nice != usual {
					t.Errorf("niceness %d afterwards", nice)
				}
			})
		}
		all.Wait()
	})
}

// Requests that do not end hold few threads.
func TestFewThreadsAreLowered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(1)
		a, b := party{g.flow()}, party{g.flow()}
		b.works(t, false)
		a.use(t.Context(), activeFor/2, 2*time.Millisecond, func(context.Context) {})
		b.works(t, false)
		stuck := make(chan struct{})
		var all sync.WaitGroup
		for range 3 * a.flow.gate.lowerable() {
			all.Go(func() {
				held := &ticket{turn: turn{flow: a.flow}}
				defer held.turn.lower()()
				<-stuck
			})
		}
		synctest.Wait()
		if n := a.flow.lowered; n != a.flow.gate.lowerable() {
			t.Errorf("%d are lowered, not %d", n, a.flow.gate.lowerable())
		}
		close(stuck)
		all.Wait()
		if n := a.flow.lowered; n != 0 {
			t.Errorf("counts %d that are over", n)
		}
		time.Sleep(spareFor) // the Ps are the process's
		synctest.Wait()
	})
}

// Behind upstream's filter for timeouts, the work on a request is done by a goroutine
// of its own, and what serves the connection keeps its priority.
func TestThreadsEndWithRequests(t *testing.T) {
	gate := NewGate(1)
	t.Cleanup(func() { // the Ps are the process's
		gate.spare.mu.Lock()
		gate.spare.until = time.Time{}
		gate.spare.mu.Unlock()
		if gate.spare.lapse != nil && gate.spare.lapse.Stop() {
			gate.spare.lapsed()
		}
	})
	var lowered atomic.Int32
	work := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if niceness(t) == lowest {
			lowered.Add(1)
		}
		for began := time.Now(); time.Since(began) < 5*time.Millisecond; {
		}
	})
	chain := func(api http.Handler) http.Handler {
		h := filters.WithTimeoutForNonLongRunningRequests(api, long)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			parsed, err := info.NewRequestInfo(r)
			if err != nil {
				t.Error(err)
			}
			ctx, cancel := context.WithTimeout(request.WithRequestInfo(r.Context(), parsed), time.Minute)
			defer cancel() // by when the filter has ended
			h.ServeHTTP(w, r.WithContext(ctx))
		})
	}
	ask := func(h http.Handler) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, pods, nil)
		r.Header.Set("Authorization", "Bearer good")
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
	acme := New("acme", Config{}, gate).Handler(work, chain, info, long)
	globex := New("globex", Config{}, gate).Handler(work, chain, info, long)
	for end := time.Now().Add(10 * time.Second); lowered.Load() < 10; {
		if time.Now().After(end) {
			t.Fatalf("%d requests were lowered", lowered.Load())
		}
		ask(globex)
		for range 20 {
			ask(acme)
		}
	}
	if nice := niceness(t); nice != usual {
		t.Errorf("niceness %d of what serves the connection", nice)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) { // threads end soon after their goroutines
		left := 0
		for _, nice := range threads(t) {
			if nice != usual {
				left++
			}
		}
		if left == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d lowered threads are left", left)
		}
	}
}

// threads returns the niceness of each thread of this process.
func threads(t *testing.T) (nice []int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		stat, err := os.ReadFile("/proc/self/task/" + e.Name() + "/stat")
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(stat), ") ") // what follows the name: proc(5)
		n, err := strconv.Atoi(strings.Fields(rest)[16])
		if err != nil {
			t.Fatal(err)
		}
		nice = append(nice, n)
	}
	return nice
}

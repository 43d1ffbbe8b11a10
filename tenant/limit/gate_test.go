// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package limit

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// party is a tenant at a gate.
type party struct{ flow *flow }

// enter starts a request, and says whether it got its turn.
func (p party) enter(ctx context.Context, own bool) (*ticket, bool) {
	t := &ticket{own: own, turn: turn{flow: p.flow}}
	return t, t.turn.begin(ctx, own)
}

// carrying is the context of a request.
func carrying(ctx context.Context, t *ticket) context.Context {
	return context.WithValue(ctx, ticketKey{}, t)
}

func TestGateHoldsBackOneAmongOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(1)
		a, b := party{g.flow()}, party{g.flow()}
		// Alone, all run at once.
		for range 5 {
			held, ok := a.enter(t.Context(), false)
			if !ok {
				t.Fatal("held back alone")
			}
			defer held.turn.end()
		}
		// Another comes, and is not held up by them.
		began := time.Now()
		other, _ := b.enter(t.Context(), false)
		other.turn.end()
		if time.Since(began) != 0 {
			t.Errorf("waited %s for the requests of another tenant", time.Since(began))
		}
		time.Sleep(slice / 2)
		// Now there is one turn at a time, in the order of arrival.
		var order []int
		var mu sync.Mutex
		var all sync.WaitGroup
		for i := range 3 {
			all.Go(func() {
				r, _ := a.enter(t.Context(), false)
				defer r.turn.end()
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				if a.flow.running.Len() != 1 {
					t.Errorf("%d run at once", a.flow.running.Len())
				}
				time.Sleep(time.Millisecond)
			})
			synctest.Wait()
		}
		all.Wait()
		if fmt.Sprint(order) != "[0 1 2]" {
			t.Errorf("order %v", order)
		}
	})
}

// use has one client of p do nothing but requests that each take took, and returns
// for how much of the time it had its turn.
func (p party) use(ctx context.Context, during, took time.Duration, what func(context.Context)) float64 {
	var had time.Duration
	began := time.Now()
	for time.Since(began) < during {
		r, _ := p.enter(ctx, false)
		what(carrying(ctx, r))
		time.Sleep(took)
		r.turn.end()
		had += took
	}
	return float64(had) / float64(time.Since(began))
}

// A tenant that goes on and on leaves its places empty for most of the time while
// others are active. One that fills a quarter of its places anyway does not.
func TestGateRests(t *testing.T) {
	for width, wants := range map[int]float64{1: 0.25, 4: 1} {
		synctest.Test(t, func(t *testing.T) {
			g := NewGate(width)
			a, b := party{g.flow()}, party{g.flow()}
			const took = 3 * time.Millisecond
			nothing := func(context.Context) {}
			if share := a.use(t.Context(), 10*time.Second, took, nothing); share != 1 {
				t.Errorf("had its turn for %.2f of the time alone", share)
			}
			ctx, cancel := context.WithCancel(t.Context())
			var other sync.WaitGroup
			other.Go(func() {
				for ctx.Err() == nil {
					began := time.Now()
					r, _ := b.enter(t.Context(), false)
					time.Sleep(took)
					r.turn.end()
					if time.Since(began) != took {
						t.Errorf("one that asks now and then waited for %s", time.Since(began)-took)
					}
					time.Sleep(activeFor / 2)
				}
			})
			time.Sleep(activeFor / 4)
			// What it used while it was alone is forgiven, all but a little.
			began := time.Now()
			r, _ := a.enter(t.Context(), false)
			r.turn.end()
			if waited := time.Since(began); waited > (1+rest)*slice {
				t.Errorf("waited %s after it had been alone", waited)
			}
			if share := a.use(t.Context(), 20*time.Second, took, nothing); share < 0.9*wants || share > 1.1*wants {
				t.Errorf("%d places: had its turn for %.3f of the time among others, not %.2f", width, share, wants)
			}
			// A while later it may do much at once again.
			time.Sleep(allowance)
			if share := a.use(t.Context(), allowance/(1+rest), took, nothing); share != 1 {
				t.Errorf("had its turn for %.2f of the time after a rest", share)
			}
			// Nor is it to rest for what etcd takes.
			time.Sleep(allowance)
			slow := func(ctx context.Context) {
				defer Waits(ctx)()
				time.Sleep(20 * took)
			}
			const requests = 100
			wait := 0
			began = time.Now()
			for range requests {
				if a.use(t.Context(), 1, took, slow); time.Since(began) > 21*took {
					wait++
				}
				began = time.Now()
			}
			if wait > 0 {
				t.Errorf("%d of %d requests waited although etcd took their time", wait, requests)
			}
			cancel()
			other.Wait()
		})
	}
}

// A long answer rests while it is written, as short ones do between them, and what
// else its tenant asks for comes after it.
func TestLongAnswersYield(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(1)
		l := New("acme", Config{}, g)
		a, b := party{l.flow}, party{g.flow()}
		const pieces = 50
		var took time.Duration
		h := l.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			began := time.Now()
			for range pieces {
				for range 4 { // only what took long enough rests
					time.Sleep(piece / 4)
					io.WriteString(w, "some")
				}
			}
			took = time.Since(began)
		}), func(h http.Handler) http.Handler { return h }, info, long)
		ask := func(path string) string {
			near, _ := net.Pipe()
			ctx := context.WithValue(t.Context(), http.LocalAddrContextKey, Public(near).LocalAddr())
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, path, nil))
			return w.Body.String()
		}
		for _, one := range []struct {
			path  string
			other bool
			times time.Duration
		}{{pods, false, 1}, {pods, true, 1 + rest}, {pods + "?watch=true", true, 1}} {
			g.mu.Lock()
			g.recent = [2]arrival{}
			if one.other {
				g.seen(b.flow, time.Now())
			}
			a.flow.owed, a.flow.settled = allowance, time.Now()
			g.mu.Unlock()
			var after sync.WaitGroup
			after.Go(func() {
				time.Sleep(piece)
				r, _ := a.enter(t.Context(), false)
				r.turn.end()
				if one.times > 1 && took == 0 {
					t.Error("another request of the tenant ran in the midst of a long answer")
				}
			})
			took = 0
			if got := ask(one.path); got != strings.Repeat("some", 4*pieces) {
				t.Errorf("%s: wrote %d bytes", one.path, len(got))
			}
			after.Wait()
			if want := pieces * piece * one.times; took < want-4*piece || took > want+4*piece {
				t.Errorf("%s, others active: %t: written in %s, want %s", one.path, one.other, took, want)
			}
			time.Sleep(activeFor)
		}
	})
}

// The control plane's own requests do not wait for the rest that clients owe, nor
// for clients that wait for it, and owe none.
func TestOwnRequestsDoNotRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(1)
		a, b := party{g.flow()}, party{g.flow()}
		g.mu.Lock()
		g.seen(b.flow, time.Now())
		g.mu.Unlock()
		for range 100 { // a start
			r, _ := a.enter(t.Context(), true)
			time.Sleep(slice / 10)
			r.turn.end()
		}
		if a.flow.owed != 0 {
			t.Errorf("a start has it owe %s", a.flow.owed)
		}
		a.flow.owed, a.flow.settled = allowance+slice, time.Now()
		g.mu.Lock()
		g.seen(b.flow, time.Now())
		g.mu.Unlock()
		var waits sync.WaitGroup
		began := time.Now()
		waits.Go(func() {
			r, _ := a.enter(t.Context(), false)
			defer r.turn.end()
			if waited := time.Since(began); waited < slice || waited > slice+time.Millisecond {
				t.Errorf("a client waited for %s, not %s", waited, slice)
			}
		})
		synctest.Wait()
		r, _ := a.enter(t.Context(), true)
		r.turn.end()
		if time.Since(began) != 0 {
			t.Errorf("waited %s", time.Since(began))
		}
		waits.Wait()
	})
}

// What waits leaves when its client does, and takes nothing with it.
func TestGateForgetsWhoLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(1)
		a, b := party{g.flow()}, party{g.flow()}
		b.enter(t.Context(), false)
		first, _ := a.enter(t.Context(), false)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		gone, ok := a.enter(ctx, false)
		if ok || a.flow.waiting.Len() != 0 {
			t.Errorf("turn %v, %d waiting", ok, a.flow.waiting.Len())
		}
		gone.turn.end()
		first.turn.end()
		if a.flow.running.Len() != 0 {
			t.Errorf("%d still run", a.flow.running.Len())
		}
	})
}

// A request that waits for something without saying so, for ever even, does not hold
// up its tenant.
func TestTurnsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(1)
		a, b := party{g.flow()}, party{g.flow()}
		b.enter(t.Context(), false)
		stuck, _ := a.enter(t.Context(), false)
		began := time.Now()
		next, _ := a.enter(t.Context(), false)
		if time.Since(began) != slice {
			t.Errorf("the next one waited %s", time.Since(began))
		}
		stuck.turn.end()
		next.turn.end()
		if a.flow.running.Len() != 0 {
			t.Errorf("%d still run", a.flow.running.Len())
		}
	})
}

// While a request is outside another one runs; several goroutines of it may be, and
// one may still be when the request has ended.
func TestOutside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(1)
		a, b := party{g.flow()}, party{g.flow()}
		b.enter(t.Context(), false)
		first, _ := a.enter(t.Context(), false)
		ctx := carrying(t.Context(), first)
		back1, back2 := Outside(ctx), Outside(ctx)
		began := time.Now()
		second, _ := a.enter(t.Context(), false)
		if time.Since(began) != 0 {
			t.Errorf("waited %s for one that is outside", time.Since(began))
		}
		back1()
		back1()
		if a.flow.running.Len() != 1 {
			t.Errorf("%d run while one is outside", a.flow.running.Len())
		}
		back2() // not for long, though the second one has the turn
		if waited := time.Since(began); waited != nestedPatience {
			t.Errorf("waited %s to come back", waited)
		}
		late := Outside(ctx)
		first.turn.end()
		second.turn.end()
		late()
		if a.flow.running.Len() != 0 || a.flow.waiting.Len() != 0 {
			t.Errorf("%d run, %d wait", a.flow.running.Len(), a.flow.waiting.Len())
		}
	})
	Outside(t.Context())() // of no request
}

// The control plane asks itself while it answers, several levels deep and over all
// its turns: it never waits for itself.
func TestNestedRequestsDoNotDeadlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(2)
		other := party{g.flow()}
		limiter := New("acme", Config{}, g)
		var h http.Handler
		ask := func(ctx context.Context, path string, own bool) {
			if own {
				ctx = context.WithValue(ctx, http.LocalAddrContextKey, ownAddr{})
			}
			r := httptest.NewRequestWithContext(ctx, http.MethodGet, path, nil)
			r.Header.Set("Authorization", "Bearer good")
			h.ServeHTTP(httptest.NewRecorder(), r)
		}
		lock := make(chan struct{}, 1) // what upstream may hold while it asks itself
		var answered atomic.Int32
		h = limiter.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if depth := len(r.URL.Path); depth < 6 {
				lock <- struct{}{}
				defer func() { <-lock }()
				for range 3 {
					// On a new connection: the context does not go along.
					ask(t.Context(), "/deepest", true)
				}
			}
			if r.URL.Path == "/outer" {
				ask(t.Context(), "/a", true)
			}
			answered.Add(1)
		}), func(h http.Handler) http.Handler { return h }, info, long)
		stop := make(chan struct{})
		var all sync.WaitGroup
		all.Go(func() {
			for {
				r, _ := other.enter(t.Context(), false)
				r.turn.end()
				select {
				case <-stop:
					return
				case <-time.After(activeFor / 2):
				}
			}
		})
		var clients sync.WaitGroup
		for range 50 {
			clients.Go(func() { ask(t.Context(), "/outer", false) })
		}
		clients.Wait() // synctest reports a deadlock
		close(stop)
		all.Wait()
		if got := answered.Load(); got != 50+50+3*50 {
			t.Errorf("%d answers", got)
		}
	})
}

// A client that closes its side while its request waits is not told that all is well.
func TestNoAnswerForWhoLeaves(t *testing.T) {
	g := NewGate(1)
	l := New("acme", Config{}, g)
	held, _ := party{l.flow}.enter(t.Context(), false)
	defer held.turn.end()
	g.mu.Lock()
	g.seen(g.flow(), time.Now()) // a neighbour
	g.mu.Unlock()
	ctx, leave := context.WithCancel(t.Context())
	leave()
	defer func() {
		if got := recover(); got != http.ErrAbortHandler {
			t.Errorf("ended with %v, want the connection to be ended", got)
		}
	}()
	l.Handler(http.HandlerFunc(ok), func(h http.Handler) http.Handler { return h }, info, long).
		ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodGet, pods, nil))
}

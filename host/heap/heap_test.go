// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package heap

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

func TestPace(t *testing.T) {
	const mib = 1 << 20
	began := time.Unix(0, 0)
	for name, c := range map[string]struct {
		now             int
		live, allocated uint64 // MiB
		took            time.Duration
		want            int
	}{
		"idle":                    {50, 400, 200, 2 * time.Minute, 50},
		"idle again":              {200, 400, 200, 2 * time.Minute, 50},
		"busy":                    {50, 128, 64, time.Second / 2, 200},
		"a little":                {50, 128, 60, 2 * time.Second, 93},
		"about as busy as before": {200, 130, 256, time.Second, 200},
		"busy with many tenants":  {50, 2000, 1000, time.Second, 50},
		"nothing yet":             {50, 0, 0, 0, 50},
	} {
		t.Run(name, func(t *testing.T) {
			p := &pacer{least: 50, now: c.now, at: began, allocated: 7}
			if got := p.next(sample{live: c.live * mib, allocated: 7 + c.allocated*mib}, began.Add(c.took)); got != c.want {
				t.Errorf("%d %%, want %d", got, c.want)
			}
		})
	}
}

// Each collection is followed by a look at the heap, for ever.
func TestPaceGoesOn(t *testing.T) {
	was := debug.SetGCPercent(100)
	t.Cleanup(func() { debug.SetGCPercent(was) })
	p := &pacer{least: 100, now: 100}
	p.afterNext()
	allocated := func() uint64 { // as p has it after one more collection
		seen := make(chan uint64, 1)
		runtime.SetFinalizer(&struct{ p *pacer }{p}, func(any) { seen <- p.allocated }) // where p is looked at, too
		runtime.GC()
		return <-seen
	}
	for last, looks, n := allocated(), 0, 0; looks < 3; n++ {
		if n == 100 {
			t.Fatalf("%d looks in %d collections", looks, n)
		}
		if now := allocated(); now != last {
			last = now
			looks++
		}
	}
}

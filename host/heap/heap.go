// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package heap

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// interval is the time that is wanted between two collections.
	interval = 4 * time.Second
	// spare is the most that may be allocated between two, in bytes, for interval's
	// sake.
	spare = 256 << 20
)

// Pace has the garbage collector of the process run when the heap has grown by
// percent of what is live, as GOGC does, and later while it would run more often
// than every few seconds: when it has grown by up to 256 MiB. It returns at once and
// lasts as long as the process. It is to be called once.
func Pace(percent int) {
	debug.SetGCPercent(percent)
	p := &pacer{least: percent, now: percent, at: time.Now(), allocated: read().allocated}
	p.afterNext()
}

// pacer changes the percentage after each collection. Finalizers run one after the
// other, so nothing guards it.
type pacer struct {
	least, now int // percent
	at         time.Time
	allocated  uint64 // bytes, since the process began
}

// afterNext has p adjust after the next collection, which finds nothing that refers
// to what the finalizer is set on.
func (p *pacer) afterNext() {
	type collected struct{ _ *pacer } // with a pointer, or it might share its memory and stay
	runtime.SetFinalizer(&collected{p}, func(*collected) {
		defer p.afterNext()
		if to := p.next(read(), time.Now()); to != p.now {
			p.now = to
			debug.SetGCPercent(to)
		}
	})
}

// sample is the heap as it is.
type sample struct {
	live      uint64 // bytes that the last collection left
	allocated uint64 // bytes, since the process began
}

func read() sample {
	s := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(s)
	return sample{live: s[0].Value.Uint64(), allocated: s[1].Value.Uint64()}
}

// next is the percentage that s asks for after a collection.
func (p *pacer) next(s sample, now time.Time) int {
	took := max(now.Sub(p.at), time.Millisecond)
	perSecond := float64(s.allocated-p.allocated) / took.Seconds()
	p.at, p.allocated = now, s.allocated
	wanted := min(perSecond*interval.Seconds(), spare)
	percent := max(p.least, int(100*wanted/float64(max(s.live, 1<<20))))
	if apart := percent - p.now; percent > p.least && -p.now/8 < apart && apart < p.now/8 {
		return p.now // not worth stopping the process
	}
	return percent
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"reflect"
	"sync"
	"unsafe"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// vectors are upstream's metrics that have labels, and so one value for each that
// there ever was. Its registry resets all that it has, plain counters too: those it
// replaces without a lock while others count, and it tells nobody what it has. So its
// fields are read as they are. There are none if upstream has named them anew.
type vectors struct {
	lock *sync.RWMutex
	all  reflect.Value // of what can be reset
}

// upstreamVectors finds them.
func upstreamVectors() (vectors, bool) {
	registry := reflect.ValueOf(legacyregistry.DefaultGatherer)
	if registry.Kind() != reflect.Pointer || registry.Elem().Kind() != reflect.Struct {
		return vectors{}, false
	}
	lock, all := registry.Elem().FieldByName("resetLock"), registry.Elem().FieldByName("resettables")
	if !lock.IsValid() || lock.Type() != reflect.TypeFor[sync.RWMutex]() || !all.IsValid() || all.Kind() != reflect.Slice || all.Type().Elem().Kind() != reflect.Interface {
		return vectors{}, false
	}
	// The registry is a variable of its package, and stays where it is.
	return vectors{
		lock: (*sync.RWMutex)(unsafe.Pointer(lock.UnsafeAddr())),
		all:  reflect.NewAt(all.Type(), unsafe.Pointer(all.UnsafeAddr())).Elem(),
	}, true
}

// reset forgets all values, and returns of how many metrics.
func (v vectors) reset() int {
	v.lock.RLock()
	defer v.lock.RUnlock()
	n := 0
	for i := range v.all.Len() {
		switch vector := v.all.Index(i).Interface().(type) {
		case *metrics.CounterVec:
			vector.Reset()
		case *metrics.GaugeVec:
			vector.Reset()
		case *metrics.HistogramVec:
			vector.Reset()
		case *metrics.SummaryVec: //nolint:staticcheck // deprecated, and still there
			vector.Reset()
		case *metrics.TimingHistogramVec:
			vector.Reset()
		default:
			continue
		}
		n++
	}
	return n
}

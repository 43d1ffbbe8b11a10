// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"testing"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// count is the values that a metric has.
func count(t *testing.T, name string) int {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return len(f.GetMetric())
		}
	}
	return 0
}

// What tenants have upstream count by is forgotten, and nothing else is touched.
func TestVectorsAreForgotten(t *testing.T) {
	byName := metrics.NewCounterVec(&metrics.CounterOpts{Name: "tenantd_test_by_name_total", Help: "For the test."}, []string{"name"})
	plain := metrics.NewCounter(&metrics.CounterOpts{Name: "tenantd_test_plain_total", Help: "For the test."})
	legacyregistry.MustRegister(byName, plain)
	for _, name := range []string{"a", "b", "c"} {
		byName.WithLabelValues(name).Inc()
	}
	counted := plain.CounterMetric
	all, ok := upstreamVectors()
	if !ok {
		t.Fatal("upstream's registry is not what it was: find the new names of its fields")
	}
	if n := count(t, "tenantd_test_by_name_total"); n != 3 {
		t.Fatalf("there are %d values to forget, want 3", n)
	}
	// Upstream has some hundred by itself.
	if n := all.reset(); n < 50 {
		t.Errorf("%d metrics were found", n)
	}
	if n := count(t, "tenantd_test_by_name_total"); n != 0 {
		t.Errorf("%d values are left", n)
	}
	if plain.CounterMetric != counted {
		t.Error("a plain counter was replaced, which others may be using")
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestMetrics(t *testing.T) {
	c := newCluster(t)
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(c.Collector()); err != nil {
		t.Fatal(err)
	}
	if other := newCluster(t, func(config *Config) { config.Tenant = "other" }); registry.Register(other.Collector()) != nil {
		t.Error("a second tenant's metrics collide")
	}
	c.Dial(t.Context(), "tcp", "10.0.0.1:1") // nobody there
	c.ours(t, "node-a")
	c.raw(t, nil, "agentid", "stranger")
	if err := roundTrip(c.dialed(t, echo(t)), "four"); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			name, mine := family.GetName(), false
			for _, label := range m.GetLabel() {
				if label.GetName() == "tenant" {
					mine = label.GetValue() == "acme"
				} else {
					name += "/" + label.GetValue()
				}
			}
			if mine {
				got[strings.TrimPrefix(name, "tenantd_tunnel_")] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	for name, want := range map[string]float64{
		"agents/certificate":   1,
		"agents/token":         0,
		"agents_refused_total": 1,
		"streams":              1,
		"dials_total/ok":       1,
		"dials_total/no_agent": 1,
		"dials_total/failed":   0,
		"dial_seconds":         1,
		"bytes_total/sent":     4,
		"bytes_total/received": 4,
		"dials_total/limit":    0,
		"dials_total/canceled": 0,
	} {
		if value, ok := got[name]; !ok || value != want {
			t.Errorf("%s is %v, want %v", name, value, want)
		}
	}
}

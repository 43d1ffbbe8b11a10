// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import "github.com/prometheus/client_golang/prometheus"

// reason says why something from the network was dropped.
type reason string

const (
	wrongKey          reason = "key"          // not sealed with our key
	wrongInstallation reason = "installation" // another installation's name on it
	malformed         reason = "malformed"
	tooLarge          reason = "too_large"
	conflict          reason = "conflict" // a second host of that name
	tooMany           reason = "too_many" // hosts, connections or bytes
	busy              reason = "busy"     // more than can be worked on; it comes again
)

func reasons() []reason {
	return []reason{wrongKey, wrongInstallation, malformed, tooLarge, conflict, tooMany, busy}
}

func newDrops() *prometheus.CounterVec {
	drops := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tenantd_gossip_dropped_total",
		Help: "Packets, connections and messages from the network that were dropped, by reason.",
	}, []string{"reason"})
	for _, r := range reasons() {
		drops.WithLabelValues(string(r))
	}
	return drops
}

// Collector returns the metrics: tenantd_gossip_hosts{state}, this host included,
// and tenantd_gossip_dropped_total{reason}.
func (g *Gossip) Collector() prometheus.Collector { return collector{g} }

type collector struct{ g *Gossip }

var hostsDesc = prometheus.NewDesc("tenantd_gossip_hosts", "Hosts that this one knows, itself included, by state.", []string{"state"}, nil)

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- hostsDesc
	c.g.report.drops.Describe(ch)
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for state, n := range c.g.view.count() {
		ch <- prometheus.MustNewConstMetric(hostsDesc, prometheus.GaugeValue, float64(n), string(state))
	}
	c.g.report.drops.Collect(ch)
}

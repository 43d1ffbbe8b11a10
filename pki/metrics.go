// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import "github.com/prometheus/client_golang/prometheus"

// Collector returns a collector of when the tenant's certificates expire:
// tenantd_certificate_expiry_timestamp_seconds{tenant,certificate}, with
// certificate "ca", "front-proxy-ca" or a profile's name. Unregister it when the
// Authority is closed.
func (a *Authority) Collector() prometheus.Collector {
	return expiry{authority: a, desc: prometheus.NewDesc(
		"tenantd_certificate_expiry_timestamp_seconds",
		"When the certificate expires, in seconds since the epoch.",
		[]string{"certificate"}, prometheus.Labels{"tenant": a.config.Tenant})}
}

type expiry struct {
	authority *Authority
	desc      *prometheus.Desc
}

func (e expiry) Describe(ch chan<- *prometheus.Desc) { ch <- e.desc }

func (e expiry) Collect(ch chan<- prometheus.Metric) {
	send := func(name string, unix int64) {
		ch <- prometheus.MustNewConstMetric(e.desc, prometheus.GaugeValue, float64(unix), name)
	}
	send("ca", e.authority.cluster.cert.NotAfter.Unix())
	send("front-proxy-ca", e.authority.frontProxy.cert.NotAfter.Unix())
	for name, l := range e.authority.snapshot() {
		send(name, l.Expiry().Unix())
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import "github.com/prometheus/client_golang/prometheus"

// metrics are what the router counts as it happens.
type metrics struct {
	accepted prometheus.Counter
	refusals *prometheus.CounterVec
	hello    prometheus.Histogram

	forwarded, forwardedBytes *prometheus.CounterVec
}

func newMetrics() *metrics {
	m := &metrics{
		accepted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tenantd_router_connections_accepted_total",
			Help: "Connections accepted from the port, refused ones included.",
		}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tenantd_router_connections_refused_total",
			Help: "Connections closed before they were established, by reason.",
		}, []string{"reason"}),
		hello: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "tenantd_router_hello_seconds",
			Help: "Time from accept to a name, in a complete ClientHello or PROXY header.",
			// From one read on a LAN to DefaultHelloTimeout.
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
		}),
	}
	m.forwarded = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tenantd_router_forwarded_total",
		Help: "Connections that were forwarded to another host and have ended, by outcome.",
	}, []string{"outcome"})
	m.forwardedBytes = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tenantd_router_forwarded_bytes_total",
		Help: "Bytes forwarded behind the hello, by direction, counted when a connection ends.",
	}, []string{"direction"})
	for _, o := range outcomes() {
		m.forwarded.WithLabelValues(string(o))
	}
	for _, r := range reasons() {
		m.refusals.WithLabelValues(string(r))
	}
	return m
}

func (m *metrics) refused(why reason) { m.refusals.WithLabelValues(string(why)).Inc() }

// Collector returns the router's metrics: tenantd_router_connections_accepted_total,
// _refused_total{reason}, _pending and _open{tenant}, tenantd_router_hello_seconds,
// tenantd_router_backlog{tenant}, tenantd_router_forwarded_total{outcome},
// _forwarded_bytes_total{direction} and _forwarded_open. A tenant's series end when
// its listeners are closed and its connections gone.
func (r *Router) Collector() prometheus.Collector {
	return &collector{
		router: r,
		pending: prometheus.NewDesc("tenantd_router_connections_pending",
			"Connections accepted and neither established nor refused yet.", nil, nil),
		open: prometheus.NewDesc("tenantd_router_connections_open",
			"Connections routed to the tenant and not closed.", []string{"tenant"}, nil),
		backlog: prometheus.NewDesc("tenantd_router_backlog",
			"Connections routed to the tenant that it has not accepted yet.", []string{"tenant"}, nil),
		forwarded: prometheus.NewDesc("tenantd_router_forwarded_open",
			"Connections that are forwarded to another host.", nil, nil),
	}
}

// collector adds what is read off the router when it is asked for.
type collector struct {
	router                            *Router
	pending, open, backlog, forwarded *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	c.router.metrics.accepted.Describe(ch)
	c.router.metrics.refusals.Describe(ch)
	c.router.metrics.hello.Describe(ch)
	c.router.metrics.forwarded.Describe(ch)
	c.router.metrics.forwardedBytes.Describe(ch)
	ch <- c.pending
	ch <- c.open
	ch <- c.backlog
	ch <- c.forwarded
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	c.router.metrics.accepted.Collect(ch)
	c.router.metrics.refusals.Collect(ch)
	c.router.metrics.hello.Collect(ch)
	c.router.metrics.forwarded.Collect(ch)
	c.router.metrics.forwardedBytes.Collect(ch)
	gauge := func(d *prometheus.Desc, value int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value), labels...)
	}
	gauge(c.pending, c.router.gate.count())
	gauge(c.forwarded, c.router.forwards.count())
	open, waiting := c.router.load()
	for tenant := range open {
		gauge(c.open, open[tenant], tenant)
		gauge(c.backlog, waiting[tenant], tenant)
	}
}

// load returns each tenant's open and waiting connections, over all its
// listeners.
func (r *Router) load() (open, waiting map[string]int) {
	open, waiting = make(map[string]int), make(map[string]int)
	r.mu.RLock()
	defer r.mu.RUnlock()
	for l := range r.listeners {
		open[l.tenant] += l.Open()
		waiting[l.tenant] += len(l.queue)
	}
	return open, waiting
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// The outcomes of a dial.
const (
	outcomeOK       = "ok"
	outcomeNoAgent  = "no_agent"
	outcomeCanceled = "canceled"
	outcomeLimit    = "limit"
	outcomeFailed   = "failed"
)

// metrics are a server's, counted as it happens or read off it when asked for.
type metrics struct {
	server  *Server
	dials   *prometheus.CounterVec
	seconds prometheus.Histogram
	refused prometheus.Counter
	bytes   *prometheus.CounterVec

	sent, received prometheus.Counter // of bytes

	agents, streams *prometheus.Desc
}

func newMetrics(s *Server) *metrics {
	tenant := prometheus.Labels{"tenant": s.config.Tenant}
	m := &metrics{
		server: s,
		dials: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tenantd_tunnel_dials_total", ConstLabels: tenant,
			Help: "Connections that the API server asked for, by outcome.",
		}, []string{"outcome"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "tenantd_tunnel_dial_seconds", ConstLabels: tenant,
			Help: "Time until a connection through the tunnel was open.",
			// From a worker in the same rack to a target that hardly answers.
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tenantd_tunnel_agents_refused_total", ConstLabels: tenant,
			Help: "Streams refused because of who opened them, after the TLS handshake.",
		}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tenantd_tunnel_bytes_total", ConstLabels: tenant,
			Help: "Bytes of tunnelled connections, by direction as the API server sees it.",
		}, []string{"direction"}),
		agents: prometheus.NewDesc("tenantd_tunnel_agents",
			"Agent connections, by how the agent proved itself.", []string{"credential"}, tenant),
		streams: prometheus.NewDesc("tenantd_tunnel_streams",
			"Open connections through the tunnel and dials under way.", nil, tenant),
	}
	m.sent, m.received = m.bytes.WithLabelValues("sent"), m.bytes.WithLabelValues("received")
	for _, outcome := range []string{outcomeOK, outcomeNoAgent, outcomeCanceled, outcomeLimit, outcomeFailed} {
		m.dials.WithLabelValues(outcome)
	}
	return m
}

// dialed counts a dial.
func (m *metrics) dialed(ctx context.Context, err error, took time.Duration) {
	outcome := outcomeFailed
	switch {
	case err == nil:
		outcome = outcomeOK
		m.seconds.Observe(took.Seconds())
	case errors.Is(err, ErrNoAgent):
		outcome = outcomeNoAgent
	case errors.Is(err, ErrTooManyStreams):
		outcome = outcomeLimit
	case ctx.Err() != nil:
		outcome = outcomeCanceled
	}
	m.dials.WithLabelValues(outcome).Inc()
}

// Collector returns the server's metrics, each with the label tenant:
// tenantd_tunnel_agents{credential}, _agents_refused_total, _streams,
// _dials_total{outcome}, _dial_seconds and _bytes_total{direction}.
func (s *Server) Collector() prometheus.Collector { return s.metrics }

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range []prometheus.Collector{m.dials, m.seconds, m.refused, m.bytes} {
		c.Describe(ch)
	}
	ch <- m.agents
	ch <- m.streams
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range []prometheus.Collector{m.dials, m.seconds, m.refused, m.bytes} {
		c.Collect(ch)
	}
	gauge := func(d *prometheus.Desc, value int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value), labels...)
	}
	var certified, token int64
	m.server.mu.Lock()
	for id, of := range m.server.sessions {
		if id.proven {
			certified += int64(len(of))
		} else {
			token += int64(len(of))
		}
	}
	m.server.mu.Unlock()
	gauge(m.agents, certified, "certificate")
	gauge(m.agents, token, "token")
	gauge(m.streams, m.server.used.Load())
}

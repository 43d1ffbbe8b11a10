// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"

	"github.com/tenantd/tenantd/tenant/limit"
)

// requests counts what an API server is asked.
type requests struct {
	total   *prometheus.CounterVec
	latency prometheus.Histogram
	// retired has each answer be the last of its connection: what is asked on it next
	// is asked on a new one, wherever that leads.
	retired *atomic.Bool
}

func newRequests(tenant string) requests {
	labels := prometheus.Labels{"tenant": tenant}
	return requests{
		retired: new(atomic.Bool),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name:        "tenantd_tenant_requests_total",
			Help:        "Requests to the tenant's API server by class of answer (2xx, 4xx, …).",
			ConstLabels: labels,
		}, []string{"class"}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:        "tenantd_tenant_request_seconds",
			Help:        "Time to answer a request to the tenant's API server; watches and upgraded connections are left out.",
			ConstLabels: labels,
			Buckets:     []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}),
	}
}

// wrap counts the requests that h answers to clients. What the control plane's own
// components ask is not a user's business, and much of it fails by design.
func (r requests) wrap(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if limit.IsOwn(req.Context()) {
			h.ServeHTTP(w, req)
			return
		}
		began := time.Now()
		rec := &statusRecorder{ResponseWriter: w, last: r.retired}
		defer func() {
			status := rec.status
			if status == 0 {
				status = http.StatusOK
			}
			r.total.WithLabelValues(strconv.Itoa(status/100) + "xx").Inc()
			if status != http.StatusSwitchingProtocols && req.URL.Query().Get("watch") == "" {
				r.latency.Observe(time.Since(began).Seconds())
			}
		}()
		// Keeps what the connection can do beyond http.ResponseWriter: flush for
		// watches, hijack for upgrades.
		h.ServeHTTP(responsewriter.WrapForHTTP1Or2(rec), req)
	})
}

// Collector yields this control plane's metrics, labelled with its name.
func (cp *ControlPlane) Collector() prometheus.Collector { return collector{cp} }

type collector struct{ cp *ControlPlane }

// Describe implements prometheus.Collector. The tunnel's metrics come and go with
// it, so they are not described.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	c.cp.requests.total.Describe(ch)
	c.cp.requests.latency.Describe(ch)
	c.cp.limiter.Collector().Describe(ch)
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	c.cp.requests.total.Collect(ch)
	c.cp.requests.latency.Collect(ch)
	if a := c.cp.audit; a != nil {
		a.lost.Collect(ch)
	}
	c.cp.limiter.Collector().Collect(ch)
	if t := c.cp.tunnel.Load(); t != nil && t.server != nil {
		t.server.Collector().Collect(ch)
	}
}

// statusRecorder remembers the status that a handler answers with.
type statusRecorder struct {
	http.ResponseWriter
	status int
	last   *atomic.Bool
}

// Unwrap implements responsewriter.UserProvidedDecorator.
func (r *statusRecorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (r *statusRecorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	// Now, and not when the request came: what is answered last may have come before.
	if r.last.Load() && status >= http.StatusOK {
		r.Header().Set("Connection", "close") // over HTTP/2 a GOAWAY; streams that are open go on
	}
	r.ResponseWriter.WriteHeader(status)
}

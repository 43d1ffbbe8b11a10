// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// healthServer answers /livez, /readyz and /metrics.
type healthServer struct {
	registry *prometheus.Registry
	server   *http.Server
	done     chan struct{}
}

// serveHealth opens the health address.
func (h *Host) serveHealth() (*healthServer, error) {
	ln, err := net.Listen("tcp", h.cfg.HealthListen)
	if err != nil {
		return nil, fmt.Errorf("open the health address %s: %w%s", h.cfg.HealthListen, err, portRemedy(err))
	}
	s := &healthServer{registry: prometheus.NewRegistry(), done: make(chan struct{})}
	// Beside the heap as it is, with its garbage, what of it lives: what a host needs.
	s.register(collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(
		collectors.GoRuntimeMetricsRule{Matcher: regexp.MustCompile(`^/gc/heap/live:bytes$`)})))
	s.register(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		h.mu.Lock()
		problem := h.problem
		h.mu.Unlock()
		if problem != "" {
			http.Error(w, problem, http.StatusServiceUnavailable)
			return
		}
		io.WriteString(w, "ok\n")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))
	s.server = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	go func() {
		defer close(s.done)
		if err := s.server.Serve(ln); err != http.ErrServerClosed {
			h.log.Error("health server ended", "error", err)
		}
	}()
	h.log.Info("serving health and metrics", "address", ln.Addr().String())
	return s, nil
}

// register adds metrics. Registering twice is a mistake in this program.
func (s *healthServer) register(c prometheus.Collector) { s.registry.MustRegister(c) }

func (s *healthServer) close() {
	s.server.Close()
	<-s.done
}

var (
	phaseDesc   = prometheus.NewDesc("tenantd_tenant_phase", "1 for the phase that the tenant is in.", []string{"tenant", "phase"}, nil)
	restartDesc = prometheus.NewDesc("tenantd_tenant_restarts_total", "Times that the tenant's control plane failed and was started again.", []string{"tenant"}, nil)
	memoryDesc  = prometheus.NewDesc("tenantd_tenant_memory_bytes", "Estimate of the memory that the tenant's control plane uses.", []string{"tenant"}, nil)
	usageDesc   = prometheus.NewDesc("tenantd_tenant_storage_bytes", "Bytes of the tenant's objects in storage.", []string{"tenant"}, nil)
	quotaDesc   = prometheus.NewDesc("tenantd_tenant_storage_quota_bytes", "Bytes that the tenant's objects may take in storage.", []string{"tenant"}, nil)
	readyDesc   = prometheus.NewDesc("tenantd_ready", "1 when the system plane answers and the port is open.", nil, nil)
)

// Describe implements prometheus.Collector. The metrics of tenants come and go
// with them, so the collector is an unchecked one.
func (h *Host) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (h *Host) Collect(ch chan<- prometheus.Metric) {
	h.mu.Lock()
	ready := 0.0
	if h.problem == "" {
		ready = 1
	}
	plane, authority := h.plane, h.authority
	runners := make([]*runner, 0, len(h.runners))
	for _, r := range h.runners {
		runners = append(runners, r)
	}
	h.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(readyDesc, prometheus.GaugeValue, ready)
	if plane != nil {
		plane.Collector().Collect(ch)
	}
	if authority != nil {
		authority.Collector().Collect(ch)
	}
	for _, r := range runners {
		s := r.snapshot()
		ch <- prometheus.MustNewConstMetric(phaseDesc, prometheus.GaugeValue, 1, r.name, string(s.phase))
		ch <- prometheus.MustNewConstMetric(restartDesc, prometheus.CounterValue, float64(s.restarts), r.name)
		ch <- prometheus.MustNewConstMetric(memoryDesc, prometheus.GaugeValue, float64(h.memoryOf(r)), r.name)
		u := h.store.Usage(r.uid)
		ch <- prometheus.MustNewConstMetric(usageDesc, prometheus.GaugeValue, float64(u.Live), r.name)
		ch <- prometheus.MustNewConstMetric(quotaDesc, prometheus.GaugeValue, float64(u.Quota), r.name)
		r.collect(ch)
	}
}

// memoryOf estimates what a tenant's control plane uses, in bytes. Go does not
// attribute memory, so what the process uses beyond its start is shared out among
// the tenants: in equal parts, as the assembled API server is most of it, and by
// the size of their objects, which are held in caches.
func (h *Host) memoryOf(run *runner) int64 {
	if run.snapshot().phase != v1alpha1.TenantReady {
		return 0
	}
	const base = 32 << 20 // the weight of a control plane without objects
	const copies = 3      // of each object: watch cache, informer, decoding
	weight := func(r *runner) float64 { return base + copies*float64(h.store.Usage(r.uid).Live) }
	h.mu.Lock()
	all, baseline := 0.0, h.baseline
	for _, r := range h.runners {
		if r.snapshot().phase == v1alpha1.TenantReady {
			all += weight(r)
		}
	}
	h.mu.Unlock()
	if all == 0 {
		return 0
	}
	used := memoryInUse() - baseline
	return int64(float64(max(used, 0)) * weight(run) / all)
}

// memoryInUse is what the Go runtime holds for live objects and stacks, in bytes.
func memoryInUse() int64 {
	samples := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}}
	metrics.Read(samples)
	var sum int64
	for _, s := range samples {
		if s.Value.Kind() == metrics.KindUint64 {
			sum += int64(s.Value.Uint64())
		}
	}
	return sum
}

// quietAfter is how many looks without a change, five seconds apart, mean that
// the starts and stops of tenants are over.
const quietAfter = 4

// givesBack reports whether memory is given back after so many looks without a change.
// What has ended is a chain: client-go ends a transport's goroutines when the transport
// is collected (transport/cache.go), and what these refer to, which may be all of a
// control plane, only the next collection finds. Some of it is held for a while longer,
// by what is not known: the later looks are for that.
func givesBack(unchanged int) bool {
	switch unchanged {
	case quietAfter, quietAfter + 1, quietAfter + 2, 3 * quietAfter, 6 * quietAfter, 6*quietAfter + 1:
		return true
	}
	return false
}

// aloneLooks is after how many looks a host that runs alone, whose Host object nobody
// waits for, writes that anew.
const aloneLooks = 12

// reportStatus keeps systemd's status line true, and gives memory back to the
// system when tenants have started or stopped: assembling a control plane needs
// more than the control plane, and Go would keep it for the next one.
func (h *Host) reportStatus(ctx context.Context) {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	last, unchanged := "", 0
	for ready, looks := h.ready, 0; ; looks++ {
		select {
		case <-ctx.Done():
			return
		case <-ready:
			ready, looks = nil, 0
		case <-tick.C:
		}
		if h.hosts == nil && ready == nil && looks%aloneLooks == 0 {
			h.reportHost(ctx)
		}
		if unchanged++; givesBack(unchanged) {
			debug.FreeOSMemory()
		}
		counts := map[v1alpha1.TenantPhase]int{}
		h.mu.Lock()
		problem := h.problem
		for _, r := range h.runners {
			counts[r.snapshot().phase]++
		}
		h.mu.Unlock()
		line := fmt.Sprintf("%d tenants ready, %d starting, %d failed",
			counts[v1alpha1.TenantReady], counts[v1alpha1.TenantStarting], counts[v1alpha1.TenantFailed])
		if n := counts[v1alpha1.TenantAsleep]; n > 0 {
			line += fmt.Sprintf(", %d asleep", n)
		}
		if problem != "" {
			line += "; " + problem
		}
		if line != last {
			last, unchanged = line, 0
			h.systemd.say("STATUS=" + line)
		}
	}
}

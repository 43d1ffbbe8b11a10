// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
)

// metrics are counted where things happen.
type metrics struct {
	relayed, refused, exhausted, unreachable atomic.Int64
	up, down                                 atomic.Int64
}

// serveMetrics writes Prometheus' text format: so few numbers are not worth a
// library in the memory of every worker.
func (w *Worker) serveMetrics(rw http.ResponseWriter, _ *http.Request) {
	var out strings.Builder
	family := func(name, kind, help string) {
		fmt.Fprintf(&out, "# HELP tenant_proxy_%s %s\n# TYPE tenant_proxy_%s %s\n", name, help, name, kind)
	}
	// Labels hold addresses, carriers and fixed words: nothing that needs escaping.
	sample := func(name string, value any) { fmt.Fprintf(&out, "tenant_proxy_%s %v\n", name, value) }

	s := w.Status()
	family("ready", "gauge", "1 when the address is on this machine and a host is healthy.")
	sample("ready", number(s.Ready))
	family("connections", "gauge", "Connections that are open.")
	sample("connections", s.Connections)
	family("connections_total", "counter", "Connections by outcome: relayed, refused (not of this machine), exhausted (too many are open), unreachable (no host answered).")
	sample(`connections_total{outcome="relayed"}`, w.metrics.relayed.Load())
	sample(`connections_total{outcome="refused"}`, w.metrics.refused.Load())
	sample(`connections_total{outcome="exhausted"}`, w.metrics.exhausted.Load())
	sample(`connections_total{outcome="unreachable"}`, w.metrics.unreachable.Load())
	family("bytes_total", "counter", "Bytes of connections that have ended, up to the hosts or down from them.")
	sample(`bytes_total{direction="up"}`, w.metrics.up.Load())
	sample(`bytes_total{direction="down"}`, w.metrics.down.Load())
	family("host_healthy", "gauge", "1 when the host answered its last probes.")
	for _, h := range s.Hosts {
		sample(fmt.Sprintf("host_healthy{host=%q,carrier=%q}", h.Address.String(), h.Carrier), number(h.Healthy))
	}
	family("tunnel_servers", "gauge", "Servers that the tunnel is connected to.")
	sample("tunnel_servers", s.Tunnel.connected())

	rw.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	io.WriteString(rw, out.String())
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

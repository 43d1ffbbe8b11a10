// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/tenantd/tenantd/worker/balance"
)

// statusInterval is how old systemd's status line can be.
const statusInterval = 5 * time.Second

// Status is the state of a Worker, as /status shows it.
type Status struct {
	Tenant      string         `json:"tenant"`
	Endpoint    string         `json:"endpoint"`
	Device      string         `json:"device,omitempty"`
	Ready       bool           `json:"ready"`
	Problem     string         `json:"problem,omitempty"`
	Connections int            `json:"connections"`
	Hosts       []balance.Host `json:"hosts"`
	Tunnel      TunnelStatus   `json:"tunnel"`
}

// Status returns the state of now.
func (w *Worker) Status() Status {
	s := Status{
		Tenant:      w.file.Hostname,
		Endpoint:    w.endpoint.String(),
		Device:      w.address.Load().device,
		Connections: w.connections(),
		Hosts:       w.pool.Hosts(),
		Tunnel:      w.tunnel.status(),
	}
	if err := w.problem(); err != nil {
		s.Problem = err.Error()
	}
	s.Ready = s.Problem == ""
	return s
}

// problem says why pods cannot reach the API server, or nil. The tunnel is no part
// of it: a restart for its sake would cut the path that works.
func (w *Worker) problem() error {
	switch address := w.address.Load(); {
	case address.err != nil:
		return address.err
	case address.device == "":
		return errors.New("the address is not on this machine yet")
	case !w.pool.Healthy():
		return errors.New("no host is healthy: tenant-proxy status shows why")
	}
	return nil
}

// serveHealth answers until ctx is done or the worker drains.
func (w *Worker) serveHealth(ctx context.Context, ln net.Listener) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, "ok\n") })
	mux.HandleFunc("GET /readyz", func(rw http.ResponseWriter, _ *http.Request) {
		if err := w.problem(); err != nil {
			http.Error(rw, err.Error(), http.StatusServiceUnavailable)
			return
		}
		io.WriteString(rw, "ok\n")
	})
	mux.HandleFunc("GET /status", func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(rw).Encode(w.Status()) // it fails when the client is gone
	})
	mux.HandleFunc("GET /metrics", w.serveMetrics)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			w.log.Error("the health endpoint ended", "error", err)
		}
	}()
	// A successor answers from the same socket, and for itself.
	select {
	case <-ctx.Done():
	case <-w.drain:
	}
	shutdown, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if server.Shutdown(shutdown) != nil {
		server.Close()
	}
	<-served
}

// notify tells systemd how things are until ctx is done, or the worker drains: from
// then on its successor does. Without systemd it does nothing.
func (w *Worker) notify(ctx context.Context) {
	say := func(state string) {
		if _, err := daemon.SdNotify(false, state); err != nil {
			w.log.Warn("cannot notify systemd", "error", err)
		}
	}
	// Not when hosts answer: the kubelet waits for this at boot.
	say(daemon.SdNotifyReady)
	defer func() {
		select {
		case <-w.drain:
		default:
			say(daemon.SdNotifyStopping)
		}
	}()
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		w.log.Warn("cannot read the watchdog's interval", "error", err)
	}
	period := statusInterval
	if interval > 0 {
		period = min(period, interval/3)
	}
	tick := time.NewTicker(period)
	defer tick.Stop()
	last := ""
	for {
		if interval > 0 {
			say(daemon.SdNotifyWatchdog)
		}
		if line := w.line(); line != last {
			last = line
			say("STATUS=" + line)
		}
		select {
		case <-ctx.Done():
			return
		case <-w.drain:
			return
		case <-tick.C:
		}
	}
}

// line is the state in one line.
func (w *Worker) line() string {
	s := w.Status()
	healthy := 0
	for _, h := range s.Hosts {
		if h.Healthy {
			healthy++
		}
	}
	line := fmt.Sprintf("%s: %d of %d hosts healthy, tunnel to %d", s.Tenant, healthy, len(s.Hosts), s.Tunnel.connected())
	if s.Problem != "" {
		line += "; " + s.Problem
	}
	return line
}

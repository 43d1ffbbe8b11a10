// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tenantd/tenantd/e2e/bench/results"
	"github.com/tenantd/tenantd/sni"
)

func TestSpread(t *testing.T) {
	for _, row := range []struct {
		values []float64
		want   spread
	}{
		{nil, spread{}},
		{[]float64{7}, spread{7, 7, 7}},
		{[]float64{3, 1, 2}, spread{2, 1, 3}},
		{[]float64{4, 3, 1, 2}, spread{2.5, 1, 4}},
	} {
		if got := spreadOf(row.values); got != row.want {
			t.Errorf("spreadOf(%v) = %+v, want %+v", row.values, got, row.want)
		}
	}
}

// An added round trip is that of one round beyond the plain one of the same round,
// and what was not measured has no row.
func TestRouterRows(t *testing.T) {
	figures := map[string]*routerFigures{
		wayPlain:   {trips: []float64{10, 20, 30}, connects: []float64{100}},
		wayLocal:   {trips: []float64{12, 22, 34}, connects: []float64{90}},
		wayForward: {trips: []float64{40, 50, 60}, connects: []float64{40}},
		wayHAProxy: {trips: []float64{20, 30, 50}, connects: []float64{60}},
	}
	rows := map[string]results.Row{}
	for _, r := range routerRows(routerConfig{}, figures, "") {
		rows[r.Name] = r
	}
	for _, want := range []results.Row{
		{Name: "router to a local tenant: new TLS connections, beside haproxy", Ours: 90, Theirs: 60, Ratio: 1.5},
		{Name: "router to a local tenant: added round trip, beside haproxy", Ours: 2, Theirs: 10, Ratio: 5},
		{Name: "router to another host's tenant: new TLS connections, beside haproxy", Ours: 40, Theirs: 60, Ratio: 0.667},
		{Name: "router to another host's tenant: added round trip, beside haproxy", Ours: 30, Theirs: 10, Ratio: 0.333},
	} {
		got, ok := rows[want.Name]
		if !ok || got.Ours != want.Ours || got.Theirs != want.Theirs || got.Ratio != want.Ratio {
			t.Errorf("%s: %v and %v, ratio %v; want %v and %v, ratio %v", want.Name, got.Ours, got.Theirs, got.Ratio, want.Ours, want.Theirs, want.Ratio)
		}
		delete(rows, want.Name)
	}
	for name := range rows {
		t.Errorf("row %q, of what was not measured", name)
	}
}

// The client finds the server behind our router and without it, and what it counts
// is what it asked for.
func TestWire(t *testing.T) {
	dir := t.TempDir()
	ca, err := newAuthority(dir, "ca")
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.issueServing("server", backendName); err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	serving := &tls.Config{Certificates: []tls.Certificate{pair}}
	for name, routed := range map[string]bool{"plain": false, "local": true} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			address, served, ended := ln.Addr().String(), ln, make(chan error, 2)
			if routed {
				router := sni.New(bounds(100))
				defer router.Close()
				tenant, err := router.Listen(sni.ListenConfig{Tenant: "acme", Names: []string{backendName}})
				if err != nil {
					t.Fatal(err)
				}
				served = tenant
				go func() { ended <- router.Serve(ctx, ln) }()
			} else {
				ended <- nil
			}
			go func() { ended <- serveBackend(ctx, served, serving) }()
			w := wire{address: address, tls: &tls.Config{RootCAs: roots, ServerName: backendName}}
			const during = 50 * time.Millisecond
			if n, err := w.connects(ctx, during, 2); err != nil || n < 2 {
				t.Errorf("%d connections, %v", n, err)
			}
			for _, want := range []byte{wantDownload, wantUpload} {
				if n, err := w.stream(ctx, want, during, 2); err != nil || n < chunk {
					t.Errorf("%q: %d bytes, %v", want, n, err)
				}
			}
			if times, err := w.roundTrips(ctx, during); err != nil || len(times) == 0 {
				t.Errorf("%d round trips, %v", len(times), err)
			}
			closed, err := w.open(ctx, 5, 2)
			if err != nil {
				t.Fatal(err)
			}
			closed()
			cancel()
			for range cap(ended) {
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A proxy needs two descriptors for each connection.
func TestIdleConnections(t *testing.T) {
	var said strings.Builder
	if n, err := idleConnections(1, &said); n != 1 || err != nil || said.Len() > 0 {
		t.Errorf("1 of 1: %d, %v, %q", n, err, said.String())
	}
	n, err := idleConnections(1<<30, io.Discard)
	if err != nil || n < 1 || n >= 1<<19 {
		t.Errorf("of very many: %d, %v", n, err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"runtime/pprof"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/tenantd/tenantd/sni"
)

const (
	// backendName is the tenant whose server the proxies are in front of.
	backendName = "acme.bench.test"
	// hostGC is tenantd's own setting.
	hostGC = 50
	// chunk is what a stream writes and reads at once.
	chunk = 64 << 10
	// handshakeTimeout is what net/http's servers give clients, if told to.
	handshakeTimeout = 10 * time.Second
)

// What a client wants of the server, its first byte.
const (
	wantEcho     = 'e'
	wantDownload = 'd'
	wantUpload   = 'u'
)

// bounds lets one source have every connection: all clients are on loopback.
func bounds(connections int) sni.Config {
	return sni.Config{MaxPendingPerSource: sni.DefaultMaxPending, SourceShare: 100, MaxForwarded: connections, MaxForwardedPerName: connections}
}

// part is a program of bench router: the server, behind our router or not, or our
// router alone.
type part struct {
	listen, profile string
	connections     int
}

func (p *part) command(use, short string, run func(context.Context, net.Listener) error) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short + " (bench router starts it)",
		Hidden: true, Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if os.Getenv("GOGC") == "" {
				debug.SetGCPercent(hostGC)
			}
			if p.profile != "" {
				f, err := os.Create(p.profile)
				if err != nil {
					return fmt.Errorf("profile: %w", err)
				}
				defer f.Close()
				if err := pprof.StartCPUProfile(f); err != nil {
					return fmt.Errorf("profile: %w", err)
				}
				defer pprof.StopCPUProfile()
			}
			ln, err := net.Listen("tcp", p.listen)
			if err != nil {
				return fmt.Errorf("listen: %w", err)
			}
			return run(cmd.Context(), ln)
		},
	}
	cmd.Flags().StringVar(&p.listen, "listen", "127.0.0.1:0", "address")
	cmd.Flags().IntVar(&p.connections, "connections", sni.DefaultMaxConns, "as many may be open")
	cmd.Flags().StringVar(&p.profile, "profile", "", "file for a CPU profile")
	return cmd
}

func newBackendCommand() *cobra.Command {
	var p part
	var cert, key string
	var routed, member bool
	cmd := p.command("backend", "Serve TLS, behind our router or without it", func(ctx context.Context, ln net.Listener) error {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return fmt.Errorf("read the serving certificate: %w", err)
		}
		tlsConfig := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
		if !routed {
			return serveBackend(ctx, ln, tlsConfig)
		}
		router := sni.New(bounds(p.connections))
		defer router.Close()
		tenant, err := router.Listen(sni.ListenConfig{Tenant: "acme", Names: []string{backendName}, MaxConns: p.connections, Backlog: p.connections})
		if err != nil {
			return err
		}
		if member {
			router.SetMembers([]netip.Addr{netip.MustParseAddr("127.0.0.1")})
		}
		both, ctx := errgroup.WithContext(ctx)
		both.Go(func() error { return router.Serve(ctx, ln) })
		both.Go(func() error { return serveBackend(ctx, tenant, tlsConfig) })
		return both.Wait()
	})
	f := cmd.Flags()
	f.StringVar(&cert, "cert", "", "serving certificate")
	f.StringVar(&key, "key", "", "its key")
	f.BoolVar(&routed, "router", false, "behind our router")
	f.BoolVar(&member, "member", false, "connections are forwarded by another host")
	return cmd
}

func newForwarderCommand() *cobra.Command {
	var p part
	var to string
	cmd := p.command("forwarder", "Be a host that forwards the tenant's connections to another", func(ctx context.Context, ln net.Listener) error {
		cfg := bounds(p.connections)
		cfg.ForwardFrom = netip.MustParseAddr("127.0.0.1") // as hosts do
		router := sni.New(cfg)
		defer router.Close()
		router.SetRemotes(map[string]sni.Remote{backendName: {Addresses: []string{to}}})
		return router.Serve(ctx, ln)
	})
	cmd.Flags().StringVar(&to, "to", "", "the other host's port")
	return cmd
}

// serveBackend is the server that all ways lead to, until ctx is done.
func serveBackend(ctx context.Context, ln net.Listener, cfg *tls.Config) error {
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()
	for {
		c, err := ln.Accept()
		switch {
		case err == nil:
			go answer(c, cfg)
		case ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			return nil
		default:
			return fmt.Errorf("accept: %w", err)
		}
	}
}

// answer does what the client wants until it leaves.
func answer(raw net.Conn, cfg *tls.Config) {
	defer raw.Close()
	c := tls.Server(raw, cfg)
	// As net/http does, and with it all that tenants run.
	if raw.SetDeadline(time.Now().Add(handshakeTimeout)) != nil || c.Handshake() != nil || raw.SetDeadline(time.Time{}) != nil {
		return
	}
	var want [1]byte
	if _, err := io.ReadFull(c, want[:]); err != nil {
		return
	}
	if _, err := c.Write(want[:]); err != nil {
		return
	}
	switch want[0] {
	case wantEcho:
		var ping [pingSize]byte
		for {
			n, err := c.Read(ping[:])
			if err != nil {
				break
			}
			if _, err := c.Write(ping[:n]); err != nil {
				break
			}
		}
	case wantDownload:
		for data := make([]byte, chunk); ; {
			if _, err := c.Write(data); err != nil {
				break
			}
		}
	case wantUpload:
		for data := make([]byte, chunk); ; {
			if _, err := c.Read(data); err != nil {
				break
			}
		}
	}
	_ = c.Close() // the client has left
}

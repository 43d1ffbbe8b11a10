// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"testing"
)

// ways are the ways to a kubelet: TLS to it is the same in all.
var ways = []struct {
	name  string
	start func(*cluster, testing.TB)
}{
	{"direct", nil},
	{"ours", func(c *cluster, b testing.TB) { c.ours(b, "node-a") }},
	{"upstream", func(c *cluster, b testing.TB) { c.upstreams(b, "node-a", "", nil) }},
}

// forEachWay calls f with what dials the address by TLS.
func forEachWay(b *testing.B, serve func(net.Conn), f func(b *testing.B, dial func() net.Conn)) {
	for _, way := range ways {
		b.Run(way.name, func(b *testing.B) {
			c := newCluster(b)
			cert := c.ca.serving(b)
			address := target(b, func(conn *net.TCPConn) {
				serve(tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{*cert}}))
			})
			dial := new(net.Dialer).DialContext
			if way.start != nil {
				way.start(c, b)
				dial = c.Dial
			}
			f(b, func() net.Conn {
				raw, err := dial(context.Background(), "tcp", address)
				if err != nil {
					b.Fatal(err)
				}
				conn := tls.Client(raw, &tls.Config{ServerName: hostname, RootCAs: c.ca.pool})
				if err := conn.Handshake(); err != nil {
					b.Fatal(err)
				}
				return conn
			})
		})
	}
}

// BenchmarkRoundTrip is a small request and its answer on an open connection.
func BenchmarkRoundTrip(b *testing.B) {
	forEachWay(b, func(c net.Conn) { io.Copy(c, c) }, func(b *testing.B, dial func() net.Conn) {
		conn := dial()
		defer conn.Close()
		message := make([]byte, 1024)
		for b.Loop() {
			if _, err := conn.Write(message); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(conn, message); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkDial is a connection with its handshake and its end.
func BenchmarkDial(b *testing.B) {
	forEachWay(b, func(c net.Conn) { io.Copy(c, c) }, func(b *testing.B, dial func() net.Conn) {
		for b.Loop() {
			dial().Close()
		}
	})
}

// BenchmarkDownload is what logs are: bytes in one direction.
func BenchmarkDownload(b *testing.B) {
	send := func(c net.Conn) {
		buffer := make([]byte, 64<<10)
		for {
			if _, err := c.Write(buffer); err != nil {
				return
			}
		}
	}
	forEachWay(b, send, func(b *testing.B, dial func() net.Conn) {
		conn := dial()
		defer conn.Close()
		buffer := make([]byte, 64<<10)
		b.SetBytes(int64(len(buffer)))
		for b.Loop() {
			if _, err := io.ReadFull(conn, buffer); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkUpload is what cp to a pod is.
func BenchmarkUpload(b *testing.B) {
	forEachWay(b, func(c net.Conn) { io.Copy(io.Discard, c) }, func(b *testing.B, dial func() net.Conn) {
		conn := dial()
		defer conn.Close()
		buffer := make([]byte, 64<<10)
		b.SetBytes(int64(len(buffer)))
		for b.Loop() {
			if _, err := conn.Write(buffer); err != nil {
				b.Fatal(err)
			}
		}
	})
}

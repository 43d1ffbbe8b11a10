// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
)

// acme is the name of the one tenant of most of these tests.
const acme = "acme.example.com"

// serveHTTP serves a listener as upstream's API server does: net/http with a
// ReadHeaderTimeout.
func serveHTTP(t testing.TB, l net.Listener) {
	t.Helper()
	cfg := serverConfig().Clone()
	cfg.NextProtos = []string{"h2", "http/1.1"}
	cfg.ClientAuth = tls.RequestClientCert
	server := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }),
		ReadHeaderTimeout: forever,
		ErrorLog:          log.New(io.Discard, "", 0), // what it says of handshakes is its business
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(tls.NewListener(l, cfg)); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		_ = server.Close()
		serving.Wait()
	})
}

// stall begins a handshake and stops after the server's first answer.
func (p *port) stall(from string, cfg *tls.Config) net.Conn {
	p.t.Helper()
	c := p.dialFrom(from)
	if _, err := c.Write(captured(p.t, cfg)); err != nil {
		p.t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err != nil {
		p.t.Fatalf("no answer to the hello: %v", err)
	}
	return c
}

// All owners of a connection say in their own way when its handshake is over.
func TestPendingUntilTheHandshakeIsOver(t *testing.T) {
	client := func(protocols ...string) func(*testing.T, net.Conn) {
		return func(t *testing.T, raw net.Conn) {
			cfg := clientConfig(acme)
			cfg.NextProtos = protocols
			if err := tls.Client(raw, cfg).HandshakeContext(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	for _, test := range []struct {
		name    string
		serve   func(*testing.T, *Listener)
		connect func(*testing.T, net.Conn)
	}{
		{"net/http", func(t *testing.T, l *Listener) { serveHTTP(t, l) }, client("http/1.1")},
		{"net/http, HTTP/2", func(t *testing.T, l *Listener) { serveHTTP(t, l) }, client("h2")},
		{"gRPC", func(t *testing.T, l *Listener) {
			server := grpc.NewServer(grpc.Creds(credentials.NewServerTLSFromCert(&serverConfig().Certificates[0])))
			var serving sync.WaitGroup
			serving.Go(func() { _ = server.Serve(l) })
			t.Cleanup(func() { server.Stop(); serving.Wait() })
		}, func(t *testing.T, raw net.Conn) {
			c, err := grpc.NewClient("passthrough:///"+acme, grpc.WithTransportCredentials(credentials.NewTLS(clientConfig(acme))),
				grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return raw, nil }))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			c.Connect()
			for s := c.GetState(); s != connectivity.Ready; s = c.GetState() {
				if !c.WaitForStateChange(t.Context(), s) {
					t.Fatalf("the client is %s", s)
				}
			}
		}},
		// As a carrier's: what counts is the handshake inside.
		{"TLS inside TLS", func(t *testing.T, l *Listener) {
			serveHTTP(t, tls.NewListener(l, serverConfig()))
		}, func(t *testing.T, raw net.Conn) {
			outer := tls.Client(raw, clientConfig(acme))
			if err := outer.HandshakeContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			client("h2")(t, outer)
		}},
		{"said so", func(t *testing.T, l *Listener) { serveTenant(t, l, "acme") }, client()},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := openPort(t, Config{HelloTimeout: forever, HandshakeTimeout: forever})
			l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
			test.serve(t, l)
			cfg := clientConfig(acme)
			cfg.NextProtos = []string{"h2"}
			stalled := p.stall("127.0.0.1", cfg)
			if pending, open := p.pending(), l.Open(); pending != 1 || open != 1 {
				t.Errorf("in its handshake: %d pending, %d open, want 1 and 1", pending, open)
			}
			test.connect(t, p.dial(nil))
			await(t, "only the stalled one pending", func() bool { return p.pending() == 1 && l.Open() == 2 })
			_ = stalled.Close()
			await(t, "nothing pending", func() bool { return p.pending() == 0 && l.Open() == 1 })
		})
	}
}

// A connection inside of a carrier stays pending behind the outer handshake, which
// anybody can finish.
func TestCarriedConnectionIsPendingUntilTheInnerHandshakeIsOver(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever, HandshakeTimeout: forever})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	serveHTTP(t, tls.NewListener(l, serverConfig()))
	outer := tls.Client(p.dial(nil), clientConfig(acme))
	if _, err := outer.Write(captured(t, clientConfig(acme))); err != nil {
		t.Fatal(err)
	}
	if _, err := outer.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if got := p.pending(); got != 1 {
		t.Errorf("%d pending, want 1", got)
	}
}

func TestHandshakesCountAsPending(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever, HandshakeTimeout: forever, MaxPendingPerSource: 2})
	serveHTTP(t, p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}}))
	first := p.stall("127.0.0.2", clientConfig(acme))
	p.stall("127.0.0.2", clientConfig(acme))
	c := p.dialFrom("127.0.0.2")
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("read %d bytes, %v, want it closed", n, err)
	}
	if got := p.refusals(tooManySource); got != 1 {
		t.Errorf("%d refused for their source, want 1", got)
	}
	if _, err := p.connect(acme); err != nil {
		t.Errorf("from elsewhere: %v", err)
	}
	_ = first.Close()
	await(t, "a place free", func() bool { return p.pending() == 1 })
	p.stall("127.0.0.2", clientConfig(acme))
}

func TestHandshakeTimeout(t *testing.T) {
	for name, serve := range map[string]func(*testing.T, *Listener){
		"the client stalls":                func(t *testing.T, l *Listener) { serveHTTP(t, l) },
		"the owner does nothing with it":   func(t *testing.T, l *Listener) { l.Accept() },
		"the owner forgot what to tell us": func(t *testing.T, l *Listener) { serveForgetful(t, l) },
	} {
		t.Run(name, func(t *testing.T) {
			p := openPort(t, Config{HelloTimeout: forever, HandshakeTimeout: 20 * time.Millisecond})
			l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
			c := p.dial(captured(t, clientConfig(acme)))
			serve(t, l)
			if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, net.ErrClosed) {
				t.Logf("the client saw %v", err) // a reset, when not all was read
			}
			await(t, "it is gone", func() bool { return p.pending() == 0 && l.Open() == 0 })
			if got := p.refusals(handshakeTimeout); got != 1 {
				t.Errorf("%d refused, want 1", got)
			}
		})
	}
}

// serveForgetful reads what one client sends, for ever.
func serveForgetful(t *testing.T, l *Listener) {
	c, err := l.Accept()
	if err != nil {
		return // it was too late
	}
	t.Cleanup(func() { _ = c.Close() })
	_, _ = io.Copy(io.Discard, c)
}

// Clients of a tenant that is starting wait for it without a place, and take one
// when it accepts them.
func TestWaitingTakesNoPlace(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever, HandshakeTimeout: forever, MaxPending: 1})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	for i := range 3 {
		p.dial(hello(named(acme)))
		await(t, "queued", func() bool { return len(l.queue) == i+1 && p.pending() == 0 })
	}
	first, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if got := p.pending(); got != 1 {
		t.Errorf("%d pending, want 1", got)
	}
	accepted := make(chan net.Conn)
	go func() {
		c, err := l.Accept() // the second finds no place, and nor does the third
		if err == nil {
			t.Error("accepted one more than MaxPending")
		}
		accepted <- c
	}()
	await(t, "both refused", func() bool { return p.refusals(tooManyPending) == 2 && l.Open() == 1 })
	_ = l.Close()
	<-accepted
	_ = first.Close()
}

// What ends a pending connection does nothing to one that is established.
func TestEstablished(t *testing.T) {
	for name, say := range map[string]func(*conn){
		"itself":               (*conn).Established,
		"all deadlines":        func(c *conn) { _ = c.SetDeadline(time.Time{}) },
		"a deadline for reads": func(c *conn) { _ = c.SetReadDeadline(time.Time{}) },
		"one for writes":       func(c *conn) { _ = c.SetWriteDeadline(time.Time{}) },
	} {
		t.Run(name, func(t *testing.T) {
			p := openPort(t, Config{HelloTimeout: forever, HandshakeTimeout: forever})
			l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
			client := p.dial(hello(named(acme)))
			accepted, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			c := accepted.(*conn)
			_ = c.SetDeadline(time.Now().Add(forever))
			if p.pending() != 1 {
				t.Fatal("a deadline that is none ends the pending phase")
			}
			say(c)
			say(c)
			if c.timer.Stop() {
				t.Error("the timer still runs")
			}
			c.refuse(handshakeTimeout)
			if pending, open := p.pending(), l.Open(); pending != 0 || open != 1 {
				t.Errorf("%d pending, %d open, want 0 and 1", pending, open)
			}
			_ = c.SetDeadline(time.Now().Add(forever))
			if _, err := client.Write(make([]byte, 2*maxHandshake)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.CopyN(io.Discard, c, 2*maxHandshake); err != nil {
				t.Errorf("after its handshake: %v", err)
			}
			_ = c.Close()
			_ = c.Close()
			if pending, open := p.pending(), l.Open(); pending != 0 || open != 0 {
				t.Errorf("closed: %d pending, %d open", pending, open)
			}
		})
	}
}

// certificates begins a TLS 1.2 handshake and sends a Certificate message of
// nearly 256 KiB, as much as crypto/tls takes, without its last byte.
func certificates(c net.Conn, size int) error {
	const certificate = 11
	message := make([]byte, handshakeHeader+size)
	copy(message, []byte{certificate, byte(size >> 16), byte(size >> 8), byte(size)})
	sent := records(maxFragment, message[:len(message)-1])
	for header := sent; len(header) > 0; header = header[recordHeader+min(maxFragment, len(header)-recordHeader):] {
		header[2] = 3 // TLS 1.2, where a hello says 1.0
	}
	_, err := c.Write(sent)
	return err
}

const largestCertificates = 256 << 10

func tls12(name string) *tls.Config {
	cfg := clientConfig(name)
	cfg.MaxVersion = tls.VersionTLS12
	return cfg
}

func TestHandshakeOfTooManyBytes(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever, HandshakeTimeout: forever})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	serveHTTP(t, l)
	c := p.stall("127.0.0.1", tls12(acme))
	_ = certificates(c, largestCertificates) // fails when it is closed before
	_, _ = io.Copy(io.Discard, c)
	await(t, "it is gone", func() bool { return p.pending() == 0 && l.Open() == 0 })
	if got := p.refusals(handshakeTooLarge); got != 1 {
		t.Errorf("%d refused, want 1", got)
	}
}

func TestSourceShare(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever, HandshakeTimeout: forever, TrustedProxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32")}})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}, MaxConns: 5})
	serveTenant(t, l, "acme")
	connect := func(from string, header []byte) (*tls.Conn, error) {
		raw := p.dialFrom(from)
		if _, err := raw.Write(header); err != nil {
			t.Fatal(err)
		}
		c := tls.Client(raw, clientConfig(acme))
		return c, c.HandshakeContext(t.Context())
	}
	var all []*tls.Conn
	mustConnect := func(from string, header []byte) *tls.Conn {
		t.Helper()
		c, err := connect(from, header)
		if err != nil {
			t.Fatalf("from %s: %v", from, err)
		}
		all = append(all, c)
		return c
	}
	refused := func(why reason, from string, header []byte) {
		t.Helper()
		before := p.refusals(why)
		if _, err := connect(from, header); err == nil {
			t.Errorf("from %s: it connects", from)
		}
		if got := p.refusals(why) - before; got != 1 {
			t.Errorf("from %s: %d counted as %s, want 1", from, got, why)
		}
	}
	// Of five, one source gets three.
	var first *tls.Conn
	for range 3 {
		first = mustConnect("127.0.0.2", nil)
	}
	refused(connectionsOfSource, "127.0.0.2", nil)
	await(t, "all established", func() bool { return p.pending() == 0 })
	refused(connectionsOfSource, "127.0.0.2", nil)
	mustConnect("127.0.0.3", nil)
	_ = first.Close()
	await(t, "a place free", func() bool { return l.Open() == 3 })
	mustConnect("127.0.0.2", nil)
	mustConnect("127.0.0.4", nil)
	refused(connections, "127.0.0.5", nil)

	// Behind a load balancer it is the client that counts.
	for _, c := range all {
		_ = c.Close()
	}
	await(t, "all gone", func() bool { return l.Open() == 0 })
	l.SetMaxConns(2)
	mustConnect("127.0.0.9", proxied(client4))
	refused(connectionsOfSource, "127.0.0.9", proxied(client4))
	mustConnect("127.0.0.9", proxied(client6))
	for _, c := range all {
		_ = c.Close()
	}
	await(t, "all gone", func() bool { return l.Open() == 0 })
	if len(l.sources) != 0 {
		t.Errorf("still counted: %v", l.sources)
	}
}

func TestSourceShareIsAtLeastOne(t *testing.T) {
	for _, test := range []struct{ max, percent, want int }{
		{1, 0, 1}, {2, 0, 1}, {3, 0, 2}, {DefaultMaxConns, 0, DefaultMaxConns / 2}, {1, 1, 1}, {7, 100, 7}, {7, 300, 7},
	} {
		r := New(Config{SourceShare: test.percent})
		l, err := r.Listen(ListenConfig{Tenant: "acme", MaxConns: test.max})
		if err != nil {
			t.Fatal(err)
		}
		if got := l.share(); got != test.want {
			t.Errorf("%d %% of %d: %d, want %d", test.percent, test.max, got, test.want)
		}
	}
}

// Whatever a stranger sends, the router holds no more of it than maxPeek.
func TestBufferIsBounded(t *testing.T) {
	for name, stream := range map[string][]byte{
		"one byte in each record":                      records(1, make([]byte, 64<<10)),
		"a hello that claims 16 KiB, in small records": records(9, append([]byte{1, 0, 0x40, 0}, make([]byte, 16<<10)...)),
		"headers without end":                          bytes.Repeat(proxied(client4), 2000),
		"a PROXY header and a large hello":             slices.Concat(proxied(client4), records(9, append([]byte{1, 0, 0x40, 0}, make([]byte, 16<<10)...))),
		"one large record":                             append([]byte{22, 3, 1, 0xff, 0xff}, make([]byte, 64<<10)...),
		"zeros":                                        make([]byte, 64<<10),
	} {
		var pool buffers
		a := arrival{buffer: pool.get(), trust: trust{proxy: true}}
		largest, verdict := 0, incomplete
		for rest := stream; verdict == incomplete; {
			if !a.buffer.grow(&pool) {
				break
			}
			have := len(a.buffer.bytes)
			n := copy(a.buffer.bytes[have:cap(a.buffer.bytes)], rest)
			if rest = rest[n:]; n == 0 {
				break
			}
			a.buffer.bytes = a.buffer.bytes[:have+n]
			largest = max(largest, cap(a.buffer.bytes))
			_, verdict = a.scan()
		}
		if largest > maxPeek {
			t.Errorf("%s: a buffer of %d bytes, more than %d", name, largest, maxPeek)
		}
	}
	if maxPeek != 26628 {
		t.Errorf("a stream may take %d bytes: doc.go says otherwise", maxPeek)
	}
}

// BenchmarkPending prints what this process holds for each pending connection,
// without the kernel's part: heap and stacks, once the collector has run.
func BenchmarkPending(b *testing.B) {
	const many = 250 // two descriptors each
	half := hello(named(acme))[:40]
	for _, state := range []struct {
		name  string
		begin func(b *testing.B, c net.Conn)
		goOn  func(b *testing.B, c net.Conn)
	}{
		{"nothing sent", func(*testing.B, net.Conn) {}, nil},
		{"half a hello", func(b *testing.B, c net.Conn) { c.Write(half) }, nil},
		{"all but the end of the largest hello", func(b *testing.B, c net.Conn) {
			c.Write(records(9, append([]byte{1, 0, 0x40, 0}, make([]byte, 16<<10-1)...)))
		}, nil},
		{"handshake begun", func(b *testing.B, c net.Conn) { c.Write(captured(b, clientConfig(acme))) }, answered},
		{"handshake begun, TLS 1.2", func(b *testing.B, c net.Conn) { c.Write(captured(b, tls12(acme))) }, answered},
		{"handshake with the most certificates", func(b *testing.B, c net.Conn) { c.Write(captured(b, tls12(acme))) }, func(b *testing.B, c net.Conn) {
			answered(b, c)
			if err := certificates(c, maxHandshake-100); err != nil {
				b.Fatal(err)
			}
		}},
	} {
		b.Run(state.name, func(b *testing.B) {
			for b.Loop() {
				ln, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					b.Fatal(err)
				}
				var clients []net.Conn
				for range many {
					c, err := net.Dial("tcp", ln.Addr().String())
					if err != nil {
						b.Fatal(err)
					}
					clients = append(clients, c)
					state.begin(b, c)
				}
				before := held()
				p := openPortOn(b, Config{HelloTimeout: forever, HandshakeTimeout: forever, MaxPendingPerSource: many}, ln)
				l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}, Backlog: many})
				serveHTTP(b, l)
				await(b, "all pending", func() bool { return p.pending() == many })
				for _, c := range clients {
					if state.goOn != nil {
						state.goOn(b, c)
					}
				}
				await(b, "all was read", func() bool { return unread(b, p.addr) == 0 })
				b.ReportMetric(float64(held()-before)/many, "B/conn")
				b.ReportMetric(0, "ns/op")
				for _, c := range clients {
					_ = c.Close()
				}
				await(b, "all gone", func() bool { return p.pending() == 0 && l.Open() == 0 })
			}
		})
	}
}

func answered(b *testing.B, c net.Conn) {
	if _, err := c.Read(make([]byte, 8<<10)); err != nil {
		b.Fatal(err)
	}
}

// held returns the bytes of this process's heap and stacks that are in use.
func held() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // pools are emptied by the second
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// unread returns how many bytes wait in the kernel for the server at addr.
func unread(b *testing.B, addr string) (sum int) {
	b.Helper()
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		b.Skip(err)
	}
	local := netip.MustParseAddrPort(addr)
	ip := local.Addr().As4()
	key := fmt.Appendf(nil, "%02X%02X%02X%02X:%04X", ip[3], ip[2], ip[1], ip[0], local.Port())
	for line := range bytes.Lines(table) {
		var slot, state, queues string
		var from, to string
		if _, err := fmt.Fscan(bytes.NewReader(line), &slot, &from, &to, &state, &queues); err != nil || from != string(key) || state != "01" {
			continue
		}
		var out, in int
		if _, err := fmt.Sscanf(queues, "%X:%X", &out, &in); err == nil {
			sum += in
		}
	}
	return sum
}

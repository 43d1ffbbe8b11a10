// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const forever = time.Hour // a timeout that no test waits for

// port is a Router that serves a loopback port until the test ends.
type port struct {
	*Router
	t        testing.TB
	addr     string
	registry *prometheus.Registry
}

func openPort(t testing.TB, cfg Config) *port {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return openPortOn(t, cfg, ln)
}

func openPortOn(t testing.TB, cfg Config, ln net.Listener) *port {
	t.Helper()
	p := &port{Router: New(cfg), t: t, addr: ln.Addr().String(), registry: prometheus.NewPedanticRegistry()}
	p.registry.MustRegister(p.Collector())
	served := make(chan error, 1)
	go func() { served <- p.Serve(context.Background(), ln) }()
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return p
}

// listen registers a listener that the test's end closes.
func (p *port) listen(cfg ListenConfig) *Listener {
	p.t.Helper()
	l, err := p.Listen(cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = l.Close() })
	return l
}

// tenant registers a listener and serves TLS on it: each line is answered with
// the tenant's name and the line.
func (p *port) tenant(cfg ListenConfig) *Listener {
	p.t.Helper()
	l := p.listen(cfg)
	serveTenant(p.t, l, cfg.Tenant)
	return l
}

func serveTenant(t testing.TB, l *Listener, tenant string) {
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer context.AfterFunc(ctx, func() { _ = raw.Close() })()
				defer raw.Close()
				c := tls.Server(raw, serverConfig())
				if c.HandshakeContext(ctx) != nil {
					return
				}
				raw.(interface{ Established() }).Established()
				lines := bufio.NewScanner(c)
				for lines.Scan() {
					fmt.Fprintf(c, "%s: %s\n", tenant, lines.Text())
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		cancel() // whether or not its clients have left
		serving.Wait()
	})
}

var serverConfig = sync.OnceValue(func() *tls.Config {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(forever)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		panic(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
})

func clientConfig(name string) *tls.Config {
	return &tls.Config{ServerName: name, InsecureSkipVerify: true} // which tenant answers is what is tested
}

// dial opens a connection and sends raw bytes.
func (p *port) dial(raw []byte) net.Conn {
	p.t.Helper()
	c, err := net.Dial("tcp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = c.Close() })
	if _, err := c.Write(raw); err != nil {
		p.t.Fatal(err)
	}
	return c
}

// dialFrom opens a connection from another loopback address.
func (p *port) dialFrom(ip string) net.Conn {
	p.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	c, err := d.DialContext(p.t.Context(), "tcp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = c.Close() })
	return c
}

// connect opens a TLS connection to the tenant that has name.
func (p *port) connect(name string) (*tls.Conn, error) {
	c := tls.Client(p.dial(nil), clientConfig(name))
	return c, c.HandshakeContext(p.t.Context())
}

// mustConnect is connect to a tenant that must answer.
func (p *port) mustConnect(name, tenant string) *tls.Conn {
	p.t.Helper()
	c, err := p.connect(name)
	if err != nil {
		p.t.Fatalf("connect to %s: %v", name, err)
	}
	if got := ask(p.t, c); got != tenant {
		p.t.Fatalf("%s led to %q, want %q", name, got, tenant)
	}
	return c
}

// ask returns which tenant is at the other end.
func ask(t testing.TB, c net.Conn) string {
	t.Helper()
	if _, err := io.WriteString(c, "hi\n"); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSuffix(line, ": hi\n")
}

// metric returns the sum of a metric's series that have all label values.
func (p *port) metric(name string, labels ...string) (sum int) {
	p.t.Helper()
	families, err := p.registry.Gather()
	if err != nil {
		p.t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if slices.Equal(values, labels) || labels == nil {
				sum += int(m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount()))
			}
		}
	}
	return sum
}

func (p *port) refusals(why reason) int {
	p.t.Helper()
	return p.metric("tenantd_router_connections_refused_total", string(why))
}

func (p *port) pending() int { return p.metric("tenantd_router_connections_pending") }

// await waits for a state that other goroutines bring about; the test binary's
// own timeout ends it.
func await(t testing.TB, what string, state func() bool) {
	t.Helper()
	for !state() {
		if t.Context().Err() != nil {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// rewriter sends its first write, the ClientHello's record, in another shape.
type rewriter struct {
	net.Conn
	shape func(record []byte) (segments [][]byte)
	done  bool
}

func (w *rewriter) Write(p []byte) (int, error) {
	if w.done {
		return w.Conn.Write(p)
	}
	w.done = true
	for _, segment := range w.shape(p) {
		if _, err := w.Conn.Write(segment); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

func whole(record []byte) [][]byte      { return [][]byte{record} }
func byteByByte(record []byte) [][]byte { return slices.Collect(slices.Chunk(record, 1)) }

func inRecordsOf(n int) func([]byte) [][]byte {
	return func(record []byte) [][]byte { return [][]byte{records(n, record[recordHeader:])} }
}

func TestRoutesRealClients(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com", "tunnel.acme.example.com"}})
	p.tenant(ListenConfig{Tenant: "umbrella", Names: []string{"Umbrella.Example.com."}})

	// Together they make a hello of nearly 16 KiB.
	var many []string
	for i := range 63 {
		many = append(many, fmt.Sprintf("%0250d", i))
	}
	clients := map[string]func(*tls.Config){
		"tls12":          func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 },
		"tls13":          func(c *tls.Config) { c.MinVersion = tls.VersionTLS13; c.CurvePreferences = []tls.CurveID{tls.X25519} },
		"X25519MLKEM768": func(c *tls.Config) { c.CurvePreferences = []tls.CurveID{tls.X25519MLKEM768} },
		"16KiB": func(c *tls.Config) {
			c.NextProtos = many
			c.CurvePreferences = []tls.CurveID{tls.X25519} // leaves the size to the list
		},
	}
	shapes := map[string]func([]byte) [][]byte{
		"whole": whole, "bytes": byteByByte, "records-of-16": inRecordsOf(16), "records-of-500": inRecordsOf(500),
	}
	for client, configure := range clients {
		for shape, cut := range shapes {
			for name, tenant := range map[string]string{
				"acme.example.com": "acme", "TUNNEL.acme.example.com": "acme", "umbrella.example.com": "umbrella",
			} {
				t.Run(client+"/"+shape+"/"+name, func(t *testing.T) {
					cfg := clientConfig(name)
					configure(cfg)
					c := tls.Client(&rewriter{Conn: p.dial(nil), shape: cut}, cfg)
					if got := ask(t, c); got != tenant {
						t.Errorf("reached %q, want %q", got, tenant)
					}
				})
			}
		}
	}
	n := len(clients) * len(shapes) * 3
	if got := p.metric("tenantd_router_hello_seconds"); got != n {
		t.Errorf("hellos timed: %d, want %d", got, n)
	}
	if got := p.metric("tenantd_router_connections_accepted_total"); got != n {
		t.Errorf("accepted: %d, want %d", got, n)
	}
	if got := p.metric("tenantd_router_connections_refused_total"); got != 0 {
		t.Errorf("refused: %d, want none", got)
	}
}

// What a TLS client is told, as its own library words it.
func TestTellsTLSClients(t *testing.T) {
	tests := []struct {
		name  string
		cfg   *tls.Config
		shape func([]byte) [][]byte
		want  string
		why   reason
	}{
		{"unknown name", clientConfig("nobody.example.com"), whole, "unrecognized name", unknownName},
		{"unknown name, byte by byte", clientConfig("nobody.example.com"), byteByByte, "unrecognized name", unknownName},
		{"no name", clientConfig(""), whole, "unrecognized name", noName},
		{"address for a name", clientConfig("127.0.0.1"), whole, "unrecognized name", noName},
		{"over 16 KiB", &tls.Config{ServerName: "acme.example.com", InsecureSkipVerify: true,
			NextProtos: slices.Repeat([]string{strings.Repeat("x", 255)}, 70)}, whole, "internal error", tooLarge},
		{"no host name", clientConfig("acme.example.com"), func(record []byte) [][]byte {
			return [][]byte{[]byte(strings.Replace(string(record), "acme.example", "acme\x00example", 1))}
		}, "error decoding message", malformed},
		// A hello that more follows: unread bytes must not reset the alert away.
		{"more behind the hello", clientConfig("nobody.example.com"), func(record []byte) [][]byte {
			return [][]byte{record, records(maxFragment, make([]byte, 32<<10))}
		}, "unrecognized name", unknownName},
	}
	p := openPort(t, Config{HelloTimeout: forever})
	p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			before := p.refusals(test.why)
			c := tls.Client(&rewriter{Conn: p.dial(nil), shape: test.shape}, test.cfg)
			err := c.HandshakeContext(t.Context())
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("client saw %v, want %q", err, test.want)
			}
			if got := p.refusals(test.why) - before; got != 1 {
				t.Errorf("counted %d as %s, want 1", got, test.why)
			}
		})
	}
}

func TestRefusesWhatIsNoHello(t *testing.T) {
	name := named("acme.example.com")
	tests := []struct {
		name   string
		send   []byte
		half   bool // then end the stream
		answer string
		why    reason
	}{
		{"plain HTTP", []byte("GET / HTTP/1.1\r\nHost: acme.example.com\r\n\r\n"), false, "HTTP/1.0 400 Bad Request\r\n", plainHTTP},
		{"SSH", []byte("SSH-2.0-x\r\n"), false, "", notTLS},
		{"SSLv2", []byte{0x80, 0x2e, 1, 0, 2, 0, 0x15, 0, 0, 0, 0x10}, false, "", notTLS},
		{"two names", hello(serverNames(entry{0, "a.example.com"}, entry{0, "b.example.com"})), false, string(alert(alertDecodeError)), malformed},
		{"silence", nil, false, "", timeout},
		{"half a hello, then silence", hello(name)[:40], false, "", timeout},
		{"half a hello, then the end", hello(name)[:40], true, "", eof},
		{"a health check of TCP alone", nil, true, "", eof},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			limit := forever
			if test.why == timeout {
				limit = 20 * time.Millisecond
			}
			p := openPort(t, Config{HelloTimeout: limit})
			p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
			c := p.dial(test.send)
			if test.half {
				if err := c.(*net.TCPConn).CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			answer, err := io.ReadAll(c)
			if err != nil && test.answer != "" {
				t.Errorf("read the answer: %v", err)
			}
			if !strings.HasPrefix(string(answer), test.answer) || test.answer == "" && len(answer) > 0 {
				t.Errorf("answer %q, want %q", answer, test.answer)
			}
			if got := p.refusals(test.why); got != 1 {
				t.Errorf("counted %d as %s, want 1", got, test.why)
			}
			_ = c.Close()
			await(t, "nothing pending", func() bool { return p.pending() == 0 })
		})
	}
}

func TestSlowClientsCostQuickOnesNothing(t *testing.T) {
	const slow = 50
	p := openPort(t, Config{HelloTimeout: forever, MaxPendingPerSource: slow + 1})
	l := p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	var stalled []net.Conn
	for range slow {
		stalled = append(stalled, p.dial(hello(named("acme.example.com"))[:40]))
	}
	await(t, "all slow ones pending", func() bool { return p.pending() == slow })
	for range 20 {
		p.mustConnect("acme.example.com", "acme")
	}
	if got := p.pending(); got != slow {
		t.Errorf("%d pending, want the %d slow ones", got, slow)
	}
	// The slow ones are as good as the others once they go on.
	for _, c := range stalled {
		if _, err := c.Write(hello(named("acme.example.com"))[40:]); err != nil {
			t.Fatal(err)
		}
	}
	await(t, "slow ones routed", func() bool { return p.pending() == 0 && l.Open() > 0 })
}

func TestLimitsPending(t *testing.T) {
	expectClosed := func(c net.Conn) {
		t.Helper()
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("read %d bytes, %v, want it closed", n, err)
		}
	}
	p := openPort(t, Config{HelloTimeout: forever, MaxPending: 5, MaxPendingPerSource: 3})
	p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})

	var first []net.Conn
	for range 3 {
		first = append(first, p.dialFrom("127.0.0.2"))
	}
	await(t, "source full", func() bool { return p.pending() == 3 })
	expectClosed(p.dialFrom("127.0.0.2"))
	if got := p.refusals(tooManySource); got != 1 {
		t.Errorf("%d refused for their source, want 1", got)
	}
	p.mustConnect("acme.example.com", "acme") // from 127.0.0.1

	for range 2 {
		p.dialFrom("127.0.0.3")
	}
	await(t, "all full", func() bool { return p.pending() == 5 })
	expectClosed(p.dialFrom("127.0.0.4"))
	if got := p.refusals(tooManyPending); got != 1 {
		t.Errorf("%d refused for the total, want 1", got)
	}

	_ = first[0].Close()
	await(t, "a place free", func() bool { return p.pending() == 4 })
	p.mustConnect("acme.example.com", "acme")
}

// recorder writes down what is done to it; its peer sends nothing and leaves.
type recorder struct {
	replay
	calls []string
}

func (r *recorder) Write(p []byte) (int, error) {
	r.calls = append(r.calls, "write")
	return len(p), nil
}

func (r *recorder) Read([]byte) (int, error) {
	r.calls = append(r.calls, "read")
	return 0, io.EOF
}

func (r *recorder) CloseWrite() error {
	r.calls = append(r.calls, "close write")
	return nil
}

func (r *recorder) Close() error {
	r.calls = append(r.calls, "close")
	return nil
}

// A socket closed with unread bytes takes the answer with it, but only on some
// networks and kernels; so the order is tested and not what the client saw.
func TestAnswersBeforeItCloses(t *testing.T) {
	for _, why := range reasons() {
		c := &recorder{}
		deadline := time.Now().Add(forever)
		part(c, why.answer(), deadline)
		want := []string{"write", "close write", "read", "close"}
		if why.answer() == nil {
			want = []string{"close"}
		}
		if !slices.Equal(c.calls, want) {
			t.Errorf("%s: %v, want %v", why, c.calls, want)
		}
		if !c.deadline.Before(deadline) {
			t.Errorf("%s: lingers as long as a hello may take", why)
		}
	}
}

// closable knows whether it was closed.
type closable struct {
	net.Conn
	closed bool
}

func (c *closable) Close() error {
	c.closed = true
	return nil
}

func TestGate(t *testing.T) {
	g := newGate(3, 3)
	source := loopback.AddrPort().Addr()
	left, claimed, pending := new(closable), new(closable), new(closable)
	for _, c := range []net.Conn{left, claimed, pending} {
		if why := g.enter(c, source); why != accepted {
			t.Fatal(why)
		}
	}
	g.claim(left)
	g.leave(source)
	g.running.Done()
	if !g.claim(claimed) {
		t.Error("claim of an open gate failed")
	}
	closing := make(chan struct{})
	go func() {
		defer close(closing)
		g.close()
	}()
	await(t, "closed", func() bool { return !g.claim(left) })
	if why := g.enter(left, source); why != shutdown {
		t.Errorf("a closed gate says %q", why)
	}
	if g.claim(pending) {
		t.Error("close and a listener both have the connection")
	}
	g.running.Done()
	g.running.Done()
	<-closing // it waited for both to be routed
	g.leave(source)
	g.leave(source) // as late as their handshakes end
	if left.closed || claimed.closed || !pending.closed {
		t.Errorf("closed: left %v, claimed %v, pending %v", left.closed, claimed.closed, pending.closed)
	}
	if g.begin() {
		t.Error("a closed gate lets a server begin")
	}
	if len(g.sources)+len(g.conns)+g.count() != 0 {
		t.Errorf("left behind: %v, %v, %d", g.sources, g.conns, g.count())
	}
}

func TestSource(t *testing.T) {
	source := func(ip string) string {
		return sourceOf(peerOf(&remote{addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1, Zone: "eth0"}})).String()
	}
	for in, want := range map[string]string{
		"192.0.2.1":             "192.0.2.1",
		"::ffff:192.0.2.1":      "192.0.2.1",
		"2001:db8:1:2:3:4:5:6":  "2001:db8:1:2::",
		"2001:db8:1:2:ffff::77": "2001:db8:1:2::",
	} {
		if got := source(in); got != want {
			t.Errorf("source of %s: %s, want %s", in, got, want)
		}
	}
	if s := sourceOf(peerOf(&remote{addr: &net.UnixAddr{Name: "@"}})); s.IsValid() {
		t.Errorf("unix socket has the source %s", s)
	}
}

type remote struct {
	net.Conn
	addr net.Addr
}

func (r *remote) RemoteAddr() net.Addr { return r.addr }

func TestLimitsConnections(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever, SourceShare: 100})
	l := p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}, MaxConns: 2})
	p.tenant(ListenConfig{Tenant: "other", Names: []string{"other.example.com"}})
	refuse := func() {
		t.Helper()
		if _, err := p.connect("acme.example.com"); err == nil || !strings.Contains(err.Error(), "internal error") {
			t.Errorf("client saw %v, want internal error", err)
		}
	}
	one := p.mustConnect("acme.example.com", "acme")
	p.mustConnect("acme.example.com", "acme")
	refuse()
	if got := p.refusals(connections); got != 1 {
		t.Errorf("%d refused, want 1", got)
	}
	p.mustConnect("other.example.com", "other") // has its own limit

	_ = one.Close()
	await(t, "a place free", func() bool { return l.Open() == 1 })
	p.mustConnect("acme.example.com", "acme")
	refuse()

	l.SetMaxConns(3)
	last := p.mustConnect("acme.example.com", "acme")
	l.SetMaxConns(1)
	refuse()
	if got := ask(t, last); got != "acme" {
		t.Errorf("a connection beyond the lowered limit reached %q", got)
	}
}

func TestQueuesUntilTheTenantAccepts(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}, Backlog: 2})
	answers := make(chan string, 2)
	for range 2 {
		c := tls.Client(p.dial(nil), clientConfig("acme.example.com"))
		go func() { answers <- ask(t, c) }()
	}
	await(t, "backlog full", func() bool { return p.metric("tenantd_router_backlog", "acme") == 2 })
	if _, err := p.connect("acme.example.com"); err == nil || !strings.Contains(err.Error(), "internal error") {
		t.Errorf("client saw %v, want internal error", err)
	}
	if got := p.refusals(backlog); got != 1 {
		t.Errorf("%d refused, want 1", got)
	}
	if got := l.Open(); got != 2 {
		t.Errorf("open: %d, want the two that wait", got)
	}
	serveTenant(t, l, "acme")
	for range 2 {
		if got := <-answers; got != "acme" {
			t.Errorf("reached %q", got)
		}
	}
}

func TestListenerCloseDropsOnlyTheQueue(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	raw := hello(named("acme.example.com"))
	accepted := p.dial(raw)
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	queued := p.dial(raw)
	await(t, "one queued", func() bool { return l.Open() == 2 })

	for range 2 {
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept after close: %v", err)
	}
	if _, err := queued.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("queued connection: %v, want EOF", err)
	}
	if _, err := p.connect("acme.example.com"); err == nil || !strings.Contains(err.Error(), "unrecognized name") {
		t.Errorf("client of the closed listener saw %v", err)
	}
	if err := l.SetNames([]string{"back.example.com"}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("set names after close: %v", err)
	}

	// The accepted one lives on, and is counted as long as it does.
	if _, err := io.ReadFull(server, make([]byte, len(raw))); err != nil {
		t.Error(err)
	}
	if _, err := server.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := accepted.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
	if got := p.metric("tenantd_router_connections_open", "acme"); got != 1 {
		t.Errorf("open: %d, want 1", got)
	}
	for range 2 {
		_ = server.Close()
	}
	if got := l.Open(); got != 0 {
		t.Errorf("open: %d after its close, want 0", got)
	}
	if open, _ := p.load(); len(open) != 0 {
		t.Errorf("tenants still measured: %v", open)
	}
}

func TestOpenIsCountedPerTenant(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	api := p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	p.tenant(ListenConfig{Tenant: "acme", Names: []string{"tunnel.acme.example.com"}})
	p.tenant(ListenConfig{Tenant: "other", Names: []string{"other.example.com"}})
	p.mustConnect("acme.example.com", "acme")
	p.mustConnect("tunnel.acme.example.com", "acme")
	p.mustConnect("other.example.com", "other")
	for tenant, want := range map[string]int{"acme": 2, "other": 1} {
		if got := p.metric("tenantd_router_connections_open", tenant); got != want {
			t.Errorf("open of %s: %d, want %d", tenant, got, want)
		}
	}
	if got := api.Open(); got != 1 {
		t.Errorf("open of one listener: %d, want 1", got)
	}
}

func TestNames(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	a := p.tenant(ListenConfig{Tenant: "a", Names: []string{"one.example.com", "two.example.com", "TWO.example.com."}})
	b := p.tenant(ListenConfig{Tenant: "b"})

	taken := func(err error, name string) {
		t.Helper()
		var e *NameTakenError
		if !errors.As(err, &e) || !errors.Is(err, ErrNameTaken) {
			t.Fatalf("got %v, want a NameTakenError", err)
		}
		if e.Name != name || e.Tenant != "a" {
			t.Errorf("taken: %q by %q, want %q by a", e.Name, e.Tenant, name)
		}
	}
	_, err := p.Listen(ListenConfig{Tenant: "c", Names: []string{"new.example.com", "Two.example.com"}})
	taken(err, "two.example.com")
	taken(b.SetNames([]string{"new.example.com", "two.example.com"}), "two.example.com")
	if _, err := p.connect("new.example.com"); err == nil {
		t.Error("half of a refused set of names was registered")
	}

	before := p.mustConnect("two.example.com", "a")
	if err := a.SetNames([]string{"one.example.com"}); err != nil {
		t.Fatal(err)
	}
	if err := b.SetNames([]string{"two.example.com"}); err != nil {
		t.Fatal(err)
	}
	p.mustConnect("two.example.com", "b")
	p.mustConnect("one.example.com", "a")
	if got := ask(t, before); got != "a" {
		t.Errorf("the connection from before the move reached %q", got)
	}

	for _, name := range []string{"", ".", "127.0.0.1", "::1", "*.example.com", "a b", "å.example.com", strings.Repeat("a", 254)} {
		if err := a.SetNames([]string{name}); err == nil {
			t.Errorf("name %q was registered", name)
		}
	}
	for _, tenant := range []string{"", "\xff"} {
		if _, err := p.Listen(ListenConfig{Tenant: tenant}); err == nil {
			t.Errorf("tenant %q was registered", tenant)
		}
	}
	p.mustConnect("one.example.com", "a")
}

func TestRoutesByProtocol(t *testing.T) {
	const name = "acme.example.com"
	names := []string{name}
	p := openPort(t, Config{HelloTimeout: forever})
	reach := func(protocols ...string) string {
		t.Helper()
		cfg := clientConfig(name)
		cfg.NextProtos = protocols
		c := tls.Client(p.dial(nil), cfg)
		if err := c.HandshakeContext(t.Context()); err != nil {
			return err.Error()
		}
		return ask(t, c)
	}
	// serve answers as who, so that a tenant's listeners can be told apart.
	serve := func(who string, protocols ...string) *Listener {
		t.Helper()
		l := p.listen(ListenConfig{Tenant: "acme", Names: names, Protocols: protocols})
		serveTenant(t, l, who)
		return l
	}
	expect := func(want string, protocols ...string) {
		t.Helper()
		if got := reach(protocols...); !strings.Contains(got, want) {
			t.Errorf("offering %q led to %q, want %q", protocols, got, want)
		}
	}

	tunnel := serve("tunnel", "konnectivity", "konnectivity")
	expect("tunnel", "konnectivity", "h2")
	expect("no application protocol", "h2")
	expect("no application protocol")
	if got := p.refusals(noProtocol); got != 2 {
		t.Errorf("%d refused for their protocol, want 2", got)
	}

	api := serve("api")
	carrier := serve("carrier", "tenantd-api", "tenantd-api/2")
	expect("api")
	expect("api", "h2", "http/1.1")
	expect("api", "Konnectivity")
	expect("tunnel", "h2", "konnectivity", "tenantd-api") // the first that is registered
	expect("carrier", "tenantd-api", "konnectivity")
	expect("carrier", "tenantd-api/2")

	// Each part of a name is held by itself, and the name by one tenant.
	for _, test := range []struct {
		tenant    string
		protocols []string
		want      NameTakenError
	}{
		{"acme", nil, NameTakenError{Name: name, Tenant: "acme"}},
		{"acme", []string{"new", "konnectivity"}, NameTakenError{Name: name, Tenant: "acme", Protocol: "konnectivity"}},
		{"other", nil, NameTakenError{Name: name, Tenant: "acme"}},
		{"other", []string{"new"}, NameTakenError{Name: name, Tenant: "acme"}},
	} {
		_, err := p.Listen(ListenConfig{Tenant: test.tenant, Names: names, Protocols: test.protocols})
		var taken *NameTakenError
		if !errors.As(err, &taken) || *taken != test.want {
			t.Errorf("listen of %s for %q: %v, want %v", test.tenant, test.protocols, err, &test.want)
		} else if !strings.Contains(err.Error(), test.want.Protocol) {
			t.Errorf("%q does not name the protocol", err)
		}
	}
	for _, protocol := range []string{"", strings.Repeat("x", 256)} {
		if _, err := p.Listen(ListenConfig{Tenant: "acme", Protocols: []string{"h2", protocol}}); err == nil {
			t.Errorf("protocol %q was registered", protocol)
		}
	}

	// A listener that leaves takes its own part only.
	if err := tunnel.SetNames([]string{"tunnel.example.com"}); err != nil {
		t.Fatal(err)
	}
	expect("api", "konnectivity")
	if err := tunnel.SetNames(names); err != nil {
		t.Fatal(err)
	}
	expect("tunnel", "konnectivity")
	_ = api.Close()
	expect("no application protocol", "h2")
	expect("carrier", "tenantd-api")
	_ = tunnel.Close()
	_ = carrier.Close()
	expect("unrecognized name", "tenantd-api")
	serveTenant(t, p.listen(ListenConfig{Tenant: "other", Names: names}), "other")
	expect("other", "konnectivity")
}

func TestLimitsEachProtocol(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	names := []string{"acme.example.com"}
	p.tenant(ListenConfig{Tenant: "acme", Names: names})
	p.tenant(ListenConfig{Tenant: "acme", Names: names, Protocols: []string{"konnectivity"}, MaxConns: 1})
	agent := clientConfig(names[0])
	agent.NextProtos = []string{"konnectivity"}
	if got := ask(t, tls.Client(p.dial(nil), agent)); got != "acme" {
		t.Errorf("reached %q", got)
	}
	if err := tls.Client(p.dial(nil), agent).HandshakeContext(t.Context()); err == nil || !strings.Contains(err.Error(), "internal error") {
		t.Errorf("client saw %v, want internal error", err)
	}
	p.mustConnect(names[0], "acme")
	if got := p.metric("tenantd_router_connections_open", "acme"); got != 2 {
		t.Errorf("open: %d, want 2 over both listeners", got)
	}
}

func TestRouterClose(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	l := p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	handedOver := p.mustConnect("acme.example.com", "acme")
	pending := p.dial(hello(named("acme.example.com"))[:40])
	await(t, "one pending", func() bool { return p.pending() == 1 })

	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := pending.Read(make([]byte, 1)); err == nil {
		t.Error("pending connection is still open")
	}
	if got := p.refusals(shutdown); got != 1 {
		t.Errorf("%d counted as shutdown, want 1", got)
	}
	if got := p.pending(); got != 0 {
		t.Errorf("%d pending after close", got)
	}
	if got := ask(t, handedOver); got != "acme" {
		t.Errorf("handed-over connection reached %q", got)
	}
	if c, err := net.Dial("tcp", p.addr); err == nil {
		_ = c.Close()
		t.Error("the port is still open")
	}
	if _, err := p.Listen(ListenConfig{Tenant: "late"}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("listen after close: %v", err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Serve(t.Context(), ln); err != nil {
		t.Errorf("serve after close: %v", err)
	}
	if _, err := ln.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("serve after close left its listener open: %v", err)
	}
	if got := l.Open(); got != 1 {
		t.Errorf("open: %d, want 1", got)
	}
}

func TestServeEndsWithItsContext(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	second := *p
	second.addr = ln.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	go func() { served <- p.Serve(ctx, ln) }()

	raw := second.dial(nil)
	await(t, "one pending", func() bool { return p.pending() == 1 })
	cancel()
	if err := <-served; err != nil {
		t.Errorf("serve: %v", err)
	}
	// What was accepted before is still routed, and the other port stays open.
	if got := ask(t, tls.Client(raw, clientConfig("acme.example.com"))); got != "acme" {
		t.Errorf("reached %q", got)
	}
	p.mustConnect("acme.example.com", "acme")
}

// faulty fails as a process out of descriptors does, before it works.
type faulty struct {
	net.Listener
	failures atomic.Int32
}

func (f *faulty) Accept() (net.Conn, error) {
	if f.failures.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return f.Listener.Accept()
}

func TestServeOutlastsLackOfDescriptors(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &faulty{Listener: ln}
	f.failures.Store(3)
	p := openPortOn(t, Config{HelloTimeout: forever}, f)
	p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	p.mustConnect("acme.example.com", "acme")
	if left := f.failures.Load(); left >= 0 {
		t.Errorf("%d failures left", left+1)
	}
}

func TestServeReportsAListenerClosedByOthers(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := New(Config{})
	defer r.Close()
	_ = ln.Close()
	if err := r.Serve(t.Context(), ln); !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v, want net.ErrClosed", err)
	}
}

func TestServesOtherListeners(t *testing.T) {
	tests := map[string]func(t *testing.T) net.Listener{
		"a file descriptor, as from systemd": func(t *testing.T) net.Listener {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			f, err := ln.(*net.TCPListener).File()
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			inherited, err := net.FileListener(f)
			if err != nil {
				t.Fatal(err)
			}
			return inherited
		},
		"a unix socket": func(t *testing.T) net.Listener {
			ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
			if err != nil {
				t.Fatal(err)
			}
			return ln
		},
	}
	for name, listen := range tests {
		t.Run(name, func(t *testing.T) {
			ln := listen(t)
			p := openPortOn(t, Config{HelloTimeout: forever}, ln)
			p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
			raw, err := net.Dial(ln.Addr().Network(), ln.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer raw.Close()
			if got := ask(t, tls.Client(raw, clientConfig("acme.example.com"))); got != "acme" {
				t.Errorf("reached %q", got)
			}
		})
	}
}

func TestConn(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	raw := append(hello(named("acme.example.com")), "and more"...)
	handOver := func() (client net.Conn, server net.Conn) {
		t.Helper()
		client = p.dial(raw)
		server, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = server.Close() })
		return client, server
	}

	t.Run("reads the peeked bytes, then the socket", func(t *testing.T) {
		client, server := handOver()
		if n, err := server.Read(nil); n != 0 || err != nil {
			t.Errorf("empty read: %d, %v", n, err)
		}
		got := make([]byte, len(raw))
		for i := range got {
			if n, err := server.Read(got[i : i+1]); n != 1 || err != nil {
				t.Fatalf("byte %d: %d, %v", i, n, err)
			}
		}
		if string(got) != string(raw) {
			t.Errorf("read %q, sent %q", got, raw)
		}
		if _, err := client.Write([]byte("later")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(server, got[:5]); err != nil || string(got[:5]) != "later" {
			t.Errorf("read %q, %v", got[:5], err)
		}
	})
	t.Run("half-closes", func(t *testing.T) {
		client, server := handOver()
		if err := server.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("client read: %v, want EOF", err)
		}
		if _, err := io.ReadFull(server, make([]byte, len(raw))); err != nil {
			t.Errorf("read after the half-close: %v", err)
		}
		if err := closeWrite(&remote{addr: &net.UnixAddr{}}); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("half-close of what cannot: %v", err)
		}
	})
	t.Run("closed, it gives no peeked bytes", func(t *testing.T) {
		_, server := handOver()
		if err := server.Close(); err != nil {
			t.Fatal(err)
		}
		if n, err := server.Read(make([]byte, 1)); n != 0 || !errors.Is(err, net.ErrClosed) {
			t.Errorf("read %d, %v, want net.ErrClosed", n, err)
		}
	})
	t.Run("shows what it is", func(t *testing.T) {
		_, server := handOver()
		if _, ok := server.(interface{ NetConn() net.Conn }).NetConn().(*net.TCPConn); !ok {
			t.Error("NetConn is not the TCP connection")
		}
		if _, ok := server.(syscall.Conn); ok {
			t.Error("it offers its descriptor, past the peeked bytes")
		}
		if addr, ok := l.Addr().(*net.TCPAddr); !ok || addr.Port != 443 {
			t.Errorf("the listener's address is %v", l.Addr())
		}
	})
	t.Run("concurrent readers share the peeked bytes", func(t *testing.T) {
		client, server := handOver()
		_ = client.(*net.TCPConn).CloseWrite()
		var total atomic.Int64
		var readers sync.WaitGroup
		for range 4 {
			readers.Go(func() {
				b := make([]byte, 3)
				for {
					n, err := server.Read(b)
					total.Add(int64(n))
					if err != nil {
						return
					}
				}
			})
		}
		readers.Wait()
		if got := total.Load(); got != int64(len(raw)) {
			t.Errorf("readers got %d bytes, want %d", got, len(raw))
		}
	})
}

// Names come, go and change hands while clients connect and the router closes.
func TestRaces(t *testing.T) {
	for range 5 {
		p := openPort(t, Config{HelloTimeout: forever})
		steady := p.tenant(ListenConfig{Tenant: "steady", Names: []string{"steady.example.com"}})
		var work sync.WaitGroup
		stop := make(chan struct{})
		repeat := func(f func()) {
			work.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						f()
					}
				}
			})
		}
		for _, tenant := range []string{"a", "b"} {
			repeat(func() {
				l, err := p.Listen(ListenConfig{Tenant: tenant, Names: []string{tenant + ".example.com"}, Backlog: 1})
				if err != nil {
					if !errors.Is(err, net.ErrClosed) {
						t.Error(err)
					}
					return
				}
				var accepting sync.WaitGroup
				accepting.Go(func() {
					for {
						c, err := l.Accept()
						if err != nil {
							return
						}
						_ = c.Close()
					}
				})
				if err := l.SetNames([]string{"shared.example.com"}); err != nil && !errors.Is(err, ErrNameTaken) && !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
				_ = l.Close()
				accepting.Wait()
				if got := l.Open(); got != 0 {
					t.Errorf("open of a closed listener: %d", got)
				}
			})
		}
		for _, name := range []string{"a", "b", "shared"} {
			raw := hello(named(name + ".example.com"))
			repeat(func() {
				c, err := net.Dial("tcp", p.addr)
				if err != nil {
					return // the router is closed
				}
				_, _ = c.Write(raw)
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			})
		}
		for range 20 {
			p.mustConnect("steady.example.com", "steady")
		}
		p.metric("tenantd_router_connections_open")
		_ = p.Close()
		close(stop)
		work.Wait()
		_ = steady.Close()
		if open, waiting := p.load(); open["a"]+open["b"]+waiting["a"]+waiting["b"] != 0 {
			t.Errorf("left behind: open %v, waiting %v", open, waiting)
		}
	}
}

// A refused connection and a routed one are each counted exactly once.
func TestEveryConnectionIsCountedOnce(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	const each = 30
	var clients sync.WaitGroup
	for range each {
		clients.Go(func() {
			c, err := p.connect("acme.example.com")
			if err != nil {
				t.Error(err)
			}
			_ = c.Close()
		})
		clients.Go(func() {
			if _, err := p.connect("nobody.example.com"); err == nil {
				t.Error("nobody answered")
			}
		})
	}
	clients.Wait()
	await(t, "all gone", func() bool {
		return p.pending() == 0 && p.metric("tenantd_router_connections_open", "acme") == 0
	})
	for metric, want := range map[string]int{
		"tenantd_router_connections_accepted_total": 2 * each,
		"tenantd_router_connections_refused_total":  each,
		"tenantd_router_hello_seconds":              2 * each,
	} {
		if got := p.metric(metric); got != want {
			t.Errorf("%s: %d, want %d", metric, got, want)
		}
	}
}

// The worker's small static binary will share this package's codec.
func TestImports(t *testing.T) {
	forbidden := map[string]string{
		"github.com/tenantd/tenantd/": "sni is at the bottom: who uses it depends on it, not the reverse",
		"k8s.io/":                     "the port must not depend on what runs behind it",
		"sigs.k8s.io/":                "the port must not depend on what runs behind it",
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range parsed.Imports {
			for prefix, because := range forbidden {
				if strings.HasPrefix(strings.Trim(spec.Path.Value, `"`), prefix) {
					t.Errorf("%s imports %s: %s", file, spec.Path.Value, because)
				}
			}
		}
	}
}

// The hello's deadline must not end a watch that the tenant serves for hours.
func TestHandsOverWithoutDeadline(t *testing.T) {
	r := New(Config{})
	defer r.Close()
	l, err := r.Listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := &replay{raw: hello(named("acme.example.com")), deadline: time.Now()}
	if why := r.gate.enter(c, netip.Addr{}); why != accepted {
		t.Fatal(why)
	}
	r.route(c, netip.Addr{}, trust{})
	if _, err := l.Accept(); err != nil {
		t.Fatal(err)
	}
	if !c.deadline.IsZero() {
		t.Errorf("handed over with the deadline %v", c.deadline)
	}
}

// BenchmarkRoute is accept, hello, hand-off and the tenant's first read; the
// client's dial and write are in it too.
func BenchmarkRoute(b *testing.B) {
	p := openPort(b, Config{HelloTimeout: forever})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.k8s.example.com"}})
	raw := captured(b, clientConfig("acme.k8s.example.com"))
	routes(b, p.addr, l, raw)
}

// routes has clients dial an address and write, and l accept and read what they wrote.
func routes(b *testing.B, addr string, l net.Listener, raw []byte) {
	got := make([]byte, len(raw))
	b.ReportAllocs()
	for b.Loop() {
		client, err := net.Dial("tcp", addr)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := client.Write(raw); err != nil {
			b.Fatal(err)
		}
		server, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(server, got); err != nil {
			b.Fatal(err)
		}
		_ = client.Close()
		_ = server.Close()
	}
}

// BenchmarkHandOff is the router's own part of BenchmarkRoute, without sockets.
func BenchmarkHandOff(b *testing.B) {
	tls := captured(b, clientConfig("acme.k8s.example.com"))
	for _, bench := range []struct {
		name   string
		header []byte
	}{
		{"hello", nil},
		{"proxy2", proxied(client4, authority("acme.k8s.example.com"))},
	} {
		b.Run(bench.name, func(b *testing.B) {
			r := New(Config{})
			l, err := r.Listen(ListenConfig{Tenant: "acme", Names: []string{"acme.k8s.example.com"}})
			if err != nil {
				b.Fatal(err)
			}
			c := &replay{raw: slices.Concat(bench.header, tls)}
			source, from := r.origin(c)
			got := make([]byte, len(tls))
			b.ReportAllocs()
			for b.Loop() {
				if why := r.gate.enter(c, source); why != accepted {
					b.Fatal(why)
				}
				r.route(c, source, from)
				server, _ := l.Accept()
				if _, err := io.ReadFull(server, got); err != nil {
					b.Fatal(err)
				}
				_ = server.Close()
			}
		})
	}
}

// replay is a connection whose every first read is a hello.
type replay struct {
	net.Conn
	raw      []byte
	deadline time.Time
}

func (r *replay) Read(p []byte) (int, error) { return copy(p, r.raw), nil }
func (r *replay) Close() error               { return nil }
func (r *replay) RemoteAddr() net.Addr       { return loopback }

func (r *replay) SetDeadline(t time.Time) error {
	r.deadline = t
	return nil
}

var loopback = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}

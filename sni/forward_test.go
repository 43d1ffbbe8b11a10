// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Addresses of the hosts of these tests. Clients are at others.
const (
	hostA = "127.0.0.11"
	hostB = "127.0.0.12"
	hostC = "127.0.0.13"
)

// openHost opens a port on an address that it also forwards from. All of these
// hosts are members for it.
func openHost(t testing.TB, ip string, cfg Config) *port {
	t.Helper()
	ln, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.ForwardFrom = netip.MustParseAddr(ip)
	if cfg.HelloTimeout == 0 {
		cfg.HelloTimeout = forever
	}
	p := openPortOn(t, cfg, ln)
	p.SetMembers(addrs(hostA, hostB, hostC))
	return p
}

func addrs(ips ...string) (list []netip.Addr) {
	for _, ip := range ips {
		list = append(list, netip.MustParseAddr(ip))
	}
	return list
}

// at returns a table that leads name to these hosts.
func at(name string, hosts ...*port) map[string]Remote {
	var addresses []string
	for _, h := range hosts {
		addresses = append(addresses, h.addr)
	}
	return map[string]Remote{name: {Addresses: addresses}}
}

// pair opens two hosts, of which a forwards acme's connections to b.
func pair(t testing.TB, cfg Config) (a, b *port) {
	t.Helper()
	cfg.ForwardGrace = time.Nanosecond
	a, b = openHost(t, hostA, cfg), openHost(t, hostB, cfg)
	a.SetRemotes(at(acme, b))
	return a, b
}

func (p *port) forwarded() int { return p.metric("tenantd_router_forwarded_open") }

// ended returns how many forwarded connections ended in this way.
func (p *port) ended(how outcome) int { return p.metric("tenantd_router_forwarded_total", string(how)) }

// idle waits until a host forwards nothing, and has given all places back.
func (p *port) idle() {
	p.t.Helper()
	await(p.t, "nothing forwarded nor pending", func() bool { return p.forwarded() == 0 && p.pending() == 0 })
	p.forwards.mu.Lock()
	defer p.forwards.mu.Unlock()
	if s := p.forwards; s.all.open+len(s.all.sources)+len(s.names)+len(s.open) != 0 {
		p.t.Errorf("left behind: %+v, %v", s.all, s.names)
	}
}

// forwardTo sends raw bytes to a and returns both ends of what b accepts.
func forwardTo(t testing.TB, a *port, l *Listener, raw []byte) (client *net.TCPConn, server net.Conn) {
	t.Helper()
	client = a.dial(raw).(*net.TCPConn)
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	// It has arrived a moment before it is counted.
	await(t, "forwarded", func() bool { return a.forwarded() > 0 })
	return client, server
}

func TestForwardsRealClients(t *testing.T) {
	a, b := pair(t, Config{})
	b.tenant(ListenConfig{Tenant: "acme", Names: []string{acme}})
	a.tenant(ListenConfig{Tenant: "here", Names: []string{"here.example.com"}})
	var many []string
	for i := range 63 {
		many = append(many, fmt.Sprintf("%0250d", i))
	}
	for client, configure := range map[string]func(*tls.Config){
		"tls12":          func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 },
		"X25519MLKEM768": func(c *tls.Config) { c.CurvePreferences = []tls.CurveID{tls.X25519MLKEM768} },
		"16KiB":          func(c *tls.Config) { c.NextProtos = many; c.CurvePreferences = []tls.CurveID{tls.X25519} },
	} {
		for shape, cut := range map[string]func([]byte) [][]byte{
			"whole": whole, "bytes": byteByByte, "records of 16": inRecordsOf(16),
		} {
			t.Run(client+"/"+shape, func(t *testing.T) {
				cfg := clientConfig("ACME.example.com")
				configure(cfg)
				c := tls.Client(&rewriter{Conn: a.dial(nil), shape: cut}, cfg)
				if got := ask(t, c); got != "acme" {
					t.Errorf("reached %q", got)
				}
				_ = c.Close()
			})
		}
	}
	a.mustConnect("here.example.com", "here")
	if _, err := a.connect("nobody.example.com"); err == nil || !strings.Contains(err.Error(), "unrecognized name") {
		t.Errorf("client of a name that nobody has saw %v", err)
	}
	a.idle()
	if got := a.metric("tenantd_router_forwarded_total"); got != 9 {
		t.Errorf("%d forwarded, want 9", got)
	}
	if got := a.metric("tenantd_router_connections_refused_total"); got != 1 {
		t.Errorf("%d refused, want the one of nobody", got)
	}
	if in, out := a.metric("tenantd_router_forwarded_bytes_total", "to_client"), a.metric("tenantd_router_forwarded_bytes_total", "to_host"); in == 0 || out == 0 {
		t.Errorf("%d bytes to clients, %d to hosts", in, out)
	}
}

// The other host sees the client that this one does, and what it sent.
func TestForwardsAddressAndTarget(t *testing.T) {
	proxies := []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32")}
	a, b := pair(t, Config{TrustedProxies: proxies})
	var six *port // nil without IPv6
	if v6, err := net.Listen("tcp", "[::1]:0"); err == nil {
		six = openPortOn(t, Config{HelloTimeout: forever, ForwardGrace: time.Nanosecond, ForwardFrom: netip.MustParseAddr(hostA), TrustedProxies: []netip.Prefix{netip.MustParsePrefix("::1/128")}}, v6)
		six.SetRemotes(at(acme, b))
		defer six.idle()
	}
	api := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	tunnel := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}, Protocols: []string{"konnectivity"}})
	hi, agent := hello(named(acme)), hello(named(acme), offering("konnectivity"))
	name := authority(acme)
	for _, test := range []struct {
		name    string
		entry   *port
		from    string
		headers []byte
		behind  []byte
		to      *Listener
		remote  string // empty for the client's own
	}{
		{"hello", a, "127.0.0.1", nil, hi, api, ""},
		{"protocol", a, "127.0.0.1", nil, agent, tunnel, ""},
		{"a load balancer's client", a, "127.0.0.9", proxied(client4), hi, api, client4},
		{"a load balancer's client, IPv6", a, "127.0.0.9", proxied(client6), hi, api, client6},
		{"a worker's header", a, "127.0.0.1", proxied(client4, name), agent, api, ""},
		{"a worker's header, no TLS", a, "127.0.0.1", proxied(client4, name), []byte("\r\n\r\n\x00 anything"), api, ""},
		{"a worker behind a load balancer", a, "127.0.0.9", slices.Concat(proxied(client6), proxied(client4, name)), agent, api, client6},
		{"an entry of IPv6", six, "::1", nil, hi, api, ""},
		{"an entry of IPv6, client of IPv4", six, "::1", proxied(client4), hi, api, client4},
		{"what a member says for itself", a, hostC, nil, hi, api, ""},
	} {
		for shape, cut := range map[string]func([]byte) [][]byte{"at once": whole, "byte by byte": byteByByte} {
			t.Run(test.name+"/"+shape, func(t *testing.T) {
				if test.entry == nil {
					t.Skip("this machine has no IPv6")
				}
				c := test.entry.dialFrom(test.from)
				for _, segment := range cut(slices.Concat(test.headers, test.behind)) {
					if _, err := c.Write(segment); err != nil {
						t.Fatal(err)
					}
				}
				server, err := test.to.Accept()
				if err != nil {
					t.Fatal(err)
				}
				defer server.Close()
				want := test.remote
				if want == "" {
					want = c.LocalAddr().String()
				}
				if got := server.RemoteAddr().String(); got != want {
					t.Errorf("remote address %s, want %s", got, want)
				}
				got := make([]byte, len(test.behind))
				if _, err := io.ReadFull(server, got); err != nil || !bytes.Equal(got, test.behind) {
					t.Errorf("read %q, %v, want %q", got, err, test.behind)
				}
				_ = c.Close()
			})
		}
	}
	a.idle()
}

func TestForwardsFromAUnixSocket(t *testing.T) {
	b := openHost(t, hostB, Config{})
	l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	ln, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	a := openPortOn(t, Config{HelloTimeout: forever, ForwardFrom: netip.MustParseAddr(hostA)}, ln)
	a.SetRemotes(at(acme, b))
	client, err := net.Dial("unix", a.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	hi := hello(named(acme))
	if _, err := client.Write(hi); err != nil {
		t.Fatal(err)
	}
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if _, err := io.ReadFull(server, make([]byte, len(hi))); err != nil {
		t.Error(err)
	}
	_ = server.(*conn).CloseWrite()
	if _, err := client.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the client read %v, want EOF", err)
	}
}

func TestForwardsBytesAndEnds(t *testing.T) {
	a, b := pair(t, Config{})
	l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	up, down := make([]byte, 3<<20), make([]byte, 2<<20)
	_, _ = rand.Read(up)
	_, _ = rand.Read(down)
	hi := hello(named(acme))
	for name, clientFirst := range map[string]bool{"the client ends first": true, "the server ends first": false} {
		t.Run(name, func(t *testing.T) {
			client, server := forwardTo(t, a, l, hi)
			server.(*conn).Established()
			if _, err := io.ReadFull(server, make([]byte, len(hi))); err != nil {
				t.Fatal(err)
			}
			type half interface {
				net.Conn
				CloseWrite() error
			}
			first, last, ask, answer := half(client), half(server.(*conn)), up, down
			if !clientFirst {
				first, last, ask, answer = last, first, down, up
			}
			var asking sync.WaitGroup
			asking.Go(func() {
				if _, err := first.Write(ask); err != nil {
					t.Error(err)
				}
				_ = first.CloseWrite()
			})
			// The answer is begun when all was said: half of the connection is closed.
			if got, err := io.ReadAll(last); err != nil || !bytes.Equal(got, ask) {
				t.Errorf("%d bytes arrived, %v, want the %d that were sent", len(got), err, len(ask))
			}
			asking.Wait()
			asking.Go(func() {
				if _, err := last.Write(answer); err != nil {
					t.Error(err)
				}
				_ = last.CloseWrite()
			})
			if got, err := io.ReadAll(first); err != nil || !bytes.Equal(got, answer) {
				t.Errorf("%d bytes came back, %v, want the %d that were sent", len(got), err, len(answer))
			}
			asking.Wait()
			a.idle()
		})
	}
	if got := a.ended(outcomeClosed); got != 2 {
		t.Errorf("%d ended in order, want 2", got)
	}
	if got, want := a.metric("tenantd_router_forwarded_bytes_total", "to_host"), 2*len(up); got != want {
		t.Errorf("%d bytes counted, want %d", got, want)
	}
	if got, want := a.metric("tenantd_router_forwarded_bytes_total", "to_client"), 2*len(down); got != want {
		t.Errorf("%d bytes counted back, want %d", got, want)
	}
}

// Either end may be torn away; the other learns of it.
func TestForwardsResets(t *testing.T) {
	for name, client := range map[string]bool{"the client's": true, "the server's": false} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t, Config{})
			l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
			near, server := forwardTo(t, a, l, hello(named(acme)))
			torn, left := near, server
			if !client {
				torn, left = server.(*conn).NetConn().(*net.TCPConn), net.Conn(near)
			}
			_ = torn.SetLinger(0)
			_ = torn.Close()
			_, _ = io.Copy(io.Discard, left) // ends
			_ = left.Close()
			a.idle()
			if got := a.ended(outcomeBroken); got != 1 {
				t.Errorf("%d counted as broken, want 1", got)
			}
		})
	}
}

// What the other host answers reaches the client, whatever it goes on to send.
func TestForwardsRefusals(t *testing.T) {
	a, b := pair(t, Config{})
	l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}, Protocols: []string{"konnectivity"}, MaxConns: 1})
	for _, test := range []struct {
		protocol string
		alert    byte
		why      reason
	}{
		{"h2", alertNoProtocol, noProtocol},
		{"konnectivity", alertInternalError, connections},
	} {
		if test.why == connections {
			a.dial(hello(named(acme), offering(test.protocol)))
			await(t, "full", func() bool { return l.Open() == 1 })
		}
		c := a.dial(append(hello(named(acme), offering(test.protocol)), make([]byte, 32<<10)...))
		if got, _ := io.ReadAll(c); !bytes.Equal(got, alert(test.alert)) {
			t.Errorf("%s: answer %q, want %q", test.why, got, alert(test.alert))
		}
		_ = c.Close()
		if got := b.refusals(test.why); got != 1 {
			t.Errorf("%d refused as %s, want 1", got, test.why)
		}
	}
}

func TestForwardsToTheNextHost(t *testing.T) {
	a, b := pair(t, Config{})
	b.tenant(ListenConfig{Tenant: "acme", Names: []string{acme}})
	gone, err := net.Listen("tcp", hostC+":0")
	if err != nil {
		t.Fatal(err)
	}
	_ = gone.Close()
	const silent = "192.0.2.1:443"
	dial := a.Router.dial
	var mu sync.Mutex
	var dialled []string
	a.Router.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		mu.Lock()
		defer mu.Unlock()
		dialled = append(dialled, address)
		if address == silent {
			return nil, &net.OpError{Op: "dial", Net: network, Err: context.DeadlineExceeded}
		}
		return dial(ctx, network, address)
	}
	a.SetRemotes(map[string]Remote{
		acme:               {Addresses: []string{silent, gone.Addr().String(), b.addr, hostC + ":1"}},
		"down.example.com": {Addresses: []string{silent, gone.Addr().String()}},
	})
	c := a.mustConnect(acme, "acme")
	_ = c.Close()
	if want := []string{silent, gone.Addr().String(), b.addr}; !slices.Equal(dialled, want) {
		t.Errorf("dialled %v, want %v", dialled, want)
	}
	if got, err := io.ReadAll(a.dial(hello(named("down.example.com")))); len(got) > 0 {
		t.Errorf("answer %q, %v, want none: the client is to try again", got, err)
	}
	if got := a.refusals(unreachable); got != 1 {
		t.Errorf("%d refused, want 1", got)
	}
	a.idle()
}

// Each of two hosts believes that the other has the tenant.
func TestForwardsOnlyOnce(t *testing.T) {
	a, b := pair(t, Config{})
	b.SetRemotes(at(acme, a))
	for name, raw := range map[string][]byte{
		"hello": hello(named(acme)), "a worker's header": append(proxied(client4, authority(acme)), hello(named(acme))...),
	} {
		before := b.refusals(misrouted)
		c := a.dial(raw)
		if got, _ := io.ReadAll(c); len(got) > 0 {
			t.Errorf("%s: answer %q, want none", name, got)
		}
		_ = c.Close()
		if got := b.refusals(misrouted) - before; got != 1 {
			t.Errorf("%s: %d refused as misrouted, want 1", name, got)
		}
	}
	a.SetRemotes(at(acme, a)) // to itself
	c := a.dial(hello(named(acme)))
	if got, _ := io.ReadAll(c); len(got) > 0 {
		t.Errorf("answer %q, want none", got)
	}
	_ = c.Close()
	if got := a.refusals(misrouted); got != 1 {
		t.Errorf("%d refused as misrouted, want 1", got)
	}
	a.idle()
	b.idle()
	if got := b.metric("tenantd_router_forwarded_total"); got != 0 {
		t.Errorf("%d were sent back", got)
	}
}

// A host that forwards has not heard yet that the tenant has gone on to a third one.
func TestForwardsToARetiredListener(t *testing.T) {
	a, b := pair(t, Config{})
	c := openHost(t, hostC, Config{})
	before := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	tunnel := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}, Protocols: []string{"konnectivity"}})
	c.tenant(ListenConfig{Tenant: "acme", Names: []string{acme}})
	c.SetMembers(addrs(hostB))
	tunnel.Retire()
	before.Retire()
	before.Retire()
	b.SetRemotes(at(acme, c))

	raw := hello(named(acme))
	client, server := forwardTo(t, a, before, raw)
	defer client.Close()
	defer server.Close()
	forwardTo(t, a, tunnel, hello(named(acme), offering("konnectivity")))
	if got := c.forwarded() + b.forwarded(); got != 0 {
		t.Errorf("%d are forwarded again", got)
	}
	own := b.mustConnect(acme, "acme") // a client of its own goes to where the tenant is
	if got := b.forwarded(); got != 1 {
		t.Errorf("%d are forwarded, want 1", got)
	}
	_ = own.Close()

	// The tenant comes back, and what is new has the name.
	after := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	forwardTo(t, a, after, raw)
	_ = after.Close()
	forwardTo(t, a, before, raw)
	_ = before.Close()
	_ = tunnel.Close()
	before.Retire() // for nothing: it is closed
	refused := a.dial(raw)
	if got, _ := io.ReadAll(refused); len(got) > 0 {
		t.Errorf("answer %q, want none", got)
	}
	_ = refused.Close()
	if got := b.refusals(misrouted); got != 1 {
		t.Errorf("%d refused as misrouted, want 1", got)
	}
	if got := len(b.Router.retired) + len(b.Router.names); got > 0 {
		t.Errorf("%d names are left", got)
	}
}

// A name's listener retires, and the name becomes another tenant's.
func TestRetiredNameOfAnotherTenant(t *testing.T) {
	a, b := pair(t, Config{})
	tunnel := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}, Protocols: []string{"konnectivity"}})
	tunnel.Retire()
	other := b.listen(ListenConfig{Tenant: "other", Names: []string{acme}})
	other.Retire()
	_, server := forwardTo(t, a, other, hello(named(acme), offering("konnectivity")))
	_ = server.Close()
}

func TestForwardedByStrangers(t *testing.T) {
	p := openHost(t, hostB, Config{TrustedProxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.9/32")}})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	hi := hello(named(acme))
	member := slices.Concat(proxied(client4, byMember), hi)
	for _, test := range []struct {
		name, from string
		send       []byte
	}{
		{"a stranger", "127.0.0.1", member},
		{"a stranger, checksum", "127.0.0.1", append(summed(proxied(client4, byMember)), hi...)},
		{"a stranger who names the tenant", "127.0.0.1", append(proxied(client4, byMember, authority(acme)), hi...)},
		{"a load balancer", "127.0.0.9", member},
		{"behind a load balancer", "127.0.0.9", slices.Concat(proxied(client4), member)},
		{"behind a member", hostA, slices.Concat(proxied(client4, byMember), member)},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := p.refusals(forwardedUntrusted)
			c := p.dialFrom(test.from)
			if _, err := c.Write(test.send); err != nil {
				t.Fatal(err)
			}
			if got, _ := io.ReadAll(c); len(got) > 0 {
				t.Errorf("answer %q, want none", got)
			}
			if got := p.refusals(forwardedUntrusted) - before; got != 1 {
				t.Errorf("%d refused, want 1", got)
			}
		})
	}
	// A member is no load balancer: it may not speak for others in another way.
	c := p.dialFrom(hostA)
	if _, err := c.Write(append(proxied(client4), hi...)); err != nil {
		t.Fatal(err)
	}
	if got, _ := io.ReadAll(c); len(got) > 0 || p.refusals(proxyUntrusted) != 1 {
		t.Errorf("answer %q, %d refused, want none and 1", got, p.refusals(proxyUntrusted))
	}
	if got := l.Open(); got != 0 {
		t.Errorf("%d reached the tenant", got)
	}
}

func TestSetMembers(t *testing.T) {
	a, b := pair(t, Config{})
	l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	hi := hello(named(acme))
	client, server := forwardTo(t, a, l, hi)
	b.SetMembers(addrs(hostC))
	if got, _ := io.ReadAll(a.dial(hi)); len(got) > 0 || b.refusals(forwardedUntrusted) != 1 {
		t.Errorf("answer %q, %d refused, want none and 1", got, b.refusals(forwardedUntrusted))
	}
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(server, make([]byte, len(hi)+1)); err != nil {
		t.Errorf("a connection from before: %v", err)
	}
	b.SetMembers(append(addrs(hostC), netip.MustParseAddr("::ffff:"+hostA)))
	forwardTo(t, a, l, hi)
}

// A client counts where its tenant is by its own address, and where it passes by
// too.
func TestLimitsForwarded(t *testing.T) {
	t.Run("at the other host", func(t *testing.T) {
		a, b := pair(t, Config{MaxPendingPerSource: 2, HandshakeTimeout: forever, MaxForwarded: 100})
		l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
		hi := captured(t, clientConfig(acme))
		serveHTTP(t, l)
		from := func(ip string) net.Conn {
			c := a.dialFrom(ip)
			if _, err := c.Write(hi); err != nil {
				t.Fatal(err)
			}
			return c
		}
		for range 2 {
			from("127.0.0.2")
			from("127.0.0.3")
		}
		await(t, "four shake hands", func() bool { return b.pending() == 4 && a.pending() == 0 && a.forwarded() == 4 })
		if got, _ := io.ReadAll(from("127.0.0.2")); len(got) > 0 || b.refusals(tooManySource) != 1 {
			t.Errorf("answer %q, %d refused for their source, want none and 1", got, b.refusals(tooManySource))
		}
		if _, err := a.connect(acme); err != nil {
			t.Errorf("from elsewhere: %v", err)
		}
	})
	t.Run("a member's own connections", func(t *testing.T) {
		_, b := pair(t, Config{MaxPendingPerSource: 1})
		half := hello(named(acme))[:40]
		first := b.dialFrom(hostA)
		if _, err := first.Write(half); err != nil {
			t.Fatal(err)
		}
		counted := func() bool {
			b.gate.mu.Lock()
			defer b.gate.mu.Unlock()
			return b.gate.sources[netip.MustParseAddr(hostA)] == 1
		}
		await(t, "counted", counted)
		second := b.dialFrom(hostA)
		if _, err := second.Write(half); err != nil {
			t.Fatal(err)
		}
		if n, err := second.Read(make([]byte, 1)); n != 0 || err == nil || b.refusals(tooManySource) != 1 {
			t.Errorf("read %d, %v, want it closed", n, err)
		}
	})
	for _, test := range []struct {
		name          string
		all, ofName   int
		share         int
		open          []string // source and name of each that is let through
		refused, free string
		why           reason
	}{
		{"in all", 3, 3, 100, []string{"127.0.0.2 acme", "127.0.0.3 acme", "127.0.0.2 other"}, "127.0.0.4 other", "", tooManyForwarded},
		{"per name", 5, 2, 100, []string{"127.0.0.2 acme", "127.0.0.3 acme"}, "127.0.0.4 acme", "127.0.0.4 other", forwardedOfName},
		{"share of a name", 100, 4, 50, []string{"127.0.0.2 acme", "127.0.0.2 acme"}, "127.0.0.2 acme", "127.0.0.3 acme", forwardedOfSource},
		{"share of all", 4, 4, 50, []string{"127.0.0.2 acme", "127.0.0.2 other"}, "127.0.0.2 other", "127.0.0.3 other", forwardedOfSource},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, b := pair(t, Config{MaxForwarded: test.all, MaxForwardedPerName: test.ofName, SourceShare: test.share})
			a.SetRemotes(map[string]Remote{"acme": {Addresses: []string{b.addr}}, "other": {Addresses: []string{b.addr}}})
			l := b.listen(ListenConfig{Tenant: "acme", Names: []string{"acme", "other"}})
			begin := func(what string) net.Conn {
				source, name, _ := strings.Cut(what, " ")
				c := a.dialFrom(source)
				if _, err := c.Write(hello(named(name))); err != nil {
					t.Fatal(err)
				}
				return c
			}
			var first net.Conn
			for i, what := range test.open {
				c := begin(what)
				await(t, "forwarded", func() bool { return a.forwarded() == i+1 && l.Open() == i+1 })
				if first == nil {
					first = c
				}
			}
			if got, _ := io.ReadAll(begin(test.refused)); !bytes.Equal(got, alert(alertInternalError)) || a.refusals(test.why) != 1 {
				t.Errorf("answer %q, %d refused as %s, want an alert and 1", got, a.refusals(test.why), test.why)
			}
			if test.free != "" {
				begin(test.free)
				await(t, "another forwarded", func() bool { return a.forwarded() == len(test.open)+1 })
			}
			open := a.forwarded()
			_ = first.Close()
			accepted, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			_ = accepted.Close()
			await(t, "a place free", func() bool { return a.forwarded() == open-1 })
			begin(test.refused)
			await(t, "it is taken", func() bool { return a.forwarded() == open })
			_ = a.Close()
			a.idle()
		})
	}
}

// The other host ends who does not finish a handshake, and then this one does so
// too, though the client stays.
func TestForwardedHandshakeTimeout(t *testing.T) {
	a, b := openHost(t, hostA, Config{}), openHost(t, hostB, Config{HandshakeTimeout: 20 * time.Millisecond})
	a.halfClosedTime = time.Millisecond
	a.SetRemotes(at(acme, b))
	serveHTTP(t, b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}}))
	a.dial(captured(t, clientConfig(acme))) // and stays
	await(t, "ended by its tenant's host", func() bool { return b.refusals(handshakeTimeout) == 1 })
	await(t, "ended here", func() bool { return a.ended(outcomeClosed)+a.ended(outcomeBroken) == 1 })
	a.idle()
}

// A tenant moves away and back; what is open stays as it is.
func TestForwardsWhileATenantMoves(t *testing.T) {
	a, b := pair(t, Config{})
	c := openHost(t, hostC, Config{})
	local := a.tenant(ListenConfig{Tenant: "on a", Names: []string{acme}})
	here := a.mustConnect(acme, "on a") // though the table says b
	b.tenant(ListenConfig{Tenant: "on b", Names: []string{acme}})
	if err := local.SetNames(nil); err != nil {
		t.Fatal(err)
	}
	onB := a.mustConnect(acme, "on b")
	c.tenant(ListenConfig{Tenant: "on c", Names: []string{acme}})
	a.SetRemotes(at("ACME.example.com.", c, b))
	onC := a.mustConnect(acme, "on c")
	if err := local.SetNames([]string{acme}); err != nil {
		t.Fatal(err)
	}
	a.mustConnect(acme, "on a")
	a.SetRemotes(nil)
	for want, conn := range map[string]net.Conn{"on a": here, "on b": onB, "on c": onC} {
		if got := ask(t, conn); got != want {
			t.Errorf("a connection from before the move reached %q, want %q", got, want)
		}
	}
	_ = local.Close()
	if _, err := a.connect(acme); err == nil || !strings.Contains(err.Error(), "unrecognized name") {
		t.Errorf("client of a name that nobody has any more saw %v", err)
	}
}

func TestEndForwards(t *testing.T) {
	a, b := pair(t, Config{})
	c := openHost(t, hostC, Config{})
	b.tenant(ListenConfig{Tenant: "on b", Names: []string{acme}})
	c.tenant(ListenConfig{Tenant: "on c", Names: []string{acme}})
	dead := []net.Conn{a.mustConnect(acme, "on b"), a.mustConnect(acme, "on b")}
	a.SetRemotes(at(acme, c))
	alive := a.mustConnect(acme, "on c")
	if got := a.EndForwards("") + a.EndForwards(hostC+":1"); got != 0 {
		t.Errorf("%d ended of no host", got)
	}
	if got := a.EndForwards(b.addr); got != 2 {
		t.Errorf("%d ended, want 2", got)
	}
	for _, conn := range dead {
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("it is still open")
		}
	}
	if got := ask(t, alive); got != "on c" {
		t.Errorf("the other host's reached %q", got)
	}
	await(t, "both counted", func() bool { return a.ended(outcomeEnded) == 2 && a.forwarded() == 1 })
}

func TestRecall(t *testing.T) {
	const globex = "globex.example.com"
	a, b := pair(t, Config{})
	serve := func(p *port, as, name string, protocols ...string) *Listener {
		l := p.listen(ListenConfig{Tenant: name, Names: []string{name}, Protocols: protocols})
		serveTenant(t, l, as)
		return l
	}
	serve(b, "api on b", acme)
	serve(b, "tunnel on b", acme, "konnectivity")
	serve(b, "globex on b", globex)
	a.SetRemotes(map[string]Remote{acme: {Addresses: []string{b.addr}}, globex: {Addresses: []string{b.addr}}})
	tunnel := func() (net.Conn, string) {
		cfg := clientConfig(acme)
		cfg.NextProtos = []string{"konnectivity", "h2"}
		conn := tls.Client(a.dial(nil), cfg)
		return conn, ask(t, conn)
	}
	api, other := a.mustConnect(acme, "api on b"), a.mustConnect(globex, "globex on b")
	agent, got := tunnel()
	if got != "tunnel on b" {
		t.Fatalf("the agent reached %q", got)
	}

	serve(a, "api on a", acme)
	here := serve(a, "tunnel on a", acme, "konnectivity")
	if n := a.Recall(here); n != 1 {
		t.Errorf("%d recalled, want the agent's", n)
	}
	if _, err := agent.Read(make([]byte, 1)); err == nil {
		t.Error("the agent's connection is still open")
	}
	if _, got := tunnel(); got != "tunnel on a" {
		t.Errorf("the agent then reached %q", got)
	}
	if n := a.Recall(here); n != 0 {
		t.Errorf("%d recalled, where none was forwarded", n)
	}
	if got := ask(t, api); got != "api on b" {
		t.Errorf("the API's connection leads to %q", got)
	}
	if got := ask(t, other); got != "globex on b" {
		t.Errorf("the other tenant's connection leads to %q", got)
	}
}

func TestRouterCloseEndsForwarded(t *testing.T) {
	hi := hello(named(acme))
	t.Run("in order, within the grace", func(t *testing.T) {
		a, b := openHost(t, hostA, Config{ForwardGrace: forever}), openHost(t, hostB, Config{})
		a.SetRemotes(at(acme, b))
		client, server := forwardTo(t, a, b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}}), hi)
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			_ = a.Close()
		}()
		await(t, "closing", func() bool { return a.done.Err() != nil })
		if _, err := server.Write([]byte("the rest")); err != nil {
			t.Fatal(err)
		}
		select {
		case <-closed:
			t.Error("closed while a connection was open")
		default:
		}
		_ = server.(*conn).CloseWrite()
		if got, err := io.ReadAll(client); err != nil || string(got) != "the rest" {
			t.Errorf("read %q, %v", got, err)
		}
		_ = client.Close()
		<-closed
		if got := a.ended(outcomeClosed); got != 1 {
			t.Errorf("%d ended in order, want 1", got)
		}
	})
	t.Run("at the end of the grace", func(t *testing.T) {
		a, b := pair(t, Config{})
		client, server := forwardTo(t, a, b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}}), hi)
		_ = a.Close()
		if got := a.ended(outcomeShutdown); got != 1 {
			t.Errorf("%d counted as shutdown, want 1", got)
		}
		for _, c := range []net.Conn{client, server} {
			if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, io.EOF) {
				t.Logf("it saw %v", err) // or a plain end
			}
		}
		a.idle()
	})
	t.Run("while it is being dialled", func(t *testing.T) {
		a, _ := pair(t, Config{})
		dialling := make(chan struct{})
		a.Router.dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
			close(dialling)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		a.dial(hi)
		<-dialling
		_ = a.Close()
		if got := a.refusals(shutdown); got != 1 {
			t.Errorf("%d counted as shutdown, want 1", got)
		}
		a.idle()
	})
}

func TestHoldsForAnExpectedName(t *testing.T) {
	hi := hello(named(acme))
	held := func(p *port) int {
		p.remotes.mu.Lock()
		defer p.remotes.mu.Unlock()
		return p.remotes.held[acme]
	}
	expected := map[string]Remote{acme: {Expected: true}}
	// wait opens a host whose clients wait for acme, and has n of them do so.
	wait := func(t *testing.T, n int) (*port, []net.Conn) {
		p := openHost(t, hostA, Config{MaxPendingPerSource: 2 * maxHeld})
		p.SetRemotes(expected)
		var clients []net.Conn
		for range n {
			clients = append(clients, p.dial(hi))
		}
		await(t, "they wait", func() bool { return held(p) == n && p.pending() == n })
		return p, clients
	}
	t.Run("a listener", func(t *testing.T) {
		p, _ := wait(t, 3)
		p.SetRemotes(expected)                                                        // no news to them
		p.listen(ListenConfig{Tenant: "other", Names: []string{"other.example.com"}}) // nor this
		l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
		for range 3 {
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c, make([]byte, len(hi))); err != nil {
				t.Error(err)
			}
			_ = c.Close()
		}
		if got := held(p); got != 0 {
			t.Errorf("%d still wait", got)
		}
	})
	t.Run("a name of a listener", func(t *testing.T) {
		p, _ := wait(t, 1)
		l := p.listen(ListenConfig{Tenant: "acme"})
		if err := l.SetNames([]string{acme}); err != nil {
			t.Fatal(err)
		}
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	})
	t.Run("a host", func(t *testing.T) {
		p, clients := wait(t, 1)
		b := openHost(t, hostB, Config{})
		l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
		p.SetRemotes(at(acme, b))
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		_ = clients[0].Close()
		p.idle()
	})
	t.Run("at the other host", func(t *testing.T) {
		a, b := pair(t, Config{})
		b.SetRemotes(map[string]Remote{acme: {Addresses: []string{a.addr}, Expected: true}})
		a.dial(hi)
		await(t, "it waits there", func() bool { return held(b) == 1 && a.forwarded() == 1 })
		c, err := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}}).Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	})
	t.Run("nobody any more", func(t *testing.T) {
		p, clients := wait(t, 1)
		p.SetRemotes(nil)
		if got, _ := io.ReadAll(clients[0]); !bytes.Equal(got, alert(alertUnrecognizedName)) {
			t.Errorf("answer %q", got)
		}
	})
	t.Run("too long", func(t *testing.T) {
		p := openHost(t, hostA, Config{HelloTimeout: 20 * time.Millisecond})
		p.SetRemotes(expected)
		if got, _ := io.ReadAll(p.dial(hi)); len(got) > 0 || p.refusals(holdTimeout) != 1 {
			t.Errorf("answer %q, %d refused, want none and 1", got, p.refusals(holdTimeout))
		}
		await(t, "nothing pending", func() bool { return p.pending() == 0 && held(p) == 0 })
	})
	t.Run("too many", func(t *testing.T) {
		p, _ := wait(t, maxHeld)
		if got, _ := io.ReadAll(p.dial(hi)); !bytes.Equal(got, alert(alertInternalError)) || p.refusals(backlog) != 1 {
			t.Errorf("answer %q, %d refused, want an alert and 1", got, p.refusals(backlog))
		}
	})
	t.Run("until the end", func(t *testing.T) {
		p, clients := wait(t, 1)
		_ = p.Close()
		if got, _ := io.ReadAll(clients[0]); len(got) > 0 || p.refusals(shutdown) != 1 {
			t.Errorf("answer %q, %d refused, want none and 1", got, p.refusals(shutdown))
		}
	})
}

// Whoever runs the tenants hears of names that connections wait for.
func TestAsksForWhatIsWaitedFor(t *testing.T) {
	type question struct {
		name   string
		source netip.Addr
	}
	asked := make(chan question, 100)
	p := openHost(t, hostA, Config{Asked: func(name string, source netip.Addr) {
		select {
		case asked <- question{name, source}:
		default:
		}
	}})
	want := question{acme, netip.MustParseAddr("127.0.0.1")}
	p.SetRemotes(map[string]Remote{acme: {Expected: true}})
	p.dial(hello(named("ACME.example.com")))
	for range 2 { // and again, as long as it waits
		if got := <-asked; got != want {
			t.Fatalf("asked for %v, want %v", got, want)
		}
	}

	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	await(t, "it is in the backlog", func() bool { return l.Open() == 1 })
	for len(asked) > 0 {
		<-asked
	}
	p.dial(hello(named(acme))) // nobody accepts yet
	if got := <-asked; got != want {
		t.Errorf("asked for %v, want %v", got, want)
	}
	var c net.Conn
	var err error
	for range 2 {
		if c, err = l.Accept(); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
	for len(asked) > 0 {
		<-asked
	}
	p.dial(hello(named(acme)))
	if c, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if len(asked) > 0 {
		t.Errorf("asked for %v, whose owner accepts", <-asked)
	}
}

func TestForwardsManyAtOnce(t *testing.T) {
	const many = 1000
	cfg := Config{MaxPending: 2 * many, MaxPendingPerSource: 2 * many, SourceShare: 100, HandshakeTimeout: forever}
	a, b := pair(t, cfg)
	l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}, Backlog: many})
	serveTenant(t, l, "acme")
	var clients sync.WaitGroup
	conns := make([]*tls.Conn, many)
	for i := range conns {
		clients.Go(func() {
			c, err := a.connect(acme)
			if err != nil {
				t.Error(err)
				return
			}
			conns[i] = c
		})
	}
	clients.Wait()
	if t.Failed() {
		for _, why := range reasons() {
			t.Logf("%s: %d and %d refused", why, a.refusals(why), b.refusals(why))
		}
		return
	}
	await(t, "all forwarded", func() bool { return a.forwarded() == many && l.Open() == many })
	for _, c := range conns {
		if got := ask(t, c); got != "acme" {
			t.Errorf("reached %q", got)
		}
		_ = c.Close()
	}
	a.idle()
	if got := a.ended(outcomeClosed) + a.ended(outcomeBroken); got != many {
		t.Errorf("%d ended, want %d", got, many)
	}
}

// Tables change while clients connect and the routers close.
func TestForwardRaces(t *testing.T) {
	for range 2 {
		a, b := pair(t, Config{})
		b.tenant(ListenConfig{Tenant: "steady", Names: []string{"steady.example.com"}})
		a.SetRemotes(map[string]Remote{"steady.example.com": {Addresses: []string{b.addr}}})
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
		tables := []map[string]Remote{
			nil, at(acme, b), at(acme, a), {acme: {Expected: true}}, {acme: {Addresses: []string{hostC + ":1"}, Expected: true}},
		}
		for _, p := range []*port{a, b} {
			repeat(func() {
				for _, table := range tables {
					table = map[string]Remote{acme: table[acme], "steady.example.com": {Addresses: []string{b.addr}}}
					p.SetRemotes(table)
					p.EndForwards(hostC + ":1")
				}
			})
			repeat(func() {
				l, err := p.Listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
				if err != nil {
					return // closed
				}
				_ = l.Close()
			})
			raw := hello(named(acme))
			repeat(func() {
				c, err := net.Dial("tcp", p.addr)
				if err != nil {
					return // closed
				}
				_, _ = c.Write(raw)
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			})
		}
		for range 10 {
			a.mustConnect("steady.example.com", "steady")
		}
		_ = a.Close()
		_ = b.Close()
		close(stop)
		work.Wait()
		a.idle()
		b.idle()
	}
}

// BenchmarkForward compares a host that forwards with one that has the tenant:
// connections with their TLS handshake, and bytes of one that is open.
func BenchmarkForward(b *testing.B) {
	for _, forwarded := range []bool{false, true} {
		name, open := "local", func(b *testing.B) (entry, owner *port) {
			p := openHost(b, hostB, Config{SourceShare: 100})
			return p, p
		}
		if forwarded {
			name, open = "forwarded", func(b *testing.B) (entry, owner *port) { return pair(b, Config{SourceShare: 100}) }
		}
		b.Run("connections/"+name, func(b *testing.B) {
			entry, owner := open(b)
			owner.tenant(ListenConfig{Tenant: "acme", Names: []string{acme}})
			b.ReportAllocs()
			for b.Loop() {
				raw, err := net.Dial("tcp", entry.addr)
				if err != nil {
					b.Fatal(err)
				}
				c := tls.Client(raw, clientConfig(acme))
				if err := c.HandshakeContext(b.Context()); err != nil {
					b.Fatal(err)
				}
				_ = c.Close()
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "conn/s")
		})
		b.Run("hand-off/"+name, func(b *testing.B) {
			entry, owner := open(b)
			l := owner.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
			raw := captured(b, clientConfig(acme))
			routes(b, entry.addr, l, raw)
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "conn/s")
		})
		b.Run("bytes/"+name, func(b *testing.B) {
			entry, owner := open(b)
			l := owner.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
			raw := hello(named(acme))
			client := entry.dial(raw).(*net.TCPConn)
			server, err := l.Accept()
			if err != nil {
				b.Fatal(err)
			}
			defer server.Close()
			server.(*conn).Established()
			if _, err := io.ReadFull(server, make([]byte, len(raw))); err != nil {
				b.Fatal(err)
			}
			block := make([]byte, 1<<20)
			go func() {
				defer client.CloseWrite()
				for range b.N {
					if _, err := client.Write(block); err != nil {
						return
					}
				}
			}()
			b.SetBytes(int64(len(block)))
			b.ResetTimer()
			if n, err := io.Copy(io.Discard, server); err != nil || n != int64(b.N)*int64(len(block)) {
				b.Fatal(n, err)
			}
		})
	}
}

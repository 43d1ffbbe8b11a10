// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/tls"
	"encoding/binary"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"
)

type tlv = proxyproto.TLV

// byMember is what a host says of what it forwards.
var byMember = tlv{Type: forwardedType, Value: []byte(forwardedValue)}

func authority(name string) tlv { return tlv{Type: proxyproto.PP2_TYPE_AUTHORITY, Value: []byte(name)} }

// proxied returns a header for a connection from source, as others write it.
func proxied(source string, tlvs ...tlv) []byte {
	from := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(source))
	h := proxyproto.HeaderProxyFromAddrs(2, from, from)
	if err := h.SetTLVs(tlvs); err != nil {
		panic(err)
	}
	raw, err := h.Format()
	if err != nil {
		panic(err)
	}
	return raw
}

// raw2 returns a header of any command, family and content.
func raw2(command, family byte, content ...[]byte) []byte {
	body := slices.Concat(content...)
	b := append([]byte(proxySignature), command, family, byte(len(body)>>8), byte(len(body)))
	return append(b, body...)
}

// summed adds a checksum to a header.
func summed(header []byte) []byte {
	const extension = 3 + crc32.Size
	b := append(bytes.Clone(header), 3, 0, crc32.Size, 0, 0, 0, 0)
	size := binary.BigEndian.Uint16(b[14:]) + extension
	binary.BigEndian.PutUint16(b[14:], size)
	sum := crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli))
	return binary.BigEndian.AppendUint32(b[:len(b)-crc32.Size], sum)
}

const (
	client4 = "192.0.2.7:1234"
	client6 = "[2001:db8::7]:1234"
)

func TestReadProxyHeader(t *testing.T) {
	acme := authority("acme.example.com")
	says := func(source, authority string) proxyHeader {
		return proxyHeader{source: netip.MustParseAddrPort(source), authority: authority}
	}
	noop := func(n int) tlv { return tlv{Type: proxyproto.PP2_TYPE_NOOP, Value: make([]byte, n)} }
	unix := raw2(0x21, 0x31, make([]byte, 216))
	long := 512 - len(proxied(client4, acme, noop(0)))
	tests := []struct {
		name    string
		header  []byte
		want    proxyHeader // its size is the header's
		verdict reason
	}{
		{"IPv4", proxied(client4, acme), says(client4, "acme.example.com"), accepted},
		{"IPv6", proxied(client6, acme), says(client6, "acme.example.com"), accepted},
		{"IPv4 in IPv6", raw2(0x21, 0x21, net.ParseIP("192.0.2.7").To16(), make([]byte, 16), []byte{4, 210, 0, 0}), says(client4, ""), accepted},
		{"no extensions", proxied(client4), says(client4, ""), accepted},
		{"name in another form", proxied(client4, authority("ACME.Example.com.")), says(client4, "acme.example.com"), accepted},
		{"longest name", proxied(client6, authority(strings.Repeat("a", 253))), says(client6, strings.Repeat("a", 253)), accepted},
		{"other extensions", proxied(client4, tlv{Type: proxyproto.PP2_TYPE_ALPN, Value: []byte("h2")}, acme, tlv{Type: 0xea}, noop(3)), says(client4, "acme.example.com"), accepted},
		{"by a member", proxied(client6, byMember, acme), proxyHeader{source: netip.MustParseAddrPort(client6), authority: "acme.example.com", forwarded: true}, accepted},
		{"by a member, checksum", summed(proxied(client4, byMember)), proxyHeader{source: netip.MustParseAddrPort(client4), forwarded: true}, accepted},
		{"our type, of others", proxied(client4, tlv{Type: forwardedType, Value: []byte(forwardedValue + "!")}, tlv{Type: forwardedType}), says(client4, ""), accepted},
		{"by a member, forged", edit(summed(proxied(client4, byMember)), 31, 'T'), proxyHeader{}, proxyMalformed},
		{"checksum", summed(proxied(client4, acme)), says(client4, "acme.example.com"), accepted},
		{"512 bytes", proxied(client4, acme, noop(long)), says(client4, "acme.example.com"), accepted},

		{"513 bytes", proxied(client4, acme, noop(long+1)), proxyHeader{}, proxyTooLarge},
		{"64 KiB", raw2(0x21, 0x11, make([]byte, 0xffff)), proxyHeader{}, proxyTooLarge},
		{"health check", raw2(0x20, 0), proxyHeader{}, proxyLocal},
		{"health check with extensions", raw2(0x20, 0x11, proxied(client4, acme)[16:]), proxyHeader{}, proxyLocal},

		{"nothing", nil, proxyHeader{}, incomplete},
		{"half the signature", []byte(proxySignature[:6]), proxyHeader{}, incomplete},
		{"a byte short", proxied(client4, acme)[:len(proxied(client4, acme))-1], proxyHeader{}, incomplete},
		{"another signature", edit(proxied(client4, acme), 11, '\r'), proxyHeader{}, notTLS},
		{"empty lines", []byte("\r\n\r\nGET /"), proxyHeader{}, notTLS},

		{"version 1 in binary", raw2(0x11, 0x11, make([]byte, 12)), proxyHeader{}, proxyMalformed},
		{"version 3", raw2(0x31, 0x11, make([]byte, 12)), proxyHeader{}, proxyMalformed},
		{"unknown command", raw2(0x22, 0x11, make([]byte, 12)), proxyHeader{}, proxyMalformed},
		{"unix sockets", unix, proxyHeader{}, proxyMalformed},
		{"UDP", raw2(0x21, 0x12, make([]byte, 12)), proxyHeader{}, proxyMalformed},
		{"no family", raw2(0x21, 0), proxyHeader{}, proxyMalformed},
		{"IPv4 cut short", raw2(0x21, 0x11, make([]byte, 11)), proxyHeader{}, proxyMalformed},
		{"IPv6 cut short", raw2(0x21, 0x21, make([]byte, 35)), proxyHeader{}, proxyMalformed},
		{"half an extension", raw2(0x21, 0x11, make([]byte, 12), []byte{4, 0}), proxyHeader{}, proxyMalformed},
		{"extension over the end", raw2(0x21, 0x11, make([]byte, 12), []byte{4, 0, 1}), proxyHeader{}, proxyMalformed},
		{"two names", proxied(client4, acme, acme), proxyHeader{}, proxyMalformed},
		{"empty name", proxied(client4, authority("")), proxyHeader{}, proxyMalformed},
		{"an address for a name", proxied(client4, authority("192.0.2.1")), proxyHeader{}, proxyMalformed},
		{"newline in the name", proxied(client4, authority("acme\n")), proxyHeader{}, proxyMalformed},
		{"name with a port", proxied(client4, authority("acme.example.com:443")), proxyHeader{}, proxyMalformed},
		{"name over 253", proxied(client4, authority(strings.Repeat("a", 254))), proxyHeader{}, proxyMalformed},
		{"forged name", edit(summed(proxied(client4, acme)), 31, 'b'), proxyHeader{}, proxyMalformed},
		{"forged address", edit(summed(proxied(client4, acme)), 16, 10), proxyHeader{}, proxyMalformed},
		{"wrong checksum", edit(summed(proxied(client4)), 31, 0), proxyHeader{}, proxyMalformed},
		{"two checksums", summed(summed(proxied(client4))), proxyHeader{}, proxyMalformed},
		{"short checksum", proxied(client4, tlv{Type: proxyproto.PP2_TYPE_CRC32C, Value: make([]byte, 3)}), proxyHeader{}, proxyMalformed},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if test.verdict == accepted {
				test.want.size = len(test.header)
			}
			for end := range len(test.header) {
				got, verdict := readProxyHeader(test.header[:end])
				if verdict == incomplete || verdict == test.verdict && verdict != accepted {
					continue
				}
				t.Fatalf("after %d bytes: %+v %q", end, got, verdict)
			}
			for _, behind := range []string{"", "\x16", proxySignature} {
				if test.verdict == incomplete && behind != "" {
					continue
				}
				got, verdict := readProxyHeader(append(bytes.Clone(test.header), behind...))
				if got != test.want || verdict != test.verdict {
					t.Errorf("with %q behind: got %+v %q, want %+v %q", behind, got, verdict, test.want, test.verdict)
				}
			}
		})
	}
}

// arrived is how far an arrival is after the stream came in pieces of n bytes,
// and what of the stream its owner would read.
func arrived(stream []byte, n int, from trust) (a arrival, to target, verdict reason, rest []byte) {
	a.trust, verdict = from, incomplete
	for verdict == incomplete && len(stream) > 0 {
		n = min(n, len(stream))
		a.buffer.bytes = append(a.buffer.bytes, stream[:n]...)
		stream = stream[n:]
		to, verdict = a.scan()
	}
	return a, to, verdict, slices.Concat(a.buffer.bytes, stream)
}

func FuzzProxyHeader(f *testing.F) {
	tls := hello(named("acme.example.com"), offering("h2"))
	for _, seed := range [][]byte{
		proxied(client4, authority("acme.example.com")),
		summed(proxied(client6, authority("acme.example.com"))),
		slices.Concat(proxied(client4), proxied(client6, authority("acme.example.com")), tls),
		slices.Concat(proxied(client4), tls),
		slices.Concat(proxied(client4, byMember), tls),
		proxied(client6, byMember, authority("acme.example.com")),
		slices.Concat(proxied(client4), proxied(client4, byMember), tls),
		proxied(client4, tlv{Type: forwardedType, Value: []byte("of others")}, authority("acme.example.com")),
		raw2(0x20, 0), raw2(0x21, 0x31, make([]byte, 216)), raw2(0x21, 0x11, make([]byte, 600)),
		[]byte("PROXY TCP4 192.0.2.7 192.0.2.1 1234 443\r\n"),
	} {
		f.Add(seed, true)
		f.Add(seed, false)
	}
	f.Fuzz(func(t *testing.T, stream []byte, trusted bool) {
		from := trust{proxy: trusted, member: trusted}
		once, to, verdict, rest := arrived(stream, max(1, len(stream)), from)
		for _, n := range []int{1, 3} {
			again, to2, v, r := arrived(stream, n, from)
			if to2.name != to.name || !bytes.Equal(to2.protocols, to.protocols) || v != verdict || !bytes.Equal(r, rest) ||
				again.claim != once.claim || again.byHeader != once.byHeader || again.forwarded != once.forwarded || (again.client == nil) != (once.client == nil) {
				t.Fatalf("at once: %+v %q %q, in pieces of %d: %+v %q %q", to, verdict, rest, n, to2, v, r)
			}
		}
		if !bytes.HasSuffix(stream, rest) {
			t.Fatalf("the owner would read %q of %q", rest, stream)
		}
		if once.client != nil && !trusted {
			t.Fatalf("believed %s from just anybody", once.client)
		}
		if once.forwarded && !trusted {
			t.Fatal("believed just anybody to be a member")
		}
		if verdict == accepted {
			if again, v := canonical(to.name); again != to.name || v != accepted {
				t.Fatalf("%q is not canonical: %q %q", to.name, again, v)
			}
		}

		ours, verdict := readProxyHeader(stream)
		if verdict == incomplete && len(stream) >= maxProxyHeader {
			t.Fatalf("no verdict after %d bytes", len(stream))
		}
		reader := bytes.NewReader(stream)
		buffered := bufio.NewReaderSize(reader, len(stream)) // it peeks at the whole header
		theirs, err := proxyproto.Read(buffered)
		if err != nil || theirs.Version != 2 {
			if verdict == accepted {
				t.Fatalf("took %+v, go-proxyproto: %v", ours, err)
			}
			return
		}
		size := len(stream) - reader.Len() - buffered.Buffered()
		tlvs, err := theirs.TLVs()
		var names, sums int
		var name string
		var forwarded bool
		for _, tlv := range tlvs {
			switch tlv.Type {
			case proxyproto.PP2_TYPE_AUTHORITY:
				names++
				name, _ = canonical(tlv.Value)
			case proxyproto.PP2_TYPE_CRC32C:
				sums++
			case forwardedType:
				forwarded = forwarded || string(tlv.Value) == forwardedValue
			}
		}
		switch verdict {
		case accepted:
			source, _ := theirs.SourceAddr.(*net.TCPAddr)
			if source == nil || !source.IP.Equal(ours.source.Addr().AsSlice()) || source.Port != int(ours.source.Port()) ||
				err != nil || names > 1 || sums > 1 || name != ours.authority || forwarded != ours.forwarded || size != ours.size {
				t.Fatalf("got %+v, go-proxyproto %+v of %d bytes with %v", ours, theirs, size, tlvs)
			}
		case proxyLocal:
			if !theirs.Command.IsLocal() {
				t.Fatalf("took %+v for a health check", theirs)
			}
		case proxyTooLarge:
			if size <= maxProxyHeader {
				t.Fatalf("too large with %d bytes", size)
			}
		case proxyMalformed: // it knows neither names nor checksums, and more families
			ip := theirs.TransportProtocol == proxyproto.TCPv4 || theirs.TransportProtocol == proxyproto.TCPv6
			if err == nil && ip && sums == 0 && (names == 0 || names == 1 && name != "") {
				t.Fatalf("refused %+v with %v", theirs, tlvs)
			}
		default:
			t.Fatalf("got %q, go-proxyproto %+v", verdict, theirs)
		}
	})
}

func TestRoutesByProxyHeader(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	p.tenant(ListenConfig{Tenant: "umbrella", Names: []string{"umbrella.example.com"}})
	tunnel := p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}, Protocols: []string{"konnectivity"}})

	acme := authority("acme.example.com")
	headers := map[string][]byte{
		"IPv4": proxied(client4, acme), "IPv6": proxied(client6, acme), "checksum": summed(proxied(client4, acme)),
		"512 bytes": proxied(client4, acme, tlv{Type: 0xea, Value: make([]byte, 512-len(proxied(client4, acme))-3)}),
	}
	inner := map[string]*tls.Config{ // only the header decides
		"same name": clientConfig("acme.example.com"), "another name": clientConfig("umbrella.example.com"), "no name": clientConfig(""),
		"protocol": {InsecureSkipVerify: true, NextProtos: []string{"konnectivity"}},
	}
	shapes := map[string]func([]byte) [][]byte{
		"at once": whole, "byte by byte": byteByByte,
		"apart": func(b []byte) [][]byte { return [][]byte{b[:100], b[100:]} },
	}
	for form, header := range headers {
		for client, cfg := range inner {
			for shape, cut := range shapes {
				t.Run(form+"/"+client+"/"+shape, func(t *testing.T) {
					shaped := func(hello []byte) [][]byte { return cut(slices.Concat(header, hello)) }
					c := tls.Client(&rewriter{Conn: p.dial(nil), shape: shaped}, cfg)
					if got := ask(t, c); got != "acme" {
						t.Errorf("reached %q", got)
					}
				})
			}
		}
	}
	if got := tunnel.Open(); got != 0 {
		t.Errorf("%d connections led to the listener of a protocol", got)
	}
}

func TestHandsOverWhatIsBehindTheHeader(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	header := proxied(client4, authority("acme.example.com"))
	for name, behind := range map[string]string{
		"nothing yet": "", "no TLS": "GET / HTTP/1.1\r\n", "a header for the tenant": proxySignature + "\x21\x11",
	} {
		t.Run(name, func(t *testing.T) {
			client := p.dial(append(bytes.Clone(header), behind...))
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			if got, want := server.RemoteAddr().String(), client.LocalAddr().String(); got != want {
				t.Errorf("remote address %s, want the peer's %s and no claim", got, want)
			}
			if _, err := io.WriteString(client, " later"); err != nil {
				t.Fatal(err)
			}
			_ = client.(*net.TCPConn).CloseWrite()
			got, err := io.ReadAll(server)
			if want := behind + " later"; err != nil || string(got) != want {
				t.Errorf("read %q, %v, want %q", got, err, want)
			}
		})
	}
}

func TestRefusesProxyHeaders(t *testing.T) {
	hi := hello(named("acme.example.com"))
	full := proxied(client4, authority("full.example.com"))
	tests := []struct {
		name string
		send []byte
		half bool // then end the stream
		why  reason
	}{
		{"unknown authority", append(proxied(client4, authority("nobody.example.com")), hi...), false, unknownName},
		{"only protocols have the name", append(proxied(client4, authority("tunnel.example.com")), hi...), false, noProtocol},
		{"tenant full", append(full, hi...), false, connections},
		{"no authority", append(proxied(client4), hi...), false, proxyUntrusted},
		{"forged", append(edit(summed(proxied(client4, authority("acme.example.com"))), 16, 1), hi...), false, proxyMalformed},
		{"unix sockets", raw2(0x21, 0x31, make([]byte, 216)), false, proxyMalformed},
		{"oversized", raw2(0x21, 0x11, make([]byte, 497)), false, proxyTooLarge},
		{"health check", raw2(0x20, 0), false, proxyLocal},
		{"version 1", []byte("PROXY TCP4 192.0.2.7 192.0.2.1 1234 443\r\n"), false, proxyV1},
		{"truncated, then silence", full[:20], false, timeout},
		{"truncated, then the end", full[:20], true, eof},
		{"signature, then the end", full[:12], true, eof},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			limit := forever
			if test.why == timeout {
				limit = 20 * time.Millisecond
			}
			p := openPort(t, Config{HelloTimeout: limit})
			p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
			p.listen(ListenConfig{Tenant: "acme", Names: []string{"tunnel.example.com"}, Protocols: []string{"konnectivity"}})
			l := p.listen(ListenConfig{Tenant: "full", Names: []string{"full.example.com"}, MaxConns: 1})
			if test.why == connections {
				p.dial(hello(named("full.example.com")))
				await(t, "full", func() bool { return l.Open() == 1 })
			}
			c := p.dial(test.send)
			if test.half {
				if err := c.(*net.TCPConn).CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			if answer, _ := io.ReadAll(c); len(answer) > 0 {
				t.Errorf("answer %q, want none: what it would reach is behind the proxy", answer)
			}
			if got := p.refusals(test.why); got != 1 {
				t.Errorf("counted %d as %s, want 1", got, test.why)
			}
		})
	}
}

func TestTrustedProxies(t *testing.T) {
	const balancer, stranger = "127.0.0.2", "127.0.0.3"
	p := openPort(t, Config{HelloTimeout: forever, TrustedProxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.2/32")}})
	acme := p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	tunnel := p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}, Protocols: []string{"konnectivity"}})
	hi := hello(named("acme.example.com"))
	agent := hello(named("acme.example.com"), offering("konnectivity"))
	name := authority("acme.example.com")
	worker := proxied("10.1.2.3:999", name)

	for _, test := range []struct {
		name, from string
		headers    []byte
		behind     []byte
		to         *Listener
		remote     string // empty for the peer's own
	}{
		{"header and hello", balancer, proxied(client4), hi, acme, client4},
		{"IPv6", balancer, proxied(client6), hi, acme, client6},
		{"protocol", balancer, proxied(client4), agent, tunnel, client4},
		{"the worker's header behind", balancer, slices.Concat(proxied(client4), worker), agent, acme, client4},
		{"authority of its own", balancer, proxied(client4, name), hi, acme, client4},
		{"no header", balancer, nil, hi, acme, ""},
		{"a stranger's claim", stranger, worker, hi, acme, ""},
	} {
		for shape, cut := range map[string]func([]byte) [][]byte{"at once": whole, "byte by byte": byteByByte} {
			t.Run(test.name+"/"+shape, func(t *testing.T) {
				c := p.dialFrom(test.from)
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
				want := cmp.Or(test.remote, c.LocalAddr().String())
				if got := server.RemoteAddr().String(); got != want {
					t.Errorf("remote address %s, want %s", got, want)
				}
				got := make([]byte, len(test.behind))
				if _, err := io.ReadFull(server, got); err != nil || !bytes.Equal(got, test.behind) {
					t.Errorf("read %q, %v, want %q", got, err, test.behind)
				}
			})
		}
	}
	for _, test := range []struct {
		name, from string
		send       []byte
		answer     []byte
		why        reason
	}{
		{"a stranger without authority", stranger, append(proxied(client4), hi...), nil, proxyUntrusted},
		{"a second header without authority", balancer, slices.Concat(proxied(client4), proxied(client4), hi), nil, proxyUntrusted},
		{"an unknown name in the hello", balancer, append(proxied(client4), hello(named("nobody.example.com"))...), alert(alertUnrecognizedName), unknownName},
		{"health check", balancer, raw2(0x20, 0), nil, proxyLocal},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := p.refusals(test.why)
			c := p.dialFrom(test.from)
			if _, err := c.Write(test.send); err != nil {
				t.Fatal(err)
			}
			if answer, _ := io.ReadAll(c); !bytes.Equal(answer, test.answer) {
				t.Errorf("answer %q, want %q", answer, test.answer)
			}
			if got := p.refusals(test.why) - before; got != 1 {
				t.Errorf("counted %d as %s, want 1", got, test.why)
			}
		})
	}
}

func TestOrigin(t *testing.T) {
	r := New(Config{TrustedProxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fe80::/10"), {}}})
	r.SetMembers([]netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("::ffff:11.0.0.1"), netip.MustParseAddr("fd00::1%eth1"), {}})
	for _, test := range []struct {
		peer   net.Addr
		source string
		from   trust
	}{
		{&net.TCPAddr{IP: net.ParseIP("10.1.2.3")}, "invalid IP", trust{proxy: true}},
		{&net.TCPAddr{IP: net.ParseIP("10.1.2.3").To4()}, "invalid IP", trust{proxy: true}},
		{&net.TCPAddr{IP: net.ParseIP("fe80::1"), Zone: "eth0"}, "invalid IP", trust{proxy: true}},
		{&net.TCPAddr{IP: net.ParseIP("10.0.0.1")}, "invalid IP", trust{proxy: true, member: true}},
		{&net.TCPAddr{IP: net.ParseIP("11.0.0.1").To4()}, "invalid IP", trust{member: true}},
		{&net.TCPAddr{IP: net.ParseIP("fd00::1"), Zone: "eth0"}, "invalid IP", trust{member: true}},
		{&net.TCPAddr{IP: net.ParseIP("11.1.2.3")}, "11.1.2.3", trust{}},
		{&net.UnixAddr{Name: "@"}, "invalid IP", trust{}},
	} {
		source, from := r.origin(&remote{addr: test.peer})
		if source.String() != test.source || from != test.from {
			t.Errorf("%s: %s, %+v, want %s, %+v", test.peer, source, from, test.source, test.from)
		}
	}
}

func TestLogsClaims(t *testing.T) {
	var log bytes.Buffer // guarded by its handler until the router is closed
	p := openPort(t, Config{HelloTimeout: forever, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	p.tenant(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	shaped := func(hello []byte) [][]byte {
		return [][]byte{slices.Concat(proxied(client4, authority("acme.example.com")), hello)}
	}
	ask(t, tls.Client(&rewriter{Conn: p.dial(nil), shape: shaped}, clientConfig("")))
	_, _ = io.ReadAll(p.dial(proxied(client6)))
	_, _ = io.ReadAll(p.dial([]byte("SSH-2.0-x\r\n")))
	_ = p.Close() // nothing is written afterwards
	for line, claim := range map[string]string{
		`msg="connection proxied"`: " name=acme.example.com claimed=" + client4,
		"reason=proxy_untrusted":   " claimed=" + client6,
		"reason=not_tls":           ` name=""`,
	} {
		_, rest, found := strings.Cut(log.String(), line)
		rest, _, _ = strings.Cut(rest, "\n")
		if !found || !strings.HasSuffix(rest, claim) {
			t.Errorf("after %s: %q, want it to end in %q", line, rest, claim)
		}
	}
}

// Behind a load balancer each client has the bound that it would have without.
func TestLimitsClientsOfTrustedProxies(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever, MaxPendingPerSource: 2, TrustedProxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.2/32")}})
	p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	var conns []net.Conn
	for range 4 {
		conns = append(conns, p.dialFrom("127.0.0.2"))
	}
	await(t, "all pending without a header", func() bool { return p.pending() == 4 })
	attributed := func(source string) func() bool {
		return func() bool {
			p.gate.mu.Lock()
			defer p.gate.mu.Unlock()
			return p.gate.sources[netip.MustParseAddr(source)] == 2
		}
	}
	for _, c := range conns[:2] {
		c.Write(proxied(client6))
	}
	await(t, "client full", attributed("2001:db8::"))
	conns[2].Write(proxied("[2001:db8::99]:1")) // of the same /64
	if n, err := conns[2].Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("read %d bytes, %v, want it closed", n, err)
	}
	if got := p.refusals(tooManySource); got != 1 {
		t.Errorf("%d refused for their source, want 1", got)
	}
	conns[3].Write(proxied(client4))
	conns = append(conns, p.dialFrom("127.0.0.2"))
	conns[4].Write(proxied(client4))
	await(t, "another client full", attributed("192.0.2.7"))
	for _, c := range conns {
		_ = c.Close()
	}
	await(t, "nothing pending", func() bool { return p.pending() == 0 })
	p.gate.mu.Lock()
	defer p.gate.mu.Unlock()
	if len(p.gate.sources) != 0 {
		t.Errorf("still counted: %v", p.gate.sources)
	}
}

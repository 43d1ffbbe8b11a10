// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"

	"golang.org/x/crypto/cryptobyte"
)

// captured returns the first flight of a real crypto/tls client.
func captured(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	cfg.InsecureSkipVerify = true // nothing answers
	wire := &wire{}
	_ = tls.Client(wire, cfg).HandshakeContext(t.Context())
	if wire.sent.Len() == 0 {
		t.Fatal("client sent no hello")
	}
	return wire.sent.Bytes()
}

// wire is a connection whose other side said all it will and hears all.
type wire struct {
	net.Conn
	incoming bytes.Reader
	sent     bytes.Buffer
}

func (w *wire) Read(p []byte) (int, error)  { return w.incoming.Read(p) }
func (w *wire) Write(p []byte) (int, error) { return w.sent.Write(p) }
func (w *wire) Close() error                { return nil }

func extension(id uint16, data []byte) []byte {
	var b cryptobyte.Builder
	b.AddUint16(id)
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(data) })
	return b.BytesOrPanic()
}

type entry struct {
	kind uint8
	name string
}

func serverNames(entries ...entry) []byte {
	var b cryptobyte.Builder
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
		for _, e := range entries {
			b.AddUint8(e.kind)
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes([]byte(e.name)) })
		}
	})
	return extension(0, b.BytesOrPanic())
}

func named(name string) []byte { return serverNames(entry{0, name}) }

func offering(protocols ...string) []byte {
	var b cryptobyte.Builder
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
		for _, p := range protocols {
			b.AddUint8LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes([]byte(p)) })
		}
	})
	return extension(16, b.BytesOrPanic())
}

// split returns the protocols of a target.
func split(list cryptobyte.String) (protocols []string) {
	var p cryptobyte.String
	for list.ReadUint8LengthPrefixed(&p) {
		protocols = append(protocols, string(p))
	}
	return protocols
}

// message returns a ClientHello handshake message.
func message(extensions ...[]byte) []byte {
	var b cryptobyte.Builder
	b.AddUint8(1)
	b.AddUint24LengthPrefixed(func(b *cryptobyte.Builder) {
		b.AddUint16(0x0303)
		b.AddBytes(bytes.Repeat([]byte{7}, 32))
		b.AddUint8LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(bytes.Repeat([]byte{9}, 32)) })
		b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
			b.AddUint16(0x0a0a) // GREASE
			b.AddUint16(tls.TLS_AES_128_GCM_SHA256)
		})
		b.AddUint8LengthPrefixed(func(b *cryptobyte.Builder) { b.AddUint8(0) })
		if extensions != nil {
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(slices.Concat(extensions...)) })
		}
	})
	return b.BytesOrPanic()
}

// records puts data into handshake records of at most size bytes each.
func records(size int, data []byte) []byte {
	var out []byte
	for fragment := range slices.Chunk(data, size) {
		out = append(out, 22, 3, 1, byte(len(fragment)>>8), byte(len(fragment)))
		out = append(out, fragment...)
	}
	return out
}

func hello(extensions ...[]byte) []byte { return records(maxFragment, message(extensions...)) }

// sized returns a hello message whose body is exactly n bytes long.
func sized(n int, name string) []byte {
	rest := n - len(message(named(name), extension(21, nil))) + handshakeHeader
	return message(named(name), extension(21, make([]byte, rest)))
}

func edit(b []byte, at int, value byte) []byte {
	b = bytes.Clone(b)
	b[at] = value
	return b
}

// scanned gives the stream to a scanner in pieces of n bytes.
func scanned(stream []byte, n int) (to target, verdict reason) {
	var s scanner
	for end := min(n, len(stream)); ; end = min(end+n, len(stream)) {
		to, verdict = s.scan(stream[:end])
		if verdict != incomplete || end == len(stream) {
			return to, verdict
		}
	}
}

func TestScan(t *testing.T) {
	const name = "acme.k8s.example.com"
	acme := named(name)
	greaseList := extension(0x1a1a, []byte{0})
	ech := extension(0xfe0d, slices.Concat([]byte{0, 0, 1, 0, 1, 42, 0, 32}, make([]byte, 32), []byte{0, 144}, make([]byte, 144)))
	tests := []struct {
		name    string
		stream  []byte
		want    string
		verdict reason
	}{
		{"go tls 1.3, X25519MLKEM768", captured(t, &tls.Config{ServerName: name, CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519}}), name, accepted},
		{"go tls 1.3, X25519", captured(t, &tls.Config{ServerName: name, CurvePreferences: []tls.CurveID{tls.X25519}}), name, accepted},
		{"go tls 1.2", captured(t, &tls.Config{ServerName: name, MaxVersion: tls.VersionTLS12}), name, accepted},
		{"go, no name", captured(t, &tls.Config{}), "", noName},
		{"smallest", hello(acme), name, accepted},
		{"GREASE around it", hello(greaseList, acme, extension(0xfafa, nil)), name, accepted},
		{"ECH: the outer name", hello(ech, acme), name, accepted},
		{"upper case", hello(named("ACME.k8s.Example.COM")), name, accepted},
		{"trailing dot", hello(named(name + ".")), name, accepted},
		{"underscore", hello(named("_a.example.com")), "_a.example.com", accepted},
		{"digit last", hello(named("host1")), "host1", accepted},
		{"longest name", hello(named(strings.Repeat("a", 253))), strings.Repeat("a", 253), accepted},
		{"another name type beside it", hello(serverNames(entry{1, "x"}, entry{0, name})), name, accepted},
		{"early data behind it", append(hello(acme), 23, 3, 3, 0, 1, 0), name, accepted},
		{"more in the same record", records(maxFragment, append(message(acme), 1, 2, 3)), name, accepted},
		{"one byte per record", records(1, message(acme)), name, accepted},
		{"header over two records", slices.Concat(records(3, message(acme)[:3]), records(maxFragment, message(acme)[3:])), name, accepted},
		{"records of 2 to the longest", records(64, sized(maxHello, name)), name, accepted},
		{"16 KiB in two records", records(maxFragment, sized(maxHello, name)), name, accepted},
		{"as many records as may be", records(1, sized(maxRecords-handshakeHeader, name)), name, accepted},
		{"a record more", records(1, sized(maxRecords+1-handshakeHeader, name)), "", tooLarge},
		{"16 KiB and a byte", records(maxFragment, sized(maxHello+1, name)), "", tooLarge},
		{"claims 16 MiB", []byte{22, 3, 1, 0, 4, 1, 0xff, 0xff, 0xff}, "", tooLarge},

		{"nothing", nil, "", incomplete},
		{"a byte short", hello(acme)[:len(hello(acme))-1], "", incomplete},
		{"empty record", slices.Concat([]byte{22, 3, 1, 0, 0}, hello(acme)), "", malformed},
		{"empty record within", slices.Concat(records(3, message(acme)[:3]), []byte{22, 3, 1, 0, 0}, hello(acme)), "", malformed},
		{"record over 16 KiB", []byte{22, 3, 1, 0x40, 1}, "", malformed},
		{"alert within", slices.Concat(records(9, message(acme)[:9]), alert(0), records(maxFragment, message(acme)[9:])), "", malformed},
		{"ServerHello", edit(hello(acme), 5, 2), "", malformed},

		{"no extensions at all", hello(), "", noName},
		{"no names in the list of extensions", hello(greaseList), "", noName},
		{"empty name", hello(named("")), "", noName},
		{"only a dot", hello(named(".")), "", noName},
		{"IPv4", hello(named("192.0.2.1")), "", noName},
		{"IPv4, trailing dot", hello(named("192.0.2.1.")), "", noName},
		{"IPv6", hello(named("2001:db8::1")), "", noName},
		{"IPv6, all letters", hello(named("fe80::abcd")), "", noName},
		{"only another name type", hello(serverNames(entry{7, name})), "", noName},

		{"two host names", hello(serverNames(entry{0, name}, entry{0, "b.example.com"})), "", malformed},
		{"two server_name extensions", hello(acme, greaseList, acme), "", malformed},
		{"the second without a host name", hello(acme, serverNames(entry{1, "x"})), "", malformed},
		{"empty server_name extension", hello(extension(0, nil)), "", malformed},
		{"empty name list", hello(serverNames()), "", malformed},
		{"bytes behind the name list", hello(extension(0, append(acme[4:], 0))), "", malformed},
		{"name longer than its list", hello(edit(acme, 8, 0xff)), "", malformed},
		{"list shorter than the name", hello(edit(acme, 5, 4)), "", malformed},
		{"extension longer than the hello", hello(edit(acme, 3, 0xff)), "", malformed},
		{"bytes behind the extensions", func() []byte {
			m := append(message(acme), 0)
			m[3]++
			return records(maxFragment, m)
		}(), "", malformed},
		{"half an extension", hello(acme, []byte{0}), "", malformed},
		{"session id over the end", edit(hello(acme), 5+4+34, 0xff), "", malformed},
		{"protocols before a bad name", hello(offering("h2"), named("a b")), "", malformed},
		{"two ALPN extensions", hello(acme, offering("h2"), offering("h2")), "", malformed},
		{"empty ALPN extension", hello(acme, extension(16, nil)), "", malformed},
		{"empty list of protocols", hello(acme, offering()), "", malformed},
		{"empty protocol", hello(acme, offering("h2", "")), "", malformed},
		{"bytes behind the protocols", hello(acme, extension(16, append(offering("h2")[4:], 0))), "", malformed},
		{"protocol longer than its list", hello(acme, edit(offering("h2"), 6, 3)), "", malformed},
		{"list shorter than its protocol", hello(acme, edit(offering("h2"), 5, 2)), "", malformed},
		{"bad protocols without a name", hello(offering("")), "", malformed},
		{"empty message", records(maxFragment, []byte{1, 0, 0, 0}), "", malformed},
		{"NUL in the name", hello(named("acme\x00.example.com")), "", malformed},
		{"UTF-8 in the name", hello(named("åcme.example.com")), "", malformed},
		{"slash in the name", hello(named("../acme")), "", malformed},
		{"newline in the name", hello(named("acme\n")), "", malformed},
		{"two trailing dots", hello(named("acme.example.com..")), "", malformed}, // was "acme.example.com." once
		{"address with two trailing dots", hello(named("192.0.2.1..")), "", malformed},
		{"leading dot", hello(named(".example.com")), "", malformed},
		{"empty label", hello(named("acme..com")), "", malformed},
		{"wildcard", hello(named("*.example.com")), "", malformed},
		{"name over 253", hello(named(strings.Repeat("a", 254))), "", malformed},

		{"SSLv2", []byte{0x80, 0x2e, 1, 0, 2, 0, 0x15, 0, 0, 0, 0x10}, "", notTLS},
		{"SSH", []byte("SSH-2.0-OpenSSH_9.6\r\n"), "", notTLS},
		{"TLS 16.0", []byte{22, 0x10, 0, 0, 4}, "", notTLS},
		{"alert first", alert(0), "", notTLS},
		{"HTTP", []byte("GET / HTTP/1.1\r\n"), "", plainHTTP},
		{"HTTP/2", []byte("PRI * HTTP/2.0\r\n"), "", plainHTTP},
		{"perhaps HTTP", []byte("PO"), "", incomplete},
		{"HTTP after all not", []byte("POTS"), "", notTLS},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			before := bytes.Clone(test.stream)
			for _, n := range []int{max(1, len(test.stream)), 1, 7} {
				to, verdict := scanned(test.stream, n)
				if to.name != test.want || verdict != test.verdict {
					t.Errorf("in pieces of %d: got %q %q, want %q %q", n, to.name, verdict, test.want, test.verdict)
				}
			}
			if !bytes.Equal(before, test.stream) {
				t.Error("scan modified the stream")
			}
		})
	}
}

func TestScanReadsProtocols(t *testing.T) {
	const name = "acme.k8s.example.com"
	longest := strings.Repeat("x", 255)
	for _, test := range []struct {
		name   string
		stream []byte
		want   []string
	}{
		{"none", hello(named(name)), nil},
		{"go", captured(t, &tls.Config{ServerName: name, NextProtos: []string{"konnectivity", "h2"}}), []string{"konnectivity", "h2"}},
		{"before the name", hello(offering("h2", "http/1.1"), named(name)), []string{"h2", "http/1.1"}},
		{"GREASE, the longest, NUL and twice the same", hello(named(name), offering("\x1a\x1a", longest, "\x00", "h2", "h2")), []string{"\x1a\x1a", longest, "\x00", "h2", "h2"}},
		{"one byte per record", records(1, message(named(name), offering("h2"))), []string{"h2"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, n := range []int{len(test.stream), 1, 7} {
				to, verdict := scanned(test.stream, n)
				if got := split(to.protocols); verdict != accepted || to.name != name || !slices.Equal(got, test.want) {
					t.Errorf("in pieces of %d: got %q %q %q, want %q", n, to.name, got, verdict, test.want)
				}
			}
		})
	}
}

// Every stream has a verdict within maxPeek, or a client could hold its buffer
// full and undecided.
func TestScanDecidesWithinMaxPeek(t *testing.T) {
	var longest []byte
	m := sized(maxHello, "acme.example.com")
	longest = append(longest, records(1, m[:maxRecords-1])...)
	longest = append(longest, records(maxFragment, m[maxRecords-1:])...)
	if _, verdict := scanned(longest, 1); verdict != accepted {
		t.Errorf("longest legal stream: %q", verdict)
	}
	if len(longest) > maxPeek {
		t.Errorf("longest legal stream has %d bytes, maxPeek is %d", len(longest), maxPeek)
	}
}

func FuzzClientHello(f *testing.F) {
	f.Fuzz(func(t *testing.T, stream []byte) {
		to, verdict := scanned(stream, max(1, len(stream)))
		for _, n := range []int{1, 3} {
			if again, v := scanned(stream, n); again.name != to.name || !bytes.Equal(again.protocols, to.protocols) || v != verdict {
				t.Fatalf("at once: %q %q %q, in pieces of %d: %q %q %q", to.name, to.protocols, verdict, n, again.name, again.protocols, v)
			}
		}
		name := to.name
		if (verdict == accepted) != (name != "") {
			t.Fatalf("verdict %q with name %q", verdict, name)
		}
		if verdict == accepted {
			if again, v := canonical(name); again != name || v != accepted {
				t.Fatalf("%q is not canonical: %q %q", name, again, v)
			}
		}
		if verdict == incomplete && len(stream) >= maxPeek {
			t.Fatalf("no verdict after %d bytes", len(stream))
		}

		theirs, ok := tlsReading(t.Context(), stream)
		if !ok {
			return
		}
		want, wantVerdict := canonical(theirs.ServerName)
		switch {
		case verdict == wantVerdict && name == want:
			if got := split(to.protocols); verdict == accepted && !slices.Equal(got, theirs.SupportedProtos) {
				t.Fatalf("got the protocols %q, crypto/tls reads %q", got, theirs.SupportedProtos)
			}
		case verdict == tooLarge: // crypto/tls takes 64 KiB, in any number of records
			if len(stream) <= maxHello/2 && bytes.Count(stream, []byte{22, 3}) < maxRecords/2 {
				t.Fatalf("too large with %d bytes", len(stream))
			}
		case !onlyHandshake(stream): // it takes warning alerts, and any version
			if verdict != notTLS && verdict != malformed {
				t.Fatalf("got %q for a stream with other records", verdict)
			}
		default:
			t.Fatalf("got %q %q, crypto/tls reads %q, which is %q %q", name, verdict, theirs.ServerName, want, wantVerdict)
		}
	})
}

// onlyHandshake reports whether each record is one of the handshake, as ours
// must be up to the end of the hello.
func onlyHandshake(stream []byte) bool {
	for len(stream) >= recordHeader {
		if stream[0] != recordHandshake || stream[1] != 3 {
			return false
		}
		length := int(stream[3])<<8 | int(stream[4])
		stream = stream[min(len(stream), recordHeader+length):]
	}
	return true
}

// tlsReading returns what crypto/tls sees, if it takes the hello.
func tlsReading(ctx context.Context, stream []byte) (seen tls.ClientHelloInfo, ok bool) {
	stop := errors.New("seen")
	w := &wire{}
	w.incoming.Reset(stream)
	_ = tls.Server(w, &tls.Config{
		MinVersion: tls.VersionTLS10,
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			seen, ok = *info, true
			return nil, stop
		},
	}).HandshakeContext(ctx)
	return seen, ok
}

func BenchmarkParse(b *testing.B) {
	m := captured(b, &tls.Config{ServerName: "acme.k8s.example.com"})[recordHeader:]
	for _, bench := range []struct {
		name   string
		stream []byte
		piece  int
	}{
		{"whole", records(maxFragment, m), maxPeek},
		{"two-segments", records(maxFragment, m), 1400},
		{"byte-at-a-time", records(maxFragment, m), 1},
		{"records-of-100", records(100, m), maxPeek},
		{"worst", records(8, sized(maxRecords*8-handshakeHeader, "acme.k8s.example.com")), 1},
	} {
		b.Run(bench.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(bench.stream)))
			for b.Loop() {
				if _, verdict := scanned(bench.stream, min(bench.piece, len(bench.stream))); verdict != accepted {
					b.Fatal(verdict)
				}
			}
		})
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"net/netip"
	"strings"

	"golang.org/x/crypto/cryptobyte"
)

const (
	recordHeader    = 5
	handshakeHeader = 4
	recordHandshake = 22
	maxFragment     = 1 << 14 // RFC 8446 section 5.1: longest plaintext in a record

	// maxHello bounds the ClientHello's body. Real ones have 200 bytes to 2 KiB
	// (post-quantum key shares), 6 KiB with much padding; the protocol would
	// allow 16 MiB.
	maxHello = 16 << 10

	// maxRecords lets a post-quantum hello through even when each of its bytes
	// comes in a record of its own, and still bounds what headers can add.
	maxRecords = 2048

	// maxPeek is the number of bytes within which every stream gets a verdict.
	maxPeek = handshakeHeader + maxHello + maxRecords*recordHeader

	maxName = 253 // RFC 1035 section 3.1, in text form without the last dot
)

// target is where a client wants to go, by its ClientHello.
type target struct {
	name string // canonical

	// protocols is the list of those that the client offers (ALPN), in its order:
	// each one byte of length, never 0, and as many of text. It may lie in the
	// buffer that the hello was read from.
	protocols cryptobyte.String
}

// scanner finds the target in the first bytes of a connection. It keeps
// how far it got, so a stream that arrives byte by byte costs no more than one
// that arrives at once, and holds none of the bytes itself.
//
// The zero value is ready. It is a pure function of the stream: how the bytes
// were cut into calls never changes the outcome.
type scanner struct {
	offset  int // where the record now arriving begins
	records int // complete records before it
	hello   int // bytes of the handshake message in them
	header  [handshakeHeader]byte
}

// scan is given the whole stream so far, which must begin with what earlier
// calls were given. It returns incomplete until it can decide, then accepted
// with the target, or the reason for refusing. It never modifies b, and the
// target may refer to it.
func (s *scanner) scan(b []byte) (to target, verdict reason) {
	if len(b) == 0 {
		return target{}, incomplete
	}
	if b[0] != recordHandshake {
		return target{}, classify(b)
	}
	for {
		record := b[s.offset:]
		if len(record) < recordHeader {
			return target{}, incomplete
		}
		if record[0] != recordHandshake || record[1] != 3 {
			if s.offset == 0 {
				return target{}, notTLS
			}
			return target{}, malformed
		}
		length := int(record[3])<<8 | int(record[4])
		// An empty handshake fragment is forbidden (RFC 8446 section 5.1), so
		// each record moves the message on.
		if length == 0 || length > maxFragment {
			return target{}, malformed
		}
		fragment := record[recordHeader:min(len(record), recordHeader+length)]
		if s.hello < handshakeHeader {
			copy(s.header[s.hello:], fragment)
		}
		have := s.hello + len(fragment)
		const clientHello = 1
		if have > 0 && s.header[0] != clientHello {
			return target{}, malformed
		}
		if have >= handshakeHeader {
			size := int(s.header[1])<<16 | int(s.header[2])<<8 | int(s.header[3])
			if size > maxHello {
				return target{}, tooLarge
			}
			if have >= handshakeHeader+size {
				return readTarget(s.message(b, size))
			}
		}
		if len(fragment) < length {
			return target{}, incomplete
		}
		s.hello = have
		s.offset += recordHeader + length
		if s.records++; s.records == maxRecords {
			return target{}, tooLarge
		}
	}
}

// message returns the body of the handshake message that is complete in b.
func (s *scanner) message(b []byte, size int) []byte {
	if s.records == 0 {
		return b[recordHeader+handshakeHeader:][:size]
	}
	joined := make([]byte, 0, handshakeHeader+size)
	for len(joined) < cap(joined) {
		length := int(b[3])<<8 | int(b[4])
		fragment := b[recordHeader:min(len(b), recordHeader+length)]
		joined = append(joined, fragment[:min(len(fragment), cap(joined)-len(joined))]...)
		b = b[recordHeader+len(fragment):]
	}
	return joined[handshakeHeader:]
}

// classify tells the HTTP client who forgot the s in https, worth an answer, and
// the proxy set to the version of its protocol that has no authority, worth a
// count, from everything else that does not begin as TLS.
func classify(b []byte) reason {
	const shortest = 4 // "GET ", and by then the others are unmistakable too
	const proxy = "PROX"
	for _, method := range []string{"GET ", "HEAD", "POST", "PUT ", "PATC", "DELE", "OPTI", "CONN", "TRAC", "PRI ", proxy} {
		n := min(len(b), shortest)
		if string(b[:n]) == method[:n] {
			if n < shortest {
				return incomplete
			}
			if method == proxy {
				return proxyV1
			}
			return plainHTTP
		}
	}
	return notTLS
}

// readTarget reads the body of a ClientHello (RFC 8446 section 4.1.2). It
// checks the structure down to the two extensions that it needs and leaves the
// judgement of everything else to the server that they lead to.
func readTarget(hello []byte) (to target, verdict reason) {
	const versionAndRandom = 2 + 32
	s := cryptobyte.String(hello)
	var session, suites, compression, extensions cryptobyte.String
	if !s.Skip(versionAndRandom) ||
		!s.ReadUint8LengthPrefixed(&session) ||
		!s.ReadUint16LengthPrefixed(&suites) ||
		!s.ReadUint8LengthPrefixed(&compression) {
		return target{}, malformed
	}
	if s.Empty() {
		return target{}, noName
	}
	if !s.ReadUint16LengthPrefixed(&extensions) || !s.Empty() {
		return target{}, malformed
	}
	var host []byte
	var protocols cryptobyte.String
	var seenName, seenProtocols bool
	for !extensions.Empty() {
		const extensionServerName, extensionALPN = 0, 16
		var id uint16
		var data cryptobyte.String
		if !extensions.ReadUint16(&id) || !extensions.ReadUint16LengthPrefixed(&data) {
			return target{}, malformed
		}
		var ok bool
		switch id {
		case extensionServerName:
			if host, ok = hostName(data); !ok || seenName {
				return target{}, malformed
			}
			seenName = true
		case extensionALPN:
			if protocols, ok = protocolList(data); !ok || seenProtocols {
				return target{}, malformed
			}
			seenProtocols = true
		}
	}
	name, verdict := canonical(host)
	if verdict != accepted {
		return target{}, verdict
	}
	return target{name: name, protocols: protocols}, accepted
}

// protocolList reads an ALPN extension (RFC 7301 section 3.1), which holds at
// least one protocol and no empty one.
func protocolList(extension cryptobyte.String) (list cryptobyte.String, ok bool) {
	if !extension.ReadUint16LengthPrefixed(&list) || !extension.Empty() || list.Empty() {
		return nil, false
	}
	for rest := list; !rest.Empty(); {
		var protocol cryptobyte.String
		if !rest.ReadUint8LengthPrefixed(&protocol) || protocol.Empty() {
			return nil, false
		}
	}
	return list, true
}

// hostName reads a server_name extension (RFC 6066 section 3), which may hold
// one name of each type. It is nil when there is none of type host_name.
func hostName(extension cryptobyte.String) (host []byte, ok bool) {
	var list cryptobyte.String
	if !extension.ReadUint16LengthPrefixed(&list) || !extension.Empty() || list.Empty() {
		return nil, false
	}
	seen := false
	for !list.Empty() {
		const typeHostName = 0
		var kind uint8
		var name cryptobyte.String
		if !list.ReadUint8(&kind) || !list.ReadUint16LengthPrefixed(&name) {
			return nil, false
		}
		if kind != typeHostName {
			continue
		}
		if seen {
			return nil, false
		}
		host, seen = name, true
	}
	return host, true
}

// canonical returns the form in which names are compared: lower case, without
// the one dot that may end it. A name that is empty or an IP address is none
// (RFC 6066 forbids addresses); one with an empty label or with bytes that no
// host name has is malformed, which also makes every accepted name safe to log.
func canonical[T string | []byte](raw T) (string, reason) {
	name := strings.TrimSuffix(string(raw), ".")
	if name == "" {
		return "", noName
	}
	// Only what may be an address is parsed as one: for others the parser
	// allocates an error, once per connection.
	if end := name[len(name)-1]; '0' <= end && end <= '9' || strings.Contains(name, ":") {
		if _, err := netip.ParseAddr(name); err == nil {
			return "", noName
		}
	}
	if len(name) > maxName {
		return "", malformed
	}
	last := byte('.')
	for _, c := range []byte(name) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
		case c == '.' && last != '.': // no label is empty
		default:
			return "", malformed
		}
		last = c
	}
	if last == '.' {
		return "", malformed
	}
	return strings.ToLower(name), accepted
}

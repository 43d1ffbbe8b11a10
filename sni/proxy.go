// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"

	"golang.org/x/crypto/cryptobyte"
)

// The PROXY protocol, version 2:
// https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt section 2.2
const (
	proxySignature = "\r\n\r\n\x00\r\nQUIT\n"
	proxyFixed     = len(proxySignature) + 4 // signature, command, family, length

	// maxProxyHeader has room for a worker's header (a name of 253 bytes) and for
	// what load balancers add about themselves, and fits into firstBuffer.
	maxProxyHeader = 512

	// forwardedType is of the range for private use (2.2.7), and none of those that
	// known load balancers have taken. As anybody may use it, it counts with our
	// value only.
	forwardedType  = 0xe5
	forwardedValue = "tenantd forwarded"
)

// proxyHeader is what a PROXY header says.
type proxyHeader struct {
	size      int            // its bytes in the stream
	source    netip.AddrPort // a claim of whoever sent it
	authority string         // canonical, empty when it has none
	forwarded bool           // by another host, or so it says
}

// readProxyHeader is given the stream so far. It returns incomplete until it can
// decide, then accepted with the header, or the reason for refusing. It takes
// what a stream of TCP over IP can have, and skips extensions it does not know.
//
// It is written out, like the hello's, because parsers that read from a
// bufio.Reader take more off the connection than the header, need memory before
// there is a name, and leave extensions and checksum to their caller.
func readProxyHeader(b []byte) (h proxyHeader, verdict reason) {
	if n := min(len(b), len(proxySignature)); string(b[:n]) != proxySignature[:n] {
		return proxyHeader{}, notTLS
	}
	if len(b) < proxyFixed {
		return proxyHeader{}, incomplete
	}
	const local, proxy = 0x20, 0x21 // version 2 in the upper half
	command, family := b[len(proxySignature)], b[len(proxySignature)+1]
	if command != local && command != proxy {
		return proxyHeader{}, proxyMalformed
	}
	size := proxyFixed + int(binary.BigEndian.Uint16(b[proxyFixed-2:]))
	if size > maxProxyHeader {
		return proxyHeader{}, proxyTooLarge
	}
	if len(b) < size {
		return proxyHeader{}, incomplete
	}
	if command == local {
		return proxyHeader{}, proxyLocal
	}
	b = b[:size]
	s := cryptobyte.String(b[proxyFixed:])
	source, ok := readSource(&s, family)
	if !ok {
		return proxyHeader{}, proxyMalformed
	}
	h = proxyHeader{size: size, source: source}
	checked := false
	for !s.Empty() {
		const authority, checksum = 2, 3
		var kind uint8
		var value cryptobyte.String
		if !s.ReadUint8(&kind) || !s.ReadUint16LengthPrefixed(&value) {
			return proxyHeader{}, proxyMalformed
		}
		switch kind {
		case authority:
			name, why := canonical([]byte(value))
			if why != accepted || h.authority != "" {
				return proxyHeader{}, proxyMalformed
			}
			h.authority = name
		case forwardedType:
			h.forwarded = h.forwarded || string(value) == forwardedValue
		case checksum:
			if checked || !sumMatches(b, value, size-len(s)-len(value)) {
				return proxyHeader{}, proxyMalformed
			}
			checked = true
		}
	}
	return h, accepted
}

// readSource reads the addresses of both ends and returns the first.
func readSource(s *cryptobyte.String, family byte) (source netip.AddrPort, ok bool) {
	const tcp4, tcp6 = 0x11, 0x21
	var length int
	switch family {
	case tcp4:
		length = 4
	case tcp6:
		length = 16
	default:
		return netip.AddrPort{}, false
	}
	var raw []byte
	var port, destination uint16
	if !s.ReadBytes(&raw, length) || !s.Skip(length) || !s.ReadUint16(&port) || !s.ReadUint16(&destination) {
		return netip.AddrPort{}, false
	}
	addr, _ := netip.AddrFromSlice(raw) // of 4 or 16 bytes, which cannot fail
	return netip.AddrPortFrom(addr.Unmap(), port), true
}

// sumMatches reports whether sum, which lies in header at offset, is the CRC32c
// of the header with zeros in its own place.
func sumMatches(header, sum []byte, offset int) bool {
	if len(sum) != crc32.Size {
		return false
	}
	table := crc32.MakeTable(crc32.Castagnoli) // made once, by crc32
	crc := crc32.Update(0, table, header[:offset])
	crc = crc32.Update(crc, table, make([]byte, crc32.Size))
	crc = crc32.Update(crc, table, header[offset+crc32.Size:])
	return crc == binary.BigEndian.Uint32(sum)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"log/slog"
	"net"
	"net/netip"
)

// arrival is a connection that is being routed. It belongs to the goroutine that
// does so.
type arrival struct {
	conn   net.Conn
	source netip.Addr // what the gate counts it by, if valid
	buffer peeked
	hello  scanner

	// trust says what the next PROXY header may: it ends with the first one.
	trust trust
	// peer is what counts when no header speaks for the client, if valid.
	peer netip.Addr
	// client is who a trusted proxy or a member says it is, nil when none said so.
	client *net.TCPAddr
	// forwarded is set when it came from a member, and must not go to another.
	forwarded bool
	// claim is the source in the last header, to be logged and not believed.
	claim netip.AddrPort
	// byHeader is set when a header named the target, so that the bytes behind it
	// are not ours to answer.
	byHeader bool
}

// trust is what the address that a connection is from entitles it to. A host may
// be both, with a load balancer of its own.
type trust struct {
	proxy  bool // to speak for a client
	member bool // to do so for a connection that it forwards
}

// origin returns what the gate counts a connection by, and whether it is from a
// trusted proxy or a member. What these bring is not counted until its first bytes
// say whose it is: their own address is that of everybody behind them.
func (r *Router) origin(c net.Conn) (source netip.Addr, from trust) {
	peer := peerOf(c)
	from.member = r.remotes.isMember(peer)
	for _, proxy := range r.trustedProxies {
		if proxy.Contains(peer) {
			from.proxy = true
			break
		}
	}
	if from != (trust{}) {
		return netip.Addr{}, from
	}
	return sourceOf(peer), from
}

// scan takes PROXY headers out of the buffer and looks for the target in them
// or, when they name none, in the ClientHello behind. It returns incomplete until
// it can decide, as [scanner.scan] does, and like it is a function of the stream.
func (a *arrival) scan() (to target, verdict reason) {
	for b := a.buffer.bytes; len(b) > 0 && b[0] == proxySignature[0]; b = a.buffer.bytes {
		h, verdict := readProxyHeader(b)
		if verdict != accepted {
			return target{}, verdict
		}
		a.buffer.discard(h.size)
		a.claim = h.source
		from := a.trust
		a.trust = trust{} // the next one is from further away
		switch {
		case h.forwarded && !from.member:
			return target{}, forwardedUntrusted
		case h.forwarded, from.proxy:
			a.forwarded = h.forwarded
			a.client = net.TCPAddrFromAddrPort(h.source)
		case h.authority == "":
			return target{}, proxyUntrusted
		}
		if h.authority != "" {
			a.byHeader = true
			return target{name: h.authority}, accepted
		}
	}
	if len(a.buffer.bytes) > 0 {
		a.trust = trust{}
	}
	return a.hello.scan(a.buffer.bytes)
}

// claimed is the claim as a log attribute, which loggers leave out when there is
// none.
func (a *arrival) claimed() slog.Attr {
	if !a.claim.IsValid() {
		return slog.Attr{}
	}
	return slog.Any("claimed", a.claim)
}

// peerOf returns the address of the other end of a connection. It is not valid
// when that has no IP address, such as a unix socket's.
func peerOf(c net.Conn) netip.Addr {
	remote, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return remote.AddrPort().Addr().Unmap().WithZone("")
}

// sourceOf returns what MaxPendingPerSource counts by: the IPv4 address, or the
// /64 of an IPv6 one, because that is what a single subscriber is given. It is
// not valid when addr is not.
func sourceOf(addr netip.Addr) netip.Addr {
	if !addr.Is6() {
		return addr
	}
	const subscriber = 64
	prefix, _ := addr.Prefix(subscriber) // cannot fail for an IPv6 address
	return prefix.Addr()
}

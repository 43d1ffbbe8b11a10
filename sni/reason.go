// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

// reason says what became of a connection. Its text is the reason label of the
// refusal counter, except for the two values that are no refusal.
type reason string

const (
	incomplete reason = "incomplete" // more bytes are needed to decide
	accepted   reason = ""

	notTLS              reason = "not_tls"
	plainHTTP           reason = "plain_http"
	malformed           reason = "malformed"
	tooLarge            reason = "too_large"
	noName              reason = "no_name"
	unknownName         reason = "unknown_name"
	noProtocol          reason = "no_protocol"
	timeout             reason = "timeout"
	eof                 reason = "eof"
	tooManyPending      reason = "too_many_pending"
	tooManySource       reason = "too_many_from_source"
	connections         reason = "connections"
	backlog             reason = "backlog"
	connectionsOfSource reason = "connections_from_source"
	handshakeTimeout    reason = "handshake_timeout"
	handshakeTooLarge   reason = "handshake_too_large"
	shutdown            reason = "shutdown"

	// Of connections that another host is to have, or that came from one.
	unreachable        reason = "unreachable"
	holdTimeout        reason = "hold_timeout"
	misrouted          reason = "misrouted"
	tooManyForwarded   reason = "too_many_forwarded"
	forwardedOfName    reason = "too_many_forwarded_to_name"
	forwardedOfSource  reason = "too_many_forwarded_from_source"
	forwardedUntrusted reason = "forwarded_untrusted"

	// Of PROXY headers.
	proxyMalformed reason = "proxy_malformed"
	proxyTooLarge  reason = "proxy_too_large"
	proxyUntrusted reason = "proxy_untrusted"
	proxyLocal     reason = "proxy_local"
	proxyV1        reason = "proxy_v1"
)

// reasons returns every refusal, so that each has a series from the start and
// a rate over it does not miss the first event.
func reasons() []reason {
	return []reason{
		notTLS, plainHTTP, malformed, tooLarge, noName, unknownName, noProtocol, timeout, eof,
		tooManyPending, tooManySource, connections, connectionsOfSource, backlog, shutdown,
		handshakeTimeout, handshakeTooLarge,
		unreachable, holdTimeout, misrouted, tooManyForwarded, forwardedOfName, forwardedOfSource, forwardedUntrusted,
		proxyMalformed, proxyTooLarge, proxyUntrusted, proxyLocal, proxyV1,
	}
}

// TLS alert descriptions (RFC 8446 section 6, RFC 6066 section 3, RFC 7301
// section 3.2).
const (
	alertDecodeError      = 50
	alertInternalError    = 80
	alertUnrecognizedName = 112
	alertNoProtocol       = 120
)

// answer returns what the client is sent before its connection is closed, or
// nil for nothing. Where another host is or was to answer there is none: clients take
// an alert for a server's last word, and a connection that ends for a fault of the
// network, after which they try again.
func (r reason) answer() []byte {
	switch r {
	case unknownName, noName:
		return alert(alertUnrecognizedName)
	case noProtocol:
		return alert(alertNoProtocol)
	case connections, connectionsOfSource, backlog, tooLarge, tooManyForwarded, forwardedOfName, forwardedOfSource:
		return alert(alertInternalError)
	case malformed:
		return alert(alertDecodeError)
	case plainHTTP:
		return []byte("HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" +
			"This port speaks TLS only: use https://\n")
	default:
		return nil
	}
}

// alert returns a fatal TLS alert in a record of its own.
func alert(description byte) []byte {
	const record, fatal = 21, 2
	return []byte{record, 3, 3, 0, 2, fatal, description}
}

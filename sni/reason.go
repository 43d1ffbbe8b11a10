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
// nil for nothing.
func (r reason) answer() []byte {
	switch r {
	case unknownName, noName:
		return alert(alertUnrecognizedName)
	case noProtocol:
		return alert(alertNoProtocol)
	case connections, connectionsOfSource, backlog, tooLarge:
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

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
)

// TLS makes an end of a TLS connection, as its client or server, over a TCP
// connection that it owns, also when the handshake fails.
func (p *Buffers) TLS(ctx context.Context, c *net.TCPConn, side func(net.Conn, *tls.Config) *tls.Conn, cfg *tls.Config) (Conn, error) {
	source, err := p.source(c)
	if err != nil {
		c.Close()
		return nil, err
	}
	wire := &wire{TCPConn: c, source: source}
	conn := &tlsConn{Conn: side(wire, cfg), wire: wire, buffers: p}
	if err := conn.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return conn, nil
}

type tlsConn struct {
	*tls.Conn
	wire    *wire
	buffers *Buffers
}

// WriteTo implements io.WriterTo.
func (c *tlsConn) WriteTo(w io.Writer) (int64, error) {
	c.wire.lazy = true
	var sum int64
	for {
		n, writeErr, readErr := c.move(w)
		sum += n
		switch {
		case writeErr != nil:
			return sum, writeErr
		case readErr == nil:
		case errors.Is(readErr, errDry):
			c.wire.fill()
		case errors.Is(readErr, io.EOF):
			return sum, nil
		default:
			return sum, readErr
		}
	}
}

// Write sends the records that p becomes with as few system calls as their number
// allows: TLS itself makes one for each.
func (c *tlsConn) Write(p []byte) (int, error) {
	c.wire.gather()
	n, err := c.Conn.Write(p)
	if flushErr := c.wire.flush(); err == nil && flushErr != nil {
		return 0, flushErr
	}
	return n, err
}

// move writes what can be read without waiting, at most a buffer full.
func (c *tlsConn) move(w io.Writer) (n int64, writeErr, readErr error) {
	plain := c.buffers.get()
	defer c.buffers.put(plain)
	have := 0
	for have < chunk && readErr == nil {
		var more int
		more, readErr = c.Conn.Read(plain[have:chunk])
		have += more
	}
	if have == 0 {
		return 0, nil, readErr
	}
	written, writeErr := w.Write(plain[:have])
	return int64(written), writeErr, readErr
}

// Close closes the socket. Unlike that of tls.Conn it never waits for the peer to
// take an alert: CloseWrite sends that where the end is orderly.
func (c *tlsConn) Close() error { return c.wire.TCPConn.Close() }

// wire is the socket under a TLS connection. Once lazy, its Read never waits:
// TLS would wait in it with a buffer in hand. It has one reader at a time.
type wire struct {
	*net.TCPConn
	source *source
	lazy   bool

	mu       sync.Mutex // guards what follows; TLS also writes when it reads
	gathered *buffer    // what is not sent yet, nil when writes are sent at once
	n        int

	// One reader at a time.
	filled *buffer // holds rest
	rest   []byte  // what was received and TLS has not read yet
	err    error   // the end, once rest is read
}

// fill waits for more from the peer. What goes wrong is told by the next Read, so
// that TLS knows of it and can tell an orderly end from a cut.
func (w *wire) fill() {
	var n int
	w.filled, n, w.err = w.source.fill()
	switch {
	case w.err != nil:
	case n == 0:
		w.err = io.EOF
	default:
		w.rest = w.filled[:n]
	}
}

// gather keeps what is written until flush, as far as a buffer holds it.
func (w *wire) gather() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gathered == nil {
		w.gathered = w.source.buffers.get()
	}
}

// flush sends what was gathered.
func (w *wire) flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.send()
	if w.gathered != nil {
		w.source.buffers.put(w.gathered)
		w.gathered = nil
	}
	return err
}

// send sends what is gathered so far. w.mu must be held.
func (w *wire) send() error {
	if w.n == 0 {
		return nil
	}
	_, err := w.TCPConn.Write(w.gathered[:w.n])
	w.n = 0
	return err
}

// Write implements net.Conn.
func (w *wire) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gathered == nil {
		return w.TCPConn.Write(p)
	}
	if w.n+len(p) > len(w.gathered) {
		if err := w.send(); err != nil {
			return 0, err
		}
	}
	if len(p) > len(w.gathered) {
		return w.TCPConn.Write(p)
	}
	w.n += copy(w.gathered[w.n:], p)
	return len(p), nil
}

// Read implements net.Conn.
func (w *wire) Read(p []byte) (int, error) {
	switch {
	case !w.lazy:
		return w.TCPConn.Read(p)
	case len(w.rest) > 0:
		n := copy(p, w.rest)
		if w.rest = w.rest[n:]; len(w.rest) == 0 {
			w.source.buffers.put(w.filled)
			w.filled, w.rest = nil, nil // an empty rest would still refer to it
		}
		return n, nil
	case w.err != nil:
		return 0, w.err
	}
	return 0, errDry
}

// errDry says that there is nothing to read for now. It is temporary, as a passed
// deadline is, so that TLS goes on where it stopped.
var errDry net.Error = dry{}

type dry struct{}

func (dry) Error() string   { return "nothing to read for now" }
func (dry) Timeout() bool   { return true }
func (dry) Temporary() bool { return true }

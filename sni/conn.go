// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// maxHandshake bounds what a client may send between its ClientHello and the end
// of its handshake: certificates. A kubelet's is 1 KiB, a chain of RSA certificates
// 10 KiB; crypto/tls would gather 256 KiB.
const maxHandshake = 32 << 10

// firstBuffer holds a post-quantum ClientHello (about 1,700 bytes) whole.
const firstBuffer = 2 << 10

// buffers is a pool of *[firstBuffer]byte. Larger ones are rare and not kept.
type buffers struct{ pool sync.Pool }

func (p *buffers) get() peeked {
	small, ok := p.pool.Get().(*[firstBuffer]byte)
	if !ok {
		small = new([firstBuffer]byte)
	}
	return peeked{bytes: small[:0], small: small}
}

// peeked holds the bytes that were read from a connection and not yet given to
// the one it belongs to.
type peeked struct {
	bytes []byte
	small *[firstBuffer]byte // the pool's, nil once outgrown or given back
}

// grow makes room for at least one more byte; false at maxPeek.
func (b *peeked) grow(p *buffers) bool {
	if len(b.bytes) < cap(b.bytes) {
		return true
	}
	if len(b.bytes) >= maxPeek {
		return false
	}
	larger := make([]byte, len(b.bytes), min(2*cap(b.bytes), maxPeek))
	copy(larger, b.bytes)
	b.free(p)
	b.bytes = larger
	return true
}

// discard takes the first n bytes out.
func (b *peeked) discard(n int) { b.bytes = b.bytes[:copy(b.bytes, b.bytes[n:])] }

// free gives the buffer back; b is empty afterwards.
func (b *peeked) free(p *buffers) {
	if b.small != nil {
		p.pool.Put(b.small)
	}
	*b = peeked{}
}

// conn is a connection that was handed over: the accepted one, with the bytes
// that were peeked in front. It deliberately has no SyscallConn: whoever read
// from the descriptor would miss those bytes.
//
// It is pending from when its owner accepts it until he says that the handshake is
// over, and is closed if that takes too long.
type conn struct {
	net.Conn
	listener *Listener
	source   netip.Addr   // what the gate and the listener count it by, if valid
	client   *net.TCPAddr // who it is for by a trusted proxy, nil without
	timer    *time.Timer  // refuses it if the handshake takes too long; set while pending
	pending  atomic.Bool  // its owner shakes hands with the client
	received atomic.Int64 // bytes of the handshake behind what was peeked
	closed   atomic.Bool
	drained  atomic.Bool // peeked is empty for good

	mu     sync.Mutex // guards what follows
	peeked peeked
	rest   []byte // the part of peeked not yet read
}

// Read returns what was peeked, then reads from the socket. While the connection is
// pending it ends it after maxHandshake bytes.
func (c *conn) Read(p []byte) (int, error) {
	if c.drained.Load() {
		return c.receive(p)
	}
	c.mu.Lock()
	n := copy(p, c.rest)
	if c.rest = c.rest[n:]; len(c.rest) == 0 {
		c.drain()
	}
	c.mu.Unlock()
	if n == 0 && len(p) > 0 {
		return c.receive(p) // another reader took the last of it
	}
	return n, nil
}

func (c *conn) receive(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.pending.Load() && c.received.Add(int64(n)) > maxHandshake {
		c.refuse(handshakeTooLarge)
	}
	return n, err // the next one fails
}

// drain gives the peeked bytes' buffer back. c.mu must be held.
func (c *conn) drain() {
	c.rest = nil
	c.peeked.free(c.listener.buffers)
	c.drained.Store(true)
}

// Established says that the client has finished its handshake: the connection no
// longer counts as pending and [Config].HandshakeTimeout does not end it. It does
// nothing the second time, nor on a closed connection.
func (c *conn) Established() {
	if c.settle() {
		c.timer.Stop()
	}
}

// begin takes a place among the pending for the time of the handshake; false if
// there is none, and then the connection is closed.
func (c *conn) begin() bool {
	r := c.listener.router
	if why := r.gate.reenter(c.source); why != accepted {
		c.drop(why)
		return false
	}
	c.pending.Store(true)
	c.timer = time.AfterFunc(r.handshakeTimeout, func() { c.refuse(handshakeTimeout) })
	return true
}

// settle gives the place among the pending back; false when there is none.
func (c *conn) settle() bool {
	if !c.pending.Swap(false) {
		return false
	}
	c.listener.router.gate.leave(c.source)
	return true
}

// refuse closes a connection that is still pending. Whoever reads or writes sees
// the error.
func (c *conn) refuse(why reason) {
	if c.settle() {
		c.drop(why)
	}
}

func (c *conn) drop(why reason) {
	r := c.listener.router
	r.metrics.refused(why)
	r.log.Debug("connection refused", "reason", string(why), "remote", c.RemoteAddr(), "tenant", c.listener.tenant)
	_ = c.Close()
}

// SetDeadline implements net.Conn. Servers set a deadline for the handshake and
// take it away when that is over, so the zero time means Established: net/http
// does so when it has a ReadHeaderTimeout, ReadTimeout or WriteTimeout, and gRPC
// always, when it has read the client's preface too.
func (c *conn) SetDeadline(t time.Time) error {
	c.noteDeadline(t)
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline implements net.Conn. The zero time means Established.
func (c *conn) SetReadDeadline(t time.Time) error {
	c.noteDeadline(t)
	return c.Conn.SetReadDeadline(t)
}

// SetWriteDeadline implements net.Conn. The zero time means Established.
func (c *conn) SetWriteDeadline(t time.Time) error {
	c.noteDeadline(t)
	return c.Conn.SetWriteDeadline(t)
}

func (c *conn) noteDeadline(t time.Time) {
	if t.IsZero() {
		c.Established()
	}
}

// Close closes the connection and gives its places back, once however often it is
// called.
func (c *conn) Close() error {
	err := c.Conn.Close()
	if !c.closed.Swap(true) {
		c.Established()
		c.mu.Lock()
		c.drain()
		c.mu.Unlock()
		c.listener.release(c.source)
	}
	return err
}

// RemoteAddr returns the address of the peer, or of the client that a trusted
// proxy says the connection is from.
func (c *conn) RemoteAddr() net.Addr {
	if c.client != nil {
		return c.client
	}
	return c.Conn.RemoteAddr()
}

// CloseWrite ends the sending side, as (*net.TCPConn).CloseWrite does. The
// error wraps errors.ErrUnsupported when the accepted connection has no such
// method.
func (c *conn) CloseWrite() error { return closeWrite(c.Conn) }

// NetConn returns the accepted connection. Reading from it skips peeked bytes
// that Read has not returned yet, and closing it does not give the place back.
func (c *conn) NetConn() net.Conn { return c.Conn }

func closeWrite(c net.Conn) error {
	half, ok := c.(interface{ CloseWrite() error })
	if !ok {
		return &net.OpError{Op: "close", Net: "write side", Addr: c.RemoteAddr(), Err: errors.ErrUnsupported}
	}
	return half.CloseWrite()
}

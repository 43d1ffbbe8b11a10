// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

const (
	// writeBuffer is what one connection may have queued for its agent: one chunk
	// on its way and one behind it.
	writeBuffer = 2 * wire.ChunkSize

	// chunkCost is what a received packet costs in memory beside its bytes, so
	// that a million packets of one byte count for what they are.
	chunkCost = 64

	// patience is how long a reader may take nothing before it counts as stalled.
	// Only upstream's agent is held up by one, and never for longer.
	patience = 2 * time.Second
)

// ErrSlowReader ends a connection whose reader stopped reading while its agent,
// an upstream one that cannot pause a single connection, sent more than may be
// kept.
var ErrSlowReader = errors.New("the reader took nothing for 2 s and its buffer of 256 KiB is full, which the upstream agent cannot be told: read faster or run tenant-proxy's agent on the node")

// conn is one connection through the tunnel.
type conn struct {
	// Constant after construction.
	session *session
	link    *link // the session's, or its own
	own     bool  // link is its own: it knows half-close and back-pressure
	id      int64
	network string
	target  string

	mu       sync.Mutex // guards what follows
	changed  sync.Cond  // broadcast on every change
	in       [][]byte   // received and not yet read
	inSize   int        // with chunkCost for each
	progress time.Time  // when a reader last took something, or could first have
	readErr  error      // once in is empty
	unsent   int        // bytes queued on link
	writeErr error
	closed   bool // by Close
	ended    bool // by the agent, the session or Close; nothing more comes in

	readUntil, writeUntil, holdUntil deadline
}

func newConn(s *session, l *link, id int64, network, target string) *conn {
	c := &conn{session: s, link: l, own: l != s.control, id: id, network: network, target: target}
	c.changed.L = &c.mu
	return c
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return 0, c.fault("read", net.ErrClosed)
		case c.readUntil.passed:
			return 0, c.fault("read", os.ErrDeadlineExceeded)
		case len(p) == 0:
			return 0, nil
		case len(c.in) > 0:
			return c.take(p), nil
		case errors.Is(c.readErr, io.EOF):
			return 0, io.EOF // bare, as io.Reader demands
		case c.readErr != nil:
			return 0, c.fault("read", c.readErr)
		}
		c.changed.Wait()
	}
}

// take copies what was received into p. c.mu is held, and there is something.
func (c *conn) take(p []byte) (n int) {
	for n < len(p) && len(c.in) > 0 {
		k := copy(p[n:], c.in[0])
		n += k
		c.inSize -= k
		if c.in[0] = c.in[0][k:]; len(c.in[0]) > 0 {
			break
		}
		c.inSize -= chunkCost
		c.in[0] = nil
		c.in = c.in[1:]
	}
	if len(c.in) == 0 {
		c.in = nil
	}
	c.progress = time.Now()
	c.changed.Broadcast()
	return n
}

// Write implements net.Conn. It returns when everything is queued, which is
// less than writeBuffer before everything is sent.
func (c *conn) Write(p []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return n, c.fault("write", net.ErrClosed)
		case c.writeErr != nil:
			return n, c.fault("write", c.writeErr)
		case c.writeUntil.passed:
			return n, c.fault("write", os.ErrDeadlineExceeded)
		case n == len(p):
			return n, nil
		case c.unsent < writeBuffer:
			n += c.queue(p[n:])
			continue
		}
		c.changed.Wait()
	}
}

// queue queues a first part of p and returns its length. c.mu is held.
func (c *conn) queue(p []byte) int {
	n := min(len(p), wire.ChunkSize, writeBuffer-c.unsent)
	chunk := append([]byte(nil), p[:n]...)
	c.unsent += n
	c.link.put(wire.Data(c.id, chunk), func() {
		c.session.server.metrics.sent.Add(float64(n))
		c.mu.Lock()
		defer c.mu.Unlock()
		c.unsent -= n
		c.changed.Broadcast()
	})
	return n
}

// receive takes what the agent sent. On a connection with its own link it waits
// while the buffer is full. Otherwise waiting holds up the agent's other
// connections, so it waits only for a reader that reads, and gives up others.
func (c *conn) receive(data []byte) {
	if len(data) == 0 {
		return
	}
	c.session.server.metrics.received.Add(float64(len(data)))
	c.mu.Lock()
	defer c.mu.Unlock()
	limit := wire.Window
	if c.own {
		limit = wire.ChunkSize // the window is HTTP/2's
	}
	for c.inSize >= limit && !c.ended {
		if !c.own {
			if c.holdUntil.set(c, c.progress.Add(patience)); c.holdUntil.passed {
				c.endLocked(ErrSlowReader)
				c.link.put(wire.CloseRequest(c.id), nil)
				c.session.forget(c)
				return
			}
		}
		c.changed.Wait()
	}
	c.holdUntil.set(c, time.Time{})
	if c.ended || c.readErr != nil {
		return
	}
	if len(c.in) == 0 {
		c.progress = time.Now()
	}
	c.in = append(c.in, data)
	c.inSize += len(data) + chunkCost
	c.changed.Broadcast()
}

// receiveEOF takes the end of what the agent sends; sending goes on.
func (c *conn) receiveEOF() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.readErr == nil {
		c.readErr = io.EOF
		c.changed.Broadcast()
	}
}

// end ends the connection: reads return why once everything received is read,
// writes at once. A why of io.EOF is an end in order. The first one counts.
func (c *conn) end(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(why)
}

func (c *conn) endLocked(why error) {
	if c.ended {
		return
	}
	c.ended = true
	if c.readErr == nil {
		c.readErr = why
	}
	if c.writeErr == nil {
		if c.writeErr = why; errors.Is(why, io.EOF) {
			c.writeErr = syscall.EPIPE
		}
	}
	c.changed.Broadcast()
}

// CloseWrite ends the sending side, after what was written. Upstream's agent
// has no such thing: the error wraps errors.ErrUnsupported.
func (c *conn) CloseWrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return c.fault("close", net.ErrClosed)
	case !c.own:
		return c.fault("close", fmt.Errorf("one direction through an upstream agent: %w", errors.ErrUnsupported))
	case c.writeErr != nil:
		return c.fault("close", c.writeErr)
	}
	c.writeErr = syscall.EPIPE
	c.link.put(wire.CloseRequest(c.id), nil)
	c.changed.Broadcast()
	return nil
}

// Close implements net.Conn. It does not wait: what was written is still sent.
func (c *conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.fault("close", net.ErrClosed)
	}
	c.closed = true
	live := !c.ended
	c.endLocked(net.ErrClosed)
	c.in, c.inSize = nil, 0
	for _, d := range []*deadline{&c.readUntil, &c.writeUntil, &c.holdUntil} {
		d.set(c, time.Time{})
	}
	c.mu.Unlock()

	switch {
	case c.own:
		c.link.finish()
	case live:
		c.link.put(wire.CloseRequest(c.id), nil)
	}
	c.session.forget(c)
	c.session.server.release()
	return nil
}

// closedByUs says whether Close was called.
func (c *conn) closedByUs() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// SetDeadline implements net.Conn.
func (c *conn) SetDeadline(t time.Time) error { return c.setDeadline(t, &c.readUntil, &c.writeUntil) }

// SetReadDeadline implements net.Conn.
func (c *conn) SetReadDeadline(t time.Time) error { return c.setDeadline(t, &c.readUntil) }

// SetWriteDeadline implements net.Conn.
func (c *conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(t, &c.writeUntil) }

func (c *conn) setDeadline(t time.Time, which ...*deadline) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return c.fault("set", net.ErrClosed)
	}
	for _, d := range which {
		d.set(c, t)
	}
	c.changed.Broadcast()
	return nil
}

// LocalAddr names the agent at whose end the connection leaves the tunnel.
func (c *conn) LocalAddr() net.Addr {
	return tunnelAddr{c.network, "tunnel-agent:" + c.session.id.name}
}

// RemoteAddr returns the target, as a *net.TCPAddr when it was dialed by address.
func (c *conn) RemoteAddr() net.Addr { return targetAddr(c.network, c.target) }

func (c *conn) fault(op string, err error) error {
	return &net.OpError{Op: op, Net: c.network, Addr: c.RemoteAddr(), Err: err}
}

// tunnelAddr is an address that is no IP address.
type tunnelAddr struct{ network, address string }

func (a tunnelAddr) Network() string { return a.network }
func (a tunnelAddr) String() string  { return a.address }

func targetAddr(network, address string) net.Addr {
	if ap, err := netip.ParseAddrPort(address); err == nil {
		return net.TCPAddrFromAddrPort(ap)
	}
	return tunnelAddr{network, address}
}

// deadline is a moment of a connection's; its mu guards it.
type deadline struct {
	at     time.Time
	timer  *time.Timer
	passed bool
}

// set moves the deadline; the zero time means none.
func (d *deadline) set(c *conn, at time.Time) {
	if d.at.Equal(at) && !at.IsZero() {
		return
	}
	if d.timer != nil {
		d.timer.Stop()
	}
	d.at, d.timer, d.passed = at, nil, false
	if at.IsZero() {
		return
	}
	left := time.Until(at)
	if left <= 0 {
		d.passed = true
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(left, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if d.timer == timer {
			d.passed = true
			c.changed.Broadcast()
		}
	})
	d.timer = timer
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package limit

import (
	"context"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// standing is what a connection's requests have shown so far.
type standing int32

const (
	newcomer standing = iota // nothing yet
	known                    // the last credentials were accepted
	stranger                 // the last credentials were refused
)

// Public wraps a connection from outside. Requests on it find it again by their
// local address, and after a refusal its reads pause: what the client sends on
// backs up in the client's own kernel. Writes never pause.
func Public(c net.Conn) net.Conn {
	p := &conn{Conn: c}
	p.addr = &publicAddr{Addr: c.LocalAddr(), conn: p}
	return p
}

// Own marks a connection of the control plane's own components, which are not
// limited. What tells them apart is the connection, not what a request on it says.
func Own(c net.Conn) net.Conn { return ownConn{c} }

// IsOwn reports whether a request came over a connection marked by [Own]. ctx is
// the request's.
func IsOwn(ctx context.Context) bool {
	_, own := ctx.Value(http.LocalAddrContextKey).(ownAddr)
	return own
}

// connOf returns the connection that a request came over; nil if it was not wrapped.
func connOf(ctx context.Context) *conn {
	if a, ok := ctx.Value(http.LocalAddrContextKey).(*publicAddr); ok {
		return a.conn
	}
	return nil
}

type ownConn struct{ net.Conn }

// LocalAddr implements net.Conn.
func (c ownConn) LocalAddr() net.Addr { return ownAddr{c.Conn.LocalAddr()} }

// net/http puts the local address into the context of each request, of HTTP/2 as
// well, which makes it the one thing by which a request knows its connection.
type (
	ownAddr    struct{ net.Addr }
	publicAddr struct {
		net.Addr
		conn *conn
	}
)

type conn struct {
	net.Conn
	addr     *publicAddr
	standing atomic.Int32
	paused   atomic.Bool // spares reads the lock

	mu       sync.Mutex // guards what follows
	until    time.Time  // end of the pause
	deadline time.Time  // of reads
	closed   bool
	changed  chan struct{} // closed when the above changes; nil while no read waits
}

// LocalAddr implements net.Conn.
func (c *conn) LocalAddr() net.Addr { return c.addr }

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	if c.paused.Load() {
		c.rest()
	}
	n, err := c.Conn.Read(p)
	if n > 0 && c.paused.Load() { // since it began to wait for these bytes
		c.rest()
	}
	return n, err
}

// rest waits for the end of the pause. It also returns when the connection is
// closed or reads have passed their deadline, which the read that follows reports.
func (c *conn) rest() {
	for {
		c.mu.Lock()
		until := c.until
		if !c.deadline.IsZero() && c.deadline.Before(until) {
			until = c.deadline
		}
		wait := time.Until(until)
		if wait <= 0 || c.closed {
			c.paused.Store(time.Now().Before(c.until) && !c.closed)
			c.mu.Unlock()
			return
		}
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed := c.changed
		c.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-changed:
		}
		timer.Stop()
	}
}

// pause has reads wait for d from now, and what a read gets that waits already.
func (c *conn) pause(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.until = time.Now().Add(d)
	c.paused.Store(!c.closed)
}

// change applies a change that a waiting read must see.
func (c *conn) change(apply func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	apply()
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// SetDeadline implements net.Conn.
func (c *conn) SetDeadline(t time.Time) error {
	c.change(func() { c.deadline = t })
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline implements net.Conn.
func (c *conn) SetReadDeadline(t time.Time) error {
	c.change(func() { c.deadline = t })
	return c.Conn.SetReadDeadline(t)
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.change(func() { c.closed = true })
	return c.Conn.Close()
}

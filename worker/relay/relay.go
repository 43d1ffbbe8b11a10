// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// chunk is four full TLS records: what one system call should move when there
	// is much to move. Larger did not measure faster.
	chunk = 64 << 10

	// bufferSize leaves room for what TLS adds to a chunk.
	bufferSize = chunk + 1<<10
)

type buffer [bufferSize]byte

// Buffers makes connections that share a pool of buffers. The zero value works.
// It is safe for concurrent use and must not be copied.
type Buffers struct{ pool sync.Pool }

func (p *Buffers) get() *buffer {
	if b, ok := p.pool.Get().(*buffer); ok {
		return b
	}
	return new(buffer)
}

func (p *Buffers) put(b *buffer) { p.pool.Put(b) }

// Conn is one end of a relayed connection. WriteTo copies until the end of the
// stream and holds no buffer while it waits; nothing may be read in another way
// once it is called. Close is for both ways and at once.
type Conn interface {
	net.Conn
	io.WriterTo
	CloseWrite() error
}

// Moved counts the bytes of a connection.
type Moved struct {
	Up   int64 // from the first end to the second
	Down int64 // from the second to the first
}

// Join copies both ways between two connections, which it owns, until both ways
// are at their end or one fails; then it closes both and calls done, once, with the
// error of the way that failed first. When one way ends in order, that end is
// passed on and the other way goes on.
//
// It returns at once. Both ways have goroutines of their own whose stacks are small,
// which that of the caller, who has dialled and shaken hands, is not.
func Join(client, host Conn, done func(Moved, error)) {
	j := &joined{client: client, host: host, done: done}
	j.open.Store(2)
	go j.copy(client, host, &j.moved.Up)
	go j.copy(host, client, &j.moved.Down)
}

// joined is a pair of connections.
type joined struct {
	client, host Conn
	done         func(Moved, error)
	moved        Moved                 // each field has one writer
	open         atomic.Int32          // ways that are not at their end
	failure      atomic.Pointer[error] // of the way that failed first
}

func (j *joined) copy(from, to Conn, n *int64) {
	var err error
	if *n, err = from.WriteTo(to); err == nil {
		err = to.CloseWrite()
	}
	if err != nil {
		j.failure.CompareAndSwap(nil, &err)
		j.close()
	}
	if j.open.Add(-1) > 0 {
		return
	}
	j.close()
	if failure := j.failure.Load(); failure != nil {
		j.done(j.moved, *failure)
		return
	}
	j.done(j.moved, nil)
}

func (j *joined) close() {
	j.client.Close()
	j.host.Close()
}

// TCP makes an end of a TCP connection, which it owns.
func (p *Buffers) TCP(c *net.TCPConn) (Conn, error) {
	source, err := p.source(c)
	if err != nil {
		return nil, err
	}
	return &tcpConn{TCPConn: c, source: source}, nil
}

type tcpConn struct {
	*net.TCPConn
	source *source
}

// WriteTo implements io.WriterTo.
func (c *tcpConn) WriteTo(w io.Writer) (int64, error) {
	var sum int64
	for {
		filled, n, err := c.source.fill()
		if err != nil {
			return sum, err
		}
		if n == 0 {
			return sum, nil
		}
		written, err := w.Write(filled[:n])
		c.source.buffers.put(filled)
		sum += int64(written)
		if err != nil {
			return sum, err
		}
	}
}

// source reads from a socket into buffers of the pool.
type source struct {
	conn    *net.TCPConn
	raw     syscall.RawConn
	buffers *Buffers
	try     func(fd uintptr) bool // made once: it would be an allocation per read

	// The outcome of try. One reader at a time.
	filled *buffer
	n      int
	err    error
}

func (p *Buffers) source(c *net.TCPConn) (*source, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &source{conn: c, raw: raw, buffers: p}
	s.try = s.read
	return s, nil
}

// fill waits until there is something to read and reads it. Zero bytes without an
// error are the end of the stream. A buffer belongs to the caller if n is not zero.
func (s *source) fill() (filled *buffer, n int, err error) {
	if err := s.raw.Read(s.try); err != nil {
		return nil, 0, err
	}
	filled, s.filled = s.filled, nil
	if s.n > 0 {
		return filled, s.n, nil
	}
	s.buffers.put(filled)
	if s.err != nil {
		return nil, 0, &net.OpError{Op: "read", Net: "tcp", Source: s.conn.LocalAddr(), Addr: s.conn.RemoteAddr(), Err: s.err}
	}
	return nil, 0, nil
}

// read is called when the socket may be ready; false means that it was not.
func (s *source) read(fd uintptr) bool {
	b := s.buffers.get()
	for {
		s.n, s.err = unix.Read(int(fd), b[:chunk])
		if !errors.Is(s.err, unix.EINTR) {
			break
		}
	}
	if errors.Is(s.err, unix.EAGAIN) {
		s.buffers.put(b)
		return false
	}
	s.filled = b
	return true
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// relayBuffer is the size of a full TLS record: what comes in smaller pieces is
	// cheaper to copy than to splice.
	relayBuffer = 17 << 10

	// relayPipe is what the kernel lets a user without privileges have at most, and a
	// pipe that is larger saves no more system calls: a socket seldom has as much.
	relayPipe = 1 << 20

	// maxSparePipes bounds the pipes that are kept for the next use. Only directions
	// that are moving bytes at this moment use any.
	maxSparePipes = 64
)

// relays is what the directions of forwarded connections share. The zero value is
// ready.
type relays struct {
	buffers sync.Pool // of *[relayBuffer]byte

	mu     sync.Mutex // guards what follows
	closed bool
	spare  []*pipe
}

// relay is one direction of a forwarded connection.
//
// It is io.Copy but for three things. While there is nothing to move it holds neither
// a buffer nor a pipe: most connections are idle, and a user without privileges
// has room for 64 pipes of this size before the kernel makes them smaller, to two
// pages in the end. What comes in small pieces, such as handshakes and requests, is
// copied. And only what fills the buffer is spliced.
type relay struct {
	shared     *relays
	from, to   syscall.RawConn
	receive    func(fd uintptr) bool // bound once, as are the other two
	fill       func(fd uintptr) bool
	drain      func(fd uintptr) bool
	buffer     *[relayBuffer]byte
	pipe       *pipe
	got, piped int   // what receive or fill got, and what drain has yet to pass on
	failure    error // of the last system call
}

// copy moves bytes until from ends or either fails, as io.Copy does.
func (s *relays) copy(to, from net.Conn) (moved int64, err error) {
	in, ok := from.(*net.TCPConn)
	out, both := to.(*net.TCPConn)
	if !ok || !both {
		return io.Copy(to, from)
	}
	r := &relay{shared: s}
	if r.from, err = in.SyscallConn(); err != nil {
		return 0, fmt.Errorf("read: %w", err)
	}
	if r.to, err = out.SyscallConn(); err != nil {
		return 0, fmt.Errorf("write: %w", err)
	}
	r.receive, r.fill, r.drain = r.doReceive, r.doFill, r.doDrain
	for bulk := false; ; bulk = r.got >= relayBuffer {
		if bulk {
			err = r.splice()
		} else {
			err = r.copy(out)
		}
		moved += int64(r.got)
		if err != nil || r.got == 0 {
			return moved, err
		}
	}
}

// copy moves one piece by a buffer.
func (r *relay) copy(out *net.TCPConn) error {
	err := errors.Join(r.from.Read(r.receive), r.failure)
	if err == nil && r.got > 0 {
		_, err = out.Write(r.buffer[:r.got])
	}
	if r.buffer != nil {
		r.shared.buffers.Put(r.buffer)
		r.buffer = nil
	}
	return err
}

// doReceive reads once; false when there is nothing.
func (r *relay) doReceive(fd uintptr) bool {
	if r.buffer == nil {
		var ok bool
		if r.buffer, ok = r.shared.buffers.Get().(*[relayBuffer]byte); !ok {
			r.buffer = new([relayBuffer]byte)
		}
	}
	r.got, r.failure = again(func() (int, error) { return unix.Read(int(fd), r.buffer[:]) })
	if r.failure == unix.EAGAIN { //nolint:errorlint // as the kernel gave it
		r.shared.buffers.Put(r.buffer)
		r.buffer = nil
		return false
	}
	return true
}

// splice moves one piece by a pipe.
func (r *relay) splice() error {
	err := errors.Join(r.from.Read(r.fill), r.failure)
	if err == nil && r.got > 0 {
		r.piped = r.got
		err = errors.Join(r.to.Write(r.drain), r.failure)
	}
	if r.pipe != nil {
		if r.piped > 0 { // what is in it belongs to nobody else
			r.pipe.close()
		} else {
			r.shared.put(r.pipe)
		}
		r.pipe = nil
	}
	return err
}

const spliceFlags = unix.SPLICE_F_MOVE | unix.SPLICE_F_NONBLOCK

// doFill splices into a pipe once; false when there is nothing.
func (r *relay) doFill(fd uintptr) bool {
	if r.pipe == nil {
		if r.pipe, r.failure = r.shared.get(); r.failure != nil {
			r.got = 0
			return true
		}
	}
	r.got, r.failure = again(func() (int, error) {
		n, err := unix.Splice(int(fd), nil, r.pipe.in, nil, relayPipe, spliceFlags)
		return int(n), err
	})
	if r.failure == unix.EAGAIN { //nolint:errorlint // as the kernel gave it
		r.shared.put(r.pipe)
		r.pipe = nil
		return false
	}
	return true
}

// doDrain splices out of the pipe until it is empty; false when the socket is full.
func (r *relay) doDrain(fd uintptr) bool {
	for r.piped > 0 {
		var n int
		n, r.failure = again(func() (int, error) {
			n, err := unix.Splice(r.pipe.out, nil, int(fd), nil, r.piped, spliceFlags)
			return int(n), err
		})
		if r.failure == unix.EAGAIN { //nolint:errorlint // as the kernel gave it
			return false
		}
		if r.failure != nil {
			return true
		}
		r.piped -= n
	}
	return true
}

// again repeats a system call that a signal interrupted. What has failed has moved
// nothing.
func again(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err == nil {
			return n, nil
		}
		if err != unix.EINTR { //nolint:errorlint // as the kernel gave it
			return 0, err
		}
	}
}

// pipe is empty whenever it is spare.
type pipe struct{ out, in int }

func (p *pipe) close() {
	_ = unix.Close(p.out)
	_ = unix.Close(p.in)
}

// get returns an empty pipe.
func (s *relays) get() (*pipe, error) {
	s.mu.Lock()
	if n := len(s.spare); n > 0 {
		p := s.spare[n-1]
		s.spare = s.spare[:n-1]
		s.mu.Unlock()
		return p, nil
	}
	s.mu.Unlock()
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	// If the kernel permits none so large, it has the default's 64 KiB.
	_, _ = unix.FcntlInt(uintptr(ends[1]), unix.F_SETPIPE_SZ, relayPipe)
	return &pipe{out: ends[0], in: ends[1]}, nil
}

// put keeps an empty pipe for the next use, or closes it.
func (s *relays) put(p *pipe) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.spare) >= maxSparePipes {
		p.close()
		return
	}
	s.spare = append(s.spare, p)
}

// close closes the spare pipes, and those that come back later.
func (s *relays) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, p := range s.spare {
		p.close()
	}
	s.spare = nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package fakehost

import (
	"io"
	"log"
	"net"
)

// queue is a listener whose connections are passed to it.
type queue struct {
	conns chan net.Conn
	done  <-chan struct{}
	addr  net.Addr
}

func (q *queue) pass(c net.Conn) bool {
	select {
	case q.conns <- c:
		return true
	case <-q.done:
		return false
	}
}

// Accept implements net.Listener.
func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. The host ends it.
func (q *queue) Close() error { return nil }

// Addr implements net.Listener.
func (q *queue) Addr() net.Addr { return q.addr }

func quiet() *log.Logger { return log.New(io.Discard, "", 0) }

// must is for what fails only by a mistake in this package.
func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

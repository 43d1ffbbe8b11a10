// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"errors"
	"io"
	"net"
	"testing"
)

// TestWireLetsGo reads all that was received and expects that nothing refers to the
// buffer any more, not even a slice of no bytes: a thousand idle watches would hold
// 64 MiB.
func TestWireLetsGo(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	dialled, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer dialled.Close()
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	var buffers Buffers
	source, err := buffers.source(accepted.(*net.TCPConn))
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{TCPConn: accepted.(*net.TCPConn), source: source, lazy: true}

	if _, err := io.WriteString(dialled, "hello"); err != nil {
		t.Fatal(err)
	}
	w.fill()
	for _, want := range []string{"he", "ll", "o"} {
		got := make([]byte, 2)
		if n, err := w.Read(got); err != nil || string(got[:n]) != want {
			t.Fatalf("%q, %v; want %q", got[:n], err, want)
		}
	}
	if w.filled != nil || w.rest != nil || source.filled != nil {
		t.Error("a connection that waits refers to a buffer")
	}
	if _, err := w.Read(make([]byte, 1)); !errors.Is(err, errDry) {
		t.Errorf("with nothing to read: %v", err)
	}
	dialled.Close()
	w.fill()
	if _, err := w.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// What the control plane's own components hold open must not hold up its end.
func TestOwnConnectionsEndWithTheListener(t *testing.T) {
	public, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newListener(public)
	var server net.Conn
	accepted := make(chan error, 1)
	go func() {
		var err error
		server, err = l.Accept()
		accepted <- err
	}()
	client, err := l.dial(t.Context())
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	defer server.Close()
	l.Close()
	if err := server.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := server.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the server's end: %v", err)
	}
	if len(l.own) > 0 {
		t.Error("the connection is not forgotten")
	}
}

// What a stopped API server says to its own components is nothing that client-go
// takes for a reason to ask again.
func TestStoppedServerIsNotAskedAgain(t *testing.T) {
	public, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newListener(public)
	l.close()
	if _, err = l.dial(t.Context()); err == nil || utilnet.IsProbableEOF(err) || utilnet.IsConnectionReset(err) || utilnet.IsConnectionRefused(err) {
		t.Errorf("got %v", err)
	}
}

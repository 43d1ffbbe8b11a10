// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

func TestKeepAlive(t *testing.T) {
	p := openPort(t, Config{HelloTimeout: forever})
	l := p.listen(ListenConfig{Tenant: "acme", Names: []string{"acme.example.com"}})
	p.dial(hello(named("acme.example.com")))
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	keepsAlive(t, "the connection", server.(*conn).NetConn())
}

// keepsAlive checks that a connection has its end notice within a minute that a peer is
// gone.
func keepsAlive(t *testing.T, what string, c net.Conn) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for _, option := range []struct {
		name                string
		level, option, want int
	}{
		{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 30},
		{"TCP_KEEPINTVL", unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 10},
		{"TCP_KEEPCNT", unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 3},
		{"TCP_NODELAY", unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
	} {
		var got int
		var failure error
		if err := raw.Control(func(fd uintptr) { got, failure = unix.GetsockoptInt(int(fd), option.level, option.option) }); err != nil || failure != nil {
			t.Fatal(err, failure)
		}
		if got != option.want {
			t.Errorf("%s of %s is %d, want %d", option.name, what, got, option.want)
		}
	}
}

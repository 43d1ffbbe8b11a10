// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"bytes"
	"crypto/rand"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pipes returns how many descriptors of pipes this process has.
func pipes(t *testing.T) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); strings.HasPrefix(to, "pipe:") {
			n++
		}
	}
	return n
}

// A host that dials others from one address does not spend a port of it that another
// connection to them could have. Addresses may have names.
func TestForwardsFromPortsOfTheirOwn(t *testing.T) {
	const loopback = "127.0.0.1"
	a, b := openHost(t, hostA, Config{ForwardGrace: time.Nanosecond}), openHost(t, loopback, Config{})
	l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	for _, address := range []string{b.addr, strings.Replace(b.addr, loopback, "localhost", 1)} {
		t.Run(address, func(t *testing.T) {
			a.SetRemotes(map[string]Remote{acme: {Addresses: []string{address}}})
			client, server := forwardTo(t, a, l, hello(named(acme)))
			a.forwards.mu.Lock()
			for f := range a.forwards.open {
				if got := f.remote.LocalAddr().(*net.TCPAddr).IP.String(); got != hostA {
					t.Errorf("dialled from %s, want %s", got, hostA)
				}
				raw, err := f.remote.(*net.TCPConn).SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				_ = raw.Control(func(fd uintptr) { // fails when it is closed
					if late, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT); err != nil || late != 1 {
						t.Errorf("the port is chosen without the other end: %d, %v", late, err)
					}
				})
			}
			a.forwards.mu.Unlock()
			_, _ = client.Close(), server.Close()
			a.idle()
		})
	}
}

// A wrapper around either end would have the bytes copied through this process,
// with no pipe in use.
func TestForwardsBySplice(t *testing.T) {
	a, b := pair(t, Config{})
	hi := hello(named(acme))
	client, server := forwardTo(t, a, b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}}), hi)
	if _, err := io.ReadFull(server, make([]byte, len(hi))); err != nil {
		t.Fatal(err)
	}
	server.(*conn).Established() // it may send more than a handshake
	for name, way := range map[string]struct{ from, to net.Conn }{"download": {server, client}, "upload": {client, server}} {
		t.Run(name, func(t *testing.T) {
			before := pipes(t)
			a.relays.close() // none is kept, so that each that is in use is seen
			data := make([]byte, 16<<20)
			_, _ = rand.Read(data) // never fails
			written := make(chan error, 1)
			go func() {
				_, err := way.from.Write(data)
				written <- err
			}()
			// Nobody reads yet, so that it stays in use when both sockets are full.
			await(t, "a pipe", func() bool { return pipes(t) == before+2 })
			got := make([]byte, len(data))
			if _, err := io.ReadFull(way.to, got); err != nil {
				t.Fatal(err)
			}
			if err := <-written; err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, data) {
				t.Error("what arrived is not what was sent")
			}
			await(t, "no pipe", func() bool { return pipes(t) == before })
		})
	}
}

// Most connections are idle, and the kernel gives a user few pipes.
func TestForwardsHoldNoPipeWhileIdle(t *testing.T) {
	const many = 20
	a, b := pair(t, Config{})
	l := b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}})
	hi := hello(named(acme))
	for range many {
		client, server := forwardTo(t, a, l, hi)
		if _, err := io.ReadFull(server, make([]byte, len(hi))); err != nil {
			t.Fatal(err)
		}
		if _, err := server.Write(hi); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(client, make([]byte, len(hi))); err != nil {
			t.Fatal(err)
		}
	}
	if n := pipes(t); n >= many {
		t.Errorf("%d idle connections hold %d ends of pipes", many, n)
	}
}

// Both ends notice within a minute that a peer is gone.
func TestForwardedKeepAlive(t *testing.T) {
	a, b := pair(t, Config{})
	forwardTo(t, a, b.listen(ListenConfig{Tenant: "acme", Names: []string{acme}}), hello(named(acme)))
	a.forwards.mu.Lock()
	defer a.forwards.mu.Unlock()
	for f := range a.forwards.open {
		for end, c := range map[string]net.Conn{"client": f.client, "host": f.remote} {
			keepsAlive(t, "the "+end+"'s end", c)
		}
	}
}

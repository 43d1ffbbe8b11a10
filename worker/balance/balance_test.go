// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package balance_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tenantd/tenantd/worker/balance"
	"github.com/tenantd/tenantd/worker/carrier"
	"github.com/tenantd/tenantd/worker/relay"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const hostname = "acme.test"

func newPool(t *testing.T, tenant *fakehost.Tenant, kinds ...carrier.Kind) *balance.Pool {
	t.Helper()
	var ways []*carrier.Carrier
	for _, kind := range kinds {
		way, err := carrier.New(carrier.Config{Kind: kind, Hostname: hostname, RootCAs: tenant.Roots, Buffers: new(relay.Buffers)})
		if err != nil {
			t.Fatal(err)
		}
		ways = append(ways, way)
	}
	pool := balance.New(balance.Config{
		Hostname: hostname, RootCAs: tenant.Roots, Carriers: ways,
		Interval: 20 * time.Millisecond, Timeout: 500 * time.Millisecond, DialTimeout: time.Second,
	})
	t.Cleanup(pool.Close)
	return pool
}

func listen(t *testing.T, tenant *fakehost.Tenant) *fakehost.Host {
	t.Helper()
	host, err := tenant.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(host.Close)
	return host
}

// eventually waits for what another goroutine does. A test that passes never waits
// for the whole time.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it did not come about that %s", what)
		}
	}
}

func state(pool *balance.Pool, address netip.AddrPort) balance.Host {
	for _, h := range pool.Hosts() {
		if h.Address == address {
			return h
		}
	}
	return balance.Host{}
}

func isHealthy(pool *balance.Pool, address netip.AddrPort, healthy bool) func() bool {
	return func() bool { h := state(pool, address); return h.Healthy == healthy && (healthy || h.Error != "") }
}

// dial opens a connection that has reached a host.
func dial(t *testing.T, pool *balance.Pool) relay.Conn {
	t.Helper()
	conn, err := pool.Dial(t.Context(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// closed tells whether a connection was closed on this side; it does not wait.
func closed(conn net.Conn) bool {
	conn.SetReadDeadline(time.Now().Add(time.Millisecond))
	_, err := conn.Read(make([]byte, 1))
	return !errors.Is(err, os.ErrDeadlineExceeded)
}

// TestFailover takes one of two hosts out and back in.
func TestFailover(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	a, b := listen(t, tenant), listen(t, tenant)
	pool := newPool(t, tenant, carrier.Proxy2)
	pool.SetHosts([]netip.AddrPort{a.Address, b.Address})
	eventually(t, "both are healthy", func() bool { return isHealthy(pool, a.Address, true)() && isHealthy(pool, b.Address, true)() })
	conns := map[string][]net.Conn{}
	for range 6 {
		conn := dial(t, pool)
		conns[conn.RemoteAddr().String()] = append(conns[conn.RemoteAddr().String()], conn)
	}
	if len(conns[a.Address.String()]) != 3 || len(conns[b.Address.String()]) != 3 {
		t.Errorf("connections are not spread evenly: %v", pool.Hosts())
	}

	a.SetReady(false)
	eventually(t, "a host that is not ready is out", isHealthy(pool, a.Address, false))
	for _, conn := range conns[a.Address.String()] {
		eventually(t, "its connections are closed", func() bool { return closed(conn) })
	}
	for _, conn := range conns[b.Address.String()] {
		if closed(conn) {
			t.Error("a healthy host's connection was closed")
		}
	}
	for range 5 {
		if conn := dial(t, pool); conn.RemoteAddr().String() != b.Address.String() {
			t.Errorf("a connection goes to %s, which is out", conn.RemoteAddr())
		}
	}
	a.SetReady(true)
	eventually(t, "it is in again", isHealthy(pool, a.Address, true))
	if conn := dial(t, pool); conn.RemoteAddr().String() != a.Address.String() {
		t.Errorf("a connection goes to %s, which has more", conn.RemoteAddr())
	}
}

// TestLastHost expects that the only host's connections stay although it is not
// ready, and that it is still tried, and that they go when another comes.
func TestLastHost(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	a, b := listen(t, tenant), listen(t, tenant)
	pool := newPool(t, tenant, carrier.Proxy2)
	pool.SetHosts([]netip.AddrPort{a.Address})
	eventually(t, "it is healthy", isHealthy(pool, a.Address, true))
	conn := dial(t, pool)
	a.SetReady(false)
	eventually(t, "it is out", isHealthy(pool, a.Address, false))
	if pool.Healthy() {
		t.Error("no host is healthy, the pool says it is")
	}
	// Some more probes, each of which could close it.
	probes := a.Asked("/readyz")
	eventually(t, "it is probed on", func() bool { return a.Asked("/readyz") > probes+3 })
	if closed(conn) {
		t.Fatal("the last host's connection was closed")
	}
	dial(t, pool)
	pool.SetHosts([]netip.AddrPort{a.Address, b.Address})
	eventually(t, "the other is healthy", isHealthy(pool, b.Address, true))
	eventually(t, "the connection is closed", func() bool { return closed(conn) })
}

// TestDeadHosts dials past hosts that refuse and hosts that say nothing.
func TestDeadHosts(t *testing.T) {
	for _, kind := range []carrier.Kind{carrier.TLS, carrier.Proxy2} {
		t.Run(string(kind), func(t *testing.T) {
			tenant := fakehost.NewTenant(hostname)
			alive, dead, silent := listen(t, tenant), listen(t, tenant), deaf(t)
			dead.Close()
			pool := newPool(t, tenant, kind)
			pool.SetHosts([]netip.AddrPort{alive.Address, dead.Address, silent})
			eventually(t, "the living one is healthy", isHealthy(pool, alive.Address, true))
			eventually(t, "the dead one is out", isHealthy(pool, dead.Address, false))
			eventually(t, "the silent one is out", isHealthy(pool, silent, false))
			if conn := dial(t, pool); conn.RemoteAddr().String() != alive.Address.String() {
				t.Errorf("connected to %s", conn.RemoteAddr())
			}
		})
	}
}

// deaf is a host that accepts and says nothing, as a stopped process does.
func deaf(t *testing.T) netip.AddrPort {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln.Addr().(*net.TCPAddr).AddrPort()
}

func TestNoHost(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	pool := newPool(t, tenant, carrier.TLS)
	if _, err := pool.Dial(t.Context(), nil, nil); err == nil || !strings.Contains(err.Error(), "no host is known") {
		t.Errorf("without hosts: %v", err)
	}
	pool.SetHosts([]netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("127.0.0.1:2")})
	if _, err := pool.Dial(t.Context(), nil, nil); err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") || !strings.Contains(err.Error(), "127.0.0.1:2") {
		t.Errorf("want what each of them said: %v", err)
	}
}

// TestAuto puts a middlebox in front that lets nothing but TLS through, and takes
// it away.
func TestAuto(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	host := listen(t, tenant)
	box := newMiddlebox(t, host.Address)
	pool := newPool(t, tenant, carrier.Proxy2, carrier.TLS)
	pool.SetHosts([]netip.AddrPort{host.Address, box.address})
	eventually(t, "both are healthy", func() bool {
		return isHealthy(pool, host.Address, true)() && isHealthy(pool, box.address, true)()
	})
	if got := state(pool, host.Address).Carrier; got != carrier.Proxy2 {
		t.Errorf("without a middlebox: %s", got)
	}
	if got := state(pool, box.address).Carrier; got != carrier.TLS {
		t.Errorf("behind the middlebox: %s", got)
	}
	box.forbid(0x16)
	eventually(t, "the other carrier is taken", func() bool {
		h := state(pool, box.address)
		return h.Healthy && h.Carrier == carrier.Proxy2
	})
}

// middlebox forwards connections unless they begin with a certain byte.
type middlebox struct {
	address   netip.AddrPort
	mu        sync.Mutex
	forbidden byte
	open      []net.Conn
}

func newMiddlebox(t *testing.T, to netip.AddrPort) *middlebox {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &middlebox{address: ln.Addr().(*net.TCPAddr).AddrPort(), forbidden: 0x0d}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			running.Go(func() { m.serve(conn, to, &running) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		m.mu.Lock()
		for _, c := range m.open {
			c.Close()
		}
		m.mu.Unlock()
		running.Wait()
	})
	return m
}

// forbid changes the byte and cuts what is open.
func (m *middlebox) forbid(first byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forbidden = first
	for _, c := range m.open {
		c.Close()
	}
}

func (m *middlebox) serve(conn net.Conn, to netip.AddrPort, running *sync.WaitGroup) {
	defer conn.Close()
	far, err := net.Dial("tcp", to.String())
	if err != nil {
		return
	}
	defer far.Close()
	m.mu.Lock()
	m.open = append(m.open, conn, far)
	forbidden := m.forbidden
	m.mu.Unlock()
	first := make([]byte, 1)
	if _, err := io.ReadFull(conn, first); err != nil || first[0] == forbidden {
		return
	}
	if _, err := far.Write(first); err != nil {
		return
	}
	running.Go(func() { io.Copy(conn, far); conn.Close() })
	io.Copy(far, conn)
}

// TestRemovedHost takes a host off the list: its connections go on, new ones do not
// go there.
func TestRemovedHost(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	a, b := listen(t, tenant), listen(t, tenant)
	pool := newPool(t, tenant, carrier.Proxy2)
	pool.SetHosts([]netip.AddrPort{a.Address})
	eventually(t, "it is healthy", isHealthy(pool, a.Address, true))
	conn := dial(t, pool)
	pool.SetHosts([]netip.AddrPort{b.Address})
	eventually(t, "the other is healthy", isHealthy(pool, b.Address, true))
	if closed(conn) {
		t.Error("the connection was closed")
	}
	if other := dial(t, pool); other.RemoteAddr().String() != b.Address.String() {
		t.Errorf("connected to %s", other.RemoteAddr())
	}
}

func TestClose(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	host := listen(t, tenant)
	pool := newPool(t, tenant, carrier.TLS)
	pool.SetHosts([]netip.AddrPort{host.Address})
	conn := dial(t, pool)
	pool.Close()
	if !closed(conn) {
		t.Error("a connection outlives the pool")
	}
	if _, err := pool.Dial(t.Context(), nil, nil); err == nil {
		t.Error("a closed pool dials")
	}
	pool.SetHosts([]netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}) // must start nothing
	if n := len(pool.Hosts()); n != 0 {
		t.Error(fmt.Sprint(n, " hosts after Close"))
	}
}

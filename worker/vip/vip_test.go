// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package vip_test

import (
	"errors"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/tenantd/tenantd/worker/vip"
	"github.com/tenantd/tenantd/worker/workertest/netns"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var address = netip.MustParseAddr("172.20.0.1")

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wire makes a pair of devices, of which the first has an address.
func wire(t *testing.T, name, address string) netlink.Link {
	t.Helper()
	check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-p"}))
	for _, end := range []string{name, name + "-p"} {
		link, err := netlink.LinkByName(end)
		check(t, err)
		check(t, netlink.LinkSetUp(link))
	}
	link, err := netlink.LinkByName(name)
	check(t, err)
	if address != "" {
		parsed, err := netlink.ParseAddr(address)
		check(t, err)
		check(t, netlink.AddrAdd(link, parsed))
	}
	return link
}

func route(t *testing.T, link netlink.Link, to, via string) {
	t.Helper()
	_, network, err := net.ParseCIDR(to)
	check(t, err)
	r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: network, Gw: net.ParseIP(via)}
	if strings.HasPrefix(link.Attrs().Name, "flannel") {
		r.Flags = int(netlink.FLAG_ONLINK) // as that plugin does it
	}
	check(t, netlink.RouteAdd(r))
}

func TestEnsure(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	wire(t, "eth0", "192.0.2.11/24")
	for _, a := range []netip.Addr{address, netip.MustParseAddr("fd00:20::1")} {
		device, err := vip.Ensure(a)
		check(t, err)
		if !vip.Ours(device) {
			t.Errorf("%s is on %s", a, device)
		}
		if again, err := vip.Ensure(a); err != nil || again != device {
			t.Errorf("again: %q, %v", again, err)
		}
		if held, err := vip.Holder(a); err != nil || held != device {
			t.Errorf("holder: %q, %v", held, err)
		}
		// Never a source that the machine chooses by itself.
		if device == "lo" && a.Is4() {
			if scope := scopeOf(t, a); scope != unix.RT_SCOPE_HOST {
				t.Errorf("scope %d on lo, want host", scope)
			}
		}
		ln, err := net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
		if err != nil {
			t.Errorf("listen on it: %v", err)
		} else {
			ln.Close()
		}
		check(t, vip.Release(a))
		check(t, vip.Release(a))
		if held, err := vip.Holder(a); err != nil || held != "" {
			t.Errorf("after release: %q, %v", held, err)
		}
	}
}

func scopeOf(t *testing.T, a netip.Addr) int {
	t.Helper()
	all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	check(t, err)
	for _, held := range all {
		if held.IP.Equal(a.AsSlice()) {
			return held.Scope
		}
	}
	t.Fatalf("%s is nowhere", a)
	return 0
}

// TestComesBack takes the address away behind its back.
func TestComesBack(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	device, err := vip.Ensure(address)
	check(t, err)
	link, err := netlink.LinkByName(device)
	check(t, err)
	addr, err := netlink.ParseAddr(address.String() + "/32")
	check(t, err)
	check(t, netlink.AddrDel(link, addr))
	if again, err := vip.Ensure(address); err != nil || again != device {
		t.Errorf("ensured on %q, %v", again, err)
	}
}

func TestTaken(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	docker := wire(t, "docker0", address.String()+"/16")
	refused := func(want string) {
		t.Helper()
		if device, err := vip.Ensure(address); !errors.Is(err, vip.ErrTaken) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "workerVIP") {
			t.Errorf("%q, %v; want %q and the remedy", device, err, want)
		}
		check(t, vip.Release(address)) // must not take it from there
	}
	refused("on the device docker0")
	addr, err := netlink.ParseAddr(address.String() + "/16")
	check(t, err)
	if held, err := vip.Holder(address); err != nil || held != "docker0" {
		t.Errorf("released from %q, %v", held, err)
	}
	check(t, netlink.AddrDel(docker, addr))
	route(t, docker, "172.16.0.0/12", "")
	refused("172.16.0.0/12")

	// The default route, and the halves of one, are about no network in particular.
	check(t, netlink.RouteDel(&netlink.Route{LinkIndex: docker.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4(172, 16, 0, 0), Mask: net.CIDRMask(12, 32)}}))
	route(t, docker, "0.0.0.0/0", "")
	route(t, docker, "128.0.0.0/1", "")
	if _, err := vip.Ensure(address); err != nil {
		t.Error(err)
	}
}

func TestUnprivileged(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	runtime.LockOSThread() // capabilities are a thread's
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	check(t, unix.Capset(&header, &none[0]))
	if _, err := vip.Ensure(address); err == nil || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Errorf("without the capability: %v", err)
	}
}

// TestGuard has a machine with an uplink, a tunnel, a pod network of its own and
// one that is routed through the machine itself.
func TestGuard(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	uplink := wire(t, "eth0", "10.77.0.11/24")
	route(t, uplink, "0.0.0.0/0", "10.77.0.1")
	overlay := wire(t, "flannel.1", "10.244.1.0/32")
	route(t, overlay, "10.244.2.0/24", "10.244.2.0")
	wire(t, "cni0", "10.244.1.1/24")
	cilium := wire(t, "cilium_host", "10.1.0.1/32")
	route(t, cilium, "10.1.0.0/24", "10.1.0.1")
	pod := wire(t, "cali123", "")
	route(t, pod, "10.2.0.7/32", "")
	if _, err := vip.Ensure(address); err != nil {
		t.Fatal(err)
	}

	guard := vip.NewGuard([]netip.Prefix{netip.MustParsePrefix("10.77.0.99/32")})
	for _, test := range []struct {
		who, address string
		allowed      bool
	}{
		{"the machine itself", "10.77.0.11", true},
		{"the machine by its loopback", "127.0.0.1", true},
		{"the machine by the address", "172.20.0.1", true},
		{"a pod behind a bridge", "10.244.1.5", true},
		{"a pod with a route of its own", "10.2.0.7", true},
		{"a pod behind the machine's own address", "10.1.0.9", true},
		{"a neighbour", "10.77.0.12", false},
		{"a neighbour that is allowed", "10.77.0.99", true},
		{"a neighbour's pod", "10.244.2.5", false},
		{"somebody behind the gateway", "198.51.100.1", false},
	} {
		err := guard.Allow(&net.TCPAddr{IP: net.ParseIP(test.address), Port: 40000})
		if (err == nil) != test.allowed {
			t.Errorf("%s (%s): %v", test.who, test.address, err)
		}
	}
	if err := guard.Allow(&net.UnixAddr{}); err == nil {
		t.Error("a unix socket is nobody's pod")
	}
}

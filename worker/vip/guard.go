// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package vip

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// uplinksFor is how long the machine's uplinks are taken to be the same. Devices
// of pods come and go all the time; uplinks do not.
const uplinksFor = 10 * time.Second

// Guard tells connections of this machine and its pods from those that came in
// from the network. It is safe for concurrent use.
type Guard struct {
	allowed []netip.Prefix // constant

	mu      sync.Mutex // guards what follows
	uplinks map[int]string
	until   time.Time
}

// NewGuard makes a guard that also lets in what comes from allowed.
func NewGuard(allowed []netip.Prefix) *Guard { return &Guard{allowed: allowed} }

// Allow tells whether a connection from remote may be served: its error says why
// not. It looks where the answers to remote go, which is where the handshake's went
// already, so it does not depend on what the connection's packets claim.
func (g *Guard) Allow(remote net.Addr) error {
	tcp, ok := remote.(*net.TCPAddr)
	if !ok {
		return fmt.Errorf("%s is no TCP address", remote)
	}
	source := tcp.AddrPort().Addr().Unmap()
	for _, p := range g.allowed {
		if p.Contains(source) {
			return nil
		}
	}
	routes, err := netlink.RouteGet(source.AsSlice())
	if err != nil {
		return fmt.Errorf("find the route to %s: %w", source, err)
	}
	if len(routes) == 0 {
		return fmt.Errorf("there is no route to %s", source)
	}
	if routes[0].Type == unix.RTN_LOCAL {
		return nil
	}
	uplinks, err := g.current()
	if err != nil {
		return err
	}
	if name, ok := uplinks[routes[0].LinkIndex]; ok {
		return fmt.Errorf("%s is reached by %s, so it is not of this machine; if its pods are there, name their network in allowFrom", source, name)
	}
	return nil
}

func (g *Guard) current() (map[int]string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if now := time.Now(); now.After(g.until) {
		uplinks, err := uplinks()
		if err != nil {
			return nil, err
		}
		g.uplinks, g.until = uplinks, now.Add(uplinksFor)
	}
	return g.uplinks, nil
}

// uplinks returns the devices by which other machines are reached.
func uplinks() (map[int]string, error) {
	links, linkErr := netlink.LinkList()
	routes, routeErr := netlink.RouteList(nil, netlink.FAMILY_ALL)
	addresses, addrErr := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err := errors.Join(linkErr, routeErr, addrErr); err != nil {
		return nil, fmt.Errorf("list the machine's devices and routes: %w", err)
	}
	// Some network plugins route to the pods of the machine through the machine.
	own := map[netip.Addr]bool{}
	for _, a := range addresses {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			own[ip.Unmap()] = true
		}
	}
	through := map[int]bool{}
	note := func(link int, gateway net.IP) {
		if ip, ok := netip.AddrFromSlice(gateway); ok && !own[ip.Unmap()] {
			through[link] = true
		}
	}
	for _, route := range routes {
		note(route.LinkIndex, route.Gw)
		if via, ok := route.Via.(*netlink.Via); ok {
			note(route.LinkIndex, via.Addr)
		}
		for _, hop := range route.MultiPath {
			note(hop.LinkIndex, hop.Gw)
		}
		// A default route without a gateway: a tunnel, or a point-to-point line.
		if ones := 0; route.Dst != nil && route.Type == unix.RTN_UNICAST {
			if ones, _ = route.Dst.Mask.Size(); ones == 0 {
				through[route.LinkIndex] = true
			}
		}
	}
	all := map[int]string{}
	for _, link := range links {
		if a := link.Attrs(); through[a.Index] || hardware(a.Name) {
			all[a.Index] = a.Name
		}
	}
	return all, nil
}

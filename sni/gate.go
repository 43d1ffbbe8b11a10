// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"net"
	"net/netip"
	"sync"
)

// gate counts and bounds the connections that are pending: accepted, and neither
// established nor refused.
type gate struct {
	// Constant after construction.
	limit, perSource int

	running sync.WaitGroup // Serve loops, and what routes connections

	mu      sync.Mutex // guards what follows
	closed  bool
	pending int
	sources map[netip.Addr]int
	conns   map[net.Conn]struct{} // those that close may close
}

func newGate(limit, perSource int) *gate {
	return &gate{
		limit:     limit,
		perSource: perSource,
		sources:   make(map[netip.Addr]int),
		conns:     make(map[net.Conn]struct{}),
	}
}

// begin registers a Serve loop that close is to wait for; false after close.
// Each true is paired with a running.Done.
func (g *gate) begin() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.running.Add(1)
	}
	return !g.closed
}

// enter admits a connection as pending, or says why not. Each admission is
// paired with a leave and a running.Done.
func (g *gate) enter(c net.Conn, source netip.Addr) reason {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return shutdown
	case g.pending >= g.limit:
		return tooManyPending
	case g.sources[source] >= g.perSource: // never for a source that is not valid
		return tooManySource
	}
	g.running.Add(1)
	g.pending++
	if source.IsValid() {
		g.sources[source]++
	}
	g.conns[c] = struct{}{}
	return accepted
}

// attribute counts a pending connection that entered without a source, or says
// why not. It is for the caller to name the source when the connection leaves.
func (g *gate) attribute(source netip.Addr) reason {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.sources[source] >= g.perSource {
		return tooManySource
	}
	g.sources[source]++
	return accepted
}

// reenter counts a connection as pending again that a listener's owner accepts, or
// says why not. It is not for close to wait for.
func (g *gate) reenter(source netip.Addr) reason {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.pending >= g.limit:
		return tooManyPending
	case g.sources[source] >= g.perSource: // never for a source that is not valid
		return tooManySource
	}
	g.pending++
	if source.IsValid() {
		g.sources[source]++
	}
	return accepted
}

// claim takes a connection out of close's reach, because it is about to belong
// to a listener or is refused. It keeps its place. It is false when close was
// faster.
func (g *gate) claim(c net.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.conns, c)
	return !g.closed
}

// leave gives a place back. Source is the one that the connection was counted by.
func (g *gate) leave(source netip.Addr) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pending--
	if !source.IsValid() {
		return
	}
	if g.sources[source]--; g.sources[source] == 0 {
		delete(g.sources, source)
	}
}

// close admits nothing more, closes what no listener has and waits until nothing
// is being routed.
func (g *gate) close() {
	g.mu.Lock()
	g.closed = true
	for c := range g.conns {
		_ = c.Close() // its reader sees the error
	}
	g.mu.Unlock()
	g.running.Wait()
}

// count returns the number of pending connections.
func (g *gate) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.pending
}

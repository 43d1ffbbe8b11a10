// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package sni

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// maxHeld bounds the connections of one name that wait for somebody to have it, as
// DefaultBacklog does those that wait for a listener's owner.
const maxHeld = DefaultBacklog

// askInterval is how often a held connection asks for its name again: who could not
// have its tenant started a moment ago may be able to now.
const askInterval = 500 * time.Millisecond

// Remote says where the tenant of a name is, if it is not here.
type Remote struct {
	// Addresses are the one ports ("host:port") of the hosts that have it, the best
	// first. The next one, if any, is tried when one does not take the connection
	// within a second. IP addresses are better than host names, which cost a look-up.
	Addresses []string

	// Expected says that somebody will have the name within moments, because its
	// tenant moves, or is asleep and will be woken ([Config].Asked). As long as nobody
	// does, connections for it wait, at most 128 of them and until their
	// [Config].HelloTimeout, and count as pending.
	Expected bool
}

// remotes is what other hosts have. It is read without a lock.
type remotes struct {
	names   atomic.Pointer[map[string]Remote]       // by canonical name
	members atomic.Pointer[map[netip.Addr]struct{}] // who may forward to us

	mu   sync.Mutex     // guards what follows
	held map[string]int // connections that wait, by name
}

func newRemotes() *remotes {
	r := &remotes{held: make(map[string]int)}
	r.names.Store(new(map[string]Remote))
	r.members.Store(new(map[netip.Addr]struct{}))
	return r
}

// SetRemotes replaces what other hosts have, by name. Names are compared like those
// of listeners; one that is no DNS name is left out, since no client can ask for
// it. A name that a listener here has leads to that, whatever is said of others.
//
// Connections that were forwarded before go on, see [Router.EndForwards]. The
// router keeps the slices: they must not be changed any more.
func (r *Router) SetRemotes(names map[string]Remote) {
	table := make(map[string]Remote, len(names))
	for name, remote := range names {
		key, why := canonical(name)
		if why != accepted {
			r.log.Warn("another host has a name that is no DNS name", "name", name, "addresses", remote.Addresses)
			continue
		}
		table[key] = remote
	}
	r.remotes.names.Store(&table)
	r.announce()
}

// SetMembers replaces the addresses of the hosts that may forward connections to
// this one, as this host sees them. Whoever connects from there can pass for any
// client, so nobody else may have one of these addresses, behind a NAT for
// instance. Connections that came before stay.
func (r *Router) SetMembers(members []netip.Addr) {
	table := make(map[netip.Addr]struct{}, len(members))
	for _, member := range members {
		if member.IsValid() { // what is not would stand for every unix socket
			table[member.Unmap().WithZone("")] = struct{}{}
		}
	}
	r.remotes.members.Store(&table)
	r.log.Info("members may forward connections", "members", slices.SortedFunc(maps.Keys(table), netip.Addr.Compare))
}

func (r *remotes) isMember(peer netip.Addr) bool {
	_, ok := (*r.members.Load())[peer]
	return ok
}

// announce wakes the connections that are held.
func (r *Router) announce() {
	next := make(chan struct{})
	close(*r.news.Swap(&next))
}

// find returns the listener that a target leads to or, without one, the addresses
// of the hosts that have its name. It waits for either when the name is expected.
func (r *Router) find(a *arrival, to target, deadline time.Time) (*Listener, []string, reason) {
	for {
		news := *r.news.Load() // before the look, which would miss what comes after it
		l, why := r.lookupFor(a, to)
		if l != nil || why != unknownName && why != noProtocol {
			return l, nil, why
		}
		remote := (*r.remotes.names.Load())[to.name]
		switch {
		case len(remote.Addresses) > 0 && !a.forwarded:
			return nil, remote.Addresses, accepted
		case why == noProtocol:
			return nil, nil, why
		case remote.Expected:
			if why := r.hold(a, to.name, news, deadline); why != accepted {
				return nil, nil, why
			}
		case a.forwarded:
			return nil, nil, misrouted
		default:
			return nil, nil, unknownName
		}
	}
}

// hold waits for news of who has a name, and asks for it.
func (r *Router) hold(a *arrival, name string, news <-chan struct{}, deadline time.Time) reason {
	if !r.remotes.hold(name) {
		return backlog
	}
	defer r.remotes.letGo(name)
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	again := time.NewTicker(askInterval)
	defer again.Stop()
	for {
		r.asked(name, a.source)
		select {
		case <-news:
			return accepted
		case <-timer.C:
			return holdTimeout
		case <-r.done.Done():
			return shutdown
		case <-again.C:
		}
	}
}

func (r *remotes) hold(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held[name] >= maxHeld {
		return false
	}
	r.held[name]++
	return true
}

func (r *remotes) letGo(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held[name]--; r.held[name] == 0 {
		delete(r.held, name)
	}
}

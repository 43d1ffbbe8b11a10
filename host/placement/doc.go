// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package placement decides which hosts run which tenants. It is one pure
// function: no I/O, no clock, no memory. The same hosts and tenants, in any order,
// give the same answer on every host and in every version that has these rules.
//
// A tenant stays where it is for as long as that host is alive and not draining,
// unless it is pinned elsewhere: nothing moves for the sake of balance, because a
// move costs its users a reconnect and a slightly uneven load costs nobody
// anything. Who must find a place gets the host with the most room, and within one
// call each decision counts for those behind it.
//
// Package host imports it and carries the decisions out. It imports nothing of ours.
//
//	for _, d := range placement.Place(hosts, tenants) {
//		if d.Changed {
//			log.Info("tenant is placed", "uid", d.UID, "hosts", d.Hosts, "reason", d.Reason)
//		}
//	}
//
// # Rules, in this order
//
//  1. Pins come first, in their order. A pin on a host that is down, drains or is
//     unknown is passed over, and the reason says so.
//  2. Then the hosts that the tenant is on, in their order, if they are alive and
//     not draining.
//  3. Replicas still missing go to hosts that the tenant is not on: first to those
//     that it fits on, of these to zones that it is not in, of these to the
//     one least loaded with it, which is the sum of weights by capacity. A
//     rendezvous hash of tenant and host breaks ties, so that equal hosts share
//     equal tenants and every caller agrees how. Heavy tenants choose first.
//  4. Fewer hosts than replicas: as many as there are.
//  5. No host at all: the tenant stays where it is, on draining hosts if some of
//     its hosts are, so that it is served for as long as they are.
package placement

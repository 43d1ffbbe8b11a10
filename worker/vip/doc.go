// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package vip keeps the address, on this machine alone, where pods find the API
// server, and tells who may connect to it. Linux only.
//
// The address sits on a device of its own, [Device], so that the machine never
// chooses it as the source of what it sends. Where the kernel has no dummy devices
// it sits on lo with scope host, for the same reason. It is there before any pod
// network, outlives the process, and goes with [Release] alone: pods' connections
// would otherwise be routed out of the machine while tenant-proxy restarts.
//
// Every worker of a tenant has the same address. A neighbour could route it
// through this machine and use it as a relay, so a [Guard] refuses connections
// that came in from the network: those whose answers go out by an uplink. An
// uplink is a device that has a route through another machine, or that has
// hardware under it. Pods of this machine are behind neither.
//
// Packages worker, check and cmd/tenant-proxy import it. It imports nothing of
// ours. Everything here needs CAP_NET_ADMIN, but for looking.
//
//	where, err := vip.Ensure(netip.MustParseAddr("172.20.0.1"))
//	if err != nil {
//		return err // in use by somebody else, or no permission
//	}
//	log.Info("the address is ours", "device", where)
//	guard := vip.NewGuard(nil)
//	if err := guard.Allow(conn.RemoteAddr()); err != nil {
//		conn.Close()
//	}
package vip

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package storage runs the one etcd that all tenants share, alone on a host or as a member of a cluster of hosts, and
// keeps the tenants out of each other's way in it.
//
// It owns etcd's process-within-the-process, the unix socket to it, the port for its peers, a pool of clients, the
// members, the namespace of each tenant, what each tenant stores and may store, snapshots, and the maintenance of the
// file: compaction, defragmentation and recovery from a full disk quota. It imports nothing of tenantd. host opens it;
// tenant and pki use it through interfaces of their own.
//
//	store, err := storage.Open(ctx, storage.Config{Dir: "/var/lib/tenantd/etcd", Logger: log})
//	if err != nil {
//		return err
//	}
//	defer store.Close()
//	store.SetLimits(tenant.UID, storage.Limits{Bytes: 1 << 30})
//	prefix, err := store.Prefix(tenant.UID)     // "/tenants/<uid>/"
//	_, err = store.Conn().Put(ctx, prefix+"registry/pods/default/a", object)
//	if refusal, ok := storage.IsQuota(err); ok {
//		log.Warn("tenant is full", "tenant", refusal.Tenant, "limit", refusal.Cause, "used", refusal.Used)
//	}
//	err = <-store.Err()                         // etcd failed: close, and restart the process
//
// # Limits
//
// Every client's request passes a gRPC interceptor. A put that would take a tenant beyond one of its [Limits] (bytes of
// live keys and values, number of objects, size of one, number and bytes of CustomResourceDefinitions) is refused with
// ResourceExhausted; see [QuotaError]. Updates of existing objects may go a little beyond a limit of bytes, and
// those that do not grow always pass, because deleting an object or renewing a node's lease is an update first. Where
// a limit is lowered, that little begins at what the tenant has, and sinks with it. Reads, deletes and compactions
// are never refused, nor is what a control plane writes in order to start: all that is not below registry/, and its
// own bookkeeping there. What has been overwritten but not compacted away is counted
// apart: above the quota's worth of it history is compacted early, above twice that further rewriting is refused for
// the seconds until it is. Where all tenants together fill the backend, space is freed from 85 % on and tenants are
// refused from 95 % on (updates 97 %), which leaves the rest to the host, whose keys are all those not under a
// tenant's prefix. etcd's own alarm, at 100 %, should so never be raised, and is cleared when there is space again.
//
// # Hosts
//
// With [Config].Peers a store is a member of a cluster. A host is added by one that is there and joins as a learner,
// which serves its clients as any member does. It may be let vote when it has caught up:
//
//	initial, err := store.AddLearner(ctx, "b", "10.0.0.2:2380")       // on a
//	peers.Initial = initial
//	store, err := storage.Open(ctx, storage.Config{Dir: dir, Name: "b", Peers: peers})      // on b
//	for errors.Is(err, storage.ErrNotCaughtUp) { err = store.Promote(ctx, "b") }            // on any, with a pause
//
// Each member counts what it has done itself, so the books of all are equal but for those moments that one is behind.
// Limits are decided on by the member that a write comes through. One that is far behind, and any where a tenant would
// have more than seven eighths of a limit, first catches up with what all the others had acknowledged. So writers
// through several members pass a limit by no more than what they have in flight at the same time, beyond an eighth of
// it. What a tenant may store is to be set on each member through which it writes.
//
// The leader compacts for all; a member whose tenant or backend is pressed does it early, which leaves MinHistory as
// ever. A member that was away for longer than CompactInterval ends its watches when it is back. A member that starts
// does not know how much of what it finds is history, and counts it as none.
//
// Without a quorum, serializable reads and watches go on with what this member has. Writes and linearizable reads are
// refused at once (see [IsNoQuorum]), from when no leader has been known for two elections; those that were on their
// way then are given up, and such a write says that it is undecided. Until then they wait for a leader, so that an
// election is a delay and no error. A member without a vote asks the leader whether it is there, since it takes no part
// in elections; its watches that require a leader end with the quorum. It ends when hosts are back and is no failure of
// the store. Where the others will not be back, [Restore] begins a new cluster with what [Store.Snapshot] wrote, which
// needs no quorum.
//
// # Pauses
//
// A defragmentation stops reads and writes while it copies the live data. Writes wait outside of etcd meanwhile, so
// none fails unless its own deadline passes. 200 MiB take 1 s with fsync on a virtual machine's disk, so the default
// of [DefaultDefragMaxBytes] bounds the pause to about 5 s; only a backend that is nearly full is defragmented beyond.
// Members take turns by a lock in etcd, and the others go on, but for one thing: while the leader is at it nobody's
// leases are renewed, which is another reason for the bound. An etcd that refuses writes for want of space cannot give
// the lock; then there are no writes to hold up, and each goes ahead.
//
// # Trust
//
// Whoever opens the socket reads and writes everything of every tenant: its directory is private to this user, and no
// TCP port is opened for clients. One is opened for peers, if there are to be any: TLS 1.3, certificates by the
// authority of [PeerConfig] only, both ways. A peer is trusted with everything, since it has all the data and a vote.
// etcd's HTTP endpoints (/metrics, /health, /version) are on the same socket; its REST gateway and profiling are off.
//
// # Failure
//
// Writes are on the disks of most of the voting members before they are acknowledged. Where etcd ends a process by a
// fatal or panic log line, it ends one goroutine here and [Store.Err] delivers the reason; the store then only serves to
// be closed. A panic of etcd's that is not logged first still ends the process.
package storage

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package gossip tells each host which hosts there are, which of them live, and
// what each says of itself: its addresses, its load and which tenants it serves.
// Membership and detection of failures are hashicorp/memberlist's.
//
// All of it is rumour. It is good for routing at once and for noticing a death
// within seconds; what must be true is in etcd, and whoever acts on a death holds
// the lease there first. Two hosts may see different things at one time.
//
// Package host imports it. It imports nothing of ours.
//
//	g, err := gossip.Start(gossip.Config{
//		Name:         "host-a",
//		Installation: "k8s.example.com",
//		Key:          key, // 32 bytes
//		Listen:       "192.0.2.1:7946",
//		Record:       gossip.Record{Address: "192.0.2.1:443"},
//		Changed:      wake, // whoever looks at g.Hosts
//	})
//	if err != nil {
//		return err
//	}
//	defer g.Close()
//	_, err = g.Join(ctx, []string{"192.0.2.2:7946"})
//
// # How records spread
//
// A record does not fit into a packet once a host has a dozen tenants. What is
// gossiped is a digest of 100 bytes: whose record, and its version, which is the
// time that the host started and a counter. Who hears of a newer version fetches
// the record over TCP from the host that it heard it from, and only then gossips
// the digest on, as one that has it. So a change takes about a tenth of a second for
// each time that the hosts it is known to grow fivefold, and no host of many sends its
// record to all the others by itself. Push/pull exchanges all digests every ten
// seconds, and repairs what lost packets left. The larger version wins; nobody overwrites a host's own record,
// and a host that hears of a version of it from before a clock was set back takes a
// larger one.
//
// # Detection
//
// Each host probes one other every 500 ms: a packet, after 200 ms three hosts asked
// to probe as well and a TCP connection, at 500 ms suspicion. Suspicion becomes
// death after 1.5 s if another host confirms it (of three hosts or more), and after
// 6 s if none does, in which time the suspect has heard of it and can object. A killed
// host is dead after 0.5 to 1 s until a probe misses it and 1.5 s: 2 to 3 s. A host must
// stand still for 2 s to be thought dead, which is longer than a collector's pause or a
// processor's queue, and a host that is slow itself notices by its own late probes,
// and waits longer before it suspects others (up to eight times).
//
// A host that died is looked for every ten seconds until [Gossip.Forget], so that
// a partition heals however long it lasted.
//
// # What a stranger can do
//
// Packets and streams are sealed with AES-256-GCM and carry the installation's name.
// Whoever does not have the key is dropped, counted and logged at most once a
// second; it can hold 128 connections (32 from one address) of at most 2 MiB for
// five seconds. Whoever has the key is a host: memberlist trusts lengths that hosts
// tell it. Records are checked nevertheless, because hosts of other versions send them.
package gossip

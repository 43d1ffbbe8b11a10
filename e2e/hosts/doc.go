// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hosts tests one installation of several hosts: joining, routing, moving,
// and what happens when hosts are killed, frozen, cut off, restarted or upgraded. Hosts
// are the programs that make has built. It imports no package of ours but the API's
// types, and proc, which knows nothing of tenantd.
//
// `make e2e-hosts` builds the programs into bin and runs these tests, as root. The
// test binary starts itself again in a lab, which is a PID, mount and network
// namespace of its own, and all else lives in there. When the lab's first process
// ends, however it ends, the kernel ends all others and takes down the networks.
//
//	lab            a bridge, 10.78.0.1: clients are here
//	├── host-a     tenantd in a network namespace, 10.78.0.11:443
//	├── host-b     10.78.0.12
//	└── host-c     10.78.0.13, and up to three more where a case is about that
//
// All cases share one installation, which each finds well: `go test -tags e2e -run
// 'TestHosts/(Join|Kill)' ./e2e/hosts` runs one of them. Join is always among them: it
// makes the installation.
//
// Slow and full disks are real file systems in files, which are mounted by loop devices.
// Machines do not lose power here: a host that is killed loses its process, and what
// it wrote to files stays. Workers take no part; package workers has them.
//
// # Versions
//
// Hosts are upgraded to bin/tenantd-next, one by one. That is this tenantd with a field
// more in all that hosts say to each other and keep for each other: see package next.
//
// # Histories
//
// During every fault clients write and read registers, which are ConfigMaps, in
// several tenants: one client at each host of each tenant, each request with a limit
// of two seconds. What they saw is checked for linearizability: no acknowledged write
// is lost, and no read, be it a GET or a LIST out of the watch cache, is older than
// what somebody has been told before. A write that failed may have happened or not,
// at any time since.
//
// # Figures
//
// Nothing is asserted about time. How long joins, moves and failovers took is logged;
// `make bench-hosts` measures them over 30 rounds.
package hosts

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package heap sets how much a process may allocate before the garbage collector
// runs. The heap of many idle control planes is large and hardly changes: there,
// collecting soon costs little and saves memory. With one tenant that is busy on a
// host with few, it would collect all of them several times a second, at a fifth of
// the processor. So what may be allocated between two collections is a share of
// the heap, and more for as long as much is allocated.
//
// Package main of a daemon imports it. It imports nothing of ours.
//
//	func main() {
//		heap.Pace(50)
//		…
//	}
package heap

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package relay copies bytes between a client and a host, both ways, until both
// are done. It looks at none of them.
//
// A connection that waits holds two goroutines and no buffer: a buffer comes from
// a pool when there is something to put into it. A worker has hundreds of watches
// that say nothing for minutes, and they are what tenant-proxy's memory is.
//
// Packages carrier, balance and worker import it. It imports nothing of ours.
//
//	var buffers relay.Buffers // one per process
//	accepted, err := listener.AcceptTCP()
//	if err != nil {
//		return err
//	}
//	client, err := buffers.TCP(accepted)
//	if err != nil {
//		return err
//	}
//	relay.Join(client, host, func(moved relay.Moved, err error) {
//		log.Debug("connection ended", "up", moved.Up, "down", moved.Down, "error", err)
//	})
package relay

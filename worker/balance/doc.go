// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package balance chooses the host for each connection. It asks every host again
// and again whether the tenant's API server is ready there, by the very way that
// connections go, and keeps for each host the first carrier by which it was.
//
// A host is out after two failures in a row, about four seconds after it last
// answered in the usual case and under nine at worst, and in again after one
// success. Its connections are closed when it goes out, but only if another host
// is in: half a path is better than none. With no host in, every host is tried.
//
// Package worker imports it. It imports packages api, carrier and relay of ours.
//
//	pool := balance.New(balance.Config{
//		Hostname: "acme.k8s.example.com",
//		RootCAs:  tenantCA,
//		Carriers: []*carrier.Carrier{way},
//	})
//	defer pool.Close()
//	pool.SetHosts(addresses)
//	conn, err := pool.Dial(ctx, accepted.RemoteAddr(), accepted.LocalAddr())
package balance

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package carrier brings a connection from the worker to a host, in one of two
// ways that a host accepts on its one port:
//
//   - [TLS] wraps it into an outer TLS connection with the tenant's name and a
//     protocol (ALPN) of its own. What is on the way sees TLS, and the host may
//     see the node's certificate. It costs a round trip and a handshake more per
//     connection, and encrypting everything twice.
//   - [Proxy2] puts a PROXY protocol v2 header in front that has the tenant's name.
//     It costs nothing, and needs a network that lets unknown first bytes through.
//
// The connection inside is between the client and the tenant's API server in both,
// usually TLS of their own that this package never opens.
//
// Packages balance and worker import it.
//
//	way, err := carrier.New(carrier.Config{
//		Kind:     carrier.TLS,
//		Hostname: "acme.k8s.example.com",
//		RootCAs:  tenantCA,
//		Buffers:  &buffers,
//	})
//	if err != nil {
//		return err
//	}
//	conn, err := way.Dial(ctx, host, client.RemoteAddr(), client.LocalAddr())
package carrier

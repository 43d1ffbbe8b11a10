// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package api asks the tenant's API server the few things that a worker has to
// know: is it ready, which hosts are there, and which addresses has this node.
//
// It is three GET requests by net/http, because tenant-proxy is to stay small:
// a Kubernetes client would be the larger part of it.
//
// Packages balance, worker and check import it. It imports nothing of ours.
//
//	client := api.New(api.Config{
//		Hostname:             "acme.k8s.example.com",
//		RootCAs:              tenantCA,
//		GetClientCertificate: identity.Present(tenantCA),
//		Dial:                 func(ctx context.Context) (net.Conn, error) { return pool.Dial(ctx, nil, nil) },
//	})
//	defer client.Close()
//	hosts, err := client.Hosts(ctx)
package api

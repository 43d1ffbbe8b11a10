// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package limit bounds what the clients of one control plane take of the process
// that it shares with others. Every tenant's administrator can exempt himself from
// upstream's priority and fairness, so this comes before authentication and asks
// nothing that a tenant can change.
//
// It owns the counting of requests and the pausing of connections. It knows
// neither the Tenant object (package host) nor upstream's assembly (package
// tenant, its importer).
//
//	gate := limit.NewGate(0) // one per process
//	limiter := limit.New("acme", limit.Config{}, gate)
//	handler := limiter.Handler(api, filters, requestInfo, longRunning)
//	server.Serve(listener) // yields connections made with limit.Public and limit.Own
//
// What runs inside of a request may charge it for memory ([Charge]) and say that it
// waits for something that needs no processor here ([Outside]).
package limit

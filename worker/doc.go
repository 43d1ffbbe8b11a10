// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package worker is tenant-proxy: what a worker has so that its pods reach the
// tenant's API server and the API server reaches its kubelet.
//
// A pod connects to the address that the cluster's kubernetes Service leads to. It
// is on every worker (package vip). Each connection goes on to one of the hosts
// (packages hosts, balance), by a carrier that names the tenant (package carrier),
// byte for byte (package relay): TLS is between the pod and the API server, so
// client certificates work and no worker has a serving key. The tunnel's agent
// (package konnectivity/agent) runs beside it with the kubelet's certificate.
//
// Package cmd/tenant-proxy imports it. It imports the packages below it, and
// konnectivity/agent.
//
//	cfg, err := config.Load(config.DefaultPath)
//	if err != nil {
//		return err
//	}
//	w, err := worker.New(worker.Config{File: cfg, Logger: logger})
//	if err != nil {
//		return err
//	}
//	return w.Run(ctx)
//
// # What ends what
//
// Run holds one listener, one goroutine per host that probes, one that learns the
// hosts, one that keeps the address, one for the tunnel, and two for each
// connection. Nothing that goes wrong with the hosts or the tunnel ends Run: the
// path to the API server must not depend on the tunnel, nor the process on either.
// Run ends with its context, or after [Worker.Drain], or when it cannot have its
// address or its ports.
package worker

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package tenant runs one Kubernetes control plane inside this process: an API
// server with CRDs and aggregation, the controllers and the scheduler, put
// together from upstream's exported parts. What is equal in all control planes
// of a process lives once, in a [Platform].
//
// It owns the assembly of upstream, the objects a control plane needs before
// anyone can use it, and the order in which it starts and stops. It owns
// neither keys (package pki), nor bytes on disk (package storage), nor the port
// (package sni), nor the decision what runs where (package host), which is its
// only importer.
//
//	platform, err := tenant.NewPlatform(tenant.PlatformConfig{Storage: store})
//	cp, err := tenant.New(tenant.Config{
//		Platform: platform, Name: "acme", UID: uid, Hostname: "acme.k8s.example.com",
//		Authority: authority, Listener: listener,
//	})
//	go func() { err = cp.Run(ctx) }() // returns after ctx is done and all has stopped
//	<-cp.Ready()
//
// A control plane shares a process with others that belong to other people.
// Nothing in it may end the process: upstream's exits, post-start hooks and
// panics are turned into the failure of one Run, which its caller repeats.
package tenant

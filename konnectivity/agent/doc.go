// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package agent is the worker's end of the tunnel: through it a tenant's API
// server, which cannot reach the worker's network, reaches kubelets, pods and
// services. It keeps a TLS connection to each host, proves itself with the
// kubelet's client certificate and connects to what the API server asks for.
//
// Package worker imports it. It links neither the tunnel's server nor anything of
// Kubernetes but the tunnel's protocol.
//
//	a, err := agent.New(agent.Config{
//		Node:        "node-a",
//		Addresses:   []netip.Addr{netip.MustParseAddr("10.0.0.7")},
//		Servers:     func() []string { return []string{"192.0.2.1:443", "192.0.2.2:443"} },
//		ServerName:  "acme.k8s.example.com",
//		RootCAs:     readAuthority,
//		Certificate: readKubeletCertificate,
//	})
//	if err != nil {
//		return err
//	}
//	return a.Run(ctx)
//
// # Why not upstream's agent
//
// It dials whatever it is asked to, the cloud's metadata service included; reads
// its certificate once; stops reading for every connection while one target is
// slow; and closes a connection in both directions when one ends, with what was
// still queued. The protocol is upstream's, with one addition: each connection
// travels on a gRPC stream of its own, so that HTTP/2's flow control holds up that
// one alone and half-close has a meaning. Package konnectivity says how.
//
// # Which hosts
//
// Each of a tenant's API servers has a tunnel server, which needs a tunnel of every
// node. Hosts that serve the tenant answer themselves, the others forward to one that
// does. So the agent dials all, and finds all servers. Three ways to one server are
// enough: a host that is a fourth is left, and tried again every 30 s. A host that
// begins to serve a tenant ends the tunnels that it has forwarded, which come back at
// once and stay.
//
// # When it reconnects
//
// A tunnel that ends is opened again after 0.1 to 2 s, for ever; a server that
// vanished is noticed in 15 s. When the kubelet's certificate is renewed, a new
// tunnel is opened with it first. The old one serves what is open on it, at the
// longest until the old certificate expires.
package agent

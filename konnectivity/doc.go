// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package konnectivity is a tenant's end of the tunnel into its cluster's network.
// Agents on the workers connect to it; the tenant's API server dials kubelets,
// pods and services through them. There is one [Server] per tenant, and nothing
// of one is shared with another.
//
// Package tenant imports it. It imports nothing of ours and neither
// k8s.io/kubernetes nor k8s.io/apiserver; its agent is package konnectivity/agent,
// which does not link it.
//
//	tunnel, err := konnectivity.New(konnectivity.Config{
//		Tenant:            "acme",
//		TLS:               &tls.Config{GetCertificate: leaf.Get, ClientCAs: clientCAs},
//		AuthenticateToken: reviewToken,
//		NodeAddresses:     nodeAddresses,
//		Logger:            logger,
//	})
//	if err != nil {
//		return err
//	}
//	defer tunnel.Close()
//	go tunnel.Serve(agents) // connections with ALPN "konnectivity"
//	transport := &http.Transport{DialContext: tunnel.Dial}
//
// # Why not upstream's server
//
// The protocol and its messages are upstream's (apiserver-network-proxy v0.36.0),
// and its agent works unchanged. Its ProxyServer is not used: a packet without
// the payload that its type promises ends the process; connections are found by
// the id that an agent claims, so that one agent can speak for another of the
// same id, and one's end takes away the other's connections; dials in progress
// survive their agent; one reader that stops holds up every connection of its
// agent, and then ends them; its connections have no deadlines; its metrics are
// the process's. Behind checks of ours only the first of these would be gone.
//
// # One connection, one stream
//
// Upstream carries all of an agent's connections on one gRPC stream. The protocol
// has no way to pause one of them. Our agent answers a dial by opening another
// stream for it (see internal/wire, Dial), and what is slow waits in HTTP/2's flow
// control, 256 KiB of each connection. With upstream's agent the server keeps 256
// KiB for a slow reader. When that is full, it holds up the agent as long as the
// reader reads, so that a large log over a slow line still arrives, and ends the
// connection with [ErrSlowReader] when the reader takes nothing for 2 s.
//
// # Who is admitted
//
// An agent with a client certificate must be a kubelet (O=system:nodes,
// CN=system:node:X, signed by ClientCAs) and call itself X. Without a certificate
// it needs a token that AuthenticateToken accepts, and its id is a mere claim.
// Nobody else gets past the handshake or the first message.
//
// Claims to be a certain address (ipv4=, ipv6=, host=) are honoured as far as
// they are addresses of the Node named like the agent; others are ignored, not
// refused, because a node's addresses often appear after its agent. Claims of
// networks (cidr=, default-route=) are ignored too.
//
// A session ends when its certificate expires, or when its token cannot be
// reviewed twice in a row: for upstream's agent, the lifetime of its projected
// token bounds that of an exec session. Our agent renews its connection with its
// certificate beforehand.
//
// # Which agent
//
//   - An address that a certified agent serves goes to that agent and to no other.
//   - Otherwise, to an agent with a token that says it serves the address.
//   - Otherwise, to any, at random: pod and service addresses.
//
// An agent that drains, or that left its last dial unanswered, comes after the
// others. A failed dial is tried once more through another agent, except for the
// first case; data never is. Of several connections of one agent the newest gets
// the dials, the older ones finish.
//
// # What an agent can cost
//
//	a packet that contradicts itself, or one over 256 KiB   its connection
//	memory                                                  MaxStreams times 448 KiB
//	connections                                             MaxAgents, 16 for one identity
//	reviews of strangers' tokens                            16 at a time, 10 s each
//
// The 448 KiB are 256 under way, 64 received, and 128 to be sent, half of them in
// gRPC. Sockets that have not been authenticated are bounded by the listener's
// owner; each is closed after 10 s in the handshake and 15 s without a stream.
package konnectivity

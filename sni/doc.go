// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package sni owns the one port. It accepts TCP connections, reads each one's
// TLS ClientHello for the name in it (SNI) and hands the connection, with the
// bytes it read put back in front, to the listener registered for that name.
// Listeners of one tenant may share a name and be told apart by the protocols
// that the client offers (ALPN). A PROXY header may name the tenant instead. What
// no listener has may be forwarded to another host.
//
// TLS ends in whoever accepts from that listener: this package holds no key and
// sees no plaintext. A handed-over connection costs no further goroutine, copy
// or hop; its reads and writes go straight to the socket. All that its owner has
// to tell is when the TLS handshake is over, which net/http and gRPC do unasked.
//
// Package host imports it to wire tenants to the port. It imports nothing of
// ours and nothing of Kubernetes.
//
//	router := sni.New(sni.Config{Logger: logger})
//	defer router.Close()
//	acme, err := router.Listen(sni.ListenConfig{
//		Tenant: "acme",
//		Names:  []string{"acme.k8s.example.com"},
//	})
//	if err != nil {
//		return err
//	}
//	server := &http.Server{Handler: handler, ReadHeaderTimeout: 32 * time.Second}
//	go server.ServeTLS(acme, certFile, keyFile)
//	return router.Serve(ctx, port443)
//
// # PROXY headers
//
// A connection may begin with a PROXY protocol header, version 2, of at most 512
// bytes, for TCP over IPv4 or IPv6. It is taken out; what its owner reads begins
// behind it. If the header has a checksum, it must be right.
//
// A header with an authority (extension 0x02) names the tenant, and may come from
// anybody, because it says no more than the name in a ClientHello would. The
// connection goes to that name's listener without protocols, whatever follows.
// The addresses in it are claims: they are logged, and RemoteAddr stays the peer.
//
// A header without one is taken only from [Config].TrustedProxies, load balancers
// that say whose connection they forward. That address is then the client's, in
// RemoteAddr and for MaxPendingPerSource, also when such a header has an
// authority. Behind it comes what the client sent: a ClientHello, or one header
// more, with an authority. Members' headers are described under Forwarding.
//
// # Forwarding
//
// A name that no listener here has is looked up in the table of [Router.SetRemotes],
// which is replaced as a whole. Its connections are dialled on to the first of its
// hosts that takes them: a PROXY header (version 2) with the client's address, and
// with the authority if a header named the tenant; then the bytes that the client
// has sent; then bytes in both directions, moved by the kernel (splice) where it can.
// What is open stays where it is when the table changes.
//
// The header has an extension of ours (0xE5, "tenantd forwarded"), which is taken
// from the addresses of [Router.SetMembers] only, and then speaks for the client as
// a trusted proxy's does: the other host counts and bounds it by its own address,
// there it is pending until its handshake is over, and from there it is ended. A
// connection that has it goes to a listener or nowhere: there is one hop at most,
// whatever the tables say.
//
// Here it is pending until it is on its way, and then has a place of
// [Config].MaxForwarded and MaxForwardedPerName, of each of which one source gets
// SourceShare. It costs two goroutines and two sockets, and a buffer or a pipe for a
// direction only while that moves bytes: by splice what is larger than a TLS record.
// The end of one direction is passed on, and the other goes on: without a bound when
// it is the client that has ended, for 10 s when it is the tenant, so that a client
// that was turned away there cannot stay here. A peer that is silent is asked whether it is there after 30 s and given up after a minute; a
// host that is known to be dead need not be waited for: [Router.EndForwards].
//
// A name may be said to be expected: its connections wait, at most 128 of them and
// until their HelloTimeout, for a listener or a host that has it. [Config].Asked is
// told of those that wait, so that their tenant can be woken or started first.
//
// # What a client that shows nothing can cost
//
// A connection is pending from accept until its TLS handshake is over or it is
// refused, but for the time that it waits for its owner. [Config].MaxPending bounds how many there are, MaxPendingPerSource how
// many of one source, which is checked before anything is read or allocated for
// the connection, or as soon as a trusted proxy has said whose it is.
//
// Until it is routed, for at most [Config].HelloTimeout, it holds one goroutine, a
// 2 KiB buffer from a pool and its socket. The buffer grows only with bytes that
// have arrived, never with lengths that were claimed, holds no PROXY header once
// that is read, and ends at 26,628 bytes: a ClientHello of 16 KiB with its
// handshake header, and the headers of 2,048 records. A hello in several records
// costs a copy of at most 16 KiB more for as long as it takes to route it.
//
// Then it waits in its listener's backlog, which is bounded by itself, so that the
// clients of a tenant that is starting keep nobody else out, until its owner
// accepts it and shakes hands with it, for at most [Config].HandshakeTimeout. A
// timer, not a goroutine, ends that. What
// it holds is its owner's choice; the router cuts it after 32 KiB more from the
// client, where crypto/tls would take 256 KiB of certificates. A TLS server in Go
// holds some 28 KiB for each, and at most 100 KiB (BenchmarkPending measures it).
//
// Afterwards it counts towards the MaxConns of its listener alone, of which one
// source has at most [Config].SourceShare.
//
// # What a refused client sees
//
//	reason                   meaning                                      answer
//	unknown_name             no listener has this name                    alert unrecognized_name
//	no_protocol              the name's listeners have other Protocols    alert no_application_protocol
//	no_name                  no SNI, or an IP address in it               alert unrecognized_name
//	unreachable              no host that has the name takes it           none
//	misrouted                from a member, and no listener has the name  none
//	hold_timeout             nobody has the expected name in time         none
//	connections              the listener has MaxConns open               alert internal_error
//	connections_from_source  its source has its SourceShare of them       alert internal_error
//	backlog                  the listener has Backlog waiting, or the     alert internal_error
//	                         expected name 128
//	too_many_forwarded       MaxForwarded reached                         alert internal_error
//	too_many_forwarded_to_name      MaxForwardedPerName reached           alert internal_error
//	too_many_forwarded_from_source  its source has its SourceShare        alert internal_error
//	                                of either
//	malformed                TLS, but the hello contradicts itself        alert decode_error
//	too_large                over 16 KiB, or in over 2,048 records        alert internal_error
//	plain_http               an HTTP request without TLS                  HTTP 400
//	not_tls                  anything else, SSLv2 included                none
//	timeout                  no complete hello within HelloTimeout        none
//	eof                      the client left first                        none
//	too_many_pending         MaxPending reached                           none
//	too_many_from_source     MaxPendingPerSource reached                  none
//	handshake_timeout        the handshake outlasts HandshakeTimeout      none
//	handshake_too_large      over 32 KiB behind the hello                 none
//	shutdown                 Router or Listener closed meanwhile          none
//	proxy_malformed          a PROXY header that cannot be, or no TCP     none
//	proxy_too_large          over 512 bytes of it                         none
//	proxy_untrusted          no authority in it, nor a trusted proxy      none
//	proxy_local              a load balancer's health check (LOCAL)       none
//	proxy_v1                 version 1, which is text                     none
//	forwarded_untrusted      says that a member forwards it, from none    none
//
// Where another host was to answer there is no alert either: clients take an alert
// for a server's last word, and an end without one for a fault of the network, after
// which they try again.
//
// A connection whose tenant was named by a PROXY header gets no answer at all: it
// is whatever is behind the proxy that would be spoken to. The reason is the label
// of tenantd_router_connections_refused_total. An answer is followed by a
// half-close and a short wait for the client to leave, because closing a socket
// with unread bytes in it resets the connection and the client's kernel then
// throws the answer away.
package sni

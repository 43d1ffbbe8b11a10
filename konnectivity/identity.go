// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

const (
	// maxName is the longest name that Kubernetes gives a node.
	maxName = 253

	// maxClaims is what an agent may claim: a node has few addresses.
	maxClaims = 64

	// reviewTimeout and maxReviews bound what tokens of strangers cost. Those of
	// connected agents do not queue behind them.
	reviewTimeout = 10 * time.Second
	maxReviews    = 16
)

// identity is who an agent is. A name that a certificate proves and the same name
// that a token's bearer merely says are two identities.
type identity struct {
	name   string
	proven bool
}

// credential is what an identity rests on.
type credential struct {
	expires time.Time // the certificate's; zero for a token
	token   string    // never logged
}

// harden returns base with what admits agents and nobody else.
func harden(base *tls.Config) *tls.Config {
	c := base.Clone()
	c.ClientAuth = tls.VerifyClientCertIfGiven
	c.MinVersion = max(c.MinVersion, tls.VersionTLS12)
	c.NextProtos = []string{"h2"}
	// Agents connect once a day; a ticket would only outlive what it was given for.
	c.SessionTicketsDisabled = true
	c.VerifyConnection = func(state tls.ConnectionState) error {
		if base.VerifyConnection != nil {
			if err := base.VerifyConnection(state); err != nil {
				return err
			}
		}
		if len(state.PeerCertificates) == 0 {
			return nil // a token will have to do
		}
		_, err := nodeOf(state.PeerCertificates[0])
		return err
	}
	if base.GetConfigForClient != nil {
		c.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			other, err := base.GetConfigForClient(hello)
			if other == nil || err != nil {
				return nil, err
			}
			return harden(other), nil
		}
	}
	return c
}

// nodeOf returns the name of the node that a verified certificate belongs to.
func nodeOf(cert *x509.Certificate) (string, error) {
	name, ok := strings.CutPrefix(cert.Subject.CommonName, "system:node:")
	if !ok || name == "" || !slices.Contains(cert.Subject.Organization, "system:nodes") {
		return "", fmt.Errorf("client certificate of %s is no kubelet's: a tunnel agent needs CN=system:node:<name> and O=system:nodes",
			wire.Text(cert.Subject.String()))
	}
	return name, nil
}

// identify returns who opened a stream and what says so. The certificate, if
// there is one, was verified in the handshake.
func (s *Server) identify(ctx context.Context) (identity, credential, error) {
	name, err := single(ctx, wire.AgentID)
	if err != nil {
		return identity{}, credential{}, err
	}
	if name == "" || len(name) > maxName || wire.Text(name) != name {
		return identity{}, credential{}, status.Errorf(codes.InvalidArgument, "agent id is not of 1 to %d printable characters: set it to the node's name", maxName)
	}
	if cert := certificate(ctx); cert != nil {
		node, err := nodeOf(cert)
		if err != nil {
			return identity{}, credential{}, status.Error(codes.PermissionDenied, err.Error())
		}
		if name != node {
			return identity{}, credential{}, status.Errorf(codes.PermissionDenied, "agent id %q with the certificate of node %q: set the id to the node's name", name, node)
		}
		return identity{node, true}, credential{expires: cert.NotAfter}, nil
	}
	bearer, err := single(ctx, wire.Authorization)
	if err != nil {
		return identity{}, credential{}, err
	}
	token, ok := strings.CutPrefix(bearer, "Bearer ")
	if !ok {
		return identity{}, credential{}, status.Error(codes.Unauthenticated, "neither a client certificate nor a bearer token: give the agent the kubelet's certificate or a service-account token of the tunnel's audience")
	}
	proof := credential{token: strings.TrimSpace(token)}
	select {
	case s.reviews <- struct{}{}:
		defer func() { <-s.reviews }()
	case <-ctx.Done():
		return identity{}, credential{}, status.FromContextError(ctx.Err()).Err()
	}
	if err := s.review(ctx, proof); err != nil {
		return identity{}, credential{}, status.Error(codes.Unauthenticated, err.Error())
	}
	return identity{name, false}, proof, nil
}

// review says whether a credential holds (still).
func (s *Server) review(ctx context.Context, proof credential) error {
	if !proof.expires.IsZero() {
		if time.Now().After(proof.expires) {
			return fmt.Errorf("client certificate expired at %s", proof.expires.Format(time.RFC3339))
		}
		return nil
	}
	if s.config.AuthenticateToken == nil {
		return errors.New("tokens are not accepted here: use the kubelet's client certificate")
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	if err := s.config.AuthenticateToken(ctx, proof.token); err != nil {
		return fmt.Errorf("review token: %w", err)
	}
	return nil
}

func certificate(ctx context.Context) *x509.Certificate {
	p, _ := peer.FromContext(ctx)
	if p == nil {
		return nil
	}
	info, _ := p.AuthInfo.(credentials.TLSInfo)
	if len(info.State.PeerCertificates) == 0 {
		return nil
	}
	return info.State.PeerCertificates[0]
}

// single returns a key of the request's metadata that may be there once.
func single(ctx context.Context, key string) (string, error) {
	values := metadata.ValueFromIncomingContext(ctx, key)
	switch len(values) {
	case 0:
		return "", nil
	case 1:
		return values[0], nil
	}
	return "", status.Errorf(codes.InvalidArgument, "metadata %s is there %d times: send it once", key, len(values))
}

// claims returns the addresses in an agent's identifiers, in canonical form.
// Kinds that route by network (cidr, default-route) are not honoured: they would
// let one node draw the traffic of others.
func claims(identifiers string) ([]string, error) {
	values, err := url.ParseQuery(identifiers)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, "agent identifiers are not of the form ipv4=…&ipv6=…&host=…")
	}
	var all []string
	for _, kind := range []string{"ipv4", "ipv6", "host"} {
		for _, value := range values[kind] {
			all = append(all, canonical(value))
		}
	}
	if len(all) > maxClaims {
		return nil, status.Errorf(codes.InvalidArgument, "%d agent identifiers: a node has at most %d", len(all), maxClaims)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// canonical returns a host or address in the one form in which it is compared.
func canonical(host string) string {
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap().String()
	}
	return strings.TrimSuffix(strings.ToLower(host), ".")
}

// honoured returns the claims that are addresses of the Node of that name.
func (s *Server) honoured(ctx context.Context, node string, claimed []string) []string {
	if len(claimed) == 0 || s.config.NodeAddresses == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	own, err := s.config.NodeAddresses(ctx, node)
	if err != nil {
		s.log.Debug("read a node's addresses", "node", node, "error", err)
		return nil
	}
	var both []string
	for _, address := range own {
		if address = canonical(address); slices.Contains(claimed, address) {
			both = append(both, address)
		}
	}
	return both
}

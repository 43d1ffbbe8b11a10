// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tenantd/tenantd/konnectivity"
)

const (
	// TunnelProtocol is the application protocol (ALPN) that tells a tunnel agent's
	// connection from all others under the tenant's name. Stock agents offer it when
	// started with --alpn-proto=konnectivity.
	TunnelProtocol = "konnectivity"
	// CarrierProtocol is that of connections which carry a worker's connections to
	// the API server inside, as they are.
	CarrierProtocol = "tenantd-api"
	// TunnelAudience is whom the tokens of agents without a node's certificate are
	// for; the one that upstream's manifests use.
	TunnelAudience = "system:konnectivity-server"
)

// carrierHandshake bounds the time from a carrier's connection to the end of its
// outer handshake.
const carrierHandshake = 10 * time.Second

// gathering is how long what dials into the cluster waits for the first agent after a
// start. Agents that were connected before are back within 2 s of when they can be,
// and a webhook is given up after 10 s.
const gathering = 5 * time.Second

var errNoTunnel = errors.New("this control plane has no tunnel into a cluster, so it connects to nothing there")

// tunnel is all that a control plane dials through, and where its workers' agents
// and carriers arrive. It refers to nothing of the control plane but its client:
// upstream keeps dialers for longer than the servers they were made for.
type tunnel struct {
	server *konnectivity.Server
	client kubernetes.Interface // set before serve
	roots  *x509.CertPool
	cert   func() *tls.Certificate
}

// newTunnel makes the tunnel, which serves when told to. Without listeners of
// agents there is none, and every dial fails.
func (cp *ControlPlane) newTunnel() (*tunnel, error) {
	t := &tunnel{roots: x509.NewCertPool(), cert: cp.serving.TLS}
	if len(cp.cfg.Tunnel) == 0 {
		return t, nil
	}
	if !t.roots.AppendCertsFromPEM(cp.cfg.Authority.CA()) {
		return nil, errors.New("make tunnel: no certificate in the CA bundle")
	}
	var err error
	t.server, err = konnectivity.New(konnectivity.Config{
		Tenant:            cp.cfg.Name,
		TLS:               &tls.Config{GetCertificate: t.getCertificate, ClientCAs: t.roots, CipherSuites: aeadCipherSuites()},
		AuthenticateToken: t.authenticate,
		NodeAddresses:     t.nodeAddresses,
		Replicas:          cp.cfg.Replicas,
		Gathering:         gathering,
		Logger:            cp.cfg.Logger,
	})
	return t, err
}

// dial is every connection that components of the control plane make to anything
// but their own API server and etcd.
func (t *tunnel) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if t.server == nil {
		return nil, errNoTunnel
	}
	conn, err := t.server.Dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &boundedHeader{Conn: conn}, nil
}

// close ends what agents carry. Repeating it does nothing.
func (t *tunnel) close() {
	if t.server != nil {
		t.server.Close()
	}
}

func (t *tunnel) getCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) { return t.cert(), nil }

// authenticate has the API server say whether a token is an agent's.
func (t *tunnel) authenticate(ctx context.Context, token string) error {
	review, err := t.client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{TunnelAudience}},
	}, metav1.CreateOptions{})
	switch {
	case err != nil:
		return fmt.Errorf("review token: %w", err)
	case review.Status.Error != "":
		return fmt.Errorf("review token: %s", review.Status.Error)
	case !review.Status.Authenticated || !slices.Contains(review.Status.Audiences, TunnelAudience):
		return fmt.Errorf("the token is not valid for the audience %s", TunnelAudience)
	}
	return nil
}

// nodeAddresses reads a Node's addresses from the API server's cache.
func (t *tunnel) nodeAddresses(ctx context.Context, name string) ([]string, error) {
	node, err := t.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, err
	}
	var addresses []string
	for _, a := range node.Status.Addresses {
		addresses = append(addresses, a.Address)
	}
	return addresses, nil
}

// serve serves agents and carriers until the returned function is called, which
// ends what they carry. inner gets the connections inside of carriers.
func (cp *ControlPlane) serveTunnel(t *tunnel, inner *listener) (stop func()) {
	var running sync.WaitGroup
	for _, ln := range cp.cfg.Tunnel {
		running.Go(func() {
			if err := t.server.Serve(ln); err != nil {
				cp.log.Error("tunnel ended", "error", err)
			}
		})
	}
	if cp.cfg.Carrier != nil {
		running.Go(func() { t.carry(cp.cfg.Carrier, inner) })
	}
	return func() {
		cp.closeWorkers()
		t.close()
		running.Wait()
	}
}

// closeWorkers closes the listeners of agents and carriers.
func (cp *ControlPlane) closeWorkers() {
	for _, ln := range cp.cfg.Tunnel {
		ln.Close()
	}
	if cp.cfg.Carrier != nil {
		cp.cfg.Carrier.Close()
	}
}

// carry unwraps the connections of carriers until ln is closed. The outer TLS
// shows workers' connections to everything on the way as what they are for, a
// tenant by name; what a client may do is decided by what it shows inside. Anybody
// can finish the outer handshake, so to the router a connection stays pending until
// the API server takes away the deadline of the inner one.
func (t *tunnel) carry(ln net.Listener, inner *listener) {
	var pending sync.WaitGroup
	defer pending.Wait()
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, GetCertificate: t.getCertificate, NextProtos: []string{CarrierProtocol},
		ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: t.roots,
	}
	for {
		raw, err := ln.Accept()
		if err != nil {
			return // closed
		}
		pending.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), carrierHandshake)
			defer cancel()
			outer := tls.Server(raw, config)
			if err := outer.HandshakeContext(ctx); err != nil || !inner.take(ctx, outer) {
				raw.Close()
			}
		})
	}
}

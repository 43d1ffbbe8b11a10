// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"k8s.io/klog/v2"
	upstream "sigs.k8s.io/apiserver-network-proxy/pkg/agent"
	agentpb "sigs.k8s.io/apiserver-network-proxy/proto/agent"

	"github.com/tenantd/tenantd/konnectivity/agent"
	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

const (
	hostname  = "acme.k8s.example.com"
	goodToken = "good"
)

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard()) // upstream's agent
	goleak.VerifyTestMain(m)
}

// authority is a certificate authority of a test's own.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{pool: x509.NewCertPool()}
	leaf := a.issue(t, &x509.Certificate{Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	a.cert, a.key = leaf.Leaf, leaf.PrivateKey.(*ecdsa.PrivateKey)
	a.pool.AddCert(a.cert)
	return a
}

func (a *authority) issue(t testing.TB, template *x509.Certificate) *tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber = serial
	template.NotBefore = time.Now().Add(-time.Hour)
	if template.NotAfter.IsZero() {
		template.NotAfter = time.Now().Add(time.Hour)
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func (a *authority) serving(t testing.TB) *tls.Certificate {
	return a.issue(t, &x509.Certificate{DNSNames: []string{hostname}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
}

func (a *authority) client(t testing.TB, cn, o string) *tls.Certificate {
	return a.issue(t, &x509.Certificate{
		Subject:     pkix.Name{CommonName: cn, Organization: []string{o}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

func (a *authority) node(t testing.TB, name string) *tls.Certificate {
	return a.client(t, "system:node:"+name, "system:nodes")
}

// cluster is a server with a listener, and what agents of it need.
type cluster struct {
	*Server
	ca      *authority
	address string
	nodes   nodes
}

// nodes are the addresses of Node objects.
type nodes struct {
	mu     sync.Mutex
	byName map[string][]string
}

func (n *nodes) set(name string, addresses ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.byName == nil {
		n.byName = make(map[string][]string)
	}
	n.byName[name] = addresses
}

func (n *nodes) get(_ context.Context, name string) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if addresses, ok := n.byName[name]; ok {
		return addresses, nil
	}
	return nil, errors.New("no such node")
}

func newCluster(t testing.TB, change ...func(*Config)) *cluster {
	t.Helper()
	c := &cluster{ca: newAuthority(t)}
	serving := c.ca.serving(t)
	config := Config{
		Tenant:        "acme",
		TLS:           &tls.Config{Certificates: []tls.Certificate{*serving}, ClientCAs: c.ca.pool},
		NodeAddresses: c.nodes.get,
		Logger:        testLog(t),
		AuthenticateToken: func(_ context.Context, token string) error {
			if token != goodToken {
				return errors.New("not a good one")
			}
			return nil
		},
	}
	for _, f := range change {
		f(&config)
	}
	server, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	c.Server = server
	c.address = c.listen(t)
	t.Cleanup(func() { server.Close() })
	return c
}

// listen serves one more listener.
func (c *cluster) listen(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- c.Serve(l) }()
	t.Cleanup(func() {
		c.Close()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return l.Addr().String()
}

// testLog logs only with -v: a thousand lines hide the one that matters.
func testLog(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return nil
	}
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// running is an agent that a test can stop.
type running struct{ stop func() }

// ours starts our agent on a node and waits for its tunnel.
func (c *cluster) ours(t testing.TB, node string, change ...func(*agent.Config)) running {
	t.Helper()
	cert := c.ca.node(t, node)
	config := agent.Config{
		Node:        node,
		Servers:     func() []string { return []string{c.address} },
		ServerName:  hostname,
		RootCAs:     func() (*x509.CertPool, error) { return c.ca.pool, nil },
		Certificate: func() (*tls.Certificate, error) { return cert, nil },
		Allow:       func(netip.AddrPort) bool { return true },
		Logger:      testLog(t),
	}
	for _, f := range change {
		f(&config)
	}
	a, err := agent.New(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	c.waitFor(t, node)
	return running{stop}
}

// upstreams starts upstream's agent, with a certificate or, if that is nil, the
// token, and waits for its connection.
func (c *cluster) upstreams(t testing.TB, id, identifiers string, cert *tls.Certificate) running {
	t.Helper()
	config := tls.Config{ServerName: hostname, RootCAs: c.ca.pool, NextProtos: []string{"konnectivity"}}
	set := upstream.ClientSetConfig{
		Address: c.address, AgentID: id, AgentIdentifiers: identifiers,
		SyncInterval: 20 * time.Millisecond, ProbeInterval: 20 * time.Millisecond, SyncIntervalCap: time.Second,
		XfrChannelSize: 150,
	}
	if cert != nil {
		config.Certificates = []tls.Certificate{*cert}
	} else {
		set.ServiceAccountTokenPath = filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(set.ServiceAccountTokenPath, []byte(goodToken), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	set.DialOptions = []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(&config)), grpc.WithAuthority(hostname)}
	drain, stop := make(chan struct{}), make(chan struct{})
	clients := set.NewAgentClientSet(drain, stop)
	clients.SetServerCounter(upstream.NewAggregateServerCounter(nil, upstream.NewResponseBasedCounter(clients), "default"))
	clients.Serve()
	end := sync.OnceFunc(func() { close(stop) })
	t.Cleanup(end)
	c.waitFor(t, id)
	return running{end}
}

// kinds are the agents that must all do the same.
var kinds = []struct {
	name  string
	own   bool // has half-close and back-pressure for each connection
	start func(*cluster, testing.TB, string) running
}{
	{"ours", true, func(c *cluster, t testing.TB, node string) running { return c.ours(t, node) }},
	{"upstream with certificate", false, func(c *cluster, t testing.TB, node string) running {
		return c.upstreams(t, node, "", c.ca.node(t, node))
	}},
	{"upstream with token", false, func(c *cluster, t testing.TB, node string) running {
		return c.upstreams(t, node, "", nil)
	}},
}

// waitFor waits until an agent is connected.
func (c *cluster) waitFor(t testing.TB, id string) {
	t.Helper()
	eventually(t, "agent "+id+" connects", func() bool { return c.connections(id) > 0 })
}

func (c *cluster) connections(id string) (n int) {
	for _, a := range c.Agents() {
		if a.ID == id {
			n++
		}
	}
	return n
}

// eventually polls; the limit is for a test that would hang otherwise.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for limit := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

// dialed dials through the tunnel and closes with the test.
func (c *cluster) dialed(t testing.TB, address string) net.Conn {
	t.Helper()
	conn, err := c.Dial(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// target serves each connection with f, which need not close it, and returns the
// address.
func target(t testing.TB, f func(*net.TCPConn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	var mu sync.Mutex
	open := make(map[net.Conn]bool)
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[conn] = true
			mu.Unlock()
			all.Go(func() {
				defer conn.Close()
				f(conn.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for conn := range open {
			conn.Close()
		}
		mu.Unlock()
		all.Wait()
	})
	return l.Addr().String()
}

func echo(t testing.TB) string {
	return target(t, func(c *net.TCPConn) { io.Copy(c, c) })
}

// raw is an agent of a test's own making, which says what it likes.
type raw struct {
	agentpb.AgentService_ConnectClient
	conn *grpc.ClientConn
}

// raw connects as an agent. The error is the server's refusal.
func (c *cluster) raw(t testing.TB, cert *tls.Certificate, pairs ...string) (raw, error) {
	t.Helper()
	config := tls.Config{ServerName: hostname, RootCAs: c.ca.pool}
	if cert != nil {
		// Not Certificates: those are left out when the server's authorities do not match.
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }
	}
	conn, err := grpc.NewClient("passthrough:///"+c.address, grpc.WithTransportCredentials(credentials.NewTLS(&config)), grpc.WithAuthority(hostname))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	stream, err := agentpb.NewAgentServiceClient(conn).Connect(metadata.AppendToOutgoingContext(t.Context(), pairs...))
	if err != nil {
		return raw{}, err
	}
	header, err := stream.Header()
	if err == nil && len(header.Get(wire.ServerID)) == 0 {
		_, err = stream.Recv()
	}
	return raw{stream, conn}, err
}

// rawNode is raw with a node's certificate; it must be admitted.
func (c *cluster) rawNode(t testing.TB, node string, pairs ...string) raw {
	t.Helper()
	r, err := c.raw(t, c.ca.node(t, node), append([]string{wire.AgentID, node}, pairs...)...)
	if err != nil {
		t.Fatal(err)
	}
	c.waitFor(t, node)
	return r
}

func (r raw) recv(t testing.TB) *packet {
	t.Helper()
	p, err := r.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (r raw) send(t testing.TB, p *packet) {
	t.Helper()
	if err := r.Send(p); err != nil {
		t.Fatal(err)
	}
}

// roundTrip sends a message to an echo and checks what comes back.
func roundTrip(conn net.Conn, message string) error {
	if _, err := io.WriteString(conn, message); err != nil {
		return err
	}
	back := make([]byte, len(message))
	if _, err := io.ReadFull(conn, back); err != nil {
		return err
	}
	if string(back) != message {
		return fmt.Errorf("sent %q, got %q", message, back)
	}
	return nil
}

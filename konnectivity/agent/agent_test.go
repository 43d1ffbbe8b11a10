// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tenantd/tenantd/konnectivity"
	"github.com/tenantd/tenantd/konnectivity/agent"
)

const hostname = "acme.k8s.example.com"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// issue returns a certificate by its template, signed by parent or itself.
func issue(t *testing.T, template *x509.Certificate, parent *tls.Certificate) *tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	if parent == nil {
		parent = &tls.Certificate{Leaf: template, PrivateKey: key}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent.Leaf, &key.PublicKey, parent.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func nodeTemplate(node string) *x509.Certificate {
	return &x509.Certificate{
		Subject:     pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
}

// cluster is an authority, and servers by it.
type cluster struct {
	ca   *tls.Certificate
	pool *x509.CertPool
}

func newCluster(t *testing.T) *cluster {
	ca := issue(t, &x509.Certificate{IsCA: true, BasicConstraintsValid: true, Subject: pkix.Name{CommonName: "ca"}}, nil)
	c := &cluster{ca: ca, pool: x509.NewCertPool()}
	c.pool.AddCert(ca.Leaf)
	return c
}

// server is one host's.
type server struct {
	*konnectivity.Server
	address string
	close   func()
}

// serve starts a server on an address; port 0 chooses one.
func (c *cluster) serve(t *testing.T, address string, names ...string) *server {
	t.Helper()
	if names == nil {
		names = []string{hostname}
	}
	cert := issue(t, &x509.Certificate{DNSNames: names}, c.ca)
	s, err := konnectivity.New(konnectivity.Config{
		Tenant:        "acme",
		TLS:           &tls.Config{Certificates: []tls.Certificate{*cert}, ClientCAs: c.pool},
		NodeAddresses: func(context.Context, string) ([]string, error) { return []string{"10.0.0.7", "fd00::7", "node-a"}, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	end := sync.OnceFunc(func() {
		s.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return &server{s, l.Addr().String(), end}
}

// config returns what reaches the servers from node-a.
func (c *cluster) config(t *testing.T, servers ...string) agent.Config {
	cert := issue(t, nodeTemplate("node-a"), c.ca)
	return agent.Config{
		Node:        "node-a",
		Servers:     func() []string { return servers },
		ServerName:  hostname,
		RootCAs:     func() (*x509.CertPool, error) { return c.pool, nil },
		Certificate: func() (*tls.Certificate, error) { return cert, nil },
		Allow:       func(netip.AddrPort) bool { return true },
		Refresh:     10 * time.Millisecond,
	}
}

// run runs an agent until the test ends or stop is called.
func run(t *testing.T, config agent.Config) (a *agent.Agent, stop func()) {
	t.Helper()
	a, err := agent.New(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return a, stop
}

// eventually polls; the limit is for a test that would hang otherwise.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for limit := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { defer c.Close(); io.Copy(c, c) })
		}
	})
	t.Cleanup(func() { l.Close(); all.Wait() })
	return l.Addr().String()
}

func check(conn net.Conn) error {
	if _, err := io.WriteString(conn, "ping"); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, make([]byte, 4))
	return err
}

func TestConfigIsValidated(t *testing.T) {
	_, err := agent.New(agent.Config{})
	for _, field := range []string{"Node", "ServerName", "Servers", "RootCAs", "Certificate"} {
		if err == nil || !strings.Contains(err.Error(), field+" is not set") {
			t.Errorf("%s is not among the faults: %v", field, err)
		}
	}
}

// One tunnel to each server, and its own end when the server leaves the list.
func TestServersComeAndGo(t *testing.T) {
	c := newCluster(t)
	one, two := c.serve(t, "127.0.0.1:0"), c.serve(t, "127.0.0.1:0")
	var list atomic.Pointer[[]string]
	list.Store(&[]string{one.address})
	config := c.config(t)
	config.Servers = func() []string { return *list.Load() }
	config.Addresses = []netip.Addr{netip.MustParseAddr("10.0.0.7"), netip.MustParseAddr("fd00::7")}
	a, _ := run(t, config)
	eventually(t, "the first is connected", func() bool { return slices.Equal(a.Connected(), []string{one.address}) })
	if got, want := one.Agents()[0].Addresses, []string{"10.0.0.7", "fd00::7", "node-a"}; !slices.Equal(got, want) {
		t.Errorf("addresses %v, want %v", got, want)
	}
	conn, err := one.Dial(t.Context(), "tcp", echo(t))
	if err != nil {
		t.Fatal(err)
	}
	list.Store(&[]string{two.address})
	eventually(t, "the second is connected", func() bool { return slices.Equal(a.Connected(), []string{two.address}) })
	eventually(t, "the first drains", func() bool { return one.Agents()[0].Draining })
	if err := check(conn); err != nil {
		t.Errorf("an open connection did not survive: %v", err)
	}
	conn.Close()
	eventually(t, "the first is left", func() bool { return len(one.Agents()) == 0 })
	list.Store(&[]string{two.address, one.address, one.address})
	eventually(t, "both are connected", func() bool { return len(a.Connected()) == 2 })
}

// Of many ways to one server three are used, and others when one of them is lost. No
// number of them keeps the agent from another server.
func TestManyWaysToOneServer(t *testing.T) {
	c := newCluster(t)
	one, two := c.serve(t, "127.0.0.1:0"), c.serve(t, "127.0.0.1:0")
	ways := []string{one.address}
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait)
	t.Cleanup(one.close)
	for range 4 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ways = append(ways, l.Addr().String())
		serving.Go(func() { one.Serve(l) })
	}
	var list atomic.Pointer[[]string]
	all := append(slices.Clone(ways), two.address)
	list.Store(&all)
	config := c.config(t)
	config.Servers = func() []string { return *list.Load() }
	config.Spare = time.Second
	a, _ := run(t, config)
	used := func() (toOne []string, others int) {
		for _, state := range a.Status() {
			switch {
			case state.Connected && state.Server == two.address:
				others++
			case state.Connected:
				toOne = append(toOne, state.Server)
			}
		}
		return toOne, others
	}
	await := func(what string) (toOne []string) {
		eventually(t, what, func() bool {
			var others int
			toOne, others = used()
			return len(toOne) == 3 && others == 1
		})
		return toOne
	}
	first := await("three ways are used, and one to the other server")
	conn, err := one.Dial(t.Context(), "tcp", echo(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	// The others are tried again and again, which the server notices and no more.
	seen := map[time.Time]bool{}
	eventually(t, "the server has seen others come", func() bool {
		for _, session := range one.Agents() {
			seen[session.Since] = true
		}
		return len(seen) > 10
	})
	if err := check(conn); err != nil {
		t.Errorf("an open connection did not survive: %v", err)
	}
	if now := await("three are still used"); !slices.Equal(now, first) {
		t.Errorf("the ways are %v, and were %v", now, first)
	}
	left := slices.DeleteFunc(slices.Clone(all), func(address string) bool { return address == first[0] })
	list.Store(&left)
	eventually(t, "another way is used", func() bool { return !slices.Contains(await("three are used again"), first[0]) })
}

func TestReconnects(t *testing.T) {
	c := newCluster(t)
	s := c.serve(t, "127.0.0.1:0")
	a, _ := run(t, c.config(t, s.address))
	eventually(t, "it is connected", func() bool { return len(a.Connected()) == 1 })
	before := a.Status()[0].ServerID
	s.close()
	eventually(t, "it says why not", func() bool {
		state := a.Status()[0]
		return !state.Connected && strings.Contains(state.Error, "connection refused")
	})
	s = c.serve(t, s.address)
	eventually(t, "it is connected again", func() bool { return len(a.Connected()) == 1 })
	if a.Status()[0].ServerID == before {
		t.Error("the same server")
	}
	conn, err := s.Dial(t.Context(), "tcp", echo(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := check(conn); err != nil {
		t.Error(err)
	}
}

// A server that is there and says nothing does not hold anything up for ever.
func TestStopsWhileConnecting(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := newCluster(t)
	reached := make(chan struct{})
	config := c.config(t, l.Addr().String())
	config.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		close(reached)
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	_, stop := run(t, config)
	<-reached
	stop()
}

// A renewed certificate is used before the old one ends, and what is open stays.
func TestCertificateIsRenewed(t *testing.T) {
	c := newCluster(t)
	s := c.serve(t, "127.0.0.1:0")
	var cert atomic.Pointer[tls.Certificate]
	cert.Store(issue(t, nodeTemplate("node-a"), c.ca))
	config := c.config(t, s.address)
	config.Certificate = func() (*tls.Certificate, error) { return cert.Load(), nil }
	run(t, config)
	eventually(t, "it is connected", func() bool { return len(s.Agents()) == 1 })
	conn, err := s.Dial(t.Context(), "tcp", echo(t))
	if err != nil {
		t.Fatal(err)
	}
	cert.Store(issue(t, nodeTemplate("node-a"), c.ca))
	eventually(t, "there are two", func() bool { return len(s.Agents()) == 2 })
	eventually(t, "the older drains", func() bool { return s.Agents()[0].Draining })
	if err := check(conn); err != nil {
		t.Errorf("an open connection did not survive: %v", err)
	}
	newer, err := s.Dial(t.Context(), "tcp", echo(t))
	if err != nil {
		t.Fatal(err)
	}
	defer newer.Close()
	if got := s.Agents()[1].Streams; got != 1 {
		t.Errorf("the newer has %d connections", got)
	}
	conn.Close()
	eventually(t, "the older is gone", func() bool { return len(s.Agents()) == 1 })
	if err := check(newer); err != nil {
		t.Error(err)
	}
}

func TestStatusSaysWhyNot(t *testing.T) {
	c, stranger := newCluster(t), newCluster(t)
	s, other := c.serve(t, "127.0.0.1:0"), c.serve(t, "127.0.0.1:0", "other.k8s.example.com")
	for _, test := range []struct {
		name, want string
		change     func(*agent.Config)
	}{
		{"another authority", "certificate signed by unknown authority", func(config *agent.Config) {
			config.RootCAs = func() (*x509.CertPool, error) { return stranger.pool, nil }
		}},
		{"another name", "valid for other.k8s.example.com, not " + hostname, func(config *agent.Config) {
			config.Servers = func() []string { return []string{other.address} }
		}},
		{"no certificate yet", "there is none yet", func(config *agent.Config) {
			config.Certificate = func() (*tls.Certificate, error) { return nil, nil }
		}},
		{"an unreadable certificate", "read the node's certificate: broken", func(config *agent.Config) {
			config.Certificate = func() (*tls.Certificate, error) { return nil, errors.New("broken") }
		}},
		{"an unreadable authority", "read the cluster's authority: broken", func(config *agent.Config) {
			config.RootCAs = func() (*x509.CertPool, error) { return nil, errors.New("broken") }
		}},
		{"another node's certificate", `with the certificate of node "node-a"`, func(config *agent.Config) { config.Node = "node-b" }},
		{"another cluster's certificate", "unknown certificate authority", func(config *agent.Config) {
			cert := issue(t, nodeTemplate("node-a"), stranger.ca)
			config.Certificate = func() (*tls.Certificate, error) { return cert, nil }
		}},
		{"no kubelet's certificate", "bad certificate", func(config *agent.Config) {
			cert := issue(t, &x509.Certificate{Subject: pkix.Name{CommonName: "admin"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, c.ca)
			config.Certificate = func() (*tls.Certificate, error) { return cert, nil }
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := c.config(t, s.address)
			test.change(&config)
			a, _ := run(t, config)
			var last string
			defer func() { t.Log(last) }()
			eventually(t, "the error says "+test.want, func() bool {
				if states := a.Status(); len(states) == 1 {
					last = states[0].Error
				}
				return strings.Contains(last, test.want)
			})
		})
	}
}

func TestDefaultAllow(t *testing.T) {
	for address, want := range map[string]bool{
		"10.0.0.7":               true,
		"10.244.3.9":             true,
		"192.168.1.1":            true,
		"100.64.0.1":             true,
		"203.0.113.9":            true,
		"2001:db8::1":            true,
		"fd00::7":                true,
		"169.254.169.254":        false, // every cloud's metadata
		"169.254.170.2":          false, // ECS task credentials
		"::ffff:169.254.169.254": false,
		"fd00:ec2::254":          false,
		"fe80::1":                false,
		"fe80::1%eth0":           false,
		"127.0.0.1":              false,
		"127.8.8.8":              false,
		"::1":                    false,
		"::ffff:127.0.0.1":       false,
		"0.0.0.0":                false,
		"::":                     false,
		"224.0.0.1":              false,
		"ff02::1":                false,
		"255.255.255.255":        false,
	} {
		if got := agent.DefaultAllow(netip.AddrPortFrom(netip.MustParseAddr(address), 80)); got != want {
			t.Errorf("%s: %v", address, got)
		}
	}
}

// The veto sees what a name resolves to, and the node's own name is its address.
func TestVeto(t *testing.T) {
	c := newCluster(t)
	s := c.serve(t, "127.0.0.1:0")
	address := echo(t)
	_, port, _ := net.SplitHostPort(address)
	var asked atomic.Pointer[netip.AddrPort]
	config := c.config(t, s.address)
	config.Addresses = []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	config.Allow = func(target netip.AddrPort) bool { asked.Store(&target); return false }
	run(t, config)
	eventually(t, "it is connected", func() bool { return len(s.Agents()) == 1 })
	for _, host := range []string{"127.0.0.1", "node-a"} {
		_, err := s.Dial(t.Context(), "tcp", net.JoinHostPort(host, port))
		if err == nil || !strings.Contains(err.Error(), "node node-a does not tunnel to "+address) {
			t.Errorf("dial %s: %v", host, err)
		}
		if got := asked.Swap(nil); got == nil || got.String() != address {
			t.Errorf("the veto was asked for %v", got)
		}
	}
}

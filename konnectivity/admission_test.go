// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	agentpb "sigs.k8s.io/apiserver-network-proxy/proto/agent"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

func TestAdmission(t *testing.T) {
	c := newCluster(t)
	stranger := newAuthority(t)
	node := c.ca.node(t, "node-a")
	expired := c.ca.issue(t, &x509.Certificate{
		Subject:     pkix.Name{CommonName: "system:node:node-a", Organization: []string{"system:nodes"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		NotAfter:    time.Now().Add(-time.Second),
	})
	serverAuth := c.ca.issue(t, &x509.Certificate{
		Subject:     pkix.Name{CommonName: "system:node:node-a", Organization: []string{"system:nodes"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	id := func(id string, more ...string) []string { return append([]string{wire.AgentID, id}, more...) }
	const auth = wire.Authorization
	for _, test := range []struct {
		name  string
		cert  *tls.Certificate
		pairs []string
		want  codes.Code
	}{
		{"a node", node, id("node-a"), codes.OK},
		{"a node with a token as well", node, id("node-a", auth, "Bearer bad"), codes.OK},
		{"a node by another's name", node, id("node-b"), codes.PermissionDenied},
		{"a node by no name", node, nil, codes.InvalidArgument},
		{"a node by two names", node, id("node-a", wire.AgentID, "node-b"), codes.InvalidArgument},
		{"identifiers that do not parse", node, id("node-a", wire.AgentIdentifiers, "ipv4=%zz"), codes.InvalidArgument},
		{"too many identifiers", node, id("node-a", wire.AgentIdentifiers, strings.Repeat("host=a&", 65)), codes.InvalidArgument},
		{"an administrator", c.ca.client(t, "kubernetes-admin", "system:masters"), id("kubernetes-admin"), codes.Unavailable},
		{"a user in the nodes' group", c.ca.client(t, "node-a", "system:nodes"), id("node-a"), codes.Unavailable},
		{"a node outside the nodes' group", c.ca.client(t, "system:node:node-a", "nodes"), id("node-a"), codes.Unavailable},
		{"a node without a name", c.ca.client(t, "system:node:", "system:nodes"), id(""), codes.Unavailable},
		{"another cluster's node", stranger.node(t, "node-a"), id("node-a"), codes.Unavailable},
		{"an expired certificate", expired, id("node-a"), codes.Unavailable},
		{"a serving certificate", serverAuth, id("node-a"), codes.Unavailable},
		{"a good token", nil, id("anything", auth, "Bearer "+goodToken), codes.OK},
		{"a bad token", nil, id("anything", auth, "Bearer bad"), codes.Unauthenticated},
		{"two tokens", nil, id("anything", auth, "Bearer "+goodToken, auth, "Bearer bad"), codes.InvalidArgument},
		{"a password", nil, id("anything", auth, "Basic "+goodToken), codes.Unauthenticated},
		{"nothing", nil, id("node-a"), codes.Unauthenticated},
		{"a token and a long name", nil, id(strings.Repeat("x", 254), auth, "Bearer "+goodToken), codes.InvalidArgument},
		{"a token for a dial", nil, id("node-a", auth, "Bearer "+goodToken, wire.Dial, "1"), codes.Canceled},
		{"a dial that is no number", node, id("node-a", wire.Dial, "one"), codes.InvalidArgument},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := c.raw(t, test.cert, test.pairs...)
			if got := status.Code(err); got != test.want {
				t.Errorf("%v (%v), want %v", got, err, test.want)
			}
			if err != nil && strings.Contains(err.Error(), "bad\"") {
				t.Errorf("the error tells the token: %v", err)
			}
		})
	}
}

func TestTokensAreRefusedByDefault(t *testing.T) {
	c := newCluster(t, func(config *Config) { config.AuthenticateToken = nil })
	if _, err := c.raw(t, nil, wire.AgentID, "a", wire.Authorization, "Bearer "+goodToken); status.Code(err) != codes.Unauthenticated {
		t.Errorf("error is %v", err)
	}
}

// What the caller decides per connection is hardened as well.
func TestGetConfigForClientIsHardened(t *testing.T) {
	c := newCluster(t, func(config *Config) {
		base := config.TLS
		config.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return base, nil }}
	})
	if _, err := c.raw(t, c.ca.client(t, "kubernetes-admin", "system:masters"), wire.AgentID, "a", wire.Authorization, "Bearer "+goodToken); err == nil {
		t.Error("an administrator was admitted")
	}
	c.rawNode(t, "node-a")
}

func TestTooManyAgents(t *testing.T) {
	c := newCluster(t, func(config *Config) { config.MaxAgents = 1 })
	c.rawNode(t, "node-a")
	if _, err := c.raw(t, c.ca.node(t, "node-b"), wire.AgentID, "node-b"); err != nil {
		t.Fatal(err)
	}
	if agents := c.Agents(); len(agents) != 1 || agents[0].ID != "node-a" {
		t.Errorf("agents are %v", agents)
	}
}

func TestCertificateExpires(t *testing.T) {
	c := newCluster(t)
	cert := c.ca.issue(t, &x509.Certificate{
		Subject:     pkix.Name{CommonName: "system:node:node-a", Organization: []string{"system:nodes"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		NotAfter:    time.Now().Add(4 * time.Second), // cut to whole seconds
	})
	a, err := c.raw(t, cert, wire.AgentID, "node-a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Recv(); !strings.Contains(err.Error(), "client certificate expired at") {
		t.Errorf("the agent hears %v", err)
	}
	if time.Now().Before(cert.Leaf.NotAfter) {
		t.Error("too early")
	}
}

// One review that fails may be an API server that restarts. Two are not.
func TestTokenIsTakenBack(t *testing.T) {
	var failures atomic.Int32
	c := newCluster(t, func(config *Config) {
		config.Recheck = 10 * time.Millisecond
		var reviews atomic.Int32
		config.AuthenticateToken = func(context.Context, string) error {
			if n := reviews.Add(1); n == 3 || n > 5 {
				failures.Add(1)
				return errors.New("taken back")
			}
			return nil
		}
	})
	a, err := c.raw(t, nil, wire.AgentID, "anything", wire.Authorization, "Bearer "+goodToken)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Recv(); !strings.Contains(err.Error(), "taken back") {
		t.Errorf("the agent hears %v", err)
	}
	if n := failures.Load(); n != 3 {
		t.Errorf("ended after %d failures, want the third: one alone, then two in a row", n)
	}
}

func TestClaims(t *testing.T) {
	c := newCluster(t)
	c.nodes.set("node-a", "10.0.0.1", "fd00::1", "Node-A", "node-a.example.com.")
	for _, test := range []struct {
		identifiers string
		want        []string
	}{
		{"", nil},
		{"ipv4=10.0.0.1", []string{"10.0.0.1"}},
		{"ipv4=10.0.0.1&ipv6=FD00:0::1&host=node-a", []string{"10.0.0.1", "fd00::1", "node-a"}},
		{"ipv4=::ffff:10.0.0.1", []string{"10.0.0.1"}},
		{"host=NODE-A.example.com", []string{"node-a.example.com"}},
		{"ipv4=10.0.0.1&ipv4=10.0.0.2", []string{"10.0.0.1"}}, // another node's
		{"cidr=10.0.0.0/8&default-route=true", nil},
	} {
		t.Run(test.identifiers, func(t *testing.T) {
			claimed, err := claims(test.identifiers)
			if err != nil {
				t.Fatal(err)
			}
			if got := c.honoured(t.Context(), "node-a", claimed); !slices.Equal(got, test.want) {
				t.Errorf("honoured %q, want %q", got, test.want)
			}
			if got := c.honoured(t.Context(), "node-b", claimed); got != nil {
				t.Errorf("of a node that is not there: %q", got)
			}
		})
	}
}

// route dials an address and returns the id of the agent that is asked.
func route(t *testing.T, c *cluster, address string, agents map[string]raw) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	type request struct {
		id     string
		number int64
	}
	asked := make(chan request)
	failed := make(chan error, 1)
	go func() {
		_, err := c.Dial(ctx, "tcp", address)
		failed <- err
	}()
	for id, a := range agents {
		go func() {
			// Each sees its request, or the one that the end of this function sends.
			p, err := a.Recv()
			if err != nil {
				t.Error(err)
			}
			asked <- request{id, p.GetDialRequest().GetRandom()}
		}()
	}
	first := <-asked
	cancel()
	<-failed
	agents[first.id].recv(t) // the dial is given up
	// Wake the others with a connection that nobody asked them for.
	for id, a := range agents {
		if id != first.id {
			a.send(t, accepted(1, 1))
			<-asked
		}
	}
	return first.id
}

func TestRoutes(t *testing.T) {
	c := newCluster(t)
	c.nodes.set("node-a", "10.0.0.1", "node-a")
	c.nodes.set("node-b", "10.0.0.2")
	c.nodes.set("node-c", "10.0.0.3")
	agents := map[string]raw{
		"node-a": c.rawNode(t, "node-a", wire.AgentIdentifiers, "ipv4=10.0.0.1&host=node-a&ipv4=10.0.0.2"),
		"node-b": c.rawNode(t, "node-b", wire.AgentIdentifiers, "ipv4=10.0.0.2"),
	}
	for _, id := range []string{"node-a", "node-c"} { // one claims what a certified one has
		a, err := c.raw(t, nil, wire.AgentID, id, wire.AgentIdentifiers, "ipv4=10.0.0.1&ipv4=10.0.0.3", wire.Authorization, "Bearer "+goodToken)
		if err != nil {
			t.Fatal(err)
		}
		agents["token "+id] = a
	}
	eventually(t, "all are connected", func() bool { return len(c.Agents()) == 4 })
	for address, want := range map[string]string{
		"10.0.0.1:10250":          "node-a",
		"[::ffff:10.0.0.1]:10250": "node-a",
		"Node-A:10250":            "node-a",
		"10.0.0.2:10250":          "node-b",
		"10.0.0.3:10250":          "token node-c",
	} {
		for range 3 {
			if got := route(t, c, address, agents); got != want {
				t.Errorf("%s goes to %s, want %s", address, got, want)
			}
		}
	}
	seen := make(map[string]bool)
	for range 1000 {
		if seen[route(t, c, "10.244.1.7:8080", agents)] = true; len(seen) == len(agents) {
			break
		}
	}
	if len(seen) != len(agents) {
		t.Errorf("a pod is reached through %v only", seen)
	}
}

// A node's own address is never tried through another certified agent.
func TestOwnAddressIsNotRetriedElsewhere(t *testing.T) {
	c := newCluster(t)
	c.nodes.set("node-a", "127.0.0.1")
	a := c.rawNode(t, "node-a", wire.AgentIdentifiers, "ipv4=127.0.0.1")
	c.ours(t, "node-b")
	failed := make(chan error)
	go func() {
		_, err := c.Dial(t.Context(), "tcp", echo(t))
		failed <- err
	}()
	a.send(t, wire.DialFailed(a.recv(t).GetDialRequest().GetRandom(), "no\nroute"))
	if err := <-failed; err == nil || !strings.Contains(err.Error(), `through tunnel agent "node-a": no route`) {
		t.Errorf("error is %v", err)
	}
}

// A node that gets its addresses later is routed to then.
func TestAddressesAppear(t *testing.T) {
	c := newCluster(t, func(config *Config) { config.Recheck = 10 * time.Millisecond })
	c.rawNode(t, "node-a", wire.AgentIdentifiers, "ipv4=10.0.0.1")
	if got := c.Agents()[0].Addresses; got != nil {
		t.Errorf("addresses are %v already", got)
	}
	c.nodes.set("node-a", "10.0.0.1")
	eventually(t, "the address is honoured", func() bool { return len(c.Agents()[0].Addresses) == 1 })
	c.nodes.set("node-a", "10.0.0.2")
	eventually(t, "the address is lost", func() bool { return len(c.Agents()[0].Addresses) == 0 })
}

// Of two connections of one agent the newer gets the dials, while the older keeps
// its connections; when the newer goes, the older is asked again.
func TestNewerConnectionServes(t *testing.T) {
	c := newCluster(t)
	c.ours(t, "node-a")
	conn := c.dialed(t, echo(t))
	newer := c.rawNode(t, "node-a")
	eventually(t, "both are connected", func() bool { return c.connections("node-a") == 2 })
	go c.Dial(t.Context(), "tcp", "127.0.0.1:1")
	newer.recv(t)
	if err := roundTrip(conn, "still here"); err != nil {
		t.Errorf("through the older one: %v", err)
	}
	newer.conn.Close()
	eventually(t, "the newer one is gone", func() bool { return c.connections("node-a") == 1 })
	if err := roundTrip(c.dialed(t, echo(t)), "again"); err != nil {
		t.Error(err)
	}
}

func TestOneAgentHasFewConnections(t *testing.T) {
	c := newCluster(t)
	first := c.rawNode(t, "node-a")
	for range maxSessions {
		c.rawNode(t, "node-a")
	}
	if _, err := first.Recv(); status.Code(err) != codes.Aborted {
		t.Errorf("the oldest hears %v", err)
	}
	eventually(t, "as many as allowed are left", func() bool { return c.connections("node-a") == maxSessions })
}

// Only the agent that was asked may answer, even with the right number.
func TestDialIsNotStolen(t *testing.T) {
	c := newCluster(t)
	c.nodes.set("node-a", "10.0.0.1")
	asked := c.rawNode(t, "node-a", wire.AgentIdentifiers, "ipv4=10.0.0.1")
	thief := c.rawNode(t, "node-b")
	opened := make(chan string)
	go func() {
		conn, err := c.Dial(t.Context(), "tcp", "10.0.0.1:1")
		if err != nil {
			t.Error(err)
			close(opened)
			return
		}
		opened <- conn.LocalAddr().String()
		conn.Close()
	}()
	n := asked.recv(t).GetDialRequest().GetRandom()
	thief.send(t, accepted(n, 1))
	if p := thief.recv(t); p.GetCloseRequest().GetConnectID() != 1 {
		t.Errorf("the thief hears %v", p)
	}
	stolen, err := agentpb.NewAgentServiceClient(thief.conn).Connect(metadata.AppendToOutgoingContext(t.Context(), wire.AgentID, "node-b", wire.Dial, strconv.FormatInt(n, 10)))
	if err == nil {
		_, err = stolen.Recv()
	}
	if status.Code(err) != codes.Canceled {
		t.Errorf("the thief's stream ends with %v", err)
	}
	asked.send(t, accepted(n, 1))
	if got := <-opened; got != "tunnel-agent:node-a" {
		t.Errorf("opened through %s", got)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package carrier_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pires/go-proxyproto"

	"github.com/tenantd/tenantd/worker/carrier"
	"github.com/tenantd/tenantd/worker/relay"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const hostname = "acme.test"

func newCarrier(t *testing.T, kind carrier.Kind, tenant *fakehost.Tenant, certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)) *carrier.Carrier {
	t.Helper()
	c, err := carrier.New(carrier.Config{Kind: kind, Hostname: hostname, RootCAs: tenant.Roots, GetClientCertificate: certificate, Buffers: new(relay.Buffers)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// get asks over conn, with TLS of its own as a pod would, for who it is.
func get(conn net.Conn, tenant *fakehost.Tenant, certificate *tls.Certificate) (string, error) {
	cfg := &tls.Config{RootCAs: tenant.Roots, ServerName: hostname}
	if certificate != nil {
		cfg.Certificates = []tls.Certificate{*certificate}
	}
	inner := tls.Client(conn, cfg)
	request, _ := http.NewRequest(http.MethodGet, "https://"+hostname+"/whoami", nil)
	transport := &http.Transport{DisableKeepAlives: true, DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return inner, nil }}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

// TestDial goes through the real router by each carrier, with a client certificate
// inside that has to arrive.
func TestDial(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	certificate, key := tenant.Node("w1", time.Now().Add(time.Hour))
	node, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		kind  carrier.Kind
		outer func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
	}{
		{kind: carrier.TLS},
		{kind: carrier.TLS, outer: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &node, nil }},
		{kind: carrier.Proxy2},
	} {
		t.Run(string(test.kind), func(t *testing.T) {
			host, err := tenant.Listen("127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer host.Close()
			way := newCarrier(t, test.kind, tenant, test.outer)
			for _, remote := range []net.Addr{nil, &net.TCPAddr{IP: net.IPv4(10, 244, 0, 5), Port: 40000}, &net.TCPAddr{IP: net.ParseIP("fd00::5"), Port: 40000}} {
				conn, err := way.Dial(t.Context(), host.Address, remote, &net.TCPAddr{IP: net.IPv4(172, 20, 0, 1), Port: 6443})
				if err != nil {
					t.Fatal(err)
				}
				got, err := get(conn, tenant, &node)
				conn.Close()
				if want := "system:node:w1 at " + host.Address.String(); err != nil || got != want {
					t.Errorf("as %v: %q, %v; want %q", remote, got, err, want)
				}
			}
			all, certified := host.Outer()
			if wantAll := 3; test.kind == carrier.TLS && all != wantAll {
				t.Errorf("%d outer connections, want %d", all, wantAll)
			}
			if want := map[bool]int{true: 3}[test.outer != nil]; certified != want {
				t.Errorf("%d outer connections with the node's certificate, want %d", certified, want)
			}
		})
	}
}

// TestHeader reads what a host gets.
func TestHeader(t *testing.T) {
	tenant := fakehost.NewTenant(hostname)
	way := newCarrier(t, carrier.Proxy2, tenant, nil)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	client, local := &net.TCPAddr{IP: net.IPv4(10, 244, 0, 5), Port: 40000}, &net.TCPAddr{IP: net.IPv4(172, 20, 0, 1), Port: 6443}
	conn, err := way.Dial(t.Context(), ln.Addr().(*net.TCPAddr).AddrPort(), client, local)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, "the pod's own bytes"); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	raw, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	accepted := proxyproto.NewConn(raw)
	defer accepted.Close()
	rest, err := io.ReadAll(accepted)
	if err != nil || string(rest) != "the pod's own bytes" {
		t.Errorf("after the header: %q, %v", rest, err)
	}
	header := accepted.ProxyHeader()
	if header == nil || !header.Command.IsProxy() || header.SourceAddr.String() != client.String() || header.DestinationAddr.String() != local.String() {
		t.Fatalf("header %+v", header)
	}
	tlvs, err := header.TLVs()
	if err != nil || len(tlvs) != 1 || tlvs[0].Type != proxyproto.PP2_TYPE_AUTHORITY || string(tlvs[0].Value) != hostname {
		t.Errorf("header has %v, %v; want the tenant's name as authority", tlvs, err)
	}
}

func TestRefused(t *testing.T) {
	tenant, other := fakehost.NewTenant(hostname), fakehost.NewTenant(hostname)
	host, err := tenant.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	// It takes any protocol, as a server does that knows nothing of the carrier.
	strange, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{tenant.Serving}})
	if err != nil {
		t.Fatal(err)
	}
	defer strange.Close()
	go func() {
		for {
			c, err := strange.Accept()
			if err != nil {
				return
			}
			c.(*tls.Conn).HandshakeContext(t.Context())
			c.Close()
		}
	}()
	for name, test := range map[string]struct {
		way  *carrier.Carrier
		host netip.AddrPort
		want string
	}{
		"another's CA":           {newCarrier(t, carrier.TLS, other, nil), host.Address, "certificate signed by unknown authority"},
		"no carrier protocol":    {newCarrier(t, carrier.TLS, tenant, nil), strange.Addr().(*net.TCPAddr).AddrPort(), "does not speak tenantd-api"},
		"nobody there":           {newCarrier(t, carrier.TLS, tenant, nil), netip.MustParseAddrPort("127.0.0.1:1"), "refused"},
		"nobody there by proxy2": {newCarrier(t, carrier.Proxy2, tenant, nil), netip.MustParseAddrPort("127.0.0.1:1"), "refused"},
	} {
		if conn, err := test.way.Dial(t.Context(), test.host, nil, nil); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, %v; want %q", name, conn, err, test.want)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for name, cfg := range map[string]carrier.Config{
		"no kind":     {Hostname: hostname, Buffers: new(relay.Buffers)},
		"no hostname": {Kind: carrier.Proxy2, Buffers: new(relay.Buffers)},
		"no buffers":  {Kind: carrier.Proxy2, Hostname: hostname},
		"no CA":       {Kind: carrier.TLS, Hostname: hostname, Buffers: new(relay.Buffers)},
	} {
		if c, err := carrier.New(cfg); err == nil {
			t.Errorf("%s: %v", name, c)
		}
	}
}

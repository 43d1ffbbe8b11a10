// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tenantd/tenantd/worker/api"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const hostname = "acme.test"

func start(t *testing.T) (*fakehost.Tenant, *fakehost.Host) {
	t.Helper()
	tenant := fakehost.NewTenant(hostname)
	host, err := tenant.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(host.Close)
	return tenant, host
}

func client(t *testing.T, tenant *fakehost.Tenant, host *fakehost.Host, certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)) *api.Client {
	t.Helper()
	c := api.New(api.Config{
		Hostname: hostname, RootCAs: tenant.Roots, GetClientCertificate: certificate,
		Dial: func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", host.Address.String())
		},
	})
	t.Cleanup(c.Close)
	return c
}

func node(t *testing.T, tenant *fakehost.Tenant) func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	t.Helper()
	certificate, key := tenant.Node("w1", time.Now().Add(time.Hour))
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	return func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
}

func TestReady(t *testing.T) {
	tenant, host := start(t)
	c := client(t, tenant, host, nil)
	host.SetClock(-time.Hour)
	clock, err := c.Ready(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if behind := time.Since(clock); behind < 59*time.Minute || behind > 61*time.Minute {
		t.Errorf("the host's clock is %s behind, want an hour", behind)
	}
	host.SetReady(false)
	_, err = c.Ready(t.Context())
	if status, ok := errors.AsType[*api.StatusError](err); !ok || status.Code != 503 || !strings.Contains(err.Error(), "[-]etcd failed") {
		t.Errorf("of a server that is not ready: %v", err)
	}
	c.Refresh()
	host.Close()
	if _, err := c.Ready(t.Context()); err == nil {
		t.Error("a host that is gone is ready")
	}
}

// TestAnotherTenant expects that an answer counts only from the tenant's own server.
func TestAnotherTenant(t *testing.T) {
	_, host := start(t)
	if _, err := client(t, fakehost.NewTenant(hostname), host, nil).Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("a server of another CA: %v", err)
	}
}

func TestQuestions(t *testing.T) {
	tenant, host := start(t)
	tenant.SetHosts("192.0.2.1:443\n\n  [2001:db8::1]:443  \nhost-c weight=2\n192.0.2.2\n192.0.2.3:0\n", "tunnel.test\n")
	tenant.SetNode("w1", "10.0.0.1", "w1.example.com", "fd00::1")
	tenant.SetNetworks("networking:\n  podSubnet: 10.244.0.0/16,fd01::/48\n  serviceSubnet: 10.96.0.0/16\n")
	c := client(t, tenant, host, node(t, tenant))

	hosts, err := c.Hosts(t.Context())
	if want := addrPorts("192.0.2.1:443", "[2001:db8::1]:443"); err != nil || !slices.Equal(hosts.Addresses, want) || hosts.KonnectivityHostname != "tunnel.test" {
		t.Errorf("hosts %+v, %v; want %v", hosts, err, want)
	}
	addresses, err := c.NodeAddresses(t.Context(), "w1")
	if want := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}; err != nil || !slices.Equal(addresses, want) {
		t.Errorf("addresses %v, %v; want %v", addresses, err, want)
	}
	networks, err := c.Networks(t.Context())
	if want := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd01::/48"), netip.MustParsePrefix("10.96.0.0/16")}; err != nil || !slices.Equal(networks, want) {
		t.Errorf("networks %v, %v; want %v", networks, err, want)
	}
	if _, err := c.NodeAddresses(t.Context(), "w2/../w1"); err == nil {
		t.Error("there is no such node")
	}
	anonymous := client(t, tenant, host, nil)
	if _, err := anonymous.Hosts(t.Context()); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("without a certificate: %v", err)
	}
}

func addrPorts(all ...string) []netip.AddrPort {
	var parsed []netip.AddrPort
	for _, a := range all {
		parsed = append(parsed, netip.MustParseAddrPort(a))
	}
	return parsed
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"strings"
	"testing"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func TestHostTokenRequest(t *testing.T) {
	for ttl, ok := range map[int64]bool{0: true, 60: true, 59: false, -1: false, 24 * 3600: true, 24*3600 + 1: false} {
		r := v1alpha1.HostTokenRequest{Spec: v1alpha1.HostTokenRequestSpec{TTLSeconds: ttl}}
		r.SetDefaults()
		if err := r.Validate(); (err == nil) != ok {
			t.Errorf("%d seconds: %v", ttl, err)
		}
		if ttl == 0 && r.Spec.TTLSeconds != 3600 {
			t.Errorf("default is %d", r.Spec.TTLSeconds)
		}
	}
	if err := (&v1alpha1.HostTokenRequest{}).Validate(); err == nil || !strings.Contains(err.Error(), "kind: ") {
		t.Errorf("a request of no kind: %v", err)
	}
}

func TestHostCredentialsPath(t *testing.T) {
	for _, test := range []struct{ host, subresource, want string }{
		{v1alpha1.AnyHost, v1alpha1.HostTokenSubresource, "/apis/credentials.tenantd.io/v1alpha1/hosts/-/token"},
		{"host-b", v1alpha1.HostJoinSubresource, "/apis/credentials.tenantd.io/v1alpha1/hosts/host-b/join"},
		{"../x", "join", "/apis/credentials.tenantd.io/v1alpha1/hosts/..%2Fx/join"},
	} {
		if got := v1alpha1.HostCredentialsPath(test.host, test.subresource); got != test.want {
			t.Errorf("path is %s, want %s", got, test.want)
		}
	}
}

func TestHostJoinCommand(t *testing.T) {
	got := v1alpha1.HostJoinCommand("192.0.2.10:443", v1alpha1.DefaultHostTokenFile)
	if want := "tenantd run --join 192.0.2.10:443 --join-token-file /etc/tenantd/join-token"; got != want {
		t.Errorf("the line is %s, want %s", got, want)
	}
}

// certificateRequest makes one, in PEM.
func certificateRequest(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "host-b"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

func TestHostJoinRequest(t *testing.T) {
	csr := certificateRequest(t)
	forged := func() []byte {
		block, _ := pem.Decode(csr)
		der := bytes.Clone(block.Bytes)
		der[len(der)-1] ^= 1 // the signature is at the end
		return pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: der})
	}()
	type spec = v1alpha1.HostJoinRequestSpec
	for _, test := range []struct {
		change func(*spec)
		want   string // empty: in order
	}{
		{func(*spec) {}, ""},
		{func(s *spec) {
			s.Address, s.PeerAddress, s.GossipAddress = "127.0.0.1:8443", "[::1]:2380", "127.0.0.1:7946"
		}, ""},
		{func(s *spec) { s.CSR = append(bytes.Clone(csr), '\n') }, ""},
		{func(s *spec) { s.Name = "" }, "spec.name: Required value"},
		{func(s *spec) { s.Name = "Host B" }, "spec.name: Invalid value"},
		{func(s *spec) { s.Name = v1alpha1.AnyHost }, "spec.name: Invalid value"},
		{func(s *spec) { s.Name = "192.0.2.1" }, "spec.name: Invalid value"},
		{func(s *spec) { s.Address = "" }, "spec.address: Required value"},
		{func(s *spec) { s.Address = "host-b:443" }, "spec.address: Invalid value"},
		{func(s *spec) { s.PeerAddress = "" }, "spec.peerAddress: Required value"},
		{func(s *spec) { s.PeerAddress = "0.0.0.0:2380" }, "spec.peerAddress: Invalid value"},
		{func(s *spec) { s.GossipAddress = "" }, "spec.gossipAddress: Required value"},
		{func(s *spec) { s.GossipAddress = "192.0.2.1:0" }, "spec.gossipAddress: Invalid value"},
		{func(s *spec) { s.Version = "" }, "spec.version: Required value"},
		{func(s *spec) { s.Version = strings.Repeat("v", 65) }, "spec.version: Too long"},
		{func(s *spec) { s.Version = "v1\n" }, "spec.version: Invalid value"},
		{func(s *spec) { s.CSR = nil }, "spec.csr: Required value"},
		{func(s *spec) { s.CSR = []byte("x") }, "spec.csr: Invalid value: must be one certificate request"},
		{func(s *spec) { s.CSR = append(bytes.Clone(csr), csr...) }, "spec.csr: Invalid value: must be one certificate request"},
		{func(s *spec) { s.CSR = bytes.ReplaceAll(csr, []byte(" REQUEST"), nil) }, "spec.csr: Invalid value: must be one certificate request"},
		{func(s *spec) { s.CSR = forged }, "spec.csr: Invalid value: must be a certificate request signed with its own key"},
		{func(s *spec) { s.CSR = bytes.Repeat(csr, 50) }, "spec.csr: Too long"},
	} {
		r := v1alpha1.HostJoinRequest{Spec: spec{
			Name: "host-b", Address: "192.0.2.2:443", PeerAddress: "192.0.2.2:2380", GossipAddress: "192.0.2.2:7946", Version: "v0.3.0", CSR: csr,
		}}
		test.change(&r.Spec)
		r.SetDefaults()
		switch err := r.Validate(); {
		case test.want == "" && err != nil:
			t.Errorf("unexpected: %v", err)
		case test.want != "" && (err == nil || !strings.HasPrefix(err.Error(), test.want) || strings.Contains(err.Error(), "\n")):
			t.Errorf("fault is %v, want %s", err, test.want)
		}
	}
	if err := (&v1alpha1.HostJoinRequest{}).Validate(); err == nil || strings.Count(err.Error(), "\n") != 7 {
		t.Errorf("an empty request: %v", err)
	}
}

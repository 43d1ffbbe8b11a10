// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"context"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"
	"github.com/prometheus/client_golang/prometheus"
)

func TestOpenCreatesOnceAndReloads(t *testing.T) {
	s := newStorage(t)
	first := open(t, AuthorityConfig{Storage: s})
	firstLeaf := leaf(t, first, serving("kube-apiserver", "acme.example.com"))
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := first.Leaf(t.Context(), serving("other", "acme.example.com")); err == nil {
		t.Error("a closed authority issues")
	}
	if firstLeaf.TLS() == nil {
		t.Error("closing took the leaf away")
	}

	second := open(t, AuthorityConfig{Storage: s})
	if !bytes.Equal(first.CA(), second.CA()) || !bytes.Equal(first.FrontProxyCA(), second.FrontProxyCA()) {
		t.Error("the CAs changed")
	}
	if bytes.Equal(second.CA(), second.FrontProxyCA()) {
		t.Error("both CAs are the same")
	}
	firstKey, secondKey := first.ServiceAccountKey().(*rsa.PrivateKey), second.ServiceAccountKey().(*rsa.PrivateKey)
	if !firstKey.Equal(secondKey) {
		t.Error("the service-account key changed")
	}
	if cert, _ := leaf(t, second, serving("kube-apiserver", "acme.example.com")).PEM(); !bytes.Equal(cert, firstPEM(firstLeaf)) {
		t.Error("the leaf was issued again")
	}
	if _, err := tls.X509KeyPair(second.CAKeyPair()); err != nil {
		t.Errorf("CA key pair: %v", err)
	}
}

func TestOpenRaceAgrees(t *testing.T) {
	hosts := make([]*Authority, 6)
	certs := make([][]byte, len(hosts))
	storages := make([]*Storage, len(hosts))
	for i := range hosts {
		storages[i] = newStorage(t)
	}
	var wg sync.WaitGroup
	for i := range hosts {
		wg.Go(func() {
			var err error
			hosts[i], err = Open(t.Context(), AuthorityConfig{Tenant: "acme", Storage: storages[i]})
			if err != nil {
				t.Error(err)
				return
			}
			l, err := hosts[i].Leaf(t.Context(), serving("kube-apiserver", "acme.example.com"))
			if err != nil {
				t.Error(err)
				return
			}
			certs[i], _ = l.PEM()
		})
	}
	wg.Wait()
	for i, a := range hosts {
		if a == nil {
			continue
		}
		defer a.Close()
		if !bytes.Equal(a.CA(), hosts[0].CA()) || !bytes.Equal(certs[i], certs[0]) {
			t.Errorf("host %d has its own CA or leaf", i)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	damage := func(files ...string) func(*testing.T, *Storage) *Storage {
		return func(t *testing.T, s *Storage) *Storage {
			for _, file := range files {
				if err := s.Delete(t.Context(), file); err != nil {
					t.Fatal(err)
				}
			}
			return s
		}
	}
	for _, tt := range []struct {
		what   string
		damage func(*testing.T, *Storage) *Storage
		remedy string
	}{
		{"a missing file", damage("sa.key"), "sa.key is missing while other files are there; restore"},
		{"one file only", damage("ca.crt", "ca.key", "front-proxy-ca.crt", "sa.key"), "ca.crt is missing"},
		{"another sealing key", func(t *testing.T, s *Storage) *Storage {
			return NewStorage(s.client, s.prefix, newSealer(t, 9))
		}, "put back the sealing key file"},
		{"a certificate of another key", func(t *testing.T, s *Storage) *Storage {
			front, err := s.Load(t.Context(), "front-proxy-ca.crt")
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Store(t.Context(), "ca.crt", front); err != nil {
				t.Fatal(err)
			}
			return s
		}, "load cluster CA"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			s := newStorage(t)
			open(t, AuthorityConfig{Storage: s}).Close()
			_, err := Open(t.Context(), AuthorityConfig{Tenant: "acme", Storage: tt.damage(t, s)})
			if err == nil || !strings.Contains(err.Error(), tt.remedy) || !strings.Contains(err.Error(), `tenant "acme"`) {
				t.Fatalf("got error %v; want one that names the tenant and says %q", err, tt.remedy)
			}
		})
	}
}

func TestConfigReportsAllFaults(t *testing.T) {
	err := AuthorityConfig{LeafLifetime: time.Second, RenewInterval: time.Hour}.Validate()
	for _, want := range []string{"tenant:", "storage:", "lifetimes:", "renew interval:"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not reported in %v", want, err)
		}
	}
	if err := (AuthorityConfig{Tenant: "acme", Storage: &Storage{}}).Validate(); err != nil {
		t.Errorf("the zero value does not do: %v", err)
	}
}

func TestLeafIsWhatItsProfileSays(t *testing.T) {
	now := newClock()
	a := open(t, AuthorityConfig{Storage: newStorage(t), Clock: now.Now})
	for _, tt := range []struct {
		profile Profile
		usage   x509.ExtKeyUsage
		ca      []byte
	}{
		{Profile{Name: "kube-apiserver", Usage: Serving, CommonName: "kube-apiserver",
			DNSNames: []string{"Acme.example.com", "kubernetes", "kubernetes"}, IPs: []net.IP{{10, 96, 0, 1}, net.ParseIP("fd00::1")}},
			x509.ExtKeyUsageServerAuth, a.CA()},
		{Profile{Name: "kube-scheduler", Usage: Client, CommonName: "system:kube-scheduler"},
			x509.ExtKeyUsageClientAuth, a.CA()},
		{Profile{Name: "kube-apiserver-kubelet-client", Usage: Client, CommonName: "kube-apiserver-kubelet-client", Organization: []string{"b", "a"}},
			x509.ExtKeyUsageClientAuth, a.CA()},
		{Profile{Name: "front-proxy-client", Usage: Client, CommonName: "front-proxy-client", FrontProxy: true},
			x509.ExtKeyUsageClientAuth, a.FrontProxyCA()},
	} {
		t.Run(tt.profile.Name, func(t *testing.T) {
			l := leaf(t, a, tt.profile)
			if again := leaf(t, a, tt.profile); again != l {
				t.Error("asking again gives another leaf")
			}
			certPEM, keyPEM := l.PEM()
			if _, err := tls.X509KeyPair(certPEM, keyPEM); err != nil {
				t.Fatal(err)
			}
			cert := l.TLS().Leaf
			want := tt.profile.normalized()
			if !want.matches(cert) {
				t.Errorf("got %v %v %v, want %+v", cert.Subject, cert.DNSNames, cert.IPAddresses, want)
			}
			verify(t, cert, tt.ca, tt.usage, now.Now())
			if got := cert.NotAfter; !got.Equal(now.Now().Add(DefaultLeafLifetime)) || !l.Expiry().Equal(got) {
				t.Errorf("expires at %s", got)
			}
			if got := cert.NotBefore; !got.Equal(now.Now().Add(-backdate)) {
				t.Errorf("valid from %s", got)
			}
			if cert.IsCA || cert.KeyUsage != x509.KeyUsageDigitalSignature || len(cert.ExtKeyUsage) != 1 {
				t.Errorf("may do too much: CA %v, usage %v, extended %v", cert.IsCA, cert.KeyUsage, cert.ExtKeyUsage)
			}
			issuerCert := parse(t, tt.ca)
			if !bytes.Equal(cert.AuthorityKeyId, issuerCert.SubjectKeyId) || len(cert.SubjectKeyId) != 20 {
				t.Errorf("key ids: authority %x, subject %x", cert.AuthorityKeyId, cert.SubjectKeyId)
			}
			if bits := cert.SerialNumber.BitLen(); bits <= 120 || bits > 128 {
				t.Errorf("serial number has %d bits", bits)
			}
		})
	}
	for _, pem := range [][]byte{a.CA(), a.FrontProxyCA()} {
		cert := parse(t, pem)
		if !cert.IsCA || cert.MaxPathLen != 0 || !cert.MaxPathLenZero || cert.KeyUsage != x509.KeyUsageCertSign|x509.KeyUsageCRLSign {
			t.Errorf("%s: CA %v, path length %d, usage %v", cert.Subject, cert.IsCA, cert.MaxPathLen, cert.KeyUsage)
		}
	}
}

func TestLeafRefusesBadProfiles(t *testing.T) {
	a := open(t, AuthorityConfig{Storage: newStorage(t)})
	for _, tt := range []struct {
		profile Profile
		fault   string
	}{
		{Profile{Name: "a"}, "usage"},
		{serving("", "x"), "name"},
		{serving("system:node", "x"), "name"},
		{serving("../ca", "x"), "name"},
		{serving("Upper", "x"), "name"},
		{serving("10.0.0.1", "x"), "name"},
		{serving("a@b", "x"), "name"},
		{serving("a"), "needs a DNS name"},
		{serving("a", "not a name"), "not one"},
		{Profile{Name: "a", Usage: Serving, IPs: []net.IP{{1, 2}}}, "2 bytes"},
		{Profile{Name: "a", Usage: Serving, DNSNames: []string{"x"}, FrontProxy: true}, "client certificates only"},
		{Profile{Name: "a", Usage: Client}, "common name"},
		{Profile{Name: "a", Usage: Client, CommonName: "u", DNSNames: []string{"x"}}, "no DNS names"},
	} {
		if _, err := a.Leaf(t.Context(), tt.profile); err == nil || !strings.Contains(err.Error(), tt.fault) {
			t.Errorf("%+v: got %v, want a fault about %q", tt.profile, err, tt.fault)
		}
	}
}

// The same users exist in every tenant, and so do the names of their leaves.
func TestTenantsDoNotMix(t *testing.T) {
	cache := NewCache()
	defer cache.Stop()
	profile := Profile{Name: "kube-scheduler", Usage: Client, CommonName: "system:kube-scheduler"}
	now := newClock()
	var all []*Authority
	for _, name := range []string{"a", "b"} {
		a := open(t, AuthorityConfig{Tenant: name, Storage: newStorageAt(t, name), Cache: cache, Clock: now.Now})
		defer a.Close() // before the cache
		all = append(all, a)
	}
	check := func() {
		t.Helper()
		for _, a := range all {
			verify(t, leaf(t, a, profile).TLS().Leaf, a.CA(), x509.ExtKeyUsageClientAuth, now.Now())
		}
	}
	check()
	now.Advance(80 * 24 * time.Hour)
	for _, a := range all {
		if err := a.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	check()
}

func TestRenewalUnderOpenConnection(t *testing.T) {
	now := newClock()
	a := open(t, AuthorityConfig{Storage: newStorage(t), Clock: now.Now})
	l := leaf(t, a, serving("kube-apiserver", "acme.example.com"))
	var changes int
	cancel := l.OnChange(func() { changes++ })
	server := serveEcho(t, &tls.Config{
		Time:           now.Now,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return l.TLS(), nil },
	})
	dial := func() *tls.Conn {
		t.Helper()
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(a.CA())
		conn, err := tls.Dial("tcp", server, &tls.Config{RootCAs: roots, ServerName: "acme.example.com", Time: now.Now})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	serial := func(c *tls.Conn) string { return c.ConnectionState().PeerCertificates[0].SerialNumber.String() }
	renew := func() {
		t.Helper()
		if err := a.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
	}

	before := dial()
	echo(t, before)
	now.Advance(59 * 24 * time.Hour)
	renew()
	if changes != 0 || serial(dial()) != serial(before) {
		t.Fatal("renewed before the last third")
	}
	now.Advance(6 * 24 * time.Hour)
	renew()
	if changes != 1 {
		t.Fatalf("OnChange was called %d times, want once", changes)
	}
	echo(t, before)
	after := dial()
	echo(t, after)
	if serial(after) == serial(before) {
		t.Fatal("a new handshake gets the old certificate")
	}
	renew()
	if changes != 1 {
		t.Fatal("renewed again at once")
	}
	cancel()
	now.Advance(80 * 24 * time.Hour)
	renew()
	if changes != 1 {
		t.Fatal("OnChange was called after cancel")
	}
	if !l.Expiry().Equal(now.Now().Add(DefaultLeafLifetime)) {
		t.Errorf("expires at %s", l.Expiry())
	}
}

func TestRenewalHappensByItself(t *testing.T) {
	now := newClock()
	a := open(t, AuthorityConfig{Storage: newStorage(t), Clock: now.Now, RenewInterval: time.Millisecond})
	l := leaf(t, a, serving("kube-apiserver", "acme.example.com"))
	changed := make(chan struct{}, 1)
	l.OnChange(func() { changed <- struct{}{} })
	now.Advance(70 * 24 * time.Hour)
	<-changed
}

// Of two hosts with the same tenant one renews, and both use what it made.
func TestHostsShareARenewal(t *testing.T) {
	now := newClock()
	profile := serving("kube-apiserver", "acme.example.com")
	var leaves []*Leaf
	var hosts []*Authority
	for range 3 {
		a := open(t, AuthorityConfig{Storage: newStorage(t), Clock: now.Now})
		hosts = append(hosts, a)
		leaves = append(leaves, leaf(t, a, profile))
	}
	old := firstPEM(leaves[0])
	now.Advance(80 * 24 * time.Hour)
	var wg sync.WaitGroup
	for _, a := range hosts {
		wg.Go(func() {
			if err := a.Renew(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i, l := range leaves {
		if got := firstPEM(l); bytes.Equal(got, old) || !bytes.Equal(got, firstPEM(leaves[0])) {
			t.Errorf("host %d did not get the one renewal", i)
		}
	}
}

func TestExpiredLeafIsRenewedAtStart(t *testing.T) {
	now, s := newClock(), newStorage(t)
	profile := serving("kube-apiserver", "acme.example.com")
	a := open(t, AuthorityConfig{Storage: s, Clock: now.Now})
	leaf(t, a, profile)
	a.Close()
	now.Advance(365 * 24 * time.Hour)
	b := open(t, AuthorityConfig{Storage: s, Clock: now.Now})
	verify(t, leaf(t, b, profile).TLS().Leaf, b.CA(), x509.ExtKeyUsageServerAuth, now.Now())
}

func TestClockThatWasAhead(t *testing.T) {
	now, s := newClock(), newStorage(t)
	profile := serving("kube-apiserver", "acme.example.com")
	open(t, AuthorityConfig{Storage: s, Clock: now.Now}).Close()
	now.Advance(24 * time.Hour)
	a := open(t, AuthorityConfig{Storage: s, Clock: now.Now})
	l := leaf(t, a, profile)
	now.Advance(-24 * time.Hour)
	if err := a.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	verify(t, l.TLS().Leaf, a.CA(), x509.ExtKeyUsageServerAuth, now.Now())
	now.Advance(-time.Hour) // before there was a CA
	if _, _, _, err := a.IssueClient(t.Context(), "u", nil, time.Hour); err == nil || !strings.Contains(err.Error(), "set this host's clock") {
		t.Errorf("issued before the CA is valid: %v", err)
	}
}

func TestChangedProfileIsReissued(t *testing.T) {
	s := newStorage(t)
	a := open(t, AuthorityConfig{Storage: s})
	l := leaf(t, a, serving("kube-apiserver", "acme.example.com"))
	var changes int
	l.OnChange(func() { changes++ })
	old := l.TLS()

	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.Leaf(gone, serving("kube-apiserver", "acme.example.com", "more.example.com")); err == nil {
		t.Fatal("issued although the context is done")
	}
	if l.TLS() != old || changes != 0 {
		t.Fatal("a failed change touched the certificate in use")
	}
	if err := a.Renew(t.Context()); err != nil || l.TLS() != old {
		t.Fatalf("a failed change was taken up later: %v", err)
	}

	if got := leaf(t, a, serving("kube-apiserver", "more.example.com", "acme.example.com")); got != l {
		t.Fatal("got another leaf")
	}
	if changes != 1 || !slices.Equal(l.TLS().Leaf.DNSNames, []string{"acme.example.com", "more.example.com"}) {
		t.Fatalf("%d changes, names %q", changes, l.TLS().Leaf.DNSNames)
	}
	leaf(t, a, serving("kube-apiserver", "acme.example.com", "more.example.com")) // in another order
	if changes != 1 {
		t.Fatal("reissued for the order of names")
	}

	// As the next start finds it: stored for other names than it asks for.
	a.Close()
	b := open(t, AuthorityConfig{Storage: s})
	if got := leaf(t, b, serving("kube-apiserver", "new.example.com")).TLS().Leaf.DNSNames; !slices.Equal(got, []string{"new.example.com"}) {
		t.Fatalf("names %q", got)
	}
}

// What a process leaves behind that ends between certmagic's three writes, or an
// operator who deletes one of the files.
func TestHalfAStoredLeafIsReplaced(t *testing.T) {
	profile := serving("kube-apiserver", "acme.example.com")
	for _, file := range []string{
		certmagic.StorageKeys.SiteCert("ca", profile.Name),
		certmagic.StorageKeys.SitePrivateKey("ca", profile.Name),
		certmagic.StorageKeys.SiteMeta("ca", profile.Name),
	} {
		t.Run(file[strings.LastIndex(file, ".")+1:], func(t *testing.T) {
			for what, damage := range map[string]func(*Storage) error{
				"deleted": func(s *Storage) error { return s.Delete(t.Context(), file) },
				"foreign": func(s *Storage) error { return s.Store(t.Context(), file, []byte("{}")) },
			} {
				s := NewStorage(newClient(t), prefix(t)+"/"+what, newSealer(t, 1))
				a := open(t, AuthorityConfig{Storage: s})
				leaf(t, a, profile)
				a.Close()
				if err := damage(s); err != nil {
					t.Fatal(err)
				}
				b := open(t, AuthorityConfig{Storage: s})
				verify(t, leaf(t, b, profile).TLS().Leaf, b.CA(), x509.ExtKeyUsageServerAuth, time.Now())
			}
		})
	}
}

func TestLeafOfAnotherCAIsReplaced(t *testing.T) {
	s := newStorage(t)
	profile := serving("kube-apiserver", "acme.example.com")
	a := open(t, AuthorityConfig{Storage: s})
	leaf(t, a, profile)
	a.Close()
	for _, file := range authorityFiles {
		if err := s.Delete(t.Context(), file); err != nil {
			t.Fatal(err)
		}
	}
	b := open(t, AuthorityConfig{Storage: s})
	verify(t, leaf(t, b, profile).TLS().Leaf, b.CA(), x509.ExtKeyUsageServerAuth, time.Now())
}

func TestSecretsKey(t *testing.T) {
	s := newStorage(t)
	a := open(t, AuthorityConfig{Storage: s})
	key := a.SecretsKey()
	if len(key) != KeySize || bytes.Equal(key, make([]byte, KeySize)) {
		t.Fatalf("the key is %x", key)
	}
	if again := open(t, AuthorityConfig{Storage: s}).SecretsKey(); !bytes.Equal(again, key) {
		t.Error("opened again it is another")
	}
	if other := open(t, AuthorityConfig{Storage: NewStorage(newClient(t), prefix(t)+"/other/pki", newSealer(t, 1))}).SecretsKey(); bytes.Equal(other, key) {
		t.Error("two tenants have one key")
	}

	// A tenant from before there was one gets it, and hosts that start it at once agree.
	if err := s.Delete(t.Context(), "secrets.key"); err != nil {
		t.Fatal(err)
	}
	keys := make([][]byte, 4)
	var opening sync.WaitGroup
	for i := range keys {
		opening.Go(func() {
			b, err := Open(t.Context(), AuthorityConfig{Tenant: "acme", Storage: s})
			if err != nil {
				t.Error(err)
				return
			}
			defer b.Close()
			keys[i] = b.SecretsKey()
			if !bytes.Equal(b.CA(), a.CA()) {
				t.Error("the authority is another")
			}
		})
	}
	opening.Wait()
	for _, k := range keys {
		if len(k) != KeySize || !bytes.Equal(k, keys[0]) || bytes.Equal(k, key) {
			t.Errorf("the new key is %x for one and %x for another", k, keys[0])
		}
	}

	// A damaged store gets none, for that would hide what is missing.
	for _, file := range []string{"secrets.key", "sa.key"} {
		if err := s.Delete(t.Context(), file); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(t.Context(), AuthorityConfig{Tenant: "acme", Storage: s}); err == nil || !strings.Contains(err.Error(), "sa.key is missing") {
		t.Errorf("without the key of service accounts: %v", err)
	}
	if s.Exists(t.Context(), "secrets.key") {
		t.Error("a key was made all the same")
	}
}

func TestLeafNeverOutlivesItsCA(t *testing.T) {
	now := newClock()
	a := open(t, AuthorityConfig{Storage: newStorage(t), Clock: now.Now, CALifetime: 100 * 24 * time.Hour})
	end := parse(t, a.CA()).NotAfter
	profile := serving("kube-apiserver", "acme.example.com")
	now.Advance(50 * 24 * time.Hour)
	l := leaf(t, a, profile)
	if !l.Expiry().Equal(end) {
		t.Fatalf("expires at %s, its CA at %s", l.Expiry(), end)
	}
	cert := l.TLS()
	now.Advance(49 * 24 * time.Hour)
	if err := a.Renew(t.Context()); err != nil || l.TLS() != cert {
		t.Fatalf("renewed to no gain, or failed: %v", err)
	}
	if _, _, notAfter, err := a.IssueClient(t.Context(), "u", nil, MaxClientTTL); err != nil || !notAfter.Equal(end) {
		t.Errorf("client certificate until %s, %v", notAfter, err)
	}
	now.Advance(2 * 24 * time.Hour)
	if err := a.Renew(t.Context()); err == nil || !strings.Contains(err.Error(), "needs a new one") {
		t.Errorf("renewal under an expired CA: %v", err)
	}
	if l.TLS() != cert {
		t.Error("the failed renewal took the certificate away")
	}
}

func TestIssueClient(t *testing.T) {
	now, s := newClock(), newStorage(t)
	a := open(t, AuthorityConfig{Storage: s, Clock: now.Now})
	before, err := s.List(t.Context(), "", true)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		user string
		ttl  time.Duration
		err  string
	}{
		{"alice", time.Hour, ""},
		{"alice", MinClientTTL, ""},
		{"alice", MaxClientTTL, ""},
		{"", time.Hour, "name the user"},
		{"alice", MinClientTTL - 1, "use 1m0s to 8760h0m0s"},
		{"alice", MaxClientTTL + 1, "use 1m0s to 8760h0m0s"},
		{"alice", -time.Hour, "use 1m0s to 8760h0m0s"},
	} {
		t.Run(fmt.Sprintf("%s %s", tt.user, tt.ttl), func(t *testing.T) {
			certPEM, keyPEM, notAfter, err := a.IssueClient(t.Context(), tt.user, []string{"team:b", "team:a"}, tt.ttl)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("got %v, want an error that says %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tls.X509KeyPair(certPEM, keyPEM); err != nil {
				t.Fatal(err)
			}
			cert := parse(t, certPEM)
			verify(t, cert, a.CA(), x509.ExtKeyUsageClientAuth, now.Now())
			if cert.Subject.CommonName != tt.user || !slices.Equal(cert.Subject.Organization, []string{"team:a", "team:b"}) {
				t.Errorf("subject %s", cert.Subject)
			}
			if !notAfter.Equal(now.Now().Add(tt.ttl)) || !cert.NotAfter.Equal(notAfter) {
				t.Errorf("until %s, the certificate says %s", notAfter, cert.NotAfter)
			}
		})
	}
	if after, err := s.List(t.Context(), "", true); err != nil || !slices.Equal(after, before) {
		t.Errorf("issuing stored something: %q, %v", after, err)
	}
}

func TestCollector(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	want := map[string]float64{}
	for _, tenant := range []string{"a", "b"} { // two in one registry
		a := open(t, AuthorityConfig{Tenant: tenant, Storage: newStorageAt(t, tenant)})
		l := leaf(t, a, serving("kube-apiserver", "acme.example.com"))
		registry.MustRegister(a.Collector())
		want[tenant+" kube-apiserver"] = float64(l.Expiry().Unix())
		want[tenant+" ca"] = float64(parse(t, a.CA()).NotAfter.Unix())
		want[tenant+" front-proxy-ca"] = float64(parse(t, a.FrontProxyCA()).NotAfter.Unix())
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, family := range families {
		if family.GetName() != "tenantd_certificate_expiry_timestamp_seconds" {
			t.Errorf("unexpected metric %s", family.GetName())
		}
		for _, m := range family.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			got[labels["tenant"]+" "+labels["certificate"]] = m.GetGauge().GetValue()
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A tenant costs one goroutine, whatever the number of its leaves.
func TestTenantIsCheap(t *testing.T) {
	cache := NewCache()
	defer cache.Stop()
	client, sealer := newClient(t), newSealer(t, 1)
	openOne := func(i int) *Authority {
		a := open(t, AuthorityConfig{
			Tenant: "acme", Cache: cache,
			Storage: NewStorage(client, fmt.Sprintf("%s/%d", prefix(t), i), sealer),
		})
		for _, name := range []string{"a", "b", "c"} {
			leaf(t, a, serving(name, "acme.example.com"))
		}
		return a
	}
	openOne(0) // starts what the etcd client starts at first use
	const tenants = 10
	before := runtime.NumGoroutine()
	for i := range tenants {
		defer openOne(i + 1).Close()
	}
	if grown := runtime.NumGoroutine() - before; grown > tenants+5 {
		t.Errorf("%d tenants cost %d goroutines", tenants, grown)
	}
}

func BenchmarkOpenWithSixLeaves(b *testing.B) {
	cache := NewCache()
	defer cache.Stop()
	s := newStorage(b)
	for b.Loop() {
		a, err := Open(b.Context(), AuthorityConfig{Tenant: "acme", Storage: s, Cache: cache})
		if err != nil {
			b.Fatal(err)
		}
		for i := range 6 {
			leaf(b, a, serving(fmt.Sprint("leaf-", i), "acme.example.com"))
		}
		a.Close()
	}
}

func verify(t *testing.T, cert *x509.Certificate, ca []byte, usage x509.ExtKeyUsage, now time.Time) {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}, CurrentTime: now}); err != nil {
		t.Error(err)
	}
}

func parse(t *testing.T, certPEM []byte) *x509.Certificate {
	t.Helper()
	block, rest := pem.Decode(certPEM)
	if block == nil || len(rest) > 0 {
		t.Fatalf("not one PEM block: %q", certPEM)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func firstPEM(l *Leaf) []byte {
	cert, _ := l.PEM()
	return cert
}

func serveEcho(t *testing.T, config *tls.Config) (address string) {
	t.Helper()
	listener, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				io.Copy(conn, conn)
			})
		}
	})
	t.Cleanup(func() {
		listener.Close()
		wg.Wait()
	})
	return listener.Addr().String()
}

func echo(t *testing.T, conn io.ReadWriter) {
	t.Helper()
	got := make([]byte, 4)
	if _, err := conn.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "ping" {
		t.Fatalf("echo: %q, %v", got, err)
	}
}

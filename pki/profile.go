// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/caddyserver/certmagic"
)

// Usage is what a leaf proves: that a server is who it says, or a client, or both.
type Usage int

const (
	Serving Usage = iota + 1 // for TLS servers
	Client                   // for TLS clients
	Peer                     // for those that are both to each other
)

func (u Usage) extKeyUsages() []x509.ExtKeyUsage {
	switch u {
	case Serving:
		return []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	case Peer:
		return []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	return []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
}

// Profile describes a leaf. Two hosts that share a tenant share the leaf of a
// Name, so what differs between them (such as an address) wants a Name of its own.
type Profile struct {
	// Name is how the leaf is stored, locked and labelled in metrics, and does not
	// appear in the certificate. It is unique within the tenant and consists of
	// lower-case letters, digits, '.', '-' and '_': "kube-apiserver".
	Name  string
	Usage Usage
	// CommonName is the user of a client certificate. A serving one may go without.
	CommonName string
	// Organization is the groups of a client certificate.
	Organization []string
	// DNSNames and IPs are all the names of a serving or peer's certificate, of which
	// there must be one. A client certificate has none.
	DNSNames []string
	IPs      []net.IP
	// FrontProxy has the front-proxy CA sign, not the cluster CA. Clients only.
	FrontProxy bool
}

// validate returns every fault of the profile at once.
func (p Profile) validate() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }

	if p.Name == "" || len(p.Name) > 253 || p.Name != certmagic.StorageKeys.Safe(p.Name) ||
		strings.Contains(p.Name, "@") || strings.HasPrefix(p.Name, ".") || net.ParseIP(p.Name) != nil {
		fault("name %q: use lower-case letters, digits, '.', '-' and '_', at most 253, and not an address", p.Name)
	}
	switch p.Usage {
	case Serving, Peer:
		if len(p.DNSNames)+len(p.IPs) == 0 {
			fault("a serving certificate needs a DNS name or an IP address")
		}
		if p.FrontProxy {
			fault("the front-proxy CA signs client certificates only")
		}
	case Client:
		if p.CommonName == "" {
			fault("a client certificate needs a common name: the user")
		}
		if len(p.DNSNames)+len(p.IPs) > 0 {
			fault("a client certificate has no DNS names or IP addresses")
		}
	default:
		fault("usage must be Serving, Client or Peer")
	}
	for _, name := range p.DNSNames {
		if !certmagic.SubjectQualifiesForCert(name) {
			fault("DNS name %q is not one", name)
		}
	}
	for _, ip := range p.IPs {
		if len(ip) != net.IPv4len && len(ip) != net.IPv6len {
			fault("an IP address has %d bytes", len(ip))
		}
	}
	return errors.Join(faults...)
}

// normalized returns a copy that shares no memory with p, with every list in
// order and without duplicates, so that the order a caller happens to use does
// not look like a change.
func (p Profile) normalized() Profile {
	p.Organization = sortedSet(p.Organization)
	names := make([]string, len(p.DNSNames))
	for i, name := range p.DNSNames {
		names[i] = strings.ToLower(name)
	}
	p.DNSNames = sortedSet(names)
	ips := make([]net.IP, len(p.IPs))
	for i, ip := range p.IPs {
		ips[i] = ip.To16()
	}
	slices.SortFunc(ips, func(a, b net.IP) int { return bytes.Compare(a, b) })
	p.IPs = slices.CompactFunc(ips, net.IP.Equal)
	return p
}

// matches reports whether cert is what a normalized profile asks for.
func (p Profile) matches(cert *x509.Certificate) bool {
	got := Profile{
		Organization: cert.Subject.Organization,
		DNSNames:     cert.DNSNames,
		IPs:          cert.IPAddresses,
	}.normalized()
	return cert.Subject.CommonName == p.CommonName &&
		slices.Equal(got.Organization, p.Organization) &&
		slices.Equal(got.DNSNames, p.DNSNames) &&
		slices.EqualFunc(got.IPs, p.IPs, net.IP.Equal) &&
		slices.Equal(cert.ExtKeyUsage, p.Usage.extKeyUsages())
}

func sortedSet(list []string) []string {
	return slices.Compact(slices.Sorted(slices.Values(list)))
}

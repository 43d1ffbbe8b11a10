// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/caddyserver/certmagic"
)

// backdate is how far before its making a certificate becomes valid, for peers
// whose clocks are behind.
const backdate = 5 * time.Minute

// ca is a certificate authority. It is immutable.
type ca struct {
	cert    *x509.Certificate
	key     crypto.Signer
	certPEM []byte
	keyPEM  []byte
}

func newCA(commonName string, now time.Time, lifetime time.Duration) (*ca, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	id, err := subjectKeyID(&key.PublicKey)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          newSerial(),
		Subject:               pkix.Name{CommonName: commonName},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(lifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true, // it signs leaves only
		SubjectKeyId:          id,
		AuthorityKeyId:        id,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	keyPEM, err := certmagic.PEMEncodePrivateKey(key)
	if err != nil {
		return nil, err
	}
	return parseCA(encodeCert(der), keyPEM)
}

func parseCA(certPEM, keyPEM []byte) (*ca, error) {
	pair, err := tls.X509KeyPair(certPEM, keyPEM) // checks that they belong together
	if err != nil {
		return nil, err
	}
	key, ok := pair.PrivateKey.(crypto.Signer)
	if !ok || !pair.Leaf.IsCA {
		return nil, errors.New("not the certificate of an authority; restore it from a backup")
	}
	return &ca{cert: pair.Leaf, key: key, certPEM: certPEM, keyPEM: keyPEM}, nil
}

// sign issues a certificate for pub as the profile says, valid for lifetime but
// never beyond the CA itself.
func (c *ca) sign(pub crypto.PublicKey, p Profile, now time.Time, lifetime time.Duration) (*x509.Certificate, error) {
	if now.Before(c.cert.NotBefore) {
		return nil, fmt.Errorf("the authority %q is valid from %s only; set this host's clock, which says %s",
			c.cert.Subject.CommonName, c.cert.NotBefore.Format(time.RFC3339), now.Format(time.RFC3339))
	}
	if !now.Before(c.cert.NotAfter) {
		return nil, fmt.Errorf("the authority %q expired at %s; its cluster needs a new one, and every node must join again",
			c.cert.Subject.CommonName, c.cert.NotAfter.Format(time.RFC3339))
	}
	id, err := subjectKeyID(pub)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          newSerial(),
		Subject:               pkix.Name{CommonName: p.CommonName, Organization: p.Organization},
		NotBefore:             latest(now.Add(-backdate), c.cert.NotBefore),
		NotAfter:              earliest(now.Add(lifetime), c.cert.NotAfter),
		KeyUsage:              x509.KeyUsageDigitalSignature, // all that an ECDSA key can do in TLS
		ExtKeyUsage:           p.Usage.extKeyUsages(),
		BasicConstraintsValid: true,
		SubjectKeyId:          id,
		DNSNames:              p.DNSNames,
		IPAddresses:           p.IPs,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, c.cert, pub, c.key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// issuer lets certmagic issue one profile's leaf. Of certmagic's request it
// takes the public key only: the profile says all the rest.
type issuer struct {
	ca       *ca
	profile  Profile
	now      func() time.Time
	lifetime time.Duration
}

var _ certmagic.Issuer = issuer{}

// IssuerKey names the folder of this authority's certificates.
func (i issuer) IssuerKey() string {
	if i.profile.FrontProxy {
		return "front-proxy-ca"
	}
	return "ca"
}

func (i issuer) Issue(ctx context.Context, request *x509.CertificateRequest) (*certmagic.IssuedCertificate, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := request.CheckSignature(); err != nil {
		return nil, err
	}
	cert, err := i.ca.sign(request.PublicKey, i.profile, i.now(), i.lifetime)
	if err != nil {
		return nil, err
	}
	return &certmagic.IssuedCertificate{Certificate: encodeCert(cert.Raw)}, nil
}

// newSerial returns 128 random bits, which no two certificates share.
func newSerial() *big.Int {
	b := make([]byte, 16)
	rand.Read(b)
	b[0] |= 1 // never shorter, never zero
	return new(big.Int).SetBytes(b)
}

// subjectKeyID is RFC 7093, section 2, method 1: without SHA-1.
func subjectKeyID(pub crypto.PublicKey) ([]byte, error) {
	key, ok := pub.(*ecdsa.PublicKey)
	if !ok {
		return nil, fmt.Errorf("public key is %T, want ECDSA", pub)
	}
	point, err := key.Bytes()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(point)
	return sum[:20], nil
}

func encodeCert(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func earliest(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

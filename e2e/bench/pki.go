// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// validity outlasts every run.
const validity = 24 * time.Hour

// authority is a certificate authority whose files are in dir. All keys are of the
// kind that tenantd makes.
type authority struct {
	dir  string
	name string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// newAuthority makes an authority and writes <name>.crt and <name>.key.
func newAuthority(dir, name string) (*authority, error) {
	a := &authority{dir: dir, name: name}
	var err error
	a.cert, a.key, err = a.issue(name, &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	})
	return a, err
}

// issueServing issues a certificate for 127.0.0.1 and further names, and writes
// <name>.crt and <name>.key.
func (a *authority) issueServing(name string, dnsNames ...string) error {
	_, _, err := a.issue(name, &x509.Certificate{
		Subject:     pkix.Name{CommonName: name},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames:    dnsNames,
	})
	return err
}

// issueClient issues a user's certificate and writes <name>.crt and <name>.key.
func (a *authority) issueClient(name, user string, groups ...string) error {
	_, _, err := a.issue(name, &x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	return err
}

// issue signs the template, by itself while the authority has no certificate yet.
func (a *authority) issue(name string, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	key, err := writeKey(a.dir, name)
	if err != nil {
		return nil, nil, err
	}
	template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, nil, fmt.Errorf("choose the serial number of %s: %w", name, err)
	}
	template.NotBefore = time.Now().Add(-time.Minute)
	template.NotAfter = time.Now().Add(validity)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return nil, nil, fmt.Errorf("sign certificate of %s: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, fmt.Errorf("read certificate of %s: %w", name, err)
	}
	return cert, key, writePEM(a.dir, name+".crt", "CERTIFICATE", der)
}

// writeKubeconfig writes <name>.kubeconfig with the certificate that issueClient wrote.
func (a *authority) writeKubeconfig(name, server string) error {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["bench"] = &clientcmdapi.Cluster{Server: server, CertificateAuthority: filepath.Join(a.dir, a.name+".crt")}
	cfg.AuthInfos[name] = &clientcmdapi.AuthInfo{
		ClientCertificate: filepath.Join(a.dir, name+".crt"),
		ClientKey:         filepath.Join(a.dir, name+".key"),
	}
	cfg.Contexts["bench"] = &clientcmdapi.Context{Cluster: "bench", AuthInfo: name}
	cfg.CurrentContext = "bench"
	return clientcmd.WriteToFile(*cfg, filepath.Join(a.dir, name+".kubeconfig"))
}

// writeSigningKey makes the key of service account tokens, <name>.key and <name>.pub.
func writeSigningKey(dir, name string) error {
	key, err := writeKey(dir, name)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return fmt.Errorf("encode key %s: %w", name, err)
	}
	return writePEM(dir, name+".pub", "PUBLIC KEY", der)
}

func writeKey(dir, name string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key %s: %w", name, err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode key %s: %w", name, err)
	}
	return key, writePEM(dir, name+".key", "EC PRIVATE KEY", der)
}

func writePEM(dir, name, kind string, der []byte) error {
	return os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
)

// BootstrapToken returns a new token for kubeadm join, which is written
// "id.secret": the id, of 6 characters, is public and names the token, the
// secret has 16, about 82 bits.
func BootstrapToken() (id, secret string) { return randomString(6), randomString(16) }

func randomString(length int) string {
	const alphabet = "0123456789abcdefghijklmnopqrstuvwxyz"
	s := make([]byte, 0, length)
	var b [1]byte
	for len(s) < length {
		rand.Read(b[:])
		// The rest above the largest multiple is dropped, or some would come up more often.
		if int(b[0]) < 256/len(alphabet)*len(alphabet) {
			s = append(s, alphabet[int(b[0])%len(alphabet)])
		}
	}
	return string(s)
}

// CAHash returns what kubeadm join --discovery-token-ca-cert-hash takes:
// "sha256:" and the hash of the public key of the first certificate in caPEM. It
// is empty, which kubeadm refuses, if there is no certificate in it.
func CAHash(caPEM []byte) string {
	block, _ := pem.Decode(caPEM)
	if block == nil || block.Type != "CERTIFICATE" {
		return ""
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return "sha256:" + hex.EncodeToString(sum[:])
}

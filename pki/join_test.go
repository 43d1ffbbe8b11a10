// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"regexp"
	"testing"
)

func TestBootstrapToken(t *testing.T) {
	form := regexp.MustCompile(`^[a-z0-9]{6}\.[a-z0-9]{16}$`) // kubeadm's
	seen := map[string]bool{}
	var characters [256]int
	for range 1000 {
		id, secret := BootstrapToken()
		if !form.MatchString(id + "." + secret) {
			t.Fatalf("%s.%s is not a token", id, secret)
		}
		if seen[secret] {
			t.Fatalf("secret %s came twice", secret)
		}
		seen[secret] = true
		for _, c := range []byte(id + secret) {
			characters[c]++
		}
	}
	for _, c := range []byte("0123456789abcdefghijklmnopqrstuvwxyz") {
		if characters[c] == 0 {
			t.Errorf("%q never comes up", c)
		}
	}
}

// Made with: openssl x509 -pubkey -noout | openssl pkey -pubin -outform der | sha256sum
func TestCAHashIsKubeadms(t *testing.T) {
	const (
		certificate = `-----BEGIN CERTIFICATE-----
MIIBgTCCASegAwIBAgIUFkP2j+HgErFcgsW5L+CB0uNxVzUwCgYIKoZIzj0EAwIw
FTETMBEGA1UEAwwKa3ViZXJuZXRlczAgFw0yNjExMjEwMDQwMzNaGA8yMTI2MTAy
ODAwNDAzM1owFTETMBEGA1UEAwwKa3ViZXJuZXRlczBZMBMGByqGSM49AgEGCCqG
SM49AwEHA0IABGTkcdhpYw1pFLmK8yOr1phVbZAosCFckiM4UZnnScs76AVAvUFs
PyPZW38Fo3yVHDz8KfBISoC/khGKnDboXkyjUzBRMB0GA1UdDgQWBBRrhKXcTTOd
iX9uCq4rYe1ZcL0KJzAfBgNVHSMEGDAWgBRrhKXcTTOdiX9uCq4rYe1ZcL0KJzAP
BgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0gAMEUCIQCbX10qsBe+iBoRdd79
ZPKVs9bDeBtVwWnN0a2dX89u1AIgZIOo6fHRY7Lz8tSgwxyXgjoi6URx1wqPsYPu
yo3OlQE=
-----END CERTIFICATE-----
`
		want = "sha256:18c1b8e6e357c313154b76916175dd43ccef6c06b2088329f32b286c35c6f1e6"
	)
	if got := CAHash([]byte(certificate)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, bad := range []string{"", "x", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"} {
		if got := CAHash([]byte(bad)); got != "" {
			t.Errorf("%q: got %s, want none", bad, got)
		}
	}
}

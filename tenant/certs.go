// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"crypto/sha256"
	"net/http"
	"sync"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
)

const (
	// certMemory is for how long it is remembered whose a client's certificate is. What
	// says so, the authority and the certificate, does not change but by running out.
	certMemory = 10 * time.Second
	// maxCerts is how many are remembered.
	maxCerts = 1000
)

// rememberedCerts authenticates requests as upstream does, but those of a client
// certificate only once in a while: verifying its signature is an eighth of what a
// get costs. Whether the client has the certificate's key, each connection shows.
type rememberedCerts struct {
	authenticator.Request

	mu    sync.Mutex // guards what follows
	known map[[sha256.Size]byte]knownCert
}

type knownCert struct {
	response *authenticator.Response // shared by requests, which do not change it
	until    time.Time
}

// AuthenticateRequest implements authenticator.Request.
func (r *rememberedCerts) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	// Another header may make a request somebody else's: one of a front proxy, above all.
	if req.TLS == nil || len(req.TLS.PeerCertificates) == 0 || req.Header.Get("X-Remote-User") != "" || req.Header.Get("Authorization") != "" || req.Header.Get("Sec-WebSocket-Protocol") != "" {
		return r.Request.AuthenticateRequest(req)
	}
	now := time.Now()
	until := now.Add(certMemory)
	hash := sha256.New()
	for _, cert := range req.TLS.PeerCertificates { // each of which says how long it is
		hash.Write(cert.Raw)
		if cert.NotAfter.Before(until) {
			until = cert.NotAfter
		}
	}
	key := [sha256.Size]byte(hash.Sum(nil))
	r.mu.Lock()
	known, ok := r.known[key]
	r.mu.Unlock()
	if ok && now.Before(known.until) {
		return known.response, true, nil
	}
	response, ok, err := r.Request.AuthenticateRequest(req)
	if ok && err == nil && response.User.GetName() != user.Anonymous {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.known == nil || len(r.known) >= maxCerts {
			r.known = map[[sha256.Size]byte]knownCert{}
		}
		r.known[key] = knownCert{response, until}
	}
	return response, ok, err
}

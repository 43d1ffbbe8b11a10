// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
)

func TestCertificatesAreRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		r := &rememberedCerts{Request: authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
			asked++
			name := string(req.TLS.PeerCertificates[0].Raw)
			return &authenticator.Response{User: &user.DefaultInfo{Name: name}}, true, nil
		})}
		cert := func(raw string, left time.Duration) *x509.Certificate {
			return &x509.Certificate{Raw: []byte(raw), NotAfter: time.Now().Add(left)}
		}
		a, b := cert("a", time.Hour), cert("b", time.Hour)
		for _, c := range []struct {
			what   string
			certs  []*x509.Certificate
			header string
			after  time.Duration
			asks   bool
		}{
			{"first", []*x509.Certificate{a}, "", 0, true},
			{"again", []*x509.Certificate{a}, "", certMemory / 2, false},
			{"another", []*x509.Certificate{b}, "", 0, true},
			{"with an intermediate", []*x509.Certificate{a, b}, "", 0, true},
			{"for somebody else", []*x509.Certificate{a}, "X-Remote-User", 0, true},
			{"with a token", []*x509.Certificate{a}, "Authorization", 0, true},
			{"with a token in a protocol", []*x509.Certificate{a}, "Sec-Websocket-Protocol", 0, true},
			{"after a while", []*x509.Certificate{a}, "", certMemory / 2, true},
			{"that runs out", []*x509.Certificate{cert("c", 2*time.Second)}, "", 0, true},
			{"that has run out", []*x509.Certificate{cert("c", 0)}, "", 2 * time.Second, true},
			{"with an intermediate that runs out", []*x509.Certificate{b, cert("d", 2*time.Second)}, "", 0, true},
			{"with an intermediate that has run out", []*x509.Certificate{b, cert("d", 0)}, "", 2 * time.Second, true},
			{"of nobody", []*x509.Certificate{cert(user.Anonymous, time.Hour)}, "", 0, true},
			{"of nobody again", []*x509.Certificate{cert(user.Anonymous, time.Hour)}, "", 0, true},
		} {
			time.Sleep(c.after)
			req := &http.Request{Header: http.Header{}, TLS: &tls.ConnectionState{PeerCertificates: c.certs}}
			if c.header != "" {
				req.Header.Set(c.header, "x")
			}
			before := asked
			response, ok, err := r.AuthenticateRequest(req)
			if err != nil || !ok || response.User.GetName() != string(c.certs[0].Raw) {
				t.Errorf("%s: %v %t %v", c.what, response, ok, err)
			}
			if asks := asked > before; asks != c.asks {
				t.Errorf("%s: upstream is asked: %t", c.what, asks)
			}
		}
	})
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/server/filters"
	"k8s.io/client-go/rest"
)

// What the control plane's own components hold open must not hold up its end.
func TestOwnConnectionsEndWithTheListener(t *testing.T) {
	public, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newListener(public)
	var server net.Conn
	accepted := make(chan error, 1)
	go func() {
		var err error
		server, err = l.Accept()
		accepted <- err
	}()
	client, err := l.dial(t.Context())
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	defer server.Close()
	l.Close()
	if err := server.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := server.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the server's end: %v", err)
	}
	if len(l.own) > 0 {
		t.Error("the connection is not forgotten")
	}
}

// What a stopped API server says to its own components is nothing that client-go
// takes for a reason to ask again.
func TestStoppedServerIsNotAskedAgain(t *testing.T) {
	public, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newListener(public)
	l.close()
	if _, err = l.dial(t.Context()); err == nil || utilnet.IsProbableEOF(err) || utilnet.IsConnectionReset(err) || utilnet.IsConnectionRefused(err) {
		t.Errorf("got %v", err)
	}
}

// What the API server asks of itself in the middle of an answer is answered while it stops:
// told to come again later, both would wait for the other.
func TestOwnRequestsAreAnsweredToTheEnd(t *testing.T) {
	stopping := make(chan struct{})
	close(stopping)
	server := httptest.NewServer(filters.WithRetryAfter(http.NotFoundHandler(), stopping))
	defer server.Close()
	for _, c := range []struct {
		userAgent string
		want      int
	}{
		{ownUserAgent(), http.StatusNotFound},
		{rest.DefaultKubernetesUserAgent(), http.StatusTooManyRequests},
	} {
		client, err := rest.HTTPClientFor(&rest.Config{UserAgent: c.userAgent})
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Get(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != c.want {
			t.Errorf("%s is answered %s", c.userAgent, resp.Status)
		}
	}
}

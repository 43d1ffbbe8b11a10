// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// Whoever is answered after the control plane has retired goes elsewhere next, even if
// they asked before.
func TestRetiredAnswersAreTheLast(t *testing.T) {
	requests := newRequests("a")
	asked, answer := make(chan struct{}), make(chan struct{})
	server := httptest.NewUnstartedServer(requests.wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-answer
		w.WriteHeader(http.StatusOK)
	})))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	get := func(meanwhile func()) (last bool) {
		go func() { <-asked; meanwhile(); answer <- struct{}{} }()
		// Over HTTP/1.1, where it is a header that can be seen.
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: server.Client().Transport.(*http.Transport).TLSClientConfig}}
		defer client.CloseIdleConnections()
		resp, err := client.Get(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.Close
	}
	if get(func() {}) {
		t.Error("an answer is the last of its connection without a reason")
	}
	if !get(func() { requests.retired.Store(true) }) {
		t.Error("the answer to a request from before is not the last of its connection")
	}
	if !get(func() {}) {
		t.Error("a later answer is not the last of its connection")
	}
}

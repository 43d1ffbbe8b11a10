// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	openapiv3aggregator "k8s.io/kube-aggregator/pkg/controllers/openapiv3/aggregator"
)

// knownServers notes when it looks at what.
type knownServers struct {
	openapiv3aggregator.SpecProxier
	looked []string
}

// UpdateAPIServiceSpec implements SpecProxier.
func (k *knownServers) UpdateAPIServiceSpec(name string) error {
	k.looked = append(k.looked, name)
	return nil
}

// GetAPIServiceNames implements SpecProxier.
func (*knownServers) GetAPIServiceNames() []string { return []string{"a", "b"} }

func TestDocumentsAreLookedAtWhenAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		servers := new(knownServers)
		l := &localDocuments{SpecProxier: servers, names: servers.GetAPIServiceNames()}
		if names := l.GetAPIServiceNames(); len(names) > 0 {
			t.Errorf("the controller looks at %q by itself", names)
		}
		var known []string // when it is answered
		h := l.wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { known = slices.Clone(servers.looked) }))
		for i, want := range []int{2, 2, 4} { // at once, not within a second, anew
			if i == 2 {
				time.Sleep(localAge)
			}
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/openapi/v3", nil))
			if len(known) != want {
				t.Errorf("request %d is answered after looks at %q", i, known)
			}
		}
	})
}

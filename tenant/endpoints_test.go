// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"net/url"
	"testing"
)

// sameEndpoint answers as upstream does for the API server itself.
type sameEndpoint struct{ url.URL }

func (e *sameEndpoint) ResolveEndpoint(string, string, int32) (*url.URL, error) { return &e.URL, nil }

// What one caller writes into an endpoint, no other reads.
func TestEndpointsAreOwn(t *testing.T) {
	resolver := ownEndpoints{&sameEndpoint{url.URL{Host: "h"}}}
	first, err := resolver.ResolveEndpoint("default", "kubernetes", 443)
	if err != nil {
		t.Fatal(err)
	}
	first.Path = "/apis/a/v1"
	if second, err := resolver.ResolveEndpoint("default", "kubernetes", 443); err != nil || second.Host != "h" || second.Path != "" {
		t.Errorf("another caller gets %v, %v", second, err)
	}
}

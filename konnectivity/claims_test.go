// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"slices"
	"testing"
)

// FuzzClaims reads what an agent says of itself: there are never more claims than
// may be, each is in the form in which addresses are compared, and saying the same
// again changes nothing.
func FuzzClaims(f *testing.F) {
	for _, seed := range []string{
		"", "ipv4=10.0.0.1", "ipv4=10.0.0.1&ipv6=fd00::1&host=node-a.example.com.", "ipv4=::ffff:10.0.0.1",
		"ipv6=fe80::1%25eth0", "host=A&host=a&host=a.", "cidr=0.0.0.0/0&default-route=true", "ipv4=%zz", "ipv4;ipv6", "host=%00%ff%0a",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, identifiers string) {
		claimed, err := claims(identifiers)
		if err != nil {
			return
		}
		if len(claimed) > maxClaims || !slices.IsSorted(claimed) || len(slices.Compact(slices.Clone(claimed))) != len(claimed) {
			t.Fatalf("%q claims %q", identifiers, claimed)
		}
		again, err := claims(identifiers + "&" + identifiers)
		if err == nil && !slices.Equal(again, claimed) {
			t.Fatalf("%q claims %q, twice it claims %q", identifiers, claimed, again)
		}
	})
}

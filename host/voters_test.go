// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"slices"
	"strings"
	"testing"

	"github.com/tenantd/tenantd/storage"
)

func TestVotersAreOdd(t *testing.T) {
	for hosts, want := range map[int]int{1: 1, 2: 1, 3: 3, 4: 3, 5: 5, 6: 5, 7: 5, maxHosts: 5} {
		if got := votersOf(hosts); got != want {
			t.Errorf("of %d hosts %d vote, want %d", hosts, got, want)
		}
	}
}

// Hosts are letters: a capital one votes, one with a - is dead, with a / is to be removed,
// and with a ? has not started yet.
func TestElect(t *testing.T) {
	for _, test := range []struct{ hosts, want string }{
		{"A", ""},
		{"A b", ""},      // two votes would need each other
		{"A b c?", ""},   // nor does one that is to come help
		{"A b c", "b c"}, // at once
		{"A b c-", ""},   // the second would be the last for now
		{"A B", ""},      // from before; a vote cannot be taken back
		{"A B c", "c"},   // which this makes up for
		{"A B c d", "c"}, // and no more than that
		{"A B C d", ""},  // as well with three
		{"A B C d e", "d e"},
		{"A B C- d e", "d e"},
		{"A B C d e-", ""},
		{"A B C D e", "e"},
		{"A B C D E f g", ""},
		{"A B C D E- f", ""},     // it may come back
		{"A B C D E-/ f", "f"},   // it will not
		{"A B C D E/ f- g", "g"}, // whoever is there
		{"A B C D/ E/ f g", "f g"},
		{"A/ b", "b"}, // before the last voter goes
		{"A/ b-", ""},
		{"A b/ c", ""},
		{"A B C/ d", "d"},
		{"A B C D E", ""},
	} {
		var members []storage.Member
		hosts := map[string]standing{}
		for _, h := range strings.Fields(test.hosts) {
			name := strings.ToLower(h[:1])
			members = append(members, storage.Member{Name: name, Learner: h[:1] == name, Started: !strings.Contains(h, "?")})
			hosts[name] = standing{alive: !strings.ContainsAny(h, "-?"), leaving: strings.Contains(h, "/")}
		}
		if got := elect(members, hosts); !slices.Equal(got, strings.Fields(test.want)) {
			t.Errorf("of %q %q get a vote, want %q", test.hosts, got, test.want)
		}
	}
}

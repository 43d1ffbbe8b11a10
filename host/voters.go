// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/storage"
)

const (
	// maxVoters is how many hosts decide together. More of them would not make it
	// safer, and each write waits for a majority.
	maxVoters = 5
	// maxHosts is how many there may be in all: as many as gossip and placement are
	// measured with. etcd's leader sends all that is written to each.
	maxHosts = 20
)

// votersOf is how many of so many hosts vote: an odd number, since one more than that
// makes a majority larger and may not fail any more than before.
func votersOf(hosts int) int { return min(max(hosts-1+hosts%2, 1), maxVoters) }

// standing is what a member of etcd is as a host.
type standing struct {
	alive   bool
	leaving bool // it is to be removed
}

// elect says which members get a vote now: those that make up for voters that leave, and
// otherwise two at a time, so that their number is odd again.
func elect(members []storage.Member, hosts map[string]standing) (names []string) {
	stay, voters := 0, 0
	for _, m := range members {
		switch h := hosts[m.Name]; {
		case h.leaving || !m.Started:
			continue
		case !m.Learner:
			voters++
		case h.alive:
			names = append(names, m.Name)
		}
		stay++
	}
	n := max(min(votersOf(stay)-voters, len(names)), 0)
	if n > 0 && (voters+n)%2 == 0 {
		n--
	}
	return names[:n]
}

// letVote lets hosts vote that have a copy of all, where there are too few that do.
func (s *hosts) letVote(ctx context.Context, views map[string]*view, objects []v1alpha1.Host) error {
	members, err := s.host.store.Members(ctx)
	if err != nil || !slices.ContainsFunc(members, func(m storage.Member) bool { return m.Learner }) {
		return err
	}
	entries, err := s.entries(ctx)
	if err != nil {
		return err
	}
	all := map[string]standing{}
	for _, e := range entries {
		v := views[e.Name]
		all[cmp.Or(e.Member, e.Name)] = standing{
			alive:   v != nil && v.Alive,
			leaving: slices.ContainsFunc(objects, func(o v1alpha1.Host) bool { return o.Name == e.Name && !o.DeletionTimestamp.IsZero() }),
		}
	}
	var errs []error
	for _, name := range elect(members, all) {
		switch err := s.host.store.Promote(ctx, name); {
		case err == nil:
			s.host.log.Info("a host votes from now on", "host", name)
		case !errors.Is(err, storage.ErrNotCaughtUp):
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

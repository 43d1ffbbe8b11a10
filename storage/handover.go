// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"time"
)

const (
	// handoverKey is written by a leader that is about to go.
	handoverKey = HostPrefix + "handover"
	// handoverNotice is the time from then until it hands over: all members hear of the key with the next heartbeat or
	// the one after, and what they sent before has an answer.
	handoverNotice = 3 * heartbeat
	// handoverPatience bounds how long writes wait for the new leader.
	handoverPatience = 3 * time.Second
)

// handOver has another member lead, if this one does, and no write lost by that. A leader that hands over drops what
// others send it, without a word, and they wait for an answer as long as etcd gives a request. So all members hold their
// writes back meanwhile.
func (s *Store) handOver(ctx context.Context) {
	if !s.Leader() || s.failed.Load() || s.voters() <= 1 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, handoverPatience)
	defer cancel()
	if _, err := s.client.Put(ctx, handoverKey, s.cfg.Name); err != nil {
		s.log.Warn("other hosts were not told that storage gets another leader", "error", err)
		return
	}
	select {
	case <-ctx.Done():
		return
	case <-time.After(handoverNotice):
	}
	if err := s.etcd.Server.TryTransferLeadershipOnShutdown(); err != nil {
		s.log.Warn("storage leadership could not be handed over", "error", err)
	}
}

// yield holds writes back whenever the leader hands over, until ctx is done.
func (s *Store) yield(ctx context.Context) {
	for ctx.Err() == nil {
		for resp := range s.client.Watch(ctx, handoverKey) {
			if len(resp.Events) > 0 {
				s.holdForLeader(ctx)
			}
		}
	}
}

// holdForLeader returns when another leads, or did not come to.
func (s *Store) holdForLeader(ctx context.Context) {
	before := s.etcd.Server.Leader()
	ctx, cancel := context.WithTimeout(ctx, handoverPatience)
	defer cancel()
	if !s.defrags.TryLock() {
		return // writes are held already
	}
	defer s.defrags.Unlock()
	if err := s.gate.close(ctx); err != nil {
		return
	}
	defer s.gate.open()
	look := time.NewTicker(heartbeat / 20)
	defer look.Stop()
	for now := before; now == before || now == 0; now = s.etcd.Server.Leader() {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
	}
}

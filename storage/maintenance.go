// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/types"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

// quietWrites is the rate, per second, below which a defragmentation disturbs few.
const quietWrites = 50

// pauseFactor keeps a backend that stays nearly full from being defragmented more than a twentieth of the time.
const pauseFactor = 20

// upkeep is what maintenance remembers between rounds.
type upkeep struct {
	Config
	marks     []mark // by age, oldest first; revisions rise
	compacted time.Time
	defragged time.Time
	took      time.Duration // the last defragmentation
	round     time.Time
	rev       int64
	alarmed   bool
	freed     bool // compacted since the last defragmentation: etcd may not know yet what is free
}

// mark says that the revision was rev at a time, so what was superseded up to rev is at least that old.
type mark struct {
	at  time.Time
	rev int64
}

func newUpkeep(cfg Config, now time.Time) *upkeep {
	return &upkeep{Config: cfg, compacted: now, round: now}
}

// maintain compacts, defragments and clears the space alarm until ctx is done.
func (s *Store) maintain(ctx context.Context) {
	u := newUpkeep(s.cfg, time.Now())
	tick := time.NewTicker(max(s.cfg.MinHistory/2, time.Millisecond))
	defer tick.Stop()
	for {
		if err := s.round(ctx, u, time.Now()); err != nil && ctx.Err() == nil {
			s.log.Warn("storage maintenance failed, will try again", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.wakeup:
		}
	}
}

// wake asks for a round now.
func (s *Store) wake() {
	select {
	case s.wakeup <- struct{}{}:
	default:
	}
}

func (s *Store) round(ctx context.Context, u *upkeep, now time.Time) error {
	rev := s.ledger.mark()
	if len(u.marks) == 0 || rev > u.marks[len(u.marks)-1].rev {
		u.marks = append(u.marks, mark{now, rev})
	}
	elapsed := now.Sub(u.round)
	quiet := float64(rev-u.rev) <= quietWrites*elapsed.Seconds()
	u.rev, u.round = rev, now

	// Another may have compacted.
	if first := s.etcd.Server.KV().FirstRev(); first > s.CompactRevision() {
		s.ledger.forgetHistory(first)
		u.compacted, u.freed = now, true
	}
	if !s.Lag().LeaderKnown {
		return nil // nothing that follows could be written
	}

	alarms := s.spaceAlarms()
	alarmed := len(alarms) > 0
	if alarmed && !u.alarmed {
		s.log.Error("storage is full: etcd refuses all writes until space is freed", "quota", u.BackendQuota)
	}
	u.alarmed = alarmed

	size, inUse := s.sizes()
	tight := size >= percent(u.BackendQuota, tightPercent)

	// The leader compacts for all. Each has marks of its own, which lag if anything, so what another needs for its own
	// tenants drops no more than MinHistory allows.
	keep, due := u.CompactInterval, s.Leader() && now.Sub(u.compacted) >= u.CompactInterval
	switch {
	case alarmed:
		keep, due = 0, true
	case tight || s.ledger.pressed():
		keep, due = u.MinHistory, true
	}
	if target := u.before(now.Add(-keep)); due && target > s.CompactRevision() {
		if err := s.compactTo(ctx, target, true); err != nil {
			return err
		}
		u.freed = true
		size, inUse = s.sizes()
	}
	if due {
		u.compacted = now
	}

	free := size - inUse
	var defrag bool
	switch since := now.Sub(u.defragged); {
	case since < pauseFactor*u.took:
	case alarmed, size >= percent(u.BackendQuota, fullPercent):
		defrag = (free >= size/100 || u.freed) && since >= u.MinHistory
	case tight:
		defrag = free >= size/10 && since >= 6*u.MinHistory
	default:
		// Not quiet for twice the interval: then it is never quiet.
		defrag = size >= u.DefragMinBytes && free > size/2 && inUse <= u.DefragMaxBytes &&
			since >= u.DefragInterval && (quiet || since >= 2*u.DefragInterval)
	}
	if defrag {
		start := time.Now()
		switch err := s.defragmentInTurn(ctx, (*concurrency.Mutex).TryLock); {
		case errors.Is(err, concurrency.ErrLocked): // another's turn
		case err != nil:
			return err
		default:
			u.defragged, u.took, u.freed = now, time.Since(start), false
			size, _ = s.sizes()
		}
	}

	if alarmed && size < percent(u.BackendQuota, fullPercent) {
		for _, alarm := range alarms {
			if !s.answersFor(alarm) {
				continue
			}
			if _, err := s.client.AlarmDisarm(ctx, alarm); err != nil {
				return fmt.Errorf("clear the space alarm: %w", err)
			}
		}
		s.log.Info("storage has space again", "size", size, "quota", u.BackendQuota)
	}
	return nil
}

// answersFor says whether it is up to this member to clear an alarm: its own, and as the leader that of a member that is
// gone.
func (s *Store) answersFor(alarm *clientv3.AlarmMember) bool {
	server := s.etcd.Server
	of := types.ID(alarm.MemberID)
	return of == server.MemberID() || s.Leader() && server.Cluster().Member(of) == nil
}

// before returns the newest marked revision that is at least as old as then, and drops the marks it makes useless.
func (u *upkeep) before(then time.Time) int64 {
	n := 0
	for n < len(u.marks) && !u.marks[n].at.After(then) {
		n++
	}
	if n == 0 {
		return 0
	}
	u.marks = append(u.marks[:0], u.marks[n-1:]...)
	return u.marks[0].rev
}

// spaceAlarms returns the alarms under which etcd refuses every write.
func (s *Store) spaceAlarms() (alarms []*clientv3.AlarmMember) {
	for _, a := range s.etcd.Server.Alarms() {
		if a.GetAlarm() == pb.AlarmType_NOSPACE {
			alarms = append(alarms, &clientv3.AlarmMember{MemberID: a.GetMemberID(), Alarm: a.GetAlarm()})
		}
	}
	return alarms
}

// Compact drops all history up to now and returns when its space is free for new data. Watches that have fallen
// behind and lists that continue a page must start over; maintenance leaves them CompactInterval.
func (s *Store) Compact(ctx context.Context) error {
	err := s.ledger.waitAcked(ctx)
	s.ledger.mu.Unlock()
	if err != nil {
		return fmt.Errorf("compact storage: %w", err)
	}
	return s.compactTo(ctx, s.ledger.mark(), true)
}

// compactTo drops history up to rev, and if it is to be freed returns when its space is. etcd pauses for 10 ms after
// each 1,000 revisions then (CompactionSleepInterval).
func (s *Store) compactTo(ctx context.Context, rev int64, freed bool) error {
	var options []clientv3.CompactOption
	if freed {
		options = append(options, clientv3.WithCompactPhysical())
	}
	_, err := s.client.Compact(ctx, rev, options...)
	if errors.Is(err, rpctypes.ErrCompacted) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("compact storage to revision %d: %w", rev, err)
	}
	s.compactions.Add(1)
	s.log.Debug("storage is compacted", "revision", rev)
	return nil
}

// CompactRevision is the revision up to which history is gone.
func (s *Store) CompactRevision() int64 {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	return s.ledger.compacted
}

// Defragment rewrites this member's database without its free pages, when no other member is at it. Reads and writes
// through this member wait meanwhile, but none fails by it; the other members go on.
func (s *Store) Defragment(ctx context.Context) error {
	return s.defragmentInTurn(ctx, (*concurrency.Mutex).Lock)
}

// defragmentLock is held by the member that defragments.
const defragmentLock = HostPrefix + "locks/defragment"

// defragmentTTL outlasts the longest pause, in which a leader does not renew its own lock either. In seconds.
const defragmentTTL = 60

// defragmentInTurn takes the lock that keeps two members from standing still at the same time. Where etcd refuses
// writes for want of space there is no lock to be had, and no writer to be held up.
func (s *Store) defragmentInTurn(ctx context.Context, lock func(*concurrency.Mutex, context.Context) error) error {
	if s.alone() || len(s.spaceAlarms()) > 0 {
		return s.defragment(ctx)
	}
	return s.locked(ctx, defragmentLock, defragmentTTL, lock, s.defragment)
}

func (s *Store) defragment(ctx context.Context) error {
	s.defrags.Lock()
	defer s.defrags.Unlock()
	if err := s.gate.close(ctx); err != nil {
		return fmt.Errorf("defragment storage: wait for writes to finish: %w", err)
	}
	defer s.gate.open()

	start := time.Now()
	before, _ := s.sizes()
	result := make(chan error, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended) // etcd's last words may end this goroutine
		result <- s.etcd.Server.Backend().Defrag()
	}()
	<-ended
	select {
	case err := <-result:
		if err != nil {
			return fmt.Errorf("defragment storage: %w", withRemedy(err))
		}
	default:
		return errors.New("defragment storage: etcd failed")
	}
	s.defragmentations.Add(1)
	after, _ := s.sizes()
	s.log.Info("storage is defragmented", "before", before, "after", after, "took", time.Since(start))
	return nil
}

// Status is the state of the shared database.
type Status struct {
	Size            int64 // bytes of the file
	InUse           int64 // bytes of the file that are not free
	Quota           int64 // bytes
	Revision        int64
	CompactRevision int64
	NoSpace         bool // etcd refuses all writes; maintenance is freeing space
}

// Status returns the state of the shared database, for operators and health checks. It fails if etcd does not answer.
func (s *Store) Status(ctx context.Context) (Status, error) {
	answer, err := s.client.Get(ctx, "tenantd/status", clientv3.WithCountOnly())
	if err != nil {
		return Status{}, fmt.Errorf("ask etcd for its status: %w", err)
	}
	size, inUse := s.sizes()
	return Status{
		Size:            size,
		InUse:           inUse,
		Quota:           s.cfg.BackendQuota,
		Revision:        answer.Header.Revision,
		CompactRevision: s.CompactRevision(),
		NoSpace:         len(s.spaceAlarms()) > 0,
	}, nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/types"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	etcderrors "go.etcd.io/etcd/server/v3/etcdserver/errors"
)

// Refusals of changes to the members, for errors.Is.
var (
	// ErrNameTaken says that another host has the name.
	ErrNameTaken = errors.New("another host has this name: choose another, or remove that host first")
	// ErrAddressTaken says that another host has the address.
	ErrAddressTaken = errors.New("another host has this address: advertise another, or remove that host first")
	// ErrNoMember says that no host has the name.
	ErrNoMember = errors.New("there is no host of this name")
	// ErrNotCaughtUp says that a learner does not have enough of the data yet. Try again.
	ErrNotCaughtUp = errors.New("the host has not caught up yet: try again in a moment")
	// ErrJoining says that another host has been added and has not started yet: it was told of all members but those
	// that come after it.
	ErrJoining = errors.New("another host is joining: try again when it has, or remove it")
	// ErrUnsafe says that the voters that would be left, or those of them that are alive, are too few to go on.
	ErrUnsafe = errors.New("too few of the hosts that would be left are alive")
	// ErrRemoved says that the others have removed this member. Its directory is of no use any more.
	ErrRemoved = errors.New("this host was removed from the cluster: to join again, remove the directory first")
	// ErrNoQuorum says that nothing can be written because too few hosts are alive, or cut off from each other.
	ErrNoQuorum = errors.New("tenantd: storage has no quorum")
	// ErrUndecided says that a write was on its way when the quorum was lost.
	ErrUndecided = errors.New("it is not known whether this was written")
)

const (
	// HostPrefix is where the store keeps what is its own: which hosts join, and who does what. No part of the data.
	HostPrefix = "/tenantd/storage/"
	// joiningPrefix is where the name of a member that has not started yet is: etcd does not know it until then.
	joiningPrefix = HostPrefix + "joining/"
	// membersLock is held by the one that adds a member.
	membersLock = HostPrefix + "locks/members"
	// lockTTL is how long a lock outlives a host that held it. In seconds.
	lockTTL = 20
	// peerPatience is how long a peer may take to say that it is alive.
	peerPatience = 3 * time.Second
	// changePatience bounds a change of the members. etcd refuses one within 5 s of another, since it cannot know yet
	// how the other turned out.
	changePatience = 15 * time.Second
)

// Member is a host's etcd as this member knows it.
type Member struct {
	ID          uint64
	Name        string
	PeerAddress string // host:port for the other members; empty for one that has no peers
	Learner     bool   // has no vote
	Leader      bool   // as far as this member knows
	Started     bool   // has served at least once
}

// Lag is how far a member is behind.
type Lag struct {
	// Committed is the index in etcd's log up to which this member has heard that writes are final, Applied that up to
	// which it has done them.
	Committed, Applied uint64
	// LeaderKnown is whether there is a leader, to this member's knowledge. While there is none nothing is written.
	LeaderKnown bool
}

// Name is this member's name among the hosts.
func (s *Store) Name() string { return s.cfg.Name }

// Leader says whether this member leads, to its knowledge: another may lead already.
func (s *Store) Leader() bool { return s.etcd.Server.Leader() == s.etcd.Server.MemberID() }

// Lag returns how far this member is behind what it has heard of, without asking anyone.
func (s *Store) Lag() Lag {
	server := s.etcd.Server
	applied := server.AppliedIndex() // first, or it could be ahead
	known := server.Leader() != 0 && (s.heard.Load() || s.Voting())
	return Lag{Committed: server.CommittedIndex(), Applied: applied, LeaderKnown: known}
}

// Voting says whether this member votes.
func (s *Store) Voting() bool {
	own := s.etcd.Server.Cluster().Member(s.etcd.Server.MemberID())
	return own != nil && !own.IsLearner
}

// voters is how many members vote, as far as this one knows.
func (s *Store) voters() int {
	voters := 0
	for _, m := range s.etcd.Server.Cluster().Members() {
		if !m.IsLearner {
			voters++
		}
	}
	return voters
}

// alone says whether there is no other member.
func (s *Store) alone() bool { return len(s.etcd.Server.Cluster().Members()) <= 1 }

// Members returns the members this one knows of, by name. It works without a quorum, and then, or on a member that is
// behind, may be out of date. Names of members that have not started are known only where reads are answered.
func (s *Store) Members(ctx context.Context) ([]Member, error) {
	joining, err := s.joining(ctx)
	if err != nil {
		return nil, fmt.Errorf("list storage members: %w", err)
	}
	return s.members(joining), nil
}

func (s *Store) members(joining map[string]string) []Member {
	lead := s.etcd.Server.Leader()
	var members []Member
	for _, m := range s.etcd.Server.Cluster().Members() {
		member := Member{
			ID:          uint64(m.ID),
			Name:        m.Name,
			PeerAddress: peerAddress(m),
			Learner:     m.IsLearner,
			Leader:      m.ID == lead,
			Started:     m.IsStarted(),
		}
		if !member.Started {
			member.Name = joining[member.PeerAddress]
		}
		members = append(members, member)
	}
	slices.SortFunc(members, func(a, b Member) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	return members
}

// joining maps addresses of members that were added to the names they were added by.
func (s *Store) joining(ctx context.Context) (map[string]string, error) {
	found, err := s.client.Get(ctx, joiningPrefix, clientv3.WithPrefix(), clientv3.WithSerializable())
	if err != nil {
		return nil, err
	}
	names := make(map[string]string)
	for _, kv := range found.Kvs {
		names[string(kv.Value)] = strings.TrimPrefix(string(kv.Key), joiningPrefix)
	}
	return names, nil
}

// current is members as of now, and fails without a quorum.
func (s *Store) current(ctx context.Context) ([]Member, error) {
	if err := s.linearize(ctx); err != nil {
		return nil, err
	}
	joining, err := s.joining(ctx)
	if err != nil {
		return nil, err
	}
	return s.members(joining), nil
}

func byName(members []Member, name string) (Member, bool) {
	i := slices.IndexFunc(members, func(m Member) bool { return m.Name == name })
	if i < 0 {
		return Member{}, false
	}
	return members[i], true
}

// AddLearner makes room for a host of that name, which the others will reach at address (host:port), and returns what
// it needs to join, for [PeerConfig].Initial. It takes no part in decisions unless [Store.Promote] lets it. Repeating it
// before the host has started changes nothing. The error is [ErrNameTaken] or [ErrAddressTaken] where another host has
// them, and [ErrJoining] where it has to wait. Only a store that has Peers can add.
func (s *Store) AddLearner(ctx context.Context, name, address string) (initial map[string]string, err error) {
	if s.peers == nil {
		return nil, fmt.Errorf("add host %q to storage: this host listens for no others: give it an address to advertise", name)
	}
	if err := errors.Join(validName(name), validAddress(address)); err != nil {
		return nil, fmt.Errorf("add host %q to storage: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, changePatience)
	defer cancel()
	err = s.exclusively(ctx, membersLock, func(ctx context.Context) (err error) {
		initial, err = s.addLearner(ctx, name, address)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("add host %q at %s to storage: %w", name, address, err)
	}
	return initial, nil
}

func (s *Store) addLearner(ctx context.Context, name, address string) (map[string]string, error) {
	members, err := s.current(ctx)
	if err != nil {
		return nil, err
	}
	there := false
	var joins error
	for _, m := range members {
		switch {
		case m.PeerAddress == "":
			return nil, fmt.Errorf("member %q listens for no others: restart it with an address to advertise", m.Name)
		case m.Name == name && m.PeerAddress == address && !m.Started:
			there = true
		case m.Name == name:
			return nil, ErrNameTaken
		case m.PeerAddress == address && (m.Started || m.Name != ""):
			return nil, ErrAddressTaken
		case m.PeerAddress == address:
			there = true // whoever added it did not get further
		case !m.Started:
			joins = fmt.Errorf("%w: %q at %s", ErrJoining, m.Name, m.PeerAddress)
		}
	}
	if joins != nil {
		return nil, joins
	}
	if _, err := s.client.Put(ctx, joiningPrefix+name, address); err != nil {
		return nil, fmt.Errorf("note the name: %w", err)
	}
	if !there {
		now := time.Now()
		urls := types.MustNewURLs([]string{peerURL(address)})
		learner := membership.NewMemberAsLearner("", urls, "", &now)
		if err := s.change(ctx, func() error {
			_, err := s.etcd.Server.AddMember(ctx, *learner)
			return err
		}); err != nil {
			return nil, err
		}
		s.log.Info("a host was added to storage", "name", name, "address", address)
	}
	if members, err = s.current(ctx); err != nil {
		return nil, err
	}
	initial := map[string]string{name: address}
	for _, m := range members {
		if m.PeerAddress == address {
			continue
		}
		if m.Name == "" {
			m.Name = fmt.Sprintf("member-%x", m.ID) // etcd goes by address
		}
		initial[m.Name] = m.PeerAddress
	}
	return initial, nil
}

// change makes a change of the members and repeats it while etcd wants to see first how the last one turns out.
func (s *Store) change(ctx context.Context, f func() error) error {
	for {
		err := f()
		if !errors.Is(err, etcderrors.ErrUnhealthy) {
			return s.explain(ctx, err, true)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: a host is down or joined just now: %w", ErrUnsafe, err)
		case <-time.After(joinAgain):
		}
	}
}

// Promote lets a host that AddLearner added, and that has joined, vote. Until it has enough of the data the error is
// [ErrNotCaughtUp]. It may be repeated.
func (s *Store) Promote(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, changePatience)
	defer cancel()
	if err := s.promote(ctx, name); err != nil {
		return fmt.Errorf("let host %q vote in storage: %w", name, err)
	}
	return nil
}

func (s *Store) promote(ctx context.Context, name string) error {
	members, err := s.current(ctx)
	if err != nil {
		return err
	}
	m, ok := byName(members, name)
	switch {
	case !ok:
		return ErrNoMember
	case !m.Learner:
		return nil
	case !m.Started:
		return ErrNotCaughtUp
	}
	_, err = s.etcd.Server.PromoteMember(ctx, m.ID)
	switch {
	case errors.Is(err, etcderrors.ErrLearnerNotReady):
		return ErrNotCaughtUp
	case errors.Is(err, membership.ErrMemberNotLearner): // another was faster
	case err != nil:
		return s.explain(ctx, err, true)
	default:
		s.log.Info("a host votes in storage", "name", name, "address", m.PeerAddress)
	}
	return nil
}

// forget removes what stood for a name that etcd knows by now, or will not know any more.
func (s *Store) forget(ctx context.Context, name string) error {
	_, err := s.client.Delete(ctx, joiningPrefix+name)
	return err
}

// hasCome forgets that this member was to come, if that is noted still.
func (s *Store) hasCome(ctx context.Context) error {
	noted, err := s.client.Get(ctx, joiningPrefix+s.cfg.Name, clientv3.WithCountOnly())
	if err == nil && noted.Count > 0 {
		err = s.forget(ctx, s.cfg.Name)
	}
	if err != nil {
		return fmt.Errorf("note that this host has joined: %w", err)
	}
	return nil
}

// RemoveMember removes a host, alive or not, for good. The error is [ErrUnsafe] where the voters left over that are
// alive would not be enough to write anything. A host that removes itself gets [ErrRemoved] from its Err.
func (s *Store) RemoveMember(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, changePatience)
	defer cancel()
	if err := s.removeMember(ctx, name); err != nil {
		return fmt.Errorf("remove host %q from storage: %w", name, err)
	}
	return nil
}

func (s *Store) removeMember(ctx context.Context, name string) error {
	members, err := s.current(ctx)
	if err != nil {
		return err
	}
	m, ok := byName(members, name)
	if !ok {
		return ErrNoMember
	}
	if !m.Learner {
		if err := s.mayLose(ctx, members, m); err != nil {
			return err
		}
	}
	own := m.ID == uint64(s.etcd.Server.MemberID())
	if own {
		s.handOver(ctx) // the others need not find out by an election
	}
	if err := s.forget(ctx, name); err != nil {
		return err
	}
	err = s.change(ctx, func() error {
		_, err := s.etcd.Server.RemoveMember(ctx, m.ID)
		return err
	})
	switch {
	case err == nil, errors.Is(err, membership.ErrIDRemoved), errors.Is(err, membership.ErrIDNotFound):
	case own && errors.Is(err, etcderrors.ErrStopped) && !s.quiet.Load():
		// It hears of it from the others, and ends, before its own answer: see whyStopped.
	default:
		return err
	}
	s.log.Info("a host was removed from storage", "name", name, "address", m.PeerAddress)
	return nil
}

// mayLose refuses to do without a voter where the rest that is alive is no majority of the rest.
func (s *Store) mayLose(ctx context.Context, members []Member, leaving Member) error {
	var rest, dead []string
	var mu sync.Mutex
	var asking sync.WaitGroup
	for _, m := range members {
		if m.Learner || m.ID == leaving.ID {
			continue
		}
		rest = append(rest, m.Name)
		if m.ID == uint64(s.etcd.Server.MemberID()) {
			continue
		}
		asking.Go(func() {
			if err := s.alive(ctx, m); err != nil {
				mu.Lock()
				defer mu.Unlock()
				dead = append(dead, fmt.Sprintf("%s (%v)", m.Name, err))
			}
		})
	}
	asking.Wait()
	switch n := len(rest); {
	case n == 0:
		return fmt.Errorf("%w: it is the last that votes", ErrUnsafe)
	case n-len(dead) < n/2+1:
		return fmt.Errorf("%w: of %s these do not answer: %s: bring them back or remove them first",
			ErrUnsafe, strings.Join(rest, ", "), strings.Join(dead, ", "))
	}
	return nil
}

// alive asks a member whether it serves.
func (s *Store) alive(ctx context.Context, m Member) error {
	if s.peers == nil {
		return errors.New("this host has no peers")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, peerURL(m.PeerAddress)+"/version", nil)
	if err != nil {
		return err
	}
	answer, err := s.peers.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(answer.Body, 64<<10)); err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return errors.New(answer.Status)
	}
	return nil
}

// settleAddress tells the others where this member is to be reached from now on.
func (s *Store) settleAddress(ctx context.Context) error {
	if s.cfg.Peers == nil {
		return nil
	}
	own := s.etcd.Server.Cluster().Member(s.etcd.Server.MemberID())
	if own == nil || peerAddress(own) == s.cfg.Peers.Advertise {
		return nil
	}
	was := peerAddress(own)
	moved := membership.Member{ID: own.ID, RaftAttributes: membership.RaftAttributes{
		PeerURLs: []string{peerURL(s.cfg.Peers.Advertise)}, IsLearner: own.IsLearner,
	}}
	if _, err := s.etcd.Server.UpdateMember(ctx, moved); err != nil {
		return fmt.Errorf("tell other hosts to reach this one at %s: %w", s.cfg.Peers.Advertise, s.explain(ctx, err, true))
	}
	s.log.Info("storage peers reach this host at another address", "address", s.cfg.Peers.Advertise, "before", was)
	return nil
}

// exclusively calls f while no other host does what name stands for. The lock is a hint: f's ctx ends when it is lost,
// and f must do no harm if another begins before f has noticed.
func (s *Store) exclusively(ctx context.Context, name string, f func(context.Context) error) error {
	return s.locked(ctx, name, lockTTL, (*concurrency.Mutex).Lock, f)
}

// locked does so with a lock that outlives its host by ttl seconds and is taken by lock.
func (s *Store) locked(ctx context.Context, name string, ttl int, lock func(*concurrency.Mutex, context.Context) error, f func(context.Context) error) (err error) {
	session, err := concurrency.NewSession(s.client, concurrency.WithTTL(ttl), concurrency.WithContext(ctx))
	if err != nil {
		return fmt.Errorf("take the lock %s: %w", name, err)
	}
	defer func() {
		// Revoking the lease lets go of the lock. Failing that, it ends by itself.
		session.Orphan()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), peerPatience)
		defer cancel()
		if _, err := s.client.Revoke(ctx, session.Lease()); err != nil {
			s.log.Debug("a lock of storage is left to expire", "lock", name, "error", err)
		}
	}()
	if err := lock(concurrency.NewMutex(session, name), ctx); err != nil {
		return fmt.Errorf("take the lock %s: %w", name, err)
	}
	return f(session.Ctx())
}

// explain says what an error of etcd's means where there is no leader, and leaves others as they are. Of a request that
// may have been proposed before, it says that it is undecided.
func (s *Store) explain(ctx context.Context, err error, proposed bool) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(context.Cause(ctx), ErrNoQuorum): // it was lost, and the request given up
		return noQuorumError{err, proposed}
	case s.Lag().LeaderKnown, errors.Is(err, ErrNoQuorum):
		return err
	case errors.Is(err, etcderrors.ErrTimeout), errors.Is(err, etcderrors.ErrTimeoutDueToLeaderFail),
		errors.Is(err, etcderrors.ErrTimeoutDueToConnectionLost), errors.Is(err, etcderrors.ErrNoLeader),
		errors.Is(err, etcderrors.ErrTimeoutWaitAppliedIndex), errors.Is(err, rpctypes.ErrGRPCTimeout),
		errors.Is(err, rpctypes.ErrGRPCTimeoutDueToLeaderFail), errors.Is(err, rpctypes.ErrGRPCTimeoutDueToConnectionLost),
		errors.Is(err, rpctypes.ErrGRPCNoLeader), errors.Is(err, context.DeadlineExceeded):
		return noQuorumError{err, proposed}
	}
	return err
}

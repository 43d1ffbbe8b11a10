// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// leaderPoll is how often a member looks whether it knows a leader.
	leaderPoll = 2 * heartbeat
	// leaderless is how long it may know none until what needs one is refused: an election, and another one where the
	// votes were split.
	leaderless = 2 * election
)

// quorum is whether there are hosts enough to write, as far as this one can tell. The zero value says yes for ever.
type quorum struct {
	known func() bool // whether there is a leader; nil for the zero value

	mu   sync.Mutex      // guards what follows
	have context.Context // ends when there is none any more; another begins when there is one again
	lose context.CancelFunc
}

func newQuorum(known func() bool) *quorum {
	q := &quorum{known: known}
	q.have, q.lose = context.WithCancel(context.Background())
	return q
}

// follow looks until ctx is done. It counts looks and not time, so a process that was frozen does not take its own
// absence for that of the others.
func (q *quorum) follow(ctx context.Context) {
	tick := time.NewTicker(leaderPoll)
	defer tick.Stop()
	for misses := 0; ; {
		if misses++; q.known() {
			misses = 0
		}
		if misses >= int(leaderless/leaderPoll) {
			q.mu.Lock()
			q.lose()
			q.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// current is what ends with the quorum there is, or has ended. It is back with the first leader.
func (q *quorum) current() context.Context {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.have.Err() != nil && q.known() {
		q.have, q.lose = context.WithCancel(context.Background())
	}
	return q.have
}

func (q *quorum) there() bool { return q.known == nil || q.current().Err() == nil }

// during returns a ctx that ends with the quorum as well, and what is to be called when the request is over. The error
// says that there is no quorum to begin with.
func (q *quorum) during(ctx context.Context) (_ context.Context, over func(), err error) {
	if q.known == nil {
		return ctx, func() {}, nil
	}
	have := q.current()
	if have.Err() != nil {
		return nil, nil, noQuorumError{}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(have, func() { cancel(ErrNoQuorum) })
	return ctx, func() { stop(); cancel(nil) }, nil
}

// HasQuorum says whether enough hosts are up, and reach each other, to write anything. It says no when this member has
// known no leader for two elections; then requests that need one are refused at once, see [IsNoQuorum].
func (s *Store) HasQuorum() bool { return s.quorum.there() }

// linearize returns when this member has all that was written before, which fails without a quorum.
func (s *Store) linearize(ctx context.Context) error {
	ctx, over, err := s.quorum.during(ctx)
	if err != nil {
		return err
	}
	defer over()
	return s.explain(ctx, s.etcd.Server.LinearizableReadNotify(ctx), false)
}

// needsQuorum says whether a request is answered by most of the members, and not by this one alone.
func needsQuorum(req any) bool {
	switch r := req.(type) {
	case *pb.RangeRequest:
		return !r.GetSerializable()
	case *pb.MemberListRequest:
		return r.GetLinearizable()
	}
	_, writes := examine(req)
	return writes
}

// noQuorumError says that there is no quorum, and what that means for the request.
type noQuorumError struct {
	cause     error // etcd's word for it; nil for what was never handed to etcd
	undecided bool  // it was, and is a write
}

func (e noQuorumError) Error() string {
	text := ErrNoQuorum.Error() + ": too few hosts are up, or reach each other, to write anything: bring others back"
	if e.undecided {
		text += "; " + ErrUndecided.Error()
	}
	if e.cause != nil {
		text = fmt.Sprintf("%s: %v", text, e.cause)
	}
	return text
}

func (e noQuorumError) Unwrap() []error {
	all := []error{ErrNoQuorum}
	if e.cause != nil {
		all = append(all, e.cause)
	}
	if e.undecided {
		all = append(all, ErrUndecided)
	}
	return all
}

// GRPCStatus is what gRPC sends for e. A read that is Unavailable is sent again by etcd's client, a hundred times with
// 25 ms between, which makes sense only while the loss is news.
func (e noQuorumError) GRPCStatus() *status.Status {
	code := codes.Unavailable
	if e.cause == nil {
		code = codes.FailedPrecondition
	}
	return status.New(code, e.Error())
}

// IsNoQuorum recognises [ErrNoQuorum] in an error that came back through an etcd client, however often it was wrapped
// or turned into text on the way.
func IsNoQuorum(err error) bool { return is(err, ErrNoQuorum) }

// IsUndecided recognises [ErrUndecided] likewise. What has no quorum and is decided was not written.
func IsUndecided(err error) bool { return is(err, ErrUndecided) }

func is(err, sentinel error) bool {
	return err != nil && (errors.Is(err, sentinel) || strings.Contains(err.Error(), sentinel.Error()))
}

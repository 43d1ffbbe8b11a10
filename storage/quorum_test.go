// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// An election is a delay; the lack of a leader for longer ends what is under way, and refuses what comes.
func TestQuorumIsLostAfterTwoElections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alone := &quorum{}
		if _, _, err := alone.during(t.Context()); err != nil || !alone.there() {
			t.Error("a store without peers:", err)
		}
		var known atomic.Bool
		known.Store(true)
		q := newQuorum(known.Load)
		ctx, cancel := context.WithCancel(t.Context())
		var following sync.WaitGroup
		following.Go(func() { q.follow(ctx) })
		defer func() { cancel(); following.Wait() }()
		synctest.Wait()

		request, over, err := q.during(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer over()
		known.Store(false)
		time.Sleep(leaderless - leaderPoll)
		known.Store(true)
		time.Sleep(leaderPoll)
		synctest.Wait()
		known.Store(false)
		time.Sleep(leaderless - leaderPoll)
		if !q.there() || request.Err() != nil {
			t.Error("elections are taken for a loss")
		}
		time.Sleep(leaderPoll)
		synctest.Wait()
		if q.there() || !errors.Is(context.Cause(request), ErrNoQuorum) {
			t.Errorf("no leader for %s: %v", leaderless, context.Cause(request))
		}
		if _, _, err := q.during(t.Context()); !IsNoQuorum(err) || IsUndecided(err) || status.Code(err) != codes.FailedPrecondition {
			t.Error("a request without a quorum:", err)
		}
		known.Store(true)
		again, over, err := q.during(t.Context())
		if err != nil || again.Err() != nil || !q.there() {
			t.Error("with a leader again:", err)
		}
		over()
	})
}

// What a client is told survives gRPC and being wrapped, as API servers do both.
func TestNoQuorumIsRecognised(t *testing.T) {
	for _, c := range []struct {
		err                 error
		noQuorum, undecided bool
	}{
		{nil, false, false},
		{errors.New("etcdserver: request timed out"), false, false},
		{noQuorumError{}, true, false},
		{noQuorumError{cause: context.Canceled}, true, false},
		{noQuorumError{cause: context.Canceled, undecided: true}, true, true},
	} {
		errs := []error{c.err}
		if c.err != nil {
			errs = append(errs, fmt.Errorf("store: %w", c.err), errors.New(c.err.Error()), status.Convert(c.err).Err())
		}
		for _, err := range errs {
			if IsNoQuorum(err) != c.noQuorum || IsUndecided(err) != c.undecided {
				t.Errorf("%v: no quorum %t, undecided %t", err, IsNoQuorum(err), IsUndecided(err))
			}
		}
	}
}

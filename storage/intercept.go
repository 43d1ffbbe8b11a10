// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// farBehind is how many entries of etcd's log a member may know of and not have done before it decides on growth.
const farBehind = 64

// intercept stands between every client and etcd's own handlers. It decides on growth, holds writes while the
// database is being rewritten, notes what was acknowledged, and refuses what needs a quorum where there is none.
func (s *Store) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if needsQuorum(req) {
		within, over, err := s.quorum.during(ctx)
		if err != nil {
			return nil, err
		}
		defer over()
		ctx = within
	}
	puts, writes := examine(req)
	if !writes {
		resp, err := handler(ctx, req)
		return resp, s.explain(ctx, err, false)
	}
	if len(puts) > 0 {
		if err := s.catchUp(ctx, puts); err != nil {
			return nil, err
		}
	}
	if err := s.gate.enter(ctx); err != nil {
		return nil, s.explain(ctx, err, false)
	}
	defer s.gate.leave()

	var held *admission
	if len(puts) > 0 {
		var err error
		if held, err = s.ledger.admit(puts); err != nil {
			return nil, err
		}
		if used, limit, full := s.space.full(puts, held.creates); full {
			s.ledger.settle(held, 0)
			s.ledger.refuse(puts[0].tenant)
			return nil, QuotaError{Tenant: puts[0].tenant, Cause: CauseBackend, Used: used, Limit: limit}
		}
	}

	resp, err := handler(ctx, req)

	var rev int64
	if answer, ok := resp.(interface{ GetHeader() *pb.ResponseHeader }); ok && err == nil {
		rev = answer.GetHeader().GetRevision()
		s.ledger.ack(rev)
	}
	if held != nil {
		s.ledger.settle(held, rev)
	}
	switch compaction, ok := req.(*pb.CompactionRequest); {
	case ok && err == nil:
		s.ledger.forgetHistory(compaction.GetRevision())
	case errors.Is(err, rpctypes.ErrGRPCNoSpace):
		s.wake()
	}
	return resp, s.explain(ctx, err, true)
}

// catchUp makes sure that the books are good enough to decide on puts: where others write too, a tenant that is close to
// a limit, or a member that is far behind, decides on what all had written by now. Elsewhere the books may lack what
// others wrote in the moments before.
func (s *Store) catchUp(ctx context.Context, puts []put) error {
	if s.cfg.Peers == nil {
		if !s.ledger.nearLimit(puts) {
			return nil
		}
		// What was answered is enough: who has deleted something finds the room that it had.
		err := s.ledger.waitAcked(ctx)
		s.ledger.mu.Unlock()
		return err
	}
	if lag := s.Lag(); lag.Committed <= lag.Applied+farBehind && !s.ledger.nearLimit(puts) {
		return nil
	}
	if err := s.linearize(ctx); err != nil {
		if status.Code(err) == codes.Unknown {
			err = status.Error(codes.Unavailable, err.Error())
		}
		return err
	}
	err := s.ledger.wait(ctx, s.etcd.Server.KV().Rev())
	s.ledger.mu.Unlock()
	return err
}

// examine returns a request's puts of tenants' keys that limits apply to, and whether the request goes through etcd's log at all.
func examine(req any) (puts []put, writes bool) {
	switch r := req.(type) {
	case *pb.PutRequest:
		return appendPut(nil, r), true
	case *pb.TxnRequest:
		return appendTxn(nil, r), true
	case *pb.DeleteRangeRequest, *pb.CompactionRequest, *pb.LeaseGrantRequest, *pb.LeaseRevokeRequest:
		return nil, true
	}
	return nil, false
}

func appendTxn(puts []put, txn *pb.TxnRequest) []put {
	for _, branch := range [][]*pb.RequestOp{txn.GetSuccess(), txn.GetFailure()} {
		for _, op := range branch {
			if r := op.GetRequestPut(); r != nil {
				puts = appendPut(puts, r)
			} else if nested := op.GetRequestTxn(); nested != nil {
				puts = appendTxn(puts, nested)
			}
		}
	}
	return puts
}

func appendPut(puts []put, r *pb.PutRequest) []put {
	tenant, prefix, ok := splitKey(r.GetKey())
	if !ok || !limited(r.GetKey()[prefix:]) {
		return puts
	}
	return append(puts, put{tenant: tenant, prefix: prefix, key: r.GetKey(), value: len(r.GetValue())})
}

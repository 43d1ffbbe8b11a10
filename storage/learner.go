// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"errors"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// A member without a vote is a follower like any other: it has what is proposed to it decided by the voters, asks them
// how far it must be before it answers a read, and has all events. That etcd answers no client there is a rule of its
// gRPC handlers alone, which these interceptors, called before them, go round.

// withoutVote says whether etcd's handlers would refuse what this member can do. Who is alone always votes.
func (s *Store) withoutVote() bool { return s.cfg.Peers != nil && s.serving.Load() && !s.Voting() }

// first is called before etcd's own interceptors, and intercept after them.
func (s *Store) first(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if s.withoutVote() {
		if direct := directly(info.Server, req); direct != nil {
			return s.intercept(ctx, req, info, direct)
		}
	}
	return handler(ctx, req)
}

// directly calls a service without what etcd has in front of it; nil for what no client of ours asks.
func directly(service, req any) grpc.UnaryHandler {
	switch r := req.(type) {
	case *pb.RangeRequest:
		return calling(service.(pb.KVServer).Range, r)
	case *pb.PutRequest:
		return calling(service.(pb.KVServer).Put, r)
	case *pb.DeleteRangeRequest:
		return calling(service.(pb.KVServer).DeleteRange, r)
	case *pb.TxnRequest:
		return calling(service.(pb.KVServer).Txn, r)
	case *pb.CompactionRequest:
		return calling(service.(pb.KVServer).Compact, r)
	case *pb.LeaseGrantRequest:
		return calling(service.(pb.LeaseServer).LeaseGrant, r)
	case *pb.LeaseRevokeRequest:
		return calling(service.(pb.LeaseServer).LeaseRevoke, r)
	case *pb.LeaseTimeToLiveRequest:
		return calling(service.(pb.LeaseServer).LeaseTimeToLive, r)
	case *pb.LeaseLeasesRequest:
		return calling(service.(pb.LeaseServer).LeaseLeases, r)
	case *pb.MemberListRequest:
		return calling(service.(pb.ClusterServer).MemberList, r)
	case *pb.AlarmRequest:
		return calling(service.(pb.MaintenanceServer).Alarm, r)
	}
	return nil
}

func calling[Q, A any](method func(context.Context, Q) (A, error), req Q) grpc.UnaryHandler {
	return func(ctx context.Context, _ any) (any, error) { return method(ctx, req) }
}

// firstStream is first for watches and leases.
func (s *Store) firstStream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !s.withoutVote() {
		return handler(service, stream)
	}
	switch info.FullMethod {
	case pb.Watch_Watch_FullMethodName:
		handler = bare(&pb.Watch_ServiceDesc, "Watch")
	case pb.Lease_LeaseKeepAlive_FullMethodName:
		handler = bare(&pb.Lease_ServiceDesc, "LeaseKeepAlive")
	case pb.KV_RangeStream_FullMethodName:
		handler = bare(&pb.KV_ServiceDesc, "RangeStream")
	}
	if has := metadata.ValueFromIncomingContext(stream.Context(), rpctypes.MetadataRequireLeaderKey); !slices.Contains(has, rpctypes.MetadataHasLeader) {
		return handler(service, stream)
	}
	ctx, over, err := s.quorum.during(stream.Context())
	if err != nil {
		return rpctypes.ErrGRPCNoLeader
	}
	defer over()
	return handler(service, ledStream{stream, ledContext{ctx}})
}

// bare is what a service does with a stream, without interceptors.
func bare(service *grpc.ServiceDesc, name string) grpc.StreamHandler {
	i := slices.IndexFunc(service.Streams, func(d grpc.StreamDesc) bool { return d.StreamName == name })
	return service.Streams[i].Handler
}

// ledStream ends with the quorum.
type ledStream struct {
	grpc.ServerStream
	ctx ledContext
}

func (s ledStream) Context() context.Context { return s.ctx }

// ledContext says of the loss of the quorum what etcd says of it, which clients know what to do about.
type ledContext struct{ context.Context }

func (c ledContext) Err() error {
	err := c.Context.Err()
	if err != nil && errors.Is(context.Cause(c.Context), ErrNoQuorum) {
		return rpctypes.ErrGRPCNoLeader
	}
	return err
}

// listen has a member without a vote know whether anybody leads, until ctx is done. It takes no part in elections and so
// misses no leader: it asks how far it must be, as for a read, and misses a leader who has not answered for as long as
// a voter would wait.
func (s *Store) listen(ctx context.Context) {
	tick := time.NewTicker(leaderPoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if s.Voting() {
			s.heard.Store(true)
			continue
		}
		late := time.AfterFunc(election, func() { s.heard.Store(false) })
		asking, over := context.WithTimeout(ctx, leaderless)
		err := s.etcd.Server.LinearizableReadNotify(asking)
		over()
		late.Stop()
		s.heard.Store(err == nil)
	}
}

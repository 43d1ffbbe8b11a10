// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"net/http"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	tenantstorage "github.com/tenantd/tenantd/storage"
)

// localWatcher watches what this host's member of etcd has, be there a leader or not.
// Upstream asks for a leader, so that a watch of a member that is cut off moves to
// another. Here is none to move to: all that came of it was that watch caches, half a
// minute after the quorum was lost, answered nothing any more.
type localWatcher struct{ clientv3.Watcher }

// Watch implements clientv3.Watcher.
func (w localWatcher) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	return w.Watcher.Watch(withoutLeader(ctx), key, opts...)
}

// RequestProgress implements clientv3.Watcher. It goes to the stream of that ctx's metadata.
func (w localWatcher) RequestProgress(ctx context.Context) error {
	return w.Watcher.RequestProgress(withoutLeader(ctx))
}

// withoutLeader takes back what clientv3.WithRequireLeader did.
func withoutLeader(ctx context.Context) context.Context {
	asked, _ := metadata.FromOutgoingContext(ctx) // a copy
	asked.Delete(rpctypes.MetadataRequireLeaderKey)
	return metadata.NewOutgoingContext(ctx, asked)
}

// quorumErrors turns the store's refusal of what needs a majority of the hosts into
// answers that clients understand.
type quorumErrors struct{ storage.Interface }

// Create implements storage.Interface.
func (s quorumErrors) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return translateQuorum(s.Interface.Create(ctx, key, obj, out, ttl))
}

// Delete implements storage.Interface.
func (s quorumErrors) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validate storage.ValidateObjectFunc, cached runtime.Object, opts storage.DeleteOptions,
) error {
	return translateQuorum(s.Interface.Delete(ctx, key, out, preconditions, validate, cached, opts))
}

// Get implements storage.Interface.
func (s quorumErrors) Get(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	return translateQuorum(s.Interface.Get(ctx, key, opts, out))
}

// GetList implements storage.Interface.
func (s quorumErrors) GetList(ctx context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	return translateQuorum(s.Interface.GetList(ctx, key, opts, list))
}

// GuaranteedUpdate implements storage.Interface.
func (s quorumErrors) GuaranteedUpdate(ctx context.Context, key string, dst runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object,
) error {
	return translateQuorum(s.Interface.GuaranteedUpdate(ctx, key, dst, ignoreNotFound, preconditions, update, cached))
}

// quorumRetry is how long clients are told to wait, in seconds. client-go and kubectl
// then ask ten times more by themselves, which outlasts most failovers.
const quorumRetry = 1

// translateQuorum answers 503, to be repeated, where nothing was done; and 504, as
// upstream does after a time-out, for a write of which that is not known.
func translateQuorum(err error) error {
	if !tenantstorage.IsNoQuorum(err) {
		return err
	}
	message := status.Convert(err).Message() // without what gRPC puts in front
	if tenantstorage.IsUndecided(err) {
		return apierrors.NewTimeoutError(message, 0)
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusServiceUnavailable, Reason: metav1.StatusReasonServiceUnavailable,
		Message: message, Details: &metav1.StatusDetails{RetryAfterSeconds: quorumRetry},
	}}
}

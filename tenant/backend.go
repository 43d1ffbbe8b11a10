// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	clientv3 "go.etcd.io/etcd/client/v3"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	tenantstorage "github.com/tenantd/tenantd/storage"
	"github.com/tenantd/tenantd/tenant/limit"
)

// Storage is what a control plane asks of the store below it. *storage.Store
// implements it.
type Storage interface {
	// Endpoint is the address that etcd clients are given.
	Endpoint() string
	// Conn returns one of the shared clients. It is not to be closed.
	Conn() *clientv3.Client
	// Prefix is the key prefix of one tenant, with a trailing slash.
	Prefix(uid string) (string, error)
	// CompactRevision is the newest revision that watches can no longer start at.
	CompactRevision() int64
	// HasQuorum says whether anything can be written: whether enough hosts are up.
	HasQuorum() bool
	// Failed says whether the storage has ended for good.
	Failed() bool
	// Bytes is what a tenant has below a directory of its registry: bytes of keys
	// and values, and the number of keys.
	Bytes(uid, directory string) (bytes, keys int64)
	// Vacant has filled called once when a directory as for Bytes gets its first key,
	// and says at which revision it had none. It is not ok if there is one.
	Vacant(uid, directory string, filled func()) (revision int64, forget func(), ok bool)
}

// backend gives the resources of one control plane their stores. Upstream
// dials etcd once per resource, some seventy times per control plane; here all
// of them share the connections of the process, each with a watch stream of
// its own: progress is only notified on a stream whose watches have all caught
// up, so a shared stream would let one slow resource hold up the others.
type backend struct {
	ctx     context.Context // ends the stores' watch streams
	storage Storage
	uid     string
	counts  objectCounts
}

// wrap makes a getter whose stores use the shared connections.
func (b *backend) wrap(g generic.RESTOptionsGetter) generic.RESTOptionsGetter {
	return sharedOptions{RESTOptionsGetter: g, backend: b}
}

type sharedOptions struct {
	generic.RESTOptionsGetter
	backend *backend
}

// GetRESTOptions implements generic.RESTOptionsGetter.
func (o sharedOptions) GetRESTOptions(resource schema.GroupResource, example runtime.Object) (generic.RESTOptions, error) {
	opts, err := o.RESTOptionsGetter.GetRESTOptions(resource, example)
	if err != nil {
		return opts, err
	}
	opts.Decorator = o.backend.open
	return opts, nil
}

// open implements generic.StorageDecorator.
func (b *backend) open(
	config *storagebackend.ConfigForResource,
	resourcePrefix string,
	keyFunc func(obj runtime.Object) (string, error),
	newFunc, newListFunc func() runtime.Object,
	getAttrs storage.AttrFunc,
	triggers storage.IndexerFuncs,
	indexers *cache.Indexers,
) (storage.Interface, factory.DestroyFunc, error) {
	ctx, cancel := context.WithCancel(b.ctx)
	conn := b.storage.Conn()
	client := clientv3.NewCtxClient(ctx)
	client.KV = waitingKV{etcd3.NewETCDLatencyTracker(conn.KV)}
	client.Lease = conn.Lease
	client.Watcher = localWatcher{clientv3.NewWatcher(conn)}
	client.Maintenance = conn.Maintenance
	client.Cluster = conn.Cluster
	kube := &etcdkubernetes.Client{Client: client}
	kube.Kubernetes = kube

	transformer := config.Transformer
	if transformer == nil {
		transformer = identity.NewEncryptCheckTransformer()
	}
	versioner := storage.APIObjectVersioner{}
	raw, err := etcd3.New(kube, b.storage, config.Codec, newFunc, newListFunc, config.Prefix, resourcePrefix,
		config.GroupResource, transformer, config.LeaseManagerConfig, etcd3.WithCorruptObjErrorHandlingDecoder(etcd3.NewDefaultDecoder(config.Codec, versioner)), versioner)
	if err != nil {
		cancel()
		return nil, nil, fmt.Errorf("open storage of %s: %w", config.GroupResource, err)
	}
	closeRaw := func() {
		raw.Close()
		// Not client.Close: that would close the shared lessor with it.
		client.Watcher.Close()
		cancel()
	}
	// Lets an administrator delete an object that cannot be read any more.
	store := quotaErrors{etcd3.NewStoreWithUnsafeCorruptObjectDeletion(raw, config.GroupResource)}
	// Events too, which upstream serves without a watch cache: there each watch takes
	// a hundred objects of its own off etcd ahead of its client, and a client that
	// reads none holds them. From a cache, all watches share them.
	uncount := b.counts.add(config.GroupResource.String(), resourcePrefix)
	ticks := &cacheClock{WithTicker: clock.RealClock{}}
	lazy := &lazyCache{Interface: store, clock: ticks, newFunc: newFunc, closeRaw: closeRaw, vacant: func(filled func()) (int64, func(), bool) {
		return b.storage.Vacant(b.uid, resourcePrefix, filled)
	}, make: func() (*cacher.Cacher, error) {
		return cacher.NewCacherFromConfig(cacher.Config{
			Storage:             unsized{store},
			Versioner:           versioner,
			GroupResource:       config.GroupResource,
			EventsHistoryWindow: config.EventsHistoryWindow,
			ResourcePrefix:      resourcePrefix,
			KeyFunc:             keyFunc,
			NewFunc:             newFunc,
			NewListFunc:         newListFunc,
			GetAttrsFunc:        getAttrs,
			IndexerFuncs:        triggers,
			Indexers:            indexers,
			Codec:               config.Codec,
			Clock:               ticks,
		})
	}}
	return quorumErrors{chargedLists{Interface: lazy, storage: b.storage, uid: b.uid}}, sync.OnceFunc(func() {
		uncount()
		lazy.close()
	}), nil
}

// waitingKV has requests not pay for what etcd takes, on a slow disk above all.
type waitingKV struct{ clientv3.KV }

// Put implements clientv3.KV.
func (w waitingKV) Put(ctx context.Context, key, value string, opts ...clientv3.OpOption) (*clientv3.PutResponse, error) {
	defer limit.Waits(ctx)()
	return w.KV.Put(ctx, key, value, opts...)
}

// Get implements clientv3.KV.
func (w waitingKV) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	defer limit.Waits(ctx)()
	return w.KV.Get(ctx, key, opts...)
}

// Delete implements clientv3.KV.
func (w waitingKV) Delete(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.DeleteResponse, error) {
	defer limit.Waits(ctx)()
	return w.KV.Delete(ctx, key, opts...)
}

// Do implements clientv3.KV.
func (w waitingKV) Do(ctx context.Context, op clientv3.Op) (clientv3.OpResponse, error) {
	defer limit.Waits(ctx)()
	return w.KV.Do(ctx, op)
}

// Txn implements clientv3.KV.
func (w waitingKV) Txn(ctx context.Context) clientv3.Txn {
	return waitingTxn{w.KV.Txn(ctx), ctx}
}

type waitingTxn struct {
	clientv3.Txn
	ctx context.Context
}

// If implements clientv3.Txn.
func (w waitingTxn) If(cs ...clientv3.Cmp) clientv3.Txn { return waitingTxn{w.Txn.If(cs...), w.ctx} }

// Then implements clientv3.Txn.
func (w waitingTxn) Then(ops ...clientv3.Op) clientv3.Txn {
	return waitingTxn{w.Txn.Then(ops...), w.ctx}
}

// Else implements clientv3.Txn.
func (w waitingTxn) Else(ops ...clientv3.Op) clientv3.Txn {
	return waitingTxn{w.Txn.Else(ops...), w.ctx}
}

// Commit implements clientv3.Txn.
func (w waitingTxn) Commit() (*clientv3.TxnResponse, error) {
	defer limit.Waits(w.ctx)()
	return w.Txn.Commit()
}

// unsized is a store that does not estimate how large its objects are.
type unsized struct{ storage.Interface }

// EnableResourceSizeEstimation implements storage.Interface.
func (unsized) EnableResourceSizeEstimation(storage.KeysFunc) error { return nil }

// chargedLists has each list counted to the request that asks for it before it
// takes memory: a hundred lists of everything that a tenant may store, at the same
// time, would take all there is.
type chargedLists struct {
	storage.Interface
	storage Storage
	uid     string
}

// GetList implements storage.Interface.
func (s chargedLists) GetList(ctx context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	bytes, objects := s.storage.Bytes(s.uid, key)
	if !opts.Recursive || objects == 0 {
		return s.Interface.GetList(ctx, key, opts, list) // one object, or none
	}
	selective := !opts.Predicate.Empty()
	if selective && servedFromCache(opts) {
		// A selector is applied to what is in memory anyway, so a kubelet that wants
		// its own pods need not pay for everybody's.
		if err := s.Interface.GetList(ctx, key, opts, list); err != nil {
			return err
		}
		return limit.Charge(ctx, bytes/objects*int64(meta.LenList(list)))
	}
	// With a selector, etcd reads on until the limit is reached. At revision 0 the
	// cache pays no heed to a limit.
	if most := opts.Predicate.Limit; most > 0 && most < objects && !selective && opts.ResourceVersion != "0" {
		bytes = bytes / objects * most
	}
	if err := limit.Charge(ctx, bytes); err != nil {
		return err
	}
	return s.Interface.GetList(ctx, key, opts, list)
}

// servedFromCache says whether upstream takes a list from the watch cache's present
// state. From an earlier one it may turn to etcd.
func servedFromCache(opts storage.ListOptions) bool {
	newest := opts.ResourceVersion == "" || opts.ResourceVersion == "0" || opts.Predicate.Limit == 0
	return newest && opts.Predicate.Continue == "" && opts.ResourceVersionMatch != metav1.ResourceVersionMatchExact
}

// quotaErrors turns the store's refusal of a write that a tenant's limits forbid
// into an answer that clients understand: 429 with the limit's name.
type quotaErrors struct{ storage.Interface }

// Create implements storage.Interface.
func (s quotaErrors) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return translateQuota(s.Interface.Create(ctx, key, obj, out, ttl))
}

// GuaranteedUpdate implements storage.Interface.
func (s quotaErrors) GuaranteedUpdate(ctx context.Context, key string, dst runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object,
) error {
	return translateQuota(s.Interface.GuaranteedUpdate(ctx, key, dst, ignoreNotFound, preconditions, update, cached))
}

// Reasons of the API status that answers a write which a tenant's limits forbid.
// The status's causes name the field of the Tenant that holds the limit.
const (
	// ReasonStorageQuotaExceeded is for bytes: the tenant's own, or those that all share.
	ReasonStorageQuotaExceeded metav1.StatusReason = "StorageQuotaExceeded"
	// ReasonLimitExceeded is for numbers and sizes of objects and CRDs.
	ReasonLimitExceeded metav1.StatusReason = "LimitExceeded"
)

// translateQuota leaves out retryAfterSeconds, which becomes the header Retry-After:
// only where that is set do client-go and kubectl repeat a 429 (checkWait in
// client-go's rest/with_retry.go), and waiting makes no room.
func translateQuota(err error) error {
	if err == nil {
		return nil
	}
	quota, ok := tenantstorage.IsQuota(err)
	if !ok {
		return err
	}
	reason := ReasonLimitExceeded
	switch quota.Cause {
	case tenantstorage.CauseStorage, tenantstorage.CauseHistory, tenantstorage.CauseBackend:
		reason = ReasonStorageQuotaExceeded
	}
	status := metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusTooManyRequests,
		Reason:  reason,
		Message: quota.Error(),
	}
	if field := quota.Field(); field != "" {
		status.Details = &metav1.StatusDetails{Causes: []metav1.StatusCause{{
			Type: metav1.CauseType(reason), Message: quota.Error(), Field: field,
		}}}
	}
	return &apierrors.StatusError{ErrStatus: status}
}

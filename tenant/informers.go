// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/informers/admissionregistration"
	"k8s.io/client-go/informers/apiserverinternal"
	"k8s.io/client-go/informers/apps"
	"k8s.io/client-go/informers/autoscaling"
	"k8s.io/client-go/informers/batch"
	"k8s.io/client-go/informers/certificates"
	"k8s.io/client-go/informers/coordination"
	"k8s.io/client-go/informers/core"
	"k8s.io/client-go/informers/discovery"
	"k8s.io/client-go/informers/events"
	"k8s.io/client-go/informers/extensions"
	"k8s.io/client-go/informers/flowcontrol"
	"k8s.io/client-go/informers/internalinterfaces"
	"k8s.io/client-go/informers/lifecycle"
	"k8s.io/client-go/informers/networking"
	"k8s.io/client-go/informers/node"
	"k8s.io/client-go/informers/policy"
	"k8s.io/client-go/informers/rbac"
	"k8s.io/client-go/informers/resource"
	"k8s.io/client-go/informers/scheduling"
	"k8s.io/client-go/informers/storage"
	"k8s.io/client-go/informers/storagemigration"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// informerSet is the informers of one control plane, which read from its own storage
// and not through its API server: what they are shown is not encoded, sent and decoded.
//
// Informers may be asked for before there is storage, as upstream does.
type informerSet struct {
	groups
	client  kubernetes.Interface
	storage *objectStorage
	resync  time.Duration // of handlers that do not say; zero is never

	mu        sync.Mutex // guards what follows
	informers map[reflect.Type]*informer
	running   map[reflect.Type]bool
	closed    bool
	wg        sync.WaitGroup
}

func newInformerSet(client kubernetes.Interface, s *objectStorage, resync time.Duration) *informerSet {
	set := &informerSet{client: client, storage: s, resync: resync, informers: map[reflect.Type]*informer{}, running: map[reflect.Type]bool{}}
	set.groups = groups{set}
	return set
}

// Start implements informers.SharedInformerFactory.
func (s *informerSet) Start(stop <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	if s.start(ctx) == 0 {
		cancel()
		return
	}
	go func() {
		<-stop
		cancel()
	}()
}

// StartWithContext implements informers.SharedInformerFactory.
func (s *informerSet) StartWithContext(ctx context.Context) { s.start(ctx) }

// start starts the informers that do not run, and returns how many.
func (s *informerSet) start(ctx context.Context) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0
	}
	for t, i := range s.informers {
		if s.running[t] {
			continue
		}
		s.running[t] = true
		n++
		s.wg.Go(func() { i.RunWithContext(ctx) })
	}
	return n
}

// Shutdown implements informers.SharedInformerFactory.
func (s *informerSet) Shutdown() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.wg.Wait()
}

// WaitForCacheSync implements informers.SharedInformerFactory.
func (s *informerSet) WaitForCacheSync(stop <-chan struct{}) map[reflect.Type]bool {
	s.mu.Lock()
	waiting := map[reflect.Type]*informer{}
	for t := range s.running {
		waiting[t] = s.informers[t]
	}
	s.mu.Unlock()
	synced := map[reflect.Type]bool{}
	for t, i := range waiting {
		select {
		case <-i.synced:
		case <-stop:
		}
		synced[t] = i.HasSynced()
	}
	return synced
}

// WaitForCacheSyncWithContext implements informers.SharedInformerFactory.
func (s *informerSet) WaitForCacheSyncWithContext(ctx context.Context) cache.SyncResult {
	synced := s.WaitForCacheSync(ctx.Done())
	for _, ok := range synced {
		if !ok {
			return cache.SyncResult{Err: context.Cause(ctx), Synced: synced}
		}
	}
	return cache.SyncResult{Synced: synced}
}

// InformerName implements informers.SharedInformerFactory.
func (s *informerSet) InformerName() *cache.InformerName { return nil }

// InformerFor implements informers.SharedInformerFactory. Of the informer that
// newFunc makes it takes the indexers.
func (s *informerSet) InformerFor(obj runtime.Object, newFunc internalinterfaces.NewInformerFunc) cache.SharedIndexInformer {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := reflect.TypeOf(obj)
	if i, ok := s.informers[t]; ok {
		return i
	}
	i := newInformer(s.storage.of(obj), obj, newFunc(s.client, s.resync).GetIndexer().GetIndexers(), s.resync)
	i.transform = trimManagedFields
	s.informers[t] = i
	return i
}

// ForResource implements informers.SharedInformerFactory.
func (s *informerSet) ForResource(r schema.GroupVersionResource) (informers.GenericInformer, error) {
	return s.storage.forResource(s, r)
}

// informerView shows informers that run already as if they had not been started.
//
// Controllers and scheduler share the API server's informers, which run before
// there are controllers. Upstream's constructors count on the opposite: many add
// their event handlers first and set the fields that the handlers need afterwards.
// So handlers that are added to a view reach the informer only when the view is
// started, and events with them.
type informerView struct {
	*informerSet
	groups
	// pods, if not nil, has the pods in place of the set. The scheduler must not see
	// those that have ended, or it counts what they had requested.
	pods informers.SharedInformerFactory
	// resync is of handlers that do not say; zero is never.
	resync time.Duration

	mu      sync.Mutex // guards what follows
	started bool
	pending []pendingLane
}

// pendingLane is a handler that its informer does not know yet.
type pendingLane struct {
	informer *informer
	lane     *lane
	options  cache.HandlerOptions
}

// view makes a view of s.
func (s *informerSet) view(resync time.Duration) *informerView {
	v := &informerView{informerSet: s, resync: resync}
	v.groups = groups{v}
	return v
}

// Start implements informers.SharedInformerFactory.
func (v *informerView) Start(stop <-chan struct{}) {
	v.informerSet.Start(stop)
	if v.pods != nil {
		v.pods.Start(stop)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.started = true
	for _, p := range v.pending {
		// An error is that the informer has stopped, and so does what waits for this.
		_ = p.informer.join(p.lane, p.options)
	}
	v.pending = nil
}

// StartWithContext implements informers.SharedInformerFactory.
func (v *informerView) StartWithContext(ctx context.Context) { v.Start(ctx.Done()) }

// InformerFor implements informers.SharedInformerFactory, and through the groups
// below it is what every typed informer of the view comes from.
func (v *informerView) InformerFor(obj runtime.Object, newFunc internalinterfaces.NewInformerFunc) cache.SharedIndexInformer {
	if _, ok := obj.(*corev1.Pod); ok && v.pods != nil {
		return v.pods.InformerFor(obj, newFunc)
	}
	return &viewInformer{informer: v.informerSet.InformerFor(obj, newFunc).(*informer), view: v}
}

// ForResource implements informers.SharedInformerFactory.
func (v *informerView) ForResource(r schema.GroupVersionResource) (informers.GenericInformer, error) {
	return v.storage.forResource(v, r)
}

// viewInformer is an informer whose handlers wait for the start of its view.
type viewInformer struct {
	*informer
	view *informerView
}

// AddEventHandler implements cache.SharedInformer.
func (i *viewInformer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, cache.HandlerOptions{})
}

// AddEventHandlerWithResyncPeriod implements cache.SharedInformer.
func (i *viewInformer) AddEventHandlerWithResyncPeriod(h cache.ResourceEventHandler, period time.Duration) (cache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, cache.HandlerOptions{ResyncPeriod: &period})
}

// AddEventHandlerWithOptions implements cache.SharedInformer.
func (i *viewInformer) AddEventHandlerWithOptions(h cache.ResourceEventHandler, o cache.HandlerOptions) (cache.ResourceEventHandlerRegistration, error) {
	if o.ResyncPeriod == nil {
		o.ResyncPeriod = &i.view.resync
	}
	i.view.mu.Lock()
	defer i.view.mu.Unlock()
	if i.view.started {
		return i.informer.AddEventHandlerWithOptions(h, o)
	}
	l := newLane(h)
	i.view.pending = append(i.view.pending, pendingLane{i.informer, l, o})
	return l, nil
}

// RemoveEventHandler implements cache.SharedInformer.
func (i *viewInformer) RemoveEventHandler(handle cache.ResourceEventHandlerRegistration) error {
	i.view.mu.Lock()
	defer i.view.mu.Unlock()
	i.view.pending = slices.DeleteFunc(i.view.pending, func(p pendingLane) bool { return p.lane == handle })
	return i.informer.RemoveEventHandler(handle)
}

// groups are the API's groups, whose informers come from a factory. Each is what
// client-go's own factory does with itself.
type groups struct {
	factory internalinterfaces.SharedInformerFactory
}

func (g groups) Admissionregistration() admissionregistration.Interface {
	return admissionregistration.New(g.factory, "", nil)
}
func (g groups) Internal() apiserverinternal.Interface {
	return apiserverinternal.New(g.factory, "", nil)
}
func (g groups) Apps() apps.Interface                 { return apps.New(g.factory, "", nil) }
func (g groups) Autoscaling() autoscaling.Interface   { return autoscaling.New(g.factory, "", nil) }
func (g groups) Batch() batch.Interface               { return batch.New(g.factory, "", nil) }
func (g groups) Certificates() certificates.Interface { return certificates.New(g.factory, "", nil) }
func (g groups) Coordination() coordination.Interface { return coordination.New(g.factory, "", nil) }
func (g groups) Core() core.Interface                 { return core.New(g.factory, "", nil) }
func (g groups) Discovery() discovery.Interface       { return discovery.New(g.factory, "", nil) }
func (g groups) Events() events.Interface             { return events.New(g.factory, "", nil) }
func (g groups) Extensions() extensions.Interface     { return extensions.New(g.factory, "", nil) }
func (g groups) Flowcontrol() flowcontrol.Interface   { return flowcontrol.New(g.factory, "", nil) }
func (g groups) Lifecycle() lifecycle.Interface       { return lifecycle.New(g.factory, "", nil) }
func (g groups) Networking() networking.Interface     { return networking.New(g.factory, "", nil) }
func (g groups) Node() node.Interface                 { return node.New(g.factory, "", nil) }
func (g groups) Policy() policy.Interface             { return policy.New(g.factory, "", nil) }
func (g groups) Rbac() rbac.Interface                 { return rbac.New(g.factory, "", nil) }
func (g groups) Resource() resource.Interface         { return resource.New(g.factory, "", nil) }
func (g groups) Scheduling() scheduling.Interface     { return scheduling.New(g.factory, "", nil) }
func (g groups) Storage() storage.Interface           { return storage.New(g.factory, "", nil) }
func (g groups) Storagemigration() storagemigration.Interface {
	return storagemigration.New(g.factory, "", nil)
}

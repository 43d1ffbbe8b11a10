// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
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
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// informerView shows informers that run already as if they had not been started.
//
// Controllers and scheduler share the API server's informers, which run before
// there are controllers. Upstream's constructors count on the opposite: many add
// their event handlers first and set the fields that the handlers need afterwards.
// So handlers that are added to a view reach the informer only when the view is
// started, and events with them.
//
// All of them are one handler to an informer, which keeps two goroutines and 16 kB
// for each: see fanout.
type informerView struct {
	informers.SharedInformerFactory
	// pods, if not nil, has the pods in place of the embedded factory. The
	// scheduler must not see those that have ended, or it counts what they had
	// requested.
	pods informers.SharedInformerFactory

	mu      sync.Mutex // guards what follows
	started bool
	pending []*fanout
}

// Start implements informers.SharedInformerFactory.
func (v *informerView) Start(stop <-chan struct{}) {
	v.SharedInformerFactory.Start(stop)
	if v.pods != nil {
		v.pods.Start(stop)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.started = true
	for _, f := range v.pending {
		f.register(stop)
	}
	v.pending = nil
}

// StartWithContext implements informers.SharedInformerFactory.
func (v *informerView) StartWithContext(ctx context.Context) { v.Start(ctx.Done()) }

// InformerFor implements informers.SharedInformerFactory, and through the groups
// below it is what every typed informer of the view comes from.
func (v *informerView) InformerFor(obj runtime.Object, newFunc internalinterfaces.NewInformerFunc) cache.SharedIndexInformer {
	factory := v.SharedInformerFactory
	if _, ok := obj.(*corev1.Pod); ok && v.pods != nil {
		factory = v.pods
	}
	return &viewInformer{SharedIndexInformer: factory.InformerFor(obj, newFunc), view: v}
}

// fanoutOf returns the pending fanout for handlers of an informer that want to be
// shown everything again as often as each other. v.mu is held.
func (v *informerView) fanoutOf(informer cache.SharedIndexInformer, resync *time.Duration) *fanout {
	for _, f := range v.pending {
		if f.informer == informer && ptr.Equal(f.resync, resync) {
			return f
		}
	}
	f := &fanout{informer: informer, resync: resync}
	v.pending = append(v.pending, f)
	return f
}

// viewInformer is an informer whose handlers wait for the start of its view.
type viewInformer struct {
	cache.SharedIndexInformer
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
	i.view.mu.Lock()
	defer i.view.mu.Unlock()
	if i.view.started {
		return i.SharedIndexInformer.AddEventHandlerWithOptions(h, o)
	}
	return i.view.fanoutOf(i.SharedIndexInformer, o.ResyncPeriod).add(h), nil
}

// RemoveEventHandler implements cache.SharedInformer.
func (i *viewInformer) RemoveEventHandler(handle cache.ResourceEventHandlerRegistration) error {
	if l, ok := handle.(*lane); ok {
		l.fanout.remove(l)
		return nil
	}
	return i.SharedIndexInformer.RemoveEventHandler(handle)
}

// fanout is one event handler of an informer that stands for many. Each of them has
// its lane, so none waits for another, as if the informer knew them all.
type fanout struct {
	informer cache.SharedIndexInformer
	resync   *time.Duration // nil is the informer's own

	mu    sync.Mutex // guards lanes
	lanes []*lane
}

func (f *fanout) add(h cache.ResourceEventHandler) *lane {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := &lane{fanout: f, handler: h, synced: make(chan struct{})}
	f.lanes = append(f.lanes, l)
	return l
}

func (f *fanout) remove(l *lane) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lanes = slices.DeleteFunc(f.lanes, func(other *lane) bool { return other == l })
}

// register adds f to its informer. The lanes' handlers have seen all there was when
// what the informer told f until then is through their lanes.
func (f *fanout) register(stop <-chan struct{}) {
	real, err := f.informer.AddEventHandlerWithOptions(f, cache.HandlerOptions{ResyncPeriod: f.resync})
	if err != nil {
		return // the informer has stopped, and so does what waits for this
	}
	go func() {
		select {
		case <-real.HasSyncedChecker().Done():
			f.tell(func(l *lane) { close(l.synced) })
		case <-stop:
		}
	}()
}

// OnAdd implements cache.ResourceEventHandler.
func (f *fanout) OnAdd(obj any, initial bool) {
	f.tell(func(l *lane) { l.handler.OnAdd(obj, initial) })
}

// OnUpdate implements cache.ResourceEventHandler.
func (f *fanout) OnUpdate(old, new any) {
	f.tell(func(l *lane) { l.handler.OnUpdate(old, new) })
}

// OnDelete implements cache.ResourceEventHandler.
func (f *fanout) OnDelete(obj any) {
	f.tell(func(l *lane) { l.handler.OnDelete(obj) })
}

func (f *fanout) tell(event func(*lane)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, l := range f.lanes {
		l.push(event)
	}
}

// lane takes events to one handler, in order, on a goroutine that is there while
// there are any. It is also the handler's registration.
type lane struct {
	fanout  *fanout
	handler cache.ResourceEventHandler
	synced  chan struct{} // closed when the handler has seen all there was

	mu     sync.Mutex // guards what follows
	events []func(*lane)
	busy   bool
}

func (l *lane) push(event func(*lane)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, event)
	if !l.busy {
		l.busy = true
		go l.run()
	}
}

func (l *lane) run() {
	for {
		l.mu.Lock()
		events := l.events
		l.events, l.busy = nil, len(events) > 0
		l.mu.Unlock()
		if len(events) == 0 {
			return
		}
		for _, event := range events {
			l.handle(event)
		}
	}
}

// handle drops an event whose handler panics, as an informer does.
func (l *lane) handle(event func(*lane)) {
	defer utilruntime.HandleCrash()
	event(l)
}

// HasSynced implements cache.ResourceEventHandlerRegistration.
func (l *lane) HasSynced() bool {
	select {
	case <-l.synced:
		return true
	default:
		return false
	}
}

// HasSyncedChecker implements cache.ResourceEventHandlerRegistration.
func (l *lane) HasSyncedChecker() cache.DoneChecker { return l }

// Name implements cache.DoneChecker.
func (l *lane) Name() string { return fmt.Sprintf("event handler %T", l.handler) }

// Done implements cache.DoneChecker.
func (l *lane) Done() <-chan struct{} { return l.synced }

// The groups, so that their informers come from the view. Each is what client-go's
// own factory does with itself in place of v.

func (v *informerView) Admissionregistration() admissionregistration.Interface {
	return admissionregistration.New(v, "", nil)
}
func (v *informerView) Internal() apiserverinternal.Interface {
	return apiserverinternal.New(v, "", nil)
}
func (v *informerView) Apps() apps.Interface                 { return apps.New(v, "", nil) }
func (v *informerView) Autoscaling() autoscaling.Interface   { return autoscaling.New(v, "", nil) }
func (v *informerView) Batch() batch.Interface               { return batch.New(v, "", nil) }
func (v *informerView) Certificates() certificates.Interface { return certificates.New(v, "", nil) }
func (v *informerView) Coordination() coordination.Interface { return coordination.New(v, "", nil) }
func (v *informerView) Core() core.Interface                 { return core.New(v, "", nil) }
func (v *informerView) Discovery() discovery.Interface       { return discovery.New(v, "", nil) }
func (v *informerView) Events() events.Interface             { return events.New(v, "", nil) }
func (v *informerView) Extensions() extensions.Interface     { return extensions.New(v, "", nil) }
func (v *informerView) Flowcontrol() flowcontrol.Interface   { return flowcontrol.New(v, "", nil) }
func (v *informerView) Lifecycle() lifecycle.Interface       { return lifecycle.New(v, "", nil) }
func (v *informerView) Networking() networking.Interface     { return networking.New(v, "", nil) }
func (v *informerView) Node() node.Interface                 { return node.New(v, "", nil) }
func (v *informerView) Policy() policy.Interface             { return policy.New(v, "", nil) }
func (v *informerView) Rbac() rbac.Interface                 { return rbac.New(v, "", nil) }
func (v *informerView) Resource() resource.Interface         { return resource.New(v, "", nil) }
func (v *informerView) Scheduling() scheduling.Interface     { return scheduling.New(v, "", nil) }
func (v *informerView) Storage() storage.Interface           { return storage.New(v, "", nil) }
func (v *informerView) Storagemigration() storagemigration.Interface {
	return storagemigration.New(v, "", nil)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

const (
	// informerPause and maxInformerPause are the times between two attempts of an
	// informer to read what it shows. It asks its own process, so it begins soon.
	informerPause    = 20 * time.Millisecond
	maxInformerPause = 30 * time.Second
	// minResync is the least time between two resyncs, as upstream has it.
	minResync = time.Second
)

// source is where an informer reads the objects of one kind.
type source interface {
	// list returns all objects, which are the caller's own, and the revision of the
	// list. It is at least as new as revision.
	list(ctx context.Context, revision string) (objects []runtime.Object, newest string, err error)
	// watch tells what changes after revision. Its events' objects are as storage has
	// them; own makes of one what list returns.
	watch(ctx context.Context, revision string) (watch.Interface, error)
	own(obj runtime.Object) (runtime.Object, error)
}

// informer is a cache.SharedIndexInformer that reads from its source with one
// goroutine, and needs none for a handler that has nothing to do. Upstream's needs
// five and two more for each handler, with a buffer of 16 kB, and its source
// is a request to an API server on another machine.
type informer struct {
	source  source
	example runtime.Object
	indexer cache.Indexer
	resync  time.Duration // of handlers that do not say; zero is never
	synced  chan struct{} // closed when the indexer has the first list
	wake    chan struct{} // a resync may be due earlier

	mu        sync.Mutex // guards what follows, and that handlers are told all in order
	transform cache.TransformFunc
	onError   cache.WatchErrorHandlerWithContext
	started   bool
	stopped   bool
	revision  string
	lanes     []*lane
}

func newInformer(src source, example runtime.Object, indexers cache.Indexers, resync time.Duration) *informer {
	return &informer{
		source:  src,
		example: example,
		indexer: cache.NewIndexer(cache.DeletionHandlingMetaNamespaceKeyFunc, indexers),
		resync:  resync,
		synced:  make(chan struct{}),
		wake:    make(chan struct{}, 1),
	}
}

// Run implements cache.SharedInformer.
func (i *informer) Run(stop <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	i.RunWithContext(ctx)
}

// RunWithContext implements cache.SharedInformer.
func (i *informer) RunWithContext(ctx context.Context) {
	i.mu.Lock()
	started := i.started
	i.started = true
	i.mu.Unlock()
	if started {
		return
	}
	defer func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.stopped = true
	}()
	for pause := informerPause; ; pause = min(2*pause, maxInformerPause) {
		began := time.Now()
		again := i.follow(ctx)
		took := time.Since(began)
		if took > maxInformerPause {
			pause = informerPause // it has worked
		}
		if again && took > informerPause && ctx.Err() == nil {
			continue
		}
		if !sleep(ctx, pause) {
			return
		}
	}
}

// follow lists and then watches until the watch cannot go on or ctx is done. It
// reports whether a new list is all that is wanting.
func (i *informer) follow(ctx context.Context) (again bool) {
	defer utilruntime.HandleCrashWithContext(ctx)
	objects, newest, err := i.source.list(ctx, i.listFrom())
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsTimeout(err) {
		objects, newest, err = i.source.list(ctx, "") // of an etcd that lost what it had
	}
	if err != nil {
		i.failed(ctx, fmt.Errorf("list %T: %w", i.example, err))
		return false
	}
	i.replace(ctx, objects, newest)
	for pause := informerPause; ; pause = min(2*pause, maxInformerPause) {
		w, err := i.source.watch(ctx, i.LastSyncResourceVersion())
		if err == nil {
			var told int
			told, err = i.take(ctx, w)
			w.Stop()
			if told > 0 {
				pause = informerPause
			}
		}
		switch {
		case ctx.Err() != nil:
			return false
		case err == nil || apierrors.IsTooManyRequests(err): // it ended, or the cache is being made anew
		case apierrors.IsResourceExpired(err) || apierrors.IsGone(err):
			return true
		default:
			i.failed(ctx, fmt.Errorf("watch %T: %w", i.example, err))
			return false
		}
		if !sleep(ctx, pause) {
			return false
		}
	}
}

// listFrom is the revision that a list may not be older than.
func (i *informer) listFrom() string {
	if revision := i.LastSyncResourceVersion(); revision != "" {
		return revision
	}
	return "0" // whatever the watch cache has, which is no older than this process
}

func (i *informer) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	i.mu.Lock()
	handler := i.onError
	i.mu.Unlock()
	if handler != nil {
		handler(ctx, nil, err)
	}
	klog.FromContext(ctx).Error(err, "Informer cannot follow")
}

// take hands on what w tells until it ends, and returns how much that was.
func (i *informer) take(ctx context.Context, w watch.Interface) (told int, err error) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var resync <-chan time.Time
	plan := func() {
		resync = nil
		if due := i.nextResync(); !due.IsZero() {
			timer.Reset(time.Until(due))
			resync = timer.C
		}
	}
	plan()
	for {
		select {
		case <-ctx.Done():
			return told, nil
		case <-i.wake:
			plan()
		case <-resync:
			i.resyncDue(time.Now())
			plan()
		case event, ok := <-w.ResultChan():
			if !ok {
				return told, nil
			}
			if event.Type == watch.Error {
				return told, apierrors.FromObject(event.Object)
			}
			told++
			if err := i.handle(ctx, event); err != nil {
				utilruntime.HandleErrorWithContext(ctx, err, "Event of a watch was dropped", "type", event.Type)
			}
		}
	}
}

// handle brings the indexer up to date with an event and tells the handlers.
func (i *informer) handle(ctx context.Context, event watch.Event) error {
	accessor, err := meta.Accessor(event.Object)
	if err != nil {
		return fmt.Errorf("read event: %w", err)
	}
	revision := accessor.GetResourceVersion()
	var obj any
	if event.Type != watch.Bookmark {
		own, err := i.source.own(event.Object)
		if err != nil {
			return err
		}
		if obj, err = i.transformed(own); err != nil {
			return fmt.Errorf("transform %T: %w", own, err)
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	switch event.Type {
	case watch.Added, watch.Modified:
		err = i.put(obj, false)
	case watch.Deleted:
		_, exists, _ := i.indexer.Get(obj)
		if err = i.indexer.Delete(obj); err == nil && exists {
			i.tell(func(l *lane) { l.handler.OnDelete(obj) })
		}
	case watch.Bookmark:
	default:
		return fmt.Errorf("event of type %q", event.Type)
	}
	i.revision = revision
	i.indexer.Bookmark(revision)
	return err
}

// put adds or updates an object and tells the handlers. i.mu is held.
func (i *informer) put(obj any, initial bool) error {
	old, exists, err := i.indexer.Get(obj)
	if err != nil {
		return err
	}
	if !exists {
		if err := i.indexer.Add(obj); err != nil {
			return err
		}
		i.tell(func(l *lane) { l.handler.OnAdd(obj, initial) })
		return nil
	}
	if err := i.indexer.Update(obj); err != nil {
		return err
	}
	if sameRevision(old, obj) {
		return nil // upstream tells those alone whose resync is due
	}
	i.tell(func(l *lane) { l.handler.OnUpdate(old, obj) })
	return nil
}

func sameRevision(a, b any) bool {
	x, errX := meta.Accessor(a)
	y, errY := meta.Accessor(b)
	return errX == nil && errY == nil && x.GetResourceVersion() == y.GetResourceVersion()
}

// replace makes the indexer what a list has.
func (i *informer) replace(ctx context.Context, objects []runtime.Object, newest string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	first := !i.HasSynced()
	listed := make(map[string]bool, len(objects))
	for _, o := range objects {
		obj, err := i.transformed(o)
		if err == nil {
			err = i.put(obj, first)
		}
		if err != nil {
			utilruntime.HandleErrorWithContext(ctx, err, "Object of a list was dropped", "type", fmt.Sprintf("%T", i.example))
			continue
		}
		key, _ := cache.DeletionHandlingMetaNamespaceKeyFunc(obj)
		listed[key] = true
	}
	for _, key := range i.indexer.ListKeys() {
		if listed[key] {
			continue
		}
		obj, exists, err := i.indexer.GetByKey(key)
		if err != nil || !exists {
			continue
		}
		gone := cache.DeletedFinalStateUnknown{Key: key, Obj: obj}
		if err := i.indexer.Delete(gone); err != nil {
			utilruntime.HandleErrorWithContext(ctx, err, "Object stays in an informer", "key", key)
			continue
		}
		i.tell(func(l *lane) { l.handler.OnDelete(gone) })
	}
	i.revision = newest
	i.indexer.Bookmark(newest)
	if first {
		close(i.synced)
		i.tell((*lane).complete)
	}
}

// transformed is what the indexer keeps of an object.
func (i *informer) transformed(obj any) (any, error) {
	if i.transform == nil {
		return obj, nil
	}
	return i.transform(obj)
}

// tell has all handlers told of an event. i.mu is held.
func (i *informer) tell(event func(*lane)) {
	for _, l := range i.lanes {
		l.push(event)
	}
}

// AddEventHandler implements cache.SharedInformer.
func (i *informer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, cache.HandlerOptions{})
}

// AddEventHandlerWithResyncPeriod implements cache.SharedInformer.
func (i *informer) AddEventHandlerWithResyncPeriod(h cache.ResourceEventHandler, period time.Duration) (cache.ResourceEventHandlerRegistration, error) {
	return i.AddEventHandlerWithOptions(h, cache.HandlerOptions{ResyncPeriod: &period})
}

// AddEventHandlerWithOptions implements cache.SharedInformer.
func (i *informer) AddEventHandlerWithOptions(h cache.ResourceEventHandler, o cache.HandlerOptions) (cache.ResourceEventHandlerRegistration, error) {
	l := newLane(h)
	if err := i.join(l, o); err != nil {
		return nil, err
	}
	return l, nil
}

// join has the handler of l told all there is, and from then on what happens.
func (i *informer) join(l *lane, o cache.HandlerOptions) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.stopped {
		return errors.New("add event handler: the informer has stopped")
	}
	if l.resync = ptr.Deref(o.ResyncPeriod, i.resync); l.resync > 0 {
		l.resync = max(l.resync, minResync)
		l.due = time.Now().Add(l.resync)
		select {
		case i.wake <- struct{}{}:
		default:
		}
	}
	i.lanes = append(i.lanes, l)
	for _, obj := range i.indexer.List() {
		l.push(func(l *lane) { l.handler.OnAdd(obj, true) })
	}
	if i.HasSynced() {
		l.push((*lane).complete)
	}
	return nil
}

// RemoveEventHandler implements cache.SharedInformer.
func (i *informer) RemoveEventHandler(handle cache.ResourceEventHandlerRegistration) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.lanes = slices.DeleteFunc(i.lanes, func(l *lane) bool { return l == handle })
	return nil
}

// nextResync is when the next handler wants to be told everything again; zero is never.
func (i *informer) nextResync() (due time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, l := range i.lanes {
		if l.resync > 0 && (due.IsZero() || l.due.Before(due)) {
			due = l.due
		}
	}
	return due
}

// resyncDue tells the handlers for whom it is time of all objects.
func (i *informer) resyncDue(now time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var all []any
	for _, l := range i.lanes {
		if l.resync == 0 || l.due.After(now) {
			continue
		}
		l.due = now.Add(l.resync)
		if all == nil {
			all = i.indexer.List()
		}
		for _, obj := range all {
			l.push(func(l *lane) { l.handler.OnUpdate(obj, obj) })
		}
	}
}

// HasSynced implements cache.SharedInformer.
func (i *informer) HasSynced() bool {
	select {
	case <-i.synced:
		return true
	default:
		return false
	}
}

// HasSyncedChecker implements cache.SharedInformer.
func (i *informer) HasSyncedChecker() cache.DoneChecker {
	return doneChecker{fmt.Sprintf("informer of %T", i.example), i.synced}
}

// LastSyncResourceVersion implements cache.SharedInformer.
func (i *informer) LastSyncResourceVersion() string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.revision
}

// GetStore implements cache.SharedInformer.
func (i *informer) GetStore() cache.Store { return i.indexer }

// GetIndexer implements cache.SharedIndexInformer.
func (i *informer) GetIndexer() cache.Indexer { return i.indexer }

// AddIndexers implements cache.SharedIndexInformer.
func (i *informer) AddIndexers(indexers cache.Indexers) error { return i.indexer.AddIndexers(indexers) }

// GetController implements cache.SharedInformer.
func (i *informer) GetController() cache.Controller { return informerController{i} }

// SetWatchErrorHandler implements cache.SharedInformer.
func (i *informer) SetWatchErrorHandler(h cache.WatchErrorHandler) error {
	return i.SetWatchErrorHandlerWithContext(func(_ context.Context, r *cache.Reflector, err error) { h(r, err) })
}

// SetWatchErrorHandlerWithContext implements cache.SharedInformer.
func (i *informer) SetWatchErrorHandlerWithContext(h cache.WatchErrorHandlerWithContext) error {
	return i.beforeStart(func() { i.onError = h })
}

// SetTransform implements cache.SharedInformer.
func (i *informer) SetTransform(f cache.TransformFunc) error {
	return i.beforeStart(func() { i.transform = f })
}

func (i *informer) beforeStart(set func()) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.started {
		return errors.New("informer has already started")
	}
	set()
	return nil
}

// IsStopped implements cache.SharedInformer.
func (i *informer) IsStopped() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.stopped
}

// informerController is what an informer says of itself to those who take it for a
// controller. It cannot be run.
type informerController struct{ *informer }

func (informerController) Run(<-chan struct{})            {}
func (informerController) RunWithContext(context.Context) {}

// lane takes events to one handler, in order, on a goroutine that is there while
// there are any. It is also the handler's registration.
type lane struct {
	handler cache.ResourceEventHandler
	synced  chan struct{} // closed when the handler has seen all there was

	// Of its informer, whose mutex guards them.
	resync time.Duration // zero is never
	due    time.Time

	mu     sync.Mutex // guards what follows
	events []func(*lane)
	busy   bool
}

func newLane(h cache.ResourceEventHandler) *lane {
	return &lane{handler: h, synced: make(chan struct{})}
}

// complete marks that the handler has seen all there was.
func (l *lane) complete() { close(l.synced) }

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
func (l *lane) HasSynced() bool { return cache.IsDone(l.HasSyncedChecker()) }

// HasSyncedChecker implements cache.ResourceEventHandlerRegistration.
func (l *lane) HasSyncedChecker() cache.DoneChecker {
	return doneChecker{fmt.Sprintf("event handler %T", l.handler), l.synced}
}

// doneChecker implements cache.DoneChecker.
type doneChecker struct {
	name string
	done <-chan struct{}
}

func (d doneChecker) Name() string          { return d.name }
func (d doneChecker) Done() <-chan struct{} { return d.done }

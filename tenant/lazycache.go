// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	flowcontrol "k8s.io/apiserver/pkg/util/flowcontrol/request"

	"github.com/tenantd/tenantd/tenant/limit"
)

const (
	// cachePatience is how long the first that needs a watch cache waits for it to be
	// filled. Upstream's answers afterwards, as if the server had just started.
	cachePatience = 3 * time.Second
	// idleBookmark is the time between bookmarks of a watch on nothing.
	idleBookmark = time.Minute
)

type idleKey struct{}

// mayIdle marks that a list and a watch are an informer's of the control plane itself,
// which would keep a watch cache in use for objects that there are not.
func mayIdle(ctx context.Context) context.Context { return context.WithValue(ctx, idleKey{}, true) }

// lazyCache is storage with a watch cache that is made when somebody writes the first
// object or a client wants to read: of some sixty kinds, most clusters have objects of
// half. A cache takes twenty goroutines, and 40 kB before it has an object.
//
// It is there before the first write, so whoever wrote can watch from the revision of
// that write on, and before the first list, so whoever listed can watch from there.
type lazyCache struct {
	storage.Interface // without a cache
	clock             *cacheClock
	newFunc           func() runtime.Object
	make              func() (*cacher.Cacher, error)
	// vacant is Storage.Vacant of what is stored here.
	vacant   func(filled func()) (revision int64, forget func(), ok bool)
	closeRaw func()

	cache atomic.Pointer[cachedStorage] // nil until it is made

	mu     sync.Mutex // guards what follows, and that one cache is made
	opened *cachedStorage
	closed bool
}

type cachedStorage struct {
	*cacher.CacheDelegator
	cacher *cacher.Cacher
}

// now is the storage with its cache, if that has been made.
func (l *lazyCache) now() storage.Interface {
	if c := l.cache.Load(); c != nil {
		return c
	}
	return l.Interface
}

// cached is the storage with its cache. The first callers wait until that is filled.
func (l *lazyCache) cached(ctx context.Context) (storage.Interface, error) {
	if c := l.cache.Load(); c != nil {
		return c, nil
	}
	c, err := l.open()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, cachePatience)
	defer cancel()
	// If it takes longer, the cache says so to those who ask it.
	_ = c.cacher.Wait(ctx)
	l.cache.CompareAndSwap(nil, c)
	return c, nil
}

func (l *lazyCache) open() (*cachedStorage, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errors.New("open watch cache: the API server stops")
	}
	if l.opened == nil {
		c, err := l.make()
		if err != nil {
			return nil, fmt.Errorf("open watch cache: %w", err)
		}
		l.opened = &cachedStorage{cacher.NewCacheDelegator(c, l.Interface), c}
	}
	return l.opened, nil
}

func (l *lazyCache) close() {
	l.mu.Lock()
	c := l.opened
	l.closed = true
	l.mu.Unlock()
	if c != nil {
		c.CacheDelegator.Stop()
		c.cacher.Stop()
	}
	l.closeRaw()
}

// idle reports whether nobody needs the cache for an informer's request.
func (l *lazyCache) idle(ctx context.Context) bool {
	return ctx.Value(idleKey{}) != nil && l.cache.Load() == nil
}

// GetList implements storage.Interface.
func (l *lazyCache) GetList(ctx context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	if l.idle(ctx) {
		if revision, forget, ok := l.vacant(func() {}); ok {
			forget()
			return l.Versioner().UpdateList(list, uint64(revision), "", nil)
		}
	}
	// The control plane's own lists, such as those of a namespace that is deleted, are
	// not followed by a watch.
	if limit.IsOwn(ctx) && opts.ResourceVersion == "" && l.cache.Load() == nil {
		if _, forget, ok := l.vacant(func() {}); ok {
			forget()
			return l.Interface.GetList(ctx, key, opts, list)
		}
	}
	s, err := l.cached(ctx)
	if err != nil {
		return err
	}
	return s.GetList(ctx, key, opts, list)
}

// Watch implements storage.Interface.
func (l *lazyCache) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	if l.idle(ctx) {
		if w := l.watchNothing(); w != nil {
			return w, nil
		}
	}
	s, err := l.cached(ctx)
	if err != nil {
		return nil, err
	}
	if ctx.Value(idleKey{}) != nil {
		return s.Watch(ctx, key, opts)
	}
	return l.clock.watch(!limit.IsOwn(ctx), func() (watch.Interface, error) { return s.Watch(ctx, key, opts) })
}

// Get implements storage.Interface.
func (l *lazyCache) Get(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	s := l.now()
	if opts.ResourceVersion != "" {
		var err error
		if s, err = l.cached(ctx); err != nil {
			return err
		}
	}
	return s.Get(ctx, key, opts, out)
}

// Create implements storage.Interface.
func (l *lazyCache) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	s, err := l.cached(ctx)
	if err != nil {
		return err
	}
	return s.Create(ctx, key, obj, out, ttl)
}

// GuaranteedUpdate implements storage.Interface.
func (l *lazyCache) GuaranteedUpdate(ctx context.Context, key string, dst runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, update storage.UpdateFunc, known runtime.Object,
) error {
	s, err := l.cached(ctx) // it may create
	if err != nil {
		return err
	}
	return s.GuaranteedUpdate(ctx, key, dst, ignoreNotFound, preconditions, update, known)
}

// Delete implements storage.Interface.
func (l *lazyCache) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validate storage.ValidateObjectFunc, known runtime.Object, opts storage.DeleteOptions,
) error {
	return l.now().Delete(ctx, key, out, preconditions, validate, known, opts)
}

// ReadinessCheck implements storage.Interface.
func (l *lazyCache) ReadinessCheck() error { return l.now().ReadinessCheck() }

// CompactRevision implements storage.Interface.
func (l *lazyCache) CompactRevision() int64 { return l.now().CompactRevision() }

// watchNothing is a watch that tells how time goes on, and asks for a list when there
// is an object. It is nil if there is one.
func (l *lazyCache) watchNothing() watch.Interface {
	w := &nothing{events: make(chan watch.Event, 2)} // a bookmark and the last
	revision, forget, ok := l.vacant(func() {
		status := apierrors.NewResourceExpired("there is an object").Status()
		w.end(watch.Event{Type: watch.Error, Object: &status})
	})
	if !ok {
		return nil
	}
	w.forget = forget
	w.bookmark(l, revision)
	return w
}

// nothing implements watch.Interface, without a goroutine.
type nothing struct {
	forget func()

	mu     sync.Mutex // guards what follows
	events chan watch.Event
	ended  bool
	timer  *time.Timer
}

// bookmark tells revision, and again later.
func (w *nothing) bookmark(l *lazyCache, revision int64) {
	obj := l.newFunc()
	err := l.Versioner().UpdateObject(obj, uint64(revision))
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return
	}
	if err == nil {
		if len(w.events) == 0 {
			w.events <- watch.Event{Type: watch.Bookmark, Object: obj}
		}
	}
	w.timer = time.AfterFunc(idleBookmark, func() {
		if revision, forget, ok := l.vacant(func() {}); ok {
			forget()
			w.bookmark(l, revision)
		}
	})
}

func (w *nothing) end(last ...watch.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return
	}
	w.ended = true
	for _, e := range last {
		w.events <- e // there is room: nobody else sends
	}
	close(w.events)
	if w.timer != nil {
		w.timer.Stop()
	}
}

// ResultChan implements watch.Interface.
func (w *nothing) ResultChan() <-chan watch.Event { return w.events }

// Stop implements watch.Interface.
func (w *nothing) Stop() {
	w.forget()
	w.end()
}

// objectCounts tells API priority and fairness how much a list is, by what storage
// knows anyway. Upstream counts the keys of each resource once a minute.
type objectCounts struct {
	storage Storage
	uid     string

	mu          sync.Mutex // guards directories
	directories map[string]*string
}

// add adds a resource and where its objects are, until remove is called.
func (c *objectCounts) add(resource, directory string) (remove func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.directories == nil {
		c.directories = map[string]*string{}
	}
	c.directories[resource] = &directory
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.directories[resource] == &directory { // and not one that came after it
			delete(c.directories, resource)
		}
	}
}

// directory is where the objects of a resource are.
func (c *objectCounts) directory(resource string) (string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d := c.directories[resource]; d != nil {
		return *d, true
	}
	return "", false
}

// Get implements flowcontrol.StorageObjectCountTracker.
func (c *objectCounts) Get(resource string) (storage.Stats, error) {
	directory, ok := c.directory(resource)
	if !ok {
		return storage.Stats{}, flowcontrol.ObjectCountNotFoundErr
	}
	bytes, keys := c.storage.Bytes(c.uid, directory)
	return storage.Stats{ObjectCount: keys, EstimatedAverageObjectSizeBytes: bytes / max(keys, 1)}, nil
}

// Set implements flowcontrol.StorageObjectCountTracker.
func (c *objectCounts) Set(string, storage.Stats) {}

// RunUntil implements flowcontrol.StorageObjectCountTracker.
func (c *objectCounts) RunUntil(<-chan struct{}) {}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/cache"
)

// recording collects what a handler is told, and holds it up while hold is not closed.
func recording(hold <-chan struct{}) (cache.ResourceEventHandler, <-chan string) {
	told := make(chan string, 100)
	tell := func(format string, args ...any) {
		<-hold
		told <- fmt.Sprintf(format, args...)
	}
	return cache.ResourceEventHandlerDetailedFuncs{
		AddFunc:    func(o any, initial bool) { tell("add %s %t", o.(*corev1.ConfigMap).Name, initial) },
		UpdateFunc: func(_, o any) { tell("update %s", o.(*corev1.ConfigMap).Name) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			tell("delete %s", o.(*corev1.ConfigMap).Name)
		},
	}, told
}

func expect(t *testing.T, told <-chan string, want ...string) {
	t.Helper()
	for _, w := range want {
		select {
		case got := <-told:
			if got != w {
				t.Fatalf("told %q, want %q", got, w)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("not told %q", w)
		}
	}
}

// fakeObjects is a source of config maps that a test changes.
type fakeObjects struct {
	mu       sync.Mutex // guards what follows
	objects  map[string]*corev1.ConfigMap
	revision int
	watches  []*watch.FakeWatcher
	lists    int
}

func (f *fakeObjects) list(context.Context, string) (all []runtime.Object, revision string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists++
	for _, name := range slices.Sorted(maps.Keys(f.objects)) {
		all = append(all, f.objects[name].DeepCopy())
	}
	return all, strconv.Itoa(f.revision), nil
}

func (f *fakeObjects) watch(context.Context, string) (watch.Interface, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := watch.NewFakeWithChanSize(100, false)
	f.watches = append(f.watches, w)
	return w, nil
}

func (f *fakeObjects) own(o runtime.Object) (runtime.Object, error) { return o, nil }

// change sets an object, or deletes it if value is empty. Whoever watches is told,
// unless it happens unseen.
func (f *fakeObjects) change(unseen bool, name, value string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.revision++
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, ResourceVersion: strconv.Itoa(f.revision)}, Data: map[string]string{"k": value}}
	event := watch.Event{Type: watch.Added, Object: o}
	if f.objects[name] != nil {
		event.Type = watch.Modified
	}
	f.objects[name] = o
	if value == "" {
		event.Type = watch.Deleted
		delete(f.objects, name)
	}
	if !unseen && len(f.watches) > 0 {
		f.watches[len(f.watches)-1].Action(event.Type, event.Object.DeepCopyObject())
	}
}

// expire ends the watch as an etcd does that has compacted what the watch needs.
func (f *fakeObjects) expire() {
	f.mu.Lock()
	defer f.mu.Unlock()
	status := apierrors.NewResourceExpired("compacted").Status()
	f.watches[len(f.watches)-1].Error(&status)
}

// await returns when the n-th watch has begun.
func (f *fakeObjects) await(t *testing.T, n int) {
	t.Helper()
	for {
		f.mu.Lock()
		watches := len(f.watches)
		f.mu.Unlock()
		if watches >= n {
			return
		}
		if !sleep(t.Context(), time.Millisecond) {
			t.Fatal("no watch")
		}
	}
}

// A relist tells what happened meanwhile, and nothing of what did not.
func TestInformerRelists(t *testing.T) {
	f := &fakeObjects{objects: map[string]*corev1.ConfigMap{}}
	f.change(true, "a", "1")
	f.change(true, "b", "1")
	f.change(true, "c", "1")
	i := newInformer(f, &corev1.ConfigMap{}, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}, 0)
	open := make(chan struct{})
	close(open)
	handler, told := recording(open)
	registration, err := i.AddEventHandler(handler)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		i.RunWithContext(ctx)
	}()
	expect(t, told, "add a true", "add b true", "add c true")
	<-registration.HasSyncedChecker().Done()
	if !i.HasSynced() {
		t.Error("not synced after the first list")
	}
	f.await(t, 1)
	f.change(false, "d", "1")
	expect(t, told, "add d false")

	f.change(true, "a", "2")
	f.change(true, "b", "")
	f.change(true, "e", "1")
	f.expire()
	expect(t, told, "update a", "add e false", "delete b")
	f.await(t, 2)
	if rv := i.LastSyncResourceVersion(); rv != strconv.Itoa(f.revision) || i.GetStore().LastStoreSyncResourceVersion() != rv {
		t.Errorf("at revision %q, the store at %q, want %d", rv, i.GetStore().LastStoreSyncResourceVersion(), f.revision)
	}
	// A bookmark moves the revision and tells nobody.
	f.mu.Lock()
	f.watches[1].Action(watch.Bookmark, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1000"}})
	f.mu.Unlock()
	f.change(false, "e", "2")
	expect(t, told, "update e")
	if keys, err := i.GetIndexer().IndexKeys(cache.NamespaceIndex, "n"); err != nil || len(keys) != 4 {
		t.Errorf("keys of the namespace: %q, %v; want a, c, d, e", keys, err)
	}
	if f.lists != 2 {
		t.Errorf("%d lists, want 2", f.lists)
	}
	cancel()
	<-stopped
	if _, err := i.AddEventHandler(handler); err == nil || !i.IsStopped() {
		t.Error("a handler was added to an informer that has stopped")
	}
}

// Those who ask for it are told everything again, and nobody else is.
func TestInformerResyncs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeObjects{objects: map[string]*corev1.ConfigMap{}}
		f.change(true, "a", "1")
		i := newInformer(f, &corev1.ConfigMap{}, nil, 0)
		open := make(chan struct{})
		close(open)
		often, oftenTold := recording(open)
		never, neverTold := recording(open)
		if _, err := i.AddEventHandlerWithResyncPeriod(often, time.Minute); err != nil {
			t.Fatal(err)
		}
		if _, err := i.AddEventHandler(never); err != nil {
			t.Fatal(err)
		}
		go i.RunWithContext(t.Context())
		time.Sleep(150 * time.Second)
		late, lateTold := recording(open)
		if _, err := i.AddEventHandlerWithResyncPeriod(late, time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2500 * time.Millisecond)
		synctest.Wait()
		expect(t, oftenTold, "add a true", "update a", "update a")
		expect(t, neverTold, "add a true")
		expect(t, lateTold, "add a true", "update a", "update a")
		if len(oftenTold)+len(neverTold)+len(lateTold) > 0 {
			t.Error("told more than that")
		}
	})
}

func TestHandlersOfAView(t *testing.T) {
	open, hold := make(chan struct{}), make(chan struct{})
	close(open)
	f := &fakeObjects{objects: map[string]*corev1.ConfigMap{}}
	f.change(true, "a", "1")
	set := newInformerSet(nil, newObjectStorage(scheme.Scheme), 0)
	running := newInformer(f, &corev1.ConfigMap{}, nil, 0)
	set.informers[reflect.TypeFor[*corev1.ConfigMap]()] = running
	ctx, cancel := context.WithCancel(t.Context())
	defer set.Shutdown()
	defer cancel()
	set.StartWithContext(ctx)
	set.WaitForCacheSync(ctx.Done())
	f.await(t, 1)

	view := set.view(0)
	informer := view.Core().V1().ConfigMaps().Informer()
	register := func(hold <-chan struct{}) (cache.ResourceEventHandlerRegistration, <-chan string) {
		handler, told := recording(hold)
		r, err := informer.AddEventHandler(handler)
		if err != nil {
			t.Fatal(err)
		}
		return r, told
	}
	quick, quickTold := register(open)
	slow, slowTold := register(hold)
	removed, removedTold := register(open)
	early, earlyTold := register(open)
	if err := informer.RemoveEventHandler(early); err != nil {
		t.Fatal(err)
	}
	if quick.HasSynced() {
		t.Error("a handler has seen all there was before its view was started")
	}
	if n := len(running.lanes); n > 0 {
		t.Errorf("%d handlers reached the informer before the view was started", n)
	}

	view.StartWithContext(ctx)
	expect(t, quickTold, "add a true")
	<-quick.HasSyncedChecker().Done()
	if !quick.HasSynced() || slow.HasSynced() {
		t.Errorf("synced: %t for the quick handler, %t for the slow one; want true, false", quick.HasSynced(), slow.HasSynced())
	}
	expect(t, removedTold, "add a true")
	if err := informer.RemoveEventHandler(removed); err != nil {
		t.Fatal(err)
	}

	// A handler that does not return holds up no other.
	f.change(false, "b", "1")
	f.change(false, "b", "2")
	f.change(false, "a", "")
	expect(t, quickTold, "add b false", "update b", "delete a")
	// One that comes late is told what there is.
	late, lateTold := register(open)
	expect(t, lateTold, "add b true")
	<-late.HasSyncedChecker().Done()

	close(hold)
	expect(t, slowTold, "add a true", "add b false", "update b", "delete a")
	<-slow.HasSyncedChecker().Done()
	for _, told := range []<-chan string{removedTold, earlyTold} {
		select {
		case got := <-told:
			t.Errorf("a handler that was removed was told %q", got)
		default:
		}
	}
}

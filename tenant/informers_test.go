// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
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
		DeleteFunc: func(o any) { tell("delete %s", o.(*corev1.ConfigMap).Name) },
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

func TestHandlersOfAView(t *testing.T) {
	open, hold := make(chan struct{}), make(chan struct{})
	close(open)
	object := func(name string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name}}
	}
	client := fake.NewClientset(object("a"))
	maps := client.CoreV1().ConfigMaps("n")
	running := informers.NewSharedInformerFactory(client, 0)
	running.Core().V1().ConfigMaps().Informer()
	running.Start(t.Context().Done())
	running.WaitForCacheSync(t.Context().Done())

	view := &informerView{SharedInformerFactory: running}
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
	if len(view.pending) != 1 {
		t.Errorf("%d handlers for the informer, want one that stands for all", len(view.pending))
	}

	view.Start(t.Context().Done())
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
	if _, err := maps.Create(t.Context(), object("b"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	changed := object("b")
	changed.Data = map[string]string{"k": "v"}
	if _, err := maps.Update(t.Context(), changed, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := maps.Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
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

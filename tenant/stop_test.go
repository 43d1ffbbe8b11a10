// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// endedStorage is one that fails while it is waited for.
type endedStorage struct {
	Storage
	failed atomic.Bool
}

// Failed implements Storage.
func (s *endedStorage) Failed() bool { return s.failed.Load() }

// What an API server does after its start is not waited for when its storage has failed: it
// would never be done.
func TestHooksAreNotAwaitedWithoutStorage(t *testing.T) {
	storage := &endedStorage{}
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) == 2 {
			storage.failed.Store(true)
		}
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprintf(w, "[-]%s failed: not finished\n", rolesHook)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	cp := &ControlPlane{cfg: Config{Platform: &Platform{storage: storage}}}
	cp.awaitHooks(&apiServer{client: client})
	if n := asked.Load(); n != 2 {
		t.Errorf("it was asked %d times, the last of them after the storage had failed", n)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/tenantd/tenantd/tenant/limit"
)

// slowDisk is an etcd that takes its time.
type slowDisk struct{ clientv3.KV }

const slowDiskTime = 50 * time.Millisecond

func (slowDisk) Put(context.Context, string, string, ...clientv3.OpOption) (*clientv3.PutResponse, error) {
	time.Sleep(slowDiskTime)
	return nil, nil
}

func (slowDisk) Get(context.Context, string, ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	time.Sleep(slowDiskTime)
	return nil, nil
}

func (slowDisk) Delete(context.Context, string, ...clientv3.OpOption) (*clientv3.DeleteResponse, error) {
	time.Sleep(slowDiskTime)
	return nil, nil
}

func (slowDisk) Do(context.Context, clientv3.Op) (clientv3.OpResponse, error) {
	time.Sleep(slowDiskTime)
	return clientv3.OpResponse{}, nil
}

func (slowDisk) Txn(context.Context) clientv3.Txn { return slowTxn{} }

type slowTxn struct{}

func (t slowTxn) If(...clientv3.Cmp) clientv3.Txn  { return t }
func (t slowTxn) Then(...clientv3.Op) clientv3.Txn { return t }
func (t slowTxn) Else(...clientv3.Op) clientv3.Txn { return t }
func (slowTxn) Commit() (*clientv3.TxnResponse, error) {
	time.Sleep(slowDiskTime)
	return nil, nil
}

// A tenant on a slow disk does not rest for it while others are active, whichever way
// its requests go to etcd; one that takes as long itself does.
func TestSlowDiskIsNotOwed(t *testing.T) {
	kv := waitingKV{slowDisk{}}
	for name, one := range map[string]struct {
		ask  func(context.Context)
		rest bool
	}{
		"put":         {func(ctx context.Context) { _, _ = kv.Put(ctx, "", "") }, false},
		"get":         {func(ctx context.Context) { _, _ = kv.Get(ctx, "") }, false},
		"delete":      {func(ctx context.Context) { _, _ = kv.Delete(ctx, "") }, false},
		"do":          {func(ctx context.Context) { _, _ = kv.Do(ctx, clientv3.Op{}) }, false},
		"transaction": {func(ctx context.Context) { _, _ = kv.Txn(ctx).If().Then().Else().Commit() }, false},
		"itself":      {func(context.Context) { time.Sleep(slowDiskTime) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gate := limit.NewGate(1)
				serve := func(ask func(context.Context)) http.Handler {
					return limit.New("acme", limit.Config{}, gate).Handler(
						http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { ask(req.Context()) }),
						func(h http.Handler) http.Handler { return h },
						&request.RequestInfoFactory{},
						func(*http.Request, *request.RequestInfo) bool { return false })
				}
				neighbour, slow := serve(func(context.Context) {}), serve(one.ask)
				began := time.Now()
				const requests = 100
				for range requests {
					for _, h := range []http.Handler{neighbour, slow} {
						r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/api", nil)
						r.Header.Set("Authorization", "Bearer any")
						h.ServeHTTP(httptest.NewRecorder(), r)
					}
				}
				if rested := time.Since(began) > requests*slowDiskTime; rested != one.rest {
					t.Errorf("%d requests of %s took %s", requests, slowDiskTime, time.Since(began))
				}
			})
		})
	}
}

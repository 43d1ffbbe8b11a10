// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"k8s.io/apiserver/pkg/storage/value"
)

// Secrets under ever new names take no more memory than a few.
func TestSecretsTransformerForgets(t *testing.T) {
	key := make([]byte, 32)
	transformer, err := newSecretsTransformer(key)
	if err != nil {
		t.Fatal(err)
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	var writers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			for i := range 10 * forgetAfter {
				name := value.DefaultContext(fmt.Sprintf("/registry/secrets/default/%d-%d", w, i))
				sealed, err := transformer.TransformToStorage(context.Background(), []byte("plain"), name)
				if err != nil {
					t.Error(err)
					return
				}
				got, stale, err := transformer.TransformFromStorage(context.Background(), sealed, name)
				if err != nil || stale || !bytes.Equal(got, []byte("plain")) {
					t.Errorf("%s is read as %q, %v, %v", name, got, stale, err)
					return
				}
			}
		})
	}
	writers.Wait()
	if grown := int64(heap()) - int64(before); grown > 8<<20 {
		t.Errorf("forty thousand names took %d bytes", grown)
	}
	runtime.KeepAlive(transformer)
	if _, err := newSecretsTransformer(key[:16]); err == nil {
		t.Error("a short key is taken")
	}
}

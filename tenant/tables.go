// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"reflect"
	"sync"

	"k8s.io/apiserver/pkg/registry/generic/registry"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/kubernetes/pkg/printers"
	printersinternal "k8s.io/kubernetes/pkg/printers/internalversion"
	printerstorage "k8s.io/kubernetes/pkg/printers/storage"
)

// tables makes the tables that kubectl get shows, of all kinds. Upstream makes one for
// each resource, each with the printers of all kinds: 40 kB, 66 times.
var tables = sync.OnceValue(func() printerstorage.TableConvertor {
	return printerstorage.TableConvertor{TableGenerator: printers.NewTableGenerator().With(printersinternal.AddHandlers)}
})

// shareTables has the resources of a group use tables. It leaves alone what is not as
// upstream's registries are made.
func shareTables(info *genericapiserver.APIGroupInfo) {
	for _, resources := range info.VersionedResourcesStorageMap {
		for _, storage := range resources {
			v := reflect.Indirect(reflect.ValueOf(storage))
			if v.Kind() != reflect.Struct {
				continue
			}
			field := v.FieldByName("Store")
			if !field.IsValid() || !field.CanInterface() {
				continue
			}
			store, ok := field.Interface().(*registry.Store)
			if !ok || store == nil {
				continue
			}
			if _, ok := store.TableConvertor.(printerstorage.TableConvertor); ok {
				store.TableConvertor = tables()
			}
		}
	}
}

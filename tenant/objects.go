// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// objectStorage is where the objects of the built-in API are in one control plane, for
// informers that are made before it is there.
type objectStorage struct {
	scheme *runtime.Scheme

	mu    sync.Mutex // guards what follows
	kinds map[schema.GroupVersionKind]listWatcher
	named map[schema.GroupVersionResource]schema.GroupVersionKind
}

// listWatcher is storage that informers can be made of.
type listWatcher interface {
	rest.Storage
	rest.Lister
	rest.Watcher
}

func newObjectStorage(scheme *runtime.Scheme) *objectStorage {
	return &objectStorage{
		scheme: scheme,
		kinds:  map[schema.GroupVersionKind]listWatcher{},
		named:  map[schema.GroupVersionResource]schema.GroupVersionKind{},
	}
}

// add adds what a group of the API has.
func (s *objectStorage) add(group string, info *genericapiserver.APIGroupInfo) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for version, resources := range info.VersionedResourcesStorageMap {
		for resource, storage := range resources {
			lw, ok := storage.(listWatcher)
			if !ok || strings.Contains(resource, "/") {
				continue
			}
			kinds, _, err := s.scheme.ObjectKinds(lw.New())
			if err != nil {
				return fmt.Errorf("find kind of %s: %w", resource, err)
			}
			gv := schema.GroupVersion{Group: group, Version: version}
			kind := gv.WithKind(kinds[0].Kind)
			s.kinds[kind] = lw
			s.named[gv.WithResource(resource)] = kind
		}
	}
	return nil
}

// of is where objects of the type of example are, which may be added later.
func (s *objectStorage) of(example runtime.Object) source {
	return &storedObjects{storage: s, example: example}
}

// forResource makes a generic informer of f, as client-go's own factories do.
func (s *objectStorage) forResource(f informers.SharedInformerFactory, r schema.GroupVersionResource) (informers.GenericInformer, error) {
	// What it knows, without asking for it.
	if _, err := informers.NewSharedInformerFactory(nil, 0).ForResource(r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	kind, ok := s.named[r]
	s.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("no informer found for %v: it is not served", r)
	}
	example, err := s.scheme.New(kind)
	if err != nil {
		return nil, fmt.Errorf("make informer of %v: %w", r, err)
	}
	return genericInformer{r.GroupResource(), f.InformerFor(example, func(kubernetes.Interface, time.Duration) cache.SharedIndexInformer {
		return cache.NewSharedIndexInformer(nil, example, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	})}, nil
}

// genericInformer implements informers.GenericInformer.
type genericInformer struct {
	resource schema.GroupResource
	informer cache.SharedIndexInformer
}

func (g genericInformer) Informer() cache.SharedIndexInformer { return g.informer }
func (g genericInformer) Lister() cache.GenericLister {
	return cache.NewGenericLister(g.informer.GetIndexer(), g.resource)
}

// storedObjects is a source that reads from the storage of the API server, which has a
// watch cache before etcd.
type storedObjects struct {
	storage *objectStorage
	example runtime.Object
}

func (o *storedObjects) find() (listWatcher, schema.GroupVersionKind, error) {
	kinds, _, err := o.storage.scheme.ObjectKinds(o.example)
	if err != nil {
		return nil, schema.GroupVersionKind{}, fmt.Errorf("find storage of %T: %w", o.example, err)
	}
	o.storage.mu.Lock()
	defer o.storage.mu.Unlock()
	for _, kind := range kinds {
		if lw, ok := o.storage.kinds[kind]; ok {
			return lw, kind, nil
		}
	}
	return nil, schema.GroupVersionKind{}, fmt.Errorf("there is no storage of %v", kinds)
}

func (o *storedObjects) list(ctx context.Context, revision string) ([]runtime.Object, string, error) {
	lw, _, err := o.find()
	if err != nil {
		return nil, "", err
	}
	list, err := lw.List(mayIdle(ctx), &metainternalversion.ListOptions{ResourceVersion: revision})
	if err != nil {
		return nil, "", err
	}
	accessor, err := meta.ListAccessor(list)
	if err != nil {
		return nil, "", fmt.Errorf("read list: %w", err)
	}
	objects := make([]runtime.Object, 0, meta.LenList(list))
	err = meta.EachListItem(list, func(item runtime.Object) error {
		// A list's items share what they point to with the watch cache.
		obj, err := o.own(item.DeepCopyObject())
		objects = append(objects, obj)
		return err
	})
	return objects, accessor.GetResourceVersion(), err
}

func (o *storedObjects) watch(ctx context.Context, revision string) (watch.Interface, error) {
	lw, _, err := o.find()
	if err != nil {
		return nil, err
	}
	return lw.Watch(mayIdle(ctx), &metainternalversion.ListOptions{ResourceVersion: revision, AllowWatchBookmarks: true})
}

// own converts an object that nobody else has, or that gives away copies, to the
// version of the example, without the kind, as clients' objects are.
func (o *storedObjects) own(obj runtime.Object) (runtime.Object, error) {
	if shared, ok := obj.(runtime.CacheableObject); ok {
		obj = shared.GetObject()
	}
	_, kind, err := o.find()
	if err != nil {
		return nil, err
	}
	own, err := o.storage.scheme.UnsafeConvertToVersion(obj, kind.GroupVersion())
	if err != nil {
		return nil, fmt.Errorf("convert %T to %v: %w", obj, kind.GroupVersion(), err)
	}
	own.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	return own, nil
}

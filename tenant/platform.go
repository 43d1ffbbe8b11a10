// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	extensionsscheme "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/scheme"
	"k8s.io/apiserver/pkg/cel/openapi/resolver"
	apiopenapi "k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	apistorage "k8s.io/apiserver/pkg/storage"
	etcdfeature "k8s.io/apiserver/pkg/storage/feature"
	"k8s.io/apiserver/pkg/util/openapi"
	"k8s.io/client-go/kubernetes/scheme"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	openapicommon "k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/common/restfuladapter"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	generatedopenapi "k8s.io/kubernetes/pkg/generated/openapi"

	"github.com/tenantd/tenantd/tenant/limit"
)

// PlatformConfig configures a Platform.
type PlatformConfig struct {
	// Storage keeps what the control planes write. Required.
	Storage Storage
	// ConcurrentStarts is how many control planes start at the same time, until they
	// are ready or for some seconds; others wait their turn. Starting is bound by
	// processor and allocates some 60 MB for a moment, so more at once means more
	// memory, and that the first are ready as late as the last. Zero means one more
	// than there are processors.
	ConcurrentStarts int
	// Logger is handed to upstream's components. Nil discards.
	Logger *slog.Logger
}

// Platform is what the control planes of one process share: connections to
// etcd, the processors, the API's definitions and their documents. It is safe for
// concurrent use.
type Platform struct {
	storage Storage
	log     *slog.Logger
	starts  turns
	gate    *limit.Gate

	namer       *apiopenapi.DefinitionNamer
	definitions map[string]func() map[string]openapicommon.OpenAPIDefinition

	// schemas resolves the built-in types for controllers.
	schemas func() *resolver.DefinitionsSchemaResolver

	docsOnce sync.Once
	docsV2   *handler.OpenAPIService
	docsV3   *handler3.OpenAPIService

	routesOnce sync.Once
	routes     routeTable

	forgotten atomic.Int64 // when forgetMetrics last did, in Unix seconds
}

// metricsKept is for how long upstream's metrics are kept.
const metricsKept = 10 * time.Minute

// forgetMetrics empties upstream's metrics with labels now and then. It is one for the
// process, so nobody is shown it; but it counts by the names of webhooks, policies and
// CRDs that tenants choose, and keeps all there ever were. Control planes call it
// while they run.
func (p *Platform) forgetMetrics() {
	now, last := time.Now().Unix(), p.forgotten.Load()
	if now-last >= int64(metricsKept.Seconds()) && p.forgotten.CompareAndSwap(last, now) {
		if all, ok := upstreamVectors(); ok {
			all.reset()
		}
	}
}

// HoldStarts keeps control planes from starting until it is released, but for those
// that are at it. Meanwhile they can be told to hurry, so that the first to start are
// those that somebody waits for. The returned function may be called more than once.
func (p *Platform) HoldStarts() (release func()) { return p.starts.hold() }

// NewPlatform prepares the process (see PrepareProcess) and what its control
// planes share.
func NewPlatform(cfg PlatformConfig) (*Platform, error) {
	if cfg.Storage == nil {
		return nil, errors.New("create platform: no storage given")
	}
	if cfg.ConcurrentStarts <= 0 {
		cfg.ConcurrentStarts = runtime.NumCPU() + 1 // a start waits now and then
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if err := PrepareProcess(cfg.Logger); err != nil {
		return nil, fmt.Errorf("create platform: %w", err)
	}
	p := &Platform{
		storage: cfg.Storage,
		log:     cfg.Logger,
		starts:  turns{free: cfg.ConcurrentStarts},
		gate:    limit.NewGate(0),
		namer:   apiopenapi.NewDefinitionNamer(legacyscheme.Scheme, apiextensionsapiserver.Scheme, aggregatorscheme.Scheme),
	}
	get := openapi.GetOpenAPIDefinitionsWithoutDisabledFeatures(generatedopenapi.GetOpenAPIDefinitions)
	p.definitions = map[string]func() map[string]openapicommon.OpenAPIDefinition{}
	for _, root := range []string{"#/definitions/", "#/components/schemas/"} {
		p.definitions[root] = sync.OnceValue(func() map[string]openapicommon.OpenAPIDefinition {
			return get(func(name string) spec.Ref {
				unique, _ := p.namer.GetDefinitionName(name)
				return spec.MustCreateRef(root + openapicommon.EscapeJsonPointer(unique))
			})
		})
	}

	p.schemas = sync.OnceValue(func() *resolver.DefinitionsSchemaResolver {
		return resolver.NewDefinitionsSchemaResolver(generatedopenapi.GetOpenAPIDefinitions, scheme.Scheme, extensionsscheme.Scheme)
	})

	// Whether etcd can tell the progress of a watch is asked of the first client
	// that upstream sees, with that client's context, and remembered for the
	// process. Ask with one that lives as long as the process does.
	conn := cfg.Storage.Conn()
	etcdfeature.DefaultFeatureSupportChecker.CheckClient(context.WithoutCancel(conn.Ctx()), conn, apistorage.RequestWatchProgress)
	return p, nil
}

// getDefinitions implements openapicommon.GetOpenAPIDefinitions. The
// definitions, 12 MB of them, exist once per process; only the top-level
// extension maps, which the builders write to, are the caller's own.
func (p *Platform) getDefinitions(ref openapicommon.ReferenceCallback) map[string]openapicommon.OpenAPIDefinition {
	// Which of the two kinds of reference the caller wants shows in what it makes
	// of a name.
	const probe = "k8s.io/api/core/v1.Pod"
	unique, _ := p.namer.GetDefinitionName(probe)
	made := ref(probe)
	want := made.String()
	for root, shared := range p.definitions {
		if want != root+openapicommon.EscapeJsonPointer(unique) {
			continue
		}
		all := shared()
		own := make(map[string]openapicommon.OpenAPIDefinition, len(all))
		for name, definition := range all {
			if ext := definition.Schema.Extensions; ext != nil {
				clone := make(spec.Extensions, len(ext)+1)
				for k, v := range ext {
					clone[k] = v
				}
				definition.Schema.Extensions = clone
			}
			own[name] = definition
		}
		return own
	}
	// A caller with references of its own gets definitions of its own.
	return openapi.GetOpenAPIDefinitionsWithoutDisabledFeatures(generatedopenapi.GetOpenAPIDefinitions)(ref)
}

func (p *Platform) openAPIConfig() *openapicommon.Config {
	c := genericapiserver.DefaultOpenAPIConfig(p.getDefinitions, p.namer)
	c.Info.Title = "Kubernetes"
	c.GetOperationIDAndTagsFromRoute = operationOf
	return c
}

func (p *Platform) openAPIV3Config() *openapicommon.OpenAPIV3Config {
	c := genericapiserver.DefaultOpenAPIV3Config(p.getDefinitions, p.namer)
	c.Info.Title = "Kubernetes"
	c.GetOperationIDAndTagsFromRoute = operationOf
	// Computed on each use instead of kept for each control plane.
	c.Definitions = nil
	return c
}

// operationOf is what the builders of documents would set themselves, with a
// closure that keeps the last builder and its definitions, a megabyte of them.
func operationOf(r openapicommon.Route) (id string, tags []string, err error) {
	adapter, ok := r.(*restfuladapter.RouteAdapter)
	if !ok {
		return "", nil, fmt.Errorf("name operation of a route: %T is not one of go-restful's", r)
	}
	return apiopenapi.GetOperationIDAndTags(adapter.Route)
}

// installDocuments serves the OpenAPI documents of the built-in API on s. They
// are the same in every control plane, so the first one's routes make them and
// all others serve the same bytes.
func (p *Platform) installDocuments(s *genericapiserver.GenericAPIServer, v2 *openapicommon.Config, v3 *openapicommon.OpenAPIV3Config) error {
	p.docsOnce.Do(func() {
		build := mux.NewPathRecorderMux("openapi")
		p.docsV2, _ = routes.OpenAPI{Config: v2}.InstallV2(s.Handler.GoRestfulContainer, build)
		p.docsV3 = routes.OpenAPI{V3Config: v3}.InstallV3(s.Handler.GoRestfulContainer, build)
	})
	p.docsV2.RegisterOpenAPIVersionedService("/openapi/v2", s.Handler.NonGoRestfulMux)
	if err := p.docsV3.RegisterOpenAPIV3VersionedService("/openapi/v3", s.Handler.NonGoRestfulMux); err != nil {
		return fmt.Errorf("serve OpenAPI v3 documents: %w", err)
	}
	return nil
}

// shareRoutes replaces the routes of s, which has all of the built-in API's, by ones
// that all control planes share.
func (p *Platform) shareRoutes(s *genericapiserver.GenericAPIServer) {
	p.routesOnce.Do(func() { p.routes = newRouteTable(s.Handler.GoRestfulContainer.RegisteredWebServices()) })
	p.routes.install(s.Handler.GoRestfulContainer)
}

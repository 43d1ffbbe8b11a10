// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/proxy"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/egressselector"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	proxyutil "k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/client-go/transport"
	apiregistration "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/kube-aggregator/pkg/apis/apiregistration/v1/helper"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"
	openapicontroller "k8s.io/kube-aggregator/pkg/controllers/openapi"
	openapiaggregator "k8s.io/kube-aggregator/pkg/controllers/openapi/aggregator"
	openapiv3controller "k8s.io/kube-aggregator/pkg/controllers/openapiv3"
	openapiv3aggregator "k8s.io/kube-aggregator/pkg/controllers/openapiv3/aggregator"
	availabilitymetrics "k8s.io/kube-aggregator/pkg/controllers/status/metrics"
	remoteavailability "k8s.io/kube-aggregator/pkg/controllers/status/remote"
	openapicommon "k8s.io/kube-openapi/pkg/common"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/tenantd/tenantd/tenant/limit"
)

// What one control plane keeps of the documents of aggregated APIs: discovery, OpenAPI
// v2 and v3. An element is a member of an object or an array in JSON; the smallest has
// three bytes and becomes up to a kilobyte in memory.
const (
	// maxDocument is the most that is read of one.
	maxDocument = 4 << 20
	// maxDocumentElements is the most that one may have. That of the built-in API has
	// 90,000.
	maxDocumentElements = 100_000
	// maxDocumentDepth is how deep one may be nested. The built-in API's is 20.
	maxDocumentDepth = 200
	// maxAllElements is what all of a control plane may have together.
	maxAllElements = 200_000
	// maxRemote is of how many APIServices with a server of their own documents are
	// asked for. The rest is served without.
	maxRemote = 64
	// readers is how many documents are read at the same time.
	readers = 2
)

// What the control plane's own components are given of an aggregated API in one
// answer that is no watch: the garbage collector, quotas, namespaces that end and the
// autoscaler list whatever there is.
const (
	maxOwnAnswer   = 16 << 20
	maxOwnElements = 500_000
)

// aggregation is the part of upstream's aggregator that speaks to servers which a
// tenant names. Upstream's own reads what they tell of themselves into memory, as much
// as comes. Its handlers are left in place, as it serves the rest by them, but they
// connect to nothing (see refuseEgress); clients' requests are answered here before
// they get there.
//
// Routes, groups, local APIs and their availability stay upstream's.
type aggregation struct {
	dial     *transport.DialHolder
	cert     func() (cert, key []byte) // shown to aggregated servers; may be nil
	resolver aggregatorapiserver.ServiceResolver

	// Set before the server runs.
	discovery aggregatorapiserver.DiscoveryAggregationController
	v2        *openapicontroller.AggregationController
	v3        *openapiv3controller.AggregationController

	// reading has a place for each document that is being read.
	reading chan struct{}

	mu       sync.RWMutex
	remote   map[string]*remoteAPI // by the APIService's name
	paths    map[string]*remoteAPI // by the path below which they are
	elements int                   // of all documents
}

func newAggregation(dial utilnet.DialFunc, cert func() (cert, key []byte), resolver aggregatorapiserver.ServiceResolver) *aggregation {
	return &aggregation{
		dial:     &transport.DialHolder{Dial: dial},
		cert:     cert,
		resolver: resolver,
		reading:  make(chan struct{}, readers),
		remote:   map[string]*remoteAPI{},
		paths:    map[string]*remoteAPI{},
	}
}

var errNotUpstream = errors.New("aggregated APIs are not reached by this handler")

// configure takes from upstream's aggregator what a does itself.
func (a *aggregation) configure(c *aggregatorapiserver.Config) {
	refuse := func(context.Context, string, string) (net.Conn, error) { return nil, errNotUpstream }
	generic := &c.GenericConfig.Config
	generic.EgressSelector = egressselector.NewEgressSelectorWithMap(map[egressselector.EgressType]utilnet.DialFunc{
		egressselector.Cluster: refuse, egressselector.ControlPlane: refuse,
	})
	c.ExtraConfig.DisableRemoteAvailableConditionController = true
	generic.AggregatedDiscoveryGroupManager = withoutRemote{generic.AggregatedDiscoveryGroupManager}
	next := generic.BuildHandlerChainFunc
	generic.BuildHandlerChainFunc = func(h http.Handler, c *genericapiserver.Config) http.Handler {
		return next(a.wrap(boundNesting(h)), c)
	}
}

// withoutRemote takes nothing from upstream's manager of remote discovery, which finds
// out nothing.
type withoutRemote struct{ aggregated.ResourceManager }

// WithSource implements aggregated.ResourceManager.
func (m withoutRemote) WithSource(s aggregated.Source) aggregated.ResourceManager {
	if s == aggregated.AggregatorSource {
		return aggregated.NewResourceManager("unused")
	}
	return m.ResourceManager.WithSource(s)
}

// install adds what a does to upstream's aggregator, and prepares that to run. It does
// what upstream's PrepareRun does, with other readers of documents.
func (a *aggregation) install(front *aggregatorapiserver.APIAggregator, c *aggregatorapiserver.Config) (run func(context.Context) error, err error) {
	server := front.GenericAPIServer
	services := front.APIRegistrationInformers.Apiregistration().V1().APIServices()
	client, err := clientset.NewForConfig(c.GenericConfig.LoopbackClientConfig)
	if err != nil {
		return nil, fmt.Errorf("make client of APIServices: %w", err)
	}
	core := c.GenericConfig.SharedInformerFactory
	availability, err := remoteavailability.New(services, core.Core().V1().Services(), core.Discovery().V1().EndpointSlices(),
		client.ApiregistrationV1(), a.dial, a.cert, a.resolver, availabilitymetrics.New())
	if err != nil {
		return nil, fmt.Errorf("make controller of APIServices' availability: %w", err)
	}
	a.discovery = aggregatorapiserver.NewDiscoveryManager(c.GenericConfig.AggregatedDiscoveryGroupManager.(withoutRemote).ResourceManager.WithSource(aggregated.AggregatorSource))
	registration := aggregatorapiserver.NewAPIServiceRegistrationController(services, a)
	registered := make(chan struct{})
	hook := func(name string, f func(done <-chan struct{})) {
		if err == nil {
			err = server.AddPostStartHook(name, func(ctx genericapiserver.PostStartHookContext) error {
				f(ctx.Done())
				return nil
			})
		}
	}
	// The names are upstream's where it has the same.
	hook("apiservice-status-remote-available-controller", func(done <-chan struct{}) { go availability.Run(5, done) })
	hook("remote-apiservice-registration-controller", func(done <-chan struct{}) {
		go registration.Run(done, registered)
		await(done, registered)
	})
	hook("remote-apiservice-discovery-controller", func(done <-chan struct{}) {
		await(done, registered)
		synced := make(chan struct{})
		go a.discovery.Run(done, synced)
		await(done, synced)
	})
	hook("apiservice-openapi-controller", func(done <-chan struct{}) { go a.v2.Run(done) })
	hook("apiservice-openapiv3-controller", func(done <-chan struct{}) { go a.v3.Run(done) })
	if err != nil {
		return nil, fmt.Errorf("register hooks: %w", err)
	}

	prepared := server.PrepareRun()
	// After that, as the servers behind register their documents in it.
	downloader := openapiaggregator.NewDownloader()
	v2, err := openapiaggregator.BuildAndRegisterAggregator(&downloader, server.NextDelegate(), server.Handler.GoRestfulContainer.RegisteredWebServices(),
		c.GenericConfig.OpenAPIConfig, server.Handler.NonGoRestfulMux)
	if err != nil {
		return nil, fmt.Errorf("serve OpenAPI v2: %w", err)
	}
	a.v2 = openapicontroller.NewAggregationController(&downloader, v2)
	local := &localDocuments{PathHandlerByGroupVersion: server.Handler.NonGoRestfulMux}
	local.SpecProxier, err = openapiv3aggregator.BuildAndRegisterAggregator(openapiv3aggregator.NewDownloader(), server.NextDelegate(), server.Handler.GoRestfulContainer,
		c.GenericConfig.OpenAPIV3Config, local)
	if err != nil {
		return nil, fmt.Errorf("serve OpenAPI v3: %w", err)
	}
	local.names = local.SpecProxier.GetAPIServiceNames()
	a.v3 = openapiv3controller.NewAggregationController(local)
	return prepared.RunWithContext, nil
}

func await(done, happened <-chan struct{}) {
	select {
	case <-done:
	case <-happened:
	}
}

// localAge is how old what is known of the servers behind the aggregator may be, as
// upstream has it.
const localAge = time.Second

// localDocuments has upstream's aggregator of OpenAPI v3 look at what the servers
// behind it serve when a client asks, instead of each second. It is both what the
// aggregator registers its handlers with and the aggregator as its controller sees it.
type localDocuments struct {
	openapicommon.PathHandlerByGroupVersion
	openapiv3aggregator.SpecProxier
	names []string // of the servers behind

	mu     sync.Mutex // guards what follows
	looked time.Time
}

// GetAPIServiceNames implements SpecProxier: what the controller is to look at from
// the beginning.
func (*localDocuments) GetAPIServiceNames() []string { return nil }

// Handle implements PathHandlerByGroupVersion.
func (l *localDocuments) Handle(path string, h http.Handler) {
	l.PathHandlerByGroupVersion.Handle(path, l.wrap(h))
}

// HandlePrefix implements PathHandlerByGroupVersion.
func (l *localDocuments) HandlePrefix(path string, h http.Handler) {
	l.PathHandlerByGroupVersion.HandlePrefix(path, l.wrap(h))
}

func (l *localDocuments) wrap(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		l.look(req.Context())
		h.ServeHTTP(w, req)
	})
}

func (l *localDocuments) look(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.looked) < localAge {
		return
	}
	for _, name := range l.names {
		if err := l.UpdateAPIServiceSpec(name); err != nil {
			utilruntime.HandleErrorWithContext(ctx, err, "Documents of a server cannot be read", "server", name)
		}
	}
	l.looked = time.Now()
}

// AddAPIService implements APIHandlerManager of upstream's registration controller,
// which calls it from one goroutine.
func (a *aggregation) AddAPIService(service *apiregistration.APIService) error {
	if service.Spec.Service == nil {
		a.RemoveAPIService(service.Name)
		return nil
	}
	a.mu.Lock()
	api, known := a.remote[service.Name]
	if !known {
		api = &remoteAPI{name: service.Name, aggregation: a}
		api.documented = len(a.remote) < maxRemote
		a.remote[service.Name] = api
		a.paths[apiPath(service.Name)] = api
	}
	a.mu.Unlock()
	api.target.Store(a.target(service))
	if !api.documented {
		return nil
	}
	documents := documents{api}
	if known {
		a.v2.UpdateAPIService(documents, service)
		a.v3.UpdateAPIService(documents, service)
	} else {
		a.v2.AddAPIService(documents, service)
		a.v3.AddAPIService(documents, service)
	}
	a.discovery.AddAPIService(service, documents)
	return nil
}

// RemoveAPIService implements APIHandlerManager.
func (a *aggregation) RemoveAPIService(name string) {
	a.mu.Lock()
	api := a.remote[name]
	if api != nil {
		delete(a.remote, name)
		delete(a.paths, apiPath(name))
		for _, n := range api.elements {
			a.elements -= n
		}
		api.elements = nil
		api.removed = true
	}
	a.mu.Unlock()
	if api == nil || !api.documented {
		return
	}
	a.discovery.RemoveAPIService(name)
	a.v2.RemoveAPIService(name)
	a.v3.RemoveAPIService(name)
}

// apiPath is the path below which an APIService's API is.
func apiPath(name string) string {
	if name == "v1." { // the API without a group
		return "/api"
	}
	gv := helper.APIServiceNameToGroupVersion(name)
	return "/apis/" + gv.Group + "/" + gv.Version
}

// wrap answers requests for the APIs of servers that tenants name, and leaves all
// others to next.
func (a *aggregation) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		path := req.URL.Path
		if !strings.HasPrefix(path, "/apis/") {
			path, _, _ = strings.Cut(path[min(1, len(path)):], "/")
			path = "/" + path
		} else if parts := strings.SplitN(path, "/", 5); len(parts) == 5 {
			path = path[:len(path)-len(parts[4])-1]
		}
		a.mu.RLock()
		api := a.paths[path]
		a.mu.RUnlock()
		if api == nil {
			next.ServeHTTP(w, req)
			return
		}
		api.ServeHTTP(w, req)
	})
}

// keep counts what a document has among all that are kept of an API, in place of what
// it had before.
func (a *aggregation) keep(api *remoteAPI, document string, elements int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if api.removed {
		return fmt.Errorf("APIService %s is gone", api.name)
	}
	all := a.elements - api.elements[document] + elements
	if elements > maxDocumentElements || all > maxAllElements {
		return fmt.Errorf("%s of APIService %s has %d elements, which makes %d of all such documents; the most that is kept is %d and %d: have its server publish less, or remove others",
			document, api.name, elements, all, maxDocumentElements, maxAllElements)
	}
	if api.elements == nil {
		api.elements = map[string]int{}
	}
	api.elements[document], a.elements = elements, all
	return nil
}

// remoteAPI is the API of an APIService that has a server of its own.
type remoteAPI struct {
	*aggregation
	name       string
	documented bool // constant
	target     atomic.Pointer[target]

	// Guarded by aggregation.mu.
	elements map[string]int // of its documents, by path
	removed  bool
}

// ownEndpoints gives each caller a URL of its own. Upstream gives all the same for the API
// server itself, and the controller that asks whether APIs answer writes a path into it, for
// five requests at once: a tenant could have it read while it is written.
type ownEndpoints struct {
	aggregatorapiserver.ServiceResolver
}

func (e ownEndpoints) ResolveEndpoint(namespace, name string, port int32) (*url.URL, error) {
	shared, err := e.ServiceResolver.ResolveEndpoint(namespace, name, port)
	if err != nil {
		return nil, err
	}
	own := *shared
	return &own, nil
}

// target is how an API's server is reached.
type target struct {
	service      apiregistration.ServiceReference
	available    bool
	transport    http.RoundTripper
	transportErr error
}

func (a *aggregation) target(service *apiregistration.APIService) *target {
	t := &target{
		service:   *service.Spec.Service,
		available: helper.IsAPIServiceConditionTrue(service, apiregistration.Available),
	}
	var cert, key []byte
	if a.cert != nil {
		cert, key = a.cert()
	}
	config := remoteavailability.BuildTransportConfig(a.dial, cert, key, service)
	config.DisableCompression = true // or a client's bytes here cost it nothing there
	t.transport, t.transportErr = transport.New(config)
	return t
}

// request makes of a client's request one to the API's server.
func (t *target) request(resolver aggregatorapiserver.ServiceResolver, req *http.Request) (*http.Request, context.CancelFunc, error) {
	if t.transportErr != nil {
		return nil, nil, t.transportErr
	}
	port := int32(443)
	if t.service.Port != nil {
		port = *t.service.Port
	}
	server, err := resolver.ResolveEndpoint(t.service.Namespace, t.service.Name, port)
	if err != nil {
		return nil, nil, err
	}
	to, cancel := proxyutil.NewRequestForProxy(&url.URL{
		Scheme: "https", Host: server.Host, Path: req.URL.Path, RawQuery: req.URL.Query().Encode(),
	}, req)
	return to, cancel, nil
}

// ServeHTTP passes a request on to the API's server, in the name of who asks.
func (api *remoteAPI) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	ctx := req.Context()
	t := api.target.Load()
	user, known := genericapirequest.UserFrom(ctx)
	switch {
	case !t.available:
		http.Error(w, "service unavailable", http.StatusServiceUnavailable)
		return
	case !known:
		http.Error(w, "missing user", http.StatusInternalServerError)
		return
	}
	to, cancel, err := t.request(api.resolver, req)
	if err != nil {
		http.Error(w, "service unavailable: "+err.Error(), http.StatusServiceUnavailable)
		return
	}
	defer cancel()
	rt := transport.NewAuthProxyRoundTripper(user.GetName(), user.GetUID(), user.GetGroups(), user.GetExtra(), t.transport)
	upgrade := httpstream.IsUpgradeRequest(req)
	if upgrade {
		// An upgrade dials by itself, past the transport.
		transport.SetAuthProxyHeaders(to, user.GetName(), user.GetUID(), user.GetGroups(), user.GetExtra())
	} else if info, ok := genericapirequest.RequestInfoFrom(ctx); limit.IsOwn(ctx) && ok && info.Verb != "watch" {
		to.Header.Set("Accept", onlyJSON(to.Header.Values("Accept")))
		rt = ownAnswers{rt}
	}
	defer limit.Outside(ctx)()
	utilflowcontrol.RequestDelegated(ctx)
	proxy.NewUpgradeAwareHandler(to.URL, boundedPages{rt}, true, upgrade, failure{}).ServeHTTP(w, to)
}

// failure answers with why a server could not be reached.
type failure struct{}

// Error implements proxy.ErrorResponder.
func (failure) Error(w http.ResponseWriter, _ *http.Request, err error) {
	http.Error(w, err.Error(), http.StatusServiceUnavailable)
}

// documents are what an API's server says of itself, for upstream's readers of
// discovery and OpenAPI, which read whatever this says.
type documents struct{ *remoteAPI }

// ServeHTTP implements http.Handler.
func (d documents) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if strings.HasPrefix(req.URL.Path, "/openapi/v3/") { // for a client
		d.remoteAPI.ServeHTTP(w, req)
		return
	}
	resp, body, err := d.read(req) //nolint:bodyclose // read does
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	for _, name := range []string{"Content-Type", "Etag"} {
		if v := resp.Header.Get(name); v != "" && len(v) <= maxHeaderValue {
			w.Header().Set(name, v)
		}
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = w.Write(body) // into memory
}

const (
	// maxHeaderValue is the most that is kept of a header; upstream keeps ETags.
	maxHeaderValue = 1 << 10
	// maxRefusal is the most that is read of an answer that is no document; upstream
	// logs it.
	maxRefusal = 1 << 10
)

// read gets a document of an API's server, if it is one that can be kept.
func (d documents) read(req *http.Request) (*http.Response, []byte, error) {
	ctx := req.Context()
	select {
	case d.reading <- struct{}{}:
		defer func() { <-d.reading }()
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	user, ok := genericapirequest.UserFrom(ctx)
	if !ok {
		return nil, nil, errors.New("missing user")
	}
	t := d.target.Load()
	to, cancel, err := t.request(d.resolver, req)
	if err != nil {
		return nil, nil, err
	}
	defer cancel()
	rt := transport.NewAuthProxyRoundTripper(user.GetName(), user.GetUID(), user.GetGroups(), user.GetExtra(), t.transport)
	resp, err := rt.RoundTrip(to)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxRefusal))
		return resp, body, err
	}
	if resp.Uncompressed || resp.Header.Get("Content-Encoding") != "" {
		return nil, nil, fmt.Errorf("%s of APIService %s is compressed, which was not asked for", req.URL.Path, d.name)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxDocument+1))
	if err != nil {
		return nil, nil, err
	}
	if len(body) > maxDocument {
		return nil, nil, fmt.Errorf("%s of APIService %s is larger than %d bytes, which is the most that is read", req.URL.Path, d.name, maxDocument)
	}
	// Upstream also takes YAML and protobuf, whose cost is another.
	if !json.Valid(body) {
		return nil, nil, fmt.Errorf("%s of APIService %s is not JSON", req.URL.Path, d.name)
	}
	elements, depth := weigh(body)
	if depth > maxDocumentDepth {
		return nil, nil, fmt.Errorf("%s of APIService %s is nested more than %d deep", req.URL.Path, d.name, maxDocumentDepth)
	}
	if err := checkParameters(body); err != nil {
		return nil, nil, fmt.Errorf("%s of APIService %s: %w", req.URL.Path, d.name, err)
	}
	return resp, body, d.keep(d.remoteAPI, req.URL.Path, elements)
}

// maxParameterElements is how large a parameter may be that operations of an OpenAPI
// document share. Upstream goes through it wherever it is referred to.
const maxParameterElements = 64

// checkParameters refuses an OpenAPI document whose shared parameters refer to
// anything but definitions. Upstream follows references between parameters without
// remembering where it was (kube-openapi's aggregator/walker.go): one that refers to
// itself overflows the stack, which ends the process. The document is JSON of bounded
// depth.
func checkParameters(document []byte) error {
	// By exact names, as upstream reads it: structs would match in any case.
	var all, parameters map[string]json.RawMessage
	if json.Unmarshal(document, &all) != nil || json.Unmarshal(all["parameters"], &parameters) != nil {
		return nil // there are none that could be followed
	}
	for name, raw := range parameters {
		if elements, _ := weigh(raw); elements > maxParameterElements {
			return fmt.Errorf("the parameter %.64q has more than %d elements", name, maxParameterElements)
		}
		var parameter any
		if err := json.Unmarshal(raw, &parameter); err != nil {
			return fmt.Errorf("the parameter %.64q: %w", name, err)
		}
		if refersElsewhere(parameter) {
			return fmt.Errorf("the parameter %.64q refers to something that is no definition", name)
		}
	}
	return nil
}

// refersElsewhere reports whether there is a reference in v to anything but a
// definition.
func refersElsewhere(v any) bool {
	switch v := v.(type) {
	case []any:
		return slices.ContainsFunc(v, refersElsewhere)
	case map[string]any:
		for key, value := range v {
			if key == "$ref" {
				to, ok := value.(string)
				if !ok || !strings.HasPrefix(to, "#/definitions/") || strings.Contains(to, "%") {
					return true
				}
			}
			if refersElsewhere(value) {
				return true
			}
		}
	}
	return false
}

// weigh estimates what JSON costs in memory: the elements in it, and how deep they are
// nested.
func weigh(body []byte) (elements, depth int) {
	open := 0
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '"':
			for i++; i < len(body) && body[i] != '"'; i++ {
				if body[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			elements++
			open++
			depth = max(depth, open)
		case '}', ']':
			open--
		case ',':
			elements++
		}
	}
	return elements, depth
}

// ownAnswers bounds what the control plane's own components get from servers that a
// tenant names. They ask for JSON alone: what an object in it costs can be counted.
type ownAnswers struct{ http.RoundTripper }

// WrappedRoundTripper implements net.RoundTripperWrapper of apimachinery.
func (o ownAnswers) WrappedRoundTripper() http.RoundTripper { return o.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (o ownAnswers) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := o.RoundTripper.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch tooLarge := (&answerTooLarge{req.URL.Host, maxOwnAnswer}); {
	case kind != "application/json" && kind != "text/plain" || resp.Header.Get("Content-Encoding") != "":
		err = fmt.Errorf("%s answers with %q, which was not asked for", req.URL.Host, kind)
	case resp.ContentLength > maxOwnAnswer:
		err = tooLarge
	default:
		body := &boundedBody{ReadCloser: resp.Body, ctx: req.Context(), left: maxOwnAnswer, tooLarge: tooLarge, back: func() {}}
		resp.Body = &countedBody{body, maxOwnElements}
		return resp, nil
	}
	resp.Body.Close()
	return nil, err
}

// countedBody fails when it has more elements than are left.
type countedBody struct {
	*boundedBody
	left int
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.boundedBody.Read(p)
	for _, c := range []string{",", "{", "["} {
		b.left -= bytes.Count(p[:n], []byte(c))
	}
	if b.left < 0 {
		return 0, fmt.Errorf("the answer of %s has more than %d elements, which is the most that is read", b.tooLarge.host, maxOwnElements)
	}
	return n, err
}

// onlyJSON takes all but JSON out of what a client accepts.
func onlyJSON(accept []string) string {
	var kept []string
	for _, clause := range strings.Split(strings.Join(accept, ","), ",") {
		if kind, _, err := mime.ParseMediaType(clause); err == nil && kind == "application/json" {
			kept = append(kept, strings.TrimSpace(clause))
		}
	}
	if len(kept) == 0 {
		return "application/json"
	}
	return strings.Join(kept, ",")
}

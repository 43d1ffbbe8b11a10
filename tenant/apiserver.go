// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/registry/generic"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/apiserver/pkg/server/egressselector"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/server/healthz"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/util/notfoundhandler"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/controlplane"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
	"k8s.io/kubernetes/pkg/controlplane/controller/defaultservicecidr"
	"k8s.io/kubernetes/pkg/controlplane/controller/kubernetesservice"
	"k8s.io/kubernetes/pkg/controlplane/reconcilers"
	"k8s.io/kubernetes/pkg/kubeapiserver"
	"k8s.io/kubernetes/pkg/probe"
	"k8s.io/kubernetes/pkg/registry/core/componentstatus"
	"k8s.io/kubernetes/pkg/serviceaccount"

	"github.com/tenantd/tenantd/pki"
)

// shutdownWatchGrace is how long a stopping API server takes to end its
// watches: long enough to do so politely, short enough for a quick restart.
const shutdownWatchGrace = 2 * time.Second

// apiServer is an API server that has been put together and not yet run.
type apiServer struct {
	building sync.Mutex // held while a late controller is built

	run       func(ctx context.Context) error
	loopback  *rest.Config
	client    kubernetes.Interface
	work      *rest.Config         // loopback, for controllers and scheduler
	worker    kubernetes.Interface // client, for those
	informers *informerSet
	store     *backend
	listener  *listener
	tunnel    *tunnel
	close     func()
}

// newAPIServer puts together upstream's API server: the aggregator in front,
// then the built-in API, then the API of CRDs. ctx ends the storage's watches
// and must outlive the server.
func (cp *ControlPlane) newAPIServer(ctx context.Context, public net.Listener) (_ *apiServer, err error) {
	ln := newListener(public)
	s := &apiServer{listener: ln, close: func() { ln.Close() }}
	defer func() {
		if err != nil {
			s.close()
		}
	}()

	if s.tunnel, err = cp.newTunnel(); err != nil {
		return nil, err
	}
	s.close = func() {
		ln.Close()
		s.tunnel.close()
	}
	opts, err := cp.options(ctx)
	if err != nil {
		return nil, err
	}
	loopback, closeIdle, err := ln.clientConfig(cp.cfg.Authority.CA())
	if err != nil {
		return nil, err
	}
	s.close = func() {
		ln.Close()
		closeIdle()
		s.tunnel.close()
	}
	generic, versionedInformers, err := cp.genericConfig(ctx, opts, ln, loopback, s.tunnel)
	if err != nil {
		return nil, err
	}
	s.informers = versionedInformers
	s.loopback = loopback

	factoryConfig := kubeapiserver.NewStorageFactoryConfigEffectiveVersion(generic.EffectiveVersion)
	factoryConfig.APIResourceConfig = generic.MergedResourceConfig
	factoryConfig.DefaultResourceEncoding.SetEffectiveVersion(generic.EffectiveVersion)
	storageFactory, err := factoryConfig.Complete(opts.Etcd).New()
	if err != nil {
		return nil, fmt.Errorf("make storage factory: %w", err)
	}
	store := &backend{ctx: ctx, storage: cp.cfg.Platform.storage, uid: cp.cfg.UID}
	store.counts.storage, store.counts.uid = store.storage, store.uid
	s.store = store
	generic.StorageObjectCountTracker = &store.counts
	storageFactory.StorageConfig.StorageObjectCountTracker = &store.counts
	secrets, err := newSecretsTransformer(cp.cfg.Authority.SecretsKey())
	if err != nil {
		return nil, err
	}
	generic.RESTOptionsGetter = store.wrap(secretsOptions{
		&genericoptions.StorageFactoryRestOptionsFactory{Options: *opts.Etcd, StorageFactory: storageFactory}, secrets,
	})

	kube, resolver, initializers, err := app.CreateKubeAPIServerConfig(opts, generic, versionedInformers, storageFactory)
	if err != nil {
		return nil, fmt.Errorf("configure API server: %w", err)
	}
	resolver = ownEndpoints{resolver}
	generic.AdmissionControl = noCostly{namelessEvents{generic.AdmissionControl}}
	if cp.cfg.Admission != nil {
		generic.AdmissionControl = cp.cfg.Admission(generic.AdmissionControl)
	}
	webhooks := webhook.NewDefaultAuthenticationInfoResolverWrapper(kube.ControlPlane.ProxyTransport, generic.EgressSelector, loopback, generic.TracerProvider)
	extensions, err := controlplaneapiserver.CreateAPIExtensionsConfig(*generic, versionedInformers, initializers, opts.CompletedOptions, opts.MasterCount, resolver,
		func(r webhook.AuthenticationInfoResolver) webhook.AuthenticationInfoResolver {
			return boundWebhooks(webhooks(r), maxConversion)
		})
	if err != nil {
		return nil, fmt.Errorf("configure API of CRDs: %w", err)
	}
	extensions.GenericConfig.AdmissionControl = shallowSchemas{extensions.GenericConfig.AdmissionControl}
	extensions.GenericConfig.RESTOptionsGetter = store.wrap(extensions.GenericConfig.RESTOptionsGetter)
	extensions.ExtraConfig.CRDRESTOptionsGetter = store.wrap(extensions.ExtraConfig.CRDRESTOptionsGetter)
	aggregator, err := controlplaneapiserver.CreateAggregatorConfig(*generic, opts.CompletedOptions, versionedInformers, resolver, kube.ControlPlane.ProxyTransport, nil, initializers)
	if err != nil {
		return nil, fmt.Errorf("configure aggregator: %w", err)
	}
	aggregator.GenericConfig.RESTOptionsGetter = store.wrap(aggregator.GenericConfig.RESTOptionsGetter)
	var frontProxy func() (cert, key []byte)
	if !cp.cfg.APIOnly {
		leaf, err := cp.cfg.Authority.Leaf(ctx, frontProxyClient())
		if err != nil {
			return nil, fmt.Errorf("issue certificate for aggregated API servers: %w", err)
		}
		frontProxy = leaf.PEM
	}
	aggregation := newAggregation(s.tunnel.dial, frontProxy, resolver)
	aggregation.configure(aggregator)
	// The built-in API's documents are the same in every control plane.
	generic.SkipOpenAPIInstallation = true

	notFound := notfoundhandler.New(generic.Serializer, genericapifilters.NoMuxAndDiscoveryIncompleteKey)
	extensionsServer, err := extensions.Complete().New(genericapiserver.NewEmptyDelegateWithCustomHandler(notFound))
	if err != nil {
		return nil, fmt.Errorf("create API of CRDs: %w", err)
	}
	kubeServer, client, err := cp.newKubeServer(kube, extensionsServer.GenericAPIServer, versionedInformers.storage)
	if err != nil {
		return nil, err
	}
	s.client, s.tunnel.client = client, client
	if s.work, s.worker, err = cp.workers(loopback, client); err != nil {
		return nil, err
	}
	if err := cp.cfg.Platform.installDocuments(kubeServer, generic.OpenAPIConfig, generic.OpenAPIV3Config); err != nil {
		return nil, err
	}
	cp.cfg.Platform.shareRoutes(kubeServer)
	front, err := controlplaneapiserver.CreateAggregatorServer(aggregator.Complete(), kubeServer,
		extensionsServer.Informers.Apiextensions().V1().CustomResourceDefinitions(), true, apiPriorities())
	if err != nil {
		return nil, fmt.Errorf("create aggregator: %w", err)
	}
	for prefix, h := range cp.cfg.Handlers {
		front.GenericAPIServer.Handler.NonGoRestfulMux.HandlePrefix(prefix, h)
	}
	if s.run, err = aggregation.install(front, aggregator); err != nil {
		return nil, fmt.Errorf("prepare API server: %w", err)
	}
	for _, server := range []*genericapiserver.GenericAPIServer{front.GenericAPIServer, kubeServer, extensionsServer.GenericAPIServer} {
		forgetCallers(server.Handler.NonGoRestfulMux)
	}
	return s, nil
}

// frontProxyClient is the certificate by which aggregated API servers know who asks
// them in others' names.
func frontProxyClient() pki.Profile {
	return pki.Profile{Name: "front-proxy-client", Usage: pki.Client, CommonName: "front-proxy-client", FrontProxy: true}
}

// options are the settings that differ from kube-apiserver's defaults.
func (cp *ControlPlane) options(ctx context.Context) (options.CompletedOptions, error) {
	var none options.CompletedOptions
	cfg := &cp.cfg
	o := options.NewServerRunOptions()

	// The listener and its certificates are given in genericConfig.
	o.SecureServing.BindPort = 0
	o.SecureServing.ServerCert.CertDirectory = ""
	o.GenericServerRunOptions.ExternalHost = net.JoinHostPort(cfg.Hostname, strconv.Itoa(cfg.Port))
	o.GenericServerRunOptions.AdvertiseAddress = cfg.WorkerVIP
	o.GenericServerRunOptions.JSONPatchMaxCopyBytes = 0 // PrepareProcess sets it for all
	o.GenericServerRunOptions.ShutdownSendRetryAfter = true
	o.GenericServerRunOptions.ShutdownWatchTerminationGracePeriod = shutdownWatchGrace

	prefix, err := cfg.Platform.storage.Prefix(cfg.UID)
	if err != nil {
		return none, err
	}
	o.Etcd.StorageConfig.Transport.ServerList = []string{cfg.Platform.storage.Endpoint()}
	o.Etcd.StorageConfig.Prefix = prefix + "registry"
	// Compaction belongs to the host: upstream's compactor is shared by all who
	// use an endpoint and stops with the first of them.
	o.Etcd.StorageConfig.CompactionInterval = 0
	o.Etcd.StorageConfig.DBMetricPollInterval = 0
	// Counting objects serves the estimate of what a list costs: see objectCounts.
	o.Etcd.StorageConfig.CountMetricPollPeriod = 0
	o.Etcd.SkipHealthEndpoints = true

	// The tenant's administrators see neither the process nor its profiles.
	o.Features.EnableProfiling = false
	o.EndpointReconcilerType = string(reconcilers.NoneEndpointReconcilerType)
	o.ServiceClusterIPRanges = cfg.ServiceCIDR
	o.AllowPrivileged = true
	o.Authorization.Modes = []string{"Node", "RBAC"}
	o.Admission.GenericAdmission.EnablePlugins = []string{"NodeRestriction"}
	// First, while the plugins are still themselves.
	o.Admission.GenericAdmission.Decorators = slices.Insert(o.Admission.GenericAdmission.Decorators, 0, admission.Decorator(admission.DecoratorFunc(boundAdmission)))
	o.Authentication.BootstrapToken.Enable = true

	clientCA, err := dynamiccertificates.NewStaticCAContent("client-ca", cfg.Authority.CA())
	if err != nil {
		return none, fmt.Errorf("use client CA: %w", err)
	}
	o.Authentication.ClientCert.CAContentProvider = clientCA
	frontProxyCA, err := cp.memFile("front-proxy-ca", cfg.Authority.FrontProxyCA())
	if err != nil {
		return none, err
	}
	o.Authentication.RequestHeader.ClientCAFile = frontProxyCA
	o.Authentication.RequestHeader.AllowedNames = []string{"front-proxy-client"}
	o.Authentication.RequestHeader.UsernameHeaders = []string{"X-Remote-User"}
	o.Authentication.RequestHeader.GroupHeaders = []string{"X-Remote-Group"}
	o.Authentication.RequestHeader.ExtraHeaderPrefixes = []string{"X-Remote-Extra-"}

	// What the API server shows to kubelets, to aggregated API servers, and what it
	// wants to see of kubelets: their certificates are approved one by one (cluster).
	if !cfg.APIOnly {
		if o.ProxyClientCertFile, o.ProxyClientKeyFile, err = cp.leafFiles(ctx, frontProxyClient()); err != nil {
			return none, err
		}
		kubelet := &o.KubeletConfig.TLSClientConfig
		if kubelet.CertFile, kubelet.KeyFile, err = cp.leafFiles(ctx, pki.Profile{
			Name: "kube-apiserver-kubelet-client", Usage: pki.Client, CommonName: "kube-apiserver-kubelet-client", Organization: []string{"kubeadm:cluster-admins"},
		}); err != nil {
			return none, err
		}
		if kubelet.CAFile, err = cp.memFile("kubelet-ca", cfg.Authority.CA()); err != nil {
			return none, err
		}
		// Addresses first: the host need not know the cluster's names.
		o.KubeletConfig.PreferredAddressTypes = []string{string(corev1.NodeInternalIP), string(corev1.NodeExternalIP), string(corev1.NodeHostName)}
	}

	issuer := "https://kubernetes.default.svc." + cfg.DNSDomain
	key := cfg.Authority.ServiceAccountKey()
	o.Authentication.ServiceAccounts.Issuers = []string{issuer}
	o.Authentication.ServiceAccounts.ExternalPublicKeysGetter, err = serviceaccount.StaticPublicKeysGetter([]any{key.Public()})
	if err != nil {
		return none, fmt.Errorf("use service account key: %w", err)
	}
	o.ServiceAccountIssuer, err = serviceaccount.JWTTokenGenerator(issuer, key)
	if err != nil {
		return none, fmt.Errorf("use service account key: %w", err)
	}

	completed, err := o.Complete(ctx)
	if err != nil {
		return none, fmt.Errorf("complete API server options: %w", err)
	}
	return completed, nil
}

// genericConfig does what upstream's BuildGenericConfig does, with our listener,
// loopback client, egress and OpenAPI definitions in place of its own.
func (cp *ControlPlane) genericConfig(ctx context.Context, o options.CompletedOptions, ln net.Listener, loopback *rest.Config, tunnel *tunnel) (*genericapiserver.Config, *informerSet, error) {
	c := genericapiserver.NewConfig(legacyscheme.Codecs)
	c.MergedResourceConfig = controlplane.DefaultAPIResourceConfigSource()
	if err := o.GenericServerRunOptions.ApplyTo(c); err != nil {
		return nil, nil, fmt.Errorf("apply generic options: %w", err)
	}
	c.SecureServing = &genericapiserver.SecureServingInfo{
		Listener:      ln,
		Cert:          leafProvider{cp.serving},
		MinTLSVersion: tls.VersionTLS12,
		CipherSuites:  aeadCipherSuites(),
		// One connection carries all of the control plane's own watches.
		HTTP2MaxStreamsPerConnection: 1000,
	}
	c.LoopbackClientConfig = loopback
	c.EnableMetrics = false // the registry is the process's: it would show every tenant's
	c.BuildHandlerChainFunc = func(h http.Handler, c *genericapiserver.Config) http.Handler {
		return answerFirst(cp.requests.wrap(cp.limiter.Handler(h, func(api http.Handler) http.Handler {
			return genericapiserver.DefaultBuildHandlerChain(cp.activity.wrap(api), c)
		}, c.RequestInfoResolver, c.LongRunningFunc)), bodyRest)
	}

	client, err := kubernetes.NewForConfig(loopback)
	if err != nil {
		return nil, nil, fmt.Errorf("make loopback client: %w", err)
	}
	shared := newInformerSet(client, newObjectStorage(legacyscheme.Scheme), 10*time.Minute)
	if err := o.Features.ApplyTo(c, client, shared); err != nil {
		return nil, nil, fmt.Errorf("apply features: %w", err)
	}
	if err := o.APIEnablement.ApplyTo(c, c.MergedResourceConfig, legacyscheme.Scheme); err != nil {
		return nil, nil, fmt.Errorf("apply API enablement: %w", err)
	}
	// A missing entry would mean that the host itself dials, so there is one for
	// every direction but etcd, which is ours.
	c.EgressSelector = egressselector.NewEgressSelectorWithMap(map[egressselector.EgressType]utilnet.DialFunc{
		egressselector.Cluster:      tunnel.dial,
		egressselector.ControlPlane: tunnel.dial,
	})
	c.OpenAPIConfig = cp.cfg.Platform.openAPIConfig()
	c.OpenAPIV3Config = cp.cfg.Platform.openAPIV3Config()
	c.LongRunningFunc = genericfilters.BasicLongRunningRequestCheck(
		sets.NewString("watch", "proxy"),
		sets.NewString("attach", "exec", "proxy", "log", "portforward"),
	)
	c.AddHealthChecks(healthz.NamedCheck("etcd", cp.checkEtcd))

	drained := wait.ContextForChannel(c.DrainedNotify())
	err = o.Authentication.ApplyTo(drained, &c.Authentication, c.SecureServing, c.EgressSelector, c.OpenAPIConfig, c.OpenAPIV3Config, client, shared, c.APIServerID)
	if err != nil {
		return nil, nil, fmt.Errorf("apply authentication: %w", err)
	}
	c.Authentication.Authenticator = shortTokens{&rememberedCerts{Request: c.Authentication.Authenticator}}
	c.Authorization.Authorizer, c.RuleResolver, _, err = controlplaneapiserver.BuildAuthorizer(drained, o.CompletedOptions, c.EgressSelector, c.APIServerID, shared)
	if err != nil {
		return nil, nil, fmt.Errorf("build authorizer: %w", err)
	}
	if err := o.Audit.ApplyTo(c); err != nil {
		return nil, nil, fmt.Errorf("apply audit: %w", err)
	}
	if cp.audit != nil {
		c.AuditBackend, c.AuditPolicyRuleEvaluator = cp.audit, cp.audit.evaluator()
	}
	c.AggregatedDiscoveryGroupManager = aggregated.NewResourceManager("apis")
	return c, shared, nil
}

// newKubeServer makes the server of the built-in API. It does what upstream's
// controlplane.CompletedConfig.New does, but with post-start hooks that cannot
// end the process.
func (cp *ControlPlane) newKubeServer(config *controlplane.Config, next genericapiserver.DelegationTarget, objects *objectStorage) (*genericapiserver.GenericAPIServer, kubernetes.Interface, error) {
	config.Extra.EndpointReconcilerConfig.Reconciler = &noEndpoints{}
	c := config.Complete()
	server, err := c.ControlPlane.New(controlplaneapiserver.KubeAPIServer, next)
	if err != nil {
		return nil, nil, fmt.Errorf("create API server: %w", err)
	}
	client, err := kubernetes.NewForConfig(c.ControlPlane.Generic.LoopbackClientConfig)
	if err != nil {
		return nil, nil, fmt.Errorf("make loopback client: %w", err)
	}
	providers, err := c.StorageProviders(client)
	if err != nil {
		return nil, nil, fmt.Errorf("make API storage: %w", err)
	}
	for i, p := range providers {
		if hook, ok := p.(genericapiserver.PostStartHookProvider); ok {
			providers[i] = patientProvider{RESTStorageProvider: p, hook: hook, cp: cp}
		}
		if p.GroupName() == corev1.GroupName {
			providers[i] = coreProvider{providers[i].(patientProvider)}
		}
	}
	if err := installAPIs(server, providers, objects); err != nil {
		return nil, nil, fmt.Errorf("install API: %w", err)
	}

	services := kubernetesservice.New(kubernetesservice.Config{
		PublicIP:           c.ControlPlane.Generic.PublicAddress,
		EndpointReconciler: c.Extra.EndpointReconcilerConfig.Reconciler,
		EndpointInterval:   c.Extra.EndpointReconcilerConfig.Interval,
		ServiceIP:          c.Extra.APIServerServiceIP,
		ServicePort:        c.Extra.APIServerServicePort,
		PublicServicePort:  443,
	}, client, c.ControlPlane.Extra.VersionedInformers.Core().V1().Services())
	generic := server.GenericAPIServer
	err = errors.Join(
		generic.AddPostStartHook("bootstrap-controller", func(hook genericapiserver.PostStartHookContext) error {
			services.Start(hook.Done())
			return nil
		}),
		generic.AddPreShutdownHook("stop-kubernetes-service-controller", func() error {
			services.Stop()
			return nil
		}),
		generic.AddPostStartHook("start-kubernetes-service-cidr-controller", func(hook genericapiserver.PostStartHookContext) error {
			defaultservicecidr.NewController(c.Extra.ServiceIPRange, c.Extra.SecondaryServiceIPRange, client).Start(hook)
			return nil
		}),
	)
	if err != nil {
		return nil, nil, fmt.Errorf("register hooks: %w", err)
	}
	return generic, client, nil
}

// noEndpoints leaves the endpoints of the kubernetes Service alone: pods do not
// reach the API server at an address of the host.
type noEndpoints struct{ started atomic.Bool }

func (*noEndpoints) ReconcileEndpoints(string, net.IP, []corev1.EndpointPort, bool) error { return nil }
func (e *noEndpoints) RemoveEndpoints(name string, _ net.IP, _ []corev1.EndpointPort) error {
	if e.started.Swap(true) {
		return nil
	}
	return storage.NewKeyNotFoundError(name, 0) // what upstream takes for a clean start
}
func (*noEndpoints) StopReconciling()        {}
func (*noEndpoints) Destroy()                {}
func (*noEndpoints) ValidateIP(net.IP) error { return nil }

// patientProvider repeats its post-start hook until it succeeds or the server
// stops. Upstream ends the process instead, and a tenant can bring that about:
// it deletes a bootstrap role and forbids its return by an admission policy.
type patientProvider struct {
	controlplaneapiserver.RESTStorageProvider
	hook genericapiserver.PostStartHookProvider
	cp   *ControlPlane
}

// PostStartHook implements genericapiserver.PostStartHookProvider.
func (p patientProvider) PostStartHook() (string, genericapiserver.PostStartHookFunc, error) {
	name, hook, err := p.hook.PostStartHook()
	if err != nil {
		return name, nil, err
	}
	return name, func(ctx genericapiserver.PostStartHookContext) error {
		for delay := time.Second; ; delay = min(2*delay, time.Minute) {
			err := hook(ctx)
			if err == nil || ctx.Err() != nil {
				return nil
			}
			p.cp.log.Warn("API server's start is held up", "hook", name, "error", err, "retryIn", delay)
			if !sleep(ctx, delay) {
				return nil
			}
		}
	}, nil
}

// coreProvider answers componentstatuses from inside the process. Upstream asks
// the controllers' and the scheduler's ports on the machine it runs on, which
// here would be the host's, whatever listens there.
type coreProvider struct{ patientProvider }

// NewRESTStorage implements controlplaneapiserver.RESTStorageProvider.
func (p coreProvider) NewRESTStorage(source serverstorage.APIResourceConfigSource, options generic.RESTOptionsGetter) (genericapiserver.APIGroupInfo, error) {
	info, err := p.patientProvider.NewRESTStorage(source, options)
	if err != nil {
		return info, err
	}
	if err := boundProxies(info.VersionedResourcesStorageMap["v1"]); err != nil {
		return info, err
	}
	const resource = "componentstatuses"
	if resources := info.VersionedResourcesStorageMap["v1"]; resources[resource] != nil {
		resources[resource].Destroy()
		resources[resource] = componentstatus.NewStorage(p.cp.components)
	}
	return info, nil
}

// components are the parts of the control plane under the names that kubectl get
// componentstatuses has always shown.
func (cp *ControlPlane) components() map[string]componentstatus.Server {
	all := map[string]componentstatus.Server{"etcd-0": component(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		return cp.pingEtcd(ctx)
	})}
	if !cp.cfg.APIOnly {
		all["controller-manager"] = component(func() error { return cp.partRuns(partControllers) })
		all["scheduler"] = component(func() error { return cp.partRuns(partScheduler) })
	}
	return all
}

// component is a check of one part of the control plane.
type component func() error

// DoServerCheck implements componentstatus.Server.
func (c component) DoServerCheck() (probe.Result, string, error) {
	if err := c(); err != nil {
		return probe.Failure, err.Error(), err
	}
	return probe.Success, "ok", nil
}

// checkEtcd answers the API server's health check of its storage.
func (cp *ControlPlane) checkEtcd(r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
	defer cancel()
	return cp.pingEtcd(ctx)
}

func (cp *ControlPlane) pingEtcd(ctx context.Context) error {
	prefix, err := cp.cfg.Platform.storage.Prefix(cp.cfg.UID)
	if err != nil {
		return err
	}
	_, err = cp.cfg.Platform.storage.Conn().Get(ctx, prefix+"health")
	return err
}

// trimManagedFields keeps out of the informers what no component reads.
func trimManagedFields(obj any) (any, error) {
	if accessor, err := meta.Accessor(obj); err == nil && accessor.GetManagedFields() != nil {
		accessor.SetManagedFields(nil)
	}
	return obj, nil
}

// aeadCipherSuites are TLS 1.2's suites with forward secrecy and authenticated
// encryption. Upstream's default still has CBC. (TLS 1.3's are not configurable.)
func aeadCipherSuites() []uint16 {
	return []uint16{
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
		tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
		tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
		tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
		tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
		tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/cel/openapi/resolver"
	"k8s.io/apiserver/pkg/server/healthz"
	cacheddiscovery "k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/restmapper"
	controllersmetrics "k8s.io/component-base/metrics/prometheus/controllers"
	"k8s.io/controller-manager/pkg/clientbuilder"
	"k8s.io/controller-manager/pkg/informerfactory"
	csitrans "k8s.io/csi-translation-lib"
	"k8s.io/klog/v2"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kcmoptions "k8s.io/kubernetes/cmd/kube-controller-manager/app/options"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"
	kcmconfig "k8s.io/kubernetes/pkg/controller/apis/config"
	"k8s.io/kubernetes/pkg/controller/garbagecollector"
	serviceaccountcontroller "k8s.io/kubernetes/pkg/controller/serviceaccount"
	"k8s.io/kubernetes/pkg/controller/validatingadmissionpolicystatus"
	"k8s.io/kubernetes/pkg/controller/volume/attachdetach"
	"k8s.io/kubernetes/pkg/controller/volume/expand"
	"k8s.io/kubernetes/pkg/controller/volume/persistentvolume"
	"k8s.io/kubernetes/pkg/serviceaccount"
	"k8s.io/kubernetes/pkg/volume"
	"k8s.io/kubernetes/pkg/volume/csi"
	"k8s.io/kubernetes/pkg/volume/csimigration"
)

// controllerShutdown is how long controllers are given to finish what they do.
const controllerShutdown = 5 * time.Second

// replacedControllers are built here instead of by upstream's descriptors.
//
// The volume controllers among them would bring plugins that act on the machine they run
// on: the hostPath deleter removes directories, FlexVolume executes files. Here
// that machine is the host, and the objects are a tenant's.
var replacedControllers = []string{
	names.ServiceAccountTokenController,
	names.PersistentVolumeBinderController,
	names.PersistentVolumeAttachDetachController,
	names.PersistentVolumeExpanderController,
	names.SELinuxWarningController, // off by default; probes the same plugins
	names.NodeIpamController,       // fails with a tenant's nodes, see nodeIPAM
	// Keeps 7 MB of API definitions for itself, which here are shared.
	names.ValidatingAdmissionPolicyStatusController,
}

// runControllers runs kube-controller-manager's controllers against s until ctx
// is done. started is called when all of them have been told to run.
func (cp *ControlPlane) runControllers(ctx context.Context, s *apiServer, started func()) error {
	component, err := cp.controllerConfig()
	if err != nil {
		return err
	}
	builder := clientbuilder.SimpleControllerClientBuilder{ClientConfig: s.work}
	metadataClient, err := metadata.NewForConfig(s.work)
	if err != nil {
		return fmt.Errorf("make metadata client: %w", err)
	}
	// The API server's own informers: both trim alike, and one set of watches and
	// copies of all objects is enough for one process.
	resync := func() time.Duration { return component.Generic.MinResyncPeriod.Duration }
	view := s.informers.view(resync())
	metadataInformers := metadatainformer.NewSharedInformerFactoryWithOptions(metadataClient, resync(), metadatainformer.WithTransform(trimManagedFields))
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(cacheddiscovery.NewMemCacheClient(s.client.Discovery()))

	var background sync.WaitGroup
	defer background.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	background.Go(func() {
		for sleep(ctx, 30*time.Second) {
			mapper.Reset()
		}
	})

	cc := kcm.ControllerContext{
		ClientBuilder:                   builder,
		InformerFactory:                 view,
		ObjectOrMetadataInformerFactory: informerfactory.NewInformerFactory(view, metadataInformers),
		ComponentConfig:                 component,
		RESTMapper:                      mapper,
		InformersStarted:                make(chan struct{}),
		ResyncPeriod:                    resync,
		ControllerManagerMetrics:        controllersmetrics.NewControllerManagerMetrics("kube-controller-manager"),
	}
	ignored := map[schema.GroupResource]struct{}{}
	for _, r := range component.GarbageCollectorController.GCIgnoredResources {
		ignored[schema.GroupResource{Group: r.Group, Resource: r.Resource}] = struct{}{}
	}
	cc.GraphBuilder = garbagecollector.NewDependencyGraphBuilder(ctx, metadataClient, mapper, ignored, cc.ObjectOrMetadataInformerFactory, cc.InformersStarted)

	descriptors := kcm.NewControllerDescriptors()
	for _, name := range replacedControllers {
		delete(descriptors, name)
	}
	builders := cp.ownControllers(s)
	for name, descriptor := range descriptors {
		if lateControllers[name] != nil && cc.IsControllerEnabled(descriptor) {
			builders[name] = descriptor.BuildController
			delete(descriptors, name)
		}
	}
	controllers, err := kcm.BuildControllers(ctx, cc, descriptors, nil, discardHealth{})
	if err != nil {
		return fmt.Errorf("build controllers: %w", err)
	}
	for name, build := range builders {
		if lateControllers[name] != nil {
			controllers = append(controllers, cp.late(name, s, cc, metadataInformers, build))
			continue
		}
		built, err := build(ctx, cc)
		if err != nil {
			return err
		}
		controllers = append(controllers, built)
	}

	view.Start(ctx.Done())
	cc.ObjectOrMetadataInformerFactory.Start(ctx.Done())
	close(cc.InformersStarted)
	started()
	if !kcm.RunControllers(ctx, cc, controllers, 0, controllerShutdown) {
		return errors.New("controllers did not finish in time")
	}
	return nil
}

// controllerConfig is kube-controller-manager's default configuration with what
// kubeadm sets, and keys by paths that exist in memory alone.
func (cp *ControlPlane) controllerConfig() (c kcmconfig.KubeControllerManagerConfiguration, err error) {
	c, err = kcmoptions.NewDefaultComponentConfig()
	if err != nil {
		return c, fmt.Errorf("default controllers' configuration: %w", err)
	}
	caCert, caKey := cp.cfg.Authority.CAKeyPair()
	caFile, err := cp.memFile("ca.crt", caCert)
	if err != nil {
		return c, err
	}
	keyFile, err := cp.memFile("ca.key", caKey)
	if err != nil {
		return c, err
	}
	c.Generic.Controllers = []string{"*", names.BootstrapSignerController, names.TokenCleanerController}
	// Upstream spreads the start of its controllers over seconds, to spare an API
	// server far away.
	c.Generic.ControllerStartInterval = metav1.Duration{}
	c.SAController.RootCAFile = caFile
	c.CSRSigningController.ClusterSigningCertFile = caFile
	c.CSRSigningController.ClusterSigningKeyFile = keyFile
	c.KubeCloudShared.ClusterName = "kubernetes"
	c.KubeCloudShared.ClusterCIDR = cp.cfg.PodCIDR
	c.KubeCloudShared.AllocateNodeCIDRs = true
	c.KubeCloudShared.CIDRAllocatorType = "RangeAllocator"
	c.NodeIPAMController.ServiceCIDR = cp.cfg.ServiceCIDR
	return c, nil
}

// ownControllers build what replacedControllers leave out.
func (cp *ControlPlane) ownControllers(s *apiServer) map[string]buildController {
	return map[string]buildController{
		names.ServiceAccountTokenController: func(ctx context.Context, cc kcm.ControllerContext) (kcm.Controller, error) {
			core := cc.InformerFactory.Core().V1()
			generator, err := serviceaccount.JWTTokenGenerator(serviceaccount.LegacyIssuer, cp.cfg.Authority.ServiceAccountKey())
			if err != nil {
				return nil, fmt.Errorf("build token controller: %w", err)
			}
			tokens, err := serviceaccountcontroller.NewTokensController(klog.FromContext(ctx), core.ServiceAccounts(), core.Secrets(), s.worker,
				serviceaccountcontroller.TokensControllerOptions{TokenGenerator: generator, RootCA: cp.cfg.Authority.CA()})
			if err != nil {
				return nil, fmt.Errorf("build token controller: %w", err)
			}
			return controller{names.ServiceAccountTokenController, func(ctx context.Context) {
				tokens.Run(ctx, int(cc.ComponentConfig.SAController.ConcurrentSATokenSyncs))
			}}, nil
		},
		names.NodeIpamController: func(_ context.Context, cc kcm.ControllerContext) (kcm.Controller, error) {
			return cp.nodeIPAM(cc), nil
		},
		names.PersistentVolumeBinderController: withVolumePlugins(func(ctx context.Context, cc kcm.ControllerContext) (kcm.Controller, error) {
			core := cc.InformerFactory.Core().V1()
			binder, err := persistentvolume.NewController(ctx, persistentvolume.ControllerParameters{
				KubeClient:                s.worker,
				SyncPeriod:                cc.ComponentConfig.PersistentVolumeBinderController.PVClaimBinderSyncPeriod.Duration,
				VolumePlugins:             csiPlugins(),
				VolumeInformer:            core.PersistentVolumes(),
				ClaimInformer:             core.PersistentVolumeClaims(),
				ClassInformer:             cc.InformerFactory.Storage().V1().StorageClasses(),
				PodInformer:               core.Pods(),
				NodeInformer:              core.Nodes(),
				EnableDynamicProvisioning: true,
			})
			if err != nil {
				return nil, fmt.Errorf("build persistent volume binder: %w", err)
			}
			return controller{names.PersistentVolumeBinderController, binder.Run}, nil
		}),
		names.PersistentVolumeAttachDetachController: withVolumePlugins(func(ctx context.Context, cc kcm.ControllerContext) (kcm.Controller, error) {
			core, storage := cc.InformerFactory.Core().V1(), cc.InformerFactory.Storage().V1()
			attach, err := attachdetach.NewAttachDetachController(ctx, s.worker, core.Pods(), core.Nodes(), core.PersistentVolumeClaims(), core.PersistentVolumes(),
				storage.CSINodes(), storage.CSIDrivers(), storage.VolumeAttachments(), csiPlugins(), nil,
				cc.ComponentConfig.AttachDetachController.DisableAttachDetachReconcilerSync,
				cc.ComponentConfig.AttachDetachController.ReconcilerSyncLoopPeriod.Duration,
				cc.ComponentConfig.AttachDetachController.DisableForceDetachOnTimeout,
				attachdetach.DefaultTimerConfig)
			if err != nil {
				return nil, fmt.Errorf("build attach-detach controller: %w", err)
			}
			return controller{names.PersistentVolumeAttachDetachController, attach.Run}, nil
		}),
		names.PersistentVolumeExpanderController: withVolumePlugins(func(ctx context.Context, cc kcm.ControllerContext) (kcm.Controller, error) {
			translator := csitrans.New()
			expander, err := expand.NewExpandController(ctx, s.worker, cc.InformerFactory.Core().V1().PersistentVolumeClaims(), csiPlugins(), translator, csimigration.NewPluginManager(translator))
			if err != nil {
				return nil, fmt.Errorf("build volume expander: %w", err)
			}
			return controller{names.PersistentVolumeExpanderController, expander.Run}, nil
		}),
		names.ValidatingAdmissionPolicyStatusController: func(_ context.Context, cc kcm.ControllerContext) (kcm.Controller, error) {
			policies, err := validatingadmissionpolicystatus.NewController(
				cc.InformerFactory.Admissionregistration().V1().ValidatingAdmissionPolicies(),
				s.worker.AdmissionregistrationV1().ValidatingAdmissionPolicies(),
				&validating.TypeChecker{
					SchemaResolver: cp.cfg.Platform.schemas().Combine(&resolver.ClientDiscoveryResolver{Discovery: s.client.Discovery()}),
					RestMapper:     cc.RESTMapper,
				})
			if err != nil {
				return nil, fmt.Errorf("build admission policy controller: %w", err)
			}
			return controller{names.ValidatingAdmissionPolicyStatusController, func(ctx context.Context) {
				policies.Run(ctx, int(cc.ComponentConfig.ValidatingAdmissionPolicyStatusController.ConcurrentPolicySyncs))
			}}, nil
		},
	}
}

// volumePlugins is held while a controller is built that has volume plugins: setting
// one up writes package variables of upstream's, which only a kubelet reads.
var volumePlugins sync.Mutex

// withVolumePlugins is build, for controllers that have volume plugins.
func withVolumePlugins(build buildController) buildController {
	return func(ctx context.Context, cc kcm.ControllerContext) (kcm.Controller, error) {
		volumePlugins.Lock()
		defer volumePlugins.Unlock()
		return build(ctx, cc)
	}
}

// csiPlugins are the only volume plugins whose controller side does all its work
// through the API.
func csiPlugins() []volume.VolumePlugin { return csi.ProbeVolumePlugins() }

// controller implements kcm.Controller.
type controller struct {
	name string
	run  func(context.Context)
}

func (c controller) Name() string            { return c.name }
func (c controller) Run(ctx context.Context) { c.run(ctx) }

// discardHealth takes controllers' health checks, which upstream serves on a
// port of its own.
type discardHealth struct{}

func (discardHealth) AddHealthChecker(...healthz.HealthChecker) {}

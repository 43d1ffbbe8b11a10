// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"time"

	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/controller-manager/pkg/informerfactory"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"
)

// lateControllers are those that have nothing to do while there are no objects of some
// kinds, with those kinds: they start with the first object of one of them, in the few
// milliseconds that it takes, and stay. Only controllers whose every action begins with
// such an object belong here. Those of pods do not, because a pod may refer to what a
// controller is to make.
//
// Started, an idle controller has five to fifty workers, queues that wake up every ten
// seconds, and a recorder of events of 90 kB; those of nodes look at them ten times a
// second.
var lateControllers = map[string][]string{
	names.NodeIpamController:                           {"nodes"},
	names.NodeLifecycleController:                      {"nodes"},
	names.TaintEvictionController:                      {"nodes"},
	names.TTLController:                                {"nodes"},
	names.PersistentVolumeAttachDetachController:       {"nodes", "volumeattachments.storage.k8s.io"},
	names.PersistentVolumeBinderController:             {"persistentvolumes", "persistentvolumeclaims"},
	names.PersistentVolumeExpanderController:           {"persistentvolumeclaims"},
	names.PersistentVolumeClaimProtectionController:    {"persistentvolumeclaims"},
	names.PersistentVolumeProtectionController:         {"persistentvolumes"},
	names.VolumeAttributesClassProtectionController:    {"volumeattributesclasses.storage.k8s.io"},
	names.CertificateSigningRequestSigningController:   {"certificatesigningrequests.certificates.k8s.io"},
	names.CertificateSigningRequestApprovingController: {"certificatesigningrequests.certificates.k8s.io"},
	names.CertificateSigningRequestCleanerController:   {"certificatesigningrequests.certificates.k8s.io"},
	names.HorizontalPodAutoscalerController:            {"horizontalpodautoscalers.autoscaling"},
	names.CronJobController:                            {"cronjobs.batch"},
	names.TTLAfterFinishedController:                   {"jobs.batch"},
	names.StatefulSetController:                        {"statefulsets.apps"},
	names.ReplicationControllerController:              {"replicationcontrollers"},
	names.ResourceQuotaController:                      {"resourcequotas"},
	names.StorageVersionMigratorController:             {"storageversionmigrations.storagemigration.k8s.io"},
	names.ValidatingAdmissionPolicyStatusController:    {"validatingadmissionpolicies.admissionregistration.k8s.io"},
	// A pod's claim begins with a template or with the claim itself. That a template is
	// missing, the pod is told where there are nodes on which it could run.
	names.ResourceClaimController:       {"nodes", "resourceclaims.resource.k8s.io", "resourceclaimtemplates.resource.k8s.io"},
	names.DeviceTaintEvictionController: {"nodes", "resourceclaims.resource.k8s.io", "resourceslices.resource.k8s.io", "devicetaintrules.resource.k8s.io"},
}

// buildController makes a controller. It is nil if there is none.
type buildController func(ctx context.Context, cc kcm.ControllerContext) (kcm.Controller, error)

// late makes a controller of build that is built when there is an object for it.
func (cp *ControlPlane) late(name string, s *apiServer, cc kcm.ControllerContext, metadata metadatainformer.SharedInformerFactory, build buildController) kcm.Controller {
	return controller{name, func(ctx context.Context) {
		if !s.store.awaitAny(ctx, lateControllers[name]) {
			return
		}
		for delay := time.Second; ; delay = min(2*delay, time.Minute) {
			// Of its own, so that its handlers wait until it is complete.
			view := s.informers.view(cc.ResyncPeriod())
			cc.InformerFactory = view
			cc.ObjectOrMetadataInformerFactory = informerfactory.NewInformerFactory(view, metadata)
			buildCtx, cancel := context.WithCancel(ctx)
			built, err := s.buildOne(buildCtx, cc, build)
			if err == nil {
				if built != nil {
					cc.ObjectOrMetadataInformerFactory.Start(ctx.Done())
					view.Start(ctx.Done())
					built.Run(buildCtx)
				}
				cancel()
				return
			}
			cancel()
			cp.log.Error("a controller cannot start", "controller", name, "error", err, "retryIn", delay)
			if !sleep(ctx, delay) {
				return
			}
		}
	}}
}

// buildOne builds one controller at a time, as upstream's own loop does: a constructor reads
// and writes the indexes of informers that others have too.
func (s *apiServer) buildOne(ctx context.Context, cc kcm.ControllerContext, build buildController) (kcm.Controller, error) {
	s.building.Lock()
	defer s.building.Unlock()
	return build(ctx, cc)
}

// awaitAny waits until there is an object of one of some kinds, and reports whether
// there is. Kinds that are not served never have one.
func (b *backend) awaitAny(ctx context.Context, resources []string) bool {
	filled := make(chan struct{}, 1)
	notify := func() {
		select {
		case filled <- struct{}{}:
		default:
		}
	}
	for _, resource := range resources {
		directory, ok := b.counts.directory(resource)
		if !ok {
			continue
		}
		_, forget, ok := b.storage.Vacant(b.uid, directory, notify)
		if !ok {
			return true
		}
		defer forget()
	}
	select {
	case <-filled:
		return true
	case <-ctx.Done():
		return false
	}
}

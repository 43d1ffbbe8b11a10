// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"
)

// nodeIPAM gives nodes their pod CIDRs. Upstream builds it with all controllers, and
// then a single node with a pod CIDR that is not the cluster's fails all of them, at
// every start: nobody could delete that node any more. So it is built when it runs,
// and not before the nodes permit it.
func (cp *ControlPlane) nodeIPAM(cc kcm.ControllerContext) kcm.Controller {
	const longest = 30 * time.Second
	nodes := cc.InformerFactory.Core().V1().Nodes()
	lister, synced := nodes.Lister(), nodes.Informer().HasSynced
	descriptor := kcm.NewControllerDescriptors()[names.NodeIpamController]
	return controller{names.NodeIpamController, func(ctx context.Context) {
		for !synced() {
			if !sleep(ctx, 100*time.Millisecond) {
				return
			}
		}
		for delay := time.Second; ; delay = min(2*delay, longest) {
			all, err := lister.List(labels.Everything())
			if err == nil {
				err = checkPodCIDRs(all, cp.cfg.PodCIDR)
			}
			var built kcm.Controller
			if err == nil {
				built, err = descriptor.BuildController(ctx, cc)
			}
			if err == nil {
				built.Run(ctx)
				return
			}
			cp.log.Warn("nodes get no pod CIDRs", "error", err, "retryIn", delay)
			if !sleep(ctx, delay) {
				return
			}
		}
	}}
}

// checkPodCIDRs finds the node for which upstream's controller would not start.
func checkPodCIDRs(nodes []*corev1.Node, cluster string) error {
	within, err := netip.ParsePrefix(cluster)
	if err != nil {
		return fmt.Errorf("pod CIDR of the cluster: %w", err)
	}
	for _, node := range nodes {
		for i, cidr := range node.Spec.PodCIDRs {
			prefix, err := netip.ParsePrefix(cidr)
			if err != nil || i > 0 || !within.Overlaps(prefix) {
				return fmt.Errorf("node %s has the pod CIDR %s, which is not of this cluster's %s; delete the node", node.Name, cidr, cluster)
			}
		}
	}
	return nil
}

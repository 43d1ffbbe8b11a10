// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"k8s.io/apimachinery/pkg/runtime/schema"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
)

// apiPriorities orders the built-in groups and versions in discovery, which
// decides what `kubectl get NAME` means when two groups have a resource of that
// name. The numbers are kube-apiserver 1.37's; a test compares the resulting
// documents with a kube-apiserver's.
func apiPriorities() map[schema.GroupVersion]controlplaneapiserver.APIServicePriority {
	p := controlplaneapiserver.DefaultGenericAPIServicePriorities()
	for group, g := range map[string]struct {
		priority int32
		versions map[string]int32
	}{
		"apps":              {17800, map[string]int32{"v1": 15}},
		"autoscaling":       {17500, map[string]int32{"v1": 15, "v2": 30}},
		"batch":             {17400, map[string]int32{"v1": 15}},
		"networking.k8s.io": {17200, map[string]int32{"v1": 15, "v1beta1": 9}},
		"policy":            {17100, map[string]int32{"v1": 15}},
		"storage.k8s.io":    {16800, map[string]int32{"v1": 15, "v1beta1": 9, "v1alpha1": 1}},
		"scheduling.k8s.io": {16600, map[string]int32{"v1": 15, "v1beta1": 9, "v1alpha3": 3}},
		"node.k8s.io":       {16300, map[string]int32{"v1": 15}},
		"resource.k8s.io":   {16200, map[string]int32{"v1": 21, "v1beta2": 15, "v1beta1": 9, "v1alpha3": 1}},
		"lifecycle.k8s.io":  {15700, map[string]int32{"v1alpha1": 1}},
	} {
		for version, v := range g.versions {
			p[schema.GroupVersion{Group: group, Version: version}] = controlplaneapiserver.APIServicePriority{Group: g.priority, Version: v}
		}
	}
	return p
}

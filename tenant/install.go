// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	genericapiserver "k8s.io/apiserver/pkg/server"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
)

// installAPIs does what upstream's Server.InstallAPIs does, but keeps the groups'
// definitions no longer than they are read. Upstream's hold on to them, 3 MB, for
// CRDs' servers alone; those make their own.
func installAPIs(s *controlplaneapiserver.Server, providers []controlplaneapiserver.RESTStorageProvider, objects *objectStorage) error {
	server := s.GenericAPIServer
	lifecycle, err := genericapiserver.NewResourceExpirationEvaluatorFromOptions(genericapiserver.ResourceExpirationEvaluatorOptions{
		CurrentVersion:                          server.EffectiveVersion.EmulationVersion(),
		Prerelease:                              server.EffectiveVersion.BinaryVersion().PreRelease(),
		EmulationForwardCompatible:              server.EmulationForwardCompatible,
		RuntimeConfigEmulationForwardCompatible: server.RuntimeConfigEmulationForwardCompatible,
	})
	if err != nil {
		return fmt.Errorf("read life cycle of the API: %w", err)
	}
	var legacy, groups []*genericapiserver.APIGroupInfo
	for _, p := range providers {
		name := p.GroupName()
		info, err := p.NewRESTStorage(s.APIResourceConfigSource, s.RESTOptionsGetter)
		if err != nil {
			return fmt.Errorf("make storage of API group %q: %w", name, err)
		}
		if len(info.VersionedResourcesStorageMap) > 0 {
			if err := lifecycle.RemoveUnavailableKinds(name, info.Scheme, info.VersionedResourcesStorageMap, s.APIResourceConfigSource); err != nil {
				return fmt.Errorf("select kinds of API group %q: %w", name, err)
			}
		}
		if len(info.VersionedResourcesStorageMap) == 0 {
			continue // not enabled, or all of it is gone or not there yet
		}
		if p, ok := p.(genericapiserver.PostStartHookProvider); ok {
			name, hook, err := p.PostStartHook()
			if err != nil {
				return fmt.Errorf("make post-start hook: %w", err)
			}
			if err := server.AddPostStartHook(name, hook); err != nil {
				return fmt.Errorf("add post-start hook %s: %w", name, err)
			}
		}
		shareTables(&info)
		if err := objects.add(name, &info); err != nil {
			return err
		}
		if name == corev1.GroupName {
			legacy = append(legacy, &info)
		} else {
			groups = append(groups, &info)
		}
	}
	for _, info := range legacy {
		if err := server.InstallLegacyAPIGroup(genericapiserver.DefaultLegacyAPIPrefix, info); err != nil {
			return fmt.Errorf("install core API: %w", err)
		}
	}
	if err := server.InstallAPIGroups(groups...); err != nil {
		return fmt.Errorf("install API groups: %w", err)
	}
	for _, info := range append(legacy, groups...) {
		info.StaticOpenAPISpec = nil
	}
	return nil
}

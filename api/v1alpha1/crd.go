// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	_ "embed"
	"strconv"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

var (
	//go:embed crd/tenantd.io_tenants.yaml
	tenantsCRD []byte
	//go:embed crd/tenantd.io_hosts.yaml
	hostsCRD []byte
)

// crdGenerationAnnotation is where a definition has its generation, from a marker at its
// type: one more than that of the release before, if it differs from that release's.
const crdGenerationAnnotation = "tenantd.io/generation"

// CRDGeneration says which of two definitions of one name is the newer one: that with the
// higher generation. Hosts of two versions, which have one system plane, go by it. A
// definition that has none, or none that can be read, is the oldest: 0.
func CRDGeneration(crd *apiextensionsv1.CustomResourceDefinition) int {
	n, err := strconv.Atoi(crd.Annotations[crdGenerationAnnotation])
	if err != nil {
		return 0
	}
	return n
}

// CustomResourceDefinitions returns the definitions that the system plane serves:
// that of Tenant, then that of Host. The caller owns what it gets.
func CustomResourceDefinitions() []*apiextensionsv1.CustomResourceDefinition {
	var crds []*apiextensionsv1.CustomResourceDefinition
	for _, data := range [][]byte{tenantsCRD, hostsCRD} {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(data, crd); err != nil {
			// The file is part of the binary and a test decodes it.
			panic("tenantd: embedded CustomResourceDefinition: " + err.Error())
		}
		crds = append(crds, crd)
	}
	return crds
}

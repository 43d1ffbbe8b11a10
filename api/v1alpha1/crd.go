// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	_ "embed"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

//go:embed crd/tenantd.io_tenants.yaml
var tenantsCRD []byte

// CustomResourceDefinitions returns the definitions that the system plane serves.
// The caller owns what it gets.
func CustomResourceDefinitions() []*apiextensionsv1.CustomResourceDefinition {
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.UnmarshalStrict(tenantsCRD, crd); err != nil {
		// The file is part of the binary and a test decodes it.
		panic("tenantd: embedded CustomResourceDefinition: " + err.Error())
	}
	return []*apiextensionsv1.CustomResourceDefinition{crd}
}

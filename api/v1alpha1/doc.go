// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 is what users of tenantd write and read: the [Tenant] and [Host]
// objects of the system plane, the [HostConfiguration] file of a host, and the bodies
// of the credential requests that tenantctl sends ([KubeconfigRequest],
// [JoinTokenRequest], [HostTokenRequest]) and that a new host does
// ([HostJoinRequest], with a [HostToken]).
//
// The rules for the objects live in their CustomResourceDefinitions, so that they hold
// for every client; the rules for what no API server sees live in the Validate
// methods here. Any package may import this one; it imports none of ours.
//
//	scheme := runtime.NewScheme()
//	utilruntime.Must(v1alpha1.AddToScheme(scheme))
//	c, err := client.New(restConfig, client.Options{Scheme: scheme})
//	if err != nil {
//		return err
//	}
//	err = c.Create(ctx, &v1alpha1.Tenant{
//		ObjectMeta: metav1.ObjectMeta{Name: "acme"},
//		Spec:       v1alpha1.TenantSpec{Hostname: "acme.k8s.example.com"},
//	})
//
// zz_generated.deepcopy.go and crd/ are made from the markers in this package by
// go generate.
//
// +groupName=tenantd.io
// +kubebuilder:object:generate=true
package v1alpha1

//go:generate go run sigs.k8s.io/controller-tools/cmd/controller-gen@v0.23.0 object:headerFile=boilerplate.go.txt crd paths=. output:crd:dir=crd

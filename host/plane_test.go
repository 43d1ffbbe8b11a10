// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"log/slog"
	"strconv"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/fake"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"
)

// A definition is replaced by an equal or newer one, and never by an older one, even if
// that is made of what was read before the newer one came.
func TestDefinitionsNeverGoBack(t *testing.T) {
	generation := func(n int) *apiextensionsv1.CustomResourceDefinition {
		crd := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: "tenants.tenantd.io"}}
		if n > 0 {
			crd.Annotations = map[string]string{"tenantd.io/generation": strconv.Itoa(n)}
		}
		return crd
	}
	const none = -1
	for _, test := range []struct {
		name            string
		have, meanwhile int // generation that is there, and that another host installs meanwhile
		own, want       int
	}{
		{"the first", none, none, 2, 2},
		{"from before there were generations", 0, none, 2, 2},
		{"older", 1, none, 2, 2},
		{"the same", 2, none, 2, 2},
		{"newer", 3, none, 2, 3},
		{"newer, meanwhile", 1, 3, 2, 3},
		{"older, meanwhile", 0, 1, 2, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			client := fake.NewClientset()
			gvr := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
			there, version := (*apiextensionsv1.CustomResourceDefinition)(nil), 1
			put := func(crd *apiextensionsv1.CustomResourceDefinition) {
				there = crd.DeepCopy()
				version++
				there.ResourceVersion = strconv.Itoa(version)
			}
			if test.have != none {
				put(generation(test.have))
			}
			client.PrependReactor("get", gvr.Resource, func(clienttesting.Action) (bool, runtime.Object, error) {
				if there == nil {
					return true, nil, apierrors.NewNotFound(gvr.GroupResource(), "tenants.tenantd.io")
				}
				return true, there.DeepCopy(), nil
			})
			client.PrependReactor("patch", gvr.Resource, func(action clienttesting.Action) (bool, runtime.Object, error) {
				if test.meanwhile != none {
					put(generation(test.meanwhile))
					test.meanwhile = none
				}
				applied := &apiextensionsv1.CustomResourceDefinition{}
				if err := yaml.UnmarshalStrict(action.(clienttesting.PatchAction).GetPatch(), applied); err != nil {
					return true, nil, err
				}
				if there != nil && applied.ResourceVersion != "" && applied.ResourceVersion != there.ResourceVersion {
					return true, nil, apierrors.NewConflict(gvr.GroupResource(), applied.Name, nil)
				}
				put(applied)
				return true, there.DeepCopy(), nil
			})
			if err := installCRD(t.Context(), client, generation(test.own), slog.New(slog.DiscardHandler)); err != nil {
				t.Fatal(err)
			}
			if got := there.Annotations["tenantd.io/generation"]; got != strconv.Itoa(test.want) {
				t.Errorf("generation %s is there, want %d", got, test.want)
			}
		})
	}
}

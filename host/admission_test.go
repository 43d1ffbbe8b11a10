// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apiserver/pkg/admission"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func tenantObject(name, hostname, konnectivity string) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{}}}
	u.SetAPIVersion(v1alpha1.GroupVersion.String())
	u.SetKind("Tenant")
	u.SetName(name)
	for field, value := range map[string]string{"hostname": hostname, "konnectivityHostname": konnectivity} {
		if value != "" {
			unstructured.SetNestedField(u.Object, value, "spec", field)
		}
	}
	return u
}

func request(op admission.Operation, obj *unstructured.Unstructured, subresource string, dryRun bool) admission.Attributes {
	gvk := v1alpha1.GroupVersion.WithKind("Tenant")
	return admission.NewAttributesRecord(obj, nil, gvk, "", obj.GetName(), v1alpha1.GroupVersion.WithResource("tenants"), subresource, op, nil, dryRun, nil)
}

func newAdmission(t *testing.T, stored ...v1alpha1.Tenant) *tenantAdmission {
	t.Helper()
	return &tenantAdmission{
		etcd:      openStore(t).Client(),
		Interface: admission.NewHandler(), // handles nothing, so nothing is passed on
		domain:    "k8s.test",
		named: func(_ context.Context, name string) ([]v1alpha1.Tenant, error) {
			return slices.DeleteFunc(slices.Clone(stored), func(s v1alpha1.Tenant) bool {
				return s.Spec.Hostname != name && s.Spec.KonnectivityHostname != name
			}), nil
		},
	}
}

func TestAdmissionCompletesTenants(t *testing.T) {
	a := newAdmission(t)
	obj := tenantObject("acme", "", "")
	if err := a.Admit(t.Context(), request(admission.Create, obj, "", false), nil); err != nil {
		t.Fatal(err)
	}
	if host, _, _ := unstructured.NestedString(obj.Object, "spec", "hostname"); host != "acme.k8s.test" {
		t.Errorf("hostname is %q", host)
	}
	if !slices.Contains(obj.GetFinalizers(), v1alpha1.TenantFinalizer) {
		t.Error("no finalizer: the tenant could go without being wiped")
	}
	// A removed finalizer must not come back, or no tenant could ever go.
	obj.SetFinalizers(nil)
	if err := a.Admit(t.Context(), request(admission.Update, obj, "", false), nil); err != nil {
		t.Fatal(err)
	}
	if len(obj.GetFinalizers()) > 0 {
		t.Error("an update got a finalizer")
	}
}

func TestAdmissionRefusesTakenNames(t *testing.T) {
	stored := v1alpha1.Tenant{
		ObjectMeta: metav1.ObjectMeta{Name: "acme"},
		Spec:       v1alpha1.TenantSpec{Hostname: "acme.k8s.test", KonnectivityHostname: "tunnel.acme.k8s.test"},
	}
	a := newAdmission(t, stored)
	for _, c := range []struct {
		name, hostname, konnectivity string
		wantField                    string // empty: admitted
	}{
		{"globex", "globex.k8s.test", "", ""},
		{"acme", "acme.k8s.test", "", ""}, // itself
		{"globex", "acme.k8s.test", "", "spec.hostname"},
		{"globex", "tunnel.acme.k8s.test", "", "spec.hostname"},
		{"globex", "globex.k8s.test", "acme.k8s.test", "spec.konnectivityHostname"},
		{"globex", "system.k8s.test", "", "spec.hostname"},
	} {
		err := a.Validate(t.Context(), request(admission.Create, tenantObject(c.name, c.hostname, c.konnectivity), "", false), nil)
		switch {
		case c.wantField == "" && err != nil:
			t.Errorf("%v: %v", c, err)
		case c.wantField != "" && (err == nil || !strings.Contains(err.Error(), c.wantField+":")):
			t.Errorf("%v: got %v, want a fault of %s", c, err, c.wantField)
		}
	}
}

// Two tenants created at once on two hosts, neither stored yet, do not both get a name.
func TestAdmissionReservesNames(t *testing.T) {
	a := newAdmission(t)
	otherHost := *a
	hosts := []*tenantAdmission{a, &otherHost}
	var admitted sync.Map
	var wg sync.WaitGroup
	for i, name := range []string{"a", "b", "c", "d"} {
		wg.Go(func() {
			if hosts[i%2].Validate(context.Background(), request(admission.Create, tenantObject(name, "same.k8s.test", ""), "", false), nil) == nil {
				admitted.Store(name, true)
			}
		})
	}
	wg.Wait()
	n, winner := 0, ""
	admitted.Range(func(k, _ any) bool { n++; winner = k.(string); return true })
	if n != 1 {
		t.Fatalf("%d tenants were given one name", n)
	}
	try := func(name string, dryRun bool) error {
		return a.Validate(t.Context(), request(admission.Create, tenantObject(name, "same.k8s.test", ""), "", dryRun), nil)
	}
	if err := try(winner, false); err != nil {
		t.Errorf("the one who has the name cannot try again: %v", err)
	}
	// Deleted, the name is free at once; a dry run does not take it.
	if err := a.Validate(t.Context(), request(admission.Delete, tenantObject(winner, "", ""), "", false), nil); err != nil {
		t.Fatal(err)
	}
	if err := try("e", true); err != nil {
		t.Errorf("the name is not free after its tenant went: %v", err)
	}
	if err := try("f", false); err != nil {
		t.Errorf("a dry run took the name: %v", err)
	}
}

// What a stored tenant keeps needs no look and no reservation, and nothing of it is left
// in etcd.
func TestAdmissionReservesNothingThatIsStored(t *testing.T) {
	a := newAdmission(t)
	a.named = func(context.Context, string) ([]v1alpha1.Tenant, error) { return nil, errors.New("looked") }
	obj := tenantObject("acme", "acme.k8s.test", "")
	gvk := v1alpha1.GroupVersion.WithKind("Tenant")
	update := admission.NewAttributesRecord(obj, obj, gvk, "", "acme", v1alpha1.GroupVersion.WithResource("tenants"), "", admission.Update, nil, false, nil)
	if err := a.Validate(t.Context(), update, nil); err != nil {
		t.Fatal(err)
	}
	left, err := a.etcd.Get(t.Context(), reservationsPrefix, clientv3.WithPrefix())
	if err != nil || left.Count != 0 {
		t.Errorf("%+v, %v", left, err)
	}
}

// Other resources and a tenant's status pass untouched.
func TestAdmissionMindsItsOwnBusiness(t *testing.T) {
	a := newAdmission(t, v1alpha1.Tenant{ObjectMeta: metav1.ObjectMeta{Name: "acme"}, Spec: v1alpha1.TenantSpec{Hostname: "acme.k8s.test"}})
	if err := a.Validate(t.Context(), request(admission.Update, tenantObject("globex", "acme.k8s.test", ""), "status", false), nil); err != nil {
		t.Errorf("a status update was refused: %v", err)
	}
	other := admission.NewAttributesRecord(&unstructured.Unstructured{Object: map[string]any{}}, nil, v1alpha1.GroupVersion.WithKind("Other"), "", "x",
		v1alpha1.GroupVersion.WithResource("others"), "", admission.Create, nil, false, nil)
	if err := a.Admit(t.Context(), other, nil); err != nil {
		t.Error(err)
	}
	if err := a.Validate(t.Context(), other, nil); err != nil {
		t.Error(err)
	}
}

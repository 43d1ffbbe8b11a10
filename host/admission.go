// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// reservationTTL is how long a hostname that passed admission is kept from
// others although no stored Tenant has it yet: longer than a write may take.
const reservationTTL = 70 * time.Second

// tenantAdmission completes Tenants and refuses those whose hostname is taken,
// which no rule in a CRD can see.
type tenantAdmission struct {
	admission.Interface // what the API server would do without us
	domain              string
	// list returns all stored Tenants, none older than the call.
	list func(context.Context) ([]v1alpha1.Tenant, error)

	mu       sync.Mutex // guards what follows, and makes check and reserve one step
	reserved map[string]reservation
}

type reservation struct {
	tenant string
	until  time.Time
}

// Handles implements admission.Interface.
func (t *tenantAdmission) Handles(admission.Operation) bool { return true }

// Admit implements admission.MutationInterface.
func (t *tenantAdmission) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if obj := tenantOf(a); obj != nil && (a.GetOperation() == admission.Create || a.GetOperation() == admission.Update) {
		if host, _, _ := unstructured.NestedString(obj.Object, "spec", "hostname"); host == "" && a.GetSubresource() == "" {
			if err := unstructured.SetNestedField(obj.Object, obj.GetName()+"."+t.domain, "spec", "hostname"); err != nil {
				return apierrors.NewBadRequest(fmt.Sprintf("spec: %v", err))
			}
		}
		// From the first moment, so that no tenant goes without being wiped.
		if a.GetOperation() == admission.Create && !slices.Contains(obj.GetFinalizers(), v1alpha1.TenantFinalizer) {
			obj.SetFinalizers(append(obj.GetFinalizers(), v1alpha1.TenantFinalizer))
		}
	}
	if m, ok := t.Interface.(admission.MutationInterface); ok && t.Interface.Handles(a.GetOperation()) {
		return m.Admit(ctx, a, o)
	}
	return nil
}

// Validate implements admission.ValidationInterface.
func (t *tenantAdmission) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if obj := tenantOf(a); obj != nil && a.GetSubresource() == "" && obj.GetDeletionTimestamp() == nil &&
		(a.GetOperation() == admission.Create || a.GetOperation() == admission.Update) {
		if err := t.checkNames(ctx, obj, a.IsDryRun()); err != nil {
			return err
		}
	}
	if a.GetOperation() == admission.Delete && tenantsResource(a) && a.GetSubresource() == "" {
		t.release(a.GetName())
	}
	if v, ok := t.Interface.(admission.ValidationInterface); ok && t.Interface.Handles(a.GetOperation()) {
		return v.Validate(ctx, a, o)
	}
	return nil
}

// tenantOf is the Tenant that a request writes, or nil if it writes none.
func tenantOf(a admission.Attributes) *unstructured.Unstructured {
	if !tenantsResource(a) {
		return nil
	}
	obj, _ := a.GetObject().(*unstructured.Unstructured)
	return obj
}

func tenantsResource(a admission.Attributes) bool {
	return a.GetResource().GroupResource() == schema.GroupResource{Group: v1alpha1.GroupVersion.Group, Resource: "tenants"}
}

// release forgets what is reserved for a tenant that goes: as long as it is
// stored, its names are taken all the same.
func (t *tenantAdmission) release(tenant string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for host, r := range t.reserved {
		if r.tenant == tenant {
			delete(t.reserved, host)
		}
	}
}

// checkNames refuses a Tenant whose names another one, or the system plane, has.
func (t *tenantAdmission) checkNames(ctx context.Context, obj *unstructured.Unstructured, dryRun bool) error {
	fields := map[string]string{}
	for _, name := range []string{"hostname", "konnectivityHostname"} {
		if host, _, _ := unstructured.NestedString(obj.Object, "spec", name); host != "" {
			fields[host] = name
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	tenants, err := t.list(ctx)
	if err != nil {
		return apierrors.NewInternalError(fmt.Errorf("check whether the hostname is free: %w", err))
	}
	taken := map[string]string{systemName(t.domain): "the system plane"}
	now := time.Now()
	for host, r := range t.reserved {
		if now.After(r.until) {
			delete(t.reserved, host)
		} else if r.tenant != obj.GetName() {
			taken[host] = fmt.Sprintf("tenant %q", r.tenant)
		}
	}
	for _, other := range tenants {
		if other.Name == obj.GetName() {
			continue
		}
		for _, host := range []string{other.Spec.Hostname, other.Spec.KonnectivityHostname} {
			if host != "" {
				taken[host] = fmt.Sprintf("tenant %q", other.Name)
			}
		}
	}
	var faults field.ErrorList
	for host, name := range fields {
		if holder, ok := taken[host]; ok {
			faults = append(faults, field.Invalid(field.NewPath("spec", name), host, fmt.Sprintf("is the name of %s already; choose another", holder)))
		}
	}
	if len(faults) > 0 {
		return apierrors.NewInvalid(v1alpha1.GroupVersion.WithKind("Tenant").GroupKind(), obj.GetName(), faults)
	}
	if !dryRun {
		for host := range fields {
			t.reserved[host] = reservation{tenant: obj.GetName(), until: now.Add(reservationTTL)}
		}
	}
	return nil
}

// systemName is the name under which the system plane is served.
func systemName(domain string) string { return v1alpha1.ReservedTenantName + "." + domain }

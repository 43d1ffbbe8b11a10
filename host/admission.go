// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

const (
	// reservationsPrefix is where etcd has hostnames that passed admission on one of
	// the hosts, and whose Tenant may not be stored yet.
	reservationsPrefix = "/tenantd/hostnames/"
	// reservationTTL is how long they are kept from others, in seconds: longer than a
	// write may take.
	reservationTTL = 70
)

// tenantAdmission completes Tenants and refuses those whose hostname is taken,
// which no rule in a CRD can see.
type tenantAdmission struct {
	admission.Interface // what the API server would do without us
	domain              string
	// named returns the stored Tenants that have a name, none older than the call.
	named func(ctx context.Context, name string) ([]v1alpha1.Tenant, error)
	etcd  *clientv3.Client
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
		old, _ := a.GetOldObject().(*unstructured.Unstructured)
		if err := t.checkNames(ctx, obj, old, a.IsDryRun()); err != nil {
			return err
		}
	}
	if a.GetOperation() == admission.Delete && tenantsResource(a) && a.GetSubresource() == "" {
		if err := t.release(ctx, a.GetName()); err != nil {
			return apierrors.NewInternalError(err)
		}
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
func (t *tenantAdmission) release(ctx context.Context, tenant string) error {
	all, err := t.etcd.Get(ctx, reservationsPrefix, clientv3.WithPrefix())
	if err != nil {
		return fmt.Errorf("release what is reserved for tenant %q: %w", tenant, err)
	}
	for _, kv := range all.Kvs {
		if string(kv.Value) != tenant {
			continue
		}
		unchanged := clientv3.Compare(clientv3.ModRevision(string(kv.Key)), "=", kv.ModRevision)
		if _, err := t.etcd.Txn(ctx).If(unchanged).Then(clientv3.OpDelete(string(kv.Key))).Commit(); err != nil {
			return fmt.Errorf("release what is reserved for tenant %q: %w", tenant, err)
		}
	}
	return nil
}

// reserve keeps names from all other tenants on all hosts for as long as the lease, and
// returns who has one of them already. With dryRun it only looks.
func (t *tenantAdmission) reserve(ctx context.Context, tenant string, names []string, dryRun bool) (holders map[string]string, lease clientv3.LeaseID, err error) {
	holders = map[string]string{}
	if !dryRun && len(names) > 0 {
		granted, err := t.etcd.Grant(ctx, reservationTTL)
		if err != nil {
			return nil, 0, err
		}
		lease = granted.ID
	}
	for _, name := range names {
		key := reservationsPrefix + name
		take := []clientv3.Op{clientv3.OpPut(key, tenant, clientv3.WithLease(lease))}
		if dryRun {
			take = nil
		}
		look := clientv3.OpGet(key)
		mine := clientv3.OpTxn([]clientv3.Cmp{clientv3.Compare(clientv3.Value(key), "=", tenant)}, take, []clientv3.Op{look})
		done, err := t.etcd.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).Then(take...).Else(mine).Commit()
		if err != nil {
			return nil, lease, err
		}
		if done.Succeeded {
			continue
		}
		if inner := done.Responses[0].GetResponseTxn(); !inner.Succeeded {
			holders[name] = string(inner.Responses[0].GetResponseRange().Kvs[0].Value)
		}
	}
	return holders, lease, nil
}

// checkNames refuses a Tenant whose names another one, or the system plane, has. What
// it had before is not looked at again: a stored Tenant keeps it from others.
func (t *tenantAdmission) checkNames(ctx context.Context, obj, old *unstructured.Unstructured, dryRun bool) error {
	had := claimedNames(old)
	fields := claimedNames(obj)
	var fresh []string
	for host := range fields {
		if _, ok := had[host]; !ok {
			fresh = append(fresh, host)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	// First this and then what is stored: whoever is not stored yet is among the
	// reservations, or finds ours.
	taken, lease, err := t.reserve(ctx, obj.GetName(), fresh, dryRun)
	if err != nil {
		return apierrors.NewInternalError(fmt.Errorf("reserve the hostname: %w", err))
	}
	for host, tenant := range taken {
		taken[host] = fmt.Sprintf("tenant %q", tenant)
	}
	taken[systemName(t.domain)] = "the system plane"
	for _, host := range fresh {
		tenants, err := t.named(ctx, host)
		if err != nil {
			return apierrors.NewInternalError(fmt.Errorf("check whether the hostname is free: %w", err))
		}
		for _, other := range tenants {
			if other.Name != obj.GetName() {
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
		if lease != clientv3.NoLease {
			_, _ = t.etcd.Revoke(ctx, lease) // or it ends by itself
		}
		return apierrors.NewInvalid(v1alpha1.GroupVersion.WithKind("Tenant").GroupKind(), obj.GetName(), faults)
	}
	return nil
}

// claimedNames are the names that a Tenant is served under, and the fields that they are in.
func claimedNames(obj *unstructured.Unstructured) map[string]string {
	fields := map[string]string{}
	if obj == nil {
		return fields
	}
	for _, name := range []string{"hostname", "konnectivityHostname"} {
		if host, _, _ := unstructured.NestedString(obj.Object, "spec", name); host != "" {
			fields[host] = name
		}
	}
	return fields
}

// systemName is the name under which the system plane is served.
func systemName(domain string) string { return v1alpha1.ReservedTenantName + "." + domain }

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/host/placement"
)

// planeWith is a system plane that has these objects.
func planeWith(t *testing.T, objects ...client.Object) client.Client {
	t.Helper()
	scheme := apiruntime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	return fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithStatusSubresource(&v1alpha1.Tenant{}, &v1alpha1.Host{}).Build()
}

// at is a host that serves these tenants.
func at(name string, alive bool, serving ...string) *view {
	v := &view{Host: placement.Host{Name: name, Alive: alive}, serving: map[string]bool{}}
	for _, uid := range serving {
		v.serving[uid] = true
	}
	return v
}

// A tenant leaves a host that serves it when the others do.
func TestMovesInTwoSteps(t *testing.T) {
	for _, test := range []struct {
		name       string
		replicas   int32
		placed     []string
		views      []*view
		decided    []string
		want       []string
		wantReason string
	}{
		{"new", 1, nil, []*view{at("a", true)}, []string{"a"}, []string{"a"}, v1alpha1.ReasonAsExpected},
		{"stays", 1, []string{"a"}, []*view{at("a", true, "u")}, []string{"a"}, []string{"a"}, v1alpha1.ReasonAsExpected},
		{"the first step", 1, []string{"a"}, []*view{at("a", true, "u"), at("b", true)}, []string{"b"}, []string{"b", "a"}, v1alpha1.ReasonMoving},
		{"not there yet", 1, []string{"b", "a"}, []*view{at("a", true, "u"), at("b", true)}, []string{"b"}, []string{"b", "a"}, v1alpha1.ReasonMoving},
		{"the second step", 1, []string{"b", "a"}, []*view{at("a", true, "u"), at("b", true, "u")}, []string{"b"}, []string{"b"}, v1alpha1.ReasonAsExpected},
		{"from a host that is gone", 1, []string{"a"}, []*view{at("a", false, "u"), at("b", true)}, []string{"b"}, []string{"b"}, v1alpha1.ReasonAsExpected},
		{"from a host that never served it", 1, []string{"a"}, []*view{at("a", true), at("b", true)}, []string{"b"}, []string{"b"}, v1alpha1.ReasonAsExpected},
		{"one of two moves", 2, []string{"a", "b"}, []*view{at("a", true, "u"), at("b", true, "u"), at("c", true)}, []string{"a", "c"}, []string{"a", "c", "b"}, v1alpha1.ReasonMoving},
		{"too few", 2, []string{"a"}, []*view{at("a", true, "u")}, []string{"a"}, []string{"a"}, v1alpha1.ReasonTooFewHosts},
		{"nowhere", 1, nil, nil, nil, nil, v1alpha1.ReasonWaitingForHost},
	} {
		t.Run(test.name, func(t *testing.T) {
			tenant := &v1alpha1.Tenant{
				ObjectMeta: metav1.ObjectMeta{Name: "x", UID: "u"},
				Spec:       v1alpha1.TenantSpec{Replicas: test.replicas},
				Status:     v1alpha1.TenantStatus{Placement: test.placed},
			}
			c := planeWith(t, tenant)
			views := map[string]*view{}
			for _, v := range test.views {
				views[v.Name] = v
			}
			s := &hosts{host: &Host{log: slog.New(slog.DiscardHandler)}}
			stored := &v1alpha1.Tenant{}
			if err := c.Get(t.Context(), client.ObjectKey{Name: "x"}, stored); err != nil {
				t.Fatal(err)
			}
			if err := s.move(t.Context(), c, views, stored, placement.Decision{UID: "u", Hosts: test.decided, Reason: "a reason"}); err != nil {
				t.Fatal(err)
			}
			got := &v1alpha1.Tenant{}
			if err := c.Get(t.Context(), client.ObjectKey{Name: "x"}, got); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got.Status.Placement, test.want) {
				t.Errorf("placed on %q, want %q", got.Status.Placement, test.want)
			}
			placed := meta.FindStatusCondition(got.Status.Conditions, v1alpha1.ConditionPlaced)
			if placed == nil || placed.Reason != test.wantReason || !strings.Contains(placed.Message, "A reason") {
				t.Errorf("the condition is %+v, want the reason %s", placed, test.wantReason)
			}
			// Once more it is as it should be.
			version := got.ResourceVersion
			if err := s.move(t.Context(), c, views, got, placement.Decision{UID: "u", Hosts: test.decided, Reason: "another reason"}); err != nil {
				t.Fatal(err)
			}
			if got.ResourceVersion != version {
				t.Errorf("nothing changed, and the tenant was written: %+v", got.Status)
			}
		})
	}
}

// A tenant that is being removed is not waited for on hosts that are gone.
func TestRemovedTenantLeavesDeadHosts(t *testing.T) {
	tenant := &v1alpha1.Tenant{
		ObjectMeta: metav1.ObjectMeta{Name: "x", UID: "u", Finalizers: []string{v1alpha1.TenantFinalizer}},
		Status:     v1alpha1.TenantStatus{Placement: []string{"a", "b", "c"}},
	}
	c := planeWith(t, tenant)
	if err := c.Delete(t.Context(), tenant); err != nil {
		t.Fatal(err)
	}
	stored := &v1alpha1.Tenant{}
	if err := c.Get(t.Context(), client.ObjectKey{Name: "x"}, stored); err != nil {
		t.Fatal(err)
	}
	s := &hosts{host: &Host{log: slog.New(slog.DiscardHandler)}}
	if err := s.place(t.Context(), c, map[string]*view{"a": at("a", true, "u"), "b": at("b", false, "u")}, []v1alpha1.Tenant{*stored}); err != nil {
		t.Fatal(err)
	}
	if err := c.Get(t.Context(), client.ObjectKey{Name: "x"}, stored); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(stored.Status.Placement, []string{"a"}) {
		t.Errorf("placed on %q, want a alone, which lives", stored.Status.Placement)
	}
}

func TestHostsClash(t *testing.T) {
	a := hostEntry{Name: "a", Address: "192.0.2.1:443", Peer: "192.0.2.1:2380", Gossip: "192.0.2.1:7946"}
	b := hostEntry{Name: "b", Address: "192.0.2.2:443", Peer: "192.0.2.2:2380", Gossip: "192.0.2.2:7946"}
	for _, test := range []struct {
		change func(*hostEntry)
		want   string
	}{
		{func(*hostEntry) {}, ""},
		{func(e *hostEntry) { *e = a }, ""}, // it tries again
		{func(e *hostEntry) { e.Name = "a" }, `there is a host "a" already, at 192.0.2.1:443`},
		{func(e *hostEntry) { e.Address = a.Address }, `host "a" has the same address`},
		{func(e *hostEntry) { e.Peer = a.Peer }, `host "a" has the same peer address`},
		{func(e *hostEntry) { e.Gossip = a.Gossip }, `host "a" has the same gossip address`},
	} {
		e := b
		test.change(&e)
		if got := e.clash(a); got != test.want {
			t.Errorf("%+v beside %+v: %q, want %q", e, a, got, test.want)
		}
	}
}

// A host that is to be removed keeps its etcd until what ran there has stopped: it could
// not answer its last requests otherwise.
func TestRemovedHostFinishesFirst(t *testing.T) {
	object := &v1alpha1.Host{ObjectMeta: metav1.ObjectMeta{Name: "a", Finalizers: []string{v1alpha1.HostFinalizer}}}
	c := planeWith(t, object)
	s := &hosts{host: &Host{log: slog.New(slog.DiscardHandler)}} // without a store that could be changed
	v := at("a", true)
	v.runs = 1
	if err := s.remove(t.Context(), c, v, object, 0); err != nil {
		t.Fatal(err)
	}
	if err := c.Get(t.Context(), client.ObjectKey{Name: "a"}, object); err != nil {
		t.Fatal(err)
	}
	leaving := meta.FindStatusCondition(object.Status.Conditions, v1alpha1.ConditionLeaving)
	if leaving == nil || leaving.Reason != v1alpha1.ReasonDraining || !strings.Contains(leaving.Message, "last requests: 1") {
		t.Errorf("the condition is %+v", leaving)
	}
}

// What a newer version keeps in a status, and this one does not know, outlives what this one
// writes there.
func TestStatusKeepsWhatIsNewer(t *testing.T) {
	tenant := &v1alpha1.Tenant{ObjectMeta: metav1.ObjectMeta{Name: "x", UID: "u"}, Status: v1alpha1.TenantStatus{Placement: []string{"a"}}}
	var sent []byte
	c := interceptor.NewClient(planeWith(t, tenant).(client.WithWatch), interceptor.Funcs{
		SubResourcePatch: func(ctx context.Context, c client.Client, subresource string, o client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
			var err error
			if sent, err = patch.Data(o); err != nil {
				return err
			}
			return c.SubResource(subresource).Patch(ctx, o, patch, opts...)
		},
	})
	if err := c.Get(t.Context(), client.ObjectKey{Name: "x"}, tenant); err != nil {
		t.Fatal(err)
	}
	before := tenant.DeepCopy()
	tenant.Status.Placement = []string{"b"}
	if err := writeStatus(t.Context(), c, tenant, before); err != nil {
		t.Fatal(err)
	}
	if want := `{"metadata":{"resourceVersion":"` + before.ResourceVersion + `"},"status":{"placement":["b"]}}`; string(sent) != want {
		t.Errorf("sent is %s, want %s", sent, want)
	}
	if err := writeStatus(t.Context(), c, tenant, before); !apierrors.IsConflict(err) {
		t.Errorf("what was decided upon an older object is written: %v", err)
	}
}

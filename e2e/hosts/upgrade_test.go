// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// next is the program of the later version, which e2e/hosts/next makes.
const next = "tenantd-next"

// testUpgrade upgrades one host after the other, in the steps of docs/operations.md, while
// clients use all tenants. Whatever hosts of the later version say and keep has a field
// that the earlier does not know. What is upgraded stays so.
func testUpgrade(t *testing.T, in *installation) {
	first, second, third := in.hosts[0], in.hosts[1], in.hosts[2]
	before, after := version(t, "tenantd"), version(t, next)
	if before == after {
		t.Fatalf("both programs are %s", before)
	}
	h := in.beginWith(t, calmLimit)
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...)
	var away []span
	upgrade := func(host *host) {
		t.Helper()
		away = append(away, in.upgrade(t, h, host, next, after))
	}

	upgrade(first)
	if got, want := in.versions(t, second), fmt.Sprintf("%s %s %s", after, before, before); got != want {
		t.Errorf("hosts run %s, want %s", got, want)
	}
	if table := second.mustTenantctl(t, "hosts"); !strings.Contains(table, before+" ") || !strings.Contains(table, after+" ") {
		t.Errorf("tenantctl hosts does not show both versions:\n%s", table)
	}
	in.testMixed(t, h, first, second)
	// An earlier version that starts while a later one is there.
	away = append(away, in.upgrade(t, h, third, "tenantd", before))
	in.wantLater(t, second, in.tenants[0])

	upgrade(second)
	upgrade(third)
	if got, want := in.versions(t, first), fmt.Sprintf("%s %s %s", after, after, after); got != want {
		t.Errorf("hosts run %s, want %s", got, want)
	}
	in.recover(t, h)
	in.wantLater(t, first, in.tenants[0])
	// Who uses the host that is away has to use another one.
	failed := slices.DeleteFunc(h.end(t), func(op operation) bool {
		return slices.ContainsFunc(away, func(s span) bool { return op.host == s.host && op.end >= s.from && op.begin <= s.to })
	})
	wantRepeatable(t, failed, "through hosts that were not being upgraded")
}

// upgrade has a host run a program, and waits until all is well again. It returns when the
// host was away.
func (in *installation) upgrade(t *testing.T, h *history, host *host, program, version string) span {
	t.Helper()
	via := in.but(t, host)[0]
	via.mustTenantctl(t, "host", "drain", host.name, "--timeout", patience.String())
	s := span{host: host.name, from: h.now()}
	host.stop(t)
	host.program = program
	host.start(t)
	host.awaitReady(t)
	eventually(t, host.name+" runs "+version, func() error {
		object := &v1alpha1.Host{}
		if err := in.system(t, via).Get(context.Background(), client.ObjectKey{Name: host.name}, object); err != nil {
			return err
		}
		if object.Status.Version != version || object.Status.State != v1alpha1.HostDraining {
			return fmt.Errorf("it runs %s, and is %s", object.Status.Version, object.Status.State)
		}
		return nil
	})
	via.mustTenantctl(t, "host", "resume", host.name)
	in.recover(t, h)
	s.to = h.now()
	in.figures.add("upgrade: a host is drained, stopped, started and resumed", s.to-s.from)
	return s
}

// testMixed does with hosts of two versions what is done with hosts.
func (in *installation) testMixed(t *testing.T, h *history, later, earlier *host) {
	t.Helper()
	x := in.tenants[0]
	// To and fro, and on both at the same time.
	for _, hosts := range [][]*host{{earlier}, {later}, {earlier, later}, {earlier}} {
		in.pin(t, hosts[0], x, hosts...)
		h.awaitAnswers(t, h.now(), []*tenant{x}, in.hosts...)
	}
	// What a user sets through a later host, and what that host notes, is not lost by what
	// earlier ones write.
	c := in.system(t, later)
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("Tenant"))
	object.SetName(x.name)
	if err := c.Patch(t.Context(), object, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"later":"set"}}`))); err != nil {
		t.Fatal(err)
	}
	in.put(t, later, x, later)
	in.put(t, earlier, x, earlier)
	in.wantLater(t, earlier, x)

	// Tenants come and go.
	for _, hosts := range [][]*host{{later, earlier}, {earlier, later}} {
		name := "through-" + hosts[0].name
		hosts[0].mustTenantctl(t, "add", name, "--timeout", patience.String())
		hosts[1].mustTenantctl(t, "remove", name, "--yes", "--timeout", patience.String())
	}

	// A later host can join by a later one; an earlier one says that it is to be upgraded
	// first, and the token stays good.
	joins := in.lab.newHost("host-h", 18)
	joins.program = next
	token := earlier.token(t)
	mark := joins.log.mark()
	joins.start(t, "--join", earlier.port(), "--join-token-file", token)
	if code := joins.wait(t); code == 0 {
		t.Error("a request that was not understood whole was granted")
	}
	if said := joins.log.String()[mark:]; !strings.Contains(said, "host "+earlier.name) || !strings.Contains(said, "upgrade that host first") {
		t.Errorf("it is not said which host is to be upgraded:\n%s", said)
	}
	t.Logf("a later host that joins by an earlier one: %s", joins.log.Tail(1))
	in.join(t, joins, later, token)
	earlier.mustTenantctl(t, "host", "remove", joins.name, "--yes", "--timeout", patience.String())
	began := time.Now()
	if code := joins.wait(t); code == 0 {
		t.Errorf("%s, removed, ended with exit code 0", joins.name)
	}
	in.figures.add("remove: the daemon ends after its host is gone", time.Since(began))
	in.put(t, earlier, x, earlier) // for wantLater
}

// wantLater wants that what the later version knows, and the earlier does not, is there.
func (in *installation) wantLater(t *testing.T, via *host, x *tenant) {
	t.Helper()
	c := in.system(t, via)
	crd := &unstructured.Unstructured{}
	crd.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("Tenant"))
	eventually(t, "the definition and tenant "+x.name+" are read", func() error {
		if err := c.Get(context.Background(), client.ObjectKey{Name: "tenants.tenantd.io"}, crd); err != nil {
			return err
		}
		return c.Get(context.Background(), client.ObjectKey{Name: x.name}, object)
	})
	if got := crd.GetAnnotations()["tenantd.io/generation"]; got != "2" {
		t.Errorf("the definition of Tenant is of generation %s, want that of the later version", got)
	}
	set, _, _ := unstructured.NestedString(object.Object, "spec", "later")
	noted, _, _ := unstructured.NestedString(object.Object, "status", "later")
	if set != "set" || !strings.HasPrefix(noted, "noted by ") {
		t.Errorf("of what the later version knows, %q and %q are left", set, noted)
	}
}

// versions are those of the hosts, in their order, as one of them has them.
func (in *installation) versions(t *testing.T, via *host) string {
	t.Helper()
	var list v1alpha1.HostList
	if err := json.Unmarshal([]byte(via.mustTenantctl(t, "hosts", "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, h := range in.hosts {
		for _, o := range list.Items {
			if o.Name == h.name {
				all = append(all, o.Status.Version)
			}
		}
	}
	return strings.Join(all, " ")
}

// version is what a program says that it is.
func version(t *testing.T, program string) string {
	t.Helper()
	var v struct{ Version string }
	said := execute(t, exec.Command(bin(t, program), "version", "-o", "json")).must(t, filepath.Base(program)+" version")
	if err := json.Unmarshal([]byte(said), &v); err != nil || v.Version == "" {
		t.Fatalf("%s version: %v: %s", program, err, said)
	}
	return v.Version
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/tls"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// TestSleep has tenants stop and start again as their users see it.
func TestSleep(t *testing.T) {
	h := startHost(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T, *host)
	}{
		{"OnRequest", testSleepOnRequest},
		{"Work", testWorkKeepsAwake},
		{"ByItself", testSleepByItself},
		{"Created", testCreatedAsleep},
		{"Restart", testAsleepOverRestart},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, h.of(t)) })
	}
	h.noPanics()
}

// awaitAsleep waits until a tenant says that it is asleep.
func (h *host) awaitAsleep(name string) {
	h.t.Helper()
	eventually(h.t, name+" is asleep", func() error {
		tenant, err := h.tenant(name)
		if err != nil {
			return err
		}
		if tenant.Status.Phase != v1alpha1.TenantAsleep || tenant.Status.AsleepSince == nil || readiness(tenant).Reason != v1alpha1.ReasonAsleep {
			return fmt.Errorf("phase %s, since %v, %+v", tenant.Status.Phase, tenant.Status.AsleepSince, readiness(tenant))
		}
		return nil
	})
}

func testSleepOnRequest(t *testing.T, h *host) {
	kubeconfig := h.add("acme")
	c := client(t, kubeconfig)
	put(t, c, "keepsake", "kept")
	if got, want := h.mustTenantctl("sleep", "acme"), "tenant acme is asleep\n"; got != want {
		t.Errorf("tenantctl sleep says %q, want %q", got, want)
	}
	h.awaitAsleep("acme")
	contains(t, "tenantctl list", h.mustTenantctl("list"), "Asleep")
	contains(t, "tenantctl get", h.mustTenantctl("get", "acme"), "Awake", "False", "tenantctl wake")
	if _, err := h.get("/readyz"); err != nil {
		t.Errorf("the host is not ready with a tenant that is asleep: %v", err)
	}
	h.mustTenantctl("sleep", "acme") // it is already

	// One command wakes it and gets its answer.
	if got := mustKubectl(t, kubeconfig, "", "get", "configmap", "keepsake", "-o", "jsonpath={.data}"); !strings.Contains(got, "kept") {
		t.Errorf("the tenant woke with %q", got)
	}
	if tenant := h.awaitTenant("acme"); tenant.Status.AsleepSince != nil {
		t.Errorf("it is awake, and asleep since %s", tenant.Status.AsleepSince)
	}

	h.mustTenantctl("sleep", "acme")
	if got, want := h.mustTenantctl("wake", "acme"), "tenant acme is awake\n"; got != want {
		t.Errorf("tenantctl wake says %q, want %q", got, want)
	}
	h.mustTenantctl("wake", "acme") // it is already
	if got := h.mustTenantctl("wake", "acme", "-o", "name"); got != "tenant.tenantd.io/acme\n" {
		t.Errorf("-o name says %q", got)
	}
	h.fails(3, []string{`"nobody" does not exist`}, "sleep", "nobody")
	h.fails(3, []string{`"nobody" does not exist`}, "wake", "nobody")
	h.fails(2, []string{"accepts 1 arg"}, "sleep")

	// What needs the API server wakes it, too.
	h.mustTenantctl("sleep", "acme")
	h.kubeconfig("acme")
	h.awaitAsleep("acme")
	contains(t, "join-command", h.mustTenantctl("join-command", "acme"), "kubeadm join acme."+domain)
	h.awaitTenant("acme")
}

// refusesSleep checks that a tenant is not put to sleep because of what it has.
func (h *host) refusesSleep(name string, why ...string) {
	h.t.Helper()
	r := h.tenantctl("sleep", name)
	if r.code != 1 || r.stdout != "" {
		h.t.Errorf("tenantctl sleep: code %d, want 1\n%s%s", r.code, r.stdout, r.stderr)
	}
	contains(h.t, "tenantctl sleep", r.stderr, why...)
	if tenant := h.awaitTenant(name); tenant.Annotations[v1alpha1.RequestAnnotation] != "" {
		h.t.Errorf("the request stays: %v", tenant.Annotations)
	}
}

func testWorkKeepsAwake(t *testing.T, h *host) {
	kubeconfig := h.kubeconfig("acme")
	h.mustTenantctl("wake", "acme")
	mustKubectl(t, kubeconfig, "", "create", "cronjob", "nightly", "--image=none", "--schedule=0 0 * * *")
	h.refusesSleep("acme", "CronJob default/nightly")
	mustKubectl(t, kubeconfig, "", "patch", "cronjob", "nightly", "-p", `{"spec":{"suspend":true}}`)

	mustKubectl(t, kubeconfig, "apiVersion: v1\nkind: Node\nmetadata: {name: worker}\n", "create", "-f", "-")
	h.refusesSleep("acme", "node worker")
	mustKubectl(t, kubeconfig, "", "delete", "node", "worker")

	mustKubectl(t, kubeconfig, "", "create", "namespace", "ending")
	mustKubectl(t, kubeconfig, "", "create", "configmap", "held", "--namespace=ending")
	hold := func(finalizers string) {
		t.Helper()
		mustKubectl(t, kubeconfig, "", "patch", "configmap", "held", "--namespace=ending", "--type=merge", "-p", `{"metadata":{"finalizers":`+finalizers+`}}`)
	}
	hold(`["example.com/held"]`)
	mustKubectl(t, kubeconfig, "", "delete", "namespace", "ending", "--wait=false")
	h.refusesSleep("acme", "namespace ending")
	hold("null")
	mustKubectl(t, kubeconfig, "", "wait", "--for=delete", "namespace/ending", "--timeout="+patience.String())
}

func testSleepByItself(t *testing.T, h *host) {
	patch := func(sleep string) {
		t.Helper()
		mustKubectl(t, h.adminKubeconfig(), "", "patch", "tenant", "acme", "--type=merge", "-p", `{"spec":{"sleep":`+sleep+`}}`)
	}
	kubeconfig := h.kubeconfig("acme")
	c := client(t, kubeconfig)
	events, err := c.CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer events.Stop()
	if first := <-events.ResultChan(); first.Type != watch.Added {
		t.Fatalf("the watch began with %+v", first)
	}
	h.refusesSleep("acme", "clients watch it")
	patch(`{"after":"10s"}`)
	// Longer than it would take: the watch outlasts the test of it.
	eventually(t, "it says when it falls asleep", func() error {
		if got := h.mustTenantctl("get", "acme"); !strings.Contains(got, "nobody has used it for 10s") {
			return fmt.Errorf("conditions:\n%s", got)
		}
		return nil
	})
	events.Stop()
	h.awaitAsleep("acme")

	// A stranger wakes it, and has it only for a while.
	conn, err := tls.Dial("tcp", h.listen, &tls.Config{ServerName: "acme." + domain, InsecureSkipVerify: true})
	if err != nil {
		t.Fatalf("shake hands with a tenant that was asleep: %v", err)
	}
	conn.Close()
	h.awaitTenant("acme")
	h.awaitAsleep("acme")

	patch(`{"enabled":false}`)
	mustKubectl(t, kubeconfig, "", "get", "namespaces")
	h.awaitTenant("acme")
	contains(t, "tenantctl get", h.mustTenantctl("get", "acme"), "does not fall asleep by itself")
}

func testCreatedAsleep(t *testing.T, h *host) {
	contains(t, "tenantctl add --asleep", h.mustTenantctl("add", "later", "--asleep"), "tenant later is asleep at https://later."+domain)
	h.awaitAsleep("later")
	put(t, client(t, h.kubeconfig("later")), "first", "kept")
	h.awaitTenant("later")
	h.mustTenantctl("add", "never", "--asleep")
	uid := string(h.mustTenant("never").UID)
	h.mustTenantctl("remove", "never", "--yes")
	h.awaitGone("never", uid)
}

func testAsleepOverRestart(t *testing.T, h *host) {
	kubeconfig := h.kubeconfig("later")
	h.mustTenantctl("sleep", "later")
	h.stop()
	h.start()
	h.awaitReady()
	h.awaitAsleep("later")
	h.awaitTenant("acme")
	if log := h.log.String(); strings.Contains(log, "tenant wakes") || strings.Contains(log, `"control plane is ready" tenant=later`) {
		t.Errorf("the tenant was started with the host:\n%s", h.log.Tail(40))
	}
	if got := mustKubectl(t, kubeconfig, "", "get", "configmap", "first", "-o", "jsonpath={.data}"); !strings.Contains(got, "kept") {
		t.Errorf("after the restart the tenant woke with %q", got)
	}
	h.awaitTenant("later")
}

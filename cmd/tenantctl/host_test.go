// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// serving is what a host that is well says of itself.
func serving(tenants int32) func(*v1alpha1.Host) {
	return func(h *v1alpha1.Host) {
		h.Status.State, h.Status.Role, h.Status.Version = v1alpha1.HostReady, v1alpha1.HostVoter, "v0.3.0"
		h.Status.Address = "192.0.2.1:443"
		h.Status.ObservedGeneration = h.Generation
		h.Status.Tenants = &tenants
		h.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAsExpected, Message: "Serves."}}
	}
}

// draining is what a host says that has seen that it is to be drained.
func draining(tenants int32, message string) func(*v1alpha1.Host) {
	return func(h *v1alpha1.Host) {
		serving(tenants)(h)
		h.Status.State = v1alpha1.HostDraining
		h.Status.Conditions = append(h.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionDraining, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonDraining, Message: message})
	}
}

// silent is what others say of a host that has fallen silent.
func silent(h *v1alpha1.Host) {
	serving(2)(h)
	h.Status.State = v1alpha1.HostNotReady
	h.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionUnknown, Reason: v1alpha1.ReasonNoHeartbeat, Message: "Has said nothing for 20s."}}
}

func TestHosts(t *testing.T) {
	p := startPlane(t)
	s := &session{t: t, plane: p}
	s.run("hosts").succeeds("")
	if s.err != "There are no hosts.\n" {
		t.Errorf("said %q", s.err)
	}
	used, total, load := resource.MustParse("1Gi"), resource.MustParse("4Gi"), resource.MustParse("350m")
	p.hosts.set("host-b", draining(1, "1 tenant is on its way."))
	p.hosts.set("host-a", func(h *v1alpha1.Host) {
		serving(12)(h)
		h.Status.Memory = v1alpha1.HostMemory{Used: &used, Total: &total}
		h.Status.Cores, h.Status.Load = 2, &load
		h.Status.Etcd = &v1alpha1.HostEtcd{Leader: true}
		h.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "someone"}}
	})
	p.hosts.set("host-c", func(h *v1alpha1.Host) {
		h.Status.Role, h.Status.Etcd = v1alpha1.HostLearner, &v1alpha1.HostEtcd{Lag: 120}
		h.Status.Cores = 4
	})
	p.hosts.set("host-d", func(h *v1alpha1.Host) {
		silent(h)
		h.Status.Etcd = &v1alpha1.HostEtcd{}
	})
	const table = `NAME     ROLE      STATE      VERSION   TENANTS   AGE
host-a   voter     Ready      v0.3.0    12        -
host-b   voter     Draining   v0.3.0    1         -
host-c   learner   Joining    -         -         -
host-d   voter     NotReady   v0.3.0    2         -
`
	for _, test := range []struct{ args, want string }{
		{"hosts", table},
		{"host list", table},
		{"host ls", table},
		{"hosts -o wide", `NAME     ROLE      STATE      VERSION   TENANTS   AGE   ADDRESS         MEMORY    ETCD       LOAD
host-a   voter     Ready      v0.3.0    12        -     192.0.2.1:443   1Gi/4Gi   leader     350m/2
host-b   voter     Draining   v0.3.0    1         -     192.0.2.1:443   -         -          -
host-c   learner   Joining    -         -         -     -               -         lag=120    -/4
host-d   voter     NotReady   v0.3.0    2         -     192.0.2.1:443   -         follower   -
`},
		{"hosts -o name", "host.tenantd.io/host-a\nhost.tenantd.io/host-b\nhost.tenantd.io/host-c\nhost.tenantd.io/host-d\n"},
		{"host get host-a -o name", "host.tenantd.io/host-a\n"},
		{"host get host-b", `NAME     ROLE    STATE      VERSION   TENANTS   AGE
host-b   voter   Draining   v0.3.0    1         -

CONDITION   STATUS   SINCE   REASON       MESSAGE
Ready       True     -       AsExpected   Serves.
Draining    True     -       Draining     1 tenant is on its way.
`},
		{"host get host-c -o yaml", `apiVersion: tenantd.io/v1alpha1
kind: Host
metadata:
  generation: 1
  name: host-c
  uid: uid-of-host-c
status:
  cores: 4
  etcd:
    lag: 120
    leader: false
  role: learner
`},
	} {
		t.Run(test.args, func(t *testing.T) {
			(&session{t: t, plane: p}).run(strings.Fields(test.args)...).succeeds(test.want)
		})
	}
	if s.run("hosts", "-o", "json"); !strings.Contains(s.out, `"kind": "HostList"`) || !strings.Contains(s.out, `"kind": "Host"`) || strings.Contains(s.out, "managedFields") {
		t.Errorf("JSON is\n%s", s.out)
	}
}

func TestHostToken(t *testing.T) {
	const token = "abcdef.0123456789abcdef.e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855.system.k8s.example.com"
	p := startPlane(t)
	p.hostAnswer = v1alpha1.HostTokenRequestStatus{
		Token: token, Servers: []string{"192.0.2.10:443"}, Command: v1alpha1.HostJoinCommand("192.0.2.10:443", v1alpha1.DefaultHostTokenFile),
		ExpirationTimestamp: metav1.NewTime(time.Unix(1800000000, 0)),
	}
	s := (&session{t: t, plane: p}).run("host", "token")
	s.succeeds(token + "\n")
	want := "One host can join until 2027-01-15T08:00:00Z. On the new machine, put it into /etc/tenantd/join-token, and run:\n" +
		"  tenantd run --join 192.0.2.10:443 --join-token-file /etc/tenantd/join-token\n"
	if s.err != want {
		t.Errorf("said\n%s\nwant\n%s", s.err, want)
	}
	if p.hostToken.Spec.TTLSeconds != 3600 || p.hostToken.Kind != v1alpha1.HostTokenRequestKind {
		t.Errorf("asked for %+v", p.hostToken)
	}

	path := filepath.Join(t.TempDir(), "token")
	s.run("host", "token", "--ttl", "90m", "--output", path).succeeds("")
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 || readFile(t, path) != token+"\n" {
		t.Errorf("mode %v, error %v, content %q", info.Mode(), err, readFile(t, path))
	}
	if p.hostToken.Spec.TTLSeconds != 90*60 || !strings.Contains(s.err, "put "+path+" into /etc/tenantd/join-token") || strings.Contains(s.err, token) {
		t.Errorf("asked for %+v, said %q", p.hostToken.Spec, s.err)
	}
	(&session{t: t, plane: p}).run("host", "token", "--output", filepath.Join(path, "x")).fails(exitFailed, "write the token")

	p.hostAnswer.Token = "abcdef.0123456789abcdef"
	(&session{t: t, plane: p}).run("host", "token").fails(exitFailed, "another version")
}

func TestHostDrain(t *testing.T) {
	p := startPlane(t)
	// The status says that there is no tenant, but it is older than the wish.
	p.hosts.set("host-a", serving(0))
	p.hosts.onPatch = func(h *v1alpha1.Host) {
		go func() {
			p.hosts.set("host-a", func(h *v1alpha1.Host) { h.Status.HeartbeatTime = metav1.Now() })
			p.hosts.set("host-a", draining(2, "2 tenants are on their way."))
			p.hosts.set("host-a", draining(1, "No other host has room for acme."))
			p.hosts.set("host-a", draining(0, ""))
		}()
	}
	s := (&session{t: t, plane: p}).run("host", "drain", "host-a")
	s.succeeds("host host-a is drained\n")
	const progress = `host-a: Ready, 0 tenants
host-a: Draining, 2 tenants: 2 tenants are on their way.
host-a: Draining, 1 tenant: No other host has room for acme.
host-a: Draining, 0 tenants
`
	// Where the watch begins is a matter of luck; what it ends with is not.
	if !strings.HasSuffix(progress, s.err) || !strings.HasSuffix(s.err, "host-a: Draining, 0 tenants\n") {
		t.Errorf("progress is\n%s", s.err)
	}
	if got, want := strings.Join(p.hosts.patched, "\n"), `{"spec":{"draining":true}}`; got != want {
		t.Errorf("sent %s, want %s", got, want)
	}

	p.hosts.onPatch = nil
	s.run("host", "drain", "host-a").succeeds("host host-a is drained\n") // again, which changes nothing
	s.run("host", "resume", "host-a").succeeds("host host-a takes tenants again\n")
	if p.hosts.objects["host-a"].Spec.Draining {
		t.Error("the host is still draining")
	}
	s.run("host", "drain", "host-a", "--wait=false").succeeds("host host-a is being drained\n")

	p.hosts.set("host-a", draining(3, "No other host has room."))
	s.run("host", "drain", "host-a", "--timeout", "200ms").fails(exitTimedOut, "not drained after 200ms (Draining, 3 tenants: No other host has room.)", "tenantctl host resume host-a")
	if !p.hosts.objects["host-a"].Spec.Draining {
		t.Error("the host is not draining any more")
	}
}

// A host that has never said how many tenants it has is not empty, nor is one that
// said so before it was told to take no more.
func TestHostDrainOfAHostThatSaysNothing(t *testing.T) {
	p := startPlane(t)
	p.hosts.set("host-b", serving(0))
	(&session{t: t, plane: p}).run("host", "drain", "host-b", "--timeout", "200ms").fails(exitTimedOut, "(Ready, 0 tenants)")
	p.hosts.set("host-a", func(h *v1alpha1.Host) { h.Status.ObservedGeneration = 99 })
	(&session{t: t, plane: p}).run("host", "drain", "host-a", "--timeout", "200ms").fails(exitTimedOut, "(Joining)")
}

func TestHostDrainThatEndsOtherwise(t *testing.T) {
	p := startPlane(t)
	for _, test := range []struct {
		onPatch func(*v1alpha1.Host)
		want    string
	}{
		{func(*v1alpha1.Host) { p.hosts.remove("host-a") }, "was removed while it was draining"},
		{func(*v1alpha1.Host) { p.hosts.set("host-a", func(h *v1alpha1.Host) { h.UID = "another" }) }, "was removed while it was draining"},
		{func(*v1alpha1.Host) { p.hosts.set("host-a", func(h *v1alpha1.Host) { h.Spec.Draining = false }) }, "was resumed while it was draining"},
	} {
		p.hosts.set("host-a", serving(2))
		p.hosts.onPatch = test.onPatch
		(&session{t: t, plane: p}).run("host", "drain", "host-a").fails(exitFailed, test.want)
	}
}

func TestHostDrainInterrupted(t *testing.T) {
	p := startPlane(t)
	p.hosts.set("host-a", serving(2))
	ctx, interrupt := context.WithCancel(t.Context())
	p.refuse = func(r *http.Request) *apierrors.StatusError {
		if r.URL.Query().Get("watch") != "" {
			interrupt()
		}
		return nil
	}
	(&session{t: t, plane: p, ctx: ctx}).run("host", "drain", "host-a").fails(exitFailed, "interrupted", `"host-a" goes on draining`, "tenantctl host resume host-a")
}

func TestHostRemove(t *testing.T) {
	p := startPlane(t)
	p.hosts.set("host-a", serving(2))
	(&session{t: t, plane: p, terminal: true, in: "host-b\n"}).run("host", "remove", "host-a").fails(exitFailed, `not "host-a"; nothing was removed`)
	(&session{t: t, plane: p, in: "host-a\n"}).run("host", "remove", "host-a").fails(exitUsage, "--yes")
	(&session{t: t, plane: p}).run("host", "remove", "host-a", "--yes", "--force").fails(exitFailed, "without --force")
	if p.hosts.objects["host-a"] == nil || len(p.hosts.patched) > 0 {
		t.Fatal("the host is gone or changed")
	}

	now := metav1.Now()
	leaving := func(h *v1alpha1.Host) {
		h.DeletionTimestamp = &now
		draining(1, "1 tenant is on its way.")(h)
		h.Status.Conditions = append(h.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionLeaving, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonUnsafe, Message: "Waits for host-b to catch up."})
	}
	p.hosts.onDelete = func(h *v1alpha1.Host) { p.hosts.set(h.Name, leaving) }
	s := &session{t: t, plane: p}
	s.run("host", "remove", "host-a", "--yes", "--timeout", "200ms").fails(exitTimedOut, "(Draining, 1 tenant: Waits for host-b to catch up.)", "the removal of host \"host-a\" goes on")
	s.run("host", "resume", "host-a").fails(exitFailed, "being removed", "tenantctl host token")
	s.run("host", "remove", "host-a", "--yes", "--wait=false").succeeds("host host-a is being removed\n")
	if _, ok := p.hosts.objects["host-a"].Annotations[v1alpha1.HostLostAnnotation]; ok {
		t.Error("the host was given up for lost")
	}

	p.hosts.set("host-a", serving(2))
	p.hosts.onDelete = func(h *v1alpha1.Host) {
		go func() {
			p.hosts.set(h.Name, leaving)
			p.hosts.remove(h.Name)
		}()
	}
	(&session{t: t, plane: p, terminal: true, in: "host-a\n"}).run("host", "remove", "host-a").succeeds("host host-a removed\n")
	p.hosts.set("host-a", serving(2))
	p.hosts.onDelete = func(h *v1alpha1.Host) { p.hosts.set(h.Name, func(h *v1alpha1.Host) { h.UID = "another" }) }
	s.run("host", "rm", "host-a", "--yes").succeeds("host host-a removed\n") // its successor is not what is waited for
}

func TestHostRemoveOfALostHost(t *testing.T) {
	p := startPlane(t)
	p.hosts.set("host-a", silent)
	s := &session{t: t, plane: p}
	s.run("host", "remove", "host-a", "--yes").fails(exitFailed, "does not answer", "--force")
	if p.hosts.objects["host-a"] == nil {
		t.Fatal("the host is gone")
	}
	p.hosts.onDelete = func(h *v1alpha1.Host) {
		if h.Annotations[v1alpha1.HostLostAnnotation] != "true" {
			t.Errorf("removed with annotations %v", h.Annotations)
		}
		p.hosts.remove(h.Name)
	}
	s.run("host", "remove", "host-a", "--yes", "--force").succeeds("host host-a removed\n")
	if got, want := strings.Join(p.hosts.patched, "\n"), `{"metadata":{"annotations":{"tenantd.io/lost":"true"}}}`; got != want {
		t.Errorf("sent %s, want %s", got, want)
	}

	// One that has never been heard of can be given up, too.
	p.hosts.set("host-b", func(*v1alpha1.Host) {})
	s.run("host", "remove", "host-b", "--yes", "--force").succeeds("host host-b removed\n")
}

// placed is what hosts do to a tenant that runs on them.
func placed(hosts ...string) func(*v1alpha1.Tenant) {
	return func(t *v1alpha1.Tenant) {
		replicas := t.Spec.Replicas
		makeReady(t)
		t.Spec.Replicas = max(1, replicas)
		t.Status.Placement = hosts
		t.Status.ObservedGeneration = t.Generation
	}
}

func TestMove(t *testing.T) {
	p := startPlane(t)
	for _, name := range []string{"host-a", "host-b", "host-c"} {
		p.hosts.set(name, serving(1))
	}
	p.set("acme", placed("host-a"))
	p.tenants.onPatch = func(*v1alpha1.Tenant) {
		go func() {
			p.set("acme", func(t *v1alpha1.Tenant) { t.Status.Nodes = new(int32) }) // by who has not seen the wish
			p.set("acme", func(t *v1alpha1.Tenant) {
				placed("host-b", "host-a")(t)
				t.Status.Phase = v1alpha1.TenantMoving
			})
			p.set("acme", func(t *v1alpha1.Tenant) {
				placed("host-b")(t)
				t.Status.Conditions[0].Status, t.Status.Conditions[0].Message = metav1.ConditionFalse, "Not yet."
			})
			p.set("acme", placed("host-b"))
		}()
	}
	s := (&session{t: t, plane: p}).run("move", "acme", "--to", "host-b")
	s.succeeds("tenant acme runs on host-b\n")
	if !strings.HasSuffix(s.err, "acme: Ready on host-b\n") {
		t.Errorf("progress is\n%s", s.err)
	}
	p.tenants.onPatch = nil
	s.run("move", "acme", "--to", "host-b").succeeds("tenant acme runs on host-b\n") // it is there
	s.run("move", "acme", "--to", "host-c", "--wait=false").succeeds("tenant acme is being moved\n")
	p.tenants.onPatch = func(*v1alpha1.Tenant) { p.set("acme", placed("host-b")) }
	s.run("move", "acme", "--anywhere").succeeds("tenant acme runs on host-b\n")
	want := `{"spec":{"placement":{"hosts":["host-b"]}}}
{}
{"spec":{"placement":{"hosts":["host-c"]}}}
{"spec":{"placement":null}}`
	if got := strings.Join(p.tenants.patched, "\n"); got != want {
		t.Errorf("sent\n%s\nwant\n%s", got, want)
	}
}

func TestMoveOfReplicas(t *testing.T) {
	for _, test := range []struct {
		replicas int32
		wish     string
		place    []string
		done     bool
	}{
		{1, "host-b", []string{"host-b"}, true},
		{1, "host-b", []string{"host-a"}, false},
		{1, "host-b", nil, false},
		{1, "host-b", []string{"host-a", "host-b"}, false}, // the old one has not stopped
		{1, "host-b host-c", []string{"host-c"}, true},
		{2, "host-b", []string{"host-a", "host-b"}, true},
		{2, "host-b host-c", []string{"host-a", "host-b"}, false},
		{2, "host-b host-c", []string{"host-c", "host-b"}, true},
		{3, "host-b host-c", []string{"host-c", "host-b"}, true}, // there are no more hosts
		{0, "host-b", []string{"host-b"}, true},
		{2, "", []string{"host-a"}, true},
	} {
		tenant := &v1alpha1.Tenant{
			Spec:   v1alpha1.TenantSpec{Replicas: test.replicas, Placement: v1alpha1.TenantPlacement{Hosts: strings.Fields(test.wish)}},
			Status: v1alpha1.TenantStatus{Placement: test.place},
		}
		if got := placedAsWished(tenant); got != test.done {
			t.Errorf("%+v: %v", test, got)
		}
	}
}

func TestMoveThatFails(t *testing.T) {
	p := startPlane(t)
	p.hosts.set("host-a", serving(1))
	p.hosts.set("host-b", func(h *v1alpha1.Host) { h.Spec.Draining = true })
	now := metav1.Now()
	p.hosts.set("host-c", func(h *v1alpha1.Host) { h.DeletionTimestamp = &now })
	p.set("acme", placed("host-b"))
	s := &session{t: t, plane: p}
	s.run("move", "acme", "--to", "host-x").fails(exitNotFound, `host "host-x" does not exist`, "tenantctl hosts")
	s.run("move", "acme", "--to", "host-b").fails(exitFailed, "drained", "tenantctl host resume host-b")
	s.run("move", "acme", "--to", "host-a", "--to", "host-c").fails(exitFailed, `"host-c" is being removed`)
	if len(p.tenants.patched) > 0 {
		t.Errorf("sent %v", p.tenants.patched)
	}

	// It has always been there, but who places it has not seen that it is to stay.
	p.set("beta", placed("host-a"))
	s.run("move", "beta", "--to", "host-a", "--timeout", "200ms").fails(exitTimedOut, "(Ready on host-a)")

	p.tenants.onPatch = func(*v1alpha1.Tenant) {
		p.set("acme", func(t *v1alpha1.Tenant) {
			placed("host-b")(t)
			t.Status.Conditions = append(t.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionPlaced, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonHostNotAvailable, Message: "host-a has no room."})
		})
	}
	s.run("move", "acme", "--to", "host-a", "--timeout", "200ms").fails(exitTimedOut, "not moved after 200ms (Ready on host-b: host-a has no room.)", "tenantctl move acme --anywhere")

	p.tenants.onPatch = func(*v1alpha1.Tenant) {
		p.set("acme", func(t *v1alpha1.Tenant) {
			placed("host-a")(t)
			t.Status.Phase = v1alpha1.TenantFailed
			t.Status.Conditions = []metav1.Condition{condition(v1alpha1.ConditionReady, metav1.ConditionFalse, "It ended.")}
		})
	}
	s.run("move", "acme", "--to", "host-a", "--timeout", "200ms").fails(exitTimedOut, "not moved after 200ms (Failed on host-a: It ended.)", "tenantctl get acme")

	// A failure passes: the host tries again.
	p.tenants.onPatch = func(*v1alpha1.Tenant) {
		p.set("acme", func(t *v1alpha1.Tenant) {
			placed("host-a")(t)
			t.Status.Phase = v1alpha1.TenantFailed
			t.Status.Conditions = []metav1.Condition{condition(v1alpha1.ConditionReady, metav1.ConditionFalse, "It ended. It is tried again in 1s.")}
		})
		go p.set("acme", placed("host-a"))
	}
	s.run("move", "acme", "--to", "host-a").succeeds("tenant acme runs on host-a\n")

	p.tenants.onPatch = func(*v1alpha1.Tenant) { p.remove("acme") }
	s.run("move", "acme", "--to", "host-a").fails(exitFailed, "was removed")
}

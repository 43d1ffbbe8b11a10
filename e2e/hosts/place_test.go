// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// testAnyHostAnswers asks every tenant through every host, and looks whose address the
// audit logs have.
func testAnyHostAnswers(t *testing.T, in *installation) {
	for n, x := range in.tenants {
		in.pin(t, in.hosts[0], x, in.hosts[n%len(in.hosts)])
	}
	in.awaitWell(t)
	for _, x := range in.tenants {
		on := in.hostOf(t, x)
		for _, via := range in.hosts {
			for _, from := range []string{clients, otherClient} {
				mark := fmt.Sprintf("through-%s-from-%s", via.name, from)
				c := newRegisterClient(t, x, via)
				c.config = x.through(via, from)
				if err := c.renew(); err != nil {
					t.Fatal(err)
				}
				if _, err := c.do(t.Context(), "GET", "?labelSelector=asked%3D"+mark, nil); err != nil {
					t.Errorf("%s through %s: %v", x.name, via.name, err)
					continue
				}
				lines := in.audit(t, x, func(l auditLine) bool { return strings.HasSuffix(l.RequestURI, mark) })
				if len(lines) != 1 || lines[0].host != on.name || !slices.Equal(lines[0].SourceIPs, []string{from}) {
					t.Errorf("%s, on %s, asked through %s by %s: the audit log has %+v", x.name, on.name, via.name, from, lines)
				}
			}
		}
	}
}

// testMove moves a tenant from host to host while clients use it.
func testMove(t *testing.T, in *installation) {
	x := in.tenants[0]
	in.pin(t, in.hosts[0], x, in.hosts[0])
	in.awaitWell(t)
	h := in.beginWith(t, calmLimit)
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...)
	const moves = 10
	for n := range moves {
		began := h.now()
		in.pin(t, in.hosts[0], x, in.hosts[(n+1)%len(in.hosts)])
		in.figures.add("move: a tenant is ready on the new host and gone from the old one", h.now()-began)
		h.awaitAnswers(t, h.now(), []*tenant{x}, in.hosts...)
	}
	wantRepeatable(t, h.end(t), fmt.Sprintf("during %d moves", moves))
}

// wantRepeatable wants nothing to have failed but what a client of Kubernetes sends
// again by itself, since it was told so and nothing was done: answers with status 429.
func wantRepeatable(t testing.TB, failed []operation, when string) {
	t.Helper()
	if len(failed) == 0 {
		t.Logf("no request failed %s", when)
		return
	}
	logFailed(t, failed)
	t.Logf("%d requests failed %s", len(failed), when)
	for _, op := range failed {
		if s, ok := op.err.(*statusError); !ok || s.code != http.StatusTooManyRequests {
			t.Errorf("requests failed %s that clients do not send again", when)
			return
		}
	}
}

// testReplicas runs a tenant on two hosts and takes away the one with its controllers.
func testReplicas(t *testing.T, in *installation) {
	x, via := in.tenants[1], in.hosts[0]
	pair := in.hosts[1:]
	began := time.Now()
	in.put(t, via, x, pair...)
	in.figures.add("replicas: a second one is ready", time.Since(began))
	for _, h := range pair {
		eventually(t, h.name+" serves "+x.name+" itself", func() error {
			mark := fmt.Sprintf("itself-%s-%d", h.name, time.Now().UnixNano())
			c := newRegisterClient(t, x, h)
			if _, err := c.do(t.Context(), "GET", "?labelSelector=asked%3D"+mark, nil); err != nil {
				return err
			}
			lines := in.audit(t, x, func(l auditLine) bool { return strings.HasSuffix(l.RequestURI, mark) })
			if len(lines) != 1 || lines[0].host != h.name {
				return fmt.Errorf("the audit log has %+v", lines)
			}
			return nil
		})
	}
	leads := in.follow(t, x, via)
	h := in.begin(t)
	defer h.end(t)
	etcd := via.etcd(t)
	var lead, other *host
	eventually(t, "one of the two has the lead", func() error {
		name, err := in.lead(etcd, x)
		switch {
		case err != nil:
			return err
		case name == pair[0].name:
			lead, other = pair[0], pair[1]
		case name == pair[1].name:
			lead, other = pair[1], pair[0]
		default:
			return fmt.Errorf("%s has it", name) // where it was before
		}
		return nil
	})
	since := time.Now()
	eventually(t, "the controllers work", func() error { return in.controllersOn(t, x, since, lead) })
	time.Sleep(2 * time.Second) // for what must not come
	if err := in.controllersOn(t, x, since, other); err == nil {
		t.Errorf("%s leads %s, and controllers write on %s too", lead.name, x.name, other.name)
	}

	at, when := h.now(), time.Now()
	lead.kill(t)
	for _, took := range h.awaitAnswers(t, at, []*tenant{x}, in.but(t)...) {
		in.figures.add("replicas: writes after the one with the controllers was killed", took)
	}
	eventually(t, "the other one's controllers work", func() error { return in.controllersOn(t, x, when, other) })
	in.figures.add("replicas: controllers work after theirs was killed", time.Since(when))
	lead.start(t)
	lead.awaitReady(t)
	in.recover(t, h)
	leads.check(t, when, other)
}

// placing is the host that places tenants, and removes hosts.
func (in *installation) placing(t testing.TB) (found *host) {
	t.Helper()
	eventually(t, "a host places tenants", func() error {
		name, err := in.lead(in.hosts[0].etcd(t), &tenant{name: "placement", uid: "placement"})
		if err == nil {
			found = in.host(t, name)
		}
		return err
	})
	return found
}

// testDrainAndRemove takes a host out of the installation, and in again.
func testDrainAndRemove(t *testing.T, in *installation) {
	// It is itself the one that removes hosts.
	gone := in.placing(t)
	others := in.but(t, gone)
	via := others[0]
	for _, x := range in.tenants[:2] {
		in.pin(t, via, x, gone)
	}
	h := in.beginWith(t, calmLimit)
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...)

	c := in.system(t, via)
	began := h.now()
	eventually(t, gone.name+" is told to drain", func() error {
		object := &v1alpha1.Host{}
		if err := c.Get(t.Context(), client.ObjectKey{Name: gone.name}, object); err != nil {
			return err
		}
		object.Spec.Draining = true
		return c.Update(t.Context(), object)
	})
	eventually(t, "no tenant is on "+gone.name, func() error {
		tenants := &v1alpha1.TenantList{}
		if err := c.List(t.Context(), tenants); err != nil {
			return err
		}
		for _, o := range tenants.Items {
			if slices.Contains(o.Status.Placement, gone.name) || len(o.Status.Placement) == 0 {
				return fmt.Errorf("%s is on %q", o.Name, o.Status.Placement)
			}
		}
		return nil
	})
	in.figures.add("drain: two tenants have left a host", h.now()-began)
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...) // it forwards as before
	drained := h.now()
	failed := slices.DeleteFunc(h.soFar(), func(op operation) bool { return op.err == nil || op.begin > drained })
	wantRepeatable(t, failed, "while "+gone.name+" was drained")

	mark := gone.log.mark()
	if err := c.Delete(t.Context(), &v1alpha1.Host{ObjectMeta: metav1.ObjectMeta{Name: gone.name}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the Host object is gone", func() error {
		object := &v1alpha1.Host{}
		err := c.Get(context.Background(), client.ObjectKey{Name: gone.name}, object)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is there (%v): %+v", err, object.Status.Conditions)
	})
	if got := in.members(t, via); !slices.Equal(got, namesOf(others)) {
		t.Errorf("the members of etcd are %q, want %q", got, namesOf(others))
	}
	if code := gone.wait(t); code == 0 {
		t.Errorf("%s, removed, ended with exit code 0", gone.name)
	}
	if said := gone.log.String()[mark:]; !strings.Contains(said, "removed") {
		t.Errorf("%s does not say that it was removed:\n%s", gone.name, gone.log.Tail(10))
	}
	t.Logf("the removed host's last words: %s", gone.log.Tail(1))
	h.awaitAnswers(t, h.now(), in.tenants, others...)

	// With its old disk it is nobody.
	gone.start(t)
	if code := gone.wait(t); code == 0 {
		t.Errorf("%s, removed and started again, ended with exit code 0", gone.name)
	}
	t.Logf("started again, it says: %s", gone.log.Tail(1))
	gone.wipe(t)
	in.join(t, gone, others[1], via.token(t))
	in.recover(t, h)
	h.end(t)
}

// testFourHosts has a host join that is not needed to vote, until one that does is gone for
// good. It serves tenants in both cases.
func testFourHosts(t *testing.T, in *installation) {
	d := in.lab.newHost("host-d", 14)
	in.join(t, d, in.hosts[1], in.hosts[0].token(t))
	in.hosts = append(in.hosts, d)
	in.awaitWell(t)
	if got := in.members(t, d); got[3] != d.name+withoutVote {
		t.Fatalf("the members are %q", got)
	}
	x := in.tenants[0]
	in.put(t, d, x, d)
	in.stir(t, x, in.hosts[0])
	h := in.begin(t)
	defer h.end(t)
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...)
	eventually(t, "its controllers work", func() error { return in.controllersOn(t, x, time.Now().Add(-time.Second), d) })

	gone := in.hosts[1]
	in.moveLeader(t, gone)
	theirs := in.tenantsOn(t, gone)
	at := h.now()
	gone.kill(t)
	in.failover(t, h, "kill the leader of etcd of four hosts", at, theirs, in.but(t))
	if on := in.hostOf(t, x); on != d {
		t.Errorf("%s went from %s to %s", x.name, d.name, on.name)
	}
	eventually(t, gone.name+" is missed and removed", func() error {
		r := in.hosts[0].tenantctl(t, "host", "remove", gone.name, "--force", "--yes", "--timeout", patience.String())
		if r.code == 0 {
			return nil
		}
		err := fmt.Errorf("exit code %d: %s", r.code, r.stderr)
		if !strings.Contains(r.stderr, "is well and can leave by itself") { // its tenants' clients may notice sooner
			t.Fatal(err)
		}
		return err
	})
	in.hosts = slices.DeleteFunc(in.hosts, func(h *host) bool { return h == gone })
	in.recover(t, h) // with all three voting
	gone.wipe(t)
}

// testSixHosts has more hosts than votes: five vote and the sixth serves. It gets the vote of
// one that is removed.
func testSixHosts(t *testing.T, in *installation) {
	for i, name := range []string{"host-e", "host-f", "host-g"} {
		more := in.lab.newHost(name, 15+i)
		in.join(t, more, in.hosts[i], in.hosts[0].token(t))
		in.hosts = append(in.hosts, more)
	}
	in.awaitWell(t)
	x := in.tenants[0]
	i := slices.IndexFunc(in.members(t, in.hosts[0]), func(m string) bool { return strings.HasSuffix(m, withoutVote) })
	sixth := in.host(t, strings.TrimSuffix(in.members(t, in.hosts[0])[i], withoutVote))
	in.put(t, sixth, x, sixth)
	h := in.beginWith(t, calmLimit)
	defer h.end(t)
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...)

	gone := in.but(t, in.hosts[0], sixth)[0]
	in.hosts[0].mustTenantctl(t, "host", "remove", gone.name, "--yes", "--timeout", patience.String())
	if code := gone.wait(t); code == 0 {
		t.Errorf("%s, removed, ended with exit code 0", gone.name)
	}
	in.hosts = slices.DeleteFunc(in.hosts, func(h *host) bool { return h == gone })
	in.recover(t, h) // with all five voting
	if on := in.hostOf(t, x); on != sixth {
		t.Errorf("%s went from %s to %s", x.name, sixth.name, on.name)
	}
}

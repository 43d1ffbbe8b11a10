// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// testSleep has a tenant fall asleep, and wakes it by connections to hosts that it is
// not on: while the host lives that it fell asleep on, and after that was killed.
func testSleep(t *testing.T, in *installation) {
	x, on, others := in.tenants[0], in.hosts[1], []*host{in.hosts[2], in.hosts[0]}
	in.put(t, in.hosts[0], x, on)
	marks := map[*host]int{}
	sleep := func() {
		t.Helper()
		// Those whose clients have just ended may still count as waiting for an answer.
		eventually(t, x.name+" is put to sleep", func() error {
			if r := others[0].tenantctl(t, "sleep", x.name); r.code != 0 {
				return fmt.Errorf("exit code %d: %s", r.code, r.stderr)
			}
			return nil
		})
		in.awaitAsleep(t, others[0], x, on.name)
		for _, h := range in.hosts {
			marks[h] = h.log.mark()
		}
	}
	// wakes says on which hosts the tenant has been started since it fell asleep.
	wakes := func() (started []string) {
		for _, h := range in.hosts {
			for line := range strings.Lines(h.log.String()[marks[h]:]) {
				if strings.Contains(line, "tenant wakes") && strings.Contains(line, "tenant="+x.name) {
					started = append(started, h.name)
				}
			}
		}
		return started
	}

	for _, via := range others {
		sleep()
		in.answer(t, x, via)
		in.awaitPlacement(t, via, x, on.name)
		if got := wakes(); !slices.Equal(got, []string{on.name}) {
			t.Errorf("asked through %s, %s was woken on %q; it slept on %s", via.name, x.name, got, on.name)
		}
	}

	sleep()
	on.kill(t)
	var heir, third *host
	eventually(t, x.name+" sleeps on another host", func() error {
		object, err := in.tenant(t, others[0], x)
		if err != nil {
			return err
		}
		if p := object.Status.Placement; len(p) != 1 || p[0] == on.name || object.Status.Phase != v1alpha1.TenantAsleep {
			return fmt.Errorf("it is on %q, phase %s", p, object.Status.Phase)
		}
		heir = in.host(t, object.Status.Placement[0])
		return nil
	})
	third = in.but(t, heir)[0]
	if got := wakes(); len(got) > 0 {
		t.Errorf("%s was woken on %q by the end of %s", x.name, got, on.name)
	}
	in.answer(t, x, third)
	in.awaitPlacement(t, third, x, heir.name)
	if got := wakes(); !slices.Equal(got, []string{heir.name}) {
		t.Errorf("asked through %s, %s was woken on %q; it slept on %s", third.name, x.name, got, heir.name)
	}
}

// awaitAsleep waits until a tenant sleeps on a host.
func (in *installation) awaitAsleep(t testing.TB, via *host, x *tenant, on string) {
	t.Helper()
	eventually(t, fmt.Sprintf("tenant %s sleeps on %s", x.name, on), func() error {
		object, err := in.tenant(t, via, x)
		if err != nil {
			return err
		}
		if object.Status.Phase != v1alpha1.TenantAsleep || object.Status.AsleepSince == nil || !slices.Equal(object.Status.Placement, []string{on}) {
			return fmt.Errorf("phase %s, since %v, on %q", object.Status.Phase, object.Status.AsleepSince, object.Status.Placement)
		}
		return nil
	})
}

// answer waits until a tenant answers through a host.
func (in *installation) answer(t testing.TB, x *tenant, via *host) {
	t.Helper()
	eventually(t, x.name+" answers through "+via.name, func() error {
		_, err := x.client(t, via).CoreV1().Namespaces().Get(t.Context(), metav1.NamespaceDefault, metav1.GetOptions{})
		return err
	})
}

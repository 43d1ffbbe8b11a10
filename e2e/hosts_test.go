// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// newMember describes a host that can be one of several, at an address of loopback
// that it has to itself.
func newMember(t *testing.T, name, ip string, args ...string) *host {
	t.Helper()
	free := func() string {
		ln, err := net.Listen("tcp", ip+":0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		return ln.Addr().String()
	}
	h := newHost(t)
	h.listen = free()
	h.args = append([]string{"--name", name, "--peer-listen", free(), "--gossip-listen", free()}, args...)
	return h
}

// token makes a token with which a host joins, and returns its file.
func (h *host) token() string {
	h.t.Helper()
	file := filepath.Join(h.t.TempDir(), "token")
	h.mustTenantctl("host", "token", "--output", file)
	return file
}

// at is arguments of kubectl that have it ask a tenant through another host.
func (h *host) at(tenant string) []string {
	return []string{"--server", "https://" + h.listen, "--tls-server-name", tenant + "." + domain}
}

// hosts are the hosts that are Ready, in order.
func (h *host) hosts() ([]string, error) {
	h.t.Helper()
	r := h.tenantctl("hosts", "-o", "json")
	if r.code != 0 {
		return nil, errors.New(r.stderr)
	}
	var list v1alpha1.HostList
	if err := json.Unmarshal([]byte(r.stdout), &list); err != nil {
		return nil, err
	}
	var ready []string
	for _, o := range list.Items {
		if o.Status.State == v1alpha1.HostReady {
			ready = append(ready, o.Name)
		}
	}
	slices.Sort(ready)
	return ready, nil
}

// awaitHosts waits until these hosts are Ready, and no others.
func (h *host) awaitHosts(want ...string) {
	h.t.Helper()
	eventually(h.t, fmt.Sprintf("%q are ready", want), func() error {
		got, err := h.hosts()
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("ready are %q", got)
		}
		return err
	})
}

// TestHosts has three hosts join, any of them answer for a tenant, and the tenant live
// on when it is moved and when its host is killed. Package hosts has the faults.
func TestHosts(t *testing.T) {
	a := newMember(t, "host-a", "127.0.0.2")
	a.start()
	a.awaitReady()
	kubeconfig := a.add("acme")

	b := newMember(t, "host-b", "127.0.0.3", "--join", a.listen, "--join-token-file", a.token())
	b.start()
	b.awaitReady()
	used := a.token()
	c := newMember(t, "host-c", "127.0.0.4", "--join", b.listen, "--join-token-file", used)
	c.start()
	c.awaitReady()
	a.awaitHosts("host-a", "host-b", "host-c")

	// Once, and not under a name that is taken.
	for _, test := range []struct{ name, token, want string }{
		{"host-d", used, "make another"},
		{"host-b", a.token(), `there is a host "host-b" already`},
	} {
		d := newMember(t, test.name, "127.0.0.5", "--join", a.listen, "--join-token-file", test.token)
		d.start()
		if code := d.wait(); code == 0 || !strings.Contains(strings.ToLower(d.log.String()), test.want) {
			t.Errorf("a join that must not be ended with %d, without %q:\n%s", code, test.want, d.log.Tail(5))
		}
		if _, err := os.Stat(filepath.Join(d.dir, "installation.json")); err == nil {
			t.Error("what could not join thinks that it is part of an installation")
		}
	}
	// Nor with another sealing key in place, which leaves the token as it is.
	unused := a.token()
	for _, want := range []string{"its sealing key is not the one of the installation", `there is a host "host-b" already`} {
		d := newMember(t, "host-b", "127.0.0.5", "--join", a.listen, "--join-token-file", unused)
		if strings.Contains(want, "sealing") {
			d.args[1] = "host-d"
			putFile(t, filepath.Join(d.dir, "sealing.key"), make([]byte, 32))
		}
		d.start()
		if code := d.wait(); code == 0 || !strings.Contains(d.log.String(), want) {
			t.Errorf("a join that must not be ended with %d, without %q:\n%s", code, want, d.log.Tail(5))
		}
	}
	a.awaitHosts("host-a", "host-b", "host-c")

	mustKubectl(t, kubeconfig, "", "create", "configmap", "before")
	for _, h := range []*host{a, b, c} {
		mustKubectl(t, kubeconfig, "", append(h.at("acme"), "get", "configmap", "before")...)
		h.mustTenantctl("kubeconfig", "acme", "--output", filepath.Join(t.TempDir(), "acme")) // wherever it runs
	}

	b.mustTenantctl("move", "acme", "--to", "host-c", "--timeout", patience.String())
	if got := strings.TrimSpace(mustKubectl(t, a.adminKubeconfig(), "", "get", "tenant", "acme", "-o", "jsonpath={.status.placement}")); got != `["host-c"]` {
		t.Errorf("after the move acme is placed on %s", got)
	}
	mustKubectl(t, kubeconfig, "", append(a.at("acme"), "create", "configmap", "moved")...)

	c.signal(syscall.SIGKILL)
	c.wait()
	eventually(t, "acme is written to again", func() error {
		// What was not answered may have been done.
		if r := kubectl(t, kubeconfig, "", append(b.at("acme"), "--request-timeout", "5s", "create", "configmap", "survived")...); r.code != 0 && !strings.Contains(r.stderr, "already exists") {
			return errors.New(r.stderr)
		}
		return nil
	})
	for _, name := range []string{"before", "moved", "survived"} {
		mustKubectl(t, kubeconfig, "", append(a.at("acme"), "get", "configmap", name)...)
	}
	c.start()
	c.awaitReady()
	a.awaitHosts("host-a", "host-b", "host-c")

	// It was pinned to the host that came back.
	eventually(t, "acme is back", func() error {
		if got := mustKubectl(t, a.adminKubeconfig(), "", "get", "tenant", "acme", "-o", "jsonpath={.status.placement} {.status.phase}"); got != `["host-c"] Ready` {
			return errors.New("it is at " + got)
		}
		return nil
	})
	a.mustTenantctl("host", "remove", "host-c", "--yes", "--timeout", patience.String())
	if code := c.wait(); code == 0 || !strings.Contains(c.log.String(), "was removed") {
		t.Errorf("the removed host ended with %d:\n%s", code, c.log.Tail(5))
	}
	a.awaitHosts("host-a", "host-b")
	mustKubectl(t, kubeconfig, "", append(b.at("acme"), "get", "configmap", "survived")...)
	a.mustTenantctl("remove", "acme", "--yes", "--timeout", patience.String())
}

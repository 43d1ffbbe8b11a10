// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// absence is how long a host is gone that takes connections and does not answer, or
// whose packets are lost: longer than the 50 s after which Kubernetes calls a node
// unknown that says nothing, which the controllers in the tenant's new place count from
// their own start on. A kubelet that stays with its host is found out.
const absence = 90 * time.Second

// installation is three hosts, one tenant, and a worker of it. The tenant's names are
// known to nobody but the worker, as a line in its /etc/hosts for each host.
type installation struct {
	t      testing.TB
	hosts  []*host
	tenant *cluster
	worker *machine
	ready  time.Time // since when its node is
}

// TestHosts has a worker outlive the loss of each host on which its tenant runs: its
// node is ready all the time.
func TestHosts(t *testing.T) {
	in := newInstallation(t)
	for _, test := range []struct {
		name string
		run  func(*installation)
	}{
		{"Replicas", testReplicas},
		{"Move", testMove},
		{"Kill", testKill},
		{"Freeze", testFreeze},
		{"Cut", testCut},
		{"RollingRestart", testRollingRestart},
	} {
		if !t.Run(test.name, func(t *testing.T) { test.run(in.within(t)) }) {
			break // the others would not find all well
		}
	}
}

func newInstallation(t *testing.T) *installation {
	l := newLab(t)
	a, b, c := l.hostAt("host-a", "10.77.0.11"), l.hostAt("host-b", "10.77.0.12"), l.hostAt("host-c", "10.77.0.13")
	in := &installation{t: t, hosts: []*host{a, b, c}}
	in.start(a)
	l.name("system."+domain, a.address, b.address, c.address)
	for _, h := range []*host{b, c} {
		token := filepath.Join(t.TempDir(), "token")
		a.mustTenantctl("host", "token", "--output", token)
		in.start(h, "--join", a.address+":443", "--join-token-file", token)
	}
	// Runs first of all: none of them is to wait for the others.
	t.Cleanup(func() {
		for _, h := range in.hosts {
			h.cmd.Process.Kill()
		}
	})

	acme := a.add("acme")
	l.name(acme.hostname, a.address, b.address, c.address)
	acme.proxyInNamespaces()
	in.tenant, in.worker = acme, l.machine("w1")
	acme.installProxy("tls", in.worker, "--host", a.address+":443") // it learns of the others
	acme.join(in.worker)
	acme.connect(in.worker)
	acme.awaitNodes(in.worker)
	in.worker.must("tenant-proxy", "adopt-kubelet")
	acme.restartKubelet(in.worker)

	// From now on all that the tests ask the tenant goes through the worker.
	acme.through(in.worker)
	acme.apply(spammer("steady", in.worker.name, "-every=100ms"))
	acme.kubectl("wait", "--for=condition=Ready", "--timeout="+patience.String(), "pod/steady")
	in.awaitTunnels(in.hosts...)
	in.ready = in.readySince()
	return in
}

// start starts a host that listens to others.
func (in *installation) start(h *host, args ...string) {
	in.t.Helper()
	h.within(in.t).start(append([]string{"--peer-listen", h.address + ":2380", "--gossip-listen", h.address + ":7946"}, args...)...)
}

// within is the installation, for use in a subtest.
func (in *installation) within(t testing.TB) *installation {
	n := *in
	n.t, n.tenant, n.worker, n.hosts = t, in.tenant.within(t), in.worker.within(t), nil
	for _, h := range in.hosts {
		n.hosts = append(n.hosts, h.within(t))
	}
	return &n
}

// through has the cluster's clients use the tenant-proxy of a machine, on which they
// run, as its administrator can.
func (c *cluster) through(m *machine) {
	c.t.Helper()
	c.host.mustTenantctl("kubeconfig", c.name, "--server", "https://"+vip+":6443", "--output", c.kubeconfig)
	c.via = m
	config, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	if err != nil {
		c.t.Fatal(err)
	}
	config.QPS, config.Timeout = -1, 20*time.Second
	config.Dial = m.dial
	if c.Interface, err = kubernetes.NewForConfig(config); err != nil {
		c.t.Fatal(err)
	}
}

// others are the hosts but for one.
func (in *installation) others(not *host) []*host {
	return slices.DeleteFunc(slices.Clone(in.hosts), func(h *host) bool { return h.name == not.name })
}

// placement is where the tenant is, as one host has it.
func (in *installation) placement(via *host) (names []string, err error) {
	r := via.tenantctl("get", in.tenant.name, "-o", "json")
	if r.code != 0 {
		return nil, errors.New(r.stderr)
	}
	var object struct {
		Status struct {
			Phase     string
			Placement []string
		}
	}
	if err := json.Unmarshal([]byte(r.stdout), &object); err != nil {
		return nil, err
	}
	if object.Status.Phase != "Ready" {
		return nil, fmt.Errorf("tenant %s is %s on %q", in.tenant.name, object.Status.Phase, object.Status.Placement)
	}
	return object.Status.Placement, nil
}

// put has the tenant run on a host, and free to leave it. A start that fails, and is
// tried again by the host, is no reason to give up.
func (in *installation) put(h *host) {
	in.t.Helper()
	eventually(in.t, "the tenant is on "+h.name, func() error {
		if r := h.tenantctl("move", in.tenant.name, "--to", h.name, "--timeout", patience.String()); r.code != 0 {
			return errors.New(r.stderr)
		}
		return nil
	})
	h.mustTenantctl("move", in.tenant.name, "--anywhere", "--timeout", patience.String())
}

// awaitTunnels waits until the worker has a tunnel by way of each of some hosts.
func (in *installation) awaitTunnels(hosts ...*host) {
	in.t.Helper()
	eventually(in.t, "there is a tunnel through each host", func() error {
		s, err := in.worker.proxyStatus()
		if err != nil {
			return err
		}
		for _, h := range hosts {
			connected := false
			for _, server := range s.Tunnel.Servers {
				connected = connected || server.Connected && strings.HasPrefix(server.Server, h.address+":")
			}
			if !connected {
				return fmt.Errorf("none through %s: %+v\n%s", h.name, s.Tunnel, in.worker.journal("tenant-proxy", 20))
			}
		}
		return nil
	})
}

// reach reads a pod's log and runs a command in it, through an API server that
// arguments of kubectl name, or through any.
func (in *installation) reach(args ...string) error {
	if r := execute(in.t, in.tenant.kubectlCommand(append(args, "--request-timeout=20s", "exec", "steady", "--", "cat", "/etc/hostname")...)); r.code != 0 || r.stdout != "steady\n" {
		return fmt.Errorf("exec: %s%s", r.stdout, r.stderr)
	}
	if r := execute(in.t, in.tenant.kubectlCommand(append(args, "--request-timeout=20s", "logs", "--tail=1", "steady")...)); r.code != 0 || !strings.HasPrefix(r.stdout, "line ") {
		return fmt.Errorf("logs: %s%s", r.stdout, r.stderr)
	}
	return nil
}

// awaitReach waits until exec and logs work again, and says how long that took.
func (in *installation) awaitReach(what string) {
	in.t.Helper()
	began := time.Now()
	eventually(in.t, "exec and logs work: "+what, func() error { return in.reach() })
	in.t.Logf("%s: exec and logs after %s", what, time.Since(began).Round(time.Millisecond))
}

// readySince is since when the node is ready, which changes when it was not.
func (in *installation) readySince() (since time.Time) {
	in.t.Helper()
	eventually(in.t, "the node is ready", func() (err error) {
		since, err = in.tenant.ready(in.worker)
		return err
	})
	return since
}

// check wants the node to have been ready all the time, and the pod to be the same.
func (in *installation) check() {
	in.t.Helper()
	if since := in.readySince(); !since.Equal(in.ready) {
		in.t.Errorf("the node is ready since %s, and was since %s", since, in.ready)
	}
	events, err := in.tenant.CoreV1().Events(metav1.NamespaceDefault).List(in.t.Context(), metav1.ListOptions{FieldSelector: "reason=NodeNotReady"})
	if err != nil {
		in.t.Error(err)
	} else if len(events.Items) > 0 {
		in.t.Errorf("the node was not ready: %+v", events.Items)
	}
	pod, err := in.tenant.CoreV1().Pods("default").Get(in.t.Context(), "steady", metav1.GetOptions{})
	if err != nil {
		in.t.Fatal(err)
	}
	if pod.Status.Phase != corev1.PodRunning || pod.Status.ContainerStatuses[0].RestartCount != 0 || pod.DeletionTimestamp != nil {
		in.t.Errorf("the pod did not go on: %+v", pod.Status)
	}
}

// settle waits until all hosts are well again and the worker knows it.
func (in *installation) settle() {
	in.t.Helper()
	for _, h := range in.hosts {
		eventually(in.t, "tenant-proxy finds "+h.name+" healthy", func() error {
			s, err := in.worker.proxyStatus()
			if err != nil {
				return err
			}
			for _, known := range s.Hosts {
				if strings.HasPrefix(known.Address, h.address+":") && known.Healthy {
					return nil
				}
			}
			return fmt.Errorf("%+v", s.Hosts)
		})
	}
	in.awaitTunnels(in.hosts...)
	in.check()
}

// lose takes a host away that the tenant is on, for some time at least.
func (in *installation) lose(what string, victim *host, absence time.Duration, away, back func()) {
	in.t.Helper()
	in.put(victim)
	in.settle()
	began := time.Now()
	away()
	in.awaitReach(what)
	in.awaitTunnels(in.others(victim)...)
	// tenantctl has the victim's kubeconfig, and asks another host.
	eventually(in.t, "tenantctl says that the tenant is well elsewhere", func() error {
		names, err := in.placement(victim)
		if err == nil && slices.Contains(names, victim.name) {
			err = fmt.Errorf("it is on %q", names)
		}
		return err
	})
	list, err := in.tenant.CoreV1().ConfigMaps(metav1.NamespacePublic).Get(in.t.Context(), "tenantd-hosts", metav1.GetOptions{})
	if err != nil {
		in.t.Fatal(err)
	}
	if known := list.Data["hosts"]; len(strings.Fields(known)) != len(in.hosts) {
		in.t.Errorf("workers are told of the hosts %q, want all %d", known, len(in.hosts))
	}
	// Whatever tenant-proxy was told at first, it knows who lives.
	in.worker.must("systemctl", "restart", "tenant-proxy")
	in.worker.awaitProxy()
	in.awaitReach(what + ", and a restart of tenant-proxy")
	time.Sleep(absence - time.Since(began))
	in.check()
	back()
	in.settle()
	in.awaitReach(what + ", and back")
}

// testReplicas has two hosts run the tenant: each one's API server reaches the worker.
func testReplicas(in *installation) {
	var on []string
	scale := func(replicas int) {
		in.t.Helper()
		a := in.hosts[0]
		cmd := exec.Command(bin(in.t, "kubectl"), "--kubeconfig", filepath.Join(a.dir, "admin.kubeconfig"), "patch", "tenant", in.tenant.name,
			"--type=merge", "-p", fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas))
		execute(in.t, cmd).must(in.t, "kubectl patch tenant")
		eventually(in.t, fmt.Sprintf("the tenant is on %d hosts", replicas), func() (err error) {
			on, err = in.placement(a)
			if err == nil && len(on) != replicas {
				err = fmt.Errorf("it is on %q", on)
			}
			return err
		})
	}
	through := func() {
		in.t.Helper()
		for _, h := range in.hosts {
			// A host that has a replica serves it, and another one forwards.
			began := time.Now()
			args := []string{"--server=https://" + h.address, "--tls-server-name=" + in.tenant.hostname}
			eventually(in.t, "exec, logs, a webhook and an aggregated API work through "+h.name, func() error {
				_, webhook := in.tenant.refuser(args...)
				greeting := execute(in.t, in.tenant.kubectlCommand(append(args, "get", "--raw", "/apis/e2e.test/v1/greetings/hello")...))
				if greeting.code != 0 {
					webhook = errors.Join(webhook, errors.New(greeting.stderr))
				}
				return errors.Join(in.reach(args...), webhook)
			})
			in.t.Logf("on %q, all works through %s after %s", on, h.name, time.Since(began).Round(time.Millisecond))
		}
	}
	certificate, key := selfSigned(in.t, "hook.default.svc")
	in.tenant.apply(strings.Replace(fmt.Sprintf(callback, certificate, key), "replicas: 2", "replicas: 1", 1))
	in.tenant.pod("hook", in.worker)
	in.tenant.apply(fmt.Sprintf(registrations, certificate))
	defer in.tenant.kubectl("delete", "validatingwebhookconfiguration/hook", "apiservice/v1.e2e.test")
	scale(1)
	through()
	scale(2)
	through()
	first := on
	// The worker keeps the way to the other replica while one starts anew.
	victim := in.hosts[slices.IndexFunc(in.hosts, func(h *host) bool { return h.name == first[0] })]
	victim.stop()
	in.awaitReach("stop a replica's host")
	in.start(victim)
	scale(2)
	through()
	scale(1)
	through()
	in.settle()
}

// testMove moves the tenant to each host.
func testMove(in *installation) {
	for _, h := range in.hosts {
		in.put(h)
		in.awaitReach("move to " + h.name)
	}
	in.settle()
}

func testKill(in *installation) {
	victim := in.hosts[0] // the one that tenant-proxy was told of, and the name's first
	// Whoever connects to it is refused at once, and goes elsewhere.
	in.lose("kill", victim, 0, func() {
		victim.cmd.Kill()
	}, func() {
		// kubectl by itself tries all addresses of a name, of which this is one.
		if err := in.reach("--server=https://" + in.tenant.hostname); err != nil {
			in.t.Errorf("by the tenant's name: %v", err)
		}
		in.start(victim)
	})
}

func testFreeze(in *installation) {
	victim := in.hosts[0] // a kubelet that goes by the name would stay with it
	signal := func(s syscall.Signal) {
		in.t.Helper()
		if err := victim.cmd.Process.Signal(s); err != nil {
			in.t.Fatal(err)
		}
	}
	in.lose("freeze", victim, absence, func() { signal(syscall.SIGSTOP) }, func() { signal(syscall.SIGCONT) })
}

// testCut cuts a host off from all, workers and clients included.
func testCut(in *installation) {
	victim := in.hosts[2]
	nft := func(what, rules string) {
		in.t.Helper()
		execute(in.t, exec.Command("nsenter", "--net=/run/netns/"+victim.name, "nft", "-f", "-"), rules).must(in.t, what)
	}
	in.lose("cut off", victim, absence, func() {
		nft("cut the host off", `table ip cut {
chain in { type filter hook input priority 0; iifname "eth0" counter drop; }
chain out { type filter hook output priority 0; oifname "eth0" counter drop; }
}
`)
	}, func() { nft("heal the host", "flush ruleset\n") })
}

// testRollingRestart restarts one host after the other.
func testRollingRestart(in *installation) {
	for _, h := range in.hosts {
		h.stop()
		in.awaitReach("stop " + h.name)
		in.start(h)
		in.settle()
	}
	in.awaitReach("rolling restart")
}

// dial connects to an address from within the machine's network. The thread that
// enters it ends with its goroutine.
func (m *machine) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	dialled := make(chan struct{})
	go func() {
		defer close(dialled)
		runtime.LockOSThread() // and never unlock it
		var file *os.File
		if file, err = os.Open(m.network()); err != nil {
			return
		}
		defer file.Close()
		if err = unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
			return
		}
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
	}()
	<-dialled
	return conn, err
}

// network is the machine's network namespace.
func (m *machine) network() string { return fmt.Sprintf("/proc/%d/ns/net", m.cmd.Process.Pid) }

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testNeighbours wants two tenants with the same ranges of addresses to see each
// nothing but its own: pods of one have the addresses of pods of the other.
func testNeighbours(t *testing.T, ours, theirs *cluster, w1, w3 *machine) {
	for _, c := range []struct {
		*cluster
		m *machine
	}{{ours, w1}, {theirs, w3}} {
		pod, err := c.CoreV1().Pods("default").Get(t.Context(), c.pod("web", c.m), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(pod.Status.PodIP, "10.244.") {
			t.Errorf("pod %s of %s has address %s, want one of 10.244.0.0/16", pod.Name, c.name, pod.Status.PodIP)
		}
		// By its address alone, which the other tenant may have given to another pod.
		c.apply(`
apiVersion: v1
kind: Service
metadata: {name: twin}
spec: {clusterIP: 10.96.7.7, ports: [{port: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: twin, labels: {kubernetes.io/service-name: twin}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [` + pod.Status.PodIP + `]}]
`)
		if got := c.kubectl("get", "--raw", "/api/v1/namespaces/default/pods/"+pod.Name+":8080/proxy/hostname"); got != pod.Name {
			t.Errorf("%s: the pod with the address %s is %q, want %q", c.name, pod.Status.PodIP, got, pod.Name)
		}
		eventually(t, "the Service answers in "+c.name, func() error {
			got, err := c.m.fromPod(pod.Status.PodIP, "http://10.96.7.7:8080/hostname")
			if err == nil && got != pod.Name {
				t.Fatalf("%s: pod %q has answered, of another cluster than %q", c.name, got, pod.Name)
			}
			return err
		})
		if got := c.kubectl("exec", pod.Name, "--", "cat", "/etc/hostname"); got != pod.Name+"\n" {
			t.Errorf("%s: exec in pod %q was in %q", c.name, pod.Name, got)
		}
	}
	ranges := map[string]string{}
	for _, c := range []*cluster{ours, theirs} {
		nodes, err := c.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, node := range nodes.Items {
			ranges[c.name] += node.Spec.PodCIDR + " "
		}
	}
	if !strings.Contains(ranges[ours.name], strings.TrimSpace(ranges[theirs.name])) {
		t.Errorf("the tenants' pods have different ranges, so this shows nothing: %v", ranges)
	}

	// A node's certificate is of no use in the other cluster.
	for _, address := range []string{theirs.hostname, ours.hostname} {
		code := w3.must("curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--insecure",
			"--cert", "/var/lib/kubelet/pki/kubelet-client-current.pem", "https://"+address+"/api/v1/nodes/"+w3.name)
		want := map[string]string{theirs.hostname: "200", ours.hostname: "401"}[address]
		if code != want {
			t.Errorf("with %s's certificate %s answers %s, want %s", w3.name, address, code, want)
		}
	}
}

// ready is since when a node is, or an error if it is not.
func (c *cluster) ready(m *machine) (time.Time, error) {
	node, err := c.CoreV1().Nodes().Get(c.t.Context(), m.name, metav1.GetOptions{})
	if err != nil {
		return time.Time{}, err
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
			return condition.LastTransitionTime.Time, nil
		}
	}
	return time.Time{}, fmt.Errorf("node %s is not ready", m.name)
}

// testHostRestart restarts the host while its clusters are in use.
func testHostRestart(t *testing.T, c *cluster, w1, w2 *machine) {
	workers := []*machine{w1, w2}
	since := map[string]time.Time{}
	for _, m := range workers {
		at, err := c.ready(m)
		if err != nil {
			t.Fatal(err)
		}
		since[m.name] = at
		c.apply(spammer("steady-"+m.name, m.name, "-every=100ms"))
		c.kubectl("wait", "--for=condition=Ready", "--timeout="+patience.String(), "pod/steady-"+m.name)
	}
	// What users do all the time: read logs, and ask the API server from pods.
	followers := map[string]*follow{}
	last := map[string]int{}
	for _, m := range workers {
		followers[m.name] = c.follow("logs", "-f", "--tail=1", "steady-"+m.name)
		last[m.name] = number(t, followers[m.name].line())
	}

	c.host.stop()
	c.host.start()
	back := time.Now()

	for _, m := range workers {
		followers[m.name].end()
		eventually(t, "the log of a pod on "+m.name+" can be followed again", func() error {
			f := c.within(t).follow("logs", "-f", "--tail=1", "steady-"+m.name)
			defer f.end()
			line, err := f.lines.ReadString('\n')
			if err != nil {
				return fmt.Errorf("%w: %s", err, f.err.String())
			}
			if n := number(t, strings.TrimSuffix(line, "\n")); n <= last[m.name] {
				t.Fatalf("line %d came, after line %d before the restart", n, last[m.name])
			}
			return nil
		})
		t.Logf("%s: logs again %s after the host was ready", m.name, time.Since(back).Round(time.Millisecond))
	}
	for _, m := range workers {
		at, err := c.ready(m)
		if err != nil || !at.Equal(since[m.name]) {
			t.Errorf("node %s was ready since %s, and now is since %s (%v)", m.name, since[m.name], at, err)
		}
		var restarts int32
		pod, err := c.CoreV1().Pods("default").Get(t.Context(), "steady-"+m.name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range pod.Status.ContainerStatuses {
			restarts += s.RestartCount
		}
		if restarts > 0 {
			t.Errorf("pod %s was restarted %d times", pod.Name, restarts)
		}
	}
	testService(t, c, w1, w2)
}

// testRemoval removes a tenant while its node runs, and gives the node a new one.
func testRemoval(t *testing.T, c *cluster, m *machine) {
	pod, err := c.CoreV1().Pods("default").Get(t.Context(), c.pod("web", m), metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.host.mustTenantctl("remove", c.name, "--yes", "--timeout", patience.String())
	eventually(t, "tenant-proxy has noticed", func() error {
		s, err := m.proxyStatus()
		if err == nil && s.Ready {
			err = errors.New("it says that it is ready")
		}
		return err
	})
	// The pods of a cluster outlive its API server.
	if _, err := m.fromPod(pod.Status.PodIP, "http://"+pod.Status.PodIP+":8080/hostname"); err != nil {
		t.Errorf("pod %s has gone with its cluster: %v", pod.Name, err)
	}
	for _, unit := range []string{"kubelet", "tenant-proxy", "containerd"} {
		if state := strings.TrimSpace(m.run("systemctl", "is-active", unit).stdout); state != "active" {
			t.Errorf("%s is %s", unit, state)
		}
	}
	m.reset()
	m.must("tenant-proxy", "uninstall")
	if out := m.must("ip", "-brief", "address", "show", "to", vip); out != "" {
		t.Errorf("uninstall has left the address: %s", out)
	}
	for _, path := range []string{"/usr/local/bin/tenant-proxy", "/etc/tenant-proxy", "/var/lib/tenant-proxy", "/etc/systemd/system/tenant-proxy.service"} {
		if m.run("test", "-e", path).code == 0 {
			t.Errorf("uninstall has left %s", path)
		}
	}

	again := c.host.add(c.name)
	again.proxyInNamespaces()
	again.installProxy("auto", m)
	again.join(m)
	again.connect(m)
	again.awaitNodes(m)
	again.apply(web)
	again.awaitExec(m)
}

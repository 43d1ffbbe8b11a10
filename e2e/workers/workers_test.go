// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// web is a Deployment with a pod on each of two nodes, and its Service.
const web = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      tolerations: [{key: node.kubernetes.io/unreachable, operator: Exists}, {key: node.kubernetes.io/not-ready, operator: Exists}]
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: web}}}
      containers:
      - name: web
        image: ` + testserverImage + `
        args: [serve]
        readinessProbe: {httpGet: {path: /hostname, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`

// TestWorkers has two machines join a tenant, and a third another tenant that has
// the same ranges of addresses.
func TestWorkers(t *testing.T) {
	l := newLab(t)
	h := l.newHost()
	acme := h.add("acme")
	acme.proxyInNamespaces()
	globex := h.add("globex")
	globex.proxyInNamespaces()
	w1, w2, w3 := l.machine("w1"), l.machine("w2"), l.machine("w3")
	// Every test is by both carriers.
	acme.installProxy("tls", w1)
	acme.installProxy("proxy2", w2)
	t.Run("Installation", func(t *testing.T) { testInstallation(t, globex.within(t), w3.within(t)) })
	acme.join(w1)
	acme.join(w2)
	w1.awaitTunnel()
	w2.awaitTunnel()
	t.Run("BeforePodNetwork", func(t *testing.T) { testBeforePodNetwork(t, acme.within(t), w1.within(t)) })
	acme.connect(w1, w2)
	acme.awaitNodes(w1, w2)
	t.Run("BadJoins", func(t *testing.T) { testBadJoins(t, acme.within(t), w3.within(t)) })
	globex.join(w3)
	globex.connect(w3)
	globex.awaitNodes(w3)
	acme.apply(web)
	globex.apply(web)

	for _, test := range []struct {
		name string
		run  func(t *testing.T, c *cluster, w1, w2 *machine)
	}{
		{"Service", func(t *testing.T, c *cluster, w1, w2 *machine) { testService(t, c, w1, w2) }},
		{"Nftables", func(t *testing.T, c *cluster, w1, w2 *machine) { testNftables(t, c, w1, w2) }},
		{"Clients", func(t *testing.T, c *cluster, w1, w2 *machine) { testClients(t, c, w1, w2) }},
		{"Streams", func(t *testing.T, c *cluster, w1, w2 *machine) { testStreams(t, c, w1, w2) }},
		{"Callbacks", func(t *testing.T, c *cluster, w1, w2 *machine) { testCallbacks(t, c, w1, w2) }},
		{"ServingCertificates", testServingCertificates},
		{"Neighbours", func(t *testing.T, c *cluster, w1, w2 *machine) {
			testNeighbours(t, c, globex.within(t), w1, w3.within(t))
		}},
		{"HostRestart", func(t *testing.T, c *cluster, w1, w2 *machine) {
			testHostRestart(t, c, w1, w2)
			// What nodes and pods learn from now on they learn from watches made anew.
			for _, m := range []*machine{w1, w2} {
				c.runClients("restarted-"+m.name, m, "")
			}
		}},
		{"ProxyRestart", func(t *testing.T, c *cluster, w1, w2 *machine) {
			for _, m := range []*machine{w1, w2} {
				testProxyRestart(t, c, m)
			}
		}},
		{"Adoption", func(t *testing.T, c *cluster, w1, w2 *machine) {
			for _, m := range []*machine{w1, w2} {
				testAdoption(t, c, m)
			}
		}},
		{"Drain", testDrain},
		{"Reboot", testReboot},
		{"JoinAgain", testJoinAgain},
		{"Expired", testExpired},
		{"Removal", func(t *testing.T, c *cluster, _, _ *machine) { testRemoval(t, globex.within(t), w3.within(t)) }},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, acme.within(t), w1.within(t), w2.within(t)) })
	}
}

// proxyInNamespaces keeps kube-proxy from a setting that only the first network
// namespace of a kernel has.
func (c *cluster) proxyInNamespaces() {
	c.t.Helper()
	c.configureKubeProxy("maxPerCore: null", "maxPerCore: 0")
}

// configureKubeProxy changes a line of kube-proxy's configuration.
func (c *cluster) configureKubeProxy(old, now string) {
	c.t.Helper()
	eventually(c.t, "kube-proxy has a configuration", func() error {
		proxy, err := c.CoreV1().ConfigMaps("kube-system").Get(c.t.Context(), "kube-proxy", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !strings.Contains(proxy.Data["config.conf"], old+"\n") {
			c.t.Fatalf("kube-proxy's configuration has no %q:\n%s", old, proxy.Data["config.conf"])
		}
		proxy.Data["config.conf"] = strings.Replace(proxy.Data["config.conf"], old+"\n", now+"\n", 1)
		_, err = c.CoreV1().ConfigMaps("kube-system").Update(c.t.Context(), proxy, metav1.UpdateOptions{})
		return err
	})
}

// testNftables has kube-proxy use nftables from now on, instead of iptables.
func testNftables(t *testing.T, c *cluster, workers ...*machine) {
	for _, m := range workers {
		if rules := m.must("iptables-save", "-t", "nat"); !strings.Contains(rules, "KUBE-SERVICES") {
			t.Fatalf("kube-proxy on %s has not used iptables:\n%s", m.name, rules)
		}
	}
	c.configureKubeProxy("mode: iptables", "mode: nftables")
	c.kubectl("rollout", "restart", "--namespace=kube-system", "daemonset/kube-proxy")
	c.kubectl("rollout", "status", "--namespace=kube-system", "daemonset/kube-proxy", "--timeout="+patience.String())
	for _, m := range workers {
		eventually(t, "kube-proxy uses nftables on "+m.name, func() error {
			if rules := m.must("iptables-save", "-t", "nat"); strings.Contains(rules, "-A KUBE-SERVICES") {
				return fmt.Errorf("it uses iptables still:\n%s", rules)
			}
			if tables := m.must("nft", "list", "tables"); !strings.Contains(tables, "kube-proxy") {
				return fmt.Errorf("it does not:\n%s", tables)
			}
			return nil
		})
	}
	testService(t, c, workers...)
}

// pods are the ready pods with a label, by node; there must be n of them.
func (c *cluster) pods(app string, n int) (map[string]corev1.Pod, error) {
	list, err := c.CoreV1().Pods("default").List(c.t.Context(), metav1.ListOptions{LabelSelector: "app=" + app})
	if err != nil {
		return nil, err
	}
	pods := map[string]corev1.Pod{}
	for _, pod := range list.Items {
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue && pod.DeletionTimestamp == nil {
				pods[pod.Spec.NodeName] = pod
			}
		}
	}
	if len(pods) != n || len(list.Items) != n {
		return pods, fmt.Errorf("pods %s are ready on %d nodes, of %d; want %d\n%s", app, len(pods), len(list.Items), n, c.kubectl("get", "pods", "-A", "-o", "wide"))
	}
	return pods, nil
}

// testService asks a Service by its name from a pod on each node, until pods on both have
// answered.
func testService(t *testing.T, c *cluster, workers ...*machine) {
	url := "http://web/hostname"
	if !c.reachable { // then CoreDNS cannot know the names
		service, err := c.CoreV1().Services("default").Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		url = "http://" + service.Spec.ClusterIP + "/hostname"
	}
	for _, m := range workers {
		answered := map[string]bool{}
		eventually(t, "pods on all nodes have answered one on "+m.name, func() error {
			pods, err := c.pods("web", len(workers))
			if err != nil {
				return err
			}
			asker := pods[m.name]
			name, err := m.fromPod(asker.Status.PodIP, url)
			if err != nil {
				return err
			}
			answered[name] = true
			for _, pod := range pods {
				if !answered[pod.Name] {
					return fmt.Errorf("%s did not, but %v", pod.Name, answered)
				}
			}
			return nil
		})
	}
}

// TestStockAgent has machines join without any program of tenantd's. The API server
// reaches them and their pods through upstream's agent; pods do not reach it.
func TestStockAgent(t *testing.T) {
	l := newLab(t)
	h := l.newHost()
	c := h.add("acme")
	c.reachable = false
	c.proxyInNamespaces()
	w1, w2 := l.machine("w1"), l.machine("w2")
	c.join(w1)
	c.join(w2)
	c.connect(w1, w2)
	c.awaitNodes(w1, w2)
	c.apply(web)

	t.Run("NoAgent", func(t *testing.T) {
		r := execute(t, c.within(t).kubectlCommand("logs", c.pod("web", w1)))
		if r.code == 0 || !strings.Contains(r.stderr, "no tunnel agent") {
			t.Errorf("kubectl logs exited with %d and did not say that no agent is there: %s", r.code, r.stderr)
		}
	})
	// The example of the documentation, with the lines changed that it says are to be.
	manifest, err := os.ReadFile(filepath.Join("..", "..", "docs", "konnectivity-agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	const example = "--proxy-server-host=acme.k8s.example.com"
	if !strings.Contains(string(manifest), example) || !strings.Contains(string(manifest), agentImage) {
		t.Fatalf("docs/konnectivity-agent.yaml has no %s or no %s", example, agentImage)
	}
	c.apply(strings.Replace(string(manifest), example, "--proxy-server-host="+c.hostname, 1))
	c.kubectl("rollout", "status", "--namespace=kube-system", "daemonset/konnectivity-agent", "--timeout="+patience.String())

	for _, test := range []struct {
		name string
		run  func(t *testing.T, c *cluster, w1, w2 *machine)
	}{
		{"Service", func(t *testing.T, c *cluster, w1, w2 *machine) { testService(t, c, w1, w2) }},
		{"Streams", func(t *testing.T, c *cluster, w1, w2 *machine) { testStreams(t, c, w1, w2) }},
		{"Callbacks", func(t *testing.T, c *cluster, w1, w2 *machine) { testCallbacks(t, c, w1, w2) }},
		{"HostRestart", testHostRestart},
		{"StreamsAgain", func(t *testing.T, c *cluster, w1, w2 *machine) { testStreams(t, c, w1, w2) }},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, c.within(t), w1.within(t), w2.within(t)) })
	}
}

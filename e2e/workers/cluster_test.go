// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// containerdConfig is Debian's with what a kubelet of today and a machine that may
// lack CAP_SYS_RESOURCE need: runc fails without a word if it may not lower an
// oom_score_adj.
const containerdConfig = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + pauseImage + `"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
`

// kubeletUnit does what the unit in Kubernetes' packages does: the kubelet runs from
// the first on, and fails until kubeadm has written its configuration.
const kubeletUnit = `[Unit]
Description=kubelet
After=containerd.service
StartLimitIntervalSec=0

[Service]
Environment="CONNECTION=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
ExecStart=/usr/bin/kubelet $CONNECTION --config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS
Restart=always
RestartSec=1

[Install]
WantedBy=multi-user.target
`

// kubeletPatch is what the machines of the tests need of a kubelet, and users'
// do not: cgroup v1 if there is nothing better, and disks that are nearly full.
const kubeletPatch = `failCgroupV1: false
failSwapOn: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 50Mi, nodefs.available: 500Mi, imagefs.available: 500Mi}
`

// cluster is a tenant with its administrator's credentials.
type cluster struct {
	kubernetes.Interface
	t          testing.TB
	host       *host
	name       string
	hostname   string
	kubeconfig string
	// reachable says that pods reach the API server: that their workers run
	// tenant-proxy.
	reachable bool
	// via is the machine that kubectl runs on, if it is not the lab.
	via *machine
}

// add adds a tenant.
func (h *host) add(name string, args ...string) *cluster {
	h.t.Helper()
	hostname := name + "." + domain
	h.lab.name(hostname, h.address)
	h.mustTenantctl(append([]string{"add", name, "--timeout", patience.String()}, args...)...)
	kubeconfig := filepath.Join(h.lab.dir, name+".kubeconfig")
	h.mustTenantctl("kubeconfig", name, "--output", kubeconfig)
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		h.t.Fatal(err)
	}
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		h.t.Fatal(err)
	}
	return &cluster{Interface: client, t: h.t, host: h, name: name, hostname: hostname, kubeconfig: kubeconfig, reachable: true}
}

// within is the cluster, for use in a subtest.
func (c *cluster) within(t testing.TB) *cluster {
	n := *c
	n.t, n.host = t, c.host.within(t)
	return &n
}

// kubectlCommand is upstream's kubectl with the administrator's credentials.
func (c *cluster) kubectlCommand(args ...string) *exec.Cmd {
	args = append([]string{bin(c.t, "kubectl"), "--kubeconfig", c.kubeconfig}, args...)
	if c.via != nil {
		args = append([]string{"nsenter", "--net=" + c.via.network()}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "KUBECACHEDIR="+c.kubeconfig+".cache")
	return cmd
}

// kubectl runs kubectl, which must succeed, and returns what it printed.
func (c *cluster) kubectl(args ...string) string {
	c.t.Helper()
	return execute(c.t, c.kubectlCommand(args...)).must(c.t, "kubectl "+strings.Join(args, " "))
}

// apply applies a manifest.
func (c *cluster) apply(manifest string) {
	c.t.Helper()
	execute(c.t, c.kubectlCommand("apply", "-f", "-"), manifest).must(c.t, "kubectl apply")
}

// connect connects the pods of a cluster's workers, as its CNI would: a bridge on
// each node, and a route to each other node's pods.
func (c *cluster) connect(workers ...*machine) {
	c.t.Helper()
	ranges := map[string]string{}
	for _, m := range workers {
		eventually(c.t, "node "+m.name+" has a range for its pods", func() error {
			node, err := c.CoreV1().Nodes().Get(c.t.Context(), m.name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if node.Spec.PodCIDR == "" {
				return errors.New("it has none")
			}
			ranges[m.name] = node.Spec.PodCIDR
			return nil
		})
	}
	for _, m := range workers {
		m.write("/etc/cni/net.d/10-lab.conflist", fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "lab", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": %q}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}`, ranges[m.name]))
		for _, other := range workers {
			if other != m {
				m.must("ip", "route", "replace", ranges[other.name], "via", other.address)
			}
		}
	}
}

// awaitNodes waits until the nodes are ready.
func (c *cluster) awaitNodes(workers ...*machine) {
	c.t.Helper()
	for _, m := range workers {
		eventually(c.t, "node "+m.name+" is ready", func() error {
			node, err := c.CoreV1().Nodes().Get(c.t.Context(), m.name, metav1.GetOptions{})
			if err != nil {
				return fmt.Errorf("%w\n%s", err, m.journal("kubelet", 20))
			}
			for _, condition := range node.Status.Conditions {
				if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
					return nil
				}
			}
			return fmt.Errorf("it is not\n%s", m.journal("kubelet", 20))
		})
	}
}

// join joins a machine to the cluster with the line that tenantctl prints.
func (c *cluster) join(m *machine) {
	c.t.Helper()
	m.must(c.joinCommand(m)...)
}

// joinCommand is that line, with what the machines of the tests need.
func (c *cluster) joinCommand(m *machine) []string {
	c.t.Helper()
	m.write("/root/patches/kubeletconfiguration.yaml", kubeletPatch)
	line := strings.Fields(c.host.mustTenantctl("join-command", c.name))
	// Of all that kubeadm looks at, only cgroup v1 is not to its liking.
	return append(line, "--patches=/root/patches", "--ignore-preflight-errors=SystemVerification")
}

// reset makes a worker a machine that never joined, by kubeadm and the commands
// that it says are left to type.
func (m *machine) reset() {
	m.t.Helper()
	m.must("kubeadm", "reset", "--force")
	// Not the directory: containerd 1.6 does not notice when it comes back.
	m.must("rm", "/etc/cni/net.d/10-lab.conflist")
	m.must("ip", "link", "delete", "cni0")
	m.must("nft", "flush", "ruleset")
}

// fromPod gets a URL from within a pod, whose testserver is at address. It asks
// from the machine that the pod runs on.
func (m *machine) fromPod(address, url string) (string, error) {
	r := m.run("curl", "--silent", "--show-error", "--fail", "--max-time", "10", "http://"+address+":8080/fetch?url="+url)
	if r.code != 0 {
		return "", errors.New(r.stdout + r.stderr)
	}
	return r.stdout, nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// vip is where pods find the API server, on each worker.
const vip = "172.20.0.1"

// installProxy installs tenant-proxy on a machine as users do: one archive, one
// script.
func (c *cluster) installProxy(carrier string, m *machine, args ...string) {
	c.t.Helper()
	m.must(c.unpackBundle(carrier, m, args...) + "/install.sh")
	m.awaitProxy()
}

// unpackBundle brings the archive to a machine and returns where its files are.
func (c *cluster) unpackBundle(carrier string, m *machine, args ...string) string {
	c.t.Helper()
	file := filepath.Join(c.host.lab.dir, c.name+"-worker.tar.gz")
	c.host.mustTenantctl(append([]string{"worker", "bundle", c.name, "--output", file, "--carrier", carrier}, args...)...)
	archive, err := os.ReadFile(file)
	if err != nil {
		c.t.Fatal(err)
	}
	m.write("/root/worker.tar.gz", string(archive))
	m.must("tar", "-C", "/root", "-xzf", "/root/worker.tar.gz")
	return "/root/tenant-proxy"
}

// proxyStatus is what the tests read of `tenant-proxy status`.
type proxyStatus struct {
	Ready   bool
	Problem string
	Device  string
	Hosts   []struct {
		Address, Carrier, Error string
		Healthy                 bool
	}
	Tunnel struct {
		Problem string
		Servers []struct {
			Server, Error string
			Connected     bool
		}
	}
}

// proxyStatus asks the tenant-proxy of the machine.
func (m *machine) proxyStatus() (s proxyStatus, err error) {
	r := m.run("tenant-proxy", "status", "-o", "json")
	if r.code != 0 {
		return s, errors.New(r.stdout + r.stderr)
	}
	err = json.Unmarshal([]byte(r.stdout), &s)
	return s, err
}

// awaitProxy waits until pods of the machine can reach the API server.
func (m *machine) awaitProxy() {
	m.t.Helper()
	eventually(m.t, "tenant-proxy on "+m.name+" is ready", func() error {
		s, err := m.proxyStatus()
		if err == nil && !s.Ready {
			err = errors.New(s.Problem)
		}
		if err != nil {
			return fmt.Errorf("%w\n%s", err, m.journal("tenant-proxy", 20))
		}
		return nil
	})
}

// awaitTunnel waits until the API server can reach the machine and its pods.
func (m *machine) awaitTunnel() {
	m.t.Helper()
	eventually(m.t, "tenant-proxy on "+m.name+" has a tunnel to its host", func() error {
		s, err := m.proxyStatus()
		if err != nil {
			return err
		}
		for _, server := range s.Tunnel.Servers {
			if server.Connected {
				return nil
			}
		}
		return fmt.Errorf("%+v\n%s", s.Tunnel, m.journal("tenant-proxy", 20))
	})
}

// testInstallation installs tenant-proxy on a machine where another program has the
// address that it needs.
func testInstallation(t *testing.T, c *cluster, m *machine) {
	for _, args := range []string{"link add br-other type bridge", "address add " + vip + "/24 dev br-other", "link set br-other up"} {
		m.must(append([]string{"ip"}, strings.Fields(args)...)...)
	}
	r := m.run(c.unpackBundle("auto", m) + "/install.sh")
	if r.code == 0 || !strings.Contains(r.stderr+m.journal("tenant-proxy", 5), "br-other") {
		t.Errorf("install.sh exited with %d, and does not say who has the address: %s%s\n%s", r.code, r.stdout, r.stderr, m.journal("tenant-proxy", 5))
	}
	r = m.run("tenant-proxy", "check")
	if r.code == 0 || !strings.Contains(r.stdout, "br-other") {
		t.Errorf("tenant-proxy check exited with %d, and does not say who has the address: %s%s", r.code, r.stdout, r.stderr)
	}
	// Whoever has it keeps it, and tenant-proxy takes it when it is free.
	if out := m.must("ip", "-brief", "address", "show", "to", vip); !strings.HasPrefix(out, "br-other") {
		t.Errorf("the address is on %q, want br-other", out)
	}
	m.must("ip", "link", "delete", "br-other")
	m.awaitProxy()
	m.must("tenant-proxy", "check")
}

// testAdoption has the kubelet reach its API server through tenant-proxy, and back.
func testAdoption(t *testing.T, c *cluster, m *machine) {
	const file = "/etc/kubernetes/kubelet.conf"
	before := m.must("cat", file)
	m.must("tenant-proxy", "check")
	m.must("tenant-proxy", "adopt-kubelet")
	if got := m.must("cat", file); !strings.Contains(got, "server: https://"+vip+":6443") {
		t.Errorf("the kubelet's kubeconfig names another server:\n%s", got)
	}
	m.must("tenant-proxy", "adopt-kubelet") // again is no harm
	c.restartKubelet(m)
	if out := m.must("ss", "-Htnp", "dst", vip); !strings.Contains(out, `"kubelet"`) {
		t.Errorf("the kubelet has no connection to %s:\n%s", vip, out)
	}
	if r := m.run("tenant-proxy", "uninstall"); r.code == 0 || !strings.Contains(r.stderr, "--revert") {
		t.Errorf("uninstall cuts the kubelet off: exit code %d, %s%s", r.code, r.stdout, r.stderr)
	}
	c.awaitExec(m)

	m.must("tenant-proxy", "adopt-kubelet", "--revert")
	if after := m.must("cat", file); after != before {
		t.Errorf("--revert has not brought the kubeconfig back:\n%s", after)
	}
	c.restartKubelet(m)
	if out := m.must("ss", "-Htnp", "dst", vip); strings.Contains(out, `"kubelet"`) {
		t.Errorf("the kubelet has still a connection to %s:\n%s", vip, out)
	}
}

// restartKubelet restarts the kubelet and waits until it has renewed its lease.
func (c *cluster) restartKubelet(m *machine) {
	c.t.Helper()
	m.must("systemctl", "restart", "kubelet")
	restarted := time.Now()
	eventually(c.t, "the kubelet on "+m.name+" has told that it lives", func() error {
		lease, err := c.CoordinationV1().Leases("kube-node-lease").Get(c.t.Context(), m.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if lease.Spec.RenewTime.Time.Before(restarted) {
			return fmt.Errorf("last at %s\n%s", lease.Spec.RenewTime, m.journal("kubelet", 10))
		}
		return nil
	})
	c.awaitNodes(m)
}

// testProxyRestart replaces tenant-proxy while it is in use, which nobody notices,
// and kills it, which it recovers from.
func testProxyRestart(t *testing.T, c *cluster, m *machine) {
	const requests = `until [ -e /tmp/enough ]; do
  curl --silent --show-error --fail --max-time 20 --output /dev/null --cacert /etc/kubernetes/pki/ca.crt https://` + vip + `:6443/readyz || echo failed
  echo done
done`
	m.must("rm", "-f", "/tmp/enough")
	var load result
	stop := together(t, func(context.Context) { load = execute(t, m.command("sh", "-c", requests)) })
	var asked int
	var failures []error
	stopAsking := together(t, func(ctx context.Context) {
		for ctx.Err() == nil {
			_, err := c.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes/" + m.name + "/proxy/healthz").Timeout(patience).DoRaw(context.Background())
			if asked++; err != nil {
				failures = append(failures, err)
			}
		}
	})
	pod := "steady-" + m.name
	c.apply(spammer(pod, m.name, "-every=100ms"))
	c.kubectl("wait", "--for=condition=Ready", "--timeout="+patience.String(), "pod/"+pod)
	log := c.follow("logs", "-f", "--tail=1", pod)
	last := number(t, log.line())

	pid := func() string {
		return strings.TrimSpace(m.must("systemctl", "show", "--property=MainPID", "tenant-proxy"))
	}
	for range 2 {
		before := pid()
		m.must("systemctl", "reload", "tenant-proxy")
		eventually(t, "another process is tenant-proxy", func() error {
			if now := pid(); now == before {
				return errors.New(now)
			}
			return nil
		})
		m.awaitProxy()
		// What was open goes on.
		for range 20 {
			if last++; number(t, log.line()) != last {
				t.Fatalf("a line of the log is lost, number %d", last)
			}
		}
	}
	m.write("/tmp/enough", "")
	stop()
	if n := strings.Count(load.stdout, "done"); n < 20 || strings.Contains(load.stdout, "failed") || load.code != 0 {
		t.Errorf("of %d requests %d failed, while tenant-proxy was replaced: %s", n, strings.Count(load.stdout, "failed"), load.stderr)
	}
	stopAsking()
	if asked < 20 || len(failures) > 0 {
		t.Errorf("the API server asked the kubelet %d times while tenant-proxy was replaced, in vain %d times: %v", asked, len(failures), errors.Join(failures...))
	}
	log.end()

	m.must("systemctl", "kill", "--signal=KILL", "tenant-proxy")
	m.awaitProxy()
	m.awaitTunnel()
	c.runClients("killed-"+m.name, m, "")
	c.kubectl("logs", "--tail=1", pod)
}

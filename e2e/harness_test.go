// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tenantd/tenantd/e2e/proc"
)

// domain is the zone of the hosts' names in all tests.
const domain = "k8s.test"

// patience is how long a test waits for what must happen: far beyond what it
// takes on an idle machine, since a test must not fail because its machine is busy.
const patience = 5 * time.Minute

// bin is the path of a program that make has built. TENANTD_BINARY names another
// tenantd, such as one with the race detector.
func bin(t testing.TB, name string) string {
	t.Helper()
	if path := os.Getenv("TENANTD_BINARY"); path != "" && name == "tenantd" {
		return path
	}
	return proc.Built(t, filepath.Join("..", "bin", name))
}

// host is a tenantd process.
type host struct {
	t      testing.TB
	dir    string // --data-dir
	listen string
	health string
	args   []string // beyond those above
	env    []string

	cmd *proc.Process
	log *proc.Log
}

// newHost describes a host on free ports of loopback with an empty data directory.
func newHost(t testing.TB, args ...string) *host {
	t.Helper()
	// Not t.TempDir: a unix socket's path must be short.
	dir, err := os.MkdirTemp("", "tenantd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return &host{t: t, dir: filepath.Join(dir, "data"), listen: proc.FreeAddress(t), health: proc.FreeAddress(t), args: args}
}

// startHost starts such a host and waits until it is ready.
func startHost(t testing.TB, args ...string) *host {
	t.Helper()
	h := newHost(t, args...)
	h.start()
	h.awaitReady()
	return h
}

// command is the command that runs the host.
func (h *host) command() *exec.Cmd {
	args := append([]string{"run", "--data-dir", h.dir, "--listen", h.listen, "--advertise-address", h.listen,
		"--health-listen", h.health, "--domain", domain, "--name", "host-a"}, h.args...)
	cmd := exec.Command(bin(h.t, "tenantd"), args...)
	cmd.Env = append(os.Environ(), h.env...)
	return cmd
}

// start starts the process and has it end with the test at the latest.
func (h *host) start() {
	h.t.Helper()
	h.startCommand(h.command())
}

// startCommand is start with a command of one's own.
func (h *host) startCommand(cmd *exec.Cmd) {
	h.t.Helper()
	log := &proc.Log{}
	cmd.Stdout, cmd.Stderr = log, log
	p := proc.Start(h.t, cmd)
	h.cmd, h.log = p, log
	h.t.Cleanup(func() {
		p.Stop(patience)
		if h.t.Failed() && h.log == log {
			h.t.Logf("log of the host:\n%s", log.Tail(60))
		}
	})
}

// awaitReady waits until /readyz says so.
func (h *host) awaitReady() {
	h.t.Helper()
	eventually(h.t, "the host is ready", func() error {
		if h.cmd.Ended() {
			h.t.Fatalf("the host ended: %v\n%s", h.cmd.ProcessState, h.log.Tail(20))
		}
		_, err := h.get("/readyz")
		return err
	})
}

// get asks the health address.
func (h *host) get(path string) (string, error) {
	return proc.Get(http.DefaultClient, "http://"+h.health+path)
}

// signal sends the process a signal.
func (h *host) signal(sig os.Signal) {
	h.t.Helper()
	if err := h.cmd.Process.Signal(sig); err != nil {
		h.t.Fatalf("send %v: %v", sig, err)
	}
}

// wait waits for the process to end, and returns its exit code.
func (h *host) wait() int {
	h.t.Helper()
	if !h.cmd.EndsWithin(patience) {
		h.t.Fatalf("the host goes on after %s\n%s", patience, h.log.Tail(40))
	}
	return h.cmd.ProcessState.ExitCode()
}

// stop ends the host with SIGTERM, which must go well.
func (h *host) stop() {
	h.t.Helper()
	h.signal(syscall.SIGTERM)
	if code := h.wait(); code != 0 {
		h.t.Fatalf("after SIGTERM the host exited with %d\n%s", code, h.log.Tail(40))
	}
}

// adminKubeconfig is the file with the system plane's credentials.
func (h *host) adminKubeconfig() string { return filepath.Join(h.dir, "admin.kubeconfig") }

// result is what a command left.
type result struct {
	stdout, stderr string
	code           int
}

// execute runs a program and returns what it left, whatever that is.
func execute(t testing.TB, stdin string, env []string, name string, args ...string) result {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), bin(t, name), args...)
	cmd.Stdin, cmd.Env = strings.NewReader(stdin), append(os.Environ(), env...)
	stdout, stderr, code := proc.Run(t, patience, cmd)
	return result{stdout, stderr, code}
}

// tenantctl runs tenantctl against the host.
func (h *host) tenantctl(args ...string) result {
	h.t.Helper()
	return execute(h.t, "", []string{"TENANTCTL_KUBECONFIG=" + h.adminKubeconfig()}, "tenantctl", args...)
}

// mustTenantctl is tenantctl for what must succeed; it returns its output.
func (h *host) mustTenantctl(args ...string) string {
	h.t.Helper()
	r := h.tenantctl(args...)
	if r.code != 0 {
		h.t.Fatalf("tenantctl %s: exit code %d\n%s%s", strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// add adds a tenant, waits until it is ready and returns the path of its
// administrator's kubeconfig.
func (h *host) add(name string, args ...string) string {
	h.t.Helper()
	h.mustTenantctl(append([]string{"add", name, "--timeout", patience.String()}, args...)...)
	return h.kubeconfig(name)
}

// kubeconfig writes a kubeconfig for the tenant and returns its path.
func (h *host) kubeconfig(name string, args ...string) string {
	h.t.Helper()
	file := filepath.Join(h.t.TempDir(), name+".kubeconfig")
	h.mustTenantctl(append([]string{"kubeconfig", name, "--output", file}, args...)...)
	return file
}

// kubectl runs upstream's kubectl with a kubeconfig and input.
func kubectl(t testing.TB, kubeconfig, stdin string, args ...string) result {
	t.Helper()
	// A cache of its own, so that tests do not see each other's discovery.
	return execute(t, stdin, []string{"KUBECACHEDIR=" + filepath.Dir(kubeconfig)}, "kubectl", append([]string{"--kubeconfig", kubeconfig}, args...)...)
}

// mustKubectl is kubectl for what must succeed; it returns its output.
func mustKubectl(t testing.TB, kubeconfig, stdin string, args ...string) string {
	t.Helper()
	r := kubectl(t, kubeconfig, stdin, args...)
	if r.code != 0 {
		t.Fatalf("kubectl %s: exit code %d\n%s%s", strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// restConfig reads a kubeconfig, without the client's own rate limit.
func restConfig(t testing.TB, kubeconfig string) *rest.Config {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cfg.QPS = -1
	return cfg
}

// client makes a client from a kubeconfig.
func client(t testing.TB, kubeconfig string) *kubernetes.Clientset {
	t.Helper()
	c, err := kubernetes.NewForConfig(restConfig(t, kubeconfig))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// eventually repeats check until it succeeds.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	proc.Eventually(t, patience, 100*time.Millisecond, what, check)
}

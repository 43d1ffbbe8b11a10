// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// TestServiceNotifications plays systemd to a service of Type=notify with a watchdog.
func TestServiceNotifications(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	manager := newServiceManager(t, filepath.Dir(h.dir))
	h.env = []string{"NOTIFY_SOCKET=" + manager.address, "WATCHDOG_USEC=300000"}
	h.start()
	manager.await("STATUS=Starting.*")
	manager.await("READY=1")
	// Units that come after this one rely on it.
	if reason, err := h.get("/readyz"); err != nil {
		t.Errorf("the host said READY, but: %v %s", err, reason)
	}
	if r := kubectl(t, h.adminKubeconfig(), "", "get", "tenants"); r.code != 0 {
		t.Errorf("the host said READY, but: %s", r.stderr)
	}
	for range 3 {
		manager.await("WATCHDOG=1")
	}
	h.add("acme")
	manager.await("STATUS=1 tenants? ready, 0 starting, 0 failed")
	h.mustTenantctl("remove", "acme", "--yes")
	manager.await("STATUS=0 tenants? ready, 0 starting, 0 failed")

	h.signal(syscall.SIGTERM)
	manager.await("STOPPING=1")
	if code := h.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	for line, want := range map[string]int{"READY=1": 1, "STOPPING=1": 1} {
		if got := manager.count(line); got != want {
			t.Errorf("the host said %s %d times, want %d", line, got, want)
		}
	}
}

// TestSocketActivation plays systemd with a socket unit: the port stays open while
// the host restarts, and clients that come meanwhile wait.
func TestSocketActivation(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	socket, err := ln.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	h := newHost(t)
	configured := h.listen
	h.listen = ln.Addr().String()             // where clients go
	h.args = []string{"--listen", configured} // which systemd's socket overrules
	h.startActivated(socket)
	h.awaitReady()
	kubeconfig := h.add("acme")
	put(t, client(t, kubeconfig), "keepsake", "acme")
	if c, err := net.Dial("tcp", configured); err == nil {
		c.Close()
		t.Error("the host listens on the configured address although it was given a socket")
	}

	h.stop()
	// Each connects while nobody accepts, and asks.
	const clients = 8
	connected, answers := make(chan struct{}), make(chan error, clients)
	for range clients {
		cfg := restConfig(t, kubeconfig)
		connect := sync.OnceFunc(func() { connected <- struct{}{} })
		cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, address)
			if err == nil {
				connect()
			}
			return c, err
		}
		c, err := kubernetes.NewForConfig(cfg)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, err := c.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
			answers <- err
		}()
		<-connected
	}
	h.startActivated(socket)
	for range clients {
		if err := <-answers; err != nil {
			t.Errorf("a client that came while the host was down: %v", err)
		}
	}
	eventually(t, "the tenant is back", func() error { return holds(client(t, kubeconfig), map[string]string{"keepsake": "acme"}) })
	h.stop()
}

// serviceManager is what systemd is to a service that notifies it.
type serviceManager struct {
	t       testing.TB
	address string

	mu    sync.Mutex // guards what follows
	lines []string
	seen  int // lines that await has passed
}

// newServiceManager listens on a socket in dir.
func newServiceManager(t testing.TB, dir string) *serviceManager {
	t.Helper()
	m := &serviceManager{t: t, address: filepath.Join(dir, "notify")}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: m.address, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	go func() {
		buffer := make([]byte, 4096)
		for {
			n, err := conn.Read(buffer)
			if err != nil {
				return
			}
			m.mu.Lock()
			m.lines = append(m.lines, strings.Split(strings.TrimSpace(string(buffer[:n])), "\n")...)
			m.mu.Unlock()
		}
	}()
	return m
}

// await waits for a line after those that were waited for before.
func (m *serviceManager) await(pattern string) {
	m.t.Helper()
	line := regexp.MustCompile("^" + pattern + "$")
	eventually(m.t, "the host says "+pattern, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		for i, said := range m.lines[m.seen:] {
			if line.MatchString(said) {
				m.seen += i + 1
				return nil
			}
		}
		return fmt.Errorf("it said %q", m.lines[m.seen:])
	})
}

// count is how often a line has been said.
func (m *serviceManager) count(line string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, said := range m.lines {
		if said == line {
			n++
		}
	}
	return n
}

// startActivated starts the host as systemd starts a service with a socket.
func (h *host) startActivated(socket *os.File) {
	h.t.Helper()
	cmd := h.command()
	// Only the process itself knows its number before it runs.
	shell := exec.Command("sh", append([]string{"-c", `LISTEN_PID=$$ exec "$@"`, "sh"}, cmd.Args...)...)
	shell.Env = append(cmd.Env, "LISTEN_FDS=1")
	shell.ExtraFiles = []*os.File{socket} // the first is 3, where systemd begins
	h.startCommand(shell)
}

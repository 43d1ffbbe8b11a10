// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tenantd/tenantd/e2e/proc"
)

const (
	// domain is the zone of all names.
	domain = "hosts.test"
	// clients is the address that clients have, if they do not choose another.
	clients = "10.78.0.1"
	// otherClient is that other one.
	otherClient = "10.78.0.2"
)

// patience is how long a test waits for what must happen: far beyond what it
// takes on an idle machine, since a test must not fail because its machine is busy.
const patience = 2 * time.Minute

// lab is a network that hosts are on.
type lab struct {
	t   testing.TB
	dir string
}

// newLab makes the network.
func newLab(t testing.TB) *lab {
	t.Helper()
	l := &lab{t: t, dir: os.Getenv(labVariable)}
	l.ip("link set lo up")
	l.ip("link add lab type bridge")
	t.Cleanup(func() { exec.Command("ip", "link", "delete", "lab").Run() })
	l.ip("address add " + clients + "/24 dev lab")
	l.ip("address add " + otherClient + "/24 dev lab")
	l.ip("link set lab up")
	return l
}

// ip runs ip.
func (l *lab) ip(args string) {
	l.t.Helper()
	execute(l.t, exec.Command("ip", strings.Fields(args)...)).must(l.t, "ip "+args)
}

// host is a machine with tenantd.
type host struct {
	lab     *lab
	name    string
	address string // of the machine
	dir     string // --data-dir
	program string // of bin
	log     *logBuffer
	process
}

// process is the tenantd that runs, or ran last. The zero value is none.
type process struct {
	cmd    *proc.Process
	frozen bool
}

// newHost makes a machine, on which nothing runs as yet. The number is the last of its
// address.
func (l *lab) newHost(name string, number int) *host {
	l.t.Helper()
	h := &host{lab: l, name: name, address: fmt.Sprintf("10.78.0.%d", number), dir: filepath.Join(l.dir, name), program: "tenantd", log: &logBuffer{}}
	l.ip("netns add " + name)
	l.t.Cleanup(func() { exec.Command("ip", "netns", "delete", name).Run() })
	l.ip("link add " + name + " type veth peer name eth0 netns " + name)
	l.ip("link set " + name + " master lab up")
	for _, args := range []string{"link set lo up", "address add " + h.address + "/24 dev eth0", "link set eth0 up", "route add default via " + clients} {
		l.ip("-n " + name + " " + args)
	}
	l.t.Cleanup(func() {
		h.end()
		if l.t.Failed() || testing.Verbose() {
			file := filepath.Join(os.TempDir(), "tenantd-e2e-"+name+".log")
			l.t.Logf("the log of %s is in %s (%v)", name, file, os.WriteFile(file, []byte(h.log.String()), 0o600))
		}
	})
	return h
}

// port is where the host's one port is.
func (h *host) port() string { return h.address + ":443" }

// start starts tenantd.
func (h *host) start(t testing.TB, args ...string) {
	t.Helper()
	if h.running() {
		t.Fatalf("%s runs already", h.name)
	}
	args = append([]string{"--net=/run/netns/" + h.name, bin(t, h.program), "run", "--data-dir", h.dir, "--domain", domain, "--name", h.name,
		"--listen", h.port(), "--advertise-address", h.address, "--health-listen", h.address + ":8080",
		"--peer-listen", h.address + ":2380", "--gossip-listen", h.address + ":7946"}, args...)
	cmd := exec.Command("nsenter", args...)
	cmd.Stdout, cmd.Stderr = h.log, h.log
	fmt.Fprintf(h.log, "--- %s starts\n", h.name)
	h.process = process{cmd: proc.Start(t, cmd)}
}

// running reports whether tenantd runs.
func (h *host) running() bool { return h.cmd != nil && !h.cmd.Ended() }

// awaitReady waits until /readyz says so.
func (h *host) awaitReady(t testing.TB) {
	t.Helper()
	eventually(t, h.name+" is ready", func() error {
		if !h.running() {
			t.Fatalf("%s ended: %v\n%s", h.name, h.cmd.ProcessState, h.log.Tail(20))
		}
		return h.probe("/readyz")
	})
}

// probe asks the health address.
func (h *host) probe(path string) error {
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	if _, err := proc.Get(&client, "http://"+h.address+":8080"+path); err != nil {
		return fmt.Errorf("%s: %w", h.name, err)
	}
	return nil
}

// kill ends tenantd without warning.
func (h *host) kill(t testing.TB) {
	t.Helper()
	if err := h.cmd.Kill(); err != nil {
		t.Fatalf("kill %s: %v", h.name, err)
	}
	fmt.Fprintf(h.log, "--- %s was killed\n", h.name)
}

// freeze stops all of tenantd where it is, until thaw.
func (h *host) freeze(t testing.TB) {
	t.Helper()
	if err := h.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatalf("freeze %s: %v", h.name, err)
	}
	h.frozen = true
}

func (h *host) thaw(t testing.TB) {
	t.Helper()
	if err := h.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatalf("thaw %s: %v", h.name, err)
	}
	h.frozen = false
}

// stop ends tenantd with SIGTERM, which must go well.
func (h *host) stop(t testing.TB) {
	t.Helper()
	h.cmd.Process.Signal(syscall.SIGTERM) // if it has ended by itself, the exit code says so
	if code := h.wait(t); code != 0 {
		t.Fatalf("after SIGTERM %s exited with %d\n%s", h.name, code, h.log.Tail(20))
	}
}

// wait waits until tenantd has ended and returns its exit code.
func (h *host) wait(t testing.TB) int {
	t.Helper()
	if !h.cmd.EndsWithin(patience) {
		t.Fatalf("%s goes on after %s\n%s", h.name, patience, h.log.Tail(20))
	}
	return h.cmd.ProcessState.ExitCode()
}

// end ends tenantd whatever state it is in.
func (h *host) end() {
	if h.running() {
		h.cmd.Kill()
	}
}

// wipe takes the host's disk away.
func (h *host) wipe(t testing.TB) {
	t.Helper()
	if err := os.RemoveAll(h.dir); err != nil {
		t.Fatal(err)
	}
}

// direction is which packets between hosts a host loses.
type direction string

const (
	both     direction = "both"
	incoming direction = "incoming" // it is heard, and hears nothing
	outgoing direction = "outgoing" // it hears, and is not heard
)

// cut cuts a host off from others; clients go on reaching it.
func (h *host) cut(t testing.TB, d direction, from ...*host) {
	t.Helper()
	var all []string
	for _, other := range from {
		all = append(all, other.address)
	}
	addresses := strings.Join(all, ", ")
	rules := "table ip cut {\n"
	if d == both || d == incoming {
		rules += "chain in { type filter hook input priority 0; ip saddr { " + addresses + " } counter drop; }\n"
	}
	if d == both || d == outgoing {
		rules += "chain out { type filter hook output priority 0; ip daddr { " + addresses + " } counter drop; }\n"
	}
	execute(t, exec.Command("nsenter", "--net=/run/netns/"+h.name, "nft", "-f", "-"), rules+"}\n").must(t, "cut "+h.name+" off")
	fmt.Fprintf(h.log, "--- %s is cut off: %s\n", h.name, d)
}

// lost checks that each way that is cut has lost packets.
func (h *host) lost(t testing.TB) error {
	t.Helper()
	rules := execute(t, exec.Command("nsenter", "--net=/run/netns/"+h.name, "nft", "list ruleset")).must(t, "see what "+h.name+" has lost")
	if !strings.Contains(rules, "counter packets") || strings.Contains(rules, "counter packets 0 ") {
		return fmt.Errorf("nothing was lost by %s", rules)
	}
	return nil
}

// heal ends what cut did.
func (h *host) heal(t testing.TB) {
	t.Helper()
	execute(t, exec.Command("nsenter", "--net=/run/netns/"+h.name, "nft", "flush ruleset")).must(t, "heal "+h.name)
	fmt.Fprintf(h.log, "--- %s is healed\n", h.name)
}

// dial reaches the host's one port, whatever address is asked for, from a client's
// address or, if that is empty, from any.
func (h *host) dial(from string) func(context.Context, string, string) (net.Conn, error) {
	d := &net.Dialer{}
	if from != "" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		return d.DialContext(ctx, network, h.port())
	}
}

// etcd is a client of the host's part of etcd, without TLS and credentials, as the
// daemon itself has it.
func (h *host) etcd(t testing.TB) *clientv3.Client {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(h.dir, "run", "*.sock"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets of the store of %s: %q, %v", h.name, sockets, err)
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + sockets[0]}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// tenantctl runs tenantctl against the host.
func (h *host) tenantctl(t testing.TB, args ...string) result {
	t.Helper()
	cmd := exec.Command(bin(t, "tenantctl"), args...)
	cmd.Env = append(os.Environ(), "TENANTCTL_KUBECONFIG="+filepath.Join(h.dir, "admin.kubeconfig"))
	return execute(t, cmd)
}

// mustTenantctl is tenantctl for what must succeed; it returns its output.
func (h *host) mustTenantctl(t testing.TB, args ...string) string {
	t.Helper()
	return h.tenantctl(t, args...).must(t, "tenantctl "+strings.Join(args, " "))
}

// bin is the path of a program that make has built.
func bin(t testing.TB, name string) string {
	t.Helper()
	return proc.Built(t, filepath.Join("..", "..", "bin", name))
}

// result is what a command left.
type result struct {
	stdout, stderr string
	code           int
}

// execute runs a command, with input if there is some, and returns what it left,
// whatever that is.
func execute(t testing.TB, cmd *exec.Cmd, input ...string) result {
	t.Helper()
	if len(input) > 0 {
		cmd.Stdin = strings.NewReader(strings.Join(input, ""))
	}
	stdout, stderr, code := proc.Run(t, 2*patience, cmd)
	return result{stdout, stderr, code}
}

// must is the output of a command that must have succeeded.
func (r result) must(t testing.TB, what string) string {
	t.Helper()
	if r.code != 0 {
		t.Fatalf("%s: exit code %d\n%s%s", what, r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// eventually repeats check until it succeeds.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	proc.Eventually(t, patience, 100*time.Millisecond, what, check)
}

// logBuffer keeps what a host's processes write, one after the other.
type logBuffer struct{ proc.Log }

// mark is a place in the log, for since.
func (b *logBuffer) mark() int { return len(b.String()) }

// says waits until the log has said something since a mark.
func (b *logBuffer) says(t testing.TB, mark int, words ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the log says %q", words), func() error {
		for line := range strings.Lines(b.String()[mark:]) {
			all := true
			for _, w := range words {
				all = all && strings.Contains(line, w)
			}
			if all {
				return nil
			}
		}
		return errors.New("it does not")
	})
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenantd/tenantd/worker"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
	"github.com/tenantd/tenantd/worker/workertest/netns"
)

// programVariable makes this test tenant-proxy itself.
const programVariable = "TENANT_PROXY_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(programVariable) != "" {
		main()
	}
	os.Exit(m.Run())
}

// called is what a command line came to.
type called struct {
	code     int
	out, err string
}

func call(t *testing.T, args ...string) called {
	t.Helper()
	var out, errOut bytes.Buffer
	code := run(t.Context(), args, &out, &errOut)
	return called{code, out.String(), errOut.String()}
}

func (c called) is(t *testing.T, code int, texts ...string) {
	t.Helper()
	if c.code != code {
		t.Errorf("exit code %d, want %d: %s%s", c.code, code, c.out, c.err)
	}
	for _, text := range texts {
		if !strings.Contains(c.out+c.err, text) {
			t.Errorf("%q is not in: %s%s", text, c.out, c.err)
		}
	}
}

func TestUsage(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "config.yaml")
	put(t, bad, "apiVersion: tenantd.io/v1alpha1\nkind: WorkerConfiguration\nhosts: []\n")
	call(t, "run", "now").is(t, exitUsage, "now", "tenant-proxy run --help")
	call(t, "start").is(t, exitUsage, "start")
	call(t, "run", "--confg", "x").is(t, exitUsage, "--confg")
	call(t, "check", "-o", "yaml").is(t, exitUsage, "must be json")
	call(t, "version").is(t, exitDone, "tenant-proxy ")
	call(t, "version", "-o", "json").is(t, exitDone, `"platform"`)
	call(t, "completion", "bash").is(t, exitDone, "tenant-proxy")
	call(t, "--help").is(t, exitDone, "adopt-kubelet")
	for _, command := range []string{"run", "check", "status", "adopt-kubelet"} {
		call(t, command, "--config", "/nowhere/config.yaml").is(t, exitFailed, "/nowhere/config.yaml")
		call(t, command, "--config", bad).is(t, exitFailed, "tenant-proxy: "+bad+":1: hostname", "tenant-proxy: "+bad+":3: hosts")
	}
	call(t, "install", "--from", "/nowhere").is(t, exitFailed, "unpack the whole archive")
}

// site is a tenant, a host and a configuration for it.
type site struct {
	tenant *fakehost.Tenant
	host   *fakehost.Host
	file   *config.Config
	path   string
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{tenant: fakehost.NewTenant("acme.test", "10.96.0.1")}
	host, err := s.tenant.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(host.Close)
	s.host = host
	dir := t.TempDir()
	s.file = &config.Config{
		Hostname: "acme.test", Hosts: []string{host.Address.String()}, CA: string(s.tenant.CA),
		KubeletKubeconfig: filepath.Join(dir, "kubelet.conf"), CacheDir: dir, DrainTimeout: time.Second,
	}
	s.file.SetDefaults()
	s.path = filepath.Join(dir, "config.yaml")
	s.write(t)
	return s
}

func (s *site) write(t *testing.T) {
	t.Helper()
	data, err := s.file.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	put(t, s.path, string(data))
}

// whoami asks through the address as a pod does.
func (s *site) whoami() (string, error) {
	transport := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: s.tenant.Roots, ServerName: "10.96.0.1"}}
	response, err := (&http.Client{Transport: transport}).Get("https://" + s.file.Endpoint().String() + "/whoami")
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

// service is tenant-proxy as systemd runs it.
type service struct {
	cmd  *exec.Cmd
	log  *os.File
	said *net.UnixConn // what systemd is told
	main int           // the process that systemd takes for it
}

func (s *site) start(t *testing.T) *service {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "notify")
	said, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "run", "--config", s.path)
	cmd.Env = append(os.Environ(), programVariable+"=yes", "NOTIFY_SOCKET="+socket, "WATCHDOG_USEC=3000000")
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &service{cmd: cmd, log: log, said: said, main: cmd.Process.Pid}
	t.Cleanup(func() {
		syscall.Kill(p.main, syscall.SIGKILL)
		cmd.Process.Kill()
		cmd.Wait()
		said.Close()
		log.Close()
		if t.Failed() {
			data, err := os.ReadFile(log.Name())
			t.Logf("%s%v", data, err)
		}
	})
	return p
}

// await reads what systemd is told until there is a line that begins with prefix.
func (p *service) await(t *testing.T, prefix string) string {
	t.Helper()
	if err := p.said.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	for message := make([]byte, 4096); ; {
		n, err := p.said.Read(message)
		if err != nil {
			t.Fatalf("wait for %s: %v", prefix, err)
		}
		for line := range strings.Lines(string(message[:n])) {
			if rest, ok := strings.CutPrefix(strings.TrimSpace(line), prefix); ok {
				return rest
			}
		}
	}
}

// TestService goes through the life of the unit: start, status, check, two reloads
// of which one fails, adoption, stop.
func TestService(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	s := newSite(t)
	call(t, "status", "--config", s.path).is(t, exitFailed, "systemctl start tenant-proxy")
	p := s.start(t)
	p.await(t, "READY=1")
	p.await(t, "STATUS=acme.test: 1 of 1 hosts healthy")
	p.await(t, "WATCHDOG=1")
	if got, err := s.whoami(); err != nil || !strings.HasPrefix(got, "anonymous") {
		t.Fatal(got, err)
	}
	call(t, "status", "--config", s.path).is(t, exitDone, "acme.test at 172.20.0.1:6443 on ", ": ready", s.host.Address.String(), "The tunnel waits")
	var state worker.Status
	if err := json.Unmarshal([]byte(call(t, "status", "-o", "json", "--config", s.path).out), &state); err != nil || !state.Ready {
		t.Errorf("%+v, %v", state, err)
	}
	call(t, "check", "--config", s.path).is(t, checkCode(), "tenant-proxy listens on 172.20.0.1:6443", "by tls")
	call(t, "check", "-o", "json", "--config", s.path).is(t, checkCode(), `"about": "address"`)

	// A configuration that cannot be read: it goes on.
	put(t, s.path, "nonsense")
	hangUp(t, p.main)
	eventually(t, "it says so", func() error {
		data, err := os.ReadFile(p.log.Name())
		if err == nil && !bytes.Contains(data, []byte("no new process took over")) {
			err = errors.New("not yet")
		}
		return err
	})
	if _, err := s.whoami(); err != nil {
		t.Error(err)
	}

	// One that changes something: a new process takes over, and the watchdog is fed.
	s.file.Carrier = "proxy2"
	s.write(t)
	hangUp(t, p.main)
	next, err := strconv.Atoi(p.await(t, "MAINPID="))
	if err != nil || next == p.main {
		t.Fatalf("process %d after %d: %v", next, p.main, err)
	}
	p.main = next
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("the first process: %v", err)
	}
	p.await(t, "WATCHDOG=1")
	eventually(t, "the new carrier is used", func() error {
		answer := call(t, "status", "--config", s.path)
		if !strings.Contains(answer.out, "proxy2") || !strings.Contains(answer.out, ": ready") {
			return errors.New(answer.out + answer.err)
		}
		return nil
	})

	put(t, s.file.KubeletKubeconfig, s.tenant.Kubeconfig("w1", time.Now().Add(time.Hour)))
	call(t, "adopt-kubelet", "--config", s.path).is(t, exitDone, "systemctl restart kubelet")
	call(t, "adopt-kubelet", "--config", s.path).is(t, exitDone, "needs no change")
	call(t, "uninstall", "--root", "/nowhere").is(t, exitDone)
	call(t, "adopt-kubelet", "--revert", "--config", s.path).is(t, exitDone, "systemctl restart kubelet")

	if err := syscall.Kill(p.main, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.await(t, "STOPPING=1")
	eventually(t, "it has ended", func() error {
		if answer := call(t, "status", "--config", s.path); answer.code == exitDone {
			return errors.New("it answers")
		}
		return nil
	})
	call(t, "adopt-kubelet", "--config", s.path).is(t, exitFailed, "so the kubelet stays as it is")
}

// checkCode is what check says of a healthy machine: without systemd that is all
// right too, with it there is no unit in this test.
func checkCode() int {
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		return exitFailed
	}
	return exitDone
}

func hangUp(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
}

// TestTerminated expects an orderly end by SIGTERM, with a connection open.
func TestTerminated(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	s := newSite(t)
	p := s.start(t)
	p.await(t, "READY=1")
	conn, err := net.Dial("tcp", s.file.Endpoint().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("ended with %v", err)
	}
}

func eventually(t *testing.T, what string, is func() error) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := is()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it did not come about that %s: %v", what, err)
		}
	}
}

func put(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestSize builds it as the release is built.
func TestSize(t *testing.T) {
	const most = 30 << 20
	path := filepath.Join(t.TempDir(), "tenant-proxy")
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags", "-s -w", "-o", path, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > most {
		t.Errorf("%s, want at most 30 MiB", fmt.Sprint(info.Size()>>20, " MiB"))
	}
}

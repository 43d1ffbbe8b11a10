// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tenantd/tenantd/e2e/proc"
	"github.com/tenantd/tenantd/e2e/workers/images"
)

// programs are what make has to have built.
var programs = []string{"tenantd", "tenantctl", "tenant-proxy", "kubectl", "kubelet", "kubeadm", "kube-proxy", "konnectivity-agent", "coredns", "pause", "testserver"}

// The images that workers have, under the names that kubeadm gives them.
const (
	pauseImage      = "registry.k8s.io/pause:3.10.2"
	coreDNSImage    = "registry.k8s.io/coredns/coredns:v1.14.6"
	kubeProxyImage  = "registry.k8s.io/kube-proxy:v1.37.1"
	agentImage      = "registry.k8s.io/kas-network-proxy/proxy-agent:v0.36.0"
	testserverImage = "e2e.test/testserver:v1"
)

// domain is the zone of the hosts' names.
const domain = "k8s.test"

// patience is how long a test waits for what must happen: far beyond what it
// takes on an idle machine, since a test must not fail because its machine is busy.
const patience = 3 * time.Minute

// lab is a network with a host and machines on it.
type lab struct {
	t    testing.TB
	dir  string
	next netip.Addr // the next machine's

	mu    sync.Mutex // guards names
	names map[string][]string
}

// enterLab makes the namespaces that this process is the first of into a lab.
func enterLab(dir string) error {
	if err := proc.EnterLab(); err != nil {
		return err
	}
	// An overlay's upper directory may not lie on the file system that is its lower.
	changes := filepath.Join(dir, "changes")
	if err := os.MkdirAll(changes, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", changes, "tmpfs", 0, "mode=700"); err != nil {
		return fmt.Errorf("mount what machines change: %w", err)
	}
	hosts := filepath.Join(dir, "hosts")
	if err := os.WriteFile(hosts, nil, 0o644); err != nil {
		return err
	}
	if err := unix.Mount(hosts, "/etc/hosts", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("have an /etc/hosts of its own: %w", err)
	}
	return unix.Sethostname([]byte("lab"))
}

// newLab makes the network, and the images for the machines.
func newLab(t testing.TB) *lab {
	t.Helper()
	l := &lab{t: t, dir: os.Getenv(labVariable), next: netip.MustParseAddr("10.77.0.21"), names: map[string][]string{"localhost": {"127.0.0.1"}}}
	// The next lab has machines of the same names.
	t.Cleanup(func() {
		for _, pattern := range []string{"host-*", "disks", "roots", "changes/*"} {
			paths, _ := filepath.Glob(filepath.Join(l.dir, pattern)) // a wrong pattern is all that can fail
			for _, path := range paths {
				if err := os.RemoveAll(path); err != nil {
					t.Error(err)
				}
			}
		}
	})
	l.name("lab", "10.77.0.1")
	l.ip("link", "set", "lo", "up")
	l.ip("link", "add", "lab", "type", "bridge")
	t.Cleanup(func() { exec.Command("ip", "link", "delete", "lab").Run() })
	l.ip("address", "add", "10.77.0.1/24", "dev", "lab")
	l.ip("link", "set", "lab", "up")
	if err := writeFile(filepath.Join(l.dir, "resolv.conf"), "nameserver 10.77.0.1\n"); err != nil {
		t.Fatal(err)
	}
	l.packImages()
	return l
}

// ip runs ip.
func (l *lab) ip(args ...string) {
	l.t.Helper()
	execute(l.t, exec.Command("ip", args...)).must(l.t, "ip "+strings.Join(args, " "))
}

// plug connects a network namespace with the network. It is named or numbered as
// `ip link set netns` takes it.
func (l *lab) plug(namespace, name, address string) {
	l.t.Helper()
	l.unplug(name)
	l.ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", namespace)
	l.ip("link", "set", name, "master", "lab", "up")
	enter := []string{"--net=/run/netns/" + namespace}
	if namespace[0] >= '0' && namespace[0] <= '9' {
		enter = []string{"--net=/proc/" + namespace + "/ns/net"}
	}
	for _, args := range []string{"link set lo up", "address add " + address + "/24 dev eth0", "link set eth0 up", "route add default via 10.77.0.1"} {
		execute(l.t, exec.Command("nsenter", append(append(enter, "ip"), strings.Fields(args)...)...)).must(l.t, "ip "+args)
	}
}

// unplug pulls the cable; the kernel does so too when a machine has ended, some
// time later.
func (l *lab) unplug(name string) {
	exec.Command("ip", "link", "delete", name).Run() // there may be none
}

// name has a name resolve to addresses, for all in the lab.
func (l *lab) name(name string, addresses ...string) {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.names[name] = addresses
	var lines []string
	for name, addresses := range l.names {
		for _, address := range addresses {
			lines = append(lines, address+" "+name+"\n")
		}
	}
	slices.Sort(lines)
	// Written in place, since the machines have this very file mounted.
	if err := os.WriteFile(filepath.Join(l.dir, "hosts"), []byte(strings.Join(lines, "")), 0o644); err != nil {
		l.t.Fatal(err)
	}
}

// packImages packs what the workers run into l.dir.
func (l *lab) packImages() {
	l.t.Helper()
	program := func(path, name string) images.Files {
		var f images.Files
		f.File(path, bin(l.t, name))
		return f
	}
	var faults []error
	// kube-proxy runs Debian's iptables and nft, and its iptables writes nftables
	// like that of kube-proxy's own image.
	proxy := program("/usr/local/bin/kube-proxy", "kube-proxy")
	faults = append(faults, proxy.Program("/usr/sbin/nft", "/usr/sbin/nft"), proxy.Program("/usr/sbin/xtables-nft-multi", "/usr/sbin/xtables-nft-multi"))
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			proxy.Link("/usr/sbin/"+name+suffix, "xtables-nft-multi")
		}
	}
	extensions, err := filepath.Glob("/usr/lib/*-linux-gnu/xtables/*.so")
	if err != nil || len(extensions) == 0 {
		l.t.Fatalf("iptables has no extensions in /usr/lib/*-linux-gnu/xtables (%v): reinstall iptables", err)
	}
	for _, extension := range extensions {
		faults = append(faults, proxy.Library(extension))
	}
	// kubectl cp needs a tar, and people a shell.
	server := program("/testserver", "testserver")
	for _, name := range []string{"sh", "tar", "cat", "ls"} {
		faults = append(faults, server.Program("/bin/"+name, "/bin/"+name))
	}
	if err := errors.Join(faults...); err != nil {
		l.t.Fatal(err)
	}

	file, err := os.Create(filepath.Join(l.dir, "images.tar"))
	if err != nil {
		l.t.Fatal(err)
	}
	defer file.Close()
	if err := images.Write(file,
		images.Image{Name: pauseImage, Entrypoint: []string{"/pause"}, Files: program("/pause", "pause")},
		images.Image{Name: coreDNSImage, Entrypoint: []string{"/coredns"}, Files: program("/coredns", "coredns")},
		images.Image{Name: kubeProxyImage, Entrypoint: []string{"/usr/local/bin/kube-proxy"}, Files: proxy},
		images.Image{Name: agentImage, Entrypoint: []string{"/proxy-agent"}, Files: program("/proxy-agent", "konnectivity-agent")},
		images.Image{Name: testserverImage, Entrypoint: []string{"/testserver"}, Files: server},
	); err != nil {
		l.t.Fatal(err)
	}
}

// machine switches a new machine on.
func (l *lab) machine(name string) *machine {
	l.t.Helper()
	return l.machineWith(name, bin(l.t, "kubelet"))
}

// machineWith switches a new machine on that has another kubelet.
func (l *lab) machineWith(name, kubelet string) *machine {
	l.t.Helper()
	m := &machine{t: l.t, lab: l, name: name, address: l.next.String(), computer: &computer{}}
	l.next = l.next.Next()
	l.name(name, m.address)
	m.plan = blueprint{
		Name:    name,
		Changes: filepath.Join(l.dir, "changes", name),
		Disk:    filepath.Join(l.dir, "disks", name),
		Root:    filepath.Join(l.dir, "roots", name),
		Mounts: map[string]string{
			"/etc/hosts":       filepath.Join(l.dir, "hosts"),
			"/etc/resolv.conf": filepath.Join(l.dir, "resolv.conf"),
			"/opt/images.tar":  filepath.Join(l.dir, "images.tar"),
			"/usr/bin/kubelet": kubelet,
			"/usr/bin/kubeadm": bin(l.t, "kubeadm"),
		},
		First: true,
	}
	m.boot()
	m.must("ctr", "--namespace=k8s.io", "images", "import", "/opt/images.tar")
	return m
}

// host is a tenantd in a network namespace of its own, which has its name.
type host struct {
	t       testing.TB
	lab     *lab
	name    string
	address string
	dir     string
	log     *proc.Log
	*daemon
}

// daemon is what all users of a host share.
type daemon struct {
	cmd *proc.Process
}

const hostAddress = "10.77.0.10"

// newHost starts a host and waits until it is ready.
func (l *lab) newHost() *host {
	l.t.Helper()
	h := l.hostAt("host-a", hostAddress)
	l.name("system."+domain, h.address)
	h.start()
	return h
}

// hostAt makes a machine for a host, which does not run yet.
func (l *lab) hostAt(name, address string) *host {
	l.t.Helper()
	h := &host{t: l.t, lab: l, name: name, address: address, dir: filepath.Join(l.dir, name), log: &proc.Log{}, daemon: &daemon{}}
	l.ip("netns", "add", name)
	l.t.Cleanup(func() { exec.Command("ip", "netns", "delete", name).Run() })
	l.plug(name, name, address)
	return h
}

// within is the host, for use in a subtest.
func (h *host) within(t testing.TB) *host {
	n := *h
	n.t = t
	return &n
}

// start starts tenantd and waits until it is ready.
func (h *host) start(args ...string) {
	h.t.Helper()
	cmd := exec.Command("nsenter", append([]string{"--net=/run/netns/" + h.name, bin(h.t, "tenantd"), "run", "--data-dir", h.dir, "--domain", domain,
		"--name", h.name, "--listen", h.address + ":443", "--advertise-address", h.address + ":443", "--health-listen", h.address + ":8080"}, args...)...)
	cmd.Stdout, cmd.Stderr = h.log, h.log
	p := proc.Start(h.t, cmd)
	h.cmd = p
	h.lab.t.Cleanup(func() {
		p.Stop(patience)
		if h.lab.t.Failed() {
			h.lab.t.Logf("log of %s:\n%s", h.name, h.log.Tail(60))
		}
	})
	eventually(h.t, "the host is ready", func() error {
		if p.Ended() {
			h.t.Fatalf("the host ended: %v\n%s", p.ProcessState, h.log.Tail(20))
		}
		_, err := proc.Get(http.DefaultClient, "http://"+h.address+":8080/readyz")
		return err
	})
}

// stop ends tenantd with SIGTERM, which must go well.
func (h *host) stop() {
	h.t.Helper()
	h.cmd.Process.Signal(syscall.SIGTERM) // if it has ended by itself, the exit code says so
	if !h.cmd.EndsWithin(patience) {
		h.t.Fatalf("the host goes on after %s\n%s", patience, h.log.Tail(40))
	}
	if code := h.cmd.ProcessState.ExitCode(); code != 0 {
		h.t.Fatalf("after SIGTERM the host exited with %d\n%s", code, h.log.Tail(40))
	}
}

// tenantctl runs tenantctl against the host.
func (h *host) tenantctl(args ...string) result {
	h.t.Helper()
	cmd := exec.Command(bin(h.t, "tenantctl"), args...)
	cmd.Env = append(os.Environ(), "TENANTCTL_KUBECONFIG="+filepath.Join(h.dir, "admin.kubeconfig"))
	return execute(h.t, cmd)
}

// mustTenantctl is tenantctl for what must succeed; it returns its output.
func (h *host) mustTenantctl(args ...string) string {
	h.t.Helper()
	return h.tenantctl(args...).must(h.t, "tenantctl "+strings.Join(args, " "))
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
	// Children of it that live on must not make it wait.
	cmd.WaitDelay = time.Second
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
	start := time.Now()
	proc.Eventually(t, patience, 200*time.Millisecond, what, check)
	if waited := time.Since(start); waited > 10*time.Second {
		t.Logf("waited %s until %s", waited.Round(time.Second), what)
	}
}

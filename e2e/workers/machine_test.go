// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/tenantd/tenantd/e2e/proc"
)

// blueprint is what a machine is made of.
type blueprint struct {
	Name string
	// Changes holds what the machine writes over this machine's files; an overlay's
	// upper directory, kept over restarts.
	Changes string
	// Disk holds what must not lie on an overlay, and much data; kept too.
	Disk string
	// Root is where the machine's root is put together.
	Root string
	// Mounts are files of this machine that the machine sees at other paths.
	Mounts map[string]string
	// First says that the machine has never run.
	First bool
}

// ownDirectories are those of a machine that are not on its overlay, because an
// overlay cannot lie on another, or because memory would be short.
var ownDirectories = []string{"/var/lib/containerd", "/var/lib/kubelet", "/var/log"}

// kernelSettings are those that a kubelet changes and that no namespace has of its
// own. A machine sees copies of them.
var kernelSettings = []string{
	"/proc/sys/vm/overcommit_memory", "/proc/sys/vm/panic_on_oom", "/proc/sys/kernel/panic", "/proc/sys/kernel/panic_on_oops",
	"/proc/sys/kernel/keys/root_maxkeys", "/proc/sys/kernel/keys/root_maxbytes",
}

// becomeMachine makes the namespaces that this process is the first of into a
// machine, and ends only if it cannot: else it becomes the machine's systemd.
func becomeMachine(config string) error {
	var b blueprint
	if err := json.Unmarshal([]byte(config), &b); err != nil {
		return err
	}
	// A cgroup namespace is a thread's, and so is what exec leaves.
	runtime.LockOSThread()
	if err := b.enterCgroup(); err != nil {
		return fmt.Errorf("give machine %s a cgroup: %w", b.Name, err)
	}
	// `ip netns` shares the mounts that are names of network namespaces: what this
	// machine leaves would be gone for all.
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return err
	}
	if err := b.mount(); err != nil {
		return fmt.Errorf("give machine %s its files: %w", b.Name, err)
	}
	if err := unix.Sethostname([]byte(b.Name)); err != nil {
		return err
	}
	// As kubeadm demands it of a worker.
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return err
	}
	if b.First {
		if err := b.furnish(); err != nil {
			return fmt.Errorf("furnish machine %s: %w", b.Name, err)
		}
	}
	// Nothing comes, but the end does when the machine is on the network.
	if _, err := os.NewFile(3, "network").Read(make([]byte, 1)); err == nil {
		return fmt.Errorf("machine %s: something came instead of the network", b.Name)
	}
	old := filepath.Join(b.Root, "mnt")
	if err := unix.PivotRoot(b.Root, old); err != nil {
		return fmt.Errorf("enter the root of machine %s: %w", b.Name, err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/mnt", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the root of this machine: %w", err)
	}
	// systemd does without devices, modules and consoles when it is told that it is
	// in a container.
	return syscall.Exec("/lib/systemd/systemd", []string{"systemd", "--unit=multi-user.target", "--log-target=journal"},
		[]string{"container=tenantd-e2e", searchPath})
}

// searchPath is the PATH of a machine.
const searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// enterCgroup makes a cgroup the root of all that the machine sees.
func (b *blueprint) enterCgroup() error {
	hierarchies, err := cgroupHierarchies()
	if err != nil {
		return err
	}
	for _, h := range hierarchies {
		group := filepath.Join(h.path, cgroupName, b.Name)
		if err := os.MkdirAll(group, 0o755); err != nil {
			return err
		}
		// With cgroup v1 a cpuset is empty at first, and takes no process then.
		for _, dir := range []string{filepath.Dir(group), group} {
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				inherited, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file))
				if h.fstype == "cgroup2" || os.IsNotExist(err) {
					continue
				}
				if err != nil {
					return err
				}
				if err := os.WriteFile(filepath.Join(dir, file), inherited, 0); err != nil {
					return err
				}
			}
		}
		// With cgroup v2 the controllers come from above.
		for _, dir := range []string{h.path, filepath.Dir(group)} {
			controllers, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
			if h.fstype != "cgroup2" || err != nil {
				continue
			}
			for controller := range strings.FieldsSeq(string(controllers)) {
				if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0); err != nil {
					return err
				}
			}
		}
		if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte("0"), 0); err != nil {
			return err
		}
	}
	return unix.Unshare(unix.CLONE_NEWCGROUP)
}

// mount puts the machine's root together.
func (b *blueprint) mount() error {
	hierarchies, err := cgroupHierarchies()
	if err != nil {
		return err
	}
	upper, work := filepath.Join(b.Changes, "upper"), filepath.Join(b.Changes, "work")
	for _, dir := range []string{upper, work, b.Root} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	at := func(path string) string { return filepath.Join(b.Root, path) }
	mount := func(source, path, fstype string, flags uintptr, data string) {
		if err != nil {
			return
		}
		if err = os.MkdirAll(at(path), 0o755); err != nil {
			return
		}
		if err = unix.Mount(source, at(path), fstype, flags, data); err != nil {
			err = fmt.Errorf("mount %s: %w", path, err)
		}
	}
	bind := func(source, path string) {
		if err != nil {
			return
		}
		if err = os.MkdirAll(filepath.Dir(at(path)), 0o755); err != nil {
			return
		}
		// A link, as resolv.conf often is one, would lead out of the machine.
		if info, missing := os.Lstat(at(path)); missing == nil && info.Mode()&os.ModeSymlink != 0 {
			os.Remove(at(path))
		}
		var f *os.File
		if f, err = os.OpenFile(at(path), os.O_CREATE, 0o644); err != nil {
			return
		}
		f.Close()
		if err = unix.Mount(source, at(path), "", unix.MS_BIND, ""); err != nil {
			err = fmt.Errorf("mount %s at %s: %w", source, path, err)
		}
	}

	mount("overlay", "/", "overlay", 0, "lowerdir=/,upperdir="+upper+",workdir="+work)
	mount("proc", "/proc", "proc", 0, "")
	mount("sysfs", "/sys", "sysfs", 0, "")
	for i, h := range hierarchies {
		if i == 0 && h.path != "/sys/fs/cgroup" {
			mount("tmpfs", "/sys/fs/cgroup", "tmpfs", 0, "mode=755")
		}
		mount("cgroup", h.path, h.fstype, 0, h.options)
	}
	mount("tmpfs", "/run", "tmpfs", 0, "mode=755")
	mount("tmpfs", "/tmp", "tmpfs", 0, "mode=1777")
	mount("tmpfs", "/dev", "tmpfs", 0, "mode=755")
	mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=0620,gid=5")
	mount("shm", "/dev/shm", "tmpfs", 0, "mode=1777")
	mount("mqueue", "/dev/mqueue", "mqueue", 0, "")
	for _, device := range []string{"null", "zero", "full", "random", "urandom", "tty", "kmsg"} {
		bind("/dev/"+device, "/dev/"+device)
	}
	if err != nil {
		return err
	}
	for name, target := range map[string]string{"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"} {
		if err := os.Symlink(target, at("/dev/"+name)); err != nil {
			return err
		}
	}
	for _, path := range ownDirectories {
		source := filepath.Join(b.Disk, path)
		if err := os.MkdirAll(source, 0o755); err != nil {
			return err
		}
		mount(source, path, "", unix.MS_BIND, "")
	}
	for path, source := range b.Mounts {
		bind(source, path)
	}
	// By this the kubelet sees that its machine was restarted.
	settings := map[string]string{"/proc/sys/kernel/random/boot_id": uuid.NewString() + "\n"}
	for _, path := range kernelSettings {
		value, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		settings[path] = string(value)
	}
	for path, value := range settings {
		copied := filepath.Join(b.Disk, path)
		if err := writeFile(copied, value); err != nil {
			return err
		}
		bind(copied, path)
	}
	return err
}

// furnish has the machine forget what this machine starts and keeps.
func (b *blueprint) furnish() error {
	at := func(path string) string { return filepath.Join(b.Root, path) }
	wants, err := filepath.Glob(at("/usr/lib/systemd/system/*.wants"))
	if err != nil {
		return err
	}
	remove := append(wants, at("/etc/systemd/system"), at("/usr/lib/systemd/system-generators"),
		at("/etc/kubernetes"), at("/etc/cni"), at("/etc/containerd"), at("/etc/tenant-proxy"),
		at("/var/lib/cni"), at("/var/lib/tenant-proxy"), at("/root/.kube"))
	for _, path := range remove {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	for target, units := range map[string][]string{
		"sysinit.target":    {"systemd-journald.service"},
		"sockets.target":    {"systemd-journald.socket", "systemd-journald-dev-log.socket", "dbus.socket"},
		"multi-user.target": {"containerd.service", "kubelet.service"},
	} {
		for _, unit := range units {
			dir := at("/etc/systemd/system/" + target + ".wants")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			if err := os.Symlink("/usr/lib/systemd/system/"+unit, filepath.Join(dir, unit)); err != nil {
				return err
			}
		}
	}
	// Kubernetes' packages make it, for static pods.
	if err := os.MkdirAll(at("/etc/kubernetes/manifests"), 0o755); err != nil {
		return err
	}
	for path, content := range map[string]string{
		"/etc/machine-id":                         strings.ReplaceAll(uuid.NewString(), "-", "") + "\n",
		"/etc/hostname":                           b.Name + "\n",
		"/etc/containerd/config.toml":             containerdConfig,
		"/usr/lib/systemd/system/kubelet.service": kubeletUnit,
	} {
		if err := writeFile(at(path), content); err != nil {
			return err
		}
	}
	return nil
}

// writeFile writes a file and the directories that it lies in.
func writeFile(path, content string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(content), 0o644)
}

// machine is a computer that will be a worker.
type machine struct {
	t       testing.TB
	lab     *lab
	name    string
	address string
	*computer
}

// computer is what all users of a machine share.
type computer struct {
	plan blueprint
	cmd  *exec.Cmd // its systemd
}

// within is the machine, for use in a subtest.
func (m *machine) within(t testing.TB) *machine {
	n := *m
	n.t = t
	return &n
}

// boot switches the machine on and waits until systemd has started what it should.
func (m *machine) boot() {
	m.t.Helper()
	config, err := json.Marshal(m.plan)
	if err != nil {
		m.t.Fatal(err)
	}
	m.plan.First = false
	self, err := os.Executable()
	if err != nil {
		m.t.Fatal(err)
	}
	online, waiting, err := os.Pipe()
	if err != nil {
		m.t.Fatal(err)
	}
	defer online.Close()
	console := &proc.Log{}
	cmd := exec.Command(self)
	cmd.Env = []string{machineVariable + "=" + string(config)}
	cmd.Stdout, cmd.Stderr = console, console
	cmd.ExtraFiles = []*os.File{online}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC}
	if err := cmd.Start(); err != nil {
		m.t.Fatalf("boot machine %s: %v", m.name, err)
	}
	m.cmd = cmd
	m.lab.t.Cleanup(func() {
		cmd.Process.Kill()
		// It is gone when all in it are, and a failed test may not have waited yet
		// for what it ran there.
		gone := make(chan struct{})
		go func() { defer close(gone); cmd.Wait() }()
		select {
		case <-gone:
		case <-time.After(10 * time.Second):
		}
	})
	m.lab.plug(strconv.Itoa(cmd.Process.Pid), m.name, m.address)
	waiting.Close()
	eventually(m.t, "machine "+m.name+" has started", func() error {
		r := m.run("systemctl", "is-active", "containerd.service")
		if r.code != 0 {
			return fmt.Errorf("%s%s%s", console, r.stdout, r.stderr)
		}
		return nil
	})
}

// powerOff takes the power away: nothing gets to say goodbye.
func (m *machine) powerOff() {
	m.t.Helper()
	if err := m.cmd.Process.Kill(); err != nil {
		m.t.Fatal(err)
	}
	m.cmd.Wait() // it was killed, and all of its processes have ended with it
	m.lab.unplug(m.name)
	// A machine that starts has no cgroups. Kubelets spend seconds on each that is
	// left of a container.
	hierarchies, err := cgroupHierarchies()
	if err != nil {
		m.t.Fatal(err)
	}
	for _, h := range hierarchies {
		if err := removeCgroup(filepath.Join(h.path, cgroupName, m.name)); err != nil {
			m.t.Fatal(err)
		}
	}
}

// command is a command on the machine, as root in a login shell would start it.
func (m *machine) command(args ...string) *exec.Cmd {
	cmd := exec.Command("nsenter", append([]string{"--target", strconv.Itoa(m.cmd.Process.Pid), "--all", "--"}, args...)...)
	cmd.Env = []string{searchPath, "HOME=/root", "LANG=C.UTF-8"}
	return cmd
}

// run runs a command on the machine.
func (m *machine) run(args ...string) result {
	m.t.Helper()
	return execute(m.t, m.command(args...))
}

// must runs a command that must succeed, and returns its output.
func (m *machine) must(args ...string) string {
	m.t.Helper()
	return m.run(args...).must(m.t, m.name+": "+strings.Join(args, " "))
}

// path is where a file of the machine is for this process.
func (m *machine) path(path string) string {
	return filepath.Join("/proc", strconv.Itoa(m.cmd.Process.Pid), "root", path)
}

// write writes a file on the machine.
func (m *machine) write(path, content string) {
	m.t.Helper()
	if err := writeFile(m.path(path), content); err != nil {
		m.t.Fatal(err)
	}
}

// journal is what a unit has logged.
func (m *machine) journal(unit string, lines int) string {
	return m.run("journalctl", "--no-pager", "--output=cat", "--unit="+unit, "--lines="+strconv.Itoa(lines)).stdout
}

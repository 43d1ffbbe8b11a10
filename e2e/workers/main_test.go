// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenantd/tenantd/e2e/proc"
)

// The test binary is three programs: what `go test` starts, the tests in the lab,
// and what makes a machine and then becomes its systemd. These variables tell it.
const (
	labVariable     = "TENANTD_E2E_LAB"
	machineVariable = "TENANTD_E2E_MACHINE"
)

// cgroupName is the cgroup of all machines, in each hierarchy.
const cgroupName = "tenantd-e2e"

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(machineVariable) != "":
		err := becomeMachine(os.Getenv(machineVariable))
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	case os.Getenv(labVariable) != "":
		if err := enterLab(os.Getenv(labVariable)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	default:
		code, err := runInLab()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		os.Exit(code)
	}
}

// runInLab runs the tests in a lab, removes what is left of it and returns the exit
// code.
func runInLab() (int, error) {
	// Users' PATH often lacks where Debian keeps half of what is needed.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return 1, err
	}
	if err := missing(); err != nil {
		return 1, err
	}
	// On disk, since it holds what containerd unpacks, and of a fixed name, so that
	// a run finds what one left that was killed.
	dir := filepath.Join("/var/tmp", cgroupName)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return 1, err
	}
	lock, err := os.Open(dir)
	if err != nil {
		return 1, err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return 1, fmt.Errorf("another run uses %s: wait for its end: %w", dir, err)
	}
	if err := cleanUp(dir); err != nil {
		return 1, err
	}
	restore, err := allowWatchers()
	if err != nil {
		return 1, err
	}
	defer restore()

	code, err := proc.InLab(syscall.CLONE_NEWPID|syscall.CLONE_NEWNS|syscall.CLONE_NEWNET|syscall.CLONE_NEWUTS|syscall.CLONE_NEWIPC, labVariable+"="+dir)
	return code, errors.Join(err, cleanUp(dir))
}

// watchers is the kernel's limit of inotify instances, all of root's together, and
// enoughWatchers what several machines' systemd, containerd, kubelets and pods need:
// about 40 each. Debian's 128 are for one machine.
const (
	watchers       = "/proc/sys/fs/inotify/max_user_instances"
	enoughWatchers = 1024
)

// allowWatchers raises that limit until restore is called, if it has to.
func allowWatchers() (restore func(), err error) {
	before, err := os.ReadFile(watchers)
	if err != nil {
		return nil, err
	}
	if limit, err := strconv.Atoi(strings.TrimSpace(string(before))); err == nil && limit >= enoughWatchers {
		return func() {}, nil
	}
	if err := os.WriteFile(watchers, []byte(strconv.Itoa(enoughWatchers)), 0); err != nil {
		return nil, fmt.Errorf("allow more inotify instances: %w; run: sysctl -w fs.inotify.max_user_instances=%d", err, enoughWatchers)
	}
	return func() { os.WriteFile(watchers, before, 0) }, nil
}

// missing says all that a run lacks, and how to get it.
func missing() error {
	var faults, packages []string
	if os.Geteuid() != 0 {
		faults = append(faults, "root: it makes namespaces, mounts and cgroups; run it as root or with sudo")
	}
	for _, need := range []struct{ path, pkg string }{
		{"containerd", "containerd"}, {"ctr", "containerd"}, {"runc", "runc"},
		{"nft", "nftables"}, {"iptables", "iptables"}, {"conntrack", "conntrack"},
		{"ip", "iproute2"}, {"nsenter", "util-linux"}, {"ethtool", "ethtool"},
		{"/lib/systemd/systemd", "systemd"}, {"dbus-daemon", "dbus"}, {"curl", "curl"},
		{"/usr/lib/cni/bridge", "containernetworking-plugins"},
	} {
		if _, err := exec.LookPath(need.path); err != nil && !slices.Contains(packages, need.pkg) {
			packages = append(packages, need.pkg)
		}
	}
	if len(packages) > 0 {
		faults = append(faults, "Debian packages: apt-get install -y --no-install-recommends "+strings.Join(packages, " "))
	}
	for _, name := range programs {
		if _, err := os.Stat(filepath.Join("..", "..", "bin", name)); err != nil {
			faults = append(faults, "bin/"+name+": `make e2e` builds it")
		}
	}
	if raw, err := os.ReadFile("/proc/filesystems"); err != nil || !strings.Contains(string(raw), "\toverlay\n") {
		faults = append(faults, "overlayfs in the kernel: modprobe overlay")
	}
	if len(faults) == 0 {
		return nil
	}
	return fmt.Errorf("the tests with real workers need what this machine lacks:\n  %s", strings.Join(faults, "\n  "))
}

// cleanUp removes what is left of a lab whose processes have ended.
func cleanUp(dir string) error {
	hierarchies, err := cgroupHierarchies()
	if err != nil {
		return err
	}
	for _, h := range hierarchies {
		if err := removeCgroup(filepath.Join(h.path, cgroupName)); err != nil {
			return fmt.Errorf("remove the cgroups of the last run: %w", err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := os.RemoveAll(filepath.Join(dir, entry.Name())); err != nil {
			return fmt.Errorf("remove what the last run left: %w", err)
		}
	}
	return nil
}

// removeCgroup removes a cgroup and those in it. The kernel needs a moment until
// the processes of a namespace have left.
func removeCgroup(path string) error {
	var groups []string
	err := filepath.WalkDir(path, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			groups = append(groups, path)
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	slices.Reverse(groups)
	for _, group := range groups {
		for tries := 0; ; tries++ {
			err := syscall.Rmdir(group)
			if err == nil || err == syscall.ENOENT {
				break
			}
			if err != syscall.EBUSY || tries == 100 {
				return &fs.PathError{Op: "rmdir", Path: group, Err: err}
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	return nil
}

// hierarchy is a mounted hierarchy of cgroups.
type hierarchy struct {
	path, fstype, options string
}

// cgroupHierarchies are those that are mounted: one with cgroup v2, one for each
// controller with v1.
func cgroupHierarchies() ([]hierarchy, error) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var all []hierarchy
	for line := range strings.Lines(string(raw)) {
		// "36 25 0:31 /root /mount/point options - type source superoptions"
		mount, device, _ := strings.Cut(line, " - ")
		fields, super := strings.Fields(mount), strings.Fields(device)
		if len(fields) < 5 || len(super) < 3 || super[0] != "cgroup" && super[0] != "cgroup2" {
			continue
		}
		options := strings.TrimPrefix(strings.TrimPrefix(super[2], "rw"), ",")
		all = append(all, hierarchy{path: fields[4], fstype: super[0], options: options})
	}
	if len(all) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted: mount cgroup2 at /sys/fs/cgroup")
	}
	return all, nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// labVariable is in the environment of the process in the lab: the lab's directory.
const labVariable = "TENANTD_E2E_HOSTS_LAB"

func TestMain(m *testing.M) {
	if dir := os.Getenv(labVariable); dir != "" {
		if err := enterLab(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		log.SetLogger(logr.Discard()) // or it says that nobody has
		os.Exit(m.Run())
	}
	code, err := runInLab()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// runInLab runs the tests in a lab, removes its files and returns the exit code.
func runInLab() (code int, err error) {
	// Users' PATH often lacks where Debian keeps half of what is needed.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return 1, err
	}
	if err := missing(); err != nil {
		return 1, err
	}
	// Short, since the paths of unix sockets are.
	dir, err := os.MkdirTemp("/var/tmp", "hosts")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	// The parent-death signal comes when the thread ends that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	self, err := os.Executable()
	if err != nil {
		return 1, err
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), labVariable+"="+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET,
		Pdeathsig:  syscall.SIGKILL,
		Setpgid:    true, // Ctrl-C is ours to hear
	}
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("make a lab: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err = <-ended:
	case s := <-interrupts:
		cmd.Process.Kill()
		err = fmt.Errorf("%w: %v", <-ended, s)
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		return 1, err
	} else if ok && exit.ExitCode() < 0 {
		return 1, fmt.Errorf("the lab ended: %w", err)
	}
	return cmd.ProcessState.ExitCode(), nil
}

// enterLab makes the namespaces that this process is the first of into a lab.
func enterLab() error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("have mounts of its own: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc of the lab: %w", err)
	}
	// For the names of network namespaces, which `ip netns` keeps there.
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount /run of the lab: %w", err)
	}
	return nil
}

// missing says all that a run lacks, and how to get it.
func missing() error {
	var faults []string
	if os.Geteuid() != 0 {
		faults = append(faults, "root: it makes namespaces; run it as root or with sudo")
	}
	for _, need := range []struct{ program, pkg string }{{"ip", "iproute2"}, {"nft", "nftables"}, {"nsenter", "util-linux"}, {"fsfreeze", "util-linux"}, {"mkfs.ext4", "e2fsprogs"}} {
		if _, err := exec.LookPath(need.program); err != nil {
			faults = append(faults, need.program+": apt-get install -y --no-install-recommends "+need.pkg)
		}
	}
	for _, name := range []string{"tenantd", next, "tenantctl"} {
		if _, err := os.Stat(filepath.Join("..", "..", "bin", name)); err != nil {
			faults = append(faults, "bin/"+name+": `make e2e-hosts` builds it")
		}
	}
	if len(faults) == 0 {
		return nil
	}
	return fmt.Errorf("the tests with several hosts need what this machine lacks:\n  %s", strings.Join(faults, "\n  "))
}

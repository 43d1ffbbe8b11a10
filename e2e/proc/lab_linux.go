// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// InLab runs this program once more, as the first process of namespaces of its own of
// the given kinds (CLONE_NEWPID and the like), with one more variable in its
// environment, and returns its exit code. It ends with this program, and when that is
// interrupted, which is an error.
func InLab(kinds uintptr, variable string) (code int, err error) {
	// The parent-death signal comes when the thread ends that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	self, err := os.Executable()
	if err != nil {
		return 1, err
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), variable)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: kinds,
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
		_ = cmd.Process.Kill()
		err = fmt.Errorf("%w: %v", <-ended, s)
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		return 1, err
	} else if ok && exit.ExitCode() < 0 {
		return 1, fmt.Errorf("the lab ended: %w", err)
	}
	return cmd.ProcessState.ExitCode(), nil
}

// EnterLab gives the namespaces that this process is the first of mounts of their own:
// /proc, and /run for the names of network namespaces, which `ip netns` keeps there.
func EnterLab() error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("have mounts of its own: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc of the lab: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount /run of the lab: %w", err)
	}
	return nil
}

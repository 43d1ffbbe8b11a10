// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/tenantd/tenantd/worker"
)

const (
	// takeOverVariable tells a process that it takes over. It has the descriptors
	// below from its predecessor then.
	takeOverVariable = "TENANT_PROXY_TAKE_OVER"

	readyFD  = 3 // where it says that it accepts
	podsFD   = 4
	healthFD = 5

	// takeOverTimeout is how long a new process may take until it accepts.
	takeOverTimeout = 30 * time.Second
)

// handOver starts a new process and returns when it accepts connections, or with an
// error when it does not, and then it is gone.
func handOver(ctx context.Context, program string, args []string, sockets worker.Sockets) (pid int, err error) {
	said, says, err := os.Pipe()
	if err != nil {
		return 0, fmt.Errorf("make a pipe: %w", err)
	}
	defer said.Close()
	defer says.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{says, sockets.Pods, sockets.Health}
	for _, variable := range os.Environ() {
		// The watchdog is about this process until systemd knows the new one.
		if !strings.HasPrefix(variable, "WATCHDOG_PID=") && !strings.HasPrefix(variable, takeOverVariable+"=") {
			cmd.Env = append(cmd.Env, variable)
		}
	}
	cmd.Env = append(cmd.Env, takeOverVariable+"=yes")
	// Unlike this one's descendants, it is to survive it, in a group of its own so
	// that a terminal's Ctrl-C is for one of them.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start %s: %w", program, err)
	}
	says.Close() // so that its end is seen
	defer context.AfterFunc(ctx, func() { said.Close() })()
	one := make([]byte, 1)
	if err = said.SetReadDeadline(time.Now().Add(takeOverTimeout)); err == nil {
		_, err = said.Read(one)
	}
	if err != nil {
		kill := cmd.Process.Kill()
		wait := cmd.Wait() // for why it ended, if it did by itself
		return 0, fmt.Errorf("wait for %s to accept connections: %w", program, errors.Join(err, wait, ignoreDone(kill)))
	}
	pid = cmd.Process.Pid
	if _, err := daemon.SdNotify(false, "MAINPID="+strconv.Itoa(pid)); err != nil {
		return 0, fmt.Errorf("tell systemd of process %d: %w", pid, err)
	}
	return pid, cmd.Process.Release()
}

func ignoreDone(err error) error {
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// predecessor is the process that this one takes over from; nil if there is none.
type predecessor struct{ says *os.File }

// takeOver finds the predecessor, and what it leaves.
func takeOver() (*predecessor, worker.Sockets) {
	if os.Getenv(takeOverVariable) == "" {
		return nil, worker.Sockets{}
	}
	_ = os.Unsetenv(takeOverVariable) // only a malformed name fails
	files := map[int]*os.File{}
	for fd, name := range map[int]string{readyFD: "predecessor", podsFD: "pods", healthFD: "health"} {
		syscall.CloseOnExec(fd)
		files[fd] = os.NewFile(uintptr(fd), name)
	}
	return &predecessor{files[readyFD]}, worker.Sockets{Pods: files[podsFD], Health: files[healthFD]}
}

// Release tells the predecessor that this process accepts connections.
func (p *predecessor) Release() {
	if p != nil {
		_, _ = p.says.Write([]byte{'.'}) // a predecessor that is gone needs no word
		p.says.Close()
	}
}

// Close tells a predecessor that was not released that this process gives up.
func (p *predecessor) Close() {
	if p != nil {
		p.says.Close()
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// stopPatience is how long a process may take to end by itself.
	stopPatience = 30 * time.Second
	// lastLines of a log tell why a process ended.
	lastLines = 15
)

// programs are the paths of what is measured.
type programs struct {
	tenantd, apiserver, controllers, scheduler string
	goVersion                                  string // that tenantd was built with
}

// findPrograms finds them in dir and reads them once, so that no start waits for the disk.
func findPrograms(dir string) (programs, error) {
	var p programs
	for _, program := range []struct {
		name string
		path *string
	}{
		{"tenantd", &p.tenantd},
		{"kube-apiserver", &p.apiserver},
		{"kube-controller-manager", &p.controllers},
		{"kube-scheduler", &p.scheduler},
	} {
		path, err := filepath.Abs(filepath.Join(dir, program.name))
		if err != nil {
			return p, fmt.Errorf("find %s: %w", program.name, err)
		}
		f, err := os.Open(path)
		if err != nil {
			return p, fmt.Errorf("%w: build it with `make bin/%s`, or name its directory with --bin", err, program.name)
		}
		_, err = io.Copy(io.Discard, f)
		f.Close()
		if err != nil {
			return p, fmt.Errorf("read %s: %w", path, err)
		}
		*program.path = path
	}
	info, err := buildinfo.ReadFile(p.tenantd)
	if err != nil {
		return p, fmt.Errorf("read the Go version of %s: %w", p.tenantd, err)
	}
	p.goVersion = info.GoVersion
	return p, nil
}

// process is a running program.
type process struct {
	// constant after start
	name   string
	log    string // file with what it writes
	cmd    *exec.Cmd
	exited chan struct{} // closed after it has ended
}

// startProcess runs a program in dir, where its log goes as well.
func startProcess(dir, name, path string, args ...string) (*process, error) {
	log := filepath.Join(dir, name+".log")
	f, err := os.Create(log)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer f.Close()
	cmd := exec.Command(path, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, f, f
	// Ctrl-C is for this program, which then stops the others in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{name: name, log: log, cmd: cmd, exited: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ended is in cmd.ProcessState
		close(p.exited)
	}()
	return p, nil
}

// ended is nil while the process runs, and then says how it ended.
func (p *process) ended() error {
	select {
	case <-p.exited:
		return fmt.Errorf("%s ended by itself: %s; the end of its log:\n%s", p.name, p.cmd.ProcessState, p.tail())
	default:
		return nil
	}
}

// tail is the end of the log.
func (p *process) tail() string {
	log, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return strings.Join(lines[max(0, len(lines)-lastLines):], "\n")
}

// stopAll asks all processes to end, waits, and ends by force what does not.
func stopAll(processes []*process) error {
	for _, p := range processes {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // fails only if it has ended
	}
	// Not the caller's context: that one may be done, which is why they are stopped.
	ctx, cancel := context.WithTimeout(context.Background(), stopPatience)
	defer cancel()
	var errs []error
	for _, p := range processes {
		select {
		case <-p.exited:
		case <-ctx.Done():
			if p.ended() != nil {
				continue
			}
			errs = append(errs, fmt.Errorf("stop %s: it did not end within %s and was killed", p.name, stopPatience))
			_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // the group that it leads
			<-p.exited
		}
	}
	return errors.Join(errs...)
}

// freePorts are ports of 127.0.0.1 that nobody listened on a moment ago.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		defer ln.Close() // only after all are chosen
		ports = append(ports, ln.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package proc runs programs in tests: it starts them, keeps what they write, asks
// them how they are and waits for what they do. It knows nothing of what they are, so
// that what is tested is for the tests to say, as is how long they have patience.
package proc

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Built is the absolute path of a program that make has built, whose path is bin/NAME
// below the module.
func Built(t testing.TB, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: build it with `make bin/%s`; `make test` does", err, filepath.Base(path))
	}
	return path
}

// Run runs a command and returns what it left, whatever that is. It is killed when it
// takes longer than within.
func Run(t testing.TB, within time.Duration, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, errors bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errors
	if err := cmd.Start(); err != nil {
		t.Fatalf("%s %s: %v", filepath.Base(cmd.Path), strings.Join(cmd.Args[1:], " "), err)
	}
	late := time.AfterFunc(within, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	_ = cmd.Wait() // the exit code says it
	return out.String(), errors.String(), cmd.ProcessState.ExitCode()
}

// Process is a program that goes on while a test does other things. All of its command
// but Start and Wait is for the test to use; ProcessState after the end.
type Process struct {
	*exec.Cmd
	// Exited is closed after the process has ended.
	Exited <-chan struct{}
}

// Start starts a command.
func Start(t testing.TB, cmd *exec.Cmd) *Process {
	t.Helper()
	began, exited := make(chan error), make(chan struct{})
	go func() {
		// A parent-death signal, which a command may have, comes when the thread ends
		// that started the process.
		runtime.LockOSThread()
		err := cmd.Start()
		began <- err
		if err == nil {
			_ = cmd.Wait() // what it ended with is in cmd
			close(exited)
		}
	}()
	if err := <-began; err != nil {
		t.Fatal(err)
	}
	return &Process{Cmd: cmd, Exited: exited}
}

// Ended reports whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.Exited:
		return true
	default:
		return false
	}
}

// EndsWithin waits for the process to end and reports whether it does so in time.
func (p *Process) EndsWithin(d time.Duration) bool {
	select {
	case <-p.Exited:
		return true
	case <-time.After(d):
		return false
	}
}

// Stop ends the process with SIGTERM or, if it has not ended in time, with SIGKILL.
func (p *Process) Stop(within time.Duration) {
	_ = p.Process.Signal(syscall.SIGTERM) // it may have ended
	if !p.EndsWithin(within) {
		_ = p.Kill()
	}
}

// Kill ends the process without warning and waits for that.
func (p *Process) Kill() error {
	err := p.Process.Kill()
	<-p.Exited
	return err
}

// Get gets what is at an address, which is an error with what was said if the answer
// is not 200.
func Get(client *http.Client, url string) (string, error) {
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusOK {
		return string(body), fmt.Errorf("GET %s: %s: %s", url, resp.Status, bytes.TrimSpace(body))
	}
	return string(body), nil
}

// FreeAddress is an address on loopback that nobody listened on a moment ago.
func FreeAddress(t testing.TB) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// Eventually repeats check, with a pause between, until it succeeds, for as long as
// the test has patience.
func Eventually(t testing.TB, patience, pause time.Duration, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s in vain until %s: %v", patience, what, err)
		}
		time.Sleep(pause)
	}
}

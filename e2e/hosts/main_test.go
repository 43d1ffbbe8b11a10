// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/tenantd/tenantd/e2e/proc"
)

// labVariable is in the environment of the process in the lab: the lab's directory.
const labVariable = "TENANTD_E2E_HOSTS_LAB"

func TestMain(m *testing.M) {
	if dir := os.Getenv(labVariable); dir != "" {
		if err := proc.EnterLab(); err != nil {
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
	return proc.InLab(syscall.CLONE_NEWPID|syscall.CLONE_NEWNS|syscall.CLONE_NEWNET, labVariable+"="+dir)
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

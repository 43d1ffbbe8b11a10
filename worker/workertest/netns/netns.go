// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package netns runs a test in a network namespace of its own, where it may have
// devices and addresses, without being root. Tests of the worker's side import it.
//
//	func TestAddress(t *testing.T) {
//		if !netns.Entered(t) {
//			return
//		}
//		...
//	}
package netns

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
)

// variable is in the environment of the process in the namespace.
const variable = "TENANT_PROXY_TEST_NETNS"

// Entered runs the calling test again, alone, in a process with a network and user
// namespace of its own, whose loopback is up. There it is true; in the process that
// was started first it is false, after the other has ended, and what that said is
// reported. Call it first in a test.
func Entered(t *testing.T) bool {
	t.Helper()
	if os.Getenv(variable) == t.Name() {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			t.Fatalf("bring lo up: %v", err)
		}
		return true
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), variable+"="+t.Name())
	cmd.SysProcAttr = Attributes()
	out, err := cmd.CombinedOutput()
	switch _, ended := errors.AsType[*exec.ExitError](err); {
	case ended:
		t.Errorf("in a network namespace:\n%s", out)
	case err != nil:
		t.Fatalf("cannot make a network namespace: %v; run the tests as root, or allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)", err)
	}
	return false
}

// Attributes are those of a process with namespaces of its own.
func Attributes() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return attr
}

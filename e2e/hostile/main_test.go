// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// insideVariable tells the test binary that it runs in namespaces of its own.
const insideVariable = "TENANTD_HOSTILE_NAMESPACE"

// TestMain runs the tests in a network namespace where every address is a local one
// and every attempt to connect can be seen.
func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(insideVariable) == "" {
		code, err := runInside()
		if err == nil {
			os.Exit(code)
		}
		fmt.Fprintf(os.Stderr, "No namespaces of the tests' own: %v. Connections to anything but the decoys on loopback, and look-ups of names, are not seen.\n", err)
		os.Exit(m.Run())
	}
	if err := errors.Join(openNetwork(), plantDriver()); err != nil {
		fmt.Fprintf(os.Stderr, "set up the namespaces: %v\n", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// inside reports whether the tests have a network of their own.
func inside() bool { return os.Getenv(insideVariable) != "" }

// runInside runs this program again in namespaces of its own. The error says why
// there are none.
func runInside() (int, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), insideVariable+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	runtime.LockOSThread() // the other process ends with this thread
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	err = cmd.Wait()
	if ended := (*exec.ExitError)(nil); err != nil && !errors.As(err, &ended) {
		return 0, err
	}
	return cmd.ProcessState.ExitCode(), nil
}

// openNetwork makes every address one of this machine and has names looked up here,
// where nobody answers.
func openNetwork() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("open loopback: %w", err)
	}
	for _, all := range []string{"0.0.0.0/0", "::/0"} {
		_, dst, err := net.ParseCIDR(all)
		if err != nil {
			return err
		}
		route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST}
		if err := netlink.RouteAdd(route); err != nil && all != "::/0" { // some machines have no IPv6
			return fmt.Errorf("make %s local: %w", all, err)
		}
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("have mounts of its own: %w", err)
	}
	resolver, err := os.CreateTemp("", "resolv.conf")
	if err != nil {
		return err
	}
	defer os.Remove(resolver.Name())
	defer resolver.Close()
	if _, err := resolver.WriteString("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"); err != nil {
		return err
	}
	target, err := filepath.EvalSymlinks("/etc/resolv.conf")
	if err != nil {
		return err
	}
	if err := unix.Mount(resolver.Name(), target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("replace %s: %w", target, err)
	}
	return nil
}

// opening matches, in an IP packet, the first of a TCP connection, and UDP.
var opening = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 0},
	{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0xf0},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0x40, Jt: 1},         // IPv4
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0x60, Jt: 6, Jf: 13}, // IPv6
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 9},                    // IPv4's protocol
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_UDP, Jt: 10},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_TCP, Jf: 10},
	{Code: unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH, K: 0},
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_IND, K: 13}, // TCP's flags
	{Code: unix.BPF_JMP | unix.BPF_JA, K: 4},
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 6}, // IPv6's protocol
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_UDP, Jt: 4},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_TCP, Jf: 4},
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 40 + 13},
	{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0x12}, // SYN and ACK
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0x02, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 512},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

// tap calls seen for each attempt to connect, and each datagram, in this network
// namespace until the test ends. name is what is looked up, if that is it.
func tap(t testing.TB, seen func(network string, to netip.AddrPort, name string)) {
	t.Helper()
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network byte order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatalf("watch the network: %v", err)
	}
	program := unix.SockFprog{Len: uint16(len(opening)), Filter: &opening[0]}
	err = errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: 1}), // loopback is the first of a namespace
	)
	if err != nil {
		t.Fatalf("watch the network: %v", err)
	}
	socket := os.NewFile(uintptr(fd), "tap")
	ended := make(chan struct{})
	t.Cleanup(func() {
		socket.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		for packet := make([]byte, 512); ; {
			n, err := socket.Read(packet)
			if err != nil {
				return
			}
			if network, to, name, ok := destination(packet[:n]); ok {
				seen(network, to, name)
			}
		}
	}()
}

// destination reads where an IP packet goes, and the name in a question to a
// resolver.
func destination(p []byte) (network string, to netip.AddrPort, name string, ok bool) {
	if len(p) < 40 {
		return "", to, "", false
	}
	protocol, address, payload := p[9], p[16:20], p[min(len(p), int(p[0]&0xf)*4):]
	if p[0]>>4 == 6 {
		protocol, address, payload = p[6], p[24:40], p[40:]
	}
	addr, _ := netip.AddrFromSlice(address)
	if len(payload) < 4 {
		return "", to, "", false
	}
	to = netip.AddrPortFrom(addr, binary.BigEndian.Uint16(payload[2:]))
	if protocol != unix.IPPROTO_UDP {
		return "tcp", to, "", true
	}
	const headers = 8 + 12 // of UDP and DNS
	for q := payload[min(len(payload), headers):]; to.Port() == 53 && len(q) > 1 && q[0] > 0 && len(q) > int(q[0]); q = q[1+q[0]:] {
		name += string(q[1:1+q[0]]) + "."
	}
	return "udp", to, name, true
}

// flexDrivers is where upstream looks for FlexVolume drivers unless told otherwise.
const flexDrivers = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec"

// flexRan is a file that the driver there makes when it is executed.
const flexRan = flexDrivers + "/ran"

// plantDriver puts a FlexVolume driver where upstream looks for one, in this mount
// namespace alone.
func plantDriver() error {
	base := filepath.Join("/", strings.Split(flexDrivers, "/")[1], strings.Split(flexDrivers, "/")[2])
	if _, err := os.Stat(base); err != nil {
		return nil // then none can be there
	}
	if err := unix.Mount("tmpfs", base, "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount on %s: %w", base, err)
	}
	dir := filepath.Join(flexDrivers, "hostile.test~driver")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	script := "#!/bin/sh\ntouch " + flexRan + "\necho '{\"status\":\"Success\",\"capabilities\":{\"attach\":true}}'\n"
	return os.WriteFile(filepath.Join(dir, "driver"), []byte(script), 0o755)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package vip

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// Device is the device that holds the address. Network plugins that look for
	// the machine's own address pass over names that begin with dummy.
	Device = "dummy-tenantd"

	// fallback holds it where there are no dummy devices.
	fallback = "lo"

	// widest is the shortest prefix of a route that is about particular networks:
	// VPNs split the default route into halves.
	widest = 8
)

// ErrTaken is what errors about an address wrap that is somebody else's.
var ErrTaken = errors.New("the address is in use")

// Ensure gives the machine the address, if it does not have it, and returns the
// device that holds it. The error says what to do; it wraps [ErrTaken] when the
// address is on another device or in a network that the machine has a route to.
func Ensure(address netip.Addr) (device string, err error) {
	link, err := holder(address)
	switch {
	case err != nil:
		return "", err
	case link != "":
		return link, up(link)
	}
	if err := Overlap(address); err != nil {
		return "", err
	}
	dummy := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: Device}}
	err = netlink.LinkAdd(dummy)
	switch {
	case err == nil, errors.Is(err, syscall.EEXIST):
		return Device, assign(Device, address, unix.RT_SCOPE_UNIVERSE)
	case errors.Is(err, syscall.EOPNOTSUPP):
		return fallback, assign(fallback, address, unix.RT_SCOPE_HOST)
	}
	return "", fmt.Errorf("add the device %s: %w%s", Device, err, remedy(err))
}

// Release takes the address away and the device with it. It is not an error if
// they are gone already.
func Release(address netip.Addr) error {
	link, err := netlink.LinkByName(Device)
	missing := netlink.LinkNotFoundError{}
	switch {
	case err == nil:
		if err := netlink.LinkDel(link); err != nil {
			return fmt.Errorf("remove the device %s: %w%s", Device, err, remedy(err))
		}
	case !errors.As(err, &missing):
		return fmt.Errorf("look for the device %s: %w", Device, err)
	}
	held, err := holder(address)
	if err != nil || held == "" {
		return nil // on another device it is not ours to take away
	}
	link, err = netlink.LinkByName(held)
	if err == nil {
		err = netlink.AddrDel(link, &netlink.Addr{IPNet: single(address)})
	}
	if err != nil {
		return fmt.Errorf("remove %s from %s: %w%s", address, held, err, remedy(err))
	}
	return nil
}

// Overlap looks whether the machine has a route to a network that the address is
// in, other than by the address itself. The error wraps [ErrTaken].
func Overlap(address netip.Addr) error {
	routes, err := netlink.RouteList(nil, family(address))
	if err != nil {
		return fmt.Errorf("list the machine's routes: %w", err)
	}
	for _, route := range routes {
		if route.Dst == nil {
			continue
		}
		ones, _ := route.Dst.Mask.Size()
		if ones < widest || !route.Dst.Contains(address.AsSlice()) {
			continue
		}
		name := linkName(route.LinkIndex)
		if name == Device || name == fallback {
			continue
		}
		return fmt.Errorf("%w: %s is in %s, which this machine reaches by %s; give the tenant another spec.network.workerVIP, or change that network", ErrTaken, address, route.Dst, name)
	}
	return nil
}

// Holder returns the device that has the address, ours or not, or an empty name.
func Holder(address netip.Addr) (device string, err error) {
	addresses, err := netlink.AddrList(nil, family(address))
	if err != nil {
		return "", fmt.Errorf("list the machine's addresses: %w", err)
	}
	for _, a := range addresses {
		if a.IP.Equal(address.AsSlice()) {
			return linkName(a.LinkIndex), nil
		}
	}
	return "", nil
}

// Ours tells whether a device is one that [Ensure] uses.
func Ours(device string) bool { return device == Device || device == fallback }

// holder is Holder, where another device is an error.
func holder(address netip.Addr) (string, error) {
	device, err := Holder(address)
	if err == nil && device != "" && !Ours(device) {
		return "", fmt.Errorf("%w: %s is on the device %s; give the tenant another spec.network.workerVIP, or take it from there", ErrTaken, address, device)
	}
	return device, err
}

func assign(device string, address netip.Addr, scope int) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("look for the device %s: %w", device, err)
	}
	// Duplicate address detection asks the network, where nobody can answer.
	err = netlink.AddrReplace(link, &netlink.Addr{IPNet: single(address), Scope: scope, Flags: flags(address)})
	if err != nil {
		return fmt.Errorf("give %s to %s: %w%s", address, device, err, remedy(err))
	}
	return up(device)
}

func up(device string) error {
	link, err := netlink.LinkByName(device)
	if err == nil && link.Attrs().Flags&net.FlagUp == 0 {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("bring the device %s up: %w%s", device, err, remedy(err))
	}
	return nil
}

func remedy(err error) string {
	if errors.Is(err, syscall.EPERM) {
		return "; it takes CAP_NET_ADMIN: run it by its unit, or as root"
	}
	return ""
}

func family(address netip.Addr) int {
	if address.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

func flags(address netip.Addr) int {
	if address.Is4() {
		return 0
	}
	return unix.IFA_F_NODAD
}

func single(address netip.Addr) *net.IPNet {
	return &net.IPNet{IP: address.AsSlice(), Mask: net.CIDRMask(address.BitLen(), address.BitLen())}
}

// linkName is a device's name, or its number when it is gone meanwhile.
func linkName(index int) string {
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return fmt.Sprint("device ", index)
	}
	return link.Attrs().Name
}

// hardware tells whether a device has hardware under it, real or a hypervisor's.
func hardware(device string) bool {
	_, err := os.Stat("/sys/class/net/" + device + "/device")
	return err == nil
}

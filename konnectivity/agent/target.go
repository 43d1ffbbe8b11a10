// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

// metadataIPv6 is where EC2 serves instance credentials by IPv6; everybody else
// uses a link-local address.
var metadataIPv6 = netip.MustParseAddr("fd00:ec2::254")

// DefaultAllow is what Config.Allow is by default. It refuses what only programs
// on the node itself may reach: loopback, link-local addresses, among them the
// cloud's metadata service, and what is no address of one machine.
func DefaultAllow(target netip.AddrPort) bool {
	ip := target.Addr().Unmap()
	return !ip.IsLoopback() && !ip.IsLinkLocalUnicast() && !ip.IsMulticast() &&
		!ip.IsUnspecified() && ip != netip.AddrFrom4([4]byte{255, 255, 255, 255}) &&
		ip.WithZone("") != metadataIPv6
}

// dialTarget connects to what the API server asked for. The veto sees the address
// that is about to be connected to, so that no name resolves around it.
func (a *Agent) dialTarget(ctx context.Context, network, address string) (*net.TCPConn, error) {
	if network != "tcp" && network != "tcp4" && network != "tcp6" {
		return nil, net.UnknownNetworkError(network)
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	// Few resolvers know a node's own name.
	if strings.EqualFold(host, a.config.Node) && len(a.config.Addresses) > 0 {
		address = net.JoinHostPort(a.config.Addresses[0].String(), port)
	}
	dialer := net.Dialer{
		Timeout: wire.DialTimeout,
		Control: func(_, address string, _ syscall.RawConn) error {
			target, err := netip.ParseAddrPort(address)
			if err != nil {
				return err
			}
			if !a.config.Allow(netip.AddrPortFrom(target.Addr().Unmap(), target.Port())) {
				return fmt.Errorf("node %s does not tunnel to %s", a.config.Node, target)
			}
			return nil
		},
	}
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

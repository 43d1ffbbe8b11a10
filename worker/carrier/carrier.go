// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package carrier

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"

	"github.com/tenantd/tenantd/worker/relay"
)

// Protocol is the ALPN protocol by which a host tells the outer connection of the
// carrier TLS from one of the API itself.
const Protocol = "tenantd-api"

const (
	// KeepAlive is when a connection that says nothing is asked whether it is still
	// there. A watch may say nothing for minutes.
	KeepAlive = 30 * time.Second

	// UserTimeout is how long sent bytes may stay unacknowledged. It is for the way
	// to the host alone: on the way to a client it would end a client that does not
	// read for as long, such as a pager.
	UserTimeout = 10 * time.Second
)

// Kind is a way to a host.
type Kind string

// The kinds of carriers.
const (
	TLS    Kind = "tls"
	Proxy2 Kind = "proxy2"
)

// Config describes a carrier.
type Config struct {
	// Kind is TLS or Proxy2. Required.
	Kind Kind
	// Hostname is the tenant's. Required.
	Hostname string
	// RootCAs verify the outer connection of TLS. Required for it.
	RootCAs *x509.CertPool
	// GetClientCertificate is as in tls.Config, for TLS. Nil means to be anonymous.
	GetClientCertificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
	// Buffers are for the connections. Required.
	Buffers *relay.Buffers
}

// Carrier dials hosts. It is safe for concurrent use.
type Carrier struct {
	kind     Kind
	hostname string
	outer    *tls.Config
	buffers  *relay.Buffers
	dialer   net.Dialer
}

// New makes a carrier. It starts nothing.
func New(cfg Config) (*Carrier, error) {
	switch {
	case cfg.Kind != TLS && cfg.Kind != Proxy2:
		return nil, fmt.Errorf("carrier %q is none: use %q or %q", cfg.Kind, TLS, Proxy2)
	case cfg.Hostname == "" || cfg.Buffers == nil:
		return nil, errors.New("a carrier needs Hostname and Buffers")
	case cfg.Kind == TLS && cfg.RootCAs == nil:
		return nil, errors.New("the carrier TLS needs RootCAs")
	}
	return &Carrier{
		kind:     cfg.Kind,
		hostname: cfg.Hostname,
		buffers:  cfg.Buffers,
		outer: &tls.Config{
			ServerName: cfg.Hostname,
			RootCAs:    cfg.RootCAs,
			NextProtos: []string{Protocol},
			MinVersion: tls.VersionTLS13,
			// What is inside has its own, post-quantum where both ends know it. Here it
			// would be for nothing but time and memory.
			CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP256},
			// What is inside has small records where they help.
			DynamicRecordSizingDisabled: true,
			ClientSessionCache:          tls.NewLRUClientSessionCache(0),
			GetClientCertificate:        cfg.GetClientCertificate,
		},
		dialer: net.Dialer{
			KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: KeepAlive, Interval: 5 * time.Second, Count: 3},
			ControlContext: func(_ context.Context, _, _ string, raw syscall.RawConn) error {
				var err error
				if ctrlErr := raw.Control(func(fd uintptr) {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(UserTimeout.Milliseconds()))
				}); ctrlErr != nil {
					return ctrlErr
				}
				return err
			},
		},
	}, nil
}

// Kind says which carrier this is.
func (c *Carrier) Kind() Kind { return c.kind }

// Dial connects to host for a client, whose addresses may be nil: they are what
// the host is told, and believes for its logs alone. The connection that it
// returns reaches the tenant's API server as it is.
func (c *Carrier) Dial(ctx context.Context, host netip.AddrPort, remote, local net.Addr) (relay.Conn, error) {
	dialled, err := c.dialer.DialContext(ctx, "tcp", host.String())
	if err != nil {
		return nil, err
	}
	tcp := dialled.(*net.TCPConn)
	if c.kind == TLS {
		conn, err := c.buffers.TLS(ctx, tcp, tls.Client, c.outer)
		switch {
		case err != nil && ctx.Err() != nil:
			return nil, fmt.Errorf("shake hands with %s: %w", host, ctx.Err())
		case err != nil:
			return nil, fmt.Errorf("shake hands with %s: %w", host, err)
		}
		if spoken := conn.(interface{ ConnectionState() tls.ConnectionState }).ConnectionState().NegotiatedProtocol; spoken != Protocol {
			conn.Close()
			return nil, fmt.Errorf("%s does not speak %s for %s: is it a host of this tenant, and of the same release?", host, Protocol, c.hostname)
		}
		return conn, nil
	}
	header, err := c.header(tcp, remote, local)
	if err == nil {
		_, err = tcp.Write(header)
	}
	if err != nil {
		tcp.Close()
		return nil, fmt.Errorf("introduce the connection to %s: %w", host, err)
	}
	conn, err := c.buffers.TCP(tcp)
	if err != nil {
		tcp.Close()
	}
	return conn, err
}

// header is the PROXY header of a connection. Both addresses in it have to be of
// one family; where the client's are not known they are those of the dialled one.
func (c *Carrier) header(dialled *net.TCPConn, remote, local net.Addr) ([]byte, error) {
	source, ok := remote.(*net.TCPAddr)
	target, also := local.(*net.TCPAddr)
	if !ok || !also || (source.IP.To4() == nil) != (target.IP.To4() == nil) {
		source, target = dialled.LocalAddr().(*net.TCPAddr), dialled.RemoteAddr().(*net.TCPAddr)
	}
	header := proxyproto.Header{
		Version:           2,
		Command:           proxyproto.PROXY,
		TransportProtocol: proxyproto.TCPv6,
		SourceAddr:        source,
		DestinationAddr:   target,
	}
	if source.IP.To4() != nil {
		header.TransportProtocol = proxyproto.TCPv4
	}
	if err := header.SetTLVs([]proxyproto.TLV{{Type: proxyproto.PP2_TYPE_AUTHORITY, Value: []byte(c.hostname)}}); err != nil {
		return nil, err
	}
	return header.Format()
}

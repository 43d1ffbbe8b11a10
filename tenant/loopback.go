// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/tenantd/tenantd/tenant/limit"
)

// loopbackServerName is a name in every API server's serving certificate, under
// which the control plane's own components verify it.
const loopbackServerName = "kubernetes.default.svc"

// listener is what an API server accepts from: connections that the router
// hands over, and those of the control plane's own components, which never
// touch the network.
type listener struct {
	public net.Listener
	conns  chan net.Conn
	opened chan struct{} // closed by open
	open   func()        // lets clients in, who wait until then
	closed chan struct{}
	close  func()
	pump   sync.WaitGroup

	mu  sync.Mutex // guards what follows
	own map[*ownConn]struct{}
}

// newListener takes ownership of public.
func newListener(public net.Listener) *listener {
	l := &listener{public: public, conns: make(chan net.Conn), opened: make(chan struct{}), closed: make(chan struct{}), own: map[*ownConn]struct{}{}}
	l.open = sync.OnceFunc(func() { close(l.opened) })
	l.close = sync.OnceFunc(func() {
		close(l.closed)
		l.public.Close()
		l.pump.Wait()
		// A server that stops does so when what was asked has been answered, and then
		// gives clients of HTTP/2 a second to leave. Its own need none.
		l.mu.Lock()
		own := slices.Collect(maps.Keys(l.own))
		l.mu.Unlock()
		for _, conn := range own {
			conn.Close()
		}
	})
	l.pump.Go(func() {
		select {
		case <-l.opened:
		case <-l.closed:
			return
		}
		for {
			conn, err := l.public.Accept()
			if err != nil {
				return // closed: the router keeps its listeners open otherwise
			}
			select {
			case l.conns <- limit.Public(conn):
			case <-l.closed:
				conn.Close()
				return
			}
		}
	})
	return l
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// take hands over a client's connection that arrived in another way; false if it
// could not.
func (l *listener) take(ctx context.Context, conn net.Conn) bool {
	select {
	case l.conns <- limit.Public(conn):
		return true
	case <-l.closed:
	case <-ctx.Done():
	}
	return false
}

// Addr implements net.Listener. Upstream insists on a *net.TCPAddr.
func (l *listener) Addr() net.Addr { return l.public.Addr() }

// Close implements net.Listener.
func (l *listener) Close() error {
	l.close()
	return nil
}

// errStopped is not net.ErrClosed, after which client-go asks ten times more, a second
// apart. The hook that writes upstream's roles reads some 160 of them one after the other
// and heeds no context: it held on to a server that had stopped for half an hour.
var errStopped = errors.New("it has stopped")

// dial connects to the API server through a pair of sockets inside this process.
func (l *listener) dial(ctx context.Context) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("connect to own API server: %w", err)
	}
	end, err1 := fileConn(fds[0])
	server, err2 := fileConn(fds[1])
	if err := errors.Join(err1, err2); err != nil {
		for _, c := range []net.Conn{end, server} {
			if c != nil {
				c.Close()
			}
		}
		return nil, fmt.Errorf("connect to own API server: %w", err)
	}
	client := &ownConn{end, l}
	l.mu.Lock()
	l.own[client] = struct{}{}
	l.mu.Unlock()
	select {
	case l.conns <- limit.Own(loopbackConn{server}):
		return client, nil
	case <-l.closed:
		err = errStopped
	case <-ctx.Done():
		err = ctx.Err()
	}
	client.Close()
	server.Close()
	return nil, fmt.Errorf("connect to own API server: %w", err)
}

// ownConn is the client's end of a connection to the own API server.
type ownConn struct {
	net.Conn
	listener *listener
}

// Close implements net.Conn.
func (c *ownConn) Close() error {
	c.listener.mu.Lock()
	delete(c.listener.own, c)
	c.listener.mu.Unlock()
	return c.Conn.Close()
}

func fileConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "loopback")
	defer f.Close()
	return net.FileConn(f)
}

// loopbackConn gives upstream, which takes requests' addresses apart, an address
// of the form it knows.
type loopbackConn struct{ net.Conn }

var loopbackAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}

func (loopbackConn) RemoteAddr() net.Addr { return loopbackAddr }
func (loopbackConn) LocalAddr() net.Addr  { return loopbackAddr }

// nested has a request that asks its own API server while it is answered give its
// turn to the one that it waits for.
type nested struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (n nested) RoundTrip(req *http.Request) (*http.Response, error) {
	defer limit.Outside(req.Context())()
	return n.RoundTripper.RoundTrip(req)
}

// WrappedRoundTripper implements k8s.io/apimachinery/pkg/util/net.RoundTripperWrapper.
func (n nested) WrappedRoundTripper() http.RoundTripper { return n.RoundTripper }

// leading has each write wait until its caller certainly has the lead.
type leading struct {
	http.RoundTripper
	leads func(context.Context) error
}

// RoundTrip implements http.RoundTripper.
func (l leading) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		if err := l.leads(req.Context()); err != nil {
			if req.Body != nil {
				req.Body.Close()
			}
			return nil, fmt.Errorf("write nothing: %w", err)
		}
	}
	return l.RoundTripper.RoundTrip(req)
}

// WrappedRoundTripper implements k8s.io/apimachinery/pkg/util/net.RoundTripperWrapper.
func (l leading) WrappedRoundTripper() http.RoundTripper { return l.RoundTripper }

// workers are cfg and client for controllers and scheduler.
func (cp *ControlPlane) workers(cfg *rest.Config, client kubernetes.Interface) (*rest.Config, kubernetes.Interface, error) {
	if cp.cfg.StillLeads == nil {
		return cfg, client, nil
	}
	cfg = rest.CopyConfig(cfg)
	cfg.Transport = leading{cfg.Transport, cp.cfg.StillLeads}
	worker, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("make controllers' client: %w", err)
	}
	return cfg, worker, nil
}

// ownUserAgent is how upstream's API server calls itself, whatever the program is called.
// It knows its own requests by that: while it stops, all others are told to come again in
// five seconds. A request that is being answered and needs another one (a Service the
// allocation of its address) would do that until the server's time is over.
func ownUserAgent() string {
	_, build, _ := strings.Cut(rest.DefaultKubernetesUserAgent(), "/")
	return "kube-apiserver/" + build
}

// clientConfig makes the privileged client of the control plane's own
// components. All clients made from it share one transport, and so mostly one
// connection; closing the returned function closes its idle connections.
//
// It has a transport instead of TLS settings, so a tenant's webhook that names
// kubernetes.default.svc cannot borrow its token: client-go refuses to add a
// webhook's CA bundle to such a configuration.
func (l *listener) clientConfig(ca []byte) (*rest.Config, func(), error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, nil, errors.New("make loopback client: no certificate in the CA bundle")
	}
	transport := &http.Transport{
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			raw, err := l.dial(ctx)
			if err != nil {
				return nil, err
			}
			conn := tls.Client(raw, &tls.Config{
				MinVersion: tls.VersionTLS13, RootCAs: roots, ServerName: loopbackServerName, NextProtos: []string{"h2"},
			})
			if err := conn.HandshakeContext(ctx); err != nil {
				raw.Close()
				return nil, fmt.Errorf("connect to own API server: %w", err)
			}
			return conn, nil
		},
		ForceAttemptHTTP2:  true,
		DisableCompression: true,
		IdleConnTimeout:    90 * time.Second,
	}
	cfg := &rest.Config{
		Host:        "https://" + loopbackServerName,
		Transport:   nested{transport},
		BearerToken: string(uuid.NewUUID()),
		UserAgent:   ownUserAgent(),
		// Own components are bounded by what they do, not by a rate.
		QPS:   -1,
		Burst: -1,
	}
	cfg.DisableCompression = true
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	return cfg, transport.CloseIdleConnections, nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"
	"sigs.k8s.io/apiserver-network-proxy/proto/agent"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

const (
	// connectTimeout is for reaching a server, the handshake and its welcome
	// together: what a start across a continent takes, twenty times.
	connectTimeout = 10 * time.Second

	// keepaliveTime is the shortest that gRPC has; with keepaliveTimeout a server
	// that vanished is noticed in 15 s.
	keepaliveTime    = 10 * time.Second
	keepaliveTimeout = 5 * time.Second

	// drainTime is what connections have to end after their server left the list.
	drainTime = 30 * time.Second
)

var (
	errDrained = errors.New("the server is no longer listed")
	errRenewed = errors.New("replaced by a tunnel with the renewed certificate")
)

// tunnel is one connection to a server, from its first stream to that stream's
// end.
type tunnel struct {
	// Constant after construction.
	agent    *Agent
	server   string
	serverID string
	leaf     []byte // the certificate it was made with
	since    time.Time
	grpc     *grpc.ClientConn
	service  agent.AgentServiceClient
	control  agent.AgentService_ConnectClient
	ctx      context.Context // of everything in it
	cancel   context.CancelCauseFunc
	running  sync.WaitGroup
	open     atomic.Int64  // connections
	done     chan struct{} // closed when nothing is left

	sending sync.Mutex // one packet at a time on control

	mu    sync.Mutex // guards what follows
	dials map[int64]context.CancelFunc
}

// connect makes a tunnel to a server, which serves until ctx or the tunnel ends.
func (a *Agent) connect(ctx context.Context, server string) (*tunnel, error) {
	starting, cancelStart := context.WithTimeout(ctx, connectTimeout)
	defer cancelStart()
	socket, leaf, err := a.handshake(starting, server)
	if err != nil {
		return nil, err
	}
	t := &tunnel{agent: a, server: server, leaf: leaf, since: time.Now(), done: make(chan struct{}), dials: make(map[int64]context.CancelFunc)}
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	// Not before the welcome is the tunnel's life its own.
	stop := context.AfterFunc(starting, func() { t.cancel(context.Cause(starting)) })
	if err := t.start(socket); err != nil {
		if !stop() && ctx.Err() == nil {
			err = fmt.Errorf("no welcome within %v", connectTimeout)
		}
		t.cancel(err)
		if t.grpc != nil {
			_ = t.grpc.Close()
		}
		_ = socket.Close()
		return nil, err
	}
	if !stop() {
		t.cancel(context.Cause(starting)) // the welcome came too late
	}
	go t.serve(socket)
	return t, nil
}

// handshake opens a TLS connection to a server and returns the client
// certificate it used.
func (a *Agent) handshake(ctx context.Context, server string) (*tls.Conn, []byte, error) {
	roots, err := a.config.RootCAs()
	if err != nil {
		return nil, nil, fmt.Errorf("read the cluster's authority: %w", err)
	}
	cert, err := a.config.Certificate()
	if err != nil {
		return nil, nil, fmt.Errorf("read the node's certificate: %w", err)
	}
	if cert == nil || len(cert.Certificate) == 0 {
		return nil, nil, errors.New("read the node's certificate: there is none yet: join the node first")
	}
	raw, err := a.config.DialContext(ctx, "tcp", server)
	if err != nil {
		return nil, nil, err
	}
	socket := tls.Client(raw, &tls.Config{
		ServerName: a.config.ServerName,
		RootCAs:    roots,
		MinVersion: tls.VersionTLS12,
		// The first is for the router on the way, the second for the server.
		NextProtos:           []string{ALPN, "h2"},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil },
	})
	if err := socket.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, nil, fmt.Errorf("handshake as %s: %w", a.config.ServerName, err)
	}
	return socket, cert.Certificate[0], nil
}

// start opens the tunnel's first stream on a socket and waits for the welcome.
func (t *tunnel) start(socket net.Conn) (err error) {
	var taken atomic.Bool
	t.grpc, err = grpc.NewClient("passthrough:///"+t.server,
		// A lost socket ends the tunnel; the next one reads its certificate anew.
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if taken.Swap(true) {
				return nil, errors.New("connection lost")
			}
			return socket, nil
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()), // socket has TLS
		grpc.WithAuthority(t.agent.config.ServerName),
		grpc.WithUserAgent("tenantd-tunnel-agent"),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: keepaliveTimeout, PermitWithoutStream: true}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(wire.MaxMessage), grpc.MaxCallSendMsgSize(wire.MaxMessage)),
		grpc.WithStaticStreamWindowSize(wire.Window),
		grpc.WithStaticConnWindowSize(wire.ConnWindow),
		grpc.WithReadBufferSize(wire.BufferSize),
		grpc.WithWriteBufferSize(wire.BufferSize),
		grpc.WithIdleTimeout(0),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
	)
	if err != nil {
		return err
	}
	t.service = agent.NewAgentServiceClient(t.grpc)
	t.control, err = t.service.Connect(metadata.AppendToOutgoingContext(t.ctx,
		wire.AgentID, t.agent.config.Node,
		wire.AgentIdentifiers, t.agent.identifiers,
	))
	if err != nil {
		return plain(err)
	}
	welcome, err := t.control.Header()
	if err == nil && len(welcome) == 0 {
		_, err = t.control.Recv() // refused: the status says why
	}
	if err != nil {
		return plain(err)
	}
	if len(welcome.Get(wire.Dial)) == 0 || len(welcome.Get(wire.ServerID)) == 0 {
		return errors.New("the server is no tenantd that this agent understands: upgrade it")
	}
	t.serverID = wire.Text(welcome.Get(wire.ServerID)[0])
	return nil
}

// serve takes the server's requests until the tunnel ends.
func (t *tunnel) serve(socket net.Conn) {
	defer close(t.done)
	for {
		p, err := t.control.Recv()
		if err == nil {
			err = wire.Check(p)
		}
		if err != nil {
			t.cancel(plain(err))
			break
		}
		switch p.GetType() {
		case client.PacketType_DIAL_REQ:
			t.dial(p.GetDialRequest())
		case client.PacketType_DIAL_CLS:
			t.cancelDial(p.GetCloseDial().GetRandom())
		}
	}
	_ = t.grpc.Close()
	_ = socket.Close()
	t.running.Wait()
}

// drain asks for no further dials and ends the tunnel when its connections have
// ended, or when ctx does.
func (t *tunnel) drain(ctx context.Context, why error) {
	t.send(wire.Drain())
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	// A dial may be on its way here: once nothing is open, once more nothing.
	for quiet := 0; quiet < 2; {
		select {
		case <-t.done:
			return
		case <-ctx.Done():
			quiet = 2
		case <-tick.C:
			if quiet++; t.open.Load() > 0 {
				quiet = 0
			}
		}
	}
	t.cancel(why)
	<-t.done
}

func (t *tunnel) send(p *client.Packet) {
	t.sending.Lock()
	defer t.sending.Unlock()
	_ = t.control.Send(p) // a failed stream ends Recv, which says why
}

// uses says whether the tunnel was made with this certificate.
func (t *tunnel) uses(cert *tls.Certificate) bool {
	return len(cert.Certificate) > 0 && bytes.Equal(t.leaf, cert.Certificate[0])
}

// dial answers a DIAL_REQ in the background.
func (t *tunnel) dial(p *client.DialRequest) {
	ctx, cancel := context.WithCancel(t.ctx)
	number := p.GetRandom()
	t.mu.Lock()
	t.dials[number] = cancel
	t.mu.Unlock()
	t.open.Add(1)
	t.running.Go(func() {
		defer t.open.Add(-1)
		defer cancel()
		target, err := t.agent.dialTarget(ctx, p.GetProtocol(), p.GetAddress())
		t.mu.Lock()
		delete(t.dials, number) // from here on, the connection is given up by its stream
		t.mu.Unlock()
		switch {
		case err == nil:
			t.carry(ctx, number, target)
		case ctx.Err() == nil:
			t.agent.log.Debug("target not reached", "server", t.server, "target", wire.Text(p.GetAddress()), "error", err)
			t.send(wire.DialFailed(number, err.Error()))
		}
	})
}

func (t *tunnel) cancelDial(number int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if cancel := t.dials[number]; cancel != nil {
		cancel()
	}
}

// carry carries one connection on a stream of its own until both ends are done
// with it, or one broke.
func (t *tunnel) carry(ctx context.Context, number int64, target *net.TCPConn) {
	defer target.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Unblocks reads and writes of target.
	defer context.AfterFunc(ctx, func() { _ = target.SetDeadline(time.Unix(1, 0)) })()
	stream, err := t.service.Connect(metadata.AppendToOutgoingContext(ctx,
		wire.AgentID, t.agent.config.Node,
		wire.Dial, strconv.FormatInt(number, 10),
	))
	if err != nil {
		return // the tunnel has ended, and dials with it
	}
	c := carried{stream: stream, target: target}
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		c.upload()
	}()
	if err := c.download(); err != nil {
		_ = target.SetLinger(0) // the target must not take this for an end in order
	}
	cancel()
	<-reading
}

// carried is a connection on its stream.
type carried struct {
	stream agent.AgentService_ConnectClient
	target *net.TCPConn
	failed atomic.Pointer[error] // what writing to target met
}

// upload sends what the target says and how it ended.
func (c *carried) upload() {
	buffer := make([]byte, wire.ChunkSize)
	for {
		n, err := c.target.Read(buffer)
		if n > 0 {
			if c.stream.Send(wire.Data(1, buffer[:n])) != nil {
				return // download learns why
			}
		}
		if err == nil {
			continue
		}
		if why := c.failed.Load(); why != nil {
			err = *why
		}
		if !errors.Is(err, io.EOF) {
			_ = c.stream.Send(wire.Closed(1, err.Error()))
		}
		_ = c.stream.CloseSend()
		return
	}
}

// download gives the target what the server sends. It returns nil when the
// server closed the connection and an error when the stream broke. A target that
// takes nothing more is reported by upload; the server then closes.
func (c *carried) download() error {
	for {
		p, err := c.stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case c.failed.Load() != nil:
			continue
		}
		switch p.GetType() {
		case client.PacketType_DATA:
			_, err = c.target.Write(p.GetData().GetData())
		case client.PacketType_CLOSE_REQ:
			err = c.target.CloseWrite()
		}
		if err != nil {
			c.failed.Store(&err)
			_ = c.target.SetReadDeadline(time.Unix(1, 0))
		}
	}
}

// plain takes gRPC's wrapping off an error.
func plain(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("the server ended the tunnel")
	}
	if s, ok := status.FromError(err); ok {
		return errors.New(wire.Text(s.Message()))
	}
	return err
}

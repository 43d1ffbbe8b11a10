// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/apiserver-network-proxy/proto/agent"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

const (
	// keepaliveTime and keepaliveTimeout find a dead agent in 45 s. The agent,
	// which has something to do about it, looks three times as often.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 15 * time.Second

	// minKeepalive is the shortest interval that agents may choose: half of ours.
	minKeepalive = 5 * time.Second

	// maxIdle is how long a connection may stay without a stream. Agents open
	// theirs at once.
	maxIdle = 15 * time.Second

	// handshakeTimeout is for TLS and the start of HTTP/2 together.
	handshakeTimeout = 10 * time.Second

	// maxHeaders holds a token of the largest size that is seen, with room.
	maxHeaders = 16 << 10

	// maxSessions is how many connections one agent may have: ours has up to three
	// ways here, each with a connection that finishes, and tries as many others.
	maxSessions = 16
)

// errClosed ends what was going on when the server was closed.
var errClosed = errors.New("the tunnel server was closed")

// Server is one tenant's end of the tunnel. All its methods are safe for
// concurrent use.
type Server struct {
	// Constant after construction.
	config   Config
	log      *slog.Logger
	id       string
	grpc     *grpc.Server
	metrics  *metrics
	reviews  chan struct{} // holds one for each first review under way
	served   func()        // starts the time that agents have to gather
	gathered chan struct{} // closed when it is over, or an agent has come
	gather   func()        // closes gathered
	ctx      context.Context
	cancel   context.CancelFunc
	running  sync.WaitGroup // what reads and writes streams

	used atomic.Int64 // open connections and dials

	mu       sync.Mutex              // guards what follows
	sessions map[identity][]*session // oldest first
	count    int                     // of sessions
	dials    map[int64]*dial
	closed   bool
}

// New returns a server that serves nothing yet. It must be closed.
func New(config Config) (*Server, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("configure tunnel server: %w", err)
	}
	config = config.withDefaults()
	s := &Server{
		config:   config,
		log:      config.Logger,
		id:       rand.Text(),
		reviews:  make(chan struct{}, maxReviews),
		gathered: make(chan struct{}),
		sessions: make(map[identity][]*session),
		dials:    make(map[int64]*dial),
	}
	s.metrics = newMetrics(s)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.gather = sync.OnceFunc(func() { close(s.gathered) })
	s.served = sync.OnceFunc(func() {
		late := time.AfterFunc(config.Gathering, s.gather)
		context.AfterFunc(s.ctx, func() { late.Stop() })
	})
	s.grpc = grpc.NewServer(
		grpc.Creds(credentials.NewTLS(harden(config.TLS))),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionIdle: maxIdle,
			Time:              keepaliveTime,
			Timeout:           keepaliveTimeout,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minKeepalive, PermitWithoutStream: true}),
		// All of the tenant's connections may be one agent's. Those that close
		// overlap with those that open.
		grpc.MaxConcurrentStreams(uint32(config.MaxStreams+config.MaxStreams/4+16)),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.MaxRecvMsgSize(wire.MaxMessage),
		grpc.MaxSendMsgSize(wire.MaxMessage),
		grpc.StaticStreamWindowSize(wire.Window),
		grpc.StaticConnWindowSize(wire.ConnWindow),
		grpc.ReadBufferSize(wire.BufferSize),
		grpc.WriteBufferSize(wire.BufferSize),
		grpc.WaitForHandlers(true),
	)
	agent.RegisterAgentServiceServer(s.grpc, service{s})
	return s, nil
}

// Serve accepts agents from l until l or the server is closed, which is no
// error. It owns l. It may be called for several listeners.
func (s *Server) Serve(l net.Listener) error {
	s.served()
	err := s.grpc.Serve(l)
	if err == nil || errors.Is(err, net.ErrClosed) || errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return fmt.Errorf("serve tunnel agents: %w", err)
}

// Close ends what Serve serves, in this order: no further dials; every agent's
// session and with it its connections, whose reads and writes return an error;
// listeners and sockets; goroutines. When it returns, none is left. Connections
// still need their Close. Repeating it does nothing.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	var all []*session
	for _, of := range s.sessions {
		all = append(all, of...)
	}
	s.mu.Unlock()
	s.cancel()
	for _, each := range all {
		each.end(errClosed)
	}
	s.grpc.Stop()
	s.running.Wait()
	return nil
}

// Agent is one agent's connection.
type Agent struct {
	ID        string
	Certified bool      // the id is the node that its client certificate names
	Addresses []string  // of the node, and served by no other certified agent
	Since     time.Time // when it connected
	Streams   int       // open connections through it
	Draining  bool      // it asked for no further dials
}

// Agents returns the connections of agents, by id and oldest first. One agent
// may have several; dials go to the newest.
func (s *Server) Agents() []Agent {
	s.mu.Lock()
	var all []*session
	for _, of := range s.sessions {
		all = append(all, of...)
	}
	s.mu.Unlock()
	agents := make([]Agent, 0, len(all))
	for _, a := range all {
		agents = append(agents, Agent{
			ID: a.id.name, Certified: a.id.proven, Addresses: a.addresses(),
			Since: a.since, Streams: a.streams(), Draining: a.draining.Load(),
		})
	}
	slices.SortFunc(agents, func(a, b Agent) int {
		return cmp.Or(strings.Compare(a.ID, b.ID), a.Since.Compare(b.Since))
	})
	return agents
}

// service keeps the gRPC method out of Server's API.
type service struct{ server *Server }

// Connect implements upstream's AgentService.
func (h service) Connect(stream agent.AgentService_ConnectServer) (err error) {
	s := h.server
	// What agents send cannot cause a panic that we know of. One that we do not
	// know of must end this stream, not the process with all its tenants.
	defer func() {
		if cause := recover(); cause != nil {
			s.log.Error("panic while serving a tunnel agent", "panic", cause, "stack", string(debug.Stack()))
			err = status.Error(codes.Internal, "the tunnel server failed")
		}
	}()
	ctx := stream.Context()
	id, proof, err := s.identify(ctx)
	if err != nil {
		s.metrics.refused.Inc()
		s.log.Debug("tunnel agent refused", "error", err)
		return err
	}
	number, err := single(ctx, wire.Dial)
	if err != nil {
		return err
	}
	if number != "" {
		return s.carry(stream, id, number)
	}
	return s.attend(stream, id, proof)
}

// attend serves an agent's first stream: the one that dials are sent on, and
// with upstream's agent everything else as well.
func (s *Server) attend(stream agent.AgentService_ConnectServer, id identity, proof credential) error {
	ctx := stream.Context()
	identifiers, err := single(ctx, wire.AgentIdentifiers)
	if err != nil {
		return err
	}
	claimed, err := claims(identifiers)
	if err != nil {
		return err
	}
	a := &session{
		server: s, id: id, proof: proof, claimed: claimed, since: time.Now(),
		control: newLink(stream),
		done:    make(chan struct{}),
		byID:    make(map[int64]*conn),
		own:     make(map[*conn]struct{}),
	}
	a.owns = s.honoured(ctx, id.name, claimed)
	if err := stream.SendHeader(metadata.Pairs(
		wire.ServerID, s.id,
		wire.ServerCount, strconv.Itoa(s.config.Replicas()),
		wire.Dial, "1",
	)); err != nil {
		return err
	}
	if err := s.register(a); err != nil {
		return err
	}
	s.log.Info("tunnel agent connected", "agent", id.name, "certified", id.proven, "addresses", a.owns)
	s.spawn(a, a.read)
	s.spawn(a, a.control.write)
	s.spawn(a, func() { a.watch(s.ctx) })
	select {
	case <-a.done:
	case <-a.control.done:
		// The stream failed; read knows why, but may be busy with a packet.
		a.end(errors.New("it cannot be written to"))
	case <-ctx.Done():
		a.end(errBroke)
	}
	s.unregister(a)
	cause := a.endCause()
	s.log.Info("tunnel agent disconnected", "agent", id.name, "certified", id.proven, "cause", cause)
	if errors.Is(cause, errClosed) {
		return status.Error(codes.Unavailable, cause.Error())
	}
	return status.Error(codes.Aborted, cause.Error())
}

// carry serves a stream that an agent opened for one connection.
func (s *Server) carry(stream agent.AgentService_ConnectServer, id identity, number string) error {
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "metadata %s is no number", wire.Dial)
	}
	d := s.claimBy(n, id)
	if d == nil {
		return status.Error(codes.Canceled, "nobody waits for this connection any more")
	}
	c := newConn(d.session, newLink(stream), 1, d.network, d.target)
	if err := d.session.adopt(c); err != nil {
		d.answer <- answer{err: err}
		return status.Error(codes.Aborted, err.Error())
	}
	defer d.session.forget(c)
	d.session.silent.Store(false)
	d.answer <- answer{conn: c}
	// The agent's gRPC keeps what it sent for a retry until headers arrive.
	if err := stream.SendHeader(nil); err != nil {
		c.end(err)
		return err
	}
	s.spawn(d.session, func() { s.pump(c) })
	s.spawn(d.session, c.link.write)
	select {
	case <-c.link.done:
	case <-stream.Context().Done():
		c.link.end()
	}
	if c.end(fmt.Errorf("its stream through tunnel agent %q ended", id.name)); !c.closedByUs() {
		return status.Error(codes.Aborted, "the connection broke")
	}
	return nil
}

// pump takes the bytes that arrive for a connection with its own stream.
func (s *Server) pump(c *conn) {
	for {
		p, err := c.link.stream.Recv()
		if err == nil {
			err = wire.Check(p)
		}
		switch {
		case errors.Is(err, io.EOF):
			c.receiveEOF()
			return
		case err != nil:
			c.end(fmt.Errorf("tunnel agent %q: %s", c.session.id.name, wire.Text(status.Convert(err).Message())))
			c.link.end()
			return
		}
		if p.GetData() != nil {
			c.receive(p.GetData().GetData())
		}
		if rsp := p.GetCloseResponse(); rsp != nil {
			c.end(reason(rsp))
		}
	}
}

// spawn runs f, which belongs to a session, until the session's end. Only stream
// handlers call it: Close waits for them first.
func (s *Server) spawn(a *session, f func()) {
	s.running.Go(func() {
		defer func() {
			if cause := recover(); cause != nil {
				s.log.Error("panic while serving a tunnel agent", "agent", a.id.name, "panic", cause, "stack", string(debug.Stack()))
				a.end(errors.New("the tunnel server failed"))
			}
		}()
		f()
	})
}

// register lets dials go to a session, and ends the oldest of an agent that has
// too many.
func (s *Server) register(a *session) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return status.Error(codes.Unavailable, errClosed.Error())
	}
	if s.count >= s.config.MaxAgents {
		s.mu.Unlock()
		return status.Errorf(codes.ResourceExhausted, "%d tunnel agents are connected already", s.config.MaxAgents)
	}
	s.gather()
	of := append(s.sessions[a.id], a)
	s.sessions[a.id] = of
	s.count++
	s.mu.Unlock()
	if len(of) > maxSessions {
		of[0].end(fmt.Errorf("the agent connected %d times more", maxSessions))
	}
	return nil
}

func (s *Server) unregister(a *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	of := slices.DeleteFunc(slices.Clone(s.sessions[a.id]), func(b *session) bool { return a == b })
	if s.sessions[a.id] = of; len(of) == 0 {
		delete(s.sessions, a.id)
	}
	s.count--
}

// release gives back the place of one connection or dial.
func (s *Server) release() { s.used.Add(-1) }

// number returns one that no agent can guess.
func number() int64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return int64(binary.BigEndian.Uint64(b[:]) >> 1)
}

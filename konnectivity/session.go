// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

// errBroke ends a session whose socket failed.
var errBroke = errors.New("its connection broke")

// session is one agent's connection, from its first stream to that stream's end.
type session struct {
	// Constant after construction.
	server  *Server
	id      identity
	proof   credential
	claimed []string
	since   time.Time
	control *link

	draining atomic.Bool // asked for no further dials
	silent   atomic.Bool // left a dial unanswered and was not heard since

	done chan struct{} // closed by end

	mu    sync.Mutex // guards what follows
	owns  []string   // the claims that are honoured
	byID  map[int64]*conn
	own   map[*conn]struct{} // connections with their own link
	cause error              // not nil once ended
}

// end ends the session and its connections at once; the first cause counts.
func (s *session) end(cause error) {
	s.mu.Lock()
	if s.cause != nil {
		s.mu.Unlock()
		return
	}
	s.cause = cause
	close(s.done)
	byID, own := s.byID, s.own
	s.byID, s.own = nil, nil
	s.mu.Unlock()

	s.control.end()
	lost := fmt.Errorf("tunnel agent %q is gone: %w", s.id.name, cause)
	for _, c := range byID {
		c.end(lost)
	}
	for c := range own {
		c.end(lost)
		c.link.end()
	}
}

func (s *session) endCause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cause
}

// adopt makes c one of the session's connections.
func (s *session) adopt(c *conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.cause != nil:
		return s.cause
	case c.own:
		s.own[c] = struct{}{}
	case s.byID[c.id] != nil:
		return fmt.Errorf("connection id %d given twice", c.id)
	default:
		s.byID[c.id] = c
	}
	return nil
}

// forget is adopt's counterpart. Repeating it does nothing.
func (s *session) forget(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.own, c)
	if s.byID[c.id] == c {
		delete(s.byID, c.id)
	}
}

func (s *session) lookup(id int64) *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byID[id]
}

func (s *session) streams() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID) + len(s.own)
}

func (s *session) honours(host string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.owns, host)
}

func (s *session) addresses() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.owns)
}

// read takes the agent's packets until the stream ends, and ends the session.
func (s *session) read() {
	for {
		p, err := s.control.stream.Recv()
		switch {
		case err == nil:
			s.silent.Store(false)
			err = s.handle(p)
		case errors.Is(err, io.EOF):
			err = errors.New("it disconnected")
		case status.Code(err) == codes.Canceled:
			err = errBroke
		default:
			err = errors.New(wire.Text(status.Convert(err).Message()))
		}
		if err != nil {
			s.end(err)
			return
		}
	}
}

// handle takes one packet. An error means that the agent is at fault and its
// session is to end; nothing an agent sends reaches another agent's connections.
func (s *session) handle(p *client.Packet) error {
	if err := wire.Check(p); err != nil {
		return err
	}
	switch p.GetType() {
	case client.PacketType_DIAL_RSP:
		return s.answered(p.GetDialResponse())
	case client.PacketType_DIAL_CLS:
		if d := s.server.claim(p.GetCloseDial().GetRandom(), s); d != nil {
			d.answer <- answer{err: errors.New("the agent gave the dial up")}
		}
	case client.PacketType_DATA:
		// Bytes that were under way when the connection was closed have no taker.
		if c := s.lookup(p.GetData().GetConnectID()); c != nil {
			c.receive(p.GetData().GetData())
		}
	case client.PacketType_CLOSE_RSP:
		if c := s.lookup(p.GetCloseResponse().GetConnectID()); c != nil {
			s.forget(c)
			c.end(reason(p.GetCloseResponse()))
		}
	case client.PacketType_DRAIN:
		if !s.draining.Swap(true) {
			s.server.log.Info("tunnel agent drains", "agent", s.id.name)
		}
	}
	return nil
}

func reason(p *client.CloseResponse) error {
	if p.GetError() == "" {
		return io.EOF
	}
	return fmt.Errorf("closed at the agent's end: %s", wire.Text(p.GetError()))
}

// answered takes an agent's answer to a dial.
func (s *session) answered(p *client.DialResponse) error {
	d := s.server.claim(p.GetRandom(), s)
	switch {
	case p.GetError() != "":
		if d != nil {
			d.answer <- answer{err: errors.New(wire.Text(p.GetError()))}
		}
		return nil
	case d == nil: // given up in the meantime
		return s.refuse(p.GetConnectID())
	}
	c := newConn(s, s.control, p.GetConnectID(), d.network, d.target)
	if err := s.adopt(c); err != nil {
		d.answer <- answer{err: err}
		return err
	}
	d.answer <- answer{conn: c}
	return nil
}

// refuse tells the agent to close a connection that nobody waits for. An agent
// that sends those and never takes the answers would fill the memory.
func (s *session) refuse(id int64) error {
	if s.control.waiting() > 2*s.server.config.MaxStreams {
		return errors.New("it opens connections that nobody asked for")
	}
	s.control.put(wire.CloseRequest(id), nil)
	return nil
}

// watch looks at what the session rests on, until it ends. A token that cannot be
// reviewed twice in a row counts as taken back: once may be an API server that
// restarts.
func (s *session) watch(ctx context.Context) {
	failures := 0
	for {
		timer := time.NewTimer(s.nextCheck())
		select {
		case <-s.done:
			timer.Stop()
			return
		case <-timer.C:
		}
		if err := s.server.review(ctx, s.proof); err == nil {
			failures = 0
		} else if failures++; failures == 2 || s.id.proven {
			s.end(err)
			return
		}
		s.refresh(ctx)
	}
}

// soon is how soon claims that were not honoured are looked at again: a node's
// addresses often appear shortly after its agent.
const soon = 5 * time.Second

func (s *session) nextCheck() time.Duration {
	next := s.server.config.Recheck
	if len(s.addresses()) < len(s.claimed) {
		next = min(next, soon)
	}
	if !s.proof.expires.IsZero() {
		next = min(next, max(time.Until(s.proof.expires)+time.Millisecond, time.Millisecond))
	}
	return next
}

// refresh compares the claims with the node's addresses.
func (s *session) refresh(ctx context.Context) {
	owns := s.server.honoured(ctx, s.id.name, s.claimed)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.owns, owns) {
		s.owns = owns
		s.server.log.Info("tunnel agent serves addresses", "agent", s.id.name, "addresses", owns)
	}
}

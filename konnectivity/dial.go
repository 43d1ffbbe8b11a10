// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"time"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

// ErrNoAgent is what a dial's error wraps while no agent is connected.
var ErrNoAgent = errors.New("no tunnel agent of this cluster is connected: start tenant-proxy on a node, or deploy the konnectivity agent")

// ErrTooManyStreams is what a dial's error wraps while MaxStreams are open.
var ErrTooManyStreams = errors.New("too many connections through the tunnel: close some or raise MaxStreams")

// dial is a dial that waits for its agent.
type dial struct {
	session         *session
	network, target string
	answer          chan answer // one, sent by who claimed the dial
}

type answer struct {
	conn *conn
	err  error
}

// Dial connects to address, which is a host or IP address with a port, through an
// agent. The network is tcp, tcp4 or tcp6. Names are resolved by the agent.
//
// An address of a node goes to that node's agent, everything else to any. Where
// another agent may serve as well, a dial that fails is tried once more, through
// another one. Errors are [*net.OpError]s; they wrap [ErrNoAgent] when nobody could
// be asked: at once, but for the time of [Config].Gathering.
//
// The connection has deadlines and, through our own agent, CloseWrite. It must
// be closed.
func (s *Server) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	start := time.Now()
	c, err := s.dial(ctx, network, address)
	s.metrics.dialed(ctx, err, time.Since(start))
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: targetAddr(network, address), Err: err}
	}
	return c, nil
}

func (s *Server) dial(ctx context.Context, network, address string) (*conn, error) {
	if !strings.HasPrefix(network, "tcp") {
		return nil, net.UnknownNetworkError(network)
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if s.used.Add(1) > int64(s.config.MaxStreams) {
		s.release()
		return nil, ErrTooManyStreams
	}
	c, err := s.attempts(ctx, network, address, canonical(host))
	if err != nil {
		s.release()
		return nil, err
	}
	return c, nil
}

// attempts asks one agent and, if it may, another one.
func (s *Server) attempts(ctx context.Context, network, address, host string) (*conn, error) {
	first, bound := s.choose(host, nil)
	if first == nil && s.expect(ctx) {
		first, bound = s.choose(host, nil)
	}
	if first == nil {
		return nil, ErrNoAgent
	}
	c, err := s.attempt(ctx, first, network, address)
	if err == nil || ctx.Err() != nil {
		return c, err
	}
	second, again := s.choose(host, first)
	if second == nil || bound && !again {
		return nil, err
	}
	if c, other := s.attempt(ctx, second, network, address); other == nil {
		return c, nil
	}
	return nil, err
}

// expect waits for the first agent of all, while it may be on its way. It is false
// when there was nothing to wait for.
func (s *Server) expect(ctx context.Context) bool {
	select {
	case <-s.gathered:
		return false
	default:
	}
	timer := time.NewTimer(s.config.Gathering) // not for ever if nobody serves
	defer timer.Stop()
	select {
	case <-s.gathered:
	case <-timer.C:
	case <-ctx.Done():
	case <-s.ctx.Done():
	}
	return true
}

// attempt asks one agent.
func (s *Server) attempt(ctx context.Context, a *session, network, address string) (*conn, error) {
	d := &dial{session: a, network: network, target: address, answer: make(chan answer, 1)}
	n, err := s.await(d)
	if err != nil {
		return nil, err
	}
	a.control.put(wire.DialRequest(n, network, address), nil)
	timer := time.NewTimer(s.config.DialTimeout)
	defer timer.Stop()
	select {
	case got := <-d.answer:
		return got.conn, s.through(a, got.err)
	case <-ctx.Done():
		err = ctx.Err()
	case <-a.done:
		err = fmt.Errorf("it is gone: %w", a.endCause())
	case <-timer.C:
		a.silent.Store(true)
		err = fmt.Errorf("no answer within %v: %w", s.config.DialTimeout, os.ErrDeadlineExceeded)
	}
	if s.claim(n, a) == nil {
		// The answer came at the last moment.
		got := <-d.answer
		if got.conn != nil && ctx.Err() == nil {
			return got.conn, nil
		}
		if got.conn != nil {
			s.used.Add(1) // Close gives back what dial does as well
			_ = got.conn.Close()
		}
		return nil, s.through(a, err)
	}
	a.control.put(wire.CloseDial(n), nil)
	return nil, s.through(a, err)
}

// through says which agent an error is about.
func (s *Server) through(a *session, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("through tunnel agent %q: %w", a.id.name, err)
}

// await registers a dial under a number.
func (s *Server) await(d *dial) (int64, error) {
	n := number()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, errClosed
	}
	s.dials[n] = d
	return n, nil
}

// claim returns the dial of that number, if it waits for this session, and makes
// it the caller's to answer.
func (s *Server) claim(n int64, a *session) *dial {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.dials[n]; d != nil && d.session == a {
		delete(s.dials, n)
		return d
	}
	return nil
}

// claimBy is claim for a stream of which only the agent is known. Only a
// certificate makes two streams one agent's for sure.
func (s *Server) claimBy(n int64, id identity) *dial {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.dials[n]; d != nil && id.proven && d.session.id == id {
		delete(s.dials, n)
		return d
	}
	return nil
}

// choose returns the session that a dial to host goes to, other than the excluded
// one, and whether host is bound to it: a certified agent's own address, which no
// other agent is asked for. Nil means that there is none.
func (s *Server) choose(host string, except *session) (best *session, bound bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	bestRank, seen := 0, 0
	for _, of := range s.sessions {
		a := newest(of, except)
		if a == nil {
			continue
		}
		r := rank(a, host)
		if best == nil || r < bestRank {
			best, bestRank, seen = a, r, 0
		}
		if r == bestRank {
			// Each of n equals stays with probability 1/n.
			if seen++; rand.IntN(seen) == 0 {
				best = a
			}
		}
	}
	return best, best != nil && bestRank < rankClaimed
}

// newest returns the newest session of one agent's that is well, or else the
// newest.
func newest(of []*session, except *session) (a *session) {
	for i := len(of) - 1; i >= 0; i-- {
		switch {
		case of[i] == except:
		case !of[i].draining.Load() && !of[i].silent.Load():
			return of[i]
		case a == nil:
			a = of[i]
		}
	}
	return a
}

// The order in which agents are preferred for a host.
const (
	rankOwn       = iota // certified to be that node's
	rankOwnUnwell        // the same, draining or silent
	rankClaimed          // a token's bearer that says it is that node's
	rankAny
	rankUnwell
)

func rank(a *session, host string) int {
	unwell := a.draining.Load() || a.silent.Load()
	honours := a.honours(host)
	switch {
	case honours && a.id.proven && !unwell:
		return rankOwn
	case honours && a.id.proven:
		return rankOwnUnwell
	case unwell:
		return rankUnwell
	case honours:
		return rankClaimed
	}
	return rankAny
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"sync"
	"time"

	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"
	"sigs.k8s.io/apiserver-network-proxy/proto/agent"
)

// lingerTime is what a closed connection has for its last bytes to be taken by an
// agent that reads slowly.
const lingerTime = 30 * time.Second

// link is one gRPC stream from an agent and what waits to be sent on it. What
// waits is bounded by those who put it there: a connection by its write buffer,
// everything else by the number of connections and dials.
type link struct {
	stream agent.AgentService_ConnectServer // constant

	mu     sync.Mutex // guards what follows
	work   sync.Cond
	queue  []outgoing
	ended  bool
	linger *time.Timer // not nil: ends when queue is empty, or then

	done chan struct{} // closed when ended
}

// outgoing is a packet, and what to do when gRPC has taken it over.
type outgoing struct {
	packet *client.Packet
	sent   func()
}

func newLink(stream agent.AgentService_ConnectServer) *link {
	l := &link{stream: stream, done: make(chan struct{})}
	l.work.L = &l.mu
	return l
}

// put queues a packet. It never blocks; after end it does nothing.
func (l *link) put(p *client.Packet, sent func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || l.linger != nil {
		return
	}
	l.queue = append(l.queue, outgoing{p, sent})
	l.work.Signal()
}

// waiting returns how many packets are queued.
func (l *link) waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue)
}

// end ends the link at once. Repeating it does nothing.
func (l *link) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endLocked()
}

func (l *link) endLocked() {
	if !l.ended {
		l.ended = true
		l.queue = nil
		if l.linger != nil {
			l.linger.Stop()
		}
		close(l.done)
		l.work.Signal()
	}
}

// finish ends the link when everything queued is sent, or after lingerTime.
func (l *link) finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended && l.linger == nil {
		l.linger = time.AfterFunc(lingerTime, l.end)
		l.work.Signal()
	}
}

// write sends what is queued until the link ends, and ends it when the stream
// fails. It may block in gRPC until the stream's handler returns.
func (l *link) write() {
	defer l.end()
	for {
		next, ok := l.next()
		if !ok {
			return
		}
		if err := l.stream.Send(next.packet); err != nil {
			return // what reads the stream learns why
		}
		if next.sent != nil {
			next.sent()
		}
	}
}

func (l *link) next() (outgoing, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) == 0 && !l.ended && l.linger == nil {
		l.work.Wait()
	}
	if l.ended || len(l.queue) == 0 {
		return outgoing{}, false
	}
	next := l.queue[0]
	l.queue[0] = outgoing{}
	if l.queue = l.queue[1:]; len(l.queue) == 0 {
		l.queue = nil // let go of the array
	}
	return next, true
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

const (
	maxStreams          = 128
	maxStreamsPerSource = 32

	// maxStreamBytes is what one connection may send: a record, or the digests and
	// memberlist's states of MaxHosts hosts, sealed.
	maxStreamBytes = 2 << 20
)

// transport is memberlist's own with bounds on what strangers can hold, and an end
// to all its connections when it is closed.
type transport struct {
	*memberlist.NetTransport
	report  *report
	ctx     context.Context
	stop    context.CancelFunc
	streams chan net.Conn
	done    sync.WaitGroup
	cut     func(to string) bool // tests lose what is sent there; may be nil

	mu      sync.Mutex // guards what follows
	open    map[*stream]struct{}
	inbound int
	sources map[netip.Addr]int // inbound ones
}

// listen opens the address, whose port 0 means a free one.
func listen(address netip.AddrPort, r *report) (*transport, error) {
	nt, err := memberlist.NewNetTransport(&memberlist.NetTransportConfig{
		BindAddrs: []string{address.Addr().String()},
		BindPort:  int(address.Port()),
		Logger:    r.memberlistLogger(),
	})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	t := &transport{
		NetTransport: nt,
		report:       r,
		ctx:          ctx,
		stop:         stop,
		streams:      make(chan net.Conn),
		open:         map[*stream]struct{}{},
		sources:      map[netip.Addr]int{},
	}
	t.done.Go(t.admit)
	return t, nil
}

// admit passes on the connections that there is room for.
func (t *transport) admit() {
	for {
		select {
		case <-t.ctx.Done():
			return
		case conn := <-t.NetTransport.StreamCh():
			s, err := t.track(conn, true)
			if err != nil {
				conn.Close()
				t.report.drop(tooMany, "dropped a connection", "from", conn.RemoteAddr().String(), "error", err)
				continue
			}
			select {
			case t.streams <- s:
			case <-t.ctx.Done():
				s.Close()
			}
		}
	}
}

var errClosed = errors.New("gossip is closed")

// track counts a connection until it is closed.
func (t *transport) track(conn net.Conn, inbound bool) (*stream, error) {
	s := &stream{Conn: conn, transport: t, left: maxStreamBytes, inbound: inbound}
	if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		s.source = a.AddrPort().Addr().Unmap()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.ctx.Err() != nil:
		return nil, errClosed
	case inbound && t.inbound >= maxStreams:
		return nil, fmt.Errorf("%d connections are open", t.inbound)
	case inbound && t.sources[s.source] >= maxStreamsPerSource:
		return nil, fmt.Errorf("%d connections from there are open", t.sources[s.source])
	}
	t.open[s] = struct{}{}
	if inbound {
		t.inbound++
		t.sources[s.source]++
	}
	return s, nil
}

// StreamCh implements memberlist.Transport.
func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// DialTimeout implements memberlist.Transport.
func (t *transport) DialTimeout(address string, timeout time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: address}, timeout)
}

// DialAddressTimeout implements memberlist.NodeAwareTransport.
func (t *transport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if t.cut != nil && t.cut(a.Addr) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("cut off")}
	}
	dialer := net.Dialer{Timeout: timeout}
	conn, err := dialer.DialContext(t.ctx, "tcp", a.Addr)
	if err != nil {
		return nil, err
	}
	s, err := t.track(conn, false)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return s, nil
}

// WriteTo implements memberlist.Transport.
func (t *transport) WriteTo(b []byte, address string) (time.Time, error) {
	return t.WriteToAddress(b, memberlist.Address{Addr: address})
}

// WriteToAddress implements memberlist.NodeAwareTransport.
func (t *transport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	if t.cut != nil && t.cut(a.Addr) {
		return time.Now(), nil
	}
	return t.NetTransport.WriteToAddress(b, a)
}

// Shutdown implements memberlist.Transport. Listeners first: memberlist reads from
// them until this returns.
func (t *transport) Shutdown() error {
	err := t.NetTransport.Shutdown()
	t.stop()
	t.done.Wait()
	t.mu.Lock()
	open := make([]*stream, 0, len(t.open))
	for s := range t.open {
		open = append(open, s)
	}
	t.mu.Unlock()
	for _, s := range open {
		s.Close()
	}
	return err
}

// stream is a connection that counts.
type stream struct {
	net.Conn
	transport *transport
	source    netip.Addr
	inbound   bool
	left      int64 // bytes that may still come; the reader's
	close     sync.Once
}

// Read ends with an error when the other side sends more than any message has.
func (s *stream) Read(p []byte) (int, error) {
	if s.left <= 0 {
		s.transport.report.drop(tooLarge, "dropped a connection", "from", s.RemoteAddr().String())
		return 0, fmt.Errorf("over %d bytes on one connection", maxStreamBytes)
	}
	n, err := s.Conn.Read(p[:min(int64(len(p)), s.left)])
	s.left -= int64(n)
	return n, err
}

// Close may be called more than once.
func (s *stream) Close() (err error) {
	s.close.Do(func() {
		err = s.Conn.Close()
		t := s.transport
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.open, s)
		if s.inbound {
			t.inbound--
			if t.sources[s.source]--; t.sources[s.source] == 0 {
				delete(t.sources, s.source)
			}
		}
	})
	return err
}

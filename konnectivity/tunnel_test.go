// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"
)

type packet = client.Packet

// forEachKind runs a test with each kind of agent, on node-a.
func forEachKind(t *testing.T, f func(t *testing.T, c *cluster, own bool, a running)) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			c := newCluster(t)
			f(t, c, kind.own, kind.start(c, t, "node-a"))
		})
	}
}

func TestEcho(t *testing.T) {
	forEachKind(t, func(t *testing.T, c *cluster, _ bool, _ running) {
		address := echo(t)
		conn := c.dialed(t, address)
		for _, message := range []string{"a", "two words", strings.Repeat("long", 100_000)} {
			go io.WriteString(conn, message)
			back := make([]byte, len(message))
			if _, err := io.ReadFull(conn, back); err != nil || string(back) != message {
				t.Fatalf("%d bytes came back wrong: %v", len(message), err)
			}
		}
		if got := conn.RemoteAddr().String(); got != address {
			t.Errorf("remote address %s, want %s", got, address)
		}
		if _, ok := conn.RemoteAddr().(*net.TCPAddr); !ok || conn.LocalAddr() == nil {
			t.Errorf("addresses %T and %v are not usable", conn.RemoteAddr(), conn.LocalAddr())
		}
	})
}

func TestNoAgent(t *testing.T) {
	c := newCluster(t)
	_, err := c.Dial(t.Context(), "tcp", "10.0.0.1:10250")
	var op *net.OpError
	if !errors.Is(err, ErrNoAgent) || !errors.As(err, &op) || !strings.Contains(err.Error(), "10.0.0.1:10250") {
		t.Errorf("error is %v", err)
	}
}

// Upstream's agent dials one address until it has found all replicas behind it.
func TestUpstreamsAgentFindsReplicas(t *testing.T) {
	replicas := func(c *Config) { c.Replicas = func() int { return 2 } }
	one := newCluster(t, replicas)
	other := newCluster(t, replicas, func(c *Config) {
		c.TLS = &tls.Config{Certificates: []tls.Certificate{*one.ca.serving(t)}, ClientCAs: one.ca.pool}
	})
	addresses := []string{one.address, other.address}
	var turn atomic.Int64
	one.address = target(t, func(agent *net.TCPConn) {
		replica, err := net.Dial("tcp", addresses[turn.Add(1)%2])
		if err != nil {
			t.Error(err)
			return
		}
		defer replica.Close()
		var back sync.WaitGroup
		back.Go(func() {
			io.Copy(agent, replica)
			agent.Close()
		})
		io.Copy(replica, agent)
		replica.Close()
		back.Wait()
	})
	one.upstreams(t, "node-a", "", one.ca.node(t, "node-a"))
	other.waitFor(t, "node-a")
}

// A server that has just started waits for agents, which need a moment to come.
func TestDialWaitsForTheFirstAgent(t *testing.T) {
	c := newCluster(t, func(cfg *Config) { cfg.Gathering = time.Hour })
	address := echo(t)
	dialled := make(chan error, 1)
	go func() {
		conn, err := c.Dial(t.Context(), "tcp", address)
		if err == nil {
			err = errors.Join(roundTrip(conn, "hello"), conn.Close())
		}
		dialled <- err
	}()
	eventually(t, "the dial waits", func() bool { return c.used.Load() == 1 })
	a := c.ours(t, "node-a")
	if err := <-dialled; err != nil {
		t.Errorf("dial: %v", err)
	}
	// Later than that, agents that are gone are not waited for.
	a.stop()
	eventually(t, "the agent is gone", func() bool { return len(c.Agents()) == 0 })
	if _, err := c.Dial(t.Context(), "tcp", address); !errors.Is(err, ErrNoAgent) {
		t.Errorf("dial without an agent: %v", err)
	}
}

// Neither is anybody waited for in vain.
func TestDialWaitsNoLonger(t *testing.T) {
	c := newCluster(t, func(cfg *Config) { cfg.Gathering = time.Millisecond })
	if _, err := c.Dial(t.Context(), "tcp", "10.0.0.1:1"); !errors.Is(err, ErrNoAgent) {
		t.Errorf("dial when the time is over: %v", err)
	}
	c = newCluster(t, func(cfg *Config) { cfg.Gathering = time.Hour })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { _, err := c.Dial(ctx, "tcp", "10.0.0.1:1"); ended <- err }()
	eventually(t, "the dial waits", func() bool { return c.used.Load() == 1 })
	cancel()
	if err := <-ended; err == nil {
		t.Error("a dial that was given up succeeded")
	}
	go func() { _, err := c.Dial(t.Context(), "tcp", "10.0.0.1:1"); ended <- err }()
	eventually(t, "the dial waits", func() bool { return c.used.Load() == 1 })
	c.Close()
	if err := <-ended; err == nil {
		t.Error("a dial of a closed server succeeded")
	}
}

func TestDialErrors(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := closed.Addr().String()
	closed.Close()
	forEachKind(t, func(t *testing.T, c *cluster, _ bool, _ running) {
		for _, test := range []struct{ network, address, want string }{
			{"tcp", nobody, `through tunnel agent "node-a": dial tcp ` + nobody + ": connect: connection refused"},
			{"udp", nobody, "unknown network udp"},
			{"tcp", "127.0.0.1", "missing port"},
		} {
			_, err := c.Dial(t.Context(), test.network, test.address)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("dial %s %s: error %v, want one with %q", test.network, test.address, err, test.want)
			}
		}
		if used := c.used.Load(); used != 0 {
			t.Errorf("%d places still taken", used)
		}
	})
}

func TestDialIsCanceled(t *testing.T) {
	c := newCluster(t)
	a := c.rawNode(t, "node-a")
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() {
		_, err := c.Dial(ctx, "tcp", "10.0.0.1:1")
		failed <- err
	}()
	request := a.recv(t).GetDialRequest()
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	if p := a.recv(t); p.GetCloseDial().GetRandom() != request.GetRandom() {
		t.Errorf("the agent hears %v, want the dial closed", p)
	}
	// It was too late for the agent: it must close what it opened.
	a.send(t, &packet{Type: client.PacketType_DIAL_RSP, Payload: &client.Packet_DialResponse{
		DialResponse: &client.DialResponse{Random: request.GetRandom(), ConnectID: 7}}})
	if p := a.recv(t); p.GetCloseRequest().GetConnectID() != 7 {
		t.Errorf("the agent hears %v, want connection 7 closed", p)
	}
	if used := c.used.Load(); used != 0 {
		t.Errorf("%d places still taken", used)
	}
}

// An agent that does not answer costs one timeout, then others come first.
func TestSilentAgentIsPassedOver(t *testing.T) {
	address := echo(t)
	c := newCluster(t, func(config *Config) { config.DialTimeout = time.Second })
	silent := c.rawNode(t, "silent")
	if _, err := c.Dial(t.Context(), "tcp", address); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("error is %v, want a deadline exceeded", err)
	}
	c.ours(t, "node-a")
	for range 20 {
		c.dialed(t, address).Close()
	}
	silent.recv(t) // the first request
	silent.recv(t) // given up
	silent.send(t, &packet{Type: client.PacketType_DRAIN})
	eventually(t, "the agent counts as draining", func() bool { return c.Agents()[1].Draining })
}

func TestDeadlines(t *testing.T) {
	forEachKind(t, func(t *testing.T, c *cluster, _ bool, _ running) {
		conn := c.dialed(t, target(t, func(peer *net.TCPConn) {
			var one [1]byte
			peer.Read(one[:]) // from then on, nothing is read
			peer.Write(one[:])
			<-t.Context().Done()
		}))
		conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		_, err := conn.Read(make([]byte, 1))
		var timeout net.Error
		if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("read: %v, want a timeout", err)
		}
		conn.SetReadDeadline(time.Time{})
		if err := roundTrip(conn, "x"); err != nil {
			t.Errorf("after a deadline: %v", err)
		}
		conn.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
		_, err = conn.Write(make([]byte, 64<<20))
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("write: %v, want a timeout", err)
		}
		// A deadline ends calls that wait already.
		failed := make(chan error)
		go func() {
			_, err := conn.Read(make([]byte, 1))
			failed <- err
		}()
		conn.SetDeadline(time.Unix(1, 0))
		if err := <-failed; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("waiting read: %v, want a timeout", err)
		}
		conn.Close()
		for what, err := range map[string]error{
			"set":   conn.SetDeadline(time.Time{}),
			"close": conn.Close(),
			"write": second(conn.Write([]byte("x"))),
			"read":  second(conn.Read(make([]byte, 1))),
		} {
			if !errors.Is(err, net.ErrClosed) {
				t.Errorf("%s after Close: %v", what, err)
			}
		}
	})
}

func second(_ int, err error) error { return err }

func TestHalfClose(t *testing.T) {
	// The target answers only once it has seen the end.
	answers := func(peer *net.TCPConn) {
		question, _ := io.ReadAll(peer)
		fmt.Fprintf(peer, "%d bytes", len(question))
	}
	forEachKind(t, func(t *testing.T, c *cluster, own bool, _ running) {
		conn := c.dialed(t, target(t, answers))
		if _, err := conn.Write(make([]byte, 300_000)); err != nil {
			t.Fatal(err)
		}
		err := conn.(interface{ CloseWrite() error }).CloseWrite()
		if !own {
			if !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("error is %v, want unsupported", err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(conn); err != nil || string(answer) != "300000 bytes" {
			t.Errorf("answer %q, %v", answer, err)
		}
		if _, err := conn.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("write after CloseWrite: %v", err)
		}
	})
}

// The target's end comes after everything it sent; sending to it goes on.
func TestTargetCloses(t *testing.T) {
	forEachKind(t, func(t *testing.T, c *cluster, own bool, _ running) {
		heard := make(chan string, 1)
		conn := c.dialed(t, target(t, func(peer *net.TCPConn) {
			peer.Write(make([]byte, 1<<20))
			peer.CloseWrite()
			question, _ := io.ReadAll(peer)
			heard <- string(question)
		}))
		got, err := io.ReadAll(conn)
		if err != nil || len(got) != 1<<20 {
			t.Fatalf("read %d bytes, %v", len(got), err)
		}
		if !own {
			return // upstream's agent closes both ways
		}
		io.WriteString(conn, "thanks")
		conn.Close()
		if got := <-heard; got != "thanks" {
			t.Errorf("the target heard %q", got)
		}
	})
}

func TestTargetResets(t *testing.T) {
	c := newCluster(t)
	c.ours(t, "node-a")
	conn := c.dialed(t, target(t, func(peer *net.TCPConn) {
		peer.Read(make([]byte, 1))
		peer.SetLinger(0)
	}))
	io.WriteString(conn, "x")
	if _, err := io.ReadAll(conn); err == nil || !strings.Contains(err.Error(), "connection reset by peer") {
		t.Errorf("error is %v, want a reset", err)
	}
	eventually(t, "writing fails too", func() bool { _, err := conn.Write([]byte("x")); return err != nil })
}

// What is written before Close arrives.
func TestCloseSendsTheRest(t *testing.T) {
	c := newCluster(t)
	c.ours(t, "node-a")
	heard := make(chan int64, 1)
	conn := c.dialed(t, target(t, func(peer *net.TCPConn) {
		n, _ := io.Copy(io.Discard, peer)
		heard <- n
	}))
	if _, err := conn.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if n := <-heard; n != 1<<20 {
		t.Errorf("the target got %d bytes", n)
	}
	eventually(t, "the stream is gone", func() bool { return c.Agents()[0].Streams == 0 })
}

// Big transfers both ways at once arrive whole.
func TestTransfer(t *testing.T) {
	const size = 32 << 20
	forEachKind(t, func(t *testing.T, c *cluster, _ bool, _ running) {
		sums := make(chan [32]byte, 1)
		conn := c.dialed(t, target(t, func(peer *net.TCPConn) {
			var sending sync.WaitGroup
			sending.Go(func() { noise(2, size).WriteTo(peer) })
			sums <- digest(io.LimitReader(peer, size))
			sending.Wait()
		}))
		go noise(1, size).WriteTo(conn)
		if digest(io.LimitReader(conn, size)) != digest(noise(2, size)) {
			t.Error("what came down is not what was sent")
		}
		if <-sums != digest(noise(1, size)) {
			t.Error("what went up is not what was sent")
		}
	})
}

type stream struct{ io.Reader }

// noise returns bytes that repeat for nobody.
func noise(seed byte, n int64) stream {
	return stream{io.LimitReader(rand.NewChaCha8([32]byte{seed}), n)}
}

func (s stream) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, s.Reader) }

func digest(r io.Reader) (sum [32]byte) {
	h := sha256.New()
	io.Copy(h, r)
	return [32]byte(h.Sum(nil))
}

// A thousand connections talk while one is not read at all. Then it is read, and
// nothing is missing, unless upstream's agent could not be told to wait.
func TestThousandStreamsAndASlowReader(t *testing.T) {
	const big = 8 << 20
	forEachKind(t, func(t *testing.T, c *cluster, own bool, _ running) {
		slow := c.dialed(t, target(t, func(peer *net.TCPConn) { noise(3, big).WriteTo(peer) }))
		address := echo(t)
		conns := make([]net.Conn, 1000)
		each(t, conns, func(i int, _ net.Conn) (err error) {
			conns[i], err = c.Dial(t.Context(), "tcp", address)
			return err
		})
		for round := range 3 {
			each(t, conns, func(i int, conn net.Conn) error {
				return roundTrip(conn, fmt.Sprintf("round %d of connection %d", round, i))
			})
		}
		if got := c.used.Load(); got != 1001 {
			t.Errorf("%d connections counted", got)
		}
		if own {
			if digest(slow) != digest(noise(3, big)) {
				t.Error("the slow reader did not get what was sent")
			}
		} else if n, err := io.Copy(io.Discard, slow); !errors.Is(err, ErrSlowReader) {
			t.Errorf("the slow reader got %d bytes and %v, want ErrSlowReader", n, err)
		}
		each(t, conns, func(_ int, conn net.Conn) error { return conn.Close() })
		slow.Close()
		if got := c.used.Load(); got != 0 {
			t.Errorf("%d connections left", got)
		}
	})
}

// A reader that is slow but reads gets everything from upstream's agent, too.
func TestSlowButReading(t *testing.T) {
	const size = 2 << 20
	forEachKind(t, func(t *testing.T, c *cluster, _ bool, _ running) {
		conn := c.dialed(t, target(t, func(peer *net.TCPConn) { noise(4, size).WriteTo(peer) }))
		h := sha256.New()
		for buffer := make([]byte, 32<<10); ; time.Sleep(5 * time.Millisecond) {
			n, err := conn.Read(buffer)
			h.Write(buffer[:n])
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if [32]byte(h.Sum(nil)) != digest(noise(4, size)) {
			t.Error("what came down is not what was sent")
		}
	})
}

// each calls f for all connections at once.
func each(t *testing.T, conns []net.Conn, f func(int, net.Conn) error) {
	t.Helper()
	var all sync.WaitGroup
	for i, conn := range conns {
		all.Go(func() {
			if err := f(i, conn); err != nil {
				t.Errorf("connection %d: %v", i, err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

func TestTooManyStreams(t *testing.T) {
	c := newCluster(t, func(config *Config) { config.MaxStreams = 2 })
	c.ours(t, "node-a")
	address := echo(t)
	first, _ := c.dialed(t, address), c.dialed(t, address)
	if _, err := c.Dial(t.Context(), "tcp", address); !errors.Is(err, ErrTooManyStreams) {
		t.Errorf("error is %v", err)
	}
	first.Close()
	c.dialed(t, address)
}

// An agent that dies takes its connections with it at once; dials that wait for
// it go to another.
func TestAgentDies(t *testing.T) {
	forEachKind(t, func(t *testing.T, c *cluster, _ bool, a running) {
		conn := c.dialed(t, echo(t))
		if err := roundTrip(conn, "before"); err != nil {
			t.Fatal(err)
		}
		a.stop()
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("read from a connection through a dead agent")
		}
		eventually(t, "writes fail", func() bool { _, err := conn.Write([]byte("x")); return err != nil })
		eventually(t, "the agent is gone", func() bool { return len(c.Agents()) == 0 })
		if _, err := c.Dial(t.Context(), "tcp", "10.0.0.1:1"); !errors.Is(err, ErrNoAgent) {
			t.Errorf("dial: %v", err)
		}
	})
}

func TestDialMovesToAnotherAgent(t *testing.T) {
	c := newCluster(t)
	dying := c.rawNode(t, "dying")
	address := echo(t)
	result := make(chan error)
	go func() {
		conn, err := c.Dial(t.Context(), "tcp", address)
		if err == nil {
			err = roundTrip(conn, "hello")
			conn.Close()
		}
		result <- err
	}()
	dying.recv(t)
	c.ours(t, "node-a")
	dying.conn.Close()
	if err := <-result; err != nil {
		t.Error(err)
	}
}

func TestCloseEndsEverything(t *testing.T) {
	forEachKind(t, func(t *testing.T, c *cluster, _ bool, a running) {
		conn := c.dialed(t, echo(t))
		waiting := make(chan error)
		go func() {
			_, err := conn.Read(make([]byte, 1))
			waiting <- err
		}()
		c.Close()
		if err := <-waiting; err == nil {
			t.Error("a read survived Close")
		}
		if _, err := c.Dial(t.Context(), "tcp", "10.0.0.1:1"); err == nil {
			t.Error("a dial survived Close")
		}
		a.stop()
	})
}

func TestTwoListeners(t *testing.T) {
	c := newCluster(t)
	c.ours(t, "node-a")
	c.address = c.listen(t)
	c.ours(t, "node-b")
	if got := len(c.Agents()); got != 2 {
		t.Errorf("%d agents", got)
	}
}

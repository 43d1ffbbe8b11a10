// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/tenantd/tenantd/worker/relay"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// halfCloser is what both ends of a relayed connection are in these tests.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// relayed is a client and a host with a relay between them.
type relayed struct {
	client, host halfCloser
	moved        relay.Moved
	err          error
	ended        chan struct{} // closed when Join is done
}

// kinds are the connections between relay and host.
var kinds = []string{"tcp", "tls"}

func join(t *testing.T, kind string) *relayed {
	t.Helper()
	client, accepted := pair(t)
	dialled, server := pair(t)
	var buffers relay.Buffers
	near, err := buffers.TCP(accepted)
	if err != nil {
		t.Fatal(err)
	}
	r := &relayed{client: client, ended: make(chan struct{})}
	var far relay.Conn
	switch kind {
	case "tcp":
		r.host = server
		far, err = buffers.TCP(dialled)
	case "tls":
		tenant := fakehost.NewTenant("acme.test")
		ended := tls.Server(server, &tls.Config{Certificates: []tls.Certificate{tenant.Serving}, DynamicRecordSizingDisabled: true})
		r.host = ended
		shaken := make(chan error, 1)
		go func() { shaken <- ended.HandshakeContext(t.Context()) }()
		far, err = buffers.TLS(t.Context(), dialled, tls.Client, &tls.Config{ServerName: "acme.test", RootCAs: tenant.Roots})
		if err := <-shaken; err != nil {
			t.Fatal(err)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	relay.Join(near, far, func(moved relay.Moved, err error) {
		r.moved, r.err = moved, err
		close(r.ended)
	})
	t.Cleanup(func() {
		client.Close()
		server.Close()
		<-r.ended
	})
	return r
}

func pair(t *testing.T) (dialled, accepted *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	d, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return d.(*net.TCPConn), a.(*net.TCPConn)
}

func random(seed byte, n int) []byte {
	data := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(data)
	return data
}

// TestBothWays moves much in both directions at once, in pieces of odd sizes, and
// ends each in order.
func TestBothWays(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			r := join(t, kind)
			up, down := random(1, 20<<20+7), random(2, 10<<20+3)
			send := func(to halfCloser, data []byte) error {
				pieces := rand.New(rand.NewPCG(3, 4))
				for len(data) > 0 {
					n := min(len(data), 1+pieces.IntN(200<<10))
					if _, err := to.Write(data[:n]); err != nil {
						return err
					}
					data = data[n:]
				}
				return to.CloseWrite()
			}
			var sending sync.WaitGroup
			sending.Go(func() {
				if err := send(r.client, up); err != nil {
					t.Errorf("send up: %v", err)
				}
			})
			sending.Go(func() {
				if err := send(r.host, down); err != nil {
					t.Errorf("send down: %v", err)
				}
			})
			sending.Go(func() { equal(t, "up", r.host, up) })
			sending.Go(func() { equal(t, "down", r.client, down) })
			sending.Wait()
			<-r.ended
			if r.err != nil {
				t.Errorf("an orderly end is no error: %v", r.err)
			}
			if want := (relay.Moved{Up: int64(len(up)), Down: int64(len(down))}); r.moved != want {
				t.Errorf("moved %+v, want %+v", r.moved, want)
			}
		})
	}
}

func equal(t *testing.T, way string, from io.Reader, want []byte) {
	sum := sha256.New()
	n, err := io.Copy(sum, from)
	if wanted := sha256.Sum256(want); err != nil || n != int64(len(want)) || !bytes.Equal(sum.Sum(nil), wanted[:]) {
		t.Errorf("%s: %d bytes, %v; want the %d that were sent", way, n, err, len(want))
	}
}

// TestHalfClose ends the client's way and expects an answer after that.
func TestHalfClose(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			r := join(t, kind)
			mustWrite(t, r.client, "question")
			if err := r.client.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			asked, err := io.ReadAll(r.host)
			if err != nil || string(asked) != "question" {
				t.Fatalf("the host got %q, %v", asked, err)
			}
			mustWrite(t, r.host, "answer")
			if err := r.host.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			answered, err := io.ReadAll(r.client)
			if err != nil || string(answered) != "answer" {
				t.Fatalf("the client got %q, %v", answered, err)
			}
		})
	}
}

// TestMessages exchanges small messages, which have to arrive without more behind
// them.
func TestMessages(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			r := join(t, kind)
			for i := range 1000 {
				message := random(byte(i), 1+i%700)
				exchange(t, r.client, r.host, message)
				exchange(t, r.host, r.client, message)
			}
		})
	}
}

func exchange(t *testing.T, from, to net.Conn, message []byte) {
	t.Helper()
	mustWrite(t, from, string(message))
	got := make([]byte, len(message))
	if _, err := io.ReadFull(to, got); err != nil || !bytes.Equal(got, message) {
		t.Fatalf("got %d bytes, %v; want the message", len(got), err)
	}
}

// TestCut expects that a connection which breaks at one end ends at the other.
func TestCut(t *testing.T) {
	for _, kind := range kinds {
		for _, end := range []string{"client", "host"} {
			t.Run(kind+" "+end, func(t *testing.T) {
				r := join(t, kind)
				exchange(t, r.client, r.host, []byte("hello"))
				broken, other := r.client, r.host
				if end == "host" {
					broken, other = other, broken
				}
				raw, ok := broken.(interface{ SetLinger(int) error })
				if !ok {
					raw = broken.(*tls.Conn).NetConn().(*net.TCPConn)
				}
				if err := raw.SetLinger(0); err != nil {
					t.Fatal(err)
				}
				raw.(io.Closer).Close()
				if n, err := io.Copy(io.Discard, other); n != 0 {
					t.Errorf("the other end got %d bytes, %v", n, err)
				}
				<-r.ended
				if r.err == nil {
					t.Error("a cut is no orderly end")
				}
			})
		}
	}
}

// TestTruncated ends the outer connection without the alert that TLS demands: what
// is inside must not take that for an orderly end.
func TestTruncated(t *testing.T) {
	r := join(t, "tls")
	exchange(t, r.client, r.host, []byte("hello"))
	if _, err := r.host.(*tls.Conn).NetConn().Write([]byte{23, 3, 3, 0, 99, 1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	if err := r.host.(*tls.Conn).NetConn().(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	<-r.ended
	if !errors.Is(r.err, io.ErrUnexpectedEOF) {
		t.Errorf("a truncated stream ended with %v, want %v", r.err, io.ErrUnexpectedEOF)
	}
}

// TestSlowReader lets one connection stand still and expects another to go on.
func TestSlowReader(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			slow, quick := join(t, kind), join(t, kind)
			data := random(5, 32<<20)
			var sending sync.WaitGroup
			sending.Go(func() {
				slow.host.Write(data)
				slow.host.CloseWrite()
			})
			for range 100 {
				exchange(t, quick.client, quick.host, data[:1000])
			}
			equal(t, "slow", slow.client, data)
			sending.Wait()
		})
	}
}

// TestCloseWhileIdle expects Join to be done when its connection is closed, as that of
// a host that has failed.
func TestCloseWhileIdle(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			r := join(t, kind)
			exchange(t, r.client, r.host, []byte("hello"))
			r.client.SetReadDeadline(time.Now().Add(time.Minute))
			r.host.Close()
			if _, err := r.client.Read(make([]byte, 1)); errors.Is(err, nil) {
				t.Error("the client got data")
			}
		})
	}
}

func mustWrite(t *testing.T, to io.Writer, text string) {
	t.Helper()
	if _, err := io.WriteString(to, text); err != nil {
		t.Fatal(err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

// accepted is the answer to a dial that succeeded.
func accepted(number, id int64) *packet {
	return &packet{Type: client.PacketType_DIAL_RSP, Payload: &client.Packet_DialResponse{
		DialResponse: &client.DialResponse{Random: number, ConnectID: id}}}
}

// Packets that no agent sends cost the one that does its connection, and nobody
// else anything. #994, #1045, #1066 and #1086 are the lines of upstream's
// server.go (v0.36.0) that the packets without payload end the process at.
func TestFaultyPackets(t *testing.T) {
	c := newCluster(t)
	c.ours(t, "node-a")
	conn := c.dialed(t, echo(t))
	for _, test := range []struct {
		name   string
		packet *packet
		ends   bool
	}{
		{"DIAL_RSP without payload (#994)", &packet{Type: client.PacketType_DIAL_RSP}, true},
		{"DIAL_CLS without payload (#1045)", &packet{Type: client.PacketType_DIAL_CLS}, true},
		{"DATA without payload (#1066)", &packet{Type: client.PacketType_DATA}, true},
		{"CLOSE_RSP without payload (#1086)", &packet{Type: client.PacketType_CLOSE_RSP}, true},
		{"CLOSE_REQ without payload", &packet{Type: client.PacketType_CLOSE_REQ}, true},
		{"DIAL_REQ by default", &packet{}, true},
		{"DIAL_RSP with a DATA's payload", &packet{Type: client.PacketType_DIAL_RSP, Payload: wire.Data(1, nil).Payload}, true},
		{"DATA with a DIAL_RSP's payload", &packet{Type: client.PacketType_DATA, Payload: accepted(1, 1).Payload}, true},
		{"DIAL_RSP without id or error", accepted(1, 0), true},
		{"DIAL_RSP with a negative id", accepted(1, -1), true},
		{"DATA without id", wire.Data(0, []byte("x")), true},
		{"DATA beyond the limit", wire.Data(1, make([]byte, wire.MaxMessage)), true},

		{"DATA of nobody's", wire.Data(1, []byte("x")), false},
		{"DIAL_RSP to nobody", accepted(1, 1), false},
		{"failed DIAL_RSP to nobody", wire.DialFailed(1, "x"), false},
		{"DIAL_CLS to nobody", wire.CloseDial(1), false},
		{"CLOSE_RSP of nobody's", wire.Closed(1, "x"), false},
		{"a server's CLOSE_REQ", wire.CloseRequest(1), false},
		{"a server's DIAL_REQ", wire.DialRequest(1, "tcp", "127.0.0.1:1"), false},
		{"DRAIN without payload", &packet{Type: client.PacketType_DRAIN}, false},
		{"a type of later times", &packet{Type: 77}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := c.rawNode(t, "node-b")
			a.send(t, test.packet)
			if test.ends {
				_, err := a.Recv()
				if code := status.Code(err); code != codes.Aborted && code != codes.ResourceExhausted {
					t.Errorf("the agent hears %v", err)
				}
			} else {
				// It is still listened to: this has an answer.
				a.send(t, accepted(9, 9))
				for a.recv(t).GetCloseRequest().GetConnectID() != 9 {
				}
			}
			a.conn.Close()
			eventually(t, "it is gone", func() bool { return c.connections("node-b") == 0 })
			if err := roundTrip(conn, "still here"); err != nil {
				t.Errorf("through another agent: %v", err)
			}
		})
	}
}

// An id that is given twice would let one connection's bytes reach another.
func TestConnectionIDGivenTwice(t *testing.T) {
	c := newCluster(t)
	a := c.rawNode(t, "node-a")
	go func() {
		for range 2 {
			if p, err := a.Recv(); err == nil {
				a.Send(accepted(p.GetDialRequest().GetRandom(), 1))
			}
		}
	}()
	first := c.dialed(t, "10.0.0.1:1")
	if _, err := c.Dial(t.Context(), "tcp", "10.0.0.1:2"); err == nil {
		t.Error("the second was opened")
	}
	if _, err := first.Read(make([]byte, 1)); err == nil {
		t.Error("the first goes on")
	}
}

// An agent that opens connections which nobody asked for, and takes no answer,
// does not fill the memory.
func TestAnswersAreBounded(t *testing.T) {
	c := newCluster(t, func(config *Config) { config.MaxStreams = 16 })
	a := c.rawNode(t, "node-a")
	for id := int64(1); ; id++ {
		if err := a.Send(accepted(id, id)); err != nil {
			break
		}
	}
	eventually(t, "it is gone", func() bool { return c.connections("node-a") == 0 })
}

// fuzzed is a stream from an agent that says what a fuzzer makes up and answers
// the dials that it can.
type fuzzed struct {
	grpc.ServerStream
	mu      sync.Mutex
	packets []*packet
	numbers []int64
	dialed  chan struct{} // one for each dial that arrived
	ready   chan struct{} // closed when the agent may speak
	ctx     context.Context
}

func (p *fuzzed) Context() context.Context     { return p.ctx }
func (p *fuzzed) SendHeader(metadata.MD) error { return nil }

func (p *fuzzed) Send(sent *packet) error {
	if n := sent.GetDialRequest().GetRandom(); n != 0 {
		p.mu.Lock()
		p.numbers = append(p.numbers, n)
		p.mu.Unlock()
		p.dialed <- struct{}{}
	}
	return nil
}

func (p *fuzzed) Recv() (*packet, error) {
	<-p.ready
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.packets) == 0 {
		return nil, io.EOF
	}
	next := p.packets[0]
	p.packets = p.packets[1:]
	// A number is nothing that a fuzzer guesses: small ones stand for real ones.
	if rsp := next.GetDialResponse(); rsp != nil && rsp.Random >= 0 && rsp.Random < int64(len(p.numbers)) {
		rsp.Random = p.numbers[rsp.Random]
	}
	if cls := next.GetCloseDial(); cls != nil && cls.Random >= 0 && cls.Random < int64(len(p.numbers)) {
		cls.Random = p.numbers[cls.Random]
	}
	return next, nil
}

// FuzzPackets lets an agent say anything, while two dials wait for it: nothing
// panics, everything ends, and no place is lost.
func FuzzPackets(f *testing.F) {
	seed := func(packets ...*packet) {
		var all []byte
		for _, p := range packets {
			one, err := proto.Marshal(p)
			if err != nil {
				f.Fatal(err)
			}
			all = protowire.AppendBytes(all, one)
		}
		f.Add(all)
	}
	seed()
	seed(accepted(0, 1), wire.Data(1, []byte("x")), wire.Closed(1, ""))
	seed(accepted(0, 1), accepted(1, 1))
	seed(accepted(0, 1), accepted(0, 2), wire.Closed(2, "why"))
	seed(wire.DialFailed(1, "x"), wire.CloseDial(0))
	for kind := range client.PacketType_name {
		seed(accepted(0, 1), &packet{Type: client.PacketType(kind)})
	}
	server, err := New(Config{Tenant: "acme", TLS: newCluster(f).config.TLS, MaxStreams: 2, DialTimeout: time.Minute})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { server.Close() })
	f.Fuzz(func(t *testing.T, all []byte) {
		p := &fuzzed{ctx: t.Context(), dialed: make(chan struct{}, 2), ready: make(chan struct{})}
		for len(all) > 0 {
			one, n := protowire.ConsumeBytes(all)
			if n < 0 {
				break
			}
			all = all[n:]
			next := new(packet)
			if proto.Unmarshal(one, next) != nil {
				break
			}
			p.packets = append(p.packets, next)
		}
		ended := make(chan error)
		id := identity{"node-a", true}
		go func() { ended <- server.attend(p, id, credential{expires: time.Now().Add(time.Hour)}) }()
		for len(server.Agents()) == 0 {
			runtime.Gosched() // thousands of times a second, so no pause
		}
		conns := make(chan net.Conn, 2)
		for range 2 {
			go func() {
				conn, _ := server.Dial(t.Context(), "tcp", "10.0.0.1:1")
				conns <- conn
			}()
		}
		<-p.dialed
		<-p.dialed
		close(p.ready)
		if err := <-ended; status.Code(err) != codes.Aborted {
			t.Errorf("ended with %v", err)
		}
		for range 2 {
			if conn := <-conns; conn != nil {
				if _, err := io.Copy(io.Discard, conn); errors.Is(err, net.ErrClosed) {
					t.Errorf("reading: %v", err)
				}
				conn.Close()
			}
		}
		if n := server.used.Load(); n != 0 {
			t.Errorf("%d places lost", n)
		}
		server.mu.Lock()
		defer server.mu.Unlock()
		if len(server.dials) != 0 || len(server.sessions) != 0 || server.count != 0 {
			t.Errorf("left: %d dials, %d sessions, count %d", len(server.dials), len(server.sessions), server.count)
		}
	})
}

func TestTextIsOneShortLine(t *testing.T) {
	for in, want := range map[string]string{
		"plain":        "plain",
		"two\nlines\t": "two lines ",
		"\x1b[31mred":  " [31mred",
		"a\xffb":       "a?b",
	} {
		if got := wire.Text(in); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
	if got := wire.Text(string(slices.Repeat([]byte("x"), 5000))); len(got) > 600 {
		t.Errorf("%d bytes", len(got))
	}
}

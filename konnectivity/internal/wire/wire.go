// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package wire is what the tunnel's server and its agent must agree on beyond
// upstream's protocol buffers: metadata keys, sizes and which packets are whole.
// Only konnectivity and konnectivity/agent import it.
//
//	if err := wire.Check(packet); err != nil {
//		return err // the agent that sent it is faulty: end its connection
//	}
//	if packet.GetType() == client.PacketType_DATA {
//		use(packet.GetData().GetData())
//	}
package wire

import (
	"fmt"
	"strings"
	"time"
	"unicode"

	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"
)

// Metadata keys of upstream's protocol, in the case in which gRPC delivers them.
const (
	AgentID          = "agentid"
	AgentIdentifiers = "agentidentifiers"
	Authorization    = "authorization"
	ServerID         = "serverid"
	ServerCount      = "servercount"
)

// Dial is the one addition to upstream's protocol. An agent that answers a
// DIAL_REQ by opening a further Connect stream with the request's number under
// this key carries the connection on that stream, where HTTP/2 can hold up one
// connection without the others. The server announces that it understands
// under the same key in its response headers.
const Dial = "tenantd-dial"

const (
	// ChunkSize is how many bytes of a connection one DATA packet carries. With
	// what is around them they fit into the 32 KiB buffers of gRPC's pool; its
	// next larger ones are of 1 MiB, and cleared for each message.
	ChunkSize = 32<<10 - 128

	// Window is how many bytes of one connection may be under way and unread.
	// It allows 100 Mbit/s to a worker 20 ms away, and it is most of what a
	// connection can occupy, which konnectivity.DefaultMaxStreams is chosen by. It
	// is fixed: gRPC's own estimate grows to 16 MiB.
	Window = 256 << 10

	// ConnWindow is the window of a whole agent connection. gRPC opens it again
	// as bytes arrive, not as they are read, so it bounds speed and not memory.
	ConnWindow = 4 << 20

	// BufferSize is what a connection between server and agent buffers each way:
	// two chunks, so that a system call moves more than one TLS record.
	BufferSize = 2 * ChunkSize

	// MaxMessage bounds a message either way. Upstream's agent sends 4 KiB.
	MaxMessage = 256 << 10

	// DialTimeout is what an agent gives a target to answer: upstream's value.
	DialTimeout = 5 * time.Second
)

// Data returns a DATA packet.
func Data(id int64, data []byte) *client.Packet {
	return &client.Packet{
		Type:    client.PacketType_DATA,
		Payload: &client.Packet_Data{Data: &client.Data{ConnectID: id, Data: data}},
	}
}

// DialRequest returns a DIAL_REQ packet.
func DialRequest(number int64, network, address string) *client.Packet {
	return &client.Packet{
		Type: client.PacketType_DIAL_REQ,
		Payload: &client.Packet_DialRequest{
			DialRequest: &client.DialRequest{Random: number, Protocol: network, Address: address},
		},
	}
}

// DialFailed returns the DIAL_RSP packet that says why a dial failed.
func DialFailed(number int64, reason string) *client.Packet {
	return &client.Packet{
		Type:    client.PacketType_DIAL_RSP,
		Payload: &client.Packet_DialResponse{DialResponse: &client.DialResponse{Random: number, Error: reason}},
	}
}

// CloseDial returns the DIAL_CLS packet that gives a dial up.
func CloseDial(number int64) *client.Packet {
	return &client.Packet{
		Type:    client.PacketType_DIAL_CLS,
		Payload: &client.Packet_CloseDial{CloseDial: &client.CloseDial{Random: number}},
	}
}

// CloseRequest returns a CLOSE_REQ packet.
func CloseRequest(id int64) *client.Packet {
	return &client.Packet{
		Type:    client.PacketType_CLOSE_REQ,
		Payload: &client.Packet_CloseRequest{CloseRequest: &client.CloseRequest{ConnectID: id}},
	}
}

// Closed returns the CLOSE_RSP packet that ends a connection, with the reason
// when it did not end in order.
func Closed(id int64, reason string) *client.Packet {
	return &client.Packet{
		Type:    client.PacketType_CLOSE_RSP,
		Payload: &client.Packet_CloseResponse{CloseResponse: &client.CloseResponse{ConnectID: id, Error: reason}},
	}
}

// Drain returns the packet by which an agent asks for no further dials.
func Drain() *client.Packet {
	return &client.Packet{Type: client.PacketType_DRAIN, Payload: &client.Packet_Drain{Drain: &client.Drain{}}}
}

// Check says whether p carries the payload that its type promises. Types from
// after this version of the protocol pass: who reads p does not know them
// either and ignores them.
func Check(p *client.Packet) error {
	whole := true
	switch p.GetType() {
	case client.PacketType_DIAL_REQ:
		whole = p.GetDialRequest() != nil
	case client.PacketType_DIAL_RSP:
		// A success names its connection, a failure does not.
		rsp := p.GetDialResponse()
		whole = rsp != nil && (rsp.GetError() != "" || rsp.GetConnectID() > 0)
	case client.PacketType_CLOSE_REQ:
		whole = p.GetCloseRequest() != nil
	case client.PacketType_CLOSE_RSP:
		whole = p.GetCloseResponse() != nil
	case client.PacketType_DATA:
		whole = p.GetData().GetConnectID() > 0
	case client.PacketType_DIAL_CLS:
		whole = p.GetCloseDial() != nil
	}
	if !whole {
		return fmt.Errorf("packet of type %v without what belongs in it", p.GetType())
	}
	return nil
}

// Text makes what the other side wrote fit for a log line or an error: one
// line, printable, no longer than 512 bytes or so.
func Text(s string) string {
	const limit = 512
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(s, "?"))
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/proto/client"
	agentpb "sigs.k8s.io/apiserver-network-proxy/proto/agent"
)

// worker is an agent of the attacker's own making and the network behind it, of
// which nothing is real: what arrives in it has not been dialled by the daemon.
type worker struct {
	t        testing.TB
	identity tls.Certificate // what it serves with
	// caBundle is what verifies that, as objects have it.
	caBundle string

	mu     sync.Mutex // guards what follows
	places map[string]func(net.Conn)
	asked  []string
	conns  map[int64]chan []byte
	next   int64
}

// worker connects an agent with the rights of a node.
func (a *attacker) worker(t testing.TB) *worker {
	t.Helper()
	w := &worker{t: t, places: map[string]func(net.Conn){}, conns: map[int64]chan []byte{}}
	w.identity, w.caBundle = selfSigned(t)
	const node = "worker-1"
	tlsConfig, err := rest.TLSConfigFor(a.as("system:node:"+node, "system:nodes"))
	if err != nil {
		t.Fatal(err)
	}
	tlsConfig.ServerName, tlsConfig.NextProtos = a.host(), []string{"konnectivity"}
	ctx, cancel := context.WithCancel(context.Background())
	conn, err := grpc.NewClient("passthrough:///"+a.daemon.listen, grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig)), grpc.WithAuthority(a.host()))
	if err != nil {
		t.Fatal(err)
	}
	stream, err := agentpb.NewAgentServiceClient(conn).Connect(metadata.AppendToOutgoingContext(ctx, "agentid", node))
	if err != nil {
		t.Fatalf("connect the agent: %v", err)
	}
	if header, err := stream.Header(); err != nil || len(header.Get("serverid")) == 0 {
		t.Fatalf("connect the agent: %v, %v", header, err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		cancel()
		<-ended
		conn.Close()
	})
	out := make(chan *client.Packet)
	go func() { // one sender, as gRPC wants it
		for {
			select {
			case p := <-out:
				if stream.Send(p) != nil {
					cancel() // the tenant is gone
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	go func() {
		defer close(ended)
		defer cancel()
		for {
			p, err := stream.Recv()
			if err != nil {
				return
			}
			w.handle(ctx, p, func(p *client.Packet) {
				select {
				case out <- p:
				case <-ctx.Done():
				}
			})
		}
	}()
	return w
}

// handle does what a packet asks for.
func (w *worker) handle(ctx context.Context, p *client.Packet, send func(*client.Packet)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch p.Type {
	case client.PacketType_DIAL_REQ:
		request := p.GetDialRequest()
		w.asked = append(w.asked, request.Address)
		place := w.places[request.Address]
		if place == nil {
			go send(dialResponse(&client.DialResponse{Random: request.Random, Error: "nobody is at " + request.Address + " in this worker's network"}))
			return
		}
		w.next++
		id, in := w.next, make(chan []byte, 64)
		w.conns[id] = in
		here, there := net.Pipe()
		go place(there)
		go func() {
			send(dialResponse(&client.DialResponse{Random: request.Random, ConnectID: id}))
			for chunk := make([]byte, 16<<10); ; {
				n, err := here.Read(chunk)
				if n > 0 {
					send(&client.Packet{Type: client.PacketType_DATA, Payload: &client.Packet_Data{Data: &client.Data{ConnectID: id, Data: slices.Clone(chunk[:n])}}})
				}
				if err != nil || ctx.Err() != nil {
					send(&client.Packet{Type: client.PacketType_CLOSE_RSP, Payload: &client.Packet_CloseResponse{CloseResponse: &client.CloseResponse{ConnectID: id}}})
					return
				}
			}
		}()
		go func() {
			defer here.Close()
			for {
				select {
				case data, ok := <-in:
					if !ok {
						return
					}
					if _, err := here.Write(data); err != nil {
						return
					}
				case <-ctx.Done():
					return
				}
			}
		}()
	case client.PacketType_DATA:
		if in := w.conns[p.GetData().ConnectID]; in != nil {
			select {
			case in <- p.GetData().Data:
			default: // nobody reads: a connection that is lost
				close(in)
				delete(w.conns, p.GetData().ConnectID)
			}
		}
	case client.PacketType_CLOSE_REQ:
		if in := w.conns[p.GetCloseRequest().ConnectID]; in != nil {
			close(in)
			delete(w.conns, p.GetCloseRequest().ConnectID)
		}
	}
}

func dialResponse(r *client.DialResponse) *client.Packet {
	return &client.Packet{Type: client.PacketType_DIAL_RSP, Payload: &client.Packet_DialResponse{DialResponse: r}}
}

// at has f answer at an address of the worker's network.
func (w *worker) at(address string, f func(net.Conn)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.places[address] = f
}

// serve has a handler answer at an address, by HTTPS.
func (w *worker) serve(address string, handler http.Handler) {
	conns := &connections{incoming: make(chan net.Conn), closed: make(chan struct{})}
	server := &http.Server{Handler: handler, TLSConfig: &tls.Config{Certificates: []tls.Certificate{w.identity}}, ErrorLog: discardLog()}
	go server.ServeTLS(conns, "", "") // ends with Close
	w.t.Cleanup(func() { server.Close() })
	w.at(address, conns.take)
}

// dialled reports whether somebody asked for an address.
func (w *worker) dialled(address string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Contains(w.asked, address)
}

// all are the addresses that were asked for.
func (w *worker) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Compact(slices.Sorted(slices.Values(w.asked)))
}

// connections is a net.Listener of connections that are handed in.
type connections struct {
	incoming chan net.Conn
	closed   chan struct{}
	once     sync.Once
}

func (c *connections) take(conn net.Conn) {
	select {
	case c.incoming <- conn:
	case <-c.closed:
		conn.Close()
	}
}

func (c *connections) Accept() (net.Conn, error) {
	select {
	case conn := <-c.incoming:
		return conn, nil
	case <-c.closed:
		return nil, io.EOF
	}
}

func (c *connections) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

func (c *connections) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(10, 244, 0, 1), Port: 1} }

// selfSigned makes a certificate for all that attackers pretend to be, and its CA
// bundle in base64.
func selfSigned(t testing.TB) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "hostile"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost", "*.default.svc", "metadata.google.internal"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback, net.IPv4(169, 254, 169, 254), net.IPv4(10, 244, 0, 9)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	bundle := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, base64.StdEncoding.EncodeToString(bundle)
}

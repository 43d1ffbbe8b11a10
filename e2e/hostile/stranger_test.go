// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// strangers are attacks by those who have nothing but the daemon's address and the
// tenants' names. What single connections are told is tested in e2e (TestPort); here
// it is what they do to others.
func strangers() []attack {
	return []attack{
		{
			name:  "HalfOpen",
			tries: "as many connections as one source may have, from many sources, that stop before the hello, in the middle of it, and after it",
			must:  "each is closed by the daemon; the victim's new clients are served meanwhile",
			alone: true,
			run:   halfOpen,
		},
		{
			name:  "SlowRequests",
			tries: "handshakes that are completed, and then headers, HTTP/2 prefaces and bodies that never end, at the victim",
			must:  "the victim's new clients are served meanwhile; what stops before a request is closed",
			run:   slowRequests,
		},
		{
			name:  "HandshakeFlood",
			tries: "two thousand handshakes at the victim, each thrown away when it is complete",
			must:  "the victim's new clients are served meanwhile",
			run:   handshakeFlood,
		},
		{
			name:  "Garbage",
			tries: "random bytes, cut and altered hellos, and PROXY headers of no proxy that name the victim",
			must:  "each connection is closed and none gets as far as a tenant",
			run:   garbage,
		},
		{
			name:  "HTTP2Floods",
			tries: "rapid resets, pings, settings, window updates, empty frames, a header block without end and one that repeats itself out of a large table, at the victim without credentials",
			must:  "the daemon ends each connection or answers, and its memory stays",
			alone: true,
			run:   http2Floods,
		},
		{
			name:  "Smuggling",
			tries: "requests over HTTP/1.1 whose length has two meanings, with another request inside that claims to come from the front proxy",
			must:  "what is inside is refused, or answered as anybody's",
			run:   smuggling,
		},
		{
			name:  "AnonymousFlood",
			tries: "requests without credentials and with invented ones at the victim, as fast as sixteen clients can",
			must:  "some are refused with 429; none of the victim's users' are",
			run:   anonymousFlood,
		},
		{
			name:  "LongTokens",
			tries: "bearer tokens of a megabyte whose headers are nested as deep, in a header, as a WebSocket's protocol and in a TokenReview",
			must:  "they are refused before they are decoded, which takes 150 bytes for each of theirs",
			alone: true,
			run:   longTokens,
		},
		{
			name:  "ForgedAgents",
			tries: "tunnel agents at the victim without credentials, with an invented token, and with a node's certificate of the attacker's cluster; at the attacker's own under another node's name",
			must:  "none is admitted",
			run:   forgedAgents,
		},
		{
			name:  "CarriersOfGarbage",
			tries: "carriers at the victim that carry random bytes, half a hello, another carrier, and nothing",
			must:  "each is closed by the daemon; the victim's new clients are served meanwhile",
			run:   carriersOfGarbage,
		},
	}
}

// stranger connects from an address of its own.
type stranger struct {
	t      testing.TB
	daemon *daemon
	from   net.IP
}

// stranger is the nth one.
func (a *attacker) stranger(t testing.TB, n int) *stranger {
	return &stranger{t: t, daemon: a.daemon, from: net.IPv4(127, 6, byte(n>>8), byte(n))}
}

// dial opens a connection, which ends with the test.
func (s *stranger) dial() (net.Conn, error) {
	d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: s.from}}
	c, err := d.Dial("tcp", s.daemon.listen)
	if err != nil {
		return nil, err
	}
	s.t.Cleanup(func() { c.Close() })
	return c, c.SetDeadline(time.Now().Add(patience))
}

// send opens a connection and sends something.
func (s *stranger) send(what []byte) net.Conn {
	s.t.Helper()
	c, err := s.dial()
	if err != nil {
		s.t.Fatalf("connect: %v", err)
	}
	if _, err := c.Write(what); err != nil && !gone(err) {
		s.t.Fatalf("send: %v", err)
	}
	return c
}

// handshake opens a connection to a tenant; whose it is it does not ask.
func (s *stranger) handshake(host string, protocols ...string) (*tls.Conn, error) {
	raw, err := s.dial()
	if err != nil {
		return nil, err
	}
	c := tls.Client(raw, &tls.Config{ServerName: host, NextProtos: protocols, InsecureSkipVerify: true})
	return c, c.Handshake()
}

// gone says whether an error is that the other side has closed.
func gone(err error) bool { return err != nil && !errors.Is(err, os.ErrDeadlineExceeded) }

// closed waits until the daemon has closed a connection.
func closed(t testing.TB, what string, c net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: the connection stays open for %s", what, patience)
	}
}

// hello is a whole ClientHello for a name, as crypto/tls sends it.
func hello(t testing.TB, host string, protocols ...string) []byte {
	t.Helper()
	here, there := net.Pipe()
	defer here.Close()
	go tls.Client(there, &tls.Config{ServerName: host, NextProtos: protocols, InsecureSkipVerify: true}).Handshake()
	record := make([]byte, 16<<10)
	n, err := here.Read(record)
	if err != nil {
		t.Fatal(err)
	}
	return record[:n]
}

// spectate makes requests as the victim's administrator, each on a connection of its
// own and never repeated, until end is called. All must succeed.
func (a *attacker) spectate(t testing.TB) (end func()) {
	t.Helper()
	cfg := a.victim.config()
	stop, ended := make(chan struct{}), make(chan struct{})
	var rounds atomic.Int64
	var failed error
	go func() {
		defer close(ended)
		for {
			status, answer, err := request(cfg, http.MethodGet, "/api/v1/namespaces/default", "", nil)
			if err != nil || status != http.StatusOK {
				failed = fmt.Errorf("status %d, %v: %.300s", status, err, answer)
				return
			}
			rounds.Add(1)
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	end = sync.OnceFunc(func() {
		t.Helper()
		goal := rounds.Load() + 2
		eventually(t, "the victim's clients are served", func() error {
			select {
			case <-ended:
				return nil
			default:
			}
			if n := rounds.Load(); n < goal {
				return fmt.Errorf("%d were", n)
			}
			return nil
		})
		close(stop)
		<-ended
		if failed != nil {
			t.Errorf("a client of the victim was not served: %v", failed)
		}
	})
	t.Cleanup(end)
	return end
}

// peak is the most memory that the daemon has had, in bytes.
func (d *daemon) peak(t testing.TB) int64 {
	t.Helper()
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(d.cmd.Process.Pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("the kernel does not say how much memory the daemon has had")
	return 0
}

// frugally fails the test if the daemon needs more than max bytes for what f does.
func (a *attacker) frugally(t testing.TB, max int64, f func()) {
	t.Helper()
	// The peak begins anew.
	if err := os.WriteFile("/proc/"+strconv.Itoa(a.daemon.cmd.Process.Pid)+"/clear_refs", []byte("5"), 0); err != nil {
		t.Logf("the peak of the daemon's memory cannot be set back: %v", err)
	}
	before := a.daemon.peak(t)
	f()
	if after := a.daemon.peak(t); after-before > max {
		t.Errorf("the daemon has taken %d MiB of memory, %d are allowed", (after-before)>>20, max>>20)
	}
}

func halfOpen(t *testing.T, a *attacker) {
	end := a.spectate(t)
	whole := hello(t, a.victim.host())
	var open []net.Conn
	for source := range 12 {
		s := a.stranger(t, source)
		for i := range 120 { // below the limit per source, so that none is refused for that
			open = append(open, s.send([][]byte{nil, whole[:1], whole[:len(whole)-1], whole}[i%4]))
		}
	}
	for _, c := range open {
		closed(t, "stopped half way", c)
	}
	end()
}

func slowRequests(t *testing.T, a *attacker) {
	end := a.spectate(t)
	s := a.stranger(t, 100)
	host := a.victim.host()
	get := "GET /version HTTP/1.1\r\nHost: " + host + "\r\n"
	type slow struct {
		protocol, sent string
		closes         bool
	}
	var stopped []func()
	for _, test := range []slow{
		{"http/1.1", "", true},
		{"http/1.1", get, true},
		{"h2", "", true},
		{"h2", "PRI * HTTP/2.0\r\n", true},
		// These are requests. Upstream gives them a minute, and no more of a tenant's
		// memory than one has.
		{"http/1.1", "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews HTTP/1.1\r\nHost: " + host + "\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{", false},
		{"h2", preface + frame(frameSettings, 0, 0, "\x00\x04\x00\x00\x00\x00"), false}, // a window that never opens
	} {
		for range 15 {
			c, err := s.handshake(host, test.protocol)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(c, test.sent); err != nil {
				t.Fatal(err)
			}
			if test.closes {
				stopped = append(stopped, func() { closed(t, fmt.Sprintf("%s, stopped after %q", test.protocol, test.sent), c) })
			}
		}
	}
	for _, wait := range stopped {
		wait()
	}
	end()
}

func handshakeFlood(t *testing.T, a *attacker) {
	end := a.spectate(t)
	var flood sync.WaitGroup
	for n := range 8 {
		flood.Go(func() {
			s := a.stranger(t, 200+n)
			for range 250 {
				// Some are refused when the attacker's source has too many.
				if c, err := s.handshake(a.victim.host()); err == nil {
					c.Close()
				}
			}
		})
	}
	flood.Wait()
	end()
}

func garbage(t *testing.T, a *attacker) {
	end := a.spectate(t)
	s := a.stranger(t, 300)
	random := rand.New(rand.NewPCG(4, 2))
	whole := hello(t, a.victim.host())
	var sent [][]byte
	for i := range 200 {
		altered := bytes.Clone(whole[:random.IntN(len(whole)-1)+1])
		for range 1 + i%8 {
			altered[random.IntN(len(altered))] ^= byte(1 + random.IntN(255))
		}
		noise := make([]byte, 1+random.IntN(64<<10))
		for j := range noise {
			noise[j] = byte(random.Uint32())
		}
		sent = append(sent, altered, noise)
	}
	proxy := append([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11"), 0, byte(12+3+len(a.victim.host())))
	proxy = append(proxy, 127, 0, 0, 1, 127, 0, 0, 1, 0, 1, 0, 1, 2, 0, byte(len(a.victim.host())))
	proxy = append(proxy, a.victim.host()...)
	sent = append(sent, append(proxy, whole...), append([]byte("PROXY TCP4 127.0.0.1 127.0.0.1 1 443\r\n"), whole...))
	for _, bytes := range sent {
		c := s.send(bytes)
		c.(*net.TCPConn).CloseWrite()
		closed(t, fmt.Sprintf("sent %d bytes of garbage, %.32q", len(bytes), bytes), c)
	}
	end()
}

// HTTP/2's frames (RFC 9113 section 6).
const (
	preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

	frameData         = 0
	frameHeaders      = 1
	frameReset        = 3
	frameSettings     = 4
	framePing         = 6
	frameWindow       = 8
	frameContinuation = 9

	flagEndStream, flagEndHeaders = 1, 4
)

// frame is one of HTTP/2's frames.
func frame(kind, flags byte, stream int, payload string) string {
	head := make([]byte, 9, 9+len(payload))
	binary.BigEndian.PutUint32(head, uint32(len(payload))<<8|uint32(kind))
	head[4] = flags
	binary.BigEndian.PutUint32(head[5:], uint32(stream))
	return string(append(head, payload...))
}

func http2Floods(t *testing.T, a *attacker) {
	end := a.spectate(t)
	host := a.victim.host()
	get := "\x82\x87\x84\x41" + string(rune(len(host))) + host // GET, https, /, and the host
	// A literal that goes into the table, then references to it: 4 kB for each byte.
	large := "\x40\x01x\x7f\xc1\x1e" + strings.Repeat("y", 4000)
	floods := map[string]func(i int) string{
		"rapid reset": func(i int) string {
			return frame(frameHeaders, flagEndHeaders|flagEndStream, 2*i+1, get) + frame(frameReset, 0, 2*i+1, "\x00\x00\x00\x08")
		},
		"requests": func(i int) string { return frame(frameHeaders, flagEndHeaders, 2*i+1, get) }, // never ended
		"pings":    func(int) string { return frame(framePing, 0, 0, "12345678") },
		"settings": func(int) string {
			return frame(frameSettings, 0, 0, "\x00\x01\xff\xff\xff\xff\x00\x03\x00\x00\x00\x01")
		},
		"window":        func(int) string { return frame(frameWindow, 0, 0, "\x00\x00\x00\x01") },
		"resets":        func(i int) string { return frame(frameReset, 0, 2*i+1, "\x00\x00\x00\x08") },
		"empty headers": func(i int) string { return frame(frameContinuation, 0, 1, "") },
		"no end of headers": func(i int) string {
			if i == 0 {
				return frame(frameHeaders, 0, 1, get)
			}
			return frame(frameContinuation, 0, 1, "\x40\x01x\x7f\xa1\x1e"+strings.Repeat("y", 4000))
		},
		"table": func(i int) string {
			if i == 0 {
				return frame(frameHeaders, flagEndHeaders|flagEndStream, 1, get+large)
			}
			return frame(frameHeaders, flagEndHeaders|flagEndStream, 2*i+1, get+strings.Repeat("\xbe", 8000))
		},
		"empty data": func(i int) string {
			if i == 0 {
				return frame(frameHeaders, flagEndHeaders, 1, get)
			}
			return frame(frameData, 0, 1, "")
		},
	}
	a.frugally(t, 256<<20, func() {
		var running sync.WaitGroup
		for i, name := range sortedKeys(floods) {
			running.Go(func() {
				c, err := a.stranger(t, 400+i).handshake(host, "h2")
				if err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				answered := make(chan struct{})
				go func() { // read, as an attacker would to make the daemon write more
					defer close(answered)
					io.Copy(io.Discard, c)
				}()
				w := bufio.NewWriterSize(c, 64<<10)
				w.WriteString(preface + frame(frameSettings, 0, 0, ""))
				for i := range 20000 {
					if _, err = w.WriteString(floods[name](i)); err != nil {
						break // the daemon has had enough
					}
				}
				err = errors.Join(err, w.Flush())
				if errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("%s: the daemon neither reads nor closes", name)
				}
				c.Close()
				<-answered
			})
		}
		running.Wait()
	})
	end()
}

func smuggling(t *testing.T, a *attacker) {
	host := a.victim.host()
	inside := "GET /api/v1/namespaces/kube-system/secrets HTTP/1.1\r\nHost: " + host +
		"\r\nX-Remote-User: admin\r\nX-Remote-Group: system:masters\r\nImpersonate-User: admin\r\nImpersonate-Group: system:masters\r\n\r\n"
	length := strconv.Itoa(len(inside))
	for _, head := range []string{
		"Content-Length: " + length + "\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
		"Content-Length: 0\r\nContent-Length: " + length + "\r\n\r\n",
		"Content-Length: 0, " + length + "\r\n\r\n",
		"Content-Length: +0\r\n\r\n",
		"Content-Length : 0\r\n\r\n",
		"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
		"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
		"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
		"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
		"Transfer-Encoding: chunked\r\n\r\n0;\n\r\n\r\n",
		"X: y\r\n Content-Length: " + length + "\r\n\r\n",
		"X: y\rContent-Length: " + length + "\r\n\r\n",
		"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
		"\r\n", // plainly two requests
	} {
		c, err := a.stranger(t, 500).handshake(host, "http/1.1")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, "POST /version HTTP/1.1\r\nHost: "+host+"\r\n"+head+inside); err != nil {
			t.Fatal(err)
		}
		c.CloseWrite()
		answers := bufio.NewReader(c)
		for i := 0; ; i++ {
			response, err := http.ReadResponse(answers, nil)
			if err != nil {
				if errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("%q: no answer, and the connection stays open", head)
				}
				break
			}
			body, _ := io.ReadAll(response.Body)
			if i > 0 && response.StatusCode < 400 || strings.Contains(string(body), "SecretList") {
				t.Errorf("%q: what is inside is answered with %s: %.200s", head, response.Status, body)
			}
		}
	}
}

func anonymousFlood(t *testing.T, a *attacker) {
	end := a.spectate(t)
	invented := rest.AnonymousClientConfig(a.victim.config())
	invented.BearerToken = "nobody.ever.gave"
	none := rest.AnonymousClientConfig(a.victim.config())
	var refused, sent atomic.Int64
	var flood sync.WaitGroup
	for n := range 16 {
		cfg := []*rest.Config{none, invented}[n%2]
		client, err := rest.HTTPClientFor(cfg)
		if err != nil {
			t.Fatal(err)
		}
		flood.Go(func() {
			defer client.CloseIdleConnections()
			for began := time.Now(); time.Since(began) < patience && (refused.Load() == 0 || sent.Load() < 3000); {
				response, err := client.Get(cfg.Host + "/api/v1/namespaces/default/secrets")
				if err != nil {
					continue // the daemon has had enough of this connection
				}
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
				sent.Add(1)
				switch response.StatusCode {
				case http.StatusTooManyRequests:
					refused.Add(1)
				case http.StatusUnauthorized, http.StatusForbidden:
				default:
					t.Errorf("a stranger is answered with %s", response.Status)
					return
				}
			}
		})
	}
	flood.Wait()
	if refused.Load() == 0 {
		t.Errorf("of %d requests without credentials none was refused with 429", sent.Load())
	}
	end()
}

func longTokens(t *testing.T, a *attacker) {
	token := func(nested int) string {
		part := base64.RawURLEncoding.EncodeToString
		return part([]byte(`{"alg":"RS256","x":`+strings.Repeat("[", nested)+strings.Repeat("]", nested)+`}`)) + "." +
			part([]byte(`{"iss":"https://kubernetes.default.svc.cluster.local"}`)) + ".AAAA"
	}
	const nested = 350_000 // what fits into the header of a request
	a.frugally(t, 384<<20, func() {
		var sent sync.WaitGroup
		for range 4 {
			sent.Go(func() {
				cfg := rest.AnonymousClientConfig(a.config())
				cfg.BearerToken = token(nested)
				if status, _, err := request(cfg, http.MethodGet, "/api", "", nil); err == nil && status != http.StatusUnauthorized && status != http.StatusTooManyRequests {
					t.Errorf("a token of a megabyte: status %d", status)
				}
			})
			sent.Go(func() {
				c, err := a.stranger(t, 600).handshake(a.host(), "http/1.1")
				if err != nil {
					t.Error(err)
					return
				}
				// An error: the daemon has had enough.
				fmt.Fprintf(c, "GET /api/v1/pods?watch=1 HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"+
					"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: base64url.bearer.authorization.k8s.io.%s, x\r\n\r\n",
					a.host(), base64.RawURLEncoding.EncodeToString([]byte(token(nested/2))))
				http.ReadResponse(bufio.NewReader(c), nil)
			})
		}
		sent.Wait()
		for range 3 {
			review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token(1_000_000)}}
			review, err := a.AuthenticationV1().TokenReviews().Create(t.Context(), review, metav1.CreateOptions{})
			if err != nil {
				t.Errorf("review a long token: %v", err)
				continue
			}
			contains(t, "the answer to a long token", review.Status.Error, "longer than")
		}
	})
}

func carriersOfGarbage(t *testing.T, a *attacker) {
	end := a.spectate(t)
	host := a.victim.host()
	whole := hello(t, host)
	random := rand.New(rand.NewPCG(4, 2))
	noise := make([]byte, 32<<10)
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	var open []net.Conn
	for i := range 60 {
		c, err := a.stranger(t, 700).handshake(host, "tenantd-api")
		if err != nil {
			t.Fatal(err)
		}
		inside := [][]byte{nil, whole[:len(whole)/2], noise, hello(t, host, "tenantd-api"), []byte("GET / HTTP/1.1\r\n\r\n"), whole}[i%6]
		if _, err := c.Write(inside); gone(err) {
			continue
		}
		open = append(open, c)
	}
	for i, c := range open {
		closed(t, fmt.Sprintf("carrier %d", i), c)
	}
	end()
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package limit

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/filters"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	info = &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}
	long = filters.BasicLongRunningRequestCheck(sets.NewString("watch", "proxy"), sets.NewString("attach", "exec", "proxy", "log", "portforward"))
)

// server is an API server of a kind, on a real port: "good" is the one token that it
// accepts, and what it does with a request the test decides.
type server struct {
	t       *testing.T
	limiter *Limiter
	url     string
}

type publicListener struct {
	net.Listener
	own bool
}

func (l publicListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if l.own {
		return Own(c), nil
	}
	return Public(c), nil
}

func newServer(t *testing.T, cfg Config, own bool, serve http.HandlerFunc) *server {
	t.Helper()
	s := &server{t: t, limiter: New("acme", cfg, NewGate(0))}
	authenticate := func(api http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if a := r.Header.Get("Authorization"); a != "" && a != "Bearer good" {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			api.ServeHTTP(w, r)
		})
	}
	h := httptest.NewUnstartedServer(s.limiter.Handler(serve, authenticate, info, long))
	h.Listener = publicListener{h.Listener, own}
	h.EnableHTTP2 = true
	h.StartTLS()
	t.Cleanup(h.Close)
	s.url = h.URL
	return s
}

// client has connections of its own.
func (s *server) client(token string, http2 bool) *client {
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: http2} //nolint:gosec // the server is in this process
	s.t.Cleanup(tr.CloseIdleConnections)
	return &client{s: s, http: &http.Client{Transport: tr}, token: token}
}

type client struct {
	s     *server
	http  *http.Client
	token string
}

func (c *client) do(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.s.url+path, body)
	if err != nil {
		return nil, err
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	return c.http.Do(req)
}

// status asks for path and returns the status of the answer.
func (c *client) status(path string) int {
	c.s.t.Helper()
	resp, err := c.do(c.s.t.Context(), http.MethodGet, path, nil)
	if err != nil {
		c.s.t.Fatal(err)
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

// pods is any path of the API.
const pods = "/api/v1/namespaces/default/pods"

func ok(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }

// blocking answers once unblocked, and says when a request has arrived.
type blocking struct {
	arrived chan string
	unblock chan struct{}
}

func newBlocking() *blocking {
	return &blocking{arrived: make(chan string, 1000), unblock: make(chan struct{})}
}

func (b *blocking) serve(w http.ResponseWriter, r *http.Request) {
	if f, ok := w.(http.Flusher); ok && r.URL.Query().Has("watch") {
		f.Flush()
	}
	if r.URL.Query().Has("block") || r.URL.Query().Has("watch") {
		b.arrived <- r.URL.Path
		<-b.unblock
	}
}

// A refusal is a Status in JSON that client-go understands, whatever was asked for.
func TestRefusalNamesTheLimit(t *testing.T) {
	s := newServer(t, Config{RequestsPerSecond: 1}, false, ok)
	c := s.client("good", true)
	var resp *http.Response
	for range 10 {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+pods, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", "application/vnd.kubernetes.protobuf")
		req.Header.Set("Authorization", "Bearer good")
		if resp, err = c.http.Do(req); err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode == http.StatusTooManyRequests {
			break
		}
	}
	if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") != "1" || resp.Header.Get("Content-Type") != "application/json" {
		t.Fatalf("got %s, %v", resp.Status, resp.Header)
	}
	var status metav1.Status
	if err := json.NewDecoder(resp.Body).Decode(&status); err != nil {
		t.Fatal(err)
	}
	err := &apierrors.StatusError{ErrStatus: status}
	if !apierrors.IsTooManyRequests(err) || !strings.HasPrefix(err.Error(), "spec.limits.requestsPerSecond of tenant acme (1) is reached; ") {
		t.Errorf("got %q, %+v", err, status)
	}
	if n := testutil.ToFloat64(s.limiter.refused.WithLabelValues("requestsPerSecond")); n != 1 {
		t.Errorf("counted %v refusals", n)
	}
}

// Of ordinary requests so many run at once, of long-running ones so many, and one
// kind does not take the places of the other. Both at the protocols that clients use.
func TestInFlightAndWatches(t *testing.T) {
	for _, http2 := range []bool{false, true} {
		t.Run(map[bool]string{false: "HTTP/1.1", true: "HTTP/2"}[http2], func(t *testing.T) {
			b := newBlocking()
			s := newServer(t, Config{RequestsInFlight: 3, Watches: 2}, false, b.serve)
			s.known(http2)
			var pending sync.WaitGroup
			defer pending.Wait()
			defer close(b.unblock)
			hold := func(path string) {
				c := s.known(http2)
				pending.Go(func() {
					resp, err := c.do(context.WithoutCancel(t.Context()), http.MethodGet, path, nil)
					if err != nil {
						t.Error(err)
						return
					}
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				})
				<-b.arrived
			}
			for range 3 {
				hold(pods + "?block")
			}
			hold(pods + "?watch=1")
			hold(pods + "/a/log?follow=1&watch")
			last := s.known(http2)
			if got := last.status(pods); got != http.StatusTooManyRequests {
				t.Errorf("a fourth request: %d", got)
			}
			for _, path := range []string{pods + "?watch=1", pods + "/a/exec", "/api/v1/namespaces/default/services/a/proxy/"} {
				if got := s.known(http2).status(path); got != http.StatusTooManyRequests {
					t.Errorf("a third long-running request, %s: %d", path, got)
				}
			}
			for limit, want := range map[string]float64{"requestsInFlight": 1, "watches": 3} {
				if n := testutil.ToFloat64(s.limiter.refused.WithLabelValues(limit)); n != want {
					t.Errorf("counted %v refusals by %s", n, limit)
				}
			}
			// Raised, the next one passes.
			s.limiter.SetConfig(Config{RequestsInFlight: 4, Watches: 2})
			if got := last.status(pods); got != http.StatusOK {
				t.Errorf("after the limit was raised: %d", got)
			}
		})
	}
}

// known is a client with a connection of its own whose credentials were accepted,
// whatever the limits say.
func (s *server) known(http2 bool) *client {
	s.t.Helper()
	c := s.client("good", http2)
	if got := c.status("/version"); got != http.StatusOK {
		s.t.Fatalf("a first request: %d", got)
	}
	return c
}

// The control plane's own components are not limited.
func TestOwnConnections(t *testing.T) {
	s := newServer(t, Config{RequestsInFlight: 1, RequestsPerSecond: 1, Watches: 1}, true, func(w http.ResponseWriter, r *http.Request) {
		if !IsOwn(r.Context()) {
			t.Error("a connection of its own is not known as such")
		}
		if err := Charge(r.Context(), 2*maxBytes); err != nil {
			t.Error(err)
		}
	})
	c := s.client("", true)
	for range 100 {
		if got := c.status(pods); got != http.StatusOK {
			t.Fatal(got)
		}
	}
}

// Whoever shows no valid credentials does not use up what users have.
func TestStrangers(t *testing.T) {
	for name, token := range map[string]string{"nothing": "", "made up": "bad"} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, Config{RequestsPerSecond: 10}, false, ok)
			user := s.known(true)
			c := s.client(token, true)
			refused := 0
			for refused == 0 {
				if c.status(pods) == http.StatusTooManyRequests {
					refused++
				}
			}
			if n := testutil.ToFloat64(s.limiter.refused.WithLabelValues("unauthenticated")); n != 1 {
				t.Errorf("counted %v refusals of strangers", n)
			}
			for range 15 {
				if got := user.status(pods); got != http.StatusOK {
					t.Fatalf("a user beside them: %d", got)
				}
			}
		})
	}
}

// Made-up credentials on ever new connections, too, leave alone those whose have been
// accepted; and who was refused once is heard again with good ones.
func TestNewcomers(t *testing.T) {
	s := newServer(t, Config{RequestsPerSecond: 5}, false, ok)
	user := s.known(true)
	refused := false
	for !refused {
		refused = s.client("bad", true).status(pods) == http.StatusTooManyRequests
	}
	if got := user.status(pods); got != http.StatusOK {
		t.Errorf("a user beside them: %d", got)
	}

	s = newServer(t, Config{}, false, ok)
	c := s.client("bad", true)
	if got := c.status(pods); got != http.StatusUnauthorized {
		t.Fatalf("bad credentials: %d", got)
	}
	c.token = "good"
	for range 2 * burst * strangersPerSecond { // more than strangers have
		if got := c.status(pods); got != http.StatusOK {
			t.Fatalf("good credentials on a connection that had bad ones: %d", got)
		}
	}
}

// What runs in a request may charge it; the bodies that clients announce are charged.
func TestCharge(t *testing.T) {
	b := newBlocking()
	charge := make(chan int64, 10)
	charged := make(chan error, 10)
	s := newServer(t, Config{}, false, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("charge") {
			charged <- Charge(r.Context(), <-charge)
		}
		b.serve(w, r)
	})
	var pending sync.WaitGroup
	start := func(path string, body io.Reader) {
		c := s.known(true)
		pending.Go(func() {
			resp, err := c.do(context.WithoutCancel(t.Context()), http.MethodPost, path, body)
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
		})
	}
	// One alone gets what it needs.
	charge <- 2 * maxBytes
	start(pods+"?charge&block", nil)
	if err := <-charged; err != nil {
		t.Error(err)
	}
	<-b.arrived
	// A second one gets nothing beside it.
	charge <- 1
	start(pods+"?charge", nil)
	if err := <-charged; !apierrors.IsTooManyRequests(err) {
		t.Errorf("got %v", err)
	}
	// Nor may it bring a body; of unknown length least of all.
	resp, err := s.known(true).do(t.Context(), http.MethodPost, pods, io.MultiReader(strings.NewReader("x")))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusTooManyRequests {
		t.Errorf("a body beside it: %s", resp.Status)
	}
	close(b.unblock)
	pending.Wait()
	s.idle()
	if err := Charge(t.Context(), 1<<40); err != nil {
		t.Errorf("a context of no request: %v", err)
	}
}

// idle waits until nothing is counted.
func (s *server) idle() {
	s.t.Helper()
	for i := 0; ; i++ {
		s.limiter.mu.Lock()
		idle := s.limiter.bytes == 0 && s.limiter.users.inFlight == 0 && s.limiter.newcomers.inFlight == 0 && s.limiter.strangers.inFlight == 0 && s.limiter.watches == 0
		s.limiter.mu.Unlock()
		if idle {
			return
		}
		if i > 10000 {
			s.t.Fatalf("still counted: %+v", s.limiter)
		}
		time.Sleep(time.Millisecond)
	}
}

// A request counts until the work on it ends, though its client has long left and
// been answered by a filter.
func TestCountsUntilTheWorkEnds(t *testing.T) {
	b := newBlocking()
	limiter := New("acme", Config{RequestsInFlight: 1}, nil)
	ended := make(chan struct{})
	timeout := func(api http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			go func() {
				defer close(ended)
				api.ServeHTTP(w, r)
			}()
			<-r.Context().Done()
		})
	}
	h := limiter.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		b.arrived <- ""
		<-b.unblock
	}), timeout, info, long)
	ctx, cancel := context.WithCancel(t.Context())
	answered := make(chan struct{})
	ask := func(ctx context.Context) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(ctx, http.MethodGet, pods, nil)
		r.Header.Set("Authorization", "Bearer good")
		h.ServeHTTP(w, r)
		return w
	}
	go func() {
		defer close(answered)
		ask(ctx)
	}()
	<-b.arrived
	cancel()
	<-answered
	if got := ask(t.Context()).Code; got != http.StatusTooManyRequests {
		t.Errorf("while the work on the first goes on: %d", got)
	}
	close(b.unblock)
	<-ended
	limiter.mu.Lock()
	defer limiter.mu.Unlock()
	if limiter.newcomers.inFlight != 0 {
		t.Errorf("%d in flight after the end", limiter.newcomers.inFlight)
	}
}

// pipe is a wrapped connection and its client's end.
func pipe(t *testing.T) (server *conn, client net.Conn) {
	t.Helper()
	s, c := net.Pipe()
	t.Cleanup(func() { s.Close(); c.Close() })
	return Public(s).(*conn), c
}

// A pause holds up reads alone; close and deadlines end it.
func TestPause(t *testing.T) {
	t.Run("reads wait, writes do not", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			server, client := pipe(t)
			began := time.Now()
			server.pause(time.Second)
			go client.Write([]byte("a"))
			go server.Write([]byte("b"))
			if _, err := client.Read(make([]byte, 1)); err != nil || time.Since(began) != 0 {
				t.Errorf("written after %s: %v", time.Since(began), err)
			}
			if _, err := server.Read(make([]byte, 1)); err != nil || time.Since(began) != time.Second {
				t.Errorf("read after %s: %v", time.Since(began), err)
			}
			go client.Write([]byte("a"))
			if _, err := server.Read(make([]byte, 1)); err != nil || time.Since(began) != time.Second {
				t.Errorf("read after %s: %v", time.Since(began), err)
			}
		})
	})
	t.Run("ends with close", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			server, _ := pipe(t)
			server.pause(time.Hour)
			go func() {
				time.Sleep(time.Second)
				server.Close()
			}()
			began := time.Now()
			if _, err := server.Read(make([]byte, 1)); err == nil || time.Since(began) != time.Second {
				t.Errorf("read after %s: %v", time.Since(began), err)
			}
		})
	})
	t.Run("ends with the deadline, set before and during", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			server, _ := pipe(t)
			server.pause(time.Hour)
			server.SetReadDeadline(time.Now().Add(time.Second))
			began := time.Now()
			var timeout net.Error
			if _, err := server.Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() || time.Since(began) != time.Second {
				t.Errorf("read after %s: %v", time.Since(began), err)
			}
			server.SetDeadline(time.Time{})
			go func() {
				time.Sleep(time.Second)
				server.SetDeadline(time.Unix(1, 0)) // what net/http does to end a read
			}()
			if _, err := server.Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() || time.Since(began) != 2*time.Second {
				t.Errorf("read after %s: %v", time.Since(began), err)
			}
		})
	})
}

// A refused client's next request is read when it was told to come back, while what
// it watches on the same connection goes on.
func TestRefusalPausesTheConnection(t *testing.T) {
	var served sync.Map
	events := make(chan string)
	s := newServer(t, Config{RequestsInFlight: 1}, false, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("watch") {
			for e := range events {
				io.WriteString(w, e)
				w.(http.Flusher).Flush()
			}
			return
		}
		served.Store(r.URL.Path, true)
	})
	c := s.known(true)
	go func() { events <- "0" }()
	resp, err := c.do(t.Context(), http.MethodGet, pods+"?watch=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	buffer := make([]byte, 1)
	resp.Body.Read(buffer)
	s.limiter.mu.Lock()
	s.limiter.users.inFlight = 1
	s.limiter.mu.Unlock()
	if got := c.status(pods); got != http.StatusTooManyRequests {
		t.Fatal(got)
	}
	s.limiter.mu.Lock()
	s.limiter.users.inFlight = 0
	s.limiter.mu.Unlock()
	next := make(chan struct{})
	go func() {
		defer close(next)
		if resp, err := c.do(context.WithoutCancel(t.Context()), http.MethodGet, "/api/v1/next", nil); err == nil {
			resp.Body.Close()
		}
	}()
	events <- "1"
	if _, err := resp.Body.Read(buffer); err != nil || string(buffer) != "1" {
		t.Errorf("the watch: %q, %v", buffer, err)
	}
	if _, early := served.Load("/api/v1/next"); early {
		t.Error("the next request was served during the pause")
	}
	<-next
	if _, ok := served.Load("/api/v1/next"); !ok {
		t.Error("the next request was not served after the pause")
	}
	close(events)
}

// Clients that are refused together do not come back together.
func TestRefusedComeBackScattered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New("acme", Config{}, nil)
		first, last := time.Duration(1<<62), time.Duration(0)
		for range 100 {
			near, _ := net.Pipe()
			c := Public(near).(*conn)
			l.refuse(httptest.NewRecorder(), c, byRate)
			pause := time.Until(c.until)
			first, last = min(first, pause), max(last, pause)
		}
		if first < retryAfter || last >= retryAfter+scatter || last-first < scatter/2 {
			t.Errorf("a hundred clients come back after %s to %s", first, last)
		}
	})
}

// Watches whose clients do not read end when what they hold is too much, and leave
// those alone that do read.
func TestUnreadWatches(t *testing.T) {
	event := make([]byte, 8<<20)
	written := make(chan error, 64)
	s := newServer(t, Config{}, false, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("large") == "" {
			ok(w, r)
			return
		}
		_, err := w.Write(event)
		written <- err
	})
	unread := func() *http.Response {
		resp, err := s.client("good", false).do(t.Context(), http.MethodGet, pods+"?watch=1&large=1", nil)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	var open []*http.Response
	defer func() {
		for _, resp := range open {
			resp.Body.Close()
		}
	}()
	for range maxWatchBytes / len(event) {
		open = append(open, unread())
	}
	over := unread()
	over.Body.Close()
	if err := <-written; !errors.Is(err, errSlowWatches) {
		t.Fatalf("one more ended with %v, want %v", err, errSlowWatches)
	}
	if got := testutil.ToFloat64(s.limiter.refused.WithLabelValues(string(byEvents))); got != 1 {
		t.Errorf("%v counted, want 1", got)
	}
	if got := s.client("good", false).status(pods + "?watch=1"); got != http.StatusOK {
		t.Errorf("a watch with a small event: %d", got)
	}
	if _, err := io.Copy(io.Discard, open[0].Body); err != nil {
		t.Fatal(err)
	}
	if err := <-written; err != nil {
		t.Fatalf("one that was read at last: %v", err)
	}
	resp := unread()
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Errorf("a watch after one has read: %v", err)
	}
	if err := <-written; err != nil {
		t.Errorf("a watch after one has read: %v", err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package limit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
)

const (
	// DefaultRequestsInFlight suits a cluster of some ten nodes; half of what a
	// kube-apiserver, which has a machine to itself, allows (400 and 200).
	DefaultRequestsInFlight = 200
	// DefaultRequestsPerSecond is ten times what ten nodes with their pods and a few
	// operators ask for, and about what one core answers.
	DefaultRequestsPerSecond = 500
	// DefaultWatches lets a hundred kubelets with some twenty watches each, and as
	// many again of operators. An idle watch takes about 50 KB.
	DefaultWatches = 5000

	// strangersInFlight and strangersPerSecond are for all whose credentials are
	// missing or were refused: enough for the probes of load balancers and for a rack
	// of nodes that begin to join at once.
	strangersInFlight  = 20
	strangersPerSecond = 50

	// burst is how many seconds' worth of requests may come at once: kubectl and
	// controllers ask in bursts.
	burst = 2

	// maxBytes bounds what a tenant's requests hold in memory together, as far as it
	// can be told before. Decoded it is several times as much.
	maxBytes = 64 << 20
	// maxBody is the longest body that upstream reads, and what a body of unknown
	// length counts as.
	maxBody = 3 << 20
	// bodyWeight is how often a body's bytes count: a list of empty objects takes
	// twenty times its length once it is decoded, an ordinary object less than ten.
	bodyWeight = 8

	// maxWatchBytes bounds what a tenant's watches have encoded and cannot write, since
	// their clients do not read. An event is encoded for each watch, and 5,000 of them
	// with one large object would take all memory.
	maxWatchBytes = 128 << 20
	// largeEvent is what is worth counting towards it.
	largeEvent = 32 << 10

	// retryAfter is what a refused client is told to wait, and how long its connection
	// is not read from at least.
	retryAfter = time.Second
	// scatter is how much longer that may be, so that those who were refused together
	// do not all come back together: a hundred at once are felt by others.
	scatter = retryAfter / 2
)

// Config is what a tenant may use. A zero field means its default.
type Config struct {
	// RequestsInFlight is the number of requests worked on at the same time. Watches
	// and other long-running requests do not count.
	RequestsInFlight int
	// RequestsPerSecond is the number of requests accepted each second; twice as many
	// may come at once.
	RequestsPerSecond int
	// Watches is the number of watches and other long-running requests (exec, logs,
	// port-forward, proxied ones) at the same time.
	Watches int
}

func (c Config) complete() Config {
	c.RequestsInFlight = cmp.Or(c.RequestsInFlight, DefaultRequestsInFlight)
	c.RequestsPerSecond = cmp.Or(c.RequestsPerSecond, DefaultRequestsPerSecond)
	c.Watches = cmp.Or(c.Watches, DefaultWatches)
	return c
}

// limitName is a limit as metrics and messages call it.
type limitName string

const (
	byInFlight  limitName = "requestsInFlight"
	byRate      limitName = "requestsPerSecond"
	byWatches   limitName = "watches"
	byBytes     limitName = "bytesInFlight"
	byEvents    limitName = "watchBytes"
	byStrangers limitName = "unauthenticated"
)

// Limiter counts the requests to one control plane and refuses those that are too
// many. Its methods are safe for concurrent use.
type Limiter struct {
	tenant  string
	flow    *flow
	refused *prometheus.CounterVec

	mu        sync.Mutex // guards what follows
	config    Config
	users     bucket
	newcomers bucket // whose credentials nobody has looked at yet: they may be made up
	strangers bucket // whose credentials are missing or were refused
	watches   int
	bytes     int64 // charged to all tickets
	events    int64 // being written to watches
}

// bucket is what one class of clients shares.
type bucket struct {
	rate     *rate.Limiter
	inFlight int
}

func newBucket(perSecond int) bucket {
	return bucket{rate: rate.NewLimiter(rate.Limit(perSecond), burst*perSecond)}
}

// New makes the limiter of a tenant's control plane. What runs at the same time in
// several of them is shared out by gate; nil shares nothing out.
func New(tenant string, cfg Config, gate *Gate) *Limiter {
	cfg = cfg.complete()
	return &Limiter{
		tenant: tenant,
		flow:   gate.flow(),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name:        "tenantd_tenant_refused_total",
			Help:        "Requests to the tenant's API server refused with 429 by the limit that was reached.",
			ConstLabels: prometheus.Labels{"tenant": tenant},
		}, []string{"limit"}),
		config:    cfg,
		users:     newBucket(cfg.RequestsPerSecond),
		newcomers: newBucket(cfg.RequestsPerSecond),
		strangers: newBucket(strangersPerSecond),
	}
}

// SetConfig changes the limits. Requests that run already run on.
func (l *Limiter) SetConfig(cfg Config) {
	cfg = cfg.complete()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.config == cfg {
		return
	}
	l.config = cfg
	for _, b := range []*bucket{&l.users, &l.newcomers} {
		b.rate.SetLimit(rate.Limit(cfg.RequestsPerSecond))
		b.rate.SetBurst(burst * cfg.RequestsPerSecond)
	}
}

// Collector yields tenantd_tenant_refused_total.
func (l *Limiter) Collector() prometheus.Collector { return l.refused }

// ticket is what one request has been given.
type ticket struct {
	limiter *Limiter
	own     bool
	watch   bool
	bucket  *bucket // nil for long-running requests
	turn    turn

	// The limiter's mu guards what follows.
	holders int // handlers that still run
	bytes   int64
}

type ticketKey struct{}

func ticketOf(ctx context.Context) *ticket {
	t, _ := ctx.Value(ticketKey{}).(*ticket)
	return t
}

// Handler puts filters around api, and the limits around both. Nothing of filters,
// which authenticate among other things, runs for what is refused.
//
// A request counts until api has finished with it: upstream answers one that takes
// too long, or whose client has left, while the work on it goes on.
func (l *Limiter) Handler(api http.Handler, filters func(http.Handler) http.Handler, info request.RequestInfoResolver, longRunning request.LongRunningRequestCheck) http.Handler {
	chain := filters(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		t := ticketOf(req.Context())
		if t == nil || !t.hold() {
			return // it has been answered, and nobody waits for more
		}
		defer t.release()
		if !t.watch { // upstream's filter for timeouts has made a goroutine for it
			defer t.turn.lower()()
		}
		api.ServeHTTP(w, req)
	}))
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx := req.Context()
		parsed, err := info.NewRequestInfo(req)
		long := err == nil && longRunning(req, parsed)
		t := &ticket{limiter: l, own: IsOwn(ctx), watch: long, holders: 1}
		t.turn.flow = l.flow
		var watcher *statusWatcher
		if !t.own {
			c := connOf(ctx)
			if refusal := l.admit(t, req, c); refusal != "" {
				l.refuse(w, c, refusal)
				return
			}
			if c != nil {
				watcher = &statusWatcher{ResponseWriter: w, ticket: t, conn: c, credentials: hasCredentials(req), ctx: ctx}
				w = responsewriter.WrapForHTTP1Or2(watcher)
			}
		}
		defer t.release()
		if !long && !t.turn.begin(ctx, t.own) {
			// The client has left, or has closed its side and still reads: to return
			// without an answer would tell it 200.
			panic(http.ErrAbortHandler)
		}
		chain.ServeHTTP(w, req.WithContext(context.WithValue(ctx, ticketKey{}, t)))
		if watcher != nil {
			watcher.judge(http.StatusOK) // what net/http makes of an answer without a status
		}
	})
}

// hasCredentials reports whether a request shows who it claims to be from.
func hasCredentials(req *http.Request) bool {
	return req.TLS != nil && len(req.TLS.PeerCertificates) > 0 || req.Header.Get("Authorization") != ""
}

// admit counts a request in, or says which limit it would exceed.
func (l *Limiter) admit(t *ticket, req *http.Request, c *conn) limitName {
	shown := newcomer
	if c != nil {
		shown = standing(c.standing.Load())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	b, inFlight := &l.users, l.config.RequestsInFlight
	switch {
	case shown == stranger || !hasCredentials(req):
		b, inFlight = &l.strangers, strangersInFlight
	case shown == newcomer:
		b = &l.newcomers
	}
	strangers := b == &l.strangers
	name := func(of limitName) limitName {
		if strangers {
			return byStrangers
		}
		return of
	}
	var body int64
	switch {
	case t.watch && l.watches >= l.config.Watches:
		return name(byWatches)
	case (!t.watch || strangers) && b.inFlight >= inFlight:
		return name(byInFlight)
	case !t.watch && req.ContentLength != 0:
		body = maxBody
		if req.ContentLength > 0 {
			body = min(body, req.ContentLength)
		}
		body *= bodyWeight
		if !l.fits(t, body) {
			return name(byBytes)
		}
	}
	if !b.rate.Allow() {
		return name(byRate)
	}
	if !t.watch || strangers {
		t.bucket = b
		b.inFlight++
	}
	if t.watch {
		l.watches++
	}
	l.bytes += body
	t.bytes += body
	return ""
}

// fits reports whether n more bytes can be charged to t. What one request needs alone
// it gets. Its caller has mu.
func (l *Limiter) fits(t *ticket, n int64) bool {
	return l.bytes-t.bytes == 0 || l.bytes+n <= maxBytes
}

// hold keeps a ticket from being given back; false if it has been already.
func (t *ticket) hold() bool {
	l := t.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.holders == 0 {
		return false
	}
	t.holders++
	return true
}

func (t *ticket) release() {
	l := t.limiter
	l.mu.Lock()
	t.holders--
	last := t.holders == 0
	if last {
		if t.bucket != nil {
			t.bucket.inFlight--
		}
		if t.watch && !t.own {
			l.watches--
		}
		l.bytes -= t.bytes
	}
	l.mu.Unlock()
	if last {
		t.turn.end()
	}
}

// Charge counts bytes of memory to the request whose context ctx is, until it ends.
// The error is a 429 for the client, as an API status. A context of no request, or of
// one of the control plane's own, is charged nothing.
func Charge(ctx context.Context, bytes int64) error {
	t := ticketOf(ctx)
	if t == nil || t.own || bytes <= 0 {
		return nil
	}
	l := t.limiter
	l.mu.Lock()
	fits := t.holders == 0 || l.fits(t, bytes)
	if fits && t.holders > 0 {
		l.bytes += bytes
		t.bytes += bytes
	}
	l.mu.Unlock()
	if fits {
		return nil
	}
	l.refused.WithLabelValues(string(byBytes)).Inc()
	return &apierrors.StatusError{ErrStatus: *l.status(byBytes)}
}

// refuse answers with 429 and has the client's connection rest: answering costs
// processor as well.
func (l *Limiter) refuse(w http.ResponseWriter, c *conn, by limitName) {
	l.refused.WithLabelValues(string(by)).Inc()
	if c != nil {
		c.pause(retryAfter + rand.N(scatter))
	}
	body, err := json.Marshal(l.status(by))
	if err != nil { // of a struct of strings and numbers
		panic(err)
	}
	// JSON whatever was asked for: every client of Kubernetes reads a Status by its
	// content type.
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Retry-After", strconv.Itoa(int(retryAfter.Seconds())))
	h.Set("Cache-Control", "no-cache, private")
	w.WriteHeader(http.StatusTooManyRequests)
	_, _ = w.Write(body) // a client that has left needs none
}

func (l *Limiter) status(by limitName) *metav1.Status {
	l.mu.Lock()
	cfg := l.config
	l.mu.Unlock()
	field := func(value int, remedy string) string {
		return fmt.Sprintf("spec.limits.%s of tenant %s (%d) is reached; %s, or have the limit raised", by, l.tenant, value, remedy)
	}
	var message string
	switch by {
	case byInFlight:
		message = field(cfg.RequestsInFlight, "send fewer requests at the same time")
	case byRate:
		message = field(cfg.RequestsPerSecond, "send fewer requests")
	case byWatches:
		message = field(cfg.Watches, "end watches and other long-running requests")
	case byBytes:
		message = fmt.Sprintf("the requests that tenant %s has in flight hold %d MiB already; send fewer large ones at the same time, and list in pages", l.tenant, maxBytes>>20)
	case byStrangers:
		message = fmt.Sprintf("too many requests whose credentials are missing or were refused (%d in flight, %d each second); send valid ones, or try again later", strangersInFlight, strangersPerSecond)
	}
	return &metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   metav1.StatusFailure,
		Code:     http.StatusTooManyRequests,
		Reason:   metav1.StatusReasonTooManyRequests,
		Message:  message,
		Details:  &metav1.StatusDetails{RetryAfterSeconds: int32(retryAfter.Seconds())},
	}
}

// statusWatcher has the answer tell whether the request's credentials were accepted,
// and ends a watch whose events pile up.
type statusWatcher struct {
	http.ResponseWriter
	ticket      *ticket
	conn        *conn // nil when it has
	credentials bool
	ctx         context.Context // the request's
	yielded     time.Time       // when last
}

// Unwrap implements responsewriter.UserProvidedDecorator.
func (s *statusWatcher) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (s *statusWatcher) WriteHeader(status int) {
	s.judge(status)
	s.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (s *statusWatcher) Write(p []byte) (int, error) {
	s.judge(http.StatusOK)
	if s.ticket.watch && len(p) >= largeEvent {
		if !s.ticket.limiter.beginEvent(len(p)) {
			return 0, errSlowWatches
		}
		defer s.ticket.limiter.endEvent(len(p))
	}
	if !s.ticket.watch && time.Since(s.yielded) >= piece {
		s.ticket.turn.yield(s.ctx)
		s.yielded = time.Now()
	}
	return s.ResponseWriter.Write(p)
}

// errSlowWatches ends a watch, which its client begins again when it reads.
var errSlowWatches = errors.New("the tenant's watches hold too much that their clients do not read")

// beginEvent counts an event that is about to be written; false if that is too much.
func (l *Limiter) beginEvent(bytes int) bool {
	l.mu.Lock()
	fits := l.events == 0 || l.events+int64(bytes) <= maxWatchBytes
	if fits {
		l.events += int64(bytes)
	}
	l.mu.Unlock()
	if !fits {
		l.refused.WithLabelValues(string(byEvents)).Inc()
	}
	return fits
}

func (l *Limiter) endEvent(bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events -= int64(bytes)
}

// judge looks at the first status of an answer.
func (s *statusWatcher) judge(status int) {
	if s.conn == nil {
		return
	}
	c := s.conn
	s.conn = nil
	now := known
	switch {
	case status == http.StatusUnauthorized:
		now = stranger
	case !s.credentials || status == http.StatusTooManyRequests || status >= http.StatusInternalServerError || status < http.StatusOK:
		return // says nothing of the credentials
	}
	if standing(c.standing.Load()) != now {
		c.standing.Store(int32(now))
	}
}

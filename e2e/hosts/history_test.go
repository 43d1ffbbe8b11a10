// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"k8s.io/client-go/rest"
)

const (
	// requestLimit is how long a client waits for an answer.
	requestLimit = 2 * time.Second
	// calmLimit is how long where no request may fail: a busy machine may take its time.
	calmLimit = 20 * time.Second
	// think is what a client does between two requests: without it this machine would
	// be busy with nothing but clients.
	think = 40 * time.Millisecond
	// registers is how many there are in each tenant. Few, so that clients meet.
	registers = 2
)

// operation is a request of a client, and its answer.
type operation struct {
	tenant, host string // which, and through which
	register     string
	kind         kind
	value        string // written or read
	begin, end   time.Duration
	err          error // no answer, or none that says that it was done
	refused      bool  // the answer says that it was not done
}

type kind string

const (
	write kind = "PUT"
	get   kind = "GET"
	list  kind = "LIST"
)

// history is what clients do and see while a fault is brought about.
type history struct {
	name  string
	start time.Time

	cancel  context.CancelFunc
	clients sync.WaitGroup

	mu  sync.Mutex // guards ops
	ops []operation
}

// begin has clients write and read registers of their own until end.
func (in *installation) begin(t *testing.T) *history { return in.beginWith(t, requestLimit) }

// beginWith is begin with a limit for each request.
func (in *installation) beginWith(t *testing.T, limit time.Duration) *history {
	t.Helper()
	name := strings.ToLower(t.Name()[strings.LastIndex(t.Name(), "/")+1:])
	ctx, cancel := context.WithCancel(context.Background())
	h := &history{name: name, start: time.Now(), cancel: cancel}
	t.Cleanup(func() { cancel(); h.clients.Wait() })
	for _, tenant := range in.tenants {
		for i := range registers {
			c := newRegisterClient(t, tenant, in.anyHost(t))
			eventually(t, "there is a register in "+tenant.name, func() error {
				_, err := c.do(ctx, http.MethodPost, "", object(h.register(i), "0"))
				if err != nil && strings.Contains(err.Error(), "AlreadyExists") {
					err = nil // an attempt before had no answer
				}
				return err
			})
		}
	}
	for _, tenant := range in.tenants {
		for n, host := range in.hosts {
			c := newRegisterClient(t, tenant, host)
			c.limit, c.http.Timeout = limit, limit
			h.clients.Go(func() { h.client(ctx, c, n) })
		}
	}
	return h
}

func (h *history) register(i int) string { return fmt.Sprintf("%s-%d", h.name, i) }

// client is one of them: it writes, and reads in two ways.
func (h *history) client(ctx context.Context, c *registerClient, number int) {
	for n := number; ctx.Err() == nil; n++ {
		op := operation{tenant: c.tenant.name, host: c.host.name, register: h.register(n / 4 % registers), begin: time.Since(h.start)}
		switch n % 4 {
		case 0, 2:
			op.kind, op.value = write, fmt.Sprintf("%s.%d", c.host.name, n)
			_, op.err = c.do(context.WithoutCancel(ctx), http.MethodPut, op.register, object(op.register, op.value))
		case 1:
			op.kind = get
			op.value, op.err = c.read(op.register)
		case 3:
			op.kind = list
			op.value, op.err = c.list(op.register)
		}
		op.end = time.Since(h.start)
		if s, ok := op.err.(*statusError); ok {
			op.refused = s.code >= 400 && s.code < 500
		}
		h.mu.Lock()
		h.ops = append(h.ops, op)
		h.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(think):
		}
	}
}

// now is the time in the history.
func (h *history) now() time.Duration { return time.Since(h.start) }

// soFar is what has happened so far, of each client in order.
func (h *history) soFar() []operation {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.ops)
}

// awaitAnswers waits until each tenant has answered through each of the hosts a write
// and a read that began after a time, and returns how long after it the last of the
// first writes was acknowledged, for each tenant.
func (h *history) awaitAnswers(t testing.TB, after time.Duration, tenants []*tenant, through ...*host) map[string]time.Duration {
	t.Helper()
	answered := map[string]time.Duration{}
	eventually(t, "tenants answer", func() error {
		seen := map[[3]string]time.Duration{} // tenant, host, kind: the first end
		for _, op := range h.soFar() {
			key := [3]string{op.tenant, op.host, string(op.kind)}
			if _, ok := seen[key]; !ok && op.err == nil && op.begin > after {
				seen[key] = op.end
			}
		}
		for _, tenant := range tenants {
			for _, host := range through {
				for _, k := range []kind{write, get, list} {
					end, ok := seen[[3]string{tenant.name, host.name, string(k)}]
					if !ok {
						return fmt.Errorf("%s through %s: no %s since the fault. The last: %v", tenant.name, host.name, k, h.last(tenant, host))
					}
					if k == write {
						answered[tenant.name] = max(answered[tenant.name], end-after)
					}
				}
			}
		}
		return nil
	})
	return answered
}

// last is the last failure.
func (h *history) last(tenant *tenant, host *host) error {
	for _, op := range slices.Backward(h.soFar()) {
		if op.tenant == tenant.name && op.host == host.name && op.err != nil {
			return op.err
		}
	}
	return nil
}

// end ends the clients and checks what they saw. It returns what failed.
func (h *history) end(t testing.TB) []operation {
	t.Helper()
	h.cancel()
	h.clients.Wait()
	var failed []operation
	byRegister := map[string][]operation{}
	counts := map[kind]int{}
	for _, op := range h.ops {
		if op.err != nil {
			failed = append(failed, op)
		} else {
			counts[op.kind]++
		}
		key := op.tenant + "/" + op.register
		byRegister[key] = append(byRegister[key], op)
	}
	if counts[write] == 0 || counts[get] == 0 || counts[list] == 0 {
		t.Errorf("a history without acknowledged writes and reads shows nothing: %v", counts)
	}
	for name, ops := range byRegister {
		result, info := porcupine.CheckOperationsVerbose(model, certain(ops), patience)
		if result == porcupine.Ok {
			continue
		}
		file := filepath.Join(os.TempDir(), "tenantd-e2e-"+strings.ReplaceAll(name, "/", "-")+".html")
		t.Errorf("%s: what clients saw is not linearizable (%s); %s shows it (%v)", name, result, file, porcupine.VisualizePath(model, info, file))
	}
	t.Logf("history: %d writes, %d GETs and %d LISTs answered, %d requests failed, in %s", counts[write], counts[get], counts[list], len(failed), h.now().Round(time.Second))
	return failed
}

// request is what goes into the model, and a value is what comes out.
type request struct {
	write bool
	value string
}

// model is a register that holds 0 at first.
var model = porcupine.Model{
	Init: func() any { return "0" },
	Step: func(state, input, output any) (bool, any) {
		if in := input.(request); in.write {
			return true, in.value
		}
		return output == state, state
	},
	DescribeOperation: func(input, output any) string {
		if in := input.(request); in.write {
			return "write " + in.value
		}
		return fmt.Sprintf("read %v", output)
	},
}

// certain is a register's history for the checker. A read that failed says nothing. A
// write that failed may have happened at any time since, or never. If nobody has read
// what it wrote it makes no difference, and is left out: each value is written once.
func certain(ops []operation) []porcupine.Operation {
	read := map[string]bool{}
	for _, op := range ops {
		if op.kind != write && op.err == nil {
			read[op.value] = true
		}
	}
	numbers := map[string]int{}
	var all []porcupine.Operation
	for _, op := range ops {
		if _, ok := numbers[op.host]; !ok {
			numbers[op.host] = len(numbers)
		}
		o := porcupine.Operation{ClientId: numbers[op.host], Call: int64(op.begin), Return: int64(op.end)}
		switch {
		case op.kind != write && op.err != nil:
			continue
		case op.kind != write:
			o.Input, o.Output = request{}, op.value
		case op.err == nil || read[op.value] && !op.refused:
			o.Input = request{true, op.value}
			if op.err != nil {
				o.Return = math.MaxInt64
			}
		default:
			continue // where what was refused has been read, the reader has nobody to have it from
		}
		all = append(all, o)
	}
	return all
}

// TestChecker wants the checker to find what it is there for.
func TestChecker(t *testing.T) {
	w := func(value string, begin, end time.Duration) operation {
		return operation{kind: write, value: value, begin: begin, end: end}
	}
	r := func(value string, begin, end time.Duration) operation {
		return operation{kind: get, value: value, begin: begin, end: end}
	}
	failed := func(op operation) operation {
		op.err = context.DeadlineExceeded
		return op
	}
	refused := func(op operation) operation {
		op.err, op.refused = &statusError{code: http.StatusConflict}, true
		return op
	}
	for _, c := range []struct {
		name string
		ops  []operation
		want porcupine.CheckResult
	}{
		{"in order", []operation{r("0", 0, 1), w("a", 2, 3), r("a", 4, 5)}, porcupine.Ok},
		{"a lost write", []operation{w("a", 2, 3), w("b", 4, 5), r("a", 6, 7)}, porcupine.Illegal},
		{"a stale read", []operation{w("a", 2, 9), r("a", 3, 4), r("0", 5, 6)}, porcupine.Illegal},
		{"at the same time", []operation{w("a", 2, 9), r("0", 3, 4), r("a", 5, 6)}, porcupine.Ok},
		{"failed and done", []operation{failed(w("a", 2, 3)), r("0", 4, 5), r("a", 6, 7)}, porcupine.Ok},
		{"failed and not done", []operation{failed(w("a", 2, 3)), r("0", 4, 5)}, porcupine.Ok},
		{"failed, done and undone", []operation{failed(w("a", 2, 3)), r("a", 4, 5), r("0", 6, 7)}, porcupine.Illegal},
		{"refused and done", []operation{refused(w("a", 2, 3)), r("a", 4, 5)}, porcupine.Illegal},
		{"nobody's", []operation{r("a", 4, 5)}, porcupine.Illegal},
	} {
		if got := porcupine.CheckOperationsTimeout(model, certain(c.ops), patience); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// registerClient is a client of one tenant through one host.
type registerClient struct {
	tenant *tenant
	host   *host
	config *rest.Config
	limit  time.Duration // of each request
	http   *http.Client  // a new one after each failure: the connection may be dead
}

func newRegisterClient(t testing.TB, tenant *tenant, host *host) *registerClient {
	t.Helper()
	c := &registerClient{tenant: tenant, host: host, config: tenant.through(host, clients), limit: requestLimit}
	if err := c.renew(); err != nil {
		t.Fatal(err)
	}
	return c
}

// renew has the next request use a connection of its own.
func (c *registerClient) renew() error {
	tls, err := rest.TLSConfigFor(c.config)
	if err != nil {
		return err
	}
	if c.http != nil {
		c.http.CloseIdleConnections()
	}
	c.http = &http.Client{Timeout: c.limit, Transport: &http.Transport{TLSClientConfig: tls, DialContext: c.config.Dial, ForceAttemptHTTP2: true}}
	return nil
}

// statusError is an answer that is not 2xx.
type statusError struct {
	code   int
	answer string
}

func (e *statusError) Error() string { return fmt.Sprintf("%d: %s", e.code, e.answer) }

// do sends one request, once, for the ConfigMap of a name, or for all with a query,
// and returns the answer.
func (c *registerClient) do(ctx context.Context, method, name string, body []byte) (answer []byte, err error) {
	defer func() {
		if _, answered := err.(*statusError); err != nil && !answered {
			if e := c.renew(); e != nil {
				err = e
			}
		}
	}()
	path := "/api/v1/namespaces/default/configmaps"
	if name != "" && name[0] != '?' {
		path += "/"
	}
	path += name
	req, err := http.NewRequestWithContext(ctx, method, c.config.Host+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if answer, err = io.ReadAll(resp.Body); err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		return nil, &statusError{resp.StatusCode, string(answer)}
	}
	return answer, nil
}

// configMap is as much of one as a register needs.
type configMap struct {
	APIVersion string            `json:"apiVersion,omitempty"`
	Kind       string            `json:"kind,omitempty"`
	Metadata   map[string]any    `json:"metadata"`
	Data       map[string]string `json:"data"`
}

func object(name, value string) []byte {
	raw, err := json.Marshal(configMap{"v1", "ConfigMap", map[string]any{"name": name}, map[string]string{"value": value}})
	if err != nil {
		panic(err) // there is nothing in it that JSON has not
	}
	return raw
}

// read reads a register out of etcd.
func (c *registerClient) read(register string) (string, error) {
	answer, err := c.do(context.Background(), http.MethodGet, register, nil)
	if s, ok := err.(*statusError); ok && s.code == http.StatusNotFound {
		return "", nil // the value of no register
	}
	if err != nil {
		return "", err
	}
	var object configMap
	if err := json.Unmarshal(answer, &object); err != nil {
		return "", err
	}
	return object.Data["value"], nil
}

// list reads a register out of the watch cache, which has to be as new as etcd.
func (c *registerClient) list(register string) (string, error) {
	answer, err := c.do(context.Background(), http.MethodGet, "?fieldSelector=metadata.name%3D"+register, nil)
	if err != nil {
		return "", err
	}
	var all struct {
		Items []configMap `json:"items"`
	}
	if err := json.Unmarshal(answer, &all); err != nil {
		return "", err
	}
	if len(all.Items) != 1 {
		return "", nil // the value of no register
	}
	return all.Items[0].Data["value"], nil
}

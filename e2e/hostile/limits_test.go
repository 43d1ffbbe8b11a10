// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var getOptions metav1.GetOptions

// limits are attempts to use more than one's share.
func limits() []attack {
	return []attack{
		{
			name:  "TooMuchStored",
			tries: "more CustomResourceDefinitions and larger objects than spec.limits permits",
			must:  "each is refused with 429 and the limit's name; others can be stored, and what is there can be deleted",
			spec:  "limits: {objectSize: 64Ki, customResourceDefinitions: 2}",
			run:   tooMuchStored,
		},
		{
			name:      "TooManyObjects",
			tries:     "objects up to spec.limits.objects, while the daemon stops and starts",
			must:      "one more is refused with 429 and the limit's name; the full tenant starts, answers and lets objects be deleted",
			spec:      "limits: {objects: 1000}",
			plant:     tooManyObjects,
			restarted: fullTenant,
		},
		{
			name:  "TooManyPerSecond",
			tries: "requests without pause over a limit of ten a second",
			must:  "some are refused with 429, the limit's name and Retry-After",
			spec:  "limits: {requestsPerSecond: 10}",
			run:   tooManyPerSecond,
		},
		{
			name:  "TooManyInFlight",
			tries: "requests that wait for a webhook which never answers, over a limit of ten",
			must:  "those beyond are refused with 429 and the limit's name",
			spec:  "limits: {requestsInFlight: 10}",
			run:   tooManyInFlight,
		},
		{
			name:  "TooManyWatches",
			tries: "watches over a limit of a hundred",
			must:  "those beyond are refused with 429 and the limit's name",
			spec:  "limits: {watches: 100}",
			run:   tooManyWatches,
		},
	}
}

// isLimit checks that an answer names the limit that was reached.
func isLimit(t testing.TB, what string, status int, answer, limit string) {
	t.Helper()
	if status != http.StatusTooManyRequests || !strings.Contains(answer, "spec.limits."+limit) {
		t.Errorf("%s: %d %.300s, which should be 429 and name spec.limits.%s", what, status, answer, limit)
	}
}

const configMaps = "/api/v1/namespaces/default/configmaps"

func configMap(name string, size int) io.Reader {
	return strings.NewReader(fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q},"data":{"a":%q}}`, name, strings.Repeat("x", size)))
}

func tooMuchStored(t *testing.T, a *attacker) {
	status, answer := a.raw(http.MethodPost, configMaps, "application/json", configMap("large", 100<<10))
	isLimit(t, "a large object", status, answer, "objectSize")
	if status, answer := a.raw(http.MethodPost, configMaps, "application/json", configMap("small", 10<<10)); status != http.StatusCreated {
		t.Errorf("a small object: %d %.300s", status, answer)
	}
	for i := range 3 {
		crd := fmt.Sprintf(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"things.n%[1]d.example.com"},"spec":{"group":"n%[1]d.example.com","scope":"Cluster","names":{"kind":"Thing","plural":"things"},
"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object"}}}]}}`, i)
		status, answer := a.raw(http.MethodPost, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "application/json", strings.NewReader(crd))
		switch {
		case i == 2:
			isLimit(t, "one CRD more", status, answer, "customResourceDefinitions")
		case status != http.StatusCreated:
			t.Fatalf("CRD %d: %d %.300s", i, status, answer)
		}
	}
	// Deleted before it is served, a definition may take upstream minutes to go.
	if r := a.kubectl("", "wait", "--for=condition=Established", "crd/things.n0.example.com", "--timeout", patience.String()); r.code != 0 {
		t.Errorf("a CRD is not served: %s", r.stderr)
	}
	if r := a.kubectl("", "delete", "crd", "things.n0.example.com", "--timeout", patience.String()); r.code != 0 {
		t.Errorf("delete a CRD: %s", r.stderr)
	}
}

// fill creates objects whose names begin like that until one is refused, and returns
// the refusal.
func (a *attacker) fill(prefix string) (int, string) {
	a.t.Helper()
	httpClient, err := httpClientFor(a.config())
	if err != nil {
		a.t.Fatal(err)
	}
	for i := range 2000 {
		resp, err := httpClient.Post(a.config().Host+configMaps, "application/json", configMap(fmt.Sprintf("%s-%d", prefix, i), 10))
		if err != nil {
			a.t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			a.t.Fatal(err)
		}
		if resp.StatusCode != http.StatusCreated && resp.Header.Get("Retry-After") == "" {
			return resp.StatusCode, string(body)
		}
	}
	return http.StatusOK, "2000 objects were stored"
}

func tooManyObjects(t *testing.T, a *attacker) {
	status, answer := a.fill("fill")
	isLimit(t, "one object more", status, answer, "objects")
}

func fullTenant(t *testing.T, a *attacker) {
	a.awaitReady()
	if status, answer := a.raw(http.MethodGet, configMaps+"/fill-0", "", nil); status != http.StatusOK {
		t.Errorf("read: %d %.200s", status, answer)
	}
	status, answer := a.fill("more")
	isLimit(t, "one object more after a restart", status, answer, "objects")
	if r := a.kubectl("", "-n", "default", "delete", "configmaps", "fill-0", "fill-1", "fill-2", "fill-3", "fill-4", "fill-5", "fill-6", "fill-7", "fill-8", "fill-9"); r.code != 0 {
		t.Errorf("delete: %s", r.stderr)
	}
	if status, answer := a.raw(http.MethodPost, configMaps, "application/json", configMap("room", 10)); status != http.StatusCreated {
		t.Errorf("there is no room after objects were deleted: %d %.200s", status, answer)
	}
}

// refusals sends n requests at once and returns the answers with 429.
func (a *attacker) refusals(n int, send func(*http.Client, string, int) (*http.Response, error)) []*http.Response {
	a.t.Helper()
	cfg := a.config()
	httpClient, err := httpClientFor(cfg)
	if err != nil {
		a.t.Fatal(err)
	}
	defer httpClient.CloseIdleConnections()
	var mu sync.Mutex // guards refused
	var refused []*http.Response
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			resp, err := send(httpClient, cfg.Host, i)
			if err != nil {
				return
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusTooManyRequests {
				return
			}
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				return
			}
			resp.Body = io.NopCloser(strings.NewReader(string(body)))
			mu.Lock()
			defer mu.Unlock()
			refused = append(refused, resp)
		})
	}
	all.Wait()
	return refused
}

// refusedFor checks that all refusals name the limit, and that there are some.
func (a *attacker) refusedFor(limit string, refused []*http.Response) {
	a.t.Helper()
	if len(refused) == 0 {
		a.t.Errorf("no request was refused for spec.limits.%s", limit)
	}
	for _, resp := range refused {
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			a.t.Fatal(err)
		}
		isLimit(a.t, "a request too many", resp.StatusCode, string(body), limit)
		if resp.Header.Get("Retry-After") == "" {
			a.t.Error("a request too many is refused without Retry-After")
		}
	}
}

func tooManyPerSecond(t *testing.T, a *attacker) {
	a.refusedFor("requestsPerSecond", a.refusals(200, func(c *http.Client, host string, _ int) (*http.Response, error) {
		return c.Get(host + "/api/v1/namespaces/default")
	}))
}

func tooManyInFlight(t *testing.T, a *attacker) {
	w := a.worker(t)
	release := make(chan struct{})
	w.serve(a.service("silent"), http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	a.apply(fmt.Sprintf(webhook, "silent", `{service: {namespace: default, name: silent}, caBundle: `+w.caBundle+`}`))
	eventually(t, "the webhook is asked", func() error {
		status, answer, err := request(a.config(), http.MethodPost, configMaps+"?timeout=1s", "application/json", strings.NewReader(asking))
		if err != nil || status < 400 {
			return fmt.Errorf("%d %s, %v", status, answer, err)
		}
		return nil
	})
	refused := a.refusals(40, func(c *http.Client, host string, _ int) (*http.Response, error) {
		return c.Post(host+configMaps+"?timeout=10s", "application/json", strings.NewReader(asking))
	})
	close(release)
	a.refusedFor("requestsInFlight", refused)
}

const asking = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"asks-","namespace":"default","labels":{"ask":"silent"}}}`

func tooManyWatches(t *testing.T, a *attacker) {
	a.refusedFor("watches", a.refusals(160, func(c *http.Client, host string, _ int) (*http.Response, error) {
		resp, err := c.Get(host + configMaps + "?watch=true&timeoutSeconds=5&resourceVersion=0")
		if err == nil && resp.StatusCode == http.StatusOK {
			io.Copy(io.Discard, resp.Body) // to its end
		}
		return resp, err
	}))
}

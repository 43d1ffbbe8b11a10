// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

func httpClientFor(cfg *rest.Config) (*http.Client, error) { return rest.HTTPClientFor(cfg) }

const (
	// endless is what an answer without end has. It ends all the same, so that the
	// daemon that reads all of it survives to tell.
	endless = 192 << 20
	// bounded is what the daemon may read of an answer, with what is under way.
	bounded = 48 << 20
)

// flood is a handler that answers without end, and knows how much was read of it.
type flood struct {
	head string // what answers begin with
	zip  bool   // as a gzip bomb

	mu     sync.Mutex // guards what follows
	asked  map[string]int
	read   map[string]int64 // the most that was read of one answer, by path
	accept map[string]string
}

func (f *flood) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	if f.asked == nil {
		f.asked, f.read, f.accept = map[string]int{}, map[string]int64{}, map[string]string{}
	}
	f.accept[r.URL.Path] = r.Header.Get("Accept-Encoding")
	f.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	out := io.Writer(w)
	if f.zip {
		w.Header().Set("Content-Encoding", "gzip")
		zipped := gzip.NewWriter(w)
		defer zipped.Close()
		out = zipped
	}
	io.WriteString(out, f.head)
	n, _ := io.Copy(out, io.LimitReader(spaces{}, endless))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked[r.URL.Path]++
	f.read[r.URL.Path] = max(f.read[r.URL.Path], n)
}

// ended is how often an answer at the path has come to its end, and the most that
// was read of one.
func (f *flood) ended(path string) (int, int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[path], f.read[path]
}

// spaces has no end, and is JSON.
type spaces struct{}

func (spaces) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

// service makes a Service and returns where it is in the worker's network.
func (a *attacker) service(name string) string {
	a.t.Helper()
	a.apply(fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: default}
spec: {ports: [{port: 443}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s, namespace: default, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
endpoints: [{addresses: [10.244.0.9], conditions: {ready: true}}]
ports: [{port: 443}]
`, name))
	return a.kubectl("", "-n", "default", "get", "service", name, "-o", "jsonpath={.spec.clusterIP}").stdout + ":443"
}

func endlessWebhook(t *testing.T, a *attacker) {
	const head = `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":"x","allowed":true}`
	floods := map[string]*flood{"plain": {head: head}, "zipped": {head: head, zip: true}}
	w := a.worker(t)
	for _, name := range sortedKeys(floods) {
		w.serve(a.service(name), floods[name])
		a.apply(fmt.Sprintf(webhook, name, `{service: {namespace: default, name: `+name+`}, caBundle: `+w.caBundle+`}`))
		eventually(t, "the webhook is asked", func() error {
			if r := a.ask(name); r.code == 0 {
				return errors.New("created all the same")
			}
			if asked, _ := floods[name].ended("/"); asked == 0 {
				return errors.New("not asked yet")
			}
			return nil
		})
	}
	if _, read := floods["plain"].ended("/"); read > bounded {
		t.Errorf("%d MiB of a webhook's answer were read", read>>20)
	}
	// Small as it travels, it must not be made large.
	if accept := floods["zipped"].accept["/"]; accept != "" {
		t.Errorf("a webhook is asked for %q", accept)
	}
}

func endlessConversion(t *testing.T, a *attacker) {
	w := a.worker(t)
	converter := &flood{head: `{"apiVersion":"apiextensions.k8s.io/v1","kind":"ConversionReview","response":{"uid":"x"`}
	w.serve(a.service("convert"), converter)
	a.apply(fmt.Sprintf(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: calls.endless.example.com}
spec:
  group: endless.example.com
  scope: Cluster
  names: {kind: Call, plural: calls}
  conversion:
    strategy: Webhook
    webhook: {conversionReviewVersions: [v1], clientConfig: {service: {namespace: default, name: convert}, caBundle: %s}}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
  - {name: v2, served: true, storage: false, schema: {openAPIV3Schema: {type: object}}}
`, w.caBundle))
	a.kubectl("", "wait", "--for=condition=Established", "crd/calls.endless.example.com", "--timeout", patience.String())
	eventually(t, "an object is stored", func() error {
		if r := a.kubectl(`{"apiVersion":"endless.example.com/v1","kind":"Call","metadata":{"name":"one"}}`, "create", "-f", "-"); r.code != 0 {
			return errors.New(r.stderr)
		}
		return nil
	})
	eventually(t, "the webhook is asked", func() error {
		if status, answer := a.raw(http.MethodGet, "/apis/endless.example.com/v2/calls/one", "", nil); status < 400 {
			t.Fatalf("the object was converted: %d %s", status, answer)
		}
		if asked, _ := converter.ended("/"); asked == 0 {
			return errors.New("not asked yet")
		}
		return nil
	})
	if _, read := converter.ended("/"); read > bounded {
		t.Errorf("%d MiB of a conversion's answer were read", read>>20)
	}
	if accept := converter.accept["/"]; accept != "" {
		t.Errorf("a conversion is asked for %q", accept)
	}
}

// apiService is an APIService behind a Service of the same name.
const apiService = `
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.%[1]s.example.com}
spec:
  group: %[1]s.example.com
  version: v1
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
  service: {namespace: default, name: %[1]s}
`

// isServed checks that what is asked of every API server is answered.
func (a *attacker) isServed(t *testing.T) {
	t.Helper()
	for _, path := range []string{"/apis", "/api/v1", "/openapi/v2", "/openapi/v3", "/api/v1/namespaces/default/configmaps", "/apis/apps/v1", "/readyz"} {
		if status, answer := a.raw(http.MethodGet, path, "", nil); status != http.StatusOK {
			t.Errorf("GET %s: %d %.200s", path, status, answer)
		}
	}
}

func endlessAPI(t *testing.T, a *attacker) {
	w := a.worker(t)
	documents := &flood{head: "{"}
	w.serve(a.service("endless"), http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/apis/endless.example.com/v1" { // or it is not available
			rw.Header().Set("Content-Type", "application/json")
			io.WriteString(rw, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"endless.example.com/v1","resources":[]}`)
			return
		}
		documents.ServeHTTP(rw, r)
	}))
	a.apply(fmt.Sprintf(apiService, "endless"))
	if r := a.kubectl("", "wait", "--for=condition=Available", "apiservice/v1.endless.example.com", "--timeout", patience.String()); r.code != 0 {
		t.Fatal(r.stderr)
	}
	for _, path := range []string{"/apis", "/openapi/v2", "/openapi/v3"} {
		eventually(t, path+" of the API is asked for", func() error {
			asked, read := documents.ended(path)
			if asked == 0 {
				return errors.New("not asked yet")
			}
			if read > bounded {
				t.Errorf("%d MiB of %s were read", read>>20, path)
			}
			return nil
		})
	}
	a.isServed(t)
}

func garbageAPI(t *testing.T, a *attacker) {
	const deep = 100_000
	nested := strings.Repeat(`{"properties":{"a":`, deep) + `{"type":"string"}` + strings.Repeat("}}", deep)
	arrays := strings.Repeat("[", deep) + strings.Repeat("]", deep)
	const cyclic = `{"A":{"$ref":"#/%[1]s/B"},"B":{"$ref":"#/%[1]s/A"},"C":{"type":"object","properties":{"c":{"$ref":"#/%[1]s/C"}},"allOf":[{"$ref":"#/%[1]s/C"}]}}`
	v2 := func(definitions string) string {
		return `{"swagger":"2.0","info":{"title":"x","version":"v1"},"paths":{"/apis/x/":{"get":{"responses":{"200":{"description":"","schema":{"$ref":"#/definitions/C"}}}}}},"definitions":` + definitions + `}`
	}
	v3 := func(schemas string) string {
		return `{"openapi":"3.0.0","info":{"title":"x","version":"v1"},"paths":{},"components":{"schemas":` + schemas + `}}`
	}
	kinds := map[string]struct{ v2, v3, discovery string }{
		"cyclic":  {v2(fmt.Sprintf(cyclic, "definitions")), v3(fmt.Sprintf(cyclic, "components/schemas")), ""},
		"nested":  {v2(`{"C":` + nested + `}`), v3(`{"C":` + nested + `}`), arrays},
		"garbage": {"\x00\xff", "null", "{"},
		"arrays":  {arrays, arrays, "[]"},
		"wrong":   {`{"swagger":"2.0","definitions":{"io.k8s.api.core.v1.Pod":{"type":"array"}},"paths":{"/api/v1/pods":null}}`, v3(`{"io.k8s.api.core.v1.Pod":null}`), `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"pods","kind":"Pod","verbs":["*"]},{"name":"","kind":""}]}`},
	}
	w := a.worker(t)
	var mu sync.Mutex // guards asked
	asked := map[string]bool{}
	for _, name := range sortedKeys(kinds) {
		k := kinds[name]
		w.serve(a.service(name), http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			mu.Lock()
			asked[name+r.URL.Path] = true
			mu.Unlock()
			rw.Header().Set("Content-Type", "application/json")
			switch {
			case r.URL.Path == "/openapi/v2":
				io.WriteString(rw, k.v2)
			case r.URL.Path == "/openapi/v3":
				fmt.Fprintf(rw, `{"paths":{"apis/%[1]s.example.com/v1":{"serverRelativeURL":"/openapi/v3/apis/%[1]s.example.com/v1?hash=x"},"api/v1":{"serverRelativeURL":"http://169.254.169.254/"}}}`, name)
			case strings.HasPrefix(r.URL.Path, "/openapi/v3/"):
				io.WriteString(rw, k.v3)
			case r.URL.Path == "/apis" && name == "wrong":
				http.Redirect(rw, r, "http://169.254.169.254/latest/meta-data/", http.StatusFound)
			case k.discovery != "":
				io.WriteString(rw, k.discovery)
			default:
				fmt.Fprintf(rw, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"%s.example.com/v1","resources":[]}`, name)
			}
		}))
		a.apply(fmt.Sprintf(apiService, name))
	}
	for _, name := range sortedKeys(kinds) {
		eventually(t, "the documents of "+name+" are asked for", func() error {
			mu.Lock()
			defer mu.Unlock()
			if !asked[name+"/openapi/v2"] || !asked[name+"/openapi/v3"] {
				return fmt.Errorf("asked for were %q", sortedKeys(asked))
			}
			return nil
		})
		a.raw(http.MethodGet, "/openapi/v3/apis/"+name+".example.com/v1", "", nil)
		a.raw(http.MethodGet, "/apis/"+name+".example.com/v1", "", nil)
		a.raw(http.MethodGet, "/apis/"+name+".example.com", "", nil)
	}
	a.isServed(t)
}

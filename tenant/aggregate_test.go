// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	apiregistration "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	aggregatorclient "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"

	"github.com/tenantd/tenantd/konnectivity/agent"
	"github.com/tenantd/tenantd/sni"
	"github.com/tenantd/tenantd/tenant"
)

// worker is a control plane with a tunnel into this machine's network, and a server
// there that does what a test wants.
type worker struct {
	*running
	t        *testing.T
	config   *rest.Config
	client   kubernetes.Interface
	services *aggregatorclient.Clientset

	port    int32
	ca      []byte // of the server
	handler atomic.Pointer[http.HandlerFunc]
	sent    atomic.Int64 // bytes that flood has got rid of
}

func newWorker(t *testing.T) *worker {
	t.Helper()
	b := newBench(t)
	const name = "a"
	tunnel, err := b.router.Listen(sni.ListenConfig{Tenant: name, Names: []string{name + ".k8s.test"}, Protocols: []string{tenant.TunnelProtocol}})
	if err != nil {
		t.Fatal(err)
	}
	b.change = func(c *tenant.Config) { c.Tunnel = []net.Listener{tunnel} }
	w := &worker{running: b.start(name), t: t}
	w.config = b.client(w.running, name)
	w.config.QPS = -1
	w.client = b.admin(w.running, name)
	if w.services, err = aggregatorclient.NewForConfig(w.config); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		if h := w.handler.Load(); h != nil {
			(*h)(rw, req)
			return
		}
		http.NotFound(rw, req)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(func() {
		w.stop()
		server.CloseClientConnections()
		server.Close()
	})
	w.ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	w.port = int32(server.Listener.Addr().(*net.TCPAddr).Port)

	cert, key, _, err := w.authority.IssueClient(t.Context(), "system:node:w", []string{"system:nodes"}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(w.authority.CA())
	a, err := agent.New(agent.Config{
		Node: "w", Servers: func() []string { return []string{b.address} }, ServerName: name + ".k8s.test",
		RootCAs:     func() (*x509.CertPool, error) { return roots, nil },
		Certificate: func() (*tls.Certificate, error) { return &pair, nil },
		Allow:       func(netip.AddrPort) bool { return true },
		Logger:      b.log,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var agents sync.WaitGroup
	agents.Go(func() { a.Run(ctx) })
	t.Cleanup(func() { cancel(); agents.Wait() })

	_, err = w.client.CoreV1().Services("default").Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "outside"},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "localhost"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *worker) serve(h http.HandlerFunc) { w.handler.Store(&h) }

// flood writes until the other side has had enough. Compressed, it is a bomb: a
// gigabyte that is a megabyte on the way.
func (w *worker) flood(rw http.ResponseWriter, req *http.Request, start string, compress bool) {
	var out io.Writer = &countingWriter{rw, &w.sent}
	if compress {
		if req.Header.Get("Accept-Encoding") != "" {
			w.t.Errorf("%s: %q is accepted", req.URL.Path, req.Header.Get("Accept-Encoding"))
		}
		rw.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(out)
		defer z.Close()
		out = z
	}
	io.WriteString(out, start)
	chunk := bytes.Repeat([]byte("x"), 1<<20)
	for range 1 << 10 { // a gigabyte
		if _, err := out.Write(chunk); err != nil {
			return
		}
	}
}

type countingWriter struct {
	io.Writer
	n *atomic.Int64
}

func (w *countingWriter) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	w.n.Add(int64(n))
	return n, err
}

func (w *worker) eventually(what string, check func() error) {
	w.t.Helper()
	var err error
	for range 600 {
		if err = check(); err == nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	w.t.Fatalf("%s: %v", what, err)
}

// register adds an APIService that this test's server serves.
func (w *worker) register(group, version string) {
	w.t.Helper()
	_, err := w.services.ApiregistrationV1().APIServices().Create(w.t.Context(), &apiregistration.APIService{
		ObjectMeta: metav1.ObjectMeta{Name: version + "." + group},
		Spec: apiregistration.APIServiceSpec{
			Group: group, Version: version, GroupPriorityMinimum: 100, VersionPriority: 100, InsecureSkipTLSVerify: true,
			Service: &apiregistration.ServiceReference{Namespace: "default", Name: "outside", Port: &w.port},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *worker) get(path string) (string, error) {
	body, err := w.client.Discovery().RESTClient().Get().AbsPath(path).DoRaw(w.t.Context())
	return string(body), err
}

const greetings = `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"egress.test/v1","resources":[
{"name":"greetings","singularName":"greeting","namespaced":false,"kind":"Greeting","verbs":["get","list","delete","watch"]}]}`

func openAPI(group string) string {
	definition := group + ".v1.Greeting"
	return fmt.Sprintf(`{"swagger":"2.0","info":{"title":"t","version":"v1"},"paths":{"/apis/%s/v1/greetings":{"get":{"operationId":"list","responses":{"200":{"description":"OK","schema":{"$ref":"#/definitions/%s"}}}}}},
"definitions":{%q:{"description":"A friendly word.","type":"object","properties":{"self":{"$ref":"#/definitions/%s"}},"x-kubernetes-group-version-kind":[{"group":%q,"kind":"Greeting","version":"v1"}]}}}`,
		group, definition, definition, definition, group)
}

// An aggregated API is found, described, read, watched and removed as ever.
func TestAggregatedAPI(t *testing.T) {
	w := newWorker(t)
	events := make(chan string)
	w.serve(func(rw http.ResponseWriter, req *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		switch {
		case req.URL.Path == "/apis/egress.test/v1":
			io.WriteString(rw, greetings)
		case req.URL.Path == "/openapi/v2":
			io.WriteString(rw, openAPI("egress.test"))
		case req.URL.Path == "/apis/egress.test/v1/greetings" && req.URL.Query().Get("watch") != "":
			rw.(http.Flusher).Flush()
			for {
				select {
				case e := <-events:
					io.WriteString(rw, e+"\n")
					rw.(http.Flusher).Flush()
				case <-req.Context().Done():
					return
				}
			}
		case strings.HasPrefix(req.URL.Path, "/apis/egress.test/v1/"):
			fmt.Fprintf(rw, `{"kind":"Greeting","apiVersion":"egress.test/v1","user":%q,"path":%q}`, req.Header.Get("X-Remote-User"), req.URL.Path)
		default:
			http.NotFound(rw, req)
		}
	})
	w.register("egress.test", "v1")
	w.eventually("the API is available", func() error {
		s, err := w.services.ApiregistrationV1().APIServices().Get(t.Context(), "v1.egress.test", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range s.Status.Conditions {
			if c.Type == apiregistration.Available && c.Status == apiregistration.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("%+v", s.Status)
	})
	w.eventually("it is in the discovery document", func() error {
		list, err := w.client.Discovery().ServerPreferredResources()
		if err != nil {
			return err
		}
		for _, l := range list {
			if l.GroupVersion == "egress.test/v1" && len(l.APIResources) == 1 {
				return nil
			}
		}
		return errors.New("not there")
	})
	for _, path := range []string{"/apis", "/apis/egress.test"} {
		if got, err := w.get(path); err != nil || !strings.Contains(got, "egress.test/v1") {
			t.Errorf("%s: %v %s", path, err, got)
		}
	}
	got, err := w.get("/apis/egress.test/v1/greetings/hello")
	if err != nil || !strings.Contains(got, `"user":"admin"`) || !strings.Contains(got, "/greetings/hello") {
		t.Errorf("%v %s", err, got)
	}
	for _, path := range []string{"/openapi/v2", "/openapi/v3"} {
		w.eventually("it is in "+path, func() error {
			got, err := w.get(path)
			if err == nil && !strings.Contains(got, "egress.test") {
				err = errors.New("not there")
			}
			return err
		})
	}
	if got, err := w.get("/openapi/v3/apis/egress.test/v1"); err != nil || !strings.Contains(got, "A friendly word.") {
		t.Errorf("%v %s", err, got)
	}

	stream, err := w.client.Discovery().RESTClient().Get().AbsPath("/apis/egress.test/v1/greetings").Param("watch", "true").Stream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	decoder := json.NewDecoder(stream)
	for i := range 3 {
		events <- `{"type":"ADDED","object":{"n":` + strconv.Itoa(i) + `}}`
		var event struct{ Object struct{ N int } }
		if err := decoder.Decode(&event); err != nil || event.Object.N != i {
			t.Fatalf("%v %+v", err, event)
		}
	}

	if err := w.services.ApiregistrationV1().APIServices().Delete(t.Context(), "v1.egress.test", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("it is gone", func() error {
		if _, err := w.get("/apis/egress.test/v1/greetings/hello"); !apierrors.IsNotFound(err) {
			return fmt.Errorf("still there: %v", err)
		}
		if got, err := w.get("/openapi/v2"); err != nil || strings.Contains(got, "egress.test") {
			return fmt.Errorf("still described: %v", err)
		}
		return nil
	})
}

// The documents of an aggregated API that has no end are not read to their end, and
// what is wrong with them can be read.
func TestEndlessDocuments(t *testing.T) {
	for _, compress := range []bool{false, true} {
		t.Run(fmt.Sprintf("compressed=%t", compress), func(t *testing.T) {
			w := newWorker(t)
			asked := make(chan string, 100)
			w.serve(func(rw http.ResponseWriter, req *http.Request) {
				if req.URL.Path == "/apis/egress.test/v1" && req.Header.Get("Accept") == "" {
					return // whether it is available
				}
				rw.Header().Set("Content-Type", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
				w.flood(rw, req, `{"swagger":"2.0","info":{"title":"`, compress)
				select {
				case asked <- req.URL.Path:
				default:
				}
			})
			w.register("egress.test", "v1")
			missing := map[string]bool{"/apis": true, "/openapi/v2": true, "/openapi/v3": true}
			for len(missing) > 0 {
				select {
				case path := <-asked:
					delete(missing, path)
				case <-time.After(2 * time.Minute):
					t.Fatalf("nobody has asked for %v", missing)
				}
			}
			if sent := w.sent.Load(); sent > 256<<20 {
				t.Errorf("%d MB were read", sent>>20)
			}
		})
	}
}

// Of a webhook's answer no more is read than a review can be large.
func TestEndlessWebhook(t *testing.T) {
	w := newWorker(t)
	url := fmt.Sprintf("https://127.0.0.1:%d/admit", w.port)
	fail, none := admissionregistrationv1.Fail, admissionregistrationv1.SideEffectClassNone
	for _, compress := range []bool{false, true} {
		w.sent.Store(0)
		w.serve(func(rw http.ResponseWriter, req *http.Request) {
			rw.Header().Set("Content-Type", "application/json")
			w.flood(rw, req, `{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","response":{"auditAnnotations":{"a":"`, compress)
		})
		name := fmt.Sprintf("endless-%t", compress)
		_, err := w.client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(t.Context(), &admissionregistrationv1.ValidatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Webhooks: []admissionregistrationv1.ValidatingWebhook{{
				Name: "endless.egress.test", AdmissionReviewVersions: []string{"v1"}, SideEffects: &none, FailurePolicy: &fail,
				ClientConfig: admissionregistrationv1.WebhookClientConfig{URL: &url, CABundle: w.ca},
				Rules: []admissionregistrationv1.RuleWithOperations{{
					Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create},
					Rule:       admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
				}},
			}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		w.eventually("the webhook is asked", func() error {
			_, err := w.client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "x-"}}, metav1.CreateOptions{})
			if err == nil {
				return errors.New("it was not")
			}
			if !compress && !strings.Contains(err.Error(), fmt.Sprintf("127.0.0.1:%d is larger than", w.port)) {
				t.Errorf("the answer says %v", err)
			}
			return nil
		})
		if sent := w.sent.Load(); sent == 0 || sent > 64<<20 {
			t.Errorf("compressed=%t: %d MB were read", compress, sent>>20)
		}
		if err := w.client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// References in circles do not end the process, which is this test's.
func TestCircularReferences(t *testing.T) {
	w := newWorker(t)
	const group = "egress.test"
	described := map[string]string{
		"itself":     `{"p":{"$ref":"#/parameters/p"}}`,
		"each other": `{"p":{"$ref":"#/parameters/q"},"q":{"$ref":"#/parameters/p"}}`,
		"schema":     `{"p":{"name":"p","in":"body","schema":{"allOf":[{"$ref":"#/parameters/p"}]}}}`,
		"items":      `{"p":{"name":"p","in":"query","type":"array","items":{"$ref":"#/parameters/p"}}}`,
		"escaped":    `{"p":{"\u0024ref":"#/par\u0061meters/p"}}`,
		"percent":    `{"p":{"$ref":"#/%70arameters/p"}}`,
		"definition": `{"p":{"name":"p","in":"body","schema":{"$ref":"#/definitions/` + group + `.v1.Greeting"}}}`,
	}
	var parameters atomic.Pointer[string]
	asked := make(chan struct{}, 100)
	w.serve(func(rw http.ResponseWriter, req *http.Request) {
		rw.Header().Set("Content-Type", "application/json")
		switch req.URL.Path {
		case "/apis/egress.test/v1":
			io.WriteString(rw, greetings)
		case "/openapi/v2":
			document := strings.Replace(openAPI(group), `"get":{`, `"parameters":[{"$ref":"#/parameters/p"}],"get":{`, 1)
			document = strings.Replace(document, `{"swagger":`, `{"Parameters":{"p":{}},"parameters":`+*parameters.Load()+`,"PARAMETERS":{"p":{}},"swagger":`, 1)
			io.WriteString(rw, document)
			asked <- struct{}{}
		default:
			http.NotFound(rw, req)
		}
	})
	for name, p := range described {
		parameters.Store(&p)
		w.register(group, "v1")
		for range 2 { // for v2, and for v3, which is made of it
			<-asked
		}
		if name == "definition" {
			w.eventually("it is described", func() error {
				got, err := w.get("/openapi/v2")
				if err == nil && !strings.Contains(got, "A friendly word.") {
					err = errors.New("not there")
				}
				return err
			})
		}
		got, err := w.get("/openapi/v2")
		if err != nil || strings.Contains(got, "A friendly word.") != (name == "definition") {
			t.Errorf("%s: %v", name, err)
		}
		if err := w.services.ApiregistrationV1().APIServices().Delete(t.Context(), "v1."+group, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("it is gone", func() error {
			if _, err := w.get("/apis/egress.test/v1"); !apierrors.IsNotFound(err) {
				return fmt.Errorf("still there: %v", err)
			}
			return nil
		})
		for len(asked) > 0 {
			<-asked
		}
	}
}

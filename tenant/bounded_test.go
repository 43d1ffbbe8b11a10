// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"google.golang.org/protobuf/encoding/protowire"
)

// nested is a CRD whose schema has depth levels.
func nested(depth int) *apiextensionsv1.CustomResourceDefinition {
	schema := &apiextensionsv1.JSONSchemaProps{Type: "string"}
	for range depth - 1 {
		schema = &apiextensionsv1.JSONSchemaProps{Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{"a": *schema}}
	}
	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "deeps.egress.test"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "egress.test", Scope: apiextensionsv1.ClusterScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "deeps", Kind: "Deep"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: schema},
			}},
		},
	}
}

// bottomless is the protobuf of an object that contains one of its kind, which contains
// another, and so on, in a field of that number. The outermost is in the fields of path,
// the innermost of them first. What decodes it without a bound overflows the stack.
func bottomless(apiVersion, kind string, size int, field protowire.Number, path ...protowire.Number) []byte {
	var backwards []byte
	prepend := func(field protowire.Number, n int) {
		head := protowire.AppendVarint(protowire.AppendTag(nil, field, protowire.BytesType), uint64(n))
		for i := len(head) - 1; i >= 0; i-- {
			backwards = append(backwards, head[i])
		}
	}
	for len(backwards) < size {
		prepend(field, len(backwards))
	}
	for _, field := range path {
		prepend(field, len(backwards))
	}
	slices.Reverse(backwards)
	object, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: apiVersion, Kind: kind}, Raw: backwards}).Marshal()
	if err != nil {
		panic(err)
	}
	return append([]byte("k8s\x00"), object...)
}

// deepCRD is a CRD with a schema that negates a schema that negates a schema.
func deepCRD(size int) []byte {
	return bottomless("apiextensions.k8s.io/v1", "CustomResourceDefinition", size, 28, 1 /* openAPIV3Schema */, 4 /* schema */, 7 /* versions */, 2 /* spec */)
}

// No schema is so deep that upstream's recursion ends the process.
func TestDeepSchemas(t *testing.T) {
	b := newBench(t)
	r := b.start("a")
	config := b.client(r, "a")
	client, err := apiextensionsclient.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	post := func(contentType string, body []byte) error {
		return client.ApiextensionsV1().RESTClient().Post().Resource("customresourcedefinitions").
			SetHeader("Content-Type", contentType).Body(body).Do(t.Context()).Error()
	}
	const protobuf = "application/vnd.kubernetes.protobuf"
	for _, contentType := range []string{protobuf, "application/json", ""} {
		if err := post(contentType, deepCRD(2_900_000)); !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), "nested") {
			t.Errorf("protobuf without a bottom as %q: %v", contentType, err)
		}
	}
	if err := post(protobuf, deepCRD(20_000)); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "nested more than 200 deep") {
		t.Errorf("a deep schema in protobuf: %v", err)
	}
	// What is asked for need not be what is sent.
	admin := b.admin(r, "a")
	err = admin.CoreV1().RESTClient().Post().Namespace("default").Resource("configmaps").SetHeader("Content-Type", protobuf).
		Body(bottomless("scheduling.k8s.io/v1beta1", "Workload", 2_900_000, 9, 3 /* compositePodGroupTemplates */, 2 /* spec */)).Do(t.Context()).Error()
	if !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), "nested") {
		t.Errorf("a workload without a bottom: %v", err)
	}
	body := []byte(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"deeps.egress.test"},"spec":{"group":"egress.test","scope":"Cluster",` +
		`"names":{"plural":"deeps","kind":"Deep"},"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":` +
		strings.Repeat(`{"not":`, 9_000) + `{}` + strings.Repeat(`}`, 9_000) + `}}]}}`)
	if err := post("application/json", body); !apierrors.IsForbidden(err) {
		t.Errorf("a deep schema in JSON: %v", err)
	}
	// Protobuf as clients send it.
	config.ContentType = protobuf
	if client, err = apiextensionsclient.NewForConfig(config); err != nil {
		t.Fatal(err)
	}
	crds := client.ApiextensionsV1().CustomResourceDefinitions()
	crd, err := crds.Create(t.Context(), nested(100), metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("a schema that is not too deep: %v", err)
	}
	crd.Spec.Versions = nested(201).Spec.Versions
	if _, err := crds.Update(t.Context(), crd, metav1.UpdateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a schema that becomes deep: %v", err)
	}
}

// nodes/proxy does not have the host look for the name of a node.
func TestNodesAreNotLookedUp(t *testing.T) {
	lookedUp := make(chan string, 10)
	old := net.DefaultResolver
	defer func() { net.DefaultResolver = old }()
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		lookedUp <- address
		return nil, errors.New("no DNS in this test")
	}}
	b := newBench(t)
	r := b.start("a")
	admin := b.admin(r, "a")
	for name, address := range map[string]corev1.NodeAddress{
		"by-name": {Type: corev1.NodeHostName, Address: "secret.exfiltrated.example.com"},
		"as-ip":   {Type: corev1.NodeInternalIP, Address: "internal.example.com"},
		"sloppy":  {Type: corev1.NodeInternalIP, Address: "010.1.2.3"},
	} {
		if _, err := admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		patch := fmt.Sprintf(`{"status":{"addresses":[{"type":%q,"address":%q}]}}`, address.Type, address.Address)
		if _, err := admin.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status"); err != nil {
			t.Fatal(err)
		}
		for _, node := range []string{name, "https:" + name + ":10250"} {
			err := admin.CoreV1().RESTClient().Get().Resource("nodes").Name(node).SubResource("proxy").Do(t.Context()).Error()
			if !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), "no IP address") {
				t.Errorf("%s: %v", node, err)
			}
		}
	}
	select {
	case address := <-lookedUp:
		t.Errorf("a name was asked for at %s", address)
	default:
	}
}

// A page whose links are rewritten is not read without end.
func TestEndlessPage(t *testing.T) {
	w := newWorker(t)
	w.serve(func(rw http.ResponseWriter, req *http.Request) {})
	w.register("egress.test", "v1")
	const page = "/apis/egress.test/v1/page"
	w.eventually("the API answers", func() error { _, err := w.get(page); return err })
	for _, coding := range []string{"", "gzip", "deflate"} {
		w.sent.Store(0)
		w.serve(func(rw http.ResponseWriter, req *http.Request) {
			if req.URL.Path != page {
				return
			}
			rw.Header().Set("Content-Type", "text/html; charset=utf-8")
			if coding != "" {
				req.Header.Del("Accept-Encoding") // it is passed on from the client
				rw.Header().Set("Content-Encoding", coding)
			}
			w.flood(rw, req, "<html>", coding == "gzip")
		})
		got, err := w.get(page)
		if err == nil {
			t.Errorf("%q: %d bytes", coding, len(got))
		}
		if sent := w.sent.Load(); sent == 0 || sent > 64<<20 {
			t.Errorf("%q: %d MB were read", coding, sent>>20)
		}
	}
	w.serve(func(rw http.ResponseWriter, req *http.Request) {
		rw.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(rw, `<a href="https://localhost:%d/somewhere">here</a>`, w.port)
	})
	if got, err := w.get(page); err != nil || !strings.Contains(got, "/somewhere") {
		t.Errorf("a page: %v %s", err, got)
	}
}

// The control plane's own components take no more of an aggregated API than they can
// bear; its users do.
func TestEndlessListForOwnComponents(t *testing.T) {
	w := newWorker(t)
	answer := func(rw http.ResponseWriter, items int) {
		rw.Header().Set("Content-Type", "application/json")
		fmt.Fprint(rw, `{"kind":"GreetingList","apiVersion":"egress.test/v1","metadata":{},"items":[{}`)
		for range items / 1000 {
			fmt.Fprint(rw, strings.Repeat(",{}", 1000))
		}
		fmt.Fprint(rw, "]}")
	}
	var items int
	w.serve(func(rw http.ResponseWriter, req *http.Request) {
		switch req.URL.Path {
		case "/apis/egress.test/v1":
			rw.Header().Set("Content-Type", "application/json")
			fmt.Fprint(rw, greetings)
		case "/apis/egress.test/v1/greetings":
			answer(rw, items)
		default:
			http.NotFound(rw, req)
		}
	})
	w.register("egress.test", "v1")
	const path = "/apis/egress.test/v1/greetings"
	w.eventually("the API answers", func() error { _, err := w.get(path); return err })
	own, err := kubernetes.NewForConfig(rest.CopyConfig(w.RESTConfig()))
	if err != nil {
		t.Fatal(err)
	}
	list := func(c kubernetes.Interface) (int, error) {
		body, err := c.Discovery().RESTClient().Get().AbsPath(path).DoRaw(t.Context())
		return len(body), err
	}
	items = 100_000
	if n, err := list(own); err != nil || n < 3*items {
		t.Errorf("what is not too much: %d bytes, %v", n, err)
	}
	items = 1_000_000
	// It is cut off, so that nobody takes it for a list.
	if n, err := list(own); err == nil && n >= 3*items {
		t.Errorf("%d bytes were read", n)
	}
	if n, err := list(w.client); err != nil || n < 3*items {
		t.Errorf("a user has got %d bytes: %v", n, err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// fakePlane answers as the system plane does, as far as tenantctl asks: it judges no
// values and starts no tenant; a test says what happens to them.
type fakePlane struct {
	t   *testing.T
	url string

	onCreate func(*v1alpha1.Tenant) // in place of a host
	refuse   func(r *http.Request) *apierrors.StatusError

	mu         sync.Mutex
	tenants    *store[*v1alpha1.Tenant]
	hosts      *store[*v1alpha1.Host]
	created    map[string]any // the body of the last creation
	dropWatch  int            // watches to end at once
	kubeconfig v1alpha1.KubeconfigRequest
	token      v1alpha1.JoinTokenRequest
	worker     v1alpha1.WorkerConfigRequestStatus
	hostToken  v1alpha1.HostTokenRequest
	hostAnswer v1alpha1.HostTokenRequestStatus
}

// store has the objects of one kind.
type store[T client.Object] struct {
	plane    *fakePlane
	resource string
	empty    T // to be copied

	onDelete func(T) // nil: gone at once
	onPatch  func(T) // after a change

	// The plane's mu guards what follows.
	objects map[string]T
	watches []chan metav1.WatchEvent
	patched []string // the bodies of all changes
}

func startPlane(t *testing.T) *fakePlane {
	t.Helper()
	p := &fakePlane{t: t}
	p.tenants = &store[*v1alpha1.Tenant]{plane: p, resource: "tenants", empty: &v1alpha1.Tenant{}, objects: map[string]*v1alpha1.Tenant{}}
	p.hosts = &store[*v1alpha1.Host]{plane: p, resource: "hosts", empty: &v1alpha1.Host{}, objects: map[string]*v1alpha1.Host{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /readyz", func(http.ResponseWriter, *http.Request) {})
	p.tenants.serve(mux)
	p.hosts.serve(mux)
	mux.HandleFunc("POST /apis/tenantd.io/v1alpha1/tenants", p.create)
	mux.HandleFunc("POST /apis/credentials.tenantd.io/v1alpha1/hosts/{name}/{subresource}", p.hostCredentials)
	mux.HandleFunc("POST /apis/credentials.tenantd.io/v1alpha1/tenants/{name}/{subresource}", p.credentials)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.refuse != nil {
			if err := p.refuse(r); err != nil {
				p.fail(w, err)
				return
			}
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		server.CloseClientConnections() // a watch that a test left open
		server.Close()
	})
	p.url = server.URL
	return p
}

// kubeconfigFile writes a kubeconfig of the plane.
func (p *fakePlane) kubeconfigFile() string {
	p.t.Helper()
	path := filepath.Join(p.t.TempDir(), "admin.kubeconfig")
	writeKubeconfig(p.t, path, p.url)
	return path
}

func writeKubeconfig(t *testing.T, path, server string) {
	t.Helper()
	config := clientcmdapi.NewConfig()
	config.Clusters["system"] = &clientcmdapi.Cluster{Server: server}
	config.Contexts["system"] = &clientcmdapi.Context{Cluster: "system"}
	config.CurrentContext = "system"
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
}

// set makes or changes a tenant.
func (p *fakePlane) set(name string, change func(*v1alpha1.Tenant)) { p.tenants.set(name, change) }

func (p *fakePlane) remove(name string) { p.tenants.remove(name) }

func (s *store[T]) serve(mux *http.ServeMux) {
	path := "/apis/tenantd.io/v1alpha1/" + s.resource
	mux.HandleFunc("GET "+path, s.list)
	mux.HandleFunc("GET "+path+"/{name}", s.get)
	mux.HandleFunc("PATCH "+path+"/{name}", s.patch)
	mux.HandleFunc("DELETE "+path+"/{name}", s.delete)
}

// set makes or changes an object, and those who watch see it.
func (s *store[T]) set(name string, change func(T)) {
	s.plane.mu.Lock()
	defer s.plane.mu.Unlock()
	object, event := s.objects[name], "MODIFIED"
	if _, ok := s.objects[name]; !ok {
		object, event = s.empty.DeepCopyObject().(T), "ADDED"
		object.SetName(name)
		object.SetUID(types.UID("uid-of-" + name))
		object.SetGeneration(1)
	}
	object = object.DeepCopyObject().(T) // what was sent before stays as it was
	change(object)
	s.objects[name] = object
	s.send(event, object)
}

func (s *store[T]) remove(name string) {
	s.plane.mu.Lock()
	defer s.plane.mu.Unlock()
	object := s.objects[name]
	delete(s.objects, name)
	s.send("DELETED", object)
}

// send tells those who watch. The caller holds mu.
func (s *store[T]) send(event string, object T) {
	for _, w := range s.watches {
		w <- watchEvent(event, object)
	}
}

func watchEvent(event string, object client.Object) metav1.WatchEvent {
	e := metav1.WatchEvent{Type: event}
	e.Object.Object = object.DeepCopyObject()
	setType(e.Object.Object)
	return e
}

func (p *fakePlane) answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		p.t.Errorf("answer: %v", err)
	}
}

func (p *fakePlane) fail(w http.ResponseWriter, err *apierrors.StatusError) {
	status := err.Status()
	status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	p.answer(w, int(status.Code), status)
}

var tenantResource = schema.GroupResource{Group: "tenantd.io", Resource: "tenants"}

// find answers that there is no such object, if so.
func (s *store[T]) find(w http.ResponseWriter, r *http.Request) (T, bool) {
	s.plane.mu.Lock()
	object, ok := s.objects[r.PathValue("name")]
	s.plane.mu.Unlock()
	if !ok {
		s.plane.fail(w, apierrors.NewNotFound(schema.GroupResource{Group: "tenantd.io", Resource: s.resource}, r.PathValue("name")))
	}
	return object, ok
}

func (s *store[T]) list(w http.ResponseWriter, r *http.Request) {
	name, _ := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	if r.URL.Query().Get("watch") == "true" {
		s.watch(w, r, name)
		return
	}
	s.plane.mu.Lock()
	defer s.plane.mu.Unlock()
	items := []T{}
	for _, object := range s.objects {
		items = append(items, object)
	}
	slices.SortFunc(items, func(a, b T) int { return cmp.Compare(a.GetName(), b.GetName()) })
	s.plane.answer(w, http.StatusOK, map[string]any{"apiVersion": v1alpha1.GroupVersion.String(), "items": items})
}

func (s *store[T]) watch(w http.ResponseWriter, r *http.Request, name string) {
	p := s.plane
	events := make(chan metav1.WatchEvent, 100)
	p.mu.Lock()
	if p.dropWatch > 0 {
		p.dropWatch--
		p.mu.Unlock()
		w.WriteHeader(http.StatusOK)
		return
	}
	if object, ok := s.objects[name]; ok {
		events <- watchEvent("ADDED", object)
	}
	s.watches = append(s.watches, events)
	p.mu.Unlock()

	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e := <-events:
			data, err := json.Marshal(map[string]any{"type": e.Type, "object": e.Object.Object})
			if err != nil {
				p.t.Errorf("watch: %v", err)
			}
			fmt.Fprintf(w, "%s\n", data)
			w.(http.Flusher).Flush()
		}
	}
}

func (p *fakePlane) create(w http.ResponseWriter, r *http.Request) {
	var body map[string]any
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		p.t.Errorf("create: %v", err)
	}
	data, _ := json.Marshal(body)
	var t v1alpha1.Tenant
	if err := json.Unmarshal(data, &t); err != nil {
		p.t.Errorf("create: %v", err)
	}
	p.mu.Lock()
	p.created = body
	_, exists := p.tenants.objects[t.Name]
	p.mu.Unlock()
	if exists {
		p.fail(w, apierrors.NewAlreadyExists(tenantResource, t.Name))
		return
	}
	p.set(t.Name, func(stored *v1alpha1.Tenant) { stored.Spec = t.Spec })
	if p.onCreate != nil {
		p.onCreate(&t)
	}
	p.answer(w, http.StatusCreated, body)
}

func (s *store[T]) get(w http.ResponseWriter, r *http.Request) {
	if object, ok := s.find(w, r); ok {
		s.plane.answer(w, http.StatusOK, object)
	}
}

// patch changes an object. A new spec is a new generation; a status is not changed so.
func (s *store[T]) patch(w http.ResponseWriter, r *http.Request) {
	p := s.plane
	if _, ok := s.find(w, r); !ok {
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil || r.Header.Get("Content-Type") != string(types.MergePatchType) {
		p.t.Errorf("patch of type %q: %v", r.Header.Get("Content-Type"), err)
	}
	var sent map[string]any
	if err := json.Unmarshal(body, &sent); err != nil {
		p.t.Errorf("patch: %v", err)
	}
	if _, ok := sent["status"]; ok {
		p.t.Errorf("patch of a status: %s", body)
	}
	s.set(r.PathValue("name"), func(object T) {
		s.patched = append(s.patched, string(body))
		before, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
		if err != nil {
			p.t.Errorf("patch: %v", err)
		}
		merge(before, sent)
		reflect.ValueOf(object).Elem().SetZero() // or what is taken away stays
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(before, object); err != nil {
			p.t.Errorf("patch: %v", err)
		}
		if _, ok := sent["spec"]; ok {
			object.SetGeneration(object.GetGeneration() + 1)
		}
	})
	object, ok := s.find(w, r)
	if !ok {
		return
	}
	if s.onPatch != nil {
		s.onPatch(object)
	}
	p.answer(w, http.StatusOK, object)
}

// merge changes object as a JSON merge patch (RFC 7396) says.
func merge(object, patch map[string]any) {
	for name, value := range patch {
		switch value := value.(type) {
		case nil:
			delete(object, name)
		case map[string]any:
			below, ok := object[name].(map[string]any)
			if !ok {
				below = map[string]any{}
			}
			merge(below, value)
			object[name] = below
		default:
			object[name] = value
		}
	}
}

func (s *store[T]) delete(w http.ResponseWriter, r *http.Request) {
	p := s.plane
	var options metav1.DeleteOptions
	if err := json.NewDecoder(r.Body).Decode(&options); err != nil {
		p.t.Errorf("delete: %v", err)
	}
	object, ok := s.find(w, r)
	if !ok {
		return
	}
	if options.Preconditions == nil || options.Preconditions.UID == nil || *options.Preconditions.UID != object.GetUID() {
		p.t.Errorf("delete of %s without its UID: %+v", object.GetName(), options)
	}
	if s.onDelete == nil {
		s.remove(object.GetName())
	} else {
		s.onDelete(object)
	}
	p.answer(w, http.StatusOK, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusSuccess})
}

// hostCredentials answers as a host is to answer.
func (p *fakePlane) hostCredentials(w http.ResponseWriter, r *http.Request) {
	if r.PathValue("subresource") != v1alpha1.HostTokenSubresource || r.PathValue("name") != v1alpha1.AnyHost {
		http.NotFound(w, r)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hostToken = v1alpha1.HostTokenRequest{}
	if err := json.NewDecoder(r.Body).Decode(&p.hostToken); err != nil {
		p.t.Errorf("token: %v", err)
	}
	answer := p.hostToken
	answer.Status = p.hostAnswer
	p.answer(w, http.StatusCreated, answer)
}

// credentials answers as the host is to answer, with made-up secrets.
func (p *fakePlane) credentials(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.tenants.objects[name]
	if t == nil {
		p.fail(w, apierrors.NewNotFound(tenantResource, name))
		return
	}
	switch r.PathValue("subresource") {
	case v1alpha1.KubeconfigSubresource:
		p.kubeconfig = v1alpha1.KubeconfigRequest{}
		if err := json.NewDecoder(r.Body).Decode(&p.kubeconfig); err != nil {
			p.t.Errorf("kubeconfig: %v", err)
		}
		request := &p.kubeconfig
		config := clientcmdapi.NewConfig()
		config.Clusters[name] = &clientcmdapi.Cluster{Server: cmp.Or(request.Spec.Server, "https://"+name+".example.com:443"), CertificateAuthorityData: []byte("authority of " + t.UID)}
		config.AuthInfos[request.Spec.User] = &clientcmdapi.AuthInfo{ClientCertificateData: []byte("certificate"), ClientKeyData: []byte("key")}
		config.Contexts[request.Spec.User+"@"+name] = &clientcmdapi.Context{Cluster: name, AuthInfo: request.Spec.User, Namespace: "default"}
		config.CurrentContext = request.Spec.User + "@" + name
		answer := *request
		var err error
		if answer.Status.Kubeconfig, err = clientcmd.Write(*config); err != nil {
			p.t.Errorf("kubeconfig: %v", err)
		}
		p.answer(w, http.StatusCreated, answer)
	case v1alpha1.JoinTokenSubresource:
		p.token = v1alpha1.JoinTokenRequest{}
		if err := json.NewDecoder(r.Body).Decode(&p.token); err != nil {
			p.t.Errorf("jointoken: %v", err)
		}
		answer := p.token
		answer.Status = v1alpha1.JoinTokenRequestStatus{Token: "abcdef.0123456789abcdef", CACertHashes: []string{"sha256:00", "sha256:11"}, Endpoint: name + ".example.com:443"}
		p.answer(w, http.StatusCreated, answer)
	case v1alpha1.WorkerConfigSubresource:
		answer := v1alpha1.WorkerConfigRequest{Status: p.worker}
		answer.SetDefaults()
		p.answer(w, http.StatusCreated, answer)
	default:
		http.NotFound(w, r)
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// fakePlane answers as the system plane does, as far as tenantctl asks: it judges no
// values and starts no tenant; a test says what happens to them.
type fakePlane struct {
	t   *testing.T
	url string

	onCreate func(*v1alpha1.Tenant) // in place of a host
	onDelete func(*v1alpha1.Tenant) // nil: gone at once
	refuse   func(r *http.Request) *apierrors.StatusError

	mu         sync.Mutex
	tenants    map[string]*v1alpha1.Tenant
	created    map[string]any // the body of the last creation
	watches    []chan metav1.WatchEvent
	dropWatch  int // watches to end at once
	kubeconfig v1alpha1.KubeconfigRequest
	token      v1alpha1.JoinTokenRequest
	worker     v1alpha1.WorkerConfigRequestStatus
}

func startPlane(t *testing.T) *fakePlane {
	t.Helper()
	p := &fakePlane{t: t, tenants: map[string]*v1alpha1.Tenant{}}
	const tenants = "/apis/tenantd.io/v1alpha1/tenants"
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+tenants, p.list)
	mux.HandleFunc("POST "+tenants, p.create)
	mux.HandleFunc("GET "+tenants+"/{name}", p.get)
	mux.HandleFunc("DELETE "+tenants+"/{name}", p.delete)
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

// set makes or changes a tenant, and those who watch see it.
func (p *fakePlane) set(name string, change func(*v1alpha1.Tenant)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t, event := p.tenants[name], "MODIFIED"
	if t == nil {
		t, event = &v1alpha1.Tenant{}, "ADDED"
		t.Name, t.UID, t.Generation = name, types.UID("uid-of-"+name), 1
	}
	t = t.DeepCopy() // what was sent before stays as it was
	change(t)
	p.tenants[name] = t
	p.send(event, t)
}

func (p *fakePlane) remove(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.tenants[name]
	delete(p.tenants, name)
	p.send("DELETED", t)
}

// send tells those who watch. The caller holds mu.
func (p *fakePlane) send(event string, t *v1alpha1.Tenant) {
	for _, w := range p.watches {
		w <- watchEvent(event, t)
	}
}

func watchEvent(event string, t *v1alpha1.Tenant) metav1.WatchEvent {
	e := metav1.WatchEvent{Type: event}
	t = t.DeepCopy()
	setType(t)
	e.Object.Object = t
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

func (p *fakePlane) list(w http.ResponseWriter, r *http.Request) {
	name, _ := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	if r.URL.Query().Get("watch") == "true" {
		p.watch(w, r, name)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	list := &v1alpha1.TenantList{TypeMeta: typeMeta("TenantList")}
	for _, t := range p.tenants {
		list.Items = append(list.Items, *t)
	}
	slices.SortFunc(list.Items, func(a, b v1alpha1.Tenant) int { return cmp.Compare(a.Name, b.Name) })
	p.answer(w, http.StatusOK, list)
}

func (p *fakePlane) watch(w http.ResponseWriter, r *http.Request, name string) {
	events := make(chan metav1.WatchEvent, 100)
	p.mu.Lock()
	if p.dropWatch > 0 {
		p.dropWatch--
		p.mu.Unlock()
		w.WriteHeader(http.StatusOK)
		return
	}
	if t := p.tenants[name]; t != nil {
		events <- watchEvent("ADDED", t)
	}
	p.watches = append(p.watches, events)
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
	_, exists := p.tenants[t.Name]
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

func (p *fakePlane) get(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	t := p.tenants[r.PathValue("name")]
	p.mu.Unlock()
	if t == nil {
		p.fail(w, apierrors.NewNotFound(tenantResource, r.PathValue("name")))
		return
	}
	p.answer(w, http.StatusOK, t)
}

func (p *fakePlane) delete(w http.ResponseWriter, r *http.Request) {
	var options metav1.DeleteOptions
	if err := json.NewDecoder(r.Body).Decode(&options); err != nil {
		p.t.Errorf("delete: %v", err)
	}
	p.mu.Lock()
	t := p.tenants[r.PathValue("name")]
	p.mu.Unlock()
	if t == nil {
		p.fail(w, apierrors.NewNotFound(tenantResource, r.PathValue("name")))
		return
	}
	if options.Preconditions == nil || options.Preconditions.UID == nil || *options.Preconditions.UID != t.UID {
		p.t.Errorf("delete of %s without its UID: %+v", t.Name, options)
	}
	if p.onDelete == nil {
		p.remove(t.Name)
	} else {
		p.onDelete(t)
	}
	p.answer(w, http.StatusOK, metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusSuccess})
}

// credentials answers as the host is to answer, with made-up secrets.
func (p *fakePlane) credentials(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.tenants[name]
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

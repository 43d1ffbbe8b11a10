// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fakehost is a host of tenantd for tests and benchmarks of the worker's
// side: the real router in front of an HTTPS server that answers the few questions
// that a worker has. It imports package sni of ours.
//
//	tenant := fakehost.NewTenant("acme.k8s.example.com", "172.20.0.1")
//	host, err := tenant.Listen("127.0.0.1:0")
//	defer host.Close()
package fakehost

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/tenantd/tenantd/sni"
)

// protocol is the one of the carrier TLS.
const protocol = "tenantd-api"

// Tenant is a tenant's authority and what its API server says. Its methods are
// safe for concurrent use.
type Tenant struct {
	Hostname string
	CA       []byte         // PEM
	Roots    *x509.CertPool // of it
	Serving  tls.Certificate

	authority *x509.Certificate
	key       *ecdsa.PrivateKey

	mu                   sync.Mutex // guards what follows
	hosts                string
	konnectivityHostname string
	nodes                map[string][]string
	clusterConfiguration string
}

// NewTenant makes an authority, and a serving certificate for the names and
// addresses.
func NewTenant(hostname string, others ...string) *Tenant {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(240 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der := must(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))
	t := &Tenant{
		Hostname: hostname, authority: must(x509.ParseCertificate(der)), key: key, Roots: x509.NewCertPool(),
		CA:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		nodes: map[string][]string{},
	}
	t.Roots.AddCert(t.authority)
	names := append([]string{hostname}, others...)
	certificate, keyPEM := t.issue(&x509.Certificate{Subject: pkix.Name{CommonName: "kube-apiserver"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, names)
	t.Serving = must(tls.X509KeyPair(certificate, keyPEM))
	return t
}

// Node issues a node's client certificate: PEM of it and of its key.
func (t *Tenant) Node(name string, until time.Time) (certificate, key []byte) {
	return t.issue(&x509.Certificate{
		Subject:     pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}},
		NotBefore:   time.Now().Add(-2 * time.Hour),
		NotAfter:    until,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, nil)
}

func (t *Tenant) issue(template *x509.Certificate, names []string) (certificate, keyPEM []byte) {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template.SerialNumber = must(rand.Int(rand.Reader, big.NewInt(1<<62)))
	template.KeyUsage = x509.KeyUsageDigitalSignature
	if template.NotAfter.IsZero() {
		template.NotBefore, template.NotAfter = t.authority.NotBefore, t.authority.NotAfter
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	der := must(x509.CreateCertificate(rand.Reader, template, t.authority, &key.PublicKey, t.key))
	keyDER := must(x509.MarshalPKCS8PrivateKey(key))
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}

// SetHosts sets the ConfigMap of hosts.
func (t *Tenant) SetHosts(hosts, konnectivityHostname string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hosts, t.konnectivityHostname = hosts, konnectivityHostname
}

// SetNode sets a node's addresses.
func (t *Tenant) SetNode(name string, addresses ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.nodes[name] = addresses
}

// SetNetworks sets what kubeadm was told.
func (t *Tenant) SetNetworks(clusterConfiguration string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.clusterConfiguration = clusterConfiguration
}

// Host is one host. Close it.
type Host struct {
	Address netip.AddrPort

	tenant *Tenant
	router *sni.Router
	server *http.Server
	ended  sync.WaitGroup
	stop   context.CancelFunc

	mu    sync.Mutex // guards what follows
	ready bool
	clock time.Duration
	asked map[string]int
	way   map[string]int
}

// Listen starts a host of the tenant. Konnectivity, if not nil, is called with the
// listener of the tunnel.
func (t *Tenant) Listen(address string, konnectivity ...func(net.Listener)) (*Host, error) {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	h := &Host{
		Address: ln.Addr().(*net.TCPAddr).AddrPort(), tenant: t, stop: stop, ready: true,
		router: sni.New(sni.Config{MaxPendingPerSource: 4096}), asked: map[string]int{}, way: map[string]int{},
	}
	direct := must(h.router.Listen(sni.ListenConfig{Tenant: "acme", Names: []string{t.Hostname}, Backlog: 4096}))
	outer := must(h.router.Listen(sni.ListenConfig{Tenant: "acme", Names: []string{t.Hostname}, Protocols: []string{protocol}, Backlog: 4096}))
	inner := &queue{conns: make(chan net.Conn), done: ctx.Done(), addr: ln.Addr()}
	h.server = &http.Server{
		Handler:           h.handler(),
		ReadHeaderTimeout: 32 * time.Second, // as upstream's, so that the router sees handshakes end
		TLSConfig: &tls.Config{
			Certificates: []tls.Certificate{t.Serving}, ClientCAs: t.Roots, ClientAuth: tls.VerifyClientCertIfGiven,
			NextProtos: []string{"h2", "http/1.1"},
		},
		ErrorLog: quiet(),
	}
	// All of them end when the host is closed, and with that as their error.
	h.ended.Go(func() { _ = h.router.Serve(ctx, ln) })
	h.ended.Go(func() { _ = h.server.ServeTLS(direct, "", "") })
	h.ended.Go(func() { _ = h.server.ServeTLS(inner, "", "") })
	h.ended.Go(func() { h.unwrap(ctx, outer, inner) })
	for _, serve := range konnectivity {
		tunnels := must(h.router.Listen(sni.ListenConfig{Tenant: "acme", Names: []string{t.Hostname}, Protocols: []string{"konnectivity"}}))
		h.ended.Go(func() { serve(tunnels) })
		context.AfterFunc(ctx, func() { tunnels.Close() })
	}
	context.AfterFunc(ctx, func() { direct.Close(); outer.Close() })
	return h, nil
}

// unwrap ends the outer connections and passes the inner ones on.
func (h *Host) unwrap(ctx context.Context, outer net.Listener, inner *queue) {
	cfg := &tls.Config{
		Certificates: []tls.Certificate{h.tenant.Serving}, ClientCAs: h.tenant.Roots, ClientAuth: tls.VerifyClientCertIfGiven,
		NextProtos: []string{protocol}, MinVersion: tls.VersionTLS13,
	}
	for {
		c, err := outer.Accept()
		if err != nil {
			return
		}
		h.ended.Go(func() {
			conn := tls.Server(c, cfg)
			if err := conn.HandshakeContext(ctx); err != nil {
				c.Close()
				return
			}
			h.count("tls")
			if len(conn.ConnectionState().PeerCertificates) > 0 {
				h.count("tls with certificate")
			}
			if !inner.pass(conn) {
				conn.Close()
			}
		})
	}
}

func (h *Host) count(way string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.way[way]++
}

// Outer returns how many outer connections there were, and how many of them had a
// certificate of a node.
func (h *Host) Outer() (all, certified int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.way["tls"], h.way["tls with certificate"]
}

// SetReady makes /readyz answer 200 or 503.
func (h *Host) SetReady(ready bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ready = ready
}

// SetClock makes the host's clock differ.
func (h *Host) SetClock(by time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock = by
}

// Asked returns how often a path was asked for.
func (h *Host) Asked(path string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked[path]
}

// Close ends the host and all its connections at once.
func (h *Host) Close() {
	h.stop()
	h.router.Close()
	h.server.Close()
	h.ended.Wait()
}

func (h *Host) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		h.mu.Lock()
		ready, clock := h.ready, h.clock
		h.mu.Unlock()
		w.Header().Set("Date", time.Now().Add(clock).UTC().Format(http.TimeFormat))
		if !ready {
			http.Error(w, "[-]etcd failed", http.StatusServiceUnavailable)
			return
		}
		io.WriteString(w, "ok")
	})
	// Who asks, and where.
	mux.HandleFunc("GET /whoami", func(w http.ResponseWriter, r *http.Request) {
		name := "anonymous"
		if len(r.TLS.PeerCertificates) > 0 {
			name = r.TLS.PeerCertificates[0].Subject.CommonName
		}
		fmt.Fprintf(w, "%s at %s", name, h.Address)
	})
	// A watch that never has anything to say.
	mux.HandleFunc("GET /watch", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	mux.HandleFunc("POST /echo", func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) })
	mux.HandleFunc("POST /swallow", func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	mux.HandleFunc("GET /bytes/{n}", func(w http.ResponseWriter, r *http.Request) {
		n, _ := strconv.ParseInt(r.PathValue("n"), 10, 64)
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		block := make([]byte, 64<<10)
		for n > 0 {
			m, err := w.Write(block[:min(int64(len(block)), n)])
			if err != nil {
				return
			}
			n -= int64(m)
		}
	})
	object := func(w http.ResponseWriter, r *http.Request, what any) {
		if len(r.TLS.PeerCertificates) == 0 {
			http.Error(w, `{"kind":"Status","code":403}`, http.StatusForbidden)
			return
		}
		_ = json.NewEncoder(w).Encode(what)
	}
	mux.HandleFunc("GET /api/v1/namespaces/kube-public/configmaps/tenantd-hosts", func(w http.ResponseWriter, r *http.Request) {
		h.tenant.mu.Lock()
		defer h.tenant.mu.Unlock()
		object(w, r, map[string]any{"data": map[string]string{"hosts": h.tenant.hosts, "konnectivityHostname": h.tenant.konnectivityHostname}})
	})
	mux.HandleFunc("GET /api/v1/namespaces/kube-system/configmaps/kubeadm-config", func(w http.ResponseWriter, r *http.Request) {
		h.tenant.mu.Lock()
		defer h.tenant.mu.Unlock()
		object(w, r, map[string]any{"data": map[string]string{"ClusterConfiguration": h.tenant.clusterConfiguration}})
	})
	mux.HandleFunc("GET /api/v1/nodes/{name}", func(w http.ResponseWriter, r *http.Request) {
		h.tenant.mu.Lock()
		defer h.tenant.mu.Unlock()
		addresses, ok := h.tenant.nodes[r.PathValue("name")]
		if !ok {
			http.Error(w, `{"kind":"Status","code":404}`, http.StatusNotFound)
			return
		}
		var all []map[string]string
		for _, a := range addresses {
			all = append(all, map[string]string{"type": "InternalIP", "address": a})
		}
		object(w, r, map[string]any{"status": map[string]any{"addresses": all}})
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		h.asked[r.URL.Path]++
		h.mu.Unlock()
		mux.ServeHTTP(w, r)
	})
}

// Kubeconfig is a kubelet's kubeconfig with its certificate in it.
func (t *Tenant) Kubeconfig(node string, until time.Time) string {
	certificate, key := t.Node(node, until)
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- cluster:
    certificate-authority-data: %s
    server: https://%s:443
  name: kubernetes
contexts:
- context:
    cluster: kubernetes
    user: "system:node:%s"
  name: "system:node:%s@kubernetes"
current-context: "system:node:%s@kubernetes"
users:
- name: "system:node:%s"
  user:
    client-certificate-data: %s
    client-key-data: %s
`, base64.StdEncoding.EncodeToString(t.CA), t.Hostname, node, node, node, node, base64.StdEncoding.EncodeToString(certificate), base64.StdEncoding.EncodeToString(key))
}

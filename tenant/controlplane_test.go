// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/sni"
	"github.com/tenantd/tenantd/storage"
	"github.com/tenantd/tenantd/tenant"
)

// bench is what several control planes of a test share.
type bench struct {
	t        *testing.T
	store    *storage.Store
	router   *sni.Router
	address  string
	platform *tenant.Platform
	sealer   *pki.Sealer
	log      *slog.Logger
	// The authorities' clock and leaves' lifetime; zero means the defaults.
	clock        func() time.Time
	leafLifetime time.Duration
	clients      []*http.Client
	// change, if set, changes the configurations of control planes.
	change func(*tenant.Config)
}

func newBench(t *testing.T) *bench {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	if err := tenant.PrepareProcess(log); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "tenant")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	store, err := storage.Open(t.Context(), storage.Config{Dir: dir, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	router := sni.New(sni.Config{Logger: log})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serving := make(chan error, 1)
	go func() { serving <- router.Serve(context.Background(), ln) }()
	t.Cleanup(func() {
		router.Close()
		if err := <-serving; err != nil {
			t.Error(err)
		}
	})
	platform, err := tenant.NewPlatform(tenant.PlatformConfig{Storage: store, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	sealer, err := pki.NewSealer(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	return &bench{t: t, store: store, router: router, address: ln.Addr().String(), platform: platform, sealer: sealer, log: log}
}

// running is a control plane and how to stop it.
type running struct {
	*tenant.ControlPlane
	authority *pki.Authority
	done      chan error // what Run returned; put it back
	stop      func() error
}

// start starts a control plane and waits until it is ready.
func (b *bench) start(name string) *running {
	b.t.Helper()
	r := b.begin(name)
	select {
	case <-r.Ready():
	case err := <-r.done:
		r.done <- err
		b.t.Fatalf("control plane ended before it was ready: %v", err)
	}
	return r
}

// begin starts a control plane.
func (b *bench) begin(name string) *running {
	b.t.Helper()
	prefix, err := b.store.Prefix(name)
	if err != nil {
		b.t.Fatal(err)
	}
	authority, err := pki.Open(b.t.Context(), pki.AuthorityConfig{
		Tenant: name, Storage: pki.NewStorage(b.store.Client(), prefix+"pki/", b.sealer), Logger: b.log,
		Clock: b.clock, LeafLifetime: b.leafLifetime, RenewInterval: b.leafLifetime / 6,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	hostname := name + ".k8s.test"
	ln, err := b.router.Listen(sni.ListenConfig{Tenant: name, Names: []string{hostname}})
	if err != nil {
		b.t.Fatal(err)
	}
	cfg := tenant.Config{Platform: b.platform, Name: name, UID: name, Hostname: hostname, Authority: authority, Listener: ln, Logger: b.log}
	if b.change != nil {
		b.change(&cfg)
	}
	cp, err := tenant.New(cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- cp.Run(ctx) }()
	r := &running{ControlPlane: cp, authority: authority, done: done}
	r.stop = func() error {
		cancel()
		err := <-done
		done <- err
		authority.Close()
		return err
	}
	b.t.Cleanup(func() { r.stop() })
	return r
}

// client is the configuration of an administrator of r who goes through the port
// and asks for name.
func (b *bench) client(r *running, name string) *rest.Config {
	b.t.Helper()
	cert, key, _, err := r.authority.IssueClient(b.t.Context(), "admin", []string{"system:masters"}, time.Hour)
	if err != nil {
		b.t.Fatal(err)
	}
	return &rest.Config{
		Host:            "https://" + b.address,
		TLSClientConfig: rest.TLSClientConfig{ServerName: name + ".k8s.test", CAData: r.authority.CA(), CertData: cert, KeyData: key},
	}
}

// admin is a client that goes through the port as a user's does.
func (b *bench) admin(r *running, name string) *kubernetes.Clientset {
	b.t.Helper()
	cfg := b.client(r, name)
	transport, err := rest.HTTPClientFor(cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.clients = append(b.clients, transport)
	client, err := kubernetes.NewForConfigAndClient(cfg, transport)
	if err != nil {
		b.t.Fatal(err)
	}
	return client
}

// closeClients closes the connections of all clients made so far.
func (b *bench) closeClients() {
	for _, c := range b.clients {
		c.CloseIdleConnections()
	}
}

// servingSerial is the serial number of the certificate that a new connection gets.
func (b *bench) servingSerial(r *running, name string) string {
	b.t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(r.authority.CA())
	conn, err := tls.Dial("tcp", b.address, &tls.Config{ServerName: name + ".k8s.test", RootCAs: roots})
	if err != nil {
		b.t.Fatal(err)
	}
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0].SerialNumber.String()
}

// Two control planes serve at once, and neither knows the other's administrator.
func TestSideBySide(t *testing.T) {
	b := newBench(t)
	a, c := b.start("a"), b.start("c")
	for name, r := range map[string]*running{"a": a, "c": c} {
		admin := b.admin(r, name)
		_, err := admin.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "mine-" + name}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		list, err := admin.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, cm := range list.Items {
			if cm.Name != "mine-"+name && cm.Name != "kube-root-ca.crt" {
				t.Errorf("%s sees %s", name, cm.Name)
			}
		}
	}
	// a's administrator at c's name.
	stranger := b.client(a, "c")
	stranger.CAData = c.authority.CA()
	client, err := kubernetes.NewForConfig(stranger)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) && !apierrors.IsForbidden(err) {
		t.Errorf("a's administrator was let into c: %v", err)
	}
}

// A stopped control plane leaves no goroutine, whenever it is stopped.
func TestStopLeavesNothing(t *testing.T) {
	b := newBench(t)
	// Upstream starts a few goroutines that stay for the process.
	if err := b.start("first").stop(); err != nil {
		t.Fatal(err)
	}
	before := goleak.IgnoreCurrent()
	check := func(t *testing.T) {
		t.Helper()
		var err error
		// The longest of upstream's polls that do not end with their server: 30 s.
		for range 90 {
			// Client-go's transports end when nobody holds them any more, which only a
			// collection finds out.
			runtime.GC()
			if err = goleak.Find(before); err == nil {
				return
			}
			time.Sleep(500 * time.Millisecond)
		}
		t.Errorf("left behind: %v", err)
	}
	t.Run("after it was ready", func(t *testing.T) {
		r := b.start("ready")
		if _, err := b.admin(r, "ready").CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
		b.closeClients()
		check(t)
	})
	t.Run("in the middle of its start", func(t *testing.T) {
		for _, at := range []string{"issuing", "assembling", "waiting for API server", "waiting for controllers"} {
			r := b.begin("middle")
			for !strings.HasPrefix(r.Progress(), at) {
				select {
				case <-r.Ready():
				case <-time.After(time.Millisecond):
					continue
				}
				break
			}
			if err := r.stop(); err != nil {
				t.Errorf("stopped while %s: %v", at, err)
			}
		}
		check(t)
	})
}

// A renewed certificate is used for new connections; old ones live on.
func TestRenewalInterruptsNothing(t *testing.T) {
	b := newBench(t)
	// Short enough that a renewal is due in the future and already valid now.
	b.leafLifetime = 3 * time.Minute
	var ahead atomic.Int64
	b.clock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	r := b.start("a")
	admin := b.admin(r, "a")
	watch, err := admin.CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	old := b.servingSerial(r, "a")

	ahead.Store(int64(b.leafLifetime * 3 / 4))
	if err := r.authority.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 600 {
		if b.servingSerial(r, "a") != old {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if b.servingSerial(r, "a") == old {
		t.Fatal("new connections still get the old certificate")
	}
	if _, err := admin.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "after"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for {
		e, ok := <-watch.ResultChan()
		if !ok {
			t.Fatal("the watch from before the renewal ended")
		}
		if cm, ok := e.Object.(*corev1.ConfigMap); ok && cm.Name == "after" {
			return
		}
	}
}

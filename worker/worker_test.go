// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package worker_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"

	"github.com/tenantd/tenantd/konnectivity"
	"github.com/tenantd/tenantd/worker"
	"github.com/tenantd/tenantd/worker/carrier"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
	"github.com/tenantd/tenantd/worker/workertest/netns"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	hostname = "acme.test"
	endpoint = "172.20.0.1:6443"
	health   = "127.0.0.1:10266"

	nodeAddress = "10.77.0.11"
)

// machine is a worker's machine and its tenant.
type machine struct {
	t      *testing.T
	tenant *fakehost.Tenant
	dir    string
	file   *config.Config
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{t: t, tenant: fakehost.NewTenant(hostname, "kubernetes.default.svc", "172.20.0.1", "10.96.0.1"), dir: t.TempDir()}
	m.file = &config.Config{Hostname: hostname, CA: string(m.tenant.CA), KubeletKubeconfig: filepath.Join(m.dir, "kubelet.conf"), CacheDir: m.dir}
	m.file.SetDefaults()
	return m
}

// host starts a host and makes it a seed.
func (m *machine) host(konnectivity ...func(net.Listener)) *fakehost.Host {
	m.t.Helper()
	h, err := m.tenant.Listen("127.0.0.1:0", konnectivity...)
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(h.Close)
	return h
}

func (m *machine) join(node string) {
	m.t.Helper()
	m.tenant.SetNode(node, nodeAddress)
	// As kubeadm does it: never half a file.
	temporary := m.file.KubeletKubeconfig + ".tmp"
	if err := errors.Join(os.WriteFile(temporary, []byte(m.tenant.Kubeconfig(node, time.Now().Add(time.Hour))), 0o600), os.Rename(temporary, m.file.KubeletKubeconfig)); err != nil {
		m.t.Fatal(err)
	}
}

// running is a worker that runs.
type running struct {
	*worker.Worker
	stop  context.CancelFunc
	ended chan struct{}
	err   error
}

func (m *machine) run(cfg worker.Config) *running {
	m.t.Helper()
	cfg.File = m.file
	if testing.Verbose() {
		cfg.Logger = slog.New(slog.NewTextHandler(m.t.Output(), nil))
	}
	w, err := worker.New(cfg)
	if err != nil {
		m.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &running{Worker: w, stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.err = w.Run(ctx)
	}()
	m.t.Cleanup(func() {
		stop()
		<-r.ended
	})
	select {
	case <-w.Ready():
	case <-r.ended:
		m.t.Fatal(r.err)
	}
	return r
}

// pod is a client as client-go makes one in a pod: it knows an address and a CA.
func (m *machine) pod(certificate ...tls.Certificate) *http.Client {
	m.t.Helper()
	transport := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, endpoint)
		},
		// The name of the Service's address: Go sends no SNI for it.
		TLSClientConfig:   &tls.Config{RootCAs: m.tenant.Roots, ServerName: "10.96.0.1", Certificates: certificate},
		ForceAttemptHTTP2: true,
	}
	m.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func get(client *http.Client, path string) (string, error) {
	response, err := client.Get("https://kubernetes.default.svc" + path)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

// ask asks the health endpoint.
func ask(t *testing.T, path string) (int, string) {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true}
	request, _ := http.NewRequest(http.MethodGet, "http://"+health+path, nil)
	response, err := transport.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

// eventually waits for what others do. A test that passes never waits for the whole
// time.
func eventually(t *testing.T, what string, is func() error) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := is()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it did not come about that %s: %v", what, err)
		}
	}
}

func ready(t *testing.T) func() error {
	return func() error {
		if code, text := ask(t, "/readyz"); code != http.StatusOK {
			return errors.New(text)
		}
		return nil
	}
}

// TestPods has a pod with a client certificate call the API by each carrier.
func TestPods(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	for _, kind := range []string{"tls", "proxy2", "auto"} {
		t.Run(kind, func(t *testing.T) {
			m := newMachine(t)
			h := m.host()
			m.file.Hosts, m.file.Carrier = []string{h.Address.String()}, kind
			m.run(worker.Config{})
			eventually(t, "a host is healthy", ready(t))

			certificate, key := m.tenant.Node("client", time.Now().Add(time.Hour))
			pair, err := tls.X509KeyPair(certificate, key)
			if err != nil {
				t.Fatal(err)
			}
			for want, client := range map[string]*http.Client{
				"system:node:client at " + h.Address.String(): m.pod(pair),
				"anonymous at " + h.Address.String():          m.pod(),
			} {
				if got, err := get(client, "/whoami"); err != nil || got != want {
					t.Errorf("%q, %v; want %q", got, err, want)
				}
				if got, err := get(client, "/bytes/3000000"); err != nil || len(got) != 3000000 {
					t.Errorf("%d bytes, %v; want 3000000", len(got), err)
				}
			}

			_, text := ask(t, "/status")
			var s worker.Status
			if err := json.Unmarshal([]byte(text), &s); err != nil {
				t.Fatal(err)
			}
			used := map[string]carrier.Kind{"tls": carrier.TLS, "proxy2": carrier.Proxy2, "auto": carrier.Proxy2}[kind]
			if !s.Ready || s.Tenant != hostname || s.Endpoint != endpoint || s.Device == "" || s.Connections != 2 || len(s.Hosts) != 1 || !s.Hosts[0].Healthy || s.Hosts[0].Carrier != used {
				t.Errorf("status %+v", s)
			}
			_, metrics := ask(t, "/metrics")
			for _, want := range []string{`tenant_proxy_connections_total{outcome="relayed"} 2`, "tenant_proxy_connections 2", "tenant_proxy_ready 1", "tenant_proxy_host_healthy{", "tenant_proxy_tunnel_servers 0"} {
				if !strings.Contains(metrics, want) {
					t.Errorf("metrics lack %s", want)
				}
			}
		})
	}
}

// TestLearning starts with one host, learns another after the node has joined, and
// loses the first one.
func TestLearning(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	m := newMachine(t)
	a, b := m.host(), m.host()
	m.tenant.SetHosts(b.Address.String()+"\n", "")
	m.file.Hosts = []string{a.Address.String()}
	r := m.run(worker.Config{})
	eventually(t, "a host is healthy", ready(t))
	if n := len(r.Status().Hosts); n != 1 {
		t.Errorf("%d hosts before the node has joined", n)
	}
	m.join("w1")
	eventually(t, "the other host is healthy", func() error {
		for _, h := range r.Status().Hosts {
			if h.Address == b.Address && h.Healthy {
				return nil
			}
		}
		return fmt.Errorf("%+v", r.Status().Hosts)
	})
	a.Close()
	eventually(t, "pods reach the other host", func() error {
		got, err := get(m.pod(), "/whoami")
		if err == nil && got != "anonymous at "+b.Address.String() {
			err = errors.New(got)
		}
		return err
	})

	// After a restart it is known from the start, though the seed is dead.
	r.stop()
	<-r.ended
	next := m.run(worker.Config{})
	if n := len(next.Status().Hosts); n != 2 {
		t.Errorf("%d hosts after a restart", n)
	}
	eventually(t, "a host is healthy", ready(t))
}

// TestNoHost expects connections to be closed at once, and the process to be alive
// and to say what is missing.
func TestNoHost(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	m := newMachine(t)
	m.file.Hosts = []string{"127.0.0.1:1"}
	r := m.run(worker.Config{})
	conn, err := net.Dial("tcp", endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("read %d, %v", n, err)
	}
	if code, text := ask(t, "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(text, "no host is healthy") {
		t.Errorf("readyz: %d %s", code, text)
	}
	if code, text := ask(t, "/livez"); code != http.StatusOK {
		t.Errorf("livez: %d %s", code, text)
	}
	if s := r.Status(); s.Ready || s.Tunnel.Problem == "" {
		t.Errorf("status %+v", s)
	}
}

// TestTooMany opens more connections than one source may have.
func TestTooMany(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	m := newMachine(t)
	h := m.host()
	m.file.Hosts = []string{h.Address.String()}
	r := m.run(worker.Config{MaxConnsPerSource: 2})
	eventually(t, "a host is healthy", ready(t))
	for range 2 {
		if _, err := get(m.pod(), "/whoami"); err != nil {
			t.Fatal(err)
		}
	}
	third, err := net.Dial("tcp", endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	if n, err := third.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("read %d, %v", n, err)
	}
	if n := r.Status().Connections; n != 2 {
		t.Errorf("%d connections, want 2", n)
	}
}

// TestTakeOver has a second process take over from the first one while clients keep
// connecting and a watch is open.
func TestTakeOver(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	m := newMachine(t)
	h := m.host()
	m.file.Hosts = []string{h.Address.String()}
	first := m.run(worker.Config{})
	eventually(t, "a host is healthy", ready(t))
	watcher := m.pod()
	watch, err := watcher.Get("https://kubernetes.default.svc/watch")
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Body.Close()

	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	made := make(chan struct{}, 1)
	for range 4 {
		clients.Go(func() {
			for ctx.Err() == nil {
				client := m.pod()
				if _, err := get(client, "/whoami"); err != nil {
					t.Errorf("a connection failed: %v", err)
				}
				client.CloseIdleConnections()
				select {
				case made <- struct{}{}:
				default:
				}
			}
		})
	}
	sockets, err := first.Sockets()
	if err != nil {
		t.Fatal(err)
	}
	second := m.run(worker.Config{Inherited: sockets})
	eventually(t, "its host is healthy", func() error {
		if !second.Status().Ready {
			return errors.New(second.Status().Problem)
		}
		return nil
	})
	first.Drain()
	first.Drain() // again, which does nothing
	eventually(t, "the first has nothing left but the watch", func() error {
		if n := first.Status().Connections; n != 1 {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	for range 20 {
		<-made
	}
	stop()
	clients.Wait()
	select {
	case <-first.ended:
		t.Fatal("it ended while a watch was open")
	default:
	}
	watch.Body.Close()
	watcher.CloseIdleConnections()
	<-first.ended
	if first.err != nil {
		t.Error(first.err)
	}
}

// TestDrainEnds expects a watch to be cut when the time is over.
func TestDrainEnds(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	m := newMachine(t)
	h := m.host()
	m.file.Hosts, m.file.DrainTimeout = []string{h.Address.String()}, time.Second
	r := m.run(worker.Config{})
	eventually(t, "a host is healthy", ready(t))
	watch, err := m.pod().Get("https://kubernetes.default.svc/watch")
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Body.Close()
	r.Drain()
	<-r.ended
	if r.err != nil {
		t.Error(r.err)
	}
	if _, err := io.ReadAll(watch.Body); err == nil {
		t.Error("the watch ended in order, though it was cut")
	}
}

// TestTunnel joins the node while the worker runs and has the real tunnel server
// reach something on it.
func TestTunnel(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	m := newMachine(t)
	tunnels, err := konnectivity.New(konnectivity.Config{
		Tenant:        "acme",
		TLS:           &tls.Config{Certificates: []tls.Certificate{m.tenant.Serving}, ClientCAs: m.tenant.Roots},
		NodeAddresses: func(context.Context, string) ([]string, error) { return []string{nodeAddress}, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	h := m.host(func(ln net.Listener) { tunnels.Serve(ln) })
	t.Cleanup(func() { tunnels.Close() })
	// Loopback and link-local addresses are out of the tunnel's reach.
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	own, err := netlink.ParseAddr(nodeAddress + "/32")
	if err := errors.Join(err, netlink.AddrAdd(lo, own)); err != nil {
		t.Fatal(err)
	}
	kubelet, err := net.Listen("tcp", nodeAddress+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer kubelet.Close()
	go func() {
		conn, err := kubelet.Accept()
		if err != nil {
			return
		}
		io.Copy(conn, conn)
		conn.Close()
	}()

	m.file.Hosts = []string{h.Address.String()}
	r := m.run(worker.Config{})
	eventually(t, "a host is healthy", ready(t)) // without the tunnel
	m.join("w1")
	eventually(t, "the tunnel is connected", func() error {
		s := r.Status().Tunnel
		if len(s.Servers) != 1 || !s.Servers[0].Connected || s.Node != "w1" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	conn, err := tunnels.Dial(t.Context(), "tcp", kubelet.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "logs"); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 4)
	if _, err := io.ReadFull(conn, answer); err != nil || string(answer) != "logs" {
		t.Errorf("%q, %v", answer, err)
	}
}

// TestCannotRun has the address or a port in somebody else's hands.
func TestCannotRun(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	run := func(m *machine) error {
		w, err := worker.New(worker.Config{File: m.file})
		if err != nil {
			return err
		}
		return w.Run(t.Context())
	}
	for _, test := range []struct {
		name    string
		prepare func(t *testing.T, m *machine)
		want    string
	}{
		{"port", func(t *testing.T, m *machine) { occupy(t, "0.0.0.0:6443") }, "stop the program that has it"},
		{"health port", func(t *testing.T, m *machine) { occupy(t, health) }, "healthListen"},
		{"CA", func(_ *testing.T, m *machine) { m.file.CA, m.file.CAFile = "", filepath.Join(m.dir, "none") }, "tenantctl worker bundle"},
		{"empty CA", func(t *testing.T, m *machine) {
			m.file.CA, m.file.CAFile = "", filepath.Join(m.dir, "ca.crt")
			if err := os.WriteFile(m.file.CAFile, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "holds no certificate"},
		{"configuration", func(_ *testing.T, m *machine) { m.file.Carrier = "pigeon" }, "carrier"},
		{"address", func(t *testing.T, _ *machine) {
			if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "docker0"}, PeerName: "docker1"}); err != nil {
				t.Fatal(err)
			}
			link, err := netlink.LinkByName("docker0")
			if err != nil {
				t.Fatal(err)
			}
			other, err := netlink.ParseAddr("172.30.0.1/16")
			if err := errors.Join(err, netlink.AddrAdd(link, other), netlink.LinkSetUp(link)); err != nil {
				t.Fatal(err)
			}
		}, "workerVIP"},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := newMachine(t)
			m.t = t
			m.file.Hosts = []string{"127.0.0.1:1"}
			if test.name == "address" {
				m.file.VIP = "172.30.0.1"
			}
			test.prepare(t, m)
			if err := run(m); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v; want %q", err, test.want)
			}
		})
	}
}

func occupy(t *testing.T, address string) {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
}

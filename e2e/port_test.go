// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// TestPort shows what the one port does with clients that are good, odd, slow
// and hostile: raw sockets and crypto/tls against the daemon.
func TestPort(t *testing.T) {
	h := startHost(t)
	p := &port{host: h, one: h.cluster("one"), two: h.cluster("two")}
	for _, test := range []struct {
		name string
		run  func(*testing.T, *port)
	}{
		{"Names", testNames},
		{"NoTLS", testNoTLS},
		{"SplitHellos", testSplitHellos},
		{"Versions", testVersions},
		{"Protocols", testProtocols},
		{"Certificates", testCertificates},
		{"Tickets", testTickets},
		{"HostHeader", testHostHeader},
		{"HTTP2", testHTTP2},
		{"StalledHello", testStalledHello},
		{"ManyStalledHellos", testManyStalledHellos},
		{"StalledHandshake", testStalledHandshake},
		{"ManyStalledHandshakes", testManyStalledHandshakes},
		{"SilentClients", testSilentClients},
		{"UnsentBody", testUnsentBody},
		{"ConnectionLimit", testConnectionLimit},
		{"KubeconfigByAddress", testKubeconfigByAddress},
		{"Log", testLog},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.run(t, &port{host: h.of(t), one: p.one.within(t), two: p.two.within(t)})
		})
	}
}

// port is a host's one port and two tenants behind it.
type port struct {
	*host
	one, two *cluster
}

// dial opens a TCP connection, which ends with the test.
func (p *port) dial() net.Conn {
	p.t.Helper()
	return p.dialFrom("127.0.0.1")
}

// dialFrom is dial from an address of loopback.
func (p *port) dialFrom(address string) net.Conn {
	p.t.Helper()
	d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	c, err := d.DialContext(p.t.Context(), "tcp", p.listen)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// config is how a client of a tenant begins; its certificate is verified.
func (p *port) config(c *cluster) *tls.Config {
	p.t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(restConfig(p.t, c.kubeconfig).CAData)
	return &tls.Config{ServerName: c.name + "." + domain, RootCAs: roots}
}

// insecure is how a client begins for which names are at issue, not trust.
func (p *port) insecure(name string) *tls.Config {
	return &tls.Config{ServerName: name, InsecureSkipVerify: true}
}

// handshake does a TLS handshake on a new connection.
func (p *port) handshake(cfg *tls.Config) (*tls.Conn, error) {
	p.t.Helper()
	c := tls.Client(p.dial(), cfg)
	return c, c.HandshakeContext(p.t.Context())
}

// refusals is how many connections the router has refused for a reason.
func (p *port) refusals(reason string) int {
	p.t.Helper()
	return p.metric(`tenantd_router_connections_refused_total{reason="` + reason + `"}`)
}

// metric is the value of one series.
func (p *port) metric(series string) int {
	p.t.Helper()
	metrics, err := p.get("/metrics")
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(metrics) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				p.t.Fatal(err)
			}
			return int(n)
		}
	}
	p.t.Fatalf("there is no metric %s", series)
	return 0
}

// counted does something and waits until it is counted as a refusal.
func (p *port) counted(reason string, do func()) {
	p.t.Helper()
	before := p.refusals(reason)
	do()
	eventually(p.t, "a refusal is counted as "+reason, func() error {
		if p.refusals(reason) == before {
			return fmt.Errorf("it is %d as before", before)
		}
		return nil
	})
}

// answers fails the test unless a tenant answers a real call.
func (p *port) answers(c *cluster, dial func(ctx context.Context, network, address string) (net.Conn, error)) {
	p.t.Helper()
	cfg := restConfig(p.t, c.kubeconfig)
	cfg.Dial = dial
	httpClient, err := rest.HTTPClientFor(cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	defer utilnet.CloseIdleConnectionsFor(httpClient.Transport)
	typed, err := kubernetes.NewForConfigAndClient(cfg, httpClient)
	if err != nil {
		p.t.Fatal(err)
	}
	if got := whoami(p.t, typed).Status.UserInfo.Username; got != "kubernetes-admin" {
		p.t.Errorf("tenant %s says to its administrator: %q", c.name, got)
	}
}

// isAlert fails the test unless err is this TLS alert of the server.
func isAlert(t testing.TB, what string, err error, description uint8) {
	t.Helper()
	// crypto/tls has no type for it.
	if want := "remote error: " + tls.AlertError(description).Error(); err == nil || err.Error() != want {
		t.Errorf("%s: %v; want %s", what, err, want)
	}
}

// Alerts of TLS (RFC 8446 section 6).
const (
	alertHandshakeFailure = 40
	alertUnknownCA        = 48
	alertProtocolVersion  = 70
	alertInternalError    = 80
	alertUnrecognizedName = 112
	alertNoProtocol       = 120
)

func testNames(t *testing.T, p *port) {
	for name, known := range map[string]bool{
		"one." + domain:            true,
		"ONE.K8s.Test":             true,
		"system." + domain:         true,
		"three." + domain:          false,
		domain:                     false,
		"x.one." + domain:          false,
		"one." + domain + ".local": false,
		"kubernetes.default.svc":   false, // a name in every tenant's certificate
		"localhost":                false,
	} {
		_, err := p.handshake(p.insecure(name))
		if known && err != nil {
			t.Errorf("name %s: %v", name, err)
		} else if !known {
			isAlert(t, "name "+name, err, alertUnrecognizedName)
		}
	}
	p.counted("unknown_name", func() { p.handshake(p.insecure("three." + domain)) })
	p.counted("no_name", func() {
		_, err := p.handshake(p.insecure(""))
		isAlert(t, "no name", err, alertUnrecognizedName)
	})
	// An address is no name: the client leaves it out.
	p.counted("no_name", func() {
		_, err := p.handshake(p.insecure("127.0.0.1"))
		isAlert(t, "an address for a name", err, alertUnrecognizedName)
	})
}

func testNoTLS(t *testing.T, p *port) {
	for _, test := range []struct{ reason, sent, answer string }{
		{"plain_http", "GET /version HTTP/1.1\r\nHost: one." + domain + "\r\n\r\n", "HTTP/1.0 400 Bad Request"},
		{"plain_http", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.0 400 Bad Request"},
		{"not_tls", "SSH-2.0-OpenSSH_9.9\r\n", ""},
		{"not_tls", strings.Repeat("\x00", 64), ""},
		{"not_tls", "\x17\x03\x03\x00\x05hello", ""},                                          // a record, but of application data
		{"malformed", "\x16\x03\x01\x00\x04\x01\x00\x00\x00", "\x15\x03\x03\x00\x02\x02\x32"}, // an empty hello; alert decode_error
	} {
		p.counted(test.reason, func() {
			c := p.dial()
			if _, err := io.WriteString(c, test.sent); err != nil {
				t.Fatal(err)
			}
			// The server's end: closed, or reset if it read not all.
			answer, err := io.ReadAll(c)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("%q: the connection stays open", test.sent)
			}
			if !strings.HasPrefix(string(answer), test.answer) || test.answer == "" && len(answer) > 0 {
				t.Errorf("%q is answered by %q, want %q", test.sent, answer, test.answer)
			}
		})
	}
}

// testSplitHellos shows that a hello works in whatever pieces it comes, with all
// that follows it.
func testSplitHellos(t *testing.T, p *port) {
	for name, write := range map[string]func(net.Conn, []byte) error{
		"one byte at a time": func(c net.Conn, b []byte) error {
			for i := range b {
				if _, err := c.Write(b[i : i+1]); err != nil {
					return err
				}
			}
			return nil
		},
		"records of one byte": func(c net.Conn, b []byte) error {
			var records []byte
			for len(b) > 0 {
				header, size := b[:3], int(binary.BigEndian.Uint16(b[3:5]))
				for _, x := range b[5 : 5+size] {
					records = append(append(records, header...), 0, 1, x)
				}
				b = b[5+size:]
			}
			_, err := c.Write(records)
			return err
		},
		"many records in two segments": func(c net.Conn, b []byte) error {
			var records []byte
			for body := b[5:]; len(body) > 0; {
				n := min(100, len(body))
				records = append(append(append(records, b[:3]...), 0, byte(n)), body[:n]...)
				body = body[n:]
			}
			if _, err := c.Write(records[:len(records)/2]); err != nil {
				return err
			}
			_, err := c.Write(records[len(records)/2:])
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := &port{host: p.host.of(t), one: p.one.within(t)}
			p.answers(p.one, func(ctx context.Context, _, _ string) (net.Conn, error) {
				return &splitConn{Conn: p.dial(), write: write}, nil
			})
		})
	}
}

// splitConn writes the first thing that is written, which is the hello, in its
// own way.
type splitConn struct {
	net.Conn
	write func(net.Conn, []byte) error
	begun bool
}

func (c *splitConn) Write(b []byte) (int, error) {
	if c.begun {
		return c.Conn.Write(b)
	}
	c.begun = true
	if err := c.write(c.Conn, b); err != nil {
		return 0, err
	}
	return len(b), nil
}

func testVersions(t *testing.T, p *port) {
	for _, c := range []*cluster{p.one, {t: t, name: "system", kubeconfig: p.adminKubeconfig()}} {
		cbc := []uint16{
			tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA, tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA, tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256,
			tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA, tls.TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA, tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256,
		}
		for name, test := range map[string]struct {
			change func(*tls.Config)
			alert  uint8 // 0: it works
		}{
			"TLS 1.0":     {func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS10 }, alertProtocolVersion},
			"TLS 1.1":     {func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS11 }, alertProtocolVersion},
			"TLS 1.2 CBC": {func(c *tls.Config) { c.MaxVersion, c.CipherSuites = tls.VersionTLS12, cbc }, alertHandshakeFailure},
			"TLS 1.2 RSA": {func(c *tls.Config) {
				c.MaxVersion, c.CipherSuites = tls.VersionTLS12, []uint16{tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_256_GCM_SHA384}
			}, alertHandshakeFailure},
			"TLS 1.2":           {func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }, 0},
			"TLS 1.3":           {func(c *tls.Config) { c.MinVersion = tls.VersionTLS13 }, 0},
			"X25519MLKEM768":    {func(c *tls.Config) { c.CurvePreferences = []tls.CurveID{tls.X25519MLKEM768} }, 0},
			"SecP256r1MLKEM768": {func(c *tls.Config) { c.CurvePreferences = []tls.CurveID{tls.SecP256r1MLKEM768} }, 0},
			"P-256":             {func(c *tls.Config) { c.CurvePreferences = []tls.CurveID{tls.CurveP256} }, 0},
		} {
			cfg := p.config(c)
			test.change(cfg)
			conn, err := p.handshake(cfg)
			if test.alert != 0 {
				isAlert(t, c.name+": "+name, err, test.alert)
				continue
			}
			if err != nil {
				t.Errorf("%s: %s: %v", c.name, name, err)
				continue
			}
			state := conn.ConnectionState()
			if len(cfg.CurvePreferences) == 1 && state.CurveID != cfg.CurvePreferences[0] {
				t.Errorf("%s: %s: the key exchange is %v", c.name, name, state.CurveID)
			}
			if strings.Contains(tls.CipherSuiteName(state.CipherSuite), "CBC") {
				t.Errorf("%s: %s: the cipher suite is %s", c.name, name, tls.CipherSuiteName(state.CipherSuite))
			}
		}
		// What a client that says nothing special gets.
		conn, err := p.handshake(p.config(c))
		if err != nil {
			t.Fatal(err)
		}
		if s := conn.ConnectionState(); s.Version != tls.VersionTLS13 || s.CurveID != tls.X25519MLKEM768 {
			t.Errorf("%s: a client of today gets %s with %v", c.name, tls.VersionName(s.Version), s.CurveID)
		}
	}
}

func testHTTP2(t *testing.T, p *port) {
	for _, test := range []struct {
		offered []string
		want    string
	}{
		{[]string{"h2", "http/1.1"}, "h2"}, {[]string{"http/1.1"}, "http/1.1"}, {nil, ""},
	} {
		cfg := p.config(p.one)
		cfg.NextProtos = test.offered
		conn, err := p.handshake(cfg)
		if err != nil {
			t.Errorf("%v: %v", test.offered, err)
			continue
		}
		if got := conn.ConnectionState().NegotiatedProtocol; got != test.want {
			t.Errorf("of %v the server takes %q, want %q", test.offered, got, test.want)
		}
		if test.want == "h2" {
			continue
		}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://one."+domain+"/version", nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := request.Write(conn); err != nil {
			t.Fatal(err)
		}
		response, err := http.ReadResponse(bufio.NewReader(conn), request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK || response.Proto != "HTTP/1.1" {
			t.Errorf("over %v: %s %s", test.offered, response.Proto, response.Status)
		}
	}
	httpClient, err := rest.HTTPClientFor(restConfig(t, p.one.kubeconfig))
	if err != nil {
		t.Fatal(err)
	}
	response, err := httpClient.Get("https://" + p.listen + "/version")
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.ProtoMajor != 2 {
		t.Errorf("client-go speaks %s", response.Proto)
	}
}

// testProtocols shows that what a client says a connection is for is all that it
// can use it for.
func testProtocols(t *testing.T, p *port) {
	offering := func(protocols ...string) *tls.Config {
		cfg := p.config(p.one)
		cfg.NextProtos = protocols
		return cfg
	}
	for _, test := range []struct {
		offered []string
		agreed  string
	}{
		{[]string{"h2", "tenantd-api"}, "tenantd-api"}, // a carrier's, whatever else it offers
		{[]string{"tenantd-api", "konnectivity"}, "tenantd-api"},
		{[]string{"konnectivity", "h2"}, "h2"}, // an agent's
		{[]string{"Konnectivity", "h2"}, "h2"}, // the API's
	} {
		c, err := p.handshake(offering(test.offered...))
		if err != nil {
			t.Errorf("%q: %v", test.offered, err)
			continue
		}
		if got := c.ConnectionState().NegotiatedProtocol; got != test.agreed {
			t.Errorf("of %q the server takes %q, want %q", test.offered, got, test.agreed)
		}
	}
	_, err := p.handshake(offering("spdy/3"))
	isAlert(t, "a protocol that nobody has", err, alertNoProtocol)

	// HTTP without TLS inside of a carrier does not reach the API.
	carrier, err := p.handshake(offering("tenantd-api"))
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(carrier, "GET /version HTTP/1.1\r\nHost: one."+domain+"\r\n\r\n")
	if answer, _ := io.ReadAll(carrier); !strings.HasPrefix(string(answer), "HTTP/1.0 400 ") {
		t.Errorf("HTTP inside of a carrier: %q", answer)
	}

	// Nor does HTTP/2 on an agent's connection, with an administrator's certificate.
	cfg, err := rest.TLSConfigFor(restConfig(t, p.one.kubeconfig))
	if err != nil {
		t.Fatal(err)
	}
	cfg.NextProtos = []string{"konnectivity", "h2"}
	transport := &http.Transport{ForceAttemptHTTP2: true, DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return p.handshake(cfg) }}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Get("https://one." + domain + "/api/v1/namespaces")
	if err == nil {
		response.Body.Close()
		if response.StatusCode < 400 {
			t.Errorf("the API answers an agent's connection: %s", response.Status)
		}
	}
}

// testCertificates shows that a client certificate of another tenant, of the system
// plane and of nobody's CA are worth nothing, at each of a tenant's listeners.
func testCertificates(t *testing.T, p *port) {
	for _, of := range []*cluster{p.two, {t: t, name: "system", kubeconfig: p.adminKubeconfig()}} {
		foreign, err := rest.TLSConfigFor(restConfig(t, of.kubeconfig))
		if err != nil {
			t.Fatal(err)
		}
		cert, err := foreign.GetClientCertificate(&tls.CertificateRequestInfo{})
		if err != nil || len(cert.Certificate) == 0 {
			t.Fatalf("the kubeconfig of %s has no certificate: %v", of.name, err)
		}
		for _, protocol := range []string{"http/1.1", "konnectivity", "tenantd-api"} {
			cfg := p.config(p.one)
			cfg.NextProtos = []string{protocol, "h2"}
			// In spite of the CAs that the server names.
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }
			if protocol == "http/1.1" {
				cfg.NextProtos = []string{protocol}
			}
			c, err := p.handshake(cfg)
			if err != nil {
				t.Errorf("%s with the certificate of %s: %v before it is looked at", protocol, of.name, err)
				continue
			}
			if protocol != "http/1.1" {
				// In TLS 1.3 the server's opinion comes behind the handshake.
				_, err := io.Copy(io.Discard, c)
				isAlert(t, protocol+" with the certificate of "+of.name, err, alertUnknownCA)
				continue
			}
			for _, headers := range []string{"", "X-Remote-User: kubernetes-admin\r\nX-Remote-Group: system:masters\r\n"} {
				io.WriteString(c, "GET /api/v1/namespaces HTTP/1.1\r\nHost: one."+domain+"\r\n"+headers+"\r\n")
				response, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					t.Fatal(err)
				}
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
				if response.StatusCode != http.StatusUnauthorized {
					t.Errorf("the certificate of %s with %q: %s, want 401", of.name, headers, response.Status)
				}
			}
		}
	}
}

// tickets gives every server the last session, whichever that was with.
type tickets struct{ last *tls.ClientSessionState }

func (s *tickets) Get(string) (*tls.ClientSessionState, bool)    { return s.last, s.last != nil }
func (s *tickets) Put(_ string, session *tls.ClientSessionState) { s.last = session }

// testTickets shows that a session of one tenant is not resumed at another, nor at
// another listener of the same one.
func testTickets(t *testing.T, p *port) {
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		begin := func(cache *tickets, c *cluster, protocols ...string) *tls.Conn {
			t.Helper()
			cfg := p.insecure(c.name + "." + domain) // the client would refuse to try
			cfg.MinVersion, cfg.MaxVersion, cfg.ClientSessionCache, cfg.NextProtos = version, version, cache, protocols
			conn, err := p.handshake(cfg)
			if err != nil {
				t.Fatalf("%s at %s: %v", tls.VersionName(version), c.name, err)
			}
			return conn
		}
		// session returns a cache with a ticket of one; in TLS 1.3 that comes with the
		// first answer.
		session := func() *tickets {
			t.Helper()
			cache := &tickets{}
			c := begin(cache, p.one)
			io.WriteString(c, "GET /livez HTTP/1.0\r\n\r\n")
			io.Copy(io.Discard, c)
			if cache.last == nil {
				t.Fatalf("%s: no ticket", tls.VersionName(version))
			}
			return cache
		}
		if !begin(session(), p.one).ConnectionState().DidResume {
			t.Errorf("%s: a session is not resumed where it began, so this test shows nothing", tls.VersionName(version))
		}
		for _, c := range []*cluster{p.two, {t: t, name: "system"}} {
			if begin(session(), c).ConnectionState().DidResume {
				t.Errorf("%s: the session of one is resumed at %s", tls.VersionName(version), c.name)
			}
		}
		if begin(session(), p.one, "konnectivity", "h2").ConnectionState().DidResume {
			t.Errorf("%s: a session of the API is resumed as an agent's", tls.VersionName(version))
		}
		if version == tls.VersionTLS13 && begin(session(), p.one, "tenantd-api").ConnectionState().DidResume {
			t.Error("a session of the API is resumed as a carrier's")
		}
	}
}

// testHostHeader shows that the name in the ClientHello decides who answers, and
// no other: not the Host header, not :authority on a connection that is reused.
func testHostHeader(t *testing.T, p *port) {
	cfg, err := rest.TLSConfigFor(restConfig(t, p.one.kubeconfig))
	if err != nil {
		t.Fatal(err)
	}
	want := p.one.kubectl("get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}")
	for _, protocol := range []string{"http/1.1", "h2"} {
		cfg := cfg.Clone()
		cfg.NextProtos = []string{protocol}
		transport := &http.Transport{ForceAttemptHTTP2: protocol == "h2", DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return p.handshake(cfg) }}
		defer transport.CloseIdleConnections()
		for _, host := range []string{"one." + domain, "two." + domain, "system." + domain} {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://one."+domain+"/api/v1/namespaces/kube-system", nil)
			if err != nil {
				t.Fatal(err)
			}
			request.Host = host
			response, err := (&http.Client{Transport: transport}).Do(request)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(response.Body)
			response.Body.Close()
			if err != nil || response.StatusCode != http.StatusOK || !strings.Contains(string(body), want) {
				t.Errorf("%s of host %s to one: %s, %v, %s", protocol, host, response.Status, err, body)
			}
		}
	}
}

// hello is the beginning of a ClientHello that never ends.
var hello = []byte("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")

func testStalledHello(t *testing.T, p *port) {
	p.counted("timeout", func() {
		var stalled []net.Conn
		for _, begin := range [][]byte{nil, hello[:1], hello} {
			c := p.dial()
			if _, err := c.Write(begin); err != nil {
				t.Fatal(err)
			}
			stalled = append(stalled, c)
		}
		eventually(t, "the connections are pending", func() error {
			if n := p.metric("tenantd_router_connections_pending"); n < len(stalled) {
				return fmt.Errorf("%d are", n)
			}
			return nil
		})
		p.answers(p.one, nil)
		p.answers(p.two, nil)
		for _, c := range stalled {
			if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("a stalled connection stays open")
			}
		}
	})
	p.counted("eof", func() {
		c := p.dial()
		c.Write(hello)
		c.Close()
	})
}

// testManyStalledHellos shows that a source that stalls all that it may does not
// keep another one out.
func testManyStalledHellos(t *testing.T, p *port) {
	const reason = "too_many_from_source"
	before := p.refusals(reason)
	for i := 0; p.refusals(reason) == before; i++ {
		if i == 10000 {
			t.Fatalf("after %d stalled connections none is refused", i)
		}
		p.dial().Write(hello)
	}
	p.answers(p.one, func(ctx context.Context, _, _ string) (net.Conn, error) { return p.dialFrom("127.0.0.2"), nil })
}

// whole is a ClientHello that is complete.
func (p *port) whole(c *cluster) []byte {
	p.t.Helper()
	client, server := net.Pipe()
	defer server.Close()
	defer client.Close()
	go tls.Client(client, p.config(c)).HandshakeContext(p.t.Context())
	buffer := make([]byte, 16<<10)
	n, err := server.Read(buffer)
	if err != nil {
		p.t.Fatal(err)
	}
	return buffer[:n]
}

// testStalledHandshake shows that a client that stops behind its hello is closed
// as soon as one that stops before, not when the API server has had enough.
func testStalledHandshake(t *testing.T, p *port) {
	p.counted("handshake_timeout", func() {
		c := p.dial()
		if _, err := c.Write(p.whole(p.one)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatalf("no answer to the hello: %v", err)
		}
		if n := p.metric("tenantd_router_connections_pending"); n == 0 {
			t.Error("a connection in its handshake is not pending")
		}
		p.answers(p.one, nil)
		if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("a stalled handshake stays open")
		}
	})
	// Inside of a carrier as well.
	p.counted("handshake_timeout", func() {
		cfg := p.config(p.one)
		cfg.NextProtos = []string{"tenantd-api"}
		c, err := p.handshake(cfg)
		if err != nil {
			t.Fatal(err)
		}
		c.Write(p.whole(p.one))
		if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("a stalled handshake stays open inside of a carrier")
		}
	})
}

// testManyStalledHandshakes shows that a source that stalls all handshakes that it
// may keeps no other out.
func testManyStalledHandshakes(t *testing.T, p *port) {
	const reason = "too_many_from_source"
	before := p.refusals(reason)
	whole := p.whole(p.one)
	for i := 0; p.refusals(reason) == before; i++ {
		if i == 10000 {
			t.Fatalf("after %d stalled handshakes none is refused", i)
		}
		p.dialFrom("127.0.0.4").Write(whole)
	}
	p.answers(p.one, func(ctx context.Context, _, _ string) (net.Conn, error) { return p.dialFrom("127.0.0.2"), nil })
}

// testSilentClients shows that a client that shook hands and says nothing more is
// closed, whichever protocol it then does not speak.
func testSilentClients(t *testing.T, p *port) {
	for name, protocols := range map[string][]string{
		"HTTP/1.1": {"http/1.1"}, "HTTP/2": {"h2"}, "agent": {"konnectivity", "h2"}, "carrier": {"tenantd-api"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // each waits for a time-out of its own
			p := &port{host: p.host.of(t), one: p.one.within(t)}
			cfg := p.config(p.one)
			cfg.NextProtos = protocols
			c, err := p.handshake(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the connection stays open")
			}
		})
	}
}

// testUnsentBody shows that a stranger that announces a body and does not send it is
// answered and closed, and holds no place among the requests meanwhile.
func testUnsentBody(t *testing.T, p *port) {
	cfg := p.config(p.one)
	cfg.NextProtos = []string{"http/1.1"}
	c, err := p.handshake(cfg)
	if err != nil {
		t.Fatal(err)
	}
	// The answer repeats the path, which makes it longer than net/http holds back.
	io.WriteString(c, "POST /"+strings.Repeat("a", 3000)+" HTTP/1.1\r\nHost: one."+domain+"\r\nContent-Length: 100\r\n\r\n")
	answers := bufio.NewReader(c)
	response, err := http.ReadResponse(answers, nil)
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	io.Copy(io.Discard, response.Body)
	if response.StatusCode != http.StatusForbidden {
		t.Errorf("a stranger is answered %s", response.Status)
	}
	if _, err := io.Copy(io.Discard, answers); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection stays open")
	}
}

// testConnectionLimit holds as many connections as a tenant may have.
func testConnectionLimit(t *testing.T, p *port) {
	mustKubectl(t, p.adminKubeconfig(), "", "patch", "tenant", "two", "--type", "merge", "-p", `{"spec":{"limits":{"connections":3}}}`)
	eventually(t, "the host has seen the limit and two's clients are gone", func() error {
		if got := mustKubectl(t, p.adminKubeconfig(), "", "get", "tenant", "two", "-o", "jsonpath={.metadata.generation} {.status.observedGeneration}"); got != "2 2" {
			return fmt.Errorf("the generations are %s", got)
		}
		if n := p.metric(`tenantd_router_connections_open{tenant="two"}`); n > 0 {
			return fmt.Errorf("%d connections are open", n)
		}
		return nil
	})
	from := func(address string) (*tls.Conn, error) {
		c := tls.Client(p.dialFrom(address), p.config(p.two))
		return c, c.HandshakeContext(t.Context())
	}
	var open []*tls.Conn
	for i, address := range []string{"127.0.0.1", "127.0.0.1", "127.0.0.2"} {
		c, err := from(address)
		if err != nil {
			t.Fatalf("connection %d: %v", i+1, err)
		}
		open = append(open, c)
		if i == 1 {
			p.counted("connections_from_source", func() {
				_, err := from(address)
				isAlert(t, "a connection beyond the share of its source", err, alertInternalError)
			})
		}
	}
	p.counted("connections", func() {
		_, err := from("127.0.0.3")
		isAlert(t, "one connection too many", err, alertInternalError)
	})
	p.answers(p.one, nil)
	open[0].Close()
	eventually(t, "a place is free again", func() error {
		_, err := p.handshake(p.config(p.two))
		return err
	})
}

// testLog shows that what clients do is in the log as all else is, whichever
// library noticed it.
func testLog(t *testing.T, p *port) {
	cfg := p.config(p.one)
	cfg.NextProtos = []string{"h2"}
	c, err := p.handshake(cfg)
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(c, "this is no HTTP/2 preface\r\n\r\n")
	io.Copy(io.Discard, c) // until the server has had enough
	for line := range strings.Lines(p.log.String()) {
		if !strings.HasPrefix(line, "time=") || !strings.Contains(line, " level=") {
			t.Errorf("a line of the log is not structured: %s", line)
		}
	}
}

// testKubeconfigByAddress shows that a kubeconfig works before DNS does.
func testKubeconfigByAddress(t *testing.T, p *port) {
	for _, c := range []*cluster{p.one, p.two, {t: t, name: "system", kubeconfig: p.adminKubeconfig()}} {
		file, err := clientcmd.LoadFromFile(c.kubeconfig)
		if err != nil {
			t.Fatal(err)
		}
		cluster := file.Clusters[file.Contexts[file.CurrentContext].Cluster]
		if cluster.Server != "https://"+p.listen || cluster.TLSServerName != c.name+"."+domain || cluster.InsecureSkipTLSVerify || len(cluster.CertificateAuthorityData) == 0 {
			t.Errorf("the kubeconfig of %s has server %s, tls-server-name %q, insecure %t", c.name, cluster.Server, cluster.TLSServerName, cluster.InsecureSkipTLSVerify)
		}
		contains(t, "kubectl get namespaces", c.kubectl("get", "namespaces", "-o", "name"), "namespace/kube-system")
	}
	// By the name, once that leads to the host.
	named := p.kubeconfig("one", "--server", "https://one."+domain+":"+strings.Split(p.listen, ":")[1])
	file, err := clientcmd.LoadFromFile(named)
	if err != nil {
		t.Fatal(err)
	}
	if name := file.Clusters["one"].TLSServerName; name != "" {
		t.Errorf("a kubeconfig by name has tls-server-name %q", name)
	}
	p.answers(&cluster{t: t, name: "one", kubeconfig: named}, func(ctx context.Context, _, _ string) (net.Conn, error) { return p.dial(), nil })
}

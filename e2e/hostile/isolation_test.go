// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
)

// isolations are attempts to be somebody at another tenant, or to see the host.
func isolations() []attack {
	return []attack{
		{
			name:  "ForeignCredentials",
			tries: "the attacker's certificates, service-account tokens and bootstrap tokens at the victim and at the system plane",
			must:  "each is refused with 401",
			run:   foreignCredentials,
		},
		{
			name:  "WrongNames",
			tries: "the victim's name in TLS with the attacker's in the request and the other way round, over HTTP/1.1 and HTTP/2, and a TLS session of the attacker's resumed under the victim's name",
			must:  "the name in TLS decides who answers; the session is not resumed, and the certificate is worth nothing",
			run:   wrongNames,
		},
		{
			name:  "FrontProxyHeaders",
			tries: "X-Remote-User and the like, without a certificate, with the attacker's own, and with one for the front proxy's name that the attacker's CA signed",
			must:  "the headers make nobody anybody",
			run:   frontProxyHeaders,
		},
		{
			name:  "HiddenProcess",
			tries: "every path of the API that serves the process, and every object and document that the attacker can read",
			must:  "the former are not served; nowhere is the machine's name, the host's, its directory or another tenant's name",
			run:   hiddenProcess,
		},
	}
}

// places are where an attacker has no business.
func (a *attacker) places() []*cluster {
	return []*cluster{a.victim, a.daemon.system(a.t)}
}

// anonymously is a configuration for a place with no credentials.
func (c *cluster) anonymously() *rest.Config { return rest.AnonymousClientConfig(c.config()) }

const whoamiPath = "/apis/authentication.k8s.io/v1/selfsubjectreviews"

// whoami asks who a client is; the answer may be a refusal.
func whoami(t testing.TB, cfg *rest.Config) (status int, user string, groups []string) {
	t.Helper()
	status, answer, err := request(cfg, http.MethodPost, whoamiPath, "application/json", strings.NewReader(`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`))
	if err != nil {
		t.Fatal(err)
	}
	var review struct {
		Status struct {
			UserInfo struct {
				Username string
				Groups   []string
			}
		}
	}
	if status < 300 {
		if err := json.Unmarshal([]byte(answer), &review); err != nil {
			t.Fatal(err)
		}
	}
	return status, review.Status.UserInfo.Username, review.Status.UserInfo.Groups
}

func foreignCredentials(t *testing.T, a *attacker) {
	admin, masters := a.config(), a.as("tenantd-admin", "system:masters")
	node := a.as("system:node:host-a", "system:nodes")
	token := strings.TrimSpace(a.kubectl("", "-n", "default", "create", "token", "default").stdout)
	a.apply(`
apiVersion: v1
kind: Secret
type: bootstrap.kubernetes.io/token
metadata: {name: bootstrap-token-abcdef, namespace: kube-system}
stringData: {token-id: abcdef, token-secret: "0123456789abcdef", usage-bootstrap-authentication: "true", auth-extra-groups: "system:bootstrappers:kubeadm:default-node-token"}
---
apiVersion: v1
kind: Secret
type: kubernetes.io/service-account-token
metadata: {name: kept, namespace: kube-system, annotations: {kubernetes.io/service-account.name: default}}
`)
	a.kubectl("", "-n", "kube-system", "wait", "--for=jsonpath={.data.token}", "secret/kept", "--timeout", patience.String())
	secret, err := a.CoreV1().Secrets("kube-system").Get(t.Context(), "kept", getOptions)
	if err != nil {
		t.Fatal(err)
	}
	own := a.anonymously()
	credentials := map[string]func(*rest.Config){
		"administrator's certificate":  func(c *rest.Config) { c.CertData, c.KeyData = admin.CertData, admin.KeyData },
		"system plane's administrator": func(c *rest.Config) { c.CertData, c.KeyData = masters.CertData, masters.KeyData },
		"node's certificate":           func(c *rest.Config) { c.CertData, c.KeyData = node.CertData, node.KeyData },
		"token":                        func(c *rest.Config) { c.BearerToken = token },
		"kept token":                   func(c *rest.Config) { c.BearerToken = string(secret.Data["token"]) },
		"bootstrap token":              func(c *rest.Config) { c.BearerToken = "abcdef.0123456789abcdef" },
		"token beside the certificate": func(c *rest.Config) { c.BearerToken = token; c.CertData, c.KeyData = admin.CertData, admin.KeyData },
		"impersonation by certificate": func(c *rest.Config) {
			c.CertData, c.KeyData = admin.CertData, admin.KeyData
			c.Impersonate.UserName = "kubernetes-admin"
		},
		"impersonation of the masters": func(c *rest.Config) {
			c.BearerToken = token
			c.Impersonate = rest.ImpersonationConfig{UserName: "x", Groups: []string{"system:masters"}}
		},
	}
	for _, name := range sortedKeys(credentials) {
		for _, place := range a.places() {
			cfg := place.anonymously()
			credentials[name](cfg)
			if status, user, _ := whoami(t, cfg); status != http.StatusUnauthorized {
				t.Errorf("the %s at %s: %d %q", name, place.name, status, user)
			}
		}
		cfg := rest.CopyConfig(own)
		credentials[name](cfg)
		if status, _, _ := whoami(t, cfg); status == http.StatusUnauthorized {
			t.Errorf("the %s is refused at home, so this shows nothing", name)
		}
	}
}

// replay is a session cache that offers the one session it has to everybody.
type replay struct{ session *tls.ClientSessionState }

func (r *replay) Get(string) (*tls.ClientSessionState, bool)    { return r.session, r.session != nil }
func (r *replay) Put(_ string, session *tls.ClientSessionState) { r.session = session }

func wrongNames(t *testing.T, a *attacker) {
	base, err := rest.TLSConfigFor(a.config())
	if err != nil {
		t.Fatal(err)
	}
	dial := func(name, protocol string, cache tls.ClientSessionCache, version uint16) *tls.Conn {
		t.Helper()
		cfg := base.Clone()
		// Whose certificate it is shows below.
		cfg.ServerName, cfg.InsecureSkipVerify, cfg.NextProtos, cfg.ClientSessionCache, cfg.MaxVersion = name, true, []string{protocol}, cache, version
		conn, err := tls.Dial("tcp", a.daemon.listen, cfg)
		if err != nil {
			t.Fatalf("connect as %s: %v", name, err)
		}
		return conn
	}
	// ask asks over a connection whose credentials and names are as they may be.
	ask := func(conn *tls.Conn, host string) (int, string) {
		t.Helper()
		defer conn.Close()
		req, err := http.NewRequest(http.MethodGet, "https://"+host+"/api/v1/namespaces/default/configmaps", nil)
		if err != nil {
			t.Fatal(err)
		}
		transport := &http.Transport{
			DialTLSContext:    func(context.Context, string, string) (net.Conn, error) { return conn, nil },
			ForceAttemptHTTP2: true,
		}
		defer transport.CloseIdleConnections()
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	a.apply(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"of-the-attacker","namespace":"default"}}`)
	for _, protocol := range []string{"http/1.1", "h2"} {
		for _, host := range []string{a.victim.host(), "system." + domain, "127.0.0.1", a.victim.name} {
			if status, answer := ask(dial(a.host(), protocol, nil, 0), host); status != http.StatusOK || !strings.Contains(answer, "of-the-attacker") || strings.Contains(answer, "use-") {
				t.Errorf("the attacker's name in TLS, %s in the request, by %s: %d %.200s", host, protocol, status, answer)
			}
		}
		for _, place := range []string{a.victim.host(), "system." + domain} {
			if status, answer := ask(dial(place, protocol, nil, 0), a.host()); status != http.StatusUnauthorized {
				t.Errorf("%s in TLS, the attacker's in the request, by %s: %d %.200s", place, protocol, status, answer)
			}
		}
	}
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		cache := &replay{}
		conn := dial(a.host(), "http/1.1", cache, version)
		ask(conn, a.host()) // reads the ticket too, which follows the handshake in TLS 1.3
		if cache.session == nil {
			continue // no tickets: nothing can be resumed
		}
		for _, place := range []string{a.victim.host(), "system." + domain} {
			conn := dial(place, "http/1.1", &replay{cache.session}, version)
			if conn.ConnectionState().DidResume {
				t.Errorf("%s resumed the attacker's session", place)
			}
			if status, answer := ask(conn, place); status != http.StatusUnauthorized {
				t.Errorf("a session of the attacker's at %s: %d %.200s", place, status, answer)
			}
		}
	}
}

func frontProxyHeaders(t *testing.T, a *attacker) {
	headers := http.Header{
		"X-Remote-User": {"kubernetes-admin"}, "X-Remote-Group": {"system:masters"}, "X-Remote-Uid": {"1"}, "X-Remote-Extra-Scopes": {"all"},
		"X-Forwarded-User": {"kubernetes-admin"}, "Impersonate-User": nil,
	}
	with := func(cfg *rest.Config) *rest.Config {
		cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				r = r.Clone(r.Context())
				for name, values := range headers {
					if values != nil {
						r.Header[name] = values
					}
				}
				return next.RoundTrip(r)
			})
		})
		return cfg
	}
	proxy := a.as("front-proxy-client")
	for _, place := range append(a.places(), a.cluster) {
		if status, user, _ := whoami(t, with(place.anonymously())); status < 400 && user != "system:anonymous" {
			t.Errorf("headers without a certificate at %s: %d %q", place.name, status, user)
		}
		cfg := place.anonymously()
		cfg.CertData, cfg.KeyData = proxy.CertData, proxy.KeyData
		status, user, groups := whoami(t, with(cfg))
		if place.name != a.name && status != http.StatusUnauthorized {
			t.Errorf("headers with a foreign certificate at %s: %d %q", place.name, status, user)
		}
		if user != "front-proxy-client" && user != "" || slices.Contains(groups, "system:masters") {
			t.Errorf("headers with a certificate for the front proxy's name at %s: %q in %q", place.name, user, groups)
		}
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func hiddenProcess(t *testing.T, a *attacker) {
	for _, path := range []string{
		"/metrics", "/metrics/slis", "/metrics/cadvisor", "/metrics/resources", "/logs", "/logs/", "/logs/syslog", "/debug/pprof", "/debug/pprof/", "/debug/pprof/heap",
		"/debug/pprof/goroutine?debug=2", "/debug/pprof/cmdline", "/debug/flags/v", "/debug/api_priority_and_fairness/dump_requests/x", "/configz", "/flagz", "/statusz",
	} {
		for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete} {
			if status, answer := a.raw(method, path, "", nil); status < 400 {
				t.Errorf("%s %s: %d %.200s", method, path, status, answer)
			}
		}
	}
	// Something for events and for nodes to tell.
	a.apply(`
apiVersion: v1
kind: Pod
metadata: {name: nowhere, namespace: default}
spec: {containers: [{name: main, image: none, resources: {requests: {cpu: "1000"}}}]}
---
apiVersion: v1
kind: Node
metadata: {name: worker-1}
`)
	eventually(t, "an event tells of the pod", func() error {
		if a.kubectl("", "-n", "default", "get", "events", "--field-selector", "reason=FailedScheduling", "-o", "name").stdout == "" {
			return errors.New("none does")
		}
		return nil
	})
	// What API servers say of themselves has the machine's name, which may be too short
	// to look for.
	if leases := a.kubectl("", "-n", "kube-system", "get", "leases", "-l", "apiserver.kubernetes.io/identity", "-o", "name"); leases.stdout != "" || leases.code != 0 {
		t.Errorf("the API server tells who it is: %s%s", leases.stdout, leases.stderr)
	}
	machine, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	secrets := []string{a.daemon.dir, "host-a", `"` + a.victim.name + `"`, a.victim.host(), "system." + domain, string(a.victim.tenant().UID), string(a.tenant().UID)}
	if len(machine) > 3 {
		secrets = append(secrets, machine)
	}
	look := func(path, text string) {
		t.Helper()
		for _, s := range secrets {
			if i := strings.Index(text, s); i >= 0 {
				t.Errorf("GET %s shows %q: …%s…", path, s, text[max(0, i-100):min(len(text), i+100)])
			}
		}
	}
	status, index := a.raw(http.MethodGet, "/", "", nil)
	var root struct{ Paths []string }
	if err := json.Unmarshal([]byte(index), &root); err != nil || status != http.StatusOK {
		t.Fatalf("GET /: %d %v", status, err)
	}
	paths := append(root.Paths, "/version", "/.well-known/openid-configuration", "/openid/v1/jwks", "/readyz?verbose", "/livez?verbose")
	resources, err := a.Discovery().ServerPreferredResources()
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range resources {
		prefix := "/apis/" + list.GroupVersion + "/"
		if !strings.Contains(list.GroupVersion, "/") {
			prefix = "/api/" + list.GroupVersion + "/"
		}
		for _, r := range list.APIResources {
			if slices.Contains(r.Verbs, "list") {
				paths = append(paths, prefix+r.Name)
			}
		}
	}
	if len(paths) < 100 {
		t.Errorf("there are only %d paths", len(paths))
	}
	httpClient, err := httpClientFor(a.config())
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		resp, err := httpClient.Get(a.config().Host + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		look(path, string(body)+fmt.Sprint(resp.Header))
	}
	// And what TLS shows of another.
	conn, err := (&tls.Dialer{NetDialer: &net.Dialer{}, Config: &tls.Config{ServerName: a.host(), InsecureSkipVerify: true}}).DialContext(context.Background(), "tcp", a.daemon.listen)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	leaf := conn.(*tls.Conn).ConnectionState().PeerCertificates[0]
	look("the certificate", fmt.Sprint(leaf.Subject, leaf.Issuer, leaf.DNSNames, leaf.IPAddresses))
}

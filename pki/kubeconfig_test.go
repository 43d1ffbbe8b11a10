// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
)

func TestKubeconfigIsReadByClientcmd(t *testing.T) {
	a := open(t, AuthorityConfig{Storage: newStorage(t)})
	cert, key, _, err := a.IssueClient(t.Context(), "admin", nil, MinClientTTL)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		server, name, wantName string
	}{
		{"https://acme.k8s.example.com:443", "acme.k8s.example.com", ""},
		{"https://ACME.k8s.example.com", "acme.k8s.example.com", ""},
		{"https://127.0.0.1:8443", "acme.k8s.example.com", "acme.k8s.example.com"},
		{"https://[::1]:8443", "acme.k8s.example.com", "acme.k8s.example.com"},
		{"https://127.0.0.1:8443", "", ""},
	} {
		t.Run(tt.server+" "+tt.name, func(t *testing.T) {
			file, err := Kubeconfig(KubeconfigParams{
				Cluster: "acme", User: "admin", Server: tt.server, TLSServerName: tt.name, CA: a.CA(), Cert: cert, Key: key,
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Contains(string(file), "tls-server-name"); got != (tt.wantName != "") {
				t.Errorf("tls-server-name is written: %v", got)
			}
			loaded, err := clientcmd.NewClientConfigFromBytes(file)
			if err != nil {
				t.Fatal(err)
			}
			if namespace, _, err := loaded.Namespace(); err != nil || namespace != "default" {
				t.Errorf("namespace %q, %v", namespace, err)
			}
			rest, err := loaded.ClientConfig()
			if err != nil {
				t.Fatal(err)
			}
			if rest.Host != tt.server || rest.ServerName != tt.wantName || string(rest.CAData) != string(a.CA()) ||
				string(rest.CertData) != string(cert) || string(rest.KeyData) != string(key) {
				t.Errorf("lost something: host %s, server name %s", rest.Host, rest.ServerName)
			}
		})
	}
}

func TestKubeconfigKeepsExtensions(t *testing.T) {
	file, err := Kubeconfig(KubeconfigParams{
		Cluster: "c", User: "u", Server: "https://h", CA: []byte("x"), Cert: []byte("x"), Key: []byte("x"),
		Extensions: map[string][]byte{"example.com/more": []byte(`{"addresses":["192.0.2.1:443"]}`)},
	})
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	kept, ok := config.Clusters["c"].Extensions["example.com/more"].(*runtime.Unknown)
	if !ok || string(kept.Raw) != `{"addresses":["192.0.2.1:443"]}` {
		t.Errorf("the extension is %T %s", config.Clusters["c"].Extensions["example.com/more"], file)
	}
}

func TestKubeconfigRefuses(t *testing.T) {
	good := KubeconfigParams{Cluster: "c", User: "u", Server: "https://h", CA: []byte("x"), Cert: []byte("x"), Key: []byte("x")}
	if _, err := Kubeconfig(good); err != nil {
		t.Fatal(err)
	}
	for what, spoil := range map[string]func(*KubeconfigParams){
		"http":       func(p *KubeconfigParams) { p.Server = "http://h" },
		"no scheme":  func(p *KubeconfigParams) { p.Server = "h:443" },
		"no host":    func(p *KubeconfigParams) { p.Server = "https://:443" },
		"no cluster": func(p *KubeconfigParams) { p.Cluster = "" },
		"no user":    func(p *KubeconfigParams) { p.User = "" },
		"no CA":      func(p *KubeconfigParams) { p.CA = nil },
		"no key":     func(p *KubeconfigParams) { p.Key = nil },
	} {
		p := good
		spoil(&p)
		if _, err := Kubeconfig(p); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

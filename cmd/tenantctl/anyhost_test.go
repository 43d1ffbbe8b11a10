// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// kubeconfigOf writes a kubeconfig of a server that lists hosts, and has tenantctl use it.
func kubeconfigOf(t *testing.T, server, extension string) {
	t.Helper()
	config := clientcmdapi.NewConfig()
	config.Clusters["system"] = &clientcmdapi.Cluster{Server: server, Extensions: map[string]runtime.Object{
		v1alpha1.HostsExtension: &runtime.Unknown{Raw: []byte(extension), ContentType: runtime.ContentTypeJSON},
	}}
	config.Contexts["system"] = &clientcmdapi.Context{Cluster: "system"}
	config.CurrentContext = "system"
	path := filepath.Join(t.TempDir(), "admin.kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	t.Setenv(kubeconfigVariable, path)
}

func listing(t *testing.T, servers ...string) string {
	t.Helper()
	var addresses []string
	for _, server := range servers {
		u, err := url.Parse(server)
		if err != nil {
			t.Fatal(err)
		}
		addresses = append(addresses, u.Host)
	}
	content, err := v1alpha1.FormatKubeconfigHosts(addresses)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// A host that does not answer, or is not ready, is not the end.
func TestAnyHost(t *testing.T) {
	start := func(name string) *fakePlane {
		p := startPlane(t)
		p.set(name, makeReady)
		return p
	}
	well, other := start("of-the-server"), start("of-another")
	unready := start("of-nobody")
	unready.refuse = func(*http.Request) *apierrors.StatusError { return apierrors.NewServiceUnavailable("no majority") }
	silent, err := net.Listen("tcp", "127.0.0.1:0") // as a frozen host: the kernel takes connections
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	frozen, dead := "http://"+silent.Addr().String(), "http://"+gone.Addr().String()
	for _, test := range []struct {
		name, server string
		hosts        []string
		tenant, says string
	}{
		{"the server answers", well.url, []string{well.url, other.url}, "of-the-server", ""},
		{"it is dead", dead, []string{dead, other.url}, "of-another", "connection refused"},
		{"it is frozen", frozen, []string{other.url}, "of-another", "nothing within"},
		{"it is not ready", unready.url, []string{unready.url, other.url}, "of-another", "503"},
		{"all but one", dead, []string{dead, unready.url, other.url}, "of-another", strings.TrimPrefix(other.url, "http://")},
	} {
		t.Run(test.name, func(t *testing.T) {
			kubeconfigOf(t, test.server, listing(t, test.hosts...))
			s := (&session{t: t}).run("list", "-o", "name")
			s.succeeds("tenant.tenantd.io/" + test.tenant + "\n")
			if !strings.Contains(s.err, test.says) || test.says == "" && s.err != "" {
				t.Errorf("it says %q, want %q", s.err, test.says)
			}
		})
	}
	t.Run("none answers", func(t *testing.T) {
		kubeconfigOf(t, dead, listing(t, dead, unready.url))
		(&session{t: t}).run("list").fails(exitFailed, dead, "connection refused")
	})
	t.Run("the list is broken", func(t *testing.T) {
		kubeconfigOf(t, well.url, `{"addresses":"all"}`)
		(&session{t: t}).run("list").fails(exitFailed, v1alpha1.HostsExtension)
	})
}

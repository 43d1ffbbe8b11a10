// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clientcmdlatest "k8s.io/client-go/tools/clientcmd/api/latest"
)

// KubeconfigParams is what goes into a kubeconfig.
type KubeconfigParams struct {
	Cluster string // its name in the file
	User    string // its name in the file
	Server  string // https://host[:port]
	// TLSServerName is the tenant's hostname. It is written only if the server's
	// host is another, so that the file works before DNS does.
	TLSServerName string
	CA, Cert, Key []byte // PEM, embedded in the file
	// Extensions are those of the cluster: JSON objects, by name.
	Extensions map[string][]byte
}

// Kubeconfig returns a kubeconfig of one cluster, one user and one context, which
// is the current one, in the namespace "default".
func Kubeconfig(p KubeconfigParams) ([]byte, error) {
	server, err := url.Parse(p.Server)
	if err != nil || server.Scheme != "https" || server.Hostname() == "" {
		return nil, fmt.Errorf("make kubeconfig: server %q must be https://host[:port]", p.Server)
	}
	if p.Cluster == "" || p.User == "" || len(p.CA) == 0 || len(p.Cert) == 0 || len(p.Key) == 0 {
		return nil, errors.New("make kubeconfig: cluster, user, CA, certificate and key are all needed")
	}
	cluster := &clientcmdapi.Cluster{Server: p.Server, CertificateAuthorityData: p.CA}
	if !strings.EqualFold(p.TLSServerName, server.Hostname()) {
		cluster.TLSServerName = p.TLSServerName
	}
	for name, content := range p.Extensions {
		if cluster.Extensions == nil {
			cluster.Extensions = map[string]runtime.Object{}
		}
		cluster.Extensions[name] = &runtime.Unknown{Raw: content, ContentType: runtime.ContentTypeJSON}
	}
	current := p.User + "@" + p.Cluster
	config := clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{p.Cluster: cluster},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{p.User: {ClientCertificateData: p.Cert, ClientKeyData: p.Key}},
		Contexts:       map[string]*clientcmdapi.Context{current: {Cluster: p.Cluster, AuthInfo: p.User, Namespace: "default"}},
		CurrentContext: current,
	}
	out, err := runtime.Encode(clientcmdlatest.Codec, &config)
	if err != nil {
		return nil, fmt.Errorf("make kubeconfig: %w", err)
	}
	return out, nil
}

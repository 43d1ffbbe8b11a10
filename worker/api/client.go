// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

const (
	// answerLimit bounds what is read of an answer. A Node with many images is the
	// largest and rarely above 100 KiB.
	answerLimit = 4 << 20

	// hostsPath is the list of hosts that a tenant's cluster holds for its workers.
	hostsPath = "/api/v1/namespaces/kube-public/configmaps/tenantd-hosts"
)

// Config describes a client.
type Config struct {
	// Hostname is the tenant's, which its certificate has to have. Required.
	Hostname string
	// RootCAs verify it. Required.
	RootCAs *x509.CertPool
	// GetClientCertificate is as in tls.Config. Nil means to be anonymous, which is
	// enough for Ready.
	GetClientCertificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
	// Dial makes the connection that TLS runs over. Required.
	Dial func(ctx context.Context) (net.Conn, error)
}

// Client asks one API server. It is safe for concurrent use. Close it.
type Client struct {
	http     *http.Client
	hostname string
}

// New makes a client. It connects when it is asked something.
func New(cfg Config) *Client {
	transport := &http.Transport{
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return cfg.Dial(ctx) },
		ForceAttemptHTTP2: false,
		MaxIdleConns:      1,
		IdleConnTimeout:   time.Minute,
		TLSClientConfig: &tls.Config{
			ServerName:           cfg.Hostname,
			RootCAs:              cfg.RootCAs,
			MinVersion:           tls.VersionTLS12,
			NextProtos:           []string{"http/1.1"},
			GetClientCertificate: cfg.GetClientCertificate,
		},
	}
	return &Client{hostname: cfg.Hostname, http: &http.Client{
		Transport: transport,
		// An API server does not redirect; whoever does is something else.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Refresh makes the next question use a new connection, and a rotated certificate.
func (c *Client) Refresh() { c.http.CloseIdleConnections() }

// Close closes the connection that is kept for the next question.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Ready asks whether the API server is ready. Its clock is the server's, or zero
// when it did not say.
func (c *Client) Ready(ctx context.Context) (clock time.Time, err error) {
	_, header, err := c.get(ctx, "/readyz")
	if err != nil {
		return time.Time{}, err
	}
	clock, _ = http.ParseTime(header.Get("Date"))
	return clock, nil
}

// Hosts is what a tenant's cluster says of the hosts.
type Hosts struct {
	Addresses            []netip.AddrPort
	KonnectivityHostname string // the tunnel's second name, or empty
}

// Hosts asks for the list of hosts. It needs the certificate of a node. Lines that
// are no address are passed over: a later release may have more to say in them.
func (c *Client) Hosts(ctx context.Context) (Hosts, error) {
	body, _, err := c.get(ctx, hostsPath)
	if err != nil {
		return Hosts{}, err
	}
	var object struct {
		Data struct{ Hosts, KonnectivityHostname string }
	}
	if err := json.Unmarshal(body, &object); err != nil {
		return Hosts{}, fmt.Errorf("read the list of hosts: %w", err)
	}
	hosts := Hosts{KonnectivityHostname: strings.TrimSpace(object.Data.KonnectivityHostname)}
	for line := range strings.Lines(object.Data.Hosts) {
		if address, err := netip.ParseAddrPort(strings.TrimSpace(line)); err == nil && address.Port() != 0 {
			hosts.Addresses = append(hosts.Addresses, address)
		}
	}
	return hosts, nil
}

// NodeAddresses asks which addresses a node has. It needs the node's certificate.
func (c *Client) NodeAddresses(ctx context.Context, node string) ([]netip.Addr, error) {
	body, _, err := c.get(ctx, "/api/v1/nodes/"+url.PathEscape(node))
	if err != nil {
		return nil, err
	}
	var object struct {
		Status struct{ Addresses []struct{ Address string } }
	}
	if err := json.Unmarshal(body, &object); err != nil {
		return nil, fmt.Errorf("read the addresses of node %q: %w", node, err)
	}
	var addresses []netip.Addr
	for _, a := range object.Status.Addresses {
		if address, err := netip.ParseAddr(a.Address); err == nil {
			addresses = append(addresses, address)
		}
	}
	return addresses, nil
}

// Networks are the networks of a cluster's pods and Services, as kubeadm was told
// them. It needs the certificate of a node.
func (c *Client) Networks(ctx context.Context) ([]netip.Prefix, error) {
	body, _, err := c.get(ctx, "/api/v1/namespaces/kube-system/configmaps/kubeadm-config")
	if err != nil {
		return nil, err
	}
	var object struct {
		Data struct{ ClusterConfiguration string }
	}
	var kubeadm struct {
		Networking struct {
			PodSubnet     string `yaml:"podSubnet"`
			ServiceSubnet string `yaml:"serviceSubnet"`
		}
	}
	if err := errors.Join(json.Unmarshal(body, &object), yaml.Unmarshal([]byte(object.Data.ClusterConfiguration), &kubeadm)); err != nil {
		return nil, fmt.Errorf("read the cluster's networks: %w", err)
	}
	var networks []netip.Prefix
	for text := range strings.SplitSeq(kubeadm.Networking.PodSubnet+","+kubeadm.Networking.ServiceSubnet, ",") {
		if network, err := netip.ParsePrefix(strings.TrimSpace(text)); err == nil {
			networks = append(networks, network)
		}
	}
	return networks, nil
}

// StatusError is an answer other than 200.
type StatusError struct {
	Path string
	Code int
	Text string // the beginning of the answer, in one line
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("GET %s: the API server answered %d %s: %s", e.Path, e.Code, http.StatusText(e.Code), e.Text)
}

func (c *Client) get(ctx context.Context, path string) ([]byte, http.Header, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+c.hostname+path, nil)
	if err != nil {
		return nil, nil, fmt.Errorf("ask for %s: %w", path, err)
	}
	request.Header.Set("User-Agent", "tenant-proxy")
	request.Header.Set("Accept", "application/json")
	response, err := c.http.Do(request)
	if err != nil {
		// The URL in it is the path and a name that was not looked up.
		if wrapped, ok := errors.AsType[*url.Error](err); ok {
			err = wrapped.Err
		}
		return nil, nil, fmt.Errorf("GET %s: %w", path, err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, answerLimit+1))
	switch {
	case err != nil:
		return nil, nil, fmt.Errorf("GET %s: read the answer: %w", path, err)
	case len(body) > answerLimit:
		return nil, nil, fmt.Errorf("GET %s: the answer is larger than %d bytes", path, answerLimit)
	case response.StatusCode != http.StatusOK:
		return nil, nil, &StatusError{Path: path, Code: response.StatusCode, Text: strings.Join(strings.Fields(string(body[:min(len(body), 200)])), " ")}
	}
	return body, response.Header, nil
}

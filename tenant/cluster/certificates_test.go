// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

var servingUsages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}

// request posts a request for a certificate and returns its name.
func request(t *testing.T, client kubernetes.Interface, signer string, usages []certificatesv1.KeyUsage, template *x509.CertificateRequest) string {
	t.Helper()
	csr, err := post(t, client, signer, usages, template)
	if err != nil {
		t.Fatal(err)
	}
	return csr.Name
}

func post(t *testing.T, client kubernetes.Interface, signer string, usages []certificatesv1.KeyUsage, template *x509.CertificateRequest) (*certificatesv1.CertificateSigningRequest, error) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return client.CertificatesV1().CertificateSigningRequests().Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), SignerName: signer, Usages: usages,
		},
	}, metav1.CreateOptions{})
}

// join makes a Node as a kubelet does: with its own certificate, and its addresses
// in a status that it writes itself.
func (p *plane) join(name string, addresses ...corev1.NodeAddress) *kubernetes.Clientset {
	p.t.Helper()
	kubelet := p.as("system:node:"+name, "system:nodes", "")
	if _, err := kubelet.CoreV1().Nodes().Create(p.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		p.t.Fatal(err)
	}
	status, err := json.Marshal(map[string]any{"status": map[string]any{"addresses": addresses}})
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := kubelet.CoreV1().Nodes().PatchStatus(p.t.Context(), name, status); err != nil {
		p.t.Fatal(err)
	}
	return kubelet
}

// issued returns the certificate that a request led to.
func (p *plane) issued(csr string) *x509.Certificate {
	p.t.Helper()
	var cert *x509.Certificate
	eventually(p.t, func() error {
		r, err := p.admin.CertificatesV1().CertificateSigningRequests().Get(p.t.Context(), csr, metav1.GetOptions{})
		if err != nil {
			return err
		}
		block, _ := pem.Decode(r.Status.Certificate)
		if block == nil {
			return fmt.Errorf("no certificate: %v", r.Status.Conditions)
		}
		cert, err = x509.ParseCertificate(block.Bytes)
		return err
	})
	return cert
}

// refused waits for the Event that says why a request stays pending.
func (p *plane) refused(csr, reason string) {
	p.t.Helper()
	eventually(p.t, func() error {
		r, err := p.admin.CertificatesV1().CertificateSigningRequests().Get(p.t.Context(), csr, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(r.Status.Conditions) > 0 {
			p.t.Fatalf("decided: %v", r.Status.Conditions)
		}
		events, err := p.admin.CoreV1().Events("default").List(p.t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + csr})
		if err != nil {
			return err
		}
		var all []string
		for _, e := range events.Items {
			if strings.Contains(e.Message, reason) {
				return nil
			}
			all = append(all, e.Message)
		}
		return fmt.Errorf("no event with %q, but %q", reason, all)
	})
}

func address(kind corev1.NodeAddressType, address string) corev1.NodeAddress {
	return corev1.NodeAddress{Type: kind, Address: address}
}

func subject(node string) pkix.Name {
	return pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:" + node}
}

func TestServingCertificates(t *testing.T) {
	p := startCluster(t)
	p.join("other", address(corev1.NodeHostName, "other"), address(corev1.NodeInternalIP, "10.1.0.9"), address(corev1.NodeInternalDNS, "other.nodes.test"))

	// What the node says of itself goes further than what it may have.
	claimed := []corev1.NodeAddress{
		address(corev1.NodeHostName, "w1"), address(corev1.NodeInternalIP, "10.1.0.1"), address(corev1.NodeExternalIP, "2001:db8::1"),
		address(corev1.NodeInternalDNS, "w1.nodes.test"),
		address(corev1.NodeInternalIP, "10.1.0.9"), address(corev1.NodeHostName, "other"), address(corev1.NodeExternalDNS, "other.nodes.test"),
		address(corev1.NodeInternalIP, "172.20.9.9"), address(corev1.NodeInternalIP, "127.0.0.1"), address(corev1.NodeInternalIP, "10.96.0.1"),
		address(corev1.NodeInternalIP, "192.0.2.7"), address(corev1.NodeInternalIP, "169.254.169.254"), address(corev1.NodeInternalIP, "0.0.0.0"),
		address(corev1.NodeHostName, hostname), address(corev1.NodeHostName, "api.test"), address(corev1.NodeHostName, "kubernetes.default.svc"),
		address(corev1.NodeHostName, "kubernetes"), address(corev1.NodeHostName, "web.shop.svc.cluster.local"), address(corev1.NodeHostName, "*.test"),
		address(corev1.NodeInternalDNS, "10.96.0.1"), address(corev1.NodeHostName, "API.test"),
	}
	w1 := p.join("w1", claimed...)
	uri, err := url.Parse("spiffe://cluster/w1")
	if err != nil {
		t.Fatal(err)
	}
	dns := func(names ...string) *x509.CertificateRequest {
		return &x509.CertificateRequest{Subject: subject("w1"), DNSNames: names, IPAddresses: []net.IP{net.IPv4(10, 1, 0, 1)}}
	}
	ips := func(addresses ...string) *x509.CertificateRequest {
		r := &x509.CertificateRequest{Subject: subject("w1"), DNSNames: []string{"w1"}}
		for _, a := range addresses {
			r.IPAddresses = append(r.IPAddresses, net.ParseIP(a))
		}
		return r
	}
	with := func(r *x509.CertificateRequest, f func(*x509.CertificateRequest)) *x509.CertificateRequest {
		f(r)
		return r
	}
	for name, tt := range map[string]struct {
		client  *kubernetes.Clientset // nil: the node's own
		usages  []certificatesv1.KeyUsage
		request *x509.CertificateRequest
		refused string // empty: it is issued
		// The API server does not take it to begin with.
		forbidden bool
	}{
		"own":               {request: dns("w1", "w1.nodes.test")},
		"own IPv6":          {request: ips("10.1.0.1", "2001:db8::1")},
		"address alone":     {request: with(ips("10.1.0.1"), func(r *x509.CertificateRequest) { r.DNSNames = nil })},
		"with RSA's usages": {usages: append([]certificatesv1.KeyUsage{certificatesv1.UsageKeyEncipherment}, servingUsages...), request: dns("w1")},

		"nothing":               {request: &x509.CertificateRequest{Subject: subject("w1")}, refused: "subjectAltName is required"},
		"unknown address":       {request: ips("10.1.0.2"), refused: "IP:10.1.0.2 is not among"},
		"unknown name":          {request: dns("w2"), refused: "DNS:w2 is not among"},
		"one unknown of two":    {request: dns("w1", "w2"), refused: "DNS:w2 is not among"},
		"another's address":     {request: ips("10.1.0.9"), refused: `belongs to Node "other"`},
		"mapped into IPv6":      {request: ips("::ffff:10.1.0.9"), refused: `belongs to Node "other"`},
		"another's name":        {request: dns("other"), refused: `belongs to Node "other"`},
		"another's DNS name":    {request: dns("other.nodes.test"), refused: `belongs to Node "other"`},
		"the VIP":               {request: ips("172.20.9.9"), refused: "the API server's or a Service's"},
		"a Service's address":   {request: ips("10.96.0.1"), refused: "the API server's or a Service's"},
		"certSANs' address":     {request: ips("192.0.2.7"), refused: "the API server's or a Service's"},
		"loopback":              {request: ips("127.0.0.1"), refused: "not an address that other machines reach"},
		"link-local":            {request: ips("169.254.169.254"), refused: "not an address that other machines reach"},
		"unspecified":           {request: ips("0.0.0.0"), refused: "not an address that other machines reach"},
		"the tenant's hostname": {request: dns(hostname), refused: "the API server's or a Service's"},
		"certSANs' name":        {request: dns("api.test"), refused: "the API server's or a Service's"},
		"in upper case":         {request: dns("API.test"), refused: "not the name of a machine"},
		"the Service's name":    {request: dns("kubernetes.default.svc"), refused: "the API server's or a Service's"},
		"its short name":        {request: dns("kubernetes"), refused: "the API server's or a Service's"},
		"a Service's full name": {request: dns("web.shop.svc.cluster.local"), refused: "the API server's or a Service's"},
		"wildcard":              {request: dns("*.test"), refused: "not the name of a machine"},
		"address as a name":     {request: dns("10.96.0.1"), refused: "given as a name"},
		"mail address":          {request: with(dns("w1"), func(r *x509.CertificateRequest) { r.EmailAddresses = []string{"a@b.test"} }), refused: "Email"},
		"URI":                   {request: with(dns("w1"), func(r *x509.CertificateRequest) { r.URIs = []*url.URL{uri} }), refused: "URI"},
		"another's identity":    {request: with(dns("w1"), func(r *x509.CertificateRequest) { r.Subject = subject("other") }), forbidden: true},
		"no node's identity":    {request: with(dns("w1"), func(r *x509.CertificateRequest) { r.Subject.CommonName = "admin" }), forbidden: true},
		"other organization":    {request: with(dns("w1"), func(r *x509.CertificateRequest) { r.Subject.Organization = []string{"system:masters"} }), refused: "organization"},
		"two organizations": {
			request: with(dns("w1"), func(r *x509.CertificateRequest) { r.Subject.Organization = []string{"system:nodes", "system:masters"} }), refused: "organization",
		},
		"more in the subject": {
			request: with(dns("w1"), func(r *x509.CertificateRequest) {
				r.Subject.ExtraNames = []pkix.AttributeTypeAndValue{{Type: asn1.ObjectIdentifier{2, 5, 4, 11}, Value: "unit"}}
			}), refused: "more in it",
		},
		"client usage": {usages: append([]certificatesv1.KeyUsage{certificatesv1.UsageClientAuth}, servingUsages...), request: dns("w1"), refused: "usages"},
		"signing usage": {
			usages: append([]certificatesv1.KeyUsage{certificatesv1.UsageCertSign}, servingUsages...), request: dns("w1"), refused: "usages",
		},
		"an administrator":    {client: p.as("admin", "system:masters", ""), request: dns("w1"), refused: `"admin" is not a node`},
		"a node by name only": {client: p.as("system:node:w1", "system:masters", ""), request: dns("w1"), refused: "is not a node"},
	} {
		t.Run(name, func(t *testing.T) {
			p := *p
			p.t = t
			client, usages := tt.client, tt.usages
			if client == nil {
				client = w1
			}
			if usages == nil {
				usages = servingUsages
			}
			posted, err := post(t, client, certificatesv1.KubeletServingSignerName, usages, tt.request)
			if tt.forbidden {
				if !apierrors.IsForbidden(err) {
					t.Errorf("the request is not forbidden: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			csr := posted.Name
			if tt.refused != "" {
				p.refused(csr, tt.refused)
				return
			}
			roots := x509.NewCertPool()
			roots.AppendCertsFromPEM(p.authority.CA())
			if _, err := p.issued(csr).Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
				t.Error(err)
			}
		})
	}
}

// A request that comes too early is approved when it has become good, without
// another one.
func TestServingCertificateBeforeItsNode(t *testing.T) {
	p := startCluster(t)
	kubelet := p.as("system:node:w1", "system:nodes", "")
	template := &x509.CertificateRequest{Subject: subject("w1"), DNSNames: []string{"w1"}, IPAddresses: []net.IP{net.IPv4(10, 1, 0, 1)}}
	csr := request(t, kubelet, certificatesv1.KubeletServingSignerName, servingUsages, template)
	p.refused(csr, `there is no Node "w1" yet`)

	// The machine that had the address before is still there.
	p.join("old", address(corev1.NodeInternalIP, "10.1.0.1"))
	p.join("w1", address(corev1.NodeHostName, "w1"), address(corev1.NodeInternalIP, "10.1.0.1"))
	p.refused(csr, `belongs to Node "old"`)
	if err := p.admin.CoreV1().Nodes().Delete(t.Context(), "old", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	p.issued(csr)
}

// A machine with a bootstrap token gets its first certificate, and with that one
// another, without anybody's doing.
func TestClientCertificates(t *testing.T) {
	p := startCluster(t)
	usages := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}
	template := &x509.CertificateRequest{Subject: subject("w1")}
	first := p.issued(request(t, p.as("", "", p.token()), certificatesv1.KubeAPIServerClientKubeletSignerName, usages, template))
	if first.Subject.CommonName != "system:node:w1" {
		t.Errorf("the certificate is for %s", first.Subject)
	}
	p.issued(request(t, p.as("system:node:w1", "system:nodes", ""), certificatesv1.KubeAPIServerClientKubeletSignerName, usages, template))
}

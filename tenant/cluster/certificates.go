// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/pkg/apis/certificates"
)

// nodeUser is what precedes a node's name in its user name.
const nodeUser = "system:node:"

// pending says whether csr is a request for a kubelet's serving certificate that
// nobody has decided.
func pending(csr *certificatesv1.CertificateSigningRequest) bool {
	return csr.Spec.SignerName == certificatesv1.KubeletServingSignerName && len(csr.Status.Certificate) == 0 && len(csr.Status.Conditions) == 0
}

// watchCertificates has requests examined when they come and when the Nodes'
// addresses change.
func (c *Cluster) watchCertificates() error {
	requests := c.cfg.Informers.Certificates().V1().CertificateSigningRequests()
	nodes := c.cfg.Informers.Core().V1().Nodes()
	c.requests, c.nodes = requests.Lister(), nodes.Lister()

	examine := func(obj any) {
		if csr, ok := obj.(*certificatesv1.CertificateSigningRequest); ok && pending(csr) {
			c.examineSoon(csr.Name)
		}
	}
	examineAll := func() {
		for _, obj := range requests.Informer().GetStore().List() {
			examine(obj)
		}
	}
	return errors.Join(
		c.listen(requests.Informer(), cache.ResourceEventHandlerFuncs{
			AddFunc:    examine,
			UpdateFunc: func(_, obj any) { examine(obj) },
		}),
		c.listen(nodes.Informer(), cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { examineAll() },
			UpdateFunc: func(old, obj any) {
				if !slices.Equal(old.(*corev1.Node).Status.Addresses, obj.(*corev1.Node).Status.Addresses) {
					examineAll()
				}
			},
			DeleteFunc: func(any) { examineAll() },
		}),
	)
}

func (c *Cluster) examineSoon(name string) {
	c.mu.Lock()
	c.examine[name] = struct{}{}
	c.mu.Unlock()
	c.tasks.mark(taskCertificates)
}

// examineCertificates approves what is to be approved of the requests that have
// come or may have become good since it last ran.
func (c *Cluster) examineCertificates(ctx context.Context) error {
	c.mu.Lock()
	names := c.examine
	c.examine = map[string]struct{}{}
	c.mu.Unlock()

	var errs []error
	for name := range names {
		if err := c.examineCertificate(ctx, name); err != nil {
			errs = append(errs, err)
			c.mu.Lock()
			c.examine[name] = struct{}{}
			c.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

func (c *Cluster) examineCertificate(ctx context.Context, name string) error {
	csr, err := c.requests.Get(name)
	if err != nil || !pending(csr) {
		return nil // gone or decided
	}
	if reason := c.refuse(csr); reason != nil {
		return c.explain(ctx, csr, reason)
	}
	csr = csr.DeepCopy()
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue,
		Reason: "AutoApproved", Message: "Approved by tenantd: it comes from the node and names only the node's own addresses.",
	})
	_, err = c.cfg.Client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, name, csr, metav1.UpdateOptions{FieldManager: tenantd})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("approve certificate request %q: %w", name, err)
	}
	c.log.Debug("approved a kubelet's serving certificate", "request", name, "user", csr.Spec.Username)
	return nil
}

// explain tells the tenant why a request stays pending: once for each reason,
// for the reason is in the Event's name.
func (c *Cluster) explain(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, reason error) error {
	sum := sha256.Sum256([]byte(string(csr.UID) + reason.Error()))
	now := metav1.NewTime(time.Now())
	err := c.post(ctx, &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "kubelet-serving-" + hex.EncodeToString(sum[:8])},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: certificatesv1.SchemeGroupVersion.String(), Kind: "CertificateSigningRequest", Name: csr.Name, UID: csr.UID,
		},
		Type: corev1.EventTypeWarning, Reason: "NotApproved", Message: reason.Error(),
		Source: corev1.EventSource{Component: tenantd}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
	})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	if err == nil {
		c.log.Info("a kubelet's serving certificate is not approved", "request", csr.Name, "user", csr.Spec.Username, "reason", reason)
	}
	return err
}

// refuse says why csr must not be approved, or nil if it may.
func (c *Cluster) refuse(csr *certificatesv1.CertificateSigningRequest) error {
	req, err := certificates.ParseCSR(csr.Spec.Request)
	if err != nil {
		return fmt.Errorf("the request cannot be read: %w", err)
	}
	usages := sets.NewString()
	for _, u := range csr.Spec.Usages {
		usages.Insert(string(u))
	}
	if err := certificates.ValidateKubeletServingCSR(req, usages); err != nil {
		return err
	}
	name, isNode := strings.CutPrefix(csr.Spec.Username, nodeUser)
	switch {
	case !isNode || !slices.Contains(csr.Spec.Groups, "system:nodes"):
		return fmt.Errorf("%q is not a node", csr.Spec.Username)
	case req.Subject.CommonName != csr.Spec.Username:
		return fmt.Errorf("%s asks for a certificate of %s", csr.Spec.Username, req.Subject.CommonName)
	case len(req.Subject.Names) != 2:
		return errors.New("the subject has more in it than organization and common name")
	}
	node, err := c.nodes.Get(name)
	if err != nil {
		return fmt.Errorf("there is no Node %q yet", name)
	}
	if err := c.refuseNames(req); err != nil {
		return err
	}
	own := claims(node)
	for _, claim := range requested(req) {
		if !own[claim] {
			return fmt.Errorf("%s is not among the addresses in the status of Node %q", claim, name)
		}
	}
	return c.refuseOthers(node, req)
}

// refuseNames refuses what no node may be called.
func (c *Cluster) refuseNames(req *x509.CertificateRequest) error {
	for _, dns := range req.DNSNames {
		// Wildcards are no names, and an address belongs where addresses are.
		if len(validation.IsDNS1123Subdomain(dns)) > 0 {
			return fmt.Errorf("%q is not the name of a machine", dns)
		}
		if _, err := netip.ParseAddr(dns); err == nil {
			return fmt.Errorf("the address %s is given as a name", dns)
		}
		if c.reserved.name(dns) {
			return fmt.Errorf("the name %s is the API server's or a Service's", dns)
		}
	}
	for _, ip := range req.IPAddresses {
		addr, ok := netip.AddrFromSlice(ip)
		addr = addr.Unmap()
		switch {
		case !ok || !addr.IsGlobalUnicast():
			return fmt.Errorf("%s is not an address that other machines reach", ip)
		case c.reserved.addresses[addr] || c.reserved.services.Contains(addr):
			return fmt.Errorf("the address %s is the API server's or a Service's", ip)
		}
	}
	return nil
}

// refuseOthers refuses what another Node claims or is called.
func (c *Cluster) refuseOthers(node *corev1.Node, req *x509.CertificateRequest) error {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return err
	}
	mine := requested(req)
	for _, other := range nodes {
		if other.Name == node.Name {
			continue
		}
		theirs := claims(other)
		theirs["DNS:"+other.Name] = true
		for _, claim := range mine {
			if theirs[claim] {
				return fmt.Errorf("%s belongs to Node %q too: remove it from one of the two", claim, other.Name)
			}
		}
	}
	return nil
}

// reserved are the names and addresses that are not a node's to have.
type reserved struct {
	names     map[string]bool
	zones     []string // and all names below them
	addresses map[netip.Addr]bool
	services  netip.Prefix
}

func newReserved(cfg *Config) (r reserved, err error) {
	if r.services, err = netip.ParsePrefix(cfg.ServiceCIDR); err != nil {
		return r, fmt.Errorf("service CIDR: %w", err)
	}
	vip, ok := netip.AddrFromSlice(cfg.WorkerVIP)
	if !ok {
		return r, errors.New("worker VIP is not an address")
	}
	r.addresses = map[netip.Addr]bool{vip.Unmap(): true}
	// The API server is called kubernetes inside of the cluster.
	r.names = map[string]bool{serviceName: true, serviceName + "." + metav1.NamespaceDefault: true}
	r.zones = []string{"localhost", "svc", strings.ToLower(cfg.DNSDomain)}
	for _, san := range append([]string{cfg.Hostname, cfg.KonnectivityHostname}, cfg.CertSANs...) {
		if addr, err := netip.ParseAddr(san); err == nil {
			r.addresses[addr.Unmap()] = true
		} else {
			r.names[strings.ToLower(san)] = true
		}
	}
	return r, nil
}

func (r *reserved) name(dns string) bool {
	return r.names[dns] || slices.ContainsFunc(r.zones, func(zone string) bool { return dns == zone || strings.HasSuffix(dns, "."+zone) })
}

// requested are the names and addresses in req.
func requested(req *x509.CertificateRequest) []string {
	var all []string
	for _, dns := range req.DNSNames {
		all = append(all, "DNS:"+dns)
	}
	for _, ip := range req.IPAddresses {
		all = append(all, "IP:"+ip.String())
	}
	return all
}

// claims are the names and addresses in the status of node.
func claims(node *corev1.Node) map[string]bool {
	all := map[string]bool{}
	for _, a := range node.Status.Addresses {
		addr, err := netip.ParseAddr(a.Address)
		switch {
		case err == nil && a.Type != corev1.NodeInternalDNS && a.Type != corev1.NodeExternalDNS:
			all["IP:"+addr.Unmap().String()] = true
		case a.Type != corev1.NodeInternalIP && a.Type != corev1.NodeExternalIP:
			all["DNS:"+a.Address] = true
		}
	}
	return all
}

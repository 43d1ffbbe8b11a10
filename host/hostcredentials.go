// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/kubernetes"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/storage"
)

const (
	// joinersGroup is whom a join token makes of its holder.
	joinersGroup = "system:bootstrappers:tenantd:hosts"
	// caSubresource is where everybody can read the system plane's authority.
	caSubresource = "ca"
	// peerTTL is how long a new host's first certificate is good; the host replaces it
	// as soon as it runs.
	peerTTL = 24 * time.Hour
)

// hostCredentialsPrefix is the path below which hosts are let in.
var hostCredentialsPrefix = strings.TrimSuffix(v1alpha1.HostCredentialsPath("x", "x"), "x/x")

// hostCredentials serves requests for tokens of hosts, and of hosts that have one.
type hostCredentials struct{ host *Host }

// ServeHTTP implements http.Handler. The API server has authenticated and authorized
// the request as verb create, or get, on hosts/token, hosts/join and hosts/ca.
func (c *hostCredentials) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, subresource, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, hostCredentialsPrefix), "/")
	if subresource == caSubresource && r.Method == http.MethodGet {
		c.host.mu.Lock()
		authority := c.host.authority
		c.host.mu.Unlock()
		w.Header().Set("Content-Type", "application/x-pem-file")
		_, _ = w.Write(authority.CA()) // an error here is the client's hanging up
		return
	}
	answer, err := c.answer(r, name, subresource)
	if err != nil {
		writeError(w, r, err, c.host.log)
		return
	}
	writeJSON(w, http.StatusCreated, answer)
}

func (c *hostCredentials) answer(r *http.Request, name, subresource string) (any, error) {
	resource := v1alpha1.CredentialsGroupVersion.WithResource("hosts/" + subresource).GroupResource()
	if r.Method != http.MethodPost {
		return nil, apierrors.NewMethodNotSupported(resource, strings.ToLower(r.Method))
	}
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxCredentialRequest))
	if err != nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("read request: %v", err))
	}
	if c.host.hosts == nil {
		return nil, apierrors.NewBadRequest("this host runs alone: restart it with --peer-listen and --gossip-listen, at an address that the others can reach")
	}
	switch subresource {
	case v1alpha1.HostTokenSubresource:
		req := &v1alpha1.HostTokenRequest{}
		if err := decode(c.host.reader(), body, req, req.SetDefaults, req.Validate); err != nil {
			return nil, err
		}
		return req, c.token(r.Context(), req)
	case v1alpha1.HostJoinSubresource:
		req := &v1alpha1.HostJoinRequest{}
		if err := decode(c.host.reader(), body, req, req.SetDefaults, req.Validate); err != nil {
			return nil, err
		}
		if req.Spec.Name != name {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("the request of host %q was posted for %q", req.Spec.Name, name))
		}
		return req, c.join(r.Context(), req)
	}
	return nil, apierrors.NewNotFound(resource, name)
}

// token makes a bootstrap token in the system plane and fills in req's status.
func (c *hostCredentials) token(ctx context.Context, req *v1alpha1.HostTokenRequest) error {
	h := c.host
	plane, err := h.planeClient()
	if err != nil {
		return err
	}
	if err := letHostsJoin(ctx, plane); err != nil {
		return err
	}
	if err := forgetExpired(ctx, plane); err != nil {
		h.log.Warn("tokens that have expired are still there; they let nobody in", "error", err)
	}
	id, secret, expires, err := makeToken(ctx, plane, req.Spec.TTLSeconds, map[string]string{
		bootstrapapi.BootstrapTokenExtraGroupsKey: joinersGroup,
		bootstrapapi.BootstrapTokenDescriptionKey: "made by tenantctl host token",
	})
	if err != nil {
		return err
	}
	h.mu.Lock()
	hash := pki.CAHash(h.authority.CA())
	h.mu.Unlock()
	servers := h.hosts.addresses()
	req.Status = v1alpha1.HostTokenRequestStatus{
		Token:               v1alpha1.HostToken{ID: id, Secret: secret, CACertHash: hash, ServerName: systemName(h.cfg.Domain)}.String(),
		CACertHashes:        []string{hash},
		Servers:             servers,
		Command:             v1alpha1.HostJoinCommand(servers[0], v1alpha1.DefaultHostTokenFile),
		ExpirationTimestamp: metav1.NewTime(expires),
	}
	h.log.Info("made a token for a host", "token", id, "expires", expires)
	return nil
}

// forgetExpired deletes tokens that have expired: the system plane has no controller
// that would.
func forgetExpired(ctx context.Context, plane kubernetes.Interface) error {
	secrets := plane.CoreV1().Secrets(metav1.NamespaceSystem)
	all, err := secrets.List(ctx, metav1.ListOptions{FieldSelector: "type=" + string(bootstrapapi.SecretTypeBootstrapToken)})
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range all.Items {
		expires, err := time.Parse(time.RFC3339, string(s.Data[bootstrapapi.BootstrapTokenExpirationKey]))
		if err != nil || time.Now().After(expires) {
			errs = append(errs, secrets.Delete(ctx, s.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID}}))
		}
	}
	return errors.Join(errs...)
}

// join makes room for a new host, takes its token back and fills in req's status.
func (c *hostCredentials) join(ctx context.Context, req *v1alpha1.HostJoinRequest) error {
	h := c.host
	resource := v1alpha1.GroupVersion.WithResource("hosts").GroupResource()
	id, err := joinToken(ctx)
	if err != nil {
		return err
	}
	plane, err := h.planeClient()
	if err != nil {
		return err
	}
	secrets := plane.CoreV1().Secrets(metav1.NamespaceSystem)
	token, err := secrets.Get(ctx, bootstrapapi.BootstrapTokenSecretPrefix+id, metav1.GetOptions{})
	if err != nil {
		return apierrors.NewUnauthorized("the token has been used")
	}
	entry := hostEntry{Name: req.Spec.Name, Address: req.Spec.Address, Peer: req.Spec.PeerAddress, Gossip: req.Spec.GossipAddress}
	known, err := h.hosts.entries(ctx)
	if err != nil {
		return err
	}
	peers := []string{h.cfg.Gossip.Advertise}
	for _, other := range known {
		if clash := entry.clash(other); clash != "" {
			return apierrors.NewConflict(resource, entry.Name, fmt.Errorf("%s; choose another, or remove that host first with `tenantctl host remove %s`", clash, other.Name))
		}
		peers = append(peers, other.Gossip)
	}
	members, err := h.store.Members(ctx)
	if err != nil {
		return apierrors.NewServiceUnavailable(err.Error())
	}
	if len(members) >= maxHosts && !slices.ContainsFunc(members, func(m storage.Member) bool { return m.PeerAddress == entry.Peer }) {
		return apierrors.NewConflict(resource, entry.Name, fmt.Errorf("there are %d hosts, and more than that cannot be: remove one first, or make another installation", len(members)))
	}
	if proof := req.Spec.SealingKeyProof; len(proof) > 0 && !hmac.Equal(proof, proveSealingKey(h.sealingKey, req.Spec.CSR)) {
		return apierrors.NewConflict(resource, entry.Name, errors.New("its sealing key is not the one of the installation: copy the file from a host that is there, or remove the new host's; the token can be used again"))
	}
	profile, err := peerProfile(entry)
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	cert, err := h.hosts.authority.SignRequest(ctx, req.Spec.CSR, profile, peerTTL)
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	initial, err := h.store.AddLearner(ctx, entry.Name, entry.Peer)
	switch {
	case errors.Is(err, storage.ErrNameTaken), errors.Is(err, storage.ErrAddressTaken):
		return apierrors.NewConflict(resource, entry.Name, err)
	case err != nil:
		return apierrors.NewServiceUnavailable(err.Error())
	}
	// Of two hosts with one token one gets past this.
	if err := secrets.Delete(ctx, token.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &token.UID}}); err != nil {
		if e := h.store.RemoveMember(ctx, entry.Name); e != nil {
			h.log.Error("a host that could not join is still expected", "host", entry.Name, "error", e)
		}
		return apierrors.NewUnauthorized("the token has been used")
	}
	if err := h.hosts.register(ctx, entry); err != nil {
		return err
	}
	if err := h.hosts.announce(ctx, entry); err != nil {
		h.log.Warn("a host that joins is not listed before it is ready", "host", entry.Name, "error", err)
	}
	slices.Sort(peers)
	req.Status = v1alpha1.HostJoinRequestStatus{
		Installation:    h.dir.id.ID,
		Domain:          h.cfg.Domain,
		SealingKey:      h.sealingKey,
		GossipKey:       h.hosts.gossipKey,
		PeerCertificate: cert,
		PeerCA:          h.hosts.authority.CA(),
		InitialMembers:  initial,
		GossipPeers:     slices.Compact(peers),
	}
	h.log.Info("a host joins", "host", entry.Name, "address", entry.Address, "token", id)
	return nil
}

// joinToken is the public part of the token that a request came with.
func joinToken(ctx context.Context) (string, error) {
	u, ok := genericrequest.UserFrom(ctx)
	if !ok || !slices.Contains(u.GetGroups(), joinersGroup) {
		return "", apierrors.NewBadRequest("a host joins with a token that `tenantctl host token` made, and nothing else")
	}
	return strings.TrimPrefix(u.GetName(), bootstrapapi.BootstrapUserPrefix), nil
}

// letHostsJoin allows what a new host does before it is one.
func letHostsJoin(ctx context.Context, plane kubernetes.Interface) error {
	group := v1alpha1.CredentialsGroupVersion.Group
	for name, grant := range map[string]struct {
		rule rbacv1.PolicyRule
		to   []string
	}{
		"tenantd:host-joiner": {
			rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{"hosts/" + v1alpha1.HostJoinSubresource}, Verbs: []string{"create"}},
			[]string{joinersGroup},
		},
		// What is in every kubeconfig.
		"tenantd:ca-reader": {
			rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{"hosts/" + caSubresource}, Verbs: []string{"get"}},
			[]string{user.AllAuthenticated, user.AllUnauthenticated},
		},
	} {
		role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{grant.rule}}
		binding := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		}
		for _, to := range grant.to {
			binding.Subjects = append(binding.Subjects, rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: to})
		}
		_, err := plane.RbacV1().ClusterRoles().Create(ctx, role, metav1.CreateOptions{})
		if err == nil || apierrors.IsAlreadyExists(err) {
			_, err = plane.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{})
		}
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("allow hosts to join: %w", err)
		}
	}
	return nil
}

// planeClient is a client of the system plane.
func (h *Host) planeClient() (kubernetes.Interface, error) {
	h.mu.Lock()
	plane := h.plane
	h.mu.Unlock()
	if plane == nil || plane.RESTConfig() == nil {
		return nil, apierrors.NewServiceUnavailable("the system plane is starting; try again in a moment")
	}
	return kubernetes.NewForConfig(plane.RESTConfig())
}

// peerProfile is the certificate that a host shows to others.
func peerProfile(e hostEntry) (pki.Profile, error) {
	host, _, err := net.SplitHostPort(e.Peer)
	if err != nil {
		return pki.Profile{}, fmt.Errorf("address for peers: %w", err)
	}
	p := pki.Profile{Name: "peer." + e.Name, Usage: pki.Peer, CommonName: e.Name}
	if ip := net.ParseIP(host); ip != nil {
		p.IPs = []net.IP{ip}
	} else {
		p.DNSNames = []string{host}
	}
	return p, nil
}

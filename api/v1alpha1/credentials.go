// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"net/url"
	"strings"
	"time"
	"unicode"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// CredentialsGroupVersion is the group and version under which the system plane
// hands out credentials. A request is a POST to [CredentialsPath], or to
// [HostCredentialsPath] for those about hosts; RBAC grants it as the verb create on
// the resource tenants/kubeconfig, tenants/jointoken and so on of this group. Nothing
// in it is stored.
var CredentialsGroupVersion = schema.GroupVersion{Group: "credentials.tenantd.io", Version: "v1alpha1"}

// The kinds of credential requests and the subresources they are posted to.
const (
	KubeconfigRequestKind = "KubeconfigRequest"
	KubeconfigSubresource = "kubeconfig"
	JoinTokenRequestKind  = "JoinTokenRequest"
	JoinTokenSubresource  = "jointoken"

	WorkerConfigRequestKind = "WorkerConfigRequest"
	WorkerConfigSubresource = "workerconfig"
)

// The defaults of a [KubeconfigRequest] that names neither user nor group: the
// same administrator that kubeadm makes.
const (
	DefaultKubeconfigUser  = "kubernetes-admin"
	DefaultKubeconfigGroup = "system:masters"
)

const (
	// DefaultAdminTTL is how long the administrator's kubeconfig works: a year, as
	// kubeadm's does, because it is kept in files and pipelines.
	DefaultAdminTTL = 365 * 24 * time.Hour
	// DefaultUserTTL is how long a named user's kubeconfig works: a day, because a
	// certificate cannot be revoked.
	DefaultUserTTL = 24 * time.Hour
	// DefaultJoinTokenTTL is how long a join token works: a day, as kubeadm's does.
	DefaultJoinTokenTTL = 24 * time.Hour
	// MinCredentialTTL is the shortest life of a credential; a shorter one would end
	// before clocks that differ a little agree that it has begun.
	MinCredentialTTL = time.Minute
	// MaxCredentialTTL is the longest life of a credential.
	MaxCredentialTTL = 365 * 24 * time.Hour
)

// maxSubjectLength bounds a user or group: what a Kubernetes node's user name
// needs at most, system:node: and a DNS name.
const maxSubjectLength = 265

// maxGroups bounds the groups of one certificate, which is sent with every handshake.
const maxGroups = 32

// CredentialsPath returns the path that a request for a tenant is posted to.
func CredentialsPath(tenant, subresource string) string {
	return "/apis/" + CredentialsGroupVersion.String() + "/tenants/" + url.PathEscape(tenant) + "/" + subresource
}

// KubeconfigRequest asks for a kubeconfig of a tenant.
type KubeconfigRequest struct {
	metav1.TypeMeta `json:",inline"`
	Spec            KubeconfigRequestSpec   `json:"spec,omitzero"`
	Status          KubeconfigRequestStatus `json:"status,omitzero"`
}

// KubeconfigRequestSpec says whose kubeconfig is wanted.
type KubeconfigRequestSpec struct {
	// User is the user name that the tenant's API server sees. The default, when
	// there are no groups either, is the administrator.
	User string `json:"user,omitempty"`
	// Groups are the groups that the tenant's API server sees.
	Groups []string `json:"groups,omitempty"`
	// TTLSeconds is how long the kubeconfig works. 0 means [DefaultAdminTTL] for the
	// default user and [DefaultUserTTL] for a named one.
	TTLSeconds int64 `json:"ttlSeconds,omitempty"`
	// Server is the URL to write into the kubeconfig. The default is the tenant's
	// endpoint. When its host is not the tenant's hostname, the kubeconfig says
	// which name to ask for and to verify.
	Server string `json:"server,omitempty"`
}

// KubeconfigRequestStatus is the answer.
type KubeconfigRequestStatus struct {
	// Kubeconfig is the file, a client-go Config in YAML. It holds a private key.
	Kubeconfig []byte `json:"kubeconfig,omitempty"`
	// ExpirationTimestamp is when it stops working.
	ExpirationTimestamp metav1.Time `json:"expirationTimestamp,omitzero"`
}

// SetDefaults fills the fields that are not set, except Server, whose default only
// the host knows.
func (r *KubeconfigRequest) SetDefaults() {
	r.TypeMeta = credentialType(KubeconfigRequestKind)
	ttl := DefaultUserTTL
	if r.Spec.User == "" && len(r.Spec.Groups) == 0 {
		r.Spec.User = DefaultKubeconfigUser
		r.Spec.Groups = []string{DefaultKubeconfigGroup}
		ttl = DefaultAdminTTL
	}
	if r.Spec.TTLSeconds == 0 {
		r.Spec.TTLSeconds = int64(ttl / time.Second)
	}
}

// Validate returns every fault of a request with defaults set, or nil.
func (r *KubeconfigRequest) Validate() error {
	faults := validateType(r.TypeMeta, CredentialsGroupVersion.String(), KubeconfigRequestKind)
	spec := field.NewPath("spec")
	if r.Spec.User == "" {
		faults = append(faults, field.Required(spec.Child("user"), "name the user that the groups are for"))
	} else {
		faults = append(faults, validateSubject(spec.Child("user"), r.Spec.User)...)
	}
	if len(r.Spec.Groups) > maxGroups {
		faults = append(faults, field.TooMany(spec.Child("groups"), len(r.Spec.Groups), maxGroups))
	}
	for i, group := range r.Spec.Groups {
		faults = append(faults, validateSubject(spec.Child("groups").Index(i), group)...)
	}
	faults = append(faults, validateTTL(spec.Child("ttlSeconds"), r.Spec.TTLSeconds, MaxCredentialTTL)...)
	if r.Spec.Server != "" {
		faults = append(faults, validateServer(spec.Child("server"), r.Spec.Server)...)
	}
	return join(faults)
}

// JoinTokenRequest asks for a bootstrap token with which workers join a tenant.
type JoinTokenRequest struct {
	metav1.TypeMeta `json:",inline"`
	Spec            JoinTokenRequestSpec   `json:"spec,omitzero"`
	Status          JoinTokenRequestStatus `json:"status,omitzero"`
}

// JoinTokenRequestSpec says what token is wanted.
type JoinTokenRequestSpec struct {
	// TTLSeconds is how long workers can join with the token. 0 means
	// [DefaultJoinTokenTTL].
	TTLSeconds int64 `json:"ttlSeconds,omitempty"`
}

// JoinTokenRequestStatus is the answer: what kubeadm join needs.
type JoinTokenRequestStatus struct {
	// Token is the bootstrap token, <id>.<secret>.
	Token string `json:"token,omitempty"`
	// CACertHashes are the hashes of the tenant's authorities, as
	// --discovery-token-ca-cert-hash takes them: sha256:<hex>.
	CACertHashes []string `json:"caCertHashes,omitempty"`
	// Endpoint is the tenant's API server as <hostname>:<port>.
	Endpoint string `json:"endpoint,omitempty"`
	// ExpirationTimestamp is when the token stops working.
	ExpirationTimestamp metav1.Time `json:"expirationTimestamp,omitzero"`
}

// SetDefaults fills the fields that are not set.
func (r *JoinTokenRequest) SetDefaults() {
	r.TypeMeta = credentialType(JoinTokenRequestKind)
	if r.Spec.TTLSeconds == 0 {
		r.Spec.TTLSeconds = int64(DefaultJoinTokenTTL / time.Second)
	}
}

// Validate returns every fault of a request with defaults set, or nil.
func (r *JoinTokenRequest) Validate() error {
	faults := validateType(r.TypeMeta, CredentialsGroupVersion.String(), JoinTokenRequestKind)
	faults = append(faults, validateTTL(field.NewPath("spec", "ttlSeconds"), r.Spec.TTLSeconds, MaxCredentialTTL)...)
	return join(faults)
}

// WorkerConfigRequest asks for what a worker's tenant-proxy has to know of a tenant.
// There is no secret in the answer.
type WorkerConfigRequest struct {
	metav1.TypeMeta `json:",inline"`
	Status          WorkerConfigRequestStatus `json:"status,omitzero"`
}

// WorkerConfigRequestStatus is the answer.
type WorkerConfigRequestStatus struct {
	// Hostname is the tenant's.
	Hostname string `json:"hostname,omitempty"`
	// Port is the one that all hosts serve.
	Port int `json:"port,omitempty"`
	// Hosts are the IP:port of the hosts. They may be none: then the hostname is
	// where to look.
	Hosts []string `json:"hosts,omitempty"`
	// KonnectivityHostname is the tunnel's own name; empty if it has none.
	KonnectivityHostname string `json:"konnectivityHostname,omitempty"`
	// WorkerVIP is the address that pods find the API server at, on every worker.
	WorkerVIP string `json:"workerVIP,omitempty"`
	// CA verifies the API server, in PEM.
	CA []byte `json:"ca,omitempty"`
}

// SetDefaults fills the fields that are not set.
func (r *WorkerConfigRequest) SetDefaults() { r.TypeMeta = credentialType(WorkerConfigRequestKind) }

// Validate returns every fault of a request with defaults set, or nil.
func (r *WorkerConfigRequest) Validate() error {
	return join(validateType(r.TypeMeta, CredentialsGroupVersion.String(), WorkerConfigRequestKind))
}

func credentialType(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: CredentialsGroupVersion.String(), Kind: kind}
}

func validateSubject(path *field.Path, name string) field.ErrorList {
	switch {
	case name == "":
		return field.ErrorList{field.Required(path, "must not be empty")}
	case len(name) > maxSubjectLength:
		return field.ErrorList{field.TooLong(path, name, maxSubjectLength)}
	case strings.IndexFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0:
		return field.ErrorList{field.Invalid(path, name, "must hold printable characters only")}
	}
	return nil
}

func validateTTL(path *field.Path, seconds int64, longest time.Duration) field.ErrorList {
	least, most := int64(MinCredentialTTL/time.Second), int64(longest/time.Second)
	if seconds < least || seconds > most {
		return field.ErrorList{field.Invalid(path, seconds, fmt.Sprintf("must be %d to %d seconds", least, most))}
	}
	return nil
}

func validateServer(path *field.Path, server string) field.ErrorList {
	u, err := url.Parse(server)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return field.ErrorList{field.Invalid(path, server, "must be a URL such as https://192.0.2.10:8443")}
	}
	return nil
}

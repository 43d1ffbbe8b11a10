// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"crypto/x509"
	"encoding/pem"
	"net/url"
	"strings"
	"time"
	"unicode"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// The kinds of requests about hosts and the subresources they are posted to. RBAC
// grants them as the verb create on hosts/token and hosts/join of the group of
// [CredentialsGroupVersion].
const (
	HostTokenRequestKind = "HostTokenRequest"
	HostTokenSubresource = "token"

	HostJoinRequestKind = "HostJoinRequest"
	HostJoinSubresource = "join"
)

// AnyHost stands for a host's name in the path of a request that is about none.
const AnyHost = "-"

// DefaultHostTokenFile is where the line that a [HostTokenRequest] answers with looks
// for the token on the new host.
const DefaultHostTokenFile = "/etc/tenantd/join-token"

const (
	// DefaultHostTokenTTL is how long a host can join with a token: an hour, because
	// a token is made when a machine stands ready.
	DefaultHostTokenTTL = time.Hour
	// MaxHostTokenTTL is the longest life of such a token, which lets its holder have
	// every tenant's keys.
	MaxHostTokenTTL = 24 * time.Hour
)

// maxCertificateRequest bounds a certificate request, in bytes: one with a key of
// RSA 4096 and ten names takes 2 KiB.
const maxCertificateRequest = 16 << 10

// HostCredentialsPath returns the path that a request about a host is posted to.
func HostCredentialsPath(host, subresource string) string {
	return "/apis/" + CredentialsGroupVersion.String() + "/hosts/" + url.PathEscape(host) + "/" + subresource
}

// HostTokenRequest asks for a token with which one new host joins the installation. It
// is posted for [AnyHost], or for the name that the new host will have.
type HostTokenRequest struct {
	metav1.TypeMeta `json:",inline"`
	Spec            HostTokenRequestSpec   `json:"spec,omitzero"`
	Status          HostTokenRequestStatus `json:"status,omitzero"`
}

// HostTokenRequestSpec says what token is wanted.
type HostTokenRequestSpec struct {
	// TTLSeconds is how long a host can join with the token. 0 means
	// [DefaultHostTokenTTL]; the most is [MaxHostTokenTTL].
	TTLSeconds int64 `json:"ttlSeconds,omitempty"`
}

// HostTokenRequestStatus is the answer.
type HostTokenRequestStatus struct {
	// Token is a [HostToken].
	Token string `json:"token,omitempty"`
	// CACertHashes are the hashes of the system plane's authorities, sha256:<hex>. The
	// first is in the token.
	CACertHashes []string `json:"caCertHashes,omitempty"`
	// Servers are the hosts that can be joined, as HOST:PORT.
	Servers []string `json:"servers,omitempty"`
	// Command is the line to run on the new host, with the token in
	// [DefaultHostTokenFile].
	Command string `json:"command,omitempty"`
	// ExpirationTimestamp is when the token stops working.
	ExpirationTimestamp metav1.Time `json:"expirationTimestamp,omitzero"`
}

// SetDefaults fills the fields that are not set.
func (r *HostTokenRequest) SetDefaults() {
	r.TypeMeta = credentialType(HostTokenRequestKind)
	setDefault(&r.Spec.TTLSeconds, int64(DefaultHostTokenTTL/time.Second))
}

// Validate returns every fault of a request with defaults set, or nil.
func (r *HostTokenRequest) Validate() error {
	faults := validateType(r.TypeMeta, CredentialsGroupVersion.String(), HostTokenRequestKind)
	faults = append(faults, validateTTL(field.NewPath("spec", "ttlSeconds"), r.Spec.TTLSeconds, MaxHostTokenTTL)...)
	return join(faults)
}

// HostJoinCommand returns the line that makes a machine a host of the installation that
// server, HOST:PORT, belongs to, with the token in tokenFile.
func HostJoinCommand(server, tokenFile string) string {
	return "tenantd run --join " + server + " --join-token-file " + tokenFile
}

// HostJoinRequest is a new host's request to become a part of the installation. It is
// posted for the host's name, by who has a [HostToken].
type HostJoinRequest struct {
	metav1.TypeMeta `json:",inline"`
	Spec            HostJoinRequestSpec   `json:"spec,omitzero"`
	Status          HostJoinRequestStatus `json:"status,omitzero"`
}

// HostJoinRequestSpec says who joins.
type HostJoinRequestSpec struct {
	// Name is the new host's name. It is the one in the path.
	Name string `json:"name,omitempty"`
	// Address is where the new host's one port is reached, as IP:port.
	Address string `json:"address,omitempty"`
	// PeerAddress is where its etcd member is reached, as IP:port.
	PeerAddress string `json:"peerAddress,omitempty"`
	// GossipAddress is where its gossip is reached, as IP:port.
	GossipAddress string `json:"gossipAddress,omitempty"`
	// Version is the version of tenantd that it runs.
	Version string `json:"version,omitempty"`
	// CSR is a request, in PEM, for the certificate that it shows to other etcd
	// members. Its key never leaves the new host.
	CSR []byte `json:"csr,omitempty"`
	// SealingKeyProof shows which sealing key is in place on the new host: HMAC-SHA256
	// by it of the CSR. Empty if there is none. Another than the installation's is
	// refused before the token is used.
	SealingKeyProof []byte `json:"sealingKeyProof,omitempty"`
}

// HostJoinRequestStatus is the answer: what makes the new host one of the installation.
// The two keys in it are secrets.
type HostJoinRequestStatus struct {
	// Installation is the identity of the installation, which no other has.
	Installation string `json:"installation,omitempty"`
	// Domain is the installation's DNS zone.
	Domain string `json:"domain,omitempty"`
	// SealingKey seals private keys at rest, on all hosts.
	SealingKey []byte `json:"sealingKey,omitempty"`
	// GossipKey encrypts the gossip.
	GossipKey []byte `json:"gossipKey,omitempty"`
	// PeerCertificate answers the CSR, in PEM.
	PeerCertificate []byte `json:"peerCertificate,omitempty"`
	// PeerCA verifies the certificates of other etcd members, in PEM.
	PeerCA []byte `json:"peerCA,omitempty"`
	// InitialMembers are the URLs of all etcd members by the names of their hosts, the
	// new host's among them if it is to have a member.
	InitialMembers map[string]string `json:"initialMembers,omitempty"`
	// GossipPeers are the hosts to begin the gossip with, as IP:port.
	GossipPeers []string `json:"gossipPeers,omitempty"`
}

// SetDefaults fills the fields that are not set.
func (r *HostJoinRequest) SetDefaults() { r.TypeMeta = credentialType(HostJoinRequestKind) }

// Validate returns every fault of a request with defaults set, or nil. That the name is
// free, and that of the path, is for the host that answers to see.
func (r *HostJoinRequest) Validate() error {
	faults := validateType(r.TypeMeta, CredentialsGroupVersion.String(), HostJoinRequestKind)
	spec := field.NewPath("spec")
	switch {
	case r.Spec.Name == "":
		faults = append(faults, field.Required(spec.Child("name"), "say what the host is called"))
	case !isDNSName(r.Spec.Name, 253):
		faults = append(faults, field.Invalid(spec.Child("name"), r.Spec.Name, "must be a host name in lower case, such as host-a"))
	}
	for _, address := range []struct{ name, value string }{
		{"address", r.Spec.Address}, {"peerAddress", r.Spec.PeerAddress}, {"gossipAddress", r.Spec.GossipAddress},
	} {
		switch {
		case address.value == "":
			faults = append(faults, field.Required(spec.Child(address.name), "say where other hosts reach this one"))
		case !isEndpoint(address.value, false):
			faults = append(faults, field.Invalid(spec.Child(address.name), address.value, "must be IP:PORT that other hosts can reach"))
		}
	}
	// What the Host's status takes.
	const maxVersion = 64
	switch {
	case r.Spec.Version == "":
		faults = append(faults, field.Required(spec.Child("version"), "say which version of tenantd the host runs"))
	case len(r.Spec.Version) > maxVersion:
		faults = append(faults, field.TooLong(spec.Child("version"), r.Spec.Version, maxVersion))
	case strings.IndexFunc(r.Spec.Version, func(c rune) bool { return !unicode.IsPrint(c) }) >= 0:
		faults = append(faults, field.Invalid(spec.Child("version"), r.Spec.Version, "must hold printable characters only"))
	}
	return join(append(faults, validateCSR(spec.Child("csr"), r.Spec.CSR)...))
}

func validateCSR(path *field.Path, csr []byte) field.ErrorList {
	invalid := func(must string) field.ErrorList {
		// The value is long and says nothing to people.
		return field.ErrorList{field.Invalid(path, field.OmitValueType{}, must)}
	}
	switch {
	case len(csr) == 0:
		return field.ErrorList{field.Required(path, "ask for a certificate")}
	case len(csr) > maxCertificateRequest:
		return field.ErrorList{field.TooLong(path, field.OmitValueType{}, maxCertificateRequest)}
	}
	block, rest := pem.Decode(csr)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || strings.TrimSpace(string(rest)) != "" {
		return invalid("must be one certificate request in PEM")
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err == nil {
		err = request.CheckSignature()
	}
	if err != nil {
		return invalid("must be a certificate request signed with its own key: " + err.Error())
	}
	return nil
}

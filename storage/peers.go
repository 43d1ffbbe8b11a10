// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
)

const (
	// lonelyPeerURL is the name among its peers of a member that has none. Nothing listens there.
	lonelyPeerURL = "http://127.0.0.1:2380"
	// heartbeat and election suit hosts whose round trip is below some 10 ms. A leader that died is replaced within
	// two elections.
	heartbeat = 100 * time.Millisecond
	election  = time.Second
	// peerLogEntries of etcd's log stay in memory where there are peers. One that was away for longer, as for an
	// upgrade, is sent the whole database. Each may be as large as a request.
	peerLogEntries = 2000
	// maxLearners bounds the members without a vote. Each decides for itself whether one more is too many, so all have to
	// have the same bound: it must never change.
	maxLearners = 64
)

// PeerConfig makes the store a member of a cluster of hosts. All fields but Initial are required.
type PeerConfig struct {
	// Listen is the host:port at which peers' connections are taken. An empty host means all addresses. A host must be
	// an IP address.
	Listen string
	// Advertise is the host:port by which the other hosts reach this one. The host is an IP address or a name, and has
	// to be among the names of the certificate. It may change from one Open to the next.
	Advertise string
	// CertFile and KeyFile hold the certificate, for servers and clients both, shown to peers. They are read again at
	// each handshake, so a new certificate needs no restart.
	CertFile, KeyFile string
	// CAFile holds the certificates of the authorities whose certificates are peers, whatever their names: no one else
	// may have one by these authorities. It is read by Open alone.
	CAFile string
	// Initial names, for a directory without a database, the members of the cluster to join and the host:port that
	// each advertises, this one included: what AddLearner returned. Empty means a new cluster of this member alone.
	// A directory that has a database knows its members; then Initial only serves to see that it is the same cluster.
	Initial map[string]string
}

func (p *PeerConfig) validate(name string) (faults []error) {
	for _, f := range []struct{ field, value string }{
		{"CertFile", p.CertFile}, {"KeyFile", p.KeyFile}, {"CAFile", p.CAFile},
	} {
		if f.value == "" {
			faults = append(faults, fmt.Errorf("Peers.%s is empty: peers are let in by certificate only", f.field))
		}
	}
	if host, _, err := net.SplitHostPort(p.Listen); err != nil {
		faults = append(faults, fmt.Errorf("Peers.Listen %q is not host:port: %w", p.Listen, err))
	} else if host != "" && net.ParseIP(host) == nil {
		faults = append(faults, fmt.Errorf("Peers.Listen %q is not at an IP address: give one of this host", p.Listen))
	}
	if err := validAddress(p.Advertise); err != nil {
		faults = append(faults, fmt.Errorf("Peers.Advertise: %w", err))
	}
	for _, member := range slices.Sorted(maps.Keys(p.Initial)) {
		if err := errors.Join(validName(member), validAddress(p.Initial[member])); err != nil {
			faults = append(faults, fmt.Errorf("Peers.Initial: %w", err))
		}
	}
	if own, ok := p.Initial[name]; len(p.Initial) > 0 && (!ok || own != p.Advertise) {
		faults = append(faults, fmt.Errorf("Peers.Initial says this member, %s, is at %q, and it advertises %q: "+
			"let it be added under the address it advertises", name, own, p.Advertise))
	}
	return faults
}

// validAddress refuses what others could not dial.
func validAddress(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("address %q is not host:port: %w", address, err)
	}
	if ip := net.ParseIP(host); host == "" || port == "" || port == "0" || ip != nil && ip.IsUnspecified() {
		return fmt.Errorf("address %q is none that other hosts can dial", address)
	}
	if _, err := types.NewURLs([]string{peerURL(address)}); err != nil {
		return fmt.Errorf("address %q: %w", address, err)
	}
	return nil
}

// validName refuses what etcd's list of members could not hold.
func validName(name string) error {
	if name == "" || strings.ContainsAny(name, "=,/") {
		return fmt.Errorf("name %q is empty or contains '=', ',' or '/': choose another", name)
	}
	return nil
}

func peerURL(address string) string { return "https://" + address }

// peerAddress is the address of a member: empty for one that has no peers.
func peerAddress(m *membership.Member) string {
	if len(m.PeerURLs) == 0 {
		return ""
	}
	address, _ := strings.CutPrefix(m.PeerURLs[0], "https://")
	if address == lonelyPeerURL {
		return ""
	}
	return address
}

// joins says whether Initial names others.
func (p *PeerConfig) joins() bool { return p != nil && len(p.Initial) > 1 }

// tlsInfo lets in and trusts whoever has a certificate by the authorities. The names in it are checked by those who
// dial: a host may well come from an address other than the one it is reached at.
func (p *PeerConfig) tlsInfo() transport.TLSInfo {
	return transport.TLSInfo{
		CertFile:            p.CertFile,
		KeyFile:             p.KeyFile,
		TrustedCAFile:       p.CAFile,
		ClientCertAuth:      true,
		SkipClientSANVerify: true,
		MinVersion:          tls.VersionTLS13,
	}
}

// configure adds to etcd's configuration what concerns peers. A nil p is a member alone.
func (p *PeerConfig) configure(cfg *embed.Config) error {
	cfg.TickMs, cfg.ElectionMs = uint(heartbeat.Milliseconds()), uint(election.Milliseconds())
	cfg.PreVote, cfg.StrictReconfigCheck = true, true // a host that was cut off does not disturb the others' leader
	cfg.MaxLearners = maxLearners
	if p == nil {
		alone, _ := url.Parse(lonelyPeerURL)
		cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = nil, []url.URL{*alone}
		cfg.InitialCluster = cfg.Name + "=" + lonelyPeerURL
		return nil
	}
	host, port, err := net.SplitHostPort(p.Listen)
	if err != nil {
		return err
	}
	if host == "" {
		host = "0.0.0.0" // etcd wants an address; Go takes this one for those of both families
	}
	advertise, err := url.Parse(peerURL(p.Advertise))
	if err != nil {
		return err
	}
	cfg.ListenPeerUrls = []url.URL{{Scheme: "https", Host: net.JoinHostPort(host, port)}}
	cfg.AdvertisePeerUrls = []url.URL{*advertise}
	cfg.PeerTLSInfo = p.tlsInfo()
	cfg.TlsMinVersion = "TLS1.3"
	cfg.SnapshotCatchUpEntries = peerLogEntries
	cfg.InitialCluster = cfg.Name + "=" + advertise.String()
	if p.joins() {
		cfg.ClusterState = embed.ClusterStateFlagExisting
		var members []string
		for _, name := range slices.Sorted(maps.Keys(p.Initial)) {
			members = append(members, name+"="+peerURL(p.Initial[name]))
		}
		cfg.InitialCluster = strings.Join(members, ",")
	}
	return nil
}

// peerClient asks peers, as one of them, over connections of its own.
func (p *PeerConfig) peerClient() (*http.Client, error) {
	info := p.tlsInfo()
	config, err := info.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("load the certificate for peers: %w", err)
	}
	return &http.Client{
		Timeout:   peerPatience,
		Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true},
	}, nil
}

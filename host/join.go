// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/pki"
)

// joinPatience bounds each request of a join.
const joinPatience = 30 * time.Second

// maxJoinAnswer bounds an answer, in bytes.
const maxJoinAnswer = 1 << 20

// joined is what a new host has been told. It is kept until the host has made files
// of it: a token works once.
type joined struct {
	Key    []byte                         `json:"key"` // of the peer certificate, in PEM
	Answer v1alpha1.HostJoinRequestStatus `json:"answer"`
}

// ofJoin are the files of a join that is under way.
var ofJoin = []string{joinedFile, sealingKeyFile, gossipKeyFile, membersFile, peerCAFile, peerKeyFile, peerCertFile}

// joiner makes a fresh data directory part of the installation that is to be joined;
// nil if none is.
func (h *Host) joiner(ctx context.Context) func(*dataDir) (installation, error) {
	if h.cfg.Join.Server == "" {
		return nil
	}
	return func(d *dataDir) (installation, error) {
		j := &joined{}
		raw, err := os.ReadFile(d.file(joinedFile))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if j, err = h.join(ctx, h.sealingKeyFile(d)); err != nil {
				return installation{}, err
			}
			if raw, err = json.Marshal(j); err != nil {
				return installation{}, err
			}
			err = writeFile(d.file(joinedFile), raw, 0o600)
		case err == nil:
			h.log.Info("going on with the join that was begun")
			err = json.Unmarshal(raw, j)
		}
		if err != nil {
			return installation{}, fmt.Errorf("keep what the join brought: %w", err)
		}
		return installation{ID: j.Answer.Installation, Format: dataFormat, Domain: j.Answer.Domain}, h.unpack(d, j)
	}
}

// unpack makes the files of what a join brought.
func (h *Host) unpack(d *dataDir, j *joined) error {
	members, err := json.Marshal(j.Answer.InitialMembers)
	if err != nil {
		return err
	}
	sealing := h.sealingKeyFile(d)
	have, err := os.ReadFile(sealing)
	if err == nil && !bytes.Equal(have, j.Answer.SealingKey) {
		return fmt.Errorf("the sealing key %s is not the one of the installation: copy it from another host, or remove this one", sealing)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return explain(err)
	}
	for _, file := range []struct {
		path    string
		content []byte
	}{
		{sealing, j.Answer.SealingKey},
		{d.file(gossipKeyFile), j.Answer.GossipKey},
		{d.file(membersFile), members},
		{d.file(peerCAFile), j.Answer.PeerCA},
		{d.file(peerKeyFile), j.Key},
		{d.file(peerCertFile), j.Answer.PeerCertificate},
	} {
		if have, err := os.ReadFile(file.path); err == nil && bytes.Equal(have, file.content) {
			continue // perhaps a credential of systemd, which nobody can write
		}
		if err := writeFile(file.path, file.content, 0o600); err != nil {
			return fmt.Errorf("write %s: %w", file.path, explain(err))
		}
	}
	return nil
}

// join makes this host one of the installation that the configuration names, and
// returns what it was told. On this machine it changes nothing. A sealing key that is
// there has to be the installation's.
func (h *Host) join(ctx context.Context, sealingKeyFile string) (*joined, error) {
	server := h.cfg.Join.Server
	raw, err := os.ReadFile(h.cfg.Join.TokenFile)
	if err != nil {
		return nil, fmt.Errorf("read the join token: %w", explain(err))
	}
	token, err := v1alpha1.ParseHostToken(strings.TrimSpace(string(raw)))
	if err != nil {
		return nil, fmt.Errorf("read the join token in %s: %w", h.cfg.Join.TokenFile, err)
	}
	h.log.Info("joining an installation", "server", server, "systemPlane", token.ServerName)
	// Whoever answers first is not trusted, but has to show an authority of the
	// token's hash.
	ca, err := fetchCA(ctx, server, token)
	if err != nil {
		return nil, fmt.Errorf("join the installation at %s: %w", server, err)
	}
	key, csr, err := newRequest(h.name)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	req := &v1alpha1.HostJoinRequest{Spec: v1alpha1.HostJoinRequestSpec{
		Name: h.name, Address: h.ownAddress(), PeerAddress: h.cfg.Peer.Advertise, GossipAddress: h.cfg.Gossip.Advertise, Version: h.version, CSR: csr,
	}}
	sealing, err := os.ReadFile(sealingKeyFile)
	switch {
	case err == nil:
		req.Spec.SealingKeyProof = proveSealingKey(sealing, csr)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("read the sealing key: %w", explain(err))
	}
	req.SetDefaults()
	if err := req.Validate(); err != nil {
		return nil, fmt.Errorf("join the installation at %s: %w", server, err)
	}
	body, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	client := joinClient(server, &tls.Config{RootCAs: ca, ServerName: token.ServerName, MinVersion: tls.VersionTLS12})
	answer, err := ask(ctx, client, http.MethodPost, token.ServerName, v1alpha1.HostCredentialsPath(h.name, v1alpha1.HostJoinSubresource), token.BootstrapToken(), body)
	if err != nil {
		return nil, fmt.Errorf("join the installation at %s: %w", server, err)
	}
	if err := json.Unmarshal(answer, req); err != nil {
		return nil, fmt.Errorf("join the installation at %s: its answer: %w", server, err)
	}
	if s := req.Status; s.Installation == "" || s.Domain == "" || len(s.SealingKey) != pki.KeySize || len(s.GossipKey) != pki.KeySize || len(s.PeerCertificate) == 0 || len(s.PeerCA) == 0 {
		return nil, fmt.Errorf("join the installation at %s: its answer lacks something; is it of this version?", server)
	}
	return &joined{Key: key, Answer: req.Status}, nil
}

// proveSealingKey shows, to who has the same, which sealing key this is, and nothing to
// others.
func proveSealingKey(key, csr []byte) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte("tenantd host join\x00"))
	mac.Write(csr)
	return mac.Sum(nil)
}

// fetchCA gets the system plane's authority and sees that it is the token's.
func fetchCA(ctx context.Context, server string, token v1alpha1.HostToken) (*x509.CertPool, error) {
	client := joinClient(server, &tls.Config{InsecureSkipVerify: true, ServerName: token.ServerName, MinVersion: tls.VersionTLS12}) // see below
	ca, err := ask(ctx, client, http.MethodGet, token.ServerName, v1alpha1.HostCredentialsPath(v1alpha1.AnyHost, caSubresource), "", nil)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(ca)
	if block == nil || pki.CAHash(ca) != token.CACertHash {
		return nil, errors.New("it is not the one that the token is for: its authority has another hash. Make a token there, or use another --join")
	}
	roots := x509.NewCertPool()
	// The one that was hashed, and none after it.
	if !roots.AppendCertsFromPEM(pem.EncodeToMemory(block)) {
		return nil, errors.New("its authority is no certificate")
	}
	return roots, nil
}

// joinClient reaches the system plane behind a host's port.
func joinClient(server string, config *tls.Config) *http.Client {
	return &http.Client{
		Timeout: joinPatience,
		Transport: &http.Transport{
			TLSClientConfig:   config,
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, network, server)
			},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// ask sends a request to the system plane. What that refuses is an error in its words.
func ask(ctx context.Context, client *http.Client, method, serverName, path, token string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "https://"+serverName+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxJoinAnswer))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusUnauthorized {
		return nil, errors.New("the token is not known there: it was used, it has expired, or it is wrong. Make another with `tenantctl host token`")
	}
	if resp.StatusCode/100 != 2 {
		status := metav1.Status{}
		if json.Unmarshal(answer, &status) == nil && status.Message != "" {
			return nil, errors.New(status.Message)
		}
		return nil, errors.New(resp.Status)
	}
	return answer, nil
}

// newRequest makes a key and asks for a certificate for it, both in PEM.
func newRequest(name string) (key, csr []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		return nil, nil, err
	}
	request := &x509.CertificateRequest{DNSNames: []string{name}}
	signed, err := x509.CreateCertificateRequest(rand.Reader, request, private)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: signed}), nil
}

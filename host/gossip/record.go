// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// MaxRecord bounds a record as it is sent, in bytes: some 8,000 tenants.
const MaxRecord = 1 << 20

// Record is what a host says of itself. Fields that a newer version added are
// passed on by hosts that do not know them.
type Record struct {
	// Address is the host:port of the host's one port, where others forward to.
	Address string `json:"address,omitempty"`

	// PeerAddress is the host:port of its etcd for other members.
	PeerAddress string `json:"peerAddress,omitempty"`

	// Version is the program's.
	Version string `json:"version,omitempty"`

	// Role is what the host is in etcd: RoleVoter or RoleLearner. A newer version may
	// say something else.
	Role string `json:"role,omitempty"`

	// Tenants are the ones whose control plane this host runs.
	Tenants []Tenant `json:"tenants,omitempty"`

	Load     Load `json:"load"`
	Draining bool `json:"draining,omitempty"` // it takes no tenants
}

// Roles of a host in etcd.
const (
	RoleVoter   = "voter"
	RoleLearner = "learner"
)

// Tenant is a control plane that a host runs.
type Tenant struct {
	UID   string   `json:"uid"`
	Names []string `json:"names,omitempty"` // by which the port knows it (SNI), in lower case
	Ready bool     `json:"ready,omitempty"` // it answers
}

// Load is what a host uses and has.
type Load struct {
	CPU         int64 `json:"cpu,omitempty"`         // millicores in use
	Cores       int64 `json:"cores,omitempty"`       // processors
	MemoryUsed  int64 `json:"memoryUsed,omitempty"`  // bytes
	MemoryTotal int64 `json:"memoryTotal,omitempty"` // bytes
}

// encode checks the record and writes it as it is sent.
func (r Record) encode() ([]byte, error) {
	if err := r.validate(); err != nil {
		return nil, err
	}
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	if len(body) > MaxRecord {
		return nil, fmt.Errorf("%w: %d bytes for %d tenants, at most %d are possible", errTooLarge, len(body), len(r.Tenants), MaxRecord)
	}
	return body, nil
}

var errTooLarge = errors.New("the record is too large")

// decodeRecord reads what another host sent.
func decodeRecord(body []byte) (Record, error) {
	if len(body) > MaxRecord {
		return Record{}, fmt.Errorf("%w: %d bytes", errTooLarge, len(body))
	}
	var r Record
	if err := json.Unmarshal(body, &r); err != nil {
		return Record{}, err
	}
	return r, r.validate()
}

func (r Record) validate() error {
	for field, address := range map[string]string{"address": r.Address, "peerAddress": r.PeerAddress} {
		if address != "" && !isHostPort(address) {
			return fmt.Errorf("%s %q is not host:port", field, clip(address))
		}
	}
	for field, text := range map[string]string{"version": r.Version, "role": r.Role} {
		if !isPlain(text) {
			return fmt.Errorf("%s %q is not a short plain text", field, clip(text))
		}
	}
	if l := r.Load; l.CPU < 0 || l.Cores < 0 || l.MemoryUsed < 0 || l.MemoryTotal < 0 {
		return fmt.Errorf("load %+v is negative", l)
	}
	for _, t := range r.Tenants {
		if !isDNSName(t.UID) {
			return fmt.Errorf("tenant's uid %q is not a DNS name", clip(t.UID))
		}
		for _, name := range t.Names {
			if !isDNSName(name) {
				return fmt.Errorf("tenant's name %q is not a DNS name", clip(name))
			}
		}
	}
	return nil
}

// isDNSName reports whether s is made of DNS labels, in lower case.
func isDNSName(s string) bool {
	return len(s) <= validation.DNS1123SubdomainMaxLength && validation.IsDNS1123Subdomain(s) == nil
}

func isHostPort(s string) bool {
	host, port, err := net.SplitHostPort(s)
	if err != nil || host == "" || net.ParseIP(host) == nil && !isDNSName(host) {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

// isPlain reports whether s can be shown in a table and a log as it is.
func isPlain(s string) bool {
	return len(s) <= 128 && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}

// clip shortens what a stranger wrote for a log.
func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}

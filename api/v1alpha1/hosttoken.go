// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"errors"
	"log/slog"
	"regexp"
	"strings"
)

// HostToken is what a new host needs to join an installation, and to know that it is
// that one: a secret that the installation knows it by, and what it knows the
// installation's system plane by. It is good for as long as [HostTokenRequest] said.
//
// Whoever has a token can become a host, and a host holds every tenant's keys.
type HostToken struct {
	// ID is the public part of the bootstrap token in the system plane: 6 lower-case
	// letters and digits.
	ID string
	// Secret is the other part: 16 lower-case letters and digits.
	Secret string
	// CACertHash is the hash of the system plane's authority, as [HostTokenRequest]
	// has it: sha256: and 64 hexadecimal digits.
	CACertHash string
	// ServerName is the name that the system plane is served under, system.<domain>.
	ServerName string
}

const hashPrefix = "sha256:"

var (
	tokenID     = regexp.MustCompile(`^[a-z0-9]{6}$`)
	tokenSecret = regexp.MustCompile(`^[a-z0-9]{16}$`)
	tokenHash   = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// String returns the token as people carry it from host to host,
// <id>.<secret>.<hash>.<server name>. It has the secret.
func (t HostToken) String() string {
	return strings.Join([]string{t.ID, t.Secret, strings.TrimPrefix(t.CACertHash, hashPrefix), t.ServerName}, ".")
}

// BootstrapToken returns the part that authenticates at the system plane, as a bearer
// token: <id>.<secret>.
func (t HostToken) BootstrapToken() string { return t.ID + "." + t.Secret }

// LogValue implements [slog.LogValuer]: logs get no secret.
func (t HostToken) LogValue() slog.Value {
	return slog.GroupValue(slog.String("id", t.ID), slog.String("server", t.ServerName))
}

// ParseHostToken reads what String wrote; space around it is left out of account. An
// error does not repeat the token, which may be right but for a character.
func ParseHostToken(text string) (HostToken, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return HostToken{}, errors.New("the host token is empty; print one on a host of the installation with: tenantctl host token")
	}
	parts := strings.SplitN(text, ".", 4)
	if len(parts) != 4 || !tokenID.MatchString(parts[0]) || !tokenSecret.MatchString(parts[1]) ||
		!tokenHash.MatchString(parts[2]) || !isDNSName(parts[3], 253) {
		return HostToken{}, errors.New("this is no host token, or not all of one: it has the form <id>.<secret>.<hash>.<server name>; print one on a host of the installation with: tenantctl host token")
	}
	return HostToken{ID: parts[0], Secret: parts[1], CACertHash: hashPrefix + parts[2], ServerName: parts[3]}, nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package konnectivity

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"time"

	"github.com/tenantd/tenantd/konnectivity/internal/wire"
)

const (
	// DefaultDialTimeout is how long one agent may take over a dial: the 5 s that
	// it gives the target, and one for the way there and back.
	DefaultDialTimeout = wire.DialTimeout + time.Second

	// DefaultMaxStreams bounds a tenant's connections through the tunnel. Each may
	// hold 448 KiB that nobody takes, so this keeps the worst tenant under a
	// gigabyte.
	DefaultMaxStreams = 2048

	// DefaultMaxAgents is the number of nodes that Kubernetes itself is built for.
	DefaultMaxAgents = 5000

	// DefaultRecheck is how soon a token that was taken back, a certificate that
	// expired and an address that a node lost are noticed. A minute costs a
	// cluster of 100 token agents under two reviews a second.
	DefaultRecheck = time.Minute
)

// Config configures a [Server]. Its zero value lacks only Tenant and TLS.
type Config struct {
	// Tenant labels metrics and logs. Required.
	Tenant string

	// TLS has the serving certificate and ClientCAs, the authority of kubelets'
	// client certificates. The server adds to it what admits agents and nobody
	// else, to what GetConfigForClient returns as well. Required.
	TLS *tls.Config

	// AuthenticateToken says whether token is a service-account token of the
	// tunnel's audience. Nil refuses every token. The server calls it when an
	// agent connects, for at most 16 of them at a time, and every Recheck, with a
	// context of 10 s.
	AuthenticateToken func(ctx context.Context, token string) error

	// NodeAddresses returns status.addresses of a Node: what that node's agent
	// may claim to be. It is called when an agent connects and every Recheck.
	// Nil, like an error, honours no claim.
	NodeAddresses func(ctx context.Context, node string) ([]string, error)

	// Replicas is how many servers serve this cluster at the same time. Upstream's
	// agent connects until it has found that many. Nil means one.
	Replicas func() int

	// Gathering is how long after the first Serve dials wait for an agent if none has
	// come yet, instead of failing: those of a server before this one are on their
	// way. Zero or less means not at all.
	Gathering time.Duration

	// DialTimeout bounds what one agent takes over one dial; a dial asks at most
	// two. Zero or less means DefaultDialTimeout.
	DialTimeout time.Duration

	// MaxStreams bounds open connections and dials, over all agents. Zero or less
	// means DefaultMaxStreams.
	MaxStreams int

	// MaxAgents bounds agent connections. Zero or less means DefaultMaxAgents.
	MaxAgents int

	// Recheck is how often an agent's credentials and claims are looked at again.
	// Zero or less means DefaultRecheck.
	Recheck time.Duration

	// Logger; nil discards.
	Logger *slog.Logger
}

// Validate returns every fault at once.
func (c Config) Validate() error {
	var faults []error
	if c.Tenant == "" {
		faults = append(faults, errors.New("Tenant is empty: set it to the tenant's name"))
	}
	if c.TLS == nil {
		faults = append(faults, errors.New("TLS is nil: set the serving certificate and ClientCAs"))
	}
	return errors.Join(faults...)
}

func (c Config) withDefaults() Config {
	if c.DialTimeout <= 0 {
		c.DialTimeout = DefaultDialTimeout
	}
	if c.MaxStreams <= 0 {
		c.MaxStreams = DefaultMaxStreams
	}
	if c.MaxAgents <= 0 {
		c.MaxAgents = DefaultMaxAgents
	}
	if c.Recheck <= 0 {
		c.Recheck = DefaultRecheck
	}
	if c.Replicas == nil {
		c.Replicas = func() int { return 1 }
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Logger = c.Logger.With("tenant", c.Tenant)
	return c
}

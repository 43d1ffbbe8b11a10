// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"
)

const (
	// DefaultName is the name of the only member of a single host.
	DefaultName = "default"
	// DefaultBackendQuota is the largest size etcd's authors test and recommend, in bytes.
	DefaultBackendQuota = 8 << 30
	// DefaultTenantQuota holds some 50,000 typical objects, and lets 32 full tenants share a host, in bytes.
	DefaultTenantQuota = 256 << 20
	// DefaultCompactInterval is kube-apiserver's own: watchers may be that much late and still resume.
	DefaultCompactInterval = 5 * time.Minute
	// DefaultMinHistory outlasts a watch that reconnects, and bounds what one tenant's rewriting costs the
	// others' watchers.
	DefaultMinHistory = 10 * time.Second
	// DefaultDefragInterval spaces defragmentations: each holds up all writes while it copies the live data.
	DefaultDefragInterval = time.Hour
	// DefaultDefragMinBytes is the file size below which returning space to the disk is not worth a pause.
	DefaultDefragMinBytes = 128 << 20
	// DefaultDefragMaxBytes is the live data above which a defragmentation pauses writes for longer than a
	// client should notice (about 5 s on a slow disk), in bytes. Above it only a nearly full backend is defragmented.
	DefaultDefragMaxBytes = 1 << 30
	// DefaultConnections spreads watch streams: etcd sends progress on a stream only when all its watches are in
	// step, so a stream must not carry every tenant.
	DefaultConnections = 8
)

// Config says where and how a [Store] keeps its data. Only Dir is required.
type Config struct {
	// Dir is etcd's data directory. It is made if absent and kept at mode 0700.
	Dir string
	// Name is the member's name among the hosts. Empty means [DefaultName]. A directory that has a database keeps the
	// name it was made with, see [Store.Name].
	Name string
	// Peers makes this a member of a cluster of hosts. Nil means the only member there is; nothing listens for others.
	Peers *PeerConfig
	// SocketDir is the directory (made, mode 0700) of the unix socket that clients dial. Empty means Dir or, where
	// the path would be longer than a socket's address may be, a fresh directory under [os.TempDir] that Close removes.
	SocketDir string
	// BackendQuota bounds the database file of all tenants, in bytes. 0 means [DefaultBackendQuota].
	BackendQuota int64
	// TenantQuota is the live data a tenant may hold if SetLimits says nothing else, in bytes. 0 means
	// [DefaultTenantQuota].
	TenantQuota int64
	// CompactInterval is how much history is kept for watchers. 0 means [DefaultCompactInterval].
	CompactInterval time.Duration
	// MinHistory is how much history is kept even when a tenant or the backend is pressed for space. 0 means
	// [DefaultMinHistory], or CompactInterval where that is shorter.
	MinHistory time.Duration
	// DefragInterval is the least time between two defragmentations. 0 means [DefaultDefragInterval].
	DefragInterval time.Duration
	// DefragMinBytes is the file size from which a file that is more than half free is defragmented.
	// 0 means [DefaultDefragMinBytes].
	DefragMinBytes int64
	// DefragMaxBytes is the live data up to which that is done. 0 means [DefaultDefragMaxBytes].
	DefragMaxBytes int64
	// Connections is the number of clients Conn hands out in turn. 0 means [DefaultConnections].
	Connections int
	// UnsafeNoFsync loses acknowledged writes in a power cut. For tests only.
	UnsafeNoFsync bool
	// Logger receives one line per change of state, and etcd's own warnings. Nil discards.
	Logger *slog.Logger

	// forceAlone makes a directory of one of several members that of the only one. See Salvage.
	forceAlone bool
}

// Validate returns every fault of the configuration at once.
func (c Config) Validate() error {
	var faults []error
	if c.Dir == "" {
		faults = append(faults, errors.New("Dir is empty: name a directory for the database"))
	}
	if err := validName(c.Name); c.Name != "" && err != nil {
		faults = append(faults, fmt.Errorf("Name: %w", err))
	}
	if c.Peers != nil {
		name := c.Name
		setDefault(&name, DefaultName)
		faults = append(faults, c.Peers.validate(name)...)
	}
	for _, n := range []struct {
		field string
		value int64
	}{
		{"BackendQuota", c.BackendQuota},
		{"TenantQuota", c.TenantQuota},
		{"CompactInterval", int64(c.CompactInterval)},
		{"MinHistory", int64(c.MinHistory)},
		{"DefragInterval", int64(c.DefragInterval)},
		{"DefragMinBytes", c.DefragMinBytes},
		{"DefragMaxBytes", c.DefragMaxBytes},
		{"Connections", int64(c.Connections)},
	} {
		if n.value < 0 {
			faults = append(faults, fmt.Errorf("%s is negative: leave it 0 for the default", n.field))
		}
	}
	return errors.Join(faults...)
}

// withDefaults returns c with absolute paths and every zero replaced.
func (c Config) withDefaults() (Config, error) {
	if err := c.Validate(); err != nil {
		return c, err
	}
	for _, dir := range []*string{&c.Dir, &c.SocketDir} {
		if *dir == "" {
			continue
		}
		abs, err := filepath.Abs(*dir)
		if err != nil {
			return c, err
		}
		*dir = abs
	}
	setDefault(&c.Name, DefaultName)
	setDefault(&c.BackendQuota, DefaultBackendQuota)
	setDefault(&c.TenantQuota, DefaultTenantQuota)
	setDefault(&c.CompactInterval, DefaultCompactInterval)
	setDefault(&c.MinHistory, DefaultMinHistory)
	c.MinHistory = min(c.MinHistory, c.CompactInterval)
	setDefault(&c.DefragInterval, DefaultDefragInterval)
	setDefault(&c.DefragMinBytes, DefaultDefragMinBytes)
	setDefault(&c.DefragMaxBytes, DefaultDefragMaxBytes)
	setDefault(&c.Connections, DefaultConnections)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

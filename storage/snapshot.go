// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"

	"go.etcd.io/etcd/etcdutl/v3/snapshot"
)

const (
	// restoring is where a snapshot is unpacked, in the directory it is to serve in.
	restoring = "restoring"
	// revisionBump is more revisions than a snapshot misses: clients remember some that were given after it was taken,
	// and must not be given them again for something else. 1000 writes a second take 11 days for as many.
	revisionBump = 1_000_000_000
)

// Snapshot writes what this member has, of all tenants and with a checksum, as [Restore] and etcdutl take it. It needs
// no quorum. What others wrote in the moments before may be missing. Who can read it has every tenant's data.
func (s *Store) Snapshot(ctx context.Context, w io.Writer) error {
	data, err := s.client.Snapshot(ctx)
	if err != nil {
		return fmt.Errorf("take a snapshot of storage: %w", err)
	}
	defer data.Close()
	if _, err := io.Copy(w, data); err != nil {
		return fmt.Errorf("take a snapshot of storage: %w", err)
	}
	return nil
}

// Restore makes cfg.Dir, which must not hold a database, the directory of the only member of a new cluster, with the
// data of a snapshot file. Other members of the cluster that the snapshot is from must be stopped for good: they and
// their directories are no part of the new one, and join it like any other host. Open it with the same cfg.
//
// Revisions go on from far above those that clients may remember, and none of the history is left, so every watch
// starts anew.
func Restore(file string, cfg Config) error {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return fmt.Errorf("restore storage: %w", err)
	}
	if err := restore(file, cfg); err != nil {
		return fmt.Errorf("restore storage from %s into %s: %w", file, cfg.Dir, withRemedy(err))
	}
	return nil
}

func restore(file string, cfg Config) error {
	if cfg.Peers.joins() {
		return errors.New("it is to be the first of a cluster, and Peers.Initial names others: restore on one host and let the others join")
	}
	if err := privateDir(cfg.Dir); err != nil {
		return err
	}
	lock, err := lockDir(cfg.Dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	home, away := filepath.Join(cfg.Dir, "member"), filepath.Join(cfg.Dir, restoring)
	if _, err := os.Stat(home); err == nil {
		return errors.New("it holds a database already: move it away or choose an empty directory")
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.RemoveAll(away); err != nil {
		return err
	}
	url := lonelyPeerURL
	if cfg.Peers != nil {
		url = peerURL(cfg.Peers.Advertise)
	}
	if err := unpack(cfg, snapshot.RestoreConfig{
		SnapshotPath:        file,
		Name:                cfg.Name,
		OutputDataDir:       away,
		PeerURLs:            []string{url},
		InitialCluster:      cfg.Name + "=" + url,
		InitialClusterToken: rand.Text(), // or a member of the old cluster could take this one for its own
		RevisionBump:        revisionBump,
		MarkCompacted:       true,
	}); err != nil {
		return errors.Join(err, os.RemoveAll(away))
	}
	for _, name := range []string{joiningFile, joinedFile} {
		if err := os.Remove(filepath.Join(cfg.Dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	// Up to here there is no database, from here on a whole one.
	if err := os.Rename(filepath.Join(away, "member"), home); err != nil {
		return err
	}
	cfg.Logger.Info("storage is restored", "from", file, "dir", cfg.Dir, "member", cfg.Name)
	return os.RemoveAll(away)
}

// unpack lets etcd restore, on a goroutine that its last words may end.
func unpack(cfg Config, to snapshot.RestoreConfig) error {
	last := newLastWords()
	result := make(chan error, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		result <- snapshot.NewV3(newEtcdLogger(cfg.Logger, last, new(atomic.Bool))).Restore(to)
	}()
	<-ended
	select {
	case err := <-result:
		return err
	case err := <-last:
		return err
	}
}

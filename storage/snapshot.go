// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/etcd/server/v3/storage/wal/walpb"
	"go.uber.org/zap"
)

const (
	// salvaging is where Salvage works, in the directory that it reads.
	salvaging = "salvaging"
	// answerPatience is how long a store that serves may take to say so.
	answerPatience = 20 * time.Second
	// restoring is where a snapshot is unpacked, in the directory it is to serve in.
	restoring = "restoring"
	// revisionBump is more revisions than a snapshot misses: clients remember some that were given after it was taken,
	// and must not be given them again for something else. 1000 writes a second take 11 days for as many.
	revisionBump = 1_000_000_000
)

// Snapshot writes what this member has, of all tenants and with a checksum, as [Restore] and etcdutl take it. It needs
// no quorum. What others wrote in the moments before may be missing. Who can read it has every tenant's data.
func (s *Store) Snapshot(ctx context.Context, w io.Writer) error {
	if err := takeSnapshot(ctx, s.client, w); err != nil {
		return fmt.Errorf("take a snapshot of storage: %w", err)
	}
	return nil
}

// SnapshotOf is [Store.Snapshot] of a store that another process has open, whose socket is in socketDir. The error is
// fs.ErrNotExist where nobody listens.
func SnapshotOf(ctx context.Context, socketDir string, w io.Writer) error {
	socket, err := filepath.Abs(filepath.Join(socketDir, socketFile))
	if err != nil {
		return fmt.Errorf("take a snapshot of storage: %w", err)
	}
	// The client would try for ever.
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if errors.Is(err, syscall.ECONNREFUSED) {
		err = fs.ErrNotExist // whoever made it was killed
	}
	if err != nil {
		return fmt.Errorf("take a snapshot of storage: %w", err)
	}
	conn.Close()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + socket}, Logger: zap.NewNop()})
	if err != nil {
		return fmt.Errorf("take a snapshot of storage: connect to %s: %w", socket, err)
	}
	defer client.Close()
	if err := answers(ctx, client, "unix://"+socket); err != nil {
		return fmt.Errorf("take a snapshot of storage through %s: %w", socket, err)
	}
	if err := takeSnapshot(ctx, client, w); err != nil {
		return fmt.Errorf("take a snapshot of storage through %s: %w", socket, err)
	}
	return nil
}

// answers sees that somebody serves, with or without a quorum.
func answers(ctx context.Context, client *clientv3.Client, endpoint string) error {
	ctx, cancel := context.WithTimeout(ctx, answerPatience)
	defer cancel()
	if _, err := client.Status(ctx, endpoint); err != nil {
		return fmt.Errorf("it does not serve; it may be starting, or wait for others to start: if they are gone for good, stop it and try again: %w", err)
	}
	return nil
}

// Salvage is [Store.Snapshot] of the directory of a member that does not run, for when the others are gone for good:
// it has all that was acknowledged with this member's help. The directory is left as it is; a copy is made in it meanwhile,
// so the disk needs as much room again.
func Salvage(ctx context.Context, dir string, w io.Writer, log *slog.Logger) error {
	if err := salvage(ctx, dir, w, log); err != nil {
		return fmt.Errorf("take a snapshot of the storage in %s: %w", dir, withRemedy(err))
	}
	return nil
}

func salvage(ctx context.Context, dir string, w io.Writer, log *slog.Logger) (err error) {
	if _, err := os.Stat(filepath.Join(dir, "member")); err != nil {
		return err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	own, err := inspect(dir, &PeerConfig{})
	if err != nil {
		return err
	}
	if own.name == "" {
		return errors.New("it is not known which member it is: it has not served yet")
	}
	work := filepath.Join(dir, salvaging)
	if err := os.RemoveAll(work); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	if own.learner {
		// Nobody can be elected where nobody votes, so what is in the log alone stays there: writes of the last 100 ms
		// before a member was killed.
		return copyDatabase(filepath.Join(dir, databaseFile), w)
	}
	if err := privateDir(work); err != nil {
		return err
	}
	if err := os.CopyFS(filepath.Join(work, "member"), os.DirFS(filepath.Join(dir, "member"))); err != nil {
		return err
	}
	if err := commitAll(filepath.Join(work, "member", "wal")); err != nil {
		return err
	}
	s, err := Open(ctx, Config{Dir: work, Name: own.name, Logger: log, UnsafeNoFsync: true, forceAlone: true})
	if err != nil {
		return err
	}
	return errors.Join(s.Snapshot(ctx, w), s.Close())
}

// commitAll makes all that is in a log count. What this member and another had written down was acknowledged, but a
// member does not note at once that it was, and etcd discards what is not noted. What nobody acknowledged may then
// count as well, as with any write whose answer is lost.
func commitAll(logDir string) error {
	nop := zap.NewNop()
	for repaired := false; ; repaired = true {
		snapshots, err := wal.ValidSnapshotEntries(nop, logDir)
		if err != nil {
			return fmt.Errorf("read the log: %w", err)
		}
		from := new(walpb.Snapshot)
		if n := len(snapshots); n > 0 {
			from = snapshots[n-1]
		}
		log, err := wal.Open(nop, logDir, from)
		if err != nil {
			return fmt.Errorf("read the log: %w", err)
		}
		_, state, entries, err := log.ReadAll()
		if errors.Is(err, io.ErrUnexpectedEOF) && !repaired { // the record in which it was killed
			if log.Close(); wal.Repair(nop, logDir) {
				continue
			}
		}
		if n := len(entries); err == nil && n > 0 && entries[n-1].GetIndex() > state.GetCommit() {
			state.Commit = entries[n-1].Index
			err = log.Save(state, nil)
		}
		if err = errors.Join(err, log.Close()); err != nil {
			return fmt.Errorf("settle the log: %w", err)
		}
		return nil
	}
}

// copyDatabase writes a database that nobody has open, with the checksum that a snapshot has.
func copyDatabase(path string, w io.Writer) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	sum := sha256.New()
	if _, err := io.Copy(io.MultiWriter(w, sum), file); err != nil {
		return err
	}
	_, err = w.Write(sum.Sum(nil))
	return err
}

// takeSnapshot copies a snapshot and sees that it is whole.
func takeSnapshot(ctx context.Context, client *clientv3.Client, w io.Writer) error {
	data, err := client.Snapshot(ctx)
	if err != nil {
		return err
	}
	defer data.Close()
	sum := &trailing{hash: sha256.New()}
	if _, err := io.Copy(io.MultiWriter(w, sum), data); err != nil {
		return err
	}
	if !sum.whole() {
		return errors.New("its checksum is wrong, or its end is missing: try again")
	}
	return nil
}

// trailing calculates the checksum of all but what is as long as a checksum at the end, and compares the two.
type trailing struct {
	hash hash.Hash
	end  []byte
}

func (t *trailing) Write(p []byte) (int, error) {
	t.end = append(t.end, p...)
	if n := len(t.end) - sha256.Size; n > 0 {
		t.hash.Write(t.end[:n]) // it never fails
		t.end = append(t.end[:0], t.end[n:]...)
	}
	return len(p), nil
}

func (t *trailing) whole() bool { return bytes.Equal(t.hash.Sum(nil), t.end) }

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
	} else if !errors.Is(err, fs.ErrNotExist) {
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
		if err := os.Remove(filepath.Join(cfg.Dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
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

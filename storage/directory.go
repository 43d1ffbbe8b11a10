// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-semver/semver"
	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"go.etcd.io/etcd/api/v3/version"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/etcd/server/v3/storage/wal/walpb"
	"golang.org/x/sys/unix"
)

const (
	lockFile   = "lock"
	socketFile = "etcd.sock"
	// maxSocketPath is what fits into sockaddr_un with its final NUL.
	maxSocketPath = 107
)

// privateDir makes dir, and makes it private: etcd's socket has no other protection.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return os.Chmod(dir, 0o700)
}

// lockDir takes dir for this process until the file is closed. The kernel lets go when a process dies, so there is
// never a stale lock.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		holder, _ := os.ReadFile(f.Name())
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("process %s uses it: stop that process or choose another directory",
				strings.TrimSpace(string(holder)))
		}
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	if err := f.Truncate(0); err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
		if err == nil {
			return f, nil
		}
	}
	err = fmt.Errorf("write %s: %w", f.Name(), err)
	f.Close()
	return nil, err
}

// socketPath decides where the client socket is. A returned temporary directory is the caller's to remove.
func socketPath(cfg Config) (path, temporary string, err error) {
	dir := cfg.SocketDir
	if dir == "" {
		dir = cfg.Dir
	}
	path = filepath.Join(dir, socketFile)
	if len(path) > maxSocketPath {
		if cfg.SocketDir != "" {
			return "", "", fmt.Errorf("socket path %s is %d bytes, the system allows %d: choose a shorter SocketDir",
				path, len(path), maxSocketPath)
		}
		if dir, err = os.MkdirTemp("", "tenantd-"); err != nil { // 0700
			return "", "", fmt.Errorf("make a directory for the socket: %w", err)
		}
		return filepath.Join(dir, socketFile), dir, nil
	}
	return path, "", privateDir(dir)
}

const (
	// spaceToBegin is what a new store takes at once: a log file, which etcd writes in full beforehand (64 MiB), the
	// next one, which it prepares, and the empty database.
	spaceToBegin = 132 << 20
	// spaceToGoOn lets a store that exists open its database and say in its log that it did.
	spaceToGoOn = 4 << 20
)

// checkSpace refuses a disk on which etcd could not start, of which it says no more than that a file is closed.
func checkSpace(dir string) error {
	need := int64(spaceToGoOn)
	if !wal.Exist(filepath.Join(dir, "member", "wal")) {
		need = spaceToBegin
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("look at the file system of %s: %w", dir, err)
	}
	if free := int64(fs.Bavail) * fs.Bsize; free < need { //nolint:gosec // file systems are smaller than 8 EiB
		return fmt.Errorf("%w: %s of the %s that a start takes", syscall.ENOSPC, humanBytes(free), humanBytes(need))
	}
	return nil
}

// inspect looks at an existing database before etcd does, since etcd answers most surprises by ending the process or
// waiting without end. A directory without a database is fine. unborn says that etcd was stopped in its very first
// start, before it committed anything; it would wait for ever to be elected by nobody.
func inspect(dir string) (unborn bool, err error) {
	path := filepath.Join(dir, "member", "snap", "db")
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: time.Second})
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return false, fmt.Errorf("another etcd has %s open: stop it or choose another directory", path)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrChecksum), errors.Is(err, berrors.ErrVersionMismatch):
		return false, fmt.Errorf("%s is damaged or no etcd database (%w): restore a snapshot into an empty directory", path, err)
	case err != nil:
		return false, fmt.Errorf("read %s: %w", path, err)
	}
	defer db.Close()

	logDir := filepath.Join(dir, "member", "wal")
	members := 0
	err = db.View(func(tx *bolt.Tx) error {
		if b := tx.Bucket([]byte("members")); b != nil {
			members = b.Stats().KeyN
		}
		if members > 1 {
			return fmt.Errorf("it belongs to an etcd cluster of %d members and would wait for the others: "+
				"restore a snapshot into an empty directory", members)
		}
		if members > 0 && !wal.Exist(logDir) {
			return fmt.Errorf("%s has a database but no log in member/wal: "+
				"put the log back or restore a snapshot into an empty directory", dir)
		}
		if b := tx.Bucket([]byte("cluster")); b != nil {
			wrote, err := semver.NewVersion(string(b.Get([]byte("clusterVersion"))))
			ours := semver.New(version.Version)
			if err == nil && (wrote.Major > ours.Major || wrote.Major == ours.Major && wrote.Minor > ours.Minor) {
				return fmt.Errorf("it was written by etcd %d.%d, newer than this program's %s: run a newer tenantd",
					wrote.Major, wrote.Minor, version.Version)
			}
		}
		return nil
	})
	if err != nil || members > 0 || !wal.Exist(logDir) {
		return false, err
	}
	// The first record etcd syncs commits its membership, so what was acknowledged is always after a commit.
	log, err := wal.OpenForRead(nil, logDir, new(walpb.Snapshot))
	if err != nil {
		return false, fmt.Errorf("read the log in %s: %w", logDir, err)
	}
	defer log.Close()
	_, state, _, err := log.ReadAll()
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return false, fmt.Errorf("read the log in %s: %w", logDir, err)
	}
	return state.GetCommit() == 0, nil
}

// withRemedy adds what to do to an error that says nothing of it.
func withRemedy(err error) error {
	for _, known := range []struct {
		is     error
		remedy string
	}{
		{syscall.ENOSPC, "free space on this file system or choose another directory"},
		{syscall.EDQUOT, "raise the user's disk quota or choose another directory"},
		{syscall.EROFS, "mount the file system writable or choose another directory"},
		{syscall.EACCES, "run as the directory's owner, or give the directory to the user of this process"},
		{syscall.EPERM, "run as the directory's owner, or give the directory to the user of this process"},
		{syscall.EMFILE, "raise LimitNOFILE"},
		{walpb.ErrCRCMismatch, "the log is damaged, restore a snapshot into an empty directory"},
		{syscall.ENOTDIR, "choose a path that is a directory"},
	} {
		if errors.Is(err, known.is) {
			return fmt.Errorf("%w: %s", err, known.remedy)
		}
	}
	return err
}

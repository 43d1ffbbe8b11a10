// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-semver/semver"
	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/version"
	"go.etcd.io/etcd/client/pkg/v3/fileutil"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/etcd/server/v3/storage/wal/walpb"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

const (
	lockFile     = "lock"
	socketFile   = "etcd.sock"
	databaseFile = "member/snap/db"
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

// found is what a directory held before etcd was started on it.
type found struct {
	// unborn says that etcd was stopped in its very first start, before it committed anything; it would wait for ever
	// to be elected by nobody.
	unborn  bool
	log     bool                // there is a log, so this is a member of something
	name    string              // this member's; empty if it has none yet
	learner bool                // this member has no vote
	members []membership.Member // as far as this member knows, itself included
	joining map[string]string   // the Initial of a member that has not served yet; nil otherwise
	joined  map[string]string   // that of one that has
}

// inspect looks at an existing database before etcd does, since etcd answers most surprises by ending the process or
// waiting without end. A directory without a database is fine. peers is nil where there must not be any.
func inspect(dir string, peers *PeerConfig) (f found, err error) {
	logDir := filepath.Join(dir, "member", "wal")
	f.log = wal.Exist(logDir)
	if f.joining, err = readInitial(dir, joiningFile); err != nil {
		return f, err
	}
	if f.joined, err = readInitial(dir, joinedFile); err != nil {
		return f, err
	}
	path := filepath.Join(dir, databaseFile)
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return f, nil
	} else if err != nil {
		return f, err
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: time.Second})
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return f, fmt.Errorf("another etcd has %s open: stop it or choose another directory", path)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrChecksum), errors.Is(err, berrors.ErrVersionMismatch):
		return f, fmt.Errorf("%s is damaged or no etcd database (%w): restore a snapshot into an empty directory", path, err)
	case err != nil:
		return f, fmt.Errorf("read %s: %w", path, err)
	}
	defer db.Close()

	err = db.View(func(tx *bolt.Tx) error {
		if b := tx.Bucket([]byte("members")); b != nil {
			err := b.ForEach(func(_, value []byte) error {
				var m membership.Member
				if err := json.Unmarshal(value, &m); err != nil {
					return err
				}
				f.members = append(f.members, m)
				return nil
			})
			if err != nil {
				return fmt.Errorf("read the members in %s: %w", path, err)
			}
		}
		if n := len(f.members); n > 1 && peers == nil {
			return fmt.Errorf("it belongs to an etcd cluster of %d members and would wait for the others: "+
				"say how to reach them, or restore a snapshot into an empty directory", n)
		}
		if len(f.members) > 0 && !f.log {
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
	if err != nil || !f.log {
		return f, err
	}
	if len(f.members) > 0 {
		return f, f.identify(logDir, peers)
	}
	if f.joining != nil {
		return f, nil // what it has of the log, the leader counts on
	}
	// The first record etcd syncs commits its membership, so what was acknowledged is always after a commit.
	log, err := wal.OpenForRead(nil, logDir, new(walpb.Snapshot))
	if err != nil {
		return f, fmt.Errorf("read the log in %s: %w", logDir, err)
	}
	defer log.Close()
	_, state, _, err := log.ReadAll()
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return f, fmt.Errorf("read the log in %s: %w", logDir, err)
	}
	f.unborn = state.GetCommit() == 0
	return f, nil
}

// identify finds this member's name among the members', and refuses to join what the directory is no part of.
func (f *found) identify(logDir string, peers *PeerConfig) error {
	id, err := memberID(logDir)
	if err != nil {
		return fmt.Errorf("read the log in %s: %w", logDir, err)
	}
	known := !peers.joins() || maps.Equal(peers.Initial, f.joined)
	for i := range f.members {
		m := &f.members[i]
		if m.ID == id {
			f.name, f.learner = m.Name, m.IsLearner
			continue
		}
		for _, address := range peersInitial(peers) {
			known = known || address != peers.Advertise && address == peerAddress(m)
		}
	}
	if !known {
		return errors.New("its database belongs to another cluster than the one to join: " +
			"choose an empty directory, or do without what it holds and remove it")
	}
	return nil
}

func peersInitial(p *PeerConfig) map[string]string {
	if p == nil {
		return nil
	}
	return p.Initial
}

// memberID is who wrote a log. Each of its files says so at its beginning.
func memberID(logDir string) (types.ID, error) {
	files, err := filepath.Glob(filepath.Join(logDir, "*.wal"))
	if err != nil || len(files) == 0 {
		return 0, errors.Join(err, errors.New("it has no files"))
	}
	file, err := os.Open(files[len(files)-1]) // by name, which begins with a sequence number
	if err != nil {
		return 0, err
	}
	defer file.Close()
	records := wal.NewDecoder(fileutil.NewFileReader(file))
	for {
		var record walpb.Record
		if err := records.Decode(&record); err != nil {
			return 0, fmt.Errorf("find the member's identity in %s: %w", file.Name(), err)
		}
		switch record.GetType() {
		case wal.CrcType:
			records.UpdateCRC(record.GetCrc())
		case wal.MetadataType:
			var metadata pb.Metadata
			if err := proto.Unmarshal(record.GetData(), &metadata); err != nil {
				return 0, fmt.Errorf("read the member's identity in %s: %w", file.Name(), err)
			}
			return types.ID(metadata.GetNodeID()), nil
		}
	}
}

// joiningFile holds what a new member was told of the cluster it joins, until it has served for the first time. A
// directory that has it must never begin a cluster of its own, whatever it was told since. Then it is joinedFile.
const (
	joiningFile = "joining.json"
	joinedFile  = "joined.json"
)

func readInitial(dir, name string) (initial map[string]string, err error) {
	path := filepath.Join(dir, name)
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(data, &initial); err != nil {
		return nil, fmt.Errorf("read %s: %w: remove the directory and join again", path, err)
	}
	return initial, nil
}

func writeJoining(dir string, initial map[string]string) error {
	data, err := json.Marshal(initial)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, joiningFile)
	file, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err = errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// joinIsOver notes that this member has served.
func joinIsOver(dir string) error {
	err := os.Rename(filepath.Join(dir, joiningFile), filepath.Join(dir, joinedFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
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

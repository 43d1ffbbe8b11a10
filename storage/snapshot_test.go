// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// The last host, restored from a snapshot, has everything, gives no revision twice, and lets others join.
func TestRestore(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	b := h.join(a, "b", nil)
	for _, name := range []string{"one", "two", "three"} {
		mustPut(t, a, key(t, a, "t", name), 1000)
	}
	remove(t, a, key(t, a, "t", "two"))
	reads(t, b, "/host/any") // waits for what a wrote
	file := filepath.Join(t.TempDir(), "snapshot")
	var data bytes.Buffer
	if err := b.Snapshot(t.Context(), &data); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, data.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	mustPut(t, a, key(t, a, "t", "later"), 1000) // is lost, and its revision remembered by somebody
	status, err := a.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want, keys := counted(t, b, "t")
	want -= int64(len(key(t, a, "t", "later")) + 1000)
	keys--
	h.shut("b")
	a.Close()
	delete(h.stores, "a")

	cfg := h.config("new")
	if err := Restore(file, cfg); err != nil {
		t.Fatal(err)
	}
	s := h.open("new", cfg)
	if got := summary(t, s); got != "new voter" {
		t.Error(got)
	}
	if live, n := counted(t, s, "t"); live != want || n != keys {
		t.Errorf("%d bytes in %d keys are there, want %d in %d", live, n, want, keys)
	}
	checkBooks(t, s, "t")
	now, err := s.Status(t.Context())
	if err != nil || now.Revision <= status.Revision {
		t.Errorf("the revision is %d and was %d, %v", now.Revision, status.Revision, err)
	}
	resumed := <-s.Client().Watch(t.Context(), tenantsPrefix, clientv3.WithPrefix(), clientv3.WithRev(status.Revision))
	if resumed.CompactRevision == 0 {
		t.Errorf("a watch from before is resumed: %+v", resumed)
	}
	other := h.join(s, "other", nil)
	if live, n := counted(t, other, "t"); live != want || n != keys {
		t.Errorf("the one that joined has %d bytes in %d keys", live, n)
	}
}

func TestRestoreAlone(t *testing.T) {
	s := open(t, nil)
	mustPut(t, s, key(t, s, "t", "k"), 1000)
	var data bytes.Buffer
	if err := s.Snapshot(t.Context(), &data); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "snapshot")
	if err := os.WriteFile(file, data.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Restore(file, s.cfg); err == nil || !strings.Contains(err.Error(), "process") {
		t.Error("restored over a store that is open:", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Restore(file, s.cfg); err == nil || !strings.Contains(err.Error(), "holds a database already") {
		t.Error("restored over a database:", err)
	}

	dir := t.TempDir()
	damaged := bytes.Clone(data.Bytes())
	damaged[len(damaged)/2] ^= 1
	for name, content := range map[string][]byte{"damaged": damaged, "cut off": data.Bytes()[:data.Len()/2], "empty": nil, "absent": nil} {
		path := filepath.Join(t.TempDir(), name)
		if name != "absent" {
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := Restore(path, Config{Dir: dir}); err == nil {
			t.Errorf("restored from a file that is %s", name)
		}
	}
	if err := Restore(file, Config{Dir: dir}); err != nil {
		t.Fatal("after failures:", err)
	}
	s = open(t, func(c *Config) { c.Dir = dir })
	if got := reads(t, s, key(t, s, "t", "k")); len(got) != 1000 {
		t.Errorf("%d bytes are there", len(got))
	}
	mustPut(t, s, key(t, s, "t", "l"), 10)
	if left, err := filepath.Glob(filepath.Join(dir, restoring)); err != nil || len(left) != 0 {
		t.Error(left, err)
	}
}

// Whichever host is left, running without the others or stopped, voting or not, has what was written.
func TestSalvage(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	h.join(a, "b", nil)
	learner := h.config("c")
	h.add(a, "c", &learner)
	c := h.open("c", learner)
	mustPut(t, a, key(t, a, "t", "k"), 1000)
	lag := a.Lag()
	for c.Lag().Applied < lag.Applied || h.stores["b"].Lag().Applied < lag.Applied {
		time.Sleep(10 * time.Millisecond)
	}
	dirs := map[string]string{}
	for _, name := range []string{"a", "b", "c"} {
		dirs[name] = h.configs[name].Dir
		if err := Salvage(t.Context(), dirs[name], io.Discard, nil); err == nil || !strings.Contains(err.Error(), "process") {
			t.Errorf("salvaged from %s, which runs: %v", name, err)
		}
	}
	h.shut("c")
	h.shut("b")
	files := t.TempDir()
	socket, err := os.Create(filepath.Join(files, "running"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	// a has no quorum any more.
	if err := SnapshotOf(t.Context(), filepath.Dir(strings.TrimPrefix(a.Endpoint(), "unix://")), socket); err != nil {
		t.Fatal(err)
	}
	h.shut("a")
	for name, dir := range dirs {
		file, err := os.Create(filepath.Join(files, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := Salvage(t.Context(), dir, file, testLog(t)); err != nil {
			t.Fatal(err)
		}
		file.Close()
		if left, err := filepath.Glob(filepath.Join(dir, salvaging)); err != nil || len(left) > 0 {
			t.Error(left, err)
		}
	}
	for _, name := range []string{"a", "b", "c", "running"} {
		cfg := Config{Dir: t.TempDir(), UnsafeNoFsync: true}
		if err := Restore(filepath.Join(files, name), cfg); err != nil {
			t.Fatal(err)
		}
		s := h.open("restored from "+name, cfg)
		if got := reads(t, s, key(t, s, "t", "k")); len(got) != 1000 {
			t.Errorf("from %s %d bytes are restored", name, len(got))
		}
		if got := summary(t, s); got != DefaultName+" voter" {
			t.Errorf("from %s the members are %q", name, got)
		}
		mustPut(t, s, key(t, s, "t", "l"), 10)
	}
	if err := Salvage(t.Context(), t.TempDir(), io.Discard, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Error("salvaged from nothing:", err)
	}
}

func TestSnapshotIsWhole(t *testing.T) {
	data := bytes.Repeat([]byte("database"), 1000)
	sum := sha256.Sum256(data)
	whole := append(bytes.Clone(data), sum[:]...)
	for _, step := range []int{1, 7, 32, 33, 1000, len(whole)} {
		for cut := range 3 {
			got := &trailing{hash: sha256.New()}
			for part := range slices.Chunk(whole[:len(whole)-cut], step) {
				if n, err := got.Write(part); n != len(part) || err != nil {
					t.Fatal(n, err)
				}
			}
			if got.whole() != (cut == 0) {
				t.Errorf("in parts of %d without the last %d bytes it is whole: %t", step, cut, got.whole())
			}
		}
	}
}

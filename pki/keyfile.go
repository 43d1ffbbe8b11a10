// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// LoadOrCreateKey returns the sealing key in the file at path, which holds
// exactly [KeySize] bytes. If there is no such file it makes one, readable by
// its owner only and on disk before it returns; of several processes that race,
// one wins and all return its key. The directory must exist.
//
// It refuses a file of another size, and one that others may read, except in
// systemd's credential directory: systemd lets the service in by an ACL, whose
// mask shows as the group's permission.
func LoadOrCreateKey(path string) ([]byte, error) {
	key, err := loadKey(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := createKey(path); err != nil {
			return nil, fmt.Errorf("create sealing key %s: %w", path, err)
		}
		key, err = loadKey(path)
	}
	if err != nil {
		return nil, fmt.Errorf("load sealing key %s: %w", path, err)
	}
	return key, nil
}

func loadKey(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file; point it at a file")
	}
	forbidden := fs.FileMode(0o077)
	if dir := os.Getenv("CREDENTIALS_DIRECTORY"); dir != "" && filepath.Dir(path) == filepath.Clean(dir) {
		forbidden = 0o007
	}
	if mode := info.Mode().Perm(); mode&forbidden != 0 {
		return nil, fmt.Errorf("mode %#o lets other users at it; run: chmod 0600 %s", mode, path)
	}
	// One byte more than a key tells a longer file without reading all of it.
	key, err := io.ReadAll(io.LimitReader(f, KeySize+1))
	if err != nil {
		return nil, err
	}
	if len(key) != KeySize {
		return nil, fmt.Errorf("size is %d bytes, need exactly %d; restore the file from a backup (removing it makes a new key, "+
			"which opens nothing that was sealed before)", info.Size(), KeySize)
	}
	return key, nil
}

// createKey links a complete, synced file to path, so that no reader ever sees
// part of a key. Losing the race to another creator is success.
func createKey(path string) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	key := make([]byte, KeySize)
	rand.Read(key) // never fails: crypto/rand ends the process instead
	if _, err := f.Write(key); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Sync(); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

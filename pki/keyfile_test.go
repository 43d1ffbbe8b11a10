// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestLoadOrCreateKeyRaceAgrees(t *testing.T) {
	path := filepath.Join(t.TempDir(), "seal.key")
	keys := make([][]byte, 8)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			var err error
			if keys[i], err = LoadOrCreateKey(path); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, key := range keys {
		if len(key) != KeySize || !bytes.Equal(key, keys[0]) {
			t.Fatalf("keys differ: %x and %x", key, keys[0])
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode is %v, want 0600", info.Mode())
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("left behind: %v", entries)
	}
}

func TestLoadOrCreateKeyRefuses(t *testing.T) {
	for _, tt := range []struct {
		what        string
		size        int
		mode        os.FileMode
		credentials bool
		remedy      string // part of the error; empty: accepted
	}{
		{"good", KeySize, 0o600, false, ""},
		{"read-only", KeySize, 0o400, false, ""},
		{"short", KeySize - 1, 0o600, false, "need exactly 32; restore the file"},
		{"long", KeySize + 1, 0o600, false, "need exactly 32; restore the file"},
		{"empty", 0, 0o600, false, "need exactly 32; restore the file"},
		{"group may read", KeySize, 0o640, false, "chmod 0600"},
		{"all may read", KeySize, 0o604, false, "chmod 0600"},
		{"credential, mask of an ACL", KeySize, 0o440, true, ""},
		{"credential, all may read", KeySize, 0o444, true, "chmod 0600"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "seal.key")
			if err := os.WriteFile(path, make([]byte, tt.size), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, tt.mode); err != nil {
				t.Fatal(err)
			}
			if tt.credentials {
				t.Setenv("CREDENTIALS_DIRECTORY", filepath.Dir(path))
			}
			_, err := LoadOrCreateKey(path)
			switch {
			case tt.remedy == "" && err != nil:
				t.Fatal(err)
			case tt.remedy != "" && (err == nil || !strings.Contains(err.Error(), tt.remedy) || !strings.Contains(err.Error(), path)):
				t.Fatalf("got error %v; want one that names the file and says %q", err, tt.remedy)
			}
		})
	}
	if _, err := LoadOrCreateKey(filepath.Join(t.TempDir(), "no", "seal.key")); err == nil {
		t.Error("creates a key in a directory that is not there")
	}
	if _, err := LoadOrCreateKey(t.TempDir()); err == nil {
		t.Error("takes a directory for a key")
	}
}

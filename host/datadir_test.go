// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestDataDir(t *testing.T) {
	made := func(t *testing.T, domain string) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "data")
		d, err := openDataDir(path, domain, nil)
		if err != nil {
			t.Fatal(err)
		}
		if !d.fresh {
			t.Error("a new directory is not fresh")
		}
		d.close()
		return path
	}
	for name, c := range map[string]struct {
		prepare func(t *testing.T) string
		want    string // in the error; empty: it opens
	}{
		"again": {func(t *testing.T) string { return made(t, "k8s.test") }, ""},
		"a start that was cut short": {func(t *testing.T) string {
			dir := t.TempDir()
			os.WriteFile(filepath.Join(dir, "installation.json.123.tmp"), nil, 0o600)
			return dir
		}, ""},
		"another domain": {func(t *testing.T) string { return made(t, "other.test") }, "start it with --domain other.test"},
		"in use": {func(t *testing.T) string {
			path := filepath.Join(t.TempDir(), "data")
			d, err := openDataDir(path, "k8s.test", nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(d.close)
			return path
		}, fmt.Sprintf("in use by another tenantd (process %d)", os.Getpid())},
		"something else's": {func(t *testing.T) string {
			dir := t.TempDir()
			os.WriteFile(filepath.Join(dir, "precious"), nil, 0o600)
			return dir
		}, "not empty and not tenantd's (it has precious"},
		"of a newer version": {func(t *testing.T) string {
			path := made(t, "k8s.test")
			os.WriteFile(filepath.Join(path, "installation.json"), []byte(`{"id":"x","format":99,"domain":"k8s.test"}`), 0o600)
			return path
		}, "written by a newer tenantd (format 99"},
		"damaged": {func(t *testing.T) string {
			path := made(t, "k8s.test")
			os.WriteFile(filepath.Join(path, "installation.json"), []byte(`{"id`), 0o600)
			return path
		}, "restore it from a backup"},
		"a file": {func(t *testing.T) string {
			path := filepath.Join(t.TempDir(), "file")
			os.WriteFile(path, nil, 0o600)
			return path
		}, "choose another --data-dir"},
	} {
		t.Run(name, func(t *testing.T) {
			path := c.prepare(t)
			before := listing(t, path)
			d, err := openDataDir(path, "k8s.test", nil)
			if c.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				d.close()
				return
			}
			if err == nil {
				d.close()
				t.Fatal("it was opened")
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %q does not say %q", err, c.want)
			}
			// The lock file may be new; all else is as it was.
			if after := listing(t, path); after != before {
				t.Errorf("the directory was\n%sand is\n%s", before, after)
			}
		})
	}
}

// listing is what a directory holds, but for the lock.
func listing(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ""
	}
	var b strings.Builder
	for _, e := range entries {
		content, _ := os.ReadFile(filepath.Join(dir, e.Name()))
		if e.Name() != "lock" {
			fmt.Fprintf(&b, "%s: %s\n", e.Name(), content)
		}
	}
	return b.String()
}

func TestExplain(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EROFS, syscall.EACCES} {
		err := explain(fmt.Errorf("write: %w", errno))
		if !errors.Is(err, errno) || len(err.Error()) <= len("write: "+errno.Error()) {
			t.Errorf("%v has no remedy: %v", errno, err)
		}
	}
	if err := explain(errors.New("else")); err.Error() != "else" {
		t.Error(err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// Old files go, those of removed tenants too; what is being written stays, and a later
// tenant of the same name begins anew.
func TestAuditFilesEnd(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	if err := pruneAudit(dir, time.Now()); err != nil {
		t.Errorf("before there is any: %v", err)
	}
	if err := retireAudit(dir, "acme", "uid"); err != nil {
		t.Errorf("before there is any: %v", err)
	}
	now := time.Now()
	old, young := now.AddDate(0, 0, -31), now.AddDate(0, 0, -29)
	write := func(name string, age time.Time) {
		t.Helper()
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, age, age); err != nil {
			t.Fatal(err)
		}
	}
	write("acme/audit.log", old) // an idle tenant's, which is open
	write("acme/audit.log.1", young)
	write("acme/audit.log.2", old)
	write("acme/notes", old) // somebody else's
	write("gone.1/audit.log", old)
	write("gone.1/audit.log.1", old)
	write("gone.2/audit.log", young)
	write("globex/audit.log", old)
	write("globex/audit.log.1", young)
	if err := retireAudit(dir, "globex", "3"); err != nil {
		t.Fatal(err)
	}
	if err := retireAudit(dir, "globex", "3"); err != nil {
		t.Errorf("once more: %v", err)
	}
	if err := pruneAudit(dir, now.AddDate(0, 0, -30)); err != nil {
		t.Fatal(err)
	}
	var left []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if rel, _ := filepath.Rel(dir, path); rel != "." {
			left = append(left, rel)
		}
		return err
	})
	want := []string{
		"acme", "acme/audit.log", "acme/audit.log.1", "acme/notes",
		"globex.3", "globex.3/audit.log", "globex.3/audit.log.1", // its age counts from the removal
		"gone.2", "gone.2/audit.log",
	}
	if err != nil || !slices.Equal(left, want) {
		t.Errorf("left are %q, %v; want %q", left, err, want)
	}
}

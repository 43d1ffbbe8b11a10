// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tenantd/tenantd/tenant"
)

// auditInterval is how often audit logs are looked through for old files.
const auditInterval = 6 * time.Hour

// auditFile is the name of a control plane's audit log in its directory.
const auditFile = "audit.log"

func (h *Host) auditDir() string { return h.dir.file("audit") }

// audit is where the audit log of the tenant is.
func (h *Host) audit(tenantName string) tenant.AuditConfig {
	if h.cfg.Audit.Disabled {
		return tenant.AuditConfig{}
	}
	return tenant.AuditConfig{
		File:       filepath.Join(h.auditDir(), tenantName, auditFile),
		MaxSize:    h.cfg.Audit.MaxSize.Value(),
		MaxBackups: h.cfg.Audit.MaxBackups,
	}
}

// retireAudit puts the log of a removed tenant aside, so that it does not run into
// that of a later tenant of the same name. No tenant's name has a dot.
func retireAudit(dir, name, uid string) error {
	from, to := filepath.Join(dir, name), filepath.Join(dir, name+"."+uid)
	err := os.Rename(from, to)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // there is none, or this was done before
	}
	if err != nil {
		return err
	}
	// Its age counts from the removal.
	now := time.Now()
	if err := os.Chtimes(filepath.Join(to, auditFile), now, now); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// keepAuditShort removes old files of audit logs until ctx is done.
func (h *Host) keepAuditShort(ctx context.Context) {
	tick := time.NewTicker(auditInterval)
	defer tick.Stop()
	for {
		oldest := time.Now().AddDate(0, 0, -h.cfg.Audit.MaxAge)
		if err := pruneAudit(h.auditDir(), oldest); err != nil {
			h.log.Warn("old audit logs are not removed", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// pruneAudit removes the files that were last written before oldest, but for those
// that are being written: the current ones of the tenants that there are.
func pruneAudit(dir string, oldest time.Time) error {
	tenants, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var errs []error
	for _, t := range tenants {
		retired := strings.Contains(t.Name(), ".")
		files, readErr := os.ReadDir(filepath.Join(dir, t.Name()))
		errs = append(errs, readErr)
		left := len(files)
		for _, f := range files {
			info, err := f.Info()
			if err != nil || !strings.HasPrefix(f.Name(), auditFile) || f.Name() == auditFile && !retired || !info.ModTime().Before(oldest) {
				continue
			}
			if err := os.Remove(filepath.Join(dir, t.Name(), f.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
				continue
			}
			left--
		}
		if retired && readErr == nil && left == 0 {
			errs = append(errs, os.Remove(filepath.Join(dir, t.Name())))
		}
	}
	return errors.Join(append(errs, err)...)
}

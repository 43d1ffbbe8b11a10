// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/storage"
)

const (
	// socketDir is where the store's socket is, in a data directory.
	socketDir = "run"
	// restoringDir is a store that is being restored, in a data directory.
	restoringDir = "restoring"
	// snapshotProgress is how often it is said how far a snapshot is.
	snapshotProgress = 2 * time.Second
)

// ofHosts are the keys about hosts. Those of a restored installation are others.
func ofHosts(systemPrefix string) []string {
	return []string{
		hostsPrefix, leadsPrefix, takenPrefix, peersPKI, storage.HostPrefix,
		systemPrefix + "registry/" + v1alpha1.GroupVersion.Group + "/hosts/",
	}
}

// Snapshot is a file with the data of all tenants.
type Snapshot struct {
	File   string
	Bytes  int64
	SHA256 string // of the file, in hex
	// Stopped says that the host did not run, so that its files were read.
	Stopped bool
}

// SaveSnapshot writes what a host's store has to a file, in one step and for its owner alone: by way of the host if it
// runs, with or without a quorum, and otherwise from its data directory. The sealing key is not in it. Progress is
// logged.
func SaveSnapshot(ctx context.Context, dataDir, file string, log *slog.Logger) (_ *Snapshot, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("save a snapshot of the host in %s: %w", dataDir, explain(err))
		}
	}()
	if dataDir, err = filepath.Abs(dataDir); err != nil {
		return nil, err
	}
	out, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".*.tmp") // 0600
	if err != nil {
		return nil, err
	}
	defer os.Remove(out.Name()) // fails after the rename, as it should
	defer out.Close()
	s := &Snapshot{File: file}
	w := &meter{w: out, log: log, said: time.Now()}
	err = storage.SnapshotOf(ctx, filepath.Join(dataDir, socketDir), w)
	if errors.Is(err, fs.ErrNotExist) {
		s.Stopped = true
		log.Info("the host does not run: reading its files", "dataDir", dataDir)
		err = storage.Salvage(ctx, filepath.Join(dataDir, storeDir), w, nil)
	}
	if err != nil {
		return nil, err
	}
	// What is said to be saved is what can be read back.
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	sum := sha256.New()
	if s.Bytes, err = io.Copy(sum, out); err != nil {
		return nil, err
	}
	s.SHA256 = hex.EncodeToString(sum.Sum(nil))
	if err := errors.Join(out.Sync(), out.Close()); err != nil {
		return nil, err
	}
	if err := os.Rename(out.Name(), file); err != nil {
		return nil, err
	}
	return s, syncDir(filepath.Dir(file))
}

// meter says how much has been written.
type meter struct {
	w     io.Writer
	log   *slog.Logger
	said  time.Time
	bytes int64
}

func (m *meter) Write(p []byte) (int, error) {
	n, err := m.w.Write(p)
	m.bytes += int64(n)
	if time.Since(m.said) > snapshotProgress {
		m.said = time.Now()
		m.log.Info("saving", "bytes", m.bytes)
	}
	return n, err
}

// Restored is an installation that was made of a snapshot.
type Restored struct {
	Host, DataDir, SealingKeyFile string
	Installation, Domain          string
	Tenants                       int
}

// RestoreSnapshot makes cfg.DataDir, which must not hold anything but the sealing key, the data directory of the only
// host of an installation with the data of a snapshot. That is the installation that the snapshot is of, so the hosts
// that it had then must be gone for good: they are no part of it any more, and join it like any other.
//
// It fails, and leaves the directory as it was, where the sealing key is not the one of the installation.
func RestoreSnapshot(ctx context.Context, cfg v1alpha1.HostConfiguration, file string, log *slog.Logger) (_ *Restored, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("check the configuration: %w", err)
	}
	domain := cfg.Domain
	cfg.SetDefaults()
	defer func() {
		if err != nil {
			err = fmt.Errorf("restore %s into %s: %w", file, cfg.DataDir, explain(err))
		}
	}()
	name, err := hostName(cfg.Name)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(file); err != nil {
		return nil, err
	}
	d, err := lockDataDir(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	defer d.close()
	if err := refuseForeign(d.path, "lock", "lost+found", sealingKeyFile, restoringDir); err != nil {
		return nil, err
	}
	r := &Restored{Host: name, DataDir: d.path, SealingKeyFile: cmp.Or(cfg.SealingKeyFile, d.file(sealingKeyFile))}
	if _, err := os.Stat(r.SealingKeyFile); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no sealing key %s, without which a snapshot cannot be used: put the installation's there, or name it with --sealing-key-file", r.SealingKeyFile)
	}
	key, err := pki.LoadOrCreateKey(r.SealingKeyFile)
	if err != nil {
		return nil, err
	}
	sealer, err := pki.NewSealer(key)
	if err != nil {
		return nil, err
	}
	work := d.file(restoringDir)
	if err := os.RemoveAll(work); err != nil {
		return nil, err
	}
	defer os.RemoveAll(work) // nothing, after the rename
	store := storage.Config{
		Dir: work, Name: name,
		BackendQuota: cfg.Limits.BackendQuota.Value(), TenantQuota: cfg.Limits.TenantStorage.Value(),
	}
	log.Info("restoring", "file", file, "dataDir", d.path, "host", name)
	if err := storage.Restore(file, store); err != nil {
		return nil, err
	}
	if err := r.settle(ctx, store, sealer, domain); err != nil {
		return nil, err
	}
	raw, err := json.MarshalIndent(installation{ID: r.Installation, Format: dataFormat, Domain: r.Domain}, "", "  ")
	if err != nil {
		return nil, err
	}
	if err := os.Rename(work, d.file(storeDir)); err != nil {
		return nil, err
	}
	if err := writeFile(d.file(installationFile), append(raw, '\n'), 0o600); err != nil {
		return nil, err
	}
	return r, d.giveToOwner()
}

// settle reads whose data it is, sees that the key opens it, and removes what it says of hosts.
func (r *Restored) settle(ctx context.Context, cfg storage.Config, sealer *pki.Sealer, domain string) (err error) {
	store, err := storage.Open(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	client := store.Client()
	for key, into := range map[string]*string{installationKey: &r.Installation, domainKey: &r.Domain} {
		resp, err := client.Get(ctx, key)
		if err != nil {
			return fmt.Errorf("read whose data it is: %w", err)
		}
		if len(resp.Kvs) == 1 {
			*into = string(resp.Kvs[0].Value)
		}
	}
	switch {
	case r.Installation == "":
		return errors.New("it is no snapshot of a tenantd")
	case r.Domain == "" && domain == "":
		return errors.New("it does not say which domain it is of: name that with --domain")
	case r.Domain != "" && domain != "" && domain != r.Domain:
		return fmt.Errorf("it is of the domain %q, not %q: leave --domain out", r.Domain, domain)
	}
	r.Domain = cmp.Or(r.Domain, domain)
	prefix, err := store.Prefix(systemUID)
	if err != nil {
		return err
	}
	// What another key has sealed could not be sealed anew.
	if _, err := pki.NewStorage(client, prefix+"pki/", sealer).Reseal(ctx); err != nil {
		return fmt.Errorf("the sealing key %s is not the one of this snapshot: %w", r.SealingKeyFile, err)
	}
	for _, of := range ofHosts(prefix) {
		if _, err := client.Delete(ctx, of, clientv3.WithPrefix()); err != nil {
			return fmt.Errorf("forget the hosts that there were: %w", err)
		}
	}
	tenants, err := client.Get(ctx, prefix+"registry/"+v1alpha1.GroupVersion.Group+"/tenants/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return fmt.Errorf("count the tenants: %w", err)
	}
	r.Tenants = int(tenants.Count)
	return nil
}

// giveToOwner gives all in the directory to whom the directory belongs: root may restore what a service is to use.
func (d *dataDir) giveToOwner() error {
	info, err := os.Stat(d.path)
	if err != nil {
		return err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok || os.Geteuid() != 0 {
		return nil
	}
	return filepath.WalkDir(d.path, func(path string, _ fs.DirEntry, err error) error {
		return cmp.Or(err, os.Lchown(path, int(owner.Uid), int(owner.Gid)))
	})
}

// hostName is the configured name, or the machine's.
func hostName(configured string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("find out this machine's name: %w; set one with --name", err)
	}
	return strings.ToLower(name), nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/google/uuid"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"
)

// dataFormat is the version of the data directory's layout. A daemon refuses a
// directory with a higher one.
const dataFormat = 1

const (
	// installationKey is where the store says which installation it belongs to.
	installationKey = "/tenantd/installation"
	// domainKey is where it says which domain that serves.
	domainKey = "/tenantd/domain"
)

// installation identifies what a data directory belongs to. It is kept in the
// directory and in the store: a directory put together from two is refused.
type installation struct {
	ID     string `json:"id"`
	Format int    `json:"format"`
	// Domain cannot change: it is in the certificates' names and in every
	// kubeconfig that was handed out.
	Domain string `json:"domain"`
}

const (
	// storeDir is the store's place in a data directory.
	storeDir = "etcd"
	// installationFile makes a directory a data directory: it is written last.
	installationFile = "installation.json"
)

// dataDir is a data directory that this process has to itself.
type dataDir struct {
	path string
	lock *os.File
	id   installation
	// fresh is whether this process made the installation.
	fresh bool
}

// openDataDir makes or opens the directory, locks it and checks that this daemon
// may use it. A directory of no installation becomes a new one, or with adopt part
// of the one that this returns.
func openDataDir(path, domain string, adopt func(*dataDir) (installation, error)) (_ *dataDir, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("open data directory %s: %w", path, explain(err))
		}
	}()
	d, err := lockDataDir(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	file := d.file(installationFile)
	raw, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		mayHave := []string{"lock", "lost+found"}
		if adopt != nil {
			mayHave = append(mayHave, ofJoin...)
		}
		if err := refuseForeign(d.path, mayHave...); err != nil {
			return nil, err
		}
		d.fresh = true
		d.id = installation{ID: uuid.NewString(), Format: dataFormat, Domain: domain}
		if adopt != nil {
			if d.id, err = adopt(d); err != nil {
				return nil, err
			}
		}
		raw, err := json.MarshalIndent(d.id, "", "  ")
		if err != nil {
			return nil, err
		}
		return d, writeFile(file, append(raw, '\n'), 0o600)
	case err != nil:
		return nil, err
	}
	if err := json.Unmarshal(raw, &d.id); err != nil {
		return nil, fmt.Errorf("%s is damaged (%w); restore it from a backup", file, err)
	}
	switch {
	case d.id.Format > dataFormat:
		return nil, fmt.Errorf("written by a newer tenantd (format %d, this one knows %d); start it with that version", d.id.Format, dataFormat)
	case domain != "" && d.id.Domain != domain:
		return nil, fmt.Errorf("this installation serves the domain %q, not %q; start it with --domain %s", d.id.Domain, domain, d.id.Domain)
	}
	return d, nil
}

// lockDataDir makes the directory if it is not there, and has it for this process alone.
func lockDataDir(path string) (_ *dataDir, err error) {
	if path, err = filepath.Abs(path); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(path, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	d := &dataDir{path: path, lock: lock}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			holder, _ := os.ReadFile(lock.Name())
			return nil, fmt.Errorf("in use by another tenantd (process %s); stop that one, or give this one a --data-dir of its own", strings.TrimSpace(string(holder)))
		}
		return nil, err
	}
	if err := lock.Truncate(0); err != nil {
		return nil, err
	}
	if _, err := lock.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0); err != nil {
		return nil, err
	}
	return d, nil
}

// refuseForeign refuses a directory that is no data directory and holds more than mayHave, or what is left of files
// that were being written.
func refuseForeign(path string, mayHave ...string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := e.Name()
		switch {
		case slices.Contains(mayHave, name), strings.HasSuffix(name, ".tmp"):
		case name == installationFile:
			return errors.New("there is an installation in it already: choose an empty directory with --data-dir, or move it away")
		case name == restoringDir:
			return errors.New("a snapshot was being restored here and is not whole: run `tenantd snapshot restore` again")
		case slices.Contains(ofJoin, name) && name != sealingKeyFile:
			return fmt.Errorf("a join was begun and not finished here (it has %s): start it with --join as before, or choose an empty directory with --data-dir", name)
		case name == sealingKeyFile:
			return fmt.Errorf("it has %s and no installation: finish what was begun, a join or a restore, or choose an empty directory with --data-dir", name)
		default:
			return fmt.Errorf("not empty and not tenantd's (it has %s and no %s); choose an empty directory with --data-dir", name, installationFile)
		}
	}
	return nil
}

// checkKey refuses to make a new sealing key beside a store, which an earlier one
// sealed: nothing in it could be read, and the wrong key would be in its place.
func (d *dataDir) checkKey(file string) error {
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		return nil // whatever else is wrong shows when it is read
	}
	if _, err := os.Stat(d.file(storeDir)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("the sealing key %s is gone, and what %s holds was sealed with it; put it back from a backup", file, d.file(storeDir))
}

// claim ties the directory to the store inside it.
func (d *dataDir) claim(ctx context.Context, client *clientv3.Client) error {
	resp, err := client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(installationKey), "=", 0)).
		Then(clientv3.OpPut(installationKey, d.id.ID)).
		Else(clientv3.OpGet(installationKey)).
		Commit()
	if err != nil {
		return fmt.Errorf("check which installation the store belongs to: %w", err)
	}
	if !resp.Succeeded {
		if have := string(resp.Responses[0].GetResponseRange().Kvs[0].Value); have != d.id.ID {
			return fmt.Errorf("data directory %s is of installation %s but the store in it of %s; restore both from one backup", d.path, d.id.ID, have)
		}
	}
	// For who has no more than a snapshot of the store.
	_, err = client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(domainKey), "=", 0)).Then(clientv3.OpPut(domainKey, d.id.Domain)).Commit()
	if err != nil {
		return fmt.Errorf("note which domain the store belongs to: %w", err)
	}
	return nil
}

// holds reports whether a path is below the directory.
func (d *dataDir) holds(path string) bool {
	abs, err := filepath.Abs(path)
	return err == nil && strings.HasPrefix(abs, d.path+string(filepath.Separator))
}

// file is the path of a file or directory of that name.
func (d *dataDir) file(name string) string { return filepath.Join(d.path, name) }

// close gives the directory up. The lock file stays: removing it would let two
// processes hold locks on two files of one name.
func (d *dataDir) close() { d.lock.Close() }

// writeFile replaces a file in one step, so that readers and crashes see the old
// content or the new.
func writeFile(path string, content []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails after the rename, as it should
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// syncDir has what was renamed in a directory survive a power cut.
func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// explain adds the remedy to errors of the file system.
func explain(err error) error {
	for cause, remedy := range map[error]string{
		syscall.ENOSPC:  "free space on that disk",
		syscall.EDQUOT:  "free space or raise the disk quota",
		syscall.EROFS:   "mount it writable, or choose another --data-dir",
		syscall.EACCES:  "run as the user who owns it, or choose another --data-dir",
		syscall.EPERM:   "run as the user who owns it, or choose another --data-dir",
		syscall.ENOTDIR: "choose another --data-dir",
	} {
		if errors.Is(err, cause) {
			return fmt.Errorf("%w: %s", err, remedy)
		}
	}
	return err
}

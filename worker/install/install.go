// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/tenantd/tenantd/systemd"
	"github.com/tenantd/tenantd/worker/bundle"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/hosts"
	"github.com/tenantd/tenantd/worker/kubelet"
	"github.com/tenantd/tenantd/worker/vip"
)

// DefaultPrefix is for software that is not the distribution's.
const DefaultPrefix = "/usr/local"

const (
	configDir = "etc/tenant-proxy"
	unitPath  = "etc/systemd/system/" + unit
	unit      = bundle.Unit
)

// Options say where to.
type Options struct {
	// From is the directory of an unpacked bundle. For Install only; required.
	From string
	// Root is the file system. Empty means /; in any other, nothing is started.
	Root string
	// Prefix is where the program goes, below Root. Empty means DefaultPrefix.
	Prefix string
	// Systemctl runs systemctl. Nil means to run the program, if systemd runs.
	Systemctl func(ctx context.Context, args ...string) error
}

func (o *Options) setDefaults() {
	o.Prefix = cmp.Or(o.Prefix, DefaultPrefix)
	if o.Systemctl == nil && (o.Root == "" || o.Root == "/") {
		// As sd_booted(3) does it.
		if info, err := os.Lstat("/run/systemd/system"); err == nil && info.IsDir() {
			o.Systemctl = systemctl
		}
	}
	o.Root = cmp.Or(o.Root, "/")
}

func (o *Options) path(parts ...string) string {
	return filepath.Join(append([]string{o.Root}, parts...)...)
}

func (o *Options) bindir() string { return filepath.Join(o.Prefix, "bin") }

func systemctl(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// Install puts a bundle in place and starts it, or hands over to it if it runs
// already. Doing it again with the same bundle changes nothing. A configuration
// that was there and differs is kept beside as config.yaml.old. next says what is
// left to do; it is empty if nothing is.
func Install(ctx context.Context, o Options) (next string, err error) {
	o.setDefaults()
	// All of it is read and judged before anything changes.
	files := map[string][]byte{}
	for _, name := range []string{bundle.Binary, bundle.Config, bundle.Authority, bundle.Unit} {
		data, err := os.ReadFile(filepath.Join(o.From, name))
		if err != nil {
			return "", fmt.Errorf("read the bundle: %w; unpack the whole archive and run its install.sh", err)
		}
		files[name] = data
	}
	if _, err := config.Parse(filepath.Join(o.From, bundle.Config), files[bundle.Config]); err != nil {
		return "", err
	}
	settings := o.path(configDir, bundle.Config)
	if old, err := os.ReadFile(settings); err == nil && !bytes.Equal(old, files[bundle.Config]) {
		if err := write(settings+".old", old, 0o644); err != nil {
			return "", fmt.Errorf("keep the old configuration: %w", err)
		}
	}
	for _, file := range []struct {
		path string
		data []byte
		mode fs.FileMode
	}{
		{o.path(o.bindir(), bundle.Binary), files[bundle.Binary], 0o755},
		{settings, files[bundle.Config], 0o644},
		{o.path(configDir, bundle.Authority), files[bundle.Authority], 0o644},
		{o.path(unitPath), bytes.ReplaceAll(files[bundle.Unit], []byte(systemd.Bindir), []byte(o.bindir())), 0o644},
	} {
		if err := write(file.path, file.data, file.mode); err != nil {
			return "", fmt.Errorf("install %s: %w", file.path, err)
		}
	}
	if o.Systemctl == nil {
		return fmt.Sprintf("systemd does not run here: start this before the kubelet, and keep it running:\n  %s run --config /%s/%s", filepath.Join(o.bindir(), bundle.Binary), configDir, bundle.Config), nil
	}
	for _, args := range [][]string{{"daemon-reload"}, {"enable", unit}, {"reload-or-restart", unit}} {
		if err := o.Systemctl(ctx, args...); err != nil {
			return "", fmt.Errorf("start tenant-proxy: %w; see: journalctl -u tenant-proxy", err)
		}
	}
	return "", nil
}

// Uninstall takes everything away that Install and tenant-proxy made, the address
// too. What is not there is no error.
func Uninstall(ctx context.Context, o Options) error {
	o.setDefaults()
	file, err := config.Load(o.path(configDir, bundle.Config))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		file = &config.Config{}
		file.SetDefaults()
	case err != nil:
		return fmt.Errorf("find out what to remove: %w; mend the file, or remove it and what docs/workers.md lists by hand", err)
	}
	if kubelet.Adopted(o.path(file.KubeletKubeconfig)) {
		return errors.New("the kubelet reaches its API server through tenant-proxy: run tenant-proxy adopt-kubelet --revert first, and restart the kubelet")
	}
	if o.Systemctl != nil {
		if _, err := os.Stat(o.path(unitPath)); err == nil {
			if err := o.Systemctl(ctx, "disable", "--now", unit); err != nil {
				return fmt.Errorf("stop tenant-proxy: %w", err)
			}
		}
	}
	if o.Root == "/" {
		if err := vip.Release(file.Endpoint().Addr()); err != nil {
			return fmt.Errorf("remove the address: %w", err)
		}
	}
	for _, path := range []string{o.path(unitPath), o.path(configDir), o.path(file.CacheDir, hosts.CacheFile), o.path(o.bindir(), bundle.Binary)} {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove %s: %w", path, err)
		}
	}
	// The directory is the operator's choice, and may hold what is not ours.
	if err := os.Remove(o.path(file.CacheDir)); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTEMPTY) {
		return fmt.Errorf("remove %s: %w", file.CacheDir, err)
	}
	if o.Systemctl != nil {
		if err := o.Systemctl(ctx, "daemon-reload"); err != nil {
			return fmt.Errorf("forget the unit: %w", err)
		}
	}
	return nil
}

// write writes a file whole or not at all: the program may be running, and a
// running program's file cannot be written.
func write(path string, data []byte, mode fs.FileMode) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return os.Chmod(path, mode)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := file.Write(data); err != nil {
		return err
	}
	if err := file.Chmod(mode); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

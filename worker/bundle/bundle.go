// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"archive/tar"
	"compress/gzip"
	"debug/elf"
	_ "embed"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/tenantd/tenantd/systemd"
	"github.com/tenantd/tenantd/worker/config"
)

// Directory is what everything in the archive is below.
const Directory = "tenant-proxy"

// The files of a bundle, which package install looks for.
const (
	Binary    = "tenant-proxy"
	Config    = "config.yaml"
	Authority = "ca.crt"
	Unit      = "tenant-proxy.service"
	Script    = "install.sh"
)

//go:embed install.sh
var script string

// Bundle is what an archive is made of.
type Bundle struct {
	// Config is the worker's configuration. Defaults are set, and the CA is CA's.
	Config config.Config
	// CA is the tenant's, as PEM.
	CA []byte
	// Binary is the path of a tenant-proxy for the workers' kind of machine.
	Binary string
}

// Write writes a bundle as a gzipped tar archive. The same bundle is the same
// bytes, whenever and wherever it is made.
func Write(w io.Writer, b Bundle) error {
	cfg := b.Config
	cfg.CA, cfg.CAFile = "", ""
	cfg.SetDefaults()
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("configure the worker: %w", err)
	}
	if block, _ := pem.Decode(b.CA); block == nil || block.Type != "CERTIFICATE" {
		return errors.New("the tenant's CA is no PEM certificate")
	}
	settings, err := cfg.Marshal()
	if err != nil {
		return err
	}
	machine, err := machineOf(b.Binary)
	if err != nil {
		return err
	}
	binary, err := os.Open(b.Binary)
	if err != nil {
		return fmt.Errorf("read tenant-proxy: %w", err)
	}
	defer binary.Close()
	info, err := binary.Stat()
	if err != nil {
		return fmt.Errorf("read tenant-proxy: %w", err)
	}

	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	add := func(name string, mode, size int64, content io.Reader) error {
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: Directory + "/" + name, Mode: mode, Size: size,
			ModTime: time.Unix(0, 0), Format: tar.FormatUSTAR,
		}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		_, err := io.Copy(archive, content)
		return err
	}
	text := func(name string, mode int64, content string) error {
		return add(name, mode, int64(len(content)), strings.NewReader(content))
	}
	for _, write := range []func() error{
		func() error { return text(Script, 0o755, strings.ReplaceAll(script, "@machine@", machine)) },
		func() error { return text(Config, 0o644, string(settings)) },
		func() error { return text(Authority, 0o644, string(b.CA)) },
		func() error { return text(Unit, 0o644, systemd.TenantProxy()) },
		func() error { return add(Binary, 0o755, info.Size(), binary) },
		archive.Close,
		compressed.Close,
	} {
		if err := write(); err != nil {
			return fmt.Errorf("write the bundle: %w", err)
		}
	}
	return nil
}

// machineOf is what uname -m says where a program runs.
func machineOf(path string) (string, error) {
	program, err := elf.Open(path)
	if err != nil {
		return "", fmt.Errorf("read tenant-proxy: %w; name a Linux build of it", err)
	}
	defer program.Close()
	switch program.Machine {
	case elf.EM_X86_64:
		return "x86_64", nil
	case elf.EM_AARCH64:
		return "aarch64", nil
	}
	return "", fmt.Errorf("%s is built for %s: tenant-proxy runs on amd64 and arm64", path, program.Machine)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tenantd/tenantd/worker/bundle"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
)

// good is a bundle with this test as its program.
func good(t *testing.T) bundle.Bundle {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return bundle.Bundle{
		Config: config.Config{Hostname: "acme.k8s.example.com", Hosts: []string{"192.0.2.10:443"}, Carrier: "auto"},
		CA:     fakehost.NewTenant("acme.k8s.example.com").CA,
		Binary: self,
	}
}

func TestWrite(t *testing.T) {
	b := good(t)
	var first, second bytes.Buffer
	if err := errors.Join(bundle.Write(&first, b), bundle.Write(&second, b)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the same bundle is not the same bytes")
	}
	files, modes := map[string][]byte{}, map[string]int64{}
	unpacked, err := gzip.NewReader(&first)
	if err != nil {
		t.Fatal(err)
	}
	for archive := tar.NewReader(unpacked); ; {
		header, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Uid != 0 || header.Gid != 0 || header.ModTime.Unix() != 0 {
			t.Errorf("%s: %+v", header.Name, header)
		}
		name, ok := strings.CutPrefix(header.Name, "tenant-proxy/")
		if !ok {
			t.Errorf("%s is not in the directory", header.Name)
		}
		if files[name], err = io.ReadAll(archive); err != nil {
			t.Fatal(err)
		}
		modes[name] = header.Mode
	}
	for name, mode := range map[string]int64{"install.sh": 0o755, "tenant-proxy": 0o755, "config.yaml": 0o644, "ca.crt": 0o644, "tenant-proxy.service": 0o644} {
		if modes[name] != mode {
			t.Errorf("%s has mode %o, want %o", name, modes[name], mode)
		}
	}
	if len(files) != 5 {
		t.Errorf("%d files", len(files))
	}
	cfg, err := config.Parse("config.yaml", files["config.yaml"])
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Hostname != b.Config.Hostname || !slices.Equal(cfg.Hosts, b.Config.Hosts) || cfg.Carrier != "auto" || cfg.CAFile != config.DefaultCAFile {
		t.Errorf("configuration %+v", cfg)
	}
	if !bytes.Equal(files["ca.crt"], b.CA) {
		t.Error("the CA is another")
	}
	program, err := os.ReadFile(b.Binary)
	if err != nil || !bytes.Equal(files["tenant-proxy"], program) {
		t.Errorf("the program is another: %v", err)
	}
	if !bytes.Contains(files["tenant-proxy.service"], []byte("Before=kubelet.service")) {
		t.Error("the unit does not come before the kubelet's")
	}
}

func TestFaults(t *testing.T) {
	for name, test := range map[string]struct {
		spoil func(b *bundle.Bundle)
		want  string
	}{
		"no hosts":      {func(b *bundle.Bundle) { b.Config.Hosts = nil }, "hosts"},
		"no CA":         {func(b *bundle.Bundle) { b.CA = nil }, "no PEM certificate"},
		"no program":    {func(b *bundle.Bundle) { b.Binary = "/nowhere" }, "/nowhere"},
		"not a program": {func(b *bundle.Bundle) { b.Binary = "bundle.go" }, "Linux build"},
	} {
		b := good(t)
		test.spoil(&b)
		var out bytes.Buffer
		if err := bundle.Write(&out, b); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", name, err, test.want)
		}
		if out.Len() != 0 {
			t.Errorf("%s: wrote %d bytes", name, out.Len())
		}
	}
}

// TestScript runs install.sh on machines of several kinds, which a few stand-ins in
// its PATH pretend to be.
func TestScript(t *testing.T) {
	script, err := os.ReadFile("install.sh")
	if err != nil {
		t.Fatal(err)
	}
	script = bytes.ReplaceAll(script, []byte("@machine@"), []byte("x86_64"))
	for name, test := range map[string]struct {
		system, machine, user, missing string
		want                           string
	}{
		"good":            {"Linux", "x86_64", "0", "", "installed from"},
		"another system":  {"Darwin", "x86_64", "0", "", "runs Linux"},
		"another machine": {"Linux", "aarch64", "0", "", "this machine is aarch64"},
		"not root":        {"Linux", "x86_64", "1000", "", "run it as root"},
		"half unpacked":   {"Linux", "x86_64", "0", "ca.crt", "ca.crt is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "with a space")
			bin := filepath.Join(t.TempDir(), "bin")
			put(t, dir, "install.sh", string(script))
			put(t, dir, "tenant-proxy", "#!/bin/sh\necho \"installed from $3, $4 $5\"\n")
			for _, file := range []string{"config.yaml", "ca.crt", "tenant-proxy.service"} {
				if file != test.missing {
					put(t, dir, file, "")
				}
			}
			put(t, bin, "uname", "#!/bin/sh\n[ \"$1\" = -s ] && echo "+test.system+" || echo "+test.machine+"\n")
			put(t, bin, "id", "#!/bin/sh\necho "+test.user+"\n")
			cmd := exec.Command("sh", filepath.Join(dir, "install.sh"), "--prefix", "/opt")
			cmd.Env = []string{"PATH=" + bin + ":" + os.Getenv("PATH")}
			out, err := cmd.CombinedOutput()
			if (err == nil) != (name == "good") || !strings.Contains(string(out), test.want) {
				t.Errorf("%v: %s; want %q", err, out, test.want)
			}
			if name == "good" && string(out) != "installed from "+dir+", --prefix /opt\n" {
				t.Errorf("arguments: %s", out)
			}
		})
	}
}

func put(t *testing.T, dir, name, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755)); err != nil {
		t.Fatal(err)
	}
}

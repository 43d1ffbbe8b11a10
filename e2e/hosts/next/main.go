// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Command next builds tenantd as its next version might be, for tests with hosts of two
// versions: whatever hosts say to each other, and whatever they keep where others read it,
// has a field more, which this version does not know.
//
//	go run ./e2e/hosts/next -ldflags '…' -o bin/tenantd-next
//
// The source is not touched: the build sees the changes through an overlay. That each of
// them still fits the source is a test of this package.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// edit is a change of a file, by its path in the repository.
type edit struct{ file, old, new string }

// edits make the next version. A field is called later, and is always sent.
var edits = []edit{
	// What a host that joins asks.
	{"api/v1alpha1/hostcredentials.go", "	SealingKeyProof []byte `json:\"sealingKeyProof,omitempty\"`\n", "$0	Later bool `json:\"later\"`\n"},
	// Where it is reached, as etcd has it.
	{"host/hosts.go", "	Member string `json:\"member,omitempty\"`\n", "$0	Later bool `json:\"later\"`\n"},
	// What it says of itself by gossip.
	{"host/gossip/message.go", "	Left bool `json:\"l,omitempty\"`\n", "$0	Later bool `json:\"later\"`\n"},
	{"host/gossip/message.go", "	From    string    `json:\"f\"`\n", "$0	Later bool `json:\"later\"`\n"},
	{"host/gossip/record.go", "	Load     Load `json:\"load\"`\n", "$0	Later bool `json:\"later\"`\n"},
	// The system plane's objects: what a user sets, and what a host notes.
	{"api/v1alpha1/crd/tenantd.io_tenants.yaml", "    tenantd.io/generation: \"1\"\n", "    tenantd.io/generation: \"2\"\n"},
	{"api/v1alpha1/crd/tenantd.io_tenants.yaml", "              addons:\n", "              later: {type: string}\n$0"},
	{"api/v1alpha1/crd/tenantd.io_tenants.yaml", "              asleepSince:\n", "              later: {type: string}\n$0"},
	{"api/v1alpha1/tenant.go", "type TenantSpec struct {\n", "$0	Later string `json:\"later,omitempty\"`\n"},
	{"api/v1alpha1/tenant.go", "type TenantStatus struct {\n", "$0	Later string `json:\"later,omitempty\"`\n"},
	{"host/reconcile.go", "	s.Version = version.Get().GitVersion\n", "$0	s.Later = \"noted by \" + h.name\n"},
}

// apply makes the change, which must fit in exactly one place.
func (e edit) apply(source string) (string, error) {
	if n := strings.Count(source, e.old); n != 1 {
		return "", fmt.Errorf("%s has %d times, not once: %s", e.file, n, e.old)
	}
	return strings.Replace(source, e.old, strings.Replace(e.new, "$0", e.old, 1), 1), nil
}

// changed are the files of the next version below root that differ, by their paths.
func changed(root string) (map[string]string, error) {
	files := map[string]string{}
	for _, e := range edits {
		path := filepath.Join(root, filepath.FromSlash(e.file))
		if files[path] == "" {
			source, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			files[path] = string(source)
		}
		var err error
		if files[path], err = e.apply(files[path]); err != nil {
			return nil, err
		}
	}
	return files, nil
}

func main() {
	ldflags := flag.String("ldflags", "", "`flags` for the linker")
	output := flag.String("o", "", "`file` to build")
	flag.Parse()
	if err := build(*ldflags, *output); err != nil {
		fmt.Fprintln(os.Stderr, "next:", err)
		os.Exit(1)
	}
}

// build is run in the repository.
func build(ldflags, output string) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	files, err := changed(root)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "next")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	replace := map[string]string{}
	for path, content := range files {
		replace[path] = filepath.Join(dir, fmt.Sprintf("%d%s", len(replace), filepath.Ext(path)))
		if err := os.WriteFile(replace[path], []byte(content), 0o600); err != nil {
			return err
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return err
	}
	cmd := exec.Command("go", "build", "-overlay", file, "-ldflags", ldflags, "-o", output, "./cmd/tenantd")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

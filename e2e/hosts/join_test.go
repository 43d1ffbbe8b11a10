// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// token makes a token for a host that is to join, and returns the file that has it.
func (h *host) token(t testing.TB) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	h.mustTenantctl(t, "host", "token", "--output", file)
	return file
}

// join has a host join by means of another one, and waits until it is ready.
func (in *installation) join(t testing.TB, h, via *host, tokenFile string) {
	t.Helper()
	began := time.Now()
	h.start(t, "--join", via.port(), "--join-token-file", tokenFile)
	h.awaitReady(t)
	in.figures.add("join: from the start of the process to readiness", time.Since(began))
}

// testJoin has b and c join, and what may not join be refused.
func testJoin(t *testing.T, in *installation, b, c *host) {
	other := in.lab.newHost("other", 21) // another installation
	other.start(t)
	a := in.hosts[0]
	used := a.token(t)
	in.join(t, b, a, used)
	in.hosts = append(in.hosts, b)
	in.awaitWell(t)
	other.awaitReady(t)
	file := func(content string) string {
		path := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	fresh, theirs := a.token(t), other.token(t)
	for _, refused := range []struct {
		name  string
		via   *host
		token string
		args  []string
		says  string
	}{
		{"a used token", a, used, nil, "it was used"},
		{"no token", a, file("let me in\n"), nil, "token"},
		{"an empty token", a, file(""), nil, "token"},
		{"a secret that is wrong", a, file(flipSecret(t, fresh)), nil, "it is wrong"},
		{"another installation's token", a, theirs, nil, "another hash"},
		{"a token for another installation", other, fresh, nil, "another hash"},
		{"a name that is taken", b, fresh, []string{"--name", "host-b"}, `there is a host "host-b" already`},
		{"an address that is taken", b, fresh, []string{"--advertise-address", b.address}, "has the same"},
	} {
		before, files, mark := in.membership(t, a), regularFiles(t, c.dir), c.log.mark()
		c.start(t, append([]string{"--join", refused.via.port(), "--join-token-file", refused.token}, refused.args...)...)
		if code := c.wait(t); code == 0 {
			t.Errorf("%s: tenantd ended with exit code 0", refused.name)
		}
		if said := c.log.String()[mark:]; !strings.Contains(said, refused.says) {
			t.Errorf("%s: tenantd does not say %q:\n%s", refused.name, refused.says, said)
		} else {
			t.Logf("%s: %s", refused.name, c.log.Tail(1))
		}
		if after := in.membership(t, a); !slices.Equal(before, after) {
			t.Errorf("%s: the installation was\n%q, and now is\n%q", refused.name, before, after)
		}
		if now := regularFiles(t, c.dir); !slices.Equal(files, now) {
			t.Errorf("%s: it left files: %q, before: %q", refused.name, now, files)
		}
	}
	other.end()

	// What was refused has left nothing that is in the way, and has not used the token up.
	// From when the host has an answer on, it can be killed: the token is not needed again.
	c.start(t, "--join", b.port(), "--join-token-file", fresh)
	eventually(t, "what the join brought is on the disk", func() error {
		_, err := os.Stat(filepath.Join(c.dir, "peer.crt"))
		if err != nil && !c.running() {
			t.Fatalf("%s ended: %v\n%s", c.name, c.cmd.ProcessState, c.log.Tail(20))
		}
		return err
	})
	c.kill(t)
	in.join(t, c, b, fresh)
	in.hosts = append(in.hosts, c)
	in.awaitWell(t)
}

// membership is all that says which hosts there are.
func (in *installation) membership(t testing.TB, via *host) []string {
	t.Helper()
	all := in.members(t, via)
	resp, err := via.etcd(t).Get(context.Background(), "/tenantd/hosts/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range resp.Kvs {
		all = append(all, string(kv.Key)+"="+string(kv.Value))
	}
	objects := &v1alpha1.HostList{}
	if err := in.system(t, via).List(context.Background(), objects); err != nil {
		t.Fatal(err)
	}
	for _, o := range objects.Items {
		all = append(all, "Host "+o.Name)
	}
	return all
}

// flipSecret is a token with another secret.
func flipSecret(t testing.TB, file string) string {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	token, err := v1alpha1.ParseHostToken(strings.TrimSpace(string(raw)))
	if err != nil {
		t.Fatal(err)
	}
	token.Secret = strings.Repeat("0", len(token.Secret))
	return token.String()
}

// regularFiles are the files below a data directory, which need not exist, but for the
// lock that all take first.
func regularFiles(t testing.TB, dir string) []string {
	t.Helper()
	files := map[string]bool{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() != "lock" {
			files[path] = true
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(files))
}

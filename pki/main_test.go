// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/goleak"
	"go.uber.org/zap"
)

var endpoint string // of the one etcd of all tests, which have a prefix each

func TestMain(m *testing.M) {
	code, err := runWithEtcd(m)
	if err == nil && code == 0 {
		err = goleak.Find()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func runWithEtcd(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "pki") // short: a socket's path has about 100 bytes
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	config := embed.NewConfig()
	config.Dir = filepath.Join(dir, "d")
	config.LogLevel = "error"
	config.UnsafeNoFsync = true
	client, peer := url.URL{Scheme: "unix", Path: filepath.Join(dir, "c")}, url.URL{Scheme: "unix", Path: filepath.Join(dir, "p")}
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		return 1, err
	}
	defer etcd.Close()
	select {
	case <-etcd.Server.ReadyNotify():
	case err := <-etcd.Err():
		return 1, err
	}
	endpoint = client.String()
	return m.Run(), nil
}

func newClient(t testing.TB) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return client
}

func newSealer(t testing.TB, fill ...byte) *Sealer {
	t.Helper()
	var keys [][]byte
	for _, b := range fill {
		keys = append(keys, bytes.Repeat([]byte{b}, KeySize))
	}
	sealer, err := NewSealer(keys...)
	if err != nil {
		t.Fatal(err)
	}
	return sealer
}

// prefix returns the one that belongs to this run of the test.
func prefix(t testing.TB) string { return "/tenants" + filepath.Dir(t.TempDir()) }

// newStorage returns a storage of this test's own, the same in each call.
func newStorage(t testing.TB) *Storage {
	t.Helper()
	return NewStorage(newClient(t), prefix(t)+"/pki", newSealer(t, 1))
}

// clock is a clock that a test sets.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Now().Truncate(time.Second)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// open opens an authority and closes it with the test.
func open(t testing.TB, config AuthorityConfig) *Authority {
	t.Helper()
	if config.Tenant == "" {
		config.Tenant = "acme"
	}
	a, err := Open(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func leaf(t testing.TB, a *Authority, p Profile) *Leaf {
	t.Helper()
	l, err := a.Leaf(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

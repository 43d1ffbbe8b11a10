// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hosts_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/tenantd/tenantd/worker/api"
	"github.com/tenantd/tenantd/worker/hosts"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const tenant = "acme.test"

func addresses(all ...string) []netip.AddrPort {
	var parsed []netip.AddrPort
	for _, a := range all {
		parsed = append(parsed, netip.MustParseAddrPort(a))
	}
	return parsed
}

// world is what a list asks.
type world struct {
	mu     sync.Mutex // guards what follows
	names  map[string][]netip.Addr
	listed api.Hosts
	err    error

	told [][]netip.AddrPort
}

func (w *world) list(cache string, seeds ...string) *hosts.List {
	return hosts.New(hosts.Config{
		Tenant: tenant, Seeds: seeds, Cache: cache,
		Learn: func(context.Context) (api.Hosts, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.listed, w.err
		},
		Resolve: func(_ context.Context, name string) ([]netip.Addr, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if found, ok := w.names[name]; ok {
				return found, nil
			}
			return nil, errors.New("no such host")
		},
		Changed: func(now []netip.AddrPort) { w.told = append(w.told, now) },
	})
}

func (w *world) last() []netip.AddrPort { return w.told[len(w.told)-1] }

// change changes what the list will be told.
func (w *world) change(by func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	by()
}

// in runs a test in a bubble with a running list, and ends that.
func in(t *testing.T, list func() *hosts.List, test func(t *testing.T, l *hosts.List)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		l := list()
		go l.Run(ctx)
		synctest.Wait()
		test(t, l)
		stop()
		synctest.Wait()
	})
}

func minute() {
	time.Sleep(hosts.DefaultInterval)
	synctest.Wait()
}

func TestUnion(t *testing.T) {
	w := &world{names: map[string][]netip.Addr{"hosts.test": {netip.MustParseAddr("::ffff:192.0.2.9")}}}
	w.listed.Addresses = addresses("192.0.2.2:443", "192.0.2.1:443")
	in(t, func() *hosts.List { return w.list("", "192.0.2.1:443", "hosts.test:8443") }, func(t *testing.T, l *hosts.List) {
		if want := addresses("192.0.2.1:443"); !slices.Equal(w.told[0], want) {
			t.Errorf("at the start: %v, want %v", w.told[0], want)
		}
		want := addresses("192.0.2.1:443", "192.0.2.2:443", "192.0.2.9:8443")
		if !slices.Equal(w.last(), want) || !slices.Equal(l.Hosts(), want) {
			t.Errorf("with what was learnt: %v, want %v", w.last(), want)
		}
		count := len(w.told)
		minute()
		if len(w.told) != count {
			t.Errorf("told again without a change: %v", w.last())
		}
		w.change(func() {
			w.listed.Addresses = addresses("192.0.2.3:443")
			w.names["hosts.test"] = []netip.Addr{netip.MustParseAddr("192.0.2.8")}
		})
		minute()
		if want := addresses("192.0.2.1:443", "192.0.2.3:443", "192.0.2.8:8443"); !slices.Equal(w.last(), want) {
			t.Errorf("after a change: %v, want %v", w.last(), want)
		}
	})
}

// TestNothingIsLost takes the DNS server, the list and the cluster away.
func TestNothingIsLost(t *testing.T) {
	w := &world{names: map[string][]netip.Addr{"hosts.test": {netip.MustParseAddr("192.0.2.9")}}}
	w.listed.Addresses = addresses("192.0.2.2:443")
	in(t, func() *hosts.List { return w.list("", "hosts.test:443") }, func(t *testing.T, l *hosts.List) {
		want := addresses("192.0.2.2:443", "192.0.2.9:443")
		for name, change := range map[string]func(){
			"DNS is down":         func() { w.names = nil },
			"the list is empty":   func() { w.listed.Addresses = nil },
			"the cluster is down": func() { w.err = errors.New("down") },
		} {
			w.change(change)
			minute()
			if !slices.Equal(l.Hosts(), want) {
				t.Errorf("%s: %v, want %v", name, l.Hosts(), want)
			}
		}
	})
}

// TestRetry expects a name that could not be looked up to be looked up soon.
func TestRetry(t *testing.T) {
	w := &world{}
	w.listed.Addresses = addresses("192.0.2.2:443")
	in(t, func() *hosts.List { return w.list("", "hosts.test:443") }, func(t *testing.T, l *hosts.List) {
		w.change(func() { w.names = map[string][]netip.Addr{"hosts.test": {netip.MustParseAddr("192.0.2.9")}} })
		time.Sleep(hosts.DefaultRetry)
		synctest.Wait()
		if want := addresses("192.0.2.2:443", "192.0.2.9:443"); !slices.Equal(l.Hosts(), want) {
			t.Errorf("%v, want %v", l.Hosts(), want)
		}
	})
}

func TestCache(t *testing.T) {
	cache := filepath.Join(t.TempDir(), "state", hosts.CacheFile)
	w := &world{}
	w.listed = api.Hosts{Addresses: addresses("192.0.2.2:443"), KonnectivityHostname: "tunnel.test"}
	in(t, func() *hosts.List { return w.list(cache, "192.0.2.1:443") }, func(*testing.T, *hosts.List) {})

	next := &world{err: errors.New("down")}
	l := next.list(cache, "192.0.2.9:443")
	if want := addresses("192.0.2.2:443", "192.0.2.9:443"); !slices.Equal(l.Hosts(), want) || l.KonnectivityHostname() != "tunnel.test" {
		t.Errorf("after a restart: %v, %q; want %v", l.Hosts(), l.KonnectivityHostname(), want)
	}
	entries, err := os.ReadDir(filepath.Dir(cache))
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}

	whole, err := os.ReadFile(cache)
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string]string{
		"damaged":           string(whole[:len(whole)/2]),
		"of another tenant": strings.ReplaceAll(string(whole), tenant, "other.test"),
		"with no address":   strings.ReplaceAll(string(whole), "192.0.2.2:443", ""),
		"with a name":       strings.ReplaceAll(string(whole), "192.0.2.2:443", "host:443"),
		"not JSON":          "hosts",
	} {
		if err := os.WriteFile(cache, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, want := next.list(cache, "192.0.2.9:443").Hosts(), addresses("192.0.2.9:443"); !slices.Equal(got, want) {
			t.Errorf("a cache that is %s: %v, want %v", name, got, want)
		}
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hosts

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/tenantd/tenantd/worker/api"
)

const (
	// DefaultInterval is how long a new host stays unknown at most. It is one small
	// request per worker and minute.
	DefaultInterval = time.Minute

	// DefaultRetry is for a list that could not be had: a node that has just joined
	// has its certificate within seconds.
	DefaultRetry = 5 * time.Second

	// attemptTimeout bounds one look at everything.
	attemptTimeout = 10 * time.Second

	// mostHosts bounds what is believed of a list. Each host is probed all the time.
	mostHosts = 64
)

// CacheFile is the name of the file that keeps what was learnt.
const CacheFile = "hosts.json"

// Config describes a list.
type Config struct {
	// Tenant is the tenant's hostname: what was learnt of another is not used.
	Tenant string
	// Seeds are IP:port or name:port.
	Seeds []string
	// Cache is the file that keeps what was learnt. Empty means to keep nothing.
	Cache string
	// Learn asks the cluster. Nil means not to.
	Learn func(context.Context) (api.Hosts, error)
	// Changed is told of the addresses once in New and when they change, sorted and
	// never none, from one goroutine at a time. Nil means nobody.
	Changed func([]netip.AddrPort)
	// Resolve looks a name up. Nil means the machine's resolver.
	Resolve func(ctx context.Context, name string) ([]netip.Addr, error)
	// Interval and Retry are the time between two looks after a good one and after
	// a bad one. Zero means DefaultInterval and DefaultRetry.
	Interval, Retry time.Duration
	// Logger gets changes of state. Nil discards.
	Logger *slog.Logger
}

// List is the list of hosts. Its methods are safe for concurrent use.
type List struct {
	cfg Config // constant after construction
	log *slog.Logger

	mu       sync.Mutex                  // guards what follows
	resolved map[string][]netip.AddrPort // by seed: the last answer that was not empty
	learnt   kept
	current  []netip.AddrPort
	trouble  string // what the last look could not do, for the log
}

// kept is the cache's form.
type kept struct {
	Tenant               string           `json:"tenant"`
	Hosts                []netip.AddrPort `json:"hosts"`
	KonnectivityHostname string           `json:"konnectivityHostname,omitempty"`
}

// New makes a list of the seeds that are addresses, and of the cache.
func New(cfg Config) *List {
	cfg.Interval = cmp.Or(cfg.Interval, DefaultInterval)
	cfg.Retry = cmp.Or(cfg.Retry, DefaultRetry)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Changed == nil {
		cfg.Changed = func([]netip.AddrPort) {}
	}
	if cfg.Resolve == nil {
		cfg.Resolve = func(ctx context.Context, name string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", name)
		}
	}
	l := &List{cfg: cfg, log: cfg.Logger, resolved: map[string][]netip.AddrPort{}}
	for _, seed := range cfg.Seeds {
		if address, err := netip.ParseAddrPort(seed); err == nil {
			l.resolved[seed] = []netip.AddrPort{address}
		}
	}
	if err := l.restore(); err != nil {
		l.log.Warn("the list of hosts of the last run is not used", "error", err)
	}
	l.update()
	return l
}

// Hosts returns the addresses, sorted.
func (l *List) Hosts() []netip.AddrPort {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.current)
}

// KonnectivityHostname is what the cluster says, or empty.
func (l *List) KonnectivityHostname() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.learnt.KonnectivityHostname
}

// Run looks names up and asks the cluster, again and again, until ctx is done.
func (l *List) Run(ctx context.Context) {
	for {
		wait := l.cfg.Interval
		if err := l.look(ctx); err != nil {
			wait = l.cfg.Retry
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// look renews everything that can be renewed. What cannot stays as it was.
func (l *List) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	var faults []error
	for _, seed := range l.cfg.Seeds {
		if err := l.resolve(ctx, seed); err != nil {
			faults = append(faults, err)
		}
	}
	// The names come first: the cluster may be behind them.
	l.update()
	if l.cfg.Learn != nil {
		if err := l.learn(ctx); err != nil {
			faults = append(faults, err)
		}
		l.update()
	}
	err := errors.Join(faults...)
	l.report(ctx, err)
	return err
}

// report logs what went wrong when it is something else than before.
func (l *List) report(ctx context.Context, err error) {
	if ctx.Err() == context.Canceled {
		return
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	l.mu.Lock()
	before := l.trouble
	l.trouble = text
	l.mu.Unlock()
	switch {
	case text == before:
	case text == "":
		l.log.Info("the list of hosts is up to date", "hosts", l.Hosts())
	default:
		l.log.Warn("the list of hosts may be out of date", "error", err)
	}
}

func (l *List) resolve(ctx context.Context, seed string) error {
	if _, err := netip.ParseAddrPort(seed); err == nil {
		return nil
	}
	name, portText, err := net.SplitHostPort(seed)
	if err != nil {
		return fmt.Errorf("read the host %q: %w", seed, err)
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil {
		return fmt.Errorf("read the port of the host %q: %w", seed, err)
	}
	found, err := l.cfg.Resolve(ctx, name)
	if err != nil {
		return fmt.Errorf("look up the host %s: %w", name, err)
	}
	addresses := make([]netip.AddrPort, 0, len(found))
	for _, ip := range found {
		addresses = append(addresses, netip.AddrPortFrom(ip.Unmap(), uint16(port)))
	}
	if len(addresses) == 0 {
		return fmt.Errorf("look up the host %s: the name has no address", name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.resolved[seed] = addresses
	return nil
}

func (l *List) learn(ctx context.Context) error {
	found, err := l.cfg.Learn(ctx)
	if err != nil {
		return fmt.Errorf("ask the cluster for its hosts: %w", err)
	}
	if len(found.Addresses) == 0 {
		return errors.New("ask the cluster for its hosts: its list is empty, so the one before stays")
	}
	learnt := kept{Tenant: l.cfg.Tenant, Hosts: tidy(found.Addresses), KonnectivityHostname: found.KonnectivityHostname}
	learnt.Hosts = learnt.Hosts[:min(len(learnt.Hosts), mostHosts)]
	l.mu.Lock()
	same := slices.Equal(learnt.Hosts, l.learnt.Hosts) && learnt.KonnectivityHostname == l.learnt.KonnectivityHostname
	l.learnt = learnt
	l.mu.Unlock()
	if same || l.cfg.Cache == "" {
		return nil
	}
	if err := store(l.cfg.Cache, learnt); err != nil {
		return fmt.Errorf("keep the list of hosts: %w", err)
	}
	return nil
}

// update joins all that is known and tells when it is something new.
func (l *List) update() {
	l.mu.Lock()
	all := slices.Clone(l.learnt.Hosts)
	for _, addresses := range l.resolved {
		all = append(all, addresses...)
	}
	all = tidy(all)
	changed := !slices.Equal(all, l.current)
	l.current = all
	l.mu.Unlock()
	if changed {
		l.log.Info("the hosts are", "hosts", all)
		l.cfg.Changed(slices.Clone(all))
	}
}

func tidy(addresses []netip.AddrPort) []netip.AddrPort {
	all := make([]netip.AddrPort, 0, len(addresses))
	for _, a := range addresses {
		all = append(all, netip.AddrPortFrom(a.Addr().Unmap(), a.Port()))
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	return slices.Compact(all)
}

// restore reads the cache.
func (l *List) restore() error {
	if l.cfg.Cache == "" {
		return nil
	}
	data, err := os.ReadFile(l.cfg.Cache)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	}
	var k kept
	if err := json.Unmarshal(data, &k); err != nil {
		return fmt.Errorf("%s: %w", l.cfg.Cache, err)
	}
	if k.Tenant != l.cfg.Tenant {
		return fmt.Errorf("%s is of the tenant %q", l.cfg.Cache, k.Tenant)
	}
	k.Hosts = slices.DeleteFunc(tidy(k.Hosts), func(a netip.AddrPort) bool { return !a.IsValid() || a.Port() == 0 })
	l.learnt = k
	return nil
}

// store writes the cache whole or not at all.
func store(path string, k kept) error {
	data, err := json.MarshalIndent(k, "", "  ")
	if err != nil {
		return err
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
	if _, err := file.Write(append(data, '\n')); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

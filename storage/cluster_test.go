// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

// authority issues certificates to hosts.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
	dir  string
	next int64
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{dir: t.TempDir(), next: 1}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "hosts"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.key, a.file = key, filepath.Join(a.dir, "ca.crt")
	writePEM(t, a.file, "CERTIFICATE", der)
	return a
}

func writePEM(t *testing.T, path, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// peer is the configuration of a host at address, with a certificate for it.
func (a *authority) peer(t *testing.T, address string) *PeerConfig {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a.next++
	host, _, _ := net.SplitHostPort(address)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: host},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.ParseIP(host)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(a.dir, fmt.Sprint(a.next))
	writePEM(t, name+".crt", "CERTIFICATE", der)
	writePEM(t, name+".key", "EC PRIVATE KEY", private)
	return &PeerConfig{Listen: address, Advertise: address, CertFile: name + ".crt", KeyFile: name + ".key", CAFile: a.file}
}

// newAddress is one that nobody else listens at: the loopback network is large, and others keep to its first address.
func newAddress() string {
	return fmt.Sprintf("127.%d.%d.%d:2380", 1+mathrand.IntN(254), mathrand.IntN(255), 1+mathrand.IntN(254))
}

// hosts are stores that know each other.
type hosts struct {
	t       *testing.T
	ca      *authority
	stores  map[string]*Store
	configs map[string]Config
}

func newHosts(t *testing.T) *hosts {
	return &hosts{t: t, ca: newAuthority(t), stores: make(map[string]*Store), configs: make(map[string]Config)}
}

// config is that of a host of its own.
func (h *hosts) config(name string) Config {
	h.t.Helper()
	cfg := Config{Dir: h.t.TempDir(), Name: name, UnsafeNoFsync: true, Connections: 2, Peers: h.ca.peer(h.t, newAddress())}
	if log := testLog(h.t); log != nil {
		cfg.Logger = log.With("host", name)
	}
	return cfg
}

// open opens a host's store until the end of the test, or until it is shut.
func (h *hosts) open(name string, cfg Config) *Store {
	h.t.Helper()
	s, err := Open(h.t.Context(), cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	h.configs[name], h.stores[name] = cfg, s
	h.t.Cleanup(func() { s.Close() })
	return s
}

// opening opens a store in the background, just to see whether it opens: the channel
// has what Open says.
func opening(ctx context.Context, cfg Config) chan error {
	opened := make(chan error, 1)
	go func() {
		s, err := Open(ctx, cfg)
		if err == nil {
			s.Close()
		}
		opened <- err
	}()
	return opened
}

// shut closes a host's store, which must not have failed.
func (h *hosts) shut(name string) {
	h.t.Helper()
	s := h.stores[name]
	if err := s.Close(); err != nil {
		h.t.Error(err)
	}
	if err, open := <-s.Err(); open {
		h.t.Error("the store of host", name, "failed:", err)
	}
	delete(h.stores, name)
}

// removed closes the store of a host that was removed, which must have noticed.
func (h *hosts) removed(name string) {
	h.t.Helper()
	s := h.stores[name]
	if err := <-s.Err(); !errors.Is(err, ErrRemoved) {
		h.t.Error("the one that was removed hears:", err)
	}
	s.Close()
	delete(h.stores, name)
}

// reopen opens what was shut, which waits for others.
func (h *hosts) reopen(name string) *Store {
	h.t.Helper()
	return h.open(name, h.configs[name])
}

// join adds a host through another, and returns when it votes.
func (h *hosts) join(through *Store, name string, change func(*Config)) *Store {
	h.t.Helper()
	cfg := h.config(name)
	if change != nil {
		change(&cfg)
	}
	h.add(through, name, &cfg)
	s := h.open(name, cfg)
	h.promote(through, name)
	h.awaitVote(s)
	return s
}

// copying adds a host through another, which stays without a vote.
func (h *hosts) copying(through *Store, name string, change func(*Config)) *Store {
	h.t.Helper()
	cfg := h.config(name)
	if change != nil {
		change(&cfg)
	}
	h.add(through, name, &cfg)
	return h.open(name, cfg)
}

// awaitVote returns when a host knows that it votes.
func (h *hosts) awaitVote(s *Store) {
	h.t.Helper()
	eventually(h.t, "host "+s.Name()+" votes", s.Voting)
}

func (h *hosts) add(through *Store, name string, cfg *Config) {
	h.t.Helper()
	initial, err := through.AddLearner(h.t.Context(), name, cfg.Peers.Advertise)
	if err != nil {
		h.t.Fatal(err)
	}
	cfg.Peers.Initial = initial
}

// promote is what the host that lets another join does.
func (h *hosts) promote(through *Store, name string) {
	h.t.Helper()
	for {
		err := through.Promote(h.t.Context(), name)
		if err == nil {
			return
		}
		if !errors.Is(err, ErrNotCaughtUp) {
			h.t.Fatal(err)
		}
		select {
		case <-h.t.Context().Done():
			h.t.Fatal(err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// three are three hosts, a, b and c, that all vote.
func three(t *testing.T) (h *hosts, a, b, c *Store) {
	t.Helper()
	h = newHosts(t)
	a = h.open("a", h.config("a"))
	b = h.join(a, "b", nil)
	c = h.join(b, "c", nil)
	return h, a, b, c
}

func (h *hosts) leader() (name string, s *Store) {
	h.t.Helper()
	eventually(h.t, "a leader is known", func() bool {
		for n, store := range h.stores {
			if store.Leader() {
				name, s = n, store
				return true
			}
		}
		return false
	})
	return name, s
}

// writes puts a key until that works: a write may fail while a leader is being elected, and says so.
func writes(t *testing.T, s *Store, key, value string) {
	t.Helper()
	eventually(t, "host "+s.Name()+" writes", func() bool {
		_, err := s.Client().Put(t.Context(), key, value)
		return err == nil
	})
}

// reads says what a linearizable read finds.
func reads(t *testing.T, s *Store, key string) string {
	t.Helper()
	got, err := s.Client().Get(t.Context(), key)
	if err != nil {
		t.Errorf("host %s reads %s: %v", s.Name(), key, err)
		return ""
	}
	if len(got.Kvs) == 0 {
		return ""
	}
	return string(got.Kvs[0].Value)
}

func summary(t *testing.T, s *Store) string {
	t.Helper()
	members, err := s.Members(t.Context())
	if err != nil {
		t.Error(err)
	}
	var out []string
	for _, m := range members {
		role := "voter"
		if m.Learner {
			role = "learner"
		}
		if !m.Started {
			role += " to come"
		}
		out = append(out, m.Name+" "+role)
	}
	return strings.Join(out, ", ")
}

// A host joins as a learner, catches up, votes; what one writes the others read.
func TestHostsJoin(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	for i := range 100 {
		mustPut(t, a, fmt.Sprint("/host/", i), 1000)
	}
	cfg := h.config("b")
	if err := a.Promote(t.Context(), "b"); !errors.Is(err, ErrNoMember) {
		t.Error("promoted nobody:", err)
	}
	h.add(a, "b", &cfg)
	first := maps.Clone(cfg.Peers.Initial)
	h.add(a, "b", &cfg)
	if want := map[string]string{"a": a.cfg.Peers.Advertise, "b": cfg.Peers.Advertise}; !maps.Equal(first, want) || !maps.Equal(cfg.Peers.Initial, want) {
		t.Errorf("to join are %v, and when asked again %v", first, cfg.Peers.Initial)
	}
	if got := summary(t, a); got != "a voter, b learner to come" {
		t.Error(got)
	}
	for _, tc := range []struct {
		name, address string
		want          error
	}{
		{"a", newAddress(), ErrNameTaken},
		{"b", newAddress(), ErrNameTaken},
		{"c", a.cfg.Peers.Advertise, ErrAddressTaken},
		{"c", cfg.Peers.Advertise, ErrAddressTaken},
	} {
		if _, err := a.AddLearner(t.Context(), tc.name, tc.address); !errors.Is(err, tc.want) {
			t.Errorf("add %s at %s: %v, want %v", tc.name, tc.address, err, tc.want)
		}
	}
	if err := a.Promote(t.Context(), "b"); !errors.Is(err, ErrNotCaughtUp) {
		t.Error("promoted one that has not started:", err)
	}

	b := h.open("b", cfg)
	if b.Voting() || !a.Voting() || b.Leader() || !a.Leader() {
		t.Errorf("voting: a %v, b %v; leading: a %v, b %v", a.Voting(), b.Voting(), a.Leader(), b.Leader())
	}
	if _, err := b.Client().Put(t.Context(), "/host/x", "y"); err != nil {
		t.Error("a learner takes no writes:", err)
	}
	if got := summary(t, b); got != "a voter, b learner" {
		t.Error(got)
	}
	if _, err := a.AddLearner(t.Context(), "b", cfg.Peers.Advertise); !errors.Is(err, ErrNameTaken) {
		t.Error("added what runs:", err)
	}
	for _, initial := range []map[string]string{cfg.Peers.Initial, nil} { // told again what to join, or not
		h.shut("b")
		cfg.Peers.Initial = initial
		if b = h.open("b", cfg); b.Voting() || summary(t, b) != "a voter, b learner" {
			t.Error("started again, b is one of", summary(t, b))
		}
	}
	h.promote(a, "b")
	h.awaitVote(b)
	if err := a.Promote(t.Context(), "b"); err != nil {
		t.Error("promoted twice:", err)
	}
	if got := reads(t, b, "/host/99"); len(got) != 1000 {
		t.Errorf("b reads %d bytes", len(got))
	}

	c := h.join(b, "c", nil) // through one that does not lead
	for i, writer := range []*Store{a, b, c} {
		key := fmt.Sprint("/host/by-", writer.Name())
		if _, err := writer.Client().Put(t.Context(), key, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
		for _, reader := range []*Store{a, b, c} {
			if got := reads(t, reader, key); got != fmt.Sprint(i) {
				t.Errorf("%s reads %q of what %s wrote", reader.Name(), got, writer.Name())
			}
		}
	}
	if got := summary(t, c); got != "a voter, b voter, c voter" {
		t.Error(got)
	}
	for _, s := range []*Store{a, b, c} {
		if lag := s.Lag(); !lag.LeaderKnown || lag.Applied == 0 || lag.Committed < lag.Applied {
			t.Errorf("host %s: %+v", s.Name(), lag)
		}
		if left, err := s.Client().Get(t.Context(), HostPrefix, clientv3.WithPrefix(), clientv3.WithKeysOnly()); err != nil || left.Count != 0 {
			t.Errorf("joining leaves %v behind, %v", left, err)
		}
	}
}

// A host that gets the data as a snapshot serves as soon as it has it: etcd's own first write of it, which is lost on the
// way then, is not waited for.
func TestJoinByASnapshot(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	for i := range peerLogEntries + 1000 { // so many that the first of them are not in the log any more
		if _, err := a.Client().Put(t.Context(), "/host/k", strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	said := new(lines)
	b := h.join(a, "b", func(cfg *Config) {
		cfg.Logger = slog.New(slog.NewTextHandler(io.MultiWriter(said, t.Output()), &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	if !said.contains("applied snapshot") {
		t.Fatal("there was no snapshot: this shows nothing")
	}
	if said.contains("request timed out") { // that it was cancelled, by the second start, is as it should be
		t.Error("the first write was waited for until etcd gave it up")
	}
	if got, want := reads(t, b, "/host/k"), strconv.Itoa(peerLogEntries+999); got != want {
		t.Errorf("b reads %s, want %s", got, want)
	}
	writes(t, b, "/host/k", "by b")
}

// While the leader is stopped in order, what others write waits, and none of it fails.
func TestTheLeaderHandsOver(t *testing.T) {
	t.Parallel()
	h, _, _, _ := three(t)
	gone, leader := h.leader()
	ctx, cancel := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	var written atomic.Int64
	for name, s := range h.stores {
		if s == leader {
			continue
		}
		for i := range 8 {
			writers.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					key := fmt.Sprintf("/host/%s/%d", name, i)
					if _, err := s.Client().Put(context.WithoutCancel(ctx), key, strconv.Itoa(n)); err != nil {
						t.Errorf("%s, write %d of writer %d: %v", name, n, i, err)
						return
					}
					written.Add(1)
				}
			})
		}
	}
	eventually(t, "writers write", func() bool { return written.Load() > 100 })
	h.shut(gone)
	after := written.Load()
	eventually(t, "writers go on", func() bool { return written.Load() > after+100 })
	cancel()
	writers.Wait()
	if name, _ := h.leader(); name == gone {
		t.Errorf("%s, which is closed, leads", gone)
	}
}

// The leader goes, the others write on, and it comes back to what they wrote.
func TestHostsOutliveTheLeader(t *testing.T) {
	t.Parallel()
	h, _, _, _ := three(t)
	for round := range 2 {
		gone, leader := h.leader()
		writes(t, leader, fmt.Sprint("/host/before-", round), "x")
		h.shut(gone)
		for name, s := range h.stores {
			writes(t, s, fmt.Sprint("/host/without-", round, "-", name), "x")
		}
		s := h.reopen(gone)
		if got := reads(t, s, fmt.Sprint("/host/before-", round)); got != "x" {
			t.Errorf("%s lost what it wrote", gone)
		}
		for name := range h.stores {
			if name == gone {
				continue
			}
			if got := reads(t, s, fmt.Sprint("/host/without-", round, "-", name)); got != "x" {
				t.Errorf("%s did not hear of what %s wrote", gone, name)
			}
		}
		writes(t, s, "/host/again", "x")
	}
}

// member is a host in a process of its own.
type member struct {
	process *exec.Cmd
	client  *clientv3.Client
}

// childMember, set in the environment to a Config, makes the test binary a host until its input ends or it is killed.
const childMember = "STORAGE_TEST_CHILD_MEMBER"

func serveUntilKilled(config string) {
	var cfg Config
	err := json.Unmarshal([]byte(config), &cfg)
	if err == nil {
		_, err = Open(context.Background(), cfg)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("open")
	io.Copy(io.Discard, os.Stdin)
}

// spawn starts a member and returns when it is open.
func (h *hosts) spawn(cfg Config) *member {
	h.t.Helper()
	cfg.Logger = nil
	config, err := json.Marshal(cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	m := &member{process: exec.Command(os.Args[0])}
	m.process.Env = append(os.Environ(), childMember+"="+string(config))
	m.process.Stderr = os.Stderr
	stdin, err := m.process.StdinPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	stdout, err := m.process.StdoutPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	if err := m.process.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { stdin.Close(); m.kill() })
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "open\n" {
		h.t.Fatal("the child did not open: ", line, err)
	}
	m.client, err = clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + filepath.Join(cfg.Dir, socketFile)}, Logger: zap.NewNop()})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { m.client.Close() })
	return m
}

// freeze returns when the member stands still: after the signal its threads run on for a moment.
func (m *member) freeze(t *testing.T) {
	t.Helper()
	if err := m.process.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(m.process.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("freeze: %v, %v", status, err)
	}
}

func (m *member) kill() {
	m.process.Process.Kill()
	m.process.Wait()
}

// A leader that is killed loses nothing that was acknowledged, and nobody waits for it. It runs with fsync.
func TestHostsOutliveAKilledLeader(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	b := h.join(a, "b", nil)
	cfg := h.config("c")
	cfg.UnsafeNoFsync = false
	h.add(a, "c", &cfg)
	c := h.spawn(cfg)
	h.promote(a, "c")

	members, err := a.Members(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	victim, _ := byName(members, "c")
	_, lead := h.leader()
	if err := lead.etcd.Server.MoveLeader(t.Context(), uint64(lead.etcd.Server.MemberID()), victim.ID); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var acked []string
	var writers sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for w, client := range []*clientv3.Client{a.Client(), b.Client(), c.client, c.client} {
		writers.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				key := fmt.Sprint("/host/", w, "/", i)
				if _, err := client.Put(ctx, key, key); err == nil {
					mu.Lock()
					acked = append(acked, key)
					mu.Unlock()
				}
			}
		})
	}
	count := func() int { mu.Lock(); defer mu.Unlock(); return len(acked) }
	eventually(t, "writers write", func() bool { return count() > 100 })
	c.kill()
	at := count()
	eventually(t, "writers go on", func() bool { return count() > at+100 })
	cancel()
	writers.Wait()

	again := h.spawn(cfg)
	for _, client := range []*clientv3.Client{a.Client(), b.Client(), again.client} {
		all, err := client.Get(t.Context(), "/host/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			t.Fatal(err)
		}
		there := make(map[string]bool)
		for _, kv := range all.Kvs {
			there[string(kv.Key)] = true
		}
		for _, key := range acked {
			if !there[key] {
				t.Errorf("%s was acknowledged and is lost", key)
			}
		}
	}
	if _, err := again.client.Put(t.Context(), "/host/again", "x"); err != nil {
		t.Error(err)
	}
}

// Without a quorum writes are refused with the reason, what can be read is, and when a host is back all goes on.
func TestNoQuorum(t *testing.T) {
	t.Parallel()
	h, a, _, _ := three(t)
	writes(t, a, "/host/k", "before")
	h.shut("b")
	h.shut("c")
	eventually(t, "the leader is missed", func() bool { return !a.Lag().LeaderKnown })
	// What waits for another leader is given up.
	if _, err := a.Client().Put(t.Context(), "/host/k", "lost"); !IsNoQuorum(err) {
		t.Error("a write on its way:", err)
	}
	eventually(t, "the loss is noticed", func() bool { return !a.HasQuorum() })
	for name, ask := range map[string]func() error{
		"put":    func() error { _, err := a.Client().Put(t.Context(), "/host/k", "refused"); return err },
		"delete": func() error { _, err := a.Client().Delete(t.Context(), "/host/k"); return err },
		"txn": func() error {
			_, err := a.Client().Txn(t.Context()).Then(clientv3.OpPut("/host/k", "refused")).Commit()
			return err
		},
		"lease":  func() error { _, err := a.Client().Grant(t.Context(), 5); return err },
		"read":   func() error { _, err := a.Client().Get(t.Context(), "/host/k"); return err },
		"remove": func() error { return a.RemoveMember(t.Context(), "c") },
	} {
		if err := ask(); !IsNoQuorum(err) || IsUndecided(err) || !strings.Contains(err.Error(), "bring others back") {
			t.Errorf("%s: %v", name, err)
		}
	}
	got, err := a.Client().Get(t.Context(), "/host/k", clientv3.WithSerializable())
	if err != nil || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "before" {
		t.Errorf("a serializable read says %v, %v", got, err)
	}
	if got := summary(t, a); got != "a voter, b voter, c voter" {
		t.Error(got)
	}
	events := a.Client().Watch(t.Context(), "/host/k", clientv3.WithRev(got.Kvs[0].ModRevision))
	if first := <-events; len(first.Events) != 1 || string(first.Events[0].Kv.Value) != "before" {
		t.Errorf("a watch says %+v", first)
	}
	b := h.reopen("b")
	eventually(t, "the quorum is back", a.HasQuorum)
	writes(t, a, "/host/k", "after")
	for seen := ""; seen != "after"; {
		next := <-events
		if err := next.Err(); err != nil {
			t.Fatal("the watch ended:", err)
		}
		for _, e := range next.Events {
			if seen = string(e.Kv.Value); seen == "refused" {
				t.Error("what was refused was written")
			}
		}
	}
	if got := reads(t, b, "/host/k"); got != "after" {
		t.Errorf("b reads %q", got)
	}
	select {
	case err := <-a.Err():
		t.Error("the lack of a quorum ended the store:", err)
	default:
	}
}

// lines are a log's.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) { l.mu.Lock(); defer l.mu.Unlock(); return l.buf.Write(p) }

func (l *lines) contains(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.buf.String(), s)
}

// A member whose others are down waits for them, says so, and gives up when told to.
func TestOpenWaitsForTheOthers(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	h.join(a, "b", nil)
	h.shut("a")
	h.shut("b")

	log := new(lines)
	cfg := h.configs["b"]
	cfg.Peers.Initial = nil // it knows
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	ctx, cancel := context.WithCancelCause(t.Context())
	opened := opening(ctx, cfg)
	eventually(t, "it says what it waits for", func() bool {
		return log.contains("storage waits for other hosts") && log.contains("a at "+h.configs["a"].Peers.Advertise)
	})
	cancel(errors.New("told to stop"))
	if err := <-opened; err == nil || !strings.Contains(err.Error(), "told to stop") {
		t.Error(err)
	}
	var b *Store
	go func() {
		var err error
		b, err = Open(t.Context(), cfg)
		opened <- err
	}()
	a = h.reopen("a")
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
	h.stores["b"] = b
	writes(t, a, "/host/k", "x")
	h.shut("b")
}

// A host that is to join waits for those it joins, and whatever happens it never begins a cluster of its own.
func TestJoiningWaitsForTheOthers(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	writes(t, a, "/host/k", "x")
	cfg := h.config("b")
	h.add(a, "b", &cfg)
	h.shut("a")
	for _, initial := range []map[string]string{cfg.Peers.Initial, nil} {
		log := new(lines)
		cfg, peers := cfg, *cfg.Peers
		peers.Initial, cfg.Peers, cfg.Logger = initial, &peers, slog.New(slog.NewTextHandler(log, nil))
		ctx, cancel := context.WithCancel(t.Context())
		opened := make(chan error, 1)
		go func() {
			s, err := Open(ctx, cfg)
			if err == nil {
				s.Close()
			}
			opened <- err
		}()
		eventually(t, "it says what it waits for", func() bool { return log.contains("a at " + a.cfg.Peers.Advertise) })
		cancel()
		if err := <-opened; err == nil {
			t.Error("opened without the others")
		}
		eventually(t, "the directory is free", func() bool {
			lock, err := lockDir(cfg.Dir)
			if err == nil {
				lock.Close()
			}
			return err == nil
		})
	}
	alone := cfg
	alone.Peers = nil
	if s, err := Open(t.Context(), alone); err == nil {
		s.Close()
		t.Fatal("began a cluster of its own")
	} else if !strings.Contains(err.Error(), "made to join a cluster") {
		t.Error(err)
	}
	a = h.reopen("a")
	cfg.Peers.Initial = nil
	b := h.open("b", cfg)
	h.promote(a, "b")
	h.awaitVote(b)
	if got := reads(t, b, "/host/k"); got != "x" {
		t.Errorf("b reads %q", got)
	}
}

// Only who has a certificate by the hosts' authority gets to speak to a host.
func TestStrangersAreRefused(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	address := a.cfg.Peers.Advertise
	strangers := newAuthority(t)
	ask := func(config *tls.Config, scheme string) error {
		client := http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
		answer, err := client.Get(scheme + "://" + address + "/members")
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return errors.New(answer.Status)
		}
		return nil
	}
	config := func(p *PeerConfig) *tls.Config {
		pair, err := tls.LoadX509KeyPair(p.CertFile, p.KeyFile)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Config{Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true}
	}
	if err := ask(config(h.ca.peer(t, newAddress())), "https"); err != nil {
		t.Error("a peer is refused:", err)
	}
	old := config(h.ca.peer(t, newAddress()))
	old.MaxVersion = tls.VersionTLS12
	for name, err := range map[string]error{
		"a stranger's certificate": ask(config(strangers.peer(t, newAddress())), "https"),
		"no certificate":           ask(&tls.Config{InsecureSkipVerify: true}, "https"),
		"an old protocol":          ask(old, "https"),
		"plaintext":                ask(nil, "http"),
	} {
		if err == nil {
			t.Errorf("%s was let in", name)
		}
	}

	// Nor does a host join strangers.
	cfg := h.config("b")
	h.add(a, "b", &cfg)
	foreign := strangers.peer(t, cfg.Peers.Advertise)
	foreign.Initial = cfg.Peers.Initial
	cfg.Peers = foreign
	log := new(lines)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	ctx, cancel := context.WithCancel(t.Context())
	opened := opening(ctx, cfg)
	eventually(t, "it is refused", func() bool { return log.contains("certificate signed by unknown authority") })
	cancel()
	if err := <-opened; err == nil {
		t.Error("joined with a stranger's certificate")
	}
	if got := summary(t, a); got != "a voter, b learner to come" {
		t.Error(got)
	}
}

// New certificates are used without a restart.
func TestCertificatesAreReadAgain(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	fresh := h.ca.peer(t, a.cfg.Peers.Advertise)
	for to, from := range map[string]string{a.cfg.Peers.CertFile: fresh.CertFile, a.cfg.Peers.KeyFile: fresh.KeyFile} {
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	pair, err := tls.LoadX509KeyPair(a.cfg.Peers.CertFile, a.cfg.Peers.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := tls.Dial("tcp", a.cfg.Peers.Advertise, &tls.Config{Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got := conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64(); got != h.ca.next {
		t.Errorf("shows certificate %d, want %d", got, h.ca.next)
	}
}

// A directory made by a host alone becomes the first of several, under its name and the host's address, which may
// change.
func TestAHostAloneGetsPeers(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	dir := t.TempDir()
	s := open(t, func(c *Config) { c.Dir = dir })
	mustPut(t, s, key(t, s, "t", "k"), 100)
	if _, err := s.AddLearner(t.Context(), "b", newAddress()); err == nil || !strings.Contains(err.Error(), "address to advertise") {
		t.Error("added a host where nothing listens:", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	cfg := h.config("a")
	cfg.Dir = dir
	a := h.open("a", cfg)
	members, err := a.Members(t.Context())
	if err != nil || len(members) != 1 || members[0].PeerAddress != cfg.Peers.Advertise || members[0].Name != DefaultName || a.Name() != DefaultName {
		t.Errorf("members are %+v, %v", members, err)
	}
	b := h.join(a, "b", nil)
	if u := b.Usage("t"); u.Keys != 1 {
		t.Errorf("usage on the new host is %+v", u)
	}

	h.shut("a")
	moved := h.ca.peer(t, newAddress())
	cfg.Peers = moved
	a = h.open("a", cfg)
	eventually(t, "b knows the address", func() bool {
		members, err := b.Members(t.Context())
		m, ok := byName(members, DefaultName)
		return err == nil && ok && m.PeerAddress == moved.Advertise
	})
	h.shut("b")
	h.reopen("b") // which dials
	writes(t, a, "/host/k", "x")
	h.shut("b")
	h.shut("a")

	cfg.Peers = nil
	if s, err := Open(t.Context(), cfg); err == nil {
		s.Close()
		t.Error("opened one of two without saying how to reach the other")
	} else if !strings.Contains(err.Error(), "cluster of 2 members") {
		t.Error(err)
	}
	foreign := h.config("c") // a directory with a cluster of its own
	c := h.open("c", foreign)
	writes(t, c, "/host/k", "x")
	h.shut("c")
	foreign.Peers.Initial = map[string]string{"c": foreign.Peers.Advertise, "a": moved.Advertise}
	if s, err := Open(t.Context(), foreign); err == nil {
		s.Close()
		t.Error("joined with another cluster's data")
	} else if !strings.Contains(err.Error(), "another cluster") {
		t.Error(err)
	}
}

// A host is removed only where the rest can go on, and then is told.
func TestRemove(t *testing.T) {
	t.Parallel()
	h, a, b, _ := three(t)
	if err := a.RemoveMember(t.Context(), "d"); !errors.Is(err, ErrNoMember) {
		t.Error(err)
	}
	d := h.config("d")
	h.add(a, "d", &d) // and never starts
	if err := b.RemoveMember(t.Context(), "d"); err != nil {
		t.Error("remove one that never came:", err)
	}
	if got := summary(t, b); got != "a voter, b voter, c voter" {
		t.Error(got)
	}

	h.shut("c")
	if err := a.RemoveMember(t.Context(), "b"); !errors.Is(err, ErrUnsafe) || !strings.Contains(err.Error(), "c (") {
		t.Error("removed one of the two that are alive:", err)
	}
	c := h.reopen("c")
	writes(t, c, "/host/k", "x")
	if err := c.RemoveMember(t.Context(), "c"); err != nil {
		t.Fatal("remove oneself:", err)
	}
	h.removed("c")
	eventually(t, "the others know", func() bool { return summary(t, a) == "a voter, b voter" && summary(t, b) == "a voter, b voter" })
	writes(t, a, "/host/k", "y")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if s, err := Open(ctx, h.configs["c"]); err == nil {
		s.Close()
		t.Error("opened what was removed")
	} else if !errors.Is(err, ErrRemoved) {
		t.Error("one that was removed, started again:", err)
	}

	h.shut("b")
	if err := a.RemoveMember(t.Context(), "b"); !IsNoQuorum(err) {
		t.Error("without a quorum:", err)
	}
	b = h.reopen("b")
	writes(t, b, "/host/k", "z")
	if err := a.RemoveMember(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	if err := <-b.Err(); !errors.Is(err, ErrRemoved) {
		t.Error("the one that was removed hears:", err)
	}
	writes(t, a, "/host/k", "alone")
	if err := a.RemoveMember(t.Context(), "a"); !errors.Is(err, ErrUnsafe) {
		t.Error("removed the last:", err)
	}
}

// A host that is frozen, with its connections open, counts as dead, and can be removed.
func TestRemoveAFrozenHost(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	a := h.open("a", h.config("a"))
	b := h.join(a, "b", nil)
	cfg := h.config("c")
	h.add(a, "c", &cfg)
	c := h.spawn(cfg)
	h.promote(a, "c")
	c.freeze(t)
	if err := a.RemoveMember(t.Context(), "b"); !errors.Is(err, ErrUnsafe) || !strings.Contains(err.Error(), "c (") {
		t.Error("removed one of the two that are alive:", err)
	}
	if err := b.RemoveMember(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	if got := summary(t, b); got != "a voter, b voter" {
		t.Error(got)
	}
	writes(t, a, "/host/k", "x")
}

// The books are right on every host, whoever wrote, and limits hold wherever they were set.
func TestQuotaOnEveryHost(t *testing.T) {
	t.Parallel()
	const quota, object = 64 << 10, 1 << 10
	h := newHosts(t)
	small := func(c *Config) { c.TenantQuota = quota }
	cfg := h.config("a")
	small(&cfg)
	a := h.open("a", cfg)
	mustPut(t, a, key(t, a, "t", "pods/default/first"), object)
	b := h.join(a, "b", small)
	c := h.join(a, "c", small)
	stores := []*Store{a, b, c}
	var refused error
	for i := 0; refused == nil; i++ {
		s := stores[i%3]
		if refused = create(t, s, key(t, s, "t", fmt.Sprint("pods/default/", i)), object); i > 2*quota/object {
			t.Fatal("never refused")
		}
	}
	expect(t, "the first beyond", refused, CauseStorage)
	for _, s := range stores {
		// Everything that was acknowledged anywhere is known here after a read that waits for it.
		reads(t, s, "/host/any")
		eventually(t, "host "+s.Name()+" counts", func() bool {
			live, keys := counted(t, s, "t")
			u := s.Usage("t")
			return u.Live == live && u.Keys == keys
		})
		checkBooks(t, s, "t")
		if u := s.Usage("t"); u.Live > quota || u.Live < quota-2*object {
			t.Errorf("host %s has %+v", s.Name(), u)
		}
		expect(t, "one more on "+s.Name(), create(t, s, key(t, s, "t", "pods/default/more"), object), CauseStorage)
	}

	// Writers on all hosts at once pass a limit by no more than what was in flight.
	var writers sync.WaitGroup
	for _, s := range stores {
		for w := range 4 {
			writers.Go(func() {
				for i := range 60 {
					err := create(t, s, key(t, s, "u", fmt.Sprint("pods/", s.Name(), "/", w, "-", i)), object)
					if err != nil && !isQuota(err) {
						t.Error(err)
					}
				}
			})
		}
	}
	writers.Wait()
	if live, _ := counted(t, a, "u"); live < quota-2*object || live > quota+12*(object+100) {
		t.Errorf("%d of %d bytes live", live, quota)
	}

	if err := b.Wipe(t.Context(), "t"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all know it is gone", func() bool { return a.Usage("t").Keys == 0 && c.Usage("t").Keys == 0 })
}

// A host that is far behind decides on growth when it has caught up, not on what it knew.
func TestABehindHostCatchesUpBeforeItDecides(t *testing.T) {
	t.Parallel()
	h, _, _, _ := three(t)
	_, leader := h.leader()
	var slow *Store
	for _, s := range h.stores {
		if !s.Leader() {
			slow = s
		}
	}
	const limit = 2 * farBehind
	slow.SetLimits("t", Limits{Objects: limit})
	tx := slow.etcd.Server.Backend().BatchTx()
	tx.Lock() // nothing more is done on this host
	for i := range limit {
		if err := create(t, leader, key(t, leader, "t", fmt.Sprint("pods/default/", i)), 10); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "it knows of more than it has done", func() bool {
		lag := slow.Lag()
		return lag.Committed > lag.Applied+farBehind
	})
	decided := make(chan error, 1)
	go func() { decided <- create(t, slow, key(t, slow, "t", "pods/default/more"), 10) }()
	select {
	case err := <-decided:
		t.Error("decided on what it knew:", err)
		tx.Unlock()
	case <-time.After(100 * time.Millisecond): // too short for a wrong decision to show at worst
		tx.Unlock()
		expect(t, "one more than the limit", <-decided, CauseObjects)
	}
}

// The leader compacts for all; the others notice, and their history is counted accordingly.
func TestOneCompactsForAll(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	quiet := func(c *Config) { c.CompactInterval, c.MinHistory = 24*time.Hour, 24*time.Hour }
	cfg := h.config("a")
	quiet(&cfg)
	a := h.open("a", cfg)
	if got := a.CompactRevision(); got != 1 {
		t.Errorf("alone, a starts at %d", got)
	}
	b := h.join(a, "b", quiet)
	mustPut(t, a, key(t, a, "t", "k"), 1000)
	watch := b.Client().Watch(t.Context(), tenantsPrefix, clientv3.WithPrefix(), clientv3.WithRev(2))
	h.shut("a")
	a = h.reopen("a") // which is not alone any more, so others may still need what it holds
	for range 3 {
		eventually(t, "a writes", func() bool {
			_, err := a.Client().Put(t.Context(), key(t, a, "t", "k"), strings.Repeat("x", 1000))
			return err == nil
		})
	}
	seen := 0
	for seen < 4 {
		answer := <-watch
		if err := answer.Err(); err != nil {
			t.Fatal(err)
		}
		seen += len(answer.Events)
	}

	_, leader := h.leader()
	follower := a
	if leader == a {
		follower = b
	}
	reads(t, follower, "/host/any")
	eventually(t, "the follower has the history", func() bool { return follower.Usage("t").History >= 3000 })
	start := time.Now()
	rounds := func(s *Store) {
		u := newUpkeep(s.cfg, start)
		u.CompactInterval, u.MinHistory = 5*time.Minute, 10*time.Second
		for minute := range 12 {
			s.mustRound(t, u, start.Add(time.Duration(minute)*time.Minute))
		}
	}
	before := leader.etcd.Server.KV().FirstRev()
	rounds(follower)
	if got := leader.etcd.Server.KV().FirstRev(); got != before {
		t.Errorf("a follower compacted to %d", got)
	}
	rounds(leader)
	compacted := leader.CompactRevision()
	if compacted <= before {
		t.Errorf("the leader compacted to %d", compacted)
	}
	eventually(t, "the follower compacts too", func() bool {
		return follower.etcd.Server.KV().FirstRev() == compacted
	})
	rounds(follower)
	if got := follower.CompactRevision(); got != compacted {
		t.Errorf("the follower knows of %d, want %d", got, compacted)
	}
	if u := follower.Usage("t"); u.History != 0 {
		t.Errorf("the follower counts %+v", u)
	}
}

// Two hosts never defragment at the same time, and while one does the others write.
func TestDefragmentationInTurn(t *testing.T) {
	t.Parallel()
	_, a, b, c := three(t)
	for i := range 50 {
		writes(t, a, fmt.Sprint("/host/", i), strings.Repeat("x", 10<<10))
	}
	inside, leave, left := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		left <- a.locked(t.Context(), defragmentLock, defragmentTTL, (*concurrency.Mutex).Lock, func(context.Context) error {
			close(inside)
			<-leave
			return nil
		})
	}()
	<-inside
	if err := b.defragmentInTurn(t.Context(), (*concurrency.Mutex).TryLock); !errors.Is(err, concurrency.ErrLocked) {
		t.Error("defragments while another does:", err)
	}
	writes(t, c, "/host/k", "x")
	close(leave)
	if err := <-left; err != nil {
		t.Error(err)
	}
	var all sync.WaitGroup
	for _, s := range []*Store{a, b, c} {
		all.Go(func() {
			if err := s.Defragment(t.Context()); err != nil {
				t.Error(err)
			}
		})
		writes(t, s, "/host/during", "x")
	}
	all.Wait()
	for _, s := range []*Store{a, b, c} {
		if got := s.defragmentations.Load(); got != 1 {
			t.Errorf("host %s was defragmented %d times", s.Name(), got)
		}
		if got := reads(t, s, "/host/during"); got != "x" {
			t.Errorf("host %s reads %q", s.Name(), got)
		}
	}
}

func TestPeerConfigExplainsItself(t *testing.T) {
	err := Config{Dir: "x", Name: "a", Peers: &PeerConfig{
		Listen: "host.example:2380", Advertise: ":2380", Initial: map[string]string{"b": "10.0.0.1", "c/d": "10.0.0.2:1"},
	}}.Validate()
	for _, want := range []string{
		"CertFile is empty", "KeyFile is empty", "CAFile is empty", "not at an IP address", "none that other hosts can dial",
		`address "10.0.0.1" is not host:port`, `name "c/d"`, "Initial says this member, a, is at",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
	fine := PeerConfig{Listen: ":2380", Advertise: "host-a.example.com:2380", CertFile: "c", KeyFile: "k", CAFile: "ca"}
	if err := (Config{Dir: "x", Peers: &fine}).Validate(); err != nil {
		t.Error(err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	bolt "go.etcd.io/bbolt"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"go.uber.org/zap"
)

// Set in the environment, these make the test binary a process of its own that writes into the directory until it is
// killed, or that opens it and says how that went.
const (
	childWrites = "STORAGE_TEST_CHILD_WRITES"
	childOpens  = "STORAGE_TEST_CHILD_OPENS"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childWrites); dir != "" {
		writeUntilKilled(dir)
	}
	if config := os.Getenv(childMember); config != "" {
		serveUntilKilled(config)
		return
	}
	if dir := os.Getenv(childOpens); dir != "" {
		_, err := Open(context.Background(), Config{Dir: dir, UnsafeNoFsync: true})
		fmt.Println("open says:", err)
		return
	}
	code := m.Run()
	if code == 0 {
		if err := leaks(); err != nil {
			fmt.Fprintln(os.Stderr, "goleak:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// leaks finds goroutines that stay. etcd's connections between peers read with a timeout of 5 s, which closing them does
// not always interrupt, so it looks for a few times as long as goleak would.
func leaks() (err error) {
	for range 10 {
		if err = goleak.Find(); err == nil {
			return nil
		}
	}
	return err
}

// open starts a store in a directory of its own, without fsync, and closes it at the end of the test.
func open(t *testing.T, change func(*Config)) *Store {
	t.Helper()
	cfg := Config{Dir: t.TempDir(), UnsafeNoFsync: true, Logger: testLog(t)}
	if change != nil {
		change(&cfg)
	}
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err, open := <-s.Err(); open {
			t.Error("the store failed:", err)
		}
	})
	return s
}

func testLog(t *testing.T) *slog.Logger {
	if !testing.Verbose() {
		return nil
	}
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

// key is the key of the tenant's object of that name.
func key(t *testing.T, s *Store, tenant, name string) string {
	t.Helper()
	prefix, err := s.Prefix(tenant)
	if err != nil {
		t.Fatal(err)
	}
	return prefix + registryPrefix + name
}

func mustPut(t *testing.T, s *Store, key string, size int) {
	t.Helper()
	if _, err := s.Conn().Put(t.Context(), key, strings.Repeat("x", size)); err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
}

// eventually waits until ok, however long the machine takes; the test binary's own timeout is the limit.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for !ok() {
		select {
		case <-t.Context().Done():
			t.Fatal("never:", what)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// counted is what a full scan through a client finds.
func counted(t *testing.T, s *Store, tenant string) (live, keys int64) {
	t.Helper()
	all, err := s.Client().Get(t.Context(), tenantsPrefix+tenant+"/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for _, item := range all.Kvs {
		live += int64(len(item.Key) + len(item.Value))
	}
	return live, int64(len(all.Kvs))
}

func TestOpenServesOneUnixSocketAndNothingElse(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "here")
	s := open(t, func(c *Config) { c.Dir = dir })

	socket := strings.TrimPrefix(s.Endpoint(), "unix://")
	if socket != filepath.Join(dir, socketFile) {
		t.Errorf("endpoint is %s", s.Endpoint())
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%s: %v %v", dir, info, err)
	}
	for _, l := range s.etcd.Clients {
		if l.Addr().Network() != "unix" {
			t.Errorf("listens on %v", l.Addr())
		}
	}
	if len(s.etcd.Peers) != 0 {
		t.Errorf("listens for peers on %v", s.etcd.Peers[0].Addr())
	}
	seen := map[*clientv3.Client]bool{}
	for range 2 * DefaultConnections {
		seen[s.Conn()] = true
	}
	if len(seen) != DefaultConnections || seen[s.Client()] {
		t.Errorf("Conn went round %d clients, want %d that are not the host's", len(seen), DefaultConnections)
	}
}

func TestOpenExplainsItself(t *testing.T) {
	busy := open(t, nil)
	for _, tc := range []struct {
		name string
		make func(dir string) (Config, error)
		want []string
	}{
		{"no directory", func(string) (Config, error) {
			return Config{Connections: -1, Name: "a=b"}, nil
		}, []string{"Dir is empty", "Connections is negative", "Name"}},
		{"locked by a process", func(string) (Config, error) {
			return Config{Dir: busy.cfg.Dir}, nil
		}, []string{fmt.Sprintf("process %d uses it", os.Getpid()), "choose another directory"}},
		{"a file", func(dir string) (Config, error) {
			path := filepath.Join(dir, "file")
			return Config{Dir: filepath.Join(path, "below")}, os.WriteFile(path, nil, 0o600)
		}, []string{"not a directory", "choose a path that is a directory"}},
		{"not a database", func(dir string) (Config, error) {
			err := os.MkdirAll(filepath.Join(dir, "member", "snap"), 0o700)
			return Config{Dir: dir}, errors.Join(err,
				os.WriteFile(filepath.Join(dir, "member", "snap", "db"), make([]byte, 1<<16), 0o600))
		}, []string{"damaged or no etcd database", "restore a snapshot"}},
		{"another etcd's lock", func(dir string) (Config, error) {
			db, err := fakeDatabase(dir, func(*bolt.Tx) error { return nil })
			t.Cleanup(func() { db.Close() })
			return Config{Dir: dir}, err
		}, []string{"another etcd has", "stop it"}},
		{"newer data", func(dir string) (Config, error) {
			db, err := fakeDatabase(dir, func(tx *bolt.Tx) error {
				b, err := tx.CreateBucket([]byte("cluster"))
				return errors.Join(err, b.Put([]byte("clusterVersion"), []byte("99.1.0")))
			})
			return Config{Dir: dir}, errors.Join(err, db.Close())
		}, []string{"written by etcd 99.1", "run a newer tenantd"}},
		{"a cluster's member", func(dir string) (Config, error) {
			db, err := fakeDatabase(dir, func(tx *bolt.Tx) error {
				b, err := tx.CreateBucket([]byte("members"))
				return errors.Join(err, b.Put([]byte("1"), []byte("{}")), b.Put([]byte("2"), []byte("{}")))
			})
			return Config{Dir: dir}, errors.Join(err, db.Close())
		}, []string{"cluster of 2 members", "restore a snapshot"}},
		{"its log lost", func(dir string) (Config, error) {
			db, err := fakeDatabase(dir, func(tx *bolt.Tx) error {
				b, err := tx.CreateBucket([]byte("members"))
				return errors.Join(err, b.Put([]byte("1"), []byte("{}")))
			})
			return Config{Dir: dir}, errors.Join(err, db.Close())
		}, []string{"no log in member/wal", "restore a snapshot"}},
		{"socket path too long", func(dir string) (Config, error) {
			return Config{Dir: dir, SocketDir: filepath.Join(dir, strings.Repeat("s", 120))}, nil
		}, []string{"choose a shorter SocketDir"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg, err := tc.make(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			s, err := Open(t.Context(), cfg)
			if err == nil {
				s.Close()
				t.Fatal("opened")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q lacks %q", err, want)
				}
			}
		})
	}
}

// fakeDatabase makes an etcd database with what fill puts into it, and leaves it open.
func fakeDatabase(dir string, fill func(*bolt.Tx) error) (*bolt.DB, error) {
	snap := filepath.Join(dir, "member", "snap")
	if err := os.MkdirAll(snap, 0o700); err != nil {
		return nil, err
	}
	db, err := bolt.Open(filepath.Join(snap, "db"), 0o600, nil)
	if err != nil {
		return nil, err
	}
	return db, db.Update(fill)
}

// What etcd finds out too late to return is an error all the same, and the process lives. It is another process here
// because etcd leaves goroutines and files behind when it fails so.
func TestOpenSurvivesADamagedLog(t *testing.T) {
	s := open(t, nil)
	mustPut(t, s, "/host", 1000)
	s.Close()
	logs, err := filepath.Glob(filepath.Join(s.cfg.Dir, "member", "wal", "*.wal"))
	if err != nil || len(logs) != 1 {
		t.Fatal(logs, err)
	}
	log, err := os.ReadFile(logs[0])
	if err != nil {
		t.Fatal(err)
	}
	value := bytes.Index(log, []byte("xxxxxxxx"))
	copy(log[value+100:], "damage") // in the middle of a record: etcd would take a damaged end for an interrupted write
	if err := os.WriteFile(logs[0], log, 0o600); err != nil {
		t.Fatal(err)
	}
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childOpens+"="+s.cfg.Dir)
	out, err := child.CombinedOutput()
	if want := "open says: open storage in " + s.cfg.Dir + ": "; err != nil || !strings.Contains(string(out), want) ||
		!strings.Contains(string(out), "restore a snapshot") {
		t.Errorf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// A failed or abandoned Open leaves nothing that keeps the next one from working.
func TestOpenAgainAfterFailure(t *testing.T) {
	dir := t.TempDir()
	gone, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("changed my mind"))
	if s, err := Open(gone, Config{Dir: dir, UnsafeNoFsync: true}); err == nil {
		s.Close()
	} else if !strings.Contains(err.Error(), "changed my mind") {
		t.Error(err)
	}
	var s *Store
	eventually(t, "the directory is free again", func() (ok bool) {
		var err error
		s, err = Open(t.Context(), Config{Dir: dir, UnsafeNoFsync: true})
		return err == nil
	})
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
}

func TestLongDirectoryGetsAShortSocket(t *testing.T) {
	s := open(t, func(c *Config) { c.Dir = filepath.Join(c.Dir, strings.Repeat("d", 120)) })
	mustPut(t, s, "/host", 1)
	private := filepath.Dir(strings.TrimPrefix(s.Endpoint(), "unix://"))
	if info, err := os.Stat(private); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("socket directory: %v %v", info, err)
	}
	s.Close()
	if _, err := os.Stat(private); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket's directory is left behind: %v", err)
	}
}

func TestPrefix(t *testing.T) {
	s := open(t, nil)
	if got, err := s.Prefix("1b4e"); err != nil || got != "/tenants/1b4e/" {
		t.Errorf("%q %v", got, err)
	}
	for _, uid := range []string{"", "a/b", "/"} {
		if got, err := s.Prefix(uid); err == nil {
			t.Errorf("Prefix(%q) = %q", uid, got)
		}
		if err := s.Wipe(t.Context(), uid); err == nil {
			t.Errorf("Wipe(%q) did something", uid)
		}
	}
}

// The books equal a full scan after concurrent puts, updates, deletes, transactions, expiring leases, compactions and
// a restart.
func TestUsageEqualsAScan(t *testing.T) {
	dir := t.TempDir()
	config := func(c *Config) {
		c.Dir = dir
		c.MinHistory, c.CompactInterval = 20*time.Millisecond, 40*time.Millisecond
	}
	tenants := []string{"a", "b", "b-2", "a0"}
	s := open(t, config)
	var writers sync.WaitGroup
	for w := range 8 {
		random := rand.New(rand.NewPCG(1, uint64(w)))
		writers.Go(func() {
			for range 150 {
				randomWrite(t, s.Conn(), random, tenants)
			}
		})
	}
	writers.Go(func() {
		for range 10 {
			if err := s.Compact(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
	writers.Wait()

	compare := func(s *Store) {
		t.Helper()
		for _, tenant := range tenants {
			for _, dir := range []string{"leased/", crdDir + "leased/"} {
				eventually(t, "leases expire", func() bool {
					left, err := s.Client().Get(t.Context(), key(t, s, tenant, dir), clientv3.WithPrefix(), clientv3.WithCountOnly())
					return err == nil && left.Count == 0
				})
			}
			live, keys := counted(t, s, tenant)
			eventually(t, "usage follows", func() bool { u := s.Usage(tenant); return u.Live == live && u.Keys == keys })
			if keys == 0 {
				t.Errorf("tenant %s has nothing: the test tests nothing", tenant)
			}
			checkBooks(t, s, tenant)
		}
	}
	compare(s)
	if u := s.Usage("not-there"); u != (Usage{Quota: DefaultTenantQuota}) {
		t.Errorf("usage of nobody is %+v", u)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = open(t, config)
	compare(s)
	uids, err := s.Tenants(t.Context())
	slices.Sort(tenants)
	if err != nil || !slices.Equal(uids, tenants) {
		t.Errorf("tenants are %v, %v", uids, err)
	}
}

func randomWrite(t *testing.T, c *clientv3.Client, random *rand.Rand, tenants []string) {
	prefix := tenantsPrefix + tenants[random.IntN(len(tenants))] + "/" + registryPrefix
	if random.IntN(5) == 0 {
		prefix += crdDir
	}
	name := prefix + fmt.Sprint("k", random.IntN(5), "/", random.IntN(8))
	value := strings.Repeat("v", random.IntN(2000))
	var err error
	switch ctx := t.Context(); random.IntN(10) {
	case 0:
		_, err = c.Delete(ctx, name)
	case 1:
		_, err = c.Delete(ctx, prefix+"k1", clientv3.WithPrefix())
	case 2:
		var lease *clientv3.LeaseGrantResponse
		if lease, err = c.Grant(ctx, 1); err == nil {
			_, err = c.Put(ctx, prefix+"leased/"+fmt.Sprint(random.IntN(20)), value, clientv3.WithLease(lease.ID))
		}
	case 3:
		_, err = c.Txn(ctx).Then(clientv3.OpPut(name, value), clientv3.OpDelete(prefix+"other"),
			clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpPut(prefix+"nested", value)}, nil)).Commit()
	case 4:
		_, err = c.Put(ctx, "/host/"+fmt.Sprint(random.IntN(5)), value)
	case 5: // what an API server does
		_, err = c.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(name), "=", 0)).
			Then(clientv3.OpPut(name, value)).Else(clientv3.OpGet(name)).Commit()
	default:
		_, err = c.Put(ctx, name, value)
	}
	if err != nil {
		t.Error(err)
	}
}

// A watch that falls behind and is compacted away makes the ledger count again.
func TestUsageSurvivesALostWatch(t *testing.T) {
	s := open(t, nil)
	mustPut(t, s, key(t, s, "a", "kept"), 100)
	for range 20 {
		mustPut(t, s, key(t, s, "a", "rewritten"), 100)
	}
	if err := s.Compact(t.Context()); err != nil {
		t.Fatal(err)
	}
	kv, l := s.etcd.Server.KV(), newLedger(DefaultTenantQuota)
	lost := kv.NewWatchStream() // from a revision that is gone
	if _, err := lost.Watch(t.Context(), clientv3.AutoWatchID, []byte{0}, []byte{}, 2); err != nil {
		t.Fatal(err)
	}
	defer lost.Close()
	if rescan, err := l.follow(t.Context(), lost); !rescan || err != nil {
		t.Fatalf("follow says %v, %v", rescan, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	follow, err := l.start(ctx, kv)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := follow(); err != nil {
		t.Error(err)
	}
	live, keys := counted(t, s, "a")
	if got := l.usage("a"); got.Live != live || got.Keys != keys {
		t.Errorf("counted %+v, there are %d bytes in %d keys", got, live, keys)
	}
}

func TestWipe(t *testing.T) {
	s := open(t, nil)
	s.SetLimits("gone", Limits{Bytes: 1 << 20})
	lease, err := s.Client().Grant(t.Context(), 3600)
	if err != nil {
		t.Fatal(err)
	}
	ops := make([]clientv3.Op, 0, 100)
	for i := range wipePage + 500 {
		ops = append(ops, clientv3.OpPut(key(t, s, "gone", fmt.Sprint(i)), "v", clientv3.WithLease(lease.ID)))
		if len(ops) == cap(ops) {
			if _, err := s.Conn().Txn(t.Context()).Then(ops...).Commit(); err != nil {
				t.Fatal(err)
			}
			ops = ops[:0]
		}
	}
	mustPut(t, s, key(t, s, "gone-not", "k"), 1)
	mustPut(t, s, "/host", 1)
	for range 2 {
		if err := s.Wipe(t.Context(), "gone"); err != nil {
			t.Fatal(err)
		}
		if _, keys := counted(t, s, "gone"); keys != 0 {
			t.Errorf("%d keys are left", keys)
		}
		if u := s.Usage("gone"); u != (Usage{Quota: DefaultTenantQuota}) {
			t.Errorf("remembered: %+v", u)
		}
	}
	uids, err := s.Tenants(t.Context())
	if err != nil || !slices.Equal(uids, []string{"gone-not"}) {
		t.Errorf("tenants are %v, %v", uids, err)
	}
	if host, err := s.Client().Get(t.Context(), "/host"); err != nil || host.Count != 1 {
		t.Errorf("the host's key is gone too: %v", err)
	}
}

func TestWipeRefusesAMovingTarget(t *testing.T) {
	s := open(t, nil)
	name := key(t, s, "busy", "k")
	mustPut(t, s, name, 1)
	etcd := s.client.KV
	s.client.KV = restlessKV{etcd, name}
	if err := s.Wipe(t.Context(), "busy"); err == nil || !strings.Contains(err.Error(), "stop the tenant's API servers") {
		t.Error(err)
	}
	if u := s.Usage("busy"); u.Keys != 1 {
		t.Errorf("a failed wipe forgot what is left: %+v", u)
	}
	s.client.KV = etcd
	if err := s.Wipe(t.Context(), "busy"); err != nil {
		t.Error(err)
	}
}

// restlessKV writes a key again after each delete, as a running API server may.
type restlessKV struct {
	clientv3.KV
	key string
}

func (kv restlessKV) Delete(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.DeleteResponse, error) {
	deleted, err := kv.KV.Delete(ctx, key, opts...)
	if err == nil {
		_, err = kv.Put(ctx, kv.key, "again")
	}
	return deleted, err
}

func TestCollector(t *testing.T) {
	s := open(t, nil)
	s.SetLimits("a", Limits{Bytes: 1000})
	mustPut(t, s, key(t, s, "a", "k"), 10)
	s.Conn().Put(t.Context(), key(t, s, "a", "big"), strings.Repeat("x", 2000))
	if err := errors.Join(s.Compact(t.Context()), s.Defragment(t.Context())); err != nil {
		t.Fatal(err)
	}
	s.Usage("a") // wait for the books

	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(s.Collector())
	got := map[string]float64{}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			name := strings.TrimPrefix(f.GetName(), "tenantd_storage_")
			for _, label := range m.Label {
				name += "," + label.GetValue()
			}
			got[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	for name, want := range map[string]float64{
		"tenant_bytes,a": float64(len("/tenants/a/registry/k") + 10), "tenant_keys,a": 1, "tenant_history_bytes,a": 0,
		"tenant_quota_bytes,a": 1000, "quota_refused_total,storage,a": 1, "tenant_objects,a": 1, "tenant_custom_resource_definitions,a": 0,
		"db_quota_bytes": DefaultBackendQuota, "compactions_total": 2, "defragmentations_total": 1,
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
	if got["db_bytes"] < got["db_in_use_bytes"] || got["db_in_use_bytes"] <= 0 {
		t.Errorf("sizes are %v and %v", got["db_bytes"], got["db_in_use_bytes"])
	}
}

// What a client was told is written is there after kill -9. The child runs with fsync, as production does.
func TestAcknowledgedWritesSurviveAKill(t *testing.T) {
	dir := t.TempDir()
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childWrites+"="+dir)
	child.Stderr = os.Stderr
	acks, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	const enough = 200
	var acked []uint64
	for in := bufio.NewReader(acks); ; {
		var n uint64
		if err := binary.Read(in, binary.LittleEndian, &n); err != nil {
			break // the pipe is drained to its end, so every acknowledgement counts
		}
		if acked = append(acked, n); len(acked) == enough {
			if err := child.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	child.Wait()
	if len(acked) < enough {
		t.Fatalf("the child acknowledged %d writes only", len(acked))
	}

	s := open(t, func(c *Config) { c.Dir, c.UnsafeNoFsync = dir, false })
	for _, n := range acked {
		got, err := s.Client().Get(t.Context(), childKey(n))
		if err != nil {
			t.Fatal(err)
		}
		if got.Count != 1 {
			t.Errorf("write %d was acknowledged and is lost", n)
		}
	}
	live, keys := counted(t, s, "child")
	if u := s.Usage("child"); u.Live != live || u.Keys != keys {
		t.Errorf("usage is %+v, there are %d bytes in %d keys", u, live, keys)
	}
}

func childKey(n uint64) string { return fmt.Sprintf("%schild/%d", tenantsPrefix, n) }

func writeUntilKilled(dir string) {
	s, err := Open(context.Background(), Config{Dir: dir})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var out sync.Mutex
	for w := range uint64(8) {
		go func() {
			for n := w; ; n += 8 {
				if _, err := s.Conn().Put(context.Background(), childKey(n), strings.Repeat("x", 500)); err != nil {
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
				out.Lock()
				binary.Write(os.Stdout, binary.LittleEndian, n)
				out.Unlock()
			}
		}()
	}
	io.Copy(io.Discard, os.Stdin)
	select {}
}

// The whole socket path is what a client with nothing but the endpoint needs.
func TestEndpointServesAnyClient(t *testing.T) {
	s := open(t, nil)
	network, address, _ := strings.Cut(s.Endpoint(), "://")
	conn, err := net.Dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint()}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s.SetLimits("a", Limits{Bytes: 100})
	if _, err := c.Put(t.Context(), key(t, s, "a", "k"), strings.Repeat("x", 200)); err == nil {
		t.Error("a client of its own is not bound by the quota")
	}
}

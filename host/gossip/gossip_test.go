// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = bytes.Repeat([]byte{7}, KeySize)

// start starts a host at an address of its own in 127.0.0.0/8.
func start(t *testing.T, name, ip string, change ...func(*Config)) *Gossip {
	t.Helper()
	cfg := Config{
		Name:         name,
		Installation: "k8s.example.com",
		Key:          key,
		Listen:       net.JoinHostPort(ip, "0"),
		Record:       Record{Address: net.JoinHostPort(ip, "443")},
		rejoin:       100 * time.Millisecond,
	}
	for _, f := range change {
		f(&cfg)
	}
	g, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// installation starts hosts a, b, … that have joined the first.
func installation(t *testing.T, n int, change ...func(*Config)) []*Gossip {
	t.Helper()
	var hosts []*Gossip
	for i := range n {
		g := start(t, string(rune('a'+i)), fmt.Sprintf("127.0.1.%d", i+1), change...)
		if i > 0 {
			join(t, g, hosts[0])
		}
		hosts = append(hosts, g)
	}
	for _, g := range hosts {
		for _, other := range hosts {
			sees(t, g, other.cfg.Name, func(h Host) bool { return h.State == Alive && h.Record.Address != "" })
		}
	}
	return hosts
}

func join(t *testing.T, g, other *Gossip) {
	t.Helper()
	if n, err := g.Join(t.Context(), []string{other.Address()}); n != 1 || err != nil {
		t.Fatalf("%s joined %d hosts: %v", g.cfg.Name, n, err)
	}
}

func find(g *Gossip, name string) (Host, bool) {
	for _, h := range g.Hosts() {
		if h.Name == name {
			return h, true
		}
	}
	return Host{}, false
}

// eventually waits for what has no bound of its own in these tests.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not after a minute: %s", what)
		}
	}
}

// sees waits until a host sees another in a certain way.
func sees(t *testing.T, g *Gossip, name string, is func(Host) bool) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s sees %s so", g.cfg.Name, name), func() bool {
		h, ok := find(g, name)
		return ok && is(h)
	})
}

func dropped(g *Gossip, why reason) int {
	return int(testutil.ToFloat64(g.report.drops.WithLabelValues(string(why))))
}

// tenants makes a record with so many tenants, of about 90 bytes each.
func tenants(n int) (all []Tenant) {
	for i := range n {
		all = append(all, Tenant{
			UID:   fmt.Sprintf("0b0cbb9e-30f1-4a6f-9cd2-%012d", i),
			Names: []string{fmt.Sprintf("tenant-%d.k8s.example.com", i)},
			Ready: i%2 == 0,
		})
	}
	return all
}

// Gossip alone does it: push/pull would hide what it misses.
func TestRecordsSpread(t *testing.T) {
	var changes atomic.Int64
	change := func(c *Config) {
		c.Changed = func() { changes.Add(1) }
		c.pushPull = time.Hour
	}
	hosts := installation(t, 5, change)
	for _, n := range []int{1, 1200, 0} {
		want := Record{
			Address: "127.0.1.2:443", PeerAddress: "127.0.1.2:2380", Version: "v1.2.3", Role: RoleVoter,
			Tenants: tenants(n), Load: Load{CPU: 1500, Cores: 2, MemoryUsed: 1 << 30, MemoryTotal: 4 << 30}, Draining: true,
		}
		if body, err := want.encode(); err != nil || n == 1200 && len(body) < 100<<10 {
			t.Fatalf("%d tenants make %d bytes: %v", n, len(body), err)
		}
		before := changes.Load()
		if err := hosts[1].Update(want); err != nil {
			t.Fatal(err)
		}
		for _, g := range hosts {
			sees(t, g, "b", func(h Host) bool { return reflect.DeepEqual(h.Record, want) })
		}
		eventually(t, "the others are told", func() bool { return changes.Load() >= before+4 })
	}
	// Who comes later hears of all.
	late := start(t, "late", "127.0.1.9", change)
	join(t, late, hosts[4])
	for _, g := range hosts {
		sees(t, late, g.cfg.Name, func(h Host) bool { return h.State == Alive && h.Record.Address != "" })
		sees(t, g, "late", func(h Host) bool { return h.State == Alive && h.Record.Address == "127.0.1.9:443" })
	}
	for _, g := range hosts {
		for _, why := range reasons() {
			if n := dropped(g, why); n > 0 {
				t.Errorf("%s dropped %d for %s", g.cfg.Name, n, why)
			}
		}
	}
}

// Whatever order the last of many updates comes in, it is the one that stays.
func TestLastUpdateWins(t *testing.T) {
	hosts := installation(t, 3)
	for i := range 200 {
		if err := hosts[0].Update(Record{Address: "127.0.1.1:443", Version: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
	}
	for _, g := range hosts {
		sees(t, g, "a", func(h Host) bool { return h.Record.Version == "199" })
	}
}

func TestUpdateRefusesWhatOthersWould(t *testing.T) {
	g := start(t, "a", "127.0.1.1")
	was := g.Hosts()
	for _, r := range []Record{
		{Address: "nowhere"},
		{Tenants: []Tenant{{UID: "A B"}}},
		{Tenants: tenants(20_000)},
	} {
		if err := g.Update(r); err == nil {
			t.Errorf("accepted %.100v", r)
		}
	}
	if !reflect.DeepEqual(g.Hosts(), was) {
		t.Errorf("the record became %+v", g.Hosts())
	}
}

func TestLeftOrDead(t *testing.T) {
	hosts := installation(t, 4)
	if err := hosts[1].Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := hosts[1].Close(); err != nil {
		t.Fatal(err)
	}
	if err := hosts[2].Close(); err != nil { // without a word
		t.Fatal(err)
	}
	for _, g := range []*Gossip{hosts[0], hosts[3]} {
		sees(t, g, "b", func(h Host) bool {
			if h.State == Dead {
				t.Errorf("%s thinks that b died", g.cfg.Name)
			}
			return h.State != Alive
		})
		sees(t, g, "c", func(h Host) bool { return h.State == Dead && h.Record.Address == "127.0.1.3:443" })
		want := map[State]int{Alive: 2, Left: 1, Dead: 1}
		if got := g.view.count(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s counts %v, want %v", g.cfg.Name, got, want)
		}
		g.Forget("b")
		g.Forget("c")
		g.Forget("a") // lives
		if n := len(g.Hosts()); n != 2 {
			t.Errorf("%s still knows %v", g.cfg.Name, g.Hosts())
		}
	}
}

// A host that left and one that died are as before when they start again, whether
// or not their clock was set back meanwhile.
func TestHostsComeBack(t *testing.T) {
	for name, set := range map[string]time.Duration{"clock right": 0, "clock an hour behind": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			hosts := installation(t, 3)
			if err := hosts[1].Leave(t.Context()); err != nil {
				t.Fatal(err)
			}
			hosts[1].Close()
			hosts[2].Close()
			for i, host := range []string{"b", "c"} {
				sees(t, hosts[0], host, func(h Host) bool { return h.State != Alive })
				address := hosts[i+1].Address()
				g := start(t, host, "127.0.1.1", func(c *Config) {
					c.Listen = address
					c.Record = Record{Address: "127.0.1.9:443", Version: "v2"}
					c.now = func() time.Time { return time.Now().Add(set) }
				})
				join(t, g, hosts[0])
				sees(t, hosts[0], host, func(h Host) bool { return h.State == Alive && h.Record.Version == "v2" })
				if err := g.Update(Record{Version: "v3"}); err != nil {
					t.Fatal(err)
				}
				sees(t, hosts[0], host, func(h Host) bool { return h.Record.Version == "v3" })
			}
		})
	}
}

// A host that died may come back at another address, when it has been dead for long
// enough not to be taken for a second one of its name.
func TestHostComesBackElsewhere(t *testing.T) {
	quick := func(c *Config) { c.reclaim, c.pushPull = time.Millisecond, 100*time.Millisecond }
	hosts := installation(t, 3, quick)
	hosts[2].Close()
	for _, g := range hosts[:2] {
		sees(t, g, "c", func(h Host) bool { return h.State == Dead })
	}
	moved := start(t, "c", "127.0.1.9", quick)
	join(t, moved, hosts[0])
	for _, g := range hosts[:2] {
		sees(t, g, "c", func(h Host) bool {
			return h.State == Alive && h.Address == moved.Address() && h.Record.Address == "127.0.1.9:443"
		})
	}
}

// logs collects what a host logs.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *logs) to(c *Config) { c.Logger = slog.New(slog.NewTextHandler(l, nil)) }

func TestStrangersAreRefused(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*Config)
		says   string
		counts reason
	}{
		{"another key", func(c *Config) { c.Key = bytes.Repeat([]byte{8}, KeySize) }, "another key", wrongKey},
		{"another installation", func(c *Config) { c.Installation = "k8s.example.org" }, "another installation", wrongInstallation},
	} {
		t.Run(test.name, func(t *testing.T) {
			var seen logs
			hosts := installation(t, 2, seen.to)
			stranger := start(t, "stranger", "127.0.1.8", test.change)
			n, err := stranger.Join(t.Context(), []string{hosts[0].Address(), hosts[1].Address()})
			if n != 0 || err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("joined %d hosts: %v, want one that says %q", n, err, test.says)
			}
			// And by packet, unasked.
			at := netip.MustParseAddrPort(hosts[0].Address())
			if _, err := stranger.list.Ping("a", net.UDPAddrFromAddrPort(at)); err == nil {
				t.Error("a stranger's ping was answered")
			}
			eventually(t, "connection and packet are counted", func() bool { return dropped(hosts[0], test.counts) >= 2 })
			if !strings.Contains(seen.String(), "reason="+string(test.counts)) {
				t.Errorf("it is not in the log:\n%s", seen.String())
			}
			for _, g := range append(hosts, stranger) {
				for _, h := range g.Hosts() {
					if (h.Name == "stranger") != (g == stranger) {
						t.Errorf("%s knows %s", g.cfg.Name, h.Name)
					}
				}
			}
		})
	}
}

func TestLaterHostOfANameIsRefused(t *testing.T) {
	for name, set := range map[string]time.Duration{"later": time.Hour, "later, by a clock that is behind": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			hosts := installation(t, 3)
			for _, by := range hosts { // the first of the name among them
				second := start(t, "a", "127.0.1.8", func(c *Config) {
					c.now = func() time.Time { return time.Now().Add(set) }
				})
				_, err := second.Join(t.Context(), []string{by.Address()})
				if !errors.Is(err, ErrNameTaken) || !strings.Contains(err.Error(), hosts[0].Address()) {
					t.Errorf("joined by %s: %v", by.cfg.Name, err)
				}
				if _, again := second.Join(t.Context(), []string{by.Address()}); !errors.Is(again, ErrNameTaken) {
					t.Errorf("joined by %s again: %v", by.cfg.Name, again)
				}
			}
			if err := hosts[0].Update(Record{Address: "127.0.1.1:443", Version: "still me"}); err != nil {
				t.Fatal(err)
			}
			for _, g := range hosts {
				sees(t, g, "a", func(h Host) bool {
					return h.State == Alive && h.Address == hosts[0].Address() && h.Record.Version == "still me"
				})
			}
		})
	}
}

// The only host of an installation is not disturbed by one that mistakes its name.
func TestFirstOfTwoKeepsItsName(t *testing.T) {
	first := start(t, "a", "127.0.1.1")
	second := start(t, "a", "127.0.1.2")
	if _, err := second.Join(t.Context(), []string{first.Address()}); !errors.Is(err, ErrNameTaken) {
		t.Errorf("the second joined: %v", err)
	}
	eventually(t, "the first counts it", func() bool { return dropped(first, conflict) > 0 })
	third := start(t, "c", "127.0.1.3")
	join(t, third, first)
	sees(t, third, "a", func(h Host) bool { return h.State == Alive && h.Address == first.Address() })
}

// Each side is dead to the other, and goes on; when they meet again they know what
// the other said meanwhile, without anybody calling Join.
func TestPartitionHeals(t *testing.T) {
	var island atomic.Pointer[[]string] // addresses cut off from all others
	hosts := make([]*Gossip, 4)
	for i := range hosts {
		ip := fmt.Sprintf("127.0.1.%d", i+1)
		inside := func(addr string) bool {
			cut := island.Load()
			return cut != nil && slices.ContainsFunc(*cut, func(ip string) bool { return strings.HasPrefix(addr, ip+":") })
		}
		hosts[i] = start(t, string(rune('a'+i)), ip, func(c *Config) {
			c.cut = func(to string) bool { return inside(to) != inside(ip+":") }
		})
		if i > 0 {
			join(t, hosts[i], hosts[0])
		}
	}
	all := func(is func(from, to int, h Host) bool) {
		t.Helper()
		for i, g := range hosts {
			for k, other := range hosts {
				sees(t, g, other.cfg.Name, func(h Host) bool { return is(i, k, h) })
			}
		}
	}
	all(func(_, _ int, h Host) bool { return h.State == Alive && h.Record.Address != "" })

	island.Store(&[]string{"127.0.1.1", "127.0.1.2"})
	all(func(from, to int, h Host) bool { return (h.State == Alive) == (from/2 == to/2) })
	for i, g := range hosts {
		if err := g.Update(Record{Version: fmt.Sprintf("v%d", i)}); err != nil {
			t.Fatal(err)
		}
	}
	island.Store(nil)
	all(func(_, to int, h Host) bool { return h.State == Alive && h.Record.Version == fmt.Sprintf("v%d", to) })
}

// What anybody on the network can send.
func TestGarbageIsDropped(t *testing.T) {
	var seen logs
	g := start(t, "a", "127.0.1.1", seen.to)
	label := append([]byte{244, byte(len(g.cfg.Installation))}, g.cfg.Installation...)
	labelled := func(s string) []byte { return append(slices.Clone(label), s...) }
	huge := labelled("\x0a\xff\xff\xff\xff" + strings.Repeat("x", 1<<10))
	total := 0
	for _, data := range [][]byte{
		{0}, {244}, {244, 0}, {244, 200, 1}, bytes.Repeat([]byte{1}, 1400), []byte("GET / HTTP/1.1\r\n\r\n"),
		labelled(""), labelled("\x00"), labelled("\x01"), labelled("\x09"), labelled("\x0a"), labelled("\x0a\x00\x00\x00\x00"),
		labelled("\x01" + strings.Repeat("x", 60)), labelled("\x06\xff\xff"), huge,
	} {
		for _, network := range []string{"udp", "tcp"} {
			conn, err := net.Dial(network, g.Address())
			if err != nil {
				t.Fatal(err)
			}
			conn.Write(data)
			if tcp, ok := conn.(*net.TCPConn); ok {
				tcp.CloseWrite()
				io.Copy(io.Discard, conn)
			}
			conn.Close()
			total++
		}
	}
	sum := func() (n int) {
		for _, why := range reasons() {
			n += dropped(g, why)
		}
		return n
	}
	// A TCP connection that ends inside a message is no more than that.
	eventually(t, "most is counted", func() bool { return sum() >= total/2+1 })
	for _, why := range []reason{wrongKey, wrongInstallation, malformed, tooLarge} {
		if dropped(g, why) == 0 {
			t.Errorf("nothing is counted as %s", why)
		}
	}
	other := start(t, "b", "127.0.1.2")
	join(t, other, g)
	sees(t, g, "b", func(h Host) bool { return h.Record.Address != "" })
}

func TestDropsAreLoggedOnceASecond(t *testing.T) {
	var seen logs
	var cfg Config
	seen.to(&cfg)
	r := newReport(cfg.Logger)
	began := time.Now()
	for range 10_000 {
		r.memberlistLogger().Printf("[ERR] memberlist: Decrypt packet failed: No installed keys could decrypt the message from=1.2.3.4")
	}
	lines := strings.Count(seen.String(), "\n")
	if most := 1 + int(time.Since(began)/time.Second); lines < 1 || lines > most {
		t.Errorf("%d lines, want 1 to %d:\n%.300s", lines, most, seen.String())
	}
	if n := testutil.ToFloat64(r.drops.WithLabelValues(string(wrongKey))); n != 10_000 {
		t.Errorf("counted %v", n)
	}
}

func TestLogLevels(t *testing.T) {
	var seen logs
	r := newReport(slog.New(slog.NewTextHandler(&seen, &slog.HandlerOptions{Level: slog.LevelDebug})))
	l := r.memberlistLogger()
	for line, want := range map[string]string{
		"[DEBUG] memberlist: Stream connection":   "level=DEBUG msg=\"Stream connection\" source=memberlist",
		"[INFO] memberlist: Suspect b has failed": "level=INFO msg=\"Suspect b has failed\"",
		"[WARN] memberlist: Refuting":             "level=WARN msg=Refuting",
		"[ERR] memberlist: Failed to send gossip": "level=WARN msg=\"Failed to send gossip\"",
		"[ERROR] memberlist: other":               "level=WARN msg=other",
		"no prefix":                               "level=INFO msg=\"no prefix\"",
	} {
		l.Print(line)
		if !strings.Contains(seen.String(), want) {
			t.Errorf("%q is not logged as %q:\n%s", line, want, seen.String())
		}
	}
	l.Print("[INFO] memberlist: Suspect label.malformed has failed, no acks received")
	for _, why := range reasons() {
		if n := testutil.ToFloat64(r.drops.WithLabelValues(string(why))); n != 0 {
			t.Errorf("%v counted as %s", n, why)
		}
	}
}

// One address can take a part of the connections, and gets it back.
func TestConnectionsAreBounded(t *testing.T) {
	g := start(t, "a", "127.0.1.1")
	var open []net.Conn
	for range maxStreamsPerSource + 5 {
		conn, err := net.Dial("tcp", g.Address())
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, conn)
	}
	eventually(t, "five too many are counted", func() bool { return dropped(g, tooMany) == 5 })
	for _, conn := range open {
		conn.Close()
	}
	other := start(t, "b", "127.0.0.1") // the same source
	eventually(t, "there is room again", func() bool {
		n, _ := other.Join(t.Context(), []string{g.Address()})
		return n == 1
	})
}

// What only a host could send: its neighbours may be of another version, or broken.
func TestBadMessagesAreDropped(t *testing.T) {
	hosts := installation(t, 2)
	g, b := hosts[0], hosts[1]
	epoch := time.Now().Add(time.Hour).UnixNano()
	record := func(address, body string) string {
		return fmt.Sprintf(`{"f":"b","r":{"n":"b","a":%q,"e":%d,"s":1,"b":%s}}`, address, epoch, body)
	}
	many := strings.TrimSuffix(strings.Repeat(`"b",`, MaxHosts+1), ",")
	for _, test := range []struct {
		data string
		why  reason
	}{
		{"", malformed},
		{"x", malformed},
		{`{}`, malformed},
		{`{"f":"-"}`, malformed},
		{`{"f":"` + strings.Repeat("a", 300) + `"}`, malformed},
		{`{"f":"b","w":[` + many + `]}`, malformed},
		{`{"f":"b","d":[{"n":"B!","a":"127.0.0.1:1","e":1}]}`, malformed},
		{`{"f":"b","d":[{"n":"b","a":"127.0.0.1","e":1}]}`, malformed},
		{`{"f":"b","d":[{"n":"b","a":"127.0.0.1:1","e":0}]}`, malformed},
		{`{"f":"b","d":[{"n":"b","a":"127.0.0.1:1","e":9223372036854775807}]}`, malformed},
		{`{"f":"b","d":[{"n":"b","a":"127.0.0.1:1","e":1}]}`, conflict},
		{`{"f":"b","d":[{"n":"a","a":"127.0.0.1:1","e":1}]}`, conflict},
		{strings.Repeat(" ", maxMessage+1), tooLarge},
		{record("127.0.0.1:1", "{}"), conflict},
		{record(b.Address(), `"x"`), malformed},
		{record(b.Address(), `{"address":"x"}`), malformed},
		{record(b.Address(), `{"version":"\u001b[31m"}`), malformed},
		{record(b.Address(), `{"load":{"cpu":-1}}`), malformed},
		{record(b.Address(), `{"tenants":[{"uid":""}]}`), malformed},
		{record(b.Address(), `{"tenants":[{"uid":"u","names":["*.example.com"]}]}`), malformed},
		{record(b.Address(), `{"x":"`+strings.Repeat("x", MaxRecord)+`"}`), tooLarge},
	} {
		before := dropped(g, test.why)
		g.receive([]byte(test.data))
		if n := dropped(g, test.why) - before; n != 1 {
			t.Errorf("%.100s counts %d for %s", test.data, n, test.why)
		}
	}
	for _, nobody := range []string{
		`{"f":"b","d":[{"n":"nobody","a":"127.0.0.1:1","e":1}]}`,
		`{"f":"nobody","w":["a"]}`,
		`{"f":"b","w":["nobody"]}`,
		fmt.Sprintf(`{"f":"b","r":{"n":"a","a":%q,"e":%d,"s":1,"b":{"version":"forged"}}}`, g.Address(), epoch),
		`{"f":"b","later":"version"}`,
	} {
		g.receive([]byte(nobody))
	}
	for _, h := range g.Hosts() {
		if h.Record.Version != "" || h.State != Alive || !strings.HasSuffix(h.Record.Address, ":443") {
			t.Errorf("%s became %+v", h.Name, h)
		}
	}
	// And what a newer version adds is no fault: in a message, a digest, what is around a
	// record and in it. Others get the record as its host wrote it.
	const newer = `{"address":"127.0.1.2:443","version":"v9","role":"later","new":{"x":1},"tenants":[{"uid":"u","new":1}],"load":{"new":1}}`
	g.receive(fmt.Appendf(nil, `{"f":"b","new":1,"d":[{"n":"b","a":%q,"e":%d,"s":1,"new":[]}]}`, b.Address(), epoch))
	g.receive(fmt.Appendf(nil, `{"f":"b","new":1,"r":{"n":"b","a":%q,"e":%d,"s":1,"new":{},"b":%s}}`, b.Address(), epoch, newer))
	if h, _ := find(g, "b"); h.Record.Version != "v9" || h.Record.Role != "later" || len(h.Record.Tenants) != 1 {
		t.Errorf("b is %+v", h)
	}
	if _, found, _ := g.view.envelopes([]string{"b"}, "b"); len(found) != 1 || string(found[0].Body) != newer {
		t.Errorf("others get %+v", found)
	}
}

func TestConfigNamesEveryFault(t *testing.T) {
	_, err := Start(Config{Name: "A", Key: []byte("short"), Listen: "nowhere", Advertise: "0.0.0.0:1"})
	if err == nil {
		t.Fatal("it started")
	}
	for _, part := range []string{`name "A"`, "installation", "key must have 32 bytes, has 5", `listen address "nowhere"`, `advertise address "0.0.0.0:1"`} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in: %v", part, err)
		}
	}
	_, err = Start(Config{Name: "a", Installation: "i", Key: key})
	if err == nil || !strings.Contains(err.Error(), "advertise address is missing") {
		t.Errorf("without an address: %v", err)
	}
	_, err = Start(Config{Name: "a", Installation: "i", Key: key, Listen: "[fe80::1%lo]:0"})
	if err == nil || !strings.Contains(err.Error(), "has a zone") {
		t.Errorf("on an address with a zone: %v", err)
	}
	g := start(t, "a", "127.0.1.1")
	_, err = Start(Config{Name: "b", Installation: "i", Key: key, Listen: g.Address()})
	if err == nil || !strings.Contains(err.Error(), "something else listens there") {
		t.Errorf("on a port in use: %v", err)
	}
}

func TestAdvertise(t *testing.T) {
	g := start(t, "a", "127.0.1.1", func(c *Config) { c.Listen, c.Advertise = ":0", "127.0.1.1" })
	other := start(t, "b", "127.0.1.2")
	join(t, other, g)
	sees(t, other, "a", func(h Host) bool { return strings.HasPrefix(h.Address, "127.0.1.1:") && h.Record.Address != "" })
}

func TestJoinNobody(t *testing.T) {
	g := start(t, "a", "127.0.1.1")
	if n, err := g.Join(t.Context(), []string{g.Address()}); n != 0 || err != nil {
		t.Errorf("joined itself: %d, %v", n, err)
	}
	ln, err := net.Listen("tcp", "127.0.1.7:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	if n, err := g.Join(t.Context(), []string{ln.Addr().String(), "no port"}); n != 0 || err == nil ||
		!strings.Contains(err.Error(), ln.Addr().String()) || !strings.Contains(err.Error(), `"no port" is not host:port`) {
		t.Errorf("joined %d hosts: %v", n, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := g.Join(ctx, []string{"127.0.1.7:1"}); !errors.Is(err, context.Canceled) {
		t.Errorf("joined with an ended context: %v", err)
	}
	g.Close()
	if _, err := g.Join(t.Context(), []string{"127.0.1.7:1"}); !errors.Is(err, errClosed) {
		t.Errorf("joined after Close: %v", err)
	}
	if err := g.Leave(t.Context()); err != nil {
		t.Errorf("left after Close: %v", err)
	}
}

func TestCollector(t *testing.T) {
	g := start(t, "a", "127.0.1.1")
	problems, err := testutil.CollectAndLint(g.Collector())
	if err != nil || len(problems) > 0 {
		t.Errorf("%v %v", problems, err)
	}
	if n := testutil.CollectAndCount(g.Collector()); n != 3+len(reasons()) {
		t.Errorf("%d series", n)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build scale

package host

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tenantd/tenantd/host/gossip"
	"github.com/tenantd/tenantd/host/placement"
	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/sni"
)

var (
	scaleHosts   = flag.Int("hosts", 100, "hosts to simulate")
	scaleTenants = flag.Int("tenants", 10_000, "tenants to simulate")
	scaleIdle    = flag.Duration("idle", 30*time.Second, "how long to watch hosts that have nothing to say")
)

// TestScale runs the placement, the gossip and the routing tables of many hosts and tenants in one process, without
// control planes, and logs what they take. `make scale-sim` gives it a network namespace of its own, so that the bytes
// on loopback are its own.
func TestScale(t *testing.T) {
	tenants := make([]placement.Tenant, *scaleTenants)
	for i := range tenants {
		tenants[i] = placement.Tenant{UID: fmt.Sprintf("0b0cbb9e-30f1-4a6f-9cd2-%012d", i), Name: fmt.Sprintf("tenant-%d", i)}
	}
	simulatePlacement(t, tenants)
	simulateGossip(t, tenants)
}

func hostOfNumber(i int) string { return fmt.Sprintf("host-%03d", i) }

// simulatePlacement places all tenants at once, then again, then without one host. It leaves them where they are.
func simulatePlacement(t *testing.T, tenants []placement.Tenant) {
	var hosts []placement.Host
	for i := range *scaleHosts {
		hosts = append(hosts, placement.Host{Name: hostOfNumber(i), Alive: true, Capacity: 64 << 30})
	}
	pass := func(what string) []placement.Decision {
		var decisions []placement.Decision
		cpu := cpuOf(func() { decisions = placement.Place(hosts, tenants) })
		t.Logf("placement of %d tenants on %d hosts, %s: %v of CPU", len(tenants), len(hosts), what, cpu)
		return decisions
	}
	on := map[string]int{}
	for i, d := range pass("all new") {
		tenants[i].Current = d.Hosts
		on[d.Hosts[0]]++
	}
	var counts []int
	for _, n := range on {
		counts = append(counts, n)
	}
	if least, most := slices.Min(counts), slices.Max(counts); len(on) != len(hosts) || most-least > 1 {
		t.Errorf("hosts have %d to %d tenants, and %d have some", least, most, len(on))
	}
	for _, d := range pass("all placed") {
		if d.Changed {
			t.Fatalf("a tenant moves for no reason: %+v", d)
		}
	}
	hosts[0].Alive = false
	moved := 0
	for i, d := range pass("one host dead") {
		if d.Changed {
			moved++
			if tenants[i].Current[0] != hosts[0].Name {
				t.Errorf("a tenant of another host moves: %+v", d)
			}
		}
	}
	if moved != on[hosts[0].Name] {
		t.Errorf("of %d tenants of a dead host %d move", on[hosts[0].Name], moved)
	}
}

// simulateGossip has hosts tell each other where the tenants are.
func simulateGossip(t *testing.T, tenants []placement.Tenant) {
	records := make([]gossip.Record, *scaleHosts)
	for i := range records {
		records[i] = gossip.Record{
			Address: fmt.Sprintf("127.1.%d.%d:443", i/200, i%200+1), PeerAddress: fmt.Sprintf("127.1.%d.%d:2380", i/200, i%200+1),
			Version: "v0.1.0", Role: gossip.RoleVoter, Load: gossip.Load{CPU: 1500, Cores: 16, MemoryUsed: 20 << 30, MemoryTotal: 64 << 30},
		}
	}
	for _, x := range tenants {
		i, err := strconv.Atoi(strings.TrimPrefix(x.Current[0], "host-"))
		if err != nil {
			t.Fatal(err)
		}
		records[i].Tenants = append(records[i].Tenants, gossip.Tenant{UID: x.UID, Names: []string{x.Name + ".k8s.example.com"}, Ready: true})
	}
	raw, err := json.Marshal(records[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("a host's record with %d tenants: %d bytes", len(records[0].Tenants), len(raw))

	heard := func(h gossip.Host) bool { return h.State == gossip.Alive && len(h.Record.Tenants) > 0 }
	before, sent := heap(), loopback(t)
	all := make([]*gossip.Gossip, *scaleHosts)
	cpu := cpuOf(func() {
		for i := range all {
			address, _, _ := net.SplitHostPort(records[i].Address)
			g, err := gossip.Start(gossip.Config{
				Name: hostOfNumber(i), Installation: "scale", Key: bytes.Repeat([]byte{7}, pki.KeySize),
				Listen: net.JoinHostPort(address, "7946"), Record: records[i],
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { g.Close() })
			all[i] = g
			if i > 0 {
				for again := range 10 { // as hosts do
					if _, err = g.Join(t.Context(), []string{all[again%i].Address()}); err == nil {
						break
					}
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		awaitAll(t, all, "has heard all", heard)
	})
	n := int64(len(all))
	t.Logf("%d hosts, one after the other, until each knows all: %d KiB sent and %v of CPU for each host", n, (loopback(t)-sent)/n>>10, cpu/time.Duration(n))
	t.Logf("memory of a host's gossip: %d KiB", (heap()-before)/n>>10)

	sent = loopback(t)
	cpu = cpuOf(func() { time.Sleep(*scaleIdle) })
	t.Logf("idle: %d bytes/s sent and %.2f ms/s of CPU for each host", (loopback(t)-sent)*int64(time.Second)/n/int64(*scaleIdle), float64(cpu.Microseconds())/1000/scaleIdle.Seconds()/float64(n))

	// One tenant comes up on one host.
	const name = "new.k8s.example.com"
	changed := records[1]
	changed.Tenants = append(slices.Clone(changed.Tenants), gossip.Tenant{UID: "new", Names: []string{name}, Ready: true})
	sent = loopback(t)
	began := time.Now()
	if err := all[1].Update(changed); err != nil {
		t.Fatal(err)
	}
	awaitAll(t, all, "has heard of the change", func(h gossip.Host) bool {
		return h.Name != hostOfNumber(1) || len(h.Record.Tenants) == len(changed.Tenants)
	})
	t.Logf("a change of one record, until all have it: %d KiB sent in all, %v", (loopback(t)-sent)>>10, time.Since(began).Round(10*time.Millisecond))

	// What each host makes of it, after each piece of news.
	s := &hosts{host: &Host{name: hostOfNumber(0)}, gossip: all[0]}
	awaitAll(t, all[:1], "is believed to live", heard) // a machine that is busy makes rumours
	routers := make([]*sni.Router, 32)                 // to tell a table from what comes and goes
	for i := range routers {
		routers[i] = sni.New(sni.Config{})
	}
	before = heap()
	cpu = cpuOf(func() {
		for _, router := range routers {
			names, members, _ := s.routes()
			if want := *scaleTenants + 1 - len(records[0].Tenants); len(names) != want || len(names[name].Addresses) != 1 {
				t.Errorf("%d names of other hosts are routed, want %d", len(names), want)
			}
			router.SetMembers(members)
			router.SetRemotes(names)
		}
	})
	rounds := int64(len(routers))
	t.Logf("a routing table of all tenants: %d KiB, %v of CPU each time that it is made", (heap()-before)/rounds>>10, (cpu / time.Duration(rounds)).Round(10*time.Microsecond))
	runtime.KeepAlive(routers)

	awaitAll(t, all, "is believed to live", heard)
	began = time.Now()
	if err := all[2].Close(); err != nil {
		t.Fatal(err)
	}
	left := slices.Delete(slices.Clone(all), 2, 3)
	awaitAll(t, left, "knows of the death", func(h gossip.Host) bool { return h.Name != hostOfNumber(2) || h.State == gossip.Dead })
	t.Logf("a host dies, until all others know: %v", time.Since(began).Round(100*time.Millisecond))
}

// awaitAll waits until all hosts see all hosts so.
func awaitAll(t *testing.T, all []*gossip.Gossip, what string, so func(gossip.Host) bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		lacking := slices.IndexFunc(all, func(g *gossip.Gossip) bool {
			hosts := g.Hosts()
			return len(hosts) < *scaleHosts || slices.ContainsFunc(hosts, func(h gossip.Host) bool { return !so(h) })
		})
		if lacking < 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not every host %s: %s does not", what, all[lacking].Address())
		}
	}
}

// cpuOf is the CPU time of the process while f runs.
func cpuOf(f func()) time.Duration {
	used := func() time.Duration {
		var usage unix.Rusage
		_ = unix.Getrusage(unix.RUSAGE_SELF, &usage) // it fails for bad arguments alone
		return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	}
	before := used()
	f()
	return used() - before
}

// heap is what is reachable, in bytes.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// loopback is how many bytes have been sent there, with headers.
func loopback(t *testing.T) int64 {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/net/dev")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if counts, ok := strings.CutPrefix(strings.TrimSpace(line), "lo:"); ok {
			n, err := strconv.ParseInt(strings.Fields(counts)[8], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("there is no loopback")
	return 0
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Command bench measures what tenant-proxy adds to a connection, beside HAProxy in
// the same place (TCP mode, Debian's package), and what it takes to hold idle ones.
//
//	go build -o bin/tenant-proxy ./cmd/tenant-proxy
//	go run ./worker/bench -tenant-proxy bin/tenant-proxy -o worker.json
//
// Client, proxies and host are processes of their own in one network namespace. The
// host is the real router in front of an HTTPS server. All ways are measured in
// turns, so that a machine that becomes slower does so for all.
package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/tenantd/tenantd/e2e/bench/results"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
	"github.com/tenantd/tenantd/worker/workertest/netns"
)

const (
	hostname  = "acme.test"
	hostPort  = "127.0.0.1:7443"
	haproxyAt = "172.20.0.1:7000"

	// settle is how long watches are open when memory is looked at.
	settle = 25 * time.Second

	// insideVariable is set in the namespace, and says what the process is there.
	insideVariable = "TENANT_PROXY_BENCH"
)

// way is one by which the client reaches the host.
type way struct {
	name    string
	address string
	client  *http.Client
	pid     int // of the proxy

	latencies []time.Duration
	down, up  []float64 // MB/s
	memory    int64     // bytes
	dial      []time.Duration
}

type options struct {
	program, haproxy, out string
	requests, rounds      int
	megabytes, idle       int
}

func main() {
	var o options
	flag.StringVar(&o.program, "tenant-proxy", "bin/tenant-proxy", "the program to measure")
	flag.StringVar(&o.haproxy, "haproxy", "haproxy", "the program to compare it with")
	flag.StringVar(&o.out, "o", "", "file for the results, as JSON")
	flag.IntVar(&o.requests, "requests", 20000, "round trips per way")
	flag.IntVar(&o.rounds, "rounds", 5, "turns")
	flag.IntVar(&o.megabytes, "megabytes", 1000, "data per turn, way and direction")
	flag.IntVar(&o.idle, "idle", 1000, "idle connections")
	flag.Parse()
	err := func() error {
		switch os.Getenv(insideVariable) {
		case "":
			return enter()
		case "host":
			return serve(flag.Arg(0))
		}
		return measure(o)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// enter runs this program again in a network namespace.
func enter() error {
	runtime.LockOSThread() // the death of this thread would end the other process
	cmd := again("client", os.Args[1:]...)
	cmd.SysProcAttr = netns.Attributes()
	cmd.Stdout = os.Stdout
	return cmd.Run()
}

func again(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), insideVariable+"="+role)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// serve is the host. It leaves the CA in a directory.
func serve(dir string) error {
	tenant := fakehost.NewTenant(hostname)
	if _, err := tenant.Listen(hostPort); err != nil {
		return err
	}
	temporary := filepath.Join(dir, "ca.tmp")
	if err := errors.Join(os.WriteFile(temporary, tenant.CA, 0o600), os.Rename(temporary, filepath.Join(dir, "ca.crt"))); err != nil {
		return err
	}
	select {}
}

func measure(o options) error {
	runtime.LockOSThread()
	lo, err := netlink.LinkByName("lo")
	if err := errors.Join(err, netlink.LinkSetUp(lo)); err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	dir, err := os.MkdirTemp("", "tenant-proxy-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var running []*exec.Cmd
	defer func() {
		for _, cmd := range running {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // it was killed
		}
	}()
	start := func(cmd *exec.Cmd) error {
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			return err
		}
		running = append(running, cmd)
		return nil
	}

	if err := start(again("host", dir)); err != nil {
		return err
	}
	ca, err := eventually(func() ([]byte, error) { return os.ReadFile(filepath.Join(dir, "ca.crt")) })
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)

	ways := []*way{{name: "direct", address: hostPort}}
	for i, carrier := range []string{"tls", "proxy2"} {
		file := config.Config{
			Hostname: hostname, Hosts: []string{hostPort}, CA: string(ca), Carrier: carrier, Port: uint16(6443 + i),
			HealthListen: "127.0.0.1:" + strconv.Itoa(10266+i), CacheDir: filepath.Join(dir, carrier),
			KubeletKubeconfig: filepath.Join(dir, "kubelet.conf"), LogLevel: "error",
		}
		file.SetDefaults()
		data, err := file.Marshal()
		if err != nil {
			return err
		}
		path := filepath.Join(dir, carrier+".yaml")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return err
		}
		cmd := exec.Command(o.program, "run", "--config", path)
		if err := start(cmd); err != nil {
			return fmt.Errorf("start tenant-proxy: %w", err)
		}
		if _, err := eventually(func() (any, error) {
			response, err := http.Get("http://" + file.HealthListen + "/readyz")
			if err == nil {
				response.Body.Close()
				if response.StatusCode != http.StatusOK {
					err = errors.New(response.Status)
				}
			}
			return nil, err
		}); err != nil {
			return fmt.Errorf("wait for tenant-proxy: %w", err)
		}
		ways = append(ways, &way{name: carrier, address: file.Endpoint().String(), pid: cmd.Process.Pid})
	}
	theirs := filepath.Join(dir, "haproxy.cfg")
	if err := os.WriteFile(theirs, fmt.Appendf(nil, `global
    maxconn 4000
defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
frontend pods
    bind %s
    default_backend hosts
backend hosts
    server host %s
`, haproxyAt, hostPort), 0o600); err != nil {
		return err
	}
	haproxy := exec.Command(o.haproxy, "-db", "-f", theirs)
	if err := start(haproxy); err != nil {
		return fmt.Errorf("start HAProxy (apt-get install haproxy): %w", err)
	}
	if _, err := eventually(func() (any, error) {
		conn, err := net.Dial("tcp", haproxyAt)
		if err == nil {
			conn.Close()
		}
		return nil, err
	}); err != nil {
		return fmt.Errorf("wait for HAProxy: %w", err)
	}
	ways = append(ways, &way{name: "haproxy", address: haproxyAt, pid: haproxy.Process.Pid})

	for _, w := range ways {
		w.client = &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, network, w.address)
			},
			TLSClientConfig:     &tls.Config{RootCAs: roots, ServerName: hostname},
			MaxIdleConnsPerHost: 2,
			WriteBufferSize:     64 << 10,
			ReadBufferSize:      64 << 10,
		}}
	}
	for _, step := range []func(options, []*way) error{holdIdle, handshakes, roundTrips, throughput} {
		if err := step(o, ways); err != nil {
			return err
		}
	}
	return report(o, ways)
}

func eventually[T any](try func() (T, error)) (T, error) {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		value, err := try()
		if err == nil || time.Now().After(deadline) {
			return value, err
		}
	}
}

func request(w *way, method, path string, body io.Reader) error {
	r, err := http.NewRequest(method, "https://"+hostname+path, body)
	if err != nil {
		return err
	}
	response, err := w.client.Do(r)
	if err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	return nil
}

// roundTrips sends small requests on an open connection.
func roundTrips(o options, ways []*way) error {
	for range o.rounds {
		for _, w := range ways {
			for i := range o.requests/o.rounds + 100 {
				start := time.Now()
				if err := request(w, http.MethodGet, "/whoami", nil); err != nil {
					return err
				}
				if i >= 100 {
					w.latencies = append(w.latencies, time.Since(start))
				}
			}
		}
	}
	return nil
}

// handshakes makes connections, up to the first answer.
func handshakes(o options, ways []*way) error {
	for range o.rounds {
		for _, w := range ways {
			for range 100 {
				w.client.CloseIdleConnections()
				start := time.Now()
				if err := request(w, http.MethodGet, "/whoami", nil); err != nil {
					return err
				}
				w.dial = append(w.dial, time.Since(start))
			}
		}
	}
	return nil
}

// throughput moves much data on one connection, in either direction.
func throughput(o options, ways []*way) error {
	bytes := int64(o.megabytes) * 1e6
	for range o.rounds {
		for _, w := range ways {
			start := time.Now()
			if err := request(w, http.MethodGet, "/bytes/"+strconv.FormatInt(bytes, 10), nil); err != nil {
				return err
			}
			w.down = append(w.down, float64(bytes)/1e6/time.Since(start).Seconds())
			start = time.Now()
			if err := request(w, http.MethodPost, "/swallow", io.LimitReader(zeros{}, bytes)); err != nil {
				return err
			}
			w.up = append(w.up, float64(bytes)/1e6/time.Since(start).Seconds())
		}
	}
	return nil
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// holdIdle opens watches that say nothing, each on a connection of its own.
func holdIdle(o options, ways []*way) error {
	for _, w := range ways {
		if w.pid == 0 {
			continue
		}
		transport := w.client.Transport.(*http.Transport).Clone()
		transport.DisableKeepAlives = true
		client := &http.Client{Transport: transport}
		var (
			opening sync.WaitGroup
			mu      sync.Mutex
			open    []io.Closer
			faults  []error
			places  = make(chan struct{}, 50)
		)
		for range o.idle {
			opening.Go(func() {
				places <- struct{}{}
				response, err := client.Get("https://" + hostname + "/watch") //nolint:bodyclose // below, all at once
				<-places
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					faults = append(faults, err)
				} else {
					open = append(open, response.Body)
				}
			})
		}
		opening.Wait()
		if err := errors.Join(faults...); err != nil {
			return fmt.Errorf("%s: open watches: %w", w.name, err)
		}
		// Long enough for what the handshakes needed to be gone.
		time.Sleep(settle)
		var err error
		if w.memory, err = resident(w.pid); err != nil {
			return err
		}
		for _, c := range open {
			c.Close()
		}
	}
	return nil
}

func resident(pid int) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := bytes.Cut(data, []byte("VmRSS:"))
	fields := strings.Fields(string(rest))
	if len(fields) == 0 {
		return 0, errors.New("the kernel does not tell VmRSS")
	}
	kib, err := strconv.ParseInt(fields[0], 10, 64)
	return kib << 10, err
}

func percentile[T cmp.Ordered](all []T, p int) T {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[min(len(sorted)*p/100, len(sorted)-1)]
}

func report(o options, ways []*way) error {
	us := func(d time.Duration) string { return fmt.Sprintf("%.1f", float64(d.Nanoseconds())/1e3) }
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "way\tround trip p50 µs\tp99 µs\tnew connection p50 µs\tdown MB/s\tup MB/s\tMiB idle\t")
	by := map[string]*way{}
	for _, w := range ways {
		by[w.name] = w
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%.0f\t%.0f\t%.1f\t\n", w.name, us(percentile(w.latencies, 50)), us(percentile(w.latencies, 99)),
			us(percentile(w.dial, 50)), percentile(w.down, 50), percentile(w.up, 50), float64(w.memory)/(1<<20))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if o.out == "" {
		return nil
	}
	direct, theirs := by["direct"], by["haproxy"]
	added := func(w *way) float64 {
		return float64((percentile(w.latencies, 50) - percentile(direct.latencies, 50)).Nanoseconds()) / 1e6
	}
	var rows []results.Row
	for _, carrier := range []string{"tls", "proxy2"} {
		w := by[carrier]
		rows = append(rows,
			results.Lower("tenant-proxy, "+carrier+": added to a request, p50", "ms", added(w), added(theirs), "in-cluster request on an open connection, beside a direct one; theirs is HAProxy in TCP mode in the same place"),
			results.Higher("tenant-proxy, "+carrier+": download", "MB/s", percentile(w.down, 50), percentile(theirs.down, 50), "TLS inside; theirs is HAProxy"),
			results.Higher("tenant-proxy, "+carrier+": upload", "MB/s", percentile(w.up, 50), percentile(theirs.up, 50), "TLS inside; theirs is HAProxy"),
			results.Lower("tenant-proxy, "+carrier+": memory", "MB", float64(w.memory)/1e6, float64(theirs.memory)/1e6, fmt.Sprintf("resident with %d idle watches; theirs is HAProxy", o.idle)))
	}
	return results.Write(o.out, rows)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e && bench

package workers

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/tenantd/tenantd/e2e/bench/results"
)

// figuresVariable names the file for the figures.
const figuresVariable = "TENANTD_FIGURES"

const (
	figureRounds = 9    // turns of tunnel and direct connection
	figureTrips  = 1000 // round trips in a turn, on one open exec
	figureExecs  = 20   // execs in a turn
	figureLogs   = 20   // readings of the log in a turn
	logLines     = 8000
	logLine      = 1000 // bytes
)

// TestFigures measures what `make bench-workers` reports of workers: how long a join takes,
// and what the tunnel costs beside a kubelet that is dialled directly. It asserts
// nothing but that all works.
func TestFigures(t *testing.T) {
	file := os.Getenv(figuresVariable)
	if file == "" {
		t.Fatalf("$%s names no file: run make bench-workers", figuresVariable)
	}
	l := newLab(t)
	h := l.newHost()
	c := h.add("acme")
	c.proxyInNamespaces()
	m := l.machine("w1")

	began := time.Now()
	c.installProxy("tls", m)
	installed := time.Since(began)
	began = time.Now()
	line := c.joinCommand(m)
	token := time.Since(began)
	m.must(line...)
	joined := time.Since(began)
	c.connect(m)
	c.awaitNodes(m)
	ready := time.Since(began)
	m.awaitTunnel()

	c.apply(fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: figures}, spec: {containers: [
  {name: main, image: %s, args: [spam, -lines=%d, -size=%d]}]}}`, testserverImage, logLines, logLine))
	c.kubectl("wait", "--for=condition=Ready", "pod/figures", "--timeout="+patience.String())
	through, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	through.QPS = -1
	// The same administrator, whom the kubelet asks the API server about once.
	direct := rest.CopyConfig(through)
	direct.Host, direct.ServerName = "https://"+m.address+":10250", ""
	ways := []*tunnelWay{
		{config: through, exec: "/api/v1/namespaces/default/pods/figures/exec?container=main&stdin=true&stdout=true", log: "/api/v1/namespaces/default/pods/figures/log"},
		{config: direct, exec: "/exec/default/figures/main?input=1&output=1", log: "/containerLogs/default/figures/main"},
	}
	eventually(t, "the log is complete", func() error {
		if n, err := ways[1].readLog(t.Context()); err != nil || n != logLines*logLine {
			return fmt.Errorf("it has %d bytes, %v", n, err)
		}
		return nil
	})
	for range figureRounds {
		for _, w := range ways {
			w.measure(t)
		}
	}

	milliseconds := func(d time.Duration) float64 { return d.Seconds() * 1000 }
	where := fmt.Sprintf("; tunnel against the kubelet dialled directly, in turns, %d rounds", figureRounds)
	spread := func(unit string, of func(*tunnelWay) []float64) string {
		ours, theirs := of(ways[0]), of(ways[1])
		return fmt.Sprintf(" (medians; ours %.2f to %.2f, theirs %.2f to %.2f %s)", slices.Min(ours), slices.Max(ours), slices.Min(theirs), slices.Max(theirs), unit)
	}
	trips := func(w *tunnelWay) []float64 { return w.trips }
	execs := func(w *tunnelWay) []float64 { return w.execs }
	logs := func(w *tunnelWay) []float64 { return w.logs }
	rows := []results.Row{
		results.Lower("join, token to node Ready", "s", ready.Seconds(), 0, fmt.Sprintf(
			"one worker with its images; of it tenantctl join-command %.2f s, kubeadm join until it returns %.2f s; installing tenant-proxy before it took %.2f s",
			token.Seconds(), (joined-token).Seconds(), installed.Seconds())),
		results.Lower("exec, round trip on an open session, p50", "ms", median(trips(ways[0])), median(trips(ways[1])), "64 bytes"+where+spread("ms", trips)),
		results.Lower("exec, from start to end, p50", "ms", median(execs(ways[0])), median(execs(ways[1])), "cat /etc/hostname"+where+spread("ms", execs)),
		results.Higher("logs, throughput", "MB/s", median(logs(ways[0])), median(logs(ways[1])), fmt.Sprintf("%d MB log, read %d times a round", logLines*logLine/1000000, figureLogs)+where+spread("MB/s", logs)),
	}
	for _, r := range rows {
		t.Logf("%-45s %10.3f %10.3f %s  ratio %.2f  %s", r.Name, r.Ours, r.Theirs, r.Unit, r.Ratio, r.Note)
	}
	t.Logf("exec adds %.2f ms", milliseconds(time.Duration((rows[1].Ours-rows[1].Theirs)*float64(time.Millisecond))))
	if err := results.Write(file, rows); err != nil {
		t.Fatal(err)
	}
}

// tunnelWay is one of the two ways to a kubelet.
type tunnelWay struct {
	config    *rest.Config
	exec, log string

	trips, execs []float64 // p50 of each turn, in ms
	logs         []float64 // MB/s of each turn
}

func (w *tunnelWay) measure(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	in, feed := io.Pipe()
	answers, out := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- w.stream(ctx, in, out, "cat") }()
	message, answer := bytes.Repeat([]byte("x"), 64), make([]byte, 64)
	var trips []float64
	for range figureTrips {
		began := time.Now()
		if _, err := feed.Write(message); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(answers, answer); err != nil {
			t.Fatal(err)
		}
		trips = append(trips, time.Since(began).Seconds()*1000)
	}
	feed.Close()
	if err := <-ended; err != nil {
		t.Fatalf("exec of cat: %v", err)
	}

	var execs []float64
	for range figureExecs {
		began := time.Now()
		if err := w.stream(ctx, nil, io.Discard, "cat", "/etc/hostname"); err != nil {
			t.Fatalf("exec: %v", err)
		}
		execs = append(execs, time.Since(began).Seconds()*1000)
	}

	began, read := time.Now(), int64(0)
	for range figureLogs {
		n, err := w.readLog(ctx)
		if err != nil {
			t.Fatalf("logs: %v", err)
		}
		read += n
	}
	w.logs = append(w.logs, float64(read)/1e6/time.Since(began).Seconds())
	w.trips, w.execs = append(w.trips, median(trips)), append(w.execs, median(execs))
}

// stream runs a command in the pod.
func (w *tunnelWay) stream(ctx context.Context, in io.Reader, out io.Writer, command ...string) error {
	u, err := url.Parse(w.config.Host + w.exec)
	if err != nil {
		return err
	}
	query := u.Query()
	if in == nil {
		query.Del("stdin")
		query.Del("input")
	}
	query["command"] = command
	u.RawQuery = query.Encode()
	executor, err := remotecommand.NewSPDYExecutor(w.config, "POST", u)
	if err != nil {
		return err
	}
	return executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: out})
}

// readLog reads the whole log of the pod and returns its length.
func (w *tunnelWay) readLog(ctx context.Context) (int64, error) {
	client, err := kubernetes.NewForConfig(w.config)
	if err != nil {
		return 0, err
	}
	body, err := client.RESTClient().Get().AbsPath(w.log).Stream(ctx)
	if err != nil {
		return 0, err
	}
	defer body.Close()
	return io.Copy(io.Discard, body)
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

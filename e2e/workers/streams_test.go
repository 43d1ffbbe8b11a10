// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tenantd/tenantd/e2e/proc"
)

// spammer is a pod on a node that writes numbered lines.
func spammer(name, node string, args ...string) string {
	return `
apiVersion: v1
kind: Pod
metadata: {name: ` + name + `}
spec:
  nodeName: ` + node + `
  terminationGracePeriodSeconds: 1
  tolerations: [{operator: Exists}]
  containers: [{name: spam, image: ` + testserverImage + `, args: [spam, ` + strings.Join(args, ", ") + `]}]
`
}

// testStreams has kubectl talk with a pod on each node, all at the same time.
func testStreams(t *testing.T, c *cluster, workers ...*machine) {
	pods, err := c.pods("web", len(workers))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range workers {
		c.apply(spammer("short-"+m.name, m.name, "-every=20ms"))
		c.apply(spammer("long-"+m.name, m.name, "-lines=20000", "-size=400"))
	}
	for _, m := range workers {
		c.kubectl("wait", "--for=condition=Ready", "--timeout="+patience.String(), "pod/short-"+m.name, "pod/long-"+m.name)
		web := pods[m.name].Name
		for name, test := range map[string]func(t *testing.T, c *cluster){
			"Exec":        func(t *testing.T, c *cluster) { testExec(t, c, web) },
			"Follow":      func(t *testing.T, c *cluster) { testFollow(t, c, "short-"+m.name) },
			"Logs":        func(t *testing.T, c *cluster) { testLogs(t, c, "long-"+m.name, 20000, 400) },
			"PortForward": func(t *testing.T, c *cluster) { testPortForward(t, c, web) },
			"Copy":        func(t *testing.T, c *cluster) { testCopy(t, c, web) },
			"Attach":      func(t *testing.T, c *cluster) { testAttach(t, c, m) },
			"Proxy":       func(t *testing.T, c *cluster) { testProxy(t, c, web, m) },
		} {
			t.Run(m.name+name, func(t *testing.T) {
				t.Parallel()
				test(t, c.within(t))
			})
		}
	}
}

// noise is what nothing compresses and nobody guesses.
func noise(t *testing.T, size int) []byte {
	t.Helper()
	b := make([]byte, size)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return b
}

// testExec wants a command's output, error output and exit code, and its input
// passed through it.
func testExec(t *testing.T, c *cluster, pod string) {
	r := execute(t, c.kubectlCommand("exec", pod, "--", "sh", "-c", "hostname=$(cat /etc/hostname); echo $hostname; echo bad >&2; exit 7"))
	if r.stdout != pod+"\n" || !strings.HasPrefix(r.stderr, "bad\n") || r.code != 7 {
		t.Errorf("exec printed %q and %q and exited with %d", r.stdout, r.stderr, r.code)
	}
	data := noise(t, 5<<20)
	if got := execute(t, c.kubectlCommand("exec", "-i", pod, "--", "cat"), string(data)).must(t, "kubectl exec -i"); got != string(data) {
		t.Errorf("cat was given %d bytes, and gave back %d other ones", len(data), len(got))
	}
}

// follow is a command whose output is read while it runs.
type follow struct {
	t     testing.TB
	cmd   *exec.Cmd
	lines *bufio.Reader
	err   proc.Log
}

// follow starts kubectl to read its output line by line. It is killed when the
// test ends, or when it goes on for longer than anything may take.
func (c *cluster) follow(args ...string) *follow {
	c.t.Helper()
	f := &follow{t: c.t, cmd: c.kubectlCommand(args...)}
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	f.lines = bufio.NewReader(out)
	f.cmd.Stderr = &f.err
	if err := f.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	late := time.AfterFunc(2*patience, func() { f.cmd.Process.Kill() })
	c.t.Cleanup(func() {
		late.Stop()
		f.end()
	})
	return f
}

// line is the next line.
func (f *follow) line() string {
	f.t.Helper()
	line, err := f.lines.ReadString('\n')
	if err != nil {
		f.end()
		f.t.Fatalf("%s ended: %v after %q\n%s", strings.Join(f.cmd.Args[3:], " "), err, line, f.err.String())
	}
	return strings.TrimSuffix(line, "\n")
}

// end ends it; again is no harm.
func (f *follow) end() {
	f.cmd.Process.Kill()
	f.cmd.Wait()
}

// number is the number of a spammer's line.
func number(t testing.TB, line string) int {
	t.Helper()
	var n int
	if _, err := fmt.Sscanf(line, "line %d", &n); err != nil || !strings.HasSuffix(line, ".") {
		t.Fatalf("the log has a broken line: %q", line)
	}
	return n
}

// testFollow reads lines as they are written.
func testFollow(t *testing.T, c *cluster, pod string) {
	f := c.follow("logs", "-f", "--tail=1", pod)
	first := number(t, f.line())
	for n := first + 1; n <= first+200; n++ {
		if got := number(t, f.line()); got != n {
			t.Fatalf("line %d came after line %d", got, n-1)
		}
	}
}

// testLogs reads a long log that is complete.
func testLogs(t *testing.T, c *cluster, pod string, lines, size int) {
	eventually(t, "the log of "+pod+" is written", func() error {
		if last := c.kubectl("logs", "--tail=1", pod); number(t, last[:len(last)-1]) != lines {
			return fmt.Errorf("its last line is %s", last)
		}
		return nil
	})
	log := c.kubectl("logs", pod)
	if len(log) != lines*(size) {
		t.Errorf("the log has %d bytes, want %d", len(log), lines*size)
	}
	n := 0
	for line := range strings.Lines(log) {
		if n++; number(t, line[:len(line)-1]) != n {
			t.Fatalf("line %d is %q", n, line)
		}
	}
}

// testPortForward sends through several connections at once.
func testPortForward(t *testing.T, c *cluster, pod string) {
	f := c.follow("port-forward", "pod/"+pod, ":8080")
	var port int
	if _, err := fmt.Sscanf(f.line(), "Forwarding from 127.0.0.1:%d ", &port); err != nil {
		t.Fatal(err)
	}
	url := fmt.Sprintf("http://127.0.0.1:%d/echo", port)
	client := &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	var all sync.WaitGroup
	for range 8 {
		data := noise(t, 1<<20)
		all.Go(func() {
			resp, err := client.Post(url, "application/octet-stream", bytes.NewReader(data))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			got, err := io.ReadAll(resp.Body)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes were sent, %d came back (%v)", len(data), len(got), err)
			}
		})
	}
	all.Wait()
}

// testCopy copies a file to the pod and back.
func testCopy(t *testing.T, c *cluster, pod string) {
	dir := t.TempDir()
	there, back := filepath.Join(dir, "there"), filepath.Join(dir, "back")
	data := noise(t, 8<<20)
	if err := os.WriteFile(there, data, 0o600); err != nil {
		t.Fatal(err)
	}
	c.kubectl("cp", there, pod+":/tmp/copy")
	c.kubectl("cp", pod+":/tmp/copy", back)
	if got, err := os.ReadFile(back); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes were copied to the pod, %d back (%v)", len(data), len(got), err)
	}
}

// testAttach writes to a container's input and reads its output.
func testAttach(t *testing.T, c *cluster, m *machine) {
	pod := "cat-" + m.name
	c.apply(`
apiVersion: v1
kind: Pod
metadata: {name: ` + pod + `}
spec:
  nodeName: ` + m.name + `
  restartPolicy: Never
  containers: [{name: cat, image: ` + testserverImage + `, command: [cat], stdin: true, stdinOnce: true}]
`)
	c.kubectl("wait", "--for=condition=Ready", "--timeout="+patience.String(), "pod/"+pod)
	const said = "one\ntwo\n"
	if got := execute(t, c.kubectlCommand("attach", "-i", "-q", pod), said).must(t, "kubectl attach"); got != said {
		t.Errorf("cat was given %q, and gave back %q", said, got)
	}
	// That its input has ended has reached it, too.
	c.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "--timeout="+patience.String(), "pod/"+pod)
	c.kubectl("delete", "pod", pod)
}

// testProxy has the API server ask a kubelet and a pod.
func testProxy(t *testing.T, c *cluster, pod string, m *machine) {
	if got := c.kubectl("get", "--raw", "/api/v1/namespaces/default/pods/"+pod+":8080/proxy/hostname"); got != pod {
		t.Errorf("pod %s says its name is %q", pod, got)
	}
	if got := c.kubectl("get", "--raw", "/api/v1/nodes/"+m.name+"/proxy/pods"); !strings.Contains(got, `"`+pod+`"`) {
		t.Errorf("the kubelet on %s does not know of pod %s", m.name, pod)
	}
}

// together runs a function at the same time as the test, until the test ends or
// the returned function is called.
func together(t testing.TB, run func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { run(ctx) })
	stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(stop)
	return stop
}

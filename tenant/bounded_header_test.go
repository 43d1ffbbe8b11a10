// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"bytes"
	"io"
	"net/http"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"
)

// Whoever answers an upgrade cannot fill the memory with a header that has no end.
func TestEndlessHeader(t *testing.T) {
	w := newWorker(t)
	w.serve(func(http.ResponseWriter, *http.Request) {})
	w.register("egress.test", "v1")
	const path = "/apis/egress.test/v1/stream"
	w.eventually("the API answers", func() error { _, err := w.get(path); return err })

	const most = 512 << 20
	sent := make(chan int, 1)
	line := append(append([]byte("X-More: "), bytes.Repeat([]byte("a"), 4<<10)...), "\r\n"...)
	w.serve(func(rw http.ResponseWriter, req *http.Request) {
		if req.Header.Get("Upgrade") == "" {
			return
		}
		conn, _, err := rw.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\n")
		n := 0
		for n < most && err == nil {
			var written int
			written, err = conn.Write(line)
			n += written
		}
		sent <- n
	})
	e, err := remotecommand.NewSPDYExecutor(w.config, "POST", w.client.CoreV1().RESTClient().Post().AbsPath(path).URL())
	if err != nil {
		t.Fatal(err)
	}
	if err := e.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: io.Discard}); err == nil {
		t.Error("an upgrade whose header has no end succeeded")
	} else {
		t.Log(err)
	}
	select {
	case n := <-sent:
		if n >= most {
			t.Errorf("all %d bytes of a header were read", n)
		}
		t.Logf("%d bytes were taken", n)
	case <-time.After(time.Minute):
		t.Fatal("nothing has been asked to upgrade")
	}
}

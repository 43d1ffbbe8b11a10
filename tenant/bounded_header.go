// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"fmt"
	"net"
	"runtime"
)

const (
	// maxHeader bounds the header of an answer, with much room: Go's own clients take
	// 10 MiB, a kubelet's answer to an upgrade is 200 bytes.
	maxHeader = 1 << 20
	// headerStep is after how many bytes it is looked at who reads them.
	headerStep = 128 << 10
)

// boundedHeader is a connection into a cluster. Upstream reads the answers to upgrades
// (exec, attach, port-forward, proxied ones) with http.ReadResponse, straight from the
// connection and in four places, none of which bounds the header or lets anything be
// put in between: whoever answers with a header without an end would have all memory.
// Below TLS nothing tells a header from what follows it, but who is reading does.
//
// Reads are not safe for concurrent use, like those of every reader of answers.
type boundedHeader struct {
	net.Conn
	read   int // bytes since it was last looked at
	header int // bytes of a header, as far as has been seen
}

// Read implements net.Conn.
func (c *boundedHeader) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.read += n; c.read < headerStep {
		return n, err
	}
	c.header += c.read
	c.read = 0
	if !readsHeader() {
		c.header = 0
	} else if c.header > maxHeader {
		c.Close()
		return 0, fmt.Errorf("the header of the answer of %s has more than %d bytes", c.RemoteAddr(), maxHeader)
	}
	return n, err
}

// readsHeader reports whether a response's header is being read by those who called.
func readsHeader() bool {
	var callers [64]uintptr
	frames := runtime.CallersFrames(callers[:runtime.Callers(2, callers[:])])
	for {
		frame, more := frames.Next()
		if frame.Function == "net/http.ReadResponse" {
			return true
		}
		if !more {
			return false
		}
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bytes"
	"slices"
	"strings"
	"sync"
)

// Log keeps what a process writes. The zero value is ready for use.
type Log struct {
	// Without keeps lines with this text out of Tail, if it is not empty.
	Without string

	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// String is all that was written as yet.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// Tail returns the last n lines.
func (l *Log) Tail(n int) string {
	lines := strings.Split(strings.TrimRight(l.String(), "\n"), "\n")
	if l.Without != "" {
		lines = slices.DeleteFunc(lines, func(line string) bool { return strings.Contains(line, l.Without) })
	}
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

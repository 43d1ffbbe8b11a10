// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"errors"
	"fmt"
	"runtime/debug"
)

// part is a part of a control plane that runs in a goroutine of its own. Any
// number of goroutines may wait for its channels.
type part struct {
	name    string
	started chan struct{} // closed when it works
	ended   chan struct{} // closed when it has returned
	err     error         // why it ended; to be read after ended is closed
}

// newPart runs f, which calls started at most once. A panic, or upstream's way of
// ending a process, is an error of the part.
func newPart(name string, f func(started func()) error) *part {
	p := &part{name: name, started: make(chan struct{}), ended: make(chan struct{})}
	go func() {
		defer close(p.ended)
		p.err = errors.New("it gave up; the log above says why") // runtime.Goexit, see PrepareProcess
		defer func() {
			if r := recover(); r != nil {
				p.err = fmt.Errorf("%s panicked: %v\n%s", name, r, debug.Stack())
			}
		}()
		p.err = f(func() { close(p.started) })
	}()
	return p
}

// endedError says that the part has ended before its time, and why.
func (p *part) endedError() error {
	if p.err == nil {
		return fmt.Errorf("%s ended: no reason given", p.name)
	}
	return fmt.Errorf("%s ended: %w", p.name, p.err)
}

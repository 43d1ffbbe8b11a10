// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"sync"
)

// gate lets writes pass until it is shut, then holds them outside. etcd gives a request 7 s from the moment it sees
// it; a request that waits here instead is late but not refused. The zero value is open.
type gate struct {
	mu      sync.Mutex
	shut    chan struct{} // nil while open; closed on reopening
	drained chan struct{} // not nil while shutting; closed when inside reaches 0
	inside  int
}

// enter waits until the gate is open. A nil error must be paired with leave.
func (g *gate) enter(ctx context.Context) error {
	g.mu.Lock()
	for g.shut != nil {
		shut := g.shut
		g.mu.Unlock()
		select {
		case <-shut:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		g.mu.Lock()
	}
	g.inside++
	g.mu.Unlock()
	return nil
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
	if g.inside == 0 && g.drained != nil {
		close(g.drained)
		g.drained = nil
	}
}

// close shuts the gate and waits until nothing is inside. A nil error must be paired with open; only one caller may
// hold the gate shut at a time.
func (g *gate) close(ctx context.Context) error {
	g.mu.Lock()
	g.shut = make(chan struct{})
	var drained chan struct{}
	if g.inside > 0 {
		drained = make(chan struct{})
		g.drained = drained
	}
	g.mu.Unlock()
	if drained == nil {
		return nil
	}
	select {
	case <-drained:
		return nil
	case <-ctx.Done():
		g.open()
		return context.Cause(ctx)
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.shut)
	g.shut, g.drained = nil, nil
}

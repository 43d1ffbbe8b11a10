// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// pingSize is that of a small message: a TLS record for one segment.
	pingSize = 64
	// wirePatience frees the benchmark from a connection that is never served.
	wirePatience = 15 * time.Second
)

// wire makes connections to one address and measures them.
type wire struct {
	address string
	tls     *tls.Config
}

// dial shakes hands and sees that the server does what is wanted.
func (w wire) dial(ctx context.Context, want byte) (*tls.Conn, error) {
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", w.address)
	if err != nil {
		return nil, err
	}
	c := tls.Client(raw, w.tls)
	_ = c.SetDeadline(time.Now().Add(wirePatience)) // if it fails, so does the write
	got := [1]byte{want}
	if _, err = c.Write(got[:]); err == nil { // shakes hands before
		_, err = io.ReadFull(c, got[:])
	}
	if err == nil && got[0] != want {
		err = fmt.Errorf("answered %q to %q", got[0], want)
	}
	if err != nil {
		_ = raw.Close()
		return nil, fmt.Errorf("connect to %s: %w", w.address, err)
	}
	return c, c.SetDeadline(time.Time{})
}

// connects makes connections, each to its first answer, by so many clients that
// wait for one before they make the next, and returns how many.
func (w wire) connects(ctx context.Context, during time.Duration, clients int) (int64, error) {
	var made atomic.Int64
	end := time.Now().Add(during)
	all, ctx := errgroup.WithContext(ctx)
	for range clients {
		all.Go(func() error {
			for time.Now().Before(end) {
				c, err := w.dial(ctx, wantEcho)
				if err != nil {
					return err
				}
				made.Add(1)
				_ = c.Close() // it has served
			}
			return nil
		})
	}
	err := all.Wait()
	return made.Load(), err
}

// stream moves bytes in one direction on so many connections, and returns how many.
func (w wire) stream(ctx context.Context, want byte, during time.Duration, streams int) (int64, error) {
	var moved atomic.Int64
	all, ctx := errgroup.WithContext(ctx)
	for range streams {
		c, err := w.dial(ctx, want)
		if err != nil {
			return 0, err
		}
		defer c.Close()
		move := c.Read
		if want == wantUpload {
			move = c.Write
		}
		all.Go(func() error {
			data := make([]byte, chunk)
			for end := time.Now().Add(during); time.Now().Before(end); {
				n, err := move(data)
				if moved.Add(int64(n)); err != nil {
					return fmt.Errorf("stream by %s: %w", w.address, err)
				}
			}
			return nil
		})
	}
	err := all.Wait()
	return moved.Load(), err
}

// roundTrips sends small messages on one open connection, each when the one before
// has come back.
func (w wire) roundTrips(ctx context.Context, during time.Duration) ([]time.Duration, error) {
	c, err := w.dial(ctx, wantEcho)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var times []time.Duration
	var ping [pingSize]byte
	for end := time.Now().Add(during); time.Now().Before(end); {
		began := time.Now()
		if _, err := c.Write(ping[:]); err != nil {
			return nil, fmt.Errorf("round trip by %s: %w", w.address, err)
		}
		if _, err := io.ReadFull(c, ping[:]); err != nil {
			return nil, fmt.Errorf("round trip by %s: %w", w.address, err)
		}
		times = append(times, time.Since(began))
	}
	return times, nil
}

// open makes connections that stay open until closed is called.
func (w wire) open(ctx context.Context, connections, clients int) (closed func(), err error) {
	var mu sync.Mutex
	var conns []*tls.Conn
	closed = func() {
		for _, c := range conns {
			_ = c.NetConn().Close() // without a goodbye: nobody measures it
		}
	}
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(clients)
	for range connections {
		all.Go(func() error {
			c, err := w.dial(ctx, wantEcho)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			conns = append(conns, c)
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		closed()
		return nil, err
	}
	return closed, nil
}

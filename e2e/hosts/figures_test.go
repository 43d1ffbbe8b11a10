// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e && bench

package hosts

import (
	"cmp"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/tenantd/tenantd/e2e/bench/results"
)

const (
	// figuresVariable names the file for the figures.
	figuresVariable = "TENANTD_FIGURES"
	// roundsVariable says how many rounds there are, if not figureRounds.
	roundsVariable = "TENANTD_FIGURE_ROUNDS"
	// figureRounds are enough for a 99th percentile that is the worst but for a third of one.
	figureRounds = 30
	// attemptLimit is how long a client waits until it asks again, on a new connection.
	attemptLimit = time.Second
)

// retired is how long a host that a tenant has left is given to end it. Until then it
// may answer what others forward, and no failover would be seen.
const retired = 3 * time.Second

// TestFigures measures what `make bench-hosts` reports: how long a tenant is away when
// its host is killed, how long moves and joins take. It asserts nothing but that all
// works.
func TestFigures(t *testing.T) {
	file := os.Getenv(figuresVariable)
	if file == "" {
		t.Fatalf("$%s names no file: run make bench-hosts", figuresVariable)
	}
	rounds := figureRounds
	if text := os.Getenv(roundsVariable); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			t.Fatalf("$%s is %q: give a number of rounds", roundsVariable, text)
		}
		rounds = n
	}
	in := newInstallation(t)
	x := in.tenants[0]
	var failovers, moves, gaps, joins []time.Duration
	for n := range rounds {
		at, next := in.hosts[n%len(in.hosts)], in.hosts[(n+1)%len(in.hosts)]
		in.settle(t)
		in.pin(t, at, x, at)

		writes := in.write(t, x, in.but(t, at, next)[0])
		began := time.Now()
		in.pin(t, at, x, next)
		moves = append(moves, time.Since(began))
		gaps = append(gaps, writes.end())

		in.put(t, at, x, at)
		via := in.but(t, at)[0]
		time.Sleep(retired)
		began = time.Now()
		at.kill(t)
		in.firstWrite(t, x, via)
		failovers = append(failovers, time.Since(began))
		at.start(t)
		at.awaitReady(t)
		in.awaitWell(t)

		via.mustTenantctl(t, "host", "remove", at.name, "--yes")
		at.wait(t)
		at.wipe(t)
		token := via.token(t)
		began = time.Now()
		in.join(t, at, via, token)
		joins = append(joins, time.Since(began))
		t.Logf("round %d: failover %s, move %s, longest write meanwhile %s, join %s", n, failovers[n], moves[n], gaps[n], joins[n])
	}
	note := fmt.Sprintf("3 hosts and %d tenants on one machine, %d cores, %s; %d rounds; nothing to compare with", len(in.tenants), runtime.NumCPU(), runtime.Version(), rounds)
	var rows []results.Row
	for _, figure := range []struct {
		name string
		took []time.Duration
	}{
		{"failover, from kill -9 of a tenant's host to the next acknowledged write", failovers},
		{"move, from the wish to ready on the new host and gone from the old one", moves},
		{"move, longest time without an acknowledged write", gaps},
		{"join, from the start of the process to readiness", joins},
	} {
		slices.SortFunc(figure.took, cmp.Compare[time.Duration])
		for _, p := range []int{50, 99} {
			value := figure.took[min(len(figure.took)*p/100, len(figure.took)-1)]
			rows = append(rows, results.Lower(fmt.Sprintf("%s, p%d", figure.name, p), "s", value.Seconds(), 0, note))
			t.Logf("%s, p%d: %s", figure.name, p, value.Round(time.Millisecond))
		}
	}
	if err := results.Write(file, rows); err != nil {
		t.Fatal(err)
	}
}

// firstWrite returns when a tenant has acknowledged a write through a host.
func (in *installation) firstWrite(t *testing.T, x *tenant, via *host) {
	t.Helper()
	c := newRegisterClient(t, x, via)
	c.limit, c.http.Timeout = attemptLimit, attemptLimit
	eventually(t, x.name+" writes", func() error {
		_, err := c.do(t.Context(), http.MethodPut, "figure", object("figure", "x"))
		if s, ok := err.(*statusError); ok && s.code == http.StatusNotFound {
			_, err = c.do(t.Context(), http.MethodPost, "", object("figure", "x"))
		}
		return err
	})
}

// writing is a client that writes without pause.
type writing struct {
	stop, stopped chan struct{}
	longest       time.Duration // from one acknowledged write to the next
}

func (in *installation) write(t *testing.T, x *tenant, via *host) *writing {
	t.Helper()
	w := &writing{stop: make(chan struct{}), stopped: make(chan struct{})}
	in.firstWrite(t, x, via)
	go func() {
		defer close(w.stopped)
		c := newRegisterClient(t, x, via)
		for last := time.Now(); ; {
			if _, err := c.do(t.Context(), http.MethodPut, "figure", object("figure", "x")); err == nil {
				w.longest, last = max(w.longest, time.Since(last)), time.Now()
			}
			select {
			case <-w.stop:
				return
			default:
			}
		}
	}()
	return w
}

// end returns the longest time without an acknowledged write.
func (w *writing) end() time.Duration {
	close(w.stop)
	<-w.stopped
	return w.longest
}

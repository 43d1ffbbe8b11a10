// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tenantd/tenantd/e2e/bench/results"
)

func TestQuantile(t *testing.T) {
	for _, row := range []struct {
		values []time.Duration
		q      float64
		want   time.Duration
	}{
		{[]time.Duration{7}, 0.5, 7},
		{[]time.Duration{7}, 0.99, 7},
		{[]time.Duration{3, 1, 2}, 0.5, 2},
		{[]time.Duration{4, 3, 1, 2}, 0.5, 2},
		{[]time.Duration{3, 1, 2}, 0.99, 3},
		{[]time.Duration{3, 1, 2}, 0, 1},
	} {
		if got := quantile(row.values, row.q); got != row.want {
			t.Errorf("quantile(%v, %v) = %v, want %v", row.values, row.q, got, row.want)
		}
	}
}

// What a further tenant costs leaves out what the first one brings.
func TestResults(t *testing.T) {
	m := measurements{
		samples: []sample{
			{tenants: 0},
			{tenants: 1, ours: memory{rss: 300e6, pss: 200e6}, theirs: memory{rss: 500e6, pss: 500e6}},
			{tenants: 2, ours: memory{rss: 345e6, pss: 190e6}, theirs: memory{rss: 1000e6, pss: 700e6}},
			{tenants: 3, ours: memory{rss: 400e6, pss: 180e6}, theirs: memory{rss: 1500e6, pss: 1000e6}},
		},
		oursAdd:   []time.Duration{3 * time.Second, time.Second, 2 * time.Second},
		theirsAdd: []time.Duration{4 * time.Second, 4 * time.Second, 8 * time.Second},
		idle:      cpuTimes{ours: 600 * time.Millisecond, theirs: 2400 * time.Millisecond},
	}
	rows := map[string]results.Row{}
	for _, r := range m.results(config{tenants: 3, idle: 10 * time.Second}) {
		if r.Note == "" || r.Better != "lower" {
			t.Errorf("row %q: better %q, note %q", r.Name, r.Better, r.Note)
		}
		rows[r.Name] = r
	}
	for _, want := range []results.Row{
		{Name: "resident memory per further idle tenant", Ours: 50, Theirs: 500, Ratio: 10},
		// No ratio of a figure below the noise.
		{Name: "proportional memory per further idle tenant", Ours: -10, Theirs: 250, Ratio: 0},
		{Name: "resident memory in all", Ours: 400, Theirs: 1500, Ratio: 3.75},
		{Name: "idle CPU per tenant", Ours: 20, Theirs: 80, Ratio: 4},
		{Name: "add to usable, p50", Ours: 2, Theirs: 4, Ratio: 2},
		{Name: "add to usable, max", Ours: 3, Theirs: 8, Ratio: 2.667},
	} {
		got := rows[want.Name]
		if got.Ours != want.Ours || got.Theirs != want.Theirs || got.Ratio != want.Ratio {
			t.Errorf("%s: %v and %v, ratio %v; want %v and %v, ratio %v", want.Name, got.Ours, got.Theirs, got.Ratio, want.Ours, want.Theirs, want.Ratio)
		}
	}
}

func TestProcOfThisProcess(t *testing.T) {
	m, err := memoryOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if m.rss <= 0 || m.pss <= 0 {
		t.Errorf("memory %+v", m)
	}
	twice, err := memoryOf(os.Getpid(), os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if twice.rss <= m.rss {
		t.Errorf("a process counted twice has %d bytes, once %d", twice.rss, m.rss)
	}
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for after := before; after <= before; {
		if after, err = cpuTime(os.Getpid()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCPUOfOthers(t *testing.T) {
	before := cpuTimes{ours: 1, theirs: 2, store: 3, machine: 10}
	after := cpuTimes{ours: 2, theirs: 4, store: 6, machine: 20}
	if got := after.since(before).others(); got != 4 {
		t.Errorf("others took %d, want 4", got)
	}
	// The sources are read one after the other, and in steps.
	if got := (cpuTimes{ours: 2, machine: 1}).others(); got != 0 {
		t.Errorf("others took %d, want 0", got)
	}
	all, err := machineCPUTime()
	if err != nil {
		t.Fatal(err)
	}
	own, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if own > all {
		t.Errorf("this process used %s, the machine %s", own, all)
	}
}

func TestProcess(t *testing.T) {
	quick, err := startProcess(t.TempDir(), "quick", "/bin/sh", "-c", "echo the reason; exit 3")
	if err != nil {
		t.Fatal(err)
	}
	<-quick.exited
	if err := quick.ended(); err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "the reason") {
		t.Errorf("after its end: %v", err)
	}

	steady, err := startProcess(t.TempDir(), "steady", "/bin/sh", "-c", "while :; do sleep 1; done")
	if err != nil {
		t.Fatal(err)
	}
	if err := steady.ended(); err != nil {
		t.Errorf("while it runs: %v", err)
	}
	if err := stopAll([]*process{quick, steady}); err != nil {
		t.Error(err)
	}
	if steady.ended() == nil {
		t.Error("it runs after it was stopped")
	}
}

func TestConfigRefusals(t *testing.T) {
	good := config{tenants: 2, idle: time.Second, patience: time.Second}
	if err := good.validate(); err != nil {
		t.Fatal(err)
	}
	for flag, change := range map[string]func(*config){
		"--tenants":  func(c *config) { c.tenants = 1 },
		"--pause":    func(c *config) { c.pause = -1 },
		"--settle":   func(c *config) { c.settle = -1 },
		"--idle":     func(c *config) { c.idle = 0 },
		"--patience": func(c *config) { c.patience = 0 },
	} {
		bad := good
		change(&bad)
		if err := bad.validate(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("bad %s: error %v", flag, err)
		}
	}
}

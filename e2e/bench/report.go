// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/tenantd/tenantd/e2e/bench/results"
)

// results turns measurements into rows.
func (m *measurements) results(cfg config) []results.Row {
	first, last := m.samples[1], m.samples[len(m.samples)-1]
	further := float64(last.tenants - first.tenants)
	tenants := float64(last.tenants)
	idle := cfg.idle.Seconds()
	perTenant := func(from, to int64) float64 { return megabytes(to-from) / further }
	milliCPU := func(used time.Duration) float64 { return used.Seconds() / idle * 1000 / tenants }

	rows := []results.Row{
		results.Lower("resident memory per further idle tenant", "MB", perTenant(first.ours.rss, last.ours.rss), perTenant(first.theirs.rss, last.theirs.rss),
			"VmRSS; a page that processes share counts in each"),
		results.Lower("proportional memory per further idle tenant", "MB", perTenant(first.ours.pss, last.ours.pss), perTenant(first.theirs.pss, last.theirs.pss),
			"Pss; a page that processes share counts once in all"),
		results.Lower("resident memory in all", "MB", megabytes(last.ours.rss), megabytes(last.theirs.rss),
			"VmRSS; ours with system plane and etcd, theirs without etcd"),
		results.Lower("proportional memory in all", "MB", megabytes(last.ours.pss), megabytes(last.theirs.pss),
			"Pss; ours with system plane and etcd, theirs without etcd"),
		results.Lower("idle CPU per tenant", "mCPU", milliCPU(m.idle.ours), milliCPU(m.idle.theirs),
			fmt.Sprintf("over %s; ours with its share of system plane and etcd, theirs without etcd, which took %.1f per tenant", cfg.idle, milliCPU(m.idle.store))),
	}
	for _, row := range []struct {
		name string
		of   func([]time.Duration) time.Duration
	}{
		{"p50", func(d []time.Duration) time.Duration { return quantile(d, 0.50) }},
		{"p99", func(d []time.Duration) time.Duration { return quantile(d, 0.99) }},
		{"min", slices.Min[[]time.Duration]},
		{"max", slices.Max[[]time.Duration]},
	} {
		rows = append(rows, results.Lower("add to usable, "+row.name, "s", row.of(m.oursAdd).Seconds(), row.of(m.theirsAdd).Seconds(),
			fmt.Sprintf("one after the other, %d samples; theirs with --leader-elect=%t", len(m.oursAdd), cfg.election)))
	}
	where := fmt.Sprintf("; %d tenants, %s, the rest of the machine took %.2f cores", last.tenants, machine(m.goVersion), m.others)
	for i := range rows {
		rows[i].Note += where
	}
	return rows
}

// quantile is the smallest value that is not below the share q of all.
func quantile(values []time.Duration, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// print writes the report for people to read.
func (m *measurements) print(w io.Writer, cfg config, rows []results.Row) error {
	fmt.Fprintf(w, "%s\n%d tenants on each side, theirs with --leader-elect=%t, the rest of the machine took %.2f cores\n\n",
		machine(m.goVersion), cfg.tenants, cfg.election, m.others)
	if err := printRows(w, rows); err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "\nMemory in MB, and the time of each addition in s:\n\n")
	fmt.Fprintln(t, "tenants\tours VmRSS\tours Pss\ttheirs VmRSS\ttheirs Pss\tours add\ttheirs add\t")
	for i, s := range m.samples {
		fmt.Fprintf(t, "%d\t%.0f\t%.0f\t%.0f\t%.0f\t", s.tenants, megabytes(s.ours.rss), megabytes(s.ours.pss), megabytes(s.theirs.rss), megabytes(s.theirs.pss))
		if i == 0 {
			fmt.Fprint(t, "\t\t\n")
			continue
		}
		fmt.Fprintf(t, "%.2f\t%.2f\t\n", m.oursAdd[i-1].Seconds(), m.theirsAdd[i-1].Seconds())
	}
	_ = t.Flush()

	_, err := fmt.Fprintf(w, `
Lower is better in each row. A further tenant costs (N tenants - 1 tenant) / (N - 1).
The etcd of theirs is shared by their sets, has the configuration of ours, and is
not counted; it runs in this program, which has %.0f MB resident. Ours runs inside
tenantd and is counted. docs/benchmarks.md says more.
`, megabytes(m.storeMemory.rss))
	return err
}

// printRows writes the table of a comparison.
func printRows(w io.Writer, rows []results.Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "what\tunit\tbetter\tours\ttheirs\tratio\t")
	for _, r := range rows {
		ratio := "-"
		if r.Ratio > 0 {
			ratio = fmt.Sprintf("%.2f", r.Ratio)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t\n", r.Name, r.Unit, r.Better, figure(r.Unit, r.Ours), figure(r.Unit, r.Theirs), ratio)
	}
	return t.Flush()
}

// figure formats a value with the digits that mean something.
func figure(unit string, value float64) string {
	if unit == "s" || unit == "GB/s" {
		return fmt.Sprintf("%.2f", value)
	}
	return fmt.Sprintf("%.1f", value)
}

func megabytes(bytes int64) float64 { return float64(bytes) / 1e6 }

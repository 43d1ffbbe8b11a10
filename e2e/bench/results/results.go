// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package results is the file that all benchmarks write: rows of our figure, that
// of what people would use instead, and the ratio. The programs that measure import
// it.
package results

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
)

// Row is one comparison.
type Row struct {
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Ours   float64 `json:"ours"`
	Theirs float64 `json:"theirs"`
	// Ratio says how many times better ours is: theirs/ours where lower is better,
	// ours/theirs where higher is. 0 means that a figure is not above the noise, or
	// that there is nothing to compare with.
	Ratio  float64 `json:"ratio"`
	Better string  `json:"better"`
	Note   string  `json:"note"`
}

// Lower makes a row in which the lower figure is the better one.
func Lower(name, unit string, ours, theirs float64, note string) Row {
	return row(name, unit, "lower", ours, theirs, theirs, ours, note)
}

// Higher makes a row in which the higher figure is the better one.
func Higher(name, unit string, ours, theirs float64, note string) Row {
	return row(name, unit, "higher", ours, theirs, ours, theirs, note)
}

func row(name, unit, better string, ours, theirs, over, under float64, note string) Row {
	r := Row{Name: name, Unit: unit, Ours: round(ours), Theirs: round(theirs), Better: better, Note: note}
	if ours > 0 && theirs > 0 {
		r.Ratio = round(over / under)
	}
	return r
}

func round(value float64) float64 { return math.Round(value*1000) / 1000 }

// Write puts rows into a file. Rows of other names that it has stay, so that it
// collects what several programs measure.
func Write(file string, rows []Row) error {
	var all []Row
	before, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("read earlier results: %w", err)
	default:
		if err := json.Unmarshal(before, &all); err != nil {
			return fmt.Errorf("read earlier results in %s: %w; remove the file", file, err)
		}
	}
	for _, r := range rows {
		if i := slices.IndexFunc(all, func(old Row) bool { return old.Name == r.Name }); i >= 0 {
			all[i] = r
		} else {
			all = append(all, r)
		}
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return fmt.Errorf("encode results: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil { //nolint:gosec // for everyone to read
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}

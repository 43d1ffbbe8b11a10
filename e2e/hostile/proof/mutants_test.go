// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestMutantsFit shows that every mutant can be made of the source as it is, and
// names a case that exists.
func TestMutantsFit(t *testing.T) {
	var cases strings.Builder
	files, err := filepath.Glob(filepath.Join("..", "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		cases.Write(raw)
	}
	for _, m := range mutants {
		t.Run(m.name+"/"+m.defence, func(t *testing.T) {
			if !strings.Contains(strings.Join(strings.Fields(cases.String()), " "), `name: "`+m.name+`",`) {
				t.Errorf("there is no case %q", m.name)
			}
			changed := map[string]string{}
			for _, e := range m.edits {
				source, ok := changed[e.file]
				if !ok {
					raw, err := os.ReadFile(filepath.Join("..", "..", "..", filepath.FromSlash(e.file)))
					if err != nil {
						t.Fatal(err)
					}
					source = string(raw)
				}
				if changed[e.file], err = e.apply(source); err != nil {
					t.Fatal(err)
				}
			}
			for file, source := range changed {
				if _, err := parser.ParseFile(token.NewFileSet(), file, source, parser.SkipObjectResolution); err != nil {
					t.Errorf("the mutant is not Go: %v", err)
				}
			}
		})
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"testing"
)

// The next version can be made of the source as it is.
func TestEditsFit(t *testing.T) {
	files, err := changed(filepath.Join("..", "..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	for path, content := range files {
		if filepath.Ext(path) != ".go" {
			continue
		}
		if _, err := parser.ParseFile(token.NewFileSet(), path, content, parser.SkipObjectResolution); err != nil {
			t.Error(err)
		}
	}
}

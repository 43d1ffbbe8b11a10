// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Command proof shows that the cases of package hostile can fail: it takes one
// defence after the other out of the source, builds tenantd without it and runs the
// case that is about it, which must then fail.
//
//	make hostile-proof                                  # all, half a minute each
//	make hostile-proof MUTANTS='^WebhooksByURL$'        # those of some cases
//
// The source is not touched: the build sees the change through an overlay. That
// each change still fits the source is a test of this package, so that the table
// cannot rot unnoticed.
package main

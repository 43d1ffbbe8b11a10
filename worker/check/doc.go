// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package check looks at a machine for what keeps tenant-proxy from working there,
// or will. It changes nothing. It works before tenant-proxy runs, while it does, and
// before the node has joined.
//
// Package cmd/tenant-proxy imports it. It imports the packages of worker.
//
//	for _, finding := range check.Machine(ctx, check.Config{File: cfg}) {
//		fmt.Println(finding.State, finding.About, finding.Text, finding.Remedy)
//	}
package check

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hostile attacks a tenantd process as those would who can: as a tenant's
// cluster-admin with upstream's clients, and as a stranger with raw sockets.
//
// Each attack is a named case that says what is tried and what must happen. While
// it runs, bystanders watch: a victim tenant whose every request must be answered,
// the process that must stay the same, canary files, and, in a network namespace
// of the tests' own, every connection that anybody tries to open. Where no
// namespace can be made, listeners on loopback stand in for that.
//
//	go test ./e2e/hostile                      # all; needs make build bin/kubectl
//	go test ./e2e/hostile -case DeletedRoles   # one
//
// That a case finds what it looks for is shown by package proof, which takes one
// defence after the other out of the source and runs the case that must then fail.
package hostile

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the binaries as a user runs them: tenantd as a process,
// tenantctl and upstream's kubectl on the command line, client-go against the one
// port. It imports no package of ours but the API's types, and proc, which knows
// nothing of tenantd, so that nothing works here that would not work for a user. (bench
// is a program of its own, and has upstream's programs use an etcd like ours.)
//
// `make test` builds the programs into bin and runs these tests. They need no
// root; traffic stays on loopback.
package e2e

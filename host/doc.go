// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package host is the daemon: it wires storage, keys, the port and the control
// planes together, serves the system plane with its Tenant API, and brings what
// runs in line with the Tenant objects.
//
// It owns the data directory, the reconciling of Tenants, what runs where, the
// credentials that operators ask for, health and metrics. cmd/tenantd is its only
// importer.
//
//	cfg, err := v1alpha1.LoadHostConfiguration(path)
//	h, err := host.New(host.Config{HostConfiguration: *cfg, Logger: log})
//	err = h.Run(ctx) // until ctx is done and everything has stopped in order
//
// Order of life: the data directory is locked and checked, storage opens, the
// port opens, the system plane starts and gets its CRDs, then the tenants. It
// stops in reverse: an API server that is told to stop together with its etcd
// may never return.
package host

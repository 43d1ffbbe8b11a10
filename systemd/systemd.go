// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package systemd holds the units. The one of tenant-proxy is part of the programs
// that put it on workers. It imports nothing; package worker/bundle imports it.
//
//	unit := strings.ReplaceAll(systemd.TenantProxy(), systemd.Bindir, "/usr/local/bin")
package systemd

import _ "embed"

// Bindir stands in a unit where the directory of the program belongs.
const Bindir = "@bindir@"

//go:embed tenant-proxy.service
var tenantProxy string

// TenantProxy is tenant-proxy.service, with Bindir in it.
func TenantProxy() string { return tenantProxy }

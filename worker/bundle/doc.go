// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package bundle makes the archive that turns a bare machine into a tenant's worker
// without network: tenant-proxy, its configuration, the tenant's CA, its unit, and
// install.sh, which checks that the machine is one that it runs on.
//
// There is no secret in it: what a node may do it gets by joining.
//
// Packages cmd/tenantctl and tests import it, so it links little. It imports
// packages worker/config and systemd of ours.
//
//	err := bundle.Write(file, bundle.Bundle{
//		Config: config.Config{Hostname: "acme.k8s.example.com", Hosts: []string{"192.0.2.10:443"}},
//		CA:     caPEM,
//		Binary: "/usr/local/bin/tenant-proxy",
//	})
package bundle

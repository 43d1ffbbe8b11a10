// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hosts knows the addresses of the hosts: the configured ones, looked up
// where they are names, together with those that the tenant's cluster lists.
//
// What was learnt is kept on disk, and always joined with what is configured. So
// neither a stale file, nor a wrong list, nor a DNS server that is down can take
// the last way away, and no file ever has to be deleted by hand.
//
// Package worker imports it. It imports package api of ours.
//
//	list := hosts.New(hosts.Config{
//		Tenant:  "acme.k8s.example.com",
//		Seeds:   []string{"192.0.2.10:443"},
//		Cache:   "/var/lib/tenant-proxy/hosts.json",
//		Learn:   client.Hosts,
//		Changed: pool.SetHosts,
//	})
//	return list.Run(ctx)
package hosts

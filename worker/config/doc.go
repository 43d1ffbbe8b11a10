// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package config is the configuration file of tenant-proxy. It imports nothing of
// ours and little else, so that tenantctl can write the file that tenant-proxy reads.
//
//	cfg, err := config.Load("/etc/tenant-proxy/config.yaml")
//	if err != nil {
//		return err // every fault, each with file and line
//	}
//	fmt.Println(cfg.Hostname, cfg.Endpoint())
package config

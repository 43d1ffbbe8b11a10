// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package install puts an unpacked bundle onto a machine, and takes it away again.
//
// Package cmd/tenant-proxy imports it. It imports packages worker/bundle,
// worker/config, worker/hosts, worker/kubelet, worker/vip and systemd of ours.
//
//	next, err := install.Install(ctx, install.Options{From: "/tmp/tenant-proxy"})
//	if err != nil {
//		return err
//	}
//	fmt.Println(next) // what is left to do
package install

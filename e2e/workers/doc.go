// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package workers tests tenants with real workers: machines that run systemd,
// containerd, upstream's kubelet, kubeadm and kube-proxy, and pods. It imports no
// package of ours but the API's types, and proc and images, which know nothing of
// tenantd, so that nothing works here that would not work for a user.
//
// `make e2e` builds the programs into bin and runs these tests, as root; `make
// e2e-failover` runs TestHosts, which has three hosts. Nothing
// of them touches the machine that they run on, but for one limit of the kernel's
// that is raised for as long as they run: the test binary starts itself
// again in a lab, which is a PID, mount and network namespace of its own, and all
// else lives in there. When the lab's first process ends, however it ends, the
// kernel ends all others and takes down the mounts and the networks. What is left
// then, a directory and a cgroup, is removed, at the latest by the next run.
//
//	lab                  a bridge, 10.77.0.1
//	├── the host         tenantd in a network namespace, 10.77.0.10:443; or
//	│                    host-a, host-b, host-c: 10.77.0.11, .12, .13
//	├── machine w1       namespaces of all kinds, an overlay over this machine's
//	│   │                files, systemd as its first process
//	│   ├── containerd, kubelet, tenant-proxy: units
//	│   └── pods
//	└── machine w2 …
package workers

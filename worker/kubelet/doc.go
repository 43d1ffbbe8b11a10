// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kubelet reads the kubelet's kubeconfig for what it says of the node, its
// name and certificate, and changes one thing in it on demand: where the kubelet
// finds the API server.
//
// The certificate is the node's one credential. It rotates, so it is read again
// when its file has changed, and it is absent until the node has joined.
//
// Packages worker, check and cmd/tenant-proxy import it. It imports nothing of ours.
//
//	identity := kubelet.NewIdentity("/etc/kubernetes/kubelet.conf")
//	node, err := identity.Name()
//	if errors.Is(err, fs.ErrNotExist) {
//		// Not joined yet.
//	}
//	certificate, err := identity.Certificate()
package kubelet

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"encoding/json"
	"fmt"
)

// HostsExtension is the name of an extension of the cluster in admin.kubeconfig. A
// kubeconfig has one server for a cluster; this has the other hosts that are it too.
const HostsExtension = "tenantd.io/hosts"

// kubeconfigHosts is the extension's content.
type kubeconfigHosts struct {
	Addresses []string `json:"addresses"` // IP:port or name:port
}

// FormatKubeconfigHosts returns the extension's content for the addresses of hosts.
func FormatKubeconfigHosts(addresses []string) ([]byte, error) {
	return json.Marshal(kubeconfigHosts{addresses})
}

// ParseKubeconfigHosts returns the addresses in the extension's content.
func ParseKubeconfigHosts(content []byte) ([]string, error) {
	var hosts kubeconfigHosts
	if err := json.Unmarshal(content, &hosts); err != nil {
		return nil, fmt.Errorf("read the extension %s: %w", HostsExtension, err)
	}
	return hosts.Addresses, nil
}

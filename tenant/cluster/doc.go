// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cluster makes of an API server a cluster that workers can join with
// stock kubeadm, and keeps it one.
//
// It owns the objects that `kubeadm init` leaves behind, CoreDNS and kube-proxy
// as kubeadm applies them, the endpoints of the kubernetes Service, the list of
// hosts that workers read, and the approval of kubelets' serving certificates.
// Package tenant is its only importer. At most one host runs it for a tenant at
// a time, the one that runs the tenant's controllers.
//
//	c, err := cluster.New(cluster.Config{
//		Client: client, Informers: factory, // not started yet
//		Hostname: "acme.k8s.example.com", CA: authority.CA(), Version: "v1.37.1",
//		Hosts:   []string{"192.0.2.10:443"},
//		CoreDNS: cluster.Addon{Enabled: true}, KubeProxy: cluster.Addon{Enabled: true},
//	})
//	factory.Start(ctx.Done())
//	go c.Run(ctx, func() { close(joinable) })
//	c.SetHosts([]string{"192.0.2.10:443", "192.0.2.11:443"}) // whenever it changes
//
// # What users may change
//
// Every object is written once for each content that it should have; the hashes of
// what was written last are in the ConfigMap kube-system/tenantd-cluster. A
// restart writes nothing, so users' edits stay. An object whose content changes,
// with a new version of Kubernetes or another image, is written again as `kubeadm
// upgrade` does: Deployments, DaemonSets and roles anew, but a kubelet-config, a
// kube-proxy configuration or a Corefile that a user has edited is left alone,
// and kubeadm-config keeps what is not ours. (kubeadm also rewrites an edited
// Corefile when CoreDNS drops a plugin that it uses. This is left to the user.)
//
// What joining needs comes back within a second of being deleted. To take a
// right away, such as anonymous clients' right to read cluster-info, leave the
// binding in place and empty its subjects. Of the addons a deleted object stays
// away; objects of the same name that do not carry the label
// app.kubernetes.io/managed-by=tenantd are users' own and neither changed nor
// removed.
//
// # Kubelets' serving certificates
//
// A request is approved if it comes from a node, names that node and lists
// nothing but addresses in the node's own status. Nodes write their own status:
// NodeRestriction keeps a node from another's status, not from a lie in its own.
// So a node can obtain a certificate for an address that nobody else claims. What
// it cannot obtain is one for an address or the name of another Node, for the
// API server's names and addresses, for Services, or with a wildcard. And by
// claiming another node's address it can keep the other from a new certificate
// until an administrator removes one of them.
//
// A request that is not approved stays pending, with an Event that gives the
// reason, and is looked at again when a Node's addresses change: a kubelet may
// ask before its addresses are known.
package cluster

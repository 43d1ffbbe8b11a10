// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package pki owns the trust of every tenant: a cluster CA, a front-proxy CA, the
// key that signs service-account tokens, the leaves under them, and what lets
// people and machines in: kubeconfigs, join tokens and the hash of a CA. The rooms
// tenant and host import it; it imports none of ours, and no part of Kubernetes
// but the kubeconfig types.
//
//	key, err := pki.LoadOrCreateKey("/var/lib/tenantd/seal.key")
//	sealer, err := pki.NewSealer(key)
//	cache := pki.NewCache() // one per process
//	authority, err := pki.Open(ctx, pki.AuthorityConfig{
//		Tenant:  "acme",
//		Storage: pki.NewStorage(etcd, "/tenants/"+uid+"/pki/", sealer),
//		Cache:   cache,
//	})
//	serving, err := authority.Leaf(ctx, pki.Profile{
//		Name: "kube-apiserver", Usage: pki.Serving, DNSNames: []string{"acme.k8s.example.com"},
//	})
//	config := &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
//		return serving.TLS(), nil
//	}}
//
// # At rest
//
// In etcd, certificates are plain and all else is sealed, with a key that is not
// in etcd. Who reads the etcd database or a backup of it has no private key; who
// writes it can delete, but not alter or exchange one. The key is a file or a
// systemd credential, the same on all hosts that share tenants. Without it the
// tenants' keys are lost, so it belongs in a backup, not the one of etcd.
//
// # Leaves and certmagic
//
// certmagic makes, locks and stores every leaf, through an issuer of ours and with
// [Storage] below it. When to renew is decided here and not by certmagic's cache,
// for two reasons. The cache knows a certificate by its first name, which for a
// client certificate is the user, and all tenants have the same users
// ("system:kube-scheduler"): the second tenant's would never be issued. And the
// queue and the back-off of its renewals are package variables with that name as
// the key, so one tenant whose renewal fails would hold up the others', even with
// a cache for each. Here a tenant waits for itself only, and a changed profile is
// as good a reason to renew as the time.
//
// A lock is a hint: a host can lose it while it is paused. So all that is written
// under it is written on the condition, checked by etcd, that it is still held,
// and a key that does not belong to its certificate counts as absent.
package pki

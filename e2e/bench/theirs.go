// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"

	"github.com/tenantd/tenantd/storage"
)

// upstream is their side: sets of upstream's programs that share an etcd.
//
// The etcd runs in this process, by the code that runs it in tenantd, so that
// its configuration is the same and stays so.
type upstream struct {
	bin      programs
	dir      string
	election bool
	patience time.Duration
	store    *storage.Store
	running  []*process
}

// newUpstream starts the etcd; sets are started by add.
func newUpstream(ctx context.Context, bin programs, dir string, election bool, patience time.Duration) (*upstream, error) {
	store, err := storage.Open(ctx, storage.Config{Dir: filepath.Join(dir, "etcd")})
	if err != nil {
		return nil, fmt.Errorf("start an etcd for upstream's programs: %w", err)
	}
	return &upstream{bin: bin, dir: dir, election: election, patience: patience, store: store}, nil
}

// add implements side.
func (u *upstream) add(ctx context.Context, i int) (time.Duration, error) {
	_, took, err := u.set(ctx, i)
	return took, err
}

// set is one of upstream's sets, before it is started or after it has been stopped.
type set struct {
	i     int
	dir   string
	ports []int
	admin *rest.Config // its administrator's access
}

// set starts the i-th set and returns its administrator's access and how long it
// took. The time begins with the start of the first process; keys, certificates and
// kubeconfigs are made before.
func (u *upstream) set(ctx context.Context, i int) (admin *rest.Config, took time.Duration, err error) {
	s, err := u.prepare(i)
	if err != nil {
		return nil, 0, err
	}
	began := time.Now()
	err = u.start(ctx, s)
	return s.admin, time.Since(began), err
}

// prepare makes what the i-th set needs.
func (u *upstream) prepare(i int) (s set, err error) {
	s = set{i: i, dir: filepath.Join(u.dir, fmt.Sprintf("upstream-%d", i))}
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return s, fmt.Errorf("make a directory for upstream's set %d: %w", i, err)
	}
	if s.ports, err = freePorts(3); err != nil {
		return s, err
	}
	if s.admin, err = writeCredentials(s.dir, s.ports[0]); err != nil {
		return s, fmt.Errorf("make credentials of upstream's set %d: %w", i, err)
	}
	return s, nil
}

// start starts the processes of a set and waits until it is usable.
func (u *upstream) start(ctx context.Context, s set) error {
	elect := fmt.Sprintf("--leader-elect=%t", u.election)
	for p, c := range []struct {
		name, path string
		args       []string
	}{
		{"kube-apiserver", u.bin.apiserver, []string{
			"--etcd-servers=" + u.store.Endpoint(),
			fmt.Sprintf("--etcd-prefix=/bench/%d/registry", s.i),
			// Only written into an Endpoints object. Without it, the program needs a default route.
			"--advertise-address=192.0.2.1",
			"--tls-cert-file=apiserver.crt",
			"--tls-private-key-file=apiserver.key",
			"--client-ca-file=ca.crt",
			"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
			"--service-account-key-file=sa.pub",
			"--service-account-signing-key-file=sa.key",
			"--service-cluster-ip-range=10.96.0.0/16",
			"--allow-privileged=true",
			"--authorization-mode=Node,RBAC",
			"--enable-admission-plugins=NodeRestriction",
			"--enable-bootstrap-token-auth=true",
			"--proxy-client-cert-file=front-proxy-client.crt",
			"--proxy-client-key-file=front-proxy-client.key",
			"--requestheader-client-ca-file=front-proxy-ca.crt",
			"--requestheader-allowed-names=front-proxy-client",
			"--requestheader-username-headers=X-Remote-User",
			"--requestheader-group-headers=X-Remote-Group",
			"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		}},
		{"kube-controller-manager", u.bin.controllers, []string{
			elect,
			"--kubeconfig=kube-controller-manager.kubeconfig",
			"--controllers=*,bootstrap-signer-controller,token-cleaner-controller",
			"--root-ca-file=ca.crt",
			"--service-account-private-key-file=sa.key",
			"--cluster-signing-cert-file=ca.crt",
			"--cluster-signing-key-file=ca.key",
		}},
		{"kube-scheduler", u.bin.scheduler, []string{
			elect,
			"--kubeconfig=kube-scheduler.kubeconfig",
		}},
	} {
		args := append([]string{"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", s.ports[p])}, c.args...)
		process, err := startProcess(s.dir, c.name, c.path, args...)
		if err != nil {
			return err
		}
		u.running = append(u.running, process)
	}
	if err := usable(ctx, s.admin, u.patience, u.running); err != nil {
		return fmt.Errorf("use upstream's set %d: %w", s.i, err)
	}
	return nil
}

// writeCredentials makes what a set needs in dir: authorities, certificates and
// kubeconfigs. It returns an administrator's access to the API server on the port.
func writeCredentials(dir string, port int) (*rest.Config, error) {
	server := fmt.Sprintf("https://127.0.0.1:%d", port)
	ca, err := newAuthority(dir, "ca")
	if err != nil {
		return nil, err
	}
	frontProxy, err := newAuthority(dir, "front-proxy-ca")
	if err != nil {
		return nil, err
	}
	if err := ca.issueServing("apiserver"); err != nil {
		return nil, err
	}
	if err := frontProxy.issueClient("front-proxy-client", "front-proxy-client"); err != nil {
		return nil, err
	}
	if err := writeSigningKey(dir, "sa"); err != nil {
		return nil, err
	}
	for _, program := range []string{"kube-controller-manager", "kube-scheduler"} {
		if err := ca.issueClient(program, "system:"+program); err != nil {
			return nil, err
		}
		if err := ca.writeKubeconfig(program, server); err != nil {
			return nil, err
		}
	}
	if err := ca.issueClient("admin", "kubernetes-admin", "system:masters"); err != nil {
		return nil, err
	}
	if err := ca.writeKubeconfig("admin", server); err != nil {
		return nil, err
	}
	return &rest.Config{Host: server, TLSClientConfig: rest.TLSClientConfig{
		CAFile:   filepath.Join(dir, "ca.crt"),
		CertFile: filepath.Join(dir, "admin.crt"),
		KeyFile:  filepath.Join(dir, "admin.key"),
	}}, nil
}

// processes implements side.
func (u *upstream) processes() []*process { return u.running }

// close implements side: the API servers first, or they wait for etcd.
func (u *upstream) close() error { return errors.Join(stopAll(u.running), u.store.Close()) }

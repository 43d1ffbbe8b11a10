// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// host is our side: one tenantd.
type host struct {
	process  *process
	plane    *api // the system plane
	patience time.Duration
}

// startHost starts a tenantd on an empty data directory and waits until tenants can be added.
func startHost(ctx context.Context, bin programs, dir string, patience time.Duration) (_ *host, err error) {
	ports, err := freePorts(2)
	if err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "tenantd")
	listen, health := fmt.Sprintf("127.0.0.1:%d", ports[0]), fmt.Sprintf("127.0.0.1:%d", ports[1])
	p, err := startProcess(dir, "tenantd", bin.tenantd, "run", "--data-dir", data, "--domain", "bench.test", "--name", "bench",
		"--listen", listen, "--advertise-address", listen, "--health-listen", health)
	if err != nil {
		return nil, err
	}
	h := &host{process: p, patience: patience}
	defer func() {
		if err != nil {
			_ = h.close()
		}
	}()

	ready := &api{base: "http://" + health, client: &http.Client{}}
	err = poll(ctx, patience, h.processes(), func(ctx context.Context) error {
		return ready.call(ctx, http.MethodGet, "/readyz", nil, nil)
	})
	if err != nil {
		return nil, fmt.Errorf("wait for tenantd: %w", err)
	}
	ready.client.CloseIdleConnections()
	kubeconfig, err := clientcmd.BuildConfigFromFlags("", filepath.Join(data, "admin.kubeconfig"))
	if err != nil {
		return nil, fmt.Errorf("read the system plane's kubeconfig: %w", err)
	}
	if h.plane, err = newAPI(kubeconfig); err != nil {
		return nil, err
	}
	return h, nil
}

// add implements side. The time begins with the request to the system plane and
// includes making the tenant's authorities and the client's certificate.
func (h *host) add(ctx context.Context, i int) (time.Duration, error) {
	began := time.Now()
	if _, err := h.tenant(ctx, fmt.Sprintf("bench-%d", i)); err != nil {
		return 0, err
	}
	return time.Since(began), nil
}

// tenant adds one, waits until it is usable, and returns its administrator's kubeconfig.
func (h *host) tenant(ctx context.Context, name string) ([]byte, error) {
	tenant := &v1alpha1.Tenant{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "Tenant"},
		ObjectMeta: metav1.ObjectMeta{Name: name},
	}
	var credentials v1alpha1.KubeconfigRequest
	if err := h.plane.call(ctx, http.MethodPost, "/apis/"+v1alpha1.GroupVersion.String()+"/tenants", tenant, nil); err != nil {
		return nil, fmt.Errorf("create Tenant %s: %w", name, err)
	}
	err := poll(ctx, h.patience, h.processes(), func(ctx context.Context) error {
		return h.plane.call(ctx, http.MethodPost, v1alpha1.CredentialsPath(name, v1alpha1.KubeconfigSubresource), struct{}{}, &credentials)
	})
	if err != nil {
		return nil, fmt.Errorf("get a kubeconfig of %s: %w", name, err)
	}
	kubeconfig, err := clientcmd.RESTConfigFromKubeConfig(credentials.Status.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig of %s: %w", name, err)
	}
	if err := usable(ctx, kubeconfig, h.patience, h.processes()); err != nil {
		return nil, fmt.Errorf("use %s: %w", name, err)
	}
	return credentials.Status.Kubeconfig, nil
}

// processes implements side.
func (h *host) processes() []*process { return []*process{h.process} }

// close implements side.
func (h *host) close() error { return stopAll(h.processes()) }

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// host is our side: one tenantd.
type host struct {
	// constant after start
	bin            programs
	dir, data      string
	listen, health string
	patience       time.Duration
	plane          *api // the system plane

	process *process
	alone   bool // dir is the host's own, which close removes
}

// startAlone starts a tenantd in a directory of its own, for a run without another side.
func startAlone(ctx context.Context, programDir string, patience time.Duration) (*host, programs, error) {
	bin, err := findPrograms(programDir)
	if err != nil {
		return nil, bin, err
	}
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, bin, fmt.Errorf("make a directory for the run: %w", err)
	}
	h, err := startHost(ctx, bin, dir, patience)
	if err != nil {
		return nil, bin, errors.Join(err, os.RemoveAll(dir))
	}
	h.alone = true
	return h, bin, nil
}

// startHost starts a tenantd on an empty data directory and waits until tenants can be added.
func startHost(ctx context.Context, bin programs, dir string, patience time.Duration) (_ *host, err error) {
	ports, err := freePorts(2)
	if err != nil {
		return nil, err
	}
	h := &host{
		bin: bin, dir: dir, data: filepath.Join(dir, "tenantd"), patience: patience,
		listen: fmt.Sprintf("127.0.0.1:%d", ports[0]), health: fmt.Sprintf("127.0.0.1:%d", ports[1]),
	}
	defer func() {
		if err != nil && h.process != nil {
			_ = h.close()
		}
	}()
	if err := h.start(); err != nil {
		return nil, err
	}
	if err := h.ready(ctx); err != nil {
		return nil, err
	}
	kubeconfig, err := clientcmd.BuildConfigFromFlags("", filepath.Join(h.data, "admin.kubeconfig"))
	if err != nil {
		return nil, fmt.Errorf("read the system plane's kubeconfig: %w", err)
	}
	if h.plane, err = newAPI(kubeconfig); err != nil {
		return nil, err
	}
	return h, nil
}

// start starts the process, anew if it had been there before.
func (h *host) start() error {
	p, err := startProcess(h.dir, "tenantd", h.bin.tenantd, "run", "--data-dir", h.data, "--domain", "bench.test", "--name", "bench",
		"--listen", h.listen, "--advertise-address", h.listen, "--health-listen", h.health)
	if err != nil {
		return err
	}
	h.process = p
	return nil
}

// ready waits until tenants can be added.
func (h *host) ready(ctx context.Context) error {
	a := &api{base: "http://" + h.health, client: &http.Client{}}
	defer a.client.CloseIdleConnections()
	err := poll(ctx, h.patience, h.processes(), func(ctx context.Context) error {
		return a.call(ctx, http.MethodGet, "/readyz", nil, nil)
	})
	if err != nil {
		return fmt.Errorf("wait for tenantd: %w", err)
	}
	return nil
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

// tenants is where the system plane has them.
var tenants = "/apis/" + v1alpha1.GroupVersion.String() + "/tenants"

func newTenant(name string, spec v1alpha1.TenantSpec) *v1alpha1.Tenant {
	return &v1alpha1.Tenant{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "Tenant"},
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       spec,
	}
}

// tenant adds one, waits until it is usable, and returns its administrator's kubeconfig.
func (h *host) tenant(ctx context.Context, name string) ([]byte, error) {
	return h.limitedTenant(ctx, name, v1alpha1.TenantLimits{})
}

func (h *host) limitedTenant(ctx context.Context, name string, limits v1alpha1.TenantLimits) ([]byte, error) {
	var credentials v1alpha1.KubeconfigRequest
	if err := h.plane.call(ctx, http.MethodPost, tenants, newTenant(name, v1alpha1.TenantSpec{Limits: limits}), nil); err != nil {
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

// remove deletes a tenant and waits until the object is gone, which is when nothing
// of it is left.
func (h *host) remove(ctx context.Context, name string) error {
	if err := h.plane.call(ctx, http.MethodDelete, tenants+"/"+name, nil, nil); err != nil {
		return fmt.Errorf("delete Tenant %s: %w", name, err)
	}
	err := poll(ctx, h.patience, h.processes(), func(ctx context.Context) error {
		switch err := h.plane.call(ctx, http.MethodGet, tenants+"/"+name, nil, nil); {
		case err == nil:
			return errors.New("it is still there")
		case isStatus(err, http.StatusNotFound):
			return nil
		default:
			return err
		}
	})
	if err != nil {
		return fmt.Errorf("wait for the end of Tenant %s: %w", name, err)
	}
	return nil
}

// processes implements side.
func (h *host) processes() []*process { return []*process{h.process} }

// close implements side.
func (h *host) close() error {
	err := stopAll(h.processes())
	if h.alone {
		err = errors.Join(err, os.RemoveAll(h.dir))
	}
	return err
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	apiversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/component-base/version"

	"github.com/tenantd/tenantd/tenant/cluster"
)

// joinPatience is how long a control plane's start waits for what workers need to
// join. A tenant can forbid the writing of it, and can mend that only in a control
// plane that runs.
const joinPatience = 30 * time.Second

// runCluster makes a cluster of the API server, and keeps it one until ctx is done.
// started is called when workers can join.
func (cp *ControlPlane) runCluster(ctx context.Context, s *apiServer, started func()) error {
	cp.mu.Lock()
	cfg := cluster.Config{
		Client:               s.client,
		Hostname:             cp.cfg.Hostname,
		Port:                 cp.cfg.Port,
		ServiceCIDR:          cp.cfg.ServiceCIDR,
		PodCIDR:              cp.cfg.PodCIDR,
		DNSDomain:            cp.cfg.DNSDomain,
		WorkerVIP:            cp.cfg.WorkerVIP,
		CA:                   cp.cfg.Authority.CA(),
		CertSANs:             cp.cfg.CertSANs,
		Hosts:                cp.cfg.Hosts,
		KonnectivityHostname: cp.cfg.KonnectivityHostname,
		CoreDNS:              cp.cfg.CoreDNS,
		KubeProxy:            cp.cfg.KubeProxy,
		Version:              kubernetesVersion(),
		Logger:               cp.log,
	}
	view := s.informers.view(0)
	cfg.Informers = view
	c, err := cluster.New(cfg)
	cp.cluster = c
	cp.mu.Unlock()
	if err != nil {
		return fmt.Errorf("make cluster: %w", err)
	}
	once := sync.OnceFunc(started)
	late := time.AfterFunc(joinPatience, func() {
		cp.log.Warn("workers cannot join yet: what they need could not be written; the lines above say why", "after", joinPatience)
		once()
	})
	defer late.Stop()
	// The addons' pods have a priority, which upstream writes meanwhile.
	for {
		var failing failingChecks
		if err := readyz(ctx, s.client); err == nil || errors.As(err, &failing) && !slices.Contains(failing, prioritiesHook) {
			break
		}
		if !sleep(ctx, 20*time.Millisecond) {
			return nil
		}
	}
	view.Start(ctx.Done())
	return c.Run(ctx, func() {
		late.Stop()
		once()
	})
}

// SetAddons changes which addons the cluster has.
func (cp *ControlPlane) SetAddons(coreDNS, kubeProxy cluster.Addon) {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	cp.cfg.CoreDNS, cp.cfg.KubeProxy = coreDNS, kubeProxy
	if cp.cluster != nil {
		cp.cluster.SetAddons(coreDNS, kubeProxy)
	}
}

// SetHosts changes which hosts serve the tenant, IP:port each.
func (cp *ControlPlane) SetHosts(hosts []string) {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	cp.cfg.Hosts = hosts
	if cp.cluster != nil {
		cp.cluster.SetHosts(hosts)
	}
}

// kubernetesVersion is the version that is stamped into the program, or what the
// source says of itself.
func kubernetesVersion() string {
	if v := version.Get().GitVersion; v != "" {
		if parsed, err := apiversion.ParseSemantic(v); err == nil && parsed.Major() > 0 {
			return v
		}
	}
	return "v" + version.DefaultKubeBinaryVersion + ".0"
}

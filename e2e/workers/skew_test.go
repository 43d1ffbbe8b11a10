// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e && skew

package workers

import (
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestSkew has kubelets of older releases join: `make e2e-skew` builds them.
func TestSkew(t *testing.T) {
	kubelets, err := filepath.Glob(bin(t, "skew-*/kubelet"))
	if err != nil || len(kubelets) != 2 {
		t.Fatalf("there are the kubelets %q, want two (%v): run make e2e-skew", kubelets, err)
	}
	l := newLab(t)
	c := l.newHost().add("acme")
	c.proxyInNamespaces()
	var workers []*machine
	for i, kubelet := range kubelets {
		m := l.machineWith([]string{"w1", "w2"}[i], kubelet)
		c.installProxy("tls", m)
		c.join(m)
		workers = append(workers, m)
	}
	c.connect(workers...)
	c.awaitNodes(workers...)
	for i, m := range workers {
		node, err := c.CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		want := strings.TrimPrefix(filepath.Base(filepath.Dir(kubelets[i])), "skew-")
		if got := node.Status.NodeInfo.KubeletVersion; got != want {
			t.Errorf("the kubelet on %s is %s, want %s", m.name, got, want)
		}
		m.awaitTunnel()
	}
	c.apply(web)
	testService(t, c, workers...)
	testClients(t, c, workers...)
	testServingCertificates(t, c, workers[0], workers[1])
	testStreams(t, c, workers...)
}

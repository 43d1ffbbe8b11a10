// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/tenantd/tenantd/tenant/limit"
)

// Clients from outside meet the limits, over HTTP/2 as client-go speaks it, and the
// control plane itself does not.
func TestLimits(t *testing.T) {
	b := newBench(t)
	a := b.start("a")
	admin := b.admin(a, "a")
	list := func(client kubernetes.Interface) error {
		return client.CoreV1().RESTClient().Get().AbsPath("/api/v1/namespaces/default/pods").MaxRetries(0).Do(t.Context()).Error()
	}
	if err := list(admin); err != nil {
		t.Fatal(err)
	}
	a.SetLimits(limit.Config{RequestsPerSecond: 1})
	var err error
	for range 1000 { // more than may come at once, however fast the machine is
		if err = list(admin); err != nil {
			break
		}
	}
	if !apierrors.IsTooManyRequests(err) || !strings.Contains(err.Error(), "spec.limits.requestsPerSecond of tenant a (1) is reached") {
		t.Errorf("got %v", err)
	}
	own, err := kubernetes.NewForConfig(rest.CopyConfig(a.RESTConfig()))
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if err := list(own); err != nil {
			t.Fatalf("the control plane itself: %v", err)
		}
	}
	a.SetLimits(limit.Config{})
	if _, err := admin.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("after the limit was raised: %v", err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
)

// No event tells the name of the machine: neither the scheduler's nor those of the
// API server's own repairs, which a tenant can bring about.
func TestEventsWithoutHostName(t *testing.T) {
	hostname, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t)
	admin := b.admin(b.start("a"), "a")
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "nowhere"}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "c", Image: "example.com/c"}},
	}}
	if _, err := admin.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	service, err := admin.CoreV1().Services("default").Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := admin.NetworkingV1().IPAddresses().Delete(t.Context(), service.Spec.ClusterIP, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wanted := map[string]bool{"FailedScheduling": true, "ClusterIPNotAllocated": true}
	var seen []byte
	err = wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		// The repair looks at a Service when it changes.
		touch := fmt.Appendf(nil, `{"metadata":{"annotations":{"touched":"%d"}}}`, time.Now().UnixNano())
		if _, err := admin.CoreV1().Services("default").Patch(ctx, service.Name, types.MergePatchType, touch, metav1.PatchOptions{}); err != nil {
			return false, err
		}
		list, err := admin.EventsV1().Events("default").List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		for _, e := range list.Items {
			if wanted[e.Reason] && e.ReportingInstance != e.ReportingController {
				t.Errorf("%s is reported by the instance %q of %q", e.Reason, e.ReportingInstance, e.ReportingController)
			}
			delete(wanted, e.Reason)
		}
		seen, err = json.Marshal(list)
		return len(wanted) == 0, err
	})
	if err != nil {
		t.Fatalf("no event came of %v: %v\n%s", wanted, err, seen)
	}
	if strings.Contains(string(seen), hostname) {
		t.Errorf("the events tell the host's name, %s:\n%s", hostname, seen)
	}
}

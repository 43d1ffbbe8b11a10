// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"fmt"
	"net"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A webhook at an address of the host is one in the cluster's network, into which
// there is no tunnel here.
func TestWebhooksAtTheHost(t *testing.T) {
	b := newBench(t)
	r := b.start("a")
	admin := b.admin(r, "a")
	trap, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer trap.Close()
	caught := make(chan struct{}, 1)
	go func() {
		if conn, err := trap.Accept(); err == nil {
			conn.Close()
			caught <- struct{}{}
		}
	}()
	port := trap.Addr().(*net.TCPAddr).Port
	fail, none := admissionregistrationv1.Fail, admissionregistrationv1.SideEffectClassNone
	configurations := admin.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	for _, host := range []string{
		fmt.Sprintf("127.0.0.1:%d", port), fmt.Sprintf("localhost:%d", port), fmt.Sprintf("[::ffff:127.0.0.1]:%d", port), fmt.Sprintf("0.0.0.0:%d", port),
		b.address, "169.254.169.254",
	} {
		url := "https://" + host + "/"
		created, err := configurations.Create(t.Context(), &admissionregistrationv1.ValidatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "host-"},
			Webhooks: []admissionregistrationv1.ValidatingWebhook{{
				Name: "host.egress.test", AdmissionReviewVersions: []string{"v1"}, SideEffects: &none, FailurePolicy: &fail,
				ClientConfig: admissionregistrationv1.WebhookClientConfig{URL: &url},
				Rules: []admissionregistrationv1.RuleWithOperations{{
					Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create},
					Rule:       admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
				}},
			}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		(&worker{t: t}).eventually("the webhook at "+host+" is asked", func() error {
			_, err := admin.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "x-"}}, metav1.CreateOptions{})
			if err == nil || !strings.Contains(err.Error(), url) {
				return fmt.Errorf("it was not: %v", err)
			}
			if !strings.Contains(err.Error(), "no tunnel") {
				t.Errorf("%s: %v", host, err)
			}
			return nil
		})
		if err := configurations.Delete(t.Context(), created.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-caught:
		t.Error("the host connected to itself")
	default:
	}
}

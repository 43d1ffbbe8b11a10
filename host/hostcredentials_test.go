// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"
)

// Tokens for hosts are good by the clock of the host that is asked, and are cleared away by
// it when they have expired.
func TestExpiredHostTokensAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plane := fake.NewClientset()
		secrets := plane.CoreV1().Secrets(metav1.NamespaceSystem)
		for name, expires := range map[string]string{
			"hour": time.Now().Add(time.Hour).Format(time.RFC3339), "day": time.Now().Add(24 * time.Hour).Format(time.RFC3339), "damaged": "soon",
		} {
			_, err := secrets.Create(t.Context(), &corev1.Secret{
				ObjectMeta: metav1.ObjectMeta{Name: name}, Type: bootstrapapi.SecretTypeBootstrapToken,
				Data: map[string][]byte{bootstrapapi.BootstrapTokenExpirationKey: []byte(expires)},
			}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
		}
		for _, step := range []struct {
			ahead time.Duration
			left  []string
		}{{0, []string{"day", "hour"}}, {2 * time.Hour, []string{"day"}}, {48 * time.Hour, nil}} {
			time.Sleep(step.ahead) // which moves the clock, and takes no time
			if err := forgetExpired(t.Context(), plane); err != nil {
				t.Fatal(err)
			}
			all, err := secrets.List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			var left []string
			for _, s := range all.Items {
				left = append(left, s.Name)
			}
			slices.Sort(left)
			if !slices.Equal(left, step.left) {
				t.Errorf("after another %s there are %q, want %q", step.ahead, left, step.left)
			}
		}
	})
}

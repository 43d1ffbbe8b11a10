// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// FuzzCredentialRequests reads bodies of requests for credentials: each is either
// refused as a bad request or valid once its defaults are set.
func FuzzCredentialRequests(f *testing.F) {
	for _, seed := range []string{
		"", "{}", "null", "[]", `{"spec":{}}`, `{"spec":{"user":"jane","groups":["dev"],"ttlSeconds":3600,"server":"https://x:443"}}`,
		`{"spec":{"ttlSeconds":-1}}`, `{"spec":{"ttlSeconds":9223372036854775807}}`, `{"spec":{"server":"://"}}`, `{"unknown":1}`, `{"spec":{}} {}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		kubeconfig, token, worker := &v1alpha1.KubeconfigRequest{}, &v1alpha1.JoinTokenRequest{}, &v1alpha1.WorkerConfigRequest{}
		for _, request := range []struct {
			into        any
			setDefaults func()
			validate    func() error
		}{
			{kubeconfig, kubeconfig.SetDefaults, kubeconfig.Validate},
			{token, token.SetDefaults, token.Validate},
			{worker, worker.SetDefaults, worker.Validate},
		} {
			switch err := decode("a host", body, request.into, request.setDefaults, request.validate); {
			case err == nil:
				if again := request.validate(); again != nil {
					t.Fatalf("%T is taken and not valid: %v", request.into, again)
				}
			default:
				var status apierrors.APIStatus
				if !errors.As(err, &status) || status.Status().Code != 400 {
					t.Fatalf("%T: %v, want a bad request", request.into, err)
				}
			}
		}
	})
}

// A newer host or tenantctl is told which host to upgrade.
func TestRefusalOfWhatIsNewerNamesTheHost(t *testing.T) {
	h := &Host{name: "host-a", version: "v1.2.3"}
	req := &v1alpha1.HostJoinRequest{}
	err := decode(h.reader(), []byte(`{"spec":{"name":"host-b","later":true}}`), req, req.SetDefaults, req.Validate)
	if !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), `"later": host host-a, which runs tenantd v1.2.3, does not know it`) {
		t.Errorf("it is refused so: %v", err)
	}
}

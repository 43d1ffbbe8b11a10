// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"strings"
	"testing"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func TestKubeconfigRequestDefaults(t *testing.T) {
	day := int64(24 * 60 * 60)
	for _, test := range []struct {
		spec   v1alpha1.KubeconfigRequestSpec
		user   string
		groups string
		ttl    int64
	}{
		{v1alpha1.KubeconfigRequestSpec{}, "kubernetes-admin", "system:masters", 365 * day},
		{v1alpha1.KubeconfigRequestSpec{TTLSeconds: 60}, "kubernetes-admin", "system:masters", 60},
		{v1alpha1.KubeconfigRequestSpec{User: "jane"}, "jane", "", day},
		{v1alpha1.KubeconfigRequestSpec{User: "kubernetes-admin"}, "kubernetes-admin", "", day},
		{v1alpha1.KubeconfigRequestSpec{User: "jane", Groups: []string{"a", "b"}}, "jane", "a b", day},
	} {
		r := v1alpha1.KubeconfigRequest{Spec: test.spec}
		r.SetDefaults()
		if r.Spec.User != test.user || strings.Join(r.Spec.Groups, " ") != test.groups || r.Spec.TTLSeconds != test.ttl {
			t.Errorf("%+v becomes %+v", test.spec, r.Spec)
		}
		if err := r.Validate(); err != nil {
			t.Errorf("%+v: %v", test.spec, err)
		}
	}
}

func TestKubeconfigRequestFaults(t *testing.T) {
	spec := func(change func(*v1alpha1.KubeconfigRequestSpec)) v1alpha1.KubeconfigRequestSpec {
		s := v1alpha1.KubeconfigRequestSpec{User: "jane"}
		change(&s)
		return s
	}
	for _, test := range []struct {
		spec v1alpha1.KubeconfigRequestSpec
		want string
	}{
		{v1alpha1.KubeconfigRequestSpec{Groups: []string{"a"}}, "spec.user: Required value"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.User = "a\nb" }), "spec.user: Invalid value"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.User = strings.Repeat("a", 300) }), "spec.user: Too long"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.Groups = []string{"a", ""} }), "spec.groups[1]: Required value"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.Groups = make([]string, 33) }), "spec.groups: Too many"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.TTLSeconds = -1 }), "spec.ttlSeconds: Invalid value"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.TTLSeconds = 59 }), "spec.ttlSeconds: Invalid value"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.TTLSeconds = 366 * 24 * 3600 }), "spec.ttlSeconds: Invalid value"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.Server = "192.0.2.1:443" }), "spec.server: Invalid value"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.Server = "http://a" }), "spec.server: Invalid value"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.Server = "https://:443" }), "spec.server: Invalid value"},
		{spec(func(s *v1alpha1.KubeconfigRequestSpec) { s.Server = "https://u:p@a" }), "spec.server: Invalid value"},
	} {
		r := v1alpha1.KubeconfigRequest{Spec: test.spec}
		r.SetDefaults()
		if err := r.Validate(); err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%+v: fault is %v, want %s", test.spec, err, test.want)
		}
	}
	if err := (&v1alpha1.KubeconfigRequest{}).Validate(); err == nil || !strings.Contains(err.Error(), "kind: ") {
		t.Errorf("a request of no kind: %v", err)
	}
}

func TestJoinTokenRequest(t *testing.T) {
	for ttl, ok := range map[int64]bool{0: true, 60: true, 59: false, -1: false, 365 * 24 * 3600: true, 365*24*3600 + 1: false} {
		r := v1alpha1.JoinTokenRequest{Spec: v1alpha1.JoinTokenRequestSpec{TTLSeconds: ttl}}
		r.SetDefaults()
		if err := r.Validate(); (err == nil) != ok {
			t.Errorf("%d seconds: %v", ttl, err)
		}
		if ttl == 0 && r.Spec.TTLSeconds != 24*3600 {
			t.Errorf("default is %d", r.Spec.TTLSeconds)
		}
	}
}

func TestCredentialsPath(t *testing.T) {
	got := v1alpha1.CredentialsPath("acme", v1alpha1.KubeconfigSubresource)
	if want := "/apis/credentials.tenantd.io/v1alpha1/tenants/acme/kubeconfig"; got != want {
		t.Errorf("path is %s, want %s", got, want)
	}
	if got := v1alpha1.CredentialsPath("../x", "kubeconfig"); strings.Contains(got, "../") {
		t.Errorf("a name leaves the path: %s", got)
	}
}

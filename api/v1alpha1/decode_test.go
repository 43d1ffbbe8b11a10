// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

const acme = `apiVersion: tenantd.io/v1alpha1
kind: Tenant
metadata:
  name: acme
  labels: {team: payments}
  creationTimestamp: "2026-01-02T03:04:05Z"
  finalizers: [tenantd.io/wipe]
spec:
  hostname: acme.k8s.example.com
  replicas: 2
  network: &net {podCIDR: 10.1.0.0/16}
  certSANs: [a.example.com, 192.0.2.1]
  addons: {coreDNS: {enabled: false}, kubeProxy: {image: registry.test/kube-proxy}}
  limits: {storage: 1Gi, connections: null}
status:
  memory: 1048576
  nodes: 3
  conditions:
  - {type: Ready, status: "True", reason: AsExpected, message: "", lastTransitionTime: "2026-01-02T03:04:05Z"}
`

// The decoder reads what the usual one reads; it only says more about mistakes.
func TestParseTenant(t *testing.T) {
	got, err := v1alpha1.ParseTenant("acme.yaml", []byte(acme))
	if err != nil {
		t.Fatal(err)
	}
	want := &v1alpha1.Tenant{}
	if err := yaml.UnmarshalStrict([]byte(acme), want); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("read\n%+v\nwant\n%+v", got, want)
	}
}

func TestParseTenantFaults(t *testing.T) {
	for _, test := range []struct{ old, new, want string }{
		{"replicas: 2", "replica: 2", "t.yaml:10: spec.replica: unknown field; the fields here are addons, certSANs, "},
		{"replicas: 2", "replicas: two", `t.yaml:10: spec.replicas: must be a whole number, not "two"`},
		{"enabled: false", "enabled: maybe", `t.yaml:13: spec.addons.coreDNS.enabled: must be true or false, not "maybe"`},
		{"enabled: false", "enabled: false, on: 1", "t.yaml:13: spec.addons.coreDNS.on: unknown field"},
		{"192.0.2.1]", "1.5]", "t.yaml:12: spec.certSANs[1]: must be a string"},
		{"[a.example.com, 192.0.2.1]", "a.example.com", "t.yaml:12: spec.certSANs: must be a list"},
		{"{team: payments}", "{team: {}}", "t.yaml:5: metadata.labels[team]: must be a string"},
		{"2026-01-02T03:04:05Z\"\n  fin", "yesterday\"\n  fin", `t.yaml:6: metadata.creationTimestamp: "yesterday": parsing time`},
		{"storage: 1Gi", "storage: 1 Gi", `t.yaml:14: spec.limits.storage: "1 Gi": `},
		{"kind: Tenant", "kind: Tenants", "t.yaml:2: kind: Unsupported value"},
		{"  name: acme", "  name: 2026-01-02", "t.yaml:4: metadata.name: must be a string"},
	} {
		text := strings.Replace(acme, test.old, test.new, 1)
		if text == acme {
			t.Fatalf("%q is not in the text", test.old)
		}
		_, err := v1alpha1.ParseTenant("t.yaml", []byte(text))
		if err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: fault is %v, want %s", test.new, err, test.want)
		}
	}
}

// Whatever the file holds, the decoder answers: with a tenant, or with an error that
// names the file.
func FuzzParseTenant(f *testing.F) {
	f.Add(acme)
	f.Add("")
	f.Add("# comment")
	f.Add("--- !!binary x")
	f.Add("a: &a [*a]")
	f.Add("apiVersion: tenantd.io/v1alpha1\nkind: Tenant\n<<: {spec: 1}")
	f.Add("apiVersion: tenantd.io/v1alpha1\nkind: Tenant\nspec: {limits: {storage: 1e3}}")
	f.Fuzz(func(t *testing.T, text string) {
		tenant, err := v1alpha1.ParseTenant("t.yaml", []byte(text))
		if (tenant == nil) == (err == nil) {
			t.Fatalf("tenant %v with error %v", tenant, err)
		}
		if err != nil && !strings.HasPrefix(err.Error(), "t.yaml:") {
			t.Fatalf("error does not name the file: %v", err)
		}
	})
}

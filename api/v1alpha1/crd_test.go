// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdvalidation "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"sigs.k8s.io/yaml"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// rules judge objects of one kind as the system plane's API server does.
type rules struct {
	kind       string
	structural *schema.Structural
	schema     validation.SchemaValidator
	cel        *cel.Validator
}

// definition returns the definition of a kind.
func definition(t *testing.T, kind string) *apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	for _, crd := range v1alpha1.CustomResourceDefinitions() {
		if crd.Spec.Names.Kind == kind {
			return crd
		}
	}
	t.Fatalf("there is no definition of %s", kind)
	return nil
}

func newRules(t *testing.T, kind string) rules {
	t.Helper()
	crd := definition(t, kind)
	var internal apiextensions.JSONSchemaProps
	if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(crd.Spec.Versions[0].Schema.OpenAPIV3Schema, &internal, nil); err != nil {
		t.Fatal(err)
	}
	structural, err := schema.NewStructural(&internal)
	if err != nil {
		t.Fatal(err)
	}
	schemaValidator, _, err := validation.NewSchemaValidator(&internal)
	if err != nil {
		t.Fatal(err)
	}
	return rules{kind, structural, schemaValidator, cel.NewValidator(structural, true, celconfig.PerCallLimit)}
}

// object reads an object of the kind and sets its defaults.
func (r rules) object(t *testing.T, name, spec string) map[string]any {
	t.Helper()
	object := map[string]any{
		"apiVersion": "tenantd.io/v1alpha1",
		"kind":       r.kind,
		"metadata":   map[string]any{"name": name},
	}
	if spec != "" {
		var value any
		if err := yaml.Unmarshal([]byte(spec), &value, func(d *json.Decoder) *json.Decoder { return d }); err != nil {
			t.Fatal(err)
		}
		object["spec"] = normalize(value)
	}
	defaulting.Default(object, r.structural)
	return object
}

// normalize turns whole floats into the int64 that an API server's decoder makes.
func normalize(value any) any {
	switch value := value.(type) {
	case map[string]any:
		for k, v := range value {
			value[k] = normalize(v)
		}
	case []any:
		for i, v := range value {
			value[i] = normalize(v)
		}
	case float64:
		return int64(value)
	}
	return value
}

func (r rules) judge(t *testing.T, object, old map[string]any) field.ErrorList {
	t.Helper()
	var faults field.ErrorList
	if old == nil {
		faults = validation.ValidateCustomResource(nil, object, r.schema)
	} else {
		faults = validation.ValidateCustomResourceUpdate(nil, object, old, r.schema)
	}
	faults = append(faults, listtype.ValidateListSetsAndMaps(nil, r.structural, object)...)
	var previous any
	if old != nil {
		previous = old
	}
	more, _ := r.cel.Validate(t.Context(), nil, r.structural, object, previous, celconfig.RuntimeCELCostBudget)
	return append(faults, more...)
}

// The API server accepts the definition: structure, defaults, rules and their cost.
func TestDefinitionIsValid(t *testing.T) {
	for _, crd := range v1alpha1.CustomResourceDefinitions() {
		apiextensionsv1.SetObjectDefaults_CustomResourceDefinition(crd)
		var internal apiextensions.CustomResourceDefinition
		if err := apiextensionsv1.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(crd, &internal, nil); err != nil {
			t.Fatal(err)
		}
		internal.Status.StoredVersions = []string{v1alpha1.GroupVersion.Version}
		for _, err := range crdvalidation.ValidateCustomResourceDefinition(t.Context(), &internal) {
			t.Errorf("%s: %v", crd.Name, err)
		}
	}
}

func TestDefinitionIsTheEmbeddedFile(t *testing.T) {
	files, err := filepath.Glob("crd/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		// A rule that gofmt took for prose has lost its quotes.
		if i := bytes.IndexAny(data, "“”"); i >= 0 {
			t.Errorf("%s: a typographic quote at byte %d: write the rule without two single quotes in a declaration's comment", file, i)
		}
		var crd apiextensionsv1.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(data, &crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		names = append(names, crd.Name)
		if v1alpha1.CRDGeneration(&crd) < 1 {
			t.Errorf("%s has no generation: an older tenantd would put its own in its place", file)
		}
		if got := definition(t, crd.Spec.Names.Kind); !equality.Semantic.DeepEqual(got, &crd) {
			t.Errorf("%s is not what is served", file)
		}
	}
	if got, want := strings.Join(names, " "), "hosts.tenantd.io tenants.tenantd.io"; got != want {
		t.Errorf("the files define %s, want %s", got, want)
	}
	if n := len(v1alpha1.CustomResourceDefinitions()); n != len(names) {
		t.Errorf("%d definitions are served, want %d", n, len(names))
	}
}

func TestDefinitionNamesAndColumns(t *testing.T) {
	for kind, want := range map[string]struct{ short, columns, wide string }{
		"Tenant": {"tn", "HOSTNAME PHASE HOST VERSION AGE", "REPLICAS NODES STORAGE MEMORY"},
		"Host":   {"hst", "ROLE STATE VERSION TENANTS AGE", "ADDRESS MEMORY LEADER LAG LOAD"},
	} {
		crd := definition(t, kind)
		if crd.Spec.Scope != apiextensionsv1.ClusterScoped || !slices.Equal(crd.Spec.Names.ShortNames, []string{want.short}) {
			t.Errorf("%s: scope %s, short names %v", kind, crd.Spec.Scope, crd.Spec.Names.ShortNames)
		}
		if crd.Spec.Versions[0].Subresources.Status == nil {
			t.Errorf("%s: no status subresource", kind)
		}
		var columns, wide []string
		for _, c := range crd.Spec.Versions[0].AdditionalPrinterColumns {
			if c.Priority > 0 {
				wide = append(wide, strings.ToUpper(c.Name))
			} else {
				columns = append(columns, strings.ToUpper(c.Name))
			}
		}
		if got := strings.Join(columns, " "); got != want.columns {
			t.Errorf("%s: columns are %s, want %s", kind, got, want.columns)
		}
		if got := strings.Join(wide, " "); got != want.wide {
			t.Errorf("%s: wide columns are %s, want %s", kind, got, want.wide)
		}
	}
}

// kubectl explain has something to say about every field.
func TestEveryFieldIsDescribed(t *testing.T) {
	var walk func(path string, props apiextensionsv1.JSONSchemaProps)
	walk = func(path string, props apiextensionsv1.JSONSchemaProps) {
		for name, p := range props.Properties {
			at := path + "." + name
			if p.Description == "" && !strings.HasSuffix(at, "/.metadata") {
				t.Errorf("%s has no description", at)
			}
			walk(at, p)
		}
	}
	for _, crd := range v1alpha1.CustomResourceDefinitions() {
		walk(crd.Name+"/", *crd.Spec.Versions[0].Schema.OpenAPIV3Schema)
	}
}

// A column shows a field that there is.
func TestColumnsAreFields(t *testing.T) {
	for _, crd := range v1alpha1.CustomResourceDefinitions() {
		for _, c := range crd.Spec.Versions[0].AdditionalPrinterColumns {
			at := *crd.Spec.Versions[0].Schema.OpenAPIV3Schema
			for name := range strings.SplitSeq(strings.TrimSuffix(c.JSONPath[1:], "[0]"), ".") {
				p, ok := at.Properties[name]
				if !ok && name != "creationTimestamp" { // of the metadata, which has no schema
					t.Errorf("%s: column %s is of %s, which is no field", crd.Name, c.Name, c.JSONPath)
					break
				}
				at = p
			}
		}
	}
}

func TestDefaults(t *testing.T) {
	rules := newRules(t, "Tenant")
	want := `addons:
  coreDNS:
    enabled: true
  kubeProxy:
    enabled: true
limits:
  connections: 10000
  customResourceDefinitionStorage: 16Mi
  customResourceDefinitions: 250
  objectSize: 1536Ki
  objects: 50000
  requestsInFlight: 200
  requestsPerSecond: 500
  watches: 5000
network:
  dnsDomain: cluster.local
  podCIDR: 10.244.0.0/16
  serviceCIDR: 10.96.0.0/16
  workerVIP: 172.20.0.1
replicas: 1
`
	for _, spec := range []string{"", "{}", "{network: {}, addons: {kubeProxy: {}}, limits: {}}"} {
		object := rules.object(t, "acme", spec)
		got, err := yaml.Marshal(object["spec"])
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != want {
			t.Errorf("spec %q has the defaults\n%s\nwant\n%s", spec, got, want)
		}
		for _, fault := range rules.judge(t, object, nil) {
			t.Errorf("spec %q: %v", spec, fault)
		}
	}
}

// The Go types and the schema say the same: what Go writes for an object that sets
// nothing leaves every default to the server.
func TestZeroObjectLeavesTheDefaults(t *testing.T) {
	for _, object := range []any{&v1alpha1.Tenant{}, &v1alpha1.Host{}} {
		data, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		if got := string(data); got != "{}" {
			t.Errorf("a zero %T is written as %s", object, got)
		}
	}
}

// What Go writes for an object that says everything there is to say, the schema takes,
// and it knows every field.
func TestSchemaTakesWhatGoWrites(t *testing.T) {
	five, quantity, now := int32(5), resource.MustParse("350m"), metav1.Now()
	conditions := []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAsExpected, LastTransitionTime: now}}
	for kind, object := range map[string]any{
		"Host": &v1alpha1.Host{
			Spec: v1alpha1.HostSpec{Draining: true},
			Status: v1alpha1.HostStatus{
				State: v1alpha1.HostDraining, ObservedGeneration: 2, Address: "192.0.2.1:443", PeerAddress: "192.0.2.1:2380", GossipAddress: "192.0.2.1:7946",
				Role: v1alpha1.HostVoter, Version: "v0.3.0", Tenants: &five, Memory: v1alpha1.HostMemory{Used: &quantity, Total: &quantity},
				Cores: 2, Load: &quantity, Etcd: &v1alpha1.HostEtcd{Leader: true, Lag: 7}, HeartbeatTime: now, Conditions: conditions,
			},
		},
		"Tenant": &v1alpha1.Tenant{
			Spec: v1alpha1.TenantSpec{Hostname: "a.example.com", Placement: v1alpha1.TenantPlacement{Hosts: []string{"host-a"}}},
			Status: v1alpha1.TenantStatus{
				Phase: v1alpha1.TenantMoving, Placement: []string{"host-a", "host-b"}, Nodes: &five, Storage: &quantity, Memory: &quantity, AsleepSince: &now, Conditions: conditions,
			},
		},
	} {
		data, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		var written map[string]any
		if err := json.Unmarshal(data, &written); err != nil {
			t.Fatal(err)
		}
		r := newRules(t, kind)
		written = normalize(written).(map[string]any)
		written["apiVersion"], written["kind"], written["metadata"] = "tenantd.io/v1alpha1", kind, map[string]any{"name": "a"}
		for _, fault := range r.judge(t, written, nil) {
			t.Errorf("%s: %v", kind, fault)
		}
		for _, unknown := range pruning.PruneWithOptions(written, r.structural, true, schema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true}) {
			t.Errorf("%s: the schema does not know %s", kind, unknown)
		}
	}
}

func TestHostRules(t *testing.T) {
	rules := newRules(t, "Host")
	for _, test := range []struct{ name, spec, fault string }{
		{"a", "", ""},
		{"host-a", "{draining: true}", ""},
		{"host-a.example.com", "{}", ""},
		{strings.Repeat("a", 63), "", ""},
		{strings.Repeat("a", 64), "", "metadata.name"},
		{"192.0.2.1", "", "metadata.name"},
		{"Host", "", "metadata.name"},
		{"a..b", "", "metadata.name"},
		{"a\n", "", "metadata.name"},
		{"a", "{draining: 1}", "spec.draining"},
	} {
		t.Run(test.name+test.spec, func(t *testing.T) {
			checkFault(t, rules.judge(t, rules.object(t, test.name, test.spec), nil), test.fault)
		})
	}
}

// The object, the configuration file and a tenant's wish agree on what can be a host's
// name.
func TestHostNamesOfTheObjectAndOfTheConfiguration(t *testing.T) {
	rules := newRules(t, "Host")
	for _, name := range []string{"a", "host-a", "a.b", "a.1", "10.0.0.1", "A", "a_b", "-a", "a-", "a.", strings.Repeat("a", 63), strings.Repeat("a", 64)} {
		byObject := len(rules.judge(t, rules.object(t, name, ""), nil)) == 0
		byFile := (&v1alpha1.HostConfiguration{Name: name}).Validate() == nil
		wish := "{placement: {hosts: ['" + name + "']}}"
		tenants := newRules(t, "Tenant")
		byWish := len(tenants.judge(t, tenants.object(t, "a", wish), nil)) == 0
		if byObject != byFile || byObject != byWish {
			t.Errorf("%q: as an object %v, in the configuration %v, as a tenant's wish %v", name, byObject, byFile, byWish)
		}
	}
}

func TestRules(t *testing.T) {
	label := func(n int) string { return strings.Repeat("a", n) }
	longName := strings.Repeat(label(63)+".", 3) + label(61) // 253
	sans := func(n int) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(", a" + strings.Repeat("x", i) + ".example.com")
		}
		return "{certSANs: [" + b.String()[2:] + "]}"
	}
	rules := newRules(t, "Tenant")
	for _, test := range []struct {
		name, spec string
		fault      string // the field that the fault names; empty: no fault
	}{
		{"a", "", ""},
		{"0", "", ""},
		{"a-b-1", "", ""},
		{label(40), "", ""},
		{label(41), "", "metadata.name"},
		{"system", "", "metadata.name"},
		{"systems", "", ""},
		{"Acme", "", "metadata.name"},
		{"a.b", "", "metadata.name"},
		{"-a", "", "metadata.name"},
		{"a-", "", "metadata.name"},
		{"a_b", "", "metadata.name"},
		{"a\n", "", "metadata.name"},

		{"a", "{hostname: acme.k8s.example.com}", ""},
		{"a", "{hostname: acme}", ""},
		{"a", `{hostname: ""}`, ""},
		{"a", "{hostname: 0.0.0.x1}", ""},
		{"a", "{hostname: " + longName + "}", ""},
		{"a", "{hostname: a" + longName + "}", "spec.hostname"},
		{"a", "{hostname: " + label(63) + ".b}", ""},
		{"a", "{hostname: " + label(64) + ".b}", "spec.hostname"},
		{"a", "{hostname: Acme.example.com}", "spec.hostname"},
		{"a", "{hostname: 192.0.2.1}", "spec.hostname"},
		{"a", `{hostname: "2001:db8::1"}`, "spec.hostname"},
		{"a", "{hostname: 010.0.0.1}", "spec.hostname"},
		{"a", "{hostname: a.example.com.}", "spec.hostname"},
		{"a", "{hostname: a..example.com}", "spec.hostname"},
		{"a", "{hostname: .example.com}", "spec.hostname"},
		{"a", `{hostname: "*.example.com"}`, "spec.hostname"},
		{"a", "{hostname: a_b.example.com}", "spec.hostname"},
		{"a", "{hostname: -a.example.com}", "spec.hostname"},
		{"a", `{hostname: "a.example.com:443"}`, "spec.hostname"},
		{"a", `{hostname: "a.example.com\n"}`, "spec.hostname"},
		{"a", "{hostname: bücher.example.com}", "spec.hostname"},
		{"a", "{hostname: 7}", "spec.hostname"},

		{"a", "{konnectivityHostname: tunnel.example.com}", ""},
		{"a", "{hostname: a.example.com, konnectivityHostname: b.example.com}", ""},
		{"a", `{hostname: "", konnectivityHostname: ""}`, ""},
		{"a", "{hostname: a.example.com, konnectivityHostname: a.example.com}", "spec.konnectivityHostname"},
		{"a", "{konnectivityHostname: 192.0.2.1}", "spec.konnectivityHostname"},

		{"a", "{replicas: 5}", ""},
		{"a", "{replicas: 0}", "spec.replicas"},
		{"a", "{replicas: 6}", "spec.replicas"},
		{"a", "{replicas: -1}", "spec.replicas"},

		{"a", "{placement: {}}", ""},
		{"a", "{placement: {hosts: []}}", ""},
		{"a", "{placement: {hosts: [host-a, host-b.example.com, c, d, e]}}", ""},
		{"a", "{placement: {hosts: [a, b, c, d, e, f]}}", "spec.placement.hosts"},
		{"a", "{placement: {hosts: [a, b, a]}}", "spec.placement.hosts[2]"},
		{"a", "{placement: {hosts: [a, Host]}}", "spec.placement.hosts[1]"},
		{"a", "{placement: {hosts: ['']}}", "spec.placement.hosts[0]"},
		{"a", "{placement: {hosts: [192.0.2.1]}}", "spec.placement.hosts[0]"},
		{"a", "{placement: {hosts: host-a}}", "spec.placement.hosts"},

		{"a", "{certSANs: [a.example.com, 192.0.2.1, '2001:db8::1', '*.example.com', localhost]}", ""},
		{"a", sans(32), ""},
		{"a", sans(33), "spec.certSANs"},
		{"a", "{certSANs: [a, a]}", "spec.certSANs[1]"},
		{"a", "{certSANs: [a, B]}", "spec.certSANs[1]"},
		{"a", `{certSANs: [""]}`, "spec.certSANs[0]"},
		{"a", "{certSANs: ['a.*.example.com']}", "spec.certSANs[0]"},
		{"a", "{certSANs: ['*']}", "spec.certSANs[0]"},
		{"a", "{certSANs: [192.0.2.300]}", "spec.certSANs[0]"},
		{"a", "{certSANs: [10.0.0.0/8]}", "spec.certSANs[0]"},

		{"a", "{network: {podCIDR: 10.1.0.0/16, serviceCIDR: 10.2.0.0/16}}", ""},
		{"a", "{network: {podCIDR: 10.0.0.0/8, serviceCIDR: 192.168.0.0/28}}", ""},
		{"a", "{network: {podCIDR: 100.64.0.0/10, serviceCIDR: 192.168.0.0/24}}", ""},
		{"a", "{network: {podCIDR: 'fd00:1::/56', serviceCIDR: 'fd00:2::/112', workerVIP: 'fd00:3::1'}}", ""},
		{"a", "{network: {podCIDR: 10.244.0.0}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: ''}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: nonsense}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: 10.244.0.1/16}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: 10.244.0.0/33}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: 10.244.0.0/25}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: 0.0.0.0/8}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: 127.0.0.0/16}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: 169.254.0.0/16}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: 224.0.0.0/16}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: 'fd00:1::/40', serviceCIDR: 'fd00:2::/112', workerVIP: 'fd00:3::1'}}", "spec.network.podCIDR"},
		{"a", "{network: {podCIDR: '::ffff:10.0.0.0/104'}}", "spec.network.podCIDR"},
		{"a", "{network: {serviceCIDR: 10.96.0.0/11}}", "spec.network.serviceCIDR"},
		{"a", "{network: {serviceCIDR: 10.96.0.0/29}}", "spec.network.serviceCIDR"},
		{"a", "{network: {serviceCIDR: 10.96.0.1/16}}", "spec.network.serviceCIDR"},
		{"a", "{network: {serviceCIDR: ten}}", "spec.network.serviceCIDR"},
		{"a", "{network: {podCIDR: 'fd00:1::/56', serviceCIDR: 'fd00:2::/64', workerVIP: 'fd00:3::1'}}", "spec.network.serviceCIDR"},
		{"a", "{network: {podCIDR: 10.0.0.0/8}}", "spec.network.serviceCIDR"},                               // holds the Services
		{"a", "{network: {podCIDR: 10.96.4.0/24}}", "spec.network.serviceCIDR"},                             // held by the Services
		{"a", "{network: {podCIDR: 10.5.0.0/16, serviceCIDR: 10.5.0.0/16}}", "spec.network.serviceCIDR"},    // the same
		{"a", "{network: {podCIDR: 'fd00::/56'}}", "spec.network.serviceCIDR"},                              // of two families
		{"a", "{network: {podCIDR: 'fd00:1::/56', serviceCIDR: 'fd00:2::/112'}}", "spec.network.workerVIP"}, // default VIP
		{"a", "{network: {workerVIP: 10.96.0.1}}", "spec.network.workerVIP"},
		{"a", "{network: {workerVIP: 10.244.7.7}}", "spec.network.workerVIP"},
		{"a", "{network: {workerVIP: 'fd00::1'}}", "spec.network.workerVIP"},
		{"a", "{network: {workerVIP: 127.0.0.1}}", "spec.network.workerVIP"},
		{"a", "{network: {workerVIP: 169.254.1.1}}", "spec.network.workerVIP"},
		{"a", "{network: {workerVIP: 0.0.0.0}}", "spec.network.workerVIP"},
		{"a", "{network: {workerVIP: 224.0.0.1}}", "spec.network.workerVIP"},
		{"a", "{network: {workerVIP: 255.255.255.255}}", "spec.network.workerVIP"},
		{"a", "{network: {workerVIP: 172.20.0.1/32}}", "spec.network.workerVIP"},
		{"a", "{network: {workerVIP: host}}", "spec.network.workerVIP"},
		{"a", "{network: {dnsDomain: k8s.acme.internal}}", ""},
		{"a", "{network: {dnsDomain: ''}}", "spec.network.dnsDomain"},
		{"a", "{network: {dnsDomain: Cluster.Local}}", "spec.network.dnsDomain"},
		{"a", "{network: {dnsDomain: " + label(60) + "." + label(61) + "}}", "spec.network.dnsDomain"},

		{"a", "{addons: {coreDNS: {enabled: false}, kubeProxy: {image: 'registry.example.com:5000/x/kube-proxy:v1.37.1@sha256:0123'}}}", ""},
		{"a", "{addons: {coreDNS: {image: 'a b'}}}", "spec.addons.coreDNS.image"},
		{"a", "{addons: {kubeProxy: {image: '-x'}}}", "spec.addons.kubeProxy.image"},

		{"a", "{limits: {storage: 1Gi, connections: 1}}", ""},
		{"a", "{limits: {storage: 1048576}}", ""},
		{"a", "{limits: {storage: 0}}", "spec.limits.storage"},
		{"a", "{limits: {storage: '0'}}", "spec.limits.storage"},
		{"a", "{limits: {storage: -1Mi}}", "spec.limits.storage"},
		{"a", "{limits: {storage: -5}}", "spec.limits.storage"},
		{"a", "{limits: {storage: lots}}", "spec.limits.storage"},
		{"a", "{limits: {connections: 0}}", "spec.limits.connections"},
		{"a", "{limits: {customResourceDefinitions: 0, customResourceDefinitionStorage: 0}}", ""},
		{"a", "{limits: {customResourceDefinitions: -1}}", "spec.limits.customResourceDefinitions"},
		{"a", "{limits: {customResourceDefinitionStorage: -1}}", "spec.limits.customResourceDefinitionStorage"},

		{"a", "{sleep: {enabled: false}}", ""},
		{"a", "{sleep: {after: 1h30m0s}}", ""},
		{"a", "{sleep: {after: 10s}}", ""},
		{"a", "{sleep: {after: 9.9s}}", "spec.sleep.after"},
		{"a", "{sleep: {after: -1h}}", "spec.sleep.after"},
		{"a", "{sleep: {after: soon}}", "spec.sleep.after"},
		{"a", "{limits: {objects: 999}}", "spec.limits.objects"},
		{"a", "{limits: {objectSize: 16Ki}}", ""},
		{"a", "{limits: {objectSize: 16383}}", "spec.limits.objectSize"},
		{"a", "{limits: {requestsInFlight: 9}}", "spec.limits.requestsInFlight"},
		{"a", "{limits: {requestsPerSecond: 9}}", "spec.limits.requestsPerSecond"},
		{"a", "{limits: {watches: 99}}", "spec.limits.watches"},
	} {
		t.Run(test.name+test.spec, func(t *testing.T) {
			checkFault(t, rules.judge(t, rules.object(t, test.name, test.spec), nil), test.fault)
		})
	}
}

func TestUpdateRules(t *testing.T) {
	rules := newRules(t, "Tenant")
	for _, test := range []struct{ before, after, fault string }{
		{"{hostname: a.example.com}", "{hostname: b.example.com}", ""},
		{"{replicas: 1}", "{replicas: 3, certSANs: [a], konnectivityHostname: t.example.com, limits: {storage: 1Gi}}", ""},
		{"{placement: {hosts: [a]}}", "{placement: {hosts: [b, a]}}", ""},
		{"{}", "{network: {podCIDR: 10.244.0.0/16}}", ""}, // the default, now said
		{"{}", "{network: {podCIDR: 10.245.0.0/16}}", "spec.network.podCIDR"},
		{"{network: {serviceCIDR: 10.97.0.0/16}}", "{}", "spec.network.serviceCIDR"},
		{"{}", "{network: {dnsDomain: other.local}}", "spec.network.dnsDomain"},
		{"{}", "{network: {workerVIP: 172.20.0.2}}", "spec.network.workerVIP"},
	} {
		t.Run(test.before+test.after, func(t *testing.T) {
			checkFault(t, rules.judge(t, rules.object(t, "a", test.after), rules.object(t, "a", test.before)), test.fault)
		})
	}
}

// checkFault wants no fault, or at least one and all of them about one field, with
// no rule that broke instead of judging.
func checkFault(t *testing.T, faults field.ErrorList, want string) {
	t.Helper()
	if want == "" && len(faults) > 0 {
		t.Errorf("unexpected: %v", faults)
	}
	if want != "" && len(faults) == 0 {
		t.Errorf("no fault, want one about %s", want)
	}
	for _, fault := range faults {
		named := fault.Field
		if strings.HasPrefix(fault.Detail, "metadata.name: ") {
			named = "metadata.name" // a rule of the whole object cannot point into metadata
		}
		if want != "" && named != want {
			t.Errorf("names %q, want %q: %v", named, want, fault)
		}
		if strings.Contains(fault.Detail, "rule compile error") || strings.Contains(fault.Detail, "no such") || strings.Contains(fault.Detail, "cost") {
			t.Errorf("a rule broke: %v", fault)
		}
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// processes are attempts to end the process, or to keep it busy.
func processes() []attack {
	return []attack{
		{
			name:      "DeletedRoles",
			tries:     "ClusterRoles and flow schemas of upstream's are deleted, and a ValidatingAdmissionPolicy forbids that the next start brings them back",
			must:      "the tenant does not get ready and says for what it waits; it gets ready when the policy is gone",
			plant:     deleteRoles,
			restarted: restoreRoles,
		},
		{
			name:      "CatchAllWebhooks",
			tries:     "webhooks for everything with the policy Fail, which nobody answers, while the daemon stops and starts",
			must:      "the daemon stops and starts in order; the tenant is ready again when the webhooks are gone",
			plant:     catchAll,
			restarted: catchNothing,
		},
		{
			name:      "OddNodes",
			tries:     "nodes with pod CIDRs outside of the cluster's, overlapping, and of another family, while the daemon stops and starts",
			must:      "the tenant is ready, so that they can be deleted, and the log names one; then nodes get their CIDRs",
			watched:   "the daemon's log",
			plant:     oddNodes,
			restarted: evenNodes,
		},
		{
			name:      "OddObjects",
			tries:     "objects at the edges of what validation allows for all controllers and the scheduler, while the daemon stops and starts",
			must:      "controllers and scheduler go on",
			plant:     oddObjects,
			restarted: controllersWork,
		},
		{
			name:  "MalformedBodies",
			tries: "bodies that are not JSON, YAML, CBOR or protobuf, lie about their lengths, or are nested a hundred thousand deep, to built-in and custom resources",
			must:  "each is refused",
			run:   malformedBodies,
		},
		{
			name:  "PatchBombs",
			tries: "JSON patches that copy what they copied, and patches nested as deep as fits",
			must:  "each is refused, and the object stays as it was",
			run:   patchBombs,
		},
		{
			name:  "CELBombs",
			tries: "admission policies and CRDs whose rules cost more than can be paid",
			must:  "rules that are too expensive are refused or stopped",
			run:   celBombs,
		},
		{
			name:  "HugeSchemas",
			tries: "a CustomResourceDefinition of a megabyte, and one nested as deep as is allowed",
			must:  "it is served or refused, and can be deleted",
			run:   hugeSchemas,
		},
		{
			name:  "HugeReviews",
			tries: "TokenReviews with megabytes of token, access reviews with thousands of groups, selectors of a megabyte",
			must:  "each is answered",
			run:   hugeReviews,
		},
		{
			name:  "WatchStorm",
			tries: "two thousand watches, a write that reaches all of them, and the tenant's removal while they are open",
			must:  "the tenant is removed and the watches end",
			run:   watchStorm,
		},
		{
			name:  "EventFlood",
			tries: "a thousand events at once, and the tenant's removal",
			must:  "all are stored or refused by a limit",
			run:   eventFlood,
		},
		{
			name:  "EndlessWebhook",
			tries: "webhooks that answer without end, as they are and as a gzip bomb",
			must:  "the call fails after a bounded number of bytes",
			run:   endlessWebhook,
		},
		{
			name:  "EndlessConversion",
			tries: "a conversion webhook that answers without end",
			must:  "the request fails after a bounded number of bytes",
			run:   endlessConversion,
		},
		{
			name:  "EndlessAPI",
			tries: "an aggregated API whose discovery and OpenAPI documents have no end",
			must:  "they are given up after a bounded number of bytes; the rest of the API is served",
			run:   endlessAPI,
		},
		{
			name:  "GarbageAPI",
			tries: "an aggregated API whose documents are garbage, refer to themselves, or are nested a hundred thousand deep",
			must:  "the rest of the API is served, discovery and OpenAPI included",
			run:   garbageAPI,
		},
	}
}

const deniedRoles = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: none}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
    - {apiGroups: [rbac.authorization.k8s.io], apiVersions: ["*"], operations: [CREATE, UPDATE], resources: ["*"]}
    - {apiGroups: [scheduling.k8s.io], apiVersions: ["*"], operations: [CREATE], resources: ["*"]}
    - {apiGroups: [flowcontrol.apiserver.k8s.io], apiVersions: ["*"], operations: [CREATE, UPDATE], resources: ["*"]}
  validations: [{expression: "false", message: "not in this cluster"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: none}
spec: {policyName: none, validationActions: [Deny]}
`

func deleteRoles(t *testing.T, a *attacker) {
	a.apply(deniedRoles)
	eventually(t, "the policy is in force", func() error {
		if r := a.kubectl("", "create", "clusterrole", "probe", "--verb=get", "--resource=pods", "--dry-run=server"); !strings.Contains(r.stderr, "not in this cluster") {
			return errors.New("roles can be created")
		}
		return nil
	})
	for _, what := range [][]string{
		{"clusterrole", "system:node", "system:kube-scheduler", "cluster-admin", "system:discovery"},
		{"clusterrolebinding", "cluster-admin", "system:discovery"},
		{"flowschema", "system-leader-election", "service-accounts"},
		{"prioritylevelconfiguration", "workload-low"},
	} {
		if r := a.kubectl("", append([]string{"delete", "--wait=false", "--ignore-not-found"}, what...)...); r.code != 0 {
			t.Fatal(r.stderr)
		}
	}
}

func restoreRoles(t *testing.T, a *attacker) {
	eventually(t, "the tenant says for what it waits", func() error {
		tenant := a.tenant()
		for _, c := range tenant.Status.Conditions {
			if strings.Contains(c.Message, "bootstrap-roles") {
				return nil
			}
		}
		return fmt.Errorf("it is %s: %+v", tenant.Status.Phase, tenant.Status.Conditions)
	})
	// Upstream is patient for half a minute, and then would end the process.
	eventually(t, "upstream has given up", func() error {
		for line := range strings.Lines(a.daemon.log.String()) {
			if strings.Contains(line, "start is held up") && strings.Contains(line, "tenant="+a.name) {
				return nil
			}
		}
		return errors.New("it has not")
	})
	if r := a.kubectl("", "delete", "validatingadmissionpolicybinding", "none"); r.code != 0 {
		t.Fatal(r.stderr)
	}
	a.awaitReady()
	if r := a.kubectl("", "get", "clusterrole", "cluster-admin", "system:node"); r.code != 0 {
		t.Errorf("what was deleted has not come back: %s", r.stderr)
	}
}

func catchAll(t *testing.T, a *attacker) {
	const all = `
apiVersion: admissionregistration.k8s.io/v1
kind: %[1]sWebhookConfiguration
metadata: {name: all}
webhooks:
- name: all.hostile.test
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  timeoutSeconds: 30
  clientConfig: {url: "https://10.0.0.1/all"}
  rules: [{apiGroups: ["*"], apiVersions: ["*"], operations: ["*"], resources: ["*/*"]}]
---
`
	a.apply(fmt.Sprintf(all, "Validating") + fmt.Sprintf(all, "Mutating"))
	eventually(t, "the webhooks are in force", func() error {
		if r := a.kubectl("", "-n", "default", "create", "configmap", "caught"); r.code == 0 {
			a.kubectl("", "-n", "default", "delete", "configmap", "caught")
			return errors.New("objects can be created")
		}
		return nil
	})
	// What the next start brings back passes by them too.
	a.kubectl("", "delete", "--wait=false", "clusterrole", "system:node")
}

func catchNothing(t *testing.T, a *attacker) {
	eventually(t, "the webhooks are gone", func() error {
		for _, kind := range []string{"validating", "mutating"} {
			if r := a.kubectl("", "delete", "--ignore-not-found", kind+"webhookconfiguration", "all"); r.code != 0 {
				return errors.New(r.stderr)
			}
		}
		return nil
	})
	a.awaitReady()
	if r := a.kubectl("", "-n", "default", "create", "configmap", "free"); r.code != 0 {
		t.Error(r.stderr)
	}
}

func oddNodes(t *testing.T, a *attacker) {
	for name, spec := range map[string]string{
		"outside": `{podCIDR: 192.0.2.0/24, podCIDRs: [192.0.2.0/24]}`,
		"all":     `{podCIDR: 0.0.0.0/0, podCIDRs: [0.0.0.0/0]}`,
		"ipv6":    `{podCIDR: "2001:db8::/64", podCIDRs: ["2001:db8::/64"]}`,
		"both":    `{podCIDR: 10.244.1.0/24, podCIDRs: [10.244.1.0/24, "2001:db8:1::/64"]}`,
		"twice":   `{podCIDR: 10.244.1.0/24, podCIDRs: [10.244.1.0/24]}`,
		"wide":    `{podCIDR: 10.244.0.0/15, podCIDRs: [10.244.0.0/15]}`,
		"narrow":  `{podCIDR: 10.244.9.9/32, podCIDRs: [10.244.9.9/32]}`,
	} {
		// Those that upstream refuses are none.
		a.kubectl(fmt.Sprintf("{apiVersion: v1, kind: Node, metadata: {name: %s}, spec: %s}", name, spec), "create", "-f", "-")
	}
	if nodes := a.kubectl("", "get", "nodes", "-o", "name").stdout; strings.Count(nodes, "\n") < 3 {
		t.Fatalf("there are too few nodes: %q", nodes)
	}
}

func evenNodes(t *testing.T, a *attacker) {
	a.awaitReady()
	eventually(t, "the log says which node is at fault", func() error {
		if !strings.Contains(a.daemon.log.String(), "which is not of this cluster's") {
			return errors.New("it does not")
		}
		return nil
	})
	if r := a.kubectl("", "delete", "nodes", "--all", "--wait=false"); r.code != 0 {
		t.Fatal(r.stderr)
	}
	a.apply("{apiVersion: v1, kind: Node, metadata: {name: even}}")
	eventually(t, "a node gets a pod CIDR", func() error {
		if got := a.kubectl("", "get", "node", "even", "-o", "jsonpath={.spec.podCIDR}").stdout; !strings.HasPrefix(got, "10.244.") {
			return fmt.Errorf("it has %q", got)
		}
		return nil
	})
}

func oddObjects(t *testing.T, a *attacker) {
	r := a.kubectl(odd, "create", "--validate=false", "-f", "-")
	if created := strings.Count(r.stdout, " created"); created < 30 {
		t.Errorf("only %d odd objects were accepted: %s", created, r.stderr)
	}
	a.controllersWork("before")
}

func controllersWork(t *testing.T, a *attacker) {
	a.awaitReady()
	a.controllersWork("after")
}

// controllersWork checks that the controllers and the scheduler do their work.
func (a *attacker) controllersWork(name string) {
	a.t.Helper()
	a.apply(fmt.Sprintf(`
apiVersion: v1
kind: Node
metadata: {name: plain-%[1]s, labels: {plain: %[1]s}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: plain-%[1]s, namespace: default}
spec:
  replicas: 1
  selector: {matchLabels: {app: plain-%[1]s}}
  template:
    metadata: {labels: {app: plain-%[1]s}}
    spec: {containers: [{name: main, image: none}], nodeSelector: {plain: %[1]s}, tolerations: [{operator: Exists}]}
`, name))
	a.kubectl("", "patch", "node", "plain-"+name, "--subresource=status", "--type=merge", "-p",
		`{"status":{"capacity":{"cpu":"4","memory":"8Gi","pods":"110"},"allocatable":{"cpu":"4","memory":"8Gi","pods":"110"},"conditions":[{"type":"Ready","status":"True"}]}}`)
	eventually(a.t, "a pod is made and placed", func() error {
		got := a.kubectl("", "-n", "default", "get", "pods", "-l", "app=plain-"+name, "-o", "jsonpath={.items[*].spec.nodeName}").stdout
		if got != "plain-"+name {
			return fmt.Errorf("the pod's node is %q", got)
		}
		return nil
	})
}

func malformedBodies(t *testing.T, a *attacker) {
	a.apply(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.hostile.example.com}
spec:
  group: hostile.example.com
  scope: Namespaced
  names: {kind: Thing, plural: things}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
`)
	a.kubectl("", "wait", "--for=condition=Established", "crd/things.hostile.example.com", "--timeout", patience.String())
	const deep = 100_000
	nest := func(open, middle, end string, n int) string {
		return strings.Repeat(open, n) + middle + strings.Repeat(end, n)
	}
	object := func(kind, value string) string {
		return `{"apiVersion":"` + kind + `,"metadata":{"name":"deep"},"data":` + value + `}`
	}
	protobuf := func(body string) string { return "k8s\x00" + body }
	cbor := func(body string) string { return "\xd9\xd9\xf7" + body }
	bodies := map[string][]string{
		"application/json": {
			"", "{", "[]", "null", "\x00", `{"apiVersion":"v1"`, strings.Repeat("[", deep), nest("[", "1", "]", deep), nest(`{"a":`, "1", "}", deep),
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":` + nest(`{"annotations":`, "1", "}", deep) + `}`,
			`{"metadata":{"name":1e999999999}}`, `{"metadata":{"generation":` + strings.Repeat("9", 1<<20) + `}}`, "\xff\xfe{}", `"` + strings.Repeat(`\ud800`, 1000) + `"`,
		},
		"application/yaml": {
			nest("[", "1", "]", deep), strings.Repeat("- ", deep) + "a", "a: &a [" + strings.Repeat("x,", 10) + "]\n" + aliases(12), "? ? ? ?", "\t", "!!binary |\n  x", "%YAML 9.9\n---\n",
			strings.Repeat("{a: ", deep) + strings.Repeat("}", deep),
		},
		"application/vnd.kubernetes.protobuf": {
			"", "k8s\x00", protobuf("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"), protobuf("\x0a\x02\x0a\x00\x12\xff\xff\xff\xff\x0f"), protobuf(strings.Repeat("\x0b", deep)),
			protobuf("\x0a\x0f\x0a\x02v1\x12\x09ConfigMap\x12" + strings.Repeat("\x0a\x80\x80\x40", 1000)), protobuf(strings.Repeat("\xff", 1<<16)),
		},
		"application/cbor": {
			"", cbor(""), cbor("\x9f"), cbor("\x9b\xff\xff\xff\xff\xff\xff\xff\xff"), cbor("\xbb\x7f\xff\xff\xff\xff\xff\xff\xff"), cbor(strings.Repeat("\x81", deep)), cbor(strings.Repeat("\xbf\x61a", deep)), cbor("\x5b\x7f\xff\xff\xff\xff\xff\xff\xff"),
		},
		"application/json;stream=watch":              {"{}"},
		"text/html":                                  {"<html>"},
		"application/" + strings.Repeat("x", 10_000): {"{}"},
	}
	var paths = []string{"/api/v1/namespaces/default/configmaps", "/apis/hostile.example.com/v1/namespaces/default/things", "/apis/apps/v1/namespaces/default/deployments", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"}
	for _, path := range paths {
		for _, contentType := range sortedKeys(bodies) {
			for i, body := range bodies[contentType] {
				status, answer := a.raw(http.MethodPost, path, contentType, strings.NewReader(body))
				if status < 400 {
					t.Errorf("body %d of type %.40s to %s: %d %.200s", i, contentType, path, status, answer)
				}
			}
		}
		// Content-Encoding is not a thing of requests.
		var bomb bytes.Buffer
		zipped := gzip.NewWriter(&bomb)
		io.CopyN(zipped, zeros{}, 64<<20)
		zipped.Close()
		if status, answer := a.raw(http.MethodPost, path, "application/json", &bomb); status < 400 {
			t.Errorf("a gzip bomb to %s: %d %.200s", path, status, answer)
		}
	}
	// What is well-formed and deep is stored or refused, and can be read back and
	// deleted.
	for _, depth := range []int{1000, 5000, 9000, 10_001} {
		status, _ := a.raw(http.MethodPost, paths[1], "application/json", strings.NewReader(object(`hostile.example.com/v1","kind":"Thing"`, nest(`{"a":`, "1", "}", depth))))
		if status >= 500 {
			t.Errorf("an object nested %d deep: %d", depth, status)
		}
		if status < 300 {
			a.raw(http.MethodGet, paths[1]+"/deep", "", nil)
			a.raw(http.MethodPatch, paths[1]+"/deep?fieldManager=x&force=true", "application/apply-patch+yaml", strings.NewReader(`{"apiVersion":"hostile.example.com/v1","kind":"Thing","metadata":{"name":"deep"},"more":`+nest(`{"b":`, "1", "}", depth)+`}`))
			if status, answer := a.raw(http.MethodDelete, paths[1]+"/deep", "", nil); status != http.StatusOK {
				t.Errorf("delete an object nested %d deep: %d %.200s", depth, status, answer)
			}
		}
	}
}

// aliases are YAML anchors of which each has the one before ten times.
func aliases(n int) string {
	var b strings.Builder
	name := "a"
	for i := range n {
		next := fmt.Sprintf("b%d", i)
		fmt.Fprintf(&b, "%s: &%s [%s]\n", next, next, strings.TrimSuffix(strings.Repeat("*"+name+", ", 10), ", "))
		name = next
	}
	return b.String()
}

// zeros has no end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func patchBombs(t *testing.T, a *attacker) {
	a.apply(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"target","namespace":"default"},"data":{"a":"` + strings.Repeat("x", 1000) + `"}}`)
	const path = "/api/v1/namespaces/default/configmaps/target"
	var copies []string
	for range 60 {
		copies = append(copies, `{"op":"copy","from":"/metadata","path":"/metadata/annotations/x"}`, `{"op":"copy","from":"/data","path":"/data/b"}`)
	}
	doubling := []string{`{"op":"add","path":"/metadata/labels","value":{"a":["` + strings.Repeat("y", 1000) + `"]}}`}
	for range 40 {
		doubling = append(doubling, `{"op":"copy","from":"/metadata/labels/a","path":"/metadata/labels/a/-"}`)
	}
	many := strings.TrimSuffix(strings.Repeat(`{"op":"test","path":"/data/a","value":"x"},`, 20_000), ",")
	for name, patch := range map[string]struct{ kind, body string }{
		"copies":    {"application/json-patch+json", "[" + strings.Join(copies, ",") + "]"},
		"doubling":  {"application/json-patch+json", "[" + strings.Join(doubling, ",") + "]"},
		"many":      {"application/json-patch+json", "[" + many + "]"},
		"deep":      {"application/merge-patch+json", strings.Repeat(`{"a":`, 100_000) + "1" + strings.Repeat("}", 100_000)},
		"strategic": {"application/strategic-merge-patch+json", `{"data":` + strings.Repeat(`{"$patch":"replace","a":`, 50_000) + "1" + strings.Repeat("}", 50_000) + "}"},
		"order":     {"application/strategic-merge-patch+json", `{"metadata":{"$setElementOrder/ownerReferences":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + "}}"},
		"pointers":  {"application/json-patch+json", `[{"op":"add","path":"` + strings.Repeat("/a", 100_000) + `","value":1}]`},
		"apply":     {"application/apply-patch+yaml", strings.Repeat("[", 100_000)},
	} {
		if status, answer := a.raw(http.MethodPatch, path+"?fieldManager=bomb", patch.kind, strings.NewReader(patch.body)); status < 400 {
			t.Errorf("%s: %d %.200s", name, status, answer)
		}
	}
	if got := a.kubectl("", "-n", "default", "get", "configmap", "target", "-o", "jsonpath={.metadata.annotations}{.data.b}").stdout; got != "" {
		t.Errorf("the target has %.200s", got)
	}
}

func celBombs(t *testing.T, a *attacker) {
	const policy = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: bomb}
spec:
  failurePolicy: Fail
  matchConstraints: {resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]}
  validations: [{expression: %q}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: bomb}
spec: {policyName: bomb, validationActions: [Deny]}
`
	const loop = "object.data.all(a, object.data.all(b, object.data.all(c, object.data.all(d, (a+b+c+d).matches('(x+x+)+y') || true))))"
	if r := a.kubectl(fmt.Sprintf(policy, loop), "create", "-f", "-"); r.code != 0 {
		t.Logf("refused: %.300s", r.stderr)
	}
	var data []string
	for i := range 2000 {
		data = append(data, fmt.Sprintf(`"key-%d":"%s"`, i, strings.Repeat("x", 20)))
	}
	body := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"bomb-"},"data":{` + strings.Join(data, ",") + `}}`
	eventually(t, "the rule is stopped", func() error {
		if status, answer := a.raw(http.MethodPost, "/api/v1/namespaces/default/configmaps?dryRun=All", "application/json", strings.NewReader(body)); status < 400 || !strings.Contains(answer, "cost") {
			return fmt.Errorf("%d %.200s", status, answer)
		}
		return nil
	})
	var all sync.WaitGroup
	for range 8 { // at once, as far as that goes
		all.Go(func() {
			request(a.config(), http.MethodPost, "/api/v1/namespaces/default/configmaps?dryRun=All", "application/json", strings.NewReader(body))
		})
	}
	all.Wait()
	for name, rule := range map[string]string{
		"loop":   `self.all(a, self.all(b, self.all(c, a == b || b == c)))`,
		"nested": strings.Repeat("(", 5000) + "true" + strings.Repeat(")", 5000),
		"long":   "true" + strings.Repeat(" && true", 100_000),
		"regexp": `self.all(a, a.matches('(((((x{0,1000}){0,1000}){0,1000})*)*)*'))`,
	} {
		crd := fmt.Sprintf(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"bombs.%[1]s.example.com"},"spec":{"group":"%[1]s.example.com","scope":"Cluster","names":{"kind":"Bomb","plural":"bombs"},
"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","properties":{"list":{"type":"array","items":{"type":"string"},"x-kubernetes-validations":[{"rule":%[2]q}]}}}}}]}}`, name, rule)
		if status, answer := a.raw(http.MethodPost, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "application/json", strings.NewReader(crd)); status < 400 {
			t.Errorf("the rule %s was accepted: %d %.200s", name, status, answer)
		}
	}
}

func hugeSchemas(t *testing.T, a *attacker) {
	crd := func(name, schema string) string {
		return fmt.Sprintf(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"huge.%[1]s.example.com"},"spec":{"group":"%[1]s.example.com","scope":"Cluster","names":{"kind":"Huge","plural":"huge"},
"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":%[2]s}}]}}`, name, schema)
	}
	var wide []string
	for i := range 3_000 {
		wide = append(wide, fmt.Sprintf(`"property%d":{"type":"string","description":"%s"}`, i, strings.Repeat("d", 50)))
	}
	deep := func(n int) string {
		return strings.Repeat(`{"type":"object","properties":{"a":`, n) + `{"type":"string"}` + strings.Repeat("}}", n)
	}
	for name, schema := range map[string]string{
		"wide":   `{"type":"object","properties":{"spec":{"type":"object","properties":{` + strings.Join(wide, ",") + `}}}}`,
		"deep":   deep(300),
		"deeper": deep(4900),
		"allof":  `{"type":"object","properties":{"spec":{"type":"object","allOf":[` + strings.TrimSuffix(strings.Repeat(`{"required":["a"]},`, 4_000), ",") + `]}}}`,
		"refs":   `{"type":"object","properties":{"a":{"$ref":"#/properties/a"}}}`,
	} {
		status, answer := a.raw(http.MethodPost, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "application/json", strings.NewReader(crd(name, schema)))
		if status >= 400 {
			t.Logf("%s: %d %.150s", name, status, answer)
			continue
		}
		a.kubectl("", "wait", "--for=condition=Established", "crd/huge."+name+".example.com", "--timeout", patience.String())
		if status, answer := a.raw(http.MethodPost, "/apis/"+name+".example.com/v1/huge", "application/json", strings.NewReader(`{"apiVersion":"`+name+`.example.com/v1","kind":"Huge","metadata":{"name":"one"}}`)); status >= 500 {
			t.Errorf("an object of %s: %d %.200s", name, status, answer)
		}
		for _, path := range []string{"/openapi/v2", "/openapi/v3/apis/" + name + ".example.com/v1"} {
			if status, answer := a.raw(http.MethodGet, path, "", nil); status >= 500 {
				t.Errorf("GET %s with %s: %d %.200s", path, name, status, answer)
			}
		}
		if r := a.kubectl("", "delete", "crd", "huge."+name+".example.com", "--timeout", patience.String()); r.code != 0 {
			t.Errorf("delete the CRD %s: %s", name, r.stderr)
		}
	}
}

func hugeReviews(t *testing.T, a *attacker) {
	groups := strings.TrimSuffix(strings.Repeat(`"group",`, 50_000), ",")
	for path, body := range map[string]string{
		"/apis/authentication.k8s.io/v1/tokenreviews":        `{"spec":{"token":"` + strings.Repeat("a.b.c", 400_000) + `"}}`,
		"/apis/authorization.k8s.io/v1/subjectaccessreviews": `{"spec":{"user":"x","groups":[` + groups + `],"resourceAttributes":{"resource":"pods","verb":"get"}}}`,
		"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": `{"spec":{"resourceAttributes":{"resource":"pods","verb":"list","labelSelector":{"requirements":[` +
			strings.TrimSuffix(strings.Repeat(`{"key":"a","operator":"In","values":["b"]},`, 20_000), ",") + `]}}}}`,
	} {
		kind := map[bool]string{true: "TokenReview", false: "SubjectAccessReview"}[strings.Contains(path, "token")]
		if strings.Contains(path, "selfsubject") {
			kind = "SelfSubjectAccessReview"
		}
		group := strings.Split(path, "/")[2]
		status, answer := a.raw(http.MethodPost, path, "application/json", strings.NewReader(`{"apiVersion":"`+group+`/v1","kind":"`+kind+`",`+body[1:]))
		if status >= 500 {
			t.Errorf("POST %s: %d %.200s", path, status, answer)
		}
	}
	selectors := []string{strings.Repeat("a=b,", 40_000) + "a=b", "a in (" + strings.Repeat("x,", 60_000) + "x)", strings.Repeat("!a,", 60_000) + "!a", strings.Repeat("(", 100_000)}
	for i, selector := range selectors {
		for _, kind := range []string{"labelSelector", "fieldSelector"} {
			status, answer, err := request(a.config(), http.MethodGet, "/api/v1/pods?limit=500&"+kind+"="+strings.ReplaceAll(selector, " ", "+"), "", nil)
			if err == nil && status >= 500 {
				t.Errorf("%s %d: %d %.200s", kind, i, status, answer)
			}
		}
	}
}

func watchStorm(t *testing.T, a *attacker) {
	var open sync.WaitGroup
	var seen, failed atomic.Int64
	const watches = 2000
	clients := make([]interface{ CloseIdleConnections() }, 0, 10)
	for range 10 {
		cfg := a.config()
		httpClient, err := httpClientFor(cfg)
		if err != nil {
			t.Fatal(err)
		}
		clients = append(clients, httpClient)
		for range watches / 10 {
			open.Go(func() {
				for refused := true; refused; {
					resp, err := httpClient.Get(cfg.Host + "/api/v1/configmaps?watch=true&labelSelector=storm=yes")
					if err != nil {
						failed.Add(1)
						return
					}
					// Two seconds' worth of requests is let in at once; the others come back, as clients do.
					if refused = resp.StatusCode == http.StatusTooManyRequests; refused {
						time.Sleep(time.Second)
					} else if resp.StatusCode == http.StatusOK {
						var one [1]byte
						if _, err := io.ReadFull(resp.Body, one[:]); err == nil {
							seen.Add(1)
						}
					}
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			})
		}
	}
	eventually(t, "most watches see a write", func() error {
		a.kubectl(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"storm-","namespace":"default","labels":{"storm":"yes"}}}`, "create", "-f", "-")
		if n := seen.Load(); n < watches/2 {
			return fmt.Errorf("%d of %d, and %d could not ask", n, watches, failed.Load())
		}
		return nil
	})
	a.daemon.mustTenantctl(t, "remove", a.name, "--yes", "--timeout", patience.String())
	open.Wait()
	for _, c := range clients {
		c.CloseIdleConnections()
	}
	a.daemon.mustTenantctl(t, "add", a.name, "--wait=false") // the name is free again
}

func eventFlood(t *testing.T, a *attacker) {
	var flood sync.WaitGroup
	var stored, refused, failed atomic.Int64
	var why atomic.Value // a string: the last failure
	for worker := range 4 {
		flood.Go(func() {
			cfg := a.config()
			httpClient, err := httpClientFor(cfg)
			if err != nil {
				return
			}
			defer httpClient.CloseIdleConnections()
			for i := range 250 {
				body := fmt.Sprintf(`{"apiVersion":"v1","kind":"Event","metadata":{"name":"flood-%d-%d","namespace":"default"},"involvedObject":{"namespace":"default"},"message":%q}`, worker, i, strings.Repeat("m", 1000))
				resp, err := httpClient.Post(cfg.Host+"/api/v1/namespaces/default/events", "application/json", strings.NewReader(body))
				if err != nil {
					failed.Add(1)
					why.Store(err.Error())
					continue
				}
				answer, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				switch resp.StatusCode {
				case http.StatusCreated:
					stored.Add(1)
				case http.StatusTooManyRequests:
					refused.Add(1)
				default:
					failed.Add(1)
					why.Store(resp.Status + ": " + string(answer))
				}
			}
		})
	}
	flood.Wait()
	if failed.Load() > 0 || stored.Load() == 0 {
		t.Errorf("of the events %d were stored, %d refused, %d failed, the last because of %v", stored.Load(), refused.Load(), failed.Load(), why.Load())
	}
}

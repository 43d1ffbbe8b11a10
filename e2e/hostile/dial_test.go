// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// noAgent is what every dial ends with while there is no worker.
const noAgent = "no tunnel agent of this cluster is connected"

func discardLog() *log.Logger { return log.New(io.Discard, "", 0) }

// dials are attempts to have the host connect, look up, read, write or delete.
func dials() []attack {
	return []attack{
		{
			name:  "WebhooksByURL",
			tries: "admission webhooks whose URLs are the host's loopback, its health address, its own port, etcd's usual port, the cloud's metadata service and a name",
			must:  "without a worker each call fails at once and says so; with one each arrives at the worker",
			run:   webhooksByURL,
		},
		{
			name:  "WebhooksByService",
			tries: "admission webhooks by Service, one of them of type ExternalName that names the host",
			must:  "without a worker each call fails at once; with one the Service's address or name arrives at the worker, and nothing is resolved on the host",
			run:   webhooksByService,
		},
		{
			name:  "BorrowedToken",
			tries: "webhooks by the Service kubernetes, which upstream asks with its own unlimited token, at paths that the attacker chooses",
			must:  "the calls fail before they are requests to the API",
			run:   borrowedToken,
		},
		{
			name:  "Conversions",
			tries: "a CustomResourceDefinition whose conversion webhook is on the host's loopback",
			must:  "as for admission webhooks",
			run:   conversions,
		},
		{
			name:  "AggregatedAPIs",
			tries: "an APIService behind a Service of type ExternalName that names the host",
			must:  "it is unavailable without a worker; with one its requests arrive at the worker",
			run:   aggregatedAPIs,
		},
		{
			name:  "NodeProxy",
			tries: "nodes whose addresses and ports are the host's, the metadata service's, or names; asked for logs, exec, port-forward and by proxy",
			must:  "every request fails, and no name is looked up on the host",
			run:   nodeProxy,
		},
		{
			name:  "PodAndServiceProxy",
			tries: "pods and EndpointSlices with forged addresses, Services of type ExternalName, asked by proxy",
			must:  "every request fails without a worker",
			run:   podAndServiceProxy,
		},
		{
			name:    "HostPathVolumes",
			tries:   "released hostPath volumes with the reclaim policies Delete and Recycle on a directory of the host",
			must:    "the volumes fail to be reclaimed, or stay; the directory stays",
			watched: "the directory",
			run:     hostPathVolumes,
		},
		{
			name:    "HostPathProvisioning",
			tries:   "a StorageClass with the in-tree hostPath provisioner, and claims",
			must:    "nothing is provisioned, no directory is made",
			watched: "/tmp/hostpath_pv, where upstream makes them",
			run:     hostPathProvisioning,
		},
		{
			name:    "FlexVolume",
			tries:   "a pod on a node of its own with a FlexVolume whose driver the attach-detach controller would execute",
			must:    "no driver is looked for",
			watched: "a driver in the directory where upstream looks for drivers",
			run:     flexVolume,
		},
		{
			name:  "ComponentStatuses",
			tries: "componentstatuses, for which upstream asks ports 10257 and 10259 of the machine it runs on",
			must:  "the answer comes from inside, the host's ports are not asked",
			run:   componentStatuses,
		},
	}
}

// targets are URLs that no tenant may have the host connect to.
func (a *attacker) targets() map[string]string {
	_, own, _ := net.SplitHostPort(a.daemon.listen)
	_, health, _ := net.SplitHostPort(a.daemon.health)
	decoy := strconv.Itoa(a.seen.decoys.port())
	return map[string]string{
		"decoy":    "127.0.0.1:" + decoy,
		"name":     "localhost:" + decoy,
		"ipv6":     "[::1]:" + decoy,
		"health":   "127.0.0.1:" + health,
		"own":      "127.0.0.1:" + own,
		"etcd":     "127.0.0.1:2379",
		"metadata": "169.254.169.254:80",
		"dns":      "metadata.google.internal:80",
	}
}

// webhook is a webhook that is asked about ConfigMaps with the label ask.
const webhook = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: %[1]s}
webhooks:
- name: %[1]s.hostile.test
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: %[2]s
  rules:
  - {apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}
  objectSelector: {matchLabels: {ask: %[1]s}}
---
`

// ask has a webhook asked, and returns what kubectl said.
func (a *attacker) ask(label string) result {
	a.t.Helper()
	object := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"asks-","namespace":"default","labels":{"ask":"` + label + `"}}}`
	return a.kubectl(object, "create", "--dry-run=server", "-f", "-")
}

// refused waits until the webhook of that label is asked, and checks that it says why
// it cannot be.
func (a *attacker) refused(label string) {
	a.t.Helper()
	eventually(a.t, "the webhook "+label+" is asked", func() error {
		r := a.ask(label)
		if r.code == 0 {
			return errors.New("created all the same")
		}
		contains(a.t, "the answer", r.stderr, "failed calling webhook", noAgent)
		return nil
	})
}

func webhooksByURL(t *testing.T, a *attacker) {
	targets := a.targets()
	var objects string
	for _, label := range sortedKeys(targets) {
		objects += fmt.Sprintf(webhook, label, `{url: "https://`+targets[label]+`/ask"}`)
	}
	a.apply(objects)
	for _, label := range sortedKeys(targets) {
		a.refused(label)
	}
	w := a.worker(t)
	for _, label := range sortedKeys(targets) {
		eventually(t, targets[label]+" is asked for at the worker", func() error {
			if r := a.ask(label); r.code == 0 {
				t.Fatalf("%s answered something", targets[label])
			}
			if !w.dialled(targets[label]) {
				return fmt.Errorf("asked for were %q", w.all())
			}
			return nil
		})
	}
}

func webhooksByService(t *testing.T, a *attacker) {
	const services = `
apiVersion: v1
kind: Service
metadata: {name: named, namespace: default}
spec: {type: ExternalName, externalName: localhost, ports: [{port: %[1]d}]}
---
apiVersion: v1
kind: Service
metadata: {name: metadata, namespace: default}
spec: {type: ExternalName, externalName: metadata.google.internal, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: served, namespace: default}
spec: {ports: [{port: 443}]}
---
`
	port := a.seen.decoys.port()
	a.apply(fmt.Sprintf(services, port) +
		fmt.Sprintf(webhook, "named", fmt.Sprintf(`{service: {namespace: default, name: named, port: %d}}`, port)) +
		fmt.Sprintf(webhook, "metadata", `{service: {namespace: default, name: metadata, port: 80}}`) +
		fmt.Sprintf(webhook, "served", `{service: {namespace: default, name: served, port: 443}}`))
	for _, label := range []string{"named", "metadata", "served"} {
		a.refused(label)
	}
	w := a.worker(t)
	service := a.kubectl("", "-n", "default", "get", "service", "served", "-o", "jsonpath={.spec.clusterIP}").stdout + ":443"
	for label, want := range map[string]string{"named": "localhost:" + strconv.Itoa(port), "metadata": "metadata.google.internal:80", "served": service} {
		eventually(t, want+" is asked for at the worker", func() error {
			a.ask(label)
			if !w.dialled(want) {
				return fmt.Errorf("asked for were %q", w.all())
			}
			return nil
		})
	}
	// One that answers is believed: this is the tenant's own cluster.
	w.serve(service, http.HandlerFunc(refuseReview))
	a.kubectl("", "patch", "validatingwebhookconfiguration", "served", "--type=json", "-p",
		`[{"op":"add","path":"/webhooks/0/clientConfig/caBundle","value":"`+w.caBundle+`"}]`)
	eventually(t, "the webhook at the worker answers", func() error {
		if r := a.ask("served"); !strings.Contains(r.stderr, "refused by the worker") {
			return errors.New(r.stderr)
		}
		return nil
	})
}

// refuseReview answers an admission review.
func refuseReview(w http.ResponseWriter, r *http.Request) {
	var review struct {
		APIVersion, Kind string
		Request          struct{ UID string }
	}
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":%q,"allowed":false,"status":{"message":"refused by the worker"}}}`, review.Request.UID)
}

func borrowedToken(t *testing.T, a *attacker) {
	_, bundle := selfSigned(t)
	configs := map[string]string{
		"bare":   `{service: {namespace: default, name: kubernetes, path: /api/v1/namespaces}}`,
		"bundle": `{service: {namespace: default, name: kubernetes, path: /api/v1/namespaces}, caBundle: ` + bundle + `}`,
		"url":    `{url: "https://kubernetes.default.svc/api/v1/namespaces"}`,
	}
	for _, label := range sortedKeys(configs) {
		a.apply(fmt.Sprintf(webhook, label, configs[label]))
		eventually(t, "the webhook "+label+" is asked", func() error {
			r := a.ask(label)
			if r.code == 0 {
				return errors.New("created all the same")
			}
			if !strings.Contains(r.stderr, "cannot be the API server itself") {
				t.Errorf("the API was asked: %s", r.stderr)
			}
			return nil
		})
	}
}

func conversions(t *testing.T, a *attacker) {
	const crd = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: calls.%[1]s.example.com}
spec:
  group: %[1]s.example.com
  scope: Cluster
  names: {kind: Call, plural: calls}
  conversion:
    strategy: Webhook
    webhook: {conversionReviewVersions: [v1], clientConfig: %[2]s}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
  - {name: v2, served: true, storage: false, schema: {openAPIV3Schema: {type: object}}}
---
`
	port := strconv.Itoa(a.seen.decoys.port())
	at := map[string]struct{ config, want string }{
		"byurl":     {`{url: "https://127.0.0.1:` + port + `/convert"}`, "127.0.0.1:" + port},
		"byservice": {`{service: {namespace: default, name: convert}}`, "localhost:443"},
	}
	a.apply(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"convert","namespace":"default"},"spec":{"type":"ExternalName","externalName":"localhost"}}`)
	for _, group := range sortedKeys(at) {
		a.apply(fmt.Sprintf(crd, group, at[group].config))
	}
	for _, group := range sortedKeys(at) {
		a.kubectl("", "wait", "--for=condition=Established", "crd/calls."+group+".example.com", "--timeout", patience.String())
		eventually(t, "an object is stored", func() error {
			if r := a.kubectl(`{"apiVersion":"`+group+`.example.com/v1","kind":"Call","metadata":{"name":"one"}}`, "create", "-f", "-"); r.code != 0 {
				return errors.New(r.stderr)
			}
			return nil
		})
		path := "/apis/" + group + ".example.com/v2/calls/one"
		if status, answer := a.raw(http.MethodGet, path, "", nil); status < 400 || !strings.Contains(answer, noAgent) {
			t.Errorf("GET %s without a worker: %d %s", path, status, answer)
		}
	}
	w := a.worker(t)
	for _, group := range sortedKeys(at) {
		if status, answer := a.raw(http.MethodGet, "/apis/"+group+".example.com/v2/calls/one", "", nil); status < 400 || !w.dialled(at[group].want) {
			t.Errorf("conversion %s: %d %s; asked for were %q", group, status, answer, w.all())
		}
	}
}

func aggregatedAPIs(t *testing.T, a *attacker) {
	port := strconv.Itoa(a.seen.decoys.port())
	a.apply(`
apiVersion: v1
kind: Service
metadata: {name: outside, namespace: default}
spec: {type: ExternalName, externalName: localhost, ports: [{port: ` + port + `}]}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.hostile.example.com}
spec:
  group: hostile.example.com
  version: v1
  groupPriorityMinimum: 100
  versionPriority: 100
  insecureSkipTLSVerify: true
  service: {namespace: default, name: outside, port: ` + port + `}
`)
	a.kubectl("", "wait", "--for=condition=Available=False", "apiservice/v1.hostile.example.com", "--timeout", patience.String())
	if status, answer := a.raw(http.MethodGet, "/apis/hostile.example.com/v1", "", nil); status < 400 {
		t.Errorf("the API without a worker: %d %s", status, answer)
	}
	w := a.worker(t)
	eventually(t, "the API is asked for at the worker", func() error {
		a.raw(http.MethodGet, "/apis/hostile.example.com/v1", "", nil)
		if !w.dialled("localhost:" + port) {
			return fmt.Errorf("asked for were %q", w.all())
		}
		return nil
	})
}

func nodeProxy(t *testing.T, a *attacker) {
	addresses := map[string]struct{ kind, address string }{
		"loopback": {"InternalIP", "127.0.0.1"},
		"hostname": {"Hostname", "localhost"},
		"lookup":   {"Hostname", "lookup.example.com"},
		"dns":      {"InternalDNS", "internal.example.com"},
		"external": {"ExternalDNS", "external.example.com"},
		"metadata": {"InternalIP", "169.254.169.254"},
	}
	port := a.seen.decoys.port()
	for _, name := range sortedKeys(addresses) {
		a.apply(fmt.Sprintf(`
apiVersion: v1
kind: Node
metadata: {name: %[1]s}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, namespace: default}
spec: {nodeName: %[1]s, containers: [{name: main, image: none}], tolerations: [{operator: Exists}]}
`, name))
		patch := fmt.Sprintf(`{"status":{"addresses":[{"type":%q,"address":%q}],"daemonEndpoints":{"kubeletEndpoint":{"Port":%d}},"conditions":[{"type":"Ready","status":"True"}]}}`,
			addresses[name].kind, addresses[name].address, port)
		if r := a.kubectl("", "patch", "node", name, "--subresource=status", "--type=merge", "-p", patch); r.code != 0 {
			t.Fatal(r.stderr)
		}
	}
	try := func(when string) {
		t.Helper()
		for _, name := range sortedKeys(addresses) {
			pod := "/api/v1/namespaces/default/pods/" + name
			node := "/api/v1/nodes/"
			for _, path := range []string{
				node + name + "/proxy/metrics",
				node + "https:" + name + ":" + strconv.Itoa(port) + "/proxy/",
				node + "http:" + name + ":80/proxy/latest/meta-data",
				node + name + ":2379/proxy/version",
				pod + "/log?container=main",
			} {
				if status, answer := a.raw(http.MethodGet, path, "", nil); status < 400 {
					t.Errorf("GET %s %s: %d %s", path, when, status, answer)
				}
			}
		}
		// These ask for more than a request: kubectl knows how.
		for _, name := range []string{"loopback", "lookup"} {
			for _, args := range [][]string{{"exec", name, "--", "id"}, {"attach", name}, {"port-forward", "pod/" + name, "0:80"}} {
				if r := a.kubectl("", append([]string{"-n", "default"}, args...)...); r.code == 0 {
					t.Errorf("kubectl %q %s: %s", args, when, r.stdout)
				}
			}
		}
	}
	try("without a worker")
	a.worker(t)
	try("with a worker")
}

func podAndServiceProxy(t *testing.T, a *attacker) {
	port := a.seen.decoys.port()
	forged := map[string]string{"loopback": "127.0.0.1", "metadata": "169.254.169.254", "pod": "10.244.0.9"}
	for _, name := range sortedKeys(forged) {
		a.apply(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, namespace: default}
spec: {containers: [{name: main, image: none, ports: [{containerPort: %[2]d}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: default}
spec: {ports: [{port: %[2]d}]}
`, name, port))
		a.kubectl("", "-n", "default", "patch", "pod", name, "--subresource=status", "--type=merge", "-p",
			fmt.Sprintf(`{"status":{"podIP":%[1]q,"podIPs":[{"ip":%[1]q}]}}`, forged[name]))
		// Upstream refuses loopback and link-local ones; that is its matter.
		a.kubectl(fmt.Sprintf(`
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s, namespace: default, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
endpoints: [{addresses: [%[2]q]}]
ports: [{port: %[3]d}]
---
apiVersion: v1
kind: Endpoints
metadata: {name: %[1]s, namespace: default}
subsets: [{addresses: [{ip: %[2]q}], ports: [{port: %[3]d}]}]
`, name, forged[name], port), "create", "-f", "-")
	}
	a.apply(fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: outside, namespace: default}
spec: {type: ExternalName, externalName: localhost, ports: [{port: %[1]d}]}
---
apiVersion: v1
kind: Service
metadata: {name: lookup, namespace: default}
spec: {type: ExternalName, externalName: lookup.example.com, ports: [{port: %[1]d}]}
`, port))
	kinds := map[string][]string{"pods": sortedKeys(forged), "services": append(sortedKeys(forged), "outside", "lookup")}
	for _, kind := range sortedKeys(kinds) {
		for _, name := range kinds[kind] {
			for _, scheme := range []string{"http", "https"} {
				path := fmt.Sprintf("/api/v1/namespaces/default/%s/%s:%s:%d/proxy/", kind, scheme, name, port)
				if status, answer := a.raw(http.MethodGet, path, "", nil); status < 400 {
					t.Errorf("GET %s: %d %s", path, status, answer)
				}
			}
		}
	}
}

// volume is a volume on a directory of the host, bound to a claim.
const volume = `
apiVersion: v1
kind: PersistentVolume
metadata: {name: %[1]s}
spec:
  storageClassName: manual
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: %[2]s
  claimRef: {namespace: default, name: %[1]s}
  hostPath: {path: %[3]q}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %[1]s, namespace: default}
spec: {storageClassName: manual, accessModes: [ReadWriteOnce], volumeName: %[1]s, resources: {requests: {storage: 1Gi}}}
---
`

func hostPathVolumes(t *testing.T, a *attacker) {
	dir := filepath.Dir(a.seen.canary)
	volumes := map[string]struct{ policy, path string }{
		"deleted":  {"Delete", dir},
		"recycled": {"Recycle", dir},
		"dotted":   {"Delete", "/tmp/x/../" + filepath.Base(dir)},
	}
	for _, name := range sortedKeys(volumes) {
		// Some of these upstream refuses.
		a.kubectl(fmt.Sprintf(volume, name, volumes[name].policy, volumes[name].path), "create", "-f", "-")
	}
	for _, name := range []string{"deleted", "recycled"} {
		if r := a.kubectl("", "-n", "default", "wait", "--for=jsonpath={.status.phase}=Bound", "pvc/"+name, "--timeout", patience.String()); r.code != 0 {
			t.Fatal(r.stderr)
		}
		a.kubectl("", "-n", "default", "delete", "pvc", name)
		eventually(t, "nobody can reclaim the volume "+name, func() error {
			v, err := a.CoreV1().PersistentVolumes().Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				t.Fatalf("the volume was reclaimed: %v", err)
			}
			if v.Status.Phase != "Failed" {
				return fmt.Errorf("it is %s", v.Status.Phase)
			}
			return nil
		})
	}
	if pods := a.kubectl("", "get", "pods", "-A", "-o", "name").stdout; strings.Contains(pods, "recycl") {
		t.Errorf("there are recyclers: %s", pods)
	}
}

func hostPathProvisioning(t *testing.T, a *attacker) {
	const made = "/tmp/hostpath_pv"
	had, _ := filepath.Glob(made + "/*")
	a.apply(`
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: host}
provisioner: kubernetes.io/host-path
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: wanted, namespace: default}
spec: {storageClassName: host, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
`)
	eventually(t, "an event tells that nobody provisions", func() error {
		events := a.kubectl("", "-n", "default", "get", "events", "--field-selector", "involvedObject.name=wanted", "-o", "jsonpath={.items[*].reason}").stdout
		if events == "" {
			return errors.New("no event")
		}
		return nil
	})
	if volumes := a.kubectl("", "get", "pv", "-o", "name").stdout; volumes != "" {
		t.Errorf("volumes were provisioned: %s", volumes)
	}
	if has, _ := filepath.Glob(made + "/*"); len(has) > len(had) {
		t.Errorf("directories were made: %q", has)
	}
}

func flexVolume(t *testing.T, a *attacker) {
	a.apply(`
apiVersion: v1
kind: Node
metadata: {name: worker-1, annotations: {volumes.kubernetes.io/controller-managed-attach-detach: "true"}}
---
apiVersion: v1
kind: Pod
metadata: {name: flexible, namespace: default}
spec:
  nodeName: worker-1
  containers: [{name: main, image: none, volumeMounts: [{name: v, mountPath: /v}]}]
  volumes: [{name: v, flexVolume: {driver: hostile.test/driver, options: {a: b}}}]
  tolerations: [{operator: Exists}]
---
apiVersion: v1
kind: Pod
metadata: {name: attached, namespace: default}
spec:
  nodeName: worker-1
  containers: [{name: main, image: none, volumeMounts: [{name: v, mountPath: /v}]}]
  volumes: [{name: v, csi: {driver: hostile.test}}]
  tolerations: [{operator: Exists}]
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: attached}
spec:
  storageClassName: manual
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  csi: {driver: hostile.test, volumeHandle: one}
  claimRef: {namespace: default, name: attached}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: attached, namespace: default}
spec: {storageClassName: manual, accessModes: [ReadWriteOnce], volumeName: attached, resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: follows, namespace: default}
spec:
  nodeName: worker-1
  containers: [{name: main, image: none, volumeMounts: [{name: v, mountPath: /v}]}]
  volumes: [{name: v, persistentVolumeClaim: {claimName: attached}}]
  tolerations: [{operator: Exists}]
`)
	// The controller has been over all of them when the one it can do is done.
	eventually(t, "the CSI volume is attached", func() error {
		attachments := a.kubectl("", "get", "volumeattachments", "-o", "name").stdout
		if attachments == "" {
			return errors.New("there is no VolumeAttachment")
		}
		return nil
	})
	if _, err := os.Stat(flexRan); err == nil {
		t.Error("a driver was executed on the host")
	}
}

func componentStatuses(t *testing.T, a *attacker) {
	list, err := a.CoreV1().ComponentStatuses().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, status := range list.Items {
		for _, c := range status.Conditions {
			if strings.Contains(c.Message+c.Error, "127.0.0.1") || c.Status != "True" {
				t.Errorf("%s: %+v", status.Name, c)
			}
		}
	}
}

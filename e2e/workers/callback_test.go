// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"
)

// callback is what the API server calls: a webhook and an API, served by pods on
// all nodes.
const callback = `
apiVersion: v1
kind: Namespace
metadata: {name: hooked}
---
apiVersion: v1
kind: Secret
metadata: {name: hook}
data: {tls.crt: %[1]s, tls.key: %[2]s}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: hook}
spec:
  replicas: 2
  selector: {matchLabels: {app: hook}}
  template:
    metadata: {labels: {app: hook}}
    spec:
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: hook}}}
      volumes: [{name: tls, secret: {secretName: hook}}]
      containers:
      - name: hook
        image: ` + testserverImage + `
        args: [serve, -tls-listen, ":8443"]
        volumeMounts: [{name: tls, mountPath: /tls}]
        readinessProbe: {httpGet: {path: /hostname, port: 8443, scheme: HTTPS}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: hook}
spec:
  selector: {app: hook}
  ports: [{port: 443, targetPort: 8443}]
`

const registrations = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: hook}
webhooks:
- name: hook.e2e.test
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  matchPolicy: Equivalent
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: hooked}}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  clientConfig: {caBundle: %[1]s, service: {namespace: default, name: hook, path: /admit}}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.e2e.test}
spec:
  group: e2e.test
  version: v1
  groupPriorityMinimum: 100
  versionPriority: 100
  caBundle: %[1]s
  service: {namespace: default, name: hook}
`

// testCallbacks has the API server call a webhook and an aggregated API.
func testCallbacks(t *testing.T, c *cluster, workers ...*machine) {
	certificate, key := selfSigned(t, "hook.default.svc")
	c.apply(fmt.Sprintf(callback, certificate, key))
	var names []string
	eventually(t, "the pods that are called are ready", func() error {
		pods, err := c.pods("hook", len(workers))
		names = nil
		for _, pod := range pods {
			names = append(names, pod.Name)
		}
		return err
	})
	c.apply(fmt.Sprintf(registrations, certificate))
	t.Cleanup(func() {
		c.kubectl("delete", "validatingwebhookconfiguration/hook", "apiservice/v1.e2e.test")
	})

	t.Run("Webhook", func(t *testing.T) {
		c := c.within(t)
		var first string
		eventually(t, "a pod has refused", func() (err error) {
			first, err = c.refuser()
			return err
		})
		if !slices.Contains(names, first) {
			t.Fatalf("%q has refused, which is none of %q", first, names)
		}
		// The API server keeps its connection; this one's end it has to notice.
		c.kubectl("delete", "pod", first, "--wait=false")
		eventually(t, "another pod has refused", func() error {
			by, err := c.refuser()
			if err == nil && by == first {
				return fmt.Errorf("pod %q did", by)
			}
			return err
		})
		// One that cannot be asked would refuse this one.
		execute(t, c.kubectlCommand("create", "--namespace=hooked", "configmap", "good")).must(t, "kubectl create")
	})

	t.Run("AggregatedAPI", func(t *testing.T) {
		c := c.within(t)
		c.kubectl("wait", "--for=condition=Available", "--timeout="+patience.String(), "apiservice/v1.e2e.test")
		var me struct {
			Status struct{ UserInfo struct{ Username string } }
		}
		if err := json.Unmarshal([]byte(c.kubectl("auth", "whoami", "-o", "json")), &me); err != nil {
			t.Fatal(err)
		}
		var greeting struct{ User, Pod string }
		if err := json.Unmarshal([]byte(c.kubectl("get", "--raw", "/apis/e2e.test/v1/greetings/hello")), &greeting); err != nil {
			t.Fatal(err)
		}
		if user := me.Status.UserInfo.Username; user == "" || greeting.User != user {
			t.Errorf("pod %s was told that %q asks, who is %q", greeting.Pod, greeting.User, user)
		}
		eventually(t, "kubectl has found the API", func() error {
			r := execute(t, c.kubectlCommand("get", "greetings.e2e.test", "-o", "name"))
			if r.code != 0 || r.stdout != "greeting.e2e.test/hello\n" {
				return fmt.Errorf("%s%s", r.stdout, r.stderr)
			}
			return nil
		})
	})
}

// refuser is the pod that refuses an object that must be, or an error if none was
// asked. Arguments of kubectl say by which API server.
func (c *cluster) refuser(args ...string) (string, error) {
	c.t.Helper()
	r := execute(c.t, c.kubectlCommand(append(args, "create", "--namespace=hooked", "-f", "-")...), `
apiVersion: v1
kind: ConfigMap
metadata: {generateName: bad-, labels: {e2e.test/refuse: "yes"}}`)
	if r.code == 0 {
		c.t.Fatalf("nobody has refused what must be: %s", r.stdout)
	}
	_, by, said := strings.Cut(strings.TrimSpace(r.stderr), "refused by pod ")
	if !said {
		return "", errors.New(r.stderr)
	}
	return by, nil
}

// selfSigned makes a certificate and its key, for a manifest.
func selfSigned(t testing.TB, name string) (certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	encode := func(kind string, der []byte) string {
		return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	return encode("CERTIFICATE", der), encode("PRIVATE KEY", secret)
}

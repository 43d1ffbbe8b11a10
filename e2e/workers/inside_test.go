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
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// clientContainers are in-cluster clients that list their own pods: as the
// environment names the API server, and by its name.
const clientContainers = `
  containers:
  - {name: token, image: ` + testserverImage + `, args: [pods]}
  - {name: token-by-name, image: ` + testserverImage + `, args: [pods, -host, "https://kubernetes.default.svc"]}
  - {name: certificate, image: ` + testserverImage + `, args: [pods, -certificate-dir, /tls], volumeMounts: [{name: tls, mountPath: /tls}]}
  - {name: certificate-by-name, image: ` + testserverImage + `, args: [pods, -certificate-dir, /tls, -host, "https://kubernetes.default.svc"], volumeMounts: [{name: tls, mountPath: /tls}]}
`

// clients lets the namespace's service account and the user robot list pods.
const clients = `
apiVersion: v1
kind: Namespace
metadata: {name: clients}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: lister, namespace: clients}
rules: [{apiGroups: [""], resources: [pods], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: lister, namespace: clients}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: lister}
subjects:
- {kind: ServiceAccount, name: default, namespace: clients}
- {kind: User, name: robot, apiGroup: rbac.authorization.k8s.io}
`

// testBeforePodNetwork runs in-cluster clients on a node that has no network for pods
// yet, as those do that bring one.
func testBeforePodNetwork(t *testing.T, c *cluster, m *machine) {
	node, err := c.CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
			t.Fatal("the node is ready already")
		}
	}
	// There is no cluster DNS yet.
	c.runClients("early", m, `
  hostNetwork: true
  hostAliases: [{ip: 10.96.0.1, hostnames: [kubernetes.default.svc]}]`)
}

// testClients runs in-cluster clients on each node: with a token and with a client
// certificate.
func testClients(t *testing.T, c *cluster, workers ...*machine) {
	for _, m := range workers {
		c.runClients("client-"+m.name, m, "")
	}
}

// runClients runs the clients in a pod on a machine until all have succeeded, and
// wants to be told their own pod.
func (c *cluster) runClients(name string, m *machine, more string) {
	c.t.Helper()
	c.apply(clients)
	if _, err := c.CoreV1().Secrets("clients").Get(c.t.Context(), "robot", metav1.GetOptions{}); apierrors.IsNotFound(err) {
		c.issue("clients", "robot")
	}
	c.apply(`
apiVersion: v1
kind: Pod
metadata: {name: ` + name + `, namespace: clients}
spec:
  nodeName: ` + m.name + `
  restartPolicy: OnFailure
  terminationGracePeriodSeconds: 0
  tolerations: [{operator: Exists}]
  volumes: [{name: tls, secret: {secretName: robot}}]
` + more + clientContainers)
	var pod *corev1.Pod
	eventually(c.t, "the clients in pod "+name+" have been answered", func() (err error) {
		if pod, err = c.CoreV1().Pods("clients").Get(c.t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		if pod.Status.Phase == corev1.PodSucceeded {
			return nil
		}
		var said []string
		for _, s := range pod.Status.ContainerStatuses {
			if s.State.Terminated == nil || s.State.Terminated.ExitCode != 0 {
				said = append(said, s.Name+": "+c.kubectl("logs", "--namespace=clients", name, "-c", s.Name, "--ignore-errors"))
			}
		}
		return errors.New(strings.Join(said, ""))
	})
	for _, container := range pod.Spec.Containers {
		for _, env := range container.Env {
			c.t.Errorf("somebody has set %s for container %s", env.Name, container.Name)
		}
		listed := strings.Fields(c.kubectl("logs", "--namespace=clients", name, "-c", container.Name))
		if !slices.Contains(listed, name) {
			c.t.Errorf("client %s in pod %s was told of the pods %q", container.Name, name, listed)
		}
	}
}

// issue has the cluster issue a client certificate to a user, into a Secret of the
// user's name.
func (c *cluster) issue(namespace, user string) {
	c.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		c.t.Fatal(err)
	}
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: user}}, key)
	if err != nil {
		c.t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		c.t.Fatal(err)
	}
	requests := c.CertificatesV1().CertificateSigningRequests()
	csr, err := requests.Create(c.t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: user + "-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request}),
			SignerName: certificatesv1.KubeAPIServerClientSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	c.kubectl("certificate", "approve", csr.Name)
	eventually(c.t, "the certificate of "+user+" is issued", func() error {
		if csr, err = requests.Get(c.t.Context(), csr.Name, metav1.GetOptions{}); err != nil {
			return err
		}
		if len(csr.Status.Certificate) == 0 {
			return fmt.Errorf("%+v", csr.Status.Conditions)
		}
		return nil
	})
	_, err = c.CoreV1().Secrets(namespace).Create(c.t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: user},
		Type:       corev1.SecretTypeTLS,
		Data: map[string][]byte{
			corev1.TLSCertKey:       csr.Status.Certificate,
			corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		},
	}, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
}

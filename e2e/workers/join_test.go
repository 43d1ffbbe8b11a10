// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package workers

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// joinLine is what `tenantctl join-command` prints, in parts.
type joinLine struct{ endpoint, token, hash string }

func (c *cluster) joinLine() (l joinLine) {
	c.t.Helper()
	line := c.host.mustTenantctl("join-command", c.name)
	if n, err := fmt.Sscanf(line, "kubeadm join %s --token %s --discovery-token-ca-cert-hash %s", &l.endpoint, &l.token, &l.hash); n != 3 {
		c.t.Fatalf("join-command printed %q: %v", line, err)
	}
	return l
}

// testBadJoins tries to join a machine with what must not let it in. kubeadm has to
// say why, and nothing may be left.
func testBadJoins(t *testing.T, c *cluster, m *machine) {
	good := c.joinLine()
	expired := strings.TrimSpace(c.kubeadm("token", "create", "--ttl=1s"))
	eventually(t, "the token has expired", func() error {
		if list := c.kubeadm("token", "list"); strings.Contains(list, expired) {
			return errors.New(list)
		}
		return nil
	})
	id, _, _ := strings.Cut(good.token, ".")
	for name, row := range map[string]struct {
		line joinLine
		node string
		want string
	}{
		"UnknownToken": {joinLine{good.endpoint, "abcdef.0123456789abcdef", good.hash}, m.name, `could not find a JWS signature in the cluster-info ConfigMap for token ID "abcdef"`},
		"ExpiredToken": {joinLine{good.endpoint, expired, good.hash}, m.name, `could not find a JWS signature in the cluster-info ConfigMap for token ID "` + expired[:6] + `"`},
		"WrongSecret":  {joinLine{good.endpoint, id + ".0123456789abcdef", good.hash}, m.name, "failed to verify JWS signature"},
		"WrongHash":    {joinLine{good.endpoint, good.token, "sha256:" + strings.Repeat("0", 64)}, m.name, "cluster CA found in cluster-info ConfigMap is invalid"},
		"TakenName":    {good, "w1", `a Node with name "w1" and status "Ready" already exists in the cluster`},
	} {
		t.Run(name, func(t *testing.T) {
			m := m.within(t)
			// The same as the line, but for how long kubeadm waits for a token to appear.
			m.write("/root/join.yaml", fmt.Sprintf(`apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
nodeRegistration: {name: %s, ignorePreflightErrors: [SystemVerification]}
timeouts: {discovery: 3s}
discovery: {bootstrapToken: {apiServerEndpoint: %q, token: %q, caCertHashes: [%q]}}
`, row.node, row.line.endpoint, row.line.token, row.line.hash))
			r := m.run("kubeadm", "join", "--config=/root/join.yaml")
			if r.code == 0 || !strings.Contains(r.stderr, row.want) {
				t.Errorf("kubeadm join exited with %d and did not say %q\n%s%s", r.code, row.want, r.stdout, r.stderr)
			}
			if m.run("test", "-e", "/etc/kubernetes/kubelet.conf").code == 0 {
				t.Error("kubeadm join has made the machine a node")
			}
			if name == "TakenName" { // which kubeadm finds out when it has written files
				m.must("kubeadm", "reset", "--force")
			}
			for _, path := range []string{"/etc/kubernetes/bootstrap-kubelet.conf", "/etc/kubernetes/pki/ca.crt", "/var/lib/kubelet/config.yaml"} {
				if m.run("test", "-e", path).code == 0 {
					t.Errorf("%s is left", path)
				}
			}
		})
	}
	if _, err := c.CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("node %s is left: %v", m.name, err)
	}
	if _, err := c.ready(&machine{name: "w1"}); err != nil {
		t.Error(err)
	}
}

// kubeadm runs upstream's kubeadm with the administrator's credentials.
func (c *cluster) kubeadm(args ...string) string {
	c.t.Helper()
	cmd := c.kubectlCommand(args...)
	cmd.Path, cmd.Args[0] = bin(c.t, "kubeadm"), "kubeadm"
	return execute(c.t, cmd).must(c.t, "kubeadm "+strings.Join(args, " "))
}

// testServingCertificates wants a certificate on each kubelet that the cluster's CA
// has signed for its own name and address, and none for those of another.
func testServingCertificates(t *testing.T, c *cluster, w1, w2 *machine) {
	config, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(config.CAData)
	for _, m := range []*machine{w1, w2} {
		for _, name := range []string{m.name, m.address} {
			eventually(t, "the kubelet on "+m.name+" has a certificate for "+name, func() error {
				conn, err := tls.Dial("tcp", net.JoinHostPort(m.address, "10250"), &tls.Config{RootCAs: roots, ServerName: name})
				if err != nil {
					return err
				}
				return conn.Close()
			})
		}
	}

	// What somebody could do who has w1's kubeconfig.
	raw := w1.must("cat", "/etc/kubernetes/kubelet.conf")
	pair := w1.must("cat", "/var/lib/kubelet/pki/kubelet-client-current.pem")
	node, err := clientcmd.Load([]byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	for _, user := range node.AuthInfos {
		user.ClientCertificate, user.ClientKey = "", ""
		user.ClientCertificateData, user.ClientKeyData = []byte(pair), []byte(pair)
	}
	stolen := *c
	stolen.kubeconfig = c.kubeconfig + "." + w1.name
	if err := clientcmd.WriteToFile(*node, stolen.kubeconfig); err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, row := range map[string]struct {
		template x509.CertificateRequest
		reason   string
	}{
		"own":           {x509.CertificateRequest{Subject: nodeSubject(w1.name), DNSNames: []string{w1.name}, IPAddresses: []net.IP{net.ParseIP(w1.address)}}, ""},
		"other-address": {x509.CertificateRequest{Subject: nodeSubject(w1.name), IPAddresses: []net.IP{net.ParseIP(w2.address)}}, "is not among the addresses"},
		"other-name":    {x509.CertificateRequest{Subject: nodeSubject(w1.name), DNSNames: []string{w2.name}}, "is not among the addresses"},
		"other-node":    {x509.CertificateRequest{Subject: nodeSubject(w2.name), IPAddresses: []net.IP{net.ParseIP(w2.address)}}, "can only create a node CSR with CN=system:node:w1"},
		"api":           {x509.CertificateRequest{Subject: nodeSubject(w1.name), DNSNames: []string{c.hostname}}, "is the API server's"},
	} {
		t.Run(name, func(t *testing.T) {
			c, stolen := c.within(t), stolen.within(t)
			request, err := x509.CreateCertificateRequest(rand.Reader, &row.template, key)
			if err != nil {
				t.Fatal(err)
			}
			r := execute(t, stolen.kubectlCommand("create", "-f", "-"), `
apiVersion: certificates.k8s.io/v1
kind: CertificateSigningRequest
metadata: {name: `+name+`}
spec:
  signerName: `+certificatesv1.KubeletServingSignerName+`
  usages: [digital signature, server auth]
  request: `+base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request})))
			if r.code != 0 {
				if row.reason == "" || !strings.Contains(r.stderr, row.reason) {
					t.Errorf("the request is refused, and not because it %q: %s", row.reason, r.stderr)
				}
				return
			}
			eventually(t, "the request is decided", func() error {
				csr, err := c.CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				if row.reason == "" {
					if len(csr.Status.Certificate) == 0 {
						return fmt.Errorf("no certificate: %+v", csr.Status.Conditions)
					}
					return nil
				}
				if len(csr.Status.Certificate)+len(csr.Status.Conditions) > 0 {
					t.Fatalf("it was: %+v", csr.Status.Conditions)
				}
				events, err := c.CoreV1().Events("").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
				if err != nil {
					return err
				}
				for _, event := range events.Items {
					if strings.Contains(event.Message, row.reason) {
						return nil
					}
				}
				return fmt.Errorf("no event says %q", row.reason)
			})
		})
	}
}

// nodeSubject is the subject of a node's certificates.
func nodeSubject(name string) pkix.Name {
	return pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:" + name}
}

// testReboot takes the power of a worker away and gives it back.
func testReboot(t *testing.T, c *cluster, w1, w2 *machine) {
	before, err := c.CoreV1().Nodes().Get(t.Context(), w2.name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w2.powerOff()
	w2.boot()
	c.connect(w1, w2)
	eventually(t, "the kubelet has started anew", func() error {
		node, err := c.CoreV1().Nodes().Get(t.Context(), w2.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if node.UID != before.UID {
			t.Fatal("another node has taken its name")
		}
		if node.Status.NodeInfo.BootID == before.Status.NodeInfo.BootID {
			return errors.New("the node tells of the last start")
		}
		return nil
	})
	c.awaitNodes(w1, w2)
	testService(t, c, w1, w2)
	c.awaitExec(w2)
}

// testJoinAgain resets a worker and joins it again under its name.
func testJoinAgain(t *testing.T, c *cluster, w1, w2 *machine) {
	c.kubectl("delete", "node", w2.name)
	w2.reset()
	for _, path := range []string{"/etc/kubernetes/kubelet.conf", "/var/lib/kubelet/pki", "/etc/kubernetes/pki/ca.crt"} {
		if r := w2.run("test", "-e", path); r.code == 0 {
			t.Errorf("kubeadm reset has left %s", path)
		}
	}
	c.join(w2)
	c.connect(w1, w2)
	c.awaitNodes(w1, w2)
	testService(t, c, w1, w2)
	c.awaitExec(w2)
}

// testExpired has a node's certificate expire while the node is off. Its pods still
// have the API server, and it can join again.
func testExpired(t *testing.T, c *cluster, w1, w2 *machine) {
	const lifetime = time.Minute // the shortest there is
	user := "system:node:" + w2.name
	config, err := clientcmd.Load([]byte(c.host.mustTenantctl("kubeconfig", c.name, "--user", user, "--group", "system:nodes", "--ttl", lifetime.String())))
	if err != nil {
		t.Fatal(err)
	}
	expired := time.Now().Add(lifetime + 2*time.Second)
	const current = "/var/lib/kubelet/pki/kubelet-client-current.pem"
	w2.must("systemctl", "stop", "kubelet")
	w2.must("rm", current)
	for _, identity := range config.AuthInfos {
		w2.write(current, string(identity.ClientCertificateData)+string(identity.ClientKeyData))
	}
	w2.powerOff()
	time.Sleep(time.Until(expired))
	w2.boot()
	w2.awaitProxy()
	w2.must("curl", "--silent", "--show-error", "--fail", "--cacert", "/etc/tenant-proxy/ca.crt", "https://"+vip+":6443/readyz")
	if r := w2.run("tenant-proxy", "check"); r.code != 1 || !strings.Contains(r.stdout+r.stderr, "kubeadm join") {
		t.Errorf("check exits with %d and does not say to join again:\n%s%s", r.code, r.stdout, r.stderr)
	}
	eventually(t, "the kubelet says why it does not run", func() error {
		if log := w2.journal("kubelet", 200); !strings.Contains(log, "expired") {
			return errors.New(log)
		}
		return nil
	})

	c.kubectl("delete", "node", w2.name)
	w2.must("kubeadm", "reset", "--force")
	w2.must("rm", "-f", "/etc/cni/net.d/10-lab.conflist")
	c.join(w2)
	c.connect(w1, w2)
	c.awaitNodes(w1, w2)
	testService(t, c, w1, w2)
	c.awaitExec(w2)
}

// awaitExec waits until exec works in a pod on the machine: for the tunnel, and until
// a kubelet that has started knows its pods.
func (c *cluster) awaitExec(m *machine) {
	c.t.Helper()
	pod := c.pod("web", m)
	eventually(c.t, "exec works on "+m.name, func() error {
		if r := execute(c.t, c.kubectlCommand("exec", pod, "--", "cat", "/etc/hostname")); r.code != 0 || r.stdout != pod+"\n" {
			return errors.New(r.stdout + r.stderr)
		}
		return nil
	})
}

// testDrain drains a node of all that can go, and fills it again.
func testDrain(t *testing.T, c *cluster, w1, w2 *machine) {
	c.kubectl("drain", w2.name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout="+patience.String())
	pods, err := c.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + w2.name})
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range pods.Items {
		if owner := metav1.GetControllerOf(&pod); owner == nil || owner.Kind != "DaemonSet" {
			t.Errorf("pod %s/%s is still on %s", pod.Namespace, pod.Name, w2.name)
		}
	}
	eventually(t, "the Service answers without "+w2.name, func() error {
		list, err := c.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=web", FieldSelector: "spec.nodeName=" + w1.name})
		if err != nil || len(list.Items) == 0 {
			return fmt.Errorf("no pod on %s (%w)", w1.name, err)
		}
		_, err = w1.fromPod(list.Items[0].Status.PodIP, "http://web/hostname")
		return err
	})
	c.kubectl("uncordon", w2.name)
	testService(t, c, w1, w2)
}

// pod is the name of the ready pod with a label on a machine.
func (c *cluster) pod(app string, m *machine) string {
	c.t.Helper()
	var name string
	eventually(c.t, "a pod "+app+" is ready on "+m.name, func() error {
		list, err := c.CoreV1().Pods("default").List(c.t.Context(), metav1.ListOptions{LabelSelector: "app=" + app, FieldSelector: "spec.nodeName=" + m.name})
		if err != nil {
			return err
		}
		for _, pod := range list.Items {
			for _, condition := range pod.Status.Conditions {
				if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue && pod.DeletionTimestamp == nil {
					name = pod.Name
					return nil
				}
			}
		}
		return fmt.Errorf("none of %d", len(list.Items))
	})
	return name
}

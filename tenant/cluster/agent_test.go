// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	yamlstrict "sigs.k8s.io/yaml"
)

// The example of the stock agent is what an API server takes, without a field
// that it does not know, and what the stock agent takes.
func TestAgentExample(t *testing.T) {
	manifest, err := os.ReadFile(filepath.Join("..", "..", "docs", "konnectivity-agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	p := startAPI(t)
	dryRun := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict}
	var args []string
	for docs := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifest))); ; {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		decoded, _, err := scheme.Codecs.UniversalDeserializer().Decode(doc, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := yamlstrict.UnmarshalStrict(doc, decoded); err != nil {
			t.Errorf("%T: %v", decoded, err)
		}
		switch o := decoded.(type) {
		case *corev1.ServiceAccount:
			_, err = p.admin.CoreV1().ServiceAccounts(o.Namespace).Create(t.Context(), o, dryRun)
		case *appsv1.DaemonSet:
			args = o.Spec.Template.Spec.Containers[0].Args
			_, err = p.admin.AppsV1().DaemonSets(o.Namespace).Create(t.Context(), o, dryRun)
		default:
			t.Errorf("unexpected %T", o)
		}
		if err != nil {
			t.Error(err)
		}
	}
	if len(args) == 0 {
		t.Fatal("there is no DaemonSet")
	}
	// With a flag that it does not know or cannot parse it says so before all else.
	out, err := exec.CommandContext(t.Context(), "go", append([]string{"run", "sigs.k8s.io/apiserver-network-proxy/cmd/agent"}, args...)...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "/var/run/konnectivity/ca.crt") {
		t.Errorf("the agent does not get as far as to miss its CA: %v\n%s", err, out)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// poisoned are attacks by what the attacker's part of etcd has that no API server ever
// wrote: each has the daemon start again with it.
func poisoned() []attack {
	const must = "the tenant works, or its Tenant says what it waits for; when the keys are gone it is ready by itself"
	poison := func(a attack, values func(*testing.T, *attacker) map[string]string) attack {
		var planted map[string]string
		a.must = must
		a.plant = func(t *testing.T, a *attacker) {
			planted = values(t, a)
			etcd := a.daemon.etcd(t)
			for _, key := range sortedKeys(planted) {
				if _, err := etcd.Put(context.Background(), key, planted[key]); err != nil {
					t.Fatalf("plant %s: %v", key, err)
				}
			}
		}
		a.restarted = func(t *testing.T, a *attacker) {
			a.saysWhy()
			etcd := a.daemon.etcd(t)
			for _, key := range sortedKeys(planted) {
				if _, err := etcd.Delete(context.Background(), key); err != nil {
					t.Fatalf("remove %s: %v", key, err)
				}
			}
			a.awaitReady()
		}
		return a
	}
	return []attack{
		// One tenant for all: each that cannot read what it has tries again and again.
		poison(attack{
			name:  "PoisonedValues",
			tries: "values that no decoder understands, that break off, that are empty, of another kind, nested a hundred thousand deep, and nameless, of every kind that a start reads",
		}, poisonedValues),
		poison(attack{
			name:  "PoisonedAddresses",
			tries: "Services with addresses that are none and with each other's, and ranges of addresses and ports that are none",
		}, poisonedAddresses),
		poison(attack{
			name:  "PoisonedFlows",
			tries: "two FlowSchemas of one name, and priority levels with shares and queues that are none",
		}, poisonedFlows),
		{
			name:  "MovedPod",
			tries: "a pod whose node changes in etcd, at which the scheduler ends its process",
			must:  "the tenant goes on, or is started again; pods are scheduled at last",
			run:   movedPod,
		},
	}
}

// places are where the registry has what a start reads, with what is there.
var places = map[string]string{
	"apiextensions.k8s.io/customresourcedefinitions": "apiextensions.k8s.io/v1/CustomResourceDefinition",
	"apiregistration.k8s.io/apiservices":             "apiregistration.k8s.io/v1/APIService",
	"certificatesigningrequests":                     "certificates.k8s.io/v1/CertificateSigningRequest",
	"clusterrolebindings":                            "rbac.authorization.k8s.io/v1/ClusterRoleBinding",
	"clusterroles":                                   "rbac.authorization.k8s.io/v1/ClusterRole",
	"configmaps/kube-system":                         "v1/ConfigMap",
	"cronjobs/default":                               "batch/v1/CronJob",
	"deployments/default":                            "apps/v1/Deployment",
	"endpointslices/default":                         "discovery.k8s.io/v1/EndpointSlice",
	"flowschemas":                                    "flowcontrol.apiserver.k8s.io/v1/FlowSchema",
	"ipaddresses":                                    "networking.k8s.io/v1/IPAddress",
	"jobs/default":                                   "batch/v1/Job",
	"leases/kube-system":                             "coordination.k8s.io/v1/Lease",
	"minions":                                        "v1/Node",
	"mutatingwebhookconfigurations":                  "admissionregistration.k8s.io/v1/MutatingWebhookConfiguration",
	"namespaces":                                     "v1/Namespace",
	"persistentvolumes":                              "v1/PersistentVolume",
	"pods/default":                                   "v1/Pod",
	"priorityclasses":                                "scheduling.k8s.io/v1/PriorityClass",
	"prioritylevelconfigurations":                    "flowcontrol.apiserver.k8s.io/v1/PriorityLevelConfiguration",
	"resourcequotas/default":                         "v1/ResourceQuota",
	"secrets/kube-system":                            "v1/Secret",
	"serviceaccounts/default":                        "v1/ServiceAccount",
	"servicecidrs":                                   "networking.k8s.io/v1/ServiceCIDR",
	"services/specs/default":                         "v1/Service",
	"storageclasses":                                 "storage.k8s.io/v1/StorageClass",
	"validatingadmissionpolicies":                    "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy",
	"validatingwebhookconfigurations":                "admissionregistration.k8s.io/v1/ValidatingWebhookConfiguration",
}

func poisonedValues(_ *testing.T, a *attacker) map[string]string {
	prefix, values := a.prefix(), map[string]string{}
	for place, kind := range places {
		version, name, _ := cutLast(kind)
		head := fmt.Sprintf(`{"kind":%q,"apiVersion":%q,`, name, version)
		other := `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"poison"}}`
		if kind == "v1/ConfigMap" {
			other = `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"poison","namespace":"default"}}`
		}
		for how, value := range map[string]string{
			"bytes":    "\xff\xfe\x00 poison \x80",
			"protobuf": "k8s\x00\x0a\xff\xff\xff\xff\x0f\x12\x7f\x0a",
			"empty":    "",
			"kind":     other,
			"nesting":  head + `"metadata":{"name":"poison"},"spec":` + strings.Repeat(`{"a":[`, 50000) + strings.Repeat("]}", 50000) + "}",
			"nameless": head + `"metadata":{"namespace":"nowhere","uid":"1","resourceVersion":"none","ownerReferences":[{"apiVersion":"///","kind":"","name":"","uid":""}]}}`,
		} {
			values[prefix+place+"/poison-"+how] = value
		}
	}
	return values
}

// cutLast cuts around the last slash.
func cutLast(s string) (before, after string, found bool) {
	i := strings.LastIndexByte(s, '/')
	if i < 0 {
		return "", s, false
	}
	return s[:i], s[i+1:], true
}

// saysWhy waits until the tenant is ready, or its Tenant says why it is not.
func (c *cluster) saysWhy() {
	c.t.Helper()
	eventually(c.t, c.name+" is ready or says why not", func() error {
		tenant := c.tenant()
		ready := meta.FindStatusCondition(tenant.Status.Conditions, v1alpha1.ConditionReady)
		if ready == nil {
			return fmt.Errorf("it has no condition %s", v1alpha1.ConditionReady)
		}
		switch {
		case tenant.Status.Phase == v1alpha1.TenantReady:
			return nil
		case strings.Contains(ready.Message, "Waiting for API server:"), strings.Contains(ready.Message, "Waiting for the default"),
			tenant.Status.Phase == v1alpha1.TenantFailed:
			c.t.Logf("%s is %s: %s", c.name, tenant.Status.Phase, ready.Message)
			return nil
		}
		return fmt.Errorf("it is %s: %s", tenant.Status.Phase, ready.Message)
	})
}

func poisonedAddresses(t *testing.T, a *attacker) map[string]string {
	prefix, values := a.prefix(), map[string]string{}
	for i, address := range []string{"999.1.2.3", "10.96.0.1", "10.96.0.1", "::1", "127.0.0.1", "", "None", "\\u0000", "10.96.0.1/16"} {
		name := fmt.Sprintf("poison-%d", i)
		values[prefix+"services/specs/default/"+name] = fmt.Sprintf(
			`{"kind":"Service","apiVersion":"v1","metadata":{"name":%q,"namespace":"default"},"spec":{"clusterIP":"%s","clusterIPs":["%s","%s"],"type":"NodePort","ports":[{"port":-1,"nodePort":99999999,"targetPort":"x"}]}}`,
			name, address, address, address)
		values[prefix+"ipaddresses/poison"+fmt.Sprint(i)] = fmt.Sprintf(
			`{"kind":"IPAddress","apiVersion":"networking.k8s.io/v1","metadata":{"name":"%s"},"spec":{"parentRef":null}}`, address)
	}
	values[prefix+"servicecidrs/poison"] = `{"kind":"ServiceCIDR","apiVersion":"networking.k8s.io/v1","metadata":{"name":"poison"},"spec":{"cidrs":["x","::/0","0.0.0.0/0","10.96.0.0/16"]}}`
	for _, kind := range []string{"serviceips", "servicenodeports"} {
		values[prefix+"ranges/"+kind] = `{"kind":"RangeAllocation","apiVersion":"v1","range":"1.2.3.4/99","data":"////"}`
	}
	return values
}

func poisonedFlows(_ *testing.T, a *attacker) map[string]string {
	prefix, values := a.prefix(), map[string]string{}
	for _, namespace := range []string{"", "one", "two"} {
		values[prefix+"flowschemas/poison"+namespace] = fmt.Sprintf(
			`{"kind":"FlowSchema","apiVersion":"flowcontrol.apiserver.k8s.io/v1","metadata":{"name":"poison","namespace":%q},"spec":{"priorityLevelConfiguration":{"name":"poison"},"matchingPrecedence":-2147483648,"distinguisherMethod":{"type":"None"},"rules":[{},{"subjects":[{"kind":"x"}],"resourceRules":[{}]}]}}`, namespace)
	}
	for name, spec := range map[string]string{
		"poison":     `{"type":"Limited","limited":{"nominalConcurrencyShares":-2147483648,"lendablePercent":1000000,"borrowingLimitPercent":-1,"limitResponse":{"type":"Queue","queuing":{"queues":2147483647,"handSize":2147483647,"queueLengthLimit":-1}}}}`,
		"poisonless": `{"type":"Limited"}`,
		"exempt":     `{"type":"Limited","limited":{"nominalConcurrencyShares":0,"limitResponse":{"type":"Reject"}}}`,
		"catch-all":  `{"type":"Nothing"}`,
	} {
		values[prefix+"prioritylevelconfigurations/"+name] = fmt.Sprintf(`{"kind":"PriorityLevelConfiguration","apiVersion":"flowcontrol.apiserver.k8s.io/v1","metadata":{"name":%q},"spec":%s}`, name, spec)
	}
	return values
}

func movedPod(t *testing.T, a *attacker) {
	a.apply(`{"kind":"Node","apiVersion":"v1","metadata":{"name":"one"}}`)
	room := corev1.ResourceList{}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourcePods} {
		room[name] = *quantity("100")
	}
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error { // with the controllers, which write to a new node too
		node, err := a.CoreV1().Nodes().Get(t.Context(), "one", metav1.GetOptions{})
		if err != nil {
			return err
		}
		node.Status.Capacity, node.Status.Allocatable = room, room
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now()}}
		_, err = a.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	place := func(name string) {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}, Spec: corev1.PodSpec{
			Containers:  []corev1.Container{{Name: "main", Image: "x"}},
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		}}
		eventually(t, "pod "+name+" is made", func() error {
			_, err := a.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil // made by an attempt that the tenant's end cut short
			}
			return err
		})
		eventually(t, "pod "+name+" has a node", func() error {
			p, err := a.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if p.Spec.NodeName == "" {
				return fmt.Errorf("it has none: %v", p.Status.Conditions)
			}
			return nil
		})
	}
	place("first")
	pod, err := a.CoreV1().Pods("default").Get(t.Context(), "first", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Spec.NodeName = "two"
	pod.APIVersion, pod.Kind, pod.ResourceVersion = "v1", "Pod", ""
	moved, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.daemon.etcd(t).Put(context.Background(), a.prefix()+"pods/default/first", string(moved)); err != nil {
		t.Fatal(err)
	}
	place("second")
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// next returns the next event of a watch.
func next(t *testing.T, w watch.Interface) watch.Event {
	t.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if !ok {
			t.Fatal("the watch ended")
		}
		return e
	case <-time.After(time.Minute):
		t.Fatal("no event")
	}
	panic("unreachable")
}

// Kinds that had no objects, so no watch cache and no controllers, are like all others.
func TestFirstObjects(t *testing.T) {
	b := newBench(t)
	r := b.start("a")
	admin := b.admin(r, "a")
	ctx := t.Context()
	write := func() { // so that revisions move on
		t.Helper()
		if _, err := admin.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "x"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}

	t.Run("watch from an empty list", func(t *testing.T) {
		list, err := admin.NetworkingV1().Ingresses("").List(ctx, metav1.ListOptions{})
		if err != nil || len(list.Items) > 0 {
			t.Fatalf("%d ingresses, %v", len(list.Items), err)
		}
		write()
		class := "c"
		if _, err := admin.NetworkingV1().Ingresses("default").Create(ctx, &networkingv1.Ingress{
			ObjectMeta: metav1.ObjectMeta{Name: "one"},
			Spec:       networkingv1.IngressSpec{IngressClassName: &class, DefaultBackend: &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: "s", Port: networkingv1.ServiceBackendPort{Number: 1}}}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w, err := admin.NetworkingV1().Ingresses("").Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		if e := next(t, w); e.Type != watch.Added {
			t.Errorf("first event: %s %v", e.Type, e.Object)
		}
	})
	t.Run("watch from the first write", func(t *testing.T) {
		budgets := admin.PolicyV1().PodDisruptionBudgets("default")
		made, err := budgets.Create(ctx, &policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Name: "one"},
			Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		write()
		w, err := budgets.Watch(ctx, metav1.ListOptions{ResourceVersion: made.ResourceVersion})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		// Its controller writes the status.
		if e := next(t, w); e.Type != watch.Modified {
			t.Errorf("first event: %s %v", e.Type, e.Object)
		}
	})
	t.Run("list from the cache", func(t *testing.T) {
		list, err := admin.NodeV1().RuntimeClasses().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
		if err != nil || len(list.Items) > 0 || list.ResourceVersion == "" || list.ResourceVersion == "0" {
			t.Errorf("%d runtime classes at revision %q, %v", len(list.Items), list.ResourceVersion, err)
		}
	})
	t.Run("controllers start", func(t *testing.T) {
		one := int32(1)
		labels := map[string]string{"app": "s"}
		pod := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		if _, err := admin.AppsV1().StatefulSets("default").Create(ctx, &appsv1.StatefulSet{
			ObjectMeta: metav1.ObjectMeta{Name: "s"},
			Spec:       appsv1.StatefulSetSpec{Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: pod},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := admin.CoreV1().ResourceQuotas("default").Create(ctx, &corev1.ResourceQuota{
			ObjectMeta: metav1.ObjectMeta{Name: "q"},
			Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/configmaps": resource.MustParse("100")}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		task := pod
		task.Spec.RestartPolicy = corev1.RestartPolicyNever
		if _, err := admin.BatchV1().CronJobs("default").Create(ctx, &batchv1.CronJob{
			ObjectMeta: metav1.ObjectMeta{Name: "c"},
			Spec:       batchv1.CronJobSpec{Schedule: "* * * * *", JobTemplate: batchv1.JobTemplateSpec{Spec: batchv1.JobSpec{Template: task}}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		for what, done := range map[string]func() (bool, error){
			"pod of the stateful set": func() (bool, error) {
				_, err := admin.CoreV1().Pods("default").Get(ctx, "s-0", metav1.GetOptions{})
				return err == nil, err
			},
			"usage in the quota": func() (bool, error) {
				q, err := admin.CoreV1().ResourceQuotas("default").Get(ctx, "q", metav1.GetOptions{})
				return err == nil && len(q.Status.Used) > 0, err
			},
			"job of the cron job": func() (bool, error) {
				jobs, err := admin.BatchV1().Jobs("default").List(ctx, metav1.ListOptions{})
				return err == nil && len(jobs.Items) > 0, err
			},
		} {
			var ok bool
			var err error
			for range 1000 {
				if ok, err = done(); ok {
					break
				}
				time.Sleep(100 * time.Millisecond)
			}
			if !ok {
				t.Error(fmt.Errorf("no %s: %w", what, err))
			}
		}
	})
	t.Run("a namespace is deleted with them", func(t *testing.T) {
		namespaces := admin.CoreV1().Namespaces()
		if _, err := namespaces.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := admin.CoreV1().LimitRanges("n").Create(ctx, &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Name: "l"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w, err := namespaces.Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=n"})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		if err := namespaces.Delete(ctx, "n", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		for next(t, w).Type != watch.Deleted {
		}
	})
}

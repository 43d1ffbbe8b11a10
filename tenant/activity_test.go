// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/tenantd/tenantd/tenant/limit"
)

// Only who is known and comes from outside is a client.
func TestActivity(t *testing.T) {
	for _, test := range []struct {
		name string
		who  user.Info
		own  bool
		want bool
	}{
		{"a user", &user.DefaultInfo{Name: "jane", Groups: []string{user.AllAuthenticated}}, false, true},
		{"anonymous", &user.DefaultInfo{Name: user.Anonymous, Groups: []string{user.AllUnauthenticated}}, false, false},
		{"nobody", nil, false, false},
		{"a component", &user.DefaultInfo{Name: user.APIServerUser, Groups: []string{user.SystemPrivilegedGroup, user.AllAuthenticated}}, true, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			var a activity
			open := int64(-1)
			h := a.wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				open = a.open.Load()
				panic(http.ErrAbortHandler) // as upstream ends requests that take too long
			}))
			ctx := context.Background()
			if test.who != nil {
				ctx = request.WithUser(ctx, test.who)
			}
			if test.own {
				ctx = context.WithValue(ctx, http.LocalAddrContextKey, limit.Own(loopbackConn{}).LocalAddr())
			}
			func() {
				defer func() { _ = recover() }()
				h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodGet, "/api", nil))
			}()
			if got := open == 1; got != test.want || open < 0 {
				t.Errorf("%d requests are open, counted: %v, want %v", open, got, test.want)
			}
			last := a.last.Load()
			if got := last != nil; got != test.want || a.open.Load() != 0 {
				t.Errorf("afterwards %d are open, noted: %v, want 0, %v", a.open.Load(), got, test.want)
			}
			if last != nil && !strings.Contains(last.String(), "m=") {
				t.Errorf("noted is %s: when a clock is set, all tenants would fall asleep, or none", last)
			}
		})
	}
}

// What nobody may sleep through is work, and what waits for an event is none.
func TestWork(t *testing.T) {
	yes, seconds, ttl := true, int64(60), int32(60)
	at := metav1.ObjectMeta{Namespace: "n", Name: "x"}
	done := batchv1.JobStatus{Conditions: []batchv1.JobCondition{{Type: batchv1.JobFailed, Status: corev1.ConditionTrue}}}
	for _, test := range []struct {
		name string
		obj  runtime.Object
		want string // in the answer; empty for no work
	}{
		{"a pod that waits for a node", &corev1.Pod{ObjectMeta: at}, ""},
		{"a node", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, "node x"},
		{"a namespace that ends", &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "x"}, Status: corev1.NamespaceStatus{Phase: corev1.NamespaceTerminating}}, "namespace x"},
		{"a CronJob", &batchv1.CronJob{ObjectMeta: at}, "CronJob n/x"},
		{"a suspended CronJob", &batchv1.CronJob{ObjectMeta: at, Spec: batchv1.CronJobSpec{Suspend: &yes}}, ""},
		{"a Job", &batchv1.Job{ObjectMeta: at}, ""},
		{"a Job with a deadline", &batchv1.Job{ObjectMeta: at, Spec: batchv1.JobSpec{ActiveDeadlineSeconds: &seconds}}, "Job n/x"},
		{"a suspended one", &batchv1.Job{ObjectMeta: at, Spec: batchv1.JobSpec{ActiveDeadlineSeconds: &seconds, Suspend: &yes}}, ""},
		{"one that has failed", &batchv1.Job{ObjectMeta: at, Spec: batchv1.JobSpec{ActiveDeadlineSeconds: &seconds}, Status: done}, ""},
		{"one that goes after its end", &batchv1.Job{ObjectMeta: at, Spec: batchv1.JobSpec{TTLSecondsAfterFinished: &ttl}, Status: done}, "Job n/x"},
		{"one that will go, once it has ended", &batchv1.Job{ObjectMeta: at, Spec: batchv1.JobSpec{TTLSecondsAfterFinished: &ttl}}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := workOf(t.Context(), fake.NewClientset(test.obj))
			if err != nil {
				t.Fatal(err)
			}
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("the work is %q, want %q", got, test.want)
			}
		})
	}
}

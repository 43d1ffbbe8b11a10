// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/kubernetes"

	"github.com/tenantd/tenantd/tenant/limit"
)

// Activity is what clients do at a control plane. Its own components are no clients,
// nor is who shows no valid credentials: load balancers' probes and strangers.
type Activity struct {
	// Open is the number of requests that are being answered, watches among them, and
	// of tunnel agents.
	Open int
	// Last is when a client last asked for something or was answered; zero if none has. How
	// long that is ago does not change when the clock is set.
	Last time.Time
}

// Activity returns what clients do at this moment.
func (cp *ControlPlane) Activity() Activity {
	a := Activity{Open: int(cp.activity.open.Load())}
	if last := cp.activity.last.Load(); last != nil {
		a.Last = *last
	}
	if t := cp.tunnel.Load(); t != nil && t.server != nil {
		a.Open += len(t.server.Agents())
	}
	return a
}

// activity counts what clients ask.
type activity struct {
	open atomic.Int64
	last atomic.Pointer[time.Time] // with its monotonic reading; nil is never
}

// wrap counts the requests that get as far as api, which are authenticated.
func (a *activity) wrap(api http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !isClient(req.Context()) {
			api.ServeHTTP(w, req)
			return
		}
		a.open.Add(1)
		a.note()
		defer a.open.Add(-1)
		defer a.note() // before it is no longer open
		api.ServeHTTP(w, req)
	})
}

func (a *activity) note() {
	now := time.Now()
	a.last.Store(&now)
}

// isClient reports whether a request is from somebody outside who is known.
func isClient(ctx context.Context) bool {
	who, ok := request.UserFrom(ctx)
	return ok && !limit.IsOwn(ctx) && !slices.Contains(who.GetGroups(), user.AllUnauthenticated)
}

// Work says in a few words what the control plane has to do in time although nobody
// asks for it; empty if there is nothing. What controllers do at the next event or
// start, however late that is, is not in it. It is for a control plane that is ready.
func (cp *ControlPlane) Work(ctx context.Context) (string, error) {
	client, err := kubernetes.NewForConfig(cp.RESTConfig())
	if err != nil {
		return "", fmt.Errorf("look for work of %q: %w", cp.cfg.Name, err)
	}
	work, err := workOf(ctx, client)
	if err != nil {
		return "", fmt.Errorf("look for work of %q: %w", cp.cfg.Name, err)
	}
	return work, nil
}

func workOf(ctx context.Context, client kubernetes.Interface) (string, error) {
	// Nodes renew leases, and are declared dead.
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return "", err
	}
	if len(nodes.Items) > 0 {
		return fmt.Sprintf("node %s is registered", nodes.Items[0].Name), nil
	}
	// Whoever deleted it waits for its end.
	namespaces, err := client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{
		Limit: 1, FieldSelector: fields.OneTermEqualSelector("status.phase", string(corev1.NamespaceTerminating)).String(),
	})
	if err != nil {
		return "", err
	}
	if len(namespaces.Items) > 0 {
		return fmt.Sprintf("namespace %s is being deleted", namespaces.Items[0].Name), nil
	}
	for page := (metav1.ListOptions{Limit: 500}); ; {
		jobs, err := client.BatchV1().CronJobs("").List(ctx, page)
		if err != nil {
			return "", err
		}
		for _, j := range jobs.Items {
			if j.Spec.Suspend == nil || !*j.Spec.Suspend {
				return fmt.Sprintf("CronJob %s/%s has a schedule", j.Namespace, j.Name), nil
			}
		}
		if page.Continue = jobs.Continue; page.Continue == "" {
			break
		}
	}
	for page := (metav1.ListOptions{Limit: 500}); ; {
		jobs, err := client.BatchV1().Jobs("").List(ctx, page)
		if err != nil {
			return "", err
		}
		for i := range jobs.Items {
			switch j := &jobs.Items[i]; {
			case finished(j) && j.Spec.TTLSecondsAfterFinished != nil:
				return fmt.Sprintf("Job %s/%s is deleted some time after its end", j.Namespace, j.Name), nil
			case !finished(j) && j.Spec.ActiveDeadlineSeconds != nil && (j.Spec.Suspend == nil || !*j.Spec.Suspend):
				return fmt.Sprintf("Job %s/%s has a deadline", j.Namespace, j.Name), nil
			}
		}
		if page.Continue = jobs.Continue; page.Continue == "" {
			return "", nil
		}
	}
}

// finished reports whether a Job has come to its end, good or bad.
func finished(j *batchv1.Job) bool {
	return slices.ContainsFunc(j.Status.Conditions, func(c batchv1.JobCondition) bool {
		return (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue
	})
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/component-base/version"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/storage"
)

// statusInterval is how often what a tenant uses is looked at anew.
const statusInterval = 15 * time.Second

// reconciler brings what runs on this host in line with the Tenant objects.
type reconciler struct {
	host   *Host
	client client.Client
	// changed wakes it for a tenant whose runner has news.
	changed chan event.TypedGenericEvent[*v1alpha1.Tenant]
}

func (r *reconciler) register(mgr ctrl.Manager) error {
	skip := true // names are unique per process, and the system plane may restart
	return ctrl.NewControllerManagedBy(mgr).
		For(&v1alpha1.Tenant{}).
		Named("tenants").
		WatchesRawSource(source.Channel(r.changed, &handler.TypedEnqueueRequestForObject[*v1alpha1.Tenant]{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 8, SkipNameValidation: &skip}).
		Complete(r)
}

// Reconcile implements reconcile.Reconciler.
func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	t := &v1alpha1.Tenant{}
	if err := r.client.Get(ctx, req.NamespacedName, t); err != nil {
		if apierrors.IsNotFound(err) {
			// Only possible if someone took our finalizer away: stop, but wipe nothing.
			r.host.stopTenant(req.Name, "")
			r.host.forgetNames(req.Name)
			return ctrl.Result{}, nil
		}
		return ctrl.Result{}, fmt.Errorf("read tenant %q: %w", req.Name, err)
	}
	if !t.DeletionTimestamp.IsZero() {
		err := r.remove(ctx, t)
		if apierrors.IsConflict(err) {
			return ctrl.Result{RequeueAfter: 50 * time.Millisecond}, nil // our copy was old
		}
		return ctrl.Result{}, err
	}
	stored := t.DeepCopy()
	r.host.learnNames(t)
	if r.host.hosts == nil {
		t.Status.Placement = []string{r.host.name}
	}
	if !slices.Contains(t.Status.Placement, r.host.name) {
		if len(t.Status.Placement) > 0 && r.host.runs(t.Name) {
			r.host.hosts.awaitElsewhere(ctx, string(t.UID))
		}
		r.host.stopTenant(t.Name, string(t.UID))
		return ctrl.Result{}, nil
	}
	run := r.start(t)
	if run == nil {
		return ctrl.Result{}, nil // the host is stopping
	}
	if !r.host.speaksFor(t, run) {
		return ctrl.Result{RequeueAfter: statusInterval}, nil
	}
	if t.Spec.Replicas > 1 {
		run.wake()
	}
	settled := run.settles(t.Annotations[v1alpha1.RequestAnnotation])
	status := r.host.status(ctx, t, run)
	if !equality.Semantic.DeepEqual(status, stored.Status) {
		t.Status = status
		if err := writeStatus(ctx, r.client, t, stored); err != nil {
			if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
				return ctrl.Result{RequeueAfter: 50 * time.Millisecond}, nil // our copy was old
			}
			return ctrl.Result{}, fmt.Errorf("write status of tenant %q: %w", t.Name, err)
		}
	}
	if settled { // and the status says how
		patch := client.MergeFromWithOptions(t.DeepCopy(), client.MergeFromWithOptimisticLock{})
		delete(t.Annotations, v1alpha1.RequestAnnotation)
		if err := r.client.Patch(ctx, t, patch); err != nil && !apierrors.IsNotFound(err) {
			if apierrors.IsConflict(err) {
				return ctrl.Result{RequeueAfter: 50 * time.Millisecond}, nil // there is a newer request
			}
			return ctrl.Result{}, fmt.Errorf("take the request off tenant %q: %w", t.Name, err)
		}
	}
	if status.Phase == v1alpha1.TenantAsleep {
		return ctrl.Result{}, nil // nothing changes
	}
	return ctrl.Result{RequeueAfter: statusInterval}, nil
}

// start has t run here as it asks to, if it does not yet; nil when the host is stopping.
func (r *reconciler) start(t *v1alpha1.Tenant) *runner {
	r.host.store.SetLimits(string(t.UID), storageLimits(t.Spec.Limits))
	return r.host.ensureTenant(t, func() { r.wake(t) })
}

// storageLimits are a tenant's limits as the store takes them, where 0 means the default.
func storageLimits(l v1alpha1.TenantLimits) storage.Limits {
	limits := storage.Limits{Bytes: l.Storage.Value(), Objects: int64(l.Objects), ObjectBytes: l.ObjectSize.Value()}
	if n := l.CustomResourceDefinitions; n != nil {
		limits.CRDs = cmp.Or(int64(*n), -1)
	}
	if q := l.CustomResourceDefinitionStorage; q != nil {
		limits.CRDBytes = cmp.Or(q.Value(), -1)
	}
	return limits
}

// wake has a tenant looked at again. It never blocks: a full queue means that
// there is work enough, and each tenant is looked at regularly in any case.
func (r *reconciler) wake(t *v1alpha1.Tenant) {
	select {
	case r.changed <- event.TypedGenericEvent[*v1alpha1.Tenant]{Object: &v1alpha1.Tenant{ObjectMeta: metav1.ObjectMeta{Name: t.Name}}}:
	default:
	}
}

// remove stops a tenant, wipes all it has stored and lets the object go. Each
// step may be repeated after a crash.
func (r *reconciler) remove(ctx context.Context, t *v1alpha1.Tenant) error {
	if !slices.Contains(t.Finalizers, v1alpha1.TenantFinalizer) {
		r.host.stopTenant(t.Name, string(t.UID))
		return nil
	}
	if t.Status.Phase != v1alpha1.TenantDeleting {
		before := t.DeepCopy()
		t.Status.Phase = v1alpha1.TenantDeleting
		t.Status.ObservedGeneration = t.Generation
		setCondition(t, &t.Status, v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonDeleting, "The control plane is being stopped and its data wiped.")
		if err := writeStatus(ctx, r.client, t, before); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("write status of tenant %q: %w", t.Name, err)
		}
	}
	r.host.stopTenant(t.Name, string(t.UID))
	if err := retireAudit(r.host.auditDir(), t.Name, string(t.UID)); err != nil {
		// The object goes all the same: a log that cannot be moved must not keep a
		// name taken, and a full disk is what a removal may be to help with.
		r.host.log.Warn("audit log of a removed tenant stays in the place of a new one of that name", "tenant", t.Name, "error", err)
	}
	if alone, err := r.leave(ctx, t); err != nil || !alone {
		return err
	}
	if err := r.host.store.Wipe(ctx, string(t.UID)); err != nil {
		return fmt.Errorf("wipe data of tenant %q: %w", t.Name, err)
	}
	if r.host.hosts != nil {
		if err := r.host.hosts.leads.forget(ctx, string(t.UID)); err != nil {
			return fmt.Errorf("forget who led tenant %q: %w", t.Name, err)
		}
	}
	patch := client.MergeFromWithOptions(t.DeepCopy(), client.MergeFromWithOptimisticLock{})
	t.Finalizers = slices.DeleteFunc(t.Finalizers, func(f string) bool { return f == v1alpha1.TenantFinalizer })
	if err := r.client.Patch(ctx, t, patch); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("release tenant %q: %w", t.Name, err)
	}
	r.host.log.Info("tenant is removed and its data wiped", "tenant", t.Name)
	return nil
}

// leave takes this host out of the placement of a tenant that is being removed, and
// reports whether this is the host that removes it: when it runs nowhere any more.
func (r *reconciler) leave(ctx context.Context, t *v1alpha1.Tenant) (bool, error) {
	if r.host.hosts == nil {
		return true, nil
	}
	if slices.Contains(t.Status.Placement, r.host.name) {
		before := t.DeepCopy()
		t.Status.Placement = slices.DeleteFunc(t.Status.Placement, func(name string) bool { return name == r.host.name })
		if err := writeStatus(ctx, r.client, t, before); err != nil {
			return false, fmt.Errorf("leave tenant %q: %w", t.Name, err)
		}
	}
	return len(t.Status.Placement) == 0 && r.host.hosts.leading.Load(), nil
}

// speaksFor reports whether this host writes the status of a tenant that is here:
// the one with its controllers does, or the only one where it is.
func (h *Host) speaksFor(t *v1alpha1.Tenant, run *runner) bool {
	return h.hosts == nil || run.leads() || len(t.Status.Placement) == 1
}

// ensureTenant returns the runner of t, which it starts if there is none, or
// starts anew if t asks for another control plane than the one that runs. It
// returns nil when the host is stopping.
func (h *Host) ensureTenant(t *v1alpha1.Tenant, changed func()) *runner {
	h.mu.Lock()
	run := h.runners[t.Name]
	h.mu.Unlock()
	if run != nil {
		if run.uid == string(t.UID) && run.runsAs(&t.Spec) {
			return run
		}
		run.stop()
	}
	h.mu.Lock()
	if h.stopping {
		h.mu.Unlock()
		return nil
	}
	h.forgetRunner(run)
	run = h.startRunner(t, changed)
	h.runners[t.Name] = run
	for _, name := range namesOf(&t.Spec) {
		h.byName[name] = run
	}
	h.mu.Unlock()
	if len(run.dormantNames()) > 0 {
		h.tellDormant()
	}
	return run
}

// forgetRunner takes a runner, which may be nil, out of what the host has. Its caller
// has mu.
func (h *Host) forgetRunner(run *runner) {
	if run == nil {
		return
	}
	if h.runners[run.name] == run {
		delete(h.runners, run.name)
	}
	maps.DeleteFunc(h.byName, func(_ string, r *runner) bool { return r == run })
}

// runs reports whether a tenant of that name runs here.
func (h *Host) runs(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.runners[name] != nil
}

// stopTenant stops what runs under that name, if it is of that UID or the UID is
// empty, and waits for it.
func (h *Host) stopTenant(name, uid string) {
	h.mu.Lock()
	run := h.runners[name]
	h.mu.Unlock()
	if run == nil || uid != "" && run.uid != uid {
		return
	}
	run.stop()
	h.mu.Lock()
	h.forgetRunner(run)
	h.mu.Unlock()
	h.tellDormant()
	h.tell()
}

// status describes t as run has it now.
func (h *Host) status(ctx context.Context, t *v1alpha1.Tenant, run *runner) v1alpha1.TenantStatus {
	s := *t.Status.DeepCopy()
	s.ObservedGeneration = t.Generation
	s.Endpoint = endpoint(t.Spec.Hostname, h.port())
	s.Version = version.Get().GitVersion
	state := run.snapshot()
	if answers := t.Status.Phase == v1alpha1.TenantReady || t.Status.Phase == v1alpha1.TenantMoving; answers && state.phase == v1alpha1.TenantStarting && run.serves() && h.hosts != nil {
		state.phase, state.reason, state.message = v1alpha1.TenantReady, v1alpha1.ReasonAsExpected, "The API server answers; controllers and scheduler are being taken over."
	}
	s.Phase = state.phase
	awake, reason, message, asleepSince := run.wakefulness()
	setCondition(t, &s, v1alpha1.ConditionAwake, awake, reason, message)
	s.AsleepSince = nil
	if !asleepSince.IsZero() {
		since := metav1.NewTime(asleepSince.Truncate(time.Second))
		s.AsleepSince = &since
	}

	if h.hosts != nil && len(s.Placement) > int(t.Spec.Replicas) && s.Phase == v1alpha1.TenantReady {
		s.Phase = v1alpha1.TenantMoving
	}
	placed := metav1.ConditionTrue
	reason, message = v1alpha1.ReasonAsExpected, "Runs on "+h.name+"."
	if int(t.Spec.Replicas) > len(s.Placement) {
		placed, reason = metav1.ConditionFalse, v1alpha1.ReasonTooFewHosts
		message = fmt.Sprintf("%d replicas are wanted, but there is %d host; the tenant runs all the same.", t.Spec.Replicas, len(s.Placement))
	}
	if h.hosts == nil { // otherwise the one that places says so
		setCondition(t, &s, v1alpha1.ConditionPlaced, placed, reason, message)
	}
	switch {
	case s.AsleepSince != nil:
		if meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionCertificatesIssued) == nil {
			setCondition(t, &s, v1alpha1.ConditionCertificatesIssued, metav1.ConditionFalse, v1alpha1.ReasonAsleep, "Certificates are issued when the tenant is first woken.")
		}
	case state.certs:
		setCondition(t, &s, v1alpha1.ConditionCertificatesIssued, metav1.ConditionTrue, v1alpha1.ReasonAsExpected, "Certificates are issued and renewed automatically.")
	case state.reason == v1alpha1.ReasonIssueFailed:
		setCondition(t, &s, v1alpha1.ConditionCertificatesIssued, metav1.ConditionFalse, state.reason, state.message)
	default:
		setCondition(t, &s, v1alpha1.ConditionCertificatesIssued, metav1.ConditionFalse, v1alpha1.ReasonIssuing, "Certificates are being issued.")
	}
	up := metav1.ConditionFalse
	if state.phase == v1alpha1.TenantReady && state.reason == v1alpha1.ReasonAsExpected {
		up = metav1.ConditionTrue
	}
	setCondition(t, &s, v1alpha1.ConditionControlPlaneAvailable, up, state.reason, state.message)
	setCondition(t, &s, v1alpha1.ConditionReady, up, state.reason, state.message)

	usage := h.store.Usage(string(t.UID))
	within, reason, message := metav1.ConditionTrue, v1alpha1.ReasonAsExpected, "There is room for more objects."
	if usage.Full {
		within, reason = metav1.ConditionFalse, v1alpha1.ReasonQuotaExceeded
		message = fmt.Sprintf("Writes are refused: the objects fill the quota of %s; delete some, or raise spec.limits.storage. Reads and deletes go on.", resource.NewQuantity(usage.Quota, resource.BinarySI))
	}
	setCondition(t, &s, v1alpha1.ConditionStorageWithinQuota, within, reason, message)
	// Whole MiB, so that an idle tenant's status does not change.
	s.Storage = wholeMiB(usage.Live)
	if m := h.memoryOf(run); m > 0 {
		s.Memory = wholeMiB(m)
	} else {
		s.Memory = nil
	}
	if s.AsleepSince == nil { // or it has none
		s.Nodes = h.countNodes(ctx, run)
	}
	return s
}

// countNodes asks the tenant how many nodes it has; nil if it does not say.
func (h *Host) countNodes(ctx context.Context, run *runner) *int32 {
	cfg := run.issuer().client
	if cfg == nil {
		return nil
	}
	c, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	// From the watch cache, and no more than one node's worth of bytes.
	list, err := c.CoreV1().Nodes().List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return nil
	}
	n := int32(len(list.Items))
	if list.RemainingItemCount != nil {
		n += int32(*list.RemainingItemCount)
	}
	return &n
}

func setCondition(t *v1alpha1.Tenant, s *v1alpha1.TenantStatus, kind string, status metav1.ConditionStatus, reason, message string) {
	if reason == "" {
		reason = v1alpha1.ReasonStarting
	}
	meta.SetStatusCondition(&s.Conditions, metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: t.Generation,
	})
}

func wholeMiB(bytes int64) *resource.Quantity {
	const mib = 1 << 20
	return resource.NewQuantity((bytes+mib-1)/mib*mib, resource.BinarySI)
}

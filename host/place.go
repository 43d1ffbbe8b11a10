// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/host/gossip"
	"github.com/tenantd/tenantd/host/placement"
	"github.com/tenantd/tenantd/storage"
)

const (
	// placementLead is the lead of the one host that places tenants, lets hosts vote
	// and removes them.
	placementLead = "placement"
	// placeInterval is how often the placement is thought over when nothing happens.
	placeInterval = 2 * time.Second
)

// lead does what one host does for all, while this one is it.
func (s *hosts) lead(ctx context.Context) {
	for ctx.Err() == nil {
		got, err := s.leads.acquire(ctx, placementLead)
		if err != nil {
			return
		}
		s.host.log.Info("this host places the tenants")
		s.leading.Store(true)
		tick := time.NewTicker(placeInterval)
		for held := true; held && ctx.Err() == nil; {
			if err := s.arrange(ctx); err != nil && ctx.Err() == nil && s.host.store.HasQuorum() {
				s.host.log.Warn("hosts and tenants are not arranged as they should be; trying again", "error", err)
			}
			select {
			case <-ctx.Done():
			case <-got.lost:
				held = false
			case <-s.poked:
			case <-tick.C:
			}
		}
		tick.Stop()
		s.leading.Store(false)
		s.leads.release(got)
	}
}

// arrange does once what is to be done for all hosts.
func (s *hosts) arrange(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	s.host.mu.Lock()
	c := s.host.objects
	s.host.mu.Unlock()
	if c == nil {
		return nil // the system plane is starting
	}
	list := &v1alpha1.HostList{}
	if err := c.List(ctx, list); err != nil {
		return fmt.Errorf("read hosts: %w", err)
	}
	tenants := &v1alpha1.TenantList{}
	if err := c.List(ctx, tenants); err != nil {
		return fmt.Errorf("read tenants: %w", err)
	}
	views := s.views(list.Items)
	// Before one of them may be removed.
	return errors.Join(s.letVote(ctx, views, list.Items), s.place(ctx, c, views, tenants.Items), s.attend(ctx, c, views, list.Items, tenants.Items))
}

// view is a host as the placement sees it.
type view struct {
	placement.Host
	state   gossip.State
	runs    int             // tenants that run there, or have not stopped yet
	serving map[string]bool // UIDs of those that answer
}

// views is what gossip and Host objects say together, by name.
func (s *hosts) views(objects []v1alpha1.Host) map[string]*view {
	all := map[string]*view{}
	for _, g := range s.gossip.Hosts() {
		v := &view{Host: placement.Host{
			Name: g.Name, Alive: g.State == gossip.Alive && g.Record.Address != "", Draining: g.Record.Draining, Capacity: g.Record.Load.MemoryTotal,
		}, state: g.State, runs: len(g.Record.Tenants), serving: map[string]bool{}}
		for _, t := range g.Record.Tenants {
			if t.Ready {
				v.serving[t.UID] = true
			}
		}
		all[g.Name] = v
	}
	// One without an object was removed and has not noticed yet, or has just been born.
	for name, v := range all {
		i := slices.IndexFunc(objects, func(o v1alpha1.Host) bool { return o.Name == name })
		v.Draining = v.Draining || i < 0 || objects[i].Spec.Draining || !objects[i].DeletionTimestamp.IsZero()
	}
	return all
}

// place writes where each tenant is to be.
func (s *hosts) place(ctx context.Context, c client.Client, views map[string]*view, tenants []v1alpha1.Tenant) error {
	var there []placement.Host
	for _, v := range views {
		there = append(there, v.Host)
	}
	var asked []placement.Tenant
	byUID := map[string]*v1alpha1.Tenant{}
	var errs []error
	for i := range tenants {
		t := &tenants[i]
		if !t.DeletionTimestamp.IsZero() {
			errs = append(errs, s.forgetDead(ctx, c, views, t))
			continue
		}
		byUID[string(t.UID)] = t
		asked = append(asked, placement.Tenant{
			UID: string(t.UID), Name: t.Name, Replicas: int(t.Spec.Replicas), Current: t.Status.Placement, Pinned: t.Spec.Placement.Hosts,
			Weight: s.weight(t),
		})
	}
	for _, d := range placement.Place(there, asked) {
		errs = append(errs, s.move(ctx, c, views, byUID[d.UID], d))
	}
	return errors.Join(errs...)
}

// asleepWeight is that of a tenant that is asleep, in bytes: next to nothing, but it
// may wake.
const asleepWeight = 8 << 20

// weight is what a tenant takes, in bytes, as far as it is known.
func (s *hosts) weight(t *v1alpha1.Tenant) int64 {
	if t.Status.AsleepSince != nil {
		return asleepWeight
	}
	if t.Status.Memory != nil {
		return t.Status.Memory.Value()
	}
	return 0
}

// move writes the next step towards a decision: a tenant leaves a host that lives
// when it answers on all those where it is to be.
func (s *hosts) move(ctx context.Context, c client.Client, views map[string]*view, t *v1alpha1.Tenant, d placement.Decision) error {
	next := slices.Clone(d.Hosts)
	arrived := true
	for _, name := range d.Hosts {
		arrived = arrived && views[name] != nil && views[name].serving[d.UID]
	}
	for _, name := range t.Status.Placement {
		if v := views[name]; !arrived && v != nil && v.Alive && v.serving[d.UID] && !slices.Contains(next, name) {
			next = append(next, name)
		}
	}
	status := t.Status.DeepCopy()
	status.Placement = next
	if status.Phase == "" {
		status.Phase = v1alpha1.TenantPending
	}
	placed, reason, message := metav1.ConditionTrue, v1alpha1.ReasonAsExpected, sentence(d.Reason)
	switch {
	case len(next) == 0:
		placed, reason = metav1.ConditionFalse, v1alpha1.ReasonWaitingForHost
	case len(d.Hosts) < int(t.Spec.Replicas):
		placed, reason = metav1.ConditionFalse, v1alpha1.ReasonTooFewHosts
	case len(next) > len(d.Hosts):
		reason = v1alpha1.ReasonMoving
	}
	// What only explains why a tenant stays does not replace why it came.
	if was := meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionPlaced); was == nil || was.Status != placed || was.Reason != reason || !slices.Equal(next, t.Status.Placement) {
		setCondition(t, status, v1alpha1.ConditionPlaced, placed, reason, message)
	}
	if equality.Semantic.DeepEqual(status, &t.Status) {
		return nil
	}
	before := t.DeepCopy()
	t.Status = *status
	err := writeStatus(ctx, c, t, before)
	if err == nil && !slices.Equal(next, before.Status.Placement) {
		s.host.log.Info("a tenant is placed", "tenant", t.Name, "hosts", next, "before", before.Status.Placement, "because", d.Reason)
	}
	return ignoreStale(err)
}

// forgetDead takes hosts that are not there out of the placement of a tenant that is
// being removed: nothing of it runs there that could be stopped.
func (s *hosts) forgetDead(ctx context.Context, c client.Client, views map[string]*view, t *v1alpha1.Tenant) error {
	left := slices.DeleteFunc(slices.Clone(t.Status.Placement), func(name string) bool { return views[name] == nil || !views[name].Alive })
	if len(left) == len(t.Status.Placement) {
		return nil
	}
	before := t.DeepCopy()
	t.Status.Placement = left
	return ignoreStale(writeStatus(ctx, c, t, before))
}

// attend says of hosts what they do not say themselves, and lets those go that are
// to be removed.
func (s *hosts) attend(ctx context.Context, c client.Client, views map[string]*view, objects []v1alpha1.Host, tenants []v1alpha1.Tenant) error {
	placed := map[string]int32{}
	for _, t := range tenants {
		for _, name := range t.Status.Placement {
			placed[name]++
		}
	}
	var errs []error
	for i := range objects {
		o := &objects[i]
		v := views[o.Name]
		if !o.DeletionTimestamp.IsZero() {
			errs = append(errs, s.remove(ctx, c, v, o, placed[o.Name]))
			continue
		}
		status := o.Status.DeepCopy()
		status.Tenants = new(int32)
		*status.Tenants = placed[o.Name]
		ready, reason, message := metav1.ConditionTrue, v1alpha1.ReasonAsExpected, "The host serves its tenants."
		status.State = v1alpha1.HostReady
		switch {
		case v == nil && time.Since(o.CreationTimestamp.Time) < time.Minute:
			ready, reason, message, status.State = metav1.ConditionFalse, v1alpha1.ReasonJoining, "The host is joining.", v1alpha1.HostJoining
		case v == nil || !v.Alive:
			ready, reason, message, status.State = metav1.ConditionFalse, v1alpha1.ReasonNoHeartbeat, "The host is not heard of; others have taken its tenants.", v1alpha1.HostNotReady
		case o.Spec.Draining:
			status.State = v1alpha1.HostDraining
		}
		setHostCondition(o, status, v1alpha1.ConditionReady, ready, reason, message)
		draining, reason, message := metav1.ConditionFalse, v1alpha1.ReasonAsExpected, "The host takes tenants."
		if o.Spec.Draining {
			draining, reason, message = metav1.ConditionTrue, v1alpha1.ReasonDrained, "No tenant is on the host."
			if n := placed[o.Name]; n > 0 {
				reason, message = v1alpha1.ReasonDraining, fmt.Sprintf("Tenants that are still on the host: %d.", n)
			}
		}
		setHostCondition(o, status, v1alpha1.ConditionDraining, draining, reason, message)
		status.ObservedGeneration = o.Generation
		if !equality.Semantic.DeepEqual(status, &o.Status) {
			before := o.DeepCopy()
			o.Status = *status
			errs = append(errs, ignoreStale(writeStatus(ctx, c, o, before)))
		}
	}
	return errors.Join(errs...)
}

// remove lets a host go, once no tenant is on it and etcd can do without it.
func (s *hosts) remove(ctx context.Context, c client.Client, v *view, o *v1alpha1.Host, tenants int32) error {
	if !slices.Contains(o.Finalizers, v1alpha1.HostFinalizer) {
		return nil
	}
	lives := v != nil && v.Alive
	mayGo := lives || o.Annotations[v1alpha1.HostLostAnnotation] == "true"
	if !mayGo {
		out, err := s.isOut(ctx, o.Name)
		if err != nil {
			return err
		}
		mayGo = out
	}
	why, reason := "", v1alpha1.ReasonLeaving
	switch {
	case lives && tenants > 0:
		why, reason = fmt.Sprintf("Tenants that are still on the host: %d.", tenants), v1alpha1.ReasonDraining
	case lives && v.runs > 0: // without etcd they could not finish what they were asked
		why, reason = fmt.Sprintf("Tenants that have left, and answer their last requests: %d.", v.runs), v1alpha1.ReasonDraining
	case !mayGo:
		why, reason = "The host does not answer. If it will never come back, say so with `tenantctl host remove --force`.", v1alpha1.ReasonNoHeartbeat
	default:
		// Nothing is taken back, so what was seen last will not do.
		now, err := s.host.listTenants(ctx)
		if err != nil {
			return fmt.Errorf("read tenants: %w", err)
		}
		if lives && slices.ContainsFunc(now, func(t v1alpha1.Tenant) bool { return slices.Contains(t.Status.Placement, o.Name) }) {
			return nil // the next look sees it
		}
		member, err := s.memberOf(ctx, o.Name)
		if err != nil {
			return err
		}
		err = s.host.store.RemoveMember(ctx, member)
		if err == nil || errors.Is(err, storage.ErrNoMember) {
			break
		}
		if !errors.Is(err, storage.ErrUnsafe) {
			return err
		}
		why, reason = sentence(err.Error()), v1alpha1.ReasonUnsafe
	}
	if why != "" {
		status := o.Status.DeepCopy()
		status.State = v1alpha1.HostDraining
		status.Tenants = &tenants
		setHostCondition(o, status, v1alpha1.ConditionLeaving, metav1.ConditionTrue, reason, why)
		if equality.Semantic.DeepEqual(status, &o.Status) {
			return nil
		}
		before := o.DeepCopy()
		o.Status = *status
		return ignoreStale(writeStatus(ctx, c, o, before))
	}
	if _, err := s.host.store.Client().Delete(ctx, hostsPrefix+o.Name); err != nil {
		return fmt.Errorf("forget host %q: %w", o.Name, err)
	}
	s.gossip.Forget(o.Name)
	patch := client.MergeFromWithOptions(o.DeepCopy(), client.MergeFromWithOptimisticLock{})
	o.Finalizers = slices.DeleteFunc(o.Finalizers, func(f string) bool { return f == v1alpha1.HostFinalizer })
	if err := ignoreStale(c.Patch(ctx, o, patch)); err != nil {
		return fmt.Errorf("release host %q: %w", o.Name, err)
	}
	s.host.log.Info("a host is removed", "host", o.Name)
	return nil
}

// isOut reports whether etcd has a host no more, though its object is there: whoever removed
// it got no further, such as that host itself, which ends then.
func (s *hosts) isOut(ctx context.Context, name string) (bool, error) {
	all, err := s.entries(ctx)
	if err != nil {
		return false, err
	}
	i := slices.IndexFunc(all, func(e hostEntry) bool { return e.Name == name })
	if i < 0 {
		return true, nil
	}
	members, err := s.host.store.Members(ctx)
	if err != nil {
		return false, err
	}
	member := all[i].Member // none, before it has started for the first time
	return member != "" && !slices.ContainsFunc(members, func(m storage.Member) bool { return m.Name == member }), nil
}

// memberOf is what etcd calls a host.
func (s *hosts) memberOf(ctx context.Context, name string) (string, error) {
	all, err := s.entries(ctx)
	if err != nil {
		return "", err
	}
	for _, e := range all {
		if e.Name == name && e.Member != "" {
			return e.Member, nil
		}
	}
	return name, nil // it never started
}

// announce makes the object of a host that joins.
func (s *hosts) announce(ctx context.Context, e hostEntry) error {
	c, err := s.host.tenantClient()
	if err != nil {
		return err
	}
	o := &v1alpha1.Host{ObjectMeta: metav1.ObjectMeta{Name: e.Name, Finalizers: []string{v1alpha1.HostFinalizer}}}
	if err := c.Create(ctx, o); err != nil {
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	}
	o.Status = v1alpha1.HostStatus{State: v1alpha1.HostJoining, Role: v1alpha1.HostLearner, Address: e.Address, PeerAddress: e.Peer, GossipAddress: e.Gossip}
	setHostCondition(o, &o.Status, v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonJoining, "The host is joining.")
	return ignoreStale(c.Status().Update(ctx, o))
}

// reportHost writes this host's own object.
func (h *Host) reportHost(ctx context.Context) {
	c, err := h.tenantClient()
	if err != nil {
		return // the system plane is starting
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := h.writeHost(ctx, c); err != nil && ctx.Err() == nil {
		h.log.Debug("this host's object is not up to date", "error", err)
	}
}

func (h *Host) writeHost(ctx context.Context, c client.Client) error {
	o := &v1alpha1.Host{}
	err := c.Get(ctx, client.ObjectKey{Name: h.name}, o)
	if apierrors.IsNotFound(err) {
		members, err := h.store.Members(ctx)
		if err != nil {
			return err
		}
		if h.hosts != nil && !slices.ContainsFunc(members, func(m storage.Member) bool { return m.Name == h.store.Name() }) {
			return nil // removed, and about to notice
		}
		o.Name = h.name
		if err := c.Create(ctx, o); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	if h.hosts != nil && o.DeletionTimestamp.IsZero() && !slices.Contains(o.Finalizers, v1alpha1.HostFinalizer) {
		patch := client.MergeFromWithOptions(o.DeepCopy(), client.MergeFromWithOptimisticLock{})
		o.Finalizers = append(o.Finalizers, v1alpha1.HostFinalizer)
		if err := c.Patch(ctx, o, patch); err != nil {
			return err
		}
	}
	before := o.DeepCopy()
	e, load, lag := h.entry(), h.load.measure(), h.store.Lag()
	st := &o.Status
	st.Address, st.PeerAddress, st.GossipAddress = e.Address, e.Peer, e.Gossip
	st.Role, st.Version = h.role(), h.version
	st.Cores, st.Load = int32(load.Cores), resource.NewMilliQuantity(load.CPU, resource.DecimalSI)
	st.Memory = v1alpha1.HostMemory{Used: wholeMiB(load.MemoryUsed), Total: wholeMiB(load.MemoryTotal)}
	st.Etcd = &v1alpha1.HostEtcd{Leader: h.store.Leader(), Lag: int64(lag.Committed - lag.Applied)}
	st.HeartbeatTime = metav1.Now()
	if h.hosts == nil { // otherwise the one that places says so
		h.mu.Lock()
		n := int32(len(h.runners))
		h.mu.Unlock()
		st.State, st.Tenants, st.ObservedGeneration = v1alpha1.HostReady, &n, o.Generation
		setHostCondition(o, st, v1alpha1.ConditionReady, metav1.ConditionTrue, v1alpha1.ReasonAsExpected, "The host runs alone.")
	}
	return ignoreStale(writeStatus(ctx, c, o, before))
}

func setHostCondition(o *v1alpha1.Host, s *v1alpha1.HostStatus, kind string, status metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&s.Conditions, metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: o.Generation,
	})
}

// writeStatus writes what has changed of an object's status, unless the object itself has
// since. It writes no more than that, so what a newer version of tenantd keeps there and this
// one does not know stays.
func writeStatus(ctx context.Context, c client.Client, object, before client.Object) error {
	return c.Status().Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// ignoreStale makes nothing of an update that came too late: the next look sees why.
func ignoreStale(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// tenantClient reads and writes the system plane's objects, without a cache.
func (h *Host) tenantClient() (client.Client, error) {
	h.mu.Lock()
	plane := h.plane
	h.mu.Unlock()
	if plane == nil || plane.RESTConfig() == nil {
		return nil, errors.New("the system plane is not running")
	}
	scheme := apiruntime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	cfg := rest.CopyConfig(plane.RESTConfig())
	cfg.ContentType = "" // custom resources have no protobuf form
	return client.New(cfg, client.Options{Scheme: scheme, Mapper: objectMapper()})
}

// processors is what this process may use.
func processors() int { return runtime.NumCPU() }

// machineMemory is what is in use and what there is, in bytes; zero if that cannot
// be told.
func machineMemory() (used, total int64) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, 0
	}
	unit := int64(info.Unit)
	total = int64(info.Totalram) * unit
	return total - int64(info.Freeram+info.Bufferram)*unit, total
}

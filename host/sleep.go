// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/rest"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/sni"
	"github.com/tenantd/tenantd/tenant"
)

const (
	// trialTime is how long a tenant that was woken by a connection stays awake when
	// nobody shows valid credentials: who has some shows them at once.
	trialTime = 30 * time.Second
	// trialsPerProcessor bounds the tenants of a host that are awake only because
	// somebody has sent their name, of which one source may have half. Each takes
	// some 40 MB, and half a minute of a processor's time in a thousand.
	trialsPerProcessor = 8
	// workInterval is how often a tenant that nobody uses and that has work is looked
	// at again.
	workInterval = time.Minute
	// wakePatience is how long credentials wait for a tenant to wake: less than
	// tenantctl waits for its answer.
	wakePatience = 25 * time.Second
)

// errAsleep ends the run of a control plane that is stopped for want of use.
var errAsleep = errors.New("the tenant falls asleep")

// sleepRequest is how far a request to sleep has come.
type sleepRequest int

const (
	noRequest sleepRequest = iota
	requested              // and not looked at yet
	refused
)

// sleep is a runner's part about its being asleep. The runner's mu guards it.
type sleep struct {
	since   time.Time // when it fell asleep; zero while it is awake
	dormant bool      // the router holds connections for it: from before it stops until it listens again
	waking  bool      // it is to be started again
	hurried bool      // somebody waits for the control plane
	trial   *trial    // while it is awake only because of a connection; nil otherwise
	request sleepRequest
	kept    string // why it is awake though nobody uses it, or was asked to sleep
}

// sleepAfter is how long nobody must have used a tenant before it falls asleep; zero
// if it does not.
func (h *Host) sleepAfter(s v1alpha1.TenantSleep) time.Duration {
	enabled := !h.cfg.Sleep.Disabled
	if s.Enabled != nil {
		enabled = *s.Enabled
	}
	switch {
	case !enabled:
		return 0
	case s.After != nil:
		return s.After.Duration
	}
	return h.cfg.Sleep.After.Duration
}

// startsAsleep reports whether t is not to be started before somebody asks for it,
// and since when.
func startsAsleep(t *v1alpha1.Tenant) (since time.Time) {
	neverRan := t.Status.Phase == "" || t.Status.Phase == v1alpha1.TenantPending
	switch {
	case t.Spec.Replicas > 1:
	case t.Status.AsleepSince != nil:
		since = t.Status.AsleepSince.Time
	case neverRan && t.Annotations[v1alpha1.RequestAnnotation] == v1alpha1.RequestSleep:
		since = time.Now()
	}
	return since
}

// asked is told by the router that a connection waits for a name.
func (h *Host) asked(name string, source netip.Addr) {
	h.mu.Lock()
	r := h.byName[name]
	h.mu.Unlock()
	if r != nil {
		r.asked(source)
	}
}

// tellDormant has the router hold connections for tenants that are asleep.
func (h *Host) tellDormant() {
	if h.hosts != nil {
		return // those of all tenants are held that are nowhere, see tellRoutes
	}
	h.mu.Lock()
	resumed := h.resumed
	h.mu.Unlock()
	if !resumed {
		return // once for all of them
	}
	h.dormantMu.Lock() // so that what is told last is the latest
	defer h.dormantMu.Unlock()
	names := map[string]sni.Remote{}
	for _, r := range h.running() {
		for _, name := range r.dormantNames() {
			names[name] = sni.Remote{Expected: true}
		}
	}
	h.router.SetRemotes(names)
}

// namesOf are the names that a tenant is reached by.
func namesOf(spec *v1alpha1.TenantSpec) []string {
	names := []string{spec.Hostname}
	if k := spec.KonnectivityHostname; k != "" {
		names = append(names, k)
	}
	return names
}

func (r *runner) dormantNames() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.sleep.dormant {
		return nil
	}
	return namesOf(&r.spec)
}

// asked has the tenant woken or, if it is about to start, started before others: a
// connection from source waits for it.
func (r *runner) asked(source netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sleep.hurried = true
	switch {
	case r.sleep.waking:
	case r.sleep.dormant:
		if r.sleep.trial == nil {
			if r.sleep.trial = r.host.trials.begin(source); r.sleep.trial == nil {
				return // the connection asks again
			}
		}
		r.rouse()
	case r.cp != nil:
		r.cp.Hurry()
	}
}

// wake has the tenant woken if it is asleep, for as long as if it had been used just now.
func (r *runner) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sleep.request = noRequest; r.sleep.dormant {
		r.sleep.hurried = true
		r.rouse()
	}
}

// rouse ends the sleep. Its caller has mu.
func (r *runner) rouse() {
	r.sleep.waking = true
	r.poke()
}

// poke has the runner's goroutine look at what was requested.
func (r *runner) poke() {
	select {
	case r.poked <- struct{}{}:
	default:
	}
}

// settles reports whether a request of RequestAnnotation has been carried out or
// refused, and sees to it that it will be.
func (r *runner) settles(what string) bool {
	switch what {
	case v1alpha1.RequestWake:
		r.wake()
		return true
	case v1alpha1.RequestSleep:
	default:
		r.mu.Lock()
		defer r.mu.Unlock()
		r.sleep.request = noRequest
		return what != ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.sleep.since.IsZero() && !r.sleep.waking, r.sleep.request == refused:
		return true
	case r.sleep.request == noRequest:
		r.sleep.request = requested
		r.poke()
	}
	return false
}

// requestedSleep reports whether somebody has asked for the tenant to sleep.
func (r *runner) requestedSleep() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sleep.request == requested
}

// rest returns when the tenant is to be awake, false when ctx is done. It begins with
// a tenant that is awake or asleep.
func (r *runner) rest(ctx context.Context) bool {
	r.mu.Lock()
	asleep := !r.sleep.since.IsZero()
	r.mu.Unlock()
	if !asleep {
		return true
	}
	r.tried() // the router knows
	r.set(v1alpha1.TenantAsleep, v1alpha1.ReasonAsleep, "The control plane is stopped for want of use, and its data kept. The next connection starts it.")
	for {
		r.mu.Lock()
		waking := r.sleep.waking
		if waking {
			r.sleep.since, r.sleep.waking, r.sleep.kept = time.Time{}, false, ""
		}
		r.mu.Unlock()
		if waking {
			break
		}
		select {
		case <-ctx.Done():
			return false
		case <-r.poked:
		}
	}
	r.log.Info("tenant wakes")
	r.set(v1alpha1.TenantStarting, v1alpha1.ReasonStarting, "The tenant wakes: somebody asks for it.")
	return true
}

// lieDown notes that the control plane is stopped, and lets go of what is left of it.
func (r *runner) lieDown() {
	r.mu.Lock()
	authority := r.authority
	r.authority, r.cp, r.doors = nil, nil, nil
	r.sleep.dormant = true
	r.sleep.since = time.Now()
	r.sleep.request = noRequest
	if !r.sleep.waking { // otherwise somebody came meanwhile
		r.sleep.hurried = false
		r.endTrial()
	}
	r.mu.Unlock()
	if authority != nil {
		authority.Close()
	}
	r.log.Info("tenant is asleep")
	r.host.tellDormant()
	r.host.tell()
}

// arise says that the tenant listens again, or has failed to.
func (r *runner) arise() {
	r.mu.Lock()
	was := r.sleep.dormant
	r.sleep.dormant, r.sleep.waking = false, false
	r.mu.Unlock()
	if was {
		r.host.tellDormant()
	}
}

// endTrial notes that the tenant is awake for better reasons, or not at all. Its
// caller has mu.
func (r *runner) endTrial() {
	if r.sleep.trial != nil {
		r.sleep.trial.end()
		r.sleep.trial = nil
	}
}

// drowsiness is what a runner remembers of its control plane's use.
type drowsiness struct {
	ready  time.Time // when it was
	looked time.Time // for work, the last time
}

// nods reports whether the control plane, which is ready, is to be stopped for want of
// use, and from when on connections wait for its next start.
func (r *runner) nods(ctx context.Context, cp *tenant.ControlPlane, d *drowsiness) bool {
	use := cp.Activity()
	r.mu.Lock()
	if !use.Last.IsZero() || use.Open > 0 {
		r.endTrial()
	}
	asked := r.sleep.request == requested
	after, trial, replicas, doors := r.host.sleepAfter(r.spec.Sleep), r.sleep.trial != nil, r.spec.Replicas, r.doors
	r.mu.Unlock()
	switch {
	case trial && after > 0:
		after = min(after, trialTime)
	case trial:
		after = trialTime
	}
	last := d.ready
	if use.Last.After(last) {
		last = use.Last
	}
	switch idle := use.Open == 0 && after > 0 && time.Since(last) >= after; {
	case !asked && !idle:
		r.keep("", false)
		return false
	case !asked && time.Since(d.looked) < workInterval:
		return false
	case replicas > 1:
		r.keep("it has several replicas", asked)
		return false
	case use.Open > 0:
		r.keep("clients watch it, or wait for answers", asked)
		return false
	}
	d.looked = time.Now()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	switch work, err := cp.Work(ctx); {
	case err != nil:
		r.keep(err.Error(), asked)
		return false
	case work != "":
		r.keep(work, asked)
		return false
	}
	// From here on connections wait for the next start: whoever comes now is late for
	// this one, but not turned away.
	r.mu.Lock()
	r.sleep.dormant = true
	r.mu.Unlock()
	r.host.tellDormant()
	doors.unlist()
	r.log.Info("tenant falls asleep", "onRequest", asked, "unusedSince", last.UTC().Format(time.RFC3339))
	return true
}

// lookInterval is how often a control plane that is ready is looked at.
func (r *runner) lookInterval() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sleep.trial != nil {
		return 500 * time.Millisecond // others may wait for its place
	}
	if after := r.host.sleepAfter(r.spec.Sleep); after > 0 {
		return min(statusInterval, after/2)
	}
	return statusInterval
}

// keep notes why the tenant stays awake; empty if it is in use.
func (r *runner) keep(why string, asked bool) {
	r.mu.Lock()
	was := r.sleep
	if why == "" && r.sleep.request == refused {
		why = r.sleep.kept // not yet read
	}
	if asked {
		r.sleep.request = refused
	}
	if r.sleep.kept = why; why != "" {
		r.endTrial()
	}
	changed := was.kept != r.sleep.kept || was.request != r.sleep.request
	r.mu.Unlock()
	if changed {
		r.changed()
	}
}

// wakefulness is the Awake condition, and since when the tenant is asleep.
func (r *runner) wakefulness() (status metav1.ConditionStatus, reason, message string, since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch after := r.host.sleepAfter(r.spec.Sleep); {
	case !r.sleep.since.IsZero():
		return metav1.ConditionFalse, v1alpha1.ReasonAsleep, "The next connection wakes it, or tenantctl wake.", r.sleep.since
	case r.sleep.kept != "":
		return metav1.ConditionTrue, v1alpha1.ReasonKeptAwake, fmt.Sprintf("It does not fall asleep: %s.", r.sleep.kept), since
	case after == 0:
		return metav1.ConditionTrue, v1alpha1.ReasonAsExpected, "It does not fall asleep by itself.", since
	default:
		return metav1.ConditionTrue, v1alpha1.ReasonAsExpected, fmt.Sprintf("It falls asleep when nobody has used it for %s.", duration.HumanDuration(after)), since
	}
}

// sleeper is what credentials need of a tenant that is asleep; false of one that is
// not. The caller releases it.
func (r *runner) sleeper(ctx context.Context) (i issuer, asleep bool, err error) {
	r.mu.Lock()
	asleep, i.spec = !r.sleep.since.IsZero(), r.spec
	r.mu.Unlock()
	if !asleep {
		return i, false, nil
	}
	if i.authority, err = r.host.openAuthority(ctx, r.name, r.uid); err != nil {
		return i, true, err
	}
	i.wake, i.release = r.awaken, func() { i.authority.Close() }
	return i, true, nil
}

// awaken wakes the tenant and waits until its API server can be used; nil if that
// takes too long.
func (r *runner) awaken(ctx context.Context) *rest.Config {
	r.wake()
	ctx, cancel := context.WithTimeout(ctx, wakePatience)
	defer cancel()
	for {
		if client := r.issuer().client; client != nil {
			return client
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// trials bounds how many tenants are awake only because a connection came, which
// anybody can open. The zero value allows trialsPerProcessor.
type trials struct {
	mu  sync.Mutex // guards all
	all []*trial
}

// trial is the place of one of them.
type trial struct {
	of     *trials
	source netip.Addr
}

// begin returns a place for a tenant that a connection from source wakes, or nil. A
// source that is not valid is nobody's.
func (t *trials) begin(source netip.Addr) *trial {
	t.mu.Lock()
	defer t.mu.Unlock()
	most, ofSource := trialsPerProcessor*runtime.NumCPU(), 0
	for _, other := range t.all {
		if source.IsValid() && other.source == source {
			ofSource++
		}
	}
	if len(t.all) >= most || ofSource >= most/2 {
		return nil
	}
	place := &trial{of: t, source: source}
	t.all = append(t.all, place)
	return place
}

// end gives the place back.
func (t *trial) end() {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	t.of.all = slices.DeleteFunc(t.of.all, func(other *trial) bool { return other == t })
}

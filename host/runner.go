// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/sni"
	"github.com/tenantd/tenantd/tenant"
	"github.com/tenantd/tenantd/tenant/cluster"
	"github.com/tenantd/tenantd/tenant/limit"
)

const (
	// minRestart and maxRestart bound the pause before a control plane that failed
	// is started again; it doubles with each failure.
	minRestart = time.Second
	maxRestart = 5 * time.Minute
	// goodRun is how long a control plane must have been ready for its next
	// failure to count as the first.
	goodRun = 10 * time.Minute
	// progressInterval is how often a control plane that starts says how far it is: each
	// time is a write of its Tenant. Longer than a start takes, if nothing is in its way.
	progressInterval = 2 * time.Second
)

// runState is what a runner is doing.
type runState struct {
	phase    v1alpha1.TenantPhase // Starting, Ready or Failed
	reason   string               // of the Ready condition
	message  string
	certs    bool      // certificates have been issued
	since    time.Time // of phase
	restarts int
}

// runner keeps the control plane of one tenant running on this host: it starts
// it, starts it again when it fails, with growing pauses, and stops it.
type runner struct {
	// Constant after construction.
	host    *Host
	name    string
	uid     string
	log     *slog.Logger
	changed func() // called after each change of state; must not block
	cancel  context.CancelFunc
	done    chan struct{}
	// listening is closed when the router has been given the tenant's names, or
	// that was tried in vain.
	listening chan struct{}
	tried     func()        // closes listening
	poked     chan struct{} // wakes run, see sleep

	mu sync.Mutex // guards what follows
	// spec is what the control plane runs as. What cannot change without a restart
	// is constant and read without mu: all but Limits, Replicas, Placement, Addons and Sleep.
	spec      v1alpha1.TenantSpec
	state     runState
	authority *pki.Authority
	cp        *tenant.ControlPlane
	doors     *doors
	answering bool  // the API server of cp answers
	held      *lead // of controllers and scheduler; nil if this host has it not
	sleep     sleep
}

// startRunner starts to run a tenant. It goes on until stop, whatever happens to
// the caller's context.
func (h *Host) startRunner(t *v1alpha1.Tenant, changed func()) *runner {
	ctx, cancel := context.WithCancel(context.Background())
	r := &runner{
		host: h, name: t.Name, uid: string(t.UID), spec: *t.Spec.DeepCopy(),
		log: h.log.With("tenant", t.Name), changed: changed, cancel: cancel, done: make(chan struct{}), listening: make(chan struct{}),
		poked: make(chan struct{}, 1),
		state: runState{phase: v1alpha1.TenantStarting, reason: v1alpha1.ReasonStarting, message: "The control plane is waiting for its turn to start.", since: time.Now()},
	}
	if since := startsAsleep(t); !since.IsZero() {
		r.sleep.since, r.sleep.dormant = since, true
		r.state.phase, r.state.reason = v1alpha1.TenantAsleep, v1alpha1.ReasonAsleep
	}
	r.tried = sync.OnceFunc(func() { close(r.listening) })
	go func() {
		defer close(r.done)
		defer r.tried()
		r.run(ctx)
	}()
	return r
}

// stop stops the control plane in order and waits for it. Repeating it does no harm.
func (r *runner) stop() {
	r.retire()
	r.cancel()
	<-r.done
}

// retireTime is how long the clients of a control plane have to go to another host,
// before it stops: those that ask for something in that time do not notice.
const retireTime = time.Second

// retire has new connections go to other hosts, before this one stops to serve them.
func (r *runner) retire() {
	if r.host.hosts == nil {
		return
	}
	r.mu.Lock()
	answered, doors, cp := r.answering, r.doors, r.cp
	r.answering = false
	r.mu.Unlock()
	r.host.tell()
	if answered && r.host.hosts.elsewhere(r.uid) {
		doors.retire()
		cp.Retire()
		time.Sleep(retireTime)
	}
}

func (r *runner) run(ctx context.Context) {
	defer func() {
		r.mu.Lock()
		authority := r.authority
		r.endTrial()
		r.mu.Unlock()
		if authority != nil {
			authority.Close()
		}
	}()
	pause := minRestart
	for r.rest(ctx) {
		began := time.Now()
		reason, err := r.once(ctx)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, errAsleep) {
			pause = minRestart
			r.lieDown()
			continue
		}
		r.arise()
		if err == nil {
			reason, err = v1alpha1.ReasonStopped, errors.New("the control plane ended without a reason")
		}
		if time.Since(began) > goodRun {
			pause = minRestart
		}
		// Spread, so that tenants that failed for one cause do not come back at once.
		wait := pause/2 + rand.N(pause)
		r.log.Error("control plane failed", "error", err, "retryIn", wait.Round(time.Millisecond))
		r.set(v1alpha1.TenantFailed, reason, fmt.Sprintf("%v. It is tried again in %s.", err, wait.Round(time.Second)))
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		case <-r.poked: // it is to sleep
		}
		pause = min(2*pause, maxRestart)
		r.mu.Lock()
		r.state.restarts++
		r.endTrial()
		r.mu.Unlock()
		if r.requestedSleep() {
			r.lieDown()
			continue
		}
		r.set(v1alpha1.TenantStarting, v1alpha1.ReasonStarting, "The control plane is starting again.")
	}
}

// once runs the control plane until it fails or ctx is done.
func (r *runner) once(ctx context.Context) (reason string, err error) {
	defer r.tried()
	defer r.follow()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	authority, err := r.openAuthority(ctx)
	if err != nil {
		return v1alpha1.ReasonIssueFailed, err
	}
	doors, err := r.listen()
	if err != nil {
		if errors.Is(err, sni.ErrNameTaken) {
			return v1alpha1.ReasonHostnameTaken, err
		}
		return v1alpha1.ReasonStartFailed, err
	}
	r.tried()
	r.arise()
	r.host.tell()
	sans := slices.Clone(r.spec.CertSANs)
	if k := r.spec.KonnectivityHostname; k != "" {
		sans = append(sans, k)
	}
	if a := r.host.advertised(); a != "" {
		sans = append(sans, a)
	}
	cp, err := tenant.New(tenant.Config{
		Platform:    r.host.platform,
		Name:        r.name,
		UID:         r.uid,
		Hostname:    r.spec.Hostname,
		Port:        r.host.port(),
		ServiceCIDR: r.spec.Network.ServiceCIDR,
		PodCIDR:     r.spec.Network.PodCIDR,
		DNSDomain:   r.spec.Network.DNSDomain,
		WorkerVIP:   net.ParseIP(r.spec.Network.WorkerVIP),
		CertSANs:    sans,
		Authority:   authority,
		Listener:    doors.api,
		Tunnel:      doors.tunnel(),
		Carrier:     doors.carrier,
		Hosts:       r.host.allAddresses(),
		Audit:       r.host.audit(r.name),
		Logger:      r.host.log,

		Replicas:             r.replicas,
		KonnectivityHostname: r.spec.KonnectivityHostname,
		Instance:             r.host.instance(),
		Lead:                 r.leader(cancel),
		StillLeads:           r.sure(),
	})
	if err != nil {
		doors.close()
		return v1alpha1.ReasonStartFailed, err
	}
	r.mu.Lock()
	r.cp, r.doors = cp, doors
	r.apply()
	if r.sleep.hurried {
		cp.Hurry()
	}
	r.mu.Unlock()

	ended := make(chan error, 1)
	go func() { ended <- cp.Run(ctx) }()
	serves, ready := cp.Serves(), cp.Ready()
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	running, asleep := false, false
	var use drowsiness
	for {
		look := false
		select {
		case err := <-ended:
			if asleep && err == nil {
				return "", errAsleep
			}
			if running {
				return v1alpha1.ReasonStopped, err
			}
			return v1alpha1.ReasonStartFailed, err
		case <-serves:
			serves = nil
			r.mu.Lock()
			r.answering = true
			r.mu.Unlock()
			r.host.tell()
			for _, ln := range doors.agents {
				r.host.router.Recall(ln)
			}
		case <-ready:
			ready, running, look = nil, true, true
			use.ready = time.Now()
			r.set(v1alpha1.TenantReady, v1alpha1.ReasonAsExpected, "The API server, the controllers and the scheduler are running.")
		case <-tick.C:
			if !running {
				r.set(v1alpha1.TenantStarting, v1alpha1.ReasonStarting, sentence(cp.Progress()))
			} else if p := cp.Progress(); p != "running" {
				r.set(v1alpha1.TenantReady, v1alpha1.ReasonNotAnswering, sentence(p))
			} else {
				r.set(v1alpha1.TenantReady, v1alpha1.ReasonAsExpected, "The API server, the controllers and the scheduler are running.")
			}
			look = true
		case <-r.poked:
			look = true
		}
		if !look || !running || asleep {
			continue
		}
		if asleep = r.nods(ctx, cp, &use); asleep {
			cancel()
		}
		tick.Reset(r.lookInterval())
	}
}

// leader is how the control plane waits for its turn to have controllers and
// scheduler. When it is over, lost ends the control plane. Nil if there are no others.
func (r *runner) leader(lost func()) func(context.Context) error {
	if r.host.hosts == nil {
		return nil
	}
	return func(ctx context.Context) error {
		held, err := r.host.hosts.leads.acquire(ctx, r.uid)
		if err != nil {
			return err
		}
		r.mu.Lock()
		r.held = held
		r.mu.Unlock()
		go func() {
			select {
			case <-held.lost:
				r.log.Warn("another host has the tenant's controllers: this one starts again without")
				lost()
			case <-held.released:
			}
		}()
		r.changed()
		return nil
	}
}

// sure is how the control plane knows that it still has its lead. Nil if there are no
// others.
func (r *runner) sure() func(context.Context) error {
	if r.host.hosts == nil {
		return nil
	}
	return func(ctx context.Context) error {
		r.mu.Lock()
		held := r.held
		r.mu.Unlock()
		if held == nil {
			return errLost
		}
		return r.host.hosts.leads.sure(ctx, held)
	}
}

// follow gives the lead up, when the control plane has stopped.
func (r *runner) follow() {
	r.mu.Lock()
	held := r.held
	r.held, r.answering = nil, false
	r.mu.Unlock()
	if held != nil {
		r.host.hosts.leads.release(held)
	}
}

// leads reports whether controllers and scheduler run here.
func (r *runner) leads() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.held != nil
}

// serves reports whether the API server answers here.
func (r *runner) serves() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.answering
}

// replicas is how many hosts run the tenant.
func (r *runner) replicas() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(int(r.spec.Replicas), 1)
}

// setHosts changes where workers find hosts.
func (r *runner) setHosts(addresses []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cp != nil {
		r.cp.SetHosts(addresses)
	}
}

// addon is what the API says of an addon, with its default.
func addon(a v1alpha1.Addon) cluster.Addon {
	return cluster.Addon{Enabled: a.Enabled == nil || *a.Enabled, Image: a.Image}
}

// sentence makes one of a few words.
func sentence(words string) string {
	if words == "" {
		return ""
	}
	return strings.ToUpper(words[:1]) + words[1:] + "."
}

func (r *runner) openAuthority(ctx context.Context) (*pki.Authority, error) {
	r.mu.Lock()
	authority := r.authority
	r.mu.Unlock()
	if authority != nil {
		return authority, nil
	}
	authority, err := r.host.openAuthority(ctx, r.name, r.uid)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.authority = authority
	r.mu.Unlock()
	return authority, nil
}

func (r *runner) set(phase v1alpha1.TenantPhase, reason, message string) {
	r.mu.Lock()
	was := r.state
	r.state.reason, r.state.message = reason, message
	r.state.certs = r.cp != nil && !r.cp.ServingExpiry().IsZero()
	if was.phase != phase {
		r.state.phase, r.state.since = phase, time.Now()
	}
	now := r.state
	r.mu.Unlock()
	if was != now {
		r.changed()
	}
}

// snapshot returns the state at this moment.
func (r *runner) snapshot() runState {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}

// issuer returns what credentials need.
func (r *runner) issuer() issuer {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := issuer{spec: r.spec, authority: r.authority}
	if r.cp != nil && r.state.phase == v1alpha1.TenantReady {
		i.client = r.cp.RESTConfig()
	}
	return i
}

// runsAs reports whether the control plane that runs is the one that spec asks
// for. What can change without a restart is brought about at once.
func (r *runner) runsAs(spec *v1alpha1.TenantSpec) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	want := *spec.DeepCopy()
	// Where it runs is not the control plane's matter.
	changed := !reflect.DeepEqual(r.spec.Limits, want.Limits) || !reflect.DeepEqual(r.spec.Addons, want.Addons)
	r.spec.Limits, r.spec.Replicas, r.spec.Placement, r.spec.Addons = want.Limits, want.Replicas, want.Placement, want.Addons
	r.spec.Sleep = want.Sleep
	if changed && r.cp != nil {
		r.apply()
	}
	return reflect.DeepEqual(r.spec, want)
}

// apply brings about what can change while the control plane runs. Its caller has mu.
func (r *runner) apply() {
	r.doors.setMaxConns(int(r.spec.Limits.Connections))
	r.cp.SetLimits(limit.Config{
		RequestsInFlight:  int(r.spec.Limits.RequestsInFlight),
		RequestsPerSecond: int(r.spec.Limits.RequestsPerSecond),
		Watches:           int(r.spec.Limits.Watches),
	})
	r.cp.SetAddons(addon(r.spec.Addons.CoreDNS), addon(r.spec.Addons.KubeProxy))
}

// collect sends the metrics of the run at this moment.
func (r *runner) collect(ch chan<- prometheus.Metric) {
	r.mu.Lock()
	cp, authority := r.cp, r.authority
	r.mu.Unlock()
	if cp != nil {
		cp.Collector().Collect(ch)
	}
	if authority != nil {
		authority.Collector().Collect(ch)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"log/slog"
	"net/netip"
	"runtime"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func TestSleepAfter(t *testing.T) {
	yes, no, hour := true, false, metav1.Duration{Duration: time.Hour}
	for _, test := range []struct {
		name   string
		host   v1alpha1.HostSleep
		tenant v1alpha1.TenantSleep
		want   time.Duration
	}{
		{"the default", v1alpha1.HostSleep{}, v1alpha1.TenantSleep{}, v1alpha1.DefaultSleepAfter},
		{"the host's", v1alpha1.HostSleep{After: hour}, v1alpha1.TenantSleep{}, time.Hour},
		{"the tenant's", v1alpha1.HostSleep{}, v1alpha1.TenantSleep{After: &hour}, time.Hour},
		{"off on the host", v1alpha1.HostSleep{Disabled: true}, v1alpha1.TenantSleep{After: &hour}, 0},
		{"off on the host and on in the tenant", v1alpha1.HostSleep{Disabled: true}, v1alpha1.TenantSleep{Enabled: &yes}, v1alpha1.DefaultSleepAfter},
		{"off in the tenant", v1alpha1.HostSleep{After: hour}, v1alpha1.TenantSleep{Enabled: &no}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := &Host{cfg: v1alpha1.HostConfiguration{Sleep: test.host}}
			h.cfg.SetDefaults()
			if got := h.sleepAfter(test.tenant); got != test.want {
				t.Errorf("it falls asleep after %s, want %s", got, test.want)
			}
		})
	}
}

func TestStartsAsleep(t *testing.T) {
	now := metav1.Now()
	asked := map[string]string{v1alpha1.RequestAnnotation: v1alpha1.RequestSleep}
	for _, test := range []struct {
		name        string
		annotations map[string]string
		replicas    int32
		status      v1alpha1.TenantStatus
		want        bool
	}{
		{"a new one", nil, 1, v1alpha1.TenantStatus{}, false},
		{"one that was asleep", nil, 1, v1alpha1.TenantStatus{Phase: v1alpha1.TenantAsleep, AsleepSince: &now}, true},
		{"of which several are wanted since", nil, 2, v1alpha1.TenantStatus{Phase: v1alpha1.TenantAsleep, AsleepSince: &now}, false},
		{"one that is created so", asked, 1, v1alpha1.TenantStatus{}, true},
		{"that was placed", asked, 1, v1alpha1.TenantStatus{Phase: v1alpha1.TenantPending}, true},
		{"one that ran and is to sleep", asked, 1, v1alpha1.TenantStatus{Phase: v1alpha1.TenantStarting}, false},
		{"one that is to be woken", map[string]string{v1alpha1.RequestAnnotation: v1alpha1.RequestWake}, 1, v1alpha1.TenantStatus{}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			tenant := &v1alpha1.Tenant{
				ObjectMeta: metav1.ObjectMeta{Name: "x", Annotations: test.annotations},
				Spec:       v1alpha1.TenantSpec{Replicas: test.replicas}, Status: test.status,
			}
			if got := !startsAsleep(tenant).IsZero(); got != test.want {
				t.Errorf("starts asleep: %v, want %v", got, test.want)
			}
		})
	}
}

// Strangers wake only so many tenants at a time, and one of them not more than half.
func TestTrialsAreBounded(t *testing.T) {
	most := trialsPerProcessor * runtime.NumCPU()
	a, b, nobody := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.Addr{}
	var all trials
	fill := func(source netip.Addr) (places []*trial) {
		for place := all.begin(source); place != nil; place = all.begin(source) {
			places = append(places, place)
		}
		return places
	}
	of := fill(a)
	if len(of) != most/2 {
		t.Errorf("one source wakes %d, want %d", len(of), most/2)
	}
	if got := len(fill(b)); got != most-len(of) {
		t.Errorf("another one wakes %d, want the rest, %d", got, most-len(of))
	}
	if got := len(fill(nobody)); got != 0 {
		t.Errorf("%d more are woken", got)
	}
	of[0].end()
	of[0].end()
	if got := len(fill(nobody)); got != 1 {
		t.Errorf("%d are woken after one place was given back, want 1", got)
	}
}

// sleeping is a runner that is asleep on a host that runs nothing.
func sleeping(h *Host) *runner {
	r := &runner{
		host: h, name: "x", uid: "u", log: slog.New(slog.DiscardHandler), changed: func() {}, tried: func() {}, poked: make(chan struct{}, 1),
		spec: v1alpha1.TenantSpec{Hostname: "x.k8s.test"},
	}
	r.sleep.since, r.sleep.dormant = time.Now(), true
	return r
}

func TestWhoWakes(t *testing.T) {
	stranger := netip.MustParseAddr("192.0.2.1")
	h := &Host{runners: map[string]*runner{}, byName: map[string]*runner{}}
	r := sleeping(h)
	h.byName["x.k8s.test"] = r
	h.asked("y.k8s.test", stranger)
	if r.sleep.waking {
		t.Error("it wakes for another's name")
	}
	h.asked("x.k8s.test", stranger)
	h.asked("x.k8s.test", stranger)
	if !r.sleep.waking || len(h.trials.all) != 1 {
		t.Errorf("it wakes: %v, with %d trials, want 1", r.sleep.waking, len(h.trials.all))
	}
	if !r.rest(t.Context()) || r.state.phase != v1alpha1.TenantStarting {
		t.Errorf("it is %s", r.state.phase)
	}
	h.resumed = false // there is no router
	r.arise()
	h.asked("x.k8s.test", stranger)
	if r.sleep.waking || len(h.trials.all) != 1 {
		t.Error("one that is awake is woken")
	}
	r.lieDown()
	if len(h.trials.all) != 0 {
		t.Error("it is asleep and keeps its place")
	}

	// With all places taken it stays asleep, until there is one.
	var last *trial
	for place := h.trials.begin(netip.Addr{}); place != nil; place = h.trials.begin(netip.Addr{}) {
		if last = place; len(h.trials.all) == trialsPerProcessor*runtime.NumCPU() {
			break
		}
	}
	if h.asked("x.k8s.test", stranger); r.sleep.waking {
		t.Error("it wakes without a place")
	}
	last.end()
	if h.asked("x.k8s.test", stranger); !r.sleep.waking {
		t.Error("it does not wake with a place")
	}
}

// Who asks while a tenant is about to fall asleep wakes it as soon as it is.
func TestAskedWhileFallingAsleep(t *testing.T) {
	h := &Host{}
	r := sleeping(h)
	r.sleep.since = time.Time{} // the control plane stops
	r.asked(netip.MustParseAddr("192.0.2.1"))
	r.lieDown()
	if !r.rest(t.Context()) || !r.sleep.hurried || len(h.trials.all) != 1 {
		t.Errorf("awake and hurried: %v, with %d trials, want 1", r.sleep.hurried, len(h.trials.all))
	}
}

func TestRequestsAreSettled(t *testing.T) {
	r := sleeping(&Host{})
	if !r.settles(v1alpha1.RequestSleep) {
		t.Error("it is asleep already")
	}
	if !r.settles(v1alpha1.RequestWake) || !r.sleep.waking {
		t.Error("it is not woken")
	}
	if !r.rest(t.Context()) {
		t.Fatal("it is asleep")
	}
	r.arise()
	if r.settles("") || !r.settles("nonsense") {
		t.Error("no request is settled, or nonsense stays")
	}
	for range 2 {
		if r.settles(v1alpha1.RequestSleep) {
			t.Error("a request is settled that nobody has looked at")
		}
	}
	if len(r.poked) != 1 {
		t.Error("nobody is told")
	}
	r.keep("it has work", true)
	if !r.settles(v1alpha1.RequestSleep) {
		t.Error("a request is refused and not settled")
	}
	r.keep("", false)
	if _, reason, message, _ := r.wakefulness(); reason != v1alpha1.ReasonKeptAwake || message != "It does not fall asleep: it has work." {
		t.Errorf("before the refusal was read the condition is %s: %s", reason, message)
	}
	r.settles("") // it is taken off
	r.keep("", false)
	if _, reason, _, _ := r.wakefulness(); reason != v1alpha1.ReasonAsExpected {
		t.Errorf("afterwards it is %s", reason)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

// recover waits until all is as it was before a fault.
func (in *installation) recover(t *testing.T, h *history) {
	t.Helper()
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...)
	in.awaitWell(t)
}

// failover adds how long it took until tenants answered through hosts again: those that
// were on the host with the fault, and the others.
func (in *installation) failover(t *testing.T, h *history, fault string, at time.Duration, moved []*tenant, through []*host) {
	t.Helper()
	for name, took := range h.awaitAnswers(t, at, in.tenants, through...) {
		whose := "other tenants"
		if slices.ContainsFunc(moved, func(x *tenant) bool { return x.name == name }) {
			whose = "its tenants"
		}
		in.figures.add(fmt.Sprintf("%s: %s write again through other hosts", fault, whose), took)
	}
}

// testKill kills the host with a tenant, the leader of etcd, and both.
func testKill(t *testing.T, in *installation) {
	h := in.begin(t)
	defer h.end(t)
	kill := func(fault string, victims ...*host) {
		var theirs []*tenant
		for _, v := range victims {
			theirs = append(theirs, in.tenantsOn(t, v)...)
		}
		t.Logf("%s: kill %q, which have %d tenants", fault, namesOf(victims), len(theirs))
		at := h.now()
		for _, v := range victims {
			v.kill(t)
		}
		if len(victims) == 1 { // of three: a majority is left
			in.failover(t, h, fault, at, theirs, in.but(t))
		}
		began := time.Now()
		for _, v := range victims {
			v.start(t)
		}
		for _, v := range victims {
			v.awaitReady(t)
			in.figures.add(fault+": the host is ready after its start", time.Since(began))
		}
		in.recover(t, h)
	}
	in.put(t, in.hosts[0], in.tenants[0], in.but(t, in.leader(t))[0])
	kill("kill a host", in.hostOf(t, in.tenants[0]))
	kill("kill the leader of etcd", in.leader(t))
	leader := in.leader(t)
	victim := in.but(t, leader)[0]
	in.put(t, leader, in.tenants[0], victim)
	kill("kill a host and the leader", victim, leader)
}

// testFreeze stops a host with its tenants' controllers and lets it go on when others
// have them.
func testFreeze(t *testing.T, in *installation) {
	frozen := in.hosts[1]
	x := in.tenants[0]
	in.put(t, in.hosts[0], x, frozen)
	theirs := in.tenantsOn(t, frozen)
	others := in.but(t, frozen)
	etcd := others[0].etcd(t)
	lead := in.follow(t, x, others[0])
	eventually(t, "the controllers work", func() error { return in.controllersOn(t, x, time.Now().Add(-time.Second), frozen) })

	h := in.begin(t)
	defer h.end(t)
	mark := frozen.log.mark()
	at, when := h.now(), time.Now()
	frozen.freeze(t)
	in.failover(t, h, "freeze a host", at, theirs, others)
	var heir *host
	eventually(t, "another host has the lead", func() error {
		name, err := in.lead(etcd, x)
		if err == nil && name == frozen.name {
			err = fmt.Errorf("%s still has it", name)
		}
		if err == nil {
			heir = in.host(t, name)
		}
		return err
	})
	eventually(t, "its controllers work", func() error { return in.controllersOn(t, x, when, heir) })
	in.figures.add("freeze a host: controllers work elsewhere", time.Since(when))
	time.Sleep(time.Until(when.Add(20 * time.Second))) // long beyond every lease
	frozen.thaw(t)
	frozen.log.says(t, mark, "another host has", x.name)
	in.recover(t, h)

	lead.check(t, when, heir)
}

// stir has a tenant's controllers write all the time, until the test ends: a
// Deployment without pods changes, through one host. It returns its name.
func (in *installation) stir(t *testing.T, x *tenant, via *host) (name string) {
	t.Helper()
	name = "stirred-" + strings.ToLower(t.Name()[strings.LastIndex(t.Name(), "/")+1:])
	labels := map[string]string{"app": name}
	deployments := x.client(t, via).AppsV1().Deployments("default")
	eventually(t, "there is a Deployment in "+x.name, func() error {
		_, err := deployments.Create(t.Context(), &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: appsv1.DeploymentSpec{Replicas: new(int32), Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "c"}}},
			}},
		}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for n := 1; ctx.Err() == nil; n++ {
			patch := fmt.Sprintf(`{"spec":{"minReadySeconds":%d}}`, n)
			limited, stop := context.WithTimeout(ctx, requestLimit)
			deployments.Patch(limited, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}) // during a fault it may fail
			stop()
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return name
}

// controllersOn says whether a tenant's controllers have written on a host since.
func (in *installation) controllersOn(t testing.TB, x *tenant, since time.Time, h *host) error {
	for _, l := range in.byControllers(t, x, since) {
		if l.host == h.name {
			return nil
		}
	}
	return fmt.Errorf("none of %s's controllers have written on %s", x.name, h.name)
}

// testPartition cuts a host off from the others, which clients go on reaching.
func testPartition(t *testing.T, in *installation) {
	victim, x := in.hosts[2], in.tenants[0]
	others := in.but(t, victim)
	h := in.begin(t)
	defer h.end(t)
	lead := in.follow(t, x, others[0])
	for _, d := range []direction{both, incoming, outgoing} {
		in.put(t, others[0], x, victim)
		theirs := in.tenantsOn(t, victim)
		at, when := h.now(), time.Now()
		victim.cut(t, d, others...)
		fault := fmt.Sprintf("cut a host off (%s)", d)
		in.failover(t, h, fault, at, theirs, others)
		etcd := others[0].etcd(t)
		var heir *host
		eventually(t, "another host has the lead", func() error {
			name, err := in.lead(etcd, x)
			if err == nil && name == victim.name {
				err = fmt.Errorf("%s still has it", name)
			}
			if err == nil {
				heir = in.host(t, name)
			}
			return err
		})
		eventually(t, "its controllers work", func() error { return in.controllersOn(t, x, when, heir) })
		if !victim.running() {
			t.Fatalf("%s ended: %v\n%s", victim.name, victim.cmd.ProcessState, victim.log.Tail(20))
		}
		if err := victim.probe("/livez"); err != nil {
			t.Errorf("%s, cut off: %v", victim.name, err)
		}
		if err := victim.lost(t); err != nil {
			t.Error(err)
		}
		healed := h.now()
		victim.heal(t)
		for _, took := range h.awaitAnswers(t, healed, in.tenants, in.hosts...) {
			in.figures.add(fault+": all answer through all hosts after the healing", took)
		}
		in.awaitWell(t)
		lead.check(t, when, heir)
	}
}

// leadership is what etcd has seen, in its order, of a tenant's lead and of the
// Deployment that is stirred.
type leadership struct {
	in     *installation
	tenant *tenant
	etcd   *clientv3.Client
	keys   [2]string // of the lead, of the Deployment

	mu       sync.Mutex // guards what follows
	holders  []holder
	versions []int64 // of the Deployment
}

// holder is who has had the lead since a revision of etcd; nobody if host is empty.
type holder struct {
	revision int64
	host     string
}

// follow stirs a tenant and follows its lead until the test ends, through one host.
func (in *installation) follow(t *testing.T, x *tenant, via *host) *leadership {
	t.Helper()
	l := &leadership{in: in, tenant: x, etcd: via.etcd(t), keys: [2]string{
		"/tenantd/leads/" + x.uid, "/tenants/" + x.uid + "/registry/deployments/default/" + in.stir(t, x, via),
	}}
	ctx, cancel := context.WithCancel(context.Background())
	var watches sync.WaitGroup
	t.Cleanup(func() { cancel(); watches.Wait() })
	for i, key := range l.keys {
		resp, err := l.etcd.Get(ctx, key)
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range resp.Kvs {
			l.see(i, kv.ModRevision, string(kv.Value))
		}
		watches.Go(func() {
			for resp := range l.etcd.Watch(ctx, key, clientv3.WithRev(resp.Header.Revision+1)) {
				for _, e := range resp.Events {
					l.see(i, e.Kv.ModRevision, string(e.Kv.Value)) // none of what is deleted
				}
			}
		})
	}
	return l
}

func (l *leadership) see(key int, revision int64, value string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if key == 0 {
		l.holders = append(l.holders, holder{revision, value})
	} else {
		l.versions = append(l.versions, revision)
	}
}

// check wants the tenant's controllers to have written on its heir since, and nowhere
// while another host had the lead. A write upon a version of the Deployment is the next
// version, so etcd has the order of it all, and no clock takes part.
func (l *leadership) check(t testing.TB, since time.Time, heir *host) {
	t.Helper()
	eventually(t, "all that etcd has is seen", func() error {
		for i, key := range l.keys {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			resp, err := l.etcd.Get(ctx, key)
			cancel()
			if err != nil {
				return err
			}
			l.mu.Lock()
			seen := i == 0 && len(l.holders) > 0 || i == 1 && len(l.versions) > 0
			for _, kv := range resp.Kvs {
				seen = seen && (i == 0 && l.holders[len(l.holders)-1].revision >= kv.ModRevision || i == 1 && l.versions[len(l.versions)-1] >= kv.ModRevision)
			}
			l.mu.Unlock()
			if !seen {
				return errors.New("the watch of " + key + " is late")
			}
		}
		return nil
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	byHeir, wrong := 0, 0
	for _, line := range l.in.byControllers(t, l.tenant, since) {
		upon, err := strconv.ParseInt(line.Object.ResourceVersion, 10, 64)
		if err != nil || line.Object.Resource != "deployments" || !strings.HasSuffix(l.keys[1], "/"+line.Object.Name) {
			continue // no update of the Deployment
		}
		at, ok := slices.BinarySearch(l.versions, upon)
		if !ok || at+1 == len(l.versions) {
			continue // before the watch
		}
		revision, lead := l.versions[at+1], ""
		for _, h := range l.holders {
			if h.revision < revision {
				lead = h.host
			}
		}
		switch line.host {
		case lead:
			if line.host == heir.name {
				byHeir++
			}
		default:
			if lead == "" {
				continue // a lease that ran out: there is no other set
			}
			if wrong++; wrong == 1 {
				t.Errorf("%s's controllers on %s wrote revision %d, %s after the fault, while %s had the lead: %+v", l.tenant.name, line.host, revision, line.Received.Sub(since), lead, l.holders)
			}
		}
	}
	if wrong > 0 {
		t.Errorf("%d such writes", wrong)
	}
	if byHeir == 0 {
		t.Errorf("no write of %s's controllers on %s, which had the lead, is known: %+v", l.tenant.name, heir.name, l.holders)
	}
}

// testQuorumLost kills two of three hosts.
func testQuorumLost(t *testing.T, in *installation) {
	left, x := in.hosts[0], in.tenants[0]
	in.put(t, left, x, left)
	c := x.client(t, left)
	watcher, err := kubernetes.NewForConfig(x.through(left, "")) // without a limit
	if err != nil {
		t.Fatal(err)
	}
	const late = "after-the-quorum"
	watch, err := watcher.CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + late})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	h := in.begin(t)
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...)
	for _, victim := range in.but(t, left) {
		victim.kill(t)
	}
	// What is on its way has a client that waits for as long as it takes.
	patient := newRegisterClient(t, x, left)
	patient.limit, patient.http.Timeout = patience, patience
	began := time.Now()
	refused := func() *statusError {
		t.Helper()
		_, err := patient.do(context.Background(), http.MethodPut, "of-nobody", object("of-nobody", "1"))
		s, ok := err.(*statusError)
		switch {
		case err == nil:
			t.Fatal("a write without a majority was acknowledged")
		case !ok:
			t.Fatalf("a write without a majority has no answer: %v", err)
		}
		return s
	}
	first := refused()
	in.figures.add("quorum lost: a write that is on its way is answered", time.Since(began))
	t.Logf("a write without a majority was answered after %s: %d: %s", time.Since(began).Round(time.Millisecond), first.code, bytes.TrimSpace([]byte(first.answer)))
	eventually(t, left.name+" knows that it is alone", func() error {
		if err := left.probe("/readyz"); err == nil || !strings.Contains(err.Error(), "too few hosts") {
			return fmt.Errorf("it is ready: %v", err)
		}
		return nil
	})
	asked := time.Now()
	if s := refused(); s.code != http.StatusServiceUnavailable || !strings.Contains(s.answer, "storage has no quorum") {
		t.Errorf("a write without a majority was refused so: %d: %s", s.code, s.answer)
	}
	in.figures.add("quorum lost: a write is refused", time.Since(asked))
	// Out of what the API server knows, which is all that is left to read. Upstream's caches
	// would end after half a minute of looking for a leader.
	for range 30 {
		time.Sleep(2 * time.Second)
		if _, err := c.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{ResourceVersion: "0"}); err != nil {
			t.Errorf("a read that needs no majority, %s after it was lost: %v", time.Since(began).Round(time.Second), err)
		}
	}
	select {
	case e, open := <-watch.ResultChan():
		t.Errorf("a watch that was open before: %t, %+v", open, e)
	default:
	}
	if !left.running() {
		t.Fatalf("%s ended: %v\n%s", left.name, left.cmd.ProcessState, left.log.Tail(20))
	}
	if err := left.probe("/livez"); err != nil {
		t.Errorf("without a majority: %v", err)
	}
	t.Logf("readiness without a majority: %v", left.probe("/readyz"))

	at := h.now()
	in.hosts[1].start(t)
	in.hosts[1].awaitReady(t)
	in.figures.add("quorum lost: the second host is ready after its start", h.now()-at)
	for _, took := range h.awaitAnswers(t, at, in.tenants, left, in.hosts[1]) {
		in.figures.add("quorum lost: tenants write again after the start of the second host", took)
	}
	// Somebody who has watched all along sees what is written next.
	eventually(t, "something is written in "+x.name, func() error {
		_, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: late}}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	})
	select {
	case e, open := <-watch.ResultChan():
		if !open || e.Type != apiwatch.Added {
			t.Errorf("a watch that was open before says %t, %+v", open, e)
		}
	case <-time.After(patience):
		t.Error("a watch that was open before says nothing any more")
	}
	in.hosts[2].start(t)
	in.hosts[2].awaitReady(t)
	in.recover(t, h)
	logFailed(t, slices.DeleteFunc(h.end(t), func(op operation) bool { return op.host != left.name || op.begin > at }))
}

// span is a time in which a host is away.
type span struct {
	host     string
	from, to time.Duration
}

// testRollingRestart restarts one host after the other, in order.
func testRollingRestart(t *testing.T, in *installation) {
	h := in.beginWith(t, calmLimit)
	var away []span
	for _, host := range in.hosts {
		from := h.now()
		host.stop(t)
		in.figures.add("restart: a host stops in order", h.now()-from)
		started := h.now()
		host.start(t)
		host.awaitReady(t)
		in.figures.add("restart: a host is ready after its start", h.now()-started)
		in.recover(t, h)
		away = append(away, span{host.name, from, h.now()})
	}
	failed := h.end(t)
	// Who uses the host that is away has to use another one.
	failed = slices.DeleteFunc(failed, func(op operation) bool {
		return slices.ContainsFunc(away, func(s span) bool { return op.host == s.host && op.end >= s.from && op.begin <= s.to })
	})
	wantRepeatable(t, failed, "through hosts that were not being restarted")
}

// logFailed logs what requests failed with, and how often.
func logFailed(t testing.TB, failed []operation) {
	t.Helper()
	type why struct{ tenant, err string }
	counts, first, through := map[why]int{}, map[why]time.Duration{}, map[why]map[string]bool{}
	for _, op := range failed {
		err := op.err
		if e, ok := errors.AsType[*url.Error](err); ok {
			err = e.Err // the address is no news
		}
		w := why{op.tenant, numbers.ReplaceAllString(err.Error(), "#")}
		if counts[w]++; counts[w] == 1 {
			first[w], through[w] = op.begin, map[string]bool{}
		}
		through[w][op.host] = true
	}
	for _, w := range slices.SortedFunc(maps.Keys(counts), func(a, b why) int { return cmp.Compare(first[a], first[b]) }) {
		t.Logf("%d requests to %s through %q failed, the first %s after the beginning: %.300s",
			counts[w], w.tenant, slices.Sorted(maps.Keys(through[w])), first[w].Round(time.Millisecond), w.err)
	}
}

// numbers are what tells one failure from another of its kind, such as a client's port.
var numbers = regexp.MustCompile(`[0-9]+`)

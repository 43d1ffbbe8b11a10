// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// TestHosts runs all cases against one installation, which each finds well and leaves
// to the next as it likes.
func TestHosts(t *testing.T) {
	in := newInstallation(t)
	for _, c := range []struct {
		name string
		run  func(*testing.T, *installation)
	}{
		{"AnyHostAnswers", testAnyHostAnswers},
		{"Move", testMove},
		{"Replicas", testReplicas},
		{"Sleep", testSleep},
		{"Kill", testKill},
		{"Freeze", testFreeze},
		{"Partition", testPartition},
		{"QuorumLost", testQuorumLost},
		{"RollingRestart", testRollingRestart},
		{"DrainAndRemove", testDrainAndRemove},
		{"FourHosts", testFourHosts},
		// From here on hosts run the later version.
		{"Upgrade", testUpgrade},
		// From here on there are disks that are mounted.
		{"SlowDisk", testSlowDisk},
		{"FullDisk", testFullDisk},
		{"SixHosts", testSixHosts},
	} {
		t.Run(c.name, func(t *testing.T) {
			in.settle(t)
			began := time.Now()
			defer func() { t.Logf("took %s", time.Since(began).Round(time.Second)) }()
			c.run(t, in)
		})
	}
	in.figures.log(t)
}

// installation is three hosts and three tenants.
type installation struct {
	lab     *lab
	hosts   []*host
	tenants []*tenant
	figures figures
}

// tenant is a cluster of the installation.
type tenant struct {
	name, uid string
	config    *rest.Config // of its administrator
}

// newInstallation makes one. TestHosts/Join is how: its hosts join, after some have
// been refused.
func newInstallation(t *testing.T) *installation {
	t.Helper()
	l := newLab(t)
	in := &installation{lab: l, figures: figures{}}
	a, b, c := l.newHost("host-a", 11), l.newHost("host-b", 12), l.newHost("host-c", 13)
	a.start(t)
	a.awaitReady(t)
	in.hosts = []*host{a}
	names := []string{"one", "two", "three"}
	for _, name := range names {
		a.mustTenantctl(t, "add", name, "--wait=false")
	}
	for _, name := range names {
		in.add(t, name)
	}
	if !t.Run("Join", func(t *testing.T) { testJoin(t, in, b, c) }) {
		t.Fatal("without hosts there is nothing to test")
	}
	return in
}

// add waits until a tenant is ready, and makes it one of those that tests use.
func (in *installation) add(t testing.TB, name string) {
	t.Helper()
	via := in.hosts[0]
	eventually(t, "tenant "+name+" is ready", func() error {
		object, err := in.tenant(t, via, &tenant{name: name})
		if err != nil {
			return err
		}
		return readyTenant(object)
	})
	cfg, err := clientcmd.RESTConfigFromKubeConfig([]byte(via.mustTenantctl(t, "kubeconfig", name)))
	if err != nil {
		t.Fatal(err)
	}
	tenant := &tenant{name: name, config: cfg}
	object, err := in.tenant(t, via, tenant)
	if err != nil {
		t.Fatal(err)
	}
	tenant.uid = string(object.UID)
	in.tenants = append(in.tenants, tenant)
}

// through is the administrator's configuration of a client that uses one host, and has
// an address of its own.
func (x *tenant) through(h *host, from string) *rest.Config {
	cfg := rest.CopyConfig(x.config)
	cfg.Dial, cfg.QPS = h.dial(from), -1
	return cfg
}

// client is the administrator's client through one host.
func (x *tenant) client(t testing.TB, h *host) *kubernetes.Clientset {
	t.Helper()
	cfg := x.through(h, "")
	cfg.Timeout = 10 * time.Second
	c, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// system is a client of the system plane of one host.
func (in *installation) system(t testing.TB, via *host) client.Client {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(in.hosts[0].dir, "admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.Dial, cfg.QPS, cfg.Timeout = via.dial(""), -1, 10*time.Second
	scheme := apiruntime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	mapper := apimeta.NewDefaultRESTMapper(nil)
	for _, kind := range []string{"Tenant", "Host"} {
		mapper.Add(v1alpha1.GroupVersion.WithKind(kind), apimeta.RESTScopeRoot)
	}
	mapper.Add(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"), apimeta.RESTScopeRoot)
	c, err := client.New(cfg, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// tenant is a tenant's object, as a host's system plane has it.
func (in *installation) tenant(t testing.TB, via *host, x *tenant) (*v1alpha1.Tenant, error) {
	object := &v1alpha1.Tenant{}
	return object, in.system(t, via).Get(context.Background(), client.ObjectKey{Name: x.name}, object)
}

// change changes a tenant's object.
func (in *installation) change(t testing.TB, via *host, x *tenant, change func(*v1alpha1.TenantSpec)) {
	t.Helper()
	c := in.system(t, via)
	eventually(t, "tenant "+x.name+" is changed", func() error {
		object := &v1alpha1.Tenant{}
		if err := c.Get(context.Background(), client.ObjectKey{Name: x.name}, object); err != nil {
			return err
		}
		patch := client.MergeFrom(object.DeepCopy())
		change(&object.Spec)
		return c.Patch(context.Background(), object, patch)
	})
}

// pin has a tenant run on hosts, and waits until it does and nowhere else.
func (in *installation) pin(t testing.TB, via *host, x *tenant, hosts ...*host) {
	t.Helper()
	names := namesOf(hosts)
	in.change(t, via, x, func(s *v1alpha1.TenantSpec) { s.Placement.Hosts, s.Replicas = names, int32(len(names)) })
	in.awaitPlacement(t, via, x, names...)
}

// put is pin, after which the tenant may go where it is wanted: it stays where it is while
// that is well.
func (in *installation) put(t testing.TB, via *host, x *tenant, hosts ...*host) {
	t.Helper()
	in.pin(t, via, x, hosts...)
	in.change(t, via, x, func(s *v1alpha1.TenantSpec) { s.Placement.Hosts = nil })
	in.awaitPlacement(t, via, x, namesOf(hosts)...)
}

// awaitPlacement waits until a tenant is on these hosts and no other, and ready.
func (in *installation) awaitPlacement(t testing.TB, via *host, x *tenant, names ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("tenant %s is on %q", x.name, names), func() error {
		object, err := in.tenant(t, via, x)
		if err != nil {
			return err
		}
		if got := slices.Sorted(slices.Values(object.Status.Placement)); !slices.Equal(got, slices.Sorted(slices.Values(names))) {
			return fmt.Errorf("it is on %q", got)
		}
		return readyTenant(object)
	})
}

func readyTenant(object *v1alpha1.Tenant) error {
	if c := apimeta.FindStatusCondition(object.Status.Conditions, v1alpha1.ConditionReady); c == nil || c.Status != metav1.ConditionTrue {
		return fmt.Errorf("tenant %s is not ready: phase %s, %+v", object.Name, object.Status.Phase, c)
	}
	return nil
}

// hostOf is the host that a tenant with one replica is on.
func (in *installation) hostOf(t testing.TB, x *tenant) *host {
	t.Helper()
	var found *host
	eventually(t, "tenant "+x.name+" is on one host", func() error {
		object, err := in.tenant(t, in.anyHost(t), x)
		if err != nil {
			return err
		}
		if len(object.Status.Placement) != 1 {
			return fmt.Errorf("it is on %q", object.Status.Placement)
		}
		found = in.host(t, object.Status.Placement[0])
		return nil
	})
	return found
}

// host is the host of a name.
func (in *installation) host(t testing.TB, name string) *host {
	t.Helper()
	for _, h := range in.hosts {
		if h.name == name {
			return h
		}
	}
	t.Fatalf("there is no host %q", name)
	return nil
}

// anyHost is a host that runs.
func (in *installation) anyHost(t testing.TB) *host { return in.but(t)[0] }

// but are the hosts that run, but for some.
func (in *installation) but(t testing.TB, not ...*host) []*host {
	t.Helper()
	left := slices.DeleteFunc(slices.Clone(in.hosts), func(h *host) bool { return !h.running() || h.frozen || slices.Contains(not, h) })
	if len(left) == 0 {
		t.Fatal("no host is left")
	}
	return left
}

// tenantsOn are the tenants that are on a host and no other.
func (in *installation) tenantsOn(t testing.TB, h *host) []*tenant {
	t.Helper()
	return slices.DeleteFunc(slices.Clone(in.tenants), func(x *tenant) bool { return in.hostOf(t, x) != h })
}

func namesOf(hosts []*host) []string {
	var names []string
	for _, h := range hosts {
		names = append(names, h.name)
	}
	return names
}

// leader is the host whose part of etcd leads.
func (in *installation) leader(t testing.TB) *host {
	t.Helper()
	var found *host
	eventually(t, "etcd has a leader", func() error {
		for _, h := range in.but(t) {
			c := h.etcd(t)
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			status, err := c.Status(ctx, c.Endpoints()[0])
			cancel()
			if err == nil && status.Leader == status.Header.MemberId {
				found = h
				return nil
			}
		}
		return errors.New("none says that it leads")
	})
	return found
}

// moveLeader has a host's part of etcd lead.
func (in *installation) moveLeader(t testing.TB, to *host) {
	t.Helper()
	eventually(t, "etcd is led by "+to.name, func() error {
		leader := in.leader(t)
		if leader == to {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		c := to.etcd(t)
		status, err := c.Status(ctx, c.Endpoints()[0])
		if err != nil {
			return err
		}
		_, err = leader.etcd(t).MoveLeader(ctx, status.Header.MemberId)
		return errors.Join(errors.New(leader.name+" leads"), err)
	})
}

// lead is which host has the lead of a tenant, as a host's etcd has it.
func (in *installation) lead(etcd *clientv3.Client, x *tenant) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	resp, err := etcd.Get(ctx, "/tenantd/leads/"+x.uid)
	if err != nil {
		return "", err
	}
	if len(resp.Kvs) != 1 {
		return "", errors.New("nobody leads " + x.name)
	}
	return string(resp.Kvs[0].Value), nil
}

// withoutVote is the mark of members that do not vote.
const withoutVote = " (learner)"

// members are etcd's, as one host has them: names of voters, and of others with a mark.
func (in *installation) members(t testing.TB, via *host) []string {
	t.Helper()
	var names []string
	etcd := via.etcd(t)
	eventually(t, "etcd tells its members", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		resp, err := etcd.MemberList(ctx)
		if err != nil {
			return err
		}
		names = nil
		for _, m := range resp.Members {
			if m.IsLearner {
				m.Name += withoutVote
			}
			names = append(names, m.Name)
		}
		slices.Sort(names)
		return nil
	})
	return names
}

// settle brings back all that is gone, and waits until all is well.
func (in *installation) settle(t testing.TB) {
	t.Helper()
	for _, h := range in.hosts {
		h.heal(t)
		if h.running() && h.frozen {
			h.thaw(t)
		}
		if !h.running() {
			h.start(t)
		}
	}
	for _, h := range in.hosts {
		h.awaitReady(t)
	}
	for _, x := range in.tenants {
		in.change(t, in.hosts[0], x, func(s *v1alpha1.TenantSpec) { s.Placement.Hosts, s.Replicas = nil, 1 })
	}
	in.awaitWell(t)
}

// votes are how many of so many hosts vote.
func votes(hosts int) int { return []int{0, 1, 1, 3, 3, 5}[min(hosts, 5)] }

// awaitWell waits until all hosts are ready, as many of them as should do vote, and all
// tenants answer through all hosts.
func (in *installation) awaitWell(t testing.TB) {
	t.Helper()
	want := slices.Sorted(slices.Values(namesOf(in.hosts)))
	eventually(t, "all hosts are members, and enough of them vote", func() error {
		members := in.members(t, in.hosts[0])
		var names []string
		voters := 0
		for _, m := range members {
			name, without := strings.CutSuffix(m, withoutVote)
			if names = append(names, name); !without {
				voters++
			}
		}
		if !slices.Equal(names, want) || voters != votes(len(names)) {
			return fmt.Errorf("the members are %q", members)
		}
		return nil
	})
	for _, via := range in.hosts {
		c := in.system(t, via)
		eventually(t, "all hosts and tenants are ready, as "+via.name+" says", func() error {
			list := &v1alpha1.HostList{}
			if err := c.List(context.Background(), list); err != nil {
				return err
			}
			for _, h := range in.hosts {
				i := slices.IndexFunc(list.Items, func(o v1alpha1.Host) bool { return o.Name == h.name })
				if i < 0 || list.Items[i].Status.State != v1alpha1.HostReady {
					return fmt.Errorf("host %s is not: %+v", h.name, list.Items)
				}
			}
			tenants := &v1alpha1.TenantList{}
			if err := c.List(context.Background(), tenants); err != nil {
				return err
			}
			for _, o := range tenants.Items {
				if err := readyTenant(&o); err != nil {
					return err
				}
				if len(o.Status.Placement) != int(o.Spec.Replicas) {
					return fmt.Errorf("tenant %s is on %q", o.Name, o.Status.Placement)
				}
			}
			return nil
		})
		for _, x := range in.tenants {
			c := x.client(t, via)
			eventually(t, x.name+" answers through "+via.name, func() error {
				_, err := c.CoreV1().Namespaces().Get(context.Background(), "default", metav1.GetOptions{})
				return err
			})
		}
	}
}

// auditLine is as much of a line of an audit log as tests need.
type auditLine struct {
	host       string
	RequestURI string    `json:"requestURI"`
	Verb       string    `json:"verb"`
	UserAgent  string    `json:"userAgent"`
	SourceIPs  []string  `json:"sourceIPs"`
	Received   time.Time `json:"requestReceivedTimestamp"`
	Answered   time.Time `json:"stageTimestamp"`
	Response   struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	Object struct {
		Resource, Name  string
		ResourceVersion string `json:"resourceVersion"` // that the request was made upon
	} `json:"objectRef"`
}

// audit is what all hosts have logged of a tenant, in the order in which it came.
func (in *installation) audit(t testing.TB, x *tenant, want func(auditLine) bool) []auditLine {
	t.Helper()
	var all []auditLine
	for _, h := range in.hosts {
		file, err := os.Open(filepath.Join(h.dir, "audit", x.name, "audit.log"))
		if errors.Is(err, os.ErrNotExist) {
			continue // it has not been there
		}
		if err != nil {
			t.Fatal(err)
		}
		for lines := bufio.NewReader(file); ; {
			raw, err := lines.ReadBytes('\n')
			if err != nil {
				break // the end, or a line that is being written
			}
			line := auditLine{host: h.name}
			if err := json.Unmarshal(raw, &line); err != nil {
				continue // the line in which a host was killed
			}
			if want(line) {
				all = append(all, line)
			}
		}
		file.Close()
	}
	slices.SortStableFunc(all, func(a, b auditLine) int { return a.Received.Compare(b.Received) })
	return all
}

// byControllers are the writes that a tenant's controllers have done since.
func (in *installation) byControllers(t testing.TB, x *tenant, since time.Time) []auditLine {
	t.Helper()
	return in.audit(t, x, func(l auditLine) bool {
		return strings.HasSuffix(l.UserAgent, "/deployment-controller") && l.Response.Code/100 == 2 && l.Received.After(since)
	})
}

// figures are how long things took, by what they are.
type figures map[string][]time.Duration

func (f figures) add(what string, took time.Duration) { f[what] = append(f[what], took) }

// log logs what there is.
func (f figures) log(t testing.TB) {
	for _, what := range slices.Sorted(maps.Keys(f)) {
		all := slices.SortedFunc(slices.Values(f[what]), cmp.Compare)
		at := func(share float64) time.Duration {
			return all[min(int(share*float64(len(all))), len(all)-1)].Round(time.Millisecond)
		}
		t.Logf("%-60s n=%-3d p50=%-8s p99=%s", what, len(all), at(0.5), at(0.99))
	}
}

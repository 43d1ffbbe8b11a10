// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/e2e/proc"
)

const (
	// domain is the zone of all names.
	domain = "hostile.test"
	// binaryVariable names another tenantd to attack than bin/tenantd; the proof
	// sets it.
	binaryVariable = "TENANTD_BINARY"
)

// only is the one case to run.
var only = flag.String("case", "", "run only the case of this `name`")

// patience is how long a test waits for what must happen: far beyond what it takes
// on an idle machine. The proof, whose cases must fail, has less of it.
var patience = 2 * time.Minute

func init() { flag.DurationVar(&patience, "patience", patience, "wait so long for what must happen") }

// attack is a case.
type attack struct {
	name  string // as the proof's table and -case have it
	tries string // what the attacker does
	must  string // what must happen
	// watched is what is looked at beside what bystanders look at always.
	watched string
	// alone keeps other cases from running at the same time.
	alone bool
	// add are arguments of tenantctl add.
	add []string
	// spec is merged into the attacker's Tenant object before it is made, as YAML.
	spec string
	// run is the attack. The tenant is removed when it returns, whatever it has left
	// behind.
	run func(*testing.T, *attacker)

	// plant and restarted are an attack that takes effect when the daemon stops and
	// starts: between them it does. They stand in place of run.
	plant, restarted func(*testing.T, *attacker)
}

// attacker is a tenant's administrator.
type attacker struct {
	*cluster
	victim *cluster
	seen   *bystanders
}

// TestHostile runs all cases against one daemon.
func TestHostile(t *testing.T) {
	d := startDaemon(t)
	seen := newBystanders(t, d)
	names := map[string]bool{}
	for _, group := range groups() {
		for _, a := range group {
			if names[a.name] || a.tries == "" || a.must == "" {
				t.Errorf("the case %q has no name of its own, or does not say what it tries and what must happen", a.name)
			}
			names[a.name] = true
			if a.run == nil || *only != "" && *only != a.name {
				continue
			}
			t.Run(a.name, func(t *testing.T) {
				if !a.alone {
					t.Parallel()
				}
				seen.during(t, func(t *testing.T) {
					attacker := seen.attacker(t, a)
					a.run(t, attacker)
					attacker.remove()
				})
			})
		}
	}
	if *only != "" && !names[*only] {
		t.Errorf("there is no case %q", *only)
	}
}

// TestRestart plants what shall keep the daemon from stopping and starting, and has
// it stop and start.
func TestRestart(t *testing.T) {
	var planted []attack
	for _, group := range groups() {
		for _, a := range group {
			if a.plant != nil && (*only == "" || *only == a.name) {
				planted = append(planted, a)
			}
		}
	}
	if len(planted) == 0 {
		t.Skip("the case that was asked for is not one of these")
	}
	d := startDaemon(t)
	seen := newBystanders(t, d)
	attackers := map[string]*attacker{}
	for _, a := range planted {
		seen.during(t, func(t *testing.T) {
			attackers[a.name] = seen.attacker(t, a)
			a.plant(t, attackers[a.name])
		})
	}
	if t.Failed() {
		return
	}
	seen.rest(t)
	d.stop(t)
	d.start(t)
	seen.resume(t)
	for _, a := range planted {
		t.Run(a.name, func(t *testing.T) {
			t.Parallel()
			seen.during(t, func(t *testing.T) {
				attacker := attackers[a.name].within(t)
				a.restarted(t, attacker)
				attacker.remove()
			})
		})
	}
}

// attacker makes the tenant of an attack. Its clients' certificates are of
// cluster-admins, as tenantctl kubeconfig writes them.
func (b *bystanders) attacker(t *testing.T, a attack) *attacker {
	t.Helper()
	name := strings.ToLower(a.name)
	args := append([]string{name}, a.add...)
	if a.spec != "" {
		object := map[string]any{"apiVersion": v1alpha1.GroupVersion.String(), "kind": "Tenant", "metadata": map[string]any{"name": name}}
		var spec map[string]any
		if err := yaml.Unmarshal([]byte(a.spec), &spec); err != nil {
			t.Fatalf("spec of %s: %v", name, err)
		}
		object["spec"] = spec
		raw, err := yaml.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "tenant.yaml")
		if err := os.WriteFile(file, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		args = append([]string{"-f", file}, a.add...)
	}
	return &attacker{cluster: b.daemon.add(t, name, args...), victim: b.victim.within(t), seen: b}
}

// within is the attacker, for use in another test.
func (a *attacker) within(t testing.TB) *attacker {
	n := *a
	n.cluster, n.victim = a.cluster.within(t), a.victim.within(t)
	return &n
}

// remove removes the attacker's tenant, which works whatever it has done.
func (a *attacker) remove() {
	a.t.Helper()
	uid := a.tenant().UID
	a.daemon.mustTenantctl(a.t, "remove", a.name, "--yes", "--timeout", patience.String())
	etcd := a.daemon.etcd(a.t)
	left, err := etcd.Get(context.Background(), "/tenants/"+string(uid)+"/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil || left.Count > 0 {
		a.t.Errorf("%s was removed, but %d of its keys are left: %v", a.name, left.Count, err)
	}
}

// bystanders are what an attack must not touch.
type bystanders struct {
	daemon *daemon
	victim *cluster
	decoys *decoys
	canary string // a directory with a file
	uses   atomic.Pointer[use]
}

// newBystanders adds a victim to the daemon and sets the decoys.
func newBystanders(t *testing.T, d *daemon) *bystanders {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "tenantd-canary") // the only place where upstream deletes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bystanders{daemon: d, victim: d.add(t, "victim", "victim"), decoys: newDecoys(t, d), canary: filepath.Join(dir, "sings")}
	if err := os.WriteFile(b.canary, []byte("tweet"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.resume(t)
	t.Cleanup(func() {
		if u := b.uses.Load(); u != nil {
			u.stop(t)
		}
	})
	return b
}

// rest ends the use of the victim, of which nothing may have failed.
func (b *bystanders) rest(t *testing.T) {
	t.Helper()
	b.uses.Swap(nil).stop(t)
}

// resume has the victim used again.
func (b *bystanders) resume(t *testing.T) {
	t.Helper()
	eventually(t, "the victim is served", func() error { return b.victim.answers() })
	b.uses.Store(startUse(t, b.victim))
}

// during watches an attack.
func (b *bystanders) during(t *testing.T, attack func(*testing.T)) {
	t.Helper()
	restarts := b.daemon.metric(t, "tenantd_tenant_restarts_total", b.victim.name)
	pid := b.daemon.cmd.Process.Pid
	dialled := b.decoys.count()
	defer func() {
		t.Helper()
		if b.daemon.cmd.Ended() {
			t.Fatalf("the daemon ended: %v\n%s", b.daemon.cmd.ProcessState, b.daemon.log.Tail(60))
		}
		if now := b.daemon.cmd.Process.Pid; now != pid {
			t.Errorf("the daemon is process %d, and was %d", now, pid)
		}
		b.uses.Load().proceed(t)
		if now := b.daemon.metric(t, "tenantd_tenant_restarts_total", b.victim.name); now != restarts {
			t.Errorf("the victim was started again %s times, %s before", now, restarts)
		}
		if _, err := b.daemon.get("/readyz"); err != nil {
			t.Errorf("the daemon is not ready: %v", err)
		}
		for _, to := range b.decoys.since(dialled) {
			t.Errorf("somebody tried to connect to %s", to)
		}
		if got, err := os.ReadFile(b.canary); err != nil || string(got) != "tweet" {
			t.Errorf("the canary was touched: %q, %v", got, err)
		}
	}()
	attack(t)
}

// use is the victim's users. None of their requests may fail.
type use struct {
	rounds atomic.Int64
	cancel context.CancelFunc
	ended  chan struct{} // closed when there are no more
	err    error         // why; to be read after ended is closed
}

func startUse(t *testing.T, victim *cluster) *use {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	u := &use{cancel: cancel, ended: make(chan struct{})}
	cfg := victim.config()
	// A request without an answer is one that failed.
	cfg.Timeout = patience
	writer, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	events, err := victim.CoreV1().ConfigMaps("default").Watch(context.Background(), metav1.ListOptions{LabelSelector: "used=yes"})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(u.ended)
		defer events.Stop()
		for ctx.Err() == nil {
			if u.err = u.round(writer, events); u.err != nil {
				return
			}
			u.rounds.Add(1)
			time.Sleep(10 * time.Millisecond) // the machine has more to do
		}
	}()
	t.Cleanup(cancel)
	return u
}

// round is not to be cut short: what it would then say is no fault of the daemon's.
func (u *use) round(c kubernetes.Interface, events watch.Interface) error {
	ctx := context.Background()
	configMaps := c.CoreV1().ConfigMaps("default")
	name := fmt.Sprintf("use-%d", u.rounds.Load())
	made := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"used": "yes"}}}
	if _, err := configMaps.Create(ctx, made, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create: %w", err)
	}
	if _, err := configMaps.Get(ctx, name, metav1.GetOptions{}); err != nil {
		return fmt.Errorf("get: %w", err)
	}
	for late := time.After(patience); ; {
		select {
		case event, ok := <-events.ResultChan():
			if !ok || event.Type == watch.Error {
				return fmt.Errorf("watch ended: %v", event.Object)
			}
			if seen, ok := event.Object.(*corev1.ConfigMap); !ok || seen.Name != name || event.Type != watch.Added {
				continue
			}
		case <-late:
			return errors.New("watch: what was created is not seen")
		}
		break
	}
	if err := configMaps.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	return nil
}

// proceed waits until the victim has been used once more.
func (u *use) proceed(t testing.TB) {
	t.Helper()
	goal := u.rounds.Load() + 2
	eventually(t, "the victim is used", func() error {
		select {
		case <-u.ended:
			t.Fatalf("the victim's user noticed: %v", u.err)
		default:
		}
		if n := u.rounds.Load(); n < goal {
			return fmt.Errorf("%d rounds", n)
		}
		return nil
	})
}

func (u *use) stop(t testing.TB) {
	t.Helper()
	u.cancel()
	<-u.ended
	if u.err != nil {
		t.Errorf("the victim's user noticed: %v", u.err)
	}
}

// cluster is a tenant with its administrator's credentials.
type cluster struct {
	*kubernetes.Clientset
	t          testing.TB
	daemon     *daemon
	name       string
	kubeconfig string
}

// within is the cluster, for use in another test.
func (c *cluster) within(t testing.TB) *cluster {
	n := *c
	n.t = t
	return &n
}

// host is the tenant's hostname.
func (c *cluster) host() string { return c.name + "." + domain }

// config is the administrator's client configuration, without the client's own
// limit.
func (c *cluster) config() *rest.Config {
	c.t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	if err != nil {
		c.t.Fatal(err)
	}
	cfg.QPS = -1
	return cfg
}

// as is a configuration of another user.
func (c *cluster) as(user string, groups ...string) *rest.Config {
	c.t.Helper()
	args := []string{"--user", user}
	for _, g := range groups {
		args = append(args, "--group", g)
	}
	n := *c
	n.kubeconfig = c.daemon.kubeconfig(c.t, c.name, args...)
	return n.config()
}

// kubectl runs upstream's kubectl.
func (c *cluster) kubectl(stdin string, args ...string) result {
	c.t.Helper()
	// A cache of its own, so that tests do not see each other's discovery.
	return execute(c.t, stdin, []string{"KUBECACHEDIR=" + filepath.Dir(c.kubeconfig)}, bin(c.t, "kubectl"), append([]string{"--kubeconfig", c.kubeconfig}, args...)...)
}

// apply creates objects given as YAML, which must succeed.
func (c *cluster) apply(objects string) {
	c.t.Helper()
	if r := c.kubectl(objects, "create", "-f", "-"); r.code != 0 {
		c.t.Fatalf("kubectl create: exit code %d\n%s", r.code, r.stderr)
	}
}

// raw sends a request as the administrator and returns status and body.
func (c *cluster) raw(method, path, contentType string, body io.Reader) (int, string) {
	c.t.Helper()
	status, answer, err := request(c.config(), method, path, contentType, body)
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	return status, answer
}

// request sends a request with a client configuration.
func request(cfg *rest.Config, method, path, contentType string, body io.Reader) (int, string, error) {
	httpClient, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return 0, "", err
	}
	defer httpClient.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, cfg.Host+path, body)
	if err != nil {
		return 0, "", err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := httpClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(answer), err
}

// answers says whether the API server is ready.
func (c *cluster) answers() error {
	answer, err := c.Discovery().RESTClient().Get().AbsPath("/readyz").Timeout(patience).DoRaw(context.Background())
	if err != nil {
		return fmt.Errorf("%w: %s", err, answer)
	}
	return nil
}

// tenant is the Tenant object as it is now.
func (c *cluster) tenant() *v1alpha1.Tenant {
	c.t.Helper()
	tenant := &v1alpha1.Tenant{}
	raw := c.daemon.mustTenantctl(c.t, "get", c.name, "-o", "json")
	if err := yaml.Unmarshal([]byte(raw), tenant); err != nil {
		c.t.Fatal(err)
	}
	return tenant
}

// prefix is where etcd has what the tenant's API server stores.
func (c *cluster) prefix() string {
	c.t.Helper()
	return "/tenants/" + string(c.tenant().UID) + "/registry/"
}

// awaitReady waits until the Tenant says that it is ready.
func (c *cluster) awaitReady() {
	c.t.Helper()
	eventually(c.t, c.name+" is ready", func() error {
		tenant := c.tenant()
		if tenant.Status.Phase != v1alpha1.TenantReady {
			return fmt.Errorf("it is %s: %v", tenant.Status.Phase, tenant.Status.Conditions)
		}
		return c.answers()
	})
}

// daemon is a tenantd process.
type daemon struct {
	dir    string // --data-dir
	listen string
	health string
	args   []string // further arguments

	cmd *proc.Process
	log *proc.Log
}

// startDaemon starts a daemon that ends with the test, in order.
func startDaemon(t *testing.T) *daemon {
	t.Helper()
	d := newDaemon(t)
	d.start(t)
	return d
}

// newDaemon is one with further arguments that is yet to be started.
func newDaemon(t *testing.T, args ...string) *daemon {
	t.Helper()
	// Not t.TempDir: a unix socket's path must be short.
	dir, err := os.MkdirTemp("", "tenantd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d := &daemon{dir: filepath.Join(dir, "data"), listen: proc.FreeAddress(t), health: proc.FreeAddress(t), args: args}
	t.Cleanup(func() {
		if d.cmd == nil {
			return
		}
		if !d.cmd.Ended() {
			d.stop(t)
		}
		if t.Failed() {
			t.Logf("log of the daemon:\n%s", d.log.Tail(60))
		}
	})
	return d
}

// start starts the process and waits until it is ready.
func (d *daemon) start(t *testing.T) {
	t.Helper()
	path := os.Getenv(binaryVariable)
	if path == "" {
		path = bin(t, "tenantd")
	}
	cmd := exec.Command(path, append([]string{
		"run", "--data-dir", d.dir, "--listen", d.listen, "--advertise-address", d.listen,
		"--health-listen", d.health, "--domain", domain, "--name", "host-a",
	}, d.args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log := &proc.Log{Without: "took too long"} // etcd says so of a slow disk
	cmd.Stdout, cmd.Stderr = log, log
	d.cmd, d.log = proc.Start(t, cmd), log
	eventually(t, "the daemon is ready", func() error {
		if d.cmd.Ended() {
			t.Fatalf("the daemon ended: %v\n%s", d.cmd.ProcessState, log.Tail(40))
		}
		_, err := d.get("/readyz")
		return err
	})
}

// stop ends the daemon with SIGTERM, which must go well.
func (d *daemon) stop(t testing.TB) {
	t.Helper()
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatalf("stop the daemon: %v", err)
	}
	if !d.cmd.EndsWithin(patience) {
		d.cmd.Kill()
		t.Fatalf("the daemon went on for %s after SIGTERM\n%s", patience, d.log.Tail(40))
	}
	if code := d.cmd.ProcessState.ExitCode(); code != 0 {
		t.Fatalf("after SIGTERM the daemon exited with %d\n%s", code, d.log.Tail(40))
	}
}

// get asks the health address.
func (d *daemon) get(path string) (string, error) {
	return proc.Get(http.DefaultClient, "http://"+d.health+path)
}

// metric is the value of a tenant's metric, empty if there is none.
func (d *daemon) metric(t testing.TB, name, tenant string) string {
	t.Helper()
	all, err := d.get("/metrics")
	if err != nil {
		t.Fatalf("the daemon's metrics: %v", err)
	}
	for line := range strings.Lines(all) {
		if value, ok := strings.CutPrefix(line, name+`{tenant="`+tenant+`"} `); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// etcd is a client of the store below the control planes.
func (d *daemon) etcd(t testing.TB) *clientv3.Client {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(d.dir, "run", "*.sock"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets of the store: %q, %v", sockets, err)
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + sockets[0]}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// adminKubeconfig is the file with the system plane's credentials.
func (d *daemon) adminKubeconfig() string { return filepath.Join(d.dir, "admin.kubeconfig") }

// system is the system plane with its administrator's credentials.
func (d *daemon) system(t testing.TB) *cluster {
	t.Helper()
	c := &cluster{t: t, daemon: d, name: "system", kubeconfig: d.adminKubeconfig()}
	c.Clientset = clientFor(t, c.config())
	return c
}

// tenantctl runs tenantctl against the daemon.
func (d *daemon) tenantctl(t testing.TB, args ...string) result {
	t.Helper()
	return execute(t, "", []string{"TENANTCTL_KUBECONFIG=" + d.adminKubeconfig()}, bin(t, "tenantctl"), args...)
}

// mustTenantctl is tenantctl for what must succeed; it returns its output.
func (d *daemon) mustTenantctl(t testing.TB, args ...string) string {
	t.Helper()
	r := d.tenantctl(t, args...)
	if r.code != 0 {
		t.Fatalf("tenantctl %s: exit code %d\n%s%s", strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// add adds a tenant and waits until it is ready.
func (d *daemon) add(t testing.TB, name string, args ...string) *cluster {
	t.Helper()
	d.mustTenantctl(t, append([]string{"add", "--timeout", patience.String()}, args...)...)
	c := &cluster{t: t, daemon: d, name: name, kubeconfig: d.kubeconfig(t, name)}
	c.Clientset = clientFor(t, c.config())
	return c
}

// kubeconfig writes a kubeconfig for the tenant and returns its path.
func (d *daemon) kubeconfig(t testing.TB, name string, args ...string) string {
	t.Helper()
	// Not t.TempDir: a planted attack goes on in another test.
	dir, err := os.MkdirTemp(filepath.Dir(d.dir), "kubeconfig")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, name)
	d.mustTenantctl(t, append([]string{"kubeconfig", name, "--output", file}, args...)...)
	return file
}

// clientFor makes a client.
func clientFor(t testing.TB, cfg *rest.Config) *kubernetes.Clientset {
	t.Helper()
	c, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// decoys are listeners that nobody has any business with. In a network of the
// tests' own, so is every address but the daemon's.
type decoys struct {
	ports map[string]int // where they listen, by address
	own   sync.Map       // addresses of the tests' own, as netip.AddrPort

	mu      sync.Mutex // guards touched
	touched []string
}

// newDecoys listens on loopback, at free ports and at those that components of a
// cluster have by default.
func newDecoys(t testing.TB, d *daemon) *decoys {
	t.Helper()
	decoys := &decoys{ports: map[string]int{}}
	if inside() {
		decoys.permit(d.listen)
		decoys.permit(d.health)
		tap(t, func(network string, to netip.AddrPort, name string) {
			if _, ok := decoys.own.Load(to); !ok {
				decoys.touch(strings.TrimSpace(network + " " + to.String() + " " + name))
			}
		})
	}
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", "127.0.0.1:10250", "127.0.0.1:10257", "127.0.0.1:10259", "127.0.0.1:2379"} {
		ln, err := net.Listen("tcp", address)
		if err != nil {
			// Somebody else's, or no IPv6 here. The first must be.
			if address == "127.0.0.1:0" {
				t.Fatal(err)
			}
			continue
		}
		t.Cleanup(func() { ln.Close() })
		decoys.ports[address] = ln.Addr().(*net.TCPAddr).Port
		go func() {
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				decoys.touch(fmt.Sprintf("the decoy %s, from %s", ln.Addr(), conn.RemoteAddr()))
				conn.Close()
			}
		}()
	}
	return decoys
}

// permit says that an address is one which tests connect to.
func (d *decoys) permit(address string) { d.own.Store(netip.MustParseAddrPort(address), true) }

// port is that of a decoy on 127.0.0.1.
func (d *decoys) port() int { return d.ports["127.0.0.1:0"] }

func (d *decoys) touch(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.touched = append(d.touched, what)
}

func (d *decoys) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.touched)
}

// since are the connections after the first n.
func (d *decoys) since(n int) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Compact(slices.Sorted(slices.Values(d.touched[n:])))
}

// bin is the path of a program that make has built.
func bin(t testing.TB, name string) string {
	t.Helper()
	return proc.Built(t, filepath.Join("..", "..", "bin", name))
}

// result is what a command left.
type result struct {
	stdout, stderr string
	code           int
}

// execute runs a program and returns what it left, whatever that is.
func execute(t testing.TB, stdin string, env []string, path string, args ...string) result {
	t.Helper()
	cmd := exec.Command(path, args...)
	cmd.Stdin, cmd.Env = strings.NewReader(stdin), append(os.Environ(), env...)
	stdout, stderr, code := proc.Run(t, 2*patience, cmd)
	return result{stdout, stderr, code}
}

// contains fails the test if text lacks one of want.
func contains(t testing.TB, what, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%s lacks %q:\n%s", what, w, text)
		}
	}
}

// eventually repeats check until it succeeds.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	proc.Eventually(t, patience, 50*time.Millisecond, what, check)
}

// sortedKeys are a map's keys in order, so that tests do the same each time.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

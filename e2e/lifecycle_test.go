// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func init() { ctrllog.SetLogger(logr.Discard()) } // or it complains of having none

// TestTwentyAtOnce adds twenty tenants with one `kubectl apply`, restarts the host
// and removes them all at once.
func TestTwentyAtOnce(t *testing.T) {
	h := startHost(t)
	const tenants = 20
	var list strings.Builder
	var names []string
	for i := range tenants {
		names = append(names, fmt.Sprintf("many-%02d", i))
		fmt.Fprintf(&list, "---\napiVersion: tenantd.io/v1alpha1\nkind: Tenant\nmetadata: {name: %s}\n", names[i])
	}
	mustKubectl(t, h.adminKubeconfig(), list.String(), "apply", "-f", "-")
	uids, kubeconfigs, contents := map[string]string{}, map[string]string{}, map[string]string{}
	for _, name := range names {
		uids[name] = string(h.awaitTenant(name).UID)
		kubeconfigs[name] = h.kubeconfig(name)
		contents[name] = "only in " + name
		put(t, client(t, kubeconfigs[name]), "keepsake", contents[name])
	}
	if got := strings.Count(h.mustTenantctl("list"), string(v1alpha1.TenantReady)); got != tenants {
		t.Errorf("tenantctl list has %d tenants that are Ready, want %d:\n%s", got, tenants, h.mustTenantctl("list"))
	}

	h.stop()
	h.start()
	h.awaitReady()
	// What a status says is true now, not what it was before.
	for _, name := range names {
		if readiness(h.mustTenant(name)).Status != metav1.ConditionTrue {
			continue
		}
		if err := holds(client(t, kubeconfigs[name]), nil); err != nil {
			t.Errorf("%s is said to be ready after the restart, but: %v", name, err)
			break
		}
	}
	for _, name := range names {
		c := client(t, kubeconfigs[name])
		eventually(t, name+" is back with its data", func() error { return holds(c, map[string]string{"keepsake": contents[name]}) })
		if uid := string(h.awaitTenant(name).UID); uid != uids[name] {
			t.Errorf("%s has the UID %s after the restart, had %s", name, uid, uids[name])
		}
	}

	mustKubectl(t, h.adminKubeconfig(), list.String(), "delete", "--wait=false", "-f", "-")
	for _, name := range names {
		h.awaitGone(name, uids[name])
	}
	h.keepsNothingBut("system")
	h.noPanics()
}

// TestRemoveDuringStart removes tenants at several moments of their start, while
// another tenant is in use all the time.
func TestRemoveDuringStart(t *testing.T) {
	t.Parallel()
	h := startHost(t)
	neighbour := startTraffic(t, h.add("neighbour"))
	ctx := t.Context()

	for i, moment := range []struct {
		name    string
		reached func(*v1alpha1.Tenant) bool
	}{
		{"created", func(*v1alpha1.Tenant) bool { return true }},
		{"placed", func(t *v1alpha1.Tenant) bool { return len(t.Status.Placement) > 0 }},
		{"waiting for its API server", func(t *v1alpha1.Tenant) bool {
			return strings.Contains(strings.ToLower(readiness(t).Message), "waiting for api server")
		}},
		{"ready", func(t *v1alpha1.Tenant) bool { return readiness(t).Status == metav1.ConditionTrue }},
	} {
		t.Run(moment.name, func(t *testing.T) {
			h := h.of(t)
			for attempt := range 10 {
				name := fmt.Sprintf("brief-%d-%d", i, attempt)
				tenant := h.create(name)
				// What passes too quickly to be seen is tried again.
				seen := h.watchUntil(name, moment.reached)
				if err := h.plane().Delete(ctx, tenant); err != nil {
					t.Fatal(err)
				}
				h.awaitGone(name, string(tenant.UID))
				if seen {
					return
				}
			}
			t.Error("no tenant was seen in this state before it was ready")
		})
		neighbour.proceed()
	}

	t.Run("and added again", func(t *testing.T) {
		h := h.of(t)
		first := h.create("again")
		h.watchUntil("again", func(t *v1alpha1.Tenant) bool { return len(t.Status.Placement) > 0 })
		h.mustTenantctl("remove", "again", "--yes")
		kubeconfig := h.add("again")
		second := h.awaitTenant("again")
		if second.UID == first.UID {
			t.Errorf("the second tenant has the UID of the first, %s", first.UID)
		}
		if keys := h.keys("/tenants/" + string(first.UID) + "/"); len(keys) > 0 {
			t.Errorf("%d keys of the first tenant are left, first %s", len(keys), keys[0])
		}
		put(t, client(t, kubeconfig), "works", "yes")
		h.mustTenantctl("remove", "again", "--yes")
		h.awaitGone("again", string(second.UID))
	})
	neighbour.stop()
	// Nothing that had begun before a removal may write after it.
	h.keepsNothingBut("system", string(h.awaitTenant("neighbour").UID))
	h.noPanics()
}

// TestKillDuringWrites kills the host without notice while tenants are written to,
// added and removed, and compares what it has afterwards with what was
// acknowledged.
func TestKillDuringWrites(t *testing.T) {
	t.Parallel()
	h := startHost(t)
	clients := map[string]*kubernetes.Clientset{}
	journals := map[string]*journal{}
	for _, name := range []string{"ink", "pen"} {
		clients[name] = client(t, h.add(name))
		for _, hand := range []string{"left", "right"} {
			journals[name+"/"+hand] = &journal{known: map[string]string{}}
		}
	}

	for round := range 3 {
		tenants, uids := &journal{known: map[string]string{}}, map[string]string{}
		var killed atomic.Bool
		var writers sync.WaitGroup
		ended := func(who string, err error) {
			if !killed.Load() {
				t.Errorf("%s failed before the host was killed: %v", who, err)
			}
		}
		for id, j := range journals {
			tenant, hand, _ := strings.Cut(id, "/")
			writers.Go(func() {
				ended(id, j.writeConfigMaps(t.Context(), clients[tenant], fmt.Sprintf("%s-%d", hand, round)))
			})
		}
		plane := h.plane()
		writers.Go(func() {
			ended("the writer of tenants", tenants.writeTenants(t.Context(), plane, fmt.Sprintf("doomed-%d", round), uids))
		})
		moment := 500*time.Millisecond + rand.N(3*time.Second)
		time.Sleep(moment)
		killed.Store(true)
		h.signal(syscall.SIGKILL)
		h.wait()
		writers.Wait()
		t.Logf("round %d: killed after %s; writes acknowledged: %d", round, moment, tenants.count()+sum(journals))

		h.start()
		h.awaitReady()
		for id, j := range journals {
			tenant, hand, _ := strings.Cut(id, "/")
			h.awaitTenant(tenant)
			eventually(t, tenant+" answers", func() error { return holds(clients[tenant], nil) })
			j.compare(t, id, configMaps(t, clients[tenant], hand+"-"))
		}
		if j := journals["ink/left"]; len(j.known) == 0 {
			t.Errorf("round %d shows nothing: no write was acknowledged", round)
		}

		// Of a tenant, what was begun must be finished: the removal, or the start.
		eventually(t, "the tenants that were being removed are gone", func() error {
			left := &v1alpha1.TenantList{}
			if err := h.plane().List(t.Context(), left); err != nil {
				return err
			}
			for _, tenant := range left.Items {
				if tenant.DeletionTimestamp != nil {
					return fmt.Errorf("%s is still there: %+v", tenant.Name, tenant.Status)
				}
			}
			return nil
		})
		tenants.compare(t, "tenants", h.tenantsCalled("doomed-"))
		for name, uid := range uids {
			if tenants.known[name] == "" {
				h.awaitGone(name, uid)
			}
		}
		for name := range h.tenantsCalled("doomed-") {
			uid := string(h.awaitTenant(name).UID)
			h.mustTenantctl("remove", name, "--yes")
			h.awaitGone(name, uid)
		}
	}
}

// TestTermFinishesRequests sends SIGTERM while requests are under way.
func TestTermFinishesRequests(t *testing.T) {
	t.Parallel()
	h := startHost(t)
	tenant := h.add("acme")

	var uploads []*upload
	var watches []*watching
	for _, to := range []string{tenant, h.adminKubeconfig()} {
		for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
			c := httpClient(t, to, protocol)
			watches = append(watches, c.watch(t))
			uploads = append(uploads, c.upload(t, "slow-"+strings.ToLower(protocol[len("HTTP/"):])))
		}
	}
	h.signal(syscall.SIGTERM)
	h.awaitStopping()
	for _, u := range uploads {
		u.finish(t)
	}
	for _, w := range watches {
		w.endsCleanly(t)
	}
	if code := h.wait(); code != 0 {
		t.Errorf("after SIGTERM the host exited with %d, want 0", code)
	}

	h.start()
	h.awaitReady()
	h.awaitTenant("acme")
	for _, u := range uploads {
		eventually(t, u.what()+" is stored", func() error { return holds(client(t, u.kubeconfig), map[string]string{u.name: u.name}) })
	}

	// An upload that never ends holds the stop up, but not against a second signal.
	httpClient(t, tenant, "HTTP/2.0").upload(t, "endless")
	h.signal(syscall.SIGTERM)
	h.awaitStopping()
	h.signal(syscall.SIGTERM)
	if code := h.wait(); code != 1 {
		t.Errorf("after a second SIGTERM the host exited with %d, want 1", code)
	}
	if strings.Contains(h.log.String(), "storage is closed") {
		t.Error("the host waited for its orderly end in spite of a second SIGTERM")
	}
	h.start()
	h.awaitReady()
	h.awaitTenant("acme")
}

// TestFailedTenantIsAlone damages what two tenants need for their start.
func TestFailedTenantIsAlone(t *testing.T) {
	t.Parallel()
	h := startHost(t)
	kubeconfig := h.add("sound")
	sound := startTraffic(t, kubeconfig)
	etcd := h.etcd()
	damage := map[string]struct {
		file    string
		value   string // empty removes the file
		message []string
	}{
		"garbled": {"ca.key", "garbage", []string{"garbled", "ca.key", "restore it from a backup"}},
		"lacking": {"front-proxy-ca.crt", "", []string{"lacking", "front-proxy-ca.crt is missing", "restore"}},
	}
	keys, originals, kubeconfigs := map[string]string{}, map[string]string{}, map[string]string{}
	for name, d := range damage {
		kubeconfigs[name] = h.add(name)
		put(t, client(t, kubeconfigs[name]), "keepsake", name)
		key := "/tenants/" + string(h.awaitTenant(name).UID) + "/pki/files/" + d.file
		was, err := etcd.Get(t.Context(), key)
		if err != nil || was.Count != 1 {
			t.Fatalf("get %s: %v, %d keys", key, err, was.Count)
		}
		keys[name], originals[name] = key, string(was.Kvs[0].Value)
		if d.value == "" {
			_, err = etcd.Delete(t.Context(), key)
		} else {
			_, err = etcd.Put(t.Context(), key, d.value)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	sound.stop()
	h.stop()
	h.start()
	h.awaitReady()
	eventually(t, "the sound tenant is back", func() error { return holds(client(t, kubeconfig), nil) })
	sound = startTraffic(t, kubeconfig)

	for name, d := range damage {
		// It is tried again and again, and says so meanwhile: what it says counts while it has failed.
		var message string
		eventually(t, name+" has failed", func() error {
			tenant, err := h.tenant(name)
			if err != nil {
				return err
			}
			ready := readiness(tenant)
			if tenant.Status.Phase != v1alpha1.TenantFailed || ready.Status != metav1.ConditionFalse || ready.Reason != v1alpha1.ReasonIssueFailed {
				return fmt.Errorf("phase %s, %+v", tenant.Status.Phase, ready)
			}
			message = ready.Message
			return nil
		})
		for _, want := range d.message {
			if !strings.Contains(message, want) {
				t.Errorf("%s says why it failed without %q: %s", name, want, message)
			}
		}
		eventually(t, "tenantctl get "+name+" shows the reason", func() error {
			if r := h.tenantctl("get", name); r.code != 0 || !strings.Contains(r.stdout, d.file) {
				return fmt.Errorf("exit code %d:\n%s%s", r.code, r.stdout, r.stderr)
			}
			return nil
		})
		tried := h.metric("tenantd_tenant_restarts_total", name)
		eventually(t, name+" is tried again", func() error {
			if now := h.metric("tenantd_tenant_restarts_total", name); now <= tried {
				return fmt.Errorf("tried again %v times", now)
			}
			return nil
		})
	}
	if _, err := h.get("/readyz"); err != nil {
		t.Errorf("the host is not ready because of tenants that failed: %v", err)
	}
	for name, key := range keys {
		if _, err := etcd.Put(t.Context(), key, originals[name]); err != nil {
			t.Fatal(err)
		}
		h.awaitTenant(name)
		if err := holds(client(t, kubeconfigs[name]), map[string]string{"keepsake": name}); err != nil {
			t.Errorf("%s was repaired: %v", name, err)
		}
	}
	sound.stop()
}

// TestSpecChanges changes what can be changed of a tenant that runs.
func TestSpecChanges(t *testing.T) {
	t.Parallel()
	h := startHost(t)
	kubeconfig := h.add("acme")
	put(t, client(t, kubeconfig), "keepsake", "acme")

	t.Run("hostname", func(t *testing.T) {
		whole := h // what it writes is needed after this part
		h := h.of(t)
		old, changed := "acme."+domain, "renamed.example.com"
		h.patch("acme", `{"spec":{"hostname":"`+changed+`"}}`)
		eventually(t, "the new name answers", func() error { return h.handshake(changed) })
		h.awaitTenant("acme")
		if err := h.handshake(old); !isUnrecognizedName(err) {
			t.Errorf("the old name is answered with %v, want that it is unknown", err)
		}
		if got, want := h.mustTenant("acme").Status.Endpoint, changed+h.listen[strings.LastIndex(h.listen, ":"):]; got != want {
			t.Errorf("status.endpoint is %s, want %s", got, want)
		}
		kubeconfig = whole.kubeconfig("acme")
		if cfg := restConfig(t, kubeconfig); cfg.ServerName != changed {
			t.Errorf("the kubeconfig asks for %q, want %q", cfg.ServerName, changed)
		}
		if err := holds(client(t, kubeconfig), map[string]string{"keepsake": "acme"}); err != nil {
			t.Error(err)
		}
	})

	t.Run("connections", func(t *testing.T) {
		h := h.of(t)
		cfg := restConfig(t, kubeconfig)
		tlsConfig, err := rest.TLSConfigFor(cfg)
		if err != nil {
			t.Fatal(err)
		}
		connect := func() (*tls.Conn, error) { return tls.Dial("tcp", h.listen, tlsConfig) }
		refused := func() error {
			c, err := connect()
			if err == nil {
				c.Close()
				return errors.New("a connection beyond the limit is accepted")
			}
			if !strings.Contains(err.Error(), "internal error") {
				return fmt.Errorf("a connection beyond the limit is refused with %w, want the alert internal_error", err)
			}
			return nil
		}
		held := make([]*tls.Conn, 3)
		for i := range held {
			if held[i], err = connect(); err != nil {
				t.Fatal(err)
			}
			defer held[i].Close()
		}
		h.patch("acme", fmt.Sprintf(`{"spec":{"limits":{"connections":%d}}}`, len(held)))
		eventually(t, "the limit takes effect", refused)
		h.patch("acme", `{"spec":{"limits":{"connections":100}}}`)
		eventually(t, "the raised limit takes effect", func() error {
			c, err := connect()
			if err != nil {
				return err
			}
			return c.Close()
		})
		// They are of the control plane that has been there all the time.
		for _, c := range held {
			if _, err := io.WriteString(c, "GET /version HTTP/1.1\r\nHost: acme\r\n\r\n"); err != nil {
				t.Error(err)
			}
			answer := make([]byte, len("HTTP/1.1 200 OK"))
			if _, err := io.ReadFull(c, answer); err != nil || string(answer) != "HTTP/1.1 200 OK" {
				t.Errorf("a connection made before the limit changed gives %q, %v", answer, err)
			}
		}
	})
}

// TestStorageQuota fills a tenant's storage.
func TestStorageQuota(t *testing.T) {
	t.Parallel()
	h := startHost(t)
	file := filepath.Join(t.TempDir(), "tenant.yaml")
	writeFile(t, file, "apiVersion: tenantd.io/v1alpha1\nkind: Tenant\nmetadata: {name: small}\nspec: {limits: {storage: 1Mi}}\n")
	h.mustTenantctl("add", "-f", file, "--timeout", patience.String())
	kubeconfig := h.kubeconfig("small")
	c := client(t, kubeconfig)
	neighbour := startTraffic(t, h.add("neighbour"))
	mustKubectl(t, kubeconfig, "", "create", "namespace", "aside")

	condition := func(want metav1.ConditionStatus, reason string) {
		t.Helper()
		eventually(t, "StorageWithinQuota is "+string(want), func() error {
			tenant, err := h.tenant("small")
			if err != nil {
				return err
			}
			got := meta.FindStatusCondition(tenant.Status.Conditions, v1alpha1.ConditionStorageWithinQuota)
			if got == nil || got.Status != want || got.Reason != reason {
				return fmt.Errorf("it is %+v", got)
			}
			return nil
		})
	}
	var stored []string
	fill := func() {
		t.Helper()
		for {
			name := fmt.Sprintf("ballast-%d", len(stored))
			_, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), configMap(name, strings.Repeat("x", 40<<10)), metav1.CreateOptions{})
			if err == nil {
				stored = append(stored, name)
				continue
			}
			var status *apierrors.StatusError
			if !errors.As(err, &status) || status.ErrStatus.Code != http.StatusTooManyRequests || status.ErrStatus.Reason != "StorageQuotaExceeded" {
				t.Fatalf("a write beyond the quota fails with %v, want 429 StorageQuotaExceeded", err)
			}
			if causes := status.ErrStatus.Details.Causes; len(causes) != 1 || causes[0].Field != "spec.limits.storage" {
				t.Errorf("a write beyond the quota is refused for %+v", causes)
			}
			for _, want := range []string{"storage quota", "1.0 MiB", "spec.limits.storage"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("a write beyond the quota is refused without %q: %v", want, err)
				}
			}
			return
		}
	}
	fill()
	condition(metav1.ConditionFalse, v1alpha1.ReasonQuotaExceeded)
	if len(stored) < 5 {
		t.Errorf("only %d objects of 40 KiB fit into 1 MiB", len(stored))
	}
	if r := kubectl(t, kubeconfig, "", "create", "configmap", "one-more", "--from-literal=k="+strings.Repeat("x", 40<<10)); r.code != 1 || !strings.Contains(r.stderr, "spec.limits.storage") {
		t.Errorf("kubectl beyond the quota: exit code %d, %s", r.code, r.stderr)
	}

	// Reads and deletions go on, those that begin with an update included.
	if got := configMaps(t, c, "ballast-"); len(got) != len(stored) {
		t.Errorf("%d objects are there, want %d", len(got), len(stored))
	}
	mustKubectl(t, kubeconfig, "", "delete", "namespace", "aside")
	for range 3 {
		mustKubectl(t, kubeconfig, "", "delete", "configmap", stored[len(stored)-1])
		stored = stored[:len(stored)-1]
	}
	put(t, c, "room", "again")
	condition(metav1.ConditionTrue, v1alpha1.ReasonAsExpected)

	fill()
	h.patch("small", `{"spec":{"limits":{"storage":"2Mi"}}}`)
	eventually(t, "a raised quota lets writes through", func() error {
		_, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("relieved", strings.Repeat("x", 400<<10)), metav1.CreateOptions{})
		return err
	})
	condition(metav1.ConditionTrue, v1alpha1.ReasonAsExpected)
	neighbour.stop()
}

// of is the host for a subtest: what fails is the subtest.
func (h *host) of(t testing.TB) *host {
	sub := *h
	sub.t = t
	return &sub
}

// plane is a client of the system plane.
func (h *host) plane() ctrlclient.WithWatch {
	h.t.Helper()
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		h.t.Fatal(err)
	}
	// There is one kind, so discovery is not asked what there is.
	kinds := meta.NewDefaultRESTMapper(nil)
	kinds.Add(v1alpha1.GroupVersion.WithKind("Tenant"), meta.RESTScopeRoot)
	c, err := ctrlclient.NewWithWatch(restConfig(h.t, h.adminKubeconfig()), ctrlclient.Options{Scheme: scheme, Mapper: kinds})
	if err != nil {
		h.t.Fatal(err)
	}
	return c
}

func (h *host) tenant(name string) (*v1alpha1.Tenant, error) {
	tenant := &v1alpha1.Tenant{}
	return tenant, h.plane().Get(h.t.Context(), ctrlclient.ObjectKey{Name: name}, tenant)
}

// mustTenant is the tenant, which must exist.
func (h *host) mustTenant(name string) *v1alpha1.Tenant {
	h.t.Helper()
	tenant, err := h.tenant(name)
	if err != nil {
		h.t.Fatal(err)
	}
	return tenant
}

// create creates a tenant and does not wait for it.
func (h *host) create(name string) *v1alpha1.Tenant {
	h.t.Helper()
	tenant := &v1alpha1.Tenant{ObjectMeta: metav1.ObjectMeta{Name: name}}
	// The spec stays empty, for the defaults are the server's.
	if err := h.plane().Create(h.t.Context(), tenant); err != nil {
		h.t.Fatal(err)
	}
	return tenant
}

// patch changes a tenant.
func (h *host) patch(name, merge string) {
	h.t.Helper()
	mustKubectl(h.t, h.adminKubeconfig(), "", "patch", "tenant", name, "--type", "merge", "--patch", merge)
}

// awaitTenant waits until a tenant is ready as its spec has it now.
func (h *host) awaitTenant(name string) *v1alpha1.Tenant {
	h.t.Helper()
	var tenant *v1alpha1.Tenant
	eventually(h.t, name+" is ready", func() (err error) {
		if tenant, err = h.tenant(name); err != nil {
			return err
		}
		if ready := readiness(tenant); tenant.Status.Phase != v1alpha1.TenantReady || ready.Status != metav1.ConditionTrue || ready.ObservedGeneration != tenant.Generation {
			return fmt.Errorf("phase %s, generation %d, %+v", tenant.Status.Phase, tenant.Generation, ready)
		}
		return nil
	})
	return tenant
}

// awaitGone waits until a tenant is gone, and checks that nothing of it is left.
func (h *host) awaitGone(name, uid string) {
	h.t.Helper()
	eventually(h.t, name+" is gone", func() error {
		tenant, err := h.tenant(name)
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		case string(tenant.UID) != uid:
			return nil
		}
		return fmt.Errorf("phase %s", tenant.Status.Phase)
	})
	if keys := h.keys("/tenants/" + uid + "/"); len(keys) > 0 {
		h.t.Errorf("%s is gone, but %d of its keys are left, first %s", name, len(keys), keys[0])
	}
	if err := h.handshake(name + "." + domain); !isUnrecognizedName(err) {
		h.t.Errorf("%s is gone, but its name is answered with %v", name, err)
	}
	// Its last connection may take a moment to be closed.
	eventually(h.t, "the metrics of "+name+" are gone", func() error {
		metrics, err := h.get("/metrics")
		if err != nil {
			return err
		}
		for line := range strings.Lines(metrics) {
			if strings.Contains(line, `="`+name+`"`) || strings.Contains(line, uid) {
				return errors.New(line)
			}
		}
		return nil
	})
}

// watchUntil waits until a tenant has been in a state. It returns false when the
// tenant got ready without.
func (h *host) watchUntil(name string, reached func(*v1alpha1.Tenant) bool) bool {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), patience)
	defer cancel()
	events, err := h.plane().Watch(ctx, &v1alpha1.TenantList{}, ctrlclient.MatchingFields{"metadata.name": name})
	if err != nil {
		h.t.Fatal(err)
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		tenant, ok := event.Object.(*v1alpha1.Tenant)
		if !ok {
			h.t.Fatalf("watch %s: %v", name, event.Object)
		}
		if reached(tenant) {
			return true
		}
		if readiness(tenant).Status == metav1.ConditionTrue {
			return false
		}
	}
	h.t.Fatalf("watch %s: ended", name)
	return false
}

func readiness(t *v1alpha1.Tenant) metav1.Condition {
	if c := meta.FindStatusCondition(t.Status.Conditions, v1alpha1.ConditionReady); c != nil {
		return *c
	}
	return metav1.Condition{Status: metav1.ConditionUnknown}
}

// tenantsCalled are the tenants whose names begin like that.
func (h *host) tenantsCalled(prefix string) map[string]string {
	h.t.Helper()
	list := &v1alpha1.TenantList{}
	if err := h.plane().List(h.t.Context(), list); err != nil {
		h.t.Fatal(err)
	}
	found := map[string]string{}
	for _, tenant := range list.Items {
		if strings.HasPrefix(tenant.Name, prefix) {
			found[tenant.Name] = "there"
		}
	}
	return found
}

// etcd is a client of the store below the host's control planes.
func (h *host) etcd() *clientv3.Client {
	h.t.Helper()
	sockets, err := filepath.Glob(filepath.Join(h.dir, "run", "*.sock"))
	if err != nil || len(sockets) != 1 {
		h.t.Fatalf("sockets of the store: %q, %v", sockets, err)
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + sockets[0]}, Logger: zap.NewNop()})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { c.Close() })
	return c
}

// keys are the store's keys below a prefix.
func (h *host) keys(prefix string) []string {
	h.t.Helper()
	c := h.etcd()
	defer c.Close()
	resp, err := c.Get(h.t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		h.t.Fatal(err)
	}
	var keys []string
	for _, kv := range resp.Kvs {
		keys = append(keys, string(kv.Key))
	}
	return keys
}

// keepsNothingBut checks that the store has no keys but those of these UIDs.
func (h *host) keepsNothingBut(uids ...string) {
	h.t.Helper()
	left := slices.DeleteFunc(h.keys("/tenants/"), func(key string) bool {
		uid, _, _ := strings.Cut(strings.TrimPrefix(key, "/tenants/"), "/")
		return slices.Contains(uids, uid)
	})
	if len(left) > 0 {
		h.t.Errorf("%d keys are left of tenants that are gone, first %s", len(left), left[0])
	}
}

// metric is the value of a tenant's metric.
func (h *host) metric(name, tenant string) float64 {
	h.t.Helper()
	metrics, err := h.get("/metrics")
	if err != nil {
		h.t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^` + name + `\{tenant="` + tenant + `"\} (\S+)$`).FindStringSubmatch(metrics)
	if found == nil {
		h.t.Fatalf("no metric %s of %s in:\n%s", name, tenant, metrics)
	}
	value, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		h.t.Fatal(err)
	}
	return value
}

// handshake makes a TLS connection under a name.
func (h *host) handshake(name string) error {
	// Who answers is shown by requests; here it matters whether anyone does.
	c, err := tls.Dial("tcp", h.listen, &tls.Config{ServerName: name, InsecureSkipVerify: true})
	if err != nil {
		return err
	}
	return c.Close()
}

func isUnrecognizedName(err error) bool {
	return err != nil && strings.Contains(err.Error(), "remote error: tls: unrecognized name")
}

// noPanics checks that nothing the host runs has panicked, which it survives.
func (h *host) noPanics() {
	h.t.Helper()
	first, all := "", 0
	for line := range strings.Lines(h.log.String()) {
		if strings.Contains(line, "panic") {
			first, all = cmp.Or(first, line), all+1
		}
	}
	if all > 0 {
		h.t.Errorf("components panicked %d times, first: %s", all, strings.NewReplacer(`\n`, "\n", `\t`, "  ").Replace(first))
	}
}

// awaitStopping waits until the host has noticed a signal. It has requests to
// finish, so it may not end.
func (h *host) awaitStopping() {
	h.t.Helper()
	eventually(h.t, "the host is stopping", func() error {
		if h.cmd.Ended() {
			h.t.Error("the host ended with requests under way")
			return nil
		}
		if reason, err := h.get("/readyz"); err == nil || !strings.Contains(reason, "stopping") {
			return fmt.Errorf("it says %q, %v", reason, err)
		}
		return nil
	})
}

func configMap(name, value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"value": value}}
}

// put stores a value in a cluster.
func put(t testing.TB, c kubernetes.Interface, name, value string) {
	t.Helper()
	if _, err := c.CoreV1().ConfigMaps("default").Create(t.Context(), configMap(name, value), metav1.CreateOptions{}); err != nil {
		t.Fatalf("store %s: %v", name, err)
	}
}

// holds checks that a cluster's API server is ready and has these values.
func holds(c kubernetes.Interface, values map[string]string) error {
	if answer, err := c.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(context.Background()); err != nil {
		return fmt.Errorf("%w: %s", err, answer)
	}
	list, err := c.CoreV1().ConfigMaps("default").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	have := map[string]string{}
	for _, item := range list.Items {
		have[item.Name] = item.Data["value"]
	}
	for name, want := range values {
		if have[name] != want {
			return fmt.Errorf("configmap %s has %q, want %q", name, have[name], want)
		}
	}
	return nil
}

// configMaps are the values whose names begin like that.
func configMaps(t testing.TB, c kubernetes.Interface, prefix string) map[string]string {
	t.Helper()
	list, err := c.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, item := range list.Items {
		if strings.HasPrefix(item.Name, prefix) {
			found[item.Name] = item.Data["value"]
		}
	}
	return found
}

func writeFile(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// traffic uses a tenant without pause. None of its requests may fail.
type traffic struct {
	t      testing.TB
	rounds atomic.Int64
	cancel context.CancelFunc
	ended  chan error
}

func startTraffic(t testing.TB, kubeconfig string) *traffic {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	tr := &traffic{t: t, cancel: cancel, ended: make(chan error, 1)}
	c, cfg := client(t, kubeconfig), restConfig(t, kubeconfig)
	tlsConfig, err := rest.TLSConfigFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	// Besides client-go's one connection, a new one for each request.
	fresh := &http.Client{Transport: &http.Transport{TLSClientConfig: tlsConfig, DisableKeepAlives: true}}
	go func() {
		var err error
		for ctx.Err() == nil && err == nil {
			if err = tr.round(c, fresh, cfg.Host); err == nil {
				tr.rounds.Add(1)
			}
		}
		tr.ended <- err
	}()
	t.Cleanup(cancel)
	return tr
}

// round is not to be cut short: what it would then say is no error of the host.
func (tr *traffic) round(c kubernetes.Interface, fresh *http.Client, url string) error {
	ctx := context.Background()
	maps := c.CoreV1().ConfigMaps("default")
	name := fmt.Sprintf("traffic-%d", tr.rounds.Load())
	made, err := maps.Create(ctx, configMap(name, "1"), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	made.Data["value"] = "2"
	if _, err := maps.Update(ctx, made, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("update: %w", err)
	}
	if got, err := maps.Get(ctx, name, metav1.GetOptions{}); err != nil || got.Data["value"] != "2" {
		return fmt.Errorf("get: %v, %v", got, err)
	}
	if err := maps.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	resp, err := fresh.Get(url + "/readyz")
	if err != nil {
		return fmt.Errorf("new connection: %w", err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("new connection: %s: %s, %v", resp.Status, body, err)
	}
	return nil
}

// proceed waits until all kinds of requests have been answered once more.
func (tr *traffic) proceed() {
	tr.t.Helper()
	goal := tr.rounds.Load() + 2
	eventually(tr.t, "the other tenant has been used more", func() error {
		select {
		case err := <-tr.ended:
			tr.t.Fatalf("another tenant's user noticed: %v", err)
		default:
		}
		if n := tr.rounds.Load(); n < goal {
			return fmt.Errorf("%d rounds", n)
		}
		return nil
	})
}

// stop ends the traffic, all of which must have gone well.
func (tr *traffic) stop() {
	tr.t.Helper()
	tr.proceed()
	tr.cancel()
	if err := <-tr.ended; err != nil {
		tr.t.Errorf("another tenant's user noticed: %v", err)
	}
}

// journal is what one writer knows of what it has written. The value of what is
// not there is empty.
type journal struct {
	known map[string]string // acknowledged, deletions included
	// The write that is not acknowledged, which may have happened or not.
	name, from, to string
	writes         int
}

// step makes one write.
func (j *journal) step(name, to string, write func() error) error {
	j.name, j.from, j.to = name, j.known[name], to
	if err := write(); err != nil {
		return err
	}
	j.known[name] = to
	j.name = ""
	j.writes++
	return nil
}

func (j *journal) count() int { return j.writes }

func sum(journals map[string]*journal) (n int) {
	for j := range maps.Values(journals) {
		n += j.count()
	}
	return n
}

// compare checks what is there against what was acknowledged. The unacknowledged
// write becomes known by it.
func (j *journal) compare(t testing.TB, what string, have map[string]string) {
	t.Helper()
	if j.name != "" {
		switch got := have[j.name]; got {
		case j.from, j.to:
			j.known[j.name] = got
		default:
			t.Errorf("%s: %s has %.40q, want %.40q or %.40q", what, j.name, got, j.from, j.to)
		}
		j.name = ""
	}
	for name, want := range j.known {
		if got := have[name]; got != want {
			t.Errorf("%s: %s has %.40q, but %.40q was acknowledged", what, name, got, want)
		}
	}
	for name := range have {
		if j.known[name] == "" {
			t.Errorf("%s: %s is there, but nobody wrote it, or its deletion was acknowledged", what, name)
		}
	}
}

// writeConfigMaps creates, changes and deletes until the first error.
func (j *journal) writeConfigMaps(ctx context.Context, c kubernetes.Interface, prefix string) error {
	maps := c.CoreV1().ConfigMaps("default")
	name := func(i int) string { return fmt.Sprintf("%s-%d", prefix, i) }
	for i := 0; ; i++ {
		// Sizes from less than a page of the store's file to several.
		first, second := strings.Repeat("a", 1+i*997%20000), strings.Repeat("b", 1+i*1409%20000)
		if err := j.step(name(i), first, func() error {
			_, err := maps.Create(ctx, configMap(name(i), first), metav1.CreateOptions{})
			return err
		}); err != nil {
			return err
		}
		if err := j.step(name(i), second, func() error {
			_, err := maps.Update(ctx, configMap(name(i), second), metav1.UpdateOptions{})
			return err
		}); err != nil {
			return err
		}
		if i < 5 {
			continue
		}
		if err := j.step(name(i-5), "", func() error {
			return maps.Delete(ctx, name(i-5), metav1.DeleteOptions{})
		}); err != nil {
			return err
		}
	}
}

// writeTenants adds and removes tenants until the first error. Removed ones may
// take their time to go.
func (j *journal) writeTenants(ctx context.Context, plane ctrlclient.Client, prefix string, uids map[string]string) error {
	var last *v1alpha1.Tenant
	for i := 0; ; i++ {
		tenant := &v1alpha1.Tenant{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", prefix, i)}}
		if err := j.step(tenant.Name, "there", func() error { return plane.Create(ctx, tenant) }); err != nil {
			return err
		}
		uids[tenant.Name] = string(tenant.UID)
		time.Sleep(rand.N(time.Second))
		if last != nil {
			if err := j.step(last.Name, "", func() error { return plane.Delete(ctx, last) }); err != nil {
				return err
			}
		}
		last = tenant
	}
}

// httpUser is a user of one connection, below client-go.
type httpUser struct {
	kubeconfig, url, protocol string
	*http.Client
}

// httpClient connects with one protocol.
func httpClient(t testing.TB, kubeconfig, protocol string) *httpUser {
	t.Helper()
	cfg := restConfig(t, kubeconfig)
	tlsConfig, err := rest.TLSConfigFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{TLSClientConfig: tlsConfig, ExpectContinueTimeout: patience, Protocols: new(http.Protocols)}
	transport.Protocols.SetHTTP1(protocol == "HTTP/1.1")
	transport.Protocols.SetHTTP2(protocol == "HTTP/2.0")
	t.Cleanup(transport.CloseIdleConnections)
	return &httpUser{kubeconfig, cfg.Host, protocol, &http.Client{Transport: transport}}
}

// do sends a request under the test's context.
func (u *httpUser) do(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, u.url+path, body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Expect", "100-continue")
	}
	resp, err := u.Do(req)
	if err == nil && resp.Proto != u.protocol {
		return nil, fmt.Errorf("answered in %s, want %s", resp.Proto, u.protocol)
	}
	return resp, err
}

// upload is a request whose body is on its way.
type upload struct {
	*httpUser
	name   string
	body   *io.PipeWriter
	answer chan error
}

// upload begins to create an object and returns when the server reads its body.
func (u *httpUser) upload(t testing.TB, name string) *upload {
	t.Helper()
	read, write := io.Pipe()
	t.Cleanup(func() { write.CloseWithError(errors.New("the test is over")) })
	up := &upload{httpUser: u, name: name, body: write, answer: make(chan error, 1)}
	reading := make(chan struct{})
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got100Continue: func() { close(reading) }})
	go func() {
		resp, err := u.do(ctx, http.MethodPost, "/api/v1/namespaces/default/configmaps", read)
		if err == nil {
			defer resp.Body.Close()
			var text []byte
			if text, err = io.ReadAll(resp.Body); err == nil && resp.StatusCode != http.StatusCreated {
				err = fmt.Errorf("%s: %s", resp.Status, text)
			}
		}
		up.answer <- err
	}()
	select {
	case <-reading:
	case err := <-up.answer:
		t.Fatalf("%s: %v", up.what(), err)
	case <-time.After(patience):
		t.Fatalf("%s: the server does not read it", up.what())
	}
	if _, err := io.WriteString(write, `{"apiVersion":"v1","kind":"ConfigMap",`); err != nil {
		t.Fatal(err)
	}
	return up
}

func (u *upload) what() string { return fmt.Sprintf("%s to %s in %s", u.name, u.url, u.protocol) }

// finish sends the rest of the body, which must be answered as if nothing were.
func (u *upload) finish(t testing.TB) {
	t.Helper()
	for _, part := range []string{`"metadata":{"name":`, strconv.Quote(u.name) + "}", `,"data":{"value":`, strconv.Quote(u.name), "}}"} {
		if _, err := io.WriteString(u.body, part); err != nil {
			t.Errorf("%s: send: %v", u.what(), err)
			return
		}
		time.Sleep(50 * time.Millisecond) // so that each part is a write of its own
	}
	u.body.Close()
	select {
	case err := <-u.answer:
		if err != nil {
			t.Errorf("%s: %v", u.what(), err)
		}
	case <-time.After(patience):
		t.Errorf("%s: no answer", u.what())
	}
}

// watching is a watch that is open.
type watching struct {
	*httpUser
	ended chan error
}

// watch opens a watch and returns when events come.
func (u *httpUser) watch(t testing.TB) *watching {
	t.Helper()
	resp, err := u.do(t.Context(), http.MethodGet, "/api/v1/namespaces?watch=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("watch: %s", resp.Status)
	}
	if _, err := resp.Body.Read(make([]byte, 1)); err != nil {
		t.Fatalf("watch: %v", err)
	}
	w := &watching{u, make(chan error, 1)}
	go func() {
		_, err := io.Copy(io.Discard, resp.Body)
		w.ended <- err
	}()
	return w
}

// endsCleanly waits for the end, which must be one that the protocol knows.
func (w *watching) endsCleanly(t testing.TB) {
	t.Helper()
	select {
	case err := <-w.ended:
		if err != nil {
			t.Errorf("watch of %s in %s ended with %v, want a proper end", w.url, w.protocol, err)
		}
	case <-time.After(patience):
		t.Errorf("watch of %s in %s goes on", w.url, w.protocol)
	}
}

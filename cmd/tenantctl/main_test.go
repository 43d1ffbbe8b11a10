// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"go.uber.org/goleak"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// session is one run of tenantctl at a plane.
type session struct {
	t        *testing.T
	plane    *fakePlane
	ctx      context.Context
	in       string
	terminal bool

	code     int
	out, err string
}

func (s *session) run(args ...string) *session {
	s.t.Helper()
	var out, errs bytes.Buffer
	ctx := s.ctx
	if ctx == nil {
		ctx = s.t.Context()
	}
	if s.plane != nil {
		s.t.Setenv(kubeconfigVariable, s.plane.kubeconfigFile())
	}
	s.code = run(ctx, args, streams{in: strings.NewReader(s.in), out: &out, err: &errs, inIsTerminal: s.terminal, errIsTerminal: s.terminal})
	s.out, s.err = out.String(), errs.String()
	return s
}

// fails checks an exit code and an error of one line.
func (s *session) fails(code int, parts ...string) {
	s.t.Helper()
	if s.code != code {
		s.t.Errorf("exit code is %d, want %d; error is %q", s.code, code, s.err)
	}
	lines := strings.Split(strings.TrimSuffix(s.err, "\n"), "\n")
	last := lines[len(lines)-1]
	if !strings.Contains(last, "tenantctl: ") {
		s.t.Errorf("the last line on standard error is %q", last)
	}
	for _, part := range parts {
		if !strings.Contains(last, part) {
			s.t.Errorf("error is %q, want it to say %q", last, part)
		}
	}
}

func (s *session) succeeds(out string) {
	s.t.Helper()
	if s.code != 0 || s.out != out {
		s.t.Errorf("exit code %d, output\n%s\nwant\n%s\nstandard error\n%s", s.code, s.out, out, s.err)
	}
}

func condition(kind string, status metav1.ConditionStatus, message string) metav1.Condition {
	return metav1.Condition{Type: kind, Status: status, Reason: v1alpha1.ReasonStarting, Message: message}
}

// makeReady is what a host does to a tenant that is well.
func makeReady(t *v1alpha1.Tenant) {
	t.Spec.Hostname = t.Name + ".example.com"
	t.Spec.Replicas = 1
	t.Status.Phase = v1alpha1.TenantReady
	t.Status.Endpoint = t.Spec.Hostname + ":443"
	t.Status.Placement = []string{"host-a"}
	t.Status.Version = "v1.37.1"
	t.Status.Conditions = []metav1.Condition{condition(v1alpha1.ConditionReady, metav1.ConditionTrue, "")}
}

func starting(t *v1alpha1.Tenant) {
	t.Status.Phase = v1alpha1.TenantStarting
	t.Status.Conditions = []metav1.Condition{condition(v1alpha1.ConditionReady, metav1.ConditionFalse, "the API server is starting")}
}

func TestUsage(t *testing.T) {
	for _, test := range []struct {
		args  string
		parts []string
	}{
		{"lst", []string{`unknown command "lst"`, "list", `see "tenantctl --help"`}},
		{"list extra", []string{`see "tenantctl list --help"`}},
		{"list -o xml", []string{"table, wide, json, yaml, name"}},
		{"list --nonsense", []string{"unknown flag: --nonsense"}},
		{"get", []string{"accepts 1 arg(s)"}},
		{"add", []string{"-f", `see "tenantctl add --help"`}},
		{"add a b", []string{"accepts at most 1 arg(s)"}},
		{"add a --timeout 0", []string{"--wait=false"}},
		{"add a --timeout soon", []string{"invalid argument"}},
		{"add a --replicas many", []string{"invalid argument"}},
		{"add -f none.yaml", []string{"none.yaml"}},
		{"remove a", []string{"--yes"}},
		{"remove a --yes --timeout -1s", []string{"--timeout"}},
		{"kubeconfig a --output f --merge", []string{"output", "merge"}},
		{"kubeconfig a --force", []string{"--merge"}},
		{"kubeconfig a --ttl 1s", []string{"--ttl must be 1m"}},
		{"kubeconfig a --group g", []string{"spec.user: Required value"}},
		{"kubeconfig a --server ftp://x", []string{"spec.server: Invalid value"}},
		{"kubeconfig a --user u --group= --server ftp://x", []string{"spec.groups[0]: Required value", "; spec.server: "}},
		{"join-command a --ttl 1h1", []string{"invalid argument"}},
		{"join-command a --ttl 0", []string{"--ttl must be"}},
		{"worker bundle", []string{"accepts 1 arg"}},
		{"worker bundle a --carrier pigeon", []string{"carrier", "pigeon", "tls"}},
		{"worker bundle a --host nowhere", []string{"hosts", "nowhere"}},
		{"worker bundle a b", []string{"accepts 1 arg"}},
		{"worker bundel a", []string{"bundel"}},
		{"hosts extra", []string{"unknown command", `see "tenantctl hosts --help"`}},
		{"hosts -o xml", []string{"table, wide, json, yaml, name"}},
		{"host drian a", []string{"drian"}},
		{"host get", []string{"accepts 1 arg(s)"}},
		{"host token a", []string{"unknown command"}},
		{"host token --ttl 25h", []string{"--ttl must be 1m0s to 24h0m0s"}},
		{"host token --ttl 0", []string{"--ttl must be"}},
		{"host drain", []string{"accepts 1 arg(s)"}},
		{"host drain a --timeout 0", []string{"--wait=false"}},
		{"host remove a", []string{"--yes"}},
		{"host remove a --yes --timeout 0", []string{"--wait=false"}},
		{"move a", []string{"to", "anywhere"}},
		{"move a --to b --anywhere", []string{"to", "anywhere"}},
		{"move a --to=", []string{"--to must name a host", "tenantctl hosts"}},
		{"move a --to b --timeout 0", []string{"--wait=false"}},
		{"version -o yaml", []string{"json"}},
	} {
		t.Run(test.args, func(t *testing.T) {
			s := &session{t: t}
			s.run(strings.Fields(test.args)...).fails(exitUsage, test.parts...)
			if s.out != "" {
				t.Errorf("output is %q", s.out)
			}
		})
	}
}

func TestHelpOfEveryCommand(t *testing.T) {
	c := &cli{}
	var check func(cmds []*cobra.Command)
	check = func(cmds []*cobra.Command) {
		for _, cmd := range cmds {
			if cmd.Long == "" || cmd.Example == "" || cmd.Short == "" {
				t.Errorf("%s has no long help or no example", cmd.CommandPath())
			}
			if cmd.ValidArgsFunction == nil {
				t.Errorf("%s does not say how its arguments complete", cmd.CommandPath())
			}
			check(cmd.Commands())
		}
	}
	check(c.command().Commands())
	s := &session{t: t}
	if s.run(); s.code != 0 || !strings.Contains(s.out, "Exit codes:") {
		t.Errorf("without a command: exit code %d, output %q", s.code, s.out)
	}
}

func TestConnecting(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	dir := t.TempDir()
	unreachable := filepath.Join(dir, "unreachable")
	writeKubeconfig(t, unreachable, "http://"+closed.Addr().String())
	broken := filepath.Join(dir, "broken")
	if err := os.WriteFile(broken, []byte("clusters: 5"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, parts := range map[string][]string{
		filepath.Join(dir, "none"): {"there is no kubeconfig", "none", "start tenantd"},
		broken:                     {"does not work", "broken", "admin.kubeconfig"},
		unreachable:                {"cannot reach the system plane at http://" + closed.Addr().String(), "connection refused", "systemctl status tenantd"},
	} {
		(&session{t: t}).run("list", "--kubeconfig", path).fails(exitFailed, parts...)
		t.Setenv(kubeconfigVariable, path)
		(&session{t: t}).run("list").fails(exitFailed, parts...)
	}
	// The flag wins over the environment.
	(&session{t: t, plane: startPlane(t)}).run("list", "--kubeconfig", filepath.Join(dir, "none")).fails(exitFailed, "there is no kubeconfig")
}

func TestErrorsOfTheServer(t *testing.T) {
	for _, test := range []struct {
		name  string
		err   *apierrors.StatusError
		args  string
		code  int
		parts []string
	}{
		{"unauthorized", apierrors.NewUnauthorized("no"), "list", exitFailed, []string{"does not know these credentials"}},
		{"forbidden", apierrors.NewForbidden(tenantResource, "", nil), "list", exitFailed, []string{"forbidden", "role"}},
		{"internal", apierrors.NewInternalError(os.ErrDeadlineExceeded), "list", exitFailed, []string{"Internal error"}},
		{"invalid", apierrors.NewInvalid(schema.GroupKind{Group: "tenantd.io", Kind: "Tenant"}, "system", field.ErrorList{
			field.Invalid(nil, field.OmitValueType{}, "metadata.name: 'system' is reserved\nfor us"),
			field.Invalid(field.NewPath("spec", "network", "podCIDR"), "x", "must be a network"),
		}), "add system", exitUsage, []string{`tenant "system" is not valid: metadata.name`, "; spec.network.podCIDR: ", "must be a network"}},
		{"not found", apierrors.NewNotFound(tenantResource, "acme"), "get acme", exitNotFound, []string{`tenant "acme" does not exist`, "tenantctl list"}},
		{"host not found", apierrors.NewNotFound(schema.GroupResource{Group: "tenantd.io", Resource: "hosts"}, "host-a"), "host get host-a", exitNotFound, []string{`host "host-a" does not exist`, "tenantctl hosts"}},
		{"exists", apierrors.NewAlreadyExists(tenantResource, "acme"), "add acme", exitFailed, []string{`"acme" exists already`, "tenantctl get acme"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := startPlane(t)
			p.refuse = func(*http.Request) *apierrors.StatusError { return test.err }
			(&session{t: t, plane: p}).run(strings.Fields(test.args)...).fails(test.code, test.parts...)
		})
	}
}

// A web server that is no system plane has no tenants that do not exist.
func TestAnotherServer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	p := startPlane(t)
	writeKubeconfig(t, path, p.url+"/elsewhere")
	for _, args := range []string{"list", "get acme", "add acme", "kubeconfig acme", "remove acme --yes", "hosts", "host token", "host drain a", "move acme --to a"} {
		(&session{t: t}).run(append(strings.Fields(args), "--kubeconfig", path)...).fails(exitFailed, "is it tenantd's system plane")
	}
}

func TestNotFound(t *testing.T) {
	p := startPlane(t)
	for _, args := range []string{"get acme", "kubeconfig acme", "join-command acme", "worker bundle acme --tenant-proxy x", "remove acme --yes", "move acme --to a"} {
		(&session{t: t, plane: p}).run(strings.Fields(args)...).fails(exitNotFound, `tenant "acme" does not exist`)
	}
	for _, args := range []string{"host get a", "host drain a", "host resume a", "host remove a --yes", "host remove a --yes --force"} {
		(&session{t: t, plane: p}).run(strings.Fields(args)...).fails(exitNotFound, `host "a" does not exist`, "tenantctl hosts")
	}
}

func TestListAndGet(t *testing.T) {
	p := startPlane(t)
	(&session{t: t, plane: p}).run("list").succeeds("")
	p.set("beta", func(t *v1alpha1.Tenant) {})
	p.set("acme", func(t *v1alpha1.Tenant) {
		makeReady(t)
		nodes, storage, memory := int32(3), resource.MustParse("2Mi"), resource.MustParse("80Mi")
		t.Status.Placement = []string{"host-a", "host-b"}
		t.Status.Nodes, t.Status.Storage, t.Status.Memory = &nodes, &storage, &memory
		t.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "someone"}}
	})
	for _, test := range []struct{ args, want string }{
		{"list", `NAME   HOSTNAME           PHASE     HOST            VERSION   AGE
acme   acme.example.com   Ready     host-a,host-b   v1.37.1   -
beta   -                  Pending   -               -         -
`},
		{"list -o wide", `NAME   HOSTNAME           PHASE     HOST            VERSION   AGE   REPLICAS   NODES   STORAGE   MEMORY
acme   acme.example.com   Ready     host-a,host-b   v1.37.1   -     1          3       2Mi       80Mi
beta   -                  Pending   -               -         -     0          -       -         -
`},
		{"list -o name", "tenant.tenantd.io/acme\ntenant.tenantd.io/beta\n"},
		{"get acme -o name", "tenant.tenantd.io/acme\n"},
		{"get beta", "NAME   HOSTNAME   PHASE     HOST   VERSION   AGE\nbeta   -          Pending   -      -         -\n"},
		{"get acme", `NAME   HOSTNAME           PHASE   HOST            VERSION   AGE
acme   acme.example.com   Ready   host-a,host-b   v1.37.1   -

CONDITION   STATUS   SINCE   REASON     MESSAGE
Ready       True     -       Starting   -
`},
		{"get beta -o yaml", `apiVersion: tenantd.io/v1alpha1
kind: Tenant
metadata:
  generation: 1
  name: beta
  uid: uid-of-beta
`},
	} {
		t.Run(test.args, func(t *testing.T) {
			(&session{t: t, plane: p}).run(strings.Fields(test.args)...).succeeds(test.want)
		})
	}
	s := &session{t: t, plane: p}
	if s.run("list", "-o", "json"); !strings.Contains(s.out, `"kind": "TenantList"`) || !strings.Contains(s.out, `"kind": "Tenant"`) || strings.Contains(s.out, "managedFields") {
		t.Errorf("JSON is\n%s", s.out)
	}
}

func TestAdd(t *testing.T) {
	p := startPlane(t)
	p.onCreate = func(t *v1alpha1.Tenant) {
		go func() {
			p.set(t.Name, starting)
			p.set(t.Name, makeReady)
		}()
	}
	s := &session{t: t, plane: p}
	s.run("add", "acme", "--hostname", "acme.example.com", "--konnectivity-hostname", "t.example.com", "--pod-cidr", "10.1.0.0/16",
		"--service-cidr", "10.2.0.0/16", "--cert-san", "a.example.com", "--cert-san", "192.0.2.1", "--replicas", "3").
		succeeds("tenant acme is ready at https://acme.example.com:443\n")
	spec := p.tenants.objects["acme"].Spec
	if spec.KonnectivityHostname != "t.example.com" || spec.Network.PodCIDR != "10.1.0.0/16" || spec.Network.ServiceCIDR != "10.2.0.0/16" ||
		strings.Join(spec.CertSANs, " ") != "a.example.com 192.0.2.1" {
		t.Errorf("spec is %+v", spec)
	}
	if !strings.Contains(s.err, "acme: Ready\n") || strings.Contains(s.err, "\x1b") {
		t.Errorf("progress off a terminal is %q", s.err)
	}
	s.run("add", "acme").fails(exitFailed, "exists already")

	// What was not given is left to the server.
	(&session{t: t, plane: p}).run("add", "plain", "--wait=false").succeeds("tenant plain added\n")
	if _, ok := p.created["spec"]; ok {
		t.Errorf("sent %v", p.created)
	}
}

func TestAddOnTerminal(t *testing.T) {
	p := startPlane(t)
	p.onCreate = func(t *v1alpha1.Tenant) {
		p.set(t.Name, starting)
		go p.set(t.Name, makeReady)
	}
	s := (&session{t: t, plane: p, terminal: true}).run("add", "acme")
	s.succeeds("tenant acme is ready at https://acme.example.com:443\n")
	if !strings.HasPrefix(s.err, "\r\x1b[Kacme: ") || !strings.HasSuffix(s.err, "\r\x1b[K") || strings.Contains(s.err, "\n") {
		t.Errorf("progress on a terminal is %q", s.err)
	}
}

func TestAddFromFile(t *testing.T) {
	const file = `apiVersion: tenantd.io/v1alpha1
kind: Tenant
metadata: {name: acme, resourceVersion: "7", uid: x, finalizers: [tenantd.io/wipe]}
spec:
  replicas: 0
  hostname: file.example.com
  network: {podCIDR: 10.7.0.0/16, serviceCIDR: null}
  addons:
status: {phase: Ready}
`
	path := filepath.Join(t.TempDir(), "tenant.yaml")
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	p := startPlane(t)
	(&session{t: t, plane: p}).run("add", "-f", path, "--hostname", "flag.example.com", "--service-cidr", "10.8.0.0/16", "--wait=false").succeeds("tenant acme added\n")
	metadata, spec := p.created["metadata"].(map[string]any), p.created["spec"].(map[string]any)
	network := spec["network"].(map[string]any)
	if spec["hostname"] != "flag.example.com" || network["podCIDR"] != "10.7.0.0/16" || network["serviceCIDR"] != "10.8.0.0/16" {
		t.Errorf("sent %v", spec)
	}
	if spec["replicas"] != 0.0 {
		t.Errorf("a replicas of 0, which the server refuses, was sent as %v", spec["replicas"])
	}
	if len(metadata) != 1 || p.created["status"] != nil {
		t.Errorf("sent what belongs to another object: %v", p.created)
	}

	(&session{t: t, plane: p, in: strings.ReplaceAll(file, "acme", "beta")}).run("add", "beta", "-f", "-", "--wait=false").succeeds("tenant beta added\n")
	(&session{t: t, plane: p, in: file}).run("add", "other", "-f", "-").fails(exitUsage, `"acme"`, `"other"`)
	(&session{t: t, plane: p, in: "apiVersion: tenantd.io/v1alpha1\nkind: Tenant\n"}).run("add", "-f", "-").fails(exitUsage, "metadata.name")
	(&session{t: t, plane: p, in: strings.Replace(file, "replicas", "replica", 1)}).run("add", "-f", "-").fails(exitUsage, "standard input:5: spec.replica: unknown field")
	(&session{t: t, plane: p, in: strings.Replace(file, "kind: Tenant", "kind: List", 1)}).run("add", "-f", "-").fails(exitUsage, "standard input:2: kind: ")
}

func TestAddThatFails(t *testing.T) {
	p := startPlane(t)
	p.onCreate = func(t *v1alpha1.Tenant) {
		p.set(t.Name, func(t *v1alpha1.Tenant) {
			t.Status.Phase = v1alpha1.TenantFailed
			t.Status.Conditions = []metav1.Condition{
				condition(v1alpha1.ConditionReady, metav1.ConditionFalse, ""),
				condition(v1alpha1.ConditionPlaced, metav1.ConditionFalse, "The hostname is taken by tenant beta."),
			}
		})
	}
	(&session{t: t, plane: p}).run("add", "acme").fails(exitFailed, "failed to start: The hostname is taken by tenant beta; see", "tenantctl remove acme")

	p.onCreate = func(t *v1alpha1.Tenant) { p.remove(t.Name) }
	(&session{t: t, plane: p}).run("add", "gone").fails(exitFailed, "was removed")
}

func TestAddThatTakesTooLong(t *testing.T) {
	p := startPlane(t)
	p.onCreate = func(t *v1alpha1.Tenant) { p.set(t.Name, starting) }
	(&session{t: t, plane: p}).run("add", "acme", "--timeout", "200ms").fails(exitTimedOut, "200ms", "the API server is starting", "tenantctl remove acme")
	if p.tenants.objects["acme"] == nil {
		t.Error("the tenant is gone")
	}
}

func TestAddInterrupted(t *testing.T) {
	p := startPlane(t)
	ctx, interrupt := context.WithCancel(t.Context())
	p.onCreate = func(t *v1alpha1.Tenant) {
		p.set(t.Name, starting)
	}
	p.refuse = func(r *http.Request) *apierrors.StatusError {
		if r.URL.Query().Get("watch") != "" {
			interrupt()
		}
		return nil
	}
	(&session{t: t, plane: p, ctx: ctx}).run("add", "acme").fails(exitFailed, "interrupted", `"acme" stays`, "tenantctl remove acme")
	if p.tenants.objects["acme"] == nil {
		t.Error("the tenant is gone")
	}
}

// A system plane that restarts while a tenant starts costs nothing but time.
func TestAddThroughARestart(t *testing.T) {
	p := startPlane(t)
	p.dropWatch = 1
	refused := 0
	p.refuse = func(r *http.Request) *apierrors.StatusError {
		if r.URL.Query().Get("watch") != "" && refused == 0 {
			refused++
			return apierrors.NewServiceUnavailable("starting")
		}
		return nil
	}
	p.onCreate = func(t *v1alpha1.Tenant) { p.set(t.Name, makeReady) }
	s := (&session{t: t, plane: p}).run("add", "acme")
	s.succeeds("tenant acme is ready at https://acme.example.com:443\n")
	if !strings.Contains(s.err, "the system plane does not answer; trying again\n") {
		t.Errorf("progress is %q", s.err)
	}
}

func TestRemove(t *testing.T) {
	p := startPlane(t)
	p.set("acme", makeReady)
	(&session{t: t, plane: p, terminal: true, in: "beta\n"}).run("remove", "acme").fails(exitFailed, "nothing was removed")
	(&session{t: t, plane: p, terminal: true, in: ""}).run("remove", "acme").fails(exitFailed, "nothing was removed")
	(&session{t: t, plane: p, in: "acme\n"}).run("remove", "acme").fails(exitUsage, "--yes")
	if p.tenants.objects["acme"] == nil {
		t.Fatal("the tenant is gone")
	}
	p.tenants.onDelete = func(t *v1alpha1.Tenant) {
		go func() {
			p.set(t.Name, func(t *v1alpha1.Tenant) { t.Status.Phase = v1alpha1.TenantDeleting })
			p.remove(t.Name)
		}()
	}
	(&session{t: t, plane: p, terminal: true, in: " acme \n"}).run("remove", "acme").succeeds("tenant acme removed\n")

	p.set("acme", makeReady)
	(&session{t: t, plane: p}).run("remove", "acme", "--yes").succeeds("tenant acme removed\n")

	p.set("acme", makeReady)
	p.tenants.onDelete = func(*v1alpha1.Tenant) {}
	(&session{t: t, plane: p}).run("remove", "acme", "--yes", "--wait=false").succeeds("tenant acme is being removed\n")
	(&session{t: t, plane: p}).run("remove", "acme", "--yes", "--timeout", "200ms").fails(exitTimedOut, "the removal goes on")

	// A successor of the same name is not what is waited for.
	p.tenants.onDelete = func(t *v1alpha1.Tenant) {
		p.set(t.Name, func(t *v1alpha1.Tenant) { t.UID = "another" })
	}
	(&session{t: t, plane: p}).run("remove", "acme", "--yes").succeeds("tenant acme removed\n")
}

func TestRemoveInterruptedAtThePrompt(t *testing.T) {
	p := startPlane(t)
	p.set("acme", makeReady)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	ctx, interrupt := context.WithCancel(t.Context())
	var out bytes.Buffer
	errs := writerFunc(func(b []byte) (int, error) {
		if bytes.Contains(b, []byte("Type its name")) {
			interrupt()
		}
		return out.Write(b)
	})
	t.Setenv(kubeconfigVariable, p.kubeconfigFile())
	code := run(ctx, []string{"remove", "acme"}, streams{in: r, out: &out, err: errs, inIsTerminal: true})
	if code != exitFailed || !strings.Contains(out.String(), "interrupted; nothing was removed") || p.tenants.objects["acme"] == nil {
		t.Errorf("exit code %d, output %q", code, out.String())
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestKubeconfig(t *testing.T) {
	p := startPlane(t)
	p.set("acme", makeReady)

	s := (&session{t: t, plane: p}).run("kubeconfig", "acme")
	if config, err := clientcmd.Load([]byte(s.out)); s.code != 0 || err != nil || config.CurrentContext != "kubernetes-admin@acme" {
		t.Errorf("exit code %d, error %v, output\n%s", s.code, err, s.out)
	}
	if got := p.kubeconfig.Spec; got.User != "kubernetes-admin" || got.TTLSeconds != 365*24*3600 {
		t.Errorf("asked for %+v", got)
	}
	(&session{t: t, plane: p}).run("kubeconfig", "acme", "--user", "jane", "--group", "a", "--group", "b", "--ttl", "90m", "--server", "https://192.0.2.1:8443")
	if got := p.kubeconfig.Spec; got.User != "jane" || strings.Join(got.Groups, " ") != "a b" || got.TTLSeconds != 90*60 || got.Server != "https://192.0.2.1:8443" {
		t.Errorf("asked for %+v", got)
	}
}

func TestKubeconfigOutput(t *testing.T) {
	p := startPlane(t)
	p.set("acme", makeReady)
	dir := t.TempDir()
	path, link := filepath.Join(dir, "acme.kubeconfig"), filepath.Join(dir, "link")
	if err := os.WriteFile(path, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{path, link, filepath.Join(dir, "new")} {
		(&session{t: t, plane: p}).run("kubeconfig", "acme", "--output", target).succeeds("")
		if info, err := os.Stat(target); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v, error %v", target, info.Mode(), err)
		}
		if !strings.Contains(readFile(t, target), "current-context: kubernetes-admin@acme") {
			t.Errorf("%s holds\n%s", target, readFile(t, target))
		}
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link was replaced: %v", err)
	}
	(&session{t: t, plane: p}).run("kubeconfig", "acme", "--output", dir).fails(exitUsage, "not a regular file")
	(&session{t: t, plane: p}).run("kubeconfig", "acme", "--output", filepath.Join(dir, "none", "x")).fails(exitFailed, "write the kubeconfig")
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 3 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestKubeconfigMerge(t *testing.T) {
	p := startPlane(t)
	p.set("acme", makeReady)
	path := filepath.Join(t.TempDir(), "dir", "config")
	t.Setenv("KUBECONFIG", path)
	load := func() *clientcmdapi.Config {
		t.Helper()
		config, err := clientcmd.LoadFromFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return config
	}

	// Into no file at all.
	s := (&session{t: t, plane: p}).run("kubeconfig", "acme", "--merge")
	s.succeeds("")
	if !strings.Contains(s.err, `context "kubernetes-admin@acme" is in `+path) {
		t.Errorf("said %q", s.err)
	}
	config := load()
	if config.CurrentContext != "kubernetes-admin@acme" || config.AuthInfos["kubernetes-admin@acme"] == nil || config.Clusters["acme"] == nil {
		t.Errorf("merged %+v", config)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, error %v", info.Mode(), err)
	}

	// Beside another cluster, again, and for another user.
	config.Clusters["other"] = &clientcmdapi.Cluster{Server: "https://other"}
	config.AuthInfos["kubernetes-admin"] = &clientcmdapi.AuthInfo{Token: "kept"}
	config.Contexts["kubernetes-admin@acme"].Namespace = "kept"
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	(&session{t: t, plane: p}).run("kubeconfig", "acme", "--merge", "--server", "https://192.0.2.1").succeeds("")
	(&session{t: t, plane: p}).run("kubeconfig", "acme", "--merge", "--user", "jane").succeeds("")
	config = load()
	if config.Clusters["other"] == nil || config.AuthInfos["kubernetes-admin"].Token != "kept" || config.Contexts["kubernetes-admin@acme"].Namespace != "kept" || config.CurrentContext != "jane@acme" {
		t.Errorf("merged %+v", config)
	}

	// Another cluster of the same name is left alone unless forced, and then named.
	p.set("acme", func(t *v1alpha1.Tenant) { t.UID = "another" })
	before := readFile(t, path)
	(&session{t: t, plane: p}).run("kubeconfig", "acme", "--merge").fails(exitFailed, path, `cluster "acme"`, `context "kubernetes-admin@acme"`, "--force")
	if after := readFile(t, path); after != before {
		t.Errorf("the file was changed to\n%s", after)
	}
	s = (&session{t: t, plane: p}).run("kubeconfig", "acme", "--merge", "--force")
	s.succeeds("")
	if !strings.Contains(s.err, "replaced in "+path+`: cluster "acme"`) {
		t.Errorf("said %q", s.err)
	}
	if got := string(load().Clusters["acme"].CertificateAuthorityData); got != "authority of another" {
		t.Errorf("the cluster's authority is %q", got)
	}

	if err := os.WriteFile(path+".lock", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	(&session{t: t, plane: p}).run("kubeconfig", "acme", "--merge", "--server", "https://192.0.2.2").fails(exitFailed, path+".lock")
	if err := os.WriteFile(path, []byte("clusters: 5"), 0o600); err != nil {
		t.Fatal(err)
	}
	(&session{t: t, plane: p}).run("kubeconfig", "acme", "--merge").fails(exitFailed, "--output")
}

func TestJoinCommand(t *testing.T) {
	p := startPlane(t)
	p.set("acme", makeReady)
	const line = "kubeadm join acme.example.com:443 --token abcdef.0123456789abcdef --discovery-token-ca-cert-hash sha256:00 --discovery-token-ca-cert-hash sha256:11\n"
	(&session{t: t, plane: p}).run("join-command", "acme").succeeds(line)
	if p.token.Spec.TTLSeconds != 24*3600 {
		t.Errorf("asked for %+v", p.token.Spec)
	}
	(&session{t: t, plane: p}).run("join-command", "acme", "--ttl", "10m").succeeds(line)
	if p.token.Spec.TTLSeconds != 600 {
		t.Errorf("asked for %+v", p.token.Spec)
	}
}

func TestWorkerBundle(t *testing.T) {
	p := startPlane(t)
	p.set("acme", makeReady)
	dir := t.TempDir()
	program, archive := filepath.Join(dir, "tenant-proxy"), filepath.Join(dir, "acme.tar.gz")
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, self, 0o700); err != nil {
		t.Fatal(err)
	}
	args := []string{"worker", "bundle", "acme", "--tenant-proxy", program, "--output", archive}
	(&session{t: t, plane: p}).run(args...).fails(exitFailed, "no hostname")

	const ca = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
	for _, test := range []struct {
		known []string
		args  []string
		want  string
	}{
		{[]string{"192.0.2.10:8443", "192.0.2.11:8443"}, nil, "hosts:\n  - 192.0.2.10:8443\n  - 192.0.2.11:8443\n"},
		{nil, nil, "hosts:\n  - acme.example.com:8443\n"},
		{[]string{"192.0.2.10:8443"}, []string{"--host", "lb.example.com:443", "--carrier", "proxy2"}, "hosts:\n  - lb.example.com:443\n"},
	} {
		p.worker = v1alpha1.WorkerConfigRequestStatus{Hostname: "acme.example.com", Port: 8443, Hosts: test.known, WorkerVIP: "172.20.0.9", CA: []byte(ca)}
		(&session{t: t, plane: p}).run(append(args, test.args...)...).succeeds("")
		files := unpack(t, archive)
		for _, want := range []string{test.want, "hostname: acme.example.com\n", "vip: 172.20.0.9\n"} {
			if !strings.Contains(files["tenant-proxy/config.yaml"], want) {
				t.Errorf("config.yaml lacks %q:\n%s", want, files["tenant-proxy/config.yaml"])
			}
		}
		if files["tenant-proxy/ca.crt"] != ca || files["tenant-proxy/tenant-proxy"] != string(self) || files["tenant-proxy/install.sh"] == "" {
			t.Error("the CA, the program or install.sh is not what it should be")
		}
	}
	(&session{t: t, plane: p}).run("worker", "bundle", "acme", "--tenant-proxy", "/dev/null").fails(exitFailed, "tenant-proxy")
	(&session{t: t, plane: p}).run("worker", "bundle", "acme").fails(exitFailed, "--tenant-proxy")
}

// unpack returns the files of a tar.gz.
func unpack(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for archive := tar.NewReader(zipped); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		files[header.Name] = string(content)
	}
}

func TestCompletion(t *testing.T) {
	p := startPlane(t)
	p.set("acme", makeReady)
	p.set("beta", makeReady)
	p.hosts.set("host-a", serving(1))
	p.hosts.set("host-b", func(*v1alpha1.Host) {})
	for _, test := range []struct{ line, want string }{
		{"get|", "acme\tacme.example.com\nbeta\tbeta.example.com\n:4\n"},
		{"kubeconfig|", "acme\tacme.example.com\nbeta\tbeta.example.com\n:4\n"},
		{"get|acme|", ":4\n"},
		{"add|", ":4\n"},
		{"move|", "--anywhere\tlet the host be chosen by load\n--to\thost to run the tenant; may be repeated\nacme\tacme.example.com\nbeta\tbeta.example.com\n:4\n"},
		{"move|acme|--to|", "host-a\tReady\nhost-b\tJoining\n:4\n"},
		{"host|drain|", "host-a\tReady\nhost-b\tJoining\n:4\n"},
		{"host|remove|host-a|", ":4\n"},
		{"list|-o|", "table\nwide\njson\nyaml\nname\n:4\n"},
	} {
		s := (&session{t: t, plane: p}).run(append([]string{"__complete"}, strings.Split(test.line, "|")...)...)
		if s.out != test.want {
			t.Errorf("%s completes to\n%s\nwant\n%s", test.line, s.out, test.want)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if s := (&session{t: t}).run("completion", shell); s.code != 0 || !strings.Contains(s.out, "tenantctl") {
			t.Errorf("%s: exit code %d", shell, s.code)
		}
	}
}

func TestVersion(t *testing.T) {
	if s := (&session{t: t}).run("version"); s.code != 0 || !strings.HasPrefix(s.out, "tenantctl ") {
		t.Errorf("exit code %d, output %q", s.code, s.out)
	}
	if s := (&session{t: t}).run("version", "-o", "json"); s.code != 0 || !strings.Contains(s.out, `"version": "`) {
		t.Errorf("exit code %d, output %q", s.code, s.out)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	authnv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// What is logged, and what is not.
func TestAuditPolicy(t *testing.T) {
	log := newAuditLog(AuditConfig{File: filepath.Join(t.TempDir(), "audit.log")}, "a", slog.New(slog.DiscardHandler))
	own := &user.DefaultInfo{Name: user.APIServerUser, Groups: []string{user.SystemPrivilegedGroup}}
	node := &user.DefaultInfo{Name: "system:node:n", Groups: []string{user.NodesGroup}}
	jane := &user.DefaultInfo{Name: "jane"}
	resource := func(u user.Info, verb, group, resource, subresource string) authorizer.Attributes {
		return authorizer.AttributesRecord{User: u, Verb: verb, APIGroup: group, Resource: resource, Subresource: subresource, ResourceRequest: true, Namespace: "kube-node-lease"}
	}
	path := func(u user.Info, verb, path string) authorizer.Attributes {
		return authorizer.AttributesRecord{User: u, Verb: verb, Path: path}
	}
	for name, c := range map[string]struct {
		attributes authorizer.Attributes
		logged     bool
	}{
		"a user's read":                {resource(jane, "get", "", "pods", ""), true},
		"a user's watch":               {resource(jane, "watch", "", "pods", ""), true},
		"a Secret":                     {resource(jane, "get", "", "secrets", ""), true},
		"a token":                      {resource(jane, "create", "", "serviceaccounts", "token"), true},
		"exec":                         {resource(jane, "create", "", "pods", "exec"), true},
		"a user's lease":               {resource(jane, "update", "coordination.k8s.io", "leases", ""), true},
		"deleting events":              {resource(jane, "deletecollection", "", "events", ""), true},
		"an event":                     {resource(jane, "create", "events.k8s.io", "events", ""), false},
		"a controller's read":          {resource(own, "list", "", "secrets", ""), false},
		"a controller's write":         {resource(own, "create", "apps", "replicasets", ""), true},
		"a controller's lease":         {resource(own, "update", "coordination.k8s.io", "leases", ""), false},
		"one who only calls itself so": {resource(&user.DefaultInfo{Name: user.APIServerUser, Groups: []string{user.AllAuthenticated}}, "list", "", "secrets", ""), true},
		"a node's lease":               {resource(node, "update", "coordination.k8s.io", "leases", ""), false},
		"a node's status":              {resource(node, "patch", "", "nodes", "status"), true},
		"health":                       {path(nil, "get", "/livez"), false},
		"discovery":                    {path(jane, "get", "/apis/apps/v1"), false},
		"something that is not there":  {path(jane, "get", "/debug/pprof"), true},
		"nobody":                       {path(nil, "get", "/"), true},
	} {
		want := auditinternal.LevelNone
		if c.logged {
			want = auditinternal.LevelMetadata
		}
		if got := log.evaluator().EvaluatePolicyRule(c.attributes).Level; got != want {
			t.Errorf("%s is logged at level %s, want %s", name, got, want)
		}
	}
}

func event(username string) *auditinternal.Event {
	return &auditinternal.Event{
		Level: auditinternal.LevelMetadata, AuditID: "1", Stage: auditinternal.StageResponseComplete, RequestURI: "/api/v1/pods", Verb: "list",
		User: authnv1.UserInfo{Username: username}, ResponseStatus: &metav1.Status{Code: 200},
	}
}

// The log's disk space is bounded, all of it is lines, and no one else may read it.
func TestAuditRotation(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit", "a")
	const size, backups = 4096, 3
	log := newAuditLog(AuditConfig{File: filepath.Join(dir, "audit.log"), MaxSize: size, MaxBackups: backups}, "a", slog.New(slog.DiscardHandler))
	var writers sync.WaitGroup
	for i := range 4 {
		writers.Go(func() {
			for range 100 {
				log.ProcessEvents(event(fmt.Sprint("user-", i)))
			}
		})
	}
	writers.Wait()
	log.Close()
	log.ProcessEvents(event("late"))
	if got := testutil.ToFloat64(log.lost.WithLabelValues("write")); got != 1 {
		t.Errorf("%v lines are said to be lost, want the late one", got)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != backups+1 {
		t.Fatalf("%d files, %v; want %d", len(entries), err, backups+1)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v, %v", info.Mode(), err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || info.Mode().Perm() != 0o600 || info.Size() > size {
			t.Errorf("%s: %v, %d bytes, %v", e.Name(), info.Mode(), info.Size(), err)
		}
		lines(t, filepath.Join(dir, e.Name()))
	}
}

// lines are the events of a file.
func lines(t *testing.T, file string) (events []map[string]any) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(content) {
		var e map[string]any
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%s: %v in %q", file, err, line)
		}
		events = append(events, e)
	}
	return events
}

// A log that cannot be written holds nothing up: it is said once, counted, and goes on
// when it can.
func TestAuditDiskFull(t *testing.T) {
	dir := t.TempDir()
	var said strings.Builder
	log := newAuditLog(AuditConfig{File: filepath.Join(dir, "a", "audit.log")}, "a", slog.New(slog.NewTextHandler(&said, nil)))
	// A file in the place of the directory fails for root as well.
	if err := os.WriteFile(filepath.Join(dir, "a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if !log.ProcessEvents(event("jane")) {
			t.Fatal("the request is refused")
		}
	}
	if got := testutil.ToFloat64(log.lost.WithLabelValues("write")); got != 10 {
		t.Errorf("%v lines are said to be lost, want 10", got)
	}
	if got := strings.Count(said.String(), "level=ERROR"); got != 1 {
		t.Errorf("said %d times:\n%s", got, said.String())
	}
	if err := os.Remove(filepath.Join(dir, "a")); err != nil {
		t.Fatal(err)
	}
	log.file.since = time.Time{} // the pause is over
	log.ProcessEvents(event("jane"))
	log.Close()
	if got := len(lines(t, filepath.Join(dir, "a", "audit.log"))); got != 1 {
		t.Errorf("then %d lines are written, want 1", got)
	}
	if !strings.Contains(said.String(), "written again") {
		t.Error("nothing was said of its recovery")
	}

	// What a crash left of a line does not spoil the next one.
	file := filepath.Join(dir, "torn.log")
	if err := os.WriteFile(file, []byte(`{"torn`), 0o600); err != nil {
		t.Fatal(err)
	}
	again := newAuditLog(AuditConfig{File: file}, "a", slog.New(slog.DiscardHandler))
	again.ProcessEvents(event("jane"))
	again.Close()
	content, err := os.ReadFile(file)
	if err != nil || !strings.HasPrefix(string(content), "{\"torn\n{") {
		t.Errorf("after a torn line there is %q, %v", content, err)
	}
}

// Strangers cannot push out what users did, and nobody decides how long a line is.
func TestAuditFlood(t *testing.T) {
	file := filepath.Join(t.TempDir(), "audit.log")
	log := newAuditLog(AuditConfig{File: file}, "a", slog.New(slog.DiscardHandler))
	for range 10_000 {
		log.ProcessEvents(event(user.Anonymous))
	}
	long := strings.Repeat("x", 1<<20)
	e := event(long)
	e.RequestURI, e.UserAgent = long, long
	e.User.Groups, e.User.Extra = []string{"short", long}, map[string]authnv1.ExtraValue{long: {long}}
	e.ImpersonatedUser = &authnv1.UserInfo{Username: long, UID: long, Groups: []string{long}, Extra: map[string]authnv1.ExtraValue{"k": {long}}}
	e.ObjectRef = &auditinternal.ObjectReference{Name: long, Namespace: long, Resource: long, APIGroup: long, APIVersion: long, Subresource: long}
	e.ResponseStatus = &metav1.Status{Message: long}
	e.Annotations = map[string]string{"authorization.k8s.io/decision": "allow", "policy": long}
	e.SourceIPs = strings.Split(strings.Repeat("192.0.2.1,", 1000)+"192.0.2.2", ",")
	log.ProcessEvents(e)
	log.Close()
	if len(e.RequestURI) != len(long) || len(e.SourceIPs) != 1001 || len(e.ObjectRef.Name) != len(long) {
		t.Error("the caller's event was changed")
	}
	all := lines(t, file)
	if n := len(all); n < strangersBurst || n > 10*strangersBurst {
		t.Errorf("10,000 requests of strangers gave %d lines", n)
	}
	last := all[len(all)-1]
	raw, err := json.Marshal(last)
	if err != nil || len(raw) > 40<<10 {
		t.Errorf("a line has %d bytes, %v", len(raw), err)
	}
	if ips := last["sourceIPs"].([]any); ips[len(ips)-1] != "192.0.2.2" {
		t.Error("the connection's own address is not in the line")
	}
	if got := testutil.ToFloat64(log.lost.WithLabelValues("strangers")); got < 9000 {
		t.Errorf("%v lines are said to be left out", got)
	}
	if _, err := os.Stat(file + ".1"); !os.IsNotExist(err) {
		t.Errorf("a second file was begun: %v", err)
	}
}

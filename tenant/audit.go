// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/audit/policy"
	"k8s.io/apiserver/pkg/authentication/user"
	auditjson "k8s.io/apiserver/plugin/pkg/audit/log"
)

const (
	// DefaultAuditSize and DefaultAuditBackups bound a control plane's audit log to
	// 160 MiB: months of a small cluster, a day of a busy one.
	DefaultAuditSize    = 32 << 20
	DefaultAuditBackups = 4
	// strangersPerSecond and strangersBurst bound the lines about requests that nobody
	// has authenticated: whoever can reach the port could otherwise push all else out.
	strangersPerSecond = 10
	strangersBurst     = 100
	// auditRetry is the pause after a failed write. A full disk is not asked again for
	// each request.
	auditRetry = time.Second
	// auditField bounds what a client decides the length of in a line, in bytes.
	auditField = 2 << 10
)

// AuditConfig says where a control plane's audit log is. The zero value means none.
type AuditConfig struct {
	// File is the log. What was written before is in File.1 (the youngest), File.2
	// and so on. Its directory is made if it is not there; both are for the owner's
	// eyes only. Empty means that nothing is logged.
	File string
	// MaxSize is the size in bytes at which a new file is begun. Zero means
	// DefaultAuditSize.
	MaxSize int64
	// MaxBackups is how many files are kept beside the one that is written. Zero means
	// DefaultAuditBackups.
	MaxBackups int
}

// auditPolicy is what is logged: who asked for what and what came of it, never what
// the objects contain. Left out is what a cluster does all by itself, which is nearly
// all there is, and what tells nothing.
func auditPolicy() *auditinternal.Policy {
	const none = auditinternal.LevelNone
	reads, writes := []string{"get", "list", "watch"}, []string{"create", "update", "patch"}
	return &auditinternal.Policy{
		OmitStages: []auditinternal.Stage{auditinternal.StageRequestReceived},
		Rules: []auditinternal.PolicyRule{
			// The control plane's own components. No client can be in this group under
			// this name: certificates of the group are not signed for a tenant, and
			// impersonation does not change whom audit sees.
			{Level: none, Users: []string{user.APIServerUser}, UserGroups: []string{user.SystemPrivilegedGroup}, Verbs: reads},
			{
				Level: none, Users: []string{user.APIServerUser}, UserGroups: []string{user.SystemPrivilegedGroup}, Verbs: writes,
				Resources: []auditinternal.GroupResources{{Group: "coordination.k8s.io", Resources: []string{"leases"}}},
			},
			// A kubelet's sign of life, every ten seconds.
			{
				Level: none, UserGroups: []string{user.NodesGroup}, Verbs: append(reads, writes...), Namespaces: []string{"kube-node-lease"},
				Resources: []auditinternal.GroupResources{{Group: "coordination.k8s.io", Resources: []string{"leases"}}},
			},
			{Level: none, Verbs: writes, Resources: []auditinternal.GroupResources{
				{Group: "", Resources: []string{"events"}}, {Group: "events.k8s.io", Resources: []string{"events"}},
			}},
			{Level: none, Verbs: []string{"get", "head"}, NonResourceURLs: []string{
				"/healthz", "/healthz/*", "/livez", "/livez/*", "/readyz", "/readyz/*", "/version", "/openapi/*", "/api", "/api/*", "/apis", "/apis/*",
			}},
			{Level: auditinternal.LevelMetadata},
		},
	}
}

// auditLog is the audit log of one control plane. A request's line is in the file
// before its answer is sent. A line that cannot be written is counted and given up:
// requests go on. It is safe for concurrent use.
type auditLog struct {
	audit.Backend // turns events into lines
	log           *slog.Logger
	strangers     *rate.Limiter
	lost          *prometheus.CounterVec
	file          *rotatingFile
}

// newAuditLog returns nil if cfg asks for none. Nothing is opened before the first line.
func newAuditLog(cfg AuditConfig, tenant string, log *slog.Logger) *auditLog {
	if cfg.File == "" {
		return nil
	}
	a := &auditLog{
		log:       log,
		strangers: rate.NewLimiter(strangersPerSecond, strangersBurst),
		lost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name:        "tenantd_tenant_audit_lost_total",
			Help:        "Lines that are not in the tenant's audit log, because they could not be written (write) or were too many of unauthenticated requests (strangers).",
			ConstLabels: prometheus.Labels{"tenant": tenant},
		}, []string{"reason"}),
		file: &rotatingFile{
			path: cfg.File, maxSize: cmp.Or(cfg.MaxSize, DefaultAuditSize), backups: cmp.Or(cfg.MaxBackups, DefaultAuditBackups),
		},
	}
	a.Backend = auditjson.NewBackend(a, auditjson.FormatJson, auditv1.SchemeGroupVersion)
	return a
}

// evaluator is the policy as an API server takes it.
func (a *auditLog) evaluator() audit.PolicyRuleEvaluator {
	return policy.NewPolicyRuleEvaluator(auditPolicy())
}

// ProcessEvents implements audit.Sink.
func (a *auditLog) ProcessEvents(events ...*auditinternal.Event) bool {
	for _, e := range events {
		if name := e.User.Username; (name == "" || name == user.Anonymous) && !a.strangers.Allow() {
			a.lost.WithLabelValues("strangers").Inc()
			continue
		}
		a.Backend.ProcessEvents(clipped(e))
	}
	return true
}

// Write takes one line from the encoder. It never fails: upstream would log the event
// itself, once for each request.
func (a *auditLog) Write(line []byte) (int, error) {
	changed, err := a.file.write(line, time.Now())
	if err != nil {
		a.lost.WithLabelValues("write").Inc()
	}
	switch {
	case changed && err != nil:
		a.log.Error("audit log cannot be written; requests go on without it: see to the disk", "error", err)
	case changed:
		a.log.Info("audit log is written again")
	}
	return len(line), nil
}

// Close closes the file. Lines that come later are lost.
func (a *auditLog) Close() {
	if a != nil {
		a.file.close()
	}
}

// clipped bounds what clients decide the length of: headers may have a megabyte.
func clipped(e *auditinternal.Event) *auditinternal.Event {
	c := *e // the event stays the caller's
	c.RequestURI = clip(c.RequestURI)
	c.UserAgent = clip(c.UserAgent)
	// A client adds addresses in front of its own; the last are ours to believe.
	if most := 16; len(c.SourceIPs) > most {
		c.SourceIPs = c.SourceIPs[len(c.SourceIPs)-most:]
	}
	clipUser := func(name *string, groups *[]string) {
		*name = clip(*name)
		size := 0
		for i, g := range *groups {
			if size += len(g); size > auditField {
				*groups = (*groups)[:i:i]
				break
			}
		}
	}
	clipUser(&c.User.Username, &c.User.Groups)
	if size(c.User.Extra) > auditField {
		c.User.Extra = nil
	}
	if e.ImpersonatedUser != nil {
		u := *e.ImpersonatedUser
		clipUser(&u.Username, &u.Groups)
		u.UID = clip(u.UID)
		if size(u.Extra) > auditField {
			u.Extra = nil
		}
		c.ImpersonatedUser = &u
	}
	// A tenant's admission policies write annotations too.
	if n := size(map[string][]string{"": slices.Collect(maps.Values(c.Annotations))}); n > 8*auditField {
		const decision = "authorization.k8s.io/decision"
		c.Annotations = map[string]string{decision: clip(e.Annotations[decision]), "tenantd.io/left-out": fmt.Sprintf("%d bytes of annotations", n)}
	}
	if e.ObjectRef != nil {
		r := *e.ObjectRef
		for _, s := range []*string{&r.Resource, &r.Namespace, &r.Name, &r.APIGroup, &r.APIVersion, &r.Subresource} {
			*s = clip(*s)
		}
		c.ObjectRef = &r
	}
	if e.ResponseStatus != nil && len(e.ResponseStatus.Message) > auditField {
		s := *e.ResponseStatus
		s.Message, s.Details = clip(s.Message), nil
		c.ResponseStatus = &s
	}
	return &c
}

func size[V ~[]string](extra map[string]V) int {
	n := 0
	for k, values := range extra {
		n += len(k)
		for _, v := range values {
			n += len(v)
		}
	}
	return n
}

func clip(s string) string {
	if len(s) <= auditField {
		return s
	}
	return s[:auditField] + "…"
}

// rotatingFile is a file of lines with a bounded number of older ones beside it. Its
// zero value but for the settings is ready.
//
// lumberjack, which upstream uses, leaves a goroutine behind for each of its files.
type rotatingFile struct {
	path    string
	maxSize int64
	backups int

	mu     sync.Mutex // guards what follows
	f      *os.File   // nil before the first line, after a failure, and when closed
	size   int64
	torn   bool // the last line is incomplete
	failed error
	since  time.Time // of the last failure
	closed bool
}

// write appends a line, and reports whether it succeeds or fails other than the one
// before.
func (r *rotatingFile) write(line []byte, now time.Time) (changed bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false, fs.ErrClosed
	}
	if r.failed != nil && now.Sub(r.since) < auditRetry {
		return false, r.failed
	}
	before := r.failed
	if r.failed = r.append(line); r.failed != nil {
		r.since = now
	}
	return (before == nil) != (r.failed == nil), r.failed
}

func (r *rotatingFile) append(line []byte) error {
	if r.f == nil {
		if err := r.open(); err != nil {
			return err
		}
	}
	if r.size > 0 && r.size+int64(len(line)) > r.maxSize {
		if err := r.rotate(); err != nil {
			return err
		}
	}
	if r.torn {
		line = append([]byte{'\n'}, line...)
	}
	n, err := r.f.Write(line)
	r.size += int64(n)
	if n > 0 {
		r.torn = line[n-1] != '\n'
	}
	return err
}

func (r *rotatingFile) open() error {
	if err := os.MkdirAll(filepath.Dir(r.path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	r.f, r.size, r.torn = f, info.Size(), false
	if r.size > 0 {
		last := make([]byte, 1)
		if _, err := f.ReadAt(last, r.size-1); err == nil {
			r.torn = last[0] != '\n'
		}
	}
	return nil
}

// rotate makes the file the first of the older ones, and the oldest go.
func (r *rotatingFile) rotate() error {
	err := r.f.Close()
	r.f = nil
	if err != nil {
		return err
	}
	name := func(i int) string {
		if i == 0 {
			return r.path
		}
		return r.path + "." + strconv.Itoa(i)
	}
	for i := r.backups; i > 0; i-- { // the first takes the place of the oldest
		if err := os.Rename(name(i-1), name(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("begin a new file: %w", err)
		}
	}
	return r.open()
}

func (r *rotatingFile) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.f != nil {
		r.f.Close() // every line was written already
		r.f = nil
	}
}

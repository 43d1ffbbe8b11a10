// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/time/rate"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	genericfeatures "k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage/etcd3/metrics"
	"k8s.io/apiserver/pkg/util/compatibility"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/rest"
	zpages "k8s.io/component-base/zpages/features"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/capabilities"
	"k8s.io/kubernetes/pkg/features"

	_ "github.com/tenantd/tenantd/tenant/queues" // without metrics that tick
)

// prepared guards the settings that upstream keeps per process.
var prepared struct {
	sync.Once
	err error
}

// PrepareProcess sets what upstream keeps in package variables and what, left
// alone, would let one control plane end the process or speak for another. It
// must run before the first Platform is made; later calls do nothing. log
// receives what upstream's components say for as long as the process runs: klog's
// logger cannot be replaced while anything logs.
func PrepareProcess(log *slog.Logger) error {
	prepared.Do(func() {
		if log == nil {
			log = slog.New(slog.DiscardHandler)
		}
		klog.SetLoggerWithOptions(UpstreamLogger(log), klog.ContextualLogger(true))
		prepared.err = prepare()
	})
	return prepared.err
}

// maxPatchCopies is how many bytes a JSON patch may copy, upstream's default. API
// servers are told 0, which has them leave the limit alone.
const maxPatchCopies = 3 << 20

func prepare() error {
	// Upstream ends the process when a component of a single control plane
	// cannot go on (klog.Fatal, FlushAndExit). Here the goroutine ends, and then the
	// control plane, which the host restarts. OsExit must not return: callers rely
	// on that.
	klog.OsExit = exit
	utilruntime.ReallyCrash = false
	// The default error handlers include a process-wide pause of a millisecond
	// per error, which a noisy tenant could use to slow all others down.
	utilruntime.ErrorHandlers = []utilruntime.ErrorHandler{
		func(ctx context.Context, err error, msg string, kv ...any) {
			klog.FromContext(ctx).Error(err, msg, kv...)
		},
	}
	if err := forgetProxies(); err != nil {
		return err
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	// Upstream has each API server set this while others read it: see maxPatchCopies.
	jsonpatch.AccumulatedCopySizeLimit = maxPatchCopies
	capabilities.Setup(true /* privileged pods are the tenant's nodes' affair */, 0)

	err := utilfeature.DefaultMutableFeatureGate.SetFromMap(map[string]bool{
		// The identity lease publishes the host's name to every tenant and costs
		// a write every ten seconds.
		string(genericfeatures.APIServerIdentity): false,
		// Forwards to API servers of other versions, which announce themselves by
		// identity leases. A tenant's API servers are always of one version.
		string(genericfeatures.UnknownVersionInteroperabilityProxy): false,
		// Pages about the process, which is not the tenant's.
		string(zpages.ComponentStatusz): false,
		string(zpages.ComponentFlagz):   false,
		// Compares each cache with etcd every five minutes: a safety net against
		// upstream bugs that costs each tenant a list of everything it has.
		string(genericfeatures.DetectCacheInconsistency): false,
		// The API server would speak SPDY with a tenant's kubelets itself, whose
		// headers may be a gigabyte after decompression. It passes the bytes of exec,
		// attach and port-forward through, WebSocket or SPDY; where a kubelet is too
		// old for a WebSocket, kubectl goes on with SPDY by itself.
		string(features.TranslateStreamCloseWebsocketRequests): false,
		string(features.PortForwardWebsockets):                 false,
	})
	if err != nil {
		return fmt.Errorf("set feature gates: %w", err)
	}
	if err := compatibility.DefaultComponentGlobalsRegistry.Set(); err != nil {
		return fmt.Errorf("apply feature gates: %w", err)
	}
	metrics.Register()
	return nil
}

// UpstreamLogger makes the logger that upstream's components are given: what they
// call information are debug lines here.
func UpstreamLogger(log *slog.Logger) logr.Logger {
	return logr.FromSlogHandler(upstreamHandler{log.Handler(), &repetition{}})
}

// upstreamHandler passes on what upstream logs. Its informational lines, some
// hundred per start of a control plane, become debug lines, and what repeats itself
// is passed on now and then.
type upstreamHandler struct {
	slog.Handler
	repeated *repetition
}

func (h upstreamHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.Handler.Enabled(ctx, demote(level))
}

func (h upstreamHandler) Handle(ctx context.Context, r slog.Record) error {
	level := demote(r.Level)
	if harmless[r.Message] {
		level = slog.LevelDebug
	}
	// Every watch that a stopping control plane ends is an error to upstream.
	r.Attrs(func(a slog.Attr) bool {
		err, ok := a.Value.Any().(error)
		if ok && (errors.Is(err, context.Canceled) || ended(err.Error())) {
			level = slog.LevelDebug
		}
		return true
	})
	if !h.Handler.Enabled(ctx, level) {
		return nil
	}
	pass, suppressed := true, 0
	if level > slog.LevelInfo { // whoever asks for more wants all of it
		pass, suppressed = h.repeated.pass(r.Time, r)
	}
	if !pass {
		return nil
	}
	c := slog.NewRecord(r.Time, level, r.Message, r.PC)
	r.Attrs(func(a slog.Attr) bool { c.AddAttrs(a); return true })
	if suppressed > 0 {
		c.AddAttrs(slog.Int("suppressed", suppressed))
	}
	return h.Handler.Handle(ctx, c)
}

func (h upstreamHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return upstreamHandler{h.Handler.WithAttrs(attrs), h.repeated}
}

func (h upstreamHandler) WithGroup(name string) slog.Handler {
	return upstreamHandler{h.Handler.WithGroup(name), h.repeated}
}

// repetition keeps a message that comes again and again from filling the log: a
// tenant whose webhook does not answer can bring about ten lines a second.
type repetition struct {
	mu   sync.Mutex
	said map[string]*said
}

type said struct {
	limit      *rate.Limiter
	suppressed int
}

const (
	// repeatBurst lines of a kind pass at once, and one each repeatEvery after that.
	repeatBurst = 10
	repeatEvery = 10 * time.Second
	// maxKinds bounds the memory of it; messages are of a kind if they begin alike.
	maxKinds  = 256
	kindBytes = 64
)

// pass says whether a line may pass, and how many of its kind have not since the
// last that did.
func (r *repetition) pass(now time.Time, line slog.Record) (bool, int) {
	kind := line.Message
	if kind == "Unhandled Error" { // the message is in the error
		line.Attrs(func(a slog.Attr) bool { kind += a.Value.String(); return len(kind) < kindBytes })
	}
	kind = kind[:min(len(kind), kindBytes)]
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.said[kind]
	if s == nil {
		if r.said == nil || len(r.said) >= maxKinds {
			r.said = map[string]*said{}
		}
		s = &said{limit: rate.NewLimiter(rate.Every(repeatEvery), repeatBurst)}
		r.said[kind] = s
	}
	if !s.limit.AllowN(now, 1) {
		s.suppressed++
		return false, 0
	}
	n := s.suppressed
	s.suppressed = 0
	return true, n
}

// ended says whether an error that upstream logs is that a client went away, or that
// the server was told to stop.
func ended(message string) bool {
	return strings.HasSuffix(message, "time to stop HTTP server") ||
		strings.HasPrefix(message, "FinishRequest: post-timeout activity") && strings.Contains(message, "panicked: false, err: context canceled")
}

// harmless are errors that upstream logs in every control plane of a process but
// the first, or where something optional is not configured.
var harmless = map[string]bool{
	"unable to register metrics":            true, // registered once per process
	"The manifest file is empty, ignoring.": true, // there is no manifest of admission policies
	// In a new cluster this comes before its namespace, and is repeated.
	"Error while syncing ConfigMap": true,
	// A policy source that was stopped; without a logger of the tenant's.
	"failed to sync with latest state: context canceled": true,
}

func demote(level slog.Level) slog.Level {
	if level == slog.LevelInfo {
		return slog.LevelDebug
	}
	return level
}

// sleep waits for d or until ctx is done, and reports whether it waited.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

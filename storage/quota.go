// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// DefaultObjects is what 256 MiB of typical objects come to, and ten times what a cluster of fifty nodes has.
	DefaultObjects = 50_000
	// MaxObjectBytes is about what etcd takes unless told otherwise, so what users of Kubernetes know. In bytes.
	MaxObjectBytes = 1536 << 10
	// DefaultCRDs is more than a cluster with several operators has; each costs memory for as long as it is there.
	DefaultCRDs = 250
	// DefaultCRDBytes holds 250 definitions of 64 KiB. Served, a schema takes many times its size. In bytes.
	DefaultCRDBytes = 16 << 20
)

// Limits bounds what one tenant stores. A field that is 0 means its default, a negative one that nothing may be added.
type Limits struct {
	// Bytes bounds keys and values of live data. Default is the Config's TenantQuota.
	Bytes int64
	// Objects bounds the number of keys below registry/. Default [DefaultObjects].
	Objects int64
	// ObjectBytes bounds one value below registry/. Default, and the most there is, is [MaxObjectBytes].
	ObjectBytes int64
	// CRDs bounds the number of CustomResourceDefinitions. Default [DefaultCRDs].
	CRDs int64
	// CRDBytes bounds their keys and values. Default [DefaultCRDBytes].
	CRDBytes int64
}

// resolve replaces zeros by the defaults, and negative limits by zero.
func (l Limits) resolve(defaultBytes int64) Limits {
	for _, f := range []struct {
		field    *int64
		fallback int64
	}{
		{&l.Bytes, defaultBytes},
		{&l.Objects, DefaultObjects},
		{&l.ObjectBytes, MaxObjectBytes},
		{&l.CRDs, DefaultCRDs},
		{&l.CRDBytes, DefaultCRDBytes},
	} {
		setDefault(f.field, f.fallback)
		*f.field = max(*f.field, 0)
	}
	l.ObjectBytes = min(l.ObjectBytes, MaxObjectBytes)
	return l
}

// ErrQuota is what every [QuotaError] is, for errors.Is.
var ErrQuota = errors.New("tenantd: storage quota exceeded")

// Cause says which limit refused a write. Those of one tenant alone are named by their field in the Tenant object.
type Cause string

const (
	// Of these, one object or several must go, or the limit must be raised.

	CauseStorage    Cause = "spec.limits.storage"
	CauseObjects    Cause = "spec.limits.objects"
	CauseObjectSize Cause = "spec.limits.objectSize"
	CauseCRDs       Cause = "spec.limits.customResourceDefinitions"
	CauseCRDStorage Cause = "spec.limits.customResourceDefinitionStorage"
	// CauseHistory is rewriting faster than history may be compacted: it passes by itself within seconds.
	CauseHistory Cause = "history"
	// CauseBackend is the space all tenants share.
	CauseBackend Cause = "backend"
)

// wordings are how refusals read. IsQuota tells a cause by its phrase.
var wordings = map[Cause]struct{ phrase, remedy string }{
	CauseStorage:    {"would use", "delete objects or raise spec.limits.storage"},
	CauseObjects:    {"would have too many objects", "delete some or raise spec.limits.objects"},
	CauseObjectSize: {"would have an object use", "make it smaller or raise spec.limits.objectSize, to " + humanBytes(MaxObjectBytes) + " at most"},
	CauseCRDs: {"would have too many CustomResourceDefinitions",
		"delete some or raise spec.limits.customResourceDefinitions"},
	CauseCRDStorage: {"would have its CustomResourceDefinitions use",
		"delete some or raise spec.limits.customResourceDefinitionStorage"},
	CauseHistory: {"rewrote", "this passes within seconds; write less often"},
	CauseBackend: {"shares a host whose storage uses",
		"delete objects, move tenants to another host or raise the host's storage limit"},
}

// QuotaError is the refusal of a write that would have made a tenant grow. It reaches clients as a gRPC status
// ResourceExhausted with this error's text; [IsQuota] reads it back.
type QuotaError struct {
	Tenant      string // uid
	Cause       Cause
	Used, Limit int64 // of what Cause names, with this write: a number of objects, else bytes
}

// Field is the field of the Tenant that holds the limit; empty for the space all tenants share. What a tenant may
// rewrite goes by its storage.
func (e QuotaError) Field() string {
	switch e.Cause {
	case CauseHistory:
		return string(CauseStorage)
	case CauseBackend:
		return ""
	}
	return string(e.Cause)
}

// Error names the tenant, the limit and the remedy. IsQuota depends on its form.
func (e QuotaError) Error() string {
	w := wordings[e.Cause]
	if e.Cause == CauseObjects || e.Cause == CauseCRDs {
		return fmt.Sprintf("%v: tenant %s %s (%d of %d); %s", ErrQuota, e.Tenant, w.phrase, e.Used, e.Limit, w.remedy)
	}
	return fmt.Sprintf("%v: tenant %s %s %s of %s (%d of %d bytes); %s",
		ErrQuota, e.Tenant, w.phrase, humanBytes(e.Used), humanBytes(e.Limit), e.Used, e.Limit, w.remedy)
}

// Is makes errors.Is(err, ErrQuota) hold.
func (e QuotaError) Is(target error) bool { return target == ErrQuota }

// GRPCStatus is what gRPC sends for e.
func (e QuotaError) GRPCStatus() *status.Status {
	return status.New(codes.ResourceExhausted, e.Error())
}

var quotaText = regexp.MustCompile(
	ErrQuota.Error() + `: tenant (\S+) ([A-Za-z ]+)(?: [0-9.]+ \S+ of [0-9.]+ \S+)? \((\d+) of (\d+)(?: bytes)?\)`)

// IsQuota recognises a refusal in an error that came back through an etcd client, however often it was wrapped or
// turned into text on the way.
func IsQuota(err error) (QuotaError, bool) {
	if err == nil {
		return QuotaError{}, false
	}
	var refusal QuotaError
	if errors.As(err, &refusal) {
		return refusal, true
	}
	found := quotaText.FindStringSubmatch(err.Error())
	if found == nil {
		return QuotaError{}, false
	}
	used, usedErr := strconv.ParseInt(found[3], 10, 64)
	limit, limitErr := strconv.ParseInt(found[4], 10, 64)
	if usedErr != nil || limitErr != nil {
		return QuotaError{}, false
	}
	for cause, w := range wordings {
		if w.phrase == found[2] {
			return QuotaError{Tenant: found[1], Cause: cause, Used: used, Limit: limit}, true
		}
	}
	return QuotaError{}, false
}

func humanBytes(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	value, prefixes := float64(n)/unit, "KMGTPE"
	i := 0
	for value >= unit && i < len(prefixes)-1 {
		value /= unit
		i++
	}
	return fmt.Sprintf("%.1f %ciB", value, prefixes[i])
}

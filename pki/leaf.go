// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/certmagic"
)

// Leaf is one certificate with its key, which its [Authority] keeps renewed. Its
// methods are safe for concurrent use and never block. After the Authority is
// closed they go on returning the last certificate.
type Leaf struct {
	authority *Authority

	work    chan struct{} // holds a token while one goroutine obtains or renews
	current atomic.Pointer[issued]

	mu       sync.Mutex // guards what follows
	watchers map[int]func()
	next     int
}

// issued is one certificate and the profile it was made for. It is immutable.
type issued struct {
	profile Profile
	tls     *tls.Certificate
	certPEM []byte
	keyPEM  []byte
}

// PEM returns the current certificate and private key. Read them only.
func (l *Leaf) PEM() (cert, key []byte) {
	i := l.current.Load()
	return i.certPEM, i.keyPEM
}

// TLS returns the current certificate. Read it only, and ask again for each
// handshake, as in tls.Config.GetCertificate.
func (l *Leaf) TLS() *tls.Certificate { return l.current.Load().tls }

// Expiry returns when the current certificate expires.
func (l *Leaf) Expiry() time.Time { return l.TLS().Leaf.NotAfter }

// OnChange has f called after each time the certificate was replaced. Calls come
// from the goroutine that replaced it, so f must be quick and must not ask for
// the same leaf again. A call may still be under way when cancel returns.
func (l *Leaf) OnChange(f func()) (cancel func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	id := l.next
	l.next++
	l.watchers[id] = f
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.watchers, id)
	}
}

// ensure makes the current certificate one that matches p and is not due. Until
// then, and if it fails, the one before stays.
func (l *Leaf) ensure(ctx context.Context, p Profile) error {
	select {
	case l.work <- struct{}{}:
		defer func() { <-l.work }()
	case <-ctx.Done():
		return ctx.Err()
	}
	a := l.authority
	old := l.current.Load()
	if old != nil && a.due(old, p) == "" {
		return nil
	}
	// Another host may have done the work already.
	now, reason, err := a.load(ctx, p)
	if err != nil {
		return err
	}
	if reason != "" {
		if err := a.issue(ctx, p); err != nil {
			return err
		}
		if now, reason, err = a.load(ctx, p); err != nil {
			return err
		}
		if reason != "" {
			return fmt.Errorf("the certificate was replaced at once by one that will not do (%s); "+
				"give each host's own profile its own name", reason)
		}
	}
	l.current.Store(now)
	a.log.LogAttrs(ctx, slog.LevelInfo, "certificate in use",
		slog.String("certificate", p.Name),
		slog.Time("expires", now.tls.Leaf.NotAfter),
		slog.Bool("replaced", old != nil))
	if old != nil {
		l.notify()
	}
	return nil
}

func (l *Leaf) notify() {
	l.mu.Lock()
	watchers := make([]func(), 0, len(l.watchers))
	for _, f := range l.watchers {
		watchers = append(watchers, f)
	}
	l.mu.Unlock()
	for _, f := range watchers {
		f()
	}
}

// errNotDue ends a certmagic operation that another host was quicker with.
var errNotDue = errors.New("already done")

// issue has certmagic make the leaf: take the lock, make key and certificate,
// store them. What makes a leaf due is asked again under the lock, of our clock
// and our profile, so of several hosts that want it one does the work.
func (a *Authority) issue(ctx context.Context, p Profile) error {
	magic := certmagic.New(a.cache, certmagic.Config{
		Issuers:             []certmagic.Issuer{a.issuer(p)},
		Storage:             &fence{Storage: a.storage},
		KeySource:           certmagic.StandardKeyGenerator{KeyType: certmagic.P256},
		OCSP:                certmagic.OCSPConfig{DisableStapling: true},
		DisableARI:          true,
		DisableStorageCheck: true, // no rate-limited CA behind us whose answer could be lost
		Logger:              a.zap,
		OnEvent: func(ctx context.Context, event string, _ map[string]any) error {
			if event != "cert_obtaining" {
				return nil
			}
			_, reason, err := a.load(ctx, p)
			if err == nil && reason == "" {
				err = errNotDue
			}
			return err
		},
	})
	err := magic.RenewCertSync(ctx, p.Name, true) // obtains if there is none
	if errors.Is(err, errNotDue) {
		return nil
	}
	return err
}

// load returns what is stored for the profile and why that will not do, if so.
func (a *Authority) load(ctx context.Context, p Profile) (_ *issued, reason string, err error) {
	folder := a.issuer(p).IssuerKey()
	values, err := a.storage.loadAll(ctx,
		certmagic.StorageKeys.SiteCert(folder, p.Name),
		certmagic.StorageKeys.SitePrivateKey(folder, p.Name))
	if err != nil {
		return nil, "", err
	}
	if values[0] == nil || values[1] == nil {
		return nil, "absent", nil
	}
	pair, err := tls.X509KeyPair(values[0], values[1])
	if err != nil {
		// certmagic stores the two one after the other, and a process can end between.
		return nil, "certificate and key do not belong together", nil
	}
	i := &issued{profile: p, tls: &pair, certPEM: values[0], keyPEM: values[1]}
	return i, a.due(i, p), nil
}

// due says why a leaf must be replaced, or nothing.
func (a *Authority) due(i *issued, p Profile) (reason string) {
	cert, authority, now := i.tls.Leaf, a.issuer(p).ca, a.now()
	switch {
	case cert.CheckSignatureFrom(authority.cert) != nil:
		return "signed by another authority"
	case !p.matches(cert):
		return "its profile changed"
	case now.Before(cert.NotBefore):
		return "made by a clock that was ahead"
	case !now.Before(cert.NotAfter):
		return "expired"
	case cert.NotAfter.Equal(authority.cert.NotAfter):
		return "" // a new one would last no longer
	case !now.Before(renewalTime(cert)):
		return "in its last third"
	}
	return ""
}

// renewalTime is when a third of the lifetime is left, less up to a twentieth
// taken from the serial number, so that tenants that were made together do not
// renew together for ever.
func renewalTime(cert *x509.Certificate) time.Time {
	lifetime := cert.NotAfter.Sub(cert.NotBefore)
	serial := cert.SerialNumber.Bytes()
	jitter := lifetime / 20 * time.Duration(serial[len(serial)-1]) / 256
	return cert.NotAfter.Add(-lifetime/3 + jitter)
}

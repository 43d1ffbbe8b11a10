// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
)

const (
	// DefaultCALifetime is what kubeadm gives its CAs: replacing one makes every
	// node of the cluster join again, so it is to outlive the cluster.
	DefaultCALifetime = 10 * 365 * 24 * time.Hour

	// DefaultLeafLifetime bounds the use of a stolen key, and with renewal in the
	// last third leaves a month to notice that renewal fails.
	DefaultLeafLifetime = 90 * 24 * time.Hour

	// DefaultRenewInterval is how often leaves are looked at. A look reads memory
	// only; often is for machines that were suspended, whose timers stood still.
	DefaultRenewInterval = 10 * time.Minute

	// MinClientTTL and MaxClientTTL bound what IssueClient gives out: shorter is
	// lost to clock skew, and longer cannot be taken back, for Kubernetes knows no
	// revocation.
	MinClientTTL = time.Minute
	MaxClientTTL = 365 * 24 * time.Hour

	// renewTimeout ends a renewal whose etcd does not answer, so that the next
	// check starts afresh. Longer than a lock is held by a dead process.
	renewTimeout = 4 * DefaultLockTTL

	// caWarning is how long before a CA's end each start of the tenant warns of it.
	caWarning = 365 * 24 * time.Hour
)

// The files of a tenant's authorities, by kubeadm's names. The last, which came to
// be after the others, holds the key that encrypts the tenant's Secrets.
var authorityFiles = []string{"ca.crt", "ca.key", "front-proxy-ca.crt", "front-proxy-ca.key", "sa.key", "secrets.key"}

// AuthorityConfig configures an [Authority]. Tenant and Storage are needed.
type AuthorityConfig struct {
	// Tenant names the CAs, log lines and metrics.
	Tenant string
	// Storage is where this tenant's PKI lives, and nothing else's.
	Storage *Storage

	CALifetime    time.Duration // of new CAs; 0: DefaultCALifetime
	LeafLifetime  time.Duration // of new leaves; 0: DefaultLeafLifetime
	RenewInterval time.Duration // between checks for renewal; 0: DefaultRenewInterval

	// Clock tells the time; nil: time.Now.
	Clock func() time.Time
	// Logger gets one line per change; nil: none.
	Logger *slog.Logger
	// Cache comes from NewCache and saves two timers and a goroutine per tenant when
	// the tenants of a process share it. The caller stops it after the last
	// Authority's Close. nil: the Authority has its own.
	Cache *certmagic.Cache
}

func (c *AuthorityConfig) setDefaults() {
	if c.CALifetime == 0 {
		c.CALifetime = DefaultCALifetime
	}
	if c.LeafLifetime == 0 {
		c.LeafLifetime = DefaultLeafLifetime
	}
	if c.RenewInterval == 0 {
		c.RenewInterval = DefaultRenewInterval
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate returns every fault of the configuration at once.
func (c AuthorityConfig) Validate() error {
	c.setDefaults()
	var faults []error
	if c.Tenant == "" {
		faults = append(faults, errors.New("tenant: name it"))
	}
	if c.Storage == nil {
		faults = append(faults, errors.New("storage: pass the tenant's, see NewStorage"))
	}
	if c.LeafLifetime < time.Minute || c.CALifetime < c.LeafLifetime {
		faults = append(faults, fmt.Errorf("lifetimes: a leaf has %s and a CA %s; a leaf needs a minute, and a CA no less than a leaf",
			c.LeafLifetime, c.CALifetime))
	}
	if c.RenewInterval < 0 || c.RenewInterval > c.LeafLifetime/6 {
		faults = append(faults, fmt.Errorf("renew interval: %s leaves no second attempt in the last third of a leaf's %s; use %s or less",
			c.RenewInterval, c.LeafLifetime, c.LeafLifetime/6))
	}
	return errors.Join(faults...)
}

// Authority is one tenant's PKI: two CAs, a service-account key, the key of its
// Secrets, and the leaves that were asked for, kept fresh by one goroutine. It is safe for concurrent use.
type Authority struct {
	// Constant after Open.
	config     AuthorityConfig
	storage    *Storage
	log        *slog.Logger
	zap        *zap.Logger
	now        func() time.Time
	cache      *certmagic.Cache
	ownsCache  bool
	cluster    *ca
	frontProxy *ca
	saKey      crypto.Signer
	secretsKey []byte
	stop       context.CancelFunc
	stopped    chan struct{}
	closing    sync.Once

	mu     sync.Mutex // guards leaves
	leaves map[string]*Leaf
}

// NewCache returns a cache for [AuthorityConfig].Cache; call its Stop in the end.
// certmagic wants one to exist, but nothing is ever put into it: see the package
// documentation for why.
func NewCache() *certmagic.Cache {
	return certmagic.NewCache(certmagic.CacheOptions{
		GetConfigForCert: func(certmagic.Certificate) (*certmagic.Config, error) {
			return nil, errors.New("no certificate is managed by the cache")
		},
		Logger: zap.NewNop(),
	})
}

// Open loads a tenant's PKI, or creates it if there is none: all of it in one
// transaction, so that hosts that open a new tenant at once agree. The Authority
// renews its leaves until Close; ctx bounds the opening only.
func Open(ctx context.Context, config AuthorityConfig) (_ *Authority, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("open PKI of tenant %q: %w", config.Tenant, err)
		}
	}()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config.setDefaults()
	a := &Authority{
		config:  config,
		storage: config.Storage,
		log:     config.Logger.With(slog.String("tenant", config.Tenant)),
		now:     config.Clock,
		cache:   config.Cache,
		stopped: make(chan struct{}),
		leaves:  make(map[string]*Leaf),
	}
	a.zap = zap.New(slogCore{log: a.log})
	files, err := a.storage.loadAll(ctx, authorityFiles...)
	if err != nil {
		return nil, err
	}
	absent := 0
	for _, f := range files {
		if f == nil {
			absent++
		}
	}
	switch last := len(files) - 1; {
	case absent == len(files):
		files, err = a.create(ctx)
	case absent == 1 && files[last] == nil: // the tenant is older than the encryption of Secrets
		files[last], err = a.createSecretsKey(ctx)
	}
	if err != nil {
		return nil, err
	}
	if err := a.parse(files); err != nil {
		return nil, err
	}
	for _, c := range []*ca{a.cluster, a.frontProxy} {
		if c.cert.NotAfter.Sub(a.now()) < caWarning {
			a.log.WarnContext(ctx, "certificate authority ends within a year; plan for a new cluster or a new CA",
				"authority", c.cert.Subject.CommonName, "expires", c.cert.NotAfter)
		}
	}
	if a.cache == nil {
		a.cache, a.ownsCache = NewCache(), true
	}
	// Detached on purpose: renewal goes on until Close, whatever Open's caller does.
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	a.stop = stop
	go a.run(run)
	return a, nil
}

// create makes new authorities and stores them unless another host was first.
func (a *Authority) create(ctx context.Context) ([][]byte, error) {
	now := a.now()
	cluster, err := newCA(a.config.Tenant+"-ca", now, a.config.CALifetime)
	if err != nil {
		return nil, fmt.Errorf("create cluster CA: %w", err)
	}
	frontProxy, err := newCA(a.config.Tenant+"-front-proxy-ca", now, a.config.CALifetime)
	if err != nil {
		return nil, fmt.Errorf("create front-proxy CA: %w", err)
	}
	// RSA, as kubeadm has it, though ECDSA would be made and would sign faster: this
	// key alone is verified by outsiders, and Microsoft Entra's workload identity
	// federation refuses ES256 (AzureAD/microsoft-identity-web#3467, siderolabs/talos#8111).
	saKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("create service-account key: %w", err)
	}
	saPEM, err := certmagic.PEMEncodePrivateKey(saKey)
	if err != nil {
		return nil, fmt.Errorf("create service-account key: %w", err)
	}
	mine := [][]byte{cluster.certPEM, cluster.keyPEM, frontProxy.certPEM, frontProxy.keyPEM, saPEM, newSecretsKey()}
	created, theirs, err := a.storage.createAll(ctx, authorityFiles, mine)
	if err != nil || !created {
		return theirs, err
	}
	a.log.InfoContext(ctx, "certificate authorities created", "expires", cluster.cert.NotAfter)
	return mine, nil
}

// createSecretsKey makes the key that encrypts Secrets unless another host was first.
func (a *Authority) createSecretsKey(ctx context.Context) ([]byte, error) {
	mine := newSecretsKey()
	created, theirs, err := a.storage.createAll(ctx, authorityFiles[len(authorityFiles)-1:], [][]byte{mine})
	if err != nil {
		return nil, err
	}
	if !created {
		return theirs[0], nil
	}
	a.log.InfoContext(ctx, "key for Secrets created; those stored so far are encrypted when they are next written")
	return mine, nil
}

func newSecretsKey() []byte {
	key := make([]byte, KeySize)
	rand.Read(key) // never fails: crypto/rand ends the process instead
	return key
}

func (a *Authority) parse(files [][]byte) (err error) {
	for i, file := range files {
		if file == nil {
			return fmt.Errorf("%s is missing while other files are there; restore the tenant's etcd data from a backup", authorityFiles[i])
		}
	}
	if a.cluster, err = parseCA(files[0], files[1]); err != nil {
		return fmt.Errorf("load cluster CA: %w", err)
	}
	if a.frontProxy, err = parseCA(files[2], files[3]); err != nil {
		return fmt.Errorf("load front-proxy CA: %w", err)
	}
	if a.saKey, err = certmagic.PEMDecodePrivateKey(files[4]); err != nil {
		return fmt.Errorf("load service-account key: %w", err)
	}
	if a.secretsKey = files[5]; len(a.secretsKey) != KeySize {
		return fmt.Errorf("load key for Secrets: it has %d bytes, need %d; restore the tenant's etcd data from a backup", len(a.secretsKey), KeySize)
	}
	return nil
}

// SecretsKey returns the key, of [KeySize] bytes, that encrypts the tenant's Secrets
// at rest. Read it only, and keep it in memory.
func (a *Authority) SecretsKey() []byte { return a.secretsKey }

// CA returns the cluster CA's certificate as PEM. Read it only.
func (a *Authority) CA() []byte { return a.cluster.certPEM }

// FrontProxyCA returns the front-proxy CA's certificate as PEM. Read it only.
func (a *Authority) FrontProxyCA() []byte { return a.frontProxy.certPEM }

// CAKeyPair returns the cluster CA's certificate and private key as PEM, for the
// controllers' signer of certificate requests. Read them only, and keep the key
// in memory.
func (a *Authority) CAKeyPair() (certPEM, keyPEM []byte) { return a.cluster.certPEM, a.cluster.keyPEM }

// ServiceAccountKey returns the key that signs service-account tokens: an
// *[rsa.PrivateKey], which Kubernetes' token generator takes as it is.
func (a *Authority) ServiceAccountKey() crypto.Signer { return a.saKey }

// Leaf returns the leaf of a profile, and keeps it renewed until Close. If there
// is none in the storage, or one that is due or not as the profile says, it is
// issued before Leaf returns. Asking for the same name again returns the same
// Leaf, at once unless the profile differs: then the certificate is replaced, and
// the one before stays in use until it is.
func (a *Authority) Leaf(ctx context.Context, p Profile) (*Leaf, error) {
	if err := p.validate(); err != nil {
		return nil, fmt.Errorf("certificate %q of tenant %q: %w", p.Name, a.config.Tenant, err)
	}
	p = p.normalized()
	a.mu.Lock()
	if a.leaves == nil {
		a.mu.Unlock()
		return nil, fmt.Errorf("certificate %q of tenant %q: the authority is closed", p.Name, a.config.Tenant)
	}
	l := a.leaves[p.Name]
	if l == nil {
		l = &Leaf{authority: a, work: make(chan struct{}, 1), watchers: make(map[int]func())}
		// It stays even if this fails, so that all who ask for it get the same one.
		a.leaves[p.Name] = l
	}
	a.mu.Unlock()
	if err := l.ensure(ctx, p); err != nil {
		return nil, fmt.Errorf("certificate %q of tenant %q: %w", p.Name, a.config.Tenant, err)
	}
	return l, nil
}

// IssueClient issues a client certificate of the cluster CA and its key, as PEM.
// Neither is stored, and nothing can take it back before it expires. The TTL is
// between [MinClientTTL] and [MaxClientTTL]; what outlasts the CA is cut short.
func (a *Authority) IssueClient(ctx context.Context, user string, groups []string, ttl time.Duration) (certPEM, keyPEM []byte, notAfter time.Time, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("issue client certificate of tenant %q for %q: %w", a.config.Tenant, user, err)
		}
	}()
	if err := ctx.Err(); err != nil {
		return nil, nil, time.Time{}, err
	}
	if user == "" {
		return nil, nil, time.Time{}, errors.New("name the user")
	}
	if ttl < MinClientTTL || ttl > MaxClientTTL {
		return nil, nil, time.Time{}, fmt.Errorf("TTL %s is out of bounds; use %s to %s", ttl, MinClientTTL, MaxClientTTL)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, time.Time{}, err
	}
	p := Profile{Usage: Client, CommonName: user, Organization: groups}.normalized()
	cert, err := a.cluster.sign(&key.PublicKey, p, a.now(), ttl)
	if err != nil {
		return nil, nil, time.Time{}, err
	}
	if keyPEM, err = certmagic.PEMEncodePrivateKey(key); err != nil {
		return nil, nil, time.Time{}, err
	}
	return encodeCert(cert.Raw), keyPEM, cert.NotAfter, nil
}

// SignRequest answers a certificate request, in PEM, with a certificate of the cluster
// CA as the profile says: of the request it takes the public key only. Nothing is
// stored, and nothing renews it. The TTL is bounded like that of [Authority.IssueClient].
func (a *Authority) SignRequest(ctx context.Context, csrPEM []byte, p Profile, ttl time.Duration) (certPEM []byte, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("sign certificate request %q of tenant %q: %w", p.Name, a.config.Tenant, err)
		}
	}()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := p.validate(); err != nil {
		return nil, err
	}
	if ttl < MinClientTTL || ttl > MaxClientTTL {
		return nil, fmt.Errorf("TTL %s is out of bounds; use %s to %s", ttl, MinClientTTL, MaxClientTTL)
	}
	block, _ := pem.Decode(csrPEM)
	if block == nil {
		return nil, errors.New("it is not PEM")
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	if err := request.CheckSignature(); err != nil {
		return nil, err
	}
	cert, err := a.cluster.sign(request.PublicKey, p.normalized(), a.now(), ttl)
	if err != nil {
		return nil, err
	}
	return encodeCert(cert.Raw), nil
}

// Renew renews the leaves that are due. The Authority does so by itself at every
// RenewInterval.
func (a *Authority) Renew(ctx context.Context) error {
	var errs []error
	for name, l := range a.snapshot() {
		ctx, cancel := context.WithTimeout(ctx, renewTimeout)
		if err := l.ensure(ctx, l.current.Load().profile); err != nil {
			errs = append(errs, fmt.Errorf("renew certificate %q, which expires at %s: %w", name, l.Expiry().Format(time.RFC3339), err))
		}
		cancel()
	}
	return errors.Join(errs...)
}

// Close stops the renewal. First it ends the goroutine, which may be renewing,
// and then the cache if it is the Authority's own. Leaves keep what they have.
func (a *Authority) Close() error {
	a.closing.Do(func() {
		a.mu.Lock()
		a.leaves = nil
		a.mu.Unlock()
		a.stop()
		<-a.stopped
		if a.ownsCache {
			a.cache.Stop()
		}
	})
	return nil
}

func (a *Authority) run(ctx context.Context) {
	defer close(a.stopped)
	tick := time.NewTicker(a.config.RenewInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := a.Renew(ctx); err != nil && ctx.Err() == nil {
				a.log.WarnContext(ctx, "certificates are due but not renewed; trying again at the next check", "error", err)
			}
		}
	}
}

// snapshot returns the leaves that have a certificate.
func (a *Authority) snapshot() map[string]*Leaf {
	a.mu.Lock()
	defer a.mu.Unlock()
	leaves := make(map[string]*Leaf, len(a.leaves))
	for name, l := range a.leaves {
		if l.current.Load() != nil {
			leaves[name] = l
		}
	}
	return leaves
}

func (a *Authority) issuer(p Profile) issuer {
	i := issuer{ca: a.cluster, profile: p, now: a.now, lifetime: a.config.LeafLifetime}
	if p.FrontProxy {
		i.ca = a.frontProxy
	}
	return i
}

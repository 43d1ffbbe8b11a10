// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tenantd/tenantd/worker/api"
	"github.com/tenantd/tenantd/worker/balance"
	"github.com/tenantd/tenantd/worker/carrier"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/hosts"
	"github.com/tenantd/tenantd/worker/kubelet"
	"github.com/tenantd/tenantd/worker/relay"
	"github.com/tenantd/tenantd/worker/vip"
)

const (
	// DefaultMaxConns is what all pods of a full node need many times over, and
	// about 300 MB if they had it.
	DefaultMaxConns = 8192

	// DefaultMaxConnsPerSource keeps a pod that leaks connections from taking the
	// API server away from its neighbours.
	DefaultMaxConnsPerSource = 2048
)

const (
	// dialTimeout bounds what a client waits for the hosts, all attempts together.
	dialTimeout = 10 * time.Second

	// ensureInterval is how long the address can be missing after somebody has
	// taken it from the machine.
	ensureInterval = time.Minute

	// giveBackInterval is how long memory is kept that a burst of connections needed
	// for its handshakes. Go would keep it for minutes, for the next burst.
	// Collecting a heap of this size this often is a thousandth of a core.
	giveBackInterval = 10 * time.Second

	// A pod can vanish together with its network.
	keepAliveInterval, keepAliveCount = 5 * time.Second, 3
)

// Config configures a Worker.
type Config struct {
	// File is the configuration file, with defaults. Required.
	File *config.Config
	// Inherited are the sockets of the process that this one takes over from. Those
	// that are nil, or for another address than the file's, are opened. New owns
	// them.
	Inherited Sockets
	// MaxConns and MaxConnsPerSource bound the connections open at the same time.
	// Zero means DefaultMaxConns and DefaultMaxConnsPerSource.
	MaxConns, MaxConnsPerSource int
	// Logger gets changes of state, and connections at debug level. Nil discards.
	Logger *slog.Logger
}

// Sockets are what a process hands to the next one: it accepts from them, and so
// will the next, so that no connection is refused and none in a queue is lost.
type Sockets struct{ Pods, Health *os.File }

// Close closes those that are not nil.
func (s Sockets) Close() {
	for _, f := range []*os.File{s.Pods, s.Health} {
		if f != nil {
			f.Close()
		}
	}
}

// Worker is a running tenant-proxy. Its methods are safe for concurrent use.
type Worker struct {
	// Constant after construction.
	cfg      Config
	file     *config.Config
	log      *slog.Logger
	endpoint netip.AddrPort
	guard    *vip.Guard
	buffers  *relay.Buffers
	pool     *balance.Pool
	list     *hosts.List
	client   *api.Client
	tunnel   *tunnel
	metrics  metrics
	ready    chan struct{}
	drain    chan struct{}
	draining sync.Once

	address atomic.Pointer[addressState]

	mu      sync.Mutex // guards what follows
	open    int
	entered int64 // ever
	sources map[netip.Addr]int
	pods    *net.TCPListener // nil until Ready
	health  *net.TCPListener
}

// addressState is what came of keeping the address.
type addressState struct {
	device string
	err    error
}

// New makes a Worker. It reads the CA and starts to probe the hosts; Run does the
// rest and has to be called once.
func New(cfg Config) (_ *Worker, err error) {
	defer func() {
		if err != nil {
			cfg.Inherited.Close()
		}
	}()
	if err := cfg.File.Validate(); err != nil {
		return nil, err
	}
	cfg.MaxConns = cmp.Or(cfg.MaxConns, DefaultMaxConns)
	cfg.MaxConnsPerSource = cmp.Or(cfg.MaxConnsPerSource, DefaultMaxConnsPerSource)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	roots, err := Roots(cfg.File)
	if err != nil {
		return nil, err
	}
	identity := kubelet.NewIdentity(cfg.File.KubeletKubeconfig)
	w := &Worker{
		cfg:      cfg,
		file:     cfg.File,
		log:      cfg.Logger,
		endpoint: cfg.File.Endpoint(),
		guard:    vip.NewGuard(cfg.File.Allowed()),
		buffers:  new(relay.Buffers),
		ready:    make(chan struct{}),
		drain:    make(chan struct{}),
		sources:  map[netip.Addr]int{},
	}
	carriers, err := Carriers(cfg.File, roots, identity, w.buffers)
	if err != nil {
		return nil, err
	}
	w.pool = balance.New(balance.Config{Hostname: w.file.Hostname, RootCAs: roots, Carriers: carriers, Logger: w.log})
	w.client = api.New(api.Config{
		Hostname:             w.file.Hostname,
		RootCAs:              roots,
		GetClientCertificate: identity.Present(roots),
		Dial:                 func(ctx context.Context) (net.Conn, error) { return w.pool.Dial(ctx, nil, nil) },
	})
	w.list = hosts.New(hosts.Config{
		Tenant:  w.file.Hostname,
		Seeds:   w.file.Hosts,
		Cache:   filepath.Join(w.file.CacheDir, hosts.CacheFile),
		Changed: w.pool.SetHosts,
		Logger:  w.log,
		Learn: func(ctx context.Context) (api.Hosts, error) {
			// Without a node's certificate the answer is known: forbidden.
			if _, err := identity.Certificate(); err != nil {
				return api.Hosts{}, fmt.Errorf("the node has not joined: %w", err)
			}
			w.client.Refresh()
			return w.client.Hosts(ctx)
		},
	})
	w.tunnel = &tunnel{file: w.file, roots: roots, identity: identity, client: w.client, list: w.list, log: w.log}
	w.address.Store(&addressState{})
	return w, nil
}

// Roots are the certificates that the tenant's servers have to chain to.
func Roots(file *config.Config) (*x509.CertPool, error) {
	pem, err := file.Authority()
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("the tenant's CA (%s) holds no certificate: copy ca.crt from a bundle again", cmp.Or(file.CAFile, "field ca"))
	}
	return roots, nil
}

// Carriers are the ways to the hosts that a file allows, the preferred one first.
func Carriers(file *config.Config, roots *x509.CertPool, identity *kubelet.Identity, buffers *relay.Buffers) ([]*carrier.Carrier, error) {
	kinds := []carrier.Kind{carrier.Kind(file.Carrier)}
	if file.Carrier == "auto" {
		// The cheaper one, where the network lets it through.
		kinds = []carrier.Kind{carrier.Proxy2, carrier.TLS}
	}
	var all []*carrier.Carrier
	for _, kind := range kinds {
		c, err := carrier.New(carrier.Config{Kind: kind, Hostname: file.Hostname, RootCAs: roots, GetClientCertificate: identity.Present(roots), Buffers: buffers})
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

// Ready is closed when connections are accepted. Hosts need not be there for it.
func (w *Worker) Ready() <-chan struct{} { return w.ready }

// Drain makes Run accept no more, let what is open go on for the file's
// DrainTimeout, and return. It is for a process whose successor accepts already.
func (w *Worker) Drain() { w.draining.Do(func() { close(w.drain) }) }

// Run serves until ctx is done, or until it has drained. It returns nil then, and
// an error when it cannot have the address or a port. What it does at the end:
// (1) stop accepting, (2) when draining, let connections finish, (3) close the
// rest, (4) stop the tunnel, the probes and the health endpoint.
func (w *Worker) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	var background, serving sync.WaitGroup
	defer func() {
		stop()
		w.pool.Close()
		w.client.Close()
		w.cfg.Inherited.Close() // if it did not come to opening them
		background.Wait()       // accept is in it, so nothing is served after
		serving.Wait()
	}()

	if err := w.ensure(); err != nil {
		return err
	}
	pods, err := open(w.cfg.Inherited.Pods, w.endpoint.String())
	if err != nil {
		return fmt.Errorf("open %s for pods: %w%s", w.endpoint, err, portRemedy(err, "change port in the configuration and the tenant's endpoint with it"))
	}
	defer pods.Close()
	health, err := open(w.cfg.Inherited.Health, w.file.HealthListen)
	if err != nil {
		return fmt.Errorf("open the health address %s: %w%s", w.file.HealthListen, err, portRemedy(err, "set another healthListen"))
	}
	w.mu.Lock()
	w.pods, w.health = pods, health
	w.mu.Unlock()

	background.Go(func() { w.serveHealth(ctx, health) })
	background.Go(func() { w.keepAddress(ctx) })
	background.Go(func() { w.giveBack(ctx) })
	background.Go(func() { w.list.Run(ctx) })
	background.Go(func() { w.tunnel.run(ctx) })
	background.Go(func() { w.notify(ctx) })

	accepted := make(chan error, 1)
	background.Go(func() { accepted <- w.accept(ctx, pods, &serving) })
	close(w.ready)
	w.log.Info("accepting connections", "address", w.endpoint, "health", w.file.HealthListen)

	select {
	case <-ctx.Done():
		w.log.Info("stopping", "connections", w.connections())
		return nil
	case err := <-accepted:
		return err
	case <-w.drain:
	}
	w.log.Info("draining: another process accepts", "connections", w.connections(), "timeout", w.file.DrainTimeout)
	// What is in the queue is the successor's.
	if err := pods.SetDeadline(time.Now()); err != nil {
		return fmt.Errorf("stop accepting: %w", err)
	}
	if err := <-accepted; err != nil {
		return err
	}
	pods.Close()
	done := make(chan struct{})
	background.Go(func() {
		serving.Wait()
		w.tunnel.idle(ctx)
		close(done)
	})
	select {
	case <-ctx.Done():
	case <-done:
	case <-time.After(w.file.DrainTimeout):
		w.log.Info("closing what is left", "connections", w.connections())
	}
	return nil
}

// Sockets duplicates the sockets for the next process. The caller closes them.
func (w *Worker) Sockets() (Sockets, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pods == nil || w.health == nil {
		return Sockets{}, errors.New("the sockets are not open yet")
	}
	pods, podsErr := duplicate(w.pods)
	health, healthErr := duplicate(w.health)
	s := Sockets{pods, health}
	if err := errors.Join(podsErr, healthErr); err != nil {
		s.Close()
		return Sockets{}, fmt.Errorf("duplicate the sockets: %w", err)
	}
	return s, nil
}

// duplicate differs from File in that it leaves the socket, which is one for both
// descriptors, in non-blocking mode whatever becomes of the duplicate.
func duplicate(ln *net.TCPListener) (*os.File, error) {
	raw, err := ln.SyscallConn()
	if err != nil {
		return nil, err
	}
	var fd int
	if ctrlErr := raw.Control(func(from uintptr) { fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0) }); ctrlErr != nil {
		return nil, ctrlErr
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), ln.Addr().String()), nil
}

// open opens a port, or takes the socket that has it.
func open(inherited *os.File, address string) (*net.TCPListener, error) {
	if inherited != nil {
		ln, err := net.FileListener(inherited)
		inherited.Close()
		if err == nil {
			if tcp, ok := ln.(*net.TCPListener); ok && ln.Addr().String() == address {
				return tcp, nil
			}
			ln.Close()
		}
	}
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	return ln.(*net.TCPListener), nil
}

func portRemedy(err error, other string) string {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return "; stop the program that has it (ss -ltnp shows which), or " + other
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "; the machine has lost this address: see tenant-proxy check"
	}
	return ""
}

// accept serves what arrives until ctx is done or the listener's deadline is over.
func (w *Worker) accept(ctx context.Context, ln *net.TCPListener, serving *sync.WaitGroup) error {
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	const most = time.Second
	pause := 5 * time.Millisecond
	for {
		conn, err := ln.AcceptTCP()
		timeout, ok := errors.AsType[net.Error](err)
		switch {
		case err == nil:
			pause = 5 * time.Millisecond
			serving.Add(1)
			go w.serve(ctx, conn, serving.Done)
		case ctx.Err() != nil, ok && timeout.Timeout():
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept on %s: %w", w.endpoint, err)
		default:
			// No descriptors, most likely: some will be free soon.
			w.log.Warn("cannot accept for now", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			pause = min(2*pause, most)
		}
	}
}

// serve relays one connection, which it owns, and calls done at its end.
func (w *Worker) serve(ctx context.Context, conn *net.TCPConn, done func()) {
	remote := conn.RemoteAddr().(*net.TCPAddr)
	source := remote.AddrPort().Addr().Unmap()
	if err := w.guard.Allow(remote); err != nil {
		w.metrics.refused.Add(1)
		w.log.Warn("connection refused", "client", remote, "error", err)
		conn.Close()
		done()
		return
	}
	if !w.enter(source) {
		w.metrics.exhausted.Add(1)
		w.log.Warn("connection refused: too many are open", "client", remote, "most", w.cfg.MaxConns, "mostPerSource", w.cfg.MaxConnsPerSource)
		conn.Close()
		done()
		return
	}
	ended := func() {
		conn.Close()
		w.leave(source)
		done()
	}
	client, host, err := w.connect(ctx, conn)
	if err != nil {
		// Clients that are kept waiting wait for their own timeouts, which are long.
		w.metrics.unreachable.Add(1)
		w.log.Debug("connection closed", "client", remote, "error", err)
		ended()
		return
	}
	w.metrics.relayed.Add(1)
	relay.Join(client, host, func(moved relay.Moved, err error) {
		w.metrics.up.Add(moved.Up)
		w.metrics.down.Add(moved.Down)
		w.log.Debug("connection ended", "client", remote, "up", moved.Up, "down", moved.Down, "error", err)
		ended()
	})
}

// connect makes the two ends of a connection.
func (w *Worker) connect(ctx context.Context, conn *net.TCPConn) (client, host relay.Conn, err error) {
	err = conn.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: carrier.KeepAlive, Interval: keepAliveInterval, Count: keepAliveCount})
	if err != nil {
		return nil, nil, err
	}
	if client, err = w.buffers.TCP(conn); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	host, err = w.pool.Dial(ctx, conn.RemoteAddr(), conn.LocalAddr())
	return client, host, err
}

// enter counts a connection, if it may be.
func (w *Worker) enter(source netip.Addr) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.open >= w.cfg.MaxConns || w.sources[source] >= w.cfg.MaxConnsPerSource {
		return false
	}
	w.open++
	w.entered++
	w.sources[source]++
	return true
}

func (w *Worker) leave(source netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open--
	if w.sources[source]--; w.sources[source] == 0 {
		delete(w.sources, source)
	}
}

func (w *Worker) connections() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.open
}

// ensure sees to it that the machine has the address.
func (w *Worker) ensure() error {
	device, err := vip.Ensure(w.endpoint.Addr())
	before := w.address.Swap(&addressState{device, err})
	switch {
	case err != nil:
		return fmt.Errorf("have the address %s: %w", w.endpoint.Addr(), err)
	case before.device != device:
		w.log.Info("the address is on this machine", "address", w.endpoint.Addr(), "device", device)
	}
	return nil
}

func (w *Worker) keepAddress(ctx context.Context) {
	tick := time.NewTicker(ensureInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := w.ensure(); err != nil {
			w.log.Error("pods cannot reach the API server", "error", err)
		}
	}
}

// giveBack returns memory to the machine after connections came.
func (w *Worker) giveBack(ctx context.Context) {
	tick := time.NewTicker(giveBackInterval)
	defer tick.Stop()
	var before int64
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		w.mu.Lock()
		now := w.entered
		w.mu.Unlock()
		if now != before {
			before = now
			runtime.GC() // a pool lets go of what it holds at the second
			debug.FreeOSMemory()
		}
	}
}

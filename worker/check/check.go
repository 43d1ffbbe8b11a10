// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package check

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tenantd/tenantd/worker/api"
	"github.com/tenantd/tenantd/worker/carrier"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/kubelet"
	"github.com/tenantd/tenantd/worker/relay"
	"github.com/tenantd/tenantd/worker/vip"
)

const (
	// attemptTimeout bounds one question to one host.
	attemptTimeout = 5 * time.Second

	// Certificates are made valid from five minutes ago, for clocks like this.
	skewWarning = 5 * time.Second
	skewFailure = 5 * time.Minute

	// expiresSoon is late for a kubelet to have renewed: it does so at about 80 % of
	// a certificate's time.
	expiresSoon = 24 * time.Hour
)

// State is how a finding is to be taken.
type State string

// The states.
const (
	OK      State = "ok"
	Warning State = "warning" // works, or not needed now
	Failed  State = "failed"  // pods cannot reach the API server, or the tunnel fails
)

// Finding is what was seen of one thing.
type Finding struct {
	About  string `json:"about"`
	State  State  `json:"state"`
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"`
}

// Config says what to look at.
type Config struct {
	// File is the configuration. Required, valid and with defaults.
	File *config.Config
	// Root is where the machine's files are. Empty means /.
	Root string
	// Clock is the machine's clock. Nil means time.Now.
	Clock func() time.Time
}

type machine struct {
	file     *config.Config
	root     string
	now      func() time.Time
	identity *kubelet.Identity
	roots    *x509.CertPool
}

// Machine looks at everything, in the order in which things depend on each other.
func Machine(ctx context.Context, cfg Config) []Finding {
	m := &machine{file: cfg.File, root: cmp.Or(cfg.Root, "/"), now: cfg.Clock, identity: kubelet.NewIdentity(cfg.File.KubeletKubeconfig)}
	if m.now == nil {
		m.now = time.Now
	}
	authority := m.authority()
	all := []Finding{authority, m.certificate(), m.address(), m.module(), m.port(ctx), m.reversePath(), m.unit()}
	if m.roots == nil {
		return all
	}
	return append(all, m.hosts(ctx)...)
}

// authority is about the tenant's CA.
func (m *machine) authority() Finding {
	f := Finding{About: "CA"}
	data, err := m.file.Authority()
	if err != nil {
		return f.failed(err.Error(), "copy ca.crt from a bundle")
	}
	roots := x509.NewCertPool()
	soonest := time.Time{}
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return f.failed(fmt.Sprintf("it cannot be read: %v", err), "copy ca.crt from a bundle again")
		}
		roots.AddCert(certificate)
		if soonest.IsZero() || certificate.NotAfter.Before(soonest) {
			soonest = certificate.NotAfter
		}
	}
	switch {
	case soonest.IsZero():
		return f.failed("it holds no certificate", "copy ca.crt from a bundle again")
	case soonest.Before(m.now()):
		return f.failed(fmt.Sprintf("it expired on %s", soonest.Format(time.DateOnly)), "make a new bundle: tenantctl worker bundle; and look at this machine's clock")
	}
	m.roots = roots
	return f.ok("valid until %s", soonest.Format(time.DateOnly))
}

// certificate is about the node's certificate.
func (m *machine) certificate() Finding {
	f := Finding{About: "node certificate"}
	pair, err := m.identity.Certificate()
	switch {
	case kubelet.IsAbsent(err):
		return f.warning("the node has not joined: pods could reach the API server, the tunnel waits", "kubeadm join, with the line of: tenantctl join-command")
	case err != nil:
		return f.failed(err.Error(), "tenant-proxy has to run as root; if the file is damaged: kubeadm reset, and join again")
	}
	leaf := pair.Leaf
	name, err := m.identity.Name()
	switch {
	case err != nil:
		return f.failed(err.Error(), "")
	case m.file.Node != "" && m.file.Node != name:
		return f.failed(fmt.Sprintf("it is of node %q, the configuration says %q", name, m.file.Node), "remove node from the configuration")
	case leaf.NotAfter.Before(m.now()):
		return f.failed(fmt.Sprintf("that of %q expired on %s", name, leaf.NotAfter.Format(time.DateOnly)), "join again: kubeadm reset -f && kubeadm join, with the line of: tenantctl join-command")
	}
	if m.roots != nil {
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: m.roots, CurrentTime: m.now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
			return f.failed(fmt.Sprintf("that of %q is not of this tenant: %v", name, err), "this node has joined another cluster, or the CA is another's: install the bundle of the tenant that it joined")
		}
	}
	if left := leaf.NotAfter.Sub(m.now()); left < expiresSoon {
		return f.warning(fmt.Sprintf("that of %q expires in %s", name, left.Round(time.Minute)), "see why the kubelet does not renew it: journalctl -u kubelet")
	}
	return f.ok("of %q, valid until %s", name, leaf.NotAfter.Format(time.DateOnly))
}

// address is about the VIP.
func (m *machine) address() Finding {
	f := Finding{About: "address"}
	address := m.file.Endpoint().Addr()
	device, err := vip.Holder(address)
	switch {
	case err != nil:
		return f.failed(err.Error(), "")
	case vip.Ours(device):
		return f.ok("%s is on %s", address, device)
	case device != "":
		return f.failed(fmt.Sprintf("%s is on the device %s", address, device), "take it from there, or give the tenant another spec.network.workerVIP")
	}
	if err := vip.Overlap(address); err != nil {
		return f.failed(err.Error(), "")
	}
	return f.ok("%s is free: tenant-proxy takes it when it runs", address)
}

// module is about the device that is to hold the address.
func (m *machine) module() Finding {
	f := Finding{About: "dummy device"}
	if _, err := os.Stat(filepath.Join(m.root, "sys/class/net", vip.Device)); err == nil {
		return f.ok("%s is there", vip.Device)
	}
	var kernel unix.Utsname
	if err := unix.Uname(&kernel); err == nil {
		modules := filepath.Join(m.root, "lib/modules", unix.ByteSliceToString(kernel.Release[:]))
		for _, list := range []string{"modules.dep", "modules.builtin"} {
			if data, err := os.ReadFile(filepath.Join(modules, list)); err == nil && bytes.Contains(data, []byte("/dummy.ko")) {
				return f.ok("the kernel has it")
			}
		}
	}
	return f.warning("the kernel has none: the address goes to lo with scope host, which works as well", "")
}

// port is about who listens.
func (m *machine) port(ctx context.Context) Finding {
	f := Finding{About: "port"}
	endpoint := m.file.Endpoint()
	if m.running(ctx) {
		return f.ok("tenant-proxy listens on %s", endpoint)
	}
	// Whoever has the port on all addresses has it on any.
	candidates := []netip.AddrPort{netip.AddrPortFrom(elsewhere(endpoint.Addr()), endpoint.Port())}
	if device, err := vip.Holder(endpoint.Addr()); err == nil && device != "" {
		candidates = append(candidates, endpoint)
	}
	for _, candidate := range candidates {
		ln, err := net.Listen("tcp", candidate.String())
		if err != nil {
			return f.failed(fmt.Sprintf("another program has port %d: %v", endpoint.Port(), err), "see which: ss -ltnp; a control plane of its own on this machine is one")
		}
		ln.Close()
	}
	return f.ok("%d is free", endpoint.Port())
}

// elsewhere is an address of this machine that nobody listens on in particular.
// IPv6 has only one.
func elsewhere(family netip.Addr) netip.Addr {
	if family.Is4() {
		return netip.AddrFrom4([4]byte{127, 255, 6, 43})
	}
	return netip.IPv6Loopback()
}

// running asks the health endpoint.
func (m *machine) running(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.file.HealthListen+"/livez", nil)
	if err != nil {
		return false
	}
	transport := &http.Transport{DisableKeepAlives: true}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return false
	}
	response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// reversePath is about a filter that drops packets of pods on some networks.
func (m *machine) reversePath() Finding {
	f := Finding{About: "rp_filter"}
	data, err := os.ReadFile(filepath.Join(m.root, "proc/sys/net/ipv4/conf/all/rp_filter"))
	if err != nil {
		return f.warning(fmt.Sprintf("cannot be read: %v", err), "")
	}
	switch mode, _ := strconv.Atoi(strings.TrimSpace(string(data))); mode {
	case 0:
		return f.ok("off for all devices at once")
	case 1:
		return f.warning("strict: fine with pod networks that answer by the device they were asked by, which most are", "if pods cannot connect: sysctl -w net.ipv4.conf.all.rp_filter=2")
	default:
		return f.ok("loose")
	}
}

// unit is about what starts tenant-proxy at boot.
func (m *machine) unit() Finding {
	f := Finding{About: "unit"}
	if _, err := os.Stat(filepath.Join(m.root, "run/systemd/system")); err != nil {
		return f.warning("systemd does not run here", "start tenant-proxy run by other means, before the kubelet")
	}
	for _, dir := range []string{"etc/systemd/system", "usr/local/lib/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"} {
		if _, err := os.Stat(filepath.Join(m.root, dir, "tenant-proxy.service")); err == nil {
			if _, err := os.Lstat(filepath.Join(m.root, "etc/systemd/system/multi-user.target.wants/tenant-proxy.service")); err != nil {
				return f.warning("it is there, and is not started at boot", "systemctl enable --now tenant-proxy")
			}
			return f.ok("/%s/tenant-proxy.service is enabled", dir)
		}
	}
	return f.failed("there is no tenant-proxy.service", "install.sh of the bundle, or tenant-proxy install")
}

// answer is what a host said by one carrier.
type answer struct {
	clock time.Time // what the host said
	at    time.Time // when it was asked, and when it answered
	until time.Time
	err   error
}

// hosts are the findings about each host, the clock and the cluster's networks.
func (m *machine) hosts(ctx context.Context) []Finding {
	var all []Finding
	used := []carrier.Kind{carrier.Kind(m.file.Carrier)}
	kinds := []carrier.Kind{carrier.TLS, carrier.Proxy2}
	if m.file.Carrier == "auto" {
		used = kinds
	}
	var clocked, reached *answer
	var way *carrier.Carrier
	var host netip.AddrPort
	var buffers relay.Buffers
	for _, seed := range m.file.Hosts {
		addresses, err := resolve(ctx, seed)
		if err != nil {
			all = append(all, Finding{About: "host " + seed}.failed(err.Error(), "name hosts by address, or look at this machine's resolver: getent hosts"))
		}
		for _, address := range addresses {
			answers := make([]answer, len(kinds))
			ways := make([]*carrier.Carrier, len(kinds))
			var asking sync.WaitGroup
			for i, kind := range kinds {
				asking.Go(func() {
					ways[i], answers[i].err = carrier.New(carrier.Config{Kind: kind, Hostname: m.file.Hostname, RootCAs: m.roots, GetClientCertificate: m.identity.Present(m.roots), Buffers: &buffers})
					if answers[i].err == nil {
						answers[i] = m.ask(ctx, ways[i], address)
					}
				})
			}
			asking.Wait()
			works := false
			for i, kind := range kinds {
				if answers[i].err == nil {
					if clocked == nil && !answers[i].clock.IsZero() {
						clocked = &answers[i]
					}
					for _, u := range used {
						if u == kind {
							works = true
						}
					}
					if reached == nil {
						reached, way, host = &answers[i], ways[i], address
					}
				}
			}
			for i, kind := range kinds {
				needed := !works
				if m.file.Carrier != "auto" {
					needed = kind == used[0]
				}
				all = append(all, hostFinding(address, kind, answers[i], needed))
			}
		}
	}
	if clocked != nil {
		all = append(all, m.skew(*clocked))
	}
	if reached != nil {
		all = append(all, m.networks(ctx, way, host))
	}
	return all
}

func hostFinding(address netip.AddrPort, kind carrier.Kind, a answer, needed bool) Finding {
	f := Finding{About: fmt.Sprintf("host %s by %s", address, kind)}
	if a.err == nil {
		return f.ok("ready, in %s", a.until.Sub(a.at).Round(100*time.Microsecond))
	}
	if !needed {
		return f.warning(a.err.Error(), "")
	}
	remedy := "is the port open on the way there, and is tenantd running? (on the host: systemctl status tenantd)"
	var status *api.StatusError
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(a.err, &status):
		remedy = "the host is there and the tenant is not ready: tenantctl get, and see its conditions"
	case errors.As(a.err, &unknown):
		remedy = "the CA is not this tenant's: install the tenant's bundle again"
	case errors.As(a.err, &invalid) && invalid.Reason == x509.Expired:
		remedy = "look at the clocks of this machine and the host"
	case kind == carrier.Proxy2 && !errors.Is(a.err, syscall.ECONNREFUSED):
		remedy = "something on the way may not let PROXY headers through: set carrier: tls"
	}
	return f.failed(a.err.Error(), remedy)
}

func resolve(ctx context.Context, seed string) ([]netip.AddrPort, error) {
	if address, err := netip.ParseAddrPort(seed); err == nil {
		return []netip.AddrPort{address}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	name, portText, err := net.SplitHostPort(seed)
	if err != nil {
		return nil, fmt.Errorf("read the host %q: %w", seed, err)
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("read the port of the host %q: %w", seed, err)
	}
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	var addresses []netip.AddrPort
	for _, ip := range found {
		addresses = append(addresses, netip.AddrPortFrom(ip.Unmap(), uint16(port)))
	}
	return addresses, nil
}

func (m *machine) client(way *carrier.Carrier, address netip.AddrPort) *api.Client {
	return api.New(api.Config{
		Hostname:             m.file.Hostname,
		RootCAs:              m.roots,
		GetClientCertificate: m.identity.Present(m.roots),
		Dial:                 func(ctx context.Context) (net.Conn, error) { return way.Dial(ctx, address, nil, nil) },
	})
}

func (m *machine) ask(ctx context.Context, way *carrier.Carrier, address netip.AddrPort) answer {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	client := m.client(way, address)
	defer client.Close()
	a := answer{at: m.now()}
	a.clock, a.err = client.Ready(ctx)
	a.until = m.now()
	return a
}

// skew is about the clock. A host tells whole seconds only.
func (m *machine) skew(a answer) Finding {
	f := Finding{About: "clock"}
	var off time.Duration
	switch {
	case a.clock.Add(time.Second).Before(a.at):
		off = a.at.Sub(a.clock)
	case a.clock.After(a.until):
		off = a.clock.Sub(a.until)
	}
	text := fmt.Sprintf("differs from the host's by about %s", off.Round(time.Second))
	const remedy = "set the clocks right on both, by NTP: timedatectl"
	switch {
	case off > skewFailure:
		return f.failed(text, remedy)
	case off > skewWarning:
		return f.warning(text, remedy)
	}
	return f.ok("agrees with the host's")
}

// networks is about whether the address is in one of the cluster's.
func (m *machine) networks(ctx context.Context, way *carrier.Carrier, host netip.AddrPort) Finding {
	f := Finding{About: "cluster networks"}
	if _, err := m.identity.Certificate(); err != nil {
		return f.warning("not looked at: the node has not joined", "")
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	client := m.client(way, host)
	defer client.Close()
	networks, err := client.Networks(ctx)
	if err != nil {
		return f.warning(fmt.Sprintf("not looked at: %v", err), "")
	}
	address := m.file.Endpoint().Addr()
	for _, network := range networks {
		if network.Contains(address) {
			return f.failed(fmt.Sprintf("%s is in the cluster's network %s", address, network), "give the tenant another spec.network.workerVIP: it is set when a tenant is added")
		}
	}
	return f.ok("%s is in none of them", address)
}

func (f Finding) ok(format string, args ...any) Finding {
	f.State, f.Text = OK, fmt.Sprintf(format, args...)
	return f
}

func (f Finding) warning(text, remedy string) Finding {
	f.State, f.Text, f.Remedy = Warning, text, remedy
	return f
}

func (f Finding) failed(text, remedy string) Finding {
	f.State, f.Text, f.Remedy = Failed, text, remedy
	return f
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// HostConfigurationKind is the kind of a host's configuration file.
const HostConfigurationKind = "HostConfiguration"

// The defaults of a [HostConfiguration].
const (
	// DefaultDataDir is where the file hierarchy standard puts a service's state.
	DefaultDataDir = "/var/lib/tenantd"
	// DefaultListen is the port that every network lets out.
	DefaultListen = ":443"
	// DefaultDomain is reserved for examples (RFC 2606), so a host that is only
	// tried out answers under names that belong to nobody.
	DefaultDomain = "k8s.example.com"
	// DefaultHealthListen is on loopback because metrics name the tenants.
	DefaultHealthListen = "127.0.0.1:8080"
	// DefaultPeerPort is the port registered for etcd's peers, in
	// [HostConfiguration].Peer.
	DefaultPeerPort = 2380
	// DefaultGossipPort is the port, of TCP and UDP, that gossip by memberlist is
	// usually found at, in [HostConfiguration].Gossip.
	DefaultGossipPort = 7946
	// DefaultMaxPending bounds connections that have not yet said whom they want.
	// Each costs a file descriptor and a goroutine for a few seconds at most.
	DefaultMaxPending = 4096
	// DefaultMaxPendingPerSource lets a NAT gateway with many clients in, and keeps
	// one client from taking the whole of DefaultMaxPending.
	DefaultMaxPendingPerSource = 128
	// DefaultTenantStorage holds about a hundred times what an empty cluster stores.
	DefaultTenantStorage = "256Mi"
	// DefaultBackendQuota is the largest database that etcd is tested with.
	DefaultBackendQuota = "8Gi"
	// DefaultAuditMaxSize and DefaultAuditMaxBackups bound the audit log of a tenant to
	// 160 MiB.
	DefaultAuditMaxSize    = "32Mi"
	DefaultAuditMaxBackups = 4
	// DefaultAuditMaxAge is, in days, long enough to notice that one has to look.
	DefaultAuditMaxAge = 30
	// DefaultSleepAfter is longer than the pauses of somebody who works, and short
	// enough that a day's idle tenants do not pile up.
	DefaultSleepAfter = 30 * time.Minute
	// DefaultLogLevel shows each change of state and nothing per request.
	DefaultLogLevel = "info"
	// DefaultLogFormat suits a terminal and the journal.
	DefaultLogFormat = "text"
)

// HostConfiguration is the configuration file of tenantd, the daemon. The zero
// value of a field means its default; flags win over the file.
type HostConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// DataDir is the directory that holds everything the host keeps. Default
	// [DefaultDataDir].
	DataDir string `json:"dataDir,omitempty"`
	// Listen is the address of the one port, as [HOST]:PORT. Default [DefaultListen].
	Listen string `json:"listen,omitempty"`
	// Domain is the DNS zone of the host's names: the system plane is
	// system.<domain>, and a tenant is <name>.<domain> unless it has a hostname of
	// its own. Default [DefaultDomain].
	Domain string `json:"domain,omitempty"`
	// Name is this host's name in Tenant.status.placement. Default: the machine's
	// host name.
	Name string `json:"name,omitempty"`
	// AdvertiseAddress is the address at which clients and other hosts reach the one
	// port, as IP[:PORT]. Default: the address of the interface with the default
	// route, and the port of Listen.
	AdvertiseAddress string `json:"advertiseAddress,omitempty"`
	// Peer is where the etcd members of other hosts reach this host's. The connections
	// are authenticated and encrypted both ways. Default: off, but for a host that joins
	// or has joined [DefaultPeerPort] of AdvertiseAddress. A host that has Peer or Gossip
	// off runs alone, and no other can join it.
	Peer HostEndpoint `json:"peer,omitzero"`
	// Gossip is where other hosts tell this host, over TCP and UDP and encrypted, who is
	// there and serves what. Default: as for Peer, with [DefaultGossipPort].
	Gossip HostEndpoint `json:"gossip,omitzero"`
	// Join makes this host a part of an installation that exists. It is used when DataDir
	// is empty and ignored later, so it may stay. The domain is then the installation's.
	// Default: an empty DataDir becomes a new installation.
	Join HostJoin `json:"join,omitzero"`
	// HealthListen is the address, as [HOST]:PORT, of /livez, /readyz and /metrics,
	// which are plain HTTP without authentication. Default [DefaultHealthListen].
	HealthListen string `json:"healthListen,omitempty"`
	// TrustedProxies are the networks, as CIDRs, of load balancers in front of this
	// host that send the PROXY protocol, version 2. What their header says is the
	// client's address. Whoever connects from there can pass for any client, so they
	// are load balancers' own addresses and nothing wider. Default: none.
	TrustedProxies []string `json:"trustedProxies,omitempty"`
	// Limits bound what clients and tenants take from the host.
	Limits HostLimits `json:"limits,omitzero"`
	// SealingKeyFile holds the 32-byte key that seals private keys at rest. Default:
	// a file in DataDir, made at the first start.
	SealingKeyFile string `json:"sealingKeyFile,omitempty"`
	// Audit is about the audit logs of the tenants and of the system plane.
	Audit HostAudit `json:"audit,omitzero"`
	// Sleep is about tenants that nobody uses.
	Sleep HostSleep `json:"sleep,omitzero"`
	// LogLevel is debug, info, warn or error. Default [DefaultLogLevel].
	LogLevel string `json:"logLevel,omitempty"`
	// LogFormat is text or json. Default [DefaultLogFormat].
	LogFormat string `json:"logFormat,omitempty"`
}

// HostEndpoint is an address that is for other hosts only.
type HostEndpoint struct {
	// Listen is the address to listen at, as IP:PORT; one that the machine has, or
	// 0.0.0.0 or [::] for all that it has.
	Listen string `json:"listen,omitempty"`
	// Advertise is the address to tell other hosts, as IP:PORT. Default: Listen, with
	// the IP of AdvertiseAddress when Listen is for all addresses.
	Advertise string `json:"advertise,omitempty"`
}

// HostJoin says which installation to join, and with what.
type HostJoin struct {
	// Server is the one port of any host of the installation, as HOST:PORT.
	Server string `json:"server,omitempty"`
	// TokenFile holds the token that `tenantctl host token` printed, see [HostToken].
	TokenFile string `json:"tokenFile,omitempty"`
}

// HostAudit is about the audit logs, <dataDir>/audit/<tenant>/audit.log: one for each
// tenant, and one under the name system.
type HostAudit struct {
	// Disabled means that none are written.
	Disabled bool `json:"disabled,omitempty"`
	// MaxSize is the size of a file at which the next is begun, in bytes. Default
	// [DefaultAuditMaxSize].
	MaxSize resource.Quantity `json:"maxSize,omitzero"`
	// MaxBackups is how many older files a tenant has beside the current one. Default
	// [DefaultAuditMaxBackups].
	MaxBackups int `json:"maxBackups,omitempty"`
	// MaxAge is how many days older files, and those of removed tenants, are kept.
	// Default [DefaultAuditMaxAge].
	MaxAge int `json:"maxAge,omitempty"`
}

// HostSleep is about tenants that nobody uses: their control planes are stopped until
// the next connection. What a tenant's spec.sleep says wins over it.
type HostSleep struct {
	// Disabled means that tenants do not fall asleep by themselves.
	Disabled bool `json:"disabled,omitempty"`
	// After is for how long nobody must have used a tenant. Default [DefaultSleepAfter].
	After metav1.Duration `json:"after,omitzero"`
}

// HostLimits bound what clients and tenants take from a host.
type HostLimits struct {
	// MaxPending is the number of connections that may be open without having said
	// whom they want. Default [DefaultMaxPending].
	MaxPending int `json:"maxPending,omitempty"`
	// MaxPendingPerSource is the same for one client address (IPv6: one /64).
	// Default [DefaultMaxPendingPerSource].
	MaxPendingPerSource int `json:"maxPendingPerSource,omitempty"`
	// TenantStorage is the storage of a tenant that has no spec.limits.storage, in
	// bytes. Default [DefaultTenantStorage].
	TenantStorage resource.Quantity `json:"tenantStorage,omitzero"`
	// BackendQuota is the size in bytes to which the host's storage may grow, for
	// all tenants together. Default [DefaultBackendQuota].
	BackendQuota resource.Quantity `json:"backendQuota,omitzero"`
}

// LoadHostConfiguration reads the configuration file at path. The error has every
// fault of it, each as <path>:<line>: <field>: <what is wrong>. Defaults are not set,
// so that flags can be told from the file.
func LoadHostConfiguration(path string) (*HostConfiguration, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	c := &HostConfiguration{}
	err = decodeStrict(path, data, c, func() field.ErrorList {
		return append(validateType(c.TypeMeta, GroupVersion.String(), HostConfigurationKind), c.faults()...)
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// SetDefaults fills the fields that are not set, except Name, AdvertiseAddress and
// SealingKeyFile, whose defaults depend on the machine.
func (c *HostConfiguration) SetDefaults() {
	c.TypeMeta = metav1.TypeMeta{APIVersion: GroupVersion.String(), Kind: HostConfigurationKind}
	setDefault(&c.DataDir, DefaultDataDir)
	setDefault(&c.Listen, DefaultListen)
	setDefault(&c.Domain, DefaultDomain)
	setDefault(&c.HealthListen, DefaultHealthListen)
	if c.Join.Server != "" || c.Peer != (HostEndpoint{}) || c.Gossip != (HostEndpoint{}) {
		c.SetPeerDefaults()
	}
	setDefault(&c.LogLevel, DefaultLogLevel)
	setDefault(&c.LogFormat, DefaultLogFormat)
	setDefault(&c.Limits.MaxPending, DefaultMaxPending)
	setDefault(&c.Limits.MaxPendingPerSource, min(DefaultMaxPendingPerSource, c.Limits.MaxPending))
	if c.Audit.MaxSize.IsZero() {
		c.Audit.MaxSize = resource.MustParse(DefaultAuditMaxSize)
	}
	setDefault(&c.Audit.MaxBackups, DefaultAuditMaxBackups)
	setDefault(&c.Audit.MaxAge, DefaultAuditMaxAge)
	setDefault(&c.Sleep.After.Duration, DefaultSleepAfter)
	if c.Limits.TenantStorage.IsZero() {
		c.Limits.TenantStorage = resource.MustParse(DefaultTenantStorage)
	}
	if c.Limits.BackendQuota.IsZero() {
		c.Limits.BackendQuota = resource.MustParse(DefaultBackendQuota)
	}
}

// SetPeerDefaults has the host be one of several where nothing else is set: Peer and
// Gossip are then at the IP of AdvertiseAddress, if that is not loopback.
func (c *HostConfiguration) SetPeerDefaults() {
	c.Peer.setDefaults(c.advertiseIP(), DefaultPeerPort)
	c.Gossip.setDefaults(c.advertiseIP(), DefaultGossipPort)
}

// advertiseIP is the IP of AdvertiseAddress; not valid if that has none.
func (c *HostConfiguration) advertiseIP() netip.Addr {
	if ap, err := netip.ParseAddrPort(c.AdvertiseAddress); err == nil {
		return ap.Addr()
	}
	ip, err := netip.ParseAddr(strings.Trim(c.AdvertiseAddress, "[]"))
	if err != nil {
		return netip.Addr{}
	}
	return ip
}

// setDefaults derives what is not set from the IP of the host, which may be none.
func (e *HostEndpoint) setDefaults(host netip.Addr, port uint16) {
	if e.Listen == "" && host.IsValid() && !host.IsLoopback() {
		e.Listen = netip.AddrPortFrom(host, port).String()
	}
	if listen, err := netip.ParseAddrPort(e.Listen); err == nil && e.Advertise == "" {
		switch {
		case !listen.Addr().IsUnspecified():
			e.Advertise = e.Listen
		case host.IsValid():
			e.Advertise = netip.AddrPortFrom(host, listen.Port()).String()
		}
	}
}

// Enabled says whether there is an address at all. Defaults have to be set.
func (e HostEndpoint) Enabled() bool { return e.Listen != "" }

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Validate returns every fault of the configuration, one to a line and each with
// the path of its field, or nil. Fields that are not set are in order.
func (c *HostConfiguration) Validate() error { return join(c.faults()) }

func (c *HostConfiguration) faults() field.ErrorList {
	var faults field.ErrorList
	invalid := func(path *field.Path, value any, must string) {
		faults = append(faults, field.Invalid(path, value, must))
	}
	if c.Listen != "" && !isListenAddress(c.Listen) {
		invalid(field.NewPath("listen"), c.Listen, "must be [HOST]:PORT, such as :443 or 127.0.0.1:8443")
	}
	if c.Domain != "" && !isDNSName(c.Domain, 253-MaxTenantNameLength-len(".")) {
		invalid(field.NewPath("domain"), c.Domain, "must be a DNS name in lower case, such as k8s.example.com, of at most 212 characters so that names below it fit")
	}
	if c.Name != "" && !isDNSName(c.Name, 253) {
		invalid(field.NewPath("name"), c.Name, "must be a host name in lower case, such as host-a")
	}
	if c.AdvertiseAddress != "" && !isAdvertiseAddress(c.AdvertiseAddress) {
		invalid(field.NewPath("advertiseAddress"), c.AdvertiseAddress, "must be an IP address that others can reach, such as 192.0.2.10 or 192.0.2.10:443")
	}
	for _, of := range []struct {
		name string
		HostEndpoint
		port int
	}{{"peer", c.Peer, DefaultPeerPort}, {"gossip", c.Gossip, DefaultGossipPort}} {
		path, endpoint, example := field.NewPath(of.name), of.HostEndpoint, "192.0.2.10:"+strconv.Itoa(of.port)
		if endpoint.Listen != "" && !isEndpoint(endpoint.Listen, true) {
			invalid(path.Child("listen"), endpoint.Listen, "must be IP:PORT, such as "+example+", with an address that this machine has")
		}
		if endpoint.Advertise != "" && !isEndpoint(endpoint.Advertise, false) {
			invalid(path.Child("advertise"), endpoint.Advertise, "must be IP:PORT that other hosts can reach, such as "+example)
		}
		switch host := c.advertiseIP(); {
		case endpoint.Listen != "" || host.IsValid() && !host.IsLoopback():
		case endpoint.Advertise != "":
			faults = append(faults, field.Required(path.Child("listen"), "say where to listen for what is advertised"))
		case c.Join.Server != "" && host.IsLoopback():
			faults = append(faults, field.Required(path.Child("listen"), "a host that joins others is reached by them, for which an advertiseAddress on loopback does not do"))
		}
	}
	if c.Peer.Listen != "" && c.Peer.Listen == c.Gossip.Listen {
		invalid(field.NewPath("gossip", "listen"), c.Gossip.Listen, "must differ from peer.listen")
	}
	joinPath := field.NewPath("join")
	switch {
	case c.Join.Server == "" && c.Join.TokenFile != "":
		faults = append(faults, field.Required(joinPath.Child("server"), "name a host that the token is for, such as host-a.example.com:443"))
	case c.Join.Server != "" && !isServerAddress(c.Join.Server):
		invalid(joinPath.Child("server"), c.Join.Server, "must be HOST:PORT of a host of the installation, such as host-a.example.com:443 or 192.0.2.10:443")
	}
	if c.Join.Server != "" && c.Join.TokenFile == "" {
		faults = append(faults, field.Required(joinPath.Child("tokenFile"), "name the file with what tenantctl host token printed"))
	}
	if c.HealthListen != "" && !isListenAddress(c.HealthListen) {
		invalid(field.NewPath("healthListen"), c.HealthListen, "must be [HOST]:PORT, such as 127.0.0.1:8080")
	}
	for i, network := range c.TrustedProxies {
		if _, err := netip.ParsePrefix(network); err != nil {
			invalid(field.NewPath("trustedProxies").Index(i), network, "must be a network in CIDR notation, such as 192.0.2.0/28 or 192.0.2.5/32")
		}
	}
	switch c.LogLevel {
	case "", "debug", "info", "warn", "error":
	default:
		faults = append(faults, field.NotSupported(field.NewPath("logLevel"), c.LogLevel, []string{"debug", "info", "warn", "error"}))
	}
	switch c.LogFormat {
	case "", "text", "json":
	default:
		faults = append(faults, field.NotSupported(field.NewPath("logFormat"), c.LogFormat, []string{"text", "json"}))
	}

	audit := field.NewPath("audit")
	// A line may have some 30 KiB, and it takes many to tell a story.
	if least := resource.MustParse("1Mi"); !c.Audit.MaxSize.IsZero() && c.Audit.MaxSize.Cmp(least) < 0 {
		invalid(audit.Child("maxSize"), c.Audit.MaxSize.String(), "must be 1Mi or more")
	}
	if c.Audit.MaxBackups < 0 || c.Audit.MaxBackups > 1000 {
		invalid(audit.Child("maxBackups"), c.Audit.MaxBackups, "must be 1 to 1000; set audit.disabled for no log")
	}
	if c.Audit.MaxAge < 0 || c.Audit.MaxAge > 36500 {
		invalid(audit.Child("maxAge"), c.Audit.MaxAge, "must be a number of days from 1 to 36500; set audit.disabled for no log")
	}

	// Below that tenants would fall asleep between two commands of their user.
	if least := 10 * time.Second; c.Sleep.After.Duration != 0 && c.Sleep.After.Duration < least {
		invalid(field.NewPath("sleep", "after"), c.Sleep.After.Duration.String(), "must be 10s or more; set sleep.disabled to keep all tenants awake")
	}

	limits := field.NewPath("limits")
	if c.Limits.MaxPending < 0 {
		invalid(limits.Child("maxPending"), c.Limits.MaxPending, "must be positive")
	}
	if c.Limits.MaxPendingPerSource < 0 {
		invalid(limits.Child("maxPendingPerSource"), c.Limits.MaxPendingPerSource, "must be positive")
	}
	if most := c.Limits.MaxPending; most >= 0 {
		setDefault(&most, DefaultMaxPending)
		if c.Limits.MaxPendingPerSource > most {
			invalid(limits.Child("maxPendingPerSource"), c.Limits.MaxPendingPerSource, fmt.Sprintf("must not be more than limits.maxPending, which is %d", most))
		}
	}
	if c.Limits.TenantStorage.Sign() < 0 {
		invalid(limits.Child("tenantStorage"), c.Limits.TenantStorage.String(), "must be positive")
	}
	if c.Limits.BackendQuota.Sign() < 0 {
		invalid(limits.Child("backendQuota"), c.Limits.BackendQuota.String(), "must be positive")
	} else {
		filled := *c
		filled.SetDefaults()
		if all := filled.Limits.BackendQuota; filled.Limits.TenantStorage.Cmp(all) > 0 {
			invalid(limits.Child("tenantStorage"), filled.Limits.TenantStorage.String(), "must not be more than limits.backendQuota, which is "+all.String())
		}
	}
	return faults
}

func validateType(t metav1.TypeMeta, apiVersion, kind string) field.ErrorList {
	var faults field.ErrorList
	if t.APIVersion != apiVersion {
		faults = append(faults, field.NotSupported(field.NewPath("apiVersion"), t.APIVersion, []string{apiVersion}))
	}
	if t.Kind != kind {
		faults = append(faults, field.NotSupported(field.NewPath("kind"), t.Kind, []string{kind}))
	}
	return faults
}

var (
	dnsName     = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)
	numericName = regexp.MustCompile(`(^|[.])[0-9]+$`)
)

// isDNSName says the same as the rules of the Tenant's hostname do.
func isDNSName(name string, most int) bool {
	return len(name) <= most && dnsName.MatchString(name) && !numericName.MatchString(name)
}

func isListenAddress(address string) bool {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return false
	}
	if host == "" || isDNSName(host, 253) {
		return true
	}
	_, err = netip.ParseAddr(host)
	return err == nil
}

// isEndpoint says whether an address is an IP and a port that can be dialled or, if it
// may be for all addresses of a machine, listened at.
func isEndpoint(address string, all bool) bool {
	ap, err := netip.ParseAddrPort(address)
	return err == nil && ap.Port() != 0 && !ap.Addr().IsMulticast() && (all || !ap.Addr().IsUnspecified())
}

// isServerAddress says whether an address is a host, by name or by IP, and a port that
// can be dialled.
func isServerAddress(address string) bool {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && !ip.IsUnspecified() && !ip.IsMulticast() || isDNSName(host, 253)
}

func isAdvertiseAddress(address string) bool {
	ip, err := netip.ParseAddr(strings.Trim(address, "[]"))
	if err != nil {
		ap, err := netip.ParseAddrPort(address)
		if err != nil || ap.Port() == 0 {
			return false
		}
		ip = ap.Addr()
	}
	return !ip.IsUnspecified() && !ip.IsMulticast()
}

// join makes one error of all faults, one to a line.
func join(faults field.ErrorList) error {
	errs := make([]error, len(faults))
	for i, fault := range faults {
		errs[i] = fault
	}
	return errors.Join(errs...)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// What the file says of itself.
const (
	APIVersion = "tenantd.io/v1alpha1"
	Kind       = "WorkerConfiguration"
)

// The defaults of a [Config].
const (
	// DefaultPath is where the unit looks for the file.
	DefaultPath = "/etc/tenant-proxy/config.yaml"
	// DefaultVIP is in the private range that installations use least, and is the
	// default of a tenant's spec.network.workerVIP.
	DefaultVIP = "172.20.0.1"
	// DefaultPort is not 443: a listener on one address keeps 0.0.0.0:443 from
	// everybody else, and ingress controllers on the host's network want that.
	DefaultPort = 6443
	// DefaultCarrier passes every middlebox that lets TLS through.
	DefaultCarrier = "tls"
	// DefaultCAFile is where install puts the CA: /etc/kubernetes/pki/ca.crt is
	// there only after the node has joined.
	DefaultCAFile = "/etc/tenant-proxy/ca.crt"
	// DefaultKubeletKubeconfig is where kubeadm join puts it.
	DefaultKubeletKubeconfig = "/etc/kubernetes/kubelet.conf"
	// DefaultHealthListen is on loopback, on a port that Kubernetes does not use.
	DefaultHealthListen = "127.0.0.1:10266"
	// DefaultCacheDir is where the file hierarchy standard puts a service's state.
	DefaultCacheDir = "/var/lib/tenant-proxy"
	// DefaultDrainTimeout lets requests end, and not watches, which never do.
	DefaultDrainTimeout = 30 * time.Second
	// DefaultLogLevel shows each change of state and nothing per connection.
	DefaultLogLevel = "info"
)

// Config is the configuration of one worker's tenant-proxy.
type Config struct {
	// APIVersion and Kind are the constants of these names.
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`

	// Hostname is the tenant's, which its certificate has to have. Required.
	Hostname string `yaml:"hostname"`
	// Hosts are where to look first, as IP:port or name:port; names are looked up
	// again and again. More are learnt from the cluster. At least one.
	Hosts []string `yaml:"hosts"`
	// KonnectivityHostname is a second name for the tunnel. Empty means Hostname,
	// or what the cluster says.
	KonnectivityHostname string `yaml:"konnectivityHostname,omitempty"`
	// VIP is the address, on this machine alone, where pods find the API server. It
	// is the tenant's spec.network.workerVIP. Default [DefaultVIP].
	VIP string `yaml:"vip,omitempty"`
	// Port is the port there. Default [DefaultPort].
	Port uint16 `yaml:"port,omitempty"`
	// Carrier is tls, proxy2 or auto. Default [DefaultCarrier].
	Carrier string `yaml:"carrier,omitempty"`
	// CA holds the tenant's CA as PEM. CAFile has it in a file. One of them; the
	// default is CAFile, [DefaultCAFile].
	CA     string `yaml:"ca,omitempty"`
	CAFile string `yaml:"caFile,omitempty"`
	// KubeletKubeconfig is the kubelet's, whose certificate the tunnel uses. It may
	// be absent until the node joins. Default [DefaultKubeletKubeconfig].
	KubeletKubeconfig string `yaml:"kubeletKubeconfig,omitempty"`
	// Node is the node's name. Default: the one in its certificate.
	Node string `yaml:"node,omitempty"`
	// AllowFrom are sources of connections that are accepted although they come in
	// from the network, as CIDRs. See package vip for those that need no mention.
	AllowFrom []string `yaml:"allowFrom,omitempty"`
	// HealthListen is where /livez, /readyz, /status and /metrics are answered, as
	// HOST:PORT, without authentication. Default [DefaultHealthListen].
	HealthListen string `yaml:"healthListen,omitempty"`
	// CacheDir keeps what was learnt. Default [DefaultCacheDir].
	CacheDir string `yaml:"cacheDir,omitempty"`
	// DrainTimeout is how long connections may go on when another process has taken
	// over. Default [DefaultDrainTimeout].
	DrainTimeout time.Duration `yaml:"drainTimeout,omitempty"`
	// LogLevel is debug, info, warn or error. Default [DefaultLogLevel].
	LogLevel string `yaml:"logLevel,omitempty"`
}

// Load reads the file at path and sets defaults. The error has every fault of it,
// each as <path>:<line>: <field>: <what is wrong>.
func Load(path string) (*Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	return Parse(path, data)
}

// Parse is Load for what was read already; file is its name in errors.
func Parse(file string, data []byte) (*Config, error) {
	d := decoder{file: file, lines: map[string]int{}}
	c := &Config{}
	if err := d.decode(data, c); err != nil {
		return nil, err
	}
	if len(d.faults) == 0 {
		c.SetDefaults()
		for _, f := range c.faults() {
			d.fault(cmp.Or(d.lines[f.field], 1), f.field+": "+f.text)
		}
	}
	if err := d.err(); err != nil {
		return nil, err
	}
	return c, nil
}

// SetDefaults fills the fields that are not set.
func (c *Config) SetDefaults() {
	setDefault(&c.APIVersion, APIVersion)
	setDefault(&c.Kind, Kind)
	setDefault(&c.VIP, DefaultVIP)
	setDefault(&c.Port, DefaultPort)
	setDefault(&c.Carrier, DefaultCarrier)
	if c.CA == "" {
		setDefault(&c.CAFile, DefaultCAFile)
	}
	setDefault(&c.KubeletKubeconfig, DefaultKubeletKubeconfig)
	setDefault(&c.HealthListen, DefaultHealthListen)
	setDefault(&c.CacheDir, DefaultCacheDir)
	setDefault(&c.DrainTimeout, DefaultDrainTimeout)
	setDefault(&c.LogLevel, DefaultLogLevel)
}

func setDefault[T comparable](field *T, value T) {
	*field = cmp.Or(*field, value)
}

// Validate returns every fault, one to a line, or nil. Defaults have to be set.
func (c *Config) Validate() error {
	var all []error
	for _, f := range c.faults() {
		all = append(all, fmt.Errorf("%s: %s", f.field, f.text))
	}
	return errors.Join(all...)
}

// Endpoint is where pods find the API server, as IP:port. The configuration has
// to be valid.
func (c *Config) Endpoint() netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(c.VIP), c.Port)
}

// Allowed are the networks of AllowFrom. The configuration has to be valid.
func (c *Config) Allowed() []netip.Prefix {
	all := make([]netip.Prefix, len(c.AllowFrom))
	for i, p := range c.AllowFrom {
		all[i] = netip.MustParsePrefix(p)
	}
	return all
}

// Authority returns the tenant's CA as PEM, from the file if it is in one.
func (c *Config) Authority() ([]byte, error) {
	if c.CA != "" {
		return []byte(c.CA), nil
	}
	pem, err := os.ReadFile(c.CAFile)
	if err != nil {
		return nil, fmt.Errorf("read the tenant's CA: %w; copy it from a bundle (tenantctl worker bundle), or name another file as caFile", err)
	}
	return pem, nil
}

// Marshal returns the file, with a comment for its reader.
func (c *Config) Marshal() ([]byte, error) {
	var out bytes.Buffer
	out.WriteString("# Configuration of tenant-proxy. What is not here has its default: docs/workers.md.\n")
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := errors.Join(encoder.Encode(c), encoder.Close()); err != nil {
		return nil, fmt.Errorf("encode the configuration: %w", err)
	}
	return out.Bytes(), nil
}

type fault struct{ field, text string }

var (
	dnsName     = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)
	numericName = regexp.MustCompile(`(^|[.])[0-9]+$`)
)

func isDNSName(name string) bool {
	return len(name) <= 253 && dnsName.MatchString(name) && !numericName.MatchString(name)
}

func isHostPort(address string) bool {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return false
	}
	if isDNSName(host) {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && !ip.IsUnspecified() && !ip.IsMulticast()
}

func (c *Config) faults() []fault {
	var all []fault
	require := func(ok bool, field, format string, args ...any) {
		if !ok {
			all = append(all, fault{field, fmt.Sprintf(format, args...)})
		}
	}
	require(c.APIVersion == APIVersion, "apiVersion", "%q is not served: use %s", c.APIVersion, APIVersion)
	require(c.Kind == Kind, "kind", "%q is not a worker's configuration: use %s", c.Kind, Kind)
	require(isDNSName(c.Hostname), "hostname", "%q must be the tenant's DNS name in lower case, such as acme.k8s.example.com", c.Hostname)
	require(len(c.Hosts) > 0, "hosts", "must name at least one host, such as 192.0.2.10:443")
	for _, host := range c.Hosts {
		require(isHostPort(host), "hosts", "%q must be IP:port or name:port, such as 192.0.2.10:443", host)
	}
	require(c.KonnectivityHostname == "" || isDNSName(c.KonnectivityHostname), "konnectivityHostname", "%q must be a DNS name in lower case", c.KonnectivityHostname)
	vip, err := netip.ParseAddr(c.VIP)
	require(err == nil && vip.Zone() == "" && !vip.Is4In6() && !vip.IsUnspecified() && !vip.IsLoopback() && !vip.IsLinkLocalUnicast() && !vip.IsMulticast(), "vip",
		"%q must be an IP address that Kubernetes takes as an endpoint: no loopback, link-local or multicast address, such as %s", c.VIP, DefaultVIP)
	require(slices.Contains([]string{"auto", "tls", "proxy2"}, c.Carrier), "carrier", "%q is none: use tls, proxy2 or auto", c.Carrier)
	require(c.CA == "" || c.CAFile == "", "ca", "is there as well as caFile: leave one of them out")
	require(c.CA == "" || strings.Contains(c.CA, "-----BEGIN CERTIFICATE-----"), "ca", "holds no certificate: put the PEM text of the tenant's CA there")
	require(c.Node == "" || isDNSName(c.Node), "node", "%q must be a node's name, such as worker-1", c.Node)
	for _, p := range c.AllowFrom {
		_, err := netip.ParsePrefix(p)
		require(err == nil, "allowFrom", "%q must be a network, such as 10.1.0.0/16", p)
	}
	require(isHostPort(c.HealthListen), "healthListen", "%q must be HOST:PORT, such as %s", c.HealthListen, DefaultHealthListen)
	require(c.DrainTimeout >= time.Second, "drainTimeout", "%s is too short: write at least 1s, with the unit", c.DrainTimeout)
	require(slices.Contains([]string{"debug", "info", "warn", "error"}, c.LogLevel), "logLevel", "%q is none: use debug, info, warn or error", c.LogLevel)
	return all
}

// decoder reads one flat YAML object and remembers the lines of its fields.
type decoder struct {
	file  string
	lines map[string]int

	faults []positioned
}

type positioned struct {
	line int
	text string
}

func (d *decoder) fault(line int, text string) { d.faults = append(d.faults, positioned{line, text}) }

func (d *decoder) err() error {
	slices.SortStableFunc(d.faults, func(a, b positioned) int { return cmp.Compare(a.line, b.line) })
	all := make([]error, len(d.faults))
	for i, f := range d.faults {
		all[i] = fmt.Errorf("%s:%d: %s", d.file, f.line, f.text)
	}
	return errors.Join(all...)
}

func (d *decoder) decode(data []byte, c *Config) error {
	stream := yaml.NewDecoder(bytes.NewReader(data))
	var document, next yaml.Node
	switch err := stream.Decode(&document); {
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%s: is empty", d.file)
	case err != nil:
		return fmt.Errorf("%s: not YAML: %s", d.file, strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if err := stream.Decode(&next); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: holds more than one object; tenant-proxy serves one tenant", d.file)
	}
	root := document.Content[0]
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("%s:%d: must be an object with fields", d.file, root.Line)
	}
	fields := map[string]any{
		"apiVersion": &c.APIVersion, "kind": &c.Kind, "hostname": &c.Hostname, "hosts": &c.Hosts,
		"konnectivityHostname": &c.KonnectivityHostname, "vip": &c.VIP, "port": &c.Port, "carrier": &c.Carrier,
		"ca": &c.CA, "caFile": &c.CAFile, "kubeletKubeconfig": &c.KubeletKubeconfig, "node": &c.Node,
		"allowFrom": &c.AllowFrom, "healthListen": &c.HealthListen, "cacheDir": &c.CacheDir,
		"drainTimeout": &c.DrainTimeout, "logLevel": &c.LogLevel,
	}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		into, ok := fields[key.Value]
		switch {
		case !ok:
			known := make([]string, 0, len(fields))
			for name := range fields {
				known = append(known, name)
			}
			slices.Sort(known)
			d.fault(key.Line, fmt.Sprintf("%s: unknown field; the fields here are %s", key.Value, strings.Join(known, ", ")))
		case d.lines[key.Value] != 0:
			d.fault(key.Line, key.Value+": is there twice")
		default:
			d.lines[key.Value] = key.Line
			if err := value.Decode(into); err != nil {
				d.fault(value.Line, fmt.Sprintf("%s: %q is not %s", key.Value, value.Value, wanted(into)))
			}
		}
	}
	// A file says what it is: a default would take any file for a worker's.
	for _, name := range []string{"apiVersion", "kind"} {
		if d.lines[name] == 0 {
			d.fault(root.Line, fmt.Sprintf("%s: is missing: the file begins with apiVersion: %s and kind: %s", name, APIVersion, Kind))
		}
	}
	return nil
}

// wanted says in words what a field takes.
func wanted(into any) string {
	switch into.(type) {
	case *uint16:
		return "a port from 1 to 65535"
	case *time.Duration:
		return "a duration, such as 30s"
	case *[]string:
		return "a list"
	}
	return "a text"
}

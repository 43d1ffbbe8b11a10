// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

const header = "apiVersion: tenantd.io/v1alpha1\nkind: HostConfiguration\n"

func writeConfiguration(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoadHostConfiguration(t *testing.T) {
	c, err := v1alpha1.LoadHostConfiguration(writeConfiguration(t, header+`
dataDir: ./data
listen: 127.0.0.1:8443
domain: k8s.test
name: host-a
advertiseAddress: "[2001:db8::1]:443"
peer: {listen: "0.0.0.0:2380", advertise: "192.0.2.1:2380"}
gossip: {listen: "127.0.0.1:7946", advertise: "[2001:db8::1]:17946"}
join: {server: "host-b.k8s.test:8443", tokenFile: ./token}
healthListen: localhost:0
trustedProxies: [192.0.2.0/28, "2001:db8::5/128"]
limits: {maxPending: 10, maxPendingPerSource: 5, tenantStorage: 64Mi, backendQuota: 1Gi}
sealingKeyFile: /run/credentials/tenantd/key
audit: {maxSize: 8Mi, maxBackups: 2, maxAge: 7}
sleep: {after: 2h}
logLevel: debug
logFormat: json
`))
	if err != nil {
		t.Fatal(err)
	}
	if c.Domain != "k8s.test" || c.Limits.MaxPending != 10 || c.Limits.TenantStorage.Cmp(resource.MustParse("64Mi")) != 0 {
		t.Errorf("read %+v", c)
	}
	before := *c
	c.SetDefaults()
	if !reflect.DeepEqual(before, *c) {
		t.Errorf("defaults changed what was set: %+v", c)
	}
}

// A configuration with nothing set is in order, and so are its defaults.
func TestHostConfigurationDefaults(t *testing.T) {
	var c v1alpha1.HostConfiguration
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	c.SetDefaults()
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	if c.Listen != ":443" || c.DataDir != "/var/lib/tenantd" || c.Limits.MaxPending != 4096 || c.Limits.BackendQuota.String() != "8Gi" {
		t.Errorf("defaults are %+v", c)
	}
	c = v1alpha1.HostConfiguration{Limits: v1alpha1.HostLimits{MaxPending: 5}}
	c.SetDefaults()
	if err := c.Validate(); err != nil {
		t.Errorf("a small maxPending does not fit the default per source: %v", err)
	}
}

// What is for other hosts follows from the address at which they find this one.
func TestHostConfigurationAddressesForOtherHosts(t *testing.T) {
	type endpoint = v1alpha1.HostEndpoint
	for _, test := range []struct {
		advertise                  string
		peer, gossip               endpoint
		wantPeer, wantGossip       endpoint
		peerEnabled, gossipEnabled bool
	}{
		{"", endpoint{}, endpoint{}, endpoint{}, endpoint{}, false, false},
		{"127.0.0.1:8443", endpoint{}, endpoint{}, endpoint{}, endpoint{}, false, false},
		{"::1", endpoint{}, endpoint{}, endpoint{}, endpoint{}, false, false},
		{"192.0.2.1", endpoint{}, endpoint{}, endpoint{}, endpoint{}, false, false}, // runs alone
		{
			"192.0.2.1", endpoint{Listen: "192.0.2.1:2380"}, endpoint{},
			endpoint{"192.0.2.1:2380", "192.0.2.1:2380"}, endpoint{"192.0.2.1:7946", "192.0.2.1:7946"}, true, true,
		},
		{
			"192.0.2.1:443", endpoint{Listen: "0.0.0.0:12380"}, endpoint{Listen: "10.0.0.1:7000"},
			endpoint{"0.0.0.0:12380", "192.0.2.1:12380"}, endpoint{"10.0.0.1:7000", "10.0.0.1:7000"}, true, true,
		},
		{
			"[2001:db8::1]:443", endpoint{}, endpoint{Advertise: "192.0.2.1:9"},
			endpoint{"[2001:db8::1]:2380", "[2001:db8::1]:2380"}, endpoint{"[2001:db8::1]:7946", "192.0.2.1:9"}, true, true,
		},
		{
			"[2001:db8::1]", endpoint{Listen: "[::]:1"}, endpoint{Listen: "10.0.0.1:1", Advertise: "192.0.2.9:2"},
			endpoint{"[::]:1", "[2001:db8::1]:1"}, endpoint{"10.0.0.1:1", "192.0.2.9:2"}, true, true,
		},
		{
			"127.0.0.1", endpoint{Listen: "127.0.0.2:1"}, endpoint{},
			endpoint{"127.0.0.2:1", "127.0.0.2:1"}, endpoint{}, true, false,
		},
		// Who finds out the address of the machine sets the defaults again.
		{"", endpoint{Listen: "0.0.0.0:1"}, endpoint{}, endpoint{Listen: "0.0.0.0:1"}, endpoint{}, true, false},
	} {
		c := v1alpha1.HostConfiguration{AdvertiseAddress: test.advertise, Peer: test.peer, Gossip: test.gossip}
		if err := c.Validate(); err != nil {
			t.Errorf("%+v: %v", test, err)
		}
		c.SetDefaults()
		if c.Peer != test.wantPeer || c.Gossip != test.wantGossip || c.Peer.Enabled() != test.peerEnabled || c.Gossip.Enabled() != test.gossipEnabled {
			t.Errorf("with advertiseAddress %q, peer %+v becomes %+v, gossip %+v becomes %+v", test.advertise, test.peer, c.Peer, test.gossip, c.Gossip)
		}
		if err := c.Validate(); err != nil {
			t.Errorf("with defaults: %+v: %v", test, err)
		}
	}
	c := v1alpha1.HostConfiguration{AdvertiseAddress: "192.0.2.1", Join: v1alpha1.HostJoin{Server: "192.0.2.9:443", TokenFile: "token"}}
	c.SetDefaults()
	if c.Peer.Listen != "192.0.2.1:2380" || c.Gossip.Listen != "192.0.2.1:7946" {
		t.Errorf("a host that joins has peer %+v, gossip %+v", c.Peer, c.Gossip)
	}
}

func TestHostConfigurationFaults(t *testing.T) {
	long := strings.Repeat("a", 60) + "."
	for _, test := range []struct{ text, want string }{
		{"listen: 443", "config.yaml:3: listen: must be a string; put the value in quotes"},
		{"listen: '443'", "config.yaml:3: listen: Invalid value"},
		{"listen: ':99999'", "config.yaml:3: listen: Invalid value"},
		{"listen: 'a b:1'", "config.yaml:3: listen: Invalid value"},
		{"\n\ndomain: K8s.test", "config.yaml:5: domain: Invalid value"},
		{"domain: 192.0.2.1", "config.yaml:3: domain: Invalid value"},
		{"domain: " + long + long + long + strings.Repeat("a", 30), "config.yaml:3: domain: Invalid value"},
		{"name: Host_A", "config.yaml:3: name: Invalid value"},
		{"advertiseAddress: host-a", "config.yaml:3: advertiseAddress: Invalid value"},
		{"advertiseAddress: 0.0.0.0", "config.yaml:3: advertiseAddress: Invalid value"},
		{"advertiseAddress: 192.0.2.1:0", "config.yaml:3: advertiseAddress: Invalid value"},
		{"peer:\n  listen: '2380'", `config.yaml:4: peer.listen: Invalid value: "2380": must be IP:PORT, such as 192.0.2.10:2380`},
		{"peer:\n  listen: ':2380'", "config.yaml:4: peer.listen: Invalid value"},
		{"peer:\n  listen: host-a:2380", "config.yaml:4: peer.listen: Invalid value"},
		{"peer:\n  listen: 192.0.2.1:0", "config.yaml:4: peer.listen: Invalid value"},
		{"peer:\n  listen: 224.0.0.1:2380", "config.yaml:4: peer.listen: Invalid value"},
		{"peer:\n  listen: 0.0.0.0:2380\n  advertise: 0.0.0.0:2380", "config.yaml:5: peer.advertise: Invalid value"},
		{"peer: {advertise: '192.0.2.1:2380'}", "config.yaml:3: peer.listen: Required value"},
		{"advertiseAddress: 127.0.0.1\npeer: {advertise: '192.0.2.1:2380'}", "config.yaml:4: peer.listen: Required value"},
		{"gossip:\n  listen: 7946", "config.yaml:4: gossip.listen: must be a string"},
		{"gossip:\n  listen: '[::1]'", `config.yaml:4: gossip.listen: Invalid value: "[::1]": must be IP:PORT, such as 192.0.2.10:7946`},
		{"peer: {listen: '10.0.0.1:1'}\ngossip: {listen: '10.0.0.1:1'}", "config.yaml:4: gossip.listen: Invalid value"},
		{"join:\n  server: a.test:443", "config.yaml:3: join.tokenFile: Required value"},
		{"join:\n  tokenFile: /x", "config.yaml:3: join.server: Required value"},
		{"join: {tokenFile: /x, server: a.test}", "config.yaml:3: join.server: Invalid value"},
		{"join: {tokenFile: /x, server: 'a.test:0'}", "config.yaml:3: join.server: Invalid value"},
		{"join: {tokenFile: /x, server: ':443'}", "config.yaml:3: join.server: Invalid value"},
		{"join: {tokenFile: /x, server: '0.0.0.0:443'}", "config.yaml:3: join.server: Invalid value"},
		{"join: {tokenFile: /x, server: 'https://a.test:443'}", "config.yaml:3: join.server: Invalid value"},
		{
			"join: {tokenFile: /x, server: 'a.test:443'}\nadvertiseAddress: 127.0.0.1\npeer: {listen: '127.0.0.2:1'}",
			"config.yaml:1: gossip.listen: Required value: a host that joins others", // not in the file, so the document's line,
		},
		{"trustedProxies: [192.0.2.0/28, 192.0.2.5]", `config.yaml:3: trustedProxies[1]: Invalid value: "192.0.2.5"`},
		{"healthListen: '8080'", "config.yaml:3: healthListen: Invalid value"},
		{"logLevel: loud", "config.yaml:3: logLevel: Unsupported value"},
		{"logFormat: xml", "config.yaml:3: logFormat: Unsupported value"},
		{"limits:\n  maxPending: -1", "config.yaml:4: limits.maxPending: Invalid value"},
		{"audit:\n  maxSize: 1Ki", "config.yaml:4: audit.maxSize: Invalid value"},
		{"audit:\n  maxBackups: -1", "config.yaml:4: audit.maxBackups: Invalid value"},
		{"audit:\n  maxAge: -1", "config.yaml:4: audit.maxAge: Invalid value"},
		{"sleep:\n  after: 1s", "config.yaml:4: sleep.after: Invalid value"},
		{"audit:\n  maxAge: 30d", `config.yaml:4: audit.maxAge: must be a whole number, not "30d"`},
		{"limits:\n  maxPending: many", `config.yaml:4: limits.maxPending: must be a whole number, not "many"`},
		{"limits:\n  maxPending: 1.5", `config.yaml:4: limits.maxPending: must be a whole number, not "1.5"`},
		{"limits:\n  maxPendingPerSource: 5000", "config.yaml:4: limits.maxPendingPerSource: Invalid value"},
		{"limits:\n  maxPendingPerSource: -2", "config.yaml:4: limits.maxPendingPerSource: Invalid value"},
		{"limits:\n  tenantStorage: -1Mi", "config.yaml:4: limits.tenantStorage: Invalid value"},
		{"limits:\n  tenantStorage: lots", `config.yaml:4: limits.tenantStorage: "lots": quantities must match`},
		{"limits:\n  tenantStorage: 9Gi", "config.yaml:4: limits.tenantStorage: Invalid value"},
		{"limits:\n  backendQuota: 1Mi", "config.yaml:3: limits.tenantStorage: Invalid value"}, // its default, so the parent's line
		{"limits:\n  backendQuota: -1Mi", "config.yaml:4: limits.backendQuota: Invalid value"},
		{"limits: 5", "config.yaml:3: limits: must be an object with fields"},
		{"limits:\n  maxPendng: 5", "config.yaml:4: limits.maxPendng: unknown field; the fields here are backendQuota, maxPending, "},
		{"datadir: /x", "config.yaml:3: datadir: unknown field"},
		{"metadata: {name: x}", "config.yaml:3: metadata: unknown field"},
		{"domain: a.test\ndomain: b.test", "config.yaml:4: domain: is there twice"},
		{"domain: [", "config.yaml:3: not YAML: "},
		{"---\ndomain: a.test", "config.yaml:3: holds more than one object"},
	} {
		t.Run(test.text, func(t *testing.T) {
			path := writeConfiguration(t, header+test.text)
			_, err := v1alpha1.LoadHostConfiguration(path)
			if err == nil {
				t.Fatal("no fault")
			}
			if !strings.HasPrefix(err.Error(), filepath.Dir(path)+"/"+test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("fault is\n%v\nwant one that begins with\n%s", err, test.want)
			}
		})
	}
}

func TestHostConfigurationFaultsAllAtOnce(t *testing.T) {
	_, err := v1alpha1.LoadHostConfiguration(writeConfiguration(t, header+"listen: nowhere\nlogLevel: loud\ndomain: K8s\n"))
	if err == nil {
		t.Fatal("no fault")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != 3 || !strings.Contains(lines[0], "yaml:3: listen") || !strings.Contains(lines[1], "yaml:4: logLevel") || !strings.Contains(lines[2], "yaml:5: domain") {
		t.Errorf("faults are\n%v", err)
	}
}

func TestHostConfigurationOfAnotherKind(t *testing.T) {
	for text, want := range map[string]string{
		"apiVersion: tenantd.io/v1\nkind: HostConfiguration\n": `yaml:1: apiVersion: Unsupported value: "tenantd.io/v1"`,
		"apiVersion: tenantd.io/v1alpha1\nkind: Tenant\n":      `yaml:2: kind: Unsupported value: "Tenant"`,
		"kind: HostConfiguration\n":                            `yaml:1: apiVersion: Unsupported value: ""`,
		"":                                                     "is empty",
		"# nothing but a comment\n":                            "is empty",
		"apiVersion: &a [*a]\nkind: HostConfiguration\n":       "yaml:1: apiVersion: must be a string",
		"[1, 2]": "yaml:1: the document: must be an object with fields",
		"{\"apiVersion\":\"tenantd.io/v1alpha1\",\"kind\":\"\"": "yaml:1: not YAML: ",
	} {
		_, err := v1alpha1.LoadHostConfiguration(writeConfiguration(t, text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: fault is %v, want %s", text, err, want)
		}
	}
	if _, err := v1alpha1.LoadHostConfiguration(filepath.Join(t.TempDir(), "none.yaml")); err == nil {
		t.Error("no fault for a file that is not there")
	}
}

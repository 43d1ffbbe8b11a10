// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/tenantd/tenantd/worker/config"
)

const head = "apiVersion: tenantd.io/v1alpha1\nkind: WorkerConfiguration\n"

const least = head + "hostname: acme.k8s.example.com\nhosts: [\"192.0.2.10:443\"]\n"

func TestDefaults(t *testing.T) {
	c, err := config.Parse("config.yaml", []byte(least))
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Endpoint().String(); got != "172.20.0.1:6443" {
		t.Errorf("endpoint %s", got)
	}
	if c.Carrier != "tls" || c.DrainTimeout != 30*time.Second || c.CAFile != config.DefaultCAFile || c.CA != "" {
		t.Errorf("defaults: %+v", c)
	}
}

// TestRoundTrip writes a file with every field set and reads it.
func TestRoundTrip(t *testing.T) {
	want := &config.Config{
		Hostname: "acme.k8s.example.com", Hosts: []string{"192.0.2.10:443", "[2001:db8::1]:443", "hosts.example.com:8443"},
		KonnectivityHostname: "tunnel.example.com", VIP: "fd00::1", Port: 7443, Carrier: "auto",
		CA: "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n", KubeletKubeconfig: "/k", Node: "w1",
		AllowFrom: []string{"10.0.0.0/8"}, HealthListen: "127.0.0.1:1", CacheDir: "/c", DrainTimeout: time.Minute, LogLevel: "debug",
	}
	want.SetDefaults()
	for i := range reflect.TypeOf(*want).NumField() {
		if name := reflect.TypeOf(*want).Field(i).Name; name != "CAFile" && reflect.ValueOf(*want).Field(i).IsZero() {
			t.Fatalf("the test leaves %s out", name)
		}
	}
	data, err := want.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := config.Load(path)
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("read %+v, wrote %+v", got, want)
	}
}

func TestFaults(t *testing.T) {
	for _, test := range []struct{ file, want string }{
		{"", "config.yaml: is empty"},
		{"hosts: [", "config.yaml: not YAML"},
		{"- a", "config.yaml:1: must be an object"},
		{least + "---\na: b", "more than one object"},
		{"hostname: a.example.com\nhosts: [\"192.0.2.10:443\"]", "config.yaml:1: kind: is missing"},
		{strings.Replace(least, "WorkerConfiguration", "HostConfiguration", 1), `config.yaml:2: kind: "HostConfiguration" is not a worker's`},
		{strings.Replace(least, "v1alpha1", "v2", 1), "config.yaml:1: apiVersion:"},
		{least + "hsots: []", "config.yaml:5: hsots: unknown field; the fields here are allowFrom, apiVersion, "},
		{least + "port: 1\nport: 2", "config.yaml:6: port: is there twice"},
		{least + "port: many", `config.yaml:5: port: "many" is not a port`},
		{least + "port: 70000", `config.yaml:5: port: "70000" is not a port`},
		{least + "drainTimeout: soon", `config.yaml:5: drainTimeout: "soon" is not a duration`},
		{least + "drainTimeout: 30", `config.yaml:5: drainTimeout: "30" is not a duration`},
		{least + "drainTimeout: 30ms", "config.yaml:5: drainTimeout: 30ms is too short"},
		{head + "hostname: a.example.com", "config.yaml:1: hosts: must name at least one host"},
		{head + "hostname: a.example.com\nhosts: here", "config.yaml:4: hosts: \"here\" is not a list"},
		{head + "hostname: a.example.com\nhosts: [nowhere]", `config.yaml:4: hosts: "nowhere" must be IP:port`},
		{head + "hostname: a.example.com\nhosts: [\"0.0.0.0:443\"]", `config.yaml:4: hosts: "0.0.0.0:443" must be`},
		{head + "hostname: 192.0.2.1\nhosts: [\"192.0.2.10:443\"]", "config.yaml:3: hostname:"},
		{least + "vip: 127.0.0.1", `config.yaml:5: vip: "127.0.0.1" must be an IP address that Kubernetes takes`},
		{least + "vip: 169.254.1.1", "config.yaml:5: vip:"},
		{least + "vip: 172.20.0.0/16", "config.yaml:5: vip:"},
		{least + "carrier: http", `config.yaml:5: carrier: "http" is none`},
		{least + "ca: here", "config.yaml:5: ca: holds no certificate"},
		{least + "caFile: /ca\nca: |\n  -----BEGIN CERTIFICATE-----", "config.yaml:6: ca: is there as well as caFile"},
		{least + "node: W_1", "config.yaml:5: node:"},
		{least + "allowFrom: [10.0.0.1]", "config.yaml:5: allowFrom:"},
		{least + "healthListen: \":8080\"", "config.yaml:5: healthListen:"},
		{least + "logLevel: loud", "config.yaml:5: logLevel:"},
	} {
		_, err := config.Parse("config.yaml", []byte(test.file))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: %v; want %q in it", test.file, err, test.want)
		}
	}
}

func TestEveryFaultAtOnce(t *testing.T) {
	_, err := config.Parse("config.yaml", []byte(least+"carrier: http\nlogLevel: loud\n"))
	if err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("want both faults, each in a line: %v", err)
	}
}

func TestLoadNowhere(t *testing.T) {
	if _, err := config.Load("/nowhere/config.yaml"); err == nil || !strings.Contains(err.Error(), "/nowhere/config.yaml") {
		t.Errorf("want the path in it: %v", err)
	}
}

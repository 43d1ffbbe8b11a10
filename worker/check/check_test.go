// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package check_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"

	"github.com/tenantd/tenantd/worker/check"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/vip"
	"github.com/tenantd/tenantd/worker/workertest/fakehost"
	"github.com/tenantd/tenantd/worker/workertest/netns"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine is what there is to look at; a test breaks one thing of it.
type machine struct {
	t      *testing.T
	tenant *fakehost.Tenant
	host   *fakehost.Host
	cfg    check.Config
}

func (m *machine) put(path, content string) {
	m.t.Helper()
	path = filepath.Join(m.cfg.Root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) join(tenant *fakehost.Tenant, node string, until time.Time) {
	m.t.Helper()
	m.put("kubelet.conf", tenant.Kubeconfig(node, until))
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	const hostname = "acme.test"
	m := &machine{t: t, tenant: fakehost.NewTenant(hostname), cfg: check.Config{Root: t.TempDir()}}
	host, err := m.tenant.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(host.Close)
	m.host = host
	m.cfg.File = &config.Config{
		Hostname: hostname, Hosts: []string{host.Address.String()}, CAFile: filepath.Join(m.cfg.Root, "ca.crt"),
		KubeletKubeconfig: filepath.Join(m.cfg.Root, "kubelet.conf"),
	}
	m.cfg.File.SetDefaults()
	m.put("ca.crt", string(m.tenant.CA))
	m.put("run/systemd/system/marker", "")
	m.put("etc/systemd/system/tenant-proxy.service", "")
	m.put("etc/systemd/system/multi-user.target.wants/tenant-proxy.service", "")
	m.put("proc/sys/net/ipv4/conf/all/rp_filter", "2\n")
	m.put("sys/class/net/"+vip.Device+"/address", "")
	m.tenant.SetNetworks("networking: {podSubnet: 10.244.0.0/16, serviceSubnet: 10.96.0.0/16}")
	m.join(m.tenant, "w1", time.Now().Add(48*time.Hour))
	return m
}

// TestMachine breaks one thing at a time, in a namespace where nothing else is.
func TestMachine(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	for _, test := range []struct {
		name  string
		spoil func(t *testing.T, m *machine)
		about string // of the finding that is not ok; empty for none
		state check.State
		text  string
	}{
		{name: "nothing", spoil: func(*testing.T, *machine) {}},
		{"no CA", func(_ *testing.T, m *machine) { os.Remove(m.cfg.File.CAFile) }, "CA", check.Failed, "no such file"},
		{"damaged CA", func(_ *testing.T, m *machine) { m.put("ca.crt", "hello") }, "CA", check.Failed, "holds no certificate"},
		{"expired CA", func(_ *testing.T, m *machine) {
			m.cfg.Clock = func() time.Time { return time.Now().Add(10000 * time.Hour) }
		}, "CA", check.Failed, "expired on"},
		{"not joined", func(_ *testing.T, m *machine) { os.Remove(m.cfg.File.KubeletKubeconfig) }, "node certificate", check.Warning, "has not joined"},
		{"expired certificate", func(_ *testing.T, m *machine) { m.join(m.tenant, "w1", time.Now().Add(-time.Minute)) }, "node certificate", check.Failed, "expired on"},
		{"certificate about to expire", func(_ *testing.T, m *machine) { m.join(m.tenant, "w1", time.Now().Add(time.Hour)) }, "node certificate", check.Warning, "expires in"},
		{"certificate of another cluster", func(_ *testing.T, m *machine) {
			m.join(fakehost.NewTenant("acme.test"), "w1", time.Now().Add(48*time.Hour))
		}, "node certificate", check.Failed, "not of this tenant"},
		{"another node", func(_ *testing.T, m *machine) { m.cfg.File.Node = "w2" }, "node certificate", check.Failed, `"w2"`},
		{"address elsewhere", func(t *testing.T, m *machine) { device(t, "docker0", "172.20.0.1/16") }, "address", check.Failed, "docker0"},
		{"route to the address", func(t *testing.T, m *machine) { device(t, "docker0", "172.20.255.1/16") }, "address", check.Failed, "172.20.0.0/16"},
		{"no dummy module", func(_ *testing.T, m *machine) { os.RemoveAll(filepath.Join(m.cfg.Root, "sys")) }, "dummy device", check.Warning, "lo with scope host"},
		{"port in use", func(t *testing.T, m *machine) { occupy(t, "0.0.0.0:6443") }, "port", check.Failed, "another program has port 6443"},
		{"port in use at the address", func(t *testing.T, m *machine) {
			if _, err := vip.Ensure(m.cfg.File.Endpoint().Addr()); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { vip.Release(m.cfg.File.Endpoint().Addr()) })
			occupy(t, "172.20.0.1:6443")
		}, "port", check.Failed, "another program has port 6443"},
		{"strict reverse path filter", func(_ *testing.T, m *machine) { m.put("proc/sys/net/ipv4/conf/all/rp_filter", "1") }, "rp_filter", check.Warning, "strict"},
		{"no systemd", func(_ *testing.T, m *machine) { os.RemoveAll(filepath.Join(m.cfg.Root, "run")) }, "unit", check.Warning, "does not run here"},
		{"no unit", func(_ *testing.T, m *machine) {
			os.Remove(filepath.Join(m.cfg.Root, "etc/systemd/system/tenant-proxy.service"))
		}, "unit", check.Failed, "no tenant-proxy.service"},
		{"unit not enabled", func(_ *testing.T, m *machine) {
			os.RemoveAll(filepath.Join(m.cfg.Root, "etc/systemd/system/multi-user.target.wants"))
		}, "unit", check.Warning, "not started at boot"},
		{"host's clock is off", func(_ *testing.T, m *machine) { m.host.SetClock(time.Minute) }, "clock", check.Warning, "differs from"},
		{"host's clock is far off", func(_ *testing.T, m *machine) { m.host.SetClock(-time.Hour) }, "clock", check.Failed, "differs from"},
		{"address in a cluster network", func(_ *testing.T, m *machine) { m.tenant.SetNetworks("networking: {podSubnet: 172.16.0.0/12}") }, "cluster networks", check.Failed, "172.16.0.0/12"},
		{"name that nobody knows", func(_ *testing.T, m *machine) {
			m.cfg.File.Hosts = append(m.cfg.File.Hosts, "nowhere.invalid:443")
		}, "host nowhere.invalid:443", check.Failed, "nowhere.invalid"},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := newMachine(t)
			test.spoil(t, m)
			found := false
			for _, f := range check.Machine(t.Context(), m.cfg) {
				switch {
				case f.About == test.about:
					found = true
					if f.State != test.state || !strings.Contains(f.Text, test.text) {
						t.Errorf("%+v; want %s with %q", f, test.state, test.text)
					}
					if f.State == check.Failed && f.Remedy == "" && !strings.Contains(f.Text, "workerVIP") {
						t.Errorf("%+v has no remedy", f)
					}
				case f.State == check.Failed && test.name != "expired CA", test.about == "" && f.State != check.OK:
					t.Errorf("%+v", f)
				}
			}
			if !found && test.about != "" {
				t.Errorf("nothing is said about %s", test.about)
			}
		})
	}
}

// TestHosts has hosts that are dead, not ready, or another's.
func TestHosts(t *testing.T) {
	if !netns.Entered(t) {
		return
	}
	other, err := fakehost.NewTenant("acme.test").Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for _, carrier := range []string{"tls", "proxy2", "auto"} {
		m := newMachine(t)
		m.cfg.File.Carrier = carrier
		dead := netip.MustParseAddrPort("127.0.0.1:1")
		m.cfg.File.Hosts = append(m.cfg.File.Hosts, dead.String(), other.Address.String())
		m.host.SetReady(false)
		findings := map[string]check.Finding{}
		for _, f := range check.Machine(t.Context(), m.cfg) {
			findings[f.About] = f
		}
		for _, by := range []string{"tls", "proxy2"} {
			state := check.Failed
			if carrier != "auto" && carrier != by {
				state = check.Warning
			}
			for address, text := range map[netip.AddrPort]string{m.host.Address: "503", dead: "refused", other.Address: "unknown authority"} {
				f := findings[fmt.Sprintf("host %s by %s", address, by)]
				if f.State != state || !strings.Contains(f.Text, text) || (f.Remedy == "") != (state != check.Failed) {
					t.Errorf("carrier %s: %+v; want %s with %q", carrier, f, state, text)
				}
			}
		}
	}
}

func device(t *testing.T, name, address string) {
	t.Helper()
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-p"}); err != nil {
		t.Fatal(err)
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := netlink.ParseAddr(address)
	if err := errors.Join(err, netlink.AddrAdd(link, parsed), netlink.LinkSetUp(link)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netlink.LinkDel(link) })
}

func occupy(t *testing.T, address string) {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
}

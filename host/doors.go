// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"net"
	"slices"

	"github.com/tenantd/tenantd/sni"
	"github.com/tenantd/tenantd/tenant"
)

// doors are the listeners of one tenant. All have its name on the one port: what a
// connection is for it says by its application protocol.
type doors struct {
	api     *sni.Listener
	carrier *sni.Listener
	agents  []*sni.Listener // of the tunnel
	all     []*sni.Listener
}

// listen registers the tenant's names with the router. How many connections each
// listener takes is set with apply.
func (r *runner) listen() (_ *doors, err error) {
	d := &doors{}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	open := func(name string, protocols ...string) (*sni.Listener, error) {
		ln, err := r.host.router.Listen(sni.ListenConfig{
			Tenant: r.name, Names: []string{name}, Protocols: protocols,
		})
		if err == nil {
			d.all = append(d.all, ln)
		}
		return ln, err
	}
	if d.api, err = open(r.spec.Hostname); err != nil {
		return nil, err
	}
	if d.carrier, err = open(r.spec.Hostname, tenant.CarrierProtocol); err != nil {
		return nil, err
	}
	agents, err := open(r.spec.Hostname, tenant.TunnelProtocol)
	if err != nil {
		return nil, err
	}
	d.agents = append(d.agents, agents)
	// Under a name of their own agents need not offer the protocol.
	if k := r.spec.KonnectivityHostname; k != "" {
		own, err := open(k)
		if err != nil {
			return nil, err
		}
		d.agents = append(d.agents, own)
	}
	return d, nil
}

// tunnel are the listeners of agents, as the control plane takes them.
func (d *doors) tunnel() []net.Listener {
	all := make([]net.Listener, len(d.agents))
	for i, ln := range d.agents {
		all[i] = ln
	}
	return all
}

// unlist has new connections go where else the names lead, if anywhere. Those that
// came before are served.
func (d *doors) unlist() {
	// The API's last: it would get what is for the others.
	for _, ln := range slices.Backward(d.all) {
		_ = ln.SetNames(nil) // it fails for one that is closed, which has none
	}
}

// retire is unlist for a tenant that answers on another host: what other hosts forward
// in the meantime, because they have not heard of that, is still served.
func (d *doors) retire() {
	for _, ln := range slices.Backward(d.all) { // in the order of unlist
		ln.Retire()
	}
}

// setMaxConns bounds the connections through each door.
func (d *doors) setMaxConns(n int) {
	for _, ln := range d.all {
		ln.SetMaxConns(n)
	}
}

func (d *doors) close() {
	for _, ln := range d.all {
		ln.Close()
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"testing"
)

// TestTap shows that nothing is dialled or looked up unseen.
func TestTap(t *testing.T) {
	if !inside() {
		t.Skip("there is no network of the tests' own; run as root or allow user namespaces")
	}
	var mu sync.Mutex // guards touched
	touched := map[string]bool{}
	tap(t, func(network string, to netip.AddrPort, name string) {
		mu.Lock()
		defer mu.Unlock()
		touched[network+" "+to.String()+name] = true
	})
	for _, address := range []string{"127.0.0.1:9", "169.254.169.254:80", "192.0.2.1:443", "[2001:db8::1]:443"} {
		if conn, err := net.Dial("tcp", address); err == nil {
			conn.Close()
		}
	}
	net.DefaultResolver.LookupHost(context.Background(), "metadata.example.com") // fails
	eventually(t, "all of it was seen", func() error {
		mu.Lock()
		defer mu.Unlock()
		for _, want := range []string{"tcp 127.0.0.1:9", "tcp 169.254.169.254:80", "tcp 192.0.2.1:443", "udp 127.0.0.1:53metadata.example.com."} {
			if !touched[want] {
				return errors.New(want + " was not")
			}
		}
		return nil
	})
	mu.Lock()
	defer mu.Unlock()
	t.Logf("seen: %q", sortedKeys(touched))
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// serviceName is the Service under which pods find the API server.
const serviceName = "kubernetes"

// keepEndpoints points the kubernetes Service to the address at which
// every node has a way to the API server. The address is the same everywhere and
// always there, so nothing is ever taken out: not when a host stops, and not when
// this process does.
func (c *Cluster) keepEndpoints(ctx context.Context) error {
	endpoints, slice := c.cfg.endpoints(), c.cfg.endpointSlice()
	if have, ok := c.cached(slice).(*discoveryv1.EndpointSlice); ok && have.AddressType != slice.AddressType {
		// It cannot be changed in place.
		if err := c.delete(ctx, have); err != nil {
			return err
		}
	}
	return all(ctx, []func(context.Context) error{
		func(ctx context.Context) error { return c.write(ctx, c.cached(endpoints), endpoints) },
		func(ctx context.Context) error { return c.write(ctx, c.cached(slice), slice) },
	})
}

func (c *Config) endpointSlice() *discoveryv1.EndpointSlice {
	name, protocol, port, ready := "https", corev1.ProtocolTCP, int32(c.WorkerPort), true
	family := discoveryv1.AddressTypeIPv4
	if c.WorkerVIP.To4() == nil {
		family = discoveryv1.AddressTypeIPv6
	}
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceDefault, Name: serviceName,
			Labels: map[string]string{discoveryv1.LabelServiceName: serviceName},
		},
		AddressType: family,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{c.WorkerVIP.String()}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
	}
}

// endpoints is the same for clients that do not know EndpointSlices, with a label
// that keeps the control plane from making a second EndpointSlice of it.
func (c *Config) endpoints() *corev1.Endpoints { //nolint:staticcheck // see path
	return &corev1.Endpoints{ //nolint:staticcheck // see path
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceDefault, Name: serviceName,
			Labels: map[string]string{discoveryv1.LabelSkipMirror: "true"},
		},
		Subsets: []corev1.EndpointSubset{{ //nolint:staticcheck // see path
			Addresses: []corev1.EndpointAddress{{IP: c.WorkerVIP.String()}}, //nolint:staticcheck // see path
			Ports:     []corev1.EndpointPort{{Name: "https", Protocol: corev1.ProtocolTCP, Port: int32(c.WorkerPort)}},
		}},
	}
}

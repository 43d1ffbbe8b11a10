// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"context"
	"crypto/tls"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"k8s.io/client-go/rest"
	agentpb "sigs.k8s.io/apiserver-network-proxy/proto/agent"
)

func forgedAgents(t *testing.T, a *attacker) {
	node, err := rest.TLSConfigFor(a.as("system:node:worker-1", "system:nodes"))
	if err != nil {
		t.Fatal(err)
	}
	admin, err := rest.TLSConfigFor(a.config())
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, host, id string
		identity       *tls.Config // whose certificate it shows, if anybody's
		token          string
		admitted       bool
	}{
		{name: "its own", host: a.host(), id: "worker-1", identity: node, admitted: true},
		{name: "another node's name", host: a.host(), id: "worker-2", identity: node},
		{name: "an administrator", host: a.host(), id: "worker-1", identity: admin},
		{name: "nobody", host: a.victim.host(), id: "worker-1"},
		{name: "an invented token", host: a.victim.host(), id: "worker-1", token: "a.b.c"},
		{name: "a node of another cluster", host: a.victim.host(), id: "worker-1", identity: node},
		{name: "an administrator of another cluster", host: a.victim.host(), id: "worker-1", identity: admin},
	} {
		cfg := &tls.Config{ServerName: test.host, NextProtos: []string{"konnectivity"}, InsecureSkipVerify: true}
		if test.identity != nil {
			cfg.Certificates, cfg.GetClientCertificate = test.identity.Certificates, test.identity.GetClientCertificate
		}
		admitted, err := connectAgent(t, a.daemon.listen, cfg, test.id, test.token)
		if admitted != test.admitted {
			t.Errorf("%s: admitted %t (%v), want %t", test.name, admitted, err, test.admitted)
		}
	}
}

// connectAgent reports whether an agent is admitted.
func connectAgent(t testing.TB, address string, cfg *tls.Config, id, token string) (bool, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(cfg)), grpc.WithAuthority(cfg.ServerName))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx = metadata.AppendToOutgoingContext(ctx, "agentid", id)
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	stream, err := agentpb.NewAgentServiceClient(conn).Connect(ctx)
	if err != nil {
		return false, err
	}
	header, err := stream.Header()
	return err == nil && len(header.Get("serverid")) > 0, err
}

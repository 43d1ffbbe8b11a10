// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func (c *cli) joinCommandCommand() *cobra.Command {
	var (
		spec v1alpha1.JoinTokenRequestSpec
		ttl  time.Duration
	)
	cmd := &cobra.Command{
		Use:   "join-command NAME",
		Short: "Print the command that joins a worker to a tenant",
		Long: `Make a bootstrap token in a tenant and print the kubeadm command that joins a
worker with it. Any number of workers can join with one token until it ends.
The token lets machines into the cluster: treat the line as a secret.`,
		Example: `  tenantctl join-command acme
  ssh root@worker-1 "$(tenantctl join-command acme --ttl 10m)"`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.tenantName,
		PreRunE: func(cmd *cobra.Command, _ []string) (err error) {
			spec.TTLSeconds, err = ttlSeconds(cmd, ttl, v1alpha1.MaxCredentialTTL)
			return err
		},
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			p, err := c.connect()
			if err != nil {
				return err
			}
			r := v1alpha1.JoinTokenRequest{Spec: spec}
			r.SetDefaults()
			if err := p.credentials(cmd.Context(), v1alpha1.CredentialsPath(args[0], v1alpha1.JoinTokenSubresource), &r); err != nil {
				return err
			}
			if r.Status.Token == "" || r.Status.Endpoint == "" || len(r.Status.CACertHashes) == 0 {
				return errors.New("the answer has no token; is the host of another version than tenantctl?")
			}
			var line strings.Builder
			fmt.Fprintf(&line, "kubeadm join %s --token %s", r.Status.Endpoint, r.Status.Token)
			for _, hash := range r.Status.CACertHashes {
				fmt.Fprintf(&line, " --discovery-token-ca-cert-hash %s", hash)
			}
			fmt.Fprintln(c.out, line.String())
			return nil
		}),
	}
	cmd.Flags().DurationVar(&ttl, "ttl", v1alpha1.DefaultJoinTokenTTL, "how long workers can join with the token")
	must(cmd.RegisterFlagCompletionFunc("ttl", cobra.NoFileCompletions))
	return cmd
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func (c *cli) hostTokenCommand() *cobra.Command {
	var (
		spec   v1alpha1.HostTokenRequestSpec
		ttl    time.Duration
		output string
	)
	cmd := &cobra.Command{
		Use:   "token",
		Short: "Make a token with which a new host joins",
		Long: `Make a token with which one machine becomes a host of the installation, and print
it or write it to a file (--output). Standard error says how it is used: put it
into a file on the new machine that only root can read, and start tenantd there
with the line shown.

The token names this installation, so the new host trusts no other. It works once
and until its time is up. Whoever holds it can become a host, and a host has every
tenant's keys: carry it over ssh, not by mail, and keep --ttl short.`,
		Example: `  tenantctl host token
  tenantctl host token --ttl 10m --output join-token
  tenantctl host token | ssh root@host-b 'umask 077; cat > ` + v1alpha1.DefaultHostTokenFile + `'`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		PreRunE: func(cmd *cobra.Command, _ []string) (err error) {
			spec.TTLSeconds, err = ttlSeconds(cmd, ttl, v1alpha1.MaxHostTokenTTL)
			return err
		},
		RunE: c.do(func(cmd *cobra.Command, _ []string) error {
			p, err := c.connect()
			if err != nil {
				return err
			}
			r := v1alpha1.HostTokenRequest{Spec: spec}
			r.SetDefaults()
			if err := p.credentials(cmd.Context(), v1alpha1.HostCredentialsPath(v1alpha1.AnyHost, v1alpha1.HostTokenSubresource), &r); err != nil {
				return err
			}
			if _, err := v1alpha1.ParseHostToken(r.Status.Token); err != nil || r.Status.Command == "" {
				return failed(exitFailed, "the answer has no token that this version understands; is the host of another version than tenantctl?")
			}
			from := "it"
			if output != "" && output != "-" {
				if err := writePrivate("token", output, []byte(r.Status.Token+"\n")); err != nil {
					return err
				}
				from = output
			} else {
				fmt.Fprintln(c.out, r.Status.Token)
			}
			fmt.Fprintf(c.err, "One host can join until %s. On the new machine, put %s into %s, and run:\n  %s\n",
				r.Status.ExpirationTimestamp.UTC().Format(time.RFC3339), from, v1alpha1.DefaultHostTokenFile, r.Status.Command)
			return nil
		}),
	}
	cmd.Flags().DurationVar(&ttl, "ttl", v1alpha1.DefaultHostTokenTTL, "how long a host can join with the token, at most 24h")
	cmd.Flags().StringVarP(&output, "output", "o", "", "file to write, readable by its owner only (default: standard output)")
	must(cmd.MarkFlagFilename("output"))
	must(cmd.RegisterFlagCompletionFunc("ttl", cobra.NoFileCompletions))
	return cmd
}

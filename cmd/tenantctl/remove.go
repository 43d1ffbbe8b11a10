// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func (c *cli) removeCommand() *cobra.Command {
	var (
		yes, wait bool
		timeout   time.Duration
	)
	cmd := &cobra.Command{
		Use:     "remove NAME",
		Aliases: []string{"rm"},
		Short:   "Remove a tenant and everything it stored",
		Long: `Remove a tenant: its control plane is stopped, and its objects, its authorities
and its keys are wiped. This cannot be undone; kubeconfigs and workers of the
tenant are of no use afterwards.

The name must be typed again to confirm, or --yes given, without which the
command refuses to work where nobody can type. It waits until everything is
gone. When the time is up (exit code 4), or on Ctrl-C, the removal goes on.`,
		Example: `  tenantctl remove acme
  tenantctl remove acme --yes --wait=false`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.tenantName,
		PreRunE: func(*cobra.Command, []string) error {
			return errors.Join(c.canConfirm(yes), positive(timeout))
		},
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			p, t, err := find(cmd.Context(), c, (*plane).tenant, args[0])
			if err != nil {
				return err
			}
			if !yes {
				warning := fmt.Sprintf("This wipes tenant %s (%s) with everything in it, for ever.", t.Name, t.Spec.Hostname)
				if err := c.confirm(cmd.Context(), warning, t.Name); err != nil {
					return err
				}
			}
			// What was confirmed is removed, not a successor of the same name.
			err = request(cmd.Context(), func(ctx context.Context) error {
				return p.Delete(ctx, t, client.Preconditions{UID: &t.UID}, client.PropagationPolicy(metav1.DeletePropagationBackground))
			})
			if err != nil {
				return err
			}
			if !wait {
				fmt.Fprintf(c.out, "tenant %s is being removed\n", t.Name)
				return nil
			}
			if err := c.waitGone(cmd.Context(), p, t, timeout); err != nil {
				return err
			}
			fmt.Fprintf(c.out, "tenant %s removed\n", t.Name)
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	waitFlags(cmd.Flags(), &wait, "wait until everything is gone", &timeout, defaultTimeout)
	return cmd
}

// canConfirm is about --yes.
func (c *cli) canConfirm(yes bool) error {
	if !yes && !c.inIsTerminal {
		return errors.New("standard input is no terminal to confirm at; add --yes to remove without being asked")
	}
	return nil
}

// confirm has the name of what is to be removed typed again.
func (c *cli) confirm(ctx context.Context, warning, name string) error {
	fmt.Fprintf(c.err, "%s\nType its name to go on: ", warning)
	typed := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(c.in).ReadString('\n')
		typed <- strings.TrimSpace(line)
	}()
	select {
	case <-ctx.Done():
		fmt.Fprintln(c.err)
		return failed(exitFailed, "interrupted; nothing was removed")
	case again := <-typed:
		if again != name {
			return failed(exitFailed, "the name typed is not %q; nothing was removed", name)
		}
		return nil
	}
}

// waitGone waits until the tenant, or a successor of its name, says that t is gone.
func (c *cli) waitGone(ctx context.Context, p *plane, t *v1alpha1.Tenant, timeout time.Duration) error {
	goesOn := fmt.Sprintf("the removal goes on: follow it with tenantctl get %s", t.Name)
	return c.await(ctx, t.Name, timeout, fmt.Sprintf("tenant %q is not gone", t.Name), goesOn, func(ctx context.Context, progress *progress) error {
		return p.followTenant(ctx, t.Name, progress, func(now *v1alpha1.Tenant) (bool, error) {
			if now == nil || now.UID != t.UID {
				return true, nil
			}
			progress.show(summary(now))
			return false, nil
		})
	})
}

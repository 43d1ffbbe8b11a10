// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// defaultDrainTimeout lets some hundred tenants move, a few at a time.
const defaultDrainTimeout = 10 * time.Minute

func (c *cli) hostDrainCommand() *cobra.Command {
	var (
		wait    bool
		timeout time.Duration
	)
	cmd := &cobra.Command{
		Use:   "drain NAME",
		Short: "Move all tenants away from a host",
		Long: `Move all tenants of a host to other hosts, and place none on it until it is
resumed: before the machine is restarted, upgraded or repaired. Each tenant is
ready in its new place before it stops in the old one. The host stays a part of
the installation: it keeps its copy of the state and forwards connections.

The command waits until no tenant is left, and shows how many are. When the time
is up (exit code 4), or on Ctrl-C, the host stays as it is and goes on draining;
"tenantctl host resume" takes it back.`,
		Example: `  tenantctl host drain host-a
  tenantctl host drain host-a --timeout 1h && ssh host-a reboot`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.hostName,
		PreRunE:           func(*cobra.Command, []string) error { return positive(timeout) },
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			p, h, err := find(cmd.Context(), c, (*plane).host, args[0])
			if err != nil {
				return err
			}
			if err := change(cmd.Context(), p, h, func() { h.Spec.Draining = true }); err != nil {
				return err
			}
			if !wait {
				fmt.Fprintf(c.out, "host %s is being drained\n", h.Name)
				return nil
			}
			if err := c.waitDrained(cmd.Context(), p, h, timeout); err != nil {
				return err
			}
			fmt.Fprintf(c.out, "host %s is drained\n", h.Name)
			return nil
		}),
	}
	waitFlags(cmd.Flags(), &wait, "wait until no tenant is left", &timeout, defaultDrainTimeout)
	return cmd
}

// waitDrained waits until h, which was told to, has no tenant any more.
func (c *cli) waitDrained(ctx context.Context, p *plane, h *v1alpha1.Host, timeout time.Duration) error {
	goesOn := fmt.Sprintf("host %q goes on draining: follow it with tenantctl host get %s, or take it back with tenantctl host resume %s", h.Name, h.Name, h.Name)
	return c.await(ctx, h.Name, timeout, fmt.Sprintf("host %q is not drained", h.Name), goesOn, func(ctx context.Context, progress *progress) error {
		return p.followHost(ctx, h.Name, progress, func(now *v1alpha1.Host) (bool, error) {
			switch {
			case now == nil || now.UID != h.UID:
				return false, failed(exitFailed, "host %q was removed while it was draining", h.Name)
			case !now.Spec.Draining:
				return false, failed(exitFailed, "host %q was resumed while it was draining", h.Name)
			}
			progress.show(hostSummary(now))
			// An older status may say 0 because nothing was placed there yet.
			return now.Status.ObservedGeneration >= h.Generation && now.Status.Tenants != nil && *now.Status.Tenants == 0, nil
		})
	})
}

func (c *cli) hostResumeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "resume NAME",
		Short: "Let a drained host take tenants again",
		Long: `Let a host that was drained take tenants again. Tenants that have found another
place stay there, unless they wish for this host (tenantctl move).`,
		Example:           `  tenantctl host resume host-a`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.hostName,
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			p, h, err := find(cmd.Context(), c, (*plane).host, args[0])
			if err != nil {
				return err
			}
			if !h.DeletionTimestamp.IsZero() {
				return failed(exitFailed, "host %q is being removed, which cannot be taken back; let it join again afterwards with: tenantctl host token", h.Name)
			}
			if err := change(cmd.Context(), p, h, func() { h.Spec.Draining = false }); err != nil {
				return err
			}
			fmt.Fprintf(c.out, "host %s takes tenants again\n", h.Name)
			return nil
		}),
	}
}

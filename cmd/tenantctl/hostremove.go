// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func (c *cli) hostRemoveCommand() *cobra.Command {
	var (
		yes, force, wait bool
		timeout          time.Duration
	)
	cmd := &cobra.Command{
		Use:     "remove NAME",
		Aliases: []string{"rm"},
		Short:   "Take a host out of the installation",
		Long: `Take a host out of the installation for good: its tenants move to other hosts, it
leaves etcd as soon as that is safe, and it stops. What is then in its data
directory is of no use. The host can join again, with an empty data directory and
a new token.

--force is for a machine that will never come back: nothing waits for it to leave
by itself. It is refused for a host that is Ready. etcd is changed only while a
majority of the remaining members answers, also with --force. A machine that does
come back finds itself shut out.

The name must be typed again to confirm, or --yes given, without which the
command refuses to work where nobody can type. It waits until the host is gone,
and shows what it waits for. When the time is up (exit code 4), or on Ctrl-C, the
removal goes on.`,
		Example: `  tenantctl host remove host-c
  tenantctl host remove host-c --force --yes`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.hostName,
		PreRunE: func(*cobra.Command, []string) error {
			if err := c.canConfirm(yes); err != nil {
				return err
			}
			return positive(timeout)
		},
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			p, h, err := find(cmd.Context(), c, (*plane).host, args[0])
			if err != nil {
				return err
			}
			ready := meta.FindStatusCondition(h.Status.Conditions, v1alpha1.ConditionReady)
			warning := fmt.Sprintf("This takes host %s (%s) out of the installation, for good.", h.Name, h.Status.Address)
			switch {
			case force && ready != nil && ready.Status == metav1.ConditionTrue:
				return failed(exitFailed, "host %q is well and can leave by itself; remove it without --force", h.Name)
			case force:
				warning = fmt.Sprintf("This gives host %s (%s) up for lost; it must not be started again.", h.Name, h.Status.Address)
			case ready != nil && ready.Status != metav1.ConditionTrue && ready.Reason == v1alpha1.ReasonNoHeartbeat:
				return failed(exitFailed, "host %q does not answer and cannot leave by itself; start it again or, if it will never come back, add --force", h.Name)
			}
			if !yes {
				if err := c.confirm(cmd.Context(), warning, h.Name); err != nil {
					return err
				}
			}
			if force {
				err := change(cmd.Context(), p, h, func() { metav1.SetMetaDataAnnotation(&h.ObjectMeta, v1alpha1.HostLostAnnotation, "true") })
				if err != nil {
					return err
				}
			}
			// What was confirmed is removed, not a successor of the same name.
			err = request(cmd.Context(), func(ctx context.Context) error { return p.Delete(ctx, h, client.Preconditions{UID: &h.UID}) })
			if err != nil {
				return err
			}
			if !wait {
				fmt.Fprintf(c.out, "host %s is being removed\n", h.Name)
				return nil
			}
			if err := c.waitHostGone(cmd.Context(), p, h, timeout); err != nil {
				return err
			}
			fmt.Fprintf(c.out, "host %s removed\n", h.Name)
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().BoolVar(&force, "force", false, "the machine is lost and will never come back")
	waitFlags(cmd.Flags(), &wait, "wait until the host is gone", &timeout, defaultDrainTimeout)
	return cmd
}

// waitHostGone waits until the host, or a successor of its name, says that h is gone.
func (c *cli) waitHostGone(ctx context.Context, p *plane, h *v1alpha1.Host, timeout time.Duration) error {
	goesOn := fmt.Sprintf("the removal of host %q goes on: follow it with tenantctl host get %s", h.Name, h.Name)
	return c.await(ctx, h.Name, timeout, fmt.Sprintf("host %q is not gone", h.Name), goesOn, func(ctx context.Context, progress *progress) error {
		return p.followHost(ctx, h.Name, progress, func(now *v1alpha1.Host) (bool, error) {
			if now == nil || now.UID != h.UID {
				return true, nil
			}
			progress.show(hostSummary(now))
			return false, nil
		})
	})
}

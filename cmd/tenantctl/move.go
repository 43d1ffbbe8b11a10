// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func (c *cli) moveCommand() *cobra.Command {
	var (
		to             []string
		anywhere, wait bool
		timeout        time.Duration
	)
	cmd := &cobra.Command{
		Use:   "move NAME --to HOST",
		Short: "Run a tenant on another host",
		Long: `Have a tenant run on the host that --to names, and stay there. It is ready in its
new place before it stops in the old one, so that no request fails; watches are
ended, and clients open them again. No data is copied. While the host is drained
or down, the tenant runs elsewhere, and then comes back.

--to may be repeated for a tenant of several replicas. --anywhere drops the wish:
the tenant stays where it is, until that host is drained or down.

The command waits until the tenant is in its new place, and shows what it waits
for: a start that failed is tried again. When the time is up (exit code 4), or on
Ctrl-C, the wish stays.`,
		Example: `  tenantctl move acme --to host-b
  tenantctl move acme --to host-a --to host-b
  tenantctl move acme --anywhere`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.tenantName,
		PreRunE: func(*cobra.Command, []string) error {
			if slices.Contains(to, "") {
				return errors.New("--to must name a host; see tenantctl hosts")
			}
			return positive(timeout)
		},
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			p, t, err := find(cmd.Context(), c, (*plane).tenant, args[0])
			if err != nil {
				return err
			}
			for _, name := range to {
				h, err := p.host(cmd.Context(), name)
				if err != nil {
					return err
				}
				switch {
				case !h.DeletionTimestamp.IsZero():
					return failed(exitFailed, "host %q is being removed; choose another one: tenantctl hosts", name)
				case h.Spec.Draining:
					return failed(exitFailed, "host %q is drained; choose another one, or let it take tenants again with: tenantctl host resume %s", name, name)
				}
			}
			if err := change(cmd.Context(), p, t, func() { t.Spec.Placement.Hosts = to }); err != nil {
				return err
			}
			if !wait {
				fmt.Fprintf(c.out, "tenant %s is being moved\n", t.Name)
				return nil
			}
			hosts, err := c.waitMoved(cmd.Context(), p, t, timeout)
			if err != nil {
				return err
			}
			fmt.Fprintf(c.out, "tenant %s runs on %s\n", t.Name, strings.Join(hosts, ", "))
			return nil
		}),
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&to, "to", nil, "host to run the tenant; may be repeated")
	flags.BoolVar(&anywhere, "anywhere", false, "let the host be chosen by load")
	waitFlags(flags, &wait, "wait until the tenant is in its new place", &timeout, defaultTimeout)
	cmd.MarkFlagsOneRequired("to", "anywhere")
	cmd.MarkFlagsMutuallyExclusive("to", "anywhere")
	must(cmd.RegisterFlagCompletionFunc("to", c.hostNames))
	return cmd
}

// waitMoved waits until t runs where it wishes to, and returns where that is.
func (c *cli) waitMoved(ctx context.Context, p *plane, t *v1alpha1.Tenant, timeout time.Duration) ([]string, error) {
	var hosts []string
	goesOn := fmt.Sprintf("the move goes on: follow it with tenantctl get %s, or take it back with tenantctl move %s --anywhere", t.Name, t.Name)
	err := c.await(ctx, t.Name, timeout, fmt.Sprintf("tenant %q is not moved", t.Name), goesOn, func(ctx context.Context, progress *progress) error {
		return p.followTenant(ctx, t.Name, progress, func(now *v1alpha1.Tenant) (bool, error) {
			if now == nil || now.UID != t.UID || !now.DeletionTimestamp.IsZero() {
				return false, failed(exitFailed, "tenant %q was removed while it was moving", t.Name)
			}
			progress.show(moveSummary(now))
			// An older status knows nothing of the wish.
			if now.Status.ObservedGeneration < t.Generation || !placedAsWished(now) {
				return false, nil
			}
			hosts = now.Status.Placement
			if now.Status.Phase == v1alpha1.TenantAsleep {
				return true, nil // it will wake there
			}
			return now.Status.Phase != v1alpha1.TenantMoving && meta.IsStatusConditionTrue(now.Status.Conditions, v1alpha1.ConditionReady), nil
		})
	})
	return hosts, err
}

// placedAsWished says whether as many of the hosts that t wishes for run it as it has
// replicas for, and none that is on its way out runs it still.
func placedAsWished(t *v1alpha1.Tenant) bool {
	replicas := max(1, int(t.Spec.Replicas))
	granted := 0
	for _, name := range t.Spec.Placement.Hosts {
		if slices.Contains(t.Status.Placement, name) {
			granted++
		}
	}
	return len(t.Status.Placement) > 0 && len(t.Status.Placement) <= replicas && granted >= min(replicas, len(t.Spec.Placement.Hosts))
}

// moveSummary is where a tenant is and what keeps it from where it wishes to be.
func moveSummary(t *v1alpha1.Tenant) string {
	text := string(phase(t)) + " on " + cmp.Or(strings.Join(t.Status.Placement, ", "), "no host")
	reason := obstacle(t)
	if placed := meta.FindStatusCondition(t.Status.Conditions, v1alpha1.ConditionPlaced); placed != nil && placed.Status != metav1.ConditionTrue && placed.Message != "" {
		reason = placed.Message
	}
	if reason != "" {
		text += ": " + reason
	}
	return text
}

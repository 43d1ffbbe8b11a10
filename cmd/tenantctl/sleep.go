// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func (c *cli) sleepCommand() *cobra.Command {
	return c.requestCommand(v1alpha1.RequestSleep, &cobra.Command{
		Use:   "sleep NAME",
		Short: "Stop a tenant's control plane until somebody asks for it",
		Long: `Stop a tenant's control plane now, and keep its data. The next connection to the
tenant starts it again, as does "tenantctl wake"; the connection waits meanwhile.
A tenant that nobody uses falls asleep by itself: see spec.sleep of the Tenant.

A tenant does not fall asleep while it has nodes, several replicas, clients that
watch it, or work that is due by itself, such as a CronJob that is not suspended.
Then the command fails and says what it is.`,
		Example: `  tenantctl sleep acme
  tenantctl sleep acme --wait=false`,
	}, func(t *v1alpha1.Tenant) (string, error) {
		if t.Status.Phase == v1alpha1.TenantAsleep {
			return "asleep", nil
		}
		why := "somebody asked for it meanwhile"
		if awake := meta.FindStatusCondition(t.Status.Conditions, v1alpha1.ConditionAwake); awake != nil && awake.Reason == v1alpha1.ReasonKeptAwake {
			why = strings.TrimSuffix(awake.Message, ".")
		}
		return "", failed(exitFailed, "tenant %q is not asleep: %s", t.Name, why)
	})
}

func (c *cli) wakeCommand() *cobra.Command {
	return c.requestCommand(v1alpha1.RequestWake, &cobra.Command{
		Use:   "wake NAME",
		Short: "Start a tenant that is asleep",
		Long: `Start a tenant that is asleep, before somebody connects to it, and wait until it is
ready. It falls asleep again when nobody has used it for as long as spec.sleep of
the Tenant says. A tenant that is awake stays as it is.`,
		Example: `  tenantctl wake acme`,
	}, func(t *v1alpha1.Tenant) (string, error) {
		if t.Status.Phase == v1alpha1.TenantFailed {
			return "", failed(exitFailed, "tenant %q does not wake: %s; see tenantctl get %s", t.Name, strings.TrimSuffix(obstacle(t), "."), t.Name)
		}
		if !meta.IsStatusConditionTrue(t.Status.Conditions, v1alpha1.ConditionReady) {
			return "", nil
		}
		return "awake", nil
	})
}

// requestCommand completes a command that asks a tenant's host for something. When the
// host has seen to it, result says what the tenant is now, or nothing if it is not that
// far.
func (c *cli) requestCommand(what string, cmd *cobra.Command, result func(*v1alpha1.Tenant) (string, error)) *cobra.Command {
	var (
		wait    bool
		timeout time.Duration
		output  = outputTable
	)
	cmd.Args = cobra.ExactArgs(1)
	cmd.ValidArgsFunction = c.tenantName
	cmd.PreRunE = func(*cobra.Command, []string) error { return positive(timeout) }
	cmd.RunE = c.do(func(cmd *cobra.Command, args []string) error {
		p, t, err := find(cmd.Context(), c, (*plane).tenant, args[0])
		if err != nil {
			return err
		}
		err = change(cmd.Context(), p, t, func() { ask(t, what) })
		if err != nil {
			return err
		}
		is := "asked to " + what
		if wait {
			if is, err = c.waitSettled(cmd.Context(), p, t, what, timeout, result); err != nil {
				return err
			}
		}
		if !cmd.Flags().Changed("output") {
			fmt.Fprintf(c.out, "tenant %s is %s\n", t.Name, is)
			return nil
		}
		if output.isTable() {
			return printTenants(c.out, output, *t)
		}
		return printObject(c.out, output, t)
	})
	waitFlags(cmd.Flags(), &wait, "wait until it is done", &timeout, defaultTimeout)
	output.addTo(cmd)
	return cmd
}

// ask has t carry a request to its host.
func ask(t metav1.Object, what string) {
	annotations := maps.Clone(t.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[v1alpha1.RequestAnnotation] = what
	t.SetAnnotations(annotations)
}

// waitSettled waits until the request that t was given is seen to, brings t up to date
// and returns what it is then.
func (c *cli) waitSettled(ctx context.Context, p *plane, t *v1alpha1.Tenant, what string, timeout time.Duration, result func(*v1alpha1.Tenant) (string, error)) (string, error) {
	var is string
	goesOn := fmt.Sprintf("the request stays: follow it with tenantctl get %s", t.Name)
	err := c.await(ctx, t.Name, timeout, fmt.Sprintf("tenant %q did not %s", t.Name, what), goesOn, func(ctx context.Context, progress *progress) error {
		return p.followTenant(ctx, t.Name, progress, func(now *v1alpha1.Tenant) (done bool, err error) {
			if now == nil || now.UID != t.UID || !now.DeletionTimestamp.IsZero() {
				return false, failed(exitFailed, "tenant %q was removed meanwhile", t.Name)
			}
			progress.show(summary(now))
			switch now.Annotations[v1alpha1.RequestAnnotation] {
			case "":
				now.DeepCopyInto(t)
				is, err = result(now)
				return is != "", err
			case what:
				return false, nil
			default:
				return false, failed(exitFailed, "somebody has asked tenant %q for something else meanwhile; see tenantctl get %s", t.Name, t.Name)
			}
		})
	})
	return is, err
}

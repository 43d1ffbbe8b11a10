// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func (c *cli) hostCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "host",
		Short: "Add, empty and remove the hosts of the installation",
		Long: `Add, empty and remove the hosts of the installation: the machines that run
tenantd. Together they serve all tenants, and any of them answers for each.

A host joins with a token (host token). Before it is taken out of service for a
while it is drained (host drain), so that its tenants run elsewhere, and takes
tenants again afterwards (host resume). One that is not needed any more, or that
is lost, is removed (host remove).`,
		Example: `  tenantctl hosts
  tenantctl host token
  tenantctl host drain host-a && ssh host-a reboot
  tenantctl host resume host-a`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		c.hostListCommand("list", "ls"),
		c.hostGetCommand(),
		c.hostTokenCommand(),
		c.hostDrainCommand(),
		c.hostResumeCommand(),
		c.hostRemoveCommand(),
	)
	return cmd
}

// hostsCommand is short for host list.
func (c *cli) hostsCommand() *cobra.Command { return c.hostListCommand("hosts") }

func (c *cli) hostListCommand(name string, aliases ...string) *cobra.Command {
	var output = outputTable
	cmd := &cobra.Command{
		Use:     name,
		Aliases: aliases,
		Short:   "List the hosts of the installation",
		Long: `List the hosts of the installation, one to a line: name, role, state, version of
tenantd, number of tenants and age. "tenantctl hosts" is short for "tenantctl host
list". -o wide adds the address, memory in use and in all, how the host's etcd
member is, and processors that are busy and in all.

The role is what the host is to etcd, which holds all state:
  voter    has a copy and counts for the majority
  learner  has a copy and no vote: it is joining, or enough others vote

The state is one of:
  Joining   is being made a part of the installation
  Ready     serves tenants and takes more
  NotReady  does not answer or cannot serve; others take its tenants over
  Draining  its tenants move away, or have done so, and it takes no more
  Left      is no part of the installation any more

ETCD is "leader", "follower", or "lag=N" for a member that is N entries of the log
behind the leader.`,
		Example: `  tenantctl hosts
  tenantctl hosts -o wide
  tenantctl host list -o json | jq -r '.items[] | select(.status.state != "Ready") | .metadata.name'`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: c.do(func(cmd *cobra.Command, _ []string) error {
			p, err := c.connect()
			if err != nil {
				return err
			}
			list, err := p.hosts(cmd.Context())
			if err != nil {
				return err
			}
			return c.showList(output, list, "There are no hosts.", func() error { return printHosts(c.out, output, list.Items...) })
		}),
	}
	output.addTo(cmd)
	return cmd
}

func (c *cli) hostGetCommand() *cobra.Command {
	var output = outputTable
	cmd := &cobra.Command{
		Use:   "get NAME",
		Short: "Show a host and its conditions",
		Long: `Show a host: the line that "tenantctl hosts" has for it, and its conditions, which
say how it is and, while it is drained or removed, what that waits for.`,
		Example: `  tenantctl host get host-a
  tenantctl host get host-a -o yaml`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.hostName,
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			_, h, err := find(cmd.Context(), c, (*plane).host, args[0])
			if err != nil {
				return err
			}
			return c.show(output, h, h.Status.Conditions, func() error { return printHosts(c.out, output, *h) })
		}),
	}
	output.addTo(cmd)
	return cmd
}

// printHosts prints the columns that the Host's definition has, so that tenantctl and
// kubectl show the same; only that columns which a definition cannot join are joined.
func printHosts(w io.Writer, o output, hosts ...v1alpha1.Host) error {
	table := &metav1.Table{ColumnDefinitions: []metav1.TableColumnDefinition{
		{Name: "Name"}, {Name: "Role"}, {Name: "State"}, {Name: "Version"}, {Name: "Tenants"}, {Name: "Age"},
		{Name: "Address", Priority: 1}, {Name: "Memory", Priority: 1}, {Name: "Etcd", Priority: 1}, {Name: "Load", Priority: 1},
	}}
	for _, h := range hosts {
		s := h.Status
		tenants, cores := "", ""
		if s.Tenants != nil {
			tenants = strconv.Itoa(int(*s.Tenants))
		}
		if s.Cores > 0 {
			cores = strconv.Itoa(int(s.Cores))
		}
		table.Rows = append(table.Rows, row(
			h.Name, string(s.Role), string(state(&h)), s.Version, tenants, age(h.CreationTimestamp),
			s.Address, fraction(amount(s.Memory.Used), amount(s.Memory.Total)), member(s.Etcd), fraction(amount(s.Load), cores),
		))
	}
	return printers.NewTablePrinter(printers.PrintOptions{Wide: o == outputWide}).PrintObj(table, w)
}

// state is Joining until a host says otherwise.
func state(h *v1alpha1.Host) v1alpha1.HostState { return cmp.Or(h.Status.State, v1alpha1.HostJoining) }

// fraction is what is used of a total; either may be unknown.
func fraction(used, total string) string {
	if used == "" && total == "" {
		return ""
	}
	return cmp.Or(used, "-") + "/" + cmp.Or(total, "-")
}

// member is how an etcd member is, in one word.
func member(e *v1alpha1.HostEtcd) string {
	switch {
	case e == nil:
		return ""
	case e.Leader:
		return "leader"
	case e.Lag > 0:
		return "lag=" + strconv.FormatInt(e.Lag, 10)
	}
	return "follower"
}

// hostSummary is where a host is in its life and what it waits for.
func hostSummary(h *v1alpha1.Host) string {
	text := string(state(h))
	if h.Status.Tenants != nil {
		switch n := *h.Status.Tenants; n {
		case 1:
			text += ", 1 tenant"
		default:
			text += fmt.Sprintf(", %d tenants", n)
		}
	}
	if reason := hostObstacle(h); reason != "" {
		text += ": " + reason
	}
	return text
}

// hostObstacle is the message of the condition that says most about what is under way
// or amiss.
func hostObstacle(h *v1alpha1.Host) string {
	for _, kind := range []string{v1alpha1.ConditionLeaving, v1alpha1.ConditionReady, v1alpha1.ConditionDraining} {
		condition := meta.FindStatusCondition(h.Status.Conditions, kind)
		if condition == nil || condition.Message == "" {
			continue
		}
		// To be ready is as it should be; to leave or to drain is news.
		if isTrue := condition.Status == metav1.ConditionTrue; isTrue == (kind != v1alpha1.ConditionReady) {
			return condition.Message
		}
	}
	return ""
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func (c *cli) listCommand() *cobra.Command {
	var output = outputTable
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the tenants",
		Long: `List the tenants, one to a line: name, hostname, phase, the hosts that run it,
Kubernetes version and age. -o wide adds replicas, nodes, storage and memory.`,
		Example: `  tenantctl list
  tenantctl list -o wide
  tenantctl list -o json | jq -r '.items[] | select(.status.phase != "Ready") | .metadata.name'`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: c.do(func(cmd *cobra.Command, _ []string) error {
			p, err := c.connect()
			if err != nil {
				return err
			}
			list, err := p.tenants(cmd.Context())
			if err != nil {
				return err
			}
			return c.showList(output, list, "There are no tenants. Add one: tenantctl add NAME", func() error {
				return printTenants(c.out, output, list.Items...)
			})
		}),
	}
	output.addTo(cmd)
	return cmd
}

func (c *cli) getCommand() *cobra.Command {
	var output = outputTable
	cmd := &cobra.Command{
		Use:   "get NAME",
		Short: "Show a tenant and its conditions",
		Long: `Show a tenant: the line that "tenantctl list" has for it, and its conditions,
which say in what respect it is in order and, if it is not, why.`,
		Example: `  tenantctl get acme
  tenantctl get acme -o yaml`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.tenantName,
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			_, t, err := find(cmd.Context(), c, (*plane).tenant, args[0])
			if err != nil {
				return err
			}
			return c.show(output, t, t.Status.Conditions, func() error { return printTenants(c.out, output, *t) })
		}),
	}
	output.addTo(cmd)
	return cmd
}

// output is the form that objects are printed in; a flag.
type output string

const (
	outputTable output = "table"
	outputWide  output = "wide"
	outputJSON  output = "json"
	outputYAML  output = "yaml"
	outputName  output = "name"
)

func outputs() []string {
	return []string{string(outputTable), string(outputWide), string(outputJSON), string(outputYAML), string(outputName)}
}

func (o *output) String() string { return string(*o) }
func (o *output) Type() string   { return "format" }

func (o *output) Set(value string) error {
	if !slices.Contains(outputs(), value) {
		return fmt.Errorf("must be %s", strings.Join(outputs(), ", "))
	}
	*o = output(value)
	return nil
}

func (o *output) isTable() bool { return *o == outputTable || *o == outputWide }

func (o *output) addTo(cmd *cobra.Command) {
	cmd.Flags().VarP(o, "output", "o", "output format: "+strings.Join(outputs(), ", "))
	must(cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(outputs(), cobra.ShellCompDirectiveNoFileComp)))
}

// show prints an object in the form that was asked for. A table, which table prints, is
// followed by the object's conditions.
func (c *cli) show(o output, object runtime.Object, conditions []metav1.Condition, table func() error) error {
	if !o.isTable() {
		return printObject(c.out, o, object)
	}
	if err := table(); err != nil || len(conditions) == 0 {
		return err
	}
	fmt.Fprintln(c.out)
	return printConditions(c.out, conditions)
}

// showList prints a list in the form that was asked for. In place of a table without
// rows it says that there are none.
func (c *cli) showList(o output, list runtime.Object, none string, table func() error) error {
	switch {
	case !o.isTable():
		return printList(c.out, o, list)
	case meta.LenList(list) == 0:
		fmt.Fprintln(c.err, none)
		return nil
	}
	return table()
}

// setType says what an object or a list is, which a decoded one does not.
func setType(object runtime.Object) {
	kind := "Tenant"
	switch object.(type) {
	case *v1alpha1.TenantList:
		kind = "TenantList"
	case *v1alpha1.Host:
		kind = "Host"
	case *v1alpha1.HostList:
		kind = "HostList"
	}
	object.GetObjectKind().SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
}

// printObject prints an object in a form that is no table.
func printObject(w io.Writer, o output, object runtime.Object) error {
	setType(object)
	if of, ok := object.(metav1.Object); ok {
		of.SetManagedFields(nil) // only API servers read them
	}
	var printer printers.ResourcePrinter
	switch o {
	case outputJSON:
		printer = &printers.JSONPrinter{}
	case outputYAML:
		printer = &printers.YAMLPrinter{}
	default:
		printer = &printers.NamePrinter{}
	}
	return printer.PrintObj(object, w)
}

// printList prints a list in a form that is no table.
func printList(w io.Writer, o output, list runtime.Object) error {
	err := meta.EachListItem(list, func(item runtime.Object) error {
		if o == outputName {
			return printObject(w, o, item)
		}
		setType(item)
		item.(metav1.Object).SetManagedFields(nil)
		return nil
	})
	if err != nil || o == outputName {
		return err
	}
	return printObject(w, o, list)
}

// printTenants prints the columns that the Tenant's definition has, so that
// tenantctl and kubectl show the same; only that all hosts of a tenant are named.
func printTenants(w io.Writer, o output, tenants ...v1alpha1.Tenant) error {
	table := &metav1.Table{ColumnDefinitions: []metav1.TableColumnDefinition{
		{Name: "Name"}, {Name: "Hostname"}, {Name: "Phase"}, {Name: "Host"}, {Name: "Version"}, {Name: "Age"},
		{Name: "Replicas", Priority: 1}, {Name: "Nodes", Priority: 1}, {Name: "Storage", Priority: 1}, {Name: "Memory", Priority: 1},
	}}
	for _, t := range tenants {
		nodes := ""
		if t.Status.Nodes != nil {
			nodes = strconv.Itoa(int(*t.Status.Nodes))
		}
		table.Rows = append(table.Rows, row(
			t.Name, t.Spec.Hostname, string(phase(&t)), strings.Join(t.Status.Placement, ","), t.Status.Version, age(t.CreationTimestamp),
			strconv.Itoa(int(t.Spec.Replicas)), nodes, amount(t.Status.Storage), amount(t.Status.Memory),
		))
	}
	return printers.NewTablePrinter(printers.PrintOptions{Wide: o == outputWide}).PrintObj(table, w)
}

func printConditions(w io.Writer, conditions []metav1.Condition) error {
	table := &metav1.Table{ColumnDefinitions: []metav1.TableColumnDefinition{
		{Name: "Condition"}, {Name: "Status"}, {Name: "Since"}, {Name: "Reason"}, {Name: "Message"},
	}}
	for _, condition := range conditions {
		table.Rows = append(table.Rows, row(condition.Type, string(condition.Status), age(condition.LastTransitionTime), condition.Reason, condition.Message))
	}
	return printers.NewTablePrinter(printers.PrintOptions{}).PrintObj(table, w)
}

// row makes a row of a table. An empty cell is a dash, so that a line has the same
// number of words whatever is known.
func row(cells ...string) metav1.TableRow {
	r := metav1.TableRow{}
	for _, cell := range cells {
		r.Cells = append(r.Cells, cmp.Or(cell, "-"))
	}
	return r
}

func age(t metav1.Time) string {
	if t.IsZero() {
		return ""
	}
	return duration.HumanDuration(time.Since(t.Time))
}

func amount(q *resource.Quantity) string {
	if q == nil {
		return ""
	}
	return q.String()
}

// phase is Pending until a host says otherwise.
func phase(t *v1alpha1.Tenant) v1alpha1.TenantPhase {
	return cmp.Or(t.Status.Phase, v1alpha1.TenantPending)
}

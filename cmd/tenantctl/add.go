// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// defaultTimeout is several times what a tenant takes to start on a busy host.
const defaultTimeout = 2 * time.Minute

// tenantFlags are the flags of add that set a field of the spec.
type tenantFlags struct {
	hostname, konnectivityHostname string
	podCIDR, serviceCIDR           string
	certSANs                       []string
	replicas                       int32
}

func (f *tenantFlags) addTo(flags *pflag.FlagSet) {
	flags.StringVar(&f.hostname, "hostname", "", "DNS name of the API server (default NAME.<domain of the host>)")
	flags.StringVar(&f.konnectivityHostname, "konnectivity-hostname", "", "second DNS name, for the tunnel from the workers (default: the hostname)")
	flags.StringVar(&f.podCIDR, "pod-cidr", "", "range of the pods' addresses (default 10.244.0.0/16)")
	flags.StringVar(&f.serviceCIDR, "service-cidr", "", "range of the Services' addresses (default 10.96.0.0/16)")
	flags.StringArrayVar(&f.certSANs, "cert-san", nil, "further DNS name or IP address for the API server's certificate; may be repeated")
	flags.Int32Var(&f.replicas, "replicas", 0, "hosts that run the control plane at the same time (default 1)")
}

// apply sets the flags that were given; they win over what object has.
func (f *tenantFlags) apply(flags *pflag.FlagSet, object map[string]any) error {
	sans := make([]any, len(f.certSANs))
	for i, san := range f.certSANs {
		sans[i] = san
	}
	for _, set := range []struct {
		flag  string
		value any
		path  []string
	}{
		{"hostname", f.hostname, []string{"spec", "hostname"}},
		{"konnectivity-hostname", f.konnectivityHostname, []string{"spec", "konnectivityHostname"}},
		{"pod-cidr", f.podCIDR, []string{"spec", "network", "podCIDR"}},
		{"service-cidr", f.serviceCIDR, []string{"spec", "network", "serviceCIDR"}},
		{"cert-san", sans, []string{"spec", "certSANs"}},
		{"replicas", int64(f.replicas), []string{"spec", "replicas"}},
	} {
		if !flags.Changed(set.flag) {
			continue
		}
		if err := unstructured.SetNestedField(object, set.value, set.path...); err != nil {
			return failed(exitUsage, "set --%s: %w", set.flag, err)
		}
	}
	return nil
}

func (c *cli) addCommand() *cobra.Command {
	var (
		fields  tenantFlags
		file    string
		asleep  bool
		wait    bool
		timeout time.Duration
	)
	cmd := &cobra.Command{
		Use:   "add [NAME]",
		Short: "Add a tenant and wait until it is ready",
		Long: `Add a tenant: a Kubernetes cluster of its own, under a hostname of its own.

NAME is lower-case letters, digits and '-', at most 40 characters; "system" is
taken. Everything else has a default. -f reads a Tenant from a file, or from
standard input with "-"; a flag wins over the file, and NAME may be left out
when the file has it. A field that the file should not have is an error.

--asleep adds it without starting it, which the first connection does.

The command waits until the cluster can be used, and shows what it waits for.
When the time is up (exit code 4), or on Ctrl-C, the tenant stays and goes on
starting; "tenantctl remove" takes it back.`,
		Example: `  tenantctl add acme
  tenantctl add acme --hostname acme.example.com --cert-san 192.0.2.10
  tenantctl add -f tenant.yaml
  tenantctl get acme -o yaml | sed s/acme/beta/ | tenantctl add -f -`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		PreRunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && file == "" {
				return errors.New("name the tenant, or give a file with -f")
			}
			return positive(timeout)
		},
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			object := &unstructured.Unstructured{Object: map[string]any{}}
			if file != "" {
				var err error
				if object, err = c.readTenant(file); err != nil {
					return err
				}
			}
			object.SetAPIVersion(v1alpha1.GroupVersion.String())
			object.SetKind("Tenant")
			if len(args) == 1 {
				if named := object.GetName(); named != "" && named != args[0] {
					return failed(exitUsage, "%s is about tenant %q, the command line about %q; leave one of the two out", file, named, args[0])
				}
				object.SetName(args[0])
			}
			if object.GetName() == "" {
				return failed(exitUsage, "%s has no metadata.name; write it there, or name the tenant on the command line", file)
			}
			if err := fields.apply(cmd.Flags(), object.Object); err != nil {
				return err
			}
			if asleep {
				ask(object, v1alpha1.RequestSleep)
			}
			p, err := c.connect()
			if err != nil {
				return err
			}
			name := object.GetName()
			if err := request(cmd.Context(), func(ctx context.Context) error { return p.Create(ctx, object) }); err != nil {
				return err
			}
			if !wait {
				fmt.Fprintf(c.out, "tenant %s added\n", name)
				return nil
			}
			t, err := c.waitReady(cmd.Context(), p, name, timeout)
			if err != nil {
				return err
			}
			state := "ready"
			if t.Status.Phase == v1alpha1.TenantAsleep {
				state = "asleep"
			}
			fmt.Fprintf(c.out, "tenant %s is %s at https://%s\n", name, state, t.Status.Endpoint)
			return nil
		}),
	}
	fields.addTo(cmd.Flags())
	cmd.Flags().StringVarP(&file, "filename", "f", "", "file with a Tenant in YAML or JSON; - is standard input")
	must(cmd.MarkFlagFilename("filename", "yaml", "yml", "json"))
	cmd.Flags().BoolVar(&asleep, "asleep", false, "do not start it before somebody connects")
	waitFlags(cmd.Flags(), &wait, "wait until the tenant is ready", &timeout, defaultTimeout)
	return cmd
}

// readTenant reads a Tenant as it is written, so that a field set to its zero value
// is told from one that is left to its default.
func (c *cli) readTenant(file string) (*unstructured.Unstructured, error) {
	var data []byte
	var err error
	if file == "-" {
		file = "standard input"
		data, err = io.ReadAll(c.in)
	} else {
		data, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, failed(exitUsage, "read the tenant: %w", err)
	}
	if _, err := v1alpha1.ParseTenant(file, data); err != nil {
		return nil, failed(exitUsage, "%w", err)
	}
	object := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(data, &object.Object); err != nil {
		return nil, failed(exitUsage, "%s: %w", file, err)
	}
	dropNulls(object.Object)
	// What a server wrote into a tenant belongs to the tenant it was read from.
	unstructured.RemoveNestedField(object.Object, "status")
	object.SetResourceVersion("")
	object.SetUID("")
	object.SetManagedFields(nil)
	object.SetFinalizers(nil)
	return object, nil
}

// dropNulls removes the fields that are null, which mean the same as fields that are
// not there but take no flag's value.
func dropNulls(object map[string]any) {
	for name, value := range object {
		switch value := value.(type) {
		case nil:
			delete(object, name)
		case map[string]any:
			dropNulls(value)
		}
	}
}

// waitReady shows how a tenant starts until it can be used.
func (c *cli) waitReady(ctx context.Context, p *plane, name string, timeout time.Duration) (*v1alpha1.Tenant, error) {
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	progress := c.newProgress(name + ": ")
	defer progress.close()
	var last *v1alpha1.Tenant
	err := p.followTenant(waiting, name, progress, func(t *v1alpha1.Tenant) (bool, error) {
		if t == nil || !t.DeletionTimestamp.IsZero() {
			return false, failed(exitFailed, "tenant %q was removed while it was starting; add it again with: tenantctl add %s", name, name)
		}
		last = t
		progress.show(summary(t))
		if t.Status.Phase == v1alpha1.TenantFailed {
			return false, failed(exitFailed, "tenant %q failed to start: %s; see tenantctl get %s, correct it with kubectl edit tenant %s, or take it back with tenantctl remove %s",
				name, strings.TrimSuffix(obstacle(t), "."), name, name, name)
		}
		return t.Status.Phase == v1alpha1.TenantAsleep || meta.IsStatusConditionTrue(t.Status.Conditions, v1alpha1.ConditionReady), nil
	})
	stands := string(v1alpha1.TenantPending)
	if last != nil {
		stands = summary(last)
	}
	switch {
	case err == nil:
		return last, nil
	case ctx.Err() != nil:
		return nil, failed(exitFailed, "interrupted; tenant %q stays and goes on starting (%s): follow it with tenantctl get %s, or take it back with tenantctl remove %s", name, stands, name, name)
	case waiting.Err() != nil:
		return nil, failed(exitTimedOut, "tenant %q is not ready after %s (%s); it goes on starting: follow it with tenantctl get %s, or take it back with tenantctl remove %s", name, timeout, stands, name, name)
	}
	return nil, err
}

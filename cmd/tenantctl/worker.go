// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/worker/bundle"
	"github.com/tenantd/tenantd/worker/config"
)

func (c *cli) workerCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "worker",
		Short: "Prepare machines that are to be workers",
		Long: `Prepare machines that are to be workers of a tenant. kubeadm joins them
(tenantctl join-command); what kubeadm has no part in is made here.`,
		Example:           `  tenantctl worker bundle acme --output acme-worker.tar.gz`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(c.workerBundleCommand())
	return cmd
}

func (c *cli) workerBundleCommand() *cobra.Command {
	var (
		output, program, carrier string
		hosts                    []string
	)
	cmd := &cobra.Command{
		Use:   "bundle NAME",
		Short: "Write one archive with all that a worker of a tenant needs of tenantd",
		Long: `Write a tar.gz with tenant-proxy, its configuration for the tenant, the tenant's
CA, the systemd unit and install.sh, which installs them without network. The
same archive is for all workers of the tenant. It holds no secret.

tenant-proxy gives pods and kubelets the API server on their own machine, and the
API server a way to kubelets and pods: exec, logs, webhooks. The program is taken
from beside tenantctl, or from --tenant-proxy for machines of another kind.`,
		Example: `  tenantctl worker bundle acme --output acme-worker.tar.gz
  scp acme-worker.tar.gz worker-1: && ssh worker-1 'tar xzf acme-worker.tar.gz && sudo tenant-proxy/install.sh'
  tenantctl worker bundle acme --tenant-proxy ./tenant-proxy-arm64 --host 192.0.2.10:443`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.tenantName,
		PreRunE: func(*cobra.Command, []string) error {
			// What the tenant adds later is in order.
			judged := config.Config{Hostname: "tenant.invalid", Hosts: hosts, Carrier: carrier}
			if len(hosts) == 0 {
				judged.Hosts = []string{"tenant.invalid:443"}
			}
			judged.SetDefaults()
			return judged.Validate()
		},
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			if program == "" {
				var err error
				if program, err = besideSelf("tenant-proxy"); err != nil {
					return err
				}
			}
			p, err := c.connect()
			if err != nil {
				return err
			}
			r := v1alpha1.WorkerConfigRequest{}
			r.SetDefaults()
			if err := p.credentials(cmd.Context(), v1alpha1.CredentialsPath(args[0], v1alpha1.WorkerConfigSubresource), &r); err != nil {
				return err
			}
			s := r.Status
			if s.Hostname == "" || len(s.CA) == 0 {
				return errors.New("the answer has no hostname or no CA; is the host of another version than tenantctl?")
			}
			if len(hosts) == 0 {
				hosts = s.Hosts
			}
			if len(hosts) == 0 { // then DNS has to know
				hosts = []string{net.JoinHostPort(s.Hostname, strconv.Itoa(s.Port))}
			}
			var archive bytes.Buffer
			if err := bundle.Write(&archive, bundle.Bundle{
				Config: config.Config{Hostname: s.Hostname, Hosts: hosts, KonnectivityHostname: s.KonnectivityHostname, VIP: s.WorkerVIP, Carrier: carrier},
				CA:     s.CA,
				Binary: program,
			}); err != nil {
				return err
			}
			if output == "" {
				output = args[0] + "-worker.tar.gz"
			}
			if output == "-" {
				_, err := c.out.Write(archive.Bytes())
				return err
			}
			if err := os.WriteFile(output, archive.Bytes(), 0o644); err != nil { //nolint:gosec // no secret in it
				return fmt.Errorf("write the bundle: %w", err)
			}
			fmt.Fprintf(c.err, "wrote %s; on a worker: tar xzf %s && sudo %s/%s\n", output, filepath.Base(output), bundle.Directory, bundle.Script)
			return nil
		}),
	}
	flags := cmd.Flags()
	flags.StringVarP(&output, "output", "o", "", `file to write, "-" for standard output (default NAME-worker.tar.gz)`)
	flags.StringVar(&program, "tenant-proxy", "", "program to put into it (default: the one beside tenantctl)")
	flags.StringVar(&carrier, "carrier", "", "how the workers' connections travel: tls, proxy2 or auto (default "+config.DefaultCarrier+")")
	flags.StringArrayVar(&hosts, "host", nil, "IP:PORT or NAME:PORT of a host to begin with; may be repeated (default: those of the installation)")
	must(cmd.MarkFlagFilename("output", "tar.gz", "tgz"))
	must(cmd.MarkFlagFilename("tenant-proxy"))
	must(cmd.RegisterFlagCompletionFunc("carrier", cobra.FixedCompletions([]string{"tls", "proxy2", "auto"}, cobra.ShellCompDirectiveNoFileComp)))
	must(cmd.RegisterFlagCompletionFunc("host", cobra.NoFileCompletions))
	return cmd
}

// besideSelf finds a program that is installed beside this one.
func besideSelf(name string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find %s: %w; name it with --%s", name, err, name)
	}
	path := filepath.Join(filepath.Dir(self), name)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return "", failed(exitFailed, "there is no %s; install it there, or name one with --%s", path, name)
	}
	return path, nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/host"
)

func newSnapshotCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshot",
		Short: "Save the data of all tenants, and restore it",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			return usageError{fmt.Errorf("save or restore? See `tenantd snapshot --help`")}
		},
	}
	cmd.AddCommand(newSnapshotSaveCommand(), newSnapshotRestoreCommand())
	return cmd
}

// oneFile wants one argument.
func oneFile(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usageError{fmt.Errorf("%s takes one FILE; see `%s --help`", cmd.CommandPath(), cmd.CommandPath())}
	}
	return nil
}

// settings are what the two commands share with run: its file, and flags that win.
type settings struct {
	file  string
	flags v1alpha1.HostConfiguration
}

func (s *settings) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.file, "config", "", "configuration file of tenantd run, for what flags do not say")
	cmd.Flags().StringVar(&s.flags.DataDir, "data-dir", "", "the host's data directory (default "+v1alpha1.DefaultDataDir+")")
	if err := cmd.MarkFlagFilename("config", "yaml", "yml"); err != nil {
		panic(err) // a flag of that name is not there
	}
}

// load is the configuration.
func (s *settings) load() (v1alpha1.HostConfiguration, error) {
	cfg := &v1alpha1.HostConfiguration{}
	if s.file != "" {
		var err error
		if cfg, err = v1alpha1.LoadHostConfiguration(s.file); err != nil {
			return *cfg, err
		}
	}
	for _, f := range []struct{ of, flag *string }{
		{&cfg.DataDir, &s.flags.DataDir}, {&cfg.Name, &s.flags.Name}, {&cfg.Domain, &s.flags.Domain}, {&cfg.SealingKeyFile, &s.flags.SealingKeyFile},
	} {
		*f.of = cmp.Or(*f.flag, *f.of)
	}
	if err := cfg.Validate(); err != nil {
		return *cfg, usageError{err}
	}
	return *cfg, nil
}

// interruptible ends with a signal.
func interruptible() (context.Context, context.CancelFunc) {
	// Nothing that is written is anybody else's to read.
	syscall.Umask(0o077)
	return signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
}

func newSnapshotSaveCommand() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "save FILE",
		Short: "Write the data of all tenants to a file",
		Long: `Save writes what this host's store has, which is what all hosts have, to a file
that only its owner can read. Run it as the host's user or as root. It replaces
FILE when the snapshot is whole.

The host may run, with or without the others. If it does not, its files are read:
that is the way to what is left when most hosts are gone for good.

A snapshot is of no use without the sealing key. Keep a copy of that elsewhere.
Audit logs are not in it.`,
		Example: `  tenantd snapshot save /var/backups/tenantd-$(date +%F).db`,
		Args:    oneFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := s.load()
			if err != nil {
				return err
			}
			cfg.SetDefaults()
			ctx, stop := interruptible()
			defer stop()
			saved, err := host.SaveSnapshot(ctx, cfg.DataDir, args[0], newLogger(os.Stderr, v1alpha1.DefaultLogLevel, cfg.LogFormat))
			if err != nil {
				return err
			}
			how := "the running host"
			if saved.Stopped {
				how = "the files of the host, which does not run"
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "Saved %s from %s: %d bytes, sha256 %s\n", saved.File, how, saved.Bytes, saved.SHA256)
			return err
		},
	}
	s.add(cmd)
	return cmd
}

func newSnapshotRestoreCommand() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Make a new host of a snapshot",
		Long: `Restore makes an empty data directory that of the only host of the installation
that a snapshot is of: its tenants, their data and their credentials, so kubeconfigs
and workers go on as before once the tenants' names lead to this host.

It needs the installation's sealing key, in the data directory or where
--sealing-key-file says.

It is for when no host is left, or too few ever to write again. The hosts that there
were must not run any more: two installations would serve the same tenants. They
join the restored one like new machines, with empty data directories.

What was written after the snapshot is lost. Clients start their watches anew.`,
		Example: `  # All hosts are lost
  tenantd snapshot restore /var/backups/tenantd-2026-11-21.db --sealing-key-file /etc/tenantd/sealing.key

  # Most hosts are lost; this one is left and stopped
  tenantd snapshot save /var/tmp/last.db
  mv /var/lib/tenantd /var/lib/tenantd.old
  tenantd snapshot restore /var/tmp/last.db --sealing-key-file /etc/tenantd/sealing.key`,
		Args: oneFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := s.load()
			if err != nil {
				return err
			}
			ctx, stop := interruptible()
			defer stop()
			r, err := host.RestoreSnapshot(ctx, cfg, args[0], newLogger(os.Stderr, v1alpha1.DefaultLogLevel, cfg.LogFormat))
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), `Restored installation %s, domain %s, with %d tenants as host %q in %s
Next:
- start it with that data directory, name and sealing key (%s), and without join;
- have the tenants' names lead to it;
- let other hosts join with empty data directories (tenantctl host token). Those that there were must not run any more with their old ones.
`, r.Installation, r.Domain, r.Tenants, r.Host, r.DataDir, r.SealingKeyFile)
			return err
		},
	}
	s.add(cmd)
	f := cmd.Flags()
	f.StringVar(&s.flags.Name, "name", "", "name of the host (default the machine's host name)")
	f.StringVar(&s.flags.Domain, "domain", "", "DNS zone of the tenants' names, if the snapshot does not say")
	f.StringVar(&s.flags.SealingKeyFile, "sealing-key-file", "", "file with the installation's sealing key (default in the data directory)")
	if err := cmd.MarkFlagDirname("data-dir"); err != nil {
		panic(err) // a flag of that name is not there
	}
	return cmd
}

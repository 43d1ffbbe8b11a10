// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is stamped by the linker: -X main.version=v1.2.3.
var version string

// buildVersion is the stamp, or else what the Go toolchain knows.
func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

func (c *cli) versionCommand() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:               "version",
		Short:             "Print the version of tenantctl",
		Long:              "Print the version of tenantctl, and of what it was built with and for.",
		Example:           "  tenantctl version -o json",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		PreRunE: func(*cobra.Command, []string) error {
			if format != "" && format != "json" {
				return fmt.Errorf("invalid argument %q for -o: must be json", format)
			}
			return nil
		},
		RunE: c.do(func(*cobra.Command, []string) error {
			v := struct {
				Version   string `json:"version"`
				GoVersion string `json:"goVersion"`
				Platform  string `json:"platform"`
			}{buildVersion(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
			if format == "json" {
				encoder := json.NewEncoder(c.out)
				encoder.SetIndent("", "  ")
				return encoder.Encode(v)
			}
			fmt.Fprintf(c.out, "tenantctl %s (%s, %s)\n", v.Version, v.GoVersion, v.Platform)
			return nil
		}),
	}
	cmd.Flags().StringVarP(&format, "output", "o", "", "output format: json")
	must(cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"json"}, cobra.ShellCompDirectiveNoFileComp)))
	return cmd
}

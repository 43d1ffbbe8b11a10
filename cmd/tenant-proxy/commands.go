// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenantd/tenantd/worker"
	"github.com/tenantd/tenantd/worker/api"
	"github.com/tenantd/tenantd/worker/check"
	"github.com/tenantd/tenantd/worker/config"
	"github.com/tenantd/tenantd/worker/install"
	"github.com/tenantd/tenantd/worker/kubelet"
)

// answerTimeout bounds a question to the process on this machine, and one through
// it to a host.
const answerTimeout = 10 * time.Second

func (c *cli) installCommand() *cobra.Command {
	var o install.Options
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install from an unpacked bundle",
		Long: `Install puts the program, its unit, the configuration and the tenant's CA of an
unpacked bundle (tenantctl worker bundle) in place, and starts it. If it runs
already, the new one takes over without a connection being refused. It needs no
network. A configuration that differs is kept as config.yaml.old.`,
		Example:           "  tar xzf acme.tar.gz && tenant-proxy/install.sh",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: c.do(func(ctx context.Context) error {
			if o.From == "" {
				program, err := os.Executable()
				if err != nil {
					return fmt.Errorf("find out where the bundle is: %w; name it with --from", err)
				}
				o.From = filepath.Dir(program)
			}
			next, err := install.Install(ctx, o)
			if err != nil {
				return err
			}
			fmt.Fprintln(c.out, "tenant-proxy is installed; look at the machine with: tenant-proxy check")
			if next != "" {
				fmt.Fprintln(c.out, next)
			}
			return nil
		}),
	}
	placeFlags(cmd, &o)
	cmd.Flags().StringVar(&o.From, "from", "", "directory of the unpacked bundle (default: where this program is)")
	must(cmd.MarkFlagDirname("from"))
	return cmd
}

func (c *cli) uninstallCommand() *cobra.Command {
	var o install.Options
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove tenant-proxy and its address",
		Long: `Uninstall stops tenant-proxy and removes the program, its unit, configuration,
cache and address. Pods on this machine cannot reach the API server afterwards.`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: c.do(func(ctx context.Context) error {
			if err := install.Uninstall(ctx, o); err != nil {
				return err
			}
			fmt.Fprintln(c.out, "tenant-proxy is removed")
			return nil
		}),
	}
	placeFlags(cmd, &o)
	return cmd
}

func placeFlags(cmd *cobra.Command, o *install.Options) {
	cmd.Flags().StringVar(&o.Prefix, "prefix", install.DefaultPrefix, "where the program goes")
	cmd.Flags().StringVar(&o.Root, "root", "", "another file system than this machine's, such as an image; nothing is started there")
	must(cmd.MarkFlagDirname("prefix"))
	must(cmd.MarkFlagDirname("root"))
}

func (c *cli) checkCommand() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Look for what keeps tenant-proxy from working here",
		Long: `Check looks at the address, the port, the hosts by each carrier, the clock, the
certificates and the unit, and says of each whether it is in order and what to do
if not. It changes nothing, and works before tenant-proxy runs. Run it as root.`,
		Example:           "  tenant-proxy check -o json",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: c.do(func(ctx context.Context) error {
			file, err := config.Load(c.config)
			if err != nil {
				return err
			}
			findings := check.Machine(ctx, check.Config{File: file})
			if format == "json" {
				if err := c.json(findings); err != nil {
					return err
				}
			} else {
				table := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
				for _, f := range findings {
					fmt.Fprintf(table, "%s\t%s\t%s\n", f.State, f.About, oneLine(f.Text))
					if f.Remedy != "" {
						fmt.Fprintf(table, "\t\t→ %s\n", f.Remedy)
					}
				}
				if err := table.Flush(); err != nil {
					return err
				}
			}
			for _, f := range findings {
				if f.State == check.Failed {
					return errSaid
				}
			}
			return nil
		}),
	}
	outputFlag(cmd, &format)
	return cmd
}

func (c *cli) statusCommand() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:               "status",
		Short:             "Show the state of the tenant-proxy that runs here",
		Long:              "Status shows the hosts, the connections and the tunnel of the tenant-proxy that runs here.",
		Example:           "  tenant-proxy status -o json",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: c.do(func(ctx context.Context) error {
			file, err := config.Load(c.config)
			if err != nil {
				return err
			}
			s, err := status(ctx, file)
			if err != nil {
				return err
			}
			if format == "json" {
				return c.json(s)
			}
			return c.show(s)
		}),
	}
	outputFlag(cmd, &format)
	return cmd
}

// status asks the process that runs here.
func status(ctx context.Context, file *config.Config) (*worker.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+file.HealthListen+"/status", nil)
	if err != nil {
		return nil, fmt.Errorf("ask tenant-proxy at %s: %w", file.HealthListen, err)
	}
	// Never through a proxy of the environment.
	transport := &http.Transport{DisableKeepAlives: true}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return nil, fmt.Errorf("tenant-proxy does not answer at %s: %w; start it with systemctl start tenant-proxy, or see journalctl -u tenant-proxy", file.HealthListen, err)
	}
	defer response.Body.Close()
	s := &worker.Status{}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("what answers at %s is not tenant-proxy: it says %s; set another healthListen", file.HealthListen, response.Status)
	}
	if err := json.NewDecoder(response.Body).Decode(s); err != nil {
		return nil, fmt.Errorf("read the answer of tenant-proxy at %s: %w", file.HealthListen, err)
	}
	return s, nil
}

func (c *cli) show(s *worker.Status) error {
	state := "ready"
	if !s.Ready {
		state = "not ready: " + s.Problem
	}
	fmt.Fprintf(c.out, "%s at %s on %s: %s\n%d connections\n\n", s.Tenant, s.Endpoint, s.Device, state, s.Connections)
	table := tabwriter.NewWriter(c.out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "HOST\tHEALTHY\tCARRIER\tCONNECTIONS\tTUNNEL\tERROR")
	tunnels := map[string]string{}
	for _, t := range s.Tunnel.Servers {
		tunnels[t.Server] = "connected"
		if !t.Connected {
			tunnels[t.Server] = oneLine(t.Error)
		}
	}
	for _, h := range s.Hosts {
		tunnel := tunnels[h.Address.String()]
		if tunnel == "" {
			tunnel = "-"
		}
		fmt.Fprintf(table, "%s\t%t\t%s\t%d\t%s\t%s\n", h.Address, h.Healthy, h.Carrier, h.Connections, tunnel, oneLine(h.Error))
	}
	if s.Tunnel.Problem != "" {
		fmt.Fprintf(table, "\nThe tunnel waits: %s\n", oneLine(s.Tunnel.Problem))
	}
	return table.Flush()
}

func (c *cli) adoptCommand() *cobra.Command {
	var revert, force bool
	cmd := &cobra.Command{
		Use:   "adopt-kubelet",
		Short: "Have the kubelet reach its API server through tenant-proxy",
		Long: `Adopt-kubelet changes the kubelet's kubeconfig so that the kubelet, too, is spread
over the hosts and outlives one of them. It does so only if the API server answers
that way. The kubeconfig as kubeadm wrote it is kept, and --revert puts it back.
The kubelet reads it when it starts.`,
		Example:           "  tenant-proxy adopt-kubelet && systemctl restart kubelet",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: c.do(func(ctx context.Context) error {
			file, err := config.Load(c.config)
			if err != nil {
				return err
			}
			var changed bool
			if revert {
				changed, err = kubelet.Revert(file.KubeletKubeconfig)
			} else {
				if !force {
					if err := answers(ctx, file); err != nil {
						return err
					}
				}
				changed, err = kubelet.Adopt(file.KubeletKubeconfig, "https://"+file.Endpoint().String(), file.Hostname)
			}
			switch {
			case err != nil:
				return err
			case changed:
				fmt.Fprintf(c.out, "%s is changed; restart the kubelet: systemctl restart kubelet\n", file.KubeletKubeconfig)
			default:
				fmt.Fprintf(c.out, "%s needs no change\n", file.KubeletKubeconfig)
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&revert, "revert", false, "put the kubeconfig back as it was")
	cmd.Flags().BoolVar(&force, "force", false, "do not ask the API server first")
	return cmd
}

// answers asks the API server the way that the kubelet is to take.
func answers(ctx context.Context, file *config.Config) error {
	roots, err := worker.Roots(file)
	if err != nil {
		return err
	}
	endpoint := file.Endpoint().String()
	client := api.New(api.Config{Hostname: file.Hostname, RootCAs: roots, Dial: func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", endpoint)
	}})
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if _, err := client.Ready(ctx); err != nil {
		return fmt.Errorf("the API server does not answer at %s, so the kubelet stays as it is: %w; see: tenant-proxy status", endpoint, err)
	}
	return nil
}

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
		Short:             "Print the version of tenant-proxy",
		Long:              "Print the version of tenant-proxy, and of what it was built with and for.",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: c.do(func(context.Context) error {
			v := struct {
				Version   string `json:"version"`
				GoVersion string `json:"goVersion"`
				Platform  string `json:"platform"`
			}{buildVersion(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
			if format == "json" {
				return c.json(v)
			}
			fmt.Fprintf(c.out, "tenant-proxy %s (%s, %s)\n", v.Version, v.GoVersion, v.Platform)
			return nil
		}),
	}
	outputFlag(cmd, &format)
	return cmd
}

func (c *cli) json(v any) error {
	encoder := json.NewEncoder(c.out)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(v); err != nil {
		return fmt.Errorf("write the answer: %w", err)
	}
	return nil
}

// oneLine joins the lines of an error.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

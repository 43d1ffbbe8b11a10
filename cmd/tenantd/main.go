// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Command tenantd runs many Kubernetes control planes in one process.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	kubeversion "k8s.io/component-base/version"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/host"
	"github.com/tenantd/tenantd/host/heap"
)

// version is the release, stamped in by the linker.
var version = "v0.0.0-dev"

// Exit codes, as in `tenantctl`.
const (
	exitFailed = 1
	exitUsage  = 2
)

// gcPercent is lower than Go's 100: the heap of many idle control planes is large
// and hardly changes, so collecting it sooner costs little and saves memory. Package
// heap raises it while a host is busy, and GOGC overrides both.
const gcPercent = 50

// leastProcs is how many goroutines may run at once at least, on a machine with fewer
// processors too. Go's scheduler looks for what came from the network when one of
// its Ps has nothing else to do, or every 10 ms. Where a tenant's list and the garbage
// collector keep two Ps busy, everybody's requests wait for that at each step. With
// Ps to spare the kernel shares the processors out, and soon. GOMAXPROCS overrides it;
// beside a flood there are more (package limit).
const leastProcs = 4

// The first thread is left to the main goroutine, which mostly waits. Requests that are
// lowered (package limit) cannot use it.
func init() { runtime.LockOSThread() }

func main() {
	// Upstream's clients honour these. What a control plane dials must never leave
	// by way of the host's proxy.
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"} {
		if err := os.Unsetenv(name); err != nil {
			panic(err) // only a malformed name fails
		}
	}
	if os.Getenv("GOGC") == "" {
		heap.Pace(gcPercent)
	}
	if os.Getenv("GOMAXPROCS") == "" && runtime.GOMAXPROCS(0) < leastProcs {
		runtime.GOMAXPROCS(leastProcs)
	}
	cmd := newCommand()
	if err := cmd.Execute(); err != nil {
		for line := range strings.Lines(err.Error()) {
			fmt.Fprintln(os.Stderr, "tenantd:", strings.TrimRight(line, "\n"))
		}
		var usage usageError
		if errors.As(err, &usage) {
			os.Exit(exitUsage)
		}
		os.Exit(exitFailed)
	}
}

// usageError is a mistake in how the command was called.
type usageError struct{ error }

func newCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "tenantd",
		Short: "Many Kubernetes control planes in one process, behind one port",
		Long: `tenantd runs many Kubernetes control planes (API server, controllers, scheduler)
in one process on a plain machine, behind one TLS port where the client's SNI
tells them apart. It needs no Kubernetes cluster under it.

Clusters are added and removed with tenantctl.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArgs,
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; see `%s --help`", err, cmd.CommandPath())}
	})
	root.AddCommand(newRunCommand(), newSnapshotCommand(), newVersionCommand())
	return root
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("%s takes no argument %q; see `%s --help`", cmd.CommandPath(), args[0], cmd.CommandPath())}
	}
	if !cmd.HasParent() {
		return usageError{errors.New("no command given; see `tenantd --help`")}
	}
	return nil
}

func newRunCommand() *cobra.Command {
	var (
		file  string
		flags v1alpha1.HostConfiguration
	)
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the host",
		Long: `Run runs the host until SIGTERM or SIGINT, and then stops it in order: requests
in flight are answered first. A second signal ends it at once.

An empty data directory becomes a new installation, or with --join another host
of one. The host writes the administrator's kubeconfig to
<data-dir>/admin.kubeconfig; tenantctl and kubectl use it to manage tenants.

Settings come from the file given with --config and from flags; a flag wins.`,
		Example: `  # On a server, with names below k8s.example.com that resolve to it
  tenantd run --domain k8s.example.com

  # One more host of that installation
  tenantd run --advertise-address 192.0.2.11 --join 192.0.2.10:443 --join-token-file /etc/tenantd/join-token

  # To try it out, as any user
  tenantd run --listen 127.0.0.1:8443 --advertise-address 127.0.0.1 --data-dir ./data`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg := &v1alpha1.HostConfiguration{}
			if file != "" {
				loaded, err := v1alpha1.LoadHostConfiguration(file)
				if err != nil {
					return err
				}
				cfg = loaded
			}
			for name, set := range map[string]func(){
				"data-dir":          func() { cfg.DataDir = flags.DataDir },
				"listen":            func() { cfg.Listen = flags.Listen },
				"domain":            func() { cfg.Domain = flags.Domain },
				"name":              func() { cfg.Name = flags.Name },
				"advertise-address": func() { cfg.AdvertiseAddress = flags.AdvertiseAddress },
				"join":              func() { cfg.Join.Server = flags.Join.Server },
				"join-token-file":   func() { cfg.Join.TokenFile = flags.Join.TokenFile },
				"peer-listen":       func() { cfg.Peer.Listen = flags.Peer.Listen },
				"gossip-listen":     func() { cfg.Gossip.Listen = flags.Gossip.Listen },
				"health-listen":     func() { cfg.HealthListen = flags.HealthListen },
				"sealing-key-file":  func() { cfg.SealingKeyFile = flags.SealingKeyFile },
				"log-level":         func() { cfg.LogLevel = flags.LogLevel },
				"log-format":        func() { cfg.LogFormat = flags.LogFormat },
			} {
				if cmd.Flags().Changed(name) {
					set()
				}
			}
			if err := cfg.Validate(); err != nil {
				return usageError{err}
			}
			return run(cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&file, "config", "", "configuration file (kind HostConfiguration)")
	f.StringVar(&flags.DataDir, "data-dir", "", "directory for everything the host keeps (default "+v1alpha1.DefaultDataDir+")")
	f.StringVar(&flags.Listen, "listen", "", "address of the one port, [HOST]:PORT (default "+v1alpha1.DefaultListen+")")
	f.StringVar(&flags.Domain, "domain", "", "DNS zone of the tenants' names (default "+v1alpha1.DefaultDomain+")")
	f.StringVar(&flags.Name, "name", "", "name of this host (default the machine's host name)")
	f.StringVar(&flags.AdvertiseAddress, "advertise-address", "", "IP[:PORT] that clients are told to use instead of the tenants' names, until there is DNS")
	f.StringVar(&flags.Join.Server, "join", "", "HOST:PORT of a host of the installation to become a part of; for an empty data directory, ignored later")
	f.StringVar(&flags.Join.TokenFile, "join-token-file", "", "file with the token of tenantctl host token, for --join")
	f.StringVar(&flags.Peer.Listen, "peer-listen", "", "IP:PORT for the etcd members of other hosts (default port "+strconv.Itoa(v1alpha1.DefaultPeerPort)+" of the advertise address with --join, otherwise none: the host runs alone)")
	f.StringVar(&flags.Gossip.Listen, "gossip-listen", "", "IP:PORT, TCP and UDP, for the gossip of other hosts (default port "+strconv.Itoa(v1alpha1.DefaultGossipPort)+" of the advertise address with --join, otherwise none: the host runs alone)")
	f.StringVar(&flags.HealthListen, "health-listen", "", "address of /livez, /readyz and /metrics (default "+v1alpha1.DefaultHealthListen+")")
	f.StringVar(&flags.SealingKeyFile, "sealing-key-file", "", "file with the 32-byte key that seals private keys at rest (default in the data directory)")
	f.StringVar(&flags.LogLevel, "log-level", "", "debug, info, warn or error (default "+v1alpha1.DefaultLogLevel+")")
	f.StringVar(&flags.LogFormat, "log-format", "", "text or json (default "+v1alpha1.DefaultLogFormat+")")
	if err := errors.Join(cmd.MarkFlagFilename("config", "yaml", "yml"), cmd.MarkFlagDirname("data-dir"), cmd.MarkFlagFilename("join-token-file")); err != nil {
		panic(err) // a flag of that name is not there
	}
	return cmd
}

func run(cfg *v1alpha1.HostConfiguration) error {
	// What the daemon writes is nobody else's to read, and its core would hold
	// every tenant's keys.
	syscall.Umask(0o077)
	if err := forbidCoreDumps(); err != nil {
		return err
	}
	filled := *cfg
	filled.SetDefaults()
	log := newLogger(os.Stderr, filled.LogLevel, filled.LogFormat)
	restore, err := captureStderr(log)
	if err != nil {
		return err
	}
	defer restore()
	h, err := host.New(host.Config{HostConfiguration: *cfg, Version: version, Logger: log})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		log.Info("signal received", "signal", (<-signals).String())
		stop()
		log.Warn("second signal received: ending at once", "signal", (<-signals).String())
		os.Exit(exitFailed)
	}()
	log.Info("tenantd", "version", version, "kubernetes", kubeversion.Get().GitVersion, "go", runtime.Version())
	return h.Run(ctx)
}

// forbidCoreDumps keeps the memory, which has every tenant's keys, out of core dumps.
// The limit alone would not do: the kernel ignores it where core dumps go to a program,
// such as systemd-coredump. So no memory is to be in one either.
func forbidCoreDumps() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	if err := os.WriteFile("/proc/self/coredump_filter", []byte("0"), 0); err != nil {
		return fmt.Errorf("forbid core dumps: %w; mount /proc", err)
	}
	return nil
}

// captureStderr makes log lines of what others write to the default logger or to
// os.Stderr, as upstream's HTTP servers do, until restore. The Go runtime's own
// last words still go to the real one.
func captureStderr(log *slog.Logger) (restore func(), err error) {
	slog.SetDefault(log)
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("capture what components write: %w", err)
	}
	stderr := os.Stderr
	os.Stderr = w
	done := make(chan struct{})
	go func() {
		defer close(done)
		for lines := bufio.NewReader(r); ; {
			line, err := lines.ReadString('\n')
			if line = strings.TrimSpace(line); line != "" {
				log.Debug(line, "component", "upstream")
			}
			if err != nil {
				return
			}
		}
	}()
	return func() {
		os.Stderr = stderr
		w.Close()
		<-done
	}, nil
}

func newLogger(w io.Writer, level, format string) *slog.Logger {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l = slog.LevelInfo // Validate has refused all else
	}
	opts := &slog.HandlerOptions{Level: l}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

func newVersionCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of tenantd and of the Kubernetes it runs",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version    string `json:"version"`
				Kubernetes string `json:"kubernetes"`
				Go         string `json:"go"`
				Platform   string `json:"platform"`
			}{version, kubeversion.Get().GitVersion, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
			switch output {
			case "json":
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(v)
			case "":
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "tenantd %s (Kubernetes %s, %s, %s)\n", v.Version, v.Kubernetes, v.Go, v.Platform)
				return err
			}
			return usageError{fmt.Errorf("output format %q is not known; use -o json", output)}
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "json, or nothing for a line of text")
	return cmd
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// kubeconfigVariable names the system plane's kubeconfig in the environment. It is
// not KUBECONFIG, which is about the clusters that people work in.
const kubeconfigVariable = "TENANTCTL_KUBECONFIG"

// requestTimeout ends a request that the system plane does not answer. Watches,
// which have nothing to say for long, are not bound by it.
const requestTimeout = 30 * time.Second

// cli is one run of tenantctl.
type cli struct {
	streams

	kubeconfig string // --kubeconfig
	started    bool   // the command line was understood
	server     string // URL of the system plane, for errors; empty until connected
}

func (c *cli) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "tenantctl",
		Short: "Add, remove and use the Kubernetes clusters that tenantd runs",
		Long: `tenantctl adds, removes and shows the Kubernetes clusters (tenants) that tenantd
runs, and hands out the credentials to use them and to join workers to them. It
adds and removes the hosts of the installation in the same way.

It talks to the system plane, which is a Kubernetes API: kubectl works on the
same objects, as in "kubectl get tenants". The system plane is found by a
kubeconfig: the one of --kubeconfig, else of $` + kubeconfigVariable + `, else
` + defaultKubeconfig() + `, which tenantd writes on its host. It lists
the other hosts, too: if the one that it names does not answer, another is asked.

Results go to standard output; progress and errors go to standard error, an
error as one line that says what to do.

Exit codes:
  0  done
  1  failed
  2  bad usage: the command line, or a value that the system plane refuses
  3  the tenant or the host does not exist
  4  timed out`,
		Example: `  tenantctl add acme
  tenantctl kubeconfig acme --output acme.kubeconfig
  kubectl --kubeconfig acme.kubeconfig get nodes
  tenantctl join-command acme
  tenantctl worker bundle acme
  tenantctl hosts`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.PersistentFlags().StringVar(&c.kubeconfig, "kubeconfig", "",
		"kubeconfig of the system plane (default $"+kubeconfigVariable+", then "+defaultKubeconfig()+")")
	must(root.MarkPersistentFlagFilename("kubeconfig"))
	root.AddCommand(
		c.addCommand(),
		c.removeCommand(),
		c.listCommand(),
		c.getCommand(),
		c.kubeconfigCommand(),
		c.joinCommandCommand(),
		c.workerCommand(),
		c.moveCommand(),
		c.sleepCommand(),
		c.wakeCommand(),
		c.hostsCommand(),
		c.hostCommand(),
		c.versionCommand(),
	)
	return root
}

// do marks the end of reading the command line: an error before it is about usage.
func (c *cli) do(f func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c.started = true
		return f(cmd, args)
	}
}

// must is for the set-up of commands, which fails only if it names a flag wrongly.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func defaultKubeconfig() string { return filepath.Join(v1alpha1.DefaultDataDir, "admin.kubeconfig") }

// plane is a connection to the system plane.
type plane struct {
	client.WithWatch
	raw rest.Interface
}

func (c *cli) connect() (*plane, error) {
	file := cmp.Or(c.kubeconfig, os.Getenv(kubeconfigVariable), defaultKubeconfig())
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: file}, nil).ClientConfig()
	remedy := "point --kubeconfig or $" + kubeconfigVariable + " to a copy of the host's admin.kubeconfig"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, failed(exitFailed, "there is no kubeconfig of the system plane at %s; start tenantd on this machine, or %s", file, remedy)
	case errors.Is(err, fs.ErrPermission):
		return nil, failed(exitFailed, "%s may not be read by this user; use sudo, or %s", file, remedy)
	case err != nil:
		return nil, failed(exitFailed, "the kubeconfig %s does not work: %w; %s", file, err, remedy)
	}
	c.server = config.Host
	config.UserAgent = "tenantctl/" + buildVersion()
	config.QPS = -1 // a person types slower than any limit; the server has its own
	config.WarningHandler = rest.NewWarningWriter(c.err, rest.WarningWriterOptions{Deduplicate: true})

	others, err := otherHosts(file)
	if err != nil {
		return nil, failed(exitFailed, "the kubeconfig %s does not work: %w; %s", file, err, remedy)
	}
	if len(others) > 0 {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &anyHost{next: next, cli: c, others: others} })
	}

	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, failed(exitFailed, "the kubeconfig %s does not work: %w; %s", file, err, remedy)
	}
	// There are two kinds, so discovery is not asked what there is.
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.AddSpecific(v1alpha1.GroupVersion.WithKind("Tenant"), v1alpha1.GroupVersion.WithResource("tenants"),
		v1alpha1.GroupVersion.WithResource("tenant"), meta.RESTScopeRoot)
	mapper.AddSpecific(v1alpha1.GroupVersion.WithKind("Host"), v1alpha1.GroupVersion.WithResource("hosts"),
		v1alpha1.GroupVersion.WithResource("host"), meta.RESTScopeRoot)
	typed, err := client.NewWithWatch(config, client.Options{HTTPClient: httpClient, Scheme: scheme, Mapper: mapper, Log: logr.Discard(), FieldOwner: "tenantctl"})
	if err != nil {
		return nil, fmt.Errorf("connect to the system plane: %w", err)
	}
	rawConfig := rest.CopyConfig(config)
	rawConfig.APIPath = "/apis"
	rawConfig.GroupVersion = &v1alpha1.CredentialsGroupVersion
	rawConfig.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	raw, err := rest.RESTClientForConfigAndClient(rawConfig, httpClient)
	if err != nil {
		return nil, fmt.Errorf("connect to the system plane: %w", err)
	}
	return &plane{WithWatch: typed, raw: raw}, nil
}

// request bounds one exchange with the system plane.
func request(ctx context.Context, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return f(ctx)
}

// tenant fetches one tenant.
func (p *plane) tenant(ctx context.Context, name string) (*v1alpha1.Tenant, error) {
	t := &v1alpha1.Tenant{}
	err := request(ctx, func(ctx context.Context) error { return p.Get(ctx, client.ObjectKey{Name: name}, t) })
	if err != nil {
		return nil, err
	}
	return t, nil
}

// tenants fetches all tenants, in the order of their names.
func (p *plane) tenants(ctx context.Context) (*v1alpha1.TenantList, error) {
	list := &v1alpha1.TenantList{}
	err := request(ctx, func(ctx context.Context) error { return p.List(ctx, list) })
	if err != nil {
		return nil, err
	}
	return list, nil
}

// host fetches one host.
func (p *plane) host(ctx context.Context, name string) (*v1alpha1.Host, error) {
	h := &v1alpha1.Host{}
	err := request(ctx, func(ctx context.Context) error { return p.Get(ctx, client.ObjectKey{Name: name}, h) })
	if err != nil {
		return nil, err
	}
	return h, nil
}

// hosts fetches all hosts, in the order of their names.
func (p *plane) hosts(ctx context.Context) (*v1alpha1.HostList, error) {
	list := &v1alpha1.HostList{}
	err := request(ctx, func(ctx context.Context) error { return p.List(ctx, list) })
	if err != nil {
		return nil, err
	}
	return list, nil
}

// find connects to the system plane and fetches one object there, with the method of
// plane that gets such ones.
func find[T any](ctx context.Context, c *cli, get func(*plane, context.Context, string) (*T, error), name string) (*plane, *T, error) {
	p, err := c.connect()
	if err != nil {
		return nil, nil, err
	}
	object, err := get(p, ctx, name)
	return p, object, err
}

// change changes what object, which was just fetched, says on the server.
func change[T client.Object](ctx context.Context, p *plane, object T, set func()) error {
	before := object.DeepCopyObject().(T)
	set()
	// Only what differs is sent: what others change at the same time stays.
	return request(ctx, func(ctx context.Context) error { return p.Patch(ctx, object, client.MergeFrom(before)) })
}

// credentials posts a credential request, a pointer, to a path and fills it with the
// answer.
func (p *plane) credentials(ctx context.Context, at string, body any) error {
	subresource := path.Base(at)
	data, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode the %s request: %w", subresource, err)
	}
	return request(ctx, func(ctx context.Context) error {
		result := p.raw.Post().AbsPath(at).
			SetHeader("Content-Type", runtime.ContentTypeJSON).SetHeader("Accept", runtime.ContentTypeJSON).
			Body(data).Do(ctx)
		// Unlike Raw, Error reads the server's reason from the body.
		if err := result.Error(); err != nil {
			return err
		}
		answer, err := result.Raw()
		if err != nil {
			return err
		}
		if err := json.Unmarshal(answer, body); err != nil {
			return fmt.Errorf("read the answer to the %s request: %w", subresource, err)
		}
		return nil
	})
}

// tenantName completes the first argument with the names of the tenants.
func (c *cli) tenantName(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	// A shell waits for this at every press of the key.
	ctx, cancel := context.WithTimeout(cmd.Context(), 3*time.Second)
	defer cancel()
	p, err := c.connect()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	list, err := p.tenants(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names := make([]string, len(list.Items))
	for i, t := range list.Items {
		names[i] = cobra.CompletionWithDesc(t.Name, t.Spec.Hostname)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// hostName completes the first argument with the names of the hosts.
func (c *cli) hostName(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return c.hostNames(cmd, args, toComplete)
}

// hostNames completes with the names of the hosts, whatever was typed before.
func (c *cli) hostNames(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), 3*time.Second)
	defer cancel()
	p, err := c.connect()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	list, err := p.hosts(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names := make([]string, len(list.Items))
	for i, h := range list.Items {
		names[i] = cobra.CompletionWithDesc(h.Name, string(state(&h)))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

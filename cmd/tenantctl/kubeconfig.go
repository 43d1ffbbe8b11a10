// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

func (c *cli) kubeconfigCommand() *cobra.Command {
	var (
		spec         v1alpha1.KubeconfigRequestSpec
		ttl          time.Duration
		output       string
		merge, force bool
	)
	cmd := &cobra.Command{
		Use:   "kubeconfig NAME",
		Short: "Make a kubeconfig for a tenant",
		Long: `Make a kubeconfig for a tenant and print it, write it to a file (--output), or
merge it into the kubeconfig that kubectl uses (--merge).

Without --user and --group it is the administrator's and works for a year. With
them it is that user's, works for a day, and allows what RBAC in the tenant
gives the user and the groups. A kubeconfig holds a private key and cannot be
taken back before it ends: keep --ttl short.

--server writes another address into it, such as that of a host before DNS has
the tenant's name; the name is then written beside it as tls-server-name. kubectl
asks this one server: it outlives the loss of a host if the server is a name that has
an address for each host, or tenant-proxy's address on a machine that runs it.

--merge adds the cluster NAME, and the user and context USER@NAME, and makes the
context the current one. An entry of those names that belongs to another cluster
is left alone and is an error, unless --force replaces it.`,
		Example: `  tenantctl kubeconfig acme --output acme.kubeconfig
  tenantctl kubeconfig acme --merge && kubectl get nodes
  tenantctl kubeconfig acme --user jane --group developers --ttl 8h
  tenantctl kubeconfig acme --server https://192.0.2.10:443
  tenantctl kubeconfig acme --server https://172.20.0.1:6443    # tenant-proxy's`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: c.tenantName,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if force && !merge {
				return errors.New("--force is about --merge; give both")
			}
			var err error
			if spec.TTLSeconds, err = ttlSeconds(cmd, ttl, v1alpha1.MaxCredentialTTL); err != nil {
				return err
			}
			judged := v1alpha1.KubeconfigRequest{Spec: spec}
			judged.SetDefaults()
			return judged.Validate()
		},
		RunE: c.do(func(cmd *cobra.Command, args []string) error {
			p, err := c.connect()
			if err != nil {
				return err
			}
			r := v1alpha1.KubeconfigRequest{Spec: spec}
			r.SetDefaults()
			if err := p.credentials(cmd.Context(), v1alpha1.CredentialsPath(args[0], v1alpha1.KubeconfigSubresource), &r); err != nil {
				return err
			}
			switch {
			case merge:
				return c.mergeKubeconfig(r.Status.Kubeconfig, force)
			case output != "" && output != "-":
				return writePrivate("kubeconfig", output, r.Status.Kubeconfig)
			}
			_, err = c.out.Write(r.Status.Kubeconfig)
			return err
		}),
	}
	flags := cmd.Flags()
	flags.StringVarP(&output, "output", "o", "", "file to write, readable by its owner only (default: standard output)")
	flags.BoolVar(&merge, "merge", false, "merge into $KUBECONFIG or ~/.kube/config")
	flags.BoolVar(&force, "force", false, "with --merge: replace entries of the same names that belong to another cluster")
	flags.StringVar(&spec.User, "user", "", "user name (default "+v1alpha1.DefaultKubeconfigUser+", the administrator)")
	flags.StringArrayVar(&spec.Groups, "group", nil, "group of the user; may be repeated")
	flags.DurationVar(&ttl, "ttl", 0, "how long it works (default 8760h for the administrator, 24h for a user)")
	flags.StringVar(&spec.Server, "server", "", "URL of the API server to write (default: the tenant's hostname and port)")
	cmd.MarkFlagsMutuallyExclusive("output", "merge")
	must(cmd.MarkFlagFilename("output"))
	for _, flag := range []string{"user", "group", "ttl", "server"} {
		must(cmd.RegisterFlagCompletionFunc(flag, cobra.NoFileCompletions))
	}
	return cmd
}

// ttlSeconds turns --ttl into whole seconds; 0 if it was not given.
func ttlSeconds(cmd *cobra.Command, ttl, longest time.Duration) (int64, error) {
	if cmd.Flags().Changed("ttl") && (ttl < v1alpha1.MinCredentialTTL || ttl > longest) {
		return 0, fmt.Errorf("--ttl must be %s to %s", v1alpha1.MinCredentialTTL, longest)
	}
	return int64(ttl / time.Second), nil
}

// writePrivate writes a file that only its owner can read, all of it or nothing. what is
// its content, for errors.
func writePrivate(what, path string, data []byte) (err error) {
	// Through a link, the file that it points to is replaced, not the link.
	if target, linkErr := filepath.EvalSymlinks(path); linkErr == nil {
		path = target
	}
	if info, statErr := os.Lstat(path); statErr == nil && !info.Mode().IsRegular() {
		return failed(exitUsage, "%s is not a regular file; leave --output out to print to standard output", path)
	}
	// CreateTemp makes the file with mode 0600.
	f, err := os.CreateTemp(filepath.Dir(path), ".tenantctl-*")
	if err != nil {
		return fmt.Errorf("write the %s: %w", what, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write the %s: %w", what, err), f.Close(), os.Remove(f.Name()))
		}
	}()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return f.Close()
}

// mergeKubeconfig adds the one cluster of data to the kubeconfig that kubectl uses.
func (c *cli) mergeKubeconfig(data []byte, force bool) error {
	received, err := clientcmd.Load(data)
	if err != nil {
		return fmt.Errorf("read the kubeconfig received: %w", err)
	}
	entry := received.Contexts[received.CurrentContext]
	if entry == nil || received.Clusters[entry.Cluster] == nil || received.AuthInfos[entry.AuthInfo] == nil {
		return errors.New("the kubeconfig received has no current context; is the host of another version than tenantctl?")
	}
	cluster, user := received.Clusters[entry.Cluster], received.AuthInfos[entry.AuthInfo]

	access := clientcmd.NewDefaultPathOptions()
	config, err := access.GetStartingConfig()
	if err != nil {
		return fmt.Errorf("read the kubeconfig that kubectl uses: %w; correct it first, or use --output", err)
	}
	// Users of the same name in two clusters are two users.
	name := strings.TrimSuffix(entry.AuthInfo, "@"+entry.Cluster) + "@" + entry.Cluster
	merged := &clientcmdapi.Context{Cluster: entry.Cluster, AuthInfo: name, Namespace: entry.Namespace}

	var taken []string
	previous, previousUser, previousContext := config.Clusters[entry.Cluster], config.AuthInfos[name], config.Contexts[name]
	sameCluster := previous != nil && bytes.Equal(previous.CertificateAuthorityData, cluster.CertificateAuthorityData)
	if previous != nil {
		cluster.LocationOfOrigin = previous.LocationOfOrigin
		if !sameCluster {
			taken = append(taken, fmt.Sprintf("cluster %q (%s)", entry.Cluster, previous.Server))
		}
	}
	if previousUser != nil {
		user.LocationOfOrigin = previousUser.LocationOfOrigin
		if !sameCluster {
			taken = append(taken, fmt.Sprintf("user %q", name))
		}
	}
	if previousContext != nil {
		merged.LocationOfOrigin = previousContext.LocationOfOrigin
		if previousContext.Cluster == entry.Cluster {
			merged.Namespace = cmp.Or(previousContext.Namespace, merged.Namespace)
		}
		if !sameCluster || previousContext.Cluster != entry.Cluster {
			taken = append(taken, fmt.Sprintf("context %q", name))
		}
	}
	file := access.GetDefaultFilename()
	if len(taken) > 0 && !force {
		return failed(exitFailed, "%s has entries of another cluster under these names: %s; replace them with --force, or use --output", file, strings.Join(taken, ", "))
	}

	config.Clusters[entry.Cluster] = cluster
	config.AuthInfos[name] = user
	config.Contexts[name] = merged
	config.CurrentContext = name
	if err := clientcmd.ModifyConfig(access, *config, false); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("write the kubeconfig: %w; another program is writing it, or left %s.lock behind, which can then be removed", err, file)
		}
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	if len(taken) > 0 {
		fmt.Fprintf(c.err, "replaced in %s: %s\n", file, strings.Join(taken, ", "))
	}
	fmt.Fprintf(c.err, "context %q is in %s and is now the current one\n", name, file)
	return nil
}

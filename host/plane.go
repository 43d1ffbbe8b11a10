// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/pki"
	"github.com/tenantd/tenantd/sni"
	"github.com/tenantd/tenantd/tenant"
)

const (
	// systemUID is the system plane's identity in storage. No tenant can have it:
	// theirs are UUIDs.
	systemUID = "system"
	// adminUser is whose credentials admin.kubeconfig holds.
	adminUser = "tenantd-admin"
	// adminTTL is how long admin.kubeconfig works; it is written anew at each
	// start and well before it expires.
	adminTTL = 365 * 24 * time.Hour
	// fieldManager names the host in what it writes to the system plane.
	fieldManager = "tenantd"
)

// newSystemPlane makes the control plane that serves the Tenant API.
func (h *Host) newSystemPlane(ctx context.Context, authority *pki.Authority) (*tenant.ControlPlane, error) {
	name := systemName(h.cfg.Domain)
	ln, err := h.router.Listen(sni.ListenConfig{Tenant: v1alpha1.ReservedTenantName, Names: []string{name}})
	if err != nil {
		return nil, err
	}
	cp, err := tenant.New(tenant.Config{
		Platform:  h.platform,
		Name:      v1alpha1.ReservedTenantName,
		UID:       systemUID,
		Hostname:  name,
		Port:      h.port(),
		CertSANs:  h.planeSANs(),
		APIOnly:   true,
		Authority: authority,
		Listener:  ln,
		Audit:     h.audit(v1alpha1.ReservedTenantName),
		Admission: func(inner admission.Interface) admission.Interface {
			return &tenantAdmission{Interface: inner, domain: h.cfg.Domain, named: h.tenantsNamed, etcd: h.store.Client()}
		},
		Handlers: map[string]http.Handler{
			credentialsPrefix: &credentials{
				issuer: h.issuer, port: h.port(), advertise: h.advertised(), reader: h.reader(), hosts: h.allAddresses, log: h.log,
			},
			hostCredentialsPrefix: &hostCredentials{h},
		},
		Instance: h.instance(),
		Logger:   h.log,
	})
	if err != nil {
		ln.Close()
		return nil, err
	}
	return cp, nil
}

// reader is this host for those whose requests it cannot read.
func (h *Host) reader() string {
	return fmt.Sprintf("host %s, which runs tenantd %s,", h.name, h.version)
}

// planeSANs are the addresses at which operators reach the system plane.
func (h *Host) planeSANs() []string {
	if a := h.advertised(); a != "" && net.ParseIP(a) != nil {
		return []string{a}
	}
	return nil
}

// installCRDs brings the system plane's CRDs to this version and waits until
// they are served. Those of a newer version stay: its hosts need what is new in them, and
// this one can do with it.
func installCRDs(ctx context.Context, cfg *rest.Config, log *slog.Logger) error {
	client, err := apiextensions.NewForConfig(rest.CopyConfig(cfg))
	if err != nil {
		return fmt.Errorf("make client for CRDs: %w", err)
	}
	for _, crd := range v1alpha1.CustomResourceDefinitions() {
		if err := installCRD(ctx, client, crd, log); err != nil {
			return fmt.Errorf("install CRD %s: %w", crd.Name, err)
		}
		if err := awaitCRD(ctx, client, crd.Name); err != nil {
			return fmt.Errorf("wait for CRD %s: %w", crd.Name, err)
		}
	}
	return nil
}

func installCRD(ctx context.Context, client apiextensions.Interface, crd *apiextensionsv1.CustomResourceDefinition, log *slog.Logger) error {
	crds := client.ApiextensionsV1().CustomResourceDefinitions()
	crd.Status = apiextensionsv1.CustomResourceDefinitionStatus{}
	for {
		have, err := crds.Get(ctx, crd.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			crd.ResourceVersion = ""
		case err != nil:
			return err
		case v1alpha1.CRDGeneration(have) > v1alpha1.CRDGeneration(crd):
			log.Info("a newer tenantd has been here: its definition stays", "crd", crd.Name,
				"generation", v1alpha1.CRDGeneration(have), "own", v1alpha1.CRDGeneration(crd))
			return nil
		default:
			crd.ResourceVersion = have.ResourceVersion // not over one that comes meanwhile
		}
		body, err := yaml.Marshal(crd)
		if err != nil {
			return err
		}
		force := true
		_, err = crds.Patch(ctx, crd.Name, types.ApplyYAMLPatchType, body, metav1.PatchOptions{FieldManager: fieldManager, Force: &force})
		if !apierrors.IsConflict(err) {
			return err
		}
	}
}

func awaitCRD(ctx context.Context, client apiextensions.Interface, name string) error {
	for {
		crd, err := client.ApiextensionsV1().CustomResourceDefinitions().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range crd.Status.Conditions {
			if c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue {
				return nil
			}
			if c.Type == apiextensionsv1.NamesAccepted && c.Status == apiextensionsv1.ConditionFalse {
				return errors.New(c.Message)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// writeAdminKubeconfig writes the system plane's kubeconfig into the data directory.
func (h *Host) writeAdminKubeconfig(ctx context.Context, authority *pki.Authority) error {
	cert, key, _, err := authority.IssueClient(ctx, adminUser, []string{"system:masters"}, adminTTL)
	if err != nil {
		return fmt.Errorf("issue administrator's certificate: %w", err)
	}
	host := h.advertised()
	if host == "" {
		host = "127.0.0.1"
		if ip := h.listener.Addr().(*net.TCPAddr).IP; !ip.IsUnspecified() {
			host = ip.String()
		}
	}
	h.admin.mu.Lock()
	h.admin.params = &pki.KubeconfigParams{
		Cluster: "tenantd", User: adminUser,
		Server: serverURL(host, h.port()), TLSServerName: systemName(h.cfg.Domain),
		CA: authority.CA(), Cert: cert, Key: key,
	}
	h.admin.mu.Unlock()
	return h.listInAdminKubeconfig()
}

// adminKubeconfig is what admin.kubeconfig was last made of.
type adminKubeconfig struct {
	mu     sync.Mutex            // guards what follows, and that the file is of the latest
	params *pki.KubeconfigParams // nil until there is one
}

// listInAdminKubeconfig writes the kubeconfig, if there is one, with the hosts of this
// moment: tenantctl asks another one when its server does not answer.
func (h *Host) listInAdminKubeconfig() error {
	h.admin.mu.Lock()
	defer h.admin.mu.Unlock()
	if h.admin.params == nil {
		return nil
	}
	params := *h.admin.params
	if all := h.allAddresses(); len(all) > 1 {
		content, err := v1alpha1.FormatKubeconfigHosts(all)
		if err != nil {
			return fmt.Errorf("write administrator's kubeconfig: %w", err)
		}
		params.Extensions = map[string][]byte{v1alpha1.HostsExtension: content}
	}
	config, err := pki.Kubeconfig(params)
	if err != nil {
		return fmt.Errorf("write administrator's kubeconfig: %w", err)
	}
	file := h.dir.file("admin.kubeconfig")
	if err := writeFile(file, config, 0o600); err != nil {
		return fmt.Errorf("write administrator's kubeconfig: %w", explain(err))
	}
	h.log.Info("wrote the administrator's kubeconfig", "file", file)
	return nil
}

// serverURL is the URL of a server.
func serverURL(host string, port int) string {
	u := url.URL{Scheme: "https", Host: net.JoinHostPort(host, strconv.Itoa(port))}
	return u.String()
}

// endpoint is host and port as clients and kubeadm take them.
func endpoint(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

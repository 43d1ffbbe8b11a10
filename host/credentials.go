// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	bootstrapapi "k8s.io/cluster-bootstrap/token/api"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/pki"
)

// credentialsPrefix is the path below which the system plane hands out
// credentials. Its API server authenticates and authorizes the requests: they
// read as the verb create on tenants/kubeconfig, tenants/jointoken and
// tenants/workerconfig.
var credentialsPrefix = strings.TrimSuffix(v1alpha1.CredentialsPath("x", "x"), "x/x")

// maxCredentialRequest bounds a request's body, in bytes: a user, groups and a URL.
const maxCredentialRequest = 64 << 10

// issuer is what credentials need of a tenant that this host runs.
type issuer struct {
	spec      v1alpha1.TenantSpec
	authority *pki.Authority
	// client reaches the tenant's API server; nil while that does not run.
	client *rest.Config
	// wake, if set, starts a tenant that is asleep, and returns what client was to be.
	wake func(ctx context.Context) *rest.Config
	// release, if set, is to be called after use.
	release func()
}

func (i issuer) close() {
	if i.release != nil {
		i.release()
	}
}

// credentials serves requests for credentials.
type credentials struct {
	// issuer finds a tenant by name. Its error is an API status.
	issuer func(ctx context.Context, tenant string) (issuer, error)
	// port is the port that clients are told to use.
	port int
	// advertise is the address that clients are told to use until there is DNS;
	// empty for the tenant's hostname.
	advertise string
	// reader is this host, and what it runs.
	reader string
	// hosts are the IP:port of the hosts at this moment.
	hosts func() []string
	log   *slog.Logger
}

// ServeHTTP implements http.Handler.
func (c *credentials) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, err := c.answer(r)
	if err != nil {
		writeError(w, r, err, c.log)
		return
	}
	writeJSON(w, http.StatusCreated, answer)
}

// writeError answers with an error as the API server does.
func writeError(w http.ResponseWriter, r *http.Request, err error, log *slog.Logger) {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		log.Error("cannot hand out credentials", "path", r.URL.Path, "error", err)
		status = apierrors.NewInternalError(err)
	}
	s := status.Status()
	s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	writeJSON(w, int(s.Code), s)
}

func writeJSON(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store") // private keys
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body) // an error here is the client's hanging up
}

func (c *credentials) answer(r *http.Request) (any, error) {
	tenant, subresource, ok := strings.Cut(strings.TrimPrefix(r.URL.Path, credentialsPrefix), "/")
	if !ok {
		return nil, apierrors.NewNotFound(v1alpha1.CredentialsGroupVersion.WithResource("tenants").GroupResource(), tenant)
	}
	if r.Method != http.MethodPost {
		return nil, apierrors.NewMethodNotSupported(v1alpha1.CredentialsGroupVersion.WithResource("tenants/"+subresource).GroupResource(), strings.ToLower(r.Method))
	}
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxCredentialRequest))
	if err != nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("read request: %v", err))
	}
	switch subresource {
	case v1alpha1.KubeconfigSubresource:
		req := &v1alpha1.KubeconfigRequest{}
		if err := decode(c.reader, body, req, req.SetDefaults, req.Validate); err != nil {
			return nil, err
		}
		return req, c.kubeconfig(r.Context(), tenant, req)
	case v1alpha1.JoinTokenSubresource:
		req := &v1alpha1.JoinTokenRequest{}
		if err := decode(c.reader, body, req, req.SetDefaults, req.Validate); err != nil {
			return nil, err
		}
		return req, c.joinToken(r.Context(), tenant, req)
	case v1alpha1.WorkerConfigSubresource:
		req := &v1alpha1.WorkerConfigRequest{}
		if err := decode(c.reader, body, req, req.SetDefaults, req.Validate); err != nil {
			return nil, err
		}
		return req, c.workerConfig(r.Context(), tenant, req)
	}
	return nil, apierrors.NewNotFound(v1alpha1.CredentialsGroupVersion.WithResource("tenants/"+subresource).GroupResource(), tenant)
}

// decode reads a request, completes and checks it. A request is understood whole or
// refused: a field that a newer version has added may be there to have less handed out. So
// the refusal names the reader, which is a host and its version.
func decode(reader string, body []byte, into any, setDefaults func(), validate func() error) error {
	d := json.NewDecoder(strings.NewReader(string(body)))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil && !errors.Is(err, io.EOF) {
		message := fmt.Sprintf("decode request: %v", err)
		if strings.Contains(message, "unknown field") { // encoding/json has no type for it
			message += fmt.Sprintf(": %s does not know it. If who asks is newer, upgrade that host first, or ask one that has been", reader)
		}
		return apierrors.NewBadRequest(message)
	}
	setDefaults()
	if err := validate(); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	return nil
}

// kubeconfig issues a client certificate and fills in req's status.
func (c *credentials) kubeconfig(ctx context.Context, tenant string, req *v1alpha1.KubeconfigRequest) error {
	t, err := c.issuer(ctx, tenant)
	if err != nil {
		return err
	}
	defer t.close()
	cert, key, expires, err := t.authority.IssueClient(ctx, req.Spec.User, req.Spec.Groups, time.Duration(req.Spec.TTLSeconds)*time.Second)
	if err != nil {
		return fmt.Errorf("issue client certificate: %w", err)
	}
	if req.Spec.Server == "" {
		host := c.advertise
		if host == "" {
			host = t.spec.Hostname
		}
		req.Spec.Server = serverURL(host, c.port)
	}
	req.Status.Kubeconfig, err = pki.Kubeconfig(pki.KubeconfigParams{
		Cluster: tenant,
		// Entries of several tenants live side by side in one file.
		User:          tenant + "-" + req.Spec.User,
		Server:        req.Spec.Server,
		TLSServerName: t.spec.Hostname,
		CA:            t.authority.CA(),
		Cert:          cert,
		Key:           key,
	})
	if err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	req.Status.ExpirationTimestamp = metav1.NewTime(expires)
	c.log.Info("issued a kubeconfig", "tenant", tenant, "user", req.Spec.User, "groups", req.Spec.Groups, "expires", expires)
	return nil
}

// workerConfig fills in req's status.
func (c *credentials) workerConfig(ctx context.Context, tenant string, req *v1alpha1.WorkerConfigRequest) error {
	t, err := c.issuer(ctx, tenant)
	if err != nil {
		return err
	}
	defer t.close()
	req.Status = v1alpha1.WorkerConfigRequestStatus{
		Hostname:             t.spec.Hostname,
		Port:                 c.port,
		Hosts:                c.hosts(),
		KonnectivityHostname: t.spec.KonnectivityHostname,
		WorkerVIP:            t.spec.Network.WorkerVIP,
		CA:                   t.authority.CA(),
	}
	return nil
}

// joinToken makes a bootstrap token in the tenant, of the kind that `kubeadm
// token create` makes, and fills in req's status.
func (c *credentials) joinToken(ctx context.Context, tenant string, req *v1alpha1.JoinTokenRequest) error {
	t, err := c.issuer(ctx, tenant)
	if err != nil {
		return err
	}
	defer t.close()
	if t.wake != nil {
		t.client = t.wake(ctx)
	}
	if t.client == nil {
		return apierrors.NewServiceUnavailable(fmt.Sprintf("tenant %q is not running yet; wait until it is Ready and try again", tenant))
	}
	client, err := kubernetes.NewForConfig(t.client)
	if err != nil {
		return fmt.Errorf("make client of tenant %q: %w", tenant, err)
	}
	id, secret, expires, err := makeToken(ctx, client, req.Spec.TTLSeconds, map[string]string{
		bootstrapapi.BootstrapTokenUsageSigningKey: "true",
		bootstrapapi.BootstrapTokenExtraGroupsKey:  "system:bootstrappers:kubeadm:default-node-token",
		bootstrapapi.BootstrapTokenDescriptionKey:  "made by tenantctl join-command",
	})
	if err != nil {
		return err
	}
	req.Status = v1alpha1.JoinTokenRequestStatus{
		Token:               id + "." + secret,
		CACertHashes:        []string{pki.CAHash(t.authority.CA())},
		Endpoint:            endpoint(t.spec.Hostname, c.port),
		ExpirationTimestamp: metav1.NewTime(expires),
	}
	c.log.Info("made a join token", "tenant", tenant, "token", id, "expires", expires)
	return nil
}

// makeToken makes a bootstrap token in a cluster, with which one authenticates for a
// number of seconds. fields are what the token's Secret says beyond that.
func makeToken(ctx context.Context, cluster kubernetes.Interface, seconds int64, fields map[string]string) (id, secret string, expires time.Time, err error) {
	id, secret = pki.BootstrapToken()
	expires = time.Now().Add(time.Duration(seconds) * time.Second).UTC().Truncate(time.Second)
	data := map[string]string{
		bootstrapapi.BootstrapTokenIDKey:               id,
		bootstrapapi.BootstrapTokenSecretKey:           secret,
		bootstrapapi.BootstrapTokenExpirationKey:       expires.Format(time.RFC3339),
		bootstrapapi.BootstrapTokenUsageAuthentication: "true",
	}
	maps.Copy(data, fields)
	_, err = cluster.CoreV1().Secrets(metav1.NamespaceSystem).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: bootstrapapi.BootstrapTokenSecretPrefix + id},
		Type:       bootstrapapi.SecretTypeBootstrapToken,
		StringData: data,
	}, metav1.CreateOptions{})
	if err != nil {
		return "", "", time.Time{}, fmt.Errorf("create bootstrap token: %w", err)
	}
	return id, secret, expires, nil
}

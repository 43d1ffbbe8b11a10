// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/admission"
	webhookinit "k8s.io/apiserver/pkg/admission/plugin/webhook/initializer"
	registryrest "k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/rest"
	kubelet "k8s.io/kubernetes/pkg/kubelet/client"
	noderest "k8s.io/kubernetes/pkg/registry/core/node/rest"
	podrest "k8s.io/kubernetes/pkg/registry/core/pod/rest"
	"k8s.io/kubernetes/pkg/registry/core/service"

	"github.com/tenantd/tenantd/tenant/limit"
)

// Upstream reads whole what servers answer that a tenant names. Each of these bounds
// an answer before it is in memory; none may be compressed, which would let a megabyte
// of network become a gigabyte here.
const (
	// maxReview is for admission webhooks: a patch of the largest object there can be,
	// in base64, twice.
	maxReview = 8 << 20
	// maxConversion is for conversion webhooks, which are asked for all objects of a
	// list at once: a page of 500 objects of 64 KiB.
	maxConversion = 32 << 20
	// maxPage is for pages of HTML behind the proxies of the API, whose links upstream
	// rewrites.
	maxPage = 8 << 20
)

// answerTooLarge is why an answer was cut off. It names who gave it, not what.
type answerTooLarge struct {
	host string
	max  int64
}

func (e *answerTooLarge) Error() string {
	return fmt.Sprintf("the answer of %s is larger than %d bytes, which is the most that is read", e.host, e.max)
}

// boundedTransport lets answers through up to max bytes, charges them to the request
// that waits for them, and lets others of the tenant run meanwhile.
type boundedTransport struct {
	http.RoundTripper
	max int64
}

// RoundTrip implements http.RoundTripper.
func (t boundedTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	back := limit.Outside(req.Context())
	resp, err := t.RoundTripper.RoundTrip(req)
	if err != nil {
		back()
		return nil, err
	}
	body := &boundedBody{ReadCloser: resp.Body, ctx: req.Context(), left: t.max, tooLarge: &answerTooLarge{req.URL.Host, t.max}, back: back}
	if resp.ContentLength > t.max {
		body.Close()
		return nil, body.tooLarge
	}
	resp.Body = body
	return resp, nil
}

// WrappedRoundTripper implements net.RoundTripperWrapper of apimachinery.
func (t boundedTransport) WrappedRoundTripper() http.RoundTripper { return t.RoundTripper }

// boundedBody fails when there is more in it than may be.
type boundedBody struct {
	io.ReadCloser
	ctx      context.Context // of the request
	left     int64
	tooLarge *answerTooLarge
	back     func()
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, b.tooLarge
	}
	if charged := limit.Charge(b.ctx, int64(n)); charged != nil {
		return 0, charged
	}
	return n, err
}

func (b *boundedBody) Close() error {
	defer b.back()
	return b.ReadCloser.Close()
}

// boundAdmission has the admission plugins that call webhooks read no more than
// maxReview of what they answer.
func boundAdmission(plugin admission.Interface, _ string) admission.Interface {
	if p, ok := plugin.(webhookinit.WantsAuthenticationInfoResolverWrapper); ok {
		p.SetAuthenticationInfoResolverWrapper(func(r webhook.AuthenticationInfoResolver) webhook.AuthenticationInfoResolver {
			return boundWebhooks(r, maxReview)
		})
	}
	return plugin
}

// errOwnWebhook is why the API server does not call itself. Upstream does so for the
// Service kubernetes, with the loopback client: unlimited rights at a path that the
// tenant chooses, past its limits, and a webhook for what that path does would call
// itself without end.
var errOwnWebhook = errors.New("a webhook cannot be the API server itself (the Service kubernetes in default); give it a Service of its own")

// boundWebhooks has the clients that are made for webhooks read answers up to max
// bytes, none of them compressed, and call anything but the API server itself.
func boundWebhooks(delegate webhook.AuthenticationInfoResolver, max int64) webhook.AuthenticationInfoResolver {
	bound := func(cfg *rest.Config, err error) (*rest.Config, error) {
		if err != nil {
			return nil, err
		}
		if cfg.Transport != nil { // the loopback client alone has one before it is used
			return nil, errOwnWebhook
		}
		cfg = rest.CopyConfig(cfg) // it may be everyone's
		cfg.DisableCompression = true
		cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return boundedTransport{rt, max} })
		return cfg, nil
	}
	return &webhook.AuthenticationInfoResolverDelegator{
		ClientConfigForFunc: func(hostPort string) (*rest.Config, error) {
			return bound(delegate.ClientConfigFor(hostPort))
		},
		ClientConfigForServiceFunc: func(name, namespace string, port int) (*rest.Config, error) {
			return bound(delegate.ClientConfigForService(name, namespace, port))
		},
	}
}

// boundedPages bounds pages of HTML, which the API's proxies read whole to rewrite the
// links in them. All else passes as a stream.
type boundedPages struct{ http.RoundTripper }

// WrappedRoundTripper implements net.RoundTripperWrapper of apimachinery: upgrades
// find the dialer by it.
func (p boundedPages) WrappedRoundTripper() http.RoundTripper { return p.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (p boundedPages) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := p.RoundTripper.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	kind, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	if strings.TrimSpace(kind) != "text/html" { // as upstream compares it
		return resp, nil
	}
	body := resp.Body
	switch coding := resp.Header.Get("Content-Encoding"); coding {
	case "":
	case "gzip":
		unpacked, err := gzip.NewReader(body)
		if err != nil {
			body.Close()
			return nil, fmt.Errorf("read page of %s: %w", req.URL.Host, err)
		}
		body = struct {
			io.Reader
			io.Closer
		}{unpacked, body}
		resp.Header.Del("Content-Encoding")
		resp.Header.Del("Content-Length")
		resp.ContentLength = -1
	default:
		body.Close()
		return nil, fmt.Errorf("the page of %s is compressed by %q, which is not supported for HTML", req.URL.Host, coding)
	}
	resp.Body = &boundedBody{ReadCloser: body, ctx: req.Context(), left: maxPage, tooLarge: &answerTooLarge{req.URL.Host, maxPage}, back: func() {}}
	return resp, nil
}

// boundProxies bounds what the core API's own proxies read, and whom they ask.
func boundProxies(resources map[string]registryrest.Storage) error {
	for _, name := range []string{"nodes/proxy", "pods/proxy", "services/proxy"} {
		switch p := resources[name].(type) {
		case *noderest.ProxyREST:
			p.Connection, p.ProxyTransport = ipOnly{p.Connection}, boundedPages{p.ProxyTransport}
		case *podrest.ProxyREST:
			p.ProxyTransport = boundedPages{p.ProxyTransport}
		case *service.ProxyREST:
			p.ProxyTransport = boundedPages{p.ProxyTransport}
		default:
			return fmt.Errorf("bound %s: it is %T", name, p)
		}
	}
	return nil
}

// ipOnly keeps nodes/proxy from nodes that give no IP address. Upstream looks their
// names up before it connects, with the host's resolver.
type ipOnly struct{ kubelet.ConnectionInfoGetter }

// GetConnectionInfo implements kubelet.ConnectionInfoGetter.
func (g ipOnly) GetConnectionInfo(ctx context.Context, node types.NodeName) (*kubelet.ConnectionInfo, error) {
	info, err := g.ConnectionInfoGetter.GetConnectionInfo(ctx, node)
	if err != nil {
		return nil, err
	}
	info.Transport = boundedPages{info.Transport} // a copy of our own
	// What this accepts is what the resolver takes for an address.
	if _, err := netip.ParseAddr(info.Hostname); err != nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("node %q has no IP address in its status, and names of nodes are not looked up; have its kubelet report an InternalIP", node))
	}
	return info, nil
}

// forgetProxies takes proxies for HTTP out of the process's environment. Upstream's
// transports heed them: they would show a tenant's network the proxy's address and
// password, and a proxy there would be spoken to in place of what a tenant named.
func forgetProxies() error {
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"} {
		if err := os.Unsetenv(name); err != nil {
			return fmt.Errorf("clear %s: %w", name, err)
		}
	}
	return nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/client-go/util/jsonpath"
	"k8s.io/kube-aggregator/pkg/apis/apiregistration"
	"k8s.io/kubernetes/pkg/apis/admissionregistration"
	"k8s.io/kubernetes/pkg/apis/certificates"
)

// Some small inputs cost upstream time or memory without bound, in a goroutine that
// nothing can stop: in a process of its own that is the tenant's affair, here it is
// everybody's. They are refused before upstream works on them.
const (
	// maxToken bounds bearer tokens. A token's header is decoded before anybody knows
	// whose it is, by a decoder that takes 150 bytes of memory for each. The largest
	// tokens in use, with some hundred groups, are a tenth of this.
	maxToken = 64 << 10
	// maxRSABits bounds RSA keys that verify something. Verifying takes the square of
	// it; with a key as large as a request may be, hours. Go's TLS has the same bound
	// for what a peer sends.
	maxRSABits = 8192
	// maxColumnPath bounds the path of a printer column, which is parsed by recursion.
	maxColumnPath = 1024
	// maxColumnUnion bounds how often the unions of a path repeat what they select.
	maxColumnUnion = 64
)

// shortTokens refuses bearer tokens that are too long, wherever they come from: a
// header, a WebSocket's protocol, a TokenReview.
type shortTokens struct{ authenticator.Request }

var errTokenTooLong = fmt.Errorf("the bearer token is longer than %d bytes", maxToken)

// AuthenticateRequest implements authenticator.Request.
func (s shortTokens) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	for _, header := range []string{"Authorization", "Sec-WebSocket-Protocol"} {
		for _, value := range req.Header[header] {
			if len(value) > maxToken {
				return nil, false, errTokenTooLong
			}
		}
	}
	return s.Request.AuthenticateRequest(req)
}

// noCostly refuses objects that upstream would work on for too long.
type noCostly struct{ admission.Interface }

// Handles implements admission.Interface.
func (n noCostly) Handles(op admission.Operation) bool {
	return op == admission.Create || op == admission.Update || n.Interface.Handles(op)
}

// Admit implements admission.MutationInterface. It looks at what the others have made
// of the object, before upstream validates it.
func (n noCostly) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if next, ok := n.Interface.(admission.MutationInterface); ok && n.Interface.Handles(a.GetOperation()) {
		if err := next.Admit(ctx, a, o); err != nil {
			return err
		}
	}
	if op := a.GetOperation(); op != admission.Create && op != admission.Update {
		return nil
	}
	if err := checkCost(a.GetObject()); err != nil {
		return apierrors.NewForbidden(a.GetResource().GroupResource(), a.GetName(), err)
	}
	return nil
}

// Validate implements admission.ValidationInterface.
func (n noCostly) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if next, ok := n.Interface.(admission.ValidationInterface); ok && n.Interface.Handles(a.GetOperation()) {
		return next.Validate(ctx, a, o)
	}
	return nil
}

// checkCost says what of an object costs too much.
func checkCost(obj runtime.Object) error {
	switch o := obj.(type) {
	case *certificates.CertificateSigningRequest:
		request, err := certificates.ParseCSR(o.Spec.Request)
		if err != nil {
			return nil // upstream says so in its own words
		}
		return checkKey(request.PublicKey)
	case *admissionregistration.MutatingWebhookConfiguration:
		for _, w := range o.Webhooks {
			if err := checkBundle(w.ClientConfig.CABundle); err != nil {
				return fmt.Errorf("webhook %q: %w", w.Name, err)
			}
		}
	case *admissionregistration.ValidatingWebhookConfiguration:
		for _, w := range o.Webhooks {
			if err := checkBundle(w.ClientConfig.CABundle); err != nil {
				return fmt.Errorf("webhook %q: %w", w.Name, err)
			}
		}
	case *apiregistration.APIService:
		return checkBundle(o.Spec.CABundle)
	case *apiextensions.CustomResourceDefinition:
		if c := o.Spec.Conversion; c != nil && c.WebhookClientConfig != nil {
			if err := checkBundle(c.WebhookClientConfig.CABundle); err != nil {
				return fmt.Errorf("conversion webhook: %w", err)
			}
		}
		columns := o.Spec.AdditionalPrinterColumns
		for _, v := range o.Spec.Versions {
			columns = append(columns[:len(columns):len(columns)], v.AdditionalPrinterColumns...)
		}
		for _, c := range columns {
			if err := checkColumn(c.JSONPath); err != nil {
				return fmt.Errorf("printer column %q: %w", c.Name, err)
			}
		}
	}
	return nil
}

// checkBundle looks at the keys of CA certificates.
func checkBundle(bundle []byte) error {
	for len(bundle) > 0 {
		var block *pem.Block
		if block, bundle = pem.Decode(bundle); block == nil {
			return nil
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			continue
		}
		if err := checkKey(cert.PublicKey); err != nil {
			return fmt.Errorf("CA bundle: %w", err)
		}
	}
	return nil
}

func checkKey(key any) error {
	if k, ok := key.(*rsa.PublicKey); ok && k.N.BitLen() > maxRSABits {
		return fmt.Errorf("an RSA key of %d bits is too large; up to %d are allowed", k.N.BitLen(), maxRSABits)
	}
	return nil
}

// checkColumn refuses a path whose results can be more than a few times what the
// object has: each step into all descendants, and each union that names things twice,
// multiplies what the steps before have found.
func checkColumn(path string) error {
	if len(path) > maxColumnPath {
		return fmt.Errorf("its path is longer than %d bytes", maxColumnPath)
	}
	parsed, err := jsonpath.Parse("", "{"+path+"}")
	if err != nil {
		return nil // upstream says so in its own words, and leaves the column out
	}
	descents, unions := 0, 1
	for todo := []jsonpath.Node{parsed.Root}; len(todo) > 0; {
		node := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		switch n := node.(type) {
		case *jsonpath.ListNode:
			todo = append(todo, n.Nodes...)
		case *jsonpath.FilterNode:
			todo = append(todo, n.Left, n.Right)
		case *jsonpath.UnionNode:
			unions = min(unions*max(len(n.Nodes), 1), maxColumnUnion+1)
			for _, l := range n.Nodes {
				todo = append(todo, l)
			}
		case *jsonpath.RecursiveNode:
			descents++
		}
	}
	if descents > 1 {
		return errors.New("its path descends with .. more than once")
	}
	if unions > maxColumnUnion {
		return fmt.Errorf("the unions of its path name more than %d things", maxColumnUnion)
	}
	return nil
}

var (
	_ admission.MutationInterface   = noCostly{}
	_ admission.ValidationInterface = noCostly{}
)

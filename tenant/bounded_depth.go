// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"

	"github.com/tenantd/tenantd/tenant/limit"
)

// Some objects contain objects of their own kind: the schemas of CRDs do, and composite
// pod groups. Upstream goes through them by recursion, and the decoders of protobuf do so
// without any bound: a request of 3 MB takes half a gigabyte of stack, or overflows it.
// Go ends the process then; nothing can recover. The object need not be of a kind that is asked for or served at
// all, since it is decoded before that is looked at.
const (
	// maxNesting bounds messages within messages; the JSON decoder's own bound is the
	// same.
	maxNesting = 10_000
	// maxSchemaDepth bounds schemas within schemas in a CRD. The deepest in use are
	// below 50. What upstream does for each level grows with the level.
	maxSchemaDepth = 200
	// maxProtobuf is the largest body that upstream reads.
	maxProtobuf = 3 << 20
)

// protobufMagic begins every object in Kubernetes' protobuf encoding.
var protobufMagic = []byte("k8s\x00")

// boundNesting fails the reading of clients' protobuf that is nested too deep to be
// decoded.
func boundNesting(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Body != nil && req.Body != http.NoBody && !limit.IsOwn(req.Context()) {
			req = req.WithContext(req.Context()) // a copy
			req.Body = &shallowBody{ReadCloser: req.Body}
		}
		next.ServeHTTP(w, req)
	})
}

// shallowBody looks at a body when it is first read: a stream's client may wait for an
// answer before it sends any.
type shallowBody struct {
	io.ReadCloser
	checked io.Reader // nil before that
}

func (b *shallowBody) Read(p []byte) (int, error) {
	if b.checked == nil {
		head := make([]byte, len(protobufMagic))
		n, err := io.ReadFull(b.ReadCloser, head)
		head = head[:n]
		if err == nil && bytes.Equal(head, protobufMagic) {
			var object []byte
			object, err = io.ReadAll(io.LimitReader(b.ReadCloser, maxProtobuf+1))
			if len(object) <= maxProtobuf && nestsDeeper(object, maxNesting) {
				return 0, apierrors.NewBadRequest(fmt.Sprintf("the body is nested more than %d deep", maxNesting))
			}
			head = append(head, object...)
		}
		b.checked = io.MultiReader(bytes.NewReader(head), b.ReadCloser)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			b.checked = io.MultiReader(bytes.NewReader(head), failing{err})
		}
	}
	return b.checked.Read(p)
}

// failing is a reader that fails.
type failing struct{ error }

func (f failing) Read([]byte) (int, error) { return 0, f.error }

// nestsDeeper reports whether there are more than max levels of messages in a
// message. It cannot know which bytes are a message, so all that could be one count.
// It steps from field to field as the generated decoders do, which forgive much: a
// stricter one could be led to stop before what they go on to. Each byte is looked at
// once.
func nestsDeeper(message []byte, max int) bool {
	level := [][]byte{message}
	for depth := 0; len(level) > 0; depth++ {
		if depth > max {
			return true
		}
		var below [][]byte
		for _, m := range level {
			below = appendMessages(below, m)
		}
		level = below
	}
	return false
}

// appendMessages appends what may be messages in m.
func appendMessages(to [][]byte, m []byte) [][]byte {
	for len(m) > 0 {
		tag, n := protowire.ConsumeVarint(m)
		if n < 0 {
			return to
		}
		m = m[n:]
		switch protowire.Type(tag & 7) {
		case protowire.VarintType:
			_, n = protowire.ConsumeVarint(m)
		case protowire.Fixed64Type:
			n = 8
		case protowire.Fixed32Type:
			n = 4
		case protowire.BytesType:
			var inner []byte
			if inner, n = protowire.ConsumeBytes(m); len(inner) > 1 {
				to = append(to, inner)
			}
		case protowire.StartGroupType, protowire.EndGroupType:
			n = 0 // what is in a group counts as if it were not
		default:
			return to
		}
		if n < 0 || n > len(m) {
			return to
		}
		m = m[n:]
	}
	return to
}

// shallowSchemas refuses CRDs whose schemas are nested too deep.
type shallowSchemas struct{ admission.Interface }

// Handles implements admission.Interface.
func (s shallowSchemas) Handles(op admission.Operation) bool {
	return op == admission.Create || op == admission.Update || s.Interface.Handles(op)
}

// Admit implements admission.MutationInterface. It looks before the others go through
// the schemas, and again at what they made of them.
func (s shallowSchemas) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if err := checkSchemas(a); err != nil {
		return err
	}
	if next, ok := s.Interface.(admission.MutationInterface); ok && s.Interface.Handles(a.GetOperation()) {
		if err := next.Admit(ctx, a, o); err != nil {
			return err
		}
		return checkSchemas(a)
	}
	return nil
}

func checkSchemas(a admission.Attributes) error {
	crd, ok := a.GetObject().(*apiextensions.CustomResourceDefinition)
	if !ok || a.GetSubresource() != "" {
		return nil
	}
	if err := checkSchemaDepth(crd); err != nil {
		return apierrors.NewForbidden(a.GetResource().GroupResource(), a.GetName(), err)
	}
	return nil
}

// Validate implements admission.ValidationInterface.
func (s shallowSchemas) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if next, ok := s.Interface.(admission.ValidationInterface); ok && s.Interface.Handles(a.GetOperation()) {
		return next.Validate(ctx, a, o)
	}
	return nil
}

func checkSchemaDepth(crd *apiextensions.CustomResourceDefinition) error {
	deep := crd.Spec.Validation != nil && deeper(crd.Spec.Validation.OpenAPIV3Schema, maxSchemaDepth)
	for _, v := range crd.Spec.Versions {
		deep = deep || v.Schema != nil && deeper(v.Schema.OpenAPIV3Schema, maxSchemaDepth)
	}
	if deep {
		return fmt.Errorf("its schema is nested more than %d deep", maxSchemaDepth)
	}
	return nil
}

// deeper reports whether there are more than max levels of schemas in s.
func deeper(s *apiextensions.JSONSchemaProps, max int) bool {
	if s == nil {
		return false
	}
	if max == 0 {
		return true
	}
	inner := []*apiextensions.JSONSchemaProps{s.Not}
	lists := [][]apiextensions.JSONSchemaProps{s.AllOf, s.OneOf, s.AnyOf}
	if s.Items != nil {
		inner, lists = append(inner, s.Items.Schema), append(lists, s.Items.JSONSchemas)
	}
	for _, or := range []*apiextensions.JSONSchemaPropsOrBool{s.AdditionalProperties, s.AdditionalItems} {
		if or != nil {
			inner = append(inner, or.Schema)
		}
	}
	for _, d := range s.Dependencies {
		inner = append(inner, d.Schema)
	}
	for _, i := range inner {
		if deeper(i, max-1) {
			return true
		}
	}
	for _, list := range lists {
		for i := range list {
			if deeper(&list[i], max-1) {
				return true
			}
		}
	}
	for _, named := range []map[string]apiextensions.JSONSchemaProps{s.Properties, s.PatternProperties, s.Definitions} {
		for _, p := range named {
			if deeper(&p, max-1) {
				return true
			}
		}
	}
	return false
}

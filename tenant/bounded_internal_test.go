// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// nest puts n messages around each other.
func nest(n int) (message []byte) {
	for range n {
		message = protowire.AppendBytes(protowire.AppendTag(nil, 28, protowire.BytesType), message)
	}
	return message
}

func TestNestsDeeper(t *testing.T) {
	group := protowire.AppendTag(protowire.AppendTag(nil, 99, protowire.StartGroupType), 98, protowire.EndGroupType)
	for name, c := range map[string]struct {
		message []byte
		deeper  bool
	}{
		"nothing":          {nil, false},
		"just":             {nest(99), false},
		"deeper":           {nest(200), true},
		"text":             {protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), []byte(strings.Repeat("rather long ", 1000))), false},
		"after a varint":   {append(protowire.AppendVarint(protowire.AppendTag(nil, 2, protowire.VarintType), 1), nest(200)...), true},
		"after a group":    {append(group, nest(200)...), true}, // whose ends do not match: upstream's decoder does not care
		"before nonsense":  {append(nest(200), 0xff), true},
		"a tag of 35 bits": {append(protowire.AppendVarint(nil, 1<<35|28<<3|2), protowire.AppendBytes(nil, nest(200))...), true},
	} {
		if got := nestsDeeper(c.message, 100); got != c.deeper {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// What is found not to be deep, upstream's decoder can be given.
func FuzzNestsDeeper(f *testing.F) {
	f.Add([]byte(nil))
	f.Add(nest(50))
	f.Add(nest(5000))
	f.Fuzz(func(t *testing.T, message []byte) {
		// A bound that the decoder's stack is far from.
		if nestsDeeper(message, maxNesting) {
			return
		}
		var schema apiextensionsv1.JSONSchemaProps
		if schema.Unmarshal(message) != nil {
			return
		}
		if depth := depthOf(&schema); depth > maxNesting {
			t.Errorf("%d levels were let through", depth)
		}
	})
}

func depthOf(s *apiextensionsv1.JSONSchemaProps) (depth int) {
	for ; s != nil; s = s.Not {
		depth++
	}
	return depth
}

func TestWeigh(t *testing.T) {
	for body, want := range map[string][2]int{
		``:                           {0, 0},
		`{}`:                         {1, 1},
		`[{},{},null]`:               {5, 2},
		`{"a":"{[,\"{[,","b":[[1]]}`: {4, 3},
		`"unfinished \`:              {0, 0},
	} {
		elements, depth := weigh([]byte(body))
		if elements != want[0] || depth != want[1] {
			t.Errorf("%s: %d elements, %d deep", body, elements, depth)
		}
	}
}

// Proxies in the environment are those of whoever started the process.
func TestProxiesAreForgotten(t *testing.T) {
	if os.Getenv("TENANTD_TEST_PROXIES") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestProxiesAreForgotten$")
		cmd.Env = append(os.Environ(), "TENANTD_TEST_PROXIES=1", "HTTPS_PROXY=http://user:password@192.0.2.1:3128", "https_proxy=http://192.0.2.1:3128")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	if err := PrepareProcess(nil); err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequest(http.MethodGet, "https://webhook.example.com", nil)
	if err != nil {
		t.Fatal(err)
	}
	if proxy, err := http.ProxyFromEnvironment(req); err != nil || proxy != nil {
		t.Errorf("%v, %v", proxy, err)
	}
}

// What is let through has, as upstream reads it, no parameter that refers to another.
func FuzzCheckParameters(f *testing.F) {
	f.Add([]byte(`{"parameters":{"p":{"$ref":"#/parameters/p"}}}`))
	f.Add([]byte(`{"parameters":{"p":{"\u0024ref":"#/%70arameters/p"}}}`))
	f.Add([]byte(`{"parameters":{"p":{"schema":{"$ref":"#/definitions/A"},"items":{"$ref":"#/parameters/p"}}}}`))
	f.Fuzz(func(t *testing.T, document []byte) {
		if _, depth := weigh(document); depth > maxDocumentDepth || checkParameters(document) != nil {
			return
		}
		var read spec.Swagger
		if read.UnmarshalJSON(document) != nil {
			return
		}
		for name, p := range read.Parameters {
			refs := []string{p.Ref.String()}
			if p.Schema != nil {
				refs = append(refs, p.Schema.Ref.String())
			}
			if p.Items != nil {
				refs = append(refs, p.Items.Ref.String())
			}
			for _, ref := range refs {
				if strings.HasPrefix(ref, "#/parameters/") {
					t.Errorf("%s refers to %s in %s", name, ref, document)
				}
			}
		}
	})
}

func TestOnlyJSON(t *testing.T) {
	for accept, want := range map[string]string{
		"": "application/json",
		"application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json",
		"*/*": "application/json",
	} {
		if got := onlyJSON([]string{accept}); got != want {
			t.Errorf("%q becomes %q", accept, got)
		}
	}
}

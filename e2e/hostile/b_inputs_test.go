// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"bytes"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

// inputs are small things that upstream works on for long.
func inputs() []attack {
	return []attack{
		{
			name:  "EndlessKeys",
			tries: "a certificate request and CA bundles with RSA keys of five million bits, which take hours to verify with",
			must:  "they are refused before anything is verified with them",
			run:   endlessKeys,
		},
		{
			name:  "EndlessColumns",
			tries: "printer columns whose paths multiply what they find with each step",
			must:  "the CustomResourceDefinitions are refused; those with honest paths are not",
			run:   endlessColumns,
		},
		{
			name:    "HugeQuantities",
			tries:   "quantities of twelve characters that are numbers of a hundred megabytes, in pods and in the CEL of a policy",
			must:    "they are calculated with as far as makes sense",
			watched: "the memory of the process",
			run:     hugeQuantities,
		},
	}
}

func hugeQuantities(t *testing.T, a *attacker) {
	a.frugally(t, 256<<20, func() {
		for i, q := range []string{
			"1e300000000", "1e-300000000", "0e300000000", "1e2147483647", "12345678901234567890e300000000", "-1e300000000", "1." + strings.Repeat("1", 1_000_000),
		} {
			for _, where := range []string{"limits", "requests"} {
				pod := fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"huge-%d-%s"},"spec":{"containers":[{"name":"x","image":"x","resources":{%q:{"cpu":%q,"memory":%q}}}]}}`, i, where, where, q, q)
				// Which of them are valid is upstream's business.
				if status, answer := a.raw(http.MethodPost, "/api/v1/namespaces/default/pods", "application/json", strings.NewReader(pod)); status >= http.StatusInternalServerError {
					t.Errorf("a pod with %s of %.30s is answered with %d: %.300s", where, q, status, answer)
				}
			}
		}
		policy := `{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingAdmissionPolicy","metadata":{"name":"huge"},"spec":{"failurePolicy":"Fail",
"matchConstraints":{"resourceRules":[{"apiGroups":[""],"apiVersions":["v1"],"operations":["CREATE"],"resources":["configmaps"]}]},
"validations":[{"expression":"quantity('1e' + object.data.zeros).isLessThan(quantity('1'))","message":"it is huge"}]}}`
		binding := `{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingAdmissionPolicyBinding","metadata":{"name":"huge"},"spec":{"policyName":"huge","validationActions":["Deny"]}}`
		for resource, object := range map[string]string{"validatingadmissionpolicies": policy, "validatingadmissionpolicybindings": binding} {
			if status, answer := a.raw(http.MethodPost, "/apis/admissionregistration.k8s.io/v1/"+resource, "application/json", strings.NewReader(object)); status != http.StatusCreated {
				t.Fatalf("%s are answered with %d: %.300s", resource, status, answer)
			}
		}
		eventually(t, "the policy decides", func() error {
			status, answer := a.raw(http.MethodPost, "/api/v1/namespaces/default/configmaps", "application/json",
				strings.NewReader(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"huge-"},"data":{"zeros":"300000000"}}`))
			if status == http.StatusCreated {
				return fmt.Errorf("not yet")
			}
			if !strings.Contains(answer, "it is huge") {
				t.Errorf("the policy answers with %d: %.300s", status, answer)
			}
			return nil
		})
	})
}

func quantity(s string) *resource.Quantity {
	q := resource.MustParse(s)
	return &q
}

// signed is what RFC 2986 calls CertificationRequest, and with other content what RFC
// 5280 calls Certificate.
type signed struct {
	Content   asn1.RawValue
	Algorithm pkix.AlgorithmIdentifier
	Signature asn1.BitString
}

type publicKey struct {
	Algorithm pkix.AlgorithmIdentifier
	Key       asn1.BitString
}

var (
	rsaEncryption = pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 1}, Parameters: asn1.NullRawValue}
	sha256WithRSA = pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 11}, Parameters: asn1.NullRawValue}
)

// der encodes what must be encodable.
func der(t testing.TB, v any) []byte {
	t.Helper()
	raw, err := asn1.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// largeKey is an RSA key of so many bytes.
func largeKey(t testing.TB, size int) (publicKey, asn1.BitString) {
	modulus := new(big.Int).SetBytes(bytes.Repeat([]byte{0xff}, size))
	key := der(t, struct {
		N *big.Int
		E int
	}{modulus, 1<<31 - 1})
	signature := append([]byte{0}, bytes.Repeat([]byte{0x55}, size-1)...)
	return publicKey{rsaEncryption, asn1.BitString{Bytes: key, BitLength: 8 * len(key)}}, asn1.BitString{Bytes: signature, BitLength: 8 * size}
}

func endlessKeys(t *testing.T, a *attacker) {
	const size = 625_000
	key, signature := largeKey(t, size)
	subject := pkix.Name{CommonName: "anybody"}.ToRDNSequence()
	content := der(t, struct {
		Version    int
		Subject    pkix.RDNSequence
		Key        publicKey
		Attributes asn1.RawValue
	}{0, subject, key, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 0, IsCompound: true}})
	request := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der(t, signed{asn1.RawValue{FullBytes: content}, sha256WithRSA, signature})})
	object := func(v any) []byte {
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	const tooLarge = "an RSA key of 5000000 bits is too large"
	status, answer := a.raw(http.MethodPost, "/apis/certificates.k8s.io/v1/certificatesigningrequests", "application/json", bytes.NewReader(object(map[string]any{
		"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": map[string]any{"name": "endless"},
		"spec": map[string]any{"signerName": "example.com/any", "usages": []string{"client auth"}, "request": request},
	})))
	if status != http.StatusForbidden || !strings.Contains(answer, tooLarge) {
		t.Errorf("a request for a certificate is answered with %d: %.300s", status, answer)
	}

	// The signature of no length is refused by a server that gets so far.
	content = der(t, struct {
		Version int `asn1:"explicit,tag:0"`
		Serial  *big.Int
		Signed  pkix.AlgorithmIdentifier
		Issuer  pkix.RDNSequence
		Valid   struct{ From, To asn1.RawValue }
		Subject pkix.RDNSequence
		Key     publicKey
	}{
		2, big.NewInt(1), sha256WithRSA, subject, struct{ From, To asn1.RawValue }{
			asn1.RawValue{Tag: asn1.TagUTCTime, Bytes: []byte("200101000000Z")}, asn1.RawValue{Tag: asn1.TagUTCTime, Bytes: []byte("490101000000Z")},
		}, subject, key,
	})
	bundle := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der(t, signed{asn1.RawValue{FullBytes: content}, sha256WithRSA, asn1.BitString{}})}))
	webhook := `{"apiVersion":"admissionregistration.k8s.io/v1","kind":%q,"metadata":{"name":"endless"},"webhooks":[{"name":"endless.example.com","sideEffects":"None","admissionReviewVersions":["v1"],"clientConfig":{"url":"https://127.0.0.1:1","caBundle":%q},"rules":[]}]}`
	for _, test := range []struct{ path, object string }{
		{"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", fmt.Sprintf(webhook, "MutatingWebhookConfiguration", bundle)},
		{"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations", fmt.Sprintf(webhook, "ValidatingWebhookConfiguration", bundle)},
		{"/apis/apiregistration.k8s.io/v1/apiservices", fmt.Sprintf(`{"apiVersion":"apiregistration.k8s.io/v1","kind":"APIService","metadata":{"name":"v1.endless.example.com"},"spec":{"group":"endless.example.com","version":"v1","groupPriorityMinimum":1,"versionPriority":1,"service":{"name":"x","namespace":"default"},"caBundle":%q}}`, bundle)},
		{"/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd("endless", "", fmt.Sprintf(`"conversion":{"strategy":"Webhook","webhook":{"conversionReviewVersions":["v1"],"clientConfig":{"url":"https://127.0.0.1:1","caBundle":%q}}},`, bundle))},
	} {
		status, answer := a.raw(http.MethodPost, test.path, "application/json", strings.NewReader(test.object))
		if status != http.StatusForbidden || !strings.Contains(answer, "RSA key of 5000000 bits is too large") {
			t.Errorf("%s: an object with a CA bundle is answered with %d: %.300s", test.path, status, answer)
		}
	}
}

// crd is a CustomResourceDefinition for things of any content.
func crd(name, version, spec string) string {
	return fmt.Sprintf(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"%[1]ss.example.com"},
		"spec":{"group":"example.com","scope":"Cluster","names":{"plural":"%[1]ss","singular":%[1]q,"kind":%[1]q},%[3]s
		"versions":[{"name":"v1","served":true,"storage":true,%[2]s"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`, name, version, spec)
}

func endlessColumns(t *testing.T, a *attacker) {
	const path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	for i, column := range []string{
		strings.Repeat("..a", 20),
		".a" + strings.Repeat("[0,0,0,0]", 20),
		".a[?(@..a)]..a",
		".a}{..a}{..a",
		strings.Repeat(".a[?(@", 100_000),
	} {
		name := fmt.Sprintf("column%d", i)
		raw, err := json.Marshal(column)
		if err != nil {
			t.Fatal(err)
		}
		status, answer := a.raw(http.MethodPost, path, "application/json", strings.NewReader(crd(name, `"additionalPrinterColumns":[{"name":"x","type":"string","jsonPath":`+string(raw)+`}],`, "")))
		if status != http.StatusForbidden || !strings.Contains(answer, "printer column") {
			t.Errorf("%.40q: the CustomResourceDefinition is answered with %d: %.300s", column, status, answer)
		}
	}
	for i, column := range []string{".a.b", ".a[?(@.type==\"Ready\")].status", "..a", ".a[*].b", ".metadata.creationTimestamp", ".a['b','c']"} {
		raw, err := json.Marshal(column)
		if err != nil {
			t.Fatal(err)
		}
		if status, answer := a.raw(http.MethodPost, path, "application/json", strings.NewReader(crd(fmt.Sprintf("fine%d", i), `"additionalPrinterColumns":[{"name":"x","type":"string","jsonPath":`+string(raw)+`}],`, ""))); status != http.StatusCreated {
			t.Errorf("the honest column %s is answered with %d: %.300s", column, status, answer)
		}
	}
}

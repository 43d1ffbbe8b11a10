// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

const (
	tokenSecret = "0123456789abcdef"
	tokenHash   = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	hostToken   = "abcdef." + tokenSecret + "." + tokenHash + ".system.k8s.example.com"
)

func TestHostToken(t *testing.T) {
	want := v1alpha1.HostToken{ID: "abcdef", Secret: tokenSecret, CACertHash: "sha256:" + tokenHash, ServerName: "system.k8s.example.com"}
	for _, text := range []string{hostToken, " " + hostToken + "\r\n"} {
		got, err := v1alpha1.ParseHostToken(text)
		if err != nil || got != want {
			t.Errorf("%q is read as %+v, error %v", text, got, err)
		}
	}
	if got := want.String(); got != hostToken {
		t.Errorf("written as %s", got)
	}
	if got := want.BootstrapToken(); got != "abcdef."+tokenSecret {
		t.Errorf("the bootstrap token is %s", got)
	}
}

func TestHostTokenFaults(t *testing.T) {
	for _, text := range []string{
		"", " \n", "abcdef", "abcdef." + tokenSecret, // kubeadm's
		strings.TrimSuffix(hostToken, ".system.k8s.example.com"),
		strings.TrimSuffix(hostToken, "system.k8s.example.com"),
		strings.ToUpper(hostToken),
		strings.Replace(hostToken, "abcdef", "abcde", 1),
		strings.Replace(hostToken, tokenSecret, tokenSecret+"0", 1),
		strings.Replace(hostToken, tokenSecret, tokenSecret[1:]+"-", 1),
		strings.Replace(hostToken, tokenHash, tokenHash[1:], 1),
		strings.Replace(hostToken, tokenHash, "g"+tokenHash[1:], 1),
		strings.Replace(hostToken, tokenHash, "sha256:"+tokenHash, 1),
		strings.Replace(hostToken, "system.k8s.example.com", "192.0.2.1", 1),
		strings.Replace(hostToken, "system.k8s", "system.k8s.", 1),
		hostToken + "\n" + hostToken,
		strings.Replace(hostToken, ".", ". ", 1),
		hostToken + ":443",
		strings.Replace(hostToken, "abcdef", "abcdef\n", 1),
	} {
		got, err := v1alpha1.ParseHostToken(text)
		if err == nil || got != (v1alpha1.HostToken{}) {
			t.Errorf("%q is read as %+v, error %v", text, got, err)
			continue
		}
		if strings.Contains(strings.ToLower(err.Error()), tokenSecret[1:]) {
			t.Errorf("the error has the secret: %v", err)
		}
		if !strings.Contains(err.Error(), "tenantctl host token") {
			t.Errorf("the error does not say what to do: %v", err)
		}
	}
}

func TestHostTokenInLogs(t *testing.T) {
	token, err := v1alpha1.ParseHostToken(hostToken)
	if err != nil {
		t.Fatal(err)
	}
	var text, json bytes.Buffer
	slog.New(slog.NewTextHandler(&text, nil)).Info("joining", "token", token)
	slog.New(slog.NewJSONHandler(&json, nil)).Info("joining", "token", &token)
	for _, line := range []string{text.String(), json.String()} {
		if strings.Contains(line, tokenSecret) || !strings.Contains(line, "abcdef") {
			t.Errorf("logged as %s", line)
		}
	}
}

// What is read as a token is written as it was read, and can go where its parts go:
// into a header, a field selector and a TLS handshake.
func FuzzParseHostToken(f *testing.F) {
	f.Add(hostToken)
	f.Add("")
	f.Add("abcdef." + tokenSecret)
	f.Add(hostToken + "\n")
	f.Add("......")
	f.Add(strings.Replace(hostToken, "system", "xn--bcher-kva", 1))
	f.Fuzz(func(t *testing.T, text string) {
		token, err := v1alpha1.ParseHostToken(text)
		if err != nil {
			if token != (v1alpha1.HostToken{}) {
				t.Fatalf("a token with an error: %+v", token)
			}
			return
		}
		if got := token.String(); got != strings.TrimSpace(text) {
			t.Fatalf("%q is written as %q", text, got)
		}
		again, err := v1alpha1.ParseHostToken(token.String())
		if err != nil || again != token {
			t.Fatalf("%q is read as %+v and then as %+v, error %v", text, token, again, err)
		}
		if len(token.ID) != 6 || len(token.Secret) != 16 || len(token.CACertHash) != len("sha256:")+64 || len(token.ServerName) > 253 {
			t.Fatalf("%q is read as %+v", text, token)
		}
		if i := strings.IndexFunc(token.String(), func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '.' && r != '-'
		}); i >= 0 {
			t.Fatalf("%q has %q", text, token.String()[i])
		}
	})
}

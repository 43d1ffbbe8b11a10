// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"strings"
	"testing"
)

func TestSealerOpensOnlyWhatItSealed(t *testing.T) {
	sealer := newSealer(t, 1)
	secret := []byte("the private key")
	sealed := sealer.Seal("a/ca.key", secret)
	if bytes.Contains(sealed, secret) {
		t.Fatal("the plaintext is in the sealed value")
	}
	if bytes.Equal(sealed, sealer.Seal("a/ca.key", secret)) {
		t.Fatal("sealing twice gives the same value: the nonce is not random")
	}
	if len(sealed) != len(secret)+sealOverhead {
		t.Fatalf("overhead is %d bytes, want %d", len(sealed)-len(secret), sealOverhead)
	}
	for i := range sealed {
		flipped := bytes.Clone(sealed)
		flipped[i] ^= 1
		if _, err := sealer.Open("a/ca.key", flipped); err == nil {
			t.Errorf("opens with bit 0 of byte %d flipped", i)
		}
	}
	for i := range sealed {
		if _, err := sealer.Open("a/ca.key", sealed[:i]); err == nil {
			t.Errorf("opens when cut to %d bytes", i)
		}
	}
	for _, tt := range []struct {
		what   string
		sealer *Sealer
		name   string
		value  []byte
		remedy string // part of the error; empty: it opens
	}{
		{"as sealed", sealer, "a/ca.key", sealed, ""},
		{"rotated, old key kept", newSealer(t, 2, 1), "a/ca.key", sealed, ""},
		{"other name", sealer, "b/ca.key", sealed, "belongs to another name; restore it from a backup"},
		{"other key", newSealer(t, 2), "a/ca.key", sealed, "put back the sealing key file"},
		{"not sealed", sealer, "a/ca.key", secret, "not sealed; restore it from a backup"},
		{"empty", sealer, "a/ca.key", nil, "not sealed; restore it from a backup"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			got, err := tt.sealer.Open(tt.name, tt.value)
			switch {
			case tt.remedy == "" && (err != nil || !bytes.Equal(got, secret)):
				t.Fatalf("got %q, %v; want the plaintext", got, err)
			case tt.remedy != "" && (err == nil || !strings.Contains(err.Error(), tt.remedy)):
				t.Fatalf("got error %v; want one that says %q", err, tt.remedy)
			}
		})
	}
}

func TestNewSealerRefusesBadKeys(t *testing.T) {
	for what, keys := range map[string][][]byte{
		"none":  nil,
		"short": {make([]byte, KeySize), make([]byte, KeySize-1)},
	} {
		if _, err := NewSealer(keys...); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

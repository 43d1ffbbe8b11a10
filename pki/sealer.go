// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// KeySize is the length in bytes of a sealing key: AES-256.
const KeySize = 32

const (
	// sealMagic opens every sealed value and versions its layout:
	// magic, key id, nonce, ciphertext with tag.
	sealMagic = "tds1"
	keyIDSize = 8

	// sealOverhead is what sealing adds: magic, key id, nonce and tag.
	sealOverhead = len(sealMagic) + keyIDSize + 12 + 16
)

// Sealer encrypts private material before it reaches etcd, with AES-256-GCM and
// a random nonce. The name under which a value is stored is authenticated with
// it, so whoever can write to etcd can neither change a value nor move it to
// another name. A Sealer is immutable and safe for concurrent use.
type Sealer struct {
	order []string // key ids; the first seals
	keys  map[string]cipher.AEAD
}

// NewSealer returns a Sealer that seals with the first key and opens with any of
// them. To rotate, put the new key first, run [Storage.Reseal] for every tenant
// and then drop the old key. Every key is [KeySize] bytes; they are not retained.
func NewSealer(keys ...[]byte) (*Sealer, error) {
	if len(keys) == 0 {
		return nil, errors.New("create sealer: no sealing key given; pass at least one, see LoadOrCreateKey")
	}
	s := &Sealer{keys: make(map[string]cipher.AEAD, len(keys))}
	for i, key := range keys {
		if len(key) != KeySize {
			return nil, fmt.Errorf("create sealer: sealing key %d has %d bytes, need %d random ones", i, len(key), KeySize)
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, fmt.Errorf("create sealer: %w", err)
		}
		aead, err := cipher.NewGCMWithRandomNonce(block)
		if err != nil {
			return nil, fmt.Errorf("create sealer: %w", err)
		}
		id := keyID(key)
		if _, dup := s.keys[id]; !dup {
			s.order = append(s.order, id)
			s.keys[id] = aead
		}
	}
	return s, nil
}

// Seal encrypts plaintext for storage under name.
func (s *Sealer) Seal(name string, plaintext []byte) []byte {
	header := []byte(sealMagic + s.order[0])
	return s.keys[s.order[0]].Seal(header, nil, plaintext, additionalData(header, name))
}

// Open decrypts a value that was sealed for name.
func (s *Sealer) Open(name string, sealed []byte) ([]byte, error) {
	id, ok := sealedBy(sealed)
	if !ok {
		return nil, fmt.Errorf("open sealed %q: the value is not sealed; restore it from a backup", name)
	}
	aead, ok := s.keys[id]
	if !ok {
		return nil, fmt.Errorf("open sealed %q: it was sealed with key %s, but the loaded sealing key is %s; "+
			"put back the sealing key file of the host that wrote it", name, hexID(id), s)
	}
	header := sealed[:len(sealMagic)+keyIDSize]
	plaintext, err := aead.Open(nil, nil, sealed[len(header):], additionalData(header, name))
	if err != nil {
		return nil, fmt.Errorf("open sealed %q: the value was altered or belongs to another name; restore it from a backup", name)
	}
	return plaintext, nil
}

// String lists the ids of the keys and so keeps the keys themselves out of logs.
func (s *Sealer) String() string {
	ids := make([]string, len(s.order))
	for i, id := range s.order {
		ids[i] = hexID(id)
	}
	return strings.Join(ids, ", ")
}

// current reports whether sealed was made with the key that seals now.
func (s *Sealer) current(sealed []byte) bool {
	id, ok := sealedBy(sealed)
	return ok && id == s.order[0]
}

func sealedBy(sealed []byte) (id string, ok bool) {
	rest, ok := strings.CutPrefix(string(sealed[:min(len(sealed), len(sealMagic)+keyIDSize)]), sealMagic)
	return rest, ok && len(rest) == keyIDSize
}

func keyID(key []byte) string {
	sum := sha256.Sum256(append([]byte("tenantd sealing key id\x00"), key...))
	return string(sum[:keyIDSize])
}

func hexID(id string) string { return hex.EncodeToString([]byte(id)) }

func additionalData(header []byte, name string) []byte {
	return append(header[:len(header):len(header)], name...)
}

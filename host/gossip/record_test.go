// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bytes"
	"reflect"
	"testing"
)

// What is read is valid, and is read the same when it is written again.
func FuzzRecord(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		record, err := decodeRecord(data)
		if err != nil {
			return
		}
		body, err := record.encode()
		if err != nil {
			t.Fatalf("%+v was read and cannot be written: %v", record, err)
		}
		again, err := decodeRecord(body)
		if err != nil {
			t.Fatalf("%s cannot be read: %v", body, err)
		}
		rewritten, err := again.encode()
		if err != nil || !bytes.Equal(rewritten, body) {
			t.Fatalf("%s became %s: %v", body, rewritten, err)
		}
	})
}

// What is read can be acted upon.
func FuzzMessage(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := decodeMessage(data)
		if err != nil {
			return
		}
		v := newTestView()
		joinedAs(v, "b")
		for _, d := range m.Digests {
			v.heard(d, m.From)
		}
		if m.Record != nil {
			v.store(m.Record.digest, Record{}, m.Record.Body)
		}
		v.envelopes(m.Want, m.From)
		for _, d := range v.digests() {
			if err := d.validate(); err != nil {
				t.Fatalf("%s makes a digest that others refuse: %v", data, err)
			}
		}
		if own := v.peers["self"]; own.state != Alive || own.have == nil || own.address != "127.0.0.1:1" {
			t.Fatalf("%s changed this host: %+v", data, own)
		}
		// Written again, it says the same.
		again, err := decodeMessage(m.encode())
		if err != nil {
			t.Fatalf("%s cannot be read again: %v", data, err)
		}
		if !reflect.DeepEqual(again.Digests, m.Digests) && len(m.Digests) > 0 {
			t.Fatalf("%+v became %+v", m.Digests, again.Digests)
		}
	})
}

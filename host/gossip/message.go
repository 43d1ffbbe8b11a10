// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"cmp"
	"encoding/json"
	"fmt"
)

// maxMessage bounds a message between hosts: one record and what is around it.
const maxMessage = MaxRecord + 4<<10

// maxEpoch leaves room above it, so that a host can always take a larger one.
const maxEpoch = 1 << 62

// version orders the records of one host.
type version struct {
	Epoch int64  `json:"e"` // when the host started, in nanoseconds since 1970
	Seq   uint64 `json:"s"` // counts its updates
}

func (v version) compare(w version) int {
	return cmp.Or(cmp.Compare(v.Epoch, w.Epoch), cmp.Compare(v.Seq, w.Seq))
}

// digest says which version of a host's record there is.
type digest struct {
	Name string `json:"n"`

	// Address is where that host gossips. A digest of another host of the same name,
	// which memberlist refused, differs in it.
	Address string `json:"a"`

	version

	// Left says that the host leaves, or left, in the life that Epoch names: memberlist
	// knows it and does not tell.
	Left bool `json:"l,omitempty"`
}

func (d digest) validate() error {
	if !isDNSName(d.Name) {
		return fmt.Errorf("host's name %q is not a DNS name", clip(d.Name))
	}
	if !isHostPort(d.Address) {
		return fmt.Errorf("host's address %q is not host:port", clip(d.Address))
	}
	if d.Epoch <= 0 || d.Epoch > maxEpoch {
		return fmt.Errorf("epoch %d is impossible", d.Epoch)
	}
	return nil
}

// envelope is a record on its way.
type envelope struct {
	digest
	Body json.RawMessage `json:"b"` // as its host wrote it
}

// message is all that hosts send each other beside memberlist's own: what the sender
// has, what it wants, or a record that was wanted.
type message struct {
	From    string    `json:"f"`
	Digests []digest  `json:"d,omitempty"`
	Want    []string  `json:"w,omitempty"` // hosts' names
	Record  *envelope `json:"r,omitempty"`
}

func (m message) encode() []byte {
	data, err := json.Marshal(m)
	if err != nil {
		panic(err) // a body is JSON, because it was decoded or is ours
	}
	return data
}

// decodeMessage reads and checks all but the record's body.
func decodeMessage(data []byte) (message, error) {
	if len(data) > maxMessage {
		return message{}, fmt.Errorf("%w: %d bytes", errTooLarge, len(data))
	}
	var m message
	if err := json.Unmarshal(data, &m); err != nil {
		return message{}, err
	}
	if !isDNSName(m.From) {
		return message{}, fmt.Errorf("sender's name %q is not a DNS name", clip(m.From))
	}
	if len(m.Digests) > MaxHosts || len(m.Want) > MaxHosts {
		return message{}, fmt.Errorf("it names more than %d hosts", MaxHosts)
	}
	for _, d := range m.Digests {
		if err := d.validate(); err != nil {
			return message{}, err
		}
	}
	if m.Record != nil {
		if err := m.Record.validate(); err != nil {
			return message{}, err
		}
	}
	return m, nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func newTestView() *view { return newView("self", "127.0.0.1:1", version{Epoch: 100}) }

// about makes a digest of a host that joinedAs has made known.
func about(name string, epoch int64, seq uint64) digest {
	return digest{Name: name, Address: "127.0.0.2:1", version: version{epoch, seq}}
}

func joinedAs(v *view, names ...string) {
	for _, name := range names {
		v.joined(name, "127.0.0.2:1", 50)
	}
}

func keep(t *testing.T, v *view, d digest, r Record) bool {
	t.Helper()
	body, err := r.encode()
	if err != nil {
		t.Fatal(err)
	}
	_, stored, err := v.store(d, r, body)
	if err != nil {
		t.Fatal(err)
	}
	return stored
}

func TestOlderRecordsAreNoNews(t *testing.T) {
	v := newTestView()
	joinedAs(v, "b")
	for _, step := range []struct {
		epoch int64
		seq   uint64
		news  bool
	}{{50, 3, true}, {50, 3, false}, {50, 2, false}, {50, 4, true}, {49, 9, false}, {51, 1, true}, {50, 5, false}} {
		d := about("b", step.epoch, step.seq)
		if o := v.heard(d, "b"); o.fetch != step.news {
			t.Errorf("%+v: wanted %t", step, o.fetch)
		}
		if news, _ := v.wanted(d); news != step.news {
			t.Errorf("%+v: news %t", step, news)
		}
		if keep(t, v, d, Record{}) != step.news {
			t.Errorf("%+v: stored is not %t", step, step.news)
		}
	}
}

// The one that has it is asked first, then others, with growing pauses, and in the
// end nobody.
func TestFetching(t *testing.T) {
	v := newTestView()
	joinedAs(v, "b", "c", "d")
	for _, name := range []string{"b", "c", "d"} {
		keep(t, v, about(name, 50, 1), Record{})
	}
	v.heard(about("b", 50, 2), "c")
	v.heard(about("b", 50, 2), "d")
	now := time.Now()
	var asked []string
	var last time.Duration
	for range 100 {
		requests, wait := v.due(now)
		for _, r := range requests {
			asked = append(asked, r.to.name)
		}
		if len(requests) > 0 && wait < last {
			t.Errorf("the wait of %v is shorter than %v", wait, last)
		}
		if wait == 0 {
			break
		}
		if again, _ := v.due(now); len(again) > 0 {
			t.Errorf("asked %v twice at once", again)
		}
		last = wait
		now = now.Add(wait)
	}
	if got := strings.Join(asked, ""); got != strings.Repeat("cdb", maxTries/3) {
		t.Errorf("asked %s", got)
	}
	v.departed("c")
	v.heard(about("b", 50, 3), "c")
	if r, _ := v.due(now); len(r) != 1 || r[0].to.name != "b" {
		t.Errorf("with c dead: asked %+v", r)
	}
	keep(t, v, about("b", 50, 3), Record{})
	if r, wait := v.due(now.Add(time.Hour)); len(r) > 0 || wait > 0 {
		t.Errorf("asked %+v for what is here", r)
	}
}

// A host that never sends what it announces is not asked for ever.
func TestUnreadableRecordIsNotAskedForAgain(t *testing.T) {
	v := newTestView()
	joinedAs(v, "b")
	v.heard(about("b", 50, 2), "b")
	v.unwanted("b")
	if r, _ := v.due(time.Now()); len(r) > 0 {
		t.Errorf("asked %+v", r)
	}
}

func TestOwnRecordFromAnotherLife(t *testing.T) {
	v := newTestView()
	v.update(Record{Version: "now"}, []byte(`{"version":"now"}`))
	d := digest{Name: "self", Address: "127.0.0.1:1", version: version{500, 7}}
	o := v.heard(d, "b")
	if o.spread == nil || o.spread.compare(d.version) <= 0 {
		t.Fatalf("%+v is not above %+v", o.spread, d)
	}
	if keep(t, v, digest{Name: "self", Address: "127.0.0.1:1", version: version{900, 7}}, Record{}) {
		t.Error("own record was overwritten")
	}
	if h := v.hosts()[0]; h.Record.Version != "now" {
		t.Errorf("own record is %+v", h.Record)
	}
	v.leave()
	if o := v.heard(digest{Name: "self", Address: "127.0.0.1:1", version: version{999, 7}}, "b"); o.spread != nil {
		t.Error("a host that left says that it is there")
	}
}

// A host whose clock was set back before it started again is told so when it is
// seen, not at the next push/pull.
func TestHostFromThePastIsTold(t *testing.T) {
	v := newTestView()
	joinedAs(v, "b")
	keep(t, v, about("b", 50, 4), Record{})
	v.departed("b")
	for epoch, want := range map[int64]bool{40: true, 50: false, 60: false} {
		who, ahead := v.joined("b", "127.0.0.2:1", epoch)
		if ahead != want || who.digest().version != (version{50, 4}) {
			t.Errorf("epoch %d: ahead %t of %+v", epoch, ahead, who.digest())
		}
	}
	if _, ahead := v.joined("b", "127.0.0.3:1", 40); ahead || v.peers["b"].have != nil {
		t.Error("a record of another address is kept")
	}
}

// Memberlist tells only that a host is gone, and it may tell it before or after the
// host's farewell has come.
func TestFarewellInAnyOrder(t *testing.T) {
	farewell := about("b", 50, 1)
	farewell.Left = true
	for _, early := range []bool{true, false} {
		v := newTestView()
		joinedAs(v, "b")
		keep(t, v, about("b", 50, 1), Record{})
		if early {
			v.heard(farewell, "b")
		}
		v.departed("b")
		if !early {
			if o := v.heard(farewell, "c"); !o.changed {
				t.Error("nobody is told that it left")
			}
		}
		if v.peers["b"].state != Left {
			t.Errorf("early %t: b is %s", early, v.peers["b"].state)
		}
		if o := v.heard(farewell, "c"); o.spread != nil || o.changed {
			t.Error("a farewell goes round for ever")
		}
		// In its next life it can die like any other.
		v.joined("b", "127.0.0.2:1", 60)
		v.departed("b")
		if v.peers["b"].state != Dead {
			t.Errorf("early %t: b is %s in its next life", early, v.peers["b"].state)
		}
	}
}

func TestHostsAreBounded(t *testing.T) {
	v := newTestView()
	for i := range MaxHosts - 1 {
		name := fmt.Sprintf("h%d", i)
		if !v.admits(name) {
			t.Fatalf("no room for %s", name)
		}
		joinedAs(v, name)
	}
	if v.admits("more") || !v.admits("h0") {
		t.Error("there is room for one more, or none for one that is known")
	}
	v.departed("h7")
	v.departed("h3")
	keep(t, v, about("h7", 50, 1), Record{})
	if !v.admits("more") || v.peers["h7"] != nil || v.peers["h3"] == nil {
		t.Error("not the host longest gone made room")
	}
	if v.bytes != 0 {
		t.Errorf("%d bytes of it are still counted", v.bytes)
	}
}

func TestBytesAreBounded(t *testing.T) {
	v := newTestView()
	body := make([]byte, MaxRecord)
	refused := 0
	for i := range maxBytes/MaxRecord + 5 {
		name := fmt.Sprintf("h%d", i)
		joinedAs(v, name)
		if _, _, err := v.store(about(name, 50, 1), Record{}, body); err != nil {
			refused++
		}
	}
	if refused != 5 || v.bytes != maxBytes {
		t.Errorf("refused %d, keeps %d bytes", refused, v.bytes)
	}
	if _, stored, err := v.store(about("h0", 50, 2), Record{}, body); err != nil || !stored {
		t.Errorf("a host cannot replace its own: %v", err)
	}
}

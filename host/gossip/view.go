// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

const (
	// MaxHosts bounds the hosts that one knows, dead ones included. Behind it, those
	// longest gone are forgotten, and if all live the newcomer is ignored.
	MaxHosts = 1000

	// maxBytes bounds the records of all hosts together, as they are sent.
	maxBytes = 256 << 20

	// A record that is not here a quarter of a second after it was asked for is asked
	// for again, of another host that has it; the wait doubles up to the longest.
	firstRetry = 250 * time.Millisecond
	maxRetry   = 4 * time.Second
	maxTries   = 12 // then the next push/pull brings it up again
	maxSources = 8
)

var errTooMany = errors.New("there are too many hosts")

// State is what this host thinks of another.
type State string

// States of a host.
const (
	Alive State = "alive"
	Left  State = "left" // it said so
	Dead  State = "dead" // it does not answer
)

// Host is another host, or this one, as seen from here.
type Host struct {
	Name    string
	Address string // where it gossips

	// Record is the last that is known. It is empty until the first has come; its
	// Address is then, too. It must not be modified.
	Record Record

	State State
	Since time.Time // of State
}

// peer is what the view has of one host.
type peer struct {
	name    string
	address string
	epoch   int64 // the life that memberlist speaks of
	left    int64 // the last life that was said to leave
	state   State
	since   time.Time
	have    *held // nil until a record has come
}

type held struct {
	version
	record Record
	body   []byte
}

// life is the newest that is known of.
func (p *peer) life() int64 {
	if p.have != nil {
		return max(p.epoch, p.have.Epoch)
	}
	return p.epoch
}

// newer reports whether v is one that the view does not have yet.
func (p *peer) newer(v version) bool { return p.have == nil || v.compare(p.have.version) > 0 }

func (p *peer) digest() digest {
	d := digest{Name: p.name, Address: p.address, Left: p.left > 0 && p.left >= p.life()}
	d.Epoch = p.epoch
	if p.have != nil {
		d.version = p.have.version
	}
	if d.Left {
		d.Epoch = max(d.Epoch, p.left)
	}
	return d
}

// want is a record that is to be fetched.
type want struct {
	version
	sources []string // hosts that said they have it
	tries   int
	next    time.Time
}

// view is what this host knows. It does no I/O. Memberlist calls it with a lock of
// its own held, so nothing here calls memberlist.
type view struct {
	self string // constant

	mu    sync.Mutex // guards what follows
	peers map[string]*peer
	wants map[string]*want
	bytes int
}

func newView(self, address string, v version) *view {
	return &view{
		self: self,
		peers: map[string]*peer{self: {
			name: self, address: address, epoch: v.Epoch, state: Alive, since: time.Now(),
			have: &held{version: v},
		}},
		wants: map[string]*want{},
	}
}

// update sets this host's own record and returns its digest, or false if it is the
// one that there was.
func (v *view) update(record Record, body []byte) (digest, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.peers[v.self]
	if string(p.have.body) == string(body) {
		return digest{}, false
	}
	p.have = &held{version: version{p.have.Epoch, p.have.Seq + 1}, record: record, body: body}
	return p.digest(), true
}

// leave says that this host leaves.
func (v *view) leave() digest {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.peers[v.self]
	p.left, p.state, p.since = p.life(), Left, time.Now()
	return p.digest()
}

// admits reports whether there is room for a host.
func (v *view) admits(name string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.peers[name] != nil || len(v.peers) < MaxHosts {
		return true
	}
	var oldest *peer
	for _, p := range v.peers {
		if p.state != Alive && (oldest == nil || p.since.Before(oldest.since)) {
			oldest = p
		}
	}
	if oldest == nil {
		return false
	}
	v.remove(oldest)
	return true
}

func (v *view) remove(p *peer) {
	v.drop(p)
	delete(v.peers, p.name)
	delete(v.wants, p.name)
}

func (v *view) drop(p *peer) {
	if p.have != nil {
		v.bytes -= len(p.have.body)
		p.have = nil
	}
}

// forget removes a host that is gone.
func (v *view) forget(name string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if p := v.peers[name]; p != nil && name != v.self && p.state != Alive {
		v.remove(p)
	}
}

// joined notes that memberlist thinks a host alive, in the life that epoch names. If
// there is a record from what looks like a later life, because a clock was set back,
// the host is to be told, so that it can take a larger version.
func (v *view) joined(name, address string, epoch int64) (who peer, ahead bool) {
	if name == v.self {
		return peer{}, false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.peers[name]
	if p == nil {
		p = &peer{name: name}
		v.peers[name] = p
	}
	if p.address != address {
		v.drop(p) // what that one said is not what this one would
	}
	if p.state != Alive {
		p.state, p.since = Alive, time.Now()
	}
	p.address, p.epoch = address, epoch
	if p.have == nil || p.have.Epoch < epoch {
		v.want(name, version{Epoch: epoch}, name)
	}
	return *p, p.have != nil && p.have.Epoch > epoch
}

// departed notes that memberlist thinks a host gone.
func (v *view) departed(name string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.peers[name]
	if p == nil || name == v.self {
		return
	}
	p.state, p.since = Dead, time.Now()
	if p.left > 0 && p.left >= p.life() {
		p.state = Left
	}
}

// outcome is what follows from a digest.
type outcome struct {
	spread   *digest // to be gossiped on
	fetch    bool    // something is wanted
	changed  bool    // Hosts are
	conflict bool    // it is of another host of that name
}

// heard takes a digest that a host sent.
func (v *view) heard(d digest, from string) (o outcome) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.peers[d.Name]
	switch {
	case p == nil:
		return o // when memberlist knows it, its record is asked for
	case p.address != d.Address:
		o.conflict = true
		return o
	case d.Name == v.self:
		// From an earlier life, when the clock was ahead of now's. Others would keep
		// what they have.
		if p.state == Alive && d.Epoch < maxEpoch && (p.newer(d.version) || d.Left && d.Epoch >= p.have.Epoch) {
			own := *p.have
			own.Epoch = d.Epoch + 1
			p.have = &own
			now := p.digest()
			o.spread = &now
		}
		return o
	}
	if d.Left && d.Epoch >= p.life() && d.Epoch > p.left {
		p.left = d.Epoch
		o.spread = &d
		if p.state == Dead {
			p.state, o.changed = Left, true
		}
	}
	if p.state == Alive && p.newer(d.version) {
		v.want(d.Name, d.version, from)
		o.fetch = true
	}
	return o
}

// want asks for a record of at least this version. v.mu is held.
func (v *view) want(name string, at version, from string) {
	w := v.wants[name]
	if w == nil || at.compare(w.version) > 0 {
		w = &want{version: at}
		v.wants[name] = w
	}
	if !slices.Contains(w.sources, from) && len(w.sources) < maxSources {
		w.sources = append(w.sources, from)
	}
}

// request asks one host for records.
type request struct {
	to    peer
	names []string
}

// due returns what is to be asked for now, and how long until there may be more;
// zero if nothing is wanted.
func (v *view) due(now time.Time) (requests []request, wait time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	names := map[string][]string{} // by whom to ask
	for name, w := range v.wants {
		if w.next.After(now) {
			wait = sooner(wait, w.next.Sub(now))
			continue
		}
		source, ok := v.source(name, w)
		if !ok || w.tries >= maxTries {
			delete(v.wants, name)
			continue
		}
		names[source] = append(names[source], name)
		pause := min(firstRetry<<w.tries, maxRetry)
		w.tries++
		w.next = now.Add(pause)
		wait = sooner(wait, pause)
	}
	for source, of := range names {
		requests = append(requests, request{*v.peers[source], of})
	}
	return requests, wait
}

func sooner(a, b time.Duration) time.Duration {
	if a == 0 {
		return b
	}
	return min(a, b)
}

// source returns a living host to ask, another one with each try: those that said
// they have it, and the one that it is from.
func (v *view) source(name string, w *want) (string, bool) {
	all := w.sources
	if !slices.Contains(all, name) {
		all = append(slices.Clone(all), name)
	}
	for i := range all {
		s := all[(w.tries+i)%len(all)]
		if p := v.peers[s]; p != nil && s != v.self && p.state == Alive {
			return s, true
		}
	}
	return "", false
}

// wanted reports whether a record that came is news. If it is not, conflict says
// whether it is of another host of that name.
func (v *view) wanted(d digest) (news, conflict bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.peers[d.Name]
	if p == nil || d.Name == v.self {
		return false, false
	}
	return p.address == d.Address && p.newer(d.version), p.address != d.Address
}

// unwanted gives up a record that cannot be read, until somebody has a newer one.
func (v *view) unwanted(name string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.wants, name)
}

// store keeps a record that came. It returns false if it is no news by now, and an
// error if there is no room for it.
func (v *view) store(d digest, record Record, body []byte) (digest, bool, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.peers[d.Name]
	if p == nil || d.Name == v.self || p.address != d.Address || !p.newer(d.version) {
		return digest{}, false, nil
	}
	if w := v.wants[d.Name]; w != nil && d.compare(w.version) >= 0 {
		delete(v.wants, d.Name)
	}
	had := 0
	if p.have != nil {
		had = len(p.have.body)
	}
	if v.bytes-had+len(body) > maxBytes {
		return digest{}, false, errors.New("the records of all hosts are too large together")
	}
	v.bytes += len(body) - had
	p.have = &held{version: d.version, record: record, body: body}
	return p.digest(), true, nil
}

// digests are of all hosts that others should know as this one does.
func (v *view) digests() []digest {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []digest
	for _, p := range v.peers {
		// A dead host's record helps nobody, and it may have left unnoticed.
		if p.state == Left || p.state == Alive && p.have != nil {
			all = append(all, p.digest())
		}
	}
	return all
}

// envelopes are the records of these hosts, of those that are here, and the living
// host that wants them, if it is one.
func (v *view) envelopes(names []string, to string) (peer, []envelope, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	asker := v.peers[to]
	if asker == nil || to == v.self || asker.state != Alive {
		return peer{}, nil, false
	}
	slices.Sort(names)
	var found []envelope
	for _, name := range slices.Compact(names) {
		if p := v.peers[name]; p != nil && p.have != nil && p.have.body != nil {
			d := p.digest()
			d.version = p.have.version
			found = append(found, envelope{d, p.have.body})
		}
	}
	return *asker, found, true
}

// living are all other hosts that live.
func (v *view) living() []peer {
	return v.others(func(p *peer) bool { return p.state == Alive })
}

// lost are some hosts that died, others each time.
func (v *view) lost(most int) []peer {
	dead := v.others(func(p *peer) bool { return p.state == Dead })
	rand.Shuffle(len(dead), func(i, j int) { dead[i], dead[j] = dead[j], dead[i] })
	return dead[:min(len(dead), most)]
}

func (v *view) others(match func(*peer) bool) []peer {
	v.mu.Lock()
	defer v.mu.Unlock()
	var found []peer
	for _, p := range v.peers {
		if p.name != v.self && match(p) {
			found = append(found, *p)
		}
	}
	return found
}

func (v *view) hosts() []Host {
	v.mu.Lock()
	defer v.mu.Unlock()
	hosts := make([]Host, 0, len(v.peers))
	for _, p := range v.peers {
		h := Host{Name: p.name, Address: p.address, State: p.state, Since: p.since}
		if p.have != nil {
			h.Record = p.have.record
		}
		hosts = append(hosts, h)
	}
	slices.SortFunc(hosts, func(a, b Host) int { return cmp.Compare(a.Name, b.Name) })
	return hosts
}

func (v *view) count() map[State]int {
	v.mu.Lock()
	defer v.mu.Unlock()
	n := map[State]int{Alive: 0, Left: 0, Dead: 0}
	for _, p := range v.peers {
		n[p.state]++
	}
	return n
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
)

const (
	// tenantsPrefix is where tenants' keys are; every other key belongs to the host and is neither counted nor refused.
	tenantsPrefix = "/tenants/"
	// registryPrefix is where a tenant's API server stores objects, below the tenant's prefix. What else is there is
	// written by the host: it is counted and never refused, or a full tenant could not renew its certificates.
	registryPrefix = "registry/"
	crdPrefix      = registryPrefix + "apiextensions.k8s.io/customresourcedefinitions/"
)

// bookkeeping is what API servers write for themselves, of bounded size and out of their users' reach. A control
// plane that cannot write it does not start, so it is counted and never refused.
var bookkeeping = []string{registryPrefix + "ranges/", registryPrefix + "masterleases/", registryPrefix + "peerserverleases/"}

// limited says whether a tenant's limits apply to its key of that name.
func limited(name []byte) bool {
	if !bytes.HasPrefix(name, []byte(registryPrefix)) {
		return false
	}
	for _, prefix := range bookkeeping {
		if bytes.HasPrefix(name, []byte(prefix)) {
			return false
		}
	}
	return true
}

// What is summed up.
const (
	bytesUsed = iota // by keys and values
	objects          // keys below registryPrefix
	crds
	crdBytes
	sums
)

// amounts are how much of each a tenant has or is about to have.
type amounts [sums]int64

// causes are the limits of amounts.
var causes = [sums]Cause{CauseStorage, CauseObjects, CauseCRDs, CauseCRDStorage}

// amounts are the limits of them.
func (l Limits) amounts() amounts {
	return amounts{bytesUsed: l.Bytes, objects: l.Objects, crds: l.CRDs, crdBytes: l.CRDBytes}
}

// amountsOf is what one key of that name and size, value included, comes to.
func amountsOf(name []byte, size int64) amounts {
	a := amounts{bytesUsed: size}
	if bytes.HasPrefix(name, []byte(registryPrefix)) {
		a[objects] = 1
	}
	if bytes.HasPrefix(name, []byte(crdPrefix)) {
		a[crds], a[crdBytes] = 1, size
	}
	return a
}

func (a *amounts) add(b amounts) {
	for i := range a {
		a[i] += b[i]
	}
}

func (a *amounts) sub(b amounts) {
	for i := range a {
		a[i] -= b[i]
	}
}

// ledger knows what each tenant stores.
//
// The invariant: with mu held, the books say exactly what etcd held at revision rev. They begin with a scan at one
// revision and then follow every event after it, in order, from a watch inside the server. So a write is counted
// however it came about: a client's put, a lease that expired, a write that timed out at its client but was applied.
// The size of each live key is remembered, so an event needs no look at the value it replaced, which a compaction may
// have taken. That costs about 100 bytes per key, a third of etcd's own index entry, and as much again per directory.
//
// acked is the highest revision any client was told of; readers who want to see their own writes wait for rev to
// reach it. A write that was admitted but is not yet in the books is held as a reservation, so concurrent writers
// cannot pass the quota together.
type ledger struct {
	defaultQuota int64
	done         chan struct{} // closed when no more events will come

	mu        sync.Mutex
	tenants   map[string]*account
	limits    map[string]Limits // as set
	rev       int64
	acked     int64
	compacted int64
	waiters   int
	moved     chan struct{} // closed and replaced when rev grows while somebody waits
	vacancies map[vacancy]map[*func()]struct{}
}

// vacancy is a directory of a tenant that somebody wants to know the first key of.
type vacancy struct{ tenant, dir string }

// account is one tenant's page. The ledger's mu guards it.
type account struct {
	sizes    map[string]int32      // live key without the tenant's prefix → bytes of key and value
	dirs     map[string]*directory // by name, with a trailing slash; see directories
	live     amounts               // sum of sizes
	floor    amounts               // the least of live since limits were set
	history  int64                 // bytes superseded and deleted, but not compacted away: recent + sum of sealed
	recent   int64                 // history since the last mark
	sealed   []span                // history up to earlier marks
	reserved amounts               // sum of pending
	pending  []reservation         // admitted growth that may not be in the books yet
	refused  map[Cause]int64       // writes refused

	refusedGrowth int64 // the most by which a write that the quota refused would have grown the tenant
	refusedAt     time.Time
}

// directory is what is below one prefix of the registry.
type directory struct{ keys, bytes int64 }

func newAccount() *account {
	return &account{sizes: make(map[string]int32), dirs: make(map[string]*directory), refused: make(map[Cause]int64)}
}

// full says whether a tenant's objects are at their quota, for practical purposes.
func (a *account) full(quota int64) bool {
	return a.live[bytesUsed] >= quota || a.live[bytesUsed]+a.refusedGrowth > quota && time.Since(a.refusedAt) < RefusalMemory
}

// noteRefusal remembers the largest write that was refused and still would be:
// smaller ones follow it at once, and fit again as soon as anything is deleted.
func (a *account) noteRefusal(growth, quota int64) {
	if !a.full(quota) {
		a.refusedGrowth = 0
	}
	a.refusedGrowth, a.refusedAt = max(a.refusedGrowth, growth), time.Now()
}

// maxSpans bounds the memory of one account; more marks than this within CompactInterval are merged.
const maxSpans = 128

// span is history whose versions were all superseded at or before rev: compacting to rev frees it.
type span struct{ rev, bytes int64 }

// reservation holds room for one write until the books reach the revision the write was given.
type reservation struct {
	rev    int64 // 0 while the write is on its way
	growth amounts
	id     *admission
}

func newLedger(defaultQuota int64) *ledger {
	return &ledger{
		defaultQuota: defaultQuota,
		done:         make(chan struct{}),
		tenants:      make(map[string]*account),
		limits:       make(map[string]Limits),
		moved:        make(chan struct{}),
		vacancies:    make(map[vacancy]map[*func()]struct{}),
	}
}

// splitKey returns the tenant that owns key and the length of its prefix. A key directly under /tenants/ is the host's.
func splitKey(key []byte) (tenant string, prefix int, ok bool) {
	if len(key) <= len(tenantsPrefix) || string(key[:len(tenantsPrefix)]) != tenantsPrefix {
		return "", 0, false
	}
	rest := key[len(tenantsPrefix):]
	for i, b := range rest {
		if b == '/' {
			return string(rest[:i]), len(tenantsPrefix) + i + 1, i > 0
		}
	}
	return "", 0, false
}

func (l *ledger) account(tenant string) *account {
	a := l.tenants[tenant]
	if a == nil {
		a = newAccount()
		l.tenants[tenant] = a
	}
	return a
}

func (l *ledger) limitsOf(tenant string) Limits { return l.limits[tenant].resolve(l.defaultQuota) }

func (l *ledger) quota(tenant string) int64 { return l.limitsOf(tenant).Bytes }

func (l *ledger) setLimits(tenant string, limits Limits) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if old, ok := l.limits[tenant]; ok && old == limits {
		return // or repeating it would raise the floor
	}
	l.limits[tenant] = limits
	if a := l.tenants[tenant]; a != nil {
		a.floor = a.live
	}
}

// start scans the store and follows it from there until ctx is done. The returned function runs the following and
// must be called; it closes l.done when it returns.
func (l *ledger) start(ctx context.Context, kv mvcc.WatchableKV) (follow func() error, err error) {
	events, err := l.open(ctx, kv)
	if err != nil {
		return nil, err
	}
	return func() error {
		defer close(l.done)
		for {
			rescan, err := l.follow(ctx, events)
			events.Close()
			if !rescan {
				return err
			}
			if events, err = l.open(ctx, kv); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return fmt.Errorf("count tenants' storage again: %w", err)
			}
		}
	}, nil
}

// open scans, then watches from the revision after the scan's.
func (l *ledger) open(ctx context.Context, kv mvcc.WatchableKV) (mvcc.WatchStream, error) {
	for {
		rev, err := l.scan(ctx, kv)
		if errors.Is(err, mvcc.ErrCompacted) {
			continue // a compaction overtook the scan: begin again at a later revision
		}
		if err != nil {
			return nil, err
		}
		events := kv.NewWatchStream()
		// Every key, not only tenants': then rev follows the store's revision and waiting for it always ends.
		if _, err := events.Watch(ctx, clientv3.AutoWatchID, []byte{0}, []byte{}, rev+1); err != nil {
			events.Close()
			return nil, err
		}
		return events, nil
	}
}

// scan fills the books from the store at one revision. Values must be read to know their size, and tenants choose it,
// so a page is bounded by the number of the largest ones. History is kept as it was: nothing says how much of it
// there is, and too much only compacts early.
func (l *ledger) scan(ctx context.Context, kv mvcc.WatchableKV) (rev int64, err error) {
	const page = 32 // 50 MiB at worst
	rev = kv.Rev()
	fresh := make(map[string]*account)
	from, end := []byte(tenantsPrefix), []byte(clientv3.GetPrefixRangeEnd(tenantsPrefix))
	for {
		found, err := kv.Range(ctx, from, end, mvcc.RangeOptions{Rev: rev, Limit: page})
		if err != nil {
			return 0, err
		}
		for _, item := range found.KVs {
			tenant, prefix, ok := splitKey(item.Key)
			if !ok {
				continue
			}
			a := fresh[tenant]
			if a == nil {
				a = newAccount()
				fresh[tenant] = a
			}
			a.put(item.Key, prefix, len(item.Value))
		}
		if len(found.KVs) < page {
			break
		}
		from = append(found.KVs[len(found.KVs)-1].Key, 0)
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	for tenant, old := range l.tenants {
		a := fresh[tenant]
		if a == nil {
			a = newAccount()
			fresh[tenant] = a
		}
		a.floor = old.floor
		a.settleFloor()
		a.history, a.recent, a.sealed, a.refused = old.history, old.recent, old.sealed, old.refused
		a.reserved, a.pending = old.reserved, old.pending
		a.refusedGrowth, a.refusedAt = old.refusedGrowth, old.refusedAt
	}
	l.tenants = fresh
	for v := range l.vacancies {
		if fresh[v.tenant] != nil && fresh[v.tenant].dirs[v.dir] != nil {
			l.fill(v)
		}
	}
	l.compacted = max(l.compacted, kv.FirstRev())
	l.reach(rev)
	return rev, nil
}

// follow keeps the books until ctx is done or, with rescan, until the watch can no longer be complete.
func (l *ledger) follow(ctx context.Context, events mvcc.WatchStream) (rescan bool, err error) {
	for {
		select {
		case <-ctx.Done():
			return false, nil
		case batch, open := <-events.Chan():
			if !open {
				return false, errors.New("follow writes: etcd closed the watch")
			}
			if batch.CompactRevision != 0 {
				return true, nil
			}
			l.record(batch.Events)
		}
	}
}

func (l *ledger) record(events []*mvccpb.Event) {
	if len(events) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range events {
		tenant, prefix, ok := splitKey(e.Kv.Key)
		if !ok {
			continue
		}
		if a := l.account(tenant); e.Type == mvccpb.Event_DELETE {
			a.delete(e.Kv.Key, prefix)
		} else {
			a.put(e.Kv.Key, prefix, len(e.Kv.Value))
			for dir := range directories(e.Kv.Key[prefix:]) {
				if len(l.vacancies) == 0 {
					break
				}
				l.fill(vacancy{tenant, string(dir)})
			}
		}
	}
	// One response holds whole revisions only, so the books are exact at the last of them.
	l.reach(events[len(events)-1].Kv.ModRevision)
}

func (a *account) put(key []byte, prefix, value int) {
	name, size := key[prefix:], int64(len(key)+value)
	a.weigh(name, 1, size)
	if old, ok := a.sizes[string(name)]; ok {
		a.weigh(name, -1, int64(old))
		a.supersede(int64(old))
	}
	a.sizes[string(name)] = int32(size)
	a.settleFloor()
}

func (a *account) delete(key []byte, prefix int) {
	name := key[prefix:]
	old, ok := a.sizes[string(name)]
	if !ok {
		return
	}
	delete(a.sizes, string(name))
	a.weigh(name, -1, int64(old))
	a.settleFloor()
	a.supersede(int64(old) + int64(len(key))) // the tombstone holds the key again
}

// weigh adds a key of that size to the sums, or takes it out of them.
func (a *account) weigh(name []byte, keys, size int64) {
	of := amountsOf(name, size)
	if keys < 0 {
		a.live.sub(of)
	} else {
		a.live.add(of)
	}
	for dir := range directories(name) {
		d := a.dirs[string(dir)]
		if d == nil {
			d = new(directory)
			a.dirs[string(dir)] = d
		}
		d.keys += keys
		d.bytes += keys * size
		if d.keys == 0 {
			delete(a.dirs, string(dir))
		}
	}
}

// directories yields the directories of a name that are summed up: three levels below the registry, which are
// resource and namespace, with a group in front of most. Deeper ones, which no API server makes, are not.
func directories(name []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		if !bytes.HasPrefix(name, []byte(registryPrefix)) {
			return
		}
		end := len(registryPrefix)
		for range 3 {
			next := bytes.IndexByte(name[end:], '/')
			if next < 0 {
				return
			}
			end += next + 1
			if !yield(name[:end]) {
				return
			}
		}
	}
}

// settleFloor lowers the floor to what is left.
func (a *account) settleFloor() {
	for i := range a.floor {
		a.floor[i] = min(a.floor[i], a.live[i])
	}
}

func (a *account) supersede(bytes int64) {
	a.recent += bytes
	a.history += bytes
}

// reach notes that the books are exact at rev.
func (l *ledger) reach(rev int64) {
	l.rev = max(l.rev, rev)
	if l.waiters > 0 {
		close(l.moved)
		l.moved = make(chan struct{})
	}
}

// wait returns with mu held once the books have reached at least rev, or nothing more will come.
func (l *ledger) wait(ctx context.Context, rev int64) error {
	l.mu.Lock()
	for l.rev < rev {
		moved := l.moved
		l.waiters++
		l.mu.Unlock()
		var err error
		select {
		case <-moved:
		case <-l.done:
			err = errors.New("the store is closed")
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		l.mu.Lock()
		l.waiters--
		if err != nil {
			return err
		}
	}
	return nil
}

// waitAcked is wait for every write a client was told of before the call.
func (l *ledger) waitAcked(ctx context.Context) error {
	l.mu.Lock()
	acked := l.acked
	l.mu.Unlock()
	return l.wait(ctx, acked)
}

// ack notes that a client is about to be told of rev.
func (l *ledger) ack(rev int64) {
	l.mu.Lock()
	l.acked = max(l.acked, rev)
	l.mu.Unlock()
}

// mark seals the history so far and returns the revision that, compacted to, frees it.
func (l *ledger) mark() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seal()
}

func (l *ledger) seal() int64 {
	for _, a := range l.tenants {
		if a.recent > 0 {
			a.sealed = append(a.sealed, span{l.rev, a.recent})
			a.recent = 0
			if len(a.sealed) > maxSpans {
				a.sealed[1].bytes += a.sealed[0].bytes // free a little later than could be
				a.sealed = append(a.sealed[:0], a.sealed[1:]...)
			}
		}
	}
	return l.rev
}

// forgetHistory notes that the store was compacted to rev, by whomever.
func (l *ledger) forgetHistory(rev int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.compacted = max(l.compacted, rev)
	if rev >= l.rev {
		l.seal()
	}
	for _, a := range l.tenants {
		n := 0
		for n < len(a.sealed) && a.sealed[n].rev <= rev {
			a.history -= a.sealed[n].bytes
			n++
		}
		a.sealed = append(a.sealed[:0], a.sealed[n:]...)
	}
}

// fill tells those who wait for it that a directory has a key. l.mu is held.
func (l *ledger) fill(v vacancy) {
	for filled := range l.vacancies[v] {
		(*filled)()
	}
	delete(l.vacancies, v)
}

// vacant has filled called when a directory has a key, unless it has one now.
func (l *ledger) vacant(tenant, dir string, filled func()) (rev int64, forget func(), ok bool) {
	v := vacancy{tenant, directoryName(dir)}
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.tenants[tenant]; a != nil && a.dirs[v.dir] != nil {
		return 0, nil, false
	}
	if l.vacancies[v] == nil {
		l.vacancies[v] = make(map[*func()]struct{})
	}
	l.vacancies[v][&filled] = struct{}{}
	return l.rev, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if delete(l.vacancies[v], &filled); len(l.vacancies[v]) == 0 {
			delete(l.vacancies, v)
		}
	}, true
}

// directoryName is a directory of the registry as books have it.
func directoryName(dir string) string { return registryPrefix + strings.Trim(dir, "/") + "/" }

// below sums up a directory of a tenant's registry.
func (l *ledger) below(tenant, dir string) directory {
	name := directoryName(dir)
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.tenants[tenant]
	if a == nil || a.dirs[name] == nil {
		return directory{}
	}
	return *a.dirs[name]
}

// close tears a tenant's page out. Its history stays in the file until the next compaction, uncounted.
func (l *ledger) close(tenant string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.tenants, tenant)
	delete(l.limits, tenant)
}

// pressed says whether some tenant has more history than its allowance.
func (l *ledger) pressed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for tenant, a := range l.tenants {
		if a.history > a.allowance(l.limitsOf(tenant)) {
			return true
		}
	}
	return false
}

// put is one put of a request, of a tenant's key.
type put struct {
	tenant string
	prefix int
	key    []byte
	value  int
}

// admission is room held for one request.
type admission struct {
	tenants []string // that have a reservation
	creates bool     // some put makes a new object
}

// Updates of existing objects may go beyond a limit of bytes by a fraction of it and a little more: deleting an object,
// setting its status or renewing a lease are updates first, and must work in a full tenant. For the same reason what a
// tenant has when its limit is lowered counts as its limit for updates, until the tenant has less.
const (
	updateSlack = 16       // a sixteenth of the limit
	leastSlack  = 64 << 10 // and so many bytes, for limits next to nothing
	largeSlack  = 1 << 10  // bytes by which an object may grow that is above a lowered limit and its sixteenth
)

// check decides on one put, which existed with that many bytes of key and value or, if old is 0, did not.
func (a *account) check(p put, old int64, growth amounts, limits Limits) *QuotaError {
	refuse := func(cause Cause, used, limit int64) *QuotaError {
		return &QuotaError{Tenant: p.tenant, Cause: cause, Used: used, Limit: limit}
	}
	exists := old > 0
	largest, value, oldValue := limits.ObjectBytes, int64(p.value), old-int64(len(p.key))
	if exists {
		largest += largest / updateSlack
		if oldValue > largest {
			largest = oldValue + largeSlack
		}
	}
	if value > largest && value > oldValue {
		return refuse(CauseObjectSize, value, limits.ObjectBytes)
	}
	for i, limit := range limits.amounts() {
		used, most := a.live[i]+a.reserved[i]+growth[i], limit
		if exists { // and the numbers do not grow
			most = max(limit, a.floor[i]) + limit/updateSlack + leastSlack
		}
		if growth[i] > 0 && used > most {
			return refuse(causes[i], used, limit)
		}
	}
	if most := 2 * a.allowance(limits); exists && a.history > most {
		return refuse(CauseHistory, a.history, most)
	}
	return nil
}

// allowance is the history, in bytes, above which it is compacted early: every object may be rewritten once.
func (a *account) allowance(limits Limits) int64 { return max(limits.Bytes, a.floor[bytesUsed]) }

// admit decides on a request's puts and holds room for them until settle. Puts of an If and its Else are added up, so
// the decision is on the safe side. An update that does not grow its object is refused only for history.
func (l *ledger) admit(puts []put) (*admission, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	held := new(admission)
	for i, p := range puts {
		a, limits := l.account(p.tenant), l.limitsOf(p.tenant)
		a.settle(l.rev)
		name := p.key[p.prefix:]
		old := int64(a.sizes[string(name)])
		growth := amountsOf(name, int64(len(p.key)+p.value))
		if old > 0 {
			growth.sub(amountsOf(name, old))
		} else {
			held.creates = true
		}
		if refusal := a.check(p, old, growth, limits); refusal != nil {
			a.refused[refusal.Cause]++
			if refusal.Cause == CauseStorage {
				a.noteRefusal(growth[bytesUsed], limits.Bytes)
			}
			for _, earlier := range puts[:i] {
				l.tenants[earlier.tenant].cancel(held)
			}
			return nil, *refusal
		}
		if growth[bytesUsed] > 0 {
			a.pending = append(a.pending, reservation{growth: growth, id: held})
			a.reserved.add(growth)
			held.tenants = append(held.tenants, p.tenant)
		}
	}
	return held, nil
}

// limitMargin is the fraction of a limit, counted from its end, within which a tenant is close to it.
const limitMargin = 8

// nearLimit says whether some put would bring a tenant close to a limit or beyond it.
func (l *ledger) nearLimit(puts []put) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range puts {
		limits, name := l.limitsOf(p.tenant), p.key[p.prefix:]
		growth := amountsOf(name, int64(len(p.key)+p.value))
		var used amounts
		if a := l.tenants[p.tenant]; a != nil {
			if old, ok := a.sizes[string(name)]; ok {
				growth.sub(amountsOf(name, int64(old)))
			}
			used = a.live
			used.add(a.reserved)
		}
		for i, limit := range limits.amounts() {
			if growth[i] > 0 && used[i]+growth[i] > limit-limit/limitMargin {
				return true
			}
		}
	}
	return false
}

// refuse counts a refusal for the space that all tenants share.
func (l *ledger) refuse(tenant string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.account(tenant).refused[CauseBackend]++
}

// settle ends what admit began. rev is the revision the write was given, 0 if it failed: should it have been applied
// all the same, it will be an event like any other.
func (l *ledger) settle(held *admission, rev int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, tenant := range held.tenants {
		a := l.tenants[tenant]
		if a == nil {
			continue // wiped meanwhile
		}
		if rev == 0 {
			a.cancel(held)
			continue
		}
		for i := range a.pending {
			if a.pending[i].id == held {
				a.pending[i].rev = rev
			}
		}
		a.settle(l.rev)
	}
}

// settle releases the room of writes that are in the books at rev.
func (a *account) settle(rev int64) {
	a.release(func(r reservation) bool { return r.rev != 0 && r.rev <= rev })
}

func (a *account) cancel(held *admission) {
	a.release(func(r reservation) bool { return r.id == held })
}

func (a *account) release(match func(reservation) bool) {
	kept := a.pending[:0]
	for _, r := range a.pending {
		if match(r) {
			a.reserved.sub(r.growth)
		} else {
			kept = append(kept, r)
		}
	}
	clear(a.pending[len(kept):])
	a.pending = kept
}

// validTenant says whether uid can be part of a key.
func validTenant(uid string) error {
	if uid == "" {
		return errors.New("the tenant's uid is empty")
	}
	if strings.ContainsRune(uid, '/') {
		return fmt.Errorf("the tenant's uid %q contains a slash", uid)
	}
	return nil
}

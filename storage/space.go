// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import "sync"

// The shared backend's limits, in percent of its quota. etcd raises an alarm and refuses every write of everybody
// when the file reaches 100.
const (
	// tightPercent starts early compaction and defragmentation.
	tightPercent = 85
	// fullPercent refuses tenants' new objects. Updates have updatePercent more, for deleting begins with one. The
	// rest is the host's, which must still place and delete tenants.
	fullPercent   = 95
	updatePercent = 2
)

// sizer reports the size of the database file and what of it is in use, in bytes, as of the last commit.
type sizer func() (size, inUse int64)

// putOverhead is what a put costs beyond key and value: a revision, metadata and its share of a page. etcd's own
// quota assumes the same.
const putOverhead = 256

// space watches the shared backend's fill. etcd commits every 100 ms and its sizes stand still meanwhile, so what was
// let through since the commit before last is added to them. Before that guess refuses anybody, etcd is made to commit.
type space struct {
	quota int64

	mu     sync.Mutex
	sizes  sizer // nil until etcd runs
	commit func()
	inUse  int64 // as last seen
	older  int64 // let through before the last change of inUse
	newer  int64 // and since
}

func (s *space) attach(sizes sizer, commit func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sizes, s.commit = sizes, commit
}

// full decides whether tenants may write, and counts puts as let through if so. creates says that some put makes a
// new object.
func (s *space) full(puts []put, creates bool) (used, limit int64, full bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sizes == nil {
		return 0, 0, false
	}
	var bytes int64
	for _, p := range puts {
		bytes += int64(len(p.key)+p.value) + putOverhead
	}
	limit = percent(s.quota, fullPercent)
	if !creates {
		limit += percent(s.quota, updatePercent)
	}
	used = s.estimate(bytes)
	if used > limit && s.older+s.newer > percent(s.quota, 1) {
		s.commit()
		s.older, s.newer = 0, 0
		used = s.estimate(bytes)
	}
	if used > limit {
		return used, limit, true
	}
	s.newer += bytes
	return used, limit, false
}

// estimate is the fill with bytes more.
func (s *space) estimate(bytes int64) int64 {
	size, inUse := s.sizes()
	if inUse != s.inUse {
		s.inUse, s.older, s.newer = inUse, s.newer, 0
	}
	bytes += s.older + s.newer
	// Free pages take new data first, so the file grows only by what does not fit into them. It may be a little
	// fuller than what is in use may be, for it takes a defragmentation to make it smaller.
	file := size + max(0, bytes-(size-inUse)) - percent(s.quota, updatePercent)
	return max(inUse+bytes, file)
}

func percent(of, n int64) int64 { return of / 100 * n }

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"context"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Storage keeps certificates and keys in etcd. It implements
// [certmagic.Storage]: files and implied directories below a prefix, and locks
// that are etcd leases. Certificates ("*.crt") are stored as they are,
// everything else is sealed. It is safe for concurrent use and owns nothing
// that needs closing, except that every Lock wants its Unlock.
type Storage struct {
	client  *clientv3.Client
	prefix  string // ends in a slash
	sealer  *Sealer
	lockTTL time.Duration

	mu   sync.Mutex         // guards held
	held map[string][]*lock // by name, oldest first
}

var _ certmagic.Storage = (*Storage)(nil)

// NewStorage returns a Storage for the keys below prefix. The prefix is part of
// what the sealer authenticates, so it must be the tenant's own (and not only a
// namespace of the client) and must stay the same for as long as the data lives.
// The caller keeps ownership of client, and closes it after the last Unlock.
func NewStorage(client *clientv3.Client, prefix string, sealer *Sealer) *Storage {
	return &Storage{
		client:  client,
		prefix:  strings.TrimSuffix(prefix, "/") + "/",
		sealer:  sealer,
		lockTTL: DefaultLockTTL,
		held:    make(map[string][]*lock),
	}
}

// String names the storage in certmagic's log lines.
func (s *Storage) String() string { return "etcd:" + s.prefix }

// Store puts value at key, replacing what is there.
func (s *Storage) Store(ctx context.Context, key string, value []byte) error {
	return s.store(ctx, key, value)
}

// Load returns the value at key, or an error that is [fs.ErrNotExist].
func (s *Storage) Load(ctx context.Context, key string) ([]byte, error) {
	values, err := s.loadAll(ctx, key)
	if err != nil {
		return nil, err
	}
	if values[0] == nil {
		return nil, fmt.Errorf("load %q: %w", key, fs.ErrNotExist)
	}
	return values[0], nil
}

// Delete removes the key and, if it is a directory, everything in it. It is not
// an error if there is nothing to remove.
func (s *Storage) Delete(ctx context.Context, key string) error {
	return s.delete(ctx, key)
}

// Exists reports whether key is a file or a directory. It is false if etcd
// cannot be asked.
func (s *Storage) Exists(ctx context.Context, key string) bool {
	_, err := s.Stat(ctx, key)
	return err == nil
}

// List returns the keys in a directory: its entries or, if recursive, all that
// is below it, directories included. A directory that is not there is
// [fs.ErrNotExist]; the root (an empty path) always is.
func (s *Storage) List(ctx context.Context, dir string, recursive bool) ([]string, error) {
	root := s.dirKey(dir)
	resp, err := s.client.Get(ctx, root, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, fmt.Errorf("list %q: %w", dir, err)
	}
	if len(resp.Kvs) == 0 {
		if dir == "" {
			return nil, nil
		}
		if _, err := s.Stat(ctx, dir); err != nil { // a file has no entries, but is there
			return nil, fmt.Errorf("list %q: %w", dir, err)
		}
		return nil, nil
	}
	var keys []string
	for _, kv := range resp.Kvs {
		parts := strings.Split(string(kv.Key[len(root):]), "/")
		if !recursive {
			parts = parts[:1]
		}
		for i := range parts {
			keys = append(keys, path.Join(dir, path.Join(parts[:i+1]...)))
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys), nil
}

// Stat describes key, or returns an error that is [fs.ErrNotExist]. Sizes are
// those of the plaintext; etcd keeps no modification time.
func (s *Storage) Stat(ctx context.Context, key string) (certmagic.KeyInfo, error) {
	resp, err := s.client.Txn(ctx).Then(
		clientv3.OpGet(s.fileKey(key)),
		clientv3.OpGet(s.dirKey(key), clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(1)),
	).Commit()
	if err != nil {
		return certmagic.KeyInfo{}, fmt.Errorf("stat %q: %w", key, err)
	}
	if file := resp.Responses[0].GetResponseRange().Kvs; len(file) > 0 {
		size := len(file[0].Value)
		if !public(key) {
			size = max(0, size-sealOverhead)
		}
		return certmagic.KeyInfo{Key: key, Size: int64(size), IsTerminal: true}, nil
	}
	if len(resp.Responses[1].GetResponseRange().Kvs) > 0 {
		return certmagic.KeyInfo{Key: key}, nil
	}
	return certmagic.KeyInfo{}, fmt.Errorf("stat %q: %w", key, fs.ErrNotExist)
}

// Reseal seals again, with the first key of the sealer, what another of its keys
// has sealed, and returns how many values that were. After it the other keys can
// go, apart from backups and from revisions that etcd has not compacted yet. It
// may run while the storage is in use and may be repeated.
func (s *Storage) Reseal(ctx context.Context) (int, error) {
	resp, err := s.client.Get(ctx, s.dirKey(""), clientv3.WithPrefix())
	if err != nil {
		return 0, fmt.Errorf("reseal %s: %w", s, err)
	}
	var n int
	for _, kv := range resp.Kvs {
		key := string(kv.Key[len(s.dirKey("")):])
		if public(key) || s.sealer.current(kv.Value) {
			continue
		}
		value, err := s.decode(key, kv.Value)
		if err != nil {
			return n, fmt.Errorf("reseal %s: %w", s, err)
		}
		// A value that changes meanwhile is sealed with the first key already.
		unchanged := clientv3.Compare(clientv3.ModRevision(string(kv.Key)), "=", kv.ModRevision)
		done, err := s.client.Txn(ctx).If(unchanged).Then(s.putOp(key, value)).Commit()
		if err != nil {
			return n, fmt.Errorf("reseal %s: %w", s, err)
		}
		if done.Succeeded {
			n++
		}
	}
	return n, nil
}

// loadAll returns the values at keys as of one revision, nil where there is none.
func (s *Storage) loadAll(ctx context.Context, keys ...string) ([][]byte, error) {
	resp, err := s.client.Txn(ctx).Then(s.getOps(keys)...).Commit()
	if err != nil {
		return nil, fmt.Errorf("load %q: %w", keys, err)
	}
	return s.decodeAll(keys, resp)
}

// createAll stores values at keys if none of the keys is there, and returns
// those that are, as loadAll does, if any is.
func (s *Storage) createAll(ctx context.Context, keys []string, values [][]byte) (created bool, theirs [][]byte, err error) {
	var absent []clientv3.Cmp
	var put []clientv3.Op
	for i, key := range keys {
		absent = append(absent, clientv3.Compare(clientv3.CreateRevision(s.fileKey(key)), "=", 0))
		put = append(put, s.putOp(key, values[i]))
	}
	resp, err := s.client.Txn(ctx).If(absent...).Then(put...).Else(s.getOps(keys)...).Commit()
	if err != nil {
		return false, nil, fmt.Errorf("create %q: %w", keys, err)
	}
	if resp.Succeeded {
		return true, nil, nil
	}
	theirs, err = s.decodeAll(keys, resp)
	return false, theirs, err
}

// store puts value at key if all guards hold.
func (s *Storage) store(ctx context.Context, key string, value []byte, guards ...clientv3.Cmp) error {
	resp, err := s.client.Txn(ctx).If(guards...).Then(s.putOp(key, value)).Commit()
	if err == nil && !resp.Succeeded {
		err = errLockLost
	}
	if err != nil {
		return fmt.Errorf("store %q: %w", key, err)
	}
	return nil
}

// delete removes key and what is below it if all guards hold.
func (s *Storage) delete(ctx context.Context, key string, guards ...clientv3.Cmp) error {
	resp, err := s.client.Txn(ctx).If(guards...).Then(
		clientv3.OpDelete(s.fileKey(key)),
		clientv3.OpDelete(s.dirKey(key), clientv3.WithPrefix()),
	).Commit()
	if err == nil && !resp.Succeeded {
		err = errLockLost
	}
	if err != nil {
		return fmt.Errorf("delete %q: %w", key, err)
	}
	return nil
}

// Locks have a directory of their own, so that no file can be taken for one.
func (s *Storage) fileKey(key string) string  { return s.prefix + "files/" + key }
func (s *Storage) lockKey(name string) string { return s.prefix + "locks/" + name }

func (s *Storage) dirKey(dir string) string {
	if dir == "" {
		return s.fileKey("")
	}
	return s.fileKey(dir) + "/"
}

func (s *Storage) putOp(key string, value []byte) clientv3.Op {
	if !public(key) {
		value = s.sealer.Seal(s.fileKey(key), value)
	}
	return clientv3.OpPut(s.fileKey(key), string(value))
}

func (s *Storage) getOps(keys []string) []clientv3.Op {
	ops := make([]clientv3.Op, len(keys))
	for i, key := range keys {
		ops[i] = clientv3.OpGet(s.fileKey(key))
	}
	return ops
}

func (s *Storage) decodeAll(keys []string, resp *clientv3.TxnResponse) ([][]byte, error) {
	values := make([][]byte, len(keys))
	for i, key := range keys {
		kvs := resp.Responses[i].GetResponseRange().Kvs
		if len(kvs) == 0 {
			continue
		}
		value, err := s.decode(key, kvs[0].Value)
		if err != nil {
			return nil, err
		}
		if value == nil {
			value = []byte{} // there, but empty
		}
		values[i] = value
	}
	return values, nil
}

func (s *Storage) decode(key string, value []byte) ([]byte, error) {
	if public(key) {
		return value, nil
	}
	return s.sealer.Open(s.fileKey(key), value)
}

// public reports whether the value at key may lie in etcd unsealed. Naming what
// is public, not what is private, keeps a kind of file we have not met sealed.
func public(key string) bool { return strings.HasSuffix(key, ".crt") }

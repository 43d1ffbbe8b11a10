// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenantd/tenantd/storage"
)

const (
	// leadsPrefix is where etcd has who leads what: the UID of a tenant, or a work
	// that one host does for all.
	leadsPrefix = "/tenantd/leads/"
	// takenPrefix is where it has who took a lead last. That stays when the lead ends, so
	// a host that comes back can see whether anybody had it meanwhile.
	takenPrefix = "/tenantd/leads-taken/"
	// leadTTL, in seconds, is how long a lead outlives a host that is gone. Nobody
	// takes a lead from a host that is not seen to be gone, so one that ran out for want
	// of a processor is had again.
	leadTTL = 2
	// surePatience is how long what is to be done with a lead waits while it is not known
	// whose it is.
	surePatience = leadTTL * time.Second
	// leadPause is the time between attempts while etcd does not answer.
	leadPause = 500 * time.Millisecond
)

// leads are what this host alone may do: keys in etcd under one lease. While etcd
// has no quorum nobody can take them, and this host keeps them: what it does cannot
// be written either. A host that comes back from a pause finds out whether its
// leads are still its own before it may have any again.
type leads struct {
	client *clientv3.Client
	name   string // of this host
	log    *slog.Logger
	// gone reports whether a host that leads is known to be gone, and what it leads is
	// harmless in two hands for a moment. Nil means never.
	gone func(what, host string) bool

	mu      sync.Mutex // guards what follows
	lease   *lease
	renewed chan struct{} // closed when there is a lease
	held    map[string]*lead
}

// lead is one of them.
type lead struct {
	what     string
	taken    int64         // revision at which this host took it
	lost     chan struct{} // closed when another host has it
	released chan struct{} // closed when this host has given it up
}

// lease is etcd's, and is renewed until it has run out or stop is called. It is no
// concurrency.Session because that does not say until when it is good: a process that was
// frozen has one that looks as it did, with the answer to its last renewal yet to be read.
type lease struct {
	id    clientv3.LeaseID
	until atomic.Pointer[time.Time] // from when it was asked for, not from the answer
	stop  context.CancelFunc
	ended chan struct{} // closed when it has run out, or was stopped
}

func (s *lease) good() bool { return time.Now().Before(*s.until.Load()) }

func (s *lease) renewed(asked time.Time) {
	until := asked.Add(leadTTL * time.Second)
	s.until.Store(&until)
}

func (s *lease) renew(ctx context.Context, client *clientv3.Client) {
	defer close(s.ended)
	tick := time.NewTicker(leadTTL * time.Second / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		asked := time.Now()
		attempt, cancel := context.WithDeadline(ctx, *s.until.Load())
		_, err := client.KeepAliveOnce(attempt, s.id)
		cancel()
		switch {
		case err == nil:
			s.renewed(asked)
		case errors.Is(err, rpctypes.ErrLeaseNotFound), !s.good():
			return
		}
	}
}

func newLeads(client *clientv3.Client, name string, log *slog.Logger) *leads {
	return &leads{client: client, name: name, log: log, renewed: make(chan struct{}), held: map[string]*lead{}}
}

// run keeps the lease alive until ctx is done, and then gives all leads up.
func (l *leads) run(ctx context.Context) {
	for {
		lease, err := l.newLease(ctx)
		if err == nil {
			err = l.resume(ctx, lease)
		}
		if err != nil {
			if ctx.Err() == nil && !storage.IsNoQuorum(err) { // which is said once, for all
				l.log.Warn("no lease for what this host leads; trying again", "error", err)
			}
			if lease != nil {
				lease.stop()
			}
		} else {
			select {
			case <-lease.ended:
				l.log.Warn("the lease ran out: this host was not heard of for a while")
			case <-ctx.Done():
			}
			l.mu.Lock()
			l.lease, l.renewed = nil, make(chan struct{})
			l.mu.Unlock()
		}
		if ctx.Err() != nil {
			if lease != nil {
				l.end(lease)
			}
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(leadPause):
		}
	}
}

// newLease gets a lease, which nobody can give without a quorum.
func (l *leads) newLease(ctx context.Context) (*lease, error) {
	asked := time.Now()
	granted, err := l.client.Grant(ctx, leadTTL)
	if err != nil {
		return nil, fmt.Errorf("get a lease: %w", err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx)) // it outlives run's by its end in order
	s := &lease{id: granted.ID, stop: stop, ended: make(chan struct{})}
	s.renewed(asked)
	go s.renew(ctx, l.client)
	return s, nil
}

// closePatience bounds the end of a lease that nobody may be there to end.
const closePatience = 3 * time.Second

// end ends the lease, and with it the keys.
func (l *leads) end(lease *lease) {
	lease.stop()
	<-lease.ended
	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	if _, err := l.client.Revoke(ctx, lease.id); err != nil {
		l.log.Warn("leads end with their lease", "within", leadTTL*time.Second, "error", err)
	}
}

// resume puts what is held under a new lease, and lets go of what others have.
func (l *leads) resume(ctx context.Context, lease *lease) error {
	l.mu.Lock()
	var held []*lead
	for _, lead := range l.held {
		held = append(held, lead)
	}
	l.mu.Unlock()
	for _, lead := range held {
		kept, err := l.keep(ctx, lead, lease)
		if err != nil {
			return err
		}
		if !kept {
			l.log.Warn("another host has taken the lead", "what", lead.what)
			l.drop(lead)
			close(lead.lost)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lease = lease
	close(l.renewed)
	return nil
}

// keep puts a lead under a new lease, unless another host has had it since.
func (l *leads) keep(ctx context.Context, lead *lead, lease *lease) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, leadTTL*time.Second)
	defer cancel()
	resp, err := l.client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(takenPrefix+lead.what), "=", lead.taken)).
		Then(clientv3.OpPut(leadsPrefix+lead.what, l.name, clientv3.WithLease(lease.id))).Commit()
	if err != nil {
		return false, fmt.Errorf("keep the lead of %s: %w", lead.what, err)
	}
	return resp.Succeeded, nil
}

// take takes a lead if it is nobody's or this host's own, from before, and returns
// whose it is then and, if it is this host's, since which revision.
func (l *leads) take(ctx context.Context, what string, lease *lease) (holder string, taken int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, leadTTL*time.Second)
	defer cancel()
	key := leadsPrefix + what
	put := []clientv3.Op{clientv3.OpPut(key, l.name, clientv3.WithLease(lease.id)), clientv3.OpPut(takenPrefix+what, l.name)}
	resp, err := l.client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).Then(put...).Else(clientv3.OpGet(key)).Commit()
	if err != nil {
		return "", 0, fmt.Errorf("take the lead of %s: %w", what, err)
	}
	if resp.Succeeded {
		return l.name, resp.Header.Revision, nil
	}
	kv := resp.Responses[0].GetResponseRange().Kvs[0]
	if holder = string(kv.Value); holder != l.name && (l.gone == nil || !l.gone(what, holder)) {
		return holder, 0, nil
	}
	// If it is this host's own it was an earlier process, since there is one to a data
	// directory, or an earlier lease.
	resp, err = l.client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", kv.ModRevision)).Then(put...).Commit()
	switch {
	case err != nil:
		return "", 0, fmt.Errorf("take the lead of %s: %w", what, err)
	case !resp.Succeeded:
		return "", 0, errors.New("take the lead of " + what + ": it changed meanwhile")
	}
	return l.name, resp.Header.Revision, nil
}

// acquire returns when this host has the lead, or ctx is done. Each lead is acquired
// by one caller at a time, who releases it.
func (l *leads) acquire(ctx context.Context, what string) (*lead, error) {
	for {
		l.mu.Lock()
		lease, renewed := l.lease, l.renewed
		l.mu.Unlock()
		if lease == nil {
			select {
			case <-renewed:
				continue
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		holder, taken, err := l.take(ctx, what, lease)
		if err == nil && holder == l.name {
			l.mu.Lock()
			if l.lease == lease {
				got := &lead{what: what, taken: taken, lost: make(chan struct{}), released: make(chan struct{})}
				l.held[what] = got
				l.mu.Unlock()
				return got, nil
			}
			l.mu.Unlock()
			continue // the lease ended meanwhile, and the key with it
		}
		if err != nil && ctx.Err() == nil {
			l.log.Debug("cannot take a lead for now", "what", what, "error", err)
		}
		l.awaitChange(ctx, what, err == nil)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// errLost is why nothing is done any more in the name of a lead.
var errLost = errors.New("another host has taken the lead")

// sure returns when this host certainly has a lead, so that what is done now is done
// nowhere else: its lease was renewed so lately that it cannot have run out. That fails
// when the lead is lost, when ctx is done, and when it is not known for a while.
func (l *leads) sure(ctx context.Context, lead *lead) error {
	var late <-chan time.Time
	for {
		select {
		case <-lead.lost:
			return errLost
		default:
		}
		l.mu.Lock()
		lease := l.lease
		l.mu.Unlock()
		if lease != nil && lease.good() {
			return nil
		}
		if late == nil {
			late = time.After(surePatience)
		}
		select {
		case <-lead.lost:
		case <-ctx.Done():
			return ctx.Err()
		case <-late:
			return errors.New("it is not known whether this host still has the lead: etcd does not answer")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// awaitChange waits until a key is deleted, or for a while.
func (l *leads) awaitChange(ctx context.Context, what string, watch bool) {
	patience := leadPause
	if watch {
		patience = leadTTL * time.Second // a watch may be told nothing
	}
	if l.gone != nil && l.gone(what, "") {
		patience = leadPause // for whom etcd does not know to be gone
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if !watch {
		<-ctx.Done()
		return
	}
	resp, err := l.client.Get(ctx, leadsPrefix+what)
	if err != nil || len(resp.Kvs) == 0 {
		return
	}
	for range l.client.Watch(ctx, leadsPrefix+what, clientv3.WithRev(resp.Header.Revision+1)) {
		return
	}
}

func (l *leads) drop(lead *lead) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[lead.what] == lead {
		delete(l.held, lead.what)
	}
}

// forget removes what is left of the leads of what is gone for good.
func (l *leads) forget(ctx context.Context, what string) error {
	_, err := l.client.Delete(ctx, takenPrefix+what)
	return err
}

// release gives a lead up, so that another host need not wait for the lease to end.
func (l *leads) release(lead *lead) {
	l.drop(lead)
	close(lead.released)
	ctx, cancel := context.WithTimeout(context.Background(), leadTTL*time.Second)
	defer cancel()
	key := leadsPrefix + lead.what
	_, err := l.client.Txn(ctx).If(clientv3.Compare(clientv3.Value(key), "=", l.name)).Then(clientv3.OpDelete(key)).Commit()
	if err != nil {
		l.log.Warn("a lead ends with its lease", "what", lead.what, "within", leadTTL*time.Second, "error", err)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/term"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// retryInterval is the pause before a lost watch is opened again: the system plane
// takes a few seconds to restart.
const retryInterval = time.Second

// errWatchEnded is a watch that the server ended, as it does now and then.
var errWatchEnded = errors.New("the watch ended")

// followTenant is follow for a tenant.
func (p *plane) followTenant(ctx context.Context, name string, progress *progress, see func(*v1alpha1.Tenant) (done bool, err error)) error {
	return follow(ctx, p, &v1alpha1.TenantList{}, p.tenant, name, progress, see)
}

// followHost is follow for a host.
func (p *plane) followHost(ctx context.Context, name string, progress *progress, see func(*v1alpha1.Host) (done bool, err error)) error {
	return follow(ctx, p, &v1alpha1.HostList{}, p.host, name, progress, see)
}

// follow calls see with each state of an object, nil for one that does not exist,
// until see says done or fails, or ctx ends. A lost connection is opened again. list
// says what kind of objects are watched, and get fetches one.
func follow[T client.Object](ctx context.Context, p *plane, list client.ObjectList, get func(context.Context, string) (T, error), name string, progress *progress, see func(T) (done bool, err error)) error {
	for {
		err := followOnce(ctx, p, list, get, name, see)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err == nil, !isPassing(err):
			return err
		case !errors.Is(err, errWatchEnded):
			progress.show("the system plane does not answer; trying again")
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(retryInterval):
		}
	}
}

// isPassing tells what a restart of the system plane looks like from errors that
// stay.
func isPassing(err error) bool {
	var known failure
	if errors.As(err, &known) {
		return false
	}
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		code := status.Status().Code
		return code >= 500 || code == 429 || isUnserved(err) || apierrors.IsGone(err) || apierrors.IsResourceExpired(err)
	}
	return true
}

// isUnserved tells a server that does not know the kind of object, or not yet, from one
// that does not have this one.
func isUnserved(err error) bool {
	return apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

func followOnce[T client.Object](ctx context.Context, p *plane, list client.ObjectList, get func(context.Context, string) (T, error), name string, see func(T) (bool, error)) error {
	var none T
	events, err := p.Watch(ctx, list, client.MatchingFields{"metadata.name": name})
	if err != nil {
		return err
	}
	defer events.Stop()
	// A watch begins with what exists. That a tenant is gone already, only asking
	// tells; asking after the watch is open misses nothing.
	if _, err := get(ctx, name); apierrors.IsNotFound(err) && !isUnserved(err) {
		if done, err := see(none); done || err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	for event := range events.ResultChan() {
		object := none
		switch event.Type {
		case watch.Error:
			return apierrors.FromObject(event.Object)
		case watch.Added, watch.Modified:
			object, _ = event.Object.(T)
		case watch.Deleted:
		default:
			continue
		}
		if done, err := see(object); done || err != nil {
			return err
		}
	}
	return errWatchEnded
}

// summary is where a tenant is in its life and, unless it is ready, what it waits for.
func summary(t *v1alpha1.Tenant) string {
	text := string(phase(t))
	if reason := obstacle(t); reason != "" {
		text += ": " + reason
	}
	return text
}

// obstacle is the message of the condition that keeps a tenant from being ready.
func obstacle(t *v1alpha1.Tenant) string {
	ready := meta.FindStatusCondition(t.Status.Conditions, v1alpha1.ConditionReady)
	if ready != nil && (ready.Status == metav1.ConditionTrue || ready.Message != "") {
		if ready.Status == metav1.ConditionTrue {
			return ""
		}
		return ready.Message
	}
	for _, condition := range t.Status.Conditions {
		if condition.Status != metav1.ConditionTrue && condition.Message != "" {
			return condition.Message
		}
	}
	return ""
}

// waitFlags are those of a command that waits for what it has begun.
func waitFlags(flags *pflag.FlagSet, wait *bool, what string, timeout *time.Duration, standard time.Duration) {
	flags.BoolVar(wait, "wait", true, what)
	flags.DurationVar(timeout, "timeout", standard, "how long to wait")
}

// positive is about --timeout.
func positive(timeout time.Duration) error {
	if timeout <= 0 {
		return errors.New("--timeout must be more than 0; use --wait=false to not wait at all")
	}
	return nil
}

// await shows the progress of follow and ends it after timeout. notDone says what is then
// not the case, and goesOn what happens nevertheless.
func (c *cli) await(ctx context.Context, name string, timeout time.Duration, notDone, goesOn string, follow func(context.Context, *progress) error) error {
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	progress := c.newProgress(name + ": ")
	defer progress.close()
	err := follow(waiting, progress)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return failed(exitFailed, "interrupted; %s", goesOn)
	case waiting.Err() != nil:
		return failed(exitTimedOut, "%s after %s (%s); %s", notDone, timeout, progress.last(), goesOn)
	}
	return err
}

// progress shows what a command waits for: on a terminal as one line that is kept
// up to date, elsewhere as a line for each change.
type progress struct {
	out      io.Writer
	terminal bool
	prefix   string
	begin    time.Time
	stop     context.CancelFunc
	done     chan struct{}

	mu   sync.Mutex
	text string // the last one shown
}

func (c *cli) newProgress(prefix string) *progress {
	ctx, cancel := context.WithCancel(context.Background())
	p := &progress{out: c.err, terminal: c.errIsTerminal, prefix: prefix, begin: time.Now(), stop: cancel, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		if !p.terminal {
			return
		}
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				p.mu.Lock()
				p.draw()
				p.mu.Unlock()
			}
		}
	}()
	return p
}

// show replaces what is shown.
func (p *progress) show(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if text == p.text {
		return
	}
	p.text = text
	if p.terminal {
		p.draw()
	} else {
		fmt.Fprintln(p.out, p.prefix+text)
	}
}

// last is what is shown.
func (p *progress) last() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return cmp.Or(p.text, "nothing is known yet")
}

// draw rewrites the line. The caller holds mu.
func (p *progress) draw() {
	if p.text == "" {
		return
	}
	elapsed := fmt.Sprintf(" (%ds)", int(time.Since(p.begin).Seconds()))
	line := []rune(p.prefix + strings.Join(strings.Fields(p.text), " "))
	// A line that wraps cannot be rewritten.
	if room := terminalWidth(p.out) - len(elapsed) - 1; len(line) > room {
		line = append(line[:max(0, room-1)], '…')
	}
	fmt.Fprintf(p.out, "\r\x1b[K%s%s", string(line), elapsed)
}

// close ends the progress and clears its line.
func (p *progress) close() {
	p.stop()
	<-p.done
	if p.terminal && p.text != "" {
		fmt.Fprint(p.out, "\r\x1b[K")
	}
}

// terminalWidth is 80 columns where it cannot be known.
func terminalWidth(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
			return width
		}
	}
	return 80
}

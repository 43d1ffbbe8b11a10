// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// What upstream repeats without end is passed on now and then, with the number of
// lines left out, and keeps nothing else from the log.
func TestUpstreamLoggerRepetition(t *testing.T) {
	var out strings.Builder
	log := UpstreamLogger(slog.New(slog.NewTextHandler(&out, nil)))
	for i := range 1000 {
		log.Error(fmt.Errorf("conversion webhook for widgets.example.com failed, as it has before: %d", i), "Unhandled Error")
	}
	log.Error(errors.New("something else"), "Unhandled Error")
	log.Error(context.Canceled, "a watch that was stopped")
	log.Error(errors.New("FinishRequest: post-timeout activity - time-elapsed: 1µs, panicked: false, err: context canceled, panic-reason: <nil>"), "Unhandled Error")
	log.Info("upstream's information")
	said := out.String()
	if got := strings.Count(said, "conversion webhook"); got != repeatBurst {
		t.Errorf("a thousand lines of a kind gave %d, want %d", got, repeatBurst)
	}
	if !strings.Contains(said, "something else") {
		t.Error("another line was lost")
	}
	for _, unwanted := range []string{"stopped", "panicked", "information"} {
		if strings.Contains(said, unwanted) {
			t.Errorf("the log has %q", unwanted)
		}
	}
	r, line := &repetition{}, slog.Record{Message: "again"}
	for range repeatBurst + 5 {
		r.pass(line.Time, line)
	}
	if pass, suppressed := r.pass(line.Time.Add(2*repeatEvery), line); !pass || suppressed != 5 {
		t.Errorf("later it is passed on %v with %d left out, want true with 5", pass, suppressed)
	}
}

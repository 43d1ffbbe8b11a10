// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"os/exec"
	"testing"
	"time"
)

func TestRun(t *testing.T) {
	cmd := exec.Command("sh", "-c", "cat; echo the reason >&2; exit 3")
	if stdout, stderr, code := Run(t, time.Minute, cmd); stdout != "" || stderr != "the reason\n" || code != 3 {
		t.Errorf("left %q, %q and %d", stdout, stderr, code)
	}
	if _, _, code := Run(t, 10*time.Millisecond, exec.Command("sleep", "60")); code != -1 {
		t.Errorf("what takes too long exits with %d", code)
	}
}

func TestProcess(t *testing.T) {
	var log Log
	cmd := exec.Command("sh", "-c", "trap '' TERM; echo one; echo two; while :; do sleep 0.01; done")
	cmd.Stdout = &log
	p := Start(t, cmd)
	Eventually(t, time.Minute, time.Millisecond, "it has spoken", func() error {
		if log.Tail(1) != "two" {
			return errors.New("it has not")
		}
		return nil
	})
	if p.Ended() || p.EndsWithin(time.Millisecond) {
		t.Error("it has ended by itself")
	}
	p.Stop(20 * time.Millisecond)
	if !p.Ended() || p.ProcessState.String() != "signal: killed" {
		t.Errorf("after Stop: %v", p.ProcessState)
	}
	log.Without = "two"
	if got := log.Tail(2); got != "one" {
		t.Errorf("the last lines are %q", got)
	}
}

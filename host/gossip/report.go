// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"context"
	"log"
	"log/slog"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
)

// report counts what is dropped and logs it, each reason at most once a second:
// strangers choose how often it happens.
type report struct {
	log   *slog.Logger
	drops *prometheus.CounterVec
	turns map[reason]*rate.Sometimes // constant
	rest  *rate.Limiter              // of memberlist's other warnings
}

func newReport(logger *slog.Logger) *report {
	r := &report{log: logger, drops: newDrops(), turns: map[reason]*rate.Sometimes{}, rest: rate.NewLimiter(1, 20)}
	for _, why := range reasons() {
		r.turns[why] = &rate.Sometimes{Interval: time.Second}
	}
	return r
}

// drop reports one thing that was dropped.
func (r *report) drop(why reason, what string, args ...any) {
	r.drops.WithLabelValues(string(why)).Inc()
	r.turns[why].Do(func() { r.log.Warn(what, append(args, "reason", string(why))...) })
}

// memberlistLogger returns a logger for memberlist, which tells levels by a prefix
// and what it drops by nothing but such a line.
func (r *report) memberlistLogger() *log.Logger { return log.New(r, "", 0) }

// Write takes one line of memberlist's log.
func (r *report) Write(line []byte) (int, error) {
	level, text := slog.LevelInfo, strings.TrimSpace(string(line))
	// What memberlist calls an error is one packet or one connection: the next may
	// work, and what lasts becomes a death.
	for prefix, l := range map[string]slog.Level{"[DEBUG]": slog.LevelDebug, "[INFO]": slog.LevelInfo, "[WARN]": slog.LevelWarn, "[ERR]": slog.LevelWarn, "[ERROR]": slog.LevelWarn} {
		if rest, ok := strings.CutPrefix(text, prefix); ok {
			level, text = l, strings.TrimSpace(rest)
			break
		}
	}
	text = strings.TrimPrefix(text, "memberlist: ")
	switch why := classify(text); {
	case why != "":
		r.drop(why, "dropped", "memberlist", text)
	case level < slog.LevelWarn || r.rest.Allow():
		r.log.Log(context.Background(), level, text, "source", "memberlist")
	}
	return len(line), nil
}

// classify returns why memberlist dropped something, or nothing if the line says
// something else. The parts have spaces or capitals, so that no host's name has one.
// Tests cause those lines that strangers can.
func classify(text string) reason {
	for _, c := range []struct {
		part string
		why  reason
	}{
		{"Decrypt packet failed", wrongKey},
		{"failed to receive: No installed keys", wrongKey},
		{"failed to receive: Encryption is configured", wrongKey},
		{"failed to receive: Unsupported encryption version", wrongKey},
		{"failed to receive: Remote node state is larger", tooLarge},
		{"unacceptable label", wrongInstallation},
		{errTooMany.Error(), tooMany},
		{"Too many pending push/pull", busy},
		{"handler queue full", busy},
		{"Conflicting address", conflict},
		{"ailed to receive", malformed}, // also user messages, and label headers
		{"label header", malformed},
		{"decode label", malformed},
		{"Failed to decode", malformed},
		{"Failed to decompress", malformed},
		{"Failed to read remote state", malformed},
		{"Failed push/pull merge", malformed},
		{"invalid checksum", malformed},
		{"not supported", malformed},
		{"invalid msgType", malformed},
		{"missing message type", malformed},
		{"too short", malformed},
		{"truncated messages", malformed},
		{"gnoring an alive message", malformed},
		{"gnoring alive message", malformed},
	} {
		if strings.Contains(text, c.part) {
			return c.why
		}
	}
	return ""
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"sort"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// lastWords keeps etcd from ending the process. etcd logs at fatal and panic level where it cannot go on; here that
// ends the goroutine and delivers the message instead. A bare panic of etcd's or a concurrent map write still ends
// the process.
type lastWords chan error

func newLastWords() lastWords { return make(lastWords, 1) }

// OnWrite implements zapcore.CheckWriteHook. It does not return, as zap's contract demands.
func (l lastWords) OnWrite(entry *zapcore.CheckedEntry, fields []zapcore.Field) {
	l.say(etcdFailure(entry.Message, fields))
	runtime.Goexit()
}

// say delivers the first error; what follows is a consequence of it.
func (l lastWords) say(err error) {
	select {
	case l <- err:
	default:
	}
}

// etcdFailure makes an error of a log line. An error among the fields is wrapped, so that errors.Is finds ENOSPC.
func etcdFailure(message string, fields []zapcore.Field) error {
	var cause error
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		if err, ok := f.Interface.(error); ok && f.Type == zapcore.ErrorType {
			cause = err
			continue
		}
		f.AddTo(enc)
	}
	names := make([]string, 0, len(enc.Fields))
	for name := range enc.Fields {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		message += fmt.Sprintf(" %s=%v", name, enc.Fields[name])
	}
	if cause != nil {
		return fmt.Errorf("etcd: %s: %w", message, cause)
	}
	return fmt.Errorf("etcd: %s", message)
}

// sameLines is how many lines that say the same are let through each second.
const sameLines = 10

// newEtcdLogger bridges etcd's logger to ours. etcd's information is our debugging, and its debugging, which would
// log every request, is off. While quiet is set everything is debugging.
func newEtcdLogger(to *slog.Logger, terminal lastWords, quiet *atomic.Bool) *zap.Logger {
	// What etcd tries again without a pause it also complains of without one.
	core := zapcore.NewSamplerWithOptions(slogCore{to.With("component", "etcd"), quiet}, time.Second, sameLines, 0)
	return zap.New(core, zap.WithFatalHook(terminal), zap.WithPanicHook(terminal))
}

// byDesign lists warnings about what is intended here: one unix socket in a private directory, and one member.
func byDesign(message string) bool {
	switch message {
	case "Running http and grpc server on single port. This is not recommended for production.",
		"serving client traffic insecurely; this is strongly discouraged!",
		"it isn't recommended to use default name, please set a value for --name. " +
			"Note that etcd might run into issue when multiple members have the same default name",
		"simple token is not cryptographically signed":
		return true
	}
	return false
}

// slogCore is a zapcore.Core that writes to a slog.Logger.
type slogCore struct {
	to    *slog.Logger
	quiet *atomic.Bool
}

func (c slogCore) level(l zapcore.Level) slog.Level {
	switch {
	case l <= zapcore.InfoLevel, c.quiet.Load():
		return slog.LevelDebug
	case l == zapcore.WarnLevel:
		return slog.LevelWarn
	default:
		return slog.LevelError
	}
}

func (c slogCore) Enabled(l zapcore.Level) bool {
	return l > zapcore.DebugLevel && c.to.Enabled(context.Background(), c.level(l))
}

func (c slogCore) With(fields []zapcore.Field) zapcore.Core {
	return slogCore{slog.New(c.to.Handler().WithAttrs(attrs(fields))), c.quiet}
}

func (c slogCore) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(entry.Level) {
		return checked.AddCore(entry, c)
	}
	return checked
}

func (c slogCore) Write(entry zapcore.Entry, fields []zapcore.Field) error {
	level := c.level(entry.Level)
	if byDesign(entry.Message) {
		level = slog.LevelDebug
	}
	c.to.LogAttrs(context.Background(), level, entry.Message, attrs(fields)...)
	return nil
}

func (slogCore) Sync() error { return nil }

func attrs(fields []zapcore.Field) []slog.Attr {
	out := make([]slog.Attr, 0, len(fields))
	for _, f := range fields {
		enc := zapcore.NewMapObjectEncoder()
		f.AddTo(enc)
		for name, value := range enc.Fields {
			out = append(out, slog.Any(name, value))
		}
	}
	return out
}

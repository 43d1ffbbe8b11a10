// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"context"
	"log/slog"

	"go.uber.org/zap/zapcore"
)

// slogCore hands certmagic's log lines to slog, all of them at the debug level:
// what fails comes back to us as an error too, and is told once, by who handles it.
type slogCore struct {
	log    *slog.Logger
	fields []zapcore.Field
}

func (c slogCore) Enabled(zapcore.Level) bool {
	return c.log.Enabled(context.Background(), slog.LevelDebug)
}

func (c slogCore) With(fields []zapcore.Field) zapcore.Core {
	c.fields = append(c.fields[:len(c.fields):len(c.fields)], fields...)
	return c
}

func (c slogCore) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if !c.Enabled(entry.Level) {
		return checked
	}
	return checked.AddCore(entry, c)
}

func (c slogCore) Write(entry zapcore.Entry, fields []zapcore.Field) error {
	encoder := zapcore.NewMapObjectEncoder()
	for _, field := range append(c.fields[:len(c.fields):len(c.fields)], fields...) {
		field.AddTo(encoder)
	}
	attrs := []slog.Attr{slog.String("from", "certmagic"), slog.String("severity", entry.Level.String())}
	for key, value := range encoder.Fields {
		attrs = append(attrs, slog.Any(key, value))
	}
	c.log.LogAttrs(context.Background(), slog.LevelDebug, entry.Message, attrs...)
	return nil
}

func (c slogCore) Sync() error { return nil }

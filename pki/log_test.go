// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"encoding/base64"
	"encoding/pem"
	"io"
	"log/slog"
	"strings"
	"testing"
)

func TestLogsTellChangesAndNoSecrets(t *testing.T) {
	for name, handler := range map[string]func(io.Writer, *slog.HandlerOptions) slog.Handler{
		"text": func(w io.Writer, o *slog.HandlerOptions) slog.Handler { return slog.NewTextHandler(w, o) },
		"json": func(w io.Writer, o *slog.HandlerOptions) slog.Handler { return slog.NewJSONHandler(w, o) },
	} {
		for _, level := range []slog.Level{slog.LevelInfo, slog.LevelDebug} {
			t.Run(name+" "+level.String(), func(t *testing.T) {
				var out bytes.Buffer
				s := newStorage(t)
				a := open(t, AuthorityConfig{Storage: s, Logger: slog.New(handler(&out, &slog.HandlerOptions{Level: level}))})
				l := leaf(t, a, serving("kube-apiserver", "acme.example.com"))
				a.zap.Sugar().Debugw("as certmagic logs it", "storage", s, "fence", &fence{Storage: s}, "sealer", s.sealer)
				a.Close()
				for _, want := range []string{"certificate authorities created", "certificate in use", "acme"} {
					if !strings.Contains(out.String(), want) {
						t.Errorf("%q is not in the log", want)
					}
				}
				if got := strings.Contains(out.String(), "certmagic"); got != (level == slog.LevelDebug) {
					t.Errorf("certmagic's lines are there: %v", got)
				}
				_, leafKey := l.PEM()
				_, caKey := a.CAKeyPair()
				for _, key := range [][]byte{leafKey, caKey} {
					block, _ := pem.Decode(key)
					secret := base64.StdEncoding.EncodeToString(block.Bytes)[12:36]
					if strings.Contains(out.String(), secret) || strings.Contains(out.String(), "PRIVATE KEY") {
						t.Error("a private key is in the log")
					}
				}
			})
		}
	}
}

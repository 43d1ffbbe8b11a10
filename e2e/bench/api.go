// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"k8s.io/client-go/rest"
)

const (
	// pollInterval is the resolution of the times: fine beside a second, and no
	// load for a server that is starting.
	pollInterval = 20 * time.Millisecond
	// callPatience frees a poll from a connection that is never answered.
	callPatience = 10 * time.Second
	// errorLength is how much of a refusal is shown.
	errorLength = 300
)

// api calls an API server, or any other server that answers in JSON. Both sides
// are called in the same way.
type api struct {
	base   string
	client *http.Client
}

func newAPI(cfg *rest.Config) (*api, error) {
	tls, err := rest.TLSConfigFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("prepare TLS for %s: %w", cfg.Host, err)
	}
	// No proxy: everything is on loopback.
	transport := &http.Transport{TLSClientConfig: tls, ForceAttemptHTTP2: true}
	return &api{base: cfg.Host, client: &http.Client{Transport: transport}}, nil
}

// call sends body, unless it is nil, and reads the answer into into, unless that is nil.
func (a *api) call(ctx context.Context, method, path string, body, into any) error {
	ctx, cancel := context.WithTimeout(ctx, callPatience)
	defer cancel()
	var send io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("encode request: %w", err)
		}
		send = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.base+path, send)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if resp.StatusCode/100 != 2 {
		return &statusError{fmt.Sprintf("%s %s: %s: %s", method, path, resp.Status, answer[:min(len(answer), errorLength)]), resp.StatusCode}
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(answer, into)
}

// statusError is an answer that is not a success.
type statusError struct {
	text   string
	status int
}

func (e *statusError) Error() string { return e.text }

func isStatus(err error, status int) bool {
	var answer *statusError
	return errors.As(err, &answer) && answer.status == status
}

// usable waits until the default service account can be read, without which no
// pod can be created. It leaves no connection open.
func usable(ctx context.Context, cfg *rest.Config, patience time.Duration, processes []*process) error {
	a, err := newAPI(cfg)
	if err != nil {
		return err
	}
	defer a.client.CloseIdleConnections()
	return poll(ctx, patience, processes, func(ctx context.Context) error {
		return a.call(ctx, http.MethodGet, "/api/v1/namespaces/default/serviceaccounts/default", nil, nil)
	})
}

// poll repeats try until it succeeds, patience is over, or one of the processes has ended.
func poll(ctx context.Context, patience time.Duration, processes []*process, try func(context.Context) error) error {
	late := time.NewTimer(patience)
	defer late.Stop()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		for _, p := range processes {
			if ended := p.ended(); ended != nil {
				return ended
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-late.C:
			return fmt.Errorf("gave up after %s (--patience): %w", patience, err)
		case <-tick.C:
		}
	}
}

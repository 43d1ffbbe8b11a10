// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/endpoints/responsewriter"
)

// bodyRest is how long a client has for what it still owes of a request's body once
// the request is answered.
const bodyRest = 10 * time.Second

// answerFirst answers a request over HTTP/1 whether or not its body arrives, and then
// closes the connection if it did not. net/http by itself reads up to 256 KiB that
// a handler left unread before the answer leaves, in the handler if that is long,
// and without a time limit when there is no ReadTimeout, as upstream has none. So
// anybody could announce a body, not send it, and be refused for ever, with a place
// among the requests in flight.
func answerFirst(h http.Handler, rest time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 1 || r.ContentLength == 0 {
			h.ServeHTTP(w, r)
			return
		}
		body := &watchedBody{ReadCloser: r.Body}
		answer := &earlyAnswer{ResponseWriter: w, body: body}
		defer func() {
			if !body.ended.Load() && answer.status != http.StatusSwitchingProtocols {
				// Fails on a connection that is gone, which is as well.
				_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(rest))
			}
		}()
		r.Body = body
		h.ServeHTTP(responsewriter.WrapForHTTP1Or2(answer), r)
	})
}

// watchedBody knows whether it was read to its end.
type watchedBody struct {
	io.ReadCloser
	ended atomic.Bool
}

// Read implements io.Reader.
func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.ended.Store(true)
	}
	return n, err
}

// earlyAnswer says that an answer is the last one of its connection, if the body was
// not read before it. Then net/http does not wait for the body.
type earlyAnswer struct {
	http.ResponseWriter
	body   *watchedBody
	status int
}

// Unwrap implements responsewriter.UserProvidedDecorator.
func (a *earlyAnswer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (a *earlyAnswer) WriteHeader(status int) {
	if a.status = status; status >= http.StatusOK && !a.body.ended.Load() {
		a.Header().Set("Connection", "close")
	}
	a.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (a *earlyAnswer) Write(p []byte) (int, error) {
	if a.status < http.StatusOK {
		a.WriteHeader(http.StatusOK)
	}
	return a.ResponseWriter.Write(p)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// A client that never sends the body it announced gets its answer, lets the handler
// go and is closed. One that sends it goes on.
func TestAnswersWithoutTheBody(t *testing.T) {
	long := strings.Repeat("no ", 2000) // more than net/http holds back
	content := strings.Repeat("x", 100)
	for name, form := range map[string][2]string{
		"with a length": {"Content-Length: 100\r\n\r\n", content},
		"in chunks":     {"Transfer-Encoding: chunked\r\n\r\n", "64\r\n" + content + "\r\n0\r\n\r\n"},
		"when asked":    {"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n", content},
	} {
		for _, sent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%t", name, sent), func(t *testing.T) {
				returned := make(chan struct{}, 2)
				rest := time.Hour
				if !sent {
					rest = 10 * time.Millisecond
				}
				server := httptest.NewServer(answerFirst(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if sent {
						io.Copy(io.Discard, r.Body)
					}
					w.WriteHeader(http.StatusForbidden)
					io.WriteString(w, long)
					returned <- struct{}{}
				}), rest))
				defer server.Close()
				c, err := net.Dial("tcp", server.Listener.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				read := bufio.NewReader(c)
				post := func() {
					t.Helper()
					io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\n"+form[0])
					if sent {
						io.WriteString(c, form[1])
					}
					response, err := http.ReadResponse(read, nil)
					if err == nil && response.StatusCode == http.StatusContinue {
						response, err = http.ReadResponse(read, nil)
					}
					if err != nil {
						t.Fatal(err)
					}
					if got, err := io.ReadAll(response.Body); err != nil || string(got) != long {
						t.Fatalf("answer of %d bytes, %v", len(got), err)
					}
					<-returned
				}
				post()
				if sent {
					post()
				} else if n, err := io.Copy(io.Discard, read); n != 0 { // until it is closed
					t.Errorf("%d bytes more, %v", n, err)
				}
			})
		}
	}
}

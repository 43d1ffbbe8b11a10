// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/emicklei/go-restful/v3"
)

// apiContainer has routes of the kinds that an API server has. Each answers with
// owner, its own number and the parameters of its path.
func apiContainer(owner string, roots ...string) *restful.Container {
	c := restful.NewContainer()
	c.ServeMux = http.NewServeMux()
	c.Router(restful.CurlyRouter{})
	for _, root := range roots {
		ws := new(restful.WebService).Path(root).Produces("application/json", "application/yaml")
		n := 0
		add := func(b *restful.RouteBuilder) {
			n++
			answer := fmt.Sprintf("%s %s %d", owner, root, n)
			ws.Route(b.To(func(req *restful.Request, resp *restful.Response) {
				fmt.Fprint(resp.ResponseWriter, answer, req.PathParameters())
			}))
		}
		add(ws.GET("/"))
		for _, path := range []string{"pods", "namespaces/{namespace}/pods"} {
			add(ws.GET(path).Param(ws.QueryParameter("watch", "follow")))
			add(ws.POST(path).Consumes("application/json"))
			add(ws.GET(path + "/{name}"))
			add(ws.PATCH(path+"/{name}").Consumes("application/json-patch+json", "application/merge-patch+json"))
			add(ws.PUT(path + "/{name}/status"))
			add(ws.GET(path + "/{name}/proxy"))
			add(ws.GET(path + "/{name}/proxy/{path:*}"))
		}
		c.Add(ws)
	}
	return c
}

func TestSharedRoutesAnswerAsOwnOnesDo(t *testing.T) {
	roots := []string{"/version", "/api", "/api/v1", "/apis/apps/v1"}
	table := newRouteTable(apiContainer("first", roots...).RegisteredWebServices())
	if table == nil {
		t.Fatal("no table")
	}
	compared := map[int]int{}
	for _, owner := range []string{"a", "b"} {
		own, shared := apiContainer(owner, roots...), apiContainer(owner, roots...)
		table.install(shared)
		for i, ws := range shared.RegisteredWebServices() {
			if ws != table[i] {
				t.Fatalf("service %s is not shared", ws.RootPath())
			}
		}
		for _, path := range []string{
			"/", "/version", "/version/", "/api", "/api/", "/api/v1", "/api/v1/", "/api/v1/pods", "/api/v1/pods/", "/api/v1/pods/x", "/apis/apps/v1/pods/x/status",
			"/api/v1/namespaces/n/pods", "/api/v1/namespaces/n/pods/x", "/api/v1/namespaces/n/pods/x/proxy", "/api/v1/namespaces/n/pods/x/proxy/a/b", "/api/v1/unknown",
			"/api/v2/pods", "/apis/apps/v1/namespaces//pods", "/apis/apps", "/api/v1//pods",
		} {
			for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
				for _, header := range []http.Header{
					{},
					{"Accept": {"application/yaml"}},
					{"Accept": {"text/html"}},
					{"Content-Type": {"application/json"}},
					{"Content-Type": {"application/merge-patch+json"}},
				} {
					want, got := httptest.NewRecorder(), httptest.NewRecorder()
					for c, w := range map[*restful.Container]*httptest.ResponseRecorder{own: want, shared: got} {
						req := httptest.NewRequest(method, "https://host"+path, nil)
						req.Header = header.Clone()
						c.Dispatch(w, req)
					}
					compared[want.Code]++
					if got.Code != want.Code || got.Body.String() != want.Body.String() || fmt.Sprint(got.Header()) != fmt.Sprint(want.Header()) {
						t.Errorf("%s %s %v: shared routes answer %d %q %v, own ones %d %q %v", method, path, header,
							got.Code, got.Body, got.Header(), want.Code, want.Body, want.Header())
					}
				}
			}
		}
	}
	for _, code := range []int{200, 404, 405, 406, 415} {
		if compared[code] == 0 {
			t.Errorf("no request was answered with %d", code)
		}
	}
}

func TestOtherRoutesAreNotShared(t *testing.T) {
	table := newRouteTable(apiContainer("first", "/api/v1").RegisteredWebServices())
	other := apiContainer("other", "/api/v1", "/apis/apps/v1")
	table.install(other)
	w := httptest.NewRecorder()
	other.Dispatch(w, httptest.NewRequest(http.MethodGet, "https://host/apis/apps/v1/pods", nil))
	if got, want := w.Body.String(), "other /apis/apps/v1 2map[]"; got != want {
		t.Errorf("answer %q, want %q", got, want)
	}
}

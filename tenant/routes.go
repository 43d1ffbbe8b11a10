// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"net/http"
	"slices"
	"strings"

	"github.com/emicklei/go-restful/v3"
)

// routeTable is what the built-in API's routes are in every control plane: paths,
// methods and media types, 1,400 of them with a compiled expression and the
// documentation of all parameters each, 9 MB. Only what a route leads to is a
// control plane's own.
type routeTable []*restful.WebService

// routeNumber is the key in a shared route's metadata of its place in a router.
const routeNumber = "tenantd.dev/number"

// newRouteTable makes the table from the services of one control plane. It keeps
// nothing of theirs. It is nil if there is a route that a table cannot stand for.
func newRouteTable(services []*restful.WebService) routeTable {
	var table routeTable
	number := 0
	for _, own := range services {
		shared := new(restful.WebService).Path(own.RootPath()).Doc(own.Documentation())
		for _, r := range own.Routes() {
			if len(r.If) > 0 || len(r.Filters) > 0 {
				return nil
			}
			path := strings.TrimPrefix(r.Path, strings.TrimRight(own.RootPath(), "/"))
			shared.Route(shared.Method(r.Method).Path(path).Consumes(r.Consumes...).Produces(r.Produces...).
				Operation(r.Operation).Metadata(routeNumber, number).To(notRouted))
			number++
		}
		table = append(table, shared)
	}
	if !table.describes(services) {
		return nil
	}
	return table
}

// notRouted stands in the table for what a router puts in its place.
func notRouted(*restful.Request, *restful.Response) { panic("route of no control plane") }

// describes reports whether the services have the table's routes, in its order.
func (t routeTable) describes(services []*restful.WebService) bool {
	return slices.EqualFunc(t, services, func(shared, own *restful.WebService) bool {
		return shared.RootPath() == own.RootPath() && slices.EqualFunc(shared.Routes(), own.Routes(), func(a, b restful.Route) bool {
			return a.Method == b.Method && a.Path == b.Path && slices.Equal(a.Consumes, b.Consumes) && slices.Equal(a.Produces, b.Produces) &&
				len(b.If) == 0 && len(b.Filters) == 0
		})
	})
}

// install puts the table in the place of c's own services. A container whose routes
// are not the table's stays as it is.
func (t routeTable) install(c *restful.Container) {
	services := c.RegisteredWebServices()
	if len(t) == 0 || !t.describes(services) {
		return
	}
	var own router
	for i, ws := range services {
		for _, r := range ws.Routes() {
			own = append(own, r.Function)
		}
		if err := c.Remove(ws); err != nil {
			panic(err) // only of the container that is net/http's default
		}
		c.Add(t[i])
	}
	c.Router(own)
}

// router selects among the table's routes as upstream does, and then leads to the
// functions of one control plane, by the routes' numbers.
type router []restful.RouteFunction

// SelectRoute implements restful.RouteSelector.
func (r router) SelectRoute(services []*restful.WebService, req *http.Request) (*restful.WebService, *restful.Route, error) {
	ws, route, err := restful.CurlyRouter{}.SelectRoute(services, req)
	if err != nil || route == nil {
		return ws, route, err
	}
	if n, ok := route.Metadata[routeNumber].(int); ok {
		own := *route
		own.Function = r[n]
		route = &own
	}
	return ws, route, nil
}

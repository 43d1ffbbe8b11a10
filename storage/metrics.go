// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"maps"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// usage needs mu.
func (l *ledger) usage(tenant string) Usage {
	u := Usage{Quota: l.quota(tenant)}
	if a := l.tenants[tenant]; a != nil {
		u.Live, u.History, u.Keys, u.Full = a.live[bytesUsed], a.history, int64(len(a.sizes)), a.full(u.Quota)
		u.Objects, u.CRDs, u.CRDBytes = a.live[objects], a.live[crds], a.live[crdBytes]
	}
	return u
}

// Collector reports the store's metrics. A tenant's series end when it is wiped.
func (s *Store) Collector() prometheus.Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("tenantd_storage_"+name, help, labels, nil)
	}
	return &collector{
		store:            s,
		dbBytes:          desc("db_bytes", "Size of the database file."),
		dbInUse:          desc("db_in_use_bytes", "Size of the database file without its free pages."),
		dbQuota:          desc("db_quota_bytes", "Size of the database file at which etcd refuses all writes."),
		compactions:      desc("compactions_total", "Compactions of history."),
		defragmentations: desc("defragmentations_total", "Rewritings of the database file."),
		tenantBytes:      desc("tenant_bytes", "Bytes of a tenant's current keys and values.", "uid"),
		tenantHistory:    desc("tenant_history_bytes", "Bytes of a tenant's earlier versions that are not compacted away yet.", "uid"),
		tenantKeys:       desc("tenant_keys", "Number of a tenant's current keys.", "uid"),
		tenantObjects:    desc("tenant_objects", "Number of a tenant's objects.", "uid"),
		tenantCRDs:       desc("tenant_custom_resource_definitions", "Number of a tenant's CustomResourceDefinitions.", "uid"),
		tenantQuota:      desc("tenant_quota_bytes", "Bound of a tenant's current keys and values.", "uid"),
		refused:          desc("quota_refused_total", "Writes refused because they would have grown a tenant, by the limit that refused them.", "uid", "limit"),
	}
}

type collector struct {
	store *Store

	dbBytes, dbInUse, dbQuota                           *prometheus.Desc
	compactions, defragmentations                       *prometheus.Desc
	tenantBytes, tenantHistory, tenantKeys, tenantQuota *prometheus.Desc
	tenantObjects, tenantCRDs                           *prometheus.Desc
	refused                                             *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.dbBytes, c.dbInUse, c.dbQuota, c.compactions, c.defragmentations,
		c.tenantBytes, c.tenantHistory, c.tenantKeys, c.tenantQuota, c.tenantObjects, c.tenantCRDs, c.refused,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector. It does not wait for the books, so a scrape is never held up.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, t prometheus.ValueType, v int64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, t, float64(v), labels...)
	}
	size, inUse := c.store.sizes()
	send(c.dbBytes, prometheus.GaugeValue, size)
	send(c.dbInUse, prometheus.GaugeValue, inUse)
	send(c.dbQuota, prometheus.GaugeValue, c.store.cfg.BackendQuota)
	send(c.compactions, prometheus.CounterValue, c.store.compactions.Load())
	send(c.defragmentations, prometheus.CounterValue, c.store.defragmentations.Load())

	type line struct {
		Usage
		refused map[Cause]int64
	}
	l := c.store.ledger
	l.mu.Lock()
	lines := make(map[string]line, len(l.tenants))
	for tenant, a := range l.tenants {
		lines[tenant] = line{l.usage(tenant), maps.Clone(a.refused)}
	}
	l.mu.Unlock()
	for tenant, line := range lines {
		send(c.tenantBytes, prometheus.GaugeValue, line.Live, tenant)
		send(c.tenantHistory, prometheus.GaugeValue, line.History, tenant)
		send(c.tenantKeys, prometheus.GaugeValue, line.Keys, tenant)
		send(c.tenantQuota, prometheus.GaugeValue, line.Quota, tenant)
		send(c.tenantObjects, prometheus.GaugeValue, line.Objects, tenant)
		send(c.tenantCRDs, prometheus.GaugeValue, line.CRDs, tenant)
		for cause, refused := range line.refused {
			send(c.refused, prometheus.CounterValue, refused, tenant, strings.TrimPrefix(string(cause), "spec.limits."))
		}
	}
}

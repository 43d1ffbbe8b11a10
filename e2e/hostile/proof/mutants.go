// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// mutant is tenantd without one of its defences.
type mutant struct {
	name    string // of the case that must fail
	defence string // what is taken out, after "without"
	edits   []edit
}

// edit is a change of a source file.
type edit struct{ file, old, new string }

// mutants are all that is proven.
var mutants = []mutant{
	{"WebhooksByURL", "the egress of the control plane", []edit{{
		"tenant/apiserver.go", "		egressselector.ControlPlane: tunnel.dial,\n", "",
	}}},
	// This one has all of upstream compiled again.
	{"HugeQuantities", "bounded numbers", []edit{{
		"tenant/inf/inf.go", "const MaxDigits = 1000\n", "const MaxDigits = 1 << 30\n",
	}}},
	{"WebhooksByService", "the egress into the cluster", []edit{{
		"tenant/apiserver.go", "		egressselector.Cluster:      tunnel.dial,\n", "",
	}}},
	{"Conversions", "the egress of the control plane", []edit{{
		"tenant/apiserver.go", "		egressselector.ControlPlane: tunnel.dial,\n", "",
	}}},
	{"AggregatedAPIs", "the egress into the cluster", []edit{{
		"tenant/apiserver.go", "newAggregation(s.tunnel.dial, ", "newAggregation((&net.Dialer{}).DialContext, ",
	}}},
	{"NodeProxy", "the egress into the cluster", []edit{{
		"tenant/apiserver.go", "		egressselector.Cluster:      tunnel.dial,\n", "",
	}}},
	{"PodAndServiceProxy", "the egress into the cluster", []edit{{
		"tenant/apiserver.go", "		egressselector.Cluster:      tunnel.dial,\n", "",
	}}},
	{"HostPathVolumes", "volume plugins that are CSI alone", []edit{{
		"tenant/controllers.go", "	names.PersistentVolumeBinderController,\n", "",
	}}},
	{"HostPathProvisioning", "volume plugins that are CSI alone", []edit{{
		"tenant/controllers.go",
		"func csiPlugins() []volume.VolumePlugin { return csi.ProbeVolumePlugins() }",
		"func csiPlugins() []volume.VolumePlugin {\n\treturn append(csi.ProbeVolumePlugins(), hostpath.ProbeVolumePlugins(volume.VolumeConfig{ProvisioningEnabled: true})...)\n}",
	}, {
		"tenant/controllers.go",
		"	\"k8s.io/kubernetes/pkg/volume/csi\"\n",
		"	\"k8s.io/kubernetes/pkg/volume/csi\"\n	hostpath \"k8s.io/kubernetes/pkg/volume/hostpath\"\n",
	}}},
	{"FlexVolume", "an attach-detach controller without drivers", []edit{{
		"tenant/controllers.go", "storage.VolumeAttachments(), csiPlugins(), nil,\n",
		"storage.VolumeAttachments(), csiPlugins(), kcm.GetDynamicPluginProber(ctx, cc.ComponentConfig.PersistentVolumeBinderController.VolumeConfiguration),\n",
	}}},
	{"DeletedRoles", "patience with post-start hooks", []edit{{
		"tenant/apiserver.go", "			if err == nil || ctx.Err() != nil {\n				return nil\n			}\n", "			if delay > 0 {\n				return err\n			}\n",
	}}},
	{"DeletedRoles", "patience with post-start hooks, nor a way to survive a fatal exit", []edit{{
		"tenant/apiserver.go", "			if err == nil || ctx.Err() != nil {\n				return nil\n			}\n", "			if delay > 0 {\n				return err\n			}\n",
	}, {
		"tenant/process.go", "	klog.OsExit = exit\n", "	_ = exit\n",
	}}},
	{"OddNodes", "a node IPAM controller that waits for its nodes", []edit{{
		"tenant/controllers.go", "	names.NodeIpamController,", "	// all",
	}}},
	{"ComponentStatuses", "componentstatuses from inside", []edit{{
		"tenant/apiserver.go", "resources[resource] != nil {", "resources[resource] != nil && resource == \"\" {",
	}}},
	{"BorrowedToken", "webhooks that cannot be the API server", []edit{{
		"tenant/bounded.go", "		if cfg.Transport != nil {", "		if cfg.Transport != nil && max < 0 {",
	}}},
	{"NodeProxy", "nodes by their addresses alone", []edit{{
		"tenant/bounded.go", "p.Connection, p.ProxyTransport = ipOnly{p.Connection}, boundedPages{p.ProxyTransport}", "p.ProxyTransport = boundedPages{p.ProxyTransport}",
	}}},
	{"EndlessWebhook", "a bound of webhooks' answers", []edit{{
		"tenant/bounded.go", "		cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return boundedTransport{rt, max} })\n", "",
	}}},
	{"EndlessWebhook", "webhooks' answers as they are", []edit{{
		"tenant/bounded.go", "		cfg.DisableCompression = true\n		cfg.Wrap(", "		cfg.Wrap(",
	}}},
	{"EndlessConversion", "a bound of webhooks' answers", []edit{{
		"tenant/bounded.go", "		cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return boundedTransport{rt, max} })\n", "",
	}}},
	{"EndlessAPI", "a bound of aggregated APIs' documents", []edit{{
		"tenant/aggregate.go", "	maxDocument = 4 << 20\n", "	maxDocument = 1 << 30\n",
	}}},
	{"HiddenProcess", "profiles switched off", []edit{{
		"tenant/apiserver.go", "	o.Features.EnableProfiling = false\n", "",
	}}},
	{"HiddenProcess", "metrics switched off", []edit{{
		"tenant/apiserver.go", "	c.EnableMetrics = false", "	c.EnableMetrics = true",
	}}},
	{"HiddenProcess", "the page about the process switched off", []edit{{
		"tenant/process.go", "		string(zpages.ComponentStatusz): false,\n", "		string(zpages.ComponentStatusz): true,\n",
	}}},
	{"HiddenProcess", "the identity lease switched off", []edit{{
		"tenant/process.go", "		string(genericfeatures.APIServerIdentity): false,\n", "		string(genericfeatures.APIServerIdentity): true,\n",
	}}},
	{"FrontProxyHeaders", "an authority of the front proxy's own", []edit{{
		"tenant/apiserver.go", "cfg.Authority.FrontProxyCA())", "cfg.Authority.CA())",
	}}},
	{"ForeignCredentials", "an authority of each tenant's own", []edit{{
		"host/host.go", "prefix+\"pki/\"", "prefix[:0]+\"/tenants/system/pki/\"",
	}}},
	{"WrongNames", "an authority of each tenant's own", []edit{{
		"host/host.go", "prefix+\"pki/\"", "prefix[:0]+\"/tenants/system/pki/\"",
	}}},
	{"TooMuchStored", "a limit of objects' size", []edit{{
		"storage/ledger.go", "	if value > largest && value > oldValue {\n", "	if value > largest && value > oldValue && a == nil {\n",
	}}},
	{"TooMuchStored", "a limit of CustomResourceDefinitions", []edit{{
		"storage/ledger.go", "		if growth[i] > 0 && used > most {\n", "		if growth[i] > 0 && used > most && a == nil {\n",
	}}},
	{"TooManyObjects", "a limit of objects", []edit{{
		"storage/ledger.go", "		if growth[i] > 0 && used > most {\n", "		if growth[i] > 0 && used > most && a == nil {\n",
	}}},
	{"TooManyPerSecond", "a limit of requests per second", []edit{{
		"tenant/limit/limit.go", "	if !b.rate.Allow() {\n", "	if !b.rate.Allow() && l == nil {\n",
	}}},
	{"TooManyInFlight", "a limit of requests in flight", []edit{{
		"tenant/limit/limit.go", "&& b.inFlight >= inFlight:\n", "&& b.inFlight >= inFlight && l == nil:\n",
	}}},
	{"TooManyWatches", "a limit of watches", []edit{{
		"tenant/limit/limit.go", "	case t.watch && l.watches >= l.config.Watches:\n", "	case t.watch && l.watches >= l.config.Watches && l == nil:\n",
	}}},
	{"StolenStore", "encryption at rest", []edit{{
		"tenant/secrets.go", "if err == nil && encrypted(resource) {", "if err == nil && encrypted(resource) && resource.Resource == \"\" {",
	}}},
	{"StolenStore", "a watch cache that survives what it cannot read", []edit{{
		"tenant/secrets.go", "; !request {", "; !request && err == nil {",
	}}},
	{"KeysInTheOpen", "a limit on core dumps", []edit{{
		"cmd/tenantd/main.go", "	if err := forbidCoreDumps(); err != nil {\n", "	if err := error(nil); err != nil {\n",
	}}},
	{"HostNameInEvents", "events that tell no host's name", []edit{{
		"tenant/events.go", "a.GetOperation() == admission.Create && ", "a.GetOperation() == admission.Connect && ",
	}}},
	{"Unseen", "the audit log", []edit{{
		"tenant/apiserver.go", "	if cp.audit != nil {\n", "	if cp.audit != nil && cp.cfg.Name == \"\" {\n",
	}}},
	{"Unseen", "a limit on what strangers put into the audit log", []edit{{
		"tenant/audit.go", " && !a.strangers.Allow() {", " && !a.strangers.Allow() && name == \"x\" {",
	}}},
	{"LongTokens", "a bound on tokens", []edit{{
		"tenant/apiserver.go", "shortTokens{&rememberedCerts{Request: c.Authentication.Authenticator}}", "c.Authentication.Authenticator",
	}}},
	{"EndlessKeys", "a bound on RSA keys", []edit{{
		"tenant/costly.go", "k.N.BitLen() > maxRSABits {", "k.N.BitLen() > maxRSABits && !ok {",
	}}},
	{"EndlessColumns", "a bound on descents", []edit{{
		"tenant/costly.go", "	if descents > 1 {\n", "	if descents > 1<<20 {\n",
	}}},
	{"EndlessColumns", "a bound on unions", []edit{{
		"tenant/costly.go", "	if unions > maxColumnUnion {\n", "	if unions > 1<<20 {\n",
	}}},
	{"MovedPod", "an end to control planes whose components have given up", []edit{{
		"tenant/exits.go", "			f(by)\n", "			_, _ = f, by\n",
	}}},
	{"PoisonedFlows", "panics that end a goroutine and not the process", []edit{{
		"tenant/process.go", "	utilruntime.ReallyCrash = false\n", "	utilruntime.ReallyCrash = true\n",
	}}},
	{"AnonymousFlood", "a limit of strangers' own", []edit{{
		"tenant/limit/limit.go", "strangersPerSecond = 50\n", "strangersPerSecond = 50000\n",
	}}},
	{"ForgedAgents", "agents that have their node's name", []edit{{
		"konnectivity/identity.go", "		if name != node {\n", "		if name != node && name == \"\" {\n",
	}}},
	{"HalfOpen", "a limit on the time of a handshake", []edit{{
		"sni/conn.go", "time.AfterFunc(r.handshakeTimeout, ", "time.AfterFunc(1000*r.handshakeTimeout, ",
	}}},
}

# Copyright The tenantd Authors.
# SPDX-License-Identifier: Apache-2.0

GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0-dev)
COMMIT  ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
DATE    ?= $(shell date -u +%Y-%m-%dT%H:%M:%SZ -d @$$(git log -1 --format=%ct 2>/dev/null || echo 0))

# The Kubernetes release that is linked in. kubectl, kubeadm and kubelets check
# what an API server says of itself, so upstream's own stamps are set as upstream
# sets them.
KUBE    := $(shell $(GO) list -m -f '{{.Version}}' k8s.io/kubernetes)
KUBE_COMMIT := f78e722310e50bcaca9276be22276d9e91d91308
STAMPS  := -X main.version=$(VERSION) \
	$(foreach p,k8s.io/component-base/version k8s.io/client-go/pkg/version,\
	-X $(p).gitVersion=$(KUBE) -X $(p).gitMajor=1 -X $(p).gitMinor=$(word 2,$(subst ., ,$(KUBE))) \
	-X $(p).gitCommit=$(KUBE_COMMIT) -X $(p).gitTreeState=clean -X $(p).buildDate=$(DATE))
LDFLAGS := -s -w $(STAMPS)

GOLANGCI_LINT ?= v2.15.0

prefix     ?= /usr/local
bindir     ?= $(prefix)/bin
sysconfdir ?= /etc
unitdir    ?= /usr/lib/systemd/system
datadir    ?= $(prefix)/share

# One set of flags for programs and tests, so that upstream is compiled once.
export CGO_ENABLED ?= 0
export GOFLAGS := $(filter-out -trimpath,$(GOFLAGS)) -trimpath

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

.PHONY: build
build: bin/tenantd bin/tenantctl bin/tenant-proxy ## the three programs in bin/, static, with version stamps

# go decides what is out of date, not make.
.PHONY: bin/tenantd bin/tenantctl bin/tenant-proxy
bin/tenantd bin/tenantctl bin/tenant-proxy: bin/%:
	$(GO) build -ldflags '$(LDFLAGS)' -o $@ ./cmd/$*

# As a later version might be, for tests with hosts of two versions.
.PHONY: bin/tenantd-next
bin/tenantd-next:
	$(GO) run ./e2e/hosts/next -ldflags '$(subst main.version=$(VERSION),main.version=$(VERSION)-next,$(LDFLAGS))' -o $@

# Upstream's programs, from the module that is linked into tenantd: for tests, the
# demo and the benchmark.
UPSTREAM := $(addprefix bin/,kubectl kube-apiserver kube-controller-manager kube-scheduler kubelet kubeadm kube-proxy)
.PHONY: $(UPSTREAM) bin/konnectivity-agent
$(UPSTREAM): bin/%:
	$(GO) build -ldflags '$(LDFLAGS)' -o $@ k8s.io/kubernetes/cmd/$*
bin/konnectivity-agent:
	$(GO) build -ldflags '-s -w' -o $@ sigs.k8s.io/apiserver-network-proxy/cmd/agent

.PHONY: bin/pause bin/testserver
bin/pause bin/testserver: bin/%:
	$(GO) build -ldflags '-s -w' -o $@ ./e2e/workers/images/$*

# CoreDNS is its own module with hundreds of its own: built beside ours, not in it.
# The version is the one that kubeadm's constants name.
COREDNS ?= v1.14.6
bin/coredns:
	GOBIN=$(CURDIR)/bin $(GO) install -ldflags '-s -w' github.com/coredns/coredns@$(COREDNS)

.PHONY: demo
demo: build bin/kubectl ## start a host on 127.0.0.1:8443 with two tenants, until Ctrl-C
	@sh e2e/demo.sh

# The packages that do not link upstream: quick to build, so they can be tested with
# the race detector, which needs a compile of its own.
small := ./api/... ./cmd/tenantctl ./cmd/tenant-proxy ./e2e/proc ./host/gossip ./host/heap ./host/placement ./konnectivity/... ./pki ./sni ./storage ./tenant/limit ./worker/...

.PHONY: test
test: build bin/kubectl bin/kube-apiserver ## everything that needs no root
	$(GO) vet ./...
	$(GO) test -count=1 -timeout 30m $$($(GO) list ./... | grep -v /e2e)
	$(GO) test -count=1 -timeout 45m -p 1 ./e2e/... # one after the other: each fills the machine

.PHONY: e2e
LAB := bin/kubectl bin/kubelet bin/kubeadm bin/kube-proxy bin/konnectivity-agent bin/coredns bin/pause bin/testserver
e2e: build $(LAB) ## tenants with real workers; as root, on Debian (says what is missing)
	$(GO) vet -tags e2e,bench ./e2e/workers/...
	$(GO) test -tags e2e -count=1 -timeout 30m -skip '^TestHosts$$' ./e2e/workers

.PHONY: e2e-failover
e2e-failover: build $(LAB) ## a real worker of a tenant on three hosts, each of which is lost; as root, on Debian (says what is missing)
	$(GO) vet -tags e2e ./e2e/workers/...
	$(GO) test -tags e2e -count=1 -timeout 20m -v -run '^TestHosts$$' ./e2e/workers

.PHONY: e2e-hosts
e2e-hosts: build bin/tenantd-next ## an installation of several hosts, and faults; as root, on Linux (says what is missing)
	$(GO) vet -tags e2e ./e2e/hosts
	$(GO) test -tags e2e -count=1 -timeout 40m ./e2e/hosts

# Kubelets of the two minors before ours.
SKEW ?= v1.36.3 v1.35.4
.PHONY: e2e-skew
e2e-skew: build bin/kubectl bin/kubelet bin/kubeadm bin/kube-proxy bin/konnectivity-agent bin/coredns bin/pause bin/testserver ## older kubelets join a tenant; as root; builds them, which takes a while
	for version in $(SKEW); do GO='$(GO)' e2e/workers/kubelet.sh $$version || exit 1; done
	$(GO) vet -tags e2e,skew ./e2e/workers/...
	$(GO) test -tags e2e,skew -count=1 -timeout 30m -run '^TestSkew$$' ./e2e/workers

.PHONY: e2e-hostile
e2e-hostile: build bin/kubectl ## attacks by tenants' administrators and by strangers; part of make test
	$(GO) test -count=1 -timeout 20m ./e2e/hostile

MUTANTS ?=
.PHONY: hostile-proof
hostile-proof: build bin/kubectl ## that each attack succeeds without its defence: half a minute each; MUTANTS=NAME for some
	$(GO) run ./e2e/hostile/proof -ldflags '$(LDFLAGS)' -run '$(MUTANTS)'

.PHONY: race
race: ## the packages of ours that do not link upstream, with the race detector
	CGO_ENABLED=1 $(GO) test -race -count=1 -timeout 20m $(small)

# A daemon in which a race was found exits with 66, which the tests notice.
.PHONY: race-all
race-all: race build bin/kubectl ## everything that is ours, and a daemon under attack and in use, with the race detector; compiles upstream once more
	CGO_ENABLED=1 $(GO) test -race -count=1 -timeout 60m . ./host ./tenant/...
	CGO_ENABLED=1 $(GO) build -race -ldflags '$(LDFLAGS)' -o bin/tenantd-race ./cmd/tenantd
	TENANTD_BINARY='$(CURDIR)/bin/tenantd-race' $(GO) test -count=1 -timeout 60m ./e2e/hostile
	TENANTD_BINARY='$(CURDIR)/bin/tenantd-race' $(GO) test -count=1 -timeout 60m -run '^(TestCluster|TestTwentyAtOnce|TestTenantctl)$$' ./e2e

SCALE_FLAGS ?=
.PHONY: scale-sim
scale-sim: ## placement, gossip and routes of 100 hosts with 10,000 tenants, without control planes (SCALE_FLAGS='-hosts 200')
	$(GO) vet -tags scale ./host
	$(GO) test -tags scale -c -o bin/scale.test ./host
	unshare -rn sh -c 'ip link set lo up && exec bin/scale.test -test.v -test.run "^TestScale$$" $(SCALE_FLAGS)' | grep -v level=

FUZZTIME ?= 1m
.PHONY: fuzz
fuzz: ## each fuzz target for FUZZTIME (1m)
	$(GO) test -run '^$$' -fuzz '^FuzzClientHello$$' -fuzztime $(FUZZTIME) ./sni
	$(GO) test -run '^$$' -fuzz '^FuzzProxyHeader$$' -fuzztime $(FUZZTIME) ./sni
	$(GO) test -run '^$$' -fuzz '^FuzzPackets$$' -fuzztime $(FUZZTIME) ./konnectivity
	$(GO) test -run '^$$' -fuzz '^FuzzClaims$$' -fuzztime $(FUZZTIME) ./konnectivity
	$(GO) test -run '^$$' -fuzz '^FuzzParseTenant$$' -fuzztime $(FUZZTIME) ./api/v1alpha1
	$(GO) test -run '^$$' -fuzz '^FuzzParseHostToken$$' -fuzztime $(FUZZTIME) ./api/v1alpha1
	$(GO) test -run '^$$' -fuzz '^FuzzRecord$$' -fuzztime $(FUZZTIME) ./host/gossip
	$(GO) test -run '^$$' -fuzz '^FuzzMessage$$' -fuzztime $(FUZZTIME) ./host/gossip

.PHONY: bench bench-long bench-programs
bench-programs: build bin/kubectl bin/kube-apiserver bin/kube-controller-manager bin/kube-scheduler
	$(GO) build -o bin/bench ./e2e/bench

bench: bench-programs ## what a tenant costs, in 10 minutes; writes bench/results.json; needs haproxy, nginx
	bin/bench --tenants 3 --pause 5s --settle 15s --idle 30s $(BENCH_FLAGS)
	bin/bench neighbour --rounds 3 --round 4s
	bin/bench router --rounds 3 --round 1s --settle 5s
	bin/bench api --rounds 2 --round 1s
	bin/bench churn --tenants 5 --history 10s
	bin/bench scale --tenants 10 --burst 10 --settle 10s
	bin/bench sleep --tenants 50 --used 4 --awake 2 --rounds 3 --settle 25s --idle 15s
	@echo 'This was the short form: few tenants and short rounds. make bench-long has 100 tenants and more rounds.'

bench-long: bench-programs ## the same with 100 tenants, and workers as root; an hour and a half
	bin/bench --tenants 6 --settle 150s $(BENCH_FLAGS)
	bin/bench neighbour
	bin/bench router --rounds 9
	bin/bench api --rounds 9
	bin/bench churn --tenants 100
	bin/bench scale --tenants 100
	bin/bench sleep --tenants 950 --used 48 --awake 20 --settle 6m
	@if [ "$$(id -u)" = 0 ]; then $(MAKE) bench-workers; else echo 'The figures of workers need root: make bench-workers'; fi

.PHONY: bench-workers
bench-workers: build $(LAB) ## what workers' connections cost, beside HAProxy and a kubelet dialled directly; as root
	$(GO) run ./worker/bench -tenant-proxy bin/tenant-proxy -o bench/results.json
	TENANTD_FIGURES='$(CURDIR)/bench/results.json' $(GO) test -tags e2e,bench -count=1 -timeout 20m -v -run '^TestFigures$$' ./e2e/workers

.PHONY: bench-hosts
bench-hosts: build ## how long failovers, moves and joins of hosts take, over 30 rounds (TENANTD_FIGURE_ROUNDS): half an hour; as root
	TENANTD_FIGURES='$(CURDIR)/bench/results.json' $(GO) test -tags e2e,bench -count=1 -timeout 90m -v -run '^TestFigures$$' ./e2e/hosts

.PHONY: generate
generate: ## the CRDs and deep copies, after a change to api/
	$(GO) generate ./api/...

.PHONY: lint
lint: ## vet, gofmt and golangci-lint
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); echo 'run gofmt -w on these'; exit 1; }
	$(GO) vet ./...
	$(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT) run ./...

# Module level: it needs no compile, and says for each module what is known of it.
GOVULNCHECK ?= v1.5.0
.PHONY: vulncheck
vulncheck: ## known vulnerabilities of what is linked in; VULNDB=file:///dir for a copy of the database
	@GOBIN='$(CURDIR)/bin' $(GO) install golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK)
	@said=$$(bin/govulncheck $(if $(VULNDB),-db '$(VULNDB)') -scan module 2>&1) && { printf '%s\n' "$$said"; exit 0; }; printf '%s\n' "$$said"; \
	case "$$said" in *'fetching vulnerabilities'*) echo 'NOT CHECKED: the vulnerability database cannot be reached from here. VULNDB names a copy of it.';; esac; exit 1

.PHONY: install
install: build ## binaries, units and configuration under DESTDIR
	install -d '$(DESTDIR)$(bindir)' '$(DESTDIR)$(unitdir)' '$(DESTDIR)/usr/lib/sysusers.d' '$(DESTDIR)/usr/lib/sysctl.d' '$(DESTDIR)$(datadir)/bash-completion/completions'
	install -d -m 0755 '$(DESTDIR)$(sysconfdir)/tenantd'
	install -m 0755 bin/tenantd bin/tenantctl bin/tenant-proxy '$(DESTDIR)$(bindir)'
	for unit in tenantd.service tenantd.socket tenantd-key.service; do \
		sed -e 's|@bindir@|$(bindir)|g' -e 's|@sysconfdir@|$(sysconfdir)|g' systemd/$$unit >'$(DESTDIR)$(unitdir)'/$$unit || exit 1; \
		chmod 0644 '$(DESTDIR)$(unitdir)'/$$unit || exit 1; \
	done
	install -m 0644 systemd/tenantd.sysusers '$(DESTDIR)/usr/lib/sysusers.d/tenantd.conf'
	install -m 0644 systemd/tenantd.sysctl '$(DESTDIR)/usr/lib/sysctl.d/50-tenantd.conf'
	bin/tenantctl completion bash >'$(DESTDIR)$(datadir)/bash-completion/completions/tenantctl'
	test -e '$(DESTDIR)$(sysconfdir)/tenantd/config.yaml' || install -m 0644 systemd/config.yaml '$(DESTDIR)$(sysconfdir)/tenantd/config.yaml'
	@echo 'Installed. Next: systemd-sysusers && sysctl --system && systemctl daemon-reload && systemctl enable --now tenantd'

.PHONY: units
units: build ## have systemd read the installed units (needs systemd-analyze)
	sh systemd/check.sh

.PHONY: clean
clean: ## remove what was built
	rm -rf bin

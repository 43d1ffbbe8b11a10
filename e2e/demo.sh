#!/bin/sh
# Copyright The tenantd Authors.
# SPDX-License-Identifier: Apache-2.0
#
# make demo: a host as this user on 127.0.0.1:8443, two tenants, a few calls to
# each through the one port, until Ctrl-C. DEMO_DIR, DEMO_LISTEN and DEMO_HEALTH
# move it elsewhere.
set -eu

dir=${DEMO_DIR:-$PWD/demo}
listen=${DEMO_LISTEN:-127.0.0.1:8443}
health=${DEMO_HEALTH:-127.0.0.1:8480}
bin=$PWD/bin
pid=

if [ -e "$dir" ]; then
	echo "demo: $dir exists already: another demo may be running; stop it, or remove the directory" >&2
	exit 1
fi

stop() {
	trap - INT TERM EXIT
	if [ -n "$pid" ]; then
		printf '\n== Stopping the host\n'
		kill -TERM "$pid" 2>/dev/null || true
		wait "$pid" || true
	fi
	rm -rf "$dir"
	echo "== Cleaned up: $dir is gone"
	exit "${1:-0}"
}
trap 'stop 0' INT TERM
trap 'stop 1' EXIT

run() {
	printf '\n$ %s\n' "$*"
	"$@"
}

# What is typed below works in any shell that has these two settings.
mkdir -m 700 "$dir"
PATH=$bin:$PATH
TENANTCTL_KUBECONFIG=$dir/data/admin.kubeconfig
export PATH TENANTCTL_KUBECONFIG

printf '== Starting a host on %s; its log is %s/tenantd.log\n' "$listen" "$dir"
# In a session of its own, so that Ctrl-C reaches this script and not the host.
setsid "$bin/tenantd" run --listen "$listen" --advertise-address "$listen" --health-listen "$health" \
	--data-dir "$dir/data" --domain demo.test >"$dir/tenantd.log" 2>&1 &
pid=$!
waited=0
until [ -s "$TENANTCTL_KUBECONFIG" ] && kubectl --kubeconfig "$TENANTCTL_KUBECONFIG" wait --for=condition=Established --timeout=1s crd/tenants.tenantd.io >/dev/null 2>&1; do
	if ! kill -0 "$pid" 2>/dev/null; then
		pid=
		echo "demo: the host did not start:" >&2
		tail -n 3 "$dir/tenantd.log" >&2
		stop 1
	fi
	waited=$((waited + 1))
	if [ "$waited" -gt 600 ]; then
		echo "demo: the host is not ready after minutes; see $dir/tenantd.log" >&2
		cp "$dir/tenantd.log" "$PWD/tenantd-demo.log"
		stop 1
	fi
	sleep 0.2
done

for tenant in alpha beta; do
	printf '\n== A cluster named %s\n' "$tenant"
	run tenantctl add "$tenant"
	run tenantctl kubeconfig "$tenant" --output "$dir/$tenant.kubeconfig"
	run kubectl --kubeconfig "$dir/$tenant.kubeconfig" version
	run kubectl --kubeconfig "$dir/$tenant.kubeconfig" create configmap whoami --from-literal=tenant="$tenant"
	run kubectl --kubeconfig "$dir/$tenant.kubeconfig" create deployment web --image=registry.k8s.io/pause:3.10 --replicas=2
	run kubectl --kubeconfig "$dir/$tenant.kubeconfig" wait --for=jsonpath='{.metadata.annotations.deployment\.kubernetes\.io/revision}'=1 --timeout=60s deployment/web
done

printf '\n== Two clusters, one port, nothing in common\n'
run kubectl --kubeconfig "$dir/alpha.kubeconfig" get configmap whoami -o jsonpath='{.data.tenant}{"\n"}'
run kubectl --kubeconfig "$dir/beta.kubeconfig" get configmap whoami -o jsonpath='{.data.tenant}{"\n"}'
run tenantctl list -o wide

cat <<TXT

== The host keeps running. In another terminal, in this directory, type:

  export PATH=$bin:\$PATH TENANTCTL_KUBECONFIG=$TENANTCTL_KUBECONFIG
  kubectl --kubeconfig $dir/alpha.kubeconfig get all -A
  kubectl --kubeconfig $dir/beta.kubeconfig explain deployment.spec
  kubectl --kubeconfig \$TENANTCTL_KUBECONFIG get tenants -o wide
  tenantctl add gamma
  tenantctl remove beta

  http://$health/metrics has the host's metrics.

== Ctrl-C stops the host and removes $dir.
TXT
# The shell handles signals when wait returns for them.
wait "$pid" || true
pid=
echo "demo: the host ended by itself; its last words:" >&2
tail -n 3 "$dir/tenantd.log" >&2
stop 1

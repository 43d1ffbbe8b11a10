#!/bin/sh
# Copyright The tenantd Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Installs tenant-proxy and its unit on this machine, without network.
#   ./install.sh [--prefix /usr/local] [--root DIR]
set -eu
fail() {
	echo "install.sh: $*" >&2
	exit 1
}
dir=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
[ "$(uname -s)" = Linux ] || fail "a worker runs Linux, this is $(uname -s)"
[ "$(uname -m)" = @machine@ ] || fail "this bundle is for @machine@, this machine is $(uname -m): make another with: tenantctl worker bundle"
[ "$(id -u)" = 0 ] || fail "run it as root: sudo $0"
for file in tenant-proxy config.yaml ca.crt tenant-proxy.service; do
	[ -f "$dir/$file" ] || fail "$file is missing: unpack the whole bundle"
done
exec "$dir/tenant-proxy" install --from "$dir" "$@"

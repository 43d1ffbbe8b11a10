#!/bin/sh
# Copyright The tenantd Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Has systemd read the units that `make install` puts in place. Any complaint fails:
# systemd itself only ignores a directive that it does not know.
set -eu
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
make -s install DESTDIR="$root" prefix=/usr >/dev/null
units=$root/usr/lib/systemd/system
grep -L '@[a-z]*@' "$units"/tenantd* | wc -l | grep -qx 3 || { echo "units: a placeholder is left" >&2; exit 1; }
# The workers' unit comes in a bundle.
sed 's|@bindir@|/usr/bin|' systemd/tenant-proxy.service >"$units/tenant-proxy.service"
# What ours refer to.
cp /usr/lib/systemd/system/*.target /usr/lib/systemd/system/*.slice /usr/lib/systemd/system/systemd-*.service "$units"
mkdir -p "$root/bin" && cp /bin/sh /bin/kill "$root/bin/"
said=$(systemd-analyze verify --man=no --root="$root" tenantd.service tenantd.socket tenantd-key.service tenant-proxy.service 2>&1) || true
if [ -n "$said" ]; then
	printf 'units: %s\n' "$said" >&2
	exit 1
fi
echo "units: systemd has nothing to say against them; exposure:"
for unit in tenantd.service tenant-proxy.service; do
	echo "$unit: $(systemd-analyze security --offline=true --root="$root" "$unit" | tail -n 1)"
done

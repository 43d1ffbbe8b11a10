#!/bin/sh
# Copyright The tenantd Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Builds the kubelet of another release into bin/skew-VERSION/kubelet, in a module of
# its own, since one module links one Kubernetes.
#   e2e/workers/kubelet.sh v1.36.3
set -eu
version=$1
go=${GO:-go}
cd "$(dirname "$0")/../.."
dir=$PWD/bin/skew-$version
mkdir -p "$dir"
[ -x "$dir/kubelet" ] && exit

# Kubernetes' own go.mod takes its parts from beside itself; who builds it from
# elsewhere takes the same parts by their version: v1.36.3 has v0.36.3.
cd "$dir"
source=$("$go" mod download -json "k8s.io/kubernetes@$version" | sed -n 's/^[[:space:]]*"GoMod": "\(.*\)",$/\1/p')
parts=v0${version#v1}
{
	echo 'module skew'
	sed -n '/^go /p; /^godebug /p' "$source"
	echo "require k8s.io/kubernetes $version"
	sed -n "s|=> ./staging/src/\(.*\)|=> \1 $parts|; /^replace /,/^)/p" "$source"
} >go.mod

minor=${version#v1.}
stamps='-s -w'
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	stamps="$stamps -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=${minor%%.*}"
done
"$go" build -mod=mod -ldflags "$stamps" -o kubelet.new k8s.io/kubernetes/cmd/kubelet
mv kubelet.new kubelet

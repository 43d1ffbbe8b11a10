// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package tenantd is the root of the module. It holds nothing but the test of
// which package may import which; docs/architecture.md says what each is for.
package tenantd

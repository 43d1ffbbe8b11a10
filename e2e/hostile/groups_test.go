// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

// groups are all cases.
func groups() [][]attack {
	return [][]attack{
		processes(),
		dials(),
		isolations(),
		limits(),
		strangers(),
		poisoned(),
		inputs(),
		keys(),
	}
}

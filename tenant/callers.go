// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"reflect"
	"unsafe"

	"k8s.io/apiserver/pkg/server/mux"
)

// forgetCallers empties the stack traces that m keeps of whoever registered a path, to
// name them if another does too: 2 kB each, 400 of them, and there are no others once a
// server has been put together. It does nothing if upstream has named the field anew.
// Nobody else may use m meanwhile.
func forgetCallers(m *mux.PathRecorderMux) {
	field := reflect.ValueOf(m).Elem().FieldByName("pathStacks")
	if !field.IsValid() || field.Type() != reflect.TypeFor[map[string]string]() {
		return
	}
	stacks := *(*map[string]string)(unsafe.Pointer(field.UnsafeAddr()))
	for path := range stacks {
		stacks[path] = "(forgotten)"
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"

	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/kubernetes/pkg/apis/core"
)

// namelessEvents keeps the host's name out of the events of the control plane's own
// components. Upstream's recorder signs with component and host name, in the
// scheduler and, out of reach, in the repair loops of the API server; so it is taken
// off where events arrive. Every process of a host has the same name, so the component
// alone tells as much.
type namelessEvents struct{ admission.Interface }

// Admit implements admission.MutationInterface.
func (e namelessEvents) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if event, ok := a.GetObject().(*core.Event); ok && a.GetOperation() == admission.Create && a.GetUserInfo().GetName() == user.APIServerUser {
		event.Source.Host = ""
		if event.ReportingInstance != "" {
			event.ReportingInstance = event.ReportingController
		}
	}
	if m, ok := e.Interface.(admission.MutationInterface); ok && m.Handles(a.GetOperation()) {
		return m.Admit(ctx, a, o)
	}
	return nil
}

// Validate implements admission.ValidationInterface.
func (e namelessEvents) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if v, ok := e.Interface.(admission.ValidationInterface); ok && v.Handles(a.GetOperation()) {
		return v.Validate(ctx, a, o)
	}
	return nil
}

// Handles implements admission.Interface.
func (namelessEvents) Handles(admission.Operation) bool { return true }

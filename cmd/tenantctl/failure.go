// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The exit codes, which scripts rely on.
const (
	exitDone     = 0
	exitFailed   = 1
	exitUsage    = 2
	exitNotFound = 3
	exitTimedOut = 4
)

// failure is an error that knows its exit code and says what to do.
type failure struct {
	code int
	err  error
}

func (f failure) Error() string { return f.err.Error() }
func (f failure) Unwrap() error { return f.err }

func failed(code int, format string, args ...any) error {
	return failure{code, fmt.Errorf(format, args...)}
}

// explain turns an error into an exit code and a text that says what to do.
func (c *cli) explain(err error) (code int, text string) {
	var known failure
	if errors.As(err, &known) {
		return known.code, err.Error()
	}

	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return c.explainStatus(err, status.Status())
	}

	var unreachable *url.Error
	switch {
	case errors.Is(err, context.Canceled):
		return exitFailed, "interrupted"
	case errors.Is(err, context.DeadlineExceeded):
		return exitTimedOut, fmt.Sprintf("the system plane at %s did not answer within %s; look at the host with: journalctl -u tenantd", c.server, requestTimeout)
	case errors.As(err, &unreachable):
		cause := unreachable.Err
		if _, ok := errors.AsType[x509.UnknownAuthorityError](cause); ok {
			return exitFailed, fmt.Sprintf("the server at %s is not the system plane that the kubeconfig is for (%v); copy admin.kubeconfig from the host's data directory again", c.server, cause)
		}
		return exitFailed, fmt.Sprintf("cannot reach the system plane at %s: %v; is tenantd running there? (systemctl status tenantd)", c.server, cause)
	}
	return exitFailed, err.Error()
}

func (c *cli) explainStatus(err error, status metav1.Status) (code int, text string) {
	var name string
	kind, all := "tenant", "tenantctl list"
	var causes []string
	if status.Details != nil {
		name = status.Details.Name
		if status.Details.Kind == "hosts" || status.Details.Kind == "Host" {
			kind, all = "host", "tenantctl hosts"
		}
		for _, cause := range status.Details.Causes {
			// A rule of the whole object has no field and begins with the one it is about.
			cause.Field = strings.TrimSuffix(cause.Field, "<nil>")
			causes = append(causes, strings.TrimPrefix(cause.Field+": ", ": ")+strings.TrimPrefix(cause.Message, "Invalid value: "))
		}
	}
	switch {
	case apierrors.IsNotFound(err) && (name == "" || isUnserved(err)):
		return exitFailed, fmt.Sprintf("the server at %s does not serve this; is it tenantd's system plane, and of the same version?", c.server)
	case apierrors.IsNotFound(err):
		return exitNotFound, fmt.Sprintf("%s %q does not exist; see the ones that do with: %s", kind, name, all)
	case apierrors.IsAlreadyExists(err):
		return exitFailed, fmt.Sprintf("tenant %q exists already; look at it with: tenantctl get %s", name, name)
	case apierrors.IsInvalid(err) && len(causes) > 0:
		return exitUsage, fmt.Sprintf("%s %q is not valid: %s", kind, name, strings.Join(causes, "; "))
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return exitUsage, err.Error()
	case apierrors.IsUnauthorized(err):
		return exitFailed, fmt.Sprintf("the system plane at %s does not know these credentials; copy admin.kubeconfig from the host's data directory again", c.server)
	case apierrors.IsForbidden(err):
		return exitFailed, fmt.Sprintf("%v; ask an administrator of the system plane for a role that allows it", err)
	case apierrors.IsTimeout(err), apierrors.IsServerTimeout(err):
		return exitTimedOut, fmt.Sprintf("%v; try again", err)
	}
	return exitFailed, err.Error()
}

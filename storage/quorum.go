// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// noQuorumError is etcd's word for it, and what it means.
type noQuorumError struct{ cause error }

func (e noQuorumError) Error() string {
	return fmt.Sprintf("%v: too few hosts are up to write anything: bring others back: %v", ErrNoQuorum, e.cause)
}

func (e noQuorumError) Unwrap() []error { return []error{ErrNoQuorum, e.cause} }

// GRPCStatus is what gRPC sends for e.
func (e noQuorumError) GRPCStatus() *status.Status { return status.New(codes.Unavailable, e.Error()) }

// IsNoQuorum recognises [ErrNoQuorum] in an error that came back through an etcd client, however often it was wrapped
// or turned into text on the way.
func IsNoQuorum(err error) bool {
	return err != nil && (errors.Is(err, ErrNoQuorum) || strings.Contains(err.Error(), ErrNoQuorum.Error()))
}

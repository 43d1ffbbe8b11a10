// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	tenantstorage "github.com/tenantd/tenantd/storage"
)

// Clients repeat by themselves what was refused, and nothing that may have been done.
func TestQuorumAnswers(t *testing.T) {
	undecided := fmt.Errorf("%w; %w", tenantstorage.ErrNoQuorum, tenantstorage.ErrUndecided)
	for _, c := range []struct {
		err   error
		code  int32
		retry bool
	}{
		{tenantstorage.ErrNoQuorum, http.StatusServiceUnavailable, true},
		{undecided, http.StatusGatewayTimeout, false},
	} {
		var status apierrors.APIStatus
		if err := translateQuorum(c.err); !errors.As(err, &status) {
			t.Errorf("%v becomes %v", c.err, err)
			continue
		}
		_, retry := apierrors.SuggestsClientDelay(status.(error))
		if got := status.Status(); got.Code != c.code || retry != c.retry || !tenantstorage.IsNoQuorum(status.(error)) {
			t.Errorf("%v becomes %+v, to be repeated: %t", c.err, got, retry)
		}
	}
	for _, err := range []error{nil, errors.New("another")} {
		if got := translateQuorum(err); got != err {
			t.Errorf("%v becomes %v", err, got)
		}
	}
}

// Watches do not ask for a leader; what else they are asked with stays.
func TestWatchesNeedNoLeader(t *testing.T) {
	ctx := metadata.AppendToOutgoingContext(t.Context(), "other", "x")
	got, _ := metadata.FromOutgoingContext(withoutLeader(clientv3.WithRequireLeader(ctx)))
	if want, _ := metadata.FromOutgoingContext(ctx); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("a watch is asked for with %v, want %v", got, want)
	}
	if got, _ := metadata.FromOutgoingContext(withoutLeader(t.Context())); len(got) != 0 {
		t.Errorf("a watch without metadata is asked for with %v", got)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
)

// Those that somebody waits for come first, each kind in its order, and who gives up
// takes nobody's turn.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := turns{free: 1}
		release, err := q.acquire(t.Context(), &turn{})
		if err != nil {
			t.Fatal(err)
		}
		var order []string
		all := map[string]*turn{}
		impatient, giveUp := context.WithCancel(t.Context())
		enter := func(ctx context.Context, name string) {
			place := &turn{}
			all[name] = place
			go func() {
				release, err := q.acquire(ctx, place)
				if err != nil {
					if !errors.Is(err, context.Canceled) {
						t.Errorf("%s: %v", name, err)
					}
					return
				}
				order = append(order, name)
				release()
				release() // the second time it does nothing
			}()
			synctest.Wait()
		}
		for _, name := range []string{"a", "b", "c", "d"} {
			enter(t.Context(), name)
		}
		enter(impatient, "gone")
		q.hurry(all["c"])
		q.hurry(all["gone"])
		q.hurry(all["b"])
		q.hurry(all["c"])
		giveUp()
		synctest.Wait()

		release()
		synctest.Wait()
		if want := []string{"c", "b", "a", "d"}; !slices.Equal(order, want) {
			t.Errorf("the order is %v, want %v", order, want)
		}
		if q.free != 1 || len(q.waiting) != 0 {
			t.Errorf("%d turns are free and %d wait, want 1 and 0", q.free, len(q.waiting))
		}

		// A turn that is hurried before it is asked for.
		release, _ = q.acquire(t.Context(), &turn{})
		order = nil
		early := &turn{}
		q.hurry(early)
		enter(t.Context(), "late")
		go func() {
			release, _ := q.acquire(t.Context(), early)
			order = append(order, "early")
			release()
		}()
		synctest.Wait()
		release()
		synctest.Wait()
		if want := []string{"early", "late"}; !slices.Equal(order, want) {
			t.Errorf("the order is %v, want %v", order, want)
		}

		// None is handed out while all are held, by whomever; then as many as are free.
		letGo, letGoToo := q.hold(), q.hold()
		order = nil
		for _, name := range []string{"a", "b", "c"} {
			enter(t.Context(), name)
		}
		q.hurry(all["c"])
		letGo()
		letGo()
		synctest.Wait()
		if len(order) > 0 {
			t.Errorf("%v have had their turn", order)
		}
		letGoToo()
		synctest.Wait()
		if want := []string{"c", "a", "b"}; !slices.Equal(order, want) {
			t.Errorf("the order is %v, want %v", order, want)
		}
		if q.free != 1 || len(q.waiting) != 0 {
			t.Errorf("%d turns are free and %d wait, want 1 and 0", q.free, len(q.waiting))
		}
	})
}

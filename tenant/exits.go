// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync"
)

// tenantLabel is what the goroutines of a control plane have, with its name: those
// that it starts get it from the one that starts them.
const tenantLabel = "tenant"

// endings tells control planes that upstream has called for the end of the process.
// What calls may be a goroutine that nothing waits for, such as that of an informer's
// handler: the component then looks alive and does nothing.
var endings struct {
	sync.Mutex
	running map[*ControlPlane]func(by string)
}

// onExit has f called, at most once, when upstream calls for the end of the process
// in a goroutine of this control plane. Calling the returned function ends that.
func (cp *ControlPlane) onExit(f func(by string)) (stop func()) {
	endings.Lock()
	defer endings.Unlock()
	if endings.running == nil {
		endings.running = map[*ControlPlane]func(string){}
	}
	endings.running[cp] = f
	return func() {
		endings.Lock()
		defer endings.Unlock()
		delete(endings.running, cp)
	}
}

// exit stands in for os.Exit in upstream: it ends the goroutine, which must not go
// on, and its control plane.
//
//go:noinline
func exit(int) {
	defer runtime.Goexit()
	by := "upstream"
	callers := make([]uintptr, 32)
	frames := runtime.CallersFrames(callers[:runtime.Callers(2, callers)])
	for {
		frame, more := frames.Next()
		if !strings.HasPrefix(frame.Function, "k8s.io/klog/") {
			by = frame.Function
			break
		}
		if !more {
			break
		}
	}
	names := exiting()
	endings.Lock()
	defer endings.Unlock()
	for cp, f := range endings.running {
		if names[cp.cfg.Name] {
			delete(endings.running, cp)
			f(by)
		}
	}
}

// exiting are the tenants of goroutines that are in exit at this moment. Go tells a
// goroutine's labels in profiles alone.
func exiting() map[string]bool {
	var profile bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		return nil // a buffer takes everything
	}
	names := map[string]bool{}
	for block := range strings.SplitSeq(profile.String(), "\n\n") {
		if !strings.Contains(block, "github.com/tenantd/tenantd/tenant.exit+") {
			continue
		}
		for line := range strings.Lines(block) {
			text, ok := strings.CutPrefix(line, "# labels: ")
			if !ok {
				continue
			}
			var labels map[string]string
			if json.Unmarshal([]byte(text), &labels) == nil {
				names[labels[tenantLabel]] = true
			}
		}
	}
	return names
}

// awaitExit is the part of a control plane that ends when upstream calls for the end
// of the process.
func (cp *ControlPlane) awaitExit(ctx context.Context, started func()) error {
	ended := make(chan string, 1)
	defer cp.onExit(func(by string) { ended <- by })()
	started()
	select {
	case by := <-ended:
		return fmt.Errorf("%s called for the end of the process; the log above says why", by)
	case <-ctx.Done():
		return nil
	}
}

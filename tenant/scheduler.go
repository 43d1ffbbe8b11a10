// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"fmt"

	"k8s.io/client-go/tools/events"
	"k8s.io/kubernetes/pkg/scheduler"
)

// runScheduler runs kube-scheduler with its default profile against s until ctx
// is done. started is called when it has seen all objects and schedules.
func (cp *ControlPlane) runScheduler(ctx context.Context, s *apiServer, started func()) error {
	broadcaster := events.NewEventBroadcasterAdapterWithContext(ctx, s.worker)
	// Without it the broadcaster's goroutines stay for ever.
	defer broadcaster.Shutdown()
	pods := scheduler.NewInformerFactory(s.client, 0, nil)
	factory := s.informers.view(0)
	factory.pods = pods
	sched, err := scheduler.New(ctx, s.worker, factory, nil, func(name string) events.EventRecorderLogger {
		return broadcaster.NewRecorder(name)
	}, scheduler.WithKubeConfig(s.work))
	if err != nil {
		return fmt.Errorf("create scheduler: %w", err)
	}
	broadcaster.StartRecordingToSink(ctx.Done())
	factory.Start(ctx.Done())
	pods.WaitForCacheSync(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	if err := sched.WaitForHandlersSync(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("wait for scheduler's informers: %w", err)
	}
	started()
	sched.Run(ctx)
	return nil
}

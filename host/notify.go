// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
)

// listen opens the one port, or takes it from systemd, which keeps it open while
// the daemon restarts.
func listen(address string, log *slog.Logger) (net.Listener, error) {
	inherited, err := activation.Listeners()
	if err != nil {
		return nil, fmt.Errorf("take sockets from systemd: %w", err)
	}
	var ln net.Listener
	for _, l := range inherited {
		switch {
		case l == nil:
		case ln == nil:
			ln = l
		default:
			l.Close()
		}
	}
	if ln != nil {
		log.Info("took the port from systemd", "address", ln.Addr().String())
		return ln, nil
	}
	ln, err = net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%w%s", err, portRemedy(err))
	}
	return ln, nil
}

// portRemedy says what to do when a port cannot be opened.
func portRemedy(err error) string {
	switch {
	case errors.Is(err, errAddrInUse):
		return "; stop the program that has it (ss -ltnp shows which), or choose another address"
	case errors.Is(err, errAccess):
		return "; a port below 1024 needs CAP_NET_BIND_SERVICE: use the systemd unit, or listen on a higher port"
	case errors.Is(err, errAddrNotAvail):
		return "; this machine has no such address: choose one that `ip address` shows"
	}
	return ""
}

// notifier tells systemd about the daemon's state. Without systemd it does nothing.
//
// It does what go-systemd does, but remembers the socket and takes it out of the
// environment: each API server of this process would say READY there for itself,
// and the first one would take the variable away from all that is said later
// (k8s.io/apiserver, pkg/server/genericapiserver.go).
type notifier struct {
	socket *net.UnixAddr // nil without systemd
	log    *slog.Logger
}

func newNotifier(log *slog.Logger) *notifier {
	const variable = "NOTIFY_SOCKET"
	n := &notifier{log: log}
	if name := os.Getenv(variable); name != "" {
		n.socket = &net.UnixAddr{Name: name, Net: "unixgram"}
		_ = os.Unsetenv(variable) // fails on names that are none
	}
	return n
}

func (n *notifier) say(state string) {
	if n.socket == nil {
		return
	}
	conn, err := net.DialUnix(n.socket.Net, nil, n.socket)
	if err == nil {
		_, err = conn.Write([]byte(state))
		conn.Close()
	}
	if err != nil {
		n.log.Warn("cannot notify systemd", "error", err)
	}
}

// watchdog keeps systemd from restarting the daemon for as long as healthy says
// so, until ctx is done.
func (n *notifier) watchdog(ctx context.Context, healthy func(context.Context) error) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		n.log.Warn("cannot read the watchdog's interval", "error", err)
	}
	if interval == 0 {
		return
	}
	tick := time.NewTicker(interval / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := healthy(ctx); err != nil {
			n.log.Error("unhealthy: the watchdog is not fed", "error", err)
			continue
		}
		n.say(daemon.SdNotifyWatchdog)
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// The ways by which a client reaches the server.
const (
	wayPlain   = "plain"   // nothing is between
	wayLocal   = "local"   // our router, in the server's process
	wayForward = "forward" // our router, and that of another host in the server's process
	wayHAProxy = "haproxy"
	wayNginx   = "nginx"
)

// way is one of them, with a server of its own, so that what it takes can be told
// from what the others take.
type way struct {
	name      string
	wire      wire
	processes []*process
	front     *process // what is between client and server, if it is a process of its own
}

// pids are the processes of the way and their children.
func (w *way) pids() ([]int, error) { return descendants(w.processes) }

func descendants(processes []*process) (pids []int, err error) {
	for _, p := range processes {
		pid := p.cmd.Process.Pid
		pids = append(pids, pid)
		file := fmt.Sprintf("/proc/%d/task/%d/children", pid, pid)
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("find the children of %s: %w", p.name, err)
		}
		for _, field := range strings.Fields(string(text)) {
			child, err := strconv.Atoi(field)
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", file, err)
			}
			pids = append(pids, child)
		}
	}
	return pids, nil
}

// ways starts them.
type ways struct {
	dir, self   string
	connections int // that may be open at a time
	profile     string
	client      *tls.Config
	all         []*way
	spinners    []*process // see awake
}

func newWays(dir string, connections int, profile string) (*ways, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	ca, err := newAuthority(dir, "ca")
	if err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	if err := ca.issueServing("server", backendName); err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	return &ways{
		dir: dir, self: self, connections: connections, profile: profile,
		client: &tls.Config{RootCAs: roots, ServerName: backendName, MinVersion: tls.VersionTLS12},
	}, nil
}

// start starts one and waits until it serves.
func (s *ways) start(ctx context.Context, name string) (err error) {
	ports, err := freePorts(2)
	if err != nil {
		return err
	}
	front, back := fmt.Sprintf("127.0.0.1:%d", ports[0]), fmt.Sprintf("127.0.0.1:%d", ports[1])
	w := &way{name: name, wire: wire{address: front, tls: s.client}}
	s.all = append(s.all, w)
	launch := func(role, path string, args ...string) (*process, error) {
		p, err := startProcess(s.dir, name+"-"+role, path, args...)
		if err == nil {
			w.processes = append(w.processes, p)
		}
		return p, err
	}
	own := func(role, listen string, args ...string) (*process, error) {
		args = append([]string{role, "--listen", listen, "--connections", strconv.Itoa(s.connections)}, args...)
		if s.profile != "" {
			args = append(args, "--profile", filepath.Join(s.profile, name+"-"+role+".prof"))
		}
		return launch(role, s.self, args...)
	}
	server := []string{"--cert", filepath.Join(s.dir, "server.crt"), "--key", filepath.Join(s.dir, "server.key")}
	switch name {
	case wayPlain:
		_, err = own("backend", front, server...)
	case wayLocal:
		_, err = own("backend", front, append(server, "--router")...)
	case wayForward:
		if _, err = own("backend", back, append(server, "--router", "--member")...); err == nil {
			w.front, err = own("forwarder", front, "--to", back)
		}
	case wayHAProxy, wayNginx:
		if _, err = own("backend", back, server...); err != nil {
			return err
		}
		var configure func(front, back string) string
		args := []string{"-db", "-f"}
		configure = s.haproxy
		if name == wayNginx {
			configure, args = s.nginx, []string{"-e", "stderr", "-p", s.dir, "-c"}
		}
		file := filepath.Join(s.dir, name+".conf")
		if err := os.WriteFile(file, []byte(configure(front, back)), 0o600); err != nil {
			return fmt.Errorf("configure %s: %w", name, err)
		}
		path, err := exec.LookPath(name)
		if err != nil {
			return fmt.Errorf("find %s: %w: apt-get install haproxy nginx-light libnginx-mod-stream, or leave it out with --beside", name, err)
		}
		w.front, err = launch("proxy", path, append(args, file)...)
		if err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	err = poll(ctx, wirePatience, w.processes, func(ctx context.Context) error {
		c, err := w.wire.dial(ctx, wantEcho)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("wait for %s: %w", name, err)
	}
	return nil
}

// processes are those of all ways.
func (s *ways) processes() []*process {
	all := slices.Clone(s.spinners)
	for _, w := range s.all {
		all = append(all, w.processes...)
	}
	return all
}

// stop ends all.
func (s *ways) stop() error {
	defer func() { s.all, s.spinners = nil, nil }()
	return errors.Join(s.awake(syscall.SIGCONT), stopAll(s.processes())) // what is stopped does not end
}

// startSpinners starts what keeps the machine's processors from sleeping, still:
// awake has it go on. A processor that sleeps takes tens of microseconds to wake up,
// other ones on every way to a different degree, which is more than the round trips
// that are compared. The kernel runs them only where nothing else is to run.
func (s *ways) startSpinners() error {
	for i := range runtime.NumCPU() {
		p, err := startProcess(s.dir, fmt.Sprintf("spinner-%d", i), "chrt", "--idle", "0", "sh", "-c", "kill -STOP $$; while :; do :; done")
		if err != nil {
			return err
		}
		s.spinners = append(s.spinners, p)
	}
	return nil
}

// awake sends the spinners SIGCONT or SIGSTOP.
func (s *ways) awake(signal syscall.Signal) error {
	for _, p := range s.spinners {
		if err := p.cmd.Process.Signal(signal); err != nil {
			return fmt.Errorf("%s: %w", p.name, errors.Join(err, p.ended()))
		}
	}
	return nil
}

// haproxy is what its manual says to pass TLS through by SNI, with its defaults.
func (s *ways) haproxy(front, back string) string {
	return fmt.Sprintf(`global
    maxconn %d
defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
frontend port
    bind %s
    tcp-request inspect-delay 5s
    tcp-request content accept if { req.ssl_hello_type 1 }
    use_backend acme if { req.ssl_sni -i %s }
backend acme
    server host %s
`, s.connections, front, backendName, back)
}

// nginx is the same for the module ngx_stream_ssl_preread.
func (s *ways) nginx(front, back string) string {
	user := ""
	if os.Getuid() == 0 {
		user = "user root;\n" // or it could not use the directory
	}
	return user + fmt.Sprintf(`load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off;
pid nginx.pid;
worker_processes auto;
error_log stderr error;
events { worker_connections %d; }
stream {
    map $ssl_preread_server_name $acme { %s %s; }
    server {
        listen %s;
        ssl_preread on;
        proxy_pass $acme;
        proxy_timeout 1h;
    }
}
`, 2*s.connections+100, backendName, back, front)
}

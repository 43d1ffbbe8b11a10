// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package hosts

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// diskSize is what a data directory with a few tenants needs, some times over.
	diskSize = 2 << 30
	// stall and breath are how long a slow disk does nothing, and then works again.
	stall, breath = 400 * time.Millisecond, 100 * time.Millisecond
	// slowFor is how long it is slow.
	slowFor = 20 * time.Second
)

// disk is a file system that a host has to itself: ext4 in a file. It goes with the lab.
type disk struct {
	host    *host
	ballast string
}

// giveDisk moves the data of a host, which does not run, to a disk of its own.
func (h *host) giveDisk(t testing.TB) *disk {
	t.Helper()
	image, before := h.dir+".img", h.dir+".before"
	file, err := os.Create(image)
	if err == nil {
		err = errors.Join(file.Truncate(diskSize), file.Close(), os.Rename(h.dir, before), os.Mkdir(h.dir, 0o700))
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"mkfs.ext4", "-q", "-m", "0", image},
		{"mount", "-o", "loop", image, h.dir},
		{"rmdir", filepath.Join(h.dir, "lost+found")},
		{"cp", "-a", before + "/.", h.dir},
	} {
		execute(t, exec.Command(args[0], args[1:]...)).must(t, strings.Join(args, " "))
	}
	if err := os.RemoveAll(before); err != nil {
		t.Fatal(err)
	}
	return &disk{host: h, ballast: filepath.Join(h.dir, "ballast")}
}

// fill leaves no byte on the disk.
func (d *disk) fill(t testing.TB) {
	t.Helper()
	file, err := os.OpenFile(d.ballast, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for size := 1 << 20; size > 0; {
		if _, err = file.Write(make([]byte, size)); err != nil {
			size /= 2
		}
	}
	if err := errors.Join(err, file.Sync()); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill the disk of %s: %v", d.host.name, err)
	}
	fmt.Fprintf(d.host.log, "--- the disk of %s is full\n", d.host.name)
}

// clear frees what fill took.
func (d *disk) clear(t testing.TB) {
	t.Helper()
	if err := os.Remove(d.ballast); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(d.host.log, "--- the disk of %s has space again\n", d.host.name)
}

// slow has the disk stand still again and again, until the returned function is called.
func (d *disk) slow(t testing.TB) (end func()) {
	t.Helper()
	stop := make(chan struct{})
	var stalls sync.WaitGroup
	stalls.Go(func() {
		for {
			// What is frozen is thawed by the same process, come what may.
			freeze := execute(t, exec.Command("sh", "-c", fmt.Sprintf("fsfreeze --freeze %[1]s && sleep %[2]f; fsfreeze --unfreeze %[1]s", d.host.dir, stall.Seconds())))
			select {
			case <-stop:
				return
			case <-time.After(breath):
			}
			if freeze.code != 0 {
				t.Errorf("the disk of %s is not slow: %s", d.host.name, freeze.stderr)
				return
			}
		}
	})
	return sync.OnceFunc(func() { close(stop); stalls.Wait() })
}

// testSlowDisk has the disk of the leader of etcd, with a tenant, stand still for most of
// the time.
func testSlowDisk(t *testing.T, in *installation) {
	victim := in.hosts[2]
	victim.stop(t)
	d := victim.giveDisk(t)
	victim.start(t)
	victim.awaitReady(t)
	in.put(t, victim, in.tenants[0], victim)
	in.awaitWell(t)
	in.moveLeader(t, victim)
	h := in.begin(t)
	defer h.end(t)
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...)
	end := d.slow(t)
	defer end()
	time.Sleep(slowFor)
	end()
	for _, h := range in.hosts {
		if !h.running() {
			t.Errorf("%s ended: %v\n%s", h.name, h.cmd.ProcessState, h.log.Tail(20))
		}
	}
	for _, op := range h.soFar() {
		if op.kind == write {
			in.figures.add("slow disk: writes", op.end-op.begin)
		}
	}
	at := h.now()
	for _, took := range h.awaitAnswers(t, at, in.tenants, in.hosts...) {
		in.figures.add("slow disk: all answer through all hosts when it is well again", took)
	}
	in.recover(t, h)
}

// testFullDisk fills the disk of a host with a tenant.
func testFullDisk(t *testing.T, in *installation) {
	victim, x := in.hosts[1], in.tenants[0]
	others := in.but(t, victim)
	victim.stop(t)
	d := victim.giveDisk(t)
	victim.start(t)
	victim.awaitReady(t)
	in.put(t, others[0], x, victim)
	in.awaitWell(t)
	h := in.begin(t)
	defer h.end(t)
	h.awaitAnswers(t, h.now(), in.tenants, in.hosts...)
	theirs := in.tenantsOn(t, victim)

	d.fill(t)
	mark, at := victim.log.mark(), h.now()
	// etcd has made room for its log in advance, but not for what it stores.
	large := newRegisterClient(t, in.tenants[1], others[0])
	value := strings.Repeat("x", 256<<10)
	eventually(t, victim.name+" ends for want of space", func() error {
		body := object("large", value+fmt.Sprint(h.now()))
		if _, err := large.do(t.Context(), http.MethodPut, "large", body); err != nil {
			_, err = large.do(t.Context(), http.MethodPost, "", body)
			return errors.Join(errors.New("it runs"), err)
		}
		if victim.running() {
			return errors.New("it runs")
		}
		return nil
	})
	if code := victim.wait(t); code == 0 {
		t.Errorf("%s, whose disk is full, ended with exit code 0", victim.name)
	}
	if said := victim.log.String()[mark:]; !strings.Contains(said, syscall.ENOSPC.Error()) || !strings.Contains(said, "free space") {
		t.Errorf("%s does not say what to do:\n%s", victim.name, victim.log.Tail(10))
	}
	t.Logf("on a full disk it says: %s", victim.log.Tail(1))
	in.failover(t, h, "fill the disk of a host", at, theirs, others)

	// Started again, as systemd would, it leaves the disk alone and says why.
	mark = victim.log.mark()
	victim.start(t)
	if code := victim.wait(t); code == 0 {
		t.Errorf("%s, started on a full disk, ended with exit code 0", victim.name)
	}
	if said := victim.log.String()[mark:]; !strings.Contains(said, syscall.ENOSPC.Error()) {
		t.Errorf("%s does not say what to do:\n%s", victim.name, victim.log.Tail(10))
	}
	t.Logf("started on a full disk it says: %s", bytes.TrimSpace([]byte(victim.log.Tail(1))))
	d.clear(t)
	victim.start(t)
	victim.awaitReady(t)
	in.recover(t, h)
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// patience is what a case that must fail is given for each thing it waits for.
const patience = 45 * time.Second

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	ldflags := flag.String("ldflags", "", "`flags` for the linker, as bin/tenantd was built with")
	run := flag.String("run", "", "only mutants of cases that match this `expression`")
	flag.Parse()
	if err := prove(ctx, *ldflags, *run); err != nil {
		fmt.Fprintln(os.Stderr, "proof:", err)
		os.Exit(1)
	}
}

// prove runs all mutants whose case matches.
func prove(ctx context.Context, ldflags, run string) error {
	wanted, err := regexp.Compile(run)
	if err != nil {
		return fmt.Errorf("read -run: %w", err)
	}
	dir, err := os.MkdirTemp("", "hostile-proof")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	suite := filepath.Join(dir, "hostile.test")
	if out, err := command(ctx, "go", "test", "-c", "-o", suite, "./e2e/hostile"); err != nil {
		return fmt.Errorf("build the suite: %w\n%s", err, out)
	}
	sound := map[string]bool{} // cases that were run as they are, and whether they passed
	survived, killed, broken := 0, 0, 0
	for i, m := range mutants {
		if !wanted.MatchString(m.name) {
			continue
		}
		passes, tried := sound[m.name]
		if !tried {
			out, err := attack(ctx, suite, m.name, "")
			if passes = err == nil; !passes {
				fmt.Printf("BROKEN    %-24s fails with all defences in place:\n%s\n", m.name, out)
			}
			sound[m.name] = passes
		}
		if !passes {
			broken++
			continue
		}
		binary := filepath.Join(dir, fmt.Sprintf("tenantd-%d", i))
		if err := m.build(ctx, dir, binary, ldflags); err != nil {
			return fmt.Errorf("build without %s: %w", m.defence, err)
		}
		out, err := attack(ctx, suite, m.name, binary)
		os.Remove(binary)
		switch failed := (*exec.ExitError)(nil); {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			survived++
			fmt.Printf("SURVIVED  %-24s without %s\n", m.name, m.defence)
		case errors.As(err, &failed) && strings.Contains(string(out), "--- FAIL"):
			killed++
			fmt.Printf("killed    %-24s without %s: %s\n", m.name, m.defence, reason(string(out)))
		default:
			return fmt.Errorf("run %s without %s: %w\n%s", m.name, m.defence, err, out)
		}
	}
	fmt.Printf("%d of %d defences are seen to be missed by a case.\n", killed, killed+survived)
	if survived > 0 || broken > 0 {
		return fmt.Errorf("%d cases pass without their defence, %d do not pass with all of them", survived, broken)
	}
	return nil
}

// attack runs a case against bin/tenantd or another binary.
func attack(ctx context.Context, suite, name, binary string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, suite, "-test.run", "^(TestHostile|TestRestart)$", "-case", name)
	cmd.Dir = filepath.Join("e2e", "hostile")
	cmd.Env = os.Environ()
	if binary != "" {
		cmd.Args = append(cmd.Args, "-patience", patience.String())
		cmd.Env = append(cmd.Env, "TENANTD_BINARY="+binary)
	}
	return cmd.CombinedOutput()
}

// build builds tenantd with the defence taken out.
func (m mutant) build(ctx context.Context, dir, binary, ldflags string) error {
	replace := map[string]string{}
	for i, e := range m.edits {
		path, err := filepath.Abs(e.file)
		if err != nil {
			return err
		}
		from := path
		if replace[path] != "" {
			from = replace[path]
		}
		source, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		changed, err := e.apply(string(source))
		if err != nil {
			return err
		}
		to := filepath.Join(dir, fmt.Sprintf("%d.go", i))
		if err := os.WriteFile(to, []byte(changed), 0o600); err != nil {
			return err
		}
		replace[path] = to
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return err
	}
	if out, err := command(ctx, "go", "build", "-overlay", file, "-ldflags", ldflags, "-o", binary, "./cmd/tenantd"); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// apply makes the change, which must fit in exactly one place.
func (e edit) apply(source string) (string, error) {
	if n := strings.Count(source, e.old); n != 1 {
		return "", fmt.Errorf("%s has %d times, not once: %s", e.file, n, e.old)
	}
	return strings.Replace(source, e.old, e.new, 1), nil
}

func command(ctx context.Context, name string, args ...string) ([]byte, error) {
	return exec.CommandContext(ctx, name, args...).CombinedOutput()
}

// failure is the line of a test that says what is wrong.
var failure = regexp.MustCompile(`(?m)^\s+\w+\.go:\d+: (.*)$`)

// reason is the first thing that a failed case says.
func reason(out string) string {
	found := failure.FindStringSubmatch(out)
	if found == nil {
		return "no reason given"
	}
	return found[1][:min(len(found[1]), 200)]
}

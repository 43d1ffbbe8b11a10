// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// clockTick is the unit of CPU times in /proc: USER_HZ, which is 100 wherever Go runs.
const clockTick = time.Second / 100

// memory is what processes occupy, in bytes.
type memory struct {
	rss int64 // resident, with a shared page counted in each process
	pss int64 // resident, with a shared page divided among the processes that share it
}

// memoryOf sums the memory of processes.
func memoryOf(pids ...int) (memory, error) {
	var sum memory
	for _, pid := range pids {
		rss, err := procField(fmt.Sprintf("/proc/%d/status", pid), "VmRSS")
		if err != nil {
			return sum, err
		}
		pss, err := procField(fmt.Sprintf("/proc/%d/smaps_rollup", pid), "Pss")
		if err != nil {
			return sum, err
		}
		sum.rss += rss
		sum.pss += pss
	}
	return sum, nil
}

// procField reads a line such as "VmRSS:  1234 kB", in bytes.
func procField(file, field string) (int64, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("read memory: %w", err)
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		value, ok := strings.CutPrefix(lines.Text(), field+":")
		if !ok {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read %s in %s: %w", field, file, err)
		}
		return kib << 10, nil
	}
	return 0, fmt.Errorf("read memory: %s has no %s", file, field)
}

// cpuTime sums the user and system time of processes.
func cpuTime(pids ...int) (time.Duration, error) {
	var sum time.Duration
	for _, pid := range pids {
		file := fmt.Sprintf("/proc/%d/stat", pid)
		text, err := os.ReadFile(file)
		if err != nil {
			return 0, fmt.Errorf("read CPU time: %w", err)
		}
		// The second field is a name in parentheses and may hold anything; utime and
		// stime are the 14th and 15th.
		fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		used, err := ticks(fields, 11, 12)
		if err != nil {
			return 0, fmt.Errorf("read CPU time in %s: %w", file, err)
		}
		sum += used
	}
	return sum, nil
}

// machineCPUTime is the time that all cores were busy, for this machine or, if it
// is a virtual one, for another.
func machineCPUTime() (time.Duration, error) {
	const file = "/proc/stat"
	// cpu user nice system idle iowait irq softirq steal …
	sum, err := ticks(strings.Fields(firstLine(file)), 1, 2, 3, 6, 7, 8)
	if err != nil {
		return 0, fmt.Errorf("read CPU time in %s: %w", file, err)
	}
	return sum, nil
}

// watchMachine returns a function that says how many cores have been busy since, on
// the mean, with other things than this process and those named and their children.
func watchMachine(processes []*process) (busy func() (float64, error), err error) {
	pids, err := descendants(processes)
	if err != nil {
		return nil, err
	}
	pids = append(pids, os.Getpid())
	others := func() (time.Duration, error) {
		all, err := machineCPUTime()
		if err != nil {
			return 0, err
		}
		own, err := cpuTime(pids...)
		return all - own, err
	}
	before, err := others()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	return func() (float64, error) {
		after, err := others()
		return max(0, (after-before).Seconds()/time.Since(began).Seconds()), err
	}, nil
}

// ticks sums some of the fields.
func ticks(fields []string, which ...int) (time.Duration, error) {
	var sum time.Duration
	for _, i := range which {
		if i >= len(fields) {
			return 0, fmt.Errorf("there are %d fields only", len(fields))
		}
		n, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * clockTick
	}
	return sum, nil
}

// machine describes what the figures were taken on.
func machine(goVersion string) string {
	total, _ := procField("/proc/meminfo", "MemTotal")
	facts := fmt.Sprintf("%d cores (%s), %.0f GB memory, Linux %s, %s, %s", runtime.NumCPU(), processor(), float64(total)/1e9,
		firstLine("/proc/sys/kernel/osrelease"), runtime.GOARCH, goVersion)
	for _, name := range []string{"GOGC", "GOMEMLIMIT", "GOMAXPROCS"} {
		if value := os.Getenv(name); value != "" {
			facts += ", " + name + "=" + value
		}
	}
	return facts
}

func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown processor"
}

// loadAverage is the machine's over 1, 5 and 15 minutes.
func loadAverage() string {
	fields := strings.Fields(firstLine("/proc/loadavg"))
	return strings.Join(fields[:min(3, len(fields))], " ")
}

func firstLine(file string) string {
	text, _ := os.ReadFile(file)
	line, _, _ := strings.Cut(string(text), "\n")
	return line
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// memFile is a file that exists only in memory. Some of upstream's components
// take keys and certificates by path alone; this gives them a path without
// anything unsealed reaching a disk. The zero value is not usable.
type memFile struct{ f *os.File }

// newMemFile makes a file with the given content. name shows up in
// /proc/<pid>/fd for people who debug; it need not be unique.
func newMemFile(name string, content []byte) (*memFile, error) {
	fd, err := unix.MemfdCreate("tenantd-"+name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create memory file %q: %w", name, err)
	}
	m := &memFile{f: os.NewFile(uintptr(fd), name)}
	if _, err := m.f.Write(content); err != nil {
		m.Close()
		return nil, fmt.Errorf("write memory file %q: %w", name, err)
	}
	return m, nil
}

// Path is a path under which this process, and no other user, can open the
// file until Close.
func (m *memFile) Path() string { return fmt.Sprintf("/proc/self/fd/%d", m.f.Fd()) }

// Set replaces the content. A reader that is in the middle of the file may see
// a mixture; upstream checks that certificate and key belong together and
// reads again.
func (m *memFile) Set(content []byte) error {
	if err := m.f.Truncate(0); err != nil {
		return err
	}
	_, err := m.f.WriteAt(content, 0)
	return err
}

// Close releases the memory.
func (m *memFile) Close() { m.f.Close() }

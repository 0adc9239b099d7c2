// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// TempDir makes a directory in parent, which the caller must remove. It first removes
// directories of this name that killed processes have left.
func TempDir(parent, name string) (string, error) {
	pattern := "xspin-" + name + "-%d-"
	entries, _ := os.ReadDir(parent) // MkdirTemp reports the error
	for _, e := range entries {
		var pid int
		if _, err := fmt.Sscanf(e.Name(), pattern, &pid); err != nil {
			continue
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); errors.Is(err, os.ErrNotExist) {
			_ = os.RemoveAll(filepath.Join(parent, e.Name())) // another process may be doing the same
		}
	}
	return os.MkdirTemp(parent, fmt.Sprintf(pattern, os.Getpid()))
}

// Kernel returns the kernel's name and release, and the kind of machine.
func Kernel() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Machine[:])
}

// CPU returns the processor's model.
func CPU() string {
	info, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(info)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown" // not all architectures have the line
}

// MaxCPU is the highest CPU number that fits in a unix.CPUSet.
const MaxCPU = 1023

// CPUs returns the CPUs that this process may use, none if the kernel does not say.
func CPUs() (cpus []int) {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return nil
	}
	for cpu := range MaxCPU + 1 {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return cpus
}

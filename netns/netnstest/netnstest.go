// SPDX-License-Identifier: Apache-2.0

// Package netnstest builds labs for tests.
package netnstest

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/xspin/xspin/netns"
)

var (
	probe = sync.OnceValue(netns.Probe)
	swept sync.Once
	count atomic.Int64
)

// NeedRoot skips the test unless it may create network namespaces. With
// XSPIN_NO_SKIP=1 in the environment it fails instead.
func NeedRoot(t testing.TB) {
	t.Helper()
	decide(t, probe())
}

func decide(t testing.TB, err error) {
	t.Helper()
	switch {
	case err == nil:
	case os.Getenv("XSPIN_NO_SKIP") == "1":
		t.Fatalf("needs root: %v", err)
	default:
		t.Skipf("needs root: %v", err)
	}
}

// Temp builds a lab for one test and removes it when the test ends. The namespaces
// get unique names; devices and addresses are those of cfg. Like NeedRoot, it skips
// the test without root.
func Temp(t testing.TB, cfg netns.LabConfig) *netns.Lab {
	t.Helper()
	NeedRoot(t)
	swept.Do(func() { sweep(t) })
	cfg = Unique(cfg)
	cfg.Warn = func(msg string) { t.Log(msg) }
	l, err := netns.Up(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// Prefix begins the names of all namespaces of tests.
const Prefix = "xspin-test"

const pattern = Prefix + "%d-%d-"

// Unique returns cfg with namespace names that no other test uses.
func Unique(cfg netns.LabConfig) netns.LabConfig {
	name := fmt.Sprintf(pattern, os.Getpid(), count.Add(1))
	cfg.NIC.Namespace, cfg.Host.Namespace = name+"nic", name+"host"
	return cfg
}

// sweep removes the labs of test processes that were killed.
func sweep(t testing.TB) {
	entries, err := os.ReadDir("/run/netns")
	if err != nil {
		return // no lab was ever made
	}
	for _, e := range entries {
		var pid, n int
		var side string
		if _, err := fmt.Sscanf(e.Name(), pattern+"%s", &pid, &n, &side); err != nil {
			continue
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
			continue
		}
		base := strings.TrimSuffix(e.Name(), side)
		err := netns.Down(netns.LabConfig{NIC: netns.End{Namespace: base + "nic"}, Host: netns.End{Namespace: base + "host"}})
		t.Logf("lab %s* of a killed test removed, error: %v", base, err)
	}
}

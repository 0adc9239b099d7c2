// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
)

// demoFlags are the flags of all demos, as typed.
type demoFlags struct {
	peer             string // what is at the other end
	peerCPU, hpus    int
	wait             string
	nicCPUs          []string
	json, serve, pin bool
}

// waits are what --wait takes.
var waits = []string{hpu.Adaptive.String(), hpu.Sleep.String(), hpu.Spin.String()}

// tiers are those that handlers run in: what --tier takes.
var tiers = []string{"user", "kernel"}

// hooks are those that handlers of tier kernel are called at: what --hook takes.
var hooks = []string{"xdp", "tc"}

// kernelHooks judges --hook. What is served is at one hook.
func kernelHooks(chosen []string, serve, changed bool) ([]string, error) {
	if serve && !changed {
		chosen = hooks[1:]
	}
	if !distinct(chosen, hooks) {
		return nil, flags.Error("hook", strings.Join(chosen, ","), "want xdp, tc or both as xdp,tc")
	}
	if serve && len(chosen) > 1 {
		return nil, flags.Error("hook", strings.Join(chosen, ","), "with --serve xdp or tc, not both")
	}
	return chosen, nil
}

// distinct tells whether there is at least one word, all of them known, and none twice.
func distinct(words, known []string) bool {
	for i, w := range words {
		if !slices.Contains(known, w) || slices.Contains(words[:i], w) {
			return false
		}
	}
	return len(words) > 0
}

func (f *demoFlags) bind(fl *pflag.FlagSet, peer string) {
	f.peer = peer
	fl.IntVar(&f.peerCPU, peer+"-cpu", -1, "the CPU for the "+peer+", -1 for any")
	fl.IntVar(&f.hpus, "hpus", 16, fmt.Sprintf("handler processing units, 1 to %d", nic.MaxHPUs))
	fl.StringVar(&f.wait, "wait", "adaptive", "how HPUs wait for packets: adaptive (spin, then sleep), sleep or spin")
	flags.OneOf(fl, "wait", waits)
	fl.StringSliceVar(&f.nicCPUs, "nic-cpu", nil, "CPUs for the threads that serve the HPUs (default any)")
	fl.BoolVar(&f.pin, "pin", false, peer+" on the first CPU that this process may use, the other side on the second")
	fl.BoolVar(&f.json, "json", false, "print one JSON document")
	fl.BoolVar(&f.serve, "serve", false, "do not measure: serve any client until interrupted")
}

// cpus checks the flags and returns the CPU of the peer, -1 for any, and those of the
// NIC.
func (f *demoFlags) cpus() (peer int, server []int, err error) {
	if server, err = numbers("nic-cpu", f.nicCPUs, 0, testbed.MaxCPU, "a CPU number"); err != nil {
		return 0, nil, err
	}
	peerFlag := f.peer + "-cpu"
	switch {
	case f.peerCPU < -1 || f.peerCPU > testbed.MaxCPU:
		return 0, nil, flags.Error(peerFlag, f.peerCPU, fmt.Sprintf("want a CPU number from 0 to %d, or -1 for any", testbed.MaxCPU))
	case f.hpus < 1 || f.hpus > nic.MaxHPUs:
		return 0, nil, flags.Error("hpus", f.hpus, fmt.Sprintf("want 1 to %d", nic.MaxHPUs))
	case !slices.Contains(waits, f.wait):
		return 0, nil, flags.Error("wait", f.wait, "want adaptive, sleep or spin")
	case f.pin && (f.peerCPU != -1 || len(server) > 0):
		return 0, nil, flags.Error("pin", f.pin, "not with --"+peerFlag+" or --nic-cpu: it chooses both")
	case f.json && f.serve:
		return 0, nil, flags.Error("json", f.json, "not with --serve, which measures nothing: `xspin stats --json` shows the state")
	case f.pin:
		peer, server = pinTo(testbed.CPUs())
		return peer, server, nil
	}
	// Only the kernel knows which CPUs may be used.
	if f.peerCPU >= 0 && !cpuAllowed(f.peerCPU) {
		return 0, nil, cpuError(peerFlag, f.peerCPU)
	}
	for _, cpu := range server {
		if !cpuAllowed(cpu) {
			return 0, nil, cpuError("nic-cpu", cpu)
		}
	}
	return f.peerCPU, server, nil
}

func cpuError(flag string, cpu int) error {
	return flags.Error(flag, cpu, fmt.Sprintf("not one of the %d CPUs that this process may use", runtime.NumCPU()))
}

// numbers reads a list of different numbers.
func numbers(flag string, list []string, lo, hi int, what string) ([]int, error) {
	var out []int
	for _, s := range list {
		n, err := strconv.Atoi(strings.TrimSpace(s))
		if err != nil || n < lo || n > hi {
			return nil, flags.Error(flag, s, fmt.Sprintf("want %s, %d to %d", what, lo, hi))
		}
		if slices.Contains(out, n) {
			return nil, flags.Error(flag, strings.Join(list, ","), fmt.Sprintf("%d appears twice", n))
		}
		out = append(out, n)
	}
	return out, nil
}

func cpuAllowed(cpu int) bool {
	var s unix.CPUSet
	// If the kernel does not say, pinning will fail.
	return unix.SchedGetaffinity(0, &s) != nil || s.IsSet(cpu)
}

// pinTo gives client and server a CPU each. With only one CPU it pins neither, because
// a client that spins would keep the server from answering.
func pinTo(cpus []int) (client int, server []int) {
	if len(cpus) < 2 {
		return -1, nil
	}
	return cpus[0], cpus[1:2]
}

// A reporter is the report of a demo.
type reporter interface {
	WriteText(io.Writer) error
	WriteJSON(io.Writer) error
}

func writeReport(w io.Writer, r reporter, asJSON bool) error {
	if asJSON {
		return r.WriteJSON(w)
	}
	return r.WriteText(w)
}

// SPDX-License-Identifier: Apache-2.0

// Package testbed has what demos and benchmarks share: processes at either end of a
// lab, including iperf3, pinning to CPUs, temporary directories, and a description of
// the machine.
package testbed

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
)

// Pin locks the goroutine to its thread and the thread to a CPU, -1 for any.
// The function it returns undoes both.
func Pin(cpu int) (unpin func(), err error) {
	runtime.LockOSThread()
	if cpu < 0 {
		return runtime.UnlockOSThread, nil
	}
	var before, one unix.CPUSet
	err = unix.SchedGetaffinity(0, &before)
	if err == nil {
		one.Set(cpu)
		err = unix.SchedSetaffinity(0, &one)
	}
	if err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("pin thread to CPU %d of %d: %w: no such CPU, or not one this process may use", cpu, runtime.NumCPU(), err)
	}
	return func() {
		// A thread that stays pinned must not serve other goroutines. Left
		// locked, it ends with this one.
		if unix.SchedSetaffinity(0, &before) == nil {
			runtime.UnlockOSThread()
		}
	}, nil
}

// OnCPU runs fn on a CPU, -1 for any.
func OnCPU(cpu int, fn func() error) error {
	unpin, err := Pin(cpu)
	if err != nil {
		return err
	}
	defer unpin()
	return fn()
}

// Start starts a command in a namespace, on a CPU or, with -1, on any. It has a process
// group of its own, so signals from the terminal do not reach it; it ends with the
// context of cmd.
func Start(ns *netns.Namespace, cpu int, cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// A child gets the namespace and the CPUs of the thread that forks it.
	return ns.Do(func() error { return OnCPU(cpu, cmd.Start) })
}

// Flow is what iperf3 measured.
type Flow struct {
	Gbps, Seconds float64 // at the receiver
	Retransmitted uint64  // segments
	Lost          float64 // fraction of the datagrams of UDP
}

// IPerf runs iperf3 from the host's end of a lab to the NIC's. client and server are
// CPUs, -1 for any. args are more arguments of the client, such as how much to send, or
// -R to reverse the direction.
func IPerf(ctx context.Context, lab *netns.Lab, client, server int, args ...string) (Flow, error) {
	return iperf(ctx, lab, client, server, nil, args)
}

// IPerfStored is IPerf with a server that writes what it receives to a file.
func IPerfStored(ctx context.Context, lab *netns.Lab, client, server int, path string, args ...string) (Flow, error) {
	return iperf(ctx, lab, client, server, []string{"-F", path}, args)
}

func iperf(ctx context.Context, lab *netns.Lab, client, server int, serve, args []string) (f Flow, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	addr := lab.NIC.Addr.Addr().String()
	// It ends after one client or with ctx; if this process is killed, when it is idle.
	s := exec.CommandContext(ctx, "iperf3", append([]string{"-s", "-1", "-B", addr, "--forceflush", "--idle-timeout", "30"}, serve...)...)
	log, err := s.StdoutPipe()
	if err != nil {
		return f, err
	}
	if err := Start(lab.NIC.NS, server, s); err != nil {
		return f, err
	}
	defer func() {
		cancel()
		_ = s.Wait() // killed or done; errors are reported by the client
	}()
	listening := false
	for line := bufio.NewScanner(log); !listening && line.Scan(); {
		listening = strings.Contains(line.Text(), "listening")
	}
	if !listening {
		return f, fmt.Errorf("iperf3 does not listen on %s: %w", addr, errors.Join(s.Wait(), ctx.Err()))
	}

	c := exec.CommandContext(ctx, "iperf3", append([]string{"-c", addr, "-J"}, args...)...)
	var out strings.Builder
	c.Stdout = &out
	if err := Start(lab.Host.NS, client, c); err != nil {
		return f, err
	}
	err = c.Wait()
	if ctx.Err() != nil {
		return f, ctx.Err()
	}
	var report struct {
		Error string
		End   struct {
			Sent struct {
				Retransmits uint64
			} `json:"sum_sent"`
			Received struct {
				Seconds float64
				Bits    float64 `json:"bits_per_second"`
				Lost    float64 `json:"lost_packets"`
				Packets float64
			} `json:"sum_received"`
		}
	}
	if e := json.Unmarshal([]byte(out.String()), &report); e != nil {
		return f, fmt.Errorf("iperf3: %w", errors.Join(err, e))
	}
	if report.Error != "" {
		return f, fmt.Errorf("iperf3: %s", report.Error)
	}
	if err != nil {
		return f, fmt.Errorf("iperf3: %w", err)
	}
	end := report.End
	return Flow{end.Received.Bits / 1e9, end.Received.Seconds, end.Sent.Retransmits, end.Received.Lost / max(end.Received.Packets, 1)}, nil
}

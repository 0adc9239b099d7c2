// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
)

// startIn starts a command in a namespace, on a CPU unless that is -1. A signal
// from the terminal is not for it: it ends with its context.
func startIn(ns *netns.Namespace, cpu int, cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return ns.Do(func() error {
		if cpu < 0 {
			return cmd.Start()
		}
		// A child is born with the CPUs of the thread that forks it.
		var before, one unix.CPUSet
		if err := unix.SchedGetaffinity(0, &before); err != nil {
			return fmt.Errorf("CPUs of a thread: %w", err)
		}
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return fmt.Errorf("pin %s to CPU %d: %w", cmd.Path, cpu, err)
		}
		err := cmd.Start()
		return errors.Join(err, unix.SchedSetaffinity(0, &before))
	})
}

// iperf sends as many bytes by TCP as SLMP does, in as many streams, and returns how
// fast they arrived, and what was sent again: by iperf3, from the host's end of the
// lab to the NIC's.
func iperf(ctx context.Context, lab *netns.Lab, c Config) (gbps, seconds float64, again uint64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	addr := lab.NIC.Addr.Addr().String()
	server := exec.CommandContext(ctx, "iperf3", "-s", "-1", "-B", addr, "--forceflush", "--idle-timeout", "30")
	log, err := server.StdoutPipe()
	if err != nil {
		return 0, 0, 0, err
	}
	cpu := -1
	if len(c.Server.CPUs) > 0 {
		cpu = c.Server.CPUs[0]
	}
	if err := startIn(lab.NIC.NS, cpu, server); err != nil {
		return 0, 0, 0, err
	}
	defer func() {
		cancel()
		_ = server.Wait() // killed, or done: the client tells what there is to tell
	}()
	listening := false
	for s := bufio.NewScanner(log); !listening && s.Scan(); {
		listening = strings.Contains(s.Text(), "listening")
	}
	if !listening {
		return 0, 0, 0, fmt.Errorf("iperf3 does not listen on %s: %w", addr, errors.Join(server.Wait(), ctx.Err()))
	}

	client := exec.CommandContext(ctx, "iperf3", "-c", addr, "-J", "-n", strconv.FormatInt(c.Size*int64(c.Parallel), 10), "-P", strconv.Itoa(c.Parallel))
	var out strings.Builder
	client.Stdout = &out
	if err := startIn(lab.Host.NS, c.SenderCPU, client); err != nil {
		return 0, 0, 0, err
	}
	err = client.Wait()
	if ctx.Err() != nil {
		return 0, 0, 0, ctx.Err()
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
			} `json:"sum_received"`
		}
	}
	if e := json.Unmarshal([]byte(out.String()), &report); e != nil {
		return 0, 0, 0, fmt.Errorf("iperf3: %w", errors.Join(err, e))
	}
	if report.Error != "" {
		return 0, 0, 0, fmt.Errorf("iperf3: %s", report.Error)
	}
	if err != nil {
		return 0, 0, 0, fmt.Errorf("iperf3: %w", err)
	}
	return report.End.Received.Bits / 1e9, report.End.Received.Seconds, report.End.Sent.Retransmits, nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/demos/pingpong"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/nic"
)

// maxPing is the largest payload that fits the lab's MTU of 1500.
const maxPing = 1472

// newPingpongCmd returns `xspin demo pingpong`.
func newPingpongCmd() *cobra.Command {
	var f pingpongFlags
	cmd := &cobra.Command{
		Use:   "pingpong",
		Short: "Pings answered by handlers on the NIC, next to the same pings answered by Linux",
		Long: `Measure round trips of ICMP echo and UDP echo in the lab, which is brought up
for it unless it is there. In mode nic, handlers on XsPIN's HPUs answer. In mode
host, Linux does: its own ICMP responder, and for UDP a blocking socket in a
process of its own, without any XDP program on either end. One client, in a
process of its own too, measures both.

With --serve nothing is measured: the handlers answer until interrupted, and
your own programs can ping them.`,
		Example: `  sudo xspin demo pingpong
  sudo xspin demo pingpong --proto udp --size 16,1416 --count 100000 --json
  sudo xspin demo pingpong --pin --client-wait spin --wait spin
  sudo xspin demo pingpong --serve`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// Nothing is set up before all flags are right.
			cfg, err := f.config(cmd.Flags().Changed("mode"))
			if err != nil {
				return fmt.Errorf("demo pingpong: %w", err)
			}
			if f.pin && cfg.ClientCPU < 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning: --pin: this process may use one CPU only, so client and server share it, unpinned, and the client blocks")
			}
			return runPingpong(cmd, f, cfg)
		},
	}
	f.bind(cmd.Flags())
	return cmd
}

// newHelperCmds returns the hidden commands for processes that the demos and
// benches start.
func newHelperCmds() []*cobra.Command {
	var cmds []*cobra.Command
	for _, name := range []string{rtt.EchoCommand, rtt.PingCommand} {
		cmds = append(cmds, &cobra.Command{
			Use:                name,
			Hidden:             true,
			DisableFlagParsing: true,
			SilenceUsage:       true,
			RunE: func(_ *cobra.Command, args []string) error {
				_, err := rtt.Main(append([]string{name}, args...))
				return err
			},
		})
	}
	return cmds
}

// pingpongFlags are the flags as typed.
type pingpongFlags struct {
	proto, clientWait, wait string
	modes, sizes, nicCPUs   []string
	count, warmup           int
	clientCPU, hpus         int
	interval, timeout       time.Duration
	json, serve, pin        bool
}

func (f *pingpongFlags) bind(fl *pflag.FlagSet) {
	fl.StringVar(&f.proto, "proto", "both", "icmp, udp or both")
	fl.StringSliceVar(&f.modes, "mode", []string{"host", "nic"}, "who answers: host, nic or both, in this order")
	fl.StringSliceVar(&f.sizes, "size", []string{"16", "516", "1016", "1416"}, fmt.Sprintf("payload bytes, %d to %d", rtt.MinSize, maxPing))
	fl.IntVar(&f.count, "count", 10000, "pings measured per protocol, mode and size")
	fl.IntVar(&f.warmup, "warmup", 1000, "pings before those")
	fl.DurationVar(&f.interval, "interval", 0, "least time from ping to ping, such as 5ms; 0 for back to back")
	fl.DurationVar(&f.timeout, "timeout", time.Second, "how long to wait for a reply before it is lost")
	fl.StringVar(&f.clientWait, "client-wait", "block", "how the client waits for a reply: block or spin")
	fl.IntVar(&f.clientCPU, "client-cpu", -1, "the CPU for the client, -1 for any")
	fl.IntVar(&f.hpus, "hpus", 16, fmt.Sprintf("handler processing units, 1 to %d", nic.MaxHPUs))
	fl.StringVar(&f.wait, "wait", "adaptive", "how HPUs wait for packets: adaptive (spin, then sleep), sleep or spin")
	fl.StringSliceVar(&f.nicCPUs, "nic-cpu", nil, "CPUs for the threads that serve the HPUs; mode host's UDP echo runs on the first (default any)")
	fl.BoolVar(&f.pin, "pin", false, "client on the first CPU that this process may use, server (HPUs, or mode host's UDP echo) on the second")
	fl.BoolVar(&f.json, "json", false, "print one JSON document")
	fl.BoolVar(&f.serve, "serve", false, "do not measure: answer until interrupted")
}

// config judges the flags. modeSet tells whether the user chose the modes:
// --serve has one of its own.
func (f pingpongFlags) config(modeSet bool) (c pingpong.Config, err error) {
	switch f.proto {
	case "icmp", "udp":
		c.Protos = []rtt.Proto{rtt.Proto(f.proto)}
	case "both":
		c.Protos = []rtt.Proto{rtt.ICMP, rtt.UDP}
	default:
		return c, flagError("proto", f.proto, "want icmp, udp or both")
	}

	modes := f.modes
	if f.serve && !modeSet {
		modes = []string{"nic"}
	}
	for _, m := range modes {
		switch {
		case m != "host" && m != "nic":
			return c, flagError("mode", m, "want host, nic, or both as host,nic")
		case m == "host" && f.serve:
			return c, flagError("mode", m, "with --serve only nic: Linux answers without help")
		case slices.Contains(c.Modes, pingpong.Mode(m)):
			return c, flagError("mode", strings.Join(modes, ","), "want each mode once")
		}
		c.Modes = append(c.Modes, pingpong.Mode(m))
	}
	if c.Sizes, err = numbers("size", f.sizes, rtt.MinSize, maxPing, "bytes of payload"); err != nil {
		return c, err
	}
	if c.Server.CPUs, err = numbers("nic-cpu", f.nicCPUs, 0, maxCPU, "a CPU number"); err != nil {
		return c, err
	}
	switch {
	case len(c.Modes) == 0:
		return c, flagError("mode", "", "want host, nic, or both as host,nic")
	case len(c.Sizes) == 0:
		return c, flagError("size", "", fmt.Sprintf("want numbers from %d to %d", rtt.MinSize, maxPing))
	case f.count < 1 || f.count > rtt.MaxCount:
		return c, flagError("count", f.count, fmt.Sprintf("want 1 to %d", rtt.MaxCount))
	case f.warmup < 0 || f.warmup > rtt.MaxCount:
		return c, flagError("warmup", f.warmup, fmt.Sprintf("want 0 to %d", rtt.MaxCount))
	case f.interval < 0:
		return c, flagError("interval", f.interval, "want 0 or more")
	case f.timeout <= 0:
		return c, flagError("timeout", f.timeout, "want more than 0")
	case f.clientWait != "block" && f.clientWait != "spin":
		return c, flagError("client-wait", f.clientWait, "want block or spin")
	case f.clientCPU < -1 || f.clientCPU > maxCPU:
		return c, flagError("client-cpu", f.clientCPU, fmt.Sprintf("want a CPU number from 0 to %d, or -1 for any", maxCPU))
	case f.hpus < 1 || f.hpus > nic.MaxHPUs:
		return c, flagError("hpus", f.hpus, fmt.Sprintf("want 1 to %d", nic.MaxHPUs))
	case f.wait != "adaptive" && f.wait != "sleep" && f.wait != "spin":
		return c, flagError("wait", f.wait, "want adaptive, sleep or spin")
	case f.pin && (f.clientCPU != -1 || len(c.Server.CPUs) > 0):
		return c, flagError("pin", f.pin, "not with --client-cpu or --nic-cpu: it chooses both")
	case f.json && f.serve:
		return c, flagError("json", f.json, "not with --serve, which measures nothing: `xspin stats --json` tells what is going on")
	}
	// Which of the CPUs may be used only the kernel knows.
	for _, p := range []struct {
		flag string
		cpus []int
	}{{"client-cpu", []int{f.clientCPU}}, {"nic-cpu", c.Server.CPUs}} {
		for _, cpu := range p.cpus {
			if cpu >= 0 && !cpuAllowed(cpu) {
				return c, flagError(p.flag, cpu, fmt.Sprintf("not one of the %d CPUs that this process may use", runtime.NumCPU()))
			}
		}
	}
	if f.pin {
		if f.clientCPU, c.Server.CPUs = pinTo(usableCPUs()); f.clientCPU < 0 {
			f.clientWait = "block"
		}
	}
	c.Count, c.Warmup, c.Interval, c.Timeout = f.count, f.warmup, f.interval, f.timeout
	c.ClientWait, c.ClientCPU = rtt.Wait(f.clientWait), f.clientCPU
	c.Server.Protos, c.Server.HPUs, c.Server.Wait = c.Protos, f.hpus, f.wait
	return c, nil
}

func flagError(flag string, value any, want string) error {
	return fmt.Errorf("--%s %v: %s", flag, value, want)
}

// numbers reads a list of different numbers.
func numbers(flag string, list []string, lo, hi int, what string) ([]int, error) {
	var out []int
	for _, s := range list {
		n, err := strconv.Atoi(strings.TrimSpace(s))
		if err != nil || n < lo || n > hi {
			return nil, flagError(flag, s, fmt.Sprintf("want %s, %d to %d", what, lo, hi))
		}
		if slices.Contains(out, n) {
			return nil, flagError(flag, strings.Join(list, ","), fmt.Sprintf("%d is there twice", n))
		}
		out = append(out, n)
	}
	return out, nil
}

// maxCPU is the last CPU that unix.CPUSet has room for.
const maxCPU = 1023

func cpuAllowed(cpu int) bool {
	var s unix.CPUSet
	// If the kernel does not tell, pinning will.
	return unix.SchedGetaffinity(0, &s) != nil || s.IsSet(cpu)
}

// usableCPUs are the CPUs that this process may use, none if the kernel does
// not tell.
func usableCPUs() (cpus []int) {
	var s unix.CPUSet
	if unix.SchedGetaffinity(0, &s) != nil {
		return nil
	}
	for cpu := range maxCPU + 1 {
		if s.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return cpus
}

// pinTo gives client and server a CPU each, or none where there is one only: a
// client that spins there keeps the server from answering.
func pinTo(cpus []int) (client int, server []int) {
	if len(cpus) < 2 {
		return -1, nil
	}
	return cpus[0], cpus[1:2]
}

func runPingpong(cmd *cobra.Command, f pingpongFlags, cfg pingpong.Config) (err error) {
	ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()

	lab, down, err := borrowLab(netns.LabConfig{Warn: warnTo(cmd.ErrOrStderr())})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, down()) }()

	if f.serve {
		return pingpong.Serve(ctx, lab, cfg.Server, func() { fmt.Fprint(cmd.OutOrStdout(), serving(lab, cfg.Protos)) })
	}
	report, err := pingpong.Run(ctx, lab, cfg, func(msg string) { fmt.Fprintln(cmd.ErrOrStderr(), msg) })
	if report != nil && len(report.Results) > 0 {
		write := report.WriteText
		if f.json {
			write = report.WriteJSON
		}
		err = errors.Join(err, write(cmd.OutOrStdout()))
	}
	return err
}

// borrowLab uses the lab that is up, or brings one up for the time until down is
// called. One whose relay has died is not replaced: its frames were to be impaired,
// and a new one's would not be.
func borrowLab(cfg netns.LabConfig) (lab *netns.Lab, down func() error, err error) {
	lab, err = netns.Open(cfg)
	if err == nil {
		return lab, lab.Close, nil
	}
	if !errors.Is(err, netns.ErrNotUp) || errors.Is(err, impair.ErrNoRelay) {
		return nil, nil, err
	}
	if lab, err = netns.Up(cfg); err != nil {
		return nil, nil, err
	}
	return lab, lab.Down, nil
}

// serving says what to type in another terminal.
func serving(lab *netns.Lab, protos []rtt.Proto) string {
	var b strings.Builder
	addr := lab.NIC.Addr.Addr()
	fmt.Fprintf(&b, "XsPIN answers on %s (%s in namespace %s) until interrupted. In another terminal:\n", addr, lab.NIC.Device, lab.NIC.Namespace)
	for _, p := range protos {
		if p == rtt.ICMP {
			fmt.Fprintf(&b, "  sudo xspin lab exec host -- ping -c 3 %s\n", addr)
		} else {
			fmt.Fprintf(&b, "  sudo xspin lab exec host -- bash -c 'exec 3<>/dev/udp/%s/%d; echo hello >&3; head -n 1 <&3'\n", addr, pingpong.Port)
		}
	}
	return b.String()
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/demos/pingpong"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/netns"
)

// maxPing is the largest payload that fits the lab's MTU of 1500.
const maxPing = 1472

// newPingpongCmd returns `xspin demo pingpong`.
func newPingpongCmd() *cobra.Command {
	var f pingpongFlags
	cmd := &cobra.Command{
		Use:   "pingpong",
		Short: "Pings answered by handlers on the NIC, alone or with an application, and by Linux",
		Long: `Measure round trips of ICMP echo and UDP echo in the lab, which is brought up
if necessary. In mode nic, handlers on XsPIN's HPUs answer, and then, as tier
kernel, handlers in eBPF, from XDP (nic/xdp) and at the entry of Linux's stack
(nic/tc). In mode host, Linux does: its own ICMP responder, and for UDP a blocking socket in a
process of its own, without any XDP program on either end. In mode host+nic,
handlers swap the addresses, and an unprivileged application, attached to the NIC
in a process of its own, computes the checksums. The same client, also in a
process of its own, measures all modes.

With --serve nothing is measured: the handlers answer until interrupted, and
your own programs can ping them.`,
		Example: `  sudo xspin demo pingpong
  sudo xspin demo pingpong --proto udp --size 16,1416 --count 100000 --json
  sudo xspin demo pingpong --pin --client-wait spin --wait spin
  sudo xspin demo pingpong --mode host,nic --tier kernel
  sudo xspin demo pingpong --serve --mode host+nic`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// Check all flags before setting anything up.
			cfg, err := f.config(cmd.Flags().Changed)
			if err != nil {
				return fmt.Errorf("demo pingpong: %w", err)
			}
			if f.pin && cfg.ClientCPU < 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning: --pin: this process may use only one CPU, so client and server share it, unpinned, and the client blocks")
			}
			return runPingpong(cmd, f, cfg)
		},
	}
	f.bind(cmd.Flags())
	return cmd
}

// newHelperCmds returns the hidden commands for processes that the demos and
// the evaluation start.
func newHelperCmds() []*cobra.Command {
	var cmds []*cobra.Command
	add := func(name string, main func([]string) (bool, error)) {
		cmds = append(cmds, &cobra.Command{
			Use:                name,
			Hidden:             true,
			DisableFlagParsing: true,
			SilenceUsage:       true,
			RunE: func(_ *cobra.Command, args []string) error {
				_, err := main(append([]string{name}, args...))
				return err
			},
		})
	}
	add(rtt.EchoCommand, rtt.Main)
	add(rtt.PingCommand, rtt.Main)
	add(pingpong.AppCommand, pingpong.Main)
	add(file.AppCommand, file.Main)
	return cmds
}

// pingpongFlags are the flags as typed.
type pingpongFlags struct {
	demoFlags
	proto, clientWait string
	modes, sizes      []string
	tiers             []string // of mode nic
	hooks             []string // of tier kernel
	count, warmup     int
	interval, timeout time.Duration
	appSpin           time.Duration
}

const bothProtos rtt.Proto = "both"

// What --proto and --client-wait take.
var (
	pingProtos  = []rtt.Proto{rtt.ICMP, rtt.UDP, bothProtos}
	clientWaits = []rtt.Wait{rtt.Block, rtt.Spin}
	pingModes   = []pingpong.Mode{pingpong.Host, pingpong.NIC, pingpong.HostNIC}
)

func (f *pingpongFlags) bind(fl *pflag.FlagSet) {
	fl.StringVar(&f.proto, "proto", "both", "icmp, udp or both")
	flags.OneOf(fl, "proto", pingProtos)
	fl.StringSliceVar(&f.modes, "mode", []string{"host", "nic", "host+nic"}, "who answers: host, nic, host+nic or several, in this order")
	flags.ListOf(fl, "mode", pingModes)
	fl.StringSliceVar(&f.tiers, "tier", tiers, "where the handlers of mode nic run: user (on HPUs), kernel (eBPF) or both")
	flags.ListOf(fl, "tier", tiers)
	fl.StringSliceVar(&f.hooks, "hook", hooks, "where handlers of tier kernel are called: xdp, tc or both (with --serve: tc)")
	flags.ListOf(fl, "hook", hooks)
	fl.StringSliceVar(&f.sizes, "size", []string{"16", "516", "1016", "1416"}, fmt.Sprintf("payload bytes, %d to %d", rtt.MinSize, maxPing))
	fl.IntVar(&f.count, "count", 10000, "pings measured per protocol, mode and size")
	fl.IntVar(&f.warmup, "warmup", 1000, "pings before those")
	fl.DurationVar(&f.interval, "interval", 0, "minimum time from ping to ping, such as 5ms; 0 for back to back")
	fl.DurationVar(&f.timeout, "timeout", time.Second, "how long to wait for a reply before it is lost")
	fl.StringVar(&f.clientWait, "client-wait", "block", "how the client waits for a reply: block or spin")
	flags.OneOf(fl, "client-wait", clientWaits)
	fl.DurationVar(&f.appSpin, "app-spin", 100*time.Microsecond, "how long the application of mode host+nic spins before it sleeps")
	f.demoFlags.bind(fl, "client")
	fl.Lookup("nic-cpu").Usage += "; mode host's UDP echo runs on the first, and so does host+nic's application"
	fl.Lookup("pin").Usage += " (HPUs, application, mode host's UDP echo)"
}

// config checks the flags. changed says whether the user set one: --mode and --tier have
// other defaults with --serve.
func (f pingpongFlags) config(changed func(string) bool) (c pingpong.Config, err error) {
	switch p := rtt.Proto(f.proto); {
	case !slices.Contains(pingProtos, p):
		return c, flags.Error("proto", f.proto, "want icmp, udp or both")
	case p == bothProtos:
		c.Protos = []rtt.Proto{rtt.ICMP, rtt.UDP}
	default:
		c.Protos = []rtt.Proto{p}
	}

	modes, in := f.modes, f.tiers
	if f.serve && !changed("mode") {
		modes = []string{"nic"}
	}
	if f.serve && !changed("tier") {
		in = tiers[:1]
	}
	if !distinct(in, tiers) {
		return c, flags.Error("tier", strings.Join(in, ","), "want user, kernel or both")
	}
	at, err := kernelHooks(f.hooks, f.serve, changed("hook"))
	if err != nil {
		return c, err
	}
	for i, m := range modes {
		switch {
		case !slices.Contains(pingModes, pingpong.Mode(m)):
			return c, flags.Error("mode", m, wantModes)
		case m == "host" && f.serve:
			return c, flags.Error("mode", m, "with --serve nic or host+nic: Linux answers without help")
		case slices.Contains(modes[:i], m):
			return c, flags.Error("mode", strings.Join(modes, ","), "want each mode once")
		}
		if m != string(pingpong.NIC) {
			c.Modes = append(c.Modes, pingpong.Mode(m))
			continue
		}
		for _, t := range in {
			if t == "user" {
				c.Modes = append(c.Modes, pingpong.NIC)
				continue
			}
			for _, h := range at {
				c.Modes = append(c.Modes, map[string]pingpong.Mode{"xdp": pingpong.XDP, "tc": pingpong.TC}[h])
			}
		}
	}
	if c.Sizes, err = numbers("size", f.sizes, rtt.MinSize, maxPing, "bytes of payload"); err != nil {
		return c, err
	}
	if c.ClientCPU, c.Server.CPUs, err = f.cpus(); err != nil {
		return c, err
	}
	switch {
	case len(c.Modes) == 0:
		return c, flags.Error("mode", "", wantModes)
	case f.serve && len(modes) > 1:
		return c, flags.Error("mode", strings.Join(modes, ","), "with --serve nic or host+nic, not both")
	case f.serve && len(c.Modes) > 1:
		return c, flags.Error("tier", strings.Join(in, ","), "with --serve user or kernel, not both")
	case len(c.Sizes) == 0:
		return c, flags.Error("size", "", fmt.Sprintf("want numbers from %d to %d", rtt.MinSize, maxPing))
	case f.count < 1 || f.count > rtt.MaxCount:
		return c, flags.Error("count", f.count, fmt.Sprintf("want 1 to %d", rtt.MaxCount))
	case f.warmup < 0 || f.warmup > rtt.MaxCount:
		return c, flags.Error("warmup", f.warmup, fmt.Sprintf("want 0 to %d", rtt.MaxCount))
	case f.interval < 0:
		return c, flags.Error("interval", f.interval, "want 0 or more")
	case f.timeout <= 0:
		return c, flags.Error("timeout", f.timeout, "want more than 0")
	case f.appSpin < 0:
		return c, flags.Error("app-spin", f.appSpin, "want 0 or more")
	case !slices.Contains(clientWaits, rtt.Wait(f.clientWait)):
		return c, flags.Error("client-wait", f.clientWait, "want block or spin")
	}
	if f.pin && c.ClientCPU < 0 {
		f.clientWait = "block"
	}
	c.Count, c.Warmup, c.Interval, c.Timeout = f.count, f.warmup, f.interval, f.timeout
	c.ClientWait = rtt.Wait(f.clientWait)
	c.Server.Protos, c.Server.HPUs, c.Server.Wait, c.Server.AppSpin = c.Protos, f.hpus, f.wait, f.appSpin
	if f.serve {
		c.Server.Mode = c.Modes[0]
	}
	return c, nil
}

const wantModes = "want host, nic, host+nic, or several as host,nic"

func runPingpong(cmd *cobra.Command, f pingpongFlags, cfg pingpong.Config) (err error) {
	ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()

	lab, down, err := netns.Borrow(netns.LabConfig{Warn: warnTo(cmd.ErrOrStderr())})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, down()) }()

	if f.serve {
		return pingpong.Serve(ctx, lab, cfg.Server, func() { fmt.Fprint(cmd.OutOrStdout(), serving(lab, cfg.Protos)) })
	}
	report, err := pingpong.Run(ctx, lab, cfg, func(msg string) { fmt.Fprintln(cmd.ErrOrStderr(), msg) })
	if report != nil && len(report.Results) > 0 {
		err = errors.Join(err, writeReport(cmd.OutOrStdout(), report, f.json))
	}
	return err
}

// serving says what to type in another terminal.
func serving(lab *netns.Lab, protos []rtt.Proto) string {
	var b strings.Builder
	addr := lab.NIC.Addr.Addr()
	fmt.Fprintf(&b, "XsPIN answers on %s (%s in namespace %s) until interrupted. In another terminal:\n", addr, lab.NIC.Device, lab.NIC.Namespace)
	for _, p := range protos {
		if p == rtt.ICMP {
			fmt.Fprintf(&b, "  %s ping -c 3 %s\n", hint("lab exec host --"), addr)
		} else {
			fmt.Fprintf(&b, "  %s bash -c 'exec 3<>/dev/udp/%s/%d; echo hello >&3; head -n 1 <&3'\n", hint("lab exec host --"), addr, pingpong.Port)
		}
	}
	return b.String()
}

// SPDX-License-Identifier: Apache-2.0

// Package eval is the evaluation: XsPIN next to its peers, under `xspin bench`. The command
// line of the xspin binary has it, and that of a program with handlers of its own has not.
package eval

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/hostqbench"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/packet"
)

// benchConfig says how long to measure.
type benchConfig struct {
	runs     int           // of each side
	duration time.Duration // of a run
	idle     time.Duration // that an idle NIC is watched
	warn     func(string)  // told about rows that are not there
}

// A benchCommand is a subcommand of `xspin bench`.
type benchCommand struct {
	name, short, long string
	duration, quick   time.Duration // of a run, by default and in a quick run of all
	least, step       time.Duration // what it may be
	measure           measureFunc
	// flags, if there, adds flags of its own. What it returns judges them and
	// returns what to measure, instead of measure.
	flags func(*pflag.FlagSet) func() (measureFunc, error)
}

// A measureFunc adds the rows of a benchmark.
type measureFunc func(context.Context, *benchLab, benchConfig, *bench.Document) error

var benches = []benchCommand{
	{
		"rx", "How fast packets reach a handler, next to bare AF_XDP loops in Go and in C",
		`Frames from an in-kernel generator on one CPU go to one HPU on another, with a
handler that does nothing, then to a bare receive-and-recycle loop on the same
package of sockets, then to the same loop in C (built when a compiler is there).
Also what an idle NIC costs.`,
		300 * time.Millisecond, 100 * time.Millisecond, 10 * time.Millisecond, time.Millisecond, benchRx, nil,
	},
	{
		"match", "What matching costs, with tables of 4 to 256 rulesets",
		`Frames from an in-kernel generator are matched and dropped, next to dropped at
once. Frames that no ruleset wants are timed by running the program over one
frame many times, next to a program that passes everything.`,
		200 * time.Millisecond, 50 * time.Millisecond, 10 * time.Millisecond, time.Millisecond, benchMatch, nil,
	},
	{
		"rtt", "Round trips of UDP and ICMP echo, next to a socket and to Linux",
		`A client in a process of its own pings a handler, then Linux: a UDP echo server
in a process of its own, or the kernel's ICMP responder, without any XDP program
on either end. Pinning and ways of waiting stand with each row.`,
		200 * time.Millisecond, 50 * time.Millisecond, 50 * time.Millisecond, time.Millisecond, benchRTT, nil,
	},
	{
		"kernel", "Handlers in eBPF, next to the plainest XDP programs, to a socket and to Linux",
		`Frames from an in-kernel generator go to handlers in eBPF that drop them, next to a
program that drops at once. A client in a process of its own pings handlers that
answer from XDP, then a program that does nothing else, a blocking socket, and
Linux's ICMP responder. Then segments of messages go to handlers in eBPF, next to a
program that drops them, and a file into a window, next to an HPU that puts it there.`,
		200 * time.Millisecond, 50 * time.Millisecond, 50 * time.Millisecond, time.Millisecond, nil, kernelFlags,
	},
	{
		"bystander", "What TCP through the interface loses when a NIC is on it",
		`iperf3 runs into the interface with the NIC attached and a context active that
matches none of it, with a bare XDP program that passes everything, and without
any. Takes whole seconds a run.`,
		time.Second, time.Second, time.Second, time.Second, benchBystander, nil,
	},
	{
		"slmp", "Reliable messages: goodput next to TCP, segments and messages a second, windows",
		`Files sent by xspin send to handlers on the NIC next to iperf3, also through bad
network; segments from an in-kernel generator next to a bare receive loop; small
messages next to UDP echo; scheduling policies, fairness, memory; and which window
is best. All of it takes half an hour: --only names parts.`,
		2 * time.Second, 100 * time.Millisecond, 20 * time.Millisecond, time.Millisecond, nil, slmpFlags,
	},
	{
		"hostq", "Handlers and applications: windows, events and requests in shared memory",
		`Requests and responses between two processes, next to one atomic word and to
eventfds; notifications, next to a bare ring; copies into a window, next to plain
memory; and UDP echo by handlers that ask an application, next to a socket.`,
		200 * time.Millisecond, 50 * time.Millisecond, 10 * time.Millisecond, time.Millisecond, nil, hostqFlags,
	},
	{
		"ddt", "MPI datatypes: placement next to MPICH and to loops by hand, CPU time, overlap",
		`Messages placed in memory next to MPI_Unpack, to hand-written loops and to the
strategies of SC 2019; two HPUs next to one; what receiving costs the machine, next
to contiguous messages and to MPICH over TCP; computation while messages arrive, on
both; and what it takes to commit a type. Takes ten minutes: --only names parts.`,
		time.Second, 50 * time.Millisecond, 20 * time.Millisecond, time.Millisecond, nil, ddtFlags,
	},
}

// Commands returns `xspin bench`, and the hidden commands of processes that it starts of the
// binary it belongs to.
func Commands() []*cobra.Command { return append(hidden(), newBenchCmd()) }

func newBenchCmd() *cobra.Command {
	root := &cobra.Command{Use: "bench", Short: "The evaluation: XsPIN next to its peers, in one run"}
	for _, b := range benches {
		var asJSON, targets bool
		cfg := benchConfig{idle: 5 * time.Second}
		var judge func() (measureFunc, error)
		cmd := &cobra.Command{
			Use:   b.name,
			Short: b.short,
			Long: b.long + `

It runs in a lab of its own, which is removed afterwards. The contestants take
turns, and a row compares their medians, with the 95 % interval of a bootstrap
over the turns. All are of one process: what differs from one process to the next
is not in the interval. Leave the machine alone meanwhile.`,
			Example: fmt.Sprintf("  sudo xspin bench %s\n  sudo xspin bench %s --runs 21 --json", b.name, b.name),
			Args:    cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				switch {
				case cfg.runs < 1 || cfg.runs > 1000:
					return fmt.Errorf("bench %s: %w", b.name, flags.Error("runs", cfg.runs, "want 1 to 1000"))
				case cfg.duration < b.least || cfg.duration > time.Minute || cfg.duration%b.step != 0:
					return fmt.Errorf("bench %s: %w", b.name, flags.Error("duration", cfg.duration, fmt.Sprintf("want %v to %v in steps of %v", b.least, time.Minute, b.step)))
				}
				measure := b.measure
				if judge != nil {
					var err error
					if measure, err = judge(); err != nil {
						return fmt.Errorf("bench %s: %w", b.name, err)
					}
				}
				cfg.warn = func(msg string) { fmt.Fprintln(cmd.ErrOrStderr(), "warning:", msg) }
				doc := bench.NewDocument(environment("xspin bench "+b.name, cfg.runs, cfg.duration))
				err := runBench(cmd.Context(), cfg, doc, measure)
				if err != nil {
					err = fmt.Errorf("bench %s: %w", b.name, err)
					if len(doc.Results) == 0 {
						return err
					}
				}
				// What was measured before something went wrong is good.
				if asJSON {
					return errors.Join(err, doc.WriteJSON(cmd.OutOrStdout()))
				}
				return errors.Join(err, doc.WriteText(cmd.OutOrStdout(), targets))
			},
		}
		cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
		cmd.Flags().BoolVar(&targets, "targets", false, "print the project's own targets, too: met, missed, or within noise")
		cmd.Flags().IntVar(&cfg.runs, "runs", mostRuns, "how often each side is measured")
		cmd.Flags().DurationVar(&cfg.duration, "duration", b.duration, "how long a run takes")
		if b.flags != nil {
			judge = b.flags(cmd.Flags())
		}
		root.AddCommand(cmd)
	}
	root.AddCommand(newAllCmd(), newCompareCmd())
	return root
}

// onlyFlag adds --only, which chooses from the parts of a bench. What it returns judges the
// choice, and tells which parts are wanted.
func onlyFlag(fl *pflag.FlagSet, names []string) func() (wanted func(string) bool, err error) {
	var only []string
	fl.StringSliceVar(&only, "only", nil, "parts to measure: "+strings.Join(names, ", ")+" (default all)")
	flags.ListOf(fl, "only", names)
	return func() (func(string) bool, error) {
		for _, name := range only {
			if !slices.Contains(names, name) {
				return nil, flags.Error("only", name, "want "+strings.Join(names, ", "))
			}
		}
		return func(name string) bool { return len(only) == 0 || slices.Contains(only, name) }, nil
	}
}

// runBench measures in a lab of its own.
func runBench(ctx context.Context, cfg benchConfig, doc *bench.Document, measure measureFunc) error {
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	return inLab(cfg.warn, func(lab *benchLab) error { return measure(ctx, lab, cfg, doc) })
}

// inLab measures in a lab that is made for it and removed afterwards.
func inLab(warn func(string), measure func(*benchLab) error) (err error) {
	lab, err := newBenchLab(warn)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lab.Down()) }()
	return measure(lab)
}

// benchLab is a lab that no other process uses, and the CPUs for what is
// measured in it: traffic comes from the first, its receiver is on the second.
type benchLab struct {
	*netns.Lab
	sender, receiver int
	warn             func(string)
	waits            generatorWaits
}

const benchNamespace = "xspin-bench%d-"

func newBenchLab(warn func(string)) (*benchLab, error) {
	sweepBenchLabs(warn)
	cpus := testbed.CPUs()
	if len(cpus) == 0 {
		return nil, errors.New("the kernel does not tell which CPUs this process may use")
	}
	lab, err := netns.Up(benchLabConfig(os.Getpid(), warn))
	if err != nil {
		return nil, err
	}
	l := &benchLab{Lab: lab, sender: cpus[0], receiver: cpus[min(1, len(cpus)-1)], warn: warn}
	if len(cpus) == 1 {
		warn(fmt.Sprintf("this process may use one CPU only, %d: all rows are of sender and receiver in turn", l.sender))
	}
	return l, nil
}

func benchLabConfig(pid int, warn func(string)) netns.LabConfig {
	name := fmt.Sprintf(benchNamespace, pid)
	return netns.LabConfig{NIC: netns.End{Namespace: name + "nic"}, Host: netns.End{Namespace: name + "host"}, Warn: warn}
}

// reshape puts a network that is as bad as the config says between the ends, or
// with nil none. What was open on the lab must be closed.
func (l *benchLab) reshape(path *impair.Config) error {
	cfg := benchLabConfig(os.Getpid(), l.warn)
	cfg.Path = path
	if err := l.Close(); err != nil {
		return err
	}
	lab, err := netns.Up(cfg)
	if err != nil {
		return err
	}
	l.Lab = lab
	return nil
}

// sweepBenchLabs removes the labs of benchmarks that were killed.
func sweepBenchLabs(warn func(string)) {
	entries, err := os.ReadDir("/run/netns")
	if err != nil {
		return // nobody made a lab yet
	}
	for _, e := range entries {
		var pid int
		if n, _ := fmt.Sscanf(e.Name(), benchNamespace, &pid); n != 1 || !strings.HasSuffix(e.Name(), "-nic") && !strings.HasSuffix(e.Name(), "-host") {
			continue
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
			continue
		}
		if err := netns.Down(benchLabConfig(pid, warn)); err != nil {
			warn(fmt.Sprintf("the lab of a benchmark that was killed (process %d) is still there: %v", pid, err))
		}
	}
}

// iface looks up the device of an end, as its namespace numbers it.
func iface(p netns.Port) (i *net.Interface, err error) {
	err = p.NS.Do(func() error {
		i, err = net.InterfaceByName(p.Device)
		return err
	})
	return i, err
}

// attach loads a program and attaches it to the NIC's end.
func (l *benchLab) attach(load func() (*yardstick.Program, error)) (*yardstick.Program, error) {
	i, err := iface(l.NIC)
	if err != nil {
		return nil, err
	}
	y, err := load()
	if err != nil {
		return nil, err
	}
	if err := l.NIC.NS.Do(func() error { return y.Attach(i) }); err != nil {
		return nil, errors.Join(err, y.Close())
	}
	l.waits.ours = l.sender == l.receiver
	return y, nil
}

func plain(p yardstick.Plain) func() (*yardstick.Program, error) {
	return func() (*yardstick.Program, error) { return yardstick.LoadPlain(p) }
}

// open opens a NIC on the NIC's end with one active context.
func (l *benchLab) open(cfg nic.Config, spec nic.ContextSpec) (*nic.NIC, error) {
	n, _, err := l.openContext(cfg, spec)
	return n, err
}

// openContext is open that tells which context.
func (l *benchLab) openContext(cfg nic.Config, spec nic.ContextSpec) (n *nic.NIC, c *nic.Context, err error) {
	if n, err = l.openEmpty(cfg); err != nil {
		return nil, nil, err
	}
	if c, err = activate(n, spec); err != nil {
		return nil, nil, errors.Join(err, n.Close())
	}
	return n, c, nil
}

// openEmpty opens a NIC on the NIC's end, without a context.
func (l *benchLab) openEmpty(cfg nic.Config) (n *nic.NIC, err error) {
	cfg.Interface = l.NIC.Device
	if cfg.Hook == nic.HookAuto {
		cfg.Hook = nic.HookXDP // as long as nothing else is said: rows are compared with those of before
	}
	l.waits.ours = len(cfg.CPUs) == 0 || slices.Contains(cfg.CPUs, l.sender)
	err = l.NIC.NS.Do(func() error {
		n, err = nic.Open(cfg)
		return err
	})
	return n, err
}

// activate makes a context and has packets come to it.
func activate(n *nic.NIC, spec nic.ContextSpec) (*nic.Context, error) {
	c, err := n.Install(spec)
	if err != nil {
		return nil, err
	}
	return c, n.Activate(c)
}

// state says what is on at either end.
func (l *benchLab) state() (string, error) {
	links, err := rtt.ReadLinks(l.Lab)
	if err != nil {
		return "", err
	}
	return linkStates(links), nil
}

func linkStates(links []rtt.LinkState) string {
	var ends []string
	for _, s := range links {
		ends = append(ends, fmt.Sprintf("%s: XDP %s, TSO %s, GSO %s, GRO %s, checksums %s", s.Device, s.XDP, s.TSO, s.GSO, s.GRO, s.Checksums()))
	}
	return strings.Join(ends, "; ")
}

// generate sends a frame for a time, from the sender's CPU into the NIC's end,
// which must have an XDP program.
func (l *benchLab) generate(g *yardstick.Generator, frame []byte, d time.Duration) (sent int, took time.Duration, err error) {
	err = l.Host.NS.Do(func() error {
		return testbed.OnCPU(l.sender, func() error {
			waited := waitedForCPU()
			sent, took, err = g.Send(frame, d)
			l.waits.add(waitedForCPU()-waited, took)
			return err
		})
	})
	return sent, took, err
}

func (l *benchLab) generator() (g *yardstick.Generator, err error) {
	out, err := iface(l.Host)
	if err != nil {
		return nil, err
	}
	err = l.Host.NS.Do(func() error {
		g, err = yardstick.NewGenerator(out)
		return err
	})
	return g, err
}

// benchPort is where the traffic of rx and match goes: the echo service's.
const benchPort = 7

// udpFrame is a frame to the NIC with a UDP payload, size bytes in all. Its UDP
// checksum is 0, which is none.
func (l *benchLab) udpFrame(size int) []byte {
	f := make([]byte, size)
	eth := packet.Ethernet(f)
	eth.SetDst([6]byte(l.NIC.MAC))
	eth.SetSrc([6]byte(l.Host.MAC))
	eth.SetEtherType(packet.EtherTypeIPv4)
	ip := packet.IPv4(eth.Payload())
	ip[0] = 0x45
	ip.SetTotalLen(uint16(len(ip)))
	ip.SetTTL(64)
	ip.SetProtocol(unix.IPPROTO_UDP)
	ip.SetSrc(l.Host.Addr.Addr().As4())
	ip.SetDst(l.NIC.Addr.Addr().As4())
	ip.SetChecksum(ip.HeaderChecksum())
	udp := packet.UDP(ip.Payload())
	udp.SetSrcPort(49152)
	udp.SetDstPort(benchPort)
	udp.SetLength(uint16(len(udp)))
	return f
}

// hidden returns the commands of processes that benchmarks start, each with an argument.
func hidden() (cmds []*cobra.Command) {
	for name, run := range map[string]func(cmd *cobra.Command, arg string) error{
		idleCommand: func(cmd *cobra.Command, device string) error {
			return idleNIC(device, cmd.OutOrStdout(), os.Stdin)
		},
		loadCommand: func(cmd *cobra.Command, job string) error {
			return sendLoad(cmd.Context(), job, cmd.OutOrStdout(), os.Stdin)
		},
		hostqbench.Command: func(_ *cobra.Command, job string) error {
			_, err := hostqbench.Main([]string{hostqbench.Command, job})
			return err
		},
	} {
		cmds = append(cmds, &cobra.Command{
			Use: name, Hidden: true, DisableFlagParsing: true, Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error { return run(cmd, args[0]) },
		})
	}
	return cmds
}

// idleNIC is a process with a NIC that has nothing to do. It ends with its input.
func idleNIC(device string, ready io.Writer, until io.Reader) (err error) {
	n, err := nic.Open(nic.Config{Interface: device})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	c, err := n.Install(noopSpec())
	if err != nil {
		return err
	}
	if err := n.Activate(c); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(ready, "ready"); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, until)
	return err
}

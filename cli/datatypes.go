// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os/signal"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/demos/datatypes"
	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/slmp"
)

// newDatatypesCmd returns `xspin demo datatypes`.
func newDatatypesCmd() *cobra.Command {
	var f datatypesFlags
	cmd := &cobra.Command{
		Use:   "datatypes",
		Short: "Messages of MPI datatypes, scattered into an application's memory while it computes",
		Long: `Send messages of MPI datatypes through the lab, which is brought up if necessary.
The sender, a process at the host's end, has packed them. Handlers on
the NIC put every block of every packet where it belongs in the window of an
unprivileged application, a process of its own: there is no receive
buffer, and nothing is unpacked. The application asks for the messages (ready-to-send,
as in FPsPIN: two numbers to UDP port 9331) and gets an event for each.

` + datatypeHelp + `
--type may be repeated; for each type, --parallel messages of --count elements are sent
at once, --runs times. --strategy deposit stores the same bytes contiguously: the
difference is what the datatype costs.

With --verify every byte of the window is compared, holes included. The sender's
buffers have a different pattern for each message, so the expected bytes are known,
even where a type overlaps itself. With --overlap the application multiplies
matrices (gonum, one thread) meanwhile, of a size at which the messages arrive just
in time, and looks for them between two products. This shows how much of the
communication is hidden, and what it costs both. Where the NIC's threads run is a choice:
on the sender's CPU, as with --pin, they take nothing from the products; on the
application's (--nic-cpu), messages alone are faster, and together it takes longer.

With --serve nothing is measured: messages as long as --count elements are received
from any sender until interrupted, and each is reported in a line. --dir keeps the
resulting memory in files: the application writes them as user 65534 (nobody).
In another terminal, with the same type:
  xspin ddt pack Simple --count 20 --in IMAGE --out STREAM
  sudo xspin lab exec host -- xspin send --to 10.0.0.1 STREAM
With --sender it asks for messages there: FPsPIN's sender, or this one, which needs no
privileges. It repeats the request until a message starts. --verify knows only what these
two send:
  sudo xspin lab exec host -- xspin demo datatypes --send --type Simple`,
		Example: `  sudo xspin demo datatypes
  sudo xspin demo datatypes --type Simple --type Complex --overlap --verify --pin
  sudo xspin demo datatypes --type 'vec(1024 16 32)[double]' --strategy rw-cp --interval 4096 --json
  sudo xspin demo datatypes --serve --type Complex --sender 10.0.0.2 --verify`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// Check all flags before setting anything up.
			cfg, err := f.config(cmd.Flags().Changed)
			if err == nil {
				if f.pin && cfg.AppCPU < 0 {
					fmt.Fprintln(cmd.ErrOrStderr(), "warning: --pin: this process may use only one CPU, so all share it")
				}
				err = runDatatypes(cmd, f, cfg)
			}
			if err != nil {
				return fmt.Errorf("demo datatypes: %w", err)
			}
			return nil
		},
	}
	f.bind(cmd.Flags())
	return cmd
}

// datatypesFlags are the flags as typed.
type datatypesFlags struct {
	demoFlags
	types                   []string
	count, interval         int64
	parallel, runs, appCPU  int
	strategy, dir, asked    string
	overlap, verify, sender bool
}

// strategies are what --strategy takes.
var strategies = append(ddt.Strategies(), datatypes.Deposit)

func (f *datatypesFlags) bind(fl *pflag.FlagSet) {
	fl.StringArrayVar(&f.types, "type", []string{"Simple", "Complex"}, "TYPE as above; may be given several times")
	flags.OneOfOrFile(fl, "type", typeNames())
	fl.Int64Var(&f.count, "count", 20, "elements of the type in a message, 0 for what TYPE says")
	fl.IntVar(&f.parallel, "parallel", 16, fmt.Sprintf("messages at a time, 1 to %d, each in a place of its own", datatypes.MaxParallel))
	fl.IntVar(&f.runs, "runs", 7, "rounds measured for each type; with --overlap, up to 20, for each kind")
	fl.StringVar(&f.strategy, "strategy", ddt.Direct, "how handlers find the bytes' places: "+strings.Join(ddt.Strategies(), ", ")+"; or deposit, which has no type")
	flags.OneOf(fl, "strategy", strategies)
	fl.Int64Var(&f.interval, "interval", 0, "bytes between the checkpoints of ro-cp and rw-cp, 0 for what the model says")
	fl.BoolVar(&f.verify, "verify", false, "compare every byte of the window, before and after the runs; with --serve (needs --sender) for each message")
	fl.BoolVar(&f.overlap, "overlap", false, "also measure with concurrent matrix multiplications")
	fl.IntVar(&f.appCPU, "app-cpu", -1, "the CPU for the application, -1 for any")
	f.demoFlags.bind(fl, "sender")
	fl.StringVar(&f.asked, "sender", "", fmt.Sprintf("with --serve: the sender to ask for messages at the start, address or address:port (default port %d)", datatypes.RequestPort))
	fl.StringVar(&f.dir, "dir", "", fmt.Sprintf("with --serve: keep the memory of each message in a file here, where user %d (nobody) must be able to write", rtt.Nobody))
	fl.BoolVar(&f.sender, "send", false, fmt.Sprintf("be a sender of the type instead, and answer requests on UDP port %d", datatypes.RequestPort))
	fl.Lookup("pin").Usage = "sender and NIC on the first CPU that this process may use, the application on the second"
}

// config checks the flags. changed says which of them the user set.
func (f datatypesFlags) config(changed func(string) bool) (c datatypes.Config, err error) {
	c.Setup = datatypes.Setup{HPUs: f.hpus, Wait: f.wait, AppCPU: f.appCPU}
	if c.SenderCPU, c.NICCPUs, err = f.cpus(); err != nil {
		return c, err
	}
	one := f.serve || f.sender
	types := f.types
	if one && !changed("type") {
		types = types[:1]
	}
	switch {
	case f.appCPU < -1 || f.appCPU > testbed.MaxCPU:
		return c, flags.Error("app-cpu", f.appCPU, fmt.Sprintf("want a CPU number from 0 to %d, or -1 for any", testbed.MaxCPU))
	case f.appCPU >= 0 && !cpuAllowed(f.appCPU):
		return c, cpuError("app-cpu", f.appCPU)
	case f.pin && f.appCPU >= 0:
		return c, flags.Error("pin", f.pin, "not with --app-cpu: it chooses that too")
	case len(types) == 0 || slices.Contains(types, ""):
		return c, flags.Error("type", "", "want a name, a type as text, or a file")
	case one && len(types) > 1:
		return c, flags.Error("type", strings.Join(types, " --type "), "one only with --serve and --send")
	case f.count < 0 || f.count > math.MaxUint32:
		return c, flags.Error("count", f.count, fmt.Sprintf("want 1 to %d, or 0 for what --type says", uint32(math.MaxUint32)))
	case f.parallel < 1 || f.parallel > datatypes.MaxParallel:
		return c, flags.Error("parallel", f.parallel, fmt.Sprintf("want 1 to %d", datatypes.MaxParallel))
	case f.runs < 1 || f.runs > datatypes.MaxRuns:
		return c, flags.Error("runs", f.runs, fmt.Sprintf("want 1 to %d", datatypes.MaxRuns))
	case !slices.Contains(strategies, f.strategy):
		return c, flags.Error("strategy", f.strategy, "want one of "+strings.Join(strategies, ", "))
	case f.interval < 0 || f.interval > slmp.MaxMessage:
		return c, flags.Error("interval", f.interval, fmt.Sprintf("want 1 to %d bytes, or 0 for what the model says", int64(slmp.MaxMessage)))
	case f.interval > 0 && f.strategy != ddt.ROCP && f.strategy != ddt.RWCP:
		return c, flags.Error("interval", f.interval, "applies only to --strategy ro-cp and rw-cp")
	case f.serve && f.sender:
		return c, flags.Error("send", f.sender, "not with --serve: one receives, the other sends")
	case f.overlap && one:
		return c, flags.Error("overlap", f.overlap, "not with --serve and --send, which measure nothing")
	case f.json && f.sender:
		return c, flags.Error("json", f.json, "not with --send, which measures nothing")
	case f.verify && f.serve && f.asked == "":
		return c, flags.Error("verify", f.verify, "with --serve only with --sender: only the bytes of FPsPIN's sender and of --send are known")
	case (f.asked != "" || f.dir != "") && !f.serve:
		return c, errors.New("--sender and --dir apply only to --serve")
	}
	if f.pin && len(c.NICCPUs) > 0 {
		// The sender and the NIC wait for each other anyway, so they share a CPU, and
		// the application gets the other.
		c.AppCPU, c.NICCPUs = c.NICCPUs[0], []int{c.SenderCPU}
	}
	for _, text := range types {
		t, n, err := datatypeArg(text, f.count)
		if err != nil {
			return c, fmt.Errorf("--type %s: %w", text, err)
		}
		name := text
		if _, _, err := ddt.Resolve(text); err != nil { // a file
			text = t.String()
		}
		transfer := datatypes.Transfer{
			Name: name, Type: text, Count: n, Parallel: f.parallel, Strategy: f.strategy, Interval: f.interval,
		}
		if err := transfer.Check(); err != nil {
			return c, err
		}
		c.Transfers = append(c.Transfers, transfer)
	}
	c.Runs, c.Verify, c.Overlap = f.runs, f.verify, f.overlap
	return c, nil
}

// requestAddress parses the address at which a sender is asked.
func requestAddress(s string) (netip.AddrPort, error) {
	if s == "" {
		return netip.AddrPort{}, nil
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Is4() {
		return netip.AddrPortFrom(a, datatypes.RequestPort), nil
	}
	if a, err := netip.ParseAddrPort(s); err == nil && a.Addr().Is4() && a.Port() > 0 {
		return a, nil
	}
	return netip.AddrPort{}, flags.Error("sender", s, "want an IPv4 address such as 10.0.0.2, or with a port 10.0.0.2:9331")
}

func runDatatypes(cmd *cobra.Command, f datatypesFlags, cfg datatypes.Config) (err error) {
	asked, err := requestAddress(f.asked)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	out := cmd.OutOrStdout()
	if f.sender {
		return datatypes.Send(ctx, netip.AddrPortFrom(netip.IPv4Unspecified(), datatypes.RequestPort), cfg.Transfers[0], func() {
			fmt.Fprintf(out, "sending messages of %s to those who ask on UDP port %d, until interrupted\n", cfg.Transfers[0].Name, datatypes.RequestPort)
		}, func(r datatypes.Request) { writeRequest(out, r) })
	}
	lab, down, err := netns.Borrow(netns.LabConfig{Warn: warnTo(cmd.ErrOrStderr())})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, down()) }()
	if f.serve {
		c := datatypes.ServeConfig{Setup: cfg.Setup, Transfer: cfg.Transfers[0], Sender: asked, Verify: cfg.Verify, Dir: f.dir}
		return datatypes.Serve(ctx, lab, c, func(i datatypes.Info) {
			addr := lab.NIC.Addr.Addr()
			fmt.Fprintf(out, "XsPIN receives messages of %d bytes on %s (%s in namespace %s), %s of %s, until interrupted", i.Message, addr, lab.NIC.Device, lab.NIC.Namespace, count(int(i.Count), "element"), i.Name)
			if asked.IsValid() {
				fmt.Fprintf(out, ", and asks %v for them\n", asked)
				return
			}
			fmt.Fprintf(out, ". In another terminal:\n  %s xspin send --to %s FILE\n", hint("lab exec host --"), addr)
		}, func(m datatypes.Message) { writeMessage(out, m) })
	}
	report, err := datatypes.Run(ctx, lab, cfg, func(msg string) { fmt.Fprintln(cmd.ErrOrStderr(), msg) })
	if report != nil && len(report.Results) > 0 {
		err = errors.Join(err, writeReport(out, report, f.json))
	}
	return err
}

// writeMessage writes a line about a message.
func writeMessage(w io.Writer, m datatypes.Message) {
	if m.Err != "" {
		fmt.Fprintf(w, "refused: from %s: %s\n", m.Source, m.Err)
		return
	}
	fmt.Fprintf(w, "message %d from %s: %s", m.Number, m.Source, file.Bytes(m.Bytes))
	if m.Verified {
		fmt.Fprint(w, ", all bytes where they must be")
	}
	if m.File != "" {
		fmt.Fprintf(w, ", %s", m.File)
	}
	fmt.Fprintln(w)
}

func writeRequest(w io.Writer, r datatypes.Request) {
	if r.Err != nil {
		fmt.Fprintf(w, "failed: %v\n", r.Err)
		return
	}
	fmt.Fprintf(w, "%v asks for %s of %s\n", r.From, count(r.Messages, "message"), count(int(r.Elements), "element"))
}

// newDatatypesHelperCmds returns the hidden commands for the processes of the demo.
func newDatatypesHelperCmds() []*cobra.Command {
	var cmds []*cobra.Command
	for _, name := range []string{datatypes.AppCommand, datatypes.SenderCommand} {
		cmds = append(cmds, &cobra.Command{
			Use:                name,
			Hidden:             true,
			DisableFlagParsing: true,
			RunE: func(_ *cobra.Command, args []string) error {
				_, err := datatypes.Main(append([]string{name}, args...))
				return err
			},
		})
	}
	return cmds
}

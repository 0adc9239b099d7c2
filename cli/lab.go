// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
)

// newLabCmd returns `xspin lab`.
func newLabCmd() *cobra.Command {
	lab := &cobra.Command{
		Use:   "lab",
		Short: "Two network namespaces joined by a veth pair, to try XsPIN in",
		Long: `A lab is a NIC and its peer without any hardware: the namespace xspin-nic with
the device xs-nic (10.0.0.1/24), and xspin-host with xs-host (10.0.0.2/24).
With xspin lab up --loss and the like there is a third one between them,
xspin-path, where frames are impaired. The machine's own network is not touched.`,
		Args: cobra.NoArgs,
	}
	lab.AddCommand(newLabUpCmd(), newLabDownCmd(), newLabShowCmd(), newLabExecCmd())
	return lab
}

func newLabUpCmd() *cobra.Command {
	cfg := netns.LabConfig{StartRelay: startRelay}
	var asJSON, wire bool
	var path func() *impair.Config
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Bring the lab up, or keep a matching one",
		Long: `Bring the lab up. An existing lab with this MTU, these queues and these
impairments is kept; any other, and the remains of a crash, is removed and
rebuilt.

Impairments apply to both directions, each with random numbers of its own, derived
from the seed and the frame's number: the same frames in the same order meet the
same fate in a new lab. Frames are impaired as they are on the wire, so both ends
lose their offloads, and checksums are real. A rate counts Ethernet headers, and
lets bursts of 1 ms pass. Delayed frames wait in order, in a process of their own,
which ends with the lab. A reordered frame is not delayed. An impairment of 0%, or
a rate or delay of 0, builds the same path and lets frames pass.

With --trains what a sender leaves to its device to cut (UDP_SEGMENT) passes whole, for
handlers in eBPF at the hook tc, and segments are lost out of it. A copy of another
segment is in the place of a lost one. XDP cannot answer through such a path.

With --wire handlers in eBPF (tier: kernel) at the hook xdp can answer: a veth takes what XDP sends
only if it has an XDP program itself. Without it lab up takes that program off.`,
		Example: `  sudo xspin lab up
  sudo xspin lab up --mtu 9000 --queues 4
  sudo xspin lab up --wire
  sudo xspin lab up --loss 1% --trains
  sudo xspin lab up --loss 5% --dup 1% --reorder 3% --corrupt 0.1% --delay 2ms --rate 1gbit --seed 7`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// A zero means the default to netns, not to the user.
			for _, f := range []struct {
				name  string
				value int
			}{{"mtu", cfg.MTU}, {"queues", cfg.Queues}} {
				if cmd.Flags().Changed(f.name) && f.value == 0 {
					return fmt.Errorf("lab up: %w: --%s 0", netns.ErrConfig, f.name)
				}
			}
			cfg.Path = path()
			if wire && cfg.Path != nil && cfg.Path.Trains {
				return fmt.Errorf("lab up: %w: --wire has senders cut the packets that --trains lets pass whole", netns.ErrConfig)
			}
			if cfg.Path != nil && cfg.Path.Seed == 0 {
				return fmt.Errorf("lab up: %w: --seed 0: want 1 to 18446744073709551615", impair.ErrConfig)
			}
			cfg.Warn = warnTo(cmd.ErrOrStderr())
			l, err := netns.Up(cfg)
			if err != nil {
				return err
			}
			defer l.Close()
			before, err := l.Host.Wired()
			if err != nil {
				return fmt.Errorf("lab up: %w", err)
			}
			if err := l.Host.SetWire(wire); err != nil {
				return fmt.Errorf("lab up: %w", err)
			}
			after, err := l.Host.Wired()
			if err != nil {
				return fmt.Errorf("lab up: %w", err)
			}
			if before && !after {
				cfg.Warn("the XDP program of the host's end was taken off: handlers in eBPF at xdp cannot answer; --wire keeps it")
			}
			if asJSON {
				return writeLabJSON(cmd.OutOrStdout(), l, after)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), drawLab(l, after))
			return err
		},
	}
	cmd.Flags().IntVar(&cfg.MTU, "mtu", 0, "bytes, 68 to 65535 (default 1500)")
	cmd.Flags().IntVar(&cfg.Queues, "queues", 0, "receive and transmit queues of each device, 1 to 256 (default one per CPU, up to the 64 that a NIC serves)")
	path = addPathFlags(cmd.Flags())
	cmd.Flags().BoolVar(&wire, "wire", false, "have the host's end take what XDP on the NIC's end sends, as network cards do: it gets an XDP program that lets all pass")
	cmd.Flags().BoolVar(&asJSON, "json", false, "describe the lab as JSON")
	return cmd
}

func newLabDownCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Remove the lab, or the remains of one",
		Long: `Remove the lab, or the remains of one. Processes inside are listed, not
ended. Namespaces that xspin did not make are never removed.`,
		Example: `  sudo xspin lab down`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return netns.Down(netns.LabConfig{Warn: warnTo(cmd.ErrOrStderr())})
		},
	}
}

func newLabExecCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "exec [nic|host|path|NAMESPACE] [--] COMMAND [ARG...]",
		Short: "Run a command inside the lab",
		Long: `Run a command inside one of the lab's namespaces, or any other one under
/run/netns. The command replaces xspin: terminal, signals and exit status are its
own. With nothing in front of --, it runs in host.`,
		Example: `  sudo xspin lab exec host ping -c 3 10.0.0.1
  sudo xspin lab exec -- ping -c 3 10.0.0.1
  sudo xspin lab exec nic tcpdump -ni xs-nic`,
		RunE: func(cmd *cobra.Command, args []string) error {
			name, argv, err := splitExec(args, cmd.ArgsLenAtDash() == 0)
			if err != nil {
				return err
			}
			return execIn(name, argv, warnTo(cmd.ErrOrStderr()))
		},
	}
	// Flags after the first argument are the command's.
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// labNames are the names of the lab's namespaces, without the prefix xspin-.
var labNames = []string{"nic", "host", "path"}

// splitExec separates the namespace from the command. dashed says that the command
// line had -- before the first of args.
func splitExec(args []string, dashed bool) (name string, argv []string, err error) {
	name, argv = "host", args
	if !dashed && len(args) > 0 {
		name, argv = args[0], args[1:]
		if len(argv) > 0 && argv[0] == "--" {
			argv = argv[1:]
		}
	}
	if len(argv) == 0 {
		return "", nil, fmt.Errorf("lab exec: no command for %s: try `xspin lab exec %s -- ping -c 3 10.0.0.1`", name, name)
	}
	if slices.Contains(labNames, name) {
		name = "xspin-" + name
	}
	return name, argv, nil
}

func execIn(name string, argv []string, warn func(string)) error {
	ns, err := netns.OpenNamespace(name)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("lab exec: %w: run `xspin lab up`, or name nic, host, path or a namespace under /run/netns before the command", err)
	} else if err != nil {
		return fmt.Errorf("lab exec: %w", err)
	}
	defer ns.Close()
	if name == "xspin-nic" || name == "xspin-host" {
		warnNoRelay(warn)
	}
	if argv[0] == "xspin" { // run this binary, which need not be in PATH
		if self, err := os.Executable(); err == nil {
			argv = append([]string{self}, argv[1:]...)
		}
	}
	return fmt.Errorf("lab exec: %w", ns.Exec(argv, os.Environ()))
}

func warnTo(w io.Writer) func(string) {
	return func(msg string) { fmt.Fprintln(w, "warning:", msg) }
}

// drawLab draws the lab in three lines, says what is between the ends and whether handlers
// in eBPF can answer, and suggests the next command.
func drawLab(l *netns.Lab, wired bool) string {
	left := []string{l.NIC.Namespace, l.NIC.Device + " " + l.NIC.Addr.String(), l.NIC.MAC.String()}
	right := []string{l.Host.Namespace, l.Host.Device + " " + l.Host.Addr.String(), l.Host.MAC.String()}
	mid := []string{fmt.Sprintf("MTU %d", l.MTU), "<---- veth ---->", fmt.Sprintf("queues %d", l.Queues)}
	if l.Path != nil {
		mid[1] = "<- " + l.PathNS.Name() + " ->"
	}
	var b strings.Builder
	for i := range mid {
		pad := len(mid[1]) - len(mid[i])
		fmt.Fprintf(&b, "  %-22s  %s%s%s  %s\n", left[i], strings.Repeat(" ", pad/2), mid[i], strings.Repeat(" ", pad-pad/2), right[i])
	}
	if l.Path != nil {
		fmt.Fprintf(&b, "  between: %s\n", l.Path)
	}
	if wired {
		b.WriteString("  wire: yes, the host's end takes what XDP sends\n")
	} else {
		b.WriteString("  wire: no, the host's end takes nothing that XDP sends\n")
	}
	fmt.Fprintf(&b, "next: %s ping -c 3 %s\n", hint("lab exec host --"), l.NIC.Addr.Addr())
	return b.String()
}

func writeLabJSON(w io.Writer, l *netns.Lab, wired bool) error {
	type port struct {
		Namespace string `json:"namespace"`
		Device    string `json:"device"`
		Index     int    `json:"index"`
		MAC       string `json:"mac"`
		Addr      string `json:"addr"`
	}
	of := func(p netns.Port) port {
		return port{p.Namespace, p.Device, p.Index, p.MAC.String(), p.Addr.String()}
	}
	path, err := pathJSON(l)
	if err != nil {
		return err
	}
	return writeJSON(w, struct {
		Schema int  `json:"schema"`
		NIC    port `json:"nic"`
		Host   port `json:"host"`
		MTU    int  `json:"mtu"`
		Queues int  `json:"queues"`
		Wire   bool `json:"wire"` // whether the host's end takes what XDP sends
		Path   any  `json:"path,omitempty"`
	}{1, of(l.NIC), of(l.Host), l.MTU, l.Queues, wired, path})
}

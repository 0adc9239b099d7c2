// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
)

// A parsed is a flag with a parser of its own.
type parsed struct {
	kind, text string
	parse      func(string) error
}

func (p *parsed) Set(s string) error {
	if err := p.parse(s); err != nil {
		return err
	}
	p.text = s
	return nil
}
func (p *parsed) String() string { return p.text }
func (p *parsed) Type() string   { return p.kind }

// addPathFlags adds the flags that impair frames. With none of them the lab is a plain
// pair. With, say, --loss 0%, frames pass through the same stage as with other values, but
// are not impaired.
func addPathFlags(fs *pflag.FlagSet) (path func() *impair.Config) {
	var c impair.Config
	var names []string
	add := func(name, kind, usage string, parse func(string) error) {
		names = append(names, name)
		fs.Var(&parsed{kind: kind, parse: parse}, name, usage)
	}
	for _, f := range []struct {
		name, usage string
		value       *float64
	}{
		{"loss", "frames lost, as in 5%", &c.Loss},
		{"dup", "frames duplicated", &c.Duplicate},
		{"reorder", "frames sent at once, ahead of those that wait; needs --delay", &c.Reorder},
		{"corrupt", "frames with one bit flipped, somewhere after the Ethernet header", &c.Corrupt},
	} {
		add(f.name, "percent", f.usage, func(s string) (err error) {
			*f.value, err = impair.ParseFraction(s)
			return err
		})
	}
	add("delay", "duration", "time a frame waits, as in 2ms, up to 1s", func(s string) error {
		d, err := time.ParseDuration(s)
		if err != nil || d < 0 || d > impair.MaxDelay {
			return fmt.Errorf("want a time as in 2ms, 0s to %v", impair.MaxDelay)
		}
		c.Delay = d
		return nil
	})
	add("rate", "rate", "limit as tc writes it: 10mbit, 1gbit (8kbit to 100gbit)", func(s string) (err error) {
		c.Rate, err = impair.ParseRate(s)
		return err
	})
	add("direction", "way", "frames meant: both, from-host or to-host (default both)", func(s string) (err error) {
		c.Direction, err = impair.ParseDirection(s)
		return err
	})
	names = append(names, "trains")
	fs.BoolVar(&c.Trains, "trains", false, "let trains (UDP_SEGMENT) pass whole, and lose segments out of them; with --loss and --dup only")
	names = append(names, "seed")
	fs.Uint64Var(&c.Seed, "seed", 1, "seed of the random numbers, not 0: the same seed treats the same frames alike")
	return func() *impair.Config {
		for _, n := range names {
			if fs.Changed(n) {
				return &c
			}
		}
		return nil
	}
}

// newLabShowCmd returns `xspin lab show`.
func newLabShowCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show",
		Short: "The lab that is up: its shape, what happens to frames, and counters",
		Long: `Show the lab that is up, what happens to frames between its ends, and counters
of what did since it was built.`,
		Example: `  sudo xspin lab show
  sudo xspin lab show --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := netns.Open(netns.LabConfig{})
			if err != nil {
				return fmt.Errorf("lab show: %w", err)
			}
			defer l.Close()
			wired, err := l.Host.Wired()
			if err != nil {
				return fmt.Errorf("lab show: %w", err)
			}
			if asJSON {
				return writeLabJSON(cmd.OutOrStdout(), l, wired)
			}
			st, err := l.PathState()
			if err != nil {
				return fmt.Errorf("lab show: %w", err)
			}
			if _, err := io.WriteString(cmd.OutOrStdout(), drawLab(l, wired)); err != nil || st == nil {
				return err
			}
			return writeCounters(cmd.OutOrStdout(), st)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "describe the lab as JSON")
	return cmd
}

// writeCounters describes what happened to frames.
func writeCounters(w io.Writer, st *impair.State) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', tabwriter.AlignRight)
	row := func(name string, f func(c impair.Counters) uint64, means string) {
		fmt.Fprintf(t, "%s\t%d\t%d\t  %s\n", name, f(st.FromHost), f(st.ToHost), means)
	}
	type c = impair.Counters
	fmt.Fprintf(t, "\tfrom host\tto host\t\n")
	row("frames", func(c c) uint64 { return c.Frames }, "received")
	row("bytes", func(c c) uint64 { return c.Bytes }, "of these, with Ethernet header")
	row("lost", func(c c) uint64 { return c.Lost }, "")
	row("duplicated", func(c c) uint64 { return c.Duplicated }, "")
	row("corrupted", func(c c) uint64 { return c.Corrupted }, "")
	if st.Config.Rate > 0 {
		row("rate dropped", func(c c) uint64 { return c.RateDropped }, "found the queue for the rate full")
	}
	if st.Config.Delay > 0 {
		row("delayed", func(c c) uint64 { return c.Delayed }, "waited")
		row("reordered", func(c c) uint64 { return c.Reordered }, "did not")
		row("waiting", func(c c) uint64 { return c.Waiting }, "just now")
		row("overflowed", func(c c) uint64 { return c.Overflowed }, "found no place to wait")
		row("unserved", func(c c) uint64 { return c.Unserved }, "came when no relay ran")
	}
	row("link dropped", func(c c) uint64 { return c.LinkDropped }, "found the next device's queue full")
	return t.Flush()
}

// pathJSON describes what is between the ends, nil if nothing is.
func pathJSON(l *netns.Lab) (any, error) {
	st, err := l.PathState()
	if err != nil || st == nil {
		return nil, err
	}
	return struct {
		Namespace string          `json:"namespace"`
		Loss      float64         `json:"loss"`
		Dup       float64         `json:"dup"`
		Reorder   float64         `json:"reorder"`
		Corrupt   float64         `json:"corrupt"`
		DelayNS   int64           `json:"delay_ns"`
		RateBPS   uint64          `json:"rate_bit_s"`
		Seed      uint64          `json:"seed"`
		Direction string          `json:"direction"`
		Trains    bool            `json:"trains"`
		FromHost  impair.Counters `json:"from_host"`
		ToHost    impair.Counters `json:"to_host"`
	}{
		l.PathNS.Name(), st.Config.Loss, st.Config.Duplicate, st.Config.Reorder, st.Config.Corrupt, st.Config.Delay.Nanoseconds(),
		st.Config.Rate, st.Config.Seed, st.Config.Direction.String(), st.Config.Trains, st.FromHost, st.ToHost,
	}, nil
}

// warnNoRelay warns a user of the lab if no frame will arrive because the relay is gone.
func warnNoRelay(warn func(string)) {
	path, err := netns.OpenNamespace("xspin-path")
	if err != nil {
		return // a plain pair
	}
	path.Close()
	l, err := netns.Open(netns.LabConfig{})
	if errors.Is(err, impair.ErrNoRelay) {
		warn(err.Error())
	}
	l.Close()
}

// relayCommand is the hidden command whose process delays frames.
const relayCommand = "_relay"

// newLabHelperCmds returns the hidden commands for processes of a lab.
func newLabHelperCmds() []*cobra.Command {
	return []*cobra.Command{{
		Use:                relayCommand,
		Hidden:             true,
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// This process may have a copy of the mounts, which would keep
			// namespaces alive, its own lab's included. EINVAL: nothing is
			// mounted there (any more).
			for unix.Unmount("/run/netns", unix.MNT_DETACH) == nil {
			}
			// The process that started this one reads one line and ends.
			err := netns.ServeRelay(os.NewFile(3, "path"), func() {
				fmt.Println()
				os.Stdout.Close()
			})
			if err != nil {
				fmt.Println(strings.ReplaceAll(err.Error(), "\n", "; "))
			}
			return err
		},
	}}
}

// startRelay starts a process that delays the frames of a lab. It outlives this process,
// and ends with the lab.
func startRelay(path *os.File) error {
	c := exec.Command("/proc/self/exe", relayCommand)
	c.Args[0] = "xspin"
	c.Dir = "/"
	c.ExtraFiles = []*os.File{path}
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Unshareflags: unix.CLONE_NEWNS}
	out, err := c.StdoutPipe()
	if err != nil {
		return fmt.Errorf("start the relay: %w", err)
	}
	// Do not pass on descriptors that a shell or make has left open.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	if err := c.Start(); err != nil {
		return fmt.Errorf("start the relay: %w", err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if line == "\n" {
		go func() { _ = c.Wait() }() // reap it if it ends first
		return nil
	}
	return fmt.Errorf("start the relay: %s", strings.TrimSpace(errors.Join(errors.New(strings.TrimSpace(line)), c.Wait(), err).Error()))
}

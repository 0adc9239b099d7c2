// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/internal/pcapng"
	"github.com/xspin/xspin/internal/regular"
)

// newCaptureCmd returns `xspin capture`.
func newCaptureCmd() *cobra.Command {
	var to, filter string
	o := control.CaptureOptions{}
	cmd := &cobra.Command{
		Use:   "capture CONTEXT [-w FILE]",
		Short: "Write the frames of a context to a file, as pcapng",
		Long: `Write the frames that a context takes, and those that it sends, to a file, or
without -w to standard output, until Ctrl-C. tcpdump never sees these frames, which
XDP takes. The file is pcapng; each frame has its direction, and a comment for Wireshark to show
and to filter by:

  context=inbox hpu=1 queue=0 ruleset=3 message=7 offset=1408 verdict=success

The verdict is what happened to a frame: the code its handler returned (success,
drop, fail, segv or panic), deposit (into the window, without a handler), asked
(the handler waits for the application), kept or sent. Frames of messages also
have held (until the header packet comes), duplicate, stray (no segment),
malformed, corrupt, unbound (no receive for the message), or the reason why they
were dropped: messages, memory, no_header, overlap, two_ends, beyond, dead, see
xspin stats.

Of handlers in eBPF there is no capture, since their frames do not come to user
space. At hook tc, tcpdump shows what comes and what they send. At xdp it shows that
at the other end of the link only. If they hand messages over, what comes to
the handlers in Go is captured, and what these send.

Handlers never wait for a capture. It has room for 16384 frames or 4 MiB, twice;
frames that do not fit are lost to the capture, not to the context. The file says
how many were lost before a frame, and the summary at the end how many in all.
A frame costs its HPU about 0.1 us, and 0.4 us if it has 1400 bytes, which is as
long as some handlers take; a frame that a filter leaves out costs half of that.
Without a capture there is no cost. Filter by rulesets and cut frames with --snap
to lose less.`,
		Example: `  xspin capture inbox -w inbox.pcapng
  xspin capture inbox | wireshark -k -i -
  xspin capture inbox --verdict fail,panic -c 10 | tshark -r - -V
  xspin capture inbox -w dns.pcapng --filter 'udp(53)' --snap 128
  xspin capture inbox -w some.pcapng --filter my.rules`,
		Args: wantArgs("CONTEXT"),
	}
	fl := cmd.Flags()
	fl.StringVarP(&to, "write", "w", "-", "file to write, - for standard output, which must not be a terminal")
	fl.StringVar(&filter, "filter", "", "only frames that a ruleset matches: a rules file, or a ruleset, see xspin rules")
	fl.StringVar(&o.Verdict, "verdict", "", "only frames of this verdict, or of several, separated by commas")
	flags.ListOf(fl, "verdict", daemon.Verdicts())
	fl.IntVar(&o.HPU, "hpu", -1, "only frames of this HPU (default all)")
	fl.IntVar(&o.Snap, "snap", 0, "bytes of each frame (default all)")
	fl.IntVarP(&o.Count, "count", "c", 0, "end after this many frames")
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case o.HPU < -1:
			return fmt.Errorf("capture: %w", flags.Error("hpu", o.HPU, "want 0 or more"))
		case o.Snap < 0:
			return fmt.Errorf("capture: %w", flags.Error("snap", o.Snap, "want 1 or more"))
		case o.Count < 0:
			return fmt.Errorf("capture: %w", flags.Error("count", o.Count, "want 1 or more"))
		}
		var err error
		if o.Filter, err = filterText(filter); err != nil {
			return fmt.Errorf("capture: %w", err)
		}
		out := &lateFile{path: to, stdout: cmd.OutOrStdout()}
		if to == "-" && isTerminal(out.stdout) {
			return errors.New("capture: standard output is a terminal, and frames are not text: pipe them into wireshark -k -i -, or name a file with -w")
		}
		c, err := dial()
		if err != nil {
			return err
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
		defer stop()
		total, err := runCapture(ctx, c, args[0], o, out)
		err = errors.Join(err, out.close())
		if out.w != nil { // else it was refused
			fmt.Fprintf(cmd.ErrOrStderr(), "%s, %s; lost %d\n", count(int(total.Frames), "frame"), count(int(total.Bytes), "byte"), total.Lost)
		}
		if err != nil {
			return fmt.Errorf("capture %s: %w", args[0], err)
		}
		return nil
	}
	return cmd
}

// filterText returns the rulesets of a filter: the contents of the file of that name if
// there is one, or else the text itself.
func filterText(filter string) (string, error) {
	if filter == "" {
		return "", nil
	}
	b, err := regular.Read(filter, maxDocument)
	switch {
	case err == nil:
		return string(b), nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EINVAL):
		return filter, nil
	}
	return "", fmt.Errorf("filter: %w", err)
}

// runCapture copies whole blocks until ctx ends, which is not an error.
func runCapture(ctx context.Context, c *control.Client, name string, o control.CaptureOptions, out io.Writer) (pcapng.Totals, error) {
	asked, cancel := context.WithCancel(ctx)
	defer cancel()
	from, to := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := c.Capture(asked, name, o, to)
		to.Close()
		ended <- err
	}()
	total, err := pcapng.Relay(out, from)
	broken := errors.Is(err, io.ErrUnexpectedEOF)
	from.Close()
	cancel() // in case writing to out has failed
	cerr := <-ended
	switch {
	case err != nil && !broken:
		return total, err
	case ctx.Err() != nil:
		return total, nil
	case cerr != nil:
		return total, cerr
	}
	return total, err
}

// A lateFile creates its file at the first write, so that an error before leaves none.
type lateFile struct {
	path   string // - for stdout
	stdout io.Writer
	w      io.Writer // nil: nothing has been written
	f      *os.File
}

func (l *lateFile) Write(p []byte) (int, error) {
	switch {
	case l.w != nil:
	case l.path == "-":
		l.w = l.stdout
	default:
		f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return 0, err
		}
		l.w, l.f = f, f
	}
	return l.w.Write(p)
}

func (l *lateFile) close() error {
	if l.f == nil {
		return nil
	}
	return l.f.Close()
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/slmp"
)

// newFileCmd returns `xspin demo file`.
func newFileCmd() *cobra.Command {
	var f fileFlags
	cmd := &cobra.Command{
		Use:   "file",
		Short: "Files sent to handlers on the NIC by SLMP, next to TCP",
		Long: `Send a file of random bytes through the lab, which is brought up if necessary,
and compare what arrives. The sender is xspin send, in a process of its own. The
receiver is a NIC whose handlers put every packet's payload in its place in the
file, and give the file its name when it is complete; then the message is
acknowledged. The file is sent with cumulative acknowledgements and with one for
each segment. Then the NIC puts the messages into the window of an unprivileged
application in a process of its own, which gets an event for each and writes the
files; the time for writing is not in the figures. Handlers on HPUs do that, and
then, as tier kernel, handlers in eBPF: XDP puts the payload into the window, and
acknowledges it, before any thread has run. iperf3 moves as many bytes by
TCP over the same lab, with the NIC attached, and then without any XDP program.

With --serve nothing is measured: files from any sender are received into --dir
until interrupted. A file is named after the address and port of its sender and
the number of the message; an existing one of that name is replaced. Nobody ever
sees half of a file. With --into window an application receives them, as user
65534, which must be allowed to write there. Its window has places for 4 messages
of --max-size, fewer if those would take more than 2 GiB. When all places are taken,
the next sender gets no answer until one is free, and gives up after 2 seconds, or
with more --retries after 15 at most. Memory is fastest: use a tmpfs, preferably
mounted with -o huge=within_size. A disk may stall for 30 seconds; after that no more
files are received until the command is started again.

A message is acknowledged when its file has its name: if the machine crashes soon
after, the file may be lost, or empty. With --sync, file and directory are on the
disk before that. An HPU then waits for the disk, and the sender for the
acknowledgement: for long files on slow disks raise xspin send --retries. (A file of
one segment has 15 seconds.) With --into window a message is acknowledged when it is
in the application's memory, even with --sync: there the application waits for the disk
before it reports a file.`,
		Example: `  sudo xspin demo file
  sudo xspin demo file --size 1GiB --pin --json
  sudo xspin demo file --serve --dir /dev/shm --max-size 4GiB
  sudo xspin demo file --tier kernel
  sudo xspin demo file --serve --dir /dev/shm --into window
  sudo xspin demo file --serve --dir /dev/shm --tier kernel`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// Check all flags before setting anything up.
			cfg, err := f.config(cmd.Flags().Changed)
			if err != nil {
				return fmt.Errorf("demo file: %w", err)
			}
			return runFile(cmd, f, cfg)
		},
	}
	f.bind(cmd.Flags())
	return cmd
}

// fileFlags are the flags as typed.
type fileFlags struct {
	demoFlags
	size, maxSize, window, dir string
	runs, parallel             int
	into, tiers, hooks         []string
	keep, sync                 bool
}

func (f *fileFlags) bind(fl *pflag.FlagSet) {
	fl.StringVar(&f.size, "size", "256MiB", "size of the file: bytes, or with KiB, MiB, GiB; up to 4GiB")
	fl.IntVar(&f.runs, "runs", 3, "transfers measured in each way")
	fl.IntVar(&f.parallel, "parallel", 1, "how many copies of the file are sent at once, each as a message of its own")
	fl.StringSliceVar(&f.into, "into", []string{"file", "window"}, "where handlers put messages: file, or the window of an application that writes the files; one after the other (with --serve: file)")
	flags.ListOf(fl, "into", fileIntos)
	fl.StringSliceVar(&f.tiers, "tier", tiers, "where the handlers run that put messages into a window: user (on HPUs), kernel (eBPF) or both; kernel alone implies --into window (with --serve: user)")
	flags.ListOf(fl, "tier", tiers)
	fl.StringSliceVar(&f.hooks, "hook", hooks, "where handlers of tier kernel are called: xdp, tc or both (with --serve: tc)")
	flags.ListOf(fl, "hook", hooks)
	fl.StringVar(&f.window, "window", "auto", "segments in flight per message, or auto to find out")
	fl.StringVar(&f.dir, "dir", "", "directory for received files (default one in memory; with --serve the current one)")
	fl.StringVar(&f.maxSize, "max-size", "1GiB", "refuse longer files; the default is --size without --serve, and 64MiB for a window")
	fl.BoolVar(&f.keep, "keep", false, "keep the last received file in --dir")
	fl.BoolVar(&f.sync, "sync", false, "files are on the disk (fsync) before their messages are acknowledged; a disk that takes more than 30 s stops the context. With a window, before the application reports them")
	f.demoFlags.bind(fl, "sender")
	fl.Lookup("sender-cpu").Usage += "; iperf3's client's too"
	fl.Lookup("nic-cpu").Usage += "; iperf3's server runs on the first"
}

// config checks the flags. changed says which of them the user set.
func (f fileFlags) config(changed func(string) bool) (c file.Config, err error) {
	if c.Size, err = flags.Bytes("size", f.size, 0, slmp.MaxMessage); err != nil {
		return c, err
	}
	if c.Server.Store.MaxSize, err = flags.Bytes("max-size", f.maxSize, 1, slmp.MaxMessage); err != nil {
		return c, err
	}
	if !f.serve && !changed("max-size") {
		c.Server.Store.MaxSize = max(c.Size, 1)
	}
	if c.SenderCPU, c.Server.CPUs, err = f.cpus(); err != nil {
		return c, err
	}
	if c.Into, err = f.intos(changed); err != nil {
		return c, err
	}
	if f.window != "auto" {
		if n, err := strconv.Atoi(f.window); err != nil || n < 1 || n > slmp.MaxWindow {
			return c, flags.Error("window", f.window, fmt.Sprintf("want auto, or segments, 1 to %d", slmp.MaxWindow))
		}
	}
	switch {
	case f.runs < 1 || f.runs > 1000:
		return c, flags.Error("runs", f.runs, "want 1 to 1000")
	case f.parallel < 1 || f.parallel > maxFilesAtOnce:
		return c, flags.Error("parallel", f.parallel, fmt.Sprintf("want 1 to %d", maxFilesAtOnce))
	case f.keep && (f.serve || f.dir == ""):
		return c, flags.Error("keep", f.keep, "want --dir too; and not with --serve, which keeps all files")
	}
	c.Runs, c.Parallel, c.Window, c.Keep = f.runs, f.parallel, f.window, f.keep
	c.Server.HPUs, c.Server.Wait, c.Server.Store.Dir = f.hpus, f.wait, f.dir
	c.Server.Store.Sync = f.sync
	if f.serve {
		if f.dir == "" {
			c.Server.Store.Dir = "."
		}
		c.Server.Into, c.Server.Places = c.Into[0], servePlaces
		if c.Server.Into != file.IntoFile && !changed("max-size") {
			c.Server.Store.MaxSize = 64 << 20 // a window takes memory
		}
	}
	return c, nil
}

// fileIntos is what --into takes.
var fileIntos = []string{"file", "window"}

// intos returns who receives, one after the other, by --into and --tier.
func (f *fileFlags) intos(changed func(string) bool) (all []file.Into, err error) {
	into, in := f.into, f.tiers
	if f.serve && !changed("into") {
		into = fileIntos[:1]
	}
	if f.serve && !changed("tier") {
		in = tiers[:1]
	}
	if slices.Equal(in, tiers[1:]) && !changed("into") {
		into = fileIntos[1:]
	}
	const wantInto, wantTier = "want file, window, or both as file,window", "want user, kernel or both"
	if !distinct(into, fileIntos) {
		return nil, flags.Error("into", strings.Join(into, ","), wantInto)
	}
	if !distinct(in, tiers) {
		return nil, flags.Error("tier", strings.Join(in, ","), wantTier)
	}
	at, err := kernelHooks(f.hooks, f.serve, changed("hook"))
	if err != nil {
		return nil, err
	}
	for _, s := range into {
		if s == "file" && slices.Contains(in, "user") {
			all = append(all, file.IntoFile)
		}
		if s != "window" {
			continue
		}
		for _, t := range in {
			if t == "user" {
				all = append(all, file.IntoWindow)
				continue
			}
			for _, h := range at {
				all = append(all, map[string]file.Into{"xdp": file.IntoXDP, "tc": file.IntoTC}[h])
			}
		}
	}
	switch {
	case len(all) == 0:
		return nil, flags.Error("tier", strings.Join(in, ","), "handlers in eBPF put messages into a window: want --into window")
	case f.serve && len(into) > 1:
		return nil, flags.Error("into", strings.Join(into, ","), "with --serve file or window, not both")
	case f.serve && len(in) > 1:
		return nil, flags.Error("tier", strings.Join(in, ","), "with --serve user or kernel, not both")
	}
	return all, nil
}

// servePlaces is how many messages a window takes at a time.
const servePlaces = 4

// maxFilesAtOnce is beyond FPsPIN's largest sweep.
const maxFilesAtOnce = 1024

func runFile(cmd *cobra.Command, f fileFlags, cfg file.Config) (err error) {
	ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cfg.Sender = []string{self, "send"}

	lab, down, err := netns.Borrow(netns.LabConfig{Warn: warnTo(cmd.ErrOrStderr())})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, down()) }()

	out := cmd.OutOrStdout()
	if f.serve {
		cfg.Server.Store.Ended = func(r file.Received) { writeReceived(out, r) }
		return file.Serve(ctx, lab, cfg.Server, func(places int, socket string) {
			fmt.Fprint(out, servingFiles(lab, cfg.Server, places, socket))
		})
	}
	report, err := file.Run(ctx, lab, cfg, func(msg string) { fmt.Fprintln(cmd.ErrOrStderr(), msg) })
	if report != nil && len(report.Results) > 0 {
		err = errors.Join(err, writeReport(out, report, f.json))
	}
	return err
}

// servingFiles says what is served, and how to try it.
func servingFiles(lab *netns.Lab, c file.ServerConfig, places int, socket string) string {
	addr := lab.NIC.Addr.Addr()
	by := map[file.Into]string{
		file.IntoFile:   "handlers on HPUs write them",
		file.IntoWindow: "handlers on HPUs put them into the window of an application, which writes them",
		file.IntoXDP:    "handlers in eBPF at xdp put them into the window of an application, which writes them",
		file.IntoTC:     "handlers in eBPF at tc put them into the window of an application, which writes them",
	}[c.Into]
	s := fmt.Sprintf("XsPIN receives files on %s (%s in namespace %s) into %s until interrupted:\n%s. In another terminal:\n  %s xspin send --to %s FILE\n",
		addr, lab.NIC.Device, lab.NIC.Namespace, c.Store.Dir, by, hint("lab exec host --"), addr)
	if socket != "" {
		s += fmt.Sprintf("  sudo XSPIN_SOCKET=%s xspin stats\n", socket)
	}
	if c.Into != file.IntoFile {
		s += fmt.Sprintf("The window has %s of %s, each for a message. While all are taken, the sender of another one\nhears nothing; it tries for 2 s, or up to 15 s: see xspin send --retries.\n",
			count(places, "place"), file.Bytes(c.Store.MaxSize))
	}
	return s
}

// writeReceived writes a line about a message.
func writeReceived(w io.Writer, r file.Received) {
	if r.Err != nil {
		fmt.Fprintf(w, "not received: message %d from %s: %v\n", r.Number, r.Source, r.Err)
		return
	}
	if r.Took == 0 { // an application does not know it
		fmt.Fprintf(w, "%s  %s  %s\n", r.SHA256, r.Path, file.Bytes(r.Bytes))
		return
	}
	fmt.Fprintf(w, "%s  %s  %s in %v, %.3f Gbit/s\n", r.SHA256, r.Path, file.Bytes(r.Bytes), r.Took.Round(time.Microsecond), gbps(r.Bytes, r.Took))
}

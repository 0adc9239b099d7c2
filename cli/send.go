// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/slmp"
)

// newSendCmd returns `xspin send`.
func newSendCmd() *cobra.Command {
	var f sendFlags
	cmd := &cobra.Command{
		Use:   "send --to ADDR[:PORT] FILE...|-",
		Short: "Send files as SLMP messages, to XsPIN or FPsPIN; needs no privileges",
		Long: `Send each FILE as one SLMP message, standard input for -, and wait until the
receiver's NIC has processed it. It uses a plain UDP socket and needs no privileges.

Several files share the socket, up to --parallel of them at a time. A single file
is not split. After the first failure no further file is started.

Modes:
  every       all segments are acknowledged, lost ones are retransmitted (default)
  first-last  only the first and the last segment are acknowledged; segments lost
              between them stay lost. Set a --gap that the receiver can follow.
  none        nothing is acknowledged, nothing waits

XsPIN acknowledges many segments at a time, FPsPIN each one; the sender detects
which. With --plain XsPIN also acknowledges each one.`,
		Example: `  xspin send --to 10.0.0.1 image.iso
  tar c src | xspin send --to 10.0.0.1 -
  xspin send --to [fe80::1%eth0]:9330 --parallel 8 *.dat
  xspin send --to 10.0.0.1 --window 256 --align 64 --repeat 10 --json 1g.bin`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("send: no FILE: name files, or - for standard input")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := f.config()
			if err == nil {
				err = runSend(cmd, f, cfg, args)
			}
			if err != nil {
				return fmt.Errorf("send: %w", err)
			}
			return nil
		},
	}
	f.bind(cmd.Flags())
	return cmd
}

// sendFlags are the flags as typed.
type sendFlags struct {
	to, window, mode         string
	gap, timeout             time.Duration
	parallel, repeat         int
	align, payload, attempts int
	plain, json              bool
}

// sendModes are what --mode takes.
var sendModes = map[string]slmp.Mode{"every": slmp.EverySegment, "first-last": slmp.FirstLast, "none": slmp.Unacknowledged}

func (f *sendFlags) bind(fl *pflag.FlagSet) {
	fl.StringVar(&f.to, "to", "", fmt.Sprintf("the receiver, address or address:port (default port %d)", slmp.Port))
	fl.StringVar(&f.mode, "mode", "every", "what is acknowledged: every segment, first-last, or none")
	flags.OneOf(fl, "mode", slices.Sorted(maps.Keys(sendModes)))
	fl.StringVar(&f.window, "window", "auto", "segments in flight per message, or auto to find out")
	fl.DurationVar(&f.gap, "gap", 0, "minimum time between two segments, such as 20us")
	fl.BoolVar(&f.plain, "plain", false, "one acknowledgement per segment, as FPsPIN does it, also from XsPIN")
	fl.IntVar(&f.parallel, "parallel", 4, "files in flight at a time")
	fl.IntVar(&f.repeat, "repeat", 1, "send each file this many times, each time as a message of its own")
	fl.IntVar(&f.align, "align", 1, "round the bytes per segment down to a multiple of this; FPsPIN's file transfer wants 64")
	fl.IntVar(&f.payload, "payload", 0, "bytes per segment before rounding, 0 for what the path's MTU allows")
	fl.IntVar(&f.attempts, "retries", 8, "consecutive retransmissions without any answer before giving up; of a message that has had none for 15 s at most")
	fl.DurationVar(&f.timeout, "timeout", 0, "limit for the whole command, 0 for as long as the receiver answers")
	fl.BoolVar(&f.json, "json", false, "print one JSON document")
}

const maxParallel = 4096

// config checks the flags.
func (f sendFlags) config() (c slmp.Config, err error) {
	mode, known := sendModes[f.mode]
	window := 0
	if f.window != "auto" {
		window, err = strconv.Atoi(f.window)
		if err != nil || window < 1 || window > slmp.MaxWindow {
			return c, flags.Error("window", f.window, fmt.Sprintf("want auto, or segments, 1 to %d", slmp.MaxWindow))
		}
	}
	switch {
	case f.to == "":
		return c, errors.New("--to is missing: the receiver's address, such as --to 10.0.0.1")
	case !known:
		return c, flags.Error("mode", f.mode, "want every, first-last or none")
	case f.gap < 0:
		return c, flags.Error("gap", f.gap, "want 0 or more")
	case f.timeout < 0:
		return c, flags.Error("timeout", f.timeout, "want 0 or more")
	case f.parallel < 1 || f.parallel > maxParallel:
		return c, flags.Error("parallel", f.parallel, fmt.Sprintf("want 1 to %d", maxParallel))
	case f.repeat < 1:
		return c, flags.Error("repeat", f.repeat, "want 1 or more")
	case f.align < 1:
		return c, flags.Error("align", f.align, "want 1 or more")
	case f.payload < 0:
		return c, flags.Error("payload", f.payload, "want 0 or more")
	case f.payload > 0 && f.payload < f.align:
		return c, flags.Error("payload", f.payload, fmt.Sprintf("is less than --align %d", f.align))
	case f.attempts < 1:
		return c, flags.Error("retries", f.attempts, "want 1 or more")
	case f.plain && mode != slmp.EverySegment:
		return c, flags.Error("plain", f.plain, "applies only to mode every")
	case window > 0 && mode != slmp.EverySegment:
		return c, flags.Error("window", f.window, "applies only to mode every: in the others, limit the rate with --gap")
	}
	return slmp.Config{
		Mode: mode, Window: window, Gap: f.gap, Plain: f.plain,
		Payload: f.payload, Align: f.align, Retries: f.attempts,
	}, nil
}

// sendReport is the document of --json.
type sendReport struct {
	Schema        int           `json:"schema"`
	To            string        `json:"to"`
	Mode          string        `json:"mode"`
	Payload       int           `json:"payload"` // bytes per segment
	Offload       string        `json:"offload"`
	Bytes         uint64        `json:"bytes"`   // acknowledged; mode none: sent
	Seconds       float64       `json:"seconds"` // from the first byte to the last acknowledgement
	Gbps          float64       `json:"gbps"`    // of Bytes, 10^9 bits a second
	Segments      uint64        `json:"segments"`
	Retransmitted uint64        `json:"retransmitted"`
	RTT           sendRTT       `json:"rtt_us"`
	Messages      []sendMessage `json:"messages"`
}

type sendRTT struct {
	Smoothed float64 `json:"smoothed"`
	Min      float64 `json:"min"`
}

type sendMessage struct {
	File          string  `json:"file"`
	ID            uint32  `json:"id"`
	Bytes         uint64  `json:"bytes"`
	Seconds       float64 `json:"seconds"`
	Gbps          float64 `json:"gbps"`
	Segments      uint64  `json:"segments"`
	Retransmitted uint64  `json:"retransmitted"`
	Error         string  `json:"error,omitempty"`
}

func gbps(n uint64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return math.Round(float64(n)*8/d.Seconds()) / 1e9
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

var errNotBegun = errors.New("not sent, after an error with another")

func runSend(cmd *cobra.Command, f sendFlags, cfg slmp.Config, files []string) (err error) {
	total, err := checkFiles(files, f.repeat)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	if f.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("--timeout of %v: %w", f.timeout, context.DeadlineExceeded))
		defer cancel()
	}
	conn, err := slmp.Dial(ctx, f.to, cfg)
	if err != nil {
		return err
	}
	defer conn.Close()

	s := &sending{conn: conn, cmd: cmd, jobs: make([]sendJob, 0, len(files)*f.repeat), total: total}
	for range f.repeat {
		for _, name := range files {
			s.jobs = append(s.jobs, sendJob{name: name, err: errNotBegun})
		}
	}
	quiet := s.watch()
	begun := time.Now()
	s.run(ctx, f.parallel)
	took := time.Since(begun)
	quiet()

	report := s.report(f.mode, took)
	if f.json {
		err = writeJSON(cmd.OutOrStdout(), report)
	} else if report.Bytes > 0 || !s.failed.Load() {
		_, err = fmt.Fprintln(cmd.OutOrStdout(), report)
	}
	return errors.Join(s.failure(ctx), err)
}

// checkFiles checks all files before anything is sent. It returns the sum of their sizes,
// 0 if that is not known.
func checkFiles(files []string, repeat int) (total int64, err error) {
	known := true
	for i, name := range files {
		if name == "-" {
			if repeat > 1 || slices.Contains(files[i+1:], "-") {
				return 0, errors.New("-: standard input can be read only once")
			}
			known = false
			continue
		}
		info, err := os.Stat(name)
		switch {
		case err != nil:
			return 0, err
		case info.IsDir():
			return 0, fmt.Errorf("%s is a directory: name the files in it, or pack it: tar c %s | xspin send ... -", name, filepath.Clean(name))
		case !info.Mode().IsRegular():
			known = false // opening a pipe here would be noticed by its writer
			continue
		case info.Size() > slmp.MaxMessage:
			return 0, fmt.Errorf("%s: %w: %d bytes, at most %d: split it", name, slmp.ErrTooLong, info.Size(), int64(slmp.MaxMessage))
		}
		file, err := os.Open(name)
		if err != nil {
			return 0, err
		}
		file.Close()
		total += info.Size() * int64(repeat)
	}
	if !known {
		return 0, nil
	}
	return total, nil
}

// sending is one run of the command.
type sending struct {
	conn  *slmp.Conn
	cmd   *cobra.Command
	jobs  []sendJob
	total int64

	next   atomic.Int64 // job to start next
	failed atomic.Bool
	before atomic.Uint64 // bytes of messages that have ended

	mu   sync.Mutex
	open map[*sendJob]slmp.Progress
}

// sendJob is one message. The goroutine that sends it writes it.
type sendJob struct {
	name string
	slmp.Result
	err error
}

func (s *sending) run(ctx context.Context, parallel int) {
	var wg sync.WaitGroup
	for range min(parallel, len(s.jobs)) {
		wg.Go(func() {
			for !s.failed.Load() {
				i := s.next.Add(1) - 1
				if i >= int64(len(s.jobs)) {
					return
				}
				j := &s.jobs[i]
				if j.Result, j.err = s.send(ctx, j); j.err != nil {
					s.failed.Store(true)
				}
			}
		})
	}
	wg.Wait()
}

func (s *sending) send(ctx context.Context, j *sendJob) (slmp.Result, error) {
	var r io.Reader = s.cmd.InOrStdin()
	if j.name != "-" {
		file, err := os.Open(j.name)
		if err != nil {
			return slmp.Result{}, err
		}
		defer file.Close()
		r = file
	}
	var o slmp.Options
	if s.open != nil {
		o.Progress = func(p slmp.Progress) {
			s.mu.Lock()
			s.open[j] = p
			s.mu.Unlock()
		}
		defer func() {
			s.mu.Lock()
			s.before.Add(s.open[j].Bytes)
			delete(s.open, j)
			s.mu.Unlock()
		}()
	}
	result, err := s.conn.Send(ctx, r, o)
	if err != nil {
		err = fmt.Errorf("%s: %w", j.name, err)
	}
	var m *slmp.MessageError
	if errors.As(err, &m) && errors.Is(m.Err, slmp.ErrSilent) && !m.Answered {
		// SLMP has no way to say so.
		err = fmt.Errorf("%w. A running receiver may refuse a message because of its length, or because no receive is posted: see xspin log on its machine", err)
	}
	return result, err
}

// failure joins the errors of the messages that were started, each error once. Of those that
// were stopped, as ctx was canceled, it tells how many there are.
func (s *sending) failure(ctx context.Context) error {
	cause := context.Cause(ctx)
	canceled := errors.Is(cause, context.Canceled) // and not by --timeout
	var errs []error
	left, parts := 0, 0
	for i := range s.jobs {
		switch err := s.jobs[i].err; {
		case err == errNotBegun:
			left++
		case canceled && errors.Is(err, context.Canceled):
			parts++
		case err != nil:
			errs = append(errs, err)
		}
	}
	switch {
	case canceled && left+parts > 0:
		errs = append(errs, &stoppedError{cause, left, parts})
	case left > 0:
		errs = append(errs, fmt.Errorf("%s not sent", were(left, "more message")))
	}
	return errors.Join(errs...)
}

// A stoppedError says what a signal has kept from being sent.
type stoppedError struct {
	cause       error
	left, parts int // messages of which nothing was sent, and those of which some was
}

func (e *stoppedError) Error() string {
	text := "stopped by a signal: "
	switch {
	case e.left == 0:
		return text + were(e.parts, "message") + " sent only in part"
	case e.parts == 0:
		return text + were(e.left, "message") + " not sent"
	}
	return text + were(e.left, "message") + fmt.Sprintf(" not sent, and %d only in part", e.parts)
}

func (e *stoppedError) Unwrap() error { return e.cause }

// were counts, for the beginning of a sentence.
func were(n int, what string) string {
	if n == 1 {
		return "1 " + what + " was"
	}
	return count(n, what) + " were"
}

func (s *sending) report(mode string, took time.Duration) *sendReport {
	st := s.conn.Stats()
	r := &sendReport{
		Schema: 1, To: s.conn.RemoteAddr().String(), Mode: mode, Payload: st.Payload, Offload: st.Offload.String(),
		Seconds: took.Seconds(), RTT: sendRTT{micros(st.RTT), micros(st.MinRTT)},
	}
	for i := range s.jobs {
		j := &s.jobs[i]
		m := sendMessage{
			File: j.name, ID: j.ID, Bytes: j.Bytes, Seconds: j.Duration.Seconds(), Gbps: gbps(j.Bytes, j.Duration),
			Segments: j.Segments, Retransmitted: j.Retransmitted,
		}
		if j.err != nil {
			m.Error = j.err.Error()
		}
		r.Bytes += j.Bytes
		r.Segments += j.Segments
		r.Retransmitted += j.Retransmitted
		r.Messages = append(r.Messages, m)
	}
	r.Gbps = gbps(r.Bytes, took)
	return r
}

// String is the report for people.
func (r *sendReport) String() string {
	var b strings.Builder
	done := 0
	for i := range r.Messages {
		if r.Messages[i].Error == "" {
			done++
		}
	}
	switch n := len(r.Messages); {
	case done < n:
		fmt.Fprintf(&b, "%d of %s, and parts of others: ", done, count(n, "message"))
	case n > 1:
		fmt.Fprintf(&b, "%d messages, ", n)
	}
	fmt.Fprintf(&b, "%s in %.3f s: %.3f Gbit/s. %s of up to %d bytes", file.Bytes(r.Bytes), r.Seconds, r.Gbps, count(int(r.Segments), "segment"), r.Payload)
	fmt.Fprintf(&b, ", %d sent again", r.Retransmitted)
	if r.RTT.Smoothed > 0 {
		fmt.Fprintf(&b, ", round trip %.0f us (least %.0f)", r.RTT.Smoothed, r.RTT.Min)
	}
	return b.String()
}

// watch draws a line on the terminal that shows the progress, until the function that
// it returns is called. Without a terminal it does nothing.
func (s *sending) watch() (stop func()) {
	term, ok := s.cmd.ErrOrStderr().(*os.File)
	if !ok {
		return func() {}
	}
	if _, err := unix.IoctlGetTermios(int(term.Fd()), unix.TCGETS); err != nil {
		return func() {}
	}
	s.open = map[*sendJob]slmp.Progress{}
	done, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		begun, tick := time.Now(), time.NewTicker(200*time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				fmt.Fprint(term, "\r\x1b[K")
				return
			case <-tick.C:
				bytes := s.bytes()
				fmt.Fprint(term, "\r\x1b[K"+progressLine(bytes, uint64(s.total), s.conn.Stats().Retransmitted, time.Since(begun)))
			}
		}
	}()
	return func() {
		close(done)
		<-gone
	}
}

// bytes returns how many bytes are acknowledged.
func (s *sending) bytes() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.before.Load()
	for _, p := range s.open {
		n += p.Bytes
	}
	return n
}

// progressLine returns what watch draws. It fits on one line of most terminals.
func progressLine(done, total, again uint64, since time.Duration) string {
	rate := fmt.Sprintf("%.2f Gbit/s  %d again", gbps(done, since), again)
	if total == 0 {
		return file.Bytes(done) + "  " + rate
	}
	const width = 24
	part := min(float64(done)/float64(total), 1)
	full := int(part * width)
	line := fmt.Sprintf("[%s%s] %3.0f %%  %s of %s  %s", strings.Repeat("=", full), strings.Repeat(" ", width-full), 100*part, file.Bytes(done), file.Bytes(total), rate)
	if done > 0 && done < total {
		left := time.Duration(float64(since) * (1/part - 1))
		line += fmt.Sprintf("  %v left", left.Round(time.Second))
	}
	return line
}

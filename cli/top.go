// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/nic"
)

// newTopCmd returns `xspin top`.
func newTopCmd() *cobra.Command {
	var interval time.Duration
	var n int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "top",
		Short: "What contexts and HPUs of the daemon are doing right now",
		Long: `Show what happens on the interfaces, in the contexts and on the HPUs of the
daemon, once per interval, until q or Ctrl-C. All numbers are per second, except:

  OPEN       messages in flight
  HPU%       handler time: 100 is one HPU, all of the time
  IN FLIGHT  buffers of the context on the receive queue with the most
  WAIT       events and requests that the application has not taken
  BUSY%      time that an HPU has spent on batches
  BATCH      packets in a batch
  DEPTH      buffers on their way to an HPU, or held by it

DROP are packets that handlers dropped, FAIL handlers that failed, panicked or ran
too long, REFUSED and SPILL frames for which the context had no credit: dropped, or
left to the Linux stack. SENT are frames of handlers, ACKS the acknowledgements of
messages. FULL are requests for which the ring to the application
had no room.

Without a terminal it prints one report as text, or as many as -n says. With --json
each report is a document, also on a terminal; its numbers are per second, except
counts (open, waiting, in_flight, stuck, depth), batch, and percentages.`,
		Example: `  xspin top
  xspin top --interval 5s -n 12 > minute.txt
  xspin top --json | jq '.contexts[] | {name, packets}'`,
		Args: cobra.NoArgs,
	}
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "from one report to the next, 100ms or more")
	cmd.Flags().IntVarP(&n, "number", "n", 0, "end after this many reports (default: 1 without a terminal or with --json)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON document for each report")
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case interval < 100*time.Millisecond:
			return fmt.Errorf("top: %w", flags.Error("interval", interval, "want 100ms or more"))
		case n < 0:
			return fmt.Errorf("top: %w", flags.Error("number", n, "want 1 or more"))
		}
		c, err := dial()
		if err != nil {
			return err
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
		defer stop()
		t := &top{sample: func() (*sample, error) { return takeSample(ctx, c) }, interval: interval, reports: n, json: asJSON}
		if out, ok := cmd.OutOrStdout().(*os.File); ok && !asJSON && isTerminal(out) && isTerminal(cmd.InOrStdin()) {
			err = t.live(ctx, cmd.InOrStdin().(*os.File), out)
		} else {
			err = t.plain(ctx, cmd.OutOrStdout())
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("top: %w", err)
		}
		return nil
	}
	return cmd
}

// A sample is the state of the daemon at a time.
type sample struct {
	at       time.Time
	nics     []nic.Stats
	contexts []control.ContextInfo
	status   *control.Status
}

func takeSample(ctx context.Context, c *control.Client) (*sample, error) {
	s := &sample{}
	var err1, err2, err3 error
	err1 = c.Stats(ctx, &s.nics)
	s.at = time.Now()
	s.contexts, err2 = c.Contexts(ctx)
	s.status, err3 = c.Status(ctx)
	return s, errors.Join(err1, err2, err3)
}

// top repeatedly shows the difference of two samples.
type top struct {
	sample   func() (*sample, error)
	interval time.Duration
	reports  int // 0: no end on a terminal, else 1
	json     bool
}

// plain prints reports one after the other, as text or JSON.
func (t *top) plain(ctx context.Context, out io.Writer) error {
	before, err := t.sample()
	if err != nil {
		return err
	}
	tick := time.NewTicker(t.interval)
	defer tick.Stop()
	for i := range max(t.reports, 1) {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		now, err := t.sample()
		if err != nil {
			return err
		}
		if err := t.print(out, before, now, i == 0); err != nil {
			return err
		}
		before = now
	}
	return nil
}

func (t *top) print(out io.Writer, before, now *sample, first bool) error {
	if t.json {
		return writeJSON(out, newTopReport(before, now))
	}
	var b strings.Builder
	if !first {
		b.WriteByte('\n')
	}
	for _, l := range page(before, now, 0) {
		b.WriteString(l.text + "\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// live shows reports on a terminal.
func (t *top) live(ctx context.Context, in, out *os.File) (err error) {
	before, err := t.sample()
	if err != nil {
		return err
	}
	s, err := newScreen(in, out)
	if err != nil {
		return err
	}
	defer s.restore()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	keys := s.keys()
	tick := time.NewTicker(t.interval)
	defer tick.Stop()
	now := before
	show := func() error {
		width, height := s.size()
		_, err := out.WriteString(fit(page(before, now, width), width, height))
		return err
	}
	for shown := 0; ; {
		if err := show(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case key, ok := <-keys:
			if !ok {
				return nil // the terminal is gone
			}
			if key == 'q' || key == 'Q' {
				return nil
			}
		case <-resized:
		case <-tick.C:
			next, err := t.sample()
			if err != nil {
				return err
			}
			before, now = now, next
			if shown++; shown == t.reports {
				return show()
			}
		}
	}
}

// A pageLine is a line of a report.
type pageLine struct {
	text string
	head bool // of a table
}

// fit cuts a page to a screen, and returns what draws it without flickering.
func fit(lines []pageLine, width, height int) string {
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, l := range lines[:min(len(lines), height)] {
		if i == height-1 && len(lines) > height {
			l = pageLine{text: fmt.Sprintf("... %s more", count(len(lines)-i, "line"))}
		}
		if i > 0 {
			b.WriteString("\r\n")
		}
		text := []rune(l.text)
		text = text[:min(len(text), width)]
		if l.head {
			fmt.Fprintf(&b, "\x1b[7m%-*s\x1b[m", width, string(text))
		} else {
			b.WriteString(string(text))
		}
		b.WriteString("\x1b[K")
	}
	b.WriteString("\x1b[J")
	return b.String()
}

// columns lays out a table: each column is as wide as needed, with numbers on the right.
type columns struct {
	left []bool   // columns of words
	drop []string // columns to drop on a narrow screen, in this order
	rows [][]string
}

func (t *columns) row(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		switch v := c.(type) {
		case float64:
			row[i] = short(v)
		default:
			row[i] = fmt.Sprint(v)
		}
	}
	t.rows = append(t.rows, row)
}

// lines returns the lines. On a screen that is too narrow it leaves columns out; 0 is any
// width.
func (t *columns) lines(screen int) []pageLine {
	width := make([]int, len(t.rows[0])) // 0: left out
	total := -2
	for i := range width {
		for _, r := range t.rows {
			width[i] = max(width[i], utf8.RuneCountInString(r[i]))
		}
		total += width[i] + 2
	}
	for _, name := range t.drop {
		if i := slices.Index(t.rows[0], name); screen > 0 && total > screen {
			total -= width[i] + 2
			width[i] = 0
		}
	}
	var all []pageLine
	for n, r := range t.rows {
		var cells []string
		for i, c := range r {
			switch {
			case width[i] == 0:
			case t.left[i]:
				cells = append(cells, fmt.Sprintf("%-*s", width[i], c))
			default:
				cells = append(cells, fmt.Sprintf("%*s", width[i], c))
			}
		}
		all = append(all, pageLine{strings.TrimRight(strings.Join(cells, "  "), " "), n == 0})
	}
	return all
}

// short writes a number in five columns or so.
func short(v float64) string {
	for _, u := range []struct {
		at, unit float64
		name     string
	}{{1e12, 1e12, "T"}, {999.5e6, 1e9, "G"}, {999.5e3, 1e6, "M"}, {9999.5, 1e3, "k"}} {
		if v >= u.at {
			return digits(v/u.unit) + u.name
		}
	}
	if v >= 9.95 || v == 0 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.1f", v)
}

// digits writes a number with three digits.
func digits(v float64) string {
	switch {
	case v >= 99.95:
		return fmt.Sprintf("%.0f", v)
	case v >= 9.995:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// page returns the lines of a report for a screen of some width, 0 for any.
func page(before, now *sample, width int) []pageLine {
	r := newTopReport(before, now)
	lines := []pageLine{{text: fmt.Sprintf("xspin top  %s  daemon %d, up %v, %s, %s", r.Time.Format(time.TimeOnly), r.PID,
		r.Time.Sub(r.Started).Round(time.Second), count(len(r.Interfaces), "interface"), count(len(r.Contexts), "context"))}}
	lines = append(lines, pageLine{})
	lines = append(lines, r.interfaceLines(width)...)
	lines = append(lines, pageLine{})
	lines = append(lines, r.contextLines(width)...)
	lines = append(lines, pageLine{})
	return append(lines, r.hpuLines(width)...)
}

func (r *topReport) interfaceLines(width int) []pageLine {
	t := columns{left: make([]bool, 10), drop: []string{"COPY", "MALFORMED", "SPILL", "MODE", "STUCK"}}
	t.left[0], t.left[1], t.left[2] = true, true, true
	t.row("INTERFACE", "MODE", "COPY", "SEEN", "TO LINUX", "TO HPUS", "REFUSED", "SPILL", "MALFORMED", "STUCK")
	for _, n := range r.Interfaces {
		copied := "copy"
		if n.ZeroCopy {
			copied = "zero-copy"
		}
		name := n.Name
		if n.Link != "up" && n.Link != "" {
			name += " (" + n.Link + ")"
		}
		t.row(name, n.Mode, copied, n.Seen, n.ToLinux, n.ToHPUs, n.Refused, n.Spilled, n.Malformed, n.Stuck)
	}
	return t.lines(width)
}

func (r *topReport) contextLines(width int) []pageLine {
	t := columns{left: make([]bool, 18), drop: []string{"ACKS", "SENT", "SPILL", "FULL", "REQUESTS", "IN FLIGHT", "MESSAGES", "HOOK", "WAIT", "FAIL", "STATE"}}
	t.left[0], t.left[1], t.left[2], t.left[17] = true, true, true, true
	t.row("CONTEXT", "STATE", "HOOK", "PACKETS", "MESSAGES", "OPEN", "HPU%", "DROP", "FAIL", "REFUSED", "SPILL", "SENT", "ACKS", "REQUESTS", "FULL", "WAIT", "IN FLIGHT", "ATTACHED")
	for i := range r.Contexts {
		c := &r.Contexts[i]
		messages, open := any("-"), any("-")
		if m := c.Messages; m != nil {
			messages, open = m.Ended, m.Open
		}
		requests, full, waiting := any("-"), any("-"), any("-")
		if q := c.Queue; q != nil {
			requests, full, waiting = q.Requests, q.Full, q.Waiting
		}
		t.row(c.Name, c.State, orElse(c.Hook, "-"), c.Packets, messages, open, fmt.Sprintf("%.1f", c.HPU), c.Dropped, c.Failed, c.Refused, c.Spilled, c.Sent, c.Acks,
			requests, full, waiting, c.InFlight, attached(c.Attached))
	}
	return t.lines(width)
}

func (r *topReport) hpuLines(width int) []pageLine {
	t := columns{left: make([]bool, 6)}
	t.left[0] = true
	t.row("INTERFACE", "HPU", "PACKETS", "BUSY%", "BATCH", "DEPTH")
	for rest := r.HPUs; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(h hpuReport) bool { return h.Interface != rest[0].Interface })
		if n < 0 {
			n = len(rest)
		}
		hpus := rest[:n]
		rest = rest[n:]
		// Only if all are idle: lines must not come and go with every packet.
		if n > 1 && !slices.ContainsFunc(hpus, hpuReport.works) {
			t.row(hpus[0].Interface, fmt.Sprintf("%d idle", n), 0, "0.0", "-", 0)
			continue
		}
		for _, h := range hpus {
			batch := any("-")
			if h.Batch > 0 {
				batch = fmt.Sprintf("%.1f", h.Batch)
			}
			t.row(h.Interface, h.HPU, h.Packets, fmt.Sprintf("%.1f", h.Busy), batch, h.Depth)
		}
	}
	return t.lines(width)
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
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
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/nic"
)

// newTopCmd returns `xspin top`.
func newTopCmd() *cobra.Command {
	var interval time.Duration
	var n int
	cmd := &cobra.Command{
		Use:   "top",
		Short: "What contexts and HPUs of the daemon do right now",
		Long: `Show what happens on the interfaces, in the contexts and on the HPUs of the
daemon, once in an interval, until q or Ctrl-C. All numbers are per second, but:

  OPEN       messages in flight
  HPU%       handler time: 100 is what one HPU can do, all of the time
  IN FLIGHT  buffers of the context on the receive queue with the most
  WAIT       events and requests that the application has not taken
  BUSY%      time that a HPU has spent on batches
  BATCH      packets in one
  DEPTH      buffers on their way to a HPU, or held by it

DROP are packets that handlers dropped, FAIL handlers that failed, panicked or ran
too long, REFUSED and SPILL frames for which the context had no credit: dropped, or
left to the Linux stack. FULL are requests for which the ring to the application
had no room.

Without a terminal it prints one report as text, or as many as -n says.`,
		Example: `  xspin top
  xspin top --interval 5s -n 12 > minute.txt`,
		Args: cobra.NoArgs,
	}
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "from one report to the next, 100ms or more")
	cmd.Flags().IntVarP(&n, "number", "n", 0, "end after so many reports (default: 1 without a terminal)")
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case interval < 100*time.Millisecond:
			return fmt.Errorf("top: %w", flagError("interval", interval, "want 100ms or more"))
		case n < 0:
			return fmt.Errorf("top: %w", flagError("number", n, "want 1 or more"))
		}
		c, err := dial()
		if err != nil {
			return err
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
		defer stop()
		t := &top{sample: func() (*sample, error) { return takeSample(ctx, c) }, interval: interval, reports: n}
		if out, ok := cmd.OutOrStdout().(*os.File); ok && isTerminal(out) && isTerminal(cmd.InOrStdin()) {
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

// A sample is all that top looks at, at a time.
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

// top shows the difference of two samples, again and again.
type top struct {
	sample   func() (*sample, error)
	interval time.Duration
	reports  int // 0: no end on a terminal, else 1
}

// plain prints reports as text.
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
		if i > 0 {
			fmt.Fprintln(out)
		}
		for _, l := range page(before, now, 0) {
			if _, err := fmt.Fprintln(out, l.text); err != nil {
				return err
			}
		}
		before = now
	}
	return nil
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

// fit cuts a page to a screen, and returns what draws it without a flicker.
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

// columns are as wide as they must be. Numbers are on the right.
type columns struct {
	left []bool   // those of words
	drop []string // those that a narrow screen can do without, in this order
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

// lines returns them. On a screen of some width they leave columns out, for the rest
// to fit; 0 is any width.
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

// digits writes three of them.
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
	p := pager{seconds: now.at.Sub(before.at).Seconds(), width: width}
	lines := []pageLine{{text: fmt.Sprintf("xspin top  %s  daemon %d, up %v, %s, %s", now.at.Format(time.TimeOnly), now.status.PID,
		now.at.Sub(now.status.Started).Round(time.Second), count(len(now.nics), "interface"), count(len(now.contexts), "context"))}}
	lines = append(lines, pageLine{})
	lines = append(lines, p.nics(before, now)...)
	lines = append(lines, pageLine{})
	lines = append(lines, p.contexts(before, now)...)
	lines = append(lines, pageLine{})
	return append(lines, p.hpus(before, now)...)
}

// A pager knows the time between two samples.
type pager struct {
	seconds float64
	width   int // of the screen, 0 for any
}

// rate is per second. What has begun anew began at 0.
func (p pager) rate(was, is uint64) float64 {
	if is < was {
		was = 0
	}
	if p.seconds <= 0 {
		return 0
	}
	return float64(is-was) / p.seconds
}

// percent is a part of the time.
func (p pager) percent(was, is time.Duration) string {
	return fmt.Sprintf("%.1f", p.rate(uint64(was), uint64(is))/1e7)
}

func nicOf(s *sample, name string) *nic.Stats {
	for i := range s.nics {
		if s.nics[i].Interface == name {
			return &s.nics[i]
		}
	}
	return &nic.Stats{}
}

func (p pager) nics(before, now *sample) []pageLine {
	t := columns{left: make([]bool, 10), drop: []string{"COPY", "MALFORMED", "SPILL", "MODE", "STUCK"}}
	t.left[0], t.left[1], t.left[2] = true, true, true
	t.row("INTERFACE", "MODE", "COPY", "SEEN", "TO LINUX", "TO HPUS", "REFUSED", "SPILL", "MALFORMED", "STUCK")
	for i := range now.nics {
		n := &now.nics[i]
		was, is := nicOf(before, n.Interface).Program, n.Program
		copied := "copy"
		if n.ZeroCopy {
			copied = "zero-copy"
		}
		t.row(n.Interface, n.Mode, copied, p.rate(was.Seen, is.Seen), p.rate(was.Passed, is.Passed), p.rate(was.Redirected, is.Redirected),
			p.rate(was.Refused, is.Refused), p.rate(was.Spilled, is.Spilled), p.rate(was.Malformed, is.Malformed), n.Stuck)
	}
	return t.lines(p.width)
}

func (p pager) contexts(before, now *sample) []pageLine {
	t := columns{left: make([]bool, 16), drop: []string{"SENT", "SPILL", "FULL", "REQUESTS", "IN FLIGHT", "MESSAGES", "WAIT", "FAIL", "STATE"}}
	t.left[0], t.left[1], t.left[15] = true, true, true
	t.row("CONTEXT", "STATE", "PACKETS", "MESSAGES", "OPEN", "HPU%", "DROP", "FAIL", "REFUSED", "SPILL", "SENT", "REQUESTS", "FULL", "WAIT", "IN FLIGHT", "ATTACHED")
	old := map[string]*control.ContextInfo{}
	for i := range before.contexts {
		old[before.contexts[i].Name] = &before.contexts[i]
	}
	contexts := slices.Clone(now.contexts)
	slices.SortStableFunc(contexts, func(a, b control.ContextInfo) int { return cmp.Compare(a.Name, b.Name) })
	for i := range contexts {
		x := &contexts[i]
		was := old[x.Name]
		if was == nil || was.ID != x.ID {
			was = &control.ContextInfo{}
		}
		a, b := &was.HandlerStats, &x.HandlerStats
		ends := func(c *control.ContextInfo) (n uint64) {
			if m := c.MessageStats; m != nil {
				n = m.Ended
			}
			return n
		}
		messages, open := any("-"), any("-")
		if x.MessageStats != nil {
			messages, open = p.rate(ends(was), ends(x)), x.MessageStats.Open
		}
		requests, full, waiting := any("-"), any("-"), any("-")
		if x.Pair != nil {
			q := was.Pair
			if q == nil {
				q = &hostq.PairStats{}
			}
			requests, full, waiting = p.rate(q.Requests, x.Pair.Requests), p.rate(q.Full, x.Pair.Full), x.Pair.Waiting
		}
		c1, c2 := contextOf(before, was), contextOf(now, x)
		t.row(x.Name, x.State, p.rate(a.Handled, b.Handled), messages, open, p.percent(a.HandlerSum, b.HandlerSum),
			p.rate(a.Dropped, b.Dropped), p.rate(a.Failed+a.Panics+a.Overruns, b.Failed+b.Panics+b.Overruns),
			p.rate(c1.Refused, c2.Refused), p.rate(c1.Spilled, c2.Spilled), p.rate(a.Sent+a.Acks, b.Sent+b.Acks),
			requests, full, waiting, c2.InFlight, attached(x))
	}
	return t.lines(p.width)
}

// contextOf returns what the NIC says of a context.
func contextOf(s *sample, x *control.ContextInfo) *nic.ContextStats {
	n := nicOf(s, x.Interface)
	for i := range n.Contexts {
		if c := &n.Contexts[i]; c.ID == x.ID && c.Name == x.Name {
			return c
		}
	}
	return &nic.ContextStats{}
}

func (p pager) hpus(before, now *sample) []pageLine {
	t := columns{left: make([]bool, 6)}
	t.left[0] = true
	t.row("INTERFACE", "HPU", "PACKETS", "BUSY%", "BATCH", "DEPTH")
	for i := range now.nics {
		n := &now.nics[i]
		old := nicOf(before, n.Interface).HPUs
		for k, h := range n.HPUs {
			var was hpu.Stats
			if k < len(old) {
				was = old[k]
			}
			batch := any("-")
			if b := p.rate(was.Batches, h.Batches); b > 0 {
				batch = fmt.Sprintf("%.1f", p.rate(was.Handled, h.Handled)/b)
			}
			t.row(n.Interface, h.HPU, p.rate(was.Handled, h.Handled), p.percent(was.Busy, h.Busy), batch, h.Occupancy)
		}
	}
	return t.lines(p.width)
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/control"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/nic"
)

// newStatsCmd returns `xspin stats`.
func newStatsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "stats [INTERFACE]",
		Short: "All counters of a running NIC, explained",
		Long: `Ask a running NIC, such as that of xspin demo pingpong --serve, for its counters.
Without an argument the one that runs is asked. A program of your own answers if
it has called ServeStats of its nic.NIC.`,
		Example: `  sudo xspin stats
  sudo xspin stats xs-nic --json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := pickNIC(args)
			if err != nil {
				return fmt.Errorf("stats: %w", err)
			}
			var s nic.Stats
			if err := control.Ask(name, &s); err != nil {
				return fmt.Errorf("stats: %w", err)
			}
			if asJSON {
				return writeJSON(cmd.OutOrStdout(), struct {
					Schema int `json:"schema"`
					*nic.Stats
				}{1, &s})
			}
			return writeStats(cmd.OutOrStdout(), &s)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

func pickNIC(args []string) (string, error) {
	if len(args) == 1 {
		return args[0], nil
	}
	names, err := control.Names()
	switch {
	case err != nil:
		return "", err
	case len(names) == 0:
		return "", fmt.Errorf("%w: start one, for example with `xspin demo pingpong --serve`, or call ServeStats in your program", control.ErrNone)
	case len(names) > 1:
		return "", errors.New("several NICs are running, name one: " + strings.Join(names, ", "))
	}
	return names[0], nil
}

// within says in which bucket of a histogram a percentile is.
func within(h *hpu.Histogram, percent uint64) string {
	var total, sum uint64
	for _, n := range h {
		total += n
	}
	if total == 0 {
		return "-"
	}
	for i, n := range h[:hpu.HistogramBuckets-1] {
		if sum += n; sum*100 >= total*percent {
			return "< " + time.Duration(1<<i).String()
		}
	}
	return ">= " + time.Duration(1<<(hpu.HistogramBuckets-2)).String()
}

// dropHelp explains why packets of messages were dropped.
var dropHelp = [mpq.Reasons]string{
	mpq.Messages: "no room for another message",
	mpq.Memory:   "no room for another hole, or too far ahead",
	mpq.NoHeader: "no room to hold it until the header packet comes",
	mpq.Overlap:  "bytes that came before, cut differently",
	mpq.TwoEnds:  "EOM in two places, or bytes behind it",
	mpq.Beyond:   "ends behind byte 4 GiB",
	mpq.Dead:     "of a message that has failed or was abandoned",
}

// writeStats explains the counters.
func writeStats(out io.Writer, s *nic.Stats) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(name string, value any, help string) { fmt.Fprintf(w, "  %s\t%v\t%s\n", name, value, help) }
	copied, multi := "copy", "no"
	if s.ZeroCopy {
		copied = "zero-copy"
	}
	if s.MultiBuffer {
		multi = "yes"
	}
	fmt.Fprintf(w, "%s: %s XDP, %s, multi-buffer %s, %s, table generation %d\n\n", s.Interface, s.Mode, copied, multi, count(s.Queues, "receive queue"), s.Generation)
	fmt.Fprintln(w, "Frames, counted by the XDP program")
	row("seen", s.Program.Seen, "all that came")
	row("passed", s.Program.Passed, "no ruleset matched: to the Linux stack")
	row("redirected", s.Program.Redirected, "to an HPU")
	row("refused", s.Program.Refused, "dropped: their context had no credit left")
	row("failed", s.Program.Failed, "matched, but could not be redirected: to the Linux stack")
	row("malformed", s.Program.Malformed, "matched, but not what their message format says: to the Linux stack")
	row("oversize", s.Program.Oversize, "matched, but too long for AF_XDP here: to the Linux stack")

	for _, c := range s.Contexts {
		state := ""
		if c.Stopped {
			state = ", STOPPED: a handler ran past its time limit"
		}
		fmt.Fprintf(w, "\nContext %d, %s%s\n", c.ID, c.Name, state)
		for _, r := range c.Rulesets {
			row(fmt.Sprintf("ruleset %d", r.Number), r.Matched, "frames matched by "+r.Name)
		}
		row("credits", c.Credits, "buffers it may have in flight on a receive queue")
		row("in flight", c.InFlight, "buffers it has, on the queue with the most")
		row("refused", c.Refused, "frames dropped for lack of credit")
		row("handled", c.Handled, "handlers that returned")
		row("dropped", c.Dropped, "of these, with Drop")
		row("failed", c.Failed, "of these, with Fail")
		row("panics", c.Panics, "handlers that panicked")
		row("overruns", c.Overruns, "handlers that ran past their time limit")
		row("unrun", c.Unrun, "packets given back without a handler")
		row("lost", c.Lost, "buffers that the kernel dropped on the way, credit returned")
		row("sent", c.Sent, "frames given to a tx ring")
		row("send full", c.SendFull, "sends refused: ring full, or no frame left")
		row("to stack", c.ToStack, "packets handed to the Linux stack")
		if m := c.Messages; m != nil {
			row("checksums", c.Checksums, "UDP checksums that are verified")
			row("corrupt", c.Corrupt, "packets dropped for their checksum")
			row("unverified", c.Unverified, "packets taken without a complete checksum")
			row("messages", m.Started, "that have begun")
			row("open", m.Open, "in flight now")
			row("complete", m.Ended, "every byte was processed, completion handler and event are done")
			row("failed", m.Failed, "a handler failed")
			row("abandoned", m.Abandoned, "incomplete: the sender went silent, or the context ended")
			row("discarded", m.Discarded, "incomplete, without a completion handler")
			row("refused", m.Refused, "nowhere to put them")
			row("acks", c.Acks, "answers given to a tx ring")
			row("ack full", c.AckFull, "answers not sent: ring full, or no frame left")
			row("duplicates", m.Duplicates, "segments that were processed before")
			row("waits", m.Waits, "segments again while they were being processed")
			row("held", m.Held, "packets that came before their message could begin")
			row("stray", c.Stray, "packets that are no segments")
			for r := mpq.None + 1; r < mpq.Reasons; r++ {
				if m.Dropped[r] > 0 {
					row("drop: "+r.String(), m.Dropped[r], dropHelp[r])
				}
			}
			row("events lost", c.EventsLost, "of messages that failed or were abandoned: nobody took them in time")
		}
		mean := time.Duration(0)
		if c.Handled > 0 {
			mean = c.HandlerSum / time.Duration(c.Handled)
		}
		row("handler mean", mean, "time from one packet to the next in a batch")
		row("handler p50", within(&c.HandlerTime, 50), "of 100 handlers 50 are within this")
		row("handler p99", within(&c.HandlerTime, 99), "of 100 handlers 99 are within this")
		for i, u := range c.User {
			if u.Count > 0 {
				row(fmt.Sprintf("counter %d", i), u.Sum, fmt.Sprintf("counted %d times, mean %.1f", u.Count, u.Mean()))
			}
		}
	}

	fmt.Fprintln(w, "\nHPU\thandled\tbatches\tbusy\toccupancy")
	for _, h := range s.HPUs {
		if h.Handled > 0 || h.Occupancy > 0 {
			fmt.Fprintf(w, "%d\t%d\t%d\t%v\t%d\n", h.HPU, h.Handled, h.Batches, h.Busy.Round(time.Microsecond), h.Occupancy)
		}
	}
	fmt.Fprintln(w, "\nAF_XDP sockets, all together")
	row("rx dropped", s.Sockets.RxDropped, "frames lost for want of a buffer")
	row("rx ring full", s.Sockets.RxRingFull, "frames lost because an HPU was slow")
	row("tx invalid", s.Sockets.TxInvalidDescs, "descriptors that the kernel refused")
	row("kicks", s.Sockets.Kicks, "system calls to send")
	row("kicks again", s.Sockets.KicksAgain, "of these, with more to send afterwards")
	fmt.Fprintln(w, "\nNIC")
	row("stack failures", s.StackFailures, "packets for the Linux stack that it refused")
	row("events lost", s.EventsLost, "that nobody took in time")
	row("stuck", s.Stuck, "handlers past their limit that have not returned")
	return w.Flush()
}

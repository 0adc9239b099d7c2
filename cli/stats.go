// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/internal/nicsock"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// newStatsCmd returns `xspin stats`.
func newStatsCmd() *cobra.Command {
	var asJSON bool
	var socket string
	cmd := &cobra.Command{
		Use:   "stats [INTERFACE]",
		Short: "All counters of a running NIC, explained",
		Long: `Ask running NICs for their counters: those of the daemon (xspin run), or, without
a daemon, those of a process with a NIC of its own, such as xspin demo pingpong --serve.
Your own program answers if it has called ServeStats of its nic.NIC.

Without an argument all interfaces of the daemon are shown, or else the one running
NIC. With --json, a NIC is one document; those of a daemon are in its list "nics".`,
		Example: `  sudo xspin stats
  sudo xspin stats xs-nic --json
  xspin stats --json | jq '.nics[].contexts[] | {name, handled, refused}'`,
		Args: wantArgs("[INTERFACE]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if len(args) == 1 {
				name = args[0]
			}
			all, err := daemonStats(cmd.Context(), socket, name)
			single := name != ""
			if errors.Is(err, errElsewhere) && socket == "" {
				var s *nic.Stats
				if s, err = processStats(name, err); err == nil {
					single, all = true, []nicStats{{Stats: s}}
				}
			}
			if err != nil {
				return fmt.Errorf("stats: %w", err)
			}
			type schema struct {
				Schema int `json:"schema"`
			}
			switch {
			case asJSON && single:
				return writeJSON(cmd.OutOrStdout(), struct {
					schema
					nicStats
				}{schema{1}, all[0]})
			case asJSON:
				return writeJSON(cmd.OutOrStdout(), struct {
					schema
					NICs []nicStats `json:"nics"`
				}{schema{1}, all})
			}
			for i := range all {
				if i > 0 {
					fmt.Fprintln(cmd.OutOrStdout())
				}
				if err := writeStats(cmd.OutOrStdout(), &all[i]); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.Flags().StringVar(&socket, "socket", "", "socket of the daemon (default XSPIN_SOCKET, or "+control.Socket+")")
	return cmd
}

// nicStats are the counters of a NIC, and of the queues of its contexts.
type nicStats struct {
	*nic.Stats
	Apps map[string]*hostq.PairStats `json:"apps,omitempty"` // by context, for a daemon's contexts with a queue
}

// errElsewhere is wrapped by errors of daemonStats if another process may have the NIC.
var errElsewhere = errors.New("no running NIC")

// daemonStats asks the daemon for its NICs, or for the named one.
func daemonStats(ctx context.Context, socket, name string) ([]nicStats, error) {
	c, err := control.Dial(socket)
	if errors.Is(err, control.ErrNoDaemon) && os.Getenv("XSPIN_SOCKET") == "" {
		return nil, fmt.Errorf("%w: %w", errElsewhere, err)
	}
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var all []nicStats
	if err := c.Stats(ctx, &all); err != nil {
		return nil, err
	}
	contexts, err := c.Contexts(ctx)
	if err != nil {
		return nil, err
	}
	var names []string
	for i := range all {
		s := &all[i]
		for _, x := range contexts {
			if x.Interface == s.Interface && x.Pair != nil {
				if s.Apps == nil {
					s.Apps = map[string]*hostq.PairStats{}
				}
				s.Apps[x.Name] = x.Pair
			}
		}
		if s.Interface == name {
			return all[i : i+1], nil
		}
		names = append(names, s.Interface)
	}
	if name == "" {
		if len(all) == 0 {
			return nil, errors.New("the daemon has no interface")
		}
		return all, nil
	}
	also := ""
	if slices.ContainsFunc(contexts, func(x control.ContextInfo) bool { return x.Name == name }) {
		also = fmt.Sprintf("; %s is a context: `xspin ctx show %s`", name, name)
	}
	return nil, fmt.Errorf("%w on %q: the daemon at %s has %s%s", errElsewhere, name, control.SocketPath(socket), orElse(strings.Join(names, ", "), "none"), also)
}

// processStats asks a process that has a NIC of its own. If there is none, it returns the
// daemon's error.
func processStats(name string, daemon error) (*nic.Stats, error) {
	var s nic.Stats
	name, err := pickNIC(name)
	if err == nil {
		err = nicsock.Ask(name, &s)
	}
	switch {
	case err == nil:
		return &s, nil
	case errors.Is(err, nicsock.ErrNone) && !errors.Is(err, os.ErrPermission):
		return nil, daemon
	}
	return nil, err
}

func pickNIC(name string) (string, error) {
	if name != "" {
		return name, nil
	}
	names, err := nicsock.Names()
	// The daemon's socket is in the same directory.
	names = slices.DeleteFunc(names, func(n string) bool { return n+".sock" == filepath.Base(control.Socket) })
	switch {
	case err != nil:
		return "", err
	case len(names) == 0:
		return "", nicsock.ErrNone
	case len(names) > 1:
		return "", errors.New("several NICs are running, name one: " + strings.Join(names, ", "))
	}
	return names[0], nil
}

// within returns the bucket of a histogram that a percentile is in.
func within(h *spin.Histogram, percent uint64) string {
	var total, sum uint64
	for _, n := range h {
		total += n
	}
	if total == 0 {
		return "-"
	}
	for i, n := range h[:spin.HistogramBuckets-1] {
		if sum += n; sum*100 >= total*percent {
			return "< " + time.Duration(1<<i).String()
		}
	}
	return ">= " + time.Duration(1<<(spin.HistogramBuckets-2)).String()
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// writeStats explains the counters.
func writeStats(out io.Writer, s *nicStats) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(name string, value any, help string) { fmt.Fprintf(w, "  %s\t%v\t%s\n", name, value, help) }
	copied := "copy"
	if s.ZeroCopy {
		copied = "zero-copy"
	}
	link := ""
	if s.Link != "up" && s.Link != "" {
		link = "LINK " + strings.ToUpper(s.Link) + ", "
	}
	xdp := s.Mode + " XDP"
	if s.Mode == "off" {
		xdp = "no XDP"
	}
	fmt.Fprintf(w, "%s: %s%s, %s, multi-buffer %s, %s, table generation %d\n\n", s.Interface, link, xdp, copied, yesNo(s.MultiBuffer), count(s.Queues, "receive queue"), s.Generation)
	fmt.Fprintln(w, "Frames, counted by the programs at xdp and tc")
	row("seen", s.Program.Seen, "all that arrived")
	row("passed", s.Program.Passed, "no ruleset matched: to the Linux stack")
	row("redirected", s.Program.Redirected, "to an HPU")
	row("kernel", s.Program.Kernel, "to handlers in eBPF")
	row("refused", s.Program.Refused, "dropped: their context had no credit left")
	row("spilled", s.Program.Spilled, "their context had no credit left, and spills: to the Linux stack")
	row("failed", s.Program.Failed, "matched, but could not be redirected: to the Linux stack")
	row("malformed", s.Program.Malformed, "matched, but not what their message format says: to the Linux stack")
	row("trains", s.Program.Trains, "matched, but several packets in one (docs/kernels.md): to the Linux stack")
	row("oversize", s.Program.Oversize, "matched, but too long for AF_XDP here, or for handlers in eBPF: to the Linux stack")

	for _, c := range s.Contexts {
		state, user := "", c.Tier != "kernel"
		if !user {
			state = ", in the kernel"
		}
		if c.Stopped {
			state = ", STOPPED: a handler ran past its time limit"
		}
		fmt.Fprintf(w, "\nContext %d, %s%s\n", c.ID, c.Name, state)
		for _, warning := range c.Warnings {
			fmt.Fprintf(w, "  WARNING: %s\n", warning)
		}
		for _, r := range c.Rulesets {
			row(fmt.Sprintf("ruleset %d", r.Number), r.Matched, "frames matched by "+r.Name)
		}
		row("active", yesNo(c.Active), "it gets packets, or can be triggered")
		switch {
		case c.HookWhy != "":
			row("hook", c.Hook, costOfXDP(c.HookWhy))
		case c.Hook != "":
			row("hook", c.Hook, "where its packets come from")
		}
		if user {
			row("share", c.Share, "weight of its HPU time")
			row("credits", c.Credits, "buffers it may have in flight on a receive queue")
			row("granted", c.Granted, "the same, while there is HPU time for all")
			row("in flight", c.InFlight, "buffers it has, on the queue with the most")
			row("refused", c.Refused, "frames dropped for lack of credit")
			row("spilled", c.Spilled, "frames left to the Linux stack for lack of credit")
		}
		for cpu, n := range c.CPUs {
			if n > 0 {
				row(fmt.Sprintf("CPU %d", cpu), n, "packets handled on it")
			}
		}
		row("handled", c.Handled, "handlers that returned")
		row("dropped", c.Dropped, "of these, with Drop")
		row("failed", c.Failed, "of these, with Fail or Segv")
		if user {
			row("panics", c.Panics, "handlers that panicked")
			row("overruns", c.Overruns, "handlers that ran past their time limit")
			row("unrun", c.Unrun, "packets given back without a handler")
			row("lost", c.Lost, "buffers that the kernel dropped on the way, credit returned")
			row("sent", c.Sent, "frames of handlers given to a tx ring")
			row("send full", c.SendFull, "sends refused: ring full, or no frame left")
		} else {
			row("sent", c.Sent, "frames that the kernel sent back")
		}
		row("to stack", c.ToStack, "packets handed to the Linux stack")
		if c.HandedOver > 0 {
			row("handed over", c.HandedOver, "packets that handlers in eBPF left to those on HPUs")
		}
		if c.Uncut > 0 {
			row("uncut", c.Uncut, "trains left to the Linux stack: nobody here cuts their kind, and handlers would write to their packets")
		}
		if c.Mixed > 0 {
			row("mixed", c.Mixed, "trains dropped: handlers wanted different things of their packets")
		}
		if c.Timers > 0 {
			row("timers", c.Timers, "timer handlers that returned")
		}
		if c.Triggers > 0 {
			row("triggers", c.Triggers, "host messages that were started")
		}
		if q := s.Apps[c.Name]; q != nil || c.Requests > 0 {
			row("requests", c.Requests, "of handlers to the application")
			row("unasked", c.Unasked, "of these, dropped because the ring was full")
			row("unanswered", c.Unanswered, "of these, given up: no answer in time, or no application")
			if q != nil {
				writeQueue(row, q)
			}
		}
		if m := c.Messages; m != nil {
			row("checksums", c.Checksums, "UDP checksums that are verified")
			row("corrupt", c.Corrupt, "packets dropped for their checksum")
			row("unverified", c.Unverified, "packets accepted without a complete checksum")
			row("messages", m.Started, "that have started")
			row("open", m.Open, "in flight now")
			row("complete", m.Ended, "every byte was processed, completion handler and event are done")
			row("failed", m.Failed, "a handler failed, or a complete message found no room for its event in time")
			row("abandoned", m.Abandoned, "incomplete: the sender fell silent, or the context ended")
			row("discarded", m.Discarded, "incomplete, without a completion handler")
			row("refused", m.Refused, "no place for them: no receive was posted")
			row("acks", c.Acks, "acknowledgements given to a tx ring")
			row("ack full", c.AckFull, "acknowledgements not sent: ring full, or no frame left")
			row("duplicates", m.Duplicates, "segments that were processed before")
			row("waits", m.Waits, "duplicates of segments that were still being processed")
			row("held", m.Held, "packets that arrived before their message was open")
			row("stray", c.Stray, "packets that are not segments, such as acknowledgements")
			for r := spin.NotDropped + 1; r < spin.DropReasons; r++ {
				if m.Dropped[r] > 0 {
					row("drop: "+r.String(), m.Dropped[r], r.Help())
				}
			}
			row("events lost", c.EventsLost, "of failed or abandoned messages: the event queue was full")
		}
		mean := time.Duration(0)
		if c.Handled > 0 {
			mean = c.HandlerSum / time.Duration(c.Handled)
		}
		timed := "time from one packet to the next in a batch"
		if !user {
			timed = "of one packet in 64, whose time is taken"
		}
		row("handler mean", mean, timed)
		row("handler p50", within(&c.HandlerTime, 50), "half of the handlers take at most this")
		row("handler p99", within(&c.HandlerTime, 99), "of 100 handlers 99 take at most this")
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
	row("rx dropped", s.Sockets.RxDropped, "frames lost for lack of a buffer")
	row("rx ring full", s.Sockets.RxRingFull, "frames lost because an HPU was slow")
	row("tx invalid", s.Sockets.TxInvalidDescs, "descriptors that the kernel refused")
	row("kicks", s.Sockets.Kicks, "system calls to send")
	row("kicks again", s.Sockets.KicksAgain, "of these, with more to send afterwards")
	fmt.Fprintln(w, "\nNIC")
	row("stack failures", s.StackFailures, "packets for the Linux stack that it refused")
	row("events lost", s.EventsLost, "faults that were not read in time")
	row("stuck", s.Stuck, "handlers past their limit that have not returned")
	return w.Flush()
}

// writeQueue explains the counters of the queue to an application.
func writeQueue(row func(name string, value any, help string), q *hostq.PairStats) {
	row("queue: events", q.Events, "given to the application")
	row("queue: lost", q.EventsLost, "events that were dropped for lack of room")
	row("queue: requests", q.Requests, "given to the application")
	row("queue: full", q.Full, "requests that found no room at first, each counted once")
	row("queue: responses", q.Responses, "that answered a waiting request")
	row("queue: late", q.Late, "responses to requests that were given up")
	row("queue: bogus", q.Bogus, "responses to no request")
	row("queue: outstanding", q.Outstanding, "requests without a response yet")
	row("queue: waiting", q.Waiting, "events and requests that the application has not taken")
	row("queue: rung", q.Rung, "system calls to wake the application")
	if q.Broken {
		row("queue: broken", "YES", "the application has broken the rules of the rings")
	}
}

// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/nic"
)

// An experiment of `xspin bench all`: its name and texts, and how it is measured.
type experiment struct {
	report.Experiment
	full, quick pace
	rows        []benchRows // that it takes from benches
	steps       []step      // what it measures besides, behind those
}

// A pace is how much of an experiment is measured.
type pace struct {
	runs  int           // of each side
	takes time.Duration // about, all together
}

// A step adds what it measures to the experiment: rows and plots.
type step func(context.Context, *trial) error

// A trial is an experiment that is being measured, in a lab.
type trial struct {
	*benchLab
	benchConfig
	quick bool
	e     *report.Experiment
}

// experiments are those of `xspin bench all`, in the order of the page.
var experiments = []experiment{
	{
		report.Experiment{
			Name: "pingpong", Title: "Round trips",
			Shows: "How long a ping takes that is answered by Linux, by handlers on the NIC, in Go or in eBPF, or by handlers that ask an application.",
			Method: "ICMP and UDP echo between two namespaces. The client, in a process of its own, spins; it is on one CPU, and who answers is on another. Handlers in eBPF answer from XDP, on the client's CPU; then the client's end has an XDP program, too, which lets all pass. At tc there is none on either end. " +
				"A point is the median of the medians of all runs, of 100 pings each after 20 that do not count. Runs of the five take turns. " +
				"Linux answers UDP by a socket in a process of its own that blocks, and ICMP in the kernel, on the client's CPU. HPUs spin, then sleep. The application shares the CPU of the HPUs, so they wait for each other. " +
				"The parts are means over the pings between the first and the third quartile of a run; dispatch is from the frame's arrival in the XDP program to the start of the handler.",
		},
		pace{20, 380 * time.Second}, pace{5, 13 * time.Second},
		[]benchRows{{"rtt", "", "-"}, {"kernel", "echo", "-"}}, []step{pingpongPlots},
	},
	{
		report.Experiment{
			Name: "packets", Title: "Packets per second",
			Shows: "How many packets per second reach a handler, by frame size and by number of HPUs, next to the most that the kernel and a bare AF_XDP loop can do.",
			Method: "A generator in the kernel sends UDP frames from one CPU, which also runs the XDP program of the other end of the veth pair; the receiver is on another CPU. " +
				"A point is the median of the packets delivered per second of the generator's run; the generator does not wait, so what the receiver cannot take is lost. " +
				"Where next to nothing is lost, the generator's CPU is the bound, with the XDP program and the kernel's copy on it, and what else runs there lowers the rate: other programs, of which a warning tells, and a thread of this process's Go runtime that wakes every 90 us, on that CPU or not as chance has it, so that a bare loop has two rates, a quarter apart. " +
				"XDP_DROP throws each frame away where it arrives. The bare loops take frames from AF_XDP sockets and give them back. The handler does nothing; packets are scheduled one by one, policy packet. Handlers in eBPF drop each frame, in XDP, so they are on the generator's CPU, as XDP_DROP is. " +
				"HPUs are vHPUs: threads serve them, one on each CPU named.",
		},
		pace{7, 220 * time.Second}, pace{3, 15 * time.Second},
		[]benchRows{{"rx", "", ""}, {"kernel", "packets", ""}}, []step{packetPlots},
	},
	{
		report.Experiment{
			Name: "messages", Title: "Files and messages",
			Shows: "How fast SLMP, FPsPIN's protocol for reliable messages, moves files and small messages, next to TCP and UDP.",
			Method: "The sender, in a process of its own, is on one CPU; on another a NIC with one HPU puts segments into memory by default deposit. Handlers in eBPF do that in XDP, on the sender's CPU, into a map that is the window; then the sender's end has an XDP program, too, which lets all pass, and takes acknowledgements from XDP. Files are in memory. " +
				"TCP and UDP are iperf3's, pinned alike. \"TCP\" and \"UDP\" have no XDP program on either end, and TCP has TSO and GSO on both. \"TCP without TSO/GSO\" has the NIC attached to the receiver's end, which takes both offloads from the sender's end of a veth pair: Linux cuts the stream before the interface, so that each segment is a frame, as for SLMP. (GSO is still listed as on: it is done by the sender's CPU then.) SLMP has one acknowledgement for many segments; \"one ack per segment\" has one for each. UDP sends as fast as it can, and loses what the receiver does not take. " +
				"In the sweeps of sizes and senders, each sender keeps as many messages on their way as the legend says. In that of windows, messages of handlers in Go that are sent at a time go to places of their own; handlers in eBPF have one at a time. " +
				"The parts of a segment, with handlers in Go, are differences of the HPU's busy time between contexts, each of which does one thing more than the one before: an empty payload handler; header and completion handlers too; the payload copied into memory; and messages acknowledged. Small differences are noise.",
		},
		pace{5, 560 * time.Second}, pace{3, 55 * time.Second},
		[]benchRows{{"slmp", "file,noop,small,policy,fairness", "file,small --size 128MiB"}, {"kernel", "messages", "messages --size 64MiB"}}, []step{messagePeers, messageWindows, messageSizes, messageParts},
	},
	{
		report.Experiment{
			Name: "tc", Title: "Handlers in eBPF at tc",
			Shows: "Files, messages and round trips by handlers in eBPF at tc, which take what a sender on the same machine has not cut, next to TCP, MPICH, Linux and XDP.",
			Method: "At the entry of Linux's stack a file's segments come up to 44 in one, as the sender's socket made them, and handlers mark, place and acknowledge each of them on the sender's CPU. No XDP program is on either end, so TCP has TSO and GSO. " +
				"Files are of 1 GiB, in memory, sent by a process to the window of a NIC, with nothing pinned; iperf3 has its own memory. CPU time is that of the whole machine, from the start of the processes to their end. A file is stored when the receiver has written the window to a file in memory; iperf3 does so with -F. " +
				"A message of 4 MiB is sent when the one before is acknowledged. A bystander is one TCP stream through the interface. Round trips are those of a client that spins.",
		},
		pace{11, 440 * time.Second}, pace{3, 50 * time.Second},
		[]benchRows{{"kernel", "tc", "tc --size 16MiB"}}, []step{tcPlot},
	},
	{
		report.Experiment{
			Name: "loss", Title: "Loss",
			Shows: "Goodput of SLMP and of TCP when packets are lost, and the time for a small file.",
			Method: "A third namespace between sender and receiver drops frames at random, as many each way. Goodput of SLMP is that of a file, goodput of TCP that of one second of iperf3 through the same path. TCP has TSO off, as the NIC stays attached to the receiver's end. " +
				"SLMP goes to one HPU, or to handlers in eBPF, which put it into memory and acknowledge it in XDP. SLMP's time for a small file is measured, from the first byte to the acknowledgement of the last. TCP's is not measured but computed: the bytes divided by the goodput that iperf3 reports for them. A run is the median of three such times, in a quick run a single one.",
		},
		pace{5, 115 * time.Second}, pace{3, 20 * time.Second},
		[]benchRows{{"slmp", "loss", "-"}}, []step{lossPlots},
	},
	{
		report.Experiment{
			Name: "datatypes", Title: "MPI datatypes",
			Shows: "How fast messages are received into scattered memory, and how much of that time is hidden behind computing.",
			Method: "Messages of Simple and Complex, FPsPIN's types, by handlers on the NIC, next to MPICH and, in the plots, Open MPI over TCP, whose receivers scatter in the MPI library. Goodput is from the receiver's request for messages until it knows that all are there. " +
				"By number of messages at a time, each has 20 elements, 2160 KiB; by length, 16 are sent at a time. " +
				"Beside messages the receiver's one thread multiplies matrices, 20 products of the same code on both sides, and looks for messages between two. As in FPsPIN's evaluation the matrices' size is tuned, before the first run, so that XsPIN's messages are found at the 15th to the last product. " +
				"The receiver is on one CPU, the sender on another. In the plots, and in the rows overlap_* and hidden_*, the NIC's one HPU shares the sender's CPU, so that the receiver's is left to the products; it is there for the lines without products, too. In the rows goodput_* and cpu_* nothing is computed: the HPU is on the receiver's CPU, where the application sleeps, which is why goodput is higher there than in the plots. FPsPIN's ratio, the share of the time until messages are found that products take, tends to 1 by construction; the share of the messages' time that is hidden does not. Sides take turns, 3 runs of each place.",
		},
		pace{5, 250 * time.Second}, pace{3, 27 * time.Second},
		[]benchRows{{"ddt", "cpu,overlap", "-"}}, []step{overlapRowsPlot, datatypesPlots},
	},
	{
		report.Experiment{
			Name: "strategies", Title: "Ways to scatter MPI datatypes",
			Shows: "How fast strategies, XsPIN's own and those of Di Girolamo et al. (SC 2019), put a message in place, next to MPI_Unpack and to loops written by hand.",
			Method: "In memory, packet by packet in order, one thread on a CPU that MPI_Unpack, with the whole message at once, has in turn; without a network. " +
				"Strategies are made for 4 HPUs, and RO-CP and RW-CP have the checkpoints that the paper's model asks for. Blocks are half of their stride; a packet has 1408 bytes of a message. " +
				"The parts of a handler are differences: init is the time of a packet without bytes and, of RO-CP, what one takes beyond copying that finds its checkpoint where it begins; processing is its share of the message placed at once; setup is the rest. " +
				"Several HPUs have packets replayed from memory, each on a CPU of its own; they share each message, and the work of bringing its packets, but in the line that says otherwise. " +
				"The lock and the state of a shared message go from CPU to CPU with each packet, which takes several times as long as these handlers of some 0.1 us do: sharing pays for handlers that take longer. " +
				"With one HPU none waits for another, so the model has a single checkpoint for all of the message, and each packet of RO-CP begins at the message's first byte. " +
				"The types of applications are measured cold: other memory is written before, twice what the last-level cache has, but at most 256 MiB; 64 MiB if that is not known. Beside them is a scatter list that a card has 32 entries of at a time, as the paper has it but for its PCI Express. " +
				"Committing has paid off when messages have saved what it took; types whose messages do not are not in the plot.",
		},
		pace{5, 200 * time.Second}, pace{3, 15 * time.Second},
		[]benchRows{{"ddt", "place,loop,strategy,scale,commit", "commit"}},
		[]step{strategyRowsPlots, blocksPlot, partsPlot, hpusPlots, appsPlots},
	},
	{
		report.Experiment{
			Name: "anatomy", Title: "Anatomy",
			Shows: "Where the nanoseconds of a packet go, what matching costs (match/*) and what exchange with an application does (hostq/*), and what a NIC takes of the machine.",
			Method: "UDP frames from a generator in the kernel, on one CPU, which runs the XDP program and its redirect too, come to one HPU on another, in bursts of 512: the next one comes when all are handled, so that nothing is lost. The median of the bursts counts, since whoever else takes a CPU is in some of them. " +
				"Match is a run of the matching engine with one ruleset (BPF_PROG_RUN), less that of a program that passes everything. " +
				"Redirect is what a frame takes the sending CPU, less that of a program that drops it and less match: credit, metadata, and the kernel's copy into a buffer of AF_XDP. " +
				"Dispatch is the HPU's busy time for a packet, less the handler's. The handler does nothing: its time is mostly that of two readings of the clock. " +
				"Copy is what a handler takes longer that copies the frame, and egress the busy time more of one that sends the frame back. " +
				"Ring wait is of frames one by one to an HPU that spins, as a real-time thread if the kernel allows it: from the XDP program's time stamp to the handler, less redirect and dispatch; of one packet alone, which shares neither with others. Frames do not count that came while another program had the HPU's CPU. A part that would be less than nothing is nothing. " +
				fmt.Sprintf("Limits: %d HPUs, %d contexts, %d rulesets of %d rules, rings of %d buffers.", nic.MaxHPUs, matcher.MaxContexts, matcher.MaxRulesets, matcher.MaxRules, nic.MaxRing),
		},
		pace{11, 230 * time.Second}, pace{3, 16 * time.Second},
		[]benchRows{{"match", "", ""}, {"hostq", "", "sleeping,pingpong"}}, []step{anatomyPlots, anatomyRows},
	},
	{
		report.Experiment{
			Name: "scale", Title: "Scaling: messages, contexts, rulesets",
			Shows: "How the cost of a packet, and the memory for each, grow with the number of messages in flight, contexts and rulesets.",
			Method: "64-byte frames from a generator in the kernel on one CPU, which runs the XDP program too, to one HPU on another, whose handler does nothing. Handlers in eBPF do nothing in XDP, on the generator's CPU. " +
				fmt.Sprintf("Messages in flight: so many are opened that do not end, then their segments take turns, none of which asks for an acknowledgement; no more come than the receiver takes. A context in eBPF has %d at most. ", loader.MaxMessages) +
				"Contexts: one ruleset each, and packets for them take turns; more come than the receiver takes, and the rest is lost in the XDP program. " +
				"Rulesets: all of one context, with 8 rules and EOM each, as services have them that differ in addresses, ports and words of the payload; frames of 128 bytes. " +
				"Memory is the growth of the Go heap of the NIC's process over that of a NIC without a context, after garbage collection, divided by how many there are, from 10 on: the context itself is in it. What the XDP program keeps in maps is of fixed size, see Anatomy. " +
				fmt.Sprintf("Handlers in eBPF have a program and maps for each context, and what the kernel charges for the maps is in it. They are as large as the context says, whatever is in them: that of messages has room for %d segments in all, half a byte each. ", scaleSegments) +
				"Time to match is that of a run of the matching engine over a frame in the cache (BPF_PROG_RUN), less that of a program that passes everything.",
		},
		pace{11, 110 * time.Second}, pace{3, 21 * time.Second},
		[]benchRows{{"slmp", "state", ""}}, []step{scalePlots, scaleMatching},
	},
	{
		report.Experiment{
			Name: "cost", Title: "CPU time",
			Shows: "How much CPU time a gigabyte and a million messages take at either end, next to TCP and to UDP sockets.",
			Method: "CPU seconds, of all that runs on the sender's CPU and on the receiver's, interrupts included, from /proc/stat, which counts in steps of 10 ms: whatever else the machine does is in them. " +
				"On the sender's CPU are the sending process and, as a veth pair has it, the XDP program and the kernel's copy into AF_XDP; on the receiver's the HPU, which spins for a while before it sleeps. Handlers in eBPF are on the sender's CPU. " +
				"A gigabyte: files of 256 MiB in memory, put into memory by one HPU; iperf3 for a second, one TCP stream, without any XDP program, with TSO, and with a NIC attached, which takes TSO and GSO from a veth pair, so that each segment is a frame, as for SLMP (\"same frames\"). " +
				"Messages: of 64 bytes, 256 at a time, that are completed; UDP sockets echo as many bytes, with recvmmsg and sendmmsg, and spin, too. All that are completed from beginning to end count, as all CPU time does: that of the warm-up, and of starting and ending the processes, is in it.",
		},
		pace{11, 2 * time.Minute}, pace{3, 19 * time.Second},
		nil, []step{costPlots},
	},
	{
		report.Experiment{
			Name: "bystander", Title: "What other traffic loses when XsPIN is attached",
			Shows:  "Goodput of TCP through an interface with XsPIN attached, relative to without.",
			Method: "One TCP stream of iperf3 goes into the interface and one out of it: without an XDP program, with a bare XDP program that passes everything, and with the NIC attached and a context active that matches none of it. Any XDP program on one end of a veth pair takes TSO and GSO from the other end, so that each segment is a frame: that is most of the loss, and a physical NIC does not have it.",
		},
		pace{11, 2 * time.Minute}, pace{3, 20 * time.Second},
		[]benchRows{{"bystander", "", ""}}, []step{bystanderPlot},
	},
}

// benchRows are the rows of a bench, or of some of its parts.
type benchRows struct {
	bench string
	parts string // as --only takes them, perhaps with more flags behind; "" for all
	quick string // of a quick run: "" for the same, "-" for none
}

// mostRuns is how often `bench all` measures a row's sides at most, and a bench does by
// default. Points of plots may have more runs; a run of a row takes longer.
const mostRuns = 11

// plan returns how to measure the rows, for so long a run, and as which command somebody
// else can. Without any it returns nil.
func (b benchRows) plan(quick bool) (measure measureFunc, duration time.Duration, command string, err error) {
	i := slices.IndexFunc(benches, func(c benchCommand) bool { return c.name == b.bench })
	if i < 0 {
		return nil, 0, "", fmt.Errorf("no bench %s", b.bench)
	}
	bench, only := &benches[i], b.parts
	duration = bench.duration
	if quick {
		duration = bench.quick
		if b.quick != "" {
			only = b.quick
		}
	}
	if only == "-" {
		return nil, 0, "", nil
	}
	command = fmt.Sprintf("xspin bench %s --duration %v", b.bench, duration)
	if bench.flags == nil {
		return bench.measure, duration, command, nil
	}
	fl := pflag.NewFlagSet(b.bench, pflag.ContinueOnError)
	judge := bench.flags(fl)
	if only != "" {
		command += " --only " + only
		if err := fl.Parse(strings.Fields("--only " + only)); err != nil {
			return nil, 0, "", err
		}
	}
	measure, err = judge()
	return measure, duration, command, err
}

func (b benchRows) measure(ctx context.Context, t *trial) error {
	measure, d, command, err := b.plan(t.quick)
	if err != nil || measure == nil {
		return err
	}
	cfg := t.benchConfig
	cfg.duration = d
	cfg.runs = min(cfg.runs, mostRuns)
	doc := bench.NewDocument(bench.Env{})
	err = measure(ctx, t.benchLab, cfg, doc)
	t.e.Rows = append(t.e.Rows, doc.Results...)
	t.e.Benches = append(t.e.Benches, fmt.Sprintf("%s --runs %d", command, cfg.runs))
	return err
}

// pick returns how much is to be measured.
func pick[T any](t *trial, full, quick T) T {
	if t.quick {
		return quick
	}
	return full
}

// row returns that of a name, nil if it was not measured.
func (t *trial) row(name string) *bench.Row {
	for i := range t.e.Rows {
		if t.e.Rows[i].Name == name {
			return &t.e.Rows[i]
		}
	}
	return nil
}

// A line is a series of a plot while it is measured, in rounds: runs by place.
type line struct {
	name, tier, on string
	runs, lost     map[float64][]float64
	doubts         map[float64]string // why a place is not to be trusted
}

func newLine(name, tier string) *line {
	return &line{name: name, tier: tier, runs: map[float64][]float64{}, lost: map[float64][]float64{}, doubts: map[float64]string{}}
}

// add adds a run at x. Lost is a fraction, less than 0 for none that is known.
func (l *line) add(x, y, lost float64) {
	l.runs[x] = append(l.runs[x], y)
	if lost >= 0 {
		l.lost[x] = append(l.lost[x], lost)
	}
}

// row adds the runs of a side of a row.
func (l *line) row(x float64, s *bench.Side) {
	l.on = s.On
	for _, y := range s.Runs {
		l.add(x, y, -1)
	}
}

// series returns what was measured.
func (l *line) series() report.Series {
	s := report.Series{Name: l.name, Tier: l.tier, On: l.on}
	for _, x := range slices.Sorted(maps.Keys(l.runs)) {
		p := report.NewPoint(x, l.runs[x])
		p.Doubt = l.doubts[x]
		if lost := l.lost[x]; len(lost) > 0 {
			m := quantile.Median(lost)
			p.Lost = &m
		}
		s.Points = append(s.Points, p)
	}
	return s
}

// plot adds a plot of lines, of those that have points, unless none has.
func (t *trial) plot(p report.Plot, lines ...*line) {
	for _, l := range lines {
		if s := l.series(); len(s.Points) > 0 {
			p.Series = append(p.Series, s)
		}
	}
	if len(p.Series) > 0 {
		t.e.Plots = append(t.e.Plots, &p)
	}
}

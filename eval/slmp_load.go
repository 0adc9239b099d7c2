// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/peers"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// loadCommand is the hidden command of sendLoad.
const loadCommand = "_slmp-load"

// A load is messages of one size, a number of them always on their way.
type load struct {
	To          string
	Size        int // bytes of a message
	Outstanding int // messages
	Warmup, For time.Duration
}

// A loadReport is what became of a load.
type loadReport struct {
	Messages uint64  `json:"messages"` // acknowledged, after the warmup
	Seconds  float64 `json:"seconds"`  // without the warmup
	RTT      rttUS   `json:"rtt_us"`
	// Of all the time.
	Completed     uint64 `json:"completed"`
	Segments      uint64 `json:"segments"`
	Retransmitted uint64 `json:"retransmitted"`
	Offload       string `json:"offload"`
}

// sendLoad is a process that sends messages, from when it reads a line.
func sendLoad(ctx context.Context, arg string, out io.Writer, in io.Reader) error {
	var l load
	if err := json.Unmarshal([]byte(arg), &l); err != nil {
		return err
	}
	conn, err := slmp.Dial(ctx, l.To, slmp.Config{})
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := fmt.Fprintln(out, "ready"); err != nil {
		return err
	}
	if _, err := bufio.NewReader(in).ReadString('\n'); err != nil {
		return err // nobody wants it any more
	}

	const warm, measured, over = 0, 1, 2
	var phase atomic.Int32
	var counts [3]uint64 // the connection's goroutine counts
	failed := make(chan error, 1)
	msg := make([]byte, l.Size)
	var done func(error)
	done = func(err error) {
		p := phase.Load()
		counts[p]++
		if err == nil && p != over {
			err = conn.Post(msg, done)
		}
		if err != nil {
			select {
			case failed <- err:
			default:
			}
		}
	}
	for range l.Outstanding {
		if err := conn.Post(msg, done); err != nil {
			return err
		}
	}
	wait := func(d time.Duration) error {
		select {
		case err := <-failed:
			return err
		case <-time.After(d):
			return nil
		}
	}
	if err := wait(l.Warmup); err != nil {
		return err
	}
	phase.Store(measured)
	begin := time.Now()
	err = wait(l.For)
	phase.Store(over)
	took := time.Since(begin)
	if err != nil {
		return err
	}
	st := conn.Stats()
	if err := conn.Close(); err != nil { // and nobody counts any more
		return err
	}
	return json.NewEncoder(out).Encode(loadReport{
		Messages: counts[measured], Seconds: took.Seconds(), RTT: rttUS{micros(st.RTT), micros(st.MinRTT)},
		Completed: st.Completed, Segments: st.Segments, Retransmitted: st.Retransmitted, Offload: st.Offload.String(),
	})
}

// A loader process.
type loadProcess struct {
	cmd   *exec.Cmd
	begin io.WriteCloser
	lines *bufio.Reader
	msg   bytes.Buffer
}

// runLoads has n processes on the sender's CPU send messages, all over the same
// time.
func (b *slmpBench) runLoads(ctx context.Context, n int, l load) (reports []loadReport, err error) {
	l.To = b.to()
	arg, err := json.Marshal(l)
	if err != nil {
		return nil, err
	}
	whole := ctx
	ctx, cancel := context.WithTimeout(ctx, l.Warmup+l.For+30*time.Second)
	var all []*loadProcess
	defer func() {
		if err != nil {
			cancel()
		}
		for _, p := range all {
			if e := p.cmd.Wait(); e != nil {
				err = fmt.Errorf("process that sends messages: %w: %s", errors.Join(e, err), strings.TrimSpace(p.msg.String()))
			}
		}
		cancel()
		if whole.Err() != nil {
			err = whole.Err()
		}
	}()
	for range n {
		p := &loadProcess{cmd: exec.CommandContext(ctx, b.self, loadCommand, string(arg))}
		p.cmd.Stderr = &p.msg
		out, err := p.cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		p.lines = bufio.NewReader(out)
		if p.begin, err = p.cmd.StdinPipe(); err != nil {
			return nil, err
		}
		if err := testbed.Start(b.Host.NS, b.sender, p.cmd); err != nil {
			return nil, err
		}
		all = append(all, p)
		if _, err := p.lines.ReadString('\n'); err != nil {
			return nil, err
		}
	}
	for _, p := range all {
		if _, err := fmt.Fprintln(p.begin); err != nil {
			return nil, err
		}
	}
	mallocs := countMallocs()
	defer func() { b.allocs = mallocs() }()
	for _, p := range all {
		var r loadReport
		if err := json.NewDecoder(p.lines).Decode(&r); err != nil {
			return nil, err
		}
		reports = append(reports, r)
	}
	return reports, nil
}

const smallSize = 64 // bytes of a small message

// smallRows compares small messages with UDP echo.
func (b *slmpBench) smallRows(ctx context.Context) error {
	peer, err := buildPeer(ctx, "udp_batch", peers.UDPBatch)
	if err != nil {
		b.cfg.warn(fmt.Sprintf("no rows slmp/small_over_udp_echo/*: %v", err))
	}
	var allocs []float64
	for _, n := range b.o.outstanding {
		var ours, theirs smallRuns
		sides := []func(context.Context) error{func(ctx context.Context) error { return b.smallMessages(ctx, n, &ours) }}
		if peer != "" {
			sides = append(sides, func(ctx context.Context) error { return b.smallEcho(ctx, peer, n, &theirs) })
		}
		if err := bench.Rounds(ctx, b.cfg.runs, sides...); err != nil {
			return err
		}
		allocs = append(allocs, ours.allocs...)
		if peer == "" {
			continue
		}
		conditions := fmt.Sprintf("%d bytes, %d outstanding; one sending process on CPU %d, one receiver on CPU %d; after a warmup of a tenth of the time",
			smallSize, n, b.sender, b.receiver)
		row, err := bench.Ratio(fmt.Sprintf("slmp/small_over_udp_echo/%d", n), bench.AtLeast(1),
			ours.side("SLMP messages completed: slmp.Conn.Post to a NIC with 1 HPU, adaptive, that puts them into memory and runs a completion handler that does nothing"),
			theirs.side("UDP datagrams echoed: recvmmsg and sendmmsg at both ends, in C, which spin and then sleep").Of("UDP sockets in C"))
		if err := b.doc.Add(conditions, row, err); err != nil {
			return err
		}
	}
	row, err := b.allocsRow("slmp/allocs_per_packet_small", allocs)
	return b.doc.Add("the small messages, which begin and end with every packet", row, err)
}

type smallRuns struct {
	kps, lost, rtt, again, allocs []float64
	all                           []float64 // messages, warm-up and all; of the echo
	on                            string
}

func (r *smallRuns) side(what string) bench.Side {
	s := bench.NewSide(what, "k/s", r.kps)
	s.On = r.on
	if len(r.lost) > 0 {
		lost := bench.NewSide("", "", r.lost).Median
		s.Lost = &lost
	}
	s.Add("rtt_us", r.rtt)
	s.Add("sent_again_percent", r.again)
	s.Add("receiver_allocs_per_packet", r.allocs)
	return s
}

func (b *slmpBench) smallMessages(ctx context.Context, n int, runs *smallRuns) (err error) {
	spec := depositSpec(make([]byte, smallSize))
	spec.Handlers.Completion = func(*hpu.Completion) spin.Code { return spin.Success }
	nc, _, err := b.openContext(b.oneHPU(), spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, nc.Close()) }()
	if runs.on, err = b.granted(nc); err != nil {
		return err
	}
	reports, err := b.runLoads(ctx, 1, load{Size: smallSize, Outstanding: n, Warmup: b.cfg.duration / 10, For: b.cfg.duration})
	if err != nil {
		return err
	}
	r := reports[0]
	runs.on += "; sent by " + r.Offload
	runs.kps = append(runs.kps, float64(r.Messages)/r.Seconds/1e3)
	runs.rtt = append(runs.rtt, r.RTT.Smoothed)
	runs.again = append(runs.again, 100*float64(r.Retransmitted)/float64(max(r.Segments, 1)))
	runs.allocs = append(runs.allocs, b.allocs/float64(max(r.Segments, 1)))
	return nil
}

func (b *slmpBench) smallEcho(ctx context.Context, peer string, n int, runs *smallRuns) (err error) {
	if runs.on, err = b.state(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	addr, port := b.NIC.Addr.Addr().String(), strconv.Itoa(benchPort)
	server := exec.CommandContext(ctx, peer, "serve", addr, port, strconv.Itoa(b.receiver))
	stdin, err := server.StdinPipe()
	if err != nil {
		return err
	}
	out, err := server.StdoutPipe()
	if err != nil {
		return err
	}
	if err := testbed.Start(b.NIC.NS, b.receiver, server); err != nil {
		return err
	}
	defer func() {
		stdin.Close()
		_ = server.Wait() // killed, or at its end
	}()
	defer cancel()
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return fmt.Errorf("%s: it does not listen on %s: %w", filepath.Base(peer), addr, err)
	}
	client := exec.CommandContext(ctx, peer, "ask", addr, port, strconv.Itoa(b.sender), strconv.Itoa(smallSize), strconv.Itoa(n),
		strconv.FormatFloat(b.cfg.duration.Seconds(), 'f', 3, 64))
	var answer, msg bytes.Buffer
	client.Stdout, client.Stderr = &answer, &msg
	if err := testbed.Start(b.Host.NS, b.sender, client); err != nil {
		return err
	}
	if err := client.Wait(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%s: %w: %s", filepath.Base(peer), err, strings.TrimSpace(msg.String()))
	}
	var count, lost, seconds, all float64
	if _, err := fmt.Sscan(answer.String(), &count, &lost, &seconds, &all); err != nil {
		return fmt.Errorf("%s printed %q: %w", filepath.Base(peer), answer.String(), err)
	}
	runs.kps = append(runs.kps, count/seconds/1e3)
	runs.all = append(runs.all, all)
	runs.lost = append(runs.lost, lost/max(count+lost, 1))
	return nil
}

// fairSenders is how many share a NIC.
const fairSenders = 8

// fairnessRows says how equally senders share a NIC.
func (b *slmpBench) fairnessRows(ctx context.Context) (err error) {
	const size = 256 << 10
	memory, free, err := memory(size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, free()) }()
	var jain, gbit, again, least []float64
	var on string
	err = bench.Rounds(ctx, b.cfg.runs, func(ctx context.Context) (err error) {
		n, _, err := b.openContext(b.oneHPU(), depositSpec(memory))
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		if on, err = b.granted(n); err != nil {
			return err
		}
		reports, err := b.runLoads(ctx, fairSenders, load{Size: size, Outstanding: 4, Warmup: b.cfg.duration / 10, For: b.cfg.duration})
		if err != nil {
			return err
		}
		var rates []float64
		var segments, repeated uint64
		for _, r := range reports {
			rates = append(rates, float64(r.Messages)*size*8/1e9/r.Seconds)
			segments += r.Segments
			repeated += r.Retransmitted
		}
		index, sum, worst := jainIndex(rates)
		jain, gbit, least = append(jain, index), append(gbit, sum), append(least, worst)
		again = append(again, 100*float64(repeated)/float64(max(segments, 1)))
		return nil
	})
	if err != nil {
		return err
	}
	s := bench.NewSide("Jain's index of bytes acknowledged in the same time", "index", jain)
	s.On = on
	s.Add("together_gbps", gbit)
	s.Add("least_gbps", least)
	s.Add("sent_again_percent", again)
	row, err := bench.Absolute(fmt.Sprintf("slmp/fairness%d", fairSenders), bench.AtLeast(0.80), s)
	return b.doc.Add(fmt.Sprintf("%d processes on CPU %d, each with one connection, window auto, 4 messages of %d KiB outstanding; NIC with 1 HPU on CPU %d, adaptive, that puts them into memory",
		fairSenders, b.sender, size>>10, b.receiver), row, err)
}

// jainIndex returns Jain's fairness index of rates, 1 for all equal and 1/n for one
// that has all; their sum; and the least.
func jainIndex(rates []float64) (index, sum, least float64) {
	squares := 0.0
	least = rates[0]
	for _, r := range rates {
		sum += r
		squares += r * r
		least = min(least, r)
	}
	if squares == 0 {
		return 0, 0, 0
	}
	return sum * sum / (float64(len(rates)) * squares), sum, least
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/internal/pcapng"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

// What captures may take.
const (
	maxCaptures    = 4       // of a context at the same time
	userCaptures   = 2       // of these, of a user who is not root
	captureRecords = 1 << 14 // in one of a capture's two buffers
	captureBytes   = 4 << 20 // of frames there
	capturePause   = 5 * time.Millisecond
)

// captures are those of a context, of all its lives. While there are any, it is the
// context's tap.
type captures struct {
	context string
	device  string // interface
	hpus    int
	tap     func(hpu.Tap)   // sets it
	closed  <-chan struct{} // when the context is removed

	mu  sync.Mutex
	run atomic.Pointer[[]*capture] // changed with mu
}

// capture writes frames of a context to w, see captures.capture.
func (d *Daemon) capture(ctx context.Context, uid int, name string, o control.CaptureOptions, w io.Writer) error {
	h, err := d.find(name)
	if err != nil {
		return err
	}
	h.mu.Lock()
	if !h.b.onHPUs() {
		h.mu.Unlock()
		return failf(errInvalid, "context %q is in the kernel, and its frames do not come to user space: capture at the other end of the link, such as with tcpdump", name)
	}
	if h.captures == nil {
		h.captures = newCaptures(name, h.device.key, h.device.nic.HPUs(), h.setTap, h.book.closed)
	}
	cs := h.captures
	h.mu.Unlock()
	return cs.capture(ctx, uid, o, w)
}

func newCaptures(context, device string, hpus int, tap func(hpu.Tap), closed <-chan struct{}) *captures {
	cs := &captures{context: context, device: device, hpus: hpus, tap: tap, closed: closed}
	cs.run.Store(new([]*capture))
	return cs
}

// Packet is a hpu.Tap.
func (cs *captures) Packet(r *hpu.TapRecord, frame []byte) {
	for _, c := range *cs.run.Load() {
		c.packet(r, frame)
	}
}

func (cs *captures) gone() bool {
	select {
	case <-cs.closed:
		return true
	default:
		return false
	}
}

func (cs *captures) add(c *capture) error {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	run := *cs.run.Load()
	if len(run) == maxCaptures {
		return failf(errBusy, "%d captures of context %q are running already: end one of them", maxCaptures, cs.context)
	}
	own := 0
	for _, o := range run {
		if o.uid == c.uid {
			own++
		}
	}
	if c.uid != 0 && own >= userCaptures {
		return failf(errBusy, "%d captures of context %q by user %d are running already: end one of them", own, cs.context, c.uid)
	}
	run = append(slices.Clone(run), c) // workers read the old one
	cs.run.Store(&run)
	if len(run) == 1 {
		cs.tap(cs)
	}
	return nil
}

func (cs *captures) remove(c *capture) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	run := slices.DeleteFunc(slices.Clone(*cs.run.Load()), func(o *capture) bool { return o == c })
	cs.run.Store(&run)
	if len(run) == 0 {
		cs.tap(nil)
	}
}

// verdicts are those that workers give.
var verdicts = func() []string {
	all := []string{"success", "drop", "fail", "segv", "panic", "deposit", "asked", "kept", "held", "duplicate", "stray", "malformed", "corrupt", "unbound", "sent"}
	for r := spin.NotDropped + 1; r < spin.DropReasons; r++ {
		all = append(all, r.String())
	}
	return all
}()

// Verdicts returns all that a frame of a capture can have.
func Verdicts() []string { return slices.Clone(verdicts) }

// checkCapture returns the rulesets of a capture's filter, or what is wrong with its
// options.
func checkCapture(o *control.CaptureOptions, hpus int) ([]matcher.Ruleset, error) {
	switch {
	case o.HPU < -1 || o.HPU >= hpus:
		return nil, failf(errInvalid, "capture of HPU %d: want 0 to %d, or -1 for all", o.HPU, hpus-1)
	case o.Snap < 0:
		return nil, failf(errInvalid, "capture of %d bytes of each frame: want 1 or more, or 0 for all", o.Snap)
	case o.Count < 0:
		return nil, failf(errInvalid, "capture of %d frames: want 1 or more, or 0 for any number", o.Count)
	}
	if o.Verdict != "" {
		for v := range strings.SplitSeq(o.Verdict, ",") {
			if !slices.Contains(verdicts, v) {
				return nil, failf(errInvalid, "capture of verdict %q: want %s", v, strings.Join(verdicts, ", "))
			}
		}
	}
	if o.Filter == "" {
		return nil, nil
	}
	// One ruleset needs no name.
	if !strings.Contains(strings.TrimSpace(o.Filter), "\n") {
		if rs, err := matcher.ParseRuleset("filter: " + o.Filter); err == nil {
			return []matcher.Ruleset{rs}, nil
		}
	}
	rules, err := matcher.ParseFile("filter", strings.NewReader(o.Filter))
	switch {
	case err != nil:
		return nil, kindError{errInvalid, err}
	case len(rules) == 0:
		return nil, failf(errInvalid, "filter: no ruleset in it")
	}
	return rules, nil
}

// capture writes frames of the context to w, until ctx ends, o.Count were written, w
// fails, or the context is gone. Only the third is an error, and what is wrong before
// anything was written.
func (cs *captures) capture(ctx context.Context, uid int, o control.CaptureOptions, w io.Writer) error {
	c, err := newCapture(o, cs.hpus)
	if err != nil {
		return err
	}
	c.uid = uid
	// Its head is written at once, so a client sees that it has begun.
	out := pcapng.NewWriter(w, "XsPIN", pcapng.Interface{
		Name: cs.device, Description: "frames of XsPIN's context " + cs.context, Filter: strings.TrimSpace(o.Filter), Snap: o.Snap,
	})
	if err := cs.add(c); err != nil {
		return err
	}
	defer cs.remove(c)
	return c.write(ctx, cs, out)
}

// A capture copies frames into one of two buffers, while the other is written.
type capture struct {
	control.CaptureOptions
	uid      int // whose it is
	rules    []matcher.Ruleset
	verdicts []string
	wake     chan struct{} // there are frames
	mono     int64         // CLOCK_MONOTONIC, when it was
	wall     int64         // ns after 1970

	mu      sync.Mutex
	in      *captureBuffer
	lost    uint64 // since the last frame that is in a buffer
	buffers [2]captureBuffer
}

func newCapture(o control.CaptureOptions, hpus int) (*capture, error) {
	rules, err := checkCapture(&o, hpus)
	if err != nil {
		return nil, err
	}
	c := &capture{CaptureOptions: o, rules: rules, wake: make(chan struct{}, 1), mono: clock.Monotonic(), wall: time.Now().UnixNano()}
	if o.Verdict != "" {
		c.verdicts = strings.Split(o.Verdict, ",")
	}
	for i := range c.buffers {
		c.buffers[i].records = make([]hpu.TapRecord, 0, captureRecords)
		c.buffers[i].frames = make([]byte, 0, captureBytes)
	}
	c.in = &c.buffers[0]
	return c, nil
}

type captureBuffer struct {
	records []hpu.TapRecord
	frames  []byte
	sizes   [captureRecords]int32 // of what of each frame is in frames
	lost    uint64                // before the first
}

// packet is called by workers, several at a time.
func (c *capture) packet(r *hpu.TapRecord, frame []byte) {
	if c.HPU >= 0 && r.HPU != c.HPU || c.verdicts != nil && !slices.Contains(c.verdicts, r.Verdict) {
		return
	}
	if c.rules != nil && !slices.ContainsFunc(c.rules, func(rs matcher.Ruleset) bool { return rs.Match(frame) }) {
		return
	}
	n := len(frame)
	if c.Snap > 0 {
		n = min(n, c.Snap)
	}
	c.mu.Lock()
	b := c.in
	had := len(b.records)
	if had == captureRecords || len(b.frames)+n > captureBytes {
		c.lost++
		c.mu.Unlock()
		return
	}
	if had == 0 {
		b.lost, c.lost = c.lost, 0
	}
	b.sizes[had] = int32(n)
	b.records = append(b.records, *r)
	b.frames = append(b.frames, frame[:n]...)
	c.mu.Unlock()
	// It waits for the first, and then for some more, but not until there are too many.
	if had == 0 || had == captureRecords/4 {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

// swap returns the buffer that was filled; the other one gets the next frames. Lost is
// what was lost after the last frame in it.
func (c *capture) swap() (b *captureBuffer, lost uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b = c.in
	c.in = &c.buffers[0]
	if b == c.in {
		c.in = &c.buffers[1]
	}
	c.in.records, c.in.frames, c.in.lost = c.in.records[:0], c.in.frames[:0], 0
	return b, c.lost
}

func (c *capture) write(ctx context.Context, cs *captures, out *pcapng.Writer) error {
	var wrote, lost, told uint64
	f := pcapng.Frame{Comments: make([]string, 1)}
	var comment []byte
	for {
		end := ctx.Err() != nil || cs.gone()
		b, after := c.swap()
		frames := b.frames
		for i := range b.records {
			r := &b.records[i]
			comment = appendTapRecord(comment[:0], cs.context, r)
			f.Data, frames = frames[:b.sizes[i]], frames[b.sizes[i]:]
			f.Comments[0] = string(comment)
			f.Length, f.Dropped, f.Direction = r.Size, 0, pcapng.In
			if r.Out {
				f.Direction = pcapng.Out
			}
			if i == 0 {
				f.Dropped = b.lost
			}
			if err := out.Frame(&f, c.wall+r.Time-c.mono); err != nil {
				return err
			}
			lost += f.Dropped
			if wrote++; wrote == uint64(c.Count) {
				after, end = 0, true
				break
			}
		}
		if end || lost+after > told {
			// A client that is interrupted has been told what was lost until then.
			told = lost + after
			out.Statistics(0, c.wall+clock.Monotonic()-c.mono, wrote+told, told)
		}
		if err := out.Flush(); err != nil || end {
			return err
		}
		select {
		case <-ctx.Done():
			continue
		case <-cs.closed:
			continue
		case <-c.wake:
		}
		// Not for each frame: the workers have better things to do than to wake us.
		pause := time.NewTimer(capturePause)
		select {
		case <-ctx.Done():
		case <-cs.closed:
		case <-c.wake: // many
		case <-pause.C:
		}
		pause.Stop()
	}
}

// appendTapRecord writes what is known of a frame: words without spaces.
func appendTapRecord(b []byte, context string, r *hpu.TapRecord) []byte {
	b = append(append(b, "context="...), context...)
	b = strconv.AppendInt(append(b, " hpu="...), int64(r.HPU), 10)
	b = strconv.AppendInt(append(b, " queue="...), int64(r.Queue), 10)
	if !r.Out {
		b = strconv.AppendInt(append(b, " ruleset="...), int64(r.Ruleset), 10)
	}
	if r.Message {
		b = strconv.AppendUint(append(b, " message="...), uint64(r.Number), 10)
		b = strconv.AppendUint(append(b, " offset="...), uint64(r.Offset), 10)
		if r.EOM {
			b = append(b, " eom"...)
		}
	}
	return append(append(b, " verdict="...), r.Verdict...)
}

// SPDX-License-Identifier: Apache-2.0

package hpu

import "github.com/xspin/xspin/spin"

// SetTap has a tap see the context's frames from now on; nil ends that. A worker may
// call the old one until it has finished its batch.
func (c *Context) SetTap(t Tap) {
	if t == nil {
		c.tap.Store(nil)
		return
	}
	c.tap.Store(&t)
}

// maxFrame is what a frame can have at most.
const maxFrame = 64 << 10

// tapped runs the HER, a packet from a ring, before a tap: which sees the frame as it
// came, and what became of it. It returns false if the runner was abandoned.
func (r *runner) tapped(tap Tap, c *Context, h *her) bool {
	req := &r.her
	if r.frame == nil {
		r.frame = make([]byte, maxFrame)
	}
	n := req.CopyTo(r.frame, 0)
	size := req.size
	req.verdict = ""
	if !r.dispatch(c, h) {
		return false
	}
	r.record = TapRecord{
		Time: r.batch.base, HPU: r.batch.port.hpu, Queue: r.batch.port.queue, Ruleset: int(h.meta.Ruleset),
		Verdict: req.verdict, Size: size,
	}
	if c.msgs != nil {
		r.record.Message, r.record.Offset, r.record.EOM = true, req.seg.Offset, req.seg.EOM
		r.record.Number = h.meta.Key[len(c.msgs.cfg.Format.Key)-1]
	}
	switch {
	case req.action == keep && req.kept != nil && req.kept.cont != nil:
		r.record.Verdict = "asked"
	case req.action == keep && req.kept != nil:
		r.record.Verdict = "kept"
	case req.verdict == "":
		r.record.Verdict = "deposit"
	}
	tap.Packet(&r.record, r.frame[:n])
	return true
}

// tapOut shows a tap a frame that leaves.
func (r *runner) tapOut(tap Tap, p *port, h *her, frame []byte) {
	r.record = TapRecord{
		Time: r.batch.base, Out: true, HPU: p.hpu, Queue: p.queue, Ruleset: int(h.meta.Ruleset), Verdict: "sent", Size: len(frame),
	}
	tap.Packet(&r.record, frame)
}

// verdictOf names what a handler has returned.
func verdictOf(code spin.Code, end ending) string {
	switch {
	case end == panicked:
		return "panic"
	case code == spin.Success:
		return "success"
	case code == spin.Drop:
		return "drop"
	case code == spin.Fail:
		return "fail"
	case code == spin.Segv:
		return "segv"
	case code == spin.Proceed:
		return "deposit"
	}
	return "fail"
}

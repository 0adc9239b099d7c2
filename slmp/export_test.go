// SPDX-License-Identifier: Apache-2.0

package slmp

import "fmt"

// Bounds is an error if the sender keeps more than this many messages, with windows
// of this many segments, need, or has lost count of what it keeps.
func (s *Sender) Bounds(messages, window int) error {
	// A message goes on beyond a hole for four windows; its ring is doubled.
	segments := max(4*window, few)
	ring := max(2*segments, few)
	records, inflight := 0, 0
	for _, o := range s.messages {
		listed, open := o.flight.n+o.repeat.n+o.gone.n+o.lost.n, o.next-o.una
		if open > segments || listed > open || o.flight.n+o.repeat.n != o.inflight || len(o.ring) > ring || 64*len(o.bits) > max(ring, 64) {
			return fmt.Errorf("message %d, window %d: %d segments open, %d in lists, %d in flight (%d, %d again), ring of %d, %d words of bits",
				o.id, window, open, listed, o.inflight, o.flight.n, o.repeat.n, len(o.ring), len(o.bits))
		}
		if !o.stalled {
			inflight += o.inflight
		}
		records += len(o.ring)
	}
	if inflight != s.inflight {
		return fmt.Errorf("%d segments in flight are counted as %d", inflight, s.inflight)
	}
	for _, rings := range s.rings {
		for _, r := range rings {
			records += len(r)
		}
	}
	if records > messages*2*ring { // those that a ring outgrew are kept
		return fmt.Errorf("%d records for %d messages with windows of %d segments", records, messages, window)
	}
	if len(s.timers) > len(s.messages) {
		return fmt.Errorf("%d timers for %d messages", len(s.timers), len(s.messages))
	}
	for i := range s.queues {
		n := 0
		for o := s.queues[i].first; o != nil; o = o.links[i].next {
			n++
		}
		if n > messages {
			return fmt.Errorf("%d messages in queue %d, of %d", n, i, messages)
		}
	}
	return nil
}

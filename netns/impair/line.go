// SPDX-License-Identifier: Apache-2.0

package impair

import "github.com/xspin/xspin/xsk"

// A slot is one buffer of a waiting frame.
type slot struct {
	due  int64 // when the frame is to leave, CLOCK_MONOTONIC, ns
	desc xsk.Desc
	flow uint32
}

// A line is a bounded FIFO queue of frames. A frame is one or more slots, of which
// all but the last are marked as continued. The zero value has no room.
type line struct {
	slots      []slot // a power of two
	head, tail uint64
}

func newLine(n int) line { return line{slots: make([]slot, n)} }

// push queues a frame, as a whole or not at all.
func (l *line) push(due int64, flow uint32, frame []xsk.Desc) bool {
	if uint64(len(l.slots))-(l.tail-l.head) < uint64(len(frame)) {
		return false
	}
	for _, d := range frame {
		l.slots[l.tail&uint64(len(l.slots)-1)] = slot{due, d, flow}
		l.tail++
	}
	return true
}

// first returns the first slot of the first frame, nil if none waits.
func (l *line) first() *slot {
	if l.head == l.tail {
		return nil
	}
	return &l.slots[l.head&uint64(len(l.slots)-1)]
}

// frame appends the buffers of the first frame to dst.
func (l *line) frame(dst []xsk.Desc) []xsk.Desc {
	for i := l.head; i != l.tail; i++ {
		d := l.slots[i&uint64(len(l.slots)-1)].desc
		dst = append(dst, d)
		if d.Options&xsk.Continued == 0 {
			break
		}
	}
	return dst
}

// drop removes n slots from the front.
func (l *line) drop(n int) { l.head += uint64(n) }

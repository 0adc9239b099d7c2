// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/slmp"
)

var (
	// ErrConfig is returned, wrapped, for an invalid Transfer or Config.
	ErrConfig = errors.New("invalid transfer")
	// ErrContents is returned, wrapped, if the window has wrong bytes.
	ErrContents = errors.New("the window has other bytes than it must")
)

const (
	// MaxParallel is how many messages a round may have.
	MaxParallel = 1024
	// maxWindow is the largest window of a transfer, in bytes.
	maxWindow = 4 << 30
	// gap is how many bytes lie between places, at least. They must never be written.
	gap = 64
	// maxContents is how many bytes of different messages a sender keeps, unless a single
	// one is longer.
	maxContents = 256 << 20
)

// A layout is where the messages of a transfer go in the window: a place each, with
// displacement 0 at its origin, and a gap before and after each place.
type layout struct {
	Transfer
	data   *ddt.Committed
	size   int64 // bytes of a message's stream
	lo, hi int64 // a place has the bytes lo to hi-1 from its origin, with 0 among them
	// The sender's buffer has these, with 0 among them.
	first, last int64
}

func newLayout(t Transfer) (*layout, error) {
	typ, count, err := ddt.Resolve(t.Type)
	if err != nil {
		return nil, err
	}
	t.Count = cmp.Or(t.Count, count)
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: %s: "+format, append([]any{ErrConfig, t.name()}, a...)...)
	}
	switch {
	case t.Count < 1 || t.Count > math.MaxUint32:
		return nil, bad("%d elements: want 1 to %d", t.Count, math.MaxUint32)
	case t.Parallel < 1 || t.Parallel > MaxParallel:
		return nil, bad("%d messages at a time: want 1 to %d", t.Parallel, MaxParallel)
	case t.Strategy != Deposit && !slices.Contains(ddt.Strategies(), t.Strategy):
		return nil, bad("strategy %q: want one of %q", t.Strategy, append(ddt.Strategies(), Deposit))
	case t.Interval < 0:
		return nil, bad("checkpoints %d bytes apart: want 0 or more", t.Interval)
	}
	l := &layout{Transfer: t}
	if l.data, err = ddt.Commit(typ, t.Count); err != nil {
		return nil, fmt.Errorf("%s: %w", t.name(), err)
	}
	l.size = l.data.Size()
	lo, hi := l.data.Bounds()
	l.first, l.last = min(lo, 0), max(hi, 0)
	l.lo, l.hi = l.first, l.last
	if t.Strategy == Deposit {
		l.lo, l.hi = 0, l.size
	}
	switch span := max(uint64(l.hi)-uint64(l.lo), uint64(l.last)-uint64(l.first)); {
	case l.size == 0:
		return nil, bad("%d elements have no bytes: there is nothing to send", l.Count)
	case l.size > slmp.MaxMessage:
		return nil, bad("a message of %d bytes: SLMP has at most %d: want fewer elements than %d", l.size, int64(slmp.MaxMessage), l.Count)
	case span > (maxWindow-gap)/uint64(t.Parallel)-2*gap:
		return nil, bad("%d messages in %d bytes each: the window has at most %d: want fewer messages or elements", t.Parallel, span, int64(maxWindow))
	}
	if t.Strategy == ddt.Specialized { // which takes flat types only
		if _, err := ddt.NewPlacement(l.data, ddt.Config{Strategy: t.Strategy, HPUs: 1, Messages: 1, Packet: hpu.DefaultSlice}); err != nil {
			return nil, bad("%w", err)
		}
	}
	return l, nil
}

// Check returns what is wrong with a transfer, as Open would: an error that wraps
// ErrConfig, or one of package ddt about the type.
func (t Transfer) Check() error {
	_, err := newLayout(t)
	return err
}

// name is the transfer's name in texts.
func (t Transfer) name() string { return cut(cmp.Or(t.Name, t.Type), 60) }

// cut removes the middle of a text that is longer than most: many types start or end
// alike, but few do both.
func cut(s string, most int) string {
	const gap = "..."
	r := []rune(s)
	if len(r) <= most {
		return s
	}
	end := (most - len(gap)) / 2
	return string(r[:most-len(gap)-end]) + gap + string(r[len(r)-end:])
}

// stride is how far apart places are, a multiple of gap.
func (l *layout) stride() int64 { return (l.hi-l.lo+gap-1)/gap*gap + gap }

// origin returns where displacement 0 of place i is.
func (l *layout) origin(i int) int64 { return gap + int64(i)*l.stride() - l.lo }

// window returns how many bytes the window has.
func (l *layout) window() int64 { return gap + int64(l.Parallel)*l.stride() }

// receive is what the application posts for place i. A message may touch only the bytes
// of its place, or the whole window if some are before its origin, which a receive cannot
// express.
func (l *layout) receive(i int) control.Receive {
	r := control.Receive{Window: windowName, Place: l.origin(i), Size: l.hi, Ignore: math.MaxUint32, User: uint64(i)}
	if l.lo < 0 {
		r.Size = 0
	}
	return r
}

// params are those of the handler set "datatype".
func (l *layout) params() map[string]any {
	p := map[string]any{"type": l.Type, "count": l.Count, "strategy": l.Strategy}
	if l.Interval > 0 {
		p["interval"] = l.Interval
	}
	return p
}

// contents returns how many of a round's messages differ when they are verified: all,
// unless that would take the sender too much memory.
func (l *layout) contents() int { return int(max(min(int64(l.Parallel), maxContents/l.size), 1)) }

// sent is the byte at off of the buffer that a message is packed from. It is printable.
// The first message of a round, and all that are not verified, have FPsPIN's pattern,
// which repeats after 95 bytes. The pattern of the others does not repeat, so bytes from
// another message or place are noticed.
func sent(message int, off int64) byte {
	if message == 0 {
		return byte(32 + off%95)
	}
	x := (uint64(off) ^ uint64(message)<<40) * 0x9e3779b97f4a7c15
	x = (x ^ x>>32) * 0xd6e8feb86659fd93
	return byte(32 + (x>>32)%95)
}

// hole is the byte at off of the window before it is written. sent never returns it.
func hole(off int64) byte { return byte(128 + off%113) }

// pack returns the stream of a message, one of contents, from a buffer that has a byte for
// each of the type's displacements.
func (l *layout) pack(message int) ([]byte, error) {
	memory := make([]byte, l.last-l.first)
	for i := range memory {
		memory[i] = sent(message, int64(i))
	}
	stream := make([]byte, l.size)
	_, err := l.data.Pack(stream, memory, -l.first, 0)
	return stream, err
}

// clear fills bytes from to to-1 of a window with holes.
func (l *layout) clear(window []byte, from, to int64) {
	for i := from; i < to; i++ {
		window[i] = hole(i)
	}
}

// around returns the bytes of the window at a place: its own, and the gaps.
func (l *layout) around(place int) (from, to int64) {
	from = int64(place) * l.stride()
	return from, from + l.stride() + gap
}

// compare checks every byte of a place, and of the gaps around it, which were clear before
// the message arrived. message is one of contents. What must be there follows from the
// pieces of the type alone, since each byte comes from the same displacement of the
// sender's buffer, however it was packed.
func (l *layout) compare(window []byte, place, message int) error {
	from, to := l.around(place)
	want := make([]byte, to-from)
	for i := range want {
		want[i] = hole(from + int64(i))
	}
	origin := l.origin(place) - from
	next := origin
	l.data.Each(0, l.size, func(off, n int64) bool {
		at := origin + off
		if l.Strategy == Deposit {
			at = next
			next += n
		}
		for k := range n {
			want[at+k] = sent(message, off+k-l.first)
		}
		return true
	})
	wrong, where := 0, int64(0)
	for i, b := range window[from:to] {
		if b != want[i] {
			if wrong == 0 {
				where = int64(i)
			}
			wrong++
		}
	}
	if wrong == 0 {
		return nil
	}
	what := "of the type"
	if want[where] == hole(from+where) {
		what = "of a hole"
	}
	return fmt.Errorf("%w: %d of %d around place %d, the first at displacement %d, %s: %#02x instead of %#02x",
		ErrContents, wrong, len(want), place, where-origin, what, window[from+where], want[where])
}

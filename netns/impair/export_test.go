// SPDX-License-Identifier: Apache-2.0

package impair

import (
	"time"

	"github.com/xspin/xspin/xsk"
)

// Fate is what happens to a frame.
type Fate struct {
	Lost, Duplicated, Corrupted, Reordered bool
	Bit                                    int // flipped, counted from the end of the Ethernet header
}

// FateOf says what happens to the n-th frame of a direction, of that many bytes of
// IP: what the program does, in Go. Reordered is for the n-th frame that gets to
// the relay.
func FateOf(c Config, way Direction, n uint64, length int) (f Fate) {
	key := keyOf(c.Seed, way)
	x, y := draw(key, 2*n), draw(key, 2*n+1)
	f.Lost = x&0xffffffff < threshold(c.Loss)
	f.Duplicated = x>>32 < threshold(c.Duplicate)
	f.Corrupted = y&0xffffffff < threshold(c.Corrupt)
	f.Reordered = happens(mix(^key), n, threshold(c.Reorder))
	f.Bit = int(y >> 32 % uint64((length-ethHeader)*8))
	return f
}

// RoundTrip is c as the programs know it.
func (c Config) RoundTrip() Config {
	return configOf([2]settings{c.setting(ways[0]), c.setting(ways[1])})
}

var Capacity = capacity

// Backlog is what waits for a rate, in bytes.
var Backlog = backlog

// A Line is a line of whole frames.
type Line struct{ l line }

func NewLine(n int) *Line { return &Line{newLine(n)} }

func (l *Line) Push(due time.Duration, frame []xsk.Desc) bool { return l.l.push(int64(due), 0, frame) }

func (l *Line) Pop() (due time.Duration, frame []xsk.Desc) {
	s := l.l.first()
	if s == nil {
		return 0, nil
	}
	due = time.Duration(s.due)
	frame = l.l.frame(nil)
	l.l.drop(len(frame))
	return due, frame
}

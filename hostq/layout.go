// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"sync/atomic"
	"unsafe"

	"github.com/xspin/xspin/spin"
)

// The memory of a pair: a shared, then the slots of the events, of the requests, and
// of the responses of each lane. Numbers are in the byte order of the machine.

// magic says that the memory is a pair's, and of which version.
const magic = 'X'<<56 | 'h'<<48 | 'o'<<40 | 's'<<32 | 't'<<24 | 'q'<<16 | 3

type shared struct {
	magic  uint64 // the NIC writes it, and the layout, once
	layout [4]uint32
	_      [232]byte

	// The side that sleeps sets waiting; the side that rings the doorbell swaps it to 0.
	waiting atomic.Uint32 // the application writes 1, the NIC 0
	_       [252]byte
	ended   atomic.Uint32 // the NIC writes it, and rings: an end* constant
	_       [252]byte

	events   uint64 // the application writes it: the events' head
	_        [248]byte
	requests uint64 // the application writes it: the requests' head
	_        [248]byte

	lanes    [MaxLanes]sharedLane
	counters [Counters]sharedCounter
}

type sharedLane struct {
	waiting atomic.Uint32 // the NIC writes 1, the application 0
	_       [124]byte
	head    uint64 // the NIC writes it
	_       [120]byte
}

type sharedCounter struct {
	value atomic.Uint64
	want  atomic.Uint64 // the application writes it: ring at this value. The side that rings swaps it to 0
	_     [48]byte
}

// Why the NIC has ended a pair.
const (
	endDetached = iota + 1
	endBroken
	endAsking // requests have ended, and events have not: the application does not see it
)

// An eventSlot is three cache lines; what most events need is in the first.
type eventSlot struct {
	lap     uint32
	kind    uint8 // EventKind, and flags
	cause   uint8
	port    uint16
	number  uint32
	slot    uint32
	length  uint64
	user    uint64
	dropped uint64
	time    int64
	address [16]byte
	missing uint64        // with eventMissing in cause
	text    [TextLen]byte // to the first 0
}

// Flags of eventSlot.kind. An event that has lost others has their number in length.
const (
	eventKind  = 1<<4 - 1
	eventFlow  = 1 << 4
	eventIPv4  = 1 << 5
	eventIPv6  = 1 << 6
	eventTexts = 1 << 7
)

// eventMissing is a flag of eventSlot.cause.
const eventMissing = 1 << 7

type requestSlot struct {
	lap    uint32
	length uint32 // of the payload, and requestReply
	id     uint64
	tag    uint64
	words  [2]uint64
	hpu    uint32
	_      uint32
	// payload
}

const requestReply = 1 << 31

type responseSlot struct {
	lap    uint32
	length uint32 // of the payload
	id     uint64
	status int32
	_      uint32
	// payload
}

const (
	requestHeader  = int(unsafe.Sizeof(requestSlot{}))
	responseHeader = int(unsafe.Sizeof(responseSlot{}))
	eventStride    = int(unsafe.Sizeof(eventSlot{}))
)

// align rounds up to cache lines.
func align(n int) int { return (n + 63) &^ 63 }

func (l *Layout) requestStride() int  { return align(requestHeader + l.Payload) }
func (l *Layout) responseStride() int { return align(responseHeader + l.Payload) }

// Size returns how many bytes of memory a pair takes, if the layout can be.
func (l *Layout) Size() int64 {
	return int64(align(int(unsafe.Sizeof(shared{})))) +
		int64(l.Events)*int64(eventStride) +
		int64(l.Requests)*int64(l.requestStride()) +
		int64(l.Lanes)*int64(l.Requests)*int64(l.responseStride())
}

func (l *Layout) words() [4]uint32 {
	return [4]uint32{uint32(l.Events), uint32(l.Requests), uint32(l.Payload), uint32(l.Lanes)}
}

// Check says what is wrong with a layout.
func (l *Layout) Check() (wrong spin.Problems) {
	for _, f := range []struct {
		what     string
		n        int
		min, max int
		power    bool
	}{
		{"events", l.Events, 1, MaxSlots, true},
		{"requests", l.Requests, 1, MaxSlots, true},
		{"payload", l.Payload, 0, MaxPayload, false},
		{"lanes", l.Lanes, 1, MaxLanes, false},
	} {
		if f.n < f.min || f.n > f.max || f.power && f.n&(f.n-1) != 0 {
			s := ""
			if f.power {
				s = ", a power of two"
			}
			wrong.Add(f.what, "%d: want %d to %d%s", f.n, f.min, f.max, s)
		}
	}
	return wrong
}

// parts are the pieces of a pair's memory.
type parts struct {
	*shared
	events, requests ring
	responses        []ring // by lane
}

// cut finds the parts. The memory must have l.Size() bytes and begin at a cache line.
func (l *Layout) cut(mem []byte) parts {
	p := parts{shared: (*shared)(unsafe.Pointer(unsafe.SliceData(mem)))}
	mem = mem[align(int(unsafe.Sizeof(shared{}))):]
	next := func(slots, stride int) ring {
		r := newRing(mem, slots, stride)
		mem = mem[slots*stride:]
		return r
	}
	p.events = next(l.Events, eventStride)
	p.requests = next(l.Requests, l.requestStride())
	for range l.Lanes {
		p.responses = append(p.responses, next(l.Requests, l.responseStride()))
	}
	return p
}

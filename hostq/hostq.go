// SPDX-License-Identifier: Apache-2.0

// Package hostq is what a NIC and an application in another process share: windows,
// events, counters, and queue pairs, all in memory that both have mapped.
//
//	Memory   a mapped BPF array map, passed by descriptor
//	Window   a range of a Memory, with rights: what handlers may use
//	Pair     the NIC's side of events, counters, requests and responses
//	Host     the application's side of the same
//
// Each side takes the other for hostile: what lies in shared memory is read once,
// checked, and used from private copies; an index that cannot be breaks the pair and
// nothing else. The process that scribbles over all it can map loses its own data.
// All else it can do is wake the NIC as often as it can make system calls itself, and
// have it make one for each event.
//
// # Memory order
//
// Taking synchronizes with giving. Whatever a thread of the NIC has done before it calls
// Event, Request or Notify, to windows, to HPU memory and to counters, is seen by whoever
// takes that event or request. Whatever the application has done before Respond is
// seen by the function that Poll gives the response to. A slot's payload may be used
// until Respond or Done, and not after.
//
// Events are taken in the order of their calls where one call returns before the other
// begins, and so are requests. Between an event and a request, between lanes, and between
// the threads of one side there is no order but what they make among themselves.
//
// Counters and the atomic operations of windows are sequentially consistent, like
// sync/atomic: all see all of them in one order. So are the words behind Arm: when Arm has
// returned true, what is given after it rings the doorbell; no wakeup is lost. Plain accesses
// to a window are ordered by these, and not by each other.
//
// This holds on every CPU that Go runs on. It is the order of sync/atomic's operations
// on lap words, heads, waiting words and counters (see ring.go, doorbell.go), and a litmus
// test in two processes, which sleeps in every way there is, fails if one of those that x86
// would reorder is made plain.
package hostq

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/xspin/xspin/spin"
)

// Errors that callers tell apart.
var (
	ErrFull     = errors.New("ring full")
	ErrDetached = errors.New("no application is attached")
	ErrBroken   = errors.New("the other side has violated the ring's protocol")
	ErrTooLong  = errors.New("payload too long")

	errUnaligned = fmt.Errorf("not aligned: %w", spin.ErrBounds)
)

// An EventKind says what an event is about.
type EventKind uint8

// Kinds of events.
const (
	MessageEnded  EventKind = iota + 1 // complete, or not: see Cause
	MessageFailed                      // its first error, once; nothing more comes of the message
	ContextFault                       // the context runs no handlers any more
	Overflow                           // Lost events found no room before this one
)

// An Event is what the NIC tells the application.
type Event struct {
	Kind        EventKind
	Cause       uint8 // spin.Cause, up to 127
	FlowControl bool  // the NIC had to drop packets of the message
	Number      uint32
	Slot        uint32
	Source      netip.AddrPort
	Length      uint64 // bytes
	Dropped     uint64 // of these
	Missing     uint64 // of these; 0 also if the end of the message never came: see Complete
	User        uint64 // of the binding
	Lost        uint64 // with Overflow
	Time        int64  // when the message ended: CLOCK_MONOTONIC in ns
	Text        string // of an error; at most TextLen bytes, or cut with … at the end
}

// Complete tells whether the event is the end of a message of which all has come. Other ends, such as a timeout or the
// context's removal, have a length, too.
func (e *Event) Complete() bool {
	return e.Kind == MessageEnded && spin.Cause(e.Cause) == spin.Complete
}

// TextLen is how much of an error's text fits into an event.
const TextLen = 120

// Counters is how many counting events a pair has.
const Counters = 64

// A Layout says how big the parts of a pair are. The NIC's side tells it to the
// application's.
type Layout struct {
	Events   int `json:"events"`   // slots, a power of two
	Requests int `json:"requests"` // slots, a power of two
	Payload  int `json:"payload"`  // bytes of a request or a response, at most
	Lanes    int `json:"lanes"`    // response rings, each for one thread of the NIC
}

// Defaults and limits of a Layout.
const (
	DefaultEvents   = 1024
	DefaultRequests = 1024
	DefaultPayload  = 2048
	MaxSlots        = 1 << 20
	MaxPayload      = 64 << 10
	MaxLanes        = 64
)

// A Request is what a handler asks of the application.
type Request struct {
	Tag     uint64    // what it is about: the application's business
	Words   [2]uint64 // and two words more
	HPU     uint32    // that asks
	Reply   bool      // a response is wanted
	Again   bool      // it has found no room before, and is counted already
	Payload []byte    // copied
}

// A Response is the application's answer.
type Response struct {
	ID      uint64
	Tag     uint64
	Status  int32  // the application's business
	Payload []byte // a private copy, good until the function it is given to returns
	User    any    // what Pair.Request was given
	Err     error  // ErrDetached: there will be no answer
}

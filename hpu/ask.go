// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"net/netip"

	"github.com/xspin/xspin/hostq"
)

// A Reply is the application's answer to a request.
type Reply struct {
	Tag     uint64
	Status  int32
	Payload []byte // good until the continuation returns
	Err     error  // there is no answer: wraps hostq.ErrDetached, or ErrTime
}

// Then is a continuation: it runs on the HPU of the handler that asked, when the answer
// has come or is sure not to come, with the packet as the handler has left it. In a
// context with messages the packet's HER finishes when it has returned, and in all
// it may do what the payload handler may, also ask again.
type Then func(h *HER, r *Reply) Code

// Window returns one of the context's windows, nil if there is none of that name.
func (t *Task) Window(name string) Window { panic("not yet") }

// Memory returns the context's HPU memory. Other HPUs use it at the same time, and
// other contexts may: it is for sync/atomic, or for one writer.
func (t *Task) Memory() []byte { panic("not yet") }

// HPUMemory returns the HPU's own memory of the context.
func (t *Task) HPUMemory() []byte { panic("not yet") }

// Counter returns counting event i of the application's, nil without one.
func (t *Task) Counter(i int) *hostq.Counter { panic("not yet") }

// Notify sends a request to the application that wants no answer.
func (t *Task) Notify(tag uint64, payload []byte) error { panic("not yet") }

// Ask sends a request to the application and waits for its answer, of which it copies
// into dst what fits. The HPU does nothing else meanwhile; it waits for three quarters
// of the handlers' time limit at most, and then returns ErrTime.
func (t *Task) Ask(tag uint64, payload, dst []byte) (n int, status int32, err error) {
	panic("not yet")
}

// AskThen sends a request to the application, and has then run when the answer comes.
// The handler must return Success then, and not send, keep or hand on the packet. Not
// in header handlers.
func (h *HER) AskThen(tag uint64, payload []byte, then Then) error { panic("not yet") }

// Resolve returns the way to an address. It does not wait: errors that wrap
// ErrUnresolved say that the neighbour is being asked.
func (t *Task) Resolve(dst netip.Addr) (Hop, error) { panic("not yet") }

// SendUDP is SendNew for a datagram with n bytes of payload from a port of this
// interface's address, to wherever: its headers are there, and the payload is
// returned, of unknown content. IPv4 only; without a checksum.
func (t *Task) SendUDP(from uint16, to netip.AddrPort, n int) ([]byte, error) { panic("not yet") }

// A Trigger activates a context from the host's side (D4.7 section 4.4.7): a message
// without packets, for which all handlers run. Its payload is a range of a window, cut
// in slices, each of which is a payload HER.
type Trigger struct {
	Words  [4]uint64 // for handlers: Message.Words
	Window Window    // Optional: without, the message is empty
	Offset int64
	Length int64
	Slice  int // bytes; Defaults to 1408
}

// Trigger runs a context's handlers for a message of the host's. It returns when the
// message has been accepted: its end is an event like that of others.
func (p *Pool) Trigger(c *Context, t Trigger) error { panic("not yet") }

// Init runs the init handler of a context, if it has one, on one of its HPUs, and
// returns what that returns.
func (p *Pool) Init(c *Context) error { panic("not yet") }

// SetResources gives the context what its handlers may use. Before Pool.Install.
func (c *Context) SetResources(r Resources) error { panic("not yet") }

// SetTap has a tap see the context's frames from now on; nil ends that.
func (c *Context) SetTap(t Tap) { panic("not yet") }

// Words returns the words of the trigger that made the message; zero for others.
func (m *Message) Words() [4]uint64 { panic("not yet") }

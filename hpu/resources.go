// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"time"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/spin"
)

// Resources are what the handlers of a context may use in addition to their packet. All
// are optional. They must outlive the context, handlers that are stuck included.
type Resources struct {
	Windows []NamedWindow // see Task.Window

	// HPU memory, to be read and written; nil: none. Memory is the context's, which
	// other contexts and the outside may use at the same time; PerHPU is cut in as
	// many equal parts as there are HPUs.
	Memory *hostq.Window
	PerHPU *hostq.Window

	Host     Host          // to the application. Its lanes are the workers
	Full     Full          // what to do when its request ring is full
	Timer    time.Duration // how often Handlers.Timer runs, at least 1 ms. 0: never
	Resolver spin.Resolver // for Task.Resolve and Task.SendUDP
	Log      LogSink       // for Task.Logf. Defaults to the pool's logger
}

// A Host is the way to an application; *hostq.Pair is one.
type Host interface {
	Request(lane int, r *hostq.Request, user any) (id uint64, err error)
	Poll(lane, most int, f func(*hostq.Response)) int
	Cancel(id uint64) bool
	Outstanding(lane int) int
	Doorbell(lane int) int // a descriptor for epoll, -1 for none
	Arm(lane int) bool
	Disarm(lane int)
	Counter(i int) *hostq.Counter
	Detach()
}

var _ Host = (*hostq.Pair)(nil)

// A NamedWindow is a window as handlers find it.
type NamedWindow struct {
	Name string
	spin.Window
}

// Full says what becomes of a request for which the ring to the application has no room.
type Full int

// What Full can be.
const (
	FullFails Full = iota // the handler gets ErrFull
	FullDrops             // it is counted as dropped, and the handler not told

	// The handler waits for room, for three quarters of its time limit, and then gets
	// ErrTime. All packets of a batch, of up to 64, wait no longer than that together;
	// and after the first time in vain handlers get ErrFull until there was room, so
	// that an application that takes nothing does not hold up other contexts.
	FullWaits
)

// Errors of what handlers ask for.
var (
	ErrNoHost = errors.New("the context has no application to ask")
	ErrTime   = errors.New("no answer in time")
	ErrHere   = errors.New("not in a handler of this kind")
)

// A LogSink takes what handlers print. Log does not wait, and copies the text. Now is
// CLOCK_MONOTONIC in ns.
type LogSink interface {
	Log(now int64, hpu int, text []byte)
}

// A Tap sees the frames of a context. Packet is called by workers, does not wait, and
// copies what it wants to have.
type Tap interface {
	Packet(r *TapRecord, frame []byte)
}

// A TapRecord is what is known of a frame.
type TapRecord struct {
	Time    int64 // CLOCK_MONOTONIC, ns, when the worker took it
	Out     bool  // sent by a handler, or an answer; else it came in, and frame is as it came
	HPU     int
	Queue   int
	Ruleset int
	Number  uint32 // of the message, in contexts with messages
	Offset  uint32 // in it
	EOM     bool
	Message bool   // Number, Offset and EOM are there
	Verdict string // what became of it, a constant: "success", "drop", "sent", "kept", "held", "duplicate", ...
	Size    int    // of the frame, which may be cut
}

// Check tells what is wrong with resources for a context with these handlers.
func (r *Resources) Check(h *Handlers) (wrong spin.Problems) {
	switch {
	case r.Timer != 0 && h.Timer == nil:
		wrong.Add("timer", "%v: the handlers have no timer handler", r.Timer)
	case r.Timer == 0 && h.Timer != nil:
		wrong.Add("timer", "the handlers have a timer handler: say how often it runs")
	case r.Timer != 0 && r.Timer < time.Millisecond:
		wrong.Add("timer", "%v: at least 1ms", r.Timer)
	}
	if r.Full < FullFails || r.Full > FullWaits {
		wrong.Add("queue.full", "%d: want FullFails, FullDrops or FullWaits", r.Full)
	}
	if _, err := hpuMemory(r.Memory); err != nil {
		wrong.Add("memory", "%w", err)
	}
	if _, err := hpuMemory(r.PerHPU); err != nil {
		wrong.Add("hpu_memory", "%w", err)
	}
	return wrong
}

// SetResources gives the context what its handlers may use. Before Pool.Install.
func (c *Context) SetResources(r Resources) error {
	if err := r.Check(&c.handlers).Err(); err != nil {
		return err
	}
	c.memory, _ = hpuMemory(r.Memory) // Check has seen to it
	c.perHPU, _ = hpuMemory(r.PerHPU)
	c.res = r
	return nil
}

// hpuMemory returns the bytes of HPU memory, which handlers have as they are.
func hpuMemory(w *hostq.Window) ([]byte, error) {
	if w == nil {
		return nil, nil
	}
	return w.Slice(0, w.Size(), spin.Read|spin.Write)
}

// Window returns one of the context's windows, or nil if none has that name.
func (t *Task) Window(name string) spin.Window {
	for i := range t.ctx.res.Windows {
		if w := &t.ctx.res.Windows[i]; w.Name == name {
			return w.Window
		}
	}
	return nil
}

// Memory returns the context's HPU memory. Other HPUs use it at the same time, and
// other contexts may: it is for atomic operations, such as those of [Memory](h.Memory()),
// or for one writer.
func (t *Task) Memory() []byte { return t.ctx.memory }

// HPUMemory returns the HPU's own part of the context's memory.
func (t *Task) HPUMemory() []byte {
	all := t.ctx.perHPU
	n := len(all) / t.HPUs()
	return all[t.port.hpu*n:][:n:n]
}

// Counter returns the application's counting event i, nil without one.
func (t *Task) Counter(i int) *hostq.Counter {
	if t.ctx.res.Host == nil {
		return nil
	}
	return t.ctx.res.Host.Counter(i)
}

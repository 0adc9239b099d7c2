// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
)

// MaxReceives is how many receives can be posted to messages in the kernel. A message takes
// the first that matches of some 256 that were posted first: those behind them wait.
const MaxReceives = 4096

// ErrReceives is wrapped by the error of a receive for which there is no room.
var ErrReceives = errors.New("no room for the receive")

// What a receive is, in the lower bits of its word: xspin_receive_is.
const (
	receiveVoid   = 0
	receivePosted = 1
	receiveTaken  = 2
	receiveHeld   = 3
)

// A Receive waits for its message, see spin.Receive.
type Receive struct {
	Tag, Ignore uint32
	Keep        bool
	Window      int   // index in MessagesConfig.Windows, of one that may be written
	Place       int64 // in the window
	Size        int64 // bytes that the message may take there. 0: up to the window's end
	User        uint64
}

// receives is the ring of those that are posted: they are numbered, and number n lies in
// element n % MaxReceives. The program takes them by compare-and-swap, and moves the head
// past those that it has taken. All else is user space's, which has Handlers.mu. It believes
// nothing that it reads in what is mapped: no loop ends where that says.
type receives struct {
	ring    []bpf.MessageReceive // mapped
	posted  []bpf.MessageRing    // mapped; 1
	tail    uint64               // the next number. The program has a copy
	windows []WindowConfig
}

func openReceives(coll *ebpf.Collection, windows []WindowConfig) (r *receives, err error) {
	r = &receives{windows: windows}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.ring, err = mapAll[bpf.MessageReceive](coll.Maps[bpf.MessagesReceives], MaxReceives); err != nil {
		return nil, err
	}
	r.posted, err = mapAll[bpf.MessageRing](coll.Maps[bpf.MessagesPosted], 1)
	return r, err
}

func (r *receives) close() error {
	if r == nil {
		return nil
	}
	err := errors.Join(unmapAll(r.ring), unmapAll(r.posted))
	r.ring, r.posted = nil, nil
	return err
}

// element returns the receive that is posted with number n, nil if it is not any more.
func (r *receives) element(n uint64) *bpf.MessageReceive {
	e := &r.ring[n%MaxReceives]
	if atomic.LoadUint64(&e.Word) != n<<2|receivePosted {
		return nil
	}
	return e
}

// held tells whether a message has the receive with number n, and may give it back.
func (r *receives) held(n uint64) bool {
	return atomic.LoadUint64(&r.ring[n%MaxReceives].Word) == n<<2|receiveHeld
}

// head returns the number of the first that may be posted: at most MaxReceives before tail.
func (r *receives) head() uint64 {
	first := r.tail - min(r.tail, MaxReceives)
	if head := atomic.LoadUint64(&r.posted[0].Head); head >= first && head <= r.tail {
		return head
	}
	return first
}

// skip moves the head to the first receive that is posted, and counts those from there on.
func (r *receives) skip() (n int) {
	for at := r.head(); at < r.tail && r.element(at) == nil && !r.held(at); at++ {
		atomic.CompareAndSwapUint64(&r.posted[0].Head, at, at+1) // or the program has
	}
	for at := r.head(); at < r.tail; at++ {
		if r.element(at) != nil || r.held(at) {
			n++
		}
	}
	return n
}

// heldTime is how long compact waits for header handlers: longer than any takes.
const heldTime = 2 * MaxPacketTime

// compact closes the gaps that receives have left which were taken before older ones. While
// that goes on a message may find none, and comes again. It waits for header handlers that run,
// whose messages may give theirs back.
func (r *receives) compact() {
	all := map[uint64]bpf.MessageReceive{}
	for end := time.Now().Add(heldTime); ; runtime.Gosched() {
		held := false
		for at := r.head(); at < r.tail; at++ {
			held = held || r.held(at)
			if e := r.element(at); e != nil {
				if is := *e; r.take(at) {
					all[at] = is
				}
			}
		}
		if !held || time.Now().After(end) {
			break
		}
	}
	// Nothing is posted, so nobody takes or holds any of these, and the program moves the
	// head only as far.
	atomic.StoreUint64(&r.posted[0].Head, r.tail)
	for _, at := range slices.Sorted(maps.Keys(all)) {
		e := all[at]
		r.put(&e)
	}
}

// take takes a posted receive back. False: a message was faster.
func (r *receives) take(n uint64) bool {
	return atomic.CompareAndSwapUint64(&r.ring[n%MaxReceives].Word, n<<2|receivePosted, n<<2|receiveTaken)
}

// put posts a receive. There is room.
func (r *receives) put(what *bpf.MessageReceive) {
	n := r.tail
	e := &r.ring[n%MaxReceives]
	atomic.StoreUint64(&e.Word, n<<2|receiveVoid)
	e.Tag, e.Ignore, e.Keep, e.Window = what.Tag, what.Ignore, what.Keep, what.Window
	e.Place, e.Room, e.User = what.Place, what.Room, what.User
	atomic.StoreUint64(&e.Word, n<<2|receivePosted)
	r.tail++
	atomic.StoreUint64(&r.posted[0].Tail, r.tail)
}

// gaps is how many elements between the first posted receive and the last may be taken.
const gaps = 64

// tidy compacts if there are many gaps, and tells how many receives are posted.
func (r *receives) tidy() int {
	n := r.skip()
	if int(r.tail-r.head()) > n+gaps {
		r.compact()
	}
	return n
}

func (r *receives) check(q *Receive) (*bpf.MessageReceive, error) {
	if q.Window < 0 || q.Window >= len(r.windows) {
		return nil, fmt.Errorf("receive for window %d: there are %d", q.Window, len(r.windows))
	}
	w := &r.windows[q.Window]
	switch {
	case w.Rights&spin.Write == 0:
		return nil, fmt.Errorf("receive for window %d: handlers cannot write it: %w", q.Window, spin.ErrRights)
	case q.Place < 0 || q.Place > w.Size || q.Size < 0 || q.Size > w.Size-q.Place:
		return nil, fmt.Errorf("receive for %d bytes at %d of window %d of %d: %w", q.Size, q.Place, q.Window, w.Size, spin.ErrBounds)
	}
	e := &bpf.MessageReceive{
		Tag: q.Tag, Ignore: q.Ignore, Window: uint32(q.Window),
		Place: uint64(w.Off + q.Place), Room: uint64(q.Size), User: q.User,
	}
	if q.Size == 0 {
		e.Room = uint64(w.Size - q.Place)
	}
	if q.Keep {
		e.Keep = 1
	}
	return e, nil
}

// Post posts a receive, behind those that are posted. From the first on, messages for which
// none is posted are refused. The error wraps ErrReceives, spin.ErrRights or spin.ErrBounds.
func (h *Handlers) Post(q Receive) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	r, err := h.receives()
	if err != nil {
		return err
	}
	e, err := r.check(&q)
	if err != nil {
		return err
	}
	atomic.StoreUint64(&r.posted[0].Ever, 1) // first: no message may take the window meanwhile
	if n := r.tidy(); n == MaxReceives {
		return fmt.Errorf("%w: %d are posted, the maximum", ErrReceives, n)
	}
	if r.tail-r.head() == MaxReceives {
		r.compact()
	}
	r.put(e)
	return nil
}

// Take takes the first receive that matches, as a message does with this number. Ever tells whether
// one was posted.
func (h *Handlers) Take(number uint32) (q Receive, ok, ever bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r, err := h.receives()
	if err != nil {
		return q, false, true
	}
	for at := r.head(); at < r.tail; at++ {
		e := r.element(at)
		if e == nil {
			continue
		}
		is := *e
		if (is.Tag^number)&^is.Ignore != 0 || int(is.Window) >= len(r.windows) {
			continue
		}
		q = Receive{
			Tag: is.Tag, Ignore: is.Ignore, Keep: is.Keep != 0, Window: int(is.Window),
			Place: int64(is.Place) - r.windows[is.Window].Off, Size: int64(is.Room), User: is.User,
		}
		if _, err := r.check(&q); err == nil && (q.Keep || r.take(at)) {
			return q, true, true
		}
	}
	return Receive{}, false, atomic.LoadUint64(&r.posted[0].Ever) != 0
}

// Unpost takes back the first receive that is as q. False: there is none.
func (h *Handlers) Unpost(q Receive) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	r, err := h.receives()
	if err != nil {
		return false
	}
	want, err := r.check(&q)
	if err != nil {
		return false
	}
	for at := r.head(); at < r.tail; at++ {
		if e := r.element(at); e != nil {
			is := *e
			if is.Word = 0; is == *want && r.take(at) {
				return true
			}
		}
	}
	return false
}

// Posted returns how many receives wait.
func (h *Handlers) Posted() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	r, err := h.receives()
	if err != nil {
		return 0
	}
	return r.tidy()
}

func (h *Handlers) receives() (*receives, error) {
	switch {
	case h.messages == nil:
		return nil, errors.New("receive: handlers of packets have none")
	case h.messages.receives == nil:
		return nil, errors.New("receive: the handlers are closed")
	}
	return h.messages.receives, nil
}

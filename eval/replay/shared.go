// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

// Shared is what RunShared replays: one message at a time, the next when the last is
// complete, whose packets are spread over all HPUs.
type Shared struct {
	Config // Flights is 1

	// Sequence and VHPUs are those of the policy blocked-rr, as a handler set asks for
	// them. 0: the policy packet.
	Sequence uint32
	VHPUs    int
}

const (
	// SharedCredits is how many packets are with the HPUs, or wait for them, at most.
	SharedCredits = 1024
	// SharedMessages is what Messages is for Run.
	SharedMessages = 16
)

// SharedDone is what HPUs have done together.
type SharedDone struct {
	Packets uint64
	Took    time.Duration
	HPUs    []hpu.Stats // Handled has twice those packets that came before their message began
}

// RunShared has HPUs process messages together for a time. Packets come as soon as there
// is credit, and go where the XDP program would have them.
func RunShared(ctx context.Context, cfg Shared, d time.Duration) (done SharedDone, err error) {
	w, err := newWire(cfg)
	if err != nil {
		return done, fmt.Errorf("replay: %w", err)
	}
	defer w.close()
	queue := hpu.Queue{Frames: w, Shared: w.queue}
	for _, r := range w.rings {
		queue.Rings = append(queue.Rings, r)
	}
	pool, c, err := engine(&w.cfg.Config, w, w.mem, w.share, []hpu.Queue{queue}, w.buckets, SharedMessages, true)
	if err != nil {
		return done, err
	}
	defer pool.Close()
	if err := process(ctx, pool, c, &w.state, d, w.begun.Load, w.over.Load); err != nil {
		return done, err
	}
	done.HPUs, _ = pool.Stats()
	w.mu.Lock()
	defer w.mu.Unlock()
	done.Packets, done.Took = uint64(w.round)*uint64(len(w.frames)), w.end-w.begin
	if err := w.complete(c.Stats().Handled); err != nil {
		return done, fmt.Errorf("replay: %w", err)
	}
	return done, nil
}

// A wire is the link, the kernel and the XDP program, for all HPUs. Whichever of them has
// nothing to do sees to it that packets come.
type wire struct {
	cfg     Shared
	mem     *xsk.UMEM
	share   *bpf.Share
	queue   *bpf.Queue
	buckets []uint64
	window  spin.Window
	frames  []frame // of a message, in the order in which they come
	rings   []*sharedRing
	state   atomic.Int32
	begun   atomic.Bool // a message has come
	over    atomic.Bool // there will be no more
	ended   atomic.Uint64
	failed  atomic.Pointer[error]

	mu         sync.Mutex
	next       int    // of frames
	round      uint32 // messages that have come
	last       uint8  // HPU of the policy packet
	begin, end time.Duration
}

// A sharedRing is an HPU's. Of what goes round it, the wire writes one end and the HPU's
// worker takes from the other.
type sharedRing struct {
	_ [64]byte
	receiveOnly
	wire  *wire
	descs []xsk.Desc
	given atomic.Uint32
	fresh uint32 // beyond these, of the batch that comes

	_     [64]byte
	taken atomic.Uint32
	_     [64]byte
}

func newWire(cfg Shared) (_ *wire, err error) {
	cfg.Flights = 1
	packets, err := cfg.check()
	if err != nil {
		return nil, err
	}
	if cfg.Sequence > 0 && cfg.VHPUs < 1 {
		return nil, fmt.Errorf("sequences of %d bytes for %d virtual HPUs: want 1 or more", cfg.Sequence, cfg.VHPUs)
	}
	w := &wire{cfg: cfg, share: new(bpf.Share), queue: new(bpf.Queue)}
	w.share.Credit[contextID], w.share.Quantum[contextID] = SharedCredits, 1
	if cfg.Sequence > 0 {
		w.buckets = make([]uint64, 1<<12)
	}
	if w.window, err = hostq.WindowOn(make([]byte, cfg.Place), spin.All); err != nil {
		return nil, err
	}
	if w.mem, err = cfg.umem(packets); err != nil {
		return nil, err
	}
	for i, k := range cfg.Order {
		w.frames = append(w.frames, cfg.packet(w.mem, i, 0, k))
	}
	for range cfg.CPUs {
		r := &sharedRing{wire: w, descs: make([]xsk.Desc, SharedCredits)}
		if r.receiveOnly, err = newReceiveOnly(); err != nil {
			w.close()
			return nil, err
		}
		w.rings = append(w.rings, r)
	}
	return w, nil
}

// out returns how many packets are with HPUs, or wait for them.
func (w *wire) out() uint32 {
	return atomic.LoadUint32(&w.queue.Issued[contextID]) - atomic.LoadUint32(&w.queue.Done[contextID])
}

// arrive has some packets come. HPUs see them when all are there, as the kernel has it.
func (w *wire) arrive() {
	const batch = 64 // the kernel's
	if w.out() >= SharedCredits || w.over.Load() || !w.mu.TryLock() {
		return
	}
	defer w.mu.Unlock()
	n := uint32(0)
	for room := min(batch, SharedCredits-w.out()); n < room; n++ {
		if w.next == 0 && (n > 0 || !w.again()) {
			break
		}
		f := &w.frames[w.next]
		f.is(w.round)
		h := w.pick(f)
		r := w.rings[h]
		f.meta.Seq = w.queue.Seq[h][contextID] + r.fresh
		r.descs[(r.given.Load()+r.fresh)%SharedCredits] = f.desc
		r.fresh++
		if w.next++; w.next == len(w.frames) {
			w.next = 0
			w.round++
		}
	}
	if n == 0 {
		return
	}
	atomic.AddUint32(&w.queue.Issued[contextID], n)
	for h, r := range w.rings {
		if r.fresh > 0 {
			atomic.AddUint32(&w.queue.Seq[h][contextID], r.fresh)
			atomic.AddUint32(&w.share.Enqueued[0][h], r.fresh)
			r.given.Add(r.fresh)
			r.fresh = 0
		}
	}
}

// again tells whether another message begins.
func (w *wire) again() bool {
	if w.out() > 0 {
		return false
	}
	switch w.state.Load() {
	case going:
		if w.begin == 0 {
			w.begin = now()
			w.begun.Store(true)
		}
		return true
	case stopping:
		w.end = now()
		w.over.Store(true)
	}
	return false
}

// pick chooses the HPU as bpf/src/ingress.bpf.c does, and notes the hash of the bucket
// that the HPU gives back.
func (w *wire) pick(f *frame) int {
	if w.cfg.Sequence == 0 {
		if w.occupancy(int(w.last)) >= atomic.LoadUint32(&w.share.Quantum[contextID]) {
			w.last = uint8(w.leastOccupied(-1))
		}
		return int(w.last)
	}
	hash := uint32(0)
	for _, word := range f.meta.Key[:f.words] {
		hash = (hash ^ word) * 0x9e3779b1
		hash ^= hash >> 15
	}
	hash += f.meta.Offset / w.cfg.Sequence % uint32(w.cfg.VHPUs) * 0x9e3779b1
	f.meta.Hash = hash
	bucket := &w.buckets[hash%uint32(len(w.buckets))]
	for {
		old := atomic.LoadUint64(bucket)
		h := int(old&0xff) - 1
		if old>>32 == 0 {
			h = w.leastOccupied(h)
		}
		if atomic.CompareAndSwapUint64(bucket, old, (old>>32+1)<<32|uint64(h+1)) {
			return h
		}
	}
}

func (w *wire) occupancy(h int) uint32 {
	return atomic.LoadUint32(&w.share.Enqueued[0][h]) + w.rings[h].fresh - atomic.LoadUint32(&w.share.Dequeued[0][h])
}

func (w *wire) leastOccupied(best int) int {
	least := ^uint32(0)
	if best >= 0 {
		least = w.occupancy(best)
	}
	for h := range w.rings {
		if n := w.occupancy(h); n < least {
			best, least = h, n
		}
	}
	return best
}

// Exchange implements hpu.Exchanger. A packet comes again when all of its message are back.
func (w *wire) Exchange(recycle, _ []uint64) (filled, completed int) { return len(recycle), 0 }

// Bind implements hpu.Binder.
func (w *wire) Bind(*hpu.Message) (spin.Binding, error) {
	return spin.Binding{Window: w.window, Size: w.cfg.Place, Events: w}, nil
}

// Unbind implements hpu.Binder.
func (w *wire) Unbind(*hpu.Message, *spin.Result) {}

// Post implements spin.EventSink.
func (w *wire) Post(e *spin.MessageEvent) bool {
	if e.Cause == spin.Complete {
		w.ended.Add(1)
	} else {
		fault(e, &w.failed)
	}
	return true
}

// complete checks that all that came was processed.
func (w *wire) complete(handled uint64) error {
	if err := w.failed.Load(); err != nil {
		return *err
	}
	n := uint64(w.round)
	if ended := w.ended.Load(); ended != n || n == 0 {
		return fmt.Errorf("%d of %d messages are complete", ended, n)
	}
	if want := n * uint64(len(w.frames)); handled != want {
		return fmt.Errorf("%d of %d packets were handled", handled, want)
	}
	return nil
}

func (w *wire) close() {
	for _, r := range w.rings {
		unix.Close(r.fd)
	}
}

// RxAvailable implements hpu.Ring.
func (r *sharedRing) RxAvailable() uint32 {
	if r.given.Load() == r.taken.Load() {
		r.wire.arrive()
	}
	return r.given.Load() - r.taken.Load()
}

// Receive implements hpu.Ring.
func (r *sharedRing) Receive(descs []xsk.Desc) (n int) {
	at := r.taken.Load()
	for n < len(descs) && at != r.given.Load() {
		descs[n] = r.descs[at%SharedCredits]
		at++
		n++
	}
	r.taken.Store(at)
	return n
}

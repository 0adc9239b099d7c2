// SPDX-License-Identifier: Apache-2.0

package handlerstest

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/xsk"
)

const (
	headroom = xsk.PacketHeadroom // as the kernel leaves it, metadata included
	frames   = 256                // for packets
	spares   = 256                // for frames that handlers make
)

// wire is the kernel's end of the rings, and the XDP program: it puts metadata in
// front of frames and takes credit for them. It has no faults: those that the engine must
// survive are in the kernel of the tests of package hpu, see hpu/fake_test.go.
type wire struct {
	mem    *xsk.UMEM
	share  *bpf.Share
	queue  *bpf.Queue
	rings  []*ring
	txSize int

	mu         sync.Mutex
	quiet      sync.Cond // signalled when rounds grows
	rounds     int       // in a row in which the worker found nothing to do
	fill       []uint64
	completion []uint64
	sent       [][]byte
}

// ring is the ring of an HPU, an hpu.Ring whose other end is the wire.
type ring struct {
	w     *wire
	fd    int // eventfd: readable while there are packets, and while somebody waits for quiet
	rx    []xsk.Desc
	tx    []xsk.Desc
	ready atomic.Uint32
}

func newWire(hpus, txSize int) (*wire, error) {
	mem, err := xsk.NewUMEM(xsk.UMEMConfig{Frames: frames + spares, FrameSize: 2048})
	if err != nil {
		return nil, err
	}
	w := &wire{mem: mem, share: new(bpf.Share), queue: new(bpf.Queue), txSize: txSize}
	w.quiet.L = &w.mu
	for i := range w.share.Credit {
		w.share.Credit[i] = frames
		w.share.Quantum[i] = 1
	}
	for f := range frames {
		w.fill = append(w.fill, mem.Addr(f))
	}
	for range hpus {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			w.close()
			return nil, err
		}
		w.rings = append(w.rings, &ring{w: w, fd: fd})
	}
	return w, nil
}

// close does not unmap the memory, because a handler that never returned may still use it.
func (w *wire) close() {
	for _, r := range w.rings {
		unix.Close(r.fd)
	}
}

func (w *wire) spare() (all []uint64) {
	for f := range spares {
		all = append(all, w.mem.Addr(frames+f))
	}
	return all
}

// room is how many bytes of a frame fit into a buffer.
func (w *wire) room() int { return w.mem.Config().FrameSize - headroom }

// receive puts a packet on the ring of an HPU, buffer bytes at most in each UMEM frame.
// It returns false if there are not enough of these. The caller has w.mu.
func (w *wire) receive(hpu int, hash uint32, frame []byte, v *matcher.Verdict, ctx uint16, buffer int) bool {
	n := max((len(frame)+buffer-1)/buffer, 1)
	if len(w.fill) < n {
		return false
	}
	meta := bpf.Meta{
		Magic: bpf.MetaMagic, Context: ctx, Ruleset: uint8(v.Ruleset), Key: v.Key, Offset: v.Offset,
		Hash: hash, Seq: w.queue.Seq[hpu][ctx], Arrival: uint64(clock.Monotonic()),
	}
	if v.EOM {
		meta.Flags = bpf.MetaEOM
	}
	w.queue.Seq[hpu][ctx] += uint32(n)
	atomic.AddUint32(&w.queue.Issued[ctx], uint32(n))
	atomic.AddUint32(&w.share.Enqueued[0][hpu], uint32(n))
	r := w.rings[hpu]
	for i := range n {
		part := frame[i*buffer : min((i+1)*buffer, len(frame))]
		d := xsk.Desc{Addr: w.fill[0] + headroom, Len: uint32(len(part))}
		w.fill = w.fill[1:]
		if i < n-1 {
			d.Options = xsk.Continued
		}
		copy(w.mem.Bytes(d.Addr, len(part)), part)
		*bpf.MetaOf(w.mem.Front(d.Addr, bpf.MetaSize)) = meta
		meta = bpf.Meta{} // of the first buffer only
		r.rx = append(r.rx, d)
	}
	return true
}

// deliver shows the worker all that was received at once, to be taken as one batch.
func (w *wire) deliver() {
	for _, r := range w.rings {
		if len(r.rx) > 0 {
			r.ready.Store(uint32(len(r.rx)))
			r.ring(true)
		}
	}
}

// settle returns true when nothing is on the rings and the worker has found nothing to
// do in two whole rounds; of the three it counts, one may have started before the call.
// It returns false as soon as until is true.
func (w *wire) settle(until func() bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rounds = 0
	w.rings[0].ring(true) // keeps the worker awake
	for w.rounds < 3 && !until() {
		w.quiet.Wait()
	}
	w.rings[0].ring(false)
	return !until()
}

// busy notes that the worker had something to do. The caller has w.mu.
func (w *wire) busy() { w.rounds = 0 }

// take returns the frames that were sent since the last call.
func (w *wire) take() [][]byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	sent := w.sent
	w.sent = nil
	return sent
}

// ring makes the eventfd readable, or not.
func (r *ring) ring(on bool) {
	var b [8]byte
	if on {
		b[0] = 1
		_, _ = unix.Write(r.fd, b[:])
	} else {
		_, _ = unix.Read(r.fd, b[:])
	}
}

// FD implements hpu.Ring.
func (r *ring) FD() int { return r.fd }

// RxAvailable implements hpu.Ring. A worker asks each of its rings once in a round.
func (r *ring) RxAvailable() uint32 {
	if r == r.w.rings[0] {
		r.w.mu.Lock()
		r.w.rounds++
		for _, o := range r.w.rings {
			if len(o.rx) > 0 {
				r.w.rounds = 0
			}
		}
		r.w.quiet.Broadcast()
		r.w.mu.Unlock()
	}
	return r.ready.Load()
}

// Receive implements hpu.Ring.
func (r *ring) Receive(descs []xsk.Desc) int {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	r.w.busy()
	n := copy(descs, r.rx)
	r.rx = r.rx[n:]
	r.ready.Store(uint32(len(r.rx)))
	if len(r.rx) == 0 && r != r.w.rings[0] {
		r.ring(false)
	}
	return n
}

// TxFree implements hpu.Ring. Every batch calls it first, so the worker is busy.
func (r *ring) TxFree() int {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	r.w.busy()
	return r.w.txSize - len(r.tx)
}

// Send implements hpu.Ring.
func (r *ring) Send(descs []xsk.Desc) int {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	r.w.busy()
	n := min(len(descs), r.w.txSize-len(r.tx))
	r.tx = append(r.tx, descs[:n]...)
	return n
}

// Kick implements hpu.Ring. It sends all that is on the ring.
func (r *ring) Kick() (pending bool, err error) {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	var frame []byte
	for _, d := range r.tx {
		frame = append(frame, r.w.mem.Bytes(d.Addr, int(d.Len))...)
		if d.Options&xsk.Continued == 0 {
			r.w.sent = append(r.w.sent, frame)
			frame = nil
		}
		r.w.completion = append(r.w.completion, d.Addr)
		r.w.busy()
	}
	r.tx = r.tx[:0]
	return false, nil
}

// Stats implements hpu.Ring.
func (r *ring) Stats() (xsk.Stats, error) { return xsk.Stats{}, nil }

// Exchange implements hpu.Exchanger.
func (w *wire) Exchange(recycle, done []uint64) (filled, completed int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(recycle) > 0 || len(w.completion) > 0 {
		w.busy()
	}
	for _, a := range recycle {
		w.fill = append(w.fill, w.mem.Addr(w.mem.Frame(a)))
	}
	completed = copy(done, w.completion)
	w.completion = w.completion[completed:]
	return len(recycle), completed
}

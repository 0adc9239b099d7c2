// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/xsk"
)

// A place is where a frame is: it is in one at a time, and the fake kernel
// complains about any step that is not one of the cycle.
type place uint8

const (
	inUser place = iota // received, completed, or never given away
	onFill
	onRx
	onTx
	onCompletion // sent, and with hold not completed
)

func (p place) String() string {
	return [...]string{"user", "fill ring", "rx ring", "tx ring", "completion ring"}[p]
}

// kernel is the far end of all rings, and the ingress program: it takes credit,
// numbers buffers, writes metadata and counts like bpf/src/ingress.bpf.c.
//
// Package handlerstest has another one, for another job: it has no faults and one worker,
// and knows when that has nothing left to do. For this it takes a lock in each round of the
// worker, which here would hide races from the race detector. This one watches every step of
// every frame, and plays the faults of kernels and links. A NIC for both would bring all
// that out of the tests, for 60 lines less.
type kernel struct {
	t       testing.TB
	mem     *xsk.UMEM
	share   *bpf.Share
	buckets []uint64

	mu     sync.Mutex
	queues []*fakeQueue
	where  []place
	home   []int    // queue of a frame, -1 for a spare one
	used   []uint16 // contexts seen
	free   bool     // frames come without credit in this test: it is not watched
	broken int      // complaints so far
	quiet  bool     // sent frames are not recorded
	sent   []wireFrame
}

type wireFrame struct {
	queue, hpu int
	data       []byte
}

type fakeQueue struct {
	k          *kernel
	id         int
	shared     *bpf.Queue
	rings      []*fakeRing
	fill       []uint64
	completion []uint64
	away       int  // its frames that are not on the fill ring
	hold       bool // sent frames do not complete
	refuse     bool // the fill ring takes nothing
	exchanges  int
}

type fakeRing struct {
	k            *kernel
	q            *fakeQueue
	hpu, fd      int
	rxSize       int
	txSize       int
	rx, tx       []xsk.Desc
	ready        atomic.Uint32
	budget       int // descriptors that a kick sends
	down         bool
	kicks        int
	stats        xsk.Stats
	rxOwn, txOwn int // touched by whoever uses a side: the race detector sees two
}

const frameHeadroom = 256

func newKernel(t testing.TB, queues, hpus, perQueue, spare, rxSize, txSize int) (*kernel, []uint64) {
	mem, err := xsk.NewUMEM(xsk.UMEMConfig{Frames: queues*perQueue + spare, FrameSize: 2048})
	if err != nil {
		t.Fatal(err)
	}
	k := &kernel{t: t, mem: mem, share: new(bpf.Share), buckets: make([]uint64, 1024)}
	k.where = make([]place, queues*perQueue+spare)
	k.home = make([]int, len(k.where))
	for i := range bpf.MaxContexts {
		k.share.Credit[i] = uint32(perQueue)
		k.share.Quantum[i] = 1
	}
	for q := range queues {
		fq := &fakeQueue{k: k, id: q, shared: new(bpf.Queue)}
		for i := range perQueue {
			f := q*perQueue + i
			fq.fill = append(fq.fill, mem.Addr(f))
			k.where[f] = onFill
			k.home[f] = q
		}
		for h := range hpus {
			fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
			if err != nil {
				t.Fatal(err)
			}
			fq.rings = append(fq.rings, &fakeRing{k: k, q: fq, hpu: h, fd: fd, rxSize: rxSize, txSize: txSize, budget: 32})
		}
		k.queues = append(k.queues, fq)
	}
	var spares []uint64
	for i := range spare {
		f := queues*perQueue + i
		k.home[f] = -1
		spares = append(spares, mem.Addr(f))
	}
	t.Cleanup(func() {
		for _, q := range k.queues {
			for _, r := range q.rings {
				unix.Close(r.fd)
			}
		}
		// The memory stays: a test that fails may have left a handler behind.
	})
	return k, spares
}

// complain reports a broken rule. The caller holds k.mu.
func (k *kernel) complain(format string, args ...any) {
	if k.broken++; k.broken <= 10 {
		k.t.Errorf(format, args...)
	}
}

// step moves a frame from one place to the next. The caller holds k.mu.
func (k *kernel) step(addr uint64, from, to place) {
	f := k.mem.Frame(addr)
	if k.where[f] != from {
		k.complain("frame %d goes to the %v from the %v, but is on the %v", f, to, from, k.where[f])
	}
	k.where[f] = to
	if h := k.home[f]; h >= 0 && from == onFill {
		k.queues[h].away++
	} else if h >= 0 && to == onFill {
		k.queues[h].away--
	}
}

// watchCredit checks that nobody has returned credit for a buffer that is not
// back. The caller holds k.mu.
func (k *kernel) watchCredit(q *fakeQueue) {
	if k.free {
		return
	}
	issued := uint32(0)
	for _, id := range k.used {
		n := atomic.LoadUint32(&q.shared.Issued[id]) - atomic.LoadUint32(&q.shared.Done[id])
		if int32(n) < 0 {
			k.complain("queue %d: context %d has returned %d credits that it never took", q.id, id, -int32(n))
		}
		issued += n
	}
	if int(issued) < q.away {
		k.complain("queue %d: credit taken for %d buffers, but %d are away from the fill ring", q.id, issued, q.away)
	}
}

// A pkt is what a test has the program receive.
type pkt struct {
	queue, hpu int
	ctx        uint16
	data       []byte
	segs       int    // buffers; 0 for 1
	hash       uint32 // with bucket: the message
	bucket     *bpf.Range
	foreign    bool // without metadata
	lose       bool // dropped by the kernel behind the program's back
	mute       bool // with lose: and not counted

	key    [bpf.MaxKey]uint32 // of its message, with the format of the context
	offset uint32
	eom    bool
}

// receive runs the program on packets, all at once: a worker that is idle takes
// them as one batch. It returns how many had credit.
func (k *kernel) receive(pkts ...pkt) (n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range pkts {
		if k.receiveOne(&pkts[i]) {
			n++
		}
	}
	return n
}

func (k *kernel) receiveOne(p *pkt) bool {
	q := k.queues[p.queue]
	segs := uint32(max(p.segs, 1))
	issued := atomic.LoadUint32(&q.shared.Issued[p.ctx])
	if !p.foreign {
		if !slices.Contains(k.used, p.ctx) {
			k.used = append(k.used, p.ctx)
		}
		if issued-atomic.LoadUint32(&q.shared.Done[p.ctx])+segs > atomic.LoadUint32(&k.share.Credit[p.ctx]) {
			return false
		}
	}
	hpu := p.hpu
	if p.bucket != nil {
		b := &k.buckets[p.bucket.Base+int(p.hash)&(p.bucket.Size-1)]
		for {
			old := atomic.LoadUint64(b)
			if old>>32 != 0 {
				hpu = int(old&0xff) - 1
			}
			if atomic.CompareAndSwapUint64(b, old, (old>>32+1)<<32|uint64(hpu+1)) {
				break
			}
		}
	}
	r := q.rings[hpu]
	seq := atomic.LoadUint32(&q.shared.Seq[hpu][p.ctx])
	if !p.foreign {
		atomic.StoreUint32(&q.shared.Seq[hpu][p.ctx], seq+segs)
		atomic.StoreUint32(&q.shared.Issued[p.ctx], issued+segs)
		atomic.AddUint32(&k.share.Enqueued[p.queue][hpu], segs)
	}
	if p.lose {
		if !p.mute {
			r.stats.RxDropped++
		}
		return true
	}
	if len(r.rx)+int(segs) > r.rxSize {
		r.stats.RxRingFull++
		return true
	}
	if len(q.fill) < int(segs) {
		k.complain("queue %d: the fill ring is empty with credit left", p.queue)
		r.stats.RxDropped++
		return true
	}
	size := max((len(p.data)+int(segs)-1)/int(segs), 1)
	data := p.data
	for i := range segs {
		addr := q.fill[0] + frameHeadroom
		q.fill = append(q.fill[:0], q.fill[1:]...)
		k.step(addr, onFill, onRx)
		part := data[:min(size, len(data))]
		data = data[len(part):]
		d := xsk.Desc{Addr: addr, Len: uint32(len(part))}
		if i != segs-1 {
			d.Options = xsk.Continued
		}
		copy(k.mem.Bytes(addr, len(part)), part)
		m := bpf.Meta{Hash: p.hash, Seq: seq, Context: p.ctx, Magic: bpf.MetaMagic, Key: p.key, Offset: p.offset}
		if p.eom {
			m.Flags = bpf.MetaEOM
		}
		if p.foreign || i > 0 {
			m = bpf.Meta{}
		}
		*bpf.MetaOf(k.mem.Front(addr, bpf.MetaSize)) = m
		r.push(d)
	}
	return true
}

// push puts a descriptor on the rx ring. The caller holds k.mu.
func (r *fakeRing) push(d xsk.Desc) {
	if len(r.rx) == 0 {
		one := [8]byte{1}
		_, _ = unix.Write(r.fd, one[:])
	}
	r.rx = append(r.rx, d)
	r.ready.Store(uint32(len(r.rx)))
}

// split takes the last n descriptors off an rx ring, to be pushed later: a frame
// that the kernel has not finished.
func (k *kernel) split(r *fakeRing, n int) []xsk.Desc {
	rest := append([]xsk.Desc(nil), r.rx[len(r.rx)-n:]...)
	r.rx = r.rx[:len(r.rx)-n]
	r.ready.Store(uint32(len(r.rx)))
	return rest
}

func (r *fakeRing) FD() int             { return r.fd }
func (r *fakeRing) RxAvailable() uint32 { return r.ready.Load() }

func (r *fakeRing) Receive(descs []xsk.Desc) int {
	r.rxOwn++
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	n := copy(descs, r.rx)
	for _, d := range descs[:n] {
		r.k.step(d.Addr, onRx, inUser)
	}
	r.rx = append(r.rx[:0], r.rx[n:]...)
	r.ready.Store(uint32(len(r.rx)))
	if n > 0 && len(r.rx) == 0 {
		var b [8]byte
		_, _ = unix.Read(r.fd, b[:])
	}
	return n
}

func (r *fakeRing) Send(descs []xsk.Desc) int {
	r.txOwn++
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	n := min(len(descs), r.txSize-len(r.tx))
	for n > 0 && descs[n-1].Options&xsk.Continued != 0 {
		n--
	}
	for _, d := range descs[:n] {
		r.k.step(d.Addr, inUser, onTx)
	}
	r.tx = append(r.tx, descs[:n]...)
	return n
}

func (r *fakeRing) TxFree() int {
	r.txOwn++
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	return r.txSize - len(r.tx)
}

var errDown = errors.New("network is down")

func (r *fakeRing) Kick() (bool, error) {
	r.txOwn++
	k := r.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(r.tx) == 0 {
		return false, nil
	}
	r.kicks++
	if r.down {
		return true, errDown
	}
	n := min(len(r.tx), r.budget)
	var whole []byte
	for _, d := range r.tx[:n] {
		if !k.quiet {
			whole = append(whole, k.mem.Bytes(d.Addr, int(d.Len))...)
			if d.Options&xsk.Continued == 0 {
				k.sent = append(k.sent, wireFrame{r.q.id, r.hpu, whole})
				whole = nil
			}
		}
		k.step(d.Addr, onTx, onCompletion)
		r.q.completion = append(r.q.completion, d.Addr)
	}
	r.tx = append(r.tx[:0], r.tx[n:]...)
	return len(r.tx) > 0, nil
}

func (r *fakeRing) Stats() (xsk.Stats, error) {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	return r.stats, nil
}

func (q *fakeQueue) Exchange(recycle, done []uint64) (filled, completed int) {
	k := q.k
	k.mu.Lock()
	defer k.mu.Unlock()
	q.exchanges++
	k.watchCredit(q)
	if !q.refuse {
		filled = len(recycle)
	}
	for _, addr := range recycle[:filled] {
		k.step(addr, inUser, onFill)
		if f := k.mem.Frame(addr); k.home[f] != q.id {
			k.complain("frame %d of queue %d goes on the fill ring of queue %d", f, k.home[f], q.id)
		}
		q.fill = append(q.fill, k.mem.Addr(k.mem.Frame(addr)))
	}
	if !q.hold {
		completed = copy(done, q.completion)
	}
	for _, addr := range done[:completed] {
		k.step(addr, onCompletion, inUser)
	}
	q.completion = append(q.completion[:0], q.completion[completed:]...)
	return filled, completed
}

func (k *kernel) with(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

// wireFrames returns what was sent so far.
func (k *kernel) wireFrames() []wireFrame {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]wireFrame(nil), k.sent...)
}

// A rig is a pool on a fake kernel.
type rig struct {
	*kernel
	*Pool
	closed    bool
	resources Resources // of contexts with messages
}

type rigConfig struct {
	queues, hpus, perQueue, spare, rxSize, txSize int
	Config
}

func newRig(t testing.TB, c rigConfig) *rig {
	t.Helper()
	or := func(v *int, def int) {
		if *v == 0 {
			*v = def
		}
	}
	or(&c.queues, 1)
	or(&c.hpus, 1)
	or(&c.perQueue, 256)
	or(&c.spare, 128)
	or(&c.rxSize, 256)
	or(&c.txSize, 512)
	k, spares := newKernel(t, c.queues, c.hpus, c.perQueue, c.spare, c.rxSize, c.txSize)
	cfg := c.Config
	cfg.Memory, cfg.Share, cfg.Buckets, cfg.Spare = k.mem, k.share, k.buckets, spares
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	for _, q := range k.queues {
		hq := Queue{Frames: q, Shared: q.shared}
		for _, r := range q.rings {
			hq.Rings = append(hq.Rings, r)
		}
		cfg.Queues = append(cfg.Queues, hq)
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{kernel: k, Pool: p}
	t.Cleanup(r.close)
	return r
}

func (r *rig) close() {
	if !r.closed {
		r.closed = true
		r.Pool.Close()
	}
}

// install installs a context with a payload handler.
func (r *rig) install(id uint16, h Handler, buckets ...bpf.Range) *Context {
	r.t.Helper()
	var b bpf.Range
	if len(buckets) > 0 {
		b = buckets[0]
	}
	c := NewContext(id, fmt.Sprintf("ctx%d", id), Handlers{Payload: h}, b)
	if err := r.Install(c); err != nil {
		r.t.Fatal(err)
	}
	return c
}

// patience bounds waits for what must come. Nothing is measured by it.
const patience = 20 * time.Second

func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatalf("never came true: %s", what)
		}
	}
}

// asleep waits until all workers sleep, which the kernel knows.
func (r *rig) asleep() {
	r.t.Helper()
	for _, w := range r.workers {
		eventually(r.t, fmt.Sprintf("worker %d sleeps", w.id), func() bool {
			threads, err := filepath.Glob("/proc/self/task/*/syscall")
			if err != nil || len(threads) == 0 {
				r.t.Fatalf("the kernel does not tell what threads do: %v", err)
			}
			return slices.ContainsFunc(threads, func(thread string) bool {
				b, _ := os.ReadFile(thread) // it may end
				var call, ep int            // epoll_wait or epoll_pwait, of nothing else
				_, err := fmt.Sscanf(string(b), "%d 0x%x", &call, &ep)
				return err == nil && ep == w.ep
			})
		})
	}
}

// idle tells whether all credit has returned.
func (r *rig) idle() bool {
	for _, q := range r.kernel.queues {
		for i := range q.shared.Issued {
			if atomic.LoadUint32(&q.shared.Issued[i]) != atomic.LoadUint32(&q.shared.Done[i]) {
				return false
			}
		}
	}
	return true
}

// settled waits until all is quiet, closes the pool, and then finds every frame
// where it belongs, once.
func (r *rig) settled() {
	r.t.Helper()
	eventually(r.t, "all credit is back and all sends are complete", func() bool {
		if !r.idle() {
			return false
		}
		for _, w := range r.workers {
			if w.hasWork.Load() {
				return false
			}
		}
		for i := range r.inTx {
			if r.inTx[i].Load() != 0 {
				return false
			}
		}
		return r.Stuck() == 0
	})
	r.close()
	k := r.kernel
	k.mu.Lock()
	defer k.mu.Unlock()
	seen := map[uint64]int{}
	for _, q := range k.queues {
		for _, a := range q.fill {
			seen[a]++
		}
		for h := range q.rings {
			if e, d := k.share.Enqueued[q.id][h], k.share.Dequeued[q.id][h]; e != d {
				k.t.Errorf("queue %d, HPU %d: %d buffers came and %d went", q.id, h, e, d)
			}
		}
	}
	for _, a := range r.Pool.spare {
		if f := k.mem.Frame(a); k.home[f] != -1 {
			k.t.Errorf("frame %d of queue %d is among the spare ones", f, k.home[f])
		}
		seen[k.mem.Addr(k.mem.Frame(a))]++
	}
	for f := range k.where {
		if n := seen[k.mem.Addr(f)]; n != 1 {
			k.t.Errorf("frame %d is in %d places; last seen on the %v", f, n, k.where[f])
		}
	}
	for i, b := range k.buckets {
		if b>>32 != 0 {
			k.t.Errorf("bucket %d has %d users", i, b>>32)
		}
	}
}

// numbered returns a frame of size bytes that carries n.
func numbered(n uint64, size int) []byte {
	b := make([]byte, max(size, 24))
	binary.BigEndian.PutUint64(b[14:], n)
	for i := 22; i < len(b); i++ {
		b[i] = byte(n) + byte(i)
	}
	return b
}

func number(b []byte) uint64 { return binary.BigEndian.Uint64(b[14:]) }

// SPDX-License-Identifier: Apache-2.0

// Package replay has HPUs process messages that come from memory: package hpu's engine as
// it is, on rings whose other end has the packets of some messages, again and again. No
// kernel, no interface and no sender takes its share of the time.
//
// The rings are its own, and not those of the tests of hpu or of package handlerstest,
// because what they cost is in what is measured. Those wait for a lock, copy every packet
// into a frame and note where frames are. Here packets lie in their frames from the
// beginning, and a batch comes without a copy, a system call or a lock to wait for.
package replay

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

// Config says what is replayed: SLMP messages that are all the same. Nothing is
// acknowledged.
type Config struct {
	hpu.Handlers
	Stream  []byte // of each message
	Packet  int    // bytes of it in a packet
	Order   []int  // in which the packets of a message come. Optional: in order
	Flights int    // messages of an HPU that are in flight together, their packets taking turns
	Place   int64  // bytes of memory for each of these
	CPUs    []int  // an HPU on each; of Run, with messages of its own (the policy message)
}

// Messages is how many messages are in flight at most, also of those that are only
// remembered: what handlers must be made for.
const Messages = 4096

// Bytes of a frame before the payload of UDP, and before that of SLMP.
const (
	udpHeaders = 14 + 20 + 8
	headers    = udpHeaders + slmp.HeaderLen
	contextID  = 1
)

// patience is how long the messages that have begun may take to be complete. Tests have less.
var patience = 10 * time.Second

// Done is what an HPU has done.
type Done struct {
	hpu.Stats
	Packets uint64 // that were processed; Handled has twice those that came before their message began
	// CPU is the time of its thread from the first packet on. Unlike Busy it has nothing
	// of the time that other threads took away.
	CPU        time.Duration
	Begin, End time.Duration // of the first packet and after the last, CLOCK_MONOTONIC
}

// Run has the HPUs process messages for a time, and returns what each has done. All that
// were begun are complete when it returns, or there is an error.
func Run(ctx context.Context, cfg Config, d time.Duration) (_ []Done, err error) {
	f, err := newFeed(cfg)
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	defer f.close()
	queues := make([]hpu.Queue, len(cfg.CPUs))
	for i, s := range f.sources {
		queues[i] = hpu.Queue{Frames: s, Shared: s.queue}
		for h := range cfg.CPUs {
			r := &ring{receiveOnly: s.ends[h]}
			if h == i {
				r.source = s
			}
			queues[i].Rings = append(queues[i].Rings, r)
		}
	}
	pool, c, err := engine(&cfg, f, f.mem, f.share, queues, nil, Messages, false)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	all := int32(len(f.sources))
	begun, over := func() bool { return f.begun.Load() == all }, func() bool { return f.stopped.Load() == all }
	if err := process(ctx, pool, c, &f.state, d, begun, over); err != nil {
		return nil, err
	}
	stats := f.counted(pool)
	if err := f.complete(c.Stats().Handled); err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	done := make([]Done, len(stats))
	for i, s := range f.sources {
		done[i] = Done{stats[i], s.packets(), s.last - s.first, s.begin, s.end}
	}
	return done, nil
}

// counted returns what each HPU has counted, with its last batch: that is counted when all its packets have been
// returned, which is what Drain waits for.
func (f *feed) counted(pool *hpu.Pool) []hpu.Stats {
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		stats, _ := pool.Stats()
		late := false
		for i, s := range f.sources {
			late = late || stats[i].Handled < s.packets()
		}
		if !late || time.Now().After(deadline) {
			return stats
		}
	}
}

// engine returns a pool that has installed a context for the messages. With shared, an
// HPU may get packets of any.
func engine(cfg *Config, b hpu.Binder, mem *xsk.UMEM, share *bpf.Share, queues []hpu.Queue, buckets []uint64, messages int, shared bool) (*hpu.Pool, *hpu.Context, error) {
	pool, err := hpu.New(hpu.Config{
		Memory: mem, Queues: queues, Share: share, Buckets: buckets,
		Workers: len(cfg.CPUs), CPUs: cfg.CPUs, Wait: hpu.Spin, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return nil, nil, err
	}
	c, err := hpu.NewMessageContext(contextID, "replay", cfg.Handlers, bpf.Range{Size: len(buckets)}, math.MaxUint64, hpu.MessageConfig{
		Config: mpq.Config{Messages: messages, Remember: time.Millisecond, Held: mem.Config().Frames},
		Format: matcher.FormatByName("slmp"), Binder: b, Shared: shared,
	})
	if err == nil {
		err = pool.Install(c)
	}
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	return pool, c, nil
}

// process has packets come for a time, and returns when all are processed. begun and over
// tell whether they have come to all HPUs, and whether no more will.
func process(ctx context.Context, pool *hpu.Pool, c *hpu.Context, state *atomic.Int32, d time.Duration, begun, over func() bool) error {
	state.Store(going)
	for !begun() && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	state.Store(stopping)
	// Drain takes it for granted that no more packets will come.
	for deadline := time.Now().Add(patience); !over(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("replay: the packets of the last messages are not processed after %v", patience)
		}
	}
	if err := pool.Drain(c, patience); err != nil {
		return err
	}
	return ctx.Err()
}

// A feed is what all sources have in common. It binds messages, and hears of their ends.
type feed struct {
	cfg     Config
	mem     *xsk.UMEM
	share   *bpf.Share
	window  spin.Window
	sources []*source
	state   atomic.Int32
	begun   atomic.Int32 // sources that have
	stopped atomic.Int32 // sources that will give no more packets
	failed  atomic.Pointer[error]
}

// States of a feed: at first it waits.
const (
	going    = 1
	stopping = 2
)

// A source has the packets of an HPU. But for what is shared with the XDP program in
// other cases, it is the HPU's worker's own.
type source struct {
	_ [64]byte // what others write is on other cache lines
	*feed
	hpu    int
	queue  *bpf.Queue
	ends   []receiveOnly // of the queue's rings
	frames []frame
	base   int // frame number of frames[0]

	next    int    // of frames
	rounds  uint32 // through all of them: each is other messages
	running bool   // through them
	over    bool   // there will be no more
	ended   uint64 // messages that are complete

	first, last time.Duration // CPU time of the worker's thread, at the first packet and after the last
	begin, end  time.Duration // CLOCK_MONOTONIC then
	_           [64]byte
}

// A frame is a packet in the UMEM, with its metadata in front.
type frame struct {
	desc  xsk.Desc
	meta  *bpf.Meta
	data  []byte
	words int  // of its key
	out   bool // with the engine
}

// check returns how many packets a message has.
func (c *Config) check() (packets int, err error) {
	if len(c.CPUs) < 1 || len(c.CPUs) > bpf.MaxHPUs {
		return 0, fmt.Errorf("%d CPUs: want 1 to %d", len(c.CPUs), bpf.MaxHPUs)
	}
	if len(c.Stream) == 0 || c.Packet < 1 || c.Flights < 1 || c.Flights*len(c.CPUs) > Messages/2 {
		return 0, fmt.Errorf("%d messages of %d bytes in flight on %d HPUs, in packets of %d bytes: want 1 or more of each, and %d messages at most",
			c.Flights, len(c.Stream), len(c.CPUs), c.Packet, Messages/2)
	}
	packets = (len(c.Stream) + c.Packet - 1) / c.Packet
	if c.Order == nil {
		for i := range packets {
			c.Order = append(c.Order, i)
		}
	}
	sorted := slices.Sorted(slices.Values(c.Order))
	for i := range max(packets, len(sorted)) {
		if i >= len(sorted) || i >= packets || sorted[i] != i {
			return 0, fmt.Errorf("order of %d of %d packets: want each once", len(sorted), packets)
		}
	}
	return packets, nil
}

// umem returns memory for so many packets.
func (c *Config) umem(packets int) (*xsk.UMEM, error) {
	mem, err := xsk.NewUMEM(xsk.UMEMConfig{Frames: packets, FrameSize: 2048})
	if err != nil {
		return nil, err
	}
	if room := mem.Config().FrameSize - xsk.PacketHeadroom; headers+c.Packet > room {
		return nil, fmt.Errorf("packets of %d bytes: at most %d", c.Packet, room-headers)
	}
	return mem, nil
}

func newFeed(cfg Config) (_ *feed, err error) {
	packets, err := cfg.check()
	if err != nil {
		return nil, err
	}
	each := packets * cfg.Flights
	f := &feed{cfg: cfg, share: new(bpf.Share)}
	if f.window, err = hostq.WindowOn(make([]byte, cfg.Place*int64(cfg.Flights*len(cfg.CPUs))), spin.All); err != nil {
		return nil, err
	}
	if f.mem, err = cfg.umem(each * len(cfg.CPUs)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	for h := range cfg.CPUs {
		s := &source{feed: f, hpu: h, queue: new(bpf.Queue), base: h * each, frames: make([]frame, each)}
		f.sources = append(f.sources, s)
		for range cfg.CPUs {
			end, err := newReceiveOnly()
			if err != nil {
				return nil, err
			}
			s.ends = append(s.ends, end)
		}
		for i := range s.frames {
			s.frames[i] = cfg.packet(f.mem, s.base+i, h, cfg.Order[i/cfg.Flights])
		}
	}
	return f, nil
}

// packet writes packet k of messages of a peer into a frame, but for the message's number.
func (c *Config) packet(mem *xsk.UMEM, number, peer, k int) (f frame) {
	at := k * c.Packet
	part := c.Stream[at:min(at+c.Packet, len(c.Stream))]
	h := slmp.Header{Offset: uint32(at)}
	if at+len(part) == len(c.Stream) {
		h.Flags = slmp.EOM
	}
	f.desc = xsk.Desc{Addr: mem.Addr(number) + xsk.PacketHeadroom, Len: uint32(headers + len(part))}
	f.data = mem.Bytes(f.desc.Addr, int(f.desc.Len))
	f.meta = bpf.MetaOf(mem.Front(f.desc.Addr, bpf.MetaSize))

	eth := packet.Ethernet(f.data)
	eth.SetDst([6]byte{2, 0, 0, 0, 0, 1})
	eth.SetSrc([6]byte{2, 0, 0, 0, 0, 2})
	eth.SetEtherType(packet.EtherTypeIPv4)
	ip := packet.IPv4(eth.Payload())
	ip[0] = 0x45
	ip.SetTotalLen(uint16(len(ip)))
	ip.SetTTL(64)
	ip.SetProtocol(unix.IPPROTO_UDP)
	ip.SetSrc([4]byte{10, 0, 0, 2})
	ip.SetDst([4]byte{10, 0, 0, 1})
	ip.SetChecksum(ip.HeaderChecksum())
	udp := packet.UDP(ip.Payload())
	udp.SetSrcPort(49152 + uint16(peer))
	udp.SetDstPort(slmp.Port)
	udp.SetLength(uint16(len(udp)))
	h.Put(f.data[udpHeaders:])
	copy(f.data[headers:], part)

	table := matcher.Table{Entries: map[int]matcher.Entry{0: {Ruleset: matcher.SLMP(), Context: contextID, Format: matcher.FormatByName("slmp")}}}
	v := table.Match(f.data)
	*f.meta = bpf.Meta{Magic: bpf.MetaMagic, Context: contextID, Key: v.Key, Offset: v.Offset}
	f.words = v.NKey
	if v.EOM {
		f.meta.Flags = bpf.MetaEOM
	}
	return f
}

// is makes the packet one of a message.
func (f *frame) is(id uint32) {
	slmp.Header{Flags: slmp.Flags(uint16(f.data[udpHeaders])<<8 | uint16(f.data[udpHeaders+1])), ID: id, Offset: f.meta.Offset}.Put(f.data[udpHeaders:])
	f.meta.Key[f.words-1] = id
}

// number is the message of a frame in this round. Its place is the remainder by how many
// are in flight on all HPUs.
func (s *source) number(i int) uint32 {
	return (s.rounds*uint32(len(s.cfg.CPUs))+uint32(s.hpu))*uint32(s.cfg.Flights) + uint32(i%s.cfg.Flights)
}

// ready tells whether there is a packet.
func (s *source) ready() bool {
	if s.next == 0 && !s.running && !s.over { // whole messages only
		switch s.state.Load() {
		case going:
			if s.running = true; s.first == 0 {
				s.first, s.begin = threadTime(), now()
				s.begun.Add(1)
			}
		case stopping:
			s.over = true
			s.last, s.end = threadTime(), now()
			s.stopped.Add(1)
		}
	}
	return s.running && !s.frames[s.next].out
}

// receive is the XDP program and the kernel.
func (s *source) receive(descs []xsk.Desc) (n int) {
	seq := &s.queue.Seq[s.hpu][contextID]
	for n < len(descs) && s.ready() {
		f := &s.frames[s.next]
		f.is(s.number(s.next))
		f.meta.Seq = *seq + uint32(n)
		f.out = true
		descs[n] = f.desc
		n++
		if s.next++; s.next == len(s.frames) {
			s.next, s.running = 0, false
			s.rounds++
		}
	}
	atomic.AddUint32(seq, uint32(n))
	atomic.AddUint32(&s.queue.Issued[contextID], uint32(n))
	atomic.AddUint32(&s.share.Enqueued[s.hpu][s.hpu], uint32(n))
	return n
}

// packets returns how many were handed out.
func (s *source) packets() uint64 { return uint64(s.rounds) * uint64(len(s.frames)) }

func threadTime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) // cannot fail
	return time.Duration(ts.Nano())
}

func now() time.Duration { return time.Duration(clock.Monotonic()) }

// Exchange implements hpu.Exchanger: nothing is ever sent.
func (s *source) Exchange(recycle, _ []uint64) (filled, completed int) {
	for _, a := range recycle {
		s.frames[s.mem.Frame(a)-s.base].out = false
	}
	return len(recycle), 0
}

// Bind implements hpu.Binder.
func (f *feed) Bind(m *hpu.Message) (spin.Binding, error) {
	at := int64(m.Number()) % int64(f.cfg.Flights*len(f.cfg.CPUs))
	return spin.Binding{Window: f.window, Place: at * f.cfg.Place, Size: f.cfg.Place, Events: f}, nil
}

// Unbind implements hpu.Binder.
func (f *feed) Unbind(*hpu.Message, *spin.Result) {}

// Post implements spin.EventSink.
func (f *feed) Post(e *spin.MessageEvent) bool {
	if e.Cause == spin.Complete {
		f.sources[int(e.Number)/f.cfg.Flights%len(f.sources)].ended++ // whose worker this is
	} else {
		fault(e, &f.failed)
	}
	return true
}

// fault notes the first message that is not complete.
func fault(e *spin.MessageEvent, to *atomic.Pointer[error]) {
	err := fmt.Errorf("message %d: %v: %s", e.Number, e.Cause, spin.Lack(e.Missing, e.Length))
	if e.Err != nil {
		err = fmt.Errorf("%w: %w", err, e.Err)
	}
	to.CompareAndSwap(nil, &err)
}

// complete checks that all that was handed out was processed.
func (f *feed) complete(handled uint64) error {
	if err := f.failed.Load(); err != nil {
		return *err
	}
	want := uint64(0)
	for i, s := range f.sources {
		if n := uint64(s.rounds) * uint64(f.cfg.Flights); s.ended != n || n == 0 {
			return fmt.Errorf("HPU %d has completed %d of %d messages", i, s.ended, n)
		}
		want += s.packets()
	}
	if handled != want {
		return fmt.Errorf("%d of %d packets were handled", handled, want)
	}
	return nil
}

func (f *feed) close() {
	for _, s := range f.sources {
		for _, end := range s.ends {
			unix.Close(end.fd)
		}
	}
}

// ring is an HPU's on a queue. Those with a source have packets.
type ring struct {
	receiveOnly
	source *source
}

// RxAvailable implements hpu.Ring.
func (r *ring) RxAvailable() uint32 {
	if r.source != nil && r.source.ready() {
		return 1
	}
	return 0
}

// Receive implements hpu.Ring.
func (r *ring) Receive(descs []xsk.Desc) int { return r.source.receive(descs) }

// receiveOnly is what all rings here have in common: there is nobody to send to.
type receiveOnly struct{ fd int } // nothing is ever written to it

func newReceiveOnly() (receiveOnly, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return receiveOnly{}, fmt.Errorf("eventfd: %w", err)
	}
	return receiveOnly{fd}, nil
}

// FD implements hpu.Ring.
func (r receiveOnly) FD() int { return r.fd }

// TxFree implements hpu.Ring.
func (receiveOnly) TxFree() int { return 256 }

// Send implements hpu.Ring.
func (receiveOnly) Send([]xsk.Desc) int { return 0 }

// Kick implements hpu.Ring.
func (receiveOnly) Kick() (pending bool, err error) { return false, nil }

// Stats implements hpu.Ring.
func (receiveOnly) Stats() (xsk.Stats, error) { return xsk.Stats{}, nil }

// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

const xdpDrop = 1

// A sched sends frames to the program and sees where they went. A frame's first
// word is the key of its message, its fifth byte the number of its context, its
// third word its offset in the message.
type sched struct {
	*testing.T
	in    *Ingress
	cfg   Config
	iface uint32 // 0: frames arrive on no interface, queue 0
	queue uint32
}

// newSched loads the program for some HPUs and queues. Frames have buffers of
// 1000 bytes, at most four.
func newSched(t *testing.T, mode Mode, queues, hpus int) *sched {
	t.Helper()
	cfg := Config{Mode: mode, Queues: queues, HPUs: hpus, BufferSize: 1000, MaxBuffers: 4}
	tester, err := newTester(&matcher.Table{}, nil, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tester.Close() })
	return &sched{T: t, in: tester.in, cfg: cfg}
}

// with runs a test on fresh memory and contexts 0, 1, ...
func (s *sched) with(name string, contexts []Delivery, fn func(*sched)) {
	s.T.Run(name, func(t *testing.T) {
		sub := *s
		sub.T = t
		sub.reset(contexts...)
		fn(&sub)
		addUp(t, sub.in)
	})
}

func (s *sched) reset(contexts ...Delivery) {
	s.Helper()
	*s.in.Share() = bpf.Share{}
	for c := range s.in.Share().Credit {
		s.in.Share().Credit[c] = 1 << 31
	}
	for q := range s.cfg.Queues {
		*s.in.Queue(q) = bpf.Queue{}
	}
	clear(s.in.Buckets())
	s.publish(contexts...)
}

func (s *sched) publish(contexts ...Delivery) {
	s.Helper()
	s.publishFormat(&matcher.Format{
		Name:   "word",
		Key:    []matcher.Field{{Index: 0, Mask: 0xffffffff}},
		Offset: &matcher.Field{Index: 2, Mask: 0xffffffff},
		Header: 14,
	}, contexts...)
}

func (s *sched) publishFormat(f *matcher.Format, contexts ...Delivery) {
	s.Helper()
	t := &matcher.Table{Generation: 77, Entries: map[int]matcher.Entry{}}
	byID := map[uint16]Delivery{}
	for i, c := range contexts {
		v := uint32(i) << 24
		t.Entries[i+100] = matcher.Entry{
			Ruleset: matcher.Ruleset{Name: "context", Rules: []matcher.Rule{{Index: 1, Mask: 0xff000000, Start: v, End: v}}},
			Context: uint16(i),
			Format:  f,
		}
		byID[uint16(i)] = c
	}
	if err := s.in.Publish(t, byID); err != nil {
		s.Fatal(err)
	}
}

// sent is what became of a frame. The HPU is -1 for one that got none.
type sent struct {
	verdict uint32
	hpu     int
	buffers uint32
	bpf.Meta
}

func keyed(context byte, key uint32, size int) []byte {
	b := make([]byte, size)
	binary.BigEndian.PutUint32(b, key)
	b[4] = context
	return b
}

func (s *sched) send(context byte, key uint32) sent { return s.sendFrame(keyed(context, key, 60)) }

func (s *sched) sendFrame(frame []byte) sent {
	s.Helper()
	before := s.in.Share().Enqueued
	o := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, bpf.MetaSize+len(frame))}
	if s.iface != 0 {
		o.Context = xdpMD{DataEnd: uint32(len(frame)), IngressIfindex: s.iface, RxQueueIndex: s.queue}
	}
	verdict, err := s.in.objs.XspinIngress.Run(o)
	if err != nil {
		s.Fatal(err)
	}
	r := sent{verdict: verdict, hpu: -1}
	after := &s.in.Share().Enqueued
	for q := range after {
		for h := range after[q] {
			if n := after[q][h] - before[q][h]; n != 0 {
				if r.hpu >= 0 || q != int(s.queue) {
					s.Errorf("counted for HPU %d on queue %d too", h, q)
				}
				r.hpu, r.buffers = h, n
			}
		}
	}
	out := o.DataOut
	if verdict == xdpRedirect {
		r.Meta = *bpf.MetaOf(out)
		out = out[bpf.MetaSize:]
	}
	if (verdict == xdpRedirect) != (r.hpu >= 0) || verdict != xdpDrop && !bytes.Equal(out, frame) {
		s.Errorf("verdict %d, HPU %d, %d bytes of %d", verdict, r.hpu, len(o.DataOut), len(frame))
	}
	return r
}

// goes sends frames of a context, message by message, and compares their HPUs.
func (s *sched) goes(context byte, keys []uint32, want ...int) {
	s.Helper()
	got := make([]int, len(want))
	for i := range got {
		got[i] = s.send(context, keys[i%len(keys)]).hpu
	}
	if !slices.Equal(got, want) {
		s.Errorf("went to HPUs %v, want %v", got, want)
	}
}

func (s *sched) stats() Stats {
	s.Helper()
	return addUp(s.T, s.in)
}

// modes runs a test for the program with plain counters and with atomic ones.
func modes(t *testing.T, hpus int, fn func(*sched)) {
	netnstest.NeedRoot(t)
	for _, mode := range []Mode{Native, Generic} {
		t.Run(mode.String(), func(t *testing.T) { fn(newSched(t, mode, 2, hpus)) })
	}
}

func TestPacketScheduling(t *testing.T) {
	key := []uint32{1}
	packet := func(mask uint64) []Delivery { return []Delivery{{Policy: ByPacket, CoreMask: mask}} }
	modes(t, 4, func(s *sched) {
		s.with("stays up to the quantum, then takes the least occupied of the mask", packet(0b1110), func(s *sched) {
			s.in.Share().Quantum[0] = 3
			s.goes(0, key, 1, 1, 1, 2, 2, 2, 3, 3, 3, 1, 2, 3)
			s.in.Share().Dequeued[0][2] += 4 // it is done with all of them
			s.goes(0, key, 2, 2, 2, 2, 1)
		})
		s.with("stays as long as the HPU keeps up", packet(0b1111), func(s *sched) {
			s.in.Share().Quantum[0] = 1
			for range 10 {
				s.goes(0, key, 0)
				s.in.Share().Dequeued[0][0]++
			}
			s.goes(0, key, 0, 1, 2, 3)
		})
		s.with("without a quantum every packet goes to the least occupied, the lowest of several", packet(0b1111), func(s *sched) {
			s.goes(0, key, 0, 1, 2, 3, 0, 1, 2, 3)
			s.in.Share().Dequeued[0][3]++
			s.goes(0, key, 3, 0)
		})
		s.with("what other queues sent to an HPU counts", packet(0b1111), func(s *sched) {
			s.in.Share().Enqueued[1] = [bpf.MaxHPUs]uint32{7, 5, 5, 6}
			s.in.Share().Dequeued[1] = [bpf.MaxHPUs]uint32{1, 0, 1, 1}
			s.goes(0, key, 2, 1, 2, 3, 0)
		})
		s.with("what is on a queue that the NIC does not use does not count", packet(0b11), func(s *sched) {
			s.in.Share().Enqueued[2][0] = 9
			s.goes(0, key, 0)
		})
		s.with("counters wrap", packet(0b11), func(s *sched) {
			s.in.Share().Enqueued[0] = [bpf.MaxHPUs]uint32{1, 2}
			s.in.Share().Dequeued[0] = [bpf.MaxHPUs]uint32{1<<32 - 2, 1<<32 - 1} // both 3
			s.goes(0, key, 0, 1, 0)
		})
		s.with("another mask holds at once, whatever the quantum", packet(0b0001), func(s *sched) {
			s.in.Share().Quantum[0] = 1000
			s.goes(0, key, 0, 0)
			s.publish(packet(0b0100)...)
			s.goes(0, key, 2, 2)
		})
		s.with("contexts keep their own place", []Delivery{{Policy: ByPacket, CoreMask: 0b1111}, {Policy: ByPacket, CoreMask: 0b1111}}, func(s *sched) {
			s.in.Share().Quantum[0], s.in.Share().Quantum[1] = 2, 2
			s.goes(0, key, 0)
			s.goes(1, key, 0, 1, 1)
			s.goes(0, key, 2, 2, 3)
		})
		s.with("a mask without any of this NIC's HPUs fails, and the frame passes", packet(0xfffffffffffffff0), func(s *sched) {
			before := s.stats()
			if r := s.send(0, 1); r.verdict != xdpPass || s.stats().Failed != before.Failed+1 || s.in.Queue(0).Issued[0] != 0 {
				s.Errorf("%+v", r)
			}
		})
	})
}

// mix is the program's hash of a key, word by word.
func mix(hash, word uint32) uint32 {
	hash = (hash ^ word) * 0x9e3779b1
	return hash ^ hash>>15
}

// apart returns n keys whose buckets, of size buckets, are distinct, and one
// more that shares the first one's bucket.
func apart(n, size int) (keys []uint32, twin uint32) {
	seen := map[uint32]bool{}
	for k := uint32(1); ; k++ {
		b := mix(0, k) & uint32(size-1)
		switch {
		case !seen[b] && len(keys) < n:
			seen[b] = true
			keys = append(keys, k)
		case len(keys) > 0 && b == mix(0, keys[0])&uint32(size-1):
			twin = k
		}
		if len(keys) == n && twin != 0 {
			return keys, twin
		}
	}
}

func TestMessageScheduling(t *testing.T) {
	const base, size = 1024, 64
	message := func(mask uint64) []Delivery {
		return []Delivery{{Policy: ByMessage, CoreMask: mask, Buckets: bpf.Range{Base: base, Size: size}}}
	}
	keys, twin := apart(8, size)
	bucket := func(s *sched, key uint32) *uint64 { return &s.in.Buckets()[base+mix(0, key)&(size-1)] }
	one := keys[:1]

	modes(t, 4, func(s *sched) {
		s.with("a message stays while anybody uses its bucket, whatever the load", message(0b1111), func(s *sched) {
			s.goes(0, one, 0)
			s.in.Share().Enqueued[1][0] = 1000
			s.goes(0, one, 0, 0, 0, 0, 0)
			if b := *bucket(s, one[0]); b != 6<<32|1 {
				s.Errorf("bucket %#x, want 6 users of HPU 0", b)
			}
			*bucket(s, one[0]) -= 5 << 32
			s.goes(0, one, 0)
			*bucket(s, one[0]) -= 2 << 32
			s.goes(0, one, 1) // nobody is left
		})
		s.with("a message stays although another table's mask excludes its HPU", message(0b0001), func(s *sched) {
			s.goes(0, one, 0)
			s.publish(message(0b1100)...)
			s.goes(0, one, 0)
			s.goes(0, keys[1:2], 2)
			*bucket(s, one[0]) = 1
			s.goes(0, one, 3)
		})
		s.with("the old HPU wins a tie, and only a tie", message(0b1111), func(s *sched) {
			*bucket(s, one[0]) = 3 // HPU 2, no users
			s.goes(0, one, 2)
			*bucket(s, one[0]) = 3
			s.in.Share().Enqueued[1] = [bpf.MaxHPUs]uint32{1, 1, 0, 1}
			s.goes(0, one, 2)
			*bucket(s, one[0]) = 3
			s.goes(0, one, 0) // 2 has 2 now, the others 1
		})
		s.with("different messages spread", message(0b1111), func(s *sched) {
			s.goes(0, keys, 0, 1, 2, 3, 0, 1, 2, 3)
			s.goes(0, keys, 0, 1, 2, 3, 0, 1, 2, 3) // and stay
		})
		s.with("different messages spread within the mask", message(0b1010), func(s *sched) {
			s.goes(0, keys, 1, 3, 1, 3, 1, 3, 1, 3)
		})
		s.with("messages that collide share an HPU and the bucket's users", message(0b1111), func(s *sched) {
			s.goes(0, []uint32{keys[0], twin}, 0, 0)
			if b := *bucket(s, twin); b != 2<<32|1 {
				s.Errorf("bucket %#x, want 2 users of HPU 0", b)
			}
		})
		s.with("a context uses its own buckets only", message(0b1111), func(s *sched) {
			for k := range uint32(2000) {
				s.in.Share().Dequeued[0] = s.in.Share().Enqueued[0]
				s.send(0, k)
			}
			for i, b := range s.in.Buckets() {
				if inside := i >= base && i < base+size; inside != (b != 0) {
					s.Fatalf("bucket %d is %#x", i, b)
				}
			}
		})
		s.with("a mask without any of this NIC's HPUs fails and uses no bucket", message(1<<63), func(s *sched) {
			if r := s.send(0, one[0]); r.verdict != xdpPass || *bucket(s, one[0]) != 0 {
				s.Errorf("%+v, bucket %#x", r, *bucket(s, one[0]))
			}
		})
		s.with("a refused packet uses no bucket", message(1), func(s *sched) {
			s.in.Share().Credit[0] = 0
			if r := s.send(0, one[0]); r.verdict != xdpDrop || *bucket(s, one[0]) != 0 {
				s.Errorf("%+v, bucket %#x", r, *bucket(s, one[0]))
			}
		})
	})
}

// vhpu is the program's hash of a key and a virtual HPU.
func vhpu(key, n uint32) uint32 { return mix(0, key) + n*0x9e3779b1 }

func TestBlockedScheduling(t *testing.T) {
	const base, size = 1024, 64
	const sequence, vhpus = 1000, 3
	blocked := func(mask uint64, sequence uint32, vhpus int) []Delivery {
		return []Delivery{{Policy: BlockedRR, CoreMask: mask, Buckets: bpf.Range{Base: base, Size: size}, Sequence: sequence, VHPUs: vhpus}}
	}
	bucket := func(s *sched, key, n uint32) *uint64 { return &s.in.Buckets()[base+vhpu(key, n)&(size-1)] }
	at := func(s *sched, key, offset uint32) sent {
		s.Helper()
		frame := keyed(0, key, 60)
		binary.BigEndian.PutUint32(frame[8:], offset)
		r := s.sendFrame(frame)
		if r.verdict == xdpRedirect && r.Offset != offset {
			s.Errorf("offset %d, want %d", r.Offset, offset)
		}
		return r
	}
	// belongs checks the virtual HPU of a packet, by the bucket that user space
	// finds from the metadata, and that its bucket was used once more.
	belongs := func(s *sched, key, offset, n uint32) sent {
		s.Helper()
		before := *bucket(s, key, n) >> 32
		r := at(s, key, offset)
		if r.Hash != vhpu(key, n) || *bucket(s, key, n)>>32 != before+1 || *bucket(s, key, n)&0xff != uint64(r.hpu+1) {
			s.Errorf("key %d, offset %d: hash %#x, want %#x of virtual HPU %d; HPU %d, bucket %#x, before %d users", key, offset, r.Hash, vhpu(key, n), n, r.hpu, *bucket(s, key, n), before)
		}
		return r
	}
	goes := func(s *sched, key uint32, offsets []uint32, want ...int) {
		s.Helper()
		var got []int
		for _, o := range offsets {
			got = append(got, at(s, key, o).hpu)
		}
		if !slices.Equal(got, want) {
			s.Errorf("key %d, offsets %d: went to HPUs %v, want %v", key, offsets, got, want)
		}
	}

	modes(t, 4, func(s *sched) {
		s.with("a sequence is so many bytes, and the virtual HPUs take turns", blocked(0b1111, sequence, vhpus), func(s *sched) {
			for _, tt := range []struct{ offset, n uint32 }{
				{0, 0}, {1, 0}, {999, 0},
				{1000, 1}, {1999, 1},
				{2000, 2}, {2999, 2},
				{3000, 0}, {3999, 0}, {4000, 1}, {5000, 2},
				{3_000_000_000, 0}, {3_000_001_000, 1}, {1<<32 - 1, 4294967 % vhpus},
			} {
				belongs(s, 5, tt.offset, tt.n)
			}
		})
		s.with("one virtual HPU is policy message", blocked(0b1111, sequence, 1), func(s *sched) {
			for _, offset := range []uint32{0, 999, 1000, 12345, 1<<32 - 1} {
				if r := belongs(s, 5, offset, 0); r.Hash != mix(0, 5) || r.hpu != 0 {
					s.Errorf("offset %d: hash %#x, HPU %d", offset, r.Hash, r.hpu)
				}
			}
		})
		s.with("sequences of a byte, and as many virtual HPUs as there can be", blocked(0b1111, 1, MaxVHPUs), func(s *sched) {
			for _, offset := range []uint32{0, 1, 65534, 65535, 65536, 1<<32 - 1} {
				belongs(s, 5, offset, offset%MaxVHPUs)
			}
		})
		s.with("the longest sequence", blocked(0b1111, 1<<32-1, 2), func(s *sched) {
			belongs(s, 5, 1<<32-2, 0)
			belongs(s, 5, 1<<32-1, 1)
		})
		s.with("virtual HPUs spread", blocked(0b1111, sequence, 4), func(s *sched) {
			goes(s, 5, []uint32{0, 1000, 2000, 3000, 4000, 5000, 6000, 7000}, 0, 1, 2, 3, 0, 1, 2, 3)
		})
		s.with("virtual HPUs spread within the mask", blocked(0b1010, sequence, 4), func(s *sched) {
			goes(s, 5, []uint32{0, 1000, 2000, 3000, 4000}, 1, 3, 1, 3, 1)
		})
		s.with("a virtual HPU runs on one HPU at a time, and on any free one", blocked(0b1111, sequence, vhpus), func(s *sched) {
			goes(s, 5, []uint32{0}, 0)
			s.in.Share().Enqueued[1][0] = 1000 // HPU 0 is busy
			goes(s, 5, []uint32{500, 999, 3000, 6001}, 0, 0, 0, 0)
			goes(s, 5, []uint32{1000}, 1) // another one need not wait
			if b := *bucket(s, 5, 0); b != 5<<32|1 {
				s.Errorf("bucket %#x, want 5 users of HPU 0", b)
			}
			*bucket(s, 5, 0) -= 4 << 32
			goes(s, 5, []uint32{0}, 0)
			*bucket(s, 5, 0) -= 2 << 32
			goes(s, 5, []uint32{0}, 2) // nobody is left, 2 and 3 are idle
		})
		s.with("the virtual HPUs of a message have buckets of their own", blocked(0b1111, 1, size), func(s *sched) {
			for i := range uint32(size) {
				at(s, 5, i)
			}
			for i, b := range s.in.Buckets() {
				if inside := i >= base && i < base+size; inside != (b != 0) || b>>32 > 1 {
					s.Fatalf("bucket %d is %#x", i, b)
				}
			}
		})
		s.with("the virtual HPUs of another message are others", blocked(0b1111, sequence, vhpus), func(s *sched) {
			keys, _ := apart(2, size)
			belongs(s, keys[0], 0, 0)
			if r := belongs(s, keys[1], 0, 0); r.hpu != 1 {
				s.Errorf("HPU %d, want 1", r.hpu)
			}
		})
		s.with("a mask without any of this NIC's HPUs fails and uses no bucket", blocked(1<<63, sequence, vhpus), func(s *sched) {
			if r := at(s, 5, 1000); r.verdict != xdpPass || *bucket(s, 5, 1) != 0 {
				s.Errorf("%+v, bucket %#x", r, *bucket(s, 5, 1))
			}
		})
		s.with("credit is the context's, whichever virtual HPU", blocked(0b1111, sequence, vhpus), func(s *sched) {
			before := s.stats()
			s.in.Share().Credit[0] = 2
			goes(s, 5, []uint32{0, 1000, 2000}, 0, 1, -1)
			if b := *bucket(s, 5, 2); b != 0 || s.stats().Refused[0] != before.Refused[0]+1 {
				s.Errorf("bucket %#x, %d refused", b, s.stats().Refused[0]-before.Refused[0])
			}
			s.in.Queue(0).Done[0]++
			goes(s, 5, []uint32{2000, 0}, 2, -1)
		})
		s.with("a frame too short for the offset passes and uses no bucket", blocked(0b1111, sequence, vhpus), func(s *sched) {
			s.publishFormat(&matcher.Format{Name: "late", Offset: &matcher.Field{Index: 4, Mask: 0xffff0000}}, blocked(0b1111, sequence, vhpus)...)
			before := s.stats()
			if r := s.sendFrame(keyed(0, 5, 17)); r.verdict != xdpPass || s.stats().Malformed != before.Malformed+1 || s.in.Buckets()[base] != 0 {
				s.Errorf("17 bytes: %+v", r)
			}
			if r := s.sendFrame(keyed(0, 5, 18)); r.hpu != 0 || s.in.Buckets()[base] != 1<<32|1 { // no key: hash 0
				s.Errorf("18 bytes: %+v", r)
			}
		})
		s.with("beside the other policies", []Delivery{
			{Policy: BlockedRR, CoreMask: 0b1111, Buckets: bpf.Range{Base: 0, Size: 64}, Sequence: sequence, VHPUs: vhpus},
			{Policy: ByMessage, CoreMask: 0b1111, Buckets: bpf.Range{Base: 64, Size: 64}},
			{Policy: ByPacket, CoreMask: 0b1111},
		}, func(s *sched) {
			for c := range byte(3) {
				frame := keyed(c, 5, 60)
				binary.BigEndian.PutUint32(frame[8:], 1000)
				want := mix(0, 5)
				if c == 0 {
					want = vhpu(5, 1)
				}
				if r := s.sendFrame(frame); r.Hash != want || r.hpu != int(c) {
					s.Errorf("context %d: hash %#x, want %#x; HPU %d", c, r.Hash, want, r.hpu)
				}
			}
		})
	})
}

func TestCredit(t *testing.T) {
	two := []Delivery{{Policy: ByPacket, CoreMask: 0b11}, {Policy: ByPacket, CoreMask: 0b11}}
	// expect sends frames of these sizes and compares what becomes of them:
	// r(edirected), d(ropped), p(assed).
	expect := func(s *sched, context byte, sizes []int, want string) {
		s.Helper()
		got := ""
		for _, n := range sizes {
			got += map[uint32]string{xdpRedirect: "r", xdpDrop: "d", xdpPass: "p"}[s.sendFrame(keyed(context, 1, n)).verdict]
		}
		if got != want {
			s.Errorf("context %d, frames of %v: %s, want %s", context, sizes, got, want)
		}
	}
	small := []int{60, 60, 60, 60, 60}

	modes(t, 2, func(s *sched) {
		s.with("packets beyond the credit are dropped and counted for their context", two, func(s *sched) {
			before := s.stats()
			s.in.Share().Credit[0] = 3
			expect(s, 0, small, "rrrdd")
			expect(s, 1, small, "rrrrr")
			q := s.in.Queue(0)
			if n := s.stats().Refused; n[0] != before.Refused[0]+2 || n[1] != before.Refused[1] {
				s.Errorf("refused %d and %d", n[0]-before.Refused[0], n[1]-before.Refused[1])
			}
			if q.Issued[0] != 3 || q.Issued[1] != 5 || q.Seq[0][0]+q.Seq[1][0] != 3 {
				s.Errorf("issued %d and %d, seq %d+%d", q.Issued[0], q.Issued[1], q.Seq[0][0], q.Seq[1][0])
			}
			q.Done[0]++
			expect(s, 0, small[:2], "rd")
			q.Done[0] += 3
			expect(s, 0, small[:4], "rrrd")
		})
		s.with("no credit", two, func(s *sched) {
			s.in.Share().Credit[0] = 0
			expect(s, 0, small[:1], "d")
		})
		s.with("credit taken away while packets are out", two, func(s *sched) {
			s.in.Share().Credit[0] = 4
			expect(s, 0, small[:4], "rrrr")
			s.in.Share().Credit[0] = 2
			s.in.Queue(0).Done[0] = 2
			expect(s, 0, small[:1], "d")
			s.in.Queue(0).Done[0] = 3
			expect(s, 0, small[:2], "rd")
		})
		s.with("counters wrap", two, func(s *sched) {
			s.in.Share().Credit[0] = 3
			s.in.Queue(0).Issued[0] = 1<<32 - 2
			s.in.Queue(0).Done[0] = 1<<32 - 2
			expect(s, 0, small, "rrrdd")
		})
		spills := []Delivery{{Policy: ByPacket, CoreMask: 0b11, Spill: true}, {Policy: ByPacket, CoreMask: 0b11}, {Policy: ByPacket, CoreMask: 0b11, Spill: true, Timestamp: true}}
		s.with("packets beyond the credit of a context that spills pass, and are counted for it", spills, func(s *sched) {
			before := s.stats()
			for c := range 3 {
				s.in.Share().Credit[c] = 3
			}
			expect(s, 0, small, "rrrpp")
			expect(s, 1, small, "rrrdd")
			expect(s, 2, small, "rrrpp")
			s.in.Queue(0).Done[0]++
			expect(s, 0, []int{1001, 60, 60}, "prp") // 2 buffers are too many, 1 is not
			after := s.stats()
			for c, want := range []struct{ refused, spilled uint64 }{{0, 4}, {2, 0}, {0, 2}, {0, 0}} {
				if r, p := after.Refused[c]-before.Refused[c], after.Spilled[c]-before.Spilled[c]; r != want.refused || p != want.spilled {
					s.Errorf("context %d: %d refused and %d spilled, want %d and %d", c, r, p, want.refused, want.spilled)
				}
			}
			if after.Passed != before.Passed {
				s.Errorf("%d of them count as unmatched too", after.Passed-before.Passed)
			}
			if n := s.in.Queue(0).Issued[0]; n != 4 {
				s.Errorf("%d buffers issued, want 4", n)
			}
		})
		s.with("credits are per queue", two, func(s *sched) {
			s.in.Share().Credit[0] = 2
			s.in.Queue(1).Issued[0] = 2
			expect(s, 0, small[:3], "rrd")
		})
		s.with("a frame costs a credit for each buffer", two, func(s *sched) {
			s.in.Share().Credit[0] = 7
			expect(s, 0, []int{1000, 1001, 4000, 60}, "rrrd") // 1 + 2 + 4
			s.in.Queue(0).Done[0] = 3
			expect(s, 0, []int{3001, 2001, 60}, "drd") // 4 are too many, 3 are not
			if n := s.in.Queue(0).Issued[0]; n != 10 {
				s.Errorf("%d buffers issued", n)
			}
		})
		s.with("a frame of more buffers than there may be passes", two, func(s *sched) {
			before := s.stats()
			s.in.Share().Credit[0] = 0 // which it does not need
			expect(s, 0, []int{4001, 20000}, "pp")
			s.in.Share().Credit[0] = 4
			expect(s, 0, []int{4000}, "r")
			if n := s.stats().Oversize - before.Oversize; n != 2 {
				s.Errorf("%d counted", n)
			}
		})
	})
}

func TestMetadata(t *testing.T) {
	modes(t, 2, func(s *sched) {
		s.with("numbers frames by HPU and context, in buffers", []Delivery{{Policy: ByPacket, CoreMask: 1}, {Policy: ByPacket, CoreMask: 1}, {Policy: ByPacket, CoreMask: 2}}, func(s *sched) {
			for i, step := range []struct {
				context   byte
				size      int
				hpu       int
				seq, uses uint32
			}{{0, 60, 0, 0, 1}, {0, 2500, 0, 1, 3}, {0, 60, 0, 4, 1}, {1, 60, 0, 0, 1}, {2, 60, 1, 0, 1}, {0, 60, 0, 5, 1}, {2, 60, 1, 1, 1}} {
				r := s.sendFrame(keyed(step.context, 1, step.size))
				if r.hpu != step.hpu || r.Seq != step.seq || r.buffers != step.uses {
					s.Errorf("frame %d: HPU %d, seq %d, %d buffers; want %+v", i, r.hpu, r.Seq, r.buffers, step)
				}
			}
		})
		s.with("says what matched", []Delivery{{Policy: ByPacket, CoreMask: 1}, {Policy: ByPacket, CoreMask: 1, Timestamp: true}}, func(s *sched) {
			r := s.send(0, 0x01020304)
			want := bpf.Meta{Key: [bpf.MaxKey]uint32{0x01020304}, Hash: mix(0, 0x01020304), Generation: 77, Context: 0, Ruleset: 100, Cpu: r.Cpu, Magic: bpf.MetaMagic}
			if r.Meta != want {
				s.Errorf("%+v, want %+v", r.Meta, want)
			}
			from := clock.Monotonic()
			r = s.send(1, 0x01020304)
			if to := clock.Monotonic(); int64(r.Arrival) < from || int64(r.Arrival) > to {
				s.Errorf("arrived at %d, sent between %d and %d", r.Arrival, from, to)
			}
			want.Context, want.Ruleset, want.Cpu, want.Arrival = 1, 101, r.Cpu, r.Arrival
			if r.Meta != want {
				s.Errorf("%+v, want %+v", r.Meta, want)
			}
		})
		s.with("names the CPU", []Delivery{{Policy: ByPacket, CoreMask: 1}}, func(s *sched) {
			var allowed unix.CPUSet
			if err := unix.SchedGetaffinity(0, &allowed); err != nil {
				s.Fatal(err)
			}
			for cpu := range 1024 {
				if !allowed.IsSet(cpu) {
					continue
				}
				done := make(chan error)
				go func() {
					runtime.LockOSThread() // for good: the thread ends with its affinity
					var only unix.CPUSet
					only.Set(cpu)
					err := unix.SchedSetaffinity(0, &only)
					if err == nil {
						if r := s.send(0, 1); int(r.Cpu) != cpu {
							err = fmt.Errorf("CPU %d said to be %d", cpu, r.Cpu)
						}
					}
					done <- err
				}()
				if err := <-done; err != nil {
					s.Error(err)
				}
			}
		})
	})
}

// The receive queue of a frame has its own numbers and credits. Frames of a
// queue that nobody had counted on pass.
func TestQueuesAreSeparate(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 4})
	inside(t, lab.NIC, func(iface *net.Interface) {
		foreign(t, iface, Native) // so that the queues exist
		s := newSched(t, Native, 3, 2)
		s.iface = uint32(iface.Index)
		s.reset(Delivery{Policy: ByPacket, CoreMask: 0b11})
		s.in.Share().Credit[0] = 4
		s.in.Share().Quantum[0] = 2
		for q := range 3 {
			s.queue = uint32(q)
			for i, want := range []int{0, 0, 1, 1, -1} { // the last has no credit
				r := s.send(0, 1)
				if r.hpu != want || want >= 0 && r.Seq != uint32(i%2) {
					s.Errorf("queue %d, frame %d: HPU %d, want %d; seq %d", q, i, r.hpu, want, r.Seq)
				}
			}
		}
		s.queue = 3
		before := s.stats()
		if r := s.send(0, 1); r.verdict != xdpPass || s.stats().Failed != before.Failed+1 {
			s.Errorf("%+v", r)
		}
	})
}

// In generic mode several CPUs may run the program for one queue: nothing that
// user space reconciles by may get lost.
func TestGenericModeCountsExactly(t *testing.T) {
	netnstest.NeedRoot(t)
	const workers, each = 4, 4000
	s := newSched(t, Generic, 1, 1)
	s.with("four threads", []Delivery{{Policy: ByMessage, CoreMask: 1, Buckets: bpf.Range{Base: 0, Size: 1}}}, func(s *sched) {
		before := s.stats()
		seqs := make([][]uint32, workers)
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				frame := keyed(0, 1, 60)
				out := make([]byte, bpf.MetaSize+len(frame))
				for range each {
					ret, err := s.in.objs.XspinIngress.Run(&ebpf.RunOptions{Data: frame, DataOut: out})
					if err != nil {
						s.Error(err)
						return
					}
					if ret == xdpRedirect {
						seqs[w] = append(seqs[w], bpf.MetaOf(out).Seq)
					}
				}
			})
		}
		wg.Wait()
		all := slices.Concat(seqs...)
		slices.Sort(all)
		for i, seq := range all {
			if seq != uint32(i) {
				s.Fatalf("frame %d has number %d", i, seq)
			}
		}
		n, after := uint32(len(all)), s.stats()
		if after.Seen-before.Seen != workers*each || after.Redirected-before.Redirected != uint64(n) || n < workers*each/2 ||
			s.in.Queue(0).Issued[0] != n || s.in.Share().Enqueued[0][0] != n || s.in.Buckets()[0] != uint64(n)<<32|1 {
			s.Errorf("%d of %d redirected: issued %d, enqueued %d, bucket %#x", n, workers*each, s.in.Queue(0).Issued[0], s.in.Share().Enqueued[0][0], s.in.Buckets()[0])
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// handsOdd hands messages over that begin with an odd byte.
func handsOdd(t *testing.T) *nic.Object {
	t.Helper()
	o, err := nic.ReadObject("test.o", objecttest.Compile(t, `#include "xspin_message.h"

XSPIN_HEADER
{
	__u8 first = 0;

	if (xspin_load(ctx, her->payload, &first, 1))
		return XSPIN_SEGV;
	return first & 1 ? XSPIN_HAND_OVER : XSPIN_PROCEED;
}

XSPIN_MESSAGES(HEADER | HAND_OVER);
XSPIN_LICENSE("GPL");
`), nic.ObjectMemory)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// Messages that handlers in eBPF hand over are handled in Go, whole and once, the others in
// the kernel; all take the same receives, and are told to the same application.
func TestHandOver(t *testing.T) {
	const each, senders, longest = 40, 4, 60_000
	for _, tt := range []struct {
		name string
		path *impair.Config
	}{
		{"a wire", nil},
		{"everything", &impair.Config{Loss: 0.02, Duplicate: 0.02, Reorder: 0.03, Delay: time.Millisecond, Seed: 5}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{Path: tt.path})
			if tt.path == nil {
				wire(t, lab)
			}
			n := open(t, lab, nic.Config{HPUs: 2})
			mem, err := hostq.NewMemory("test", senders*each*longest)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { mem.Close() })
			w := mem.Whole()
			events := make(chan spin.MessageEvent, senders*each)
			var headers, bytesInGo, completions atomic.Int64
			c := run(t, n, nic.ContextSpec{
				Name: "both", Rulesets: sets(matcher.SLMP()), Kernel: &nic.Kernel{Object: handsOdd(t)}, Window: w, Events: events,
				Handlers: hpu.Handlers{
					Header: func(*hpu.HER) spin.Code { headers.Add(1); return spin.Success },
					Payload: func(h *hpu.HER) spin.Code {
						bytesInGo.Add(int64(h.PayloadLen()))
						if err := h.Deposit(); err != nil {
							return spin.Fail
						}
						return spin.Success
					},
					Completion: func(*hpu.Completion) spin.Code { completions.Add(1); return spin.Success },
				},
			})
			for i := range uint64(senders * each) {
				if err := c.Post(spin.Receive{Binding: spin.Binding{Window: w, Place: int64(i) * longest, Size: longest, User: i}, Ignore: ^uint32(0)}); err != nil {
					t.Fatal(err)
				}
			}
			var wg sync.WaitGroup
			var odd, oddBytes atomic.Int64
			for s := range senders {
				conn := connect(t, lab, slmp.Port, slmp.Config{})
				wg.Go(func() {
					for i := range each {
						data := message(s, i, longest)
						if data[0]&1 != 0 {
							odd.Add(1)
							oddBytes.Add(int64(len(data)))
						}
						if _, err := conn.SendBytes(patient(t), data, slmp.Options{}); err != nil {
							t.Errorf("sender %d, message %d of %d bytes: %v\n%+v", s, i, len(data), err, c.Stats())
							return
						}
					}
				})
			}
			wg.Wait()
			if t.Failed() {
				return
			}
			seen := map[uint64]bool{}
			for range senders * each {
				e := nextEvent(t, events)
				place, _ := e.User.(uint64)
				if e.Cause != spin.Complete || seen[place] || e.Length == 0 || e.Context != "both" {
					t.Errorf("event %+v", e)
				}
				seen[place] = true
				got := mem.Bytes()[place*longest:][:e.Length]
				if s, i := int(got[1]), int(got[2]); !bytes.Equal(got, message(s, i, longest)) {
					t.Errorf("receive %d has others than message %d of sender %d", place, i, s)
				}
			}
			st, cs := messages(t, c), c.Stats()
			t.Logf("%d messages handed over: %+v", odd.Load(), st)
			if headers.Load() != odd.Load() || completions.Load() != odd.Load() || bytesInGo.Load() != oddBytes.Load() {
				t.Errorf("handlers in Go: %d headers, %d completions, %d bytes; want %d, %[4]d, %d", headers.Load(), completions.Load(), bytesInGo.Load(), odd.Load(), oddBytes.Load())
			}
			if all := uint64(senders * each); st.Started != all || st.Ended != all || st.Open != 0 || cs.Failed != 0 || cs.Headers != all+uint64(odd.Load()) {
				t.Errorf("%+v\n%+v", st, cs)
			}
			ns, err := n.Stats()
			if err != nil {
				t.Fatal(err)
			}
			p := ns.Program
			if p.Redirected == 0 || p.Kernel == 0 || p.Failed != 0 {
				t.Errorf("%+v", p)
			}
			// A local sender's packets have partial checksums, and count once, whoever has them.
			all := p.Kernel + cs.HandedOver
			if cs.HandedOver < uint64(odd.Load()) || tt.path == nil && cs.Unverified == 0 || cs.Unverified > all {
				t.Errorf("%d packets of %d were handed over, %d not verified", cs.HandedOver, all, cs.Unverified)
			}
			matched := uint64(0)
			for _, r := range ns.Contexts[0].Rulesets {
				matched += r.Matched
			}
			if want := ns.Program.Seen - ns.Program.Passed; matched != want {
				t.Errorf("%d frames matched, want each once: %d", matched, want)
			}
			if err := n.Remove(c); err != nil {
				t.Error(err)
			}
		})
	}
}

// message is that of a sender: its first bytes say which.
func message(sender, i, longest int) []byte {
	b := bytes.Clone(noise(3 + (sender*7919+i*104729)%(longest-3)))
	b[0], b[1], b[2] = byte(sender+i), byte(sender), byte(i)
	return b
}

// A context that hands over has what is about HPUs, and goes under load.
func TestContextsThatHandOverGoUnderLoad(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 2})
	o := handsOdd(t)
	spec, _, _ := depositing(t, 1<<20)
	spec.Kernel, spec.Events = &nic.Kernel{Object: o}, nil
	spec.Credits, spec.Share, spec.Policy, spec.CoreMask = 64, 2, nic.ByPacket, 2
	stop := make(chan struct{})
	var sending sync.WaitGroup
	for s := range 2 {
		sock := dialUDP(t, lab, slmp.Port)
		sending.Go(func() {
			b := make([]byte, slmp.HeaderLen+100)
			for id := uint32(0); ; id++ {
				select {
				case <-stop:
					return
				default:
				}
				for k := range uint32(5) {
					slmp.Header{ID: id, Offset: 100 * k, Flags: slmp.SYN}.Put(b)
					b[slmp.HeaderLen] = byte(int(id) + s)
					if _, err := sock.Write(b); err != nil {
						continue // nobody is there for a moment
					}
				}
			}
		})
	}
	for range 12 * testenv.Soak() {
		c := run(t, n, spec)
		eventually(t, "both tiers have some", func() bool {
			s, err := n.Stats()
			return err == nil && s.Program.Redirected > 0 && c.Stats().Headers > 4
		})
		if err := n.Remove(c); err != nil {
			t.Fatal(err)
		}
		if st := messages(t, c); st.Open != 0 {
			t.Errorf("%+v", st)
		}
	}
	close(stop)
	sending.Wait()
	plain, _, _ := depositing(t, 1<<20)
	plain.Credits = 64
	if _, err := n.Install(plain); err == nil {
		t.Error("credits without anything that is handed over")
	}
	if len(fmt.Sprint(spec.Tier())) == 0 || spec.Tier() != "kernel" {
		t.Errorf("tier %q", spec.Tier())
	}
}

// A frame that is handed over is its context's, and as it came, whatever the header handler
// has written to it.
func TestHandedOverFramesAreAsTheyCame(t *testing.T) {
	const port = 7 // of a neighbour's datagrams
	for _, tt := range []struct {
		name, write string
	}{
		{"nothing is written", ``},
		{"the port, which makes it a neighbour's", `put(36, bswap16(7), 2); put(40, 0, 2);`},
		{"the protocol, which makes it nobody's", `put(23, 99, 1);`},
		{"the number, which makes it another message's", `put(44, 0x99, 2);`},
		{"the offset, which makes it another segment", `put(48, bswap16(1), 2);`},
		{"the flags, which take its end away", `put(42, bswap16(0x80), 2);`},
		{"the length, which no frame has", `put(38, 0xffff, 2);`},
		{"who has sent it", `put(29, 99, 1); put(34, bswap16(5), 2);`},
		{"the payload", `put(her->payload, 0x5858, 2);`},
		{"the bytes in the packet itself", `__u8 *p = (void *)(long)ctx->data; if (p + 64 <= (__u8 *)(long)ctx->data_end) { __builtin_memset(p + 12, 0x55, 52); }`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			wire(t, lab)
			n := open(t, lab, nic.Config{HPUs: 1})
			o, err := nic.ReadObject("test.o", objecttest.Compile(t, `#include "xspin_message.h"
#define put(at, value, n) ({ __u32 v_ = (value); if (xspin_store(ctx, at, &v_, n)) return XSPIN_SEGV; })
XSPIN_HEADER { `+tt.write+` return XSPIN_HAND_OVER; }
XSPIN_MESSAGES(HEADER | HAND_OVER);
XSPIN_LICENSE("GPL");
`), nic.ObjectMemory)
			if err != nil {
				t.Fatal(err)
			}
			other := run(t, n, nic.ContextSpec{Name: "neighbour", Rulesets: sets(matcher.UDPPort(port)), Handlers: handle(func(*hpu.HER) spin.Code { return spin.Success })})
			got, events := make(chan []byte, 100), make(chan spin.MessageEvent, 10)
			run(t, n, nic.ContextSpec{
				Name: "both", Rulesets: sets(matcher.SLMP()), Kernel: &nic.Kernel{Object: o}, Events: events,
				Handlers: handle(func(h *hpu.HER) spin.Code {
					got <- bytes.Clone(h.Head())
					return spin.Success
				}),
			})
			sock := dialUDP(t, lab, slmp.Port)
			for i := range uint32(3) {
				id := 0x1234 + i
				first, last := noise(100), noise(50)
				for k, b := range [][]byte{raw(slmp.SYN, id, 0, first), raw(slmp.SYN|slmp.EOM, id, 100, last)} {
					write(t, sock, b)
					if a := answer(t, sock); a.ID != id || a.Offset != uint32(100*k) {
						t.Errorf("message %#x, segment %d: answer %+v", id, k, a)
					}
					if p := <-got; !bytes.HasSuffix(p, b) {
						t.Errorf("message %#x, segment %d: the handler in Go got % x, sent was % x", id, k, p, b)
					}
				}
				if e := nextEvent(t, events); e.Number != id || e.Length != 150 || e.Source != sock.LocalAddr().(*net.UDPAddr).AddrPort() {
					t.Errorf("event %+v", e)
				}
			}
			if s := other.Stats(); s.Handled != 0 {
				t.Errorf("the neighbour got %d packets", s.Handled)
			}
			if s := program(t, n); s.Redirected != 6 || s.Failed != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// No two messages that are in flight have the same slot, whichever tier each is in.
func TestSlotsOfContextsThatHandOver(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 2})
	o, err := nic.ReadObject("test.o", objecttest.Compile(t, `#include "xspin_message.h"

XSPIN_HEADER
{
	struct xspin_info i;

	if (!xspin_about(her, &i))
		return XSPIN_FAIL;
	if (i.number & 1)
		return XSPIN_HAND_OVER;
	xspin_count(0, i.slot);
	return XSPIN_DROP;
}

XSPIN_MESSAGES(HEADER | HAND_OVER);
XSPIN_LICENSE("GPL");
`), nic.ObjectMemory)
	if err != nil {
		t.Fatal(err)
	}
	const (
		most = 8
		all  = 2*most - 1 // a message needs a slot of the kernel's until it is handed over
	)
	inGo, events := make(chan int, 2*most), make(chan spin.MessageEvent, 2*most)
	c := run(t, n, nic.ContextSpec{
		Name: "both", Rulesets: sets(matcher.SLMP()), Kernel: &nic.Kernel{Object: o}, Messages: most, Events: events,
		Handlers: hpu.Handlers{Header: func(h *hpu.HER) spin.Code { inGo <- h.Message().Slot(); return spin.Success }},
	})
	if want := nic.HandOverSlots(most); want != 2*most {
		t.Errorf("%d slots", want)
	}
	sock := dialUDP(t, lab, slmp.Port)
	slots := map[int]uint32{} // to the message's number
	var was spin.UserCounter
	for id := range uint32(all) {
		write(t, sock, raw(0, id, 0, noise(100)))
		var slot int
		if id&1 != 0 {
			slot = <-inGo
		} else {
			var now spin.UserCounter
			eventually(t, "the kernel has it", func() bool {
				now = c.Stats().User[0]
				return now.Count > was.Count
			})
			slot, was = int(now.Sum-was.Sum), now
		}
		if other, taken := slots[slot]; taken || slot < 0 || slot >= 2*most {
			t.Errorf("message %d has slot %d (message %d has it: %v)", id, slot, other, taken)
		}
		slots[slot] = id
	}
	if st := messages(t, c); st.Open != all {
		t.Fatalf("%+v", st)
	}
	for id := range uint32(all) {
		write(t, sock, raw(slmp.EOM, id, 100, noise(10)))
	}
	for range all {
		e := nextEvent(t, events)
		if id, ok := slots[e.Slot]; !ok || id != e.Number {
			t.Errorf("event %+v, and message %d has the slot", e, id)
		}
		delete(slots, e.Slot)
	}
}

// Fair sharing is about HPUs: what handlers in eBPF take is not charged to what is handed over.
func TestFairSharingChargesTimeOnHPUs(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	spec, _, events := depositing(t, 1<<20)
	spec.Kernel = &nic.Kernel{Object: handsOdd(t)}
	spec.Handlers = handle(func(*hpu.HER) spin.Code { return spin.Success })
	c := run(t, n, spec)
	sock := dialUDP(t, lab, slmp.Port)
	for _, tt := range []struct {
		name    string
		first   byte
		handled uint64 // by then
		onHPU   bool
	}{
		{"messages in the kernel", 2, 3, false},
		{"messages that are handed over", 1, 6, true},
	} {
		for id := range uint32(3) {
			write(t, sock, raw(slmp.EOM, uint32(tt.first)<<8+id, 0, []byte{tt.first, 0}))
			nextEvent(t, events)
		}
		var s spin.ContextStats
		eventually(t, "their time is counted", func() bool {
			s = c.Stats()
			return s.Handled == tt.handled
		})
		if got := c.HPUTime(); (got > 0) != tt.onHPU || got >= s.HandlerSum {
			t.Errorf("%s: charged %v of %v", tt.name, got, s.HandlerSum)
		}
	}
}

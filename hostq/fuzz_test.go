// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"encoding/binary"
	"errors"
	"testing"
	"unsafe"
)

// FuzzPair drives the NIC's side while the bytes of its memory, its laps and its heads
// are whatever the fuzzer wants, and checks what must hold all the same.
func FuzzPair(f *testing.F) {
	f.Add([]byte{2, 0, 9, 3, 0, 5, 8, 4, 0, 1, 7, 6, 9, 9})
	f.Add([]byte{2, 0, 2, 1, 9, 9, 10, 3, 0, 4, 0, 3, 1, 5, 0})
	f.Add([]byte{1, 1, 1, 0, 16, 0, 200, 1, 1, 4, 0, 8, 3, 11})
	f.Add([]byte{2, 0, 0, 255, 255, 7, 3, 0, 12, 2, 1, 3, 1})
	f.Fuzz(func(t *testing.T, ops []byte) {
		if len(ops) > 400 {
			return
		}
		p, h := both(t, PairConfig{Layout: Layout{Lanes: 2, Events: 2, Requests: 4, Payload: 24}, Outstanding: 3})
		size := int(p.cfg.Size())
		mem := unsafe.Slice((*byte)(unsafe.Pointer(p.shared)), size)
		arg := func() (b byte) {
			if len(ops) > 0 {
				b, ops = ops[0], ops[1:]
			}
			return b
		}
		answers := map[int]int{} // by request
		var ids []uint64
		poll := func(lane, most int) {
			n, seen := 0, 0
			n = p.Poll(lane, most, func(r *Response) {
				seen++
				answers[r.User.(int)]++
				if idLane(r.ID) != lane || len(r.Payload) > 24 || r.Tag != 77 || r.Err != nil && !errors.Is(r.Err, ErrDetached) {
					t.Fatalf("response %+v", r)
				}
			})
			if n != seen || n > most {
				t.Fatalf("%d responses of at most %d, said to be %d", seen, most, n)
			}
		}
		var c Call
		asked := 0
		for len(ops) > 0 {
			lane := int(arg()) % 2
			switch arg() % 13 {
			case 0:
				at := int(arg())<<8 | int(arg())
				binary.NativeEndian.PutUint64(mem[at*8%(size-8):], uint64(arg())|uint64(arg())<<32)
			case 1:
				p.Event(&Event{Kind: MessageEnded, Text: "text"})
			case 2:
				id, err := p.Request(lane, &Request{Tag: 77, Reply: true, Payload: make([]byte, arg()%25)}, asked)
				if err != nil {
					answers[asked]++
				} else {
					ids = append(ids, id)
				}
				asked++
			case 3:
				poll(lane, int(arg()%5))
			case 4:
				if p.Arm(lane) {
					p.Disarm(lane)
				}
			case 5:
				if len(ids) > 0 {
					id := ids[int(arg())%len(ids)]
					l := &p.lanes[idLane(id)]
					user, live := l.table[id&idIndex].user, l.table[id&idIndex].id == id
					if p.Cancel(id) != live {
						t.Fatal("cancelled what is not there, or not what is")
					}
					if live {
						answers[user.(int)]++
					}
				}
			case 6:
				_, _ = p.Notify(make([]Request, arg()%7))
			case 7:
				h.Request(&c)
			case 8:
				_ = h.Respond(&c, 0, c.Payload)
			case 9: // any response, properly sent
				if pos, _, err := h.lanes[lane].claim(1); err == nil {
					s := (*responseSlot)(unsafe.Pointer(unsafe.SliceData(h.lanes[lane].slot(pos))))
					s.length = uint32(arg() % 32)
					s.id = uint64(arg()%4)<<idGenShift | uint64(arg()%3)<<idLaneShift | uint64(arg()%4)
					h.lanes[lane].publish(pos)
				}
			case 10: // a head
				*[]*uint64{&p.shared.events, &p.shared.requests}[lane] = uint64(arg() % 16)
			case 11: // a lap
				p.lanes[lane].lap(uint64(arg())).Store(uint32(arg() % 4))
			case 12:
				p.Counter(int(arg()) % Counters).Add(1)
				p.LoseEvent()
			}
			s := p.Stats()
			if n := p.Outstanding(lane); n < 0 || n > 3 {
				t.Fatalf("%d outstanding", n)
			}
			if s.Waiting < 0 || s.Waiting > 6 || s.Broken != errors.Is(p.Err(), ErrBroken) {
				t.Fatalf("stats %+v, %v", s, p.Err())
			}
		}
		p.Detach()
		for lane := range 2 {
			for range 100 {
				poll(lane, 3)
			}
			if !p.Arm(lane) {
				t.Fatal("something is left to poll, for ever")
			}
		}
		for i := range asked {
			if answers[i] != 1 {
				t.Fatalf("request %d has %d answers", i, answers[i])
			}
		}
	})
}

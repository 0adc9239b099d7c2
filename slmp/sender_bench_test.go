// SPDX-License-Identifier: Apache-2.0

package slmp

import "testing"

// An echo is a receiver that takes all in order.
type echo struct {
	ack Ack
	buf []byte
}

func (e *echo) answer(o *Outbound, payload int) []byte {
	if o.Header.Flags&SYN == 0 {
		return nil
	}
	e.ack = Ack{ID: o.Header.ID, Offset: o.Header.Offset, Cumulative: o.Header.Flags&Cumulative != 0,
		End: o.Header.Offset + uint32(o.Len), Bitmap: append(e.ack.Bitmap[:0], 0)}
	e.buf = e.ack.Append(e.buf[:0])
	return e.buf
}

// stream sends n segments in messages of the given number of segments.
func stream(tb testing.TB, s *Sender, e *echo, n, segments int, id *uint32, now *int64) {
	payload := s.c.Payload
	var dst [44]Outbound
	for sent, open := 0, 0; sent < n; {
		for ; open < 64 && (open == 0 || segments < 1000); open++ {
			o, err := s.Open(*id)
			if err != nil {
				tb.Fatal(err)
			}
			*id++
			o.Supply(uint64(segments*payload), true)
		}
		*now += 20000
		k := s.Next(dst[:], *now)
		if k == 0 && s.Deadline() > *now {
			*now = s.Deadline()
		}
		sent += k
		for i := range dst[:k] {
			if b := e.answer(&dst[i], payload); b != nil {
				if err := s.Acknowledge(b, *now+10000); err != nil {
					tb.Fatal(err)
				}
			}
		}
		for o := s.Finished(); o != nil; o = s.Finished() {
			if o.Err() != nil {
				tb.Fatal(o.Err())
			}
			open--
			s.Recycle(o)
		}
	}
}

func BenchmarkSender(b *testing.B) {
	for _, c := range []struct {
		name     string
		config   SenderConfig
		segments int
	}{
		{"fixed", SenderConfig{Payload: 1408, Window: 256}, 100000},
		{"auto", SenderConfig{Payload: 1408}, 100000},
		{"plain", SenderConfig{Payload: 1408, Window: 256, Plain: true}, 100000},
		{"plain auto", SenderConfig{Payload: 1408, Plain: true}, 100000},
		{"single fixed", SenderConfig{Payload: 64, Window: 256}, 1},
		{"single auto", SenderConfig{Payload: 64}, 1},
	} {
		b.Run(c.name, func(b *testing.B) {
			s, err := NewSender(c.config)
			if err != nil {
				b.Fatal(err)
			}
			var e echo
			var id uint32
			now := int64(1)
			stream(b, s, &e, 1000, c.segments, &id, &now)
			b.ReportAllocs()
			b.ResetTimer()
			stream(b, s, &e, b.N, c.segments, &id, &now)
		})
	}
}

func TestAllocations(t *testing.T) {
	for _, c := range []struct {
		name     string
		config   SenderConfig
		segments int
	}{
		{"large messages", SenderConfig{Payload: 1408}, 100},
		{"fixed window", SenderConfig{Payload: 1408, Window: 64}, 100},
		{"plain", SenderConfig{Payload: 1408, Plain: true}, 100},
		{"single segments", SenderConfig{Payload: 64}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := NewSender(c.config)
			if err != nil {
				t.Fatal(err)
			}
			var e echo
			var id uint32
			now := int64(1)
			step := func() {
				stream(t, s, &e, 5000, c.segments, &id, &now)
				streamRest(t, s, &e, &now)
			}
			step()
			if n := testing.AllocsPerRun(20, step); n > 2 {
				t.Errorf("%v allocations for 5000 segments", n)
			}
		})
	}
}

// streamRest ends all that stream has begun.
func streamRest(tb testing.TB, s *Sender, e *echo, now *int64) {
	var dst [44]Outbound
	for s.Stats().Open > 0 {
		*now += 20000
		k := s.Next(dst[:], *now)
		if k == 0 && s.Deadline() > *now {
			*now = s.Deadline()
		}
		for i := range dst[:k] {
			if b := e.answer(&dst[i], s.c.Payload); b != nil {
				_ = s.Acknowledge(b, *now+10000)
			}
		}
		for o := s.Finished(); o != nil; o = s.Finished() {
			s.Recycle(o)
		}
	}
}

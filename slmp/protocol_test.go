// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"reflect"
	"testing"

	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

func TestAnswer(t *testing.T) {
	q, err := mpq.NewQueue(mpq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	tab := q.NewTable(false)
	k := mpq.Key{1}
	run := func(offset uint32, n int, finish bool) *mpq.Entry {
		t.Helper()
		s := mpq.Segment{Offset: offset, Len: n}
		e, d, _ := tab.Arrive(&k, s, 1)
		switch d {
		case mpq.Start:
			tab.Opened(e, 1)
		case mpq.Run:
		default:
			t.Fatal(d)
		}
		if finish {
			tab.Finish(e, s, 1)
		}
		return e
	}
	e := run(0, 10, true)
	run(10, 10, false)
	run(20, 10, true)
	run(100, 10, true)
	const both = SYN | Cumulative
	bits := []uint64{1 | 1<<8}

	check := func(name string, f Flags, processed bool, e *mpq.Entry, want *Ack) {
		t.Helper()
		buf := make([]byte, 3, 3+MaxAckLen)
		ask := spin.AckRequest{Flags: uint32(f), ID: 7, Offset: 20}
		b := Protocol{}.Answer(buf, ask, processed, e)
		switch {
		case len(b) == 3 && want != nil:
			t.Errorf("%s: silence, want %+v", name, *want)
		case len(b) > 3 && want == nil:
			t.Errorf("%s: %x, want silence", name, b[3:])
		case len(b) > 3:
			if a, err := ParseAck(b[3:]); err != nil || !reflect.DeepEqual(a, *want) {
				t.Errorf("%s: %+v, %v, want %+v", name, a, err, *want)
			}
		}
		if n := testing.AllocsPerRun(10, func() { Protocol{}.Answer(buf, ask, processed, e) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
	check("not asked", 0, true, e, nil)
	check("not asked, cumulative", Cumulative, true, e, nil)
	check("not asked, EOM", EOM, true, e, nil)
	check("an acknowledgement", SYN|ACK, true, e, nil)
	check("asked", SYN, true, e, &Ack{ID: 7, Offset: 20})
	check("asked, reserved bits", SYN|Reserved|Wait, true, e, &Ack{ID: 7, Offset: 20})
	check("cumulative", both, true, e, &Ack{ID: 7, Offset: 20, Cumulative: true, End: 10, Bitmap: bits})
	check("wait, not known", SYN, false, e, nil)
	check("wait", both, false, e, &Ack{ID: 7, Offset: 20, Cumulative: true, Wait: true, End: 10, Bitmap: bits})
	check("ended", SYN|EOM, true, nil, &Ack{ID: 7, Offset: 20})
	check("ended, cumulative", both|EOM, true, nil, &Ack{ID: 7, Offset: 20, Cumulative: true, End: EndMax, Bitmap: []uint64{0}})
	check("wait of nothing", both, false, nil, nil)
	tab.Fail(e, 1)
	check("failed", SYN, true, e, nil)
	check("failed, cumulative", both, false, e, nil)
}

// The end of a message of 4 GiB does not fit its field.
func TestAnswerSaturates(t *testing.T) {
	q, err := mpq.NewQueue(mpq.Config{})
	if err != nil {
		t.Fatal(err)
	}
	tab := q.NewTable(false)
	var e *mpq.Entry
	for i := range 4 {
		s := mpq.Segment{Offset: uint32(i) << 30, Len: 1 << 30, EOM: i == 3}
		e, _, _ = tab.Arrive(&mpq.Key{}, s, 1)
		if i == 0 {
			tab.Opened(e, 1)
		}
		tab.Finish(e, s, 1)
	}
	b := Protocol{}.Answer(nil, spin.AckRequest{Flags: uint32(SYN | Cumulative | EOM), Offset: 3 << 30}, true, e)
	if a, err := ParseAck(b); err != nil || a.End != EndMax || e.State() != mpq.Ending {
		t.Errorf("%+v, %v, %v", a, err, e.State())
	}
}

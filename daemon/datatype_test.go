// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// An application posts a receive for each message, and finds it scattered; of those that
// do not fit it learns why.
func TestDatatypesGoWhereTheApplicationSays(t *testing.T) {
	const text = "hidx(-100,3 500,700 20,40)[short]"
	f := launch(t, `
contexts:
- name: halo
  handler: datatype
  params: {type: '`+text+`', count: 3, strategy: rw-cp, interval: 1000, packet: 500}
  messages: 20
  windows: [{name: in, size: 64KiB}]
`)
	before, err := f.info("halo")
	if err != nil {
		t.Fatal(err)
	}
	typ, err := ddt.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	places := ddttest.Places(typ, 3)
	lo, hi := slices.Min(places), slices.Max(places)+1
	if before.Policy != "blocked-rr" || before.Sequence != 1000 || before.VHPUs != len(places)/1000+1 || before.State != installed {
		t.Errorf("%s, policy %s, sequences of %d bytes, %d virtual HPUs", before.State, before.Policy, before.Sequence, before.VHPUs)
	}
	h, err := f.find("halo")
	if err != nil {
		t.Fatal(err)
	}
	if used := f.inUse(); before.Reserved["checkpoints"] == 0 || before.Reserved["segments"] == 0 || used != h.has.bytes {
		t.Errorf("reserved %v: %d bytes of %d are in use", before.Reserved, used, h.has.bytes)
	}

	a := f.admitted(t, "halo", root, false)
	p := open(t, a)
	conn := f.dial(t)
	window := p.windows["in"].Bytes()
	want := bytes.Repeat([]byte{0xa5}, len(window))
	copy(window, want)
	good := len(places)
	const begun = 40000 // where messages go that fail when some of them is there
	for i, c := range []struct {
		place, size int64
		bytes       int
		err         string
	}{
		{place: -lo, bytes: good},
		{place: 20000, bytes: good},
		{place: begun, bytes: good - 1, err: fmt.Sprintf("a message of %d bytes, and the type has %d", good-1, good)},
		{place: begun, bytes: good + 1, err: fmt.Sprintf("a message of %d bytes, and the type has %d", good+1, good)},
		{place: -lo - 1, bytes: good, err: fmt.Sprintf("bytes %d to %d from %d of a window of 65536: out of bounds", lo, hi-1, -lo-1)},
		{place: 300, size: 10000, bytes: good, err: fmt.Sprintf("bytes %d to %d of a place of 10000: out of bounds", lo, hi-1)},
		{place: 64<<10 - hi, bytes: good},
	} {
		ans := a.do(&control.Ask{Do: "post", Receive: &control.Receive{Window: "in", Place: c.place, Size: c.size, Ignore: ^uint32(0), User: uint64(i)}})
		if ans.Error != "" {
			t.Fatal(ans.Error)
		}
		data := bytes.Repeat([]byte{byte(i + 1), byte(2*i + 1), 7}, c.bytes/3+1)[:c.bytes]
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		sent := make(chan error, 1)
		go func() {
			_, err := conn.SendBytes(ctx, data, slmp.Options{})
			sent <- err
		}()
		e := p.event(t)
		if c.err == "" {
			if err := <-sent; err != nil || e.Kind != hostq.MessageEnded || spin.Cause(e.Cause) != spin.Complete || e.User != uint64(i) || e.Time == 0 {
				t.Errorf("message %d: %v, event %+v", i, err, e)
			}
			for k, at := range places {
				want[c.place+at] = data[k]
			}
		} else {
			if e.Kind != hostq.MessageFailed || e.Text != c.err || e.User != uint64(i) {
				t.Errorf("message %d: event %+v, want %q", i, e, c.err)
			}
			cancel() // its sender would go on
			if err := <-sent; err == nil {
				t.Errorf("message %d: its sender thinks that it was received", i)
			}
			if c.place == begun {
				copy(want[begun+lo:begun+hi], window[begun+lo:begun+hi])
			}
		}
		cancel()
		if !bytes.Equal(window, want) {
			t.Fatalf("message %d: something else was written", i)
		}
	}
	left(a, "done")
	again, err := f.info("halo")
	if err != nil || fmt.Sprint(again.Reserved) != fmt.Sprint(before.Reserved) {
		t.Errorf("started over, reserved %v, before %v: %v", again.Reserved, before.Reserved, err)
	}
	must(t, f.remove("halo"))
	eventually(t, "all memory is free", func() bool { return f.inUse() == 0 })
}

// dial connects to the SLMP port of the NIC.
func (f *fixture) dial(t *testing.T) (conn *slmp.Conn) {
	t.Helper()
	must(t, f.lab.Host.NS.Do(func() (err error) {
		conn, err = slmp.Dial(context.Background(), fmt.Sprintf("%v:%d", f.lab.NIC.Addr.Addr(), slmp.Port), slmp.Config{Payload: 400})
		return err
	}))
	t.Cleanup(func() { conn.Close() })
	return conn
}

// What handlers need may be measured, and change: what counts is the set that is installed.
func TestHandlersMayNeedSomethingElseTheNextTime(t *testing.T) {
	f := launch(t, "\ncontexts: [{name: moody, handler: test-moody}]\n")
	for range 2 {
		i, err := f.info("moody")
		if err != nil {
			t.Fatal(err)
		}
		h, err := f.find("moody")
		if err != nil {
			t.Fatal(err)
		}
		now, then := int64(h.has.set.Sequence), int64(h.b.spec.Sequence)
		if now == then || int64(i.Sequence) != now || i.VHPUs != 3 || i.Reserved["moods"] != now<<20 || f.inUse() != now<<20 || h.has.bytes != now<<20 {
			t.Errorf("set %d, checked as %d: sequences of %d bytes, reserved %v, of which %d bytes count as %d", now, then, i.Sequence, i.Reserved, h.has.bytes, f.inUse())
		}
		left(f.admitted(t, "moody", root, false), "to have it start over")
	}
}

var moody atomic.Int64 // sets that were made

func init() {
	handlers.Register("test-moody", "", func(handlers.Params) (*handlers.Set, error) {
		n := moody.Add(1)
		return &handlers.Set{
			Handlers: hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }},
			Rulesets: []matcher.Ruleset{matcher.SLMP()},
			Sequence: uint32(n), VHPUs: 3, Reserved: map[string]int64{"moods": n << 20},
		}, nil
	})
}

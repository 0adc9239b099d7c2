// SPDX-License-Identifier: Apache-2.0

package hpu_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

// Handlers find atomic operations and transfers in the windows that they are given, with
// the rights that these have.
func TestHandlersUseWindowsAtomicallyAndWithoutWaiting(t *testing.T) {
	on := func(b []byte, r spin.Rights) spin.Window {
		w, err := hostq.WindowOn(b, r)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	const size = 300 << 10 // some pieces of a transfer
	for _, c := range []struct {
		name   string
		window func([]byte) spin.Window
		rights spin.Rights
	}{
		{"memory", func(b []byte) spin.Window { return hpu.Memory(b) }, spin.All},
		{"window", func(b []byte) spin.Window { return on(b, spin.All) }, spin.All},
		{"not atomic", func(b []byte) spin.Window { return on(b, spin.Read|spin.Write) }, spin.Read | spin.Write},
		{"read-only", func(b []byte) spin.Window { return on(b, spin.Read) }, spin.Read},
		{"atomic only", func(b []byte) spin.Window { return on(b, spin.Atomic) }, spin.Atomic},
	} {
		t.Run(c.name, func(t *testing.T) {
			memory := make([]byte, size)
			ran := false
			n := handlerstest.New(t, handlerstest.Config{
				Rulesets: []matcher.Ruleset{matcher.UDPPort(7)},
				Windows:  []hpu.NamedWindow{{Name: "in", Window: c.window(memory)}},
				Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
					useWindow(t, h.Window("in"), c.rights)
					ran = true
					return spin.Success
				}},
			})
			n.Packet(handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(7), []byte("x")))
			if !ran {
				t.Fatal("the handler has not run")
			}
			if c.rights&spin.Write != 0 && !bytes.Equal(memory[1001:][:size/2], bytes.Repeat([]byte{7}, size/2)) {
				t.Error("the memory has something else than was written")
			}
		})
	}
}

func useWindow(t *testing.T, w spin.Window, r spin.Rights) {
	a, ok := w.(spin.AtomicWindow)
	if !ok {
		t.Errorf("%T is no AtomicWindow", w)
		return
	}
	tr, ok := w.(spin.TransferWindow)
	if !ok {
		t.Errorf("%T is no TransferWindow", w)
		return
	}
	end := w.Size()
	for _, op := range []struct {
		name string
		size int64
		f    func(off int64) (uint64, error)
	}{
		{"FetchAdd64", 8, func(off int64) (uint64, error) { return a.FetchAdd64(off, 1<<40|2) }},
		{"CompareAndSwap64", 8, func(off int64) (uint64, error) { return a.CompareAndSwap64(off, 1<<40|2, 9) }},
		{"FetchAdd32", 4, func(off int64) (uint64, error) {
			was, err := a.FetchAdd32(off, 1)
			return uint64(was), err
		}},
		{"CompareAndSwap32", 4, func(off int64) (uint64, error) {
			was, err := a.CompareAndSwap32(off, 10, 11)
			return uint64(was), err
		}},
	} {
		why := func(err error) error {
			if r&spin.Atomic == 0 {
				return spin.ErrRights
			}
			return err
		}
		// What is there is what the one before has left.
		want := map[string]uint64{"CompareAndSwap64": 1<<40 | 2, "FetchAdd32": 9, "CompareAndSwap32": 10}[op.name]
		if was, err := op.f(16); !errors.Is(err, why(nil)) || err == nil && was != want {
			t.Errorf("%s: %d was there, want %d; error %v, want %v", op.name, was, want, err, why(nil))
		}
		for _, off := range []int64{-op.size, end, end - op.size + 1, 16 + op.size/2} {
			if _, err := op.f(off); !errors.Is(err, why(spin.ErrBounds)) {
				t.Errorf("%s at %d: %v", op.name, off, err)
			}
		}
	}
	sliced(t, w, r)
	p := bytes.Repeat([]byte{7}, int(end)/2)
	start, err := tr.StartWrite(p, 1001)
	if r&spin.Write == 0 {
		if !errors.Is(err, spin.ErrRights) {
			t.Errorf("a write without the right: %v", err)
		}
	} else if err != nil {
		t.Error(err)
	} else {
		tests := 1
		for !start.Test() {
			tests++
		}
		if tests < 2 {
			t.Errorf("%d bytes in one piece", len(p))
		}
	}
	q := make([]byte, len(p))
	start, err = tr.StartRead(q, 1001)
	if r&spin.Read == 0 {
		if !errors.Is(err, spin.ErrRights) {
			t.Errorf("a read without the right: %v", err)
		}
	} else if err != nil {
		t.Error(err)
	} else if start.Wait(); r&spin.Write != 0 && !bytes.Equal(p, q) {
		t.Error("what was read is not what was written")
	}
	for _, off := range []int64{-1, end, end - int64(len(p)) + 1} {
		if _, err := tr.StartRead(q, off); err == nil || r&spin.Read != 0 && !errors.Is(err, spin.ErrBounds) {
			t.Errorf("a read at %d: %v", off, err)
		}
	}
}

// sliced has bytes of a window as they are, with each need that the rights allow and none
// that they do not.
func sliced(t *testing.T, w spin.Window, r spin.Rights) {
	s, ok := w.(spin.SliceWindow)
	if !ok {
		t.Errorf("%T is no SliceWindow", w)
		return
	}
	end := w.Size()
	if _, ok := w.(*hostq.Window); ok {
		if _, err := s.Slice(100, 50, 0); !errors.Is(err, spin.ErrRights) {
			t.Errorf("a slice for nothing: %v", err)
		}
	}
	for _, need := range []spin.Rights{spin.Read, spin.Write, spin.Read | spin.Write} {
		b, err := s.Slice(100, 50, need)
		if r&need != need {
			if !errors.Is(err, spin.ErrRights) {
				t.Errorf("a slice to %v of a window with %v: %v", need, r, err)
			}
			continue
		}
		if err != nil || len(b) != 50 || cap(b) != 50 {
			t.Errorf("slice of 50 bytes: %d of %d, %v", len(b), cap(b), err)
			continue
		}
		if need&spin.Write != 0 {
			b[0] ^= 0xff
			b[0] ^= 0xff
		}
		for _, at := range [][2]int64{{-1, 10}, {end - 9, 10}, {end, 1}, {0, end + 1}, {0, -1}, {1<<63 - 1, 1}} {
			if _, err := s.Slice(at[0], at[1], need); !errors.Is(err, spin.ErrBounds) {
				t.Errorf("slice of %d bytes at %d: %v", at[1], at[0], err)
			}
		}
		if b, err := s.Slice(end, 0, need); err != nil || len(b) != 0 {
			t.Errorf("an empty slice at the end: %d bytes, %v", len(b), err)
		}
	}
}

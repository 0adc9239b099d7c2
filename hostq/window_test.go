// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"bytes"
	"errors"
	"math"
	"sync"
	"testing"

	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/spin"
)

func memory(size int) *Memory { return &Memory{b: make([]byte, size)} }

func TestWindowBounds(t *testing.T) {
	const size = 4096
	m := memory(2 * size)
	for i := range m.b {
		m.b[i] = 0xee
	}
	w, err := m.Window(size/2, size, spin.All)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		off  int64
		n    int
		ok   bool
	}{
		{"all", 0, size, true},
		{"nothing at the start", 0, 0, true},
		{"nothing at the end", size, 0, true},
		{"nothing behind the end", size + 1, 0, false},
		{"the last byte", size - 1, 1, true},
		{"one more", size - 1, 2, false},
		{"behind the end", size, 1, false},
		{"one too many", 0, size + 1, false},
		{"unaligned", 13, 1001, true},
		{"before the start", -1, 1, false},
		{"far before", math.MinInt64, 1, false},
		{"nothing, far before", math.MinInt64, 0, false},
		{"far behind", math.MaxInt64, 1, false},
		{"wrapping around", math.MaxInt64 - 7, 8, false},
		{"wrapping to the start", -8, 16, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := make([]byte, c.n)
			for what, f := range map[string]func() (int, error){
				"ReadAt":  func() (int, error) { return w.ReadAt(p, c.off) },
				"WriteAt": func() (int, error) { return w.WriteAt(p, c.off) },
				"StartRead": func() (int, error) {
					tr, err := w.StartRead(p, c.off)
					n := tr.Left()
					tr.Wait()
					return n, err
				},
				"StartWrite": func() (int, error) {
					tr, err := w.StartWrite(p, c.off)
					n := tr.Left()
					tr.Wait()
					return n, err
				},
			} {
				n, err := f()
				if c.ok && (err != nil || n != c.n) || !c.ok && (n != 0 || !errors.Is(err, spin.ErrBounds)) {
					t.Errorf("%s(%d bytes, %d) = %d, %v", what, c.n, c.off, n, err)
				}
			}
		})
	}
	for i, b := range m.b {
		if (i < size/2 || i >= size/2+size) && b != 0xee {
			t.Fatalf("byte %d outside of the window was written", i)
		}
	}
}

func TestWindowMaking(t *testing.T) {
	m := memory(4096)
	for _, c := range []struct {
		name      string
		off, size int64
		r         spin.Rights
		ok        bool
	}{
		{"all", 0, 4096, spin.All, true},
		{"none of it", 4096, 0, spin.All, true},
		{"too long", 0, 4097, spin.All, false},
		{"behind", 4097, 0, spin.All, false},
		{"negative offset", -8, 8, spin.All, false},
		{"negative size", 8, -8, spin.All, false},
		{"wrapping", math.MaxInt64, math.MaxInt64, spin.All, false},
		{"unaligned", 3, 10, spin.Read | spin.Write, true},
		{"unaligned and atomic", 3, 10, spin.All, false},
		{"of 4 and atomic", 4, 16, spin.Atomic, false},
	} {
		if _, err := m.Window(c.off, c.size, c.r); (err == nil) != c.ok || err != nil && !errors.Is(err, spin.ErrBounds) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestWindowOnSlice(t *testing.T) {
	b := make([]byte, 64)
	if _, err := WindowOn(b[4:], spin.Atomic); !errors.Is(err, spin.ErrBounds) {
		t.Errorf("atomic, and not aligned: %v", err)
	}
	for _, r := range []spin.Rights{spin.Read | spin.Write, spin.All} {
		w, err := WindowOn(b[8:], r)
		if err != nil || w.Size() != 56 || w.Rights() != r {
			t.Fatalf("%v: %+v, error %v", r, w, err)
		}
		if _, err := w.WriteAt([]byte{1}, 55); err != nil || b[63] != 1 {
			t.Errorf("%v: a write to the end: %v, error %v", r, b, err)
		}
		b[63] = 0
	}
	if _, err := WindowOn(nil, spin.All); err != nil {
		t.Error(err)
	}
}

func TestWindowRights(t *testing.T) {
	m := memory(64)
	var b [8]byte
	uses := map[spin.Rights][]func(*Window) error{
		spin.Read: {
			func(w *Window) error { _, err := w.ReadAt(b[:], 0); return err },
			func(w *Window) error { _, err := w.StartRead(b[:], 0); return err },
		},
		spin.Write: {
			func(w *Window) error { _, err := w.WriteAt(b[:], 0); return err },
			func(w *Window) error { _, err := w.StartWrite(b[:], 0); return err },
		},
		spin.Atomic: {
			func(w *Window) error { _, err := w.CompareAndSwap64(0, 0, 1); return err },
			func(w *Window) error { _, err := w.FetchAdd64(0, 1); return err },
			func(w *Window) error { _, err := w.CompareAndSwap32(0, 0, 1); return err },
			func(w *Window) error { _, err := w.FetchAdd32(0, 1); return err },
		},
	}
	for r := spin.Rights(0); r <= spin.All; r++ {
		w, err := m.Window(0, 64, r)
		if err != nil {
			t.Fatal(err)
		}
		for need, fs := range uses {
			for i, f := range fs {
				before := bytes.Clone(m.b)
				err := f(w)
				if r&need != 0 && err != nil || r&need == 0 && !errors.Is(err, spin.ErrRights) {
					t.Errorf("rights %v, use %d of %v: %v", r, i, need, err)
				}
				if r&need == 0 && !bytes.Equal(before, m.b) {
					t.Errorf("rights %v, use %d of %v: memory changed", r, i, need)
				}
			}
		}
	}
}

func TestWindowAtomics(t *testing.T) {
	m := memory(32)
	w, err := m.Window(8, 20, spin.Atomic|spin.Read)
	if err != nil {
		t.Fatal(err)
	}
	for off := int64(-9); off < 24; off++ {
		for n, f := range map[int64]func() error{
			8: func() error { _, err := w.FetchAdd64(off, 1); return err },
			4: func() error { _, err := w.CompareAndSwap32(off, 5, 5); return err },
		} {
			ok := off >= 0 && off+n <= 20 && off%n == 0
			if err := f(); (err == nil) != ok || err != nil && !errors.Is(err, spin.ErrBounds) {
				t.Errorf("%d bytes at %d: %v", n, off, err)
			}
		}
	}
	// From here on the two words that fit are 1.
	check := func(what string, was, want uint64, err error) {
		t.Helper()
		if was != want || err != nil {
			t.Errorf("%s: %d, %v; want %d", what, was, err, want)
		}
	}
	was, err := w.CompareAndSwap64(8, 2, 3)
	check("compare with what is not there", was, 1, err)
	was, err = w.CompareAndSwap64(8, 1, math.MaxUint64)
	check("compare with what is there", was, 1, err)
	was, err = w.FetchAdd64(8, 3)
	check("add", was, math.MaxUint64, err)
	was, err = w.FetchAdd64(8, 0)
	check("wrapped", was, 2, err)
	was32, err := w.FetchAdd32(16, math.MaxUint32)
	check("add 32", uint64(was32), 0, err)
	was32, err = w.CompareAndSwap32(16, math.MaxUint32, 9)
	check("compare 32", uint64(was32), math.MaxUint32, err)

	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 1000 {
				_, _ = w.FetchAdd64(0, 1)
				for v := uint64(0); ; {
					was, _ := w.CompareAndSwap64(8, v, v+1)
					if was == v {
						break
					}
					v = was
				}
			}
		})
	}
	wg.Wait()
	was, err = w.FetchAdd64(0, 0)
	check("added by four", was, 4001, err)
	was, err = w.FetchAdd64(8, 0)
	check("swapped by four", was, 4002, err)
}

func TestTransfer(t *testing.T) {
	m := memory(spin.Piece*3 + 11)
	w, err := m.Window(3, int64(len(m.b)-3), spin.Read|spin.Write)
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, spin.Piece*2+7)
	for i := range p {
		p[i] = byte(i * 7)
	}
	tr, err := w.StartWrite(p, 5)
	if err != nil {
		t.Fatal(err)
	}
	if tr.Test() || m.b[8+spin.Piece-1] != p[spin.Piece-1] || m.b[8+spin.Piece] != 0 {
		t.Error("the first test does not copy one piece")
	}
	for tests := 2; !tr.Test(); tests++ {
		if tests == 3 {
			t.Fatal("not done after three pieces")
		}
	}
	if !tr.Test() || !bytes.Equal(m.b[8:][:len(p)], p) {
		t.Error("not all of it was written")
	}
	got := make([]byte, len(p))
	tr, err = w.StartRead(got, 5)
	if err != nil {
		t.Fatal(err)
	}
	tr.Test()
	tr.Wait()
	if !tr.Test() || !bytes.Equal(got, p) {
		t.Error("not all of it was read")
	}
	if n := testing.AllocsPerRun(100, func() {
		tr, _ := w.StartRead(got, 0)
		tr.Test()
		tr.Wait()
		_, _ = w.ReadAt(got, 1)
		_, _ = w.WriteAt(got, 1)
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

func TestRights(t *testing.T) {
	for r := spin.Rights(1); r <= spin.All; r++ {
		if got, err := spin.ParseRights(r.String()); got != r || err != nil {
			t.Errorf("%v: %v, %v", r, got, err)
		}
	}
	for _, s := range []string{"", "x", "rr", "rwar", "RW", "r w", "ä"} {
		if r, err := spin.ParseRights(s); err == nil {
			t.Errorf("%q: %v", s, r)
		}
	}
}

// A window says where its bytes are for those who reach them by the map, as eBPF programs do.
func TestWindowKnowsItsMap(t *testing.T) {
	netnstest.NeedRoot(t)
	m, err := NewMemory("map", 2*Element)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	const at = Element - 8 // over the end of an element
	w, err := m.Window(at, 16, spin.Write)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteAt([]byte("0123456789abcdef"), 0); err != nil {
		t.Fatal(err)
	}
	mem, off := w.Memory()
	if mem != m || off != at {
		t.Errorf("the window is at %d of %p, want %d of %p", off, mem, at, m)
	}
	var got []byte
	for i := range w.Size() {
		element := make([]byte, Element)
		if err := mem.Map().Lookup(uint32((off+i)/Element), element); err != nil {
			t.Fatal(err)
		}
		got = append(got, element[(off+i)%Element])
	}
	if string(got) != "0123456789abcdef" {
		t.Errorf("the map has %q there", got)
	}
	if whole := m.Whole(); whole.Size() != m.Size() || whole.Rights() != spin.All {
		t.Errorf("the window on all of it has %d bytes and rights %v", whole.Size(), whole.Rights())
	}
	own, err := WindowOn(make([]byte, 8), spin.All)
	if err != nil {
		t.Fatal(err)
	}
	if mem, off := own.Memory(); mem != nil || off != 0 {
		t.Errorf("a window on a slice is at %d of %v", off, mem)
	}
}

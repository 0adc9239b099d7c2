// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestSourceScattersFiles reads a message in pieces, from the start of a file and from elsewhere, to its
// end and beyond it.
func TestSourceScattersFiles(t *testing.T) {
	data := make([]byte, 1<<20+4321)
	rand.NewChaCha8([32]byte{1}).Read(data)
	f := tempFile(t, data)
	for _, base := range []int64{0, 1, 4096, 5000} {
		if _, err := f.Seek(base, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		s, size, known, err := newSource(f, 1<<16)
		if err != nil || !known || size != uint64(len(data))-uint64(base) {
			t.Fatalf("from %d: %d bytes, known %v, %v", base, size, known, err)
		}
		s.open(f)
		if !s.isFile() {
			t.Fatalf("from %d: it has no descriptor", base)
		}
		for _, off := range []uint64{0, 1, 4095, size - 1000} {
			got, iovs := make([]byte, 1000), []unix.Iovec(nil)
			for p := got; len(p) > 0; p = p[min(len(p), 300):] {
				v := unix.Iovec{Base: &p[0]}
				v.SetLen(min(len(p), 300))
				iovs = append(iovs, v)
			}
			if err := s.scatter(slices.Clone(iovs), off, len(got)); err != nil || !bytes.Equal(got, data[uint64(base)+off:][:len(got)]) {
				t.Errorf("from %d: bytes at %d differ, %v", base, off, err)
			}
			if err := s.scatter(iovs, size-999, len(got)); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("from %d: a byte more than there is: %v", base, err)
			}
		}
		s.close()
		if s.isFile() {
			t.Errorf("from %d: it is open", base)
		}
	}
}

// TestConnFileCutShort cuts a file short while it is on its way, much and little.
func TestConnFileCutShort(t *testing.T) {
	const size = 2<<20 + 100
	for _, to := range []int64{size / 4, size - 99} {
		p := newConnPeer(t, "127.0.0.1:0")
		f := tempFile(t, noise(size))
		c := mustDial(t, p.addr, fast(Config{Gap: 100 * time.Microsecond}))
		sent := make(chan error)
		go func() {
			_, err := c.Send(t.Context(), f, Options{})
			sent <- err
		}()
		for p.seen() < 10 {
			time.Sleep(time.Millisecond)
		}
		if err := f.Truncate(to); err != nil {
			t.Fatal(err)
		}
		if err := <-sent; !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut to %d bytes: %v", to, err)
		}
		// The connection goes on.
		if _, err := c.SendBytes(t.Context(), noise(10000), Options{}); err != nil {
			t.Error(err)
		}
	}
}

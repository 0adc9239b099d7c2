// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestSourceMapsFiles looks at where the kernel is told to find the bytes of a
// message, from the start of a file and from within a page.
func TestSourceMapsFiles(t *testing.T) {
	data := make([]byte, 2*mapFrom+4321)
	rand.NewChaCha8([32]byte{1}).Read(data)
	path := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, base := range []int64{0, 1, 4096, 5000} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Seek(base, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		s, size, known, err := newSource(f, 1<<16)
		if err != nil || !known || size != uint64(len(data))-uint64(base) || s.pages == nil {
			t.Fatalf("from %d: %d bytes, known %v, mapped %v, %v", base, size, known, s.pages != nil, err)
		}
		for _, off := range []uint64{0, 1, 4095, 1 << 20, size - 1000} {
			if got := s.inPlace(off, 1000); !bytes.Equal(got, data[uint64(base)+off:][:1000]) {
				t.Errorf("from %d: bytes at %d differ", base, off)
			}
		}
		if got := s.inPlace(0, copyBelow-1); got != nil {
			t.Errorf("%d bytes are not copied", len(got))
		}
		if err := s.unmap(); err != nil {
			t.Error(err)
		}
		f.Close()
	}
}

// TestConnFileCutShort cuts a file short while it is on its way: by pages, which
// the kernel notices, and within its last page, which it does not.
func TestConnFileCutShort(t *testing.T) {
	for _, to := range []int64{mapFrom / 2, 2*mapFrom + 1} {
		p := newConnPeer(t, "127.0.0.1:0")
		f := tempFile(t, noise(2*mapFrom+100))
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

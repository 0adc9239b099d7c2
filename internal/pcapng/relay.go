// SPDX-License-Identifier: Apache-2.0

package pcapng

import (
	"bufio"
	"fmt"
	"io"
)

// Totals of a capture.
type Totals struct {
	Frames uint64
	Bytes  uint64 // on the wire
	Lost   uint64 // frames
}

// Relay copies pcapng from r to w, whole blocks only, and counts. A stream that
// ends within a block is an error that wraps io.ErrUnexpectedEOF: what was copied
// is a file nevertheless. What has come is written before more is waited for.
func Relay(w io.Writer, r io.Reader) (t Totals, err error) {
	out := bufio.NewWriterSize(w, 1<<16)
	n := blocks{r: bufio.NewReaderSize(&flushing{r, out}, 1<<16)}
	var lost uint64 // before frames; statistics may say more
	for {
		kind, b, err := n.next()
		if err != nil {
			if err := out.Flush(); err != nil {
				return t, fmt.Errorf("write capture: %w", err)
			}
			if err == io.EOF {
				return t, nil
			}
			return t, fmt.Errorf("read capture: %w", err)
		}
		switch kind {
		case blockEnhanced:
			t.Frames++
			t.Bytes += uint64(n.order.Uint32(b[16:]))
			if captured := n.order.Uint32(b[12:]); uint64(captured) <= uint64(len(b)-20) {
				n.options(b[min(20+pad(int(captured)), len(b)):], func(code uint16, v []byte) {
					if code == optDropped && len(v) == 8 {
						lost += n.order.Uint64(v)
						t.Lost = max(t.Lost, lost)
					}
				})
			}
		case blockStats:
			n.options(b[12:], func(code uint16, v []byte) {
				if code == optStatsDropped && len(v) == 8 {
					t.Lost = max(t.Lost, n.order.Uint64(v))
				}
			})
		}
		if _, err := out.Write(n.block); err != nil {
			return t, fmt.Errorf("write capture: %w", err)
		}
	}
}

// flushing writes what there is before it reads, which may take its time.
type flushing struct {
	io.Reader
	out *bufio.Writer
}

func (f *flushing) Read(p []byte) (int, error) {
	if err := f.out.Flush(); err != nil {
		return 0, err // and stays out's
	}
	return f.Reader.Read(p)
}

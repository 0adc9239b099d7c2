// SPDX-License-Identifier: Apache-2.0

package mpq

import (
	"testing"
	"unsafe"
)

// What is written for each segment shares no cache line with a neighbour.
func TestNeighboursShareNoLines(t *testing.T) {
	var e Entry
	const line = 64
	size := unsafe.Sizeof(e)
	first, last := unsafe.Offsetof(e.low), unsafe.Offsetof(e.seen)+unsafe.Sizeof(e.seen)
	for i := range uintptr(slab) {
		begin := i * size
		if from := (begin + first) / line * line; from < begin {
			t.Errorf("entry %d of %d bytes: line %d has bytes of the one before", i, size, from)
		}
		if to := (begin + last + line - 1) / line * line; to > begin+size {
			t.Errorf("entry %d of %d bytes: the line up to %d has bytes of the next one", i, size, to)
		}
	}
	if size*slab > 16<<10 {
		t.Errorf("%d entries of %d bytes do not fit 16 KiB", slab, size)
	}
}

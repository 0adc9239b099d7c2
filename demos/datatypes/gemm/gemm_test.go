// SPDX-License-Identifier: Apache-2.0

package gemm

import (
	"testing"
	"time"
)

func TestRun(t *testing.T) {
	for _, n := range []int{1, 2, 63, 64, 65, 130} {
		g := New(n)
		const runs = 3
		for range runs {
			g.Run()
		}
		for i := range n {
			for j := range n {
				var want float64
				for k := range n {
					want += g.a[i*n+k] * g.b[k*n+j]
				}
				if got := g.c[i*n+j]; got != runs*want { // small integers: exact
					t.Fatalf("n %d: C[%d,%d] is %g, want %g", n, i, j, got, runs*want)
				}
			}
		}
	}
}

func TestRunIsSingleThreadedAndDoesNotAllocate(t *testing.T) {
	g := New(200)
	if n := testing.AllocsPerRun(3, g.Run); n != 0 {
		t.Errorf("%g allocations", n) // a goroutine would be some
	}
}

func TestGFLOPS(t *testing.T) {
	if got := GFLOPS(1000, 3, 2*time.Second); got != 3 {
		t.Errorf("%g, want 3", got)
	}
}

// SPDX-License-Identifier: Apache-2.0

// Package gemm multiplies matrices of double precision: the computation that
// overlaps with communication. It is gonum's, in the calling thread only.
package gemm

import (
	_ "embed"
	"time"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"
)

// What a GEMM is computed with.
const (
	Library = "gonum"
	Threads = 1
)

// Source is this file, for programs in C: they compute the same when it is built as a
// library.
//
//go:embed gemm.go
var Source []byte

// tile is the edge length of a tile. It is gonum's own, so that gonum computes a tile
// without starting goroutines.
const tile = 64

// A GEMM is C += A B for square matrices in row-major order. FPsPIN doubles C each time,
// which overflows after a thousand of them; sums grow much more slowly.
type GEMM struct {
	n       int
	a, b, c []float64
}

// New returns one of n by n matrices, which take 24 n n bytes.
func New(n int) *GEMM {
	g := &GEMM{n, make([]float64, n*n), make([]float64, n*n), make([]float64, n*n)}
	for i := range g.a {
		g.a[i] = float64(1 + i%7)
		g.b[i] = float64(1 + i%5)
	}
	return g
}

// Run computes it once. It does not allocate.
func (g *GEMM) Run() {
	n := g.n
	for i := 0; i < n; i += tile {
		for j := 0; j < n; j += tile {
			for k := 0; k < n; k += tile {
				gonum.Implementation{}.Dgemm(blas.NoTrans, blas.NoTrans, min(tile, n-i), min(tile, n-j), min(tile, n-k),
					1, g.a[i*n+k:], n, g.b[k*n+j:], n, 1, g.c[i*n+j:], n)
			}
		}
	}
}

// Dim returns the dimension of the matrices.
func (g *GEMM) Dim() int { return g.n }

// GFLOPS returns the billions of additions and multiplications per second of GEMMs of n by
// n matrices.
func GFLOPS(n, gemms int, took time.Duration) float64 {
	d := float64(n)
	return 2 * d * d * d * float64(gemms) / float64(took.Nanoseconds())
}

// SPDX-License-Identifier: Apache-2.0

package impair

// mix and draw are the same as in bpf/src/impair.bpf.c.

// mix is the finalizer of splitmix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// draw returns the i-th random number of a key.
func draw(key, i uint64) uint64 { return mix(key + (i+1)*0x9e3779b97f4a7c15) }

// happens decides whether something happens to frame i. key is the stream of decisions,
// p the probability as a threshold.
func happens(key, i, p uint64) bool { return draw(key, i)&0xffffffff < p }

// keyOf returns the key of a direction, FromHost or ToHost.
func keyOf(seed uint64, way Direction) uint64 { return mix(seed + mix(uint64(way))) }

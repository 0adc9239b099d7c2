// SPDX-License-Identifier: Apache-2.0

package ddt_test

import (
	"fmt"
	"testing"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/eval/ddtloops"
)

// BenchmarkDirect unpacks the types of applications, and vectors, in ranges as packets have
// them and as a whole, next to loops written by hand.
func BenchmarkDirect(b *testing.B) {
	for _, app := range ddt.Apps() {
		t, count, err := ddt.Resolve(app.Name)
		if err != nil {
			b.Fatal(err)
		}
		loop, _ := ddtloops.For(app.Name)
		direct(b, app.Name, t, count, loop)
	}
	for block := int64(4); block <= 2048; block *= 2 {
		count := 110592 / block
		t, err := ddt.HVector(count, block, 2*block, ddt.Byte)
		if err != nil {
			b.Fatal(err)
		}
		direct(b, fmt.Sprintf("vector-%d", block), t, 1, ddtloops.Vector(int(count), int(block), int(2*block)))
	}
}

func direct(b *testing.B, name string, t *ddt.Type, count int64, loop ddtloops.Loop) {
	c, err := ddt.Commit(t, count)
	if err != nil {
		b.Fatal(err)
	}
	_, hi := c.Bounds()
	mem, stream := make([]byte, hi), make([]byte, c.Size())
	run := func(how string, f func()) {
		b.Run(name+"/"+how, func(b *testing.B) {
			b.SetBytes(c.Size())
			for b.Loop() {
				f()
			}
		})
	}
	const packet = 1408
	run("packets", func() {
		for first := int64(0); first < c.Size(); first += packet {
			if _, err := c.Unpack(mem, 0, first, stream[first:min(first+packet, c.Size())]); err != nil {
				b.Fatal(err)
			}
		}
	})
	run("whole", func() {
		if _, err := c.Unpack(mem, 0, 0, stream); err != nil {
			b.Fatal(err)
		}
	})
	run("loop", func() { loop(mem, stream) })
}

// SPDX-License-Identifier: Apache-2.0

package ddt_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/xspin/xspin/ddt"
)

// What packets cost, with each strategy. The checkpoint interval of ro-cp and rw-cp is the
// model's unless a name says another: a packet's bytes, or a 16th of the type's.
func BenchmarkPlace(b *testing.B) {
	const packet = 1408
	for _, d := range benchTypes(b) {
		mem, stream := make([]byte, d.hi()), make([]byte, d.Size())
		packets := int((d.Size() + packet - 1) / packet)
		orders := map[string][]int{"in-order": make([]int, packets), "any-order": rand.New(rand.NewPCG(1, 2)).Perm(packets)}
		for i := range packets {
			orders["in-order"][i] = i
		}
		for _, order := range []string{"in-order", "any-order"} {
			for _, s := range ddt.Strategies() {
				intervals := []int64{0}
				if s == ddt.ROCP || s == ddt.RWCP {
					intervals = []int64{0, packet, d.Size() / 16}
				}
				for _, interval := range intervals {
					name := fmt.Sprintf("%s/%s/%s", d.name, order, s)
					if interval > 0 {
						name += fmt.Sprintf("/every=%d", interval)
					}
					b.Run(name, func(b *testing.B) {
						p, err := ddt.NewPlacement(d.Committed, ddt.Config{Strategy: s, HPUs: 4, Messages: 1, Packet: packet, Interval: interval})
						if err != nil {
							b.Skip(err)
						}
						b.SetBytes(packet)
						for i := 0; b.Loop(); i++ {
							first := int64(orders[order][i%packets] * packet)
							if _, err := p.Place(0, 0, mem, 0, first, first, stream[first:min(first+packet, d.Size())]); err != nil {
								b.Fatal(err)
							}
						}
						b.ReportMetric(float64(p.Memory().Total()), "memory-bytes")
					})
				}
			}
		}
	}
}

// What checkpoints cost before the first packet (SC 2019, figure 18).
func BenchmarkNewPlacement(b *testing.B) {
	for _, d := range benchTypes(b) {
		for _, s := range ddt.Strategies() {
			b.Run(d.name+"/"+s, func(b *testing.B) {
				for b.Loop() {
					if _, err := ddt.NewPlacement(d.Committed, ddt.Config{Strategy: s, HPUs: 4, Messages: 16, Packet: 1408, Interval: 14080}); err != nil {
						b.Skip(err)
					}
				}
			})
		}
	}
}

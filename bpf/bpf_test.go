// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"reflect"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
)

// What the object says about a shared structure and what the Go compiler makes
// of it are the same, field by field: user space reads and writes these in
// memory that it maps.
func TestSharedStructuresHaveOneLayout(t *testing.T) {
	spec, err := LoadIngress()
	if err != nil {
		t.Fatal(err)
	}
	for name, v := range map[string]any{
		"xspin_meta":        Meta{},
		"xspin_table":       Table{},
		"xspin_context":     Context{},
		"xspin_field":       Field{},
		"xspin_rule":        Rule{},
		"xspin_ruleset":     Ruleset{},
		"xspin_index_field": IndexField{},
		"xspin_queue":       Queue{},
		"xspin_share":       Share{},
		"xspin_stats":       Stats{},
		"xspin_config":      Config{},
	} {
		t.Run(name, func(t *testing.T) {
			var c *btf.Struct
			if err := spec.Types.TypeByName(name, &c); err != nil {
				t.Fatal(err)
			}
			g := reflect.TypeOf(v)
			if uint32(g.Size()) != c.Size {
				t.Errorf("%d bytes in Go, %d in C", g.Size(), c.Size)
			}
			var fields []reflect.StructField
			for i := range g.NumField() {
				if f := g.Field(i); f.Name != "_" {
					fields = append(fields, f)
				}
			}
			if len(fields) != len(c.Members) {
				t.Fatalf("%d fields in Go, %d in C", len(fields), len(c.Members))
			}
			end := uint32(0)
			for i, m := range c.Members {
				f := fields[i]
				size, err := btf.Sizeof(m.Type)
				if err != nil {
					t.Fatal(err)
				}
				if strings.ReplaceAll(m.Name, "_", "") != strings.ToLower(strings.ReplaceAll(f.Name, "_", "")) ||
					m.Offset.Bytes() != uint32(f.Offset) || size != int(f.Type.Size()) {
					t.Errorf("%s is %d bytes at %d in C; %s is %d at %d in Go", m.Name, size, m.Offset.Bytes(), f.Name, f.Type.Size(), f.Offset)
				}
				// Padding that nobody named is bytes that nobody owns.
				if m.Offset.Bytes() != end {
					t.Errorf("hole of %d bytes before %s", m.Offset.Bytes()-end, m.Name)
				}
				end = m.Offset.Bytes() + uint32(size)
			}
			if end != c.Size {
				t.Errorf("hole of %d bytes at the end", c.Size-end)
			}
		})
	}
}

// A reader looks at the two bytes before a frame to tell what lies before them.
func TestMetadataIsOneCacheLineWithItsVersionLast(t *testing.T) {
	m := reflect.TypeOf(Meta{})
	magic, _ := m.FieldByName("Magic")
	if m.Size() != MetaSize || MetaSize != 64 || magic.Offset+magic.Type.Size() != m.Size() {
		t.Errorf("%d bytes, MetaSize %d, magic at %d", m.Size(), MetaSize, magic.Offset)
	}
	if MetaMagic>>8 != 'X' || MetaMagic&0xff != 1 {
		t.Errorf("magic %#x is not 'X' and version 1", MetaMagic)
	}
	memory := make([]byte, MetaSize+2)
	binary.LittleEndian.PutUint16(memory[MetaSize-2:], MetaMagic)
	if got := MetaOf(memory).Magic; got != MetaMagic {
		t.Errorf("magic %#x is read in front of a frame, want %#x", got, MetaMagic)
	}
	defer func() {
		if recover() == nil {
			t.Error("metadata is read beyond the memory")
		}
	}()
	MetaOf(memory[:MetaSize-1])
}

// Maps and global variables hold the structures that user space reads there.
func TestMapsHoldTheSharedStructures(t *testing.T) {
	spec, err := LoadIngress()
	if err != nil {
		t.Fatal(err)
	}
	tc, err := LoadIngressTC()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := tc.Maps[IngressTCMapCounters].ValueSize, reflect.TypeOf(Stats{}).Size(); uintptr(got) != want {
		t.Errorf("counters of %d bytes at tc, want %d", got, want)
	}
	if got, want := tc.Maps[".bss"].ValueSize, spec.Maps[".bss"].ValueSize; got != want {
		t.Errorf("%d bytes of variables at tc, %d at xdp: neither program could have the other's", got, want)
	}
	if got, want := spec.Maps[IngressMapCounters].ValueSize, reflect.TypeOf(Stats{}).Size(); uintptr(got) != want {
		t.Errorf("counters of %d bytes, want %d", got, want)
	}
	for name, want := range map[string]uintptr{
		IngressVarTables:   reflect.TypeOf([2]Table{}).Size(),
		IngressVarActive:   4,
		IngressVarCounting: 4,
		IngressVarQueues:   reflect.TypeOf([MaxQueues]Queue{}).Size(),
		IngressVarShare:    reflect.TypeOf(Share{}).Size(),
		IngressVarBuckets:  reflect.TypeOf([MaxBuckets]uint64{}).Size(),
	} {
		v := spec.Variables[name]
		if got := v.Size(); uintptr(got) != want || v.SectionName != ".bss" {
			t.Errorf("%s: %d bytes in %s, want %d in .bss", name, got, v.SectionName, want)
		}
		if there := tc.Variables[name]; there == nil || there.Offset != v.Offset || there.Size() != v.Size() {
			t.Errorf("%s is elsewhere at tc: %v", name, there)
		}
		if v.Offset%64 != 0 {
			t.Errorf("%s is at %d, not at the start of a cache line", name, v.Offset)
		}
	}
}

// Frames in several buffers reach only programs that say they can take them.
func TestEveryProgramThatReceivesTakesFragments(t *testing.T) {
	ingress, err := LoadIngress()
	if err != nil {
		t.Fatal(err)
	}
	bench, err := LoadBench()
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range ingress.Programs {
		if p.SectionName != "xdp.frags" {
			t.Errorf("%s is in section %s", name, p.SectionName)
		}
	}
	for _, name := range []string{BenchProgXspinPass, BenchProgXspinDrop, BenchProgXspinBare} {
		if s := bench.Programs[name].SectionName; s != "xdp.frags" {
			t.Errorf("%s is in section %s", name, s)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"bytes"
	"testing"

	"github.com/xspin/xspin/ddt"
)

func TestEncodeHasALineForEachType(t *testing.T) {
	typ, err := ddt.Parse("struct(8,1,vec(3 2 -4)[double] 0,2,int 100,3,vec(3 2 -4)[double])")
	if err != nil {
		t.Fatal(err)
	}
	c := typ.Contents()
	typ, err = ddt.Struct(c.Blocklens, c.Displs, []*ddt.Type{c.Types[0], c.Types[1], c.Types[0]})
	if err != nil {
		t.Fatal(err)
	}
	const want = "4\nnamed double\nvec 3 2 -4 0\nnamed int\nstruct 3 8 1 1 0 2 2 100 3 1\n"
	if have := string(Encode(typ)); have != want {
		t.Errorf("have\n%swant\n%s", have, want)
	}
}

// A type of types that are shared is as long as it was to write, not as what it means.
func TestEncodeOfSharedTypesIsShort(t *testing.T) {
	typ := ddt.Byte
	for range 40 {
		var err error
		typ, err = ddt.Struct([]int64{1, 1}, []int64{0, typ.Size()}, []*ddt.Type{typ, typ})
		if err != nil {
			t.Fatal(err)
		}
	}
	if lines := bytes.Count(Encode(typ), []byte("\n")); lines > 100 {
		t.Errorf("%d lines", lines)
	}
}

func TestEncodeTakesManyEntries(t *testing.T) {
	displs := make([]int64, 1<<20)
	for i := range displs {
		displs[i] = int64(2 * i)
	}
	typ, err := ddt.IndexedBlock(1, displs, ddt.Int)
	if err != nil {
		t.Fatal(err)
	}
	p := newPeer(t)
	var a answer
	// No elements: this is about the type.
	if err := (&question{typ: typ, memory: []byte{}}).write(p.in); err != nil {
		t.Fatal(err)
	}
	if err := a.read(p.out); err != nil || a.Size != 4<<20 || a.Extent != 8<<20-4 {
		t.Errorf("%d bytes, extent %d, %v", a.Size, a.Extent, err)
	}
}

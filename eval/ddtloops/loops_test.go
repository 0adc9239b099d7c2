// SPDX-License-Identifier: Apache-2.0

package ddtloops

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/xspin/xspin/ddt"
)

// same compares a loop with Unpack, in memory in which both leave traces anywhere.
func same(t *testing.T, typ *ddt.Type, count int64, loop Loop) {
	t.Helper()
	c, err := ddt.Commit(typ, count)
	if err != nil {
		t.Fatal(err)
	}
	lo, hi := c.Bounds()
	if lo < 0 {
		t.Fatalf("begins at %d", lo)
	}
	rnd := rand.NewChaCha8([32]byte{1})
	stream, want := make([]byte, c.Size()), make([]byte, hi)
	rnd.Read(stream)
	rnd.Read(want)
	got := bytes.Clone(want)
	if _, err := c.Unpack(want, 0, 0, stream); err != nil {
		t.Fatal(err)
	}
	loop(got, stream)
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("byte %d of %d is %#x, with Unpack %#x", i, hi, got[i], want[i])
		}
	}
}

func TestApps(t *testing.T) {
	for _, app := range ddt.Apps() {
		t.Run(app.Name, func(t *testing.T) {
			loop, ok := For(app.Name)
			if !ok {
				t.Fatal("no loop")
			}
			typ, count, err := app.Make(nil)
			if err != nil {
				t.Fatal(err)
			}
			same(t, typ, count, loop)
		})
	}
	if _, ok := For("nobody"); ok {
		t.Error("a loop for nobody")
	}
}

func TestVector(t *testing.T) {
	for block := 4; block <= 2048; block *= 2 {
		t.Run(fmt.Sprint(block), func(t *testing.T) {
			typ, err := ddt.HVector(100, int64(block), int64(2*block), ddt.Byte)
			if err != nil {
				t.Fatal(err)
			}
			same(t, typ, 1, Vector(100, block, 2*block))
		})
	}
}

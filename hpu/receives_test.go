// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xspin/xspin/spin"
)

// A list that is looked through from its start says what Receives must do.
func TestReceivesAreAListsFirstMatch(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	ignores := []uint32{0, 1, 6, 0xf0, ^uint32(0)}
	var l Receives
	var list []spin.Receive
	for i := range 30_000 {
		switch r := rng.IntN(10); {
		case r < 4:
			p := spin.Receive{Binding: spin.Binding{User: i}, Tag: rng.Uint32N(16), Ignore: ignores[rng.IntN(len(ignores))], Keep: rng.IntN(100) == 0}
			if err := l.Post(p); err != nil {
				t.Fatal(err)
			}
			list = append(list, p)
		case r < 5 && len(list) > 0:
			p := list[rng.IntN(len(list))]
			is := func(q spin.Receive) bool { return q.Tag == p.Tag && q.Ignore == p.Ignore && q.Keep == p.Keep }
			want := slices.IndexFunc(list, is)
			var got int
			if !l.Unpost(p.Tag, p.Ignore, func(q *spin.Receive) bool { got = q.User.(int); return q.Keep == p.Keep }) || got != list[want].User {
				t.Fatalf("step %d: took back %v, want %v", i, got, list[want].User)
			}
			list = slices.Delete(list, want, want+1)
		default:
			n := rng.Uint32N(16)
			want := slices.IndexFunc(list, func(q spin.Receive) bool { return (q.Tag^n)&^q.Ignore == 0 })
			got, ok := l.take(n)
			if ok != (want >= 0) || ok && got.User != list[want].User {
				t.Fatalf("step %d: message %d took %v (%t), want entry %d of %d", i, n, got.User, ok, want, len(list))
			}
			if ok && !list[want].Keep {
				list = slices.Delete(list, want, want+1)
			}
		}
		if l.Posted() != len(list) {
			t.Fatalf("step %d: %d are posted, want %d", i, l.Posted(), len(list))
		}
	}
	if len(list) == 0 {
		t.Error("nothing was left: the sequence tests too little")
	}
}

func TestReceivesAreBounded(t *testing.T) {
	var l Receives
	for i := range uint32(MaxIgnores) {
		if err := l.Post(spin.Receive{Ignore: i}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Post(spin.Receive{Ignore: MaxIgnores}); !errors.Is(err, ErrReceives) {
		t.Errorf("%d ignores: %v", MaxIgnores+1, err)
	}
	for i := uint32(l.Posted()); i < MaxReceives; i++ {
		if err := l.Post(spin.Receive{Tag: i}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Post(spin.Receive{}); !errors.Is(err, ErrReceives) {
		t.Errorf("%d receives: %v", MaxReceives+1, err)
	}
	// An ignore that nobody uses any more makes room for another.
	if !l.Unpost(0, 1, func(*spin.Receive) bool { return true }) || l.Unpost(0, 1, func(*spin.Receive) bool { return true }) {
		t.Error("the receive with ignore 1 could not be taken back, or twice")
	}
	if err := l.Post(spin.Receive{Ignore: MaxIgnores}); err != nil {
		t.Error(err)
	}
}

// What a message costs that finds none among many. Of each Ignore that may be used there
// is one look.
func BenchmarkReceivesNoMatch(b *testing.B) {
	var l Receives
	for i := range uint32(MaxReceives) {
		if err := l.Post(spin.Receive{Tag: i << 6, Ignore: i % MaxIgnores}); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if _, ok := l.take(^uint32(0)); ok {
			b.Fatal("taken")
		}
	}
}

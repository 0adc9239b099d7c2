// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"encoding/json"
	"reflect"
	"testing"
)

// fill sets all numbers in v to 1.
func fill(t *testing.T, v reflect.Value) {
	t.Helper()
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(t, v.Index(i))
		}
	case reflect.Uint64:
		v.SetUint(1)
	case reflect.Int64:
		v.SetInt(1)
	default:
		t.Fatalf("a counter of kind %v", v.Kind())
	}
}

// A counter that Add forgets stays 0.
func TestAddAddsAllCounters(t *testing.T) {
	var sum, one ContextStats
	fill(t, reflect.ValueOf(&one).Elem())
	sum.Add(&one)
	if sum != one {
		t.Errorf("the sum of nothing and %+v is %+v", one, sum)
	}
}

func TestDropsAsJSON(t *testing.T) {
	want := Drops{DropMemory: 7, DropDead: 9}
	b, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	const text = `{"messages":0,"memory":7,"no_header":0,"overlap":0,"two_ends":0,"beyond":0,"dead":9}`
	if string(b) != text {
		t.Errorf("got %s, want %s", b, text)
	}
	got := Drops{DropOverlap: 3}
	if err := json.Unmarshal(b, &got); err != nil || got != want {
		t.Errorf("read back %v, error %v", got, err)
	}
}

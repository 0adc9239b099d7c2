// SPDX-License-Identifier: Apache-2.0

package handlerstest_test

import (
	"encoding/binary"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

// lengths counts datagrams by their length, in HPU memory that all HPUs share: 16 words,
// one for each 128 bytes. `xspin mem` reads them.
func lengths(h *hpu.HER) spin.Code {
	word := int64(min(h.Len()/128, 15))
	if _, err := hpu.Memory(h.Memory()).FetchAdd64(8*word, 1); err != nil {
		return h.Fail(err) // less memory than the set has asked for
	}
	return spin.Success
}

// Atomic operations on HPU memory are those of hpu.Memory, which it converts to.
func Example_atomics() {
	_ = &handlers.Set{
		Handlers: hpu.Handlers{Payload: lengths},
		Memory:   16 * 8, // at least; a configuration may have more
	}
}

func TestExampleAtomics(t *testing.T) {
	set := &handlers.Set{Handlers: hpu.Handlers{Payload: lengths}, Memory: 16 * 8}
	cfg := handlerstest.Of(set)
	n := handlerstest.New(t, cfg)
	for range 3 {
		n.Packet(handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(9), make([]byte, 300)))
	}
	if got := binary.NativeEndian.Uint64(cfg.Memory[8*2:]); got != 3 {
		t.Errorf("word 2 is %d, want 3", got)
	}
}

// The table of docs/handlers.md has all that a handler can call.
func TestWholeAPIIsInTheDocuments(t *testing.T) {
	page, err := os.ReadFile("../../docs/handlers.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## The whole API\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, typ := range []reflect.Type{reflect.TypeFor[*hpu.HER](), reflect.TypeFor[*hpu.Task](), reflect.TypeFor[*hpu.Completion](), reflect.TypeFor[*hpu.Message]()} {
		for m := range typ.Methods() {
			if !strings.Contains(section, "`"+m.Name+"`") {
				t.Errorf("the table of docs/handlers.md lacks %s of %v", m.Name, typ)
			}
		}
	}
	if !strings.Contains(string(page), "hpu.Memory(h.Memory()).FetchAdd64(8*word, 1)") {
		t.Error("docs/handlers.md lacks the example of this file")
	}
}

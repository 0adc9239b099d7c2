// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"os"
	"testing"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
)

// Objects that were made with version 2 of xspin_handler.h read frames by themselves, and are accepted as they are.
// testdata has them as clang made them then.
func TestObjectsOfTheOlderVersion(t *testing.T) {
	netnstest.NeedRoot(t)
	read := func(name string) *Object {
		file, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		o, err := ReadObject(name, file, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	echo, err := read("echo-udp.version2.o").Load(HandlersConfig{Format: matcher.FormatByName("packet")})
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	now := builtin(t, "echo-udp", nil)
	for _, frame := range [][]byte{datagramOf(0), datagramOf(300), datagramOf(1400), ping(100)} {
		old, is := run(t, echo, bytes.Clone(frame)), run(t, now, bytes.Clone(frame))
		if old.Action != is.Action || old.Code != is.Code || !bytes.Equal(old.Frame, is.Frame) {
			t.Errorf("%d bytes: %v, code %v\n%x\nwant as of this version %v, code %v\n%x", len(frame), old.Action, old.Code, old.Frame, is.Action, is.Code, is.Frame)
		}
	}
	memory := newMemory(t)
	messages, err := read("witness.version2.o").Load(HandlersConfig{
		Format: matcher.FormatByName("slmp"), Memory: memory, MemorySize: 4096, Messages: MessagesConfig{Messages: 4, Segments: 64},
	})
	if err != nil {
		t.Fatal(err)
	}
	messages.Close()
}

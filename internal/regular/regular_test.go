// SPDX-License-Identifier: Apache-2.0

package regular

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestRead(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(os.WriteFile(in("file"), []byte("12345"), 0o600), os.Symlink(in("file"), in("link")), syscall.Mkfifo(in("pipe"), 0o600)); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", in("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, tc := range []struct {
		path string
		most int64
		want string // or a part of the error, in brackets
	}{
		{in("file"), 5, "12345"},
		{in("link"), 100, "12345"},
		{in("file"), 4, "[file has more than 4 bytes]"},
		{in("pipe"), 5, "[pipe is a pipe: want a file]"},
		{dir, 5, "[is a directory: want a file]"},
		{"/dev/zero", 5, "[/dev/zero is a device: want a file]"},
		{in("socket"), 5, "[no such device or address]"},
		{in("nothing"), 5, "[no such file]"},
	} {
		done := make(chan string, 1)
		go func() {
			b, err := Read(tc.path, tc.most)
			if err != nil {
				b = []byte("[" + err.Error() + "]")
			}
			done <- string(b)
		}()
		select {
		case got := <-done:
			if !strings.Contains(got, strings.Trim(tc.want, "[]")) || strings.HasPrefix(got, "[") != strings.HasPrefix(tc.want, "[") {
				t.Errorf("%s: %s, want %s", tc.path, got, tc.want)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: Read waits", tc.path)
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := w.WriteString("of a shell"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if b, err := Read(fmt.Sprintf("/dev/fd/%d", r.Fd()), 100); string(b) != "of a shell" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := Open(in("nothing")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

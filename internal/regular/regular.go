// SPDX-License-Identifier: Apache-2.0

// Package regular reads files that people name, and waits for nobody: to open a named pipe, or
// to read a terminal, takes as long as whoever is at its other end likes.
package regular

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"
)

// Open opens a file to read. All but regular files are errors, except for a pipe that this
// process was started with, as a shell's <(COMMAND) is.
func Open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err // names the path and the errno
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() && !(st.Mode()&fs.ModeNamedPipe != 0 && inherited(path)) {
		err = fmt.Errorf("%s is %s: want a file", path, kind(st.Mode()))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Read returns what a file has, at most so many bytes: more is an error.
func Read(path string, most int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, most+1)) // it may grow
	if err == nil && int64(len(b)) > most {
		err = fmt.Errorf("%s has more than %d bytes", path, most)
	}
	return b, err
}

// inherited tells whether a path names a descriptor of this process.
func inherited(path string) bool {
	return path == "/dev/stdin" || strings.HasPrefix(path, "/dev/fd/") || strings.HasPrefix(path, "/proc/self/fd/")
}

func kind(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m&fs.ModeNamedPipe != 0:
		return "a pipe"
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "no file (" + m.Type().String() + ")"
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"

	"golang.org/x/sys/unix"
)

// isTerminal reports whether a stream of a command is a terminal.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// A screen is a terminal that shows a page and reads keys. It must be restored.
type screen struct {
	in, out *os.File
	before  unix.Termios
}

const (
	enterScreen = "\x1b[?1049h\x1b[?25l" // the other buffer, no cursor
	leaveScreen = "\x1b[?25h\x1b[?1049l"
)

// newScreen takes over the terminal. Ctrl-C stays a signal; Ctrl-Z does nothing, because
// it would leave the terminal unrestored.
func newScreen(in, out *os.File) (*screen, error) {
	t, err := unix.IoctlGetTermios(int(in.Fd()), unix.TCGETS)
	if err != nil {
		return nil, os.NewSyscallError("ioctl TCGETS", err)
	}
	s := &screen{in: in, out: out, before: *t}
	t.Lflag &^= unix.ICANON | unix.ECHO
	t.Cc[unix.VMIN], t.Cc[unix.VTIME], t.Cc[unix.VSUSP] = 1, 0, 0
	if err := unix.IoctlSetTermios(int(in.Fd()), unix.TCSETS, t); err != nil {
		return nil, os.NewSyscallError("ioctl TCSETS", err)
	}
	_, err = out.WriteString(enterScreen)
	return s, err
}

// size returns how many columns and lines the terminal has.
func (s *screen) size() (width, height int) {
	w, err := unix.IoctlGetWinsize(int(s.out.Fd()), unix.TIOCGWINSZ)
	if err != nil || w.Col == 0 || w.Row == 0 {
		return 80, 24
	}
	return int(w.Col), int(w.Row)
}

// keys reads keys until the process or the terminal ends.
func (s *screen) keys() <-chan byte {
	keys := make(chan byte)
	go func() {
		defer close(keys)
		var b [1]byte
		for {
			if n, err := s.in.Read(b[:]); n == 0 || err != nil {
				return
			}
			keys <- b[0]
		}
	}()
	return keys
}

// restore restores the terminal.
func (s *screen) restore() {
	_, _ = s.out.WriteString(leaveScreen)
	_ = unix.IoctlSetTermios(int(s.in.Fd()), unix.TCSETS, &s.before)
}

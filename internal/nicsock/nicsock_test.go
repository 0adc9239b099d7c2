// SPDX-License-Identifier: Apache-2.0

package nicsock

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns/netnstest"
)

func TestAskedServerAnswers(t *testing.T) {
	netnstest.NeedRoot(t)
	name := fmt.Sprintf("test%d", os.Getpid())
	s, err := Serve(name, func() (any, error) { return map[string]int{"seen": 7}, nil })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Serve(name, nil); !errors.Is(err, ErrTaken) {
		t.Errorf("two servers under one name: %v", err)
	}
	if i, err := os.Stat(filepath.Join(Dir, name+suffix)); err != nil {
		t.Error(err)
	} else if i.Mode() != os.ModeSocket|0o600 {
		t.Errorf("socket with mode %v, want it for its owner alone", i.Mode())
	}
	if names, err := Names(); err != nil || !slices.Contains(names, name) {
		t.Errorf("names %v, %v", names, err)
	}
	var got map[string]int
	if err := Ask(name, &got); err != nil || got["seen"] != 7 {
		t.Errorf("answer %v, %v", got, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Ask(name, &got); !errors.Is(err, ErrNone) {
		t.Errorf("asking nobody: %v", err)
	}
	s, err = Serve(name, func() (any, error) { return nil, errors.New("no wonder") })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := Ask(name, &got); err == nil || err.Error() != fmt.Sprintf("NIC on %q: no wonder", name) {
		t.Errorf("error of the server: %v", err)
	}
}

// A process that has no descriptor left answers again when it has.
func TestServerOutlivesAWantOfDescriptors(t *testing.T) {
	netnstest.NeedRoot(t)
	name := fmt.Sprintf("test%d-fds", os.Getpid())
	s, err := Serve(name, func() (any, error) { return 7, nil })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(c)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	none := was
	none.Cur = uint64(c) + 1 // descriptors below are all in use
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	err = unix.Connect(c, &unix.SockaddrUnix{Name: filepath.Join(Dir, name+suffix)})
	time.Sleep(3 * retry) // for Accept to fail
	if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); e != nil || err != nil {
		t.Fatal(e, err)
	}
	var got int
	if err := Ask(name, &got); err != nil || got != 7 {
		t.Errorf("answer %d: %v", got, err)
	}
}

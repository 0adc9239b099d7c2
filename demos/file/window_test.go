// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
)

// reachable lets others pass through the test's directories.
func reachable(t *testing.T, dir string) {
	t.Helper()
	for d := filepath.Dir(dir); strings.HasPrefix(d, os.TempDir()+"/"); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
}

// theirs makes a directory for the application's files.
func theirs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	reachable(t, dir)
	if err := os.Chown(dir, rtt.Nobody, rtt.Nobody); err != nil {
		t.Fatal(err)
	}
	return dir
}

// inBothTiers runs a test with handlers in Go, and with those in eBPF.
func inBothTiers(t *testing.T, test func(t *testing.T, into Into)) {
	for _, into := range []Into{IntoWindow, IntoXDP} {
		t.Run(string(into), func(t *testing.T) { test(t, into) })
	}
}

func windowed(t *testing.T, lab *netns.Lab, into Into, c StoreConfig, places int) (*windowServer, chan Received) {
	t.Helper()
	ended := make(chan Received, 1000)
	c.Ended = func(r Received) { ended <- r }
	s, err := startWindow(t.Context(), lab, ServerConfig{Store: c, HPUs: 2, Wait: "adaptive", Places: places, Into: into})
	if err != nil {
		t.Fatal(err)
	}
	return s, ended
}

func TestAnApplicationWritesFilesOutOfItsWindow(t *testing.T) { inBothTiers(t, writesFiles) }

func writesFiles(t *testing.T, into Into) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir := theirs(t)
	s, ended := windowed(t, lab, into, StoreConfig{Dir: dir, MaxSize: 3 << 20}, 2)
	conn := dial(t, lab, slmp.Config{})
	sizes := []int{0, 1, 1459, 1460, 1461, 1<<20 + 1, 3 << 20} // more than there are places
	want := map[uint32]string{}
	var mu sync.Mutex
	var sending sync.WaitGroup
	for i, size := range sizes {
		data := noise(size, byte(i))
		sending.Go(func() {
			res, err := conn.SendBytes(t.Context(), data, slmp.Options{})
			if err != nil {
				t.Errorf("%d bytes: %v", size, err)
			}
			mu.Lock()
			want[res.ID] = sumOf(data)
			mu.Unlock()
		})
	}
	sending.Wait()
	for range sizes {
		r := wait(t, ended)
		if r.Err != nil || r.SHA256 != want[r.Number] || r.Source.Addr() != lab.Host.Addr.Addr() {
			t.Errorf("told %+v", r)
			continue
		}
		if data, err := os.ReadFile(r.Path); err != nil || sumOf(data) != want[r.Number] {
			t.Errorf("file %s of %d bytes, error %v", r.Path, len(data), err)
		}
		if info, err := os.Stat(r.Path); err != nil || info.Sys().(*syscall.Stat_t).Uid != rtt.Nobody {
			t.Errorf("%s is not the application's: %v, error %v", r.Path, info, err)
		}
	}
	if n, err := s.unverified(); err != nil || n == 0 {
		t.Errorf("%d segments with checksums left to the device, error %v", n, err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if left := names(t, dir); len(left) != len(sizes) {
		t.Errorf("the directory has %v", left)
	}
}

func TestTheWindowsPlacesAreUsedAgain(t *testing.T) { inBothTiers(t, usesPlacesAgain) }

func usesPlacesAgain(t *testing.T, into Into) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir := theirs(t)
	s, ended := windowed(t, lab, into, StoreConfig{Dir: dir, MaxSize: 100_000, Timeout: 300 * time.Millisecond}, 1)
	conn := dial(t, lab, slmp.Config{Retries: 2, MaxRTO: 50 * time.Millisecond})
	fits := func() {
		t.Helper()
		data := noise(100_000, 2)
		if _, err := conn.SendBytes(t.Context(), data, slmp.Options{}); err != nil {
			t.Error(err)
		}
		if r := wait(t, ended); r.Err != nil || r.SHA256 != sumOf(data) {
			t.Errorf("told %+v", r)
		}
	}
	for range 2 { // too long
		if _, err := conn.SendBytes(t.Context(), noise(100_001, 1), slmp.Options{}); err == nil {
			t.Error("100,001 bytes sent")
		}
		if r := wait(t, ended); r.Err == nil {
			t.Errorf("told %+v", r)
		} else {
			t.Log(r.Err)
		}
	}
	fits()
	// Given up in the middle.
	ctx, cancel := context.WithCancel(t.Context())
	_, err := conn.Send(ctx, &trickle{noise(50_000, 1), t.Context().Done()}, slmp.Options{Progress: func(p slmp.Progress) {
		if p.Bytes > 0 {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("sender: %v", err)
	}
	if r := wait(t, ended); r.Err == nil || !strings.Contains(r.Err.Error(), "timed out: ") {
		t.Errorf("told %+v", r)
	}
	fits()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if left := names(t, dir); len(left) != 2 {
		t.Errorf("the directory has %v", left)
	}
}

func TestApplicationThatFailsIsTold(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	t.Run("at the start", func(t *testing.T) {
		dir := t.TempDir()
		reachable(t, dir)
		t.Chdir(dir)
		_, err := startWindow(t.Context(), lab, ServerConfig{Store: StoreConfig{Dir: ".", MaxSize: 1000}, HPUs: 1, Wait: "sleep"})
		for _, want := range []string{dir, "permission denied", fmt.Sprintf("user %d", rtt.Nobody)} {
			if !errors.Is(err, rtt.ErrChild) || !strings.Contains(err.Error(), want) {
				t.Errorf("no %q in error %v", want, err)
			}
		}
		if n := strings.Count(fmt.Sprint(err), "denied"); n != 1 {
			t.Errorf("told %d times: %v", n, err)
		}
	})
	t.Run("later", func(t *testing.T) {
		s, _ := windowed(t, lab, IntoXDP, StoreConfig{Dir: theirs(t), MaxSize: 1000}, 1)
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		<-s.heard
		if err := s.Close(); !errors.Is(err, rtt.ErrChild) || !strings.Contains(err.Error(), "killed") {
			t.Errorf("error %v", err)
		}
	})
}

func TestServeReceivesIntoAWindow(t *testing.T) { inBothTiers(t, servesIntoWindow) }

func servesIntoWindow(t *testing.T, into Into) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	ctx, cancel := context.WithCancel(t.Context())
	var got []Received
	data := noise(100_000, 1)
	err := Serve(ctx, lab, ServerConfig{
		HPUs: 2, Wait: "sleep", Into: into, Places: 1,
		Store: StoreConfig{Dir: theirs(t), MaxSize: 100_000, Ended: func(r Received) { got = append(got, r) }},
	}, func(places int, socket string) {
		if places != 1 {
			t.Errorf("%d places, want 1", places)
		}
		var all []nic.Stats
		c, err := control.Dial(socket)
		if err == nil {
			err = c.Stats(ctx, &all)
			c.Close()
		}
		if err != nil || len(all) != 1 || !strings.HasSuffix(all[0].Interface, "/"+lab.NIC.Device) {
			t.Errorf("counters at %q: %+v, error %v", socket, all, err)
		}
		conn := dial(t, lab, slmp.Config{})
		if _, err := conn.SendBytes(ctx, data, slmp.Options{}); err != nil {
			t.Error(err)
		}
		cancel()
	})
	// What was acknowledged was told of, however soon the end came.
	if err != nil || len(got) != 1 || got[0].SHA256 != sumOf(data) {
		t.Errorf("error %v, received %+v", err, got)
	}
}

func TestHiddenCommandIsForOwnUse(t *testing.T) {
	for _, args := range [][]string{nil, {"demo"}} {
		if ok, err := Main(args); ok || err != nil {
			t.Errorf("Main(%q) = %t, %v", args, ok, err)
		}
	}
	for _, args := range [][]string{{AppCommand}, {AppCommand, "x"}, {AppCommand, "{}", "x"}} {
		if ok, err := Main(args); !ok || err == nil || !strings.Contains(err.Error(), "own use") {
			t.Errorf("Main(%q) = %t, %v", args, ok, err)
		}
	}
}

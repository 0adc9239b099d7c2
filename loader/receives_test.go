// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

const whole = slmp.SYN | slmp.EOM

// receiver has two windows, of which the second cannot be written.
func receiver(t *testing.T, messages int) (*Handlers, *hostq.Window) {
	t.Helper()
	cfg, w := messagesConfig(t, 1<<20, MessagesConfig{Messages: messages, Segments: 32, Events: 1 << 16})
	second := cfg.Messages.Windows[0]
	second.Off, second.Rights = 1<<20, spin.Read
	second.Size = 4096
	cfg.Messages.Windows = append(cfg.Messages.Windows, second)
	return load(t, depositObject(t), cfg), w
}

// byteAt returns the byte in a window.
func byteAt(t *testing.T, w *hostq.Window, off int64) byte {
	t.Helper()
	b, err := w.Slice(off, 1, spin.Read)
	if err != nil {
		t.Fatal(err)
	}
	return b[0]
}

var senders atomic.Uint32 // so that no message is one that has ended

// takes sends messages of one segment, each from another sender, and returns for each the user of the receive that it
// took; -1: it was not answered.
func takes(t *testing.T, h *Handlers, ids ...uint32) (users []int) {
	t.Helper()
	for _, id := range ids {
		if runs(t, h, segment{from: int(senders.Add(1) % 50000), id: id, payload: []byte{byte(id)}, flags: whole})[0] == nil {
			users = append(users, -1)
			continue
		}
		users = append(users, int(event(t, h).User))
	}
	return users
}

// A message takes the first receive that matches, and goes where that says.
func TestReceives(t *testing.T) {
	h, w := receiver(t, 8)
	if users := takes(t, h, 3); !slices.Equal(users, []int{0}) || byteAt(t, w, 0) != 3 {
		t.Errorf("before the first receive, a message took %v, and %d is in the window: want it at 0", users, byteAt(t, w, 0))
	}
	for i, r := range []Receive{
		{Tag: 7, User: 1, Place: 100},
		{Ignore: 0xff, User: 2, Place: 200},
		{Tag: 7, User: 3, Place: 300},
		{Tag: 0x1000, Ignore: 0xf, Keep: true, User: 4, Place: 400},
	} {
		if err := h.Post(r); err != nil {
			t.Fatalf("receive %d: %v", i, err)
		}
	}
	if users, want := takes(t, h, 0x2000, 7, 7, 7, 0x1005, 0x1006, 9, 0x1010), []int{-1, 1, 2, 3, 4, 4, -1, -1}; !slices.Equal(users, want) {
		t.Errorf("messages took %v, want %v", users, want)
	}
	for off, want := range map[int64]byte{100: 7, 200: 7, 300: 7, 400: 6, 0: 3} {
		if got := byteAt(t, w, off); got != want {
			t.Errorf("%d at %d, want %d", got, off, want)
		}
	}
	if s := h.Tally(); s.Refused != 3 || s.Open != 0 || s.Leaked != 0 {
		t.Errorf("%+v", s)
	}
	if n := h.Posted(); n != 1 {
		t.Errorf("%d are posted, want the one that stays", n)
	}
	// A message that was refused comes again, and finds one.
	if err := h.Post(Receive{Tag: 9, User: 9}); err != nil {
		t.Fatal(err)
	}
	if users := takes(t, h, 9); !slices.Equal(users, []int{9}) {
		t.Errorf("the message that came again took %v", users)
	}
}

// What a receive may not be, and what a message may not do with it.
func TestWrongReceives(t *testing.T) {
	h, w := receiver(t, 8)
	for _, tt := range []struct {
		r    Receive
		want error
	}{
		{Receive{Window: 1}, spin.ErrRights},
		{Receive{Place: -8}, spin.ErrBounds},
		{Receive{Place: 1<<20 + 1}, spin.ErrBounds},
		{Receive{Place: 8, Size: 1<<20 - 7}, spin.ErrBounds},
		{Receive{Place: 8, Size: 1<<63 - 1}, spin.ErrBounds},
		{Receive{Size: -1}, spin.ErrBounds},
	} {
		if err := h.Post(tt.r); !errors.Is(err, tt.want) {
			t.Errorf("%+v: %v, want %v", tt.r, err, tt.want)
		}
	}
	for _, window := range []int{-1, 2, 1 << 40} {
		if h.Post(Receive{Window: window}) == nil {
			t.Errorf("window %d is taken", window)
		}
	}
	if users := takes(t, h, 1); users[0] != 0 {
		t.Error("a receive that was refused counts as one")
	}
	if err := h.Post(Receive{Place: 1 << 19, Size: 10, Tag: 5}); err != nil {
		t.Fatal(err)
	}
	eleven := []byte("12345678901")
	if a := runs(t, h, segment{id: 5, payload: eleven, flags: whole}); a[0] != nil {
		t.Error("11 bytes are in a place for 10")
	}
	if byteAt(t, w, 1<<19) != 0 {
		t.Error("something was written")
	}
	packets := builtin(t, "noop", nil)
	if packets.Post(Receive{}) == nil || packets.Unpost(Receive{}) || packets.Posted() != 0 {
		t.Error("handlers of packets take a receive")
	}
	h.Close()
	if h.Post(Receive{}) == nil || h.Unpost(Receive{}) || h.Posted() != 0 {
		t.Error("closed handlers take a receive")
	}
}

// A receive that was taken back is not there, the others are, in their order.
func TestUnpost(t *testing.T) {
	h, _ := receiver(t, 8)
	for i := range 4 {
		if err := h.Post(Receive{Ignore: ^uint32(0), User: uint64(i + 1)}); err != nil {
			t.Fatal(err)
		}
	}
	if h.Unpost(Receive{Ignore: ^uint32(0), User: 9}) {
		t.Error("one that is not there was taken back")
	}
	if r := (Receive{Ignore: ^uint32(0), User: 2}); !h.Unpost(r) || h.Unpost(r) {
		t.Error("taken back not at all, or twice")
	}
	if users := takes(t, h, 1, 2, 3, 4); !slices.Equal(users, []int{1, 3, 4, -1}) {
		t.Errorf("messages took %v", users)
	}
}

// The ring goes round, with a receive at its head that nobody takes, and there is an end to
// what can be posted.
func TestManyReceives(t *testing.T) {
	h, _ := receiver(t, 8)
	if err := h.Post(Receive{Tag: 1 << 30, User: 77}); err != nil {
		t.Fatal(err)
	}
	for i := range 3 * MaxReceives / 2 {
		if err := h.Post(Receive{Ignore: 0xffff, User: uint64(i)}); err != nil {
			t.Fatalf("receive %d: %v", i, err)
		}
		if users := takes(t, h, uint32(i)); users[0] != i {
			t.Fatalf("message %d took %v", i, users)
		}
	}
	if n := h.Posted(); n != 1 {
		t.Errorf("%d are posted", n)
	}
	for i := range MaxReceives - 1 {
		if err := h.Post(Receive{Tag: 5, User: uint64(i)}); err != nil {
			t.Fatalf("receive %d: %v", i, err)
		}
	}
	if err := h.Post(Receive{}); !errors.Is(err, ErrReceives) {
		t.Errorf("one more: %v", err)
	}
	if users := takes(t, h, 5, 1<<30); !slices.Equal(users, []int{0, 77}) {
		t.Errorf("messages took %v", users)
	}
	// All but 256 are out of sight, until those before them are gone.
	for i := range 300 {
		if !h.Unpost(Receive{Tag: 5, User: uint64(i + 1)}) {
			t.Fatal("nothing to take back")
		}
	}
	if err := h.Post(Receive{Tag: 6, User: 66}); err != nil {
		t.Fatal(err)
	}
	if users := takes(t, h, 6); !slices.Equal(users, []int{-1}) {
		t.Errorf("a message took %v", users)
	}
}

// Messages on two CPUs never take the same receive, and leave none, while others are posted
// and taken back.
func TestReceivesOnTwoCPUs(t *testing.T) {
	const n = 4000
	h, _ := receiver(t, 8)
	sender := func(cpu int) error {
		runtime.LockOSThread() // and ends with the thread: it stays on its CPU
		var set unix.CPUSet
		set.Set(cpu % runtime.NumCPU())
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return err
		}
		out := make([]byte, 512)
		for i := range n {
			s := segment{from: cpu, id: uint32(i), payload: []byte{1}, flags: whole, sum: noSum}
			frame := s.frame()
			for tries := 0; ; tries++ { // refused, it comes again
				ret, err := h.prog.Run(&ebpf.RunOptions{Data: frame, DataOut: out, Repeat: 1})
				if err != nil {
					return err
				}
				if Action(ret) == ActionSend {
					break
				}
				if tries == 1<<20 {
					return fmt.Errorf("message %d is never answered: %+v", i, h.Tally())
				}
			}
		}
		return nil
	}
	if err := h.Post(Receive{Tag: 1 << 30, Ignore: 0xff}); err != nil { // gaps grow behind it
		t.Fatal(err)
	}
	errs := make(chan error, 2)
	for cpu := range 2 {
		go func() { errs <- sender(cpu) }()
	}
	r, err := ringbuf.NewReader(h.Events())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	seen := map[uint64]bool{} // taken by a message
	back := map[uint64]bool{} // taken back
	next := func(wait time.Duration) bool {
		r.SetDeadline(time.Now().Add(wait))
		rec, err := r.Read()
		if err != nil {
			return false
		}
		e, _ := ReadEvent(rec.RawSample)
		if seen[e.User] || back[e.User] {
			t.Fatalf("receive %d was taken twice", e.User)
		}
		seen[e.User] = true
		return true
	}
	user := uint64(0)
	for len(seen) < 2*n {
		q := Receive{Ignore: 0xffff, User: user}
		if err := h.Post(q); err != nil {
			t.Fatal(err)
		}
		if user%3 == 0 && h.Unpost(q) {
			back[user] = true
		}
		for user++; next(0); {
		}
	}
	for range 2 {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	for next(100 * time.Millisecond) {
	}
	if got, want := h.Posted()-1, int(user)-len(back)-2*n; got != want || len(seen) != 2*n {
		t.Errorf("%d receives, of which %d were taken back and %d taken: %d are left, want %d", user, len(back), len(seen), got, want)
	}
	if s := h.Tally(); s.Ended != 2*n || s.Leaked != 0 || s.Open != 0 || s.Refused == 0 {
		t.Errorf("%+v", s)
	}
}

// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/spin"
)

var peer = netip.MustParseAddrPort("10.0.0.2:40001")

// open opens a store that the test closes, and where its messages go.
func open(t *testing.T, cfg StoreConfig) (*Store, chan Received) {
	t.Helper()
	ended := make(chan Received, 1000)
	if cfg.Ended == nil {
		cfg.Ended = func(r Received) { ended <- r }
	}
	s, err := OpenStore(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, ended
}

func begin(t *testing.T, s *Store, number uint32) *incoming {
	t.Helper()
	in, err := s.begin(peer, number)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// write puts data into in as a sender's segments would come, some of them late.
func write(in *incoming, data []byte) error {
	const segment = 1460
	n := (len(data) + segment - 1) / segment
	put := func(i int) error {
		b := data[i*segment : min((i+1)*segment, len(data))]
		_, err := in.WriteAt(b, int64(i)*segment)
		return err
	}
	for i := range n {
		if i%17 == 3 {
			continue
		}
		if err := put(i); err != nil {
			return err
		}
	}
	for i := 3; i < n; i += 17 {
		if err := put(i); err != nil {
			return err
		}
	}
	return nil
}

func noise(n int, seed byte) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

func sumOf(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// names lists a directory.
func names(t *testing.T, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

func TestFilesOfAllSizesBecomeWhatWasWritten(t *testing.T) {
	for _, prepare := range []int64{-1, 1 << 20, 64 << 20} {
		dir := t.TempDir()
		s, ended := open(t, StoreConfig{Dir: dir, MaxSize: 50 << 20, Prepare: prepare})
		for i, size := range []int{0, 1, 1459, 1460, 1461, small - 1, small, small + 1, unmapped + 1, 1 << 20, 50 << 20} {
			data := noise(size, byte(i))
			in := begin(t, s, uint32(i))
			if err := write(in, data); err != nil {
				t.Fatal(err)
			}
			back := make([]byte, min(size, 100))
			if n, err := in.ReadAt(back, int64(size-len(back))); n != len(back) || err != nil || !bytes.Equal(back, data[size-len(back):]) {
				t.Errorf("%d bytes: read back %d: %v", size, n, err)
			}
			if left := names(t, dir); len(left) != 0 {
				t.Errorf("%d bytes: %v can be seen before all is there", size, left)
			}
			if err := in.publish(uint64(size)); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, fmt.Sprintf("10.0.0.2-40001-%d", i))
			got, err := os.ReadFile(path)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes: file of %d bytes, error %v", size, len(got), err)
			}
			if _, err := in.WriteAt([]byte{1}, 0); err == nil {
				t.Errorf("%d bytes: written to after its end", size)
			}
			s.end(in)
			r := <-ended
			if r.Err != nil || r.Path != path || r.Bytes != uint64(size) || r.SHA256 != sumOf(data) || r.Source != peer || r.Number != uint32(i) || r.Took <= 0 {
				t.Errorf("%d bytes: told %+v", size, r)
			}
			if err := os.Remove(path); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestLargeFilesAreMappedAheadOfTheData(t *testing.T) {
	s, _ := open(t, StoreConfig{Dir: t.TempDir(), Prepare: -1})
	in := begin(t, s, 1)
	data := noise(8<<20, 1)
	if err := write(in, data); err != nil {
		t.Fatal(err)
	}
	for range 5000 {
		if in.part.ready.Load() > int64(len(data)) {
			break
		}
		time.Sleep(time.Millisecond)
		if _, err := in.WriteAt(data[:1], 0); err != nil { // what was not granted is asked again
			t.Fatal(err)
		}
	}
	if ready := in.part.ready.Load(); ready < int64(len(data)) {
		t.Fatalf("%d bytes ready, %d written", ready, len(data))
	}
	// What follows goes through the mapping, next to what did not.
	more := noise(1<<20, 2)
	if err := write(in, more); err != nil {
		t.Fatal(err)
	}
	if err := in.publish(uint64(len(data))); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(in.Path)
	if err != nil || !bytes.Equal(got, append(more, data[len(more):]...)) {
		t.Errorf("file of %d bytes is not what was written, error %v", len(got), err)
	}
	s.end(in)
}

func TestWritesOutsideOfAFileAreRefused(t *testing.T) {
	const limit = 100_000
	s, _ := open(t, StoreConfig{Dir: t.TempDir(), MaxSize: limit})
	in := begin(t, s, 1)
	for _, tc := range []struct {
		off int64
		n   int
		ok  bool
	}{
		{0, 0, true}, {0, 1, true}, {limit, 0, true}, {limit - 1, 1, true}, {limit - 1, 2, false}, {limit, 1, false},
		{-1, 1, false}, {1 << 62, 1, false}, {1<<63 - 1, 1460, false}, {0, limit + 1, false}, {0, limit, true},
	} {
		_, err := in.WriteAt(make([]byte, tc.n), tc.off)
		if (err == nil) != tc.ok || err != nil && !errors.Is(err, spin.ErrBounds) {
			t.Errorf("write %d at %d: %v", tc.n, tc.off, err)
		}
		if _, err := in.ReadAt(make([]byte, tc.n), tc.off); err != nil && tc.ok || err == nil && !tc.ok {
			t.Errorf("read %d at %d: %v", tc.n, tc.off, err)
		}
	}
	if in.Size() != limit {
		t.Errorf("size %d", in.Size())
	}
	in.fail(os.ErrInvalid)
	s.end(in)
}

// A file that is replaced has its old contents, or its new, at any time.
func TestAFileOfTheSameNameIsReplacedInOneStep(t *testing.T) {
	dir := t.TempDir()
	s, ended := open(t, StoreConfig{Dir: dir})
	path := filepath.Join(dir, "10.0.0.2-40001-7")
	a, b := noise(300_000, 1), noise(20_000, 2)
	stop := make(chan struct{})
	var watch sync.WaitGroup
	receive := func(data []byte) {
		t.Helper()
		in := begin(t, s, 7)
		if err := write(in, data); err != nil {
			t.Fatal(err)
		}
		if err := in.publish(uint64(len(data))); err != nil {
			t.Fatal(err)
		}
		s.end(in)
		if r := <-ended; r.Err != nil || r.SHA256 != sumOf(data) {
			t.Fatalf("told %+v", r)
		}
	}
	receive(a)
	watch.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, a) && !bytes.Equal(got, b) {
				t.Errorf("%d bytes that are neither the old nor the new file, error %v", len(got), err)
				return
			}
		}
	})
	for range 50 {
		receive(b)
		receive(a)
	}
	// What a crash left between two steps is in nobody's way.
	if err := os.WriteFile(filepath.Join(dir, ".xspin-10.0.0.2-40001-7.part"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	receive(b)
	close(stop)
	watch.Wait()
	if left := names(t, dir); len(left) != 1 {
		t.Errorf("the directory has %v", left)
	}
}

func TestANameThatCannotBeTakenFailsTheMessage(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, StoreConfig{Dir: dir})
	if err := os.Mkdir(filepath.Join(dir, "10.0.0.2-40001-7"), 0o700); err != nil {
		t.Fatal(err)
	}
	in := begin(t, s, 7)
	if err := in.publish(0); !errors.Is(err, unix.EISDIR) {
		t.Errorf("a directory has its name: %v", err)
	}
	in.fail(os.ErrInvalid)
	s.end(in)
	if left := names(t, dir); len(left) != 1 {
		t.Errorf("the directory has %v", left)
	}
}

func TestMessagesAtTheSameTimeGetFilesOfTheirOwn(t *testing.T) {
	dir := t.TempDir()
	s, ended := open(t, StoreConfig{Dir: dir, Prepare: 1 << 20})
	const n = 8
	want := map[uint32]string{}
	var writers sync.WaitGroup
	for i := range uint32(n) {
		data := noise(int(i)*400_000, byte(i))
		want[i] = sumOf(data)
		in := begin(t, s, i)
		writers.Go(func() {
			if err := write(in, data); err != nil {
				t.Error(err)
			}
			if err := in.publish(uint64(len(data))); err != nil {
				t.Error(err)
			}
			s.end(in)
		})
	}
	writers.Wait()
	for range n {
		if r := <-ended; r.Err != nil || r.SHA256 != want[r.Number] {
			t.Errorf("told %+v", r)
		}
	}
	if left := names(t, dir); len(left) != n {
		t.Errorf("the directory has %v", left)
	}
}

func TestAbandonedMessagesLeaveNothing(t *testing.T) {
	dir := t.TempDir()
	s, ended := open(t, StoreConfig{Dir: dir})
	for i, size := range []int{0, 1000, 1 << 20} {
		in := begin(t, s, uint32(i))
		if err := write(in, noise(size, 1)); err != nil {
			t.Fatal(err)
		}
		in.fail(errors.New("its sender is gone"))
		in.fail(errors.New("and so are we"))
		if err := in.publish(uint64(size)); err == nil {
			t.Error("a failed message became a file")
		}
		s.end(in)
		if r := <-ended; r.Err == nil || r.Err.Error() != "its sender is gone" || r.Path != "" {
			t.Errorf("told %+v", r)
		}
	}
	if left := names(t, dir); len(left) != 0 {
		t.Errorf("the directory has %v", left)
	}
}

// A full file system fails the message, and is not a signal.
func TestAFullFileSystemFailsTheMessage(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	// Opened here, to be closed before the file system is.
	ended := make(chan Received, 1)
	s, err := OpenStore(StoreConfig{Dir: dir, Ended: func(r Received) { ended <- r }})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		in := begin(t, s, 1)
		err := write(in, noise(8<<20, 1))
		if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), dir) {
			t.Errorf("8 MiB into 4: %v", err)
		}
		in.fail(err)
		s.end(in)
		<-ended
		in = begin(t, s, 2)
		data := noise(2<<20, 2)
		if err := errors.Join(write(in, data), in.publish(uint64(len(data)))); err != nil {
			t.Errorf("2 MiB into 4: %v", err)
		}
		s.end(in)
		if r := <-ended; r.Err != nil || r.SHA256 != sumOf(data) {
			t.Errorf("told %+v", r)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// A page that the kernel cannot provide fails the message too.
func TestAFaultInTheMappingFailsTheMessage(t *testing.T) {
	s, _ := open(t, StoreConfig{Dir: t.TempDir(), Prepare: 1 << 20})
	in := begin(t, s, 1)
	if err := write(in, noise(100_000, 1)); err != nil {
		t.Fatal(err)
	}
	if in.part.ready.Load() < 1<<20 {
		t.Fatalf("%d bytes prepared", in.part.ready.Load())
	}
	if err := in.part.f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if _, err := in.WriteAt(make([]byte, 1460), 500_000); !errors.Is(err, errFault) {
		t.Errorf("error %v", err)
	}
	in.fail(errFault)
	s.end(in)
}

// A file may be extended by another goroutine when it gets its size.
func TestWhatIsAllocatedTooLateIsGivenBack(t *testing.T) {
	s, _ := open(t, StoreConfig{Dir: t.TempDir(), Prepare: -1})
	p, err := s.createLarge()
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if _, err := p.write(noise(10_000, 1), 0); err != nil {
		t.Fatal(err)
	}
	if err := p.finish(10_000); err != nil {
		t.Fatal(err)
	}
	p.extend(8 << 20)
	var st unix.Stat_t
	if err := unix.Fstat(int(p.f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if st.Size != 10_000 || st.Blocks*512 > 1<<20 {
		t.Errorf("%d bytes long, %d bytes allocated", st.Size, st.Blocks*512)
	}
}

// A file that was prepared is kept for a message that is worth it.
func TestShortMessagesDoNotUseUpWhatWasPrepared(t *testing.T) {
	dir := t.TempDir()
	s, ended := open(t, StoreConfig{Dir: dir, Prepare: 8 << 20})
	spare := s.spare
	for i, size := range []int{small + 1, copied, 100} {
		for _, good := range []bool{true, false} {
			data := noise(size, byte(i))
			in := begin(t, s, uint32(i))
			if err := write(in, data); err != nil {
				t.Fatal(err)
			}
			if size > small && in.part != spare {
				t.Errorf("%d bytes: not into the file that was prepared", size)
			}
			// Another one at the same time has to do without.
			other := begin(t, s, 100)
			if err := write(other, noise(100_000, 1)); err != nil {
				t.Fatal(err)
			}
			other.part.extend(1 << 20)
			other.fail(os.ErrInvalid)
			if good {
				if err := in.publish(uint64(size)); err != nil {
					t.Fatal(err)
				}
			} else {
				in.fail(os.ErrInvalid)
			}
			s.end(in)
			s.end(other)
			r := <-ended
			<-ended
			if good && (r.Err != nil || r.SHA256 != sumOf(data)) {
				t.Errorf("%d bytes: told %+v", size, r)
			}
			if s.spare != spare || spare.ready.Load() < 8<<20 {
				t.Errorf("%d bytes, good %t: the file that was prepared is gone", size, good)
			}
		}
	}
	in := begin(t, s, 10)
	data := noise(2<<20, 10)
	if err := errors.Join(write(in, data), in.publish(2<<20)); err != nil {
		t.Fatal(err)
	}
	s.end(in)
	if r := <-ended; r.Err != nil || r.SHA256 != sumOf(data) {
		t.Errorf("told %+v", r)
	}
	if s.spare == nil || s.spare == spare {
		t.Errorf("no other file is prepared in the place of one that was used")
	}
}

// What is told faster than it is dealt with is bounded: new messages wait.
func TestNewMessagesAreRefusedWhileTooManyAreNotDealtWith(t *testing.T) {
	gate := make(chan struct{})
	s, _ := open(t, StoreConfig{Dir: t.TempDir(), Ended: func(Received) { <-gate }})
	var err error
	taken := 0
	for ; taken < 2*backlog; taken++ {
		var in *incoming
		if in, err = s.begin(peer, uint32(taken)); err != nil {
			break
		}
		in.fail(os.ErrInvalid)
		s.end(in)
	}
	if !errors.Is(err, errBacklog) || taken < backlog {
		t.Errorf("%d messages taken, error %v", taken, err)
	}
	close(gate)
	for range 5000 {
		var in *incoming
		if in, err = s.begin(peer, 0); err == nil {
			in.fail(os.ErrInvalid)
			s.end(in)
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err != nil {
		t.Errorf("still refused: %v", err)
	}
}

// A flood of messages finds no place, and never that the process may open no more files.
func TestMessagesThatBeginTakeNoMoreFilesThanThereAre(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	open0 := len(names(t, "/proc/self/fd"))
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(4*open0 + 60), Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &old)
	s, ended := open(t, StoreConfig{Dir: dir})
	// Others of their names are there: the largest number of files for each.
	for round := range 2 {
		var live []*incoming
		for number := range uint32(500) {
			in, err := s.begin(peer, number)
			if errors.Is(err, errFiles) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			live = append(live, in)
			if err := write(in, noise(small+1, byte(number))); err != nil {
				t.Fatalf("round %d, message %d: %v", round, number, err)
			}
		}
		if len(live) < 10 || len(live) == 500 {
			t.Fatalf("%d messages at a time", len(live))
		}
		for _, in := range live {
			if err := in.publish(small + 1); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		for _, in := range live {
			s.end(in)
		}
		for range live {
			if r := wait(t, ended); r.Err != nil {
				t.Errorf("round %d: %+v", round, r)
			}
		}
	}
}

func TestCloseGivesUpWhatIsNotComplete(t *testing.T) {
	dir := t.TempDir()
	ended := make(chan Received, 10)
	s, err := OpenStore(StoreConfig{Dir: dir, Ended: func(r Received) { ended <- r }})
	if err != nil {
		t.Fatal(err)
	}
	in, over := begin(t, s, 1), begin(t, s, 2)
	if err := write(in, noise(1<<20, 1)); err != nil {
		t.Fatal(err)
	}
	over.fail(os.ErrInvalid)
	s.end(over)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if r := <-ended; r.Number != 2 || len(ended) != 0 {
		t.Errorf("told %+v and %d more", r, len(ended))
	}
	if _, err := in.WriteAt([]byte{1}, 0); err == nil {
		t.Error("written to after Close")
	}
	if _, err := s.begin(peer, 3); err == nil {
		t.Error("a message begins after Close")
	}
	if left := names(t, dir); len(left) != 0 {
		t.Errorf("the directory has %v", left)
	}
}

func TestDirectoriesThatWillNotDoAreFoundAtTheStart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		dir string
		err error
	}{
		{filepath.Join(file, "..", "gone"), unix.ENOENT},
		{file, unix.ENOTDIR},
	} {
		_, err := OpenStore(StoreConfig{Dir: tc.dir, Ended: func(Received) {}})
		if !errors.Is(err, tc.err) || !strings.Contains(err.Error(), tc.dir) {
			t.Errorf("%s: error %v, want %v", tc.dir, err, tc.err)
		}
	}
}

func BenchmarkWrite(b *testing.B) {
	s, err := OpenStore(StoreConfig{Dir: b.TempDir(), MaxSize: 64 << 20, Prepare: 64 << 20, Ended: func(Received) {}})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	in, err := s.begin(peer, 1)
	if err != nil {
		b.Fatal(err)
	}
	src := make([]byte, 64*2048)
	b.SetBytes(1460)
	b.ReportAllocs()
	const n = 64 << 20 / 1460
	for i := 0; b.Loop(); i++ {
		o := i % 64 * 2048
		if _, err := in.WriteAt(src[o:o+1460], int64(i%n)*1460); err != nil {
			b.Fatal(err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/netns/netnstest"
)

func testBook(t testing.TB, hpus int, cfg Log) (*logBook, *syncBuffer) {
	t.Helper()
	var out syncBuffer
	b := newLogBook("ctx", hpus, cfg)
	if cfg.Dir != "" {
		b.keep(cfg.Dir, "ctx", slog.New(slog.NewTextHandler(&out, nil)))
	}
	t.Cleanup(b.close)
	return b, &out
}

// A syncBuffer may be read while somebody writes.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func history(t *testing.T, b *logBook, hpu int) (lines []control.LogLine) {
	t.Helper()
	if err := b.follow(t.Context(), hpu, false, func(l control.LogLine) error { lines = append(lines, l); return nil }); err != nil {
		t.Fatal(err)
	}
	return lines
}

func texts(lines []control.LogLine) string {
	var s []string
	for _, l := range lines {
		s = append(s, fmt.Sprintf("%d.%d-%d:%s", l.HPU, l.Seq, l.Lost, l.Text))
	}
	return strings.Join(s, " ")
}

func TestLogKeepsTheLastLines(t *testing.T) {
	b, _ := testBook(t, 3, Log{Lines: 2, Rate: 1})
	if got := history(t, b, -1); len(got) != 0 {
		t.Errorf("a new log has %s", texts(got))
	}
	now := clock.Monotonic()
	for i := range 4 {
		b.Log(now+int64(i)*1e9, 1, fmt.Append(nil, "b", i, "\n"))
		b.Log(now+int64(i)*1e9+1, 2, fmt.Append(nil, "c", i))
	}
	b.Log(now, 3, []byte("an HPU that is not there"))
	for hpu, want := range map[int]string{
		-1: "1.3-0:b2 2.3-0:c2 1.4-0:b3 2.4-0:c3",
		0:  "",
		1:  "1.3-0:b2 1.4-0:b3",
	} {
		if got := texts(history(t, b, hpu)); got != want {
			t.Errorf("HPU %d: %s, want %s", hpu, got, want)
		}
	}
	if at := history(t, b, 1)[0].Time; at.Before(time.Now().Add(-time.Minute)) || at.After(time.Now().Add(time.Minute)) {
		t.Errorf("printed now, says %v", at)
	}
	if one, again := history(t, b, -1), history(t, b, -1); !reflect.DeepEqual(one, again) {
		t.Errorf("read again, %v is %v", one, again)
	}
	if err := b.follow(t.Context(), 3, false, nil); err == nil || !strings.Contains(err.Error(), "HPU 3: want 0 to 2") {
		t.Errorf("HPU 3: error %v", err)
	}
}

func TestLogCopiesWhatItIsGiven(t *testing.T) {
	b, _ := testBook(t, 1, Log{})
	text := []byte("one")
	b.Log(0, 0, text)
	copy(text, "two")
	if got := texts(history(t, b, 0)); got != "0.1-0:one" {
		t.Error(got)
	}
}

// More than the rate is counted, and the next line says how many.
func TestLogAboveItsRate(t *testing.T) {
	b, _ := testBook(t, 1, Log{Lines: 100, Rate: 10})
	for range 14 { // a second's lines may come at once
		b.Log(0, 0, []byte("x"))
	}
	b.Log(99e6, 0, []byte("still too soon"))
	b.Log(100e6, 0, []byte("next"))
	lines := history(t, b, 0)
	if len(lines) != 11 || lines[9].Seq != 10 {
		t.Fatalf("%s", texts(lines))
	}
	if l := lines[10]; l.Text != "next" || l.Seq != 16 || l.Lost != 5 {
		t.Errorf("%+v", l)
	}
	// At the rate, for ever.
	for i := range int64(50) {
		b.Log(2e9+i*100e6, 0, []byte("y"))
	}
	if lines = history(t, b, 0); len(lines) != 61 || lines[60].Seq != 66 || lines[60].Lost != 0 {
		t.Errorf("%d lines: %s", len(lines), texts(lines))
	}
}

// The ring of texts wraps as that of lines does, at any length of the lines.
func TestLogTextsStayWhole(t *testing.T) {
	b, _ := testBook(t, 1, Log{Lines: 40, Rate: 1})
	seed := uint32(1)
	want := map[uint64]string{}
	for i := range 3000 {
		seed = seed*1664525 + 1013904223
		text := strings.Repeat(string(rune('a'+i%26)), int(seed>>16)%(maxLogText+1))
		b.Log(int64(i)*1e9, 0, []byte(text))
		want[uint64(i+1)] = text
		lines := history(t, b, 0)
		if n := len(lines); n == 0 || lines[n-1].Seq != uint64(i+1) || n > 40 {
			t.Fatalf("after line %d: %d lines", i+1, n)
		}
		for k, l := range lines {
			if l.Text != want[l.Seq] || l.Lost != 0 || k > 0 && l.Seq != lines[k-1].Seq+1 {
				t.Fatalf("line %d has %d bytes, %d lost, want %d bytes", l.Seq, len(l.Text), l.Lost, len(want[l.Seq]))
			}
		}
	}
}

func TestLogTextIsHarmless(t *testing.T) {
	long := strings.Repeat("x", maxLogText)
	for _, tt := range []struct{ in, want string }{
		{"plain\ttext", "plain\ttext"},
		{"line\r\n", "line"},
		{"two\nlines", `two\nlines`},
		{"\x1b[2Jgone", `\x1b[2Jgone`},
		{"\x9b2J", `\x9b2J`},
		{"\u009b2J", `\xc22J`},
		{"right\u202eleft", `right\u202eleft`},
		{"größe 文", "größe 文"},
		{"\xff\ufffd", `\xff` + `\ufffd`},
		{"", ""},
		{long, long},
		{long + "y", long + "..."},
		{long[1:] + "ö", long[1:] + "..."},
	} {
		b, _ := testBook(t, 1, Log{})
		b.Log(0, 0, []byte(tt.in))
		if got := history(t, b, 0)[0].Text; got != tt.want {
			t.Errorf("%q is shown as %q, want %q", tt.in, got, tt.want)
		}
	}
}

// A follower that reads loses nothing, on all HPUs, and gets the lines of each in
// their order. HPUs print as fast as they can, and keep to the rate in a time of
// their own; they are never more than the second ahead that a ring has room for.
func TestFollowersLoseNothingAtTheRate(t *testing.T) {
	const hpus, n, rate = 2, 30000, 1000
	b, _ := testBook(t, hpus, Log{Rate: rate, Dir: t.TempDir()})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var got [3][hpus]atomic.Uint64
	var wg sync.WaitGroup
	done := errors.New("done")
	for f := range got {
		wg.Go(func() {
			left := hpus * n
			err := b.follow(ctx, -1, true, func(l control.LogLine) error {
				if was := got[f][l.HPU].Swap(l.Seq); l.Seq != was+1 || l.Lost != 0 || l.Text != fmt.Sprint(l.HPU, " ", l.Seq) {
					return fmt.Errorf("after %d: %+v", was, l)
				}
				if left--; left == 0 {
					return done
				}
				return nil
			})
			if err != done {
				t.Errorf("follower %d: %v", f, err)
				cancel()
			}
		})
	}
	for hpu := range hpus {
		wg.Go(func() {
			for i := range uint64(n) {
				for f := range got {
					for i > got[f][hpu].Load()+rate && ctx.Err() == nil {
						runtime.Gosched()
					}
				}
				b.Log(int64(i)*1e9/rate, hpu, fmt.Append(nil, hpu, " ", i+1))
			}
		})
	}
	wg.Wait()
}

func TestSlowFollowersAreToldWhatTheyLost(t *testing.T) {
	b, _ := testBook(t, 1, Log{Lines: 10, Rate: 5})
	var got []control.LogLine
	print := func(from, to int) {
		for i := from; i < to; i++ {
			b.Log(int64(i)*1e9, 0, fmt.Append(nil, i+1))
		}
	}
	print(0, 1)
	stop := errors.New("enough")
	err := b.follow(t.Context(), 0, true, func(l control.LogLine) error {
		if got = append(got, l); len(got) == 1 {
			print(1, 31) // while it is busy; the ring has room for 10
		}
		if l.Seq == 31 {
			return stop
		}
		return nil
	})
	if err != stop || len(got) != 11 || got[1].Seq != 22 || got[1].Lost != 20 || got[2].Lost != 0 {
		t.Errorf("error %v, lines %s", err, texts(got))
	}
}

func TestFollowEnds(t *testing.T) {
	b, _ := testBook(t, 2, Log{})
	b.Log(0, 1, []byte("last"))
	ctx, cancel := context.WithCancel(t.Context())
	if err := b.follow(ctx, -1, true, func(control.LogLine) error { cancel(); return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	var n int
	ends := make(chan error)
	seen := make(chan bool, 10)
	go func() {
		ends <- b.follow(t.Context(), -1, true, func(control.LogLine) error { n++; seen <- true; return nil })
	}()
	<-seen
	b.Log(1, 0, []byte("more"))
	<-seen
	b.Log(2, 0, []byte("and the last"))
	b.close()
	if err := <-ends; err != nil || n != 3 {
		t.Errorf("closed: %v after %d lines", err, n)
	}
	if got := history(t, b, 0); len(got) != 2 {
		t.Errorf("afterwards: %s", texts(got))
	}
}

// It is for handlers: no memory is taken, whoever reads.
func TestLogTakesNoMemory(t *testing.T) {
	b, _ := testBook(t, 1, Log{})
	text := []byte("a line as long as lines are, with some numbers: 12345")
	b.Log(0, 0, text)
	now := int64(0)
	if n := testing.AllocsPerRun(1000, func() { now += 1e6; b.Log(now, 0, text) }); n != 0 {
		t.Errorf("%v allocations a line", n)
	}
}

func TestLogFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	b, _ := testBook(t, 2, Log{Dir: dir, Rate: 2, Lines: 4})
	for range 3 { // one too many
		b.Log(clock.Monotonic(), 1, []byte("hello\x1b"))
	}
	b.Log(clock.Monotonic()+2e9, 1, []byte("again"))
	b.close()
	got, err := os.ReadFile(filepath.Join(dir, "ctx.log"))
	if err != nil {
		t.Fatal(err)
	}
	stamp := `\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z hpu=1 `
	if !regexp.MustCompile(`^` + stamp + `hello\\x1b\n` + stamp + `hello\\x1b\n` + stamp + `\(1 lost\)\n` + stamp + `again\n$`).Match(got) {
		t.Errorf("the file has\n%s", got)
	}
	// Another context of the name goes on with it.
	b, _ = testBook(t, 1, Log{Dir: dir})
	b.Log(0, 0, []byte("next"))
	b.close()
	if more, _ := os.ReadFile(filepath.Join(dir, "ctx.log")); !bytes.HasPrefix(more, got) || !bytes.HasSuffix(more, []byte(" hpu=0 next\n")) {
		t.Errorf("the file has\n%s", more)
	}
}

func TestLogFilesAreBounded(t *testing.T) {
	defer func(n int64) { maxLogFile = n }(maxLogFile)
	maxLogFile = 4 << 10
	dir := t.TempDir()
	b, _ := testBook(t, 1, Log{Dir: dir})
	text := bytes.Repeat([]byte("x"), 500)
	for i := range 40 {
		b.Log(0, 0, fmt.Append(nil, i, " ", string(text)))
		if i%5 == 4 {
			waitWritten(t, b, uint64(i+1))
		}
	}
	b.close()
	var all []byte
	for _, name := range []string{"ctx.log.1", "ctx.log"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || len(data) == 0 || len(data) > 4<<10 {
			t.Errorf("%s has %d bytes, error %v", name, len(data), err)
		}
		all = append(all, data...)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("%d files, want 2", len(entries))
	}
	// The end is there, without a gap.
	lines := bytes.Split(bytes.TrimSpace(all), []byte("\n"))
	for k, l := range lines {
		if want := fmt.Sprintf(" hpu=0 %d x", 40-len(lines)+k); !bytes.Contains(l, []byte(want)) {
			t.Errorf("line %d of %d is %.60s, want%s", k, len(lines), l, want)
		}
	}
}

// waitWritten waits until the file has all lines of HPU 0 up to number seq.
func waitWritten(t *testing.T, b *logBook, seq uint64) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		data, _ := os.ReadFile(b.file.path)
		old, _ := os.ReadFile(b.file.path + ".1")
		if bytes.Contains(append(old, data...), fmt.Appendf(nil, " hpu=0 %d ", seq-1)) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("line %d is not written: %s", seq, data)
		}
	}
}

// A full disk is one error, lines that no memory has any more are counted, no line is
// there by halves, and it goes on when there is room again.
func TestLogFileOnAFullDisk(t *testing.T) {
	netnstest.NeedRoot(t)
	defer func(d time.Duration) { logRetry = d }(logRetry)
	logRetry = 20 * time.Millisecond
	dir := t.TempDir()
	if err := unix.Mount("xspin-test", dir, "tmpfs", 0, "size=16k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	b, out := testBook(t, 1, Log{Dir: dir, Lines: 100, Rate: 50})
	text := strings.Repeat("x", 100)
	for i := range 300 { // 40 KiB into 16; memory has the last 100
		b.Log(int64(i)*1e9, 0, fmt.Append(nil, i, " ", text))
		if i%20 == 19 {
			waitTaken(t, b)
		}
	}
	for end := time.Now().Add(20 * time.Second); !strings.Contains(out.String(), "no space left"); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no error: %s", out)
		}
	}
	waitTaken(t, b)
	if n := strings.Count(out.String(), "level=ERROR"); n != 1 {
		t.Errorf("%d errors: %s", n, out)
	}
	if err := unix.Mount("xspin-test", dir, "tmpfs", unix.MS_REMOUNT, "size=1m"); err != nil {
		t.Fatal(err)
	}
	waitWritten(t, b, 300)
	b.close()
	data, err := os.ReadFile(filepath.Join(dir, "ctx.log"))
	if err != nil {
		t.Fatal(err)
	}
	next, gaps := 0, 0
	for l := range strings.Lines(string(data)) {
		_, l, _ = strings.Cut(l, " hpu=0 ")
		var n int
		if _, err := fmt.Sscanf(l, "(%d lost)", &n); err == nil {
			next, gaps = next+n, gaps+1
			continue
		}
		if l != fmt.Sprintf("%d %s\n", next, text) {
			t.Fatalf("line %.80q, want number %d", l, next)
		}
		next++
	}
	if next != 300 || gaps != 1 {
		t.Errorf("lines up to %d, %d gaps, want up to 300 with 1 gap", next, gaps)
	}
	if !strings.Contains(out.String(), "can be written again") {
		t.Errorf("the daemon's log: %s", out)
	}
}

// waitTaken waits until the writer has looked at all lines, or waits for the disk.
func waitTaken(t *testing.T, b *logBook) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); b.wake.Load() == nil; time.Sleep(time.Millisecond) {
		if info, err := os.Stat(b.file.path); err == nil && info.Size() > 12<<10 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("nobody writes")
		}
	}
}

func TestLogFileThatCannotBe(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/dev/null", filepath.Join(dir, "ctx.log")); err != nil {
		t.Fatal(err)
	}
	b, out := testBook(t, 1, Log{Dir: dir})
	b.Log(0, 0, []byte("x"))
	if got := texts(history(t, b, 0)); got != "0.1-0:x" {
		t.Error(got)
	}
	b.close()
	if s := out.String(); strings.Count(s, "cannot be written") != 1 || !strings.Contains(s, "ctx.log") || !strings.Contains(s, "lines=1") {
		t.Errorf("the daemon's log: %s", s)
	}
}

func BenchmarkLog(b *testing.B) {
	for name, rate := range map[string]int{"kept": 1e9, "above the rate": 1} {
		b.Run(name, func(b *testing.B) {
			book, _ := testBook(b, 1, Log{Lines: 1024, Rate: rate})
			book.hpus[0].room = 1024
			text := []byte("a line as long as lines are, with some numbers: 12345")
			b.ReportAllocs()
			now := int64(0)
			for b.Loop() {
				now += 1000
				book.Log(now, 0, text)
			}
		})
	}
}

// A reader holds a batch, however much there is, and has the lines of all HPUs in order.
func TestLogReadersHoldABatch(t *testing.T) {
	const hpus, each = 4, 3000
	b := newLogBook("test", hpus, Log{Lines: each, Rate: each})
	for i := range each {
		for hpu := range hpus {
			if hpu > 0 && i%7 == hpu { // they do not print alike
				continue
			}
			b.Log(int64(i*hpus+hpu)*1000+1, hpu, fmt.Appendf(nil, "%d", i*hpus+hpu))
		}
	}
	r := b.reader(-1)
	n, last, seq := 0, -1, [hpus]uint64{}
	for lines := r.lines(); len(lines) > 0; lines = r.lines() {
		if len(lines) > logBatch || cap(r.found) > 2*logBatch {
			t.Fatalf("%d lines at a time, and room for %d", len(lines), cap(r.found))
		}
		for _, l := range lines {
			at, err := strconv.Atoi(l.Text)
			if err != nil || at <= last || at%hpus != l.HPU || l.Seq != seq[l.HPU]+1 || l.Lost != 0 {
				t.Fatalf("%+v after %d", l, last)
			}
			last, seq[l.HPU] = at, l.Seq
			n++
		}
	}
	want := 0
	for i := range b.hpus {
		want += b.hpus[i].n
	}
	if n != want {
		t.Errorf("%d lines of %d", n, want)
	}
}

// Without follow a reader ends, though each line that it gets has another one printed.
func TestLogReadersEnd(t *testing.T) {
	b := newLogBook("test", 2, Log{Lines: 500, Rate: 100_000})
	now := int64(0)
	say := func(hpu int) {
		now += int64(time.Millisecond)
		b.Log(now, hpu, []byte("x"))
	}
	for i := range 800 {
		say(i % 2)
	}
	n := 0
	err := b.follow(t.Context(), -1, false, func(control.LogLine) error {
		say(n % 2)
		if n++; n > 10_000 {
			return errors.New("it does not end")
		}
		return nil
	})
	if err != nil || n != 800 {
		t.Errorf("%d lines of 800: %v", n, err)
	}
}

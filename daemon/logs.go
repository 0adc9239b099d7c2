// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/internal/clock"
)

// What a log keeps.
const (
	defaultLogLines = 1024
	defaultLogRate  = 10_000
	maxLogText      = 1 << 10 // bytes of a line
	meanLogText     = 128     // that a ring has room for, times its lines
	logBatch        = 256     // lines that a reader copies while it keeps the HPU out
	logPause        = 10 * time.Millisecond
)

// A logBook keeps what the handlers of a context have printed. Handlers never wait for
// it: they write into a ring for each HPU, and readers come for the lines. A ring holds
// what an HPU may print in two seconds, so a reader that looks in once a second misses
// nothing as long as the HPU keeps to the rate. What is printed above the rate, and
// what a slow reader was too late for, shows as a gap in the numbers of the lines.
type logBook struct {
	hpus  []logRing
	lines int // that a reader sees of what was before it came

	offset atomic.Int64 // from the monotonic clock to the wall's, see wall

	// wake is there while a reader sleeps, and closed by whoever has a line for it.
	wake atomic.Pointer[chan struct{}]

	closed chan struct{}
	once   sync.Once
	file   *logFile // nil without
}

// newLogBook returns the log of a context.
func newLogBook(name string, hpus int, cfg Log) *logBook {
	if cfg.Lines <= 0 {
		cfg.Lines = defaultLogLines
	}
	if cfg.Rate <= 0 {
		cfg.Rate = defaultLogRate
	}
	b := &logBook{hpus: make([]logRing, hpus), lines: cfg.Lines, closed: make(chan struct{})}
	for i := range b.hpus {
		b.hpus[i].room = max(cfg.Lines, 2*cfg.Rate)
		b.hpus[i].gap = max(1, int64(time.Second)/int64(cfg.Rate))
	}
	return b
}

// keep has the book written to a file in dir as well, with all that is in it; what goes
// wrong with that is told to logger, and tried again. To be called once, before close.
func (b *logBook) keep(dir, name string, logger *slog.Logger) {
	b.file = newLogFile(b, dir, name, logger)
}

// Log is a hpu.LogSink.
func (b *logBook) Log(now int64, hpu int, text []byte) {
	if hpu < 0 || hpu >= len(b.hpus) || !b.hpus[hpu].put(now, b.wall(now), text) {
		return
	}
	b.ring()
}

// wall returns the time of a line, which stays what it was, whatever the clock does later.
// Between two of its steps, lines are as far apart as they were.
func (b *logBook) wall(now int64) int64 {
	was, is := b.offset.Load(), time.Now().UnixNano()-clock.Monotonic()
	if d := is - was; d > int64(time.Millisecond) || d < -int64(time.Millisecond) {
		b.offset.CompareAndSwap(was, is)
		was = is
	}
	return now + was
}

// ring wakes the readers that sleep.
func (b *logBook) ring() {
	if b.wake.Load() != nil {
		if ch := b.wake.Swap(nil); ch != nil {
			close(*ch)
		}
	}
}

// sleeper returns what is closed when there is a line more.
func (b *logBook) sleeper() <-chan struct{} {
	for {
		if ch := b.wake.Load(); ch != nil {
			return *ch
		}
		if ch := make(chan struct{}); b.wake.CompareAndSwap(nil, &ch) {
			return ch
		}
	}
}

// close ends all readers when they have read what there is.
func (b *logBook) close() {
	b.once.Do(func() { close(b.closed) })
	if b.file != nil {
		<-b.file.done
	}
}

// follow calls f for the last lines, of one HPU if hpu >= 0, and with follow for those
// that come, until ctx ends, f fails, or the context is gone and all is read.
func (b *logBook) follow(ctx context.Context, hpu int, follow bool, f func(control.LogLine) error) error {
	if hpu >= len(b.hpus) {
		return failf(errInvalid, "HPU %d: want 0 to %d", hpu, len(b.hpus)-1)
	}
	r := b.reader(hpu)
	if !follow {
		r.limit()
	}
	for {
		last := !follow || r.gone()
		for lines := r.lines(); len(lines) > 0; lines = r.lines() {
			for _, l := range lines {
				if err := ctx.Err(); err != nil {
					return err
				}
				if err := f(l); err != nil {
					return err
				}
			}
		}
		if last {
			return nil
		}
		if err := r.wait(ctx); err != nil {
			return err
		}
	}
}

// A logReader reads a book from line to line. It is not safe for concurrent use.
type logReader struct {
	b     *logBook
	hpu   int // only of this one; -1: of all
	next  []uint64
	until []uint64 // the last line of each HPU that is wanted; nil: all that come
	batch []logEntry
	text  []byte
	found []logFound
	out   []control.LogLine
}

// A logFound is a line with the time that says its place among those of other HPUs.
type logFound struct {
	mono int64
	line control.LogLine
}

// reader returns one that begins with the last lines.
func (b *logBook) reader(hpu int) *logReader {
	return &logReader{b: b, hpu: hpu, next: make([]uint64, len(b.hpus))}
}

func (r *logReader) gone() bool {
	select {
	case <-r.b.closed:
		return true
	default:
		return false
	}
}

// limit has the reader end with what there is now.
func (r *logReader) limit() {
	r.until = make([]uint64, len(r.b.hpus))
	for i := range r.until {
		r.until[i] = r.b.hpus[i].newest()
	}
}

// lines returns what is new, oldest first, good until the next call: a part of it, if it is
// much. None: there is nothing.
func (r *logReader) lines() []control.LogLine {
	r.found = r.found[:0]
	most := logBatch
	if r.hpu < 0 {
		most = max(logBatch/len(r.b.hpus), 16)
	}
	horizon := int64(math.MaxInt64) // lines after it may have others before them
	for i := range r.b.hpus {
		if r.hpu >= 0 && i != r.hpu {
			continue
		}
		ring := &r.b.hpus[i]
		if r.next[i] == 0 {
			// What lies before the last lines is history, not a loss.
			r.next[i] = ring.begin(r.b.lines)
		}
		r.batch, r.text = ring.since(r.next[i], most, r.batch[:0], r.text[:0])
		next := r.next[i]
		for _, e := range r.batch {
			if r.until != nil && e.seq > r.until[i] {
				break
			}
			text := printable(r.text[e.at : e.at+uint64(e.size)])
			if e.cut {
				text += "..."
			}
			r.found = append(r.found, logFound{e.time, control.LogLine{
				Seq: e.seq, Time: time.Unix(0, e.wall), HPU: i, Text: text, Lost: e.seq - next,
			}})
			next = e.seq + 1
		}
		if n := len(r.batch); n == most && (r.until == nil || r.batch[n-1].seq < r.until[i]) {
			horizon = min(horizon, r.batch[n-1].time)
		}
	}
	slices.SortStableFunc(r.found, func(a, b logFound) int { return cmp.Compare(a.mono, b.mono) })
	r.out = r.out[:0]
	for i := range r.found {
		if r.found[i].mono > horizon {
			break
		}
		l := r.found[i].line
		r.out = append(r.out, l)
		r.next[l.HPU] = l.Seq + 1
	}
	return r.out
}

// again has the next lines begin with those from i on once more.
func (r *logReader) again(i int) {
	for _, l := range slices.Backward(r.out[i:]) {
		r.next[l.HPU] = l.Seq - l.Lost
	}
}

// wait returns when there may be lines more, or the book is closed.
func (r *logReader) wait(ctx context.Context) error {
	ch := r.b.sleeper()
	if r.pending() {
		return ctx.Err()
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-r.b.closed:
		return nil
	case <-ch:
	}
	// Whoever prints much need not wake us for each line.
	return r.sleep(ctx, logPause)
}

func (r *logReader) pending() bool {
	for i := range r.b.hpus {
		if (r.hpu < 0 || r.hpu == i) && r.b.hpus[i].newest() >= max(r.next[i], 1) {
			return true
		}
	}
	return r.gone()
}

func (r *logReader) sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-r.b.closed:
	case <-t.C:
	}
	return nil
}

// A logRing has the lines of an HPU. Text lies in a ring of bytes of its own, in one
// piece each.
type logRing struct {
	mu      sync.Mutex
	room    int   // lines
	gap     int64 // ns from one line to the next, at the rate
	due     int64 // when the next line would come if all had kept to the rate
	seq     uint64
	kept    uint64     // lines put, for good
	entries []logEntry // of kept-n .. kept-1, modulo room
	n       int
	text    []byte
	end     uint64 // of the text, modulo its length
}

type logEntry struct {
	seq  uint64
	time int64 // monotonic
	wall int64 // of the clock, when it was printed
	at   uint64
	size uint32
	cut  bool
}

// put keeps a line, and says whether it did: not above the rate.
func (l *logRing) put(now, wall int64, text []byte) bool {
	for len(text) > 0 && (text[len(text)-1] == '\n' || text[len(text)-1] == '\r') {
		text = text[:len(text)-1]
	}
	cut := len(text) > maxLogText
	if cut {
		n := maxLogText
		for n > maxLogText-utf8.UTFMax && !utf8.RuneStart(text[n]) {
			n--
		}
		text = text[:n]
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq++
	// All lines of a second may come at once.
	if l.due = max(l.due, now); l.due-now > int64(time.Second)-l.gap {
		return false
	}
	l.due += l.gap
	if l.entries == nil {
		l.entries = make([]logEntry, l.room)
		l.text = make([]byte, max(l.room*meanLogText, 4*maxLogText))
	}
	size := uint64(len(l.text))
	at := l.end
	if at%size+uint64(len(text)) > size {
		at += size - at%size
	}
	l.end = at + uint64(len(text))
	for l.n > 0 && (l.n == l.room || l.at(l.kept-uint64(l.n)).at+size < l.end) {
		l.n--
	}
	*l.at(l.kept) = logEntry{l.seq, now, wall, at, uint32(len(text)), cut}
	copy(l.text[at%size:], text)
	l.kept++
	l.n++
	return true
}

// newest returns the number of the newest line that is kept, 0 for none.
func (l *logRing) newest() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n == 0 {
		return 0
	}
	return l.at(l.kept - 1).seq
}

// begin returns the number of the first of the last n lines, 1 if there are none.
func (l *logRing) begin(n int) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n == 0 {
		return 1
	}
	return l.at(l.kept - uint64(min(n, l.n))).seq
}

func (l *logRing) at(i uint64) *logEntry { return &l.entries[i%uint64(l.room)] }

// since appends lines from number seq on, at most so many, and their texts, to where
// their places point.
func (l *logRing) since(seq uint64, most int, to []logEntry, text []byte) ([]logEntry, []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	size := uint64(len(l.text))
	first := l.kept - uint64(l.n)
	first += uint64(sort.Search(l.n, func(i int) bool { return l.at(first+uint64(i)).seq >= seq }))
	for i := first; i < min(l.kept, first+uint64(most)); i++ {
		e := *l.at(i)
		at := e.at % size
		e.at = uint64(len(text))
		text = append(text, l.text[at:at+uint64(e.size)]...)
		to = append(to, e)
	}
	return to, text
}

// printable returns a text that does nothing to a terminal: control characters and
// what is no UTF-8 as Go writes them in strings.
func printable(text []byte) string {
	ok := true
	for _, c := range text {
		if c < ' ' && c != '\t' || c > '~' {
			ok = false
			break
		}
	}
	if ok {
		return string(text)
	}
	var b strings.Builder
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		switch {
		case r == '\t', r != utf8.RuneError && unicode.IsPrint(r):
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == utf8.RuneError && n <= 1 || r < 0x100:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
		text = text[n:]
	}
	return b.String()
}

// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// A connPeer receives messages on a socket of its own, as simply as can be: a
// second reading of docs/slmp.md.
type connPeer struct {
	addr netip.AddrPort
	sock *net.UDPConn
	deaf atomic.Bool // takes nothing

	mu       sync.Mutex
	plain    bool    // answers as FPsPIN's receivers do
	loss     float64 // of segments, and of acknowledgements
	rng      *rand.Rand
	messages map[peerKey]*peerMessage
	got      map[uint32][]byte // complete messages by id
	again    map[uint32]bool   // ids that were complete, and began another time
	longest  int               // payload
	segments int
}

type peerKey struct {
	from netip.AddrPort
	id   uint32
}

type peerMessage struct {
	data []byte
	have map[uint32]int // offset: length
	end  uint32         // contiguous
	size uint32         // of the first segment
	all  int            // -1 until EOM has come
	eom  uint32         // its offset
}

func newConnPeer(t testing.TB, address string) *connPeer {
	t.Helper()
	sock, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(address)))
	if err != nil {
		t.Fatal(err)
	}
	_ = testenv.ReadBuffer(sock, 4<<20)
	p := &connPeer{
		sock: sock, addr: sock.LocalAddr().(*net.UDPAddr).AddrPort(), rng: rand.New(rand.NewPCG(7, 7)),
		messages: map[peerKey]*peerMessage{}, got: map[uint32][]byte{}, again: map[uint32]bool{},
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.serve()
	}()
	t.Cleanup(func() {
		sock.Close()
		<-done
	})
	return p
}

func (p *connPeer) serve() {
	in, out := make([]byte, 1<<16), make([]byte, 0, MaxAckLen)
	for {
		n, from, err := p.sock.ReadFromUDPAddrPort(in)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || p.deaf.Load() {
			continue
		}
		p.mu.Lock()
		if p.rng.Float64() >= p.loss {
			if a, ok := p.segment(from, in[:n]); ok && p.rng.Float64() >= p.loss {
				out = a.Append(out[:0])
				_, _ = p.sock.WriteToUDPAddrPort(out, from)
			}
		}
		p.mu.Unlock()
	}
}

// segment takes one, and returns its acknowledgement if there is to be one.
func (p *connPeer) segment(from netip.AddrPort, b []byte) (Ack, bool) {
	h, err := ParseHeader(b)
	if err != nil || h.Flags&ACK != 0 {
		return Ack{}, false
	}
	b = b[HeaderLen:]
	p.longest = max(p.longest, len(b))
	p.segments++
	key := peerKey{from, h.ID}
	m := p.messages[key]
	if m == nil {
		p.again[h.ID] = p.got[h.ID] != nil
		m = &peerMessage{have: map[uint32]int{}, all: -1}
		p.messages[key] = m
	}
	if _, dup := m.have[h.Offset]; !dup {
		if need := int(h.Offset) + len(b); need > len(m.data) {
			m.data = append(m.data, make([]byte, need-len(m.data))...)
		}
		copy(m.data[h.Offset:], b)
		m.have[h.Offset] = len(b)
		if h.Offset == 0 {
			m.size = uint32(len(b))
		}
		for n, ok := m.have[m.end]; ok && n > 0; n, ok = m.have[m.end] {
			m.end += uint32(n)
		}
	}
	if h.Flags&EOM != 0 {
		m.all, m.eom = int(h.Offset)+len(b), h.Offset
	}
	whole := m.all >= 0 && int(m.end) == m.all
	if whole && p.got[h.ID] == nil {
		p.got[h.ID] = append([]byte{}, m.data...)
	}
	if h.Flags&SYN == 0 {
		return Ack{}, false
	}
	isEOM := h.Flags&EOM != 0
	if p.plain || h.Flags&Cumulative == 0 {
		return Ack{ID: h.ID, Offset: h.Offset}, !isEOM || whole
	}
	a := Ack{ID: h.ID, Offset: h.Offset, Cumulative: true, Wait: isEOM && !whole, End: m.end}
	for i := range 64 * MaxWords {
		if _, ok := m.have[m.end+uint32(i+1)*m.size]; ok && m.size > 0 {
			for len(a.Bitmap) <= i/64 {
				a.Bitmap = append(a.Bitmap, 0)
			}
			a.Bitmap[i/64] |= 1 << (i % 64)
		}
	}
	return a, true
}

func (p *connPeer) answer(plain bool) {
	p.mu.Lock()
	p.plain = plain
	p.mu.Unlock()
}

func (p *connPeer) lose(part float64) {
	p.mu.Lock()
	p.loss = part
	p.mu.Unlock()
}

// restart forgets everything.
func (p *connPeer) restart() {
	p.mu.Lock()
	p.messages = map[peerKey]*peerMessage{}
	p.mu.Unlock()
}

// eventually waits for what is bound to happen.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// receive waits for what somebody is bound to send, or to close.
func receive[T any](t testing.TB, from <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-from:
	case <-time.After(testenv.Slowness() * 30 * time.Second):
		t.Fatal("nothing comes")
	}
	return v
}

// message waits for one that may still be on its way.
func (p *connPeer) message(t testing.TB, id uint32) []byte {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		b, again := p.got[id], p.again[id]
		p.mu.Unlock()
		if again {
			t.Fatalf("message %d came twice", id)
		}
		if b != nil {
			return b
		}
		if time.Now().After(end) {
			t.Fatalf("message %d did not come", id)
		}
	}
}

func (p *connPeer) seen() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.segments
}

func mustDial(t testing.TB, to netip.AddrPort, cfg Config) *Conn {
	t.Helper()
	c, err := Dial(t.Context(), to.String(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func noise(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)})
	_, _ = r.Read(b)
	return b
}

func tempFile(t testing.TB, data []byte) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	return f
}

const testPayload = 1408

// fast is for tests that run into timeouts.
func fast(c Config) Config {
	c.Payload, c.MinRTO, c.MaxRTO, c.Patience = testPayload, time.Millisecond, 20*time.Millisecond, -1
	return c
}

// sources are all the ways to say what is to be sent.
var sources = map[string]func(t *testing.T, c *Conn, data []byte) (Result, error){
	"file": func(t *testing.T, c *Conn, data []byte) (Result, error) {
		return c.Send(t.Context(), tempFile(t, data), Options{})
	},
	"stream": func(t *testing.T, c *Conn, data []byte) (Result, error) {
		return c.Send(t.Context(), io.MultiReader(bytes.NewReader(data)), Options{})
	},
	"stream in pieces": func(t *testing.T, c *Conn, data []byte) (Result, error) {
		return c.Send(t.Context(), iotest.HalfReader(iotest.DataErrReader(bytes.NewReader(data))), Options{})
	},
	"bytes": func(t *testing.T, c *Conn, data []byte) (Result, error) {
		return c.SendBytes(t.Context(), data, Options{})
	},
	"posted": func(_ *testing.T, c *Conn, data []byte) (Result, error) {
		done := make(chan error)
		if err := c.Post(data, func(err error) { done <- err }); err != nil {
			return Result{}, err
		}
		return Result{Bytes: uint64(len(data))}, <-done
	},
}

func TestConnEveryWayOfSendingGivesTheSameBytes(t *testing.T) {
	for _, plain := range []bool{false, true} {
		for _, host := range []string{"127.0.0.1:0", "[::1]:0"} {
			p := newConnPeer(t, host)
			p.answer(plain)
			for off := OffloadSegments; off <= OffloadNone; off++ {
				for _, mode := range []Mode{EverySegment, FirstLast, Unacknowledged} {
					// Nobody sends again in the latter two: no more than the
					// socket has room for.
					sizes := []int{0, 1, testPayload - 1, testPayload, testPayload + 1, 2 * testPayload, 64*testPayload + 77}
					if mode == EverySegment {
						sizes = append(sizes, 1<<20+3)
					}
					c := mustDial(t, p.addr, Config{Mode: mode, Offload: off, Payload: testPayload})
					for name, send := range sources {
						for _, n := range sizes {
							what := fmt.Sprintf("%s, %v, %v, %s of %d bytes", host, off, mode, name, n)
							data := noise(n)
							r, err := send(t, c, data)
							if err != nil {
								t.Fatalf("%s: %v", what, err)
							}
							if name == "posted" {
								r.ID = c.nextID - 1
							}
							if got := p.message(t, r.ID); !bytes.Equal(got, data) {
								t.Fatalf("%s: %d other bytes came", what, len(got))
							}
							if r.Bytes != uint64(n) || name != "posted" && r.Segments != uint64(max(1, (n+testPayload-1)/testPayload)) {
								t.Errorf("%s: result %+v", what, r)
							}
						}
					}
					if st := c.Stats(); st.Offload != off {
						t.Errorf("%s: %v was asked for, %v used", host, off, st.Offload)
					}
					c.Close()
				}
			}
		}
	}
}

func TestConnSegmentsTravelTogether(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	data := noise(64 * testPayload)
	calls := map[Offload]uint64{}
	for off := OffloadSegments; off <= OffloadNone; off++ {
		c := mustDial(t, p.addr, Config{Mode: Unacknowledged, Offload: off, Payload: testPayload})
		if _, err := c.SendBytes(t.Context(), data, Options{}); err != nil {
			t.Fatal(err)
		}
		calls[off] = c.Stats().SystemCalls
	}
	if calls[OffloadSegments] > 2 || calls[OffloadCalls] > 2 {
		t.Errorf("system calls for 64 segments: %v", calls)
	}
	// What each datagram takes: runs of equal length, cut at their limits.
	s := &socket{offload: OffloadSegments, buf: make([]byte, txBytes)}
	for _, n := range []int{100, 100, 90, 100, 100, 200, 10, 10} {
		s.stage(n)
	}
	s.seal()
	if got, want := fmt.Sprint(s.holds[:s.made]), "[3 2 2 1]"; got != want {
		t.Errorf("datagrams of %s segments, want %s", got, want)
	}
	s.clear()
	for range txSegments {
		s.stage(74)
	}
	s.seal()
	if got, want := fmt.Sprint(s.holds[:s.made]), "[64 64]"; got != want {
		t.Errorf("datagrams of %s short segments, want %s", got, want)
	}
	s.clear()
	for range s.room(1472) {
		s.stage(1472)
	}
	s.seal()
	if got, want := fmt.Sprint(s.holds[:s.made]), "[44 44]"; got != want {
		t.Errorf("datagrams of %s long segments, want %s", got, want)
	}
	s.offload, s.out = OffloadCalls, 44
	s.seal()
	if s.made != 44 || s.iovs[0].Base != &s.buf[44*1472] {
		t.Errorf("after a fall back %d datagrams are left of 44", s.made)
	}
}

func TestConnAKernelWithoutSegmentationGetsDatagrams(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{Payload: testPayload})
	// UDP_SEGMENT wants checksums.
	if err := unix.SetsockoptInt(c.sock.fd, unix.SOL_SOCKET, unix.SO_NO_CHECK, 1); err != nil {
		t.Fatal(err)
	}
	data := noise(1 << 20)
	r, err := c.SendBytes(t.Context(), data, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(p.message(t, r.ID), data) {
		t.Error("other bytes came")
	}
	if st := c.Stats(); st.Offload != OffloadCalls {
		t.Errorf("%v is used, want sendmmsg", st.Offload)
	}
	for _, tc := range []struct {
		offload Offload
		errno   unix.Errno
		lacks   bool
	}{
		{OffloadSegments, unix.EIO, true},
		{OffloadSegments, unix.ENOPROTOOPT, true},
		{OffloadSegments, unix.ENOSYS, true},
		{OffloadSegments, unix.EPERM, false},
		{OffloadCalls, unix.ENOSYS, true},
		{OffloadCalls, unix.EINVAL, false},
		{OffloadNone, unix.ENOSYS, false},
	} {
		s := &socket{offload: tc.offload}
		s.holds[0] = 2
		if got := s.lacks(tc.errno); got != tc.lacks {
			t.Errorf("%v, %v: %t, want %t", tc.offload, tc.errno, got, tc.lacks)
		}
	}
}

func TestConnWhatIsLostIsSentAgain(t *testing.T) {
	for _, plain := range []bool{false, true} {
		for name, send := range sources {
			t.Run(fmt.Sprintf("plain=%t,%s", plain, name), func(t *testing.T) {
				p := newConnPeer(t, "127.0.0.1:0")
				p.answer(plain)
				p.lose(0.1)
				c := mustDial(t, p.addr, Config{Payload: testPayload, MinRTO: time.Millisecond, MaxRTO: 10 * time.Millisecond, Buffer: 1})
				data := noise(1<<20 + 1)
				r, err := send(t, c, data)
				if err != nil {
					t.Fatal(err)
				}
				if name == "posted" {
					r.ID = c.nextID - 1
				} else if r.Retransmitted == 0 {
					t.Error("nothing was sent again")
				}
				if !bytes.Equal(p.message(t, r.ID), data) {
					t.Error("other bytes came")
				}
			})
		}
	}
}

func TestConnManyAtATime(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{Payload: testPayload})
	data := noise(200_001)
	f := tempFile(t, data)
	if _, err := f.Seek(1, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	ids := make([]uint32, 40)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			var r Result
			var err error
			if i%2 == 0 {
				r, err = c.Send(t.Context(), f, Options{}) // all the same file
			} else {
				r, err = c.Send(t.Context(), io.MultiReader(bytes.NewReader(data[1:])), Options{})
			}
			if err != nil {
				t.Error(err)
			}
			ids[i] = r.ID
		})
	}
	wg.Wait()
	seen := map[uint32]bool{}
	for _, id := range ids {
		if seen[id] {
			t.Errorf("id %d was given twice", id)
		}
		seen[id] = true
		if !bytes.Equal(p.message(t, id), data[1:]) {
			t.Errorf("message %d: other bytes came", id)
		}
	}
	if at, err := f.Seek(0, io.SeekCurrent); at != 1 || err != nil {
		t.Errorf("the file's position moved to %d (%v)", at, err)
	}
}

func TestConnPostedMessages(t *testing.T) {
	const messages, outstanding = 20_000, 256
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{})
	msg := noise(64)
	var failed atomic.Int64
	left, ended := messages-outstanding, 0 // the loop's
	done := make(chan struct{})
	var again func(error)
	again = func(err error) {
		if err != nil {
			failed.Add(1)
		}
		if left > 0 {
			left--
			if err := c.Post(msg, again); err != nil {
				failed.Add(1)
			}
		}
		if ended++; ended == messages {
			close(done)
		}
	}
	start := make(chan struct{})
	first := true
	for range outstanding {
		// The count is the loop's: it waits until all are submitted.
		if err := c.Post(msg, func(err error) {
			if first {
				<-start
				first = false
			}
			again(err)
		}); err != nil {
			t.Fatal(err)
		}
	}
	close(start)
	receive(t, done)
	if n := failed.Load(); n > 0 {
		t.Errorf("%d messages failed", n)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.got) != messages {
		t.Errorf("%d messages came, want %d", len(p.got), messages)
	}
	for id, b := range p.got {
		if !bytes.Equal(b, msg) {
			t.Fatalf("message %d: other bytes came", id)
		}
	}
}

func TestConnContextEndsASend(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{Payload: testPayload})
	p.deaf.Store(true)
	never, stuck := io.Pipe()
	defer stuck.Close()
	for name, r := range map[string]io.Reader{
		"with segments unacknowledged": bytes.NewReader(noise(1 << 20)),
		"with a reader that is stuck":  never,
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("no more")
		go func() {
			time.Sleep(5 * time.Millisecond)
			cancel(why)
		}()
		if _, err := c.Send(ctx, r, Options{}); !errors.Is(err, why) {
			t.Errorf("%s: error %v, want the cause", name, err)
		}
		if _, err := c.Send(ctx, r, Options{}); !errors.Is(err, why) {
			t.Errorf("%s: error %v of a context that is over, want the cause", name, err)
		}
	}
	p.deaf.Store(false)
	r, err := c.SendBytes(t.Context(), []byte("next"), Options{})
	if err != nil || string(p.message(t, r.ID)) != "next" {
		t.Errorf("the next message: %v", err)
	}
	if st := c.Stats(); st.Open != 0 || len(c.spools) != 0 {
		t.Errorf("%d messages, %d streams left", st.Open, len(c.spools))
	}
}

type badReaderAt struct{ *bytes.Reader }

func (badReaderAt) ReadAt([]byte, int64) (int, error) { return 0, errors.New("bad sector") }

func TestConnErrorsOfTheReader(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{Payload: testPayload})
	broken := errors.New("broken")
	if _, err := c.Send(t.Context(), io.MultiReader(bytes.NewReader(noise(5000)), iotest.ErrReader(broken)), Options{}); !errors.Is(err, broken) {
		t.Errorf("error %v, want that of Read", err)
	}
	if _, err := c.Send(t.Context(), badReaderAt{bytes.NewReader(noise(5000))}, Options{}); err == nil || !strings.Contains(err.Error(), "bad sector") {
		t.Errorf("error %v, want that of ReadAt", err)
	}
	if _, err := c.Send(t.Context(), strings.NewReader(""), Options{}); err != nil {
		t.Errorf("an empty one: %v", err)
	}
	if _, err := c.Send(t.Context(), lazyReader{}, Options{}); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("error %v of a reader that gives nothing, want ErrNoProgress", err)
	}

	// A file that becomes shorter while it is sent.
	f := tempFile(t, noise(1<<20))
	p.deaf.Store(true)
	failed := make(chan error)
	before := c.Stats().Segments
	go func() {
		_, err := c.Send(t.Context(), f, Options{})
		failed <- err
	}()
	eventually(t, "a segment is sent", func() bool { return c.Stats().Segments > before })
	if err := f.Truncate(1); err != nil {
		t.Fatal(err)
	}
	p.deaf.Store(false)
	if err := receive(t, failed); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("error %v, want unexpected EOF", err)
	}
	// The connection is none the worse.
	if r, err := c.SendBytes(t.Context(), []byte("next"), Options{}); err != nil || string(p.message(t, r.ID)) != "next" {
		t.Errorf("the next message: %v", err)
	}
}

type lazyReader struct{}

func (lazyReader) Read([]byte) (int, error) { return 0, nil }

type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

// Nothing tells what has arrived, and still what is sent need not be kept.
func TestConnStreamsLongerThanTheBuffer(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	for _, mode := range []Mode{EverySegment, FirstLast, Unacknowledged} {
		// The peer may lose some, then FirstLast fails: what counts is how far
		// it comes.
		c := mustDial(t, p.addr, Config{Mode: mode, Buffer: 1, Gap: 2 * time.Microsecond})
		r, _ := c.Send(t.Context(), io.LimitReader(endless{}, 3*minBuffer), Options{Progress: func(Progress) {}})
		if r.Bytes != 3*minBuffer {
			t.Errorf("%v: %d bytes went, want %d", mode, r.Bytes, 3*minBuffer)
		}
	}
}

func TestConnTooLong(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{})
	f := tempFile(t, nil)
	if err := f.Truncate(MaxMessage + 1); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Send(t.Context(), f, Options{}); !errors.Is(err, ErrTooLong) || !strings.Contains(err.Error(), "4294967297 bytes") {
		t.Errorf("error %v, want ErrTooLong that names the length", err)
	}
	if n := p.seen(); n != 0 {
		t.Errorf("%d segments were sent", n)
	}
	s := &spool{buf: make([]byte, 1<<20), room: make(chan struct{}, 1)}
	s.fill(endless{}, nil, func() { s.free(s.filled.Load()) })
	if !errors.Is(s.err, ErrTooLong) || s.filled.Load() > MaxMessage {
		t.Errorf("a stream: error %v after %d bytes", s.err, s.filled.Load())
	}
}

// A file in /proc says that it is empty, and is not.
func TestConnFilesThatDoNotKnowTheirLength(t *testing.T) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		t.Skip(err)
	}
	defer f.Close()
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{Payload: testPayload})
	r, err := c.Send(t.Context(), f, Options{})
	if err != nil || r.Bytes == 0 {
		t.Errorf("%d bytes, error %v", r.Bytes, err)
	}
}

func TestConnNobodyListens(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	p.sock.Close()
	for _, off := range []Offload{OffloadSegments, OffloadCalls, OffloadNone} {
		c := mustDial(t, p.addr, Config{Payload: testPayload, Offload: off})
		_, err := c.SendBytes(t.Context(), noise(100_000), Options{})
		if !errors.Is(err, ErrRefused) || !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%v: error %v, want ErrRefused and ECONNREFUSED", off, err)
		}
		if err != nil && !strings.Contains(err.Error(), fmt.Sprintf("UDP port %d of 127.0.0.1", p.addr.Port())) {
			t.Errorf("error does not say where: %v", err)
		}
	}
}

// A receiver with handlers in eBPF leaves long frames to Linux, which says that nobody listens.
func TestConnNobodyListensToLongSegments(t *testing.T) {
	const headers = 52
	for _, tt := range []struct {
		host    string
		payload int
		long    bool
	}{
		{"127.0.0.1", pageFrame - headers, false},
		{"127.0.0.1", pageFrame - headers + 1, true},
		{"127.0.0.1", 8000, true},
		{"::1", 8000, false}, // which they do not take in any length
	} {
		p := newConnPeer(t, net.JoinHostPort(tt.host, "0"))
		p.sock.Close()
		c := mustDial(t, p.addr, Config{Payload: tt.payload})
		_, err := c.SendBytes(t.Context(), noise(100), Options{})
		if !errors.Is(err, ErrRefused) {
			t.Fatalf("%s, payload %d: error %v, want ErrRefused", tt.host, tt.payload, err)
		}
		way := fmt.Sprintf("their frames have %d bytes, and handlers in eBPF get those of up to some 3520 there. Send segments with a payload of at most 3468, or lower the MTU", tt.payload+headers)
		if text := err.Error(); !strings.Contains(text, "that a receiver runs there") || strings.Contains(text, way) != tt.long {
			t.Errorf("%s, payload %d: %v", tt.host, tt.payload, err)
		}
	}
}

// What the network says about a message that is over does not harm the next.
func TestConnAStaleRefusalHarmsNobody(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	p.sock.Close()
	c, err := dial(t.Context(), p.addr.String(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	var first, second error
	if err := c.Post([]byte("x"), func(err error) { first = err }); err != nil {
		t.Fatal(err)
	}
	c.intake()
	c.transmit(1) // loopback has refused it when this returns
	why := errors.New("no more")
	c.endAll(why)
	c.collect()
	if !errors.Is(first, why) {
		t.Fatalf("the first message: %v", first)
	}
	if err := c.Post([]byte("y"), func(err error) { second = err }); err != nil {
		t.Fatal(err)
	}
	c.intake()
	if c.receive(2) {
		t.Error("the first one's refusal ended the second")
	}
	c.collect()
	if second != nil {
		t.Fatalf("the second message: %v", second)
	}
	c.transmit(3)
	if !c.receive(4) {
		t.Error("the second one's refusal did not end it")
	}
	c.collect()
	if !errors.Is(second, ErrRefused) {
		t.Errorf("the second message: %v", second)
	}
	go c.run()
	c.Close()
}

// Errors that loopback does not make.
func TestConnErrorsOfTheSocket(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	for _, tc := range []struct {
		errno unix.Errno
		ends  bool
		says  string
	}{
		{unix.EACCES, true, "a route or security policy refuses it"},
		{unix.EIO, true, "UDP socket: input/output error"},
		{unix.ENETUNREACH, false, ""},
		{unix.EHOSTUNREACH, false, ""},
		{unix.EPERM, false, ""}, // a connection table has room again after a while
		{unix.EMSGSIZE, false, ""},
		{unix.EINVAL, false, ""},
	} {
		c, err := dial(t.Context(), p.addr.String(), Config{})
		if err != nil {
			t.Fatal(err)
		}
		var got error
		if err := c.Post([]byte("x"), func(err error) { got = err }); err != nil {
			t.Fatal(err)
		}
		c.intake()
		if ends := c.trouble(tc.errno); ends != tc.ends {
			t.Errorf("%v: ended messages %t, want %t", tc.errno, ends, tc.ends)
		}
		c.collect()
		if (got != nil) != tc.ends || got != nil && (!errors.Is(got, tc.errno) || !strings.Contains(got.Error(), tc.says)) {
			t.Errorf("%v: error %v, want %q", tc.errno, got, tc.says)
		}
		go c.run()
		c.Close()
	}
}

func TestConnSilence(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	p.deaf.Store(true)
	c := mustDial(t, p.addr, fast(Config{Retries: 3}))
	r, err := c.SendBytes(t.Context(), noise(100_000), Options{})
	var m *MessageError
	if !errors.Is(err, ErrSilent) || !errors.As(err, &m) || m.ID != r.ID {
		t.Errorf("error %v, want ErrSilent of message %d", err, r.ID)
	}
	if r.Bytes != 0 || r.Segments == 0 || r.Retransmitted < 3 {
		t.Errorf("result %+v", r)
	}
	if st := c.Stats(); st.Sleeps == 0 {
		t.Error("it did not sleep in between")
	}
}

func TestConnRestartedReceiver(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, fast(Config{Window: 16}))
	in, out := io.Pipe()
	go func() {
		_, _ = out.Write(noise(500_000))
		for end := time.Now().Add(20 * time.Second); p.seen() < 300 && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		p.restart()
		_, _ = out.Write(noise(500_000))
		out.Close()
	}()
	if _, err := c.Send(t.Context(), in, Options{}); !errors.Is(err, ErrRestarted) {
		t.Errorf("error %v, want ErrRestarted", err)
	}
	// Who writes into the pipe must not hang.
	in.Close()
}

func TestConnClose(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	p.deaf.Store(true)
	c := mustDial(t, p.addr, Config{Payload: testPayload})
	errs := make(chan error)
	go func() {
		_, err := c.SendBytes(t.Context(), noise(1<<20), Options{})
		errs <- err
	}()
	if err := c.Post([]byte("x"), func(err error) { go func() { errs <- err }() }); err != nil {
		t.Fatal(err)
	}
	eventually(t, "segments of both are sent", func() bool { return c.Stats().Segments >= 2 })
	c.Close()
	for range 2 {
		if err := receive(t, errs); !errors.Is(err, net.ErrClosed) {
			t.Errorf("error %v of a message that Close ended", err)
		}
	}
	c.Close()
	if _, err := c.SendBytes(t.Context(), nil, Options{}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("error %v of a closed connection", err)
	}
	if err := c.Post(nil, func(error) { t.Error("called") }); !errors.Is(err, net.ErrClosed) {
		t.Errorf("error %v of a closed connection", err)
	}
	if st := c.Stats(); st.Failed != 2 {
		t.Errorf("%d messages failed, want 2", st.Failed)
	}
}

func TestConnAnIdleConnectionSleeps(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{})
	if _, err := c.SendBytes(t.Context(), []byte("x"), Options{}); err != nil {
		t.Fatal(err)
	}
	// It sleeps once to begin with, and after each question. Answers to what
	// was sent twice may wake it too, but they come to an end.
	n := uint64(0)
	for range 20 {
		before := c.Stats().Sleeps
		time.Sleep(50 * time.Millisecond)
		if n = c.Stats().Sleeps - before; n <= 3 {
			return
		}
	}
	t.Errorf("woke %d times for nothing", n)
}

func TestConnProgress(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{Payload: testPayload, Gap: 200 * time.Microsecond})
	data := noise(1000 * testPayload)
	for name, r := range map[string]io.Reader{"known": bytes.NewReader(data), "stream": io.MultiReader(bytes.NewReader(data))} {
		var seen []Progress
		if _, err := c.Send(t.Context(), r, Options{Progress: func(p Progress) { seen = append(seen, p) }}); err != nil {
			t.Fatal(err)
		}
		last, between := Progress{}, 0
		for _, s := range seen {
			if s.Bytes > 0 && s.Bytes < uint64(len(data)) {
				between++
			}
			if s.Bytes < last.Bytes || s.Segments < last.Segments || s.Bytes > uint64(len(data)) {
				t.Errorf("%s: %+v after %+v", name, s, last)
			}
			last = s
		}
		if between == 0 || last.Bytes != uint64(len(data)) || last.Total != uint64(len(data)) || last.Segments != 1000 {
			t.Errorf("%s: told %d times before the end, and then %+v", name, between, last)
		}
	}
}

func TestConnPayload(t *testing.T) {
	p4, p6 := newConnPeer(t, "127.0.0.1:0"), newConnPeer(t, "[::1]:0")
	mtu := func(p *connPeer) int {
		c := mustDial(t, p.addr, Config{})
		_, mtu, err := c.sock.payload()
		if err != nil {
			t.Fatal(err)
		}
		return mtu
	}
	fit4, fit6 := min(mtu(p4)-28, maxDatagram)-HeaderLen, min(mtu(p6)-48, maxDatagram)-HeaderLen
	for _, tc := range []struct {
		peer           *connPeer
		payload, align int
		want           int
		says           string
	}{
		{p4, 0, 0, fit4, ""},
		{p6, 0, 0, fit6, ""},
		{p4, 0, 64, fit4 / 64 * 64, ""},
		{p4, 1462, 64, 1408, ""},
		{p4, 1462, 4, 1460, ""},
		{p4, fit4, 0, fit4, ""},
		{p4, fit4 + 1, 0, 0, fmt.Sprintf("leaves room for %d", fit4)},
		{p6, fit6 + 1, 0, 0, fmt.Sprintf("leaves room for %d", fit6)},
		{p4, 10, 64, 0, "no byte of a message is left"},
		{p4, 0, -1, 0, "align -1"},
	} {
		c, err := Dial(t.Context(), tc.peer.addr.String(), Config{Payload: tc.payload, Align: tc.align})
		if tc.says != "" {
			if err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("payload %d, align %d: error %v, want %q", tc.payload, tc.align, err, tc.says)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Stats().Payload; got != tc.want {
			t.Errorf("payload %d, align %d: %d, want %d", tc.payload, tc.align, got, tc.want)
		}
		r, err := c.SendBytes(t.Context(), noise(3*tc.want), Options{})
		if err != nil || len(tc.peer.message(t, r.ID)) != 3*tc.want {
			t.Errorf("payload %d, align %d: %v", tc.payload, tc.align, err)
		}
		c.Close()
	}
}

func TestConnAddresses(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1":          "10.0.0.1:9330",
		"10.0.0.1:1":        "10.0.0.1:1",
		"::1":               "[::1]:9330",
		"[::1]":             "[::1]:9330",
		"[::1]:2":           "[::1]:2",
		"fe80::1%eth0":      "[fe80::1%eth0]:9330",
		"nic.example":       "nic.example:9330",
		"nic.example:slmp":  "nic.example:slmp",
		"":                  "",
		":9330":             "",
		"[fe80::1%eth0]:77": "[fe80::1%eth0]:77",
	} {
		got, err := withPort(in)
		if got != want || (err != nil) != (want == "") {
			t.Errorf("%q: %q, %v, want %q", in, got, err, want)
		}
	}
	for _, bad := range []string{"127.0.0.1:port", "127.0.0.1:70000", "a b"} {
		if _, err := Dial(t.Context(), bad, Config{}); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("%q: error %v, want one that names it", bad, err)
		}
	}
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{Local: netip.MustParseAddrPort("127.0.0.2:0")})
	if a := c.LocalAddr(); a.Addr() != netip.MustParseAddr("127.0.0.2") || a.Port() == 0 {
		t.Errorf("sends from %v", a)
	}
	if a := c.RemoteAddr(); a != p.addr {
		t.Errorf("sends to %v, want %v", a, p.addr)
	}
	if _, err := c.SendBytes(t.Context(), []byte("x"), Options{}); err != nil {
		t.Error(err)
	}
}

// A later connection from the same port uses no ids that an earlier one may have used.
func TestFirstID(t *testing.T) {
	here, there := netip.MustParseAddrPort("10.0.0.1:1000"), netip.MustParseAddrPort("10.0.0.2:9330")
	now := time.Unix(1_700_000_000, 0)
	first := firstID(here, there, now)
	for _, tc := range []struct {
		name  string
		later time.Duration
	}{
		{"a second later", time.Second},
		{"a minute later", time.Minute},
		{"eight minutes later", 8 * time.Minute},
	} {
		second := firstID(here, there, now.Add(tc.later))
		// More messages than a connection can send.
		least := int64(tc.later / time.Microsecond * 3)
		if d := int64(int32(second - first)); d < least || d > 2*least {
			t.Errorf("%s: it begins at %d, after %d", tc.name, second, first)
		}
	}
	for name, id := range map[string]uint32{
		"from another port": firstID(netip.MustParseAddrPort("10.0.0.1:1001"), there, now),
		"to another peer":   firstID(here, netip.MustParseAddrPort("10.0.0.3:9330"), now),
	} {
		if id == first {
			t.Errorf("%s: it begins at %d, too", name, id)
		}
	}

	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{})
	began := c.nextID
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c = mustDial(t, p.addr, Config{Local: c.LocalAddr()})
	if d := int32(c.nextID - began); d <= 0 {
		t.Errorf("a connection begins at %d, one from the same port at %d", began, c.nextID)
	}
}

// Datagrams that are no acknowledgements change nothing, from whoever they are.
func TestConnRubbishFromThePeer(t *testing.T) {
	p := newConnPeer(t, "127.0.0.1:0")
	c := mustDial(t, p.addr, Config{Payload: testPayload})
	to := c.LocalAddr()
	other, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for i := range 500 {
		b := noise(i)
		_, _ = p.sock.WriteToUDPAddrPort(b, to)
		ack := (&Ack{ID: c.nextID, Cumulative: true, End: EndMax}).Append(nil)
		_, _ = other.WriteToUDPAddrPort(ack, to)
	}
	data := noise(1 << 20)
	r, err := c.SendBytes(t.Context(), data, Options{})
	if err != nil || !bytes.Equal(p.message(t, r.ID), data) {
		t.Errorf("error %v", err)
	}
	st := c.Stats()
	if n := st.Malformed + st.Stray + st.NeverSent; n < 400 {
		t.Errorf("%d datagrams counted as bad, want about 500 and late answers: %+v", n, st)
	}
}

// labPeer is a peer on the NIC's end of a lab, and the host's end's way to dial it.
func labPeer(t *testing.T) (lab *netns.Lab, p *connPeer, dialed func(Config) *Conn) {
	t.Helper()
	lab = netnstest.Temp(t, netns.LabConfig{})
	if err := lab.NIC.NS.Do(func() error {
		p = newConnPeer(t, netip.AddrPortFrom(lab.NIC.Addr.Addr(), Port).String())
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return lab, p, func(cfg Config) (c *Conn) {
		t.Helper()
		if err := lab.Host.NS.Do(func() error {
			c = mustDial(t, p.addr, cfg)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return c
	}
}

// run runs a command inside a namespace.
func run(t *testing.T, ns *netns.Namespace, args ...string) {
	t.Helper()
	cmd := ns.Command(t.Context(), args[0], args[1:]...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v: %s", args, err, out.String())
	}
}

func TestConnPathBecomesNarrower(t *testing.T) {
	lab, p, dial := labPeer(t)
	for off := OffloadSegments; off <= OffloadNone; off++ {
		run(t, lab.Host.NS, "ip", "link", "set", lab.Host.Device, "mtu", "1500")
		c := dial(Config{Align: 4, Offload: off})
		if got := c.Stats().Payload; got != 1460 {
			t.Fatalf("payload %d at an MTU of 1500, aligned to 4; want 1460", got)
		}
		in, out := io.Pipe()
		failed := make(chan error)
		go func() {
			_, err := c.Send(t.Context(), in, Options{})
			failed <- err
		}()
		_, _ = out.Write(noise(100_000))
		run(t, lab.Host.NS, "ip", "link", "set", lab.Host.Device, "mtu", "1400")
		go func() { _, _ = out.Write(noise(100_000)) }()
		if err := receive(t, failed); !errors.Is(err, ErrPathMTU) || !strings.Contains(err.Error(), "1460 bytes, 1360 fit now") {
			t.Errorf("%v: error %v, want ErrPathMTU with both lengths", off, err)
		}
		in.Close()
		data := noise(500_000)
		r, err := c.SendBytes(t.Context(), data, Options{})
		if err != nil || !bytes.Equal(p.message(t, r.ID), data) {
			t.Errorf("%v: the next message: %v", off, err)
		}
		if st := c.Stats(); st.Payload != 1360 || st.Offload != off {
			t.Errorf("%v: payload %d by %v, want 1360 by the same", off, st.Payload, st.Offload)
		}
	}
}

func TestConnWaitsForRoomInTheSocket(t *testing.T) {
	lab, p, dial := labPeer(t)
	run(t, lab.Host.NS, "tc", "qdisc", "add", "dev", lab.Host.Device, "root", "tbf", "rate", "100mbit", "burst", "16k", "limit", "10m")
	for _, mode := range []Mode{EverySegment, Unacknowledged} {
		c := dial(Config{Mode: mode})
		// Little enough for the queue to fill the socket, not the reverse.
		if err := unix.SetsockoptInt(c.sock.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 200_000); err != nil {
			t.Fatal(err)
		}
		data := noise(1 << 20)
		r, err := c.SendBytes(t.Context(), data, Options{})
		if err != nil {
			t.Fatalf("%v: %v", mode, err)
		}
		// In mode Unacknowledged nothing else slows it down: all that it has
		// counted as sent must come although it closes now.
		c.Close()
		if !bytes.Equal(p.message(t, r.ID), data) {
			t.Errorf("%v: other bytes came", mode)
		}
		if st := c.Stats(); st.Sleeps == 0 {
			t.Errorf("%v: it did not sleep", mode)
		}
	}
}

// A device that drops because its queue is full says so: what it dropped is given
// to it again.
func TestConnWaitsForRoomInTheDevice(t *testing.T) {
	lab, p, dial := labPeer(t)
	run(t, lab.Host.NS, "tc", "qdisc", "add", "dev", lab.Host.Device, "root", "tbf", "rate", "100mbit", "burst", "8k", "limit", "20k")
	for _, off := range []Offload{OffloadCalls, OffloadNone} {
		c := dial(Config{Mode: Unacknowledged, Offload: off})
		data := noise(1 << 20)
		r, err := c.SendBytes(t.Context(), data, Options{})
		if err != nil {
			t.Fatalf("%v: %v", off, err)
		}
		c.Close() // all is sent already
		if !bytes.Equal(p.message(t, r.ID), data) {
			t.Errorf("%v: other bytes came", off)
		}
	}
}

// A socket or a device that takes nothing, for as long as the test runs: Send returns when
// its context ends, or when the peer has been silent for Patience, and does not spin.
func TestConnThatCannotSend(t *testing.T) {
	for _, tt := range []struct {
		name   string
		trains bool // can be sent
		stop   func(t *testing.T, lab *netns.Lab, c *Conn)
	}{
		{"the other end of the link has a smaller MTU", true, func(t *testing.T, lab *netns.Lab, _ *Conn) {
			run(t, lab.NIC.NS, "ip", "link", "set", lab.NIC.Device, "mtu", "700") // frames are ENOBUFS; trains pass
		}},
		{"the device's queue never empties", false, func(t *testing.T, lab *netns.Lab, _ *Conn) {
			run(t, lab.Host.NS, "tc", "qdisc", "add", "dev", lab.Host.Device, "root", "tbf", "rate", "8bit", "burst", "1600", "limit", "1600")
		}},
		{"the socket's buffer never empties", false, func(t *testing.T, lab *netns.Lab, c *Conn) {
			run(t, lab.Host.NS, "tc", "qdisc", "add", "dev", lab.Host.Device, "root", "tbf", "rate", "8bit", "burst", "1600", "limit", "100m")
			if err := unix.SetsockoptInt(c.sock.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 50_000); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		for _, mode := range []Mode{EverySegment, FirstLast, Unacknowledged} {
			for _, off := range []Offload{OffloadSegments, OffloadNone} {
				if tt.trains && mode == Unacknowledged && off == OffloadSegments {
					continue
				}
				t.Run(fmt.Sprintf("%s, %v, %v", tt.name, mode, off), func(t *testing.T) {
					lab, _, dial := labPeer(t)
					c := dial(Config{Mode: mode, Offload: off, Window: 512, Retries: 3, Patience: 400 * time.Millisecond, MinRTO: 5 * time.Millisecond, MaxRTO: 50 * time.Millisecond})
					tt.stop(t, lab, c)
					begin := time.Now()
					send := func(ctx context.Context) error {
						ended := make(chan error, 1)
						go func() {
							_, err := c.SendBytes(ctx, noise(1<<20), Options{})
							ended <- err
						}()
						select {
						case err := <-ended:
							return err
						case <-time.After(20 * time.Second):
							t.Fatalf("Send has not returned, %v after it should; %+v", time.Since(begin), c.Stats())
							return nil
						}
					}
					ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
					defer cancel()
					if err := send(ctx); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrSilent) {
						t.Errorf("error %v, want the context's", err)
					}
					if mode != Unacknowledged {
						if err := send(t.Context()); !errors.Is(err, ErrSilent) {
							t.Errorf("error %v, want %v", err, ErrSilent)
						}
					}
					st, took := c.Stats(), time.Since(begin)
					if most := 200 + uint64(took/time.Millisecond); st.SystemCalls > most || st.Sleeps > 4*most {
						t.Errorf("%d calls and %d sleeps in %v", st.SystemCalls, st.Sleeps, took)
					}
					if st.Open != 0 {
						t.Errorf("%d messages are left", st.Open)
					}
				})
			}
		}
	}
}

// What the device does not take of one message does not keep another one back.
func TestConnMessagesThatCanBeSentAre(t *testing.T) {
	lab, p, dial := labPeer(t)
	// Of several segments in one frame, which the device would cut, a veth does not ask
	// whether they fit the other end's MTU.
	c := dial(Config{Offload: OffloadCalls, Patience: time.Minute, Retries: 1000, MinRTO: 5 * time.Millisecond})
	run(t, lab.NIC.NS, "ip", "link", "set", lab.NIC.Device, "mtu", "700")
	ctx, cancel := context.WithCancel(t.Context())
	large := make(chan error, 1)
	go func() {
		_, err := c.SendBytes(ctx, noise(1<<20), Options{})
		large <- err
	}()
	for range 5 {
		r, err := c.SendBytes(t.Context(), []byte("small"), Options{})
		if err != nil || string(p.message(t, r.ID)) != "small" {
			t.Error(err)
		}
	}
	cancel()
	if err := receive(t, large); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestConnNoSuchHost(t *testing.T) {
	lab, _, _ := labPeer(t)
	if err := lab.Host.NS.Do(func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/neigh/"+lab.Host.Device+"/retrans_time_ms", []byte("50"), 0); err != nil {
			return err
		}
		none := lab.NIC.Addr.Addr().Next().Next().Next()
		c := mustDial(t, netip.AddrPortFrom(none, Port), Config{Patience: time.Second, Retries: 1})
		_, err := c.SendBytes(t.Context(), []byte("x"), Options{})
		if !errors.Is(err, ErrSilent) || !errors.Is(err, unix.EHOSTUNREACH) {
			t.Errorf("error %v, want ErrSilent and no route to host", err)
		}
		if _, err := Dial(t.Context(), "192.0.2.1", Config{}); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("error %v, want network is unreachable", err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

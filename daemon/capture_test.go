// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/internal/pcapng"
)

// A tapped is a context's end of captures.
type tapped struct {
	*captures
	taps   atomic.Int32 // how often it was set
	now    atomic.Pointer[hpu.Tap]
	closed chan struct{}
}

func newTapped() *tapped {
	c := &tapped{closed: make(chan struct{})}
	c.captures = newCaptures("echo", "xs-nic", 4, func(t hpu.Tap) {
		c.taps.Add(1)
		if t == nil {
			c.now.Store(nil)
		} else {
			c.now.Store(&t)
		}
	}, c.closed)
	return c
}

// see shows a frame to the tap, if there is one.
func (c *tapped) see(r hpu.TapRecord, frame []byte) {
	if t := c.now.Load(); t != nil {
		if r.Size == 0 {
			r.Size = len(frame)
		}
		(*t).Packet(&r, frame)
	}
}

// start captures until the test ends it, and returns when the tap is there.
func (c *tapped) start(t *testing.T, ctx context.Context, o control.CaptureOptions, w io.Writer) <-chan error {
	t.Helper()
	had := len(*c.run.Load())
	done := make(chan error, 1)
	go func() { done <- c.capture(ctx, 0, o, w) }()
	for end := time.Now().Add(20 * time.Second); len(*c.run.Load()) == had || c.now.Load() == nil; time.Sleep(50 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatal("the capture does not start")
		}
	}
	return done
}

func readCapture(t *testing.T, data []byte) (frames []pcapng.Frame, lost uint64) {
	t.Helper()
	total, err := pcapng.Relay(io.Discard, bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	r, err := pcapng.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	for {
		f := pcapng.Frame{}
		if err := r.Next(&f); err == io.EOF {
			return frames, total.Lost
		} else if err != nil {
			t.Fatal(err)
		}
		f.Data = bytes.Clone(f.Data)
		frames = append(frames, f)
	}
}

// datagram returns a frame to a UDP port.
func datagram(port uint16, payload string) []byte {
	f := make([]byte, 42, 42+len(payload))
	f[12], f[14], f[23] = 8, 0x45, 17
	binary.BigEndian.PutUint16(f[16:], uint16(28+len(payload)))
	copy(f[30:], netip.MustParseAddr("10.0.0.1").AsSlice())
	binary.BigEndian.PutUint16(f[36:], port)
	binary.BigEndian.PutUint16(f[38:], uint16(8+len(payload)))
	return append(f, payload...)
}

func TestCaptureWritesWhatTheTapSees(t *testing.T) {
	c := newTapped()
	var out bytes.Buffer
	done := c.start(t, t.Context(), control.CaptureOptions{HPU: -1, Count: 3}, &out)
	now := clock.Monotonic()
	frame := datagram(7, "hello")
	c.see(hpu.TapRecord{Time: now, HPU: 1, Queue: 2, Ruleset: 3, Verdict: "success"}, frame)
	c.see(hpu.TapRecord{Time: now + 1, HPU: 0, Message: true, Number: 7, Offset: 1408, EOM: true, Verdict: "drop", Size: 9000}, frame)
	c.see(hpu.TapRecord{Time: now + 2, HPU: 1, Out: true, Verdict: "sent"}, frame[:14])
	c.see(hpu.TapRecord{Time: now + 3, Verdict: "one too many"}, frame)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	frames, lost := readCapture(t, out.Bytes())
	if len(frames) != 3 || lost != 0 {
		t.Fatalf("%d frames, %d lost", len(frames), lost)
	}
	for i, want := range []pcapng.Frame{
		{Data: frame, Length: 47, Direction: pcapng.In, Comments: []string{"context=echo hpu=1 queue=2 ruleset=3 verdict=success"}},
		{Data: frame, Length: 9000, Direction: pcapng.In, Comments: []string{"context=echo hpu=0 queue=0 ruleset=0 message=7 offset=1408 eom verdict=drop"}},
		{Data: frame[:14], Length: 14, Direction: pcapng.Out, Comments: []string{"context=echo hpu=1 queue=0 verdict=sent"}},
	} {
		want.Number = i + 1
		if got := frames[i]; fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
			t.Errorf("frame %d is %+v\nwant %+v", i, got, want)
		}
	}
	if c.now.Load() != nil || c.taps.Load() != 2 {
		t.Errorf("the tap is there, or was set %d times", c.taps.Load())
	}
}

func TestCaptureOptions(t *testing.T) {
	records := []struct {
		r     hpu.TapRecord
		frame []byte
	}{
		{hpu.TapRecord{HPU: 0, Verdict: "success"}, datagram(7, "a")},
		{hpu.TapRecord{HPU: 1, Verdict: "drop"}, datagram(7, "b")},
		{hpu.TapRecord{HPU: 1, Verdict: "success"}, datagram(8, "c")},
		{hpu.TapRecord{HPU: 2, Verdict: "fail"}, datagram(9, "d")},
		{hpu.TapRecord{HPU: 3, Verdict: "sent", Out: true}, datagram(9, "e")},
	}
	for _, tt := range []struct {
		name string
		o    control.CaptureOptions
		want string
	}{
		{"all", control.CaptureOptions{HPU: -1}, "abcde"},
		{"an HPU", control.CaptureOptions{HPU: 1}, "bc"},
		{"HPU 0", control.CaptureOptions{HPU: 0}, "a"},
		{"a verdict", control.CaptureOptions{HPU: -1, Verdict: "success"}, "ac"},
		{"verdicts", control.CaptureOptions{HPU: -1, Verdict: "drop,fail"}, "bd"},
		{"a rule", control.CaptureOptions{HPU: -1, Filter: "udp(7)"}, "ab"},
		{"a ruleset", control.CaptureOptions{HPU: -1, Filter: "seven: udp(7)"}, "ab"},
		{"rulesets", control.CaptureOptions{HPU: -1, Filter: "# those\nseven: udp(7)\nnine: udp(9)\n"}, "abde"},
		{"everything at once", control.CaptureOptions{HPU: 1, Filter: "udp(7)", Verdict: "drop", Count: 1}, "b"},
		{"nothing", control.CaptureOptions{HPU: 2, Verdict: "success"}, ""},
		{"a count", control.CaptureOptions{HPU: -1, Count: 2}, "ab"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newTapped()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var out bytes.Buffer
			done := c.start(t, ctx, tt.o, &out)
			for _, r := range records {
				c.see(r.r, r.frame)
			}
			if tt.o.Count == 0 {
				cancel()
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			frames, _ := readCapture(t, out.Bytes())
			var got string
			for _, f := range frames {
				got += string(f.Data[42:])
			}
			if got != tt.want {
				t.Errorf("captured %q, want %q", got, tt.want)
			}
		})
	}
	t.Run("snap", func(t *testing.T) {
		c := newTapped()
		var out bytes.Buffer
		done := c.start(t, t.Context(), control.CaptureOptions{HPU: -1, Snap: 20, Count: 1, Filter: "udp(7)"}, &out)
		c.see(records[0].r, records[0].frame) // the filter sees all of it
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if frames, _ := readCapture(t, out.Bytes()); len(frames) != 1 || len(frames[0].Data) != 20 || frames[0].Length != 43 {
			t.Errorf("%+v", frames)
		}
	})
}

func TestImpossibleCaptures(t *testing.T) {
	for _, tt := range []struct {
		o    control.CaptureOptions
		want string
	}{
		{control.CaptureOptions{HPU: 4}, "HPU 4: want 0 to 3"},
		{control.CaptureOptions{HPU: -2}, "HPU -2"},
		{control.CaptureOptions{HPU: -1, Snap: -1}, "-1 bytes"},
		{control.CaptureOptions{HPU: -1, Count: -1}, "-1 frames"},
		{control.CaptureOptions{HPU: -1, Verdict: "drop,won"}, `"won": want success, drop,`},
		{control.CaptureOptions{HPU: -1, Filter: "udp(7"}, "filter:1:"},
		{control.CaptureOptions{HPU: -1, Filter: "a: udp(7)\nb: upd(8)"}, "filter:2:4: "},
		{control.CaptureOptions{HPU: -1, Filter: "# nothing\n"}, "no ruleset"},
	} {
		var out bytes.Buffer
		c := newTapped()
		err := c.capture(t.Context(), 0, tt.o, &out)
		if err == nil || !errors.Is(err, errInvalid) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: error %v, want one about %q", tt.o, err, tt.want)
		}
		if out.Len() > 0 || c.taps.Load() != 0 {
			t.Errorf("%+v: %d bytes written", tt.o, out.Len())
		}
	}
}

func TestCapturesAtTheSameTime(t *testing.T) {
	c := newTapped()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out [maxCaptures]bytes.Buffer
	var done []<-chan error
	for i := range out {
		done = append(done, c.start(t, ctx, control.CaptureOptions{HPU: i}, &out[i]))
	}
	var more bytes.Buffer
	if err := c.capture(ctx, 0, control.CaptureOptions{HPU: -1}, &more); !errors.Is(err, errBusy) || !strings.Contains(err.Error(), "4 captures of context") || more.Len() > 0 {
		t.Errorf("one too many: %v, %d bytes", err, more.Len())
	}
	for i := range 100 {
		c.see(hpu.TapRecord{HPU: i % maxCaptures}, datagram(uint16(i), "x"))
	}
	cancel()
	for i := range out {
		if err := <-done[i]; err != nil {
			t.Error(err)
		}
		if frames, _ := readCapture(t, out[i].Bytes()); len(frames) != 100/maxCaptures {
			t.Errorf("capture %d has %d frames", i, len(frames))
		}
	}
	if c.now.Load() != nil || c.taps.Load() != 2 {
		t.Errorf("a tap is left, or was set %d times", c.taps.Load())
	}
}

// A user does not take all captures from others, and root has what is left.
func TestCapturesOfAUser(t *testing.T) {
	c := newTapped()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var done [userCaptures]chan error
	for i := range done {
		done[i] = make(chan error, 1)
		go func() { done[i] <- c.capture(ctx, 1000, control.CaptureOptions{HPU: -1}, io.Discard) }()
	}
	eventually(t, "the captures run", func() bool { return len(*c.run.Load()) == userCaptures })
	if err := c.capture(ctx, 1000, control.CaptureOptions{HPU: -1}, io.Discard); !errors.Is(err, errBusy) || !strings.Contains(err.Error(), "2 captures of context") || !strings.Contains(err.Error(), "by user 1000") {
		t.Errorf("one too many of a user: %v", err)
	}
	var out bytes.Buffer
	others := c.start(t, ctx, control.CaptureOptions{HPU: -1}, &out)
	cancel()
	for _, d := range done {
		if err := <-d; err != nil {
			t.Error(err)
		}
	}
	if err := <-others; err != nil {
		t.Error(err)
	}
}

// A gate lets nothing through before it is opened.
type gate struct {
	open chan struct{}
	b    syncBuffer
}

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	return g.b.Write(p)
}

// Whoever reads slowly loses frames, and is told how many and where. Workers do not wait.
func TestSlowCapturesAreToldWhatTheyLost(t *testing.T) {
	for _, tt := range []struct {
		name   string
		size   int // of frames
		before int // that are captured for sure
	}{
		{"too many frames", 60, captureRecords},
		{"too many bytes", 60 << 10, captureBytes / (60 << 10)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newTapped()
			g := &gate{open: make(chan struct{})}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := c.start(t, ctx, control.CaptureOptions{HPU: -1}, g)
			const n = 3 * captureRecords
			shown := uint64(n)
			frame := make([]byte, tt.size)
			for i := range n {
				binary.BigEndian.PutUint32(frame, uint32(i))
				c.see(hpu.TapRecord{HPU: i % 4}, frame)
			}
			close(g.open)
			// It goes on where there is room again.
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
				binary.BigEndian.PutUint32(frame, n)
				c.see(hpu.TapRecord{}, frame)
				shown++
				cap := (*c.run.Load())[0]
				cap.mu.Lock()
				caught := cap.lost == 0
				cap.mu.Unlock()
				if caught {
					break
				}
				if time.Now().After(end) {
					t.Fatal("no room again")
				}
			}
			// All of that is told at once: a client that ends needs not wait for the end.
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
				total, _ := pcapng.Relay(io.Discard, strings.NewReader(g.b.String()))
				if total.Frames+total.Lost == shown {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("%+v of %d", total, shown)
				}
			}
			cancel()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			frames, lost := readCapture(t, []byte(g.b.String()))
			var sum, next uint64
			for i, f := range frames {
				sum += f.Dropped
				at := uint64(binary.BigEndian.Uint32(f.Data))
				if at >= n {
					if i > 2*tt.before {
						t.Errorf("%d frames in two buffers, want at most %d", i, 2*tt.before)
					}
					break
				}
				if next += f.Dropped; at != next {
					t.Fatalf("frame %d is number %d, want %d", i, at, next)
				}
				next++
			}
			if len(frames) < tt.before || sum == 0 || sum != lost {
				t.Errorf("%d frames, %d lost before them, statistics say %d", len(frames), sum, lost)
			}
		})
	}
}

// What is lost after the last frame is in statistics, also before the end.
func TestCaptureHasStatistics(t *testing.T) {
	c := newTapped()
	g := &gate{open: make(chan struct{})}
	done := c.start(t, t.Context(), control.CaptureOptions{HPU: -1}, g)
	const n = 2*captureRecords + 5
	for range n {
		c.see(hpu.TapRecord{}, []byte("some frame of the wire"))
	}
	close(g.open)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		total, _ := pcapng.Relay(io.Discard, strings.NewReader(g.b.String()))
		if total.Frames+total.Lost == n && total.Lost >= 5 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%+v of %d", total, n)
		}
	}
	close(c.closed) // the context is removed
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if frames, lost := readCapture(t, []byte(g.b.String())); uint64(len(frames))+lost != n {
		t.Errorf("%d frames and %d lost of %d", len(frames), lost, n)
	}
	if c.now.Load() != nil {
		t.Error("the tap is left")
	}
}

type fullDisk struct{ left int }

var errDisk = errors.New("no space")

func (f *fullDisk) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, errDisk
	}
	return len(p), nil
}

func TestCaptureEndsWithItsClient(t *testing.T) {
	c := newTapped()
	done := c.start(t, t.Context(), control.CaptureOptions{HPU: -1}, &fullDisk{left: 300})
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		c.see(hpu.TapRecord{}, make([]byte, 100))
		select {
		case err := <-done:
			if !errors.Is(err, errDisk) || c.now.Load() != nil {
				t.Errorf("error %v, tap left: %v", err, c.now.Load() != nil)
			}
			return
		default:
		}
		if time.Now().After(end) {
			t.Fatal("it goes on")
		}
	}
}

func TestCaptureUnderTraffic(t *testing.T) {
	c := newTapped()
	stop := make(chan struct{})
	var seen atomic.Uint64
	var workers sync.WaitGroup
	for h := range 4 {
		workers.Go(func() {
			frame := datagram(7, fmt.Sprint(h))
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				c.see(hpu.TapRecord{HPU: h, Number: uint32(i), Message: true}, frame)
				seen.Add(1)
			}
		})
	}
	var wg sync.WaitGroup
	for h := range maxCaptures {
		wg.Go(func() {
			for range 5 {
				var out bytes.Buffer
				if err := c.capture(t.Context(), 0, control.CaptureOptions{HPU: h, Count: 500}, &out); err != nil {
					t.Error(err)
					return
				}
				frames, _ := readCapture(t, out.Bytes())
				last := -1
				for _, f := range frames {
					var context string
					var hpu, queue, ruleset, message int
					if _, err := fmt.Sscanf(f.Comments[0], "context=%s hpu=%d queue=%d ruleset=%d message=%d", &context, &hpu, &queue, &ruleset, &message); err != nil || hpu != h || string(f.Data[42:]) != fmt.Sprint(h) {
						t.Errorf("HPU %d: %s, payload %q, error %v", h, f.Comments, f.Data[42:], err)
						return
					}
					if last >= 0 && message != last+1+int(f.Dropped) {
						t.Errorf("HPU %d: %d after %d with %d lost", h, message, last, f.Dropped)
						return
					}
					last = message
				}
				if len(frames) != 500 {
					t.Errorf("%d frames", len(frames))
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	workers.Wait()
	if c.now.Load() != nil {
		t.Error("a tap is left")
	}
}

// What a frame costs a worker while somebody captures.
func BenchmarkCapture(b *testing.B) {
	for _, size := range []int{64, 1400} {
		for _, filter := range []string{"", "udp(7)"} {
			b.Run(fmt.Sprintf("%d bytes, filter %q", size, filter), func(b *testing.B) {
				c := newTapped()
				one, err := newCapture(control.CaptureOptions{HPU: -1, Filter: filter}, 4)
				if err != nil {
					b.Fatal(err)
				}
				c.run.Store(&[]*capture{one})
				frame := datagram(7, strings.Repeat("x", size-42))
				r := hpu.TapRecord{HPU: 1, Message: true, Verdict: "success", Size: size}
				b.ReportAllocs()
				n := 0
				for b.Loop() {
					if n++; n%1024 == 0 {
						one.swap() // as if it were written
					}
					c.Packet(&r, frame)
				}
				if one.lost > 0 {
					b.Errorf("%d lost", one.lost)
				}
			})
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// onWire has messages from the other end of a lab handled in the kernel.
func onWire(t *testing.T, h *Handlers) *netns.Lab {
	t.Helper()
	lab, in := onLab(t)
	// Without a program there, XDP_TX arrives nowhere.
	if hookOf(t) == XDP {
		inside(t, lab.Host, func(host *net.Interface) { foreign(t, host, Native) })
	}
	if err := in.SetHandlers(handled, h); err != nil {
		t.Fatal(err)
	}
	table := &matcher.Table{Generation: 1, Entries: map[int]matcher.Entry{
		9: {Ruleset: matcher.SLMP(), Context: handled, Format: matcher.FormatByName("slmp")},
	}}
	if err := in.Publish(table, map[uint16]Delivery{handled: {Kernel: true, Hook: hookOf(t)}}); err != nil {
		t.Fatal(err)
	}
	return lab
}

// A sender that knows nothing of this sends messages of all sizes: from XDP they are
// answered, told, and put where they belong.
func TestMessagesFromTheWire(t *testing.T) { atHooks(t, testMessagesFromTheWire) }

func testMessagesFromTheWire(t *testing.T) {
	risky(t)
	const window = 8 << 20
	cfg, w := messagesConfig(t, window, MessagesConfig{Messages: 16, Events: 1 << 16})
	h := load(t, depositObject(t), cfg)
	lab := onWire(t, h)
	for _, plain := range []bool{false, true} {
		var c *slmp.Conn
		if err := lab.Host.NS.Do(func() (err error) {
			c, err = slmp.Dial(t.Context(), netip.AddrPortFrom(lab.NIC.Addr.Addr(), slmp.Port).String(), slmp.Config{Plain: plain})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(1, 1))
		for _, n := range []int{0, 1, 12, 60, 1400, 1462, 1463, 50_000, window / int(1+testenv.Slowness())} {
			msg := make([]byte, n)
			for i := range msg {
				msg[i] = byte(rng.Uint32())
			}
			if _, err := c.SendBytes(t.Context(), msg, slmp.Options{}); err != nil {
				t.Fatalf("%d bytes: %v\n%+v\n%+v", n, err, h.Tally(), h.Stats())
			}
			if e := event(t, h); e.Length != uint64(n) || e.Missing != 0 || e.Cause != uint32(spin.Complete) || e.Source == 0 || e.Port == 0 {
				t.Errorf("%d bytes: event %+v", n, e)
			}
			got := make([]byte, n)
			if _, err := w.ReadAt(got, 0); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, msg) {
				t.Errorf("%d bytes: others are in the window", n)
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if s := h.Tally(); s.Ended != 18 || s.Open != 0 || s.Corrupt != 0 || s.Leaked != 0 || s.Lost != 0 {
		t.Errorf("%+v", s)
	} else {
		t.Logf("%+v", s)
	}
}

// A frame of a socket has little room behind it: an answer that does not fit has fewer words,
// or is a plain one, and its checksum is right, or the socket would not get it.
func TestAnswersToShortSegments(t *testing.T) { atHooks(t, testAnswersToShortSegments) }

func testAnswersToShortSegments(t *testing.T) {
	risky(t)
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 4, Segments: 4096})
	h := load(t, depositObject(t), cfg)
	lab := onWire(t, h)
	var sock *net.UDPConn
	if err := lab.Host.NS.Do(func() (err error) {
		sock, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(lab.NIC.Addr.Addr(), slmp.Port)))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer sock.Close()
	const segments = 2000
	for id, size := range []int{1, 12, 40, 100} {
		words := 0
		for k := range segments {
			if k == 1 {
				continue // so that there is a bitmap
			}
			b := make([]byte, slmp.HeaderLen+size)
			slmp.Header{Flags: slmp.SYN | slmp.Cumulative, ID: uint32(id), Offset: uint32(k * size)}.Put(b)
			var a slmp.Ack
			buf := make([]byte, 2000)
			for try := 0; ; try++ {
				if _, err := sock.Write(b); err != nil {
					t.Fatal(err)
				}
				sock.SetReadDeadline(time.Now().Add(testenv.Slowness() * time.Second))
				n, err := sock.Read(buf)
				if err == nil {
					err = a.Parse(buf[:n])
				}
				if err == nil {
					break
				}
				if try == 3 {
					t.Fatalf("segment %d of %d bytes: %v\n%+v", k, size, err, h.Tally())
				}
			}
			if a.ID != uint32(id) || a.Offset != uint32(k*size) || a.Wait {
				t.Fatalf("segment %d of %d bytes: %+v", k, size, a)
			}
			if a.Cumulative && k > 0 {
				if a.End != uint32(size) {
					t.Fatalf("segment %d of %d bytes: %+v", k, size, a)
				}
				words = max(words, len(a.Bitmap))
				for w, bits := range a.Bitmap {
					// Bit i of word w is segment 2+64w+i: all up to k have come.
					want := ^uint64(0)
					if n := k - 1 - 64*w; n < 64 {
						want = 1<<max(n, 0) - 1
					}
					if bits != want {
						t.Fatalf("segment %d of %d bytes: word %d is %#x, want %#x", k, size, w, bits, want)
					}
				}
			}
		}
		t.Logf("segments of %d bytes: up to %d words", size, words)
	}
	if s := h.Tally(); s.Mute != 0 {
		t.Errorf("%d answers were not sent", s.Mute)
	}
}

// SPDX-License-Identifier: Apache-2.0

package fpspintest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A packet as a receiver sees it.
type packet struct {
	from  netip.AddrPort
	flags uint16
	id    uint32
	off   uint32
	data  []byte
}

func (p packet) ack() []byte {
	b := binary.BigEndian.AppendUint16(nil, flagACK)
	b = binary.BigEndian.AppendUint32(b, p.id)
	return binary.BigEndian.AppendUint32(b, p.off)
}

// An acker is a socket on loopback that keeps what comes.
type acker struct {
	*testing.T
	conn *net.UDPConn
	at   netip.AddrPort
	got  []packet // after done
	done chan struct{}
}

// serve has a goroutine call reply for each packet, and send what it returns.
func serve(t *testing.T, reply func(a *acker, p packet) [][]byte) *acker {
	t.Helper()
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	a := &acker{T: t, conn: conn, at: conn.LocalAddr().(*net.UDPAddr).AddrPort(), done: make(chan struct{})}
	go func() {
		defer close(a.done)
		for {
			p, ok := a.next()
			if !ok {
				return
			}
			for _, b := range reply(a, p) {
				if _, err := conn.WriteToUDPAddrPort(b, p.from); err != nil && !errors.Is(err, net.ErrClosed) { // the test may be over
					t.Error(err)
				}
			}
		}
	}()
	t.Cleanup(func() { conn.Close(); <-a.done })
	return a
}

// next returns false after the last packet.
func (a *acker) next() (packet, bool) {
	b := make([]byte, 2000)
	n, from, err := a.conn.ReadFromUDPAddrPort(b)
	if err != nil || n < 10 {
		return packet{}, false
	}
	p := packet{from, binary.BigEndian.Uint16(b), binary.BigEndian.Uint32(b[2:]), binary.BigEndian.Uint32(b[6:]), b[10:n]}
	a.got = append(a.got, p)
	return p, true
}

// packets ends the service and returns all that came. Loopback keeps the order,
// so what comes last is a datagram of our own.
func (a *acker) packets() []packet {
	a.Helper()
	c, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(a.at))
	if err != nil {
		a.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("end")); err != nil {
		a.Fatal(err)
	}
	<-a.done
	return a.got
}

// always acknowledges what asks for it.
func always(_ *acker, p packet) [][]byte {
	if p.flags&flagSYN == 0 {
		return nil
	}
	return [][]byte{p.ack()}
}

func message(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	return b
}

func TestPayload(t *testing.T) {
	for align, want := range map[int]int{64: 1408, 4: 1460, 1: 1462, 1462: 1462, 1000: 1000} {
		if got := (Sender{Align: align}).Payload(); got != want {
			t.Errorf("align %d: %d bytes, want %d", align, got, want)
		}
	}
}

// Packets have the flags of the table in FPsPIN's sender: SYN always, EOM on the
// last, or on the first if it is the only one; and the bytes are those of the
// message.
func TestPackets(t *testing.T) {
	const first, middle, end, only = flagSYN, flagSYN, flagSYN | flagEOM, flagSYN | flagEOM
	for _, tt := range []struct {
		size  int
		flags []uint16
	}{
		{0, []uint16{only}},
		{1, []uint16{only}},
		{1408, []uint16{only}},
		{1409, []uint16{first, end}},
		{2816, []uint16{first, end}},
		{2817, []uint16{first, middle, end}},
		{10 * 1408, append(append([]uint16{first}, slices.Repeat([]uint16{middle}, 8)...), end)},
	} {
		for _, window := range []int{1, 2, 16} {
			a := serve(t, always)
			msg := message(tt.size)
			id := rand.Uint32()
			r, err := Sender{Window: window, Align: 64}.Send(a.at, id, msg)
			got := a.packets()
			if want := (Result{Port: r.Port, Sent: len(tt.flags), ACKs: len(tt.flags)}); err != nil || r != want {
				t.Errorf("%d bytes, window %d: %+v, %v; want %+v", tt.size, window, r, err, want)
			}
			var flags []uint16
			var data []byte
			for i, p := range got {
				flags = append(flags, p.flags)
				if p.id != id || p.off != uint32(len(data)) || p.from.Port() != r.Port || i < len(got)-1 && len(p.data) != 1408 {
					t.Errorf("%d bytes, window %d, packet %d: id %d of %d, offset %d of %d, %d bytes from %v", tt.size, window, i, p.id, id, p.off, len(data), len(p.data), p.from)
				}
				data = append(data, p.data...)
			}
			if !slices.Equal(flags, tt.flags) || !bytes.Equal(data, msg) {
				t.Errorf("%d bytes, window %d: flags %x, want %x; %d bytes came", tt.size, window, flags, tt.flags, len(data))
			}
		}
	}
}

// Threads begin far apart, and send at the same time; the first packet goes before, and
// EOM after all others.
func TestThreads(t *testing.T) {
	for _, threads := range []int{2, 3, 8} {
		for _, packets := range []int{1, 2, 3, 20} {
			a := serve(t, always)
			msg := message(packets*1408 - 5)
			r, err := Sender{Window: 8, Align: 64, Threads: threads}.Send(a.at, 1, msg)
			got := a.packets()
			if err != nil || r.Sent != packets || r.ACKs != packets {
				t.Errorf("%d threads, %d packets: %+v, %v", threads, packets, r, err)
			}
			data := make([]byte, len(msg))
			inOrder := true
			for i, p := range got {
				if (i == 0) != (p.off == 0) || (i == len(got)-1) != (p.flags&flagEOM != 0) {
					t.Errorf("%d threads, %d packets: packet %d is at %d, flags %x", threads, packets, i, p.off, p.flags)
				}
				inOrder = inOrder && p.off == uint32(i)*1408
				copy(data[p.off:], p.data)
			}
			if !bytes.Equal(data, msg) || inOrder != (packets < 20) {
				t.Errorf("%d threads, %d packets: wrong bytes, or in order: %v", threads, packets, inOrder)
			}
		}
	}
}

func TestEachMessageHasAPort(t *testing.T) {
	a := serve(t, always)
	taken, err := Sender{Window: 1, Align: 64}.Send(a.at, 7, nil)
	if err != nil {
		t.Fatal(err)
	}
	// The kernel may give a port that is free again, but not always the same.
	for range 100 {
		if r, err := (Sender{Window: 1, Align: 64}).Send(a.at, 7, nil); err != nil || r.Port != taken.Port {
			return
		}
	}
	t.Error("a hundred messages from one port")
}

// Nothing follows the first packet before its ACK, and EOM goes when there is
// room for it in the window; between them as much is out as the window allows.
func TestWindow(t *testing.T) {
	const window, rounds = 4, 5
	var out []packet
	quiet := func(a *acker) { // nothing comes although somebody waits for it
		a.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if p, ok := a.next(); ok {
			t.Errorf("packet at %d while %d are out", p.off, len(out))
		}
		a.conn.SetReadDeadline(time.Time{})
	}
	a := serve(t, func(a *acker, p packet) (acks [][]byte) {
		out = append(out, p)
		if p.off != 0 && p.flags&flagEOM == 0 && len(out) < window {
			return nil // it must go on by itself
		}
		if p.flags&flagEOM == 0 {
			quiet(a)
		}
		for _, p := range out {
			acks = append(acks, p.ack())
		}
		out = nil
		return acks
	})
	r, err := Sender{Window: window, Align: 64}.Send(a.at, 7, message((1+window*rounds+1)*1408))
	if want := 1 + window*rounds + 1; err != nil || r.Sent != want || r.ACKs != want {
		t.Errorf("%+v, %v, want %d", r, err, want)
	}
}

// FPsPIN takes any 10 bytes with the ACK flag, from anybody.
func TestAnyACKCounts(t *testing.T) {
	other, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	noise := [][]byte{{}, make([]byte, 9), make([]byte, 10), {0xdf, 0xff, 9: 0}, {0x20, 0, 10: 0}, {0x30, 0, 21: 0}}
	a := serve(t, func(a *acker, p packet) [][]byte {
		p.id, p.off = p.id+1, p.off+5
		if _, err := other.WriteToUDPAddrPort(p.ack(), p.from); err != nil {
			t.Error(err)
		}
		return noise
	})
	// Each packet has its ACK before the noise, so the last noise may be late.
	r, err := Sender{Window: 1, Align: 64}.Send(a.at, 7, message(3000))
	if err != nil || r.Sent != 3 || r.ACKs != 3 || r.Other > 3*len(noise) || r.Other < 2*len(noise) {
		t.Errorf("%+v, %v", r, err)
	}
	t.Run("any flags beside it", func(t *testing.T) {
		a := serve(t, func(_ *acker, p packet) [][]byte { b := p.ack(); b[0] = 0xff; return [][]byte{b} })
		if r, err := (Sender{Window: 1, Align: 64}).Send(a.at, 7, nil); err != nil || r.ACKs != 1 {
			t.Errorf("%+v, %v", r, err)
		}
	})
}

// What fails, with which code, and after how many packets: none is sent again.
func TestFailures(t *testing.T) {
	only := func(acked func(p packet) bool) func(*acker, packet) [][]byte {
		return func(_ *acker, p packet) [][]byte {
			if acked(p) {
				return [][]byte{p.ack()}
			}
			return nil
		}
	}
	for _, tt := range []struct {
		name   string
		window int
		size   int
		reply  func(*acker, packet) [][]byte
		code   Code
		said   string
		sent   int
		after  time.Duration // at the earliest
	}{
		{"no ACK of the first", 4, 5000, only(func(packet) bool { return false }), ErrSYNTimeout, "first packet to 127.0.0.1", 1, time.Second},
		{"noise instead", 4, 5000, func(*acker, packet) [][]byte { return [][]byte{{0x30, 0, 21: 0}} }, ErrSYNTimeout, "first packet", 1, time.Second},
		{"no ACK of the middle", 4, 10 * 1408, only(func(p packet) bool { return p.off == 0 }), ErrData, "packet at 7040 to 127.0.0.1", 5, time.Second},
		{"one ACK short in the middle", 2, 5 * 1408, only(func(p packet) bool { return p.off <= 1408 }), ErrData, "last packet, at 5632,", 4, time.Second},
		{"no ACK of the last", 4, 3 * 1408, only(func(p packet) bool { return p.flags&flagEOM == 0 }), ErrData, "1 of 2 ACKs outstanding came", 3, 2 * time.Second},
		{"window 0, two packets: EOM waits for nothing", 0, 2 * 1408, always, ErrData, "last packet, at 1408, to 127.0.0.1", 1, 0},
		{"window 0, more packets: ACKs of what asked for none", 0, 4 * 1408, always, ErrData, "1 of 3 ACKs outstanding came", 4, 2 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			a := serve(t, tt.reply)
			start := time.Now()
			r, err := Sender{Window: tt.window, Align: 64}.Send(a.at, 7, message(tt.size))
			took := time.Since(start)
			if !errors.Is(err, tt.code) || err == nil || !strings.Contains(err.Error(), tt.said) || took < tt.after {
				t.Errorf("after %v: %v, want %v, %q, not before %v", took, err, tt.code, tt.said, tt.after)
			}
			got := a.packets()
			if r.Sent != tt.sent || len(got) != tt.sent {
				t.Errorf("%d packets sent and %d came, want %d", r.Sent, len(got), tt.sent)
			}
			if tt.window > 0 {
				return
			}
			for i, p := range got {
				want := uint16(0)
				switch {
				case i == 0:
					want = flagSYN
				case i == len(got)-1:
					want = flagSYN | flagEOM
				}
				if p.flags != want {
					t.Errorf("packet %d: flags %x, want %x", i, p.flags, want)
				}
			}
		})
	}
}

func TestWindow0WithOnePacket(t *testing.T) {
	a := serve(t, always)
	if r, err := (Sender{Align: 64}).Send(a.at, 7, message(1408)); err != nil || r.Sent != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

// An ACK too many, and EOM's own is not waited for.
func TestSurplusACKStandsForAnother(t *testing.T) {
	a := serve(t, func(_ *acker, p packet) [][]byte {
		switch {
		case p.flags&flagEOM != 0:
			return nil
		case p.off == 1408:
			return [][]byte{p.ack(), p.ack()}
		}
		return [][]byte{p.ack()}
	})
	if r, err := (Sender{Window: 1, Align: 64}).Send(a.at, 7, message(3*1408)); err != nil || r.Sent != 3 || r.ACKs != 3 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestFirstPacketThatCannotBeSent(t *testing.T) {
	// Broadcast, without leave to.
	to := netip.MustParseAddrPort("255.255.255.255:9330")
	if r, err := (Sender{Window: 1, Align: 64}).Send(to, 7, nil); !errors.Is(err, ErrSYNUnsent) || !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.ENETUNREACH) || r.Sent != 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestParameters(t *testing.T) {
	four := netip.MustParseAddrPort("127.0.0.1:9330")
	for _, tt := range []struct {
		s  Sender
		to netip.AddrPort
	}{
		{Sender{Window: -1, Align: 64}, four},
		{Sender{Window: 1}, four},
		{Sender{Window: 1, Align: 1463}, four},
		{Sender{Window: 1, Align: 64}, netip.MustParseAddrPort("[::1]:9330")},
	} {
		if _, err := tt.s.Send(tt.to, 7, nil); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%+v to %v: %v", tt.s, tt.to, err)
		}
	}
}

func TestCodesSayWhatTheyAre(t *testing.T) {
	for code, want := range map[Code]string{-1: "slmp_sendmsg: -1 (data phase)", -2: "slmp_sendmsg: -2 (SYN timed out)", -3: "slmp_sendmsg: -3 (SYN not sent)", -4: "slmp_sendmsg: -4"} {
		if code.Error() != want {
			t.Errorf("%d is %q", int(code), code.Error())
		}
	}
}

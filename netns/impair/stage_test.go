// SPDX-License-Identifier: Apache-2.0

package impair_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/packet"
)

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// rawSocket opens a packet socket on a port of the lab, for frames as they are on
// the wire.
func rawSocket(t testing.TB, p netns.Port) int {
	t.Helper()
	var fd int
	err := p.NS.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL))); err != nil {
			return err
		}
		return errors.Join(
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: p.Index}),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 200_000}))
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// receive returns the next frame that came in, nil if none comes for 200 ms.
func receive(t testing.TB, fd int, buf []byte) []byte {
	t.Helper()
	for {
		n, from, err := unix.Recvfrom(fd, buf, 0)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return nil
		case err != nil:
			t.Fatal(err)
		case from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING:
			return buf[:n]
		}
	}
}

// frames makes n datagrams, of sizes up to most bytes with all headers. They are
// for a third party by their Ethernet address, so that nobody answers.
func frames(from, to netns.Port, n, most int) [][]byte {
	rnd := rand.New(rand.NewPCG(uint64(n), uint64(most)))
	list := make([][]byte, n)
	for i := range list {
		b := make([]byte, 14+20+8+8+rnd.IntN(most-14-20-8-8+1))
		copy(b, []byte{2, 0, 0, 0, 0, 99})
		copy(b[6:], from.MAC)
		binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IP)
		ip := b[14:]
		ip[0], ip[8], ip[9] = 0x45, 64, unix.IPPROTO_UDP
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
		src, dst := from.Addr.Addr().As4(), to.Addr.Addr().As4()
		copy(ip[12:], src[:])
		copy(ip[16:], dst[:])
		binary.BigEndian.PutUint16(ip[10:], packet.ChecksumOf(ip[:20]))
		udp := ip[20:]
		binary.BigEndian.PutUint16(udp, 4000)
		binary.BigEndian.PutUint16(udp[2:], 4001)
		binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
		binary.BigEndian.PutUint64(udp[8:], uint64(i))
		for k := 16; k < len(udp); k++ {
			udp[k] = byte(rnd.Uint32())
		}
		list[i] = b
	}
	return list
}

// foretell applies the decisions to the frames, and counts them.
func foretell(c impair.Config, way impair.Direction, in [][]byte) (out [][]byte, want impair.Counters) {
	for n, b := range in {
		want.Frames++
		want.Bytes += uint64(len(b))
		f := impair.FateOf(c, way, uint64(n), len(b))
		if f.Lost {
			want.Lost++
			continue
		}
		if f.Duplicated {
			want.Duplicated++
			out = append(out, b)
		}
		if f.Corrupted {
			want.Corrupted++
			b = bytes.Clone(b)
			b[14+f.Bit/8] ^= 1 << (f.Bit % 8)
		}
		out = append(out, b)
	}
	return out, want
}

// push sends frames through the lab and returns what comes out, in order. The
// next burst waits until the stage has seen the last: a veth that nobody reads
// fast enough drops frames.
func push(t testing.TB, l *netns.Lab, way impair.Direction, in [][]byte, want int) (out [][]byte) {
	t.Helper()
	from, to := ends(l, way)
	tx, rx := rawSocket(t, from), rawSocket(t, to)
	send(t, l, way, tx, in)
	buf := make([]byte, 1<<16)
	for len(out) < want {
		b := receive(t, rx, buf)
		if b == nil {
			t.Errorf("%v: %d frames came, want %d", way, len(out), want)
			return out
		}
		out = append(out, bytes.Clone(b))
	}
	if b := receive(t, rx, buf); b != nil {
		t.Errorf("%v: more than %d frames came: %x", way, want, b)
	}
	return out
}

func send(t testing.TB, l *netns.Lab, way impair.Direction, tx int, in [][]byte) {
	t.Helper()
	from, _ := ends(l, way)
	sent := counters(t, l, way).Frames
	for len(in) > 0 {
		n := min(64, len(in))
		for _, b := range in[:n] {
			if err := unix.Sendto(tx, b, 0, &unix.SockaddrLinklayer{Ifindex: from.Index}); err != nil {
				t.Fatal(err)
			}
		}
		in, sent = in[n:], sent+uint64(n)
		for end := time.Now().Add(10 * time.Second); counters(t, l, way).Frames < sent; {
			if time.Now().After(end) {
				t.Fatalf("%v: of %d frames %d came to the stage", way, sent, counters(t, l, way).Frames)
			}
		}
	}
}

// settled reads the counters of a direction once no frame waits any more: the
// relay writes them down after it has sent.
func settled(t testing.TB, l *netns.Lab, way impair.Direction) impair.Counters {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if c := counters(t, l, way); c.Waiting == 0 || time.Now().After(end) {
			return c
		}
	}
}

// counters reads those of a direction.
func counters(t testing.TB, l *netns.Lab, way impair.Direction) impair.Counters {
	t.Helper()
	st, err := l.PathState()
	if err != nil {
		t.Fatal(err)
	}
	if way == impair.FromHost {
		return st.FromHost
	}
	return st.ToHost
}

func ends(l *netns.Lab, way impair.Direction) (from, to netns.Port) {
	if way == impair.FromHost {
		return l.Host, l.NIC
	}
	return l.NIC, l.Host
}

// Which frames are lost, come twice, or have which bit flipped is known
// beforehand, frame by frame and byte by byte.
func TestFramesMeetTheForetoldFate(t *testing.T) {
	all := impair.Config{Loss: 0.05, Duplicate: 0.03, Corrupt: 0.02, Seed: 7}
	with := func(change func(*impair.Config)) impair.Config { c := all; change(&c); return c }
	for _, tc := range []struct {
		name string
		cfg  impair.Config
		lab  netns.LabConfig
	}{
		{"seed 7", all, netns.LabConfig{}},
		{"seed 8", with(func(c *impair.Config) { c.Seed = 8 }), netns.LabConfig{}},
		{"from the host only", with(func(c *impair.Config) { c.Direction = impair.FromHost }), netns.LabConfig{}},
		{"to the host only", with(func(c *impair.Config) { c.Direction = impair.ToHost }), netns.LabConfig{}},
		{"nothing", impair.Config{Seed: 1}, netns.LabConfig{}},
		{"all frames twice and broken", impair.Config{Duplicate: 1, Corrupt: 1, Seed: 1}, netns.LabConfig{}},
		// One queue: a flipped bit may put a frame into another flow, and so into
		// another queue, which is not read in step with the first.
		{"behind a relay", with(func(c *impair.Config) { c.Delay = time.Millisecond }), netns.LabConfig{Queues: 1}},
		{"behind a rate", with(func(c *impair.Config) { c.Rate = 10e9 }), netns.LabConfig{}},
		{"long frames, many queues", all, netns.LabConfig{MTU: 9000, Queues: 3}},
		{"long frames, many queues, behind a relay", with(func(c *impair.Config) { c.Delay, c.Corrupt = time.Millisecond, 0 }), netns.LabConfig{MTU: 9000, Queues: 3}},
		{"the longest frames behind a relay", with(func(c *impair.Config) { c.Delay = time.Millisecond }), netns.LabConfig{MTU: 65535, Queues: 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.lab.Path = &tc.cfg
			l := netnstest.Temp(t, tc.lab)
			n := 4000
			if l.MTU > 1500 {
				n = 500
			}
			if l.MTU > 9000 {
				n = 100 // as many bytes as the others
			}
			for _, way := range []impair.Direction{impair.FromHost, impair.ToHost} {
				from, to := ends(l, way)
				c := tc.cfg
				if c.Direction != impair.Both && c.Direction != way {
					c = impair.Config{}
				}
				in := frames(from, to, n, min(l.MTU+14, 65535)) // what IP can say
				want, wantCount := foretell(c, way, in)
				if c.Loss > 0 && n > 1000 {
					wantBinomial(t, "loss", int(wantCount.Lost), n, c.Loss)
					if wantCount.Duplicated == 0 || wantCount.Corrupted == 0 && c.Corrupt > 0 {
						t.Errorf("%v: %+v foretold, want some of everything", way, wantCount)
					}
				}
				before := counters(t, l, way)
				if before.Frames != 0 {
					t.Fatalf("%v: %+v before any traffic", way, before)
				}
				got := push(t, l, way, in, len(want))
				for i := range min(len(got), len(want)) {
					if !bytes.Equal(got[i], want[i]) {
						t.Fatalf("%v: frame %d is\n%x, want\n%x", way, i, got[i], want[i])
					}
				}
				if c.Delay > 0 {
					wantCount.Delayed = uint64(len(want))
				}
				if count := settled(t, l, way); count != wantCount {
					t.Errorf("%v: got %+v, want %+v", way, count, wantCount)
				}
			}
		})
	}
}

// The same traffic through two labs of one seed meets one fate, another seed's
// is another.
func TestSeedDecides(t *testing.T) {
	run := func(seed uint64) (lost string) {
		l := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Loss: 0.5, Seed: seed}})
		in := frames(l.Host, l.NIC, 200, 100)
		rx := rawSocket(t, l.NIC)
		send(t, l, impair.FromHost, rawSocket(t, l.Host), in)
		buf := make([]byte, 2048)
		for b := receive(t, rx, buf); b != nil; b = receive(t, rx, buf) {
			lost += fmt.Sprintln(binary.BigEndian.Uint64(b[42:]))
		}
		return lost
	}
	a, b, c := run(3), run(3), run(4)
	if a != b || a == c || a == "" {
		t.Errorf("seeds 3, 3 and 4 gave %q, %q, %q", a, b, c)
	}
}

// udp opens a UDP socket on a port of the lab.
func udp(t testing.TB, p netns.Port) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	err := p.NS.Do(func() (err error) {
		c, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.Addr.Addr(), 5000)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := testenv.ReadBuffer(c, 8<<20); err != nil {
		t.Fatal(err)
	}
	return c
}

// A bit that we flip is noticed: checksums are those of the bytes on the wire,
// of segments that the kernel cut as well. ARP is spared, or nothing would move.
func TestBrokenDatagramsAreNotDelivered(t *testing.T) {
	const size, n, segments = 1000, 1500, 3
	for _, corrupt := range []float64{0.5, 1} {
		t.Run(impair.FormatFraction(corrupt), func(t *testing.T) {
			l := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Corrupt: corrupt}})
			sockets := map[string]*net.UDPConn{l.NIC.Device: udp(t, l.NIC), l.Host.Device: udp(t, l.Host)}
			for _, way := range []impair.Direction{impair.FromHost, impair.ToHost} {
				from, to := ends(l, way)
				tx, rx := sockets[from.Device], sockets[to.Device]
				raw, err := tx.SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				err = raw.Control(func(fd uintptr) {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size)
				})
				if err != nil {
					t.Fatal(err)
				}
				sum := sha256.Sum256([]byte("payload"))
				payload := bytes.Repeat(append(bytes.Repeat(sum[:], size/len(sum)), sum[:size%len(sum)]...), segments)
				before := counters(t, l, way)
				for i := range n / segments {
					if _, err := tx.WriteToUDPAddrPort(payload, netip.AddrPortFrom(to.Addr.Addr(), 5000)); err != nil {
						t.Fatal(err)
					}
					for end := time.Now().Add(10 * time.Second); i%16 == 15 && counters(t, l, way).Frames < before.Frames+uint64(i+1)*segments && time.Now().Before(end); {
					}
				}
				got, buf := 0, make([]byte, 2*size)
				for {
					_ = rx.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
					k, _, err := rx.ReadFromUDPAddrPort(buf)
					if err != nil {
						break
					}
					got++
					if !bytes.Equal(buf[:k], payload[:size]) {
						t.Fatalf("%v: delivered %x", way, buf[:k])
					}
				}
				c := counters(t, l, way)
				broken := int(c.Corrupted - before.Corrupted)
				wantBinomial(t, "corruption", broken, n, corrupt)
				if got != n-broken {
					t.Errorf("%v: %d of %d datagrams delivered, %d were broken", way, got, n, broken)
				}
				snmp, err := to.NS.SNMP()
				if err != nil {
					t.Fatal(err)
				}
				if e := snmp["Udp"]["InCsumErrors"]; int(e) < broken*8/10 {
					t.Errorf("%v: %d checksum errors counted for %d broken datagrams", way, e, broken)
				}
			}
		})
	}
}

// Trains pass in one piece. Which of their segments are lost is foretold, and so is which copy is in the
// place of one. Linux, which cuts them at the receiving socket, finds their checksums right.
func TestTrainsLoseSegments(t *testing.T) {
	cfg := impair.Config{Loss: 0.03, Duplicate: 0.1, Seed: 5, Trains: true}
	l := netnstest.Temp(t, netns.LabConfig{Path: &cfg})
	for _, way := range []impair.Direction{impair.FromHost, impair.ToHost} {
		from, to := ends(l, way)
		for _, e := range [][2]netns.Port{{from, to}, {to, from}} { // or ARP would be impaired as well
			err := e[0].NS.Do(func() error {
				return netlink.NeighSet(&netlink.Neigh{LinkIndex: e[0].Index, State: netlink.NUD_PERMANENT, IP: e[1].Addr.Addr().AsSlice(), HardwareAddr: e[1].MAC})
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		tx, rx, raw := udp(t, from), udp(t, to), rawSocket(t, to)
		fd, err := tx.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		rnd, n := rand.New(rand.NewPCG(1, uint64(way))), counters(t, l, way).Frames
		var lost, copies, kept, whole, longest int
		got, buf := make([]byte, 1<<12), make([]byte, 1<<16)
		for i := range 400 {
			size, segments := 100+rnd.IntN(900), 1+rnd.IntN(60)
			train := make([]byte, segments*size)
			for k := range train {
				train[k] = byte(rnd.Uint32())
			}
			train = train[:len(train)-i%2*(1+rnd.IntN(size-1))]
			pieces := slices.Collect(slices.Chunk(train, size))

			var want [][]byte
			if segments > 1 {
				keep, gone := -1, make([]bool, segments)
				for k := range pieces {
					if gone[k] = impair.FateOf(cfg, way, n+uint64(k), 100).Lost; !gone[k] && len(pieces[k]) == size {
						keep = k
					}
				}
				if impair.FateOf(cfg, way, n, 100).Duplicated {
					want, copies = append(want, pieces...), copies+segments
				}
				switch short := len(pieces[segments-1]) < size; {
				case keep < 0 || short && gone[segments-1]:
					lost, whole = lost+segments, whole+1
				default:
					for k, p := range pieces {
						if gone[k] {
							p, lost = pieces[keep], lost+1
						} else {
							kept++
						}
						want = append(want, p)
					}
				}
			} else if f := impair.FateOf(cfg, way, n, 100); f.Lost {
				lost++
			} else {
				if want = pieces; f.Duplicated {
					want, copies = append(want, pieces...), copies+1
				}
			}
			n += uint64(segments)

			cerr := fd.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size) })
			if err := errors.Join(cerr, err); err != nil {
				t.Fatal(err)
			}
			if _, err := tx.WriteToUDPAddrPort(train, netip.AddrPortFrom(to.Addr.Addr(), 5000)); err != nil {
				t.Fatal(err)
			}
			for k, w := range want {
				_ = rx.SetReadDeadline(time.Now().Add(5 * time.Second))
				m, _, err := rx.ReadFromUDPAddrPort(got)
				if err != nil || !bytes.Equal(got[:m], w) {
					t.Fatalf("%v, train %d of %d segments: datagram %d of %d: %v\n%x, want\n%x", way, i, segments, k, len(want), err, got[:m], w)
				}
			}
			if len(want) > 0 {
				longest = max(longest, len(receive(t, raw, buf)))
			}
		}
		c := counters(t, l, way)
		if c.Frames != n || int(c.Lost) != lost || int(c.Duplicated) != copies {
			t.Errorf("%v: %+v, want %d frames, %d lost and %d duplicated", way, c, n, lost, copies)
		}
		if lost < 100 || copies < 100 || whole == 0 || kept < 5000 {
			t.Errorf("%v: %d lost, %d copies, %d trains lost whole and %d segments kept: the seed tries too little", way, lost, copies, whole, kept)
		}
		if longest < 20_000 {
			t.Errorf("%v: no frame was longer than %d bytes: trains were cut", way, longest)
		}
		_ = rx.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if m, _, err := rx.ReadFromUDPAddrPort(got); err == nil {
			t.Errorf("%v: one more datagram came: %x", way, got[:m])
		}
		tx.Close()
		rx.Close()
	}
}

// stamped makes frames that carry the time when they were made, just before
// sending.
func stamp(b []byte) { binary.BigEndian.PutUint64(b[42:], uint64(clock.Monotonic())) }

func TestNoFrameComesBeforeItsDelay(t *testing.T) {
	for _, delay := range []time.Duration{100 * time.Microsecond, 2 * time.Millisecond, 30 * time.Millisecond} {
		t.Run(delay.String(), func(t *testing.T) {
			l := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Delay: delay}})
			for _, way := range []impair.Direction{impair.FromHost, impair.ToHost} {
				from, to := ends(l, way)
				tx, rx := rawSocket(t, from), rawSocket(t, to)
				const n = 300
				var wg sync.WaitGroup
				wg.Go(func() {
					for i, b := range frames(from, to, n, 1514) {
						stamp(b)
						if err := unix.Sendto(tx, b, 0, &unix.SockaddrLinklayer{Ifindex: from.Index}); err != nil {
							t.Error(err)
						}
						if i%10 == 0 {
							time.Sleep(delay / 7) // bursts, and pauses in which the relay sleeps
						}
					}
				})
				buf := make([]byte, 2048)
				least, last := time.Hour, uint64(0)
				for i := range n {
					b := receive(t, rx, buf)
					if b == nil {
						t.Fatalf("%v: %d frames came, want %d", way, i, n)
					}
					sent := binary.BigEndian.Uint64(b[42:])
					if sent < last {
						t.Errorf("%v: frame %d overtook another", way, i)
					}
					last = sent
					least = min(least, time.Duration(uint64(clock.Monotonic())-sent))
				}
				wg.Wait()
				t.Logf("%v: the fastest took %v", way, least)
				if least < delay {
					t.Errorf("%v: a frame came after %v, want %v", way, least, delay)
				}
				if c := settled(t, l, way); c.Delayed != n || c.Reordered != 0 || c.Waiting != 0 || c.Overflowed != 0 {
					t.Errorf("%v: %+v, want %d delayed", way, c, n)
				}
			}
		})
	}
}

// Which frames do not wait is known beforehand; the others keep their order.
func TestReorderedFramesOvertake(t *testing.T) {
	c := impair.Config{Delay: 20 * time.Millisecond, Reorder: 0.1, Seed: 5}
	l := netnstest.Temp(t, netns.LabConfig{Path: &c})
	for _, way := range []impair.Direction{impair.FromHost, impair.ToHost} {
		from, to := ends(l, way)
		const n = 1000
		got := push(t, l, way, frames(from, to, n, 200), n)
		chosen := func(b []byte) bool { return impair.FateOf(c, way, binary.BigEndian.Uint64(b[42:]), len(b)).Reordered }
		var last [2]int64 // of those that waited, and of the others
		overtook, reordered, most := 0, 0, int64(-1)
		for _, b := range got {
			i := int64(binary.BigEndian.Uint64(b[42:]))
			kind := 0
			if chosen(b) {
				kind = 1
				reordered++
			} else if i < most {
				overtook++
			}
			if i < last[kind] {
				t.Errorf("%v: frame %d came after frame %d of the same kind", way, i, last[kind])
			}
			last[kind], most = i, max(most, i)
		}
		count := settled(t, l, way)
		wantBinomial(t, "reordering", reordered, n, c.Reorder)
		if overtook == 0 || count.Reordered != uint64(reordered) || count.Delayed != n-uint64(reordered) {
			t.Errorf("%v: %d frames overtaken, %d reordered, counters %+v", way, overtook, reordered, count)
		}
	}
}

// Whatever is thrown at it, no more than the rate and one burst comes through,
// and what does not is counted.
func TestRateIsALimit(t *testing.T) {
	testenv.NeedTime(t) // frames must come faster than the rate lets them go
	for _, delay := range []time.Duration{0, time.Millisecond} {
		t.Run("delay "+delay.String(), func(t *testing.T) {
			c := impair.Config{Rate: 20e6, Delay: delay}
			l := netnstest.Temp(t, netns.LabConfig{Path: &c})
			for _, way := range []impair.Direction{impair.FromHost, impair.ToHost} {
				from, to := ends(l, way)
				tx, rx := rawSocket(t, from), rawSocket(t, to)
				in := frames(from, to, 1000, 1514) // 0.8 MB, much more than burst and queue
				start := time.Now()
				send(t, l, way, tx, in)
				buf := make([]byte, 2048)
				bytes, n, last := 0, 0, start
				for b := receive(t, rx, buf); b != nil; b = receive(t, rx, buf) {
					last = time.Now()
					bytes += len(b)
					n++
				}
				count := settled(t, l, way)
				if uint64(n)+count.RateDropped != uint64(len(in)) || count.RateDropped == 0 {
					t.Errorf("%v: %d frames came of %d, counters %+v", way, n, len(in), count)
				}
				if bytes < impair.Backlog(c.Rate, l.MTU)/2 {
					t.Errorf("%v: only %d bytes came, the queue alone has %d", way, bytes, impair.Backlog(c.Rate, l.MTU))
				}
				// Our clock starts before the first frame and stops after the last.
				most := int(float64(c.Rate)/8*last.Sub(start).Seconds()) + impair.Burst(c.Rate, l.MTU) + 1514
				if bytes > most {
					t.Errorf("%v: %d bytes came in %v, at most %d can", way, bytes, last.Sub(start), most)
				}
			}
		})
	}
}

// TCP comes through everything at once, whole.
func TestTCPComesThrough(t *testing.T) {
	c := impair.Config{Loss: 0.01, Duplicate: 0.01, Corrupt: 0.01, Reorder: 0.01, Delay: 500 * time.Microsecond, Rate: 1e9}
	l := netnstest.Temp(t, netns.LabConfig{Path: &c})
	for _, way := range []impair.Direction{impair.FromHost, impair.ToHost} {
		from, to := ends(l, way)
		var ln net.Listener
		err := to.NS.Do(func() (err error) {
			ln, err = net.Listen("tcp4", netip.AddrPortFrom(to.Addr.Addr(), 6000).String())
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		data := make([]byte, 2<<20)
		chacha := rand.NewChaCha8([32]byte{1})
		_, _ = chacha.Read(data)
		var wg sync.WaitGroup
		wg.Go(func() {
			err := from.NS.Do(func() error {
				d := net.Dialer{Timeout: 30 * time.Second}
				conn, err := d.Dial("tcp4", ln.Addr().String())
				if err != nil {
					return err
				}
				defer conn.Close()
				_, err = conn.Write(data)
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
		_ = ln.(*net.TCPListener).SetDeadline(time.Now().Add(30 * time.Second))
		conn, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(60 * time.Second))
		got, err := io.ReadAll(conn)
		conn.Close()
		wg.Wait()
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%v: %d bytes came, %v, want %d", way, len(got), err, len(data))
		}
		// Had segments been merged before they were impaired, it would be more.
		n := counters(t, l, way)
		if most := n.Frames * uint64(l.MTU+14); n.Bytes > most {
			t.Errorf("%v: %d bytes in %d frames, want %d at most", way, n.Bytes, n.Frames, most)
		}
		if n.Lost == 0 || n.Duplicated == 0 || n.Corrupted == 0 || n.Reordered == 0 || n.Bytes < uint64(len(data)) {
			t.Errorf("%v: %+v, want some of everything", way, n)
		}
	}
}

// An idle relay does not run.
func TestIdleRelaySleeps(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Delay: time.Millisecond, Reorder: 0.5}})
	push(t, l, impair.FromHost, frames(l.Host, l.NIC, 10, 100), 10)
	var before, after unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &before); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	if err := unix.Getrusage(unix.RUSAGE_SELF, &after); err != nil {
		t.Fatal(err)
	}
	// A relay that looked at its rings every 100 us would be at 5000.
	if n := after.Nvcsw - before.Nvcsw; n > 500 {
		t.Errorf("%d sleeps in 0.5 s without a frame", n)
	}
}

// What a NIC sends from within XDP comes through, with a relay and without.
func TestFramesFromXDPComeThrough(t *testing.T) {
	for _, delay := range []time.Duration{0, time.Millisecond} {
		t.Run("delay "+delay.String(), func(t *testing.T) {
			l := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Delay: delay}})
			prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.XDP, License: "GPL",
				Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 3), asm.Return()}, // XDP_TX
			})
			if err != nil {
				t.Fatal(err)
			}
			defer prog.Close()
			var lnk link.Link
			err = l.NIC.NS.Do(func() (err error) {
				lnk, err = link.AttachXDP(link.XDPOptions{Program: prog, Interface: l.NIC.Index, Flags: link.XDPDriverMode})
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			defer lnk.Close()
			in := frames(l.Host, l.NIC, 100, 1514)
			rx := rawSocket(t, l.Host)
			send(t, l, impair.FromHost, rawSocket(t, l.Host), in)
			buf := make([]byte, 2048)
			for i, want := range in {
				if got := receive(t, rx, buf); !bytes.Equal(got, want) {
					t.Fatalf("frame %d is\n%x, want\n%x", i, got, want)
				}
			}
			if c := settled(t, l, impair.ToHost); c.Frames != uint64(len(in)) {
				t.Errorf("%+v, want %d frames sent by the NIC", c, len(in))
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// echoAtTC is a lab whose NIC echoes datagrams to port 7, at tc alone.
func echoAtTC(t *testing.T) (lab *netns.Lab, in *Ingress, h *Handlers) {
	t.Helper()
	lab = netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) { in = loaded(t, nic, Native) })
	h = builtinAt(t, TC, "echo-udp", nil)
	must(t, in.SetHandlers(handled, h))
	must(t, in.Publish(&matcher.Table{Generation: 1, Entries: map[int]matcher.Entry{
		9: {Ruleset: matcher.UDPPort(7), Context: handled, Format: matcher.FormatByName("packet")},
	}}, map[uint16]Delivery{handled: {Kernel: true, Hook: TC}}))
	must(t, in.AttachTC(Last))
	return lab, in, h
}

// sendTrain sends data as datagrams of size bytes each, the last with what is left, which leave the socket as one.
func sendTrain(t *testing.T, c *net.UDPConn, data []byte, size int) {
	t.Helper()
	raw, err := c.SyscallConn()
	must(t, err)
	cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size) })
	must(t, errors.Join(err, cerr))
	_, err = c.Write(data)
	must(t, err)
}

// receive returns the next datagram.
func receive(t *testing.T, c *net.UDPConn) []byte {
	t.Helper()
	must(t, c.SetReadDeadline(time.Now().Add(testenv.Slowness()*20*time.Second)))
	b := make([]byte, 1<<16)
	n, err := c.Read(b)
	must(t, err)
	return b[:n]
}

// comeBack checks that datagrams that are sent, as a train or alone, come back.
func comeBack(t *testing.T, c *net.UDPConn, data []byte, size int) {
	t.Helper()
	sendTrain(t, c, data, size)
	for rest := data; len(rest) > 0; {
		n := min(size, len(rest))
		if got := receive(t, c); !bytes.Equal(got, rest[:n]) {
			t.Fatalf("%d bytes in datagrams of %d, byte %d: %d bytes came back, want %d", len(data), size, len(data)-len(rest), len(got), n)
		}
		rest = rest[n:]
	}
}

func randomBytes(rnd *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	return b
}

// An ordinary socket's trains come to tc in one piece, and what is echoed are all their datagrams.
func TestTrainsOfSocketsAreEchoedAtTC(t *testing.T) {
	lab, in, h := echoAtTC(t)
	client := clientOf(t, lab)
	rnd := rand.New(rand.NewPCG(1, 5))
	datagrams, frames := uint64(0), uint64(0)
	for _, tt := range []struct{ bytes, size int }{
		{1, 1000}, {17, 1000}, {1000, 1000}, {1472, 1472}, // alone
		{2000, 1000}, {1001, 1000}, {1999, 1000}, {64, 1}, {100, 7}, // trains, of short ones and with short ends
		{64 * 900, 900}, {44 * 1472, 1472}, {43*1472 + 1, 1472}, // as long as they can be
	} {
		comeBack(t, client, randomBytes(rnd, tt.bytes), tt.size)
		datagrams += uint64((tt.bytes + tt.size - 1) / tt.size)
		frames++
		if s := addUp(t, in); s.Matched[9] != frames || s.Kernel[handled] != frames || s.Failed+s.Trains+s.Malformed != 0 {
			t.Fatalf("%d bytes in datagrams of %d: %d frames matched, %d handled, want %d", tt.bytes, tt.size, s.Matched[9], s.Kernel[handled], frames)
		}
		if s := h.Stats(); s.Sent != datagrams || s.Uncut+s.Mixed != 0 {
			t.Fatalf("%d bytes in datagrams of %d: %d sent, want %d", tt.bytes, tt.size, s.Sent, datagrams)
		}
	}
}

// A program of somebody else's that decides keeps frames from those behind it; one that does not is in nobody's
// way.
func TestForeignProgramsAtTC(t *testing.T) {
	lab, in, h := echoAtTC(t)
	client := clientOf(t, lab)
	const shot = 2 // TC_ACT_SHOT
	for _, tt := range []struct {
		name         string
		anchor       link.Anchor
		verdict      int32
		theirs, ours bool // who gets datagrams that we echo
	}{
		{"before ours, passes", link.Head(), tcxNext, true, true},
		{"before ours, drops", link.Head(), shot, true, false},
		{"behind ours, passes", link.Tail(), tcxNext, false, true},
		{"behind ours, drops", link.Tail(), shot, false, true},
	} {
		var count func() uint64
		var detach func()
		inside(t, lab.NIC, func(nic *net.Interface) {
			var ins asm.Instructions
			count, ins = counting(t, sentSize, tt.verdict)
			_, detach = foreignTC(t, nic, tt.anchor, ins...)
		})
		before := h.Stats()
		sendTo(t, client, 5)
		if tt.ours {
			for range 5 {
				receive(t, client)
			}
		} else {
			soon(t, "they get 5", func() bool { return count() == 5 })
		}
		want := [2]uint64{}
		if tt.theirs {
			want[0] = 5
		}
		if tt.ours {
			want[1] = 5
		}
		if got := [2]uint64{count(), h.Stats().Sent - before.Sent}; got != want {
			t.Errorf("%s: they got %d and we %d, want %d", tt.name, got[0], got[1], want)
		}
		detach()
	}
	// They get the frames that ours leaves to Linux.
	must(t, in.ClearHandlers(handled))
	inside(t, lab.NIC, func(nic *net.Interface) {
		count, ins := counting(t, sentSize, shot)
		foreignTC(t, nic, link.Tail(), ins...)
		sendTo(t, client, 5)
		soon(t, "they get 5", func() bool { return count() == 5 })
	})
}

// The program stays at tc whatever becomes of the interface, and goes when it is told to.
func TestInterfacesAtTCComeAndGo(t *testing.T) {
	lab, in, h := echoAtTC(t)
	client := clientOf(t, lab)
	works := func(when string) {
		t.Helper()
		before := h.Stats().Sent
		soon(t, when+": a datagram is sent", func() bool { _, err := client.Write([]byte("hi")); return err == nil })
		soon(t, when+": it is echoed", func() bool {
			if h.Stats().Sent == before {
				_, _ = client.Write([]byte("hi")) // lost while the link came up
			}
			return h.Stats().Sent > before
		})
	}
	works("at first")
	inside(t, lab.NIC, func(nic *net.Interface) {
		l, err := netlink.LinkByIndex(nic.Index)
		must(t, err)
		must(t, netlink.LinkSetDown(l))
		must(t, netlink.LinkSetName(l, "renamed"))
		must(t, netlink.LinkSetUp(l))
	})
	works("down, renamed, and up")
	inside(t, netns.Port{End: netns.End{Device: "renamed"}, NS: lab.NIC.NS}, func(nic *net.Interface) {
		l, err := netlink.LinkByIndex(nic.Index)
		must(t, err)
		if got := atTC(t, nic); len(got) != 1 {
			t.Errorf("programs %d", got)
		}
		must(t, in.DetachHook(TC))
		if got := atTC(t, nic); len(got) != 0 {
			t.Errorf("detached: programs %d", got)
		}
		must(t, in.AttachTC(First))
		must(t, netlink.LinkSetName(l, lab.NIC.Device+"x")) // with the program, while it is up
	})
	works("attached anew")
	// In another namespace: it is there still, and can be taken away.
	host, err := os.Open(lab.Host.NS.Path())
	must(t, err)
	defer host.Close()
	inside(t, netns.Port{End: netns.End{Device: lab.NIC.Device + "x"}, NS: lab.NIC.NS}, func(nic *net.Interface) {
		l, err := netlink.LinkByIndex(nic.Index)
		must(t, err)
		must(t, netlink.LinkSetNsFd(l, int(host.Fd())))
	})
	inside(t, netns.Port{End: netns.End{Device: lab.NIC.Device + "x"}, NS: lab.Host.NS}, func(nic *net.Interface) {
		if got := atTC(t, nic); len(got) != 1 {
			t.Errorf("moved: programs %d", got)
		}
		must(t, in.DetachHook(TC))
		if got := atTC(t, nic); len(got) != 0 {
			t.Errorf("moved and detached: programs %d", got)
		}
		l, err := netlink.LinkByIndex(nic.Index)
		must(t, err)
		must(t, netlink.LinkDel(l)) // its namespaces have nothing else
	})
	// Where it was, it is not found any more.
	if err := in.AttachTC(Last); err == nil {
		t.Error("attached to an interface that is not there")
	}
}

// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bufio"
	"bytes"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// The tests here send packets that PROG_RUN cannot make, as Linux's stack has them at tc.

// onTC attaches the program at tc to the NIC's end of a lab, with handlers that drop what the ruleset matches.
func onTC(t *testing.T, rs matcher.Ruleset) (*netns.Lab, *Ingress) {
	t.Helper()
	lab := netnstest.Temp(t, netns.LabConfig{})
	var in *Ingress
	inside(t, lab.NIC, func(nic *net.Interface) {
		var err error
		if in, err = Load(config(nic, Native)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close() })
		if err := in.AttachTC(Last); err != nil {
			t.Fatal(err)
		}
	})
	if err := in.SetHandlers(handled, builtinAt(t, TC, "count", map[string]any{"to": "drop"})); err != nil {
		t.Fatal(err)
	}
	table := &matcher.Table{Generation: 1, Entries: map[int]matcher.Entry{9: {Ruleset: rs, Context: handled, Format: matcher.FormatByName("packet")}}}
	if err := in.Publish(table, map[uint16]Delivery{handled: {Kernel: true, Hook: TC}}); err != nil {
		t.Fatal(err)
	}
	return lab, in
}

// trains is a socket in a namespace that sends each buffer as datagrams of this size.
func trains(t *testing.T, ns *netns.Namespace, to netip.AddrPort, size int) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	if err := ns.Do(func() (err error) {
		c, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(to))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size) }); err != nil || set != nil {
		t.Fatal(err, set)
	}
	return c
}

func write(t *testing.T, c *net.UDPConn, b []byte) {
	t.Helper()
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
}

// A train of a socket has nothing but headers in one piece: rules find what is behind them all the same.
func TestRulesReachIntoAPacketInPieces(t *testing.T) {
	rs := matcher.UDPPort(7)
	rs.Rules = append(rs.Rules, matcher.Rule{Index: 11, Mask: 0xffffffff, Start: 0x5a5a5a5a, End: 0x5a5a5a5a}) // bytes 2 to 5 of the payload
	lab, in := onTC(t, rs)
	c := trains(t, lab.Host.NS, netip.AddrPortFrom(lab.NIC.Addr.Addr(), 7), 1000)
	hit, miss := bytes.Repeat([]byte{0x5a}, 8000), bytes.Repeat([]byte{0x5a}, 8000)
	miss[5]++
	// Nobody has the port: the refusal of a miss is told to a later write.
	send := func(b []byte) {
		for {
			if _, err := c.Write(b); err == nil {
				return
			}
		}
	}
	for range 20 {
		send(miss)
		send(hit)
	}
	soon(t, "all trains have come", func() bool { s := in.mustStats(t); return s.Kernel[handled] >= 20 && s.Passed >= 20 })
	if s := in.mustStats(t); s.Matched[9] != 20 || s.Kernel[handled] != 20 {
		t.Errorf("%d matched, %d handled, want the 20 trains that were meant", s.Matched[9], s.Kernel[handled])
	}
}

// Linux takes the tag out of a frame before tc. It is no frame without one all the same.
func TestTaggedFramesOfTheWireAreNotMatched(t *testing.T) {
	lab, in := onTC(t, matcher.UDPPort(7))
	plain := bytes.Clone(datagramOf(40))
	copy(plain, lab.NIC.MAC)
	tagged := append(append(bytes.Clone(plain[:12]), 0x81, 0x00, 0x00, 0x05), plain[12:]...)
	if err := lab.Host.NS.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		to := &unix.SockaddrLinklayer{Ifindex: lab.Host.Index}
		for range 50 {
			if err := unix.Sendto(fd, tagged, 0, to); err != nil {
				return err
			}
		}
		return unix.Sendto(fd, plain, 0, to)
	}); err != nil {
		t.Fatal(err)
	}
	soon(t, "all frames have come", func() bool { s := in.mustStats(t); return s.Passed >= 50 && s.Kernel[handled] >= 1 })
	if s := in.mustStats(t); s.Matched[9] != 1 || s.Kernel[handled] != 1 {
		t.Errorf("%d matched, %d handled, want the one without a tag", s.Matched[9], s.Kernel[handled])
	}
}

// The segments of a train in a tunnel have headers of their own behind those of the tunnel, which nobody here
// would give the right lengths.
func TestTrainsInTunnelsGoToLinux(t *testing.T) {
	const port = 4789
	lab, in := onTC(t, matcher.UDPPort(port))
	inner := netip.MustParsePrefix("10.99.0.1/24")
	if err := lab.Host.NS.Do(func() error {
		h, err := netlink.NewHandle()
		if err != nil {
			return err
		}
		defer h.Close()
		v := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "tunnel"}, VxlanId: 5, VtepDevIndex: lab.Host.Index, Group: lab.NIC.Addr.Addr().AsSlice(), Port: port}
		if err := h.LinkAdd(v); err != nil {
			return err
		}
		if err := h.AddrAdd(v, &netlink.Addr{IPNet: &net.IPNet{IP: inner.Addr().AsSlice(), Mask: net.CIDRMask(inner.Bits(), 32)}}); err != nil {
			return err
		}
		if err := h.LinkSetUp(v); err != nil {
			return err
		}
		return h.NeighSet(&netlink.Neigh{LinkIndex: v.Index, State: netlink.NUD_PERMANENT, IP: inner.Addr().Next().AsSlice(), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9}})
	}); err != nil {
		t.Fatal(err)
	}
	c := trains(t, lab.Host.NS, netip.AddrPortFrom(inner.Addr().Next(), 7), 1000)
	write(t, c, make([]byte, 8000))
	soon(t, "the train has come", func() bool { return in.mustStats(t).Trains >= 1 })
	before := in.mustStats(t).Kernel[handled] // of what else the tunnel sends: single packets
	write(t, c, make([]byte, 500))
	soon(t, "a single packet of the tunnel is handled", func() bool { return in.mustStats(t).Kernel[handled] > before })
	if s := in.mustStats(t); s.Trains != 1 || s.Matched[9] != s.Kernel[handled]+1 {
		t.Errorf("%d trains, %d matched, %d handled", s.Trains, s.Matched[9], s.Kernel[handled])
	}
}

const childEnv = "XSPIN_TEST_ATTACHES_TO"

// A process that is killed leaves nothing at either hook.
func TestKilledProcessesLeaveNoProgram(t *testing.T) {
	if device := os.Getenv(childEnv); device != "" { // the process
		nic, err := net.InterfaceByName(device)
		if err != nil {
			t.Fatal(err)
		}
		in, err := Load(config(nic, Native))
		if err != nil {
			t.Fatal(err)
		}
		if err := in.AttachTC(Last); err != nil {
			t.Fatal(err)
		}
		if err := in.AttachXDP(); err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString("attached\n")
		select {}
	}
	lab := netnstest.Temp(t, netns.LabConfig{})
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	there := func() (xdp ebpf.ProgramID, tc int) {
		inside(t, lab.NIC, func(nic *net.Interface) {
			xdp, _ = attached(t, nic)
			q, err := link.QueryPrograms(link.QueryOptions{Target: nic.Index, Attach: ebpf.AttachTCXIngress})
			if err != nil {
				t.Fatal(err)
			}
			tc = len(q.Programs)
		})
		return xdp, tc
	}
	for range 3 {
		c := lab.NIC.NS.Command(t.Context(), exe, "-test.run=^"+t.Name()+"$")
		c.Env = append(os.Environ(), childEnv+"="+lab.NIC.Device)
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		var said []string
		ready := false
		for s := bufio.NewScanner(out); !ready && s.Scan(); {
			said = append(said, s.Text())
			ready = s.Text() == "attached"
		}
		xdp, tc := there()
		_ = c.Process.Kill()
		_ = c.Wait()
		if !ready || xdp == 0 || tc != 1 {
			t.Fatalf("while it ran: program %d at xdp, %d at tc; it said %s", xdp, tc, strings.Join(said, "\n"))
		}
		if xdp, tc := there(); xdp != 0 || tc != 0 {
			t.Errorf("it was killed: program %d at xdp, %d at tc", xdp, tc)
		}
	}
}

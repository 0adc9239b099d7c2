// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
)

// echoAll is echo for packets of several buffers. Counter 0 gets the buffers.
func echoAll(h *hpu.HER) spin.Code {
	h.Count(0, uint64(h.Segments()))
	rest := h.Rest(nil)
	hdr := h.Headers()
	ok := hdr.ICMP != nil && hdr.ReplyICMPEcho(rest...) || hdr.UDP != nil && hdr.ReplyUDP(rest...)
	if !ok || h.Send() != nil {
		return spin.Fail
	}
	return spin.Success
}

func handle(f hpu.Handler) hpu.Handlers { return hpu.Handlers{Payload: f} }

func sets(r ...matcher.Ruleset) []matcher.Ruleset { return r }

// snmp reads one of a namespace's counters.
func snmp(t testing.TB, ns *netns.Namespace, proto, name string) uint64 {
	t.Helper()
	all, err := ns.SNMP()
	if err != nil {
		t.Fatal(err)
	}
	v, ok := all[proto][name]
	if !ok {
		t.Fatalf("no counter %s %s", proto, name)
	}
	return v
}

// program reads the counters of the NIC's program.
func program(t testing.TB, n *nic.NIC) loader.Stats {
	t.Helper()
	s, err := n.Program()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// listenUDP listens in a namespace.
func listenUDP(t testing.TB, port netns.Port, udp uint16) *net.UDPConn {
	t.Helper()
	var conn *net.UDPConn
	err := port.NS.Do(func() (err error) {
		conn, err = net.ListenUDP("udp4", &net.UDPAddr{IP: port.Addr.Addr().AsSlice(), Port: int(udp)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func write(t testing.TB, conn net.Conn, msg []byte) {
	t.Helper()
	if _, err := conn.Write(msg); err != nil {
		t.Fatal(err)
	}
}

// expect reads one datagram, or what a stream has, and compares.
func expect(t testing.TB, conn net.Conn, want []byte) {
	t.Helper()
	conn.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
	buf := make([]byte, 1<<16)
	k, err := conn.Read(buf)
	if err != nil {
		t.Fatalf("waiting for %d bytes %.20q: %v", len(want), want, err)
	}
	if !bytes.Equal(buf[:k], want) {
		t.Fatalf("%d bytes %.20q came, want %d bytes %.20q", k, buf[:k], len(want), want)
	}
}

// roundTrip sends a datagram and waits for it to come back.
func roundTrip(t testing.TB, conn net.Conn, msg []byte) {
	t.Helper()
	write(t, conn, msg)
	expect(t, conn, msg)
}

// idle waits until all buffers of a context are back.
func idle(t testing.TB, c *nic.Context) {
	t.Helper()
	eventually(t, fmt.Sprintf("all buffers of %s back", c.Name()), func() bool { return c.InFlight() == 0 })
}

// The sender's kernel leaves the checksum to be completed, the receiver's one
// verifies what the handler sent.
func TestKernelAcceptsChecksumsOfReplies(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	swapOnly := func(h *hpu.HER) spin.Code {
		hdr := h.Headers()
		if hdr.UDPChecksumPartial() {
			h.Count(0, 1)
		}
		hdr.Ethernet.Swap()
		hdr.IPv4.SwapAddrs()
		hdr.UDP.SwapPorts()
		if h.Send() != nil {
			return spin.Fail
		}
		return spin.Success
	}
	run(t, n, nic.ContextSpec{Name: "right", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)})
	wrong := run(t, n, nic.ContextSpec{Name: "wrong", Rulesets: sets(matcher.UDPPort(8)), Handlers: handle(swapOnly)})

	bad := snmp(t, lab.Host.NS, "Udp", "InCsumErrors")
	conn := dialUDP(t, lab, 7)
	for _, size := range []int{0, 1, 2, 3, 63, 64, 65, 1471, 1472} {
		roundTrip(t, conn, bytes.Repeat([]byte{0xa5}, size))
	}
	if now := snmp(t, lab.Host.NS, "Udp", "InCsumErrors"); now != bad {
		t.Errorf("%d replies with wrong checksums", now-bad)
	}

	write(t, dialUDP(t, lab, 8), []byte("partial"))
	eventually(t, "a reply with the partial checksum copied is refused", func() bool {
		return snmp(t, lab.Host.NS, "Udp", "InCsumErrors") == bad+1
	})
	eventually(t, "its datagram counts as one with a partial checksum, or the test shows nothing", func() bool {
		return wrong.Stats().User[0].Sum == 1
	})
}

func TestFragmentedPingIsAnsweredByLinux(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	c := run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echo)})
	before := snmp(t, lab.NIC.NS, "Icmp", "InEchos")
	ping(t, lab, "-c", "5", "-i", "0.002", "-s", "4000")
	if k := snmp(t, lab.NIC.NS, "Icmp", "InEchos") - before; k != 5 {
		t.Errorf("the kernel saw %d of 5 requests", k)
	}
	ping(t, lab, "-c", "5", "-i", "0.002", "-s", "1472") // one fragment
	eventually(t, "5 whole ones handled", func() bool { return c.Stats().Handled == 5 })
	if k := snmp(t, lab.NIC.NS, "Icmp", "InEchos") - before; k != 5 {
		t.Errorf("the kernel saw %d requests, want 5", k)
	}
}

// echoTCP sends bytes to a server on port 7 of the NIC's end, and back.
func echoTCP(t *testing.T, lab *netns.Lab, size int) {
	var l net.Listener
	err := lab.NIC.NS.Do(func() (err error) {
		l, err = net.Listen("tcp4", lab.NIC.Addr.Addr().String()+":7")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if conn, err := l.Accept(); err == nil {
			io.Copy(conn, conn)
			conn.Close()
		}
	}()
	var conn net.Conn
	err = lab.Host.NS.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp4", l.Addr().String(), 5*time.Second)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	msg := bytes.Repeat([]byte("xspin"), size/5)
	conn.SetDeadline(time.Now().Add(testenv.Slowness() * 10 * time.Second))
	go func() {
		conn.Write(msg)
		conn.(*net.TCPConn).CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, msg) {
		t.Errorf("%d of %d bytes came back, error: %v", len(got), len(msg), err)
	}
}

func TestUnmatchedTrafficReachesTheKernel(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	c := run(t, n, nic.ContextSpec{Name: "udp", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)})

	t.Run("ARP", func(t *testing.T) {
		ping(t, lab, "-c", "1")
		for _, p := range []struct{ here, there netns.Port }{{lab.Host, lab.NIC}, {lab.NIC, lab.Host}} {
			err := p.here.NS.Do(func() error {
				return netlink.NeighDel(&netlink.Neigh{LinkIndex: p.here.Index, IP: p.there.Addr.Addr().AsSlice()})
			})
			if err != nil {
				t.Errorf("forget the neighbour of %s: %v", p.here.Device, err)
			}
		}
		ping(t, lab, "-c", "1")
		var neigh []netlink.Neigh
		err := lab.Host.NS.Do(func() (err error) {
			neigh, err = netlink.NeighList(lab.Host.Index, netlink.FAMILY_V4)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(neigh, func(e netlink.Neigh) bool {
			return e.IP.Equal(lab.NIC.Addr.Addr().AsSlice()) && bytes.Equal(e.HardwareAddr, lab.NIC.MAC)
		}) {
			t.Errorf("%v was not resolved: %v", lab.NIC.Addr, neigh)
		}
	})

	t.Run("TCP", func(t *testing.T) { echoTCP(t, lab, 500_000) })

	t.Run("UDP to another port", func(t *testing.T) {
		server := listenUDP(t, lab.NIC, 8)
		conn := dialUDP(t, lab, 8)
		for i := range 50 {
			msg := fmt.Appendf(nil, "datagram %d", i)
			write(t, conn, msg)
			expect(t, server, msg)
		}
	})

	if h := c.Stats().Handled; h != 0 {
		t.Errorf("handlers saw %d packets", h)
	}
	roundTrip(t, dialUDP(t, lab, 7), []byte("matched")) // all the while
}

func TestHandlerHandsPacketsToTheStack(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{MTU: 9000})
	n := open(t, lab, nic.Config{})
	failures := make(chan error, 10)
	c := run(t, n, nic.ContextSpec{Name: "pass", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(func(h *hpu.HER) spin.Code {
		if err := h.ToStack(); err != nil {
			failures <- err
			return spin.Drop
		}
		return spin.Success
	})})
	server := listenUDP(t, lab.NIC, 7)
	conn := dialUDP(t, lab, 7)
	sent := 0
	for _, size := range []int{0, 1, 100, 1472, 3000, loader.MaxInject - 42} {
		msg := bytes.Repeat([]byte{byte(size), 'x'}, size/2+1)[:size]
		write(t, conn, msg)
		expect(t, server, msg)
		sent++
	}
	for i := range 200 {
		msg := fmt.Appendf(nil, "datagram %d", i)
		write(t, conn, msg)
		expect(t, server, msg)
		sent++
	}
	write(t, conn, make([]byte, loader.MaxInject-41))
	select {
	case err := <-failures:
		if !errors.Is(err, loader.ErrInjectSize) {
			t.Errorf("a packet that is too long: %v", err)
		}
	case <-time.After(testenv.Slowness() * 5 * time.Second):
		t.Error("a packet that is too long: no error")
	}
	eventually(t, "all counted", func() bool {
		s := c.Stats()
		return s.ToStack == uint64(sent) && s.Dropped == 1 && s.Handled == uint64(sent)+1
	})
	idle(t, c)
}

// Connections go on as if nothing were in between, partial checksums or not.
func TestHandlerHandsTCPToTheStack(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	c := run(t, n, nic.ContextSpec{Name: "pass", Rulesets: sets(matcher.TCPPort(7)), Handlers: handle(func(h *hpu.HER) spin.Code {
		if h.ToStack() != nil {
			return spin.Fail
		}
		return spin.Success
	})})
	echoTCP(t, lab, 20_000)
	eventually(t, "all packets of the connection were handed to the stack", func() bool {
		return c.Stats().ToStack == program(t, n).Matched[c.Rulesets()[0]]
	})
}

func TestFloodedContextDoesNotHurtAnother(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
	n := open(t, lab, nic.Config{HPUs: 2, Workers: 2, Ring: 256, Limit: time.Minute})
	gate := make(chan struct{})
	slow := run(t, n, nic.ContextSpec{
		Name: "slow", Rulesets: sets(matcher.UDPPort(9)), Credits: 16, CoreMask: 1,
		Handlers: handle(func(*hpu.HER) spin.Code { <-gate; return spin.Success }),
	})
	fast := run(t, n, nic.ContextSpec{Name: "fast", Rulesets: sets(matcher.UDPPort(7)), CoreMask: 2, Handlers: handle(echo)})
	opened := false
	defer func() {
		if !opened {
			close(gate)
		}
	}()

	flood, conn := dialUDP(t, lab, 9), dialUDP(t, lab, 7)
	const rounds, burst = 200, 8
	for i := range rounds {
		for range burst {
			write(t, flood, []byte("flood"))
		}
		roundTrip(t, conn, fmt.Appendf(nil, "round %d", i))
	}
	refused := func(c *nic.Context) uint64 { return program(t, n).Refused[c.ID()] }
	if k := refused(slow); k != rounds*burst-16 {
		t.Errorf("%d of %d packets refused with 16 credits", k, rounds*burst)
	}
	close(gate)
	opened = true
	eventually(t, "those that were not refused are handled", func() bool { return slow.Stats().Handled == 16 })
	idle(t, slow)
	idle(t, fast)
	if k := refused(fast); k != 0 {
		t.Errorf("the other context was refused %d packets", k)
	}
	eventually(t, "the other context has handled and sent all, and lost nothing", func() bool {
		s := fast.Stats()
		return s.Handled == rounds && s.Sent == rounds && s.Lost == 0
	})
	write(t, flood, []byte("credit is back"))
	eventually(t, "one more handled", func() bool { return slow.Stats().Handled == 17 })
}

func TestKeptPacketsHoldTheirCredit(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
	n := open(t, lab, nic.Config{HPUs: 1})
	kept := make(chan *hpu.Kept, 100)
	var twice atomic.Int64
	c := run(t, n, nic.ContextSpec{Name: "keep", Rulesets: sets(matcher.UDPPort(7)), Credits: 8, Handlers: handle(func(h *hpu.HER) spin.Code {
		k, err := h.Keep()
		if err != nil {
			return spin.Fail
		}
		if _, err := h.Keep(); errors.Is(err, hpu.ErrTwice) {
			twice.Add(1)
		}
		kept <- k
		return spin.Success
	})})
	conn := dialUDP(t, lab, 7)
	for round := range 3 {
		for i := range 20 {
			write(t, conn, fmt.Appendf(nil, "round %d datagram %d", round, i))
		}
		var all []*hpu.Kept
		for range 8 {
			select {
			case k := <-kept:
				all = append(all, k)
			case <-time.After(testenv.Slowness() * 5 * time.Second):
				t.Fatalf("round %d: %d of 8 packets kept", round, len(all))
			}
		}
		eventually(t, "the other 12 refused", func() bool {
			return program(t, n).Refused[c.ID()] == uint64(12*(round+1))
		})
		if k := c.InFlight(); k != 8 {
			t.Errorf("round %d: %d of 8 kept buffers are paid for", round, k)
		}
		for i, k := range all {
			want := fmt.Sprintf("round %d datagram %d", round, i)
			if k.Segments() != 1 || k.Len() != 42+len(want) || string(k.Segment(0)[42:]) != want {
				t.Errorf("kept %q, want %q", k.Segment(0), want)
			}
		}
		done := make(chan struct{})
		go func() { // not the goroutine that took it
			defer close(done)
			for _, k := range all {
				k.Release()
				k.Release()
				if k.Segment(0) != nil {
					t.Error("a released packet can be read")
				}
			}
		}()
		<-done
		idle(t, c)
	}
	if twice.Load() != 24 {
		t.Errorf("of 24 packets %d could not be kept twice", twice.Load())
	}
}

func TestHandlerSendsFramesOfItsOwn(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2})
	c := run(t, n, nic.ContextSpec{Name: "three", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(func(h *hpu.HER) spin.Code {
		if !h.Headers().ReplyUDP() {
			return spin.Fail
		}
		for i := range 2 {
			b, err := h.SendNew(h.Len())
			if err != nil {
				return spin.Fail
			}
			copy(b, h.Head())
			extra := packet.Parse(b, len(b))
			extra.UDP.Payload()[0] = byte('1' + i)
			sum, _ := extra.UDPChecksum()
			extra.UDP.SetChecksum(sum)
		}
		if _, err := h.SendNew(1 << 16); !errors.Is(err, hpu.ErrSize) {
			return spin.Fail
		}
		if h.Send() != nil {
			return spin.Fail
		}
		return spin.Success
	})})
	conn := dialUDP(t, lab, 7)
	const rounds = 2 * nic.SpareFrames / 2 // more frames than there are
	for i := range rounds {
		write(t, conn, fmt.Appendf(nil, "0: %d", i))
		for _, first := range []byte("120") {
			expect(t, conn, fmt.Appendf(nil, "%c: %d", first, i))
		}
	}
	eventually(t, "all handled", func() bool { return c.Stats().Handled == rounds })
	if s := c.Stats(); s.Failed != 0 || s.SendFull != 0 || s.Sent != 3*rounds {
		t.Errorf("%d handlers failed, %d sends were refused, %d frames of %d were sent", s.Failed, s.SendFull, s.Sent, 3*rounds)
	}
	idle(t, c)
}

// datagram is a frame from the NIC's end to the host's.
func datagram(lab *netns.Lab, src, dst uint16, payload []byte) []byte {
	b := make([]byte, 42+len(payload))
	eth := packet.Ethernet(b)
	eth.SetDst([6]byte(lab.Host.MAC))
	eth.SetSrc([6]byte(lab.NIC.MAC))
	eth.SetEtherType(packet.EtherTypeIPv4)
	ip := packet.IPv4(b[14:])
	ip[0] = 0x45
	ip.SetTotalLen(uint16(len(b) - 14))
	ip.SetTTL(64)
	ip.SetProtocol(packet.ProtocolUDP)
	ip.SetSrc(lab.NIC.Addr.Addr().As4())
	ip.SetDst(lab.Host.Addr.Addr().As4())
	ip.SetChecksum(ip.HeaderChecksum())
	udp := packet.UDP(b[34:])
	udp.SetSrcPort(src)
	udp.SetDstPort(dst)
	udp.SetLength(uint16(8 + len(payload)))
	copy(b[42:], payload)
	h := packet.Parse(b, len(b))
	sum, _ := h.UDPChecksum()
	udp.SetChecksum(sum)
	return b
}

func TestTransmittedFramesArrive(t *testing.T) {
	for _, egress := range []struct {
		name  string
		order hpu.Egress
	}{{"handlers first", hpu.HandlersFirst}, {"round robin", hpu.RoundRobin}} {
		t.Run(egress.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			n := open(t, lab, nic.Config{HPUs: 2, Egress: egress.order})
			c := run(t, n, nic.ContextSpec{Name: "echo", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)})
			sink, conn := listenUDP(t, lab.Host, 5000), dialUDP(t, lab, 7)
			const rounds = nic.SpareFrames / 4
			for i := range rounds { // more frames than there are, and echoes in between
				var own [8][]byte
				for j := range own {
					own[j] = fmt.Appendf(nil, "frame %d of %d", j, i)
					if err := n.Transmit(datagram(lab, 6, 5000, own[j])); err != nil {
						t.Fatal(err)
					}
				}
				roundTrip(t, conn, fmt.Appendf(nil, "echo %d", i))
				for _, want := range own {
					expect(t, sink, want)
				}
			}
			for _, size := range []int{0, 13, 1 << 16} {
				if err := n.Transmit(make([]byte, size)); !errors.Is(err, hpu.ErrSize) {
					t.Errorf("a frame of %d bytes: %v", size, err)
				}
			}
			idle(t, c)
		})
	}
}

func TestJumboFramesSpanSeveralBuffers(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{MTU: 9000})
	n := open(t, lab, nic.Config{})
	udp := run(t, n, nic.ContextSpec{Name: "udp", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echoAll)})
	icmp := run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echoAll)})
	before := snmp(t, lab.NIC.NS, "Icmp", "InEchos")
	conn := dialUDP(t, lab, 7)
	const rounds = 600 // more buffers than a queue has
	for i := range rounds {
		roundTrip(t, conn, []byte(strings.Repeat(fmt.Sprintf("%07d ", i), 1000)))
	}
	ping(t, lab, "-c", "50", "-i", "0.002", "-s", "8000")
	ping(t, lab, "-c", "10", "-i", "0.002", "-s", "8972")
	ping(t, lab, "-c", "10", "-i", "0.002", "-s", "100")
	if k := snmp(t, lab.NIC.NS, "Icmp", "InEchos") - before; k != 0 {
		t.Errorf("the kernel saw %d echo requests", k)
	}
	for _, c := range []*nic.Context{udp, icmp} {
		idle(t, c)
	}
	eventually(t, "all datagrams handled, in three buffers each", func() bool {
		s := udp.Stats()
		return s.Handled == rounds && s.User[0] == spin.UserCounter{Sum: 3 * rounds, Count: rounds}
	})
	eventually(t, "all pings handled, the long ones in three buffers", func() bool {
		s := icmp.Stats()
		return s.Handled == 70 && s.User[0].Sum == 3*60+10
	})
}

func TestGenericModeAnswersPing(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{Mode: loader.Generic})
	stack := make(chan error, 1)
	icmp := run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echo)})
	run(t, n, nic.ContextSpec{Name: "stack", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(func(h *hpu.HER) spin.Code {
		stack <- h.ToStack()
		return spin.Success
	})})
	before := snmp(t, lab.NIC.NS, "Icmp", "InEchos")
	for _, size := range []string{"16", "1416"} {
		ping(t, lab, "-c", "50", "-i", "0.002", "-s", size)
	}
	if k := snmp(t, lab.NIC.NS, "Icmp", "InEchos") - before; k != 0 {
		t.Errorf("the kernel saw %d echo requests", k)
	}
	eventually(t, "all handled", func() bool { return icmp.Stats().Handled == 100 })
	write(t, dialUDP(t, lab, 7), []byte("x"))
	select {
	case err := <-stack:
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("to the stack: %v", err)
		}
	case <-time.After(testenv.Slowness() * 5 * time.Second):
		t.Error("the datagram reached no handler")
	}
	idle(t, icmp)
}

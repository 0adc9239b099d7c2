// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// datagram returns a frame for the lab's NIC end: UDP from the host end, with a
// right header checksum and no checksum of its own.
func datagram(port uint16, payload []byte) []byte {
	b := append(ipv4(protoUDP, port, 8), payload...)
	binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
	binary.BigEndian.PutUint16(b[38:], uint16(len(b)-34))
	sum := uint32(0)
	for i := 14; i < 34; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[24:], ^uint16(sum+sum>>16))
	return b
}

func give(in *Injector, frame []byte) error {
	return in.Inject(len(frame), func(dst []byte, off int) int { return copy(dst, frame[off:]) })
}

func TestInjectedPacketsReachTheStack(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{MTU: 9000})
	inside(t, lab.NIC, func(nic *net.Interface) {
		ingress, err := Attach(config(nic, Native))
		if err != nil {
			t.Fatal(err)
		}
		defer ingress.Close()
		in, err := NewInjector(nic)
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		port := uint16(conn.LocalAddr().(*net.UDPAddr).Port)

		// Sizes do not leak into each other: slots are used again.
		for _, n := range []int{18, 0, MaxInject - 42, 1, 1400} {
			payload := bytes.Repeat([]byte{byte(n), 1, 2, 3, 5, 7}, n/6+1)[:n]
			if err := give(in, datagram(port, payload)); err != nil {
				t.Fatalf("%d bytes: %v", n, err)
			}
			conn.SetReadDeadline(time.Now().Add(5 * time.Second))
			got := make([]byte, 4000)
			k, from, err := conn.ReadFromUDP(got)
			if err != nil || !bytes.Equal(got[:k], payload) || from.String() != "10.0.0.2:40000" {
				t.Fatalf("%d bytes: %d arrived from %v, %v", n, k, from, err)
			}
		}
		says(t, give(in, make([]byte, MaxInject+1)), ErrInjectSize, "3409", "3408")

		// They came in behind the ingress program, not through it.
		if s := addUp(t, ingress); s.Matched != [256]uint64{} {
			t.Errorf("%+v", s)
		}
		if n := in.Failures.Load(); n != 0 {
			t.Errorf("%d failures", n)
		}
		// The kernel takes no frame without an Ethernet header.
		if err := give(in, make([]byte, 13)); err != nil {
			t.Error(err)
		}
		if err := in.Close(); err != nil {
			t.Error(err)
		}
		if n := in.Failures.Load(); n != 1 {
			t.Errorf("%d failures, want 1", n)
		}
	})
}

// Faster than the stack takes them some are refused, and all others arrive,
// the last ones while the injector closes.
func TestInjectorNeverBlocksAndLosesNothing(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) {
		foreign(t, nic, Native)
		in, err := NewInjector(nic)
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		before, err := lab.NIC.NS.SNMP()
		if err != nil {
			t.Fatal(err)
		}
		// To this end's own address, from the other's; ICMP echo replies need no
		// answer.
		frame := datagram(9, make([]byte, 18))
		frame[23], frame[34], frame[35] = protoICMP, 0, 0
		binary.BigEndian.PutUint16(frame[24:], binary.BigEndian.Uint16(frame[24:])+protoUDP-protoICMP)
		var accepted, full [4]int
		var wg sync.WaitGroup
		for w := range accepted {
			wg.Go(func() {
				for range 5000 {
					switch err := give(in, frame); {
					case err == nil:
						accepted[w]++
					case errors.Is(err, ErrInjectFull):
						full[w]++
					default:
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		for range 2 {
			if err := in.Close(); err != nil {
				t.Error(err)
			}
		}
		says(t, give(in, frame), os.ErrClosed)
		after, err := lab.NIC.NS.SNMP()
		if err != nil {
			t.Fatal(err)
		}
		n, refused := 0, 0
		for w := range accepted {
			n += accepted[w]
			refused += full[w]
		}
		if got := after["Ip"]["InDelivers"] - before["Ip"]["InDelivers"]; got != uint64(n) || in.Failures.Load() != 0 {
			t.Errorf("%d accepted, %d arrived, %d failures", n, got, in.Failures.Load())
		}
		if n < injectSlots || refused == 0 {
			t.Errorf("%d accepted, %d refused", n, refused)
		}
	})
}

// What the kernel does not take is counted, and the injector goes on.
func TestInjectorOutlivesItsInterface(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(*net.Interface) {
		in, err := NewInjector(&net.Interface{Index: 9999, Name: "gone"})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if err := give(in, datagram(9, nil)); err != nil {
				t.Error(err)
			}
		}
		if err := in.Close(); err != nil {
			t.Error(err)
		}
		if n := in.Failures.Load(); n != 3 {
			t.Errorf("%d failures, want 3", n)
		}
	})
}

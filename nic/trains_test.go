// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/ethtool"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// Generic XDP sees what a sender on the same machine leaves to its device to cut: several
// datagrams in one, with the headers of one. These are Linux's, which cuts them; packets that
// come alone are the context's, however long they are. Messages that are acknowledged are those
// that the application is told of.
func TestTrainsAreLeftToLinux(t *testing.T) {
	const whole = 1472 // the payload of the longest datagram
	for _, tier := range []string{"user", "kernel"} {
		t.Run(tier, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			lines := make(chan string, 100)
			n := open(t, lab, nic.Config{HPUs: 1, Hook: nic.HookXDP, Mode: nic.Generic, Logger: slog.New(slog.NewTextHandler(lineWriter(lines), nil))})
			spec, _, events := depositing(t, 1<<20)
			if tier == "user" {
				spec.Kernel, spec.Handlers = nil, hpu.Handlers{}
			}
			c := run(t, n, spec)
			sock, linux := dialUDP(t, lab, slmp.Port), listenUDP(t, lab.NIC, slmp.Port)
			id := uint32(0)
			for _, tt := range []struct {
				name string
				size int // of each datagram, but for the last
				last int
				n    int
				cut  bool // by the device
			}{
				{"a short datagram alone", 0, 110, 1, false},
				{"the longest alone", 0, whole, 1, false},
				{"two short ones", 110, 110, 2, false},
				{"two short ones, of which the last is shorter", 110, 11, 2, false},
				{"eight that fit a frame together", 180, 180, 8, false},
				{"two that are longer than a frame by a byte", 737, 736, 2, false},
				{"the longest, and a short one", whole, 11, 2, false},
				{"many of the longest", whole, whole, 44, false},
				{"one alone, after all of these", 0, 110, 1, false},
				{"two short ones that the device cuts", 110, 110, 2, true},
				{"many of the longest that the device cuts", whole, whole, 44, true},
			} {
				t.Run(tt.name, func(t *testing.T) {
					if err := lab.Host.NS.Do(func() error { return ethtool.UDPSegment.Enable(lab.Host.Device, !tt.cut) }); err != nil {
						t.Fatal(err)
					}
					before, told := program(t, n), messages(t, c).Ended
					size := func(i int) int {
						if i == tt.n-1 {
							return tt.last
						}
						return tt.size
					}
					var all []byte
					for i := range tt.n {
						all = append(all, raw(slmp.SYN|slmp.EOM, id, 0, noise(size(i)-slmp.HeaderLen))...)
						id++
					}
					if err := segments(sock, tt.size); err != nil {
						t.Fatal(err)
					}
					write(t, sock, all)
					if train := tt.n > 1 && !tt.cut; train {
						for i := range tt.n {
							b := make([]byte, 2000)
							linux.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
							if k, err := linux.Read(b); err != nil || !bytes.Equal(b[:k], all[i*tt.size:][:size(i)]) {
								t.Fatalf("Linux got %d bytes, %v; want datagram %d, of %d", k, err, i, size(i))
							}
						}
						if now := program(t, n); now.Trains != before.Trains+1 || now.Redirected != before.Redirected || messages(t, c).Ended != told {
							t.Errorf("%d trains, want one; %d packets to HPUs, %d messages", now.Trains-before.Trains, now.Redirected-before.Redirected, messages(t, c).Ended-told)
						}
						return
					}
					for i := range tt.n {
						if e := nextEvent(t, events); e.Length != uint64(size(i)-slmp.HeaderLen) || e.Cause != spin.Complete {
							t.Errorf("event %+v, want %d bytes", e, size(i)-slmp.HeaderLen)
						}
						answer(t, sock)
					}
					if now := program(t, n); now.Trains != before.Trains {
						t.Errorf("%d trains", now.Trains-before.Trains)
					}
				})
			}
			select {
			case line := <-lines:
				for _, want := range []string{"several packets came in one", "tx-udp-segmentation off", lab.NIC.Device} {
					if !bytes.Contains([]byte(line), []byte(want)) {
						t.Errorf("the log has no %q: %s", want, line)
					}
				}
			case <-time.After(testenv.Slowness() * 30 * time.Second):
				t.Error("nothing is in the log")
			}
		})
	}
}

// What a sender is told of its messages is what the application is told, with trains and
// without.
func TestSendersAndApplicationsAgreeInGenericMode(t *testing.T) {
	const burst = 8
	for _, tier := range []string{"user", "kernel"} {
		for _, cut := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, the device cuts: %v", tier, cut), func(t *testing.T) {
				lab := netnstest.Temp(t, netns.LabConfig{})
				wire(t, lab)
				n := open(t, lab, nic.Config{HPUs: 1, Hook: nic.HookXDP, Mode: nic.Generic})
				if err := lab.Host.NS.Do(func() error { return ethtool.UDPSegment.Enable(lab.Host.Device, !cut) }); err != nil {
					t.Fatal(err)
				}
				spec, _, events := depositing(t, 1<<20)
				if tier == "user" {
					spec.Kernel, spec.Handlers = nil, hpu.Handlers{}
				}
				run(t, n, spec)
				conn := connect(t, lab, slmp.Port, slmp.Config{})
				if _, err := conn.SendBytes(patient(t), noise(100), slmp.Options{}); err != nil {
					t.Fatal(err)
				}
				nextEvent(t, events)
				good, ends := 0, make(chan error, burst)
				for range burst {
					if err := conn.Post(noise(100), func(err error) { ends <- err }); err != nil {
						t.Fatal(err)
					}
				}
				for range burst {
					if err := <-ends; err == nil {
						good++
					}
				}
				for range good {
					if e := nextEvent(t, events); e.Length != 100 {
						t.Errorf("event %+v", e)
					}
				}
				if cut && good != burst {
					t.Errorf("%d of %d messages were acknowledged", good, burst)
				}
				if trains := program(t, n).Trains; (trains > 0) == cut {
					t.Errorf("%d trains", trains)
				}
				for len(events) > 0 { // of messages that the sender has given up meanwhile
					if e := <-events; e.Length != 100 {
						t.Errorf("event %+v", e)
					}
				}
			})
		}
	}
}

// A process behind a tap, such as a virtual machine's, writes trains as well, which come to a
// driver's program uncut, too, and beside frames that have none of the stack's ends.
func TestTrainsOfATapAreLeftToLinux(t *testing.T) {
	const (
		port = 7
		each = 100 // bytes of the packets in a train
		long = 1400
	)
	for _, mode := range []nic.Mode{nic.Native, nic.Generic} {
		t.Run(mode.String(), func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			lab.NIC.Device, lab.NIC.Addr = "tap", netip.MustParsePrefix("10.1.0.1/24")
			var tap *os.File
			if err := lab.NIC.NS.Do(func() (err error) {
				tap, err = openTap(lab.NIC)
				return err
			}); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { tap.Close() })
			n := open(t, lab, nic.Config{HPUs: 1, Mode: mode})
			var good, bad atomic.Int64
			run(t, n, nic.ContextSpec{Name: "udp", Rulesets: sets(matcher.UDPPort(port)), Handlers: handle(func(h *hpu.HER) spin.Code {
				if n := h.Len() - 42; n == each || n == long {
					good.Add(1)
				} else {
					bad.Add(1)
				}
				return spin.Success
			})})
			linux := listenUDP(t, lab.NIC, port)
			before := program(t, n)
			singles, trains, failed := 0, 0, int64(0)
			for range 40 {
				for _, n := range []int{each, 2 * each, 30 * each, long, each} {
					// Where a frame has been are bits of it, wherever the next one ends.
					frame := append(udpTo(lab, port)[:42], bytes.Repeat([]byte{0xff}, n)...)
					ip := packet.IPv4(frame[14:])
					ip.SetTotalLen(uint16(len(ip)))
					ip.SetChecksum(0)
					ip.SetChecksum(ip.HeaderChecksum())
					packet.UDP(ip.Payload()).SetLength(uint16(len(ip) - 20))
					// struct virtio_net_hdr: flags, kind of train, and where headers and sum are.
					head := make([]byte, 10)
					if n != each && n != long {
						head[0], head[1] = unix.VIRTIO_NET_HDR_F_NEEDS_CSUM, unix.VIRTIO_NET_HDR_GSO_UDP_L4
						for i, v := range []uint16{42, each, 34, 6} {
							binary.NativeEndian.PutUint16(head[2+2*i:], v)
						}
						trains++
					} else {
						singles++
					}
					if _, err := tap.Write(append(head, frame...)); err != nil {
						t.Fatal(err)
					}
				}
				// As fast as they are handled: beyond the credit they are dropped.
				eventually(t, "all that came alone is handled", func() bool {
					failed = int64(program(t, n).Failed - before.Failed)
					return good.Load()+bad.Load()+failed >= int64(singles)
				})
			}
			if mode == nic.Native && failed == int64(singles) {
				failed = 0 // Linux 6.12 has no metadata in front of a tap's own frames
				good.Add(int64(singles))
			}
			if now := program(t, n); good.Load() != int64(singles) || failed != 0 || bad.Load() != 0 || now.Trains-before.Trains != uint64(trains) {
				t.Errorf("%d packets handled, %d longer ones, %d trains; want %d, 0 and %d", good.Load(), bad.Load(), now.Trains-before.Trains, singles, trains)
			}
			linux.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
			if k, err := linux.Read(make([]byte, 2000)); err != nil || k != each {
				t.Errorf("Linux got %d bytes, %v; want the first of a train", k, err)
			}
		})
	}
}

// openTap makes a tap in the namespace of the calling thread, whose frames have a virtio_net_hdr.
// Of what is written without waiting, packets come to the driver's XDP, and trains to the stack's.
func openTap(p netns.Port) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	f := os.NewFile(uintptr(fd), p.Device)
	req, err := unix.NewIfreq(p.Device)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	for _, cmd := range [][]string{
		{"addr", "add", p.Addr.String(), "dev", p.Device},
		{"link", "set", p.Device, "address", p.MAC.String(), "up"},
	} {
		if err == nil {
			err = exec.Command("ip", cmd...).Run()
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// segments has a socket's datagrams cut to so many bytes each; 0: not at all.
func segments(conn *net.UDPConn, size int) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size)
	}); err != nil {
		return err
	}
	return failed
}

// A lineWriter has what is written to a log, a line at a time; what finds no room is lost.
type lineWriter chan string

func (w lineWriter) Write(b []byte) (int, error) {
	select {
	case w <- string(b):
	default:
	}
	return len(b), nil
}

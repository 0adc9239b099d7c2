// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
)

// TestDissectorOnATransfer has tshark read what a sender and a NIC said to each
// other while some of it was lost, and compares with what package slmp reads.
func TestDissectorOnATransfer(t *testing.T) {
	needTshark(t)
	lab := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Loss: 0.1}})
	var n *nic.NIC
	if err := lab.NIC.NS.Do(func() (err error) {
		n, err = nic.Open(nic.Config{Interface: lab.NIC.Device})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	c, err := n.Install(nic.ContextSpec{Name: "slmp", Rulesets: []matcher.Ruleset{matcher.SLMP()}})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Activate(c); err != nil {
		t.Fatal(err)
	}
	captured := capture(t, lab.Host)
	var conn *slmp.Conn
	if err := lab.Host.NS.Do(func() (err error) {
		conn, err = slmp.Dial(t.Context(), lab.NIC.Addr.Addr().String(), slmp.Config{})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	const messages, length = 3, 100_000
	for range messages {
		if _, err := conn.SendBytes(ctx, make([]byte, length), slmp.Options{}); err != nil {
			t.Fatal(err)
		}
	}

	// The last acknowledgement went by the capture before it reached the sender.
	var frames []frame
	var want []string
	var ends, again, cumulative, beyond int
	sent := map[slmp.Header]bool{}
	for _, f := range captured() {
		if len(f.b) < 42 || binary.BigEndian.Uint16(f.b[12:]) != unix.ETH_P_IP || f.b[23] != unix.IPPROTO_UDP {
			continue
		}
		from, to := binary.BigEndian.Uint16(f.b[34:]), binary.BigEndian.Uint16(f.b[36:])
		b := f.b[42 : 34+binary.BigEndian.Uint16(f.b[38:])]
		h, err := slmp.ParseHeader(b)
		if err != nil || from != slmp.Port && to != slmp.Port {
			t.Errorf("port %d to %d: % x: %v", from, to, b[:min(len(b), 24)], err)
			continue
		}
		w := fmt.Sprintf("flags=0x%04x id=%d offset=%d", uint16(h.Flags), h.ID, h.Offset)
		if to == slmp.Port {
			w += fmt.Sprintf(" len=%d", len(b)-slmp.HeaderLen)
			if h.Flags&slmp.EOM != 0 {
				ends++
				w += fmt.Sprintf(" length=%d", length)
			}
			h.Flags = 0
			if sent[h] {
				again++
			}
			sent[h] = true
		} else {
			a, err := slmp.ParseAck(b)
			if err != nil || !a.Cumulative {
				t.Errorf("%v: % x", err, b)
				continue
			}
			cumulative++
			w += fmt.Sprintf(" end=%d bitmap=", a.End)
			for i, word := range a.Bitmap {
				if i > 0 {
					w += ","
				}
				w += fmt.Sprintf("0x%016x", word)
				if word != 0 {
					beyond++
				}
			}
		}
		frames = append(frames, f)
		want = append(want, w)
	}
	t.Logf("%d frames, %d ends, %d segments again, %d cumulative acknowledgements, %d words of bitmaps", len(frames), ends, again, cumulative, beyond)
	if ends < messages || again == 0 || cumulative < messages || beyond == 0 {
		t.Error("nothing to be seen in this capture")
	}

	fields := []string{"flags", "id", "offset", "len", "length", "end", "bitmap"}
	lines := dissect(t, frames, "slmp.flags", "slmp.id", "slmp.offset", "slmp.len", "slmp.length", "slmp.ack.end", "slmp.ack.bitmap",
		"_ws.expert.message", "_ws.malformed", "_ws.col.Protocol")
	for i, cells := range lines {
		var got []string
		for k, name := range fields {
			if cells[k] != "" {
				got = append(got, name+"="+cells[k])
			}
		}
		if got := strings.Join(got, " "); got != want[i] {
			t.Errorf("frame %d (% x)\ngot  %s\nwant %s", i, frames[i].b[42:min(len(frames[i].b), 66)], got, want[i])
		}
		if rest := cells[len(fields):]; !slices.Equal(rest, []string{"", "", "SLMP"}) {
			t.Errorf("frame %d: %s: experts, malformed, protocol: %q", i, want[i], rest)
		}
	}
}

// capture returns a function that returns all frames that went in and out since.
func capture(t *testing.T, port netns.Port) func() []frame {
	t.Helper()
	var fd int
	err := port.NS.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bits.ReverseBytes16(unix.ETH_P_ALL), Ifindex: port.Index}),
		)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return func() (frames []frame) {
		b := make([]byte, 1<<16)
		for {
			n, _, err := unix.Recvfrom(fd, b, 0)
			if err == unix.EAGAIN {
				return frames
			}
			if err != nil {
				t.Fatal(err)
			}
			frames = append(frames, frame{slices.Clone(b[:n]), n})
		}
	}
}

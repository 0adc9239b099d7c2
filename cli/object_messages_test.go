// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/slmp"
)

// segment is a frame with a segment of SLMP.
func segment(id, offset uint32, flags slmp.Flags, words ...uint32) frameOf {
	b := make([]byte, slmp.HeaderLen)
	slmp.Header{Flags: flags, ID: id, Offset: offset}.Put(b)
	for _, w := range words {
		b = append(b, byte(w), byte(w>>8), byte(w>>16), byte(w>>24))
	}
	f := udpFrame(slmp.Port, b...)
	return frameOf{f, len(f)}
}

// The example of handlers of messages compiles, and does with a capture of segments what
// it says.
func TestMessagesOnCapture(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := t.TempDir()
	if _, _, err := object(t, "new", dir); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("make", "-C", dir, "sum.bpf.o").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	trace := writeFile(t, "trace.pcap", pcapFile(1,
		segment(7, 0, slmp.SYN, 1, 2),
		segment(7, 8, slmp.SYN|slmp.EOM, 1<<31, 1<<31),
		segment(7, 8, slmp.SYN|slmp.EOM, 1<<31, 1<<31), // again
		segment(8, 8, slmp.SYN, 5),                     // before its header packet
		segment(9, 0, slmp.SYN|slmp.EOM, make([]uint32, 30)...),
	))
	if out, _, err := object(t, "check", filepath.Join(dir, "sum.bpf.o")); err != nil || !strings.Contains(out, "hooks         xdp, tc\n") {
		t.Errorf("an example does not run at both hooks: %v\n%s", err, out)
	}
	out, diag, err := object(t, "check", filepath.Join(dir, "sum.bpf.o"), "-r", trace, "--param", "most=100")
	_, table, _ := strings.Cut(out, "\n\n")
	want := `
  FRAME      LENGTH  SEGMENT      WHAT
      1          60  taken        answered
      2          60  taken        answered
                                  notify: 7, 4294967299, 16
                                  message 7 is complete: 16 bytes
      3          60  again        was taken before; answered
      4          56  ignored      its message has not begun
      5         172  failed       the payload handler returned Fail
                                  message 9 has failed
5 frames: 2 taken, 1 again, 1 ignored, 0 handed over, 1 failed, 0 malformed; 3 answered
`
	if err != nil || diag != "" || "\n"+table != want {
		t.Errorf("prints\n%s\nwant\n%s\n%s %v", table, want, diag, err)
	}
	for _, tc := range []struct{ args, want string }{
		{"--format packet", "for messages that do: want slmp"},
		{"--format slmp6", "--format slmp6: want packet, flow or slmp"},
		{"--window 0", "--window 0: want"},
	} {
		if _, _, err := object(t, append([]string{"check", filepath.Join(dir, "sum.bpf.o")}, strings.Fields(tc.args)...)...); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.args, err, tc.want)
		}
	}
	if _, _, err := object(t, "check", filepath.Join(dir, "sum.bpf.o"), "--window", "4KiB"); err != nil {
		t.Error(err)
	}
}

// What becomes of a segment is told: "drop" would look like lost data where it was taken.
func TestWhatBecomesOfSegments(t *testing.T) {
	netnstest.NeedRoot(t)
	o := writeFile(t, "mine.bpf.o", objecttest.Compile(t, `#include "xspin_message.h"
XSPIN_HEADER
{
	struct xspin_info i = {};

	xspin_about(her, &i);
	return i.number == 5 ? XSPIN_HAND_OVER : i.number == 6 ? XSPIN_FAIL : i.number == 7 ? XSPIN_DROP : XSPIN_SUCCESS;
}
XSPIN_PAYLOAD
{
	__u64 word = 0;

	if (her->offset == 24)
		return xspin_window_store(3, 1ULL << 40, &word, 8);
	if (her->offset == 16)
		xspin_to_stack(her);
	return her->offset == 8 ? XSPIN_DROP : xspin_deposit(ctx, her);
}
XSPIN_MESSAGES(HEADER | PAYLOAD | HAND_OVER);
XSPIN_LICENSE("GPL");
`))
	bad := segment(1, 0, 0, 1, 2)
	bad.data[40], bad.data[41] = 1, 2
	trace := writeFile(t, "trace.pcap", pcapFile(1,
		segment(1, 0, 0, 1, 2),
		segment(1, 0, 0, 1, 2),
		segment(1, 0, slmp.SYN, 1, 2),
		segment(1, 8, 0, 1, 2),
		segment(1, 16, 0, 1, 2),
		segment(1, 12, 0, 1, 2),
		segment(1, 0, slmp.ACK, 1, 2),
		bad,
		segment(1, 8, slmp.EOM, 1, 2),
		segment(1, 32, slmp.EOM|slmp.SYN, 1),
		segment(1, 32, slmp.EOM|slmp.SYN, 1),
		segment(5, 0, slmp.SYN, 1, 2),
		segment(5, 8, slmp.SYN, 1, 2),
		segment(6, 0, slmp.SYN, 1, 2),
		segment(6, 8, slmp.SYN, 1, 2),
		segment(7, 0, slmp.SYN, 1, 2),
		segment(8, 1<<20, slmp.SYN, 1, 2),
		segment(9, 0, 0, 1, 2),
		segment(9, 24, 0, 1, 2),
	))
	out, diag, err := object(t, "check", o, "-r", trace)
	_, table, _ := strings.Cut(out, "\n\n")
	want := `
  FRAME      LENGTH  SEGMENT      WHAT
      1          60  taken
      2          60  again        was taken before
      3          60  again        was taken before; answered
      4          60  taken        Drop
      5          60  taken        to Linux
      6          60  ignored      overlaps others, or is not as long as its message's first
      7          60  ignored      an acknowledgement
      8          60  ignored      its checksum is wrong
      9          60  ignored      its message would have two ends
     10          56  taken
     11          56  again        was taken before
     12          60  handed over  its message goes to handlers in Go
     13          60  handed over  its message goes to handlers in Go
     14          60  failed       the header handler returned Fail
                                  message 6 has failed
     15          60  ignored      its message has failed
     16          60  taken        Drop; answered
     17          60  ignored      its message has not begun
     18          60  taken
     19          60  failed       the payload handler returned Segv: xspin_window_store of bytes 1099511627776 to 1099511627784 of window 3, which has 1048576: out of bounds
                                  message 9 has failed
19 frames: 6 taken, 3 again, 6 ignored, 2 handed over, 2 failed, 0 malformed; 2 answered, 1 to Linux
2 messages open: 36 bytes so far
`
	if err != nil || diag != "" || "\n"+table != want {
		t.Errorf("prints\n%s\nwant\n%s\n%s %v", table, want, diag, err)
	}
	out, _, err = object(t, "check", o, "-r", trace, "--json")
	var r objectReport
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	if err != nil || len(r.Frames) != 19 || r.Frames[0].Verdict != "drop" || r.Frames[0].Segment != "taken" || r.Frames[11].Verdict != "handed over" ||
		len(r.Open) != 2 || r.Open[0] != (openMessage{1, 28}) {
		t.Errorf("%v\n%s", err, out)
	}
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/slmp"
)

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
	segment := func(id, offset uint32, flags slmp.Flags, words ...uint32) frameOf {
		b := make([]byte, slmp.HeaderLen)
		slmp.Header{Flags: flags, ID: id, Offset: offset}.Put(b)
		for _, w := range words {
			b = append(b, byte(w), byte(w>>8), byte(w>>16), byte(w>>24))
		}
		f := udpFrame(slmp.Port, b...)
		return frameOf{f, len(f)}
	}
	trace := writeFile(t, "trace.pcap", pcapFile(1,
		segment(7, 0, slmp.SYN, 1, 2),
		segment(7, 8, slmp.SYN|slmp.EOM, 1<<31, 1<<31),
		segment(7, 8, slmp.SYN|slmp.EOM, 1<<31, 1<<31), // again
		segment(8, 8, slmp.SYN, 5),                     // before its header packet
		segment(9, 0, slmp.SYN|slmp.EOM, make([]uint32, 30)...),
	))
	out, diag, err := object(t, "check", filepath.Join(dir, "sum.bpf.o"), "-r", trace, "--param", "most=100")
	_, table, _ := strings.Cut(out, "\n\n")
	want := `
  FRAME      LENGTH  VERDICT    CODE
      1          60  send       Success
      2          60  send       Success
                                notify: 7, 4294967299, 16
                                message 7 is complete: 16 bytes
      3          60  send       Success
      4          56  drop       Success
      5         172  drop       Fail, from the payload handler
                                message 9 has failed
5 frames: 3 send, 2 drop, 0 stack, 0 malformed; handlers failed on 1
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

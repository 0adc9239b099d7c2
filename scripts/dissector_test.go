// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"encoding/binary"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/gopacket"
	"github.com/google/gopacket/layers"
	"github.com/google/gopacket/pcapgo"

	"github.com/xspin/xspin/slmp"
)

// TestDissector has tshark read datagrams as the protocol's own code writes
// them, and broken ones, with docs/slmp.lua.
func TestDissector(t *testing.T) {
	needTshark(t)
	segment := func(flags slmp.Flags, id, offset uint32, n int) []byte {
		b := make([]byte, slmp.HeaderLen+n)
		slmp.Header{Flags: flags, ID: id, Offset: offset}.Put(b)
		return b
	}
	ack := func(a slmp.Ack) []byte { return a.Append(nil) }
	flags := func(b []byte, f slmp.Flags) []byte {
		binary.BigEndian.PutUint16(b, uint16(f))
		return b
	}
	const top = 1<<32 - 1000

	datagrams := []struct {
		reply bool // from the port to an ephemeral one
		six   bool // on IPv6
		b     []byte
		snap  int    // bytes of the frame that the capture has, 0 for all
		info  string // column
		// Fields, and whether an expert had something to say.
		fields string
		expert string
	}{
		{b: segment(slmp.SYN, 7, 0, 1408), info: "seg id=7 off=0 len=1408 SYN",
			fields: "flags=0x4000 eom=0 syn=1 ack=0 cumulative=0 wait=0 reserved=0x0000 id=7 offset=0 len=1408"},
		{b: segment(slmp.SYN|slmp.Cumulative, 7, 1408, 1408), info: "seg id=7 off=1408 len=1408 SYN Cumulative",
			fields: "flags=0x5000 eom=0 syn=1 ack=0 cumulative=1 wait=0 reserved=0x0000 id=7 offset=1408 len=1408"},
		{b: segment(0, 7, 2816, 1408), snap: 60, info: "seg id=7 off=2816 len=1408",
			fields: "flags=0x0000 eom=0 syn=0 ack=0 cumulative=0 wait=0 reserved=0x0000 id=7 offset=2816 len=1408"},
		{b: segment(slmp.EOM|slmp.SYN, 0xfedcba98, top, 1000), info: "seg id=4275878552 off=4294966296 len=1000 EOM SYN",
			fields: "flags=0xc000 eom=1 syn=1 ack=0 cumulative=0 wait=0 reserved=0x0000 id=4275878552 offset=4294966296 len=1000 length=4294967296"},
		{b: segment(slmp.EOM|slmp.SYN, 8, 0, 0), info: "seg id=8 off=0 len=0 EOM SYN",
			fields: "flags=0xc000 eom=1 syn=1 ack=0 cumulative=0 wait=0 reserved=0x0000 id=8 offset=0 len=0 length=0"},
		{b: segment(slmp.SYN, 9, 0, 3), six: true, info: "seg id=9 off=0 len=3 SYN",
			fields: "flags=0x4000 eom=0 syn=1 ack=0 cumulative=0 wait=0 reserved=0x0000 id=9 offset=0 len=3"},
		{b: segment(0x0001, 7, 0, 1), info: "seg id=7 off=0 len=1 reserved 0x001",
			fields: "flags=0x0001 eom=0 syn=0 ack=0 cumulative=0 wait=0 reserved=0x0001 id=7 offset=0 len=1"},

		{reply: true, b: ack(slmp.Ack{ID: 7, Offset: 1408}), info: "ack id=7 off=1408",
			fields: "flags=0x2000 eom=0 syn=0 ack=1 cumulative=0 wait=0 reserved=0x0000 id=7 offset=1408"},
		{reply: true, six: true, b: ack(slmp.Ack{ID: 9}), info: "ack id=9 off=0",
			fields: "flags=0x2000 eom=0 syn=0 ack=1 cumulative=0 wait=0 reserved=0x0000 id=9 offset=0"},
		{reply: true, b: ack(slmp.Ack{ID: 7, Offset: 2816, Cumulative: true, End: 4224}), info: "ack id=7 off=2816 Cumulative end=4224",
			fields: "flags=0x3000 eom=0 syn=0 ack=1 cumulative=1 wait=0 reserved=0x0000 id=7 offset=2816 end=4224 bitmap=0x0000000000000000"},
		{reply: true, b: ack(slmp.Ack{ID: 7, Cumulative: true, Wait: true, End: slmp.EndMax, Bitmap: []uint64{1<<63 | 0b1011, 0b11}}),
			info:   "ack id=7 off=0 Cumulative Wait end=4294967295 beyond=1-2,4,64-66",
			fields: "flags=0x3800 eom=0 syn=0 ack=1 cumulative=1 wait=1 reserved=0x0000 id=7 offset=0 end=4294967295 bitmap=0x800000000000000b,0x0000000000000003"},
		{reply: true, b: ack(slmp.Ack{ID: 7, Cumulative: true, Bitmap: append(make([]uint64, slmp.MaxWords-1), 1<<63|1<<61)}),
			info: "ack id=7 off=0 Cumulative end=0 beyond=1022,1024",
			fields: "flags=0x3000 eom=0 syn=0 ack=1 cumulative=1 wait=0 reserved=0x0000 id=7 offset=0 end=0 bitmap=" +
				strings.Repeat("0x0000000000000000,", slmp.MaxWords-1) + "0xa000000000000000"},
		{b: segment(slmp.SYN, 7, 0, 1408), snap: 51, info: "SLMP [cut by the capture]"},
		{reply: true, b: ack(slmp.Ack{ID: 7, Cumulative: true}), snap: 63, info: "ack id=7 off=0 Cumulative [cut by the capture]",
			fields: "flags=0x3000 eom=0 syn=0 ack=1 cumulative=1 wait=0 reserved=0x0000 id=7 offset=0"},

		{b: []byte{0}, info: "SLMP [malformed: 1 of 10 header bytes]", expert: "short"},
		{b: segment(slmp.SYN, 7, 0, 0)[:9], info: "SLMP [malformed: 9 of 10 header bytes]", expert: "short"},
		{b: segment(slmp.SYN, 7, top, 1001), info: "seg id=7 off=4294966296 len=1001 SYN [malformed: ends behind byte 4 GiB]", expert: "beyond",
			fields: "flags=0x4000 eom=0 syn=1 ack=0 cumulative=0 wait=0 reserved=0x0000 id=7 offset=4294966296 len=1001"},
		{reply: true, b: segment(slmp.ACK, 7, 0, 1), info: "ack id=7 off=0 [malformed: 11 bytes, an ACK has 10]", expert: "size",
			fields: "flags=0x2000 eom=0 syn=0 ack=1 cumulative=0 wait=0 reserved=0x0000 id=7 offset=0"},
		{reply: true, b: segment(slmp.ACK|slmp.Cumulative, 7, 0, 4), info: "ack id=7 off=0 Cumulative [malformed: 14 bytes, a cumulative ACK has 14 + 8 * (1..16)]", expert: "size",
			fields: "flags=0x3000 eom=0 syn=0 ack=1 cumulative=1 wait=0 reserved=0x0000 id=7 offset=0"},
		{reply: true, b: segment(slmp.ACK|slmp.Cumulative, 7, 0, 13), info: "ack id=7 off=0 Cumulative [malformed: 23 bytes, a cumulative ACK has 14 + 8 * (1..16)]", expert: "size",
			fields: "flags=0x3000 eom=0 syn=0 ack=1 cumulative=1 wait=0 reserved=0x0000 id=7 offset=0"},
		{reply: true, b: segment(slmp.ACK|slmp.Cumulative, 7, 0, 4+8*17), info: "ack id=7 off=0 Cumulative [malformed: 150 bytes, a cumulative ACK has 14 + 8 * (1..16)]", expert: "size",
			fields: "flags=0x3000 eom=0 syn=0 ack=1 cumulative=1 wait=0 reserved=0x0000 id=7 offset=0"},
		{reply: true, b: flags(ack(slmp.Ack{ID: 7}), slmp.ACK|slmp.EOM), info: "ack id=7 off=0 EOM", expert: "odd",
			fields: "flags=0xa000 eom=1 syn=0 ack=1 cumulative=0 wait=0 reserved=0x0000 id=7 offset=0"},
		{reply: true, b: flags(ack(slmp.Ack{ID: 7}), slmp.ACK|slmp.Wait), info: "ack id=7 off=0 Wait", expert: "odd",
			fields: "flags=0x2800 eom=0 syn=0 ack=1 cumulative=0 wait=1 reserved=0x0000 id=7 offset=0"},
		{b: segment(slmp.SYN|slmp.Wait, 7, 0, 0), info: "seg id=7 off=0 len=0 SYN Wait", expert: "odd",
			fields: "flags=0x4800 eom=0 syn=1 ack=0 cumulative=0 wait=1 reserved=0x0000 id=7 offset=0 len=0"},
		{b: segment(slmp.Cumulative, 7, 0, 0), info: "seg id=7 off=0 len=0 Cumulative", expert: "odd",
			fields: "flags=0x1000 eom=0 syn=0 ack=0 cumulative=1 wait=0 reserved=0x0000 id=7 offset=0 len=0"},
	}

	var frames []frame
	for _, d := range datagrams {
		b := datagram(t, d.b, d.reply, d.six)
		f := frame{b, len(b)}
		if d.snap > 0 {
			f.b = b[:d.snap]
		}
		frames = append(frames, f)
	}

	columns := []string{
		"flags=slmp.flags", "eom=slmp.flags.eom", "syn=slmp.flags.syn", "ack=slmp.flags.ack", "cumulative=slmp.flags.cumulative",
		"wait=slmp.flags.wait", "reserved=slmp.flags.reserved", "id=slmp.id", "offset=slmp.offset", "len=slmp.len",
		"length=slmp.length", "end=slmp.ack.end", "bitmap=slmp.ack.bitmap",
	}
	experts := []string{"short", "size", "beyond", "odd"}
	var fields []string
	for _, c := range columns {
		_, field, _ := strings.Cut(c, "=")
		fields = append(fields, field)
	}
	fields = append(fields, "slmp.short", "slmp.ack.size", "slmp.beyond", "slmp.flags.odd", "_ws.col.Protocol", "_ws.col.Info")
	lines := dissect(t, frames, fields...)
	truth := strings.NewReplacer("True", "1", "False", "0") // newer versions say so
	for i, d := range datagrams {
		cells := lines[i]
		var fields, said []string
		for k, c := range columns {
			if cells[k] != "" {
				name, _, _ := strings.Cut(c, "=")
				fields = append(fields, name+"="+truth.Replace(cells[k]))
			}
		}
		for k, name := range experts {
			if cells[len(columns)+k] != "" {
				said = append(said, name)
			}
		}
		rest := cells[len(columns)+len(experts):]
		if got := strings.Join(fields, " "); got != d.fields {
			t.Errorf("datagram %d (% x)\ngot  %s\nwant %s", i, d.b[:min(len(d.b), 24)], got, d.fields)
		}
		if got := strings.Join(said, " "); got != d.expert {
			t.Errorf("datagram %d (%s): experts say %q, want %q", i, d.info, got, d.expert)
		}
		if !slices.Equal(rest, []string{"SLMP", d.info}) {
			t.Errorf("datagram %d: columns %q, want %q", i, rest, d.info)
		}
	}
}

// needTshark skips the test where there is no tshark. With XSPIN_NO_SKIP=1 in the
// environment it fails instead.
func needTshark(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("tshark"); err != nil {
		if os.Getenv("XSPIN_NO_SKIP") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
}

// A frame is what a capture has of one of size bytes.
type frame struct {
	b    []byte
	size int
}

// dissect returns what tshark with docs/slmp.lua makes of these fields of each frame.
func dissect(t *testing.T, frames []frame, fields ...string) (lines [][]string) {
	t.Helper()
	dir := t.TempDir()
	name := filepath.Join(dir, "slmp.pcap")
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	w := pcapgo.NewWriter(file)
	if err := w.WriteFileHeader(65535, layers.LinkTypeEthernet); err != nil {
		t.Fatal(err)
	}
	for i, f := range frames {
		info := gopacket.CaptureInfo{Timestamp: time.Unix(int64(i), 0), CaptureLength: len(f.b), Length: f.size}
		if err := w.WritePacket(info, f.b); err != nil {
			t.Fatal(err)
		}
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	script, err := os.ReadFile("../docs/slmp.lua")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "slmp.lua"), script, 0o644); err != nil {
		t.Fatal(err)
	}
	args := []string{"-r", name, "-X", "lua_script:slmp.lua", "-T", "fields", "-E", "separator=|", "-E", "occurrence=a"}
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	c := exec.Command("tshark", args...)
	c.Dir = dir
	if os.Getuid() == 0 { // Wireshark 4.4 runs no scripts of root's
		const nobody = 65534
		for _, d := range []string{filepath.Dir(dir), dir} {
			if err := os.Chmod(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	c.Env = append(os.Environ(), "HOME="+dir, "XDG_CONFIG_HOME="+dir) // nobody's own settings
	var stderr strings.Builder
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil || strings.Contains(stderr.String(), "Lua") {
		t.Fatalf("%v: %v\n%s", c, err, &stderr)
	}
	for line := range strings.Lines(string(out)) {
		cells := strings.Split(strings.TrimSuffix(line, "\n"), "|")
		if len(cells) != len(fields) {
			t.Fatalf("line %d has %d cells: %s", len(lines), len(cells), line)
		}
		lines = append(lines, cells)
	}
	if len(lines) != len(frames) {
		t.Fatalf("%d lines for %d frames:\n%s%s", len(lines), len(frames), out, &stderr)
	}
	return lines
}

// datagram returns a frame with b as UDP payload: to the SLMP port, or from it.
func datagram(t *testing.T, b []byte, reply, six bool) []byte {
	t.Helper()
	eth := &layers.Ethernet{SrcMAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, DstMAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, EthernetType: layers.EthernetTypeIPv4}
	udp := &layers.UDP{SrcPort: 40000, DstPort: slmp.Port}
	if reply {
		udp.SrcPort, udp.DstPort = udp.DstPort, udp.SrcPort
	}
	var ip interface {
		gopacket.NetworkLayer
		gopacket.SerializableLayer
	}
	if six {
		eth.EthernetType = layers.EthernetTypeIPv6
		ip = &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: layers.IPProtocolUDP, SrcIP: net.ParseIP("fd00::2"), DstIP: net.ParseIP("fd00::1")}
	} else {
		ip = &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolUDP, SrcIP: net.IPv4(10, 0, 0, 2), DstIP: net.IPv4(10, 0, 0, 1)}
	}
	if err := udp.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	buf := gopacket.NewSerializeBuffer()
	opts := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buf, opts, eth, ip, udp, gopacket.Payload(b)); err != nil {
		t.Fatal(err)
	}
	frame := buf.Bytes()
	return append(frame, make([]byte, max(0, 60-len(frame)))...) // padded, as on the wire
}

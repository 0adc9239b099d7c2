// SPDX-License-Identifier: Apache-2.0

package pcapng

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// udp is a datagram that tshark finds nothing wrong with.
var udp = append([]byte{
	2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0,
	0x45, 0, 0, 33, 0, 0, 0, 0, 64, 17, 0x66, 0xca, 10, 0, 0, 1, 10, 0, 0, 2,
	0, 7, 0x1b, 0x58, 0, 13, 0, 0,
}, "hello"...)

const at = 1_700_000_000_123_456_789

var written = []Frame{
	{Data: udp, Length: len(udp), Interface: 1, Direction: In, Comments: []string{"context=echo hpu=1 verdict=success", "two"}},
	{Data: udp[:33], Length: len(udp), Direction: Out, Dropped: 1 << 33},
	{Data: udp[:14], Length: 14},
}

func writeAll(t testing.TB, w io.Writer) {
	t.Helper()
	n := NewWriter(w, "xspin", Interface{Name: "xs-nic", Description: "context echo", Filter: "udp(7)", Snap: 96}, Interface{Name: "other"})
	for i := range written {
		if err := n.Frame(&written[i], at+int64(i)); err != nil {
			t.Fatal(err)
		}
	}
	n.Statistics(0, at+9, 100, 1<<33+1)
	if err := n.Flush(); err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsWrittenCanBeRead(t *testing.T) {
	var b bytes.Buffer
	writeAll(t, &b)
	r, err := NewReader(&b)
	if err != nil {
		t.Fatal(err)
	}
	var f Frame
	for i, want := range written {
		if err := r.Next(&f); err != nil {
			t.Fatalf("frame %d: %v", i, err)
		}
		if !bytes.Equal(f.Data, want.Data) || f.Length != want.Length || f.Interface != want.Interface || f.Direction != want.Direction || f.Dropped != want.Dropped || !slices.Equal(f.Comments, want.Comments) {
			t.Errorf("frame %d is %+v, want %+v", i, f, want)
		}
	}
	if err := r.Next(&f); err != io.EOF {
		t.Errorf("behind the last frame: %v", err)
	}
}

func TestTsharkReadsWhatIsWritten(t *testing.T) {
	if _, err := exec.LookPath("tshark"); err != nil {
		if os.Getenv("XSPIN_NO_SKIP") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	var b bytes.Buffer
	writeAll(t, &b)
	file := filepath.Join(t.TempDir(), "x.pcapng")
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	tshark := exec.Command("tshark", "-r", file, "-T", "fields", "-E", "separator=|", "-E", "aggregator=;", "-e", "frame.time_epoch",
		"-e", "frame.interface_name", "-e", "frame.cap_len", "-e", "frame.len", "-e", "frame.packet_flags_direction", "-e", "frame.drop_count", "-e", "frame.comment")
	var diag bytes.Buffer
	tshark.Stderr = &diag
	out, err := tshark.Output()
	if err != nil {
		t.Fatalf("tshark: %v: %s", err, diag.String())
	}
	for i, want := range []string{
		"1700000000.123456789|other|47|47|0x00000001||context=echo hpu=1 verdict=success;two",
		"1700000000.123456790|xs-nic|33|47|0x00000002|8589934592|",
		"1700000000.123456791|xs-nic|14|14|||",
	} {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		if len(lines) != 3 || strings.TrimSpace(lines[i]) != want {
			t.Errorf("tshark reads\n%swant in line %d %q", out, i+1, want)
		}
	}
	if info, err := exec.Command("capinfos", file).CombinedOutput(); err != nil {
		t.Errorf("capinfos: %v: %s", err, info)
	} else {
		for _, want := range []string{"Capture application: xspin", "Name = xs-nic", "Description = context echo", "Time precision = nanoseconds (9)", "Capture length = 96", "Filter string = udp(7)", "Number of stat entries = 1"} {
			if !strings.Contains(string(info), want) {
				t.Errorf("capinfos does not say %q:\n%s", want, info)
			}
		}
	}
}

func TestImpossibleFramesAreNotWritten(t *testing.T) {
	n := NewWriter(io.Discard, "", Interface{Name: "one"})
	for want, f := range map[string]Frame{
		"interface 1":  {Interface: 1},
		"interface -1": {Interface: -1},
		"262145 bytes": {Data: make([]byte, MaxFrame+1)},
	} {
		if err := n.Frame(&f, at); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one about %s", err, want)
		}
	}
}

func TestWriteErrorsStay(t *testing.T) {
	n := NewWriter(&limited{left: 10}, "", Interface{})
	if err := n.Flush(); !errors.Is(err, errNoSpace) {
		t.Errorf("error %v", err)
	}
	if err := n.Frame(&Frame{Data: udp}, at); !errors.Is(err, errNoSpace) {
		t.Errorf("error afterwards %v", err)
	}
}

var errNoSpace = errors.New("no space")

// limited is a writer with room for left bytes.
type limited struct{ left int }

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	if l.left -= n; n < len(p) {
		return n, errNoSpace
	}
	return n, nil
}

func TestRelay(t *testing.T) {
	var b bytes.Buffer
	writeAll(t, &b)
	whole := b.Bytes()
	var ends []int // of blocks
	for n := 0; n < len(whole); {
		n += int(binary.LittleEndian.Uint32(whole[n+4:]))
		ends = append(ends, n)
	}
	for cut := range len(whole) + 1 {
		var out bytes.Buffer
		_, err := Relay(&out, io.MultiReader(bytes.NewReader(whole[:cut])))
		at, found := slices.BinarySearch(ends, cut)
		if !found {
			at--
		}
		end := 0
		if at >= 0 {
			end = ends[at]
		}
		if out.Len() != end || !bytes.Equal(out.Bytes(), whole[:end]) {
			t.Errorf("cut at %d: %d bytes, want %d", cut, out.Len(), end)
		}
		if found || cut == 0 {
			if err != nil {
				t.Errorf("cut at %d: %v", cut, err)
			}
		} else if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut at %d: error %v", cut, err)
		}
	}
	var out bytes.Buffer
	total, err := Relay(&out, bytes.NewReader(whole))
	if want := (Totals{Frames: 3, Bytes: 47 + 47 + 14, Lost: 1<<33 + 1}); err != nil || total != want {
		t.Errorf("totals %+v, error %v, want %+v", total, err, want)
	}
	if total, err = Relay(&out, bytes.NewReader(whole[:ends[len(ends)-2]])); err != nil || total.Lost != 1<<33 {
		t.Errorf("without statistics: totals %+v, error %v", total, err)
	}
	if _, err = Relay(&limited{left: 50}, bytes.NewReader(whole)); !errors.Is(err, errNoSpace) {
		t.Errorf("a full disk: error %v", err)
	}
	// Also if nothing more comes.
	in, feed := io.Pipe()
	defer feed.Close()
	go feed.Write(whole)
	if _, err = Relay(&limited{left: 50}, in); !errors.Is(err, errNoSpace) {
		t.Errorf("a full disk, and silence: error %v", err)
	}
	if _, err = Relay(&out, strings.NewReader("this is no capture")); err == nil {
		t.Error("a text is a capture")
	}
}

// What has come is written, though there may be more.
func TestRelayKeepsNothingBack(t *testing.T) {
	var b bytes.Buffer
	writeAll(t, &b)
	in, feed := io.Pipe()
	drain, out := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := Relay(out, in)
		out.Close()
		done <- err
	}()
	whole := bytes.Clone(b.Bytes())
	go feed.Write(append(whole[:len(whole):len(whole)], whole[:30]...)) // and part of a block
	got := make([]byte, len(whole))
	if _, err := io.ReadFull(drain, got); err != nil || !bytes.Equal(got, whole) {
		t.Errorf("%v: %d bytes", err, len(got))
	}
	feed.Close()
	if err := <-done; !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}

func FuzzRelay(f *testing.F) {
	var b bytes.Buffer
	writeAll(f, &b)
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		var out bytes.Buffer
		_, _ = Relay(&out, bytes.NewReader(data))
		if !bytes.HasPrefix(data, out.Bytes()) {
			t.Error("what is written is not what came")
		}
	})
}

func BenchmarkWriter(b *testing.B) {
	for _, size := range []int{64, 1400} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			n := NewWriter(io.Discard, "xspin", Interface{Name: "xs-nic"})
			f := Frame{Data: make([]byte, size), Direction: In, Comments: []string{"context=echo hpu=1 message=7 offset=1408 verdict=success"}}
			b.ReportAllocs()
			for b.Loop() {
				_ = n.Frame(&f, at)
			}
		})
	}
}

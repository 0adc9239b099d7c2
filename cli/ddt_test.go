// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/netns/netnstest"
)

// ddtCommand returns what `xspin ddt` prints.
func ddtCommand(t *testing.T, in []byte, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := xspin(t.Context(), bytes.NewReader(in), &out, io.Discard, append([]string{"ddt"}, args...)...)
	return out.String(), err
}

func TestDescribe(t *testing.T) {
	for _, tt := range []struct {
		args string
		want string
	}{
		{"vec(4 2 5)[int]", `
type         vec(4 2 5)[int]
size         32 bytes
extent       68 bytes, lb 0, ub 68
true extent  68 bytes, true lb 0, true ub 68
count        1
stream       32 bytes, in packets of 1408: 1
touches      bytes 0 to 67: 32, and holes of 36
overlap      none
blocks       4 of 8 bytes
             4.0 in a packet, on average
normal form  hvec(4 1 20)[ctg(8)[byte]]
layout       lines of 20 bytes, the innermost stride; a character is 4 bytes
             0 to 9, a to z: number of the block in the stream, again from 0 after z; . hole
           0 00...
          20 11...
          40 22...
          60 33...
`},
		{"--count 2 resized(-8,16)[struct(0,1,int 8,3,byte)]", `
type         resized(-8,16)[struct(0,1,int 8,3,byte)]
size         7 bytes
extent       16 bytes, lb -8, ub 8
true extent  11 bytes, true lb 0, true ub 11
count        2
stream       14 bytes, in packets of 1408: 1
touches      bytes 0 to 26: 14, and holes of 13
overlap      none
blocks       4 of 3 to 4 bytes, 3.5 on average
             4.0 in a packet, on average
normal form  hvec(2 1 16)[hidx(0,4 8,3)[byte]]
layout       lines of 16 bytes, the innermost stride; a character is 1 byte
             0 to 9, a to z: number of the block in the stream, again from 0 after z; . hole
           0 0000....111.....
          16 2222....333.....
`},
		{"ctg(0)[int]", `
type         ctg(0)[int]
size         0 bytes
extent       0 bytes, lb 0, ub 0
true extent  0 bytes, true lb 0, true ub 0
count        1
stream       0 bytes: there is nothing to move
`},
	} {
		text, err := ddtCommand(t, nil, append([]string{"describe"}, splitLast(tt.args)...)...)
		if err != nil {
			t.Errorf("%s: %v", tt.args, err)
			continue
		}
		lines := strings.SplitAfter(text, "\n")
		lines = slices.DeleteFunc(lines, func(s string) bool { return strings.HasSuffix(s, " bytes of memory\n") })
		if got, want := strings.Join(lines, ""), tt.want[1:]; got != want {
			t.Errorf("%s is\n%s\nwant\n%s", tt.args, got, want)
		}
	}
}

// splitLast splits flags, and leaves a type with its spaces.
func splitLast(args string) []string {
	words := strings.SplitN(args, " ", 3)
	if strings.HasPrefix(args, "--") {
		return words
	}
	return []string{args}
}

// Lines of the picture, of what is hard to show.
func TestLayouts(t *testing.T) {
	row := func(s string) string { return s + strings.Repeat(".", layoutColumns-len(s)) }
	for name, tt := range map[string]struct {
		text string
		want []string
	}{
		"backwards":             {"hvec(3 1 -16)[ctg(2)[int]]", []string{"-32 2.", "-16 1.", "0 0."}},
		"before the origin":     {"hidxb(1: -4 8)[int]", []string{"-12 ..0", "0 ..1"}},
		"rows of a 3D array":    {"subarray(1,2,6 0,3,6 5,1,6)[double]", []string{"288 .....0", "336 .....1", "384 .....2", "...", "576 .....3", "624 .....4", "672 .....5"}},
		"overlap":               {"vec(3 4 3)[int]", []string{"0 000", "12 *11", "24 *22", "36 2.."}},
		"one block":             {"ctg(128)[short]", []string{"0 " + strings.Repeat("0", 64)}},
		"rows far to the right": {"subarray(1,2,4 100,3,300)[int]", []string{"1200 " + row("000"), "2400 " + row("111")}},
		"rows to the right":     {"subarray(1,2,4 10,3,300)[int]", []string{"1200 " + row("..........000"), "2400 " + row("..........111")}},
		"far apart":             {"hidxb(1: 8 100000 51200)[double]", []string{"0 " + row(".0"), "...", "51200 " + row("2"), "...", "99840 ....................1"}},
		"rows are cut":          {"vec(2 2 201)[int]", []string{"0 " + row("00"), "804 " + row("11")}},
		"sides of rows":         {"hvec(2 1 8000)[hidx(16,16 7984,8)[byte]]", []string{"0 +" + strings.Repeat(".", 62) + "+", "8000 +" + strings.Repeat(".", 62) + "+"}},
		"wide blocks":           {"hvec(2 1 6401)[ctg(3301)[byte]]", []string{"0 " + row(strings.Repeat("#", 32)+"+"), "6401 " + row(strings.Repeat("#", 32)+"+")}},
		"no stride": {"hidxb(1: 0 6501 60000)[ctg(6007)[byte]]", []string{
			"0 " + strings.Repeat("#", 46) + "+...+" + strings.Repeat("#", 13), "8192 " + row(strings.Repeat("#", 33)+"+"), "...",
			"57344 " + strings.Repeat(".", 20) + "+" + strings.Repeat("#", 43), "65536 ###+"}},
		"many lines": {"vec(17 1 2)[int]", append(strings.Split("0 0.,8 1.,16 2.,24 3.,32 4.,40 5.,48 6.,56 7.,64 8.,72 9.,80 a.,88 b.,96 c.,104 d.,112 e.,120 f.", ","), "...")},
	} {
		text, err := ddtCommand(t, nil, "describe", tt.text)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		_, picture, _ := strings.Cut(text, "layout")
		got := strings.Split(strings.TrimSuffix(picture, "\n"), "\n")[2:]
		for i := range got {
			got[i] = strings.TrimSpace(got[i])
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %s is\n%s\nwant\n%s", name, tt.text, strings.Join(got, "\n"), strings.Join(tt.want, "\n"))
		}
	}
}

// A character of any picture says what is true of its bytes.
func TestLayoutsAreTrue(t *testing.T) {
	for seed := range 300 {
		d, n := ddttest.Random(rand.New(rand.NewPCG(uint64(seed), 9)), ddttest.Options{})
		c, err := ddt.Commit(d, n)
		if err != nil {
			t.Fatal(err)
		}
		r := describe(c)
		times := make(map[int64]int)
		for _, at := range ddttest.Places(d, n) {
			times[at]++
		}
		if r.Distinct == nil || *r.Distinct != int64(len(times)) || *r.Overlaps != (r.Stream > int64(len(times))) {
			t.Fatalf("seed %d: %d times %v: says %v bytes, there are %d of %d", seed, n, d, r.Distinct, len(times), r.Stream)
		}
		if r.Stream == 0 {
			continue
		}
		if root, _ := c.Root(); apart(root) && *r.Overlaps {
			t.Fatalf("seed %d: %d times %v: does overlap", seed, n, d)
		}
		seen := map[int64]bool{}
		l := r.Layout
		for _, line := range l.Lines {
			row := line.Offset
			if row%l.Line != 0 {
				t.Fatalf("seed %d: %d times %v: a line of %d bytes at %d", seed, n, d, l.Line, row)
			}
			for i, mark := range []byte(line.Text) {
				var touched, twice, all int64
				for at := row + (l.Left+int64(i))*l.Unit; at < row+min(l.Line, (l.Left+int64(i)+1)*l.Unit); at++ {
					all++
					seen[at] = true
					if times[at] > 0 {
						touched++
					}
					if times[at] > 1 {
						twice++
					}
				}
				want := byte(holeMark)
				switch {
				case twice > 0:
					want = twiceMark
				case touched == all:
					want = fullMark
				case touched > 0:
					want = partMark
				}
				if l.Blocks && strings.IndexByte(blockMarks, mark) >= 0 && (r.Blocks == 1 || touched == all) {
					want = mark
				}
				if mark != want {
					t.Fatalf("seed %d: %d times %v: line %d, character %d is %c, want %c\n%+v", seed, n, d, line.Offset, i, mark, want, l)
				}
			}
		}
		if !l.Further {
			for at := range times {
				if !seen[at] {
					t.Fatalf("seed %d: %d times %v: byte %d is not shown\n%+v", seed, n, d, at, l)
				}
			}
		}
	}
}

func TestDescribeJSON(t *testing.T) {
	text, err := ddtCommand(t, nil, "describe", "--json", "Complex")
	if err != nil {
		t.Fatal(err)
	}
	var r datatypeReport
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatal(err)
	}
	// FPsPIN's figures of its type.
	if r.Stream != 110592 || r.Extent != 55152 || r.Blocks != 256 || r.BlockMin != 432 || r.BlockMax != 432 || *r.Distinct != 52272 || !*r.Overlaps {
		t.Errorf("%+v", r)
	}
	if r.BlocksPerPacket < 4 || r.BlocksPerPacket > 4.3 { // 1408 / 432, and what is cut
		t.Errorf("%g blocks per packet", r.BlocksPerPacket)
	}
	// Too many blocks to know.
	if text, err = ddtCommand(t, nil, "describe", "--json", "--count", "1000000000", "resized(0,1000001)[vec(1000000 1 2)[byte]]"); err != nil {
		t.Fatal(err)
	}
	r = datatypeReport{}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatal(err)
	}
	if r.Distinct != nil || r.Overlaps != nil || r.BlocksPerPacket < 1407.9 || r.BlocksPerPacket > 1408 || r.BlockMax != 1 || r.Layout == nil {
		t.Errorf("%+v", r)
	}
	// Not so many that it is not plain.
	for d, want := range map[string]bool{
		"vec(100000000 1 2)[double]":                                             true,
		"hvec(1000 1 8)[hvec(1000000 1 -16000)[double]]":                         true,
		"hvec(1001 1 16)[hvec(1000000 1 -16000)[double]]":                        false,
		"vec(1000000 1 40)[idx(20,1 0,1 9,1)[vec(2 1 2)[double]]]":               true,
		"hvec(1000000 1 500)[hidx(476,1 0,1 16,1)[vec(2 1 2)[double]]]":          false,
		"hvec(1000000 1 100)[hidx(24,8 0,8 50,10)[byte]]":                        true,
		"hvec(1000000 1 59)[hidx(24,8 0,8 50,10)[byte]]":                         false,
		"hvec(1000000 1 100)[hidx(24,8 17,8 50,10)[byte]]":                       false,
		"hvec(1000000 1 100)[struct(0,1,vec(2 1 2)[int] 12,1,vec(3 1 3)[int])]":  true,
		"hvec(1000000 1 100)[struct(0,1,vec(2 1 2)[int] 8,1,vec(3 1 3)[int])]":   false,
		"hvec(1000000 1 100)[struct(0,1,hvec(2 1 0)[int] 12,1,vec(3 1 3)[int])]": false,
		"hvec(1000000 1 100)[struct(0,1,vec(3 1 3)[int] 30,1,hvec(2 1 2)[int])]": false,
	} {
		typ, err := ddt.Parse(d)
		if err != nil {
			t.Fatal(err)
		}
		c, err := ddt.Commit(typ, 1)
		if err != nil {
			t.Fatal(err)
		}
		if root, _ := c.Root(); apart(root) != want {
			t.Errorf("%s: plain that it does not overlap: %v, want %v", d, !want, want)
		}
	}
	if text, err = ddtCommand(t, nil, "describe", "vec(100000000 1 2)[double]"); err != nil || !strings.Contains(text, ": 800000000, and holes of 799999992\noverlap      none\n") {
		t.Errorf("%s, %v", text, err)
	}
}

// What names a type, and how an error of it looks.
func TestDatatypeArg(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, text := range map[string]string{
		"halo.ddt": "// a column\nvec(4 1 5)[int]\n",
		"int":      "ctg(2)[int]",
		"bad.ddt":  "vec(4 1 5)\n\t[é flaot]",
		"escapes":  "// \a\nvec(1 \r\u202e\x9b\a\u009b\x00\x7f\té",
		"binary":   strings.Repeat("\x80", 100),
		"long.ddt": "hidxb(1:" + strings.Repeat(" 12345", 100) + " x" + strings.Repeat(" 12345", 100) + ")[int]",
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		text  string
		count int64
		want  string // count and type, or error
	}{
		{"vec(2 1 2)[int]", 0, "1 vec(2 1 2)[int]"},
		{"vec(2 1 2)[int]", 7, "7 vec(2 1 2)[int]"},
		{"Simple", 0, "1 ctg(27648)[float]"},
		{"halo.ddt", 0, "1 vec(4 1 5)[int]"},
		{"@halo.ddt", 3, "3 vec(4 1 5)[int]"},
		{"int", 0, "1 int"},
		{"@int", 0, "1 ctg(2)[int]"},
		{"int", -1, "--count -1: want 1 or more, or 0 for what TYPE says"},
		{"@none", 0, "open none: no such file or directory"},
		{"none", 0, "Nor is there a file none"},
		{"vec(2, 1)[int]", 0, "type 1:6: vec: found \",\", want blocklen: spaces, not commas, between numbers\n  vec(2, 1)[int]\n       ^"},
		{"bad.ddt", 0, "type bad.ddt:2:3: vec: found \"é\", want a type: a name such as int or double, or a constructor such as vec or struct\n  \t[é flaot]\n  \t ^"},
		{"long.ddt", 0, "type long.ddt:1:610: hidxb: found \"x\", want displ or \")\"\n" +
			"  ...12345 12345 12345 12345 12345 12345 x 12345 12345 12345 12345 12345 1234...\n  " + strings.Repeat(" ", 39) + "^"},
		{"ctg(2)[vec(-1 1 1)[int]]", 0, "type 1:12: vector of -1 blocks: want 0 or more\n  ctg(2)[vec(-1 1 1)[int]]\n             ^"},
		{"\x1b[31m", 0, "type 1:1: found \"\\x1b\", want a type: a name such as int or double, or a constructor such as vec or struct\n  \\x1b[31m\n  ^"},
		{"@escapes", 0, "type escapes:2:8: vec: found \"\\u202e\", want blocklen\n  vec(1 \\r\\u202e\\x9b\\a\\u009b\\x00\\x7f\té\n" + strings.Repeat(" ", 10) + "^"},
		{"@binary", 0, "type binary:1:1: found \"\\x80\", want a type: a name such as int or double, or a constructor such as vec or struct\n  " + strings.Repeat("\\x80", 32) + "...\n  ^"},
	} {
		d, n, err := datatypeArg(tt.text, tt.count)
		got := ""
		if err == nil {
			got = fmt.Sprint(n, " ", d)
		} else {
			got = err.Error()
		}
		if got != tt.want && !(tt.text == "none" && strings.HasSuffix(got, tt.want)) {
			t.Errorf("%s:\n%s\nwant\n%s", tt.text, got, tt.want)
		}
	}
}

func randomBytes(seed uint64, n int64) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// Images to streams and back, in more than one piece, each way that files come and go.
func TestPackAndUnpack(t *testing.T) {
	t.Chdir(t.TempDir())
	const text, elements, origin = "resized(-16,48)[hidx(-8,12 16,8)[byte]]", 120000, 4096
	d, n, err := datatypeArg(text, elements)
	if err != nil {
		t.Fatal(err)
	}
	places := ddttest.Places(d, n)
	image := randomBytes(1, origin+48*elements+100)
	stream := make([]byte, len(places))
	if len(stream) < 2*moveBytes {
		t.Fatal("too small")
	}
	for i, at := range places {
		stream[i] = image[origin+at]
	}
	other := randomBytes(2, int64(len(image)))
	kept, fresh := slices.Clone(other), make([]byte, origin+48*(elements-1)+32)
	for i, at := range places {
		kept[origin+at], fresh[origin+at] = stream[i], stream[i]
	}
	write := func(name string, b []byte) {
		if err := os.WriteFile(name, b, 0o640); err != nil {
			t.Fatal(err)
		}
	}
	write("image", image)
	write("stream", stream)
	for _, tt := range []struct {
		args string
		in   []byte
		out  string // file, or "" for standard output
		want []byte
	}{
		{"pack --in image --out new", nil, "new", stream},
		{"pack --in - --out new", image, "new", stream},
		{"pack --in image --out -", nil, "", stream},
		{"pack --in image --out image", nil, "image", stream},
		{"pack --in image --out link", nil, "image", stream},
		{"pack --in fifo --out new", image, "new", stream},
		{"unpack --in stream --out new", nil, "new", fresh},
		{"unpack --in - --out -", stream, "", fresh},
		{"unpack --in stream --out new --image other", nil, "new", kept},
		{"unpack --in stream --out other --image other", nil, "other", kept},
		{"unpack --in stream --out - --image other", nil, "", kept},
	} {
		write("image", image)
		write("other", other)
		_ = os.Remove("new")
		if strings.Contains(tt.args, "link") {
			if err := os.Symlink("image", "link"); err != nil {
				t.Fatal(err)
			}
		}
		if strings.Contains(tt.args, "fifo") {
			if err := unix.Mkfifo("fifo", 0o600); err != nil {
				t.Fatal(err)
			}
			go os.WriteFile("fifo", tt.in, 0)
		}
		args := append(strings.Fields(tt.args), "--origin", "4KiB", "--count", fmt.Sprint(elements), text)
		got, err := ddtCommand(t, tt.in, args...)
		if err != nil {
			t.Errorf("%s: %v", tt.args, err)
			continue
		}
		if tt.out != "" {
			b, err := os.ReadFile(tt.out)
			if err != nil {
				t.Fatal(err)
			}
			got = string(b)
			if info, err := os.Stat(tt.out); err != nil || tt.out != "new" && info.Mode() != 0o640 {
				t.Errorf("%s: mode %v, %v", tt.args, info.Mode(), err)
			}
		}
		if got != string(tt.want) {
			t.Errorf("%s: %d bytes are not the %d that they should be", tt.args, len(got), len(tt.want))
		}
	}
	if info, err := os.Lstat("link"); err != nil || info.Mode().Type() != os.ModeSymlink {
		t.Errorf("the link is %v, %v", info, err)
	}
	noOthers(t, "image", "stream", "other", "new", "link", "fifo")
}

// Holes of an image take no room, those of the image before neither.
func TestUnpackIsSparse(t *testing.T) {
	t.Chdir(t.TempDir())
	allocated := func(name string) int64 {
		var st unix.Stat_t
		if err := unix.Stat(name, &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	const far = 8 << 20
	d := fmt.Sprintf("resized(0,%d)[hvec(3 8 %d)[byte]]", 3*far+5000, far)
	stream := randomBytes(3, 48)
	if _, err := ddtCommand(t, stream, "unpack", d, "--count", "2", "--in", "-", "--out", "image"); err != nil {
		t.Fatal(err)
	}
	if _, err := ddtCommand(t, stream[:8], "unpack", "ctg(8)[byte]", "--origin", "4MiB", "--in", "-", "--out", "image", "--image", "image"); err != nil {
		t.Fatal(err)
	}
	if n := allocated("image"); n > far/4 {
		t.Errorf("7 blocks take %d bytes of the disk", n)
	}
	b, err := os.ReadFile("image")
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 2*(3*far+5000))
	for i := range 6 {
		copy(want[i%3*far+i/3*(3*far+5000):], stream[8*i:8*i+8])
	}
	copy(want[4<<20:], stream[:8])
	if !bytes.Equal(b, want) {
		t.Errorf("%d bytes are not the %d that they should be", len(b), len(want))
	}
}

// A disk that is full is an error, in whatever part of an image.
func TestUnpackDiskFull(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("xspin", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	for _, d := range []string{"hvec(300 1 1048576)[ctg(8)[byte]]", "ctg(1100000)[byte]"} {
		typ, err := ddt.Parse(d)
		if err != nil {
			t.Fatal(err)
		}
		_, err = ddtCommand(t, make([]byte, typ.Size()), "unpack", d, "--in", "-", "--out", filepath.Join(dir, "image"))
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%s: error is %v, want %v", d, err, unix.ENOSPC)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

// noOthers fails if there are other files than these: parts of what was not completed.
func noOthers(t *testing.T, names ...string) {
	t.Helper()
	all, err := filepath.Glob("*")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all {
		if !slices.Contains(names, name) {
			t.Errorf("there is a file %s", name)
		}
	}
}

// Whatever is wrong, the output stays as it was.
func TestMoveErrors(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, size := range map[string]int{"f32": 32, "f33": 33, "f67": 67, "f68": 68, "out": 5} {
		if err := os.WriteFile(name, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir("dir", 0o700); err != nil {
		t.Fatal(err)
	}
	const vec = "vec(4 2 5)[int]" // 32 bytes, in 68
	for _, tt := range []struct {
		args, text string
		in         int
		want       string
	}{
		{"pack --in f67 --out out", vec, 0, "ddt pack: f67 has 67 bytes: want 68 or more, because the type ends 68 after its origin, which is at 0"},
		{"pack --in f68 --origin 1 --out out", vec, 0, "ddt pack: f68 has 68 bytes: want 69 or more, because the type ends 68 after its origin, which is at 1"},
		{"pack --in - --out out", vec, 12, "ddt pack: standard input has 12 bytes: want 68 or more"},
		{"pack --in none --out out", vec, 0, "ddt pack: open none: no such file"},
		{"pack --in f68 --out dir", vec, 0, "ddt pack: dir is a directory"},
		{"pack --in f68 --out none/out", vec, 0, "ddt pack: open none/out"},
		{"pack --in f68 --out out", "hvec(2 1 -8)[int]", 0, "ddt pack: the type starts 8 bytes before its origin, and the image only --origin 0 before it: want --origin 8 or more"},
		{"pack --in f68 --out out --origin -1", vec, 0, "ddt pack: --origin -1: "},
		{"pack --in f68 --out out --count -1", vec, 0, "ddt pack: --count -1: want 1 or more"},
		{"pack --in f68 --out out --origin 8EiB", vec, 0, "ddt pack: --origin 8EiB: "},
		{"pack --in f68 --out out", "vec(4 2)[int]", 0, "ddt pack: type 1:8: vec: found \")\", want stride\n  vec(4 2)[int]\n         ^"},
		{"pack --in f68", vec, 0, `required flag(s) "out" not set`},
		{"unpack --in f33 --out out", vec, 0, "ddt unpack: f33 has 33 bytes: want 32, 1 element of 32"},
		{"unpack --in f32 --out out --count 2", vec, 0, "ddt unpack: f32 has 32 bytes: want 64, 2 elements of 32"},
		{"unpack --in - --out out", vec, 31, "ddt unpack: standard input has 31 bytes: want 32"},
		{"unpack --in - --out out", vec, 1000, "ddt unpack: standard input has 1000 bytes: want 32"},
		{"unpack --in f32 --image f67 --out out", vec, 0, "ddt unpack: f67 has 67 bytes: want 68 or more"},
		{"unpack --in f32 --image dir --out out", vec, 0, "ddt unpack: dir is not a regular file"},
		{"unpack --in f32 --image none --out out", vec, 0, "ddt unpack: open none: no such file"},
		{"unpack --in f32 --out out", "hvec(2 4 6000000000000000000)[int]", 0, "ddt unpack: out: room for 6000000000000000016 bytes: "},
		{"unpack --in f32 --out -", "hvec(2 4 6000000000000000000)[int]", 0, "ddt unpack: memory for an image of 6000000000000000016 bytes: "},
	} {
		_, err := ddtCommand(t, make([]byte, tt.in), append(strings.Fields(tt.args), tt.text)...)
		if err == nil || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%s %s: error is %v, want %s", tt.args, tt.text, err, tt.want)
		}
		if b, err := os.ReadFile("out"); err != nil || len(b) != 5 {
			t.Fatalf("%s %s: the output is %d bytes, %v", tt.args, tt.text, len(b), err)
		}
	}
	noOthers(t, "f32", "f33", "f67", "f68", "out", "dir")
}

// Types without bytes have empty streams.
func TestMoveNothing(t *testing.T) {
	t.Chdir(t.TempDir())
	if _, err := ddtCommand(t, nil, "unpack", "--in", "-", "--out", "image", "ctg(0)[int]"); err != nil {
		t.Fatal(err)
	}
	if _, err := ddtCommand(t, nil, "pack", "--in", "image", "--out", "stream", "ctg(0)[int]"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"image", "stream"} {
		if info, err := os.Stat(name); err != nil || info.Size() != 0 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}

// All types that have a name are listed, with what an application's parameters may be.
func TestDDTLs(t *testing.T) {
	var l typeList
	text, err := ddtCommand(t, nil, "ls", "--json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		t.Fatal(err)
	}
	if l.Schema != 1 || len(l.Applications) != len(ddt.Apps()) || len(l.Predefined) != len(ddt.Predefined()) {
		t.Errorf("%+v", l)
	}
	if text, err = ddtCommand(t, nil, "ls"); err != nil {
		t.Fatal(err)
	}
	words := strings.Fields(text)
	for _, a := range ddt.Apps() {
		if !slices.Contains(words, a.Name) {
			t.Errorf("%s is not in\n%s", a.Name, text)
		}
	}
	for _, s := range ddt.Predefined() {
		if !slices.Contains(words, s) {
			t.Errorf("%s is not in\n%s", s, text)
		}
	}
	for name, want := range map[string]string{
		"nas_lu": `
NAS_LU   a column of cells of five doubles: 16320 bytes in 408 blocks, 34.8 per packet
origin   ddtbench timing_nas_lu_y, 408 x 408
message  1 element of 16320 bytes, in a buffer of 6674840

PARAMETER  DEFAULT  RANGE       WHAT
ny         408      1 to 16384  cells in a row, and two of halo
nz         408      1 to 16384  rows

such as NAS_LU(ny=408)
`,
		"double_int": "\ndouble_int is a predefined type: size 12, extent 16\n",
	} {
		got, err := ddtCommand(t, nil, "ls", name)
		if err != nil || got != want[1:] {
			t.Errorf("%s: %v\n%s\nwant%s", name, err, got, want)
		}
	}
	for name, want := range map[string]string{
		"MILK":     `"MILK" is neither a type nor an application's datatype: did you mean MILC?`,
		"dup[int":  `1:8: dup: found the end, want "]"`,
		"dup[int]": "type dup[int] has no name: `xspin ddt describe` shows it",
	} {
		if _, err := ddtCommand(t, nil, "ls", name); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: error is %v, want %s", name, err, want)
		}
	}
}

func TestDDTHelp(t *testing.T) {
	text, err := ddtCommand(t, nil, "--help")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []ddt.Combiner{"ctg", "vec", "hvec", "idx", "hidx", "idxb", "hidxb", "struct", "subarray", "subarrayf", "darray", "darrayf", "resized", "dup"} {
		_, whose, _ := strings.Cut(text, "A // starts a comment.")
		if !strings.Contains(whose, string(c)) {
			t.Errorf("the help does not say whose %s is", c)
		}
		if !strings.Contains(text, string(c)+"(") && !strings.Contains(text, string(c)+"[") {
			t.Errorf("the help does not say %s", c)
		}
	}
	for _, cmd := range []string{"describe", "pack", "unpack"} {
		text, err := ddtCommand(t, nil, cmd, "--help")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text, "TYPE is the name of an application's datatype") || !strings.Contains(text, "Examples:") {
			t.Errorf("xspin ddt %s --help:\n%s", cmd, text)
		}
	}
}

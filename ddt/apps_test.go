// SPDX-License-Identifier: Apache-2.0

package ddt_test

import (
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
)

func app(t *testing.T, name string) ddt.App {
	t.Helper()
	for _, a := range ddt.Apps() {
		if a.Name == name {
			return a
		}
	}
	t.Fatalf("no %s", name)
	return ddt.App{}
}

func commitApp(t *testing.T, text string) *ddt.Committed {
	t.Helper()
	typ, count, err := ddt.Resolve(text)
	if err != nil {
		t.Fatal(err)
	}
	c, err := ddt.Commit(typ, count)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return c
}

// What docs/datatypes.md and the Help of an App say of it.
func TestAppDefaults(t *testing.T) {
	want := []struct {
		name                 string
		size, blocks, lo, hi int64
	}{
		{"COMB", 80000, 100, 165656, 8406424},
		{"FFT2D", 589824, 36864, 0, 4697088},
		{"LAMMPS", 11664, 972, 192, 205752},
		{"LAMMPS_full", 195968, 18372, 24, 397648},
		{"MILC", 98304, 32, 0, 1526784},
		{"NAS_LU", 16320, 408, 0, 6674840},
		{"NAS_MG", 32768, 4096, 0, 4389848},
		{"SPECFEM3D_oc", 12900, 3225, 28, 355344},
		{"SPECFEM3D_cm", 177672, 14806, 240, 10632684},
		{"SW4LITE_x", 221952, 4624, 0, 7544784},
		{"SW4LITE_y", 221952, 68, 0, 7438656},
		{"WRF_x", 173712, 14476, 600, 3021796},
		{"WRF_y", 90804, 987, 916, 2705648},
		{"Simple", 110592, 1, 0, 110592},
		{"Complex", 110592, 256, 0, 55152},
	}
	if got := len(ddt.Apps()); got != len(want) {
		t.Errorf("%d applications, want %d", got, len(want))
	}
	for i, w := range want {
		a := app(t, w.name)
		if ddt.Apps()[i].Name != w.name {
			t.Errorf("number %d is %s, want %s", i, ddt.Apps()[i].Name, w.name)
		}
		c := commitApp(t, w.name)
		lo, hi := c.Bounds()
		if c.Size() != w.size || c.Blocks() != w.blocks || lo != w.lo || hi != w.hi {
			t.Errorf("%s: %d bytes in %d blocks, from %d to %d, want %d, %d, %d, %d", w.name, c.Size(), c.Blocks(), lo, hi, w.size, w.blocks, w.lo, w.hi)
		}
		noun := "blocks"
		if c.Blocks() == 1 {
			noun = "block"
		}
		figures := fmt.Sprintf(": %d bytes in %d %s, %.1f per packet", c.Size(), c.Blocks(), noun, perPacket(c))
		if !strings.HasSuffix(a.Help, figures) {
			t.Errorf("help of %s is %q, want it to end in %q", w.name, a.Help, figures)
		}
	}
}

// perPacket returns in how many pieces packets of 1408 bytes go on average.
func perPacket(c *ddt.Committed) float64 {
	packets, pieces := 0, 0
	for first := int64(0); first < c.Size(); first += 1408 {
		packets++
		end := int64(-1)
		c.Each(first, min(first+1408, c.Size()), func(off, n int64) bool {
			if off != end {
				pieces++
			}
			end = off + n
			return true
		})
	}
	return float64(pieces) / float64(packets)
}

// places has a byte's place for each byte of a stream.
type places []int64

func (p *places) add(at, size int64) {
	for i := range size {
		*p = append(*p, at+i)
	}
}

// from makes the first place 0: applications point there.
func (p places) from() places {
	for i := len(p) - 1; i >= 0; i-- {
		p[i] -= p[0]
	}
	return p
}

// draw does what docs/datatypes.md says of index lists, with the list of all of them.
func draw(count, n int64, seed uint64) []int64 {
	all := make([]int64, n)
	for i := range all {
		all[i] = int64(i)
	}
	for i := range count {
		j := i + int64(splitMix64(&seed)%uint64(n-i))
		all[i], all[j] = all[j], all[i]
	}
	return all[:count]
}

func splitMix64(state *uint64) uint64 {
	*state += 0x9e3779b97f4a7c15
	z := *state
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb
	return z ^ (z >> 31)
}

func TestSplitMix64(t *testing.T) {
	seed := uint64(1234567) // the usual check of implementations
	for _, want := range []uint64{6457827717110365317, 3203168211198807973, 9817491932198370423} {
		if got := splitMix64(&seed); got != want {
			t.Fatalf("%d, want %d", got, want)
		}
	}
}

// The bytes that a small instance of each moves, found by going through the arrays of the
// application element by element, in the order in which they are in memory.
func TestAppLayout(t *testing.T) {
	type layout struct {
		text string
		want places
	}
	var all []layout
	add := func(want places, format string, args ...any) {
		all = append(all, layout{fmt.Sprintf(format, args...), want})
	}

	// The ghost cells of a side are those that lie there, in all three dimensions.
	side := func(i, zones, ghost int64) int64 {
		switch {
		case i < ghost:
			return -1
		case i >= zones+ghost:
			return 1
		}
		return 0
	}
	for n := range 27 {
		x, y, z := int64(n%3-1), int64(n/3%3-1), int64(n/9-1)
		if x == 0 && y == 0 && z == 0 {
			continue
		}
		var p places
		at := int64(0)
		for range 2 {
			for k := range int64(5 + 4) {
				for j := range int64(3 + 4) {
					for i := range int64(4 + 4) {
						if side(i, 4, 2) == x && side(j, 3, 2) == y && side(k, 5, 2) == z {
							p.add(at, 8)
						}
						at += 8
					}
				}
			}
		}
		add(p, "COMB(nx=4 ny=3 nz=5 ghost=2 vars=2 x=%d y=%d z=%d)", x, y, z)
	}

	// matrix[i][j] comes as [j][i].
	var fft places
	for j := range int64(3) {
		for i := range int64(3) {
			fft.add((i*6+j)*16, 16)
		}
	}
	add(fft, "FFT2D(n=6 procs=2)")

	for name, others := range map[string]int64{"LAMMPS": 3, "LAMMPS_full": 5} {
		var p places
		atoms := draw(7, 10, 42)
		for _, a := range atoms {
			p.add(a*24, 24)
		}
		for k := range others {
			for _, a := range atoms {
				p.add((3+k)*(10+7)*8+a*8, 8)
			}
		}
		add(p, "%s(local=10 sent=7 seed=42)", name)
	}

	// Even sites are stored before odd ones, and z is 0.
	var milc places
	for parity := range int64(2) {
		for t := range int64(3) {
			for y := range int64(4) {
				for x := range int64(6) {
					if (x+y+t)%2 == parity {
						site := ((t*5+0)*4+y)*6 + x
						milc.add((site/2+parity*3*5*4*6/2)*24, 24)
					}
				}
			}
		}
	}
	add(milc, "MILC(nx=6 ny=4 nz=5 nt=3)")

	var lu places
	for k := range int64(6 + 2) {
		for j := range int64(4 + 2) {
			for m := range int64(5) {
				if j == 0 && 1 <= k && k <= 6 {
					lu.add(((k*6+j)*5+m)*8, 8)
				}
			}
		}
	}
	add(lu.from(), "NAS_LU(ny=4 nz=6)")

	inside := func(i, n int64) bool { return 1 <= i && i < n-1 }
	for face := range 3 {
		var p places
		for k := range int64(6) {
			for j := range int64(5) {
				for i := range int64(7) {
					switch {
					case face == 0 && i == 6 && inside(j, 5) && inside(k, 6),
						face == 1 && j == 4 && inside(i, 7) && inside(k, 6),
						face == 2 && k == 5 && inside(i, 7) && inside(j, 5):
						p.add(((k*5+j)*7+i)*8, 8)
					}
				}
			}
		}
		add(p.from(), "NAS_MG(nx=7 ny=5 nz=6 face=%d)", face)
	}

	var oc, cm places
	for _, point := range draw(20, 50, 7) {
		oc.add(point*4, 4)
	}
	add(oc, "SPECFEM3D_oc(points=50 sent=20 seed=7)")
	for _, point := range draw(20, 50, 7) {
		cm.add(point*12, 12)
	}
	for _, point := range draw(9, 30, 8) {
		cm.add(50*12+point*12, 12)
	}
	add(cm, "SPECFEM3D_cm(cm=50 cm_sent=20 ic=30 ic_sent=9 seed=7)")

	var sx, sy places
	for k := range int64(5 + 4) {
		for j := range int64(4 + 4) {
			for i := range int64(3 + 4) {
				at := ((k*8+j)*7 + i) * 24
				if i < 2 {
					sx.add(at, 24)
				}
				if j < 2 {
					sy.add(at, 24)
				}
			}
		}
	}
	add(sx, "SW4LITE_x(nx=3 ny=4 nz=5)")
	add(sy, "SW4LITE_y(nx=3 ny=4 nz=5)")

	for _, name := range []string{"WRF_x", "WRF_y"} {
		var p places
		at := int64(0)
		array := func(levels, scalars int64) {
			for s := range scalars {
				for j := range int64(6) {
					for range levels {
						for i := range int64(8) {
							sent := 2 <= i && i < 5 && 3 <= j && j < 5
							if sent && (scalars == 1 || s > 0) {
								p.add(at, 4)
							}
							at += 4
						}
					}
				}
			}
		}
		array(1, 1)
		array(1, 1)
		array(4, 1)
		array(4, 3)
		array(4, 3)
		add(p, "%s(mx=8 mz=4 my=6 x0=2 nx=3 y0=3 ny=2 vars2d=2 vars3d=1 vars4d=2 scalars=2)", name)
	}

	var simple, complexHalo places
	simple.add(0, 12)
	add(simple, "Simple(floats=3)")
	for i := range int64(8) {
		for row := range int64(32) {
			complexHalo.add(i/4*18432+i/2%2*12288+i%2*6144+row*8*72, 6*72)
		}
	}
	add(complexHalo, "Complex")

	seen := map[string]bool{}
	for _, l := range all {
		name, _, _ := strings.Cut(l.text, "(")
		seen[name] = true
		c := commitApp(t, l.text)
		var got places
		c.Each(0, c.Size(), func(off, n int64) bool {
			got.add(off, n)
			return true
		})
		if !slices.Equal(got, l.want) {
			t.Errorf("%s goes to\n%v, want\n%v", l.text, got, l.want)
		}
	}
	for _, a := range ddt.Apps() {
		if !seen[a.Name] {
			t.Errorf("%s: no layout", a.Name)
		}
	}
}

// Each parameter changes something, and at its limits there is a type or an error.
func TestAppParams(t *testing.T) {
	other := map[string]int64{"FFT2D.n": 768, "FFT2D.procs": 4, "COMB.y": -1, "WRF_y.x0": 6}
	for _, a := range ddt.Apps() {
		typ, _, err := a.Make(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range a.Params {
			if p.Default < p.Min || p.Default > p.Max || p.Help == "" {
				t.Errorf("%s: %+v", a.Name, p)
			}
			value, ok := other[a.Name+"."+p.Name]
			if !ok {
				value = p.Default + 1
			}
			changed, count, err := a.Make(map[string]int64{p.Name: value})
			if err != nil {
				t.Errorf("%s=%d: %v", p.Name, value, err)
				continue
			}
			if changed.String() == typ.String() || count != 1 {
				t.Errorf("%s: %s=%d changes nothing", a.Name, p.Name, value)
			}
			for _, value := range []int64{p.Min, p.Max} {
				limit, _, err := a.Make(map[string]int64{p.Name: value})
				if (err == nil) == (limit == nil) {
					t.Errorf("%s: %s=%d: %v, %v", a.Name, p.Name, value, limit, err)
				}
				if err == nil && limit.Size() < 1 {
					t.Errorf("%s: %s=%d: %d bytes", a.Name, p.Name, value, limit.Size())
				}
			}
			for _, value := range []int64{p.Min - 1, p.Max + 1} {
				if p.Max == math.MaxInt64 && value == p.Max+1 {
					continue // no such number
				}
				_, _, err := a.Make(map[string]int64{p.Name: value})
				want := fmt.Sprintf("%s: %s=%d: want %d to %d", a.Name, p.Name, value, p.Min, p.Max)
				if err == nil || !strings.HasPrefix(err.Error(), want) {
					t.Errorf("%s: %s=%d: %v, want %q", a.Name, p.Name, value, err, want)
				}
			}
		}
	}
}

// No product overflows where all parameters are as large as can be.
func TestAppLargest(t *testing.T) {
	for _, a := range ddt.Apps() {
		all := map[string]int64{}
		for _, p := range a.Params {
			if strings.HasSuffix(p.Name, "sent") {
				continue
			}
			all[p.Name] = p.Max
		}
		for _, name := range []string{"x0", "y0"} {
			if _, ok := all[name]; ok {
				all[name] = 0
			}
		}
		typ, _, err := a.Make(all)
		if err != nil {
			t.Errorf("%s: %v", a.Name, err)
			continue
		}
		if typ.Size() < 1 || typ.TrueLB() < 0 || typ.TrueExtent() < 1 {
			t.Errorf("%s: %d bytes, from %d, %d far", a.Name, typ.Size(), typ.TrueLB(), typ.TrueExtent())
		}
	}
}

func TestResolve(t *testing.T) {
	for _, tt := range []struct {
		text string
		same string // in the grammar of Parse
	}{
		{"NAS_LU", "vec(408 1 410)[ctg(5)[double]]"},
		{"nas_lu(ny=10 nz=3)", "vec(3 1 12)[ctg(5)[double]]"},
		{" Nas_Lu ( NZ=3, ny=10 ) ", "vec(3 1 12)[ctg(5)[double]]"},
		{"NAS_LU(ny=10,nz=3)", "vec(3 1 12)[ctg(5)[double]]"},
		{"NAS_LU()", "vec(408 1 410)[ctg(5)[double]]"},
		{"complex", "hvec(2 1 18432)[hvec(2 1 12288)[hvec(2 1 6144)[vec(32 6 8)[ctg(18)[float]]]]]"},
		{"simple", "ctg(27648)[float]"},
		{"simple(floats=2)", "ctg(2)[float]"},
		{"// of floats\nSimple // in a row\n(floats=2)//", "ctg(2)[float]"},
		{"double", "double"},
		{"vec(2 3 4)[int]", "vec(2 3 4)[int]"},
		{"struct(0,1,int)", "struct(0,1,int)"},
	} {
		typ, count, err := ddt.Resolve(tt.text)
		if err != nil {
			t.Errorf("%q: %v", tt.text, err)
			continue
		}
		want, err := ddt.Parse(tt.same)
		if err != nil {
			t.Fatal(err)
		}
		if count != 1 || typ.String() != want.String() {
			t.Errorf("%q is %d of %s, want 1 of %s", tt.text, count, typ, want)
		}
	}
}

func TestResolveErrors(t *testing.T) {
	for _, tt := range []struct {
		text string
		want []string // pieces of the error
	}{
		{"HALO", []string{`1:1: "HALO" is neither a type nor an application's datatype: these are COMB, FFT2D,`, "Complex"}},
		{"MILK", []string{`1:1: "MILK" is neither a type nor an application's datatype: did you mean MILC?`}},
		{"\n\n  milk", []string{`3:3: "milk" is neither`}},
		{"MILK(nx=3)", []string{`1:1: "MILK" is neither`}},
		{"vector(4 2 5)[int]", []string{`1:1: "vector" is neither a type nor an application's datatype: here it is vec, as in vec(count blocklen stride)[T]`}},
		{"MILC(nx=3", []string{`1:10: MILC: found the end, want ")" after its parameters`}},
		{"milc nx=3", []string{`1:6: MILC: found "nx", want "(" and parameters, or the end`}},
		{"MILC(nx=4)[int]", []string{`1:11: MILC: found "[", want the end: it is no part of other types`}},
		{"MILC[int]", []string{`1:5: MILC: found "[", want "("`}},
		{"MILC(mx=3)", []string{`MILC: no parameter "mx": it has nx, ny, nz, nt`}},
		{"Complex(n=3)", []string{`Complex: no parameter "n": it has none`}},
		{"MILC(nx=0)", []string{"MILC: nx=0: want 1 to 16384 (sites"}},
		{"MILC(nx=16385)", []string{"MILC: nx=16385: want 1 to 16384"}},
		{"MILC(nx=99999999999999999999)", []string{"MILC: nx=99999999999999999999: want 1 to 16384"}},
		{"MILC(nx=-99999999999999999999)", []string{"want 1 to 16384"}},
		{"MILC(nx=1e3)", []string{`MILC: nx="1e3": want a whole number`}},
		{"MILC(nx=\x1b)", []string{`MILC: nx="\x1b": want a whole number`}},
		{"MILC(nx=4 NX=5)", []string{"MILC: nx is given twice"}},
		{"MILC(nx)", []string{`MILC: "nx": want parameter=number`}},
		{"MILC(nx = 4)", []string{"want parameter=number, without spaces"}},
		{"MILC(4 4 4 4)", []string{`MILC: "4": want parameter=number`}},
		{"MILC(=4)", []string{`MILC: "=4": want parameter=number`}},
		{"MILC(nx=)", []string{`MILC: "nx=": want parameter=number`}},
		{"MILC(nx=3 ny=5)", []string{"MILC: 3 x 5 sites in a slice: want an even number"}},
		{"COMB(y=0)", []string{"COMB: x, y and z are 0"}},
		{"FFT2D(procs=7)", []string{"FFT2D: 7 processes: want a divisor of n=1536"}},
		{"LAMMPS(sent=5000)", []string{"LAMMPS: 5000 indices of 4084: want at most as many"}},
		{"SPECFEM3D_cm(ic=100)", []string{"SPECFEM3D_cm: ic: 3009 indices of 100"}},
		{"WRF_x(x0=30)", []string{"WRF_x: 3 points of the halo from 30 on in x: want mx=32 or less together"}},
		{"WRF_y(my=9)", []string{"WRF_y: 3 points of the halo from 7 on in y: want my=9 or less together"}},
		{"WRF_x(vars2d=0 vars3d=0 scalars=0)", []string{"WRF_x: no variables"}},
	} {
		typ, _, err := ddt.Resolve(tt.text)
		if err == nil {
			t.Errorf("%q is %s", tt.text, typ)
			continue
		}
		for _, want := range tt.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %q, want %q in it", tt.text, err, want)
			}
		}
	}

	// What looks like a type has the error of Parse, and nothing else.
	for _, text := range []string{"", "null", "vec", "dup", "ctg(ctg)", "vec(2 3)[int]", "vec(2 3 4)[MILC]", "ctg(3)", "struct(0,1,in)", "struct(0,1,MILC(nx=3))"} {
		_, _, err := ddt.Resolve(text)
		_, parse := ddt.Parse(text)
		if err == nil || parse == nil || err.Error() != parse.Error() {
			t.Errorf("%q: %v, want %v", text, err, parse)
		}
	}
}

// The defaults, against the expander that knows nothing of normal forms.
func TestAppPlaces(t *testing.T) {
	for _, a := range ddt.Apps() {
		typ, count, err := a.Make(nil)
		if err != nil {
			t.Fatal(err)
		}
		want := ddttest.Places(typ, count)
		c := commitApp(t, a.Name)
		if int64(len(want)) != c.Size() {
			t.Errorf("%s: %d bytes, want %d", a.Name, c.Size(), len(want))
			continue
		}
		pos := 0
		c.Each(0, c.Size(), func(off, n int64) bool {
			for i := range n {
				if want[pos] != off+i {
					t.Errorf("%s: byte %d goes to %d, want %d", a.Name, pos, off+i, want[pos])
					return false
				}
				pos++
			}
			return true
		})
	}
}

// docs/datatypes.md has these lines, and examples of types that are types.
func TestDocs(t *testing.T) {
	b, err := os.ReadFile("../docs/datatypes.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := string(b)
	for _, a := range ddt.Apps() {
		c := commitApp(t, a.Name)
		_, hi := c.Bounds()
		what, _, _ := strings.Cut(a.Help, ": ")
		shape := fmt.Sprintf("| %s | %s | %d | %d | %.1f | %d |\n", a.Name, what, c.Size(), c.Blocks(), perPacket(c), hi)
		var params []string
		for _, p := range a.Params {
			params = append(params, fmt.Sprintf("%s=%d", p.Name, p.Default))
		}
		list := "none"
		if len(params) > 0 {
			list = "`" + strings.Join(params, " ") + "`"
		}
		origin := fmt.Sprintf("| %s | %s | %s |\n", a.Name, a.Origin, list)
		for _, line := range []string{shape, origin} {
			if !strings.Contains(doc, line) {
				t.Errorf("no line %s", line)
			}
		}
	}
	examples := regexp.MustCompile("(?m)^\\| `[^`]*` \\| `([^`]*)` \\|").FindAllStringSubmatch(doc, -1)
	if len(examples) < 17 {
		t.Errorf("%d examples of types", len(examples))
	}
	for _, e := range examples {
		if _, err := ddt.Parse(e[1]); err != nil {
			t.Errorf("%s: %v", e[1], err)
		}
	}
}

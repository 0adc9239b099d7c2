// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/internal/testenv"
)

// built has what a program's first build gave: each takes seconds.
var built = struct {
	sync.Mutex
	dir   string
	paths map[string]string
}{paths: map[string]string{}}

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		_ = os.RemoveAll(built.dir)
	}
	os.Exit(code)
}

// build builds a program, once. Without MPICH it skips the test, unless XSPIN_NO_SKIP=1 in
// the environment.
func build(t *testing.T, program string) string {
	t.Helper()
	built.Lock()
	defer built.Unlock()
	if path, ok := built.paths[program]; ok {
		return path
	}
	if built.dir == "" {
		dir, err := os.MkdirTemp("", "xspin-mpich")
		if err != nil {
			t.Fatal(err)
		}
		built.dir = dir
	}
	path, err := Build(t.Context(), built.dir, program)
	if err == nil {
		built.paths[program] = path
	}
	if errors.Is(err, ErrMissing) && os.Getenv("XSPIN_NO_SKIP") != "1" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// A question is what src/mpi_compare.c is asked.
type question struct {
	name           string // says how to ask it alone
	typ            *ddt.Type
	count, origin  int64
	memory, stream []byte // no stream: do not unpack
	cuts           *rand.Rand
}

type answer struct {
	Size, Extent, LB, TrueLB, TrueExtent int64
	packed, memory                       []byte
}

func (q *question) String() string {
	return fmt.Sprintf("%s: %d times %.2000s", q.name, q.count, q.typ)
}

func (q *question) write(w io.Writer) error {
	text, stream := Encode(q.typ), int64(len(q.stream))
	if q.stream == nil {
		stream = -1
	}
	var b []byte
	for _, n := range []int64{q.count, q.origin, int64(len(text)), int64(len(q.memory)), stream} {
		b = binary.NativeEndian.AppendUint64(b, uint64(n))
	}
	b = append(append(append(b, text...), q.memory...), q.stream...)
	_, err := w.Write(b)
	return err
}

func (a *answer) read(r io.Reader) error {
	var head struct {
		Error                                int64
		Size, Extent, LB, TrueLB, TrueExtent int64
		Packed, Memory                       int64
	}
	if err := binary.Read(r, binary.NativeEndian, &head); err != nil {
		return fmt.Errorf("mpi_compare has ended: %w", err)
	}
	text := make([]byte, head.Error)
	*a = answer{head.Size, head.Extent, head.LB, head.TrueLB, head.TrueExtent, make([]byte, head.Packed), make([]byte, head.Memory)}
	for _, b := range [][]byte{text, a.packed, a.memory} {
		if _, err := io.ReadFull(r, b); err != nil {
			return fmt.Errorf("mpi_compare has ended: %w", err)
		}
	}
	if len(text) > 0 {
		return fmt.Errorf("MPICH: %s", text)
	}
	return nil
}

// newQuestion chooses memory around what the type touches, and a stream unless bytes of it
// would go to the same place: MPI does not define which stays.
func newQuestion(name string, typ *ddt.Type, count int64, rng *rand.Rand) (q *question, err error) {
	defer panics(&err)
	c, err := ddt.Commit(typ, count)
	if err != nil {
		return nil, err
	}
	lo, hi := c.Bounds()
	if hi-lo > 1<<28 {
		return nil, fmt.Errorf("reaches from byte %d to %d: too far for a test", lo, hi)
	}
	q = &question{name: name, typ: typ, count: count, cuts: rng}
	q.origin = max(-lo, 0) + rng.Int64N(32)
	q.memory = make([]byte, q.origin+max(hi, 0)+rng.Int64N(32))
	fill(q.memory, rng)
	if ddttest.Overlaps(ddttest.Places(typ, count)) {
		return q, nil
	}
	q.stream = make([]byte, c.Size())
	fill(q.stream, rng)
	if pad := padding(typ); slices.Contains(pad, true) {
		packed := make([]byte, c.Size())
		if _, err := c.Pack(packed, q.memory, q.origin, 0); err != nil {
			return nil, err
		}
		for i := range packed {
			if pad[i%len(pad)] {
				q.stream[i] = packed[i]
			}
		}
	}
	return q, nil
}

// panics makes a panic an error, which will name the type.
func panics(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
	}
}

// padding tells for the bytes of an element's stream which are none of a value: the last
// six of a long double. MPICH copies values, and leaves or makes them what it likes.
func padding(t *ddt.Type) []bool {
	pad := make([]bool, 0, t.Size())
	c := t.Contents()
	switch c.Combiner {
	case ddt.CombinerNamed:
		pad = pad[:t.Size()]
		for i := range pad {
			pad[i] = strings.Contains(c.Name, "longdouble") && i%16 >= 10
		}
	case ddt.CombinerStruct:
		for i, old := range c.Types {
			one := padding(old)
			for range c.Blocklens[i] {
				pad = append(pad, one...)
			}
		}
	default:
		one := padding(c.Types[0])
		for int64(len(pad)) < t.Size() {
			pad = append(pad, one...)
		}
	}
	return pad
}

// hasEmpty tells whether there are entries of nothing in a type. MPICH has them make its
// true bounds, also where it was told the others; see Encode. It has them in darrays of its
// own making: for a process whose share of a cyclic dimension is less than a block, this is
// a struct of that and of the whole blocks, of which there are none, at 0.
func hasEmpty(t *ddt.Type) bool {
	c := t.Contents()
	switch c.Combiner {
	case ddt.CombinerVector, ddt.CombinerHVector, ddt.CombinerIndexedBlock, ddt.CombinerHIndexedBlock:
		if c.Blocklen == 0 {
			return true
		}
	case ddt.CombinerDarray, ddt.CombinerDarrayF:
		rank := c.Rank
		for i := len(c.Psizes) - 1; i >= 0; i-- {
			coord := rank % c.Psizes[i]
			rank /= c.Psizes[i]
			if c.Distribs[i] == ddt.Cyclic && c.Sizes[i] < (coord+1)*c.Dargs[i] {
				return true
			}
		}
	}
	return slices.ContainsFunc(c.Types, func(old *ddt.Type) bool { return old.Size() == 0 || hasEmpty(old) })
}

// endsMPICH tells whether there are blocks of no elements in a type. To MPICH (4.0.2) they
// are not nothing, and it may divide by zero packing them: it does for
// struct(0,1,vec(1 0 1)[hidx(0,0 1,1)[double]] 0,1,double).
func endsMPICH(t *ddt.Type) bool {
	c := t.Contents()
	switch c.Combiner {
	case ddt.CombinerVector, ddt.CombinerHVector, ddt.CombinerIndexedBlock, ddt.CombinerHIndexedBlock:
		if c.Blocklen == 0 {
			return true
		}
	}
	return slices.ContainsFunc(c.Types, endsMPICH)
}

func fill(b []byte, rng *rand.Rand) {
	for i := 0; i < len(b); i += 8 {
		var word [8]byte
		binary.NativeEndian.PutUint64(word[:], rng.Uint64())
		copy(b[i:], word[:])
	}
}

// errWalk is that MPICH is wrong, and known to be.
var errWalk = errors.New("MPICH contradicts itself")

// check compares an answer with what we make of the question.
//
// MPICH (4.0.2) may place elements of a type that has others of negative extent in a row in
// it as if its extent was theirs times their number, which is not what it tells to be the
// extent, nor what it is. An example is two of
// ctg(2)[resized(0,-1)[resized(0,0)[hidx(1,1)[byte]]]], extent 0: it packs bytes 1, 0, -1
// and -2, and one by one bytes 1 and 0, and 1 and 0. For such types, where it has other
// bytes, MPI's definitions must have ours.
func (q *question) check(a *answer) (err error) {
	defer panics(&err)
	err = q.compare(a)
	if err == nil || !walksBack(q.typ) || int64(len(a.packed)) != q.typ.Size()*q.count {
		return err
	}
	byDefinition := *a
	byDefinition.packed = make([]byte, len(a.packed))
	byDefinition.memory = bytes.Clone(q.memory)
	for i, place := range ddttest.Places(q.typ, q.count) {
		byDefinition.packed[i] = q.memory[q.origin+place]
		if q.stream != nil {
			byDefinition.memory[q.origin+place] = q.stream[i]
		}
	}
	if q.compare(&byDefinition) == nil {
		return errWalk
	}
	return err
}

// walksBack tells whether a type has others of negative extent in it.
func walksBack(t *ddt.Type) bool {
	return slices.ContainsFunc(t.Contents().Types, func(old *ddt.Type) bool { return old.Extent() < 0 || walksBack(old) })
}

func (q *question) compare(a *answer) error {
	t := q.typ
	trueLB, trueExtent := a.TrueLB, a.TrueExtent
	if hasEmpty(t) {
		trueLB, trueExtent = t.TrueLB(), t.TrueExtent()
	}
	for _, n := range []struct {
		of         string
		have, want int64
	}{
		{"size", t.Size(), a.Size},
		{"extent", t.Extent(), a.Extent},
		{"lower bound", t.LB(), a.LB},
		{"upper bound", t.UB(), a.LB + a.Extent},
		{"true lower bound", t.TrueLB(), trueLB},
		{"true extent", t.TrueExtent(), trueExtent},
	} {
		if n.have != n.want {
			return fmt.Errorf("%s %d, MPICH %d", n.of, n.have, n.want)
		}
	}

	c, err := ddt.Commit(t, q.count)
	if err != nil {
		return err
	}
	if int64(len(a.packed)) != c.Size() {
		return fmt.Errorf("packs to %d bytes, MPICH %d", c.Size(), len(a.packed))
	}
	packed := make([]byte, c.Size())
	err = q.pieces(c.Size(), func(first, last int64) error {
		_, err := c.Pack(packed[first:last], q.memory, q.origin, first)
		return err
	})
	if err != nil {
		return err
	}
	pad := padding(t)
	for i := range packed {
		if pad[i%len(pad)] {
			a.packed[i] = packed[i]
		}
	}
	if err := differ("packed", packed, a.packed); err != nil {
		return err
	}
	if q.stream == nil {
		return nil
	}
	memory := bytes.Clone(q.memory)
	err = q.pieces(c.Size(), func(first, last int64) error {
		_, err := c.Unpack(memory, q.origin, first, q.stream[first:last])
		return err
	})
	if err != nil {
		return err
	}
	return differ("unpacked", memory, a.memory)
}

// pieces cuts a stream at random and calls f with the pieces in any order.
func (q *question) pieces(size int64, f func(first, last int64) error) error {
	var cuts []int64
	longest := 1 + q.cuts.Int64N(2*max(size/8, 1))
	for at := int64(0); at < size; at += 1 + q.cuts.Int64N(longest) {
		cuts = append(cuts, at)
	}
	cuts = append(cuts, size)
	for _, i := range q.cuts.Perm(len(cuts) - 1) {
		if err := f(cuts[i], cuts[i+1]); err != nil {
			return fmt.Errorf("bytes %d to %d of the stream: %w", cuts[i], cuts[i+1]-1, err)
		}
	}
	return nil
}

func differ(what string, have, want []byte) error {
	if bytes.Equal(have, want) {
		return nil
	}
	for i := range have {
		if have[i] != want[i] {
			return fmt.Errorf("%s: byte %d of %d is %#02x, MPICH %#02x", what, i, len(have), have[i], want[i])
		}
	}
	return fmt.Errorf("%s: %d bytes, MPICH %d", what, len(have), len(want))
}

// tolerance is how many errors of a kind are told.
const tolerance = 10

// A peer is a mpi_compare.
type peer struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr bytes.Buffer
}

// newPeer starts one, which ends with the test.
func newPeer(t *testing.T) *peer {
	t.Helper()
	p := &peer{cmd: exec.CommandContext(t.Context(), build(t, "mpi_compare"))}
	p.cmd.Stderr = &p.stderr
	in, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
	p.in, p.out = in, bufio.NewReaderSize(out, 1<<20)
	return p
}

// compare asks MPICH all questions that next gives, until it gives nil. It asks ahead.
func compare(t *testing.T, next func() (*question, error)) (n int) {
	t.Helper()
	p := newPeer(t)
	asked := make(chan *question, 100)
	go func() {
		defer p.in.Close()
		defer close(asked)
		for bad := 0; ; {
			q, err := next()
			if err != nil {
				t.Error(err)
				if bad++; bad == tolerance {
					return
				}
				continue
			}
			if q == nil {
				return
			}
			asked <- q
			if q.write(p.in) != nil {
				return // it has ended, and so will its answers
			}
		}
	}()
	defer func() {
		_ = p.cmd.Process.Kill() // if it lives, because this goroutine has had enough
		for range asked {
		}
	}()

	bad, walks := 0, 0
	for q := range asked {
		var a answer
		err := a.read(p.out)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			_ = p.cmd.Wait()
			t.Fatalf("%v\n%v: %v: %s\n%s", q, err, p.cmd.ProcessState, &p.stderr, Encode(q.typ))
		}
		if err == nil {
			err = q.check(&a)
		}
		if err == errWalk {
			walks++
		} else if err != nil {
			t.Errorf("%v\n%v", q, err)
			if bad++; bad == tolerance {
				t.Fatal("and so on")
			}
		}
		n++
	}
	if walks > 0 {
		t.Logf("of %d types MPICH has other bytes for %d with negative extents, against MPI's definitions", n, walks)
	}
	if walks > 1+n/1000 {
		t.Error("that is more than there is a reason for")
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("mpi_compare: %v: %s", err, &p.stderr)
	}
	return n
}

// number returns a number of the environment.
func number(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text, set := os.LookupEnv(name)
	if !set {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s=%s: %v", name, text, err)
	}
	return n
}

// asks returns questions about types in text, each with some counts.
func asks(texts []string) func() (*question, error) {
	counts := []int64{1, 0, 2, 5}
	i := -1
	return func() (*question, error) {
		i++
		if i == len(texts)*len(counts) {
			return nil, nil
		}
		text := texts[i/len(counts)]
		typ, err := ddt.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", text, err)
		}
		q, err := newQuestion(text, typ, counts[i%len(counts)], rand.New(rand.NewPCG(uint64(i), 0)))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", text, err)
		}
		return q, nil
	}
}

func TestPredefinedTypesAreThoseOfMPI(t *testing.T) {
	var texts []string
	for _, name := range ddt.Predefined() {
		texts = append(texts, name, fmt.Sprintf("struct(1,1,char 16,3,%s)", name), fmt.Sprintf("vec(3 2 4)[%s]", name))
	}
	if n := compare(t, asks(texts)); n < 30*4 {
		t.Errorf("compared %d questions", n)
	}
}

func TestCornersAreThoseOfMPI(t *testing.T) {
	compare(t, asks([]string{
		// Nothing, and nothing in something.
		"ctg(0)[int]",
		"ctg(3)[ctg(0)[int]]",
		"vec(0 3 2)[int]",
		"hvec(0 3 2)[int]",
		"idx()[int]",
		"hidx()[int]",
		"idxb(3: )[int]",
		"hidxb(3: )[int]",
		"struct()",
		"idx(5,0 1,2 100,0)[int]",
		"hidx(5,0 1,2 100,0)[int]",
		"struct(100,0,double 3,1,char -100,0,int)",
		"struct(3,1,char 100,1,ctg(0)[double])",
		"struct(3,1,char 100,1,resized(-8,24)[ctg(0)[double]])",
		"resized(8,4)[ctg(0)[int]]",
		"ctg(2)[resized(8,4)[ctg(0)[int]]]",

		// Backwards, and over themselves.
		"vec(4 1 -2)[int]",
		"hvec(4 2 -9)[short]",
		"hvec(3 2 1)[int]",
		"vec(4 1 0)[int]",
		"idx(3,2 -4,1 9,2 0,1)[double]",
		"hidxb(2: 7 -20 31)[short]",
		"ctg(3)[resized(0,-12)[int]]",
		"ctg(3)[resized(-4,-12)[int]]",
		"vec(2 3 2)[resized(-7,-3)[short]]",
		"ctg(3)[resized(2,0)[char]]",

		// Structs pad, unless a bound was set in them.
		"struct(0,1,double 8,1,char)",
		"struct(0,1,char 1,1,double)",
		"struct(-3,1,char -11,1,int)",
		"struct(0,1,longdouble 16,1,char)",
		"struct(0,1,ctg(3)[char] 4,1,ctg(0)[double])",
		"struct(0,1,double 8,0,char 9,1,char)",
		"struct(0,1,int 4,1,struct(0,1,double 8,1,char) 30,1,char)",
		"struct(0,1,resized(0,9)[double] 9,1,char)",
		"struct(0,1,ctg(2)[resized(0,9)[double]] 18,1,char)",
		"ctg(2)[struct(0,1,double 8,1,char)]",
		"resized(-2,3)[struct(0,1,double 8,1,char)]",
		"struct(0,1,dup[struct(0,1,short 2,1,char)] 4,3,char)",

		"struct(3,1,char 100,1,resized(-8,24)[int])",
		"struct(3,1,char 10,1,subarray(1,2,4)[int])",
		"hidx(100,1 3,1)[resized(-8,24)[int]]",
		// Arrays.
		"subarray(1,2,4 2,3,5)[int]",
		"subarrayf(1,2,4 2,3,5)[int]",
		"subarray(0,4,4)[double]",
		"subarray(1,1,2 1,1,3 0,4,4 2,3,7)[short]",
		"subarray(1,2,4 2,3,5)[resized(-3,7)[short]]",
		"subarrayf(1,2,4 2,3,5)[resized(5,-7)[short]]",
		"dup[dup[int]]",
		"resized(3,100)[dup[resized(-1,1)[int]]]",
	}))
}

// XSPIN_MPICH_TYPES in the environment is how many types to compare, and XSPIN_MPICH_SEED
// the seed of the first one.
func TestRandomTypesAreThoseOfMPI(t *testing.T) {
	asked, first := number(t, "XSPIN_MPICH_TYPES", 2_000*uint64(testenv.Soak())), number(t, "XSPIN_MPICH_SEED", 1)
	types, seed := asked, first
	unpacked, bytes := 0, 0
	compare(t, func() (*question, error) {
		if types == 0 {
			return nil, nil
		}
		var (
			name  string
			rng   *rand.Rand
			typ   *ddt.Type
			count int64
		)
		for typ == nil || endsMPICH(typ) {
			name = fmt.Sprintf("XSPIN_MPICH_TYPES=1 XSPIN_MPICH_SEED=%d", seed)
			rng = rand.New(rand.NewPCG(seed, 0))
			// Small ones have all there is to get wrong. Where MPI defines what unpacking
			// gives they must not overlap.
			o := ddttest.Options{MaxBytes: 2 << 10, MaxExtent: 64 << 10, NoOverlap: rng.IntN(4) > 0}
			typ, count = ddttest.Random(rng, o)
			seed++
		}
		types--
		q, err := newQuestion(name, typ, count, rng)
		if err != nil {
			return nil, fmt.Errorf("%s: %d times %v: %w", name, count, typ, err)
		}
		if q.stream != nil {
			unpacked++
			bytes += len(q.stream)
		}
		return q, nil
	})
	t.Logf("%d unpacked, of %d bytes on average, %d not asked for", unpacked, bytes/max(unpacked, 1), seed-first-asked+types)
	if asked >= 10_000 && uint64(unpacked) < asked/2 {
		t.Errorf("of %d types only %d were such that unpacking them is defined", asked, unpacked)
	}
}

// MPI-3 has numbers of elements that are int.
func TestTypesThatMPIHasNoRoomForAreRefused(t *testing.T) {
	p := newPeer(t)
	for text, want := range map[string]string{
		"ctg(2147483647)[byte]":       "", // the stream is too long, but there is a type
		"ctg(2147483648)[byte]":       "type 1: a number that MPI-3",
		"vec(2 1 -2147483649)[byte]":  "type 1: a number that MPI-3",
		"hvec(2 1 -2147483649)[byte]": "",
		"idx(2147483648,1)[byte]":     "type 1: a number that MPI-3",
		"hidx(2147483648,1)[byte]":    "",
	} {
		typ, err := ddt.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		q := &question{typ: typ, memory: []byte{}}
		var a answer
		if err := q.write(p.in); err != nil {
			t.Fatal(err)
		}
		err = a.read(p.out)
		if want == "" && (err != nil || a.Size != typ.Size()) {
			t.Errorf("%s: %d bytes, %v", text, a.Size, err)
		}
		if want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

func TestApplicationTypesAreThoseOfMPI(t *testing.T) {
	apps := ddt.Apps()
	n := compare(t, func() (*question, error) {
		if len(apps) == 0 {
			return nil, nil
		}
		name := apps[0].Name
		apps = apps[1:]
		typ, count, err := ddt.Resolve(name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		return newQuestion(name, typ, count, rand.New(rand.NewPCG(1, 2)))
	})
	if n < 15 {
		t.Errorf("compared %d application types", n)
	}
}

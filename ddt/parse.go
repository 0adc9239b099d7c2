// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"
)

// Limits of texts. A type needs less than a kilobyte, whatever it is written with.
const (
	MaxText  = 64 << 20 // bytes
	MaxTypes = 1 << 20  // constructors
)

// Parse reads a type as text. The grammar is FPsPIN's (all but those marked *):
//
//	byte char short int long float double ...   predefined, see Predefined
//	ctg(count)[T]                               Contiguous
//	vec(count blocklen stride)[T]               NewVector, the stride in extents
//	hvec(count blocklen stride)[T]              HVector, the stride in bytes
//	idx(displ,blocklen ...)[T]                  Indexed, in extents *
//	hidx(displ,blocklen ...)[T]                 HIndexed, in bytes
//	idxb(blocklen: displ ...)[T]                IndexedBlock, in extents
//	hidxb(blocklen: displ ...)[T]               HIndexedBlock, in bytes *
//	struct(displ,blocklen,T ...)                Struct, in bytes
//	subarray(start,subsize,size ...)[T]         Subarray, C order
//	subarrayf(start,subsize,size ...)[T]        Subarray, Fortran order *
//	darray(size rank: gsize,distrib,psize ...)[T]  Darray, C order; distrib is
//	                                            block, block:arg, cyclic, cyclic:arg or none *
//	darrayf(...)[T]                             Fortran order *
//	resized(lb,extent)[T]                       Resized
//	dup[T]                                      Dup *
//
// Spaces and new lines may stand between any two of them, and must between numbers. A
// number of ctg, vec and hvec may be a range first:step:last, of which the first is
// taken. A comment begins with // and ends with its line. A text is one type.
//
// Errors are *SyntaxError, those of constructors too, which are at the number that is
// wrong if it is a negative count, and else at the constructor's name. What is beyond MaxText, MaxTypes, MaxEntries or MaxDepth is one.
func Parse(text string) (*Type, error) {
	p := parser{text: text}
	if len(text) > MaxText {
		p.fail(0, fmt.Errorf("text of %d bytes: want %d or fewer", len(text), MaxText))
		return nil, p.err
	}
	t := p.typ()
	if p.skip(); p.pos < len(text) {
		p.want("the end after one type")
	}
	if p.err != nil {
		return nil, p.err
	}
	return t, nil
}

// A SyntaxError says where a text is no type, and why.
type SyntaxError struct {
	Line, Column int // from 1, in bytes
	Err          error
}

// Error returns line:column and the reason.
func (e *SyntaxError) Error() string { return fmt.Sprintf("%d:%d: %v", e.Line, e.Column, e.Err) }

// Unwrap returns the reason.
func (e *SyntaxError) Unwrap() error { return e.Err }

// A parser reads a text once, from left to right. After an error it is at the end of the
// text: nothing that follows is read, or reported.
type parser struct {
	text  string
	pos   int
	in    string // the constructor whose arguments are read
	wrong int    // where its first negative count or block length is, 0 for nowhere
	depth int    // constructors that are open
	types int    // constructors so far
	err   *SyntaxError
}

// fail keeps the first error.
func (p *parser) fail(pos int, err error) {
	if p.err == nil {
		before := p.text[:pos]
		p.err = &SyntaxError{
			Line:   1 + strings.Count(before, "\n"),
			Column: pos - strings.LastIndexByte(before, '\n'),
			Err:    err,
		}
	}
	p.pos = len(p.text)
}

// want fails with what is next, and what should be.
func (p *parser) want(what string) {
	p.skip()
	in := ""
	if p.in != "" {
		in = p.in + ": "
	}
	p.fail(p.pos, fmt.Errorf("%sfound %s, want %s", in, p.found(), what))
}

// found returns what is next as somebody would call it.
func (p *parser) found() string {
	rest := p.text[p.pos:]
	if rest == "" {
		return "the end"
	}
	n := 0
	if rest[0] == '-' {
		n = 1
	}
	for n < len(rest) && isWord(rest[n]) {
		n++
	}
	if n == 0 {
		_, n = utf8.DecodeRuneInString(rest)
	}
	const most = 24
	if n > most {
		return fmt.Sprintf("%q...", rest[:most])
	}
	return fmt.Sprintf("%q", rest[:n])
}

// skip goes to what is next.
func (p *parser) skip() {
	for p.pos < len(p.text) {
		switch c := p.text[p.pos]; {
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			p.pos++
		case c == '/' && strings.HasPrefix(p.text[p.pos:], "//"):
			n := strings.IndexByte(p.text[p.pos:], '\n')
			if n < 0 {
				n = len(p.text) - p.pos
			}
			p.pos += n
		default:
			return
		}
	}
}

// take tells whether a character is next, and goes past it.
func (p *parser) take(c byte) bool {
	p.skip()
	if p.pos == len(p.text) || p.text[p.pos] != c {
		return false
	}
	p.pos++
	return true
}

// need fails unless a character is next. what comes after it is for the error.
func (p *parser) need(c byte, what string) {
	if !p.take(c) {
		p.want(fmt.Sprintf("%q%s", string(c), what))
	}
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func isWord(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || isDigit(c) || c == '_'
}

// word reads a name. Some begin with a digit, so only the caller knows it from a number.
func (p *parser) word() string {
	p.skip()
	first := p.pos
	for p.pos < len(p.text) && isWord(p.text[p.pos]) {
		p.pos++
	}
	return p.text[first:p.pos]
}

// number reads one. what it is, and what it could be instead, are for the error.
func (p *parser) number(what, or string) int64 {
	p.skip()
	first := p.pos
	minus := p.take('-')
	digits := p.pos
	var n uint64
	for ; p.pos < len(p.text) && isDigit(p.text[p.pos]); p.pos++ {
		d := uint64(p.text[p.pos] - '0')
		if n > (math.MaxUint64-d)/10 {
			n = math.MaxUint64 // and stays
			continue
		}
		n = n*10 + d
	}
	switch {
	case p.pos == digits:
		p.pos = first
		p.want(what + or)
		return 0
	case n > math.MaxInt64 && !(minus && n == -math.MinInt64):
		p.pos = first
		p.fail(first, fmt.Errorf("%s: %s %s does not fit in 64 bits", p.in, what, p.found()))
		return 0
	case p.pos < len(p.text) && (isWord(p.text[p.pos]) || p.text[p.pos] == '-'):
		p.fail(p.pos, fmt.Errorf("%s: found %s right after %s, want a space between", p.in, p.found(), what))
		return 0
	}
	if minus {
		if n > 0 && p.wrong == 0 && (what == "count" || what == "blocklen") {
			p.wrong = first
		}
		return int64(-n)
	}
	return int64(n)
}

// first reads a number or a range, and returns the number or where the range begins.
func (p *parser) first(what string) int64 {
	if p.skip(); p.pos < len(p.text) && p.text[p.pos] == ',' {
		p.want(what + ": spaces, not commas, between numbers")
	}
	n := p.number(what, "")
	at := p.pos
	if !p.take(':') {
		return n
	}
	step := p.number("step", " of a range first:step:last")
	p.need(':', " and the last of a range first:step:last")
	last := p.number("last", " of a range first:step:last")
	switch {
	case step <= 0:
		p.fail(at, fmt.Errorf("%s: range with step %d: want 1 or more", p.in, step))
	case last < n:
		p.fail(at, fmt.Errorf("%s: range from %d to %d has no number: want the last at or after the first", p.in, n, last))
	}
	return n
}

// entries calls read for each entry of a list, until its ).
func (p *parser) entries(read func()) {
	for n := 0; p.err == nil && !p.take(')'); n++ {
		if n == MaxEntries {
			p.fail(p.pos, fmt.Errorf("%s: more entries than %d, the most that a list may have", p.in, MaxEntries))
			return
		}
		read()
	}
}

// tuples reads entries that are numbers, with commas between them, and returns them by
// column.
func (p *parser) tuples(names ...string) [3][]int64 {
	var columns [3][]int64
	p.entries(func() {
		for i, name := range names {
			or := ` or ")"`
			if i > 0 {
				p.need(',', " and "+name)
				or = ""
			}
			columns[i] = append(columns[i], p.number(name, or))
		}
	})
	return columns
}

// typ reads a type.
func (p *parser) typ() *Type {
	p.skip()
	at := p.pos
	name := p.word()
	if t, ok := Lookup(name); ok {
		if t == null {
			p.fail(at, errors.New("null is MPI_DATATYPE_NULL, of which there are no messages: want a type"))
		}
		return t
	}
	if !isConstructor(name) {
		p.pos = at
		what := hint(name)
		if what == "" {
			what = "a name such as int or double, or a constructor such as vec or struct"
		}
		p.want("a type: " + what)
		return nil
	}
	c := Combiner(name)
	if p.depth++; p.depth > MaxDepth {
		p.fail(at, fmt.Errorf("%s is %d constructors deep: want %d or less", name, p.depth, MaxDepth))
		return nil
	}
	if p.types++; p.types > MaxTypes {
		p.fail(at, fmt.Errorf("%s is constructor number %d of the text: want %d or fewer", name, p.types, MaxTypes))
		return nil
	}
	outer, outerWrong := p.in, p.wrong
	p.in, p.wrong = name, 0
	build := p.arguments(c)
	var inner *Type
	if c != CombinerStruct {
		p.need('[', "")
		inner = p.typ()
		p.need(']', "")
	}
	wrong := p.wrong
	p.in, p.wrong = outer, outerWrong
	p.depth--
	if p.err != nil {
		return nil
	}
	t, err := build(inner)
	if err != nil {
		if wrong > 0 {
			at = wrong // all of them refuse it, and nothing before it
		}
		p.fail(at, err)
	}
	return t
}

// arguments reads the arguments of a constructor, and returns how to call it.
func (p *parser) arguments(c Combiner) func(t *Type) (*Type, error) {
	if c == CombinerDup {
		return func(t *Type) (*Type, error) { return Dup(t), nil }
	}
	p.need('(', "")
	switch c {
	case CombinerContiguous:
		count := p.first("count")
		p.need(')', "")
		return func(t *Type) (*Type, error) { return Contiguous(count, t) }

	case CombinerVector, CombinerHVector:
		count, blocklen, stride := p.first("count"), p.first("blocklen"), p.first("stride")
		p.need(')', "")
		build := NewVector
		if c == CombinerHVector {
			build = HVector
		}
		return func(t *Type) (*Type, error) { return build(count, blocklen, stride, t) }

	case CombinerIndexed, CombinerHIndexed:
		l := p.tuples("displ", "blocklen")
		build := Indexed
		if c == CombinerHIndexed {
			build = HIndexed
		}
		return func(t *Type) (*Type, error) { return build(l[1], l[0], t) }

	case CombinerIndexedBlock, CombinerHIndexedBlock:
		blocklen := p.number("blocklen", "")
		p.need(':', "")
		l := p.tuples("displ")
		build := IndexedBlock
		if c == CombinerHIndexedBlock {
			build = HIndexedBlock
		}
		return func(t *Type) (*Type, error) { return build(blocklen, l[0], t) }

	case CombinerStruct:
		var blocklens, displs []int64
		var types []*Type
		p.entries(func() {
			displs = append(displs, p.number("displ", ` or ")"`))
			p.need(',', " and blocklen")
			blocklens = append(blocklens, p.number("blocklen", ""))
			p.need(',', " and a type")
			types = append(types, p.typ())
		})
		return func(*Type) (*Type, error) { return Struct(blocklens, displs, types) }

	case CombinerSubarray, CombinerSubarrayF:
		l := p.tuples("start", "subsize", "size")
		return func(t *Type) (*Type, error) {
			return Subarray(l[2], l[1], l[0], orderOf(c == CombinerSubarrayF), t)
		}

	case CombinerDarray, CombinerDarrayF:
		size, rank := p.number("size", ""), p.number("rank", "")
		p.need(':', "")
		var gsizes, dargs, psizes []int64
		var distribs []Distribution
		p.entries(func() {
			gsizes = append(gsizes, p.number("gsize", ` or ")"`))
			p.need(',', " and block, cyclic or none")
			d, arg := p.distribution()
			distribs, dargs = append(distribs, d), append(dargs, arg)
			p.need(',', " and psize")
			psizes = append(psizes, p.number("psize", ""))
		})
		return func(t *Type) (*Type, error) {
			return Darray(size, rank, gsizes, distribs, dargs, psizes, orderOf(c == CombinerDarrayF), t)
		}

	default: // CombinerResized
		lb := p.number("lb", "")
		p.need(',', " and extent")
		extent := p.number("extent", "")
		p.need(')', "")
		return func(t *Type) (*Type, error) { return Resized(t, lb, extent) }
	}
}

func orderOf(fortran bool) Order {
	if fortran {
		return Fortran
	}
	return C
}

// distributions are their names.
var distributions = [...]string{Block: "block", Cyclic: "cyclic", Whole: "none"}

func (p *parser) distribution() (d Distribution, arg int64) {
	p.skip()
	at := p.pos
	name := p.word()
	for i, s := range distributions {
		if s != name {
			continue
		}
		if p.take(':') {
			return Distribution(i), p.number("arg", "")
		}
		return Distribution(i), DefaultArg
	}
	p.pos = at
	p.want("block, cyclic or none")
	return 0, 0
}

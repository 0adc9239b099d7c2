// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/xspin/xspin/demos/file"
)

const (
	layoutColumns = 64
	layoutLines   = 16
)

// Characters of a layout.
const (
	holeMark   = '.'
	fullMark   = '#'
	partMark   = '+'
	twiceMark  = '*'
	blockMarks = "0123456789abcdefghijklmnopqrstuvwxyz"
)

// A layout is a picture of memory.
type layout struct {
	Unit    int64        `json:"unit_bytes"` // that a character stands for
	Line    int64        `json:"line_bytes"` // from one line to the next
	Blocks  bool         `json:"blocks"`     // characters are blocks, else how much is touched
	Lines   []layoutLine `json:"lines"`      // those that are touched
	Stride  bool         `json:"line_is_stride"`
	Columns int64        `json:"line_characters"` // that a whole line has; not all are shown
	Left    int64        `json:"first_character"` // of those that are shown, from 0
	Further bool         `json:"further"`         // touched lines follow
}

type layoutLine struct {
	Offset int64  `json:"offset"` // where the line begins, from the buffer's origin
	Text   string `json:"text"`
}

// drawable limits the distance of a picture from the origin.
const drawable = 1 << 55

// draw draws the first lines that pieces touch, which must be in the order of memory.
// Lines are a stride long, if there is one, and start at multiples of it. It returns nil
// if the pieces are too far apart for a picture.
func draw(list []piece, stride int64) *layout {
	first, end := list[0].off, list[0].end
	unit, longest := stride, int64(0) // unit: the largest that divides everything
	for _, p := range list {
		end = max(end, p.end)
		unit = gcd(unit, gcd(p.off, p.end))
		longest = max(longest, p.end-p.off)
	}
	if first < -drawable || end > drawable || stride > drawable {
		return nil
	}
	l := &layout{Unit: unit, Line: stride, Blocks: true, Stride: stride > 0}
	if !l.Stride {
		switch span := end - first; {
		case len(list) == 1:
			l.Unit = (span-1)/layoutColumns + 1
		case longest/unit > layoutColumns:
			l.Blocks = false
			for l.Unit = 1; l.Unit*layoutColumns*layoutLines < span; {
				l.Unit *= 2
			}
		}
		l.Line = l.Unit * layoutColumns
	}
	lines, left, right := l.touched(list)
	if right-left > layoutColumns*l.Unit {
		// Whole lines, with as many bytes in a character as needed.
		l.Blocks = false
		l.Unit = (l.Line-1)/layoutColumns + 1
	}
	l.Columns = (l.Line-1)/l.Unit + 1
	if right > layoutColumns*l.Unit { // else lines are shown from their start
		l.Left = min(left/l.Unit, l.Columns-layoutColumns)
	}
	for _, at := range lines {
		l.Lines = append(l.Lines, layoutLine{at, l.text(list, at, l.Left)})
	}
	if last := &l.Lines[len(l.Lines)-1]; !l.Stride && !l.Further {
		last.Text = strings.TrimRight(last.Text, string(holeMark)) // what follows the last byte is not a hole
	}
	return l
}

// touched returns the starts of the lines to draw, and which part of them is touched.
func (l *layout) touched(list []piece) (lines []int64, left, right int64) {
	left = l.Line
	at := list[0].off
	for i := 0; ; {
		for i < len(list) && list[i].end <= at {
			i++
		}
		if i == len(list) {
			return lines, left, right
		}
		if len(lines) == layoutLines {
			l.Further = true
			return lines, left, right
		}
		at = max(at, list[i].off)
		line := floorDiv(at, l.Line) * l.Line
		lines = append(lines, line)
		left = min(left, at-line)
		at = line + l.Line
		for _, p := range list[i:] {
			if p.off >= at {
				break
			}
			right = max(right, min(p.end, at)-line)
		}
	}
}

// text draws a line of memory from a column on.
func (l *layout) text(list []piece, line, column int64) string {
	n := min(layoutColumns, l.Columns-column)
	text := []byte(strings.Repeat(string(holeMark), int(n)))
	touched := make([]int64, n)
	lo, hi := line+column*l.Unit, min(line+l.Line, line+(column+n)*l.Unit)
	end := lo // what is drawn so far
	for _, p := range list {
		if p.off >= hi {
			break
		}
		from, to := max(p.off, lo), min(p.end, hi)
		for from < to {
			i := (from - lo) / l.Unit
			next := min(to, lo+(i+1)*l.Unit)
			touched[i] += next - from
			switch {
			case from < end || text[i] == twiceMark:
				text[i] = twiceMark
			case l.Blocks:
				text[i] = blockMarks[p.number%int64(len(blockMarks))]
			case touched[i] == min(l.Unit, hi-lo-i*l.Unit):
				text[i] = fullMark
			default:
				text[i] = partMark
			}
			from = next
		}
		end = max(end, to)
	}
	return string(text)
}

func (l *layout) print(w io.Writer) {
	fmt.Fprintf(w, "%-12s %s of %s", "layout", "lines", count64(l.Line, "byte"))
	if l.Stride {
		fmt.Fprint(w, ", the innermost stride")
	}
	if l.Unit < 1<<20 {
		fmt.Fprintf(w, "; a character is %s", count64(l.Unit, "byte"))
	} else {
		fmt.Fprintf(w, "; a character is %s", file.Bytes(l.Unit))
	}
	if l.Columns > layoutColumns {
		fmt.Fprintf(w, ", %d of %d are shown", layoutColumns, l.Columns)
	}
	if l.Left > 0 {
		fmt.Fprintf(w, ", from byte %d of the line on", l.Left*l.Unit)
	}
	all := ""
	for _, line := range l.Lines {
		all += line.Text
	}
	legend := fmt.Sprintf("%c touched, %c in part", fullMark, partMark)
	if l.Blocks {
		legend = "0 to 9, a to z: number of the block in the stream, again from 0 after z"
	}
	for _, m := range []struct {
		mark rune
		what string
	}{{holeMark, "hole"}, {twiceMark, "more than once"}} {
		if strings.ContainsRune(all, m.mark) {
			legend += fmt.Sprintf("; %c %s", m.mark, m.what)
		}
	}
	fmt.Fprintf(w, "\n%-12s %s\n", "", legend)
	for i, line := range l.Lines {
		if i > 0 && line.Offset != l.Lines[i-1].Offset+l.Line {
			fmt.Fprintf(w, "%12s\n", "...")
		}
		fmt.Fprintf(w, "%12d %s\n", line.Offset, line.Text)
	}
	if l.Further {
		fmt.Fprintf(w, "%12s\n", "...")
	}
}

// count64 is count of an int64.
func count64(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// gcd returns the greatest common divisor of the magnitudes.
func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return max(a, -a)
}

func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

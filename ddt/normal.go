// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"unsafe"
)

// A Kind is what a Node is.
type Kind uint8

// Kinds of nodes. In each, stream order is the order of parts.
const (
	Contig Kind = iota // Size bytes in a row, at the origin
	Vector             // Count times Child, Stride bytes apart, the first at the origin
	Index              // Child at each of Displs
	List               // parts of different lengths, at Displs
)

// A Node is a part of a normal form. It is plain data: whoever wants to interpret it
// elsewhere, in a kernel program say, finds all there is to know in its fields. Places
// are in bytes from the node's own origin.
//
// Nodes are shared: a tree may be a graph.
type Node struct {
	Kind   Kind
	Size   int64 // bytes of the stream, at least 1
	Lo, Hi int64 // it touches bytes Lo to Hi-1 and none outside
	Blocks int64 // pieces in a row that it is placed in; saturates
	Depth  int   // of nodes, 1 for Contig

	Count  int64   // Vector: at least 2. Index and List: len(Displs)
	Stride int64   // Vector; may be negative
	Displs []int64 // Index, List; at least 2
	Child  *Node   // Vector, Index

	// List: part i has the stream's bytes Starts[i] to Starts[i+1]-1. It is
	// Children[i], or if there are no Children as many bytes in a row.
	Starts   []int64
	Children []*Node
}

// MaxNodes is how deep a normal form may be.
const MaxNodes = 64

// A Committed is some elements of a type in normal form. It does not change.
type Committed struct {
	typ    *Type
	count  int64
	root   *Node // nil: no bytes
	fast   *Node // the same, with what is small made flat
	origin int64 // of root, from the buffer's

	size          int64 // of the stream
	before, after int64 // room before and after the buffer's origin; may be negative
}

// Commit brings count elements of a type to normal form: what is a vector, however it was
// written, becomes one, and what touches becomes one block. It takes time and memory in
// proportion to what was written, not to what that describes.
func Commit(t *Type, count int64) (*Committed, error) {
	switch {
	case t == nil:
		return nil, fmt.Errorf("commit: no type")
	case count < 0:
		return nil, fmt.Errorf("commit %d elements: want 0 or more", count)
	}
	c := &Committed{typ: t, count: count}
	if count == 0 || t.size == 0 {
		return c, nil
	}
	if size, ok := mul(count, t.size); !ok || size == math.MaxInt64 {
		return nil, fmt.Errorf("commit %d elements of %d bytes: the size overflows 64 bits", count, t.size)
	}
	// The last element is farthest out, on either side.
	far, ok := mul(count-1, t.ub-t.lb)
	lo, ok1 := add(t.trueLB, min(far, 0))
	hi, ok2 := add(t.trueUB, max(far, 0))
	if _, ok3 := sub(hi, lo); !ok || !ok1 || !ok2 || !ok3 || lo == math.MinInt64 {
		return nil, fmt.Errorf("commit %d elements of extent %d: the places overflow 64 bits", count, t.ub-t.lb)
	}
	n := normalizer{
		types:   make(map[*Type]placed),
		vectors: make(map[vectorKey]*Node),
		contigs: make(map[int64]*Node),
	}
	p := n.repeat(n.typ(t), count, t.ub-t.lb)
	if p.node.Depth > MaxNodes {
		if p.node.Blocks > flattest {
			return nil, fmt.Errorf("commit: %d nested types remain in the normal form, and %d blocks: want at most %d, or at most %d blocks", p.node.Depth, p.node.Blocks, MaxNodes, flattest)
		}
		p.node = n.flat(p.node)
	}
	c.root, c.origin, c.size = p.node, p.at, p.node.Size
	c.before, c.after = -(p.at + p.node.Lo), p.at+p.node.Hi
	c.fast = (&tuner{n: &n, done: make(map[*Node]*Node), left: allTables}).tune(p.node)
	return c, nil
}

// flattest is how many blocks a normal form that is too deep may have to be made flat.
const flattest = 1 << 16

// placed is a node and where its first byte goes; no node: no bytes.
type placed struct {
	node *Node
	at   int64
}

// A normalizer makes nodes. Contigs and vectors that are the same are one node, so that
// lists see what is the same.
type normalizer struct {
	types   map[*Type]placed
	vectors map[vectorKey]*Node
	contigs map[int64]*Node
}

type vectorKey struct {
	count, stride int64
	child         *Node
}

// typ normalizes a type. Depth is limited by MaxDepth.
func (n *normalizer) typ(t *Type) placed {
	if t.size == 0 {
		return placed{}
	}
	p, ok := n.types[t]
	if ok {
		return p
	}
	switch t.kind {
	case predefined:
		p = placed{node: n.contig(t.size)}
	case same:
		p = n.typ(t.children[0])
	case regular:
		child := t.children[0]
		p = n.repeat(n.typ(child), t.blocklen, child.ub-child.lb)
		p = n.repeat(p, t.count, t.stride)
	case listed:
		p = n.listed(t)
	}
	n.types[t] = p
	return p
}

func (n *normalizer) listed(t *Type) placed {
	all := make([]placed, 0, len(t.displs))
	var last placed // what entry i-1 was without its displacement: most are alike
	var lastLen int64
	var lastChild *Type
	for i, d := range t.displs {
		child, blocklen := t.children[0], t.blocklens[0]
		if len(t.children) > 1 {
			child = t.children[i]
		}
		if len(t.blocklens) > 1 {
			blocklen = t.blocklens[i]
		}
		if child != lastChild || blocklen != lastLen {
			last = n.repeat(n.typ(child), blocklen, child.ub-child.lb)
			lastChild, lastLen = child, blocklen
		}
		if last.node != nil {
			all = append(all, placed{last.node, last.at + d})
		}
	}
	return n.list(all)
}

func (n *normalizer) contig(size int64) *Node {
	c := n.contigs[size]
	if c == nil {
		c = &Node{Kind: Contig, Size: size, Hi: size, Blocks: 1, Depth: 1}
		n.contigs[size] = c
	}
	return c
}

// repeat is p count times, stride bytes apart.
func (n *normalizer) repeat(p placed, count, stride int64) placed {
	switch c := p.node; {
	case c == nil || count == 0:
		return placed{}
	case count == 1:
		return p
	case c.Kind == Contig && stride == c.Size:
		return placed{n.contig(count * c.Size), p.at}
	case c.Kind == Vector && stride == c.Count*c.Stride:
		return n.repeat(placed{c.Child, p.at}, count*c.Count, c.Stride)
	}
	key := vectorKey{count, stride, p.node}
	v := n.vectors[key]
	if v == nil {
		c := p.node
		far := (count - 1) * stride
		v = &Node{
			Kind: Vector, Size: count * c.Size, Lo: c.Lo + min(far, 0), Hi: c.Hi + max(far, 0),
			Blocks: times(count, c.Blocks), Depth: c.Depth + 1, Count: count, Stride: stride, Child: c,
		}
		n.vectors[key] = v
	}
	return placed{v, p.at}
}

// list is all parts, one after the other. It may change them.
func (n *normalizer) list(all []placed) placed {
	merged := all[:0]
	var run Node // what the last part has grown to. It becomes one of n's when it ends
	grown := false
	end := func() {
		if grown {
			merged[len(merged)-1].node = n.grown(&run)
			grown = false
		}
	}
	for _, p := range all {
		if last := len(merged) - 1; last >= 0 {
			var was *Node
			if !grown {
				was = merged[last].node
				run = *was
			}
			if run.join(was, merged[last].at, p) {
				grown = true
				continue
			}
			end()
		}
		merged = append(merged, p)
	}
	end()
	switch len(merged) {
	case 0:
		return placed{}
	case 1:
		return merged[0]
	}
	first := merged[0]
	alike, step := true, merged[1].at-first.at
	even, contigs := true, true
	for i, p := range merged {
		alike = alike && p.node == first.node
		even = even && p.at-first.at == int64(i)*step
		contigs = contigs && p.node.Kind == Contig
	}
	if alike && even {
		return n.repeat(first, int64(len(merged)), step)
	}
	l := &Node{Kind: List, Count: int64(len(merged)), Displs: make([]int64, len(merged))}
	if alike {
		l.Kind, l.Child = Index, first.node
	} else {
		l.Starts = make([]int64, len(merged)+1)
		if !contigs {
			l.Children = make([]*Node, len(merged))
		}
	}
	for i, p := range merged {
		d := p.at - first.at
		l.Displs[i] = d
		l.Lo, l.Hi = min(l.Lo, d+p.node.Lo), max(l.Hi, d+p.node.Hi)
		l.Blocks = plus(l.Blocks, p.node.Blocks)
		l.Depth = max(l.Depth, p.node.Depth+1)
		l.Size += p.node.Size
		if l.Kind == List {
			l.Starts[i+1] = l.Size
		}
		if l.Children != nil {
			l.Children[i] = p.node
		}
	}
	return placed{l, first.at}
}

// join adds p to the end of c, which is at a place, if together they are a block or a
// vector, too. Only what n.grown needs is true of c then. was is the node that c is a copy
// of, nil if it has grown.
func (c *Node) join(was *Node, at int64, p placed) bool {
	d := p.node
	switch {
	case c.Kind == Contig && d.Kind == Contig && at+c.Size == p.at:
		c.Size += d.Size
	case c.Kind == Vector && d.Kind == Vector && c.Child == d.Child && c.Stride == d.Stride && at+c.Count*c.Stride == p.at:
		c.Count += d.Count
	case c.Kind == Vector && c.Child == d && at+c.Count*c.Stride == p.at:
		c.Count++
	case was != nil && d.Kind == Vector && d.Child == was && at+d.Stride == p.at:
		*c = Node{Kind: Vector, Count: d.Count + 1, Stride: d.Stride, Child: was}
	default:
		return false
	}
	return true
}

// grown returns the node that is what join has made.
func (n *normalizer) grown(c *Node) *Node {
	if c.Kind == Contig {
		return n.contig(c.Size)
	}
	return n.repeat(placed{node: c.Child}, c.Count, c.Stride).node
}

// flat is a node as a list of blocks.
func (n *normalizer) flat(c *Node) *Node {
	var all []placed
	c.each(0, 0, c.Size, func(off, size int64) bool {
		all = append(all, placed{n.contig(size), off})
		return true
	})
	return n.list(all).node
}

// A tuner makes levels of few parts flat, which cost more to go through than a table costs
// to read. A table has at most tableBlocks entries, and all of them allTables.
type tuner struct {
	n    *normalizer
	done map[*Node]*Node
	left int64 // entries that tables may still have
}

const (
	smallBlocks = 16
	smallSize   = 512
	tableBlocks = 512
	allTables   = 1 << 16
)

func (t *tuner) tune(c *Node) *Node {
	if c.Depth <= 2 {
		return c
	}
	if d, ok := t.done[c]; ok {
		return d
	}
	d := c
	switch c.Kind {
	case Vector, Index:
		child := t.tune(c.Child)
		small := child.Depth == 2 && child.Blocks <= smallBlocks && child.Size <= smallSize
		switch {
		case small && t.room(times(c.Count, child.Blocks)):
			d = t.n.flat(c)
		case small && c.Kind == Vector && t.room(tableBlocks):
			d = t.group(c, child)
		case (child.Kind == Vector || child.Kind == Index) && child.Depth > 2 && t.room(times(c.Count, child.Count)):
			d = t.merge(c, child)
		case child != c.Child:
			d = t.with(c, child)
		}
	case List:
		children := make([]*Node, len(c.Children))
		for i, child := range c.Children {
			children[i] = t.tune(child)
		}
		if c.Size <= times(c.Blocks, smallSize/smallBlocks) && t.room(c.Blocks) {
			d = t.n.flat(c)
		} else if !slices.Equal(children, c.Children) {
			d = new(*c)
			d.Children, d.Depth, d.Blocks = children, 0, 0
			for _, child := range children {
				d.Depth = max(d.Depth, child.Depth+1)
				d.Blocks = plus(d.Blocks, child.Blocks)
			}
		}
	}
	t.done[c] = d
	return d
}

// room tells whether there may be a table of that size, and takes it from what is left:
// what is made for speed is bounded, however long the type's text is.
func (t *tuner) room(entries int64) bool {
	if entries > min(tableBlocks, t.left) {
		return false
	}
	t.left -= entries
	return true
}

// with is a vector or index with another child of the same bytes.
func (t *tuner) with(c, child *Node) *Node {
	d := new(*c)
	d.Child, d.Depth, d.Blocks = child, child.Depth+1, times(c.Count, child.Blocks)
	return d
}

// merge makes one level of two.
func (t *tuner) merge(c, child *Node) *Node {
	var all []placed
	for i := range c.Count {
		for j := range child.Count {
			all = append(all, placed{child.Child, c.displ(i) + child.displ(j)})
		}
	}
	return t.n.list(all).node
}

// group makes a long vector of small children a shorter one of larger ones.
func (t *tuner) group(c, child *Node) *Node {
	g := tableBlocks / child.Blocks
	table := t.n.flat(t.n.repeat(placed{node: child}, g, c.Stride).node)
	all := t.n.repeat(placed{node: table}, c.Count/g, g*c.Stride)
	rest := t.n.repeat(placed{child, c.Count / g * g * c.Stride}, c.Count%g, c.Stride)
	if rest.node == nil {
		return all.node
	}
	rest.node = t.n.flat(rest.node)
	return t.n.list([]placed{all, rest}).node
}

// times and plus saturate.
func times(a, b int64) int64 {
	if hi, lo := bits.Mul64(uint64(a), uint64(b)); hi == 0 && lo <= math.MaxInt64 {
		return int64(lo)
	}
	return math.MaxInt64
}

func plus(a, b int64) int64 {
	if s := a + b; s >= 0 {
		return s
	}
	return math.MaxInt64
}

// Type returns what was committed.
func (c *Committed) Type() *Type { return c.typ }

// Count returns how many elements of the type it has.
func (c *Committed) Count() int64 { return c.count }

// Root returns the normal form, and how far its first byte is from the buffer's origin.
// Without any bytes there is none.
func (c *Committed) Root() (root *Node, origin int64) { return c.root, c.origin }

// Size returns how many bytes the stream has.
func (c *Committed) Size() int64 { return c.size }

// Bounds returns which bytes it touches, from the buffer's origin: lo to hi-1.
func (c *Committed) Bounds() (lo, hi int64) {
	if c.root == nil {
		return 0, 0
	}
	return c.origin + c.root.Lo, c.origin + c.root.Hi
}

// Blocks returns in how many pieces in a row the stream is placed, at most: pieces that
// touch only because different parts of the type meet count as two. It saturates.
func (c *Committed) Blocks() int64 {
	if c.root == nil {
		return 0
	}
	return c.root.Blocks
}

// Memory returns how many bytes the normal form takes.
func (c *Committed) Memory() int64 {
	seen := make(map[*Node]bool)
	var sum func(n *Node) int64
	sum = func(n *Node) int64 {
		if n == nil || seen[n] {
			return 0
		}
		seen[n] = true
		bytes := int64(unsafe.Sizeof(*n)) + 8*int64(len(n.Displs)+len(n.Starts)+len(n.Children)) + sum(n.Child)
		for _, child := range n.Children {
			bytes += sum(child)
		}
		return bytes
	}
	return int64(unsafe.Sizeof(*c)) + sum(c.root) + sum(c.fast)
}

// longest is how long String's text may be.
const longest = 1 << 20

// String writes the normal form, in the grammar of Parse. It ends with "..." if it would
// be longer than 1 MiB.
func (c *Committed) String() string {
	if c.root == nil {
		return "ctg(0)[byte]"
	}
	var b []byte
	if c.origin != 0 {
		b = append(strconv.AppendInt(append(b, "hidxb(1: "...), c.origin, 10), ")["...)
	}
	b = c.root.appendTo(b)
	if c.origin != 0 {
		b = append(b, ']')
	}
	if len(b) > longest {
		return string(b[:longest]) + "..."
	}
	return string(b)
}

// appendTo appends text of a node until it is longer than longest.
func (n *Node) appendTo(b []byte) []byte {
	number := func(v int64) { b = strconv.AppendInt(b, v, 10) }
	if len(b) > longest {
		return b
	}
	switch n.Kind {
	case Contig:
		if n.Size == 1 {
			return append(b, "byte"...)
		}
		b = append(b, "ctg("...)
		number(n.Size)
		return append(b, ")[byte]"...)
	case Vector:
		b = append(b, "hvec("...)
		number(n.Count)
		b = append(b, " 1 "...)
		number(n.Stride)
	case Index:
		b = append(b, "hidxb(1:"...)
		for _, d := range n.Displs {
			b = append(b, ' ')
			number(d)
		}
	case List:
		kind := "hidx("
		if n.Children != nil {
			kind = "struct("
		}
		b = append(b, kind...)
		for i, d := range n.Displs {
			if i > 0 {
				b = append(b, ' ')
			}
			number(d)
			b = append(b, ',')
			if n.Children == nil {
				number(n.Starts[i+1] - n.Starts[i])
			} else {
				b = n.Children[i].appendTo(append(b, "1,"...))
			}
			if len(b) > longest {
				return b
			}
		}
		if n.Children != nil {
			return append(b, ')')
		}
		return append(b, ")[byte]"...)
	}
	return append(n.Child.appendTo(append(b, ")["...)), ']')
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/ddt"
)

const (
	// packetBytes is what most packets of SLMP carry.
	packetBytes = 1408
	// mostPieces limits the pieces of a type that are looked at one by one.
	mostPieces = 1 << 20
)

// A datatypeReport is what `ddt describe` says. Places are in bytes from the buffer's
// origin. A nil field is unknown, because there are too many pieces.
type datatypeReport struct {
	Schema int    `json:"schema"`
	Type   string `json:"type"`

	// Of one element.
	Size       int64 `json:"size"`
	LB         int64 `json:"lb"`
	UB         int64 `json:"ub"`
	Extent     int64 `json:"extent"`
	TrueLB     int64 `json:"true_lb"`
	TrueUB     int64 `json:"true_ub"`
	TrueExtent int64 `json:"true_extent"`

	// Of all elements.
	Count           int64   `json:"count"`
	Stream          int64   `json:"stream_bytes"`
	First           int64   `json:"touched_first"`
	End             int64   `json:"touched_end"` // after the last byte
	Distinct        *int64  `json:"touched_bytes"`
	Overlaps        *bool   `json:"overlaps"`
	Blocks          int64   `json:"blocks"`
	BlockMin        int64   `json:"block_min"`
	BlockAvg        float64 `json:"block_avg"`
	BlockMax        int64   `json:"block_max"`
	Packet          int64   `json:"packet_bytes"`
	BlocksPerPacket float64 `json:"blocks_per_packet"`
	Memory          int64   `json:"memory_bytes"`
	NormalForm      string  `json:"normal_form"`
	Layout          *layout `json:"layout"` // nil if there is nothing to draw
}

func newDDTDescribeCmd() *cobra.Command {
	var elements int64
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "describe TYPE",
		Short: "Show a datatype's size, normal form and layout",
		Long: `Show how large a datatype is, which bytes it touches, in how many blocks, and its
normal form; and draw where its bytes are, from the first line of memory that it
touches. A line of the picture is a stride of the innermost vector, so that the
rows of a matrix are below each other, and starts with the place of its first byte.

` + datatypeHelp,
		Example: `  xspin ddt describe 'vec(4 2 5)[int]'
  xspin ddt describe --count 3 'resized(0,16)[hvec(4 1 64)[double]]'
  xspin ddt describe --json @halo.ddt`,
		Args: wantArgs("TYPE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			t, n, err := datatypeArg(args[0], elements)
			if err != nil {
				return fmt.Errorf("ddt describe: %w", err)
			}
			c, err := ddt.Commit(t, n)
			if err != nil {
				return fmt.Errorf("ddt describe: %w", err)
			}
			r := describe(c)
			if asJSON {
				return writeJSON(cmd.OutOrStdout(), r)
			}
			r.print(cmd.OutOrStdout())
			return nil
		},
	}
	countFlag(cmd, &elements)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

// countFlag adds --count to a command that has a TYPE.
func countFlag(cmd *cobra.Command, n *int64) {
	cmd.Flags().Int64Var(n, "count", 0, "elements of the type (default from its name, or 1)")
}

// A piece is a block of memory: the number-th of the stream, from 0.
type piece struct{ off, end, number int64 }

// pieces returns the pieces of the stream in order, each as long as possible, and at most
// most; all says whether these are all.
func pieces(c *ddt.Committed, most int) (list []piece, all bool) {
	all = true
	c.Each(0, c.Size(), func(off, n int64) bool {
		if k := len(list); k > 0 && list[k-1].end == off {
			list[k-1].end += n
		} else if k == most {
			all = false
		} else {
			list = append(list, piece{off, off + n, int64(k)})
		}
		return all
	})
	return list, all
}

func describe(c *ddt.Committed) *datatypeReport {
	t := c.Type()
	r := &datatypeReport{
		Schema: 1, Type: t.String(),
		Size: t.Size(), LB: t.LB(), UB: t.UB(), Extent: t.Extent(),
		TrueLB: t.TrueLB(), TrueUB: t.TrueLB() + t.TrueExtent(), TrueExtent: t.TrueExtent(),
		Count: c.Count(), Stream: c.Size(), Blocks: c.Blocks(), Packet: packetBytes,
		Memory: c.Memory(), NormalForm: c.String(),
	}
	r.First, r.End = c.Bounds()
	if r.Stream == 0 {
		none, zero := false, int64(0)
		r.Overlaps, r.Distinct = &none, &zero
		return r
	}
	list, all := pieces(c, mostPieces)
	r.BlocksPerPacket = perPacket(list, r.Stream)
	root, _ := c.Root()
	if all {
		r.Blocks = int64(len(list))
		r.BlockMin, r.BlockMax = blockSizes(list)
	} else {
		r.BlockMin, r.BlockMax = leafSizes(root)
	}
	r.BlockAvg = float64(r.Stream) / float64(r.Blocks)

	slices.SortFunc(list, func(a, b piece) int { return cmp.Or(cmp.Compare(a.off, b.off), cmp.Compare(a.number, b.number)) })
	if all {
		distinct := distinctBytes(list)
		overlaps := distinct < r.Stream
		r.Distinct, r.Overlaps = &distinct, &overlaps
	} else if apart(root) {
		none := false
		r.Overlaps, r.Distinct = &none, &r.Stream
	} else if overlaps := true; r.Stream > r.End-r.First {
		r.Overlaps = &overlaps
	}
	r.Layout = draw(list, innermostStride(root))
	return r
}

// perPacket returns how many pieces a packet has on average, of the packets with these
// pieces.
func perPacket(list []piece, stream int64) float64 {
	var at, sum int64
	for _, p := range list {
		n := p.end - p.off
		sum += (at+n-1)/packetBytes - at/packetBytes + 1
		at += n
	}
	packets := float64(at) / packetBytes
	if at == stream {
		packets = math.Ceil(packets)
	}
	return float64(sum) / packets
}

func blockSizes(list []piece) (lo, hi int64) {
	lo = math.MaxInt64
	for _, p := range list {
		lo, hi = min(lo, p.end-p.off), max(hi, p.end-p.off)
	}
	return lo, hi
}

// leafSizes returns the sizes of the smallest and largest block of a normal form.
func leafSizes(root *ddt.Node) (lo, hi int64) {
	lo = math.MaxInt64
	seen := make(map[*ddt.Node]bool)
	var visit func(n *ddt.Node)
	visit = func(n *ddt.Node) {
		if n == nil || seen[n] {
			return
		}
		seen[n] = true
		if n.Kind == ddt.Contig {
			lo, hi = min(lo, n.Size), max(hi, n.Size)
		}
		visit(n.Child)
		for _, child := range n.Children {
			visit(child)
		}
		if n.Kind == ddt.List && n.Children == nil {
			for i := range n.Displs {
				size := n.Starts[i+1] - n.Starts[i]
				lo, hi = min(lo, size), max(hi, size)
			}
		}
	}
	visit(root)
	return lo, hi
}

// distinctBytes returns how many bytes pieces touch. They must be in the order of memory.
func distinctBytes(list []piece) (n int64) {
	end := list[0].off
	for _, p := range list {
		n += max(0, p.end-max(p.off, end))
		end = max(end, p.end)
	}
	return n
}

// apart returns true if it is obvious that a normal form has no byte twice: blocks in
// vectors whose strides are not shorter than what they span, in any order, and the same in
// lists. False means that it is unknown.
func apart(n *ddt.Node) bool {
	type level struct{ count, stride int64 }
	var levels []level
	for ; n.Kind == ddt.Vector; n = n.Child {
		levels = append(levels, level{n.Count, max(n.Stride, -n.Stride)})
	}
	switch n.Kind {
	case ddt.Index:
		if !apart(n.Child) {
			return false
		}
		displs := slices.Sorted(slices.Values(n.Displs))
		for i := 1; i < len(displs); i++ {
			if displs[i]-displs[i-1] < n.Child.Hi-n.Child.Lo {
				return false
			}
		}
	case ddt.List:
		parts := make([][2]int64, len(n.Displs)) // from, to
		for i, at := range n.Displs {
			parts[i] = [2]int64{at, at + n.Starts[i+1] - n.Starts[i]}
			if n.Children != nil {
				if i > 0 && n.Children[i] != n.Children[i-1] || i == 0 {
					if !apart(n.Children[i]) {
						return false
					}
				}
				parts[i] = [2]int64{at + n.Children[i].Lo, at + n.Children[i].Hi}
			}
		}
		slices.SortFunc(parts, func(a, b [2]int64) int { return cmp.Compare(a[0], b[0]) })
		for i := 1; i < len(parts); i++ {
			if parts[i][0] < parts[i-1][1] {
				return false
			}
		}
	}
	slices.SortFunc(levels, func(a, b level) int { return cmp.Compare(a.stride, b.stride) })
	span := n.Hi - n.Lo
	for _, l := range levels {
		if l.stride < span {
			return false
		}
		span += (l.count - 1) * l.stride
	}
	return true
}

// innermostStride returns the stride of the innermost vector, or 0.
func innermostStride(n *ddt.Node) (stride int64) {
	for n != nil {
		if n.Kind == ddt.Vector {
			stride = max(n.Stride, -n.Stride)
		}
		if n.Kind == ddt.List && n.Children != nil {
			n = n.Children[0]
		} else {
			n = n.Child
		}
	}
	return stride
}

func (r *datatypeReport) print(w io.Writer) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-12s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("type", "%s", abridged(r.Type))
	line("size", "%d bytes", r.Size)
	line("extent", "%d bytes, lb %d, ub %d", r.Extent, r.LB, r.UB)
	line("true extent", "%d bytes, true lb %d, true ub %d", r.TrueExtent, r.TrueLB, r.TrueUB)
	line("count", "%d", r.Count)
	if r.Stream == 0 {
		line("stream", "0 bytes: there is nothing to move")
		return
	}
	line("stream", "%d bytes, in packets of %d: %d", r.Stream, r.Packet, (r.Stream-1)/r.Packet+1)
	touched := ""
	if r.Distinct != nil {
		touched = fmt.Sprintf(": %d, and holes of %d", *r.Distinct, r.End-r.First-*r.Distinct)
		if *r.Distinct == r.End-r.First {
			touched = ", no holes"
		}
	}
	line("touches", "bytes %d to %d%s", r.First, r.End-1, touched)
	overlap := "unknown: it has too many blocks to compare them"
	switch {
	case r.Overlaps != nil && !*r.Overlaps:
		overlap = "none"
	case r.Distinct != nil:
		overlap = fmt.Sprintf("%d bytes of the stream have no place of their own", r.Stream-*r.Distinct)
	case r.Overlaps != nil:
		overlap = "some bytes of the stream have no place of their own"
	}
	line("overlap", "%s", overlap)
	sizes := count64(r.BlockMax, "byte")
	if r.BlockMin != r.BlockMax {
		sizes = fmt.Sprintf("%d to %s, %.1f on average", r.BlockMin, sizes, r.BlockAvg)
	}
	line("blocks", "%d of %s", r.Blocks, sizes)
	line("", "%.1f in a packet, on average", r.BlocksPerPacket)
	line("normal form", "%s", abridged(r.NormalForm))
	line("", "%d bytes of memory", r.Memory)
	if r.Layout == nil {
		line("layout", "too far apart for a picture")
		return
	}
	r.Layout.print(w)
}

// abridged shortens a text so that it fits on a few lines.
func abridged(s string) string {
	const most = 240
	s = strings.TrimSpace(s)
	if len(s) <= most {
		return s
	}
	return fmt.Sprintf("%s... (%d characters)", s[:most], len(s))
}

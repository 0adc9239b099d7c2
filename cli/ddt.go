// SPDX-License-Identifier: Apache-2.0

package cli

import "github.com/spf13/cobra"

// newDDTCmd returns `xspin ddt`.
func newDDTCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ddt",
		Short: "Describe MPI datatypes, pack and unpack files with them",
		Long: `Datatypes of MPI say where in memory the bytes of a message belong.

` + datatypeHelp + `

As text; displacements and strides are in extents, in h..., struct and resized in bytes:
  byte, char, short, int, long, float, double ...   (all: xspin ddt ls)
  ctg(COUNT)[T]                      contiguous
  vec(COUNT BLOCKLEN STRIDE)[T]      vector; hvec(...)
  idx(DISPL,BLOCKLEN ...)[T]         indexed; hidx(...)
  idxb(BLOCKLEN: DISPL ...)[T]       indexed_block; hidxb(...)
  struct(DISPL,BLOCKLEN,T ...)       struct
  subarray(START,SUBSIZE,SIZE ...)[T]              in C's order; subarrayf(...)
  darray(SIZE RANK: GSIZE,DISTRIB,PSIZE ...)[T]    in C's order; darrayf(...);
      DISTRIB is block, block:ARG, cyclic, cyclic:ARG or none
  resized(LB,EXTENT)[T]
  dup[T]
A // starts a comment. ctg, vec, hvec, hidx, idxb, struct, subarray and resized are
FPsPIN's, and its texts can be read; idx, hidxb, subarrayf, darray, darrayf and dup
are ours.`,
		Args: cobra.NoArgs,
	}
	cmd.AddCommand(newDDTDescribeCmd(), newDDTPackCmd(), newDDTUnpackCmd(), newDDTLsCmd())
	return cmd
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/internal/flags"
)

// newMemCmd returns `xspin mem`. With only the name of a context it reads.
func newMemCmd() *cobra.Command {
	cmd := newMemReadCmd()
	cmd.Use, cmd.Short = "mem CONTEXT", "Read and write the HPU memory of a context"
	cmd.Long = `Copy the HPU memory of one of the daemon's contexts, as it is, to standard output or
from standard input: the context's, which all of its HPUs share (memory of its
configuration), or with --hpu that of one of them (hpu_memory).

Handlers use the memory at the same time. To initialise it before they run,
install the context with activate: manual, write, and activate it then.

The memory is that of a life of the context: when its application detaches, when
it has failed and is activated, or when a reload changes it, it starts over with
memory that is zero, and what was written is lost.`
	cmd.Example = `  xspin mem inbox | xxd
  xspin mem read inbox --hpu 1 --offset 4KiB --length 64 > memory
  xspin mem write inbox --offset 64 < memory`
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) > 1 {
			return unknownCommand(cmd, args)
		}
		return nil
	}
	read := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		return read(cmd, args)
	}
	cmd.AddCommand(newMemReadCmd(), newMemWriteCmd())
	return cmd
}

// memFlags are the flags of read and write.
type memFlags struct {
	hpu    int
	offset string
}

func (f *memFlags) add(cmd *cobra.Command) {
	cmd.Flags().IntVar(&f.hpu, "hpu", -1, "memory of this HPU (default the context's)")
	cmd.Flags().StringVar(&f.offset, "offset", "0", "where to start, such as 64 or 4KiB")
}

func (f *memFlags) check() (offset int64, err error) {
	if f.hpu < -1 {
		return 0, flags.Error("hpu", f.hpu, "want 0 or more")
	}
	return sizeFlag("offset", f.offset)
}

func sizeFlag(name, text string) (int64, error) {
	var s control.Size
	if err := s.UnmarshalText([]byte(text)); err != nil {
		return 0, flags.Error(name, text, err.Error())
	}
	return int64(s), nil
}

func newMemReadCmd() *cobra.Command {
	var f memFlags
	var length string
	cmd := &cobra.Command{
		Use:   "read CONTEXT",
		Short: "Copy HPU memory to standard output",
		Example: `  xspin mem read inbox | xxd
  xspin mem read inbox --hpu 1 --offset 4KiB --length 64 > memory`,
		Args: wantArgs("CONTEXT"),
	}
	f.add(cmd)
	cmd.Flags().StringVar(&length, "length", "0", "bytes to read, 0 for the rest")
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		offset, err1 := f.check()
		n, err2 := sizeFlag("length", length)
		if err := errors.Join(err1, err2); err != nil {
			return fmt.Errorf("%s: %w", commandName(cmd), err)
		}
		out := cmd.OutOrStdout()
		if isTerminal(out) {
			return fmt.Errorf("%s: standard output is a terminal, and memory is not text: pipe it into xxd, or redirect it to a file", commandName(cmd))
		}
		c, err := dial()
		if err != nil {
			return err
		}
		got, err := c.ReadMemory(cmd.Context(), args[0], f.hpu, offset, n, out)
		if err == nil && n > 0 && got != n {
			err = fmt.Errorf("received %d bytes, want %d", got, n)
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", commandName(cmd), args[0], err)
		}
		return nil
	}
	return cmd
}

func newMemWriteCmd() *cobra.Command {
	var f memFlags
	cmd := &cobra.Command{
		Use:   "write CONTEXT",
		Short: "Copy standard input to HPU memory",
		Long: `Copy standard input to HPU memory: all of it, or nothing if it does not fit. It
is lost when the context starts over, as it does when its application detaches.`,
		Example: `  xspin mem write inbox < table
  printf '\x07\x00\x00\x00' | xspin mem write inbox --hpu 1 --offset 64`,
		Args: wantArgs("CONTEXT"),
	}
	f.add(cmd)
	dial := socketFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		offset, err := f.check()
		if err != nil {
			return fmt.Errorf("mem write: %w", err)
		}
		in := cmd.InOrStdin()
		if isTerminal(in) {
			return errors.New("mem write: standard input is a terminal: redirect a file to it, or pipe something")
		}
		c, err := dial()
		if err != nil {
			return err
		}
		n, err := c.WriteMemory(cmd.Context(), args[0], f.hpu, offset, in)
		if err != nil {
			return fmt.Errorf("mem write %s: %w", args[0], err)
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "%s written at offset %d\n", count(int(n), "byte"), offset)
		return nil
	}
	return cmd
}

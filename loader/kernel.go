// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/capability"
)

// checkKernel asks the kernel for what our programs need and what it would not
// refuse when they are loaded, but packet by packet. It does not go by the version:
// distributions take features back, and leave them out.
func checkKernel() error {
	if kernelChecked.Load() {
		return nil
	}
	if err := haveMetadata(bpf.MetaSize); err != nil {
		return err
	}
	kernelChecked.Store(true)
	return nil
}

var kernelChecked atomic.Bool

// haveMetadata tells whether a program may put this many bytes of metadata in front
// of a frame: up to Linux 6.8 it was 32.
func haveMetadata(size int) error {
	const op = "ask the kernel for XDP metadata"
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "xspin_probe", Type: ebpf.XDP, License: "Apache-2.0",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R2, int32(-size)),
			asm.FnXdpAdjustMeta.Call(),
			asm.Return(), // 0 or a negative errno
		},
	})
	if err != nil {
		return fmt.Errorf("%s: %w", op, loadError(err))
	}
	defer prog.Close()
	ret, err := prog.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if errno := unix.Errno(-int32(ret)); errno != 0 {
		return fmt.Errorf("%w: %d bytes of XDP metadata: %w; Linux 6.9 and later have them", ErrKernel, size, errno)
	}
	return nil
}

// NeedVerifier tells why the verifier cannot be asked here about handlers.
func NeedVerifier() error { return needToRun("ask the kernel's verifier") }

// needToRun tells why programs cannot be loaded and run here.
func needToRun(op string) error {
	if err := capability.Need(op, capability.NetAdmin, capability.BPF, capability.Perfmon); err != nil {
		return err
	}
	return checkKernel()
}

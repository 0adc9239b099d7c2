// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
)

// logSize is how many bytes of a verifier's log are kept: some 4,000 lines. A loop that fails late
// has hundreds of megabytes, of which the last lines have the reason.
const logSize = 256 << 10

// verifierLog has the kernel verify the program of a specification that it refuses once more, and returns the
// name of the program, and the end of what the verifier says. Package ebpf would ask again with a buffer for all of it.
// The name is "" if the kernel takes all programs.
func verifierLog(spec *ebpf.CollectionSpec, instead map[string]*ebpf.Map) (name string, log []string, cut bool, err error) {
	programs := spec.Programs
	spec.Programs = nil
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: instead})
	spec.Programs = programs
	if err != nil {
		return "", nil, false, err
	}
	defer coll.Close()
	// The function of a handler comes first.
	names := slices.SortedFunc(maps.Keys(programs), func(a, b string) int {
		if (a == bpf.HandlersProgram) != (b == bpf.HandlersProgram) {
			return map[bool]int{true: -1, false: 1}[a == bpf.HandlersProgram]
		}
		return strings.Compare(a, b)
	})
	buf := make([]byte, logSize)
	for _, name := range names {
		err := verify(programs[name], coll.Maps, buf)
		var errno unix.Errno
		switch {
		case err == nil:
			continue
		case !errors.As(err, &errno):
			return "", nil, false, err
		}
		text, _, _ := bytes.Cut(buf, []byte{0})
		// The kernel has written round and round, and put the end last: the first line is a part of one.
		if cut = errno == unix.ENOSPC; cut {
			_, text, _ = bytes.Cut(text, []byte{'\n'})
		}
		return name, strings.Split(strings.TrimRight(string(text), "\n"), "\n"), cut, nil
	}
	return "", nil, false, nil
}

// verify loads a program, with the verifier's log in a buffer, and closes it.
func verify(spec *ebpf.ProgramSpec, all map[string]*ebpf.Map, log []byte) error {
	insns := slices.Clone(spec.Instructions)
	for i := range insns {
		if ins := &insns[i]; ins.IsLoadFromMap() && ins.Reference() != "" {
			m := all[ins.Reference()]
			if m == nil {
				return fmt.Errorf("there is no map %s", ins.Reference())
			}
			if err := ins.AssociateMap(m); err != nil {
				return err
			}
		}
	}
	var types btf.Builder
	if err := relocate(insns, &types); err != nil {
		return err
	}
	funcs, lines, err := btf.MarshalExtInfos(insns, &types)
	if err != nil {
		return err
	}
	handle, err := btf.NewHandle(&types)
	if err != nil {
		return err
	}
	defer handle.Close()
	var code bytes.Buffer
	if err := insns.Marshal(&code, binary.LittleEndian); err != nil {
		return err
	}
	license := append([]byte(spec.License), 0)
	// The attributes of BPF_PROG_LOAD in include/uapi/linux/bpf.h, up to the last that is needed.
	attr := struct {
		kind, insns         uint32
		code, license       unsafe.Pointer
		logLevel, logSize   uint32
		log                 unsafe.Pointer
		version, flags      uint32
		name                [unix.BPF_OBJ_NAME_LEN]byte
		ifindex, attach     uint32
		types, funcSize     uint32
		funcs               unsafe.Pointer
		funcCount, lineSize uint32
		lines               unsafe.Pointer
		lineCount           uint32
		target              uint32
	}{
		kind: uint32(spec.Type), insns: uint32(code.Len() / 8),
		code: unsafe.Pointer(unsafe.SliceData(code.Bytes())), license: unsafe.Pointer(unsafe.SliceData(license)),
		logLevel: uint32(ebpf.LogLevelBranch), logSize: uint32(len(log)), log: unsafe.Pointer(unsafe.SliceData(log)),
		flags: spec.Flags, attach: uint32(spec.AttachType), types: uint32(handle.FD()),
		funcSize: btf.FuncInfoSize, funcs: unsafe.Pointer(unsafe.SliceData(funcs)), funcCount: uint32(len(funcs)) / btf.FuncInfoSize,
		lineSize: btf.LineInfoSize, lines: unsafe.Pointer(unsafe.SliceData(lines)), lineCount: uint32(len(lines)) / btf.LineInfoSize,
	}
	copy(attr.name[:len(attr.name)-1], spec.Name)
	for range 10 { // a verifier gives up when its thread gets a signal, as Go's threads do at times
		fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
		runtime.KeepAlive(all)
		switch errno {
		case 0:
			return unix.Close(int(fd))
		case unix.EAGAIN, unix.EINTR:
			err = errno
		default:
			return errno
		}
	}
	return err
}

// relocate resolves what instructions say of the running kernel: its functions that they call, and where the fields of
// its structures are. Types of the program are added to types.
func relocate(insns asm.Instructions, types *btf.Builder) error {
	var at []*asm.Instruction
	var relocations []*btf.CORERelocation
	var kernel *btf.Spec
	for i := range insns {
		ins := &insns[i]
		relocation := btf.CORERelocationMetadata(ins)
		if relocation == nil && !ins.IsKfuncCall() {
			continue
		}
		if kernel == nil {
			var err error
			if kernel, err = btf.LoadKernelSpec(); err != nil {
				return err
			}
		}
		if relocation != nil {
			at, relocations = append(at, ins), append(relocations, relocation)
			continue
		}
		var function *btf.Func
		if err := kernel.TypeByName(ins.Reference(), &function); err != nil {
			return err
		}
		id, err := kernel.TypeID(function)
		if err != nil {
			return err
		}
		ins.Constant = int64(id)
	}
	if len(at) == 0 {
		return nil
	}
	fixups, err := btf.CORERelocate(relocations, []*btf.Spec{kernel}, binary.LittleEndian, types.Add)
	if err != nil {
		return err
	}
	for i := range fixups {
		if err := fixups[i].Apply(at[i]); err != nil {
			return err
		}
	}
	return nil
}

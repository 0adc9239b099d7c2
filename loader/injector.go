// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
)

// Errors of an Injector.
var (
	ErrInjectSize = errors.New("packet too long for the stack") // see MaxInject
	ErrInjectFull = errors.New("too many packets on their way to the stack")
)

// MaxInject is the longest packet that an Injector takes: a page, less what the
// kernel keeps for itself.
const MaxInject = 3408

const injectSlots = 256

// An Injector hands packets to the Linux stack as if they had just come in on
// an interface: it runs a program that passes them, in the kernel's live-frame
// mode. Safe for concurrent use.
type Injector struct {
	prog  *ebpf.Program
	iface *net.Interface
	ns    *os.File

	mu     sync.Mutex
	free   [][]byte
	queue  chan []byte
	closed bool
	done   chan struct{}

	// Failures counts packets that the kernel refused.
	Failures atomic.Uint64
}

// xdpMD is struct xdp_md of linux/bpf.h: where a test run's frame comes from.
type xdpMD struct{ Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32 }

// NewInjector returns an injector for an interface with a native XDP program.
// The calling thread must be in the interface's network namespace.
func NewInjector(iface *net.Interface) (*Injector, error) {
	coll, err := LoadBench(bpf.BenchProgXspinPass, nil)
	if err != nil {
		return nil, err
	}
	defer coll.Close()
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	in := &Injector{
		prog:  coll.DetachProgram(bpf.BenchProgXspinPass),
		iface: iface,
		ns:    ns,
		queue: make(chan []byte, injectSlots),
		done:  make(chan struct{}),
	}
	for range injectSlots {
		in.free = append(in.free, make([]byte, 0, MaxInject))
	}
	ready := make(chan error)
	go in.run(ready)
	if err := <-ready; err != nil {
		in.prog.Close()
		ns.Close()
		return nil, err
	}
	return in, nil
}

// Inject copies a packet and has it delivered soon. It never blocks.
func (in *Injector) Inject(size int, copyTo func(dst []byte, off int) int) error {
	if size > MaxInject {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrInjectSize, size, MaxInject)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return os.ErrClosed
	}
	n := len(in.free)
	if n == 0 {
		return ErrInjectFull
	}
	b := in.free[n-1][:size]
	in.free = in.free[:n-1]
	copyTo(b, 0)
	in.queue <- b // has room for every slot
	return nil
}

// run delivers packets. The kernel looks the interface up in the namespace of
// the calling thread, so the thread moves there and is never used again.
func (in *Injector) run(ready chan<- error) {
	defer close(in.done)
	runtime.LockOSThread()
	if err := enter(in.ns); err != nil {
		ready <- err
		return
	}
	ready <- nil
	for b := range in.queue {
		md := xdpMD{DataEnd: uint32(len(b)), IngressIfindex: uint32(in.iface.Index)}
		_, err := in.prog.Run(&ebpf.RunOptions{Data: b, Context: md, Repeat: 1, Flags: unix.BPF_F_TEST_XDP_LIVE_FRAMES})
		if err != nil {
			in.Failures.Add(1)
		}
		in.mu.Lock()
		in.free = append(in.free, b[:0])
		in.mu.Unlock()
	}
}

// enter moves the calling thread to a network namespace, unless it is there: moving
// takes CAP_SYS_ADMIN, which a NIC in the process' own namespace does without.
func enter(ns *os.File) error {
	var want, is unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &want); err != nil {
		return fmt.Errorf("fstat of network namespace: %w", err)
	}
	if err := unix.Stat("/proc/thread-self/ns/net", &is); err != nil {
		return fmt.Errorf("stat of the thread's network namespace: %w", err)
	}
	if is.Dev == want.Dev && is.Ino == want.Ino {
		return nil
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	return nil
}

// Close delivers what was injected and frees the program. Idempotent.
func (in *Injector) Close() error {
	in.mu.Lock()
	first := !in.closed
	in.closed = true
	in.mu.Unlock()
	if !first {
		return nil
	}
	close(in.queue)
	<-in.done
	return errors.Join(in.prog.Close(), in.ns.Close())
}

// LoadBench loads one program of the bench object, with values for its variables, attached
// to nothing.
func LoadBench(program string, vars map[string]any) (*ebpf.Collection, error) {
	if err := needToRun("load " + program); err != nil {
		return nil, err
	}
	spec, err := bpf.LoadBench()
	if err != nil {
		return nil, fmt.Errorf("read bench object: %w", err)
	}
	for name := range spec.Programs {
		if name != program {
			delete(spec.Programs, name)
		}
	}
	for name, value := range vars {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("configure %s: %w", program, err)
		}
	}
	coll, err := bpf.Load(spec)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", program, loadError(err))
	}
	return coll, nil
}

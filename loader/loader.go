// SPDX-License-Identifier: Apache-2.0

// Package loader loads the ingress programs, sets their tables, attaches them, and
// reads back what the kernel granted. It changes nothing else: no ethtool
// setting, no address, no other program.
package loader

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/capability"
	"github.com/xspin/xspin/matcher"
)

// Errors that callers tell apart.
var (
	// ErrOccupied says that another XDP program is attached.
	ErrOccupied = errors.New("another program is attached")
	// ErrKernel says that the kernel lacks something XsPIN cannot do without.
	ErrKernel = errors.New("not supported by this kernel")
	// ErrNoNative says that the driver has no XDP of its own.
	ErrNoNative = errors.New("no native XDP")
)

// Mode is how a program is attached.
type Mode int

// Attach modes. Auto tries Native first.
const (
	Auto Mode = iota
	Native
	Generic
)

func (m Mode) String() string {
	if m < Auto || m > Generic {
		return fmt.Sprintf("Mode(%d)", int(m))
	}
	return [...]string{"auto", "native", "generic"}[m]
}

// Config of an ingress program.
type Config struct {
	Interface  *net.Interface
	Mode       Mode
	HPUs       int // 1 to 64
	Queues     int // receive queues, 1 to 64
	BufferSize int // bytes of a frame that one AF_XDP buffer takes
	MaxBuffers int // of one frame; 1 without multi-buffer support
}

// An Ingress is the ingress programs of an interface, one for each hook: each is loaded, attached, and detached
// again by itself. They go by one table, which starts empty, so all frames pass. Safe for concurrent use, except for
// Close.
type Ingress struct {
	cfg     Config
	mode    Mode  // of the program at xdp; Auto until it was attached
	loaded  Mode  // that the program at xdp was loaded for
	home    *home // of the interface; nil: it has none, or was left
	tap     bool  // the interface is one
	objs    bpf.IngressObjects
	tc      bpf.IngressTCObjects
	attach  sync.Mutex   // guards links, and what is loaded for them
	links   [2]link.Link // by hook; nil: not attached
	loading sync.Mutex
	user    *ebpf.Program // see LoadUser; nil: nobody has needed it
	globals *ebpf.Map     // .bss
	barrier *ebpf.Map     // see synchronize
	inner   *ebpf.Map     // its only element

	// The program's global variables, mapped.
	bss      []byte
	tables   *[2]bpf.Table
	active   *uint32
	counting *uint32
	queues   *[bpf.MaxQueues]bpf.Queue
	share    *bpf.Share
	buckets  *[bpf.MaxBuckets]uint64

	publish sync.Mutex
	table   *matcher.Table // in force
}

// Check tells, without changing anything, why an ingress program cannot be
// attached here.
func Check(iface *net.Interface) error {
	op := "attach to " + iface.Name
	if err := capability.Need(op, capability.NetAdmin, capability.NetRaw, capability.BPF, capability.Perfmon); err != nil {
		return err
	}
	if err := checkKernel(); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return checkXDP(iface)
}

// checkXDP is [Check] for a program that is loaded.
func checkXDP(iface *net.Interface) error {
	op := "attach to " + iface.Name
	if err := capability.Need(op, capability.NetAdmin, capability.BPF); err != nil {
		return err
	}
	l, err := netlink.LinkByIndex(iface.Index)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if l.Attrs().Flags&net.FlagUp == 0 {
		return fmt.Errorf("%s: the interface is down: `ip link set %s up` first", op, iface.Name)
	}
	if x := l.Attrs().Xdp; x != nil && x.Attached {
		return occupied(op, x)
	}
	return nil
}

// occupied names the program that is in the way.
func occupied(op string, x *netlink.LinkXdp) error {
	name := programName(ebpf.ProgramID(x.ProgId))
	if name == "" {
		name = "unnamed"
	}
	mode := Native
	if x.AttachMode == attachedSKB {
		mode = Generic
	}
	way := "XsPIN never evicts a program: stop its owner or detach it first"
	if name == bpf.IngressProgXspinIngress || name == bpf.IngressProgXspinTrains {
		way = "another XsPIN runs here: end it first"
	}
	return fmt.Errorf("%s: %w: %q (id %d, %s mode); %s", op, ErrOccupied, name, x.ProgId, mode, way)
}

const attachedSKB = 2 // XDP_ATTACHED_SKB of linux/if_link.h

// An ingressObject is what load loads.
type ingressObject struct {
	spec   *ebpf.CollectionSpec
	shared map[string]uint32 // where variables are in the shared memory, by name
}

// ingress reads the object, once. The shared memory is megabytes of zeros, as the
// kernel makes them: they are left out of the specification, or each copy of it would
// have them several times over.
var ingress = sync.OnceValues(func() (ingressObject, error) {
	spec, err := bpf.LoadIngress()
	if err != nil {
		return ingressObject{}, err
	}
	o := ingressObject{spec, map[string]uint32{}}
	for name, v := range spec.Variables {
		if v.SectionName == bss {
			o.shared[name] = v.Offset
			delete(spec.Variables, name)
		}
	}
	spec.Maps[bss].Contents = nil
	return o, nil
})

const bss = ".bss" // the section of variables that begin as zeros

// spec is the object with one of its programs, configured for a mode, or for any: Auto.
func (in *Ingress) spec(program string, mode Mode) (*ebpf.CollectionSpec, error) {
	object, err := ingress()
	if err != nil {
		return nil, fmt.Errorf("read ingress object: %w", err)
	}
	spec := object.spec.Copy()
	for name := range spec.Programs {
		if name != program {
			delete(spec.Programs, name)
		}
	}
	spec.Maps[bpf.IngressMapSockets].MaxEntries = uint32(in.cfg.Queues * in.cfg.HPUs)
	config := bpf.Config{
		Hpus:       uint32(in.cfg.HPUs),
		Queues:     uint32(in.cfg.Queues),
		BufferSize: uint32(in.cfg.BufferSize),
		MaxBuffers: uint32(in.cfg.MaxBuffers),
	}
	if mode != Native || in.tap {
		config.Atomic = 1
	}
	if mode == Generic {
		config.Generic = 1
	}
	if err := spec.Variables[bpf.IngressVarConfig].Set(config); err != nil {
		return nil, fmt.Errorf("configure %s: %w", program, err)
	}
	return spec, nil
}

// shared are the maps of the program at xdp that others have, too.
func (in *Ingress) shared() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		bss: in.globals, bpf.IngressMapCounters: in.objs.Counters, bpf.IngressMapSockets: in.objs.Sockets, bpf.IngressMapPrograms: in.objs.Programs, bpf.IngressMapHanding: in.objs.Handing,
	}
}

// LoadUser loads the program to which handlers in eBPF hand messages over, if it is not
// loaded. It shares all maps with the one that is attached. SetHandlers would do so as well.
func (in *Ingress) LoadUser() error {
	_, err := in.userProgram()
	return err
}

func (in *Ingress) userProgram() (*ebpf.Program, error) {
	mode := in.Mode()
	in.loading.Lock()
	defer in.loading.Unlock()
	if in.user != nil {
		return in.user, nil
	}
	const name = bpf.IngressProgXspinUser
	spec, err := in.spec(name, mode)
	if err != nil {
		return nil, err
	}
	coll, err := bpf.LoadWith(spec, in.shared())
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", name, loadError(err))
	}
	defer coll.Close()
	in.user = coll.DetachProgram(name)
	return in.user, nil
}

// load makes the maps, maps the shared memory, and loads a program for xdp.
func (in *Ingress) load(program string) error {
	if err := in.makeMaps(); err != nil {
		return err
	}
	return in.loadXDP(program, in.mode)
}

// loadXDP loads the program for xdp in the place of the one that may be loaded.
func (in *Ingress) loadXDP(program string, mode Mode) error {
	spec, err := in.spec(program, mode)
	if err != nil {
		return err
	}
	coll, err := bpf.LoadWith(spec, in.shared())
	if err != nil {
		return fmt.Errorf("load %s: %w", program, loadError(err))
	}
	defer coll.Close()
	in.objs.XspinIngress.Close()
	in.objs.XspinIngress, in.loaded = coll.DetachProgram(program), mode
	return nil
}

// makeMaps makes the maps, and maps the shared memory.
func (in *Ingress) makeMaps() error {
	spec, err := in.spec("", Auto)
	if err != nil {
		return err
	}
	coll, err := bpf.Load(spec)
	if err != nil {
		return fmt.Errorf("make the maps of the ingress program: %w", loadError(err))
	}
	defer coll.Close()
	in.objs.Counters = coll.DetachMap(bpf.IngressMapCounters)
	in.objs.Sockets = coll.DetachMap(bpf.IngressMapSockets)
	in.objs.Programs = coll.DetachMap(bpf.IngressMapPrograms) // empty as soon as nobody has it open
	in.objs.Handing = coll.DetachMap(bpf.IngressMapHanding)
	in.globals = coll.DetachMap(bss)
	m := in.globals
	in.bss, err = unix.Mmap(m.FD(), 0, int(m.ValueSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %d bytes of %v: %w", m.ValueSize(), m, err)
	}
	object, err := ingress()
	if err != nil {
		return err
	}
	for _, name := range []string{bpf.IngressVarTables, bpf.IngressVarActive, bpf.IngressVarCounting, bpf.IngressVarQueues, bpf.IngressVarShare, bpf.IngressVarBuckets} {
		if _, ok := object.shared[name]; !ok {
			return fmt.Errorf("the ingress object has no %s in .bss", name)
		}
	}
	in.tables = global[[2]bpf.Table](in.bss, object.shared[bpf.IngressVarTables])
	in.active = global[uint32](in.bss, object.shared[bpf.IngressVarActive])
	in.counting = global[uint32](in.bss, object.shared[bpf.IngressVarCounting])
	in.queues = global[[bpf.MaxQueues]bpf.Queue](in.bss, object.shared[bpf.IngressVarQueues])
	in.share = global[bpf.Share](in.bss, object.shared[bpf.IngressVarShare])
	in.buckets = global[[bpf.MaxBuckets]uint64](in.bss, object.shared[bpf.IngressVarBuckets])
	inner := &ebpf.MapSpec{Name: "xspin_inner", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	if in.inner, err = ebpf.NewMap(inner); err != nil {
		return fmt.Errorf("make map: %w", err)
	}
	in.barrier, err = ebpf.NewMap(&ebpf.MapSpec{Name: "xspin_barrier", Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner})
	if err != nil {
		return fmt.Errorf("make map of maps: %w", err)
	}
	return nil
}

// global returns where a global variable of the program is.
func global[T any](mem []byte, offset uint32) *T {
	var zero T
	return (*T)(unsafe.Pointer(unsafe.SliceData(mem[offset:][:unsafe.Sizeof(zero)])))
}

func loadError(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w (kernel lockdown or a security module may forbid it)", err)
	case errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("%w: %w", ErrKernel, err)
	}
	return err
}

// Publish replaces the table, and the contexts that it names. Every frame sees the
// old ones or the new ones, and when Publish returns no frame is being matched or
// redirected by the old ones any more. It takes an RCU grace period, some 10 ms.
func (in *Ingress) Publish(t *matcher.Table, contexts map[uint16]Delivery) error {
	compiled, err := compile(t, contexts)
	if err != nil {
		return fmt.Errorf("publish table: %w", err)
	}
	in.publish.Lock()
	defer in.publish.Unlock()
	next := 1 - atomic.LoadUint32(in.active)
	in.tables[next] = *compiled // no run of the program is in it since the last Publish
	atomic.StoreUint32(in.active, next)
	in.table = t
	// The table is in force, so there is no way back and no error. The wait needs
	// nothing that could be missing; if it were refused all the same: a run of
	// the program takes microseconds.
	if err := in.synchronize(); err != nil {
		time.Sleep(time.Second)
	}
	return nil
}

// synchronize waits for an RCU grace period: until no run of any program at either hook
// that is under way now is under way any more. The kernel has no call for that,
// but it does so after each update of a map of maps. It takes no memory and no
// descriptor that could be missing.
func (in *Ingress) synchronize() error {
	if err := in.barrier.Put(uint32(0), in.inner); err != nil {
		return fmt.Errorf("wait for a grace period: %w", err)
	}
	return nil
}

// Synchronize waits until no run of the program, nor of handlers in eBPF, that is under way
// now is under way any more.
func (in *Ingress) Synchronize() error {
	in.publish.Lock()
	defer in.publish.Unlock()
	return in.synchronize()
}

// SetSocket tells the program where to send the frames for an HPU that arrive
// on a queue.
func (in *Ingress) SetSocket(queue, hpu, fd int) error {
	if err := in.objs.Sockets.Put(uint32(queue*in.cfg.HPUs+hpu), uint32(fd)); err != nil {
		return fmt.Errorf("socket %d for HPU %d on queue %d: %w", fd, hpu, queue, err)
	}
	return nil
}

// ClearSockets takes all sockets away: matched frames pass to the stack.
func (in *Ingress) ClearSockets() error {
	for i := range in.cfg.Queues * in.cfg.HPUs {
		if err := in.objs.Sockets.Delete(uint32(i)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("socket %d: %w", i, err)
		}
	}
	return nil
}

// SetHandlers has handlers get the frames of a context whose [Delivery] is to the kernel.
// Until then, and after ClearHandlers, they pass to the stack.
func (in *Ingress) SetHandlers(context uint16, h *Handlers) error {
	if h.user != nil {
		prog, err := in.userProgram()
		if err == nil {
			err = h.user.Put(uint32(0), prog)
		}
		if err != nil {
			return fmt.Errorf("hand over messages of context %d: %w", context, err)
		}
	}
	programs := in.objs.Programs
	if h.hook == TC {
		if err := in.loadTC(); err != nil {
			return fmt.Errorf("call the handlers of context %d: %w", context, err)
		}
		programs = in.tc.Programs
	}
	if err := programs.Put(uint32(context), h.prog); err != nil {
		return fmt.Errorf("call the handlers of context %d: %w", context, err)
	}
	return nil
}

// ClearHandlers takes the handlers of a context away. None runs from then on if a table
// without the context has been published before. Idempotent.
func (in *Ingress) ClearHandlers(context uint16) error {
	for _, programs := range []*ebpf.Map{in.objs.Programs, in.tcPrograms()} {
		if programs == nil {
			continue
		}
		if err := programs.Delete(uint32(context)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("call no handlers of context %d: %w", context, err)
		}
	}
	return nil
}

// Queue returns the memory that the program and the HPUs share for a queue.
// Use it with atomic operations only, and not after Close.
func (in *Ingress) Queue(i int) *bpf.Queue {
	return &in.queues[i]
}

// Share returns credits, quanta and the HPUs' load, shared with the program.
// Use it with atomic operations only, and not after Close.
func (in *Ingress) Share() *bpf.Share {
	return in.share
}

// Buckets returns the buckets of messages, shared with the program: HPU+1 in
// the low byte, users in the high word. Use them with atomic operations only,
// and not after Close.
func (in *Ingress) Buckets() []uint64 {
	return in.buckets[:]
}

// Close detaches the programs and frees everything. Frames pass again as if
// nothing had been there. Idempotent.
func (in *Ingress) Close() error {
	errs := []error{in.Detach()}
	if in.bss != nil {
		errs = append(errs, unix.Munmap(in.bss))
		in.bss = nil
	}
	errs = append(errs, in.user.Close(), in.globals.Close(), in.objs.Counters.Close(), in.objs.Sockets.Close(), in.objs.Programs.Close(), in.objs.Handing.Close(), in.barrier.Close(), in.inner.Close(), in.objs.XspinIngress.Close(),
		in.tc.Counters.Close(), in.tc.Programs.Close(), in.tc.XspinIngressTc.Close())
	in.home.leave()
	in.home, in.user, in.globals, in.barrier, in.inner = nil, nil, nil, nil, nil
	in.objs, in.tc = bpf.IngressObjects{}, bpf.IngressTCObjects{}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close the ingress program: %w", err)
	}
	return nil
}

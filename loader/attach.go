// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/capability"
)

// An Order is where the program at tc stands among those of others.
type Order int

// Orders. A program that returns a verdict of its own keeps a packet from those behind it.
const (
	Last Order = iota
	First
)

// Attach is Load and AttachXDP.
func Attach(cfg Config) (*Ingress, error) {
	if err := cfg.check(); err != nil { // before what only the kernel knows
		return nil, err
	}
	if err := Check(cfg.Interface); err != nil {
		return nil, err
	}
	in, err := Load(cfg)
	if err != nil {
		return nil, err
	}
	if err := in.AttachXDP(); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

func (c *Config) check() error {
	if c.HPUs < 1 || c.HPUs > bpf.MaxHPUs {
		return fmt.Errorf("%d HPUs: want 1 to %d", c.HPUs, bpf.MaxHPUs)
	}
	if c.Queues < 1 || c.Queues > bpf.MaxQueues {
		return fmt.Errorf("interface %s has %d receive queues: want 1 to %d", c.Interface.Name, c.Queues, bpf.MaxQueues)
	}
	if c.BufferSize < 1 || c.MaxBuffers < 1 {
		return fmt.Errorf("buffers of %d bytes, %d for a frame: both must be at least 1", c.BufferSize, c.MaxBuffers)
	}
	return nil
}

// Load makes what the programs of an interface share, which is in the network namespace of the calling thread. None
// is attached.
func Load(cfg Config) (_ *Ingress, err error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	op := "load the ingress programs for " + cfg.Interface.Name
	if err := capability.Need(op, capability.NetAdmin, capability.NetRaw, capability.BPF, capability.Perfmon); err != nil {
		return nil, err
	}
	if err := checkKernel(); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	l, err := netlink.LinkByIndex(cfg.Interface.Index)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	home, err := homeHere()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	in := &Ingress{cfg: cfg, home: home, tap: l.Type() == (&netlink.Tuntap{}).Type()}
	if err := in.makeMaps(); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// Prepare loads the programs for both hooks, if they are not loaded: to attach one is left to do, which takes
// CAP_NET_ADMIN and CAP_BPF, and no more.
func (in *Ingress) Prepare() error {
	in.attach.Lock()
	defer in.attach.Unlock()
	mode := in.mode
	if mode == Auto {
		mode = in.cfg.Mode
	}
	if mode == Auto {
		mode = Native // most likely
	}
	return errors.Join(in.prepareXDP(mode), in.loadTC())
}

// prepareXDP loads the program for xdp, if it is not loaded for the mode.
func (in *Ingress) prepareXDP(mode Mode) error {
	if in.objs.XspinIngress != nil && in.loaded == mode {
		return nil
	}
	program := bpf.IngressProgXspinIngress
	if in.trains(mode) {
		program = bpf.IngressProgXspinTrains
	}
	return in.loadXDP(program, mode)
}

// AttachXDP attaches the program for xdp. The link dies with the process, whichever way that ends. Idempotent.
func (in *Ingress) AttachXDP() error {
	in.attach.Lock()
	defer in.attach.Unlock()
	if in.links[XDP] != nil {
		return nil
	}
	return in.home.do(in.attachXDPHere)
}

func (in *Ingress) attachXDPHere() error {
	if err := checkXDP(in.cfg.Interface); err != nil {
		return err
	}
	mode := in.mode // as it was before
	if mode == Auto {
		mode = in.cfg.Mode
	}
	if mode != Auto {
		return in.attachXDP(mode)
	}
	err := in.attachXDP(Native)
	if errors.Is(err, ErrNoNative) {
		err = in.attachXDP(Generic)
	}
	return err
}

func (in *Ingress) attachXDP(mode Mode) error {
	if err := in.prepareXDP(mode); err != nil {
		return err
	}
	flags := link.XDPDriverMode
	if mode == Generic {
		flags = link.XDPGenericMode
	}
	// Before it runs, and until it runs no more: no frame is counted by both programs. What comes in these
	// milliseconds and has no context at tc is counted by none.
	atomic.StoreUint32(in.counting, 1)
	l, err := link.AttachXDP(link.XDPOptions{
		Program:   in.objs.XspinIngress,
		Interface: in.cfg.Interface.Index,
		Flags:     flags,
	})
	if err != nil {
		atomic.StoreUint32(in.counting, 0)
	}
	op := fmt.Sprintf("attach to %s (%s mode)", in.cfg.Interface.Name, mode)
	switch {
	case err == nil:
		in.links[XDP], in.mode = l, mode
		return nil
	case mode == Native && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, ebpf.ErrNotSupported)):
		return fmt.Errorf("%s: %w: the driver has none, generic mode works", op, ErrNoNative)
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
		return fmt.Errorf("%s: %w: %w", op, ErrOccupied, err)
	case errors.Is(err, unix.ERANGE):
		return fmt.Errorf("%s: the MTU is too large for XDP on this driver, lower it: %w", op, err)
	}
	return fmt.Errorf("%s: %w", op, err)
}

// loadTC loads the program for tc, if it is not loaded.
func (in *Ingress) loadTC() error {
	in.loading.Lock()
	defer in.loading.Unlock()
	if in.tc.XspinIngressTc != nil {
		return nil
	}
	spec, err := bpf.LoadIngressTC()
	if err != nil {
		return fmt.Errorf("read ingress object: %w", err)
	}
	object, err := ingress()
	if err != nil {
		return fmt.Errorf("read ingress object: %w", err)
	}
	for name, v := range spec.Variables {
		if at, ok := object.shared[name]; !ok || at != v.Offset {
			return fmt.Errorf("load %s: variable %s is elsewhere in the memory that the programs share", bpf.IngressTCProgXspinIngressTc, name)
		}
	}
	clear(spec.Variables)
	coll, err := bpf.LoadWith(spec, map[string]*ebpf.Map{bss: in.globals})
	if err != nil {
		return fmt.Errorf("load %s: %w", bpf.IngressTCProgXspinIngressTc, loadError(err))
	}
	defer coll.Close()
	in.tc.Counters = coll.DetachMap(bpf.IngressTCMapCounters)
	in.tc.Programs = coll.DetachMap(bpf.IngressTCMapPrograms)
	in.tc.XspinIngressTc = coll.DetachProgram(bpf.IngressTCProgXspinIngressTc)
	return nil
}

// tcPrograms returns the handlers' programs at tc; nil: there are none.
func (in *Ingress) tcPrograms() *ebpf.Map {
	in.loading.Lock()
	defer in.loading.Unlock()
	return in.tc.Programs
}

// CheckTC is [Check] for the program at tc. The interface may be down, and have programs of others, but of no other XsPIN.
func CheckTC(iface *net.Interface) error {
	if err := capability.Need(fmt.Sprintf("attach to %s (tc)", iface.Name), capability.NetAdmin, capability.BPF, capability.Perfmon); err != nil {
		return err
	}
	return checkTC(iface)
}

// checkTC is [CheckTC] for a program that is loaded.
func checkTC(iface *net.Interface) error {
	op := fmt.Sprintf("attach to %s (tc)", iface.Name)
	if err := capability.Need(op, capability.NetAdmin, capability.BPF); err != nil {
		return err
	}
	l, err := netlink.LinkByIndex(iface.Index)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if kind := l.Attrs().EncapType; kind != "ether" && kind != "loopback" {
		return fmt.Errorf("%s: its packets have no Ethernet headers (link/%s), which rules are about: name the interface below it", op, kind)
	}
	there, err := link.QueryPrograms(link.QueryOptions{Target: iface.Index, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		return fmt.Errorf("%s: %w: tcx links: %w; Linux 6.6 and later have them", op, ErrKernel, err)
	}
	for _, p := range there.Programs {
		// A process without CAP_SYS_ADMIN cannot look at programs of others, and shares the interface with them.
		const ours = bpf.IngressTCProgXspinIngressTc
		if name := programName(p.ID); name == ours || name == ours[:15] {
			return fmt.Errorf("%s: %w: %q (id %d); another XsPIN runs here: end it first", op, ErrOccupied, name, p.ID)
		}
	}
	return nil
}

// programName returns a program's name, of which old kernels keep 15 bytes; "" if it has none, or may not be looked at.
func programName(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return ""
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return ""
	}
	return info.Name
}

// AttachTC attaches the program for tc. The link dies with the process, whichever way that ends. Idempotent.
func (in *Ingress) AttachTC(order Order) error {
	in.attach.Lock()
	defer in.attach.Unlock()
	if in.links[TC] != nil {
		return nil
	}
	if err := in.loadTC(); err != nil {
		return err
	}
	anchor := link.Tail()
	if order == First {
		anchor = link.Head()
	}
	op := fmt.Sprintf("attach to %s (tc)", in.cfg.Interface.Name)
	var l link.Link
	err := in.home.do(func() (err error) {
		if err := checkTC(in.cfg.Interface); err != nil {
			return err
		}
		l, err = link.AttachTCX(link.TCXOptions{
			Program:   in.tc.XspinIngressTc,
			Interface: in.cfg.Interface.Index,
			Attach:    ebpf.AttachTCXIngress,
			Anchor:    anchor,
		})
		if err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	in.links[TC] = l
	return nil
}

// Attached tells whether the program of a hook is attached.
func (in *Ingress) Attached(hook Hook) bool {
	in.attach.Lock()
	defer in.attach.Unlock()
	return in.links[hook] != nil
}

// DetachHook takes the program of a hook off the interface. Idempotent.
func (in *Ingress) DetachHook(hook Hook) error {
	in.attach.Lock()
	defer in.attach.Unlock()
	l := in.links[hook]
	if l == nil {
		return nil
	}
	in.links[hook] = nil
	err := l.Close()
	if hook == XDP {
		err = errors.Join(err, in.Synchronize()) // what it has passed is still on its way
		atomic.StoreUint32(in.counting, 0)
	}
	if err != nil {
		return fmt.Errorf("detach from %s (%v): %w", in.cfg.Interface.Name, hook, err)
	}
	return nil
}

// Detach takes the programs off the interface, and leaves their memory. Frames pass
// again as if nothing had been there. Idempotent.
func (in *Ingress) Detach() error {
	return errors.Join(in.DetachHook(XDP), in.DetachHook(TC))
}

// Mode returns how the program for xdp is attached, or was: Native or Generic. Auto: it never was.
func (in *Ingress) Mode() Mode {
	in.attach.Lock()
	defer in.attach.Unlock()
	return in.mode
}

// Trains tells whether what comes to the program at xdp may be several packets in one, as it is before Linux's
// stack has cut it, or after it has joined it: in generic mode, and from the process behind a tap.
// They pass to the stack.
func (in *Ingress) Trains() bool {
	in.attach.Lock()
	defer in.attach.Unlock()
	if in.mode == Auto { // it is not attached yet
		return in.trains(in.cfg.Mode)
	}
	return in.trains(in.mode)
}

func (in *Ingress) trains(mode Mode) bool { return mode == Generic || in.tap }

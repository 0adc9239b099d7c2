// SPDX-License-Identifier: Apache-2.0

package impair

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/ethtool"
)

// The devices of the namespace between the ends.
const (
	// HostPort and NICPort are the veth peers of the host's and the NIC's device.
	// They must exist before Install.
	HostPort = "p-host"
	NICPort  = "p-nic"
	// The veth pair through which frames go to the relay, if there is a delay.
	// The relay receives them at the far end and sends them on from there.
	waitHost = "d-host"
	waitNIC  = "d-nic"
)

// A way is one direction through the stage.
type way struct {
	direction    Direction
	slot         uint32 // in the maps
	in, out      string // the ports
	enter, leave string // the pair to the relay
}

var ways = [2]way{
	{FromHost, 0, HostPort, NICPort, waitHost, waitNIC},
	{ToHost, 1, NICPort, HostPort, waitNIC, waitHost},
}

// sendsBy is the device whose egress limits the rate.
func (w way) sendsBy(c Config) string {
	if c.Delay > 0 && c.Direction.covers(w.direction) {
		return w.enter
	}
	return w.out
}

// queueLength is the length of the queue of devices that frames leave by, in frames.
// Without a rate, it takes bursts that are too long for the 256 places of veth's ring.
const queueLength = 4096

// settings are an entry of the map: the programs' settings, and their counters.
type settings = bpf.ImpairXspinPath

// setting returns the programs' settings for a direction.
func (c Config) setting(w way) (s settings) {
	if c.Trains {
		s.Set.Trains = 1
	}
	if !c.Direction.covers(w.direction) {
		return s
	}
	s.Set.On = 1
	s.Set.Seed = c.Seed
	s.Set.Key = keyOf(c.Seed, w.direction)
	s.Set.Loss = threshold(c.Loss)
	s.Set.Duplicate = threshold(c.Duplicate)
	s.Set.Corrupt = threshold(c.Corrupt)
	s.Set.Reorder = threshold(c.Reorder)
	s.Set.Delay = uint64(c.Delay)
	s.Set.Rate = c.Rate
	return s
}

// Equal reports whether two configs, with their defaults filled in, have the same effect.
func (c Config) Equal(o Config) bool {
	for _, w := range ways {
		if c.setting(w) != o.setting(w) {
			return false
		}
	}
	return true
}

// configOf is the inverse of setting.
func configOf(entries [2]settings) Config {
	c := Config{Direction: ToHost, Trains: entries[1].Set.Trains != 0}
	s := entries[1].Set
	if entries[0].Set.On != 0 {
		s = entries[0].Set
		if c.Direction = FromHost; entries[1].Set.On != 0 {
			c.Direction = Both
		}
	}
	c.Seed = s.Seed
	c.Loss, c.Duplicate = fraction(s.Loss), fraction(s.Duplicate)
	c.Corrupt, c.Reorder = fraction(s.Corrupt), fraction(s.Reorder)
	c.Delay, c.Rate = time.Duration(s.Delay), s.Rate
	return c
}

// Install applies cfg in the thread's namespace, which must have HostPort and NICPort
// with that MTU. It gives devices that it makes the alias. With a Delay, no frame passes
// until there is a Relay.
func Install(cfg Config, mtu int, alias string) error {
	spec, err := bpf.LoadImpair()
	if err != nil {
		return fmt.Errorf("impair: %w", err)
	}
	coll, err := bpf.Load(spec)
	if err != nil {
		return fmt.Errorf("impair: load programs: %w", err)
	}
	defer coll.Close()
	var obj bpf.ImpairObjects
	if err := coll.Assign(&obj); err != nil {
		return fmt.Errorf("impair: %w", err)
	}
	defer obj.Close()

	if cfg.Delay > 0 {
		if err := addWaitingPair(mtu, alias); err != nil {
			return fmt.Errorf("impair: %w", err)
		}
	}
	links, err := links(cfg.Delay > 0)
	if err != nil {
		return fmt.Errorf("impair: %w", err)
	}
	programs := map[string]*ebpf.Program{
		HostPort: obj.XspinWire, NICPort: obj.XspinWire,
		waitNIC: obj.XspinWaitFromHost, waitHost: obj.XspinWaitToHost,
	}
	for name, l := range links {
		if cfg.Trains {
			break // a program would have the ends cut them
		}
		if err := netlink.LinkSetXdpFdWithFlags(l, programs[name].FD(), nl.XDP_FLAGS_DRV_MODE); err != nil {
			return fmt.Errorf("impair: attach XDP program to %s: %w", name, err)
		}
		// GRO comes with the XDP program, and would merge frames before they
		// are impaired.
		if err := ethtool.GRO.Enable(name, false); err != nil {
			return fmt.Errorf("impair: %w", err)
		}
	}
	for i, w := range ways {
		s := cfg.setting(w)
		out := w.sendsBy(cfg)
		s.Set.Out = uint32(links[out].Attrs().Index)
		if err := obj.XspinPaths.Put(w.slot, &s); err != nil {
			return fmt.Errorf("impair: configure %s: %w", w.direction, err)
		}
		if err := netlink.QdiscAdd(discipline(links[out], s.Set.Rate, mtu)); err != nil {
			return fmt.Errorf("impair: queueing discipline of %s: %w", out, err)
		}
		if out != w.out {
			if err := netlink.QdiscAdd(discipline(links[w.out], 0, mtu)); err != nil {
				return fmt.Errorf("impair: queueing discipline of %s: %w", w.out, err)
			}
		}
		prog := [...]*ebpf.Program{obj.XspinImpairFromHost, obj.XspinImpairToHost}[i]
		if err := addFilter(links[w.in], prog); err != nil {
			return fmt.Errorf("impair: %s: %w", w.in, err)
		}
	}
	return nil
}

// addWaitingPair makes the pair through which frames reach the relay. It has one
// queue, so that frames keep their order.
func addWaitingPair(mtu int, alias string) error {
	err := netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: waitHost, MTU: mtu, NumRxQueues: 1, NumTxQueues: 1, TxQLen: queueLength},
		PeerName:  waitNIC, PeerMTU: uint32(mtu), PeerNumRxQueues: 1, PeerNumTxQueues: 1, PeerTxQLen: queueLength,
	})
	if err != nil {
		return fmt.Errorf("create veth pair %s, %s: %w", waitHost, waitNIC, err)
	}
	for _, name := range []string{waitHost, waitNIC} {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetAlias(l, alias); err != nil {
			return fmt.Errorf("set alias of %s: %w", name, err)
		}
		if err := netlink.LinkSetUp(l); err != nil {
			return fmt.Errorf("set %s up: %w", name, err)
		}
	}
	return nil
}

// names returns the names of the stage's devices.
func names(delay bool) []string {
	if delay {
		return []string{HostPort, NICPort, waitHost, waitNIC}
	}
	return []string{HostPort, NICPort}
}

func links(delay bool) (map[string]netlink.Link, error) {
	m := make(map[string]netlink.Link)
	for _, name := range names(delay) {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		m[name] = l
	}
	return m, nil
}

// discipline returns the queueing discipline of a device. With one, the kernel holds
// frames back while the ring of the veth is full, instead of dropping them.
func discipline(l netlink.Link, rate uint64, mtu int) netlink.Qdisc {
	attrs := netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	if rate == 0 {
		return &netlink.GenericQdisc{QdiscAttrs: attrs, QdiscType: "pfifo"}
	}
	b := Burst(rate, mtu)
	return &netlink.Tbf{
		QdiscAttrs: attrs, Rate: rate / 8, Limit: uint32(backlog(rate, mtu)),
		Buffer: netlink.Xmittime(rate/8, uint32(b)),
	}
}

// Burst is how many bytes may leave back to back, faster than the rate: what the rate
// allows in 1 ms, but at least four frames.
func Burst(rate uint64, mtu int) int { return max(int(rate/8/1000), 4*(mtu+ethHeader)) }

// backlog is how many bytes may wait because of the rate before frames are dropped: what
// it allows in 50 ms, at least 32 frames and at most 32 MiB.
func backlog(rate uint64, mtu int) int {
	return min(max(int(rate/8/20), 32*(mtu+ethHeader)), 32<<20)
}

const ethHeader = 14

// filterName marks our filters.
const filterName = "xspin_impair"

// addFilter attaches prog to the ingress of a device. The kernel keeps it until the
// device is removed, even if this process ends.
func addFilter(l netlink.Link, prog *ebpf.Program) error {
	err := netlink.QdiscAdd(&netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
		QdiscType:  "clsact",
	})
	if err != nil {
		return fmt.Errorf("add clsact: %w", err)
	}
	err = netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS,
			Handle: netlink.MakeHandle(0, 1), Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Fd: prog.FD(), Name: filterName, DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("add filter: %w", err)
	}
	return nil
}

// Counters say what happened in one direction since the stage was built.
type Counters struct {
	Frames      uint64 `json:"frames"` // received
	Bytes       uint64 `json:"bytes"`  // of these, with Ethernet header
	Lost        uint64 `json:"lost"`
	Duplicated  uint64 `json:"duplicated"`
	Corrupted   uint64 `json:"corrupted"`
	RateDropped uint64 `json:"rate_dropped"` // dropped: the queue for the rate was full
	Delayed     uint64 `json:"delayed"`      // waited in the relay
	Reordered   uint64 `json:"reordered"`    // did not wait in the relay
	Waiting     uint64 `json:"waiting"`      // in the relay now
	Overflowed  uint64 `json:"overflowed"`   // dropped: no room in the relay
	Unserved    uint64 `json:"unserved"`     // dropped: no relay
	LinkDropped uint64 `json:"link_dropped"` // dropped: the next device's ring or queue was full
}

// State is the config of a stage and its counters.
type State struct {
	Config   Config
	FromHost Counters
	ToHost   Counters
}

// ErrGone is returned, wrapped, by Read if there is no stage, or not all of it.
var ErrGone = errors.New("the impairment stage is gone")

// Read reads the state of the stage in the thread's namespace, whichever process
// installed it.
func Read() (*State, error) {
	m, err := pathMap()
	if err != nil {
		return nil, fmt.Errorf("impair: %w", err)
	}
	defer m.Close()
	entries, err := entriesOf(m)
	if err != nil {
		return nil, fmt.Errorf("impair: %w", err)
	}
	st := &State{Config: configOf(entries)}
	links, err := links(st.Config.Delay > 0)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, fmt.Errorf("impair: %w: %w", ErrGone, err)
	} else if err != nil {
		return nil, fmt.Errorf("impair: %w", err)
	}
	for i, c := range []*Counters{&st.FromHost, &st.ToHost} {
		e := &entries[i]
		*c = Counters{
			Frames: e.Did.Frames, Bytes: e.Did.Bytes, Lost: e.Did.Lost, Duplicated: e.Did.Duplicated, Corrupted: e.Did.Corrupted,
			Delayed: e.Relay.Delayed, Reordered: e.Relay.Reordered, Waiting: e.Relay.Delayed + e.Relay.Reordered - e.Relay.Sent, Overflowed: e.Relay.Overflowed, Unserved: e.Did.Unserved,
		}
		for _, name := range []string{ways[i].sendsBy(st.Config), ways[i].out} {
			q, err := rootOf(links[name])
			if err != nil {
				return nil, fmt.Errorf("impair: %s: %w", name, err)
			}
			if _, ok := q.(*netlink.Tbf); ok {
				c.RateDropped += drops(q)
			} else {
				c.LinkDropped += drops(q)
			}
			c.LinkDropped += links[name].Attrs().Statistics.TxDropped
			if name == ways[i].out {
				break // without a relay it is the same device
			}
		}
	}
	return st, nil
}

// rootOf returns the queueing discipline that Install gave to a device.
func rootOf(l netlink.Link) (netlink.Qdisc, error) {
	list, err := netlink.QdiscList(l)
	if err != nil {
		return nil, fmt.Errorf("list queueing disciplines: %w", err)
	}
	for _, q := range list {
		if q.Attrs().Parent == netlink.HANDLE_ROOT && q.Attrs().Handle == netlink.MakeHandle(1, 0) {
			return q, nil
		}
	}
	return nil, fmt.Errorf("%w: no queueing discipline", ErrGone)
}

func drops(q netlink.Qdisc) uint64 {
	if s := q.Attrs().Statistics; s != nil && s.Queue != nil {
		return uint64(s.Queue.Drops)
	}
	return 0
}

// pathMap finds the map of settings and counters through the filters that use it.
func pathMap() (*ebpf.Map, error) {
	var id int
	for _, w := range ways {
		l, err := netlink.LinkByName(w.in)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil, fmt.Errorf("%w: %w", ErrGone, err)
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", w.in, err)
		}
		filters, err := netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
		if err != nil {
			return nil, fmt.Errorf("list filters of %s: %w", w.in, err)
		}
		id = 0
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); ok && strings.HasPrefix(b.Name, filterName) {
				id = b.Id
			}
		}
		if id == 0 {
			return nil, fmt.Errorf("%w: no filter on %s", ErrGone, w.in)
		}
	}
	return mapOf(ebpf.ProgramID(id), bpf.ImpairMapXspinPaths) // both filters use the same
}

// mapOf opens the map of that name that a program uses.
func mapOf(id ebpf.ProgramID, name string) (*ebpf.Map, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil, fmt.Errorf("open program %d: %w", id, err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", id, err)
	}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, fmt.Errorf("open map %d: %w", id, err)
		}
		if mi, err := m.Info(); err == nil && mi.Name == name {
			return m, nil
		}
		m.Close()
	}
	return nil, fmt.Errorf("program %d has no map %s", id, name)
}

func entriesOf(m *ebpf.Map) (entries [2]settings, err error) {
	for i, w := range ways {
		if err := m.Lookup(w.slot, &entries[i]); err != nil {
			return entries, fmt.Errorf("read map %s: %w", bpf.ImpairMapXspinPaths, err)
		}
	}
	return entries, nil
}

// Prepare makes a device at an end, in the thread's namespace, send what the stage can impair. The
// kernel computes checksums and cuts segments before frames leave it: with offload, veth passes
// frames on without checksums, and a flipped bit would not be noticed. With Trains it cuts TCP alone.
func (c Config) Prepare(device string) error {
	if c.Trains {
		return ethtool.TSO.Enable(device, false)
	}
	if err := ethtool.TxChecksum.Enable(device, false); err != nil {
		return err
	}
	// The kernel turns TSO off with it.
	if on, err := ethtool.TSO.Enabled(device); err != nil {
		return err
	} else if on {
		return fmt.Errorf("%s of %s stays on without %s", ethtool.TSO, device, ethtool.TxChecksum)
	}
	return nil
}

// Unprepared returns the feature that Prepare has turned off and that is on again, or "".
func (c Config) Unprepared(device string) (feature string, err error) {
	f := ethtool.TxChecksum
	if c.Trains {
		f = ethtool.TSO
	}
	on, err := f.Enabled(device)
	if err != nil || !on {
		return "", err
	}
	return f.String(), nil
}

// SPDX-License-Identifier: Apache-2.0

// Package netns builds labs: two network namespaces joined by a veth pair, in
// which a NIC and its peer meet without any hardware. A third namespace between
// them can impair the network, see package impair.
//
// A lab is built in unnamed namespaces, which get their names under /run/netns in
// the last step. What a crash or `ip netns delete` leaves behind is removed by the
// next Up or Down. Devices of a lab carry the alias "xspin lab"; a namespace with
// devices but none of ours is never touched.
package netns

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns/impair"
)

// alias marks the devices that this package made.
const alias = "xspin lab"

var (
	// ErrConfig is returned, wrapped, for a LabConfig that cannot work.
	ErrConfig = errors.New("invalid lab")
	// ErrForeign is returned, wrapped, when a name of the lab belongs to a
	// namespace that somebody else made and uses.
	ErrForeign = errors.New("not made by xspin")
	// ErrNotUp is returned, wrapped, by Open when there is no lab, or one that
	// differs from the one asked for.
	ErrNotUp = errors.New("the lab is not up")
)

// End is one end of the lab. Zero fields take the defaults of LabConfig.
type End struct {
	Namespace string           // name under /run/netns
	Device    string           // at most 15 bytes
	MAC       net.HardwareAddr // unicast
	Addr      netip.Prefix     // IPv4, in the same subnet as the other end's
}

// LabConfig describes a lab. Zero fields take the defaults.
type LabConfig struct {
	// NIC defaults to namespace xspin-nic, device xs-nic, 10.0.0.1/24 and
	// 02:00:00:00:00:01.
	NIC End
	// Host defaults to namespace xspin-host, device xs-host, 10.0.0.2/24
	// and 02:00:00:00:00:02.
	Host End
	// MTU in bytes, 68 to 65535. Defaults to 1500; Open takes what it finds.
	MTU int
	// Queues is the number of receive and of transmit queues of each
	// device, 1 to 256. Defaults to the number of CPUs that the process may
	// use, but no more than the 64 receive queues that a NIC can serve; Open
	// takes what it finds.
	Queues int
	// Path, if not nil, puts a namespace between the ends that impairs frames.
	// The ends then compute checksums and cut segments themselves, without
	// offloads, but see its Trains. Nil is a plain veth pair; Open takes what it finds.
	Path *impair.Config
	// PathNamespace is the name of that namespace. Defaults to the name of the
	// NIC's namespace with its suffix nic replaced by path, or else with -path
	// appended.
	PathNamespace string
	// StartRelay starts a process that calls ServeRelay with the namespace and
	// outlives this one, and returns when the relay is ready. Optional: if nil,
	// this process delays the frames of a Path, until the Lab is closed.
	StartRelay func(path *os.File) error
	// Warn, if not nil, is told what a user should know although the call
	// succeeds.
	Warn func(msg string)
}

// Port is one end of a lab that is up.
type Port struct {
	End
	NS    *Namespace
	Index int // interface index inside NS
}

// Lab is a handle on a lab that is up. Safe for concurrent use.
type Lab struct {
	NIC, Host   Port
	MTU, Queues int
	// Path is how PathNS, the namespace between the ends, impairs frames. Both
	// are nil for a plain veth pair.
	Path   *impair.Config
	PathNS *Namespace

	cfg   LabConfig
	relay *impair.Relay // if it runs in this process
}

func (c LabConfig) withDefaults() LabConfig {
	for _, e := range []struct {
		end  *End
		side string
		host byte
	}{{&c.NIC, "nic", 1}, {&c.Host, "host", 2}} {
		if e.end.Namespace == "" {
			e.end.Namespace = "xspin-" + e.side
		}
		if e.end.Device == "" {
			e.end.Device = "xs-" + e.side
		}
		if e.end.MAC == nil {
			e.end.MAC = net.HardwareAddr{2, 0, 0, 0, 0, e.host}
		}
		if !e.end.Addr.IsValid() {
			e.end.Addr = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, e.host}), 24)
		}
	}
	if c.MTU == 0 {
		c.MTU = 1500
	}
	if c.Queues == 0 {
		c.Queues = defaultQueues(runtime.NumCPU())
	}
	if c.Path != nil {
		p := c.Path.WithDefaults()
		c.Path = &p
	}
	if c.PathNamespace == "" {
		if base, ok := strings.CutSuffix(c.NIC.Namespace, "nic"); ok {
			c.PathNamespace = base + "path"
		} else {
			c.PathNamespace = c.NIC.Namespace + "-path"
		}
	}
	if c.Warn == nil {
		c.Warn = func(string) {}
	}
	return c
}

// defaultQueues is the number of queues on a machine with that many CPUs.
func defaultQueues(cpus int) int { return min(cpus, 64) }

// check validates a config with its defaults filled in.
func (c LabConfig) check() error {
	for _, e := range []End{c.NIC, c.Host} {
		if err := checkName(e.Namespace); err != nil {
			return fmt.Errorf("%w: %w", ErrConfig, err)
		}
		// As dev_valid_name in the kernel, and no '%', which makes the name a pattern.
		if d := e.Device; len(d) >= unix.IFNAMSIZ || d == "." || d == ".." || d == "lo" || strings.ContainsAny(d, "/:% \t\n\v\f\r") {
			return fmt.Errorf("%w: %q is not a valid device name: want 1 to %d bytes without '/', ':', '%%' and spaces", ErrConfig, d, unix.IFNAMSIZ-1)
		}
		if len(e.MAC) != 6 || e.MAC[0]&1 != 0 || bytes.Equal(e.MAC, make([]byte, 6)) {
			return fmt.Errorf("%w: %q is not a unicast Ethernet address for %s", ErrConfig, e.MAC, e.Device)
		}
		if a := e.Addr.Addr(); !a.Is4() || e.Addr.Bits() > 31 || e.Addr.Bits() < 1 || a.IsMulticast() || a.IsLoopback() || a.IsUnspecified() ||
			e.Addr.Bits() < 31 && (a == e.Addr.Masked().Addr() || a == broadcast(e.Addr)) {
			return fmt.Errorf("%w: %s is not an IPv4 host address with prefix length 1 to 31 for %s", ErrConfig, e.Addr, e.Device)
		}
	}
	if err := checkName(c.PathNamespace); err != nil {
		return fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if c.Path != nil {
		if err := c.Path.Check(); err != nil {
			return fmt.Errorf("%w: %w", ErrConfig, err)
		}
	}
	switch n, h := c.NIC, c.Host; {
	case c.PathNamespace == n.Namespace || c.PathNamespace == h.Namespace:
		return fmt.Errorf("%w: an end in namespace %q, which is between the ends", ErrConfig, c.PathNamespace)
	case n.Namespace == h.Namespace:
		return fmt.Errorf("%w: both ends in namespace %q: they would meet over loopback", ErrConfig, n.Namespace)
	case n.Device == h.Device:
		return fmt.Errorf("%w: both devices named %q", ErrConfig, n.Device)
	case bytes.Equal(n.MAC, h.MAC):
		return fmt.Errorf("%w: both devices with MAC %s", ErrConfig, n.MAC)
	case n.Addr.Addr() == h.Addr.Addr():
		return fmt.Errorf("%w: both devices with address %s", ErrConfig, n.Addr.Addr())
	case n.Addr.Masked() != h.Addr.Masked():
		return fmt.Errorf("%w: %s and %s are not in one subnet", ErrConfig, n.Addr, h.Addr)
	case c.MTU < 68 || c.MTU > 65535:
		return fmt.Errorf("%w: MTU %d, want 68 to 65535", ErrConfig, c.MTU)
	case c.Queues < 1 || c.Queues > 256:
		return fmt.Errorf("%w: %d queues, want 1 to 256", ErrConfig, c.Queues)
	}
	return nil
}

func broadcast(p netip.Prefix) netip.Addr {
	a := p.Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		a[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(a)
}

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > unix.NAME_MAX || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("%q is not a valid namespace name: want 1 to %d bytes without '/'", name, unix.NAME_MAX)
	}
	return nil
}

// Up brings the lab up. It keeps a lab that is as cfg says, and removes leftovers
// or a different lab first. After an error there is no lab.
func Up(cfg LabConfig) (*Lab, error) {
	const op = "lab up"
	cfg, unlock, err := begin(op, cfg)
	if err != nil {
		return nil, err
	}
	defer unlock()

	l, diff, err := find(cfg, false)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	if diff == "" {
		return l, nil
	}
	return rebuild(op, cfg)
}

// rebuild removes what is there and builds the lab.
func rebuild(op string, cfg LabConfig) (*Lab, error) {
	if err := remove(cfg); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	l, err := build(cfg)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return l, nil
}

// Open attaches to a lab that is up. MTU, Queues and Path of cfg may be zero, to
// accept what is there. The error matches impair.ErrNoRelay when the process that
// delays frames has ended.
func Open(cfg LabConfig) (*Lab, error) {
	const op = "open lab"
	full, unlock, err := begin(op, cfg)
	if err != nil {
		return nil, err
	}
	defer unlock()
	return open(op, cfg, full)
}

// Borrow attaches to the lab that is up, as Open does, or builds one if there is none.
// release removes the lab if Borrow has built it, and otherwise only closes it. A lab
// that differs or is broken may be somebody else's, so it is an error, and stays.
func Borrow(cfg LabConfig) (l *Lab, release func() error, err error) {
	const op = "open lab"
	full, unlock, err := begin(op, cfg)
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	if l, err = open(op, cfg, full); err == nil {
		return l, l.Close, nil
	}
	if !errors.Is(err, ErrNotUp) {
		return nil, nil, err
	}
	if none, e := absent(full); e != nil || !none {
		return nil, nil, errors.Join(err, e)
	}
	if l, err = rebuild("lab up", full); err != nil {
		return nil, nil, err
	}
	return l, l.Down, nil
}

// absent reports whether none of the lab's namespaces exists.
func absent(cfg LabConfig) (bool, error) {
	for _, look := range []func() (site, error){
		func() (site, error) { return visit(cfg.NIC.Namespace) },
		func() (site, error) { return visit(cfg.Host.Namespace) },
		func() (site, error) { return visitPath(cfg) },
	} {
		s, err := look()
		if err != nil {
			return false, err
		}
		s.close()
		if s.ns != nil {
			return false, nil
		}
	}
	return true, nil
}

// open is Open for a caller that holds the lock of begin. full is cfg with its defaults.
func open(op string, cfg, full LabConfig) (*Lab, error) {
	full.MTU, full.Queues = cfg.MTU, cfg.Queues
	l, diff, err := find(full, true)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	if diff == relayEnded {
		return nil, fmt.Errorf("%s: %w: %w: it was killed or crashed, and no frame passes without it: run `xspin lab up`", op, ErrNotUp, impair.ErrNoRelay)
	}
	if diff != "" {
		out := "run `xspin lab up`"
		if none, err := absent(full); err == nil && !none {
			out = "repair it, or run `xspin lab up` to replace the lab"
		}
		return nil, fmt.Errorf("%s: %w: %s: %s", op, ErrNotUp, diff, out)
	}
	return l, nil
}

// Down removes the lab, or what is left of one. It is no error if there is none.
// Processes inside are not ended, and cfg.Warn is told about them: they keep their
// namespace, without its device.
func Down(cfg LabConfig) error {
	const op = "lab down"
	cfg, unlock, err := begin(op, cfg)
	if err != nil {
		return err
	}
	defer unlock()
	if err := remove(cfg); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// Close closes the handle; the lab stays up. If this process delays the frames of a
// Path, that ends: no frame passes until the next Up, which builds the lab again.
func (l *Lab) Close() error {
	if l == nil {
		return nil
	}
	return errors.Join(l.relay.Close(), l.NIC.NS.Close(), l.Host.NS.Close(), l.PathNS.Close())
}

// PathState reads how frames between the ends are impaired, and the counters, whichever
// process built the lab. It returns nil if the ends are a plain pair.
func (l *Lab) PathState() (*impair.State, error) {
	if l.PathNS == nil {
		return nil, nil
	}
	var st *impair.State
	err := l.PathNS.Do(func() (err error) {
		st, err = impair.Read()
		return err
	})
	return st, err
}

// ServeRelay delays frames, in a process that LabConfig.StartRelay has started. It
// calls ready when it is ready, and returns when the lab is gone.
func ServeRelay(path *os.File, ready func()) error {
	ns := &Namespace{name: path.Name(), f: path}
	r, err := startRelay(ns)
	if err != nil {
		return err
	}
	// The relay's sockets keep the namespace, and end with the devices.
	if err := ns.Close(); err != nil {
		return errors.Join(err, r.Close())
	}
	ready()
	return r.Wait()
}

func startRelay(ns *Namespace) (r *impair.Relay, err error) {
	err = ns.Do(func() (err error) {
		r, err = impair.StartRelay()
		return err
	})
	return r, err
}

// Down removes the lab and closes the handle.
func (l *Lab) Down() error {
	return errors.Join(Down(l.cfg), l.Close())
}

// begin is the common start of the calls above: it checks the config and privileges,
// and locks out other calls, in this and in other processes, until unlock.
func begin(op string, cfg LabConfig) (_ LabConfig, unlock func(), err error) {
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return cfg, nil, fmt.Errorf("%s: %w", op, err)
	}
	if err := checkPrivilege(op); err != nil {
		return cfg, nil, err
	}
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return cfg, nil, fmt.Errorf("%s: %w", op, err)
	}
	// `ip netns add` takes the same lock.
	dir, err := os.Open(runDir)
	if err != nil {
		return cfg, nil, fmt.Errorf("%s: %w", op, err)
	}
	for {
		err = unix.Flock(int(dir.Fd()), unix.LOCK_EX)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		dir.Close()
		return cfg, nil, fmt.Errorf("%s: lock %s: %w", op, runDir, err)
	}
	return cfg, func() { dir.Close() }, nil
}

// site is what there is under one namespace name.
type site struct {
	ns    *Namespace // nil if there is none
	file  bool       // there is a file, with a namespace mounted on it or not
	links []netlink.Link
}

func (s site) close() { s.ns.Close() }

// fallbacks are the devices that tunnel modules create in every new namespace.
var fallbacks = map[string]bool{
	"tunl0": true, "gre0": true, "gretap0": true, "erspan0": true, "ip_vti0": true,
	"sit0": true, "ip6tnl0": true, "ip6gre0": true, "ip6_vti0": true,
}

// visit looks at a name without changing anything. It fails with ErrForeign if the
// namespace is not ours.
func visit(name string) (site, error) {
	var s site
	ns, err := OpenNamespace(name)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return s, nil
	case errors.Is(err, errNoMount):
		path := filepath.Join(runDir, name)
		if info, err := os.Lstat(path); err != nil {
			return s, err
		} else if !info.Mode().IsRegular() || info.Size() != 0 {
			return s, fmt.Errorf("%s: %w: neither a namespace nor the empty file that a crash leaves", path, ErrForeign)
		}
		return site{file: true}, nil
	case err != nil:
		return s, err
	}
	s = site{ns: ns, file: true}
	err = ns.Do(func() (err error) {
		s.links, err = netlink.LinkList()
		for try := 0; errors.Is(err, netlink.ErrDumpInterrupted) && try < 10; try++ {
			s.links, err = netlink.LinkList()
		}
		return err
	})
	if err != nil {
		s.close()
		return site{}, fmt.Errorf("list devices of namespace %q: %w", name, err)
	}
	var others []string
	for _, l := range s.links {
		a := l.Attrs()
		if a.Alias == alias {
			return s, nil
		}
		if a.Flags&net.FlagLoopback == 0 && !(fallbacks[a.Name] && a.Flags&net.FlagUp == 0) {
			others = append(others, a.Name)
		}
	}
	if others != nil {
		s.close()
		return site{}, fmt.Errorf("namespace %q with %s: %w: choose another name, or remove it with `ip netns delete %s`",
			name, strings.Join(others, ", "), ErrForeign, name)
	}
	return s, nil
}

// visitPath looks at the namespace between the ends. If cfg has no Path, it ignores a
// namespace of that name that is not ours.
func visitPath(cfg LabConfig) (site, error) {
	s, err := visit(cfg.PathNamespace)
	if errors.Is(err, ErrForeign) && cfg.Path == nil {
		return site{}, nil
	}
	return s, err
}

// find attaches to the lab if it is as cfg says; else diff says what is different. A
// zero MTU or number of queues accepts any, and so does a nil Path with anyPath.
func find(cfg LabConfig, anyPath bool) (l *Lab, diff string, err error) {
	var sites [3]site
	defer func() {
		if l == nil {
			for _, s := range sites {
				s.close()
			}
		}
	}()
	if sites[0], err = visit(cfg.NIC.Namespace); err != nil {
		return nil, "", err
	}
	if sites[1], err = visit(cfg.Host.Namespace); err != nil {
		return nil, "", err
	}
	if sites[2], err = visitPath(cfg); err != nil {
		return nil, "", err
	}
	switch path := sites[2]; {
	case path.file && cfg.Path == nil && !anyPath:
		return nil, fmt.Sprintf("there is a namespace %q", cfg.PathNamespace), nil
	case path.ns == nil && cfg.Path != nil:
		return nil, fmt.Sprintf("no namespace %q", cfg.PathNamespace), nil
	}
	l, diff, err = compare(cfg, sites[0].ns, sites[1].ns, sites[2].ns)
	if err != nil || diff != "" {
		return nil, diff, err
	}
	return l, "", nil
}

// compare compares the namespaces with cfg; path is nil for a plain pair. The lab it
// returns owns them.
func compare(cfg LabConfig, nic, host, path *Namespace) (l *Lab, diff string, err error) {
	l = &Lab{MTU: cfg.MTU, Queues: cfg.Queues}
	var attrs [2]*netlink.LinkAttrs
	for i, e := range []struct {
		port  *Port
		end   End
		ns    *Namespace
		other *Namespace
	}{{&l.NIC, cfg.NIC, nic, host}, {&l.Host, cfg.Host, host, nic}} {
		if e.ns == nil || e.other == nil {
			if e.ns == nil {
				return nil, fmt.Sprintf("no namespace %q", e.end.Namespace), nil
			}
			continue // the other end says so
		}
		if path != nil {
			e.other = path
		}
		err := e.ns.Do(func() (err error) {
			attrs[i], diff, err = compareEnd(l, e.end, e.other)
			return err
		})
		if err != nil {
			return nil, "", fmt.Errorf("inspect %s in namespace %q: %w", e.end.Device, e.end.Namespace, err)
		}
		if diff != "" {
			return nil, diff, nil
		}
		*e.port = Port{End: e.end, NS: e.ns, Index: attrs[i].Index}
	}
	if path == nil {
		if attrs[0].ParentIndex != attrs[1].Index || attrs[1].ParentIndex != attrs[0].Index {
			return nil, fmt.Sprintf("%s and %s are not a pair", cfg.NIC.Device, cfg.Host.Device), nil
		}
	} else {
		err := path.Do(func() (err error) {
			diff, err = comparePath(l, cfg, attrs)
			return err
		})
		if err != nil {
			return nil, "", fmt.Errorf("inspect namespace %q: %w", path.name, err)
		}
		if diff != "" {
			return nil, diff, nil
		}
		l.PathNS = path
		for _, p := range []Port{l.NIC, l.Host} {
			var on string
			err := p.NS.Do(func() (err error) {
				on, err = l.Path.Unprepared(p.Device)
				return err
			})
			if err != nil {
				return nil, "", fmt.Errorf("inspect %s in namespace %q: %w", p.Device, p.Namespace, err)
			}
			if on != "" {
				return nil, fmt.Sprintf("%s of %s is on", on, p.Device), nil
			}
		}
	}
	l.cfg = cfg
	l.cfg.MTU, l.cfg.Queues, l.cfg.Path = l.MTU, l.Queues, l.Path
	return l, "", nil
}

// relayEnded is the difference for which Open has an error of its own.
const relayEnded = "no relay runs"

// comparePath compares the namespace between the ends, which the thread is in. It
// puts what it finds into l.Path.
func comparePath(l *Lab, cfg LabConfig, ends [2]*netlink.LinkAttrs) (diff string, err error) {
	for i, e := range []struct {
		name string
		port Port
	}{{impair.NICPort, l.NIC}, {impair.HostPort, l.Host}} {
		link, err := netlink.LinkByName(e.name)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return fmt.Sprintf("no device %s in %s", e.name, cfg.PathNamespace), nil
		} else if err != nil {
			return "", err
		}
		a := link.Attrs()
		id, err := netlink.GetNetNsIdByFd(int(e.port.NS.f.Fd()))
		if err != nil {
			return "", fmt.Errorf("get id of namespace %q: %w", e.port.Namespace, err)
		}
		switch {
		case link.Type() != "veth" || a.Alias != alias:
			return fmt.Sprintf("%s is not ours", e.name), nil
		case a.NetNsID != id || a.ParentIndex != ends[i].Index || ends[i].ParentIndex != a.Index:
			return fmt.Sprintf("%s and %s are not a pair", e.name, e.port.Device), nil
		case a.Flags&net.FlagUp == 0:
			return fmt.Sprintf("%s is down", e.name), nil
		case a.MTU != l.MTU:
			return fmt.Sprintf("%s has MTU %d, not %d", e.name, a.MTU, l.MTU), nil
		}
	}
	st, err := impair.Read()
	if errors.Is(err, impair.ErrGone) {
		return err.Error(), nil
	} else if err != nil {
		return "", err
	}
	if cfg.Path != nil && !cfg.Path.Equal(st.Config) {
		return fmt.Sprintf("frames meet %s, not %s", st.Config, cfg.Path), nil
	}
	if st.Config.Delay > 0 {
		c, err := impair.DialRelay()
		if errors.Is(err, impair.ErrNoRelay) {
			return relayEnded, nil
		} else if err != nil {
			return "", err
		}
		c.Close()
	}
	l.Path = &st.Config
	return "", nil
}

// compareEnd compares the end whose namespace the thread is in. The first end
// seen decides on an MTU and a number of queues that l leaves open.
func compareEnd(l *Lab, e End, other *Namespace) (a *netlink.LinkAttrs, diff string, err error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, "", err
	}
	if lo.Attrs().Flags&net.FlagUp == 0 {
		return nil, fmt.Sprintf("lo in %s is down", e.Namespace), nil
	}
	link, err := netlink.LinkByName(e.Device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, fmt.Sprintf("no device %s in %s", e.Device, e.Namespace), nil
	} else if err != nil {
		return nil, "", err
	}
	a = link.Attrs()
	if l.MTU == 0 {
		l.MTU = a.MTU
	}
	if l.Queues == 0 {
		l.Queues = a.NumRxQueues
	}
	// The peer's index means something only in the peer's namespace.
	id, err := netlink.GetNetNsIdByFd(int(other.f.Fd()))
	if err != nil {
		return nil, "", fmt.Errorf("get id of namespace %q: %w", other.name, err)
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return nil, "", fmt.Errorf("list addresses: %w", err)
	}
	switch {
	case link.Type() != "veth" || a.Alias != alias:
		return nil, fmt.Sprintf("%s is not ours", e.Device), nil
	case a.NetNsID != id:
		return nil, fmt.Sprintf("the peer of %s is not in %s", e.Device, other.name), nil
	case a.Flags&net.FlagUp == 0:
		return nil, fmt.Sprintf("%s is down", e.Device), nil
	case a.MTU != l.MTU:
		return nil, fmt.Sprintf("%s has MTU %d, not %d", e.Device, a.MTU, l.MTU), nil
	case a.NumRxQueues != l.Queues || a.NumTxQueues != l.Queues:
		return nil, fmt.Sprintf("%s has %d receive and %d transmit queues, not %d", e.Device, a.NumRxQueues, a.NumTxQueues, l.Queues), nil
	case !bytes.Equal(a.HardwareAddr, e.MAC):
		return nil, fmt.Sprintf("%s has MAC %s, not %s", e.Device, a.HardwareAddr, e.MAC), nil
	case !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IPNet.String() == e.Addr.String() }):
		return nil, fmt.Sprintf("%s does not have the address %s", e.Device, e.Addr), nil
	}
	return a, "", nil
}

// build builds the lab in unnamed namespaces, and then gives them their names.
func build(cfg LabConfig) (l *Lab, err error) {
	var nic, host, path *Namespace
	var relay *impair.Relay
	defer func() {
		if err != nil {
			err = errors.Join(err, relay.Close())
			nic.Close()
			host.Close()
			path.Close()
		}
	}()
	if nic, err = create(cfg.NIC.Namespace); err != nil {
		return nil, err
	}
	if host, err = create(cfg.Host.Namespace); err != nil {
		return nil, err
	}
	type place struct {
		ns  *Namespace
		end End
	}
	places := []place{{nic, cfg.NIC}, {host, cfg.Host}}
	if cfg.Path == nil {
		if err := connect(cfg, nic, cfg.NIC, host, cfg.Host); err != nil {
			return nil, err
		}
	} else {
		if path, err = create(cfg.PathNamespace); err != nil {
			return nil, err
		}
		for _, p := range []struct {
			ns   *Namespace
			end  End
			port string
		}{{nic, cfg.NIC, impair.NICPort}, {host, cfg.Host, impair.HostPort}} {
			port := End{Namespace: cfg.PathNamespace, Device: p.port}
			if err := connect(cfg, p.ns, p.end, path, port); err != nil {
				return nil, err
			}
			places = append(places, place{path, port})
		}
	}
	for _, p := range places {
		if err := p.ns.Do(func() error { return configure(p.end) }); err != nil {
			return nil, fmt.Errorf("configure %s in namespace %q: %w", p.end.Device, p.end.Namespace, err)
		}
	}
	if cfg.Path != nil {
		for _, p := range places[:2] {
			if err := p.ns.Do(func() error { return cfg.Path.Prepare(p.end.Device) }); err != nil {
				return nil, fmt.Errorf("namespace %q: %w", p.end.Namespace, err)
			}
		}
		if err := path.Do(func() error { return impair.Install(*cfg.Path, cfg.MTU, alias) }); err != nil {
			return nil, fmt.Errorf("namespace %q: %w", cfg.PathNamespace, err)
		}
	}
	for _, p := range places {
		if err := p.ns.Do(func() error { return awaitCarrier(p.end.Device) }); err != nil {
			return nil, err
		}
	}
	if cfg.Path != nil && cfg.Path.Delay > 0 {
		// The relay's process ends by itself if a later step fails.
		if cfg.StartRelay != nil {
			err = cfg.StartRelay(path.f)
		} else {
			relay, err = startRelay(path)
		}
		if err != nil {
			return nil, err
		}
	}
	l, diff, err := compare(cfg, nic, host, path)
	if err == nil && diff != "" {
		err = fmt.Errorf("the kernel did not build the lab as asked: %s", diff)
	}
	if err != nil {
		return nil, err
	}
	var published []string
	for _, ns := range []*Namespace{path, nic, host} {
		if ns == nil {
			continue
		}
		if err := publish(ns); err != nil {
			for _, name := range published {
				err = errors.Join(err, unpublish(name))
			}
			return nil, err
		}
		published = append(published, ns.name)
	}
	l.relay = relay
	return l, nil
}

// connect makes a veth pair, with end a in namespace an and b in bn.
func connect(cfg LabConfig, an *Namespace, a End, bn *Namespace, b End) error {
	err := an.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{
				Name: a.Device, HardwareAddr: a.MAC, MTU: cfg.MTU,
				NumRxQueues: cfg.Queues, NumTxQueues: cfg.Queues, TxQLen: -1,
			},
			PeerName: b.Device, PeerHardwareAddr: b.MAC, PeerMTU: uint32(cfg.MTU), PeerTxQLen: -1,
			PeerNumRxQueues: uint32(cfg.Queues), PeerNumTxQueues: uint32(cfg.Queues),
			PeerNamespace: netlink.NsFd(bn.f.Fd()),
		})
	})
	if err != nil {
		return fmt.Errorf("create veth pair %s, %s with MTU %d and %d queues: %w", a.Device, b.Device, cfg.MTU, cfg.Queues, err)
	}
	return nil
}

// configure configures the end whose namespace the thread is in.
func configure(e End) error {
	// Disable IPv6, so that an idle lab is silent. Errors are ignored, because a lab
	// works with IPv6 too: the kernel may lack it, or /proc/sys may be read-only.
	for _, conf := range []string{"all", "default"} {
		_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+conf+"/disable_ipv6", []byte("1"), 0)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	link, err := netlink.LinkByName(e.Device)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetAlias(link, alias); err != nil {
		return fmt.Errorf("set alias: %w", err)
	}
	if e.Addr.IsValid() {
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: e.Addr.Addr().AsSlice(), Mask: net.CIDRMask(e.Addr.Bits(), 32)}}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("add address %s: %w", e.Addr, err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return nil
}

// awaitCarrier waits until the device in the thread's namespace takes frames. The
// kernel activates its queues from a work item, some time after the peer comes up,
// and drops what is sent before.
func awaitCarrier(device string) error {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		state := link.Attrs().OperState
		if state == netlink.OperUp {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s is %s after 5 s, want up", device, state)
		}
	}
}

// publish gives the namespace its name.
func publish(n *Namespace) error {
	// Make runDir a shared mount, as `ip netns add` does. Otherwise that command would
	// later copy our mount on top of itself, and the name could not be removed.
	err := unix.Mount("", runDir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if err == unix.EINVAL {
		if err := unix.Mount(runDir, runDir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s: %w", runDir, err)
		}
		err = unix.Mount("", runDir, "none", unix.MS_SHARED|unix.MS_REC, "")
	}
	if err != nil {
		return fmt.Errorf("share mounts of %s: %w", runDir, err)
	}
	f, err := os.OpenFile(n.Path(), os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("name namespace: %w", err)
	}
	f.Close()
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", n.f.Fd()), n.Path(), "none", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("name namespace: mount %s: %w", n.Path(), err), os.Remove(n.Path()))
	}
	return nil
}

// unpublish removes the name. The namespace ends unless something else holds it.
func unpublish(name string) error {
	path := filepath.Join(runDir, name)
	// EINVAL: nothing is mounted on the file.
	if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	// Removing the file also drops copies of the mount in other mount
	// namespaces.
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove name of namespace: %w", err)
	}
	return nil
}

// remove removes what there is of the lab. It looks at all names before it changes
// anything.
func remove(cfg LabConfig) error {
	var sites []site
	defer func() {
		for _, s := range sites {
			s.close()
		}
	}()
	names := []string{cfg.NIC.Namespace, cfg.Host.Namespace, cfg.PathNamespace}
	for _, name := range names {
		look := visit
		if name == cfg.PathNamespace {
			look = func(string) (site, error) { return visitPath(cfg) }
		}
		s, err := look(name)
		if err != nil {
			return err
		}
		sites = append(sites, s)
	}
	awaitRelay, err := meetRelay(sites[2].ns)
	if err != nil {
		return err
	}
	for i, s := range sites {
		if s.ns != nil {
			pids, err := s.ns.Pids()
			if err != nil {
				return err
			}
			if pids != nil {
				cfg.Warn(fmt.Sprintf("processes still inside %s lose its device: %s", names[i], strings.Trim(fmt.Sprint(pids), "[]")))
			}
			// The devices would go with the namespace, but later, and not
			// while a process is inside.
			if err := s.ns.Do(func() error { return removeDevices(s.links) }); err != nil {
				return fmt.Errorf("namespace %q: %w", names[i], err)
			}
		}
		if s.file {
			if err := unpublish(names[i]); err != nil {
				return err
			}
		}
	}
	return awaitRelay()
}

// meetRelay connects to the relay in a namespace and returns a function that waits
// for its end. The relay ends when its devices are removed.
func meetRelay(ns *Namespace) (await func() error, err error) {
	await = func() error { return nil }
	if ns == nil {
		return await, nil
	}
	err = ns.Do(func() error {
		c, err := impair.DialRelay()
		if errors.Is(err, impair.ErrNoRelay) {
			return nil
		} else if err != nil {
			return err
		}
		await = func() error {
			defer c.Close()
			const patience = 5 * time.Second
			_ = c.SetReadDeadline(time.Now().Add(patience))
			if _, err := c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("the relay of namespace %q, which is gone, still runs after %v: kill that process", ns.name, patience)
			}
			return nil // the connection ends with the relay
		}
		return nil
	})
	return await, err
}

func removeDevices(links []netlink.Link) error {
	for _, l := range links {
		if l.Attrs().Alias != alias {
			continue
		}
		// ENODEV, EINVAL: it went with its peer.
		if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("remove %s: %w", l.Attrs().Name, err)
		}
	}
	return nil
}

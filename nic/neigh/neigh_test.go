// SPDX-License-Identifier: Apache-2.0

package neigh

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/spin"
)

// A bench is a resolver on the NIC's end of a lab.
type bench struct {
	*testing.T
	*netns.Lab
	r   *Resolver
	log *said
}

// said is what was logged.
type said struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// setup makes a lab whose kernel gives up on neighbours that do not answer, and
// doubts those that do, sooner than others.
func setup(t *testing.T, fails time.Duration) *bench {
	b := &bench{T: t, Lab: netnstest.Temp(t, netns.LabConfig{}), log: new(said)}
	b.sysctl("ipv4", "retrans_time_ms", "50")
	b.sysctl("ipv6", "retrans_time_ms", "50")
	b.in(func() error {
		iface, err := net.InterfaceByName(b.NIC.Device)
		if err != nil {
			return err
		}
		b.r, err = open(iface, slog.New(slog.NewTextHandler(b.log, nil)), fails)
		return err
	})
	t.Cleanup(func() {
		if err := b.r.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// in runs f in the NIC's namespace.
func (b *bench) in(f func() error) {
	b.Helper()
	if err := b.NIC.NS.Do(f); err != nil {
		b.Fatal(err)
	}
}

func (b *bench) sysctl(family, name, value string) {
	b.Helper()
	b.in(func() error {
		return os.WriteFile(fmt.Sprintf("/proc/sys/net/%s/neigh/%s/%s", family, b.NIC.Device, name), []byte(value), 0o644)
	})
}

// ip runs ip(8) in the NIC's namespace.
func (b *bench) ip(args string) { b.Helper(); b.ipIn(b.NIC.NS, args) }

func (b *bench) ipIn(ns *netns.Namespace, args string) {
	b.Helper()
	if out, err := ns.Command(b.Context(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		b.Fatalf("ip %s: %v\n%s", args, err, out)
	}
}

// resolve asks until there is an answer, or an error that is final.
func (b *bench) resolve(dst string) (spin.Hop, error) {
	b.Helper()
	for range 5000 {
		hop, err := b.r.Resolve(netip.MustParseAddr(dst))
		if !errors.Is(err, spin.ErrUnresolved) {
			return hop, err
		}
		time.Sleep(time.Millisecond)
	}
	b.Fatalf("%s: unresolved for ever", dst)
	return spin.Hop{}, nil
}

// becomes waits until a destination is resolved as it should.
func (b *bench) becomes(what, dst string, ok func(spin.Hop, error) bool) {
	b.Helper()
	var hop spin.Hop
	var err error
	for range 5000 {
		if hop, err = b.r.Resolve(netip.MustParseAddr(dst)); ok(hop, err) {
			return
		}
		time.Sleep(time.Millisecond)
	}
	b.Errorf("never: %s: %+v, %v", what, hop, err)
}

func mac(p netns.Port) (m [6]byte) { return [6]byte(p.MAC) }

func TestFirstAskThenKnown(t *testing.T) {
	b := setup(t, failFor)
	dst := b.Host.Addr.Addr()
	if hop, err := b.r.Resolve(dst); !errors.Is(err, spin.ErrUnresolved) || hop != (spin.Hop{}) {
		t.Errorf("asked for the first time: %+v, %v", hop, err)
	}
	mine := spin.Hop{Source: b.NIC.Addr.Addr(), SourceMAC: mac(b.NIC), MTU: b.MTU}
	if hop, own := b.r.From(mine.Source); hop != mine || !own {
		t.Errorf("from the interface: %+v, %v", hop, own)
	}
	if _, own := b.r.From(dst); own {
		t.Error("the peer's address is the interface's own")
	}
	hop, err := b.resolve(dst.String())
	want := spin.Hop{Source: b.NIC.Addr.Addr(), SourceMAC: mac(b.NIC), MAC: mac(b.Host), MTU: b.MTU}
	if err != nil || hop != want {
		t.Errorf("%+v, %v, want %+v", hop, err, want)
	}
	if hop, err := b.r.Resolve(netip.AddrFrom16(dst.As16())); err != nil || hop != want {
		t.Errorf("as an IPv6 address: %+v, %v", hop, err)
	}
	if n := testing.AllocsPerRun(100, func() { b.r.Resolve(dst) }); n != 0 {
		t.Errorf("%v allocations each time", n)
	}
	far := netip.MustParseAddr("10.0.0.77")
	if n := testing.AllocsPerRun(100, func() { b.r.Resolve(far) }); n >= 1 {
		t.Errorf("%v allocations each time for one that is not known", n)
	}
}

func TestNeighbourThatWasKnownBefore(t *testing.T) {
	b := setup(t, failFor)
	b.ip("neigh add 10.0.0.9 lladdr 02:00:00:00:00:99 dev " + b.NIC.Device)
	if hop, err := b.resolve("10.0.0.9"); err != nil || hop.MAC != [6]byte{2, 0, 0, 0, 0, 0x99} {
		t.Errorf("%+v, %v", hop, err)
	}
	b.ip("neigh change 10.0.0.9 lladdr 02:00:00:00:00:98 dev " + b.NIC.Device)
	b.becomes("the MAC that the administrator changed", "10.0.0.9", func(h spin.Hop, err error) bool {
		return err == nil && h.MAC == [6]byte{2, 0, 0, 0, 0, 0x98}
	})
	b.ip("neigh del 10.0.0.9 dev " + b.NIC.Device)
	b.becomes("asked for again, and not there", "10.0.0.9", func(_ spin.Hop, err error) bool { return errors.Is(err, ErrNeighbour) })
}

func TestNeighbourChangesItsMAC(t *testing.T) {
	b := setup(t, failFor)
	dst := b.Host.Addr.Addr().String()
	if _, err := b.resolve(dst); err != nil {
		t.Fatal(err)
	}
	b.ipIn(b.Host.NS, "link set "+b.Host.Device+" address 02:00:00:00:00:77")
	// The kernel hears of it when the neighbour sends something, or does not
	// answer under its old address.
	b.ipIn(b.Host.NS, "neigh flush all")
	b.Host.NS.Command(t.Context(), "ping", "-c", "1", "-W", "1", b.NIC.Addr.Addr().String()).Run()
	b.becomes("the new MAC", dst, func(h spin.Hop, err error) bool { return err == nil && h.MAC == [6]byte{2, 0, 0, 0, 0, 0x77} })
}

// The kernel does not see what handlers send: nothing confirms a neighbour but what
// the resolver has it ask.
func TestStaleNeighbourIsAskedAgain(t *testing.T) {
	b := setup(t, 300*time.Millisecond)
	b.sysctl("ipv4", "base_reachable_time_ms", "100")
	b.sysctl("ipv4", "delay_first_probe_time", "0")
	dst := b.Host.Addr.Addr()
	if _, err := b.resolve(dst.String()); err != nil {
		t.Fatal(err)
	}
	b.ip(fmt.Sprintf("neigh change %v lladdr %v nud stale dev %s", dst, b.Host.MAC, b.NIC.Device))
	b.ipIn(b.Host.NS, "link set "+b.Host.Device+" address 02:00:00:00:00:77")
	b.becomes("the new MAC", dst.String(), func(h spin.Hop, err error) bool { return err == nil && h.MAC == [6]byte{2, 0, 0, 0, 0, 0x77} })
}

func TestNoSuchNeighbour(t *testing.T) {
	b := setup(t, 300*time.Millisecond)
	_, err := b.resolve("10.0.0.50")
	if !errors.Is(err, ErrNeighbour) || !strings.Contains(err.Error(), "10.0.0.50") || !strings.Contains(err.Error(), b.NIC.Device) {
		t.Fatalf("nobody is there: %v", err)
	}
	// It comes up, and is found when it is asked for again.
	b.ipIn(b.Host.NS, "addr add 10.0.0.50/24 dev "+b.Host.Device)
	b.becomes("found", "10.0.0.50", func(h spin.Hop, err error) bool { return err == nil && h.MAC == mac(b.Host) })
}

func TestRoutes(t *testing.T) {
	b := setup(t, failFor)
	b.ip("link add other type veth peer name another")
	b.ip("addr add 10.9.0.1/24 dev other")
	b.ip("link set other up")
	b.ip("link set another up")
	for _, tc := range []struct {
		dst string
		err error
	}{
		{"192.0.2.1", ErrRoute},
		{"10.9.0.7", ErrInterface},
		{"10.0.0.1", ErrUnicast},
		{"10.0.0.255", ErrUnicast},
		{"255.255.255.255", ErrUnicast},
		{"127.0.0.1", ErrUnicast},
		{"fe80::1%eth0", ErrUnicast},
	} {
		if _, err := b.resolve(tc.dst); !errors.Is(err, tc.err) {
			t.Errorf("%s: %v, want %v", tc.dst, err, tc.err)
		}
	}
	if _, err := b.r.Resolve(netip.Addr{}); !errors.Is(err, ErrUnicast) {
		t.Errorf("no address: %v", err)
	}

	b.ip("route add 192.0.2.0/24 via 10.0.0.2")
	b.becomes("by the gateway", "192.0.2.1", func(h spin.Hop, err error) bool { return err == nil && h.MAC == mac(b.Host) })
	b.ip("neigh add 10.0.0.3 lladdr 02:00:00:00:00:03 dev " + b.NIC.Device)
	b.ip("route replace 192.0.2.0/24 via 10.0.0.3 src 10.0.0.1")
	b.becomes("by another gateway", "192.0.2.1", func(h spin.Hop, err error) bool { return err == nil && h.MAC[5] == 3 })
	b.ip("route replace 192.0.2.0/24 dev other")
	b.becomes("elsewhere", "192.0.2.1", func(h spin.Hop, err error) bool { return errors.Is(err, ErrInterface) })
	b.ip("route replace 192.0.2.0/24 via 10.0.0.3")
	b.becomes("back", "192.0.2.1", func(h spin.Hop, err error) bool { return err == nil && h.MAC[5] == 3 })
	b.ip("link set " + b.NIC.Device + " mtu 1400")
	b.becomes("the new MTU", "192.0.2.1", func(h spin.Hop, err error) bool { return err == nil && h.MTU == 1400 })
	b.ip("route del 192.0.2.0/24")
	b.becomes("no route", "192.0.2.1", func(h spin.Hop, err error) bool { return errors.Is(err, ErrRoute) })
}

func TestIPv6(t *testing.T) {
	b := setup(t, failFor)
	for _, p := range []netns.Port{b.NIC, b.Host} {
		for _, name := range []string{"accept_dad", "disable_ipv6"} { // addresses are good at once
			if err := p.NS.Do(func() error {
				return os.WriteFile("/proc/sys/net/ipv6/conf/"+p.Device+"/"+name, []byte("0"), 0o644)
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	b.ip("addr add fd00::1/64 nodad dev " + b.NIC.Device)
	b.ipIn(b.Host.NS, "addr add fd00::2/64 nodad dev "+b.Host.Device)
	b.ip("route add 2001:db8::/32 via fd00::2")
	for _, dst := range []string{"fd00::2", "2001:db8::7"} {
		if hop, err := b.resolve(dst); err != nil || hop.MAC != mac(b.Host) || hop.Source != netip.MustParseAddr("fd00::1") {
			t.Errorf("%s: %+v, %v", dst, hop, err)
		}
	}
	if _, err := b.resolve("fd00::99"); !errors.Is(err, ErrNeighbour) {
		t.Errorf("nobody is there: %v", err)
	}
	if _, err := b.resolve("ff02::1"); !errors.Is(err, ErrUnicast) {
		t.Errorf("multicast: %v", err)
	}
	b.ip("route add 198.51.100.0/24 via inet6 fd00::2")
	if hop, err := b.resolve("198.51.100.1"); err != nil || hop.MAC != mac(b.Host) {
		t.Errorf("IPv4 by an IPv6 gateway: %+v, %v", hop, err)
	}
}

// A handler that asks for a million addresses fills nothing, and does not get in the
// way of who is known.
func TestScanIsBounded(t *testing.T) {
	b := setup(t, failFor)
	b.sysctl("ipv4", "retrans_time_ms", "60000") // nobody fails while the test looks
	b.ip("addr add 10.64.0.1/10 dev " + b.NIC.Device)
	dst := b.Host.Addr.Addr()
	if _, err := b.resolve(dst.String()); err != nil {
		t.Fatal(err)
	}
	neighbours := func() (n int) {
		b.in(func() error {
			list, err := netlink.NeighList(b.NIC.Index, netlink.FAMILY_V4)
			n = len(list)
			return err
		})
		return n
	}
	was := neighbours()
	for i := range uint32(1_000_000) {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 10<<24|64<<16+2+i)
		if hop, err := b.r.Resolve(netip.AddrFrom4(a)); !errors.Is(err, spin.ErrUnresolved) {
			t.Fatalf("%v: %+v, %v", a, hop, err)
		}
		if i%100_000 == 0 {
			if hop, err := b.r.Resolve(dst); err != nil || hop.MAC != mac(b.Host) {
				t.Fatalf("meanwhile: %+v, %v", hop, err)
			}
		}
	}
	for range 3 * maxAsks { // until the loop has done what it had to
		if len(b.r.asks) == 0 {
			break
		}
		time.Sleep(2 * round)
	}
	if n := neighbours() - was; n > maxPending || n < maxPending/4 {
		t.Errorf("the kernel looks for %d neighbours, want %d at most", n, maxPending)
	}
	if n := len(*b.r.cache.Load()); n > 1+maxPending {
		t.Errorf("%d destinations in the cache", n)
	}
}

func TestCacheIsBounded(t *testing.T) {
	b := setup(t, failFor)
	b.ip("route add 10.64.0.0/10 via 10.0.0.2")
	if _, err := b.resolve("10.0.0.2"); err != nil {
		t.Fatal(err)
	}
	// Not by way of the loop, which would take its time.
	if err := b.r.Close(); err != nil {
		t.Fatal(err)
	}
	b.in(func() (err error) {
		b.r.nl, err = netlink.NewHandle()
		return err
	})
	b.r.done, b.r.sub = make(chan struct{}), nil
	var last netip.Addr
	for i := range uint32(maxCache + 100) {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 10<<24|64<<16+2+i)
		last = netip.AddrFrom4(a)
		b.r.lookUp(last)
	}
	if n := len(b.r.next); n != maxCache {
		t.Errorf("%d destinations in the cache, want %d", n, maxCache)
	}
	if e := b.r.known(last); e == nil || e.way.Load().hop.MAC != mac(b.Host) {
		t.Errorf("the latest is not among them: %+v", e)
	}
}

// What the kernel could not tell, because its socket was full, is read from its tables.
func TestLostNewsAreMadeUpFor(t *testing.T) {
	b := setup(t, failFor)
	dst := b.Host.Addr.Addr().String()
	if _, err := b.resolve(dst); err != nil {
		t.Fatal(err)
	}
	if err := b.r.Close(); err != nil {
		t.Fatal(err)
	}
	b.in(func() (err error) {
		b.r.nl, err = netlink.NewHandle()
		return err
	})
	b.r.done, b.r.sub = make(chan struct{}), nil
	b.ip("neigh replace " + dst + " lladdr 02:00:00:00:00:66 dev " + b.NIC.Device)
	b.r.hear(nil)
	if hop, err := b.r.Resolve(netip.MustParseAddr(dst)); err != nil || hop.MAC[5] != 0x66 {
		t.Errorf("%+v, %v", hop, err)
	}
	if len(b.r.recheck) != 1 {
		t.Errorf("%d routes are looked at again, want 1", len(b.r.recheck))
	}
	for _, junk := range [][]byte{{1}, make([]byte, 15), append(make([]byte, 20), 0xff), {20, 0, 0, 0, 28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4}} {
		b.r.hear(junk)
	}
}

// Another socket, in the place of the one that the kernel tells its news on, has an error
// that is none of netlink's. It is told, and what the resolver knows is read again.
func TestNewsThatCannotBeRead(t *testing.T) {
	b := setup(t, failFor)
	if err := b.r.Close(); err != nil {
		t.Fatal(err)
	}
	b.r.done = make(chan struct{})
	b.in(func() (err error) {
		if b.r.nl, err = netlink.NewHandle(); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		b.r.sub = os.NewFile(uintptr(fd), "udp")
		nobody := &unix.SockaddrInet4{Addr: b.Host.Addr.Addr().As4(), Port: 9} // listens there
		if err := unix.Connect(fd, nobody); err != nil {
			return err
		}
		_, err = unix.Write(fd, []byte("x"))
		return err
	})
	b.ip("address add 10.0.0.9/24 dev " + b.NIC.Device)
	b.r.wg.Go(b.r.listen)
	b.r.wg.Go(b.r.run)
	ours := func() bool { return slices.Contains(b.r.Local().Addrs, netip.MustParseAddr("10.0.0.9")) }
	for end := time.Now().Add(10 * time.Second); !ours() && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	if !ours() || !strings.Contains(b.log.String(), "connection refused") {
		t.Errorf("addresses %v, log %q", b.r.Local().Addrs, b.log)
	}
}

func TestGone(t *testing.T) {
	b := setup(t, failFor)
	dev := b.NIC.Device
	b.ip("link add br0 type bridge")
	b.ip("link set " + dev + " master br0")
	b.ip("link set " + dev + " nomaster")
	b.ip("link del br0")
	dst := b.Host.Addr.Addr().String()
	b.ip("neigh replace " + dst + " lladdr 02:00:00:00:00:66 dev " + dev)
	b.becomes("the news before are heard", dst, func(hop spin.Hop, err error) bool { return err == nil && hop.MAC[5] == 0x66 })
	select {
	case <-b.r.Gone():
		t.Error("who leaves a bridge is not gone")
	default:
	}
	b.ip("link del " + dev)
	select {
	case <-b.r.Gone():
	case <-time.After(10 * time.Second):
		t.Error("the interface is gone, and nobody says so")
	}
	// Its number may be somebody else's now.
	b.ip(fmt.Sprintf("link add other index %d type veth peer name another", b.r.index))
	b.ip("link set other up")
	for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end) && b.r.State() == Gone; time.Sleep(time.Millisecond) {
	}
	if s := b.r.State(); s != Gone {
		t.Errorf("the interface is gone, and then %s", s)
	}
	b.ip("link del other")
}

func BenchmarkResolve(b *testing.B) {
	r := &Resolver{}
	cache := map[netip.Addr]*entry{}
	for i := range 1000 {
		e := new(entry)
		e.way.Store(&way{hop: spin.Hop{MTU: 1500}})
		cache[netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})] = e
	}
	r.cache.Store(&cache)
	dst := netip.AddrFrom4([4]byte{10, 0, 1, 77})
	for b.Loop() {
		if _, err := r.Resolve(dst); err != nil {
			b.Fatal(err)
		}
	}
}

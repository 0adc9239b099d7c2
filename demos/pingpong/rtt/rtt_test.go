// SPDX-License-Identifier: Apache-2.0

package rtt

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// orphanEnv names the namespace in which a test process starts an echo server
// and then waits to be killed.
const orphanEnv = "XSPIN_TEST_ORPHAN"

func TestMain(m *testing.M) {
	if ok, err := Main(os.Args[1:]); ok {
		exit(err)
	}
	if os.Getenv(stubbornEnv) != "" {
		fmt.Fprintln(os.Stderr, "no")
		time.Sleep(time.Minute)
		os.Exit(0)
	}
	if name := os.Getenv(orphanEnv); name != "" {
		exit(orphan(name))
	}
	os.Exit(m.Run())
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func orphan(name string) error {
	ns, err := netns.OpenNamespace(name)
	if err != nil {
		return err
	}
	e, err := StartEcho(ns, EchoOptions{Addr: loopback(0), CPU: -1})
	if err != nil {
		return err
	}
	fmt.Println(e.Pid())
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func loopback(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
}

// serve runs a UDP service on loopback: reply gets each datagram and its number
// and says what goes back, nil for nothing.
func serve(t *testing.T, reply func(i int, b []byte) [][]byte) netip.AddrPort {
	t.Helper()
	s, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(loopback(0)))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { s.Close(); <-done })
	go func() {
		defer close(done)
		b := make([]byte, 1<<16)
		for i := 0; ; i++ {
			n, from, err := s.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			for _, r := range reply(i, b[:n]) {
				s.WriteToUDPAddrPort(r, from)
			}
		}
	}()
	return s.LocalAddr().(*net.UDPAddr).AddrPort()
}

// run measures in this process.
func run(t *testing.T, o Options) Result {
	t.Helper()
	c, err := Dial(o)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, err := c.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func check(t *testing.T, r Result, samples, lost, bad int) {
	t.Helper()
	if len(r.Samples) != samples || r.Lost != lost || r.Bad != bad || r.Sent != samples+lost+bad {
		t.Errorf("sent %d, answered %d, lost %d, bad %d; want %d answered, %d lost, %d bad", r.Sent, len(r.Samples), r.Lost, r.Bad, samples, lost, bad)
	}
	for i, ns := range r.Samples {
		if ns <= 0 {
			t.Fatalf("round trip %d took %d ns", i, ns)
		}
	}
}

// Datagrams to loopback, so anybody can run these.
func TestClientCounts(t *testing.T) {
	const count = 20
	var held []byte
	for _, tc := range []struct {
		name                     string
		reply                    func(i int, b []byte) [][]byte
		answered, lost, bad, lat int
	}{
		{"answers", func(_ int, b []byte) [][]byte { return [][]byte{b} }, count, 0, 0, 0},
		{"silence as loss", func(int, []byte) [][]byte { return nil }, 0, count, 0, 0},
		{"one dropped ping as one loss", func(i int, b []byte) [][]byte {
			if i == 7 {
				return nil
			}
			return [][]byte{b}
		}, count - 1, 1, 0, 0},
		{"a flipped byte as bad", func(i int, b []byte) [][]byte {
			if i == 7 {
				b[len(b)-1] ^= 0x10
			}
			return [][]byte{b}
		}, count - 1, 0, 1, 0},
		{"a reply cut short as bad", func(_ int, b []byte) [][]byte { return [][]byte{b[:len(b)-1]} }, 0, 0, count, 0},
		{"the second of two equal replies as late", func(_ int, b []byte) [][]byte { return [][]byte{b, b} }, count, 0, 0, count - 1},
		{"replies one ping behind as late, and those pings as lost", func(_ int, b []byte) [][]byte {
			r := held
			held = append([]byte(nil), b...)
			if r == nil {
				return nil
			}
			return [][]byte{r}
		}, 0, count, 0, count - 1},
	} {
		for _, wait := range []Wait{Block, Spin} {
			t.Run(fmt.Sprintf("%s (%s)", tc.name, wait), func(t *testing.T) {
				held = nil
				addr := serve(t, tc.reply)
				// Long where a reply has to make it, on however busy a machine.
				timeout := 2 * time.Second
				if tc.lost == count {
					timeout = 20 * time.Millisecond
				}
				r := run(t, Options{Proto: UDP, Remote: addr, Size: 64, Count: count, Timeout: timeout, Wait: wait, CPU: -1})
				check(t, r, tc.answered, tc.lost, tc.bad)
				if r.Late != tc.lat {
					t.Errorf("%d late, want %d", r.Late, tc.lat)
				}
			})
		}
	}
}

func TestClientCountsARefusedPingAsLostAtOnce(t *testing.T) {
	s, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(loopback(0)))
	if err != nil {
		t.Fatal(err)
	}
	addr := s.LocalAddr().(*net.UDPAddr).AddrPort()
	s.Close()
	for _, wait := range []Wait{Block, Spin} {
		check(t, run(t, Options{Proto: UDP, Remote: addr, Size: 64, Count: 50, Timeout: time.Hour, Wait: wait, CPU: -1}), 0, 50, 0)
	}
}

func TestClientCountsAReplyAfterTheTimeoutAsLost(t *testing.T) {
	addr := serve(t, func(_ int, b []byte) [][]byte { return [][]byte{b} })
	for _, wait := range []Wait{Block, Spin} {
		// Whether or not the reply is already there at the first look.
		check(t, run(t, Options{Proto: UDP, Remote: addr, Size: 64, Count: 2000, Timeout: 1, Wait: wait, CPU: -1}), 0, 2000, 0)
	}
}

func TestClientReportsNothingOfItsWarmup(t *testing.T) {
	addr := serve(t, func(i int, b []byte) [][]byte {
		if i < 5 {
			b[8] ^= 1
		}
		return [][]byte{b}
	})
	check(t, run(t, Options{Proto: UDP, Remote: addr, Size: 64, Warmup: 5, Count: 10, CPU: -1}), 10, 0, 0)
}

func TestClientStopsWithItsContext(t *testing.T) {
	for _, wait := range []Wait{Block, Spin} {
		ctx, cancel := context.WithCancel(t.Context())
		addr := serve(t, func(i int, b []byte) [][]byte {
			if i == 3 {
				cancel() // and no reply: only ctx can end the wait
				return nil
			}
			return [][]byte{b}
		})
		c, err := Dial(Options{Proto: UDP, Remote: addr, Size: 64, Count: 10, Timeout: time.Hour, Wait: wait, CPU: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		r, err := c.Run(ctx)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: error %v, want context.Canceled", wait, err)
		}
		check(t, r, 3, 0, 0)
	}
}

func TestClientAllocatesNothingPerPing(t *testing.T) {
	c := client(UDP, 1416)
	if n := testing.AllocsPerRun(1000, func() {
		c.compose(1)
		if c.judge(c.tx, 1) != answered {
			t.Error("a ping is not its own reply")
		}
	}); n != 0 {
		t.Errorf("%g allocations per packet", n)
	}

	// Nobody reads this socket, so nobody but the client can allocate.
	silent, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(loopback(0)))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for _, wait := range []Wait{Block, Spin} {
		c, err := Dial(Options{Proto: UDP, Remote: silent.LocalAddr().(*net.UDPAddr).AddrPort(), Size: 64, Count: 1, Timeout: time.Microsecond, Wait: wait, CPU: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		var seq uint32
		if n := testing.AllocsPerRun(100, func() {
			seq++
			if _, v, err := c.ping(seq); v != lost || err != nil {
				t.Errorf("verdict %d, error %v", v, err)
			}
			c.sleepUntil(c.now() + time.Microsecond)
		}); n != 0 {
			t.Errorf("%s: %g allocations per ping", wait, n)
		}
	}
}

func TestPinning(t *testing.T) {
	addr := serve(t, func(_ int, b []byte) [][]byte { return [][]byte{b} })
	t.Run("a CPU that is not there is an error that names it", func(t *testing.T) {
		c, err := Dial(Options{Proto: UDP, Remote: addr, Size: 64, Count: 1, CPU: 1000})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "CPU 1000") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("the first CPU allowed works", func(t *testing.T) {
		check(t, run(t, Options{Proto: UDP, Remote: addr, Size: 64, Count: 10, CPU: allowedCPU(t)}), 10, 0, 0)
	})
}

func allowedCPU(t *testing.T) int {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(status), "Cpus_allowed_list:")
	cpu, err := strconv.Atoi(strings.TrimSpace(strings.FieldsFunc(list, func(r rune) bool { return r == '-' || r == ',' || r == '\n' })[0]))
	if err != nil {
		t.Fatal(err)
	}
	return cpu
}

func TestRoundTripsThroughTheLab(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{})
	nic := l.NIC.Addr.Addr()
	for _, wait := range []Wait{Block, Spin} {
		e, err := StartEcho(l.NIC.NS, EchoOptions{Addr: netip.AddrPortFrom(nic, 15000), Wait: wait, CPU: -1})
		if err != nil {
			t.Fatal(err)
		}
		sizes := []int{MinSize, 16, 1001, 1416, 1472}
		if wait == Spin { // which has nothing to do with what is in a ping
			sizes = []int{16, 1472}
		}
		for _, p := range []Proto{ICMP, UDP} {
			for _, size := range sizes {
				r, err := Ping(t.Context(), l.Host.NS, Options{Proto: p, Remote: e.Addr, Size: size, Warmup: 10, Count: 100, Timeout: 10 * time.Second, Wait: wait, CPU: -1})
				if err != nil {
					t.Fatal(err)
				}
				check(t, r, 100, 0, 0)
			}
			_, err := Ping(t.Context(), l.Host.NS, Options{Proto: p, Remote: e.Addr, Size: 1473, Count: 1, CPU: -1})
			if err == nil || !strings.Contains(err.Error(), "message too long") {
				t.Errorf("%s ping over the MTU: error %v, want EMSGSIZE", p, err)
			}
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}

	t.Run("counts pings to nobody as lost", func(t *testing.T) {
		for _, tc := range []struct {
			proto Proto
			addr  netip.AddrPort
		}{
			{UDP, netip.AddrPortFrom(nic, 15000)}, // the server is gone
			{ICMP, netip.AddrPortFrom(nic.Next().Next(), 0)},
		} {
			r, err := Ping(t.Context(), l.Host.NS, Options{Proto: tc.proto, Remote: tc.addr, Size: 64, Count: 10, Timeout: 5 * time.Millisecond, CPU: -1})
			if err != nil {
				t.Fatal(err)
			}
			check(t, r, 0, 10, 0)
		}
	})
	t.Run("a client in this process stays in the namespace it dialled in", func(t *testing.T) {
		var c *Client
		if err := l.Host.NS.Do(func() (err error) {
			c, err = Dial(Options{Proto: ICMP, Remote: netip.AddrPortFrom(nic, 0), Size: 100, Count: 50, Timeout: 10 * time.Second, CPU: -1})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		r, err := c.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		check(t, r, 50, 0, 0)
	})
	t.Run("two clients at once do not take each other's replies", func(t *testing.T) {
		type outcome struct {
			r   Result
			err error
		}
		done := make(chan outcome)
		for range 2 {
			go func() {
				r, err := Ping(t.Context(), l.Host.NS, Options{Proto: ICMP, Remote: netip.AddrPortFrom(nic, 0), Size: 100, Count: 2000, Timeout: 10 * time.Second, CPU: -1})
				done <- outcome{r, err}
			}()
		}
		for range 2 {
			o := <-done
			if o.err != nil {
				t.Error(o.err)
			}
			check(t, o.r, 2000, 0, 0)
		}
	})
	t.Run("replies to others take no room from a client that is not running", func(t *testing.T) {
		var c *Client
		if err := l.Host.NS.Do(func() (err error) {
			c, err = Dial(Options{Proto: ICMP, Remote: netip.AddrPortFrom(nic, 0), Size: 100, Count: 10, Timeout: 5 * time.Second, CPU: -1})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		// A raw socket holds fewer than 300 of these.
		r, err := Ping(t.Context(), l.Host.NS, Options{Proto: ICMP, Remote: netip.AddrPortFrom(nic, 0), Size: 100, Count: 2000, Timeout: 10 * time.Second, CPU: -1})
		if err != nil {
			t.Fatal(err)
		}
		check(t, r, 2000, 0, 0)
		if r, err = c.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		check(t, r, 10, 0, 0)
	})
	t.Run("a ping that is cancelled returns what it has", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		r, err := Ping(ctx, l.Host.NS, Options{Proto: ICMP, Remote: netip.AddrPortFrom(nic, 0), Size: 100, Count: 1000, Interval: time.Hour, CPU: -1})
		if !errors.Is(err, context.DeadlineExceeded) || r.Sent > 1 {
			t.Errorf("sent %d, error %v, want context.DeadlineExceeded", r.Sent, err)
		}
	})
	t.Run("the state of the link is read", func(t *testing.T) {
		if err := l.NIC.NS.Do(func() error {
			s, err := ReadLink(l.NIC.Device)
			if err != nil {
				return err
			}
			if s.XDP != "none" || s.XDPProgram != 0 || s.MTU != 1500 || !s.TSO || !s.GSO || !s.TxChecksum {
				t.Errorf("fresh veth: %+v", s)
			}
			if _, err := ReadLink("xs-none"); err == nil || !strings.Contains(err.Error(), "xs-none") {
				t.Errorf("absent interface: error %v", err)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
}

func TestEchoProcess(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{})
	e, err := StartEcho(l.NIC.NS, EchoOptions{Addr: loopback(0), CPU: -1})
	if err != nil {
		t.Fatal(err)
	}
	if e.Addr.Port() == 0 {
		t.Errorf("listens on %v", e.Addr)
	}

	t.Run("a second server on the same port says so", func(t *testing.T) {
		_, err := StartEcho(l.NIC.NS, EchoOptions{Addr: e.Addr, CPU: -1})
		if !errors.Is(err, ErrChild) || !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("a CPU that is not there is an error that names it", func(t *testing.T) {
		_, err := StartEcho(l.NIC.NS, EchoOptions{Addr: loopback(0), CPU: 1000})
		if !errors.Is(err, ErrChild) || !strings.Contains(err.Error(), "CPU 1000") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("an IPv6 address is refused", func(t *testing.T) {
		_, err := StartEcho(l.NIC.NS, EchoOptions{Addr: netip.MustParseAddrPort("[::1]:7"), CPU: -1})
		if !errors.Is(err, ErrOptions) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("Close ends the process, twice is once", func(t *testing.T) {
		for range 2 {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		}
		if alive(e.Pid()) {
			t.Errorf("process %d is still there", e.Pid())
		}
	})
	t.Run("a server that died is an error of Close", func(t *testing.T) {
		e, err := StartEcho(l.NIC.NS, EchoOptions{Addr: loopback(0), CPU: -1})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.child.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		// Its stdout ends when it has died.
		io.Copy(io.Discard, e.child.Stdout)
		if err := e.Close(); !errors.Is(err, ErrChild) {
			t.Errorf("error %v, want ErrChild", err)
		}
	})
	t.Run("SIGKILL of the parent ends the server", func(t *testing.T) {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), orphanEnv+"="+l.NIC.NS.Name())
		cmd.Stderr = os.Stderr
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stdin.Close()
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(stdout).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		if !alive(pid) {
			t.Fatalf("process %d is not there", pid)
		}
		cmd.Process.Kill()
		cmd.Wait()
		for range 500 {
			if !alive(pid) {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("process %d outlives its parent", pid)
	})
}

// alive tells whether a process is there and no zombie.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z")
}

const stubbornEnv = "XSPIN_TEST_STUBBORN" // of a process that does not end

func TestWhoDoesNotEndIsNamedWithItsGrace(t *testing.T) {
	p, err := Start("stubborn", nil, ProcessOptions{Env: []string{stubbornEnv + "=1"}})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond) // until it has said so
	err = p.Stop(nil)
	if want := "stubborn had not ended 2s after it was asked to, and was killed"; !errors.Is(err, ErrChild) || !strings.Contains(fmt.Sprint(err), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

func TestMainLeavesOtherCommandsAlone(t *testing.T) {
	for _, args := range [][]string{nil, {"demo"}, {"demo", PingCommand}} {
		if ok, err := Main(args); ok || err != nil {
			t.Errorf("Main(%q) = %t, %v", args, ok, err)
		}
	}
	for _, args := range [][]string{{PingCommand}, {EchoCommand, "{}", "x"}} {
		if ok, err := Main(args); !ok || err == nil {
			t.Errorf("Main(%q) = %t, %v", args, ok, err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"cmp"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// What handlers in eBPF need of the kernel, a mechanism a test, the least demanding
// first: a program calls another that comes and goes, while packets flow. If a kernel
// cannot do one of these, nothing else is worth a try, so this file is the first by name.
func TestMechanismsAreTestedFirst(t *testing.T) {
	all, err := filepath.Glob("*_test.go") // sorted, as the tests are
	if err != nil {
		t.Fatal(err)
	}
	if len(all) > 0 && all[0] != "first_test.go" { // none where only the compiled tests are
		t.Errorf("the tests of %s are before these", all[0])
	}
}

// riskyFile is where risky writes, beside the tests or in the folder that XSPIN_RISKY names:
// not among temporary files, which may be in memory.
const riskyFile = "risky-test"

// risky writes the name of the test to a file, and has it on the disk before the test goes
// on. So if the machine stops, it says where; of a test that ends, nothing is left.
func risky(t *testing.T) {
	t.Helper()
	dir := cmp.Or(os.Getenv("XSPIN_RISKY"), ".")
	name := filepath.Join(dir, riskyFile)
	onDisk := func(name string) {
		t.Helper()
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := f.Sync(); err != nil && !errors.Is(err, unix.EINVAL) { // no disk
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(name, []byte(t.Name()+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	onDisk(name)
	onDisk(dir) // it has the name of the file
	t.Cleanup(func() { os.Remove(name) })
}

func TestRiskyTestsLeaveTheirName(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XSPIN_RISKY", dir)
	t.Run("risk", func(t *testing.T) {
		risky(t)
		if b, err := os.ReadFile(filepath.Join(dir, riskyFile)); err != nil || string(b) != t.Name()+"\n" {
			t.Errorf("the file says %q, %v", b, err)
		}
	})
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

const handled = 3 // the number of the context in these tests

// inKernel is a table that brings datagrams to port 7 to handlers in eBPF.
func inKernel(t *testing.T, in *Ingress) {
	t.Helper()
	table := &matcher.Table{Generation: 1, Entries: map[int]matcher.Entry{
		9: {Ruleset: matcher.UDPPort(7), Context: handled, Format: matcher.FormatByName("packet")},
	}}
	if err := in.Publish(table, map[uint16]Delivery{handled: {Kernel: true}}); err != nil {
		t.Fatal(err)
	}
}

// onLab attaches an ingress program to the NIC's end of a lab.
func onLab(t *testing.T) (lab *netns.Lab, in *Ingress) {
	t.Helper()
	lab = netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) {
		var err error
		if in, err = Attach(config(nic, Native)); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() {
		if err := in.Close(); err != nil {
			t.Error(err)
		}
	})
	return lab, in
}

// withClient is onLab with handlers for UDP port 7, and a client at the other end.
func withClient(t *testing.T) (lab *netns.Lab, in *Ingress, client *net.UDPConn) {
	t.Helper()
	lab, in = onLab(t)
	inKernel(t, in)
	if err := lab.Host.NS.Do(func() (err error) {
		client, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(lab.NIC.Addr.Addr(), 7)))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return lab, in, client
}

func (in *Ingress) mustStats(t *testing.T) Stats {
	t.Helper()
	s, err := in.Stats()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// send sends datagrams of two bytes; a refusal of one before, told by ICMP, is no matter.
func sendTo(t *testing.T, client *net.UDPConn, n int) {
	t.Helper()
	for sent := 0; sent < n; {
		if _, err := client.Write([]byte("hi")); err == nil {
			sent++
		}
	}
}

func soon(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(testenv.Slowness() * 20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// The ingress program has subprograms, and both take frames in fragments.
func TestIngressCallsHandlers(t *testing.T) {
	risky(t)
	_, in, client := withClient(t)
	sendTo(t, client, 10)
	soon(t, "10 frames find no program", func() bool { return in.mustStats(t).Failed == 10 })

	h := builtin(t, "noop", nil)
	if err := in.SetHandlers(handled, h); err != nil {
		t.Fatal(err)
	}
	sendTo(t, client, 100)
	soon(t, "100 frames are handled", func() bool { return h.Stats().Handled == 100 })
	if s := addUp(t, in); s.Kernel[handled] != 100 || s.Failed != 10 || s.Matched[9] != 110 {
		t.Errorf("%d to the handlers, %d failed, %d matched; want 100, 10 and 110", s.Kernel[handled], s.Failed, s.Matched[9])
	}

	for range 2 {
		if err := in.ClearHandlers(handled); err != nil {
			t.Fatal(err)
		}
	}
	sendTo(t, client, 5)
	soon(t, "5 frames find no program", func() bool { return in.mustStats(t).Failed == 15 })
	if n := h.Stats().Handled; n != 100 {
		t.Errorf("%d handled, want the 100 of before", n)
	}
}

// Each frame meets one of the programs, or none, and is counted there.
func TestHandlersAreReplacedUnderLoad(t *testing.T) {
	risky(t)
	_, in, client := withClient(t)
	a, b := builtin(t, "noop", nil), builtin(t, "count", nil)
	var stop atomic.Bool
	var sent uint64
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			if _, err := client.Write([]byte("hi")); err == nil {
				sent++
			}
		}
	})
	changes := 0
	for end := time.Now().Add(time.Second); time.Now().Before(end); changes++ {
		var err error
		switch changes % 3 {
		case 0:
			err = in.SetHandlers(handled, a)
		case 1:
			err = in.SetHandlers(handled, b)
		case 2:
			err = in.ClearHandlers(handled)
		}
		if err != nil {
			t.Error(err)
		}
		time.Sleep(time.Millisecond)
	}
	stop.Store(true)
	wg.Wait()
	soon(t, "all frames are counted", func() bool {
		s := in.mustStats(t)
		return s.Matched[9] == sent && s.Kernel[handled]+s.Failed == sent
	})
	na, nb := a.Stats().Handled, b.Stats().Handled
	if s := addUp(t, in); na+nb != s.Kernel[handled] || na == 0 || nb == 0 || s.Failed == 0 {
		t.Errorf("%d and %d handled, %d without a program, of %d; the ingress program says %d", na, nb, s.Failed, sent, s.Kernel[handled])
	}
	t.Logf("%d changes, %d frames", changes, sent)
}

// What comes out of the ingress program is what comes out of the handlers by themselves,
// and a frame that the handlers cannot have in one piece is the stack's.
func TestRunsGoThroughTheTailCall(t *testing.T) {
	netnstest.NeedRoot(t)
	risky(t)
	in := &Ingress{cfg: Config{Mode: Native, HPUs: 1, Queues: 1, BufferSize: 2000, MaxBuffers: 1}, mode: Native}
	if err := in.load(bpf.IngressProgXspinIngress); err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	inKernel(t, in)
	h, alone := builtin(t, "echo-udp", nil), builtin(t, "echo-udp", nil)
	if err := in.SetHandlers(handled, h); err != nil {
		t.Fatal(err)
	}
	through := func(frame []byte) (Action, []byte) {
		opts := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)), Repeat: 1}
		ret, err := in.objs.XspinIngress.Run(opts)
		if err != nil {
			t.Fatal(err)
		}
		return Action(ret), opts.DataOut
	}
	for _, n := range []int{0, 1, 64, 1400} {
		frame := datagramOf(n)
		action, out := through(frame)
		if want := run(t, alone, frame); action != want.Action || action != ActionSend || !bytes.Equal(out, want.Frame) {
			t.Errorf("%d bytes: %v % x\nwant %v % x", n, action, out[:42], want.Action, want.Frame[:42])
		}
	}
	before := in.mustStats(t)
	if action, out := through(ping(10)); action != ActionToStack || !bytes.Equal(out, ping(10)) {
		t.Errorf("not matched: %v % x", action, out)
	}
	long := datagramOf(9000)
	if action, out := through(long); action != ActionToStack || !bytes.Equal(out, long) {
		t.Errorf("in fragments: %v", action)
	}
	if s := addUp(t, in); s.Passed != before.Passed+1 || s.Oversize != before.Oversize+1 || s.Kernel[handled] != 4 {
		t.Errorf("%d passed, %d oversize, %d to handlers; want 1, 1 and 4", s.Passed, s.Oversize, s.Kernel[handled])
	}
	if n := h.Stats().Sent; n != 4 {
		t.Errorf("%d sent, want 4", n)
	}
}

// The other end takes what XDP sends if it has a program, too.
func TestHandlersAnswerFromXDP(t *testing.T) {
	risky(t)
	lab, in, client := withClient(t)
	inside(t, lab.Host, func(host *net.Interface) { foreign(t, host, Native) })
	h := builtin(t, "echo-udp", nil)
	if err := in.SetHandlers(handled, h); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 2000)
	for i := range 200 {
		msg := bytes.Repeat([]byte{byte(i)}, 1+7*i)
		if _, err := client.Write(msg); err != nil {
			t.Fatal(err)
		}
		client.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
		if n, err := client.Read(buf); err != nil || !bytes.Equal(buf[:n], msg) {
			t.Fatalf("%d bytes sent, %d came back: %v", len(msg), n, err)
		}
	}
	if s := h.Stats(); s.Handled != 200 || s.Sent != 200 {
		t.Errorf("%d handled, %d sent; want 200", s.Handled, s.Sent)
	}
}

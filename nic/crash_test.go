// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/internal/ethtool"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
)

// offloads reads what a device does for its senders: TSO, GSO, checksums.
func offloads(t testing.TB, port netns.Port) (on [3]bool) {
	t.Helper()
	err := port.NS.Do(func() (err error) {
		for i, f := range []ethtool.Feature{ethtool.TSO, ethtool.GSO, ethtool.TxChecksum} {
			if on[i], err = f.Enabled(port.Device); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return on
}

// Whenever the process is killed, the interface works as before, at once.
func TestKilledProcessLeavesTheInterfaceAsItWas(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	here, there := offloads(t, lab.NIC), offloads(t, lab.Host)
	floodPing(t, lab)
	for round := range 6 {
		p := spawn(t, lab, []string{"serve", "serve", "kernel"}[round%3])
		if round%2 == 0 { // while it serves, else while it starts
			p.expect(t, "ready")
			kernel := snmp(t, lab.NIC.NS, "Icmp", "InEchos")
			ping(t, lab, "-c", "3", "-i", "0.002")
			if now := snmp(t, lab.NIC.NS, "Icmp", "InEchos"); now != kernel {
				t.Errorf("round %d: the kernel answered %d pings", round, now-kernel)
			}
			if attached(t, lab) == 0 && atTC(t, lab) == 0 {
				t.Errorf("round %d: no program is attached while it serves", round)
			}
			time.Sleep(rand.N(20 * time.Millisecond))
		} else {
			time.Sleep(rand.N(300 * time.Millisecond))
		}
		p.kill()

		if id := attached(t, lab); id != 0 {
			t.Fatalf("round %d: program %d is attached", round, id)
		}
		if n := atTC(t, lab); n != 0 {
			t.Fatalf("round %d: %d programs are at tc", round, n)
		}
		kernel := snmp(t, lab.NIC.NS, "Icmp", "InEchos")
		ping(t, lab, "-c", "3", "-i", "0.002", "-W", "2")
		if now := snmp(t, lab.NIC.NS, "Icmp", "InEchos"); now < kernel+3 {
			t.Errorf("round %d: the kernel answered %d of 3 pings", round, now-kernel)
		}
		if now := offloads(t, lab.NIC); now != here {
			t.Errorf("round %d: offloads of the NIC's end are %v, were %v", round, now, here)
		}
		if now := offloads(t, lab.Host); now != there {
			t.Errorf("round %d: offloads of the far end are %v, were %v", round, now, there)
		}
	}
	n := open(t, lab, nic.Config{})
	c := run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echo)})
	ping(t, lab, "-c", "10", "-i", "0.002")
	eventually(t, "handlers answer", func() bool { return c.Stats().Handled >= 10 })
}

// A descriptor of the link in another process would keep the program attached
// when this one is gone.
func TestChildrenInheritNothing(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echo)})
	const list = "for f in /proc/self/fd/*; do readlink $f; done; true"
	own := descriptors(t)
	for _, kind := range []string{"anon_inode:bpf_link", "anon_inode:bpf-map", "anon_inode:bpf-prog", "socket:", "anon_inode:[eventfd]"} {
		if !strings.Contains(strings.Join(own, "\n"), kind) {
			t.Errorf("this process has no %s: the test shows nothing\n%s", kind, strings.Join(own, "\n"))
		}
	}
	out, err := exec.Command("/bin/sh", "-c", list).CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"bpf", "socket:", "event"} {
		if strings.Contains(string(out), kind) {
			t.Errorf("a child process has a %s:\n%s", kind, out)
		}
	}
}

// descriptors lists what this process has open.
func descriptors(t testing.TB) (targets []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			targets = append(targets, to)
		}
	}
	return targets
}

func TestClosedNICLeavesNothingBehind(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	use := func() {
		n := open(t, lab, nic.Config{})
		c := run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echo)})
		ping(t, lab, "-c", "3", "-i", "0.002")
		eventually(t, "handled", func() bool { return c.Stats().Handled == 3 })
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		tryOpen(t, lab, nic.Config{Interface: "nope"})
		tryOpen(t, lab, nic.Config{Interface: "lo", Mode: 1}) // fails when all but the program is there
	}
	use() // what the runtime opens once
	mappings := func() int {
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for line := range strings.Lines(string(b)) {
			if strings.Contains(line, "bpf") || strings.Contains(line, "socket:") {
				n++
			}
		}
		return n
	}
	fds, goroutines := len(descriptors(t)), runtime.NumGoroutine()
	for range 2 {
		use()
	}
	eventually(t, "goroutines ended", func() bool { return runtime.NumGoroutine() <= goroutines })
	eventually(t, "descriptors closed", func() bool { return len(descriptors(t)) <= fds })
	eventually(t, "no map or ring in memory", func() bool {
		runtime.GC() // package ebpf leaves its own mappings to it
		return mappings() == 0
	})
}

// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"fmt"
	"log"
	"os"
	"os/signal"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// A NIC that answers UDP datagrams to port 7 until it is interrupted.
func Example() {
	n, err := nic.Open(nic.Config{Interface: "eth1"})
	if err != nil {
		log.Fatal(err)
	}
	defer n.Close()

	echo, err := n.Install(nic.ContextSpec{
		Name:     "echo",
		Rulesets: []matcher.Ruleset{matcher.UDPPort(7)},
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			if !h.Headers().ReplyUDP() || h.Send() != nil {
				return spin.Drop
			}
			return spin.Success
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := n.Activate(echo); err != nil {
		log.Fatal(err)
	}

	interrupt := make(chan os.Signal, 1)
	signal.Notify(interrupt, os.Interrupt)
	select {
	case <-interrupt:
	case e := <-n.Events():
		fmt.Println(e)
	}
}

// A tap: DNS queries are counted by length on two of the HPUs, and go on to
// Linux as if nothing had happened.
func ExampleNIC_Install() {
	n, err := nic.Open(nic.Config{Interface: "eth1"})
	if err != nil {
		log.Fatal(err)
	}
	defer n.Close()

	rules, err := matcher.ParseRuleset("dns: udp(53)")
	if err != nil {
		log.Fatal(err)
	}
	tap, err := n.Install(nic.ContextSpec{
		Name:     "dns",
		Rulesets: []matcher.Ruleset{rules},
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			h.Count(0, uint64(h.Len()))
			if err := h.ToStack(); err != nil {
				h.Logf("query lost: %v", err)
				return spin.Fail
			}
			return spin.Success
		}},
		Policy:   nic.ByPacket,
		CoreMask: 0b11,
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := n.Activate(tap); err != nil {
		log.Fatal(err)
	}
	defer func() {
		if err := n.Remove(tap); err != nil {
			log.Print(err)
		}
		lengths := tap.Stats().User[0]
		fmt.Printf("%d queries of %.0f bytes\n", lengths.Count, lengths.Mean())
	}()
}

// UDP echo from XDP: no packet leaves the kernel.
func ExampleNIC_Install_kernel() {
	n, err := nic.Open(nic.Config{Interface: "eth1"})
	if err != nil {
		log.Fatal(err)
	}
	defer n.Close()

	object, err := nic.BuiltinObject("echo-udp") // or nic.LoadObject("echo.bpf.o")
	if err != nil {
		log.Fatal(err)
	}
	echo, err := n.Install(nic.ContextSpec{
		Name:     "echo",
		Rulesets: []matcher.Ruleset{matcher.UDPPort(7)},
		Kernel:   &nic.Kernel{Object: object},
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := n.Activate(echo); err != nil {
		log.Fatal(err)
	}
	for fault := range n.Events() {
		log.Print(fault)
	}
}

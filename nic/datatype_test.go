// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// Random types come as the definition of MPI says, several messages at once, each in its
// own place and nothing beside it, with every strategy and policy, in segments of all
// sizes, through a network that loses, repeats and reorders them.
func TestDatatypesThroughABadNetwork(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Loss: 0.02, Duplicate: 0.02, Reorder: 0.05, Delay: 500 * time.Microsecond, Seed: 5}})
	n := open(t, lab, nic.Config{HPUs: 16, Workers: 2})
	conns := map[int]*slmp.Conn{}
	for _, payload := range []int{1000, 333, 0} {
		conns[payload] = connect(t, lab, slmp.Port, slmp.Config{Payload: payload})
	}
	again := uint64(0)
	for seed, left := uint64(0), 8; left > 0; seed++ {
		typ, count := ddttest.Random(rand.New(rand.NewPCG(seed, 7)), ddttest.Options{NoOverlap: true, MaxBytes: 48 << 10, MaxExtent: 256 << 10})
		c, err := ddt.Commit(typ, count)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if c.Size() < 4000 { // some packets at least
			continue
		}
		left--
		for i, strategy := range ddt.Strategies() {
			// An interval that is no multiple of any segment's size.
			o := handlers.DatatypeOptions{Strategy: strategy, Messages: 8, Packet: 700, Interval: []int64{0, 2100}[seed%2]}
			set, err := handlers.Datatype(c, o)
			if err != nil && strategy == ddt.Specialized {
				continue
			} else if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			spec := datatypePolicies(set)[(int(seed)+i)%len(datatypePolicies(set))]
			payload := []int{1000, 333, 0}[(int(seed)+i)/2%3]
			t.Run(fmt.Sprintf("seed %d, %s, %v, %d", seed, strategy, spec.Policy, payload), func(t *testing.T) {
				again += placeThrough(t, n, conns[payload], c, set, spec)
			})
		}
	}
	if again == 0 {
		t.Error("no segment came a second time")
	}
}

// Packets of several buffers, which reach from one sequence into others.
func TestDatatypesInLargePackets(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{MTU: 9000})
	n := open(t, lab, nic.Config{HPUs: 16, Workers: 2})
	conn := connect(t, lab, slmp.Port, slmp.Config{})
	typ, err := ddt.Parse("hvec(40 1 7000)[hidx(0,3 60,100 2000,7 2200,1 2300,200 6000,9)[hvec(3 1 7)[int]]]")
	if err != nil {
		t.Fatal(err)
	}
	c, err := ddt.Commit(typ, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, strategy := range ddt.Strategies() {
		if strategy == ddt.Specialized {
			continue
		}
		t.Run(strategy, func(t *testing.T) {
			set, err := handlers.Datatype(c, handlers.DatatypeOptions{Strategy: strategy, Messages: 8, Packet: 1408, Interval: 4 * 1408})
			if err != nil {
				t.Fatal(err)
			}
			payload := set.Payload
			var most atomic.Int64
			set.Payload = func(h *hpu.HER) spin.Code {
				parts := int64(0)
				for range h.Payload() {
					parts++
				}
				for m := most.Load(); m < parts && !most.CompareAndSwap(m, parts); m = most.Load() {
				}
				return payload(h)
			}
			for range 2 {
				placeThrough(t, n, conn, c, set, datatypePolicies(set)[0])
			}
			if most.Load() < 2 {
				t.Errorf("packets of %d buffers: there is nothing to see", most.Load())
			}
		})
	}
}

// datatypePolicies returns how a set's packets may be scheduled.
func datatypePolicies(set *handlers.Set) []nic.ContextSpec {
	if set.Sequence > 0 {
		return []nic.ContextSpec{
			{Policy: nic.BlockedRR, Sequence: set.Sequence, VHPUs: set.VHPUs},
			{Policy: nic.ByMessage},
			{Policy: nic.BlockedRR, Sequence: set.Sequence, VHPUs: set.VHPUs},
		}
	}
	return []nic.ContextSpec{{Policy: nic.ByPacket}, {Policy: nic.ByMessage}, {Policy: nic.BlockedRR, Sequence: 1500, VHPUs: 7}}
}

// placeThrough sends eight messages at once to a context of a set's, and returns how many
// segments came again.
func placeThrough(t *testing.T, n *nic.NIC, conn *slmp.Conn, c *ddt.Committed, set *handlers.Set, spec nic.ContextSpec) uint64 {
	const together = 8
	lo, hi := c.Bounds()
	lo, hi = min(lo, 0), max(hi, 0)
	room := hi - lo + 77
	memory := bytes.Repeat([]byte{0xa5}, int(together*room))
	want := bytes.Clone(memory)
	window, err := hostq.WindowOn(memory, spin.Read|spin.Write)
	if err != nil {
		t.Fatal(err)
	}
	events := make(chan spin.MessageEvent, together)
	var receives hpu.Receives
	for i := range uint32(together) { // numbers of messages follow one another
		if err := receives.Post(spin.Receive{
			Binding: spin.Binding{Window: window, Place: int64(i)*room - lo + 33, Events: spin.EventChan(events), User: i},
			Tag:     i, Ignore: ^uint32(together - 1),
		}); err != nil {
			t.Fatal(err)
		}
	}
	spec.Name, spec.Rulesets, spec.Handlers, spec.Binder, spec.Messages = "datatype", set.Rulesets, set.Handlers, &receives, together
	ctx := run(t, n, spec)
	defer func() {
		if err := n.Remove(ctx); err != nil {
			t.Error(err)
		}
	}()
	places := ddttest.Places(c.Type(), c.Count())
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range together {
		wg.Go(func() {
			// All of a size: which is which is known when they have been sent.
			data := make([]byte, c.Size())
			rand.NewChaCha8([32]byte{byte(rand.Uint32()), byte(rand.Uint32())}).Read(data)
			d, err := conn.SendBytes(patient(t), data, slmp.Options{})
			if err != nil {
				t.Errorf("%v\n%+v\n%+v", err, messages(t, ctx), ctx.Stats())
				return
			}
			mu.Lock()
			defer mu.Unlock()
			at := int64(d.ID%together)*room - lo + 33
			for i, p := range places {
				want[at+p] = data[i]
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return 0
	}
	for range together {
		if e := nextEvent(t, events); e.Cause != spin.Complete || e.Length != uint64(c.Size()) || e.User != e.Number%together {
			t.Errorf("%+v", e)
		}
	}
	for i := range want {
		if memory[i] != want[i] {
			t.Fatalf("byte %d of message %d's place is %#x, want %#x: type %v", int64(i)%room+lo-33, int64(i)/room, memory[i], want[i], c.Type())
		}
	}
	// A worker publishes what it counted after the batch with the event.
	eventually(t, "all bytes are counted", func() bool {
		return ctx.Stats().User[handlers.DatatypeBytes].Sum == uint64(together*c.Size())
	})
	return messages(t, ctx).Duplicates
}

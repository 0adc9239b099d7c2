// SPDX-License-Identifier: Apache-2.0

package pingpong

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/nic"
)

// echoICMP answers a ping: addresses swapped, type 0, and the checksum computed
// again over the whole payload, as FPsPIN's handler does.
func echoICMP(h *hpu.HER) hpu.Code {
	if !h.Headers().ReplyICMPEcho() || h.Send() != nil {
		return hpu.Drop
	}
	return hpu.Success
}

// echoUDP answers a datagram: addresses and ports swapped, which leaves the
// checksum right as it is.
func echoUDP(h *hpu.HER) hpu.Code {
	if !h.Headers().ReplyUDP() || h.Send() != nil {
		return hpu.Drop
	}
	return hpu.Success
}

// timed runs a handler and notes when its packets came, began and ended.
func timed(handler hpu.Handler, s *samples) hpu.Handler {
	return func(h *hpu.HER) hpu.Code {
		start := h.Now()
		code := handler(h)
		s.add(start-h.Arrival(), h.Now()-start)
		return code
	}
}

// server is a NIC that echoes.
type server struct {
	*nic.NIC
	samples map[rtt.Proto]*samples
}

// start opens a NIC on the lab's NIC end and activates a context per protocol.
func start(_ context.Context, lab *netns.Lab, c ServerConfig) (_ NICServer, err error) {
	wait, err := hpu.ParseWait(c.Wait)
	if err != nil {
		return nil, err
	}
	s := &server{samples: map[rtt.Proto]*samples{}}
	err = lab.NIC.NS.Do(func() (err error) {
		s.NIC, err = nic.Open(nic.Config{Interface: lab.NIC.Device, HPUs: c.HPUs, Wait: wait, CPUs: c.CPUs})
		return err
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	for _, p := range c.Protos {
		ruleset, handler := matcher.ICMPEcho(), echoICMP
		if p == rtt.UDP {
			ruleset, handler = matcher.UDPPort(Port), echoUDP
		}
		s.samples[p] = new(samples)
		ctx, err := s.Install(nic.ContextSpec{
			Name:      string(p) + "-echo",
			Rulesets:  []matcher.Ruleset{ruleset},
			Handlers:  hpu.Handlers{Payload: timed(handler, s.samples[p])},
			Timestamp: true,
		})
		if err != nil {
			return nil, err
		}
		if err := s.Activate(ctx); err != nil {
			return nil, err
		}
	}
	if c.Stats {
		return s, s.ServeStats()
	}
	return s, nil
}

// Breakdown implements NICServer.
func (s *server) Breakdown(p rtt.Proto) Breakdown { return s.samples[p].take() }

// samples are the latest durations of one protocol's handlers. Workers add
// while another goroutine takes: a sample that is added meanwhile may go
// missing.
type samples struct {
	n               atomic.Uint64
	arrival, handle [1 << 14]atomic.Int64 // ns
}

func (s *samples) add(arrival, handle int64) {
	i := (s.n.Add(1) - 1) % uint64(len(s.arrival))
	s.arrival[i].Store(arrival)
	s.handle[i].Store(handle)
}

func (s *samples) take() Breakdown {
	n := int(min(s.n.Swap(0), uint64(len(s.arrival))))
	if n == 0 {
		return Breakdown{}
	}
	median := func(from []atomic.Int64) time.Duration {
		v := make([]int64, n)
		for i := range v {
			v[i] = from[i].Load()
		}
		slices.Sort(v)
		return time.Duration(v[n/2])
	}
	return Breakdown{ArrivalToHandler: median(s.arrival[:]), Handler: median(s.handle[:])}
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"slices"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/nic"
)

// A topReport is the difference of two samples, which top shows, or prints as JSON. All
// float64 are per second, except those in percent.
type topReport struct {
	Schema     int               `json:"schema"`
	Time       time.Time         `json:"time"`
	Seconds    float64           `json:"seconds"` // since the report before
	PID        int               `json:"pid"`     // of the daemon
	Started    time.Time         `json:"started"`
	Interfaces []interfaceReport `json:"interfaces"`
	Contexts   []contextReport   `json:"contexts"`
	HPUs       []hpuReport       `json:"hpus"`
}

type interfaceReport struct {
	Name      string  `json:"name"`
	Link      string  `json:"link"`
	Mode      string  `json:"mode"`
	ZeroCopy  bool    `json:"zero_copy"`
	Seen      float64 `json:"seen"`
	ToLinux   float64 `json:"to_linux"`
	ToHPUs    float64 `json:"to_hpus"`
	Refused   float64 `json:"refused"`
	Spilled   float64 `json:"spilled"`
	Malformed float64 `json:"malformed"`
	Stuck     int     `json:"stuck"`
}

type contextReport struct {
	Name     string         `json:"name"`
	State    string         `json:"state"`
	Hook     string         `json:"hook,omitempty"` // that its packets come from: xdp or tc
	Packets  float64        `json:"packets"`
	Messages *messageReport `json:"messages,omitempty"` // if the context has messages that end
	HPU      float64        `json:"hpu_percent"`        // handler time
	Dropped  float64        `json:"dropped"`
	Failed   float64        `json:"failed"`
	Refused  float64        `json:"refused"`
	Spilled  float64        `json:"spilled"`
	Sent     float64        `json:"sent"` // frames of handlers
	Acks     float64        `json:"acks"`
	Queue    *queueReport   `json:"queue,omitempty"` // if it has one
	InFlight int            `json:"in_flight"`
	Attached []control.Peer `json:"attached"`
}

type messageReport struct {
	Ended float64 `json:"ended"`
	Open  int     `json:"open"`
}

type queueReport struct {
	Requests float64 `json:"requests"`
	Full     float64 `json:"full"`
	Waiting  int     `json:"waiting"`
}

type hpuReport struct {
	Interface string  `json:"interface"`
	HPU       int     `json:"hpu"`
	Packets   float64 `json:"packets"`
	Busy      float64 `json:"busy_percent"`
	Batch     float64 `json:"batch"` // packets in one, 0 if there was none
	Depth     uint64  `json:"depth"`
}

// works tells whether an HPU has anything to do.
func (h hpuReport) works() bool { return h.Packets > 0 || h.Busy > 0 || h.Depth > 0 }

// newTopReport compares two samples.
func newTopReport(before, now *sample) *topReport {
	p := period(now.at.Sub(before.at).Seconds())
	r := &topReport{
		Schema: 1, Time: now.at, Seconds: float64(p), PID: now.status.PID, Started: now.status.Started,
		Interfaces: []interfaceReport{}, Contexts: []contextReport{}, HPUs: []hpuReport{},
	}
	for i := range now.nics {
		n, old := &now.nics[i], nicOf(before, now.nics[i].Interface)
		r.Interfaces = append(r.Interfaces, p.nic(old, n))
		for k := range n.HPUs {
			var was hpu.Stats
			if k < len(old.HPUs) {
				was = old.HPUs[k]
			}
			r.HPUs = append(r.HPUs, p.hpu(n.Interface, &was, &n.HPUs[k]))
		}
	}
	old := map[string]*control.ContextInfo{}
	for i := range before.contexts {
		old[before.contexts[i].Name] = &before.contexts[i]
	}
	for i := range now.contexts {
		x := &now.contexts[i]
		was := old[x.Name]
		if was == nil || was.ID != x.ID {
			was = &control.ContextInfo{}
		}
		r.Contexts = append(r.Contexts, p.context(was, x, contextOf(before, was), contextOf(now, x)))
	}
	slices.SortStableFunc(r.Contexts, func(a, b contextReport) int { return cmp.Compare(a.Name, b.Name) })
	return r
}

// A period is the seconds between two samples.
type period float64

// rate returns an increase per second. A counter that has become smaller has started over
// from 0.
func (p period) rate(was, is uint64) float64 {
	if is < was {
		was = 0
	}
	if p <= 0 {
		return 0
	}
	return float64(is-was) / float64(p)
}

// percent returns an increase as a part of the period.
func (p period) percent(was, is time.Duration) float64 { return p.rate(uint64(was), uint64(is)) / 1e7 }

func (p period) nic(old, n *nic.Stats) interfaceReport {
	was, is := &old.Program, &n.Program
	return interfaceReport{
		Name: n.Interface, Link: n.Link, Mode: n.Mode, ZeroCopy: n.ZeroCopy,
		Seen: p.rate(was.Seen, is.Seen), ToLinux: p.rate(was.Passed, is.Passed), ToHPUs: p.rate(was.Redirected, is.Redirected),
		Refused: p.rate(was.Refused, is.Refused), Spilled: p.rate(was.Spilled, is.Spilled), Malformed: p.rate(was.Malformed, is.Malformed),
		Stuck: n.Stuck,
	}
}

func (p period) context(was, is *control.ContextInfo, c1, c2 *nic.ContextStats) contextReport {
	a, b := &was.HandlerStats, &is.HandlerStats
	r := contextReport{
		Name: is.Name, State: is.State, Hook: is.At, Packets: p.rate(a.Handled, b.Handled), HPU: p.percent(a.HandlerSum, b.HandlerSum),
		Dropped: p.rate(a.Dropped, b.Dropped), Failed: p.rate(a.Failed+a.Panics+a.Overruns, b.Failed+b.Panics+b.Overruns),
		Refused: p.rate(c1.Refused, c2.Refused), Spilled: p.rate(c1.Spilled, c2.Spilled), Sent: p.rate(a.Sent, b.Sent), Acks: p.rate(a.Acks, b.Acks),
		InFlight: c2.InFlight, Attached: append([]control.Peer{}, is.Attached...),
	}
	if m := is.MessageStats; m != nil {
		var ended uint64
		if was.MessageStats != nil {
			ended = was.MessageStats.Ended
		}
		r.Messages = &messageReport{Ended: p.rate(ended, m.Ended), Open: m.Open}
	}
	if q := is.Pair; q != nil {
		old := was.Pair
		if old == nil {
			old = &hostq.PairStats{}
		}
		r.Queue = &queueReport{Requests: p.rate(old.Requests, q.Requests), Full: p.rate(old.Full, q.Full), Waiting: q.Waiting}
	}
	return r
}

func (p period) hpu(name string, was, is *hpu.Stats) hpuReport {
	r := hpuReport{Interface: name, HPU: is.HPU, Packets: p.rate(was.Handled, is.Handled), Busy: p.percent(was.Busy, is.Busy), Depth: uint64(is.Occupancy)}
	if b := p.rate(was.Batches, is.Batches); b > 0 {
		r.Batch = r.Packets / b
	}
	return r
}

func nicOf(s *sample, name string) *nic.Stats {
	for i := range s.nics {
		if s.nics[i].Interface == name {
			return &s.nics[i]
		}
	}
	return &nic.Stats{}
}

// contextOf returns the NIC's statistics of a context.
func contextOf(s *sample, x *control.ContextInfo) *nic.ContextStats {
	n := nicOf(s, x.Interface)
	for i := range n.Contexts {
		if c := &n.Contexts[i]; c.ID == x.ID && c.Name == x.Name {
			return c
		}
	}
	return &nic.ContextStats{}
}

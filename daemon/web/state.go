// SPDX-License-Identifier: Apache-2.0

package web

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// history is how many seconds the page looks back.
const history = 300

// A Source tells what there is: a daemon. All of it takes locks that no packet waits for.
type Source struct {
	Status   func() control.Status
	Stats    func() ([]nic.Stats, error)
	Contexts func() []control.ContextInfo
	Log      *Tail
}

// A State is what the page shows. What is not named here nobody can read: so no
// parameters of handlers, which may be secrets, and nothing that they print.
type State struct {
	Time       time.Time   `json:"time"`
	Version    string      `json:"version"`
	PID        int         `json:"pid"`
	Started    time.Time   `json:"started"`
	Error      string      `json:"error,omitempty"` // why there are no figures
	Interfaces []Interface `json:"interfaces"`
	Contexts   []Context   `json:"contexts"`
	Drops      []Drop      `json:"drops"`
	Log        []Line      `json:"log"`
}

// An Interface is one with a NIC on it.
type Interface struct {
	Name     string           `json:"name"`
	Link     string           `json:"link"`
	Mode     string           `json:"mode"`
	ZeroCopy bool             `json:"zero_copy"`
	Queues   int              `json:"queues"`
	Stuck    int              `json:"stuck"`
	Frames   nic.ProgramStats `json:"frames"`
	HPUs     []hpu.Stats      `json:"hpus"`
}

// A Context is an execution context.
type Context struct {
	Name      string           `json:"name"`
	Interface string           `json:"interface"`
	State     string           `json:"state"`
	Error     string           `json:"error,omitempty"`
	Tier      string           `json:"tier"` // user, or kernel
	Handler   string           `json:"handler"`
	Policy    string           `json:"policy"`
	Rules     []control.Rule   `json:"rules"`
	Windows   []control.Window `json:"windows"`
	Attached  []control.Peer   `json:"attached"`
	Handled   uint64           `json:"handled"` // handlers that returned
	Ended     uint64           `json:"ended"`   // messages
	Open      int              `json:"open"`    // messages in flight
	InFlight  int              `json:"in_flight"`
	Credits   uint32           `json:"credits"`
	Queue     bool             `json:"queue"`
	Waiting   int              `json:"waiting"` // events and requests for the application
}

// A Drop is a reason for which packets or messages were lost, or left to Linux although
// they matched.
type Drop struct {
	Interface string `json:"interface"`
	Context   string `json:"context,omitempty"`
	Reason    string `json:"reason"`
	Meaning   string `json:"meaning"`
	Count     uint64 `json:"count"` // since the start
}

// A Sample is what happened in about a second.
type Sample struct {
	Seq        uint64                    `json:"seq"`  // from 1
	Time       int64                     `json:"time"` // ms since 1970
	Interfaces map[string]InterfaceRates `json:"interfaces"`
	Contexts   map[string]ContextRates   `json:"contexts"` // those that did anything
}

// InterfaceRates are per second, but Busy.
type InterfaceRates struct {
	HPUs    float64   `json:"hpus"`    // frames to HPUs
	Kernel  float64   `json:"kernel"`  // and to handlers in eBPF
	Linux   float64   `json:"linux"`   // and to the Linux stack
	Dropped float64   `json:"dropped"` // and to nobody, for lack of credit, buffers or room
	Busy    []float64 `json:"busy"`    // percent of the time, of each HPU
}

// ContextRates are per second, but Open and times.
type ContextRates struct {
	Handled  float64 `json:"handled"`
	Messages float64 `json:"messages"` // that were complete
	Open     int     `json:"open"`     // in flight
	P50      uint64  `json:"p50"`      // ns within which 50 of 100 handlers were; 0 if there were none
	P99      uint64  `json:"p99"`
}

// A recorder makes samples, keeps the last ones, and has the state ready for all that ask:
// the daemon is asked once a second, however many look.
type recorder struct {
	nics     []nic.Stats // as they were last
	contexts []control.ContextInfo
	at       time.Time

	mu      sync.Mutex
	state   []byte // JSON of State, without the brace at its end
	seq     uint64
	samples [history][]byte // JSON, by number
}

// record looks at the source.
func (r *recorder) record(source Source, now time.Time) {
	status := source.Status()
	nics, err := source.Stats()
	contexts := source.Contexts()
	s := State{
		Time: now, Version: status.Version, PID: status.PID, Started: status.Started,
		Interfaces: []Interface{}, Contexts: []Context{}, Drops: []Drop{}, Log: source.Log.all(),
	}
	if err != nil {
		s.Error = err.Error()
	}
	for i := range nics {
		s.add(&nics[i])
	}
	for i := range contexts {
		c := &contexts[i]
		s.context(c, find(nics, c))
	}
	sample := Sample{Time: now.UnixMilli(), Interfaces: map[string]InterfaceRates{}, Contexts: map[string]ContextRates{}}
	if err == nil && !r.at.IsZero() {
		sample.compare(now.Sub(r.at), r.nics, nics, r.contexts, contexts)
	}
	if err == nil {
		r.nics, r.contexts, r.at = nics, contexts, now
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	text, err := json.Marshal(&s)
	if err != nil {
		text = fmt.Appendf(nil, `{"error":%q}`, err)
	}
	r.state = text[:len(text)-1]
	if len(sample.Interfaces) > 0 {
		r.seq++
		sample.Seq = r.seq
		if text, err = json.Marshal(&sample); err == nil {
			r.samples[r.seq%history] = text
		}
	}
}

// document returns the state, with the samples after one.
func (r *recorder) document(since uint64) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if since > r.seq {
		since = 0 // it is of a daemon that was here before
	}
	var b bytes.Buffer
	b.Write(r.state)
	b.WriteString(`,"samples":[`)
	first := true
	for i := max(since, r.seq-min(r.seq, history)) + 1; i <= r.seq; i++ {
		if !first {
			b.WriteByte(',')
		}
		first = false
		b.Write(r.samples[i%history])
	}
	b.WriteString("]}\n")
	return b.Bytes()
}

// find returns what the NIC says of a context, or nothing.
func find(nics []nic.Stats, c *control.ContextInfo) *nic.ContextStats {
	for i := range nics {
		if nics[i].Interface != c.Interface {
			continue
		}
		for k := range nics[i].Contexts {
			if s := &nics[i].Contexts[k]; s.ID == c.ID && s.Name == c.Name {
				return s
			}
		}
	}
	return &nic.ContextStats{}
}

func (s *State) drop(device, context, reason, meaning string, count uint64) {
	if count > 0 {
		s.Drops = append(s.Drops, Drop{device, context, reason, meaning, count})
	}
}

func (s *State) add(n *nic.Stats) {
	s.Interfaces = append(s.Interfaces, Interface{
		Name: n.Interface, Link: n.Link, Mode: n.Mode, ZeroCopy: n.ZeroCopy, Queues: n.Queues, Stuck: n.Stuck, Frames: n.Program, HPUs: n.HPUs,
	})
	drop := func(reason, meaning string, count uint64) { s.drop(n.Interface, "", reason, meaning, count) }
	drop("no buffer", "the kernel had none for the frame", n.Sockets.RxDropped)
	drop("ring full", "an HPU was slow, and its ring full", n.Sockets.RxRingFull)
	drop("failed", "matched, could not be redirected: to Linux", n.Program.Failed)
	drop("malformed", "matched, but not what its message format says: to Linux", n.Program.Malformed)
	drop("trains", "matched, but several packets in one: to Linux", n.Program.Trains)
	drop("oversize", "matched, but too long for AF_XDP here, or for handlers in eBPF: to Linux", n.Program.Oversize)
	drop("stack failures", "packets for Linux that it refused", n.StackFailures)
	drop("events lost", "that nobody took in time", n.EventsLost)
}

func (s *State) context(c *control.ContextInfo, n *nic.ContextStats) {
	handler := c.Handler
	if c.Object != nil {
		handler = c.Object.Name
	}
	tier := cmp.Or(c.Tier, "user")
	if tier == "kernel" {
		handler += ", in the kernel"
		if c.At != "" {
			handler += " at " + c.At
		}
	}
	x := Context{
		Name: c.Name, Interface: c.Interface, State: c.State, Error: c.Error, Tier: tier, Handler: handler, Policy: c.Policy,
		Rules: append([]control.Rule{}, c.Rules...), Windows: append([]control.Window{}, c.Windows...), Attached: append([]control.Peer{}, c.Attached...),
		Handled: c.HandlerStats.Handled, InFlight: n.InFlight, Credits: n.Credits,
	}
	if c.Pair != nil {
		x.Queue, x.Waiting = true, c.Pair.Waiting
	}
	h := &c.HandlerStats
	drop := func(reason, meaning string, count uint64) { s.drop(c.Interface, c.Name, reason, meaning, count) }
	drop("refused", "the context had no credit left", n.Refused)
	drop("spilled", "the context had no credit left: to Linux", n.Spilled)
	drop("dropped", "a handler returned Drop", h.Dropped)
	drop("handler failed", "a handler returned Fail or Segv", h.Failed)
	drop("panics", "a handler panicked", h.Panics)
	drop("overruns", "a handler ran past its time limit", h.Overruns)
	drop("unrun", "given back without a handler: the context was stopped or removed", h.Unrun)
	drop("lost", "lost on the way to the HPU", h.Lost)
	drop("send full", "a handler's frame was not sent: ring full, or no frame left", h.SendFull)
	drop("ack full", "an acknowledgement was not sent: ring full, or no frame left", h.AckFull)
	drop("malformed", "lengths that contradict each other", h.Malformed)
	drop("corrupt", "wrong checksum", h.Corrupt)
	drop("unasked", "a request to the application found no room", h.Unasked)
	drop("unanswered", "the application did not answer in time, or there was none", h.Unanswered)
	if m := c.MessageStats; m != nil {
		x.Open, x.Ended = m.Open, m.Ended
		drop("messages failed", "a handler failed", m.Failed)
		drop("messages abandoned", "incomplete: the sender fell silent, or the context ended", m.Abandoned)
		drop("messages discarded", "incomplete, without a completion handler", m.Discarded)
		drop("messages refused", "no place for them: no receive was posted", m.Refused)
		for r := spin.NotDropped + 1; r < spin.DropReasons; r++ {
			drop("segments: "+r.String(), r.Help(), m.Dropped[r])
		}
	}
	s.Contexts = append(s.Contexts, x)
}

// compare fills a sample with what happened between two looks.
func (s *Sample) compare(d time.Duration, nics1, nics2 []nic.Stats, contexts1, contexts2 []control.ContextInfo) {
	// What has started over began at 0. One digit behind the point is what a page can show.
	rate := func(was, is uint64) float64 {
		if is < was {
			was = 0
		}
		return math.Round(10*float64(is-was)/d.Seconds()) / 10
	}
	for i := range nics2 {
		n, old := &nics2[i], &nic.Stats{}
		for k := range nics1 {
			if nics1[k].Interface == n.Interface {
				old = &nics1[k]
			}
		}
		linux := func(p *nic.ProgramStats) uint64 {
			return p.Passed + p.Spilled + p.Failed + p.Malformed + p.Oversize + p.Trains
		}
		dropped := func(n *nic.Stats) uint64 { return n.Program.Refused + n.Sockets.RxDropped + n.Sockets.RxRingFull }
		r := InterfaceRates{
			HPUs:    rate(old.Program.Redirected, n.Program.Redirected),
			Kernel:  rate(old.Program.Kernel, n.Program.Kernel),
			Linux:   rate(linux(&old.Program), linux(&n.Program)),
			Dropped: rate(dropped(old), dropped(n)),
			Busy:    []float64{},
		}
		for k := range n.HPUs {
			var was time.Duration
			if k < len(old.HPUs) {
				was = old.HPUs[k].Busy
			}
			// A batch counts when it ends, so one that began earlier may give more than all.
			r.Busy = append(r.Busy, min(100, rate(uint64(was), uint64(n.HPUs[k].Busy))/1e7))
		}
		s.Interfaces[n.Interface] = r
	}
	before := map[string]*control.ContextInfo{}
	for i := range contexts1 {
		before[contexts1[i].Name] = &contexts1[i]
	}
	for i := range contexts2 {
		c := &contexts2[i]
		old := before[c.Name]
		if old == nil || old.ID != c.ID {
			old = &control.ContextInfo{}
		}
		r := ContextRates{Handled: rate(old.HandlerStats.Handled, c.HandlerStats.Handled)}
		r.P50, r.P99 = quantiles(&old.HandlerStats.HandlerTime, &c.HandlerStats.HandlerTime)
		if m := c.MessageStats; m != nil {
			var ended uint64
			if old.MessageStats != nil {
				ended = old.MessageStats.Ended
			}
			r.Messages, r.Open = rate(ended, m.Ended), m.Open
		}
		if r != (ContextRates{}) {
			s.Contexts[c.Name] = r
		}
	}
}

// quantiles returns within which time 50 and 99 of 100 handlers were, of those that a
// histogram counts and the one before does not: ends of buckets, so powers of two.
func quantiles(was, is *spin.Histogram) (p50, p99 uint64) {
	var total, sum uint64
	var fresh spin.Histogram
	for i := range is {
		fresh[i] = is[i]
		if is[i] >= was[i] {
			fresh[i] -= was[i]
		}
		total += fresh[i]
	}
	for i, n := range fresh {
		sum += n
		if p50 == 0 && total > 0 && sum*100 >= total*50 {
			p50 = 1 << i
		}
		if p99 == 0 && total > 0 && sum*100 >= total*99 {
			p99 = 1 << i
		}
	}
	return p50, p99
}

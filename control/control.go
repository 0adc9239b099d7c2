// SPDX-License-Identifier: Apache-2.0

// Package control has the documents of the daemon's interface, and a client for it: HTTP
// and JSON on a Unix socket, see docs/control.md.
package control

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/spin"
)

// Socket is where the daemon listens by default. XSPIN_SOCKET and --socket name another
// socket.
const Socket = "/run/xspin/xspin.sock"

// Context describes an execution context, as in the configuration file (its keys are the
// JSON names here) and as POST /v1/contexts takes it.
type Context struct {
	Name      string         `json:"name"`
	Interface string         `json:"interface,omitempty"` // may be left out if there is only one
	Rulesets  string         `json:"rulesets,omitempty"`  // text form, see xspin rules; defaults to the handlers'
	First     int            `json:"first,omitempty"`     // number of the first ruleset
	Tier      string         `json:"tier,omitempty"`      // that its handlers run in: user (default), or kernel
	Hook      string         `json:"hook,omitempty"`      // of handlers in eBPF: xdp or tc; the interface's if left out
	Handler   string         `json:"handler"`             // a name of handlers.All; in the kernel, of built-in handlers in eBPF
	Object    *Object        `json:"object,omitempty"`    // in the kernel, instead of Handler
	Params    map[string]any `json:"params,omitempty"`
	Format    string         `json:"format,omitempty"` // message format; defaults to the rulesets'
	Policy    string         `json:"policy,omitempty"` // message, packet, blocked-rr
	Sequence  uint32         `json:"sequence,omitempty"`
	VHPUs     int            `json:"vhpus,omitempty"`
	HPUs      string         `json:"hpus,omitempty"` // core mask as a list: "0-3,8"
	Credits   int            `json:"credits,omitempty"`
	Share     int            `json:"share,omitempty"`    // weight of its HPU time, 1 if left out
	Overload  string         `json:"overload,omitempty"` // drop (default) or stack
	Messages  int            `json:"messages,omitempty"`
	Segments  int            `json:"segments,omitempty"` // most of a message, in the kernel
	Timeout   Duration       `json:"timeout,omitempty"`
	Remember  Duration       `json:"remember,omitempty"`
	Timer     Duration       `json:"timer,omitempty"`
	Memory    Size           `json:"memory,omitempty"`     // HPU memory of the context
	HPUMemory Size           `json:"hpu_memory,omitempty"` // HPU memory of each HPU
	Windows   []Window       `json:"windows,omitempty"`    // the first takes messages by default
	Queue     *Queue         `json:"queue,omitempty"`      // queues to the application; {} for the defaults
	Attach    *Attach        `json:"attach,omitempty"`     // who may attach; only root if left out
	Activate  string         `json:"activate,omitempty"`   // start (default), attach (while an application is attached; the default of handlers that use one), or manual
	Triggered bool           `json:"triggered,omitempty"`  // host-activated: no rulesets; some handlers always are
}

// Object is a file with handlers in eBPF. A configuration file has its path alone, as text;
// requests have its bytes, too, and reports do not.
type Object struct {
	Name string `json:"name"`           // for people
	Code []byte `json:"code,omitempty"` // what the file has
}

// UnmarshalText takes a path.
func (o *Object) UnmarshalText(text []byte) error {
	*o = Object{Name: string(text)}
	return nil
}

// UnmarshalJSON takes a path or an object.
func (o *Object) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		*o = Object{}
		return json.Unmarshal(b, &o.Name)
	}
	type plain Object // without this method
	var p plain
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p); err != nil {
		return fmt.Errorf("object: want a path, or a name and code: %w", err)
	}
	*o = Object(p)
	return nil
}

// Window is a window that a context uses.
type Window struct {
	Name   string `json:"name"`
	Size   Size   `json:"size,omitempty"`   // makes a window for this context alone; without it, Name is one of the top-level list
	Rights string `json:"rights,omitempty"` // of the handlers: r, w, a; "rwa" if left out
	App    string `json:"app,omitempty"`    // of the application: rw (mapped), r (by copying), or none; see DefaultApp
}

// DefaultApp is what App means if it is left out: rw for a window that is the context's alone, and
// none for a shared one. A process with rw keeps the mapping, and so can write to a shared
// window as long as it lives, whoever uses it then. A window that is the context's alone is
// replaced for the next application.
func (w *Window) DefaultApp() string {
	if w.Size == 0 {
		return "none"
	}
	return "rw"
}

// Queue says how large the queues to the application are.
type Queue struct {
	Events   int    `json:"events,omitempty"`
	Requests int    `json:"requests,omitempty"`
	Payload  Size   `json:"payload,omitempty"`
	Full     string `json:"full,omitempty"` // fail (default), drop or wait
}

// Attach says who may attach to a context.
type Attach struct {
	Users  []string `json:"users,omitempty"`  // names or numbers
	Groups []string `json:"groups,omitempty"` // names or numbers
	// Observers says that others may attach in addition to the application. They get
	// windows and counters, but no events and requests.
	Observers bool `json:"observers,omitempty"`
}

// ContextInfo is what the daemon reports about a context.
type ContextInfo struct {
	Context
	ID           int                `json:"id"`
	State        string             `json:"state"` // installing, installed, active, draining, stopped, failed, gone (with its interface)
	Error        string             `json:"error,omitempty"`
	Link         string             `json:"link"`  // of its interface: up, down, no carrier, or gone
	Rules        []Rule             `json:"rules"` // its rulesets, numbered while it is active
	Attached     []Peer             `json:"attached"`
	Since        time.Time          `json:"since"`          // of the state
	Pair         *hostq.PairStats   `json:"pair,omitempty"` // if it has a queue
	MessageStats *spin.MessageStats `json:"message_stats,omitempty"`
	HandlerStats spin.ContextStats  `json:"handler_stats"`
	At           string             `json:"at,omitempty"`       // the hook that its packets come from: xdp or tc
	AtWhy        string             `json:"at_why,omitempty"`   // why that is xdp, on an interface at tc
	CPUs         []uint64           `json:"cpus,omitempty"`     // in the kernel: packets handled, by CPU
	Maps         []spin.OwnMap      `json:"maps,omitempty"`     // in the kernel: of its handlers, if one context is asked for
	Reserved     map[string]int64   `json:"reserved,omitempty"` // bytes that its handlers take of limits.memory, by purpose
	Warnings     []string           `json:"warnings,omitempty"` // what keeps packets from it; when it is installed also what is hardly meant
}

// Rule is a ruleset in the matching table.
type Rule struct {
	Number  int    `json:"number"` // -1: not active
	Text    string `json:"text"`
	Matched uint64 `json:"matched"`
}

// TableRule is a ruleset in the table of an interface.
type TableRule struct {
	Interface string `json:"interface"`
	Context   string `json:"context"`
	Rule
}

// Peer is a process at the other end of the socket.
type Peer struct {
	PID      int       `json:"pid"`
	UID      int       `json:"uid"`
	GID      int       `json:"gid"`
	Groups   []int     `json:"-"` // supplementary
	Observer bool      `json:"observer,omitempty"`
	Since    time.Time `json:"since"`
}

// Trigger activates a host-activated context.
type Trigger struct {
	Words  Words  `json:"words"`
	Window string `json:"window,omitempty"` // by name
	Offset int64  `json:"offset,omitempty"`
	Length int64  `json:"length,omitempty"`
	Slice  int    `json:"slice,omitempty"`
}

// Words are the words of a trigger, which its handlers can read.
type Words [4]uint64

// UnmarshalJSON takes an array of up to four numbers. By default, encoding/json would drop
// the rest of a longer one.
func (w *Words) UnmarshalJSON(b []byte) error {
	var all []uint64
	if err := json.Unmarshal(b, &all); err != nil {
		return fmt.Errorf("words: want numbers of 64 bits: %w", err)
	}
	if len(all) > len(w) {
		return fmt.Errorf("words: %d of them: want at most %d", len(all), len(w))
	}
	*w = Words{}
	copy(w[:], all)
	return nil
}

// LogLine is a line that a handler has logged.
type LogLine struct {
	Seq  uint64    `json:"seq"` // number of the line, from 1 for each HPU
	Time time.Time `json:"time"`
	HPU  int       `json:"hpu"`
	Text string    `json:"text"`
	Lost uint64    `json:"lost,omitempty"` // lines before this one that were not kept
}

// SessionProtocol is the protocol that an application's connection is upgraded to.
const SessionProtocol = "xspin-session/1"

// AttachReply is the first document of a session; descriptors come with it in the
// order of Windows (those that are mapped), then the pair's.
type AttachReply struct {
	Context string         `json:"context"`
	Windows []AttachWindow `json:"windows"`
	Pair    *hostq.Layout  `json:"pair,omitempty"` // with these descriptors: memory, doorbell, and a doorbell for each lane
	HPUs    int            `json:"hpus"`
	Error   string         `json:"error,omitempty"`
}

// AttachWindow is a window of a session.
type AttachWindow struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	App    string `json:"app"` // rw: a descriptor comes with it
	Rights string `json:"rights"`
}

// Ask is a request of a session to the daemon. The Answer to it has the same number.
type Ask struct {
	Seq     uint64   `json:"seq"`
	Do      string   `json:"do"` // post, unpost, read, trigger, activate, deactivate, stats, counters
	Receive *Receive `json:"receive,omitempty"`
	Trigger *Trigger `json:"trigger,omitempty"`
	Read    *Range   `json:"read,omitempty"`
}

// Receive is a posted receive: where the next message that matches it goes.
type Receive struct {
	Window string `json:"window"`
	Place  int64  `json:"place"`
	Size   int64  `json:"size,omitempty"`
	Tag    uint32 `json:"tag"`
	Ignore uint32 `json:"ignore"`
	Keep   bool   `json:"keep,omitempty"`
	User   uint64 `json:"user"`
}

// Range is a part of a window.
type Range struct {
	Window string `json:"window"`
	Offset int64  `json:"offset"`
	Length int64  `json:"length"`
}

// MaxRead is how many bytes one Ask may read.
const MaxRead = 1 << 20

// Answer is the daemon's answer to an Ask.
type Answer struct {
	Seq   uint64       `json:"seq"`
	Error string       `json:"error,omitempty"`
	Data  []byte       `json:"data,omitempty"`
	Info  *ContextInfo `json:"info,omitempty"`
	// Bye says why the session ends, in an Answer to no Ask, with Seq 0.
	Bye string `json:"bye,omitempty"`
}

// Problem is something wrong with a document that was sent.
type Problem struct {
	Path   string `json:"path"`             // such as windows[1].size; "" for the document
	Line   int    `json:"line,omitempty"`   // in the text at Path, from 1; 0 if it is about all of it
	Column int    `json:"column,omitempty"` // in bytes, from 1
	Text   string `json:"text"`
}

// Status is what the daemon reports about itself.
type Status struct {
	Version    string         `json:"version"`
	PID        int            `json:"pid"`
	Started    time.Time      `json:"started"`
	Config     string         `json:"config"` // file
	Interfaces []string       `json:"interfaces"`
	Links      []string       `json:"links"` // of each interface: up, down, no carrier, or gone
	Handlers   []Registration `json:"handlers"`
}

// Registration is a set of handlers that the daemon has compiled in.
type Registration struct {
	Name string `json:"name"`
	Help string `json:"help"`
}

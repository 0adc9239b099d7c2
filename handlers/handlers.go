// SPDX-License-Identifier: Apache-2.0

// Package handlers gives names to sets of handlers, for configurations to use. A
// package with handlers of its own registers them in an init function:
//
//	func init() {
//		handlers.Register("reverse", "sends each datagram back, reversed", newReverse)
//	}
//
// A main package that imports it and cli is an xspin command with these handlers; see
// docs/handlers.md.
package handlers

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
)

// A Set is the handlers of an application, and what they need. The handlers are Go
// functions, called by the HPUs of the user-space tier, and hence of hpu's types: a tier
// that runs something else would have sets of a type of its own. The other fields
// say what the context must have, whatever serves it.
type Set struct {
	hpu.Handlers
	Rulesets  []matcher.Ruleset // used if the configuration names none
	Triggered bool              // the host activates them, never packets: there can be no rulesets
	State     int               // bytes of state for each message
	Initial   []byte            // what the state starts with
	Memory    int               // bytes of HPU memory of the context, at least
	HPUMemory int               // bytes of HPU memory of each HPU, at least
	Queue     bool              // they use an application: activate defaults to attach
	Window    bool              // messages go to the context's first window: there must be one
	Timestamp bool              // packets carry their time of arrival
	Timer     time.Duration     // default period of Timer

	// Sequence and VHPUs say which packets of a message must be handled one after the
	// other: those that start in the same block of Sequence bytes, and those of all
	// blocks that go to the same of VHPUs virtual HPUs. The policy must be blocked-rr
	// with these numbers, or message. 0: there is no such condition.
	Sequence uint32
	VHPUs    int

	// Reserved is the memory that the handlers have allocated, in bytes by purpose. It
	// counts like the context's HPU memory.
	Reserved map[string]int64
}

// ReservedBytes returns the sum of Reserved.
func (s *Set) ReservedBytes() (sum int64) {
	for _, n := range s.Reserved {
		sum += n
	}
	return sum
}

// A Factory makes a set for a context.
type Factory func(Params) (*Set, error)

// ErrMemory is wrapped by errors of sets that need more memory than they may have.
var ErrMemory = ddt.ErrMemory

// An Env describes the context that a set is made for. A field that is 0 is not known.
type Env struct {
	HPUs     int   // of the NIC
	Messages int   // most in flight, in the kernel and here; their slots are 0 to Messages-1
	Window   int64 // size of the largest window that handlers may write; -1: there is none
	Memory   int64 // bytes that the set may have in Reserved, or it fails with ErrMemory; -1: none
}

// An EnvFactory is a Factory of a set that depends on the context.
type EnvFactory func(Params, Env) (*Set, error)

// A Registration is a set that was registered.
type Registration struct {
	Name string
	Help string // one line
	New  EnvFactory
}

var (
	mu   sync.Mutex
	sets = map[string]Registration{}
)

// Register gives a set a name. It is for init functions: it panics if the name is taken.
func Register(name, help string, f Factory) {
	var g EnvFactory
	if f != nil {
		g = func(p Params, _ Env) (*Set, error) { return f(p) }
	}
	RegisterEnv(name, help, g)
}

// RegisterEnv is Register for a set that depends on its context.
func RegisterEnv(name, help string, f EnvFactory) {
	mu.Lock()
	defer mu.Unlock()
	if _, taken := sets[name]; taken || name == "" || f == nil {
		panic(fmt.Sprintf("handlers: Register(%q): no name, no factory, or registered twice", name))
	}
	sets[name] = Registration{name, help, f}
}

// Lookup returns the set of a name.
func Lookup(name string) (Registration, bool) {
	mu.Lock()
	defer mu.Unlock()
	r, ok := sets[name]
	return r, ok
}

// All returns all sets, sorted by name.
func All() []Registration {
	mu.Lock()
	defer mu.Unlock()
	var all []Registration
	for _, r := range sets {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b Registration) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
